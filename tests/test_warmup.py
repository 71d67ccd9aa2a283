"""warmup() compiles all that any later step needs; counted on a CPU, where nothing is compiled.

The count runs in a process of its own, as ``python tests/test_warmup.py FORMAT``: kernels are
compiled ones there, whereas the tests may have the interpreter's. Triton is told that it has a
Hopper, and asked what it would compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

import msattn
from msattn.dispatch import TABLE, Implementation

SMALL = msattn.MSAConfig(4, 2, 2, topk=4)
STEPS = 200


class Recorder:
    """An implementation of every stage that writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.module = ModuleType("recording_kernels")
        for stage in TABLE:
            setattr(self.module, stage, self._record(stage))

    def _record(self, stage: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((stage, arguments))

    def of(self, stage: str) -> list[tuple[Any, ...]]:
        return [arguments for name, arguments in self.calls if name == stage]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "recording_kernels", recorder.module)
    row = Implementation("hopper", "recording_kernels", lambda problem: [])
    for stage, rows in TABLE.items():
        monkeypatch.setitem(TABLE, stage, (row, *rows))
    return recorder


def test_every_stage_of_a_layer_under_every_bound(recorder: Recorder) -> None:
    msattn.warmup(SMALL, "fp8", max_query_lens=(1, 5), index_dtype=torch.float16)
    layer = ["store_kv", "store_index_k", "index_select", "attend", "attend"]
    names = [name for name, _ in recorder.calls]
    assert names == layer * (len(names) // len(layer))
    plans = [arguments[2] for arguments in recorder.of("index_select")]
    steps = {(plan.max_query_len, plan.num_requests) for plan in plans}
    rows = (*(1 << i for i in range(12)), 384)
    assert steps == {(bound, count) for bound in (1, 5) for count in rows}
    assert {plan.kv_format.name for plan in plans} == {"fp8_e4m3"}
    assert {plan.num_blocks > plan.num_tokens for plan in plans} == {False, True}
    assert {index.format.name for _, index, *_ in recorder.of("index_select")} == {"fp16"}
    lses = [arguments[-1] is None for arguments in recorder.of("attend")]
    assert lses == [True, False] * (len(lses) // 2)


def test_dtypes_and_scales_are_those_asked_for(recorder: Recorder) -> None:
    factor, e4m3 = torch.tensor([0.5]), torch.float8_e4m3fn
    msattn.warmup(
        SMALL,
        "nvfp4",
        max_query_lens=[3],
        dtype=torch.float16,
        query_dtype=e4m3,
        index_query_dtype=torch.bfloat16,
        v_scale=factor,
        q_scale=factor,
    )
    q, cache, *_, q_scale, out, _ = recorder.of("attend")[0]
    assert (q.dtype, out.dtype, q_scale.data_ptr()) == (e4m3, torch.bfloat16, factor.data_ptr())
    assert (cache.k_scale, cache.v_scale.data_ptr()) == (1.0, factor.data_ptr())
    k, v, _, slots = recorder.of("store_kv")[0]
    assert (k.dtype, v.dtype, slots.dtype) == (torch.float16, torch.float16, torch.int64)
    assert recorder.of("store_index_k")[0][0].dtype == torch.float16
    assert recorder.of("index_select")[0][0].dtype == torch.bfloat16


def test_it_runs() -> None:
    """On the reference, which has nothing to compile."""
    assert msattn.warmup(SMALL, "bf16", max_query_lens=(2,), impl="reference") is None


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("kv_format", "impl", "index_keys"),
    [
        ("bf16", "triton", "alone"),
        ("nvfp4", "triton", "alone"),
        ("nvfp4", "auto", "alone"),
        ("bf16", "auto", "compact"),
    ],
)
def test_no_later_step_compiles_anything(kv_format: str, impl: str, index_keys: str) -> None:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, kv_format, impl, index_keys],
        env=clean,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["later"] == {}
    kernels = {
        "_store_kv_kernel",
        "_store_index_k_kernel",
        "_index_scores_kernel",
        "_attend_kernel",
    }
    if impl == "auto":
        kernels |= {"_union_kernel", "_attend_tiles_kernel", "_decode_kernel", "_scores_kernel"}
    if index_keys == "compact":
        kernels |= {"_bounds_kernel", "_threshold_kernel", "_rescore_kernel"}
    assert kernels <= set(report["warmup"]), "the count itself has come to nothing"


def later_step(random: Random, config: msattn.MSAConfig) -> tuple[msattn.Batch, int]:
    """Any lengths, any number of requests, any table; and the rows of the step's tensors."""
    bound = random.choice((1, 4, 8192))
    requests = random.choice((1, 2, 3, 5, 7, 16, 33, 100, 130, 257, 600))
    query_lens = [random.randint(0, min(bound, random.choice((1, 4, 90)))) for _ in range(requests)]
    query_lens[0] = random.randint(1, min(bound, 3000))
    blocks = random.choice((24, 25, 31, 100, 801, 2049, 8190)) if requests < 100 else 25
    batch = msattn.Batch.from_lists(
        query_lens,
        [random.randint(count, blocks * 128) for count in query_lens],
        torch.zeros(requests, blocks + random.choice((0, 1)), dtype=torch.int32),
        max_query_len=bound,
        max_seq_len=blocks * 128,
    )
    return batch, sum(query_lens) + random.choice((0, 0, 3))


def reserve(*shape: Any, **options: Any) -> torch.Tensor:
    """In place of torch.zeros: nobody reads large tensors here, and to clear them takes longest."""
    tensor = torch.empty(*shape, **options)
    is_large = tensor.nbytes > 1 << 20 and tensor.dtype not in (torch.int32, torch.int64)
    return tensor if is_large else tensor.zero_()


def count(kv_format: str, impl: str, index_keys: str) -> dict[str, dict[str, int]]:
    """Compilations by kernel: of the warm-up, and of many steps after it."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled: dict[tuple[str, str], None] = {}

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        compiled.setdefault((fn.name.split(".")[-1], key))
        return True  # neither compile nor launch

    driver.set_active(Hopper())
    knobs.runtime.jit_cache_hook = hook
    msattn.arch.capability = lambda device: (9, 0)
    from msattn.kernels.hopper import support
    from msattn.kernels.triton import launch

    support._device_reasons = lambda *_: []
    launch.capability = lambda device: (9, 0)
    launch.num_processors = lambda device: 132
    import_module("msattn.kernels.hopper.attend")
    import_module("msattn.kernels.hopper.indexer")
    from msattn.kernels.triton import attend, indexer, selection, store  # noqa: F401

    os.environ["TRITON_INTERPRET"] = "1"  # a CPU will do
    torch.zeros = reserve

    def by_kernel(keys: list[tuple[str, str]]) -> dict[str, int]:
        names = [name for name, _ in keys]
        return {name: names.count(name) for name in sorted(set(names))}

    config, random, compact = msattn.MSAConfig(), Random(0), index_keys == "compact"
    msattn.warmup(config, kv_format, device="cpu", compact_keys=compact, impl=impl)
    first = list(compiled)
    cache, index = (
        msattn.KVCache.allocate(9, config, kv_format),
        msattn.IndexCache.allocate(9, config, compact=compact),
    )
    for step in range(STEPS):
        batch, rows = later_step(random, config)
        plan = msattn.make_plan(batch, config, kv_format)
        q = torch.zeros(rows, config.num_q_heads, 128, dtype=torch.bfloat16)
        kv = torch.zeros(rows, config.num_kv_heads, 128, dtype=torch.bfloat16)
        msattn.sparse_attention(
            q,
            kv,
            kv,
            kv,
            kv[:, 0],
            cache,
            index,
            plan,
            torch.full((rows,), -1),
            return_lse=step % 2 == 0,
            impl=impl,
        )
    return {"warmup": by_kernel(first), "later": by_kernel(list(compiled)[len(first) :])}


if __name__ == "__main__":
    print(json.dumps(count(*sys.argv[1:])))
