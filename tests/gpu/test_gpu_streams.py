"""Streams side by side, and many runs one after the other: the same bits every time."""

from __future__ import annotations

import pytest
import torch
from gpu_layer import DEVICE, IMPL, run_layer

import msattn
from msattn.testing.cases import M3, Case, make_config
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import make

pytestmark = pytest.mark.gpu

CONFIG = make_config(group=16, kv_heads=4, topk=16)
STEPS = {
    "decode": Case("decode", (1,) * 9, tuple(3000 + 129 * i for i in range(9)), CONFIG),
    "verify": Case("verify", (4, 2, 3), (5000, 131, 2900), CONFIG),
    "prefill": Case("prefill", (200, 1, 65), (4000, 700, 65), CONFIG),
}


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_two_streams_with_plans_of_their_own(kv_format: str) -> None:
    """Workspaces belong to a plan: layers that run at the same time do not meet in them."""
    first, second = (
        make(STEPS[name], seed=seed, kv_format=kv_format, device=DEVICE)
        for seed, name in enumerate(("prefill", "verify"))
    )
    plans = [first.plan(), second.plan()]
    want = [run_layer(x, plan) for x, plan in zip((first, second), plans, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    got: list[list[list[torch.Tensor]]] = [[], []]
    for _ in range(50):
        for i, x in enumerate((first, second)):
            with torch.cuda.stream(streams[i]):
                got[i].append(run_layer(x, plans[i]))
    torch.cuda.synchronize()
    for i in range(2):
        for result in got[i]:
            for name, a, b in zip(("block_ids", "out", "lse"), result, want[i], strict=True):
                assert_bitwise_equal(name, a, b)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "nvfp4"])
def test_a_thousand_runs_back_to_back(step: str, kv_format: str) -> None:
    """Selector and attention, outputs compared on the device: no race, no leftover, no atomics."""
    x = make(STEPS[step], seed=1, kv_format=kv_format, device=DEVICE)
    plan = x.plan()
    ids, out, lse = run_layer(x, plan)
    again = [torch.empty_like(y) for y in (ids, out, lse)]
    different = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        for y in again:
            y.view(torch.uint8).fill_(0xFF)
        msattn.index_select(x.index_q, x.index, plan, out=again[0], impl=IMPL)
        msattn.attend(x.q, x.cache, again[0], plan, out=again[1], lse_out=again[2], impl=IMPL)
        for i, (mine, first) in enumerate(zip(again, (ids, out, lse), strict=True)):
            different[i] += (mine.view(torch.uint8) != first.view(torch.uint8)).any()
    assert different.tolist() == [0, 0, 0]


def test_plans_take_turns_on_one_device() -> None:
    """Two plans, alternating, over one cache: neither sees the other's tiles or workspaces."""
    x = make(Case("m3", (70, 1), (1500, 2300), M3), device=DEVICE)

    def parts() -> list[tuple[msattn.Batch, slice]]:
        table = x.batch.page_table
        return [
            (msattn.Batch.from_lists([70], [1500], table[:1]), slice(0, 70)),
            (msattn.Batch.from_lists([1], [2300], table[1:]), slice(70, 71)),
        ]

    def attend(plan: msattn.Plan, rows: slice) -> torch.Tensor:
        ids = msattn.index_select(x.index_q[rows], x.index, plan, impl=IMPL)
        return msattn.attend(x.q[rows], x.cache, ids, plan, impl=IMPL)

    plans = [(msattn.make_plan(batch, M3, "bf16"), rows) for batch, rows in parts()]
    want = [attend(*pair) for pair in plans]
    for _ in range(20):
        for pair, first in zip(plans, want, strict=True):
            assert_bitwise_equal("out", attend(*pair), first)
