"""Decode and verification on Hopper: one launch, pages by the copy engine, keys first in products.

Programs take equal shares of the step's blocks (:mod:`.shares`). A program's producer warp loads K
and V of its entries into a ring, across units. A consumer is a warpgroup of up to 64 columns, EACH
tokens of GROUP_ROWS query heads: keys, and then elements of V, are the rows of its products, so
that few columns waste nothing.

Tiles of one token walk its block ids as they are; longer ones the union of their tokens' blocks
(see ``kernels/triton/attend_union.py``, the twin).
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
from ..triton.attend_union import MAX_LIST, make_lists
from ..triton.recording import start
from ..triton.tiles import NVFP4, NVFP4_FACTOR, WIDE
from .attend_union import BLOCK, LN2, D, load_factor, rows_of_a_token
from .narrow import in_order_of_k, in_order_of_v, narrow_scores, narrow_v, widen
from .page_ring import (
    MAX_TOKENS,
    first_token_of,
    load_pages,
    page_of,
    pass_over,
    read_fact,
    step_arguments,
)
from .shares import MIN_SHARE, find_share, join_parts, unit_size

COLUMNS = 32
"""Of a consumer, if a token has no more: with twice as many, narrow pages spill."""
DIRECT_ENTRIES = 20
"""Entries of a program up to which each token is a tile: lists would take longer than they save."""
NVFP4_ENTRY = 1.6
"""An entry that is decoded from NVFP4, in others."""
WIDE_ENTRIES = 48
"""Of a program, up to which the twin is slower with 16 bit pages: by 8 % with 31, not with 62."""
MAX_DIRECT_SLOTS = 64
PROGRAMS = 2
"""Of a multiprocessor, with one consumer each; programs of two consumers have it alone."""
MAX_STAGES = 8
"""Sides of pages under way: as many as fit, but no more than a program can be ahead."""
REGISTERS, MAX_REGISTERS = 1 << 16, 248
SHARED_BYTES = 228 << 10
"""Of a multiprocessor, 1 KiB for each program included that it cannot have."""
CONSUMER_REGISTERS = 232
"""Of a thread of the second consumer; the first one has what the others leave."""


@gluon.jit
def _sum_own(p):
    """Sums of the keys that a thread has of each column: ``[4, 8, columns]``."""
    return gl.sum(gl.sum(gl.reshape(p, (2, 4, 2, 8, p.shape[1])), 2), 0)


@gluon.jit
def _scale_own(sums, factor):
    """Those sums times a factor of each column."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    return sums * gl.convert_layout(factor, layout)[None, None, :]


@gluon.jit
def _attend_columns(
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
    counts_ptr,
    num_slots,
    work,
    scale,
    out_scale,
    queries,
    weights,
    ring,
    scales,
    facts,
    full,
    empty,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    EACH: gl.constexpr,  # query tokens of a consumer
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    E5M2: gl.constexpr,
    FP8_QUERY: gl.constexpr,
    SIGN: gl.constexpr,
    DIRECT: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """A consumer: online softmax of its columns over the entries of the program's share."""
    tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, _seq_lens_ptr = requests
    share, at, end, unit, before, num_heads = work
    COLUMNS: gl.constexpr = EACH * GROUP_ROWS
    MINE: gl.constexpr = (1 << EACH) - 1
    DTYPE: gl.constexpr = queries.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)
    column: gl.constexpr = gl.SliceLayout(0, product)
    whole: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    queries, weights = queries.index(CONSUMER), weights.index(CONSUMER)
    c = gl.arange(0, COLUMNS, layout=column)
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, product))
    zero = gl.zeros([BLOCK, COLUMNS], gl.float32, layout=product)
    step = 0
    while at < end:
        size = unit_size(unit, counts_ptr, tile_request_ptr, num_heads, num_slots, True, DIRECT)
        tile, head = unit // num_heads, unit % num_heads
        # A tile of one token has that token's number, and all of them are the step's.
        first_row = tile
        if not DIRECT:
            first_row = gl.load(tile_row_ptr + tile)
            request = gl.maximum(gl.load(tile_request_ptr + tile), 0)
            end_row = gl.load(cu_seqlens_ptr + request + 1)
        r = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, whole))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, whole))
        row = first_row + CONSUMER * EACH + r // GROUP_ROWS
        q_head = head * GROUP + r % GROUP_ROWS
        live = r % GROUP_ROWS < GROUP
        if not DIRECT:
            live &= row < end_row
        q = gl.load(
            q_ptr
            + (row.to(gl.int64) * stride_q_t + q_head * stride_q_h)[:, None]
            + (d * stride_q_d)[None, :],
            mask=live[:, None],
            other=0,
        )
        if FP8_QUERY:
            q = widen(q, False)
        q = (q.to(gl.float32) * SIGN).to(DTYPE)
        queries.store(in_order_of_k(q, FORMAT) if FORMAT != WIDE else q)
        fence_async_shared()
        gl.thread_barrier()

        token = CONSUMER * EACH + c // GROUP_ROWS
        running_max = gl.full([COLUMNS], -1e30, gl.float32, layout=column)
        running_sum = _sum_own(zero)
        acc = zero
        for _ in range(at - before, gl.minimum(end - before, size)):
            k_slot, v_slot = step % STAGES, (step + 1) % STAGES
            k_phase, v_phase = (step // STAGES) & 1, ((step + 1) // STAGES) & 1
            step += 2
            k, k_scales = page_of(ring, scales, k_slot, FORMAT)
            v, v_scales = page_of(ring, scales, v_slot, FORMAT)
            mbarrier.wait(full.index(k_slot), k_phase)
            tokens, position, num_keys = read_fact(facts.index(k_slot))
            if ((tokens >> (CONSUMER * EACH)) & MINE) != 0:
                if FORMAT != WIDE:
                    s = narrow_scores(
                        k, k_scales, queries, empty.index(k_slot), zero, operand,
                        COLUMNS > 32, FORMAT, E5M2,
                    )  # fmt: skip
                else:
                    s = warpgroup_mma(
                        k, queries.permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    s = warpgroup_mma_wait(0, deps=(s,))
                    mbarrier.arrive(empty.index(k_slot), count=1)
                first_token = first_token_of(num_keys, FORMAT)
                last = gl.where(((tokens >> token) & 1) != 0, position + token - first_token, -1)
                sees = (n >= -first_token)[:, None] & (n[:, None] <= last[None, :])
                s = gl.where(sees, s, float("-inf"))
                new_max = gl.maximum(running_max, gl.max(s, 0) * scale)
                rescale = gl.exp2(running_max - new_max)
                p = gl.exp2(s * scale - new_max[None, :])
                running_max = new_max
                weights.permute((1, 0)).store(p.to(DTYPE))
                fence_async_shared()
                gl.thread_barrier()
                running_sum = _scale_own(running_sum, rescale) + _sum_own(p)
                acc = acc * rescale[None, :]
                mbarrier.wait(full.index(v_slot), v_phase)
                if FORMAT != WIDE:
                    acc = warpgroup_mma(
                        narrow_v(v, v_scales, num_keys, operand, FORMAT, E5M2),
                        weights.permute((1, 0)), acc, is_async=True,
                    )  # fmt: skip
                    mbarrier.arrive(empty.index(v_slot), count=1)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                else:
                    acc = warpgroup_mma(
                        v.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True
                    )
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(empty.index(v_slot), count=1)
            else:
                pass_over(full, empty, k_slot, v_slot, v_phase)

        total = gl.convert_layout(gl.sum(gl.sum(running_sum, 0), 0), column)
        numbers = (gl.arange(0, D, layout=gl.SliceLayout(1, product)) * COLUMNS)[:, None] + c[
            None, :
        ]
        is_last, acc, running_max, total = join_parts(
            parts, unit, before, size, share, numbers, c, acc, running_max, total, zero,
            CONSUMER, CONSUMERS, COLUMNS, 0,
        )  # fmt: skip
        if is_last:
            is_empty = total == 0.0
            result = acc * (out_scale / gl.where(is_empty, 1.0, total))[None, :]
            result = result.to(out_ptr.dtype.element_ty)
            result = gl.permute(in_order_of_v(result) if FORMAT != WIDE else result, (1, 0))
            gl.store(
                out_ptr
                + (row.to(gl.int64) * stride_out_t + q_head * stride_out_h)[:, None]
                + (d * stride_out_d)[None, :],
                gl.convert_layout(result, whole),
                mask=live[:, None],
            )
            if HAS_LSE:
                lse = gl.where(is_empty, float("-inf"), (running_max + gl.log2(total)) * LN2)
                own_row, member = first_row + token, c % GROUP_ROWS
                own = member < GROUP
                if not DIRECT:
                    own &= own_row < end_row
                gl.store(
                    lse_ptr
                    + own_row.to(gl.int64) * stride_lse_t
                    + (head * GROUP + member) * stride_lse_h,
                    lse,
                    mask=own,
                )
        before += size
        at = gl.minimum(before, end)
        unit += 1


@gluon.jit
def _look_ahead(
    q_ptr,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    requests,
    blocks,
    unit,
    num_requests,
    num_units,
    num_heads,
    GROUP: gl.constexpr,
):
    """Loads what a unit is found by, for the caches' sake: the kernel before may still run.

    That may yet write what is loaded, and the unit is the program's first one if the step fills the
    plan. So nothing is kept.
    """
    # fmt: off
    tile_request_ptr, _tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr = requests
    (
        block_ids_ptr, stride_ids_t, stride_ids_h, stride_ids_k, page_table_ptr, stride_table,
        _entries_ptr, _pages_ptr, _counts_ptr, _max_list, num_slots, num_blocks, _num_pages,
    ) = blocks
    # fmt: on
    unit = gl.minimum(unit, num_units - 1)
    tile, head = unit // num_heads, unit % num_heads
    request = unit * num_requests // num_units
    gl.load(cu_seqlens_ptr + num_requests, volatile=True)
    gl.load(cu_seqlens_ptr + request + 1, volatile=True)
    gl.load(seq_lens_ptr + request, volatile=True)
    gl.load(tile_request_ptr + tile, volatile=True)
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    row = tile.to(gl.int64)
    ids = block_ids_ptr + row * stride_ids_t + head * stride_ids_h
    gl.load(ids + i * stride_ids_k, mask=i < num_slots, other=0, volatile=True)
    # A page table's lines are of 32 pages, a query's of 64 numbers of 16 bits.
    pages = page_table_ptr + request * stride_table
    gl.load(pages + i * 32, mask=i * 32 < num_blocks, other=0, volatile=True)
    queries = q_ptr + row * stride_q_t + (head * GROUP + i // 2) * stride_q_h
    gl.load(queries + i % 2 * 64 * stride_q_d, mask=i < 2 * GROUP, other=0, volatile=True)


@gluon.jit(
    do_not_specialize=[
        "stride_table", "num_requests", "num_units", "num_slots", "num_blocks", "num_pages",
        "max_list", "min_share", "cut_cost",
    ]
)  # fmt: skip
def _decode_kernel(
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
    block_ids_ptr,  # DIRECT only, as the page table
    stride_ids_t,
    stride_ids_h,
    stride_ids_k,
    page_table_ptr,
    stride_table,
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
    partial_out_ptr,  # [programs, 2, CONSUMERS, 128, columns] fp32
    partial_state_ptr,  # [programs, 2, CONSUMERS, 2, columns] fp32: maximum, sum
    arrivals_ptr,  # [tiles, Hkv, CONSUMERS] int32, zeros between launches
    num_requests,
    num_units,
    num_heads,
    num_slots,
    num_blocks,
    num_pages,
    max_list,
    min_share,
    cut_cost,
    CONSUMERS: gl.constexpr,
    EACH: gl.constexpr,  # query tokens of a consumer
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    SLOTS: gl.constexpr,  # K rounded up to a power of two, DIRECT only
    STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    E5M2: gl.constexpr,
    DTYPE: gl.constexpr,  # of the products
    FP8_QUERY: gl.constexpr,
    SIGN: gl.constexpr,
    Q_SCALE_ON_DEVICE: gl.constexpr,
    K_SCALE_ON_DEVICE: gl.constexpr,
    V_SCALE_ON_DEVICE: gl.constexpr,
    DIRECT: gl.constexpr,  # tiles of one token walk its block ids, without a list
    HAS_LSE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """out = softmax(scale * q K^T) V over the listed blocks of each row; equal shares of entries"""
    COLUMNS: gl.constexpr = EACH * GROUP_ROWS
    STORED: gl.constexpr = DTYPE if FORMAT == WIDE else gl.uint8
    BITS: gl.constexpr = 16 if FORMAT == WIDE else 8
    WIDTH: gl.constexpr = D // 2 if FORMAT == NVFP4 else D
    SIDE_BYTES: gl.constexpr = BLOCK * WIDTH * BITS // 8 + (8 * BLOCK if FORMAT == NVFP4 else 0)
    ring = gl.allocate_shared_memory(
        STORED, [STAGES, 1, 1, BLOCK, WIDTH],
        gl.NVMMASharedLayout(min(WIDTH * BITS // 8, 128), BITS, rank=4),
    )  # fmt: skip
    scales = ring
    if FORMAT == NVFP4:
        scales = gl.allocate_shared_memory(
            gl.uint8, [STAGES, 1, 1, 8, BLOCK], gl.NVMMASharedLayout(128, 8, rank=4)
        )
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = gl.allocate_shared_memory(DTYPE, [CONSUMERS, COLUMNS, D], lines)
    weights = gl.allocate_shared_memory(DTYPE, [CONSUMERS, COLUMNS, BLOCK], lines)
    facts = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    # fmt: off
    requests = (tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr)
    blocks = (
        block_ids_ptr, stride_ids_t, stride_ids_h, stride_ids_k, page_table_ptr, stride_table,
        entries_ptr, pages_ptr, counts_ptr, max_list, num_slots, num_blocks, num_pages,
    )
    # fmt: on
    if DIRECT and num_units > 0:
        _share, _at, _end, unit, _before = find_share(
            counts_ptr, tile_request_ptr, num_units * gl.maximum(num_slots, 1),
            num_units, num_heads, num_slots, min_share, cut_cost, 4, DIRECT,
        )  # fmt: skip
        _look_ahead(
            q_ptr, stride_q_t, stride_q_h, stride_q_d, requests, blocks,
            unit, num_requests, num_units, num_heads, GROUP,
        )  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    num_rows = gl.load(cu_seqlens_ptr + num_requests)
    share, at, end, unit, before = find_share(
        counts_ptr, tile_request_ptr, num_rows * num_heads * gl.maximum(num_slots, 1),
        num_units, num_heads, num_slots, min_share, cut_cost, 4, DIRECT,
    )  # fmt: skip
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
    work = (share, at, end, unit, before, num_heads)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_attend_columns, (
                    q_ptr, stride_q_t, stride_q_h, stride_q_d,
                    out_ptr, stride_out_t, stride_out_h, stride_out_d,
                    lse_ptr, stride_lse_t, stride_lse_h,
                    parts, requests, counts_ptr, num_slots, work, scale, out_scale,
                    queries, weights, ring, scales, facts, full, empty,
                    0, CONSUMERS, EACH, GROUP, GROUP_ROWS, STAGES,
                    FORMAT, E5M2, FP8_QUERY, SIGN, DIRECT, HAS_LSE,
                )),
                (load_pages, (
                    k_desc, v_desc, k_scales_desc, v_scales_desc, requests, blocks, work,
                    ring, scales, facts, full, empty,
                    SLOTS, STAGES, SIDE_BYTES, FORMAT, DIRECT, True,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_columns, (
                    q_ptr, stride_q_t, stride_q_h, stride_q_d,
                    out_ptr, stride_out_t, stride_out_h, stride_out_d,
                    lse_ptr, stride_lse_t, stride_lse_h,
                    parts, requests, counts_ptr, num_slots, work, scale, out_scale,
                    queries, weights, ring, scales, facts, full, empty,
                    0, CONSUMERS, EACH, GROUP, GROUP_ROWS, STAGES,
                    FORMAT, E5M2, FP8_QUERY, SIGN, DIRECT, HAS_LSE,
                )),
                (_attend_columns, (
                    q_ptr, stride_q_t, stride_q_h, stride_q_d,
                    out_ptr, stride_out_t, stride_out_h, stride_out_d,
                    lse_ptr, stride_lse_t, stride_lse_h,
                    parts, requests, counts_ptr, num_slots, work, scale, out_scale,
                    queries, weights, ring, scales, facts, full, empty,
                    1, CONSUMERS, EACH, GROUP, GROUP_ROWS, STAGES,
                    FORMAT, E5M2, FP8_QUERY, SIGN, DIRECT, HAS_LSE,
                )),
                (load_pages, (
                    k_desc, v_desc, k_scales_desc, v_scales_desc, requests, blocks, work,
                    ring, scales, facts, full, empty,
                    SLOTS, STAGES, SIDE_BYTES, FORMAT, DIRECT, True,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


class Tile(NamedTuple):
    """Constants of a launch; none depends on a batch's lengths."""

    each: int  # query tokens of a consumer
    group_rows: int  # columns of a token: its query heads of one KV head, padded
    consumers: int

    @property
    def tokens(self) -> int:
        return self.each * self.consumers

    @property
    def columns(self) -> int:
        """Of a consumer."""
        return self.each * self.group_rows

    @property
    def programs(self) -> int:
        """Of a multiprocessor."""
        return max(PROGRAMS // self.consumers, 1)

    @property
    def registers(self) -> int:
        """Of a thread, on average; the producer leaves most of its own to the consumers."""
        each = REGISTERS // (128 * (self.consumers + 1) * self.programs)
        return min(each // 8 * 8, MAX_REGISTERS)

    @property
    def producer_registers(self) -> int:
        """Of a thread; 24 are too few without spills, and all that 64 columns leave."""
        return 40 if self.columns <= 32 else 24

    def stages(self, side_bytes: int) -> int:
        """Sides of pages that fit beside queries, weights and what an output is turned by."""
        consumer = self.columns * (4 * D.value + BLOCK.value) + 128
        ring = SHARED_BYTES // self.programs - 1024 - self.consumers * consumer
        return min(MAX_STAGES, ring // side_bytes)


def choose(plan: Plan, slots: int) -> Tile | None:
    """The tile for requests of so many tokens; None where its lists would be too long.

    Tokens are tiles of their own where all of them are few entries for each program.
    """
    group_rows = rows_of_a_token(plan.config)
    length = plan.query_len_class
    if is_few(plan, slots):
        length = 1
    if length == 1 and slots <= MAX_DIRECT_SLOTS:
        return Tile(1, group_rows, 1)
    each = min(max(COLUMNS // group_rows, 1), length)
    consumers = 2 if length > each and 2 * each <= MAX_TOKENS.value else 1
    tile = Tile(each, group_rows, consumers)
    fits = launch.power_of_two_above(slots) * tile.tokens <= MAX_LIST
    return tile if fits else None


def pays(plan: Plan, tile: Tile) -> bool:
    """The twin was slower, but with 16 bit pages for unions, and for tokens of so many entries."""
    if tile.tokens > 1:
        return plan.kv_format.is_fp8
    is_narrow = plan.kv_format.is_fp8 or bool(plan.kv_format.scale_group)
    return is_narrow or _entries_of_a_program(plan, plan.config.topk) <= WIDE_ENTRIES


def is_few(plan: Plan, slots: int) -> bool:
    """Each token is a tile: making lists would take longer than they save."""
    each = NVFP4_ENTRY if plan.kv_format.scale_group else 1
    return each * _entries_of_a_program(plan, slots) <= DIRECT_ENTRIES


def _entries_of_a_program(plan: Plan, slots: int) -> float:
    """Where each token is a tile, and all slots hold blocks."""
    entries = plan.max_rows * plan.config.num_kv_heads * slots
    return entries / (PROGRAMS * launch.num_processors(plan.device))


def attend(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    tile: Tile,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """:func:`msattn.attend` in one launch, behind one for lists where tiles have several tokens."""
    config, slots, tiles = plan.config, block_ids.shape[2], plan.tiles(tile.tokens)
    direct = tile.tokens == 1
    lists = None if direct else make_lists(block_ids, cache, plan, tile.tokens)
    units = (len(tiles.request), config.num_kv_heads)
    most = units[0] * units[1] * max(slots, 1) * tile.tokens
    programs = max(1, min(tile.programs * launch.num_processors(q.device), most // MIN_SHARE))
    parts = (programs, 2, tile.consumers)
    partial_out = plan.workspace("partial_out", (*parts, D.value, tile.columns), torch.float32)
    partial_state = plan.workspace("partial_state", (*parts, 2, tile.columns), torch.float32)
    arrivals = plan.workspace("decode_arrivals", (*units, tile.consumers), torch.int32)
    entries, pages, counts = lists[:3] if lists else (arrivals, arrivals, arrivals)
    start(
        _decode_kernel,
        (programs,),
        **step_arguments(q, cache, plan, tiles, softmax_scale, q_scale, out, lse),
        block_ids_ptr=block_ids,
        stride_ids_t=block_ids.stride(0),
        stride_ids_h=block_ids.stride(1),
        stride_ids_k=block_ids.stride(2),
        page_table_ptr=plan.page_table,
        stride_table=plan.page_table.stride(0),
        entries_ptr=entries,
        pages_ptr=pages,
        counts_ptr=counts,
        partial_out_ptr=partial_out,
        partial_state_ptr=partial_state,
        arrivals_ptr=arrivals,
        num_requests=plan.num_requests,
        num_slots=slots,
        num_blocks=plan.num_blocks,
        num_pages=cache.num_pages,
        max_list=entries.shape[-1],
        CONSUMERS=tile.consumers,
        EACH=tile.each,
        GROUP_ROWS=tile.group_rows,
        SLOTS=launch.power_of_two_above(slots),
        STAGES=tile.stages(cache.format.bytes_per_page(config) // (2 * config.num_kv_heads)),
        DIRECT=direct,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=tile.producer_registers,
        num_warps=4,
        maxnreg=tile.registers,
        launch_pdl=True,
    )
