"""Read pages of a cache as fp32 numbers, whatever the format; write tokens into their slots."""

from __future__ import annotations

from typing import Literal

import torch

from ..cache import CompactKeys, IndexCache, KVCache, Scale
from ..config import BLOCK_SIZE
from .quantize import compact_encode, divide, nvfp4_decode, nvfp4_encode, to_storage

Side = Literal["k", "v"]


def read_k(cache: KVCache, pages: torch.Tensor, head: int | None = None) -> torch.Tensor:
    """K of ``pages`` [n]: fp32 ``[n, Hkv, 128, D]``, or ``[n, 128, D]`` of one KV head."""
    return _read(cache, "k", pages, head)


def read_v(cache: KVCache, pages: torch.Tensor, head: int | None = None) -> torch.Tensor:
    """V, as :func:`read_k`."""
    return _read(cache, "v", pages, head)


def read_index_k(index: IndexCache, pages: torch.Tensor) -> torch.Tensor:
    """Index keys of ``pages`` [...]: ``[..., 128, Di]`` in the cache's dtype."""
    return _gather(index.tensor, pages)


def write_kv(cache: KVCache, side: Side, x: torch.Tensor, slots: torch.Tensor) -> None:
    """Store ``x`` ``[n, Hkv, D]`` into ``slots`` [n], all of them valid."""
    page, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    scale = cache.k_scale if side == "k" else cache.v_scale
    if isinstance(scale, torch.Tensor) and scale.dim() == 2:
        scale = scale[:, slots].T.unsqueeze(-1)  # [n, Hkv, 1]
    x = divide(x.float(), scale)
    if not cache.format.scale_group:
        pool = cache.k if side == "k" else cache.v
        _bytes(pool)[page, :, offset] = _bytes(to_storage(x, cache.format))
        return
    views = cache.nvfp4_views()
    codes, scales = nvfp4_encode(x)
    if side == "k":
        views.k_codes[page, :, offset] = codes
        _bytes(views.k_scales)[page, :, offset] = _bytes(scales)
    else:
        views.v_codes[page, :, offset] = codes
        _bytes(views.v_scales)[page, :, offset // 4, :, offset % 4] = _bytes(scales)


def write_index_k(index: IndexCache, x: torch.Tensor, slots: torch.Tensor) -> None:
    """Store ``x`` ``[n, Di]`` into ``slots`` [n], all of them valid."""
    stored = to_storage(x.float(), index.format)
    _bytes(index.tensor)[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = _bytes(stored)
    if index.compact is not None:
        write_compact_keys(index.compact, stored, slots)


def write_compact_keys(compact: CompactKeys, keys: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy the keys ``[n, Di]`` that ``slots`` [n] hold, all of them valid."""
    page, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    compact.codes[page, offset], compact.factors[page, offset] = compact_encode(keys)


def _read(cache: KVCache, side: Side, pages: torch.Tensor, head: int | None) -> torch.Tensor:
    heads = slice(None) if head is None else head
    if cache.format.scale_group:
        views = cache.nvfp4_views()
        codes = views.k_codes if side == "k" else views.v_codes
        scales = views.k_scales if side == "k" else views.v_scales.transpose(-1, -2)
        block_scales = _gather(scales[:, heads], pages)
        if side == "v":
            block_scales = block_scales.flatten(-3, -2)  # quads of tokens -> tokens
        x = nvfp4_decode(_gather(codes[:, heads], pages), block_scales)
    else:
        pool = cache.k if side == "k" else cache.v
        x = _gather(pool[:, heads], pages).float()
    scale = cache.k_scale if side == "k" else cache.v_scale
    return x * _page_scale(scale, pages, heads)


def _page_scale(scale: Scale, pages: torch.Tensor, heads: int | slice) -> Scale:
    """``scale`` in a shape that broadcasts over the pages read."""
    if isinstance(scale, float) or scale.dim() == 0:
        return scale
    by_page: torch.Tensor = scale.unflatten(1, (-1, BLOCK_SIZE)).transpose(
        0, 1
    )  # [pages, Hkv, 128]
    return by_page[:, heads][pages].unsqueeze(-1)


def _gather(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """``pool[pages]``, moved as raw bits: fp8 has no indexing on every device."""
    return _bytes(pool)[pages].view(pool.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """One-byte floats as uint8, anything else as it is."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
