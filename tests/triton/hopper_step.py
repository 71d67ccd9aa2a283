"""What the tests of Hopper's attention on a CPU share: a step through the kernels themselves."""

from __future__ import annotations

import torch

from msattn.kernels.hopper import attend
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import Inputs


def run(
    inputs: Inputs, ids: torch.Tensor, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; the choice of an implementation would refuse a CPU."""
    out = inputs.new_out()
    lse = torch.full(out.shape[:2], torch.nan)
    before = out.clone()
    q_scale = 1.0 if inputs.q_scale is None else inputs.q_scale
    scale = 128**-0.5 if softmax_scale is None else softmax_scale
    attend.attend(inputs.q, inputs.cache, ids, inputs.plan(), scale, q_scale, out, lse)
    tokens = inputs.case.num_tokens
    assert_bitwise_equal("spare rows", out[tokens:], before[tokens:])
    assert lse[tokens:].isnan().all()
    return out, lse
