"""A call like an earlier one has the launches of that one, without its checks and its choices."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch

from . import env
from .dispatch import TABLE, Implementation, Launch, Problem, on_device, prepare
from .recording import Memory, Recording, kind_of, record

MAX_KINDS = 128
"""Of calls whose launches are kept together: a plan may be updated to any number of rows."""


class Kept(NamedTuple):
    """The launches of a call."""

    recording: Recording
    device: torch.device
    rows: tuple[Implementation, ...]  # of the table, from which the implementation was chosen


Calls = dict[Hashable, Kept]
"""What is kept of calls that have all in common but for what :class:`Call` looks at."""


class Call:
    """A call of a stage, by all that its checks, its choice and its launches look at.

    Args:
        stage, impl: what is called, and who shall serve it.
        calls: earlier ones with the same plan, or of stages without one.
        memory: of the cache.
        arguments: all others, and what else the stage looks at of what may change: tensors, and
            what can be compared.
    """

    __slots__ = ("_addresses", "_calls", "_impl", "_kept", "_key", "_rows", "_tensors", "is_known")

    def __init__(
        self, stage: str, impl: str, calls: Calls, memory: Memory | None, *arguments: object
    ) -> None:
        self._impl, self._calls, self._rows = impl, calls, TABLE[stage]
        self._key: Hashable = None
        self._kept: Kept | None = None
        self.is_known = False  # an earlier one has passed the checks, and its launches are kept
        kind, tensors = memory or (None, ())
        self._tensors = [*tensors]
        self._addresses = [x.data_ptr() for x in tensors]
        try:
            key = (stage, impl, env.IMPL, kind, *self._look(arguments))
            kept = calls.get(key)
        except (TypeError, RuntimeError):
            # What cannot be compared, or has no memory: for the checks to say, else for torch.
            return
        self._key = key
        if kept is not None and kept.rows is self._rows:
            self._kept, self.is_known = kept, True

    def _look(self, arguments: tuple[object, ...]) -> list[object]:
        tensors, addresses = self._tensors, self._addresses
        facts: list[object] = []
        for x in arguments:
            if x is None:  # before what takes most of the time
                facts.append(None)
            elif isinstance(x, torch.Tensor):
                address = x.data_ptr()
                tensors.append(x)
                addresses.append(address)
                facts.append(kind_of(x, address))
            else:
                facts += (type(x), x)  # to a check, True is not 1.0
        if len(set(addresses)) < len(addresses):
            facts.append(tuple(map(addresses.index, addresses)))
        return facts

    def again(self, *outputs: torch.Tensor | None) -> Launch:
        """The launches of that one, with this call's tensors and these outputs."""
        assert self._kept is not None
        recording, device, _ = self._kept
        self._add(outputs)
        return on_device(device, partial(recording.replay, self._tensors, self._addresses))

    def first(
        self, problem: Problem, arguments: tuple[object, ...], *outputs: torch.Tensor | None
    ) -> Launch:
        """The implementation's, to be kept if they are all that it does."""
        launch = prepare(self._impl, problem, *arguments)
        if self._key is None:
            return launch
        self._add(outputs)
        return partial(self._record, launch, problem.device)

    def _add(self, outputs: tuple[torch.Tensor | None, ...]) -> None:
        """Of them, new memory is all of one alignment, and others are among the arguments."""
        for x in outputs:
            if x is not None:
                self._tensors.append(x)
                self._addresses.append(x.data_ptr())

    def _record(self, launch: Launch, device: torch.device) -> None:
        with record(self._addresses) as recording:
            launch()
        if recording.steps and recording.is_whole:
            if len(self._calls) >= MAX_KINDS:
                del self._calls[next(iter(self._calls))]
            self._calls[self._key] = Kept(recording, device, self._rows)
