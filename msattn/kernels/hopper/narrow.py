"""fp8 and NVFP4 pages as operands of Hopper's products, in the registers of a warpgroup.

Either as first operand, in the very layout that the product wants (keys first, in decode), or as a
page of 16 bits for shared memory (queries first, in verification).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton.tiles import NVFP4
from .attend_union import BLOCK, HALF, D


@gluon.jit
def widen(x, E5M2: gl.constexpr):
    """fp8 bytes as fp16 numbers, exact."""
    if E5M2:
        return x.to(gl.float8e5, bitcast=True).to(gl.float16)
    else:
        return x.to(gl.float8e4nv, bitcast=True).to(gl.float16)


_E2M1_TO_FP16 = gl.constexpr("""{
.reg .b32 first, second, number;
prmt.b32 first, $4, 0, 0x1404;
prmt.b32 second, $4, 0, 0x3424;
shl.b32 number, first, 1;
and.b32 number, number, 0x0e000e00;
shl.b32 $0, first, 4;
lop3.b32 $0, $0, 0x80008000, number, 0xea;
shl.b32 number, second, 1;
and.b32 number, number, 0x0e000e00;
shl.b32 $1, second, 4;
lop3.b32 $1, $1, 0x80008000, number, 0xea;
shr.b32 number, first, 3;
and.b32 number, number, 0x0e000e00;
lop3.b32 $2, first, 0x80008000, number, 0xea;
shr.b32 number, second, 3;
and.b32 number, number, 0x0e000e00;
lop3.b32 $3, second, 0x80008000, number, 0xea;
}""")
"""Four bytes, two of them in the high bytes of a register's halves; then sign, exponent and
mantissa of both halves' low nibbles, and of their high ones, go to their places together."""


@gluon.jit
def _decode_nvfp4(codes, scales, layout: gl.constexpr):
    """NVFP4 bytes [128, 64] and scales [128, 8] as fp16 numbers [128, 128], 1/256 of themselves.

    ``layout`` is of bytes as [128, 8, 8]. See ``nvfp4_to_fp16`` of the twin.
    """
    codes = gl.convert_layout(gl.reshape(codes, (BLOCK, 8, 8)), layout)
    scales = gl.convert_layout(scales * 64.0, gl.SliceLayout(2, layout))[:, :, None]
    low, high = gl.inline_asm_elementwise(
        _E2M1_TO_FP16, "=r,=r,=r,=r,r", [codes], (gl.float16, gl.float16), is_pure=True, pack=4
    )
    return gl.reshape(gl.join(low * scales, high * scales), (BLOCK, D))


@gluon.jit
def in_order_of_k(x, FORMAT: gl.constexpr):
    """Columns of ``[rows, 128]`` as narrow keys have them: see :func:`_narrow_k`."""
    pairs = gl.reshape(x, (x.shape[0], 4, 2, 4, 2, 2))
    if FORMAT == NVFP4:
        # A register has two bytes' numbers, not one byte's.
        return gl.reshape(gl.permute(pairs, (0, 2, 3, 5, 1, 4)), (x.shape[0], D))
    else:
        return gl.reshape(gl.permute(pairs, (0, 2, 3, 4, 1, 5)), (x.shape[0], D))


@gluon.jit
def _narrow_k(page, scales, FORMAT: gl.constexpr, E5M2: gl.constexpr):
    """K for a product's first operand: 16 bytes at a time become a thread's own, without a move.

    Elements of a key may stand in any order that the queries have too: bits 6 and 5 of an element's
    number are the thread in four, where the operand has bits 2 and 1.
    """
    if FORMAT == NVFP4:
        codes: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [64, 0]],
            [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [128, 64],
        )
        groups: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [8, 0, 0], [64, 0, 0]],
            [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]],
            [],
            [128, 8, 8],
        )
        # A line has 16 tokens' scales.
        lines: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 64], [4, 0]],
            [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
            [[1, 0], [2, 0]],
            [],
            [8, 128],
        )
        factors = gl.reshape(widen(scales.load(lines), False), (BLOCK, 8))
        return in_order_of_k(_decode_nvfp4(page.load(codes), factors, groups), FORMAT)
    else:
        loaded: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0], [64, 0]],
            [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [128, 128],
        )
        return in_order_of_k(widen(page.load(loaded), E5M2), FORMAT)


@gluon.jit
def _halves(k):
    """``[128, 128]`` as two of ``[128, 64]``; what is not used is not loaded."""
    return gl.split(gl.permute(gl.reshape(k, (BLOCK, 2, HALF)), (0, 2, 1)))


@gluon.jit
def narrow_scores(
    page,
    scales,
    queries,
    barrier,
    zero,
    operand: gl.constexpr,
    IN_HALVES: gl.constexpr,
    FORMAT: gl.constexpr,
    E5M2: gl.constexpr,
):
    """K q^T of a narrow page, which is free when its bytes are in registers.

    In halves, where scores and outputs leave registers for no more of the operand.
    """
    queries = queries.permute((1, 0))
    if IN_HALVES:
        k, _ = _halves(_narrow_k(page, scales, FORMAT, E5M2))
        k = gl.convert_layout(k, operand)
        s = warpgroup_mma(k, queries.slice(0, HALF), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        _, k = _halves(_narrow_k(page, scales, FORMAT, E5M2))
        k = gl.convert_layout(k, operand)
        s = warpgroup_mma(k, queries.slice(HALF, HALF), s, is_async=True)
    else:
        k = gl.convert_layout(_narrow_k(page, scales, FORMAT, E5M2), operand)
        s = warpgroup_mma(k, queries, zero, use_acc=False, is_async=True)
    mbarrier.arrive(barrier, count=1)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def narrow_v(
    page, scales, num_keys, operand: gl.constexpr, FORMAT: gl.constexpr, E5M2: gl.constexpr
):  # fmt: skip
    """V^T as a product's first operand: 4 elements of 2 tokens become rows of a thread's.

    Rows stand in an order of their own, :func:`in_order_of_v` undoes it.
    """
    if FORMAT == NVFP4:
        codes: gl.constexpr = gl.DistributedLinearLayout(
            [[1, 0], [0, 1], [8, 0], [16, 0], [32, 0], [64, 0]],
            [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
            [[0, 16], [0, 32]],
            [],
            [128, 64],
        )
        groups: gl.constexpr = gl.DistributedLinearLayout(
            [[1, 0, 0], [0, 0, 1], [8, 0, 0], [16, 0, 0], [32, 0, 0], [64, 0, 0]],
            [[2, 0, 0], [4, 0, 0], [0, 0, 2], [0, 0, 4], [0, 1, 0]],
            [[0, 2, 0], [0, 4, 0]],
            [],
            [128, 8, 8],
        )
        # A line has 4 quads: 8 groups' scales of 4 tokens each.
        lines: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 64], [1, 0], [2, 0], [4, 0]],
            [[0, 2], [0, 32], [0, 0], [0, 0], [0, 4]],
            [[0, 8], [0, 16]],
            [],
            [8, 128],
        )
        factors = gl.reshape(widen(scales.load(lines), False), (32, 8, 4))
        factors = gl.reshape(gl.permute(factors, (0, 2, 1)), (BLOCK, 8))
        factors = gl.convert_layout(factors, gl.SliceLayout(2, groups))
        n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, gl.SliceLayout(2, groups)))
        factors = gl.where((n < num_keys)[:, None], factors, 0.0)
        x = _decode_nvfp4(page.load(codes), factors, groups)
    else:
        loaded: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0], [64, 0]],
            [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
            [[0, 32], [0, 64]],
            [],
            [128, 128],
        )
        x = widen(page.load(loaded), E5M2)
    x = gl.reshape(gl.permute(x, (1, 0)), (4, 8, 2, 2, BLOCK))
    return gl.convert_layout(gl.reshape(gl.permute(x, (2, 0, 3, 1, 4)), (D, BLOCK)), operand)


@gluon.jit
def in_order_of_v(x):
    """The rows of a product of :func:`narrow_v`, in the order of V's elements."""
    x = gl.permute(gl.reshape(x, (2, 4, 2, 8, x.shape[1])), (1, 3, 0, 2, 4))
    return gl.reshape(x, (D, x.shape[4]))


@gluon.jit
def widen_fp8(page, E5M2: gl.constexpr):
    """Of an fp8 page. A thread has 8 bytes side by side, which become the 16 of a store."""
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [16, 0], [32, 0], [64, 0]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        [[2, 0], [4, 0]],
        [],
        [128, 128],
    )
    return widen(page.load(loaded), E5M2)


@gluon.jit
def widen_nvfp4(page, factors, num_keys, IS_V: gl.constexpr):
    """Of an NVFP4 page, 1/256 of its numbers. A thread has 4 bytes, half of a group, side by side.

    Scales are loaded as they lie, by the thread that needs them: K's in lines of 16 tokens, V's in
    lines of 4 quads. V's behind the sequence become 0: they may be NaN.
    """
    codes: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [16, 0], [32, 0], [64, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [1, 0]],
        [[2, 0], [4, 0]],
        [],
        [128, 64],
    )
    groups: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0], [16, 0, 0], [32, 0, 0], [64, 0, 0]],
        [[0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0]],
        [[2, 0, 0], [4, 0, 0]],
        [],
        [128, 8, 8],
    )
    if IS_V:
        lines: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 64], [1, 0], [2, 0], [4, 0]],
            [[0, 0], [0, 4], [0, 8], [0, 16], [0, 1]],
            [[0, 2], [0, 32]],
            [],
            [8, 128],
        )
        quads = gl.reshape(widen(factors.load(lines), False), (32, 8, 4))
        x = gl.reshape(gl.permute(quads, (0, 2, 1)), (BLOCK, 8))
        x = gl.convert_layout(x, gl.SliceLayout(2, groups))
        n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, gl.SliceLayout(2, groups)))
        x = gl.where((n < num_keys)[:, None], x, 0.0)
    else:
        lines: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 64], [1, 0], [2, 0], [4, 0]],
            [[0, 0], [0, 1], [0, 2], [0, 4], [0, 8]],
            [[0, 16], [0, 32]],
            [],
            [8, 128],
        )
        x = gl.reshape(widen(factors.load(lines), False), (BLOCK, 8))
    return _decode_nvfp4(page.load(codes), x, groups)
