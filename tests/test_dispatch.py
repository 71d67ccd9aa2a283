"""The choice of an implementation: first that can serve, by name, never silently another."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import msattn
from msattn import Batch, IndexCache, KVCache, MSAConfig, arch, dispatch, make_plan, why_not
from msattn.dispatch import IMPLEMENTATION_NAMES, STAGES, TABLE, Implementation, Problem, choose

CONFIG = MSAConfig(num_q_heads=4, num_kv_heads=2, num_index_heads=2, topk=4)
CPU = torch.device("cpu")
T = 2


def arguments(stage: str) -> tuple[Any, ...]:
    """Positional arguments of a stage: two tokens of one request, bf16 but for what is fixed."""
    batch = Batch.from_lists([T], [T], [[0]])
    plan = make_plan(batch, CONFIG, "fp8")
    cache = KVCache.allocate(1, CONFIG, "fp8")
    index = IndexCache.allocate(1, CONFIG, "fp16", compact=True)
    slots = torch.arange(T)
    heads, kv_heads = (torch.ones(T, n, 128, dtype=torch.bfloat16) for n in (4, 2))
    ids = torch.zeros(T, 2, 4, dtype=torch.int32)
    return {
        "store_kv": (kv_heads, kv_heads, cache, slots),
        "store_index_k": (kv_heads[:, 0], index, slots),
        "refresh_compact_keys": (index,),
        "index_scores": (kv_heads, index, plan),
        "select_blocks": (torch.zeros(2, T, 1), plan),
        "index_select": (kv_heads, index, plan),
        "attend": (heads, cache, ids, plan),
        "merge_states": ([heads], [torch.zeros(T, 4)]),
    }[stage]


class Fake:
    """An implementation of every stage that only says that it was called."""

    def __init__(self, name: str, reasons: list[str]) -> None:
        self.name, self.reasons = name, reasons
        self.problems: list[Problem] = []
        self.calls: list[str] = []
        self.module = ModuleType(f"fake_{name}_kernels")
        for stage in STAGES:
            setattr(self.module, stage, self._serve(stage))

    def why_not(self, problem: Problem) -> list[str]:
        self.problems.append(problem)
        return self.reasons

    def _serve(self, stage: str) -> Callable[..., None]:
        def serve(*arguments: object) -> None:
            self.calls.append(stage)

        return serve


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    """Put a fake into the table, and nothing else of that name; callers are left as they are."""

    def put(name: str, reasons: list[str]) -> Fake:
        fake = Fake(name, reasons)
        monkeypatch.setitem(sys.modules, fake.module.__name__, fake.module)
        row = Implementation(name, fake.module.__name__, fake.why_not)
        for stage in STAGES:
            others = tuple(i for i in TABLE[stage] if i.name != name)
            monkeypatch.setitem(TABLE, stage, (*others, row))
        return fake

    return put


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is a CPU here, where Triton's kernels do not run."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


stages = pytest.mark.parametrize("stage", STAGES)


def test_the_table_has_a_reference_for_every_stage() -> None:
    assert tuple(TABLE) == STAGES
    for stage, rows in TABLE.items():
        names = [row.name for row in rows]
        assert "reference" in names and len(names) == len(set(names))
        assert set(names) <= set(IMPLEMENTATION_NAMES)
        assert all(callable(getattr(msattn, stage)) for stage in TABLE)


def parameters(row: Implementation, stage: str) -> list[str]:
    """Of the function that a row names; read, not imported: not every machine has its compiler."""
    source = Path(msattn.__file__).parent.joinpath(*row.module.split(".")).with_suffix(".py")
    functions = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef)]
    (function,) = (function for function in functions if function.name == stage)
    return [argument.arg for argument in function.args.args]


@stages
def test_rows_name_functions_of_the_same_arguments(stage: str) -> None:
    reference = next(row for row in TABLE[stage] if row.name == "reference")
    assert reference.load(stage).__module__ == f"msattn{reference.module}"
    for row in TABLE[stage]:
        assert parameters(row, stage) == parameters(reference, stage), row.name


@stages
def test_on_a_cpu_only_the_reference_serves(stage: str) -> None:
    assert why_not(stage, impl="reference") == []
    assert why_not(stage, impl="auto") == []
    for name in ("hopper", "triton"):
        reasons = why_not(stage, impl=name, device="cpu", config=CONFIG, kv_format="bf16")
        assert reasons and all(isinstance(reason, str) and reason for reason in reasons)


@stages
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_named_one_that_cannot_serve_raises_its_reasons(stage: str, name: str) -> None:
    """Nothing is tried in its place."""
    with pytest.raises(NotImplementedError) as raised:
        getattr(msattn, stage)(*arguments(stage), impl=name)
    message = str(raised.value)
    assert message.startswith(f"impl='{name}' cannot serve {stage}: {name}: ")
    assert "reference: " not in message


@stages
@pytest.mark.parametrize("impl", [*IMPLEMENTATION_NAMES, "auto"])
def test_a_device_that_is_not_here_is_a_reason(
    stage: str, impl: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    arch.capability.cache_clear()
    request.addfinalizer(arch.capability.cache_clear)
    asked = IMPLEMENTATION_NAMES if impl == "auto" else (impl,)
    names = {row.name for row in TABLE[stage] if row.name in asked}
    if find_spec("triton") is None:
        names -= {"triton"}
    for count, device, reason in (
        (0, "cuda", "no CUDA device on this machine"),
        (0, "cuda:1", "no CUDA device on this machine"),
        (2, "cuda:2", "no cuda:2 on this machine, which has 2 CUDA devices"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        found = why_not(stage, impl=impl, device=device)
        expected = {f"{name}: {reason}" if impl == "auto" else reason for name in names}
        assert found and expected <= {*found}


@stages
def test_a_gpu_that_is_asked_about_need_not_be_here(stage: str) -> None:
    problem = Problem(stage, torch.device("cuda"), capability=(9, 0))
    for row in TABLE[stage]:
        assert not any("on this machine" in reason for reason in row.why_not(problem))


@stages
def test_a_missing_one_says_what_there_is(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row for row in TABLE[stage] if row.name == "reference")
    monkeypatch.setitem(TABLE, stage, rows)
    assert why_not(stage, impl="triton") == [
        f"this version has no triton implementation of {stage} (has reference)"
    ]


@stages
def test_elsewhere_nothing_serves(stage: str) -> None:
    (reason,) = why_not(stage, impl="reference", device="meta")
    assert reason.startswith("runs on cpu and cuda, not on meta")
    against = why_not(stage, impl="auto", device="meta")
    assert {reason.partition(": ")[0] for reason in against} == set(IMPLEMENTATION_NAMES)
    with pytest.raises(NotImplementedError) as raised:
        choose("auto", Problem(stage, torch.device("meta")))
    message = str(raised.value)
    assert message.startswith(f"impl='auto' cannot serve {stage}: ")
    for name in IMPLEMENTATION_NAMES:
        assert f"{name}: " in message
    assert reason in message


@stages
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_new_row_serves_first(stage: str, name: str, install: Callable[..., Fake]) -> None:
    fake = install(name, [])
    for impl in ("auto", name):
        getattr(msattn, stage)(*arguments(stage), impl=impl)
    getattr(msattn, stage)(*arguments(stage))
    assert fake.calls == [stage] * 3
    assert why_not(stage, impl=name) == []


@stages
def test_a_row_with_reasons_is_passed_over(stage: str, install: Callable[..., Fake]) -> None:
    fake = install("triton", ["needs a Tuesday", "needs topk of 5"])
    getattr(msattn, stage)(*arguments(stage))
    assert fake.problems and not fake.calls
    assert why_not(stage, impl="triton") == ["needs a Tuesday", "needs topk of 5"]
    assert why_not(stage, impl="auto") == []
    with pytest.raises(NotImplementedError) as raised:
        getattr(msattn, stage)(*arguments(stage), impl="triton")
    assert str(raised.value) == (
        f"impl='triton' cannot serve {stage}: triton: needs a Tuesday, needs topk of 5"
    )
    assert not fake.calls


def test_a_device_is_asked_once(install: Callable[..., Fake]) -> None:
    """Its facts do not change, and asking is a good part of a call; a new row asks again."""
    on_device = Problem("attend", torch.device("cuda:0"), CONFIG, FP8, num_blocks=1)
    first = install("hopper", [])
    functions = {choose("auto", on_device) for _ in range(3)}
    assert functions == {first.module.attend} and first.problems == [on_device]
    choose("auto", on_device._replace(num_blocks=2))
    assert len(first.problems) == 2
    second = install("hopper", [])
    assert choose("auto", on_device) is second.module.attend
    install("hopper", ["asleep"])
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="asleep"):
            choose("hopper", on_device)


def test_hopper_goes_before_triton_wherever_its_row_stands(install: Callable[..., Fake]) -> None:
    hopper, triton = install("hopper", []), install("triton", [])
    msattn.attend(*arguments("attend"))
    assert (hopper.calls, triton.calls) == (["attend"], [])
    msattn.attend(*arguments("attend"), impl="triton")
    assert (hopper.calls, triton.calls) == (["attend"], ["attend"])


def test_all_refuse(install: Callable[..., Fake]) -> None:
    for name in IMPLEMENTATION_NAMES:
        install(name, [f"{name} is asleep"])
    with pytest.raises(NotImplementedError) as raised:
        msattn.attend(*arguments("attend"))
    assert str(raised.value) == (
        "impl='auto' cannot serve attend: hopper: hopper is asleep; triton: triton is asleep; "
        "reference: reference is asleep"
    )
    assert why_not("attend", impl="auto") == [
        "hopper: hopper is asleep",
        "triton: triton is asleep",
        "reference: reference is asleep",
    ]


FP8, FP16, BF16 = msattn.KV_FORMATS["fp8_e4m3"], msattn.KV_FORMATS["fp16"], torch.bfloat16
PROBLEMS = {
    "store_kv": Problem("store_kv", CPU, None, FP8, BF16),
    "store_index_k": Problem("store_index_k", CPU, None, FP16, BF16),
    "refresh_compact_keys": Problem("refresh_compact_keys", CPU, None, FP16),
    "index_scores": Problem("index_scores", CPU, CONFIG, FP16, BF16, 1, max_query_len=2),
    "select_blocks": Problem("select_blocks", CPU, CONFIG, num_blocks=1),
    "index_select": Problem("index_select", CPU, CONFIG, FP16, BF16, 1, max_query_len=2),
    "attend": Problem("attend", CPU, CONFIG, FP8, BF16, num_blocks=1, max_query_len=2),
    "merge_states": Problem("merge_states", CPU),
}


@stages
def test_what_an_implementation_is_asked(stage: str, install: Callable[..., Fake]) -> None:
    fake = install("hopper", [])
    getattr(msattn, stage)(*arguments(stage))
    assert fake.problems == [PROBLEMS[stage]]


def test_why_not_asks_the_same(install: Callable[..., Fake]) -> None:
    """A plan gives what is not given itself."""
    fake = install("hopper", [])
    plan = make_plan(Batch.from_lists([1], [1], [[0]], device="meta"), CONFIG, "fp8")
    other = MSAConfig(topk=8)
    why_not("attend", impl="hopper")
    why_not("attend", impl="hopper", plan=plan)
    why_not("attend", impl="hopper", plan=plan, device="cpu", config=other, kv_format="nvfp4")
    why_not("attend", impl="hopper", query_dtype=torch.float16, device="cuda:1")
    meta, nvfp4 = torch.device("meta"), msattn.KV_FORMATS["nvfp4"]
    assert fake.problems == [
        Problem("attend", CPU),
        Problem("attend", meta, CONFIG, FP8, num_blocks=1, max_query_len=1),
        Problem("attend", CPU, other, nvfp4, num_blocks=1, max_query_len=1),
        Problem("attend", torch.device("cuda:1"), None, None, torch.float16),
    ]


def test_an_empty_step_asks_for_nothing(install: Callable[..., Fake]) -> None:
    """No tokens: nothing to serve, so no reason can stand in the way."""
    for name in IMPLEMENTATION_NAMES:
        install(name, ["asleep"])
    plan = make_plan(Batch.from_lists([], [], []), CONFIG, "bf16")
    cache, index = KVCache.allocate(1, CONFIG), IndexCache.allocate(1, CONFIG)
    slots = torch.arange(0)
    kv, q = torch.ones(0, 2, 128), torch.ones(0, 4, 128)
    assert msattn.sparse_attention(q, kv, kv, kv, kv[:, 0], cache, index, plan, slots).numel() == 0
    assert msattn.select_blocks(torch.ones(2, 0, 0), plan).numel() == 0
    assert msattn.index_scores(kv, index, plan).numel() == 0
    assert msattn.merge_states([q], [q[..., 0]])[0].numel() == 0


def without_tokens(stage: str) -> tuple[Any, ...]:
    """The arguments of a stage for a step that has none."""
    plan = make_plan(Batch.from_lists([], [], []), CONFIG, "bf16")
    cache, index = KVCache.allocate(1, CONFIG), IndexCache.allocate(1, CONFIG, compact=True)
    kv, q, slots = torch.ones(0, 2, 128), torch.ones(0, 4, 128), torch.arange(0)
    arguments: dict[str, tuple[Any, ...]] = {
        "store_kv": (kv, kv, cache, slots),
        "store_index_k": (kv[:, 0], index, slots),
        "refresh_compact_keys": (index, slots),
        "index_scores": (kv, index, plan),
        "select_blocks": (torch.ones(2, 0, 0), plan),
        "index_select": (kv, index, plan),
        "attend": (q, cache, torch.zeros(0, 2, 4, dtype=torch.int32), plan),
        "merge_states": ([q], [q[..., 0]]),
    }
    return arguments[stage]


@stages
def test_a_named_one_must_serve_an_empty_step_too(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, arguments = getattr(msattn, stage), without_tokens(stage)
    for impl in ("auto", "reference"):
        call(*arguments, impl=impl)
    with pytest.raises(ValueError, match=r"^impl: expected .* or reference, got 'fast'$"):
        call(*arguments, impl="fast")
    refusal = f"^impl='hopper' cannot serve {stage}: hopper: "
    with pytest.raises(NotImplementedError, match=refusal):
        call(*arguments, impl="hopper")
    monkeypatch.setattr("msattn.env.IMPL", "hopper")
    with pytest.raises(NotImplementedError, match=refusal):
        call(*arguments)


@stages
def test_every_stage_is_launched_by_prepare(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the device that a launch is for."""
    launched: list[str] = []

    def prepare(impl: str, problem: Problem, *arguments: object) -> Callable[[], None]:
        return lambda: launched.append(problem.stage)

    for module in ("calls", "combine"):
        monkeypatch.setattr(sys.modules[f"msattn.{module}"], "prepare", prepare)
    getattr(msattn, stage)(*arguments(stage))
    assert launched == [stage]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process: the environment is read at import."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MSATTN_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


MERGE = """
import torch, msattn
out, lse = [torch.ones(1, 1, 16)], [torch.zeros(1, 1)]
def merge(**impl):
    try:
        return float(msattn.merge_states(out, lse, **impl)[0].sum())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_what_triton_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for the interpreter's CPU, so that the device is no reason."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def reasons(stage: str, **changes: int) -> str:
        config = MSAConfig(4, 2, 2, topk=4, **changes)
        return "; ".join(why_not(stage, impl="triton", config=config))

    assert "head_dim=256" in reasons("attend", head_dim=256)
    assert reasons("store_kv", head_dim=256) == reasons("attend", index_head_dim=256) == ""
    assert "head_dim=48 is not a power of two" in reasons("attend", head_dim=48)
    assert "alone" in "".join(why_not("attend", impl="triton", kv_format="fp32"))
    found = why_not("attend", impl="triton", query_dtype=torch.float32)
    assert found == ["queries are torch.float32; tensor cores take 16 bits"]


def test_log_says_each_choice_once() -> None:
    code = MERGE + "merge(); merge(); merge(impl='reference')"
    logged = run(code, MSATTN_LOG="1")
    assert logged.returncode == 0
    assert logged.stderr == "msattn: merge_states is served by reference on cpu\n"
    assert logged.stdout == ""


def test_impl_of_the_environment_stands_for_auto() -> None:
    code = MERGE + "print(merge()); print(merge(impl='reference'))"
    code += "; print(msattn.why_not('merge_states', impl='auto'))"
    done = run(code, MSATTN_IMPL="hopper", MSATTN_LOG="0")
    assert done.stderr == "", "no log unless it is asked for"
    refused, named, against = done.stdout.splitlines()
    assert refused.startswith("NotImplementedError: impl='hopper' cannot serve merge_states: ")
    assert named == "16.0", "an explicit impl goes before the environment's"
    assert against != "[]", "why_not speaks of the same auto"


def test_impl_of_the_environment_is_checked() -> None:
    done = run(MERGE + "print(merge())", MSATTN_IMPL="fast")
    assert done.stdout == (
        "ValueError: MSATTN_IMPL: expected auto, hopper, triton or reference, got 'fast'\n"
    )


@pytest.mark.parametrize(
    ("device", "entered"), [("cuda:0", []), ("cuda:1", ["cuda:1"]), ("cpu", [])]
)
def test_a_stage_is_launched_on_its_own_device(
    device: str, entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current one, which is another with pipeline parallelism, say."""
    seen: list[str] = []

    class On:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            seen.append(str(self.device))

        def __exit__(self, *_: object) -> None:
            seen.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(dispatch, "choose", lambda impl, problem: seen.append)
    launch = dispatch.prepare("auto", Problem("attend", torch.device(device)), "launched")
    assert seen == []
    launch()
    assert seen == [*entered, "launched", *("left" for _ in entered)]
