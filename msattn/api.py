"""A whole sparse attention layer: the stages in order, on one screen."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch

from .attend import Options, State, prepare_attend
from .cache import IndexCache, KVCache, Scale
from .checks import fail, require_tensor, require_type
from .dispatch import refuse_backward
from .indexer import prepare_index_select
from .plan import Plan
from .store import prepare_store_index_k, prepare_store_kv


class LayerOptions(Options, total=False):
    """Arguments of :func:`sparse_attention` that do not decide what it returns."""

    index_plan: Plan | None
    index_slot_mapping: torch.Tensor | None


@overload
def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_q: torch.Tensor, index_k: torch.Tensor,
    cache: KVCache, index: IndexCache, plan: Plan, slot_mapping: torch.Tensor,
    *, return_lse: Literal[False] = False, **options: Unpack[LayerOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_q: torch.Tensor, index_k: torch.Tensor,
    cache: KVCache, index: IndexCache, plan: Plan, slot_mapping: torch.Tensor,
    *, return_lse: Literal[True], **options: Unpack[LayerOptions],
) -> State: ...  # fmt: skip
@overload
def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_q: torch.Tensor, index_k: torch.Tensor,
    cache: KVCache, index: IndexCache, plan: Plan, slot_mapping: torch.Tensor,
    *, return_lse: bool, **options: Unpack[LayerOptions],
) -> torch.Tensor | State: ...  # fmt: skip
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    cache: KVCache,
    index: IndexCache,
    plan: Plan,
    slot_mapping: torch.Tensor,
    *,
    index_plan: Plan | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    q_scale: Scale | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | State:
    """Store the step's keys and values, select blocks for its queries, attend over them.

    Args:
        q: ``[T, Hq, D]``; k, v: ``[T, Hkv, D]``; index_q: ``[T, Hi, Di]``; index_k: ``[T, Di]``.
            Queries and keys are normed and roped.
        cache, index: the layer's pools.
        plan: the step.
        slot_mapping: ``[T]`` int64, ``page * 128 + offset``, negative = do not store.
        index_plan, index_slot_mapping: where the index cache's pages are not the KV cache's.
        softmax_scale, q_scale, out, return_lse: as for :func:`msattn.attend`.
        impl: one for every stage.

    Returns:
        What :func:`msattn.attend` returns. Where a stage raises, none of them has written.
    """
    # By name: the stages would only speak of block_ids.
    rows = require_tensor("q", q).shape[:1]
    if require_tensor("index_q", index_q).shape[:1] != rows:
        raise fail("index_q", f"as many rows as q, {list(rows)}", list(index_q.shape[:1]))
    if index_plan is not None:
        require_type("index_plan", index_plan, Plan)
    store = prepare_store_kv(k, v, cache, slot_mapping, impl=impl)
    if require_tensor("index_k", index_k).shape[:1] != k.shape[:1]:
        raise fail("index_k", f"as many rows as k, {[k.shape[0]]}", list(index_k.shape[:1]))
    if index_slot_mapping is None:
        store_index = prepare_store_index_k(index_k, index, slot_mapping, impl=impl)
    else:
        store_index = prepare_store_index_k(
            index_k, index, index_slot_mapping, impl=impl, slots_name="index_slot_mapping"
        )
    select, block_ids = prepare_index_select(index_q, index, index_plan or plan, impl=impl)
    attend, result = prepare_attend(
        q,
        cache,
        block_ids,
        plan,
        softmax_scale=softmax_scale,
        q_scale=q_scale,
        out=out,
        return_lse=return_lse,
        impl=impl,
    )
    for launch in (store, store_index, select, attend):
        launch()
    return result if out is not None else refuse_backward("attend", result, q, k, v)
