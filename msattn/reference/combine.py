"""Stage 5 in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .rows import chunks

CHUNK_BYTES = 128 << 20


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse_out: torch.Tensor,
) -> None:
    for tokens in chunks(out.shape[0], 4 * (len(outs) + 2) * out[0].numel(), CHUNK_BYTES):
        lse = torch.stack([part[tokens] for part in lses])  # [parts, n, Hq]
        best = lse.amax(0)
        shift = best.masked_fill(best == -math.inf, 0.0)
        weights = (lse - shift).exp()
        normalizer = weights.sum(0)
        # Not exp(lse - merged): rounding of a large merged LSE would scale the whole output.
        weights = (weights / normalizer).masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
        total = torch.zeros(out[tokens].shape, dtype=torch.float32, device=out.device)
        for part, weight in zip(outs, weights, strict=True):
            # An empty part is not multiplied: its memory may hold NaN.
            total += torch.where(weight == 0, 0.0, part[tokens].float() * weight)
        out[tokens] = total.to(out.dtype)
        lse_out[tokens] = shift + normalizer.log()
