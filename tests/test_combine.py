"""Stage 5: merging attention states of disjoint sets of keys."""

from __future__ import annotations

import math

import pytest
import torch

import msattn
from msattn.reference import combine as reference_combine
from msattn.testing.cases import Case, make_config
from msattn.testing.compare import assert_bitwise_equal, assert_close, assert_lse
from msattn.testing.make import make, make_block_ids, poisoned, strided

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INF = math.inf


def new_parts(
    count: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parts of 5 tokens, 4 heads and 32 elements, and their LSEs."""
    outs = [torch.randn(5, 4, 32).to(dtype) for _ in range(count)]
    return outs, [3 * torch.randn(5, 4) for _ in range(count)]


def truth(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 state of the union; parts of LSE -inf weigh nothing, whatever they hold."""
    stacked = torch.stack(lses).double()
    lse = stacked.logsumexp(0)
    out = torch.zeros(outs[0].shape, dtype=torch.float64)
    for part, part_lse in zip(outs, stacked, strict=True):
        weight = (part_lse - lse).exp().nan_to_num(0.0).unsqueeze(-1)
        out += torch.where(weight > 0, part.double(), 0.0) * weight
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_merge_is_the_fp64_one(count: int, dtype: torch.dtype) -> None:
    outs, lses = new_parts(count, dtype)
    out, lse = msattn.merge_states(outs, lses)
    want, want_lse = truth(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close("out", out, want)
    assert_lse("lse", lse, want_lse, bound=1e-5)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_parts_empty(count: int) -> None:
    """Contract 6: (0, -inf), no NaN, though the parts' memory is NaN."""
    outs = [poisoned((3, 2, 16), torch.bfloat16) for _ in range(count)]
    out, lse = msattn.merge_states(outs, [torch.full((3, 2), -INF)] * count)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_part_changes_nothing(empty: int) -> None:
    """Request by request: weight 0 for a part without keys, NaN or infinities behind it."""
    outs, lses = new_parts(3)
    rows = torch.tensor([0, 3])
    lses[empty][rows] = -INF
    outs[empty][rows] = torch.tensor([math.nan, INF]).view(2, 1, 1)
    out, lse = msattn.merge_states(outs, lses)
    others = [i for i in range(3) if i != empty]
    want, want_lse = msattn.merge_states([outs[i] for i in others], [lses[i] for i in others])
    assert_bitwise_equal("out", out[rows], want[rows])
    assert_bitwise_equal("lse", lse[rows], want_lse[rows])
    assert_close("out", out, truth(outs, lses)[0])


def test_one_part_is_itself() -> None:
    outs, lses = new_parts(1, torch.bfloat16)
    out, lse = msattn.merge_states(outs, lses)
    assert_bitwise_equal("out", out, outs[0])
    assert_bitwise_equal("lse", lse, lses[0])


def test_far_apart_lses_neither_overflow_nor_vanish() -> None:
    outs, _ = new_parts(2)
    for a, b in ((1000.0, -1000.0), (-1e4, -1e4), (88.0, 90.0), (3e38, -3e38)):
        lses = [torch.full((5, 4), a), torch.full((5, 4), b)]
        out, lse = msattn.merge_states(outs, lses)
        want, want_lse = truth(outs, lses)
        assert_close("out", out, want)
        assert torch.allclose(lse.double(), want_lse, rtol=1e-6)


@pytest.mark.parametrize("alias", [None, 0, 1])
def test_outputs_may_be_parts(alias: int | None) -> None:
    outs, lses = new_parts(2)
    want, want_lse = truth(outs, lses)
    out = poisoned((5, 4, 32), torch.float32) if alias is None else outs[alias]
    lse_out = poisoned((5, 4), torch.float32) if alias is None else lses[alias]
    got = msattn.merge_states(outs, lses, out=out, lse_out=lse_out)
    assert got[0] is out and got[1] is lse_out
    assert_close("out", out, want)
    assert_lse("lse", lse_out, want_lse, bound=1e-5)


def test_parts_and_outputs_of_any_strides() -> None:
    outs, lses = new_parts(2, torch.bfloat16)
    want, want_lse = msattn.merge_states(outs, lses)
    out, lse_out = strided(torch.zeros_like(outs[0])), poisoned((4, 5), torch.float32).T
    by_head = outs[1].transpose(0, 1).contiguous().transpose(0, 1)
    views = [strided(outs[0]), by_head], [lses[0].T.contiguous().T, strided(lses[1])]
    msattn.merge_states(*views, out=out, lse_out=lse_out)
    assert_bitwise_equal("out", out, want)
    assert_bitwise_equal("lse", lse_out, want_lse)


def test_no_rows() -> None:
    out, lse = msattn.merge_states([torch.zeros(0, 4, 16)], [torch.zeros(0, 4)])
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_attention_over_shards_of_the_blocks_merges_into_the_whole(ranks: int, seed: int) -> None:
    """Every rank attends over its own blocks, some over none; short requests, padding, K = 16."""
    inputs = make(
        Case("sharded", (1, 2, 1, 1), (2100, 300, 0, 100), make_config(topk=16)), seed=seed
    )
    ids, plan, q = make_block_ids(inputs, seed=seed), inputs.plan(), inputs.q.float()
    whole, whole_lse = msattn.attend(q, inputs.cache, ids, plan, return_lse=True)
    shards = [ids.where(ids % ranks == rank, -1) for rank in range(ranks)]
    states = [msattn.attend(q, inputs.cache, s, plan, return_lse=True) for s in shards]
    assert any((lse == -INF).any() for _, lse in states)
    out, lse = msattn.merge_states(*map(list, zip(*states, strict=True)))
    assert_close("out", out, whole)
    assert_lse("lse", lse, whole_lse, bound=1e-5)


@pytest.mark.parametrize("split", [0, 1, 127, 128, 190, 299])
def test_states_of_a_prefix_and_of_the_rest(split: int, seed: int) -> None:
    """LSEs are natural logarithms of scaled logits: only those merge into the whole's state."""
    config = make_config(group=1, kv_heads=1)
    q, k, v = (torch.randn(300, 1, 128) for _ in range(3))
    logits = 128**-0.5 * q[-1, 0].double() @ k[:, 0].double().T

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cache = msattn.KVCache.allocate(3, config, "fp32")
        count = len(range(300)[keys])
        msattn.store_kv(k[keys], v[keys], cache, torch.arange(count))
        plan = msattn.make_plan(
            msattn.Batch.from_lists([1], [count], [[0, 1, 2]]), config, cache.format
        )
        ids = torch.arange(3, dtype=torch.int32).view(1, 1, 3)
        return msattn.attend(q[-1:], cache, ids, plan, return_lse=True)

    states = part(slice(split)), part(slice(split, None))
    out, lse = msattn.merge_states(*map(list, zip(*states, strict=True)))
    assert_close("out", out[0, 0], logits.softmax(0) @ v[:, 0].double())
    assert_lse("lse", lse[0, 0], logits.logsumexp(0), bound=1e-5)


def test_chunks_of_any_size_merge_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = new_parts(3)
    want, want_lse = msattn.merge_states(outs, lses)
    monkeypatch.setattr(reference_combine, "CHUNK_BYTES", 1)
    out, lse = msattn.merge_states(outs, lses, out=outs[0], lse_out=lses[0])
    assert_bitwise_equal("out", out, want)
    assert_bitwise_equal("lse", lse, want_lse)
