"""Device functions that several kernels share: where a row stands, and tiles of K and V as numbers."""

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
"""Tokens of a block and of a page."""

# How a cache stores its numbers (FORMAT): as 16 bits, as 8, or as NVFP4.
WIDE, FP8, NVFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Form of a dequantisation factor (SCALE): a number, or one for each head and slot.
PER_TENSOR, PER_SLOT = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def row_position(row, request, cu_seqlens_ptr, seq_lens_ptr):
    """Position of a query row: the last of a request's rows stands at its last position."""
    return tl.load(seq_lens_ptr + request) - (tl.load(cu_seqlens_ptr + request + 1) - row)


@triton.jit
def page_of_block(page_table_ptr, stride_table, request, block, num_pages):
    """int64 page of a block, -1 where it has none."""
    page = tl.load(page_table_ptr + request * stride_table + block).to(tl.int64)
    return tl.where((page >= 0) & (page < num_pages), page, -1)
