"""What has no backward pass says so."""

from __future__ import annotations

from typing import Any

import torch


def without_backward(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``out``, computed from ``q`` without autograd; a backward pass through it raises."""
    return _WithoutBackward.apply(out, q)  # type: ignore[no-any-return, no-untyped-call]


class _WithoutBackward(torch.autograd.Function):
    """Identity that refuses a backward pass, instead of gradients that silently miss a part."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            'msattn has no backward pass; train with attn_implementation="eager" or "sdpa"'
        )
