"""A decode plan's lengths and pages, refreshed in one launch before a graph is replayed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024
"""Table entries of a program."""


@triton.jit(do_not_specialize=["stride_table_r", "stride_table_b", "stride_out", "num_columns"])
def _refresh_kernel(
    seq_lens_ptr,  # [R] int32
    stride_lens,
    page_table_ptr,  # [R, B] int32
    stride_table_r,
    stride_table_b,
    seq_lens_out_ptr,  # [R] int32
    page_table_out_ptr,  # [R, B] int32
    stride_out,
    num_columns,
    COLUMNS: tl.constexpr,
):
    """One program: COLUMNS table entries of a request; the first one copies its length, too."""
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        tl.store(seq_lens_out_ptr + request, tl.load(seq_lens_ptr + request * stride_lens))
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    mine = column < num_columns
    source = page_table_ptr + request * stride_table_r + column * stride_table_b
    page = tl.load(source, mask=mine)
    tl.store(page_table_out_ptr + request * stride_out + column, page, mask=mine)


def refresh(
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens_out: torch.Tensor,
    page_table_out: torch.Tensor,
) -> None:
    rows, columns = page_table_out.shape
    if rows == 0:
        return
    _refresh_kernel[(rows, max(triton.cdiv(columns, COLUMNS), 1))](
        seq_lens,
        seq_lens.stride(0),
        page_table,
        *page_table.stride(),
        seq_lens_out,
        page_table_out,
        page_table_out.stride(0),
        columns,
        COLUMNS=COLUMNS,
    )
