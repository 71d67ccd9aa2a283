"""KVFormat: how a KV cache stores its numbers. A format is data, and this is where it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import fail, one_of
from .config import BLOCK_SIZE, MSAConfig


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One storage format of K and V (and, where ``in_index`` says so, of index keys).

    A page holds one block of 128 tokens. Two page layouts exist:

    - plain (``scale_group == 0``): ``[Hkv, 128, 2 * D]`` elements, K in the first half of the last
      axis and V in the second;
    - block-scaled (NVFP4): ``[2 * Hkv, 128, D/2 + D/16]`` bytes, one slot for K and one for V of
      each
      head. A slot is one run of bytes: the packed E2M1 codes of all 128 tokens, then their E4M3
      block scales (see :class:`msattn.cache.Nvfp4Views`).

    A stored number is read as ``stored * scale``; the scales belong to the cache, not to the
    format.
    """

    name: str
    storage_dtype: torch.dtype  # element type of the pool
    aliases: tuple[str, ...]  # other spellings, lower case
    max_value: float  # writes saturate at this magnitude
    scale_group: int = 0  # elements of a token that share one E4M3 block scale; 0 = no block scales
    slot_scales: bool = True  # takes k_scale, v_scale of one number per (KV head, slot)
    in_index: bool = False  # index keys can be stored in it

    def __str__(self) -> str:
        return self.name

    @property
    def is_fp8(self) -> bool:
        """One-byte floating-point elements without block scales."""
        return self.storage_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)

    def page_shape(self, config: MSAConfig) -> tuple[int, int, int]:
        """Shape of a page: ``(heads or slots, 128, content)``, in elements of ``storage_dtype``."""
        if self.scale_group:
            content = config.head_dim // 2 + config.head_dim // self.scale_group
            return (2 * config.num_kv_heads, BLOCK_SIZE, content)
        return (config.num_kv_heads, BLOCK_SIZE, 2 * config.head_dim)

    def bytes_per_page(self, config: MSAConfig) -> int:
        """Bytes of one page of one layer."""
        heads, tokens, content = self.page_shape(config)
        return heads * tokens * content * self.storage_dtype.itemsize

    def bytes_per_token(self, config: MSAConfig) -> int:
        """Bytes that one token takes in one layer."""
        return self.bytes_per_page(config) // BLOCK_SIZE

    @classmethod
    def parse(cls, value: object, *, name: str = "kv_format", for_index: bool = False) -> KVFormat:
        """The format called ``value``: a KVFormat, one of its names, or a torch dtype.

        Args:
            value: what the user gave for the argument ``name``.
            for_index: only a format that an index cache may have.

        Raises:
            TypeError: another type. ValueError: an unknown name.
            NotImplementedError: a dtype or a format that is not supported there; for an index
                cache, an unknown name too: engines name formats that no index cache here has.
        """
        supported = one_of(
            [fmt.name for fmt in KV_FORMATS.values() if fmt.in_index or not for_index]
        )
        fmt: KVFormat | None
        if isinstance(value, KVFormat):
            fmt = value
        elif isinstance(value, str):
            fmt = _BY_NAME.get(value.lower().removeprefix("torch."))
            if fmt is None:
                error = NotImplementedError if for_index else ValueError
                raise fail(name, supported, repr(value), error)
        elif isinstance(value, torch.dtype):
            fmt = _BY_NAME.get(str(value).removeprefix("torch."))
        else:
            raise fail(name, "a str, torch.dtype or KVFormat", type(value).__name__, TypeError)
        if fmt is None or (for_index and not fmt.in_index):
            raise fail(name, supported, value, NotImplementedError)
        return fmt


KV_FORMATS: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        KVFormat("bf16", torch.bfloat16, ("bfloat16",), 3.3895313892515355e38, in_index=True),
        KVFormat("fp16", torch.float16, ("float16", "half"), 65504.0, in_index=True),
        KVFormat(
            "fp8_e4m3",
            torch.float8_e4m3fn,
            ("fp8", "e4m3", "float8_e4m3fn", "float8_e4m3"),
            448.0,
            in_index=True,
        ),
        KVFormat("fp8_e5m2", torch.float8_e5m2, ("e5m2", "float8_e5m2"), 57344.0),
        # 6 * 448: the largest E2M1 code times the largest E4M3 block scale.
        KVFormat("nvfp4", torch.uint8, ("fp4",), 2688.0, 16, slot_scales=False),
        # For exactness on a CPU: tests, fp32 models, debugging. No GPU kernel reads it.
        KVFormat("fp32", torch.float32, ("float32", "float"), 3.4028234663852886e38, in_index=True),
    )
}
"""Every format by name."""

_BY_NAME = {key: fmt for fmt in KV_FORMATS.values() for key in (fmt.name, *fmt.aliases)}
