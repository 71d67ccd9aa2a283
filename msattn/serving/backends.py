"""Backends: what each one can keep and compute, and which of them serves a model on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .. import dispatch, env
from ..checks import fail, one_of, require_int, require_type
from ..config import BLOCK_SIZE, MSAConfig
from ..kv_format import KVFormat

DECODE_KERNELS = ("tensor_core", "triton")
"""How decode rows are served: by the best implementation that can, or by the Triton kernels.

The names tell kernels of a GPU apart; on a CPU, both mean what serves there.
"""

KERNELS = ("hopper", "triton")
"""Implementations for a GPU: the reference reads lengths on the host, which graphs cannot hold."""

HND, NHD = "HND", "NHD"
"""Order of a page's axes: heads, then tokens; or tokens, then heads."""

HEAD_DIM = 128

STAGES = ("store_kv", "store_index_k", "index_select", "attend")
"""What a layer runs, in this order."""


@dataclass(frozen=True)
class Backend:
    """One backend of the sparse layers."""

    name: str
    kv_dtypes: tuple[str, ...]  # engines' names of the cache's dtype, and the library's
    layouts: tuple[str, ...]
    decode: str = DECODE_KERNELS[0]
    model_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    head_dims: tuple[int, ...] = (HEAD_DIM,)
    block_sizes: tuple[int, ...] = (BLOCK_SIZE,)

    def page_slots(self, config: MSAConfig, kv_format: KVFormat) -> tuple[int, int]:
        """Slots of a page, and bytes of a slot for each token: what an engine budgets with.

        A plain page has one slot for each KV head, with K and V; an NVFP4 page has two, one for
        each side, of 72 bytes for each token: 64 of codes and 8 of block scales.
        """
        slots, _, content = kv_format.page_shape(config)
        return slots, content * kv_format.storage_dtype.itemsize


PLAIN_DTYPES = ("auto", "bfloat16", "float16", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2")
NVFP4_DTYPES = ("nvfp4",)

SPARSE_MSA = Backend("MINIMAX_M3_SPARSE", PLAIN_DTYPES, (HND, NHD))
SPARSE_MSA_NVFP4 = Backend("MINIMAX_M3_SPARSE_NVFP4", NVFP4_DTYPES, (HND,))
TENSOR_CORE_MSA = Backend("CUTLASS_MSA", PLAIN_DTYPES + NVFP4_DTYPES, (HND, NHD))
TRITON_MSA = replace(TENSOR_CORE_MSA, name="TRITON_MSA", decode=DECODE_KERNELS[1])

BACKENDS = (SPARSE_MSA, SPARSE_MSA_NVFP4, TENSOR_CORE_MSA, TRITON_MSA)
"""The last two are aliases that name a decode kernel; the names are vLLM's."""


@dataclass(frozen=True)
class Request:
    """What an engine asks for: a model's shapes on one rank, a cache, a device."""

    config: MSAConfig
    kv_dtype: str  # the engine's name of the cache's dtype, "auto" for the model's own
    device: torch.device
    capability: tuple[int, int] | None = None  # ask about this GPU instead of the device's own
    model_dtype: torch.dtype = torch.bfloat16
    layout: str = HND
    index_dtype: str = "bf16"

    def __post_init__(self) -> None:
        require_type("config", self.config, MSAConfig)
        for name in ("kv_dtype", "index_dtype"):
            if not isinstance(getattr(self, name), str):
                raise fail(name, "a str", type(getattr(self, name)).__name__, TypeError)
        require_type("device", self.device, torch.device)
        require_type("model_dtype", self.model_dtype, torch.dtype)
        if self.capability is not None:
            self._check_capability()
        if self.layout not in (HND, NHD):
            raise fail("layout", one_of((HND, NHD)), repr(self.layout))

    def _check_capability(self) -> None:
        expected = "a pair of ints, as (9, 0)"
        if not isinstance(self.capability, tuple) or len(self.capability) != 2:
            raise fail("capability", expected, repr(self.capability), TypeError)
        for number in self.capability:
            require_int("capability", number, at_least=0)


class Selection(NamedTuple):
    """The backend that serves, and the implementation of each stage of a layer."""

    backend: Backend
    kv_format: KVFormat
    index_format: KVFormat
    implementations: dict[str, str]  # stage -> "hopper", "triton" or "reference"


def is_nvfp4(kv_dtype: str) -> bool:
    """Whether an engine's name of a cache dtype means NVFP4 pages: ``nvfp4`` and its variants."""
    return kv_dtype.startswith("nvfp4") and kv_dtype != "nvfp4_ds_mla"


def parse_kv_dtype(kv_dtype: str, model_dtype: torch.dtype = torch.bfloat16) -> KVFormat:
    """The format that an engine means by ``kv_dtype``; ``"auto"`` is the model's own dtype.

    Raises:
        ValueError: another name. NVFP4 has one layout here, so its variants are refused.
    """
    if kv_dtype not in PLAIN_DTYPES + NVFP4_DTYPES:
        raise fail("kv_dtype", one_of(PLAIN_DTYPES + NVFP4_DTYPES), repr(kv_dtype))
    return KVFormat.parse(model_dtype if kv_dtype == "auto" else kv_dtype, name="kv_dtype")


def parse_index_dtype(index_dtype: str) -> KVFormat:
    """The format of an index cache: ``bf16``, ``fp16``, ``fp8`` or ``fp8_e4m3``.

    Raises:
        NotImplementedError: another name, among them ``mxfp4`` and ``nvfp4``.
    """
    if index_dtype not in ("bf16", "bfloat16", "fp16", "float16", "fp8", "fp8_e4m3"):
        expected = "bf16, fp16, fp8 or fp8_e4m3"
        raise fail("index_dtype", expected, repr(index_dtype), NotImplementedError)
    return KVFormat.parse(index_dtype, name="index_dtype", for_index=True)


def why_not(backend: Backend, request: Request) -> list[str]:
    """Why ``backend`` cannot serve ``request``: a list of reasons, empty when it can."""
    reasons = _shape_reasons(backend, request)
    if reasons:
        return reasons
    for stage in STAGES:
        against = _reasons(stage, request, backend)
        if all(against.values()):
            reasons += [f"{stage} by {name}: {r}" for name in against for r in against[name]]
    return reasons


def select_backend(request: Request, *, decode: str = DECODE_KERNELS[0]) -> Selection:
    """The backend for ``request``, and what would run each stage.

    Args:
        request: what is asked.
        decode: ``"tensor_core"`` or ``"triton"``.

    Raises:
        NotImplementedError: no backend can serve; with the reasons of each.
    """
    if decode not in DECODE_KERNELS:
        raise fail("decode", one_of(DECODE_KERNELS), repr(decode))
    kv_format = parse_kv_dtype(request.kv_dtype, request.model_dtype)
    index_format = parse_index_dtype(request.index_dtype)
    backend = next(b for b in BACKENDS if b.decode == decode and request.kv_dtype in b.kv_dtypes)
    reasons = why_not(backend, request)
    if reasons:
        expected = f"a request that {backend.name} can serve"
        raise fail("request", expected, "; ".join(reasons), NotImplementedError)
    implementations = {
        stage: next(
            name for name, against in _reasons(stage, request, backend).items() if not against
        )
        for stage in STAGES
    }
    return Selection(backend, kv_format, index_format, implementations)


def _shape_reasons(backend: Backend, request: Request) -> list[str]:
    """Reasons that no kernel has to be asked for."""
    has = {
        "kv_dtype": (request.kv_dtype, backend.kv_dtypes),
        # Of an NVFP4 page, each head's slot is one run of bytes.
        "layout": (request.layout, (HND,) if is_nvfp4(request.kv_dtype) else backend.layouts),
        "model_dtype": (request.model_dtype, backend.model_dtypes),
        "head_dim": (request.config.head_dim, backend.head_dims),
        "index_head_dim": (request.config.index_head_dim, backend.head_dims),
    }
    return [
        f"{name}={value}; {backend.name} has {one_of(supported)}"
        for name, (value, supported) in has.items()
        if value not in supported
    ]


def _reasons(stage: str, request: Request, backend: Backend) -> dict[str, list[str]]:
    """For each implementation that the backend may use for a stage, why it cannot serve."""
    names: tuple[str, ...] = dispatch.IMPLEMENTATION_NAMES
    if request.device.type == "cuda" and env.IMPL != "reference":
        names = KERNELS
    if backend.decode == "triton" and stage == "attend":
        names = tuple(name for name in names if name != "hopper")
    index = stage in ("store_index_k", "index_select")
    problem = dispatch.Problem(
        stage,
        request.device,
        request.config,
        parse_index_dtype(request.index_dtype)
        if index
        else parse_kv_dtype(request.kv_dtype, request.model_dtype),
        request.model_dtype,
        capability=request.capability,
    )
    return {name: dispatch.reasons_against(name, problem) for name in names}
