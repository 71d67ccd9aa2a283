"""Stage 5 in Triton: the stage's tests, served by the kernel, and parts beyond one launch."""

from __future__ import annotations

import math

import pytest
import torch
from test_combine import *  # noqa: F403
from test_combine import new_parts, truth

import msattn
from msattn.kernels.triton.combine import MAX_PARTS
from msattn.testing.compare import assert_close, assert_lse
from msattn.testing.make import strided

pytestmark = [
    pytest.mark.usefixtures("on_device"),
    # numpy's, in the interpreter: of NaN, infinities and 32-bit arithmetic that wraps.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

del test_attention_over_shards_of_the_blocks_merges_into_the_whole  # noqa: F821  # attend's time


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [MAX_PARTS, MAX_PARTS + 1, 2 * MAX_PARTS, 20])
def test_any_number_of_parts_into_one_of_them(count: int, dtype: torch.dtype) -> None:
    """Parts of different strides, some empty; the output is the last one's memory."""
    outs, lses = new_parts(count, dtype)
    outs = [strided(part) if i % 2 else part for i, part in enumerate(outs)]
    for i in range(count):
        lses[i][i % 5] = -math.inf
        outs[i][i % 5] = math.nan
    want, want_lse = truth(outs, lses)
    out, lse = msattn.merge_states(outs, lses, out=outs[-1], lse_out=lses[-1], impl="triton")
    assert out is outs[-1] and lse is lses[-1]
    assert_close("out", out, want)
    assert_lse("lse", lse, want_lse, bound=1e-5)


@pytest.mark.parametrize("dim", [1, 33, 128, 256])
def test_any_width(dim: int) -> None:
    outs, lses = [torch.randn(3, 5, dim) for _ in range(2)], [torch.randn(3, 5) for _ in range(2)]
    want, want_lse = truth(outs, lses)
    out, lse = msattn.merge_states(outs, lses, impl="triton")
    assert_close("out", out, want)
    assert_lse("lse", lse, want_lse, bound=1e-5)
