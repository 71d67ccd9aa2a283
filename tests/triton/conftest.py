"""Triton's kernels on the GPU where there is one, else on the CPU through Triton's interpreter.

No ``__init__.py`` in this folder: it would be the package ``triton`` then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # Triton looks at the variable when it decorates a kernel, its own ones included; the rest of
    # the suite must not see it, or impl="auto" would be the interpreter there too.
    if "triton" in sys.modules:
        raise pytest.UsageError("tests/triton needs a run of its own: pytest tests/triton")
    os.environ["TRITON_INTERPRET"] = "1"
    for stem in ("store", "indexer", "selection", "attend", "combine", "refresh"):
        import_module(f"msattn.kernels.triton.{stem}")
    for stem in ("attend", "indexer"):  # some of their kernels are Triton's
        import_module(f"msattn.kernels.hopper.{stem}")
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets kernels be served on a CPU, with the interpreter's mistakes mended."""
    if HAS_GPU:
        yield
        return
    from quick_interpreter import quicken
    from triton.runtime import interpreter

    # What it keeps may be of the GPU that the test before said was there.
    import_module("msattn.kernels.triton.launch").has_native_fp8.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", _dot)
    monkeypatch.setattr(builder, "create_maxnumf", _maximum_of_numbers)
    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(builder, name, _cast(getattr(builder, name)))
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", _reduce)
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", _scan)
    quicken(monkeypatch)
    yield


def _maximum_of_numbers(self: Any, a: Any, b: Any) -> Any:
    """The interpreter returns NaN where a GPU passes it over."""
    return self.binary_op(a, b, np.fmax)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter cuts fp32 off to bf16 where a GPU rounds."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    def cast(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return original(self, src, dst_type, *rounding)
        rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    return cast


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_imprecise: Any) -> Any:
    """The interpreter multiplies the bits of bf16 numbers, as integers."""
    from triton.runtime.interpreter import TensorHandle

    product = torch.matmul(_numbers(a), _numbers(b)).numpy()
    return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _numbers(x: Any) -> torch.Tensor:
    """An operand in fp32; bf16 and fp8 are held as integers."""
    import triton.language as tl

    bits = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    data, kind = torch.from_numpy(x.data.copy()), bits.get(x.dtype.scalar)
    return (data if kind is None else data.view(kind)).float()


def _reduce(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """By halves, one call for a whole half; the interpreter calls once for each element."""
    arrays = [x.handle.data for x in input]
    axis = self.axis
    assert axis is not None
    combine: Callable[..., Any] = self.combine_fn.fn
    size = arrays[0].shape[axis]
    while size > 1:
        size //= 2
        halves = [
            self.to_tensor(part, x.dtype)
            for start in (0, size)
            for part, x in zip(_slices(arrays, axis, start, size), input, strict=True)
        ]
        result = combine(*halves)
        result = result if isinstance(result, tuple) else (result,)
        arrays = [x.handle.data for x in result]
    if not self.keep_dims:
        arrays = [x.squeeze(axis) for x in arrays]
    return [self.to_tensor(x, y.dtype) for x, y in zip(arrays, input, strict=True)]


def _scan(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """Each adds what is 1, 2, 4, ... before it; the interpreter calls once for each element."""
    arrays = [x.handle.data for x in input]
    size, step = arrays[0].shape[self.axis], 1
    while step < size:
        before = [np.roll(x, step, self.axis) for x in arrays]
        operands = [
            self.to_tensor(part, x.dtype)
            for parts in (before, arrays)
            for part, x in zip(parts, input, strict=True)
        ]
        result = self.combine_fn.fn(*operands)
        result = result if isinstance(result, tuple) else (result,)
        first = _slices(arrays, self.axis, 0, step)
        later = _slices([x.handle.data for x in result], self.axis, step, size - step)
        both = zip(first, later, strict=True)
        arrays = [np.concatenate(parts, self.axis) for parts in both]
        step *= 2
    return [self.to_tensor(x, y.dtype) for x, y in zip(arrays, input, strict=True)]


def _slices(arrays: list[Any], axis: int, start: int, size: int) -> list[Any]:
    index = (slice(None),) * axis + (slice(start, start + size),)
    return [x[index] for x in arrays]


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """Tensors of no particular device are on the kernels': for tests that do not name one."""
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
