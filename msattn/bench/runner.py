"""The run: every case, every provider, checked and then timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import MSAConfig
from ..kv_format import KVFormat
from ..testing.cost import Cost, Roofs, dense_cost
from ..testing.timing import host_seconds, sets_needed, time_calls
from .inputs import Inputs, Pools, release
from .ops import OPS, Op, Provider
from .record import Record
from .workloads import Workload

# Sets for a decode step, whose call touches few bytes, and for more tokens than that.
DECODE_SETS, PREFILL_SETS = (4, 384), (2, 32)
CPU_SETS = (1, 2)
NOT_SEEN = "-"  # format or pattern of an op that does not see it


@dataclass(frozen=True, slots=True)
class Unit:
    """One case: what all providers run on the same inputs."""

    op: Op
    workload: Workload
    config: MSAConfig
    format: KVFormat
    pattern: str

    def __str__(self) -> str:
        parts = (self.op.name, self.workload.name, self.heads, *self._seen())
        return " ".join(part for part in parts if part != NOT_SEEN)

    @property
    def heads(self) -> str:
        return f"{self.config.num_q_heads}/{self.config.num_kv_heads}"

    def record(self, provider: Provider) -> Record:
        """A record without a result."""
        kv, pattern = self._seen()
        return Record(
            self.op.name,
            self.workload.name,
            self.heads,
            kv,
            pattern,
            provider.name,
            "failed",
            weight=self.workload.weight,
            dense=provider.dense,
            tokens=sum(self.workload.query_lens),
            context=self.workload.context,
        )

    def _seen(self) -> tuple[str, str]:
        kv = self.format.name if self.op.formats else NOT_SEEN
        return kv, self.pattern if self.op.patterns else NOT_SEEN


def make_units(
    ops: Sequence[str],
    workloads: Sequence[Workload],
    configs: Sequence[MSAConfig],
    formats: Sequence[KVFormat],
    patterns: Sequence[str],
) -> list[Unit]:
    """All cases; an op that does not see formats or patterns is measured once."""
    out = []
    for config in configs:
        for number, fmt in enumerate(formats):
            for workload in workloads:
                for op in (OPS[name] for name in ops):
                    if not op.formats(fmt) if op.formats else number > 0:
                        continue
                    seen = [p for p in patterns if p in op.patterns] if op.patterns else [None]
                    out += [Unit(op, workload, config, fmt, p or "realistic") for p in seen]
    return out


def run_units(
    units: Sequence[Unit],
    providers: Sequence[Provider],
    roofs: Roofs,
    device: torch.device,
    *,
    seconds: float,
    limit: float | None,
) -> Iterator[tuple[Unit, list[Record]]]:
    """Measure case after case, until ``limit`` seconds have passed.

    Args:
        seconds: that the replays of one provider and case take, about.
    """
    pools, start = Pools(device), time.monotonic()
    for unit in units:
        if limit is not None and time.monotonic() - start > limit:
            return
        yield unit, _run_unit(unit, providers, roofs, pools, seconds)


def _run_unit(
    unit: Unit, providers: Sequence[Provider], roofs: Roofs, pools: Pools, seconds: float
) -> list[Record]:
    records = [unit.record(provider) for provider in providers]
    try:
        inputs, cost = _make_inputs(unit, pools)
    except torch.OutOfMemoryError as error:
        return [replace(record, note=_sentence(error)) for record in records]
    out = []
    for provider, record in zip(providers, records, strict=True):
        try:
            out.append(_measure(provider, inputs, record, cost, roofs, seconds))
        # A peer whose kernels were built beforehand has none for some shapes.
        except (NotImplementedError, FileNotFoundError) as error:
            out.append(replace(record, status="unsupported", note=_sentence(error)))
        except Exception as error:  # a peer, or a kernel, that breaks must not end the run
            if isinstance(error, torch.AcceleratorError):
                # The device is lost, and every later case with it: say whose call it was.
                raise type(error)(f"{provider.name}: {error}") from error
            out.append(replace(record, note=_sentence(error)))
        release(pools.device)
    return out


def _make_inputs(unit: Unit, pools: Pools) -> tuple[Inputs, Cost]:
    """As many input sets as it takes for none to be in the L2 when it comes around."""

    def inputs(sets: int) -> Inputs:
        return Inputs(unit.workload, unit.config, unit.format, unit.pattern, sets, pools)

    cost = unit.op.cost(inputs(1))
    decode = unit.workload.uniform_query_len is not None
    bounds = DECODE_SETS if decode else PREFILL_SETS
    if pools.device.type != "cuda":
        bounds = CPU_SETS
    return inputs(sets_needed(cost.all_bytes, pools.device, *bounds)), cost


def _measure(
    provider: Provider, inputs: Inputs, record: Record, cost: Cost, roofs: Roofs, seconds: float
) -> Record:
    device = inputs.device
    cost = dense_cost(inputs.case) if provider.dense else cost
    prepared = provider.prepare(record.op, inputs)
    inputs.poison()
    prepared.calls[0]()
    check = prepared.check()
    record = replace(
        record,
        sets=len(prepared.calls),
        error=check.error,
        error_kind=check.kind,
        off_rows=check.off,
        flops=cost.all_flops,
        bytes=cost.all_bytes,
    )
    if not check.right:
        note = f"{check.kind} {check.error:.2g} (limit {check.limit:g}), {check.off:.0%} rows off"
        return replace(record, status="wrong", note=note)
    timing = time_calls(prepared.calls, device, seconds)
    host = host_seconds(prepared.calls[0], device, timing.median) if device.type == "cuda" else None
    floor = cost.floor_seconds(roofs)
    return replace(
        record,
        status="ok",
        note="" if timing.method != "events" else "timed without a graph: it waits for the device",
        us=timing.median * 1e6,
        us_p20=timing.p20 * 1e6,
        us_p80=timing.p80 * 1e6,
        host_us=None if host is None else host * 1e6,
        tflops=cost.all_flops / timing.median * 1e-12,
        tbs=cost.all_bytes / timing.median * 1e-12,
        floor_us=floor * 1e6,
        roof=floor / timing.median,
        bound=cost.bound(roofs),
    )


def _sentence(error: Exception) -> str:
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {text}"
