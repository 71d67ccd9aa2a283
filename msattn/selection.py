"""Stage 3: choose the blocks of each token and KV head, exactly and in one documented order."""

from __future__ import annotations

import torch

from .calls import Call
from .checks import require_output, require_tensor, require_type
from .dispatch import Launch, Problem, nothing
from .plan import Plan, has_rows, require_rows


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
    behind = _elements_behind(require_tensor("scores", scores))
    call = Call("select_blocks", impl, plan.launches(), None, scores, out, behind)
    if not (call.is_known and has_rows(scores.shape[1], plan)):
        shape = {"Hi": plan.config.num_index_heads, "T": None, "B": None}
        require_tensor("scores", scores, dtypes=[torch.float32], shape=shape, device=plan.device)
        require_rows("scores", scores.shape[1], plan)
        require_block_ids("out", out, plan, scores.shape[1])
    if out is None:
        out = new_block_ids(plan, scores.shape[1])
    _launch(impl, call, scores, plan, out)()
    return out


def _launch(impl: str, call: Call, scores: torch.Tensor, plan: Plan, out: torch.Tensor) -> Launch:
    if call.is_known:
        return call.again(out)
    problem = Problem("select_blocks", scores.device, plan.config, num_blocks=plan.num_blocks)
    if out.numel() == 0:
        return nothing(impl, problem)
    return call.first(problem, (scores, plan, out), out)


def _elements_behind(scores: torch.Tensor) -> int:
    """Of its memory, behind its last one; up to three, since kernels read four at a time."""
    end = int(scores.storage_offset()) + 1
    for size, stride in zip(scores.shape, scores.stride(), strict=True):
        end += (size - 1) * stride
    return min(scores.untyped_storage().nbytes() // scores.element_size() - end, 3)


def require_block_ids(name: str, ids: torch.Tensor | None, plan: Plan, num_tokens: int) -> None:
    """A caller's buffer, when there is one, can take the block ids of ``num_tokens`` rows."""
    shape = dict(zip(("T", "Hkv", "topk"), _block_ids_shape(plan, num_tokens), strict=True))
    require_output(name, ids, dtypes=[torch.int32], shape=shape, device=plan.device)


def new_block_ids(plan: Plan, num_tokens: int) -> torch.Tensor:
    """Memory for the block ids of ``num_tokens`` rows."""
    shape = _block_ids_shape(plan, num_tokens)
    return torch.empty(shape, dtype=torch.int32, device=plan.device)


def _block_ids_shape(plan: Plan, num_tokens: int) -> tuple[int, int, int]:
    return num_tokens, plan.config.num_kv_heads, plan.config.topk
