"""Union tiles on Hopper: warpgroups multiply, one more warp loads pages by the copy engine.

A tile is some neighbouring query tokens of one request and one KV head. Each consumer warpgroup has
64 rows: EACH tokens, GROUP_ROWS rows each. The producer walks the tile's list (see
``kernels/triton/attend_union.py``, the twin) and fills a ring of K and V pages; every consumer sees
every page, skips those that none of its tokens chose, and masks rows and keys in the others.
Programs are persistent and take tiles in turn.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...cache import KVCache, Scale
from ...config import MSAConfig
from ...plan import Plan
from ..triton import launch
from ..triton.attend_union import MAX_LIST, Lists
from ..triton.recording import start
from ..triton.tiles import PICK_COST, follow
from .softmax import add_page, sum_of_rows, sum_own

ROWS = gl.constexpr(64)
"""Query rows of a consumer: the least that a warpgroup multiplies."""
BLOCK = gl.constexpr(128)
D = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Columns of a 128 byte line: what one swizzled box holds."""
LN2 = gl.constexpr(0.6931471805599453)
PAGES = {3: 5, 2: 6}
"""Pages of K or V in the ring, 32 KiB each, by the number of consumers: with the queries, all of
the shared memory."""
ROW_COST = 1.15
"""A row of these tiles against one of the twin's, where KV-major costs what the twin's does."""
MIN_GROUP_ROWS = 8
"""Rows of a token in a tile: what the copy engine's swizzle repeats after."""
CONSUMER_REGISTERS = {3: 160, 2: 232}
"""By the number of consumers."""
PRODUCER_REGISTERS = 24
MIN_ROWS = 1024
"""Query tokens from which tiles have three consumers; fewer ones make too few tiles of such."""


@gluon.jit
def load_page(
    desc, tails, row, column, tail_row, is_tail, barrier, slot, HAS_TAILS: gl.constexpr
):  # fmt: skip
    mbarrier.expect(barrier, BLOCK * D * 2)
    if HAS_TAILS:
        if is_tail:
            # Behind the last token may be anything, NaN too: the copy has zeros there.
            tma.async_copy_global_to_shared(tails, [tail_row, 0], barrier, slot)
        else:
            tma.async_copy_global_to_shared(desc, [row, column], barrier, slot)
    else:
        tma.async_copy_global_to_shared(desc, [row, column], barrier, slot)


@gluon.jit
def _load_pages(
    k_desc,
    v_desc,
    k_tails,
    v_tails,
    q_desc,
    tiles_ptr,
    entries_ptr,
    pages_ptr,
    counts_ptr,
    queries,
    ring,
    full,
    empty,
    q_full,
    q_empty,
    num_tiles,
    num_heads,
    max_list,
    page_rows,
    head_rows,
    head_columns,
    EACH: gl.constexpr,  # query tokens of a consumer
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    NUM_PAGES: gl.constexpr,
    HAS_TAILS: gl.constexpr,
):
    """The producer: for each tile its queries, then K and V of each listed page."""
    step = 0
    q_step = 0
    for work in range(gl.program_id(0), num_tiles * num_heads, gl.num_programs(0)):
        head = work // num_tiles
        # Late tiles of a prompt have the longest lists; they go first.
        tile = num_tiles - 1 - work % num_tiles
        group = tile.to(gl.int64) * num_heads + head
        count = gl.load(counts_ptr + group)
        if count > 0:
            request = gl.load(tiles_ptr + tile * 4)
            first_row = gl.load(tiles_ptr + tile * 4 + 1)
            seq_len = gl.load(tiles_ptr + tile * 4 + 3)
            mbarrier.wait(q_empty, (q_step & 1) ^ 1)
            mbarrier.expect(q_full, CONSUMERS * EACH * GROUP_ROWS * D * 2)
            for j in gl.static_range(CONSUMERS * EACH):
                q_row = ((first_row + j) * num_heads + head) * GROUP
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        q_desc,
                        [q_row, half * HALF],
                        q_full,
                        queries.index(2 * (j // EACH) + half).slice(
                            (j % EACH) * GROUP_ROWS, GROUP_ROWS, dim=0
                        ),
                    )
            q_step += 1
            for i in range(count):
                block = gl.load(entries_ptr + group * max_list + i) >> 16
                page = gl.load(pages_ptr + group * max_list + i)
                row = page * page_rows + head * head_rows
                column = head * head_columns
                tail_row = (request * num_heads + head) * BLOCK
                is_tail = (block + 1) * BLOCK > seq_len
                k_slot = step % NUM_PAGES
                mbarrier.wait(empty.index(k_slot), ((step // NUM_PAGES) & 1) ^ 1)
                load_page(
                    k_desc, k_tails, row, column, tail_row, is_tail,
                    full.index(k_slot), ring.index(k_slot), HAS_TAILS,
                )  # fmt: skip
                v_step = step + 1
                v_slot = v_step % NUM_PAGES
                mbarrier.wait(empty.index(v_slot), ((v_step // NUM_PAGES) & 1) ^ 1)
                load_page(
                    v_desc, v_tails, row, column, tail_row, is_tail,
                    full.index(v_slot), ring.index(v_slot), HAS_TAILS,
                )  # fmt: skip
                step += 2


@gluon.jit
def _attend_rows(
    tiles_ptr,
    entries_ptr,
    counts_ptr,
    scale,
    out_scale,
    out_ptr,
    lse_ptr,
    queries,
    ring,
    full,
    empty,
    q_full,
    q_empty,
    num_tiles,
    num_heads,
    max_list,
    CONSUMER: gl.constexpr,
    EACH: gl.constexpr,  # query tokens of a consumer
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    NUM_PAGES: gl.constexpr,
    SIGN: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """A consumer: online softmax of its 64 rows over the listed pages."""
    ALL: gl.constexpr = (1 << EACH) - 1
    DTYPE: gl.constexpr = ring.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, product))
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, product))
    token, member = r // GROUP_ROWS, r % GROUP_ROWS
    zero = gl.zeros([ROWS, BLOCK], gl.float32, layout=product)
    step = 0
    q_step = 0
    for work in range(gl.program_id(0), num_tiles * num_heads, gl.num_programs(0)):
        head = work // num_tiles
        tile = num_tiles - 1 - work % num_tiles
        group = tile.to(gl.int64) * num_heads + head
        count = gl.load(counts_ptr + group)
        first_row = gl.load(tiles_ptr + tile * 4 + 1)
        end_row = gl.load(tiles_ptr + tile * 4 + 2)
        first_position = gl.load(tiles_ptr + tile * 4 + 3) - (end_row - first_row)
        # Blocks before this one are seen whole by every token of the tile.
        first_partial = (first_position + 1) // BLOCK
        position = first_position + CONSUMER * EACH + token
        listed = entries_ptr + group * max_list

        running_max = gl.full([ROWS], -1e30, gl.float32, layout=gl.SliceLayout(1, product))
        sums = sum_own(zero)
        acc = zero
        if count > 0:
            mbarrier.wait(q_full, q_step & 1)
        for i in range(count):
            entry = gl.load(listed + i)
            block = entry >> 16
            chosen = (entry >> (EACH * CONSUMER)) & ALL
            k_slot = step % NUM_PAGES
            v_step = step + 1
            v_slot = v_step % NUM_PAGES
            mbarrier.wait(full.index(k_slot), (step // NUM_PAGES) & 1)
            if chosen != 0:
                k_page = ring.index(k_slot)
                s = warpgroup_mma(
                    queries.index(2 * CONSUMER),
                    k_page.slice(0, HALF, dim=1).permute((1, 0)),
                    zero,
                    use_acc=False,
                    is_async=True,
                )
                s = warpgroup_mma(
                    queries.index(2 * CONSUMER + 1),
                    k_page.slice(HALF, HALF, dim=1).permute((1, 0)),
                    s,
                    is_async=True,
                )
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(empty.index(k_slot), count=1)
                if SIGN < 0:
                    s = -s
                if SIGN == 0:
                    s = s * 0.0
                if block >= first_partial:
                    last_key = position - block * BLOCK
                    s = gl.where(n[None, :] <= last_key[:, None], s, float("-inf"))
                mine = ((chosen >> token) & 1) != 0
                p, rescale, running_max, sums = add_page(s, mine, running_max, sums, scale, DTYPE)
                acc = acc * rescale[:, None]
                p = gl.convert_layout(p, weights)
                mbarrier.wait(full.index(v_slot), (v_step // NUM_PAGES) & 1)
                acc = warpgroup_mma(p, ring.index(v_slot), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(v_slot), count=1)
            else:
                mbarrier.arrive(empty.index(k_slot), count=1)
                mbarrier.wait(full.index(v_slot), (v_step // NUM_PAGES) & 1)
                mbarrier.arrive(empty.index(v_slot), count=1)
            step += 2
        if count > 0:
            mbarrier.arrive(q_empty, count=1)
            q_step += 1

        # Loaded again: the loop has no registers for what it does not use.
        row = gl.load(tiles_ptr + tile * 4 + 1) + CONSUMER * EACH + token
        end_row = gl.load(tiles_ptr + tile * 4 + 2)
        d = gl.arange(0, D, layout=gl.SliceLayout(0, product))
        live = (row < end_row) & (token < EACH) & (member < GROUP)
        running_sum = sum_of_rows(sums, gl.SliceLayout(1, product))
        is_empty = running_sum == 0.0
        factor = out_scale / gl.where(is_empty, 1.0, running_sum)
        out_row = row.to(gl.int64) * (num_heads * GROUP) + head * GROUP + member
        gl.store(
            out_ptr + (out_row * D)[:, None] + d[None, :],
            (acc * factor[:, None]).to(out_ptr.dtype.element_ty),
            mask=live[:, None],
        )
        if HAS_LSE:
            lse = (running_max + gl.log2(running_sum)) * LN2
            gl.store(lse_ptr + out_row, gl.where(is_empty, float("-inf"), lse), mask=live)


@gluon.jit
def yields(overlap_ptr, COST: gl.constexpr):
    """To KV-major: the twin's ``shares_little``, of consumers in place of tiles."""
    entries, picks = gl.load(overlap_ptr), gl.load(overlap_ptr + 1)
    return entries.to(gl.float32) * COST > picks.to(gl.float32) * PICK_COST


@gluon.jit
def load_factor(factor, ON_DEVICE: gl.constexpr):
    if ON_DEVICE:
        return gl.load(factor)
    else:
        return factor


@gluon.jit(do_not_specialize=["num_tiles", "num_heads", "max_list", "page_rows", "head_rows"])
def _union_kernel(
    k_desc,  # [rows, columns] of the pool, boxes [128, 128]
    v_desc,
    k_tails,  # [R * Hkv * 128, 128]: each request's last page, zeros behind its last token
    v_tails,
    q_desc,  # [T * Hq, 128], boxes [GROUP_ROWS, 64]
    q_scale,  # numbers, or pointers to one
    k_scale,
    v_scale,
    softmax_scale_log2,
    tiles_ptr,  # [tiles, 4] int32: request, first row, end of the request's rows, KV length
    entries_ptr,  # [tiles, Hkv, max_list] int32: block << 16 | set of tokens
    pages_ptr,
    counts_ptr,
    overlap_ptr,
    out_ptr,  # [T, Hq, 128]
    lse_ptr,  # [T, Hq] fp32
    num_tiles,
    num_heads,
    max_list,
    page_rows,
    head_rows,
    head_columns,
    EACH: gl.constexpr,  # query tokens of a consumer
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    NUM_PAGES: gl.constexpr,
    DTYPE: gl.constexpr,
    SIGN: gl.constexpr,
    Q_SCALE_ON_DEVICE: gl.constexpr,
    K_SCALE_ON_DEVICE: gl.constexpr,
    V_SCALE_ON_DEVICE: gl.constexpr,
    HAS_TAILS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    MAY_YIELD: gl.constexpr,
    COST: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """out = softmax(scale * q K^T) V over the listed blocks of each row; programs take tiles."""
    gdc_wait()
    gdc_launch_dependents()
    if MAY_YIELD and yields(overlap_ptr, COST):
        return
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ring = gl.allocate_shared_memory(DTYPE, [NUM_PAGES, BLOCK, D], lines)
    queries = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, HALF], lines)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [NUM_PAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_PAGES, 1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(NUM_PAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    scale = softmax_scale_log2 * load_factor(q_scale, Q_SCALE_ON_DEVICE)
    scale *= load_factor(k_scale, K_SCALE_ON_DEVICE)
    out_scale = 1.0 * load_factor(v_scale, V_SCALE_ON_DEVICE)
    # fmt: off
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend_rows, (
                    tiles_ptr, entries_ptr, counts_ptr, scale, out_scale, out_ptr, lse_ptr,
                    queries, ring, full, empty, q_full, q_empty, num_tiles, num_heads, max_list,
                    0, EACH, CONSUMERS, GROUP, GROUP_ROWS, NUM_PAGES, SIGN, HAS_LSE,
                )),
                (_attend_rows, (
                    tiles_ptr, entries_ptr, counts_ptr, scale, out_scale, out_ptr, lse_ptr,
                    queries, ring, full, empty, q_full, q_empty, num_tiles, num_heads, max_list,
                    1, EACH, CONSUMERS, GROUP, GROUP_ROWS, NUM_PAGES, SIGN, HAS_LSE,
                )),
                (_attend_rows, (
                    tiles_ptr, entries_ptr, counts_ptr, scale, out_scale, out_ptr, lse_ptr,
                    queries, ring, full, empty, q_full, q_empty, num_tiles, num_heads, max_list,
                    2, EACH, CONSUMERS, GROUP, GROUP_ROWS, NUM_PAGES, SIGN, HAS_LSE,
                )),
                (_load_pages, (
                    k_desc, v_desc, k_tails, v_tails, q_desc,
                    tiles_ptr, entries_ptr, pages_ptr, counts_ptr,
                    queries, ring, full, empty, q_full, q_empty, num_tiles, num_heads, max_list,
                    page_rows, head_rows, head_columns,
                    EACH, CONSUMERS, GROUP, GROUP_ROWS, NUM_PAGES, HAS_TAILS,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_rows, (
                    tiles_ptr, entries_ptr, counts_ptr, scale, out_scale, out_ptr, lse_ptr,
                    queries, ring, full, empty, q_full, q_empty, num_tiles, num_heads, max_list,
                    0, EACH, CONSUMERS, GROUP, GROUP_ROWS, NUM_PAGES, SIGN, HAS_LSE,
                )),
                (_attend_rows, (
                    tiles_ptr, entries_ptr, counts_ptr, scale, out_scale, out_ptr, lse_ptr,
                    queries, ring, full, empty, q_full, q_empty, num_tiles, num_heads, max_list,
                    1, EACH, CONSUMERS, GROUP, GROUP_ROWS, NUM_PAGES, SIGN, HAS_LSE,
                )),
                (_load_pages, (
                    k_desc, v_desc, k_tails, v_tails, q_desc,
                    tiles_ptr, entries_ptr, pages_ptr, counts_ptr,
                    queries, ring, full, empty, q_full, q_empty, num_tiles, num_heads, max_list,
                    page_rows, head_rows, head_columns,
                    EACH, CONSUMERS, GROUP, GROUP_ROWS, NUM_PAGES, HAS_TAILS,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


@triton.jit(do_not_specialize=["stride_table", "num_blocks", "num_pages"])
def _tails_kernel(
    k_ptr,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    v_ptr,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    tails_ptr,  # [2, R, Hkv, 128, 128]
    num_blocks,
    num_pages,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """tails = the last page of a request, zeros behind its last token; one program: one KV head."""
    follow(FOLLOWS)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    block, used = seq_len // PAGE, seq_len % PAGE
    own = page_table_ptr + request * stride_table
    page = tl.load(own + block, mask=block < num_blocks, other=-1)
    if (used == 0) | (page < 0) | (page >= num_pages):
        return
    n, d = tl.arange(0, PAGE)[:, None], tl.arange(0, WIDTH)[None, :]
    page = page.to(tl.int64)
    k = k_ptr + page * stride_k_page + head * stride_k_head + n * stride_k_token + d
    v = v_ptr + page * stride_v_page + head * stride_v_head + n * stride_v_token + d
    side = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * PAGE * WIDTH
    at = tails_ptr + (request * tl.num_programs(1) + head) * PAGE * WIDTH + n * WIDTH + d
    tl.store(at, tl.load(k, mask=n < used, other=0.0))
    tl.store(at + side, tl.load(v, mask=n < used, other=0.0))


class Tile(NamedTuple):
    """Constants of a launch."""

    each: int  # query tokens of a consumer
    group_rows: int  # rows of a token: its query heads of one KV head, padded
    consumers: int

    @property
    def tokens(self) -> int:
        return self.each * self.consumers

    @property
    def cost(self) -> float:
        """Of a block that a consumer multiplies, in the twin's rows of a union tile."""
        return self.each * ROW_COST


class Tails(NamedTuple):
    """Each request's last page as the copy engine sees it, zeros behind its last token."""

    k: TensorDescriptor
    v: TensorDescriptor


class Area(NamedTuple):
    """One side of a pool as the copy engine sees it, and where its pages lie."""

    shape: tuple[int, int]  # rows of a token's stride, columns
    page_rows: int
    head_rows: int
    head_columns: int


def rows_of_a_token(config: MSAConfig) -> int:
    """Rows of a tile that a pick takes: its query heads of one KV head, padded."""
    return max(MIN_GROUP_ROWS, launch.power_of_two_above(config.group_size))


def choose(plan: Plan, slots: int) -> Tile | None:
    """The tile for a model's group of query heads; None where its lists would be too long."""
    group_rows = rows_of_a_token(plan.config)
    # 16 bits of an entry name the tokens, of all consumers.
    each = min(ROWS.value // group_rows, 5)
    tile = Tile(each, group_rows, 3 if plan.max_rows >= MIN_ROWS else 2)
    fits = launch.power_of_two_above(tile.tokens) * launch.power_of_two_above(slots) <= MAX_LIST
    return tile if fits else None


def can_read(cache: KVCache) -> bool:
    """The copy engine can fetch the pool's pages as they lie, those of K and V alike."""
    if not launch.has_bulk_copies(cache):
        return False
    k, v = area(cache.k), area(cache.v)
    return k is not None and v is not None and k[1:] == v[1:]


def area(side: torch.Tensor) -> Area | None:
    """``[pages, Hkv, 128, 128]`` as rows of one stride: heads are among them, or side by side."""
    page, head, token, _ = side.stride()
    pages, heads = side.shape[:2]
    if page % token:
        return None
    if head % token == 0:
        rows = ((pages - 1) * page + (heads - 1) * head) // token + side.shape[2]
        return Area((rows, side.shape[3]), page // token, head // token, 0)
    columns = (heads - 1) * head + side.shape[3]
    if columns > token:
        return None
    return Area(((pages - 1) * page // token + side.shape[2], columns), page // token, 0, head)


def attend(
    queries: torch.Tensor,
    cache: KVCache,
    plan: Plan,
    tile: Tile,
    lists: Lists,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    may_yield: bool,
    tails: Tails | None,
) -> None:
    """:func:`msattn.attend` over the lists; nothing where they yield to the other schedule.

    ``queries``, of the cache's dtype, ``out`` and ``lse`` are contiguous.
    """
    config, dtype = plan.config, cache.format.storage_dtype
    place = area(cache.k)
    assert place is not None
    k_desc, v_desc = pages_descriptor(cache.k), pages_descriptor(cache.v)
    k_tails, v_tails = tails or (k_desc, v_desc)
    rows = (queries.shape[0] * config.num_q_heads, D.value)
    num_tiles, num_heads = lists.counts.shape
    grid = (min(launch.num_processors(queries.device), num_tiles * num_heads),)
    start(
        _union_kernel,
        grid,
        k_desc,
        v_desc,
        k_tails,
        v_tails,
        descriptor(queries, rows, D.value, (tile.group_rows, HALF.value)),
        **launch.scale_arguments("q_scale", q_scale, slots=False),
        **launch.scale_arguments("k_scale", cache.k_scale, slots=False),
        **launch.scale_arguments("v_scale", cache.v_scale, slots=False),
        **launch.softmax_arguments(softmax_scale),
        tiles_ptr=lists.tiles,
        entries_ptr=lists.entries,
        pages_ptr=lists.pages,
        counts_ptr=lists.counts,
        overlap_ptr=lists.overlap,
        out_ptr=out,
        lse_ptr=out if lse is None else lse,
        num_tiles=num_tiles,
        num_heads=num_heads,
        max_list=lists.entries.shape[2],
        page_rows=place.page_rows,
        head_rows=place.head_rows,
        head_columns=place.head_columns,
        EACH=tile.each,
        CONSUMERS=tile.consumers,
        GROUP=config.group_size,
        GROUP_ROWS=tile.group_rows,
        NUM_PAGES=PAGES[tile.consumers],
        DTYPE=gl.bfloat16 if dtype == torch.bfloat16 else gl.float16,
        HAS_TAILS=tails is not None,
        HAS_LSE=lse is not None,
        MAY_YIELD=may_yield,
        COST=tile.cost,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[tile.consumers],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )


def make_tails(cache: KVCache, plan: Plan) -> Tails:
    """Copies of each request's last page, for pools with anything behind the last token."""
    requests, heads = plan.num_requests, plan.config.num_kv_heads
    shape = (2, requests * heads * BLOCK.value, D.value)
    tails = plan.workspace("tails", shape, cache.format.storage_dtype)
    start(
        _tails_kernel,
        (requests, heads),
        *launch.pool_arguments(cache),
        plan.seq_lens,
        plan.page_table,
        plan.page_table.stride(0),
        tails,
        num_blocks=plan.num_blocks,
        num_pages=cache.num_pages,
        PAGE=BLOCK.value,
        WIDTH=D.value,
        **launch.follow_arguments(cache.device),
        num_warps=8,
    )
    k, v = (descriptor(side, shape[1:], D.value, (BLOCK.value, D.value)) for side in tails)
    return Tails(k, v)


def pages_descriptor(side: torch.Tensor) -> TensorDescriptor:
    """A side of a pool; a page of one head is a box."""
    found = area(side)
    assert found is not None
    return descriptor(side, found.shape, side.stride(2), (BLOCK.value, D.value))


def descriptor(
    x: torch.Tensor, shape: tuple[int, int], stride: int, box: tuple[int, int]
) -> TensorDescriptor:
    """``x`` as rows of ``stride`` elements, for boxes in lines of 128 bytes, swizzled."""
    layout = gl.NVMMASharedLayout(128, 8 * x.element_size(), rank=2)
    return TensorDescriptor(x, list(shape), [stride, 1], list(box), layout)
