"""Stage 2: score the blocks that each token sees, or score and select in one pass."""

from __future__ import annotations

import torch

from .cache import IndexCache
from .calls import Call
from .checks import fail, require_output, require_tensor, require_type
from .dispatch import Launch, Problem, nothing, refuse_backward
from .plan import Plan, has_rows, require_rows
from .selection import new_block_ids, require_block_ids

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
    call = _call("index_scores", impl, index_q, index, plan, out)
    if not (call.is_known and has_rows(index_q.shape[0], plan)):
        _check_query(index_q, index, plan)
        shape = {"Hi": index_q.shape[1], "T": index_q.shape[0], "num_blocks": plan.num_blocks}
        require_output("out", out, dtypes=[torch.float32], shape=shape, device=index_q.device)
    scores = out
    if scores is None:
        tokens, heads, _ = index_q.shape
        scores = index_q.new_empty((heads, tokens, plan.num_blocks), dtype=torch.float32)
    _launch("index_scores", impl, call, index_q, index, plan, scores)()
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
    call = _call("index_select", impl, index_q, index, plan, out)
    if not (call.is_known and has_rows(index_q.shape[0], plan)):
        _check_query(index_q, index, plan)
        require_block_ids("out", out, plan, index_q.shape[0])
    if out is None:
        out = new_block_ids(plan, index_q.shape[0])
    return _launch("index_select", impl, call, index_q, index, plan, out), out


def _call(
    stage: str,
    impl: str,
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor | None,
) -> Call:
    require_type("index", index, IndexCache)
    require_type("plan", plan, Plan)
    return Call(stage, impl, plan.launches(), index.memory, index_q, out)


def _check_query(index_q: torch.Tensor, index: IndexCache, plan: Plan) -> None:
    config = plan.config
    shape = {"T": None, "Hi": config.num_index_heads, "Di": config.index_head_dim}
    require_tensor("index_q", index_q, dtypes=INDEX_QUERY_DTYPES, shape=shape, device=plan.device)
    if index.device != plan.device:
        raise fail("index", f"device {plan.device}", index.device)
    if index.head_dim != config.index_head_dim:
        raise fail("index", f"index_head_dim={config.index_head_dim}", index.head_dim)
    require_rows("index_q", index_q.shape[0], plan)


def _launch(
    stage: str,
    impl: str,
    call: Call,
    index_q: torch.Tensor,
    index: IndexCache,
    plan: Plan,
    out: torch.Tensor,
) -> Launch:
    if call.is_known:
        return call.again(out)
    problem = Problem(
        stage,
        index_q.device,
        plan.config,
        index.format,
        index_q.dtype,
        plan.num_blocks,
        plan.query_len_class,
    )
    if out.numel() == 0:
        return nothing(impl, problem)
    return call.first(problem, (index_q, index, plan, out), out)
