"""What each engine would use for MiniMax-M3: facts, for people who choose; imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..config import MSAConfig
from ..dispatch import IMPLEMENTATION_NAMES, Problem, reasons_against
from ..kv_format import KV_FORMATS, KVFormat
from ..serving import KERNELS

OWN_MSA_MAJOR = 10
"""Major compute capability of the GPUs that vLLM and SGLang have MSA kernels of their own for."""

OWN_MSA = "{} has MSA kernels of its own for this GPU"


@dataclass(frozen=True)
class Engine:
    """An engine that msattn plugs into, in the version that it was tested with."""

    name: str
    package: str  # the distribution
    version: str
    on_cpu: bool  # runs MiniMax-M3 without a GPU
    kv_dtypes: dict[str, str]  # KV format -> the engine's name of it
    index_formats: tuple[str, ...]  # that its index caches may have
    own_msa: tuple[str, ...] = ()  # formats that its own MSA kernels read, on OWN_MSA_MAJOR
    own_triton: tuple[str, ...] = ()  # formats that its own Triton kernels read, on any GPU


TRANSFORMERS = Engine(
    "transformers",
    "transformers",
    "5.17",
    True,
    {fmt: fmt for fmt in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp32")},
    ("bf16", "fp16", "fp8_e4m3", "fp32"),
)
VLLM = Engine(
    "vLLM",
    "vllm",
    "0.33",
    False,
    {
        "bf16": "bfloat16",
        "fp16": "auto",  # of an fp16 model
        "fp8_e4m3": "fp8",
        "fp8_e5m2": "fp8_e5m2",
        "nvfp4": "nvfp4",
    },
    ("bf16", "fp8_e4m3"),
    own_msa=("bf16", "fp8_e4m3", "nvfp4"),
    own_triton=("bf16", "fp8_e4m3", "fp8_e5m2"),
)
SGLANG = Engine(
    "SGLang",
    "sglang",
    "0.5.23",
    False,
    {"bf16": "bfloat16", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"},
    ("bf16", "fp8_e4m3"),
    own_msa=("bf16", "fp8_e4m3", "nvfp4"),
    own_triton=("bf16", "fp8_e4m3", "fp8_e5m2"),
)
ENGINES = (TRANSFORMERS, VLLM, SGLANG)


class Answer(NamedTuple):
    """Who would run the sparse layers, None for nobody; and why msattn would not."""

    served_by: str | None
    reasons: list[str]


def ask(
    engine: Engine,
    config: MSAConfig,
    kv_format: KVFormat,
    *,
    device: torch.device,
    index_format: KVFormat = KV_FORMATS["bf16"],
    capability: tuple[int, int] | None = None,
) -> Answer:
    """Who runs the sparse layers of a model in ``engine``, with msattn installed.

    Args:
        engine: one of :data:`ENGINES`.
        config: the model's shapes on one rank.
        kv_format: of the KV cache.
        device: ``cpu`` or ``cuda``.
        index_format: of the index keys.
        capability: of the GPU that is asked about; default: the device's own.
    """
    name = kv_format.name
    if device.type == "cpu" and not engine.on_cpu:
        return Answer(None, [f"{engine.name} runs MiniMax-M3 on GPUs alone"])
    if index_format.name not in engine.index_formats:
        has = f"(has {', '.join(engine.index_formats)})"
        return Answer(None, [f"{engine.name} has no {index_format} index keys {has}"])
    if engine.own_msa and capability is not None and capability[0] == OWN_MSA_MAJOR:
        kind = "MSA" if name in engine.own_msa else "Triton" if name in engine.own_triton else None
        served_by = kind and f"{engine.name}'s own {kind} kernels"
        return Answer(served_by, [OWN_MSA.format(engine.name)])
    if name not in engine.kv_dtypes:
        has = f"(has {', '.join(engine.kv_dtypes)})"
        return Answer(None, [f"{engine.name} has no {name} cache for MiniMax-M3 on it {has}"])
    # The reference reads lengths on the host: an engine's graphs cannot hold it.
    names = IMPLEMENTATION_NAMES if engine.on_cpu else KERNELS
    problems = _problems(config, kv_format, index_format, device, capability)
    reasons, served_by = _by_msattn(names, problems)
    if reasons and name in engine.own_triton:
        return Answer(f"{engine.name}'s own Triton kernels", reasons)
    return Answer(served_by, reasons)


def _problems(
    config: MSAConfig,
    kv_format: KVFormat,
    index_format: KVFormat,
    device: torch.device,
    capability: tuple[int, int] | None,
) -> list[Problem]:
    """What a layer computes, with queries as the model has them; an E4M3 index takes E4M3 ones."""
    fmt = kv_format.storage_dtype
    dtype = fmt if fmt in (torch.float16, torch.float32) else torch.bfloat16
    return [
        Problem(stage, device, config, of_cache, query_dtype, capability=capability)
        for stage, of_cache, query_dtype in (
            ("attend", kv_format, dtype),
            ("index_select", index_format, index_format.storage_dtype),
        )
    ]


def _by_msattn(names: Sequence[str], problems: Sequence[Problem]) -> tuple[list[str], str | None]:
    """Why msattn cannot serve all of the problems, or which of its implementations do."""
    reasons: list[str] = []
    serving: list[str] = []
    for problem in problems:
        against = {name: reasons_against(name, problem) for name in names}
        if all(against.values()):
            reasons += [f"{problem.stage} by {name}: {r}" for name in names for r in against[name]]
        else:
            serving.append(next(name for name in names if not against[name]))
    if reasons:
        return reasons, None
    return [], f"msattn, {' and '.join(dict.fromkeys(serving))}"
