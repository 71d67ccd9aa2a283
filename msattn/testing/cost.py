"""What each stage has to do at least: useful FLOPs and bytes that must cross device memory once.

A byte counts once, however often a kernel reads it: the keys of a block that several tokens of a
request chose are one block. FLOPs are those of visible keys alone. Time cannot be below
:meth:`Cost.floor_seconds` with the rates that the machine was measured to have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import BLOCK_SIZE
from ..kv_format import KVFormat
from .cases import Case
from .selections import rows_of, visible_blocks

ID_BYTES = 4
SCORE_BYTES = 4
SLOT_BYTES = 8  # an entry of slot_mapping


@dataclass(frozen=True, slots=True)
class Roofs:
    """Rates that the machine was measured to have; 0 = not measured, counts as no limit."""

    copy: float  # bytes/s of a large copy, read and written bytes together
    read: float  # bytes/s of a large sum
    matmul: float  # FLOP/s of a 16-bit matrix product (fp32 on a CPU)
    matmul_fp8: float  # FLOP/s of an e4m3 matrix product


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call."""

    flops: float = 0.0  # 16-bit FLOPs
    fp8_flops: float = 0.0
    read: float = 0.0  # bytes
    written: float = 0.0  # bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.fp8_flops + other.fp8_flops,
            self.read + other.read,
            self.written + other.written,
        )

    @property
    def all_flops(self) -> float:
        return self.flops + self.fp8_flops

    @property
    def all_bytes(self) -> float:
        return self.read + self.written

    def compute_seconds(self, roofs: Roofs) -> float:
        """Time of the FLOPs at the measured rates."""
        return _over(self.flops, roofs.matmul) + _over(self.fp8_flops, roofs.matmul_fp8)

    def memory_seconds(self, roofs: Roofs) -> float:
        """Time of the bytes: reads at the rate of reading, writes at the rate of copying."""
        return _over(self.read, roofs.read) + _over(self.written, roofs.copy)

    def floor_seconds(self, roofs: Roofs) -> float:
        """The larger of the two: both can overlap, neither can be avoided."""
        return max(self.compute_seconds(roofs), self.memory_seconds(roofs))

    def bound(self, roofs: Roofs) -> str:
        """Which of the two it is."""
        return "compute" if self.compute_seconds(roofs) > self.memory_seconds(roofs) else "memory"


def store_cost(case: Case, fmt: KVFormat, index: KVFormat | None, itemsize: int = 2) -> Cost:
    """K, V and, with ``index``, the index key of every token: read, and written in the format."""
    config, tokens = case.config, case.num_tokens
    read = 2 * config.num_kv_heads * config.head_dim * itemsize + SLOT_BYTES
    written = fmt.bytes_per_token(config)
    if index is not None:
        read += config.index_head_dim * itemsize + SLOT_BYTES
        written += config.index_head_dim * index.storage_dtype.itemsize
    return Cost(read=tokens * read, written=tokens * written)


def scores_cost(case: Case, index: KVFormat) -> Cost:
    """Index keys of each request once, the queries, and a score for each head, token, block."""
    width = case.config.num_index_heads * case.num_tokens * num_blocks(case)
    return _index_work(case, index) + Cost(written=width * SCORE_BYTES)


def select_cost(case: Case) -> Cost:
    """The scores of visible blocks read, the ids written."""
    visible = int(visible_blocks(rows_of(case.query_lens, case.seq_lens)).sum())
    read = case.config.num_index_heads * visible * SCORE_BYTES
    return Cost(read=read, written=_ids_bytes(case))


def index_cost(case: Case, index: KVFormat) -> Cost:
    """Scores and selection in one: no score need leave the chip."""
    return _index_work(case, index) + Cost(written=_ids_bytes(case))


def attend_cost(case: Case, fmt: KVFormat, block_ids: torch.Tensor, itemsize: int = 2) -> Cost:
    """Each distinct block of a request and KV head once, queries, ids and output.

    Args:
        block_ids: ``[T, Hkv, K]``, valid, without duplicates; -1 where there is none.
    """
    config = case.config
    pairs = attended_keys(case, block_ids) * config.group_size
    token_bytes = fmt.bytes_per_token(config) / config.num_kv_heads
    rows = case.num_tokens * config.num_q_heads * config.head_dim * itemsize
    return Cost(
        flops=4.0 * config.head_dim * pairs,
        read=distinct_keys(case, block_ids) * token_bytes + rows + block_ids.numel() * ID_BYTES,
        written=rows,
    )


def merge_cost(case: Case, parts: int, itemsize: int = 2) -> Cost:
    """``parts`` outputs with their LSEs read, one written."""
    rows = case.num_tokens * case.config.num_q_heads
    part = rows * (case.config.head_dim * itemsize + 4)
    return Cost(read=parts * part, written=part)


def dense_cost(case: Case, itemsize: int = 2) -> Cost:
    """Dense causal attention over all keys of each request."""
    config = case.config
    rows = case.num_tokens * config.num_q_heads * config.head_dim * itemsize
    keys = sum(case.seq_lens) * config.num_kv_heads * 2 * config.head_dim * itemsize
    pairs = visible_keys(case) * config.num_q_heads
    return Cost(flops=4.0 * config.head_dim * pairs, read=keys + rows, written=rows)


def num_blocks(case: Case) -> int:
    """Width of a score row: blocks of the longest request."""
    return -(-max(case.seq_lens, default=0) // BLOCK_SIZE)


def visible_keys(case: Case) -> int:
    """Number of (token, visible key) pairs."""
    position = rows_of(case.query_lens, case.seq_lens).position
    return int((position + 1).clamp(min=0).sum())


def attended_keys(case: Case, block_ids: torch.Tensor) -> int:
    """Number of (token, KV head, visible key of a selected block)."""
    position = rows_of(case.query_lens, case.seq_lens, block_ids.device).position
    seen = (position[:, None, None] + 1 - block_ids.long() * BLOCK_SIZE).clamp(0, BLOCK_SIZE)
    return int(seen.where(block_ids >= 0, 0).sum())


def distinct_keys(case: Case, block_ids: torch.Tensor) -> int:
    """Keys in the distinct (request, KV head, block) that the step reads."""
    device, blocks = block_ids.device, num_blocks(case)
    request = rows_of(case.query_lens, case.seq_lens, device).request
    read = torch.zeros(
        (len(case.seq_lens), case.config.num_kv_heads, blocks + 1), dtype=torch.bool, device=device
    )
    place = block_ids.long().where(block_ids >= 0, blocks)
    head = torch.arange(case.config.num_kv_heads, device=device)[:, None].expand_as(place)
    read[request[:, None, None].expand_as(place), head, place] = True
    starts = torch.arange(blocks, device=device) * BLOCK_SIZE
    lengths = torch.tensor(case.seq_lens, device=device)
    keys = (lengths[:, None] - starts).clamp(0, BLOCK_SIZE)
    return int((read[:, :, :blocks].sum(1) * keys).sum())


def _index_work(case: Case, index: KVFormat) -> Cost:
    config, itemsize = case.config, index.storage_dtype.itemsize
    keys = sum(s for q, s in zip(case.query_lens, case.seq_lens, strict=True) if q)
    queries = case.num_tokens * config.num_index_heads
    flops = 2.0 * config.index_head_dim * config.num_index_heads * visible_keys(case)
    read = (keys + queries) * config.index_head_dim * itemsize
    return Cost(fp8_flops=flops, read=read) if index.is_fp8 else Cost(flops=flops, read=read)


def _ids_bytes(case: Case) -> int:
    return case.num_tokens * case.config.num_kv_heads * case.config.topk * ID_BYTES


def _over(work: float, rate: float) -> float:
    return work / rate if rate else 0.0
