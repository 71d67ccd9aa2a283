"""Triton's interpreter without what it does again and again: the same numbers, much sooner.

It patches the language for each call of a device function, makes types of types that it has made
before, computes integers twice to look for an overflow that it reports in debug mode only, and
sorts by a network of its operators.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton import language as tl
from triton.language import core, semantic, standard
from triton.runtime import interpreter


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test."""
    monkeypatch.setattr(interpreter, "_patch_lang", _patch_once(interpreter._patch_lang))
    monkeypatch.setattr(interpreter, "_get_np_dtype", _numpy_dtype)
    monkeypatch.setattr(
        semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None
    )
    monkeypatch.setattr(standard, "sort_impl", _sort(standard.sort_impl))
    monkeypatch.setattr(core.block_type, "__init__", _init_block_type)
    monkeypatch.setattr(core.tensor, "__init__", _init_tensor)
    monkeypatch.setattr(core.tuple, "__init__", _init_tuple)
    monkeypatch.setattr(core.tuple, "__eq__", _equal_tuples)
    monkeypatch.setattr(core.tuple, "type", property(_type_of_tuple), raising=False)


class _NoScope:
    def restore(self) -> None:
        """A launch restores what it has patched."""


def _patch_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    """A launch patches the language; functions that its kernel calls find it patched."""
    patched: list[Any] = []

    class Scope:
        def restore(self) -> None:
            while patched:
                patched.pop().restore()

    def patch_once(function: Any) -> Any:
        if patched:
            return _NoScope()
        for namespace in ({"tl": tl}, {"core": core}):
            patched.append(patch(SimpleNamespace(__globals__=namespace)))
        return Scope()

    return patch_once


_NUMPY_DTYPES = {
    dtype.name: interpreter._get_np_dtype(dtype)
    for dtype in (
        *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64),
        *(tl.uint8, tl.uint16, tl.uint32, tl.uint64),
        *(tl.float8e4nv, tl.float8e5, tl.bfloat16, tl.float16, tl.float32, tl.float64),
    )
}


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return np.dtype(np.uint64)
    return _NUMPY_DTYPES[scalar.name]


def _sort(original: Any) -> Callable[..., Any]:
    def sort(x: Any, k: Any = None, dim: Any = None, descending: Any = core.CONSTEXPR_0) -> Any:
        if not x.dtype.is_int() or k is not None or descending:
            return original(x, k, dim, descending)
        return tl.tensor(interpreter.TensorHandle(np.sort(x.handle.data), x.dtype), x.type)

    return sort


# Of types that were made: what is the same for all of their sizes.
_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = core._unwrap_if_constexpr(shape) if isinstance(shape, core.constexpr) else shape
    key = tuple([x.value if isinstance(x, core.constexpr) else x for x in sizes])
    if key not in _shapes:
        assert key, "0d block_type is forbidden"
        kept = core.tuple(key)
        _shapes[key] = kept, core.validate_block_shape(key), str(kept)
    self.element_ty = element_ty
    self.shape, self.numel, text = _shapes[key]
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    key = tuple(type.shape.values) if type.is_block() else ()
    if key not in _tensor_shapes:
        shape = core.tuple([core.constexpr(size) for size in key])
        _tensor_shapes[key] = shape, core.constexpr(int(np.prod(key, dtype=np.int64)))
    self.shape, self.numel = _tensor_shapes[key]


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    """Its type is made when it is asked for."""
    self.values = list(args)
    if type is not None:
        self.__dict__["type"] = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _type_of_tuple(self: Any) -> Any:
    return self.__dict__.get("type") or core._type_for_tuple_values(self.values)


def _equal_tuples(self: Any, other: Any) -> Any:
    if not isinstance(other, core.tuple):
        other = core._normalize_tuple(other)
    return core.constexpr(self.values == other.values)
