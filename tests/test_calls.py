"""Calls of a known kind: what makes a call another, and what it must not lose by being known.

The implementation here writes down that it was asked, and records one step for a call; on a CPU,
with no kernels. That Triton's launches are done again as they should be is seen by
``tests/test_recording.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import msattn
from msattn import calls, dispatch, env, store
from msattn.dispatch import TABLE, Implementation
from msattn.recording import current

CONFIG = msattn.MSAConfig(4, 2, 2, topk=4)
TOKENS = 3
E4M3 = torch.float8_e4m3fn


class Fake:
    """An implementation of all stages: what it was asked for, and what was done again."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.again: list[str] = []
        self.module = ModuleType("fake_kernels")
        self.is_whole = True
        for stage in TABLE:
            setattr(self.module, stage, self._implementation(stage))

    def _implementation(self, stage: str) -> Callable[..., None]:
        def serve(*arguments: Any) -> None:
            self.asked.append(stage)
            recording = current()
            assert recording is not None
            recording.steps.append(lambda *_: self.again.append(stage))
            recording.is_whole = self.is_whole

        return serve

    def serves(self, stage: str, plan: msattn.Plan, /, **changed: Any) -> str:
        """How a call is served: ``asked``, ``again`` or neither."""
        self.asked.clear()
        self.again.clear()
        run(stage, plan, **changed)
        assert len(self.asked) + len(self.again) <= 1
        return "asked" if self.asked else "again" if self.again else ""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setitem(sys.modules, "fake_kernels", fake.module)
    for stage, rows in TABLE.items():
        names = ("hopper", "triton")
        fakes = (Implementation(name, "fake_kernels", lambda problem: []) for name in names)
        monkeypatch.setitem(TABLE, stage, (*fakes, rows[-1]))
    monkeypatch.setattr(store, "_CALLS", {})
    return fake


def new_plan(tokens: int = TOKENS, **bounds: Any) -> msattn.Plan:
    return msattn.make_plan(new_batch(tokens, **bounds), CONFIG, "bf16")


def new_batch(tokens: int = TOKENS, seq_len: int = 300) -> msattn.Batch:
    return msattn.Batch.from_lists([tokens], [seq_len], torch.zeros(1, 8, dtype=torch.int32))


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> torch.Tensor:
    """``[TOKENS, *shape]``, so many elements behind an aligned address."""
    count = TOKENS * torch.Size(shape).numel()
    return torch.zeros(count + offset).to(dtype)[offset:].view(TOKENS, *shape)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same with a gap behind each row."""
    *_, last = x.shape
    return torch.cat([x, x], -1)[..., :last]


CACHE = msattn.KVCache.allocate(4, CONFIG)
INDEX = msattn.IndexCache.allocate(4, CONFIG)


def attend_arguments() -> dict[str, Any]:
    ids = rows(2, 4, dtype=torch.int32)
    return {"q": rows(4, 128), "cache": CACHE, "block_ids": ids, "plan": None}


def index_arguments() -> dict[str, Any]:
    return {"index_q": rows(2, 128), "index": INDEX, "plan": None}


def blocks_arguments() -> dict[str, Any]:
    return {"scores": torch.zeros(2, TOKENS, 3), "plan": None}


def kv_arguments() -> dict[str, Any]:
    slots = torch.arange(TOKENS)
    return {"k": rows(2, 128), "v": rows(2, 128), "cache": CACHE, "slot_mapping": slots}


def index_k_arguments() -> dict[str, Any]:
    return {"index_k": rows(128), "index": INDEX, "slot_mapping": torch.arange(TOKENS)}


def refresh_arguments() -> dict[str, Any]:
    return {"index": msattn.IndexCache.allocate(4, CONFIG, compact=True)}


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "attend": attend_arguments,
    "index_scores": index_arguments,
    "index_select": index_arguments,
    "select_blocks": blocks_arguments,
    "store_kv": kv_arguments,
    "store_index_k": index_k_arguments,
    "refresh_compact_keys": refresh_arguments,
}
STAGES = [*ARGUMENTS]
LSE = (4,)
ONE = torch.ones(())


def run(stage: str, plan: msattn.Plan, /, **changed: Any) -> Any:
    """A call of the stage, with new tensors but for those that are given."""
    arguments = ARGUMENTS[stage]() | changed
    if "plan" in arguments:
        arguments["plan"] = plan
    return getattr(msattn, stage)(**arguments)


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_like_an_earlier_one(stage: str, fake: Fake) -> None:
    plan = new_plan()
    served = [fake.serves(stage, plan) for _ in range(3)]
    assert served == ["asked", "again", "again"]


def fp8_query(**options: Any) -> dict[str, Any]:
    return {"q": rows(4, 128, dtype=E4M3), **options}


def shared_scale(k_scale: torch.Tensor, v_scale: torch.Tensor) -> dict[str, Any]:
    return {"cache": msattn.KVCache.allocate(4, CONFIG, k_scale=k_scale, v_scale=v_scale)}


def cache_of(pages: int = 4, **options: Any) -> dict[str, Any]:
    return {"cache": msattn.KVCache.allocate(pages, CONFIG, **options)}


def apart(kv: torch.Tensor) -> dict[str, Any]:
    """A cache of the same shapes and another layout."""
    return {"cache": msattn.KVCache.from_tensor(kv.transpose(1, 2), CONFIG, "bf16")}


def kv_out(**layout: Any) -> dict[str, Any]:
    return {"out": rows(4, 128, **layout)}


# Changes of a call, each with what it changes of another: (stage, name) -> (before, after).
CHANGES: dict[
    tuple[str, str], tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]
] = {
    ("attend", "dtype"): (dict, lambda: {"q": rows(4, 128, dtype=torch.float16)}),
    ("attend", "shape"): (dict, lambda: {"block_ids": rows(2, 5, dtype=torch.int32)}),
    ("attend", "strides"): (dict, lambda: {"q": strided(rows(4, 128))}),
    ("attend", "alignment"): (dict, lambda: {"q": rows(4, 128, offset=1)}),
    ("attend", "strides of ids"): (
        dict,
        lambda: {"block_ids": strided(rows(2, 4, dtype=torch.int32))},
    ),
    ("attend", "an output"): (dict, kv_out),
    ("attend", "another output"): (kv_out, lambda: kv_out(offset=1)),
    ("attend", "dtype of an output"): (
        lambda: fp8_query(**kv_out()),
        lambda: fp8_query(**kv_out(dtype=torch.float16)),
    ),
    ("attend", "return_lse"): (dict, lambda: {"return_lse": True}),
    ("attend", "lse_out"): (
        lambda: {"return_lse": True},
        lambda: {"lse_out": torch.zeros(TOKENS, 4)},
    ),
    ("attend", "softmax_scale"): (dict, lambda: {"softmax_scale": 0.25}),
    ("attend", "its number"): (lambda: {"softmax_scale": 0.5}, lambda: {"softmax_scale": 0.25}),
    ("attend", "q_scale"): (fp8_query, lambda: fp8_query(q_scale=0.5)),
    ("attend", "a tensor q_scale"): (
        lambda: fp8_query(q_scale=0.5),
        lambda: fp8_query(q_scale=torch.ones(())),
    ),
    ("attend", "impl"): (dict, lambda: {"impl": "triton"}),
    ("attend", "pages"): (dict, lambda: cache_of(5)),
    ("attend", "layout of pages"): (
        dict,
        lambda: apart(torch.zeros(4, 128, 2, 256, dtype=torch.bfloat16)),
    ),
    ("attend", "number of a cache"): (dict, lambda: cache_of(k_scale=0.5)),
    ("attend", "number of the other side"): (
        lambda: cache_of(k_scale=0.5),
        lambda: cache_of(v_scale=0.5),
    ),
    ("attend", "scales of a cache"): (dict, lambda: shared_scale(torch.ones(()), torch.ones(()))),
    ("attend", "shared addresses"): (
        lambda: shared_scale(torch.ones(()), torch.ones(())),
        lambda: shared_scale(ONE, ONE),
    ),
    ("index_select", "dtype"): (dict, lambda: {"index_q": rows(2, 128, dtype=torch.float16)}),
    ("index_select", "strides"): (dict, lambda: {"index_q": strided(rows(2, 128))}),
    ("index_select", "format"): (
        dict,
        lambda: {"index": msattn.IndexCache.allocate(4, CONFIG, torch.float16)},
    ),
    ("index_select", "compact keys"): (
        dict,
        lambda: {"index": msattn.IndexCache.allocate(4, CONFIG, compact=True)},
    ),
    ("index_select", "an output"): (dict, lambda: {"out": rows(2, 4, dtype=torch.int32)}),
    ("index_scores", "impl"): (dict, lambda: {"impl": "triton"}),
    ("select_blocks", "columns"): (dict, lambda: {"scores": torch.zeros(2, TOKENS, 2)}),
    ("select_blocks", "memory behind"): (
        dict,
        lambda: {"scores": torch.zeros(6 * TOKENS + 3)[: 6 * TOKENS].view(2, TOKENS, 3)},
    ),
    ("store_kv", "dtype of v"): (dict, lambda: {"v": rows(2, 128, dtype=torch.float32)}),
    ("store_kv", "dtype of slots"): (
        dict,
        lambda: {"slot_mapping": torch.arange(TOKENS, dtype=torch.int32)},
    ),
    ("store_index_k", "axes"): (dict, lambda: {"index_k": rows(1, 128)}),
    ("refresh_compact_keys", "pages"): (dict, lambda: {"pages": torch.arange(2)}),
}


@pytest.mark.parametrize(("stage", "what"), CHANGES, ids=" ".join)
def test_what_makes_a_call_another(stage: str, what: str, fake: Fake) -> None:
    plan = new_plan()
    for changed in CHANGES[stage, what]:
        served = [fake.serves(stage, plan, **changed()) for _ in range(2)]
        assert served == ["asked", "again"]
    assert fake.serves(stage, plan, **CHANGES[stage, what][0]()) == "again"


@pytest.mark.parametrize("stage", STAGES)
def test_what_makes_a_call_another_outside_of_it(
    stage: str, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = new_plan()
    assert fake.serves(stage, plan) == "asked"
    with monkeypatch.context() as patch:
        patch.setattr(env, "IMPL", "triton")
        assert fake.serves(stage, plan) == "asked"
    assert fake.serves(stage, plan) == "again"
    with monkeypatch.context() as patch:
        patch.setitem(TABLE, stage, (*TABLE[stage],)[:2])
        assert fake.serves(stage, plan) == "asked"
    assert fake.serves(stage, plan) == "asked", "from another row"


@pytest.mark.parametrize("stage", STAGES[:4])
def test_a_plan_that_changes(stage: str, fake: Fake) -> None:
    plan = new_plan()
    for batch, expected in (
        (new_batch(), "asked"),
        (new_batch(seq_len=280), "again"),  # within the bounds
        (new_batch(TOKENS - 1), "again"),  # whose rows are fewer than the tensors'
        (new_batch(seq_len=700), "asked"),  # a bound has grown
        (new_batch(), "again"),
    ):
        plan.update(batch)
        assert fake.serves(stage, plan) == expected


@pytest.mark.parametrize("stage", STAGES[:4])
def test_a_step_of_more_tokens_than_a_known_call_has_rows(stage: str, fake: Fake) -> None:
    """No bound of the plan has grown, so that its calls are kept."""
    plan = new_plan(TOKENS + 1)
    for _ in range(2):
        plan.update(new_batch())
        run(stage, plan)
        plan.update(new_batch(TOKENS + 1))
        with pytest.raises(ValueError, match="at least 4 rows"):
            run(stage, plan)
    assert (fake.asked, fake.again) == ([stage], [stage])


def test_each_device_is_another(fake: Fake) -> None:
    """Of all tensors but one, and the checks say so."""
    plan = new_plan()
    run("attend", plan)
    for name in ("q", "block_ids"):
        with pytest.raises(ValueError, match=f"{name}: expected device cpu, got meta"):
            run("attend", plan, **{name: attend_arguments()[name].to("meta")})


# Wrong calls that are like right ones but for what they are asked for wrongly.
WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a bool": ("softmax_scale", {"softmax_scale": 1.0}, {"softmax_scale": True}),
    "a bool for a factor": ("q_scale", {"q_scale": 1.0}, {"q_scale": True}),
    "nothing that can be compared": (
        "softmax_scale",
        {"softmax_scale": 1.0},
        {"softmax_scale": [1]},
    ),
    "no number": ("softmax_scale", {}, {"softmax_scale": float("nan")}),
    "no tensor": ("q", {}, {"q": [1, 2]}),
    "no ids": ("block_ids", {}, {"block_ids": None}),
    "shared memory": ("out", {"out": "new"}, {"out": "expanded"}),
    "another query": ("q_scale", {"q_scale": 1.0}, {"q": "bf16", "q_scale": 1.0}),
    "no implementation": ("impl", {}, {"impl": "fast"}),
    "not hashable": ("impl", {}, {"impl": ["auto"]}),
    "no cache": ("cache", {}, {"cache": None}),
}


def given(options: dict[str, Any]) -> dict[str, Any]:
    out = {"new": rows(4, 128), "expanded": rows(1, 128).expand(TOKENS, 4, 128)}
    made = {"q": rows(4, 128, dtype=E4M3), **options}
    made["q"] = rows(4, 128) if made["q"] == "bf16" else made["q"]
    return made | ({"out": out[options["out"]]} if "out" in options else {})


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_after_a_right_one(what: str, fake: Fake) -> None:
    name, right, wrong = WRONG[what]
    plan = new_plan()
    for _ in range(2):
        run("attend", plan, **given(right))
    fake.again.clear()
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        run("attend", plan, **given(wrong))
    assert fake.again == []


def test_outputs_of_a_known_call_are_new_and_start_the_same(fake: Fake) -> None:
    plan = new_plan()
    firsts = [run("attend", plan, return_lse=True), run("index_scores", plan)]
    agains = [run("attend", plan, return_lse=True), run("index_scores", plan)]
    assert fake.again == ["attend", "index_scores"]
    (out, lse), scores = agains
    assert (out == 0).all() and lse.isneginf().all()
    for first, again in ((firsts[0][0], out), (firsts[0][1], lse), (firsts[1], scores)):
        assert (first.shape, first.dtype) == (again.shape, again.dtype)
        assert first.data_ptr() != again.data_ptr()
    assert run("attend", plan, **fp8_query()).dtype == torch.bfloat16
    assert run("attend", plan, **fp8_query()).dtype == torch.bfloat16
    given = rows(4, 128)
    for _ in range(2):
        assert run("attend", plan, out=given) is given


@pytest.mark.parametrize("stage", ["attend", "index_scores"])
def test_a_known_call_has_no_backward_pass(stage: str, fake: Fake) -> None:
    plan, (name, *_) = new_plan(), ARGUMENTS[stage]()
    run(stage, plan)
    result = run(stage, plan, **{name: ARGUMENTS[stage]()[name].requires_grad_()})
    assert fake.again == [stage]
    with pytest.raises(NotImplementedError, match="no backward pass"):
        result.sum().backward()


def test_what_is_done_again_has_the_calls_own_tensors(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the places where the first call had its own; outputs that are made, too."""
    places: list[dict[int, int]] = []
    done: list[tuple[list[torch.Tensor], list[int]]] = []

    def attend(
        q: Any, cache: Any, ids: Any, plan: Any, s: float, q_s: Any, out: Any, lse: Any
    ) -> None:
        recording = current()
        named = {"q": q, "k": cache.k, "v": cache.v, "ids": ids, "out": out, "lse": lse}
        places.append({name: recording.own[x.data_ptr()] for name, x in named.items()})
        recording.steps.append(lambda own, addresses, stream: done.append((own, addresses)))

    fake.module.attend = attend
    plan = new_plan()
    run("attend", plan, return_lse=True)
    arguments = attend_arguments()
    out, lse = run("attend", plan, return_lse=True, **arguments)
    (place,), ((own, addresses),) = places, done
    named = {"q": arguments["q"], "ids": arguments["block_ids"], "out": out, "lse": lse}
    for name, x in (named | {"k": CACHE.k, "v": CACHE.v}).items():
        assert own[place[name]].data_ptr() == addresses[place[name]] == x.data_ptr()


def test_calls_that_do_more_than_their_steps_are_not_kept(fake: Fake) -> None:
    fake.is_whole, plan = False, new_plan()
    assert [fake.serves("attend", plan) for _ in range(2)] == ["asked"] * 2
    assert plan.launches() == {}


def test_nothing_of_the_reference_is_kept() -> None:
    plan = new_plan()
    for _ in range(2):
        run("attend", plan, impl="reference")
    assert plan.launches() == {}


def test_steps_without_tokens_are_not_kept(fake: Fake) -> None:
    plan = new_plan(0)
    empty = {"q": torch.zeros(0, 4, 128), "block_ids": torch.zeros(0, 2, 4, dtype=torch.int32)}
    assert fake.serves("attend", plan, **empty) == ""
    assert plan.launches() == {}


def test_the_number_of_kinds_is_bounded(fake: Fake) -> None:
    plan = new_plan()
    scales = [1.0 + i for i in range(calls.MAX_KINDS + 1)]
    for scale in scales:
        run("attend", plan, softmax_scale=scale)
    assert len(plan.launches()) == calls.MAX_KINDS
    again = {s: fake.serves("attend", plan, softmax_scale=s) for s in scales[:0:-1]}
    assert set(again.values()) == {"again"}
    assert fake.serves("attend", plan, softmax_scale=scales[0]) == "asked"


def test_a_known_call_in_a_capture_is_noted(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of such a plan stay when a bound grows."""
    plan = new_plan()
    run("attend", plan)
    memory = plan.workspace("partial", (4,), torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr("msattn.plan.is_capturing", lambda device: True)
        assert fake.serves("attend", plan) == "again"
    plan.update(new_batch(seq_len=700))
    assert plan.workspace("partial", (4,), torch.float32) is memory


def test_a_known_call_is_launched_on_its_own_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def on_device(device: torch.device, launch: dispatch.Launch) -> dispatch.Launch:
        asked.append(device)
        return launch

    plan = new_plan()
    run("attend", plan)
    monkeypatch.setattr(calls, "on_device", on_device)
    assert fake.serves("attend", plan) == "again"
    assert asked == [torch.device("cpu")]


def test_a_layer_of_known_calls(fake: Fake) -> None:
    """Nothing is written where one of them is wrong."""
    plan = new_plan()
    kv, x = kv_arguments(), index_arguments()
    layer: dict[str, Any] = {"q": rows(4, 128), **kv, **x, "index_k": rows(128), "plan": plan}
    for expected in ("asked", "again"):
        msattn.sparse_attention(**layer)
        stages = getattr(fake, expected)
        assert stages == ["store_kv", "store_index_k", "index_select", "attend"]
    fake.again.clear()
    with pytest.raises(TypeError, match="q: expected dtype"):
        msattn.sparse_attention(**layer | {"q": layer["q"].double()})
    assert fake.again == []


def test_caches_of_one_kind_have_one(fake: Fake) -> None:
    one, other = (msattn.KVCache.allocate(4, CONFIG) for _ in range(2))
    assert one.memory.kind is other.memory.kind
    assert replace(one, k_scale=2.0).memory.kind is not one.memory.kind
    assert INDEX.memory.kind is msattn.IndexCache.allocate(4, CONFIG).memory.kind


def test_a_copy_of_a_cache(fake: Fake) -> None:
    """It is not the cache that it is a copy of."""
    seen: list[list[int]] = []
    attend = fake.module.attend

    def remembers(*arguments: Any) -> None:
        attend(*arguments)
        current().steps.append(lambda own, addresses, stream: seen.append(addresses))

    fake.module.attend, plan = remembers, new_plan()
    cache = msattn.KVCache.allocate(4, CONFIG)
    run("attend", plan, cache=cache)
    copy = deepcopy(cache)
    for _ in range(2):
        run("attend", plan, cache=copy)
    assert {copy.k.data_ptr(), copy.v.data_ptr()} <= {*seen[-1]}
    assert not {cache.k.data_ptr(), cache.v.data_ptr()} & {*seen[-1]}


def test_a_tensor_without_memory_is_left_to_the_checks(fake: Fake) -> None:
    q = torch.zeros(TOKENS, 4, 100).to_sparse()
    with pytest.raises(ValueError, match=r"^q: expected shape"):
        run("attend", new_plan(), q=q)
