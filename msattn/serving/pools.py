"""Wrapped pools of a model's layers: an engine's come again in every step, and are checked once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import ref

import torch

from ..cache import Scale
from .metadata import SparseMetadata

Cache = TypeVar("Cache")

LIMIT = 256
"""Pools of one step that are kept: more layers than a model has."""


class WrappedPools(Generic[Cache]):
    """Caches by what tells their pools apart; those that two steps did not use are let go.

    A wrapped cache keeps its pool alive: one that an engine gives back must not stay for long.
    """

    def __init__(self) -> None:
        self._step: Callable[[], SparseMetadata | None] = lambda: None
        self._used: dict[Hashable, Cache] = {}
        self._before: dict[Hashable, Cache] = {}

    def get(self, key: Hashable, step: SparseMetadata, wrap: Callable[[], Cache]) -> Cache:
        """The cache that ``key`` stands for; ``wrap`` makes it."""
        if self._step() is not step or len(self._used) == LIMIT:
            self._step, self._before, self._used = ref(step), self._used, {}
        cache = self._used.get(key)
        if cache is None:
            cache = self._before.get(key)
            self._used[key] = cache = wrap() if cache is None else cache
        return cache


def identity(value: Scale | None) -> Hashable:
    """What tells one tensor, or number, from another without reading it from the device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.device, value.data_ptr(), value.shape, value.stride(), value.dtype
