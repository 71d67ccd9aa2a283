"""Stage 2: block scores, and scores and selection in one."""

from __future__ import annotations

import math

import pytest
import torch

import msattn
from msattn.reference import indexer as reference_indexer
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import (
    assert_bitwise_equal,
    assert_same_ids,
    expected_block_ids,
    expected_scores,
)
from msattn.testing.make import GARBAGE, head_major, make, poisoned

INDEX_FORMATS = [fmt for fmt in msattn.KV_FORMATS.values() if fmt.in_index]
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
CASE_LIST = list(CASES.values())


@pytest.mark.parametrize("integer", [True, False], ids=["integers", "normal"])
@pytest.mark.parametrize("case", CASE_LIST, ids=str)
def test_scores_and_ids_are_the_oracles(case: Case, integer: bool, seed: int) -> None:
    """Contract 1: maximum of unscaled products over visible keys, for each index head.

    Page tails, unused pages and unused table columns are NaN or point at other requests.
    """
    inputs = make(case, seed=seed, integer_index=integer)
    plan = inputs.plan()
    scores = msattn.index_scores(inputs.index_q, inputs.index, plan)
    assert scores.dtype == torch.float32
    assert_bitwise_equal("scores", scores, expected_scores(inputs))
    want = expected_block_ids(inputs)
    assert_same_ids("two stages", msattn.select_blocks(scores, plan), want)
    assert_same_ids("index_select", msattn.index_select(inputs.index_q, inputs.index, plan), want)


@pytest.mark.parametrize("query_dtype", QUERY_DTYPES, ids=str)
@pytest.mark.parametrize("fmt", INDEX_FORMATS, ids=str)
def test_every_index_dtype(fmt: msattn.KVFormat, query_dtype: torch.dtype, seed: int) -> None:
    inputs = make(
        CASES["mixed"],
        seed=seed,
        index_format=fmt,
        query_dtype=query_dtype,
        integer_index=False,
    )
    scores = msattn.index_scores(inputs.index_q, inputs.index, inputs.plan())
    assert_bitwise_equal("scores", scores, expected_scores(inputs))
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    assert_same_ids("block_ids", ids, expected_block_ids(inputs))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_number_of_index_heads(heads: int, seed: int) -> None:
    case = Case("heads", (1, 5), (900, 700), make_config(group=1, kv_heads=heads, topk=3))
    inputs = make(case, seed=seed)
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    assert_same_ids("block_ids", ids, expected_block_ids(inputs))


@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
def test_index_head_dims(head_dim: int, seed: int) -> None:
    case = Case("dims", (3,), (700,), make_config(head_dim=head_dim))
    inputs = make(case, seed=seed)
    scores = msattn.index_scores(inputs.index_q, inputs.index, inputs.plan())
    assert_bitwise_equal("scores", scores, expected_scores(inputs))


def test_heads_with_disjoint_winners_keep_their_own() -> None:
    """No reduction over index heads: each KV head gets the blocks of its own index head."""
    config = make_config(group=1, kv_heads=4, topk=3)
    inputs = make(Case("disjoint", (1,), (16 * 128,), config))
    inputs.index.tensor[inputs.owned] = 0
    index_q = torch.zeros(1, 4, config.index_head_dim)
    for head in range(4):
        index_q[0, head, head] = 1.0
        for block in (3 * head, 3 * head + 1):
            page = int(inputs.batch.page_table[0, block])
            inputs.index.tensor[page, 17 * head + block, head] = 5.0
    ids = msattn.index_select(index_q, inputs.index, inputs.plan())
    assert ids[0].tolist() == [[3 * h, 3 * h + 1, 15] for h in range(4)]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 130, 257])
def test_negative_scores_do_not_lean_to_keys_that_are_not_there(length: int) -> None:
    """All real products are -20: a zero-filled page tail would win with 0."""
    config = make_config()
    inputs = make(Case("negative", (1,), (length,), config))
    inputs.index.tensor[inputs.owned] = -20.0 / config.index_head_dim
    for unowned in (0.0, math.nan, 100.0):
        inputs.fill_unowned(unowned)
        index_q = torch.ones(1, config.num_index_heads, config.index_head_dim)
        scores = msattn.index_scores(index_q, inputs.index, inputs.plan())
        assert torch.allclose(scores, torch.tensor(-20.0), rtol=1e-2)


def test_score_is_not_scaled() -> None:
    config = make_config()
    inputs = make(Case("one", (1,), (2,), config))
    page = int(inputs.batch.page_table[0, 0])
    inputs.index.tensor[page, :2] = 0.0
    inputs.index.tensor[page, :2, 5] = torch.tensor([3.0, -8.0], dtype=torch.bfloat16)
    index_q = torch.zeros(1, 2, config.index_head_dim)
    index_q[0, :, 5] = torch.tensor([7.0, -0.5])
    scores = msattn.index_scores(index_q, inputs.index, inputs.plan())
    assert scores[:, 0, 0].tolist() == [21.0, 4.0]


def test_nan_product_makes_its_own_block_nan() -> None:
    inputs = make(CASES["prefill_beyond_topk"])
    want = expected_scores(inputs)
    page = int(inputs.batch.page_table[0, 2])
    inputs.index.tensor[page, 11, 3] = math.nan
    scores = msattn.index_scores(inputs.index_q, inputs.index, inputs.plan())
    assert scores[:, :, 2].isnan().all()
    want[:, :, 2] = math.nan
    assert torch.equal(scores.nan_to_num(7.5), want.nan_to_num(7.5))
    # NaN is lowest: the block is chosen by nobody, all rows see more than topk others.
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    assert not (ids == 2).any()
    assert_same_ids("block_ids", ids, expected_block_ids(inputs))


@pytest.mark.parametrize("num_blocks", [257, 4096, 4097, 8192])
def test_winners_at_the_far_end_of_long_tables(num_blocks: int) -> None:
    """No window of 256 columns, no bound at 4,096 blocks."""
    config = make_config(group=1, kv_heads=2, topk=4, head_dim=16)
    keys = torch.zeros(num_blocks + 1, 128, 16, dtype=torch.bfloat16)
    pages = torch.randperm(num_blocks + 1)[:num_blocks]
    winners = [1, num_blocks - 3, num_blocks - 2]
    keys[pages[winners], 127, 0] = 1.0
    index = msattn.IndexCache.from_tensor(keys, config)
    batch = msattn.Batch.from_lists([1], [num_blocks * 128 - 5], pages.unsqueeze(0))
    plan = msattn.make_plan(batch, config, "bf16")
    index_q = torch.ones(1, 2, 16)
    ids = msattn.index_select(index_q, index, plan)
    assert ids[0].tolist() == [[*winners, num_blocks - 1]] * 2
    scores = msattn.index_scores(index_q, index, plan)
    assert scores.shape == (2, 1, num_blocks) and scores.sum() == 2 * len(winners)


def test_out_buffers_of_any_strides_are_fully_written(seed: int) -> None:
    """Buffers full of garbage, longer than the step: every entry is written, and nothing else."""
    inputs = make(CASES["prefill_after_prefix"], seed=seed, layout=LAYOUTS["strided_rows"])
    plan, rows = inputs.plan(), inputs.case.num_rows
    config, blocks = inputs.config, plan.num_blocks
    room = poisoned((rows, blocks + 1, config.num_index_heads), torch.float32)
    out = room.permute(2, 0, 1)[:, :, :blocks]
    assert msattn.index_scores(inputs.index_q, inputs.index, plan, out=out) is out
    assert_bitwise_equal("scores", out, expected_scores(inputs))
    assert room[:, blocks].isnan().all()
    shape = (rows, config.num_kv_heads, config.topk)
    ids = head_major(torch.full(shape, GARBAGE, dtype=torch.int32))
    assert msattn.index_select(inputs.index_q, inputs.index, plan, out=ids) is ids
    assert_same_ids("block_ids", ids, expected_block_ids(inputs))


def test_rows_behind_the_last_token_score_nothing(seed: int) -> None:
    inputs = make(CASES["decode_spare_rows"], seed=seed)
    tokens = inputs.case.num_tokens
    assert inputs.index_q[tokens:].isnan().all()
    scores = msattn.index_scores(inputs.index_q, inputs.index, inputs.plan())
    assert (scores[:, tokens:] == -math.inf).all()
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    assert (ids[tokens:] == -1).all() and (ids[:tokens, :, 0] >= 0).all()


def test_decode_selects_what_prefill_selects_for_its_last_token(seed: int) -> None:
    inputs = make(CASES["prefill_beyond_topk"], seed=seed, integer_index=False)
    prefill = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    batch = msattn.Batch.from_lists([1], inputs.case.seq_lens, inputs.batch.page_table)
    plan = msattn.make_plan(batch, inputs.config, "bf16")
    assert_same_ids(
        "decode", msattn.index_select(inputs.index_q[-1:], inputs.index, plan), prefill[-1:]
    )


@pytest.mark.parametrize("budget", [1, 1 << 14, 1 << 20])
def test_chunks_of_any_size_score_the_same(
    budget: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make(CASES["mixed"], seed=seed, integer_index=False)
    monkeypatch.setattr(reference_indexer, "CHUNK_BYTES", budget)
    scores = msattn.index_scores(inputs.index_q, inputs.index, inputs.plan())
    assert_bitwise_equal("scores", scores, expected_scores(inputs))
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    assert_same_ids("block_ids", ids, expected_block_ids(inputs))


def test_lengths_beyond_the_host_bound_do_not_write_beyond_the_scores() -> None:
    """A device length that outgrew max_seq_len: blocks behind the bound do not exist."""
    inputs = make(CASES["prefill_beyond_topk"])
    batch = msattn.Batch.from_lists([1], [256], inputs.batch.page_table)
    plan = msattn.make_plan(batch, inputs.config, "bf16")
    plan.seq_lens.fill_(900)
    room = poisoned((2, 1, plan.num_blocks + 3), torch.float32)
    out = room[..., : plan.num_blocks]
    msattn.index_scores(inputs.index_q[-1:], inputs.index, plan, out=out)
    assert_bitwise_equal("scores", out, expected_scores(inputs)[:, -1:, : plan.num_blocks])
    assert room[..., plan.num_blocks :].isnan().all()
    ids = msattn.index_select(inputs.index_q[-1:], inputs.index, plan)
    assert ids[0].tolist() == [[0, 1, -1, -1]] * 2
