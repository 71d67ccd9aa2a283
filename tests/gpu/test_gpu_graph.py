"""CUDA graphs: captured once, replayed for steps of other lengths, tables, slots and selections."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_layer import (
    DEVICE,
    IMPL,
    Layer,
    assert_equals_oracle,
    capture,
    pools,
    run_layer,
)

import msattn
from msattn.testing.cases import Case, make_config
from msattn.testing.compare import assert_bitwise_equal
from msattn.testing.make import Inputs, as_bytes, make, poisoned

pytestmark = pytest.mark.gpu

CONFIG = make_config(group=8, kv_heads=2, topk=4)
PAGES = 60


class Server:
    """A layer with inputs, outputs and caches at fixed addresses, captured under its bounds."""

    def __init__(self, requests: int, max_query_len: int, rows: int, kv_format: str) -> None:
        config, width = CONFIG, PAGES // 2
        counts = [min(max_query_len, max(0, rows - r * max_query_len)) for r in range(requests)]
        bound = msattn.Batch.from_lists(
            counts,
            [0] * requests,
            torch.full((requests, width), -1, dtype=torch.int32),
            max_query_len=max_query_len,
            max_seq_len=width * 128,
            device=DEVICE,
        )
        self.plan = msattn.make_plan(bound, config, kv_format)
        self.cache = msattn.KVCache.allocate(PAGES, config, kv_format, device=DEVICE)
        self.index = msattn.IndexCache.allocate(PAGES, config, device=DEVICE)

        def buffer(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return poisoned((rows, *shape), dtype, DEVICE)

        self.inputs = {
            "q": buffer(config.num_q_heads, config.head_dim),
            "k": buffer(config.num_kv_heads, config.head_dim),
            "v": buffer(config.num_kv_heads, config.head_dim),
            "index_q": buffer(config.num_index_heads, config.index_head_dim),
            "index_k": buffer(config.index_head_dim),
            "slot_mapping": buffer(dtype=torch.int64),
        }
        self.ids = buffer(config.num_kv_heads, config.topk, dtype=torch.int32)
        self.out = buffer(config.num_q_heads, config.head_dim)
        self.lse = buffer(config.num_q_heads, dtype=torch.float32)
        self.replay = capture(self.launch)

    def launch(self) -> None:
        x = self.inputs
        msattn.store_kv(x["k"], x["v"], self.cache, x["slot_mapping"], impl=IMPL)
        msattn.store_index_k(x["index_k"], self.index, x["slot_mapping"], impl=IMPL)
        msattn.index_select(x["index_q"], self.index, self.plan, out=self.ids, impl=IMPL)
        msattn.attend(
            x["q"],
            self.cache,
            self.ids,
            self.plan,
            out=self.out,
            lse_out=self.lse,
            impl=IMPL,
        )

    def load(self, x: Inputs) -> None:
        """A step's caches, inputs and batch; all that is not its own is poison."""
        for mine, step in zip(self.pools(), pools(x), strict=True):
            mine.view(torch.uint8).fill_(0xFF)
            mine[: len(step)].copy_(step)
        for name, mine in self.inputs.items():
            step = getattr(x, name)
            mine.view(torch.uint8).fill_(0xFF)
            mine[: len(step)].copy_(step)
        for mine in (self.ids, self.out, self.lse):
            mine.view(torch.uint8).fill_(0xFF)
        self.plan.update(x.batch)

    def pools(self) -> list[torch.Tensor]:
        assert isinstance(self.cache.tensor, torch.Tensor)
        return [as_bytes(self.cache.tensor), as_bytes(self.index.tensor)]

    def results(self) -> Layer:
        return [self.ids, self.out, self.lse]

    def check(self, x: Inputs) -> None:
        """The replay gives what the reference gives, in the caches too, and writes nothing else."""
        x.forget_step()
        self.load(x)
        self.replay()
        torch.cuda.synchronize()
        run_layer(x, x.plan(), impl="reference")
        tokens = x.case.num_tokens
        for mine, step in zip(self.pools(), pools(x), strict=True):
            assert_bitwise_equal("pool", mine[: len(step)], step)
            assert bool((mine[len(step) :].view(torch.uint8) == 0xFF).all())
        assert_equals_oracle(x, [y[: x.case.num_rows] for y in self.results()])
        assert bool((self.ids[tokens:] == -1).all())
        for y in (self.out, self.lse):
            assert bool((y[tokens:].view(torch.uint8) == 0xFF).all()), "spare rows written"


def steps(cases: list[tuple[tuple[int, ...], tuple[int, ...]]], kv_format: str) -> Iterator[Inputs]:
    for seed, (queries, lengths) in enumerate(cases):
        case = Case(f"step {seed}", queries, lengths, CONFIG, extra_columns=seed % 3)
        yield make(case, seed=seed, kv_format=kv_format, device=DEVICE)


DECODE = [
    ((1, 1, 1, 1), (900, 130, 1, 512)),
    ((4, 4, 4, 4, 4, 4), (640, 128, 4, 900, 1000, 77)),  # the captured number of rows
    ((1,), (3000,)),
    ((), ()),
    ((0, 1, 0), (0, 0, 300)),
    ((2, 3, 4), (129, 1291, 4)),
    ((4, 4, 4, 4, 4, 4), (640, 1280, 4, 128, 500, 78)),
]
PREFILL = [
    ((200,), (200,)),
    ((130, 1, 1), (1000, 700, 5)),
    ((0,), (100,)),
    ((100, 100), (1900, 130)),
    ((13, 12, 1), (13, 1024, 2000)),
    ((200,), (2900,)),  # both bounds
]


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_decode_and_verification(kv_format: str) -> None:
    """Shrinks to no request at all and grows to the captured bound again."""
    server = Server(requests=6, max_query_len=4, rows=24, kv_format=kv_format)
    for x in steps(DECODE, kv_format):
        server.check(x)


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
def test_prefill(kv_format: str) -> None:
    server = Server(requests=3, max_query_len=200, rows=200, kv_format=kv_format)
    for x in steps(PREFILL, kv_format):
        server.check(x)


def test_prefill_graph_serves_decode() -> None:
    server = Server(requests=6, max_query_len=200, rows=200, kv_format="bf16")
    for x in steps([PREFILL[0], *DECODE, PREFILL[-1]], "bf16"):
        server.check(x)


@pytest.mark.parametrize("fewer", [1, 2, 3])
def test_lengths_corrected_on_the_device(fewer: int) -> None:
    """Planned with length L, replayed with L - 1 to L - 3 written into the plan's own tensor."""
    lengths, queries = (641, 130, 514, 3), (4, 2, 1, 3)
    server = Server(requests=6, max_query_len=4, rows=24, kv_format="bf16")
    planned, x = (
        make(Case("optimistic", queries, tuple(n - less for n in lengths), CONFIG), device=DEVICE)
        for less in (0, fewer)
    )
    x.forget_step()
    server.load(x)
    server.plan.update(planned.batch)
    server.plan.seq_lens[: len(lengths)].sub_(fewer)
    columns = x.batch.page_table.shape[1]
    server.plan.page_table[: len(lengths), :columns].copy_(x.batch.page_table)
    server.replay()
    run_layer(x, x.plan(), impl="reference")
    assert_equals_oracle(x, [y[: x.case.num_rows] for y in server.results()])


def test_updates_by_a_shorter_batch() -> None:
    """A plan made with lengths L takes batches of L - 1 to L - 3, without a graph."""
    lengths, queries = (641, 130, 514, 3), (4, 2, 1, 3)
    plan = make(Case("optimistic", queries, lengths, CONFIG), device=DEVICE).plan()
    for fewer in (1, 2, 3):
        case = Case("true", queries, tuple(n - fewer for n in lengths), CONFIG, extra_columns=0)
        x = make(case, seed=fewer, device=DEVICE)
        plan.update(x.batch)
        assert_equals_oracle(x, run_layer(x, plan))


def test_replays_are_bitwise_equal() -> None:
    """And equal to what the stages give without a graph."""
    server = Server(requests=6, max_query_len=200, rows=200, kv_format="bf16")
    (x,) = steps([((130, 1, 1), (1000, 700, 5))], "bf16")
    server.load(x)
    server.replay()
    first = [y.clone() for y in server.results()]
    for _ in range(20):
        server.replay()
    server_again = [y.clone() for y in server.results()]
    server.launch()
    for a, b, c in zip(first, server_again, server.results(), strict=True):
        assert_bitwise_equal("replayed", b, a)
        assert_bitwise_equal("eager", c, a)


STAGES: dict[str, Callable[[Inputs, msattn.Plan], object]] = {
    "index_select": lambda x, plan: msattn.index_select(x.index_q, x.index, plan, impl=IMPL),
    "attend": lambda x, plan: msattn.attend(
        x.q, x.cache, torch.zeros(len(x.q), 2, 4, dtype=torch.int32, device=DEVICE), plan, impl=IMPL
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_run_of_a_plan_is_not_captured(stage: str) -> None:
    """Its workspaces would hold their zeros after a replay alone."""
    (x,) = steps([((4, 3), (1000, 700))], "bf16")
    STAGES[stage](x, x.plan())  # compiled
    plan = x.plan()
    with (
        pytest.raises(RuntimeError, match="plan: expected a run of the stage with it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        STAGES[stage](x, plan)
    torch.cuda.synchronize()
    STAGES[stage](x, plan)


def test_a_plan_made_inside_of_the_capture() -> None:
    """Belongs to the graph: it reads the batch's tensors at every replay."""
    (x,) = steps([((4, 3), (1000, 700))], "bf16")
    results: list[torch.Tensor] = []

    def step() -> None:
        results[:] = run_layer(x, x.plan())

    replay = capture(step)
    replay()
    assert_equals_oracle(x, results)
    x.batch.seq_lens.sub_(128)
    replay()
    assert_equals_oracle(x, results)


def test_no_stage_waits_for_the_device() -> None:
    (x,) = steps([((4, 3), (1000, 700))], "bf16")
    plan = x.plan()
    run_layer(x, plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.update(x.batch)
        again = msattn.make_plan(x.batch, CONFIG, "bf16")
        run_layer(x, plan)
        run_layer(x, again)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_stage_allocates_where_outputs_are_given() -> None:
    server = Server(requests=6, max_query_len=200, rows=200, kv_format="nvfp4")
    (x,) = steps([((130, 1, 1), (1000, 700, 5))], "nvfp4")
    server.load(x)

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    server.launch()
    before = allocations()
    server.launch()
    assert allocations() == before
