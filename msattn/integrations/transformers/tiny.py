"""A MiniMax-M3 of 4.9 million random parameters: real transformers code, seconds on a CPU."""

from __future__ import annotations

import json
from importlib.resources import files

import torch
from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig


def tiny_config() -> MiniMaxM3VLTextConfig:
    """4 layers (one dense, three sparse), 8 / 2 heads of 128, top-4 blocks, vocabulary 512."""
    text = files(__package__).joinpath("tiny_m3.json").read_text()
    return MiniMaxM3VLTextConfig.from_dict(json.loads(text))


def tiny_model(attn_implementation: str = "eager", *, seed: int = 0) -> MiniMaxM3VLForCausalLM:
    """The model in fp32, its weights a function of ``seed`` alone."""
    torch.manual_seed(seed)
    config = tiny_config()
    config._attn_implementation = attn_implementation
    model = MiniMaxM3VLForCausalLM(config).eval()
    # The grouped matmuls of the experts are several times slower than a loop on a CPU.
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms multiply by 1 + weight and start at 0: without a jitter, a missing 1 goes
            # unseen.
            if "norm" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def tiny_prompt(length: int, *, seed: int = 3) -> torch.Tensor:
    """Random token ids ``[1, length]``, without the padding and start tokens."""
    return torch.randint(2, 512, (1, length), generator=torch.Generator().manual_seed(seed))
