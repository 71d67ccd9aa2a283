"""Index keys and queries of known kinds: what a bound on scores is worth depends on them."""

from __future__ import annotations

from collections.abc import Callable

import torch

RUN = 512  # neighbouring tokens of one topic
TOPICS = 64
SINKS = 4  # first tokens of a request, which every query finds

Kind = Callable[[int, int, int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
"""Keys ``[n, Di]`` of a request and queries ``[rows, Di]``, fp32, of (n, rows, Di, generator)."""


def _random(
    n: int, rows: int, dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normally distributed: nothing to find, and nothing stands out."""
    return torch.randn(n, dim, generator=generator), torch.randn(rows, dim, generator=generator)


def _clustered(
    n: int, rows: int, dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of tokens share a topic, queries ask for one, and the first keys are sinks."""
    topics = torch.randn(TOPICS, dim, generator=generator)
    topic = torch.randint(TOPICS, (-(-n // RUN),), generator=generator).repeat_interleave(RUN)[:n]
    keys = 0.8 * topics[topic] + 0.6 * torch.randn(n, dim, generator=generator)
    asked = topics[topic[torch.randint(n, (rows,), generator=generator)]]
    queries = asked + 0.7 * torch.randn(rows, dim, generator=generator)
    keys[:SINKS] = 2.0 * queries.mean(0)
    return keys, queries


def _outliers(
    n: int, rows: int, dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sixteenth of the channels is eight times as wide, and tokens differ in strength."""
    keys, queries = _random(n, rows, dim, generator)
    keys *= (0.3 * torch.randn(n, 1, generator=generator)).exp()
    wide = torch.ones(dim)
    wide[:: 16 if dim > 16 else dim] = 8.0
    return keys * wide, queries / wide.sqrt()


def _adversarial(
    n: int, rows: int, dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One key with noise that 8 bits cannot hold: no bound tells any two blocks apart."""
    key, queries = _random(1, rows, dim, generator)
    return key + 2e-3 * torch.randn(n, dim, generator=generator), queries


KINDS: dict[str, Kind] = {
    "random": _random,
    "clustered": _clustered,
    "outliers": _outliers,
    "adversarial": _adversarial,
}
