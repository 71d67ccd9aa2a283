"""Tests of large pools follow one another on one device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The oracle's tensors are small; threads of several runs side by side only wait for others."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def released() -> None:
    """What the last test has left in torch's allocator goes back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
