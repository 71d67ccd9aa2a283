"""Hopper's block scores: the oracle's bits on hostile steps, and the twin's on large ones."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_layer import DEVICE, capture

import msattn
from msattn.kernels.triton import indexer as twin
from msattn.testing.cases import CASES, LAYOUTS, M3, Case, make_config
from msattn.testing.compare import (
    assert_bitwise_equal,
    assert_same_ids,
    expected_block_ids,
    expected_scores,
)
from msattn.testing.make import GARBAGE, Inputs, head_major, make, poisoned

pytestmark = pytest.mark.gpu

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
MIXED = Case("mixed", (70, 1, 0, 9, 133), (400, 391, 40, 9, 831), make_config(1, 4), spare_rows=2)


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    reasons = msattn.why_not("index_scores", impl="hopper", device=DEVICE)
    if reasons:
        pytest.skip(reasons[0])


def scores_of(inputs: Inputs, constants: object = None) -> torch.Tensor:
    """The kernels themselves: the choice refuses steps of few query tokens."""
    from msattn.kernels.hopper.indexer import index_scores

    shape = (inputs.config.num_index_heads, inputs.case.num_rows, inputs.plan().num_blocks)
    out = poisoned(shape, torch.float32, inputs.q.device)
    if out.numel():
        index_scores(inputs.index_q, inputs.index, inputs.plan(), out, constants=constants)
    return out


def selection_of(inputs: Inputs) -> torch.Tensor:
    from msattn.kernels.hopper.indexer import index_select

    shape = (inputs.case.num_rows, inputs.config.num_kv_heads, inputs.config.topk)
    out = head_major(torch.full(shape, GARBAGE, dtype=torch.int32, device=DEVICE))
    if out.numel():
        index_select(inputs.index_q, inputs.index, inputs.plan(), out)
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_every_case(case: Case, seed: int) -> None:
    inputs = make(case, seed=seed, device=DEVICE)
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), expected_scores(inputs))
    assert_same_ids("block_ids", selection_of(inputs), expected_block_ids(inputs))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("query", ["model", "e4m3"])
def test_formats_and_queries(fmt: str, query: str, seed: int) -> None:
    dtype = torch.float8_e4m3fn if query == "e4m3" else FORMATS[fmt]
    inputs = make(MIXED, seed=seed, index_format=fmt, query_dtype=dtype, device=DEVICE)
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), expected_scores(inputs))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 16])
def test_heads(heads: int, seed: int) -> None:
    case = Case("heads", (137, 1, 17), (262, 129, 17), make_config(1, heads, topk=2))
    inputs = make(case, seed=seed, device=DEVICE)
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), expected_scores(inputs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, seed: int) -> None:
    inputs = make(MIXED, seed=seed, layout=LAYOUTS[layout], device=DEVICE)
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), expected_scores(inputs))
    index_q = inputs.index_q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    out = msattn.index_scores(index_q, inputs.index, inputs.plan(), impl="hopper")
    assert_bitwise_equal("scores", out.cpu(), expected_scores(inputs))


def test_nan_and_pages_that_are_not_there() -> None:
    inputs = make(MIXED, device=DEVICE)
    table = inputs.batch.page_table
    inputs.index.tensor[int(table[0, 2]), 11, 3] = math.nan
    want = expected_scores(inputs)
    for column, page in enumerate((-1, inputs.index.num_pages, 2**31 - 1, -(2**31))):
        table[4, column] = page
    want[:, 80:213, :4] = -math.inf
    scores = scores_of(inputs).cpu()
    assert scores[:, :70, 2].isnan().all()
    assert torch.equal(scores.nan_to_num(7.5), want.nan_to_num(7.5))


def test_a_pool_beyond_2_31_elements() -> None:
    pages = (1 << 24) // 128 + 9
    config = make_config(1, 4)
    pool = torch.empty(pages, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    pool[-3:].fill_(1.0)
    index = msattn.IndexCache.from_tensor(pool, config)
    table = torch.arange(pages - 3, pages, dtype=torch.int32).unsqueeze(0)
    batch = msattn.Batch.from_lists([100], [384], table, device=DEVICE)
    plan = msattn.make_plan(batch, config, "bf16")
    index_q = torch.ones(100, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    scores = msattn.index_scores(index_q, index, plan, impl="hopper")
    assert (scores == 128.0).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("parts", [2, 4])
def test_large_steps_of_real_numbers_are_the_twins(fmt: str, parts: int, seed: int) -> None:
    """A token's sums have the same order in any kernel; and again, with fewer pages in the ring."""
    from msattn.kernels.hopper.indexer import Constants

    case = Case("large", (3000, 1, 1096), (65536 + 77, 9000, 4000), M3)
    inputs = make(
        case,
        seed=seed,
        index_format=fmt,
        query_dtype=FORMATS[fmt],
        integer_index=False,
        device=DEVICE,
    )
    scores, want = scores_of(inputs, Constants(4, parts)), scores_of(inputs)
    assert_bitwise_equal("scores", scores, want)
    twin.index_scores(inputs.index_q, inputs.index, inputs.plan(), want)
    assert_bitwise_equal("the twin's scores", scores, want)
    assert_bitwise_equal("second run", scores_of(inputs, Constants(4, parts)), scores)
    want_ids = msattn.select_blocks(scores, inputs.plan(), impl="reference")
    assert_same_ids("block_ids", selection_of(inputs), want_ids)


@pytest.mark.parametrize("chunk_bytes", [256 << 20, 1 << 13])
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_plan_serves_other_tensors(
    fmt: str, chunk_bytes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other addresses, alignments and strides; a plan keeps the launches of each kind."""
    monkeypatch.setattr(twin, "SCORE_BYTES", chunk_bytes)
    inputs = make(MIXED, seed=seed, index_format=fmt, query_dtype=FORMATS[fmt], device=DEVICE)
    plan, index, q = inputs.plan(), inputs.index, inputs.index_q
    row = q.shape[1] * q.shape[2]
    for i, (offset, gap) in enumerate([(0, 0), (16, 0), (1, 0), (0, 16), (1, 0), (0, 0)]):
        memory = q.new_empty(offset + len(q) * (row + gap))
        moved = memory.as_strided(q.shape, (row + gap, q.shape[2], 1), offset)
        moved.copy_(q.view(torch.uint8).roll(i, 0).view(q.dtype))
        want = msattn.index_scores(moved, index, plan, impl="reference")
        scores = poisoned(want.shape, torch.float32, DEVICE)
        msattn.index_scores(moved, index, plan, out=scores, impl="hopper")
        # The reference's NaN may have another payload on a GPU.
        assert_bitwise_equal("scores", *(x.where(x == x, math.nan) for x in (scores, want)))
        want_ids = msattn.select_blocks(want, plan, impl="reference")
        ids = torch.full_like(want_ids, GARBAGE)
        msattn.index_select(moved, index, plan, out=ids, impl="hopper")
        assert_same_ids("block_ids", ids, want_ids)


def test_a_graph_is_replayed_for_another_step() -> None:
    config = make_config(1, 4, topk=4)
    first = make(Case("first", (200, 3), (2000, 1000), config), device=DEVICE)
    plan, index_q = first.plan(), first.index_q.clone()
    ids = torch.full((203, 4, 4), GARBAGE, dtype=torch.int32, device=DEVICE)

    def launch() -> None:
        msattn.index_select(index_q, first.index, plan, out=ids, impl="hopper")

    replay = capture(launch)
    replay()
    assert_same_ids("block_ids", ids, expected_block_ids(first))
    second = make(Case("second", (100, 103), (901, 300), config), device=DEVICE)
    first.index.tensor.fill_(math.nan)
    first.index.tensor[: second.index.num_pages].copy_(second.index.tensor)
    index_q.copy_(second.index_q)
    plan.update(second.batch)
    replay()
    assert_same_ids("block_ids", ids, expected_block_ids(second))
