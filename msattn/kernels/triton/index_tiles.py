"""What the kernels of the indexer share: a tile of tokens, its pages, the scores of a block.

A tile is up to ``rows / heads`` consecutive tokens of one request. The matrix product's rows are
(head, token) pairs, so that a page of keys is read once for all heads and tokens.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...arch import capability, has_warpgroups
from ...cache import IndexCache
from ...plan import Plan
from .launch import num_processors, power_of_two_above
from .tiles import BLOCK, fp8_to_fp16

PROGRAM_OVERHEAD_BLOCKS = 2
"""Starting a program (queries, first pages) costs about as much as that many blocks of keys."""


class Constants(NamedTuple):
    """What the kernel is compiled and launched with, besides the shapes."""

    rows: int  # of the matrix product: tokens of a tile x index heads
    num_warps: int
    num_stages: int  # for keys of 256 bytes
    programs_per_processor: int  # that fit side by side: registers and shared memory
    keys_first: bool = False  # keys are the rows of the product, and queries its columns


# Up to 64 rows (decode, verification) the keys come at memory speed, and what counts is how many of
# them are under way; with 128 rows the tensor cores are the limit, and one program multiplies while
# another takes its maxima. Fewer than 64 rows cannot be the rows of a warpgroup's product, but its
# columns: with the same instructions at every size, a token's scores do not depend on its tile.
_WARPGROUP_MMA = {
    16: Constants(16, 4, 3, 2, keys_first=True),
    32: Constants(32, 4, 3, 2, keys_first=True),
    64: Constants(64, 4, 3, 2),
    128: Constants(128, 4, 2, 2),
}
# 99 KB of shared memory is what sm_86, sm_89 and sm_120 have.
_WARP_MMA = {
    16: Constants(16, 4, 3, 1),
    32: Constants(32, 4, 3, 1),
    64: Constants(64, 4, 3, 1),
    128: Constants(128, 8, 3, 1),
}
_WIDE_TILE = Constants(256, 8, 4, 1)
"""For long prompts with 16 bit keys: half the reads of keys, one program on a processor."""


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def operand(x, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """``x`` in the type that is multiplied; bytes of e4m3 go by fp16, which holds all of it."""
    if x.dtype == tl.uint8:
        x = fp8_to_fp16(x, False, NATIVE_FP8)
    return x.to(DTYPE)


@triton.jit
def tile_facts(
    tile, tile_request_ptr, tile_row_ptr, cu_seqlens_ptr, seq_lens_ptr, num_blocks, end_row,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """A tile's request (-1 = none), rows, length, and the blocks that its tokens see."""
    request = tl.load(tile_request_ptr + tile).to(tl.int64)
    row = tl.load(tile_row_ptr + tile)
    request_end = tl.load(cu_seqlens_ptr + request + 1, mask=request >= 0, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=request >= 0, other=0)
    end = tl.minimum(tl.minimum(row + TOKENS, request_end), end_row)
    # Position of a row: offset + row. Blocks that the last token sees, and the first to their ends.
    offset = seq_len - request_end
    visible = tl.minimum(tl.cdiv(tl.maximum(offset + end, 0), BLOCK), num_blocks)
    full = tl.maximum(offset + row + 1, 0) // BLOCK
    return request, row, end, offset, visible, full


@triton.jit
def load_queries(q_ptr, stride_row, stride_head, stride_dim, row, head, live, DIM: tl.constexpr):
    """Queries [rows, DIM] of rows and heads [rows]; zeros where these are not live."""
    at = row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    d = tl.arange(0, DIM)
    return tl.load(q_ptr + at[:, None] + d[None, :] * stride_dim, mask=live[:, None], other=0.0)


@triton.jit
def load_page(k_at, k_desc, page, stride_k_page, KEYS_FIRST: tl.constexpr, TMA: tl.constexpr):
    """Keys of a page; where a block has none, those of page 0."""
    page = tl.maximum(page, 0)
    if TMA:
        k = k_desc.load([page.to(tl.int32), 0, 0])
        k = tl.reshape(k, (k.shape[1], k.shape[2]))
        return k if KEYS_FIRST else tl.trans(k)
    else:
        return tl.load(k_at + page * stride_k_page)


@triton.jit
def block_scores(
    q, k, position, block, full, page, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Score of a block for each row, of which position [rows] says what it sees."""
    k = operand(k, DTYPE, NATIVE_FP8)
    last = position - block * BLOCK  # key that a row sees
    n = tl.arange(0, BLOCK)
    if KEYS_FIRST:
        products = tl.dot(k, q)  # [BLOCK, rows]
        if block >= full:
            products = tl.where(n[:, None] > last[None, :], float("-inf"), products)
        score = tl.reduce(products, 0, _maximum)
    else:
        products = tl.dot(q, k)  # [rows, BLOCK]
        if block >= full:
            products = tl.where(n[None, :] > last[:, None], float("-inf"), products)
        score = tl.reduce(products, 1, _maximum)
    return tl.where(page >= 0, score, float("-inf"))


@cache
def choose_constants(
    rows: int, key_bytes: int, compute_capability: tuple[int, int] | None
) -> Constants:
    """Constants for requests of at most ``rows`` (tokens x heads) and keys of ``key_bytes``."""
    rows = max(triton.next_power_of_2(rows), 16)
    if key_bytes > 256:
        # Head dimensions above 128 and tf32: tiles made for fewer bytes would not fit.
        return _WARP_MMA[min(rows, 32)]
    if not has_warpgroups(compute_capability):
        table = _WARP_MMA
    elif rows >= _WIDE_TILE.rows and key_bytes > 128:
        return _WIDE_TILE
    else:
        table = _WARPGROUP_MMA
    return table[min(rows, max(table))]


def choose_stages(num_stages: int, key_bytes: int) -> int:
    """As many bytes of keys under way as ``num_stages`` are of keys of 256 bytes."""
    if key_bytes > 256:
        return 2
    return num_stages if key_bytes > 128 else 2 * num_stages - 1


@lru_cache(maxsize=1024)
def choose_splits(num_tiles: int, num_blocks: int, room: int) -> int:
    """Programs that share a tile of ``num_blocks`` blocks, where ``room`` programs run at a time.

    The cost is the number of rounds times the length of a program. Among shares that cost about
    the same the smallest is taken: it evens out requests of different lengths.
    """
    most = min(num_blocks, max(1, 8 * room // num_tiles))
    cost = [
        triton.cdiv(num_tiles * n, room) * (triton.cdiv(num_blocks, n) + PROGRAM_OVERHEAD_BLOCKS)
        for n in range(1, most + 1)
    ]
    enough = 1.05 * min(cost)
    return max(n for n, c in enumerate(cost, start=1) if c <= enough)


class Share(NamedTuple):
    """How a step's blocks are shared out, and what all kernels are told of it."""

    grid: tuple[int, int]  # tiles x programs of one
    constants: Constants
    facts: dict[str, object]


def share_out(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
    first_row: int,
    key_bytes: int,
    *,
    constants: Constants | None = None,
    num_splits: int | None = None,
) -> Share:
    """Tiles of the rows from ``first_row`` on, as many as ``out`` has, and programs for each."""
    heads = index_q.shape[1]
    heads_padded = power_of_two_above(heads)
    if constants is None:
        rows = plan.max_query_len * heads_padded
        constants = choose_constants(rows, key_bytes, capability(index_q.device))
    tokens = max(1, constants.rows // heads_padded)
    tiles = plan.tiles(tokens)
    num_tiles = len(tiles.request)
    if not num_tiles or not plan.num_blocks:
        num_splits = 0
    elif num_splits is None:
        used = min(num_tiles, plan.num_requests * triton.cdiv(plan.max_query_len, tokens))
        room = num_processors(index_q.device) * constants.programs_per_processor
        num_splits = choose_splits(used, plan.num_blocks, room)
    facts = {
        "tile_request_ptr": tiles.request,
        "tile_row_ptr": tiles.first_row,
        "cu_seqlens_ptr": plan.cu_seqlens_q,
        "seq_lens_ptr": plan.seq_lens,
        "page_table_ptr": plan.page_table,
        "stride_table": plan.page_table.stride(0),
        "num_pages": index.num_pages,
        "num_blocks": plan.num_blocks,
        "first_row": first_row,
        "end_row": first_row + out.shape[1],
        "HEADS": heads,
        "HEADS_PADDED": heads_padded,
        "TOKENS": tokens,
        "DIM": index.head_dim,
    }
    return Share((num_tiles, num_splits), constants, facts)
