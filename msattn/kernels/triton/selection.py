"""Stage 3 in Triton: an exact top-k that reads a row once, and few of its scores again.

Nothing is sorted and no score is truncated. The row's chunks are folded onto one another: of each
position in a chunk the best score is kept. A selected block stands at a position whose best block
is selected, too, and no two positions have the same: so the selected ones are at the k positions
with the best blocks. These are found in registers; their scores, a few of each, are read again, and
the k best are found among them. The work is in proportion to the blocks that a row sees, and the
registers depend on the width of the scores alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...plan import Plan
from . import recording
from .launch import follow_arguments
from .support import MAX_BLOCKS
from .tiles import BLOCK, follow, row_position

_NOWHERE = tl.constexpr(-0x80000000)
"""Key of what is not there, below all others."""

_NAN = tl.constexpr(-0x7FFFFFFF)
"""Key of NaN, below those of all numbers."""

_HIGHEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def score_key(x, exists):
    """int32 in the order of scores: NaN lowest, -0 == +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN)
    return tl.where(exists, key, _NOWHERE)


@triton.jit
def load_chunk(row_ptr, stride, start, first, last, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """Scores [CHUNK] of the columns from start on; NaN outside of first .. last - 1."""
    column = start + tl.arange(0, CHUNK)
    if (start >= first) & (start + CHUNK <= last):
        x = tl.load(row_ptr + column.to(tl.int64) * stride)
    else:
        # In whole vectors: a mask that may change inside of one would split the load into words.
        x = tl.load(
            row_ptr + column.to(tl.int64) * stride, mask=column // VECTOR * VECTOR < last, other=0.0
        )
        x = tl.where((column >= first) & (column < last), x, float("nan"))
    return x


@triton.jit
def kth_key(keys, k, low):
    """The k-th largest of the keys, and how many more than k reach it.

    `low` is one of the keys, and k or more reach it.
    """
    high = tl.max(keys)
    excess = tl.sum((keys >= low).to(tl.int32)) - k
    while (excess > 0) & (low < high):
        # Few too many: one after the other goes. Else by halves, rounded up.
        middle = tl.where(excess < 4, low + 1, (low | high) - ((low ^ high) >> 1))
        reach = keys >= middle
        count = tl.sum(reach.to(tl.int32))
        if count >= k:
            low = tl.min(tl.where(reach, keys, _HIGHEST))
            excess = count - k
        else:
            high = tl.max(tl.where(reach, _NOWHERE, keys))
    return low, excess


@triton.jit
def first_of_equals(keys, key, column, k):
    """The k best keys, where more than k reach key; of equal ones, those of the first columns."""
    above = keys > key
    order = tl.where(keys == key, -column, _NOWHERE)
    last, _ = kth_key(order, k - tl.sum(above.to(tl.int32)), tl.min(order))
    return above | (order >= last)


@triton.jit
def first_columns(
    row_ptr, stride, first, last, key, CHUNK: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """Of each position in a chunk, the first column with that key."""
    found = tl.full((CHUNK,), _HIGHEST, tl.int32)
    for start in range(0, last, CHUNK):
        x = load_chunk(row_ptr, stride, start, first, last, CHUNK, VECTOR)
        column = start + tl.arange(0, CHUNK)
        keys = score_key(x, (column >= first) & (column < last))
        found = tl.where((keys == key) & (column < found), column, found)
    return found


@triton.jit
def put(out_ptr, stride_out, values, chosen):
    """Write the chosen values, in their order."""
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out_ptr + place * stride_out, values, mask=chosen)


@triton.jit
def select_best(
    row_ptr, stride, first, last, k: tl.constexpr, out_ptr, stride_out,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the k best of the columns first .. last - 1, ascending; there are more than k.

    `first` is less than CHUNK. Until the ids are there, `out` holds positions.
    """
    largest = tl.full((CHUNK,), float("nan"), tl.float32)
    for start in range(0, last, CHUNK):
        x = load_chunk(row_ptr, stride, start, first, last, CHUNK, VECTOR)
        largest = tl.maximum(largest, x)  # of the numbers
    position = tl.arange(0, CHUNK)
    exists = ((position >= first) & (position < last)) | (position + CHUNK < last)
    keys = score_key(largest, exists)
    key, excess = kth_key(keys, k, tl.min(keys))
    chosen = keys >= key
    if excess > 0:
        found = first_columns(row_ptr, stride, first, last, key, CHUNK, VECTOR)
        chosen = first_of_equals(keys, key, found, k)
    put(out_ptr, stride_out, position, chosen)
    tl.debug_barrier()  # what one thread has stored, others load

    SLOTS: tl.constexpr = triton.next_power_of_2(k)
    i = tl.arange(0, CHUNKS * SLOTS)
    chunk, slot = i // SLOTS, i % SLOTS
    # Positions ascend, so columns do.
    column = chunk * CHUNK + tl.load(out_ptr + slot * stride_out, mask=slot < k, other=0)
    exists = (slot < k) & (column >= first) & (column < last)
    x = tl.load(row_ptr + column.to(tl.int64) * stride, mask=exists, other=0.0)
    # All have loaded their positions before any has the k-th key, and ids overwrite them.
    keys = score_key(x, exists)
    key, excess = kth_key(keys, k, key)  # the k positions have k scores that reach their k-th best
    chosen = keys >= key
    if excess > 0:
        chosen = first_of_equals(keys, key, column, k)
    put(out_ptr, stride_out, column, chosen)


@triton.jit
def select_row(
    row_ptr, stride, out_ptr, stride_out, visible,
    TOPK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the TOPK ids of a row that sees `visible` blocks, at most CHUNKS * CHUNK.

    The row is fp32 in memory; other programs' stores to it must have been made visible. CHUNK is at
    least TOPK. VECTOR: as many neighbouring scores may be read together, whatever `visible` is.
    """
    slot = tl.arange(0, triton.next_power_of_2(TOPK))
    if visible <= TOPK:
        tl.store(out_ptr + slot * stride_out, tl.where(slot < visible, slot, -1), mask=slot < TOPK)
    else:
        forced = (slot < INIT) | (slot >= TOPK - LOCAL)
        ids = tl.where(slot < TOPK - LOCAL, slot, visible - TOPK + slot)
        tl.store(out_ptr + slot * stride_out, ids, mask=forced & (slot < TOPK))
        if INIT + LOCAL < TOPK:
            select_best(
                row_ptr, stride, INIT, visible - LOCAL, TOPK - INIT - LOCAL,
                out_ptr + INIT * stride_out, stride_out, CHUNK, CHUNKS, VECTOR,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_owned", "first_row", "max_visible"])
def _select_kernel(
    scores_ptr, stride_h, stride_t, stride_b,  # [Hi, rows from first_row on, B]
    out_ptr, stride_ot, stride_oh, stride_ok,  # [T, Hkv, K]
    request_ptr,  # [num_owned]
    cu_seqlens_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    num_owned,
    first_row,
    max_visible,
    TOPK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """ids = sorted(forced blocks + best of the rest)

    One program: one row and KV head.
    """
    follow(FOLLOWS)
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_of_step = first_row + row
    request = tl.load(request_ptr + row_of_step, mask=row_of_step < num_owned, other=-1)
    visible = 0
    if request >= 0:
        position = row_position(row_of_step, request, cu_seqlens_ptr, seq_lens_ptr)
        visible = tl.minimum(tl.maximum((position + BLOCK) // BLOCK, 0), max_visible)
    row_ptr = scores_ptr + head * stride_h + row.to(tl.int64) * stride_t
    row_out_ptr = out_ptr + row_of_step.to(tl.int64) * stride_ot + head * stride_oh
    select_row(
        row_ptr, stride_b, row_out_ptr, stride_ok, visible,
        TOPK, INIT, LOCAL, CHUNK, CHUNKS, VECTOR,
    )  # fmt: skip


def select_blocks(scores: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
    select_rows(scores, plan, out)


def select_rows(scores: torch.Tensor, plan: Plan, out: torch.Tensor, first_row: int = 0) -> None:
    """Ids of the step's rows from ``first_row`` on, by their scores ``[Hi, n, B]``.

    ``out`` ``[T, Hkv, topk]`` is of all rows of the step.
    """
    config, request = plan.config, plan.tiles(1).request
    heads, rows, columns = scores.shape
    assert min(plan.num_blocks, columns) <= MAX_BLOCKS
    chunk, chunks, warps = chunks_of(columns, config.topk)
    recording.start(
        _select_kernel,
        (rows, heads),
        scores,
        *scores.stride(),
        out,
        *out.stride(),
        request,
        plan.cu_seqlens_q,
        plan.seq_lens,
        len(request),
        first_row,
        min(plan.num_blocks, columns),
        TOPK=config.topk,
        INIT=config.init_blocks,
        LOCAL=config.local_blocks,
        CHUNK=chunk,
        CHUNKS=chunks,
        VECTOR=4 if reads_vectors(scores) else 1,
        **follow_arguments(scores.device),
        num_warps=warps,
    )


def chunks_of(columns: int, topk: int) -> tuple[int, int, int]:
    """Scores read at a time, how often at most, and warps: one for short rows needs no barrier."""
    if columns <= 2048:
        chunk, chunks, warps = 256, 8, 1
    else:
        chunk, chunks, warps = 1024, 8 if columns <= 8192 else MAX_BLOCKS // 1024, 4
    return max(chunk, triton.next_power_of_2(topk)), chunks, warps


def reads_vectors(scores: torch.Tensor) -> bool:
    """Four neighbouring scores may be read where one is wanted: all are the tensor's memory."""
    stride_h, stride_t, stride_b = scores.stride()
    heads, rows, columns = scores.shape
    if stride_b != 1 or scores.data_ptr() % 16:
        return False
    end = scores.storage_offset() + (heads - 1) * stride_h + (rows - 1) * stride_t
    end += triton.cdiv(columns, 4) * 4
    return end * scores.element_size() <= scores.untyped_storage().nbytes()
