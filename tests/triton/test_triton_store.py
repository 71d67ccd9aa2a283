"""Stage 1 in Triton: the stage's tests, served by the kernels, and the bytes of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from test_nvfp4 import (  # noqa: F401
    test_every_token_head_and_group_has_a_place_of_its_own,
    test_excess_saturates,
    test_global_scales_other_than_one,
    test_nan_stays_nan_in_its_group,
    test_views_share_the_pool,
)
from test_store import *  # noqa: F403
from test_store import CONFIG, PAGES, memory

import msattn
from msattn.testing.cases import LAYOUTS, ScaleKind, scale_kinds_of
from msattn.testing.make import (
    K_SCALE,
    V_SCALE,
    as_bytes,
    make_index_cache,
    make_pool,
    make_scale,
    poisoned,
    strided,
)

pytestmark = [
    pytest.mark.usefixtures("on_device"),
    # numpy's, in the interpreter: of NaN, infinities and 32-bit arithmetic that wraps.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FORMATS = [fmt for fmt in msattn.KV_FORMATS.values() if fmt.name != "fp32"]


def awkward_tokens(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every magnitude, ties of every format, zeros of both signs, NaN, infinities."""
    shape = (count, CONFIG.num_kv_heads, CONFIG.head_dim)
    x = torch.randn(shape) * torch.randint(-18, 12, (*shape[:2], 1)).float().exp2()
    # Multiples of 1/64 up to 6, with the group's maximum 6: halfway between codes at scale 1.
    x[0] = torch.arange(-192, 192).view(shape[1:]) / 64
    x[0, :, ::16] = 6
    x[1] = x[0] * 2.0**-9  # subnormal in both fp8 formats' neighbourhood
    x[2], x[3] = 0.0, -0.0
    x[4, 1, 5], x[5, :, 3], x[6, 0, 17] = math.nan, math.inf, -math.inf
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("fmt", "scales"), [(f, s) for f in FORMATS for s in scale_kinds_of(f)], ids=str
)
def test_bytes_are_those_of_the_reference(
    fmt: msattn.KVFormat, scales: ScaleKind, dtype: torch.dtype
) -> None:
    """All bytes of the pool, NaN payloads aside; slots beyond the pool are skipped by kernels."""
    k, v = awkward_tokens(37, dtype), awkward_tokens(37, torch.float32).flip(1)
    slots = torch.randperm(PAGES * 128)[:37]
    slots[[8, 20]] = -1
    pools = []
    for impl in ("reference", "triton"):
        pool = make_pool(fmt, CONFIG, PAGES, LAYOUTS["layers"])
        k_scale, v_scale = (make_scale(x, scales, CONFIG, PAGES) for x in (K_SCALE, V_SCALE))
        cache = msattn.KVCache.from_tensor(pool, CONFIG, fmt, k_scale=k_scale, v_scale=v_scale)
        msattn.store_kv(k, v, cache, slots, impl=impl)
        pools.append(memory(cache)[0])
    want, got = (pool.view(fmt.storage_dtype) for pool in pools)
    if not fmt.scale_group:
        want, got = want.float(), got.float()
        assert torch.equal(want.isnan(), got.isnan())
        want, got = want.nan_to_num(), got.nan_to_num()
        assert torch.equal(want.signbit(), got.signbit())
    assert torch.equal(want, got)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.is_fp8], ids=str)
def test_every_16_bit_number(fmt: msattn.KVFormat) -> None:
    """All bf16 and fp16 numbers, through the fp8 rounding of integer arithmetic."""
    config = msattn.MSAConfig(1, 1, 1)
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        x = bits.view(dtype).view(-1, 1, 128)
        cache = msattn.KVCache.allocate(len(x) // 128, config, fmt, device=x.device)
        msattn.store_kv(x, x, cache, torch.arange(len(x)), impl="triton")
        limit = torch.tensor(fmt.max_value, dtype=torch.float32)
        want = x.float().clamp(-limit, limit).to(fmt.storage_dtype).view(-1)
        for side in (cache.k, cache.v):
            got = side.reshape(-1)
            assert torch.equal(got.float().isnan(), x.isnan().view(-1))
            number = ~x.isnan().view(-1)
            assert torch.equal(got.view(torch.uint8)[number], want.view(torch.uint8)[number])


def test_slots_beyond_the_pool_are_skipped() -> None:
    """Where the host cannot look at them, nothing is written behind the pool."""
    from msattn.kernels.triton.store import store_index_k, store_kv

    slots = torch.tensor([3, PAGES * 128, 2**31 + 7, 2**40, -(2**40), PAGES * 128 - 1])
    x = awkward_tokens(7, torch.bfloat16)[:6]
    for fmt in FORMATS:
        cache = msattn.KVCache.from_tensor(make_pool(fmt, CONFIG, PAGES), CONFIG, fmt)
        before = memory(cache)[0].clone()
        store_kv(x, x, cache, slots)
        changed = int((memory(cache)[0] != before).sum())
        assert 0 < changed <= 2 * fmt.bytes_per_token(CONFIG)
    index = make_index_cache(CONFIG, PAGES, "bf16")
    before = memory(index)[0].clone()
    store_index_k(x[:, 0], index, slots)
    assert 0 < int((memory(index)[0] != before).sum()) <= 2 * 2 * CONFIG.index_head_dim


@pytest.mark.parametrize("count", [1, 5, 700])
def test_any_number_of_tokens_and_any_strides_of_them(count: int) -> None:
    """Programs of 4 and of 16 tokens, the last one of few; K token-major, V dimension-major."""
    fmt = msattn.KV_FORMATS["fp8_e4m3"]
    k = torch.randn(count, CONFIG.num_kv_heads, CONFIG.head_dim).bfloat16()
    v = poisoned((CONFIG.head_dim, CONFIG.num_kv_heads, count), torch.float32, k.device)
    v = v.copy_(torch.randn(v.shape)).permute(2, 1, 0)
    slots, pages = torch.randperm(768)[:count], 6
    caches = [
        msattn.KVCache.from_tensor(make_pool(fmt, CONFIG, pages), CONFIG, fmt) for _ in range(2)
    ]
    msattn.store_kv(k, v, caches[0], slots, impl="reference")
    msattn.store_kv(strided(k), v, caches[1], slots, impl="triton")
    assert torch.equal(*(memory(cache)[0] for cache in caches))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_pages_beyond_32_bit_offsets(fmt: msattn.KVFormat) -> None:
    """A layer of a pool of more than 2^32 elements; its first page and its last one."""
    page = fmt.page_shape(CONFIG)
    size = page[0] * page[1] * page[2]
    layers = 2**32 // (3 * size) + 1
    pool = torch.zeros(3, layers, *page, dtype=fmt.storage_dtype)
    cache = msattn.KVCache.from_tensor(pool[:, -1], CONFIG, fmt)
    want = msattn.KVCache.allocate(3, CONFIG, fmt, device=pool.device)
    k, v = awkward_tokens(8, torch.bfloat16)[:2], awkward_tokens(8, torch.bfloat16)[:2] + 1
    slots = torch.tensor([1, 3 * 128 - 1])
    msattn.store_kv(k, v, cache, slots, impl="triton")
    msattn.store_kv(k, v, want, slots, impl="reference")
    assert torch.equal(as_bytes(pool[:, -1]), as_bytes(want.tensor))
