"""What an implementation does in a call, recorded so that it can be done again with other tensors.

A call whose tensors have the dtypes, shapes, strides and alignment of an earlier call's, and all
else in common with it, is served by the same launches with other addresses: each layer of a model
after the first, and each step after the first of its kind. Who issues launches records them, if
``current()`` is there; who calls can issue them again, without the way to them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

Step = Callable[[Sequence[torch.Tensor], Sequence[int], int | None], object]
"""Of a call: it takes the call's own tensors, their addresses, and the stream of launches."""


class Recording:
    """The steps of one call, whose own tensors have these ``addresses``.

    A tensor is recognised by its address: of two that share one, the first is meant.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.own = {address: i for i, address in reversed([*enumerate(addresses)])}
        self.steps: list[Step] = []
        self.is_whole = True
        # Asked once for all steps; None where they have no launch, or find the stream themselves.
        self.stream: Callable[[], int | None] = _no_stream

    def replay(self, own: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """The same steps for other tensors of the same kinds, in the same order."""
        stream = self.stream()
        for step in self.steps:
            step(own, addresses, stream)


def _no_stream() -> None:
    """The stream of steps without launches."""


_CURRENT: ContextVar[Recording | None] = ContextVar("msattn_recording", default=None)

current = _CURRENT.get
"""The recording to add to, if there is one."""


@contextmanager
def record(addresses: Sequence[int]) -> Iterator[Recording]:
    """Steps are recorded as they are done; they are all that was done if it is whole in the end."""
    recording = Recording(addresses)
    token = _CURRENT.set(recording)
    try:
        yield recording
    finally:
        _CURRENT.reset(token)


class Kind:
    """Of tensors that stay together: equal to that of others where launches see no difference."""

    __slots__ = ("__weakref__",)


_KINDS: WeakValueDictionary[Hashable, Kind] = WeakValueDictionary()
"""One object for all that are equal, which is hashed and compared as fast as can be."""


class Memory(NamedTuple):
    """Tensors that stay together, as a cache's do, and all that a call looks at in them.

    But for their addresses: a copy of the owner has this, too, with tensors of its own.
    """

    kind: Kind
    tensors: tuple[torch.Tensor, ...]


def memory_of(tensors: Sequence[torch.Tensor], *facts: Hashable) -> Memory:
    """``tensors``, of whose owner a call looks at ``facts`` besides."""
    kinds = (kind_of(x, x.data_ptr()) for x in tensors)
    return Memory(_KINDS.setdefault((facts, *kinds), Kind()), tuple(tensors))


def kind_of(x: torch.Tensor, address: int) -> tuple[Hashable, ...]:
    """All that is looked at in a tensor; of its address, what Triton asks for."""
    return x.dtype, x.shape, x.stride(), address % 16, x.device
