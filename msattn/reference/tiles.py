"""Group items by key into tiles of equal size, so that a batched matmul serves them.

Both the scores (tokens of a request share its keys) and the attention (tokens that chose a page
share it) are of this kind; a Python loop over tokens is nowhere needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

EMPTY = -1
"""Tile entry without an item."""


class Tiles(NamedTuple):
    key: torch.Tensor  # [n] int64: the key that all items of a tile have
    items: torch.Tensor  # [n, M] int64: item numbers, EMPTY behind a tile's last one


def make_tiles(
    keys: torch.Tensor, items: torch.Tensor, sizes: Sequence[int], overhead: float
) -> Tiles:
    """Cut the items of each key into tiles of M, one of ``sizes``: the cheapest.

    Args:
        keys: ``[n]`` int64, non-negative. items: ``[n]`` int64, the numbers to distribute.
        overhead: cost of a tile, in items; makes few large tiles better than many small ones.
    """
    order = keys.argsort(stable=True)
    key, count = keys[order].unique_consecutive(return_counts=True)
    size = min(sizes, key=lambda m: float((-(-count // m)).sum()) * (m + overhead))
    per_key = -(-count // size)
    first_tile, first_item = per_key.cumsum(0) - per_key, count.cumsum(0) - count
    rank = torch.arange(len(order), device=keys.device) - first_item.repeat_interleave(count)
    tile = first_tile.repeat_interleave(count) + rank // size
    table = items.new_full((int(per_key.sum()), size), EMPTY)
    table[tile, rank % size] = items[order]
    return Tiles(key.repeat_interleave(per_key), table)
