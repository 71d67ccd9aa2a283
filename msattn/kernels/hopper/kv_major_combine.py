"""The merge of a token's partial outputs, behind the KV-major schedule on Hopper.

Partial outputs lie in lines, ``[4, GROUP, 32]`` numbers with the columns of a line as the product's
threads had them (see :mod:`.attend_kv_major`). A thread has numbers of few rows, and loads the LSEs
of these: the loop has no barrier.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...plan import Plan
from ..triton import launch
from ..triton.attend_kv_major import ReverseIndex
from .attend_union import LN2, D, yields


@gluon.jit(do_not_specialize=["num_rows", "head", "first_token", "num_slots", "max_entries"])
def _combine_kernel(
    partial_out_ptr,  # [heads at once, chunk tokens * K, 4, GROUP, 32]
    lse_ptr,  # [T, Hkv, K, GROUP] fp32, base 2
    row_request_ptr,
    out_ptr,
    stride_out_t,
    stride_out_h,
    stride_out_d,
    out_lse_ptr,
    stride_lse_t,
    stride_lse_h,
    overlap_ptr,
    num_rows,
    head,  # the first one of the launch
    num_heads,
    first_token,
    num_slots,
    max_entries,
    COST: gl.constexpr,
    SLOTS: gl.constexpr,  # K rounded up to a power of two
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """out = sum of partial outputs, weighted by 2^(lse - max); one program: a token and KV head."""
    if not yields(overlap_ptr, COST):
        return
    head += gl.program_id(1)
    row = first_token + gl.program_id(0)
    if row >= num_rows:
        return
    if gl.load(row_request_ptr + row) < 0:
        return
    lines: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 8, 4], [2, WARPS // 2, 1], [2, 1, 0]
    )  # [4, GROUP_ROWS, 32]
    heads: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, lines))
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, lines)))
    member = gl.arange(0, GROUP_ROWS, layout=heads)
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, lines)))
    live = member < GROUP
    lses = lse_ptr + (row.to(gl.int64) * num_heads + head) * num_slots * GROUP
    maximum = gl.full([GROUP_ROWS], float("-inf"), gl.float32, layout=heads)
    for i in gl.static_range(SLOTS):
        there = live & (i < num_slots)
        lse = gl.load(lses + i * GROUP + member, mask=there, other=float("-inf"))
        maximum = gl.maximum(maximum, lse)
    empty = maximum == float("-inf")
    shift = gl.where(empty, 0.0, maximum)
    total = gl.zeros([GROUP_ROWS], gl.float32, layout=heads)
    for i in gl.static_range(SLOTS):
        there = live & (i < num_slots)
        lse = gl.load(lses + i * GROUP + member, mask=there, other=float("-inf"))
        total += gl.exp2(lse - shift)
    scale = 1.0 / gl.where(empty, 1.0, total)
    acc = gl.zeros([4, GROUP_ROWS, 32], gl.float32, layout=lines)
    first = gl.program_id(1) * max_entries.to(gl.int64) + gl.program_id(0) * num_slots
    parts = partial_out_ptr + first * (GROUP * D)
    at = (quarter * (GROUP * 32))[:, None, None] + (member * 32)[None, :, None] + c[None, None, :]
    whole_fours = num_slots // 4 * 4
    for i in range(0, whole_fours, 4):
        # Four in flight. Loaded whether used or not: no load waits for a weight.
        lse_0, part_0 = _load_part(lses, parts, at, member, i, GROUP, GROUP_ROWS)
        lse_1, part_1 = _load_part(lses, parts, at, member, i + 1, GROUP, GROUP_ROWS)
        lse_2, part_2 = _load_part(lses, parts, at, member, i + 2, GROUP, GROUP_ROWS)
        lse_3, part_3 = _load_part(lses, parts, at, member, i + 3, GROUP, GROUP_ROWS)
        acc = _add_part(acc, lse_0, part_0, shift, scale)
        acc = _add_part(acc, lse_1, part_1, shift, scale)
        acc = _add_part(acc, lse_2, part_2, shift, scale)
        acc = _add_part(acc, lse_3, part_3, shift, scale)
    for i in range(whole_fours, num_slots):
        lse_0, part_0 = _load_part(lses, parts, at, member, i, GROUP, GROUP_ROWS)
        acc = _add_part(acc, lse_0, part_0, shift, scale)
    # Columns of 32 back in order: number 8 q + 2 j + e of a line is column 8 j + 2 q + e.
    acc = gl.reshape(acc.to(out_ptr.dtype.element_ty), (4, GROUP_ROWS, 4, 4, 2))
    acc = gl.reshape(gl.permute(acc, (1, 0, 3, 2, 4)), (GROUP_ROWS, D))
    whole: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    q_head = head * GROUP + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, whole))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, whole))
    own = out_ptr + row.to(gl.int64) * stride_out_t
    gl.store(
        own + (q_head * stride_out_h)[:, None] + (d * stride_out_d)[None, :],
        gl.convert_layout(acc, whole),
        mask=(q_head < (head + 1) * GROUP)[:, None],
    )
    if HAS_LSE:
        lse = (shift + gl.log2(total)) * LN2
        own_lse = out_lse_ptr + row.to(gl.int64) * stride_lse_t + (head * GROUP) * stride_lse_h
        gl.store(own_lse + member * stride_lse_h, gl.where(empty, float("-inf"), lse), mask=live)


@gluon.jit
def _load_part(
    lses, parts, at, member, i, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr
):  # fmt: skip
    """LSE and partial output of one slot; a load with a mask is not moved up by the assembler."""
    if GROUP == GROUP_ROWS:
        lse = gl.load(lses + i * GROUP + member)
        part = gl.load(parts + i * (GROUP * D) + at)
    else:
        live = member < GROUP
        lse = gl.load(lses + i * GROUP + member, mask=live, other=float("-inf"))
        part = gl.load(parts + i * (GROUP * D) + at, mask=live[None, :, None], other=0.0)
    return lse, part


@gluon.jit
def _add_part(acc, lse, part, shift, scale):
    """Memory of a slot that is no pick holds anything, NaN too."""
    part = gl.where((lse > float("-inf"))[None, :, None], part.to(gl.float32), 0.0)
    return acc + part * (gl.exp2(lse - shift) * scale)[None, :, None]


def combine(
    partial_out: torch.Tensor,
    index: ReverseIndex,
    plan: Plan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    group_rows: int,
    common: dict[str, object],
) -> None:
    """Merge what a chunk's picks left in ``partial_out`` and ``index.lse``, where tiles yield.

    ``common`` has the arguments that this kernel and the one before it take alike.
    """
    lse_arguments = (index.lse, 0, 0) if lse is None else (lse, *lse.stride())
    warps = min(group_rows // 4, 8)
    _combine_kernel[(index.chunk_tokens, index.heads_at_once)](
        partial_out,
        index.lse,
        plan.tiles(1).request,
        out,
        *out.stride(),
        *lse_arguments,
        num_rows=plan.max_rows,
        **common,
        SLOTS=launch.power_of_two_above(index.lse.shape[2]),
        GROUP_ROWS=group_rows,
        HAS_LSE=lse is not None,
        # A thread has 16 numbers of each partial output, two loads of 16 bytes.
        WARPS=warps,
        num_warps=warps,
    )
