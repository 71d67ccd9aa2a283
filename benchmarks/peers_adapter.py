"""msattn as the library under test of an outside harness that times MiniMax-M3's peers.

The harness calls ``plan`` once for each input set, outside of what it times, and records the other
functions into a CUDA graph after two eager calls. A function raises NotImplementedError where
msattn cannot serve a case; the harness then skips it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import msattn
from msattn import BLOCK_SIZE, Batch, IndexCache, KVCache, MSAConfig, Plan

LAYOUT = "thk"  # ids [tokens, KV heads, 16]
KV = ("bf16", "fp8")


class Step(NamedTuple):
    """What a step prepares for all layers."""

    config: MSAConfig
    plan: Plan


def plan(
    *,
    cu: torch.Tensor,
    sl: torch.Tensor,
    pt: torch.Tensor,
    max_q: int,
    max_seq: int,
    hq: int,
    hkv: int,
    kv: torch.Tensor | None,
) -> Step:
    """A plan with all that the stages keep in it: none of it may be made inside of a graph."""
    config = MSAConfig(hq, hkv, hkv)
    dtype = torch.bfloat16 if kv is None else kv.dtype
    # The number of tokens is read once here, on a device that is idle.
    tokens = int(cu[-1])
    batch = Batch(cu, sl, pt, max_query_len=max_q, max_seq_len=max_seq, num_tokens=tokens)
    step = Step(config, msattn.make_plan(batch, config, dtype))
    if kv is None:
        _touch_index(step, tokens)
    else:
        _touch_attention(step, kv, tokens)
    return step


def decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    idx: torch.Tensor,
    pt: torch.Tensor,
    sl: torch.Tensor,
    sq: int,
    scale: float,
    out: torch.Tensor,
    plan: Step,
) -> None:
    _attend(q, kv, idx, scale, out, plan)


def prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    idx: torch.Tensor,
    pt: torch.Tensor,
    cu: torch.Tensor,
    sl: torch.Tensor,
    pfx: torch.Tensor,
    max_q: int,
    scale: float,
    out: torch.Tensor,
    plan: Step,
) -> None:
    _attend(q, kv, idx, scale, out, plan)


def index_decode(
    q: torch.Tensor,
    kc: torch.Tensor,
    pt: torch.Tensor,
    sl: torch.Tensor,
    sq: int,
    max_seq: int,
    out: torch.Tensor,
    plan: Step,
) -> None:
    _select(q, kc, out, plan)


def index_prefill(
    q: torch.Tensor,
    kc: torch.Tensor,
    pt: torch.Tensor,
    cu: torch.Tensor,
    sl: torch.Tensor,
    pfx: torch.Tensor,
    max_q: int,
    max_seq: int,
    out: torch.Tensor,
    plan: Step,
) -> None:
    _select(q, kc, out, plan)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    ids: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    step: Step,
) -> None:
    cache = KVCache.from_tensor(kv, step.config, kv.dtype)
    msattn.attend(q, cache, ids, step.plan, softmax_scale=scale, out=out)


def _select(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor, step: Step) -> None:
    index = IndexCache.from_tensor(keys, step.config)
    msattn.index_select(q, index, step.plan, out=out)


def _touch_attention(step: Step, kv: torch.Tensor, tokens: int) -> None:
    """One call whose result nobody reads: tiles and workspaces are made by the first."""
    config, device = step.config, kv.device
    q = torch.zeros(tokens, config.num_q_heads, 128, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, config.num_kv_heads, config.topk, dtype=torch.int32, device=device)
    _attend(q, kv, ids, 1.0, torch.empty_like(q), step)


def _touch_index(step: Step, tokens: int) -> None:
    """The same; pages that a pool of one page does not have are not read."""
    config, device = step.config, step.plan.device
    shape = tokens, config.num_index_heads, config.index_head_dim
    out = torch.empty(tokens, config.num_kv_heads, config.topk, dtype=torch.int32, device=device)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        q = torch.zeros(shape, device=device).to(dtype)
        keys = torch.zeros(1, BLOCK_SIZE, config.index_head_dim, device=device).to(dtype)
        _select(q, keys, out, step)
