"""The Hopper kernels on a CPU, by ``gluon_on_torch``: against the oracle, and against its faults.

Each step runs under several schedules and on several numbers of programs, which must give the same
bits. ``tests/gpu/test_gpu_hopper.py`` has larger steps, for the compiled kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from gluon_machine import Fault, Machine
from gluon_on_torch import emulate
from hopper_step import check_a_key_that_is_nan, run
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from msattn.kernels.hopper import (
    attend,
    attend_kv_major,
    attend_rows,
    attend_union,
    merge_partials,
    softmax,
)
from msattn.kernels.triton import attend as twin
from msattn.kernels.triton import attend_union as twin_union
from msattn.kernels.triton import dequantize, launch
from msattn.testing import compare
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import Inputs, make, make_block_ids

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves"),
    # numpy's, in the interpreter: of NaN and -inf in masked rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

Check = Callable[..., None]

KERNELS = {"union": "_union_kernel", "kv_major": "_attend_tiles_kernel"}
PROGRAMS = (5, 1)
SMALL_CASES = [
    case
    for case in CASES.values()
    # The lists of topk_32 are longer than the kernels': the twin serves it.
    if 0 < case.num_tokens <= 64
    and case.config.num_q_heads <= 16
    and case.config.topk < 32
    # To save seconds; decode_edges and mixed have the like.
    and case.name not in ("decode_square", "verify")
]
PREFILL = Case("prefill", (17, 3), (400, 131), make_config(8, 2, topk=4), spare_rows=2)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Machine]:
    """Runs the Hopper kernels and those of this file, in a schedule of the test's own."""
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "has_native_fp8", lambda device: False)
    for module in (twin, attend_kv_major):  # several chunks
        monkeypatch.setattr(module, "PARTIAL_BYTES", 256 << 10)
    monkeypatch.setattr(attend_kv_major, "MIN_GROUP", 1)
    monkeypatch.setattr(attend, "MAX_FEW_QUERIES", 0)
    monkeypatch.setattr(attend, "MIN_QUERY_LEN", 0)
    monkeypatch.setattr(attend_rows, "pays_for_prompt", lambda *_: False)
    monkeypatch.setattr(dequantize, "MIN_QUERY_LEN", 1)  # narrow pools go by the copy
    prepare_once(monkeypatch, twin_union, "make_lists")
    prepare_once(monkeypatch, compare, "expected_attention")
    modules = (attend, attend_kv_major, attend_union, merge_partials, softmax)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # else each partition's thread starts threads of its own
    yield emulate(monkeypatch, *modules, sys.modules[__name__], seed=seed)
    torch.set_num_threads(threads)


def prepare_once(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """What takes seconds is done once and copied: a test has one step, in tiles of some sizes."""
    prepare, kept = getattr(module, name), {}

    def prepare_or_copy(*arguments: Any, **named: Any) -> Any:
        sizes = tuple(x for x in arguments if isinstance(x, int))
        if sizes not in kept:
            kept[sizes] = prepare(*arguments, **named)
        return deepcopy(kept[sizes])

    monkeypatch.setattr(module, name, prepare_or_copy)


@pytest.fixture
def check(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Check:
    """A step under both schedules: the oracle's numbers, the same bits with any programs."""

    def check_step(inputs: Inputs, ids: torch.Tensor, softmax_scale: float | None = None) -> None:
        for schedule, kernel in KERNELS.items():
            choose(monkeypatch, schedule, PROGRAMS[0])
            out, lse = run(inputs, ids, softmax_scale)
            assert machine.copied[kernel] or not lse.isfinite().any(), f"{kernel} did nothing"
            compare.assert_attention(inputs, ids, out, lse, softmax_scale=softmax_scale)
            for programs in PROGRAMS[1:]:
                choose(monkeypatch, schedule, programs)
                other, other_lse = run(inputs, ids, softmax_scale)
                assert_bitwise_equal(f"{schedule}: out", other, out)
                assert_bitwise_equal(f"{schedule}: lse", other_lse, lse)

    return check_step


def choose(monkeypatch: pytest.MonkeyPatch, schedule: str, programs: int) -> None:
    """The only schedule that runs, and the number of programs that are there.

    Some programs have tiles of three consumers, others tiles of two, with the same bits.
    """
    monkeypatch.setattr(attend_union, "MIN_ROWS", 0 if programs == PROGRAMS[0] else 1 << 30)
    monkeypatch.setattr(attend_union, "ROW_COST", 1e9 if schedule == "kv_major" else 0.0)
    monkeypatch.setattr(launch, "num_processors", lambda device: programs)


@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_small_cases(case: Case, check: Check, seed: int) -> None:
    inputs = make(case)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize(
    ("kv_format", "query"),
    [
        *((name, "model") for name in ("bf16", "fp16", "fp8_e4m3", "nvfp4")),
        *((name, "e4m3") for name in ("bf16", "fp8_e4m3", "nvfp4")),
    ],
)
def test_formats_and_queries(kv_format: str, query: str, check: Check) -> None:
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    dtype = torch.float8_e4m3fn if query == "e4m3" else dtype
    inputs = make(PREFILL, kv_format=kv_format, query_dtype=dtype, scales="0d")
    check(inputs, make_block_ids(inputs))


@pytest.mark.parametrize("layout", ["nhd", "layers", "pair", "all_strided"])
def test_layouts(layout: str, check: Check) -> None:
    inputs = make(PREFILL, layout=LAYOUTS[layout], scales="float")
    check(inputs, make_block_ids(inputs, hostile=False))


def test_a_pair_of_unlike_layouts_is_the_twins(machine: Machine) -> None:
    """One set of strides is told to the kernels for K and V."""
    inputs = make(PREFILL, layout=LAYOUTS["unlike_pair"])
    ids = make_block_ids(inputs, hostile=False)
    out, lse = run(inputs, ids)
    assert not machine.copied
    compare.assert_attention(inputs, ids, out, lse)


@pytest.mark.parametrize("group", [1, 3, 8, 16, 64])
def test_groups(group: int, check: Check) -> None:
    config = make_config(group, 2 if group < 16 else 1, topk=3)
    inputs = make(Case("groups", (17, 9), (400, 9), config))
    check(inputs, make_block_ids(inputs))


@pytest.mark.parametrize("softmax_scale", [-0.1, 0.0])
def test_softmax_scales(softmax_scale: float, check: Check) -> None:
    inputs = make(PREFILL)
    check(inputs, make_block_ids(inputs), softmax_scale)


def test_a_key_that_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "union", PROGRAMS[0])
    check_a_key_that_is_nan(make(PREFILL))


def test_queries_that_lie_askew(check: Check) -> None:
    """At an address that the copy engine does not read from."""
    inputs = make(PREFILL)
    memory = torch.empty(inputs.q.numel() + 1, dtype=inputs.q.dtype)
    askew = memory[1:].view(inputs.q.shape).copy_(inputs.q)
    assert askew.data_ptr() % 16
    check(replace(inputs, q=askew), make_block_ids(inputs))


def test_a_block_that_every_token_chose(check: Check) -> None:
    """Its tiles are many programs', beside blocks of one tile."""
    inputs = make(Case("hot", (40,), (600,), make_config(16, 1, topk=3)))
    ids = make_block_ids(inputs)
    ids[:, :, 0] = 0
    check(inputs, ids)


# The emulator itself: it must see what it is for.


@gluon.jit
def _copy_tiles(desc, ring, full, empty, count, PLACES: gl.constexpr, FAULT: gl.constexpr):
    for i in range(count):
        place = i % PLACES
        if FAULT != "a copy too early":
            mbarrier.wait(empty.index(place), ((i // PLACES) & 1) ^ 1)
        mbarrier.expect(full.index(place), 4096 if FAULT == "too few bytes" else 8192)
        tma.async_copy_global_to_shared(desc, [i * 64, 0], full.index(place), ring.index(place))


@gluon.jit
def _square_tiles(out_ptr, ring, full, empty, count, PLACES: gl.constexpr, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    zero = gl.zeros([64, 64], gl.float32, layout=layout)
    for i in range(count):
        place = i % PLACES
        mbarrier.wait(full.index(place), (i // PLACES) & 1)
        tile = ring.index(place)
        square = warpgroup_mma(tile, tile, zero, use_acc=False, is_async=True)
        if FAULT == "an arrival too early" or FAULT == "two arrivals":
            mbarrier.arrive(empty.index(place), count=1)
        square = warpgroup_mma_wait(FAULT == "a wait too short", deps=(square,))
        if FAULT != "an arrival too early" and FAULT != "no arrival":
            mbarrier.arrive(empty.index(place), count=1)
        rows = out_ptr + (i * 64 + row)[:, None] * 64
        gl.store(rows + column[None, :], square)


@gluon.jit
def _squares_kernel(desc, out_ptr, count, PLACES: gl.constexpr, FAULT: gl.constexpr):
    """out = the square of each tile of 64 * 64 numbers"""
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ring = gl.allocate_shared_memory(gl.float16, [PLACES, 64, 64], lines)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_square_tiles, (out_ptr, ring, full, empty, count, PLACES, FAULT)),
            (_copy_tiles, (desc, ring, full, empty, count, PLACES, FAULT)),
        ],
        [1],
        [24],
    )


def squares(count: int = 7, out_tiles: int = 7, fault: str = "none") -> None:
    """Launches the kernel and compares its numbers."""
    x = torch.randint(-4, 5, (7, 64, 64)).half()
    out = torch.full((out_tiles, 64, 64), torch.nan)
    desc = TensorDescriptor(x, [7 * 64, 64], [64, 1], [64, 64], None)
    _squares_kernel[(1,)](desc, out, count, PLACES=2, FAULT=fault, num_warps=4)
    assert torch.equal(out[:count], (x.float() @ x.float())[:count])


def find(fault: str, times: int = 20) -> list[str]:
    """What is seen of a fault under some schedules."""
    seen = []
    for _ in range(times):
        try:
            squares(fault=fault)
        except Fault as error:
            seen.append(str(error))
    return seen


def test_squares_under_many_schedules() -> None:
    assert find("none") == []


def test_a_seed_gives_the_same_schedule(machine: Machine) -> None:
    ends = []
    for start in (1, 1, 2):
        machine.random.seed(start)
        squares()
        ends.append(machine.random.random())
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no arrival", "partition 1 (_copy_tiles) waits for the end of phase 0 of empty[0] (1 arr"),
        ("too few bytes", "partition 0 (_square_tiles) waits for the end of phase 0 of full[0] (0"),
    ],
)
def test_a_deadlock_names_who_waits(fault: str, words: str) -> None:
    errors = find(fault, times=3)
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("deadlock in program (0,) of _squares_kernel: partition 0 (_squ")
        assert words in error


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("an arrival too early", "an operand changed while its product was in flight"),
        ("a copy too early", "an arrival too many in a phase of 1"),
        ("a wait too short", "a product is used that may be in flight"),
        ("two arrivals", "an operand changed while its product was in flight"),
    ],
)
def test_races_are_seen(fault: str, words: str) -> None:
    assert any(words in error for error in find(fault))


def test_accesses_out_of_bounds_are_seen() -> None:
    with pytest.raises(Fault, match="a store out of bounds: element 24576 of 24576"):
        squares(out_tiles=6)


@gluon.jit
def _odd_kernel(x_ptr, out_ptr, count, FAULT: gl.constexpr):
    i = gl.arange(0, 64, layout=None)
    if FAULT == "load":
        i += count
    if FAULT == "overflow":
        i += count * (1 << 30)
    if FAULT == "collision":
        gl.store(out_ptr + i // 2, gl.load(x_ptr + i))
    if FAULT == "unknown":
        gl.atomic_xor(out_ptr, gl.load(x_ptr))
    gl.store(out_ptr + i, gl.load(x_ptr + i))


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("load", Fault, "a load out of bounds: element 64 of 64"),
        ("overflow", Fault, "an overflow of int32"),
        ("collision", Fault, "a store of two elements at one address"),
        ("unknown", NotImplementedError, "atomic_xor of Gluon"),
    ],
)
def test_odd_programs_are_refused(fault: str, error: type[Exception], words: str) -> None:
    x, out = torch.arange(64.0), torch.zeros(64)
    with pytest.raises(error, match=words):
        _odd_kernel[(1,)](x, out, 2, FAULT=fault, num_warps=4)


def test_a_place_of_several_consumers_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why TILES is a multiple of CONSUMERS: a consumer would be a round ahead of a late copy."""
    choose(monkeypatch, "kv_major", programs=1)
    inputs = make(Case("race", (12,), (300,), make_config(64, 1, topk=3)))
    ids = make_block_ids(inputs, hostile=False)
    run(inputs, ids)
    monkeypatch.setattr(attend_kv_major, "TILES", 3)
    with pytest.raises(Fault):
        for _ in range(5):
            run(inputs, ids)
