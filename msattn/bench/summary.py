"""Means over the cases, and the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .record import Record, best_peer


@dataclass(frozen=True, slots=True)
class Summary:
    """One provider of msattn's over the cases of a group, against the best peer of each case."""

    op: str
    group: str
    heads: str
    kv: str
    pattern: str
    provider: str
    cases: int  # timed
    skipped: int  # wrong, unsupported or failed
    mean_us: float  # weighted by production calls, where they are known
    mean_roof: float  # geometric mean of floor / time
    compared: int  # cases that a peer serves as well
    weighted_ratio: float | None  # weighted mean time of the best peers over ours
    geomean_ratio: float | None  # geometric mean of best peer / ours


def summarize(records: Sequence[Record]) -> list[Summary]:
    """One line for each provider of msattn's, op, group of cases, heads, format and pattern."""
    groups: dict[tuple[str, str, str, str, str, str], list[Record]] = {}
    for r in records:
        if r.mine:
            groups.setdefault((r.op, r.group, r.heads, r.kv, r.pattern, r.provider), []).append(r)
    return [_summary(key, mine, records) for key, mine in groups.items() if any(r.us for r in mine)]


def losses(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Where the best peer is faster than msattn's fastest: (ours, the peer's), worst first."""
    out = []
    for key in dict.fromkeys(r.key for r in records if r.mine and r.us):
        timed = [r for r in records if r.key == key and r.mine and r.us]
        mine = min(timed, key=_us)
        peer = best_peer(mine, records)
        if peer is not None and _us(peer) < _us(mine):
            out.append((mine, peer))
    return sorted(out, key=lambda pair: _us(pair[1]) / _us(pair[0]))


def problems(records: Sequence[Record]) -> list[Record]:
    """Results that are wrong, and what failed."""
    return [r for r in records if r.status in ("wrong", "failed")]


def _summary(
    key: tuple[str, str, str, str, str, str], mine: Sequence[Record], records: Sequence[Record]
) -> Summary:
    timed = [r for r in mine if r.us]
    pairs = [(r, peer) for r in timed if (peer := best_peer(r, records)) is not None]
    ours, theirs = (sum(_weight(r) * _us(x[i]) for x in pairs for r in x[:1]) for i in (0, 1))
    return Summary(
        *key,
        cases=len(timed),
        skipped=len(mine) - len(timed),
        mean_us=sum(_weight(r) * _us(r) for r in timed) / sum(map(_weight, timed)),
        mean_roof=_geomean([r.roof for r in timed if r.roof]) or 0.0,
        compared=len(pairs),
        weighted_ratio=theirs / ours if pairs else None,
        geomean_ratio=_geomean([_us(peer) / _us(r) for r, peer in pairs]),
    )


def _weight(record: Record) -> float:
    return 1.0 if record.weight is None else record.weight


def _us(record: Record) -> float:
    assert record.us is not None
    return record.us


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
