"""Stage 4 in Triton: both schedules, every format, against the fp64 oracle within the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import msattn
from msattn.kernels.triton import attend, attend_kv_major, attend_union, dequantize, tiles
from msattn.testing.cases import CASES, LAYOUTS, Case, ScaleKind, make_config, scale_kinds_of
from msattn.testing.compare import (
    assert_attention,
    assert_bitwise_equal,
)
from msattn.testing.make import Inputs, make, make_block_ids, poisoned

pytestmark = [
    # numpy's, in the interpreter: of NaN and -inf in masked rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FORMATS = [fmt for fmt in msattn.KV_FORMATS.values() if fmt.name != "fp32"]
SMALL_CASES = [
    case for case in CASES.values() if case.num_tokens <= 90 and case.config.num_q_heads <= 16
]


def run(inputs: Inputs, block_ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """out and LSE of all rows, in poisoned buffers."""
    shape, device = (inputs.case.num_rows, inputs.config.num_q_heads), inputs.q.device
    options.setdefault("lse_out", poisoned(shape, torch.float32, device))
    return msattn.attend(
        inputs.q,
        inputs.cache,
        block_ids,
        inputs.plan(),
        q_scale=inputs.q_scale,
        out=inputs.new_out(),
        impl="triton",
        **options,
    )


def check(inputs: Inputs, block_ids: torch.Tensor) -> None:
    out, lse = run(inputs, block_ids)
    tokens = inputs.case.num_tokens
    assert_attention(inputs, block_ids, out, lse)
    spare, spare_lse = out[tokens:], lse[tokens:]
    assert spare.isnan().all() and spare_lse.isnan().all(), "rows of no token were written"


@pytest.fixture
def kv_major(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The KV-major schedule serves every step, in several chunks and items; counts its launches."""

    @triton.jit
    def always(overlap_ptr, TOKENS: tl.constexpr):
        return tl.load(overlap_ptr) >= 0

    for module in (attend_union, attend_kv_major):
        monkeypatch.setattr(module, "shares_little", always)
    monkeypatch.setattr(attend, "MIN_QUERY_LEN", 2)
    monkeypatch.setattr(attend_kv_major, "ITEM_PICKS", 16)
    monkeypatch.setattr(attend, "PARTIAL_BYTES", 64 << 10)
    launches: list[int] = []
    chunk = attend_kv_major._attend_chunk

    def counted(*args: Any) -> None:
        launches.append(1)
        chunk(*args)

    monkeypatch.setattr(attend_kv_major, "_attend_chunk", counted)
    return launches.__len__


@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_attention_is_the_oracles(case: Case, seed: int, device: torch.device) -> None:
    """Ids in any order, -1 and wild integers anywhere, duplicates, ids behind the visible."""
    inputs = make(case, seed=seed, device=device)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize(
    ("fmt", "scales"), [(f, s) for f in FORMATS for s in scale_kinds_of(f)], ids=str
)
def test_every_format_and_scale(
    fmt: msattn.KVFormat, scales: ScaleKind, seed: int, device: torch.device
) -> None:
    """A decode row, verified rows and a prompt's rows, on each of the tile loaders.

    With an fp8 query where its scale is a tensor, and a bf16 one elsewhere.
    """
    query_dtype = torch.float8_e4m3fn if scales in ("0d", "slice") else torch.bfloat16
    for lengths in (((1,), (300,)), ((3, 20), (131, 150))):
        case = Case("formats", *lengths, make_config())
        inputs = make(
            case, seed=seed, kv_format=fmt, scales=scales, query_dtype=query_dtype, device=device
        )
        check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_pages_are_converted_once_for_long_prompts(
    fmt: msattn.KVFormat, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scratch gives what the loaders give; 16 bit pools need none."""
    inputs = make(Case("long", (40, 1), (200, 129), make_config()), kv_format=fmt, device=device)
    ids = make_block_ids(inputs, seed=seed)
    narrow = fmt.is_fp8 or fmt.scale_group > 0
    assert dequantize.pays(inputs.cache, inputs.plan()) == narrow
    check(inputs, ids)
    monkeypatch.setattr(dequantize, "COPY_BYTES", 0)
    assert not dequantize.pays(inputs.cache, inputs.plan())
    check(inputs, ids)


@pytest.mark.parametrize("schedule", ["union", "kv_major"])
@pytest.mark.parametrize("form", ["columns", "one for each head"])
def test_scales_of_slots_that_lie_apart(
    form: str, schedule: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    if schedule == "kv_major":
        request.getfixturevalue("kv_major")
    inputs = make(CASES["mixed"], kv_format="fp8_e4m3", scales="slots", device=device)
    given = inputs.cache.k_scale, inputs.cache.v_scale
    if form == "columns":
        scales = [poisoned((x.shape[1], 7), x.dtype, device)[:, 2:4].T.copy_(x) for x in given]
    else:
        each = torch.tensor([[0.7], [1.3]], device=device)
        scales = [(each * i).expand_as(x) for i, x in enumerate(given, 1)]
    assert all(x.stride(1) != 1 for x in scales)
    k_scale, v_scale = scales
    ids = make_block_ids(inputs)
    check(replace(inputs, cache=replace(inputs.cache, k_scale=k_scale, v_scale=v_scale)), ids)


@pytest.mark.parametrize("schedule", ["union", "kv_major"])
def test_heads_that_lie_far_apart(
    schedule: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """The last is 2^31 elements behind the first: memory is reserved, not touched."""
    if device.type != "cpu":
        pytest.skip("on a GPU memory is not reserved alone")
    if schedule == "kv_major":
        request.getfixturevalue("kv_major")
    inputs = make(Case("far", (3,), (300,), make_config(group=18, kv_heads=2, topk=2)))
    heads, dim, stride = 36, 128, (1 << 31) // 35 + 8
    q = torch.empty(heads * stride, dtype=inputs.q.dtype)
    q = q.as_strided((3, heads, dim), (dim, stride, 1)).copy_(inputs.q)
    check(replace(inputs, q=q), make_block_ids(inputs))


@pytest.mark.parametrize("case", ["decode_padded", "verify", "mixed"])
def test_pages_by_the_copy_engine(
    case: str, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, in the interpreter too: whole tiles, one moved to where its sequence ends."""
    if device.type == "cpu":
        monkeypatch.setattr(attend_union, "_use_bulk_copies", lambda cache, direct: True)
    inputs = make(CASES[case], seed=seed, device=device)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        *((layout, "union") for layout in LAYOUTS.values()),
        *((layout, "kv_major") for layout in [*LAYOUTS.values()][1::2]),
    ],
    ids=str,
)
def test_every_layout(
    layout: Any, schedule: str, seed: int, device: torch.device, request: pytest.FixtureRequest
) -> None:
    if schedule == "kv_major":
        launches = request.getfixturevalue("kv_major")
    inputs = make(CASES["mixed"], seed=seed, layout=layout, device=device)
    check(inputs, make_block_ids(inputs, seed=seed))
    assert schedule == "union" or launches() > 2


@pytest.mark.parametrize(
    ("case", "fmt"),
    [
        *(("mixed", fmt.name) for fmt in FORMATS),
        *(("prefill_beyond_topk", name) for name in ("bf16", "nvfp4")),
        ("more_queries_than_keys", "fp8_e4m3"),
    ],
)
def test_kv_major(
    case: str, fmt: str, seed: int, device: torch.device, kv_major: Callable[[], int]
) -> None:
    """Reverse index, items, chunks and the merge, hostile ids included."""
    inputs = make(CASES[case], seed=seed, kv_format=fmt, device=device)
    check(inputs, make_block_ids(inputs, seed=seed))
    assert kv_major()


@pytest.mark.parametrize(("group", "query_len"), [(1, 1), (3, 9), (8, 1), (20, 9), (64, 1), (1, 9)])
def test_group_sizes(group: int, query_len: int, seed: int, device: torch.device) -> None:
    config = make_config(group=group, kv_heads=2, topk=3)
    inputs = make(Case("group", (query_len,), (400,), config), seed=seed, device=device)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize(
    ("case", "splits"), [("decode_padded", 2), ("decode_padded", 4), ("verify", 4), ("mixed", 2)]
)
def test_lists_split_over_programs(
    case: str, splits: int, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More programs than blocks, too: the last to arrive merges what there is, again and again."""
    choose = attend_union.choose
    monkeypatch.setattr(attend_union, "choose", lambda *args: replace(choose(*args), splits=splits))
    inputs = make(CASES[case], seed=seed, device=device)
    plan, ids = inputs.plan(), make_block_ids(inputs, seed=seed)
    check(inputs, ids)
    first = msattn.attend(inputs.q, inputs.cache, ids, plan, impl="triton")
    again = msattn.attend(inputs.q, inputs.cache, ids, plan, impl="triton")
    assert_bitwise_equal("out", again, first)


@pytest.mark.parametrize("width", [0, 1, 7, 40, 300])
def test_ids_of_any_width(width: int, seed: int, device: torch.device) -> None:
    """K of the ids is theirs; more than a list's 256 makes tiles of one token."""
    inputs = make(CASES["verify"], seed=seed, device=device)
    shape = (inputs.case.num_rows, 2, width)
    ids = torch.randint(-2, 9, shape, dtype=torch.int32).to(device)
    check(inputs, ids)


@pytest.mark.parametrize(
    ("softmax_scale", "schedule"),
    [(0.5, "union"), (-0.25, "union"), (0.0, "union"), (-0.25, "kv_major"), (0.0, "kv_major")],
)
def test_any_softmax_scale(
    softmax_scale: float,
    schedule: str,
    seed: int,
    device: torch.device,
    request: pytest.FixtureRequest,
) -> None:
    if schedule == "kv_major":
        request.getfixturevalue("kv_major")
    inputs = make(Case("scale", (1, 9), (300, 131), make_config()), seed=seed, device=device)
    ids = make_block_ids(inputs, seed=seed)
    out, lse = run(inputs, ids, softmax_scale=softmax_scale)
    assert_attention(inputs, ids, out, lse, softmax_scale=softmax_scale)


def test_the_overlap_decides(device: torch.device) -> None:
    """Tokens that all chose the same block share much; tokens that all chose others, little."""
    inputs = make(Case("overlap", (64,), (64 * 128,), make_config(topk=1)), device=device)
    same = torch.full((64, 2, 1), 5, dtype=torch.int32, device=device)
    other = torch.arange(64, dtype=torch.int32, device=device).view(64, 1, 1).expand(64, 2, 1)
    for ids, entries in ((same, 64 // 8 * 2), (other, 64 * 2)):
        plan = inputs.plan()
        lists = attend_union.make_lists(ids, inputs.cache, plan, 8, 8)
        assert lists.overlap.tolist() == [entries, 128]
    assert 64 // 8 * 2 * 8 <= 128 * tiles.PICK_COST.value < 64 * 2 * 8


def test_lists_of_tiles_in_parts(device: torch.device) -> None:
    """12 tokens, 4 of them multiplied together: an entry counts for each part that chose it."""
    case = Case("parts", (13, 0, 3), (2000, 5, 131), make_config(topk=4))
    inputs = make(case, device=device)
    ids = make_block_ids(inputs, hostile=False)
    plan = inputs.plan()
    lists = attend_union.make_lists(ids, inputs.cache, plan, 12, 4)
    tiles = [(0, 0, 13, 2000), (0, 12, 13, 2000), (2, 13, 16, 131)]
    assert [tuple(row) for row in lists.tiles.tolist() if row[0] >= 0] == tiles
    multiplied = picks = 0
    for tile, (request, first, end, _) in enumerate(tiles):
        for head in range(2):
            rows = ids[first : min(first + 12, end), head].tolist()
            chosen = sorted({block for row in rows for block in row if block >= 0})
            count = int(lists.counts[tile, head])
            entries = lists.entries[tile, head, :count].tolist()
            sets = [sum(1 << t for t, row in enumerate(rows) if b in row) for b in chosen]
            assert entries == [b << 16 | s for b, s in zip(chosen, sets, strict=True)]
            pages = plan.page_table[request, chosen].tolist()
            assert lists.pages[tile, head, :count].tolist() == pages
            multiplied += sum((s >> part & 15) != 0 for s in sets for part in (0, 4, 8))
            picks += sum(block >= 0 for row in rows for block in row)
    assert lists.overlap.tolist() == [multiplied, picks]


def test_lists_of_a_copy(device: torch.device) -> None:
    """Its pages stand in the order of requests and blocks; those that a token chose are marked."""
    inputs = make(Case("copy", (13, 3), (2000, 131), make_config(topk=4)), device=device)
    ids = make_block_ids(inputs, hostile=False)
    lists = attend_union.make_lists(ids, inputs.cache, inputs.plan(), 8, 8, of_copy=True)
    tiles = [row for row in lists.tiles.tolist() if row[0] >= 0]
    want = torch.zeros(2, 2, 16, dtype=torch.int32)
    for tile, (request, first, end, _) in enumerate(tiles):
        for head in range(2):
            chosen = ids[first : min(first + 8, end), head].unique()
            chosen = chosen[chosen >= 0].cpu()
            want[head, request, chosen.long()] = 1
            pages = lists.pages[tile, head, : lists.counts[tile, head]].tolist()
            assert pages == (request * 16 + chosen).tolist()
    assert lists.chosen.tolist() == want.flatten().tolist()


def test_blocks_beyond_the_bound_are_refused(device: torch.device) -> None:
    columns = 32769
    batch = msattn.Batch.from_lists(
        [1], [1], torch.zeros((1, columns), dtype=torch.int32), max_seq_len=columns * 128
    )
    config = make_config()
    plan = msattn.make_plan(batch, config, "bf16")
    reasons = msattn.why_not("attend", impl="triton", plan=plan, device=device)
    assert reasons == ["32769 blocks of a request are more than 32768"]


@pytest.mark.parametrize(
    ("case", "fmt"), [("decode_padded", "fp8_e4m3"), ("verify", "nvfp4"), ("mixed", "bf16")]
)
def test_one_plan_serves_other_tensors(
    case: str, fmt: str, seed: int, device: torch.device
) -> None:
    """Of other addresses, alignments and strides; a plan keeps the launches of each kind."""
    inputs = make(CASES[case], seed=seed, kv_format=fmt, device=device)
    plan, q = inputs.plan(), inputs.q
    row = q.stride(0)

    def other(offset: int, gap: int) -> torch.Tensor:
        memory = q.new_empty(offset + len(q) * (row + gap))
        return memory.as_strided(q.shape, (row + gap, *q.stride()[1:]), offset)

    for i, (offset, gap) in enumerate([(0, 0), (8, 0), (1, 0), (0, 8), (1, 0), (0, 0)]):
        ids = make_block_ids(inputs, seed=seed + i)
        moved, out = other(offset, gap).copy_(q.roll(i, 0)), other(offset, gap).fill_(torch.nan)
        want, want_lse = msattn.attend(
            moved, inputs.cache, ids, inputs.plan(), return_lse=True, impl="triton"
        )
        lse = want_lse.new_empty(want_lse.shape) if i % 2 else None
        msattn.attend(moved, inputs.cache, ids, plan, out=out, lse_out=lse, impl="triton")
        tokens = inputs.case.num_tokens
        assert_bitwise_equal("out", out[:tokens].contiguous(), want[:tokens])
        if lse is not None:
            assert_bitwise_equal("lse", lse[:tokens], want_lse[:tokens])
