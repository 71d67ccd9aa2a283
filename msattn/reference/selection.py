"""Stage 3 in torch: one exact integer key for each block, its order the order of the selection."""

from __future__ import annotations

import torch

from ..config import MSAConfig
from ..plan import Plan
from .rows import chunks, query_rows

CHUNK_BYTES = 64 << 20  # keys held at a time
NONE = -1


def select_blocks(scores: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
    rows = query_rows(plan, scores.shape[1])
    for tokens in chunks(rows.num_rows, 8 * scores.shape[0] * scores.shape[2], CHUNK_BYTES):
        out[tokens] = select_rows(scores[:, tokens], rows.num_visible[tokens], plan.config)
    out[rows.num_rows :] = NONE


def select_rows(scores: torch.Tensor, num_visible: torch.Tensor, config: MSAConfig) -> torch.Tensor:
    """Block ids ``[n, Hi, topk]`` int32 of scores ``[Hi, n, B]`` and ``num_visible`` [n]."""
    blocks = scores.shape[2]
    block = torch.arange(blocks, device=scores.device)
    visible_blocks = num_visible.clamp(max=blocks).unsqueeze(1)  # [n, 1]
    visible = block < visible_blocks
    forced = visible & (
        (block < config.init_blocks) | (block >= visible_blocks - config.local_blocks)
    )
    rank = _ordered_bits(scores)
    rank = rank.masked_fill(forced, _FORCED).masked_fill(~visible, _HIDDEN)
    # Score first, then the smaller id; the keys of a row are distinct, so its best K are unique.
    best = ((rank << 32) + (blocks - block)).topk(min(config.topk, blocks), dim=-1).values
    ids = (blocks - (best & 0xFFFFFFFF)).masked_fill(best >> 32 == _HIDDEN, blocks)
    ids = ids.sort(dim=-1).values
    ids = ids.masked_fill(ids == blocks, NONE).to(torch.int32)
    ids = torch.nn.functional.pad(ids, (0, config.topk - ids.shape[-1]), value=NONE)
    return ids.transpose(0, 1)


# Above +inf, below NaN: outside the range of _ordered_bits.
_FORCED, _HIDDEN = 0x7FFFFFFF, -0x80000000


def _ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """int64 in the order of fp32 numbers: NaN < -inf < ... < -0 == +0 < ... < +inf."""
    bits = (x + 0.0).contiguous().view(torch.int32).long()  # -0 + 0 is +0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.masked_fill(x.isnan(), _HIDDEN + 1)
