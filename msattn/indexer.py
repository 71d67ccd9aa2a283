"""Stage 2: score the blocks that each token sees, or score and select in one pass."""

from __future__ import annotations

import torch

from .cache import IndexCache
from .checks import fail, require_output, require_tensor, require_type
from .dispatch import Launch, Problem, nothing, prepare, refuse_backward
from .plan import Plan, require_rows
from .selection import block_ids_shape

INDEX_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def index_scores(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    *,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Score of a block: the largest product of the token's index query with a visible key of it.

    Equivalent to, for a token at position p of a request whose index keys are ``keys``::

        products = index_q[t] @ keys[: p + 1].T                   # [Hi, p + 1], no scale
        scores[:, t, b] = products[:, 128 * b : 128 * b + 128].amax(-1)

    Args:
        index_q: ``[T, Hi, Di]`` bf16, fp16, fp32 or float8_e4m3fn, any strides.
        index: the layer's index keys.
        plan: the step.
        out: ``[Hi, T, plan.num_blocks]`` fp32, any strides.
        impl: ``"auto"``, ``"reference"``, ``"triton"`` or ``"hopper"``.

    Returns:
        ``[Hi, T, plan.num_blocks]`` fp32. Blocks that the token does not see are -inf, and so are
        the rows of no request. A NaN product makes its block's score NaN.
    """
    _check_query(index_q, index, plan)
    heads, tokens = plan.config.num_index_heads, index_q.shape[0]
    shape = {"Hi": heads, "T": tokens, "num_blocks": plan.num_blocks}
    require_output("out", out, dtypes=[torch.float32], shape=shape, device=index_q.device)
    scores = out
    if scores is None:
        scores = index_q.new_empty((heads, tokens, plan.num_blocks), dtype=torch.float32)
    problem = _problem("index_scores", index_q, index, plan)
    arguments = (index_q, index, plan, scores)
    launch = prepare(impl, problem, *arguments) if scores.numel() else nothing(impl, problem)
    launch()
    return refuse_backward("index_scores", scores, index_q) if out is None else out


def index_select(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    *,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """:func:`index_scores` and :func:`msattn.select_blocks` in one; never holds all the scores.

    Args:
        index_q, index, plan, impl: as for :func:`index_scores`.
        out: ``[T, Hkv, topk]`` int32, any strides.

    Returns:
        block_ids ``[T, Hkv, topk]`` int32, the ids that the two stages give, exactly.
    """
    launch, block_ids = prepare_index_select(index_q, index, plan, out=out, impl=impl)
    launch()
    return block_ids


def prepare_index_select(
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    *,
    out: torch.Tensor | None = None,
    impl: str,
) -> tuple[Launch, torch.Tensor]:
    """The launch of :func:`index_select` and the block ids that it will fill."""
    _check_query(index_q, index, plan)
    shape = block_ids_shape(plan, index_q.shape[0])
    require_output("out", out, dtypes=[torch.int32], shape=shape, device=index_q.device)
    if out is None:
        out = torch.empty(tuple(shape.values()), dtype=torch.int32, device=index_q.device)
    problem = _problem("index_select", index_q, index, plan)
    if out.numel() == 0:
        return nothing(impl, problem), out
    return prepare(impl, problem, index_q, index, plan, out), out


def _check_query(index_q: torch.Tensor, index: IndexCache, plan: Plan) -> None:
    require_type("index", index, IndexCache)
    require_type("plan", plan, Plan)
    config = plan.config
    shape = {"T": None, "Hi": config.num_index_heads, "Di": config.index_head_dim}
    require_tensor("index_q", index_q, dtypes=INDEX_QUERY_DTYPES, shape=shape, device=plan.device)
    if index.device != plan.device:
        raise fail("index", f"device {plan.device}", index.device)
    if index.head_dim != config.index_head_dim:
        raise fail("index", f"index_head_dim={config.index_head_dim}", index.head_dim)
    require_rows("index_q", index_q.shape[0], plan)


def _problem(stage: str, index_q: torch.Tensor, index: IndexCache, plan: Plan) -> Problem:
    return Problem(
        stage,
        index_q.device,
        plan.config,
        index.format,
        index_q.dtype,
        plan.num_blocks,
        plan.query_len_class,
    )
