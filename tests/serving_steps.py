"""A step with hostile inputs, as an engine would hand it to the serving layer."""

from __future__ import annotations

import torch

from msattn.serving import (
    Indexer,
    LayerState,
    MetadataBuilder,
    SparseImpl,
    SparseMetadata,
    Step,
    allocate_block_ids,
)
from msattn.testing.compare import assert_attention, assert_same_ids, expected_block_ids
from msattn.testing.make import Inputs


def make_step(inputs: Inputs, *, num_tokens: int | None = None) -> Step:
    """The step of a case whose decode requests come first."""
    case = inputs.case
    return Step.from_lists(
        case.query_lens,
        case.seq_lens,
        inputs.batch.page_table,
        inputs.slot_mapping,
        num_tokens=num_tokens,
    )


def make_builder(inputs: Inputs, *, max_query_len: int = 1, **options: object) -> MetadataBuilder:
    case = inputs.case
    return MetadataBuilder(
        case.config,
        inputs.cache.format,
        max_num_tokens=max(case.num_rows, len(case.query_lens), 1),
        max_seq_len=max(*case.seq_lens, 1) + 1000,
        device=inputs.q.device,
        num_speculative_tokens=max_query_len - 1,
        **options,  # type: ignore[arg-type]
    )


def layer_of(inputs: Inputs, block_ids: torch.Tensor) -> LayerState:
    pool, cache = inputs.cache.tensor, inputs.cache
    assert isinstance(pool, torch.Tensor)
    return LayerState(pool, block_ids, cache.k_scale, cache.v_scale, inputs.q_scale)


def check_step(inputs: Inputs, metadata: SparseMetadata, *, impl: str = "auto") -> torch.Tensor:
    """Select and attend as a layer does; both are judged by the oracle. Returns the output."""
    case = inputs.case
    rows = case.num_tokens
    buffer = allocate_block_ids(case.num_rows, case.config, inputs.q.device)
    Indexer(case.config, inputs.index.format, impl=impl).forward(
        inputs.index_q.flatten(1), inputs.index.tensor, metadata, buffer
    )
    assert_same_ids("block_ids", buffer[:rows], expected_block_ids(inputs)[:rows])
    attention = SparseImpl(case.config, inputs.cache.format, impl=impl)
    out = inputs.new_out()
    returned, lse = attention.forward(
        layer_of(inputs, buffer), inputs.q, out, metadata, return_lse=True
    )
    assert returned is out
    assert_attention(inputs, buffer[: case.num_rows], out, lse)
    return out
