"""Attention of MiniMax-M3's sparse layers as vLLM has it: backends, metadata, builder, impl.

The names are those of vLLM's ``sparse_attention_msa``, which serves SM100 alone, and of what it
imports: the base classes are vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common.sparse_attention import (
    MiniMaxM3SparseBackend,
    MiniMaxM3SparseDecodeMetadata,
    MiniMaxM3SparseImpl,
    MiniMaxM3SparseMetadata,
    MiniMaxM3SparseMetadataBuilder,
    MiniMaxM3SparsePrefillMetadata,
)
from vllm.models.minimax_m3.nvidia import sparse_attention_msa as original
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from ...config import MSAConfig
from ...serving import LayerState, SparseImpl, SparseMetadata, is_nvfp4, parse_kv_dtype
from ...serving.decode_plans import refresh
from .step import make_builder, make_step, read_config, read_index_format, read_kv_format, warm_up


class MiniMaxM3SparseMSABackend(MiniMaxM3SparseBackend):
    """Plain caches (bf16, fp16, fp8) in either layout."""

    @staticmethod
    def get_impl_cls() -> type[MiniMaxM3SparseMSAImpl]:
        return MiniMaxM3SparseMSAImpl

    @staticmethod
    def get_builder_cls() -> type[MiniMaxM3SparseMSAMetadataBuilder]:
        return MiniMaxM3SparseMSAMetadataBuilder


class MiniMaxM3SparseMSANvfp4Backend(original.MiniMaxM3SparseMSANvfp4Backend):
    """NVFP4 caches: vLLM's own pages, of two slots of 72 bytes a token for each KV head."""

    @staticmethod
    def get_impl_cls() -> type[MiniMaxM3SparseMSANvfp4Impl]:
        return MiniMaxM3SparseMSANvfp4Impl

    @staticmethod
    def get_builder_cls() -> type[MiniMaxM3SparseMSAMetadataBuilder]:
        return MiniMaxM3SparseMSAMetadataBuilder


class MiniMaxM3SparseCutlassBackend(MiniMaxM3SparseMSABackend):
    """Alias: an E4M3 query, in decode and prefill."""

    @staticmethod
    def get_name() -> str:
        return "CUTLASS_MSA"


class MiniMaxM3SparseTritonBackend(MiniMaxM3SparseMSABackend):
    """Alias: a query in the model's dtype."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_MSA"


@dataclass
class MiniMaxM3SparseMSAPrefillMetadata(MiniMaxM3SparsePrefillMetadata):
    """vLLM's; workspaces belong to the plan in ``MiniMaxM3SparseMSAMetadata.step``."""


@dataclass
class MiniMaxM3SparseMSADecodeMetadata(MiniMaxM3SparseDecodeMetadata):
    """vLLM's, and whether the tensor-core decode was planned."""

    use_tensor_core: bool = False


@dataclass
class MiniMaxM3SparseMSAMetadata(MiniMaxM3SparseMetadata):
    """vLLM's, and the step with its plans."""

    step: SparseMetadata | None = None


class MiniMaxM3SparseMSAMetadataBuilder(MiniMaxM3SparseMetadataBuilder):
    """Plans a step outside of captured graphs, which find its tensors where they were."""

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
        warm_up(
            read_config(vllm_config),
            read_kv_format(vllm_config),
            read_index_format(vllm_config),
            torch.device(device),
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MiniMaxM3SparseMSAMetadata:
        limit = self.steps.decode_plans.max_seq_len
        step = self.steps.build(make_step(common_attn_metadata, limit))
        return MiniMaxM3SparseMSAMetadata(
            **counts(step),
            prefill=_prefill(step),
            decode=_decode(step),
            step=step,
        )

    def update_draft_decode_metadata(self, metadata: MiniMaxM3SparseMSAMetadata) -> None:
        """The draft's next token: lengths and pages have changed in vLLM's own tensors."""
        update_plan(metadata.step)


def counts(step: SparseMetadata) -> dict[str, Any]:
    """The fields that vLLM's metadata of attention and indexer have in common."""
    return {
        "seq_lens": step.seq_lens,
        "max_seq_len": step.max_seq_len,
        "slot_mapping": step.slot_mapping,
        "num_actual_tokens": step.num_tokens,
        "num_decodes": step.num_decodes,
        "num_decode_tokens": step.num_decode_tokens,
        "num_prefills": step.num_prefills,
        "num_prefill_tokens": step.num_prefill_tokens,
    }


def update_plan(step: SparseMetadata | None) -> None:
    """Copy a decode step's lengths and pages, changed in place, into its plan: one launch."""
    if step is not None and step.decode is not None:
        decode = step.decode
        refresh(decode.planned.use(), decode.seq_lens, decode.page_table)


def _prefill(step: SparseMetadata) -> MiniMaxM3SparseMSAPrefillMetadata | None:
    prefill = step.prefill
    if prefill is None:
        return None
    return MiniMaxM3SparseMSAPrefillMetadata(
        cu_seqlens_q=prefill.cu_seqlens_q,
        cu_seqlens_k=prefill.cu_seqlens_k,
        seq_lens=prefill.seq_lens,
        context_lens=prefill.context_lens,
        block_table=prefill.page_table,
        max_query_len=prefill.max_query_len,
        max_seq_len=prefill.max_seq_len,
        total_kv_blocks=prefill.total_kv_blocks,
    )


def _decode(step: SparseMetadata) -> MiniMaxM3SparseMSADecodeMetadata | None:
    decode = step.decode
    if decode is None:
        return None
    return MiniMaxM3SparseMSADecodeMetadata(
        seq_lens=decode.seq_lens,
        block_table=decode.page_table,
        decode_query_len=decode.decode_query_len,
        use_tensor_core=decode.use_tensor_core,
    )


class MiniMaxM3SparseMSABaseImpl(MiniMaxM3SparseImpl):
    """Attends over the blocks that the indexer left in ``layer.topk_indices_buffer``."""

    can_return_lse_for_decode = True
    lse_base_on_e = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        kv_cache_dtype: str = "auto",
        *,
        topk_blocks: int,
        sparse_block_size: int,
        msa_decode_backend: str = "triton",
        block_scale_shift: int = 0,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            kv_cache_dtype,
            topk_blocks=topk_blocks,
            sparse_block_size=sparse_block_size,
        )
        self.config = MSAConfig(
            num_q_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            num_index_heads=self.num_kv_heads,
            head_dim=head_size,
            block_size=sparse_block_size,
            topk=topk_blocks,
            # The indexer's matter: nothing is forced here.
            local_blocks=0,
        )
        self.block_scale_shift = block_scale_shift
        # vLLM's layer then gives the query in E4M3 alone.
        self.use_cutlass_decode = msa_decode_backend == "cutlass" and (
            is_nvfp4(kv_cache_dtype) or kv_cache_dtype in ("fp8", "fp8_e4m3")
        )
        self._attention: SparseImpl | None = None

    def should_use_msa_decode(self, layer_name: str) -> bool:
        """The layer's decode rows take the planned kernel, and its query is E4M3."""
        metadata = _metadata_of(layer_name)
        decode = None if metadata is None else metadata.decode
        return self.use_cutlass_decode and decode is not None and decode.use_tensor_core

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        *,
        query_fp8: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's; with the LSE ``[T, Hq]`` where decode context parallelism needs it."""
        metadata = _metadata_of(layer.layer_name)
        if metadata is None:
            return output  # a run that measures memory: the caches are not bound
        assert metadata.step is not None
        scaled = self.use_fp8_kv
        state = LayerState(
            kv_cache,
            layer.topk_indices_buffer,
            k_scale=getattr(layer, "_k_scale", None) if scaled else None,
            v_scale=getattr(layer, "_v_scale", None) if scaled else None,
            q_scale=getattr(layer, "_q_scale_float", None),
        )
        return self._attention_for(output.dtype).forward(
            state,
            query if query_fp8 is None else query_fp8,
            output,
            metadata.step,
            return_lse=self.need_to_return_lse_for_decode,
        )

    def _attention_for(self, model_dtype: torch.dtype) -> SparseImpl:
        """Made at the first forward: until then, what "auto" stands for is not known."""
        if self._attention is None:
            self._attention = SparseImpl(
                self.config,
                parse_kv_dtype(self.kv_cache_dtype, model_dtype),
                softmax_scale=self.scale,
                block_scale_shift=self.block_scale_shift,
            )
        return self._attention


class MiniMaxM3SparseMSAImpl(MiniMaxM3SparseMSABaseImpl):
    """Of plain caches."""


class MiniMaxM3SparseMSANvfp4Impl(MiniMaxM3SparseMSABaseImpl):
    """Of NVFP4 caches, with any global scales."""


def _metadata_of(layer_name: str) -> MiniMaxM3SparseMSAMetadata | None:
    """The layer's metadata in the current forward pass, None where there is none."""
    by_layer = get_forward_context().attn_metadata
    if not isinstance(by_layer, dict):
        return None
    metadata = by_layer[layer_name]
    assert isinstance(metadata, MiniMaxM3SparseMSAMetadata)
    return metadata
