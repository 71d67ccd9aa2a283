"""A call of SGLang in msattn's words, or the reasons why msattn does not serve it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal

import torch

from ... import env
from ...arch import capability, device_name
from ...cache import IndexCache, KVCache
from ...checks import fail
from ...config import BLOCK_SIZE, MSAConfig
from ...dispatch import IMPLEMENTATION_NAMES, Problem, reasons_against
from ..engines import OWN_MSA, OWN_MSA_MAJOR
from .step import Step

Kind = Literal["prefill", "decode"]
Arguments = Mapping[str, Any]
"""A call's arguments by SGLang's names, defaults included."""

READ = {
    kind: (
        *("q", "k_cache", "v_cache", "idx_q", "idx_k_cache"),
        *("req_to_token", "slot_ids", "seq_lens", *own),
        *("topk", "init_blocks", "local_blocks", "disable_index_value", "page_size"),
    )
    for kind, own in {
        "prefill": ("cu_seqlens", "prefix_lens", "max_seqlen_q", "max_seqlen_k"),
        "decode": ("max_seqlen",),
    }.items()
}
"""Arguments that msattn cannot do without."""

SERVED: dict[str, tuple[object, str]] = {
    "sink": (None, "there are no attention sinks here"),
    "idx_sink": (None, "there are no attention sinks here"),
    "idx_v_cache": (None, "the indexer has no output here"),
    "disable_index_value": (True, "the indexer has no output here"),
    "score_type": ("max", "a block's score is the maximum over its keys"),
    "block_size_q": (1, "each query token has a selection of its own"),
    "block_size_k": (BLOCK_SIZE, f"a block is {BLOCK_SIZE} tokens"),
    "use_msa": (False, OWN_MSA.format("SGLang")),
    "dense_main_attn_fn": (None, "a dense backend attends"),
    "cached_topk_idx": (None, "layers do not share selections here"),
    "return_topk_idx": (False, "layers do not share selections here"),
    "topk_out": (None, "layers do not share selections here"),
    "indexer_cp": (None, "ranks do not share an indexer here"),
    "loc_mapping": (None, "HiSparse moves what req_to_token names"),
    "hisparse_swap_in_fn": (None, "HiSparse moves what req_to_token names"),
}
"""Arguments with the one value that msattn serves, and why it does not serve others."""

NUMBERS = ("sm_scale", "q_scale")
FACTORS = ("k_scale", "v_scale", "idx_sm_scale", "idx_q_scale", "idx_k_scale")
"""None or numbers, those above 0. What is positive and multiplies all scores selects nothing."""

IGNORED = frozenset(
    {
        # How SGLang's kernels cut the work, and what their own plans hold.
        *("cu_seqblocks_q", "max_seqblock_q", "all_seqblock_q", "seqlens_cpu", "seq_lens_cpu"),
        *("msa_kv_indices", "msa_plan", "packed_queries", "idx_v_scale"),
    }
)


@dataclass(frozen=True, eq=False)
class Call:
    """What either function computes; the tensors and the pools are SGLang's own."""

    config: MSAConfig
    q: torch.Tensor = field(repr=False)  # [T, Hq, D]
    index_q: torch.Tensor = field(repr=False)  # [T, Hi, Di]
    cache: KVCache
    index: IndexCache
    step: Step = field(repr=False)
    softmax_scale: float  # of the logits of q as it is, q_scale included
    implementation: str

    def __str__(self) -> str:
        config = self.config
        return (
            f"{self.implementation} on {device_name(self.q.device)}, KV cache {self.cache.format}, "
            f"index keys {self.index.format}, {config.num_q_heads} query heads over "
            f"{config.num_kv_heads}, the best {config.topk} blocks"
        )


def bind(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Arguments:
    """The arguments of a call by name, less those that msattn does not know and nobody gave."""
    signature = _signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return {
        name: value
        for name, value in bound.arguments.items()
        if name in _KNOWN or not _is_default(signature.parameters[name], value)
    }


def why_not(kind: Kind, arguments: Arguments) -> list[str]:
    """Why msattn does not serve a call: one sentence for each reason, none where it does."""
    return read(kind, arguments)[1]


def read(kind: Kind, arguments: Arguments) -> tuple[Call | None, list[str]]:
    """The call in msattn's words, or else the reasons against it."""
    reasons = _arguments_reasons(kind, arguments)
    if reasons:
        return None, reasons
    try:
        config = _config(arguments)
        cache, index = _caches(arguments, config)
    except (TypeError, ValueError, NotImplementedError) as refusal:
        return None, [str(refusal)]
    step = _step(kind, arguments)
    blocks = -(-step.max_seq_len // BLOCK_SIZE)
    q, index_q = arguments["q"], arguments["idx_q"]
    problems = (
        Problem("index_select", q.device, config, index.format, index_q.dtype, blocks),
        Problem("attend", q.device, config, cache.format, q.dtype, blocks),
    )
    names, reasons = _implementations(problems, env.IMPL)
    if reasons:
        return None, reasons
    call = Call(
        config, q, index_q, cache, index, step, _softmax_scale(arguments), " and ".join(names)
    )
    return call, []


def _arguments_reasons(kind: Kind, arguments: Arguments) -> list[str]:
    """What can be said without a look into a tensor, but for where it is."""
    missing = [name for name in READ[kind] if name not in arguments]
    if missing:
        return [f"SGLang's function has no argument {name}" for name in missing]
    reasons = [
        f"{name}: this version of msattn does not know the argument"
        for name in arguments
        if name not in _KNOWN
    ]
    reasons += [
        f"{name}: {reason}"
        for name, (served, reason) in SERVED.items()
        if name in arguments and not _equal(arguments[name], served)
    ]
    reasons += _number_reasons(arguments)
    page_size = arguments["page_size"]
    if page_size < 1 or page_size % BLOCK_SIZE:
        reasons.append(f"page_size: expected a multiple of {BLOCK_SIZE}, got {page_size}")
    device = arguments["q"].device
    if device.type == "cuda" and torch.version.hip is not None:
        reasons.append("SGLang has kernels of its own for AMD's GPUs")
    elif (capability(device) or (0, 0))[0] == OWN_MSA_MAJOR:
        reasons.append(OWN_MSA.format("SGLang"))
    elif device.type == "cpu" and env.IMPL == "auto":
        reasons.append("on a CPU msattn serves what MSATTN_IMPL names, and it names nothing")
    return reasons


def _number_reasons(arguments: Arguments) -> list[str]:
    reasons = []
    for names, above in ((NUMBERS, -math.inf), (FACTORS, 0.0)):
        for name in names:
            value = arguments.get(name)
            if value is not None and not (_is_number(value) and value > above):
                # Not a tensor's value, which would be waited for.
                got = value if isinstance(value, (int, float)) else type(value).__name__
                expected = "None or a finite number" + (" > 0" if above == 0 else "")
                reasons.append(f"{name}: expected {expected}, got {got}")
    return reasons


def _config(arguments: Arguments) -> MSAConfig:
    q, k, index_q = (_heads(name, arguments[name]) for name in ("q", "k_cache", "idx_q"))
    blocks = (arguments[name] for name in ("topk", "init_blocks", "local_blocks"))
    return _make_config(q, k[0], index_q, *blocks)


@lru_cache(maxsize=64)
def _make_config(
    q: tuple[int, int], kv_heads: int, index_q: tuple[int, int], topk: int, init: int, local: int
) -> MSAConfig:
    return MSAConfig(
        num_q_heads=q[0],
        num_kv_heads=kv_heads,
        num_index_heads=index_q[0],
        head_dim=q[1],
        index_head_dim=index_q[1],
        topk=topk,
        init_blocks=init,
        local_blocks=local,
    )


def _caches(arguments: Arguments, config: MSAConfig) -> tuple[KVCache, IndexCache]:
    k, v, index = (_pages(name, arguments[name]) for name in ("k_cache", "v_cache", "idx_k_cache"))
    if (v.shape, v.dtype) != (k.shape, k.dtype):
        raise fail("v_cache", f"{list(k.shape)} of {k.dtype}", f"{list(v.shape)} of {v.dtype}")
    if index.shape[1] != 1:
        raise fail("idx_k_cache", "one head", index.shape[1])
    cache = KVCache.from_tensor(
        (k, v), config, k.dtype, k_scale=arguments.get("k_scale"), v_scale=arguments.get("v_scale")
    )
    return cache, IndexCache.from_tensor(index, config)


def _pages(name: str, pool: torch.Tensor) -> torch.Tensor:
    """``[slots, H, D]`` as a view ``[pages, H, 128, D]``."""
    _heads(name, pool)
    pages = pool.shape[0] // BLOCK_SIZE
    paged: torch.Tensor = pool[: pages * BLOCK_SIZE].unflatten(0, (pages, BLOCK_SIZE))
    return paged.transpose(1, 2)


def _heads(name: str, x: torch.Tensor) -> tuple[int, int]:
    """Heads of a tensor that has them in its second axis of three, and their width."""
    if x.dim() != 3:
        raise fail(name, "three axes", list(x.shape))
    return x.shape[1], x.shape[2]


def _step(kind: Kind, arguments: Arguments) -> Step:
    prefill = kind == "prefill"
    return Step(
        req_to_token=arguments["req_to_token"],
        slot_ids=arguments["slot_ids"],
        seq_lens=arguments["seq_lens"],
        cu_seqlens=arguments["cu_seqlens"] if prefill else None,
        prefix_lens=arguments["prefix_lens"] if prefill else None,
        num_rows=arguments["q"].shape[0],
        max_query_len=arguments["max_seqlen_q"] if prefill else 1,
        max_seq_len=arguments["max_seqlen_k" if prefill else "max_seqlen"],
    )


def _softmax_scale(arguments: Arguments) -> float:
    """SGLang multiplies by q_scale whatever the query's dtype is."""
    scale, q_scale = arguments.get("sm_scale"), arguments.get("q_scale")
    width: int = arguments["q"].shape[2]
    return float(width**-0.5 if scale is None else scale) * (1.0 if q_scale is None else q_scale)


@lru_cache(maxsize=256)
def _implementations(problems: tuple[Problem, ...], impl: str) -> tuple[list[str], list[str]]:
    """The names that serve the problems, and the reasons where there is none for one of them.

    The reference waits for the device, and on a GPU it is slow: nothing to put into an engine
    without being asked.
    """
    names: list[str] = []
    against: list[str] = []
    for problem in problems:
        candidates = [name for name in IMPLEMENTATION_NAMES if name != "reference"]
        if impl != "auto":
            candidates = [impl]
        reasons = {name: reasons_against(name, problem) for name in candidates}
        serving = next((name for name, why in reasons.items() if not why), None)
        if serving is None:
            listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
            against.append(f"{problem.stage} has no implementation here ({listed})")
        elif serving not in names:
            names.append(serving)
    return names, against


_KNOWN = frozenset(SERVED) | frozenset(NUMBERS) | frozenset(FACTORS) | IGNORED
_KNOWN |= frozenset(name for names in READ.values() for name in names)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _is_default(parameter: inspect.Parameter, value: object) -> bool:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return not value
    return value is parameter.default


def _equal(value: object, served: object) -> bool:
    """Tensors are compared with nothing but None."""
    return value is None if served is None else value == served


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
