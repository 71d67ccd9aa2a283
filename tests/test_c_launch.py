"""Launches without Triton's launcher: what they pass, and when Triton has to make them after all.

That both pass the same is seen by ``tests/test_recording.py``, for all kernels.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.knobs import HookChain
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from msattn.kernels.triton import c_launch
from msattn.kernels.triton.recording import start
from msattn.recording import record

SIGNATURE = {"x": "*bf16", "pages": "tensordesc<bf16[1,128]>", "n": "i32", "SIZE": "constexpr"}
SCALES = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "fp4_padded": False}
BY_COPY_ENGINE = [{"block_size": [1, 128], **SCALES}]
PAGES = 4


class Driver:
    """Encodes a descriptor as what it is made of; there is no device."""

    def __init__(self) -> None:
        self.utils, self.encoded = self, 0

    def fill_tma_descriptor(self, address: int, *rest: object) -> tuple[object, ...]:
        self.encoded += 1
        return address, *rest

    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> int:
        return 70 + device


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    return fake


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[list[object]]:
    """What the C function of a launcher gets."""
    passed: list[list[object]] = []

    class CFunction:
        def __call__(self, *arguments: object) -> None:
            passed.append([*arguments])

    monkeypatch.setattr(nvidia, "make_launcher", lambda *_: "")
    monkeypatch.setattr(nvidia, "library_dirs", list)
    built = SimpleNamespace(launch=CFunction())
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: built)
    return passed


class Compiled(CompiledKernel):
    """A compiled kernel, as far as it is looked at."""

    def __init__(self, launcher: Any, source: SimpleNamespace, metadata: SimpleNamespace) -> None:
        self._run, self.src, self.metadata = launcher, source, metadata
        self.module, self.function, self.packed_metadata = 1, 9, (4, 1, 0)


class Kernel:
    """A kernel that is compiled, and launches nothing when it is first called."""

    arg_names = tuple(SIGNATURE)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        return lambda *_: compiled()


def compiled(
    signature: dict[str, Any] = SIGNATURE, layouts: Any = BY_COPY_ENGINE, **metadata: Any
) -> Compiled:
    scratch = ("global_scratch_size", "global_scratch_align")
    scratch += ("profile_scratch_size", "profile_scratch_align")
    known = dict.fromkeys(scratch, 0) | {"launch_pdl": True, "launch_cooperative_grid": False}
    facts = SimpleNamespace(**known | {"tensordesc_meta": layouts} | metadata)
    source = SimpleNamespace(signature=signature)
    return Compiled(nvidia.CudaLauncher(source, facts), source, facts)


def pool() -> torch.Tensor:
    return torch.zeros(PAGES, 128, dtype=torch.bfloat16)


def arguments_of(x: torch.Tensor, pages: torch.Tensor) -> list[Any]:
    descriptor = TensorDescriptor(pages, [*pages.shape], [*pages.stride()], [1, 128])
    return [x, descriptor, 7, "a constant"]


def test_all_that_is_passed(fake_driver: Driver, passed: list[list[object]]) -> None:
    x, other, pages, others = pool(), pool(), pool(), pool()
    launch = c_launch.c_launch(compiled(), (5, 2, 1), arguments_of(x, pages), {0: 1, 1: 0})
    assert launch is not None
    launch.issue([others.data_ptr(), other.data_ptr()], c_launch.stream_of_launches())
    (got,) = passed
    prefix = [5, 2, 1, 73, 9, False, True, None, None, (4, 1, 0), None, None, None]
    sizes = [PAGES, 128, 128, 1]
    encoded = (others.data_ptr(), 3, 2, nvidia.TMA_DTYPE_DEVICE_TO_HOST[9], [1, 128])
    assert got == [
        *prefix,
        other.data_ptr(),
        (*encoded, sizes[:2], sizes[2:], 0),
        *sizes,
        7,
        "a constant",
    ]


def test_a_descriptor_without_a_copy_engine_is_a_pointer(
    fake_driver: Driver, passed: list[list[object]]
) -> None:
    x, pages, others = pool(), pool(), pool()
    launch = c_launch.c_launch(compiled(layouts=[]), (1, 1, 1), arguments_of(x, pages), {1: 0})
    assert launch is not None
    launch.issue([others.data_ptr()], 0)
    sizes = [PAGES, 128, 128, 1]
    assert passed[0][13:16] == [x.data_ptr(), others.data_ptr(), PAGES]
    assert passed[0][15:] == [*sizes, False, *sizes, 7, "a constant"]
    assert fake_driver.encoded == 0


def test_descriptors_are_kept_but_not_without_end(
    fake_driver: Driver, passed: list[list[object]]
) -> None:
    launch = c_launch.c_launch(compiled(), (1, 1, 1), arguments_of(pool(), pool()), {1: 0})
    assert launch is not None
    most = c_launch.MAX_ENCODED
    fake_driver.encoded = 0
    for _ in range(2):
        for address in range(most):
            launch.issue([16 * address], 0)
    assert fake_driver.encoded == most
    launch.issue([16 * most], 0)
    launch.issue([0], 0)
    assert fake_driver.encoded == most + 2
    assert passed[-1][14][0] == 0


@pytest.mark.parametrize("why", ["scratch", "profile", "tuple", "launcher", "prefix", "wrapper"])
def test_what_triton_has_to_launch(
    why: str, monkeypatch: pytest.MonkeyPatch, fake_driver: Driver, passed: list[list[object]]
) -> None:
    kernel, arguments = compiled(), arguments_of(pool(), pool())
    if why == "scratch":
        kernel = compiled(global_scratch_size=16)
    elif why == "profile":
        kernel = compiled(profile_scratch_size=16)
    elif why == "tuple":
        kernel = compiled({**SIGNATURE, "pair": ("i32", "*fp32")})
        arguments.append((1, pool()))
    elif why == "launcher":
        kernel._run = lambda *_: None
    elif why == "prefix":
        monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOOO")
    elif why == "wrapper":
        kernel.run.launch = lambda *_: None
    assert c_launch.c_launch(kernel, (1, 1, 1), arguments, {0: 0}) is None


def test_who_watches_launches(monkeypatch: pytest.MonkeyPatch, fake_driver: Driver) -> None:
    assert c_launch.stream_of_launches() == 73
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain: HookChain[Any] = HookChain()
        monkeypatch.setattr(knobs.runtime, name, chain)
        chain.add(print)
        assert c_launch.stream_of_launches() is None
        chain.remove(print)
        assert c_launch.stream_of_launches() == 73
        monkeypatch.setattr(knobs.runtime, name, print)  # as earlier versions of Triton have it
        assert c_launch.stream_of_launches() is None
        monkeypatch.setattr(knobs.runtime, name, None)
        assert c_launch.stream_of_launches() == 73


def test_what_a_call_does_not_bring_lives_as_long_as_its_launches(
    fake_driver: Driver, passed: list[list[object]]
) -> None:
    """Launches have addresses alone."""
    own, kept, pages = pool(), pool(), pool()
    with record([own.data_ptr()]) as recording:
        start(Kernel(), (1,), *arguments_of(own, pages))
        start(Kernel(), (1,), *arguments_of(kept, own))
    living = [weakref.ref(x) for x in (own, kept, pages)]
    at = [kept.data_ptr(), pages.data_ptr()]
    del own, kept, pages
    gc.collect()
    assert [x() is not None for x in living] == [False, True, True]
    other = pool()
    recording.replay([other], [other.data_ptr()])
    assert [passed[1][13], passed[0][14][0]] == at
    assert [passed[0][13], passed[1][14][0]] == [other.data_ptr()] * 2
    del recording
    gc.collect()
    assert [x() for x in living] == [None] * 3
