"""Stage 3: the exact choice, its total order, its padding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import msattn
from msattn.reference import selection as reference_selection
from msattn.testing import oracle
from msattn.testing.cases import make_config
from msattn.testing.compare import assert_same_ids
from msattn.testing.make import GARBAGE, head_major, poisoned

INF, NAN = math.inf, math.nan


def decode_plan(
    visible: list[int], config: msattn.MSAConfig, *, spare_columns: int = 0
) -> tuple[msattn.Plan, msattn.Batch]:
    """A decode step whose row r sees ``visible[r]`` blocks, and its batch."""
    columns = max(visible) + spare_columns
    table = torch.zeros(len(visible), columns, dtype=torch.int32)
    # Lengths in the middle of the last block, and at both of its ends.
    lengths = [max(0, 128 * v - (0, 1, 127)[i % 3]) for i, v in enumerate(visible)]
    batch = msattn.Batch.from_lists([1] * len(visible), lengths, table)
    return msattn.make_plan(batch, config, "bf16"), batch


def check(scores: torch.Tensor, visible: list[int], config: msattn.MSAConfig) -> torch.Tensor:
    """Select, compare with the oracle, and return ids ``[T, Hkv, K]``."""
    plan, batch = decode_plan(visible, config)
    ids = msattn.select_blocks(scores, plan)
    assert ids.dtype == torch.int32
    assert_same_ids("block_ids", ids, oracle.select_blocks(scores, batch, config))
    for token, v in zip(ids.tolist(), visible, strict=True):
        for row in token:
            chosen = [b for b in row if b != -1]
            assert row == sorted(set(chosen)) + [-1] * (len(row) - len(chosen))
            assert len(chosen) == min(v, config.topk) and all(0 <= b < v for b in chosen)
    return ids


def one_row(*scores: float, config: msattn.MSAConfig) -> list[int]:
    """Ids of one row and head."""
    return check(torch.tensor(scores).view(1, 1, -1), [len(scores)], config)[0, 0].tolist()


def one_head(topk: int, **forced: int) -> msattn.MSAConfig:
    return make_config(group=1, kv_heads=1, topk=topk, **forced)


@pytest.mark.parametrize(("init", "local"), [(0, 0), (0, 1), (1, 1), (2, 3), (0, 16), (16, 0)])
@pytest.mark.parametrize("topk", [16, 32])
def test_each_row_is_bounded_by_its_own_count(topk: int, init: int, local: int) -> None:
    """One call, rows of 0, 1, 2, 15, 16, 17, 40, 1 ... visible blocks, on both sides of topk."""
    visible = [0, 1, 2, 15, 16, 17, 40, 1, 31, 32, 33, 0, 100]
    config = make_config(kv_heads=2, topk=topk, init_blocks=init, local_blocks=local)
    scores = torch.randn(2, len(visible), max(visible))
    check(scores, visible, config)


def test_all_equal_scores_over_8192_blocks() -> None:
    """The smallest ids win; no buffer for ties overflows."""
    config = make_config(topk=16)
    for value in (0.0, 1.5, -3.0, INF, -INF, NAN):
        ids = check(torch.full((2, 1, 8192), value), [8192], config)
        assert ids[0, 0].tolist() == [*range(15), 8191]


def test_narrow_band_of_scores_over_8192_blocks() -> None:
    """Neighbouring fp32 numbers around 1: no key is truncated, no threshold bin is too large."""
    ulp = 2.0**-23
    steps = torch.randperm(8192)
    scores = (1.0 + steps.double() * ulp).float().view(1, 1, -1)
    ids = check(scores, [8192], one_head(16, local_blocks=0))
    assert scores[0, 0, ids[0, 0].long()].min() == scores.flatten().topk(16).values.min()
    check((1.0 + (steps // 64).double() * ulp).float().view(1, 1, -1), [8192], one_head(16))


@pytest.mark.parametrize("num_blocks", [4096, 4097, 8192])
def test_winners_at_the_far_end(num_blocks: int) -> None:
    scores = torch.rand(2, 1, num_blocks)
    scores[..., -20:] += 1.0
    ids = check(scores, [num_blocks], make_config(topk=16))
    assert (ids[0] >= num_blocks - 20).all()


def test_zeros_of_both_signs_are_equal() -> None:
    """Mixed +0 and -0 at the cut: the smallest ids win, whatever their sign."""
    config = one_head(3, local_blocks=0)
    assert one_row(-0.0, 0.0, -0.0, 0.0, 0.0, config=config) == [0, 1, 2]
    assert one_row(0.0, -0.0, 1.0, 0.0, -0.0, config=config) == [0, 1, 2]
    assert one_row(-1e-45, -0.0, 0.0, 1e-45, -0.0, config=config) == [1, 2, 3]


def test_nan_ranks_below_everything() -> None:
    """Two or more NaN in a row: distinct, valid ids; NaN comes in last, below -inf."""
    config = one_head(3, local_blocks=0)
    negative_nan = -torch.tensor(NAN).item()
    assert one_row(NAN, -INF, NAN, 1.0, -5.0, config=config) == [1, 3, 4]
    assert one_row(NAN, NAN, NAN, NAN, 2.0, config=config) == [0, 1, 4]
    assert one_row(NAN, negative_nan, 1.0, NAN, config=config) == [0, 1, 2]
    scores = torch.randn(2, 50, 40)
    scores[torch.rand(scores.shape) < 0.7] = NAN
    check(scores, [40] * 50, make_config(topk=16))


def test_nan_of_every_payload_and_sign_is_the_same() -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF, -0x400000])
    scores = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([-INF, -3e38])])
    assert scores[:6].isnan().all()
    assert one_row(*[0.0] * 8, config=one_head(4, local_blocks=0)) == [0, 1, 2, 3]
    ids = check(scores.view(1, 1, -1), [8], one_head(4, local_blocks=0))
    assert ids[0, 0].tolist() == [0, 1, 6, 7]


def test_infinities_and_extremes_are_ordinary_scores() -> None:
    config = one_head(3, local_blocks=0)
    assert one_row(3.4e38, INF, -INF, INF, -3.4e38, INF, config=config) == [1, 3, 5]
    assert one_row(-INF, -INF, -INF, -3.4e38, -INF, config=config) == [0, 1, 3]
    # Beyond the constants that other implementations force blocks with.
    assert one_row(2e30, 3e30, -2e30, 1e31, 1e30, 0.0, config=one_head(3)) == [1, 3, 5]


def test_every_order_of_few_scores() -> None:
    """All rows of five scores out of special values, at once."""
    values = (NAN, -INF, -1.0, -0.0, 0.0, 1.0, INF)
    rows = torch.tensor(list(itertools.product(values, repeat=5)))
    rows = rows[torch.randperm(len(rows))[:4000]]
    check(rows.unsqueeze(0), [5] * len(rows), one_head(3))


def test_forced_blocks_survive_the_lowest_scores() -> None:
    scores = torch.arange(10.0)
    scores[9] = NAN
    assert one_row(*scores.tolist(), config=one_head(3)) == [7, 8, 9]
    scores[[0, 1, 8, 9]] = torch.tensor([NAN, -INF, NAN, -INF])
    config = one_head(5, init_blocks=2, local_blocks=2)
    assert one_row(*scores.tolist(), config=config) == [0, 1, 7, 8, 9]
    # The forced ones are exactly topk: no score counts.
    config = one_head(4, init_blocks=2, local_blocks=2)
    assert one_row(*scores.tolist(), config=config) == [0, 1, 8, 9]


def test_local_block_is_each_tokens_own() -> None:
    """Tokens of one request on both sides of a block's edge have different local blocks."""
    config = one_head(2)
    batch = msattn.Batch.from_lists([4], [5 * 128 + 2], torch.zeros(1, 6, dtype=torch.int32))
    scores = torch.zeros(1, 4, 6)
    scores[..., 2] = 1.0
    ids = msattn.select_blocks(scores, msattn.make_plan(batch, config, "bf16"))
    assert ids[:, 0].tolist() == [[2, 4], [2, 4], [2, 5], [2, 5]]


def test_topk_1_is_the_local_block() -> None:
    """The corner case is not full attention."""
    visible = [1, 2, 3, 30]
    ids = check(torch.randn(2, 4, 30), visible, make_config(topk=1))
    assert ids[:, 0, 0].tolist() == [v - 1 for v in visible]


def test_one_visible_block_in_a_wide_row() -> None:
    """Equal scores, one of eight blocks visible: the width of the row is not the count."""
    plan, _ = decode_plan([1, 8], one_head(4))
    ids = msattn.select_blocks(torch.zeros(1, 2, 8), plan)
    assert ids[0, 0].tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize("width", [1, 8, 15, 16])
def test_topk_beyond_the_columns(width: int) -> None:
    """Slots that no column can fill are -1, in a buffer that held garbage."""
    config = make_config(topk=16)
    plan, _ = decode_plan([width], config)
    out = torch.full((1, 2, 16), GARBAGE, dtype=torch.int32)
    msattn.select_blocks(torch.randn(2, 1, width), plan, out=out)
    assert out[0, 0].tolist() == [*range(width)] + [-1] * (16 - width)


@pytest.mark.parametrize("columns", [0, 2, 5, 9])
def test_blocks_behind_the_scores_do_not_exist(columns: int) -> None:
    """Fewer score columns than visible blocks: the last column is the local block."""
    config = one_head(3)
    plan, batch = decode_plan([9], config)
    scores = -torch.arange(float(columns)).view(1, 1, -1)
    ids = msattn.select_blocks(scores, plan)
    assert_same_ids("block_ids", ids, oracle.select_blocks(scores, batch, config))
    assert ids.max() == columns - 1


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38, -0.0])
def test_scores_of_hidden_blocks_are_not_read(garbage: float) -> None:
    visible = [3, 1, 7, 0, 12]
    config = make_config(topk=4)
    plan, batch = decode_plan(visible, config, spare_columns=8)
    scores = torch.randn(2, 5, 20)
    want = oracle.select_blocks(scores, batch, config)
    for row, v in enumerate(visible):
        scores[:, row, v:] = garbage
    assert_same_ids("block_ids", msattn.select_blocks(scores, plan), want)


@pytest.mark.parametrize("strided_out", [False, True], ids=["token_major", "head_major"])
def test_every_slot_of_a_garbage_buffer_is_written(strided_out: bool) -> None:
    """Rows behind the last token, rows that see nothing, and padding slots: all -1."""
    config = make_config(group=1, kv_heads=4, topk=4)
    visible = [0, 2, 9, 0]
    plan, _ = decode_plan(visible, config)
    scores = poisoned((4, 7, 9), torch.float32)
    scores[:, :4] = torch.randn(4, 4, 9)
    out = torch.full((7, 4, 4), GARBAGE, dtype=torch.int32)
    out = head_major(out) if strided_out else out
    assert msattn.select_blocks(scores, plan, out=out) is out
    assert (out[[0, 3, 4, 5, 6]] == -1).all()
    assert out[1].tolist() == [[0, 1, -1, -1]] * 4
    assert (out[2] >= 0).all() and (out[2] < 9).all()


def test_scores_and_ids_of_a_square_step_are_not_transposed() -> None:
    """T = Hkv = 4: only the strides tell tokens from heads."""
    config = make_config(group=1, kv_heads=4, topk=3)
    scores = torch.randn(4, 4, 9)
    plan, batch = decode_plan([9, 8, 7, 2], config)
    want = oracle.select_blocks(scores, batch, config)
    token_major = scores.transpose(0, 1).contiguous().transpose(0, 1)
    block_major = scores.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for view in (scores, token_major, block_major):
        out = head_major(torch.full((4, 4, 3), GARBAGE, dtype=torch.int32))
        assert_same_ids("block_ids", msattn.select_blocks(view, plan, out=out), want)


def test_prefill_rows_follow_their_positions() -> None:
    """Requests of many tokens, empty ones in between, and positions below 0."""
    config = make_config(topk=2)
    table = torch.zeros(5, 5, dtype=torch.int32)
    batch = msattn.Batch.from_lists([300, 0, 4, 7, 1], [300, 77, 2, 515, 0], table)
    scores = torch.randn(2, 312, 5)
    ids = msattn.select_blocks(scores, msattn.make_plan(batch, config, "bf16"))
    assert_same_ids("block_ids", ids, oracle.select_blocks(scores, batch, config))
    assert (ids[300:302] == -1).all() and (ids[311] == -1).all()


def test_chunks_of_any_size_select_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = list(range(40))
    scores = torch.randn(2, 40, 39)
    want = check(scores, visible, make_config(topk=4))
    monkeypatch.setattr(reference_selection, "CHUNK_BYTES", 8 * 2 * 39 * 7)  # seven rows
    assert_same_ids("block_ids", check(scores, visible, make_config(topk=4)), want)
