"""Which classes serve a MiniMax-M3 in vLLM: ours where they can, else vLLM's own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.models.minimax_m3.common import indexer, sparse_attention
from vllm.platforms import current_platform

from ... import env
from ...config import MSAConfig
from ...serving import SPARSE_MSA, SPARSE_MSA_NVFP4, Request, is_nvfp4
from ...serving import why_not as backend_why_not
from ..engines import OWN_MSA, OWN_MSA_MAJOR
from .attention import (
    MiniMaxM3SparseMSABackend,
    MiniMaxM3SparseMSAImpl,
    MiniMaxM3SparseMSANvfp4Backend,
    MiniMaxM3SparseMSANvfp4Impl,
)
from .indexer import MiniMaxM3IndexerMSAImpl

logger = init_logger("vllm.msattn")

# vLLM's own, before model.py replaces them.
_select_main = sparse_attention.select_main_backend_and_impl_cls
_select_indexer = indexer.select_indexer_impl_cls


def why_not(
    *, topk_blocks: int, num_kv_heads: int, kv_cache_dtype: str = "auto", index_dtype: str = "bf16"
) -> list[str]:
    """Why vLLM keeps its own kernels for a model: a list of reasons, empty when msattn serves.

    Args:
        topk_blocks: blocks that the model selects for each token.
        num_kv_heads: on this rank.
        kv_cache_dtype, index_dtype: vLLM's names of the caches' dtypes.
    """
    reasons = _platform_reasons()
    if reasons:
        return reasons
    backend = SPARSE_MSA_NVFP4 if is_nvfp4(kv_cache_dtype) else SPARSE_MSA
    config = MSAConfig(num_kv_heads, num_kv_heads, num_kv_heads, topk=topk_blocks)
    device = torch.device("cuda" if current_platform.is_cuda() else "cpu")
    try:
        request = Request(config, kv_cache_dtype, device, index_dtype=index_dtype)
        return backend_why_not(backend, request)
    except (ValueError, NotImplementedError) as error:
        return [str(error)]


def _platform_reasons() -> list[str]:
    if current_platform.is_cuda():
        if current_platform.is_device_capability_family(10 * OWN_MSA_MAJOR):
            return [OWN_MSA.format("vLLM")]
        return []
    if env.IMPL == "reference":  # asked for by name: on a CPU, for tests
        return []
    return [f"vLLM runs on {current_platform.device_name or 'no GPU'}; msattn serves CUDA GPUs"]


def select_main_backend_and_impl_cls(
    *,
    topk_blocks: int,
    kv_cache_dtype: str,
    num_kv_heads: int,
    emits_sparse_block_table: bool = False,
) -> tuple[type[Any], type[Any]]:
    """The attention backend and implementation of a sparse layer; with vLLM's signature."""
    reasons = why_not(
        topk_blocks=topk_blocks, num_kv_heads=num_kv_heads, kv_cache_dtype=kv_cache_dtype
    )
    _log("attention", kv_cache_dtype, topk_blocks, reasons)
    if reasons:
        chosen: tuple[type[Any], type[Any]] = _select_main(
            topk_blocks=topk_blocks,
            kv_cache_dtype=kv_cache_dtype,
            num_kv_heads=num_kv_heads,
            emits_sparse_block_table=emits_sparse_block_table,
        )
        return chosen
    if is_nvfp4(kv_cache_dtype):
        return MiniMaxM3SparseMSANvfp4Backend, MiniMaxM3SparseMSANvfp4Impl
    return MiniMaxM3SparseMSABackend, MiniMaxM3SparseMSAImpl


def select_indexer_impl_cls(*, topk_blocks: int, indexer_kv_dtype: str = "bf16") -> type[Any]:
    """The implementation of a sparse layer's indexer; with vLLM's signature."""
    reasons = why_not(topk_blocks=topk_blocks, num_kv_heads=1, index_dtype=indexer_kv_dtype)
    if get_current_vllm_config().attention_config.minimax_m3_indexer_cp:
        reasons.append("minimax_m3_indexer_cp shares an indexer's work among ranks")
    _log("indexer", indexer_kv_dtype, topk_blocks, reasons)
    if reasons:
        chosen: type[Any] = _select_indexer(
            topk_blocks=topk_blocks, indexer_kv_dtype=indexer_kv_dtype
        )
        return chosen
    return MiniMaxM3IndexerMSAImpl


def _log(part: str, dtype: str, topk_blocks: int, reasons: list[str]) -> None:
    """One line for each choice, once."""
    chosen = "vLLM's own" if reasons else "msattn"
    why = f": {'; '.join(reasons)}" if reasons else ""
    logger.info_once(
        "MiniMax M3 %s: selected %s (cache dtype %s, topk %d)%s",
        *(part, chosen, dtype, topk_blocks, why),
    )
