"""Stage 2 in Triton: a tile of neighbouring tokens, with all its index heads, reads the keys once.

A tile is up to ``rows / heads`` consecutive tokens of one request. The matrix product's rows are
(head, token) pairs, so that a page of keys is read once for all heads and tokens, in prefill as in
decode. The blocks that a tile sees are shared out evenly over several programs where there are few
tiles.

Products are summed in fp32 by the tensor cores. Where these multiply e4m3 natively, e4m3 queries
and keys stay as they are; Hopper's fp8 product keeps fewer bits of the sums (relative 1.5e-4),
which may swap blocks whose scores are as close as that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ...arch import capability, has_warpgroups
from ...cache import IndexCache
from ...plan import Plan
from . import indexer_compact
from .index_tiles import (
    Constants,
    block_scores,
    choose_stages,
    load_page,
    load_queries,
    operand,
    share_out,
    tile_facts,
)
from .launch import (
    can_copy_in_bulk,
    follow_arguments,
    has_native_fp8,
    page_descriptor,
    raw,
)
from .recording import fill, start
from .selection import select_rows
from .tiles import BLOCK, follow, page_of_block

SCORE_BYTES = 256 << 20
"""Scores that :func:`index_select` holds at a time; 8,192 tokens of M3 at 128K take 143 MB."""


@triton.jit(
    do_not_specialize=[
        "stride_out_head",
        "stride_out_row",
        "stride_out_block",
        "stride_table",
        "num_pages",
        "num_blocks",
        "first_row",
        "end_row",
    ]
)
def _index_scores_kernel(
    q_ptr,  # [T, Hi, D]
    stride_q_row,
    stride_q_head,
    stride_q_dim,
    k_ptr,  # [pages, BLOCK, D], last stride 1
    stride_k_page,
    stride_k_token,
    k_desc,  # the keys for the bulk copy engine, TMA only
    out_ptr,  # [Hi, rows from first_row on, num_blocks] fp32
    stride_out_head,
    stride_out_row,
    stride_out_block,
    tile_request_ptr,  # [tiles] int32
    tile_row_ptr,  # [tiles] int32
    cu_seqlens_ptr,
    seq_lens_ptr,
    page_table_ptr,
    stride_table,
    num_pages,
    num_blocks,
    first_row,
    end_row,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # a power of two
    TOKENS: tl.constexpr,  # of a tile
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,  # of the product's operands
    NATIVE_FP8: tl.constexpr,
    KEYS_FIRST: tl.constexpr,  # keys are the rows of the product, and queries its columns
    TMA: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """out[h, t, b] = max(q[t, h] . k[j] for the keys j of block b up to t's position)

    One program: a share of the blocks that one tile of tokens sees. Blocks that none of the tile's
    tokens sees, and rows outside first_row .. end_row - 1, are not written.
    """
    follow(FOLLOWS)
    # A prompt's last tiles see most, and start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request, tile_row, tile_end, offset, visible, full = tile_facts(
        tile, tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr, num_blocks, end_row,
        TOKENS,
    )  # fmt: skip
    share = tl.cdiv(visible, tl.num_programs(1))
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, visible)
    if (request < 0) | (begin >= end) | (tile_end <= tl.maximum(tile_row, first_row)):
        return

    r = tl.arange(0, HEADS_PADDED * TOKENS)
    head, row = r // TOKENS, tile_row + r % TOKENS
    live = (head < HEADS) & (row < tile_end)  # [rows]
    q = load_queries(q_ptr, stride_q_row, stride_q_head, stride_q_dim, row, head, live, DIM)
    q = operand(q, DTYPE, NATIVE_FP8)
    d, n = tl.arange(0, DIM), tl.arange(0, BLOCK)
    out_row = (row - first_row).to(tl.int64)
    out_at = out_ptr + head.to(tl.int64) * stride_out_head + out_row * stride_out_row
    stride_out_block = stride_out_block.to(tl.int64)
    live &= row >= first_row
    if KEYS_FIRST:
        q = tl.trans(q)
        k_at = k_ptr + n[:, None] * stride_k_token + d[None, :]
    else:
        k_at = k_ptr + n[None, :] * stride_k_token + d[:, None]

    # A page is looked up one block ahead: a load in the loop that the keys' load waits for would
    # take half of the stages.
    next_page = page_of_block(page_table_ptr, stride_table, request, begin, num_pages)
    for block in range(begin, end):
        page = next_page
        k = load_page(k_at, k_desc, page, stride_k_page, KEYS_FIRST, TMA)
        following = tl.minimum(block + 1, end - 1)
        next_page = page_of_block(page_table_ptr, stride_table, request, following, num_pages)
        score = block_scores(
            q, k, offset + row, block, full, page, DTYPE, NATIVE_FP8, KEYS_FIRST
        )  # fmt: skip
        tl.store(out_at + block * stride_out_block, score, mask=live)


def index_scores(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    *,
    constants: Constants | None = None,
    num_splits: int | None = None,
) -> None:
    fill(out, -math.inf)
    if index.num_pages:
        options = {"constants": constants, "num_splits": num_splits}
        score_rows(index_q, index, plan, out, 0, **options)


def index_select(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    *,
    constants: Constants | None = None,
    num_splits: int | None = None,
) -> None:
    if constants is None and indexer_compact.pays(index_q, index, plan):
        select_by(indexer_compact.score_rows, index_q, index, plan, out, num_splits=num_splits)
        return
    select_by(score_rows, index_q, index, plan, out, constants=constants, num_splits=num_splits)


def select_by(
    score: Callable[..., None],
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """:func:`msattn.index_select` with the scores of ``score``, which is like score_rows.

    As many rows are scored at a time as there is memory for.
    """
    tokens, heads, _ = index_q.shape
    # Rows begin where a 128-byte line does, for the selection that reads them.
    width = triton.cdiv(plan.num_blocks, 32) * 32
    held = min(triton.next_power_of_2(tokens * heads * width), SCORE_BYTES // 4)
    # Powers of two: as a plan's bounds grow, few sizes are asked for, and all of them together take
    # no more than twice the largest.
    memory = plan.workspace("index_scores", (max(held, heads * width),), torch.float32)
    chunk = max(1, held // (heads * width)) if width else tokens
    for first_row in range(0, tokens, chunk):
        rows = min(chunk, tokens - first_row)
        scores = memory[: rows * heads * width].view(heads, rows, width)
        scores = scores[..., : plan.num_blocks]
        # The selection reads a row's visible blocks alone, and those are written.
        if index.num_pages:
            score(index_q, index, plan, scores, first_row, **options)
        else:
            fill(scores, -math.inf)
        select_rows(scores, plan, out, first_row)


def score_rows(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    first_row: int,
    *,
    constants: Constants | None = None,
    num_splits: int | None = None,
) -> None:
    """Scores of the rows from ``first_row`` on, as many as ``out`` ``[Hi, n, num_blocks]`` has.

    Blocks that a row does not see may be left as they are.
    """
    dim = index.head_dim
    dtype = operand_dtype(index_q.dtype, index.tensor.dtype, dim, index_q.device)
    key_bytes = dim * dtype.primitive_bitwidth // 8
    share = share_out(
        index_q,
        index,
        plan,
        out,
        first_row,
        key_bytes,
        constants=constants,
        num_splits=num_splits,
    )
    if not all(share.grid):
        return
    queries, keys = index_q, index.tensor
    if dtype != tl.float8e4nv:
        queries, keys = raw(queries), raw(keys)
    warpgroups = has_warpgroups(capability(index_q.device))
    tma = warpgroups and keys.dtype == index_q.dtype and can_copy_in_bulk(keys)
    start(
        _index_scores_kernel,
        share.grid,
        queries,
        *queries.stride(),
        keys,
        keys.stride(0),
        keys.stride(1),
        page_descriptor(keys) if tma else None,
        out,
        *out.stride(),
        **share.facts,
        DTYPE=dtype,
        NATIVE_FP8=has_native_fp8(index_q.device),
        KEYS_FIRST=share.constants.keys_first,
        TMA=tma,
        **follow_arguments(index_q.device),
        num_warps=share.constants.num_warps,
        num_stages=choose_stages(share.constants.num_stages, key_bytes),
    )


def operand_dtype(
    query: torch.dtype, keys: torch.dtype, dim: int, device: torch.device
) -> tl.dtype:
    """Type in which both are multiplied: one that holds the numbers of both."""
    e4m3 = torch.float8_e4m3fn
    if query == keys == e4m3:
        # An fp8 product takes 32 elements at a time.
        return tl.float8e4nv if has_native_fp8(device) and dim >= 32 else tl.float16
    wide = {query, keys} - {e4m3}
    if len(wide) == 2:
        return tl.float32  # rounded to tf32, which holds bf16 as well as fp16
    return tl.bfloat16 if wide == {torch.bfloat16} else tl.float16
