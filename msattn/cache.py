"""KVCache and IndexCache: paged pools of K, V and index keys, allocated or wrapped as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .checks import (
    fail,
    one_of,
    require_device,
    require_int,
    require_number,
    require_tensor,
    require_type,
)
from .config import BLOCK_SIZE, MSAConfig
from .kv_format import KVFormat
from .recording import Memory, memory_of

Scale = float | torch.Tensor
Pool = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

COMPACT_DIMS = (32, 64, 128)
"""Index head dimensions that can have :class:`CompactKeys`."""


class Nvfp4Views(NamedTuple):
    """The four areas of an NVFP4 pool, as strided views of it.

    A page holds ``2 * Hkv`` slots of 9216 bytes (D = 128), slot ``2 * head + side``, side 0 = K, 1
    = V.
    A slot is one run: byte ``token * 64 + d // 2`` holds element d (even d in the low nibble), then
    from byte 8192 the E4M3 scales of groups of 16: K's at ``token * 8 + group``, V's in token quads
    at ``token // 4 * 32 + group * 4 + token % 4``. The layout is vLLM's.
    """

    k_codes: torch.Tensor  # [pages, Hkv, 128, D/2] uint8
    k_scales: torch.Tensor  # [pages, Hkv, 128, D/16] float8_e4m3fn
    v_codes: torch.Tensor  # [pages, Hkv, 128, D/2] uint8
    v_scales: (
        torch.Tensor
    )  # [pages, Hkv, 32, D/16, 4] float8_e4m3fn: quad, group, token of the quad


@dataclass(frozen=True, eq=False)
class KVCache:
    """Paged K and V of one layer: ``stored = x / scale`` on write, ``x = stored * scale`` on read.

    Slot ``page * 128 + offset`` holds one token. Build it with :meth:`allocate` or
    :meth:`from_tensor`; both check everything.
    """

    # Plain: [pages, Hkv, 128, 2*D] or a pair (K, V) of [pages, Hkv, 128, D];
    # NVFP4: [pages, 2*Hkv, 128, 72] uint8.
    tensor: Pool = field(repr=False)
    format: KVFormat  # how the numbers are stored
    # float, fp32 tensor of one element, or fp32 [Hkv, pages * 128]
    k_scale: Scale = field(repr=False)
    v_scale: Scale = field(repr=False)  # as k_scale
    num_kv_heads: int
    head_dim: int

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        config: MSAConfig,
        kv_format: object = "bf16",
        *,
        device: torch.device | str | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
    ) -> KVCache:
        """A zeroed pool of ``num_pages`` pages; ``kv_format`` is a name, a dtype or a KVFormat."""
        require_int("num_pages", num_pages, at_least=0)
        require_type("config", config, MSAConfig)
        require_device("device", device)
        fmt = KVFormat.parse(kv_format)
        shape = (num_pages, *fmt.page_shape(config))
        tensor = torch.zeros(shape, dtype=fmt.storage_dtype, device=device)
        return cls.from_tensor(tensor, config, fmt, k_scale=k_scale, v_scale=v_scale)

    @classmethod
    def from_tensor(
        cls,
        tensor: Pool,
        config: MSAConfig,
        kv_format: object,
        *,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        name: str = "tensor",
    ) -> KVCache:
        """Wrap an engine's own pool; nothing is copied, and writes go into ``tensor``.

        Args:
            tensor: plain formats: ``[pages, Hkv, 128, 2*D]``, K then V in the last axis, or a pair
                (K, V) of ``[pages, Hkv, 128, D]``. Any strides, the last one 1: token-major (NHD)
                pools come as ``pool.transpose(1, 2)``, interleaved layers as a slice. FP8 pools may
                be uint8.
                NVFP4: uint8 ``[pages, 2*Hkv, 128, 72]`` (D = 128) whose last two strides are 72, 1.
            kv_format: a name, a dtype or a KVFormat.
            k_scale, v_scale: dequantisation factors, default 1: a positive float, an fp32 tensor of
                one element (any shape and offset, read when a stage runs), or fp32 ``[Hkv, pages *
                128]``, one per head and slot (not for NVFP4, where it is the global scale).
            name: what errors call the pool.

        Raises:
            TypeError, ValueError, NotImplementedError: an argument that does not fit, by name.
        """
        require_type("config", config, MSAConfig)
        fmt = KVFormat.parse(kv_format)
        pool = _as_pool(name, tensor, config, fmt)
        first = pool[0] if isinstance(pool, tuple) else pool
        scales = {
            name: _as_scale(name, value, config, fmt, first.shape[0], first.device)
            for name, value in (("k_scale", k_scale), ("v_scale", v_scale))
        }
        return cls(pool, fmt, **scales, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)

    @property
    def num_pages(self) -> int:
        return self._first.shape[0]

    @property
    def device(self) -> torch.device:
        return self._first.device

    @cached_property
    def k(self) -> torch.Tensor:
        """K of a plain format: a view ``[pages, Hkv, 128, D]``."""
        return self._side(0)

    @cached_property
    def v(self) -> torch.Tensor:
        """V of a plain format: a view ``[pages, Hkv, 128, D]``."""
        return self._side(1)

    @cached_property
    def memory(self) -> Memory:
        """All that a stage looks at and a launch takes the address of."""
        sides = self.nvfp4_views() if self.format.scale_group else (self.k, self.v)
        scales = (self.k_scale, self.v_scale)
        numbers = (None if isinstance(x, torch.Tensor) else x for x in scales)
        tensors = (*sides, *(x for x in scales if isinstance(x, torch.Tensor)))
        return memory_of(tensors, self.format, self.num_kv_heads, self.head_dim, *numbers)

    def nvfp4_views(self) -> Nvfp4Views:
        """Codes and block scales of an NVFP4 pool."""
        return self._nvfp4_views

    @cached_property
    def _nvfp4_views(self) -> Nvfp4Views:
        assert self.format.scale_group and isinstance(self.tensor, torch.Tensor)
        pool, heads, dim = self.tensor, self.num_kv_heads, self.head_dim
        page, slot = pool.stride(0), pool.stride(1)
        groups, code_bytes = dim // 16, BLOCK_SIZE * dim // 2

        def area(
            side: int, at: int, shape: tuple[int, ...], strides: tuple[int, ...]
        ) -> torch.Tensor:
            return pool.as_strided(
                (pool.shape[0], heads, *shape),
                (page, 2 * slot, *strides),
                pool.storage_offset() + side * slot + at,
            )

        codes, code_strides = (BLOCK_SIZE, dim // 2), (dim // 2, 1)
        quads, quad_strides = (BLOCK_SIZE // 4, groups, 4), (groups * 4, 4, 1)
        e4m3 = torch.float8_e4m3fn
        return Nvfp4Views(
            k_codes=area(0, 0, codes, code_strides),
            k_scales=area(0, code_bytes, (BLOCK_SIZE, groups), (groups, 1)).view(e4m3),
            v_codes=area(1, 0, codes, code_strides),
            v_scales=area(1, code_bytes, quads, quad_strides).view(e4m3),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """All of K and V as numbers, scales applied: two tensors ``[pages, Hkv, 128, D]``."""
        from .reference.pages import read_k, read_v

        pages = torch.arange(self.num_pages, device=self.device)
        return read_k(self, pages).to(dtype), read_v(self, pages).to(dtype)

    @property
    def _first(self) -> torch.Tensor:
        return self.tensor[0] if isinstance(self.tensor, tuple) else self.tensor

    def _side(self, side: int) -> torch.Tensor:
        assert not self.format.scale_group
        if isinstance(self.tensor, tuple):
            return self.tensor[side]
        return self.tensor.narrow(3, side * self.head_dim, self.head_dim)


@dataclass(frozen=True, eq=False)
class CompactKeys:
    """An 8 bit copy of paged index keys, with what its products may be off by.

    Of the key k of each token it holds whole numbers c and two factors, such that for every q::

        | (R q) . (R k)  -  scale * (R q) . c |  <=  bound * |R q|

    | | is the Euclidean norm. R is Sylvester's Hadamard matrix, of 1 and -1, in some order of its
    rows: (R q) . (R k) = Di * (q . k), and channels that are wider than others are spread over all.

    So a block can be passed over, exactly, if no key of it reaches a score by more than its bound:
    half of the bytes of 16 bit keys are read, and few of the keys themselves. Only
    :func:`msattn.index_select` reads it; it gives the ids that it gives without.

    A page is one run of ``128 * Di`` bytes of c and 128 pairs of fp16 (scale, bound): it moves with
    the page of keys. What a key's copy is depends on the key alone.
    """

    tensor: torch.Tensor = field(repr=False)  # [pages, 128 * Di + 512] uint8
    head_dim: int

    @staticmethod
    def page_bytes(head_dim: int) -> int:
        """Bytes of a page."""
        return BLOCK_SIZE * (head_dim + 4)

    @staticmethod
    def rounding(head_dim: int) -> float:
        """Part of a rotated key's norm that a bound has besides the norm of its error.

        A query is rounded to whole numbers, too, to 1 / 64,516 of its largest element, and the
        product that it is compared with may be summed in fp32 in any order, cut off rather than
        rounded.
        """
        return math.sqrt(head_dim) / 32000 + 2**-14

    @cached_property
    def codes(self) -> torch.Tensor:
        """c: a view ``[pages, 128, Di]`` int8."""
        codes = self.tensor[:, : BLOCK_SIZE * self.head_dim].view(torch.int8)
        pages: torch.Tensor = codes.unflatten(1, (BLOCK_SIZE, self.head_dim))
        return pages

    @cached_property
    def factors(self) -> torch.Tensor:
        """Scale and bound: a view ``[pages, 128, 2]`` fp16."""
        pairs: torch.Tensor = self.words.view(torch.float16).unflatten(1, (BLOCK_SIZE, 2))
        return pairs

    @cached_property
    def words(self) -> torch.Tensor:
        """Scale and bound of a key as the lower and upper half of a word: a view, int32."""
        return self.tensor[:, BLOCK_SIZE * self.head_dim :].view(torch.int32)


@dataclass(frozen=True, eq=False)
class IndexCache:
    """Paged index keys of one layer, one vector per token; always at unit scale."""

    tensor: torch.Tensor = field(repr=False)  # [pages, 128, Di]
    format: KVFormat  # bf16, fp16, fp8_e4m3 or fp32
    compact: CompactKeys | None = None  # store_index_k keeps it up to date

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        config: MSAConfig,
        dtype: object = torch.bfloat16,
        *,
        compact: bool = False,
        device: torch.device | str | None = None,
    ) -> IndexCache:
        """A zeroed pool of ``num_pages`` pages; ``dtype`` is a torch dtype or a format name.

        ``compact``: with :class:`CompactKeys`, for bf16 and fp16 keys.
        """
        require_int("num_pages", num_pages, at_least=0)
        require_type("config", config, MSAConfig)
        require_device("device", device)
        fmt = KVFormat.parse(dtype, name="dtype", for_index=True)
        shape = (num_pages, BLOCK_SIZE, config.index_head_dim)
        tensor = torch.zeros(shape, dtype=fmt.storage_dtype, device=device)
        if not compact:
            return cls(tensor, fmt)
        page = CompactKeys.page_bytes(config.index_head_dim)
        copy = torch.zeros((num_pages, page), dtype=torch.uint8, device=device)
        return cls(tensor, fmt, _as_compact("compact", copy, tensor, fmt))

    @classmethod
    def from_tensor(
        cls,
        tensor: torch.Tensor,
        config: MSAConfig,
        dtype: object | None = None,
        *,
        compact: torch.Tensor | None = None,
        name: str = "tensor",
    ) -> IndexCache:
        """Wrap an engine's own pool ``[pages, 128, Di]`` or ``[pages, 1, 128, Di]`` without a copy.

        Args:
            tensor: the pool.
            config: the model's shapes.
            dtype: defaults to the tensor's; give it for an FP8 pool that is held as uint8.
            compact: uint8 ``[pages, CompactKeys.page_bytes(Di)]`` for :class:`CompactKeys` of bf16
                and fp16 keys. Keys that are there already have no copy in it before
                :func:`msattn.refresh_compact_keys`.
            name: what errors call the pool.
        """
        require_type("config", config, MSAConfig)
        pool = require_tensor(name, tensor)
        dtype = pool.dtype if dtype is None else dtype
        fmt = KVFormat.parse(dtype, name="dtype", for_index=True)
        pool = pool.squeeze(1) if pool.dim() == 4 and pool.shape[1] == 1 else pool
        shape = {"pages": None, "tokens": BLOCK_SIZE, "Di": config.index_head_dim}
        pool = _as_elements(name, pool, fmt, shape)
        if compact is None:
            return cls(pool, fmt)
        return cls(pool, fmt, _as_compact("compact", compact, pool, fmt))

    @cached_property
    def memory(self) -> Memory:
        """As a KVCache's."""
        compact = () if self.compact is None else (self.compact.codes, self.compact.words)
        return memory_of((self.tensor, *compact), self.format)

    @property
    def num_pages(self) -> int:
        return self.tensor.shape[0]

    @property
    def head_dim(self) -> int:
        return self.tensor.shape[2]

    @property
    def device(self) -> torch.device:
        return self.tensor.device


def _as_compact(name: str, value: object, keys: torch.Tensor, fmt: KVFormat) -> CompactKeys:
    if fmt.storage_dtype not in (torch.bfloat16, torch.float16):
        expected = "index keys of bf16 or fp16, which it halves"
        raise fail(name, expected, f"{fmt} keys", NotImplementedError)
    pages, _, dim = keys.shape
    if dim not in COMPACT_DIMS:
        expected = f"index_head_dim={one_of(COMPACT_DIMS)}"
        raise fail(name, expected, dim, NotImplementedError)
    shape = {"pages": pages, "bytes": CompactKeys.page_bytes(dim)}
    tensor = require_tensor(name, value, dtypes=[torch.uint8], shape=shape, device=keys.device)
    if tensor.numel() and (tensor.stride(1) != 1 or tensor.stride(0) % 4):
        raise fail(name, "strides [a multiple of 4, 1]", f"strides {list(tensor.stride())}")
    if tensor.storage_offset() % 4:
        raise fail(name, "a storage offset of a multiple of 4 bytes", tensor.storage_offset())
    return CompactKeys(tensor, dim)


def _as_pool(name: str, tensor: Any, config: MSAConfig, fmt: KVFormat) -> Pool:
    """``tensor`` with its layout checked and raw FP8 bytes viewed as numbers."""
    heads, tokens, content = fmt.page_shape(config)
    if isinstance(tensor, (tuple, list)):
        if fmt.scale_group or len(tensor) != 2:
            raise fail(
                name,
                f"one tensor in format {fmt}" if fmt.scale_group else "a pair (K, V)",
                f"{len(tensor)} tensors",
            )
        half = {"pages": None, "Hkv": heads, "tokens": tokens, "D": config.head_dim}
        k = _as_elements(f"{name}[0]", tensor[0], fmt, half)
        v = _as_elements(f"{name}[1]", tensor[1], fmt, {**half, "pages": k.shape[0]})
        if v.device != k.device:
            raise fail(f"{name}[1]", f"device {k.device}", v.device)
        return k, v
    if not fmt.scale_group:
        shape = {"pages": None, "Hkv": heads, "tokens": tokens, "2*D": content}
        return _as_elements(name, tensor, fmt, shape)
    shape = {"pages": None, "2*Hkv": heads, "tokens": tokens, "bytes": content}
    pool = _as_elements(name, tensor, fmt, shape)
    _check_slots(name, pool)
    return pool


def _check_slots(name: str, pool: torch.Tensor) -> None:
    """The slots of NVFP4 pages are runs of bytes that do not overlap, in a page nor in two.

    But all pages may be one, expanded: it can be read.
    """
    pages, heads, tokens, content = pool.shape
    page, slot, token, _ = pool.stride()
    run = tokens * content
    if pool.numel() and (token != content or slot < run):
        expected = f"each slot one run of {run} bytes (strides [.., .., {content}, 1])"
        raise fail(name, expected, f"strides {list(pool.stride())}")
    if pool.numel() and pages > 1 and 0 < page < heads * run:
        expected = f"pages of at least {heads * run} bytes that do not overlap"
        raise fail(name, expected, f"strides {list(pool.stride())}")


def _as_elements(
    name: str, value: object, fmt: KVFormat, shape: dict[str, int | None]
) -> torch.Tensor:
    dtypes = [fmt.storage_dtype, torch.uint8] if fmt.is_fp8 else [fmt.storage_dtype]
    tensor = require_tensor(name, value, dtypes=dtypes, shape=shape)
    if tensor.numel() and tensor.stride(-1) != 1:
        raise fail(name, "a last stride of 1", f"strides {list(tensor.stride())}")
    return tensor.view(fmt.storage_dtype)


def _as_scale(
    name: str,
    scale: Scale | None,
    config: MSAConfig,
    fmt: KVFormat,
    num_pages: int,
    device: torch.device,
) -> Scale:
    """A float, a 0-d view of a one-element tensor, or the per-slot tensor."""
    if scale is None:
        return 1.0
    if not isinstance(scale, torch.Tensor):
        return require_number(name, scale, "a finite number > 0 or a tensor", positive=True)
    require_tensor(name, scale, dtypes=[torch.float32], device=device)
    if scale.numel() == 1:
        return scale.reshape(())
    if not fmt.slot_scales:
        raise fail(name, f"one element in format {fmt}", list(scale.shape), NotImplementedError)
    require_tensor(name, scale, shape={"Hkv": config.num_kv_heads, "slots": num_pages * BLOCK_SIZE})
    return scale
