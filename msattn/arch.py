"""Facts about a device, read when they are needed and never at import."""

from __future__ import annotations

from functools import cache

import torch


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability, None for anything that is not an NVIDIA GPU of this machine."""
    if device.type != "cuda" or torch.version.hip is not None or absence(device):
        return None
    return torch.cuda.get_device_capability(device)


def absence(device: torch.device) -> list[str]:
    """The reason against a CUDA or ROCm device that this machine has not; none for others."""
    if device.type != "cuda" or (device.index or 0) < (count := torch.cuda.device_count()):
        return []
    if count:
        return [f"no {device} on this machine, which has {count} CUDA devices"]
    return ["no CUDA device on this machine"]


def has_warpgroups(compute_capability: tuple[int, int] | None) -> bool:
    """Four warps issue a matrix product together (Hopper, data center Blackwell)."""
    return compute_capability is not None and compute_capability[0] in (9, 10)


def has_dependent_launch(compute_capability: tuple[int, int] | None) -> bool:
    """A kernel may start under the end of the one before it, and wait for that by itself."""
    return compute_capability is not None and compute_capability >= (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have.

    The CUDA programming guide's table of compute capabilities; 64 KiB on AMD's GPUs. What is not in
    the table gets the least of it.
    """
    if torch.version.hip is not None:
        return 64 << 10
    kib = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return kib.get(capability(device) or (0, 0), 99) << 10


def is_capturing(device: torch.device) -> bool:
    """What is launched on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
