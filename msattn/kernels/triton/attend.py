"""Stage 4 in Triton: union tiles where neighbours share their blocks, KV-major where they do not.

Which of the two runs is decided on the device, by the measured overlap of the selection: both are
launched, and the programs of one return at once.
"""

from __future__ import annotations

import torch

from ...cache import KVCache, Scale
from ...plan import Plan
from . import attend_kv_major, attend_union, dequantize

MIN_QUERY_LEN = 64
"""Query tokens of a request from which the KV-major schedule can pay: enough picks for a page."""
PARTIAL_BYTES = 280 << 20
"""Partial outputs of the KV-major schedule."""
SCRATCH_BYTES = 420 << 20
"""These and a narrow pool's copy. With lists and LSEs, 16,384 tokens take less than 512 MiB."""


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
    """:func:`msattn.attend`"""
    slots, page_table = block_ids.shape[2], plan.page_table
    config = attend_union.choose(plan, slots)
    rest = (softmax_scale, q_scale, out, lse)
    if config.tokens == 1 and slots <= attend_union.MAX_LIST:
        attend_union.attend(q, cache, page_table, block_ids, plan, config, None, *rest)
        return
    partial_bytes, copies = PARTIAL_BYTES, dequantize.pays(cache, plan)
    tokens = config.tokens
    may_yield = plan.max_query_len >= MIN_QUERY_LEN and attend_kv_major.can_serve(plan, slots)
    part = tokens if may_yield else 0
    lists = attend_union.make_lists(block_ids, cache, plan, tokens, part, of_copy=copies)
    if copies:
        cache, page_table = dequantize.dequantize(cache, plan, q.dtype, lists)
        partial_bytes = min(PARTIAL_BYTES, SCRATCH_BYTES - cache.k.nbytes - cache.v.nbytes)
    attend_union.attend(
        q, cache, page_table, block_ids, plan, config, lists, *rest, may_yield=may_yield
    )
    if may_yield:
        attend_kv_major.attend(
            q,
            cache,
            page_table,
            block_ids,
            plan,
            *rest,
            lists.overlap,
            tokens,
            partial_bytes=partial_bytes,
        )
