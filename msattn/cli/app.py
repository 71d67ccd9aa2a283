"""The commands and their options; each imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from .. import __version__
from .errors import CliError

app = typer.Typer(
    help="MiniMax Sparse Attention: what serves it here, and a MiniMax-M3 that runs through it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cuda where there is one")
]


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code. A wrong use is one sentence on stderr."""
    command = typer.main.get_command(app)
    try:
        return int(
            command.main(arguments or ["--help"], prog_name="msattn", standalone_mode=False) or 0
        )
    except typer.TyperException as error:
        message = error.format_message()
    except CliError as error:
        message = str(error)
    # What the library cannot serve here and what does not fit are no faults of this program.
    except (NotImplementedError, torch.OutOfMemoryError) as error:
        message = str(error).splitlines()[0]
    print(f"error: {message}", file=sys.stderr)
    return 2


def _print_version(asked: bool) -> None:
    if asked:
        print(f"msattn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """What goes before a command."""


@app.command("doctor")
def doctor_command(
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Say what is installed, what serves each stage and KV format, and why not the others."""
    from . import doctor
    from .tables import print_sections

    return doctor.run(device, as_json, print_sections)


@app.command("generate")
def generate_command(
    model: Annotated[
        str, typer.Option(help='"tiny" (random weights), or the folder of a MiniMax-M3 checkpoint.')
    ] = "tiny",
    prompt: Annotated[
        str | None, typer.Option(help="A text. For tiny, its bytes are the tokens.")
    ] = None,
    prompt_ids: Annotated[str | None, typer.Option(help='Token ids, as "5,17,300".')] = None,
    prompt_length: Annotated[
        int | None, typer.Option(min=1, help="A prompt of random tokens.", show_default="1100")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="0 only reads the prompt.")] = 32,
    attn: Annotated[
        Literal["msattn", "eager", "sdpa"], typer.Option(help="Who computes the attention.")
    ] = "msattn",
    kv_format: Annotated[
        str | None,
        typer.Option(
            help="How msattn stores K and V: bf16, fp16, fp8_e4m3, fp8_e5m2, nvfp4, fp32.",
            show_default="bf16",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run transformers' eager attention too, and compare.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the blocks that each token selects (.png .svg .pdf).")
    ] = None,
    plot_layer: Annotated[
        int | None, typer.Option(help="Layer to draw.", show_default="the last sparse one")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto is the checkpoint's, float32 for tiny."),
    ] = "auto",
    device: Device = None,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of a prefill step.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of tiny's weights and random prompts.")] = 0,
) -> int:
    """Continue a prompt with a MiniMax-M3: transformers' model, msattn's attention and cache."""
    _require_transformers()
    from . import generate

    return generate.run(
        generate.Options(
            model=model,
            prompt=prompt,
            prompt_ids=prompt_ids,
            prompt_length=prompt_length,
            max_new_tokens=max_new_tokens,
            attn=attn,
            kv_format=kv_format,
            compare=compare,
            plot=plot,
            plot_layer=plot_layer,
            dtype=dtype,
            device=device,
            chunk=chunk,
            seed=seed,
        )
    )


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the picture; made if missing.")] = Path(
        "out"
    ),
    device: Device = None,
) -> int:
    """Run the tiny MiniMax-M3 with every KV format, beside transformers' eager attention."""
    _require_transformers()
    from . import demo

    return demo.run(out, device)


@app.command("bench")
def bench_command(
    op: Annotated[
        str, typer.Option(help="store, scores, select, index, attend, merge, layer; default all.")
    ] = "",
    case: Annotated[
        str, typer.Option(help="Globs over the names that --list shows, as 'step/*,chunk/8192@*'.")
    ] = "",
    kv: Annotated[str, typer.Option(help="KV formats.", show_default="bf16,fp8_e4m3,nvfp4")] = "",
    heads: Annotated[str, typer.Option(help="Query heads / KV heads.", show_default="64/4")] = "",
    pattern: Annotated[
        str, typer.Option(help="Selections: realistic, uniform, recent.", show_default="realistic")
    ] = "",
    impl: Annotated[
        str, typer.Option(help="auto, reference, triton, hopper.", show_default="auto")
    ] = "",
    peers: Annotated[
        Literal["auto", "none"],
        typer.Option(help="Measure FlashInfer, vLLM and torch's SDPA too, where they import."),
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, fewer replays.")] = False,
    limit: Annotated[
        float | None, typer.Option(min=0, help="Start no case after this many seconds.")
    ] = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl and results.csv.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw PNGs into --out.")] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
    note: Annotated[
        str, typer.Option(help="Kept with the results: a commit, where there is no checkout.")
    ] = "",
    earlier: Annotated[
        str, typer.Option("--from", help="Measure nothing: report earlier results.jsonl files.")
    ] = "",
) -> int:
    """Measure every stage and the layer, beside what else is installed. Lists are comma-separated.

    Results are checked against the reference first; one that is wrong is reported and not timed.
    """
    if plot and out is None:
        raise CliError("--plot draws into the folder of --out, which is missing")
    from . import bench

    return bench.run(
        bench.Options(
            ops=_listed(op),
            cases=_listed(case),
            kv=_listed(kv),
            heads=_listed(heads),
            patterns=_listed(pattern),
            impls=_listed(impl),
            peers=peers,
            quick=quick,
            limit=limit,
            device=device,
            out=out,
            plot=plot,
            list_cases=list_cases,
            earlier=_listed(earlier),
            note=note,
        )
    )


@app.command("serve-check")
def serve_check_command(
    model: Annotated[
        str, typer.Argument(help='"tiny", or a folder with the config.json of a MiniMax-M3.')
    ] = "tiny",
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Ask about another machine: cpu, h200, b200, a100, rtx4090, ..., or sm_90.",
            show_default="this machine's",
        ),
    ] = None,
    kv_format: Annotated[
        str, typer.Option(help="KV formats, comma-separated.", show_default="all")
    ] = "",
    index_dtype: Annotated[str, typer.Option(help="Of the index keys: bf16, fp16, fp8.")] = "bf16",
    memory: Annotated[str, typer.Option(help="For the caches of one rank.")] = "80GiB",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Say what each engine would use for a model, why not msattn, and how many tokens fit."""
    from . import serve_check
    from .tables import print_sections

    return serve_check.run(
        serve_check.Options(
            model=model,
            gpu=gpu,
            kv_formats=_listed(kv_format),
            index_dtype=index_dtype,
            memory=memory,
            tp_size=tp,
            as_json=as_json,
        ),
        print_sections,
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _require_transformers() -> None:
    try:
        from transformers import MiniMaxM3VLForCausalLM  # noqa: F401
    except ImportError as error:
        raise CliError(
            f"this command needs transformers 5.16.1 or newer: pip install 'msattn[transformers]' "
            f"({error})"
        ) from None
