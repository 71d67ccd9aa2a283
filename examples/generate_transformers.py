"""A small MiniMax-M3 of transformers generates through msattn, its cache in NVFP4.

    python examples/generate_transformers.py

The model is made here, with random weights. A checkpoint works the same way:
``from_pretrained(folder, attn_implementation="msattn")``.
"""

from __future__ import annotations

from typing import Any

import torch

from msattn.integrations.transformers import MsattnCache, register
from msattn.integrations.transformers.tiny import tiny_model, tiny_prompt

PROMPT_TOKENS, NEW_TOKENS = 700, 8  # six blocks, of which a token selects four


def main() -> None:
    register()
    model = tiny_model("msattn")
    prompt = tiny_prompt(PROMPT_TOKENS)
    for kv_format in ("fp32", "nvfp4"):
        cache = MsattnCache(model.config, kv_format)
        tokens = generate(model, prompt, past_key_values=cache)
        print(f"msattn {kv_format:5}: {tokens}, {cache.bytes_per_token} bytes a token")
    model.set_attn_implementation("eager")
    print(f"eager       : {generate(model, prompt)}")
    print("fp32 keeps the model's numbers; NVFP4 rounds keys and values to 4 bits.")


def generate(model: Any, prompt: torch.Tensor, **kwargs: Any) -> list[int]:
    """New tokens, greedily."""
    mask = torch.ones_like(prompt)
    ids = model.generate(
        prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs
    )
    new: list[int] = ids[0, prompt.shape[1] :].tolist()
    return new


if __name__ == "__main__":
    main()
