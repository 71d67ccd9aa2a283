"""SparseImpl: one forward over a mixed batch, decode rows first, from the indexer's block ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, overload

import torch

from .. import dispatch, env
from ..attend import QUERY_DTYPES, prepare_attend
from ..cache import KVCache, Scale
from ..checks import fail, require_int, require_number, require_tensor, require_type
from ..config import MSAConfig
from ..kv_format import KVFormat
from ..plan import Plan
from .backends import DECODE_KERNELS, SPARSE_MSA, Backend
from .csr import Csr, Schedule, build_k2q_csr
from .metadata import SparseMetadata
from .pools import WrappedPools, identity

MAX_BLOCK_SCALE_SHIFT = 7


@dataclass(frozen=True, eq=False)
class LayerState:
    """What a layer lends to a forward: its pool, the shared block ids, its scales."""

    # [pages, Hkv, 128, 2 * D] (fp8 also as uint8), or NVFP4's [pages, 2 * Hkv, 128, 72] uint8
    kv_cache: torch.Tensor = field(repr=False)
    block_ids: torch.Tensor = field(repr=False)  # [T or more, Hkv, K] int32, decode rows first
    k_scale: Scale | None = None  # dequantisation factors; for NVFP4 the global scales
    v_scale: Scale | None = None
    q_scale: Scale | None = None  # of an E4M3 query


class SparseImpl:
    """Attention of all sparse layers of one model on one rank.

    Scales apply alike to decode and prefill rows, in every format. An E4M3 query is read as it is;
    it is dequantised only where the implementation that serves takes no such query.
    """

    def __init__(
        self,
        config: MSAConfig,
        kv_format: object,
        *,
        softmax_scale: float | None = None,
        backend: Backend = SPARSE_MSA,
        block_scale_shift: int = 0,
        impl: str = "auto",
    ) -> None:
        """
        Args:
            config: shapes of this rank.
            kv_format: of the caches.
            softmax_scale: default ``head_dim ** -0.5``.
            backend: decides what serves decode rows: one that names the Triton decode never takes
                the tensor-core kernel, whatever the builder planned.
            block_scale_shift: 0 to 7, as kernels take it that requantise NVFP4 to E4M3: there, a
                power of two that keeps ``code * block scale`` in range. Here these products are
                exact in 16 bits, so that every shift gives the same numbers.
            impl: for both kinds of rows, as in :func:`msattn.attend`.
        """
        require_type("config", config, MSAConfig)
        require_type("backend", backend, Backend)
        require_int("block_scale_shift", block_scale_shift, at_least=0)
        if block_scale_shift > MAX_BLOCK_SCALE_SHIFT:
            raise fail("block_scale_shift", f"at most {MAX_BLOCK_SCALE_SHIFT}", block_scale_shift)
        if softmax_scale is not None:
            softmax_scale = require_number("softmax_scale", softmax_scale, "a finite number")
        dispatch.resolve(impl)
        self.config = config
        self.kv_format = KVFormat.parse(kv_format)
        self.softmax_scale = softmax_scale
        self.backend = backend
        self.block_scale_shift = block_scale_shift
        self.impl = impl
        self._pools: WrappedPools[KVCache] = WrappedPools()

    @overload
    def forward(
        self, layer: LayerState, query: torch.Tensor, out: torch.Tensor,
        metadata: SparseMetadata | None, *, return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, layer: LayerState, query: torch.Tensor, out: torch.Tensor,
        metadata: SparseMetadata | None, *, return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
    def forward(
        self,
        layer: LayerState,
        query: torch.Tensor,
        out: torch.Tensor,
        metadata: SparseMetadata | None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend over the blocks that the indexer left in ``layer.block_ids``.

        Args:
            layer: the layer's pool, ids and scales.
            query: ``[T or more, Hq * D]`` or ``[T or more, Hq, D]`` bf16, fp16 or E4M3.
            out: as query, in the model's dtype; rows behind the step's are not written.
            metadata: the step; None, as in a run that only measures memory: ``out`` is returned
                untouched.
            return_lse: also return the LSE ``[T, Hq]`` fp32, natural logarithm, -inf for rows that
                see nothing: for decode context parallelism.

        Returns:
            ``out``, or ``(out, lse)``.
        """
        if metadata is not None:
            require_type("metadata", metadata, SparseMetadata)
        rows = 0 if metadata is None else metadata.num_tokens
        q, o = self._heads("query", query, rows), self._heads("out", out, rows)
        require_tensor("query", q, dtypes=QUERY_DTYPES)
        lse = None
        if return_lse:
            shape = (rows, self.config.num_q_heads)
            lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=out.device)
        if metadata is None:
            return out if lse is None else (out, lse)
        require_type("layer", layer, LayerState)
        cache = self._cache(layer, metadata)
        # All of it is prepared before any of it runs: an error leaves nothing half-written.
        launches = []
        for part, plan, impl in self._parts(metadata):
            part_lse = None if lse is None else lse[part]
            launches.append(
                self._prepare(layer, cache, q[part], plan, part, o[part], part_lse, impl)
            )
        for launch in launches:
            launch()
        return out if lse is None else (out, lse)

    def should_use_tensor_core_decode(self, metadata: SparseMetadata | None) -> bool:
        """Whether the step's decode rows take the tensor-core kernel that the builder planned."""
        decode = None if metadata is None else metadata.decode
        tensor_core = self.backend.decode == DECODE_KERNELS[0]
        return tensor_core and decode is not None and decode.use_tensor_core

    def decode_impl(self, metadata: SparseMetadata) -> str:
        """The implementation that is asked to serve the decode rows.

        The Triton decode stands for the kernels of a GPU: it is asked for neither on a CPU, nor
        where ``impl`` or ``MSATTN_IMPL`` names an implementation.
        """
        if self.impl != "auto" or env.IMPL != "auto" or not metadata.seq_lens.is_cuda:
            return self.impl
        return "auto" if self.should_use_tensor_core_decode(metadata) else "triton"

    def build_prefill_csr(
        self, block_ids: torch.Tensor, metadata: SparseMetadata
    ) -> tuple[Csr, Schedule]:
        """The prefill rows' selection as CSR, for kernels of the user's own that are KV-major.

        Args:
            block_ids: ``[T or more, Hkv, K]`` int32, K one of 4, 8, 16 and 32.
            metadata: a step with prefill rows.
        """
        prefill = metadata.prefill
        if prefill is None:
            raise fail("metadata", "a step with prefill rows", "decode rows alone")
        first = metadata.num_decode_tokens
        ids = require_block_ids(block_ids, metadata.num_tokens, self.config)[first:]
        ids = ids[: prefill.plan.num_tokens]
        return build_k2q_csr(
            ids.transpose(0, 1),
            prefill.cu_seqlens_q,
            prefill.cu_seqlens_k,
            total_k=0,
            max_seqlen_k=prefill.max_seq_len,
            max_seqlen_q=prefill.max_query_len,
            total_rows=prefill.total_kv_blocks,
            qhead_per_kv=self.config.group_size,
            return_schedule=True,
        )

    def _parts(self, metadata: SparseMetadata) -> list[tuple[slice, Plan, str]]:
        """The decode and the prefill rows of a step, where there are any; who plans and serves."""
        parts: list[tuple[slice, Plan, str]] = []
        if metadata.decode is not None:
            rows = slice(metadata.num_decode_tokens)
            parts.append((rows, metadata.decode.planned.use(), self.decode_impl(metadata)))
        if metadata.prefill is not None:
            rows = slice(metadata.num_decode_tokens, metadata.num_tokens)
            parts.append((rows, metadata.prefill.plan, self.impl))
        return parts

    def _prepare(
        self,
        layer: LayerState,
        cache: KVCache,
        q: torch.Tensor,
        plan: Plan,
        part: slice,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        impl: str,
    ) -> dispatch.Launch:
        ids = require_block_ids(layer.block_ids, part.stop, self.config)[part]
        q_scale = layer.q_scale if q.dtype == torch.float8_e4m3fn else None
        if q.dtype == torch.float8_e4m3fn and not _takes_fp8(q, cache, plan, impl):
            q, q_scale = dequantize_query(q, q_scale, out.dtype), None
        launch, _ = prepare_attend(
            q,
            cache,
            ids,
            plan,
            softmax_scale=self.softmax_scale,
            q_scale=q_scale,
            out=out,
            lse_out=lse,
            impl=impl,
        )
        return launch

    def _heads(self, name: str, x: torch.Tensor, rows: int) -> torch.Tensor:
        """The step's rows of ``x`` as ``[T, Hq, D]``, a view."""
        heads, dim = self.config.num_q_heads, self.config.head_dim
        require_tensor(name, x)
        if x.dim() == 2:
            require_tensor(name, x, shape={"T": None, "Hq*D": heads * dim})
            x = x.unflatten(1, (heads, dim))
        require_tensor(name, x, shape={"T": None, "Hq": heads, "D": dim})
        if x.shape[0] < rows:
            raise fail(name, f"at least {rows} rows, as the step has", x.shape[0])
        return x[:rows]

    def _cache(self, layer: LayerState, metadata: SparseMetadata) -> KVCache:
        """The layer's pool, wrapped; engines pass the same one in every step."""
        pool = require_tensor("kv_cache", layer.kv_cache, device=metadata.seq_lens.device)

        def wrap() -> KVCache:
            return KVCache.from_tensor(
                pool,
                self.config,
                self.kv_format,
                k_scale=layer.k_scale,
                v_scale=layer.v_scale,
                name="kv_cache",
            )

        key = tuple(map(identity, (pool, layer.k_scale, layer.v_scale)))
        return self._pools.get(key, metadata, wrap)


def require_block_ids(block_ids: torch.Tensor, rows: int, config: MSAConfig) -> torch.Tensor:
    """The shared buffer of block ids, once it has the step's rows and the model's heads."""
    shape = {"T": None, "Hkv": config.num_kv_heads, "K": config.topk}
    require_tensor("block_ids", block_ids, dtypes=[torch.int32], shape=shape)
    if block_ids.shape[0] < rows:
        raise fail("block_ids", f"at least {rows} rows, as the step has", block_ids.shape[0])
    return block_ids


def dequantize_query(
    query: torch.Tensor, q_scale: Scale | None, dtype: torch.dtype
) -> torch.Tensor:
    """An E4M3 query as numbers of ``dtype``; exact in 16 bits at unit scale."""
    numbers = query.to(dtype)
    if q_scale is None or (isinstance(q_scale, float) and q_scale == 1.0):
        return numbers
    return (numbers.float() * q_scale).to(dtype)


def _takes_fp8(q: torch.Tensor, cache: KVCache, plan: Plan, impl: str) -> bool:
    return not dispatch.why_not(
        "attend", impl=impl, plan=plan, kv_format=cache.format, query_dtype=q.dtype
    )
