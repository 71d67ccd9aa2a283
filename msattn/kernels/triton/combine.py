"""Stage 5 in Triton: all parts of a row are read once, weighed and summed in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MAX_PARTS = 8
"""Parts of one launch; more go in groups, whose merged state is kept in fp32 on the way."""


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    outs_ptrs,  # tuple of PARTS: [T, Hq, D]
    outs_strides,  # tuple of PARTS: strides (t, h, d)
    lses_ptrs,  # tuple of PARTS: [T, Hq]
    lses_strides,  # tuple of PARTS: strides (t, h)
    out_ptr, stride_ot, stride_oh, stride_od,  # [T, Hq, D]; may be one of the parts
    lse_out_ptr, stride_lt, stride_lh,  # [T, Hq]; may be one of the parts
    num_rows,
    num_heads,
    dim,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """lse = logsumexp(lses); out = sum(exp(lse_i - lse) * out_i)

    One program: ROWS rows, a row being a token and a query head.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    token, head = row // num_heads, row % num_heads
    d = tl.arange(0, D)[None, :]

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        lse_ptr = lses_ptrs[i] + token * lses_strides[i][0] + head * lses_strides[i][1]
        best = tl.maximum(best, tl.load(lse_ptr, mask=exists, other=0.0))
    shift = tl.where(best == float("-inf"), 0.0, best)

    normalizer = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    for i in tl.static_range(PARTS):
        lse_ptr = lses_ptrs[i] + token * lses_strides[i][0] + head * lses_strides[i][1]
        weight = tl.exp(tl.load(lse_ptr, mask=exists, other=0.0) - shift)
        normalizer += weight
        out_at = (token * outs_strides[i][0] + head * outs_strides[i][1])[:, None]
        # A part that weighs nothing is not read: its memory may hold NaN.
        read = (exists & (weight != 0.0))[:, None] & (d < dim)
        part = tl.load(outs_ptrs[i] + out_at + d * outs_strides[i][2], mask=read, other=0.0)
        total += part.to(tl.float32) * weight[:, None]
    # Not exp(lse - merged): the rounding of a large merged LSE would scale the whole output.
    total = total / tl.where(normalizer == 0.0, 1.0, normalizer)[:, None]

    out_at = (token * stride_ot + head * stride_oh)[:, None] + d * stride_od
    mask = exists[:, None] & (d < dim)
    # Every load is above: a part that is the output too has been read.
    tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=mask)
    lse_at = token * stride_lt + head * stride_lh
    tl.store(lse_out_ptr + lse_at, shift + tl.log(normalizer), mask=exists)


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse_out: torch.Tensor,
) -> None:
    outs, lses = list(outs), list(lses)
    while len(outs) > MAX_PARTS:
        merged = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        merged_lse = torch.empty(lse_out.shape, dtype=torch.float32, device=out.device)
        _merge(outs[:MAX_PARTS], lses[:MAX_PARTS], merged, merged_lse)
        outs, lses = [merged, *outs[MAX_PARTS:]], [merged_lse, *lses[MAX_PARTS:]]
    _merge(outs, lses, out, lse_out)


def _merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse_out: torch.Tensor,
) -> None:
    num_tokens, num_heads, dim = out.shape
    rows, width = 8, triton.next_power_of_2(max(dim, 1))
    _merge_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        tuple(outs),
        tuple(part.stride() for part in outs),
        tuple(lses),
        tuple(lse.stride() for lse in lses),
        out,
        *out.stride(),
        lse_out,
        *lse_out.stride(),
        num_tokens * num_heads,
        num_heads,
        dim,
        PARTS=len(outs),
        ROWS=rows,
        D=width,
    )
