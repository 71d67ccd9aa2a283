"""What tests on a CUDA device share: steps, graphs, and the reference on the device as the truth.

Everything here runs on the device of DEVICE with the kernels of IMPL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import msattn
from msattn.testing.compare import assert_attention, assert_close, assert_lse, assert_same_ids
from msattn.testing.make import Inputs, as_bytes

DEVICE = "cuda"
IMPL = "triton"

Layer = list[torch.Tensor]
"""block_ids, out, LSE."""


def run_layer(x: Inputs, plan: msattn.Plan, *, impl: str = IMPL) -> Layer:
    """Store, select, attend."""
    msattn.store_kv(x.k, x.v, x.cache, x.slot_mapping, impl=impl)
    msattn.store_index_k(x.index_k, x.index, x.slot_mapping, impl=impl)
    ids = msattn.index_select(x.index_q, x.index, plan, impl=impl)
    out, lse = msattn.attend(x.q, x.cache, ids, plan, q_scale=x.q_scale, return_lse=True, impl=impl)
    return [ids, out, lse]


def pools(x: Inputs) -> list[torch.Tensor]:
    """Bytes of the caches' tensors."""
    kv = x.cache.tensor if isinstance(x.cache.tensor, tuple) else (x.cache.tensor,)
    return [as_bytes(pool) for pool in (*kv, x.index.tensor)]


def assert_equals_oracle(x: Inputs, got: Layer) -> None:
    """Of a layer over few tokens: ids as the reference selects them, numbers within the budget.

    The caches hold the step's keys and values.
    """
    tokens = x.case.num_tokens
    ids, out, lse = got
    want = msattn.index_select(x.index_q, x.index, x.plan(), impl="reference")
    assert_same_ids("block_ids", ids[:tokens], want[:tokens])
    assert_attention(x, want, out[: len(want)], lse[: len(want)])


def assert_equals_reference(
    q: torch.Tensor,
    cache: msattn.KVCache,
    block_ids: torch.Tensor,
    plan: msattn.Plan,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Of an attention too large for the oracle: the truth is the reference with fp32 queries."""
    truth, truth_lse = msattn.attend(
        q.float(), cache, block_ids, plan, return_lse=True, impl="reference"
    )
    baseline = msattn.attend(q, cache, block_ids, plan, impl="reference")
    assert_close("out", out, truth, baseline=baseline)
    assert_lse("lse", lse, truth_lse)


def capture(function: Callable[[], object]) -> Callable[[], None]:
    """The replay of what the function launches; it has run once before, so that all is compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
