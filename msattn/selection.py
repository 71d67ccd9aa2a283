"""Stage 3: choose the blocks of each token and KV head, exactly and in one documented order."""

from __future__ import annotations

import torch

from .checks import require_output, require_tensor, require_type
from .dispatch import Problem, nothing, prepare
from .plan import Plan, require_rows


def select_blocks(
    scores: torch.Tensor, plan: Plan, *, out: torch.Tensor | None = None, impl: str = "auto"
) -> torch.Tensor:
    """The ``topk`` blocks of every token and KV head.

    A token at position p sees ``V = p // 128 + 1`` blocks. If V <= topk it gets them all. Else it
    gets the forced ones (the first ``init_blocks`` and the last ``local_blocks`` of the V) and the
    best of the rest. Order of the scores: descending, equal ones by ascending block id; NaN is
    lowest, below -inf; +0 and -0 are equal. A row depends on its own scores alone, so not on the
    batch.

    Args:
        scores: ``[Hi, T, B]`` fp32, any strides. Entries of blocks that a token does not see are
            not read. Blocks from B on do not exist for the selection.
        plan: the step.
        out: ``[T, Hkv, topk]`` int32, any strides.
        impl: ``"auto"``, ``"reference"``, ``"triton"`` or ``"hopper"``.

    Returns:
        block_ids ``[T, Hkv, topk]`` int32: ascending, -1 behind the last one. Every entry is
        written; rows of no request are all -1.
    """
    require_type("plan", plan, Plan)
    shape = {"Hi": plan.config.num_index_heads, "T": None, "B": None}
    require_tensor("scores", scores, dtypes=[torch.float32], shape=shape, device=plan.device)
    require_rows("scores", scores.shape[1], plan)
    out_shape = block_ids_shape(plan, scores.shape[1])
    require_output("out", out, dtypes=[torch.int32], shape=out_shape, device=scores.device)
    if out is None:
        out = torch.empty(tuple(out_shape.values()), dtype=torch.int32, device=scores.device)
    problem = Problem("select_blocks", scores.device, plan.config, num_blocks=plan.num_blocks)
    launch = prepare(impl, problem, scores, plan, out) if out.numel() else nothing(impl, problem)
    launch()
    return out


def block_ids_shape(plan: Plan, num_tokens: int) -> dict[str, int]:
    """Shape of the block ids of ``num_tokens`` rows."""
    return {"T": num_tokens, "Hkv": plan.config.num_kv_heads, "topk": plan.config.topk}
