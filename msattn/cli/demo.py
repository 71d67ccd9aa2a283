"""``msattn demo``: the tiny MiniMax-M3 through every KV format, beside eager attention."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ..integrations.transformers.tiny import tiny_prompt
from .errors import CliError
from .model import TINY, Loaded, choose_device, load
from .picture import Selection, check_can_draw, draw
from .run import Comparison, Generation, compare, generate, new_cache
from .tables import formats_table, new_console, progress_bar

EXACT = "fp32"  # stores the tiny model's numbers as they are, so its tokens must be eager's
FORMATS = (EXACT, "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")
PROMPT_TOKENS, NEW_TOKENS = 1100, 32
PICTURE_TOKENS = 6000  # 47 blocks: enough for stripes to show, and seconds on two cores
EXPLANATION = (
    f"{EXACT} keeps the model's own numbers, so its tokens must be those of eager attention; the "
    "other formats round keys and values, which can flip a token of a model with random weights. "
    "The logit gap counts up to the first token that differs."
)


def run(out: Path, device: str | None) -> int:
    """The command; returns its exit code: 1 if the exact row is not."""
    picture = _picture_path(out)
    loaded = load(TINY, attn="eager", dtype="float32", device=choose_device(device), seed=0)
    prompt = tiny_prompt(PROMPT_TOKENS)
    eager = _generate(loaded, prompt, "eager", loaded.native_format)
    loaded.model.set_attn_implementation("msattn")
    rows: list[tuple[str, Generation, Comparison]] = []
    for kv_format in FORMATS:
        generation = _generate(loaded, prompt, "msattn", kv_format)
        rows.append((kv_format, generation, compare(generation, eager)))
    console = new_console()
    console.print(formats_table(eager, rows, loaded.native_format))
    console.print(EXPLANATION)
    layer = _draw_selection(loaded, picture)
    console.print(
        f"Wrote {picture}: what layer {layer} selects over {PICTURE_TOKENS:,} tokens.",
        soft_wrap=True,
    )
    if not rows[0][2].equal:
        print(f"error: {EXACT} gave other tokens than eager attention", file=sys.stderr)
        return 1
    return 0


def _picture_path(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"--out: cannot make the folder {out}: {error.strerror}") from None
    path = out / "selection.png"
    check_can_draw(path)
    return path


def _generate(loaded: Loaded, prompt: torch.Tensor, attn: str, kv_format: str) -> Generation:
    label = attn if attn == "eager" else f"{attn} {kv_format}"
    with progress_bar(label, PROMPT_TOKENS, NEW_TOKENS) as on_tokens:
        return generate(
            loaded.model,
            prompt,
            new_cache(loaded.model, attn, kv_format),
            max_new_tokens=NEW_TOKENS,
            keep_logits=True,
            on_tokens=on_tokens,
        )


def _draw_selection(loaded: Loaded, path: Path) -> int:
    """Draw the last sparse layer's selection, of a longer prompt than the comparison needs."""
    cache = new_cache(loaded.model, "msattn", EXACT, record_selection=True)
    with progress_bar("picture", PICTURE_TOKENS, 0) as on_tokens:
        generate(
            loaded.model,
            tiny_prompt(PICTURE_TOKENS),
            cache,
            max_new_tokens=0,
            on_tokens=on_tokens,
        )
    layer = loaded.sparse_layers[-1]
    draw(Selection(cache.selection(layer), layer, loaded.title), path)
    return layer
