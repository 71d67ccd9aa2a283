"""What launches have in common on the host: scales as arguments, facts of the device."""

from __future__ import annotations

from functools import cache

import torch

from ...arch import capability
from ...cache import Scale
from ...kv_format import KVFormat
from .tiles import FP8, NVFP4, WIDE


def scale_arguments(name: str, scale: Scale, *, slots: bool = True) -> dict[str, object]:
    """Argument ``<name>``, and what the kernel knows of it at compile time.

    A factor is a number, lies on the device, or, with ``slots``, is one for each head and slot.
    """
    on_device = isinstance(scale, torch.Tensor)
    arguments: dict[str, object] = {name: scale, f"{name.upper()}_ON_DEVICE": on_device}
    if slots:
        per_slot = isinstance(scale, torch.Tensor) and scale.dim() == 2
        arguments[f"{name.upper()}_PER_SLOT"] = per_slot
        arguments[f"stride_{name}"] = scale.stride(0) if per_slot else 0  # type: ignore[union-attr]
    return arguments


def format_arguments(fmt: KVFormat, device: torch.device) -> dict[str, object]:
    """Compile-time arguments of the tile loaders."""
    kind = NVFP4 if fmt.scale_group else FP8 if fmt.is_fp8 else WIDE
    return {
        "FORMAT": kind.value,
        "E5M2": fmt.storage_dtype == torch.float8_e5m2,
        "NATIVE_FP8": has_native_fp8(device),
    }


@cache
def has_native_fp8(device: torch.device) -> bool:
    """The device converts fp8 in hardware (from sm_89 on); elsewhere, bits are shifted."""
    found = capability(device)
    return found is not None and found >= (8, 9)


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def raw(x: torch.Tensor) -> torch.Tensor:
    """fp8 tensors as bytes: Triton has no fp8 type for some targets."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def power_of_two_below(n: int) -> int:
    """The largest power of two that is at most ``n``, 1 for less than 1."""
    return 1 << (max(n, 1).bit_length() - 1)
