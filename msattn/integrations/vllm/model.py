"""vLLM's own MiniMax-M3, with the selectors of its sparse layers replaced by ours.

Drafts of multi-token prediction are built from the same module, and follow.
"""

from __future__ import annotations

from vllm.models.minimax_m3 import (
    MiniMaxM3SparseForCausalLM,
    MiniMaxM3SparseForConditionalGeneration,
)
from vllm.models.minimax_m3.common import indexer, sparse_attention
from vllm.platforms import current_platform

from .select import select_indexer_impl_cls, select_main_backend_and_impl_cls

__all__ = ["MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"]

if not current_platform.is_rocm():
    from vllm.models.minimax_m3.nvidia import model

    # Where it is defined, and the name that the model's module has bound.
    sparse_attention.select_main_backend_and_impl_cls = select_main_backend_and_impl_cls
    model.select_main_backend_and_impl_cls = select_main_backend_and_impl_cls
    indexer.select_indexer_impl_cls = select_indexer_impl_cls
