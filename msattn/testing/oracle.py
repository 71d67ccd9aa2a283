"""The algorithm in fp64, densely masked and token by token: slow, and right to the eye.

Everything else is judged against these functions. They take the dequantised pages.
"""

from __future__ import annotations

import math

import torch

from ..batch import Batch
from ..config import MSAConfig


def tokens(batch: Batch) -> list[tuple[int, int]]:
    """(request, position) of every query token."""
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    return [
        (r, lengths[r] - (starts[r + 1] - starts[r]) + i)
        for r in range(batch.num_requests)
        for i in range(starts[r + 1] - starts[r])
    ]


def history(pages: torch.Tensor, batch: Batch, request: int, position: int) -> torch.Tensor:
    """fp64 vectors ``[position + 1, H, D]`` of a request, out of pages ``[pages, H, 128, D]``."""
    table = batch.page_table[request].long()
    blocks = [pages[table[b]].transpose(0, 1) for b in range(position // 128 + 1)]
    empty = pages.new_empty((0, pages.shape[1], pages.shape[3]))
    return torch.cat([empty, *blocks]).double()[: position + 1]


def index_scores(index_q: torch.Tensor, index_pages: torch.Tensor, batch: Batch) -> torch.Tensor:
    """fp64 ``[Hi, T, B]`` from index_q ``[T, Hi, Di]`` and index pages ``[pages, 128, Di]``."""
    scores = torch.full((index_q.shape[1], index_q.shape[0], batch.page_table.shape[1]), -math.inf)
    scores = scores.double()
    for t, (request, position) in enumerate(tokens(batch)):
        keys = history(index_pages.unsqueeze(1), batch, request, position)[:, 0]
        products = index_q[t].double() @ keys.T
        for b in range(position // 128 + 1):
            scores[:, t, b] = products[:, 128 * b : 128 * b + 128].amax(-1)
    return scores


def select_blocks(scores: torch.Tensor, batch: Batch, config: MSAConfig) -> torch.Tensor:
    """int32 ``[T, Hi, topk]`` from scores ``[Hi, T, B]``, by sorting whole rows."""
    block_ids = torch.full((scores.shape[1], scores.shape[0], config.topk), -1, dtype=torch.int32)
    for t, (_, position) in enumerate(tokens(batch)):
        visible = range(min(position // 128 + 1, scores.shape[2]))
        forced = {*visible[: config.init_blocks], *visible[len(visible) - config.local_blocks :]}
        for h, row in enumerate(scores[:, t].tolist()):

            def rank(
                b: int, row: list[float] = row, forced: set[int] = forced
            ) -> tuple[float, ...]:
                return (
                    b not in forced,
                    math.isnan(row[b]),
                    0 if math.isnan(row[b]) else -row[b],
                    b,
                )

            chosen = sorted(sorted(visible, key=rank)[: config.topk])
            block_ids[t, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return block_ids


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_ids: torch.Tensor,
    batch: Batch,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 out ``[T, Hq, D]`` and LSE ``[T, Hq]`` from pages ``[pages, Hkv, 128, D]``."""
    out, lse = torch.zeros(q.shape).double(), torch.full(q.shape[:2], -math.inf).double()
    group = q.shape[1] // k_pages.shape[1]
    for t, (request, position) in enumerate(tokens(batch)):
        k, v = (history(pages, batch, request, position) for pages in (k_pages, v_pages))
        for h in range(k_pages.shape[1]):
            ids, heads = set(block_ids[t, h].tolist()), slice(h * group, (h + 1) * group)
            seen = [j for j in range(position + 1) if j // 128 in ids]
            if seen:
                logits = scale * (q[t, heads].double() @ k[seen, h].T)
                out[t, heads] = logits.softmax(-1) @ v[seen, h]
                lse[t, heads] = logits.logsumexp(-1)
    return out, lse
