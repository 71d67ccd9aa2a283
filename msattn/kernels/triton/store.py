"""Stage 1 in Triton: each program quantises some tokens of a KV head and scatters them.

Every format is rounded by integer arithmetic or by a conversion that all targets have, so that the
same bytes are written on all of them: sm_80 has no conversion to E4M3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...cache import CompactKeys, IndexCache, KVCache, Scale
from ...config import BLOCK_SIZE
from ...kv_format import KVFormat
from .launch import raw
from .recording import start
from .tiles import BLOCK, nearest, rotate

# What a dequantisation factor is to the kernel.
_UNIT, _NUMBER, _TENSOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def minifloat(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Code without its sign of the float nearest to |x|, ties to even, as int32.

    |x| must not exceed the largest number of the format; NaN gives a code beyond all.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = (127 - BIAS) << 23
    # Adding it leaves a multiple of the smallest subnormal, rounded, in the mantissa's last bits.
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    normal = (bits - REBIAS + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    magic = (bits * 0 + MAGIC).to(tl.float32, bitcast=True)
    subnormal = (bits.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    return tl.where(bits < REBIAS + (1 << 23), subnormal, normal)


@triton.jit
def saturate(x, limit):
    """x within +-limit; NaN stays, as no comparison with it is true."""
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)


@triton.jit
def to_storage(x, limit, E4M3: tl.constexpr, E5M2: tl.constexpr, DTYPE: tl.constexpr):
    """fp32 to a plain format's elements; fp8 as bytes."""
    x = saturate(x, limit)
    if E4M3 or E5M2:
        code = minifloat(x, 3, 7) if E4M3 else minifloat(x, 2, 15)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(DTYPE)


@triton.jit
def nvfp4_encode(x, ROWS: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] fp32 -> codes [ROWS, D/2] uint8 and E4M3 scales [ROWS, D/16] uint8.

    scale = E4M3(max |x| / 6), at least 2^-9; code = E2M1(x / scale), a zero always +0.
    """
    groups = tl.reshape(x, (ROWS, D // 16, 16))
    # As integers, the maximum of a group with a NaN is that NaN.
    largest = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 6.0)
    scale = tl.where(scale < 0.001953125, 0.001953125, scale)
    is_number = scale == scale
    scale = tl.where(is_number, minifloat(saturate(scale, 448.0), 3, 7), 0x7F)
    # What the byte stands for: the exponent's bias of E4M3 is 7, that of fp16 is 15.
    divisor = (scale << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    ratio = tl.div_rn(groups, divisor[:, :, None])
    code = minifloat(saturate(ratio, 6.0), 1, 1)
    code |= tl.where((ratio < 0) & (code > 0), 8, 0)
    code = tl.where(is_number[:, :, None], code, 0)
    low, high = tl.split(tl.reshape(code, (ROWS, D // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def over_scale(x, scale, head, slot, valid, stride_head, stride_slot, SCALE: tl.constexpr):
    """x / scale in fp32, the division rounded correctly."""
    x = x.to(tl.float32)
    if SCALE == _UNIT:
        return x
    elif SCALE == _NUMBER:
        return tl.div_rn(x, scale)
    else:
        factor = tl.load(scale + head * stride_head + slot * stride_slot, mask=valid, other=1.0)
        return tl.div_rn(x, factor[:, None])


@triton.jit
def store_plain(
    x, pool, page, offset, valid, stride_page, stride_token, limit,
    E4M3: tl.constexpr, E5M2: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write rows of x [TOKENS, D] where the tokens' slots are."""
    x = to_storage(x, limit, E4M3, E5M2, pool.dtype.element_ty)
    place = page * stride_page + offset * stride_token
    tl.store(pool + place[:, None] + tl.arange(0, D)[None, :], x, mask=valid[:, None])


@triton.jit
def store_nvfp4(
    x, pool, page, offset, valid, stride_page,
    QUADS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write codes and block scales of x [TOKENS, D]; QUADS: scales lie in quads of tokens."""
    codes, scales = nvfp4_encode(x, TOKENS, D)
    codes_at = (page * stride_page + offset * (D // 2))[:, None] + tl.arange(0, D // 2)[None, :]
    tl.store(pool + codes_at, codes, mask=valid[:, None])
    groups = tl.arange(0, D // 16)[None, :]
    if QUADS:
        at = (page * stride_page + offset // 4 * (D // 4) + offset % 4)[:, None] + groups * 4
    else:
        at = (page * stride_page + offset * (D // 16))[:, None] + groups
    tl.store(pool + BLOCK * (D // 2) + at, scales, mask=valid[:, None])


@triton.jit
def load_slots(slots_ptr, stride_slots, num_tokens, num_slots, TOKENS: tl.constexpr):
    """This program's tokens, their slots, and which of them lie in the pool; int64."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    slot = tl.load(slots_ptr + token * stride_slots, mask=exists, other=-1).to(tl.int64)
    return token, slot, exists & (slot >= 0) & (slot < num_slots)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _store_kv_kernel(
    k_ptr, stride_kt, stride_kh, stride_kd,  # [T, Hkv, D]
    v_ptr, stride_vt, stride_vh, stride_vd,  # [T, Hkv, D]
    slots_ptr, stride_slots,  # [T]
    k_pool_ptr, stride_kpp, stride_kph, stride_kpt,  # [pages, Hkv, 128, D], or slots of bytes
    v_pool_ptr, stride_vpp, stride_vph, stride_vpt,
    k_scale, stride_ksh, stride_kss,  # number, or [Hkv, slots] with strides
    v_scale, stride_vsh, stride_vss,
    num_tokens,
    num_slots,
    limit,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    E4M3: tl.constexpr, E5M2: tl.constexpr, NVFP4: tl.constexpr,
    TOKENS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """pool[slot] = round(x / scale)

    One program: K and V of TOKENS tokens of one KV head.
    """
    head = tl.program_id(1).to(tl.int64)
    token, slot, valid = load_slots(slots_ptr, stride_slots, num_tokens, num_slots, TOKENS)
    page, offset = slot // BLOCK, slot % BLOCK
    d = tl.arange(0, D)[None, :]

    k_at = (token * stride_kt + head * stride_kh)[:, None] + d * stride_kd
    v_at = (token * stride_vt + head * stride_vh)[:, None] + d * stride_vd
    k = tl.load(k_ptr + k_at, mask=valid[:, None], other=0.0)  # [TOKENS, D]
    v = tl.load(v_ptr + v_at, mask=valid[:, None], other=0.0)
    k = over_scale(k, k_scale, head, slot, valid, stride_ksh, stride_kss, K_SCALE)
    v = over_scale(v, v_scale, head, slot, valid, stride_vsh, stride_vss, V_SCALE)

    k_pool, v_pool = k_pool_ptr + head * stride_kph, v_pool_ptr + head * stride_vph
    if NVFP4:
        store_nvfp4(k, k_pool, page, offset, valid, stride_kpp, False, TOKENS, D)
        store_nvfp4(v, v_pool, page, offset, valid, stride_vpp, True, TOKENS, D)
    else:
        store_plain(k, k_pool, page, offset, valid, stride_kpp, stride_kpt, limit, E4M3, E5M2, D)
        store_plain(v, v_pool, page, offset, valid, stride_vpp, stride_vpt, limit, E4M3, E5M2, D)


@triton.jit
def compact_encode(x, rounding, TOKENS: tl.constexpr, D: tl.constexpr):
    """Index keys as stored, [TOKENS, D] fp32 -> codes int8 and fp16 pairs (scale, bound) as int32.

    See :class:`msattn.CompactKeys`. A key that is not finite, or too large for a scale of fp16, has
    a bound of infinity.
    """
    x = rotate(x, TOKENS, D)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(largest, 127.0).to(tl.float16)
    # Of an infinity and of NaN, x * 0 is NaN.
    bounded = (scale.to(tl.float32) < float("inf")) & (tl.sum(x * 0.0, 1) == 0.0)
    scale = tl.where(bounded, scale, 0.0).to(tl.float16)
    x = tl.where(bounded[:, None], x, 0.0)
    step = scale.to(tl.float32)
    codes = nearest(tl.div_rn(x, tl.where(step > 0.0, step, 1.0)[:, None]))
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    error = x - codes * step[:, None]
    bound = tl.sqrt(tl.sum(error * error, 1)) + rounding * tl.sqrt(tl.sum(x * x, 1))
    # Upwards: by more than fp32 and fp16 round, and never 0.
    bound = tl.where(bounded, bound * (1 + 2**-8) + 2**-23, float("inf")).to(tl.float16)
    low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = bound.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return codes.to(tl.int8), low | high


@triton.jit
def store_compact(
    x, codes_ptr, factors_ptr, page, offset, valid, stride_page, rounding,
    TOKENS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the compact copy of keys [TOKENS, D] fp32, as they are stored."""
    codes, factors = compact_encode(x, rounding, TOKENS, D)
    at = page * stride_page + offset * D
    tl.store(codes_ptr + at[:, None] + tl.arange(0, D)[None, :], codes, mask=valid[:, None])
    tl.store(factors_ptr + page * (stride_page // 4) + offset, factors, mask=valid)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _store_index_k_kernel(
    x_ptr, stride_t, stride_d,  # [T, Di]
    slots_ptr, stride_slots,  # [T]
    pool_ptr, stride_page, stride_token,  # [pages, 128, Di]
    codes_ptr, factors_ptr, stride_compact,  # [pages, 128, Di] int8, [pages, 128] int32
    num_tokens,
    num_slots,
    limit,
    rounding,
    E4M3: tl.constexpr, COMPACT: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """pool[slot] = round(x)

    One program: TOKENS tokens.
    """
    token, slot, valid = load_slots(slots_ptr, stride_slots, num_tokens, num_slots, TOKENS)
    at = (token * stride_t)[:, None] + tl.arange(0, D)[None, :] * stride_d
    x = tl.load(x_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)  # [TOKENS, D]
    page, offset = slot // BLOCK, slot % BLOCK
    store_plain(x, pool_ptr, page, offset, valid, stride_page, stride_token, limit, E4M3, False, D)
    if COMPACT:
        x = to_storage(x, limit, False, False, pool_ptr.dtype.element_ty).to(tl.float32)
        store_compact(
            x, codes_ptr, factors_ptr, page, offset, valid, stride_compact, rounding, TOKENS, D
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages"])
def _refresh_kernel(
    pool_ptr, stride_page, stride_token,  # [pages, 128, Di]
    pages_ptr, stride_pages,  # [n]
    codes_ptr, factors_ptr, stride_compact,  # [pages, 128, Di] int8, [pages, 128] int32
    num_pages,
    rounding,
    TOKENS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The compact copy of a page's keys; one program: TOKENS of them."""
    page = tl.load(pages_ptr + tl.program_id(0).to(tl.int64) * stride_pages).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        return
    offset = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    at = page * stride_page + offset[:, None] * stride_token + tl.arange(0, D)[None, :]
    x = tl.load(pool_ptr + at).to(tl.float32)
    store_compact(
        x, codes_ptr, factors_ptr, page, offset, offset >= 0, stride_compact, rounding, TOKENS, D
    )  # fmt: skip


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    num_tokens, heads, dim = k.shape
    tokens = _tokens_per_program(num_tokens * heads)
    k_scale, *k_scale_strides, k_scale_kind = _scale_arguments(cache.k_scale)
    v_scale, *v_scale_strides, v_scale_kind = _scale_arguments(cache.v_scale)
    k_pool, v_pool = _sides(cache)
    start(
        _store_kv_kernel,
        (triton.cdiv(num_tokens, tokens), heads),
        k,
        *k.stride(),
        v,
        *v.stride(),
        slot_mapping,
        slot_mapping.stride(0),
        k_pool,
        *k_pool.stride()[:3],
        v_pool,
        *v_pool.stride()[:3],
        k_scale,
        *k_scale_strides,
        v_scale,
        *v_scale_strides,
        num_tokens,
        cache.num_pages * BLOCK_SIZE,
        cache.format.max_value,
        K_SCALE=k_scale_kind,
        V_SCALE=v_scale_kind,
        **_format_arguments(cache.format),
        NVFP4=bool(cache.format.scale_group),
        TOKENS=tokens,
        D=dim,
    )


def store_index_k(index_k: torch.Tensor, index: IndexCache, slot_mapping: torch.Tensor) -> None:
    num_tokens, dim = index_k.shape
    tokens, pool = _tokens_per_program(num_tokens), raw(index.tensor)
    start(
        _store_index_k_kernel,
        (triton.cdiv(num_tokens, tokens),),
        index_k,
        *index_k.stride(),
        slot_mapping,
        slot_mapping.stride(0),
        pool,
        *pool.stride()[:2],
        *_compact_arguments(index.compact),
        num_tokens,
        index.num_pages * BLOCK_SIZE,
        index.format.max_value,
        CompactKeys.rounding(dim),
        E4M3=_format_arguments(index.format)["E4M3"],
        COMPACT=index.compact is not None,
        TOKENS=tokens,
        D=dim,
    )


def refresh_compact_keys(index: IndexCache, pages: torch.Tensor) -> None:
    tokens, keys = 16, index.tensor
    start(
        _refresh_kernel,
        (len(pages), BLOCK_SIZE // tokens),
        keys,
        *keys.stride()[:2],
        pages,
        pages.stride(0),
        *_compact_arguments(index.compact),
        index.num_pages,
        CompactKeys.rounding(index.head_dim),
        TOKENS=tokens,
        D=index.head_dim,
    )


def _compact_arguments(
    compact: CompactKeys | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Codes, both factors of a key as one word, and the bytes from page to page."""
    if compact is None:
        return None, None, 0
    return compact.codes, compact.words, compact.tensor.stride(0)


def _tokens_per_program(rows: int) -> int:
    """Few rows: more programs, as each waits for memory; many: fewer, each with more in flight."""
    return 4 if rows <= 1024 else 16


def _sides(cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with one head of a page at ``[page, head]``; in NVFP4, a run of bytes."""
    if not cache.format.scale_group:
        return raw(cache.k), raw(cache.v)
    views = cache.nvfp4_views()
    return views.k_codes, views.v_codes


def _format_arguments(fmt: KVFormat) -> dict[str, bool]:
    return {
        "E4M3": fmt.storage_dtype == torch.float8_e4m3fn,
        "E5M2": fmt.storage_dtype == torch.float8_e5m2,
    }


def _scale_arguments(scale: Scale) -> tuple[Scale, int, int, int]:
    """The factor, its strides over heads and slots, and what it is to the kernel."""
    if isinstance(scale, torch.Tensor):
        strides = scale.stride() if scale.dim() == 2 else (0, 0)
        return scale, *strides, _TENSOR.value
    return scale, 0, 0, _UNIT.value if scale == 1.0 else _NUMBER.value
