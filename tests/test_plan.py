"""Plan: a batch that is taken over in place, step after step."""

from __future__ import annotations

from random import Random

import pytest
import torch

import msattn
from msattn.plan import Tiles
from msattn.testing.cases import CASES, SMALL, Case, make_config
from msattn.testing.compare import (
    assert_bitwise_equal,
    assert_close,
    assert_same_ids,
    expected_attention,
    expected_block_ids,
)
from msattn.testing.make import INT32_MAX, Inputs, make

BUFFERS = ("cu_seqlens_q", "seq_lens", "page_table")


def new_batch(query_lens: list[int], seq_lens: list[int], columns: int = 8) -> msattn.Batch:
    table = torch.randint(0, 100, (len(seq_lens), columns), dtype=torch.int32)
    return msattn.Batch.from_lists(query_lens, seq_lens, table)


def addresses(plan: msattn.Plan) -> list[int]:
    return [getattr(plan, name).data_ptr() for name in BUFFERS]


def run(inputs: Inputs, plan: msattn.Plan) -> list[torch.Tensor]:
    """block_ids, out and LSE of the query tokens."""
    ids = msattn.index_select(inputs.index_q, inputs.index, plan)
    out, lse = msattn.attend(inputs.q, inputs.cache, ids, plan, return_lse=True)
    return [x[: inputs.case.num_tokens] for x in (ids, out, lse)]


def assert_same_results(inputs: Inputs, plan: msattn.Plan) -> None:
    """The plan gives the bits that a plan made for these inputs gives."""
    for name, got, want in zip(
        ("block_ids", "out", "lse"), run(inputs, plan), run(inputs, inputs.plan()), strict=True
    ):
        assert_bitwise_equal(name, got, want)


def test_plan_owns_its_buffers() -> None:
    """Contract 11: what the engine does with its tensors afterwards does not reach the plan."""
    batch = new_batch([1, 3], [200, 300])
    plan = msattn.make_plan(batch, SMALL, "bf16")
    before = [getattr(plan, name).clone() for name in BUFFERS]
    for name in BUFFERS:
        getattr(batch, name).fill_(77)
    for name, want in zip(BUFFERS, before, strict=True):
        assert torch.equal(getattr(plan, name), want)
        assert getattr(plan, name).is_contiguous()


def test_update_takes_over_everything_in_place() -> None:
    first, second = new_batch([1, 3], [200, 300]), new_batch([5, 2], [700, 64])
    plan = msattn.make_plan(first, SMALL, "bf16")
    at = addresses(plan)
    plan.update(second)
    assert addresses(plan) == at
    for name in BUFFERS:
        assert torch.equal(getattr(plan, name), getattr(second, name))
    assert (plan.max_query_len, plan.max_seq_len, plan.num_tokens) == (5, 700, 7)
    assert plan.num_blocks == 6
    plan.update(first)
    assert addresses(plan) == at
    for name in BUFFERS:
        assert torch.equal(getattr(plan, name), getattr(first, name))
    # Host bounds only grow: a captured graph was sized with them.
    assert (plan.max_query_len, plan.max_seq_len, plan.num_tokens) == (5, 700, 4)


def test_fewer_requests_and_columns_leave_nothing_behind() -> None:
    plan = msattn.make_plan(new_batch([1, 3, 2], [200, 300, 900], 8), SMALL, "bf16")
    plan.update(new_batch([2], [150], 3))
    assert plan.num_requests == 3
    assert plan.cu_seqlens_q.tolist() == [0, 2, 2, 2]
    assert plan.seq_lens.tolist() == [150, 0, 0]
    assert (plan.page_table[0, 3:] == -1).all() and (plan.page_table[1:] == -1).all()


def test_no_value_is_read_on_the_host() -> None:
    """On a device it would be a sync; a meta tensor has none that could be read."""
    batch = msattn.Batch.from_lists([1, 5], [200, 300], [[0, 1, 2]] * 2, device="meta")
    plan = msattn.make_plan(batch, SMALL, "bf16")
    tiles, memory = plan.tiles(4), plan.workspace("scores", (2, 3), torch.float32)
    assert len(tiles.request) == 4
    plan.update(batch)
    assert plan.tiles(4) is tiles
    assert plan.workspace("scores", (2, 3), torch.float32) is memory
    grown = msattn.Batch.from_lists([4, 5], [200, 300], [[0, 1, 2]] * 2, device="meta")
    plan.update(grown)
    assert len(plan.tiles(4).request) == 5


def rows_of(tiles: Tiles, plan: msattn.Plan, size: int) -> list[tuple[int, int]]:
    """(request, row) of all rows of all tiles."""
    return [
        (request, row)
        for request, first in zip(*(x.tolist() for x in tiles), strict=True)
        if request >= 0
        for row in range(first, min(first + size, int(plan.cu_seqlens_q[request + 1])))
    ]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_tiles_cover_every_row_once_and_follow_updates(size: int) -> None:
    first = [3, 0, 17, 1]
    plan = msattn.make_plan(new_batch(first, [900] * 4), SMALL, "bf16")
    tiles = plan.tiles(size)
    at = [x.data_ptr() for x in tiles]
    for query_lens in (first, [0, 21], [1, 1, 1, 1], [0, 0, 0, 0], [], first):
        plan.update(new_batch(query_lens, [900] * len(query_lens)))
        assert plan.tiles(size) is tiles
        owners = [r for r, count in enumerate(query_lens) for _ in range(count)]
        assert sorted(rows_of(tiles, plan, size)) == [(r, i) for i, r in enumerate(owners)]
    assert [x.data_ptr() for x in tiles] == at


def test_tiles_and_workspaces_of_another_size_after_growth() -> None:
    """More rows than ever before: what a captured graph uses is not large enough any more."""
    plan = msattn.make_plan(new_batch([2, 3], [900] * 2), SMALL, "bf16")
    tiles, memory = plan.tiles(4), plan.workspace("lists", (4,), torch.int32)
    plan.update(new_batch([7, 3], [900] * 2))
    assert plan.tiles(4) is not tiles
    assert plan.workspace("lists", (4,), torch.int32) is not memory
    owners = [(0, i) for i in range(7)] + [(1, i) for i in range(7, 10)]
    assert rows_of(plan.tiles(4), plan, 4) == owners


def test_workspaces_of_shorter_contexts_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks asks for a larger one in each; unless a graph has their addresses."""
    for is_capturing in (False, True):
        plan = msattn.make_plan(new_batch([2], [300]), SMALL, "bf16")
        monkeypatch.setattr("msattn.plan.is_capturing", lambda device, now=is_capturing: now)
        plan.launches()
        monkeypatch.undo()
        held = []
        for blocks in range(3, 8):
            plan.update(new_batch([2], [blocks * 128]))
            memory = plan.workspace("copy", (plan.num_blocks, 128), torch.int32)
            held.append(plan.nbytes - sum(x.nbytes for x in plan.tensors) - memory.nbytes)
        assert (max(held) > 0) == is_capturing


def test_what_a_graph_uses_is_there_before_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its zeros would be written by a replay alone; a plan of the graph's own may."""
    batch = new_batch([2, 3], [900] * 2)
    plan = msattn.make_plan(batch, SMALL, "bf16")
    tiles, memory = plan.tiles(4), plan.workspace("lists", (4,), torch.int32)
    monkeypatch.setattr("msattn.plan.is_capturing", lambda device: True)
    plan.update(batch)
    assert plan.tiles(4) is tiles
    assert plan.workspace("lists", (4,), torch.int32) is memory
    with pytest.raises(RuntimeError, match="before the capture"):
        plan.tiles(2)
    with pytest.raises(RuntimeError, match="before the capture"):
        plan.workspace("lists", (8,), torch.int32)
    assert len(msattn.make_plan(batch, SMALL, "bf16").tiles(2).request) == 5


def test_representations_are_short() -> None:
    """In logs and tracebacks nobody wants a pool, and reading one is a sync."""
    batch = new_batch([2, 3], [900] * 2)
    for of in (
        batch,
        msattn.make_plan(batch, SMALL, "bf16"),
        msattn.KVCache.allocate(3, SMALL, v_scale=torch.ones(2, 384)),
        msattn.IndexCache.allocate(3, SMALL),
    ):
        assert "tensor(" not in repr(of) and len(repr(of)) < 800


@pytest.mark.parametrize("requests", [0, 1, 64])
def test_a_batch_of_nothing(requests: int) -> None:
    """All lengths 0, with and without query tokens: as graph capture makes them."""
    for count in (0, 1):
        batch = msattn.Batch.from_lists(
            [count] * requests, [0] * requests, torch.full((requests, 4), INT32_MAX)
        )
        plan = msattn.make_plan(batch, SMALL, "bf16")
        tokens = count * requests
        assert plan.num_blocks == 0
        cache = msattn.KVCache.allocate(1, SMALL)
        index = msattn.IndexCache.allocate(1, SMALL)
        scores = msattn.index_scores(torch.randn(tokens, 2, 128), index, plan)
        assert scores.shape == (2, tokens, 0)
        for ids in (
            msattn.select_blocks(scores, plan),
            msattn.index_select(torch.randn(tokens, 2, 128), index, plan),
        ):
            assert ids.shape == (tokens, 2, 4) and (ids == -1).all()
        q = torch.randn(tokens, 4, 128)
        out, lse = msattn.attend(q, cache, ids * 0, plan, return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_shrink_to_nothing_and_back() -> None:
    inputs = make(CASES["mixed"])
    plan = inputs.plan()
    at = addresses(plan)
    want = run(inputs, plan)
    columns = inputs.batch.page_table.shape[1]
    plan.update(msattn.Batch.from_lists([0], [0], torch.zeros(1, columns)[:, :0].int()))
    ids, out, lse = (x[:0] for x in want)
    ids = msattn.index_select(inputs.index_q, inputs.index, plan)
    assert (ids == -1).all()
    out, lse = msattn.attend(inputs.q, inputs.cache, ids, plan, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    plan.update(inputs.batch)
    assert addresses(plan) == at
    for got, wanted in zip(run(inputs, plan), want, strict=True):
        assert_bitwise_equal("first batch again", got, wanted)


def test_updates_give_what_new_plans_give() -> None:
    """Thirty steps, lengths, tables and kinds of requests changing, in the same buffers."""
    random = Random(0)
    largest = msattn.Batch.from_lists(
        [0] * 5, [0] * 5, torch.zeros(5, 9).int(), max_query_len=40, max_seq_len=1024
    )
    plan = msattn.make_plan(largest, SMALL, "bf16")
    at = addresses(plan)
    for step in range(30):
        lengths = [random.choice((0, 1, 127, 128, 129, 640, 897)) for _ in range(5)]
        lengths = lengths[: random.randint(1, 5)]
        queries = tuple(min(n + 1, random.choice((0, 1, 1, 4, 33))) for n in lengths)
        case = Case("step", queries, tuple(lengths), SMALL, extra_columns=random.randint(0, 1))
        inputs = make(case, seed=step)
        plan.update(inputs.batch)
        assert_same_results(inputs, plan)
    assert addresses(plan) == at
    assert (plan.max_query_len, plan.max_seq_len) == (40, 1024)


def test_growth_within_the_planned_table() -> None:
    """Lengths beyond the first batch's, in the columns that it already had."""
    inputs = make(Case("grown", (3, 1), (1000, 130), SMALL, extra_columns=0))
    small = msattn.Batch.from_lists([1, 1], [100, 5], torch.zeros(2, 8).int())
    plan = msattn.make_plan(small, SMALL, "bf16")
    assert plan.num_blocks == 1
    plan.update(inputs.batch)
    assert plan.num_blocks == 8
    assert_same_results(inputs, plan)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: new_batch([1] * 3, [10] * 3), "at most 2 requests"),
        (lambda: new_batch([1], [1100], 9), "max_seq_len at most 1024"),
    ],
    ids=["requests", "blocks"],
)
def test_a_batch_that_does_not_fit_leaves_the_plan_unchanged(batch: object, message: str) -> None:
    plan = msattn.make_plan(new_batch([1, 3], [200, 300]), SMALL, "bf16")
    before = [getattr(plan, name).clone() for name in BUFFERS]
    bounds = plan.max_query_len, plan.max_seq_len, plan.num_tokens
    with pytest.raises(ValueError, match=message):
        plan.update(batch())
    for name, want in zip(BUFFERS, before, strict=True):
        assert torch.equal(getattr(plan, name), want)
    assert (plan.max_query_len, plan.max_seq_len, plan.num_tokens) == bounds


@pytest.mark.parametrize("fewer", [1, 2, 3])
def test_optimistic_lengths_corrected_on_the_device(fewer: int, seed: int) -> None:
    """Planned with length L, run with L - 1 to L - 3, written into the plan's own buffer.

    The lengths cross the edge of a block on the way.
    """
    lengths = (641, 130, 514, 3)
    query_lens = (4, 2, 1, 3)
    plan = make(Case("optimistic", query_lens, lengths, SMALL), seed=seed).plan()
    shorter = tuple(length - fewer for length in lengths)
    inputs = make(Case("true", query_lens, shorter, SMALL), seed=seed)
    plan.seq_lens.sub_(fewer)
    plan.page_table[:, : inputs.batch.page_table.shape[1]] = inputs.batch.page_table
    ids, out, _ = run(inputs, plan)
    want_ids = expected_block_ids(inputs)
    assert_same_ids("block_ids", ids, want_ids)
    assert_close("out", out, expected_attention(inputs, want_ids)[0])


def test_bounds_far_above_the_lengths_change_nothing(seed: int) -> None:
    """A host that knows nothing but its model's 1M tokens."""
    inputs = make(CASES["mixed"], seed=seed)
    batch = inputs.batch
    loose = msattn.Batch(
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.page_table,
        max_query_len=8192,
        max_seq_len=1 << 20,
    )
    plan = msattn.make_plan(loose, inputs.config, "bf16")
    assert plan.num_blocks == batch.page_table.shape[1]
    assert_same_results(inputs, plan)


def test_one_plan_serves_layers_with_caches_of_their_own(seed: int) -> None:
    first, second = (make(CASES["mixed"], seed=s, page_seed=7) for s in (seed, seed + 1))
    plan = first.plan()
    want = run(first, plan)
    assert_same_results(second, plan)
    for got, wanted in zip(run(first, plan), want, strict=True):
        assert_bitwise_equal("layer 1 after layer 2", got, wanted)


def test_a_table_of_a_wider_buffer(seed: int) -> None:
    """The engine's table is a slice of a larger one, its row stride another than its width."""
    inputs = make(CASES["mixed"], seed=seed)
    rows, columns = inputs.batch.page_table.shape
    wide = torch.full((rows + 2, columns + 61), INT32_MAX, dtype=torch.int32)
    view = wide[1 : rows + 1, 5 : 5 + columns]
    view.copy_(inputs.batch.page_table)
    batch = msattn.Batch(
        inputs.batch.cu_seqlens_q,
        inputs.batch.seq_lens,
        view,
        max_query_len=inputs.batch.max_query_len,
        max_seq_len=inputs.batch.max_seq_len,
    )
    plan = msattn.make_plan(batch, inputs.config, "bf16")
    assert_same_results(inputs, plan)
    plan.update(batch)
    assert_same_results(inputs, plan)


def test_config_and_format_stay_the_plans() -> None:
    config = make_config(topk=7)
    plan = msattn.make_plan(new_batch([1], [5]), config, "FP8")
    plan.update(new_batch([1], [6]))
    assert plan.config is config and plan.kv_format is msattn.KV_FORMATS["fp8_e4m3"]
