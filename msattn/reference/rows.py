"""Which request a query row belongs to, and what it sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..config import BLOCK_SIZE
from ..plan import Plan


class Rows(NamedTuple):
    """Facts of the query rows ``0 .. n - 1``, those that belong to a request."""

    request: torch.Tensor  # [n] int64
    position: torch.Tensor  # [n] int64, negative: the row sees nothing
    num_visible: torch.Tensor  # [n] int64: visible blocks V, at most the plan's num_blocks

    @property
    def num_rows(self) -> int:
        return self.request.shape[0]

    def chunk(self, tokens: slice) -> Rows:
        return Rows(*(field[tokens] for field in self))


def query_rows(plan: Plan, num_tokens: int) -> Rows:
    """The first ``num_tokens`` rows of the step, less those behind the last request's."""
    starts, lengths = plan.cu_seqlens_q.long(), plan.seq_lens.long()
    owned = min(num_tokens, int(starts[-1]))
    token = torch.arange(owned, device=plan.device)
    request = torch.searchsorted(starts[1:], token, right=True)
    position = lengths[request] - (starts[request + 1] - token)
    visible = (position // BLOCK_SIZE + 1).clamp(0, plan.num_blocks)
    return Rows(request, position, visible)


def chunks(count: int, item_bytes: int, budget: int) -> Iterator[slice]:
    """Slices of ``range(count)`` that take at most ``budget`` bytes each, but one item at least."""
    step = max(1, budget // max(item_bytes, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
