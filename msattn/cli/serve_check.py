"""``msattn serve-check``: what each engine would use for a model, and how much context fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..config import MSAConfig
from ..integrations.engines import ENGINES, ask
from ..kv_format import KV_FORMATS, KVFormat
from .doctor import MISSING, NOBODY, Section
from .errors import CliError

GPUS = {
    "t4": (7, 5),
    "a100": (8, 0),
    "a10": (8, 6),
    "rtx4090": (8, 9),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "b300": (10, 3),
    "rtx5090": (12, 0),
}
"""Compute capabilities by NVIDIA's tables; others are given as sm_90 or 9.0."""

UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}

SPARSE, DENSE = "sparse", "dense"


@dataclass(frozen=True)
class Options:
    """A command line."""

    model: str  # "tiny", or a folder with config.json
    gpu: str | None  # a name, a capability or "cpu"; None: what is here
    kv_formats: tuple[str, ...]  # none: all
    index_dtype: str
    memory: str
    tp_size: int
    as_json: bool


@dataclass(frozen=True)
class Target:
    """Where the model would run."""

    name: str
    device: torch.device
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Model:
    """What of a model decides how its caches are read and how large they are."""

    name: str
    config: MSAConfig  # of one rank
    sparse_layers: int
    dense_layers: int

    def bytes_per_token(self, kv_format: KVFormat, index_format: KVFormat) -> int:
        """K and V of all layers, and the index keys of the sparse ones, on one rank."""
        layers = self.sparse_layers + self.dense_layers
        index = self.config.index_head_dim * index_format.storage_dtype.itemsize
        return layers * kv_format.bytes_per_token(self.config) + self.sparse_layers * index


def run(options: Options, show: Callable[[Sequence[Section]], None]) -> int:
    """Print the report; returns the exit code: 1 where nobody serves any of what was asked."""
    report = collect(options)
    if options.as_json:
        print(json.dumps(report, indent=2))
    else:
        show(sections(report))
    answers = [a for kv in report["kv_formats"].values() for a in kv["engines"].values()]
    return 0 if any(a["served_by"] for a in answers) else 1


def collect(options: Options) -> dict[str, Any]:
    """The report, as plain data for JSON."""
    target = read_target(options.gpu)
    model = read_model(options.model, options.tp_size)
    index_format = _parse("--index-dtype", options.index_dtype, for_index=True)
    memory = read_memory(options.memory)
    names = options.kv_formats or tuple(KV_FORMATS)
    formats = [_parse("--kv-format", name) for name in names]
    config = model.config
    return {
        "model": {
            "name": model.name,
            "tensor_parallel": options.tp_size,
            "heads": f"{config.num_q_heads} query, {config.num_kv_heads} KV on a rank",
            "selection": f"{config.topk} blocks, {config.init_blocks} first and "
            f"{config.local_blocks} last ones forced",
            "layers": f"{model.sparse_layers} sparse, {model.dense_layers} dense",
        },
        "target": {
            "name": target.name,
            "capability": ".".join(map(str, target.capability)) if target.capability else None,
            "memory_for_caches": memory,
            "index_keys": index_format.name,
        },
        "engines": {
            engine.name: {
                "tested": engine.version,
                "installed": _installed(engine.package),
            }
            for engine in ENGINES
        },
        "kv_formats": {
            fmt.name: _of_format(model, fmt, index_format, target, memory) for fmt in formats
        },
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _of_format(
    model: Model, fmt: KVFormat, index_format: KVFormat, target: Target, memory: int
) -> dict[str, Any]:
    size = model.bytes_per_token(fmt, index_format)
    answers = {
        engine.name: ask(
            engine,
            model.config,
            fmt,
            device=target.device,
            index_format=index_format,
            capability=target.capability,
        )
        for engine in ENGINES
    }
    return {
        "bytes_per_token": size,
        "tokens": memory // size // 128 * 128,  # whole pages
        "engines": {name: answer._asdict() for name, answer in answers.items()},
    }


def sections(report: dict[str, Any]) -> list[Section]:
    """The report, for people."""
    target, names = report["target"], list(report["engines"])
    gibibytes = target["memory_for_caches"] / 2**30
    rows: list[tuple[str, ...]] = []
    reasons: list[tuple[str, ...]] = []
    for fmt, found in report["kv_formats"].items():
        answers = found["engines"]
        cells = (answers[name]["served_by"] or NOBODY for name in names)
        rows.append((fmt, f"{found['bytes_per_token']:,}", f"{found['tokens']:,}", *cells))
        reasons += [
            (fmt, name, "; ".join(answers[name]["reasons"]))
            for name in names
            if answers[name]["reasons"]
        ]
    capability = f" (compute capability {target['capability']})" if target["capability"] else ""
    installed: list[tuple[str, ...]] = [
        (name, f"tested with {engine['tested']}", f"here: {engine['installed'] or MISSING}")
        for name, engine in report["engines"].items()
    ]
    return [
        Section("Model", [(key.replace("_", " "), str(v)) for key, v in report["model"].items()]),
        Section("Engines", installed),
        Section(
            f"Sparse layers on {target['name']}{capability}",
            rows,
            ("KV format", "bytes/\ntoken", "tokens\nthat fit", *names),
            f"In {gibibytes:,.1f} GiB for the caches of one rank, index keys in "
            f"{target['index_keys']} included.",
        ),
        *([Section("Why not msattn", reasons, ("KV format", "engine", "reason"))] * bool(reasons)),
    ]


def read_target(gpu: str | None) -> Target:
    """The device of this machine, or the GPU that is asked about."""
    if gpu is None:
        if not torch.cuda.is_available():
            return Target("this CPU", torch.device("cpu"), None)
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        return Target(name, torch.device("cuda"), capability)
    if gpu.lower() == "cpu":
        return Target("a CPU", torch.device("cpu"), None)
    key = re.sub(r"[\s_-]", "", gpu.lower()).removeprefix("nvidia")
    if key in GPUS:
        return Target(gpu.upper(), torch.device("cuda"), GPUS[key])
    match = re.fullmatch(r"(?:sm)?(\d{1,2})\.?(\d)", key)
    if match is None:
        raise CliError(f"--gpu: expected cpu, {', '.join(GPUS)}, sm_90 or 9.0, got {gpu!r}")
    capability = int(match[1]), int(match[2])
    return Target(f"sm_{match[1]}{match[2]}", torch.device("cuda"), capability)


def read_memory(text: str) -> int:
    """``80GiB``, ``40 GB``, ``500MiB``; a bare number is GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)?", text.strip().lower())
    size = int(float(match[1]) * UNITS[match[2] or "gib"]) if match else 0
    if not size:
        raise CliError(f"--memory: expected a size above 0, as 80GiB or 500MB, got {text!r}")
    return size


def read_model(name: str, tp_size: int) -> Model:
    """The shapes of the tiny model, or of a folder's ``config.json``; no weights are read."""
    text = _tiny() if name == "tiny" else _config_file(Path(name))
    text = text.get("text_config") or text
    try:
        config = MSAConfig.from_hf(text, tp_size)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CliError(f"MODEL {name}: {error}") from error
    kinds = _layer_kinds(text)
    return Model(
        "tiny MiniMax-M3 (random weights)" if name == "tiny" else Path(name).resolve().name,
        config,
        kinds.count(SPARSE),
        kinds.count(DENSE),
    )


def _layer_kinds(text: dict[str, Any]) -> list[str]:
    """By transformers' layer_types, or the checkpoint's sparse_attention_freq."""
    kinds = text.get("layer_types")
    if kinds is not None:
        return [DENSE if kind == "full_attention" else SPARSE for kind in kinds]
    frequency = (text.get("sparse_attention_config") or {}).get("sparse_attention_freq")
    if frequency is not None:
        return [SPARSE if of_layer else DENSE for of_layer in frequency]
    return [SPARSE] * int(text.get("num_hidden_layers", 1))


def _tiny() -> dict[str, Any]:
    try:
        from ..integrations.transformers.tiny import tiny_config
    except ImportError as error:
        raise CliError(f"MODEL tiny needs transformers: {error}") from None
    values: dict[str, Any] = tiny_config().to_dict()
    return values


def _config_file(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        expected = '"tiny" or a folder with config.json'
        raise CliError(f"MODEL: expected {expected}, got {folder}") from None
    except ValueError:
        raise CliError(f"MODEL: {path} is not valid JSON") from None
    if not isinstance(config, dict):
        raise CliError(f"MODEL: {path} holds no JSON object")
    return config


def _parse(option: str, name: str, *, for_index: bool = False) -> KVFormat:
    try:
        return KVFormat.parse(name, name=option, for_index=for_index)
    except (ValueError, NotImplementedError) as error:
        raise CliError(str(error)) from error
