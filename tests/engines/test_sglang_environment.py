"""What the plug-in takes for granted in SGLang: where to look when a version moves something."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import distribution, version

import pytest
from prepare import ENGINES
from seams import find, parameters

OPS = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
BACKEND = "sglang.srt.layers.attention.minimax_sparse_backend"
HOOKS = "sglang.srt.plugins.hook_registry"

MODULES = ["sglang.srt.plugins", HOOKS, OPS, BACKEND]
SIGNATURES = {
    f"{OPS}:minimax_sparse_prefill": (
        "(q, k_cache, v_cache, sink, idx_q, idx_k_cache, idx_v_cache, idx_sink, req_to_token,"
        " slot_ids, cu_seqlens, seq_lens, prefix_lens, max_seqlen_q, max_seqlen_k, block_size_q,"
        " block_size_k, topk, init_blocks, local_blocks, sm_scale=None, idx_sm_scale=None,"
        " score_type='max', disable_index_value=False, use_msa=False, cu_seqblocks_q=None,"
        " max_seqblock_q=None, all_seqblock_q=None, seqlens_cpu=None, q_scale=None, k_scale=None,"
        " v_scale=None, idx_q_scale=None, idx_k_scale=None, idx_v_scale=None, cached_topk_idx=None,"
        " return_topk_idx=False, loc_mapping=None, page_size=1, seq_lens_cpu=None)"
    ),
    f"{OPS}:minimax_sparse_decode": (
        "(q, sink, k_cache, v_cache, idx_q, idx_sink, idx_k_cache, idx_v_cache, req_to_token,"
        " slot_ids, seq_lens, max_seqlen, block_size_q, block_size_k, topk, init_blocks,"
        " local_blocks, sm_scale=None, idx_sm_scale=None, score_type='max',"
        " disable_index_value=False, dense_main_attn_fn=None, page_size=1, use_msa=False,"
        " msa_kv_indices=None, msa_plan=None, q_scale=None, k_scale=None, v_scale=None,"
        " idx_q_scale=None, idx_k_scale=None, idx_v_scale=None, cached_topk_idx=None,"
        " topk_out=None, hisparse_swap_in_fn=None, indexer_cp=None, packed_queries=1)"
    ),
    f"{HOOKS}:HookRegistry.register": (
        "(target, hook, hook_type=<HookType.AFTER: 'after'>, *, source=None)"
    ),
}


def test_versions() -> None:
    assert version("sglang") == ENGINES["sglang"]
    # Installed, not only importable: plug-ins are found by the distribution's entry points.
    assert "msattn" in distribution("msattn").entry_points.names


@pytest.mark.parametrize("name", MODULES)
def test_imports_on_a_cpu(name: str) -> None:
    import_module(name)


@pytest.mark.parametrize("seam", SIGNATURES)
def test_signature(seam: str) -> None:
    assert parameters(seam) == SIGNATURES[seam], f"{seam} has moved"


def test_names_that_the_engine_looks_up() -> None:
    assert find("sglang.srt.plugins:GENERAL_PLUGINS_GROUP") == "sglang.srt.plugins"
    find(f"{HOOKS}:HookType.AROUND")


@pytest.mark.parametrize(
    ("step", "stage"), [("extend", "minimax_sparse_prefill"), ("decode", "minimax_sparse_decode")]
)
def test_where_the_stages_are_bound(step: str, stage: str) -> None:
    """The backend imports each where it calls it: a hook on the module reaches every call."""
    forward = find(f"{BACKEND}:MiniMaxSparseAttnBackend.forward_{step}")
    assert stage in forward.__code__.co_varnames
