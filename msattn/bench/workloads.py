"""Named workloads: the lengths that are measured, and how often production meets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from random import Random
from typing import Any

from ..config import MSAConfig
from ..testing.cases import Case

K = 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's lengths. ``name`` is ``group/what``."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    weight: float | None = None  # calls of it in its group, where that is known

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

    @property
    def context(self) -> int:
        """Longest KV length, this step's tokens included."""
        return max(self.seq_lens)

    @property
    def uniform_query_len(self) -> int | None:
        """Query tokens of each request where all have as many, and few: a decode step."""
        lengths = set(self.query_lens)
        return max(lengths) if len(lengths) == 1 and max(lengths) <= 16 else None

    def case(self, config: MSAConfig) -> Case:
        return Case(self.name, self.query_lens, self.seq_lens, config)


def production_prefill() -> list[Workload]:
    """The 12 heaviest prefill batches of MiniMax's production mix."""
    out = []
    for entry in _data("prefill.json")["cases"]:
        query_lens, prefixes = entry["query_lens"], entry["prefix_lens"]
        what = "+".join(f"{q}@{p}" for q, p in zip(query_lens, prefixes, strict=True))
        seq_lens = tuple(q + p for q, p in zip(query_lens, prefixes, strict=True))
        out.append(Workload(f"prefill/{what}", tuple(query_lens), seq_lens, entry["weight"]))
    return out


def production_decode() -> list[Workload]:
    """MiniMax's 28 decode steps: 8 query tokens a request, lengths in pairs around the nominal."""
    data = _data("decode.json")
    out = []
    for entry in data["cases"]:
        nominal, batch = entry["kv_len"], entry["batch"]
        random = Random(f"{nominal} x {batch}")
        away = [round(random.uniform(nominal / 20, nominal / 4)) for _ in range(batch // 2)]
        seq_lens = tuple(nominal + sign * delta for delta in away for sign in (1, -1))
        name = f"decode/{batch}x{nominal // 1000}K"
        out.append(Workload(name, (data["query_len"],) * batch, seq_lens, entry["weight"]))
    return out


def grid() -> list[Workload]:
    """Round sizes: what published numbers are stated for, and series over the context."""
    contexts = ((8 * K, "8K"), (32 * K, "32K"), (128 * K, "128K"))
    steps = [
        Workload(f"step/{batch}x{name}", (1,) * batch, (context,) * batch)
        for batch in (1, 8, 32, 64, 128, 256)
        for context, name in contexts
    ]
    steps.append(Workload("step/8x1M", (1,) * 8, (1024 * K,) * 8))
    verify = [Workload(f"verify/{b}x4@128K", (4,) * b, (128 * K,) * b) for b in (8, 32, 128)]
    chunks = [
        Workload(f"chunk/{new}@{name}", (new,), (new + before,))
        for new, before, name in (
            *((8192, before, name) for before, name in ((0, "0"), *contexts, (512 * K, "512K"))),
            (512, 128 * K, "128K"),
            (2048, 32 * K, "32K"),
            (2048, 128 * K, "128K"),
            (32 * K, 0, "0"),
        )
    ]
    return [*steps, *verify, *chunks]


def tiny() -> list[Workload]:
    """What a CPU finishes in seconds; more blocks than topk, or there is nothing to select."""
    return [
        Workload("tiny/decode", (1, 1, 1), (2600, 2177, 300)),
        Workload("tiny/verify", (4, 4), (2200, 2500)),
        Workload("tiny/prefill", (40, 7), (2300, 2800)),
        Workload("tiny/chunk@2K", (32,), (2 * K + 32,)),
        Workload("tiny/chunk@4K", (32,), (4 * K + 32,)),
    ]


QUICK = (
    "step/64x128K",
    "decode/8x100K",
    "decode/32x100K",
    "chunk/8192@32K",
    "chunk/8192@128K",
    "prefill/16384@31360",
    "prefill/338@74240",
)
"""What ``--quick`` runs on a GPU."""


def all_workloads() -> list[Workload]:
    return [*production_decode(), *production_prefill(), *grid(), *tiny()]


def select_workloads(globs: Sequence[str], *, quick: bool, device_type: str) -> list[Workload]:
    """The workloads that any of ``globs`` matches; without globs, those that suit the device."""
    everything = all_workloads()
    if globs:
        return [w for w in everything if any(fnmatchcase(w.name, glob) for glob in globs)]
    if device_type == "cpu":
        small = [w for w in everything if w.group == "tiny"]
        return small[:1] + small[-2:] if quick else small
    if quick:
        return [w for w in everything if w.name in QUICK]
    return [w for w in everything if w.group != "tiny"]


def _data(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath("data", name).read_text()
    data: dict[str, Any] = json.loads(text)
    return data
