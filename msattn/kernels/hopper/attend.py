"""Stage 4 on Hopper, in Gluon: decode and verification in equal shares; for prefill, union tiles,
and KV-major where tokens share little.

The twin, ``kernels/triton/attend.py``, serves pools whose pages the copy engine cannot read: those
with a factor for each slot, and narrow ones that are too large to be converted once. Its KV-major
schedule serves models of few query heads for each KV head.
"""

from __future__ import annotations

import torch

from ...cache import KVCache, Scale
from ...plan import Plan
from ..triton import attend as twin
from ..triton import attend_kv_major as twin_kv_major
from ..triton import attend_union, dequantize
from . import attend_decode as decode
from . import attend_kv_major as kv_major
from . import attend_union as union
from .support import MAX_FEW_QUERIES


def attend(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    slots, page_table = block_ids.shape[2], plan.page_table
    if plan.max_query_len <= MAX_FEW_QUERIES:
        few = (q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        twin.reissue(_attend_few, *few)
        return
    partial_bytes, has_tails = twin.PARTIAL_BYTES, True
    pool = cache
    if dequantize.pays(cache, plan):
        pool, page_table = dequantize.dequantize(cache, plan, q.dtype)
        partial_bytes = min(partial_bytes, twin.SCRATCH_BYTES - pool.k.nbytes - pool.v.nbytes)
        has_tails = False  # the copy has zeros behind each request's last token
    tile = union.choose(plan, slots)
    if tile is None or not union.can_read(pool):
        twin.attend(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        return
    queries = q.to(pool.format.storage_dtype).contiguous()
    tails = union.make_tails(pool, plan) if has_tails else None
    lists = attend_union.make_lists(block_ids, pool, page_table, plan, tile.tokens, tile.each)
    may_yield = twin_kv_major.can_serve(plan, slots)
    rest = (softmax_scale, q_scale, out, lse)
    union.attend(queries, pool, plan, tile, lists, *rest, may_yield=may_yield, tails=tails)
    if not may_yield:
        return
    picks = (pool, page_table, block_ids, plan, *rest, lists.overlap, tile.cost)
    if kv_major.can_serve(plan, slots):
        kv_major.attend(queries, *picks, tails=tails, partial_bytes=partial_bytes)
    else:
        twin_kv_major.attend(queries, *picks, partial_bytes=partial_bytes)


def _attend_few(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """The launches of a step of few query tokens for each request."""
    tile = decode.choose(plan, block_ids.shape[2])
    if tile is None or not decode.can_read(cache):
        twin.issue(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        return
    decode.attend(q, cache, block_ids, plan, tile, softmax_scale, q_scale, out, lse)
