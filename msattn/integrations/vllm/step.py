"""vLLM's words for a step and a model, in ours."""

from __future__ import annotations

from functools import cache

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata

from ... import env
from ...config import MSAConfig
from ...kv_format import KVFormat
from ...serving import MetadataBuilder, Step, parse_kv_dtype
from ...warmup import warmup

logger = init_logger("vllm.msattn")

MIN_BATCH = "VLLM_MINIMAX_M3_MSA_CUTLASS_MIN_BATCH"


def read_config(vllm_config: VllmConfig) -> MSAConfig:
    """This rank's shapes of the model that vLLM serves."""
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    return MSAConfig.from_hf(vllm_config.model_config.hf_text_config, tp_size)


def read_kv_format(vllm_config: VllmConfig) -> KVFormat:
    """By vLLM's name: its cache specs hold every fp8 format as bytes."""
    dtype = vllm_config.model_config.dtype
    return parse_kv_dtype(vllm_config.cache_config.cache_dtype, dtype)


def read_index_format(vllm_config: VllmConfig) -> KVFormat:
    name = vllm_config.attention_config.resolve_indexer_kv_dtype("bf16")
    return KVFormat.parse(name, name="indexer_kv_dtype", for_index=True)


def make_builder(vllm_config: VllmConfig, device: torch.device, threshold: int) -> MetadataBuilder:
    """A builder of ours for a builder of vLLM's, which has found the threshold."""
    return MetadataBuilder(
        read_config(vllm_config),
        read_kv_format(vllm_config),
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_seq_len=vllm_config.model_config.max_model_len,
        device=device,
        num_speculative_tokens=threshold - 1,
        min_batch=env.decode_min_batch(MIN_BATCH),
    )


@cache
def warm_up(
    config: MSAConfig, kv_format: KVFormat, index_format: KVFormat, device: torch.device
) -> None:
    """Compile what serving needs, once for a model in a process; nothing on a CPU."""
    if device.type != "cuda" or not env.WARMUP:
        return
    logger.info("msattn: compiling kernels for a %s cache; this may take minutes", kv_format)
    factor = torch.ones((), device=device)
    warmup(
        config,
        kv_format,
        device=device,
        index_dtype=index_format,
        index_query_dtype=index_format.storage_dtype,
        k_scale=factor,
        v_scale=factor,
    )


def make_step(common: CommonAttentionMetadata, max_seq_len: int) -> Step:
    """A step as the serving layer takes it; nothing is copied.

    vLLM's bound assumes that every draft was accepted, and may lie beyond the longest request that
    it admits, ``max_seq_len``.
    """
    lengths = common.seq_lens_cpu_upper_bound
    if lengths is None:
        raise ValueError("common_attn_metadata: expected seq_lens_cpu_upper_bound, got None")
    return Step(
        query_start_loc=common.query_start_loc,
        query_start_loc_cpu=common.query_start_loc_cpu,
        seq_lens=common.seq_lens,
        seq_lens_cpu=lengths,
        page_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        num_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=min(common.max_seq_len, max_seq_len),
    )
