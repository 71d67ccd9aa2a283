"""The stages as operators of torch: schemas, fakes, compiled layers, FLOPs, profiles."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import pytest
import torch

import msattn
from msattn.plan import find_plan
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import Inputs, make

NAMES = ["store_kv", "store_index_k", "index_select", "attend", "attend_out"]
KINDS = {
    "bf16": {},
    "nvfp4 of interleaved layers": {"kv_format": "nvfp4", "layout": LAYOUTS["layers"]},
    "e4m3 pair, scales by slot": {
        "kv_format": "fp8",
        "layout": LAYOUTS["pair"],
        "scales": "slots",
        "index_format": "fp8",
    },
    "compact keys": {"compact": True},
    "e4m3 query, float scales": {"query_dtype": torch.float8_e4m3fn, "scales": "float"},
}


@pytest.fixture
def ops() -> ModuleType:
    """Imported late: FLOP formulas bring Triton, which tests of the interpreter import first."""
    import msattn.ops

    return msattn.ops


def layer(ops: ModuleType, x: Inputs, plan: msattn.Plan) -> list[torch.Tensor]:
    """A layer between other operators, as in a model; index queries in a dtype of their own."""
    k, v = x.k * 1, x.v * 1
    ops.store_kv(k, v, x.cache, x.slot_mapping)
    ops.store_index_k(x.index_k, x.index, x.slot_mapping)
    block_ids = ops.index_select(x.index_q, x.index, plan)
    out, lse = ops.attend(x.q, x.cache, block_ids, plan, q_scale=x.q_scale)
    return [block_ids, out, lse]


def eager(x: Inputs) -> list[torch.Tensor]:
    plan = x.plan()
    msattn.store_kv(x.k, x.v, x.cache, x.slot_mapping)
    msattn.store_index_k(x.index_k, x.index, x.slot_mapping)
    block_ids = msattn.index_select(x.index_q, x.index, plan)
    out, lse = msattn.attend(x.q, x.cache, block_ids, plan, q_scale=x.q_scale, return_lse=True)
    return [block_ids, out, lse]


def pool_bytes(x: Inputs) -> list[torch.Tensor]:
    pools = [x.index.tensor]
    pools += [] if x.index.compact is None else [x.index.compact.tensor]
    pools += x.cache.tensor if isinstance(x.cache.tensor, tuple) else [x.cache.tensor]
    return [pool.contiguous().view(torch.uint8) for pool in pools]


def operator_arguments(ops: ModuleType, name: str, x: Inputs, plan: msattn.Plan) -> tuple[Any, ...]:
    pool, *form = ops._cache_arguments(x.cache)
    of_plan = ops._plan_arguments(plan)
    ids = torch.zeros(x.q.shape[0], x.config.num_kv_heads, 4, dtype=torch.int32)
    attend = (x.q, pool, *form, ids, *of_plan)
    out, lse = x.new_out().zero_(), torch.zeros(x.q.shape[:2])
    return {
        "store_kv": (x.k, x.v, pool, *form, x.slot_mapping),
        "store_index_k": (
            x.index_k,
            x.index.tensor,
            x.index.format.name,
            x.slot_mapping,
            ops._compact_pool(x.index),
        ),
        "index_select": (
            x.index_q,
            x.index.tensor,
            x.index.format.name,
            *of_plan,
            4,
            0,
            1,
            ops._compact_pool(x.index),
        ),
        "attend": (*attend, None, x.q_scale),
        "attend_out": (*attend, out, lse, 0.1, x.q_scale),
    }[name]


@pytest.mark.parametrize(
    ("name", "compact"),
    [*((name, False) for name in NAMES), ("store_index_k", True), ("index_select", True)],
)
def test_opcheck(ops: ModuleType, name: str, compact: bool, seed: int) -> None:
    """Schema and mutations, fakes, autograd, dynamic shapes; no NaN, as outputs are compared."""
    x = make(Case("small", (2, 3), (300, 140), make_config()), seed=seed, compact=compact)
    x.fill_unowned(0.0)
    checks = torch.library.opcheck(
        getattr(torch.ops.msattn, name), operator_arguments(ops, name, x, x.plan())
    )
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_the_stages(ops: ModuleType, kind: str, seed: int) -> None:
    one, other = (make(CASES["mixed"], seed=seed, **KINDS[kind]) for _ in range(2))
    for x in (one, other):
        x.forget_step()
    tokens = one.case.num_tokens
    for got, want in zip(layer(ops, one, one.plan()), eager(other), strict=True):
        assert_bitwise_equal("operators", got[:tokens], want[:tokens])
    for got, want in zip(pool_bytes(one), pool_bytes(other), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("lse", [False, True])
def test_attend_into_memory_of_the_caller(ops: ModuleType, lse: bool, seed: int) -> None:
    x = make(CASES["mixed"], seed=seed, layout=LAYOUTS["all_strided"])
    plan, tokens = x.plan(), x.case.num_tokens
    ids = msattn.index_select(x.index_q, x.index, plan)
    want, want_lse = msattn.attend(x.q, x.cache, ids, plan, return_lse=True)
    out, got_lse = x.new_out(), torch.full(x.q.shape[:2], 7.0)
    lse_out = got_lse if lse else None
    assert ops.attend_out(x.q, x.cache, ids, plan, out=out, lse_out=lse_out) is None
    assert_bitwise_equal("out", out[:tokens], want[:tokens])
    assert_bitwise_equal(
        "lse",
        got_lse[:tokens],
        want_lse[:tokens] if lse else torch.full_like(want_lse, 7.0)[:tokens],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_the_eager_one(ops: ModuleType, kind: str, seed: int) -> None:
    """In one graph, pools written in place, at lengths that it was not compiled for too."""
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for step, name in enumerate(("mixed", "prefill_short", "decode_edges")):
        one, other = (make(CASES[name], seed=seed + step, **KINDS[kind]) for _ in range(2))
        for x in (one, other):
            x.forget_step()
        tokens = one.case.num_tokens
        for got, want in zip(compiled(ops, one, one.plan()), eager(other), strict=True):
            assert_bitwise_equal(name, got[:tokens], want[:tokens])
        for got, want in zip(pool_bytes(one), pool_bytes(other), strict=True):
            assert torch.equal(got, want)


def test_a_compiled_function_copies_no_pool(ops: ModuleType) -> None:
    """Its operators get the pools themselves, and a plan's own tensors."""
    torch.compiler.reset()
    x = make(CASES["mixed"], layout=LAYOUTS["layers"])
    plan, seen = x.plan(), []

    def spy(function: Any) -> Any:
        def spied(*arguments: Any, **options: Any) -> Any:
            cache = next(a for a in arguments if isinstance(a, msattn.KVCache))
            seen.append((cache.tensor.data_ptr(), [a for a in arguments if a is plan]))
            return function(*arguments, **options)

        return spied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "store_kv_stage", spy(ops.store_kv_stage))
        patch.setattr(ops, "attend_stage", spy(ops.attend_stage))
        torch.compile(layer, fullgraph=True)(ops, x, plan)
    at = x.cache.tensor.data_ptr()
    assert seen == [(at, []), (at, [plan])]


def test_a_plan_is_found_by_its_tensors_while_it_lives() -> None:
    x = make(CASES["mixed"])
    plan, other = x.plan(), x.plan()
    assert find_plan(*plan.tensors) is plan and find_plan(*other.tensors) is other
    assert find_plan(plan.cu_seqlens_q, plan.seq_lens, plan.page_table[:, :1]) is None
    assert find_plan(plan.cu_seqlens_q, other.seq_lens, plan.page_table) is None
    assert find_plan(*(tensor.clone() for tensor in plan.tensors)) is None
    tensors = other.tensors
    del other
    gc.collect()
    assert find_plan(*tensors) is None


def test_tensors_of_no_plan(ops: ModuleType, seed: int) -> None:
    """Copies, as a graph with inputs of its own makes them; spare rows included."""
    x = make(CASES["mixed"], seed=seed)
    plan, tokens = x.plan(), x.case.num_tokens
    ids = msattn.index_select(x.index_q, x.index, plan)
    out, lse = msattn.attend(x.q, x.cache, ids, plan, return_lse=True)
    copies = [tensor.clone() for tensor in plan.tensors]
    bounds = (plan.max_query_len, plan.max_seq_len)
    got_ids = torch.ops.msattn.index_select(
        x.index_q, x.index.tensor, "bf16", *copies, *bounds, x.config.topk, 0, 1
    )
    got = torch.ops.msattn.attend(
        x.q, [x.cache.tensor], "bf16", None, None, ids, *copies, *bounds, None, None
    )
    for name, a, b in zip(("ids", "out", "lse"), (got_ids, *got), (ids, out, lse), strict=True):
        assert_bitwise_equal(name, a[:tokens], b[:tokens])


def test_flops(ops: ModuleType) -> None:
    """4 D for a query head and key of the topk blocks, 2 Di for an index head and any key."""
    from torch.utils.flop_counter import FlopCounterMode

    x = make(Case("long", (2, 3), (900, 140), make_config(group=3, kv_heads=2, topk=4)))
    with FlopCounterMode(display=False) as counter:
        layer(ops, x, x.plan())
    counts = counter.get_flop_counts()["Global"]
    by_name = {str(name): count for name, count in counts.items()}
    assert by_name == {
        "msattn.index_select": 2 * 5 * 2 * 128 * 900,
        "msattn.attend": 4 * 5 * 6 * 128 * 4 * 128,
    }
    short = make(Case("short", (2, 3), (200, 140), make_config(group=3, kv_heads=2, topk=4)))
    ids = torch.zeros(5, 2, 4, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        ops.attend_out(short.q, short.cache, ids, short.plan(), out=short.new_out())
    assert counter.get_total_flops() == 4 * 5 * 6 * 128 * 200


def test_the_profiler_shows_the_operators(ops: ModuleType) -> None:
    x = make(CASES["decode_edges"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(ops, x, x.plan())
    shown = {event.key for event in profile.key_averages() if event.key.startswith("msattn::")}
    assert shown == {f"msattn::{name}" for name in NAMES[:-1]}


def test_what_a_trace_refuses(ops: ModuleType) -> None:
    """Shapes are known before anything runs."""
    x = make(CASES["decode_edges"])
    plan = x.plan()
    ids = torch.zeros(len(x.q) + 1, 2, 4, dtype=torch.int32)
    compiled = torch.compile(lambda: ops.attend(x.q, x.cache, ids, plan), fullgraph=True)
    with pytest.raises(Exception, match="block_ids: expected as many rows as q"):
        compiled()


def test_a_gradient_is_refused_not_lost(ops: ModuleType) -> None:
    x = make(CASES["decode_edges"])
    plan = x.plan()
    ids = msattn.index_select(x.index_q, x.index, plan)
    out, _ = ops.attend(x.q.requires_grad_(), x.cache, ids, plan)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.sum().backward()
