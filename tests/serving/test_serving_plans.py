"""Decode plans: kept by shape, refreshed in place, bounded, never taken from a graph."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_steps import check_step, make_builder, make_step

import msattn
from msattn import env
from msattn.kv_format import KV_FORMATS
from msattn.serving import TENSOR_CORE_MSA, TRITON_MSA, DecodePlanCache
from msattn.testing.cases import Case
from msattn.testing.make import make

CONFIG = msattn.MSAConfig(4, 2, 2, topk=4)


def make_cache(capacity: int = 64) -> DecodePlanCache:
    return DecodePlanCache(CONFIG, KV_FORMATS["bf16"], 1024, capacity)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(rows: int, columns: int = 8) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)


def test_a_shape_keeps_its_memory() -> None:
    cache = make_cache()
    planned = cache.prepare(lengths(1, 2), table(2), 1)
    addresses = [x.data_ptr() for x in planned.plan.tensors]
    again = cache.prepare(lengths(1000, 0), table(2) + 50, 1)
    assert again is planned and len(cache) == 1
    assert [x.data_ptr() for x in again.plan.tensors] == addresses
    assert again.plan.seq_lens.tolist() == [1000, 0]
    assert torch.equal(again.plan.page_table, table(2) + 50)
    assert again.plan.max_seq_len == 1024  # what a captured graph has to hold for


def test_tables_may_have_any_strides() -> None:
    cache = make_cache()
    cache.prepare(lengths(1, 2), table(2), 1)
    wide = table(2, 24).T.contiguous().T[:, 3:11]
    planned = cache.prepare(lengths(3, 4, 5, 6)[::2], wide, 1)
    assert planned.plan.seq_lens.tolist() == [3, 5]
    assert torch.equal(planned.plan.page_table, wide)


@pytest.mark.parametrize(("rows", "query_len", "columns"), [(3, 1, 8), (2, 2, 8), (2, 1, 7)])
def test_another_shape_has_another_plan(rows: int, query_len: int, columns: int) -> None:
    cache = make_cache()
    first = cache.prepare(lengths(5, 6), table(2), 1)
    other = cache.prepare(lengths(*[9] * rows), table(rows, columns), query_len)
    assert other is not first and len(cache) == 2
    assert other.plan.cu_seqlens_q.tolist() == [query_len * r for r in range(rows + 1)]


def test_the_plan_asked_for_least_recently_goes_first() -> None:
    cache = make_cache(capacity=2)
    first, second = (cache.prepare(lengths(*[1] * n), table(n), 1) for n in (1, 2))
    assert cache.prepare(lengths(7), table(1), 1) is first
    cache.prepare(lengths(1, 1, 1), table(3), 1)
    assert len(cache) == 2
    assert cache.prepare(lengths(7), table(1), 1) is first
    assert cache.prepare(lengths(1, 1), table(2), 1) is not second


def test_a_graph_s_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(capacity=1)
    captured = cache.prepare(lengths(1), table(1), 1)
    monkeypatch.setattr("msattn.serving.decode_plans.is_capturing", lambda device: True)
    assert captured.use() is captured.plan
    monkeypatch.undo()
    for rows in (2, 3, 4):
        cache.prepare(lengths(*[1] * rows), table(rows), 1).use()
    assert (len(cache), cache.num_pinned) == (2, 1)
    assert cache.prepare(lengths(9), table(1), 1) is captured


def test_the_size_is_visible() -> None:
    cache = make_cache()
    assert cache.nbytes == 0
    plan = cache.prepare(lengths(1, 2), table(2), 1).plan
    assert cache.nbytes == 4 * (3 + 2 + 16)
    plan.workspace("some", (10,), torch.float32)
    plan.tiles(1)
    assert cache.nbytes == 4 * (3 + 2 + 16 + 10 + 2 * 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((lengths(1).long(), table(1), 1), TypeError, "seq_lens: expected dtype torch.int32"),
        ((lengths(1), table(1).long(), 1), TypeError, "page_table: expected dtype torch.int32"),
        ((lengths(1), table(2), 1), ValueError, r"page_table: expected shape \[D=1, B\]"),
        ((lengths(1), table(1), 0), ValueError, "decode_query_len: expected an int >= 1"),
    ],
)
def test_errors(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_cache().prepare(*arguments)  # type: ignore[arg-type]


def test_a_builder_s_steps_share_a_plan() -> None:
    """The second step's lengths and pages are what is computed, in the first one's memory."""
    case = Case("decode", (2, 2, 2), (900, 131, 2), CONFIG)
    first = make(case)
    builder = make_builder(first, max_query_len=2)
    decode = builder.build(make_step(first)).decode
    check_step(first, builder.build(make_step(first)))
    second = make(Case("later", (2, 2, 2), (130, 0, 1000), CONFIG), seed=1)
    metadata = builder.build(make_step(second))
    assert decode is not None and metadata.decode is not None
    assert metadata.decode.planned is decode.planned
    check_step(second, metadata)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"min_batch": 4}, True),
        ({"min_batch": 5}, False),
        ({"backend": TENSOR_CORE_MSA}, True),
        ({"backend": TRITON_MSA}, False),
    ],
)
def test_which_decode_is_planned(
    options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make(Case("decode", (1,) * 4, (9,) * 4, CONFIG))
    builder = make_builder(inputs, **options)
    metadata = builder.build(make_step(inputs))
    impl = msattn.serving.SparseImpl(CONFIG, "bf16")
    assert impl.should_use_tensor_core_decode(metadata) is expected
    assert not impl.should_use_tensor_core_decode(None)
    # The Triton decode is a GPU's; what serves a CPU serves each of its decodes.
    assert impl.decode_impl(metadata) == "auto"
    on_a_gpu: Any = SimpleNamespace(decode=metadata.decode, seq_lens=SimpleNamespace(is_cuda=True))
    assert impl.decode_impl(on_a_gpu) == ("auto" if expected else "triton")
    assert (
        msattn.serving.SparseImpl(CONFIG, "bf16", impl="hopper").decode_impl(on_a_gpu) == "hopper"
    )
    monkeypatch.setattr(env, "IMPL", "reference")
    assert impl.decode_impl(on_a_gpu) == "auto"


@pytest.mark.parametrize("options", [{"min_batch": 5}, {"backend": TRITON_MSA}])
def test_a_cpu_serves_the_triton_decode_too(options: dict[str, Any]) -> None:
    inputs = make(Case("decode", (1,) * 4, (300,) * 4, CONFIG))
    check_step(inputs, make_builder(inputs, **options).build(make_step(inputs)))


def test_the_impl_s_backend_decides_too() -> None:
    inputs = make(Case("decode", (1,) * 4, (9,) * 4, CONFIG))
    metadata = make_builder(inputs).build(make_step(inputs))
    for backend, expected in ((TENSOR_CORE_MSA, True), (TRITON_MSA, False)):
        impl = msattn.serving.SparseImpl(CONFIG, "bf16", backend=backend)
        assert impl.should_use_tensor_core_decode(metadata) is expected


def test_the_smallest_batch_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(Case("decode", (1,), (9,), CONFIG))
    monkeypatch.setenv("MSATTN_DECODE_MIN_BATCH", "2")
    assert not make_builder(inputs).should_use_tensor_core(1)
    assert make_builder(inputs, min_batch=1).should_use_tensor_core(1)  # the argument goes first
    monkeypatch.delenv("MSATTN_DECODE_MIN_BATCH")
    assert make_builder(inputs).min_batch == 1
    monkeypatch.setenv("MSATTN_DECODE_MIN_BATCH", "two")
    with pytest.raises(ValueError, match="MSATTN_DECODE_MIN_BATCH: expected an int >= 0"):
        make_builder(inputs)


def test_an_engine_s_own_variable_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSATTN_DECODE_MIN_BATCH", "two")
    monkeypatch.setenv("ENGINE_MIN_BATCH", "3")
    assert env.decode_min_batch("ENGINE_MIN_BATCH") == 3
    monkeypatch.setenv("MSATTN_DECODE_MIN_BATCH", "2")
    assert env.decode_min_batch("ENGINE_MAX_BATCH") == 2


def test_a_wrong_number_in_the_environment_does_not_break_the_import() -> None:
    environment = {**os.environ, "MSATTN_DECODE_MIN_BATCH": "two"}
    code = "import msattn, msattn.serving"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


LENGTHS = {
    "beyond_the_table": ((300, 5), table(2, 2), "page_table: expected at least 3 columns"),
    "beyond_the_bound": ((5, 1025), table(2, 9), "seq_lens: expected at most max_seq_len=1024"),
    "negative": ((5, -3), table(2), "seq_lens: expected lengths >= 0"),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_lengths_are_checked_for_every_step(name: str, known: bool) -> None:
    """Of a shape that has a plan as of one that has none."""
    wrong, pages, message = LENGTHS[name]
    cache = make_cache()
    if known:
        plan = cache.prepare(lengths(6, 7), pages, 1).plan
    with pytest.raises(ValueError, match=message):
        cache.prepare(lengths(*wrong), pages, 1)
    assert len(cache) == known
    if known:
        assert plan.seq_lens.tolist() == [6, 7]
