"""``msattn bench``: options to cases, and results to screen, files and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench.ops import OPS, Msattn, Provider
from ..bench.peers import find_peers
from ..bench.record import Record, environment, gpu_state, read_results, write_results
from ..bench.report import print_case, print_header, print_summary
from ..bench.roofs import measure_roofs
from ..bench.runner import Unit, make_units, run_units
from ..bench.workloads import Workload, all_workloads, select_workloads
from ..config import MSAConfig
from ..dispatch import IMPLEMENTATION_NAMES
from ..kv_format import KV_FORMATS, KVFormat
from ..testing.cost import Roofs
from ..testing.selections import PATTERNS
from .doctor import available_devices, device_problem
from .errors import CliError

DEFAULT_KV = ("bf16", "fp8_e4m3", "nvfp4")
DEFAULT_HEADS = ("64/4",)
SECONDS, QUICK_SECONDS, CPU_SECONDS = 0.25, 0.1, 0.05  # replays of one provider and case


@dataclass(frozen=True)
class Options:
    """The command line; empty tuples take the defaults."""

    ops: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    peers: str = "auto"
    quick: bool = False
    limit: float | None = None
    device: str | None = None
    out: Path | None = None
    plot: bool = False
    list_cases: bool = False
    earlier: tuple[str, ...] = ()  # results to report again
    note: str = ""  # kept with the results


def run(options: Options) -> int:
    """Returns 1 when a result of msattn's is wrong or failed, else 0."""
    if options.list_cases:
        return _print_cases(options)
    if options.earlier:
        return _report_again(options)
    device = _device(options.device)
    units = _units(options, device)
    providers: list[Provider] = [Msattn(impl) for impl in _impls(options.impls)]
    peers, missing = find_peers() if options.peers == "auto" else ([], {})
    if options.plot:
        _require_matplotlib()
    console = _console()
    roofs = measure_roofs(device)
    note = {"note": options.note} if options.note else {}
    header: dict[str, Any] = note | environment(device) | {"roofs": asdict(roofs)}
    facts = {k: v for k, v in header.items() if k != "roofs"}
    print_header(console, facts, roofs, [peer.name for peer in peers], missing)
    records: list[Record] = []
    done, lost = 0, ""
    seconds = CPU_SECONDS if device.type == "cpu" else QUICK_SECONDS if options.quick else SECONDS
    measured = run_units(
        units, [*providers, *peers], roofs, device, seconds=seconds, limit=options.limit
    )
    try:
        with _progress() as progress:
            bar = progress.add_task("cases", total=len(units))
            for _, found in measured:
                progress.advance(bar)
                print_case(console, found)
                records += found
                done += 1
                if options.out is not None:  # each time: a run that is cut short leaves its part
                    write_results(options.out, header, records)
    except torch.AcceleratorError as error:  # the device is lost to this process
        lost = str(units[done])
        console.print(f"[bold red]{lost}: {str(error).splitlines()[0]}[/bold red]")
    print_summary(console, records, len(units) - done)
    if options.out is not None:
        header["state_after"] = gpu_state(device) if device.type == "cuda" else {}
        _leave_results(options, console, header, records)
    return int(bool(lost) or any(r.mine and r.status in ("wrong", "failed") for r in records))


def _report_again(options: Options) -> int:
    """Earlier runs in one report, one CSV and one set of pictures."""
    header: dict[str, Any] = {}
    records: list[Record] = []
    for name in options.earlier:
        try:
            header, found = read_results(Path(name))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CliError(
                f"--from: {name} is no results.jsonl of this version ({error})"
            ) from None
        records += found
    console = _console()
    print_summary(console, records, 0)
    if options.out is not None:
        _leave_results(options, console, header, records)
    return 0


def _leave_results(
    options: Options, console: Console, header: dict[str, Any], records: Sequence[Record]
) -> None:
    assert options.out is not None
    write_results(options.out, header, records)
    console.print(f"results: {options.out / 'results.jsonl'}, {options.out / 'results.csv'}")
    if options.plot:
        from ..bench.plots import draw_plots

        roofs = Roofs(**header["roofs"])
        pictures = draw_plots(options.out, str(header["device"]), records, roofs)
        console.print(f"pictures: {len(pictures)} PNG in {options.out}")


def _units(options: Options, device: torch.device) -> list[Unit]:
    ops = [name for name in OPS if name in _among("--op", options.ops, OPS)]
    patterns = _among("--pattern", options.patterns or ("realistic",), PATTERNS)
    workloads = select_workloads(options.cases, quick=options.quick, device_type=device.type)
    if not workloads:
        raise CliError(
            f"--case: no case matches {' '.join(options.cases)!r}; msattn bench --list names them"
        )
    configs = [_config(text) for text in options.heads or DEFAULT_HEADS]
    units = make_units(ops, workloads, configs, _formats(options.kv), patterns)
    if not units:
        raise CliError(
            "nothing to measure: "
            f"{', '.join(ops)} with --kv {', '.join(options.kv or DEFAULT_KV)} "
            f"and --pattern {', '.join(patterns)}"
        )
    return units


def _formats(names: Sequence[str]) -> list[KVFormat]:
    try:
        return list(
            dict.fromkeys(KVFormat.parse(name, name="--kv") for name in names or DEFAULT_KV)
        )
    except ValueError:
        _among("--kv", names, KV_FORMATS)
        raise


def _impls(names: Sequence[str]) -> list[str]:
    return _among("--impl", names or ("auto",), ("auto", *IMPLEMENTATION_NAMES))


def _config(text: str) -> MSAConfig:
    """``64/4``: query heads and KV heads; index heads are the KV heads."""
    queries, slash, kv = text.partition("/")
    if not (slash and queries.isdecimal() and kv.isdecimal()):
        raise CliError(f"--heads: expected query heads / KV heads, as 64/4, got {text!r}")
    try:
        return MSAConfig(int(queries), int(kv), int(kv))
    except ValueError as error:
        raise CliError(f"--heads {text}: {error}") from None


def _among(option: str, given: Sequence[str], known: Sequence[str] | dict[str, Any]) -> list[str]:
    """``given``, or everything known where nothing is given."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise CliError(f"{option}: expected {', '.join(known)}; got {', '.join(unknown)}")
    return list(dict.fromkeys(given or known))


def _device(name: str | None) -> torch.device:
    devices = available_devices()
    if name is not None and name not in devices:
        raise CliError(device_problem(name, devices))
    name = name or devices[-1 if len(devices) == 1 else 1]
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def _print_cases(options: Options) -> int:
    """The names that --case can match, with their weights."""
    workloads = all_workloads()
    if options.cases:
        workloads = select_workloads(options.cases, quick=False, device_type="cpu")
    for workload in workloads:
        print(f"{workload.name:<40} {_describe(workload)}")
    return 0


def _describe(workload: Workload) -> str:
    requests, tokens = len(workload.seq_lens), sum(workload.query_lens)
    what = f"{requests} request{'s' * (requests > 1)}, {tokens:,} tokens, KV {workload.context:,}"
    return what + ("" if workload.weight is None else f", weight {workload.weight:g}")


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CliError(f"--plot needs matplotlib: pip install 'msattn[bench]' ({error})") from None


def _console() -> Console:
    """A pipe or a log file has no width: the table of means gets the one that it needs."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # a log file gets no bars
    )
