"""The SGLang plug-in's functions on a GPU, called as SGLang calls them: eagerly, and captured.

No SGLang is needed. Its decode graphs are captured once for each batch size, for the longest
context, into one memory pool, and replayed after lengths, requests and pages have changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_layer import DEVICE
from sglang_calls import FUNCTIONS, make_arguments

import msattn
from msattn import env
from msattn.integrations.sglang import call, plugin, step
from msattn.testing.cases import CASES, LAYOUTS, M3_TP4, Case, ScaleKind, make_config
from msattn.testing.compare import assert_attention, assert_bitwise_equal
from msattn.testing.make import GARBAGE, Inputs, make

pytestmark = pytest.mark.gpu

PAGES, CONTEXT, LAYERS = 80, 40 * 128, 3
CONFIG = make_config(group=8, kv_heads=2, topk=4)
POOLS = ("k_cache", "v_cache", "idx_k_cache")
SERVED = {"prefill": plugin.around_prefill, "decode": plugin.around_decode}


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing compiled but what a test needs."""
    monkeypatch.setattr(env, "WARMUP", False)
    monkeypatch.setattr(plugin, "PLANS", step.Plans())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each plan that is made, whether a capture made it."""
    plans: list[bool] = []

    def make_plan(*args: Any) -> msattn.Plan:
        plan = original(*args)
        plans.append(plan.in_capture)
        return plan

    original = step.make_plan
    monkeypatch.setattr(step, "make_plan", make_plan)
    return plans


def serve(kind: call.Kind, arguments: dict[str, Any]) -> torch.Tensor:
    """What the function returns; the stand-in for SGLang's own raises."""
    index_out, out = SERVED[kind](FUNCTIONS[kind], **arguments)
    assert index_out is None
    return out


def make_step(queries: tuple[int, ...], lengths: tuple[int, ...], **options: Any) -> Inputs:
    config = options.pop("config", CONFIG)
    case = Case("step", queries, lengths, config)
    return make(case, layout=LAYOUTS["pair"], device=DEVICE, **options)


def assert_is_attention(x: Inputs, out: torch.Tensor) -> None:
    """Of the query tokens: the blocks are those of the reference, the numbers within the budget."""
    ids = msattn.index_select(x.index_q, x.index, x.plan(), impl="reference")
    assert_attention(x, ids, out)


FORMATS = [
    ("bf16", "bf16", torch.bfloat16),
    ("fp8_e4m3", "bf16", torch.bfloat16),
    ("fp8_e5m2", "bf16", torch.bfloat16),
    ("fp8_e4m3", "fp8_e4m3", torch.float8_e4m3fn),
]
FORMAT_IDS = ["bf16", "e4m3", "e5m2", "all_e4m3"]


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize(("kv_format", "index_format", "query"), FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("name", ["mixed", "decode_edges", "prefill_after_prefix", "m3_tp4_mixed"])
def test_eagerly(
    name: str,
    kv_format: str,
    index_format: str,
    query: torch.dtype,
    kind: call.Kind,
    seed: int,
) -> None:
    x = make(
        CASES[name],
        seed=seed,
        kv_format=kv_format,
        index_format=index_format,
        query_dtype=query,
        scales="float",
        layout=LAYOUTS["pair"],
        device=DEVICE,
    )
    out = serve(kind, make_arguments(x, kind, seed=seed))
    full = out.new_zeros(x.q.shape)
    full[: x.case.num_tokens] = out[: x.case.num_tokens]
    assert_is_attention(x, full)


@pytest.mark.parametrize("kind", SERVED)
def test_nothing_waits_for_the_device(kind: call.Kind, seed: int) -> None:
    arguments = make_arguments(make_step((4, 70), (640, 900), seed=seed), kind)
    serve(kind, arguments)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        serve(kind, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Server:
    """SGLang's memory: buffers of a batch size at fixed addresses, pools of several layers."""

    def __init__(self, rows: int, kv_format: str, scales: ScaleKind = "unit") -> None:
        x = make_step((1,) * rows, (1,) * rows, kv_format=kv_format, scales=scales)
        self.arguments = make_arguments(x, "decode") | {
            "req_to_token": torch.full(
                (rows + 3, CONTEXT), GARBAGE, dtype=torch.int32, device=DEVICE
            ),
            "max_seqlen": CONTEXT,
        }
        self.layers = [
            {name: self.pool(self.arguments[name]) for name in POOLS} for _ in range(LAYERS)
        ]

    def pool(self, like: torch.Tensor) -> torch.Tensor:
        shape = PAGES * 128, *like.shape[1:]
        return torch.zeros(shape, dtype=like.dtype, device=DEVICE)

    def forward(self) -> list[torch.Tensor]:
        return [serve("decode", self.arguments | layer) for layer in self.layers]

    def load(self, x: Inputs, seed: int) -> None:
        """A step in place, in fewer rows perhaps; the others are padding, of no keys."""
        new = make_arguments(x, "decode", seed=seed)
        for layer in self.layers:
            for name in POOLS:
                layer[name].view(torch.uint8).fill_(0xFF)
                count = len(new[name]) // 128 * 128
                layer[name][:count].view(torch.uint8).copy_(new[name][:count].view(torch.uint8))
        table = self.arguments["req_to_token"].fill_(GARBAGE)
        table[: len(new["req_to_token"]), : new["req_to_token"].shape[1]] = new["req_to_token"]
        for name in ("q", "idx_q", "seq_lens", "slot_ids"):
            buffer = self.arguments[name]
            buffer.zero_()[: len(new[name])] = new[name]

    def check(self, x: Inputs, outs: list[torch.Tensor]) -> None:
        tokens = x.case.num_tokens
        for out in outs:
            assert_is_attention(x, out[:tokens])
            assert bool((out[tokens:] == 0).all()), "padding"


def capture(function: Callable[[], list[torch.Tensor]], pool: Any = None) -> Any:
    """As SGLang does: twice eagerly, then into the pool that its graphs share."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outs = function()
    return graph.replay, outs


def steps(rows: int, kv_format: str, scales: ScaleKind = "unit") -> Iterator[Inputs]:
    """Lengths at the edges of blocks, long ones, fewer requests, drafts of one request."""
    lengths = [
        ((1,) * rows, tuple((1, 127, 128, 129, 512, 513)[i % 6] for i in range(rows))),
        ((1,) * rows, tuple(900 - 37 * i for i in range(rows))),
        ((1,), (4000,)),
        ((1, 0, 2), (700, 0, 2)),
        ((rows,), (777,)),
    ]
    for seed, (queries, kv) in enumerate(lengths):
        if sum(queries) <= rows:
            yield make_step(queries, kv, seed=seed, kv_format=kv_format, scales=scales)


@pytest.mark.parametrize(
    ("kv_format", "scales"),
    [("bf16", "unit"), ("fp8_e4m3", "unit"), ("fp8_e4m3", "float"), ("fp8_e5m2", "float")],
    ids=["bf16", "e4m3", "e4m3_scaled", "e5m2_scaled"],
)
def test_replays_after_changes_in_place(
    kv_format: str, scales: ScaleKind, made: list[bool]
) -> None:
    server = Server(6, kv_format, scales)
    replay, outs = capture(server.forward)
    # One for all layers of each run, that of the capture inside of it.
    assert made == [False, False, True]
    for seed, x in enumerate(steps(6, kv_format, scales)):
        server.load(x, seed)
        for out in outs:
            out.fill_(float("nan"))
        replay()
        server.check(x, outs)
    assert len(made) == 3


def test_graphs_of_all_sizes_share_a_pool() -> None:
    """A plan's memory serves the graphs that are captured later; each makes its own anew."""
    sizes = (8, 6, 4, 2, 1)
    pool = torch.cuda.graph_pool_handle()
    servers = {rows: Server(rows, "bf16") for rows in sizes}
    graphs = {rows: capture(server.forward, pool) for rows, server in servers.items()}
    assert len(plugin.PLANS) <= 2
    for rows in (1, 8, 2, 6, 4, 8, 1):
        replay, outs = graphs[rows]
        for seed, x in enumerate(steps(rows, "bf16")):
            servers[rows].load(x, seed)
            replay()
            servers[rows].check(x, outs)


def test_eager_steps_between_replays() -> None:
    """Prompts are eager in SGLang: their plans come and go beside the graphs."""
    server = Server(4, "fp8_e4m3")
    replay, outs = capture(server.forward)
    for seed, x in enumerate(steps(4, "fp8_e4m3")):
        prompt = make_step((200, 30), (900, 30), seed=seed, kv_format="fp8_e4m3")
        assert_is_attention(prompt, serve("prefill", make_arguments(prompt, "prefill")))
        server.load(x, seed)
        replay()
        server.check(x, outs)
    assert len(plugin.PLANS) <= 2


def test_a_replay_is_the_eager_step() -> None:
    """Bit for bit, and again."""
    server = Server(6, "bf16")
    replay, outs = capture(server.forward)
    server.load(next(steps(6, "bf16")), 0)
    replay()
    first = [out.clone() for out in outs]
    for _ in range(10):
        replay()
    eager = server.forward()
    for a, b, c in zip(first, outs, eager, strict=True):
        assert_bitwise_equal("replayed", b, a)
        assert_bitwise_equal("eager", c, a)


def test_m3_on_one_of_four_ranks() -> None:
    """Sixteen query heads over one KV head, sixteen blocks of more."""
    x = make_step((1, 4, 60), (4000, 2700, 131), config=M3_TP4, kv_format="fp8_e4m3")
    for kind in SERVED:
        assert_is_attention(x, serve(kind, make_arguments(x, kind)))
