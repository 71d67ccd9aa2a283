"""A whole layer: store, select, attend, in one call."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import msattn
from msattn.dispatch import TABLE
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config, scale_kinds_of
from msattn.testing.compare import (
    assert_bitwise_equal,
    assert_close,
    assert_lse,
    expected_attention,
    expected_block_ids,
)
from msattn.testing.make import Inputs, make

CASE_LIST = list(CASES.values())
FORMATS = list(msattn.KV_FORMATS.values())
LSE_BOUND = 5e-5


def pools(inputs: Inputs) -> list[torch.Tensor]:
    """Copies of the bytes of both caches."""
    return [x.tensor.contiguous().view(torch.uint8).clone() for x in (inputs.cache, inputs.index)]


def layer(inputs: Inputs, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE of the layer, from caches that hold the earlier positions only."""
    inputs.forget_step()
    return call(inputs, return_lse=True, **options)


def call(inputs: Inputs, **options: object) -> object:
    return msattn.sparse_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.index_q,
        inputs.index_k,
        inputs.cache,
        inputs.index,
        inputs.plan(),
        inputs.slot_mapping,
        **options,
    )


def check(inputs: Inputs, **options: object) -> None:
    """The layer equals the oracle's selection and attention over the whole history."""
    truth, truth_lse = expected_attention(inputs, expected_block_ids(inputs))
    out, lse = layer(inputs, q_scale=inputs.q_scale, **options)
    tokens = inputs.case.num_tokens
    assert_close("out", out[:tokens], truth)
    assert_lse("lse", lse[:tokens], truth_lse, bound=LSE_BOUND)


@pytest.mark.parametrize("case", CASE_LIST, ids=str)
def test_layer_is_the_oracles(case: Case, seed: int) -> None:
    """The step's own slots are NaN before the call; everything else that is unused stays NaN."""
    check(make(case, seed=seed, integer_index=False))


@pytest.mark.parametrize(
    ("fmt", "scales"),
    [(f, s) for f in FORMATS for s in scale_kinds_of(f) if s in ("unit", "slice", "slots")],
    ids=str,
)
def test_formats_and_scales(fmt: msattn.KVFormat, scales: str, seed: int) -> None:
    """Prefix part and new part in one prefill, with scales: all keys are read as they were meant.

    The index cache is fp8 next to fp8 keys, bf16 elsewhere.
    """
    case = Case("prefix", (1, 40, 30), (700, 230, 30), make_config(topk=3))
    index_format = "fp8_e4m3" if fmt.is_fp8 else "bf16"
    inputs = make(case, seed=seed, kv_format=fmt, scales=scales, index_format=index_format)
    check(inputs)


def test_all_strided(seed: int) -> None:
    inputs = make(CASES["mixed"], seed=seed, layout=LAYOUTS["all_strided"])
    check(inputs, out=inputs.new_out())


def test_it_is_the_stages_in_order(seed: int) -> None:
    by_stages = make(CASES["mixed"], seed=seed)
    plan = by_stages.plan()
    by_stages.forget_step()
    msattn.store_kv(by_stages.k, by_stages.v, by_stages.cache, by_stages.slot_mapping)
    msattn.store_index_k(by_stages.index_k, by_stages.index, by_stages.slot_mapping)
    ids = msattn.index_select(by_stages.index_q, by_stages.index, plan)
    want, want_lse = msattn.attend(
        by_stages.q, by_stages.cache, ids, plan, softmax_scale=0.11, return_lse=True
    )
    for impl in ("auto", "reference"):
        out, lse = layer(make(CASES["mixed"], seed=seed), softmax_scale=0.11, impl=impl)
        assert_bitwise_equal("out", out, want)
        assert_bitwise_equal("lse", lse, want_lse)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("out", torch.empty(1, dtype=torch.bfloat16), "out: expected shape"),
        ("out", torch.empty(1), "out: expected dtype"),
        ("softmax_scale", math.nan, "softmax_scale: "),
        ("q_scale", 2.0, "q_scale: "),
        ("index_plan", "plan", "plan: "),
        ("index_slot_mapping", torch.full((64,), 1 << 40), "slot_mapping: expected slots below"),
    ],
    ids=["shape of out", "dtype of out", "softmax_scale", "q_scale", "index_plan", "index slots"],
)
def test_nothing_is_written_where_one_argument_is_wrong(
    option: str, value: object, message: str
) -> None:
    """Whichever stage it is an argument of."""
    inputs = make(CASES["mixed"])
    inputs.forget_step()
    before = pools(inputs)
    with pytest.raises((TypeError, ValueError), match=message):
        call(inputs, **{option: value})
    for old, new in zip(before, pools(inputs), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("stage", ["store_index_k", "index_select", "attend"])
def test_nothing_is_written_where_one_stage_cannot_be_served(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages before it could be."""
    inputs = make(CASES["mixed"])
    inputs.forget_step()
    refusing = dataclasses.replace(TABLE[stage][-1], why_not=lambda problem: ["it is Sunday"])
    monkeypatch.setitem(TABLE, stage, (refusing,))
    before = pools(inputs)
    with pytest.raises(NotImplementedError, match=f"cannot serve {stage}: .*it is Sunday"):
        call(inputs, impl="reference")
    for old, new in zip(before, pools(inputs), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_only_the_steps_slots_are_written(kv_format: str, seed: int) -> None:
    """Table columns behind a request's length name pages of others: those stay untouched."""
    inputs = make(CASES["mixed"], seed=seed, kv_format=kv_format)
    inputs.forget_step()
    pools = inputs.cache.tensor.view(torch.uint8), inputs.index.tensor.view(torch.uint8)
    before = [pool.clone() for pool in pools]
    plan = inputs.plan()
    msattn.sparse_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.index_q,
        inputs.index_k,
        inputs.cache,
        inputs.index,
        plan,
        torch.full_like(inputs.slot_mapping, -1),
    )
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool, old)
    out, _ = layer(inputs)
    assert out[: inputs.case.num_tokens].isfinite().all()
    slots = inputs.slot_mapping[inputs.slot_mapping >= 0]
    written = set((slots // 128).tolist())
    for pool, old in zip(pools, before, strict=True):
        changed = (pool != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) == written


def test_index_cache_with_pages_of_its_own(seed: int) -> None:
    """Another page table and slot mapping for the index keys than for K and V."""
    inputs = make(CASES["mixed"], seed=seed, page_seed=1)
    other = make(CASES["mixed"], seed=seed, page_seed=2)
    assert not torch.equal(inputs.slot_mapping, other.slot_mapping)
    truth, _ = expected_attention(inputs, expected_block_ids(inputs))
    inputs.forget_step()
    other.forget_step()
    out = msattn.sparse_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.index_q,
        inputs.index_k,
        inputs.cache,
        other.index,
        inputs.plan(),
        inputs.slot_mapping,
        index_plan=other.plan(),
        index_slot_mapping=other.slot_mapping,
    )
    assert_close("out", out[: inputs.case.num_tokens], truth)


@pytest.mark.parametrize("cuts", [(190,), (128,), (1, 127, 128, 129, 640), tuple(range(620, 660))])
def test_a_prompt_in_chunks_equals_one_shot(cuts: tuple[int, ...], seed: int) -> None:
    """Prefixes that end inside a block, and decode steps, over more than topk blocks."""
    length = 660
    whole = make(
        Case("whole", (length,), (length,), make_config(group=1, kv_heads=2, topk=3)),
        seed=seed,
        query_dtype=torch.float32,
        kv_format="fp32",
        integer_index=False,
    )
    want, want_lse = layer(whole)
    whole.forget_step()
    for start, end in zip((0, *cuts), (*cuts, length), strict=True):
        batch = msattn.Batch.from_lists([end - start], [end], whole.batch.page_table)
        part = slice(start, end)
        out, lse = msattn.sparse_attention(
            whole.q[part],
            whole.k[part],
            whole.v[part],
            whole.index_q[part],
            whole.index_k[part],
            whole.cache,
            whole.index,
            msattn.make_plan(batch, whole.config, "fp32"),
            whole.slot_mapping[part],
            return_lse=True,
        )
        assert_close("out", out, want[part])
        assert_lse("lse", lse, want_lse[part], bound=LSE_BOUND)


def test_a_reused_page_serves_its_new_owner(seed: int) -> None:
    """Another request's step on pages that are full of old keys gives what fresh pages give."""
    case = Case("reuse", (200,), (200,), make_config())
    old, new = make(case, seed=seed), make(case, seed=seed + 1, page_seed=seed)
    assert torch.equal(old.slot_mapping, new.slot_mapping)
    want, _ = layer(new)
    out = msattn.sparse_attention(
        new.q,
        new.k,
        new.v,
        new.index_q,
        new.index_k,
        old.cache,
        old.index,
        old.plan(),
        old.slot_mapping,
    )
    assert_bitwise_equal("out", out, want)
