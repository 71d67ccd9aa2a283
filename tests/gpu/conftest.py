"""Tests of large pools follow one another on one device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def released() -> None:
    """What the last test has left in torch's allocator goes back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
