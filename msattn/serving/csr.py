"""k2q CSR: for each (KV head, KV block), the queries that selected it; for KV-major kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import torch

from ..checks import fail, one_of, require_int, require_tensor
from ..config import BLOCK_SIZE

TOPK = (4, 8, 16, 32)
SLOT_BIT = 24
"""Of a schedule's packed entry: local query index below, slot above."""
MAX_QUERIES_PER_CTA_GROUPS = 512
NO_ROW = torch.iinfo(torch.int64).max
FALLBACK_PROCESSORS = 132
"""Streaming multiprocessors that a schedule is made for where there is no GPU: an H200's."""


class Csr(NamedTuple):
    """Rows are level-major: block 0 of every request, then block 1 of those that have one, ..."""

    row_ptr: torch.Tensor  # [Hkv, rows + 1] int32
    q_indices: torch.Tensor  # [Hkv, T * K] int32, queries of the request, ascending; -1 behind


@dataclass(frozen=True, eq=False)
class Schedule:
    """Rows cut into work items of at most ``target_q_per_cta`` queries."""

    # [capacity, 6] int32: KV head, CSR row, first entry in the row, entries, request, KV block
    scheduler_metadata: torch.Tensor
    work_count: torch.Tensor  # [1] int32: items that are used
    qsplit_indices: torch.Tensor  # [Hkv, T * K] int32: query | slot << 24; -1 behind
    split_counts: torch.Tensor  # [T, Hkv] int32: valid entries of each list
    target_q_per_cta: int


@overload
def build_k2q_csr(
    q2k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    kv_block_size: int = ..., *, total_k: int | None, max_seqlen_k: int | None = ...,
    max_seqlen_q: int | None = ..., total_rows: int | None = ..., qhead_per_kv: int = ...,
    return_schedule: Literal[False] = ...,
) -> Csr: ...  # fmt: skip
@overload
def build_k2q_csr(
    q2k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    kv_block_size: int = ..., *, total_k: int | None, max_seqlen_k: int | None = ...,
    max_seqlen_q: int | None = ..., total_rows: int | None = ..., qhead_per_kv: int = ...,
    return_schedule: Literal[True],
) -> tuple[Csr, Schedule]: ...  # fmt: skip
def build_k2q_csr(
    q2k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    kv_block_size: int = BLOCK_SIZE,
    *,
    total_k: int | None,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
) -> Csr | tuple[Csr, Schedule]:
    """Invert the block lists of prefill queries, as MSA's ``build_k2q_csr``, on any device.

    Entries of -1, or of blocks that the request does not have, are dropped wherever they stand;
    duplicates are kept. Nothing is read back from the device, and two runs give the same bits.

    Args:
        q2k: ``[Hkv, T, K]`` int32 block ids of each query, K one of 4, 8, 16 and 32, any strides.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]`` int32: queries and whole KV lengths, summed.
        kv_block_size: 128.
        total_k: sum of the KV lengths, where ``total_rows`` is not given; else ignored.
        max_seqlen_k, max_seqlen_q: bounds, needed for a schedule. Without ``max_seqlen_k``,
            ``total_k`` is the bound.
        total_rows: blocks of all requests, or more.
        qhead_per_kv: query heads of a KV head; decides the size of work items.
        return_schedule: also cut the rows into work items.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. Bounds and totals below what
            ``cu_seqlens_k`` says are refused on a CPU; on a GPU, where nothing is read back, the
            blocks behind them have no row, and what selects them is dropped.
    """
    heads, topk = _check(q2k, cu_seqlens_q, cu_seqlens_k, kv_block_size)
    total_k = _check_sizes(total_k, total_rows, max_seqlen_k, max_seqlen_q, qhead_per_kv)
    if return_schedule and (max_seqlen_k is None or max_seqlen_q is None):
        raise fail("max_seqlen_k, max_seqlen_q", "bounds, for a schedule", "None")
    rows_by = "total_k" if total_rows is None else "total_rows"
    if total_rows is None:
        total_rows = _rows_of(total_k, cu_seqlens_q.shape[0] - 1)
    columns_by = "max_seqlen_k" if max_seqlen_k else "total_k"
    columns = -(-max(max_seqlen_k or total_k, BLOCK_SIZE) // BLOCK_SIZE)
    _check_rows(cu_seqlens_k, columns, columns_by, total_rows, rows_by)

    numbers = _number_rows(cu_seqlens_k, columns)
    row, query = _locate(q2k, cu_seqlens_q, numbers, total_rows)
    # Stable: within a row, queries stay in their order.
    sorted_row, order = row.flatten(1).sort(dim=-1, stable=True)
    kept = sorted_row < total_rows
    edges = torch.arange(total_rows + 1, device=q2k.device).repeat(heads, 1)
    row_ptr = torch.searchsorted(sorted_row, edges)
    sorted_query = query.repeat_interleave(topk)[order]
    csr = Csr(row_ptr.int(), torch.where(kept, sorted_query, -1).int())
    if not return_schedule:
        return csr
    valid = row < total_rows
    slot = (valid.cumsum(-1) - 1).flatten(1).gather(1, order)
    packed = torch.where(kept, sorted_query | slot << SLOT_BIT, -1)
    target = _target(q2k.numel(), topk, qhead_per_kv, q2k.device)
    items, count = _items(row_ptr, numbers, total_rows, target, q2k.numel())
    split_counts = valid.sum(-1).T.int().contiguous()
    return csr, Schedule(items, count, packed.int(), split_counts, target)


def _check(
    q2k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, kv_block_size: int
) -> tuple[int, int]:
    """Heads and K of the lists."""
    require_int("kv_block_size", kv_block_size, at_least=1)
    if kv_block_size != BLOCK_SIZE:
        raise fail("kv_block_size", f"{BLOCK_SIZE}", kv_block_size)
    int32 = [torch.int32]
    lists = {"Hkv": None, "T": None, "K": None}
    heads, _, topk = require_tensor("q2k", q2k, dtypes=int32, shape=lists).shape
    if topk not in TOPK:
        raise fail("q2k", f"{one_of(TOPK)} blocks of each query", topk)
    starts = require_tensor(
        "cu_seqlens_q", cu_seqlens_q, dtypes=int32, shape={"B+1": None}, device=q2k.device
    )
    shape = {"B+1": starts.shape[0]}
    require_tensor("cu_seqlens_k", cu_seqlens_k, dtypes=int32, shape=shape, device=q2k.device)
    if starts.shape[0] == 0:
        raise fail("cu_seqlens_q", "at least one entry, 0", list(starts.shape))
    return heads, topk


def _check_sizes(
    total_k: int | None,
    total_rows: int | None,
    max_seqlen_k: int | None,
    max_seqlen_q: int | None,
    qhead_per_kv: int,
) -> int:
    if total_k is None:
        raise fail("total_k", "an int (0 where total_rows is given)", None)
    require_int("total_k", total_k, at_least=0)
    optional = {
        "total_rows": total_rows,
        "max_seqlen_k": max_seqlen_k,
        "max_seqlen_q": max_seqlen_q,
    }
    for name, size in optional.items():
        if size is not None:
            require_int(name, size, at_least=0)
    require_int("qhead_per_kv", qhead_per_kv, at_least=1)
    return total_k


def _number_rows(cu_seqlens_k: torch.Tensor, columns: int) -> torch.Tensor:
    """``[B, columns]`` int64: the CSR row of each block, NO_ROW where there is none."""
    lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).long()
    blocks = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
    there = torch.arange(columns, device=lengths.device)[:, None] < blocks
    number = there.flatten().cumsum(0).view(columns, -1) - 1
    return torch.where(there, number, NO_ROW).T


def _rows_of(total_k: int, requests: int) -> int:
    """Rows for all lengths of that sum: each request may end in a block that is not full."""
    blocks, rest = divmod(total_k, BLOCK_SIZE)
    if rest:
        return -(-(total_k + requests * (BLOCK_SIZE - 1)) // BLOCK_SIZE)
    # Where the sum is whole, no block or at least two are not full; a token fills one at most.
    return min(blocks + max(requests - 1, 0), total_k)


def _check_rows(
    cu_seqlens_k: torch.Tensor, columns: int, columns_by: str, total_rows: int, rows_by: str
) -> None:
    """Every block has a row, where that can be seen without waiting for a device."""
    if cu_seqlens_k.device.type != "cpu" or cu_seqlens_k.shape[0] < 2:
        return
    blocks = (cu_seqlens_k.diff() + BLOCK_SIZE - 1) // BLOCK_SIZE
    longest, total = int(blocks.max()), int(blocks.sum())
    if longest > columns:
        raise fail(columns_by, f"a bound of the longest request's {longest} blocks", columns)
    if total > total_rows:
        raise fail(rows_by, f"rows for the {total} blocks of cu_seqlens_k", f"{total_rows} rows")


def _locate(
    q2k: torch.Tensor, cu_seqlens_q: torch.Tensor, numbers: torch.Tensor, total_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CSR row of each entry ``[Hkv, T, K]``, total_rows for none; each query's local index."""
    query = torch.arange(q2k.shape[1], device=q2k.device)
    starts, (requests, columns) = cu_seqlens_q.long(), numbers.shape
    request = torch.searchsorted(starts[1:], query, right=True).clamp(max=max(requests - 1, 0))
    row = numbers[request[None, :, None], q2k.long().clamp(0, columns - 1)]
    there = (q2k >= 0) & (q2k < columns) & (row < total_rows)
    return torch.where(there, row, total_rows), query - starts[request]


def _target(entries: int, topk: int, qhead_per_kv: int, device: torch.device) -> int:
    """Queries of a work item: enough for two items a processor, in groups of 128 rows."""
    processors = FALLBACK_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    group = max(128 // qhead_per_kv, 1)
    groups = -(-max(entries, 1) // group)
    per_cta = min(max(-(-groups // (2 * processors)), 1), MAX_QUERIES_PER_CTA_GROUPS)
    target = min(max(per_cta * group, group), max(group, topk * BLOCK_SIZE * 2))
    return -(-target // group) * group


def _items(
    row_ptr: torch.Tensor, numbers: torch.Tensor, total_rows: int, target: int, entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The work items, row by row and head by head, and how many there are."""
    heads, device = row_ptr.shape[0], row_ptr.device
    capacity = max(1, total_rows * max(heads, 1) + -(-max(entries, 1) // target))
    items = torch.zeros((capacity, 6), dtype=torch.int32, device=device)
    if heads * total_rows == 0:
        return items, torch.zeros(1, dtype=torch.int32, device=device)
    # Where each row comes from; one more for the blocks that are not there.
    origin = torch.zeros((total_rows + 1, 2), dtype=torch.int64, device=device)
    request, block = (
        index.flatten()
        for index in torch.meshgrid(
            *(torch.arange(n, device=device) for n in numbers.shape), indexing="ij"
        )
    )
    origin[numbers.flatten().clamp(max=total_rows)] = torch.stack((request, block), 1)
    counts = row_ptr.diff(dim=1).flatten()
    pieces = (counts + target - 1) // target
    ends = pieces.cumsum(0)
    item = torch.arange(capacity, device=device)
    at = torch.searchsorted(ends, item, right=True).clamp(max=heads * total_rows - 1)
    first = (item - (ends - pieces)[at]) * target
    head, row = at // total_rows, at % total_rows
    size = (counts[at] - first).clamp(max=target)
    fields = torch.stack((head, row, first, size, *origin[row].unbind(1)), 1)
    items.copy_(torch.where((item < ends[-1])[:, None], fields, 0))
    return items, ends[-1:].int()
