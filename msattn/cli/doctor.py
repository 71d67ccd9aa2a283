"""``msattn doctor``: what is installed, what is in the machine, and what serves each stage.

It must run where nothing else does: only the standard library is imported at module level, and
every probe reports its failure in place of its answer. Where torch itself cannot be imported, so
that the package cannot be either, run this file by its path: ``python msattn/cli/doctor.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

# What a person calls a package -> the distributions that may bring it.
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "triton-windows"),
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "flashinfer": ("flashinfer-python",),
}
INDEX_STAGES = ("store_index_k", "index_scores", "index_select")  # their format is the index keys'
CACHELESS_STAGES = ("select_blocks", "merge_states")  # the same whatever the format
NOT_A_FORMAT = "-"  # a cell of the matrix: the stage never meets this format
MISSING = "missing"  # the version of a package that is not installed
NOBODY = "none"  # a cell of the matrix: no implementation can serve


@dataclass(frozen=True)
class Section:
    """A part of the report: a table if it has a header, else name and value a line."""

    title: str
    rows: list[tuple[str, ...]]
    header: tuple[str, ...] = ()
    note: str = ""


def collect(device: str | None = None) -> dict[str, Any]:
    """The report, as plain data for JSON.

    Args:
        device: whose implementations are listed; default: the first CUDA device, else the CPU.
    """
    return {
        "versions": _probe(_versions),
        "machine": _probe(_machine),
        "devices": _probe(_devices),
        "environment": _probe(_environment),
        "serving": _probe(lambda: _serving(device)),
    }


def sections(report: dict[str, Any]) -> list[Section]:
    """The report, for people."""
    machine = [*_pairs(report["machine"]), *_device_rows(report["devices"])]
    return [
        Section("Versions", _pairs(report["versions"])),
        Section("Machine", machine),
        Section("Environment variables", _pairs(report["environment"])),
        *_serving_sections(report["serving"]),
    ]


def print_plain(parts: Sequence[Section]) -> None:
    """Aligned text, for pipes, bug reports and machines without rich."""
    for part in parts:
        print(part.title)
        table = [part.header, *part.rows] if part.header else part.rows
        columns = max((len(row) for row in table), default=0)
        widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(columns)]
        for row in table:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            print("  " + "  ".join(cells).rstrip())
        if part.note:
            print(f"  {part.note}")
        print()


def run(
    device: str | None, as_json: bool, show: Callable[[Sequence[Section]], None] = print_plain
) -> int:
    """Print the report; returns the exit code."""
    devices = available_devices()
    if device is not None and device not in devices:
        print(f"error: {device_problem(device, devices)}", file=sys.stderr)
        return 2
    report = collect(device)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(sections(report))
    return 0


def available_devices() -> list[str]:
    """What ``--device`` can be on this machine."""
    try:
        import torch

        count = torch.cuda.device_count()
    except Exception:  # no torch, no CUDA device
        count = 0
    return ["cpu", *["cuda"][:count], *(f"cuda:{index}" for index in range(count))]


def device_problem(device: str, devices: Sequence[str]) -> str:
    """The sentence that says why ``device`` is not one of ``devices``."""
    return f"--device: expected {' or '.join(devices)} on this machine, got {device!r}"


def main(argv: Sequence[str] | None = None) -> int:
    """``doctor`` by itself, with the options that the command line gives it."""
    parser = argparse.ArgumentParser("msattn doctor", description="What serves what, and why not.")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    return run(options.device, options.json)


def _probe(function: Callable[[], Any]) -> Any:
    """What ``function`` finds, or ``{"error": why it found nothing}``."""
    try:
        return function()
    except Exception as error:  # whatever a broken installation raises is the finding
        return {"error": _one_line(error)}


def _one_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}"


def _versions() -> dict[str, str]:
    versions = {"msattn": _own_version(), "python": platform.python_version()}
    versions.update({name: _version_of(name, PACKAGES[name]) for name in PACKAGES})
    return versions


def _own_version() -> str:
    """From the source beside this file: the metadata of an editable install may be older."""
    source = (Path(__file__).resolve().parents[1] / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return found.group(1) if found else "unknown"


def _version_of(name: str, distributions: Sequence[str]) -> str:
    """The installed version, and whether torch imports and transformers knows the model."""
    for distribution in distributions:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        remark = {"torch": _torch_remark, "transformers": _transformers_remark}.get(name)
        return f"{version} {remark()}".rstrip() if remark else version
    return MISSING


def _torch_remark() -> str:
    try:
        import torch
    except Exception as error:  # a broken build raises OSError as well as ImportError
        return f"(cannot be imported: {_one_line(error)})"
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return "".join(f"({name} {version})" for name, version in builds.items() if version)


def _transformers_remark() -> str:
    """Looked up on disk: importing transformers takes seconds, and may be what is broken."""
    spec = util.find_spec("transformers")
    folders = (spec.submodule_search_locations or []) if spec else []
    if any((Path(folder) / "models" / "minimax_m3_vl").is_dir() for folder in folders):
        return ""
    return "(without MiniMax-M3, which came with 5.16.1)"


def _machine() -> dict[str, str]:
    return {"platform": platform.platform(), "cpu": f"{_cpu_name()}, {os.cpu_count()} cores"}


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _devices() -> list[dict[str, Any]]:
    import torch

    return [_probe_device(index) for index in range(torch.cuda.device_count())]


def _probe_device(index: int) -> dict[str, Any]:
    import torch

    device = f"cuda:{index}"
    try:
        found = torch.cuda.get_device_properties(index)
    except Exception as error:  # one sick device does not hide the others
        return {"device": device, "what": _one_line(error)}
    capability, gib = f"{found.major}.{found.minor}", found.total_memory / 2**30
    return {
        "device": device,
        "what": f"{found.name}, capability {capability}, {gib:.0f} GiB",
        "name": found.name,
        "capability": capability,
        "memory_bytes": found.total_memory,
    }


def _environment() -> dict[str, str]:
    """Every MSATTN_* variable that is set, and those that msattn would read."""
    source = (Path(__file__).resolve().parents[1] / "env.py").read_text(encoding="utf-8")
    known = re.findall(r"\bMSATTN_[A-Z_]+\b", source)
    found = {name: os.environ.get(name, "not set") for name in known}
    for name in sorted(os.environ):
        if name.startswith("MSATTN_") and name not in found:
            found[name] = f"{os.environ[name]} (msattn reads no such variable)"
    return found


def _serving(device: str | None) -> dict[str, Any]:
    """Which implementation ``impl="auto"`` takes for each stage and format, and why not others."""
    import torch

    from .. import KV_FORMATS, env
    from ..dispatch import IMPLEMENTATION_NAMES, STAGES

    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    order = IMPLEMENTATION_NAMES if env.IMPL == "auto" else (env.IMPL,)
    matrix: dict[str, dict[str, str]] = {stage: {} for stage in STAGES}
    refusals: list[dict[str, str]] = []
    for stage, row in matrix.items():
        for name, kv_format in KV_FORMATS.items():
            if stage in INDEX_STAGES and not kv_format.in_index:
                row[name] = NOT_A_FORMAT
                continue
            against = {impl: _reasons(stage, impl, device, name) for impl in order}
            row[name] = next((impl for impl in order if not against[impl]), NOBODY)
            refusals += [
                {"impl": impl, "stage": stage, "kv_format": name, "reason": reason}
                for impl, reasons in against.items()
                for reason in reasons
            ]
    return {"device": device, "impl": env.IMPL, "matrix": matrix, "why_not": refusals}


def _reasons(stage: str, impl: str, device: str, kv_format: str) -> list[str]:
    """``why_not`` for MiniMax-M3's shapes; a probe that raises is a reason too."""
    from .. import MSAConfig, why_not

    stored = None if stage in CACHELESS_STAGES else kv_format
    try:
        return why_not(stage, impl=impl, device=device, config=MSAConfig(), kv_format=stored)
    except Exception as error:  # a kernel package that cannot be imported, an unknown MSATTN_IMPL
        return [_one_line(error)]


def _pairs(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of a probe's answer: name and value, or why there is none."""
    if "error" in found:
        return [("not available", found["error"])]
    return list(found.items())


def _device_rows(found: Any) -> list[tuple[str, ...]]:
    if isinstance(found, dict):
        return [("cuda", found["error"])]
    return [(d["device"], d["what"]) for d in found] or [("cuda", "no device")]


def _serving_sections(serving: dict[str, Any]) -> list[Section]:
    title = "What serves each stage"
    if "error" in serving:
        return [Section(title, _pairs(serving))]
    matrix = serving["matrix"]
    formats = tuple(next(iter(matrix.values())))
    rows = [(stage, *cells.values()) for stage, cells in matrix.items()]
    note = (
        "For MiniMax-M3's shapes. The format is the KV cache's, for index keys the index cache's."
    )
    title += f" on {serving['device']}"
    if serving["impl"] != "auto":
        title += f", with MSATTN_IMPL={serving['impl']}"
    found = [Section(title, rows, ("stage", *formats), note)]
    reasons = _grouped(serving)
    if reasons:
        found.append(Section("Why not the others", reasons, ("implementation", "reason", "where")))
    return found


def _grouped(serving: dict[str, Any]) -> list[tuple[str, ...]]:
    """(implementation, reason, where); reasons that differ in their stage's name count as one."""
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for refusal in serving["why_not"]:
        stage = refusal["stage"]
        reason = re.sub(rf"\b{stage}\b", "the stage", refusal["reason"])
        stages = places.setdefault((refusal["impl"], reason), {})
        stages.setdefault(stage, []).append(refusal["kv_format"])
    matrix = serving["matrix"]
    rows = [(impl, reason, _where(stages, matrix)) for (impl, reason), stages in places.items()]
    tried = list(dict.fromkeys(impl for impl, _ in places))  # first those that are preferred
    return sorted(rows, key=lambda row: tried.index(row[0]))


def _where(stages: dict[str, list[str]], matrix: dict[str, dict[str, str]]) -> str:
    """The stages, with their formats where those are not all that the stage can meet."""
    full = {
        stage: [name for name, cell in cells.items() if cell != NOT_A_FORMAT]
        for stage, cells in matrix.items()
    }
    groups: dict[tuple[str, ...], list[str]] = {}  # formats, () = all that the stage meets
    for stage, formats in stages.items():
        groups.setdefault(() if formats == full[stage] else tuple(formats), []).append(stage)
    return "; ".join(
        ("every stage" if len(names) == len(matrix) else ", ".join(names))
        + (f" in {'/'.join(formats)}" if formats else "")
        for formats, names in groups.items()
    )


if __name__ == "__main__":
    # Run by its path: the package's folder leads sys.path, in place of this one.
    if not __package__:
        here = Path(__file__).resolve().parent
        sys.path[0] = str(here.parents[1])
        __package__ = f"{here.parent.name}.{here.name}"
    sys.exit(main())
