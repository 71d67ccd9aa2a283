"""Is a result right? Sampled rows against the fp32 reference, before anything is timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attend import attend
from ..batch import Batch
from ..cache import KVCache
from ..combine import merge_states
from ..config import BLOCK_SIZE
from ..indexer import index_scores
from ..plan import Plan, make_plan
from ..selection import select_blocks
from ..store import store_kv
from .inputs import Inputs

ROWS = 34  # of attention outputs
INDEX_ROWS = 6  # each reads all index keys of its request
OFF = 0.05  # a row that is further from the truth than this is off
TIE = 1e-4  # scores that differ by less, relatively, may be picked for one another


@dataclass(frozen=True, slots=True)
class Check:
    """How far a result is from the truth, and how far it may be."""

    kind: str  # what `error` is
    error: float
    limit: float
    off: float = 0.0  # share of the rows that are off
    off_limit: float = 0.0

    @property
    def right(self) -> bool:
        """NaN never is."""
        return self.error <= self.limit and self.off <= self.off_limit


def check_attention(inputs: Inputs, out: torch.Tensor) -> Check:
    """``out`` [T, Hq, D] of set 0, with the set's block ids."""
    rows = sample_rows(inputs, ROWS)
    want = _attend_rows(inputs, rows, inputs.block_ids[0, rows])
    return _numbers(out[rows], want, limit=1e-2)


def check_dense(inputs: Inputs, out: torch.Tensor) -> Check:
    """The same over all blocks, for dense attention."""
    rows = sample_rows(inputs, 2)
    every = torch.arange(inputs.num_blocks, dtype=torch.int32, device=inputs.device)
    ids = every.expand(len(rows), inputs.config.num_kv_heads, -1)
    return _numbers(out[rows], _attend_rows(inputs, rows, ids), limit=2e-2)


def check_layer(inputs: Inputs, out: torch.Tensor) -> Check:
    """A layer that selects for itself: nearly tied blocks may be swapped, and a row is off then."""
    rows = sample_rows(inputs, INDEX_ROWS)
    plan = _row_plan(inputs, rows)
    ids = select_blocks(_score_rows(inputs, rows, plan), plan, impl="reference")
    want = _attend_rows(inputs, rows, ids, plan)
    error = _row_errors(out[rows], want)
    off = float((error > OFF).double().mean())
    return Check("median relative L2 of a row", float(error.median()), 1e-2, off, 0.1)


def check_scores(inputs: Inputs, scores: torch.Tensor, *, local_forced: bool = False) -> Check:
    """``scores`` [Hi, T, >= B] of visible blocks.

    Args:
        local_forced: the last visible block's score is overwritten, which is not held against it.
    """
    rows = sample_rows(inputs, INDEX_ROWS)
    want = _score_rows(inputs, rows, _row_plan(inputs, rows))
    got = scores[:, rows, : inputs.num_blocks].float()
    compared = torch.isfinite(want)
    if local_forced:
        last = inputs.rows.position[rows] // BLOCK_SIZE
        compared &= torch.arange(inputs.num_blocks, device=last.device) != last[:, None]
    return Check("relative L2", _relative(got[compared], want[compared]), 5e-3)


def check_selection(inputs: Inputs, ids: torch.Tensor) -> Check:
    """``ids`` [T, Hkv, K] of set 0's scores: any order, exactly the right ones."""
    rows = sample_rows(inputs, ROWS)
    want = select_blocks(inputs.scores[0][:, rows], _row_plan(inputs, rows), impl="reference")
    wrong = (ids[rows].sort(-1).values != want.sort(-1).values).any(-1)
    return Check("share of wrong rows", float(wrong.double().mean()), 0.0)


def check_index(inputs: Inputs, ids: torch.Tensor) -> Check:
    """``ids`` [T, Hkv, K] of set 0: each pick has to reach the score of the last right one."""
    rows = sample_rows(inputs, INDEX_ROWS)
    plan = _row_plan(inputs, rows)
    scores = _score_rows(inputs, rows, plan).transpose(0, 1)  # [n, Hkv, B]
    want = select_blocks(scores.transpose(0, 1), plan, impl="reference").long()
    got = ids[rows].long()
    valid = (got >= 0) & (got < scores.shape[2])
    picked = scores.gather(2, got.where(valid, 0))
    right = scores.gather(2, want.clamp(min=0)).masked_fill(want < 0, torch.inf)
    local = (inputs.rows.position[rows] // BLOCK_SIZE)[:, None, None]
    bar = right.masked_fill(want == local, torch.inf).amin(2, keepdim=True)
    good = valid & ((picked >= bar - TIE * bar.abs()) | (got == local))
    repeated = (got[..., None] == got[..., None, :]).sum(-1) > 1
    good &= ~repeated
    missing = 1 - float(good.sum()) / max(1, int((want >= 0).sum()))
    return Check("share of wrong picks", missing, 5e-3)


def check_store(inputs: Inputs) -> Check:
    """What set 0's slots hold, beside what the reference stores of the same tokens."""
    rows = torch.randperm(inputs.num_tokens, generator=inputs.generator, device=inputs.device)[:256]
    config, fmt, (k, v) = inputs.config, inputs.format, inputs.kv
    want = KVCache.allocate(2, config, fmt, device=inputs.device)
    store_kv(k[0, rows], v[0, rows], want, torch.arange(len(rows)).to(rows), impl="reference")
    slots = inputs.slots[0][rows]
    pages, place = (slots // BLOCK_SIZE).unique(return_inverse=True)
    assert isinstance(inputs.cache.tensor, torch.Tensor)
    got = KVCache.from_tensor(take(inputs.cache.tensor, pages), config, fmt)
    index = take(inputs.index.tensor.flatten(0, 1), slots)
    errors = [_relative(index.float(), inputs.index_k[0, rows].to(index.dtype).float())]
    for mine, theirs in zip(got.dequantize(), want.dequantize(), strict=True):
        heads_last = mine.transpose(1, 2).flatten(0, 1)[place * BLOCK_SIZE + slots % BLOCK_SIZE]
        errors.append(_relative(heads_last, theirs.transpose(1, 2).flatten(0, 1)[: len(rows)]))
    return Check("relative L2 to the reference's bytes", max(errors), 1e-6)


def check_merge(inputs: Inputs, out: torch.Tensor) -> Check:
    """``out`` [T, Hq, D] of set 0's parts."""
    rows = sample_rows(inputs, ROWS)
    outs, lses = inputs.parts[0]
    parts = [x[rows].float() for x in outs]
    want, _ = merge_states(parts, [x[rows] for x in lses], impl="reference")
    return _numbers(out[rows], want, limit=1e-2)


def sample_rows(inputs: Inputs, count: int) -> torch.Tensor:
    """The first and the last token, and random ones in between, on the device."""
    tokens = inputs.num_tokens
    generator = torch.Generator().manual_seed(inputs.seed)
    some = torch.randperm(tokens, generator=generator)[: count - 2].tolist()
    return torch.tensor(sorted({0, tokens - 1, *some}), device=inputs.device)


def take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]``; as bytes, where the device cannot index the dtype."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.dtype.itemsize == 1 else x[rows]


def _row_plan(inputs: Inputs, rows: torch.Tensor) -> Plan:
    """Each row as a decode request of its own."""
    request, position = (x[rows] for x in inputs.rows)
    batch = Batch.from_lists(
        [1] * len(rows),
        (position + 1).tolist(),
        inputs.tables[0][request],
        max_seq_len=inputs.workload.context,
    )
    return make_plan(batch, inputs.config, inputs.format)


def _attend_rows(
    inputs: Inputs, rows: torch.Tensor, ids: torch.Tensor, plan: Plan | None = None
) -> torch.Tensor:
    """fp32 attention of set 0's rows, ``[n, Hq, D]``."""
    plan = plan or _row_plan(inputs, rows)
    out = attend(inputs.q[0, rows].float(), inputs.cache, ids, plan, impl="reference")
    assert isinstance(out, torch.Tensor)
    return out


def _score_rows(inputs: Inputs, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """``[Hi, n, B]`` fp32, summed in fp64."""
    return index_scores(take(inputs.index_q[0], rows), inputs.index, plan, impl="reference")


def _numbers(got: torch.Tensor, want: torch.Tensor, *, limit: float) -> Check:
    off = float((_row_errors(got, want) > OFF).double().mean())
    return Check("relative L2", _relative(got, want), limit, off)


def _row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    difference = (got.float() - want.float()).norm(dim=-1)
    errors: torch.Tensor = difference / want.float().norm(dim=-1).clamp(min=1e-20)
    return errors.nan_to_num(torch.inf)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-20))
