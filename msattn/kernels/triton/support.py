"""What the Triton kernels can serve. Imports no Triton, so that asking costs nothing."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ...arch import absence, capability

if TYPE_CHECKING:
    from ...dispatch import Problem

MIN_CAPABILITY = (8, 0)
MAX_BLOCKS = 32768
"""Blocks of a request that a selecting program holds in registers: 4 million tokens."""
MAX_HEAD_DIM = 128
"""Of attend, which holds a page's K and V in shared memory."""

_KV_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def why_not(problem: Problem) -> list[str]:
    """Reasons against serving ``problem`` with Triton."""
    reasons = _device_reasons(problem.device, problem.capability)
    config, fmt, dtype = problem.config, problem.kv_format, problem.query_dtype
    if config is not None:
        for name in ("head_dim", "index_head_dim"):
            width = getattr(config, name)
            if width & (width - 1):
                reasons.append(f"{name}={width} is not a power of two")
        if problem.stage == "attend" and config.head_dim > MAX_HEAD_DIM:
            reasons.append(f"head_dim={config.head_dim}; pages fit on chip up to {MAX_HEAD_DIM}")
    if fmt is not None and fmt.name not in _KV_FORMATS:
        reasons.append(f"{fmt} caches are for the reference alone")
    reads_queries = problem.stage in ("index_scores", "index_select", "attend")
    if reads_queries and dtype is not None and dtype not in _QUERY_DTYPES:
        reasons.append(f"queries are {dtype}; tensor cores take 16 bits")
    if problem.num_blocks is not None and problem.num_blocks > MAX_BLOCKS:
        reasons.append(f"{problem.num_blocks} blocks of a request are more than {MAX_BLOCKS}")
    return reasons


def _device_reasons(device: torch.device, asked: tuple[int, int] | None) -> list[str]:
    if not _has_triton():
        return ["triton is not installed"]
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return []
        return ["runs on a GPU (on a CPU under TRITON_INTERPRET=1, for tests)"]
    if device.type != "cuda":
        return [f"runs on CUDA and ROCm devices, not on {device.type}"]
    found = asked or capability(device)
    if found is None:  # a ROCm device, or none
        return absence(device)
    if found < MIN_CAPABILITY:
        return [f"needs compute capability 8.0, the device has {found[0]}.{found[1]}"]
    return []


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
