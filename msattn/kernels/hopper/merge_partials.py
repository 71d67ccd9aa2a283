"""The merge of a token's partial outputs, beside the tiles of the KV-major schedule on Hopper.

Partial outputs lie in lines, ``[4, GROUP, 32]`` numbers with the columns of a line as the product's
threads had them (see :mod:`.attend_kv_major`). A warpgroup merges those of one token and KV head
without a barrier: each thread has numbers of few rows, of all slots.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attend_union import LN2, D

WARPS = gl.constexpr(4)
NUMBERS = 128
"""Of partial outputs, loaded by a thread before it uses the first: 64 registers."""


def slots_at_once(group_rows: int, slots: int) -> int:
    """Slots whose partial outputs a thread loads together; all three are powers of two."""
    return min(NUMBERS // group_rows, slots)


@gluon.jit
def merge_token(
    parts,  # the token's, [K, 4, GROUP, 32]
    lses,  # [K, GROUP] fp32, base 2: -inf where there is no pick
    out,  # the token's rows of the KV head, [GROUP, 128]
    out_lse,  # [GROUP] fp32
    SLOTS: gl.constexpr,  # K
    PADDED_SLOTS: gl.constexpr,  # a power of two
    AT_ONCE: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """out = sum of partial outputs, weighted by 2^(lse - max)"""
    # [slots, 4, GROUP_ROWS, 32], as many slots as there may be in each thread.
    QUARTER_WARPS: gl.constexpr = WARPS if GROUP_ROWS == 8 else 2
    lines: gl.constexpr = gl.BlockedLayout(
        [AT_ONCE, 1, 1, 8],
        [1, 1, 8, 4],
        [1, QUARTER_WARPS, WARPS // QUARTER_WARPS, 1],
        [3, 1, 2, 0],
    )
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, lines))  # [slots, GROUP_ROWS]
    member = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(0, rows))
    all_slots = gl.arange(0, PADDED_SLOTS, layout=gl.SliceLayout(1, rows))
    slot = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, rows))
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, lines))))
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lines))))
    line = (quarter * (GROUP * 32))[None, :, None, None] + c[None, None, None, :]

    # Loaded whether used or not: no load waits for a weight.
    part = _load_parts(parts, line, slot, member, SLOTS, GROUP)
    lse = _load_lses(lses, all_slots, member, SLOTS, GROUP)
    maximum = gl.max(lse, 0)
    empty = maximum == float("-inf")
    shift = gl.where(empty, 0.0, maximum)
    total = gl.sum(gl.exp2(lse - shift[None, :]), 0)
    scale = 1.0 / gl.where(empty, 1.0, total)
    acc = gl.zeros([4, GROUP_ROWS, 32], gl.float32, layout=gl.SliceLayout(0, lines))
    for first in gl.static_range(0, PADDED_SLOTS, AT_ONCE):
        if first > 0:
            part = _load_parts(parts, line, slot + first, member, SLOTS, GROUP)
        lse = _load_lses(lses, slot + first, member, SLOTS, GROUP)
        weight = gl.exp2(lse - shift[None, :]) * scale[None, :]
        # Memory of a slot that is no pick holds anything, NaN too.
        picked = (lse > float("-inf"))[:, None, :, None]
        acc += gl.sum(gl.where(picked, part.to(gl.float32), 0.0) * weight[:, None, :, None], 0)

    # Columns of 32 back in order: number 8 q + 2 j + e of a line is column 8 j + 2 q + e. Two
    # exchanges between lanes; in one step it would go by shared memory, of which there is no more.
    acc = gl.reshape(acc.to(out.dtype.element_ty), (4, GROUP_ROWS, 4, 4, 2))
    acc = gl.reshape(gl.permute(acc, (1, 0, 3, 2, 4)), (GROUP_ROWS, D))
    acc = gl.convert_layout(acc, _half_ordered(GROUP_ROWS))
    ordered: gl.constexpr = gl.BlockedLayout(
        [1, 8], [8, 4], [WARPS // QUARTER_WARPS, QUARTER_WARPS], [1, 0]
    )
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, ordered))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, ordered))
    acc = gl.convert_layout(acc, ordered)
    gl.store(out + (row * D)[:, None] + d[None, :], acc, mask=(row < GROUP)[:, None])
    if HAS_LSE:
        merged = gl.where(empty, float("-inf"), (shift + gl.log2(total)) * LN2)
        gl.store(out_lse + member, merged, mask=member < GROUP)


@gluon.constexpr_function
def _half_ordered(group_rows):
    """Of ``[group_rows, 128]``: lanes hold 4 columns side by side, of every other 4."""
    registers = [[0, 1], [0, 2], [0, 16], *([[0, 64]] if group_rows > 8 else [])]
    registers += [[row, 0] for row in (16, 32) if row < group_rows]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 32], [8, 0] if group_rows > 8 else [0, 64]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [group_rows, 128])


@gluon.jit
def _load_parts(parts, line, slot, member, SLOTS: gl.constexpr, GROUP: gl.constexpr):
    """Not from a multiprocessor's own cache: the buffer is written anew every other turn."""
    at = slot[:, None] * (GROUP * D) + (member * 32)[None, :]
    live = (slot < SLOTS)[:, None] & (member < GROUP)[None, :]
    return gl.load(
        parts + at[:, None, :, None] + line,
        mask=live[:, None, :, None],
        other=0.0,
        cache_modifier=".cg",
    )


@gluon.jit
def _load_lses(lses, slot, member, SLOTS: gl.constexpr, GROUP: gl.constexpr):
    return gl.load(
        lses + slot[:, None] * GROUP + member[None, :],
        mask=(slot < SLOTS)[:, None] & (member < GROUP)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
