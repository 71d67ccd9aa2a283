"""Block selections whose overlap is known: what a benchmark attends over.

There is no public trace of a MiniMax-M3 selection. What is published is how much selections
overlap: 4 neighbouring tokens choose about 22 distinct blocks of 64, and so do the 4 KV heads of a
token about 27 of 64. ``realistic`` is made to have both; ``recent`` overlaps most, ``uniform``
least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..config import BLOCK_SIZE

# The chain behind `realistic`; the two published figures hold for these constants together.
SURVIVAL = 0.76  # probability that a free block of one token is chosen by the next one as well
SINK = 0.99  # share of the rows that choose block 0
POOL = 64  # blocks of a request that are chosen again and again, by all heads
ZIPF = 2.4  # popularity of the i-th of them: i ** -ZIPF
RECENT = 8  # blocks before a token's own that are chosen often, too
RECENT_SHARE = 5 / 14  # of the free choices that fall on them

_DRAWN_ROWS = 1 << 26  # elements of a temporary of `uniform`
_SURE = 1e6  # beyond every key of a draw
_LAST = torch.iinfo(torch.int32).max


class Rows(NamedTuple):
    """Where each row of ids stands, on the device of the ids."""

    request: torch.Tensor  # [T]
    position: torch.Tensor  # [T]: negative for a token that sees nothing


def rows_of(
    query_lens: Sequence[int], seq_lens: Sequence[int], device: torch.device | str = "cpu"
) -> Rows:
    """Request and position of every query token of a step."""
    queries = torch.tensor(query_lens, dtype=torch.int64)
    first = torch.tensor(seq_lens, dtype=torch.int64) - queries
    request = torch.repeat_interleave(torch.arange(len(queries)), queries)
    starts = queries.cumsum(0) - queries
    offset = torch.arange(len(request)) - starts[request]
    return Rows(request.to(device), (first[request] + offset).to(device))


def make_block_ids(
    pattern: str,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int,
    topk: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Ids ``[T, Hkv, topk]`` int32, ascending, -1 at the tail; a token's own block is always in.

    A token that sees ``topk`` blocks or fewer gets them all. The same arguments give the same ids.

    Args:
        pattern: a name in :data:`PATTERNS`.
        query_lens, seq_lens: the requests of the step, as a Batch has them.
        num_kv_heads, topk: of the config.
        seed: of the drawing.
        device: where the ids are drawn, and stay.
    """
    draw = PATTERNS[pattern]
    rows = rows_of(query_lens, seq_lens, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = draw(rows, num_kv_heads, topk, generator)
    everything = torch.arange(topk, device=device).expand_as(ids)
    visible = visible_blocks(rows)[:, None, None]
    everything = everything.where(everything < visible, -1)
    return ids.where(visible > topk, everything).int()


def visible_blocks(rows: Rows) -> torch.Tensor:
    """Blocks that each row sees, ``[T]``."""
    return rows.position.div(BLOCK_SIZE, rounding_mode="floor").clamp(min=-1) + 1


def distinct_blocks(block_ids: torch.Tensor, rows: int) -> float:
    """Mean number of distinct blocks that ``rows`` neighbouring tokens choose for one KV head."""
    tokens, heads, topk = block_ids.shape
    whole = block_ids[: tokens // rows * rows].view(-1, rows, heads, topk).transpose(1, 2)
    return _mean_distinct(whole.reshape(-1, rows * topk))


def distinct_over_heads(block_ids: torch.Tensor) -> float:
    """Mean number of distinct blocks that the KV heads of one token choose."""
    return _mean_distinct(block_ids.flatten(1))


def _mean_distinct(groups: torch.Tensor) -> float:
    ids = groups.sort(dim=1).values
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return float((new & (ids >= 0)).sum(1).double().mean()) if len(ids) else 0.0


def _recent(rows: Rows, heads: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """The last visible blocks."""
    last = torch.arange(topk, device=rows.position.device) - topk
    return (visible_blocks(rows)[:, None] + last)[:, None].expand(-1, heads, -1)


def _uniform(rows: Rows, heads: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """The own block, and the others without a preference, drawn for each row and head alone."""
    device, visible = rows.position.device, visible_blocks(rows)
    ids = torch.zeros((len(visible), heads, topk), dtype=torch.int64, device=device)
    width = max([topk, *visible.max().view(1).tolist()]) if len(visible) else topk
    block = torch.arange(width, device=device)
    for piece in torch.arange(len(visible), device=device).split(
        max(1, _DRAWN_ROWS // (width * heads))
    ):
        key = torch.rand((len(piece), heads, width), generator=generator, device=device)
        own = (visible[piece] - 1)[:, None, None]
        key.masked_fill_(block > own, -1.0).masked_fill_(block == own, 2.0)
        ids[piece] = key.topk(topk, dim=2).indices.sort(dim=2).values
    return ids


class _Chains(NamedTuple):
    """Runs of tokens of one request whose own block is the same; C of them."""

    request: torch.Tensor  # [C]
    own: torch.Tensor  # [C]: the block
    first_row: torch.Tensor  # [C]
    length: torch.Tensor  # [C]: up to 128


def _realistic(rows: Rows, heads: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Chains of choices: from token to token most blocks stay, and popular ones come back.

    The own block and nearly always block 0 are chosen. Every other choice survives from one token
    to the next with probability SURVIVAL; what does not is drawn anew, without repetition, from
    the recent blocks and from the request's pool, by popularity. A chain ends with its block, so
    that all chains advance together, one token a step.
    """
    device = rows.position.device
    chains = _chains_of(rows)
    candidates, weight = _candidates(chains, len(rows.position), generator)
    logit = weight.log()[:, None].expand(-1, heads, -1)  # -inf: not a candidate
    free = topk - 1  # beside the own block; block 0 takes one of them, mostly
    ids = torch.full((len(rows.position), heads, topk), _LAST, device=device)
    chosen = torch.zeros(logit.shape, dtype=torch.bool, device=device)
    for step in range(int(chains.length.max()) if len(chains.length) else 0):
        uniform = torch.rand(logit.shape, generator=generator, device=device)
        stays = chosen & (uniform < SURVIVAL)
        # The largest keys of this form are a draw by weight without repetition (Gumbel's trick).
        noise = torch.rand(logit.shape, generator=generator, device=device).clamp(1e-9, 1 - 1e-7)
        key = (logit - (-noise.log()).log()).where(~stays, _SURE + uniform)
        key -= _SURE * (chosen & ~stays)  # a block that was dropped comes back only where few are
        value, place = key.topk(min(free, key.shape[2]), dim=2)
        sink = torch.rand(chosen.shape[:2], generator=generator, device=device) < SINK
        taken = value > -torch.inf
        taken[:, :, free - 1 :] &= ~sink[..., None]
        chosen = torch.zeros_like(chosen).scatter(2, place, taken)
        live = (chains.length > step).nonzero().squeeze(1)
        blocks = candidates[:, None].expand(-1, heads, -1).gather(2, place).where(taken, _LAST)
        row = chains.first_row[live] + step
        ids[row, :, : blocks.shape[2]] = blocks[live]
        # The last free choice is empty where block 0 is chosen.
        ids[row, :, free - 1] = ids[row, :, free - 1].where(~sink[live], 0)
        ids[row, :, free] = chains.own[live, None]
    ids = ids.sort(dim=2).values
    return ids.where(ids < _LAST, -1)


def _chains_of(rows: Rows) -> _Chains:
    """The chains of the rows that see something."""
    row = (rows.position >= 0).nonzero().squeeze(1)
    key = torch.stack([rows.request[row], rows.position[row] // BLOCK_SIZE])
    (request, own), length = torch.unique_consecutive(key, dim=1, return_counts=True)
    first = row[length.cumsum(0) - length]
    return _Chains(request, own, first, length)


def _candidates(
    chains: _Chains, num_rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that a chain may choose, and their weights, both ``[C, POOL + RECENT]``.

    The pool is the first visible blocks in an order of the request's own. A recent block that is
    in the pool is a candidate once, with both weights.
    """
    device = chains.own.device
    requests = int(chains.request.max()) + 1 if len(chains.request) else 0
    width = max(POOL, int(chains.own.max()) + 1 if len(chains.own) else 0)
    order = torch.rand((requests, width), generator=generator, device=device)[chains.request]
    block = torch.arange(width, device=device)
    order.masked_fill_((block < 1) | (block >= chains.own[:, None]), 2.0)
    value, pool = order.topk(POOL, dim=1, largest=False)
    in_pool = value < 2.0
    popularity = torch.arange(1, POOL + 1, device=device, dtype=torch.float32) ** -ZIPF
    popularity *= (1 - RECENT_SHARE) / popularity.sum()
    age = chains.own[:, None] - pool
    weight = popularity + RECENT_SHARE / RECENT * ((age >= 1) & (age <= RECENT))
    weight = weight.where(in_pool, 0.0)
    recent = chains.own[:, None] - torch.arange(1, RECENT + 1, device=device)
    known = ((recent[:, :, None] == pool[:, None]) & in_pool[:, None]).any(2)
    recent_weight = torch.where(known | (recent < 1), 0.0, RECENT_SHARE / RECENT)
    return torch.cat([pool, recent], 1), torch.cat([weight, recent_weight], 1)


PATTERNS: dict[str, Callable[[Rows, int, int, torch.Generator], torch.Tensor]] = {
    "realistic": _realistic,
    "uniform": _uniform,
    "recent": _recent,
}
"""How ids are drawn, by name."""
