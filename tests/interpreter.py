"""Triton's interpreter as the hardware is: imported where kernels run under TRITON_INTERPRET=1.

Triton 3.6 to 3.9 multiply the raw bits of bf16 operands in ``tl.dot``, cut fp32 off to bf16 instead
of rounding it, and let NaN win in ``tl.maximum`` and ``tl.minimum``, which on a GPU ignore it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Correct the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _cast(builder.create_fp_to_fp)
    builder.create_dot = _dot
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def _cast(original: Any) -> Any:
    def cast(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return original(self, src, dst_type, *rounding)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded)
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    return cast


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_imprecise: Any) -> Any:
    product = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _numbers(x: Any) -> Any:
    """An operand of tl.dot as an array of numbers."""
    dtype = x.dtype.scalar
    if dtype == tl.bfloat16:
        return (x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.is_fp8():
        raw = interpreter._convert_float(x.data, dtype, tl.float16, None)
        return raw.view(np.float16)
    return x.data
