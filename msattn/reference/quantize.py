"""Numbers to stored elements and back: saturating casts, NVFP4's codes and block scales, and the
compact copy of index keys."""

from __future__ import annotations

import math

import torch

from ..cache import CompactKeys
from ..kv_format import KVFormat

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each 3-bit code; bit 3 is the sign."""

_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-9, 448.0  # E4M3's smallest subnormal and its maximum


def to_storage(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """fp32 to the format's elements, to nearest even; excess and infinity saturate, NaN stays."""
    return x.clamp(-fmt.max_value, fmt.max_value).to(fmt.storage_dtype)


def divide(x: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    """x / divisor, rounded once: by a Python number, CUDA multiplies with its reciprocal."""
    return x / torch.as_tensor(divisor, dtype=x.dtype, device=x.device)


def nvfp4_encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 ``[..., D]`` / global scale -> codes ``[..., D/2]`` uint8, scales ``[..., D/16]`` E4M3.

    The scale of 16 elements is E4M3(amax / 6), at least 2^-9; a code is E2M1(x / scale), ties to
    the even code, a zero always +0. Byte for byte what vLLM's cache insertion writes.
    """
    groups = x.unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1)
    scales = divide(amax.clamp(min=1e-12), 6.0).clamp(_SMALLEST_SCALE, _LARGEST_SCALE)
    scales = scales.to(torch.float8_e4m3fn)
    ratio = groups / scales.float().unsqueeze(-1)
    codes = _e2m1_codes(ratio).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def nvfp4_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`nvfp4_encode`, exact in fp32."""
    values = torch.tensor(E2M1_VALUES, device=codes.device)
    values = torch.cat([values, -values])
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    elements: torch.Tensor = values[nibbles.int()].unflatten(-1, (-1, 16))
    return (elements * scales.float().unsqueeze(-1)).flatten(-2)


def compact_encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index keys as stored ``[..., Di]`` -> codes ``[..., Di]`` int8, factors ``[..., 2]`` fp16.

    What :class:`msattn.CompactKeys` says of them holds. A key with an element that is not finite,
    or of which a rotated one is 127 times 65,504 or more, has codes of 0 and a bound of infinity.
    """
    x = rotate(x.float())
    largest = x.abs().amax(-1, keepdim=True)
    scale = divide(largest, 127.0).half().float()
    bounded = scale.isfinite()  # and with it all of the key
    scale = scale.masked_fill(~bounded, 0.0)
    codes = (x / scale.masked_fill(scale == 0.0, 1.0)).round().clamp(-127, 127)
    codes = codes.where(bounded, 0.0)
    error = torch.linalg.vector_norm(x - codes * scale, dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # Upwards: by more than fp32 and fp16 round, and never 0.
    bound = (error + CompactKeys.rounding(x.shape[-1]) * norm) * (1 + 2**-8) + 2**-23
    bound = bound.where(bounded, math.inf)
    return codes.to(torch.int8), torch.cat([scale, bound], -1).half()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``x @ R.T`` for the R of :class:`msattn.CompactKeys`, by sums and differences in fp32."""
    for _ in range(x.shape[-1].bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = torch.cat([even + odd, even - odd], -1)
    return x


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """4-bit codes of fp32 numbers, uint8. A tie goes to the even code: > and >= alternate."""
    a = x.abs()
    code = (a > 0.25).byte() + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
    code = code + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return code | ((x < 0) & (code > 0)).byte() << 3
