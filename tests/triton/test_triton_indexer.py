"""Stage 2 in Triton: block scores, and scores and selection in one, against the fp64 oracle.

Index queries and keys are small integers unless a test says otherwise: every order of summation
then gives the oracle's scores to the bit.
"""

from __future__ import annotations

import math

import pytest
import torch

import msattn
from msattn.arch import capability
from msattn.kernels.triton import index_tiles, indexer
from msattn.testing.cases import CASES, LARGE_CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import (
    assert_bitwise_equal,
    assert_same_ids,
    expected_block_ids,
    expected_scores,
)
from msattn.testing.make import GARBAGE, Inputs, head_major, make, poisoned

CASE_LIST = list(CASES.values())
FEW_ROWS = [
    case for case in CASE_LIST if case.num_rows <= 20
]  # the interpreter selects 50 a second
FORMATS = ("bf16", "fp16", "fp8_e4m3")
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def scores_of(inputs: Inputs, **options: object) -> torch.Tensor:
    shape = (inputs.config.num_index_heads, inputs.case.num_rows, inputs.plan().num_blocks)
    out = poisoned(shape, torch.float32, inputs.q.device)
    if out.numel():
        indexer.index_scores(inputs.index_q, inputs.index, inputs.plan(), out, **options)
    return out


def selection_of(inputs: Inputs) -> torch.Tensor:
    return msattn.index_select(inputs.index_q, inputs.index, inputs.plan(), impl="triton")


@pytest.mark.parametrize("case", CASE_LIST, ids=str)
def test_scores_are_the_oracles(case: Case, seed: int, device: torch.device) -> None:
    inputs = make(case, seed=seed, device=device)
    scores = msattn.index_scores(inputs.index_q, inputs.index, inputs.plan(), impl="triton")
    assert_bitwise_equal("scores", scores.cpu(), expected_scores(inputs))


@pytest.mark.parametrize("case", FEW_ROWS, ids=str)
def test_selection_is_the_oracles(case: Case, seed: int, device: torch.device) -> None:
    inputs = make(case, seed=seed, device=device)
    assert_same_ids("block_ids", selection_of(inputs), expected_block_ids(inputs))


@pytest.mark.parametrize("query_dtype", QUERY_DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_index_dtype(
    fmt: str, query_dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    case = Case("dtypes", (1, 3), (300, 131), make_config())
    inputs = make(case, seed=seed, index_format=fmt, query_dtype=query_dtype, device=device)
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), expected_scores(inputs))


@pytest.mark.parametrize("query_dtype", QUERY_DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_index_dtype_of_real_numbers(
    fmt: str, query_dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    """Operands reach the product unrounded: what is left is the order of an fp32 sum."""
    case = Case("dtypes", (2,), (300,), make_config())
    inputs = make(
        case,
        seed=seed,
        index_format=fmt,
        query_dtype=query_dtype,
        integer_index=False,
        device=device,
    )
    want = expected_scores(inputs)
    native = fmt == "fp8_e4m3" and query_dtype == torch.float8_e4m3fn and device.type == "cuda"
    bound = 1e-3 if native else 3e-6
    finite = want.isfinite()
    got = scores_of(inputs).cpu()
    assert torch.equal(got.isfinite(), finite)
    assert (got - want)[finite].abs().max() <= bound * want[finite].abs().max()


@pytest.mark.parametrize("query_dtype", QUERY_DTYPES, ids=str)
def test_every_e4m3_number_is_a_key(query_dtype: torch.dtype, device: torch.device) -> None:
    """Zeros of both signs, subnormals and NaN among them: token i asks for element i."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 1, 128)
    nan = codes.view(torch.float8_e4m3fn).isnan()
    pool = codes.masked_fill(nan, 0).expand(2, 128, 128).repeat(2, 1, 1)
    pool[2, 5, 7], pool[3, 5, 7] = 0x7F, 0xFF
    batch = msattn.Batch.from_lists([128], [640], torch.arange(5).unsqueeze(0), device=device)
    config = make_config(1, 1)
    plan = msattn.make_plan(batch, config, "bf16")
    index = msattn.IndexCache.from_tensor(pool.view(torch.float8_e4m3fn).to(device), config)
    index_q = (0.5 * torch.eye(128)).unsqueeze(1).to(query_dtype).to(device)
    scores = msattn.index_scores(index_q, index, plan, impl="triton").cpu()
    want = 0.5 * pool[:2, 0].view(torch.float8_e4m3fn).float().T
    assert torch.equal(scores[0, :, :2], want)
    assert scores[0, :, 2:4].isnan().all()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("query_len", [1, 2, 5, 8])
def test_heads_and_verification_lengths(
    heads: int, query_len: int, seed: int, device: torch.device
) -> None:
    case = Case("heads", (query_len, 1), (262, 129), make_config(1, heads, topk=2))
    inputs = make(case, seed=seed, device=device)
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), expected_scores(inputs))


@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_index_head_dims(fmt: str, head_dim: int, seed: int, device: torch.device) -> None:
    dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3" else torch.bfloat16
    case = Case("dims", (3,), (300,), make_config(head_dim=head_dim))
    inputs = make(case, seed=seed, index_format=fmt, query_dtype=dtype, device=device)
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), expected_scores(inputs))


@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("num_splits", [1, 7])
def test_any_tile_and_any_split_score_the_same(
    rows: int, num_splits: int, seed: int, device: torch.device
) -> None:
    case = Case("tiles", (70, 1, 9), (300, 391, 9), make_config())
    inputs = make(case, seed=seed, device=device)
    warps = 8 if rows > 64 else 4
    constants = index_tiles.Constants(rows, warps, 3, 1, keys_first=rows in (16, 32))
    scores = scores_of(inputs, constants=constants, num_splits=num_splits)
    assert_bitwise_equal("scores", scores.cpu(), expected_scores(inputs))


def test_nan_of_a_visible_key_makes_its_block_nan(device: torch.device) -> None:
    case = Case("nan", (3,), (900,), make_config())
    inputs = make(case, device=device)
    page = int(inputs.batch.page_table[0, 2])
    inputs.index.tensor[page, 11, 3] = math.nan
    scores = scores_of(inputs).cpu()
    assert scores[:, :, 2].isnan().all()
    want = expected_scores(inputs)
    assert torch.equal(scores.nan_to_num(7.5), want.nan_to_num(7.5))
    assert_same_ids("block_ids", selection_of(inputs), expected_block_ids(inputs))


@pytest.mark.parametrize("unowned", [math.nan, math.inf, 100.0])
def test_negative_scores_do_not_lean_to_keys_that_are_not_there(
    unowned: float, device: torch.device
) -> None:
    config = make_config()
    inputs = make(Case("negative", (1, 1), (129, 250), config), device=device)
    inputs.index.tensor[inputs.owned] = -20.0 / config.index_head_dim
    inputs.fill_unowned(unowned)
    index_q = torch.ones_like(inputs.index_q)
    scores = msattn.index_scores(index_q, inputs.index, inputs.plan(), impl="triton")
    assert torch.allclose(scores, torch.tensor(-20.0, device=device), rtol=1e-2)


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1, -(2**31)])
def test_blocks_without_a_page_score_minus_infinity(page: int, device: torch.device) -> None:
    inputs = make(Case("unmapped", (2, 1), (600, 400), make_config()), device=device)
    want = expected_scores(inputs)
    page = inputs.index.num_pages if page == 8 else page
    inputs.batch.page_table[0, 1] = inputs.batch.page_table[1, 3] = page
    want[:, :2, 1] = want[:, 2, 3] = -math.inf
    assert_bitwise_equal("scores", scores_of(inputs).cpu(), want)


def test_pool_without_pages(device: torch.device) -> None:
    config = make_config()
    batch = msattn.Batch.from_lists([1], [300], torch.zeros(1, 3, dtype=torch.int32), device=device)
    plan = msattn.make_plan(batch, config, "bf16")
    index = msattn.IndexCache.allocate(0, config, device=device)
    index_q = torch.zeros(1, 2, 128, dtype=torch.bfloat16, device=device)
    scores = msattn.index_scores(index_q, index, plan, impl="triton")
    assert (scores == -math.inf).all()
    ids = msattn.index_select(index_q, index, plan, impl="triton")
    assert ids[0].tolist() == [[0, 1, 2, -1]] * 2


def test_buffers_of_any_strides_are_fully_written(seed: int, device: torch.device) -> None:
    case = Case("strides", (21, 13), (40, 264), make_config(), spare_rows=2)
    inputs = make(case, seed=seed, layout=LAYOUTS["strided_rows"], device=device)
    plan, rows = inputs.plan(), inputs.case.num_rows
    config, blocks = inputs.config, plan.num_blocks
    room = poisoned((rows, blocks + 1, config.num_index_heads), torch.float32, device)
    out = room.permute(2, 0, 1)[:, :, :blocks]
    index_q = inputs.index_q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert index_q.stride(0) == 1
    for q in (inputs.index_q, index_q):
        msattn.index_scores(q, inputs.index, plan, out=out, impl="triton")
        assert_bitwise_equal("scores", out.cpu(), expected_scores(inputs))
        assert room[:, blocks].isnan().all()
    shape = (rows, config.num_kv_heads, config.topk)
    ids = head_major(torch.full(shape, GARBAGE, dtype=torch.int32, device=device))
    msattn.index_select(inputs.index_q, inputs.index, plan, out=ids, impl="triton")
    assert_same_ids("block_ids", ids, expected_block_ids(inputs))


def test_index_cache_among_other_layers(seed: int, device: torch.device) -> None:
    inputs = make(CASES["decode_spare_rows"], seed=seed, device=device)
    pool = poisoned((inputs.index.num_pages, 3, 128, 128 + 16), torch.bfloat16, device)
    layer = pool[:, 1, :, :128]
    layer.copy_(inputs.index.tensor)
    index = msattn.IndexCache.from_tensor(layer, inputs.config)
    scores = msattn.index_scores(inputs.index_q, index, inputs.plan(), impl="triton")
    assert_bitwise_equal("scores", scores.cpu(), expected_scores(inputs))


@pytest.mark.parametrize("budget", [1, 1 << 10, 1 << 11])
def test_chunks_of_any_size_select_the_same(
    budget: int, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("chunks", (5, 1, 3), (300, 257, 390), make_config(topk=2), spare_rows=2)
    inputs = make(case, seed=seed, device=device)
    monkeypatch.setattr(indexer, "SCORE_BYTES", budget)
    assert_same_ids("block_ids", selection_of(inputs), expected_block_ids(inputs))


def test_scores_of_a_prompt_of_8192_tokens_at_128k_are_one_chunk() -> None:
    assert indexer.SCORE_BYTES >= 8192 * 4 * 1088 * 4


def test_lengths_beyond_the_host_bound_do_not_write_beyond_the_scores(
    device: torch.device,
) -> None:
    inputs = make(CASES["prefill_beyond_topk"], device=device)
    batch = msattn.Batch.from_lists([1], [256], inputs.batch.page_table, device=device)
    plan = msattn.make_plan(batch, inputs.config, "bf16")
    plan.seq_lens.fill_(900)
    room = poisoned((2, 1, plan.num_blocks + 3), torch.float32, device)
    out = room[..., : plan.num_blocks]
    msattn.index_scores(inputs.index_q[-1:], inputs.index, plan, out=out, impl="triton")
    assert_bitwise_equal("scores", out.cpu(), expected_scores(inputs)[:, -1:, : plan.num_blocks])
    assert room[..., plan.num_blocks :].isnan().all()


def test_plan_updated_in_place(seed: int, device: torch.device) -> None:
    """A plan of a larger step serves a smaller one: its last tiles and requests are not used."""
    config = make_config()
    plan = make(Case("larger", (4, 9, 1), (300, 390, 8), config), device=device).plan()
    inputs = make(Case("smaller", (2, 3), (131, 300), config), seed=seed, device=device)
    indexer.score_rows(  # so that the tiles exist before the update
        inputs.index_q, inputs.index, plan, torch.empty(2, 5, plan.num_blocks, device=device), 0
    )
    plan.update(inputs.batch)
    scores = msattn.index_scores(inputs.index_q, inputs.index, plan, impl="triton").cpu()
    want = expected_scores(inputs)
    assert_bitwise_equal("scores", scores[..., : want.shape[2]], want)
    assert (scores[..., want.shape[2] :] == -math.inf).all()


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_one_plan_serves_other_tensors(fmt: str, seed: int, device: torch.device) -> None:
    """Of other addresses, alignments and strides; a plan keeps the launches of each kind."""
    case = Case("kinds", (1, 3), (300, 131), make_config(topk=2))
    dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3" else torch.bfloat16
    inputs = make(case, seed=seed, index_format=fmt, query_dtype=dtype, device=device)
    plan, index, q = inputs.plan(), inputs.index, inputs.index_q
    row, shape = q.shape[1] * q.shape[2], (2, 4, plan.num_blocks)
    for i, (offset, gap) in enumerate([(0, 0), (16, 0), (1, 0), (0, 16), (1, 0), (0, 0)]):
        memory = q.new_empty(offset + len(q) * (row + gap))
        moved = memory.as_strided(q.shape, (row + gap, q.shape[2], 1), offset)
        moved.copy_(q.roll(i, 0))
        want = msattn.index_scores(moved, index, plan, impl="reference")
        scores = poisoned(shape, torch.float32, device)
        msattn.index_scores(moved, index, plan, out=scores, impl="triton")
        assert_bitwise_equal("scores", scores, want)
        want_ids = msattn.select_blocks(want, plan, impl="reference")
        ids = torch.full_like(want_ids, GARBAGE)
        msattn.index_select(moved, index, plan, out=ids, impl="triton")
        assert_same_ids("block_ids", ids, want_ids)
        ids.fill_(GARBAGE)
        msattn.select_blocks(scores, plan, out=ids, impl="triton")
        assert_same_ids("block_ids of the scores", ids, want_ids)


@pytest.mark.parametrize(
    ("num_tiles", "num_blocks", "room"), [(1, 1, 264), (1, 8192, 264), (64, 1024, 264), (5, 3, 1)]
)
def test_splits_fill_the_device_and_are_not_empty(
    num_tiles: int, num_blocks: int, room: int
) -> None:
    splits = index_tiles.choose_splits(num_tiles, num_blocks, room)
    assert 1 <= splits <= num_blocks
    assert num_tiles * splits >= min(room, num_tiles * num_blocks) // 2


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_scores_do_not_depend_on_the_tile(fmt: str, seed: int, device: torch.device) -> None:
    """Real numbers: a token's sums have the same order in decode as in a prompt."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}[fmt]
    case = Case("tiles", (300,), (5000,), make_config(1, 4))
    inputs = make(
        case,
        seed=seed,
        index_format=fmt,
        query_dtype=dtype,
        integer_index=False,
        device=device,
    )
    by_tile = [
        scores_of(inputs, constants=index_tiles.choose_constants(rows, 256, capability(device)))
        for rows in (16, 32, 64, 128)
    ]
    for scores in by_tile[1:]:
        assert_bitwise_equal("scores", scores, by_tile[0])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "case",
    [
        LARGE_CASES["decode_32_at_32k"],
        LARGE_CASES["verify_16_at_16k"],
        Case("decode_beyond_8192_blocks", (1,), (8200 * 128 + 5,), make_config(1, 4, topk=16)),
        Case("prefill_8k_at_32k", (8192,), (32768,), make_config(1, 4, topk=16)),
        Case("mixed", (2000, 1, 4, 1, 300), (9000, 8000, 131, 65536, 300), make_config(1, 4, 16)),
    ],
    ids=str,
)
def test_large_steps_against_the_reference(
    case: Case, fmt: str, seed: int, device: torch.device
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}[fmt]
    inputs = make(case, seed=seed, index_format=fmt, query_dtype=dtype, device=device)
    arguments = (inputs.index_q, inputs.index, inputs.plan())
    want = msattn.index_scores(*arguments, impl="reference")
    for constants in (None, index_tiles._WARPGROUP_MMA[128]):
        assert_bitwise_equal("scores", scores_of(inputs, constants=constants), want)
    want_ids = msattn.index_select(*arguments, impl="reference")
    assert_same_ids("block_ids", msattn.index_select(*arguments, impl="triton"), want_ids)
    again = scores_of(inputs)
    assert_bitwise_equal("second run", again, want)
