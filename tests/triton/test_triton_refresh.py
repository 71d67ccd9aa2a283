"""A decode plan's lengths and pages in one launch, against the copies of torch."""

from __future__ import annotations

import pytest
import torch

from msattn.kernels.triton import refresh as refresh_module
from msattn.kernels.triton.refresh import refresh


@pytest.mark.parametrize("columns", [0, 1, 16, 17, 40])
def test_refresh(columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh_module, "COLUMNS", 16)
    rows, int32 = 3, torch.int32
    lengths = torch.tensor([5, 9, 0, 9, 700, 9], dtype=int32, device=device)[::2]
    tables = torch.randint(-(2**31), 2**31 - 1, (columns, rows + 1), dtype=int32, device=device)
    table = tables.T[1:]
    lengths_out = torch.full((rows + 1,), 77, dtype=int32, device=device)
    table_out = torch.full((rows + 1, columns), 77, dtype=int32, device=device)
    refresh(lengths, table, lengths_out[:rows], table_out[:rows])
    assert lengths_out.tolist() == [5, 0, 700, 77]
    assert torch.equal(table_out[:rows], table)
    assert table_out[rows:].eq(77).all()


def test_no_requests(device: torch.device) -> None:
    empty = torch.empty(0, dtype=torch.int32, device=device)
    refresh(empty, empty.view(0, 8), empty, empty.view(0, 8))
