"""The entry point ``sglang.srt.plugins``: hooks around the two functions of M3's sparse layers.

SGLang stores a step's keys and calls one of them in every sparse layer. A hook computes what the
function would, or calls it with the arguments as they came.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch

from ... import env
from ...arch import is_capturing
from ...attend import attend
from ...config import MSAConfig
from ...indexer import index_select
from ...kv_format import KVFormat
from ...warmup import warmup
from .call import Call, Kind, bind, read
from .step import PLANS, Plans

TARGET = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
"""The module with both functions, which SGLang imports from it in every call."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Put the hooks into SGLang; SGLang's plug-in loader calls this in each of its processes.

    Does nothing without SGLang or with ``MSATTN_SGLANG=0``, and nothing the second time.
    """
    if not env.SGLANG:
        return
    try:
        hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    except ModuleNotFoundError:
        return
    _register_once(hooks.HookRegistry, hooks.HookType.AROUND)


@cache
def _register_once(registry: Any, around: object) -> None:
    registry.register(f"{TARGET}.minimax_sparse_prefill", around_prefill, around)
    registry.register(f"{TARGET}.minimax_sparse_decode", around_decode, around)


def around_prefill(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``minimax_sparse_prefill``: prompts, chunks of them, several tokens to verify."""
    return _serve("prefill", original, args, kwargs)


def around_decode(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``minimax_sparse_decode``: one query token in each row of the batch."""
    return _serve("decode", original, args, kwargs)


def _serve(
    kind: Kind, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call, reasons = read(kind, bind(original, args, kwargs))
    if call is None:
        _log(f"msattn leaves sparse {kind} of MiniMax-M3 to SGLang: {'; '.join(reasons)}")
        return original(*args, **kwargs)
    _log(f"msattn serves sparse {kind} of MiniMax-M3: {call}")
    device = call.q.device
    if env.WARMUP and device.type == "cuda" and not is_capturing(device):
        formats = call.cache.format, call.index.format
        _warm_up(call.config, *formats, call.q.dtype, call.index_q.dtype, device)
    return None, run(call, PLANS)


def run(call: Call, plans: Plans) -> torch.Tensor:
    """Select blocks and attend over them: ``[T, Hq, D]``, bf16 for an fp8 query.

    Rows behind the last request's stay as they were allocated, as in SGLang's own function.
    """
    q, cache = call.q, call.cache
    out = torch.empty(
        q.shape,
        dtype=torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype,
        device=q.device,
    )
    if out.numel():
        plan = plans.get(call.step, call.config, cache.format, layer=cache.k.data_ptr())
        block_ids = index_select(call.index_q, call.index, plan)
        attend(q, cache, block_ids, plan, softmax_scale=call.softmax_scale, out=out)
    return out


@cache
def _warm_up(
    config: MSAConfig,
    kv_format: KVFormat,
    index_format: KVFormat,
    query_dtype: torch.dtype,
    index_query_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compile what serving needs, in the first step: SGLang runs one before it captures graphs."""
    _log(f"msattn compiles kernels for a {kv_format} cache; this may take minutes")
    warmup(
        config,
        kv_format,
        device=device,
        index_dtype=index_format,
        query_dtype=query_dtype,
        index_query_dtype=index_query_dtype,
    )


@lru_cache(maxsize=256)
def _log(line: str) -> None:
    """Each line once; its process and rank are SGLang's to print."""
    logger.info(line)
