"""Indexer: fills the block ids that a step's layers share, decode rows first."""

from __future__ import annotations

import torch

from .. import dispatch
from ..cache import IndexCache
from ..checks import fail, require_int, require_tensor, require_type
from ..config import MSAConfig
from ..indexer import INDEX_QUERY_DTYPES, prepare_index_select
from ..kv_format import KVFormat
from ..plan import Plan
from .impl import require_block_ids
from .metadata import SparseMetadata
from .pools import WrappedPools, identity

ROW_PADDING = 4
"""Rows of the shared ids are padded to a multiple of this: readers load four of them at a time."""


def allocate_block_ids(
    max_num_tokens: int, config: MSAConfig, device: torch.device | str | None = None
) -> torch.Tensor:
    """The ids that all layers of a model share, ``[round_up(max_num_tokens, 4), Hkv, topk]`` int32.

    One layer's attention must have run before the next one's indexer; rows behind a step's hold
    what an earlier step left. Filled with -1 at first.
    """
    require_int("max_num_tokens", max_num_tokens, at_least=1)
    require_type("config", config, MSAConfig)
    rows = -(-max_num_tokens // ROW_PADDING) * ROW_PADDING
    shape = (rows, config.num_kv_heads, config.topk)
    return torch.full(shape, -1, dtype=torch.int32, device=device)


class Indexer:
    """Scores and selection of all sparse layers of one model on one rank."""

    def __init__(self, config: MSAConfig, index_format: object = "bf16", *, impl: str = "auto"):
        """
        Args:
            config: shapes of this rank.
            index_format: of the index caches: ``bf16``, ``fp16`` or ``fp8_e4m3`` (``fp32`` too, by
                the reference). An E4M3 cache takes E4M3 queries, both at unit scale.
            impl: as in :func:`msattn.index_select`.
        """
        require_type("config", config, MSAConfig)
        self.config = config
        self.index_format = KVFormat.parse(index_format, name="index_format", for_index=True)
        dispatch.resolve(impl)
        self.impl = impl
        self._pools: WrappedPools[IndexCache] = WrappedPools()

    def forward(
        self,
        index_query: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: SparseMetadata | None,
        block_ids: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Select the blocks of a step's rows.

        Args:
            index_query: ``[T or more, Hi * Di]`` or ``[T or more, Hi, Di]``.
            index_cache: the layer's ``[pages, 128, Di]`` or ``[pages, 1, 128, Di]``.
            metadata: the step, by the page table of the index caches; None, as in a run that only
                measures memory: nothing is touched.
            block_ids: :func:`allocate_block_ids`'s; rows ``[:T]`` are written, ascending, -1 at the
                tail.

        Returns:
            Views of the decode rows and of the prefill rows of ``block_ids``, None without any.
        """
        if metadata is None:
            return None, None
        require_type("metadata", metadata, SparseMetadata)
        rows, first = metadata.num_tokens, metadata.num_decode_tokens
        query = self._heads(index_query, rows)
        index = self._index(index_cache, metadata)
        ids = require_block_ids(block_ids, rows, self.config)
        decode = prefill = None
        launches: list[dispatch.Launch] = []
        if metadata.decode is not None:
            plan = self._own(metadata.decode.planned.use())
            launch, decode = prepare_index_select(
                query[:first], index, plan, out=ids[:first], impl=self.impl
            )
            launches.append(launch)
        if metadata.prefill is not None:
            plan = self._own(metadata.prefill.plan)
            launch, prefill = prepare_index_select(
                query[first:], index, plan, out=ids[first:rows], impl=self.impl
            )
            launches.append(launch)
        for launch in launches:
            launch()
        return decode, prefill

    def _index(self, pool: torch.Tensor, metadata: SparseMetadata) -> IndexCache:
        """The layer's index keys, wrapped; engines pass the same ones in every step."""
        require_tensor("index_cache", pool, device=metadata.seq_lens.device)
        config, fmt = self.config, self.index_format
        return self._pools.get(
            identity(pool),
            metadata,
            lambda: IndexCache.from_tensor(pool, config, fmt, name="index_cache"),
        )

    def _own(self, plan: Plan) -> Plan:
        """A plan by whose config the indexer's own selection is made."""
        for name in ("topk", "init_blocks", "local_blocks"):
            mine, planned = getattr(self.config, name), getattr(plan.config, name)
            if mine != planned:
                raise fail("metadata", f"a step planned for {name}={mine}", f"{name}={planned}")
        return plan

    def _heads(self, query: torch.Tensor, rows: int) -> torch.Tensor:
        """The step's rows as ``[T, Hi, Di]``, a view."""
        heads, dim = self.config.num_index_heads, self.config.index_head_dim
        if require_tensor("index_query", query).dim() == 2:
            require_tensor("index_query", query, shape={"T": None, "Hi*Di": heads * dim})
            query = query.unflatten(1, (heads, dim))
        shape = {"T": None, "Hi": heads, "Di": dim}
        require_tensor("index_query", query, dtypes=INDEX_QUERY_DTYPES, shape=shape)
        if query.shape[0] < rows:
            raise fail("index_query", f"at least {rows} rows, as the step has", query.shape[0])
        return query[:rows]
