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


def check_a_key_that_is_nan(inputs: Inputs) -> None:
    """A page is multiplied with the rows of several tokens: NaN reaches those that chose it."""
    config, tokens = inputs.config, inputs.case.num_tokens
    ids = torch.zeros(inputs.case.num_rows, config.num_kv_heads, 2, dtype=torch.int32)
    ids[: inputs.case.query_lens[0] : 2, :, 1] = 1
    want, want_lse = run(inputs, ids)
    page = int(inputs.plan().page_table[0, 1])
    inputs.cache.k[page, 0, 5, 7] = torch.nan
    out, lse = run(inputs, ids)
    chose = torch.zeros(tokens, config.num_q_heads, dtype=torch.bool)
    chose[: inputs.case.query_lens[0] : 2, : config.group_size] = True
    assert out[:tokens][chose].isnan().all() and lse[:tokens][chose].isnan().all()
    assert_bitwise_equal("out", out[:tokens][~chose], want[:tokens][~chose])
    assert_bitwise_equal("lse", lse[:tokens][~chose], want_lse[:tokens][~chose])
