"""Online softmax of a consumer's 64 rows, where queries are the rows of the products.

A consumer's products and softmax follow one another, and the softmax is half of the time. So what a
row does not see is no element's business, unless the page is seen in part: rows that a page is not
of lose their weights in pairs. Maxima and sums of a thread are taken side by side, and a row's sum
stays with the four threads that have its numbers until the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_KEEP = gl.constexpr("and.b32 $0, $1, $2;")
"""Two numbers of 16 bits, or zeros."""


@gluon.jit
def _by_thread(x):
    """``[rows, 4, 4, threads, 2]``: what a thread has of a row, and which of the four has it."""
    return gl.reshape(x, (x.shape[0], 4, 4, 4, 2))


@gluon.jit
def _max_of_rows(s):
    return gl.max(gl.max(gl.max(gl.max(_by_thread(s), 4), 1), 1), 1)


@gluon.jit
def sum_own(p):
    """Of each row, the sums of its four threads: ``[rows, threads]``."""
    return gl.sum(gl.sum(gl.sum(_by_thread(p), 4), 1), 1)


@gluon.jit
def sum_of_rows(sums, layout: gl.constexpr):
    """Of :func:`sum_own`."""
    return gl.convert_layout(gl.sum(sums, 1), layout)


@gluon.jit
def add_page(s, mine, running_max, sums, scale, dtype: gl.constexpr):
    """A page's weights ``[rows, keys]``, the factor of what came before, maximum and sums with it.

    Rows that did not choose the page (``mine`` is false) get zeros, also for NaN.
    """
    row_layout: gl.constexpr = running_max.type.layout
    own_layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    row_max = gl.convert_layout(_max_of_rows(s), row_layout)
    row_max = gl.where(mine, row_max, float("-inf"))
    new_max = gl.maximum(running_max, row_max * scale)
    rescale = gl.exp2(running_max - new_max)
    p = gl.exp2(s * scale - new_max[:, None])
    added = gl.where(gl.convert_layout(mine, own_layout)[:, None], sum_own(p), 0.0)
    sums = sums * gl.convert_layout(rescale, own_layout)[:, None] + added
    # A select would take 64 instructions for the 32 registers.
    p = gl.inline_asm_elementwise(
        _KEEP, "=r,r,r,r", [p.to(dtype), gl.where(mine, -1, 0)[:, None]], gl.int16,
        is_pure=True, pack=2,
    )  # fmt: skip
    return p.to(dtype, bitcast=True), rescale, new_max, sums
