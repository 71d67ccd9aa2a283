"""``attn_implementation="msattn"``: attention and indexer of transformers' MiniMax-M3 in msattn.

transformers computes the selection in the attention module, before it calls an attention function,
and holds a ``[B, 4, Sq, Sk]`` score tensor to do so. So the module's forward is replaced, for
models set to "msattn" alone; with any other implementation the original runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLAttention,
    MiniMaxM3VLIndexer,
    MiniMaxM3VLTextModel,
    apply_rotary_pos_emb,
)

from ...attend import attend
from ...cache import IndexCache, KVCache
from ...checks import fail
from ...config import BLOCK_SIZE, MSAConfig
from ...indexer import index_select
from ...kv_format import KVFormat
from ...store import store_index_k, store_kv
from ..inference import without_backward
from .cache import MsattnCache
from .step import Step, make_step

NAME = "msattn"


def register() -> None:
    """Make ``attn_implementation="msattn"`` known to transformers; a second call changes nothing.

    It works for models that exist already (``model.set_attn_implementation("msattn")``) and for
    those to come, with :class:`MsattnCache`, with transformers' own caches and without a cache.
    """
    AttentionInterface.register(NAME, _other_attention)
    AttentionMaskInterface.register(NAME, _padding_mask)
    for cls, forward in _forwards().items():
        if not hasattr(cls.forward, "_msattn_original"):
            cls.forward = _for_msattn_models(cls.forward, forward)


def unregister() -> None:
    """Give transformers its own forwards back; models set to "msattn" no longer run."""
    for cls in _forwards():
        cls.forward = getattr(cls.forward, "_msattn_original", cls.forward)
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


def _forwards() -> dict[Any, Callable[..., Any]]:
    return {MiniMaxM3VLAttention: _attention_forward, MiniMaxM3VLTextModel: _text_model_forward}


def _for_msattn_models(
    original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation != NAME:
            return original(self, *args, **kwargs)
        return ours(original, self, *args, **kwargs)

    forward._msattn_original = original  # type: ignore[attr-defined]
    return forward


def _other_attention(module: Any, *args: Any, block_indices: Any = None, **kwargs: Any) -> Any:
    """The vision tower has no blocks to select: it gets SDPA."""
    if block_indices is not None:
        raise fail("module", "MiniMaxM3VLAttention", type(module).__name__, NotImplementedError)
    return sdpa_attention_forward(module, *args, **kwargs)


def _padding_mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that layers get: ``[B, columns]``, or None where every column is a token."""
    if mask_function is not causal_mask_function:
        raise fail("attention", "a causal mask", "packed sequences or a mask of your own")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def _attention_forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """MiniMaxM3VLAttention.forward: project, norm, rope as before; then store, select, attend."""
    _require_servable(self, attention_mask)
    batch, query_len, _ = hidden_states.shape
    heads = (batch, query_len, -1, self.head_dim)
    q = self.q_norm(self.q_proj(hidden_states).view(heads))
    k = self.k_norm(self.k_proj(hidden_states).view(heads))
    v = self.v_proj(hidden_states).view(heads)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    index_q = index_k = None
    if self.indexer is not None:
        index_q, index_k = _index_projections(self.indexer, hidden_states, position_embeddings)
    with torch.no_grad():
        out = _paged_attention(self, q, k, v, index_q, index_k, attention_mask, past_key_values)
    out = without_backward(out, q)
    return self.o_proj(out.reshape(batch, query_len, -1)), None


def _index_projections(
    indexer: MiniMaxM3VLIndexer,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """index_q ``[B, Sq, Hi, Di]`` and index_k ``[B, Sq, 1, Di]``, normed and roped."""
    heads = (*hidden_states.shape[:2], -1, indexer.head_dim)
    index_q = indexer.q_norm(indexer.q_proj(hidden_states).view(heads))
    index_k = indexer.k_norm(indexer.k_proj(hidden_states).view(heads))
    cos, sin = (x[..., : indexer.head_dim] for x in position_embeddings)
    index_q, index_k = apply_rotary_pos_emb(index_q, index_k, cos, sin, unsqueeze_dim=2)
    return index_q, index_k


# Lengths and page tables are the host's business; a compiler only breaks its graph on them.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _paged_attention(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_q: torch.Tensor | None,
    index_k: torch.Tensor | None,
    padding_mask: torch.Tensor | None,
    past_key_values: Cache | None,
) -> torch.Tensor:
    """Out ``[B, Sq, Hq, D]`` of q, k, v ``[B, Sq, H, D]``; block ids stay in the cache's layer."""
    batch, query_len, device = q.shape[0], q.shape[1], q.device
    layer_idx, record = module.layer_idx, None
    kv: KVCache | None
    index: IndexCache | None
    if isinstance(past_key_values, MsattnCache):
        step = past_key_values.begin(layer_idx, batch, query_len, padding_mask, device)
        layer = past_key_values.layers[layer_idx]
        kv, index = layer.kv, layer.index
        record = layer.selected if past_key_values.record_selection else None
    else:
        if past_key_values is not None:
            k, v, index_k = _append(past_key_values, layer_idx, k, v, index_k)
        step, kv, index = _pages_for_pass(module.config, k, query_len, padding_mask)
    assert kv is not None
    store_kv(step.pack_keys(k), step.pack_keys(v), kv, step.slots)
    queries = step.pack_queries(q)
    if index_q is None or index_k is None:
        block_ids = _every_block(step, len(queries))
    else:
        assert index is not None
        store_index_k(step.pack_keys(index_k), index, step.slots)
        block_ids = index_select(step.pack_queries(index_q), index, step.plan)
        if record is not None:
            record.append(block_ids[: int(step.plan.cu_seqlens_q[1])].cpu())
    out = attend(queries, kv, block_ids, step.plan, softmax_scale=module.scaling)
    assert isinstance(out, torch.Tensor)
    return step.unpack_queries(out, batch)


def _append(
    cache: Cache, layer_idx: int, k: torch.Tensor, v: torch.Tensor, index_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Append to one of transformers' own caches; the whole history ``[B, Sk, H, D]`` comes back."""
    keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), layer_idx)
    columns = int(cache.get_seq_length(layer_idx))  # a static cache returns its unused tail, too
    if index_k is not None:
        index_k = cache.layers[layer_idx].update_index(index_k.transpose(1, 2))
        index_k = index_k[:, :, :columns].transpose(1, 2)
    return keys[:, :, :columns].transpose(1, 2), values[:, :, :columns].transpose(1, 2), index_k


def _pages_for_pass(
    config: Any, k: torch.Tensor, query_len: int, padding_mask: torch.Tensor | None
) -> tuple[Step, KVCache, IndexCache]:
    """Pages in the model's dtype for one layer's pass: all keys ``[B, Sk, Hkv, D]`` go in."""
    msa, fmt = MSAConfig.from_hf(config), KVFormat.parse(k.dtype)
    batch, columns = k.shape[:2]
    tokens = torch.ones((batch, columns), dtype=torch.bool)
    if padding_mask is not None:
        if padding_mask.shape[1] < columns:
            raise fail("attention_mask", f"{columns} columns", padding_mask.shape[1])
        tokens = padding_mask[:, :columns].to("cpu", torch.bool)
    blocks = -(-columns // BLOCK_SIZE)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    step = make_step(tokens, query_len, columns, table, msa, fmt, k.device)
    kv = KVCache.allocate(batch * blocks, msa, fmt, device=k.device)
    return step, kv, IndexCache.allocate(batch * blocks, msa, fmt, device=k.device)


def _every_block(step: Step, num_tokens: int) -> torch.Tensor:
    """Block ids of a dense layer; those that a token does not see are ignored."""
    plan = step.plan
    blocks = torch.arange(plan.num_blocks, dtype=torch.int32, device=plan.device)
    return blocks.expand(num_tokens, plan.config.num_kv_heads, -1)


def _require_servable(module: Any, attention_mask: torch.Tensor | None) -> None:
    if attention_mask is not None and attention_mask.dim() != 2:
        raise fail(
            "attention_mask",
            "a padding mask [B, columns]",
            f"shape {list(attention_mask.shape)}",
            NotImplementedError,
        )
    if module.training and module.attention_dropout:
        raise fail("attention_dropout", "0", module.attention_dropout, NotImplementedError)


def _text_model_forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    inputs_embeds: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """MiniMaxM3VLTextModel.forward, made right for padding on any side.

    Positions count the tokens of a row, not its columns. And the hidden state of a row's last token
    is repeated over the padding behind it: ``generate`` continues every row from the last column.
    """
    new = input_ids if inputs_embeds is None else inputs_embeds
    # A static cache's masks come in a dict, one for each type of layer, all of them ours.
    mask = attention_mask
    if isinstance(attention_mask, dict):
        mask = next(iter(attention_mask.values()))
    padding = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if padding is not None and new is not None:
        position_ids = (padding.long().cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
    outputs = original(
        self,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        **kwargs,
    )
    if padding is not None:
        hidden = outputs.last_hidden_state
        outputs.last_hidden_state = _repeat_last_token(hidden, padding, past_key_values)
    return outputs


def _repeat_last_token(
    hidden: torch.Tensor, padding_mask: torch.Tensor, cache: Cache | None
) -> torch.Tensor:
    """``hidden`` [B, S, hidden] with each row's last token repeated over the columns behind it."""
    tokens = padding_mask[:, -hidden.shape[1] :].to(hidden.device, torch.bool)
    column = torch.arange(tokens.shape[1], device=hidden.device)
    last = column.where(tokens, -1).amax(1)  # [B], -1: all of the row's columns are padding
    last_hidden = hidden[torch.arange(len(last), device=hidden.device), last.clamp(min=0)]
    if isinstance(cache, MsattnCache):
        # In a chunked prefill, the last token may lie in an earlier chunk.
        if cache.last_hidden is not None:
            last_hidden = last_hidden.where(last.unsqueeze(1) >= 0, cache.last_hidden)
        cache.last_hidden = last_hidden.detach()
    behind = (column > last.unsqueeze(1)).unsqueeze(-1)
    return last_hidden.unsqueeze(1).where(behind, hidden)
