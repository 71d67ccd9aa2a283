"""Layers of real sizes on the device: formats, groups, long prompts, offsets beyond 32 bits."""

from __future__ import annotations

import pytest
import torch
from gpu_layer import (
    DEVICE,
    IMPL,
    assert_equals_oracle,
    assert_equals_reference,
    pools,
    run_layer,
)

import msattn
from msattn.testing.cases import CASES, LAYOUTS, M3, M3_TP4, Case, layouts_of, make_config
from msattn.testing.compare import assert_bitwise_equal, assert_lse, assert_same_ids
from msattn.testing.make import Inputs, as_bytes, make, poisoned

pytestmark = pytest.mark.gpu

FORMATS = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4"]
PAIRS = [
    (fmt, layout)
    for fmt in FORMATS
    for layout in layouts_of(msattn.KV_FORMATS[fmt])
    if layout.name in ("dense", "pair", "all_strided")
]


def check_layer(x: Inputs) -> None:
    """Step's slots are poison before the layer runs; its caches equal the reference's after."""
    x.forget_step()
    before = [pool.clone() for pool in pools(x)]
    got = run_layer(x, x.plan())
    stored = [pool.clone() for pool in pools(x)]
    for pool, old in zip(pools(x), before, strict=True):
        pool.copy_(old)
    msattn.store_kv(x.k, x.v, x.cache, x.slot_mapping, impl="reference")
    msattn.store_index_k(x.index_k, x.index, x.slot_mapping, impl="reference")
    for mine, want in zip(stored, pools(x), strict=True):
        assert_bitwise_equal("pool", mine, want)
    assert_equals_oracle(x, got)


@pytest.mark.parametrize(("kv_format", "layout"), PAIRS, ids=str)
def test_formats_and_layouts(kv_format: str, layout: object, seed: int) -> None:
    index_format = "fp8" if kv_format == "fp8_e4m3" else "bf16"
    x = make(
        CASES["mixed"],
        seed=seed,
        kv_format=kv_format,
        index_format=index_format,
        layout=layout,
        device=DEVICE,
    )
    check_layer(x)


@pytest.mark.parametrize("scales", ["float", "slice", "slots"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_scales(kv_format: str, scales: str, seed: int) -> None:
    if scales == "slots" and not msattn.KV_FORMATS[kv_format].slot_scales:
        pytest.skip("has block scales")
    check_layer(make(CASES["mixed"], seed=seed, kv_format=kv_format, scales=scales, device=DEVICE))


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 64])
def test_groups(group: int, kv_format: str, seed: int) -> None:
    config = make_config(group=group, kv_heads=2 if group < 64 else 1)
    case = Case(f"group {group}", (1, 70, 3, 1, 9), (900, 700, 131, 1, 300), config, 2)
    check_layer(make(case, seed=seed, kv_format=kv_format, device=DEVICE))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("queries", [1, 3], ids=["decode", "verify"])
def test_many_pages_and_sequences(queries: int, kv_format: str, seed: int) -> None:
    """More than 800 pages and 16 sequences, M3's heads."""
    lengths = tuple(5000 + 131 * i for i in range(20))
    case = Case("many", (queries,) * 20, lengths, M3)
    assert case.num_pages > 800
    x = make(case, seed=seed, kv_format=kv_format, device=DEVICE)
    plan = x.plan()
    ids, out, lse = run_layer(x, plan)
    want = msattn.index_select(x.index_q, x.index, plan, impl="reference")
    assert_same_ids("block_ids", ids, want)
    assert_equals_reference(x.q, x.cache, ids, plan, out, lse)


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_prompt_of_65537_tokens(kv_format: str, seed: int) -> None:
    """One more than a grid axis holds, twice over; the output is NaN before."""
    tokens = 65537
    case = Case("65537", (tokens,), (tokens,), M3_TP4)
    x = make(case, seed=seed, kv_format=kv_format, device=DEVICE)
    plan = x.plan()
    ids = torch.full((tokens, 1, 16), 0x7F7F7F7F, dtype=torch.int32, device=DEVICE)
    out, lse = torch.full_like(x.q, torch.nan), torch.full((tokens, 16), torch.nan, device=DEVICE)
    msattn.index_select(x.index_q, x.index, plan, out=ids, impl=IMPL)
    msattn.attend(x.q, x.cache, ids, plan, out=out, lse_out=lse, impl=IMPL)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    want = msattn.index_select(x.index_q, x.index, plan, impl="reference")
    assert_same_ids("block_ids", ids, want)
    assert_equals_reference(x.q, x.cache, ids, plan, out, lse)


def spread(pool: torch.Tensor, stride: int) -> torch.Tensor:
    """The pool with its pages ``stride`` elements apart, poison between them."""
    pages, *page = pool.shape
    memory = poisoned(((pages - 1) * stride + pool[0].numel(),), pool.dtype, pool.device)
    wide = memory.as_strided(pool.shape, (stride, *torch.empty(page, device="meta").stride()))
    as_bytes(wide).copy_(as_bytes(pool))
    return wide


@pytest.mark.parametrize(
    ("kv_format", "lengths", "gigabytes_between"),
    [
        ("bf16", (300, 200, 900), 0.33),  # many layers: 17 pages over 5 GiB
        ("nvfp4", (300, 200, 900), 0.33),
        ("bf16", (100,), 4.5),  # a page stride beyond 2^31 elements
        ("fp8_e4m3", (100,), 2.25),
        ("nvfp4", (100,), 2.25),
    ],
    ids=str,
)
def test_interleaved_layers_of_gigabytes(
    kv_format: str, lengths: tuple[int, ...], gigabytes_between: float, seed: int
) -> None:
    """Bit for bit what a pool whose pages lie side by side gives, store included."""
    case = Case("wide", tuple(min(n, 70) for n in lengths), lengths, make_config(group=16))
    near = make(case, seed=seed, kv_format=kv_format, device=DEVICE)
    assert isinstance(near.cache.tensor, torch.Tensor)
    stride = int(gigabytes_between * 2**30) // near.cache.tensor.dtype.itemsize // 128 * 128
    assert (near.cache.num_pages - 1) * stride > 2**31
    near.forget_step()
    far = msattn.KVCache.from_tensor(spread(near.cache.tensor, stride), case.config, kv_format)
    stride = 2**32 // (near.index.num_pages - 1) // 128 * 128  # 8 GiB
    far_index = msattn.IndexCache.from_tensor(spread(near.index.tensor, stride), case.config)
    results = []
    for cache, index in ((near.cache, near.index), (far, far_index)):
        plan = near.plan()
        msattn.store_kv(near.k, near.v, cache, near.slot_mapping, impl=IMPL)
        msattn.store_index_k(near.index_k, index, near.slot_mapping, impl=IMPL)
        ids = msattn.index_select(near.index_q, index, plan, impl=IMPL)
        results.append((ids, *msattn.attend(near.q, cache, ids, plan, return_lse=True, impl=IMPL)))
    for name, a, b in zip(("block_ids", "out", "lse"), *results, strict=True):
        assert_bitwise_equal(name, b, a)
    for pages, wide in ((near.cache.tensor, far.tensor), (near.index.tensor, far_index.tensor)):
        assert_bitwise_equal("pool", as_bytes(wide), as_bytes(pages))
    assert_equals_oracle(near, list(results[0]))


@pytest.mark.parametrize("topk", [16], ids=["M3"])
def test_queries_and_outputs_beyond_2_31_elements(topk: int) -> None:
    """T * Hq * D > 2^31: the last rows are those of a step of their own."""
    tokens = 2**18 + 65
    _, total = torch.cuda.mem_get_info()
    if total < 40 << 30:
        pytest.skip("needs 40 GiB")
    pages = -(-tokens // 128)
    cache = msattn.KVCache.allocate(pages, M3, "bf16", device=DEVICE)
    cache.tensor.normal_()
    table = torch.randperm(pages, device=DEVICE).int().view(1, -1)
    q = torch.empty(tokens, 64, 128, dtype=torch.bfloat16, device=DEVICE).normal_()
    visible = torch.arange(tokens, device=DEVICE).view(-1, 1, 1) // 128 + 1
    ids = (torch.rand(tokens, 4, topk, device=DEVICE) * visible).int()
    out = torch.full_like(q, torch.nan)
    plan = msattn.make_plan(msattn.Batch.from_lists([tokens], [tokens], table), M3, "bf16")
    _, lse = msattn.attend(q, cache, ids, plan, out=out, return_lse=True, impl=IMPL)
    assert all(bool(part.isfinite().all()) for part in out.split(1 << 15))
    for rows in (slice(0, 64), slice(tokens - 64, tokens)):
        batch = msattn.Batch.from_lists([64], [rows.stop], table)
        part = msattn.make_plan(batch, M3, "bf16")
        assert_equals_reference(q[rows], cache, ids[rows], part, out[rows], lse[rows])


def test_selection_does_not_depend_on_the_batch(seed: int) -> None:
    """A request alone, and among others: the same ids, outputs within 1e-2."""
    x = make(CASES["m3_mixed"], seed=seed, device=DEVICE)
    plan = x.plan()
    ids, out, lse = run_layer(x, plan)
    starts, lengths = x.batch.cu_seqlens_q.tolist(), x.batch.seq_lens.tolist()
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        batch = msattn.Batch.from_lists(
            [rows.stop - rows.start], [length], x.batch.page_table[r : r + 1]
        )
        alone = msattn.make_plan(batch, x.config, "bf16")
        own = msattn.index_select(x.index_q[rows], x.index, alone, impl=IMPL)
        assert_same_ids("block_ids", own, ids[rows])
        own_out, own_lse = msattn.attend(x.q[rows], x.cache, own, alone, return_lse=True, impl=IMPL)
        torch.testing.assert_close(own_out, out[rows], rtol=1e-2, atol=1e-2)
        assert_lse("lse", own_lse, lse[rows])


def test_head_major_ids(seed: int) -> None:
    x = make(CASES["mixed"], seed=seed, layout=LAYOUTS["head_major_ids"], device=DEVICE)
    ids = msattn.index_select(x.index_q, x.index, x.plan(), impl="reference")
    turned = ids.transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = msattn.attend(x.q, x.cache, turned, x.plan(), return_lse=True, impl=IMPL)
    assert_equals_oracle(x, [ids, out, lse])
