"""Stage 4: softmax attention over the selected blocks alone."""

from __future__ import annotations

import math
from typing import Literal, TypedDict, Unpack, overload

import torch

from .cache import KVCache, Scale
from .calls import Call
from .checks import fail, require_number, require_output, require_tensor, require_type
from .dispatch import Launch, Problem, nothing, refuse_backward
from .plan import Plan, has_rows, require_rows
from .store import MODEL_DTYPES

QUERY_DTYPES = (*MODEL_DTYPES, torch.float8_e4m3fn)

State = tuple[torch.Tensor, torch.Tensor]
"""Output and LSE of the same rows."""


class Options(TypedDict, total=False):
    """Arguments of :func:`attend` that do not decide what it returns."""

    softmax_scale: float | None
    q_scale: Scale | None
    out: torch.Tensor | None
    impl: str


@overload
def attend(
    q: torch.Tensor, cache: KVCache, block_ids: torch.Tensor, plan: Plan,
    *, return_lse: Literal[False] = False, lse_out: None = None, **options: Unpack[Options],
) -> torch.Tensor: ...  # fmt: skip
@overload
def attend(
    q: torch.Tensor, cache: KVCache, block_ids: torch.Tensor, plan: Plan,
    *, return_lse: Literal[True], lse_out: torch.Tensor | None = None, **options: Unpack[Options],
) -> State: ...  # fmt: skip
@overload
def attend(
    q: torch.Tensor, cache: KVCache, block_ids: torch.Tensor, plan: Plan,
    *, return_lse: bool = False, lse_out: torch.Tensor | None = None, **options: Unpack[Options],
) -> torch.Tensor | State: ...  # fmt: skip
def attend(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    *,
    softmax_scale: float | None = None,
    q_scale: Scale | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor | State:
    """Attention of every query token over the visible keys of its blocks.

    Equivalent to, for token t at position p, query head h and its KV head ``h // group_size``::

        seen = [j for j in range(p + 1) if j // 128 in block_ids[t, h // group_size]]
        logits = softmax_scale * q_scale * q[t, h] @ K[seen].T
        out[t, h], lse[t, h] = softmax(logits) @ V[seen], logsumexp(logits)

    Args:
        q: ``[T, Hq, D]`` bf16, fp16, fp32 or float8_e4m3fn, any strides.
        cache: the layer's keys and values.
        block_ids: ``[T, Hkv, K]`` int32, any K, any strides, in any order. Ids that name no visible
            block (-1, too large) are ignored wherever they stand; a duplicate counts once.
        plan: the step.
        softmax_scale: default ``head_dim ** -0.5``.
        q_scale: dequantisation factor of a float8_e4m3fn query, a float or an fp32 tensor of one
            element; default 1.
        out: ``[T, Hq, D]`` of q's dtype (bf16, fp16 or fp32 for an fp8 query), any strides.
        return_lse: also return the LSE.
        lse_out: ``[T, Hq]`` fp32, any strides; implies return_lse.
        impl: ``"auto"``, ``"reference"``, ``"triton"`` or ``"hopper"``.

    Returns:
        out ``[T, Hq, D]`` (bf16 for an fp8 query), or ``(out, lse)`` with the natural logarithm of
        the sum of the exponentiated, scaled logits, ``[T, Hq]`` fp32. A row that sees nothing is
        exactly 0 with LSE -inf. Rows behind the plan's last query token are not written in a
        caller's buffer.

        There is no backward pass: one through a result that was allocated here raises
        NotImplementedError.
    """
    launch, result = prepare_attend(
        q,
        cache,
        block_ids,
        plan,
        softmax_scale=softmax_scale,
        q_scale=q_scale,
        out=out,
        return_lse=return_lse,
        lse_out=lse_out,
        impl=impl,
    )
    launch()
    own = out is not None or lse_out is not None
    return result if own else refuse_backward("attend", result, q)


def prepare_attend(
    q: torch.Tensor,
    cache: KVCache,
    block_ids: torch.Tensor,
    plan: Plan,
    *,
    softmax_scale: float | None = None,
    q_scale: Scale | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_out: torch.Tensor | None = None,
    impl: str,
) -> tuple[Launch, torch.Tensor | State]:
    """The launch of :func:`attend`, and what it returns, still to be filled."""
    require_type("cache", cache, KVCache)
    require_type("plan", plan, Plan)
    options = (out, return_lse, lse_out, softmax_scale, q_scale)
    call = Call("attend", impl, plan.launches(), cache.memory, q, block_ids, *options)
    if not (call.is_known and has_rows(q.shape[0], plan)):
        _check_cache(cache, plan)
        _check_tensors(q, block_ids, plan, out, lse_out)
        scales = _scales(q, softmax_scale, q_scale)
    if out is None:
        out = torch.zeros(q.shape, dtype=_out_dtypes(q)[0], device=q.device)
    lse = lse_out
    if lse is None and return_lse:
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    result = out if lse is None else (out, lse)
    if call.is_known:
        return call.again(out, lse), result
    problem = Problem(
        "attend",
        q.device,
        plan.config,
        cache.format,
        q.dtype,
        plan.num_blocks,
        plan.query_len_class,
    )
    if not q.shape[0]:
        return nothing(impl, problem), result
    arguments = (q, cache, block_ids, plan, *scales, out, lse)
    return call.first(problem, arguments, out, lse), result


def _check_tensors(
    q: torch.Tensor,
    block_ids: torch.Tensor,
    plan: Plan,
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
) -> None:
    config, device = plan.config, plan.device
    q_shape = {"T": None, "Hq": config.num_q_heads, "D": config.head_dim}
    tokens = require_tensor("q", q, dtypes=QUERY_DTYPES, shape=q_shape, device=device).shape[0]
    require_rows("q", tokens, plan)
    ids_shape = {"T": tokens, "Hkv": config.num_kv_heads, "K": None}
    require_tensor("block_ids", block_ids, dtypes=[torch.int32], shape=ids_shape, device=device)
    out_shape = {**q_shape, "T": tokens}
    require_output("out", out, dtypes=_out_dtypes(q), shape=out_shape, device=device)
    lse_shape = {"T": tokens, "Hq": config.num_q_heads}
    require_output("lse_out", lse_out, dtypes=[torch.float32], shape=lse_shape, device=device)


def _out_dtypes(q: torch.Tensor) -> tuple[torch.dtype, ...]:
    """What an output may be; the first, unless a buffer is given."""
    return MODEL_DTYPES if q.dtype == torch.float8_e4m3fn else (q.dtype,)


def _check_cache(cache: KVCache, plan: Plan) -> None:
    config = plan.config
    # By identity first: torch.compile cannot compare the fields of a second pair of formats.
    if cache.format is not plan.kv_format and cache.format != plan.kv_format:
        raise fail("cache", f"the plan's format {plan.kv_format}", cache.format)
    if cache.device != plan.device:
        raise fail("cache", f"device {plan.device}", cache.device)
    if (cache.num_kv_heads, cache.head_dim) != (config.num_kv_heads, config.head_dim):
        raise fail(
            "cache",
            f"num_kv_heads={config.num_kv_heads}, head_dim={config.head_dim}",
            f"{cache.num_kv_heads}, {cache.head_dim}",
        )


def _scales(
    q: torch.Tensor, softmax_scale: float | None, q_scale: Scale | None
) -> tuple[float, Scale]:
    """The two factors of a logit; a tensor q_scale stays on the device, as a 0-d view."""
    if softmax_scale is None:
        scale = q.shape[2] ** -0.5
    else:
        scale = require_number("softmax_scale", softmax_scale, "a finite number")
    if q_scale is None:
        return scale, 1.0
    if q.dtype != torch.float8_e4m3fn:
        raise fail("q_scale", "None for a query that is not float8_e4m3fn", q_scale)
    if isinstance(q_scale, torch.Tensor):
        require_tensor("q_scale", q_scale, dtypes=[torch.float32], device=q.device)
        if q_scale.numel() != 1:
            raise fail("q_scale", "one element", list(q_scale.shape))
        return scale, q_scale.reshape(())
    return scale, require_number(
        "q_scale", q_scale, "a finite number > 0 or a tensor", positive=True
    )
