"""KV-major attention on Hopper: two warpgroups multiply, one merges, a warp loads by bulk copies.

The reverse index is the twin's (``kernels/triton/attend_kv_major.py``), its items are tiles of 64
rows: a few picks of one block, GROUP_ROWS rows each. One launch takes turns, each of them a chunk
of tokens and a KV head. Programs are persistent, and each takes a contiguous share of a turn's
tiles, so that a block that many tokens chose is many programs' work. The producer loads a block's K
and V when the first of its tiles comes and gathers the queries of each tile; consumers take tiles
in turn. A tile's outputs are partial. Those of one turn are merged while the next one is attended:
products for the tensor cores and a stream for the memory, side by side. Two buffers of partial
outputs take turns, and counters in global memory say which turns have been attended and merged by
everybody; all programs run at the same time.

A pick's partial output is stored in lines, ``[4, GROUP, 32]`` numbers: quarters of the columns. Of
each 32, a thread of the product has 8, of which it makes one store of 16 bytes; a warp's stores are
then whole lines of 128 bytes. The merge puts the columns back in order.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...cache import KVCache, Scale
from ...plan import Plan
from ..triton import attend_kv_major as twin
from ..triton import launch
from ..triton.attend_kv_major import SEEN_WHOLE, SLOT_BITS, SLOT_MASK
from ..triton.recording import start
from .attend_union import (
    BLOCK,
    HALF,
    ROWS,
    D,
    Tails,
    area,
    descriptor,
    load_factor,
    load_page,
    pages_descriptor,
    rows_of_a_token,
    yields,
)
from .merge_partials import merge_token, slots_at_once

CONSUMERS = 2
PAGES = 2
"""Blocks whose K and V are there: the one of the tiles at work, and the next."""
TILES = 6
"""Tiles whose queries are there, 16 KiB each: with the blocks, nearly all of the shared memory. A
multiple of CONSUMERS, so that a place in this ring has one consumer, which sees each phase of its
barriers: another one could be a round ahead of a copy that is late, and take the last round's end
for its own."""
PARTIAL_BYTES = 400 << 20
"""Partial outputs, of both turns."""
BUFFERS = 2
"""Of partial outputs: of the turn at work, and of the one before."""
CONSUMER_REGISTERS, MERGER_REGISTERS, PRODUCER_REGISTERS = 168, 128, 48
MIN_GROUP = 3
"""Smaller groups would fill less than half of these rows; the twin's tiles have no such gaps."""


@gluon.jit
def _load_token(entries, first, picks, j):
    """The token of a tile's pick j; of its last pick where it has fewer."""
    return gl.load(entries + first + gl.minimum(j, picks - 1)) >> SLOT_BITS


@gluon.jit
def _load_tokens(entries, first, picks, TOKENS: gl.constexpr):
    """The tokens of a tile's picks; those behind TOKENS are not used."""
    a = _load_token(entries, first, picks, 0)
    b = _load_token(entries, first, picks, 1) if TOKENS > 1 else a
    c = _load_token(entries, first, picks, 2) if TOKENS > 2 else a
    d = _load_token(entries, first, picks, 3) if TOKENS > 2 else a
    e = _load_token(entries, first, picks, 4) if TOKENS > 4 else a
    f = _load_token(entries, first, picks, 5) if TOKENS > 4 else a
    g = _load_token(entries, first, picks, 6) if TOKENS > 4 else a
    h = _load_token(entries, first, picks, 7) if TOKENS > 4 else a
    return a, b, c, d, e, f, g, h


@gluon.jit
def _gather(
    q_desc,
    token,
    num_heads,
    head,
    barrier,
    queries,
    slot,
    J: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
):
    """The query heads of one token, into their rows of a tile; nothing behind the tile's rows."""
    if J * GROUP_ROWS < ROWS:
        row = (token * num_heads + head) * GROUP
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc,
                [row, half * HALF],
                barrier,
                queries.index(2 * slot + half).slice(J * GROUP_ROWS, GROUP_ROWS, dim=0),
            )


@gluon.jit
def _load_tiles(
    k_desc,
    v_desc,
    k_tails,
    v_tails,
    q_desc,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    items_ptr,
    entries_ptr,
    totals_ptr,
    queries,
    keys,
    values,
    q_full,
    q_empty,
    kv_full,
    kv_empty,
    num_turns,
    num_heads,
    num_blocks,
    max_items,
    max_entries,
    page_rows,
    head_rows,
    head_columns,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    PAGES: gl.constexpr,
    TILES: gl.constexpr,
    HAS_TAILS: gl.constexpr,
):
    """The producer: K and V of each block, the queries of each tile.

    What says where they lie is loaded one tile ahead, and the tile's own facts two: nothing waits.
    """
    TOKENS: gl.constexpr = ROWS // GROUP_ROWS
    step = 0
    kv_step = 0
    for turn in range(num_turns):
        head = turn % num_heads
        items = items_ptr + max_items.to(gl.int64) * 4 * turn
        entries = entries_ptr + max_entries.to(gl.int64) * turn
        begin, end = _share(totals_ptr, turn)
        if begin < end:
            row, first, picks, _limit = _load_item(items, begin)
            next_row, next_first, next_picks, _limit = _load_item(
                items, gl.minimum(begin + 1, end - 1)
            )
            a, b, c, d, e, f, g, h = _load_tokens(entries, first, picks, TOKENS)
            page = gl.load(page_table_ptr + _table_entry(row, stride_table, num_blocks))
            seq_len = gl.load(seq_lens_ptr + row // num_blocks)
            held_row = -1
            for tile in range(begin, end):
                later_row, later_first, later_picks, _limit = _load_item(
                    items, gl.minimum(tile + 2, end - 1)
                )
                a1, b1, c1, d1, e1, f1, g1, h1 = _load_tokens(
                    entries, next_first, next_picks, TOKENS
                )
                next_page = gl.load(
                    page_table_ptr + _table_entry(next_row, stride_table, num_blocks)
                )
                next_seq_len = gl.load(seq_lens_ptr + next_row // num_blocks)
                if row != held_row:
                    slot = kv_step % PAGES
                    mbarrier.wait(kv_empty.index(slot), ((kv_step // PAGES) & 1) ^ 1)
                    at = page * page_rows + head * head_rows
                    column = head * head_columns
                    tail_at = (row // num_blocks * num_heads + head) * BLOCK
                    is_tail = (row % num_blocks + 1) * BLOCK > seq_len
                    load_page(
                        k_desc, k_tails, at, column, tail_at, is_tail,
                        kv_full.index(slot), keys.index(slot), HAS_TAILS,
                    )  # fmt: skip
                    load_page(
                        v_desc, v_tails, at, column, tail_at, is_tail,
                        kv_full.index(slot), values.index(slot), HAS_TAILS,
                    )  # fmt: skip
                    kv_step += 1
                    held_row = row
                slot = step % TILES
                full = q_full.index(slot)
                mbarrier.wait(q_empty.index(slot), ((step // TILES) & 1) ^ 1)
                mbarrier.expect(full, ROWS * D * 2)
                _gather(q_desc, a, num_heads, head, full, queries, slot, 0, GROUP, GROUP_ROWS)
                _gather(q_desc, b, num_heads, head, full, queries, slot, 1, GROUP, GROUP_ROWS)
                _gather(q_desc, c, num_heads, head, full, queries, slot, 2, GROUP, GROUP_ROWS)
                _gather(q_desc, d, num_heads, head, full, queries, slot, 3, GROUP, GROUP_ROWS)
                _gather(q_desc, e, num_heads, head, full, queries, slot, 4, GROUP, GROUP_ROWS)
                _gather(q_desc, f, num_heads, head, full, queries, slot, 5, GROUP, GROUP_ROWS)
                _gather(q_desc, g, num_heads, head, full, queries, slot, 6, GROUP, GROUP_ROWS)
                _gather(q_desc, h, num_heads, head, full, queries, slot, 7, GROUP, GROUP_ROWS)
                step += 1
                row, page, seq_len = next_row, next_page, next_seq_len
                next_row, next_first, next_picks = later_row, later_first, later_picks
                a, b, c, d, e, f, g, h = a1, b1, c1, d1, e1, f1, g1, h1


@gluon.jit
def _attend_tiles(
    items_ptr,
    entries_ptr,
    totals_ptr,
    progress_ptr,
    scale,
    out_scale,
    partial_out_ptr,
    lse_ptr,
    queries,
    keys,
    values,
    q_full,
    q_empty,
    kv_full,
    kv_empty,
    num_turns,
    num_heads,
    chunk_tokens,
    max_items,
    max_entries,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    PAGES: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
    SIGN: gl.constexpr,
):
    """A consumer: the partial outputs of every CONSUMERS-th tile of the program."""
    DTYPE: gl.constexpr = keys.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)
    # A thread of the product has columns 8 j + {0, 1} of each 32; here they are side by side.
    lines: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS, D],
    )
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, product))
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, product))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, lines))
    place, member = r // GROUP_ROWS, r % GROUP_ROWS
    zero = gl.zeros([ROWS, BLOCK], gl.float32, layout=product)
    step = 0  # tiles of the turns before
    block = -1  # the last tile's, counted over all of the program's blocks
    for turn in range(num_turns):
        items = items_ptr + max_items.to(gl.int64) * 4 * turn
        entries = entries_ptr + max_entries.to(gl.int64) * turn
        first_token = turn // num_heads * chunk_tokens
        # Rows of the chunk: offsets from its first one fit 32 bits.
        lses = lse_ptr + first_token.to(gl.int64) * num_heads * SLOTS * GROUP
        buffer = _buffer(partial_out_ptr, turn, max_entries, GROUP)
        begin, end = _share(totals_ptr, turn)
        if turn > 1:
            # The buffer's last turn, two before, has been merged.
            _wait_for(progress_ptr + (turn - 2) * 2 + 1, gl.num_programs(0))
        if begin < end:
            gone = block  # with the turn before
            held = block  # what this consumer keeps from being overwritten
            own = begin + (CONSUMER + CONSUMERS - step % CONSUMERS) % CONSUMERS
            num_own = (gl.maximum(end - own, 0) + CONSUMERS - 1) // CONSUMERS
            row = -1
            next_row, next_first, next_picks, next_limit = _load_item(
                items, gl.minimum(own, end - 1)
            )
            passed = _count_blocks(items, gl.minimum(own, end - 1), begin, row, CONSUMERS)
            next_pick = gl.load(entries + next_first + gl.minimum(place, next_picks - 1))
            for i in range(num_own):
                tile = own + i * CONSUMERS
                row, picks, limit, pick = next_row, next_picks, next_limit, next_pick
                block += passed
                # Of the next tile: what the loop needs at its start must be there.
                next_tile = gl.minimum(tile + CONSUMERS, end - 1)
                next_row, next_first, next_picks, next_limit = _load_item(items, next_tile)
                passed = _count_blocks(items, next_tile, begin, row, CONSUMERS)

                _advance(kv_full, kv_empty, gone, held, block, PAGES)
                held = block
                kv_slot = block % PAGES
                at = step + tile - begin
                slot = at % TILES
                mbarrier.wait(q_full.index(slot), (at // TILES) & 1)
                s = warpgroup_mma(
                    queries.index(2 * slot),
                    keys.index(kv_slot).slice(0, HALF, dim=1).permute((1, 0)),
                    zero,
                    use_acc=False,
                    is_async=True,
                )
                s = warpgroup_mma(
                    queries.index(2 * slot + 1),
                    keys.index(kv_slot).slice(HALF, HALF, dim=1).permute((1, 0)),
                    s,
                    is_async=True,
                )
                next_pick = gl.load(entries + next_first + gl.minimum(place, next_picks - 1))
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(q_empty.index(slot), count=1)
                if SIGN < 0:
                    s = -s
                if SIGN == 0:
                    s = s * 0.0
                # Every pick sees the first key of its block: no row is empty.
                if limit < SEEN_WHOLE:
                    last_key = (pick >> SLOT_BITS) + limit
                    s = gl.where(n[None, :] <= last_key[:, None], s, float("-inf"))
                maximum = gl.max(s, 1) * scale
                p = gl.exp2(s * scale - maximum[:, None])
                total = gl.sum(p, 1)
                p = gl.convert_layout(p.to(DTYPE), weights)
                o = warpgroup_mma(p, values.index(kv_slot), zero, use_acc=False, is_async=True)
                o = warpgroup_mma_wait(0, deps=(o,))

                live = (place < picks) & (member < GROUP)
                token, pick_slot = (pick >> SLOT_BITS) - first_token, pick & SLOT_MASK
                head = turn % num_heads
                lse = ((token * num_heads + head) * SLOTS + pick_slot) * GROUP + member
                gl.store(lses + lse, maximum + gl.log2(total), mask=live)
                o = (o * (out_scale / total)[:, None]).to(DTYPE)
                o = gl.reshape(o, (ROWS, 4, 4, 4, 2))
                o = gl.reshape(gl.permute(o, (0, 1, 3, 2, 4)), (ROWS, D))
                partial = (token * SLOTS + pick_slot) * (GROUP * D) + member * 32
                partial = gl.convert_layout(partial, gl.SliceLayout(1, lines))
                column = d // 32 * (GROUP * 32) + d % 32
                gl.store(
                    buffer + partial[:, None] + column[None, :],
                    gl.convert_layout(o, lines),
                    mask=gl.convert_layout(live, gl.SliceLayout(1, lines))[:, None],
                )
            # Blocks of the tiles behind the own last one.
            for tile in range(gl.maximum(own + (num_own - 1) * CONSUMERS + 1, begin), end):
                tile_row = gl.load(items + tile * 4)
                block += (tile_row != row).to(gl.int32)
                row = tile_row
            # Whoever waits for others must not keep them from going on.
            _advance(kv_full, kv_empty, gone, held, block, PAGES)
            mbarrier.arrive(kv_empty.index(block % PAGES), count=1)
            step += end - begin
        _signal(progress_ptr + turn * 2)


@gluon.jit
def _merge_turns(
    progress_ptr,
    partial_out_ptr,
    lse_ptr,
    row_request_ptr,
    out_ptr,
    out_lse_ptr,
    num_turns,
    num_heads,
    num_rows,
    chunk_tokens,
    max_entries,
    CONSUMERS: gl.constexpr,
    SLOTS: gl.constexpr,
    PADDED_SLOTS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """The merger: every token of a turn that is this program's, when all have attended."""
    for turn in range(num_turns):
        head = turn % num_heads
        first_token = turn // num_heads * chunk_tokens
        end = gl.minimum(chunk_tokens, num_rows - first_token)
        buffer = _buffer(partial_out_ptr, turn, max_entries, GROUP)
        _wait_for(progress_ptr + turn * 2, gl.num_programs(0) * CONSUMERS)
        for token in range(gl.program_id(0), end, gl.num_programs(0)):
            row = first_token + token
            if gl.load(row_request_ptr + row) >= 0:
                at = row.to(gl.int64) * num_heads + head
                merge_token(
                    buffer + token * (SLOTS * GROUP * D),
                    lse_ptr + at * (SLOTS * GROUP),
                    out_ptr + at * (GROUP * D),
                    out_lse_ptr + at * GROUP,
                    SLOTS,
                    PADDED_SLOTS,
                    AT_ONCE,
                    GROUP,
                    GROUP_ROWS,
                    HAS_LSE,
                )
        _signal(progress_ptr + turn * 2 + 1)


@gluon.jit
def _buffer(partial_out_ptr, turn, max_entries, GROUP: gl.constexpr):
    """A turn's partial outputs; offsets from their start fit 32 bits."""
    return partial_out_ptr + max_entries.to(gl.int64) * (GROUP * D) * (turn & 1)


@gluon.jit
def _signal(counter):
    """One more partition is done: what its threads have stored or loaded happened before."""
    gl.thread_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def _wait_for(counter, count):
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass
    gl.thread_barrier()


@gluon.jit
def _share(totals_ptr, turn):
    """The tiles of a turn that are this program's: an even share, side by side."""
    num_tiles = gl.load(totals_ptr + turn * 2 + 1)
    program, programs = gl.program_id(0), gl.num_programs(0)
    return program * num_tiles // programs, (program + 1) * num_tiles // programs


@gluon.jit
def _load_item(items, tile):
    """Row of the counts, first entry, picks and limit of a tile."""
    at = items + tile * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def _count_blocks(items, tile, begin, row, CONSUMERS: gl.constexpr):
    """New blocks among a tile and the other consumers' tiles before it; ``row`` is before them."""
    count = 0
    for back in gl.static_range(CONSUMERS - 1, -1, -1):
        tile_row = gl.load(items + gl.maximum(tile - back, begin) * 4)
        count += (tile_row != row).to(gl.int32)
        row = tile_row
    return count


@gluon.jit
def _table_entry(row, stride_table, num_blocks):
    return row // num_blocks * stride_table + row % num_blocks


@gluon.jit
def _advance(kv_full, kv_empty, gone, held, block, PAGES: gl.constexpr):
    """From the block ``held`` to another: those before it are let go, those up to it are there."""
    for i in range(held, block):
        if i > gone:
            mbarrier.arrive(kv_empty.index(i % PAGES), count=1)
        mbarrier.wait(kv_full.index((i + 1) % PAGES), ((i + 1) // PAGES) & 1)


@gluon.jit(
    do_not_specialize=[
        "stride_table",
        "num_turns",
        "num_heads",
        "num_rows",
        "chunk_tokens",
        "num_blocks",
        "max_items",
        "max_entries",
        "page_rows",
        "head_rows",
        "head_columns",
    ]
)
def _attend_tiles_kernel(
    k_desc,  # [rows, columns] of the pool, boxes [128, 128]
    v_desc,
    k_tails,  # [R * Hkv * 128, 128]: each request's last page, zeros behind its last token
    v_tails,
    q_desc,  # [T * Hq, 128], boxes [GROUP_ROWS, 64]
    q_scale,  # numbers, or pointers to one
    k_scale,
    v_scale,
    softmax_scale_log2,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    items_ptr,  # the reverse index, see the twin; a turn is one of its groups
    entries_ptr,
    totals_ptr,
    progress_ptr,  # [turns, 2] int32, zeros: consumers that have attended, mergers that are done
    overlap_ptr,
    partial_out_ptr,  # [BUFFERS, chunk tokens * K, 4, GROUP, 32]
    lse_ptr,  # [T, Hkv, K, GROUP] fp32, base 2
    row_request_ptr,  # [T] int32
    out_ptr,  # [T, Hq, 128]
    out_lse_ptr,  # [T, Hq] fp32
    num_turns,  # chunks * Hkv
    num_heads,
    num_rows,
    chunk_tokens,
    num_blocks,
    max_items,
    max_entries,
    page_rows,
    head_rows,
    head_columns,
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    PAGES: gl.constexpr,
    TILES: gl.constexpr,
    SLOTS: gl.constexpr,
    PADDED_SLOTS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    DTYPE: gl.constexpr,
    SIGN: gl.constexpr,
    Q_SCALE_ON_DEVICE: gl.constexpr,
    K_SCALE_ON_DEVICE: gl.constexpr,
    V_SCALE_ON_DEVICE: gl.constexpr,
    HAS_TAILS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    COST: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    MERGER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """partial = softmax(scale * q K^T) V over one block, for each of its picks; out = their merge

    All programs run at the same time: they wait for each other.
    """
    if not yields(overlap_ptr, COST):
        return
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    keys = gl.allocate_shared_memory(DTYPE, [PAGES, BLOCK, D], lines)
    values = gl.allocate_shared_memory(DTYPE, [PAGES, BLOCK, D], lines)
    queries = gl.allocate_shared_memory(DTYPE, [2 * TILES, ROWS, HALF], lines)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], barriers)
    kv_full = gl.allocate_shared_memory(gl.int64, [PAGES, 1], barriers)
    kv_empty = gl.allocate_shared_memory(gl.int64, [PAGES, 1], barriers)
    for i in gl.static_range(TILES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(PAGES):
        mbarrier.init(kv_full.index(i), count=2)  # K, V
        mbarrier.init(kv_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    scale = softmax_scale_log2 * load_factor(q_scale, Q_SCALE_ON_DEVICE)
    scale *= load_factor(k_scale, K_SCALE_ON_DEVICE)
    out_scale = 1.0 * load_factor(v_scale, V_SCALE_ON_DEVICE)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_tiles, (
                items_ptr, entries_ptr, totals_ptr, progress_ptr, scale, out_scale,
                partial_out_ptr, lse_ptr, queries, keys, values, q_full, q_empty, kv_full, kv_empty,
                num_turns, num_heads, chunk_tokens, max_items, max_entries,
                0, CONSUMERS, GROUP, GROUP_ROWS, PAGES, TILES, SLOTS, SIGN,
            )),
            (_attend_tiles, (
                items_ptr, entries_ptr, totals_ptr, progress_ptr, scale, out_scale,
                partial_out_ptr, lse_ptr, queries, keys, values, q_full, q_empty, kv_full, kv_empty,
                num_turns, num_heads, chunk_tokens, max_items, max_entries,
                1, CONSUMERS, GROUP, GROUP_ROWS, PAGES, TILES, SLOTS, SIGN,
            )),
            (_merge_turns, (
                progress_ptr, partial_out_ptr, lse_ptr, row_request_ptr, out_ptr, out_lse_ptr,
                num_turns, num_heads, num_rows, chunk_tokens, max_entries,
                CONSUMERS, SLOTS, PADDED_SLOTS, AT_ONCE, GROUP, GROUP_ROWS, HAS_LSE,
            )),
            (_load_tiles, (
                k_desc, v_desc, k_tails, v_tails, q_desc, seq_lens_ptr, page_table_ptr,
                stride_table, items_ptr, entries_ptr, totals_ptr,
                queries, keys, values, q_full, q_empty, kv_full, kv_empty,
                num_turns, num_heads, num_blocks, max_items, max_entries,
                page_rows, head_rows, head_columns,
                GROUP, GROUP_ROWS, PAGES, TILES, HAS_TAILS,
            )),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, MERGER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on


def can_serve(plan: Plan, slots: int) -> bool:
    """The twin could serve, and tiles are not mostly gaps."""
    return plan.config.group_size >= MIN_GROUP and twin.can_serve(plan, slots)


def attend(
    queries: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    block_ids: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    overlap: torch.Tensor,
    cost: float,
    *,
    tails: Tails | None,
    partial_bytes: int,
) -> None:
    """:func:`msattn.attend`, where union tiles of that cost yield; else nothing.

    ``queries``, of the cache's dtype, ``out`` and ``lse`` are contiguous. Partial outputs take
    ``partial_bytes`` at most, if those of a few tokens do.
    """
    config, slots, dtype = plan.config, block_ids.shape[2], queries.dtype
    group_rows, slots_padded = rows_of_a_token(config), launch.power_of_two_above(slots)
    index = twin.reverse_index(
        block_ids,
        cache,
        page_table,
        plan,
        partial_bytes // BUFFERS,
        {"overlap_ptr": overlap, "UNION_TOKENS": cost},
        item_picks=ROWS.value // group_rows,
    )
    shape = (BUFFERS, index.chunk_tokens * slots, config.group_size, D.value)
    partial_out = plan.workspace("kv_major_out", shape, dtype)
    k_pages, v_pages = pages_descriptor(cache.k), pages_descriptor(cache.v)
    k_tails, v_tails = tails or (k_pages, v_pages)
    place = area(cache.k)
    assert place is not None
    rows = (queries.shape[0] * config.num_q_heads, D.value)
    start(
        _attend_tiles_kernel,
        (launch.num_processors(queries.device),),
        k_pages,
        v_pages,
        k_tails,
        v_tails,
        descriptor(queries, rows, D.value, (group_rows, HALF.value)),
        **launch.scale_arguments("q_scale", q_scale, slots=False),
        **launch.scale_arguments("k_scale", cache.k_scale, slots=False),
        **launch.scale_arguments("v_scale", cache.v_scale, slots=False),
        **launch.softmax_arguments(softmax_scale),
        seq_lens_ptr=plan.seq_lens,
        page_table_ptr=page_table,
        stride_table=page_table.stride(0),
        items_ptr=index.items,
        entries_ptr=index.entries,
        totals_ptr=index.totals,
        progress_ptr=index.progress,
        overlap_ptr=overlap,
        partial_out_ptr=partial_out,
        lse_ptr=index.lse,
        row_request_ptr=plan.tiles(1).request,
        out_ptr=out,
        out_lse_ptr=out if lse is None else lse,
        num_turns=len(index.totals),
        num_heads=config.num_kv_heads,
        num_rows=plan.max_rows,
        chunk_tokens=index.chunk_tokens,
        num_blocks=plan.num_blocks,
        max_items=index.items.shape[1],
        max_entries=index.entries.shape[1],
        page_rows=place.page_rows,
        head_rows=place.head_rows,
        head_columns=place.head_columns,
        CONSUMERS=CONSUMERS,
        GROUP=config.group_size,
        GROUP_ROWS=group_rows,
        PAGES=PAGES,
        TILES=TILES,
        SLOTS=slots,
        PADDED_SLOTS=slots_padded,
        AT_ONCE=slots_at_once(group_rows, slots_padded),
        DTYPE=gl.bfloat16 if dtype == torch.bfloat16 else gl.float16,
        HAS_TAILS=tails is not None,
        HAS_LSE=lse is not None,
        COST=cost,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        MERGER_REGISTERS=MERGER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        launch_cooperative_grid=True,
    )
