"""Selection by way of the compact keys: the plain one's ids, whatever the keys are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import msattn
from msattn.kernels.triton import indexer, indexer_compact
from msattn.testing.cases import Case, make_config
from msattn.testing.compare import assert_same_ids, expected_block_ids
from msattn.testing.index_keys import KINDS
from msattn.testing.make import Inputs, make, make_index_cache, poisoned, strided

DTYPES = (torch.bfloat16, torch.float16)
CONFIG = make_config(1, 4, topk=4)
# One token and several, in and at the ends of blocks; nothing selected by score; nothing seen.
CASE = Case("steps", (1, 3, 8, 1, 1, 2), (2500, 1408, 700, 300, 0, 129), CONFIG, spare_rows=1)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy serves small steps, too."""
    monkeypatch.setattr(indexer_compact, "MIN_PAGES", 0)


def with_keys(kind: str, case: Case, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    """Each request's keys are of that kind, and so are the queries."""
    inputs = make(
        case,
        seed=seed,
        index_format=str(dtype).removeprefix("torch."),
        query_dtype=dtype,
        compact=True,
        device=device,
    )
    generator = torch.Generator().manual_seed(seed)
    heads, dim = case.config.num_index_heads, case.config.index_head_dim
    queries = []
    for request, (tokens, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        keys, asked = KINDS[kind](max(length, 4), tokens * heads, dim, generator)
        place = torch.arange(length)
        page = inputs.batch.page_table[request].cpu()[place // 128].long()
        slots = (page * 128 + place % 128).to(device)
        msattn.store_index_k(keys[:length].to(device, dtype), inputs.index, slots, impl="reference")
        queries.append(asked.view(tokens, heads, dim))
    inputs.index_q[: case.num_tokens] = torch.cat(queries).to(device, dtype)
    return inputs


def check(inputs: Inputs, **options: object) -> None:
    """The ids of all scores, from keys alone and by their copy."""
    plan, index = inputs.plan(), inputs.index
    plain = msattn.IndexCache(index.tensor, index.format)
    want = msattn.index_select(inputs.index_q, plain, inputs.plan(), impl="triton")
    assert indexer_compact.pays(inputs.index_q, index, plan)
    got = msattn.index_select(inputs.index_q, index, plan, impl="triton")
    assert_same_ids("block_ids", got, want)


def rescored(inputs: Inputs) -> list[float]:
    """Of each row, the share of the blocks it sees whose scores were made."""
    plan, case = inputs.plan(), inputs.case
    heads, blocks = case.config.num_index_heads, plan.num_blocks
    shape = (heads, case.num_rows, -(-blocks // 32) * 32)
    scores = poisoned(shape, torch.float32, inputs.q.device)[..., :blocks]
    indexer_compact.score_rows(inputs.index_q, inputs.index, plan, scores, 0)
    out, row = [], 0
    for tokens, length in zip(case.query_lens, case.seq_lens, strict=True):
        for token in range(tokens):
            visible = (length - tokens + token) // 128 + 1
            made = (scores[:, row, :visible] > -math.inf).any(0)
            out.append(float(made.float().mean()) if visible > 0 else 0.0)
            row += 1
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_plain_ones(
    kind: str, dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    check(with_keys(kind, CASE, dtype, seed, device))


@pytest.mark.parametrize("kind", KINDS)
def test_few_blocks_are_scored_from_the_keys(kind: str, seed: int, device: torch.device) -> None:
    """All, where no bound tells blocks apart; else not many more than are selected."""
    case = Case("long", (1,), (40 * 128 - 5,), CONFIG)
    (share,) = rescored(with_keys(kind, case, torch.bfloat16, seed, device))
    if kind == "adversarial":
        assert share > 0.9
    else:  # four heads of four blocks each, one of them unscored
        assert 1 / 40 <= share <= 0.5


def test_ids_are_the_oracles(seed: int, device: torch.device) -> None:
    """Small integers: ties everywhere, and scores that are exact."""
    inputs = make(CASE, seed=seed, compact=True, device=device)
    got = msattn.index_select(inputs.index_q, inputs.index, inputs.plan(), impl="triton")
    assert_same_ids("block_ids", got, expected_block_ids(inputs))


@pytest.mark.parametrize(
    ("heads", "init", "local"),
    [(1, 0, 1), (8, 0, 1), (3, 1, 2), (1, 2, 2), (8, 2, 2), (3, 0, 0)],
)
def test_heads_and_forced_blocks(
    heads: int, init: int, local: int, seed: int, device: torch.device
) -> None:
    config = replace(make_config(1, heads, topk=4), init_blocks=init, local_blocks=local)
    tokens = 32 // 8 if heads == 8 else 5
    case = Case("heads", (1, tokens), (1500, 1100), config)
    check(with_keys("random", case, torch.bfloat16, seed, device))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_keys_that_8_bits_cannot_hold(value: float, seed: int, device: torch.device) -> None:
    inputs = with_keys("random", CASE, torch.bfloat16, seed, device)
    generator = torch.Generator().manual_seed(seed)
    hit = torch.randint(inputs.index.num_pages, (6,), generator=generator).to(device)
    inputs.index.tensor[hit, 17, 5] = value
    msattn.refresh_compact_keys(inputs.index, hit, impl="reference")
    check(inputs)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e-39, 1e-17, 1e17, 3e38])
def test_queries_of_any_size(value: float, seed: int, device: torch.device) -> None:
    inputs = with_keys("random", CASE, torch.bfloat16, seed, device)
    inputs.index_q[0, 1, 3] = value
    inputs.index_q[2, 2, :] = value
    check(inputs)


def apart(device: torch.device) -> Inputs:
    """One row whose blocks have scores far apart, the best of them not in order of their ids."""
    config = replace(make_config(1, 1, topk=4), init_blocks=0)
    inputs = make(Case("apart", (1,), (12 * 128,), config), compact=True, device=device)
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0)).to(device)
    ranks = torch.tensor([9, 0, 1, 6, 7, 8, 2, 3, 4, 5, 10, 11], device=device)
    pages = inputs.batch.page_table[0, :12].long()
    keys = 2.0 ** (4 - ranks)[:, None, None] * direction
    inputs.index.tensor[pages] = keys.expand(-1, 128, -1).bfloat16()
    msattn.refresh_compact_keys(inputs.index, pages, impl="reference")
    inputs.index_q[0] = direction
    return inputs


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_whose_score_is_no_number_does_not_count(
    value: float, device: torch.device
) -> None:
    """Its other keys reach the threshold; a NaN among the scores makes it the last of all."""
    inputs = apart(device)
    page = inputs.batch.page_table[0, 1:2].long()
    inputs.index.tensor[page, 5] = value
    msattn.refresh_compact_keys(inputs.index, page, impl="reference")
    check(inputs)


@pytest.mark.parametrize("magnitude", [2.0**-70, 1.0, 2.0**61])
def test_keys_of_which_a_copy_is_all_zeros(magnitude: float, device: torch.device) -> None:
    """As a pool is allocated: of zero keys it is right, but for a bound of 0."""
    inputs = apart(device)
    page = inputs.batch.page_table[0, 3].long()
    inputs.index.tensor[page] = 0
    inputs.index.compact.tensor[page] = 0
    inputs.index_q.mul_(-magnitude)
    check(inputs)


def test_blocks_without_a_page(seed: int, device: torch.device) -> None:
    inputs = with_keys("random", CASE, torch.bfloat16, seed, device)
    table = inputs.batch.page_table
    table[0, ::3], table[1, 2] = -1, inputs.index.num_pages + 3
    check(inputs)


def test_most_blocks_without_a_page(seed: int, device: torch.device) -> None:
    """Fewer scores than are selected: blocks of -inf are, too, the first of them first."""
    inputs = with_keys("random", CASE, torch.bfloat16, seed, device)
    inputs.batch.page_table[0, 2:] = -1
    check(inputs)


def test_queries_that_lie_apart(seed: int, device: torch.device) -> None:
    inputs = with_keys("clustered", CASE, torch.bfloat16, seed, device)
    queries = strided(inputs.index_q)
    assert not queries.is_contiguous()
    check(replace(inputs, index_q=queries))


@pytest.mark.parametrize("num_splits", [1, 3, 64])
def test_any_number_of_programs(num_splits: int, seed: int, device: torch.device) -> None:
    inputs = with_keys("random", CASE, torch.bfloat16, seed, device)
    plan, index = inputs.plan(), inputs.index
    want = msattn.index_select(
        inputs.index_q, msattn.IndexCache(index.tensor, index.format), plan, impl="triton"
    )
    ids = torch.full_like(want, -7)
    indexer.select_by(
        indexer_compact.score_rows, inputs.index_q, index, plan, ids, num_splits=num_splits
    )
    assert_same_ids("block_ids", ids, want)


def test_rows_in_chunks(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = with_keys("random", CASE, torch.bfloat16, seed, device)
    monkeypatch.setattr(indexer, "SCORE_BYTES", 4 * 4 * 32 * 5)
    check(inputs)


def test_more_blocks_than_a_chunk_of_the_selection(seed: int, device: torch.device) -> None:
    case = Case("far", (1,), (300 * 128 + 9,), make_config(1, 1, topk=16))
    inputs = with_keys("random", case, torch.bfloat16, seed, device)
    check(inputs)
    assert max(rescored(inputs)) < 0.3


def test_index_keys_of_a_model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny MiniMax-M3's: projected, normed and roped; the last token's of each sparse layer."""
    pytest.importorskip("transformers")
    from msattn.integrations.transformers import MsattnCache, attention, register, unregister
    from msattn.integrations.transformers.tiny import tiny_model, tiny_prompt

    length, steps = 2200, []
    select = attention.index_select

    def watched(index_q: torch.Tensor, index: msattn.IndexCache, plan: msattn.Plan) -> torch.Tensor:
        steps.append((index_q[-1:].clone(), index, plan))
        return select(index_q, index, plan)

    monkeypatch.setattr(msattn.env, "IMPL", "reference")
    monkeypatch.setattr(attention, "index_select", watched)
    register()
    try:
        model = tiny_model("msattn")
        with torch.no_grad():
            model(tiny_prompt(length), past_key_values=MsattnCache(model.config, "bf16"))
    finally:
        unregister()
    assert len(steps) == 3
    for index_q, index, plan in steps:
        config, pages = plan.config, -(-length // 128)
        table = torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0)
        batch = msattn.Batch.from_lists([1], [length], table, device=device)
        keys = index.tensor[plan.page_table[0, :pages].long()].to(device)
        copy = poisoned((pages, msattn.CompactKeys.page_bytes(128)), torch.uint8, device)
        wrapped = msattn.IndexCache.from_tensor(keys, config, compact=copy)
        msattn.refresh_compact_keys(wrapped, impl="triton")
        query = index_q.to(device, keys.dtype)
        want = msattn.index_select(
            query,
            msattn.IndexCache(keys, wrapped.format),
            msattn.make_plan(batch, config, "bf16"),
            impl="triton",
        )
        plan = msattn.make_plan(batch, config, "bf16")
        assert indexer_compact.pays(query, wrapped, plan)
        assert_same_ids("block_ids", msattn.index_select(query, wrapped, plan, impl="triton"), want)


def test_what_it_does_not_serve(device: torch.device) -> None:
    """Prompts, short contexts, other types: their ids come from all scores."""
    inputs = make(Case("steps", (1, 9), (300, 700), CONFIG), compact=True, device=device)
    assert not indexer_compact.pays(inputs.index_q, inputs.index, inputs.plan())
    few = make(CASE, compact=True, device=device)
    plain = msattn.IndexCache(few.index.tensor, few.index.format)
    assert indexer_compact.pays(few.index_q, few.index, few.plan())
    assert not indexer_compact.pays(few.index_q, plain, few.plan())
    assert not indexer_compact.pays(few.index_q.half(), few.index, few.plan())


def test_short_steps_are_served_plainly(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make(CASE, compact=True, device=device)
    monkeypatch.undo()
    assert not indexer_compact.pays(inputs.index_q, inputs.index, inputs.plan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e4, 1e6])
def test_the_copy_is_the_references(
    magnitude: float, dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    """Bytes, but for the last bit of a bound: norms are summed in another order."""
    one, other = (make_index_cache(CONFIG, 2, dtype, device, compact=True) for _ in range(2))
    assert one.compact is not None and other.compact is not None
    keys = torch.randn(130, 128, generator=torch.Generator().manual_seed(seed)) * magnitude
    keys[3], keys[4, 5], keys[6, 7] = 0.0, math.nan, 1e30
    keys, slots = keys.to(device, dtype), torch.randperm(256)[:130].to(device)
    slots[[0, 9]] = -1
    msattn.store_index_k(keys, one, slots, impl="reference")
    msattn.store_index_k(keys, other, slots, impl="triton")
    assert torch.equal(one.compact.codes, other.compact.codes)
    assert torch.equal(
        one.compact.factors[..., 0].nan_to_num(), other.compact.factors[..., 0].nan_to_num()
    )
    bits, other_bits = (x.compact.words >> 16 for x in (one, other))  # type: ignore[union-attr]
    assert ((bits - other_bits).abs() <= 1).all()

    stored = slots[slots >= 0]
    page, offset = stored // 128, stored % 128
    before = other.compact.words[page, offset], other.compact.codes[page, offset]
    other.compact.words[page, offset] = 0
    pages = torch.tensor([1, -1, 2, 0], dtype=torch.int32, device=device)
    msattn.refresh_compact_keys(other, pages, impl="triton")
    assert torch.equal(other.compact.words[page, offset], before[0])
    assert torch.equal(other.compact.codes[page, offset], before[1])
