"""What the Hopper kernels can serve. Imports no Triton, so that asking costs nothing."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from ...arch import absence, capability

if TYPE_CHECKING:
    from ...dispatch import Problem
    from ...kv_format import KVFormat

CAPABILITY = (9, 0)
TRITON_VERSIONS = ("3.6.",)
"""Gluon is experimental: its names change with Triton's minor version."""
MAX_FEW_QUERIES, MIN_QUERY_LEN = 16, 64
"""Query tokens of the longest request up to which it is decode or verification, and from which the
tiles of prefill are full enough to pay."""
MAX_GROUP = 64
HEAD_DIM = 128
INDEX_ROWS = 256
"""Of a tile of scores: query tokens x index heads."""
MAX_INDEX_HEADS = 16

_KV_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def why_not(problem: Problem) -> list[str]:
    """Reasons against serving ``problem``, attention, on Hopper."""
    reasons = _device_reasons(problem.device, problem.capability)
    config, fmt, dtype = problem.config, problem.kv_format, problem.query_dtype
    if config is not None and config.head_dim != HEAD_DIM:
        reasons.append(f"head_dim={config.head_dim}; tiles have {HEAD_DIM} columns")
    if config is not None and config.group_size > MAX_GROUP:
        reasons.append(f"{config.group_size} query heads share a KV head; tiles have {MAX_GROUP}")
    if fmt is not None and fmt.name not in _KV_FORMATS:
        reasons.append(f"{fmt} caches are for the reference alone")
    if dtype is not None and dtype not in _QUERY_DTYPES:
        reasons.append(f"queries are {dtype}; tensor cores take 16 bits")
    return reasons


def indexer_why_not(problem: Problem) -> list[str]:
    """Reasons against serving ``problem``, block scores with or without selection, on Hopper."""
    reasons = _device_reasons(problem.device, problem.capability)
    config, fmt, dtype = problem.config, problem.kv_format, problem.query_dtype
    if config is not None:
        heads, tokens = config.num_index_heads, problem.max_query_len
        if config.index_head_dim != HEAD_DIM:
            reasons.append(f"index_head_dim={config.index_head_dim}; tiles have {HEAD_DIM} columns")
        if heads > MAX_INDEX_HEADS:
            reasons.append(f"{heads} index heads; a tile has tokens of {MAX_INDEX_HEADS} at most")
        enough = INDEX_ROWS >> (max(heads, 1) - 1).bit_length()
        if tokens is not None and tokens < enough:
            reasons.append(
                f"requests of fewer than {enough} query tokens do not fill its tiles; decode is "
                "bound by memory, and the Triton kernel reads the keys as fast"
            )
    if fmt is not None and fmt.name not in _KV_FORMATS:
        reasons.append(f"{fmt} caches are for the reference alone")
    if dtype is not None and dtype not in _QUERY_DTYPES:
        reasons.append(f"queries are {dtype}; tensor cores take 16 bits")
    elif fmt is not None and not _multiply_as_keys(dtype, fmt):
        reasons.append(f"{dtype} queries are not multiplied with {fmt} keys as these are stored")
    return reasons


def _multiply_as_keys(query: torch.dtype | None, keys: KVFormat) -> bool:
    """Queries become what the keys are, exactly. NVFP4 is no format of index keys."""
    exact = (keys.storage_dtype, torch.float8_e4m3fn)
    return query is None or keys.scale_group > 0 or query in exact


def _device_reasons(device: torch.device, asked: tuple[int, int] | None) -> list[str]:
    if device.type != "cuda":
        return [f"runs on Hopper GPUs, not on {device.type}"]
    found = asked or capability(device)
    if found is None and (missing := absence(device)):
        return missing
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
