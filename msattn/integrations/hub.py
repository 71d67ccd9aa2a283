"""The attention function that transformers binds when msattn is loaded as a kernel of the Hub.

It gets what transformers' MiniMax-M3 computes up to its attention: projected keys of the whole
history, and the blocks that transformers' own indexer selected. Those are blocks of *columns*, so
padding takes part in them, unlike in :mod:`.transformers`, which replaces the module and packs the
tokens. Nothing is imported from transformers until a layer without blocks is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..attend import State, attend
from ..batch import UNMAPPED, Batch
from ..cache import KVCache
from ..checks import fail
from ..combine import merge_states
from ..config import BLOCK_SIZE, MSAConfig
from ..plan import make_plan
from ..store import store_kv
from .inference import without_backward


def flash_attn_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: ``(out [B, Sq, Hq, D], None)``.

    Args:
        module: the attention module; its config gives the shapes.
        query: ``[B, Hq, Sq, D]``.
        key, value: ``[B, Hkv, Sk, D]``, the history and the new columns; a static cache's unused
            tail may follow.
        attention_mask: ``[B, 1, Sq, Sk]`` bool, causal but for columns of padding. None: causal,
            the queries being the first columns, or a single one the last column.
        scaling: default ``D ** -0.5``.
        block_indices: ``[B, Hkv, Sq, K]`` blocks of 128 columns, -1 = none. None, as in dense
            layers and the vision tower: SDPA.
    """
    if block_indices is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        dense, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return dense, None
    if dropout:
        raise fail("dropout", "0", dropout, NotImplementedError)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.no_grad():
        out = _sparse_attention(module, query, key, value, attention_mask, scale, block_indices)
    return without_backward(out, query), None


# Lengths are read from the mask; a compiler only breaks its graph on that.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sparse_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    block_indices: torch.Tensor,
) -> torch.Tensor:
    """Out ``[B, Sq, Hq, D]``: whole blocks in pages, blocks that hold padding beside them."""
    batch, query_len, device = query.shape[0], query.shape[2], query.device
    length, pages, ragged = _read_mask(mask, query, key)
    step = Batch(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len,
        torch.full((batch,), length, dtype=torch.int32, device=device),
        pages,
        max_query_len=query_len,
        max_seq_len=length,
        num_tokens=batch * query_len,
    )
    plan = make_plan(step, MSAConfig.from_hf(module.config), key.dtype)
    cache = KVCache.allocate(pages.numel(), plan.config, plan.kv_format, device=device)
    # Slots of an unmapped page are negative: its columns are not stored.
    slots = pages.unsqueeze(-1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)
    slots = slots.flatten(1)[:, :length].flatten()
    store_kv(_rows(key[:, :, :length]), _rows(value[:, :, :length]), cache, slots)
    block_ids = _rows(block_indices).int()
    out, lse = attend(_rows(query), cache, block_ids, plan, softmax_scale=scale, return_lse=True)
    if mask is not None and ragged is not None:
        part, part_lse = _attend_ragged(query, key, value, mask, scale, block_indices, ragged)
        out, _ = merge_states([out, part], [lse, part_lse])
    return out.view(batch, query_len, *out.shape[1:])


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[B, H, S, ...]`` of transformers as ``[B * S, H, ...]``."""
    return x.transpose(1, 2).flatten(0, 1)


class _Columns(NamedTuple):
    """What a mask says of the columns of a batch."""

    length: int  # columns up to the one of the last query
    pages: torch.Tensor  # [B, blocks] int32, UNMAPPED: the block holds padding
    ragged: torch.Tensor | None  # [B, M] blocks that hold padding and tokens, -1 = none


def _read_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> _Columns:
    batch, query_len, num_keys = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        length = num_keys if query_len == 1 else query_len
        return _Columns(length, _pages(batch, length, query.device), None)
    shape = [batch, 1, query_len, num_keys]
    if mask.dtype != torch.bool or list(mask.shape) != shape:
        got = f"{mask.dtype} {list(mask.shape)}"
        raise fail("attention_mask", f"torch.bool {shape}", got, NotImplementedError)
    column = torch.arange(num_keys, device=mask.device)
    seen = mask.sum(2).squeeze(1)  # [B, Sk] how many queries see a column
    # What no query but the last ones sees is at their columns: the first of them is at its own.
    last = int((column * seen.any(0)).amax())
    length = max(last + int(seen[:, last].amax()), query_len)
    tokens = seen > 0
    visible = column <= column[length - query_len : length].unsqueeze(1)  # [Sq, Sk]
    if not torch.equal(mask, tokens[:, None, None] & visible):
        wanted, got = "a causal mask with padding", "packed sequences or a mask of your own"
        raise fail("attention_mask", wanted, got, NotImplementedError)
    pages = _pages(batch, length, mask.device)
    # The columns behind the last query are no padding: causality hides them.
    tokens = torch.nn.functional.pad(tokens[:, :length], (0, -length % BLOCK_SIZE), value=True)
    count = tokens.unflatten(1, (-1, BLOCK_SIZE)).sum(2)  # [B, blocks]
    is_ragged = (count > 0) & (count < BLOCK_SIZE)
    most = int(is_ragged.sum(1).amax())
    block = torch.arange(pages.shape[1], device=mask.device)
    ragged = block.where(is_ragged, -1).sort(1, descending=True).values[:, :most]
    pages = pages.masked_fill(count < BLOCK_SIZE, UNMAPPED)
    return _Columns(length, pages, ragged if most else None)


def _pages(batch: int, length: int, device: torch.device) -> torch.Tensor:
    blocks = -(-length // BLOCK_SIZE)
    pages = torch.arange(batch * blocks, dtype=torch.int32, device=device)
    return pages.view(batch, blocks)


def _attend_ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    block_indices: torch.Tensor,
    ragged: torch.Tensor,
) -> State:
    """Attention over the blocks ``ragged`` [B, M], as far as selected and not hidden by the mask.

    Pages hide what is behind a token, never what is before it. A row of a batch has few such
    blocks, one for each end of its padding, so they are computed with a dense mask.
    """
    groups, query_len, dim = key.shape[1], *query.shape[2:]
    column = ragged.unsqueeze(-1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=query.device)
    column = column.flatten(1)[:, None, None]  # [B, 1, 1, M * 128]
    exists = (column >= 0) & (column < key.shape[2])
    column = column.clamp(0, key.shape[2] - 1)
    seen = exists & mask.gather(3, column.expand(-1, -1, query_len, -1))
    chosen = (block_indices.unsqueeze(-1) == ragged[:, None, None, None]).any(3)
    seen = seen & chosen.repeat_interleave(BLOCK_SIZE, 3)  # [B, Hkv, Sq, M * 128]
    rows = column.mT.expand(-1, groups, -1, dim)
    k, v = (x.gather(2, rows).float().unsqueeze(2) for x in (key, value))
    q = query.float().unflatten(1, (groups, -1)) * scale  # [B, Hkv, G, Sq, D]
    logits = (q @ k.mT).masked_fill(~seen.unsqueeze(2), -torch.inf)
    # A row that sees nothing here becomes NaN with an LSE of -inf: the merge does not read it.
    out, lse = logits.softmax(-1) @ v, logits.logsumexp(-1)
    return _rows(out.flatten(1, 2).to(query.dtype)), _rows(lse.flatten(1, 2))
