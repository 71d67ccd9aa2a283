"""What a person sees: a line for each result as it comes, then the means and the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..testing.cost import Roofs
from .record import Record, ratio_to_best_peer
from .summary import Summary, losses, problems, summarize

LINE = (
    "{case:<44} {provider:<17} {us:>9} {spread:>19} {tflops:>8} {tbs:>8} {roof:>6} "
    "{host:>7} {ratio:>7}"
)
MAX_LISTED = 30


def print_header(
    console: Console,
    environment: Mapping[str, Any],
    roofs: Roofs,
    peers: Sequence[str],
    missing: Mapping[str, str],
) -> None:
    """Machine, versions and measured roofs."""
    facts = [f"{name} {value}" for name, value in environment.items() if value is not None]
    console.print(Text(" · ".join(facts)), soft_wrap=True)
    fp8 = f", e4m3 {roofs.matmul_fp8 * 1e-12:.0f}" if roofs.matmul_fp8 else ""
    console.print(
        f"measured roofs: copy {roofs.copy * 1e-12:.3g} TB/s, read {roofs.read * 1e-12:.3g} TB/s, "
        f"matmul {roofs.matmul * 1e-12:.3g}{fp8} TFLOP/s"
    )
    console.print(f"peers: {', '.join(peers) or 'none'}")
    for name, reason in missing.items():
        console.print(Text(f"  {name} is left out: {reason}", style="dim"), soft_wrap=True)
    columns = {
        "case": "case",
        "provider": "provider",
        "us": "us",
        "spread": "p20-p80",
        "tflops": "TFLOP/s",
        "tbs": "TB/s",
        "roof": "% roof",
        "host": "host us",
        "ratio": "vs peer",
    }
    console.print()
    line = LINE.format(**columns)
    console.print(Text(line, style="bold"), soft_wrap=True)


def print_case(console: Console, records: Sequence[Record]) -> None:
    """The results of one case, a line each."""
    for record in records:
        case = " ".join(x for x in record.key if x != "-")
        if record.us is None:
            if record.status != "unsupported" or record.mine:
                style = "red" if record.status != "unsupported" else "dim"
                text = f"{case:<44} {record.provider:<17} {record.status}: {record.note}"
                console.print(Text(text, style=style), soft_wrap=True)
            continue
        ratio = ratio_to_best_peer(record, records) if record.mine else None
        line = LINE.format(
            case=case,
            provider=record.provider,
            us=_us(record.us),
            spread=f"{_us(record.us_p20)}-{_us(record.us_p80)}",
            tflops=f"{record.tflops:.3g}",
            tbs=f"{record.tbs:.3g}",
            roof=f"{record.roof:.0%}",
            host="" if record.host_us is None else _us(record.host_us),
            ratio="" if ratio is None else f"{ratio:.2f}x",
        )
        note = f"  {record.note}" if record.note else ""
        style = "" if ratio is None or ratio >= 1 else "yellow"
        console.print(Text(line + note, style=style), soft_wrap=True)


def print_summary(console: Console, records: Sequence[Record], left_out: int) -> None:
    """Means, losses, and what went wrong."""
    summaries = summarize(records)
    if summaries:
        console.print()
        console.print(_means(summaries))
    _list_losses(console, records)
    wrong = problems(records)
    if wrong:
        console.print(f"[bold red]{len(wrong)} results are wrong or failed[/bold red]")
        for r in wrong[:MAX_LISTED]:
            console.print(Text(f"  {' '.join(r.key)} {r.provider}: {r.status}, {r.note}"))
    if left_out:
        console.print(f"[yellow]{left_out} cases were left out: the time limit was reached")


def _means(summaries: Sequence[Summary]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("op", "cases", "heads", "KV", "selection", "provider"):
        table.add_column(name, no_wrap=name != "provider")
    for name in ("mean us", "% roof", "peer / ours\nweighted", "peer / ours\ngeomean"):
        table.add_column(name, justify="right")
    for s in summaries:
        cases = f"{s.group} {s.cases}" + (f" of {s.cases + s.skipped}" if s.skipped else "")
        few = f" ({s.compared})" if s.compared not in (0, s.cases) else ""
        table.add_row(
            s.op,
            cases,
            s.heads,
            s.kv,
            s.pattern,
            s.provider,
            _us(s.mean_us),
            f"{s.mean_roof:.0%}",
            "-" if s.weighted_ratio is None else f"{s.weighted_ratio:.2f}x{few}",
            "-" if s.geomean_ratio is None else f"{s.geomean_ratio:.2f}x{few}",
        )
    return table


def _list_losses(console: Console, records: Sequence[Record]) -> None:
    lost = losses(records)
    compared = {r.key for r in records if not r.mine and not r.dense and r.us}
    if not compared:
        return
    if not lost:
        console.print(f"No losses: msattn is the fastest in all {len(compared)} compared cases.")
        return
    console.print(f"[bold]Losses: {len(lost)} of {len(compared)} compared cases[/bold]")
    for mine, peer in lost[:MAX_LISTED]:
        assert mine.us is not None and peer.us is not None
        case = " ".join(x for x in mine.key if x != "-")
        console.print(
            Text(
                f"  {case}: {_us(mine.us)} us, {peer.provider} {_us(peer.us)} us "
                f"({peer.us / mine.us:.2f}x)"
            ),
            soft_wrap=True,
        )


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
