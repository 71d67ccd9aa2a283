"""One wording for every error about user input: ``<argument>: expected <what>, got <what>``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Shape = Mapping[str, int | None]


def fail(name: str, expected: str, got: object, error: type[Exception] = ValueError) -> Exception:
    """The exception for argument ``name``; the caller raises it, so that checkers see the exit."""
    return error(f"{name}: expected {expected}, got {got}")


def require_int(name: str, value: object, *, at_least: int) -> None:
    """``value`` is a Python int (no bool) of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise fail(name, "an int", f"{type(value).__name__} {value!r}", TypeError)
    if value < at_least:
        raise fail(name, f"an int >= {at_least}", value)


def require_number(name: str, value: object, expected: str, *, positive: bool = False) -> float:
    """Return ``value`` as a float once it is a finite number (no bool), above 0 if ``positive``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise fail(name, expected, f"{type(value).__name__} {value!r}", TypeError)
    if not math.isfinite(value) or (positive and value <= 0):
        raise fail(name, expected, value)
    return float(value)


def require_list(name: str, value: object, of: str) -> list[Any]:
    """``value`` as a list, once it is something to iterate over; ``of`` says what it holds."""
    if not isinstance(value, Iterable):
        raise fail(name, f"a sequence of {of}", type(value).__name__, TypeError)
    return list(value)


def require_type(name: str, value: object, kind: type) -> None:
    """``value`` is an instance of ``kind``, a class of msattn's or of torch's."""
    if not isinstance(value, kind):
        package = "torch" if kind.__module__ == "torch" else "msattn"
        raise fail(name, f"{package}.{kind.__name__}", type(value).__name__, TypeError)


def require_device(name: str, value: object) -> torch.device | None:
    """``value`` as a torch.device, None for None; it may be one that this machine has not."""
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise fail(
            name, "a torch.device or its name", f"{type(value).__name__} {value!r}", TypeError
        )
    try:
        return torch.device(value)
    except RuntimeError:
        raise fail(name, "a torch.device or its name", repr(value)) from None


def require_tensor(
    name: str,
    value: object,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    shape: Shape | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return ``value`` once it is a tensor of one of ``dtypes``, of ``shape``, on ``device``.

    ``shape`` maps a label to its size, None where any size will do: ``{"T": None, "Hkv": 4}``.
    """
    if not isinstance(value, torch.Tensor):
        raise fail(name, "a torch.Tensor", type(value).__name__, TypeError)
    if dtypes is not None and value.dtype not in dtypes:
        raise fail(name, f"dtype {one_of(dtypes)}", value.dtype, TypeError)
    if shape is not None and not _matches(value.shape, shape):
        raise fail(name, f"shape {_describe(shape)}", list(value.shape))
    if device is not None and value.device != device:
        raise fail(name, f"device {device}", value.device)
    return value


def require_output(
    name: str,
    out: torch.Tensor | None,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Shape,
    device: torch.device,
) -> None:
    """A caller's output buffer, when there is one, can take the result without a copy or a cast."""
    if out is not None:
        require_tensor(name, out, dtypes=dtypes, shape=shape, device=device)
        require_distinct(name, out)


def require_distinct(name: str, tensor: torch.Tensor) -> None:
    """No dimension of ``tensor`` is expanded: it is written to, by many programs at once."""
    strides = tensor.stride()
    if 0 in strides and any(n > 1 and s == 0 for n, s in zip(tensor.shape, strides, strict=True)):
        raise fail(name, "elements that do not share memory", f"strides {list(strides)}")


def one_of(values: Sequence[object]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    words = [str(v) for v in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _matches(got: torch.Size, shape: Shape) -> bool:
    if len(got) != len(shape):
        return False
    # A loop: a generator costs more than the rest of the checks.
    for have, want in zip(got, shape.values(), strict=True):
        if have != want and want is not None:
            return False
    return True


def _describe(shape: Shape) -> str:
    sizes = (label if size is None else f"{label}={size}" for label, size in shape.items())
    return "[" + ", ".join(sizes) + "]"
