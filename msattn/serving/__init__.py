"""The serving layer, free of any engine: metadata, backends, indexer and attention of a step.

An engine makes a :class:`MetadataBuilder` for its KV caches and one for its index caches, builds
the metadata of each step, and calls :class:`Indexer` and :class:`SparseImpl` in each layer. The
plug-ins in ``msattn.integrations`` do so for vLLM.
"""

from .backends import (
    BACKENDS,
    DECODE_KERNELS,
    KERNELS,
    SPARSE_MSA,
    SPARSE_MSA_NVFP4,
    TENSOR_CORE_MSA,
    TRITON_MSA,
    Backend,
    Request,
    Selection,
    is_nvfp4,
    parse_index_dtype,
    parse_kv_dtype,
    select_backend,
    why_not,
)
from .builder import MetadataBuilder
from .csr import Csr, Schedule, build_k2q_csr
from .decode_plans import DecodePlan, DecodePlanCache
from .impl import LayerState, SparseImpl, dequantize_query
from .indexer import Indexer, allocate_block_ids
from .metadata import DecodeMetadata, PrefillMetadata, SparseMetadata, Step
from .split import Split, reorder_threshold, split_decodes_and_prefills

__all__ = [
    "BACKENDS",
    "DECODE_KERNELS",
    "KERNELS",
    "SPARSE_MSA",
    "SPARSE_MSA_NVFP4",
    "TENSOR_CORE_MSA",
    "TRITON_MSA",
    "Backend",
    "Csr",
    "DecodeMetadata",
    "DecodePlan",
    "DecodePlanCache",
    "Indexer",
    "LayerState",
    "MetadataBuilder",
    "PrefillMetadata",
    "Request",
    "Schedule",
    "Selection",
    "SparseImpl",
    "SparseMetadata",
    "Split",
    "Step",
    "allocate_block_ids",
    "build_k2q_csr",
    "dequantize_query",
    "is_nvfp4",
    "parse_index_dtype",
    "parse_kv_dtype",
    "reorder_threshold",
    "select_backend",
    "split_decodes_and_prefills",
    "why_not",
]
