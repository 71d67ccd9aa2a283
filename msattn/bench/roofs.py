"""What the machine can do: rates of a copy, a read and matrix products, measured in this run."""

from __future__ import annotations

import torch

from ..testing.cost import Roofs
from ..testing.timing import Call, time_calls

GPU_BYTES = 2 << 30
CPU_BYTES = 64 << 20
GPU_SIZE, CPU_SIZE = 8192, 1024  # of the square matrices


def measure_roofs(device: torch.device) -> Roofs:
    """The four rates; a product that the device cannot do is 0."""
    on_gpu = device.type == "cuda"
    size = GPU_BYTES if on_gpu else CPU_BYTES
    source = torch.randint(0, 255, (size // 8,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    # Not in a graph: there a copy takes a copy engine, which is slower than the multiprocessors.
    copy = 2 * size / _seconds(lambda: target.copy_(source), device, capture=False)
    read = size / _seconds(lambda: torch.sum(source), device)
    return Roofs(copy, read, _matmul(device, on_gpu), _matmul_fp8(device) if on_gpu else 0.0)


def _matmul(device: torch.device, on_gpu: bool) -> float:
    size = GPU_SIZE if on_gpu else CPU_SIZE
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device)


def _matmul_fp8(device: torch.device) -> float:
    """e4m3, with the fast accumulator, as attention kernels use it."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return 0.0
    a, b = (
        torch.randn(GPU_SIZE, GPU_SIZE, device=device).to(torch.float8_e4m3fn) for _ in range(2)
    )
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2.0 * GPU_SIZE**3 / _seconds(product, device)


def _seconds(call: Call, device: torch.device, *, capture: bool = True) -> float:
    return time_calls([call, call], device, seconds=0.15, capture=capture).median
