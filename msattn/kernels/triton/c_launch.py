"""A launch by the C function behind Triton's launcher, with addresses in place of tensors.

Before it calls that function, Triton asks every tensor for its address and the driver what it is,
encodes all descriptors for the copy engine, and makes what a profiler's hooks would be told: for
the 75 arguments of attention, longer than its kernel takes to start. Launches of one kind differ in
addresses and in their stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import getclosurevars, isfunction
from itertools import repeat
from types import ModuleType
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .launch import with_base

PREFIX = "iiiKKppOOOOOO"
"""What the function takes before the kernel's arguments: the grid, the stream, the kernel, whether
it is cooperative and dependent, two scratch memories, the kernel's metadata, and for hooks."""
STREAM = 3
"""The stream's place."""
MAX_ENCODED = 128
"""Descriptors that a launch keeps of one argument: more than a model has layers."""


@dataclass(frozen=True, slots=True)
class CLaunch:
    """What a launch calls, all that it passes, and which of it a call's own tensors decide."""

    function: Callable[..., None]
    arguments: list[object]
    pointers: list[tuple[int, int]]  # argument, tensor
    descriptors: list[tuple[int, int, Callable[[int], object]]]  # and the descriptor of an address

    def issue(self, addresses: Sequence[int], stream: int) -> None:
        """Launch with the call's own tensors at these addresses."""
        arguments = self.arguments.copy()
        arguments[STREAM] = stream
        for at, which in self.pointers:
            arguments[at] = addresses[which]
        for at, which, encoded in self.descriptors:
            arguments[at] = encoded(addresses[which])
        self.function(*arguments)


def c_launch(
    compiled: CompiledKernel,
    grid: tuple[int, int, int],
    arguments: Iterable[object],
    own: Mapping[int, int],
) -> CLaunch | None:
    """``compiled[grid](*arguments)``, in which ``own`` are a call's tensors, by argument.

    None where Triton's launcher is another than the one known here, or has more to do.
    """
    launcher, nvidia = compiled.run, _nvidia_driver()
    if nvidia is None or not isinstance(launcher, nvidia.CudaLauncher):
        return None
    function, signature = _function_of(launcher), [*compiled.src.signature.values()]
    has_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    if function is None or has_scratch or any(isinstance(x, tuple) for x in signature):
        return None
    # Without metadata, a descriptor is for a device without a copy engine: a pointer.
    layouts = iter(getattr(compiled.metadata, "tensordesc_meta", None) or repeat(None))
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    flat: list[object] = [*grid, 0, compiled.function, *flags, None, None]
    flat += [compiled.packed_metadata, None, None, None]
    pointers, descriptors = [], []
    for i, (x, kind) in enumerate(zip(arguments, signature, strict=True)):
        parts = [x]
        if kind.startswith("tensordesc"):
            layout = next(layouts)
            parts = nvidia.make_tensordesc_arg(x, layout)
        if isinstance(parts[0], torch.Tensor):
            parts[0] = parts[0].data_ptr()
            if i in own:
                pointers.append((len(flat), own[i]))
        elif i in own:
            encoded = partial(_encode, nvidia.make_tensordesc_arg, with_base(x, None), layout)
            descriptors.append((len(flat), own[i], lru_cache(MAX_ENCODED)(encoded)))
        flat += parts
    return CLaunch(function, flat, pointers, descriptors)


def _nvidia_driver() -> ModuleType | None:
    """Triton's module, which it imports where it has one, if launches are known to go as here."""
    module = sys.modules.get("triton.backends.nvidia.driver")
    return module if getattr(module, "_BASE_ARGS_FORMAT", None) == PREFIX else None


def _function_of(launcher: Any) -> Callable[..., None] | None:
    """The launcher's C function; where there are descriptors, it is wrapped."""
    function = launcher.launch
    return getclosurevars(function).nonlocals.get("launcher") if isfunction(function) else function


class _Place(NamedTuple):
    """What has an address, for a descriptor: its tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _encode(
    expand: Callable[..., list[object]], descriptor: Any, layout: Any, address: int
) -> object:
    return expand(with_base(descriptor, _Place(address)), layout)[0]


def stream_of_launches() -> int | None:
    """The one that Triton would launch on; None where it has to, since a profiler is to be told."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # A chain of none tells nobody.
        if hook is not None and getattr(hook, "calls", True):
            return None
    active = driver.active
    return active.get_current_stream(active.get_current_device())
