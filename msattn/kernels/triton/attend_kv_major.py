"""KV-major attention: each page is loaded once for all the tokens that chose it.

For selections that neighbouring tokens share little of. A pick is one (token, slot) with a visible
block. Three small kernels turn the block ids into a reverse index (the picks of every block, cut
into items of at most ITEM_PICKS, so that a block that every token chose is many items); then, for
one KV head (or all, of a short prompt) and one chunk of tokens after the other, each item computes
the partial output of its picks, and a combine merges the partial outputs of each token. Picks of a
block stand in any order: a partial output does not depend on the picks beside it, so the result is
the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...cache import KVCache, Scale
from ...plan import Plan
from . import launch
from .recording import start, zero
from .tiles import (
    BLOCK,
    NVFP4,
    NVFP4_FACTOR,
    column_of,
    follow,
    fp8_to_fp16,
    load_k_tile,
    load_scale,
    load_v_tile,
    shares_little,
    signed,
)

ITEM_PICKS = 64
STAGES = 2
COMBINE_WARPS = 4
COMBINE_STAGES = tl.constexpr(4)
SLOT_BITS = tl.constexpr(8)
"""Of an entry of the reverse index; the others are the token's."""
SLOT_MASK = tl.constexpr((1 << SLOT_BITS.value) - 1)
MAX_SLOTS = 1 << SLOT_BITS.value
MAX_TOKENS = 1 << 23
TILE_ROWS = 64
"""Query rows of a tile: what one warpgroup's registers hold beside a page."""
SEEN_WHOLE = tl.constexpr(1 << 30)
"""Limit of an item whose picks see all of its block."""
MAX_ROWS = 1 << 20
"""Rows of the reverse index: with more, to zero and scan it would cost as much as to attend."""


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "num_rows",
        "num_requests",
        "num_blocks",
        "num_pages",
        "num_slots",
        "chunk_tokens",
    ]
)
def _count_kernel(
    block_ids_ptr,  # [T, Hkv, K] int32
    stride_ids_t,
    stride_ids_h,
    stride_ids_k,
    row_request_ptr,  # [T] int32
    cu_seqlens_ptr,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    counts_ptr,  # [chunks, Hkv, R, B] int32, zeros
    ranks_ptr,  # [T, Hkv, K] int32: which of its block's picks, -1 = no pick
    lse_ptr,  # [T, Hkv, K, GROUP] fp32: -inf where there is no pick
    overlap_ptr,  # [2] int32: entries and picks of the union lists
    num_rows,
    num_requests,
    num_blocks,
    num_pages,
    num_slots,
    chunk_tokens,
    UNION_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """counts[chunk, head, request, block] = picks; one program: TOKENS tokens of one head."""
    follow(FOLLOWS)
    if not shares_little(overlap_ptr, UNION_TOKENS):
        return
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    request = tl.load(row_request_ptr + row, mask=row < num_rows, other=-1)
    owned = request >= 0
    end_row = tl.load(cu_seqlens_ptr + request + 1, mask=owned, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=owned, other=0)
    position = tl.where(owned, seq_len - (end_row - row), -1)

    ids = block_ids_ptr + (row.to(tl.int64) * stride_ids_t + head * stride_ids_h)[:, None]
    live = owned[:, None] & (slot < num_slots)[None, :]
    block = tl.load(ids + slot[None, :] * stride_ids_k, mask=live, other=-1)
    seen = (block >= 0) & (block <= (position >> 7)[:, None]) & (block < num_blocks)
    table = page_table_ptr + (request * stride_table)[:, None] + block
    page = tl.load(table, mask=seen, other=-1)
    seen = seen & (page >= 0) & (page < num_pages)
    earlier = (slot[None, :, None] > slot[None, None, :]) & seen[:, None, :]
    same = block[:, :, None] == block[:, None, :]
    seen = seen & (tl.sum((earlier & same).to(tl.int32), 2) == 0)

    chunk = row // chunk_tokens
    csr_row = (((chunk * num_heads + head) * num_requests + request) * num_blocks)[:, None] + block
    rank = tl.atomic_add(counts_ptr + csr_row, 1, mask=seen, sem="relaxed")
    out = (row.to(tl.int64) * num_heads + head) * num_slots
    out = out[:, None] + slot[None, :]
    tl.store(ranks_ptr + out, tl.where(seen, rank, -1), mask=live)
    no_pick = live & ~seen
    for member in tl.static_range(GROUP):
        tl.store(lse_ptr + out * GROUP + member, float("-inf"), mask=no_pick)


@triton.jit(do_not_specialize=["rows_per_head"])
def _starts_kernel(
    counts_ptr,  # [chunks * Hkv, R * B] int32
    starts_ptr,  # [chunks * Hkv, R * B, 2] int32: a row's first entry and first item
    totals_ptr,  # [chunks * Hkv, 2] int32, zeros: entries, items
    overlap_ptr,
    rows_per_head,
    UNION_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ITEM: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """starts = entries, and items of ITEM of them, before a row; one program: ROWS rows."""
    follow(FOLLOWS)
    if not shares_little(overlap_ptr, UNION_TOKENS):
        return
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = group.to(tl.int64) * rows_per_head + row
    count = tl.load(counts_ptr + at, mask=row < rows_per_head, other=0)
    items = (count + ITEM - 1) // ITEM
    first_entry = tl.atomic_add(totals_ptr + group * 2, tl.sum(count, 0), sem="relaxed")
    first_item = tl.atomic_add(totals_ptr + group * 2 + 1, tl.sum(items, 0), sem="relaxed")
    entry = first_entry + tl.cumsum(count, 0) - count
    item = first_item + tl.cumsum(items, 0) - items
    tl.store(starts_ptr + at * 2, entry, mask=row < rows_per_head)
    tl.store(starts_ptr + at * 2 + 1, item, mask=row < rows_per_head)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_requests",
        "num_blocks",
        "num_slots",
        "chunk_tokens",
        "max_entries",
        "max_items",
    ]
)
def _fill_kernel(
    block_ids_ptr,
    stride_ids_t,
    stride_ids_h,
    stride_ids_k,
    row_request_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    counts_ptr,
    ranks_ptr,
    starts_ptr,
    entries_ptr,  # [chunks * Hkv, max_entries] int32: token << SLOT_BITS | slot
    items_ptr,  # [chunks * Hkv, max_items, 4] int32: row of counts, first entry, picks, limit
    overlap_ptr,
    num_rows,
    num_requests,
    num_blocks,
    num_slots,
    chunk_tokens,
    max_entries,
    max_items,
    UNION_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    ITEM: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """entries[start of the block + rank] = pick; every ITEM picks of a block are an item.

    A pick sees the keys of its block up to its token + the item's limit. One program: TOKENS tokens
    of a head.
    """
    follow(FOLLOWS)
    if not shares_little(overlap_ptr, UNION_TOKENS):
        return
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    request = tl.load(row_request_ptr + row, mask=row < num_rows, other=-1)
    live = (request >= 0)[:, None] & (slot < num_slots)[None, :]
    pick = (row.to(tl.int64) * num_heads + head)[:, None] * num_slots + slot[None, :]
    rank = tl.load(ranks_ptr + pick, mask=live, other=-1)
    ids = block_ids_ptr + (row.to(tl.int64) * stride_ids_t + head * stride_ids_h)[:, None]
    block = tl.load(ids + slot[None, :] * stride_ids_k, mask=rank >= 0, other=0)
    group = (row // chunk_tokens) * num_heads + head
    csr_row = ((group * num_requests + request) * num_blocks)[:, None] + block
    picked = rank >= 0
    start = tl.load(starts_ptr + csr_row * 2, mask=picked, other=0)
    out = entries_ptr + group.to(tl.int64)[:, None] * max_entries + start + rank
    tl.store(out, (row[:, None] << SLOT_BITS) | slot[None, :], mask=picked)

    # The pick at which an item begins writes it.
    begins = picked & (rank % ITEM == 0)
    item = tl.load(starts_ptr + csr_row * 2 + 1, mask=begins, other=0) + rank // ITEM
    count = tl.load(counts_ptr + csr_row, mask=begins, other=0)
    owned = request >= 0
    first_row = tl.load(cu_seqlens_ptr + request, mask=owned, other=0)
    end_row = tl.load(cu_seqlens_ptr + request + 1, mask=owned, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=owned, other=0)
    # Tokens of the step stand from here on: only their own blocks are seen in part.
    first_position = seq_len - (end_row - first_row)
    in_part = (block + 1) * BLOCK > first_position[:, None] + 1
    limit = tl.where(in_part, (seq_len - end_row)[:, None] - block * BLOCK, SEEN_WHOLE)
    out = items_ptr + (group.to(tl.int64)[:, None] * max_items + item) * 4
    tl.store(out, (request * num_blocks)[:, None] + block, mask=begins)
    tl.store(out + 1, start + rank, mask=begins)
    tl.store(out + 2, tl.minimum(count - rank, ITEM), mask=begins)
    tl.store(out + 3, limit, mask=begins)


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "group",
        "head",
        "first_token",
        "num_blocks",
        "num_slots",
        "max_items",
        "max_entries",
    ]
)
def _attend_items_kernel(
    q_ptr,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    k_ptr,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    v_ptr,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    q_scale,
    k_scale,
    v_scale,
    stride_k_scale,
    stride_k_scale_slot,
    stride_v_scale,
    stride_v_scale_slot,
    softmax_scale_log2,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    items_ptr,
    entries_ptr,
    totals_ptr,
    partial_out_ptr,  # [heads at once, chunk tokens * K, GROUP, D]
    lse_ptr,  # [T, Hkv, K, GROUP] fp32, base 2
    overlap_ptr,
    group,  # chunk * Hkv + head
    head,  # the first one of the launch
    num_heads,
    first_token,
    num_blocks,
    num_slots,
    max_items,
    max_entries,
    UNION_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,  # picks of a tile
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    FP8_QUERY: tl.constexpr,
    SIGN: tl.constexpr,
    Q_SCALE_ON_DEVICE: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr,
    V_SCALE_ON_DEVICE: tl.constexpr,
    K_SCALE_PER_SLOT: tl.constexpr,
    V_SCALE_PER_SLOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """partial = softmax(scale * q K^T) V over the keys of one block, for each of its picks

    One program: one item, at most ITEM_PICKS picks of one block.
    """
    if not shares_little(overlap_ptr, UNION_TOKENS):
        return
    head += tl.program_id(1)
    group += tl.program_id(1)
    partial_out_ptr += tl.program_id(1) * max_entries.to(tl.int64) * GROUP * D
    if tl.program_id(0) >= tl.load(totals_ptr + group * 2 + 1):
        return
    item = items_ptr + (group.to(tl.int64) * max_items + tl.program_id(0)) * 4
    csr_row, begin, picks = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    limit = tl.load(item + 3)
    request, block = csr_row // num_blocks, csr_row % num_blocks
    page = tl.load(page_table_ptr + request * stride_table + block).to(tl.int64)
    num_keys = tl.load(seq_lens_ptr + request) - block * BLOCK

    k_base = k_ptr + page * stride_k_page + head.to(tl.int64) * stride_k_head
    v_base = v_ptr + page * stride_v_page + head.to(tl.int64) * stride_v_head
    k = load_k_tile(k_base, stride_k_token, num_keys, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D)
    v = load_v_tile(v_base, stride_v_token, num_keys, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D)

    r, d, n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    column = column_of(d, FORMAT, D)
    if K_SCALE_PER_SLOT:
        slot = (page * BLOCK + n) * stride_k_scale_slot
        slot += head.to(tl.int64) * stride_k_scale
        key_scale = tl.load(k_scale + slot, mask=n < num_keys, other=0.0)
    if V_SCALE_PER_SLOT:
        slot = (page * BLOCK + n) * stride_v_scale_slot
        slot += head.to(tl.int64) * stride_v_scale
        value_scale = tl.load(v_scale + slot, mask=n < num_keys, other=0.0)
    scale = softmax_scale_log2 * load_scale(q_scale, Q_SCALE_ON_DEVICE)
    out_scale = 1.0
    if not K_SCALE_PER_SLOT:
        scale *= load_scale(k_scale, K_SCALE_ON_DEVICE)
    if not V_SCALE_PER_SLOT:
        out_scale *= load_scale(v_scale, V_SCALE_ON_DEVICE)
    if FORMAT == NVFP4:
        scale *= NVFP4_FACTOR
        out_scale *= NVFP4_FACTOR

    member = r % GROUP_ROWS
    q_head = head * GROUP + member
    entries = entries_ptr + group.to(tl.int64) * max_entries + begin
    for i in tl.range(0, picks, TOKENS, num_stages=STAGES):
        at = i + r // GROUP_ROWS
        live = (at < picks) & (r // GROUP_ROWS < TOKENS) & (member < GROUP)
        pick = tl.load(entries + at, mask=live, other=0)
        row = pick >> SLOT_BITS
        q = tl.load(
            q_ptr
            + (row.to(tl.int64) * stride_q_t + q_head.to(tl.int64) * stride_q_h)[:, None]
            + column[None, :] * stride_q_d,
            mask=live[:, None],
            other=0,
        )
        if FP8_QUERY:
            q = fp8_to_fp16(q, False, NATIVE_FP8)
        s = tl.dot(signed(q.to(COMPUTE), SIGN), k)
        if K_SCALE_PER_SLOT:
            s *= key_scale[None, :]
        # Every pick sees the first key of its block: no row is empty.
        if limit < SEEN_WHOLE:
            s = tl.where(n[None, :] <= (row + limit)[:, None], s, float("-inf"))
        maximum = tl.max(s, 1) * scale
        p = tl.exp2(s * scale - maximum[:, None])
        total = tl.sum(p, 1)
        if V_SCALE_PER_SLOT:
            p *= value_scale[None, :]
        o = tl.dot(p.to(COMPUTE), v) * (out_scale / total)[:, None]
        slot = pick & SLOT_MASK
        partial = ((row - first_token) * num_slots + slot).to(tl.int64) * GROUP + member
        lse = ((row.to(tl.int64) * num_heads + head) * num_slots + slot) * GROUP + member
        tl.store(
            partial_out_ptr + partial[:, None] * D + d[None, :],
            o.to(partial_out_ptr.dtype.element_ty),
            mask=live[:, None],
        )
        tl.store(lse_ptr + lse, maximum + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["num_rows", "head", "first_token", "num_slots", "max_entries"])
def _combine_kernel(
    partial_out_ptr,  # [heads at once, chunk tokens * K, GROUP, D]
    lse_ptr,  # [T, Hkv, K, GROUP] fp32, base 2
    row_request_ptr,
    out_ptr,
    stride_out_t,
    stride_out_h,
    stride_out_d,
    out_lse_ptr,
    stride_lse_t,
    stride_lse_h,
    overlap_ptr,
    num_rows,
    head,  # the first one of the launch
    num_heads,
    first_token,
    num_slots,
    max_entries,
    UNION_TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """out = sum of partial outputs, weighted by 2^(lse - max); one program: a token and KV head."""
    if not shares_little(overlap_ptr, UNION_TOKENS):
        return
    head += tl.program_id(1)
    partial_out_ptr += tl.program_id(1) * max_entries.to(tl.int64) * GROUP * D
    row = first_token + tl.program_id(0)
    if row >= num_rows:
        return
    if tl.load(row_request_ptr + row) < 0:
        return
    slot, member, d = tl.arange(0, SLOTS), tl.arange(0, GROUP_ROWS), tl.arange(0, D)
    column = column_of(d, FORMAT, D)
    live = member < GROUP
    lses = lse_ptr + (row.to(tl.int64) * num_heads + head) * num_slots * GROUP
    all_lses = tl.load(
        lses + slot[:, None] * GROUP + member[None, :],
        mask=(slot < num_slots)[:, None] & live[None, :],
        other=float("-inf"),
    )
    maximum = tl.max(all_lses, 0)
    empty = maximum == float("-inf")
    shift = tl.where(empty, 0.0, maximum)
    total = tl.sum(tl.exp2(all_lses - shift[None, :]), 0)
    scale = 1.0 / tl.where(empty, 1.0, total)
    acc = tl.zeros((GROUP_ROWS, D), tl.float32)
    parts = partial_out_ptr + tl.program_id(0).to(tl.int64) * num_slots * GROUP * D
    for i in tl.range(0, num_slots, num_stages=COMBINE_STAGES):
        lse = tl.load(lses + i * GROUP + member, mask=live, other=float("-inf"))
        part = parts + (i * GROUP + member)[:, None] * D + d[None, :]
        # Loaded whether used or not: the load need not wait for the weight.
        part = tl.load(part, mask=live[:, None], other=0.0, eviction_policy="evict_first")
        part = part.to(tl.float32)
        part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
        acc += part * (tl.exp2(lse - shift) * scale)[:, None]
    q_head = head * GROUP + member
    out = out_ptr + row.to(tl.int64) * stride_out_t + (q_head.to(tl.int64) * stride_out_h)[:, None]
    tl.store(
        out + column[None, :] * stride_out_d,
        acc.to(out_ptr.dtype.element_ty),
        mask=live[:, None],
    )
    if HAS_LSE:
        lse = (shift + tl.log2(total)) * 0.6931471805599453
        at = row.to(tl.int64) * stride_lse_t + q_head.to(tl.int64) * stride_lse_h
        tl.store(out_lse_ptr + at, tl.where(empty, float("-inf"), lse), mask=live)


@dataclass(frozen=True, slots=True)
class ReverseIndex:
    """The picks of every block, for each chunk of tokens and KV head."""

    chunk_tokens: int
    num_chunks: int
    heads_at_once: int
    lse: torch.Tensor  # [T, Hkv, K, GROUP] fp32: -inf where there is no pick
    items: torch.Tensor  # [chunks * Hkv, max_items, 4] int32
    entries: torch.Tensor  # [chunks * Hkv, chunk_tokens * K] int32
    totals: torch.Tensor  # [chunks * Hkv, 2] int32
    progress: torch.Tensor  # [chunks * Hkv, 2] int32: zeros, for who attends


def can_serve(plan: Plan, slots: int) -> bool:
    """The reverse index of the plan's bounds is small enough, and its entries hold the picks."""
    rows = plan.num_requests * plan.num_blocks * plan.config.num_kv_heads
    return rows <= MAX_ROWS and plan.max_rows <= MAX_TOKENS and slots <= MAX_SLOTS


def attend(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    block_ids: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    overlap: torch.Tensor,
    union_tokens: int,
    *,
    partial_bytes: int,
) -> None:
    """:func:`msattn.attend`, where union tiles of ``union_tokens`` tokens yield; else nothing.

    Partial outputs take ``partial_bytes`` at most, if those of one token do.
    """
    choice = {"overlap_ptr": overlap, "UNION_TOKENS": union_tokens}
    index = reverse_index(
        block_ids, cache, page_table, plan, partial_bytes, choice, item_picks=ITEM_PICKS
    )
    for chunk in range(index.num_chunks):
        for head in range(0, plan.config.num_kv_heads, index.heads_at_once):
            _attend_chunk(
                q,
                cache,
                page_table,
                plan,
                index,
                chunk,
                head,
                softmax_scale,
                q_scale,
                out,
                lse,
                choice,
            )


def reverse_index(
    block_ids: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    plan: Plan,
    partial_bytes: int,
    choice: dict[str, object],
    *,
    item_picks: int,
) -> ReverseIndex:
    """The picks of every block in items of at most ``item_picks``, one block's side by side."""
    config, slots = plan.config, block_ids.shape[2]
    rows, heads = plan.max_rows, config.num_kv_heads
    token_bytes = slots * config.group_size * (2 * config.head_dim + 4)
    num_chunks = max(1, -(-rows * token_bytes // partial_bytes))
    chunk_tokens = max(1, -(-rows // num_chunks))
    room = partial_bytes // max(1, chunk_tokens * token_bytes)
    heads_at_once = next(n for n in range(heads, 0, -1) if heads % n == 0 and n <= max(room, 1))
    groups, blocks = num_chunks * heads, plan.num_requests * plan.num_blocks
    max_items = chunk_tokens * slots // item_picks + min(blocks, chunk_tokens * slots)

    def workspace(name: str, *shape: int) -> torch.Tensor:
        return plan.workspace(f"kv_major_{name}", shape, torch.int32)

    zeros = workspace("zeros", groups * (blocks + 4))
    zero(zeros)
    counts, totals, progress = zeros.split((groups * blocks, groups * 2, groups * 2))
    starts = workspace("starts", groups, blocks, 2)
    ranks = workspace("ranks", rows, heads, slots)
    lse = plan.workspace("kv_major_lse", (rows, heads, slots, config.group_size), torch.float32)
    items, entries = (
        workspace("items", groups, max_items, 4),
        workspace("entries", groups, chunk_tokens * slots),
    )
    padded = launch.power_of_two_above(slots)
    tokens = max(1, 128 // padded)
    request = plan.tiles(1).request
    bounds = {
        "num_rows": rows,
        "num_requests": plan.num_requests,
        "num_blocks": plan.num_blocks,
        "num_slots": slots,
        "chunk_tokens": chunk_tokens,
    }
    choice = choice | launch.follow_arguments(plan.device)
    grid = (triton.cdiv(rows, tokens), heads)
    start(
        _count_kernel,
        grid,
        block_ids,
        *block_ids.stride(),
        request,
        plan.cu_seqlens_q,
        plan.seq_lens,
        page_table,
        page_table.stride(0),
        counts,
        ranks,
        lse,
        num_pages=cache.num_pages,
        **choice,
        **bounds,
        TOKENS=tokens,
        SLOTS=padded,
        GROUP=config.group_size,
    )
    start(
        _starts_kernel,
        (triton.cdiv(blocks, 1024), groups),
        counts,
        starts,
        totals,
        rows_per_head=blocks,
        **choice,
        ROWS=1024,
        ITEM=item_picks,
    )
    start(
        _fill_kernel,
        grid,
        block_ids,
        *block_ids.stride(),
        request,
        plan.cu_seqlens_q,
        plan.seq_lens,
        counts,
        ranks,
        starts,
        entries,
        items,
        max_entries=entries.shape[1],
        max_items=max_items,
        **choice,
        **bounds,
        TOKENS=tokens,
        SLOTS=padded,
        ITEM=item_picks,
    )
    totals, progress = totals.view(groups, 2), progress.view(groups, 2)
    return ReverseIndex(
        chunk_tokens, num_chunks, heads_at_once, lse, items, entries, totals, progress
    )


def _attend_chunk(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    plan: Plan,
    index: ReverseIndex,
    chunk: int,
    head: int,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    choice: dict[str, object],
) -> None:
    """Partial outputs of a chunk of tokens and the KV heads from ``head`` on, and their merge."""
    config, slots = plan.config, index.lse.shape[2]
    group_rows = launch.power_of_two_above(config.group_size)
    tokens = max(1, TILE_ROWS // group_rows)
    shape = (
        index.heads_at_once,
        index.chunk_tokens * slots,
        config.group_size,
        config.head_dim,
    )
    dtype = torch.bfloat16 if cache.format.name == "bf16" else torch.float16
    partial_out = plan.workspace("kv_major_out", shape, dtype)
    first_token = chunk * index.chunk_tokens
    common = {
        **choice,
        "head": head,
        "num_heads": config.num_kv_heads,
        "first_token": first_token,
        "num_slots": slots,
        "max_entries": index.entries.shape[1],
        "GROUP": config.group_size,
        "GROUP_ROWS": group_rows,
        "D": config.head_dim,
    }
    start(
        _attend_items_kernel,
        (index.items.shape[1], index.heads_at_once),
        launch.raw(q),
        *q.stride(),
        *launch.pool_arguments(cache),
        **launch.scale_arguments("q_scale", q_scale, slots=False),
        **launch.scale_arguments("k_scale", cache.k_scale),
        **launch.scale_arguments("v_scale", cache.v_scale),
        **launch.softmax_arguments(softmax_scale),
        seq_lens_ptr=plan.seq_lens,
        page_table_ptr=page_table,
        stride_table=page_table.stride(0),
        items_ptr=index.items,
        entries_ptr=index.entries,
        totals_ptr=index.totals,
        partial_out_ptr=partial_out,
        lse_ptr=index.lse,
        group=chunk * config.num_kv_heads + head,
        num_blocks=plan.num_blocks,
        max_items=index.items.shape[1],
        **common,
        TOKENS=tokens,
        ROWS=max(16, tokens * group_rows),
        **launch.format_arguments(cache.format, q.device),
        FP8_QUERY=q.dtype == torch.float8_e4m3fn,
        STAGES=STAGES,
        num_warps=4,
    )
    lse_arguments = (index.lse, 0, 0) if lse is None else (lse, *lse.stride())
    start(
        _combine_kernel,
        (index.chunk_tokens, index.heads_at_once),
        partial_out,
        index.lse,
        plan.tiles(1).request,
        out,
        *out.stride(),
        *lse_arguments,
        num_rows=plan.max_rows,
        **common,
        SLOTS=launch.power_of_two_above(slots),
        FORMAT=launch.format_arguments(cache.format, q.device)["FORMAT"],
        HAS_LSE=lse is not None,
        num_warps=COMBINE_WARPS,
    )
