"""Plan: a batch in buffers of its own, prepared once per step and shared by all layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from .arch import is_capturing
from .batch import UNMAPPED, Batch
from .checks import fail, require_type
from .config import BLOCK_SIZE, MSAConfig
from .kv_format import KVFormat


class Tiles(NamedTuple):
    """Tiles of neighbouring query rows, none across two requests."""

    request: torch.Tensor  # [n] int32, -1: the tile is not used
    first_row: torch.Tensor  # [n] int32


@dataclass(eq=False, slots=True, weakref_slot=True)
class Plan:
    """What every stage of a step needs; the one object here that changes, through :meth:`update`.

    The tensors keep their addresses for the plan's life, so that a captured CUDA graph stays valid
    as long as no batch has more rows than any before it. The host bounds only ever grow.

    Tiles and workspaces are made when a stage first asks for them, which must not be inside of a
    capture: run the stages once with the plan, its bounds at their largest, then capture.
    """

    config: MSAConfig
    kv_format: KVFormat
    cu_seqlens_q: torch.Tensor = field(repr=False)  # [R + 1] int32, the plan's own copy
    seq_lens: torch.Tensor = field(repr=False)  # [R] int32, the plan's own copy
    page_table: torch.Tensor = field(repr=False)  # [R, B] int32, the plan's own copy
    max_query_len: int  # at least every request's query tokens
    max_seq_len: int  # at least every seq_lens entry
    num_tokens: int | None  # query tokens of the step, where the host knows them
    max_rows: int  # query rows that the buffers hold
    in_capture: bool  # made by a CUDA graph that is being captured: all of it belongs to the graph
    # For each tile size asked for so far: which request, and which first row, each tile has.
    _tiles: dict[int, Tiles] = field(default_factory=dict, repr=False)
    _workspaces: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = field(
        default_factory=dict, repr=False
    )
    _launches: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _was_captured: bool = field(default=False, repr=False)

    @property
    def num_requests(self) -> int:
        """Requests that the buffers hold; a smaller batch leaves the last ones empty."""
        return self.seq_lens.shape[0]

    @property
    def num_blocks(self) -> int:
        """Width of a score row: blocks of the longest request the bounds allow."""
        return min(-(-self.max_seq_len // BLOCK_SIZE), self.page_table.shape[1])

    @property
    def query_len_class(self) -> int:
        """The power of two at or above ``max_query_len``: what a choice of kernels depends on."""
        return 1 << (max(self.max_query_len, 1) - 1).bit_length()

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """cu_seqlens_q, seq_lens and page_table."""
        return self.cu_seqlens_q, self.seq_lens, self.page_table

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the plan owns, tiles and workspaces included."""
        tiles = (tensor for pair in self._tiles.values() for tensor in pair)
        return sum(x.nbytes for x in (*self.tensors, *tiles, *self._workspaces.values()))

    def update(self, batch: Batch) -> None:
        """Take over another step's batch, in place and without a host sync.

        The batch may have fewer requests and another table width than the plan was made with, never
        more requests, nor more blocks than the plan's table has columns.

        Raises:
            ValueError: the batch does not fit. The plan is unchanged then.
        """
        require_type("batch", batch, Batch)
        rows, columns = batch.num_requests, -(-batch.max_seq_len // BLOCK_SIZE)
        if batch.device != self.device:
            raise fail("batch", f"device {self.device}", batch.device)
        if rows > self.num_requests:
            raise fail("batch", f"at most {self.num_requests} requests, as planned", rows)
        if min(columns, batch.page_table.shape[1]) > self.page_table.shape[1]:
            raise fail(
                "batch",
                f"max_seq_len at most {self.page_table.shape[1] * BLOCK_SIZE}, as planned",
                batch.max_seq_len,
            )
        self.cu_seqlens_q[: rows + 1].copy_(batch.cu_seqlens_q)
        self.cu_seqlens_q[rows + 1 :].copy_(
            batch.cu_seqlens_q[-1:].expand(self.num_requests - rows)
        )
        self.seq_lens[:rows].copy_(batch.seq_lens)
        self.seq_lens[rows:].zero_()
        width = min(batch.page_table.shape[1], self.page_table.shape[1])
        self.page_table[:rows, :width].copy_(batch.page_table[:, :width])
        self.page_table[:rows, width:].fill_(UNMAPPED)
        self.page_table[rows:].fill_(UNMAPPED)
        bounds = self._bounds
        self.max_query_len = max(self.max_query_len, batch.max_query_len)
        self.max_seq_len = max(self.max_seq_len, batch.max_seq_len)
        self.num_tokens = batch.num_tokens
        self.max_rows = max(self.max_rows, _max_rows(batch))
        if self._bounds != bounds:
            self._launches.clear()
            # Their sizes follow the bounds: the old ones would be held beside the new. A graph that
            # was captured writes to them.
            if not self._was_captured:
                self._workspaces.clear()
        if self.max_rows > bounds[2]:
            self._tiles.clear()
            self._workspaces.clear()
        for size, tiles in self._tiles.items():
            self._fill(tiles, size)

    def tiles(self, size: int) -> Tiles:
        """The query rows cut into tiles of at most ``size`` rows of one request each.

        The tensors are the plan's: :meth:`update` refreshes them in place.
        """
        tiles = self._tiles.get(size)
        if tiles is None:
            self._require_no_capture()
            # Each request may end in a tile that is not full.
            count = min(self.max_rows, -(-self.max_rows // size) + self.num_requests)
            tiles = Tiles(
                *(torch.empty(count, dtype=torch.int32, device=self.device) for _ in range(2))
            )
            self._tiles[size] = tiles
            self._fill(tiles, size)
        return tiles

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the plan's, at the same address for the same arguments; zeros at first.

        What one stage leaves in it, no later stage may rely on, unless it has the same name.
        Counters do: a launch leaves the zeros that it found.
        """
        key = (name, shape, dtype)
        memory = self._workspaces.get(key)
        if memory is None:
            self._require_no_capture()
            memory = torch.zeros(shape, dtype=dtype, device=self.device)
            self._workspaces[key] = memory
        return memory

    def launches(self) -> dict[Hashable, Any]:
        """Those of earlier calls with the plan, until a bound grows; for stages to ask."""
        self._was_captured = self._was_captured or is_capturing(self.device)
        return self._launches

    @property
    def _bounds(self) -> tuple[int, ...]:
        """All that a launch depends on, of what :meth:`update` changes on the host."""
        return self.max_query_len, self.num_blocks, self.max_rows

    def _require_no_capture(self) -> None:
        """A graph must not be given what it would fill only when it is replayed."""
        if not self.in_capture and is_capturing(self.device):
            raise fail(
                "plan",
                "a run of the stage with it, and with the same bounds, before the capture",
                "its first one inside of a CUDA graph",
                RuntimeError,
            )

    def _fill(self, tiles: Tiles, size: int) -> None:
        starts = self.cu_seqlens_q.long()
        counts = (starts[1:] - starts[:-1] + size - 1) // size
        ends = counts.cumsum(0)
        tile = torch.arange(len(tiles.request), device=self.device)
        request = torch.searchsorted(ends, tile, right=True)
        used = request < self.num_requests
        request = request.clamp(max=max(self.num_requests - 1, 0))
        first_row = starts[request] + (tile - (ends - counts)[request]) * size
        # Not where(used, -1): its scalar is copied to the device, and waited for.
        tiles.request.copy_(request.masked_fill(~used, -1))
        tiles.first_row.copy_(first_row)


_LIVING: WeakValueDictionary[int, Plan] = WeakValueDictionary()
"""Plans by the address of their cu_seqlens_q, which is never empty."""


def make_plan(batch: Batch, config: MSAConfig, kv_format: object) -> Plan:
    """Prepare a step.

    Args:
        batch: the step's requests. Its tensors are copied: later steps go through ``plan.update``.
        config: the model's shapes on this rank.
        kv_format: format of the KV caches that the plan will be used with.
    """
    require_type("batch", batch, Batch)
    require_type("config", config, MSAConfig)
    plan = Plan(
        config,
        KVFormat.parse(kv_format),
        batch.cu_seqlens_q.clone(memory_format=torch.contiguous_format),
        batch.seq_lens.clone(memory_format=torch.contiguous_format),
        batch.page_table.clone(memory_format=torch.contiguous_format),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_tokens=batch.num_tokens,
        max_rows=_max_rows(batch),
        in_capture=is_capturing(batch.device),
    )
    _LIVING[plan.cu_seqlens_q.data_ptr()] = plan
    return plan


def find_plan(
    cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor
) -> Plan | None:
    """The living plan whose tensors these are: for callers that can pass nothing but tensors."""
    plan = _LIVING.get(cu_seqlens_q.data_ptr())
    if plan is None:
        return None
    pairs = zip((cu_seqlens_q, seq_lens, page_table), plan.tensors, strict=True)
    same = all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)
    return plan if same else None


def has_rows(rows: int, plan: Plan) -> bool:
    """These are enough for the plan's query tokens, whose number may change with every step."""
    return plan.num_tokens is None or rows >= plan.num_tokens


def require_rows(name: str, rows: int, plan: Plan) -> None:
    """A tensor with a row for each query token has a row for every token of the plan."""
    if not has_rows(rows, plan):
        raise fail(name, f"at least {plan.num_tokens} rows, as the plan has query tokens", rows)


def _max_rows(batch: Batch) -> int:
    if batch.num_tokens is not None:
        return batch.num_tokens
    return batch.num_requests * batch.max_query_len
