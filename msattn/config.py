"""MSAConfig: shapes and selection rules of a model's sparse layers on one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .checks import fail, require_int

BLOCK_SIZE = 128
"""Tokens of a block, and of a page: the only size that MiniMax Sparse Attention defines."""


@dataclass(frozen=True, slots=True)
class MSAConfig:
    """What the kernels must know of a model; the defaults are MiniMax-M3's on one GPU.

    Query head ``h`` reads KV head ``h // group_size``; index head ``h`` selects for KV head ``h``.
    """

    num_q_heads: int = 64  # query heads on this rank
    num_kv_heads: int = 4  # KV heads on this rank
    num_index_heads: int = 4  # index heads on this rank, one for each KV head
    head_dim: int = 128  # width of a query, key and value head
    index_head_dim: int = 128  # width of an index query head and of the one index key
    block_size: int = BLOCK_SIZE  # tokens of a block
    topk: int = 16  # blocks selected for each token and KV head, forced ones included
    init_blocks: int = 0  # leading blocks that are always selected
    local_blocks: int = 1  # last visible blocks that are always selected

    def __post_init__(self) -> None:
        for field in fields(self):
            forced = field.name in ("init_blocks", "local_blocks")
            require_int(field.name, getattr(self, field.name), at_least=0 if forced else 1)
        if self.block_size != BLOCK_SIZE:
            raise fail("block_size", f"{BLOCK_SIZE}", self.block_size, NotImplementedError)
        if self.num_q_heads % self.num_kv_heads:
            raise fail(
                "num_q_heads", f"a multiple of num_kv_heads={self.num_kv_heads}", self.num_q_heads
            )
        if self.num_index_heads != self.num_kv_heads:
            raise fail(
                "num_index_heads",
                f"num_kv_heads={self.num_kv_heads} (index head h selects for KV head h)",
                self.num_index_heads,
            )
        for name in ("head_dim", "index_head_dim"):
            if getattr(self, name) % 16:
                raise fail(name, "a multiple of 16", getattr(self, name), NotImplementedError)
        if self.init_blocks + self.local_blocks > self.topk:
            raise fail(
                "init_blocks + local_blocks",
                f"at most topk={self.topk}",
                f"{self.init_blocks} + {self.local_blocks}",
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: object, tp_size: int = 1) -> MSAConfig:
        """Read a MiniMax-M3 model config and take one rank's share of its heads.

        Args:
            config: a transformers config, or the mapping read from a ``config.json``; the text
                config or the full one that holds it as ``text_config``. Both spellings are
                understood: transformers' own (``index_topk_blocks`` ...) and the checkpoint's
                ``sparse_attention_config`` (``sparse_topk_blocks`` ...).
            tp_size: tensor-parallel ranks. Query heads are divided among them; KV and index heads
                are divided while there are enough, then each is held by ``tp_size / heads`` ranks.

        Raises:
            ValueError: the config is no MiniMax-M3, or its heads do not split over ``tp_size``.
            NotImplementedError: a block score other than "max".
        """
        require_int("tp_size", tp_size, at_least=1)
        text = _read(config, "text_config") or config
        sparse = _read(text, "sparse_attention_config") or {}
        _require_supported(sparse)

        def read(attribute: str, sparse_key: str, default: int | None = None) -> int:
            for holder, key in ((text, attribute), (sparse, sparse_key)):
                value = _read_int(holder, key, at_least=1 if default is None else 0)
                if value is not None:
                    return value
            if default is None:
                expected = f"{attribute!r} or sparse_attention_config[{sparse_key!r}]"
                got = f"{type(config).__name__} without either"
                raise fail("config", f"a MiniMax-M3 config with {expected}", got)
            return default

        def read_heads(attribute: str) -> int:
            value = _read_int(text, attribute, at_least=1)
            if value is None:
                got = f"{type(config).__name__} without it"
                raise fail("config", f"a MiniMax-M3 config with {attribute!r}", got)
            return value

        num_q_heads, num_kv_heads = (
            read_heads("num_attention_heads"),
            read_heads("num_key_value_heads"),
        )
        head_dim = _read_int(text, "head_dim", at_least=0)
        index_heads = read("index_n_heads", "sparse_num_index_heads")
        if num_q_heads % tp_size:
            raise fail("tp_size", f"a divisor of the {num_q_heads} query heads", tp_size)
        return cls(
            num_q_heads=num_q_heads // tp_size,
            num_kv_heads=_heads_per_rank("KV", num_kv_heads, tp_size),
            num_index_heads=_heads_per_rank("index", index_heads, tp_size),
            head_dim=head_dim or read_heads("hidden_size") // num_q_heads,
            index_head_dim=read("index_head_dim", "sparse_index_dim"),
            block_size=read("index_block_size", "sparse_block_size"),
            topk=read("index_topk_blocks", "sparse_topk_blocks"),
            # Absent keys mean no forced blocks; transformers has no name for init blocks.
            init_blocks=read("index_init_blocks", "sparse_init_block", default=0),
            local_blocks=read("index_local_blocks", "sparse_local_block", default=0),
        )


def _read(config: object, name: str) -> Any:
    """``config[name]`` of a mapping, ``config.name`` of an object, None where there is none."""
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def _read_int(config: object, name: str, *, at_least: int) -> int | None:
    """``_read`` of what is an int if it is there."""
    value = _read(config, name)
    if value is not None:
        require_int(name, value, at_least=at_least)
    return value  # type: ignore[no-any-return]


def _require_supported(sparse: object) -> None:
    score_type = _read(sparse, "sparse_score_type")
    if score_type not in (None, "max"):
        raise fail("sparse_score_type", "'max'", repr(score_type), NotImplementedError)
    if _read(sparse, "use_sparse_attention") is False:
        raise fail("use_sparse_attention", "True", False)


def _heads_per_rank(kind: str, heads: int, tp_size: int) -> int:
    """Heads are divided while there are enough, then replicated."""
    if max(heads, tp_size) % min(heads, tp_size):
        raise fail("tp_size", f"a divisor or a multiple of the {heads} {kind} heads", tp_size)
    return max(1, heads // tp_size)
