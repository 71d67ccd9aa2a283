"""Stage 2 on Hopper, for prefill, in Gluon: two warpgroups multiply, another warp loads the keys.

A tile is 256 rows: as many neighbouring tokens of one request as there is room for with all index
heads, a head's tokens side by side. Each consumer warpgroup has half of them, in two products, so
that one multiplies while the maxima of the other are taken. The producer fills a ring of key pages
by the copy engine; each page is read once for all of the tile's rows.

Programs are persistent, and each has an even share of all blocks of all tiles: no request is too
short, too long or too many. A share is the rest of one tile, some whole tiles and the start of
another. The start goes first: where tiles are about as long as shares, the programs then read the
same pages at the same time.

The twin, ``kernels/triton/indexer.py``, serves what the copy engine cannot read, and every step of
so few tokens that it is bound by memory: it reads the keys at the memory's speed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...cache import IndexCache
from ...plan import Plan
from ..triton import indexer as twin
from ..triton import launch, recording
from ..triton.tiles import row_position
from .attend_union import BLOCK, Area, D, area, descriptor

ROWS = gl.constexpr(256)
"""Rows of a tile: tokens x index heads."""
HALF = gl.constexpr(128)
"""Rows of a consumer, and those of a page."""
LIST_CHUNK = gl.constexpr(1024)
"""Tiles that are looked at together."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


class Constants(NamedTuple):
    """What the kernel is compiled with, besides the shapes."""

    pages: int  # in the ring
    parts: int  # of a row's maximum, 4 or 2: how many threads leave one in shared memory


WIDE, NARROW = Constants(5, 2), Constants(8, 4)
"""For keys of 16 bits, with which the ring and the queries fill the shared memory, and of 8."""


@gluon.jit
def _maximum(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _share(ends_ptr, num_tiles):
    """The program's share of all blocks, and the first and the last tile that it has blocks of."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.load(ends_ptr + num_tiles).to(gl.int64)
    begin = (gl.program_id(0) * total // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1) * total // gl.num_programs(0)).to(gl.int32)
    first, last = 0, 0
    for start in range(0, num_tiles, LIST_CHUNK):
        tile = start + gl.arange(0, LIST_CHUNK, layout=layout)
        ends = gl.load(ends_ptr + 1 + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
        first += gl.sum((ends <= begin).to(gl.int32), 0)
        last += gl.sum((ends < end).to(gl.int32), 0)
    return begin, end, first, last


@gluon.jit
def _part(tiles_ptr, ends_ptr, num_tiles, i, begin, end, first, last):
    """The i-th part of a share: a tile, and the blocks from one to another."""
    tile = first + i - 1
    if i == 0:
        tile = last
    base, top = gl.load(ends_ptr + tile), gl.load(ends_ptr + tile + 1)
    return tile, gl.maximum(begin - base, 0), gl.minimum(end, top) - base


@gluon.jit
def _load_keys(
    k_desc,
    page_rows,
    num_pages,
    page_table_ptr,
    stride_table,
    tiles_ptr,
    ends_ptr,
    num_tiles,
    ring,
    full,
    empty,
    begin,
    end,
    first,
    last,
    PAGES: gl.constexpr,
    KEY_BYTES: gl.constexpr,
):
    """The producer: the key pages of each block."""
    step = 0
    for i in range(last - first + 1):
        tile, block, end_block = _part(tiles_ptr, ends_ptr, num_tiles, i, begin, end, first, last)
        if block < end_block:
            table = page_table_ptr + gl.load(tiles_ptr + tile).to(gl.int64) * stride_table
            next_page = gl.load(table + block)
            for at in range(block, end_block):
                page = next_page
                next_page = gl.load(table + gl.minimum(at + 1, end_block - 1))
                slot = step % PAGES
                mbarrier.wait(empty.index(slot), ((step // PAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BLOCK * D * KEY_BYTES)
                # A block without a page needs keys, too: any, as its score is known.
                row = gl.where((page >= 0) & (page < num_pages), page, 0) * page_rows
                tma.async_copy_global_to_shared(
                    k_desc, [row, 0], full.index(slot), ring.index(slot)
                )
                step += 1


@gluon.jit
def _score_blocks(
    q_ptr,
    stride_q_row,
    stride_q_head,
    stride_q_dim,
    out_ptr,
    stride_out_head,
    stride_out_row,
    stride_out_block,
    num_pages,
    page_table_ptr,
    stride_table,
    tiles_ptr,
    ends_ptr,
    num_tiles,
    first_row,
    queries,
    maxima,
    ring,
    full,
    empty,
    begin,
    end,
    first,
    last,
    CONSUMER: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    PAGES: gl.constexpr,
    PARTS: gl.constexpr,
    KEY_BYTES: gl.constexpr,
):
    """A consumer: the largest product of each of its rows with the keys of each block.

    The maxima of a block's two products wait in shared memory for the next block's products, under
    which those of a row's threads are compared and stored.
    """
    M: gl.constexpr = HALF // 2
    FIRST: gl.constexpr = CONSUMER * 2
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32 // KEY_BYTES]
    )
    zero = gl.zeros([M, BLOCK], gl.float32, layout=product)
    r = gl.arange(0, M, layout=gl.SliceLayout(1, product)) + FIRST * M
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, product))
    maxima = maxima.index(CONSUMER)
    maxima_a, maxima_b = maxima.slice(0, M, dim=0), maxima.slice(M, M, dim=0)
    step = 0
    for i in range(last - first + 1):
        tile, block, end_block = _part(tiles_ptr, ends_ptr, num_tiles, i, begin, end, first, last)
        if block < end_block:
            request = gl.load(tiles_ptr + tile)
            row = gl.load(tiles_ptr + num_tiles + tile)
            end_row = gl.load(tiles_ptr + 2 * num_tiles + tile)
            position = gl.load(tiles_ptr + 3 * num_tiles + tile)
            # Blocks before this one are seen whole by every token of the tile.
            first_partial = (position + 1) // BLOCK
            table = page_table_ptr + request.to(gl.int64) * stride_table
            next_page = gl.load(table + block)
            gl.thread_barrier()
            for j in gl.static_range(2):
                _load_queries(
                    q_ptr + row.to(gl.int64) * stride_q_row,
                    stride_q_row, stride_q_head, stride_q_dim,
                    queries.index(FIRST + j), (FIRST + j) * M, end_row - row, M, HEADS, TOKENS,
                )  # fmt: skip
            fence_async_shared()
            gl.thread_barrier()
            block_out = (
                out_ptr
                + (row - first_row).to(gl.int64) * stride_out_row
                + block * stride_out_block.to(gl.int64)
            )
            rows = (stride_out_head, stride_out_row, first_row - row, end_row - row)
            was_mapped = False
            for at in range(block, end_block):
                page = next_page
                next_page = gl.load(table + gl.minimum(at + 1, end_block - 1))
                slot = step % PAGES
                keys = ring.index(slot).permute((1, 0))
                mbarrier.wait(full.index(slot), (step // PAGES) & 1)
                a = warpgroup_mma(queries.index(FIRST), keys, zero, use_acc=False, is_async=True)
                b = warpgroup_mma(
                    queries.index(FIRST + 1), keys, zero, use_acc=False, is_async=True
                )
                if at > block:
                    _store_scores(
                        maxima, block_out, was_mapped, rows, CONSUMER, HEADS, TOKENS, PARTS
                    )
                    block_out += stride_out_block.to(gl.int64)
                was_mapped = (page >= 0) & (page < num_pages)
                sight = (n, at >= first_partial, position - at * BLOCK)
                a = warpgroup_mma_wait(1, deps=(a,))
                maxima_a.store(_own_maxima(a, r, sight, PARTS, TOKENS))
                gl.thread_barrier()  # else the assembler waits for b first
                b = warpgroup_mma_wait(0, deps=(b,))
                mbarrier.arrive(empty.index(slot), count=1)
                maxima_b.store(_own_maxima(b, r + M, sight, PARTS, TOKENS))
                step += 1
            _store_scores(maxima, block_out, was_mapped, rows, CONSUMER, HEADS, TOKENS, PARTS)


@gluon.jit
def _load_queries(
    q_ptr,
    stride_row,
    stride_head,
    stride_dim,
    target,
    first,
    tokens,
    M: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Rows of a tile from `first` on, zeros where there is no head or token."""
    each: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, M, layout=gl.SliceLayout(1, each)) + first
    d = gl.arange(0, D, layout=gl.SliceLayout(0, each))
    head, token = r // TOKENS, r % TOKENS
    at = head.to(gl.int64) * stride_head + token.to(gl.int64) * stride_row
    live = (head < HEADS) & (token < tokens)
    q = gl.load(q_ptr + at[:, None] + (d * stride_dim)[None, :], mask=live[:, None], other=0.0)
    target.store(q.to(target.dtype))


@gluon.jit
def _own_maxima(products, r, sight, PARTS: gl.constexpr, TOKENS: gl.constexpr):
    """The maxima of a product's rows ``[rows, PARTS]``, over the keys that each row sees."""
    n, is_partial, last_key = sight
    if is_partial:
        sees = n[None, :] <= (last_key + r % TOKENS)[:, None]
        products = gl.where(sees, products, float("-inf"))
    # What a thread has of a row are pairs of neighbours, one of every four.
    by_thread = gl.reshape(products, (products.shape[0], BLOCK // 8, PARTS, 4 // PARTS, 2))
    pairs = gl.reduce(gl.reduce(by_thread, 4, _maximum), 1, _maximum)
    return gl.reduce(pairs, 2, _maximum)


@gluon.jit
def _store_scores(
    maxima,
    out,
    is_mapped,
    rows,
    CONSUMER: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """A block's scores of a consumer's rows, one row for each thread."""
    stride_head, stride_row, first_token, tokens = rows
    by_row: gl.constexpr = gl.BlockedLayout([1, PARTS], [32, 1], [4, 1], [1, 0])
    r = gl.arange(0, HALF, layout=gl.SliceLayout(1, by_row)) + CONSUMER * HALF
    head, token = r // TOKENS, r % TOKENS
    at = head.to(gl.int64) * stride_head + token.to(gl.int64) * stride_row
    live = (head < HEADS) & (token >= first_token) & (token < tokens)
    score = gl.reduce(maxima.load(by_row), 1, _maximum)
    gl.store(out + at, gl.where(is_mapped, score, float("-inf")), mask=live)


@gluon.jit(
    do_not_specialize=[
        "stride_out_head",
        "stride_out_row",
        "stride_out_block",
        "page_rows",
        "num_pages",
        "stride_table",
        "num_tiles",
        "first_row",
    ]
)
def _scores_kernel(
    k_desc,  # the index pool as rows, boxes [128, 128]
    page_rows,
    num_pages,
    q_ptr,  # [T, Hi, D]
    stride_q_row,
    stride_q_head,
    stride_q_dim,
    out_ptr,  # [Hi, rows from first_row on, num_blocks] fp32
    stride_out_head,
    stride_out_row,
    stride_out_block,
    page_table_ptr,
    stride_table,
    tiles_ptr,  # [4, tiles] int32: request, first row, end of the rows, position of the first
    ends_ptr,  # [tiles + 1] int32: blocks of all tiles before each
    num_tiles,
    first_row,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    PAGES: gl.constexpr,
    PARTS: gl.constexpr,
    DTYPE: gl.constexpr,
    KEY_BYTES: gl.constexpr,  # of a number
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """out[h, t, b] = max(q[t, h] . k[j] for the keys j of block b up to t's position)"""
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 8 * KEY_BYTES, rank=2)
    ring = gl.allocate_shared_memory(DTYPE, [PAGES, BLOCK, D], lines)
    queries = gl.allocate_shared_memory(DTYPE, [4, HALF // 2, D], lines)
    maxima = gl.allocate_shared_memory(
        gl.float32, [2, HALF, PARTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    full = gl.allocate_shared_memory(gl.int64, [PAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    begin, end, first, last = _share(ends_ptr, num_tiles)
    # Partitions get their arguments where warps may still read the sums of the others.
    gl.thread_barrier()
    # fmt: off
    gl.warp_specialize(
        [
            (_score_blocks, (
                q_ptr, stride_q_row, stride_q_head, stride_q_dim,
                out_ptr, stride_out_head, stride_out_row, stride_out_block,
                num_pages, page_table_ptr, stride_table, tiles_ptr, ends_ptr, num_tiles, first_row,
                queries, maxima, ring, full, empty, begin, end, first, last,
                0, HEADS, TOKENS, PAGES, PARTS, KEY_BYTES,
            )),
            (_score_blocks, (
                q_ptr, stride_q_row, stride_q_head, stride_q_dim,
                out_ptr, stride_out_head, stride_out_row, stride_out_block,
                num_pages, page_table_ptr, stride_table, tiles_ptr, ends_ptr, num_tiles, first_row,
                queries, maxima, ring, full, empty, begin, end, first, last,
                1, HEADS, TOKENS, PAGES, PARTS, KEY_BYTES,
            )),
            (_load_keys, (
                k_desc, page_rows, num_pages, page_table_ptr, stride_table,
                tiles_ptr, ends_ptr, num_tiles, ring, full, empty, begin, end, first, last,
                PAGES, KEY_BYTES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on


@triton.jit(do_not_specialize=["num_tiles", "num_blocks", "first_row", "end_row"])
def _list_kernel(
    tiles_ptr,  # [4, tiles] int32
    ends_ptr,  # [tiles + 1] int32
    tile_request_ptr,
    tile_row_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    num_tiles,
    num_blocks,
    first_row,
    end_row,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The facts of each tile, and the blocks of all tiles up to it; one program.

    A tile has the blocks that its last token sees; none, if it has no row from first_row to
    end_row - 1.
    """
    total = 0
    tl.store(ends_ptr, total)
    for start in range(0, num_tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        request = tl.load(tile_request_ptr + tile, mask=tile < num_tiles, other=-1)
        used = request >= 0
        row = tl.load(tile_row_ptr + tile, mask=used, other=0)
        request_end = tl.load(cu_seqlens_ptr + request + 1, mask=used, other=0)
        seq_len = tl.load(seq_lens_ptr + request, mask=used, other=0)
        end = tl.minimum(tl.minimum(row + TOKENS, request_end), end_row)
        visible = tl.cdiv(tl.maximum(seq_len - (request_end - end), 0), PAGE)
        used &= end > tl.maximum(row, first_row)
        visible = tl.where(used, tl.minimum(visible, num_blocks), 0)
        tl.store(tiles_ptr + tile, request, mask=used)
        tl.store(tiles_ptr + num_tiles + tile, row, mask=used)
        tl.store(tiles_ptr + 2 * num_tiles + tile, end, mask=used)
        tl.store(tiles_ptr + 3 * num_tiles + tile, seq_len - (request_end - row), mask=used)
        tl.store(ends_ptr + 1 + tile, total + tl.cumsum(visible, 0), mask=tile < num_tiles)
        total += tl.sum(visible)


@triton.jit(do_not_specialize=["num_owned", "num_blocks"])
def _hide_kernel(
    out_ptr,  # [Hi, T, B] fp32
    stride_head,
    stride_row,
    stride_block,
    request_ptr,  # [num_owned]
    cu_seqlens_ptr,
    seq_lens_ptr,
    num_owned,
    num_blocks,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out = -inf for the blocks that a row does not see; one program: one row and head."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = tl.load(request_ptr + row, mask=row < num_owned, other=-1)
    visible = 0
    if request >= 0:
        position = row_position(row, request, cu_seqlens_ptr, seq_lens_ptr)
        visible = tl.maximum((position + PAGE) // PAGE, 0)
    own = out_ptr + head * stride_head + row.to(tl.int64) * stride_row
    for start in range(visible // CHUNK * CHUNK, num_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        hidden = (block >= visible) & (block < num_blocks)
        tl.store(own + block.to(tl.int64) * stride_block, float("-inf"), mask=hidden)


def index_scores(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    *,
    constants: Constants | None = None,
) -> None:
    if not can_read(index):
        twin.index_scores(index_q, index, plan, out)
        return
    request = plan.tiles(1).request
    heads, rows, blocks = out.shape
    recording.start(
        _hide_kernel,
        (rows, heads),
        out,
        *out.stride(),
        request,
        plan.cu_seqlens_q,
        plan.seq_lens,
        len(request),
        blocks,
        PAGE=BLOCK.value,
        CHUNK=256,
        num_warps=1,
    )
    score_rows(index_q, index, plan, out, 0, constants=constants)


def index_select(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    *,
    constants: Constants | None = None,
) -> None:
    if can_read(index):
        twin.select_by(score_rows, index_q, index, plan, out, constants=constants)
    else:
        twin.index_select(index_q, index, plan, out)


def score_rows(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    first_row: int,
    *,
    constants: Constants | None = None,
) -> None:
    """Scores of the rows from ``first_row`` on, as many as ``out`` ``[Hi, n, num_blocks]`` has.

    Blocks that a row does not see may be left as they are.
    """
    heads, keys = index_q.shape[1], index.tensor
    tokens = ROWS.value // launch.power_of_two_above(heads)
    tiles = plan.tiles(tokens)
    num_tiles = len(tiles.request)
    if not num_tiles or not plan.num_blocks:
        return
    facts = plan.workspace("index_tiles", (4, num_tiles), torch.int32)
    ends = plan.workspace("index_ends", (num_tiles + 1,), torch.int32)
    recording.start(
        _list_kernel,
        (1,),
        facts,
        ends,
        *tiles,
        plan.cu_seqlens_q,
        plan.seq_lens,
        num_tiles,
        plan.num_blocks,
        first_row,
        first_row + out.shape[1],
        TOKENS=tokens,
        PAGE=BLOCK.value,
        CHUNK=LIST_CHUNK.value,
        num_warps=8,
    )
    rows = page_area(index)
    assert rows is not None
    chosen = constants or (NARROW if keys.element_size() == 1 else WIDE)
    recording.start(
        _scores_kernel,
        (launch.num_processors(keys.device),),
        descriptor(keys, rows.shape, keys.stride(1), (BLOCK.value, D.value)),
        rows.page_rows,
        index.num_pages,
        index_q,
        *index_q.stride(),
        out,
        *out.stride(),
        plan.page_table,
        plan.page_table.stride(0),
        facts,
        ends,
        num_tiles,
        first_row,
        HEADS=heads,
        TOKENS=tokens,
        PAGES=chosen.pages,
        PARTS=chosen.parts,
        DTYPE=_gluon_dtype(keys.dtype),
        KEY_BYTES=keys.element_size(),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )


def _gluon_dtype(dtype: torch.dtype) -> gl.dtype:
    if dtype == torch.float8_e4m3fn:
        return gl.float8e4nv
    return gl.bfloat16 if dtype == torch.bfloat16 else gl.float16


def can_read(index: IndexCache) -> bool:
    """The copy engine can fetch the pool's pages as they lie."""
    return launch.can_copy_in_bulk(index.tensor) and page_area(index) is not None


def page_area(index: IndexCache) -> Area | None:
    """The pool as rows of one stride."""
    return area(index.tensor.unsqueeze(1))
