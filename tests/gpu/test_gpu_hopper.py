"""The Hopper kernels against the oracle on hostile steps, and against their twins on large ones.

Each test runs union tiles and KV-major, whatever the selection would have chosen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_layer import DEVICE, assert_equals_reference, capture

import msattn
from msattn.testing.cases import CASES, LAYOUTS, M3, Case, make_config
from msattn.testing.compare import (
    assert_attention,
    assert_bitwise_equal,
)
from msattn.testing.make import Inputs, make, make_block_ids

pytestmark = pytest.mark.gpu

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")
PREFILL = Case("prefill", (130, 70, 1, 0, 3), (900, 70, 640, 5, 131), make_config(16, 2, topk=4))


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    reasons = msattn.why_not("attend", impl="hopper", device=DEVICE)
    if reasons:
        pytest.skip(reasons[0])


@pytest.fixture(params=["union", "union_of_two", "kv_major", "rows", "rows_yield"], autouse=True)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only one that runs, where there is anything to see: union tiles of three consumers or of
    two, or KV-major in chunks of few tokens; for short prompts equal shares, or KV-major, too."""
    from msattn.kernels.hopper import (
        attend,
        attend_decode,
        attend_kv_major,
        attend_rows,
        attend_union,
    )
    from msattn.kernels.triton import attend as twin

    name: str = request.param
    for module in (attend_union, attend_rows):
        by_block = name in ("kv_major", "rows_yield")
        monkeypatch.setattr(module, "ROW_COST", 1e9 if by_block else 0.0)
    is_short = name.startswith("rows")
    monkeypatch.setattr(attend_rows, "pays_for_prompt", lambda *_: is_short)
    monkeypatch.setattr(attend_decode, "DIRECT_ENTRIES", 0)
    monkeypatch.setattr(attend, "MIN_QUERY_LEN", 0)
    monkeypatch.setattr(attend, "FEW_TOKENS", 0)
    monkeypatch.setattr(attend_union, "MIN_ROWS", 1 << 30 if name == "union_of_two" else 0)
    monkeypatch.setattr(attend_kv_major, "MIN_GROUP", 1)
    monkeypatch.setattr(attend, "MAX_FEW_QUERIES", 0)
    for module in (twin, attend_kv_major):
        monkeypatch.setattr(module, "PARTIAL_BYTES", 1 << 20)
    return name


def run(
    inputs: Inputs, ids: torch.Tensor, *, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels themselves: the choice refuses steps of few query tokens."""
    from msattn.kernels.hopper.attend import attend

    out = inputs.new_out()
    lse = torch.full(out.shape[:2], torch.nan, device=out.device)
    scale = 128**-0.5 if softmax_scale is None else softmax_scale
    q_scale = 1.0 if inputs.q_scale is None else inputs.q_scale
    before = out.clone()
    attend(inputs.q, inputs.cache, ids, inputs.plan(), scale, q_scale, out, lse)
    tokens = inputs.case.num_tokens
    assert_bitwise_equal("spare rows", out[tokens:], before[tokens:])
    return out, lse


@pytest.mark.parametrize("name", [c.name for c in CASES.values() if c.num_tokens])
def test_every_case(name: str) -> None:
    inputs = make(CASES[name], device=DEVICE)
    for hostile in (True, False):
        ids = make_block_ids(inputs, hostile=hostile)
        out, lse = run(inputs, ids)
        assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("query", ["model", "e4m3"])
def test_formats_and_queries(kv_format: str, query: str) -> None:
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    dtype = torch.float8_e4m3fn if query == "e4m3" else dtype
    inputs = make(PREFILL, kv_format=kv_format, query_dtype=dtype, scales="0d", device=DEVICE)
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    inputs = make(PREFILL, layout=LAYOUTS[layout], scales="float", device=DEVICE)
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


def test_queries_that_lie_askew() -> None:
    """At an address that the copy engine does not read from."""
    inputs = make(PREFILL, device=DEVICE)
    memory = torch.empty(inputs.q.numel() + 1, dtype=inputs.q.dtype, device=DEVICE)
    askew = memory[1:].view(inputs.q.shape).copy_(inputs.q)
    assert askew.data_ptr() % 16
    ids = make_block_ids(inputs)
    out, lse = run(replace(inputs, q=askew), ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16, 32, 64])
def test_groups(group: int) -> None:
    config = make_config(group, 2 if group < 32 else 1, topk=4)
    case = Case("groups", (77, 20), (700, 20), config)
    inputs = make(case, device=DEVICE)
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("slots", [1, 7, 16])
def test_ids_of_any_width(slots: int) -> None:
    inputs = make(PREFILL, device=DEVICE)
    shape = (inputs.case.num_rows, 2, slots)
    ids = torch.randint(-2, 9, shape, dtype=torch.int32).to(DEVICE)
    out, lse = run(inputs, ids)
    assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("softmax_scale", [0.3, -0.1, 0.0])
def test_softmax_scales(softmax_scale: float) -> None:
    inputs = make(PREFILL, device=DEVICE)
    ids = make_block_ids(inputs)
    out, lse = run(inputs, ids, softmax_scale=softmax_scale)
    assert_attention(inputs, ids, out, lse, softmax_scale=softmax_scale)


@pytest.mark.parametrize("partial_bytes", [1 << 20, 8 << 20, 280 << 20])
def test_a_block_that_every_token_chose(
    partial_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the work of many programs, beside blocks of one tile; one head at once, and both."""
    from msattn.kernels.hopper import attend_kv_major

    monkeypatch.setattr(attend_kv_major, "PARTIAL_BYTES", partial_bytes)
    case = Case("hot", (600, 300), (9000, 300), make_config(16, 2, topk=4))
    inputs = make(case, device=DEVICE)
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan(), impl="triton")
    hot = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    ids[:, :, 0] = torch.where((ids == hot[:, None]).any(2), ids[:, :, 0], hot)
    out, lse = run(inputs, ids)
    assert_equals_reference(inputs.q, inputs.cache, ids, inputs.plan(), out, lse)
    again, lse_again = run(inputs, ids)
    assert_bitwise_equal("out", again, out)
    assert_bitwise_equal("lse", lse_again, lse)


def test_one_plan_serves_more_rows_than_before() -> None:
    """What it keeps of a shorter step does not end the queries of a longer one."""
    shorter, longer = (
        make(Case("rows", query_lens, (900, 300), PREFILL.config), device=DEVICE)
        for query_lens in ((90, 4), (130, 70))
    )
    kept = make(PREFILL, device=DEVICE).plan()
    for inputs in (shorter, longer, shorter):
        ids, outs = make_block_ids(inputs), []
        for plan in (kept, make(PREFILL, device=DEVICE).plan()):
            plan.update(inputs.batch)
            outs.append(msattn.attend(inputs.q, longer.cache, ids, plan, impl="hopper"))
        assert_bitwise_equal("out", *outs)


def large(kv_format: str, *, shared: bool) -> tuple[Inputs, torch.Tensor]:
    """4,096 tokens after 60K: neighbours choose the same blocks, or any."""
    case = Case("large", (3000, 1096), (65536 + 77, 4000), M3)
    inputs = make(case, kv_format=kv_format, device=DEVICE)
    ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan(), impl="triton")
    if shared:
        ids = ids[torch.arange(len(ids), device=DEVICE) // 64 * 64]
    return inputs, ids.contiguous()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_a_large_step_is_the_twin_s(
    kv_format: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msattn.kernels.hopper import attend_kv_major
    from msattn.kernels.triton import attend as twin

    for module in (twin, attend_kv_major):
        monkeypatch.setattr(module, "PARTIAL_BYTES", 64 << 20)
    inputs, ids = large(kv_format, shared=shared)
    states = [
        msattn.attend(inputs.q, inputs.cache, ids, inputs.plan(), return_lse=True, impl=impl)
        for impl in ("hopper", "triton", "hopper")
    ]
    (out, lse), (other, other_lse), (again, lse_again) = states
    error = (out.float() - other.float()).norm() / other.float().norm()
    assert float(error) < 4e-3 and not out.isnan().any()
    assert torch.allclose(lse, other_lse, atol=1e-3)
    assert_bitwise_equal("out", again, out)
    assert_bitwise_equal("lse", lse_again, lse)


def test_a_graph_is_replayed_for_another_step() -> None:
    config = make_config(16, 2, topk=4)
    first = make(Case("first", (200, 3), (2000, 1000), config), device=DEVICE)
    plan, out = first.plan(), first.new_out()
    q, ids = first.q.clone(), make_block_ids(first)

    def launch() -> None:
        msattn.attend(q, first.cache, ids, plan, out=out, impl="hopper")

    replay = capture(launch)
    replay()
    assert_attention(first, ids, out)
    second = make(Case("second", (100, 103), (901, 300), config), device=DEVICE)
    assert isinstance(first.cache.tensor, torch.Tensor)
    assert isinstance(second.cache.tensor, torch.Tensor)
    pages = len(second.cache.tensor)
    first.cache.tensor.fill_(torch.nan)
    first.cache.tensor[:pages].copy_(second.cache.tensor)
    q.copy_(second.q)
    ids.copy_(make_block_ids(second))
    plan.update(second.batch)
    out.fill_(torch.nan)
    replay()
    assert_attention(second, ids, out)
