"""Stage 1: write a step's new keys, values and index keys into their pages, quantised."""

from __future__ import annotations

import torch

from .cache import IndexCache, KVCache
from .calls import Call, Calls
from .checks import fail, require_distinct, require_tensor, require_type
from .config import BLOCK_SIZE
from .dispatch import Launch, Problem, nothing

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a model computes keys, values and queries in."""

_CALLS: Calls = {}
"""Earlier ones of these stages, with their launches; all tensors are the calls' own."""


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    slot_mapping: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Write keys and values into their slots: ``stored = x / scale``, rounded to nearest even.

    Args:
        k, v: ``[T, Hkv, D]`` bf16, fp16 or fp32, any strides.
        cache: the layer's pool. Numbers beyond its format's range saturate, infinities too; NaN
            stays NaN.
        slot_mapping: ``[T]`` int64 or int32, ``page * 128 + offset``; negative = skip this token.
            Slots of one call are distinct; a later call overwrites.
        impl: ``"auto"``, ``"reference"``, ``"triton"`` or ``"hopper"``.

    Raises:
        ValueError: a slot beyond the pool, where slot_mapping is on the CPU; elsewhere it is
            skipped.
    """
    prepare_store_kv(k, v, cache, slot_mapping, impl=impl)()


def prepare_store_kv(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor, *, impl: str
) -> Launch:
    """:func:`store_kv`, all but the writing."""
    require_type("cache", cache, KVCache)
    call = Call("store_kv", impl, _CALLS, cache.memory, k, v, slot_mapping)
    if call.is_known:
        return call.again()
    shape = {"T": None, "Hkv": cache.num_kv_heads, "D": cache.head_dim}
    require_tensor("k", k, dtypes=MODEL_DTYPES, shape=shape, device=cache.device)
    shape["T"] = k.shape[0]
    require_tensor("v", v, dtypes=MODEL_DTYPES, shape=shape, device=cache.device)
    _require_slots("slot_mapping", slot_mapping, k.shape[0], cache.num_pages, cache.device)
    for side in cache.tensor if isinstance(cache.tensor, tuple) else (cache.tensor,):
        require_distinct("cache", side)
    problem = Problem("store_kv", k.device, None, cache.format, k.dtype)
    if k.shape[0] == 0:
        return nothing(impl, problem)
    return call.first(problem, (k, v, cache, slot_mapping))


def store_index_k(
    index_k: torch.Tensor, index: IndexCache, slot_mapping: torch.Tensor, *, impl: str = "auto"
) -> None:
    """Write index keys into their slots, at unit scale.

    Args:
        index_k: ``[T, Di]`` or ``[T, 1, Di]`` bf16, fp16 or fp32, any strides.
        index: the layer's pool of index keys; its compact copy, if it has one, is written besides.
        slot_mapping: ``[T]`` as for :func:`store_kv`; the index cache may have slots of its own.
        impl: as for :func:`store_kv`.
    """
    prepare_store_index_k(index_k, index, slot_mapping, impl=impl)()


def prepare_store_index_k(
    index_k: torch.Tensor,
    index: IndexCache,
    slot_mapping: torch.Tensor,
    *,
    impl: str,
    slots_name: str = "slot_mapping",
) -> Launch:
    """:func:`store_index_k`, all but the writing; errors call the slots ``slots_name``."""
    require_type("index", index, IndexCache)
    call = Call("store_index_k", impl, _CALLS, index.memory, index_k, slot_mapping)
    if call.is_known:
        return call.again()
    require_tensor("index_k", index_k, dtypes=MODEL_DTYPES, device=index.device)
    if index_k.dim() == 3 and index_k.shape[1] == 1:
        index_k = index_k.squeeze(1)
    require_tensor("index_k", index_k, shape={"T": None, "Di": index.head_dim})
    _require_slots(slots_name, slot_mapping, index_k.shape[0], index.num_pages, index.device)
    require_distinct("index", index.tensor)
    if index.compact is not None:
        require_distinct("index", index.compact.tensor)
    problem = Problem("store_index_k", index_k.device, None, index.format, index_k.dtype)
    if index_k.shape[0] == 0:
        return nothing(impl, problem)
    return call.first(problem, (index_k, index, slot_mapping))


def refresh_compact_keys(
    index: IndexCache, pages: torch.Tensor | None = None, *, impl: str = "auto"
) -> None:
    """Make the compact copy of pages anew, from the index keys that they hold.

    For keys that did not come by :func:`store_index_k`: of a pool that was filled before it was
    wrapped, or that an engine has copied from page to page without their compact copy.

    Args:
        index: a pool with :class:`msattn.CompactKeys`.
        pages: ``[n]`` int32 or int64, default all; numbers of no page are skipped.
        impl: as for :func:`store_kv`.
    """
    require_type("index", index, IndexCache)
    if index.compact is None:
        raise fail("index", "an IndexCache with compact keys", "one without")
    if pages is None:
        pages = torch.arange(index.num_pages, device=index.device)
    _prepare_refresh(index, pages, impl)()


def _prepare_refresh(index: IndexCache, pages: torch.Tensor, impl: str) -> Launch:
    call = Call("refresh_compact_keys", impl, _CALLS, index.memory, pages)
    if call.is_known:
        return call.again()
    assert index.compact is not None
    require_distinct("index", index.compact.tensor)
    dtypes = [torch.int64, torch.int32]
    require_tensor("pages", pages, dtypes=dtypes, shape={"n": None}, device=index.device)
    problem = Problem("refresh_compact_keys", index.device, None, index.format)
    if pages.shape[0] == 0:
        return nothing(impl, problem)
    return call.first(problem, (index, pages))


def _require_slots(
    name: str, slot_mapping: object, num_tokens: int, num_pages: int, device: torch.device
) -> None:
    slots = require_tensor(
        name,
        slot_mapping,
        dtypes=[torch.int64, torch.int32],
        shape={"T": num_tokens},
        device=device,
    )
    limit = num_pages * BLOCK_SIZE
    if device.type == "cpu" and num_tokens and int(slots.max()) >= limit:
        raise fail(name, f"slots below {limit} ({num_pages} pages)", int(slots.max()))
