"""Device functions that several kernels share: where a row stands, tiles of K and V as numbers."""

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
"""Tokens of a block and of a page."""

# How a cache stores its numbers (FORMAT): as 16 bits, as 8, or as NVFP4.
WIDE, FP8, NVFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

NVFP4_FACTOR = tl.constexpr(256.0)
"""NVFP4 tiles hold 1/256 of their numbers: E2M1 codes become fp16 by a shift, off by 2^14, and the
block scales, up to 448, have room in fp16 for 2^6 of it."""


@triton.jit
def row_position(row, request, cu_seqlens_ptr, seq_lens_ptr):
    """Position of a query row: the last of a request's rows stands at its last position."""
    return tl.load(seq_lens_ptr + request) - (tl.load(cu_seqlens_ptr + request + 1) - row)


@triton.jit
def page_of_block(page_table_ptr, stride_table, request, block, num_pages):
    """int64 page of a block, -1 where it has none."""
    page = tl.load(page_table_ptr + request * stride_table + block).to(tl.int64)
    return tl.where((page >= 0) & (page < num_pages), page, -1)


@triton.jit
def fp8_to_fp16(x, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers of fp8 bytes, exact; by shifts where the target has no conversion."""
    if NATIVE:
        if E5M2:
            return x.to(tl.float8e5, bitcast=True).to(tl.float16)
        else:
            return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif E5M2:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        # The exponent's bias differs by 8; 0x7f is NaN, which the shift would turn into 480.
        bits = ((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)
        bits = tl.where((x & 0x7F) == 0x7F, 0x7E00, bits).to(tl.uint16)
        return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def nvfp4_to_fp16(codes, scales, ROWS: tl.constexpr, D: tl.constexpr):
    """codes [ROWS, D/2] uint8, scales [ROWS, D/16] fp16 -> [ROWS, D] fp16, 1/256 of the numbers."""
    low, high = codes & 0xF, codes >> 4
    nibbles = tl.reshape(tl.join(low, high), (ROWS, D)).to(tl.uint16)
    bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
    values = tl.reshape(bits.to(tl.float16, bitcast=True), (ROWS, D // 16, 16))
    return tl.reshape(values * (scales * 64.0)[:, :, None], (ROWS, D))


@triton.jit
def load_k_tile(
    base,
    stride_token,
    num_keys,
    FORMAT: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    D: tl.constexpr,
):
    """K of one page and head as ``[D, BLOCK]``; keys from num_keys on are 0."""
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    if FORMAT == NVFP4:
        g = tl.arange(0, D // 16)
        live = (n < num_keys)[:, None]
        codes = tl.load(base + n[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :], live, 0)
        scales = base + BLOCK * (D // 2) + n[:, None] * (D // 16) + g[None, :]
        scales = fp8_to_fp16(tl.load(scales, live, 0), False, False)
        return tl.trans(nvfp4_to_fp16(codes, scales, BLOCK, D)).to(COMPUTE)
    x = tl.load(
        base + n[None, :] * stride_token + d[:, None], mask=(n < num_keys)[None, :], other=0
    )
    if FORMAT == FP8:
        x = fp8_to_fp16(x, E5M2, NATIVE_FP8)
    return x.to(COMPUTE)


@triton.jit
def load_v_tile(
    base,
    stride_token,
    num_keys,
    FORMAT: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    D: tl.constexpr,
):
    """V of one page and head as ``[BLOCK, D]``; tokens from num_keys on are 0.

    Zeros, not only weights of 0: 0 * NaN is NaN, and the memory behind a sequence may hold it.
    """
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    live = (n < num_keys)[:, None]
    if FORMAT == NVFP4:
        g = tl.arange(0, D // 16)
        codes = tl.load(base + n[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :], live, 0)
        # Scales lie in quads of tokens.
        scales = base + BLOCK * (D // 2) + (n // 4 * (D // 4) + n % 4)[:, None] + g[None, :] * 4
        scales = fp8_to_fp16(tl.load(scales, live, 0), False, False)
        return nvfp4_to_fp16(codes, scales, BLOCK, D).to(COMPUTE)
    x = tl.load(base + n[:, None] * stride_token + d[None, :], mask=live, other=0)
    if FORMAT == FP8:
        x = fp8_to_fp16(x, E5M2, NATIVE_FP8)
    return x.to(COMPUTE)


@triton.jit
def load_scale(scale, IS_POINTER: tl.constexpr):
    """A dequantisation factor that is a number, or lies on the device."""
    if IS_POINTER:
        return tl.load(scale)
    else:
        return scale
