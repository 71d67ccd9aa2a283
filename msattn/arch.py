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


def is_capturing(device: torch.device) -> bool:
    """What is launched on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
