"""Stage 5: merge attention states that were computed over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checks import fail, require_list, require_output, require_tensor
from .dispatch import Problem, nothing, prepare, refuse_backward
from .store import MODEL_DTYPES


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of the union: ``lse = logsumexp(lses)``, ``out = sum(exp(lse_i - lse) * out_i)``.

    Args:
        outs: at least one ``[T, Hq, D]`` bf16, fp16 or fp32, of one dtype, any strides.
        lses: as many ``[T, Hq]`` fp32, natural logarithm; -inf marks an empty part, whose out is
            not read into the result.
        out: ``[T, Hq, D]`` of the parts' dtype; may be one of the parts.
        lse_out: ``[T, Hq]`` fp32; may be one of the parts.
        impl: ``"auto"``, ``"reference"``, ``"triton"`` or ``"hopper"``.

    Returns:
        ``(out, lse)``. Where every part is empty: exactly 0 and -inf.
    """
    outs, lses = require_list("outs", outs, "tensors"), require_list("lses", lses, "tensors")
    if not outs:
        raise fail("outs", "at least one part", "none")
    if len(lses) != len(outs):
        raise fail("lses", f"{len(outs)} parts, as outs has", len(lses))
    first = require_tensor(
        "outs[0]", outs[0], dtypes=MODEL_DTYPES, shape={"T": None, "Hq": None, "D": None}
    )
    tokens, heads, dim = first.shape
    shape, lse_shape = {"T": tokens, "Hq": heads, "D": dim}, {"T": tokens, "Hq": heads}
    dtypes, lse_dtypes, device = [first.dtype], [torch.float32], first.device
    for i, (part, lse) in enumerate(zip(outs, lses, strict=True)):
        require_tensor(f"outs[{i}]", part, dtypes=dtypes, shape=shape, device=device)
        require_tensor(f"lses[{i}]", lse, dtypes=lse_dtypes, shape=lse_shape, device=device)
    require_output("out", out, dtypes=dtypes, shape=shape, device=device)
    require_output("lse_out", lse_out, dtypes=lse_dtypes, shape=lse_shape, device=device)
    is_new = out is None and lse_out is None
    if out is None:
        out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    if lse_out is None:
        lse_out = torch.empty(lses[0].shape, dtype=torch.float32, device=first.device)
    problem, arguments = Problem("merge_states", first.device), (outs, lses, out, lse_out)
    launch = prepare(impl, problem, *arguments) if lse_out.numel() else nothing(impl, problem)
    launch()
    state = (out, lse_out)
    return refuse_backward("merge_states", state, *outs, *lses) if is_new else state
