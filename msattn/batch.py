"""Batch: which query tokens of which requests one step computes, and where their keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from operator import index

import torch

from .checks import fail, require_device, require_int, require_list, require_tensor
from .config import BLOCK_SIZE

UNMAPPED = -1
"""Page-table entry without a page."""


@dataclass(frozen=True, eq=False)
class Batch:
    """R requests of one step, in any order: decode, verification, prefill chunks, padding.

    Token ``i`` of a request with ``q`` query tokens stands at position ``seq_len - q + i`` and sees
    the positions up to its own. A position below 0 (a padding request with seq_len 0) sees nothing.

    Worked example: a decode row, a row verifying 3 drafts, and a prompt of 300 tokens with 200 more
    in the cache: ``cu_seqlens_q = [0, 1, 5, 305]``, ``seq_lens = [4096, 131, 500]``.

    The integers are host bounds, so that nothing has to be read back from the device.
    """

    # [R + 1] int32: request r owns the rows cu[r] .. cu[r + 1] - 1
    cu_seqlens_q: torch.Tensor = field(repr=False)
    seq_lens: torch.Tensor = field(repr=False)  # [R] int32: KV length, this step's tokens included
    # [R, B] int32: block -> page; entries outside the pool are unmapped
    page_table: torch.Tensor = field(repr=False)
    _: KW_ONLY
    max_query_len: int  # at least every request's query tokens
    max_seq_len: int  # at least every request's seq_lens entry
    num_tokens: int | None = None  # query tokens of the step, where the host knows them

    def __post_init__(self) -> None:
        require_int("max_query_len", self.max_query_len, at_least=0)
        require_int("max_seq_len", self.max_seq_len, at_least=0)
        int32 = [torch.int32]
        lengths = require_tensor("seq_lens", self.seq_lens, dtypes=int32, shape={"R": None})
        rows, device = self._agreed_rows(lengths.shape[0]), lengths.device
        require_tensor("seq_lens", lengths, shape={"R": rows})
        require_tensor(
            "cu_seqlens_q", self.cu_seqlens_q, dtypes=int32, shape={"R+1": rows + 1}, device=device
        )
        require_tensor(
            "page_table", self.page_table, dtypes=int32, shape={"R": rows, "B": None}, device=device
        )
        if self.num_tokens is not None:
            require_int("num_tokens", self.num_tokens, at_least=0)
        if device.type == "cpu":
            self._check_values()

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_table: torch.Tensor | Sequence[Sequence[int]],
        *,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Build a batch from Python numbers.

        Args:
            query_lens: query tokens of each request, 0 allowed.
            seq_lens: KV length of each request, its query tokens included.
            page_table: ``[R, B]`` integer tensor, or one list of pages for each request (any
                lengths).
            max_query_len, max_seq_len: host bounds; default: the lists' maxima.
            device: where the tensors go; default: the page table's device, else the CPU.
        """
        query_lens = require_list("query_lens", query_lens, "ints")
        seq_lens = require_list("seq_lens", seq_lens, "ints")
        if len(query_lens) != len(seq_lens):
            raise fail("seq_lens", f"{len(query_lens)} lengths, as query_lens has", len(seq_lens))
        for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
            for length in lengths:
                require_int(name, length, at_least=0)
        table = _as_table(page_table, require_device("device", device))
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        return cls(
            torch.tensor(starts, dtype=torch.int32, device=table.device),
            torch.tensor(seq_lens, dtype=torch.int32, device=table.device),
            table,
            max_query_len=max(query_lens, default=0) if max_query_len is None else max_query_len,
            max_seq_len=max(seq_lens, default=0) if max_seq_len is None else max_seq_len,
            num_tokens=starts[-1],
        )

    def _agreed_rows(self, rows: int) -> int:
        """R as two of the three tensors have it, so that an error names the third."""
        starts, table = self.cu_seqlens_q, self.page_table
        shaped = isinstance(starts, torch.Tensor) and isinstance(table, torch.Tensor)
        agree = shaped and starts.dim() and starts.shape[0] - 1 in table.shape[:1]
        return starts.shape[0] - 1 if agree else rows

    def _check_values(self) -> None:
        """What can be read without a device sync is checked: lengths against bounds and table."""
        starts, lengths = self.cu_seqlens_q.tolist(), self.seq_lens.tolist()
        queries = [b - a for a, b in pairwise(starts)]
        if starts[0] != 0 or any(q < 0 for q in queries):
            raise fail("cu_seqlens_q", "0 first, then a non-decreasing sequence", starts)
        if max(queries, default=0) > self.max_query_len:
            raise fail("max_query_len", f"at least {max(queries)}", self.max_query_len)
        if any(length < 0 for length in lengths):
            raise fail("seq_lens", "lengths >= 0", lengths)
        if max(lengths, default=0) > self.max_seq_len:
            raise fail("max_seq_len", f"at least {max(lengths)}", self.max_seq_len)
        blocks = -(-max(lengths, default=0) // BLOCK_SIZE)
        if blocks > self.page_table.shape[1]:
            raise fail("page_table", f"at least {blocks} columns", list(self.page_table.shape))
        if self.num_tokens not in (None, starts[-1]):
            raise fail("num_tokens", f"cu_seqlens_q's last entry {starts[-1]}", self.num_tokens)
        object.__setattr__(self, "num_tokens", starts[-1])


def _as_table(
    page_table: torch.Tensor | Sequence[Sequence[int]], device: torch.device | None
) -> torch.Tensor:
    if isinstance(page_table, torch.Tensor):
        table = page_table.to(page_table.device if device is None else device)
    else:
        rows = [
            require_list("page_table", row, "pages")
            for row in require_list("page_table", page_table, "rows")
        ]
        width = max((len(row) for row in rows), default=0)
        padded = [[*map(_page, row), *[UNMAPPED] * (width - len(row))] for row in rows]
        table = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), width)
    if table.dtype not in (torch.int32, torch.int64):
        raise fail("page_table", "an int32 or int64 tensor", table.dtype, TypeError)
    if table.dtype == torch.int64:
        # A number beyond int32 names no page, and must not become one that exists.
        table = table.clamp(UNMAPPED, torch.iinfo(torch.int32).max).to(torch.int32)
    return table


def _page(entry: object) -> int:
    try:
        return index(entry)  # type: ignore[arg-type]
    except TypeError:
        raise fail(
            "page_table", "rows of ints", f"{type(entry).__name__} {entry!r}", TypeError
        ) from None
