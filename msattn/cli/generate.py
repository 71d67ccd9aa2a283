"""``msattn generate``: continue a prompt, optionally beside eager attention and with a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..kv_format import KVFormat
from .errors import CliError
from .model import Loaded, choose_device, load, read_prompt
from .picture import Selection, check_can_draw, draw
from .run import Generation, compare, generate, new_cache
from .tables import agreement, generation_table, new_console, progress_bar

DEFAULT_PROMPT_LENGTH = 1100  # nine blocks, of which the tiny model selects four
DEFAULT_KV_FORMAT = "bf16"


@dataclass(frozen=True)
class Options:
    """The command's options, as they were given; None where one was not."""

    model: str
    prompt: str | None
    prompt_ids: str | None
    prompt_length: int | None
    max_new_tokens: int
    attn: str
    kv_format: str | None
    compare: bool
    plot: Path | None
    plot_layer: int | None
    dtype: str
    device: str | None
    chunk: int
    seed: int


@dataclass(frozen=True, eq=False)
class Run:
    """One pass over the prompt, and the cache that it left behind."""

    attn: str
    kv_format: str
    generation: Generation
    cache: Any


def run(options: Options) -> int:
    """The command; returns its exit code."""
    _check(options)
    loaded = load(
        options.model,
        attn=options.attn,
        dtype=options.dtype,
        device=choose_device(options.device),
        seed=options.seed,
    )
    prompt = _prompt(options, loaded)
    layer = _plot_layer(options, loaded)
    runs = [_run(options, loaded, prompt, options.attn)]
    ours = runs[0]
    print(_text(loaded, ours.generation.tokens))
    if options.compare:
        loaded.model.set_attn_implementation("eager")
        runs.append(_run(options, loaded, prompt, "eager"))
    console = new_console()
    console.print(generation_table([(r.attn, r.kv_format, r.generation) for r in runs]))
    if options.compare:
        eager = runs[1].generation
        console.print(
            agreement(compare(ours.generation, eager), ours.generation, eager), soft_wrap=True
        )
    if options.plot is not None and layer is not None:
        draw(Selection(ours.cache.selection(layer), layer, loaded.title), options.plot)
        console.print(
            f"Wrote {options.plot}: the blocks that layer {layer} selected.", soft_wrap=True
        )
    return 0


def _check(options: Options) -> None:
    """Refuse options that contradict one another, before anything takes time."""
    prompts = {
        "--prompt": options.prompt,
        "--prompt-ids": options.prompt_ids,
        "--prompt-length": options.prompt_length,
    }
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) > 1:
        raise CliError(f"give one of {', '.join(prompts)}, not {' and '.join(given)}")
    try:
        KVFormat.parse(options.kv_format or DEFAULT_KV_FORMAT, name="--kv-format")
    except ValueError as error:
        raise CliError(str(error)) from None
    only_msattn = {
        "--kv-format": options.kv_format is not None,
        "--compare": options.compare,
        "--plot": options.plot is not None,
    }
    if options.attn != "msattn":
        for name, is_given in only_msattn.items():
            if is_given:
                raise CliError(f"{name} needs --attn msattn, got --attn {options.attn}")
    if options.compare and options.max_new_tokens == 0:
        raise CliError("--compare needs a token to compare, got --max-new-tokens 0")
    if options.plot_layer is not None and options.plot is None:
        raise CliError("--plot-layer needs --plot")
    if options.plot is not None:
        check_can_draw(options.plot)


def _prompt(options: Options, loaded: Loaded) -> torch.Tensor:
    length = options.prompt_length
    if options.prompt is None and options.prompt_ids is None and length is None:
        length = DEFAULT_PROMPT_LENGTH
    return read_prompt(
        loaded, text=options.prompt, ids=options.prompt_ids, length=length, seed=options.seed
    )


def _plot_layer(options: Options, loaded: Loaded) -> int | None:
    """The layer to draw, if any; checked before the model runs."""
    if options.plot is None:
        return None
    sparse = loaded.sparse_layers
    if not sparse:
        raise CliError(f"--plot: no layer of {loaded.name} selects blocks")
    if options.plot_layer is None:
        return sparse[-1]
    if options.plot_layer not in sparse:
        layers = ", ".join(map(str, sparse))
        raise CliError(
            f"--plot-layer: expected a layer that selects blocks ({layers}), "
            f"got {options.plot_layer}"
        )
    return options.plot_layer


def _run(options: Options, loaded: Loaded, prompt: torch.Tensor, attn: str) -> Run:
    kv_format = loaded.native_format
    if attn == "msattn":
        kv_format = KVFormat.parse(options.kv_format or DEFAULT_KV_FORMAT).name
    cache = new_cache(loaded.model, attn, kv_format, record_selection=options.plot is not None)
    with progress_bar(attn, prompt.shape[1], options.max_new_tokens) as on_tokens:
        generation = generate(
            loaded.model,
            prompt,
            cache,
            max_new_tokens=options.max_new_tokens,
            chunk=options.chunk,
            stop_tokens=loaded.stop_tokens,
            keep_logits=options.compare,
            on_tokens=on_tokens,
        )
    return Run(attn, kv_format, generation, cache)


def _text(loaded: Loaded, tokens: list[int]) -> str:
    """The new tokens as text, or as ids where the model has no tokenizer."""
    text = loaded.decode(tokens)
    return ",".join(map(str, tokens)) if text is None else text
