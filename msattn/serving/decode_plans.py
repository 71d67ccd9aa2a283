"""Plans of decode steps, kept by shape: a captured graph finds the same memory in every step."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from ..arch import is_capturing
from ..batch import Batch
from ..checks import fail, require_int, require_tensor, require_type
from ..config import BLOCK_SIZE, MSAConfig
from ..dispatch import why_not
from ..kv_format import KVFormat
from ..plan import Plan, make_plan

DEFAULT_CAPACITY = 64
"""Plans that are kept without a graph's need for them: more shapes than an eager server meets."""


@dataclass(eq=False, slots=True)
class DecodePlan:
    """A plan of the cache, and whether a captured graph reads its memory."""

    plan: Plan
    pinned: bool = False

    def use(self) -> Plan:
        """The plan, for stages that are launched now: inside of a capture, it is kept for good."""
        self.pinned = self.pinned or is_capturing(self.plan.device)
        return self.plan


@dataclass(eq=False)
class DecodePlanCache:
    """Decode plans by shape: requests, query tokens of each, columns of the page table.

    Lengths and pages are refreshed in place by one small kernel in every step, so that graphs that
    were captured with a plan stay valid. At most ``capacity`` plans are kept besides those that
    graphs use; the one that was not asked for the longest goes first.

    Args:
        config, kv_format: of the plans.
        max_seq_len: bound of every request's length, for which graphs are captured.
        capacity: plans that no graph uses.
    """

    config: MSAConfig
    kv_format: KVFormat
    max_seq_len: int
    capacity: int = DEFAULT_CAPACITY
    _plans: OrderedDict[tuple[int, int, int], DecodePlan] = field(
        default_factory=OrderedDict, repr=False
    )

    def __post_init__(self) -> None:
        require_type("config", self.config, MSAConfig)
        require_int("max_seq_len", self.max_seq_len, at_least=1)
        require_int("capacity", self.capacity, at_least=1)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def num_pinned(self) -> int:
        """Plans that captured graphs use."""
        return sum(planned.pinned for planned in self._plans.values())

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the plans hold, workspaces included."""
        return sum(planned.plan.nbytes for planned in self._plans.values())

    def prepare(
        self, seq_lens: torch.Tensor, page_table: torch.Tensor, decode_query_len: int
    ) -> DecodePlan:
        """The plan of the shape, with this step's lengths and pages in it.

        Args:
            seq_lens: ``[D]`` int32, this step's tokens included; 0 for padding requests.
            page_table: ``[D, B]`` int32, any strides.
            decode_query_len: query tokens of every request.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name. Nothing has changed then.
        """
        require_int("decode_query_len", decode_query_len, at_least=1)
        int32 = [torch.int32]
        lengths = require_tensor("seq_lens", seq_lens, dtypes=int32, shape={"D": None})
        rows, device = lengths.shape[0], lengths.device
        shape = {"D": rows, "B": None}
        require_tensor("page_table", page_table, dtypes=int32, shape=shape, device=device)
        check_lengths(lengths, page_table, self.max_seq_len)
        key = (rows, decode_query_len, page_table.shape[1])
        planned = self._plans.get(key)
        if planned is None:
            planned = DecodePlan(self._make(seq_lens, page_table, decode_query_len))
            self._plans[key] = planned
            self._evict()
        else:
            if planned.plan.device != device:
                raise fail("seq_lens", f"device {planned.plan.device}, as before", device)
            refresh(planned.plan, seq_lens, page_table)
        self._plans.move_to_end(key)
        return planned

    def _make(
        self, seq_lens: torch.Tensor, page_table: torch.Tensor, decode_query_len: int
    ) -> Plan:
        rows, query_len = seq_lens.shape[0], decode_query_len
        starts = torch.arange(0, rows * query_len + 1, query_len, device=seq_lens.device)
        batch = Batch(
            starts.to(torch.int32),
            seq_lens,
            page_table,
            max_query_len=query_len,
            max_seq_len=min(self.max_seq_len, page_table.shape[1] * BLOCK_SIZE),
            num_tokens=rows * query_len,
        )
        return make_plan(batch, self.config, self.kv_format)

    def _evict(self) -> None:
        free = [key for key, planned in self._plans.items() if not planned.pinned]
        for key in free[: max(len(free) - self.capacity, 0)]:
            del self._plans[key]


def refresh(plan: Plan, seq_lens: torch.Tensor, page_table: torch.Tensor) -> None:
    """Copy a step's lengths and pages into a plan of the same shape, in one launch on a GPU."""
    if why_not("attend", impl="triton", device=plan.device):
        plan.seq_lens.copy_(seq_lens)
        plan.page_table.copy_(page_table)
        return
    from ..kernels.triton.refresh import refresh as launch

    launch(seq_lens, page_table, plan.seq_lens, plan.page_table)


def check_lengths(seq_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int) -> None:
    """Lengths against the table's columns and the bound, on a CPU: nothing waits for a device."""
    if seq_lens.device.type != "cpu" or not seq_lens.numel():
        return
    shortest, longest = map(int, seq_lens.aminmax())
    if shortest < 0:
        raise fail("seq_lens", "lengths >= 0", seq_lens.tolist())
    if longest > max_seq_len:
        raise fail("seq_lens", f"at most max_seq_len={max_seq_len}", seq_lens.tolist())
    columns = -(-longest // BLOCK_SIZE)
    if columns > page_table.shape[1]:
        raise fail("page_table", f"at least {columns} columns", list(page_table.shape))
