"""The stages as operators of torch: for ``torch.compile``, the profiler and the FLOP counter.

``import msattn.ops`` registers ``torch.ops.msattn.store_kv``, ``store_index_k``, ``index_select``,
``attend`` and ``attend_out``. They take tensors and numbers alone: a cache is its pool, the name of
its format and its scales (None: 1); a plan is its three tensors and its host bounds. Given the
tensors of a living plan, an operator uses that plan, its tiles and workspaces; given others, it
makes one for the call. Nothing has a gradient.

The functions of this module take caches and plans apart and call the operators. They are for
compiled functions, which keep an operator as it is; elsewhere the stages take less host time.

The FLOP counter sees shapes and bounds, not lengths, and counts an upper bound of the useful work:
a token attends to topk full blocks, or to ``max_seq_len`` keys where those are fewer, and scores
``max_seq_len`` keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as memoized
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, custom_op, infer_schema, register_fake
from torch.utils.flop_counter import register_flop_formula

from .attend import State
from .attend import attend as attend_stage
from .batch import Batch
from .cache import IndexCache, KVCache, Scale
from .checks import require_tensor
from .config import BLOCK_SIZE, MSAConfig
from .indexer import index_select as index_select_stage
from .plan import Plan, find_plan, make_plan
from .store import store_index_k as store_index_k_stage
from .store import store_kv as store_kv_stage

NAMESPACE = __package__.replace(".", "_")
"""``msattn``; a copy of the package under another name has operators of its own."""

_OPS = getattr(torch.ops, NAMESPACE)


def store_kv(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """:func:`msattn.store_kv` as an operator."""
    _OPS.store_kv(k, v, *_cache_arguments(cache), slot_mapping)


def store_index_k(index_k: Tensor, index: IndexCache, slot_mapping: Tensor) -> None:
    """:func:`msattn.store_index_k` as an operator."""
    compact = _compact_pool(index)
    _OPS.store_index_k(index_k, index.tensor, index.format.name, slot_mapping, compact)


def index_select(index_q: Tensor, index: IndexCache, plan: Plan) -> Tensor:
    """:func:`msattn.index_select` as an operator."""
    config = plan.config
    block_ids: Tensor = _OPS.index_select(
        index_q,
        index.tensor,
        index.format.name,
        *_plan_arguments(plan),
        config.topk,
        config.init_blocks,
        config.local_blocks,
        _compact_pool(index),
    )
    return block_ids


def attend(
    q: Tensor,
    cache: KVCache,
    block_ids: Tensor,
    plan: Plan,
    *,
    softmax_scale: float | None = None,
    q_scale: Scale | None = None,
) -> State:
    """:func:`msattn.attend` with ``return_lse=True`` as an operator."""
    state: State = _OPS.attend(
        q,
        *_cache_arguments(cache),
        block_ids,
        *_plan_arguments(plan),
        softmax_scale,
        _factor(q_scale, q.device),
    )
    return state


def attend_out(
    q: Tensor,
    cache: KVCache,
    block_ids: Tensor,
    plan: Plan,
    *,
    out: Tensor,
    lse_out: Tensor | None = None,
    softmax_scale: float | None = None,
    q_scale: Scale | None = None,
) -> None:
    """:func:`msattn.attend` into the caller's memory as an operator."""
    _OPS.attend_out(
        q,
        *_cache_arguments(cache),
        block_ids,
        *_plan_arguments(plan),
        out,
        lse_out,
        softmax_scale,
        _factor(q_scale, q.device),
    )


def _cache_arguments(cache: KVCache) -> tuple[list[Tensor], str, Tensor | None, Tensor | None]:
    pool = [*cache.tensor] if isinstance(cache.tensor, tuple) else [cache.tensor]
    k_scale, v_scale = (_factor(scale, cache.device) for scale in (cache.k_scale, cache.v_scale))
    return pool, cache.format.name, k_scale, v_scale


def _compact_pool(index: IndexCache) -> Tensor | None:
    return None if index.compact is None else index.compact.tensor


def _plan_arguments(plan: Plan) -> tuple[Tensor, Tensor, Tensor, int, int]:
    return (*plan.tensors, plan.max_query_len, plan.max_seq_len)


def _factor(scale: Scale | None, device: torch.device) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return None if scale == 1.0 else torch.full((), scale, dtype=torch.float32, device=device)


_LIBRARY = Library(NAMESPACE, "FRAGMENT")


def _in_place(*mutated: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """custom_op for what returns nothing: counting versions of arguments, it would take 60 us."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.removeprefix("_")
        _LIBRARY.define(name + infer_schema(function, mutates_args=mutated))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


@_in_place("pool")
def _store_kv(
    k: Tensor,
    v: Tensor,
    pool: Sequence[Tensor],
    kv_format: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
) -> None:
    _, heads, dim = _sizes("k", k, "T", "Hkv", "D")
    cache = _kv_cache(pool, kv_format, k_scale, v_scale, _config(heads, heads, dim))
    store_kv_stage(k, v, cache, slot_mapping)


@_in_place("pool", "compact")
def _store_index_k(
    index_k: Tensor,
    pool: Tensor,
    index_format: str,
    slot_mapping: Tensor,
    compact: Tensor | None = None,
) -> None:
    _, _, dim = _sizes("pool", pool, "pages", "tokens", "Di")
    index = IndexCache.from_tensor(pool, _config(1, 1, dim), index_format, compact=compact)
    store_index_k_stage(index_k, index, slot_mapping)


@custom_op(f"{NAMESPACE}::index_select", mutates_args=())
def _index_select(
    index_q: Tensor,
    pool: Tensor,
    index_format: str,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    compact: Tensor | None = None,
) -> Tensor:
    rows, heads, dim = _sizes("index_q", index_q, "T", "Hi", "Di")
    config = _config(heads, heads, dim, topk, init_blocks, local_blocks)
    index = IndexCache.from_tensor(pool, config, index_format, compact=compact)
    batch = (cu_seqlens_q, seq_lens, page_table, max_query_len, max_seq_len)
    return index_select_stage(index_q, index, _plan(*batch, config, index_format, rows))


@custom_op(f"{NAMESPACE}::attend", mutates_args=())
def _attend(
    q: Tensor,
    pool: Sequence[Tensor],
    kv_format: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_ids: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float | None,
    q_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, heads, dim = _sizes("q", q, "T", "Hq", "D")
    config = _config(heads, _sizes("block_ids", block_ids, "T", "Hkv", "K")[1], dim)
    batch = (cu_seqlens_q, seq_lens, page_table, max_query_len, max_seq_len)
    return attend_stage(
        q,
        _kv_cache(pool, kv_format, k_scale, v_scale, config),
        block_ids,
        _plan(*batch, config, kv_format, rows),
        softmax_scale=softmax_scale,
        q_scale=q_scale,
        return_lse=True,
    )


@_in_place("out", "lse_out")
def _attend_out(
    q: Tensor,
    pool: Sequence[Tensor],
    kv_format: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_ids: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    lse_out: Tensor | None,
    softmax_scale: float | None,
    q_scale: Tensor | None,
) -> None:
    rows, heads, dim = _sizes("q", q, "T", "Hq", "D")
    config = _config(heads, _sizes("block_ids", block_ids, "T", "Hkv", "K")[1], dim)
    batch = (cu_seqlens_q, seq_lens, page_table, max_query_len, max_seq_len)
    attend_stage(
        q,
        _kv_cache(pool, kv_format, k_scale, v_scale, config),
        block_ids,
        _plan(*batch, config, kv_format, rows),
        softmax_scale=softmax_scale,
        q_scale=q_scale,
        out=out,
        lse_out=lse_out,
    )


def _sizes(name: str, x: Tensor, *labels: str) -> torch.Size:
    return require_tensor(name, x, shape=dict.fromkeys(labels)).shape


@memoized
def _config(
    num_q_heads: int,
    num_kv_heads: int,
    dim: int,
    topk: int = 1,
    init_blocks: int = 0,
    local_blocks: int = 0,
) -> MSAConfig:
    """What the shapes of tensors say of a model; an operator looks at nothing else of it."""
    return MSAConfig(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_index_heads=num_kv_heads,
        head_dim=dim,
        index_head_dim=dim,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )


def _kv_cache(
    pool: Sequence[Tensor],
    kv_format: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    config: MSAConfig,
) -> KVCache:
    whole: Any = pool[0] if len(pool) == 1 else pool
    return KVCache.from_tensor(whole, config, kv_format, k_scale=k_scale, v_scale=v_scale)


def _plan(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    config: MSAConfig,
    kv_format: str,
    rows: int,
) -> Plan:
    """The plan that owns the tensors, else one for this call."""
    plan = find_plan(cu_seqlens_q, seq_lens, page_table)
    if plan is None:
        bounds = {"max_query_len": max_query_len, "max_seq_len": max_seq_len}
        plan = make_plan(Batch(cu_seqlens_q, seq_lens, page_table, **bounds), config, kv_format)
        plan.max_rows = min(plan.max_rows, rows)
    return plan


def _fake_store_kv(k: Tensor, v: Tensor, *_: Any) -> None:
    torch._check(k.dim() == 3 and v.dim() == 3, lambda: "k, v: expected shape [T, Hkv, D]")


def _fake_store_index_k(index_k: Tensor, pool: Tensor, *_: Any) -> None:
    torch._check(pool.dim() == 3, lambda: "pool: expected shape [pages, 128, Di]")


def _fake_index_select(index_q: Tensor, *arguments: Any) -> Tensor:
    torch._check(index_q.dim() == 3, lambda: "index_q: expected shape [T, Hi, Di]")
    topk: int = arguments[7]
    return index_q.new_empty((*index_q.shape[:2], topk), dtype=torch.int32)


def _fake_attend(q: Tensor, *arguments: Any) -> State:
    _check_attend(q, arguments[4])
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake_attend_out(q: Tensor, *arguments: Any) -> None:
    _check_attend(q, arguments[4])


def _check_attend(q: Tensor, block_ids: Tensor) -> None:
    torch._check(q.dim() == 3, lambda: "q: expected shape [T, Hq, D]")
    torch._check(block_ids.dim() == 3, lambda: "block_ids: expected shape [T, Hkv, K]")
    torch._check(block_ids.dtype == torch.int32, lambda: "block_ids: expected dtype torch.int32")
    torch._check(q.shape[0] == block_ids.shape[0], lambda: "block_ids: expected as many rows as q")


_FAKES: dict[str, Callable[..., Any]] = {
    "store_kv": _fake_store_kv,
    "store_index_k": _fake_store_index_k,
    "index_select": _fake_index_select,
    "attend": _fake_attend,
    "attend_out": _fake_attend_out,
}
for _name, _fake in _FAKES.items():
    register_fake(f"{NAMESPACE}::{_name}", _fake)


@register_flop_formula(_OPS.index_select)
def _index_select_flops(index_q: torch.Size, *arguments: Any, **_: Any) -> int:
    rows, heads, dim = index_q
    max_seq_len = arguments[6]
    return int(2 * rows * heads * dim * max_seq_len)


@register_flop_formula([_OPS.attend, _OPS.attend_out])
def _attend_flops(q: torch.Size, *arguments: Any, **_: Any) -> int:
    rows, heads, dim = q
    block_ids, max_seq_len = arguments[4], arguments[9]
    return int(4 * rows * heads * dim * min(block_ids[2] * BLOCK_SIZE, max_seq_len))
