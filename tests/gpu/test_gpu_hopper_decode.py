"""Decode and verification on Hopper against the oracle on hostile steps, and under CUDA graphs.

Each step runs as tiles of one token and as tiles of several, which are columns or rows of the
products, whatever the choice would have been.
"""

from __future__ import annotations

import pytest
import torch
from gpu_layer import DEVICE, assert_equals_reference, capture

import msattn
from msattn.testing.cases import CASES, LARGE_CASES, LAYOUTS, M3, Case, make_config
from msattn.testing.compare import (
    assert_attention,
    assert_bitwise_equal,
)
from msattn.testing.make import Inputs, as_bytes, make, make_block_ids

pytestmark = pytest.mark.gpu

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")
FEW = [c.name for c in CASES.values() if c.num_tokens and max(c.query_lens) <= 16]
LENGTHS = (1, 127, 128, 129, 900, 0, 640)
DECODE = Case("decode", (1,) * 7, LENGTHS, make_config(16, 2, topk=4), spare_rows=2)
VERIFY = Case("verify", (4, 1, 8, 0, 3, 2, 16), LENGTHS, make_config(16, 2, topk=4), spare_rows=2)
STEPS = {case.name: case for case in (DECODE, VERIFY)}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    reasons = msattn.why_not("attend", impl="hopper", device=DEVICE)
    if reasons:
        pytest.skip(reasons[0])


@pytest.fixture(params=["by_token", "by_union", "by_rows"], autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of one token each, or of as many as fit, also where the twin would be as fast."""
    from msattn.kernels.hopper import attend_decode, attend_rows

    name: str = request.param
    monkeypatch.setattr(attend_decode, "DIRECT_ENTRIES", 1 << 30 if name == "by_token" else 0)
    monkeypatch.setattr(attend_decode, "pays", lambda *_: True)
    monkeypatch.setattr(attend_rows, "MIN_TOKENS", 1 if name == "by_rows" else 1 << 30)
    return name


def run(
    inputs: Inputs, ids: torch.Tensor, *, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = inputs.new_out()
    lse = torch.full(out.shape[:2], torch.nan, device=out.device)
    before = out.clone()
    msattn.attend(
        inputs.q,
        inputs.cache,
        ids,
        inputs.plan(),
        softmax_scale=softmax_scale,
        q_scale=inputs.q_scale,
        out=out,
        lse_out=lse,
        impl="hopper",
    )
    tokens = inputs.case.num_tokens
    assert_bitwise_equal("spare rows", out[tokens:], before[tokens:])
    return out, lse


@pytest.mark.parametrize("name", FEW)
def test_every_case(name: str) -> None:
    inputs = make(CASES[name], device=DEVICE)
    for hostile in (True, False):
        ids = make_block_ids(inputs, hostile=hostile)
        out, lse = run(inputs, ids)
        assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("query", ["model", "e4m3"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats_and_queries(kv_format: str, query: str, step: str) -> None:
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    dtype = torch.float8_e4m3fn if query == "e4m3" else dtype
    inputs = make(STEPS[step], kv_format=kv_format, query_dtype=dtype, scales="0d", device=DEVICE)
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("scales", ["float", "slots"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, scales: str, kv_format: str) -> None:
    inputs = make(VERIFY, kv_format=kv_format, layout=LAYOUTS[layout], scales=scales, device=DEVICE)
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16, 32, 64])
def test_groups(group: int, kv_format: str) -> None:
    config = make_config(group, 2 if group < 32 else 1, topk=4)
    inputs = make(
        Case("groups", (7, 1, 12), (700, 20, 400), config), kv_format=kv_format, device=DEVICE
    )
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("slots", [0, 1, 7, 16, 32, 64])
def test_ids_of_any_width(slots: int) -> None:
    inputs = make(VERIFY, device=DEVICE)
    shape = (inputs.case.num_rows, 2, slots)
    ids = torch.randint(-2, 9, shape, dtype=torch.int32).to(DEVICE)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("softmax_scale", [0.3, -0.1, 0.0])
def test_softmax_scales(softmax_scale: float) -> None:
    inputs = make(VERIFY, device=DEVICE)
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids, softmax_scale=softmax_scale)
    assert_attention(inputs, ids, out, lse, softmax_scale=softmax_scale)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("name", ["decode_32_at_32k", "verify_16_at_16k"])
def test_a_large_step(name: str, kv_format: str) -> None:
    inputs = make(LARGE_CASES[name], kv_format=kv_format, device=DEVICE)
    plan = inputs.plan()
    ids = msattn.index_select(inputs.index_q, inputs.index, plan, impl="triton")
    out, lse = run(inputs, ids)
    assert_equals_reference(inputs.q, inputs.cache, ids, plan, out, lse)
    again, lse_again = run(inputs, ids)
    assert_bitwise_equal("out", again, out)
    assert_bitwise_equal("lse", lse_again, lse)


def step_at(length: int, query_len: int, kv_format: str) -> Inputs:
    requests = 3
    case = Case(f"at {length}", (query_len,) * requests, (length,) * requests, M3)
    return make(case, kv_format=kv_format, device=DEVICE)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3"])
def test_a_graph_of_length_1_at_100k(kv_format: str, query_len: int) -> None:
    long = step_at(100_000, query_len, kv_format)
    table = long.batch.page_table
    short = msattn.Batch.from_lists(
        [query_len] * 3, [1] * 3, table, max_query_len=query_len, max_seq_len=table.shape[1] * 128
    )
    plan = msattn.make_plan(short, M3, kv_format)
    out, ids = long.new_out(), make_block_ids(long)

    def launch() -> None:
        msattn.attend(long.q, long.cache, ids, plan, out=out, impl="hopper")

    replay = capture(launch)
    plan.update(long.batch)
    for seed in range(3):
        ids.copy_(make_block_ids(long, seed=seed))
        out.fill_(torch.nan)
        replay()
        assert_attention(long, ids, out)


@pytest.mark.parametrize("query_len", [1, 4])
def test_a_thousand_replays(query_len: int) -> None:
    """Lengths and ids move; each replay has the bits of a call of its own, counters included."""
    inputs = step_at(6000, query_len, "bf16")
    plan, out = inputs.plan(), inputs.new_out()
    ids = make_block_ids(inputs, hostile=False)

    def launch() -> None:
        msattn.attend(inputs.q, inputs.cache, ids, plan, out=out, impl="hopper")

    replay = capture(launch)
    side, noise = torch.cuda.Stream(), torch.zeros(1 << 24, device=DEVICE)
    fresh = inputs.plan()
    for i in range(1000):
        lengths = torch.tensor([query_len + (i * 37 + j * 911) % 5990 for j in range(3)])
        ids.copy_(ids.roll(1, 0))
        for each in (plan, fresh):
            each.seq_lens.copy_(lengths)
        with torch.cuda.stream(side):
            noise.add_(1)
        replay()
        if i % 50 == 0:
            want = msattn.attend(inputs.q, inputs.cache, ids, fresh, impl="hopper")
            assert_bitwise_equal(f"replay {i}", as_bytes(out), as_bytes(want))
