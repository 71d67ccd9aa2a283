"""Running a model: prefill in chunks, greedy decoding, and the comparison of two runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..integrations.transformers import MsattnCache

OnTokens = Callable[[str, int], None]
"""Told after each step: ``"prefill"`` or ``"decode"``, and the tokens that the step processed."""


@dataclass(frozen=True, eq=False)
class Generation:
    """A greedy continuation of one prompt, and what it took."""

    tokens: list[int]
    logits: torch.Tensor | None  # [len(tokens), vocabulary] fp32 on the CPU, if they were kept
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float  # of all tokens but the first, which the prefill gives
    bytes_per_token: int  # of the cache, over all layers
    device: torch.device
    peak_bytes: int | None  # of the device's memory; on a CPU, of the process; None: not known

    @property
    def prefill_rate(self) -> float:
        """Tokens per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second; None if no step was decoded."""
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 else None


@dataclass(frozen=True)
class Comparison:
    """How far a run agrees with another one of the same prompt."""

    first_difference: int | None  # index of the first new token that differs; None: all are equal
    largest_logit_difference: (
        float  # over the tokens with the same past, the differing one included
    )

    @property
    def equal(self) -> bool:
        return self.first_difference is None


def new_cache(model: Any, attn: str, kv_format: str, *, record_selection: bool = False) -> Any:
    """The cache that an attention implementation runs with."""
    if attn == "msattn":
        return MsattnCache(model.config, kv_format, record_selection=record_selection)
    from transformers import DynamicCache

    return DynamicCache(config=model.config.get_text_config(decoder=True))


@torch.inference_mode()
def generate(
    model: Any,
    prompt: torch.Tensor,
    cache: Any,
    *,
    max_new_tokens: int,
    chunk: int = 512,
    stop_tokens: frozenset[int] = frozenset(),
    keep_logits: bool = False,
    on_tokens: OnTokens = lambda phase, tokens: None,
) -> Generation:
    """Feed ``prompt`` ``[1, n]`` in chunks, then append the likeliest token, again and again.

    Args:
        cache: an empty one of :func:`new_cache`.
        stop_tokens: each of them ends the text, as its last token.
    """
    device = model.device
    prompt = prompt.to(device)
    _reset_peak(device)
    start = time.perf_counter()
    for ids in prompt.split(chunk, dim=1):
        logits = _forward(model, ids, cache)
        _synchronize(device)
        on_tokens("prefill", ids.shape[1])
    prefilled = time.perf_counter()
    tokens: list[int] = []
    kept: list[torch.Tensor] = []
    while len(tokens) < max_new_tokens and not stop_tokens.intersection(tokens[-1:]):
        if tokens:
            logits = _forward(model, prompt.new_tensor([tokens[-1:]]), cache)
        tokens.append(int(logits.argmax()))
        if keep_logits:
            kept.append(logits.float().cpu())
        on_tokens("decode", 1)
    return Generation(
        tokens,
        torch.stack(kept) if kept else None,
        prompt.shape[1],
        prefilled - start,
        time.perf_counter() - prefilled,
        _bytes_per_token(cache),
        device,
        _peak_bytes(device),
    )


def compare(run: Generation, other: Generation) -> Comparison:
    """Compare tokens, and logits as far as both runs have seen the same tokens."""
    pairs = zip(run.tokens, other.tokens, strict=False)
    difference = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if run.logits is None or other.logits is None:
        return Comparison(difference, 0.0)
    same_past = min(len(run.tokens), len(other.tokens)) if difference is None else difference + 1
    gap = (run.logits[:same_past] - other.logits[:same_past]).abs().max()
    return Comparison(difference, float(gap))


def _forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits ``[vocabulary]`` behind the last of ``ids`` ``[1, n]``."""
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes_per_token(cache: Any) -> int:
    if isinstance(cache, MsattnCache):
        return cache.bytes_per_token
    held = [getattr(layer, "idx_keys", None) for layer in cache.layers]
    held += [side for layer in cache.layers for side in (layer.keys, layer.values)]
    # Index keys have a token axis, too: the last but one of all three.
    return sum(t.nbytes // (t.shape[0] * t.shape[-2]) for t in held if t is not None)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int | None:
    """Of the device since the run began; on a CPU, where nothing resets it, of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # no Unix
        return None
    import sys

    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
