"""Every Triton kernel compiles for every GPU generation, without a GPU, and nothing spills.

A build runs in a process of its own, as ``python tests/test_compile.py NAME``: there kernels are
compiled ones, whereas the tests may have the interpreter's. It prints what each target's assembler
made of it. Builds are written down or, of attention, are what its launches ask for: their constants
depend on the GPU. Hopper's kernels are in Gluon, which ends the process where it compiles them for
another GPU. These processes are forked from one that has torch and Triton: to import them for each
would take as long as to compile.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = (80, 90, 100, 120)
BUILD_SECONDS = 280
"""That a build may take."""
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}

ATTEND_FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
# Query tokens and tokens of a request. Narrow pools of long ones are converted by the attention.
ATTEND_STEPS = {
    "prefill": (16384, 1376 * 128),
    "long": (200, 1400 * 128),
    "verify": (4, 4096),
    "decode": (1, 4096),
}
ATTEND_SPILLS = {"prefill": 8, "long": 152, "verify": 232, "decode": 0}
"""Bytes that are known to spill where tiles take all registers; nothing else may, and not more."""

# Query heads of a KV head, and query tokens: few ones have tiles of two consumers.
HOPPER_STEPS = [
    *(("bf16", group, 1200) for group in (1, 4, 8, 64)),
    *((kv_format, 16, 16384) for kv_format in ("bf16", "fp16", "fp8_e4m3")),
    *(("bf16", group, 700) for group in (4, 16)),
]
# Query tokens of a request, and query heads of a KV head.
HOPPER_FEW = [
    *(("bf16", *step) for step in ((1, 16), (1, 1), (2, 16), (4, 16), (8, 16), (8, 4), (4, 64))),
    *((narrow, *step) for narrow in ("fp8_e4m3", "nvfp4") for step in ((1, 16), (4, 16), (8, 16))),
    ("fp16", 1, 16),
    ("fp8_e5m2", 1, 16),
]
HOPPER_FEW_SPILLS = {32: {"bf16": 32, "fp8_e4m3": 8, "nvfp4": 168}, 64: {"bf16": 208}}
"""Bytes that a program of as many columns keeps in local memory; most of them not in the loop."""

HOPPER_ROWS = {
    ("bf16", 8): 16,
    ("bf16", 300): 16,
    ("fp8_e4m3", 8): 88,
    ("fp8_e5m2", 4): 88,
    ("nvfp4", 8): 104,
    ("nvfp4", 300): 104,
}
"""The same with queries as rows, by a request's query tokens."""
HOPPER_ROWS_LOOP = 2
"""Uses of them in the loop, in narrow pools: what a page that is seen in part is masked by."""

HOPPER_SPILLS = {"_union_kernel": 112, "_attend_tiles_kernel": 40, "_scores_kernel": 40}
"""Bytes that a program keeps in local memory."""
MERGE_SPILLS = 1184
"""Of the one that merges 64 rows of a token."""
HOPPER_LOOP_SPILLS = {("_union_kernel", 8): 18}
"""Uses of them in a loop of 16 products, where a token has so many rows; elsewhere there are none.

With 8 rows, a thread has rows of two tokens, and clears their weights apart.
"""


@dataclass(frozen=True)
class Build:
    """A kernel with one choice of what it is compiled with."""

    name: str
    kernel: str  # module:function
    # Types of the parameters that are not int32; a tuple for a tuple. Pointers are "*fp32".
    types: dict[str, Any]
    # Values of tl.constexpr parameters, and of integers that the launcher finds to be 1. A place in
    # a tuple is ("parameter", 0, 2).
    constants: dict[str | tuple[Any, ...], Any]
    options: dict[str, int] = field(default_factory=dict)  # num_warps, num_stages
    capabilities: tuple[int, ...] = CAPABILITIES
    wgmma: str = ""  # shape and types of Hopper's product, where there has to be one

    def __str__(self) -> str:
        return self.name


def store_builds() -> Iterable[Build]:
    pointers = {"k_ptr": "*bf16", "v_ptr": "*bf16", "slots_ptr": "*i64", "limit": "fp32"}
    for name, pool, e4m3, e5m2, nvfp4 in (
        ("bf16", "*bf16", False, False, False),
        ("fp16", "*fp16", False, False, False),
        ("fp8_e4m3", "*u8", True, False, False),
        ("fp8_e5m2", "*u8", False, True, False),
        ("nvfp4", "*u8", False, False, True),
    ):
        flags = {"E4M3": e4m3, "E5M2": e5m2, "NVFP4": nvfp4, "D": 128}
        for scale, scale_type in ((1, "fp32"), (2, "*fp32")):
            yield Build(
                f"store_kv_{name}_scale{scale}",
                "store:_store_kv_kernel",
                {
                    **pointers,
                    "k_pool_ptr": pool,
                    "v_pool_ptr": pool,
                    "k_scale": scale_type,
                    "v_scale": scale_type,
                },
                {"K_SCALE": scale, "V_SCALE": scale, "TOKENS": 16, **flags}
                | {"stride_kd": 1, "stride_vd": 1},
                {"num_warps": 4},
            )
        if name in ("bf16", "fp8_e4m3"):
            yield Build(
                f"store_index_k_{name}",
                "store:_store_index_k_kernel",
                {"x_ptr": "*bf16", "slots_ptr": "*i32", "pool_ptr": pool, "limit": "fp32"}
                | {"rounding": "fp32"},
                {"E4M3": e4m3, "TOKENS": 16, "D": 128, "stride_d": 1, "COMPACT": False}
                | {"codes_ptr": None, "factors_ptr": None},
                {"num_warps": 4},
            )


def compact_builds() -> Iterable[Build]:
    copy = {"codes_ptr": "*i8", "factors_ptr": "*i32", "rounding": "fp32"}
    keys = {"pool_ptr": "*fp16", "limit": "fp32"}
    yield Build(
        "store_index_k_compact",
        "store:_store_index_k_kernel",
        {"x_ptr": "*bf16", "slots_ptr": "*i32"} | keys | copy,
        {"E4M3": False, "COMPACT": True, "TOKENS": 16, "D": 128, "stride_d": 1},
        {"num_warps": 4},
    )
    yield Build(
        "refresh_compact_keys",
        "store:_refresh_kernel",
        {"pool_ptr": "*bf16", "pages_ptr": "*i64"} | copy,
        {"TOKENS": 16, "D": 128},
        {"num_warps": 4},
    )
    step = {"tile_request_ptr": "*i32", "tile_row_ptr": "*i32", "page_table_ptr": "*i32"}
    step |= {"cu_seqlens_ptr": "*i32", "seq_lens_ptr": "*i32", "q_ptr": "*bf16"}
    forced = {"TOPK": 16, "INIT": 0, "LOCAL": 1}
    for rows in (16, 32):
        for by_bulk_copy, capabilities in ((False, (80, 120)), (True, (90, 100))):
            shape = {"HEADS": 4, "HEADS_PADDED": 4, "TOKENS": rows // 4, "DIM": 128}
            shape |= {"TMA": by_bulk_copy, "stride_q_dim": 1}
            of_codes = {} if by_bulk_copy else {"codes_desc": None}
            of_keys = {} if by_bulk_copy else {"k_desc": None}
            yield Build(
                f"compact_bounds_{rows}rows_sm{capabilities[0]}",
                "indexer_compact:_bounds_kernel",
                {"codes_ptr": "*i8", "factors_ptr": "*i32", **step}
                | {"upper_ptr": "*fp32", "lower_ptr": "*fp32"}
                | ({"codes_desc": "tensordesc<i8[1,128,128]>"} if by_bulk_copy else {}),
                shape | of_codes,
                {"num_warps": 4 if by_bulk_copy or rows == 16 else 8, "num_stages": 5},
                capabilities,
                wgmma=f"m64n{rows}k32.s32.s8.s8" if by_bulk_copy else "",
            )
            yield Build(
                f"compact_rescore_{rows}rows_sm{capabilities[0]}",
                "indexer_compact:_rescore_kernel",
                {"k_ptr": "*bf16", "list_ptr": "*i32", **step}
                | {"out_ptr": "*fp32", "threshold_ptr": "*fp32"}
                | ({"k_desc": "tensordesc<bf16[1,128,128]>"} if by_bulk_copy else {}),
                {**shape, **forced, "DTYPE": "tl.bfloat16", "KEYS_FIRST": by_bulk_copy} | of_keys,
                {"num_warps": 4, "num_stages": 3},
                capabilities,
                wgmma=f"m64n{rows}k16.f32.bf16.bf16" if by_bulk_copy else "",
            )
    for chunk, warps in ((256, 1), (1024, 4)):
        yield Build(
            f"compact_threshold_{chunk}",
            "indexer_compact:_threshold_kernel",
            {"lower_ptr": "*fp32", "threshold_ptr": "*fp32", "request_ptr": "*i32"}
            | {"cu_seqlens_ptr": "*i32", "seq_lens_ptr": "*i32"},
            {**forced, "CHUNK": chunk, "VECTOR": 4},
            {"num_warps": warps},
        )


def selection_builds() -> Iterable[Build]:
    types = {"scores_ptr": "*fp32"} | {
        name: "*i32" for name in ("out_ptr", "request_ptr", "cu_seqlens_ptr", "seq_lens_ptr")
    }
    for chunk, chunks, warps, vector in (
        (256, 8, 1, 4),
        (256, 8, 1, 1),
        (1024, 8, 4, 4),
        (1024, 32, 4, 4),
    ):
        yield Build(
            f"select_blocks_{chunks}x{chunk}_vector{vector}",
            "selection:_select_kernel",
            types,
            {"TOPK": 16, "INIT": 0, "LOCAL": 1, "CHUNK": chunk, "CHUNKS": chunks}
            | {"VECTOR": vector, "stride_b": 1, "stride_ok": 1},
            {"num_warps": warps},
        )


def indexer_builds() -> Iterable[Build]:
    pointers = {"tile_request_ptr": "*i32", "tile_row_ptr": "*i32", "page_table_ptr": "*i32"}
    pointers |= {"cu_seqlens_ptr": "*i32", "seq_lens_ptr": "*i32", "out_ptr": "*fp32"}
    types = {"bf16": "bf16", "fp16": "fp16", "e4m3": "fp8e4nv", "bytes": "u8"}
    operands = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8e4nv", "tf32": "float32"}
    old, hopper, blackwell = (80,), (90, 100), (120,)
    # Warps and stages by rows, as choose_constants and choose_stages give them.
    by_warp = {16: (4, 3), 32: (4, 3), 64: (4, 3), 128: (8, 3)}
    by_warpgroup = {16: (4, 3), 32: (4, 3), 64: (4, 3), 128: (4, 2), 256: (8, 4)}
    for query, keys, operand, dim, capabilities, rows_of in (
        ("bf16", "bf16", "bf16", 128, old + blackwell, by_warp),
        ("bytes", "bytes", "fp16", 128, old, by_warp),
        ("e4m3", "e4m3", "e4m3", 128, blackwell, by_warp),
        ("bf16", "bf16", "bf16", 128, hopper, by_warpgroup),
        ("fp16", "fp16", "fp16", 64, hopper, {16: (4, 3), 128: (4, 2)}),
        ("e4m3", "e4m3", "e4m3", 128, hopper, by_warpgroup),
        ("bf16", "bytes", "bf16", 128, CAPABILITIES, {16: (4, 3)}),
        ("bytes", "fp16", "fp16", 128, CAPABILITIES, {32: (4, 3)}),
        ("bf16", "fp16", "tf32", 128, CAPABILITIES, {16: (4, 2), 32: (4, 2)}),
        ("bf16", "bf16", "bf16", 256, CAPABILITIES, {16: (4, 2), 32: (4, 2)}),
    ):
        for rows, (warps, stages) in rows_of.items():
            keys_first = rows < 64 and capabilities == hopper
            # By the copy engine, where the keys are multiplied as they are.
            tma = query == keys and capabilities == hopper
            k_desc = {"k_desc": f"tensordesc<{types[keys]}[1,128,{dim}]>"} if tma else {}
            wide = operand != "e4m3"
            shape = f"m64n{rows if keys_first else 128}k{16 if wide else 32}"
            kinds = ".".join([{"e4m3": "e4m3", "fp16": "f16"}.get(operand, operand)] * 2)
            for heads in (1, 4) if rows == 128 and query == "bf16" else (4,):
                yield Build(
                    f"index_{query}_{keys}_d{dim}_sm{capabilities[0]}_{rows}rows_{heads}heads",
                    "indexer:_index_scores_kernel",
                    {**pointers, "q_ptr": "*" + types[query], "k_ptr": "*" + types[keys]} | k_desc,
                    {"HEADS": heads, "HEADS_PADDED": heads, "TOKENS": rows // heads, "DIM": dim}
                    | {"DTYPE": f"tl.{operands[operand]}", "KEYS_FIRST": keys_first}
                    | {"NATIVE_FP8": capabilities[0] > 80, "stride_q_dim": 1, "TMA": tma}
                    | ({} if tma else {"k_desc": None}),
                    {"num_warps": warps, "num_stages": stages if wide else 2 * stages - 1},
                    capabilities,
                    wgmma=f"{shape}.f32.{kinds}" if capabilities == hopper else "",
                )


def merge_builds() -> Iterable[Build]:
    for parts in (2, 8):
        ones = {("outs_strides", i, 2): 1 for i in range(parts)}
        ones |= {("lses_strides", i, 1): 1 for i in range(parts)}
        yield Build(
            f"merge_states_{parts}",
            "combine:_merge_kernel",
            {
                "outs_ptrs": ("*bf16",) * parts,
                "outs_strides": (("i32", "i32", "constexpr"),) * parts,
                "lses_ptrs": ("*fp32",) * parts,
                "lses_strides": (("i32", "constexpr"),) * parts,
                "out_ptr": "*bf16",
                "lse_out_ptr": "*fp32",
            },
            {"PARTS": parts, "ROWS": 8, "D": 128, "stride_od": 1, "stride_lh": 1, **ones},
        )


BUILDS = {
    build.name: build
    for builds in (
        store_builds(),
        indexer_builds(),
        compact_builds(),
        selection_builds(),
        merge_builds(),
    )
    for build in builds
}


Builder = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    """What a build of these arguments prints, a line of JSON for each entry."""
    if find_spec("triton") is None:
        pytest.skip("needs triton")
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=clean) as server:
        assert server.stdin is not None and server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def build(*arguments: object) -> list[Any]:
            print(json.dumps([str(x) for x in arguments]), file=requests, flush=True)
            status, out, errors = json.loads(answers.readline())
            assert status == 0, errors[-2000:]
            return [json.loads(line) for line in out.splitlines()]

        yield build


@pytest.mark.parametrize("build", BUILDS.values(), ids=str)
def test_compiles_without_spills(build: Build, builder: Builder) -> None:
    usage = {entry["capability"]: entry for entry in builder(build.name)}
    assert tuple(usage) == build.capabilities
    for capability, entry in usage.items():
        assert 0 < entry["registers"] <= 255, f"sm_{capability}: {entry}"
        assert entry["stack"] == entry["local"] == 0, f"sm_{capability} spills: {entry}"
        assert entry["dynamic_shared"] <= SHARED_KIB[capability] << 10, f"sm_{capability}: {entry}"
        if capability == 90:
            assert build.wgmma in entry["wgmma"], entry


@pytest.mark.parametrize(
    ("kv_format", "step"),
    [(kv_format, step) for kv_format in ATTEND_FORMATS for step in ATTEND_STEPS]
    # One conversion apart from the other fp8 format.
    + [("fp8_e5m2", "decode"), ("fp8_e5m2", "prefill")],
)
def test_attend_compiles_and_fits(kv_format: str, step: str, builder: Builder) -> None:
    launches = builder(kv_format, step)
    kernels = {entry["kernel"] for entry in launches}
    assert "_attend_kernel" in kernels
    assert ("_attend_items_kernel" in kernels) == (step in ("prefill", "long")), kernels
    assert {entry["capability"] for entry in launches} == set(SHARED_KIB)
    assert ("_dequantize_kernel" in kernels) == (step == "prefill" and kv_format != "bf16")
    for entry in launches:
        assert entry["scratch"] < 512 << 20, "a plan's memory beside what the caller gives"
        spills = ATTEND_SPILLS[step] if entry["kernel"].startswith("_attend") else 0
        assert entry["stack"] <= spills, entry
        assert entry["local"] == 0, entry
        assert entry["dynamic_shared"] <= SHARED_KIB[entry["capability"]] << 10, entry


@pytest.mark.parametrize(("kv_format", "group", "tokens"), HOPPER_STEPS)
def test_hopper_attend_compiles(kv_format: str, group: int, tokens: int, builder: Builder) -> None:
    launches = {entry["kernel"]: entry for entry in builder("hopper", kv_format, group, tokens)}
    # A tile would have more gaps than rows of one or two query heads.
    kernels = {"_union_kernel"} | ({"_attend_tiles_kernel"} if group > 2 else set())
    assert {name for name, entry in launches.items() if entry["wgmma"]} >= kernels
    for name, entry in launches.items():
        known = MERGE_SPILLS if (name, group) == ("_attend_tiles_kernel", 64) else 0
        known = known or HOPPER_SPILLS.get(name, 0 if name in kernels else 152)
        assert entry["stack"] <= known, entry
        assert entry["local"] == 0, entry
        assert entry["dynamic_shared"] <= SHARED_KIB[90] << 10, entry
        assert entry["scratch"] < 512 << 20, entry
        assert not entry["warnings"], entry
    for name in kernels:
        kind = "f16" if kv_format == "fp16" else "bf16"
        assert launches[name]["wgmma"] == f"m64n128k16.f32.{kind}.{kind}", launches[name]
        loops = launches[name]["loops"]
        consumers = 3 if name == "_union_kernel" and tokens >= 1024 else 2
        assert len(loops) == consumers, "one for each consumer"
        known = HOPPER_LOOP_SPILLS.get((name, max(8, group)), 0)
        for loop in loops:
            assert loop["products"] == 16 and loop["local"] <= known, loop


@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize("index_format", ["bf16", "fp16", "fp8_e4m3"])
def test_hopper_index_compiles(index_format: str, heads: int, builder: Builder) -> None:
    launches = {entry["kernel"]: entry for entry in builder("hopper_index", index_format, heads)}
    assert set(launches) == {"_hide_kernel", "_list_kernel", "_scores_kernel", "_select_kernel"}
    for name, entry in launches.items():
        assert entry["stack"] <= HOPPER_SPILLS.get(name, 0), entry
        assert entry["local"] == 0, entry
        assert entry["dynamic_shared"] <= SHARED_KIB[90] << 10, entry
        assert not entry["warnings"], entry
    kind = {"fp16": "k16.f32.f16.f16", "bf16": "k16.f32.bf16.bf16"}.get(
        index_format, "k32.f32.e4m3.e4m3"
    )
    scores = launches["_scores_kernel"]
    assert scores["wgmma"] == f"m64n128{kind}", scores
    assert len(scores["loops"]) == 2, "one for each consumer"
    for loop in scores["loops"]:
        assert loop["products"] == (8 if index_format == "fp8_e4m3" else 16), loop
        assert loop["local"] == 0, loop
        assert loop["overlaps"], "the maxima of one product are taken while the other is made"


@pytest.mark.parametrize(("kv_format", "query_len", "group"), HOPPER_FEW)
def test_hopper_decode_compiles(
    kv_format: str, query_len: int, group: int, builder: Builder
) -> None:
    launches = {entry["kernel"]: entry for entry in builder("hopper", kv_format, group, query_len)}
    assert ("_union_lists_kernel" in launches) == (query_len > 1)
    entry = launches["_decode_kernel"]
    rows = max(8, group)
    columns = min(query_len * rows, max(32, rows))
    kind = "bf16" if kv_format == "bf16" else "f16"
    assert entry["wgmma"] == f"m64n{columns}k16.f32.{kind}.{kind}", entry
    assert not entry["warnings"], entry
    assert entry["local"] == 0, entry
    assert entry["stack"] <= HOPPER_FEW_SPILLS.get(columns, {}).get(kv_format, 0), entry
    # Two programs of one consumer share a multiprocessor, each with 1 KiB that is not its own.
    programs = 1 if query_len > columns // rows else 2
    assert entry["dynamic_shared"] + 1024 <= (228 << 10) // programs, entry
    assert entry["registers"] == (168 if programs == 1 else 128), entry


@pytest.mark.parametrize(("kv_format", "query_len"), [*HOPPER_ROWS])
def test_hopper_rows_compile(kv_format: str, query_len: int, builder: Builder) -> None:
    launches = {entry["kernel"]: entry for entry in builder("hopper", kv_format, 16, query_len, 1)}
    entry = launches["_rows_kernel"]
    kind = "bf16" if kv_format == "bf16" else "f16"
    assert entry["wgmma"] == f"m64n128k16.f32.{kind}.{kind}", entry
    assert not entry["warnings"], entry
    assert entry["local"] == 0, entry
    assert entry["stack"] <= HOPPER_ROWS[kv_format, query_len], entry
    assert entry["dynamic_shared"] <= SHARED_KIB[90] << 10, entry
    # Two consumers and a producer; with a converter, four.
    assert entry["registers"] == (168 if kv_format == "bf16" else 128), entry
    assert [loop["products"] for loop in entry["loops"]] == [16, 16], entry
    known = 0 if kv_format == "bf16" else HOPPER_ROWS_LOOP
    assert all(loop["local"] <= known for loop in entry["loops"]), entry


def compile_hopper_and_print(kv_format: str, group: int, query_len: int, rows: int = 0) -> None:
    """One line of JSON for each kernel that ``attend`` launches on Hopper.

    Args:
        rows: queries of few tokens are rows of the products; else columns.
    """
    import torch

    import msattn

    launched = compile_launches(lambda: 90)
    from msattn.kernels.hopper import attend, attend_decode, attend_rows
    from msattn.kernels.triton import attend_union, launch

    for module in (launch, attend_union):
        module.capability = lambda device: (9, 0)
    launch.num_processors = lambda device: 132
    attend_decode.DIRECT_ENTRIES = 0
    attend_decode.pays = lambda *_: True
    attend_rows.MIN_TOKENS = 1 if rows else 1 << 30
    config = msattn.MSAConfig(64, 64 // group, 64 // group)
    requests = max(200 // query_len, 1)
    table = torch.zeros(requests, 160, dtype=torch.int32)
    batch = msattn.Batch.from_lists([query_len] * requests, [20000] * requests, table)
    plan = msattn.make_plan(batch, config, kv_format)
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    q = torch.zeros(plan.max_rows, config.num_q_heads, config.head_dim, dtype=dtype)
    ids = torch.zeros(plan.max_rows, config.num_kv_heads, config.topk, dtype=torch.int32)
    cache = msattn.KVCache.allocate(1, config, kv_format)
    attend.attend(q, cache, ids, plan, 0.1, 1.0, torch.zeros_like(q), torch.zeros(q.shape[:2]))
    print_hopper_launches(launched, plan, 16 if rows or query_len > 16 else None)


def compile_hopper_index_and_print(index_format: str, heads: int) -> None:
    """One line of JSON for each kernel that both index stages launch on Hopper."""
    import torch

    import msattn

    launched = compile_launches(lambda: 90)
    from msattn.kernels.hopper import indexer
    from msattn.kernels.triton import launch

    launch.capability = lambda device: (9, 0)
    launch.num_processors = lambda device: 132
    config = msattn.MSAConfig(16 * heads, heads, heads)
    table = torch.zeros(1, 160, dtype=torch.int32)
    plan = msattn.make_plan(msattn.Batch.from_lists([200], [2000], table), config, "bf16")
    index = msattn.IndexCache.allocate(1, config, index_format)
    index_q = torch.zeros(200, heads, 128, dtype=index.tensor.dtype)
    ids = torch.zeros(200, heads, config.topk, dtype=torch.int32)
    indexer.index_scores(index_q, index, plan, torch.zeros(heads, 200, plan.num_blocks))
    indexer.index_select(index_q, index, plan, ids)
    print_hopper_launches(launched, plan, 8 * index.tensor.element_size())


def compile_launches(capability: Callable[[], int]) -> dict[str, Any]:
    """From now on kernels are compiled, not run; the last one of each name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability(), 32)

        def get_current_device(self) -> int:
            return capability()

        def get_current_stream(self, device: int) -> int:
            return 0

    launched: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched[kernel.__name__] = run(kernel, *args, **{**kwargs, "warmup": True})

    JITFunction.run = compile_only
    driver.set_active(Driver())
    return launched


def print_hopper_launches(launched: dict[str, Any], plan: Any, products: int | None) -> None:
    """What the assembler made of them; loops of so many products, None: without the loops."""
    scratch = sum(tensor.nbytes for tensor in plan._workspaces.values())
    for name, compiled in launched.items():
        usage = resources(compiled.asm["cubin"])
        usage["dynamic_shared"] = compiled.metadata.shared
        wgmma = re.findall(r"wgmma.mma_async.sync.aligned.(\S+)", compiled.asm["ptx"])
        facts = {"kernel": name, "wgmma": " ".join({*wgmma}), "scratch": scratch, **usage}
        facts["warnings"] = assembler_warnings(compiled.asm["ptx"])
        facts["loops"] = (
            product_loops(compiled.asm["cubin"], products) if products and wgmma else []
        )
        print(json.dumps(facts))


def compile_attend_and_print(kv_format: str, step: str) -> None:
    """One line of JSON for each kernel that ``attend`` launches for M3 on each target."""
    import torch

    import msattn

    capability = 0
    launched = compile_launches(lambda: capability)
    msattn.arch.capability = lambda device: divmod(capability, 10)
    from msattn.kernels.triton import attend, launch

    launch.num_processors = lambda device: 100
    query_len, seq_len = ATTEND_STEPS[step]
    config = msattn.MSAConfig()
    table = torch.zeros(1, seq_len // 128, dtype=torch.int32)
    q = torch.zeros(query_len, config.num_q_heads, config.head_dim, dtype=torch.bfloat16)
    ids = torch.zeros(query_len, config.num_kv_heads, config.topk, dtype=torch.int32)
    lse = torch.zeros(q.shape[:2])
    for capability in SHARED_KIB:
        msattn.arch.shared_memory.cache_clear()
        launch.has_native_fp8.cache_clear()
        plan = msattn.make_plan(
            msattn.Batch.from_lists([query_len], [seq_len], table), config, kv_format
        )
        cache = msattn.KVCache.allocate(1, config, kv_format)
        attend.attend(q, cache, ids, plan, 0.1, 1.0, torch.zeros_like(q), lse)
        scratch = sum(tensor.nbytes for tensor in plan._workspaces.values())
        for name, compiled in launched.items():
            usage = resources(compiled.asm["cubin"])
            usage["dynamic_shared"] = compiled.metadata.shared
            usage["scratch"] = scratch
            print(json.dumps({"capability": capability, "kernel": name, **usage}))
        launched.clear()


def compile_and_print(build: Build) -> None:
    """One line of JSON for each target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = build.kernel.partition(":")
    kernel = getattr(import_module(f"msattn.kernels.triton.{module}"), name)
    index = {name: i for i, name in enumerate(kernel.arg_names)}
    by_name = {key for key in build.constants if isinstance(key, str)}
    unknown = (by_name | set(build.types)) - set(index)
    assert not unknown, f"{build.kernel} has no {unknown}"
    signature = {
        name: "constexpr" if name in by_name else build.types.get(name, "i32") for name in index
    }
    constants = {
        (index[key],) if isinstance(key, str) else (index[key[0]], *key[1:]): (
            getattr(triton.language, value.removeprefix("tl.")) if isinstance(value, str) else value
        )
        for key, value in build.constants.items()
    }
    # What the launcher finds: pointers are aligned, and strides are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for name, i in index.items()
        if str(signature[name]).startswith("*")
        or (name.startswith("stride") and signature[name] == "i32")
    }
    for capability in build.capabilities:
        if follows := index.get("FOLLOWS"):
            signature["FOLLOWS"] = "constexpr"
            constants[(follows,)] = capability >= 90
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", capability, 32),
            options=build.options,
        )
        usage = resources(compiled.asm["cubin"])
        usage["dynamic_shared"] = compiled.metadata.shared
        wgmma = re.findall(r"wgmma.mma_async.sync.aligned.(\S+)", compiled.asm["ptx"])
        print(json.dumps({"capability": capability, "wgmma": " ".join({*wgmma}), **usage}))


def resources(cubin: bytes) -> dict[str, int]:
    """What the assembler says that a kernel takes."""
    text = disassemble(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    names = ("registers", "stack", "shared", "local")
    return dict(zip(names, map(int, found.groups()), strict=True))


_MARKS = {"DEPBAR.LE gsb0, 0x1": "1", "DEPBAR.LE gsb0, 0x0": "0", "FMNMX": "M"}


def product_loops(cubin: bytes, together: int) -> list[dict[str, Any]]:
    """Of each so many products of a warpgroup: the loop around them, and what is in it."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", disassemble(cubin, "-sass"), re.M)
    code = {int(address, 16): text for address, text in lines}
    products = [address for address, text in code.items() if "GMMA" in text]
    jumps = [
        (int(target[1], 16), address)
        for address, text in code.items()
        if (target := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text))
    ]
    loops = []
    for i in range(0, len(products), together):
        around = [
            (first, last)
            for first, last in jumps
            if first <= products[i] and products[i : i + together][-1] <= last
        ]
        first, last = min(around, key=lambda loop: loop[1] - loop[0])
        body = [text for address, text in code.items() if first <= address <= last]
        counts = {key: sum(key in text for text in body) for key in ("GMMA", "LDL", "STL")}
        local = counts["LDL"] + counts["STL"]
        # Maxima after the wait for all products but one, before that for all.
        order = "".join(mark for text in body for key, mark in _MARKS.items() if key in text)
        overlaps = re.search(r"1M{32,}0", order) is not None
        loops.append(
            {"products": counts["GMMA"], "local": local, "instructions": len(body)}
            | {"overlaps": overlaps}
        )
    return loops


def assembler_warnings(ptx: str) -> list[str]:
    """What the assembler says of products that wait for one another (C75xx), and the like."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if re.search("C75|erializ|arning", line)]


def disassemble(cubin: bytes, option: str) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def serve_builds() -> None:
    """For each line, a list of arguments: status, output and errors of a fork that builds them."""
    import torch  # noqa: F401
    import triton.compiler  # noqa: F401

    import msattn  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                signal.alarm(BUILD_SECONDS)
                os._exit(_try_to_build(json.loads(line)))
            _, status = os.waitpid(child, 0)
            out.seek(0)
            errors.seek(0)
            answer = os.waitstatus_to_exitcode(status), out.read(), errors.read()
            print(json.dumps(answer), flush=True)


def _try_to_build(arguments: list[str]) -> int:
    try:
        build_and_print(*arguments)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def build_and_print(name: str, *arguments: str) -> None:
    if name == "hopper_index":
        compile_hopper_index_and_print(arguments[0], int(arguments[1]))
    elif name == "hopper":
        compile_hopper_and_print(arguments[0], *map(int, arguments[1:]))
    elif arguments:
        compile_attend_and_print(name, *arguments)
    else:
        compile_and_print(BUILDS[name])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        build_and_print(*sys.argv[1:])
    else:
        serve_builds()
