"""Pictures of a run: bars beside the peers, time against context with the roof's line, and all
stages under the measured roofs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..testing.cost import Roofs
from .record import Record

Panel = tuple[str, str, str, str]  # op, heads, KV format, pattern
SERIES = re.compile(r"(?P<series>(?:step|chunk)/\d+|tiny/[a-z]+)[x@]\d+K?")
COLORS = {
    "msattn": "#1f77b4",
    "msattn:triton": "#1f77b4",
    "msattn:hopper": "#17becf",
    "msattn:reference": "#9ecae1",
    "vllm": "#ff7f0e",
    "flashinfer": "#2ca02c",
    "flashinfer:cake": "#98df8a",
    "flashinfer:union": "#5fa55a",
    "dense sdpa": "#7f7f7f",
}
MARKERS = {"attend": "o", "index": "s", "scores": "D", "layer": "^"}
"""Of what multiplies."""


def draw_plots(folder: Path, title: str, records: Sequence[Record], roofs: Roofs) -> list[Path]:
    """One PNG of bars for each op and group of cases, one of lines for each series of contexts, and
    the roofline."""
    import matplotlib

    matplotlib.use("Agg")
    timed = [r for r in records if r.us]
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for panel in dict.fromkeys(map(_panel, timed)):
        mine = [r for r in timed if _panel(r) == panel]
        for group in dict.fromkeys(r.group for r in mine):
            bars = [r for r in mine if r.group == group]
            out.append(_bars(folder / f"{_stem(panel)}_{group}.png", f"{title}\n{group}", bars))
        for series in dict.fromkeys(s for r in mine if (s := _series(r))):
            line = [r for r in mine if _series(r) == series]
            if len({r.context for r in line}) > 1:
                name = f"{_stem(panel)}_{series.replace('/', '_')}_by_context.png"
                out.append(_lines(folder / name, f"{title}\n{series}", line))
    under = [r for r in timed if r.op in MARKERS and r.tflops and r.bytes and not r.dense]
    if under and roofs.read:
        out.append(_roofline(folder / "roofline.png", title, under, roofs))
    return out


def _bars(path: Path, title: str, records: Sequence[Record]) -> Path:
    from matplotlib import pyplot

    cases = list(dict.fromkeys(r.case for r in records))
    providers = list(dict.fromkeys(r.provider for r in records))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.9 * len(cases) + 2), 4.5))
    width = 0.8 / len(providers)
    for number, provider in enumerate(providers):
        mine = {r.case: r for r in records if r.provider == provider}
        at = [i + (number + 0.5) * width - 0.4 for i, c in enumerate(cases) if c in mine]
        found = [mine[c] for c in cases if c in mine]
        times = [r.us or 0.0 for r in found]
        below = [t - (r.us_p20 or t) for t, r in zip(times, found, strict=True)]
        above = [(r.us_p80 or t) - t for t, r in zip(times, found, strict=True)]
        spread = [[max(0.0, x) for x in side] for side in (below, above)]
        axes.bar(at, times, width, yerr=spread, label=provider, color=COLORS.get(provider))
    for i, case in enumerate(cases):
        floors = [r.floor_us for r in records if r.case == case and r.floor_us and not r.dense]
        if floors:
            label = "measured roof" if i == 0 else None
            axes.hlines(min(floors), i - 0.42, i + 0.42, colors="black", lw=1.2, label=label)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5 * min(r.floor_us or r.us or 1.0 for r in records))
    axes.set_ylabel("us (median, p20 to p80)")
    labels = [case.split("/", 1)[1] for case in cases]
    axes.set_xticks(range(len(cases)), labels, rotation=40, ha="right")
    return _finish(path, title, records[0], figure, axes)


def _lines(path: Path, title: str, records: Sequence[Record]) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4.5))
    for provider in dict.fromkeys(r.provider for r in records):
        mine = sorted((r for r in records if r.provider == provider), key=lambda r: r.context)
        times = [r.us or 0.0 for r in mine]
        color = COLORS.get(provider)
        axes.plot([r.context for r in mine], times, "o-", label=provider, color=color)
    floors = {r.context: r.floor_us for r in records if r.floor_us and not r.dense}
    contexts = sorted(floors)
    axes.plot(contexts, [floors[c] for c in contexts], "k--", lw=1.2, label="measured roof")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{c / 1024:.0f}K" for c in contexts])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("us (median)")
    return _finish(path, title, records[0], figure, axes)


def _roofline(path: Path, title: str, records: Sequence[Record], roofs: Roofs) -> Path:
    """Useful FLOP/s over useful FLOPs for each byte that a stage cannot do without."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 5.0))
    lines: dict[str, object] = {}
    for provider in dict.fromkeys(r.provider for r in records):
        for op in dict.fromkeys(r.op for r in records):
            mine = [r for r in records if (r.provider, r.op) == (provider, op)]
            x = [r.flops / r.bytes for r in mine]
            y = [r.tflops or 0.0 for r in mine]
            color, size = COLORS.get(provider), 30 if mine and mine[0].mine else 14
            dots = axes.scatter(x, y, size, color, marker=MARKERS[op], alpha=0.75, linewidths=0)
            lines.setdefault(provider, dots)
    intensities = [r.flops / r.bytes for r in records]
    ends = [min(intensities) / 2, 2 * max(intensities)]
    for name, peak, style in (
        ("16 bit products", roofs.matmul, "-"),
        ("e4m3 products", roofs.matmul_fp8, ":"),
    ):
        if peak:
            bend = [ends[0], peak / roofs.read, ends[1]]
            roof = [min(peak, i * roofs.read) / 1e12 for i in bend]
            (line,) = axes.plot(bend, roof, "k" + style, lw=1.2)
            lines[f"measured roof, {name}"] = line
    for op, marker in MARKERS.items():
        if any(r.op == op for r in records):
            lines[op] = axes.scatter([], [], 30, "black", marker=marker, linewidths=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("useful FLOPs for each byte that has to move")
    axes.set_ylabel("useful TFLOP/s")
    axes.set_title(f"{title}: all cases", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(lines.values(), lines.keys(), fontsize=7, loc="lower right")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _finish(path: Path, title: str, record: Record, figure: object, axes: object) -> Path:
    from matplotlib import pyplot

    what = " ".join(x for x in _panel(record) if x != "-")
    axes.set_title(f"{title}: {what}", fontsize=9)  # type: ignore[attr-defined]
    axes.grid(axis="y", alpha=0.3)  # type: ignore[attr-defined]
    axes.legend(fontsize=8)  # type: ignore[attr-defined]
    figure.savefig(path, dpi=130, bbox_inches="tight")  # type: ignore[attr-defined]
    pyplot.close(figure)
    return path


def _panel(record: Record) -> Panel:
    return record.op, record.heads, record.kv, record.pattern


def _stem(panel: Panel) -> str:
    return "_".join(x.replace("/", "x") for x in panel if x != "-")


def _series(record: Record) -> str | None:
    """``chunk/8192`` of ``chunk/8192@32K``, ``step/64`` of ``step/64x32K``."""
    found = SERIES.fullmatch(record.case)
    return found["series"] if found else None
