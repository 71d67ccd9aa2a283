"""Stage 3 in Triton: an exact top-k that reads a row a few times, a chunk of columns at a time.

Nothing is sorted and no score is truncated. A first pass folds the row's chunks onto one another
and keeps the largest score of each position: the K-th largest of those is a lower bound of the
row's K-th score, seldom more than a few ranks below it. Counting passes lead from there to it, and
a last pass writes what lies above and the first of what equals it. The work is in proportion to the
blocks that a row sees, whatever the bound, and the registers do not depend on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...plan import Plan
from .support import MAX_BLOCKS
from .tiles import BLOCK, row_position

_LOWEST = tl.constexpr(-0x80000000)
"""Key of NaN, below those of all numbers; as a score, it is NaN again."""

_HIGHEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def score_key(x):
    """int32 in the order of fp32 numbers, -0 == +0; x is not NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_score(key):
    """The score of a key; the keys below that of -inf give NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_chunk(row_ptr, stride, start, first, last, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """Scores [CHUNK] of the columns from start on; NaN outside of first .. last - 1."""
    column = start + tl.arange(0, CHUNK)
    if (start >= first) & (start + CHUNK <= last):
        x = tl.load(row_ptr + column * stride)
    else:
        # In whole vectors: a mask that may change inside of one would split the load into words.
        x = tl.load(row_ptr + column * stride, mask=column // VECTOR * VECTOR < last, other=0.0)
        x = tl.where((column >= first) & (column < last), x, float("nan"))
    return x


@triton.jit
def is_above(x, score):
    """x ranks above score; anything but NaN ranks above NaN."""
    floor = tl.where(score == score, float("nan"), float("-inf"))
    return (x > score) | (x >= floor)


@triton.jit
def lower_bound(row_ptr, stride, first, last, k, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """A key that k scores of the row reach, and that of the row's largest score.

    The first is the k-th largest among the maxima of the positions in a chunk.
    """
    m = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in range(0, last, CHUNK):
        x = load_chunk(row_ptr, stride, start, first, last, CHUNK, VECTOR)
        m = tl.where(x > m, x, m)
    position = tl.arange(0, CHUNK)
    exists = ((position >= first) & (position < last)) | (position + CHUNK < last)
    keys = tl.where(exists, score_key(m), _LOWEST)
    low, largest = tl.min(tl.where(exists, keys, _HIGHEST)), tl.max(keys)
    high = largest
    while low < high:  # k keys or more are at least low, fewer than k are above high
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up
        reach = keys >= middle
        count = tl.sum(reach.to(tl.int32))
        if count >= k:
            low = tl.min(tl.where(reach, keys, _HIGHEST))
            if count == k:
                high = low
        else:
            high = middle - 1
    # A position with nothing but NaN has the maximum -inf too.
    return tl.where(key_score(low) == float("-inf"), _LOWEST, low), largest


@triton.jit
def count_above(row_ptr, stride, first, last, key, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """How many scores of the row rank above key, and the key of the lowest of them."""
    score = key_score(key)
    count = tl.zeros((CHUNK,), tl.int32)
    lowest = tl.full((CHUNK,), float("inf"), tl.float32)
    for start in range(0, last, CHUNK):
        x = load_chunk(row_ptr, stride, start, first, last, CHUNK, VECTOR)
        above = is_above(x, score)
        count += above.to(tl.int32)
        lowest = tl.where(above & (x < lowest), x, lowest)
    return tl.sum(count), score_key(tl.min(lowest))


@triton.jit
def kth_score(row_ptr, stride, first, last, k, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """Key of the k-th best score of the columns first .. last - 1, and how many rank above it."""
    low, high = lower_bound(row_ptr, stride, first, last, k, CHUNK, VECTOR)
    key, excess = low, 0
    count, following = count_above(row_ptr, stride, first, last, key, CHUNK, VECTOR)
    # k scores or more are at least low, fewer than k are above high.
    while (count >= k) | (key > low):
        if count >= k:
            low = following
            excess = count - k
        else:
            high = key
        # Few too many: one after the other goes; else by halves.
        key = tl.where(excess < 4, low, (low & high) + ((low ^ high) >> 1))
        count, following = count_above(row_ptr, stride, first, last, key, CHUNK, VECTOR)
    return key, count


@triton.jit
def best_columns(
    row_ptr, stride, first, last, ids, slot, k, key, num_above,
    CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Put the k best columns into ids, ascending, where `slot` is 0 and following.

    They are those above key, and the first of those that equal it. One comes after the other: they
    are few, and places for all at once would cost a scan of every chunk.
    """
    NONE: tl.constexpr = 0x7FFFFFFF
    score, left, taken, start = key_score(key), k - num_above, 0, 0
    while (taken < k) & (start < last):
        column = start + tl.arange(0, CHUNK)
        x = load_chunk(row_ptr, stride, start, first, last, CHUNK, VECTOR)
        # Odd where the score is the last one, of which only so many are taken.
        if score == score:
            wanted = (x > score) | ((x == score) & (left > 0))
            code = tl.where(wanted, 2 * column + (x == score).to(tl.int32), NONE)
        else:
            inside = (column >= first) & (column < last)
            wanted = (x >= float("-inf")) | (inside & (left > 0))
            code = tl.where(wanted, 2 * column + tl.where(x >= float("-inf"), 0, 1), NONE)
        best = tl.min(code)
        while best != NONE:
            ids = tl.where(slot == taken, best >> 1, ids)
            taken += 1
            code = tl.where(code > best, code, NONE)
            left -= best & 1
            if (best & 1) & (left == 0):
                code = tl.where((code & 1) == 0, code, NONE)
            best = tl.min(code)
        start += CHUNK
    return ids


@triton.jit
def select_row(
    row_ptr, stride, out_ptr, stride_out, visible,
    TOPK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the TOPK ids of a row that sees `visible` blocks, at most MAX_BLOCKS.

    The row is fp32 in memory; other programs' stores to it must have been made visible. CHUNK is at
    least TOPK. VECTOR: as many neighbouring scores may be read together, whatever `visible` is.
    """
    slot = tl.arange(0, triton.next_power_of_2(TOPK))
    ids = tl.where(slot < visible, slot, -1)
    if visible > TOPK:
        ids = tl.where(slot < TOPK - LOCAL, slot, visible - TOPK + slot)
        if INIT + LOCAL < TOPK:
            k: tl.constexpr = TOPK - INIT - LOCAL
            last = visible - LOCAL
            key, above = kth_score(row_ptr, stride, INIT, last, k, CHUNK, VECTOR)
            ids = best_columns(
                row_ptr, stride, INIT, last, ids, slot - INIT, k, key, above, CHUNK, VECTOR
            )
    tl.store(out_ptr + slot * stride_out, ids, mask=slot < TOPK)


@triton.jit(do_not_specialize=["num_owned", "first_row", "max_visible"])
def _select_kernel(
    scores_ptr, stride_h, stride_t, stride_b,  # [Hi, T, B]
    out_ptr, stride_ot, stride_oh, stride_ok,  # [T, Hkv, K]
    request_ptr,  # [num_owned]
    cu_seqlens_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    num_owned,
    first_row,
    max_visible,
    TOPK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """ids = sorted(forced blocks + best of the rest)

    One program: one row and KV head.
    """
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_of_step = first_row + row
    request = tl.load(request_ptr + row_of_step, mask=row_of_step < num_owned, other=-1)
    visible = 0
    if request >= 0:
        position = row_position(row_of_step, request, cu_seqlens_ptr, seq_lens_ptr)
        visible = tl.minimum(tl.maximum((position + BLOCK) // BLOCK, 0), max_visible)
    row_ptr = scores_ptr + head * stride_h + row.to(tl.int64) * stride_t
    row_out_ptr = out_ptr + row.to(tl.int64) * stride_ot + head * stride_oh
    select_row(row_ptr, stride_b, row_out_ptr, stride_ok, visible, TOPK, INIT, LOCAL, CHUNK, VECTOR)


def select_blocks(scores: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
    select_rows(scores, plan, out)


def select_rows(scores: torch.Tensor, plan: Plan, out: torch.Tensor, first_row: int = 0) -> None:
    """Ids ``out`` ``[n, Hkv, topk]`` of the step's rows from ``first_row`` on, by their scores."""
    config, request = plan.config, plan.tiles(1).request
    heads, rows, columns = scores.shape
    assert min(plan.num_blocks, columns) <= MAX_BLOCKS
    chunk, warps = chunk_of(columns, config.topk)
    _select_kernel[(rows, heads)](
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
        VECTOR=4 if reads_vectors(scores) else 1,
        num_warps=warps,
    )


def chunk_of(columns: int, topk: int) -> tuple[int, int]:
    """Columns read at a time, and warps: one warp while a row is short, as it needs no barrier."""
    chunk, warps = (256, 1) if columns <= 2048 else (1024, 4)
    return max(chunk, triton.next_power_of_2(topk)), warps


def reads_vectors(scores: torch.Tensor) -> bool:
    """Four neighbouring scores may be read where one is wanted: all are the tensor's memory."""
    stride_h, stride_t, stride_b = scores.stride()
    heads, rows, columns = scores.shape
    if stride_b != 1 or scores.data_ptr() % 16:
        return False
    end = scores.storage_offset() + (heads - 1) * stride_h + (rows - 1) * stride_t
    end += triton.cdiv(columns, 4) * 4
    return end * scores.element_size() <= scores.untyped_storage().nbytes()
