"""What a run leaves behind: one record for each case and provider, as JSON lines and CSV."""

from __future__ import annotations

import csv
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

Status = Literal["ok", "wrong", "unsupported", "failed"]


@dataclass(frozen=True, slots=True)
class Record:
    """A case as one provider ran it. Times in microseconds; None where nothing was timed."""

    op: str
    case: str
    heads: str  # query heads / KV heads
    kv: str  # KV or index format, "-" where no cache is touched
    pattern: str  # of the selection, "-" where the op does not see it
    provider: str
    status: Status
    note: str = ""  # why it is not ok, or how it was timed where that was not a graph
    weight: float | None = None  # of the case in its group
    dense: bool = False
    tokens: int = 0
    context: int = 0
    sets: int = 0  # input sets that were rotated through
    us: float | None = None  # median
    us_p20: float | None = None
    us_p80: float | None = None
    host_us: float | None = None  # host time to issue a call
    flops: float = 0.0
    bytes: float = 0.0
    tflops: float | None = None
    tbs: float | None = None  # TB/s
    floor_us: float | None = None  # at the measured rates
    roof: float | None = None  # floor_us / us
    bound: str = ""  # "memory" or "compute"
    error: float | None = None
    error_kind: str = ""
    off_rows: float | None = None  # share of the sampled rows that are off

    @property
    def group(self) -> str:
        return self.case.split("/")[0]

    @property
    def mine(self) -> bool:
        return self.provider.split(":")[0] == "msattn"

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What providers are compared on."""
        return self.op, self.case, self.heads, self.kv, self.pattern


def best_peer(record: Record, records: Sequence[Record]) -> Record | None:
    """The fastest right result of a peer on the same inputs."""
    peers = [
        r
        for r in records
        if r.key == record.key and not r.mine and not r.dense and r.status == "ok" and r.us
    ]
    return min(peers, key=lambda r: r.us or 0.0, default=None)


def ratio_to_best_peer(record: Record, records: Sequence[Record]) -> float | None:
    """Time of the best peer over this one's: above 1, this one is faster."""
    peer = best_peer(record, records)
    return None if peer is None or not peer.us or not record.us else peer.us / record.us


def write_results(folder: Path, header: dict[str, Any], records: Sequence[Record]) -> None:
    """``results.jsonl``, the header first, and ``results.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    ratios = [ratio_to_best_peer(r, records) if r.mine else None for r in records]
    rows = [asdict(r) | {"vs_best_peer": x} for r, x in zip(records, ratios, strict=True)]
    with (folder / "results.jsonl").open("w") as file:
        for line in ({"header": header}, *rows):
            file.write(json.dumps(line) + "\n")
    with (folder / "results.csv").open("w", newline="") as file:
        names = [field.name for field in fields(Record)] + ["vs_best_peer"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def read_results(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Header and records of a ``results.jsonl``."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    header: dict[str, Any] = lines[0]["header"]
    return header, [
        Record(**{k: v for k, v in line.items() if k != "vs_best_peer"}) for line in lines[1:]
    ]


def environment(device: torch.device) -> dict[str, Any]:
    """Machine and versions."""
    out: dict[str, Any] = {"msattn": _commit(), "torch": torch.__version__}
    for name in ("triton", "vllm", "flashinfer-python"):
        out[name] = _version(name)
    out["python"] = platform.python_version()
    if device.type != "cuda":
        name = platform.processor() or platform.machine()
        return out | {"device": name, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return out | {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        **gpu_state(device),
    }


def gpu_state(device: torch.device) -> dict[str, str]:
    """Driver, clocks, power and temperature, as nvidia-smi reports them; empty without it."""
    names = ("driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    values = _output([*command, f"--id={device.index or 0}"]).split(", ")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _commit() -> str:
    """Version and, in a checkout, the commit."""
    folder = Path(__file__).parent
    commit = _output(["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"])
    return f"{_version('msattn') or 'checkout'} {commit or 'no git commit'}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
