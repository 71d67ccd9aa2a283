"""Stage 1 in torch: drop the tokens without a slot, then scatter K and V."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..cache import IndexCache, KVCache
from ..config import BLOCK_SIZE
from .pages import read_index_k, write_compact_keys, write_index_k, write_kv
from .rows import chunks

CHUNK_BYTES = 16 << 20  # fp32 numbers of one side held at a time; quantising takes a few times that


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    for tokens, slots in _stored(slot_mapping, cache.num_pages, 4 * k[0].numel()):
        write_kv(cache, "k", k[tokens], slots)
        write_kv(cache, "v", v[tokens], slots)


def store_index_k(index_k: torch.Tensor, index: IndexCache, slot_mapping: torch.Tensor) -> None:
    for tokens, slots in _stored(slot_mapping, index.num_pages, 4 * index_k[0].numel()):
        write_index_k(index, index_k[tokens], slots)


def refresh_compact_keys(index: IndexCache, pages: torch.Tensor) -> None:
    assert index.compact is not None
    in_pool = pages[(pages >= 0) & (pages < index.num_pages)].long()
    offsets = torch.arange(BLOCK_SIZE, device=pages.device)
    page_bytes = 4 * BLOCK_SIZE * index.head_dim
    for some in chunks(len(in_pool), page_bytes, CHUNK_BYTES):
        slots = in_pool[some, None] * BLOCK_SIZE + offsets
        keys = read_index_k(index, in_pool[some]).flatten(0, 1)
        write_compact_keys(index.compact, keys, slots.flatten())


def _stored(
    slot_mapping: torch.Tensor, num_pages: int, token_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks of the tokens that have a slot in the pool, and their slots."""
    slots = slot_mapping.long()
    tokens = ((slots >= 0) & (slots < num_pages * BLOCK_SIZE)).nonzero().squeeze(1)
    for some in chunks(len(tokens), token_bytes, CHUNK_BYTES):
        yield tokens[some], slots[tokens[some]]
