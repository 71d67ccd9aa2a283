"""What the commands print: progress bars, tables and sentences, through rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .doctor import MISSING, NOBODY, Section

if TYPE_CHECKING:  # importing it takes transformers, which the doctor must do without
    from .run import Comparison, Generation, OnTokens


def new_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """For results, or for progress on stderr; numbers keep the colour of their table."""
    return Console(stderr=stderr, highlight=False, width=width)


@contextmanager
def progress_bar(label: str, prompt_tokens: int, new_tokens: int) -> Iterator[OnTokens]:
    """Bars over the prompt's tokens and the new ones, on stderr while the body runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    console = new_console(stderr=True)
    hidden = not console.is_terminal  # a log file gets no bars
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        bars = {
            phase: progress.add_task(f"{label} {phase}", total=total)
            for phase, total in (("prefill", prompt_tokens), ("decode", new_tokens))
        }
        yield lambda phase, tokens: progress.advance(bars[phase], tokens)


def generation_table(runs: Sequence[tuple[str, str, Generation]]) -> Table:
    """Columns of ``(attention, KV format, run)``, a line for each fact."""
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    for _ in runs:
        table.add_column(justify="right")
    holder = "process" if runs[0][2].device.type == "cpu" else "device"
    lines = {
        "attention": [attn for attn, _, _ in runs],
        "KV format": [kv_format for _, kv_format, _ in runs],
        "prompt tokens": [f"{run.prompt_tokens:,}" for _, _, run in runs],
        "new tokens": [f"{len(run.tokens):,}" for _, _, run in runs],
        "prefill tokens/s": [f"{run.prefill_rate:,.0f}" for _, _, run in runs],
        "decode tokens/s": [rate(run.decode_rate) for _, _, run in runs],
        "cache bytes per token": [f"{run.bytes_per_token:,}" for _, _, run in runs],
        f"peak memory of the {holder}": [_mebibytes(run.peak_bytes) for _, _, run in runs],
    }
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.1f}"


def agreement(comparison: Comparison, run: Generation, other: Generation) -> str:
    """Whether the tokens are those of eager attention, in a sentence."""
    first, gap = comparison.first_difference, comparison.largest_logit_difference
    if first is None:
        return (
            f"The tokens agree with eager attention: all {len(run.tokens)} are equal. "
            f"Largest logit difference: {gap:.1e}."
        )
    return (
        f"The tokens differ from eager attention's at no. {first + 1} of {len(run.tokens)}: "
        f"{run.tokens[first]} instead of {other.tokens[first]}. "
        f"Largest logit difference up to there: {gap:.1e}."
    )


def formats_table(
    eager: Generation, rows: Sequence[tuple[str, Generation, Comparison]], eager_format: str
) -> Table:
    """Every KV format, ``(name, run, comparison)``, below the eager run."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("attention")
    table.add_column("KV format", style="bold")
    table.add_column("bytes/\ntoken", justify="right")
    table.add_column(f"{len(eager.tokens)} new\ntokens", no_wrap=True)
    for name in ("largest\nlogit gap", "prefill\ntok/s", "decode\ntok/s"):
        table.add_column(name, justify="right")
    _add_format(table, "eager", eager_format, eager, "", "")
    for name, run, comparison in rows:
        first = comparison.first_difference
        tokens = f"[yellow]differ from no. {first + 1}" if first is not None else "[green]all equal"
        gap = f"{comparison.largest_logit_difference:.1e}"
        _add_format(table, "msattn", name, run, tokens, gap)
    return table


def _add_format(
    table: Table, attn: str, kv_format: str, run: Generation, tokens: str, gap: str
) -> None:
    rates = f"{run.prefill_rate:,.0f}", rate(run.decode_rate)
    table.add_row(attn, kv_format, f"{run.bytes_per_token:,}", tokens, gap, *rates)


def print_sections(parts: Sequence[Section]) -> None:
    """The doctor's report."""
    console = new_console()
    for part in parts:
        console.print(f"[bold]{part.title}[/bold]")
        table = Padding(_section_table(part), (0, 0, 0, 2), expand=False)
        # rich would cut words off in a narrow terminal, or a pipe, which it takes for one.
        narrowest = Measurement.get(console, console.options.update(width=1000), table).minimum
        new_console(width=max(console.width, narrowest)).print(table)
        if part.note:
            console.print(Padding(f"[dim]{part.note}[/dim]", (0, 0, 0, 2)))
        console.print()


def _section_table(part: Section) -> Table:
    """Sentences go on in the next line; columns of words keep their width."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(part.header))
    for title, *cells in zip_longest(part.header, *part.rows, fillvalue=""):
        table.add_column(title, no_wrap=not any(" " in cell for cell in cells), overflow="fold")
    for row in part.rows:
        table.add_row(*(_cell(cell) for cell in row))
    return table


def _cell(cell: str) -> Text:
    """What is missing stands out; brackets in a reason are no markup."""
    return Text(cell, style="yellow" if cell in (NOBODY, MISSING) else "")


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f} MiB"
