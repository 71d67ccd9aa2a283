"""Decode and verification on Hopper on a CPU, by ``gluon_on_torch``: against the oracle.

Each step runs as tiles of one token and as tiles of several, whose rows are columns or rows of the
products, on several numbers of programs: some share their units' entries, some have units of their
own. ``tests/gpu/test_gpu_hopper_decode.py``
has larger steps, for the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from gluon_machine import Machine
from gluon_on_torch import emulate
from hopper_step import check_a_key_that_is_nan, run

from msattn.kernels.hopper import (
    attend,
    attend_decode,
    attend_kv_major,
    attend_rows,
    attend_union,
    merge_partials,
    narrow,
    page_ring,
    shares,
    softmax,
)
from msattn.kernels.triton import dequantize, launch
from msattn.testing import compare
from msattn.testing.cases import CASES, LAYOUTS, Case, make_config
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import Inputs, make, make_block_ids

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself"),
    # numpy's, in the interpreter: of NaN and -inf in masked rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

Check = Callable[..., None]


class Tiles(NamedTuple):
    """What tokens are tiles of, and on how many multiprocessors."""

    direct_entries: int  # up to which each token is one
    rows: bool  # of the products; else their columns
    kernel: str
    processors: tuple[int, ...]


TILES = (
    Tiles(1 << 30, False, "_decode_kernel", (1, 3)),
    Tiles(0, False, "_decode_kernel", (200, 3)),
    Tiles(0, True, "_rows_kernel", (200, 3)),
)
SMALL_CASES = [
    case
    for case in CASES.values()
    if 0 < case.num_tokens <= 40 and max(case.query_lens) <= 16 and case.config.num_q_heads <= 16
]
VERIFY = Case("verify", (4, 1, 3), (390, 131, 300), make_config(8, 2, topk=3), spare_rows=2)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Machine]:
    """Runs the kernel, in a schedule of the test's own."""
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(attend_decode, "pays", lambda *_: True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # else each partition's thread starts threads of its own
    monkeypatch.setattr(attend_kv_major, "MIN_GROUP", 1)
    modules = (
        *(attend_decode, attend_rows, narrow, page_ring, shares, softmax),
        *(attend_kv_major, attend_union, merge_partials),
    )
    yield emulate(monkeypatch, *modules, seed=seed)
    torch.set_num_threads(threads)


@pytest.fixture
def check(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Check:
    """A step by each kind of tiles: the oracle's numbers, the same bits each time."""

    def check_step(inputs: Inputs, ids: torch.Tensor, softmax_scale: float | None = None) -> None:
        for tiles in TILES:
            monkeypatch.setattr(attend_decode, "DIRECT_ENTRIES", tiles.direct_entries)
            monkeypatch.setattr(attend_rows, "MIN_TOKENS", 1 if tiles.rows else 1 << 30)
            for processors in tiles.processors:
                monkeypatch.setattr(launch, "num_processors", lambda device, n=processors: n)
                out, lse = run(inputs, ids, softmax_scale)
                copied = machine.copied[tiles.kernel]
                assert copied or not lse.isfinite().any(), "the kernel did nothing"
                compare.assert_attention(inputs, ids, out, lse, softmax_scale=softmax_scale)
            # Where programs share their units' entries, in another order.
            again, lse_again = run(inputs, ids, softmax_scale)
            assert_bitwise_equal("out", again, out)
            assert_bitwise_equal("lse", lse_again, lse)

    return check_step


@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_small_cases(case: Case, check: Check, seed: int) -> None:
    inputs = make(case)
    check(inputs, make_block_ids(inputs, seed=seed))


@pytest.mark.parametrize(
    ("kv_format", "query"),
    [
        *((name, "model") for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4")),
        *((name, "e4m3") for name in ("bf16", "nvfp4")),
    ],
)
def test_formats_and_queries(kv_format: str, query: str, check: Check) -> None:
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    dtype = torch.float8_e4m3fn if query == "e4m3" else dtype
    inputs = make(VERIFY, kv_format=kv_format, query_dtype=dtype, scales="0d")
    check(inputs, make_block_ids(inputs))


@pytest.mark.parametrize(
    ("kv_format", "layout"),
    [
        *(("bf16", layout) for layout in ("nhd", "all_strided")),
        *(("fp8_e4m3", layout) for layout in ("nhd", "layers", "pair", "all_strided")),
    ],
)
def test_layouts(kv_format: str, layout: str, check: Check) -> None:
    inputs = make(VERIFY, kv_format=kv_format, layout=LAYOUTS[layout], scales="float")
    check(inputs, make_block_ids(inputs))


@pytest.mark.parametrize("group", [1, 3, 8, 16, 64])
def test_groups(group: int, check: Check) -> None:
    config = make_config(group, 2 if group < 16 else 1, topk=3)
    inputs = make(Case("groups", (9, 1), (400, 9), config))
    check(inputs, make_block_ids(inputs))


@pytest.mark.parametrize("softmax_scale", [-0.1, 0.0])
def test_softmax_scales(softmax_scale: float, check: Check) -> None:
    inputs = make(VERIFY)
    check(inputs, make_block_ids(inputs), softmax_scale)


def test_a_key_that_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_processors", lambda device: 3)
    for tiles in TILES[1:]:
        monkeypatch.setattr(attend_decode, "DIRECT_ENTRIES", tiles.direct_entries)
        monkeypatch.setattr(attend_rows, "MIN_TOKENS", 1 if tiles.rows else 1 << 30)
        check_a_key_that_is_nan(make(VERIFY))


@pytest.mark.parametrize("slots", [0, 1, 7])
def test_ids_of_any_width(slots: int, check: Check) -> None:
    inputs = make(VERIFY)
    ids = torch.randint(-2, 5, (inputs.case.num_rows, 2, slots), dtype=torch.int32)
    check(inputs, ids)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "nvfp4"])
def test_short_prompts(
    kv_format: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In equal shares; where tokens share little, nothing of them, but each block for its picks."""
    monkeypatch.setattr(attend_decode, "DIRECT_ENTRIES", 0)
    monkeypatch.setattr(attend, "FEW_TOKENS", 0)
    monkeypatch.setattr(dequantize, "MIN_QUERY_LEN", 1)
    monkeypatch.setattr(launch, "num_processors", lambda device: 3)
    case = Case("short", (21, 17), (400, 131), make_config(8, 2, topk=4), spare_rows=2)
    inputs = make(case, kv_format=kv_format, scales="0d")
    ids = make_block_ids(inputs, seed=seed)
    for cost, kernel in ((0.0, "_rows_kernel"), (1e9, "_attend_tiles_kernel")):
        machine.copied.clear()
        monkeypatch.setattr(attend_rows, "ROW_COST", cost)
        out, lse = run(inputs, ids)
        assert set(machine.copied) == {kernel}
        compare.assert_attention(inputs, ids, out, lse)
