"""Replayed launches are those that Triton's binder would make; on a CPU, where nothing is launched.

The comparison runs in a process of its own, as ``python tests/test_recording.py PART ...``: kernels
are compiled ones there, whereas the tests may have the interpreter's. Triton is told that it has a
Hopper; a compiled kernel is the key it is found by, and a launch is written down.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from stub_cuda import StubCuda

import msattn
from msattn.dispatch import TABLE

CONFIG = msattn.MSAConfig(8, 2, 2, topk=4)
FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
E4M3 = torch.float8_e4m3fn
INDEX_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": E4M3}
INDEX_STAGES = ("index_scores", "index_select", "chunked_index_select")
# Query tokens of a request: tiles that walk their ids, lists, and both schedules.
QUERY_LENS = (1, 3, 70)
IMPLS = ("triton", "hopper")
BLOCKS = 6
COPIED = [4, 6, 19, 21, 23]
"""Calls whose queries Hopper's kernels for prompts copy first: they are not launches alone."""

# Stage, implementation, format of the cache, query tokens of a request. Hopper's kernels depend on
# format and tokens together; elsewhere each is there with each of the others, but not all at once.
PARTS = {
    "attend": [
        *product(["attend"], ["hopper"], FORMATS, QUERY_LENS),
        *(("attend", "triton", *pair) for pair in zip(FORMATS, QUERY_LENS, strict=True)),
    ],
    "index": [
        (*rest, [*INDEX_DTYPES][i % 2], query_len)
        for i, (*rest, query_len) in enumerate(product(INDEX_STAGES, IMPLS, QUERY_LENS))
    ],
    "compact": [*product(["compact_index_select"], ["triton"], ["bf16"], QUERY_LENS[:2])],
    "selection": [*product(["select_blocks"], ["triton"], ["bf16"], QUERY_LENS)],
    "store": [*product(["store_kv"], ["triton"], FORMATS, [3])],
    "store_index": [*product(["store_index_k"], ["triton"], INDEX_DTYPES, [3])],
}
SCALES = {"two scales", "one scale", "q_scale", "all scales", "shared scale", "number"}
BOUND = {
    "attend": {"first", "offset", "strided", "fp16", "lse", "scale", "rows", *SCALES},
    "index": {"first", "offset", "strided", "dtype", "out", "rows", "empty"},
    "selection": {"first", "offset", "strided", "storage", "columns", "out", "rows"},
    "store": {"first", "offset", "strided", "dtype", "rows", "slots", "two scales", "number"},
    "store_index": {"first", "offset", "strided", "dtype", "rows", "slots"},
}
PARTS["c"] = [("attend", "hopper", *step) for step in (("fp8_e4m3", 1), ("nvfp4", 3), ("bf16", 70))]
"""By Triton's own launcher, in C; others are taken to have it called with the same arguments."""
FEW = 10
"""Calls of these: a launcher is built for each list of types."""
BOUND["compact"] = BOUND["index"]
"""Calls that differ in kind from all before, by name."""

PROCESSES = (("attend",), ("index", "compact"), ("selection", "store", "store_index"))
"""Parts that share a process: to start one takes longer than most parts."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize("parts", PROCESSES, ids="-".join)
def test_replayed_launches_are_the_binders(parts: tuple[str, ...]) -> None:
    steps = reports_of(*parts)
    wanted = [(part, *of) for part in parts for of in PARTS[part]]
    assert [(step["part"], *step["of"]) for step in steps] == wanted
    for step in steps:
        stage, impl, _, query_len = step["of"]
        part = step["part"]
        assert step["differences"] == [], step
        assert step["launches"] > 0
        copied = COPIED if (stage, impl, query_len) == ("attend", "hopper", 70) else []
        assert step["bound_again"] == copied, "calls like an earlier one went through the binder"
        filled_alone = {"empty"} if stage == "index_scores" else set()  # nothing is launched
        assert set(step["bound"]) == BOUND[part] - filled_alone, step
        before, after = step["kept"]
        # A call whose queries are copied first is not kept; nor is any, when a bound has grown.
        assert after == 1 < before <= len(BOUND[part]) and step["after_growth"], step
        assert before == len(BOUND[part]) or copied, step


@needs_triton
@pytest.mark.skipif(which("cc") is None, reason="needs a C compiler")
def test_what_triton_launches_in_c() -> None:
    for step in (steps := reports_of("c")):
        assert step["differences"] == [] and step["launches"] >= FEW, step
    assert [tuple(step["of"]) for step in steps] == PARTS["c"]


@needs_triton
def test_kept_launches_are_bounded_and_go_with_their_plan() -> None:
    (report,) = reports_of("kept")
    assert report["kinds"] == report["most"]
    assert report["freed"]
    # Bound, launched by Triton, and told to who wants to know.
    assert report["alone"] == [0, 0, 0]
    assert report["watched"] == [0, 1, 1]


def reports_of(*parts: str) -> list[dict[str, Any]]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, *parts], env=clean, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class Call(NamedTuple):
    """A call of a stage, and its tensors."""

    name: str  # "" for a call like an earlier one
    issue: Callable[[msattn.Plan], None]
    tensors: tuple[torch.Tensor | None, ...]  # all but the plan's
    out: torch.Tensor  # one of them


class Watch(NamedTuple):
    """What happens in a call, of which each is told once."""

    launches: Callable[[], list[tuple[Any, ...]]]  # what the launcher's C function passes on
    bound: list[str]  # kernels that went through Triton's binder
    by_triton: list[object]  # launches that went through Triton's launcher


def rows_of(
    rows: int, *inner: int, dtype: torch.dtype, offset: int = 0, gap: int = 0, spare: int = 0
) -> torch.Tensor:
    """``[rows, *inner]``, ``offset`` elements behind an aligned address.

    ``gap`` elements are between rows, and ``spare`` ones behind the last.
    """
    row = math.prod(inner) + gap
    memory = torch.zeros(rows * row + offset + spare, dtype=dtype)
    strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
    return memory.as_strided((rows, *inner), (row, *strides), offset)


def attend_calls(
    stage: str, impl: str, kv_format: str, rows: int, columns: int = BLOCKS
) -> Iterator[Call]:
    first, other = (cache_of(kv_format) for _ in range(2))
    scaled, scaled_too = (cache_of(kv_format, factor(), factor()) for _ in range(2))

    def call(
        name: str,
        cache: Any = first,
        scale: float = 0.1,
        q_scale: Any = None,
        lse: bool = False,
        rows: int = rows,
        dtype: torch.dtype = torch.bfloat16,
        **layout: int,
    ) -> Call:
        q = rows_of(rows, CONFIG.num_q_heads, CONFIG.head_dim, dtype=dtype, **layout)
        ids = torch.zeros(rows, CONFIG.num_kv_heads, CONFIG.topk, dtype=torch.int32)
        out = torch.empty(q.shape, dtype=torch.bfloat16 if dtype == E4M3 else dtype)
        own_lse = torch.zeros(rows, CONFIG.num_q_heads) if lse else None
        options = {"softmax_scale": scale, "q_scale": q_scale, "out": out, "lse_out": own_lse}
        return Call(
            name,
            lambda plan: msattn.attend(q, cache, ids, plan, impl=impl, **options),
            (q, ids, out, own_lse, *memory_of(cache, q_scale)),
            out,
        )

    yield call("first")
    yield call("")
    yield call("offset", offset=1)
    yield call("", offset=8)
    yield call("", offset=17)
    yield call("strided", gap=8)
    yield call("", gap=8)
    yield call("fp16", dtype=torch.float16)
    yield call("lse", lse=True)
    yield call("", lse=True)
    yield call("scale", scale=-0.1)
    yield call("rows", rows=rows + 3)
    yield call("", rows=rows + 3)
    yield call("", cache=other)
    yield call("two scales", cache=scaled)
    yield call("", cache=scaled_too)
    for i in range(2):
        one = factor()
        yield call("" if i else "one scale", cache=cache_of(kv_format, one, one))
    yield call("q_scale", dtype=E4M3, q_scale=factor())
    yield call("", dtype=E4M3, q_scale=factor())
    # Of one address, and then not any more.
    yield call("shared scale", cache=scaled, dtype=E4M3, q_scale=scaled.k_scale)
    yield call("", cache=scaled_too, dtype=E4M3, q_scale=scaled_too.k_scale)
    yield call("all scales", cache=scaled, dtype=E4M3, q_scale=factor())
    yield call("", cache=scaled_too, dtype=E4M3, q_scale=factor())
    yield call("number", cache=cache_of(kv_format, 0.5))
    yield call("")


def factor() -> torch.Tensor:
    return torch.ones(())


def cache_of(kv_format: str, k_scale: Any = 1.0, v_scale: Any = 1.0) -> msattn.KVCache:
    return msattn.KVCache.allocate(9, CONFIG, kv_format, k_scale=k_scale, v_scale=v_scale)


def memory_of(cache: msattn.KVCache, q_scale: Any = 1.0) -> list[Any]:
    scales = (cache.k_scale, cache.v_scale, q_scale)
    return [cache.tensor, *(x for x in scales if isinstance(x, torch.Tensor))]


def store_calls(
    stage: str, impl: str, kv_format: str, rows: int, columns: int = BLOCKS
) -> Iterator[Call]:
    heads = CONFIG.num_kv_heads
    is_index = stage == "store_index_k"

    def call(
        name: str,
        scales: tuple[Any, ...] = (),
        rows: int = rows,
        dtype: torch.dtype = torch.bfloat16,
        slots: torch.dtype = torch.int64,
        **layout: int,
    ) -> Call:
        mapping = torch.zeros(rows, dtype=slots)
        if is_index:
            index = msattn.IndexCache.allocate(9, CONFIG, INDEX_DTYPES[kv_format])
            tensors = [rows_of(rows, CONFIG.index_head_dim, dtype=dtype, **layout), index.tensor]
            arguments = (tensors[0], index, mapping)
        else:
            k, v = (rows_of(rows, heads, 128, dtype=dtype, **layout) for _ in range(2))
            cache = cache_of(kv_format, *scales)
            tensors, arguments = [k, v, *memory_of(cache)], (k, v, cache, mapping)

        def issue(plan: msattn.Plan) -> None:
            import_module("msattn.store")._CALLS = plan.launches()  # as if it were the process's
            getattr(msattn, stage)(*arguments, impl=impl)

        return Call(name, issue, (*tensors, mapping), mapping)

    yield call("first")
    yield call("")
    yield call("offset", offset=1)
    yield call("", offset=9)
    yield call("strided", gap=8)
    yield call("", gap=8)
    yield call("dtype", dtype=torch.float16)
    yield call("", dtype=torch.float16)
    yield call("rows", rows=rows + 1)
    yield call("slots", slots=torch.int32)
    if not is_index:
        yield call("two scales", (factor(), factor()))
        yield call("", (factor(), factor()))
        yield call("number", (0.5,))
    yield call("")


def index_calls(
    stage: str, impl: str, index_format: str, rows: int, columns: int = BLOCKS
) -> Iterator[Call]:
    function = getattr(msattn, stage.removeprefix("chunked_").removeprefix("compact_"))
    compact = stage == "compact_index_select"
    import_module("msattn.kernels.triton.indexer_compact").MIN_PAGES = 0
    # Rows of 32 scores for each head: three chunks of a few rows.
    limit = 4 * 32 * CONFIG.num_index_heads * -(-rows // 3) if "chunked" in stage else 256 << 20
    import_module("msattn.kernels.triton.indexer").SCORE_BYTES = limit
    keys = INDEX_DTYPES[index_format]
    (another,) = set(INDEX_DTYPES.values()) - {keys}
    first, other = (msattn.IndexCache.allocate(9, CONFIG, keys, compact=compact) for _ in range(2))
    empty = msattn.IndexCache.allocate(0, CONFIG, keys)

    def call(
        name: str,
        index: msattn.IndexCache = first,
        rows: int = rows,
        dtype: torch.dtype = keys,
        out_gap: int = 0,
        **layout: int,
    ) -> Call:
        index_q = rows_of(
            rows, CONFIG.num_index_heads, CONFIG.index_head_dim, dtype=dtype, **layout
        )
        if stage == "index_scores":
            out = rows_of(rows, CONFIG.num_index_heads, columns, dtype=torch.float32, gap=out_gap)
            out = out.transpose(0, 1)
        else:
            out = rows_of(rows, CONFIG.num_kv_heads, CONFIG.topk, dtype=torch.int32, gap=out_gap)
        return Call(
            name,
            lambda plan: function(index_q, index, plan, out=out, impl=impl),
            (index_q, out, index.tensor),
            out,
        )

    yield call("first")
    yield call("")
    yield call("offset", offset=1)
    yield call("", offset=16)
    yield call("", offset=17)
    yield call("strided", gap=16)
    yield call("", gap=16)
    yield call("dtype", dtype=another)
    yield call("", dtype=another)
    yield call("out", out_gap=4)
    yield call("", out_gap=4)
    yield call("rows", rows=rows + 3)
    yield call("", rows=rows + 3)
    yield call("", index=other)
    yield call("empty", index=empty)
    yield call("", index=empty)
    yield call("")


def selection_calls(
    stage: str, impl: str, index_format: str, rows: int, columns: int = BLOCKS
) -> Iterator[Call]:
    def call(
        name: str, rows: int = rows, columns: int = columns, out_gap: int = 0, **layout: int
    ) -> Call:
        scores = rows_of(rows, CONFIG.num_index_heads, columns, dtype=torch.float32, **layout)
        scores = scores.transpose(0, 1)
        out = rows_of(rows, CONFIG.num_kv_heads, CONFIG.topk, dtype=torch.int32, gap=out_gap)
        return Call(
            name,
            lambda plan: msattn.select_blocks(scores, plan, out=out, impl=impl),
            (scores, out),
            out,
        )

    yield call("first")
    yield call("")
    yield call("offset", offset=1)
    yield call("", offset=5)
    yield call("strided", gap=4)
    yield call("", gap=4)
    # The last scores may be read in whole vectors, which are the tensor's memory.
    yield call("storage", spare=8)
    yield call("")
    yield call("", spare=8)
    yield call("columns", columns=columns - 1)
    yield call("out", out_gap=4)
    yield call("", out_gap=4)
    yield call("rows", rows=rows + 3)
    yield call("", rows=rows + 3)


def plan_of(query_len: int, kv_format: str, columns: int = BLOCKS) -> msattn.Plan:
    table, lengths = torch.zeros(2, 12, dtype=torch.int32), [query_len] * 2
    batch = msattn.Batch.from_lists(lengths, lengths, table, max_seq_len=columns * 128)
    return msattn.make_plan(batch, CONFIG, kv_format)


def compare(
    calls: Callable[..., Iterator[Call]], part: str, of: tuple[str, str, str, int], watch: Watch
) -> None:
    """Prints, as JSON, how a plan's later calls differ from first calls of other plans."""
    *rest, kv_format, query_len = of
    make_plan = partial(plan_of, query_len, kv_format)

    def run(plan: msattn.Plan, call: Call) -> tuple[list[Any], bool]:
        watch.bound.clear()
        watch.by_triton.clear()
        for memory in (call.out, *scores_of(plan)):
            memory.fill_(7)
        call.issue(plan)
        hidden = sum(int(memory.isneginf().sum()) for memory in (call.out, *scores_of(plan)))
        names, launches, was_bound = memory_names(call, plan), watch.launches(), bool(watch.bound)
        assert len(watch.by_triton) == was_bound * len(launches)
        return [hidden, *(describe(launch, names) for launch in launches)], was_bound

    plan, differences, names, again = make_plan(), [], [], []
    total = 0
    listed = [*calls(*rest, kv_format, 2 * query_len)]  # all live: no two share an address
    for i, call in enumerate(listed):
        expected, _ = run(make_plan(), call)
        got, was_bound = run(plan, call)
        total += len(got) - 1
        if got != expected:
            differences.append(i)
        if call.name and was_bound:
            names.append(call.name)
        elif was_bound:
            again.append(i)
    kept = [len(plan.launches())]
    wider = torch.zeros(2, 12, dtype=torch.int32)
    plan.update(msattn.Batch.from_lists([query_len] * 2, [9 * 128] * 2, wider))
    first = next(calls(*rest, kv_format, 2 * query_len, columns=9))
    got, was_bound = run(plan, first)
    kept.append(len(plan.launches()))
    report = {"differences": differences, "launches": total, "bound": names, "bound_again": again}
    report |= {"kept": kept, "after_growth": was_bound and got == run(make_plan(9), first)[0]}
    print(json.dumps({"part": part, "of": of, **report}))


def scores_of(plan: msattn.Plan) -> list[torch.Tensor]:
    """Scores that the plan holds between the two stages of index_select."""
    return [memory for key, memory in plan._workspaces.items() if key[0] == "index_scores"]


def memory_names(call: Call, plan: msattn.Plan) -> list[tuple[int, int, Any]]:
    """Where the memory of a call and of its plan begins and ends, and what it is."""
    tiles = [(size, i, x) for size, pair in plan._tiles.items() for i, x in enumerate(pair)]
    named = [
        *enumerate(call.tensors),
        *((("plan", i), x) for i, x in enumerate(plan.tensors)),
        *((("tiles", size, i), x) for size, i, x in tiles),
        *plan._workspaces.items(),
    ]
    storages = ((name, x.untyped_storage()) for name, x in named if x is not None)
    return [(x.data_ptr(), x.data_ptr() + x.nbytes(), name) for name, x in storages]


def describe(value: Any, names: list[tuple[int, int, Any]]) -> Any:
    """What a launch passes, with places in a call's memory for addresses."""
    if isinstance(value, (tuple, list)):
        return tuple(describe(x, names) for x in value)
    if isinstance(value, torch.Tensor):
        return describe(value.data_ptr(), names)
    if not isinstance(value, int):
        return value
    for begin, end, name in names:
        if begin <= value < end:
            return name, value - begin
    # A copy that the call has made, and freed.
    return ("copy", value % 16) if value >= 1 << 40 else value


def kept_launches(watch: Watch) -> dict[str, object]:
    """Of a plan that selects for many numbers of rows: the kinds it keeps, and if it can go."""
    from triton import knobs

    from msattn.calls import MAX_KINDS

    plan = plan_of(1, "bf16")
    for rows in range(2, MAX_KINDS + 9):
        call = next(selection_calls("select_blocks", "triton", "bf16", rows))
        call.issue(plan)
    report: dict[str, object] = {"kinds": len(plan.launches()), "most": MAX_KINDS}
    told: list[object] = []
    for name in ("alone", "watched"):
        watch.bound.clear()
        watch.by_triton.clear()
        call.issue(plan)
        report[name] = [len(watch.bound), len(watch.by_triton), len(told)]
        knobs.runtime.launch_enter_hook.add(told.append)
    gc.disable()
    alive = weakref.ref(plan)
    del plan
    return report | {"freed": alive() is None}


CALLS = {
    "attend": attend_calls,
    "selection": selection_calls,
    "store": store_calls,
    "store_index": store_calls,
    "c": lambda *of, **columns: islice(attend_calls(*of, **columns), FEW),
}


def metadata_of(signature: dict[str, str], options: Any) -> SimpleNamespace:
    """As the compiler would have it, of a kernel with these arguments."""
    boxes = [
        kind[kind.index("[") + 1 : kind.index("]")] for kind in signature.values() if "[" in kind
    ]
    layout = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "fp4_padded": False}
    return SimpleNamespace(
        tensordesc_meta=[{**layout, "block_size": [*map(int, box.split(","))]} for box in boxes],
        launch_cooperative_grid=options.launch_cooperative_grid,
        launch_pdl=options.launch_pdl,
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
    )


def main(*parts: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from msattn.kernels.hopper import attend_decode
    from msattn.kernels.triton import launch

    class Hopper:
        class utils:
            @staticmethod
            def fill_tma_descriptor(*arguments: Any) -> tuple[Any, ...]:
                return arguments

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 5

    launched: list[tuple[Any, ...]] = []
    stub: StubCuda | None = None

    def c_function(*arguments: Any) -> None:
        metadata, *hooks = arguments[10:13]
        launched.append((*arguments[:10], *arguments[13:]))
        for hook in hooks:
            if hook is not None:
                hook(metadata)

    def launches() -> list[tuple[Any, ...]]:
        taken = [*launched] if stub is None else [*stub.launches()]
        launched.clear()
        return taken

    class Launcher(nvidia.CudaLauncher):
        def __call__(self, *arguments: Any) -> None:
            watch.by_triton.append(self)
            super().__call__(*arguments)

    class Kernel(CompiledKernel):
        """Is launched as a compiled kernel is, down to the launcher's C function."""

        def __init__(self, name: str, signature: dict[str, str], options: Any) -> None:
            self.name, self.module = name, 1
            self.src, self.metadata = (
                SimpleNamespace(signature=signature),
                metadata_of(signature, options),
            )
            self.packed_metadata = (options.num_warps, 1, 0)
            self._run = Launcher(self.src, self.metadata)
            if stub is None:
                self.function = name
            else:
                self.function = stub.kernel(
                    nvidia.make_launcher({}, signature, self.metadata.tensordesc_meta)
                )

    def compile(
        kernel: Any, key: str, signature: Any, device: int, constants: Any, options: Any, *_: Any
    ) -> Kernel:
        return Kernel(f"{kernel.__name__} {key}", signature, options)

    run = JITFunction.run

    def binder(kernel: Any, *arguments: Any, **options: Any) -> Any:
        watch.bound.append(kernel.__name__)
        return run(kernel, *arguments, **options)

    if parts == ("c",):
        stub = StubCuda(Path(tempfile.mkdtemp()))
        Hopper.utils = nvidia.CudaUtils()
    else:
        nvidia.make_launcher, nvidia.library_dirs = (lambda *_: ""), list
        nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=partial(c_function))
    watch = Watch(launches, [], [])
    JITFunction._do_compile, JITFunction.run = compile, binder
    driver.set_active(Hopper())
    msattn.arch.capability = launch.capability = lambda device: (9, 0)
    launch.num_processors = lambda device: 132
    attend_decode.pays = lambda *_: True
    for stage, rows in TABLE.items():
        TABLE[stage] = tuple(replace(row, why_not=lambda problem: []) for row in rows)
    if parts == ("kept",):
        print(json.dumps(kept_launches(watch)))
        return
    for part in parts:
        for of in PARTS[part]:
            compare(CALLS.get(part, index_calls), part, of, watch)


if __name__ == "__main__":
    main(*sys.argv[1:])
