"""How long a call takes: medians over replays of a CUDA graph, or of a clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

WARM_SECONDS = 0.02  # of replays before the first that counts: the clocks rise meanwhile
L2_MULTIPLE = 6.0  # bytes that pass between two uses of an input, in sizes of the L2
CPU_CACHE = 32 << 20
MIN_REPLAYS, MAX_REPLAYS = 9, 60


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median, and where a fifth is faster and a fifth slower."""

    median: float
    p20: float
    p80: float
    method: str  # "graph", "events" or "clock"


def cold_bytes(device: torch.device) -> int:
    """Bytes that must pass before an input is used again, for the L2 to have forgotten it."""
    if device.type != "cuda":
        return CPU_CACHE
    return int(L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size)


def sets_needed(bytes_per_call: float, device: torch.device, least: int, most: int) -> int:
    """How many input sets to rotate through, so that each is cold when it comes around."""
    return max(least, min(most, int(-(-cold_bytes(device) // max(1, int(bytes_per_call))))))


def time_calls(
    calls: Sequence[Call], device: torch.device, seconds: float = 0.25, *, capture: bool = True
) -> Timing:
    """Time of one of ``calls``, which do the same work on different inputs, one after the other.

    Args:
        calls: each writes an output of its own or of all; none may sync with the device.
        device: where they run.
        seconds: how long to measure, about.
        capture: time replays of a CUDA graph, else launches.
    """
    if device.type != "cuda":
        return _timing([_clock(call) for _ in range(_repeats(calls, seconds)) for call in calls], 1)
    for call in calls:  # compiles, and makes what a plan makes once for all layers of a step
        call()
    torch.cuda.synchronize(device)
    graph = _captured(calls, device) if capture and not _syncs(calls[-1], device) else None
    replay = graph.replay if graph is not None else lambda: [call() for call in calls]
    each = _warm(replay, device)
    count = max(MIN_REPLAYS, min(MAX_REPLAYS, int(seconds / each)))
    if each > 1.0:
        count = 3
    times = [_events(replay, device) for _ in range(count)]
    return _timing(times, len(calls), "graph" if graph is not None else "events")


def host_seconds(call: Call, device: torch.device, gpu_seconds: float) -> float:
    """Host time to issue one call; the device lags behind, and is waited for outside of it."""
    count = max(5, min(100, int(0.1 / max(gpu_seconds, 1e-6))))
    call()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    _synchronize(device)
    return elapsed / count


def _captured(calls: Sequence[Call], device: torch.device) -> torch.cuda.CUDAGraph:
    """All calls in one graph."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        calls[-1]()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _syncs(call: Call, device: torch.device) -> bool:
    """Whether a call waits for the device, as the reference does: it cannot be captured then."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize(device)
    return False


def _warm(replay: Call, device: torch.device) -> float:
    """Seconds of a replay, after some."""
    start, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - start < WARM_SECONDS:
        replay()
        torch.cuda.synchronize(device)
        count += 1
        if time.perf_counter() - start > 4.0:
            break
    return (time.perf_counter() - start) / count


def _events(replay: Call, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1e-3


def _repeats(calls: Sequence[Call], seconds: float) -> int:
    first = _clock(calls[0])
    return max(1, min(MAX_REPLAYS, int(seconds / max(first * len(calls), 1e-6))))


def _clock(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timing(times: Sequence[float], calls: int, method: str = "clock") -> Timing:
    ordered = sorted(t / calls for t in times)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], method
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
