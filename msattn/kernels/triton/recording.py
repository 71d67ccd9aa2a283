"""Launches of a call, to be issued again without Triton's binder and launcher.

Before each launch Triton looks at every argument, some 70 of attention, to find the compiled kernel
that suits them. A call whose tensors have the dtypes, shapes, strides and alignment of an earlier
call's, and all else in common with it, needs the same kernels with other addresses: each layer of a
model after the first, and each step after the first of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel

from .c_launch import CLaunch, c_launch, current_stream, is_watched
from .launch import with_base

TRITON_VERSIONS = ("3.6.",)
"""Whose compiled kernels are known to take all arguments of the source, in its order."""

MAX_KINDS = 128
"""Of calls whose launches are kept together: a plan may be updated to any number of rows."""


class _Step(NamedTuple):
    """A launch by way of Triton, or a change of a tensor."""

    call: Callable[..., object]
    arguments: list[object]
    own: dict[int, int]  # of the arguments, those that are a call's own: which of its tensors
    launch: CLaunch | None  # the same, where it can do without Triton


def kind(x: torch.Tensor) -> tuple[object, ...]:
    """All that a launch depends on in a tensor, but for its address: Triton asks for 16 bytes."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16


class Recording:
    """The launches of one call, in which ``own`` are the tensors that differ between calls.

    A tensor is recognised by its address, of which ``own`` has each one once.
    """

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        self._own = {x.data_ptr(): i for i, x in enumerate(own)}
        self._steps: list[_Step] = []
        self._goes_by_c = False
        self.complete = triton.__version__.startswith(TRITON_VERSIONS)

    def add_change(self, method: Callable[..., object], arguments: list[object]) -> None:
        """``method(*arguments)``, of a tensor."""
        self._add(method, arguments, self._places(arguments), None)

    def add_launch(
        self, compiled: CompiledKernel, grid: tuple[int, int, int], arguments: list[object]
    ) -> None:
        """``compiled[grid](*arguments)``."""
        own = self._places(arguments)
        self._add(compiled[grid], arguments, own, c_launch(compiled, grid, arguments, own))

    def _add(
        self,
        call: Callable[..., object],
        arguments: list[object],
        own: dict[int, int],
        launch: CLaunch | None,
    ) -> None:
        for at in own:
            # What stays is kept alive here; what does not is not.
            x = arguments[at]
            arguments[at] = None if isinstance(x, torch.Tensor) else with_base(x, None)
        self._steps.append(_Step(call, arguments, own, launch))
        self._goes_by_c |= launch is not None

    def _places(self, arguments: Iterable[object]) -> dict[int, int]:
        """Which of the arguments are a call's own, and which of its tensors they are."""
        own = {}
        for at, x in enumerate(arguments):
            # A descriptor has a tensor, and all else of it is of the tensor's kind. A launch takes
            # no more than the address, so a view of another dtype is as good as the tensor.
            tensor = getattr(x, "base", x)
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self._own:
                own[at] = self._own[tensor.data_ptr()]
        return own

    def replay(self, own: Sequence[torch.Tensor]) -> None:
        """The same launches for other tensors of the same kinds, in the same order."""
        stream = current_stream() if self._goes_by_c and not is_watched() else None
        addresses = [x.data_ptr() for x in own]
        for call, kept, places, launch in self._steps:
            if launch is not None and stream is not None:
                launch.issue(addresses, stream)
                continue
            arguments = kept.copy()
            for at, which in places.items():
                x, tensor = arguments[at], own[which]
                arguments[at] = tensor if x is None else with_base(x, tensor)
            call(*arguments)


_RECORDING: ContextVar[Recording | None] = ContextVar("msattn_recording", default=None)


@contextmanager
def record(own: Sequence[torch.Tensor]) -> Iterator[Recording]:
    """Launches are recorded besides; the recording can be used if it is complete in the end."""
    recording = Recording(own)
    token = _RECORDING.set(recording)
    try:
        yield recording
    finally:
        _RECORDING.reset(token)


def reissue(
    kept: dict[Hashable, Recording],
    own: Sequence[torch.Tensor],
    key: Hashable,
    issue: Callable[..., None],
    *arguments: Any,
    **options: Hashable,
) -> None:
    """``issue(*arguments, **options)``; a call like an earlier one has the launches of that one.

    Args:
        kept: launches of calls that have all in common but for what is said here.
        own: the tensors that differ between calls: all but those of ``kept``'s owner.
        key: what the launches depend on besides the kinds of ``own`` and the options.
    """
    # Two that have one address are one, where a call like this one has two that do.
    places = {x.data_ptr(): i for i, x in reversed([*enumerate(own)])}
    shared = None if len(places) == len(own) else tuple(places[x.data_ptr()] for x in own)
    key = (issue, key, shared, *map(kind, own), *options.values())
    own = [own[i] for i in sorted(places.values())]
    recording = kept.get(key)
    if recording is not None:
        recording.replay(own)
        return
    with record(own) as recording:
        issue(*arguments, **options)
    if recording.complete:
        if len(kept) >= MAX_KINDS:
            del kept[next(iter(kept))]
        kept[key] = recording


def start(kernel: Any, grid: tuple[int, ...], /, *args: object, **kwargs: Any) -> None:
    """``kernel[grid](*args, **kwargs)``, recorded if its call is."""
    compiled = kernel[grid](*args, **kwargs)
    recording = _RECORDING.get()
    if recording is None or not recording.complete:
        return
    if not isinstance(compiled, CompiledKernel):  # the interpreter's, or Triton did not launch
        recording.complete = False
        return
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | kwargs
    recording.add_launch(compiled, (*grid, 1, 1)[:3], [values[name] for name in names])


def decline() -> None:
    """The call does what its launches alone would not do again: a copy, say."""
    recording = _RECORDING.get()
    if recording is not None:
        recording.complete = False


def zero(x: torch.Tensor) -> None:
    """``x.zero_()``, recorded if its call is."""
    _change(torch.Tensor.zero_, x)


def fill(x: torch.Tensor, value: float) -> None:
    """``x.fill_(value)``, recorded if its call is."""
    _change(torch.Tensor.fill_, x, value)


def _change(method: Callable[..., object], x: torch.Tensor, *arguments: object) -> None:
    """``x`` is the plan's, or the whole of a tensor of the call's own: a part has its address."""
    method(x, *arguments)
    recording = _RECORDING.get()
    if recording is not None:
        recording.add_change(method, [x, *arguments])
