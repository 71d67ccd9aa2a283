"""MsattnCache: a transformers Cache that keeps K, V and index keys in msattn's pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ...cache import IndexCache, KVCache, Pool
from ...checks import fail, require_int, require_number
from ...config import BLOCK_SIZE, MSAConfig
from ...kv_format import KVFormat
from .step import Step, make_step

SPARSE_LAYER = "minimax_m3_sparse"
"""The layer type, in transformers' config, of layers that select blocks."""


class MsattnCache(Cache):
    """Paged cache for ``model.generate(past_key_values=...)`` of ``attn_implementation="msattn"``.

    Padding is not stored: each prompt of a batch fills its pages as if it were alone.

    Args:
        config: the model's config, the full or the text one.
        kv_format: how K and V are stored, in every layer: a name, a dtype or a KVFormat.
        index_dtype: how index keys are stored; default: the KV format, bf16 for 8 and 4 bit ones.
        max_cache_len: tokens of a request to allocate for at the first step; default: grow as
            needed.
        k_scale, v_scale: dequantisation factors of every layer, as for :class:`msattn.KVCache`.
        record_selection: keep the selected block ids of batch row 0, for :meth:`selection`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        kv_format: object = "bf16",
        *,
        index_dtype: object = None,
        max_cache_len: int | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        record_selection: bool = False,
    ) -> None:
        if max_cache_len is not None:
            require_int("max_cache_len", max_cache_len, at_least=1)
        text = config.get_text_config(decoder=True)
        self.config = MSAConfig.from_hf(text)
        self.kv_format = KVFormat.parse(kv_format)
        self.index_format = _index_format(self.kv_format, index_dtype)
        self._capacity = max_cache_len
        self.record_selection = record_selection
        self.k_scale = require_number("k_scale", k_scale, "a finite number > 0", positive=True)
        self.v_scale = require_number("v_scale", v_scale, "a finite number > 0", positive=True)
        super().__init__(
            layers=[MsattnLayer(self, kind == SPARSE_LAYER) for kind in text.layer_types]
        )
        self.reset()

    def reset(self) -> None:
        """Forget everything; memory is given back."""
        self._tokens = torch.zeros((0, 0), dtype=torch.bool)  # [B, columns so far]
        self._page_table = torch.zeros((0, 0), dtype=torch.int32)  # [B, blocks], on the CPU
        self._steps: dict[torch.device, Step] = {}
        self._step_start = -1  # columns before the step that _steps describe
        self.last_hidden: torch.Tensor | None = None  # [B, hidden] of each row's last token
        for layer in self.layers:
            layer.reset()

    @property
    def sparse_layers(self) -> list[int]:
        """Indices of the layers that select blocks."""
        return [i for i, layer in enumerate(self.layers) if layer.is_sparse]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers: K, V and index keys."""
        index_bytes = self.config.index_head_dim * self.index_format.storage_dtype.itemsize
        kv_bytes = self.kv_format.bytes_per_token(self.config)
        return kv_bytes * len(self.layers) + index_bytes * len(self.sparse_layers)

    @property
    def num_pages(self) -> int:
        """Pages that each layer's pool has."""
        return self._page_table.numel()

    def selection(self, layer_idx: int) -> torch.Tensor:
        """Block ids ``[tokens so far, Hkv, topk]`` int32 of batch row 0 in a sparse layer."""
        layer = self.layers[layer_idx]
        if not (self.record_selection and layer.is_sparse):
            raise fail(
                "layer_idx",
                f"one of {self.sparse_layers}, of a cache with record_selection=True",
                f"{layer_idx}, record_selection={self.record_selection}",
            )
        shape = (0, self.config.num_kv_heads, self.config.topk)
        return torch.cat([torch.empty(shape, dtype=torch.int32), *layer.selected])

    def begin(
        self,
        layer_idx: int,
        batch: int,
        query_len: int,
        padding_mask: torch.Tensor | None,
        device: torch.device,
    ) -> Step:
        """The step that ``layer_idx`` is about to compute; made once for all layers of a device.

        Args:
            batch, query_len: shape of the new columns.
            padding_mask: ``[B, columns so far + query_len]``, true for tokens; None = all are.
        """
        start = self.layers[layer_idx].get_seq_length()
        if start != self._step_start or self._tokens.shape != (batch, start + query_len):
            self._append(start, batch, query_len, padding_mask)
        if device not in self._steps:
            self._steps[device] = make_step(
                self._tokens,
                query_len,
                query_len,
                self._page_table,
                self.config,
                self.kv_format,
                device,
            )
        self.layers[layer_idx].reserve(self.num_pages, device)
        self.layers[layer_idx].columns = start + query_len
        return self._steps[device]

    def _append(
        self, start: int, batch: int, query_len: int, padding_mask: torch.Tensor | None
    ) -> None:
        """Take the new columns into account, with pages for their tokens."""
        past = self._tokens
        if past.shape[1] == 0:
            past = torch.zeros((batch, 0), dtype=torch.bool)
        if past.shape != (batch, start):
            raise fail(
                "past_key_values",
                f"a cache of {batch} rows and {start} columns in every layer",
                list(past.shape),
            )
        columns = start + query_len
        if padding_mask is None:
            new = torch.ones((batch, query_len), dtype=torch.bool)
        else:
            if tuple(padding_mask.shape) != (batch, columns):
                got = list(padding_mask.shape)
                raise fail("attention_mask", f"shape [{batch}, {columns}]", got)
            mask = padding_mask.to("cpu", torch.bool)
            if not torch.equal(mask[:, :start], past):
                raise fail("attention_mask", "earlier columns as in earlier steps", "a change")
            new = mask[:, start:]
        tokens = torch.cat([past, new], dim=1)
        self._grow(batch, int(tokens.sum(1).max()) if tokens.numel() else 0)
        self._tokens, self._step_start, self._steps = tokens, start, {}

    def _grow(self, batch: int, length: int) -> None:
        """Pages for ``length`` tokens in each row; doubled, so that growth costs little overall."""
        if self._capacity is not None and length > self._capacity:
            raise fail("max_cache_len", f"at least {length}", self._capacity)
        have, need = self._page_table.shape[1], -(-length // BLOCK_SIZE)
        if need <= have:
            return
        width = max(need, 2 * have)
        if self._capacity is not None:
            width = -(-self._capacity // BLOCK_SIZE)
        more = torch.arange(batch * have, batch * width, dtype=torch.int32).view(batch, -1)
        self._page_table = torch.cat([self._page_table, more], dim=1) if have else more

    def _take_rows(self, rows: torch.Tensor) -> None:
        """Make batch row i a copy of the former row ``rows[i]``."""
        if not self._tokens.numel():
            return
        rows = rows.to("cpu", torch.int64)
        pages = self._page_table[rows].flatten().long()
        self._tokens = self._tokens[rows]
        self._page_table = torch.arange(pages.numel(), dtype=torch.int32).view(len(rows), -1)
        self._steps, self._step_start = {}, -1
        if self.last_hidden is not None:
            self.last_hidden = self.last_hidden[rows.to(self.last_hidden.device)]
        for layer in self.layers:
            layer.take_pages(pages)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(self._tokens.shape[0])
        self._take_rows(rows[indices.to("cpu")])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take_rows(torch.arange(self._tokens.shape[0]).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``|tokens_to_remove|`` columns; a positive number is the length to keep."""
        columns = self._tokens.shape[1]
        keep = columns - abs(tokens_to_remove) if tokens_to_remove <= 0 else tokens_to_remove
        keep = max(0, min(keep, columns))
        self._tokens = self._tokens[:, :keep]
        self._steps, self._step_start = {}, -1
        for layer in self.layers:
            layer.columns = min(layer.columns, keep)


class MsattnLayer(CacheLayerMixin):
    """One layer's pools. The columns it has seen count the padding, as transformers counts them."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: MsattnCache, is_sparse: bool) -> None:
        super().__init__()
        self._cache = cache
        self.is_sparse = is_sparse
        self.reset()

    def reset(self) -> None:
        self.columns = 0
        self.kv: KVCache | None = None
        self.index: IndexCache | None = None
        self.selected: list[torch.Tensor] = []  # [tokens, Hkv, topk] of each step, batch row 0
        self.is_initialized = False

    def reserve(self, num_pages: int, device: torch.device) -> None:
        """Pools of at least ``num_pages`` pages on ``device``, their content kept."""
        cache = self._cache
        if self.kv is None:
            self._wrap(KVCache.allocate(0, cache.config, cache.kv_format, device=device).tensor)
            if self.is_sparse:
                self.index = IndexCache.allocate(0, cache.config, cache.index_format, device=device)
            self.is_initialized = True
        if num_pages > self._num_pages:
            self._replace(lambda pool: _grown(pool, num_pages))

    def take_pages(self, pages: torch.Tensor) -> None:
        """Make page i a copy of the former page ``pages[i]``."""
        if self.kv is not None:
            pages = pages.to(self.kv.device)
            self._replace(lambda pool: pool.view(torch.uint8)[pages].view(pool.dtype))

    @property
    def _num_pages(self) -> int:
        return 0 if self.kv is None else self.kv.num_pages

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        assert self.kv is not None and isinstance(self.kv.tensor, torch.Tensor)
        self._wrap(change(self.kv.tensor))
        if self.index is not None:
            self.index = IndexCache.from_tensor(change(self.index.tensor), self._cache.config)

    def _wrap(self, pool: Pool) -> None:
        cache = self._cache
        self.kv = KVCache.from_tensor(
            pool, cache.config, cache.kv_format, k_scale=cache.k_scale, v_scale=cache.v_scale
        )

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1 if self._cache._capacity is None else self._cache._capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError(_ONLY_MSATTN)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError(_ONLY_MSATTN)


_ONLY_MSATTN = (
    'MsattnCache serves attn_implementation="msattn" alone: call '
    'msattn.integrations.transformers.register(), then model.set_attn_implementation("msattn")'
)


def _index_format(kv_format: KVFormat, index_dtype: object) -> KVFormat:
    if index_dtype is not None:
        return KVFormat.parse(index_dtype, name="index_dtype", for_index=True)
    same = kv_format.in_index and not kv_format.is_fp8
    return kv_format if same else KVFormat.parse("bf16")


def _grown(pool: torch.Tensor, num_pages: int) -> torch.Tensor:
    grown = pool.new_zeros((num_pages, *pool.shape[1:]))
    grown.view(torch.uint8)[: pool.shape[0]] = pool.view(torch.uint8)
    return grown
