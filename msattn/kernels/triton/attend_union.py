"""Union tiles: neighbouring tokens of a request walk the union of the blocks that they chose.

Two launches. The first turns the block ids of a tile's tokens into a list without duplicates, with
the page of each block and the set of tokens that chose it. The second loads every listed page once
for all rows of the tile (tokens x query heads of a KV head), with an online softmax; rows that did
not choose a block, and keys that a row does not see, are masked. Few tiles (decode, verification)
split their lists over several programs; the last one to finish merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as cached
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...arch import capability, has_warpgroups, shared_memory
from ...cache import KVCache, Scale
from ...config import MSAConfig
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

TILE_ROWS = 128
"""Query rows of a tile where two warpgroups multiply; half of that where single warps do."""
_OTHER_SHARED_BYTES = 2048
MAX_LIST = 256
"""Block ids that one tile's list is made of, where the tile has more than one token."""


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "num_requests",
        "num_blocks",
        "num_pages",
        "num_slots",
        "max_list",
    ]
)
def _union_lists_kernel(
    block_ids_ptr,  # [T, Hkv, K] int32
    stride_ids_t,
    stride_ids_h,
    stride_ids_k,
    tile_request_ptr,  # [tiles] int32
    tile_row_ptr,  # [tiles] int32
    cu_seqlens_ptr,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    entries_ptr,  # [tiles, Hkv, TOKENS * K] int32: block << 16 | tokens
    pages_ptr,  # [tiles, Hkv, TOKENS * K] int32
    counts_ptr,  # [tiles, Hkv] int32
    tiles_ptr,  # [tiles, 4] int32: request, first row, end of the request's rows, KV length
    overlap_ptr,  # [2] int32, zeros: entries of all lists, once for each part, and picks; PART only
    chosen_ptr,  # [Hkv, R, B] int32, zeros, MARKS only: 1 for a block in any list
    num_requests,
    num_blocks,
    num_pages,
    num_slots,
    max_list,
    TILE: tl.constexpr,  # tokens of a tile
    PART: tl.constexpr,  # tokens of a tile that are multiplied together; 0: no overlap is asked for
    TOKENS: tl.constexpr,  # of a tile, rounded up to a power of two
    SLOTS: tl.constexpr,  # K rounded up to a power of two
    OF_COPY: tl.constexpr,  # pages are those of the copy that dequantize makes
    MARKS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """list = sorted(union of the visible, mapped blocks of a tile's tokens)

    One program: one tile and KV head.
    """
    follow(FOLLOWS)
    tile, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    request = tl.load(tile_request_ptr + tile)
    out = tile.to(tl.int64) * num_heads + head
    first_row = tl.load(tile_row_ptr + tile)
    used = request >= 0
    end_row = tl.load(cu_seqlens_ptr + request + 1, mask=used, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=used, other=0)
    if head == 0:
        tl.store(tiles_ptr + tile * 4, request)
        tl.store(tiles_ptr + tile * 4 + 1, first_row)
        tl.store(tiles_ptr + tile * 4 + 2, end_row)
        tl.store(tiles_ptr + tile * 4 + 3, seq_len)
    if not used:
        tl.store(counts_ptr + out, 0)
        return

    item = tl.arange(0, TOKENS * SLOTS)
    token, slot = item // SLOTS, item % SLOTS
    row = first_row + token
    position = seq_len - (end_row - row)
    block = tl.load(
        block_ids_ptr + row.to(tl.int64) * stride_ids_t + head * stride_ids_h + slot * stride_ids_k,
        mask=(row < end_row) & (token < TILE) & (slot < num_slots),
        other=-1,
    )
    # An arithmetic shift: position -1 sees blocks up to -1, which is none.
    seen = (block >= 0) & (block <= (position >> 7)) & (block < num_blocks)
    page = tl.load(page_table_ptr + request * stride_table + block, mask=seen, other=-1)
    seen = seen & (page >= 0) & (page < num_pages)
    absent: tl.constexpr = 0x7FFFFFFF
    key = tl.sort(tl.where(seen, block * TOKENS + token, absent))

    block, token = key // TOKENS, key % TOKENS
    listed = key != absent
    _, rank_in_run = tl.associative_scan((block, listed.to(tl.int32)), 0, _count_run)
    _, tokens = tl.associative_scan((block, 1 << token), 0, _join_run, reverse=True)
    first = listed & (rank_in_run == 1)
    at = tl.cumsum(first.to(tl.int32), 0) - 1
    page = request * num_blocks + block
    if MARKS:
        tl.store(chosen_ptr + head * num_requests * num_blocks + page, 1, mask=first)
    if not OF_COPY:
        page = tl.load(page_table_ptr + request * stride_table + block, mask=first, other=0)
    tl.store(entries_ptr + out * max_list + at, (block << 16) | tokens, mask=first)
    tl.store(pages_ptr + out * max_list + at, page, mask=first)
    count = tl.sum(first.to(tl.int32), 0)
    tl.store(counts_ptr + out, count)
    if PART > 0:
        multiplied = 0
        for part in tl.static_range(TILE // PART):
            chosen = ((tokens >> (part * PART)) & ((1 << PART) - 1)) != 0
            multiplied += tl.sum((first & chosen).to(tl.int32), 0)
        tl.atomic_add(overlap_ptr, multiplied, sem="relaxed")
        tl.atomic_add(overlap_ptr + 1, tl.sum(listed.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _count_run(block_a, count_a, block_b, count_b):
    """Number of the elements so far that have the block of the last one."""
    return block_b, tl.where(block_a == block_b, count_a + count_b, count_b)


@triton.jit
def _join_run(block_a, tokens_a, block_b, tokens_b):
    """Tokens of all elements so far that have the block of the last one."""
    return block_b, tl.where(block_a == block_b, tokens_a | tokens_b, tokens_b)


@triton.jit
def _own_page(block, slot, ids, slots, position, num_blocks, table_ptr, num_pages):
    """Page of a row's block in one of its slots; -1 if it sees none, or an earlier slot has it."""
    seen = (block >= 0) & (block <= (position >> 7)) & (block < num_blocks)
    seen = seen & (tl.sum(((ids == block) & (slots < slot)).to(tl.int32), 0) == 0)
    page = tl.load(table_ptr + block, mask=seen, other=-1)
    return tl.where(page < num_pages, page, -1)


@triton.jit
def _softmax_step(s, last_key, scale, running_max, running_sum):
    """Weights of the keys up to last_key of each row, and the running state with them in it."""
    n = tl.arange(0, BLOCK)
    s = tl.where(n[None, :] <= last_key[:, None], s, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(s, 1))
    # Rows that have seen nothing yet must not compute inf - inf.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) * scale
    p = tl.exp2(s * scale - shift[:, None])
    rescale = tl.exp2(running_max * scale - shift)
    return p, rescale, new_max, running_sum * rescale + tl.sum(p, 1)


@triton.jit(do_not_specialize=["stride_table", "max_list", "num_blocks", "num_pages", "num_slots"])
def _attend_kernel(
    q_ptr,  # [T, Hq, D]; e4m3 as bytes
    stride_q_t,
    stride_q_h,
    stride_q_d,
    k_ptr,  # the pool's K; for NVFP4 its first K slot, uint8
    stride_k_page,
    stride_k_head,
    stride_k_token,
    v_ptr,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    k_desc,  # K and V for the bulk copy engine, TMA only
    v_desc,
    q_scale,  # a number, or a pointer
    k_scale,  # a number, or a pointer to one, or to [Hkv, slots]
    v_scale,
    stride_k_scale,  # between heads, for one scale per slot
    stride_k_scale_slot,
    stride_v_scale,
    stride_v_scale_slot,
    softmax_scale_log2,  # softmax_scale * log2(e)
    tile_request_ptr,
    tile_row_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    block_ids_ptr,  # DIRECT only, as the page table
    stride_ids_t,
    stride_ids_h,
    stride_ids_k,
    page_table_ptr,
    stride_table,
    num_blocks,
    num_pages,
    num_slots,
    entries_ptr,
    pages_ptr,
    counts_ptr,
    overlap_ptr,
    out_ptr,  # [T, Hq, D]
    stride_out_t,
    stride_out_h,
    stride_out_d,
    lse_ptr,  # [T, Hq] fp32
    stride_lse_t,
    stride_lse_h,
    partial_out_ptr,  # [tiles, Hkv, SPLITS, ROWS, D] fp32
    partial_state_ptr,  # [2, tiles, Hkv, SPLITS, ROWS] fp32: maximum, sum
    arrivals_ptr,  # [tiles, Hkv] int32, zeros between launches
    max_list,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    GROUP_ROWS: tl.constexpr,  # rounded up to a power of two
    ROWS: tl.constexpr,  # TOKENS * GROUP_ROWS, at least 16
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of the matrix products
    FP8_QUERY: tl.constexpr,
    SIGN: tl.constexpr,  # of the softmax scale; the scale itself is positive
    Q_SCALE_ON_DEVICE: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr,
    V_SCALE_ON_DEVICE: tl.constexpr,
    K_SCALE_PER_SLOT: tl.constexpr,
    V_SCALE_PER_SLOT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    MAY_YIELD: tl.constexpr,
    DIRECT: tl.constexpr,  # tiles of one token walk its block ids, without a list
    SLOTS: tl.constexpr,  # K rounded up to a power of two, DIRECT only
    TMA: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
):
    """out = softmax(scale * q K^T) V over the listed blocks of each row

    One program: one tile, one KV head, one of SPLITS parts of its list.
    """
    if MAY_YIELD and shares_little(overlap_ptr, TOKENS):
        return
    head, split = tl.program_id(1), tl.program_id(2)
    # Late tiles of a prompt have the longest lists; they go first.
    num_tiles, num_heads = tl.num_programs(0), tl.num_programs(1)
    tile = num_tiles - 1 - tl.program_id(0)
    request = tl.load(tile_request_ptr + tile)
    if request < 0:
        return
    first_row = tl.load(tile_row_ptr + tile)
    end_row = tl.load(cu_seqlens_ptr + request + 1)
    seq_len = tl.load(seq_lens_ptr + request)
    group = tile.to(tl.int64) * num_heads + head

    # Rows of the tile: its tokens, and the query heads of each.
    r, d, n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    column = column_of(d, FORMAT, D)
    token, member = r // GROUP_ROWS, r % GROUP_ROWS
    row = first_row + token
    live = (row < end_row) & (token < TOKENS) & (member < GROUP)
    position = seq_len - (end_row - row)
    q_head = head * GROUP + member
    q = tl.load(
        q_ptr
        + (row.to(tl.int64) * stride_q_t + q_head.to(tl.int64) * stride_q_h)[:, None]
        + column[None, :] * stride_q_d,
        mask=live[:, None],
        other=0,
    )
    if FP8_QUERY:
        q = fp8_to_fp16(q, False, NATIVE_FP8)
    q = signed(q.to(COMPUTE), SIGN)  # [ROWS, D]

    scale = softmax_scale_log2 * load_scale(q_scale, Q_SCALE_ON_DEVICE)
    if not K_SCALE_PER_SLOT:
        scale *= load_scale(k_scale, K_SCALE_ON_DEVICE)
    if FORMAT == NVFP4:
        scale *= NVFP4_FACTOR

    if DIRECT:
        slots = tl.arange(0, SLOTS)
        own_ids = block_ids_ptr + first_row.to(tl.int64) * stride_ids_t + head * stride_ids_h
        ids = tl.load(own_ids + slots * stride_ids_k, mask=slots < num_slots, other=-1)
        own_position = seq_len - (end_row - first_row)
        own_table = page_table_ptr + request * stride_table

    running_max = tl.full((ROWS,), float("-inf"), tl.float32)
    running_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)

    count = num_slots if DIRECT else tl.load(counts_ptr + group)
    per_split = (count + SPLITS - 1) // SPLITS
    begin = split * per_split
    end = tl.minimum(begin + per_split, count)
    # The bulk copy engine reads whole tiles. A list's last page, whose tail belongs to no token, is
    # left to the loads; a row's own ids are in any order, and the tile is moved.
    whole_end = begin
    if TMA:
        whole_end = end
        if not DIRECT and begin < end:
            last_block = tl.load(entries_ptr + group * max_list + end - 1) >> 16
            if (last_block + 1) * BLOCK > seq_len:
                whole_end = end - 1
    for i in tl.range(whole_end, end, num_stages=TAIL_STAGES):
        if DIRECT:
            block = tl.load(own_ids + i * stride_ids_k)
            page = _own_page(block, i, ids, slots, own_position, num_blocks, own_table, num_pages)
            seen = page >= 0
            page = tl.where(seen, page, 0).to(tl.int64)
            first_key = block * BLOCK
            num_keys = tl.where(seen, seq_len - first_key, 0)
            chosen = live & seen
        else:
            entry = tl.load(entries_ptr + group * max_list + i)
            page = tl.load(pages_ptr + group * max_list + i).to(tl.int64)
            first_key = (entry >> 16) * BLOCK
            num_keys = seq_len - first_key
            chosen = live & (((entry >> token) & 1) != 0)
        k_base = k_ptr + page * stride_k_page + head.to(tl.int64) * stride_k_head
        k = load_k_tile(
            k_base, stride_k_token, num_keys, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D
        )  # [D, BLOCK]
        s = tl.dot(q, k)
        if K_SCALE_PER_SLOT:
            slot = (page * BLOCK + n) * stride_k_scale_slot
            slot += head.to(tl.int64) * stride_k_scale
            s *= tl.load(k_scale + slot, mask=n < num_keys, other=0.0)[None, :]
        last_key = tl.where(chosen, position - first_key, -1)
        p, rescale, running_max, running_sum = _softmax_step(
            s, last_key, scale, running_max, running_sum
        )
        if V_SCALE_PER_SLOT:
            slot = (page * BLOCK + n) * stride_v_scale_slot
            slot += head.to(tl.int64) * stride_v_scale
            p *= tl.load(v_scale + slot, mask=n < num_keys, other=0.0)[None, :]
        v_base = v_ptr + page * stride_v_page + head.to(tl.int64) * stride_v_head
        v = load_v_tile(
            v_base, stride_v_token, num_keys, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D
        )  # [BLOCK, D]
        acc = tl.dot(p.to(COMPUTE), v, acc * rescale[:, None])

    if TMA:
        for i in tl.range(begin, whole_end, num_stages=STAGES):
            first_token = 0
            if DIRECT:
                block = tl.load(own_ids + i * stride_ids_k)
                page = _own_page(
                    block, i, ids, slots, own_position, num_blocks, own_table, num_pages
                )
                chosen = live & (page >= 0)
                # The tile ends with the sequence. What lies before the page, and all of page -1,
                # the engine fills with zeros.
                first_token = tl.minimum(seq_len - block * BLOCK, BLOCK) - BLOCK
                first_key = block * BLOCK + first_token
            else:
                entry = tl.load(entries_ptr + group * max_list + i)
                page = tl.load(pages_ptr + group * max_list + i)
                chosen = live & (((entry >> token) & 1) != 0)
                first_key = (entry >> 16) * BLOCK
            k = tl.reshape(k_desc.load([page, head, first_token, 0]), (BLOCK, D))
            s = tl.dot(q, tl.trans(k))
            if DIRECT:
                s = tl.where((n + first_token >= 0)[None, :], s, float("-inf"))
            last_key = tl.where(chosen, position - first_key, -1)
            p, rescale, running_max, running_sum = _softmax_step(
                s, last_key, scale, running_max, running_sum
            )
            v = tl.reshape(v_desc.load([page, head, first_token, 0]), (BLOCK, D))
            acc = tl.dot(p.to(COMPUTE), v, acc * rescale[:, None])

    arrived = SPLITS - 1
    if SPLITS > 1:
        parts = num_tiles.to(tl.int64) * num_heads * SPLITS * ROWS
        part = (group * SPLITS + split) * ROWS + r
        tl.store(partial_out_ptr + part[:, None] * D + d[None, :], acc)
        tl.store(partial_state_ptr + part, running_max)
        tl.store(partial_state_ptr + parts + part, running_sum)
        # All of the program's stores come before its arrival.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + group, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(arrivals_ptr + group, 0)
            running_max = tl.full((ROWS,), float("-inf"), tl.float32)
            for other in tl.static_range(SPLITS):
                part = (group * SPLITS + other) * ROWS + r
                part_max = tl.load(partial_state_ptr + part, cache_modifier=".cg")
                running_max = tl.maximum(running_max, part_max)
            shift = tl.where(running_max == float("-inf"), 0.0, running_max) * scale
            running_sum = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, D), tl.float32)
            for other in tl.static_range(SPLITS):
                part = (group * SPLITS + other) * ROWS + r
                part_max = tl.load(partial_state_ptr + part, cache_modifier=".cg")
                part_sum = tl.load(partial_state_ptr + parts + part, cache_modifier=".cg")
                part_out = tl.load(
                    partial_out_ptr + part[:, None] * D + d[None, :], cache_modifier=".cg"
                )
                weight = tl.exp2(part_max * scale - shift)
                running_sum += part_sum * weight
                acc += part_out * weight[:, None]
    if arrived == SPLITS - 1:
        empty = running_sum == 0.0
        out_scale = 1.0 / tl.where(empty, 1.0, running_sum)
        if not V_SCALE_PER_SLOT:
            out_scale *= load_scale(v_scale, V_SCALE_ON_DEVICE)
        if FORMAT == NVFP4:
            out_scale *= NVFP4_FACTOR
        out = (
            out_ptr
            + (row.to(tl.int64) * stride_out_t + q_head.to(tl.int64) * stride_out_h)[:, None]
        )
        tl.store(
            out + column[None, :] * stride_out_d,
            (acc * out_scale[:, None]).to(out_ptr.dtype.element_ty),
            mask=live[:, None],
        )
        if HAS_LSE:
            lse = (running_max * scale + tl.log2(running_sum)) * 0.6931471805599453
            lse = tl.where(empty, float("-inf"), lse)
            at = row.to(tl.int64) * stride_lse_t + q_head.to(tl.int64) * stride_lse_h
            tl.store(lse_ptr + at, lse, mask=live)


@dataclass(frozen=True, slots=True)
class Config:
    """Constants of a launch of the attend kernel; no one depends on a batch's lengths."""

    tokens: int  # query tokens of a tile
    splits: int  # programs that share a tile's list
    warps: int


def choose(plan: Plan, slots: int) -> Config:
    """Constants for ``slots`` block ids per token.

    A tile has at most ``TILE_ROWS`` rows, 8 tokens (more of them share too little), and 256 block
    ids. Lists are split while there are fewer programs than the GPU runs at a time.
    """
    warpgroups = has_warpgroups(capability(plan.device))
    most_rows = TILE_ROWS if warpgroups else TILE_ROWS // 2
    tokens, rows = _tile(plan.max_query_len, plan.config.group_size, slots, most_rows)
    programs = len(plan.tiles(tokens).request) * plan.config.num_kv_heads
    wanted = 2 * launch.num_processors(plan.device) // max(programs, 1)
    splits = min(16, launch.power_of_two_below(wanted), launch.power_of_two_below(slots))
    # A warpgroup's product takes 64 rows; four single warps would spill with so many, and four that
    # convert NVFP4 besides take a third longer than eight.
    eight_warps = rows > most_rows // (4 if warpgroups and plan.kv_format.scale_group else 2)
    return Config(tokens, splits, 8 if eight_warps else 4)


def _choose_stages(cache: KVCache, config: MSAConfig, rows: int, *, tma: bool, direct: bool) -> int:
    """Pages under way: as many as fit into shared memory beside the queries, three at most.

    Two where registers hold what large tiles load without bulk copies; and of bulk copies of
    single tokens, so that three programs share a processor.
    """
    page = cache.format.bytes_per_page(config) // config.num_kv_heads
    queries = rows * config.head_dim * 2
    fit = (shared_memory(cache.device) - queries - _OTHER_SHARED_BYTES) // page + 1
    two = direct if tma else rows > 64
    return max(1, min(fit, 2 if two else 3))


@cached
def _tile(max_query_len: int, group_size: int, slots: int, most_rows: int) -> tuple[int, int]:
    """Tokens and rows of a tile."""
    group_rows = launch.power_of_two_above(group_size)
    tokens = min(
        launch.power_of_two_above(max_query_len),
        max(1, most_rows // group_rows),
        max(1, MAX_LIST // launch.power_of_two_above(slots)),
        8,
    )
    return tokens, tokens * group_rows


def _use_bulk_copies(cache: KVCache, *, direct: bool) -> bool:
    """Pages come by the copy engine."""
    return launch.has_bulk_copies(cache) and (
        not direct or has_warpgroups(capability(cache.device))
    )


class Lists(NamedTuple):
    """The union of each tile's blocks, for each KV head."""

    entries: torch.Tensor  # [tiles, Hkv, tokens * K] int32: block << 16 | set of tokens
    pages: torch.Tensor  # [tiles, Hkv, tokens * K] int32
    counts: torch.Tensor  # [tiles, Hkv] int32
    tiles: torch.Tensor  # [tiles, 4] int32: request, first row, end of its rows, KV length
    overlap: torch.Tensor  # [2] int32: entries, once for each part, and picks; if asked for
    chosen: torch.Tensor  # [Hkv * R * B] int32: 1 for a block in any list; empty, if not of a copy


def make_lists(
    block_ids: torch.Tensor,
    cache: KVCache,
    plan: Plan,
    tokens: int,
    part: int = 0,
    *,
    of_copy: bool = False,
    for_copy: bool = False,
) -> Lists:
    """The lists of tiles of ``tokens`` tokens.

    Args:
        part: tokens that are multiplied together, where the overlap is asked for.
        of_copy: pages are those of the copy of the cache that :mod:`.dequantize` makes.
        for_copy: of the pool's own pages, but blocks are marked for a copy, too.
    """
    tiles, slots = plan.tiles(tokens), block_ids.shape[2]
    groups = (len(tiles.request), plan.config.num_kv_heads)
    entries, pages = plan.workspace("lists", (2, *groups, tokens * max(slots, 1)), torch.int32)
    counts = plan.workspace("list_counts", groups, torch.int32)
    facts = plan.workspace("list_tiles", (groups[0], 4), torch.int32)
    marks = of_copy or for_copy
    blocks = plan.config.num_kv_heads * plan.num_requests * plan.num_blocks if marks else 0
    zeros = plan.workspace("list_zeros", (2 + blocks,), torch.int32)
    if part or marks:
        zero(zeros)
    overlap, chosen = zeros.split((2, blocks))
    padded, padded_tokens = launch.power_of_two_above(slots), launch.power_of_two_above(tokens)
    start(
        _union_lists_kernel,
        groups,
        block_ids,
        *block_ids.stride(),
        *tiles,
        plan.cu_seqlens_q,
        plan.seq_lens,
        plan.page_table,
        plan.page_table.stride(0),
        entries,
        pages,
        counts,
        facts,
        overlap,
        chosen,
        num_requests=plan.num_requests,
        num_blocks=plan.num_blocks,
        num_pages=cache.num_pages,
        num_slots=slots,
        max_list=entries.shape[2],
        TILE=tokens,
        PART=part,
        TOKENS=padded_tokens,
        SLOTS=padded,
        OF_COPY=of_copy,
        MARKS=marks,
        **launch.follow_arguments(block_ids.device),
        # One warp sorts by shuffles alone; more would meet at barriers.
        num_warps=max(1, padded_tokens * padded // 256),
    )
    return Lists(entries, pages, counts, facts, overlap, chosen)


def attend(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    block_ids: torch.Tensor,
    plan: Plan,
    config: Config,
    lists: Lists | None,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    may_yield: bool = False,
) -> None:
    """:func:`msattn.attend` over the lists; nothing where they yield to the other schedule.

    Tiles of one token need no lists.
    """
    msa, tiles = plan.config, plan.tiles(config.tokens)
    group_rows = launch.power_of_two_above(msa.group_size)
    rows = max(16, config.tokens * group_rows)
    groups = (len(tiles.request), msa.num_kv_heads)
    parts = groups[0] * groups[1] * config.splits if config.splits > 1 else 0
    partial_out = plan.workspace("partial_out", (parts, rows, msa.head_dim), torch.float32)
    partial_state = plan.workspace("partial_state", (2, parts, rows), torch.float32)
    arrivals = plan.workspace("arrivals", groups, torch.int32)
    lse_arguments = (q, 0, 0) if lse is None else (lse, *lse.stride())
    tma = _use_bulk_copies(cache, direct=lists is None)
    stages = _choose_stages(cache, msa, rows, tma=tma, direct=lists is None)
    k_desc, v_desc = launch.pool_descriptors(cache) if tma else (None, None)
    # Not read without lists.
    entries, pages, counts, _, overlap, _ = lists or (arrivals,) * 6
    start(
        _attend_kernel,
        (*groups, config.splits),
        launch.raw(q),
        *q.stride(),
        *launch.pool_arguments(cache),
        k_desc=k_desc,
        v_desc=v_desc,
        **launch.softmax_arguments(softmax_scale),
        **launch.scale_arguments("q_scale", q_scale, slots=False),
        **launch.scale_arguments("k_scale", cache.k_scale),
        **launch.scale_arguments("v_scale", cache.v_scale),
        tile_request_ptr=tiles.request,
        tile_row_ptr=tiles.first_row,
        cu_seqlens_ptr=plan.cu_seqlens_q,
        seq_lens_ptr=plan.seq_lens,
        block_ids_ptr=block_ids,
        stride_ids_t=block_ids.stride(0),
        stride_ids_h=block_ids.stride(1),
        stride_ids_k=block_ids.stride(2),
        page_table_ptr=page_table,
        stride_table=page_table.stride(0),
        num_blocks=plan.num_blocks,
        num_pages=cache.num_pages,
        num_slots=block_ids.shape[2],
        entries_ptr=entries,
        pages_ptr=pages,
        counts_ptr=counts,
        overlap_ptr=overlap,
        out_ptr=out,
        stride_out_t=out.stride(0),
        stride_out_h=out.stride(1),
        stride_out_d=out.stride(2),
        lse_ptr=lse_arguments[0],
        stride_lse_t=lse_arguments[1],
        stride_lse_h=lse_arguments[2],
        partial_out_ptr=partial_out,
        partial_state_ptr=partial_state,
        arrivals_ptr=arrivals,
        max_list=entries.shape[-1],
        TOKENS=config.tokens,
        GROUP=msa.group_size,
        GROUP_ROWS=group_rows,
        ROWS=rows,
        D=msa.head_dim,
        **launch.format_arguments(cache.format, q.device),
        FP8_QUERY=q.dtype == torch.float8_e4m3fn,
        HAS_LSE=lse is not None,
        SPLITS=config.splits,
        MAY_YIELD=may_yield,
        DIRECT=lists is None,
        SLOTS=launch.power_of_two_above(block_ids.shape[2]),
        TMA=tma,
        STAGES=stages,
        TAIL_STAGES=1 if tma else stages,
        num_warps=config.warps,
    )
