"""SGLang's two functions for M3's sparse layers: their parameters, and hostile calls of them."""

from __future__ import annotations

import random
from typing import Any, NoReturn

import torch

from msattn.config import BLOCK_SIZE
from msattn.integrations.sglang.call import Kind
from msattn.testing import oracle
from msattn.testing.make import GARBAGE, Inputs, as_bytes, poisoned


def minimax_sparse_prefill(
    q, k_cache, v_cache, sink, idx_q, idx_k_cache, idx_v_cache, idx_sink, req_to_token, slot_ids,
    cu_seqlens, seq_lens, prefix_lens, max_seqlen_q, max_seqlen_k, block_size_q, block_size_k, topk,
    init_blocks, local_blocks, sm_scale=None, idx_sm_scale=None, score_type="max",
    disable_index_value=False, use_msa=False, cu_seqblocks_q=None, max_seqblock_q=None,
    all_seqblock_q=None, seqlens_cpu=None, q_scale=None, k_scale=None, v_scale=None,
    idx_q_scale=None, idx_k_scale=None, idx_v_scale=None, cached_topk_idx=None,
    return_topk_idx=False, loc_mapping=None, page_size=1, seq_lens_cpu=None,
) -> NoReturn:  # fmt: skip
    """SGLang's parameters, with their defaults."""
    raise AssertionError("left to SGLang")


def minimax_sparse_decode(
    q, sink, k_cache, v_cache, idx_q, idx_sink, idx_k_cache, idx_v_cache, req_to_token, slot_ids,
    seq_lens, max_seqlen, block_size_q, block_size_k, topk, init_blocks, local_blocks,
    sm_scale=None, idx_sm_scale=None, score_type="max", disable_index_value=False,
    dense_main_attn_fn=None, page_size=1, use_msa=False, msa_kv_indices=None, msa_plan=None,
    q_scale=None, k_scale=None, v_scale=None, idx_q_scale=None, idx_k_scale=None, idx_v_scale=None,
    cached_topk_idx=None, topk_out=None, hisparse_swap_in_fn=None, indexer_cp=None,
    packed_queries=1,
) -> NoReturn:  # fmt: skip
    """SGLang's parameters, with their defaults."""
    raise AssertionError("left to SGLang")


FUNCTIONS = {"prefill": minimax_sparse_prefill, "decode": minimax_sparse_decode}


def make_arguments(x: Inputs, kind: Kind, *, seed: int = 0) -> dict[str, Any]:
    """What SGLang would call the function with for the step of ``x``, all of it by name.

    Everything that no position of a request owns is poison, or a number that names nothing. To
    ``decode`` each query token is a request of its own, as a draft to verify is.
    """
    config, tokens = x.config, oracle.tokens(x.cpu_batch)
    table, requests = request_table(x, seed)
    arguments = {
        "q": x.q,
        "k_cache": slot_major(x.cache.k),
        "v_cache": slot_major(x.cache.v),
        "sink": None,
        "idx_q": x.index_q,
        "idx_k_cache": slot_major(x.index.tensor.unsqueeze(1)),
        "idx_v_cache": None,
        "idx_sink": None,
        "req_to_token": table,
        "slot_ids": requests,
        "block_size_q": 1,
        "block_size_k": BLOCK_SIZE,
        "topk": config.topk,
        "init_blocks": config.init_blocks,
        "local_blocks": config.local_blocks,
        "score_type": "max",
        "disable_index_value": True,
        "page_size": BLOCK_SIZE,
        "q_scale": None if x.q_scale is None else float(x.q_scale),
        "k_scale": None if x.cache.k_scale == 1.0 else x.cache.k_scale,
        "v_scale": None if x.cache.v_scale == 1.0 else x.cache.v_scale,
    }
    if kind == "prefill":
        arguments |= {
            "cu_seqlens": x.batch.cu_seqlens_q,
            "seq_lens": x.batch.seq_lens,
            "prefix_lens": x.batch.seq_lens - x.batch.cu_seqlens_q.diff(),
            "max_seqlen_q": x.batch.max_query_len,
            "max_seqlen_k": x.batch.max_seq_len,
        }
        return arguments
    request, position = torch.tensor(tokens, dtype=torch.int64).reshape(-1, 2).to(x.q.device).T
    return arguments | {
        "q": x.q[: len(tokens)],
        "idx_q": x.index_q[: len(tokens)],
        "slot_ids": requests[request],
        "seq_lens": (position + 1).clamp(min=0),
        "max_seqlen": x.batch.max_seq_len,
    }


def slot_major(pages: torch.Tensor) -> torch.Tensor:
    """``[pages, H, 128, D]`` as a copy ``[slots, H, D]``, with an end that is no page."""
    rest = poisoned((40, pages.shape[1], pages.shape[3]), pages.dtype, pages.device)
    slots = as_bytes(pages).transpose(1, 2).flatten(0, 1)
    return torch.cat([slots, as_bytes(rest)]).view(pages.dtype)


def request_table(x: Inputs, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``req_to_token`` with the requests in any of its rows, and those rows."""
    batch = x.cpu_batch
    width = max(1, batch.max_seq_len) + 5
    table = torch.full((batch.num_requests + 3, width), GARBAGE, dtype=torch.int32)
    rows = random.Random(seed).sample(range(len(table)), batch.num_requests)
    for request, (row, length) in enumerate(zip(rows, batch.seq_lens.tolist(), strict=True)):
        position = torch.arange(length)
        pages = batch.page_table[request, position // BLOCK_SIZE]
        table[row, :length] = pages * BLOCK_SIZE + (position % BLOCK_SIZE).int()
    return table.to(x.q.device), torch.tensor(rows, dtype=torch.int64, device=x.q.device)
