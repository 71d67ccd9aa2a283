"""What the plug-in takes for granted in vLLM: where to look when a version moves something."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import distribution, version

import pytest
from prepare import ENGINES
from seams import find, parameters

M3 = "vllm.models.minimax_m3"
SPARSE = f"{M3}.common.sparse_attention"
INDEXER = f"{M3}.common.indexer"
MSA = f"{M3}.nvidia.sparse_attention_msa"
MODEL = f"{M3}.nvidia.model"

MODULES = [
    "vllm.plugins",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.registry",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.kv_cache_interface",
    *(INDEXER, SPARSE, MODEL, MSA),
    f"{M3}.nvidia.mtp",
]
SIGNATURES = {
    f"{SPARSE}:select_main_backend_and_impl_cls": (
        "(*, topk_blocks, kv_cache_dtype, num_kv_heads, emits_sparse_block_table=False)"
    ),
    f"{INDEXER}:select_indexer_impl_cls": "(*, topk_blocks, indexer_kv_dtype='bf16')",
    f"{SPARSE}:MiniMaxM3SparseImpl": (
        "(num_heads, head_size, scale, num_kv_heads=None, kv_cache_dtype='auto', *,"
        " topk_blocks, sparse_block_size, msa_decode_backend='triton')"
    ),
    f"{SPARSE}:MiniMaxM3SparseImpl.forward": (
        "(self, layer, query, kv_cache, output, *, query_fp8=None)"
    ),
    f"{SPARSE}:MiniMaxM3SparseMetadataBuilder": "(kv_cache_spec, layer_names, vllm_config, device)",
    f"{SPARSE}:MiniMaxM3SparseMetadataBuilder.build": (
        "(self, common_prefix_len, common_attn_metadata, fast_build=False)"
    ),
    f"{SPARSE}:MiniMaxM3SparseMetadata": (
        "(seq_lens, max_seq_len, slot_mapping, num_actual_tokens, num_decodes, num_decode_tokens,"
        " num_prefills, num_prefill_tokens, prefill=None, decode=None, page16_slot_mapping=None)"
    ),
    f"{SPARSE}:MiniMaxM3SparsePrefillMetadata": (
        "(cu_seqlens_q, cu_seqlens_k, seq_lens, context_lens, block_table, max_query_len,"
        " max_seq_len, total_kv_blocks, query_req_id=None, query_abs_pos=None)"
    ),
    f"{SPARSE}:MiniMaxM3SparseDecodeMetadata": "(seq_lens, block_table, decode_query_len)",
    f"{MSA}:MiniMaxM3SparseMSANvfp4Backend.customize_spec": "(spec)",
    f"{MSA}:MiniMaxM3SparseMSANvfp4Backend.supported_kv_cache_layouts": "()",
    f"{INDEXER}:MiniMaxM3IndexerImpl": (
        "(*, num_kv_heads, scale, topk_blocks, sparse_block_size, num_index_heads, index_head_dim,"
        " prefix, init_blocks=0, local_blocks=0, score_type='max', cache_config=None,"
        " indexer_kv_dtype='bf16', topk_indices_buffer=None)"
    ),
    f"{INDEXER}:MiniMaxM3IndexerImpl.forward": "(self, index_query)",
    "vllm:ModelRegistry.register_model": "(model_arch, model_cls)",
    "vllm.forward_context:get_forward_context": "()",
}


def test_versions() -> None:
    assert version("vllm") == ENGINES["vllm"]
    # Installed, not only importable: plug-ins are found by the distribution's entry points.
    assert "msattn" in distribution("msattn").entry_points.names


@pytest.mark.parametrize("name", MODULES)
def test_imports_on_a_cpu(name: str) -> None:
    import_module(name)


@pytest.mark.parametrize("seam", SIGNATURES)
def test_signature(seam: str) -> None:
    assert parameters(seam) == SIGNATURES[seam], f"{seam} has moved"


def test_where_the_selectors_are_bound() -> None:
    """A plug-in has to replace the main selector under two names, the indexer's under one."""
    name = "select_main_backend_and_impl_cls"
    assert find(f"{MODEL}:{name}") is find(f"{SPARSE}:{name}")
    assert not hasattr(import_module(MODEL), "select_indexer_impl_cls")
    # Draft layers are the model's own, and follow its selectors.
    assert find(f"{M3}.nvidia.mtp:MiniMaxM3DecoderLayer") is find(f"{MODEL}:MiniMaxM3DecoderLayer")


def test_names_that_the_engine_looks_up() -> None:
    assert find("vllm.plugins:DEFAULT_PLUGINS_GROUP") == "vllm.general_plugins"
    models = find("vllm:ModelRegistry").get_supported_archs()
    assert {"MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"} <= {*models}
    backend = find(f"{SPARSE}:MiniMaxM3SparseBackend")
    registry = find("vllm.v1.attention.backends.registry:AttentionBackendEnum")
    assert backend.get_name() in registry.__members__


def test_what_the_engine_refuses() -> None:
    """Off SM100 there is no NVFP4 cache without a plug-in; the rest is Triton's."""
    select = find(f"{SPARSE}:select_main_backend_and_impl_cls")
    _, impl = select(topk_blocks=16, kv_cache_dtype="bfloat16", num_kv_heads=4)
    assert impl is find(f"{SPARSE}:MiniMaxM3SparseTritonImpl")
    with pytest.raises(ValueError, match="NVFP4 KV cache only with the SM100"):
        select(topk_blocks=16, kv_cache_dtype="nvfp4", num_kv_heads=4)
