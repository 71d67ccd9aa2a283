"""Stage 4 in torch: tokens that chose a page share it, in tiles of a batched matrix product.

For each KV head and chunk of tokens: the (token, block) pairs are grouped by page; each tile of
pairs gives partial sums (maximum, normaliser, unnormalised output) of its rows; the partial sums of
a token are merged with the weights of an online softmax.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..cache import KVCache, Scale
from ..config import BLOCK_SIZE
from ..plan import Plan
from .pages import read_k, read_v
from .rows import Rows, chunks, query_rows
from .tiles import EMPTY, make_tiles

PARTIAL_BYTES = 128 << 20  # partial outputs of a chunk of tokens and one KV head
TILE_ROWS = 512  # query rows (tokens x group) of the largest tile
TILE_BYTES = 8 << 20  # logits, or keys, of the tiles computed at a time: what a CPU's cache holds
TILE_OVERHEAD_ROWS = 96.0  # reading a page costs about as much as 96 rows of products


class Partials(NamedTuple):
    """State of each (slot, token) pair of a chunk, and one more that takes the tiles' padding."""

    maximum: torch.Tensor  # [K * n + 1, G]
    normalizer: torch.Tensor  # [K * n + 1, G]
    output: torch.Tensor  # [K * n + 1, G, D], not divided by the normalizer

    def reset(self, used: torch.Tensor) -> Partials:
        """Memory for the pairs in ``used`` [K * n] to fill; the others get the empty state."""
        mine = Partials(*(field[: len(used) + 1] for field in self))
        mine.maximum.fill_(-math.inf)
        mine.normalizer.zero_()
        mine.output[:-1].index_fill_(0, (~used).nonzero().squeeze(1), 0.0)
        return mine


def attend(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    softmax_scale: float,
    q_scale: Scale,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    rows = query_rows(plan, q.shape[0])
    group, dim = plan.config.group_size, plan.config.head_dim
    slots = block_ids.shape[2] if plan.num_blocks else 0
    pieces = list(chunks(rows.num_rows, 4 * group * (dim + 2) * slots, PARTIAL_BYTES))
    num_pairs = max((slots * (piece.stop - piece.start) for piece in pieces), default=0)
    # One buffer for all heads and chunks: fresh pages from the system cost as much as the products.
    memory = Partials(
        *(q.new_empty((num_pairs + 1, group, *d), dtype=torch.float32) for d in ((), (), (dim,)))
    )
    for tokens in pieces:
        chunk = rows.chunk(tokens)
        ids = visible_ids(block_ids[tokens, :, :slots], chunk.num_visible)
        for kv_head in range(plan.config.num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            queries = q[tokens, heads].float() * q_scale * softmax_scale
            head_ids = ids[:, kv_head].T
            partials = _attend_pairs(queries, cache, kv_head, head_ids, plan, chunk, memory)
            merged, merged_lse = _merge(partials, slots, chunk.num_rows)
            out[tokens, heads] = merged.to(out.dtype)
            if lse is not None:
                lse[tokens, heads] = merged_lse


def visible_ids(block_ids: torch.Tensor, num_visible: torch.Tensor) -> torch.Tensor:
    """Ids ``[n, Hkv, K]`` int64 with -1 for duplicates and for blocks not seen."""
    ids = block_ids.long().sort(dim=-1).values
    seen = (ids >= 0) & (ids < num_visible[:, None, None])
    seen[..., 1:] &= ids[..., 1:] != ids[..., :-1]
    return ids.where(seen, -1)


def _attend_pairs(
    queries: torch.Tensor,
    cache: KVCache,
    kv_head: int,
    ids: torch.Tensor,
    plan: Plan,
    rows: Rows,
    memory: Partials,
) -> Partials:
    """Partial states of all (slot, token) pairs; queries ``[n, G, D]`` fp32, ids ``[K, n]``."""
    n, group, _ = queries.shape
    pages = plan.page_table[rows.request, ids.clamp(min=0)].long()
    used = (ids >= 0) & (pages >= 0) & (pages < cache.num_pages)
    partials = memory.reset(used.flatten())
    pairs = used.flatten().nonzero().squeeze(1)
    if not len(pairs):
        return partials
    # Visible keys of a pair's block: 1 to 128 of them, the first ones.
    num_keys = (rows.position + 1 - ids * BLOCK_SIZE).clamp(max=BLOCK_SIZE).flatten()
    num_keys = torch.cat([num_keys, num_keys.new_tensor([BLOCK_SIZE])])
    largest = max(1, TILE_ROWS // group)
    sizes = [1 << i for i in range(largest.bit_length()) if 1 << i <= largest]
    tiles = make_tiles(pages.flatten()[pairs], pairs, sizes, TILE_OVERHEAD_ROWS / group)
    # A tile's keys take 4 * 128 * D bytes, which few rows must not make many of.
    widest = max(group * tiles.items.shape[1], queries.shape[2])
    at_once = max(1, TILE_BYTES // (4 * BLOCK_SIZE * widest))
    for page, items in zip(tiles.key.split(at_once), tiles.items.split(at_once), strict=True):
        pair = items.where(items != EMPTY, ids.numel())
        states = _attend_tiles(
            queries[pair % n].flatten(1, 2),
            read_k(cache, page, kv_head),
            read_v(cache, page, kv_head),
            num_keys[pair].repeat_interleave(group, dim=1),
        )
        for partial, state in zip(partials, states, strict=True):
            partial.index_copy_(0, pair.flatten(), state.view(-1, *partial.shape[1:]))
    return partials


def _attend_tiles(
    queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States of rows ``[tiles, rows, D]`` over the first ``num_keys`` [tiles, rows] keys."""
    logits = queries @ k.mT
    hidden = None
    if int(num_keys.min()) < BLOCK_SIZE:
        hidden = torch.arange(BLOCK_SIZE, device=k.device) >= num_keys.unsqueeze(-1)
        logits.masked_fill_(hidden, -math.inf)
    maximum = logits.amax(-1)
    # A row of -inf logits only (finite keys give none) must not become inf - inf.
    shift = maximum.masked_fill(maximum == -math.inf, 0.0).unsqueeze(-1)
    weights = logits.sub_(shift).exp_()
    finite = v.isfinite()
    if bool(finite.all()):
        return maximum, weights.sum(-1), weights @ v
    output = weights @ v.where(finite, 0.0)
    return maximum, weights.sum(-1), output + _visible_nonfinite(v, hidden, output)


def _visible_nonfinite(
    v: torch.Tensor, hidden: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """The NaN and infinities that a row's visible values add to its output; hidden ones do not."""
    all_visible = like.new_ones((*like.shape[:2], BLOCK_SIZE))
    visible = all_visible if hidden is None else (~hidden).float()
    added = torch.zeros_like(like)
    for kind, value in ((v.isposinf(), math.inf), (v.isneginf(), -math.inf), (v.isnan(), math.nan)):
        added = torch.where(visible @ kind.float() > 0, added + value, added)
    return added


def _merge(partials: Partials, slots: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[n, G, D]`` and LSE ``[n, G]`` of tokens with ``slots`` pairs each."""
    maximum, normalizer, output = (
        field[:-1].unflatten(0, (slots, num_tokens)) for field in partials
    )
    best = partials.maximum.new_full(maximum.shape[1:], -math.inf)
    for part in maximum:
        best = best.maximum(part)
    shift = best.masked_fill(best == -math.inf, 0.0)
    total, merged = torch.zeros_like(best), output.new_zeros(output.shape[1:])
    for slot in range(slots):
        weight = (maximum[slot] - shift).exp()
        total.addcmul_(normalizer[slot], weight)
        merged.addcmul_(output[slot], weight.unsqueeze(-1))
    merged /= total.unsqueeze(-1)
    empty = best == -math.inf
    return merged.masked_fill_(empty.unsqueeze(-1), 0.0), shift + total.log()
