"""Selection by way of the compact keys on long contexts: the ids of all scores, in any step."""

from __future__ import annotations

import pytest
import torch
from gpu_layer import DEVICE, capture

import msattn
from msattn.kernels.triton import indexer_compact
from msattn.testing.cases import M3
from msattn.testing.compare import assert_bitwise_equal, assert_same_ids
from msattn.testing.index_keys import KINDS

pytestmark = pytest.mark.gpu

REQUESTS, BLOCKS = 8, 1088
LENGTHS = [BLOCKS * 128 - 37 * r for r in range(REQUESTS)]


def make_step(
    query_len: int, first_page: int = 0, lengths: list[int] = LENGTHS
) -> tuple[msattn.Plan, torch.Tensor]:
    """A plan whose pages, in any order, are those from first_page on; and its page table."""
    generator = torch.Generator().manual_seed(7)
    pages = torch.randperm(len(lengths) * BLOCKS, generator=generator).view(-1, BLOCKS)
    table = (pages + first_page).int()
    batch = msattn.Batch.from_lists([query_len] * len(lengths), lengths, table, device=DEVICE)
    return msattn.make_plan(batch, M3, "bf16"), table.to(DEVICE)


def fill(index: msattn.IndexCache, table: torch.Tensor, kind: str, query_len: int) -> torch.Tensor:
    """Keys of that kind by store_index_k; returns the queries ``[T, Hi, Di]``."""
    generator, queries = torch.Generator().manual_seed(11), []
    heads, dim = M3.num_index_heads, M3.index_head_dim
    for request in range(len(table)):
        keys, asked = KINDS[kind](BLOCKS * 128, query_len * heads, dim, generator)
        place = torch.arange(BLOCKS * 128, device=DEVICE)
        slots = table[request, place // 128].long() * 128 + place % 128
        msattn.store_index_k(keys.to(DEVICE, torch.bfloat16), index, slots)
        queries.append(asked.view(query_len, heads, dim))
    return torch.cat(queries).to(DEVICE, index.tensor.dtype)


def plain(index: msattn.IndexCache) -> msattn.IndexCache:
    return msattn.IndexCache(index.tensor, index.format)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not pay."""
    monkeypatch.setattr(indexer_compact, "MIN_PAGES", 0)


@pytest.mark.parametrize("query_len", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_all_scores(kind: str, dtype: torch.dtype, query_len: int) -> None:
    plan, table = make_step(query_len)
    index = msattn.IndexCache.allocate(REQUESTS * BLOCKS, M3, dtype, compact=True, device=DEVICE)
    index_q = fill(index, table, kind, query_len)
    assert indexer_compact.pays(index_q, index, plan)
    want = msattn.index_select(index_q, plain(index), make_step(query_len)[0])
    assert_same_ids("block_ids", msattn.index_select(index_q, index, plan), want)


def test_pages_beyond_2_31_elements() -> None:
    first = (1 << 31) // (128 * 128) + 5
    plan, table = make_step(1, first)
    index = msattn.IndexCache.allocate(first + REQUESTS * BLOCKS, M3, compact=True, device=DEVICE)
    assert index.compact is not None and index.compact.tensor.numel() > 1 << 31
    index_q = fill(index, table, "random", 1)
    want = msattn.index_select(index_q, plain(index), make_step(1, first)[0])
    assert_same_ids("block_ids", msattn.index_select(index_q, index, plan), want)
    copy = index.compact.tensor[first:].clone()
    index.compact.tensor[first:] = 0
    msattn.refresh_compact_keys(index, torch.arange(first, index.num_pages, device=DEVICE))
    assert_bitwise_equal("compact keys", index.compact.tensor[first:], copy)


def test_a_captured_step_of_growing_requests() -> None:
    """100 replays: keys are stored and blocks selected, while lengths move on the device."""
    plan, table = make_step(1)
    index = msattn.IndexCache.allocate(REQUESTS * BLOCKS, M3, compact=True, device=DEVICE)
    fill(index, table, "clustered", 1)
    heads, dim = M3.num_index_heads, M3.index_head_dim
    index_q = torch.zeros(REQUESTS, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    index_k = torch.zeros(REQUESTS, dim, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.full((REQUESTS,), -1, dtype=torch.int64, device=DEVICE)
    ids = torch.empty(REQUESTS, M3.num_kv_heads, M3.topk, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        msattn.store_index_k(index_k, index, slots)
        msattn.index_select(index_q, index, plan, out=ids)

    replay = capture(step)
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    other = make_step(1)[0]
    for number in range(100):
        length = 128 * BLOCKS - 100 + number if number % 7 else 1 + 997 * number
        lengths = torch.tensor([max(1, length - 200 * r) for r in range(REQUESTS)], device=DEVICE)
        plan.seq_lens.copy_(lengths)
        index_q.normal_(generator=generator)
        index_k.normal_(generator=generator)
        last = lengths - 1
        pages = table.gather(1, (last // 128).unsqueeze(1)).squeeze(1).long()
        slots.copy_(pages * 128 + last % 128)
        replay()
        other.seq_lens.copy_(lengths)
        want = msattn.index_select(index_q, plain(index), other)
        assert_same_ids(f"step {number}", ids, want)
