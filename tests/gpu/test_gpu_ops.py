"""Operators, compiled layers and the warm-up on the device."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from gpu_layer import DEVICE, IMPL, capture, pools, run_layer

import msattn
from msattn.testing.cases import CASES, LAYOUTS, make_config
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import Inputs, make

pytestmark = pytest.mark.gpu

CONFIG = make_config(group=16, kv_heads=2, topk=8)


def layer(x: Inputs, plan: msattn.Plan) -> list[torch.Tensor]:
    """A layer of operators between others."""
    from msattn import ops

    ops.store_kv(x.k * 1, x.v * 1, x.cache, x.slot_mapping)
    ops.store_index_k(x.index_k, x.index, x.slot_mapping)
    ids = ops.index_select(x.index_q, x.index, plan)
    return [ids, *ops.attend(x.q, x.cache, ids, plan)]


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_a_compiled_layer(kv_format: str, seed: int) -> None:
    import msattn.ops  # noqa: F401

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for step, name in enumerate(("mixed", "prefill_short", "decode_edges")):
        one, other = (
            make(
                CASES[name],
                seed=seed + step,
                kv_format=kv_format,
                layout=LAYOUTS["layers"],
                device=DEVICE,
            )
            for _ in range(2)
        )
        for x in (one, other):
            x.forget_step()
        tokens = one.case.num_tokens
        expected = run_layer(other, other.plan(), impl="auto")
        for a, b in zip(compiled(one, one.plan()), expected, strict=True):
            assert_bitwise_equal(name, a[:tokens], b[:tokens])
        for a, b in zip(pools(one), pools(other), strict=True):
            assert_bitwise_equal("pool", a, b)


def test_operators_in_a_graph(seed: int) -> None:
    x = make(CASES["mixed"], seed=seed, device=DEVICE)
    plan, results = x.plan(), []
    want = run_layer(x, plan, impl="auto")

    def step() -> None:
        results[:] = layer(x, plan)

    replay = capture(step)
    replay()
    for a, b in zip(results, want, strict=True):
        assert_bitwise_equal("replayed", a[: x.case.num_tokens], b[: x.case.num_tokens])


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled, or taken from Triton's cache on disk."""
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def hook(*, fn: object, **_: object) -> None:
        names.append(str(fn))

    knobs.runtime.jit_post_compile_hook = hook
    yield names
    knobs.runtime.jit_post_compile_hook = before


@pytest.mark.timeout(600)
def test_no_compilation_after_the_warm_up(compilations: list[str]) -> None:
    msattn.warmup(CONFIG, "bf16", device=DEVICE, max_query_lens=(1, 300), impl=IMPL)
    torch.cuda.synchronize()
    assert compilations
    compilations.clear()
    random = Random(0)
    cache = msattn.KVCache.allocate(9, CONFIG, "bf16", device=DEVICE)
    index = msattn.IndexCache.allocate(9, CONFIG, device=DEVICE)
    for _ in range(60):
        bound = random.choice((1, 300))
        requests = random.choice((1, 2, 3, 5, 7, 16, 33, 130, 300))
        counts = [random.randint(0, min(bound, 20)) for _ in range(requests)]
        counts[0] = random.randint(1, bound)
        blocks = random.choice((3, 4, 31, 100, 3001)) if requests < 100 else 25
        batch = msattn.Batch.from_lists(
            counts,
            [random.randint(count, blocks * 128) for count in counts],
            torch.zeros(requests, blocks + random.choice((0, 1)), dtype=torch.int32),
            max_query_len=bound,
            max_seq_len=blocks * 128,
            device=DEVICE,
        )
        rows = sum(counts) + random.choice((0, 3))
        q = torch.zeros(rows, CONFIG.num_q_heads, 128, dtype=torch.bfloat16, device=DEVICE)
        kv = torch.zeros(rows, CONFIG.num_kv_heads, 128, dtype=torch.bfloat16, device=DEVICE)
        plan = msattn.make_plan(batch, CONFIG, "bf16")
        slots = torch.full((rows,), -1, device=DEVICE)
        msattn.sparse_attention(
            q, kv, kv, kv, kv[:, 0], cache, index, plan, slots, return_lse=True, impl=IMPL
        )
    torch.cuda.synchronize()
    assert compilations == []
