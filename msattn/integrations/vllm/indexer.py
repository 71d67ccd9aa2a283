"""The indexer of MiniMax-M3's sparse layers as vLLM has it: backend, metadata, builder, impl.

The names are those of vLLM's ``indexer_msa``, which serves SM100 alone, and of what it imports:
the base classes are vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common.indexer import (
    MiniMaxM3IndexerBackend,
    MiniMaxM3IndexerDecodeMetadata,
    MiniMaxM3IndexerImpl,
    MiniMaxM3IndexerMetadata,
    MiniMaxM3IndexerMetadataBuilder,
    MiniMaxM3IndexerPrefillMetadata,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from ...config import MSAConfig
from ...kv_format import KVFormat
from ...serving import Indexer, SparseMetadata, allocate_block_ids
from .attention import counts, update_plan
from .step import make_builder, make_step


class MiniMaxM3IndexerMSABackend(MiniMaxM3IndexerBackend):
    """Index keys in bf16 or E4M3."""

    @staticmethod
    def get_impl_cls() -> type[MiniMaxM3IndexerMSAImpl]:
        return MiniMaxM3IndexerMSAImpl

    @staticmethod
    def get_builder_cls() -> type[MiniMaxM3IndexerMSAMetadataBuilder]:
        return MiniMaxM3IndexerMSAMetadataBuilder


@dataclass
class MiniMaxM3IndexerMSAMetadata(MiniMaxM3IndexerMetadata):
    """vLLM's, and the step with its plans, by the page table of the index caches."""

    step: SparseMetadata | None = None


class MiniMaxM3IndexerMSAMetadataBuilder(MiniMaxM3IndexerMetadataBuilder):
    """As the attention's: it splits alike, with pages and slots of its own."""

    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.steps = make_builder(vllm_config, device, self.reorder_batch_threshold)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MiniMaxM3IndexerMSAMetadata:
        limit = self.steps.decode_plans.max_seq_len
        step = self.steps.build(make_step(common_attn_metadata, limit))
        return MiniMaxM3IndexerMSAMetadata(
            **counts(step), prefill=_prefill(step), decode=self._decode(step), step=step
        )

    def update_draft_decode_metadata(self, metadata: MiniMaxM3IndexerMSAMetadata) -> None:
        """The draft's next token: lengths and pages have changed in vLLM's own tensors."""
        update_plan(metadata.step)

    def _decode(self, step: SparseMetadata) -> MiniMaxM3IndexerDecodeMetadata | None:
        decode = step.decode
        if decode is None:
            return None
        return MiniMaxM3IndexerDecodeMetadata(
            seq_lens=decode.seq_lens,
            block_table=decode.page_table,
            max_seq_len=step.max_seq_len,
            decode_query_len=decode.decode_query_len,
            max_decode_query_len=self.max_decode_query_len,
        )


def _prefill(step: SparseMetadata) -> MiniMaxM3IndexerPrefillMetadata | None:
    prefill = step.prefill
    if prefill is None:
        return None
    return MiniMaxM3IndexerPrefillMetadata(
        cu_seqlens_q=prefill.cu_seqlens_q,
        seq_lens=prefill.seq_lens,
        context_lens=prefill.context_lens,
        block_table=prefill.page_table,
        max_query_len=prefill.max_query_len,
        max_seq_len=prefill.max_seq_len,
    )


class MiniMaxM3IndexerMSAImpl(MiniMaxM3IndexerImpl):
    """Scores and exact selection, into the ids that the model's layers share."""

    indexer_backend_cls: ClassVar[type[Any]] = MiniMaxM3IndexerMSABackend

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.score_type != "max":
            raise NotImplementedError(f"score_type: expected 'max', got {self.score_type!r}")
        self.config = MSAConfig(
            # Query heads do not matter to an indexer: one for each KV head.
            num_q_heads=self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            num_index_heads=self.num_index_heads,
            index_head_dim=self.index_head_dim,
            block_size=self.block_size,
            topk=self.topk_blocks,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
        )
        index_format = KVFormat.parse(self.index_cache.dtype, for_index=True)
        self.selection = Indexer(self.config, index_format)

    def forward(self, index_query: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As vLLM's: views ``[Hkv, rows, K]`` of the decode and of the prefill rows' ids."""
        by_layer = get_forward_context().attn_metadata
        if not isinstance(by_layer, dict):
            return None, None  # a run that measures memory: the caches are not bound
        metadata = by_layer[self.index_cache.prefix]
        assert isinstance(metadata, MiniMaxM3IndexerMSAMetadata) and metadata.step is not None
        ids = self.topk_indices_buffer
        if ids is None:
            ids = allocate_block_ids(metadata.step.num_tokens, self.config, index_query.device)
        decode, prefill = self.selection.forward(
            index_query, self.index_cache.kv_cache, metadata.step, ids
        )
        return (
            None if decode is None else decode.transpose(0, 1),
            None if prefill is None else prefill.transpose(0, 1),
        )
