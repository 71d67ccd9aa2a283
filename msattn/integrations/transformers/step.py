"""One forward pass as a msattn batch: padded rows of transformers in, packed tokens and slots out.

A padding mask says which columns of a ``[B, C]`` batch are tokens. Only those are stored, one
behind
the other, so that a block is 128 tokens of the text wherever its padding stands: left, right,
    between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...batch import Batch
from ...config import BLOCK_SIZE, MSAConfig
from ...kv_format import KVFormat
from ...plan import Plan, make_plan


@dataclass(frozen=True, eq=False)
class Step:
    """What all layers of one forward pass share."""

    plan: Plan
    queries: torch.Tensor | None  # [T] rows of the flattened [B * Sq] that are tokens; None = all
    keys: torch.Tensor | None  # [S] rows of the flattened [B * Sk] that are tokens; None = all
    slots: torch.Tensor  # [S] int64 slots of the keys

    def pack_queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, Sq, ...]`` -> ``[T, ...]``"""
        return _pack(x, self.queries)

    def pack_keys(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, Sk, ...]`` -> ``[S, ...]``"""
        return _pack(x, self.keys)

    def unpack_queries(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        """``[T, ...]`` -> ``[B, Sq, ...]``, zeros where there is padding."""
        if self.queries is None:
            return x.view(batch, -1, *x.shape[1:])
        num_rows = batch * self.plan.max_query_len
        rows = x.new_zeros((num_rows, *x.shape[1:])).index_copy_(0, self.queries, x)
        return rows.view(batch, -1, *x.shape[1:])


def make_step(
    tokens: torch.Tensor,
    query_len: int,
    key_len: int,
    page_table: torch.Tensor,
    config: MSAConfig,
    kv_format: KVFormat,
    device: torch.device,
) -> Step:
    """Describe a pass: queries are the last ``query_len`` columns, keys the last ``key_len``.

    Args:
        tokens: ``[B, C]`` bool on the CPU: which of all columns so far are tokens.
        page_table: ``[B, blocks]`` int32 on the CPU.
        device: where the layers are that will use the step.
    """
    columns = tokens.shape[1]
    position = tokens.cumsum(1) - 1
    new_keys, new_queries = tokens[:, columns - key_len :], tokens[:, columns - query_len :]
    row, column = new_keys.nonzero(as_tuple=True)
    position = position[row, column + columns - key_len]
    slots = page_table[row, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    batch = Batch.from_lists(
        new_queries.sum(1).tolist(),
        tokens.sum(1).tolist(),
        page_table,
        max_query_len=query_len,
        device=device,
    )
    return Step(
        make_plan(batch, config, kv_format),
        _rows(new_queries, device),
        _rows(new_keys, device),
        slots.to(device),
    )


def _rows(tokens: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    if bool(tokens.all()):
        return None
    return tokens.flatten().nonzero().squeeze(1).to(device)


def _pack(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    flat = x.flatten(0, 1)
    return flat if rows is None else flat[rows]
