"""Hopper's block scores on a CPU, by ``gluon_on_torch``: against the oracle, to the bit.

Index queries and keys are small integers: every order of summation gives the oracle's scores. Each
step runs with several numbers of programs, in a schedule of the test's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from gluon_machine import Machine
from gluon_on_torch import emulate

import msattn
from msattn.kernels.hopper import attend_union, indexer
from msattn.kernels.triton import indexer as twin
from msattn.kernels.triton import launch
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import (
    assert_bitwise_equal,
    assert_same_ids,
    expected_block_ids,
    expected_scores,
)
from msattn.testing.make import GARBAGE, Inputs, head_major, make, poisoned

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves"),
    # numpy's, in the interpreter: of NaN and -inf in masked rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CASE_LIST = [case for case in CASES.values() if case.num_tokens <= 300]
FEW_ROWS = [case for case in CASE_LIST if 0 < case.num_rows <= 20]
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
MIXED = Case("mixed", (70, 1, 0, 9, 33), (400, 391, 40, 9, 131), make_config(1, 4), spare_rows=2)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Machine]:
    """Runs the kernels, in a schedule of the test's own."""
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    set_programs(monkeypatch, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # else each partition's thread starts threads of its own
    yield emulate(monkeypatch, indexer, attend_union, seed=seed)
    torch.set_num_threads(threads)


def set_programs(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(launch, "num_processors", lambda device: programs)


def scores_of(inputs: Inputs, constants: indexer.Constants | None = None) -> torch.Tensor:
    """The kernels themselves: the choice refuses a CPU."""
    shape = (inputs.config.num_index_heads, inputs.case.num_rows, inputs.plan().num_blocks)
    out = poisoned(shape, torch.float32, inputs.q.device)
    if out.numel():
        indexer.index_scores(inputs.index_q, inputs.index, inputs.plan(), out, constants=constants)
    return out


def selection_of(inputs: Inputs) -> torch.Tensor:
    config = inputs.config
    shape = (inputs.case.num_rows, config.num_kv_heads, config.topk)
    out = head_major(torch.full(shape, GARBAGE, dtype=torch.int32))
    indexer.index_select(inputs.index_q, inputs.index, inputs.plan(), out)
    return out


@pytest.mark.parametrize("case", CASE_LIST, ids=str)
def test_scores_are_the_oracles(case: Case, machine: Machine, seed: int) -> None:
    inputs = make(case, seed=seed)
    assert_bitwise_equal("scores", scores_of(inputs), expected_scores(inputs))
    assert machine.copied["_scores_kernel"] or not any(case.seq_lens)


@pytest.mark.parametrize("case", FEW_ROWS, ids=str)
def test_selection_is_the_oracles(case: Case, seed: int) -> None:
    inputs = make(case, seed=seed)
    assert_same_ids("block_ids", selection_of(inputs), expected_block_ids(inputs))


@pytest.mark.parametrize("programs", [1, 2, 5, 40])
@pytest.mark.parametrize("constants", [(3, 4), (2, 2)], ids=str)
def test_any_number_of_programs(
    programs: int, constants: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_programs(monkeypatch, programs)
    inputs = make(MIXED, seed=seed)
    scores = scores_of(inputs, indexer.Constants(*constants))
    assert_bitwise_equal("scores", scores, expected_scores(inputs))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("query", ["model", "e4m3"])
def test_formats_and_queries(fmt: str, query: str, seed: int) -> None:
    dtype = torch.float8_e4m3fn if query == "e4m3" else FORMATS[fmt]
    inputs = make(MIXED, seed=seed, index_format=fmt, query_dtype=dtype)
    assert_bitwise_equal("scores", scores_of(inputs), expected_scores(inputs))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 16])
def test_heads(heads: int, seed: int) -> None:
    case = Case("heads", (37, 1, 17), (262, 129, 17), make_config(1, heads, topk=2))
    inputs = make(case, seed=seed)
    assert_bitwise_equal("scores", scores_of(inputs), expected_scores(inputs))


@pytest.mark.parametrize("end", ["seen", "hidden"])
def test_nan_of_a_key_makes_its_block_nan_for_those_who_see_it(end: str) -> None:
    inputs = make(Case("nan", (40,), (900,), make_config()))
    # Positions 860 to 899 see block 6 in part: token 20 is the first that sees key 880.
    block, key, first = (2, 11, 0) if end == "seen" else (6, 880 % 128, 20)
    inputs.index.tensor[inputs.batch.page_table[0, block], key, 3] = math.nan
    scores = scores_of(inputs)
    assert scores[:, first:, block].isnan().all()
    assert not scores[:, :first].isnan().any()
    assert torch.equal(scores.nan_to_num(7.5), expected_scores(inputs).nan_to_num(7.5))


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1, -(2**31)])
def test_blocks_without_a_page_score_minus_infinity(page: int) -> None:
    inputs = make(Case("unmapped", (20, 1), (600, 400), make_config()))
    want = expected_scores(inputs)
    page = inputs.index.num_pages if page == 8 else page
    inputs.batch.page_table[0, 1] = inputs.batch.page_table[1, 3] = page
    want[:, :20, 1] = want[:, 20, 3] = -math.inf
    assert_bitwise_equal("scores", scores_of(inputs), want)


def test_pools_that_the_copy_engine_cannot_read_are_the_twins(machine: Machine) -> None:
    inputs = make(Case("odd", (3,), (300,), make_config()))
    odd = poisoned((inputs.index.num_pages, 128, 128 + 8), torch.bfloat16)[:, :, 4:132]
    odd.copy_(inputs.index.tensor)
    out = poisoned((2, 3, 3), torch.float32)
    index = msattn.IndexCache.from_tensor(odd, inputs.config)
    indexer.index_scores(inputs.index_q, index, inputs.plan(), out)
    assert_bitwise_equal("scores", out, expected_scores(inputs))
    assert not machine.copied


def test_index_cache_among_other_layers(machine: Machine, seed: int) -> None:
    inputs = make(MIXED, seed=seed)
    pool = poisoned((inputs.index.num_pages, 3, 128, 128 + 16), torch.bfloat16)
    layer = pool[:, 1, :, :128]
    layer.copy_(inputs.index.tensor)
    out = poisoned((4, MIXED.num_rows, inputs.plan().num_blocks), torch.float32)
    index = msattn.IndexCache.from_tensor(layer, inputs.config)
    indexer.index_scores(inputs.index_q, index, inputs.plan(), out)
    assert_bitwise_equal("scores", out, expected_scores(inputs))
    assert machine.copied["_scores_kernel"]


def test_buffers_of_any_strides_are_fully_written(seed: int) -> None:
    inputs = make(MIXED, seed=seed, layout=LAYOUTS["strided_rows"])
    rows, blocks = MIXED.num_rows, inputs.plan().num_blocks
    room = poisoned((rows, blocks + 1, 4), torch.float32)
    out = room.permute(2, 0, 1)[:, :, :blocks]
    index_q = inputs.index_q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert index_q.stride(0) == 1
    for q in (inputs.index_q, index_q):
        out.fill_(math.nan)
        indexer.index_scores(q, inputs.index, inputs.plan(), out)
        assert_bitwise_equal("scores", out, expected_scores(inputs))
        assert room[:, blocks].isnan().all()


@pytest.mark.parametrize("budget", [1, 1 << 10, 1 << 11])
def test_chunks_of_any_size_select_the_same(
    budget: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("chunks", (5, 1, 3), (300, 257, 390), make_config(topk=2), spare_rows=2)
    inputs = make(case, seed=seed)
    monkeypatch.setattr(twin, "SCORE_BYTES", budget)
    assert_same_ids("block_ids", selection_of(inputs), expected_block_ids(inputs))


def test_lengths_beyond_the_host_bound_do_not_write_beyond_the_scores() -> None:
    inputs = make(CASES["prefill_beyond_topk"])
    batch = msattn.Batch.from_lists([1], [256], inputs.batch.page_table)
    plan = msattn.make_plan(batch, inputs.config, "bf16")
    plan.seq_lens.fill_(900)
    room = poisoned((2, 1, plan.num_blocks + 3), torch.float32)
    out = room[..., : plan.num_blocks]
    indexer.index_scores(inputs.index_q[-1:], inputs.index, plan, out)
    assert_bitwise_equal("scores", out, expected_scores(inputs)[:, -1:, : plan.num_blocks])
    assert room[..., plan.num_blocks :].isnan().all()


def test_plan_updated_in_place(seed: int) -> None:
    """A plan of a larger step serves a smaller one: its last tiles and requests are not used."""
    config = make_config()
    larger = make(Case("larger", (40, 9, 1), (300, 390, 8), config))
    inputs = make(Case("smaller", (2, 30), (131, 300), config), seed=seed)
    plan = larger.plan()
    out = poisoned((2, larger.case.num_rows, plan.num_blocks), torch.float32)
    indexer.index_scores(larger.index_q, larger.index, plan, out)
    plan.update(inputs.batch)
    scores = poisoned((2, inputs.case.num_rows, plan.num_blocks), torch.float32)
    indexer.index_scores(inputs.index_q, inputs.index, plan, scores)
    want = expected_scores(inputs)
    assert_bitwise_equal("scores", scores[..., : want.shape[2]], want)
    assert (scores[..., want.shape[2] :] == -math.inf).all()


def test_more_tiles_than_are_listed_together(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(indexer, "LIST_CHUNK", type(indexer.LIST_CHUNK)(4))
    config = make_config(1, 16, topk=2)
    case = Case("many", (17, 1, 33, 0, 16, 2, 20), (40, 129, 300, 7, 16, 131, 21), config)
    inputs = make(case, seed=seed)
    assert_bitwise_equal("scores", scores_of(inputs), expected_scores(inputs))
