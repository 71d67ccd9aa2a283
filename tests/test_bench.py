"""``msattn bench``: its selections, its cost model, its workloads, and a run from end to end."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import msattn
from msattn import BLOCK_SIZE, KV_FORMATS, MSAConfig
from msattn.bench.inputs import Inputs, Pools
from msattn.bench.ops import OPS, Msattn
from msattn.bench.record import Record, ratio_to_best_peer, read_results
from msattn.bench.runner import make_units, run_units
from msattn.bench.summary import losses, problems, summarize
from msattn.bench.workloads import (
    QUICK,
    all_workloads,
    production_decode,
    production_prefill,
    select_workloads,
)
from msattn.testing import cost, oracle
from msattn.testing.cases import Case, make_config
from msattn.testing.cost import Cost, Roofs
from msattn.testing.selections import (
    PATTERNS,
    distinct_blocks,
    distinct_over_heads,
    make_block_ids,
)
from msattn.testing.timing import time_calls

CPU = torch.device("cpu")
ROOFS = Roofs(copy=1e9, read=2e9, matmul=1e12, matmul_fp8=2e12)
FOUR_HUNDRED_BLOCKS = [400 * BLOCK_SIZE]


def step_ids(pattern: str, tokens: int = 1024, seed: int = 0) -> torch.Tensor:
    return make_block_ids(pattern, [tokens], FOUR_HUNDRED_BLOCKS, num_kv_heads=4, seed=seed)


# Selections


def test_realistic_selections_overlap_as_published() -> None:
    """4 neighbours choose about 22 of 64 distinct, the 4 heads of a token about 27 of 64."""
    ids = step_ids("realistic", 2048)
    assert distinct_blocks(ids, 4) == pytest.approx(22.1, rel=0.04)
    assert distinct_over_heads(ids) == pytest.approx(27.1, rel=0.04)
    # Not published, but what the same chain gave elsewhere, roughly.
    assert distinct_blocks(ids, 8) == pytest.approx(25.2, rel=0.06)
    assert distinct_blocks(ids, 128) == pytest.approx(53, rel=0.15)
    assert float((ids == 0).any(-1).double().mean()) == pytest.approx(0.99, abs=0.01)


def test_uniform_and_recent_selections_bracket_it() -> None:
    recent, uniform = step_ids("recent"), step_ids("uniform")
    assert distinct_blocks(recent, 4) == distinct_over_heads(recent) == 16
    # 15 of 399 drawn four times, and the own block: 1 + 399 * (1 - (384 / 399) ** 4).
    assert distinct_blocks(uniform, 4) == pytest.approx(57.7, rel=0.01)
    assert distinct_over_heads(uniform) == pytest.approx(57.7, rel=0.01)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_selections_are_valid(pattern: str) -> None:
    """Ascending, visible, distinct, the own block in, -1 at the tail, all blocks where few."""
    query_lens, seq_lens = [9, 1, 300, 0, 3, 4], [5000, 129, 2500, 70, 1, 2176]
    ids = make_block_ids(pattern, query_lens, seq_lens, num_kv_heads=2, topk=16)
    batch = msattn.Batch.from_lists(query_lens, seq_lens, [[0] * 40] * 6)
    assert ids.shape == (317, 2, 16) and ids.dtype == torch.int32
    for row, (_, position) in zip(ids.tolist(), oracle.tokens(batch), strict=True):
        own = position // BLOCK_SIZE
        for head in row:
            chosen = [block for block in head if block >= 0]
            assert head == sorted(set(chosen)) + [-1] * (16 - len(chosen))
            assert len(chosen) == min(16, own + 1)
            assert not chosen or chosen[-1] == own


def test_a_token_that_sees_nothing_selects_nothing() -> None:
    """More query tokens than keys."""
    for pattern in PATTERNS:
        ids = make_block_ids(pattern, [3], [1], num_kv_heads=1, topk=4)
        assert ids.tolist() == [[[-1] * 4], [[-1] * 4], [[0, -1, -1, -1]]]
        assert make_block_ids(pattern, [], [], num_kv_heads=1).shape == (0, 1, 16)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_selections_depend_on_the_seed_alone(pattern: str) -> None:
    ids = step_ids(pattern, 64)
    assert torch.equal(ids, step_ids(pattern, 64))
    assert pattern == "recent" or not torch.equal(ids, step_ids(pattern, 64, seed=1))


# Costs, counted by hand

# Two KV heads of two query heads each; D = Di = 128.
CASE = Case("by hand", (2, 1), (300, 100), make_config(group=2, kv_heads=2, topk=4))
IDS = torch.tensor(
    [
        [[0, 2, -1, -1], [1, 2, -1, -1]],  # position 298, 43 visible keys in block 2
        [[0, 2, -1, -1], [0, 1, 2, -1]],  # position 299, 44 of them
        [[0, -1, -1, -1], [0, -1, -1, -1]],  # position 99 of the other request
    ],
    dtype=torch.int32,
)


def test_cost_of_attend() -> None:
    pairs = (128 + 43) + (128 + 43) + (128 + 44) + (256 + 44) + 100 + 100
    keys = (128 + 44) + (256 + 44) + 100 + 100  # of distinct blocks, by head and request
    rows = 3 * 4 * 128 * 2
    bf16 = cost.attend_cost(CASE, KV_FORMATS["bf16"], IDS)
    assert bf16 == Cost(
        flops=4 * 128 * 2 * pairs, read=keys * 512 + rows + IDS.numel() * 4, written=rows
    )
    nvfp4 = cost.attend_cost(CASE, KV_FORMATS["nvfp4"], IDS)
    assert bf16.read - nvfp4.read == keys * (512 - 2 * (64 + 8))


def test_cost_of_the_index() -> None:
    visible_keys = 299 + 300 + 100
    read = (300 + 100) * 256 + 3 * 2 * 256
    flops = 2 * 128 * 2 * visible_keys
    bf16, fp8 = KV_FORMATS["bf16"], KV_FORMATS["fp8_e4m3"]
    assert cost.scores_cost(CASE, bf16) == Cost(flops=flops, read=read, written=2 * 3 * 3 * 4)
    assert cost.index_cost(CASE, bf16) == Cost(flops=flops, read=read, written=3 * 2 * 4 * 4)
    assert cost.index_cost(CASE, fp8) == Cost(fp8_flops=flops, read=read / 2, written=3 * 2 * 4 * 4)
    visible_blocks = 3 + 3 + 1
    assert cost.select_cost(CASE) == Cost(read=2 * visible_blocks * 4, written=3 * 2 * 4 * 4)


def test_cost_of_store_and_merge() -> None:
    fp8, bf16 = KV_FORMATS["fp8_e4m3"], KV_FORMATS["bf16"]
    kv = 2 * 2 * 128
    assert cost.store_cost(CASE, fp8, None) == Cost(read=3 * (2 * kv + 8), written=3 * kv)
    assert cost.store_cost(CASE, fp8, bf16) == Cost(
        read=3 * (2 * kv + 8 + 256 + 8), written=3 * (kv + 256)
    )
    part = 3 * 4 * (256 + 4)
    assert cost.merge_cost(CASE, 2) == Cost(read=2 * part, written=part)


def test_floor_is_the_larger_of_bytes_and_flops() -> None:
    work = Cost(flops=1e12, fp8_flops=1e12, read=2e9, written=1e8)
    assert work.compute_seconds(ROOFS) == pytest.approx(1.5)
    assert work.memory_seconds(ROOFS) == pytest.approx(1.1)
    assert (work.floor_seconds(ROOFS), work.bound(ROOFS)) == (pytest.approx(1.5), "compute")
    assert (work + Cost(read=2e9)).bound(ROOFS) == "memory"
    assert work.floor_seconds(Roofs(0, 0, 0, 0)) == 0  # nothing was measured


# Workloads


def test_production_workloads() -> None:
    prefill, decode = production_prefill(), production_decode()
    assert (len(prefill), sum(w.weight or 0 for w in prefill)) == (12, 10727)
    assert [w.weight for w in prefill] == sorted((w.weight for w in prefill), reverse=True)
    assert all(sum(w.query_lens) <= 16384 for w in prefill)
    assert (len(decode), sum(w.weight or 0 for w in decode)) == (28, 10000)
    for workload in decode:
        nominal = 1000 * int(workload.name.split("x")[1].removesuffix("K"))
        assert sum(workload.seq_lens) == nominal * len(workload.seq_lens)
        assert max(abs(s - nominal) for s in workload.seq_lens) <= nominal / 4
        assert workload.uniform_query_len == 8


def test_workload_names() -> None:
    names = [w.name for w in all_workloads()]
    assert len(names) == len(set(names))
    assert set(QUICK) <= set(names)
    chosen = select_workloads(["step/64x*", "tiny/decode"], quick=False, device_type="cuda")
    assert [w.name for w in chosen] == [
        "step/64x8K",
        "step/64x32K",
        "step/64x128K",
        "tiny/decode",
    ]
    on_gpu = select_workloads([], quick=True, device_type="cuda")
    assert sorted(w.name for w in on_gpu) == sorted(QUICK)
    assert {w.group for w in select_workloads([], quick=False, device_type="cpu")} == {"tiny"}


# Checks and records


class Broken(Msattn):
    """An attention that scales its output."""

    def __init__(self) -> None:
        super().__init__("reference")
        self.name = "msattn:broken"

    def prepare(self, op: str, inputs: Inputs) -> Any:
        prepared = super().prepare(op, inputs)

        def wrong() -> None:
            prepared.calls[0]()
            inputs.out[0].mul_(1.05)

        return replace(prepared, calls=[wrong])


def test_a_wrong_result_is_reported_and_not_timed() -> None:
    units = make_units(
        ["attend", "merge"],
        select_workloads(["tiny/decode"], quick=False, device_type="cpu"),
        [MSAConfig(4, 1, 1)],
        [KV_FORMATS["fp8_e4m3"]],
        ["realistic"],
    )
    providers = [Msattn("reference"), Broken(), Msattn("hopper")]
    found = list(run_units(units, providers, ROOFS, CPU, seconds=0.0, limit=None))
    for _, (right, wrong, unsupported) in found:
        assert right.status == "ok" and right.us and right.error is not None
        assert wrong.status == "wrong" and wrong.us is None and "limit" in wrong.note
        assert unsupported.status == "unsupported" and "hopper" in unsupported.note
    records = [record for _, some in found for record in some]
    assert {r.provider for r in problems(records)} == {"msattn:broken"}
    assert list(run_units(units, providers, ROOFS, CPU, seconds=0.0, limit=-1.0)) == []


@pytest.mark.parametrize("op", ["store", "scores", "select", "index", "layer"])
def test_the_checks_notice_a_missing_result(op: str) -> None:
    """The outputs are poisoned before the call: what does nothing is not right."""
    workload = select_workloads(["tiny/verify"], quick=False, device_type="cpu")[0]
    inputs = Inputs(workload, MSAConfig(4, 1, 1), KV_FORMATS["bf16"], "uniform", 1, Pools(CPU))
    prepared = OPS[op].prepare(inputs, "reference")
    _ = inputs.out, inputs.scores_out, inputs.ids_out
    inputs.poison()
    assert not prepared.check().right
    prepared.calls[0]()
    assert prepared.check().right


def record(provider: str, us: float, case: str = "decode/8x1K", **kwargs: Any) -> Record:
    kwargs = {"weight": 1.0, "roof": 0.5, "status": "ok", **kwargs}
    return Record("attend", case, "64/4", "bf16", "realistic", provider, us=us, **kwargs)


def test_summary_against_the_best_peer_of_each_case() -> None:
    records = [
        record("msattn", 10.0),
        record("vllm", 20.0),
        record("flashinfer", 15.0),
        record("dense sdpa", 1.0, dense=True),
        record("msattn", 30.0, "decode/8x4K", weight=3.0),
        record("vllm", 15.0, "decode/8x4K", weight=3.0),
        record("flashinfer", 5.0, "decode/8x4K", weight=3.0, status="wrong"),
        record("msattn", 7.0, "decode/8x5K", weight=6.0),
    ]
    assert ratio_to_best_peer(records[0], records) == 1.5
    assert ratio_to_best_peer(records[-1], records) is None
    (summary,) = summarize(records)
    assert (summary.cases, summary.compared) == (3, 2)
    assert summary.mean_us == pytest.approx((10 + 90 + 42) / 10)
    assert summary.weighted_ratio == pytest.approx((15 + 45) / (10 + 90))
    assert summary.geomean_ratio == pytest.approx((1.5 * 0.5) ** 0.5)
    ((mine, peer),) = losses(records)
    assert (mine.us, peer.us, peer.provider) == (30.0, 15.0, "vllm")


def test_timing_takes_the_calls_in_turn() -> None:
    order: list[int] = []
    timing = time_calls([lambda: order.append(0), lambda: order.append(1)], CPU, 0.0)
    assert timing.p20 <= timing.median <= timing.p80 and timing.method == "clock"
    assert set(order) == {0, 1}


# The command

COMMAND = ("bench", "--device", "cpu", "--heads", "4/1", "--quick", "--kv", "bf16,nvfp4")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a command line in this process; returns (exit code, stdout, stderr)."""
    pytest.importorskip("typer")
    from msattn.cli import main

    monkeypatch.setenv("COLUMNS", "140")
    # Threads that wait for one another on busy cores take most of the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    yield run
    torch.set_num_threads(threads)


def test_run_from_end_to_end(bench: Any, tmp_path: Path) -> None:
    """Every op on the CPU, files, pictures and the table; then the report of the files."""
    pytest.importorskip("matplotlib")
    code, out, _ = bench(*COMMAND, "--out", tmp_path, "--plot", "--note", "abc123")
    assert code == 0, out
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[0]["header"]["torch"] == torch.__version__
    assert lines[0]["header"]["note"] == "abc123"
    assert all(lines[0]["header"]["roofs"][name] > 0 for name in ("copy", "read", "matmul"))
    header, records = read_results(tmp_path / "results.jsonl")
    assert len(records) == len(lines) - 1 and header == lines[0]["header"]
    timed = [r for r in records if r.us]
    assert {r.op for r in timed if r.mine} == set(OPS)
    assert {r.status for r in records} == {"ok", "unsupported"}
    assert any(r.dense for r in timed)
    for r in timed:
        assert r.us_p20 is not None and r.us_p80 is not None and r.us is not None
        assert r.us_p20 <= r.us <= r.us_p80
        assert r.floor_us and r.roof == pytest.approx(r.floor_us / r.us)
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == [r.provider for r in records]
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert "attend_4x1_bf16_realistic_tiny.png" in pictures
    assert "layer_4x1_nvfp4_realistic_tiny_chunk_by_context.png" in pictures
    assert "roofline.png" in pictures
    assert "attend tiny/decode 4/1 bf16 realistic" in out and "% roof" in out

    code, again, _ = bench("bench", "--from", tmp_path / "results.jsonl")
    assert code == 0 and "layer" in again and "mean us" in again


def test_list_names_the_cases(bench: Any) -> None:
    code, out, _ = bench("bench", "--list", "--case", "prefill/338*,tiny/decode")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["prefill/338@74240", "tiny/decode"]
    assert "weight 1418" in out


def test_time_limit_leaves_cases_out(bench: Any) -> None:
    code, out, _ = bench(*COMMAND, "--op", "merge", "--limit", 0, "--peers", "none")
    assert code == 0 and "were left out" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "atend"), "--op: expected store, scores"),
        (("--kv", "bf17"), "--kv"),
        (("--heads", "64"), "--heads: expected query heads / KV heads"),
        (("--heads", "6/4"), "--heads 6/4: num_q_heads"),
        (("--pattern", "zipf"), "--pattern: expected realistic, uniform, recent"),
        (("--impl", "cuda"), "--impl: expected auto, hopper, triton, reference"),
        (("--case", "nothing/*"), "--case: no case matches 'nothing/*'"),
        (("--op", "index", "--kv", "nvfp4"), "nothing to measure"),
        (("--peers", "all"), "--peers"),
        (("--plot",), "--out"),
        (("--device", "tpu"), "--device: expected cpu"),
        (("--from", "missing.jsonl"), "--from: missing.jsonl is no results.jsonl"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_wrong_arguments_are_one_sentence(
    bench: Any, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = bench("bench", *arguments)
    assert code == 2 and err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1
