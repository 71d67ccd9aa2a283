"""What else is installed, called on the same inputs: vLLM's and FlashInfer's kernels, dense SDPA.

A peer runs as its engine runs it, and is allowed its own layout of the ids. Its layer is index and
attention without the writes to the caches, which favours it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..cache import KVCache
from ..config import BLOCK_SIZE
from ..reference.pages import read_k, read_v
from .check import (
    check_attention,
    check_dense,
    check_index,
    check_layer,
    check_scores,
    check_selection,
)
from .inputs import Inputs
from .ops import Prepared, Provider, each

DENSE_BYTES = 24 << 30  # of contiguous keys and values that dense attention may take


class _Lengths:
    """The step's lengths as engines hold them."""

    def __init__(self, x: Inputs) -> None:
        plan = x.plans[0]
        self.starts, self.seq_lens = plan.cu_seqlens_q, plan.seq_lens
        self.prefix_lens = self.seq_lens - (self.starts[1:] - self.starts[:-1])
        self.max_query_len, self.max_seq_len = plan.max_query_len, plan.max_seq_len
        self.query_len = x.workload.uniform_query_len  # of a decode step


class Vllm:
    """vLLM 0.33's Triton kernels of MiniMax-M3, from vLLM or from a package of these two files."""

    name, dense = "vllm", False

    def __init__(self) -> None:
        attend, index = _first_of(
            ("vllm_m3.sparse_attn", "vllm_m3.index_topk"),
            (
                "vllm.models.minimax_m3.common.ops.sparse_attn",
                "vllm.models.minimax_m3.common.ops.index_topk",
            ),
        )
        self.attend, self.index = attend, index

    def prepare(self, op: str, inputs: Inputs) -> Prepared:
        _require(inputs.device.type == "cuda", "runs on GPUs")
        _require(inputs.format.name in ("bf16", "fp8_e4m3"), f"no {inputs.format} cache")
        return _by_op(self, op, inputs, _Lengths(inputs))

    def _attention(self, x: Inputs, at: _Lengths, r: int, ids: torch.Tensor) -> None:
        heads, scale = x.config.num_kv_heads, x.config.head_dim**-0.5
        q, pool, table, out = x.q[r], x.cache.tensor, x.tables[r], x.out[r]
        if at.query_len:
            self.attend.minimax_m3_sparse_attn_decode(
                q, pool, ids, table, at.seq_lens, heads, scale, out, at.query_len
            )
        else:
            self.attend.minimax_m3_sparse_attn(
                q,
                pool,
                ids,
                table,
                at.starts,
                at.seq_lens,
                at.prefix_lens,
                at.max_query_len,
                heads,
                scale,
                out,
            )

    def _scores(self, x: Inputs, at: _Lengths, r: int, out: torch.Tensor | None) -> torch.Tensor:
        heads, q, keys, table = x.config.num_kv_heads, x.index_q[r], x.index.tensor, x.tables[r]
        scores: torch.Tensor
        if at.query_len:
            scores = self.index.minimax_m3_index_decode_score(
                q,
                keys,
                table,
                at.seq_lens,
                at.max_seq_len,
                0,
                1,
                heads,
                at.query_len,
                at.query_len,
                score_out=out,
            )
        else:
            scores = self.index.minimax_m3_index_score(
                q,
                keys,
                table,
                at.starts,
                at.seq_lens,
                at.prefix_lens,
                at.max_query_len,
                at.max_seq_len,
                heads,
            )
        return scores

    def _select(self, x: Inputs, at: _Lengths, scores: torch.Tensor) -> None:
        self.index.minimax_m3_index_topk(
            scores,
            at.starts,
            at.prefix_lens,
            at.max_query_len,
            x.config.topk,
            0,
            1,
            out=x.ids_out_by_head,
        )

    def _index(self, x: Inputs, at: _Lengths, r: int, buffer: torch.Tensor | None) -> None:
        if at.query_len:
            self.index.minimax_m3_index_decode(
                x.index_q[r],
                x.index.tensor,
                x.tables[r],
                at.seq_lens,
                at.max_seq_len,
                x.config.topk,
                0,
                1,
                x.config.num_kv_heads,
                at.query_len,
                at.query_len,
                out=x.ids_out_by_head,
                score_out=buffer,
            )
        else:
            self._select(x, at, self._scores(x, at, r, None))

    def _buffer(self, x: Inputs, at: _Lengths) -> torch.Tensor | None:
        """Decode scores go into a buffer of the engine's; prefill scores into a new one."""
        if not at.query_len:
            return None
        width = -(-x.num_blocks // 16) * 16
        shape = x.config.num_index_heads, x.num_tokens, width
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def prepare_attend(self, x: Inputs, at: _Lengths) -> Prepared:
        ids = x.block_ids_by_head
        calls = each(x, lambda r: self._attention(x, at, r, ids[r]))
        return Prepared(calls, lambda: check_attention(x, x.out[0]))

    def prepare_scores(self, x: Inputs, at: _Lengths) -> Prepared:
        buffer = self._buffer(x, at)
        results: dict[str, torch.Tensor] = {}

        def call(r: int) -> None:
            scores = self._scores(x, at, r, buffer)
            if not torch.cuda.is_current_stream_capturing():
                results["last"] = scores  # only of the call that is checked

        return Prepared(
            each(x, call),
            lambda: check_scores(x, results.pop("last"), local_forced=bool(at.query_len)),
        )

    def prepare_select(self, x: Inputs, at: _Lengths) -> Prepared:
        _require(not at.query_len, "decode selection is part of one function with the scores")
        width = -(-x.num_blocks // 16) * 16
        scores = torch.nn.functional.pad(x.scores, (0, width - x.num_blocks))
        calls = each(x, lambda r: self._select(x, at, scores[r]))
        return Prepared(calls, lambda: check_selection(x, x.ids_out_by_head.transpose(0, 1)))

    def prepare_index(self, x: Inputs, at: _Lengths) -> Prepared:
        buffer = self._buffer(x, at)
        calls = each(x, lambda r: self._index(x, at, r, buffer))
        return Prepared(calls, lambda: check_index(x, x.ids_out_by_head.transpose(0, 1)))

    def prepare_layer(self, x: Inputs, at: _Lengths) -> Prepared:
        buffer = self._buffer(x, at)

        def call(r: int) -> None:
            self._index(x, at, r, buffer)
            self._attention(x, at, r, x.ids_out_by_head)

        calls = each(x, call)
        return Prepared(calls, lambda: check_layer(x, x.out[0]))


class FlashInfer:
    """FlashInfer 0.7's MSA operations: e4m3 caches alone.

    Args:
        schedule: None is the public entry, which chooses one; "cake" and "union" are the prefill
            schedules that it chooses from, called directly.
    """

    dense = False

    def __init__(self, schedule: str | None = None) -> None:
        self.ops: Any = importlib.import_module("flashinfer.msa_ops")
        self.schedule = schedule
        self.name = "flashinfer" if schedule is None else f"flashinfer:{schedule}"
        self.run: Any = None
        if schedule == "cake":
            module = importlib.import_module("flashinfer.msa_ops.cake_hopper_sm90")
            self.run = module.hopper_msa_sparse_attention
        elif schedule == "union":
            module = importlib.import_module("flashinfer.msa_ops.cute_dsl.sparse_prefill_sm90")
            self.run = module.run

    def prepare(self, op: str, inputs: Inputs) -> Prepared:
        _require(inputs.device.type == "cuda", "runs on GPUs")
        at = _Lengths(inputs)
        few = at.query_len is not None and at.query_len <= 4
        if op in ("scores", "index"):
            _require(inputs.format.is_fp8 or few, "bf16 index keys for up to 4 queries only")
        elif op != "select":
            _require(inputs.format.name == "fp8_e4m3", "fp8_e4m3 caches only")
        if self.schedule is not None:
            _require(op == "attend" and not at.query_len, "a schedule of prefill attention")
        return _by_op(self, op, inputs, at)

    def _attention(self, x: Inputs, at: _Lengths, r: int, ids: torch.Tensor) -> None:
        q, k, v, table, out = x.q[r], x.cache.k, x.cache.v, x.tables[r], x.out[r]
        scale = x.config.head_dim**-0.5
        lengths: dict[str, Any] = {"page_table": table, "seqused_k": at.seq_lens}
        common: dict[str, Any] = {"softmax_scale": scale, "out": out}
        if self.schedule == "cake":
            self.run(q, k, v, ids, at.starts, **lengths, **common)
        elif self.schedule == "union":
            pool, prefix = x.cache.tensor, at.prefix_lens
            self.run(q, pool, ids, at.starts, table, at.seq_lens, prefix, out, softmax_scale=scale)
        elif at.query_len:
            self.ops.msa_sparse_decode_attention(
                q, k, v, ids, **lengths, seqlen_q=at.query_len, causal=True, **common
            )
        else:
            self.ops.msa_sparse_attention(q, k, v, ids, at.starts, causal=True, **lengths, **common)

    def _scores(self, x: Inputs, at: _Lengths, r: int, scores: torch.Tensor) -> None:
        self.ops.msa_proxy_score(
            x.index_q[r],
            x.index.tensor[:, None],
            at.starts,
            page_table=x.tables[r],
            seqused_k=at.seq_lens,
            max_seqlen_q=at.max_query_len,
            max_k_tiles=x.num_blocks,
            output=scores,
        )

    def _select(self, x: Inputs, visible: torch.Tensor, scores: torch.Tensor) -> None:
        self.ops.msa_topk_select(
            scores,
            x.config.topk,
            num_valid_pages=visible,
            output=x.ids_out,
            force_begin_blocks=0,
            force_end_blocks=1,
        )

    def _buffer(self, x: Inputs) -> torch.Tensor:
        shape = x.config.num_index_heads, x.num_blocks, x.num_tokens
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def _visible(self, x: Inputs) -> torch.Tensor:
        """Blocks that each token sees: a step's metadata, made once for all layers."""
        return (x.rows.position // BLOCK_SIZE + 1).int()

    def prepare_attend(self, x: Inputs, at: _Lengths) -> Prepared:
        ids = x.block_ids_by_head
        calls = each(x, lambda r: self._attention(x, at, r, ids[r]))
        return Prepared(calls, lambda: check_attention(x, x.out[0]))

    def prepare_scores(self, x: Inputs, at: _Lengths) -> Prepared:
        scores = self._buffer(x)
        calls = each(x, lambda r: self._scores(x, at, r, scores))
        return Prepared(calls, lambda: check_scores(x, scores.transpose(1, 2)))

    def prepare_select(self, x: Inputs, at: _Lengths) -> Prepared:
        scores, visible = x.scores.transpose(2, 3).contiguous(), self._visible(x)
        calls = each(x, lambda r: self._select(x, visible, scores[r]))
        return Prepared(calls, lambda: check_selection(x, x.ids_out))

    def prepare_index(self, x: Inputs, at: _Lengths) -> Prepared:
        scores, visible = self._buffer(x), self._visible(x)

        def call(r: int) -> None:
            self._scores(x, at, r, scores)
            self._select(x, visible, scores)

        calls = each(x, call)
        return Prepared(calls, lambda: check_index(x, x.ids_out))

    def prepare_layer(self, x: Inputs, at: _Lengths) -> Prepared:
        scores, visible = self._buffer(x), self._visible(x)

        def call(r: int) -> None:
            self._scores(x, at, r, scores)
            self._select(x, visible, scores)
            # The selection writes [T, H, K]; the attention wants [H, T, K], contiguous.
            if x.config.num_kv_heads == 1:
                ids = x.ids_out.view(1, x.num_tokens, -1)
            else:
                ids = x.ids_out_by_head.copy_(x.ids_out.transpose(0, 1))
            self._attention(x, at, r, ids)

        calls = each(x, call)
        return Prepared(calls, lambda: check_layer(x, x.out[0]))


class DenseSdpa:
    """torch's scaled_dot_product_attention over all keys, gathered from the pages beforehand."""

    name, dense = "dense sdpa", True

    def prepare(self, op: str, inputs: Inputs) -> Prepared:
        x, at = inputs, _Lengths(inputs)
        _require(op in ("attend", "layer"), "computes attention only")
        _require(x.format.name in ("bf16", "fp16"), "bf16 and fp16 only")
        lengths = set(x.case.seq_lens)
        requests = len(x.case.seq_lens)
        _require(len(lengths) == 1, "requests of one length only")
        _require(requests == 1 or at.query_len is not None, "one request, or a decode step")
        tokens, keys = x.num_tokens // requests, lengths.pop()
        size = requests * keys * x.format.bytes_per_token(x.config)
        _require(size <= DENSE_BYTES, f"{size >> 30} GiB of keys and values are too many")
        k, v = (self._gathered(x, keys, read) for read in (read_k, read_v))
        bias = _causal(tokens, keys, x.device)
        # One set of keys: a warm L2 can only favour the peer.
        q = x.q.view(x.sets, requests, tokens, *x.q.shape[2:]).transpose(2, 3)
        outs: dict[int, torch.Tensor] = {}

        def call(r: int) -> None:
            outs[0] = torch.nn.functional.scaled_dot_product_attention(
                q[r], k, v, attn_mask=bias, enable_gqa=True
            )

        def check() -> Any:
            return check_dense(x, outs.pop(0).transpose(1, 2).flatten(0, 1))

        return Prepared([lambda: call(0)], check)

    def _gathered(
        self, x: Inputs, keys: int, read: Callable[[KVCache, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """K or V of set 0, ``[R, Hkv, keys, D]``; one request after the other, for the memory."""
        shape = len(x.tables[0]), x.config.num_kv_heads, keys, x.config.head_dim
        side = torch.empty(shape, dtype=x.q.dtype, device=x.device)
        for request, table in zip(side, x.tables[0], strict=True):
            pages = read(x.cache, table[: -(-keys // BLOCK_SIZE)].long())
            request.copy_(pages.transpose(0, 1).flatten(1, 2)[:, :keys])
        return side


def find_peers() -> tuple[list[Provider], dict[str, str]]:
    """The peers that can be imported, and why the others cannot."""
    found: list[Provider] = []
    missing: dict[str, str] = {}
    for name, make in (
        ("vllm", Vllm),
        ("flashinfer", FlashInfer),
        ("flashinfer:cake", lambda: FlashInfer("cake")),
        ("flashinfer:union", lambda: FlashInfer("union")),
        ("dense sdpa", DenseSdpa),
    ):
        try:
            found.append(make())
        except Exception as error:  # whatever a foreign package does when it is imported
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, missing


def _by_op(peer: object, op: str, inputs: Inputs, at: _Lengths) -> Prepared:
    prepare = getattr(peer, f"prepare_{op}", None)
    _require(prepare is not None, f"has no {op}")
    assert prepare is not None
    prepared: Prepared = prepare(inputs, at)
    return prepared


def _causal(tokens: int, keys: int, device: torch.device) -> Any:
    """None where the one token sees all keys."""
    if tokens == 1:
        return None
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(tokens, keys)


def _first_of(*choices: tuple[str, str]) -> tuple[Any, Any]:
    for first, second in choices[:-1]:
        try:
            return importlib.import_module(first), importlib.import_module(second)
        except ModuleNotFoundError as error:
            if error.name != first.split(".")[0]:
                raise
    first, second = choices[-1]
    return importlib.import_module(first), importlib.import_module(second)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotImplementedError(otherwise)
