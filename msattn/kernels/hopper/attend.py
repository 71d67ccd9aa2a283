"""Stage 4 on Hopper, in Gluon: decode, verification and short prompts in equal shares; for prefill,
union tiles, and KV-major where tokens share little.

The twin, ``kernels/triton/attend.py``, serves pools whose pages the copy engine cannot read: those
with a factor for each slot, and in prefill narrow ones that are too large to be converted once; and
the decode steps in which it is as fast. Its KV-major schedule serves models of few query heads for
each KV head.
"""

from __future__ import annotations

from typing import Any

import torch

from ...cache import KVCache, Scale
from ...plan import Plan
from ..triton import attend as twin
from ..triton import attend_kv_major as twin_kv_major
from ..triton import attend_union, dequantize
from ..triton.recording import decline
from . import attend_decode as decode
from . import attend_kv_major as kv_major
from . import attend_rows as few_rows
from . import attend_union as union
from .page_ring import can_read
from .support import MAX_FEW_QUERIES, MIN_QUERY_LEN

FEW_TOKENS = 256
"""Of a step with short prompts, up to which KV-major is no alternative: where its launches return
at once, they take 9 us, a seventh of the time."""


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
    attend_by = _attend_many
    if plan.max_query_len <= MAX_FEW_QUERIES:
        attend_by = _attend_few
    elif few_rows.pays_for_prompt(plan, block_ids.shape[2]) and _is_read(q, cache, out):
        attend_by = _attend_short
    attend_by(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)


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
    slots = block_ids.shape[2]
    tile, copies = union.choose(plan, slots), dequantize.pays(cache, plan)
    is_prompt = plan.max_query_len >= MIN_QUERY_LEN
    if not is_prompt or tile is None or not (copies or union.can_read(cache)):
        twin.attend(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        return
    lists = attend_union.make_lists(block_ids, cache, plan, tile.tokens, tile.each, of_copy=copies)
    pool, page_table, tails, scratch_bytes = _make_pool(q, cache, plan, lists, copies=copies)
    queries = _for_bulk_copies(q, pool.format.storage_dtype)
    own = _Output(out, lse)
    may_yield = twin_kv_major.can_serve(plan, slots)
    rest = (softmax_scale, q_scale, own.out, own.lse)
    union.attend(queries, pool, plan, tile, lists, *rest, may_yield=may_yield, tails=tails)
    if may_yield:
        picks = (pool, page_table, block_ids, plan, *rest, lists.overlap, tile.cost)
        _attend_by_block(queries, *picks, tails=tails, scratch_bytes=scratch_bytes)
    own.copy_back()


def _attend_short(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """The launches of a prompt whose tiles are too few: in equal shares, or by block."""
    slots = block_ids.shape[2]
    tile, copies = few_rows.choose(plan, slots), dequantize.pays(cache, plan)
    if tile is None:
        twin.attend(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        return
    tokens = tile.tokens
    may_yield = plan.max_rows > FEW_TOKENS and twin_kv_major.can_serve(plan, slots)
    if not may_yield or not (copies or union.can_read(cache)):
        lists = attend_union.make_lists(block_ids, cache, plan, tokens)
        few_rows.attend(q, cache, plan, tile, lists, softmax_scale, q_scale, out, lse)
        return
    lists = attend_union.make_lists(block_ids, cache, plan, tokens, tile.each, for_copy=copies)
    own = _Output(out, lse)
    rest = (softmax_scale, q_scale, own.out, own.lse)
    few_rows.attend(q, cache, plan, tile, lists, *rest, may_yield=True)
    pool, page_table, tails, scratch_bytes = _make_pool(
        q, cache, plan, lists, copies=copies, union_tokens=tile.cost
    )
    queries = _for_bulk_copies(q, pool.format.storage_dtype)
    picks = (pool, page_table, block_ids, plan, *rest, lists.overlap, tile.cost)
    _attend_by_block(queries, *picks, tails=tails, scratch_bytes=scratch_bytes)
    own.copy_back()


def _make_pool(
    q: torch.Tensor,
    cache: KVCache,
    plan: Plan,
    lists: attend_union.Lists,
    *,
    copies: bool,
    union_tokens: float = 0,
) -> tuple[KVCache, torch.Tensor, union.Tails | None, int]:
    """What is read, its page table, tails, and the bytes of scratch that are left."""
    if not copies:
        return cache, plan.page_table, union.make_tails(cache, plan), twin.SCRATCH_BYTES
    # A copy has zeros behind each request's last token.
    pool, table = dequantize.dequantize(cache, plan, q.dtype, lists, union_tokens=union_tokens)
    return pool, table, None, twin.SCRATCH_BYTES - pool.k.nbytes - pool.v.nbytes


def _attend_by_block(
    queries: torch.Tensor,
    pool: KVCache,
    page_table: torch.Tensor,
    block_ids: torch.Tensor,
    plan: Plan,
    *rest: Any,
    tails: union.Tails | None,
    scratch_bytes: int,
) -> None:
    """The other schedule's launches; they return at once where union tiles do not."""
    picks = (queries, pool, page_table, block_ids, plan, *rest)
    if kv_major.can_serve(plan, block_ids.shape[2]):
        partial_bytes = min(scratch_bytes, kv_major.PARTIAL_BYTES)
        kv_major.attend(*picks, tails=tails, partial_bytes=partial_bytes)
    else:
        partial_bytes = min(scratch_bytes, twin.PARTIAL_BYTES)
        twin_kv_major.attend(*picks, partial_bytes=partial_bytes)


class _Output:
    """Contiguous outputs: the caller's own where they are."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        self.asked = [x for x in (out, lse) if x is not None]
        self.out, self.lse = out.contiguous(), None if lse is None else lse.contiguous()

    def copy_back(self) -> None:
        for asked, made in zip(self.asked, (self.out, self.lse), strict=False):
            if made is not None and made is not asked:
                decline()
                asked.copy_(made)


def _for_bulk_copies(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The queries where the copy engine can fetch them; a copy, if they are not there."""
    queries = q.to(dtype).contiguous()
    queries = queries.clone() if queries.data_ptr() % 16 else queries
    if queries is not q:
        decline()
    return queries


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
    is_read = _is_read(q, cache, out)
    rows = few_rows.choose(plan, slots)
    if rows is not None and is_read and few_rows.pays(plan, slots):
        lists = attend_union.make_lists(block_ids, cache, plan, rows.tokens)
        few_rows.attend(q, cache, plan, rows, lists, softmax_scale, q_scale, out, lse)
        return
    tile = decode.choose(plan, slots)
    if tile is None or not (is_read and decode.pays(plan, tile)):
        twin.attend(q, cache, block_ids, plan, softmax_scale, q_scale, out, lse)
        return
    decode.attend(q, cache, block_ids, plan, tile, softmax_scale, q_scale, out, lse)


def _is_read(q: torch.Tensor, cache: KVCache, out: torch.Tensor) -> bool:
    """By the kernels in equal shares, for which a token's heads lie within 2^31 elements."""
    return can_read(cache) and all(x.shape[1] * x.stride(1) < 1 << 31 for x in (q, out))
