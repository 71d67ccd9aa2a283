"""Stage 2 and 3 in Triton for few query tokens, with less than one read of the index keys.

Their compact copy (:class:`msattn.CompactKeys`) is read instead, half of their bytes. It tells what
a block's score is at least, and at most. As many blocks as are selected reach the k-th best of the
lower bounds; so a block whose upper bound does not cannot be selected. The others, a few percent,
are scored from the keys as :mod:`.indexer` scores them, and the rest count as -inf. The selection
is then that of all scores, whatever the keys are: the worse the bounds, the more is read.

Bounds are in units of a row, since scores of different rows are never compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...cache import IndexCache
from ...plan import Plan
from .index_tiles import (
    Share,
    block_scores,
    choose_stages,
    load_page,
    load_queries,
    share_out,
    tile_facts,
)
from .launch import can_copy_in_bulk, page_descriptor, power_of_two_above
from .recording import start
from .selection import chunks_of, kth_key, load_chunk, reads_vectors, score_key
from .tiles import BLOCK, nearest, page_of_block, rotate, row_position

MAX_ROWS = 32
"""Of a tile: query tokens of a request x index heads."""
MIN_PAGES = 80 << 10
"""Of a step's requests, from which reading their copies pays: on an H200 a page's keys take 7.2 ns,
its copy 6.3, and the launches besides and the blocks that are scored from their keys 62 us."""

_LIST_CHUNK = tl.constexpr(64)
"""Blocks of a program of which one look at the bounds tells whether they can be selected."""


@triton.jit
def _whole_queries(q, ROWS: tl.constexpr, D: tl.constexpr):
    """Queries [ROWS, D], rotated ~ unit * (254 * high + low), int8, and their norms in units, fp32.

    A query that is not finite, or whose scores might overflow or vanish in fp32, has a norm of
    infinity.
    """
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    # Infinities and NaN, times 0, are NaN.
    bounded = (tl.sum(q * 0.0, 1) == 0.0) & (largest > 2.0**-60) & (largest < 2.0**60)
    q = rotate(tl.where(bounded[:, None], q, 0.0), ROWS, D)
    largest = tl.max(tl.abs(q), 1)
    q = tl.div_rn(q, tl.where(bounded, largest, 1.0)[:, None]) * 127.0
    high = nearest(q)
    low = nearest((q - high) * 254.0)
    norm = tl.where(bounded, tl.sqrt(tl.sum(q * q, 1)) * 254.0, float("inf"))
    return high.to(tl.int8), low.to(tl.int8), norm


@triton.jit
def _factors(word):
    """Scale and bound of keys, fp32, from pairs of fp16 as int32."""
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    bound = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), bound.to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "stride_bound_head", "stride_bound_row", "stride_table", "num_pages", "num_blocks",
        "first_row", "end_row",
    ]
)  # fmt: skip
def _bounds_kernel(
    q_ptr,  # [T, Hi, D]
    stride_q_row,
    stride_q_head,
    stride_q_dim,
    codes_ptr,  # [pages, BLOCK, D] int8
    codes_desc,  # the same for the bulk copy engine, TMA only
    factors_ptr,  # [pages, BLOCK] int32: fp16 scale and bound
    stride_page,  # bytes of both
    upper_ptr,  # [Hi, rows from first_row on, num_blocks] fp32
    lower_ptr,  # the same
    stride_bound_head,
    stride_bound_row,
    tile_request_ptr,
    tile_row_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    num_pages,
    num_blocks,
    first_row,
    end_row,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    TMA: tl.constexpr,
):
    """lower <= score of a block in units of its row <= upper

    One program: a share of the blocks that one tile of tokens sees.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request, tile_row, tile_end, offset, visible, full = tile_facts(
        tile, tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr, num_blocks, end_row,
        TOKENS,
    )  # fmt: skip
    share = tl.cdiv(visible, tl.num_programs(1))
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, visible)
    if (request < 0) | (begin >= end) | (tile_end <= tl.maximum(tile_row, first_row)):
        return

    r = tl.arange(0, HEADS_PADDED * TOKENS)
    head, row = r // TOKENS, tile_row + r % TOKENS
    live = (head < HEADS) & (row < tile_end)
    q = load_queries(q_ptr, stride_q_row, stride_q_head, stride_q_dim, row, head, live, DIM)
    high, low, norm = _whole_queries(q, HEADS_PADDED * TOKENS, DIM)
    high, low = tl.trans(high), tl.trans(low)  # [D, rows]
    live &= row >= first_row
    d, n = tl.arange(0, DIM), tl.arange(0, BLOCK)
    codes_at = codes_ptr + n[:, None] * DIM + d[None, :]
    bound_at = (
        head.to(tl.int64) * stride_bound_head + (row - first_row).to(tl.int64) * stride_bound_row
    )

    next_page = page_of_block(page_table_ptr, stride_table, request, begin, num_pages)
    for block in range(begin, end):
        page = next_page
        codes = load_page(codes_at, codes_desc, page, stride_page, True, TMA)
        word = tl.load(factors_ptr + tl.maximum(page, 0) * (stride_page // 4) + n)
        following = tl.minimum(block + 1, end - 1)
        next_page = page_of_block(page_table_ptr, stride_table, request, following, num_pages)
        scale, bound = _factors(word)
        # Sums of whole numbers: below 2^31 for up to 522 of them.
        sums = tl.dot(codes, high, out_dtype=tl.int32) * 254
        sums = tl.dot(codes, low, sums, out_dtype=tl.int32)
        value = sums.to(tl.float32) * scale[:, None]  # [BLOCK, rows]
        margin = bound[:, None] * norm[None, :]
        # 0 * inf is NaN: of a query that has no norm, or a key that has no bound.
        margin = tl.where(margin == margin, margin, float("inf"))
        upper, lower = value + margin, value - margin
        if block >= full:
            hidden = n[:, None] > (offset + row - block * BLOCK)[None, :]
            upper = tl.where(hidden, float("-inf"), upper)
            lower = tl.where(hidden, float("-inf"), lower)
        upper, lower = tl.max(upper, 0), tl.max(lower, 0)
        # One key that nothing bounds, and the block's score may be NaN, which is below all others.
        lower = tl.where((page >= 0) & (upper < float("inf")), lower, float("-inf"))
        upper = tl.where(page >= 0, upper, float("-inf"))
        tl.store(upper_ptr + bound_at + block, upper, mask=live)
        tl.store(lower_ptr + bound_at + block, lower, mask=live)


@triton.jit(do_not_specialize=["num_owned", "first_row", "num_blocks"])
def _threshold_kernel(
    lower_ptr,  # [Hi, rows, num_blocks] fp32
    stride_h,
    stride_t,
    threshold_ptr,  # [Hi, rows] fp32
    request_ptr,  # [num_owned]
    cu_seqlens_ptr,
    seq_lens_ptr,
    num_owned,
    first_row,
    num_blocks,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A number that the scores of k blocks of a row reach, where it selects k by score.

    One program: one row and head. Infinity, where a row selects none by score.
    """
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_of_step = first_row + row
    request = tl.load(request_ptr + row_of_step, mask=row_of_step < num_owned, other=-1)
    visible = 0
    if request >= 0:
        position = row_position(row_of_step, request, cu_seqlens_ptr, seq_lens_ptr)
        visible = tl.minimum(tl.maximum((position + BLOCK) // BLOCK, 0), num_blocks)
    K: tl.constexpr = TOPK - INIT - LOCAL
    threshold = float("inf")
    if (visible > TOPK) & (K > 0):
        row_ptr = lower_ptr + head * stride_h + row.to(tl.int64) * stride_t
        first, last = INIT, visible - LOCAL
        largest = tl.full((CHUNK,), float("nan"), tl.float32)
        for begin in range(0, last, CHUNK):
            x = load_chunk(row_ptr, 1, begin, first, last, CHUNK, VECTOR)
            largest = tl.maximum(largest, x)  # of the numbers
        # The k best positions have a block each that reaches the k-th of them.
        position = tl.arange(0, CHUNK)
        exists = ((position >= first) & (position < last)) | (position + CHUNK < last)
        keys = score_key(largest, exists)
        key, _ = kth_key(keys, K, tl.min(keys))
        threshold = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(threshold_ptr + head * tl.num_programs(0) + row, threshold)


@triton.jit(
    do_not_specialize=[
        "stride_out_head", "stride_out_row", "stride_table", "num_pages", "num_blocks",
        "first_row", "end_row", "stride_list",
    ]
)  # fmt: skip
def _rescore_kernel(
    q_ptr,  # [T, Hi, D]
    stride_q_row,
    stride_q_head,
    stride_q_dim,
    k_ptr,  # [pages, BLOCK, D], last stride 1
    stride_k_page,
    stride_k_token,
    k_desc,  # the keys for the bulk copy engine, TMA only
    out_ptr,  # [Hi, rows from first_row on, num_blocks] fp32: upper bounds, then scores
    stride_out_head,
    stride_out_row,
    threshold_ptr,  # [Hi, rows] fp32
    list_ptr,  # [programs, stride_list] int32
    stride_list,
    tile_request_ptr,
    tile_row_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    num_pages,
    num_blocks,
    first_row,
    end_row,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    TMA: tl.constexpr,
):
    """out = scores of the blocks that a row of the tile may select, -inf for the others

    One program: every n-th of the blocks that one tile of tokens sees, so that neighbours, which
    are often selected together, are spread over the programs.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request, tile_row, tile_end, offset, visible, full = tile_facts(
        tile, tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr, num_blocks, end_row,
        TOKENS,
    )  # fmt: skip
    step, part = tl.num_programs(1), tl.program_id(1)
    program = (tile * step + part).to(tl.int64)
    if (request < 0) | (part >= visible) | (tile_end <= tl.maximum(tile_row, first_row)):
        return

    r = tl.arange(0, HEADS_PADDED * TOKENS)
    head, row = r // TOKENS, tile_row + r % TOKENS
    live = (head < HEADS) & (row < tile_end)
    q = load_queries(q_ptr, stride_q_row, stride_q_head, stride_q_dim, row, head, live, DIM)
    live &= row >= first_row
    position = offset + row
    out_row = (row - first_row).to(tl.int64)
    out_at = out_ptr + head.to(tl.int64) * stride_out_head + out_row * stride_out_row
    threshold_at = head.to(tl.int64) * (end_row - first_row) + out_row
    threshold = tl.load(threshold_ptr + threshold_at, mask=live, other=float("inf"))
    seen = tl.minimum(tl.maximum((position + BLOCK) // BLOCK, 0), num_blocks)
    by_score = live & (seen > TOPK)

    count = 0
    own_list = list_ptr + program * stride_list
    for begin in range(part, visible, step * _LIST_CHUNK):
        block = begin + tl.arange(0, _LIST_CHUNK) * step
        exists = block < visible
        at = out_at[:, None] + block[None, :]
        upper = tl.load(at, mask=live[:, None] & exists[None, :], other=float("-inf"))
        asks = (block[None, :] >= INIT) & (block[None, :] < (seen - LOCAL)[:, None])
        wanted = asks & by_score[:, None] & (upper >= threshold[:, None])
        chosen = exists & (tl.max(wanted.to(tl.int32), 0) > 0)
        tl.store(at, float("-inf"), mask=live[:, None] & (exists & (chosen == 0))[None, :])
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(own_list + place, block, mask=chosen)
        count += tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()  # what one thread has listed, all load

    d, n = tl.arange(0, DIM), tl.arange(0, BLOCK)
    if KEYS_FIRST:
        q = tl.trans(q)
        k_at = k_ptr + n[:, None] * stride_k_token + d[None, :]
    else:
        k_at = k_ptr + n[None, :] * stride_k_token + d[:, None]
    next_block = tl.load(own_list, mask=count > 0, other=0)
    next_page = page_of_block(page_table_ptr, stride_table, request, next_block, num_pages)
    for i in range(0, count):
        block, page = next_block, next_page
        k = load_page(k_at, k_desc, page, stride_k_page, KEYS_FIRST, TMA)
        next_block = tl.load(own_list + tl.minimum(i + 1, count - 1))
        next_page = page_of_block(page_table_ptr, stride_table, request, next_block, num_pages)
        score = block_scores(q, k, position, block, full, page, DTYPE, True, KEYS_FIRST)
        tl.store(out_at + block, score, mask=live)


def pays(index_q: torch.Tensor, index: IndexCache, plan: Plan) -> bool:
    """The copy is there, can stand for these keys and queries, and sparing reads is worth it."""
    if index.compact is None or index_q.dtype != index.tensor.dtype:
        return False
    rows = plan.max_query_len * power_of_two_above(index_q.shape[1])
    return rows <= MAX_ROWS and plan.num_requests * plan.num_blocks >= MIN_PAGES


def score_rows(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    first_row: int,
    *,
    num_splits: int | None = None,
) -> None:
    """As :func:`.indexer.score_rows`, but -inf for blocks that no selection by score can have."""
    assert out.stride(2) == 1
    key_bytes = index.head_dim * index.tensor.element_size()
    # The plain kernel's shares: the scores that are made have the same bits then.
    share = share_out(index_q, index, plan, out, first_row, key_bytes, num_splits=num_splits)
    if not all(share.grid):
        return
    heads, rows, _ = out.shape
    # Powers of two, as in select_by.
    size = power_of_two_above(heads * out.stride(0))
    lower = plan.workspace("index_lower", (size,), torch.float32)
    lower = lower.as_strided(out.shape, out.stride())
    size = power_of_two_above(heads * rows)
    thresholds = plan.workspace("index_thresholds", (size,), torch.float32)
    _find_bounds(index_q, index, share, out, lower)
    _find_thresholds(lower, plan, first_row, thresholds)
    _rescore(index_q, index, plan, share, thresholds, out)


def _find_bounds(
    index_q: torch.Tensor,
    index: IndexCache,
    share: Share,
    upper: torch.Tensor,
    lower: torch.Tensor,
) -> None:
    compact, constants = index.compact, share.constants
    assert compact is not None
    tma = constants.keys_first and can_copy_in_bulk(compact.codes)
    start(
        _bounds_kernel,
        share.grid,
        index_q,
        *index_q.stride(),
        compact.codes,
        page_descriptor(compact.codes) if tma else None,
        compact.words,
        compact.tensor.stride(0),
        upper,
        lower,
        *upper.stride()[:2],
        **share.facts,
        TMA=tma,
        # 32 columns and more of a product take the registers of twice the warps, where these
        # multiply alone.
        num_warps=4 if constants.keys_first or constants.rows == 16 else 8,
        num_stages=choose_stages(constants.num_stages, index.head_dim),
    )


def _find_thresholds(
    lower: torch.Tensor, plan: Plan, first_row: int, thresholds: torch.Tensor
) -> None:
    config, request = plan.config, plan.tiles(1).request
    heads, rows, columns = lower.shape
    chunk, _, warps = chunks_of(columns, config.topk)
    start(
        _threshold_kernel,
        (rows, heads),
        lower,
        *lower.stride()[:2],
        thresholds,
        request,
        plan.cu_seqlens_q,
        plan.seq_lens,
        len(request),
        first_row,
        plan.num_blocks,
        TOPK=config.topk,
        INIT=config.init_blocks,
        LOCAL=config.local_blocks,
        CHUNK=chunk,
        VECTOR=4 if reads_vectors(lower) else 1,
        num_warps=warps,
    )


def _rescore(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    share: Share,
    thresholds: torch.Tensor,
    out: torch.Tensor,
) -> None:
    config, keys, constants = plan.config, index.tensor, share.constants
    list_size = triton.cdiv(plan.num_blocks, share.grid[1])
    size = power_of_two_above(share.grid[0] * share.grid[1] * list_size)
    tma = constants.keys_first and can_copy_in_bulk(keys)
    start(
        _rescore_kernel,
        share.grid,
        index_q,
        *index_q.stride(),
        keys,
        keys.stride(0),
        keys.stride(1),
        page_descriptor(keys) if tma else None,
        out,
        *out.stride()[:2],
        thresholds,
        plan.workspace("index_lists", (size,), torch.int32),
        list_size,
        **share.facts,
        TOPK=config.topk,
        INIT=config.init_blocks,
        LOCAL=config.local_blocks,
        DTYPE=tl.bfloat16 if keys.dtype == torch.bfloat16 else tl.float16,
        KEYS_FIRST=constants.keys_first,
        TMA=tma,
        num_warps=constants.num_warps,
        num_stages=choose_stages(constants.num_stages, index.head_dim * keys.element_size()),
    )
