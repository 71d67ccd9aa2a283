"""A step of SGLang as a batch of msattn, and the plan that its layers share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import torch

from ...arch import is_capturing
from ...batch import Batch
from ...config import BLOCK_SIZE, MSAConfig
from ...kv_format import KVFormat
from ...plan import Plan, make_plan

BLOCK_BITS = BLOCK_SIZE.bit_length() - 1


@dataclass(frozen=True, eq=False)
class Step:
    """What the layers of a forward pass are called with alike: SGLang's tensors, not copies."""

    req_to_token: torch.Tensor  # [requests of the pool, tokens] the slot of each token
    slot_ids: torch.Tensor  # [R] rows of req_to_token
    seq_lens: torch.Tensor  # [R] KV lengths
    cu_seqlens: torch.Tensor | None  # [R + 1] first query rows; None: one row for each request
    prefix_lens: torch.Tensor | None  # [R] tokens before the step's; None: all but the last
    num_rows: int  # rows of q
    max_query_len: int
    max_seq_len: int

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    def has_inputs_of(self, other: Step) -> bool:
        """The very same tensors, and equal bounds."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return all(a == b if isinstance(a, int) else a is b for a, b in pairs)

    def batch(self) -> Batch:
        """The step as msattn has it, computed on the device without waiting for it."""
        if self.cu_seqlens is None or self.prefix_lens is None:
            starts = torch.arange(len(self.seq_lens) + 1, dtype=torch.int32, device=self.device)
            lengths = self.seq_lens.to(torch.int32)
        else:
            starts = self.cu_seqlens.to(torch.int32)
            # SGLang's kernels take positions from the prefix, and so do padded rows of its batches.
            lengths = self.prefix_lens.to(torch.int32) + starts.diff()
        return Batch(
            starts,
            lengths,
            self.page_table(),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            # On a CPU it is counted, where there may be more rows than tokens.
            num_tokens=None if self.device.type == "cpu" else self.num_rows,
        )

    def page_table(self) -> torch.Tensor:
        """``[R, B]`` int32: pages hold whole blocks, so a block's first slot says where it is."""
        blocks = -(-self.max_seq_len // BLOCK_SIZE)
        first_slots = self.req_to_token[:, ::BLOCK_SIZE][:, :blocks]
        # A padded row may name no request; its entries are not read then.
        rows = self.slot_ids.clamp(0, max(first_slots.shape[0] - 1, 0))
        return (first_slots.index_select(0, rows) >> BLOCK_BITS).to(torch.int32)


@dataclass(frozen=True, eq=False)
class _Planned:
    step: Step
    config: MSAConfig
    kv_format: KVFormat
    in_capture: bool
    plan: Plan
    layers: set[int]  # those that have used it

    def is_over(self, layer: int) -> bool:
        """The layer begins another step. Where two halves of a batch take turns, the half that went
        first through a layer has been no further."""
        return layer in self.layers and len(self.layers) > 1


class Plans:
    """The plans of the current steps, each made by the first layer and shared by the others.

    SGLang's functions are not told when a step begins, and a tensor of the last step may come again
    with other numbers in it. But a layer comes once in a step: when it comes again, the step is
    new.

    Inside of the capture of a CUDA graph the plan is made by the graph, from SGLang's tensors at
    every replay, in memory of the graph's own. Nothing of it is needed here once the capture ends,
    so that the memory serves the graphs that are captured next into the same pool. ``capacity``
    plans are kept: two, since SGLang may let two halves of a batch overlap.
    """

    def __init__(self, capacity: int = 2) -> None:
        self._planned: deque[_Planned] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._planned)

    def get(self, step: Step, config: MSAConfig, kv_format: KVFormat, *, layer: int) -> Plan:
        """The step's plan for a layer, which is told from others by a number of its own."""
        in_capture = is_capturing(step.device)
        kind = config, kv_format, in_capture
        current = None
        for planned in self._planned:
            same_kind = (planned.config, planned.kv_format, planned.in_capture) == kind
            if same_kind and planned.step.has_inputs_of(step):
                current = planned
        if current is not None and layer not in current.layers:
            current.layers.add(layer)
            return current.plan
        # Before there is another one: a plan can hold hundreds of MB.
        for planned in tuple(self._planned):
            if planned is current or planned.in_capture != in_capture or planned.is_over(layer):
                self._planned.remove(planned)
        plan = make_plan(step.batch(), config, kv_format)
        self._planned.append(_Planned(step, *kind, plan, {layer}))
        return plan


PLANS = Plans()
"""Of this process: SGLang has one model runner in each."""
