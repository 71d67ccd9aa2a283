"""Stage 3 in Triton: the stage's tests, served by the kernel, and rows that are hard for it."""

from __future__ import annotations

import math

import pytest
import torch
from test_selection import *  # noqa: F403
from test_selection import check, decode_plan

import msattn
from msattn.kernels.triton.selection import chunks_of
from msattn.testing.cases import make_config
from msattn.testing.compare import assert_bitwise_equal, assert_same_ids
from msattn.testing.make import GARBAGE

pytestmark = [
    pytest.mark.usefixtures("on_device"),
    # numpy's, in the interpreter: of NaN, infinities and 32-bit arithmetic that wraps.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

NAN, INF = math.nan, math.inf


def both(scores: torch.Tensor, visible: list[int], config: msattn.MSAConfig) -> None:
    """Triton's ids are the reference's."""
    plan, _ = decode_plan(visible, config)
    want = msattn.select_blocks(scores, plan, impl="reference")
    assert_same_ids("block_ids", msattn.select_blocks(scores, plan, impl="triton"), want)


VISIBLE = [0, 16, 17, 255, 258, 1030]
"""Both sides of topk and of a chunk of 256, and several chunks."""

ROWS = {
    "normal": lambda shape: torch.randn(shape),
    "few_values": lambda shape: torch.randint(-3, 4, shape).float(),
    "mostly_nan": lambda shape: torch.where(torch.rand(shape) < 0.985, NAN, torch.randn(shape)),
    "mostly_inf": lambda shape: torch.where(torch.rand(shape) < 0.97, -INF, torch.randn(shape)),
    "nan_and_inf": lambda shape: torch.where(torch.rand(shape) < 0.5, NAN, -INF),
    # Scores that tie at the k-th, at positions whose order is not that of the blocks.
    "few_ties": lambda shape: (2 * torch.randn(shape)).round(),
    "zeros": lambda shape: torch.zeros(shape) * torch.randn(shape),
    # All the best scores at one position of the chunks: the first bound is far too low.
    "one_position": lambda shape: torch.randn(shape) + 10 * (torch.arange(shape[-1]) % 256 == 5),
    "ties_at_one_position": lambda shape: (
        (torch.arange(shape[-1]) % 256 == 5).float().expand(shape)
    ),
    "ascending": lambda shape: torch.arange(float(shape[-1])).expand(shape),
    "descending": lambda shape: -torch.arange(float(shape[-1])).expand(shape),
    "every_magnitude": lambda shape: (
        torch.randint(-(2**31), 2**31 - 1, shape).to(torch.int32).view(torch.float32)
    ),
}


def test_scores_that_lie_far_apart(device: torch.device) -> None:
    """The last of a row's is 2^31 elements behind the first: memory is reserved, not touched."""
    if device.type != "cpu":
        pytest.skip("on a GPU memory is not reserved alone")
    blocks, stride = 260, (1 << 23) + 1
    config = msattn.MSAConfig(1, 1, 1, topk=4)
    scores = torch.empty(blocks * stride).as_strided((1, 1, blocks), (1, 1, stride))
    scores.copy_(torch.arange(float(blocks)))
    both(scores, [blocks], config)


@pytest.mark.parametrize("forced", [(16, 0, 1), (4, 1, 2), (16, 16, 0), (32, 0, 0), (1, 0, 0)])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_kind(name: str, forced: tuple[int, int, int]) -> None:
    topk, init, local = forced
    config = make_config(kv_heads=2, topk=topk, init_blocks=init, local_blocks=local)
    both(ROWS[name]((2, len(VISIBLE), max(VISIBLE))), VISIBLE, config)


@pytest.mark.parametrize("columns", [2049, 4100, 8192, 8193, 32768])
def test_wide_rows(columns: int) -> None:
    """Chunks of 1,024 columns; the best at the chunk's edges, and ties all over."""
    assert chunks_of(columns, 16)[0] == 1024
    scores = torch.randn(2, 3, columns)
    scores[:, 1] = 0.0
    scores[:, 2, 1023::1024] = 7.0
    both(scores, [columns, columns, columns - 1], make_config(topk=16))


def test_as_many_ties_as_a_row_can_have() -> None:
    """None is a number, and the smallest ids are all that tell them apart."""
    both(torch.full((2, 1, 32768), NAN), [32768], make_config(topk=16, local_blocks=0))


def test_rows_do_not_depend_on_the_batch() -> None:
    """Bitwise, whatever is beside them and however wide the scores are."""
    config = make_config(topk=16)
    scores = torch.randn(2, 4, 1200)
    plan, _ = decode_plan([1200, 40, 600, 17], config)
    ids = msattn.select_blocks(scores, plan, impl="triton")
    alone, _ = decode_plan([600], config)
    got = msattn.select_blocks(scores[:, 2:3, :600], alone, impl="triton")
    assert_bitwise_equal("row", got[0], ids[2])


def test_a_plan_updated_to_fewer_rows() -> None:
    """Rows that have lost their request, behind the last one's, are -1."""
    config = make_config(topk=4)
    plan, _ = decode_plan([9, 8, 7], config)
    scores, out = torch.randn(2, 3, 9), torch.full((3, 2, 4), GARBAGE, dtype=torch.int32)
    msattn.select_blocks(scores, plan, out=out, impl="triton")
    table = torch.zeros(1, 9, dtype=torch.int32)
    plan.update(msattn.Batch.from_lists([1], [900], table))
    want = msattn.select_blocks(scores, plan, impl="reference")
    assert_same_ids("ids", msattn.select_blocks(scores, plan, out=out, impl="triton"), want)
    assert (out[1:] == -1).all()


def test_every_order_of_few_scores() -> None:
    """In place of the stage's test: as many rows as the interpreter can do in some seconds."""
    values = torch.tensor([NAN, -INF, -1.0, -0.0, 0.0, 1.0, INF])
    scores = values[torch.randint(len(values), (1, 250, 5))]
    check(scores, [5] * 250, make_config(group=1, kv_heads=1, topk=3))


def test_the_checks_of_the_stage_reach_the_kernel() -> None:
    """impl="auto" is Triton here: else the tests above would be the reference's once more."""
    plan, _ = decode_plan([3], make_config())
    assert msattn.why_not("select_blocks", impl="triton", plan=plan) == []
    check(torch.randn(2, 1, 30), [30], make_config())


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_a_prompt_at_128k(tied: bool) -> None:
    """8,192 tokens, 4 heads, 1,088 blocks."""
    batch = msattn.Batch.from_lists([8192], [1088 * 128], torch.zeros(1, 1088, dtype=torch.int32))
    scores = torch.randn(4, 8192, 1088)
    scores = (scores * 8).round() if tied else scores
    plan = msattn.make_plan(batch, msattn.MSAConfig(), "bf16")
    want = msattn.select_blocks(scores, plan, impl="reference")
    assert_same_ids("block_ids", msattn.select_blocks(scores, plan, impl="triton"), want)
