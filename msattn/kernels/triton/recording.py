"""Launches and changes of tensors that are recorded, if their call is.

They are done again without Triton's binder, which looks at every argument of a launch, some 70 of
attention, to find the compiled kernel that suits them; and without its launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

from ...recording import Recording, current
from .c_launch import c_launch, stream_of_launches
from .launch import with_base

TRITON_VERSIONS = ("3.6.",)
"""Whose compiled kernels are known to take all arguments of the source, in its order."""


class _Launch:
    """``compiled[grid](*arguments)``, in which ``own`` are a call's tensors, by argument."""

    def __init__(
        self,
        compiled: CompiledKernel,
        grid: tuple[int, int, int],
        arguments: list[Any],
        own: dict[int, int],
    ) -> None:
        self.by_c = c_launch(compiled, grid, arguments, own)
        self._call, self._arguments, self._own = compiled[grid], arguments, own
        for at in own:
            # What stays is kept alive here; what does not is not.
            x = arguments[at]
            arguments[at] = None if isinstance(x, torch.Tensor) else with_base(x, None)

    def __call__(
        self, own: Sequence[torch.Tensor], addresses: Sequence[int], stream: int | None
    ) -> None:
        if self.by_c is not None and stream is not None:
            self.by_c.issue(addresses, stream)
            return
        arguments = self._arguments.copy()
        for at, which in self._own.items():
            x, tensor = arguments[at], own[which]
            arguments[at] = tensor if x is None else with_base(x, tensor)
        self._call(*arguments)


def start(kernel: Any, grid: tuple[int, ...], /, *args: object, **kwargs: Any) -> None:
    """``kernel[grid](*args, **kwargs)``, recorded if its call is."""
    compiled = kernel[grid](*args, **kwargs)
    recording = current()
    if recording is None or not recording.is_whole:
        return
    is_known = triton.__version__.startswith(TRITON_VERSIONS)
    # Another is the interpreter's, or Triton did not launch.
    if not (is_known and isinstance(compiled, CompiledKernel)):
        recording.is_whole = False
        return
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | kwargs
    arguments = [values[name] for name in names]
    launch = _Launch(compiled, (*grid, 1, 1)[:3], arguments, _own(arguments, recording))
    recording.steps.append(launch)
    if launch.by_c is not None:
        recording.stream = stream_of_launches


def _own(arguments: Sequence[object], recording: Recording) -> dict[int, int]:
    """Which of the arguments are a call's own, and which of its tensors they are."""
    own = {}
    for at, x in enumerate(arguments):
        # A descriptor has a tensor, and all else of it is of the tensor's kind. A launch takes no
        # more than the address, so a view of another dtype is as good as the tensor.
        tensor = getattr(x, "base", x)
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in recording.own:
            own[at] = recording.own[tensor.data_ptr()]
    return own


def decline() -> None:
    """The call does what its steps alone would not do again: a copy, say."""
    recording = current()
    if recording is not None:
        recording.is_whole = False


def zero(x: torch.Tensor) -> None:
    """``x.zero_()``, recorded if its call is."""
    _change(torch.Tensor.zero_, x)


def fill(x: torch.Tensor, value: float) -> None:
    """``x.fill_(value)``, recorded if its call is."""
    _change(torch.Tensor.fill_, x, value)


def _change(method: Callable[..., object], x: torch.Tensor, *arguments: object) -> None:
    """``x`` is the plan's, or the whole of a tensor of the call's own: a part has its address."""
    method(x, *arguments)
    recording = current()
    if recording is None:
        return
    which = recording.own.get(x.data_ptr())
    kept = x if which is None else None
    recording.steps.append(lambda own, *_: method(own[which] if kept is None else kept, *arguments))
