"""Stage 4: attention over the selected blocks, against the fp64 oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import msattn
from msattn.reference import attend as reference_attend
from msattn.testing.cases import (
    CASES,
    EDGE_LENGTHS,
    LAYOUTS,
    Case,
    Layout,
    ScaleKind,
    layouts_of,
    make_config,
    scale_kinds_of,
)
from msattn.testing.compare import (
    FP8_QUERY_ELEMENT_BOUND,
    assert_bitwise_equal,
    assert_close,
    assert_lse,
    expected_attention,
)
from msattn.testing.make import (
    GARBAGE,
    INT32_MAX,
    INT32_MIN,
    Inputs,
    head_major,
    make,
    make_block_ids,
    poisoned,
)

FORMATS = list(msattn.KV_FORMATS.values())
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
LSE_BOUND = 5e-5  # the reference sums in fp32, so it is held to more than a kernel is
CASE_LIST = list(CASES.values())


def run(inputs: Inputs, block_ids: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    """out and LSE of all rows, in poisoned buffers."""
    options.setdefault("out", inputs.new_out())
    lse = poisoned((inputs.case.num_rows, inputs.config.num_q_heads), torch.float32)
    options.setdefault("lse_out", lse)
    return msattn.attend(
        inputs.q, inputs.cache, block_ids, inputs.plan(), q_scale=inputs.q_scale, **options
    )


def check(inputs: Inputs, block_ids: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    """Run, compare with the oracle within the output's rounding, return out and LSE."""
    out, lse = run(inputs, block_ids, **options)
    tokens = inputs.case.num_tokens
    truth, truth_lse = expected_attention(inputs, block_ids, options.get("softmax_scale"))
    bound = {"element_bound": FP8_QUERY_ELEMENT_BOUND} if inputs.q.dtype.itemsize == 1 else {}
    assert_close("out", out[:tokens], truth, **bound)
    assert_lse("lse", lse[:tokens], truth_lse, bound=LSE_BOUND)
    return out, lse


@pytest.mark.parametrize("hostile", [False, True], ids=["selected", "hostile"])
@pytest.mark.parametrize("case", CASE_LIST, ids=str)
def test_attention_is_the_oracles(case: Case, hostile: bool, seed: int) -> None:
    """Hostile ids: any order, -1 and wild integers anywhere, duplicates, ids behind the visible.

    Contracts 3, 4, 5: the pool is NaN wherever no token lives.
    """
    inputs = make(case, seed=seed)
    check(inputs, make_block_ids(inputs, seed=seed, hostile=hostile))


@pytest.mark.parametrize(
    ("fmt", "layout"), [(f, x) for f in FORMATS for x in layouts_of(f)], ids=str
)
def test_every_layout_gives_the_same_bits(fmt: msattn.KVFormat, layout: Layout, seed: int) -> None:
    """HND, NHD, interleaved layers, K and V apart; strided rows; ids by head: no repacking."""
    dense = make(CASES["mixed"], seed=seed, kv_format=fmt)
    ids = make_block_ids(dense, seed=seed)
    want, want_lse = check(dense, ids)
    inputs = make(CASES["mixed"], seed=seed, kv_format=fmt, layout=layout)
    same_ids = make_block_ids(inputs, seed=seed)
    assert torch.equal(ids, same_ids)
    out, lse = run(inputs, same_ids)
    assert out.stride() == inputs.new_out().stride()
    assert_bitwise_equal("out", out, want)
    assert_bitwise_equal("lse", lse, want_lse)


@pytest.mark.parametrize("query_dtype", QUERY_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("fmt", "scales"), [(f, s) for f in FORMATS for s in scale_kinds_of(f)], ids=str
)
def test_scales_in_every_form(
    fmt: msattn.KVFormat, scales: ScaleKind, query_dtype: torch.dtype, seed: int
) -> None:
    """Contract 8: K's, V's and an fp8 query's scales, none of them a power of two, all applied.

    The step has decode rows and prompt rows, with and without a prefix.
    """
    case = Case("scales", (1, 3, 20), (300, 131, 20), make_config())
    inputs = make(case, seed=seed, kv_format=fmt, scales=scales, query_dtype=query_dtype)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize("scale", [0.3, 1.7, 3.1, 0.25])
def test_scales_change_the_result_as_numbers_do(scale: float) -> None:
    """Stored bits stay, the scale changes in place: K enters the logits, V the output."""
    config = make_config(group=1, kv_heads=1)
    k_scale, v_scale = torch.ones(3), torch.ones(3)
    cache = msattn.KVCache.allocate(
        1, config, "fp8_e4m3", k_scale=k_scale[1:2], v_scale=v_scale[2:]
    )
    k, v = torch.randn(100, 1, 128), torch.randn(100, 1, 128)
    msattn.store_kv(k, v, cache, torch.arange(100))
    plan = msattn.make_plan(msattn.Batch.from_lists([1], [100], [[0]]), config, "fp8_e4m3")
    ids = torch.zeros(1, 1, 1, dtype=torch.int32)
    q = torch.randn(1, 1, 128)
    k_scale[1], v_scale[2] = scale, 2 * scale
    out, lse = msattn.attend(q, cache, ids, plan, return_lse=True)
    stored = cache.tensor[0, 0, :100].double()
    logits = 128**-0.5 * scale * stored[:, :128] @ q[0, 0].double()
    assert_lse("lse", lse[0, 0], logits.logsumexp(0), bound=LSE_BOUND)
    assert_close("out", out[0, 0], 2 * scale * logits.softmax(0) @ stored[:, 128:])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16, 20, 40, 64])
def test_group_sizes(group: int, seed: int) -> None:
    """Query heads per KV head on both sides of 16, and no multiples of it."""
    config = make_config(group=group, kv_heads=2, topk=3)
    inputs = make(Case("group", (1, 3), (700, 200), config), seed=seed)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_head_dims(head_dim: int, seed: int) -> None:
    case = Case("dims", (3,), (400,), make_config(head_dim=head_dim))
    inputs = make(case, seed=seed)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize("length", [*range(1, 6), 63, 64, 65, *EDGE_LENGTHS])
def test_lengths_in_decode_and_prefill(length: int, seed: int) -> None:
    case = Case("length", (1, min(length, 40)), (length, length), make_config(group=1))
    inputs = make(case, seed=seed)
    check(inputs, make_block_ids(inputs, seed=seed, hostile=False))


@pytest.mark.parametrize("at", range(16))
def test_minus_one_at_every_position(at: int) -> None:
    """K = 16 with -1 in one slot after the other: the same as without that slot."""
    inputs = make(Case("minus_one", (1,), (16 * 128,), make_config(topk=16)))
    ids = torch.arange(16, dtype=torch.int32).expand(1, 2, 16).clone()
    ids[:, 1] = ids[:, 1].flip(0)
    ids[..., at] = -1
    out, lse = check(inputs, ids)
    packed = torch.cat([ids[..., :at], ids[..., at + 1 :]], dim=-1)
    want, want_lse = run(inputs, packed)
    assert_bitwise_equal("out", out, want)
    assert_bitwise_equal("lse", lse, want_lse)


@pytest.mark.parametrize("sentinel", [-1, -2, INT32_MIN, INT32_MAX, GARBAGE, 5, 9])
@pytest.mark.parametrize("where", ["leading", "middle", "trailing"])
def test_ids_of_no_visible_block_are_ignored(sentinel: int, where: str) -> None:
    """Fifteen of sixteen ids name nothing; block 5 is the first hidden one, 9 is no column."""
    inputs = make(Case("sentinel", (1,), (5 * 128 - 3,), make_config(topk=16), extra_columns=3))
    at = {"leading": 15, "middle": 7, "trailing": 0}[where]
    ids = torch.full((1, 2, 16), sentinel, dtype=torch.int32)
    ids[..., at] = 4
    out, lse = check(inputs, ids)
    assert out.isfinite().all() and lse.isfinite().all()
    want, want_lse = run(inputs, ids[..., at : at + 1])
    assert_bitwise_equal("out", out, want)
    assert_bitwise_equal("lse", lse, want_lse)


def test_duplicates_count_once_and_order_does_not_matter() -> None:
    inputs = make(Case("twice", (1,), (600,), make_config(topk=6)))
    want, want_lse = run(inputs, torch.tensor([[[0, 2, 4]] * 2], dtype=torch.int32))
    for row in ([4, 2, 0], [0, 2, 4, 4, 4, 4], [2, 4, 2, 0, 4, 0], [4, -1, 0, 4, -1, 2]):
        ids = torch.tensor([[row] * 2], dtype=torch.int32)
        out, lse = check(inputs, ids)
        assert_bitwise_equal("out", out, want)
        assert_bitwise_equal("lse", lse, want_lse)


@pytest.mark.parametrize("width", [0, 1, 7, 40])
def test_ids_of_any_width(width: int, seed: int) -> None:
    """K of the ids is theirs, not the config's topk."""
    inputs = make(CASES["verify"], seed=seed)
    ids = torch.randint(-2, 9, (inputs.case.num_rows, 2, width), dtype=torch.int32)
    check(inputs, ids)


def test_square_step_in_both_orders_of_ids() -> None:
    """T = Hkv = 4, and ids that differ by token and head: a swapped stride cannot pass."""
    inputs = make(CASES["decode_square"])
    ids = torch.arange(16, dtype=torch.int32).view(4, 4, 1) % 4
    ids = torch.cat([ids, (ids + ids.transpose(0, 1)) % 4], dim=-1)
    token_major, token_major_lse = check(inputs, ids)
    out, lse = check(inputs, head_major(ids))
    assert not torch.equal(ids, ids.transpose(0, 1))
    assert_bitwise_equal("out", out, token_major)
    assert_bitwise_equal("lse", lse, token_major_lse)


@pytest.mark.parametrize("case", ["decode_padded", "decode_all_empty", "more_queries_than_keys"])
@pytest.mark.parametrize("given", [True, False], ids=["garbage_buffers", "new_buffers"])
def test_rows_that_see_nothing_are_zero(case: str, given: bool, seed: int) -> None:
    """Contract 4: exactly 0 and -inf for padding requests, positions below 0, and ids of -1."""
    inputs = make(CASES[case], seed=seed)
    ids = make_block_ids(inputs, seed=seed, hostile=False)
    ids[1] = -1
    if given:
        out, lse = run(inputs, ids)
    else:
        plan = inputs.plan()
        out, lse = msattn.attend(inputs.q, inputs.cache, ids, plan, return_lse=True)
    empty = torch.tensor([(row < 0).all().item() for row in ids])
    assert empty.any()
    assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all()
    assert out[~empty].isfinite().all() and lse[~empty].isfinite().all()
    assert (out[~empty] != 0).any(-1).all()


def test_rows_behind_the_last_token_stay_as_they_were(seed: int) -> None:
    """A buffer of 8 rows, 5 of them real: the others keep the caller's sentinel."""
    inputs = make(CASES["decode_spare_rows"], seed=seed)
    ids = make_block_ids(inputs, seed=seed)
    out = torch.full_like(inputs.q, 12.5)
    lse = torch.full((inputs.case.num_rows, inputs.config.num_q_heads), 77.0)
    got = check(inputs, ids, out=out, lse_out=lse)
    assert got[0] is out and got[1] is lse
    assert (out[5:] == 12.5).all() and (lse[5:] == 77.0).all()
    fresh, fresh_lse = msattn.attend(inputs.q, inputs.cache, ids, inputs.plan(), return_lse=True)
    assert (fresh[5:] == 0).all() and (fresh_lse[5:] == -math.inf).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, 1e30, -448.0])
def test_memory_of_no_token_never_changes_a_bit(
    fmt: msattn.KVFormat, value: float, seed: int
) -> None:
    """Contract 5: page tails, unused pages and unused table columns, refilled between two runs."""
    inputs = make(CASES["mixed"], seed=seed, kv_format=fmt)
    ids = make_block_ids(inputs, seed=seed)
    block_ids = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    want, want_lse = run(inputs, ids)
    inputs.fill_unowned(value)
    for row, length in zip(inputs.batch.page_table, inputs.case.seq_lens, strict=True):
        row[-(-length // 128) :] = int(inputs.batch.page_table[0, 0])
    out, lse = run(inputs, ids)
    tokens = inputs.case.num_tokens
    assert want[:tokens].isfinite().all()
    assert_bitwise_equal("out", out[:tokens], want[:tokens])
    assert_bitwise_equal("lse", lse, want_lse)
    again = msattn.index_select(inputs.index_q, inputs.index, inputs.plan())
    assert_bitwise_equal("block_ids", again, block_ids)


def test_keys_that_are_not_there_have_no_weight() -> None:
    """130 keys with logits of about -20: a zero-filled key (logit 0) would take all the weight."""
    inputs = make(Case("phantom", (1,), (130,), make_config()))
    softmax_scale = 128**-0.5
    inputs.q.fill_(1.0)
    inputs.cache.k[inputs.owned.unsqueeze(1).expand(-1, 2, -1)] = -20.0 / (128 * softmax_scale)
    inputs.cache.v[inputs.owned.unsqueeze(1).expand(-1, 2, -1)] = 3.0
    for value in (math.nan, 0.0):
        inputs.fill_unowned(value)
        ids = torch.tensor([[[0, 1]] * 2], dtype=torch.int32)
        out, lse = check(inputs, ids)
        assert (out == 3.0).all()
        assert torch.allclose(lse, torch.tensor(-20.0 + math.log(130)), atol=0.1)


def test_a_block_is_seen_up_to_the_token_itself() -> None:
    """Position = seq_len - query_len + i: V counts the keys, equal logits average them."""
    inputs = make(Case("causal", (2, 130, 3), (131, 130, 3), make_config()))
    inputs.q.zero_()
    plan = inputs.plan()
    for request, length in enumerate(inputs.case.seq_lens):
        for position in range(length):
            page = int(inputs.batch.page_table[request, position // 128])
            inputs.cache.v[page, :, position % 128] = float(position % 128 == position) * position
    ids = torch.zeros(135, 2, 1, dtype=torch.int32)
    out, lse = msattn.attend(inputs.q.float(), inputs.cache, ids, plan, return_lse=True)
    positions = torch.tensor([129, 130, *range(130), 0, 1, 2]).clamp(max=127)
    assert torch.allclose(out[:, 0, 0], positions / 2.0, rtol=1e-5)
    assert torch.allclose(lse[:, 0], (positions + 1.0).log(), rtol=1e-5)


def test_lse_is_the_natural_logarithm_of_scaled_logits() -> None:
    """Contract 6, on one key: the LSE is its logit."""
    inputs = make(Case("one_key", (1,), (1,), make_config()))
    page = int(inputs.batch.page_table[0, 0])
    key = inputs.cache.k[page, :, 0].double().repeat_interleave(2, 0)
    for softmax_scale in (None, 0.5, 1.0, -0.25):
        ids = torch.zeros(1, 2, 1, dtype=torch.int32)
        out, lse = run(inputs, ids, softmax_scale=softmax_scale)
        scale = 128**-0.5 if softmax_scale is None else softmax_scale
        assert_lse("lse", lse[0], scale * (inputs.q[0].double() * key).sum(-1), bound=LSE_BOUND)
        value = inputs.cache.v[page, :, 0].repeat_interleave(2, 0)
        assert_bitwise_equal("out", out[0], value)


def test_query_head_h_reads_kv_head_h_over_group() -> None:
    inputs = make(Case("heads", (1,), (50,), make_config(group=3, kv_heads=4)))
    for head in range(4):
        inputs.cache.v[:, head] = float(head + 1)
    ids = torch.zeros(1, 4, 1, dtype=torch.int32)
    out, _ = run(inputs, ids)
    assert out[0, :, 0].tolist() == [1.0 + h // 3 for h in range(12)]


def test_verified_tokens_keep_their_own_ids(seed: int) -> None:
    """Contract 7: tokens of a request with different ids equal calls of one token each."""
    inputs = make(CASES["verify"], seed=seed, query_dtype=torch.float32)
    ids = make_block_ids(inputs, seed=seed)
    out, lse = check(inputs, ids)
    starts = inputs.batch.cu_seqlens_q.tolist()
    for request, (count, length) in enumerate(
        zip(inputs.case.query_lens, inputs.case.seq_lens, strict=True)
    ):
        for i in range(count):
            t = starts[request] + i
            table = inputs.batch.page_table[request : request + 1]
            batch = msattn.Batch.from_lists([1], [length - count + i + 1], table)
            plan = msattn.make_plan(batch, inputs.config, "bf16")
            row = slice(t, t + 1)
            alone, alone_lse = msattn.attend(
                inputs.q[row], inputs.cache, ids[row], plan, return_lse=True
            )
            assert_close("out", out[row], alone)
            assert_lse("lse", lse[row], alone_lse, bound=LSE_BOUND)


def test_blocks_of_the_other_tokens_have_no_weight() -> None:
    """Sharing the read of a request's blocks does not widen the set of a row."""
    inputs = make(Case("union", (4,), (600,), make_config(topk=1)))
    ids = torch.arange(4, dtype=torch.int32).view(4, 1, 1).expand(4, 2, 1)
    out, lse = check(inputs, ids)
    for token in range(4):
        other = make(Case("union", (4,), (600,), make_config(topk=1)))
        for block in {0, 1, 2, 3, 4} - {token}:
            page = int(other.batch.page_table[0, block])
            other.cache.tensor[page] = math.nan
        got, got_lse = run(other, ids)
        assert_bitwise_equal("out", got[token], out[token])
        assert_bitwise_equal("lse", got_lse[token], lse[token])


def test_large_logits_do_not_overflow() -> None:
    """Logits in the thousands, of both signs, in every order of blocks."""
    inputs = make(Case("large", (1, 2), (640, 300), make_config()), query_dtype=torch.float32)
    inputs = replace(inputs, q=inputs.q * 1000)
    for row in ([0, 1, 2, 3], [3, 2, 1, 0]):
        ids = torch.tensor(row, dtype=torch.int32).expand(3, 2, 4)
        truth, truth_lse = expected_attention(inputs, ids)
        out, lse = run(inputs, ids)
        assert truth_lse.abs().max() > 1000
        assert out.isfinite().all()
        # An fp32 logit of some thousands is good to some 1e-4.
        assert torch.allclose(out.double(), truth, atol=5e-3)
        assert torch.allclose(lse.double(), truth_lse, rtol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_visible_anomaly_reaches_those_who_see_it_and_nobody_else(value: float) -> None:
    """A NaN or infinite value at position 130 is not masked for rows from there on."""
    inputs = make(Case("anomaly", (4,), (132,), make_config(topk=2)))
    page = int(inputs.batch.page_table[0, 1])
    clean, _ = run(inputs, torch.tensor([[[0, 1]] * 2] * 4, dtype=torch.int32))
    inputs.cache.v[page, 0, 2, 7] = value
    ids = torch.tensor([[[0, 1]] * 2] * 4, dtype=torch.int32)
    ids[3, 0] = torch.tensor([0, -1])
    out, _ = run(inputs, ids)
    assert torch.equal(
        out[2, :2, 7].float().nan_to_num(5.0), torch.full((2,), value).nan_to_num(5.0)
    )
    out[2, :2, 7] = clean[2, :2, 7]
    assert out.isfinite().all()
    assert_bitwise_equal("others", out[:3], clean[:3])


def test_fp8_query_takes_any_output_dtype(seed: int) -> None:
    inputs = make(CASES["verify"], seed=seed, query_dtype=torch.float8_e4m3fn, scales="slice")
    ids = make_block_ids(inputs, seed=seed)
    assert run(inputs, ids)[0].dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(inputs, ids, out=poisoned(inputs.q.shape, dtype))


def test_output_without_lse_is_the_same(seed: int) -> None:
    inputs = make(CASES["mixed"], seed=seed)
    ids = make_block_ids(inputs, seed=seed)
    alone = msattn.attend(inputs.q, inputs.cache, ids, inputs.plan())
    assert isinstance(alone, torch.Tensor)
    tokens = inputs.case.num_tokens
    assert_bitwise_equal("out", alone[:tokens], run(inputs, ids)[0][:tokens])


@pytest.mark.parametrize("strides", ["transposed", "every_other", "head_slices"])
def test_queries_and_outputs_of_any_strides(strides: str, seed: int) -> None:
    inputs = make(CASES["mixed"], seed=seed)
    ids = make_block_ids(inputs, seed=seed)
    want, _ = run(inputs, ids)
    t, h, d = inputs.q.shape
    buffers = {
        "transposed": lambda: poisoned((d, h, t), torch.bfloat16).permute(2, 1, 0),
        "every_other": lambda: poisoned((t, h, 2 * d), torch.bfloat16)[..., ::2],
        "head_slices": lambda: poisoned((t, 3 * h, d + 8), torch.bfloat16)[:, h : 2 * h, :d],
    }
    q, out = buffers[strides](), buffers[strides]()
    q.copy_(inputs.q)
    lse_out = poisoned((h, t), torch.float32).T
    check(replace(inputs, q=q), ids, out=out, lse_out=lse_out)
    assert_bitwise_equal("out", out, want)


@pytest.mark.parametrize(("rows", "tiles", "partials"), [(1, 1, 1), (8, 1 << 12, 1 << 16)])
def test_tiles_and_chunks_of_any_size(
    rows: int, tiles: int, partials: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_attend, "TILE_ROWS", rows)
    monkeypatch.setattr(reference_attend, "TILE_BYTES", tiles)
    monkeypatch.setattr(reference_attend, "PARTIAL_BYTES", partials)
    inputs = make(CASES["mixed"], seed=seed)
    check(inputs, make_block_ids(inputs, seed=seed))


def test_unmapped_pages_are_not_read(seed: int) -> None:
    """A visible block whose table entry names no page counts as absent; no fault."""
    inputs = make(Case("unmapped", (1,), (600,), make_config()), seed=seed)
    ids = torch.tensor([[[0, 1, 2, 4]] * 2], dtype=torch.int32)
    want, _ = run(inputs, ids[..., [0, 3]])
    inputs.batch.page_table[0, 1] = -1
    inputs.batch.page_table[0, 2] = inputs.cache.num_pages
    out, lse = run(inputs, ids)
    assert_bitwise_equal("out", out, want)
    assert lse.isfinite().all()


def test_no_memory_layout_is_lost_on_the_way(seed: int) -> None:
    """Everything strided at once: one layer of several, gaps in rows, ids by head, fp8, scales."""
    inputs = make(
        CASES["mixed"],
        seed=seed,
        kv_format="fp8_e5m2",
        query_dtype=torch.float8_e4m3fn,
        layout=LAYOUTS["all_strided"],
        scales="slots",
    )
    assert not inputs.q.is_contiguous() and not inputs.cache.tensor.is_contiguous()
    check(inputs, make_block_ids(inputs, seed=seed))


def test_what_autograd_follows() -> None:
    """Nothing: the pool stays as it was, and whoever asks for gradients is told."""
    inputs = make(CASES["mixed"])
    q = inputs.q.requires_grad_()
    ids = make_block_ids(inputs)
    out, lse = msattn.attend(q, inputs.cache, ids, inputs.plan(), return_lse=True)
    for result in (out[: inputs.case.num_tokens].sum(), lse[0].sum()):
        with pytest.raises(NotImplementedError, match="attend has no backward pass"):
            result.backward(retain_graph=True)
    own = inputs.new_out()
    assert msattn.attend(q, inputs.cache, ids, inputs.plan(), out=own) is own
    assert not own.requires_grad
    with torch.no_grad():
        assert not msattn.attend(q, inputs.cache, ids, inputs.plan()).requires_grad


def test_pools_that_autograd_might_follow() -> None:
    config = CASES["mixed"].config
    cache, index = msattn.KVCache.allocate(2, config), msattn.IndexCache.allocate(2, config)
    with torch.no_grad():
        cache.dequantize()  # views made without a graph must not be in the way
    k, v = (torch.randn(3, 2, 128).bfloat16().requires_grad_() for _ in range(2))
    slots = torch.tensor([0, 5, 130])
    msattn.store_kv(k, v, cache, slots)
    msattn.store_index_k(k[:, 0], index, slots)
    assert not cache.tensor.requires_grad and not index.tensor.requires_grad
    assert torch.equal(cache.tensor[1, :, 2, :128], k[2]) and torch.equal(
        index.tensor[1, 2], k[2, 0]
    )
