"""What must not matter: order and company of requests, pages, chunks, order and noise of ids."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

import msattn
from msattn.testing import oracle
from msattn.testing.cases import Case, make_config
from msattn.testing.compare import (
    assert_bitwise_equal,
    assert_close,
    assert_lse,
    assert_same_ids,
    expected_attention,
    expected_block_ids,
)
from msattn.testing.make import INT32_MAX, INT32_MIN, Inputs, make, make_block_ids

CONFIG = make_config(group=1, kv_heads=2, topk=3)
LSE_BOUND = 5e-5

LENGTHS = st.one_of(st.sampled_from([0, 1, 127, 128, 129, 255, 256, 385, 513]), st.integers(0, 700))
# (query tokens, KV length), also with more query tokens than keys.
REQUESTS = st.tuples(st.sampled_from([0, 1, 1, 1, 2, 5, 20]), LENGTHS)
SEEDS = st.integers(0, 2**32 - 1)
NO_BLOCK = st.one_of(st.sampled_from([-1, -2, INT32_MIN, INT32_MAX]), st.integers(1000, 2**31 - 1))


def make_step(requests: list[tuple[int, int]], seed: int, **options: object) -> Inputs:
    """fp32 queries and caches: what differs then differs because of the algorithm."""
    query_lens, seq_lens = zip(*requests, strict=True) if requests else ((), ())
    case = Case("step", query_lens, seq_lens, CONFIG)
    return make(
        case,
        seed=seed,
        query_dtype=torch.float32,
        kv_format="fp32",
        index_format="fp32",
        integer_index=False,
        **options,
    )


def run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """block_ids, out, LSE."""
    plan = inputs.plan()
    ids = msattn.index_select(inputs.index_q, inputs.index, plan)
    return (ids, *msattn.attend(inputs.q, inputs.cache, ids, plan, return_lse=True))


def assert_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    assert_same_ids("block_ids", got[0], want[0])
    assert_close("out", got[1], want[1])
    assert_lse("lse", got[2], want[2], bound=LSE_BOUND)


def subset(inputs: Inputs, requests: list[int]) -> Inputs:
    """The step that has only these requests, in this order, in the same caches."""
    starts = inputs.batch.cu_seqlens_q.tolist()
    rows = [t for r in requests for t in range(starts[r], starts[r + 1])]
    case = replace(
        inputs.case,
        query_lens=tuple(inputs.case.query_lens[r] for r in requests),
        seq_lens=tuple(inputs.case.seq_lens[r] for r in requests),
    )
    batch = msattn.Batch.from_lists(
        case.query_lens, case.seq_lens, inputs.batch.page_table[requests]
    )
    return replace(inputs, case=case, batch=batch, q=inputs.q[rows], index_q=inputs.index_q[rows])


def rows_of(inputs: Inputs, requests: list[int]) -> list[int]:
    starts = inputs.batch.cu_seqlens_q.tolist()
    return [t for r in requests for t in range(starts[r], starts[r + 1])]


@given(st.lists(REQUESTS, max_size=5), SEEDS)
def test_any_batch_is_the_oracles(requests: list[tuple[int, int]], seed: int) -> None:
    inputs = make_step(requests, seed)
    ids, out, lse = run(inputs)
    want_ids = expected_block_ids(inputs)
    assert_same((ids, out, lse), (want_ids, *expected_attention(inputs, want_ids)))


@given(st.lists(REQUESTS, min_size=1, max_size=5), SEEDS, st.randoms(use_true_random=False))
def test_order_of_requests(requests: list[tuple[int, int]], seed: int, random: object) -> None:
    """Decode, prefill and padding rows anywhere in the batch."""
    inputs = make_step(requests, seed)
    order = list(range(len(requests)))
    random.shuffle(order)
    want = tuple(x[rows_of(inputs, order)] for x in run(inputs))
    assert_same(run(subset(inputs, order)), want)


@given(st.lists(REQUESTS, min_size=2, max_size=5), SEEDS, st.data())
def test_company_of_requests(
    requests: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    """Contract 12: a request alone, or among any others, selects and sees the same."""
    inputs = make_step(requests, seed)
    chosen = data.draw(st.lists(st.sampled_from(range(len(requests))), unique=True, min_size=1))
    want = tuple(x[rows_of(inputs, chosen)] for x in run(inputs))
    assert_same(run(subset(inputs, chosen)), want)


@given(st.lists(REQUESTS, min_size=1, max_size=4), SEEDS, SEEDS)
def test_permutation_of_pages(requests: list[tuple[int, int]], seed: int, page_seed: int) -> None:
    """Where in the pool a block lies, and what the unused table columns name."""
    inputs, moved = make_step(requests, seed), make_step(requests, seed, page_seed=page_seed)
    assert_same(run(moved), run(inputs))


@given(st.integers(1, 520), st.lists(st.integers(0, 520), max_size=6), SEEDS)
def test_chunks_of_a_prompt(length: int, cuts: list[int], seed: int) -> None:
    """A prompt cut at any positions, empty chunks included: prefix and rest equal one shot."""
    inputs = make_step([(length, length)], seed)
    want = run(inputs)
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    parts = []
    for start, end in pairwise(edges):
        batch = msattn.Batch.from_lists([end - start], [end], inputs.batch.page_table)
        part = replace(
            inputs, batch=batch, q=inputs.q[start:end], index_q=inputs.index_q[start:end]
        )
        parts.append(run(part))
    assert_same(tuple(torch.cat(x) for x in zip(*parts, strict=True)), want)


@given(st.lists(REQUESTS, min_size=1, max_size=3), SEEDS, st.data())
def test_noise_between_ids(requests: list[tuple[int, int]], seed: int, data: st.DataObject) -> None:
    """Contract 3: duplicates, any order, sentinels anywhere (INT_MIN, 2^31 - 1), more columns."""
    inputs = make_step(requests, seed)
    clean = make_block_ids(inputs, seed=seed, hostile=False)
    width = CONFIG.topk + data.draw(st.integers(0, 5))
    noisy = []
    for row in clean.flatten(0, 1).tolist():
        real = [b for b in row if b >= 0]
        noise = NO_BLOCK | st.sampled_from(real) if real else NO_BLOCK
        rest = data.draw(st.lists(noise, min_size=width - len(real), max_size=width - len(real)))
        noisy.append(data.draw(st.permutations(real + rest)))
    ids = torch.tensor(noisy, dtype=torch.int32).reshape(*clean.shape[:2], width)
    plan = inputs.plan()
    want, want_lse = msattn.attend(inputs.q, inputs.cache, clean, plan, return_lse=True)
    out, lse = msattn.attend(inputs.q, inputs.cache, ids, plan, return_lse=True)
    assert_close("out", out, want)
    assert_lse("lse", lse, want_lse, bound=LSE_BOUND)


@given(st.lists(REQUESTS, min_size=1, max_size=3), st.integers(0, 260), SEEDS)
def test_more_table_columns(requests: list[tuple[int, int]], more: int, seed: int) -> None:
    """Columns behind ceil(seq_len / 128) may name anything, and be many."""
    inputs = make_step(requests, seed)
    rows = len(requests)
    garbage = torch.randint(INT32_MIN, INT32_MAX, (rows, more), dtype=torch.int32)
    garbage[:, ::2] %= inputs.cache.num_pages
    batch = inputs.batch
    table = torch.cat([batch.page_table, garbage], dim=1)
    # Bounds that let the garbage in, were it not for the lengths.
    wider = msattn.Batch(
        batch.cu_seqlens_q,
        batch.seq_lens,
        table,
        max_query_len=batch.max_query_len,
        max_seq_len=128 * table.shape[1],
    )
    for got, want in zip(run(replace(inputs, batch=wider)), run(inputs), strict=True):
        assert_bitwise_equal("result", got, want)


SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38, -3.4e38]),
    st.floats(width=32),
)


@given(
    st.lists(st.lists(SCORES, min_size=1, max_size=12), min_size=1, max_size=6),
    st.integers(1, 14),
    st.data(),
)
def test_any_scores_select_what_the_oracle_selects(
    rows: list[list[float]], topk: int, data: st.DataObject
) -> None:
    """Contract 2: one total order, whatever the scores and the forced blocks."""
    init = data.draw(st.integers(0, topk))
    local = data.draw(st.integers(0, topk - init))
    config = make_config(kv_heads=1, topk=topk, init_blocks=init, local_blocks=local)
    width = max(map(len, rows))
    scores = torch.tensor([row + [math.inf] * (width - len(row)) for row in rows]).unsqueeze(0)
    lengths = [128 * len(row) - data.draw(st.integers(0, 127)) for row in rows]
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    batch = msattn.Batch.from_lists([1] * len(rows), lengths, table)
    ids = msattn.select_blocks(scores, msattn.make_plan(batch, config, "bf16"))
    assert_same_ids("block_ids", ids, oracle.select_blocks(scores, batch, config))


@given(st.integers(1, 600), st.integers(1, 6), SEEDS)
def test_any_split_of_the_ids_merges_into_the_whole(length: int, parts: int, seed: int) -> None:
    """Contract 6: states of disjoint blocks, empty ones included."""
    inputs = make_step([(1, length), (2, max(0, length - 200))], seed)
    ids, plan = make_block_ids(inputs, seed=seed), inputs.plan()
    whole, whole_lse = msattn.attend(inputs.q, inputs.cache, ids, plan, return_lse=True)
    owner = torch.randint(parts, (1000,), generator=torch.Generator().manual_seed(seed))
    of_id = owner[ids.clamp(0, 999).long()]
    states = [
        msattn.attend(inputs.q, inputs.cache, ids.where(of_id == p, -1), plan, return_lse=True)
        for p in range(parts)
    ]
    out, lse = msattn.merge_states(*map(list, zip(*states, strict=True)))
    assert_close("out", out, whole)
    assert_lse("lse", lse, whole_lse, bound=LSE_BOUND)


@given(st.lists(st.integers(-3, 511), unique=True, max_size=40), st.integers(0, 40), SEEDS)
def test_stores_in_any_order_and_number(slots: list[int], cut: int, seed: int) -> None:
    """One store, or two of its parts in the other order: the same bytes; skipped slots unread."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, len(slots), 2, 128, generator=generator)
    mapping = torch.tensor(slots, dtype=torch.int64)
    k[mapping < 0] = math.nan
    one, two = (msattn.KVCache.allocate(4, CONFIG, "nvfp4") for _ in range(2))
    msattn.store_kv(k, v, one, mapping)
    for part in (slice(cut, None), slice(cut)):
        msattn.store_kv(k[part], v[part], two, mapping[part])
    assert torch.equal(one.tensor, two.tensor)
    page = one.tensor.flatten(1).any(1).nonzero().flatten().tolist()
    assert page == sorted({slot // 128 for slot in slots if slot >= 0})


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_lists_and_tensors_make_the_same_batch(query_lens: list[int]) -> None:
    seq_lens = [3 * q for q in query_lens]
    table = torch.arange(len(seq_lens), dtype=torch.int64).unsqueeze(1)
    batch = msattn.Batch.from_lists(query_lens, seq_lens, table)
    assert batch.cu_seqlens_q.tolist() == [0, *accumulate(query_lens)]
    assert batch.num_tokens == sum(query_lens) == len(oracle.tokens(batch))
    assert batch.page_table.dtype == torch.int32
