"""Compile what serving needs before it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .attend import attend
from .batch import Batch
from .cache import IndexCache, KVCache, Scale
from .checks import require_int, require_list, require_type
from .config import BLOCK_SIZE, MSAConfig
from .indexer import index_select
from .plan import Plan, make_plan
from .store import store_index_k, store_kv

_REQUESTS = (*(1 << i for i in range(12)), 384)
"""Rows of a step, from less than a GPU's programs to far more: how work is shared depends on it.
Between 256 and 512 there are short prompts that may be attended block by block."""

_TABLE_ENTRIES, _MAX_BLOCKS = 1 << 21, 1 << 15
"""Of the widest page tables: requests so long that what has their length is too large to have."""


def warmup(
    config: MSAConfig,
    kv_format: object,
    *,
    device: torch.device | str | None = None,
    max_query_lens: Sequence[int] = (1, 4, 8192),
    index_dtype: object = torch.bfloat16,
    compact_keys: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    query_dtype: torch.dtype | None = None,
    index_query_dtype: torch.dtype | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    q_scale: Scale | None = None,
    impl: str = "auto",
) -> None:
    """Run the stages of a layer on tiny steps, one of each class that kernels are compiled for.

    Afterwards a step of any lengths and any number of requests compiles nothing, if it is of what
    is given here, its slot_mapping is int64, and its tensors are contiguous but for gaps between
    rows, heads and pages of a multiple of 16 elements. It takes minutes where Triton has no cache
    of earlier runs, and some hundred MB of the device while it runs.

    Args:
        config: the model's shapes on this rank.
        kv_format, index_dtype: of the two caches.
        compact_keys: the index cache has :class:`msattn.CompactKeys`.
        device: where it serves.
        max_query_lens: the bounds ``max_query_len`` of decode, verification and prefill batches.
        dtype: of keys and values, and of queries where nothing else is said.
        query_dtype, index_query_dtype: of queries and index queries.
        k_scale, v_scale, q_scale: each in the form that it will have: None, a number, or a tensor
            of one element; k_scale and v_scale for each slot: ``[Hkv, 128]``.
        impl: as for the stages.
    """
    require_type("config", config, MSAConfig)
    for bound in require_list("max_query_lens", max_query_lens, "ints"):
        require_int("max_query_lens", bound, at_least=1)
    cache = KVCache.allocate(1, config, kv_format, device=device, k_scale=k_scale, v_scale=v_scale)
    index = IndexCache.allocate(1, config, index_dtype, compact=compact_keys, device=device)
    for plan in _plans(config, cache, max_query_lens):

        def rows(*shape: int, dtype: torch.dtype, count: int = plan.max_rows) -> torch.Tensor:
            return torch.zeros((count, *shape), dtype=dtype, device=cache.device)

        kv = rows(config.num_kv_heads, config.head_dim, dtype=dtype)
        index_k = rows(config.index_head_dim, dtype=dtype)
        q = rows(config.num_q_heads, config.head_dim, dtype=query_dtype or dtype)
        index_q = rows(
            config.num_index_heads, config.index_head_dim, dtype=index_query_dtype or dtype
        )
        no_slots = rows(dtype=torch.int64).fill_(-1)
        store_kv(kv, kv, cache, no_slots, impl=impl)
        store_index_k(index_k, index, no_slots, impl=impl)
        block_ids = index_select(index_q, index, plan, impl=impl)
        for return_lse in (False, True):
            attend(q, cache, block_ids, plan, q_scale=q_scale, return_lse=return_lse, impl=impl)


def _plans(config: MSAConfig, cache: KVCache, max_query_lens: Sequence[int]) -> Iterator[Plan]:
    """Steps of one query token for each request, under bounds that allow much more."""
    for max_query_len in max_query_lens:
        for requests in _REQUESTS:
            # A context of no more blocks than rows, of a few more, of very many.
            for blocks in (1, 3, min(_TABLE_ENTRIES // requests, _MAX_BLOCKS)):
                batch = Batch(
                    torch.arange(requests + 1, dtype=torch.int32, device=cache.device),
                    torch.ones(requests, dtype=torch.int32, device=cache.device),
                    torch.zeros(requests, blocks, dtype=torch.int32, device=cache.device),
                    max_query_len=max_query_len,
                    max_seq_len=blocks * BLOCK_SIZE,
                    num_tokens=requests,
                )
                yield make_plan(batch, config, cache.format)
