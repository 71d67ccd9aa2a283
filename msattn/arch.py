"""Facts about a device, read when they are needed and never at import."""

from __future__ import annotations

from functools import cache

import torch


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability, None for anything that is not a CUDA device."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


@cache
def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
