"""The tables of docs/serving.md that say what stands for the names of vLLM's MiniMax-M3."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
SECTION = DOCUMENT.read_text(encoding="utf-8").split("## What is called how")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if line.startswith("| `")
]
# What the module of vLLM defines, and what it imports of MiniMax-M3's.
ORIGINAL = re.findall(
    r"\w+",
    """
    MiniMaxM3SparseBackend MiniMaxM3SparseMSABackend MiniMaxM3SparseMSANvfp4Backend
    MiniMaxM3SparseCutlassBackend MiniMaxM3SparseTritonBackend
    MiniMaxM3SparseImpl MiniMaxM3SparseMSABaseImpl MiniMaxM3SparseMSAImpl
    MiniMaxM3SparseMSANvfp4Impl
    MiniMaxM3SparseMetadata MiniMaxM3SparsePrefillMetadata MiniMaxM3SparseDecodeMetadata
    MiniMaxM3SparseMSAPrefillMetadata MiniMaxM3SparseMSADecodeMetadata
    MiniMaxM3SparseMetadataBuilder MiniMaxM3SparseMSAMetadataBuilder
    MSACutlassDecodePlanCache MSACutlassDecodeMetadata PrefillWorkspace
    customize_spec supported_kv_cache_layouts should_use_msa_decode use_cutlass_decode
    prefill_backend
    _build_prefill_csr _bf16_query _dequantize_query _q8kv4_prefill_blocker
    is_nvfp4_kv_cache nvfp4_kv_cache_views nvfp4_kv_cache_full_dim nvfp4_kv_cache_slots
    msa_cutlass_sparse_decode prepare_decode_metadata should_prepare_decode_metadata
    supports_cutlass_sparse_decode uses_q8kv4_decode minimax_m3_sparse_attn_decode
    build_k2q_csr sparse_atten_func run_prefill interleave_v_scales
    NVFP4_BLOCK_SCALE_SHIFT SPARSE_BLOCK_SIZE _get_msa_cutlass_min_batch_size
    MiniMaxM3IndexerMSABackend MiniMaxM3IndexerMSAMetadataBuilder MiniMaxM3IndexerMSAMetadata
    MiniMaxM3IndexerMSAImpl minimax_m3_index_score minimax_m3_index_topk sparse_topk_select
    num_actual_tokens block_table
""",
)


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_name_of_the_original_has_a_row() -> None:
    listed = {part for row in ROWS for name in names(row[0]) for part in name.split(".")}
    assert set(ORIGINAL) <= listed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: names(row[0])[0])
def test_every_counterpart_exists(row: list[str]) -> None:
    assert names(row[1]) or (row[1] == "none" and row[2])
    for name in names(row[1]):
        if name.startswith("MSATTN_"):
            assert name in Path(inspect.getfile(import_module("msattn.env"))).read_text()
        else:
            find(name)


def find(name: str) -> object:
    """What a dotted name stands for: of msattn.serving, unless it begins with ``msattn``."""
    path = (
        name.split(".") if name.startswith("msattn.") else ["msattn", "serving", *name.split(".")]
    )
    found: object = import_module(path[0])
    for depth, part in enumerate(path[1:], 2):
        if hasattr(found, part):
            found = getattr(found, part)
        elif inspect.ismodule(found):
            found = import_module(".".join(path[:depth]))
        else:
            assert isinstance(found, type)
            # Set for each instance: a field, or an argument that is kept.
            assert part in attributes(found), name
    return found


def attributes(kind: type) -> set[str]:
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name for field in fields} | set(inspect.signature(kind).parameters)
