"""Some tokens of a request on Hopper: the blocks that they chose are read, and widened, once.

Programs take equal shares of the step's blocks (:mod:`.shares`). A tile has the rows of two
consumer warpgroups, up to 64 each: EACH tokens of GROUP_ROWS query heads. Queries are the rows of
the products, as in prefill (:mod:`.attend_union`): a page in shared memory is an operand as it
lies, and each consumer skips the blocks that none of its tokens chose. The producer is that of
decode (:mod:`.page_ring`). Narrow pages go through one more warpgroup, which turns them into
16 bits for both consumers. For verification, and for prompts too short to fill the programs of
prefill with whole tiles.

``kernels/triton/attend_union.py`` is the twin, and makes the lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...cache import KVCache, Scale
from ...plan import Plan
from ..triton import launch
from ..triton.attend_union import MAX_LIST, Lists
from ..triton.recording import start
from ..triton.tiles import NVFP4, NVFP4_FACTOR, WIDE
from .attend_decode import SHARED_BYTES, is_few
from .attend_union import BLOCK, LN2, ROW_COST, ROWS, D, load_factor, rows_of_a_token, yields
from .narrow import widen, widen_fp8, widen_nvfp4
from .page_ring import first_token_of, load_pages, page_of, pass_over, step_arguments
from .shares import MIN_SHARE, find_share, join_parts, unit_size
from .softmax import add_page, sum_of_rows, sum_own
from .support import MIN_QUERY_LEN

CONSUMERS = 2
MIN_TOKENS = 8
"""Of a request, rounded up to a power of two: of fewer, half of the rows are padding."""
MAX_PROMPT_TOKENS = 384
"""Of a step with a prompt: more of them fill the programs of prefill."""
MAX_TOKENS = 16
"""Of a tile: bits of a list's entry."""
PAGES = {False: 6, True: 4}
"""Sides of 16 bit pages in the ring, 32 KiB each; fewer where narrow ones are before them."""
MAX_STAGES = 8
"""Sides of narrow pages under way: as many as fit."""
PAGE_BYTES = BLOCK.value * D.value * 2
OTHER_BYTES = 2048
"""Of shared memory: barriers, and 1 KiB that no program has."""
# Registers of a thread: of the second consumer, the converter, the producer.
CONSUMER_REGISTERS = {False: 232, True: 184}
CONVERTER_REGISTERS, PRODUCER_REGISTERS = 104, 40


@gluon.jit
def _attend_rows(
    q_ptr,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    out_ptr,
    stride_out_t,
    stride_out_h,
    stride_out_d,
    lse_ptr,
    stride_lse_t,
    stride_lse_h,
    parts,
    requests,
    lists,
    work,
    scale,
    out_scale,
    queries,
    pages,
    full,
    empty,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    EACH: gl.constexpr,  # query tokens of a consumer
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    PAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    FP8_QUERY: gl.constexpr,
    SIGN: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """A consumer: online softmax of its 64 rows over the entries of the program's share."""
    tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr = requests
    entries_ptr, _pages_ptr, counts_ptr, max_list = lists
    share, at, end, unit, before, num_heads = work
    ALL: gl.constexpr = (1 << EACH) - 1
    DTYPE: gl.constexpr = queries.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, product)
    whole: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    queries = queries.index(CONSUMER)
    r = gl.arange(0, ROWS, layout=row_layout)
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, product))
    token, member = r // GROUP_ROWS, r % GROUP_ROWS
    zero = gl.zeros([ROWS, BLOCK], gl.float32, layout=product)
    step = 0
    while at < end:
        size = unit_size(unit, counts_ptr, tile_request_ptr, num_heads, 0, True, False)
        tile, head = unit // num_heads, unit % num_heads
        first_row = gl.load(tile_row_ptr + tile) + CONSUMER * EACH
        request = gl.maximum(gl.load(tile_request_ptr + tile), 0)
        seq_len = gl.load(seq_lens_ptr + request)
        end_row = gl.load(cu_seqlens_ptr + request + 1)
        first_position = seq_len - (end_row - first_row)
        # Blocks before this one are seen whole by every token of the consumer.
        first_partial = (first_position + 1) // BLOCK
        listed = entries_ptr + unit.to(gl.int64) * max_list
        count = gl.load(counts_ptr + unit)

        q_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, whole))
        q_d = gl.arange(0, D, layout=gl.SliceLayout(0, whole))
        q_row, q_member = first_row + q_r // GROUP_ROWS, q_r % GROUP_ROWS
        q_live = (q_row < end_row) & (q_r // GROUP_ROWS < EACH) & (q_member < GROUP)
        q = gl.load(
            q_ptr
            + (q_row.to(gl.int64) * stride_q_t + (head * GROUP + q_member) * stride_q_h)[:, None]
            + (q_d * stride_q_d)[None, :],
            mask=q_live[:, None],
            other=0,
        )
        if FP8_QUERY:
            q = widen(q, False)
        queries.store((q.to(gl.float32) * SIGN).to(DTYPE))
        fence_async_shared()
        gl.thread_barrier()

        running_max = gl.full([ROWS], -1e30, gl.float32, layout=row_layout)
        sums = sum_own(zero)
        acc = zero
        for i in range(at - before, gl.minimum(end - before, count)):
            entry = gl.load(listed + i)
            block = entry >> 16
            chosen = (entry >> (CONSUMER * EACH)) & ALL
            k_slot, v_slot = step % PAGES, (step + 1) % PAGES
            k_phase, v_phase = (step // PAGES) & 1, ((step + 1) // PAGES) & 1
            step += 2
            mbarrier.wait(full.index(k_slot), k_phase)
            if chosen != 0:
                k = pages.index(k_slot).reshape((BLOCK, D))
                s = warpgroup_mma(queries, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(empty.index(k_slot), count=1)
                if block >= first_partial:
                    first_token = first_token_of(seq_len - block * BLOCK, FORMAT)
                    last_key = first_position + token - block * BLOCK - first_token
                    sees = (n >= -first_token)[None, :] & (n[None, :] <= last_key[:, None])
                    s = gl.where(sees, s, float("-inf"))
                mine = ((chosen >> token) & 1) != 0
                p, rescale, running_max, sums = add_page(s, mine, running_max, sums, scale, DTYPE)
                acc = acc * rescale[:, None]
                p = gl.convert_layout(p, weights)
                mbarrier.wait(full.index(v_slot), v_phase)
                v = pages.index(v_slot).reshape((BLOCK, D))
                acc = warpgroup_mma(p, v, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(v_slot), count=1)
            else:
                pass_over(full, empty, k_slot, v_slot, v_phase)

        d = gl.arange(0, D, layout=gl.SliceLayout(0, product))
        is_last, acc, running_max, total = join_parts(
            parts, unit, before, size, share, (r * D)[:, None] + d[None, :], r,
            acc, running_max, sum_of_rows(sums, row_layout), zero, CONSUMER, CONSUMERS, ROWS, 1,
        )  # fmt: skip
        if is_last:
            is_empty = total == 0.0
            factor = out_scale / gl.where(is_empty, 1.0, total)
            row, q_head = first_row + token, head * GROUP + member
            live = (row < end_row) & (token < EACH) & (member < GROUP)
            gl.store(
                out_ptr
                + (row.to(gl.int64) * stride_out_t + q_head * stride_out_h)[:, None]
                + (d * stride_out_d)[None, :],
                (acc * factor[:, None]).to(out_ptr.dtype.element_ty),
                mask=live[:, None],
            )
            if HAS_LSE:
                lse = gl.where(is_empty, float("-inf"), (running_max + gl.log2(total)) * LN2)
                lses = lse_ptr + row.to(gl.int64) * stride_lse_t + q_head * stride_lse_h
                gl.store(lses, lse, mask=live)
        before += size
        at = gl.minimum(before, end)
        unit += 1


@gluon.jit
def _widen_pages(
    requests,
    lists,
    work,
    narrow,
    scales,
    narrow_full,
    narrow_empty,
    pages,
    full,
    empty,
    STAGES: gl.constexpr,
    PAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    E5M2: gl.constexpr,
):
    """The converter: K and V of each entry of the program's share as fp16, for both consumers."""
    tile_request_ptr, _tile_row_ptr, _cu_seqlens_ptr, seq_lens_ptr = requests
    entries_ptr, _pages_ptr, counts_ptr, max_list = lists
    _share, at, end, unit, before, num_heads = work
    step = 0
    while at < end:
        size = unit_size(unit, counts_ptr, tile_request_ptr, num_heads, 0, True, False)
        request = gl.maximum(gl.load(tile_request_ptr + unit // num_heads), 0)
        seq_len = gl.load(seq_lens_ptr + request)
        listed = entries_ptr + unit.to(gl.int64) * max_list
        count = gl.load(counts_ptr + unit)
        for i in range(at - before, gl.minimum(end - before, count)):
            num_keys = seq_len - (gl.load(listed + i) >> 16) * BLOCK
            for side in gl.static_range(2):
                slot, place = step % STAGES, step % PAGES
                page, factors = page_of(narrow, scales, slot, FORMAT)
                mbarrier.wait(narrow_full.index(slot), (step // STAGES) & 1)
                if FORMAT == NVFP4:
                    x = widen_nvfp4(page, factors, num_keys, side == 1)
                else:
                    x = widen_fp8(page, E5M2)
                mbarrier.wait(empty.index(place), ((step // PAGES) & 1) ^ 1)
                pages.index(place).reshape((BLOCK, D)).store(x)
                fence_async_shared()
                # All of the page is there before its arrival.
                gl.thread_barrier()
                mbarrier.arrive(full.index(place), count=1)
                # Not before: what is loaded may be under way until it is stored, and the copy
                # engine does not wait for it.
                mbarrier.arrive(narrow_empty.index(slot), count=1)
                step += 1
        before += size
        at = gl.minimum(before, end)
        unit += 1


@gluon.jit(
    do_not_specialize=["num_units", "max_list", "min_share", "cut_cost"]
)  # fmt: skip
def _rows_kernel(
    q_ptr,  # [T, Hq, 128]; e4m3 as bytes
    stride_q_t,
    stride_q_h,
    stride_q_d,
    k_desc,  # [pages, Hkv, 128, 128], boxes of a page; fp8 as bytes, NVFP4 codes [.., 128, 64]
    v_desc,
    k_scales_desc,  # [pages, Hkv, 8, 128] bytes, NVFP4 only
    v_scales_desc,
    q_scale,  # numbers, or pointers to one
    k_scale,
    v_scale,
    softmax_scale_log2,
    tile_request_ptr,
    tile_row_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    entries_ptr,  # [tiles, Hkv, max_list] int32: block << 16 | set of tokens
    pages_ptr,
    counts_ptr,
    out_ptr,  # [T, Hq, 128]
    stride_out_t,
    stride_out_h,
    stride_out_d,
    lse_ptr,  # [T, Hq] fp32
    stride_lse_t,
    stride_lse_h,
    partial_out_ptr,  # [programs, 2, CONSUMERS, 64, 128] fp32
    partial_state_ptr,  # [programs, 2, CONSUMERS, 2, 64] fp32: maximum, sum
    arrivals_ptr,  # [tiles, Hkv, CONSUMERS] int32, zeros between launches
    overlap_ptr,  # MAY_YIELD only
    num_units,
    num_heads,
    max_list,
    min_share,
    cut_cost,
    CONSUMERS: gl.constexpr,
    EACH: gl.constexpr,  # query tokens of a consumer
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    E5M2: gl.constexpr,
    DTYPE: gl.constexpr,  # of the products
    FP8_QUERY: gl.constexpr,
    SIGN: gl.constexpr,
    Q_SCALE_ON_DEVICE: gl.constexpr,
    K_SCALE_ON_DEVICE: gl.constexpr,
    V_SCALE_ON_DEVICE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    MAY_YIELD: gl.constexpr,
    COST: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    CONVERTER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """out = softmax(scale * q K^T) V over the listed blocks of each row; equal shares of entries"""
    gdc_wait()
    gdc_launch_dependents()
    if MAY_YIELD and yields(overlap_ptr, COST):
        return
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    boxes: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(DTYPE, [CONSUMERS, ROWS, D], lines)
    pages = gl.allocate_shared_memory(DTYPE, [PAGES, 1, 1, BLOCK, D], boxes)
    full = gl.allocate_shared_memory(gl.int64, [PAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [PAGES, 1], barriers)
    for i in gl.static_range(PAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    if FORMAT != WIDE:
        WIDTH: gl.constexpr = D // 2 if FORMAT == NVFP4 else D
        narrow = gl.allocate_shared_memory(
            gl.uint8, [STAGES, 1, 1, BLOCK, WIDTH], gl.NVMMASharedLayout(WIDTH, 8, rank=4)
        )
        scales = narrow
        if FORMAT == NVFP4:
            scales = gl.allocate_shared_memory(
                gl.uint8, [STAGES, 1, 1, 8, BLOCK], gl.NVMMASharedLayout(128, 8, rank=4)
            )
        narrow_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
        narrow_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
        for i in gl.static_range(STAGES):
            mbarrier.init(narrow_full.index(i), count=1)
            mbarrier.init(narrow_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    share, at, end, unit, before = find_share(
        counts_ptr, tile_request_ptr, 0, num_units, num_heads, 0, min_share, cut_cost, 4, False
    )
    scale = softmax_scale_log2 * load_factor(q_scale, Q_SCALE_ON_DEVICE)
    scale *= load_factor(k_scale, K_SCALE_ON_DEVICE)
    out_scale = 1.0 * load_factor(v_scale, V_SCALE_ON_DEVICE)
    if FORMAT == NVFP4:
        scale *= NVFP4_FACTOR
        out_scale *= NVFP4_FACTOR
    # Partitions get their arguments where warps may still read the sums of the others.
    gl.thread_barrier()
    # fmt: off
    parts = (partial_out_ptr, partial_state_ptr, arrivals_ptr)
    requests = (tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr)
    lists = (entries_ptr, pages_ptr, counts_ptr, max_list)
    # The producer's, which can walk block ids besides.
    blocks = (
        entries_ptr, 0, 0, 0, pages_ptr, 0, entries_ptr, pages_ptr, counts_ptr, max_list, 0, 0, 0,
    )
    work = (share, at, end, unit, before, num_heads)
    if FORMAT == WIDE:
        gl.warp_specialize(
            [
                (_attend_rows, (
                    q_ptr, stride_q_t, stride_q_h, stride_q_d,
                    out_ptr, stride_out_t, stride_out_h, stride_out_d,
                    lse_ptr, stride_lse_t, stride_lse_h,
                    parts, requests, lists, work, scale, out_scale, queries, pages, full, empty,
                    0, CONSUMERS, EACH, GROUP, GROUP_ROWS, PAGES, FORMAT, FP8_QUERY, SIGN, HAS_LSE,
                )),
                (_attend_rows, (
                    q_ptr, stride_q_t, stride_q_h, stride_q_d,
                    out_ptr, stride_out_t, stride_out_h, stride_out_d,
                    lse_ptr, stride_lse_t, stride_lse_h,
                    parts, requests, lists, work, scale, out_scale, queries, pages, full, empty,
                    1, CONSUMERS, EACH, GROUP, GROUP_ROWS, PAGES, FORMAT, FP8_QUERY, SIGN, HAS_LSE,
                )),
                (load_pages, (
                    k_desc, v_desc, k_scales_desc, v_scales_desc, requests, blocks, work,
                    pages, pages, full, full, empty, 1, PAGES, BLOCK * D * 2, FORMAT, False, False,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_rows, (
                    q_ptr, stride_q_t, stride_q_h, stride_q_d,
                    out_ptr, stride_out_t, stride_out_h, stride_out_d,
                    lse_ptr, stride_lse_t, stride_lse_h,
                    parts, requests, lists, work, scale, out_scale, queries, pages, full, empty,
                    0, CONSUMERS, EACH, GROUP, GROUP_ROWS, PAGES, FORMAT, FP8_QUERY, SIGN, HAS_LSE,
                )),
                (_attend_rows, (
                    q_ptr, stride_q_t, stride_q_h, stride_q_d,
                    out_ptr, stride_out_t, stride_out_h, stride_out_d,
                    lse_ptr, stride_lse_t, stride_lse_h,
                    parts, requests, lists, work, scale, out_scale, queries, pages, full, empty,
                    1, CONSUMERS, EACH, GROUP, GROUP_ROWS, PAGES, FORMAT, FP8_QUERY, SIGN, HAS_LSE,
                )),
                (_widen_pages, (
                    requests, lists, work, narrow, scales, narrow_full, narrow_empty,
                    pages, full, empty, STAGES, PAGES, FORMAT, E5M2,
                )),
                (load_pages, (
                    k_desc, v_desc, k_scales_desc, v_scales_desc, requests, blocks, work,
                    narrow, scales, narrow_full, narrow_full, narrow_empty, 1, STAGES,
                    BLOCK * WIDTH + (8 * BLOCK if FORMAT == NVFP4 else 0), FORMAT, False, False,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONVERTER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


class Tile(NamedTuple):
    """Constants of a launch; none depends on a batch's lengths."""

    each: int  # query tokens of a consumer
    group_rows: int  # rows of a token: its query heads of one KV head, padded

    @property
    def tokens(self) -> int:
        return self.each * CONSUMERS

    @property
    def cost(self) -> float:
        """Of a block that a consumer multiplies, in the twin's rows of a union tile."""
        return self.each * ROW_COST


def choose(plan: Plan, slots: int) -> Tile | None:
    """The tile for requests of so many tokens; None where its lists would be too long."""
    group_rows = rows_of_a_token(plan.config)
    each = min(ROWS.value // group_rows, MAX_TOKENS // CONSUMERS, plan.query_len_class // CONSUMERS)
    tile = Tile(max(each, 1), group_rows)
    return tile if launch.power_of_two_above(slots) * tile.tokens <= MAX_LIST else None


def pays(plan: Plan, slots: int) -> bool:
    """Requests have tokens enough to fill the rows, and there are blocks enough to make lists of.

    With half of the rows empty, NVFP4 still gains: what is multiplied is decoded once.
    """
    least = MIN_TOKENS // 2 if plan.kv_format.scale_group else MIN_TOKENS
    return plan.query_len_class >= least and not is_few(plan, slots)


def pays_for_prompt(plan: Plan, slots: int) -> bool:
    """The step has fewer tokens than the tiles of prefill need, but more than few."""
    is_short = plan.max_query_len < MIN_QUERY_LEN or plan.max_rows <= MAX_PROMPT_TOKENS
    return is_short and not is_few(plan, slots)


def attend(
    q: torch.Tensor,
    cache: KVCache,
    plan: Plan,
    tile: Tile,
    lists: Lists,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    may_yield: bool = False,
) -> None:
    """:func:`msattn.attend` over the lists, in one launch; nothing where they yield to KV-major."""
    config, tiles = plan.config, plan.tiles(tile.tokens)
    units = (len(tiles.request), config.num_kv_heads)
    most = units[0] * units[1] * lists.entries.shape[2]
    programs = max(1, min(launch.num_processors(q.device), most // MIN_SHARE))
    parts = (programs, 2, CONSUMERS)
    partial_out = plan.workspace("rows_out", (*parts, ROWS.value, D.value), torch.float32)
    partial_state = plan.workspace("rows_state", (*parts, 2, ROWS.value), torch.float32)
    arrivals = plan.workspace("rows_arrivals", (*units, CONSUMERS), torch.int32)
    is_narrow = cache.format.storage_dtype.itemsize == 1
    start(
        _rows_kernel,
        (programs,),
        **step_arguments(q, cache, plan, tiles, softmax_scale, q_scale, out, lse),
        entries_ptr=lists.entries,
        pages_ptr=lists.pages,
        counts_ptr=lists.counts,
        partial_out_ptr=partial_out,
        partial_state_ptr=partial_state,
        arrivals_ptr=arrivals,
        overlap_ptr=lists.overlap,
        max_list=lists.entries.shape[2],
        CONSUMERS=CONSUMERS,
        EACH=tile.each,
        GROUP_ROWS=tile.group_rows,
        PAGES=PAGES[is_narrow],
        STAGES=_stages(cache.format.bytes_per_page(config) // (2 * config.num_kv_heads)),
        MAY_YIELD=may_yield,
        COST=tile.cost,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[is_narrow],
        CONVERTER_REGISTERS=CONVERTER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )


def _stages(side_bytes: int) -> int:
    """Sides of narrow pages that fit beside the queries and the 16 bit pages."""
    queries = CONSUMERS * ROWS.value * D.value * 2
    ring = SHARED_BYTES - OTHER_BYTES - queries - PAGES[True] * PAGE_BYTES
    return min(MAX_STAGES, ring // side_bytes)
