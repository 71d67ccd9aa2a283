"""Stage 1: what is stored where, and that nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch

import msattn
from msattn.reference import store as reference_store
from msattn.testing.cases import (
    DENSE,
    LAYOUTS,
    Layout,
    ScaleKind,
    layouts_of,
    make_config,
    scale_kinds_of,
)
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import (
    INT32_MIN,
    K_SCALE,
    V_SCALE,
    as_bytes,
    make_index_cache,
    make_pool,
    make_scale,
    strided,
)

CONFIG = make_config(group=1, kv_heads=3)
PAGES = 4
FORMATS = list(msattn.KV_FORMATS.values())
PLAIN = [fmt for fmt in FORMATS if not fmt.scale_group]
# A few tokens without a slot; first and last slot of the pool, and of a page; -1 in the middle.
SLOTS = (5, -1, 511, 0, 200, -1, 127, 128, INT32_MIN, 384)


def new_cache(
    fmt: msattn.KVFormat, layout: Layout = DENSE, scales: ScaleKind = "unit"
) -> msattn.KVCache:
    k_scale, v_scale = (make_scale(x, scales, CONFIG, PAGES) for x in (K_SCALE, V_SCALE))
    pool = make_pool(fmt, CONFIG, PAGES, layout)
    return msattn.KVCache.from_tensor(pool, CONFIG, fmt, k_scale=k_scale, v_scale=v_scale)


def new_tokens(count: int = len(SLOTS), dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, CONFIG.num_kv_heads, CONFIG.head_dim).to(dtype)


def memory(cache: msattn.KVCache | msattn.IndexCache) -> list[torch.Tensor]:
    """All bytes of the storage behind a cache: guard pages and neighbouring layers included."""
    pools = cache.tensor if isinstance(cache.tensor, tuple) else (cache.tensor,)
    return [raw_bytes(pool) for pool in pools]


def raw_bytes(pool: torch.Tensor) -> torch.Tensor:
    """The whole storage that a pool is a view of."""
    empty = torch.empty(0, dtype=torch.uint8, device=pool.device)
    return empty.set_(pool.untyped_storage())


def scale_at(scale: msattn.cache.Scale, slot: int) -> torch.Tensor:
    """fp32, broadcasting over ``[Hkv, D]``."""
    scale = torch.as_tensor(scale, dtype=torch.float32)
    return scale[:, slot, None] if scale.dim() == 2 else scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("fmt", "scales"), [(f, s) for f in PLAIN for s in scale_kinds_of(f)], ids=str
)
def test_stored_is_x_over_scale_rounded_once(
    fmt: msattn.KVFormat, scales: ScaleKind, dtype: torch.dtype
) -> None:
    """Contract 8: stored = x / scale on write, x = stored * scale on read."""
    cache, k, v = new_cache(fmt, scales=scales), new_tokens(dtype=dtype), new_tokens(dtype=dtype)
    msattn.store_kv(k, v, cache, torch.tensor(SLOTS))
    read_k, read_v = cache.dequantize()
    for token, slot in enumerate(SLOTS):
        if slot < 0:
            continue
        at = (slot // 128, slice(None), slot % 128)
        for x, pool, read, scale in (
            (k, cache.k, read_k, cache.k_scale),
            (v, cache.v, read_v, cache.v_scale),
        ):
            factor = scale_at(scale, slot)
            stored = (x[token].float() / factor).to(fmt.storage_dtype)
            assert torch.equal(as_bytes(pool[at]), as_bytes(stored))
            assert torch.equal(read[at], stored.float() * factor)


@pytest.mark.parametrize(
    ("fmt", "layout"), [(f, x) for f in FORMATS for x in layouts_of(f)], ids=str
)
def test_only_the_named_slots_change(fmt: msattn.KVFormat, layout: Layout) -> None:
    """Negative slots are skipped, in every layout; guard pages and other layers stay as they were.

    A -1 that is divided into page and offset, or used as an index, would hit the last page or the
    bytes before the pool.
    """
    cache, k, v = new_cache(fmt, layout), new_tokens(), new_tokens()
    before = [x.clone() for x in memory(cache)]
    msattn.store_kv(k, v, cache, torch.tensor(SLOTS))
    written = [s for s in SLOTS if s >= 0]
    changed = sum(int((a != b).sum()) for a, b in zip(memory(cache), before, strict=True))
    size = len(written) * fmt.bytes_per_token(CONFIG)
    # A stored byte may happen to be 0xff, what was there before; few are.
    assert 0.9 * size < changed <= size
    dense = new_cache(fmt)
    msattn.store_kv(k, v, dense, torch.tensor(SLOTS))
    for got, want in zip(cache.dequantize(), dense.dequantize(), strict=True):
        assert_bitwise_equal("layout", got, want)
        unwritten = torch.ones(PAGES * 128, dtype=torch.bool)
        unwritten[written] = False
        assert got.transpose(1, 2).flatten(0, 1)[unwritten].isnan().all()
        assert got.transpose(1, 2).flatten(0, 1)[~unwritten].isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_last_write_wins(fmt: msattn.KVFormat) -> None:
    """A reused slot holds the new token alone: writes do not accumulate."""
    reused, fresh = new_cache(fmt), new_cache(fmt)
    slots, k, v = torch.tensor(SLOTS), new_tokens(), new_tokens()
    msattn.store_kv(1000 * new_tokens(), 1000 * new_tokens(), reused, slots)
    for cache in (reused, fresh):
        msattn.store_kv(k, v, cache, slots)
    for got, want in zip(memory(reused), memory(fresh), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_strides_and_integer_type_of_slots_do_not_matter(fmt: msattn.KVFormat) -> None:
    want, got = new_cache(fmt), new_cache(fmt)
    k, v, slots = new_tokens(), new_tokens(), torch.tensor(SLOTS)
    msattn.store_kv(k, v, want, slots)
    every_third = torch.full((3 * len(SLOTS),), 77, dtype=torch.int32)[::3]
    every_third.copy_(slots)
    last_stride_2 = torch.stack([v, v + 1], dim=-1)[..., 0]
    msattn.store_kv(strided(k), last_stride_2, got, every_third)
    assert torch.equal(memory(got)[0], memory(want)[0])


@pytest.mark.parametrize("fmt", PLAIN, ids=str)
def test_excess_saturates_and_nan_stays(fmt: msattn.KVFormat) -> None:
    """A large key must not become NaN or infinity, nor a NaN a number."""
    cache = new_cache(fmt)
    values = torch.tensor([3e38, -3e38, math.inf, -math.inf, math.nan, 400.0, -0.0, 1.0])
    k = values.repeat(CONFIG.head_dim // 8).expand(1, CONFIG.num_kv_heads, -1)
    msattn.store_kv(k, k, cache, torch.tensor([130]))
    largest = torch.tensor(fmt.max_value)
    want = values.clamp(-largest, largest).to(fmt.storage_dtype).float()
    for pool in (cache.k, cache.v):
        got = pool[1, 0, 2, :8].float()
        assert torch.equal(got.isnan(), values.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert not got.isinf().any()


def test_one_large_channel_in_e4m3() -> None:
    """A key with one channel of 400: that channel is kept, the others are not dragged along."""
    cache, k = new_cache(msattn.KV_FORMATS["fp8_e4m3"]), new_tokens(1)
    k[..., 17] = 400.0
    msattn.store_kv(k, k, cache, torch.tensor([3]))
    read = cache.dequantize()[0][0, :, 3]
    assert read.isfinite().all()
    assert (read[:, 17] == 416.0).all() or (read[:, 17] == 384.0).all()
    others = torch.arange(CONFIG.head_dim) != 17
    error = (read - k[0].float())[:, others].norm() / k[0].float()[:, others].norm()
    assert error < 0.04


@pytest.mark.parametrize("fmt", PLAIN, ids=str)
def test_every_name_of_a_format_stores_the_same_bytes(fmt: msattn.KVFormat) -> None:
    k, v, slots = new_tokens(), new_tokens(), torch.tensor(SLOTS)
    want = new_cache(fmt)
    msattn.store_kv(k, v, want, slots)
    for name in (*fmt.aliases, fmt.name.upper(), fmt.storage_dtype):
        cache = msattn.KVCache.from_tensor(make_pool(fmt, CONFIG, PAGES), CONFIG, name)
        msattn.store_kv(k, v, cache, slots)
        assert torch.equal(memory(cache)[0], memory(want)[0]), name


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_pool_of_bytes(name: str) -> None:
    """An engine's uint8 pool is written and read as the format that it is said to have."""
    fmt, k, v, slots = msattn.KV_FORMATS[name], new_tokens(), new_tokens(), torch.tensor(SLOTS)
    pool = torch.full((PAGES, *fmt.page_shape(CONFIG)), 0xFF, dtype=torch.uint8)
    cache, want = msattn.KVCache.from_tensor(pool, CONFIG, name), new_cache(fmt)
    for c in (cache, want):
        msattn.store_kv(k, v, c, slots)
    assert_bitwise_equal("pool", pool, want.tensor.view(torch.uint8))


def test_scale_tensor_is_read_at_every_call() -> None:
    """One element of a larger tensor, four bytes into it, changed in place between two calls."""
    fmt = msattn.KV_FORMATS["fp8_e4m3"]
    scales = torch.tensor([math.nan, 0.25, math.nan])
    pool = make_pool(fmt, CONFIG, PAGES)
    cache = msattn.KVCache.from_tensor(pool, CONFIG, fmt, k_scale=scales[1:2], v_scale=scales[1:2])
    x = torch.ones(1, CONFIG.num_kv_heads, CONFIG.head_dim)
    for scale, stored in ((0.25, 4.0), (0.5, 2.0)):
        scales[1] = scale
        msattn.store_kv(x, x, cache, torch.tensor([7]))
        assert (cache.k[0, :, 7].float() == stored).all()
        assert (cache.v[0, :, 7].float() == stored).all()
        assert (cache.dequantize()[0][0, :, 7] == 1.0).all()


def test_no_tokens() -> None:
    cache = new_cache(msattn.KV_FORMATS["bf16"])
    before = memory(cache)[0].clone()
    msattn.store_kv(new_tokens(0), new_tokens(0), cache, torch.zeros(0, dtype=torch.int64))
    msattn.store_kv(new_tokens(2), new_tokens(2), cache, torch.tensor([-1, -1]))
    assert torch.equal(memory(cache)[0], before)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_chunks_of_any_size_store_the_same(
    fmt: msattn.KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, got = new_cache(fmt), new_cache(fmt)
    k, v, slots = new_tokens(), new_tokens(), torch.tensor(SLOTS)
    msattn.store_kv(k, v, want, slots)
    monkeypatch.setattr(reference_store, "CHUNK_BYTES", 4 * k[0].numel() * 3)  # three tokens
    msattn.store_kv(k, v, got, slots)
    assert torch.equal(memory(got)[0], memory(want)[0])


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.in_index], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_index_keys_are_rounded_once_into_their_slots(
    fmt: msattn.KVFormat, dtype: torch.dtype
) -> None:
    index = make_index_cache(CONFIG, PAGES, fmt)
    before = memory(index)[0].clone()
    index_k = torch.randn(len(SLOTS), CONFIG.index_head_dim).to(dtype)
    msattn.store_index_k(index_k, index, torch.tensor(SLOTS))
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            stored = index_k[token].float().to(fmt.storage_dtype)
            got = index.tensor[slot // 128, slot % 128]
            assert torch.equal(as_bytes(got), as_bytes(stored))
    tokens = len([s for s in SLOTS if s >= 0])
    changed = int((memory(index)[0] != before).sum())
    size = tokens * CONFIG.index_head_dim * fmt.storage_dtype.itemsize
    assert 0.9 * size < changed <= size


def test_index_keys_with_a_head_axis_and_pools_of_any_strides() -> None:
    """``[T, 1, Di]`` keys, and ``[pages, 1, 128, Di]`` pools with gaps, as engines have them."""
    index_k, slots = torch.randn(len(SLOTS), CONFIG.index_head_dim), torch.tensor(SLOTS)
    want = msattn.IndexCache.allocate(PAGES, CONFIG, "fp32")
    msattn.store_index_k(index_k, want, slots)
    pool = torch.zeros(PAGES, 3, 128, CONFIG.index_head_dim + 16)[:, 1:2, :, 16:]
    got = msattn.IndexCache.from_tensor(pool, CONFIG)
    msattn.store_index_k(strided(index_k.unsqueeze(1)), got, slots.int())
    assert torch.equal(pool[:, 0], want.tensor)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS.values() if x.pool != "hnd"], ids=str)
def test_nothing_is_copied(layout: Layout) -> None:
    """Whatever the strides, the cache writes into the engine's own memory."""
    fmt = msattn.KV_FORMATS["bf16"]
    pool = make_pool(fmt, CONFIG, PAGES, layout)
    cache = msattn.KVCache.from_tensor(pool, CONFIG, fmt)
    x = new_tokens(1)
    msattn.store_kv(x, x, cache, torch.tensor([300]))
    k = pool[0] if isinstance(pool, tuple) else pool[..., : CONFIG.head_dim]
    v = pool[1] if isinstance(pool, tuple) else pool[..., CONFIG.head_dim :]
    assert torch.equal(k[2, :, 44], x[0]) and torch.equal(v[2, :, 44], x[0])
