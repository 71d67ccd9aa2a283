"""What launches have in common on the host: scales as arguments, facts of the device."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...arch import capability, has_dependent_launch
from ...cache import KVCache, Scale
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
        strides = scale.stride() if per_slot else (0, 1)  # type: ignore[union-attr]
        arguments[f"stride_{name}"], arguments[f"stride_{name}_slot"] = strides
    return arguments


def follow_arguments(device: torch.device) -> dict[str, object]:
    """Of kernels that call ``tiles.follow``: whether they start under the end of the one before.

    Launches of the interpreter follow one another.
    """
    is_compiled = os.environ.get("TRITON_INTERPRET") != "1"
    follows = is_compiled and has_dependent_launch(capability(device))
    return {"FOLLOWS": True, "launch_pdl": True} if follows else {"FOLLOWS": False}


def softmax_arguments(softmax_scale: float) -> dict[str, object]:
    """The scale of base 2 logits, positive, and its sign: kernels look for the largest logit."""
    sign = (softmax_scale > 0) - (softmax_scale < 0)
    scale = abs(softmax_scale) * math.log2(math.e)
    return {"softmax_scale_log2": scale if sign else 1.0, "SIGN": sign}


def format_arguments(fmt: KVFormat, device: torch.device) -> dict[str, object]:
    """Compile-time arguments of the tile loaders."""
    kind = NVFP4 if fmt.scale_group else FP8 if fmt.is_fp8 else WIDE
    return {
        "FORMAT": kind.value,
        "E5M2": fmt.storage_dtype == torch.float8_e5m2,
        "NATIVE_FP8": has_native_fp8(device),
        # fp16 holds fp8 and NVFP4 numbers exactly, and weights 8 times finer than bf16.
        "COMPUTE": tl.bfloat16 if fmt.storage_dtype == torch.bfloat16 else tl.float16,
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


def has_bulk_copies(cache: KVCache) -> bool:
    """Hopper's and later GPUs' copy engine can fetch the pool's pages as they are stored."""
    scales = (cache.k_scale, cache.v_scale)
    if any(isinstance(s, torch.Tensor) and s.dim() for s in scales):
        return False
    if cache.format.is_fp8 or cache.format.scale_group:  # converted in registers: nothing is won
        return False
    return can_copy_in_bulk(cache.k) and can_copy_in_bulk(cache.v)


def can_copy_in_bulk(pool: torch.Tensor) -> bool:
    """The copy engine is there, and finds the pool's rows where it needs them."""
    found = capability(pool.device)
    size = pool.element_size()
    if found is None or found < (9, 0) or not pool.numel() or pool.shape[-1] * size > 256:
        return False
    return pool.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in pool.stride()[:-1])


def pool_descriptors(cache: KVCache) -> tuple[TensorDescriptor, TensorDescriptor]:
    """K and V for the copy engine; a block is one page of one head."""
    return page_descriptor(cache.k), page_descriptor(cache.v)


def page_descriptor(pool: torch.Tensor) -> TensorDescriptor:
    """A pool for the copy engine: ``[tokens, elements]`` of its last two axes are a block."""
    block = [*(1 for _ in pool.shape[:-2]), *pool.shape[-2:]]
    return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), block)


def with_base(descriptor: Any, base: Any) -> Any:
    """As another one, of another tensor of the same kind; :func:`copy.copy` takes 5 us."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__, base=base)
    return other


def raw(x: torch.Tensor) -> torch.Tensor:
    """fp8 tensors as bytes: Triton has no fp8 type for some targets."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def power_of_two_above(n: int) -> int:
    """The smallest power of two that is at least ``n`` and 1; Triton's own takes 5 us."""
    return 1 << (max(n, 1) - 1).bit_length()


def power_of_two_below(n: int) -> int:
    """The largest power of two that is at most ``n``, 1 for less than 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def pool_arguments(cache: KVCache) -> tuple[object, ...]:
    """K and V of the pool, each with its strides between pages, heads and tokens."""
    if cache.format.scale_group:
        # One slot holds codes and scales; the loaders know where.
        views = cache.nvfp4_views()
        sides = (views.k_codes, views.v_codes)
    else:
        sides = (raw(cache.k), raw(cache.v))
    return tuple(x for side in sides for x in (side, *side.stride()[:3]))
