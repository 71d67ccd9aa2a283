"""The SGLang plug-in without SGLang: what it computes, what it leaves alone, how it registers."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_calls import FUNCTIONS, make_arguments

from msattn import env
from msattn.integrations import sglang
from msattn.integrations.sglang import call, plugin, step
from msattn.integrations.sglang.call import Kind
from msattn.integrations.sglang.step import Plans
from msattn.testing.cases import CASES, LAYOUTS, SMALL
from msattn.testing.compare import assert_attention, assert_bitwise_equal, expected_block_ids
from msattn.testing.make import Inputs, make

GPU = torch.device("cuda")
KINDS: tuple[Kind, ...] = ("prefill", "decode")
HOOKS = {"prefill": plugin.around_prefill, "decode": plugin.around_decode}

# Edges of blocks, padding, more blocks than topk, several tokens of a request, init blocks.
STEPS = [
    *("decode_edges", "decode_padded", "decode_spare_rows", "decode_square", "verify", "mixed"),
    *("prefill_short", "prefill_after_prefix", "empty_in_the_middle", "more_queries_than_keys"),
    *("forced_blocks", "m3_tp4_mixed", "no_requests"),
]


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is served where an implementation is named; a test starts without plans and lines."""
    monkeypatch.setattr(env, "IMPL", "reference")
    monkeypatch.setattr(plugin, "PLANS", Plans())
    plugin._log.cache_clear()
    plugin._warm_up.cache_clear()


def serve(kind: Kind, arguments: dict[str, Any]) -> torch.Tensor:
    """The hook's output, where the original must not be called."""
    index_out, out = HOOKS[kind](FUNCTIONS[kind], **arguments)
    assert index_out is None
    return out


def assert_served(kind: Kind, x: Inputs, arguments: dict[str, Any]) -> None:
    out = serve(kind, arguments)
    assert out.is_contiguous() and out.shape == arguments["q"].shape
    tokens = x.case.num_tokens
    full = torch.zeros(x.q.shape, dtype=out.dtype)
    full[:tokens] = out[:tokens]
    assert_attention(x, expected_block_ids(x), full)


# What it computes.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, kind: Kind, seed: int) -> None:
    x = make(CASES[name], seed=seed, layout=LAYOUTS["pair"])
    assert_served(kind, x, make_arguments(x, kind, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kv_format", "index_format", "query"),
    [
        ("fp8_e4m3", "bf16", torch.bfloat16),  # SGLang's fp8 caches on Hopper
        ("fp8_e5m2", "bf16", torch.bfloat16),
        ("fp8_e4m3", "fp8_e4m3", torch.float8_e4m3fn),  # its fp8 matrix products
        ("fp16", "fp16", torch.float16),
    ],
    ids=["e4m3", "e5m2", "all_e4m3", "fp16"],
)
@pytest.mark.parametrize("scales", ["unit", "float"])
def test_formats(
    kv_format: str, index_format: str, query: torch.dtype, scales: Any, kind: Kind, seed: int
) -> None:
    x = make(
        CASES["mixed"],
        seed=seed,
        kv_format=kv_format,
        index_format=index_format,
        query_dtype=query,
        scales=scales,
        layout=LAYOUTS["pair"],
    )
    assert_served(kind, x, make_arguments(x, kind, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_a_capture(kind: Kind, seed: int) -> None:
    """A graph is captured for the longest context, which no table column holds."""
    x = make(CASES["verify"], seed=seed, layout=LAYOUTS["pair"])
    arguments = make_arguments(x, kind, seed=seed)
    arguments["max_seqlen" if kind == "decode" else "max_seqlen_k"] = 10_000
    # Wide enough for the checks of a CPU.
    wide = arguments["req_to_token"].new_full((len(arguments["req_to_token"]), 10_000), -1)
    wide[:, : arguments["req_to_token"].shape[1]] = arguments["req_to_token"]
    assert_served(kind, x, arguments | {"req_to_token": wide})


def test_pages_of_several_blocks(seed: int) -> None:
    x = make(CASES["verify"], seed=seed, layout=LAYOUTS["pair"])
    assert_served("decode", x, make_arguments(x, "decode") | {"page_size": 256})


def test_a_row_of_no_request(seed: int) -> None:
    """Padding may name a row that is not there; it must not be looked up."""
    x = make(CASES["decode_padded"], seed=seed, layout=LAYOUTS["pair"])
    arguments = make_arguments(x, "decode", seed=seed)
    padding = arguments["seq_lens"] == 0
    arguments["slot_ids"] = torch.where(padding, torch.tensor(10**6), arguments["slot_ids"])
    assert bool(padding.any())
    assert_served("decode", x, arguments)


@pytest.mark.parametrize(
    ("given", "factor"),
    [({"sm_scale": 0.2}, 0.2), ({"q_scale": 3.0}, 3 * 128**-0.5), ({"sm_scale": -0.1}, -0.1)],
    ids=["sm_scale", "q_scale", "negative"],
)
def test_softmax_scale(given: dict[str, float], factor: float, seed: int) -> None:
    """q_scale belongs to the logits whatever the query's dtype is."""
    x = make(CASES["decode_one_block"], seed=seed, layout=LAYOUTS["pair"])
    arguments = make_arguments(x, "decode")
    got = serve("decode", arguments | given)
    scaled = arguments | {"sm_scale": factor, "q_scale": None}
    assert_bitwise_equal("out", got, serve("decode", scaled))
    assert not torch.equal(got, serve("decode", arguments))


def test_scales_of_the_indexer_select_nothing(seed: int) -> None:
    x = make(CASES["decode_edges"], seed=seed, layout=LAYOUTS["pair"])
    arguments = make_arguments(x, "decode")
    factors = {"idx_sm_scale": 0.3, "idx_q_scale": 2.0, "idx_k_scale": 1e-3}
    want = serve("decode", arguments)
    assert_bitwise_equal("out", serve("decode", arguments | factors), want)


def test_arguments_by_position(seed: int) -> None:
    """SGLang gives the first ones by position."""
    x = make(CASES["decode_edges"], seed=seed, layout=LAYOUTS["pair"])
    for kind in KINDS:
        arguments = make_arguments(x, kind)
        names = list(inspect.signature(FUNCTIONS[kind]).parameters)
        count = names.index("sm_scale")
        first = [arguments.pop(name) for name in names[:count]]
        HOOKS[kind](FUNCTIONS[kind], *first, **arguments)


def test_pools_are_not_copied(seed: int) -> None:
    x = make(CASES["verify"], seed=seed, layout=LAYOUTS["pair"])
    arguments = make_arguments(x, "prefill")
    found, _ = call.read("prefill", arguments)
    assert found is not None
    assert found.cache.k.data_ptr() == arguments["k_cache"].data_ptr()
    assert found.cache.v.data_ptr() == arguments["v_cache"].data_ptr()
    assert found.index.tensor.data_ptr() == arguments["idx_k_cache"].data_ptr()


# What it leaves to SGLang.


def resized(name: str, *shape: int) -> Any:
    return lambda arguments: {name: arguments[name].new_zeros(shape)}


def recast(*names: str, dtype: torch.dtype) -> Any:
    return lambda arguments: {name: arguments[name].to(dtype) for name in names}


ANYTHING = object()
NOT_SERVED: dict[str, tuple[Kind, Any, str]] = {
    "sink": ("decode", {"sink": ANYTHING}, "sink: there are no attention sinks here"),
    "idx_sink": ("prefill", {"idx_sink": ANYTHING}, "idx_sink: there are no attention sinks here"),
    "idx_v_cache": ("decode", {"idx_v_cache": ANYTHING}, "idx_v_cache: the indexer has no output"),
    "disable_index_value": (
        "decode",
        {"disable_index_value": False},
        "disable_index_value: the indexer has no output here",
    ),
    "score_type": ("prefill", {"score_type": "lse"}, "score_type: a block's score is the maximum"),
    "block_size_q": ("prefill", {"block_size_q": 64}, "block_size_q: each query token has"),
    "block_size_k": ("decode", {"block_size_k": 64}, "block_size_k: a block is 128 tokens"),
    "use_msa": (
        "prefill",
        {"use_msa": True},
        "use_msa: SGLang has MSA kernels of its own for this GPU",
    ),
    "dense_main_attn_fn": ("decode", {"dense_main_attn_fn": ANYTHING}, "a dense backend attends"),
    "cached_topk_idx": ("prefill", {"cached_topk_idx": ANYTHING}, "layers do not share"),
    "return_topk_idx": ("prefill", {"return_topk_idx": True}, "layers do not share"),
    "topk_out": ("decode", {"topk_out": torch.zeros(2, 2)}, "topk_out: layers do not share"),
    "indexer_cp": ("decode", {"indexer_cp": ANYTHING}, "indexer_cp: ranks do not share"),
    "loc_mapping": ("prefill", {"loc_mapping": torch.zeros(9)}, "loc_mapping: HiSparse moves"),
    "hisparse_swap_in_fn": (
        "decode",
        {"hisparse_swap_in_fn": ANYTHING},
        "hisparse_swap_in_fn: HiSparse moves",
    ),
    "page_size": ("decode", {"page_size": 64}, "page_size: expected a multiple of 128, got 64"),
    "page_size unknown": ("decode", {"page_size": 0}, "page_size: expected a multiple of 128"),
    "k_scale": ("decode", {"k_scale": 0.0}, "k_scale: expected None or a finite number > 0, got"),
    "v_scale": ("decode", {"v_scale": torch.ones(1)}, "got Tensor"),
    "sm_scale": ("prefill", {"sm_scale": float("inf")}, "sm_scale: expected None or a finite"),
    "idx_sm_scale": ("prefill", {"idx_sm_scale": -1.0}, "idx_sm_scale: expected None or a finite"),
    "new argument": ("decode", {"window": 7}, "window: this version of msattn does not know"),
    "index heads": ("decode", resized("idx_q", 12, 4, 128), "num_index_heads: expected"),
    "query heads": ("decode", resized("q", 12, 3, 128), "num_q_heads: expected a multiple"),
    "head dim": ("decode", resized("q", 12, 4, 64), "expected shape [pages, Hkv=2, tokens=128, D="),
    "q": ("decode", resized("q", 12, 512), "q: expected three axes, got [12, 512]"),
    "v_cache": ("decode", resized("v_cache", 128, 2, 64), "v_cache: expected"),
    "idx_k_cache": (
        "decode",
        resized("idx_k_cache", 128, 2, 128),
        "idx_k_cache: expected one head",
    ),
    "index head dim": ("decode", resized("idx_q", 12, 2, 64), "tensor: expected shape [pages"),
    "topk": ("decode", {"topk": 2, "local_blocks": 3}, "init_blocks + local_blocks: expected"),
    "packed KV": (
        "decode",
        recast("k_cache", "v_cache", dtype=torch.uint8),
        "kv_format: expected bf16, fp16, fp8_e4m3, fp8_e5m2, nvfp4 or fp32, got torch.uint8",
    ),
    "index dtype": ("decode", recast("idx_k_cache", dtype=torch.float8_e5m2), "dtype: expected"),
}


def argument_names(kind: Kind) -> set[str]:
    return set(inspect.signature(FUNCTIONS[kind]).parameters)


@pytest.mark.parametrize("case", NOT_SERVED)
def test_why_not(case: str) -> None:
    kind, change, reason = NOT_SERVED[case]
    arguments = make_arguments(make(CASES["decode_edges"], layout=LAYOUTS["pair"]), kind)
    assert call.why_not(kind, arguments) == []
    change = change(arguments) if callable(change) else change
    (found,) = call.why_not(kind, arguments | change)
    assert reason in found


def test_every_reason_is_tested() -> None:
    changed = {
        name for _, change, _ in NOT_SERVED.values() if isinstance(change, dict) for name in change
    }
    assert set(call.SERVED) <= changed


def test_every_parameter_is_accounted_for() -> None:
    """None of SGLang's is unknown, and none that is known is only imagined."""
    assert argument_names("prefill") | argument_names("decode") == call._KNOWN
    for kind in KINDS:
        assert set(call.READ[kind]) <= argument_names(kind)


def test_reasons_are_all_given() -> None:
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), "decode")
    many = {"sink": ANYTHING, "page_size": 1, "use_msa": True}
    assert len(call.why_not("decode", arguments | many)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_without_an_argument(kind: Kind) -> None:
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), kind)
    for name in call.READ[kind]:
        fewer = {key: value for key, value in arguments.items() if key != name}
        assert call.why_not(kind, fewer) == [f"SGLang's function has no argument {name}"]


def test_a_cpu_is_served_by_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "IMPL", "auto")
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), "decode")
    assert "on a CPU" in call.why_not("decode", arguments)[0]


def test_gpus_that_sglang_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its other modes there, too: msattn has not been run on them."""
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), "decode")
    monkeypatch.setattr(call, "capability", lambda device: (10, 0))
    own = "SGLang has MSA kernels of its own for this GPU"
    assert call.why_not("decode", arguments) == [own]
    monkeypatch.setattr(call, "capability", lambda device: (9, 0))
    assert call.why_not("decode", arguments) == []


def test_gpus_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), "decode")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    q = SimpleNamespace(device=GPU)
    reasons = call.why_not("decode", arguments | {"q": q})
    assert reasons == ["SGLang has kernels of its own for AMD's GPUs"]


def test_what_no_implementation_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons are the implementation's own."""
    monkeypatch.setattr(env, "IMPL", "hopper")
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), "decode")
    select, attend = call.why_not("decode", arguments)
    assert select.startswith("index_select has no implementation here (hopper: ")
    assert attend.startswith("attend has no implementation here (hopper: ")


def test_the_reference_is_no_choice_on_a_gpu() -> None:
    """It waits for the device: SGLang's kernels are better than that."""
    problem = call.Problem("attend", torch.device("cpu"), SMALL, None, torch.bfloat16)
    assert call._implementations((problem,), "reference") == (["reference"], [])
    assert call._implementations((problem,), "auto")[0] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_original_gets_the_call_as_it_came(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """And what it returns is returned; why is said once."""
    caplog.set_level(logging.INFO)
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), kind)
    given = arguments.pop("q"), arguments | {"score_type": "lse"}
    calls = []

    def original(q: object, **kwargs: object) -> object:
        calls.append((q, kwargs))
        return ANYTHING

    original.__signature__ = inspect.signature(FUNCTIONS[kind])  # type: ignore[attr-defined]
    for _ in range(2):
        assert HOOKS[kind](original, given[0], **given[1]) is ANYTHING
    assert len(calls) == 2
    for q, kwargs in calls:
        assert q is given[0] and kwargs.keys() == given[1].keys()
        assert all(kwargs[name] is value for name, value in given[1].items())
    (line,) = caplog.messages
    assert line.startswith(f"msattn leaves sparse {kind} of MiniMax-M3 to SGLang: score_type: ")


def test_serving_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), "decode")
    for _ in range(3):
        serve("decode", arguments)
    (line,) = caplog.messages
    assert line == (
        "msattn serves sparse decode of MiniMax-M3: reference on cpu, KV cache bf16, "
        "index keys bf16, 4 query heads over 2, the best 4 blocks"
    )


def test_an_error_of_a_step_is_not_hidden() -> None:
    """What is wrong with the lengths is wrong for SGLang's function, too."""
    arguments = make_arguments(make(CASES["verify"], layout=LAYOUTS["pair"]), "decode")
    with pytest.raises(ValueError, match="max_seq_len: expected at least 900, got 640"):
        serve("decode", arguments | {"max_seqlen": 640})


@pytest.mark.parametrize("on", [True, False])
def test_kernels_are_compiled_before_they_serve(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a model, in a step that no graph is captured of; nothing on a CPU."""
    compiled: list[Any] = []
    monkeypatch.setattr(env, "WARMUP", on)
    monkeypatch.setattr(plugin, "warmup", lambda *args, **kwargs: compiled.append((args, kwargs)))
    monkeypatch.setattr(plugin, "run", lambda found, plans: found.q)
    x = make(CASES["verify"], kv_format="fp8_e4m3", layout=LAYOUTS["pair"])
    arguments = make_arguments(x, "decode")
    serve("decode", arguments)
    assert compiled == []
    found, _ = call.read("decode", arguments)
    assert found is not None
    on_gpu = dataclasses.replace(found, q=SimpleNamespace(device=GPU, dtype=found.q.dtype))
    monkeypatch.setattr(plugin, "read", lambda kind, arguments: (on_gpu, []))
    monkeypatch.setattr(call, "device_name", str)
    for capturing in (True, False, False):
        monkeypatch.setattr(plugin, "is_capturing", lambda device, now=capturing: now)
        serve("decode", arguments)
        assert len(compiled) == (on and not capturing)
    if on:
        ((config, kv_format), options) = compiled[0]
        assert (config, kv_format.name, options["device"]) == (x.config, "fp8_e4m3", GPU)
        assert options["index_dtype"].name == "bf16" and options["query_dtype"] == torch.bfloat16


# The plans of a step.


def layers(x: Inputs, count: int) -> list[dict[str, Any]]:
    """A step's arguments for several layers: SGLang's tensors of the step are the same objects."""
    first = make_arguments(x, "decode")
    pools = ("k_cache", "v_cache", "idx_k_cache")
    return [first | {name: first[name].clone() for name in pools} for _ in range(count)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps whose plans were made."""
    plans: list[Any] = []

    def make_plan(*args: Any) -> Any:
        plans.append(original(*args))
        return plans[-1]

    original = step.make_plan
    monkeypatch.setattr(step, "make_plan", make_plan)
    return plans


def test_layers_share_a_plan(made: list[Any], seed: int) -> None:
    x = make(CASES["verify"], seed=seed, layout=LAYOUTS["pair"])
    for arguments in layers(x, 4):
        assert_served("decode", x, arguments)
    assert len(made) == 1


def test_a_layer_that_comes_again_begins_a_step(made: list[Any], seed: int) -> None:
    """Though every tensor is the same object: other numbers may be in it."""
    same = layers(make(CASES["decode_edges"], seed=seed, layout=LAYOUTS["pair"]), 3)
    for arguments in same:
        serve("decode", arguments)
    longer = make(CASES["decode_edges"], seed=seed + 1, layout=LAYOUTS["pair"])
    for arguments, new in zip(same, layers(longer, 3), strict=True):
        for name in ("seq_lens", "slot_ids", "req_to_token", "k_cache", "v_cache", "idx_k_cache"):
            arguments[name].copy_(new[name])
        arguments["q"], arguments["idx_q"] = new["q"], new["idx_q"]
        assert_served("decode", longer, arguments)
    assert len(made) == 2
    assert len(plugin.PLANS) == 1


def test_two_halves_of_a_batch_take_turns(made: list[Any], seed: int) -> None:
    halves = [make(CASES[n], seed=seed, layout=LAYOUTS["pair"]) for n in ("verify", "mixed")]
    pools = [layers(x, 3) for x in halves]
    for first, second in zip(*pools, strict=True):
        # Halves of a batch have the layer's pool in common.
        serve("decode", first)
        serve("decode", second)
    assert len(made) == 2


def test_plans_are_bounded(seed: int) -> None:
    plans = Plans()
    for i in range(5):
        x = make(CASES["verify"], seed=seed + i, layout=LAYOUTS["pair"])
        found, _ = call.read("decode", make_arguments(x, "decode"))
        assert found is not None
        plugin.run(found, plans)
    assert len(plans) == 2


def test_a_new_step_frees_the_plan_of_the_last(seed: int) -> None:
    """Before it makes its own: their workspaces would be there twice."""
    plans = Plans()
    steps = [
        layers(make(CASES["verify"], seed=seed + i, layout=LAYOUTS["pair"]), 2) for i in (0, 1)
    ]
    steps[1] = [b | {"k_cache": a["k_cache"]} for a, b in zip(*steps, strict=True)]
    for layers_of_step in steps:
        for arguments in layers_of_step:
            found, _ = call.read("decode", arguments)
            assert found is not None
            plugin.run(found, plans)
            assert len(plans) == 1


def test_a_plan_of_a_capture_belongs_to_its_graph(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Neither does a capture use a plan from before it, nor is one of it used outside."""
    first, second = layers(make(CASES["verify"], seed=seed, layout=LAYOUTS["pair"]), 2)
    for count, capturing in enumerate([False, True, False, True, True], start=1):
        monkeypatch.setattr(step, "is_capturing", lambda device, now=capturing: now)
        serve("decode", first)
        serve("decode", second)
        assert len(made) == count
        assert len(plugin.PLANS) == 1


# How it registers.


class Registry:
    """SGLang's, as far as the plug-in knows it."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, object, str]] = []

    def register(self, target: str, hook: object, hook_type: str) -> None:
        self.registered.append((target, hook, hook_type))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = found  # type: ignore[attr-defined]
    module.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_register(registry: Registry) -> None:
    for _ in range(2):
        sglang.register()
    functions = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse.minimax_sparse_"
    assert registry.registered == [
        (f"{functions}prefill", plugin.around_prefill, "around"),
        (f"{functions}decode", plugin.around_decode, "around"),
    ]


def test_register_does_nothing_where_it_is_switched_off(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "SGLANG", False)
    sglang.register()
    assert registry.registered == []


def test_register_does_nothing_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    sglang.register()


def test_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(*entry, group="sglang.srt.plugins").load() is sglang.register


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), (None, True)])
def test_the_entry_point_is_cheap(value: str | None, on: bool) -> None:
    """It imports neither Triton nor SGLang, and touches no device."""
    code = """
import sys
from msattn import env
from msattn.integrations.sglang import register
register()
import torch
foreign = {name.split(".")[0] for name in sys.modules} & {"sglang", "triton", "transformers"}
print(env.SGLANG, sorted(foreign), torch.cuda.is_initialized())
"""
    environment = {key: text for key, text in os.environ.items() if key != "MSATTN_SGLANG"}
    if value is not None:
        environment["MSATTN_SGLANG"] = value
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout.split() == [str(on), "[]", "False"], done.stderr
