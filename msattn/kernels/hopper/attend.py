"""Stage 4 on Hopper, for prefill: union tiles in Gluon; KV-major, and narrow pools, as the twin.

The twin, ``kernels/triton/attend.py``, serves pools whose pages the copy engine cannot read: those
with a factor for each slot, and narrow ones that are too large to be converted once.
"""

from __future__ import annotations

import torch

from ...cache import KVCache, Scale
from ...plan import Plan
from ..triton import attend as twin
from ..triton import attend_kv_major, attend_union, dequantize
from . import attend_union as union


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
    lists = attend_union.make_lists(block_ids, pool, page_table, plan, tile.tokens, tile.each)
    may_yield = attend_kv_major.can_serve(plan, slots)
    rest = (softmax_scale, q_scale, out, lse)
    union.attend(q, pool, plan, tile, lists, *rest, may_yield=may_yield, has_tails=has_tails)
    if may_yield:
        attend_kv_major.attend(
            q,
            pool,
            page_table,
            block_ids,
            plan,
            *rest,
            lists.overlap,
            tile.cost,
            partial_bytes=partial_bytes,
        )
