"""msattn: MiniMax Sparse Attention on the GPUs that people have."""

from .api import sparse_attention
from .attend import attend
from .batch import Batch
from .cache import CompactKeys, IndexCache, KVCache
from .combine import merge_states
from .config import BLOCK_SIZE, MSAConfig
from .dispatch import why_not
from .indexer import index_scores, index_select
from .kv_format import KV_FORMATS, KVFormat
from .plan import Plan, make_plan
from .selection import select_blocks
from .store import refresh_compact_keys, store_index_k, store_kv
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "BLOCK_SIZE",
    "KV_FORMATS",
    "Batch",
    "CompactKeys",
    "IndexCache",
    "KVCache",
    "KVFormat",
    "MSAConfig",
    "Plan",
    "attend",
    "index_scores",
    "index_select",
    "make_plan",
    "merge_states",
    "refresh_compact_keys",
    "select_blocks",
    "sparse_attention",
    "store_index_k",
    "store_kv",
    "warmup",
    "why_not",
]
