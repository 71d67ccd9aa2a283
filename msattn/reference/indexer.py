"""Stage 2 in torch: products of index queries with whole pages of keys, the maximum of each block.

The products are summed in fp64 and rounded to fp32 once. Every order of summation then gives the
same score (but for one case in about 2^28), so that scores, and with them the selection, do not
depend on how many tokens share a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..cache import IndexCache
from ..config import BLOCK_SIZE
from ..plan import Plan
from .pages import read_index_k
from .rows import Rows, chunks, query_rows
from .selection import NONE, select_rows
from .tiles import EMPTY, make_tiles

CHUNK_BYTES = 64 << 20  # scores held at a time; keys and their products held at a time
TILE_TOKENS = (1, 4, 16, 64)
TILE_OVERHEAD = 8.0  # reading the keys costs about as much as their products with 8 tokens


def index_scores(index_q: torch.Tensor, index: IndexCache, plan: Plan, out: torch.Tensor) -> None:
    rows = query_rows(plan, index_q.shape[0])
    for tokens, scores in _score_chunks(index_q, index, plan, rows):
        out[:, tokens] = scores
    out[:, rows.num_rows :] = -math.inf


def index_select(index_q: torch.Tensor, index: IndexCache, plan: Plan, out: torch.Tensor) -> None:
    rows = query_rows(plan, index_q.shape[0])
    for tokens, scores in _score_chunks(index_q, index, plan, rows):
        out[tokens] = select_rows(scores, rows.num_visible[tokens], plan.config)
    out[rows.num_rows :] = NONE


def _score_chunks(
    index_q: torch.Tensor, index: IndexCache, plan: Plan, rows: Rows
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Chunks of tokens with their scores ``[Hi, n, num_blocks]``."""
    _, heads, dim = index_q.shape
    # Scores become selection keys of 8 bytes; queries are held in fp64, twice.
    for tokens in chunks(rows.num_rows, 8 * heads * (plan.num_blocks + 2 * dim), CHUNK_BYTES):
        yield tokens, _score_rows(index_q[tokens].double(), index, plan, rows.chunk(tokens))


def _score_rows(queries: torch.Tensor, index: IndexCache, plan: Plan, rows: Rows) -> torch.Tensor:
    """Scores of the rows with queries ``[n, Hi, Di]`` fp64."""
    n, heads, dim = queries.shape
    # One row more than there are tokens: it takes the padding of the tiles (entry -1).
    scores = queries.new_full((heads, n + 1, plan.num_blocks), -math.inf, dtype=torch.float32)
    seeing = rows.num_visible.nonzero().squeeze(1)
    if not len(seeing) or not index.num_pages:
        return scores[:, :n]
    tiles = make_tiles(rows.request[seeing], seeing, TILE_TOKENS, TILE_OVERHEAD)
    num_tiles, size = tiles.items.shape
    block_bytes = 8 * BLOCK_SIZE * (heads * size + 2 * dim)
    for some in chunks(num_tiles, block_bytes * plan.num_blocks, CHUNK_BYTES):
        items = tiles.items[some]
        position = rows.position[items].masked_fill(items == EMPTY, -1)
        seen = min(int(position.max()) // BLOCK_SIZE + 1, plan.num_blocks)
        table = plan.page_table[tiles.key[some], :seen].long()
        tile_queries = queries[items].transpose(1, 2)  # [tiles, Hi, M, Di]
        for blocks in chunks(table.shape[1], block_bytes * len(items), CHUNK_BYTES):
            part = _score_pages(
                tile_queries, index, table[:, blocks], position - blocks.start * BLOCK_SIZE
            )
            scores[:, items, blocks] = part.transpose(0, 1)
    return scores[:, :n]


def _score_pages(
    queries: torch.Tensor, index: IndexCache, pages: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """fp32 ``[tiles, Hi, M, blocks]``; ``position`` [tiles, M] counts from the first key given."""
    mapped = (pages >= 0) & (pages < index.num_pages)
    keys = read_index_k(index, pages.where(mapped, 0)).double()  # [tiles, blocks, 128, Di]
    tiles, heads, size, dim = queries.shape
    products = queries.reshape(tiles, heads * size, dim) @ keys.flatten(1, 2).mT
    products = products.view(tiles, heads, size, pages.shape[1], BLOCK_SIZE)
    first_partial = min(max(0, int(position.min()) + 1) // BLOCK_SIZE, pages.shape[1])
    tail = products[..., first_partial:, :]
    key = torch.arange(first_partial * BLOCK_SIZE, pages.shape[1] * BLOCK_SIZE, device=pages.device)
    hidden = (key > position.unsqueeze(-1)).unflatten(
        -1, (-1, BLOCK_SIZE)
    )  # [tiles, M, blocks, 128]
    tail.masked_fill_(hidden.unsqueeze(1), -math.inf)
    best = products.amax(-1).float()
    return best.masked_fill(~mapped[:, None, None, :], -math.inf)
