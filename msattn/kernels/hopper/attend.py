"""Stage 4 on Hopper, in Gluon: decode and verification in equal shares; for prefill, union tiles,
and KV-major where tokens share little.

The twin, ``kernels/triton/attend.py``, serves pools whose pages the copy engine cannot read: those
with a factor for each slot, and in prefill narrow ones that are too large to be converted once; and
the decode steps in which it is as fast. Its KV-major schedule serves models of few query heads for
each KV head.
"""

from __future__ import annotations

import torch

from ...cache import KVCache, Scale
from ...plan import Plan
from ..triton import attend as twin
from ..triton import attend_kv_major as twin_kv_major
from ..triton import attend_union, dequantize
from ..triton.recording import decline
from . import attend_decode as decode
from . import attend_kv_major as kv_major
from . import attend_union as union
from . import attend_verify as verify
from .page_ring import can_read
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
    """:func:`msattn.attend`; a call like an earlier one has the launches of that one."""
    issue = _attend_few if plan.max_query_len <= MAX_FEW_QUERIES else _attend_many
    twin.attend_by(issue, q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)


def _attend_many(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """The launches of a prompt: both schedules, of which one returns at once."""
    slots, page_table = block_ids.shape[2], plan.page_table
    tile, copies = union.choose(plan, slots), dequantize.pays(cache, plan)
    if tile is None or not (copies or union.can_read(cache)):
        twin.issue(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        return
    pool, scratch_bytes, tails = cache, twin.SCRATCH_BYTES, None
    lists = attend_union.make_lists(block_ids, cache, plan, tile.tokens, tile.each, of_copy=copies)
    if copies:
        # It has zeros behind each request's last token.
        pool, page_table = dequantize.dequantize(cache, plan, q.dtype, lists.chosen)
        scratch_bytes -= pool.k.nbytes + pool.v.nbytes
    else:
        tails = union.make_tails(cache, plan)
    queries = _for_bulk_copies(q, pool.format.storage_dtype)
    own_out, own_lse = out.contiguous(), None if lse is None else lse.contiguous()
    if queries is not q or own_out is not out or own_lse is not lse:
        decline()
    may_yield = twin_kv_major.can_serve(plan, slots)
    rest = (softmax_scale, q_scale, own_out, own_lse)
    union.attend(queries, pool, plan, tile, lists, *rest, may_yield=may_yield, tails=tails)
    if may_yield:
        picks = (pool, page_table, block_ids, plan, *rest, lists.overlap, tile.cost)
        if kv_major.can_serve(plan, slots):
            partial_bytes = min(scratch_bytes, kv_major.PARTIAL_BYTES)
            kv_major.attend(queries, *picks, tails=tails, partial_bytes=partial_bytes)
        else:
            partial_bytes = min(scratch_bytes, twin.PARTIAL_BYTES)
            twin_kv_major.attend(queries, *picks, partial_bytes=partial_bytes)
    if own_out is not out:
        out.copy_(own_out)
    if own_lse is not lse and own_lse is not None and lse is not None:
        lse.copy_(own_lse)


def _for_bulk_copies(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The queries where the copy engine can fetch them; a copy, if they are not there."""
    queries = q.to(dtype).contiguous()
    return queries.clone() if queries.data_ptr() % 16 else queries


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
    slots = block_ids.shape[2]
    is_read = can_read(cache) and _are_near(q, out)
    rows = verify.choose(plan, slots)
    if rows is not None and is_read and verify.pays(plan, slots):
        lists = attend_union.make_lists(block_ids, cache, plan, rows.tokens, rows.tokens)
        verify.attend(q, cache, plan, rows, lists, softmax_scale, q_scale, out, lse)
        return
    tile = decode.choose(plan, slots)
    if tile is None or not (is_read and decode.pays(plan, tile, slots)):
        twin.issue(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        return
    decode.attend(q, cache, block_ids, plan, tile, softmax_scale, q_scale, out, lse)


def _are_near(*tensors: torch.Tensor) -> bool:
    """From one head of a token to another it is less than 2^31 elements."""
    return all(x.shape[1] * x.stride(1) < 1 << 31 for x in tensors)
