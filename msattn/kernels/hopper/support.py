"""What the Hopper kernels can serve. Imports no Triton, so that asking costs nothing."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from ... import env
from ...arch import capability

if TYPE_CHECKING:
    from ...dispatch import Problem

CAPABILITY = (9, 0)
TRITON_VERSIONS = ("3.6.",)
"""Gluon is experimental: its names change with Triton's minor version."""
MAX_FEW_QUERIES, MIN_QUERY_LEN = 16, 64
"""Query tokens of the longest request up to which it is decode or verification, and from which the
tiles of prefill are full enough to pay."""
MAX_GROUP = 64
HEAD_DIM = 128

_KV_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def why_not(problem: Problem) -> list[str]:
    """Reasons against serving ``problem`` on Hopper."""
    reasons = _device_reasons(problem.device, problem.capability)
    if not env.HOPPER:
        reasons.append("is experimental: MSATTN_HOPPER=1 switches it on")
    config, fmt, dtype = problem.config, problem.kv_format, problem.query_dtype
    if config is not None and config.head_dim != HEAD_DIM:
        reasons.append(f"head_dim={config.head_dim}; tiles have {HEAD_DIM} columns")
    if config is not None and config.group_size > MAX_GROUP:
        reasons.append(f"{config.group_size} query heads share a KV head; tiles have {MAX_GROUP}")
    if fmt is not None and fmt.name not in _KV_FORMATS:
        reasons.append(f"{fmt} caches are for the reference alone")
    if dtype is not None and dtype not in _QUERY_DTYPES:
        reasons.append(f"queries are {dtype}; tensor cores take 16 bits")
    length = problem.max_query_len
    if length is not None and MAX_FEW_QUERIES < length < MIN_QUERY_LEN:
        between = f"{MAX_FEW_QUERIES + 1} to {MIN_QUERY_LEN - 1}"
        reasons.append(f"requests of {between} query tokens fill no tile of decode or prefill")
    return reasons


def _device_reasons(device: torch.device, asked: tuple[int, int] | None) -> list[str]:
    if device.type != "cuda":
        return [f"runs on Hopper GPUs, not on {device.type}"]
    found = asked or capability(device)
    if found != CAPABILITY:
        return [f"needs compute capability 9.0, the device has {_text(found)}"]
    triton = _triton_version()
    if not triton.startswith(TRITON_VERSIONS):
        return [f"written for Triton {TRITON_VERSIONS[0]}x, here is {triton or 'none'}"]
    return []


def _text(found: tuple[int, int] | None) -> str:
    return "none" if found is None else f"{found[0]}.{found[1]}"


@cache
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
