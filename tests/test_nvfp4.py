"""NVFP4 pages, byte for byte: codes, block scales, their places, global scales."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import msattn
from msattn.reference.quantize import nvfp4_decode, nvfp4_encode
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import assert_bitwise_equal, assert_close, expected_attention
from msattn.testing.make import make, make_block_ids

CONFIG = make_config(group=1, kv_heads=2)
HEADS, SLOT_BYTES, CODE_BYTES = 2, 9216, 8192
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# 16 inputs, the byte of their scale, and the bytes of their codes; global scale 1.
GOLDEN = {
    "steps": ([-2.0 + 0.25 * i for i in range(16)], 0x2B, "ffeecd9b10436576"),
    "zeros": ([0.0] * 16, 0x01, "0000000000000000"),
    "tiny": ([0.001 * i for i in range(16)], 0x01, "1032546566777777"),
    "saturated": ([3600.0] + [1.0] * 15, 0x7E, "0700000000000000"),
    "signs": ([(-1) ** i * (i + 1) * 0.37 for i in range(16)], 0x38, "91b2c4d5e5e6f6f7"),
}


def new_cache(pages: int = 3, **scales: msattn.cache.Scale) -> msattn.KVCache:
    return msattn.KVCache.allocate(pages, CONFIG, "nvfp4", **scales)


def slot_bytes(cache: msattn.KVCache, page: int, head: int, side: int) -> list[int]:
    """The 9216 bytes of a slot, read from the pool's memory and not through any view."""
    empty = torch.empty(0, dtype=torch.uint8, device=cache.device)
    raw = empty.set_(cache.tensor.untyped_storage())
    start = cache.tensor.storage_offset() + page * cache.tensor.stride(0)
    start += (2 * head + side) * SLOT_BYTES
    return raw[start : start + SLOT_BYTES].tolist()


def code_at(token: int, d: int) -> int:
    return token * 64 + d // 2


def scale_at(side: int, token: int, group: int) -> int:
    """K's scales are linear, V's in token quads."""
    if side == 0:
        return CODE_BYTES + token * 8 + group
    return CODE_BYTES + token // 4 * 32 + group * 4 + token % 4


def e4m3(byte: int) -> float:
    """The number that an E4M3 byte stands for, by arithmetic."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    magnitude = (
        math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    )
    return -magnitude if byte & 0x80 else magnitude


def element(slot: list[int], side: int, token: int, d: int) -> float:
    nibble = slot[code_at(token, d)] >> (4 * (d % 2)) & 15
    magnitude = E2M1[nibble & 7] * e4m3(slot[scale_at(side, token, d // 16)])
    return -magnitude if nibble & 8 else magnitude


@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_in_their_places(name: str, side: int) -> None:
    """Contract 9: each vector at several tokens, heads and groups; all other bytes stay 0."""
    values, scale, codes = GOLDEN[name]
    for token, head, group in itertools.product((0, 1, 2, 5, 127), range(HEADS), (0, 3, 7)):
        cache = new_cache()
        x = torch.zeros(1, HEADS, 128)
        x[0, head, 16 * group : 16 * group + 16] = torch.tensor(values)
        msattn.store_kv(x, x, cache, torch.tensor([128 + token]))
        want = [0] * SLOT_BYTES
        for g in range(8):
            want[scale_at(side, token, g)] = 0x01
        want[scale_at(side, token, group)] = scale
        at = code_at(token, 16 * group)
        want[at : at + 8] = bytes.fromhex(codes)
        assert slot_bytes(cache, 1, head, side) == want
        assert not any(slot_bytes(cache, 0, head, side) + slot_bytes(cache, 2, head, side))


def test_every_token_head_and_group_has_a_place_of_its_own() -> None:
    """A full page whose scale bytes and codes tell where they belong, in both sides."""
    cache = new_cache(2)
    token, head, group = torch.meshgrid(
        torch.arange(128), torch.arange(HEADS), torch.arange(8), indexing="ij"
    )
    # amax / 6 is an E4M3 number: 64 of them, the one of (token + 3 * head + 5 * group) % 64.
    bytes_k = 16 + (token + 3 * head + 5 * group) % 64
    bytes_v = 16 + (token + 3 * head + 5 * group + 1) % 64
    amax = torch.tensor([6.0 * e4m3(b) for b in range(128)])
    shape = torch.tensor(E2M1 + tuple(-x for x in E2M1)) / 6.0
    k = (amax[bytes_k].unsqueeze(-1) * shape).flatten(-2)
    v = (amax[bytes_v].unsqueeze(-1) * shape.flip(0)).flatten(-2)
    msattn.store_kv(k, v, cache, torch.arange(128, 256))
    codes = [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]
    for h, side in itertools.product(range(HEADS), (0, 1)):
        slot = slot_bytes(cache, 1, h, side)
        row = codes if side == 0 else codes[::-1]
        packed = [row[i] | row[i + 1] << 4 for i in range(0, 16, 2)]
        assert slot[:CODE_BYTES] == packed * (CODE_BYTES // 8)
        scales = bytes_k if side == 0 else bytes_v
        for t, g in itertools.product(range(128), range(8)):
            assert slot[scale_at(side, t, g)] == scales[t, h, g]


def test_dequantize_reads_any_bytes() -> None:
    """All codes under all scale bytes (NaN ones too), by the arithmetic of the format."""
    cache = new_cache(2, k_scale=0.25, v_scale=3.0)
    cache.tensor.copy_(torch.randint(0, 256, cache.tensor.shape, dtype=torch.uint8))
    read = cache.dequantize(torch.float64)
    for page, head, side in itertools.product(range(2), range(HEADS), (0, 1)):
        slot = slot_bytes(cache, page, head, side)
        want = torch.tensor(
            [[element(slot, side, t, d) for d in range(128)] for t in range(128)],
            dtype=torch.float64,
        )
        got = read[side][page, head] / (0.25, 3.0)[side]
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.allclose(got.nan_to_num(), want.nan_to_num(), rtol=1e-7, atol=0)


def test_ties_go_to_the_even_code() -> None:
    """Halfway between two codes, and the numbers next to it on both sides, of both signs."""
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for value, code in ties.items():
        below = math.nextafter(value, 0) * (1 - 2**-20)
        above = value * (1 + 2**-20)
        values = [6.0, value, below, above, -value, -below, -above] + [0.0] * 9
        codes, scales = nvfp4_encode(torch.tensor([values]))
        assert scales.view(torch.uint8).item() == 0x38  # 1.0
        nibbles = [b >> s & 15 for b in codes[0].tolist() for s in (0, 4)]
        low, high = (code - 1, code) if E2M1[code] > value else (code, code + 1)
        sign = [0 if c == 0 else 8 for c in (code, low, high)]
        assert nibbles[1:4] == [code, low, high]
        assert nibbles[4:7] == [s | c for s, c in zip(sign, (code, low, high), strict=True)]


def test_codes_are_the_nearest_ones() -> None:
    """Against a search through all codes; scales are the rounded amax / 6."""
    x = torch.randn(500, 128) * torch.logspace(-5, 3, 500).unsqueeze(-1)
    codes, scales = nvfp4_encode(x)
    groups = x.unflatten(-1, (-1, 16))
    want = (groups.abs().amax(-1) / 6).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    assert_bitwise_equal("scales", scales, want)
    decoded = nvfp4_decode(codes, scales).unflatten(-1, (-1, 16))
    grid = torch.tensor(E2M1 + tuple(-v for v in E2M1))
    candidates = scales.float()[..., None, None] * grid
    best = (groups.unsqueeze(-1) - candidates).abs().amin(-1)
    assert torch.allclose((groups - decoded).abs(), best, rtol=1e-5, atol=1e-9)


def test_zero_has_one_code() -> None:
    """What rounds to zero is +0 whatever its sign, so that codes compare as bytes."""
    values = [-0.0, -0.2, 0.2, -1e-30] + [0.0] * 11 + [6.0]
    codes, _ = nvfp4_encode(torch.tensor([values]))
    assert codes[0].tolist() == [0] * 7 + [0x70]


@pytest.mark.parametrize("special", [math.inf, -math.inf, 1e30, -2689.0])
def test_excess_saturates(special: float) -> None:
    cache, x = new_cache(), torch.full((1, HEADS, 128), 1.5)
    x[..., 3] = special
    msattn.store_kv(x, x, cache, torch.tensor([0]))
    for side in cache.dequantize():
        assert (side[0, :, 0, 3] == math.copysign(2688.0, special)).all()
        assert (side[0, :, 0, 16:] == 1.5).all()
        assert side.isfinite().all()


def test_nan_stays_nan_in_its_group() -> None:
    cache, x = new_cache(), torch.full((1, HEADS, 128), 1.5)
    x[..., 3] = math.nan
    msattn.store_kv(x, x, cache, torch.tensor([0]))
    for side in cache.dequantize():
        assert side[0, :, 0, 3].isnan().all()
        assert (side[0, :, 0, 16:] == 1.5).all()


@pytest.mark.parametrize("scale", [0.3, 1.7, 3.1, 2.0**-7])
@pytest.mark.parametrize("form", ["float", "0d", "slice"])
def test_global_scales_other_than_one(scale: float, form: str) -> None:
    """Codes are those of x / g by true division, and reading multiplies by g."""
    forms = {
        "float": lambda g: g,
        "0d": torch.tensor,
        "slice": lambda g: torch.tensor([math.nan, g, math.nan])[1:2],
    }
    k, v = torch.randn(2, 20, HEADS, 128)
    slots = torch.arange(250, 270)
    scaled, unit = (
        new_cache(k_scale=forms[form](scale), v_scale=forms[form](2 * scale)),
        new_cache(),
    )
    msattn.store_kv(k, v, scaled, slots)
    g = torch.tensor(scale)
    msattn.store_kv(k / g, v / (2 * g), unit, slots)
    assert_bitwise_equal("bytes", scaled.tensor, unit.tensor)
    read, plain = scaled.dequantize(), unit.dequantize()
    assert torch.equal(read[0], plain[0] * g) and torch.equal(read[1], plain[1] * (2 * g))


def test_round_trip_error_of_both_sides() -> None:
    """About 0.095 relative for normal numbers, K and V alike: 0.7 would be misplaced scales."""
    cache, (k, v) = new_cache(4), torch.randn(2, 512, HEADS, 128)
    msattn.store_kv(k, v, cache, torch.arange(512))
    for x, read in zip((k, v), cache.dequantize(), strict=True):
        got = read.transpose(1, 2).flatten(0, 1)
        assert 0.085 < float((got - x).norm() / x.norm()) < 0.105


def test_views_share_the_pool() -> None:
    """Strided views of the engine's memory, also where a page holds several layers."""
    pool = torch.zeros(4, 3, 2 * HEADS, 128, 72, dtype=torch.uint8)
    cache = msattn.KVCache.from_tensor(pool[:, 1], CONFIG, "nvfp4")
    views = cache.nvfp4_views()
    page = 3 * 2 * HEADS * SLOT_BYTES
    for view in views:
        assert view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        assert view.stride()[:2] == (page, 2 * SLOT_BYTES)
    base = 2 * HEADS * SLOT_BYTES
    assert [view.storage_offset() - base for view in views] == [0, 8192, 9216, 9216 + 8192]
    assert views.k_codes.stride()[2:] == (64, 1) and views.k_scales.stride()[2:] == (8, 1)
    assert views.v_codes.stride()[2:] == (64, 1) and views.v_scales.stride()[2:] == (32, 4, 1)
    x = torch.ones(1, HEADS, 128)
    msattn.store_kv(x, x, cache, torch.tensor([200]))
    assert pool[:, 1].any() and not pool[:, 0].any() and not pool[:, 2].any()


@pytest.mark.parametrize("length", [1, 3, 14, 15, 130])
def test_a_last_quad_and_group_of_few_tokens(length: int, seed: int) -> None:
    """14 tokens with NaN behind them: neither a quad of V's scales nor a tile needs to be full."""
    inputs = make(Case("few", (1, length), (length, length), CONFIG), seed=seed, kv_format="nvfp4")
    ids = make_block_ids(inputs, seed=seed, hostile=False)
    out = msattn.attend(inputs.q, inputs.cache, ids, inputs.plan())
    assert out.isfinite().all()
    assert_close("out", out, expected_attention(inputs, ids)[0])


def test_attention_over_quantised_keys_is_near_the_unquantised(seed: int) -> None:
    """The looser check: what 4 bits cost in the output, where no scale is misplaced."""
    exact, packed = (
        make(CASES["mixed"], seed=seed, kv_format=fmt, layout=LAYOUTS["layers"])
        for fmt in ("bf16", "nvfp4")
    )
    ids = make_block_ids(exact, seed=seed, hostile=False)
    want, _ = expected_attention(exact, ids)
    got, _ = expected_attention(packed, ids)
    assert 0.05 < float((got - want).norm() / want.norm()) < 0.25
