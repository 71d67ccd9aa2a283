"""Device functions that several kernels share: where a row stands, tiles of K and V as numbers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = tl.constexpr(128)
"""Tokens of a block and of a page."""

# How a cache stores its numbers (FORMAT): as 16 bits, as 8, or as NVFP4.
WIDE, FP8, NVFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

NVFP4_FACTOR = tl.constexpr(256.0)
"""NVFP4 tiles hold 1/256 of their numbers: E2M1 codes become fp16 by a shift, off by 2^14, and the
block scales, up to 448, have room in fp16 for 2^6 of it."""


@triton.jit
def follow(FOLLOWS: tl.constexpr):
    """Wait until the kernel before is done, and let the next one start; before any load."""
    if FOLLOWS:
        gdc_wait()
        gdc_launch_dependents()


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
def nearest(x):
    """fp32 rounded to whole numbers, ties to even, where these are less than 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rotate(x, ROWS: tl.constexpr, D: tl.constexpr):
    """x [ROWS, D] fp32 times the R of :class:`msattn.CompactKeys`."""
    for i in tl.static_range(7):
        if (1 << i) < D:
            even, odd = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
            both = tl.join(even + odd, even - odd)
            x = tl.reshape(tl.permute(both, (0, 2, 1)), (ROWS, D))
    return x


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
def column_of(d, FORMAT: tl.constexpr, D: tl.constexpr):
    """The element of a head that column d of a K or V tile holds.

    NVFP4 tiles have the even elements first, then the odd ones: the nibbles of a byte then need not
    be interleaved. Queries and outputs are addressed in the same order.
    """
    if FORMAT == NVFP4:
        return d % (D // 2) * 2 + d // (D // 2)
    else:
        return d


@triton.jit
def nvfp4_to_fp16(codes, scales, INTERLEAVE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """codes [ROWS, D/2] uint8, scales [ROWS, D/16] fp16 -> [ROWS, D] fp16, 1/256 of the numbers.

    Columns as :func:`column_of` says, or with INTERLEAVE in the order of the elements.
    """
    scales = (scales * 64.0)[:, :, None].broadcast_to(ROWS, D // 16, 8)
    scales = tl.reshape(scales, (ROWS, D // 2))
    low, high = _e2m1_to_fp16(codes & 0xF) * scales, _e2m1_to_fp16(codes >> 4) * scales
    both = tl.join(low, high)  # [ROWS, D/2, 2]
    return tl.reshape(both if INTERLEAVE else tl.permute(both, (0, 2, 1)), (ROWS, D))


@triton.jit
def _e2m1_to_fp16(nibble):
    """2^-14 of the number: sign, exponent and mantissa move to their places in fp16."""
    bits = nibble.to(tl.uint16)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)


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
    if FORMAT == WIDE:
        n, d = tl.arange(0, BLOCK), tl.arange(0, D)
        at = base + n[None, :] * stride_token + d[:, None]
        return tl.load(at, mask=(n < num_keys)[None, :], other=0.0).to(COMPUTE)
    else:
        # Row by row, so that 16 bit tiles are transposed, not bytes.
        k = load_narrow_tile(
            base, stride_token, num_keys, False, False, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D
        )
        return tl.trans(k)


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
    if FORMAT == WIDE:
        n, d = tl.arange(0, BLOCK), tl.arange(0, D)
        at = base + n[:, None] * stride_token + d[None, :]
        return tl.load(at, mask=(n < num_keys)[:, None], other=0.0).to(COMPUTE)
    else:
        return load_narrow_tile(
            base, stride_token, num_keys, True, False, FORMAT, E5M2, NATIVE_FP8, COMPUTE, D
        )


@triton.jit
def load_narrow_tile(
    base,
    stride_token,
    num_keys,
    QUADS: tl.constexpr,  # NVFP4 scales lie in quads of tokens, as V's do
    INTERLEAVE: tl.constexpr,  # NVFP4 columns in the order of the elements
    FORMAT: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    D: tl.constexpr,
):
    """An fp8 or NVFP4 tile as ``[BLOCK, D]``; tokens from num_keys on are 0."""
    n = tl.arange(0, BLOCK)
    live = (n < num_keys)[:, None]
    if FORMAT == NVFP4:
        byte, g = tl.arange(0, D // 2), tl.arange(0, D // 16)
        codes = tl.load(base + n[:, None] * (D // 2) + byte[None, :], mask=live, other=0)
        if QUADS:
            scale = (n // 4 * (D // 4) + n % 4)[:, None] + g[None, :] * 4
        else:
            scale = n[:, None] * (D // 16) + g[None, :]
        scales = tl.load(base + BLOCK * (D // 2) + scale, mask=live, other=0)
        scales = fp8_to_fp16(scales, False, NATIVE_FP8)
        return nvfp4_to_fp16(codes, scales, INTERLEAVE, BLOCK, D).to(COMPUTE)
    else:
        d = tl.arange(0, D)
        x = tl.load(base + n[:, None] * stride_token + d[None, :], mask=live, other=0)
        return fp8_to_fp16(x, E5M2, NATIVE_FP8).to(COMPUTE)


@triton.jit
def load_scale(scale, IS_POINTER: tl.constexpr):
    """A dequantisation factor that is a number, or lies on the device."""
    if IS_POINTER:
        return tl.load(scale)
    else:
        return scale


PICK_COST = tl.constexpr(2.3)
"""What a row of a pick costs against a row of a union tile: its partial output is written and read
besides, and its queries are gathered. Measured on an H200."""


@triton.jit
def shares_little(overlap_ptr, TOKENS: tl.constexpr):
    """The tokens of a tile share so few blocks that loading each page for its own picks is faster.

    A listed block costs the rows of a whole tile, a pick those of one token.
    """
    entries, picks = tl.load(overlap_ptr), tl.load(overlap_ptr + 1)
    return entries.to(tl.float32) * TOKENS > picks.to(tl.float32) * PICK_COST


@triton.jit
def signed(q, SIGN: tl.constexpr):
    """Queries that carry the sign of the softmax scale; 0 makes all logits equal."""
    return q if SIGN == 1 else (q.to(tl.float32) * SIGN).to(q.dtype)
