"""Contract 12: the same bits twice, and a selection that does not depend on the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import msattn
from msattn.testing.cases import CASES, Case, make_config
from msattn.testing.compare import assert_bitwise_equal, assert_same_ids, relative_error
from msattn.testing.make import Inputs, make

FORMATS = list(msattn.KV_FORMATS)


def run(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Every stage's result for the query tokens."""
    plan, tokens = inputs.plan(), inputs.case.num_tokens
    scores = msattn.index_scores(inputs.index_q, inputs.index, plan)
    ids = msattn.index_select(inputs.index_q, inputs.index, plan)
    out, lse = msattn.attend(
        inputs.q, inputs.cache, ids, plan, q_scale=inputs.q_scale, return_lse=True
    )
    results = {"scores": scores[:, :tokens], "ids": ids[:tokens], "out": out[:tokens]}
    return {**results, "lse": lse[:tokens]}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert_bitwise_equal(name, got[name], value)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_two_runs_are_bitwise_equal(kv_format: str, seed: int) -> None:
    """Unused slots are refilled in between, and other data has gone through the same memory."""
    inputs = make(CASES["mixed"], seed=seed, kv_format=kv_format, integer_index=False)
    want = run(inputs)
    other = make(CASES["mixed"], seed=seed + 1, kv_format=kv_format)
    run(replace(other, q=torch.full_like(other.q, math.nan)))
    for value in (1.0, math.nan, math.inf):
        inputs.fill_unowned(value)
        assert_same(run(inputs), want)


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_two_stores_write_the_same_bytes(kv_format: str, seed: int) -> None:
    pools = [make(CASES["mixed"], seed=seed, kv_format=kv_format).cache.tensor for _ in range(2)]
    assert_bitwise_equal("pool", *pools)


def test_a_loop_of_selection_and_attention(seed: int) -> None:
    inputs = make(CASES["verify"], seed=seed, integer_index=False)
    want = run(inputs)
    for _ in range(50):
        assert_same(run(inputs), want)


def test_any_number_of_threads(seed: int) -> None:
    """Ids and scores are exact, so threads cannot change them; the output stays close."""
    inputs = make(CASES["prefill_beyond_topk"], seed=seed, integer_index=False)
    want, threads = run(inputs), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            got = run(inputs)
            assert_bitwise_equal("scores", got["scores"], want["scores"])
            assert_bitwise_equal("ids", got["ids"], want["ids"])
            assert relative_error(got["out"], want["out"]) < 1e-2
    finally:
        torch.set_num_threads(threads)


def test_a_row_alone_and_in_a_batch_of_32(seed: int) -> None:
    """Ids exactly equal, though the scores are no integers; out within 1e-2."""
    lengths = tuple(3 + 47 * i for i in range(32))
    case = Case("batch", (1,) * 32, lengths, make_config(group=2, kv_heads=2, topk=4))
    inputs = make(case, seed=seed, integer_index=False)
    together = run(inputs)
    for r in range(0, 32, 3):
        batch = msattn.Batch.from_lists([1], lengths[r : r + 1], inputs.batch.page_table[r : r + 1])
        row = slice(r, r + 1)
        alone = run(
            replace(
                inputs,
                case=replace(case, query_lens=(1,), seq_lens=lengths[r : r + 1]),
                batch=batch,
                q=inputs.q[row],
                index_q=inputs.index_q[row],
            )
        )
        blocks = alone["scores"].shape[2]
        assert_bitwise_equal("scores", together["scores"][:, row, :blocks], alone["scores"])
        assert_same_ids("ids", together["ids"][row], alone["ids"])
        assert relative_error(together["out"][row], alone["out"]) < 1e-2


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 17, 64, 65, 100])
def test_scores_do_not_depend_on_how_many_tokens_share_the_call(tokens: int, seed: int) -> None:
    """Tiles of other sizes sum in other orders: the last bit of a score must not show it."""
    whole = make(CASES["prefill"], seed=seed, integer_index=False)
    want = run(whole)
    start = 300 - tokens
    batch = msattn.Batch.from_lists([tokens], [300], whole.batch.page_table)
    part = replace(
        whole,
        case=replace(whole.case, query_lens=(tokens,)),
        batch=batch,
        q=whole.q[start:],
        index_q=whole.index_q[start:],
    )
    got = run(part)
    assert_bitwise_equal("scores", got["scores"], want["scores"][:, start:])
    assert_bitwise_equal("ids", got["ids"], want["ids"][start:])
    assert relative_error(got["out"], want["out"][start:]) < 1e-2


def test_near_ties_are_decided_alike_in_decode_and_prefill(seed: int) -> None:
    """Keys that differ in one bit of one element: no path may see them as equal."""
    config = make_config(group=1, kv_heads=1, topk=3)
    inputs = make(Case("near", (20,), (1200,), config), seed=seed)
    key = torch.randn(128).bfloat16()
    inputs.index.tensor[inputs.owned] = key
    for block in range(9):
        page = int(inputs.batch.page_table[0, block])
        nudged = key.view(torch.int16).clone()
        nudged[block] += 1
        inputs.index.tensor[page, 5] = nudged.view(torch.bfloat16)
    inputs.index_q.copy_(torch.randn(inputs.index_q.shape))
    prefill = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    for t in range(20):
        batch = msattn.Batch.from_lists([1], [1181 + t], inputs.batch.page_table)
        plan = msattn.make_plan(batch, config, "bf16")
        decode = msattn.index_select(inputs.index_q[t : t + 1], inputs.index, plan)
        assert_same_ids("decode", decode, prefill[t : t + 1])
