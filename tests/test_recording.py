"""Replayed launches are those that Triton's binder would make; on a CPU, where nothing is launched.

The comparison runs in a process of its own, as ``python tests/test_recording.py``: kernels are
compiled ones there, whereas the tests may have the interpreter's. Triton is told that it has a
Hopper; a compiled kernel is the key it is found by, and a launch is written down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import msattn

CONFIG = msattn.MSAConfig(8, 2, 2, topk=4)
FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
# Query tokens of a request: tiles that walk their ids, lists, and both schedules.
QUERY_LENS = (1, 3, 70)
IMPLS = ("triton", "hopper")
COPIED = [4, 6]
"""Calls whose queries Hopper's kernels for prompts copy first: they are not launches alone."""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_replayed_launches_are_the_binders() -> None:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=clean, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == len(IMPLS) * len(FORMATS) * len(QUERY_LENS)
    for step in steps:
        assert step["differences"] == [], step
        assert step["launches"] > 0
        copied = COPIED if (step["impl"], step["query_len"]) == ("hopper", 70) else []
        assert step["bound_again"] == copied, "calls like an earlier one went through the binder"
        kinds = {"first", "offset", "strided", "fp16", "lse", "scale", "rows", "cache"}
        assert set(step["bound"]) == kinds
        assert step["after_growth"] and step["kept"] == [2, 1], step


def q_of(dtype: torch.dtype, rows: int, *, offset: int = 0, gap: int = 0) -> torch.Tensor:
    """Queries ``offset`` elements behind an aligned address, ``gap`` elements between rows."""
    heads, dim = CONFIG.num_q_heads, CONFIG.head_dim
    row = heads * dim + gap
    memory = torch.zeros(rows * row + offset, dtype=dtype)
    return memory.as_strided((rows, heads, dim), (row, dim, 1), offset)


def calls(rows: int, kv_format: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Arguments of attend: names of those that differ in kind from all before, "" for others."""
    first, other = (msattn.KVCache.allocate(9, CONFIG, kv_format) for _ in range(2))
    bf16, fp16 = torch.bfloat16, torch.float16

    def call(q: torch.Tensor, cache: Any = first, scale: float = 0.1, lse: bool = False) -> Any:
        rows = len(q)
        ids = torch.zeros(rows, CONFIG.num_kv_heads, CONFIG.topk, dtype=torch.int32)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return q, cache, ids, scale, out, torch.zeros(rows, CONFIG.num_q_heads) if lse else None

    yield "first", call(q_of(bf16, rows))
    yield "", call(q_of(bf16, rows))
    yield "offset", call(q_of(bf16, rows, offset=1))
    yield "", call(q_of(bf16, rows, offset=8))
    yield "", call(q_of(bf16, rows, offset=17))
    yield "strided", call(q_of(bf16, rows, gap=8))
    yield "", call(q_of(bf16, rows, gap=8))
    yield "fp16", call(q_of(fp16, rows))
    yield "lse", call(q_of(bf16, rows), lse=True)
    yield "", call(q_of(bf16, rows), lse=True)
    yield "scale", call(q_of(bf16, rows), scale=-0.1)
    yield "rows", call(q_of(bf16, rows + 3))
    yield "", call(q_of(bf16, rows + 3))
    yield "cache", call(q_of(bf16, rows), cache=other)
    yield "", call(q_of(bf16, rows), cache=other)
    yield "", call(q_of(bf16, rows))


def compare(
    impl: str, query_len: int, kv_format: str, launched: list[Any], bound: list[str]
) -> None:
    """Prints, as JSON, how a plan's later calls differ from first calls of other plans."""
    attend = import_module(f"msattn.kernels.{impl}.attend")

    def make_plan(columns: int = 6) -> msattn.Plan:
        table = torch.zeros(2, 12, dtype=torch.int32)
        lengths = [query_len] * 2
        batch = msattn.Batch.from_lists(lengths, lengths, table, max_seq_len=columns * 128)
        return msattn.make_plan(batch, CONFIG, kv_format)

    def run(plan: msattn.Plan, call: tuple[Any, ...]) -> tuple[list[Any], bool]:
        launched.clear()
        bound.clear()
        q, cache, ids, scale, out, lse = call
        attend.attend(q, cache, ids, plan, scale, 1.0, out, lse)
        return [describe(launch, (q, ids, out, lse, *pools(cache))) for launch in launched], bool(
            bound
        )

    plan, differences, names, again = make_plan(), [], [], []
    total = 0
    listed = list(calls(2 * query_len, kv_format))
    for i, (name, call) in enumerate(listed):
        expected, _ = run(make_plan(), call)
        got, was_bound = run(plan, call)
        total += len(got)
        if got != expected:
            differences.append(i)
        if name and was_bound:
            names.append(name)
        elif was_bound:
            again.append(i)
    kept = [len(plan._launches)]
    wider = torch.zeros(2, 12, dtype=torch.int32)
    plan.update(msattn.Batch.from_lists([query_len] * 2, [9 * 128] * 2, wider))
    got, was_bound = run(plan, listed[0][1])
    kept.append(len(plan._launches))
    report = {"differences": differences, "launches": total, "bound": names, "bound_again": again}
    report |= {"kept": kept}
    report["after_growth"] = was_bound and got == run(make_plan(9), listed[0][1])[0]
    print(json.dumps({"impl": impl, "query_len": query_len, "kv_format": kv_format, **report}))


def pools(cache: msattn.KVCache) -> list[torch.Tensor]:
    assert isinstance(cache.tensor, torch.Tensor)
    return [cache.tensor, cache.tensor.narrow(3, cache.tensor.shape[3] // 2, 1)]


def describe(launch: tuple[Any, ...], own: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launch with addresses by name; those of a plan, which no two share, by size."""
    names = {x.data_ptr(): i for i, x in enumerate(own) if x is not None}

    def value(x: Any) -> Any:
        if hasattr(x, "base"):  # a descriptor
            return x.shape, x.strides, x.block_shape, value(x.base)
        if not isinstance(x, torch.Tensor):
            return x
        return names.get(x.data_ptr(), ("plan", tuple(x.shape), x.dtype, x.data_ptr() % 16))

    key, grid, arguments = launch
    return key, grid, [value(x) for x in arguments]


def main() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from msattn.kernels.hopper import attend_decode
    from msattn.kernels.triton import launch

    class Hopper:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    launched: list[tuple[Any, ...]] = []
    bound: list[str] = []

    class Kernel(CompiledKernel):
        """Is launched as a compiled kernel is, down to its driver."""

        def __init__(self, key: str) -> None:
            self.key, self.name, self.src = key, key, None
            self.function, self.packed_metadata, self.module = 1, (), 1

        @property
        def run(self) -> Callable[..., None]:
            return lambda *arguments: launched.append((self.key, arguments[:3], arguments[9:]))

    def compile(kernel: Any, key: str, *_: Any) -> Kernel:
        return Kernel(f"{kernel.__name__} {key}")

    run = JITFunction.run

    def binder(kernel: Any, *arguments: Any, **options: Any) -> Any:
        bound.append(kernel.__name__)
        return run(kernel, *arguments, **options)

    JITFunction._do_compile, JITFunction.run = compile, binder
    driver.set_active(Hopper())
    msattn.arch.capability = launch.capability = lambda device: (9, 0)
    launch.num_processors = lambda device: 132
    attend_decode.pays = lambda *_: True
    for impl in IMPLS:
        for kv_format in FORMATS:
            for query_len in QUERY_LENS:
                compare(impl, query_len, kv_format, launched, bound)


if __name__ == "__main__":
    main()
