"""Every error about user input: its type, its sentence, and that nothing was written before it.

A sentence is ``<argument>: expected <what>, got <what>``. The table is complete: a check in the
source that no case reaches fails the last test.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import msattn
from msattn import Batch, IndexCache, KVCache, KVFormat, MSAConfig, env, make_plan, why_not

CONFIG = MSAConfig(num_q_heads=4, num_kv_heads=2, num_index_heads=2, topk=4)
PAGES, TOKENS, BLOCKS = 3, 3, 2


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class World:
    """A step of two requests, and good arguments for every stage of it.

    The buffers hold ones, which no stage would write into them.
    """

    def __init__(self) -> None:
        self.cache = KVCache.allocate(PAGES, CONFIG)
        self.index = IndexCache.allocate(PAGES, CONFIG)
        self.compact_index = IndexCache.allocate(PAGES, CONFIG, compact=True)
        self.plan = make_plan(step(), CONFIG, "bf16")
        self.slots = torch.tensor([128, 129, 260])
        for pool in (self.cache.tensor, self.index.tensor, self.compact_index.tensor):
            assert isinstance(pool, torch.Tensor)
            pool.fill_(1.0)
        self.out = torch.ones(TOKENS, 4, 128, dtype=torch.bfloat16)
        self.lse = torch.ones(TOKENS, 4)
        self.scores = torch.ones(2, TOKENS, BLOCKS)
        self.ids = torch.ones(TOKENS, 2, 4, dtype=torch.int32)

    def arguments(self, stage: str) -> dict[str, Any]:
        heads, kv_heads = (torch.full((TOKENS, n, 128), 2.0).bfloat16() for n in (4, 2))
        query = {"index_q": kv_heads, "index": self.index, "plan": self.plan}
        return {
            "store_kv": {
                "k": kv_heads,
                "v": kv_heads,
                "cache": self.cache,
                "slot_mapping": self.slots,
            },
            "store_index_k": {
                "index_k": kv_heads[:, 0],
                "index": self.index,
                "slot_mapping": self.slots,
            },
            "refresh_compact_keys": {"index": self.compact_index, "pages": int32(0, 2)},
            "index_scores": {**query, "out": self.scores},
            "select_blocks": {
                "scores": torch.zeros(2, TOKENS, BLOCKS),
                "plan": self.plan,
                "out": self.ids,
            },
            "index_select": {**query, "out": self.ids},
            "attend": {
                "q": heads,
                "cache": self.cache,
                "block_ids": zeros(TOKENS, 2, 4, dtype=torch.int32),
                "plan": self.plan,
                "out": self.out,
                "lse_out": self.lse,
            },
            "merge_states": {
                "outs": [heads, heads],
                "lses": [zeros(TOKENS, 4, dtype=torch.float32)] * 2,
                "out": self.out,
                "lse_out": self.lse,
            },
            "sparse_attention": {
                "q": heads,
                "k": kv_heads,
                "v": kv_heads,
                "index_q": kv_heads,
                "index_k": kv_heads[:, 0],
                "cache": self.cache,
                "index": self.index,
                "plan": self.plan,
                "slot_mapping": self.slots,
                "out": self.out,
            },
        }[stage]

    def call(self, stage: str, **changes: object) -> object:
        return getattr(msattn, stage)(**{**self.arguments(stage), **changes})

    def state(self) -> list[torch.Tensor]:
        """A copy of all that a call could change."""
        plan = self.plan
        assert self.compact_index.compact is not None
        pools = [self.cache.tensor, self.index.tensor, self.compact_index.compact.tensor]
        buffers = [self.out, self.lse, self.scores, self.ids]
        tables = [plan.cu_seqlens_q, plan.seq_lens, plan.page_table]
        bounds = torch.tensor([plan.max_query_len, plan.max_seq_len, plan.num_tokens])
        return [tensor.clone() for tensor in (*pools, *buffers, *tables, bounds)]


def unchanged(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, before, after))


def step(**changes: Any) -> Batch:
    given = {"query_lens": [2, 1], "seq_lens": [130, 5], "page_table": [[0, 1], [2]]}
    return Batch.from_lists(**{**given, **changes})


class Case(NamedTuple):
    call: Callable[[World], object]
    error: type[Exception]
    message: str  # the whole of it, or its beginning where it ends with "..."
    label: str  # where the error is met: a stage, a class


def case(label: str, call: Callable[[World], object], error: type[Exception], message: str) -> Case:
    return Case(call, error, message, label)


def stage_case(stage: str, error: type[Exception], message: str, **changes: object) -> Case:
    """A stage with good arguments but for ``changes``; a function is called with the world."""

    def call(world: World) -> object:
        return world.call(
            stage, **{k: v(world) if inspect.isfunction(v) else v for k, v in changes.items()}
        )

    return Case(call, error, message, stage)


MODEL = "torch.bfloat16, torch.float16 or torch.float32"
QUERY = "torch.bfloat16, torch.float16, torch.float32 or torch.float8_e4m3fn"
SLOTS = "torch.int64 or torch.int32"
TENSORS = [
    ("store_kv", "k", MODEL, "[T, Hkv=2, D=128]"),
    ("store_kv", "v", MODEL, "[T=3, Hkv=2, D=128]"),
    ("store_kv", "slot_mapping", SLOTS, "[T=3]"),
    ("store_index_k", "index_k", MODEL, "[T, Di=128]"),
    ("store_index_k", "slot_mapping", SLOTS, "[T=3]"),
    ("refresh_compact_keys", "pages", SLOTS, "[n]"),
    ("index_scores", "index_q", QUERY, "[T, Hi=2, Di=128]"),
    ("index_scores", "out", "torch.float32", "[Hi=2, T=3, num_blocks=2]"),
    ("select_blocks", "scores", "torch.float32", "[Hi=2, T, B]"),
    ("select_blocks", "out", "torch.int32", "[T=3, Hkv=2, topk=4]"),
    ("index_select", "index_q", QUERY, "[T, Hi=2, Di=128]"),
    ("index_select", "out", "torch.int32", "[T=3, Hkv=2, topk=4]"),
    ("attend", "q", QUERY, "[T, Hq=4, D=128]"),
    ("attend", "block_ids", "torch.int32", "[T=3, Hkv=2, K]"),
    ("attend", "out", "torch.bfloat16", "[T=3, Hq=4, D=128]"),
    ("attend", "lse_out", "torch.float32", "[T=3, Hq=4]"),
    ("merge_states", "out", "torch.bfloat16", "[T=3, Hq=4, D=128]"),
    ("merge_states", "lse_out", "torch.float32", "[T=3, Hq=4]"),
]
"""Every tensor argument of every stage, its dtypes and its shape."""


def tensor_cases() -> Iterator[Case]:
    """Each of them as something else, in another dtype, of another rank, elsewhere."""

    def call(stage: str, name: str, spoil: Callable[[torch.Tensor], object]) -> Any:
        return lambda world: world.call(stage, **{name: spoil(world.arguments(stage)[name])})

    for stage, name, dtypes, shape in TENSORS:
        spoiled: list[tuple[Callable[[torch.Tensor], object], type[Exception], str]] = [
            (torch.Tensor.tolist, TypeError, "a torch.Tensor, got list"),
            (
                lambda x: x.to(torch.complex64),
                TypeError,
                f"dtype {dtypes}, got torch.complex64",
            ),
            (lambda x: x.unsqueeze(0), ValueError, f"shape {shape}, got [1, ..."),
            (lambda x: x[..., 1:], ValueError, f"shape {shape}, got [..."),
            (lambda x: x.to("meta"), ValueError, "device cpu, got meta"),
        ]
        for spoil, error, message in spoiled:
            sizes_are_free = shape.endswith(("B]", "K]", "[n]")) and spoil is spoiled[3][0]
            if not sizes_are_free:
                yield Case(call(stage, name, spoil), error, f"{name}: expected {message}", stage)


OBJECTS = [
    ("store_kv", "cache", "KVCache"),
    ("store_index_k", "index", "IndexCache"),
    ("refresh_compact_keys", "index", "IndexCache"),
    ("index_scores", "index", "IndexCache"),
    ("index_scores", "plan", "Plan"),
    ("select_blocks", "plan", "Plan"),
    ("index_select", "index", "IndexCache"),
    ("index_select", "plan", "Plan"),
    ("attend", "cache", "KVCache"),
    ("attend", "plan", "Plan"),
]


OUTPUTS = [(stage, name) for stage, name, *_ in TENSORS if name.endswith("out")]


DISTINCT = "expected elements that do not share memory, got strides [0, ..."


def overlapping_cases() -> Iterator[Case]:
    """Outputs, and pools that are written, whose elements lie at the same address."""
    page, keys = zeros(1, 2, 128, 256).expand(3, -1, -1, -1), zeros(1, 128, 128).expand(3, -1, -1)
    pair = (zeros(3, 2, 128, 128), page[..., :128])
    copy = torch.zeros(1, 16896, dtype=torch.uint8).expand(3, -1)
    for pool in (page, pair):
        cache = KVCache.from_tensor(pool, CONFIG, "bf16")
        yield stage_case("store_kv", ValueError, f"cache: {DISTINCT}", cache=cache)
    index = IndexCache.from_tensor(keys, CONFIG)
    copied = IndexCache.from_tensor(zeros(3, 128, 128), CONFIG, compact=copy)
    for stage, pool in (("store_index_k", index), ("store_index_k", copied)):
        yield stage_case(stage, ValueError, f"index: {DISTINCT}", index=pool)
    yield stage_case("refresh_compact_keys", ValueError, f"index: {DISTINCT}", index=copied)
    for stage, name in OUTPUTS:

        def call(world: World, stage: str = stage, name: str = name) -> object:
            out = world.arguments(stage)[name]
            return world.call(stage, **{name: out[:1].expand(out.shape)})

        message = f"{name}: {DISTINCT}"
        yield Case(call, ValueError, message, stage)


def object_cases() -> Iterator[Case]:
    for stage, name, kind in OBJECTS:
        for value in (None, zeros(1), CONFIG):
            message = f"{name}: expected msattn.{kind}, got {type(value).__name__}"
            yield stage_case(stage, TypeError, message, **{name: value})


def impl_cases() -> Iterator[Case]:
    for stage in dict.fromkeys(stage for stage, *_ in TENSORS):
        message = "impl: expected auto, hopper, triton or reference, got 'fast'"
        yield stage_case(stage, ValueError, message, impl="fast")
        message = f"impl='hopper' cannot serve {stage}: hopper: ..."
        yield stage_case(stage, NotImplementedError, message, impl="hopper")


F8 = torch.float8_e4m3fn
OTHER_WIDTH = MSAConfig(4, 2, 2, head_dim=64, index_head_dim=64)
LARGE_PLAN = make_plan(step(query_lens=[2, 2]), CONFIG, "bf16")
FP8_QUERY = zeros(TOKENS, 4, 128, dtype=F8)

COMPACT_KEYS = zeros(3, 128, 128)
COMPACT = zeros(3, 16896, dtype=torch.uint8)

STAGES = [
    stage_case(
        "store_kv",
        ValueError,
        "slot_mapping: expected slots below 384 (3 pages), got 384",
        slot_mapping=torch.tensor([0, 384, -1]),
    ),
    stage_case(
        "store_index_k",
        ValueError,
        "slot_mapping: expected slots below 384 (3 pages), got 1000",
        slot_mapping=int32(0, 1, 1000),
    ),
    stage_case(
        "refresh_compact_keys",
        ValueError,
        "index: expected an IndexCache with compact keys, got one without",
        index=lambda w: w.index,
    ),
    stage_case(
        "store_index_k",
        ValueError,
        "index_k: expected shape [T, Di=128], got [3, 2, 128]",
        index_k=zeros(3, 2, 128),
    ),
    *(
        stage_case(stage, error, message, **changes)
        for stage in ("index_scores", "index_select")
        for error, message, changes in (
            (
                ValueError,
                "index: expected device cpu, got meta",
                {"index": IndexCache.allocate(PAGES, CONFIG, device="meta")},
            ),
            (
                ValueError,
                "index: expected index_head_dim=128, got 64",
                {"index": IndexCache.allocate(PAGES, OTHER_WIDTH)},
            ),
            (
                ValueError,
                "index_q: expected at least 4 rows, as the plan has query tokens, got 3",
                {"plan": LARGE_PLAN},
            ),
        )
    ),
    stage_case(
        "select_blocks",
        ValueError,
        "scores: expected at least 3 rows, as the plan has query tokens, got 2",
        scores=torch.zeros(2, 2, BLOCKS),
    ),
    stage_case(
        "attend",
        ValueError,
        "q: expected at least 4 rows, as the plan has query tokens, got 3",
        plan=LARGE_PLAN,
    ),
    stage_case(
        "attend",
        ValueError,
        "cache: expected the plan's format bf16, got nvfp4",
        cache=KVCache.allocate(PAGES, CONFIG, "nvfp4"),
    ),
    stage_case(
        "attend",
        ValueError,
        "cache: expected device cpu, got meta",
        cache=KVCache.allocate(PAGES, CONFIG, device="meta"),
    ),
    stage_case(
        "attend",
        ValueError,
        "cache: expected num_kv_heads=2, head_dim=128, got 2, 64",
        cache=KVCache.allocate(PAGES, OTHER_WIDTH),
    ),
    stage_case(
        "attend",
        TypeError,
        "softmax_scale: expected a finite number, got str '0.1'",
        softmax_scale="0.1",
    ),
    stage_case(
        "attend",
        TypeError,
        "softmax_scale: expected a finite number, got Tensor tensor(0.1000)",
        softmax_scale=torch.tensor(0.1),
    ),
    stage_case(
        "attend",
        ValueError,
        "softmax_scale: expected a finite number, got nan",
        softmax_scale=float("nan"),
    ),
    stage_case(
        "attend",
        ValueError,
        "q_scale: expected None for a query that is not float8_e4m3fn, got 2.0",
        q_scale=2.0,
    ),
    *(
        stage_case("attend", error, f"q_scale: expected {message}", q=FP8_QUERY, q_scale=q_scale)
        for q_scale, error, message in (
            (True, TypeError, "a finite number > 0 or a tensor, got bool True"),
            ("2", TypeError, "a finite number > 0 or a tensor, got str '2'"),
            (0.0, ValueError, "a finite number > 0 or a tensor, got 0.0"),
            (float("inf"), ValueError, "a finite number > 0 or a tensor, got inf"),
            (int32(1), TypeError, "dtype torch.float32, got torch.int32"),
            (torch.ones(4), ValueError, "one element, got [4]"),
            (torch.ones(1, device="meta"), ValueError, "device cpu, got meta"),
        )
    ),
    stage_case(
        "attend",
        TypeError,
        f"out: expected dtype {MODEL}, got torch.float8_e4m3fn",
        q=FP8_QUERY,
        out=FP8_QUERY.clone(),
    ),
    stage_case("merge_states", TypeError, "outs: expected a sequence of tensors, got int", outs=2),
    stage_case(
        "merge_states", TypeError, "lses: expected a sequence of tensors, got NoneType", lses=None
    ),
    stage_case(
        "merge_states", ValueError, "outs: expected at least one part, got none", outs=[], lses=[]
    ),
    stage_case(
        "merge_states",
        ValueError,
        "lses: expected 2 parts, as outs has, got 1",
        lses=[zeros(TOKENS, 4, dtype=torch.float32)],
    ),
    *(
        stage_case("merge_states", error, message, outs=outs)
        for outs, error, message in (
            ([None, zeros(3, 4, 128)], TypeError, "outs[0]: expected a torch.Tensor, got NoneType"),
            (
                [zeros(3, 4), zeros(3, 4)],
                ValueError,
                "outs[0]: expected shape [T, Hq, D], got [3, 4]",
            ),
            (
                [FP8_QUERY, FP8_QUERY],
                TypeError,
                f"outs[0]: expected dtype {MODEL}, got torch.float8_e4m3fn",
            ),
            (
                [zeros(3, 4, 128), zeros(3, 4, 128, dtype=torch.float16)],
                TypeError,
                "outs[1]: expected dtype torch.bfloat16, got torch.float16",
            ),
            (
                [zeros(3, 4, 128), zeros(2, 4, 128)],
                ValueError,
                "outs[1]: expected shape [T=3, Hq=4, D=128], got [2, 4, 128]",
            ),
            (
                [zeros(3, 4, 128), zeros(3, 4, 128, device="meta")],
                ValueError,
                "outs[1]: expected device cpu, got meta",
            ),
        )
    ),
    *(
        stage_case("merge_states", error, message, lses=[torch.zeros(3, 4), lse])
        for lse, error, message in (
            (0.0, TypeError, "lses[1]: expected a torch.Tensor, got float"),
            (zeros(3, 4), TypeError, "lses[1]: expected dtype torch.float32, got torch.bfloat16"),
            (
                torch.zeros(4, 3),
                ValueError,
                "lses[1]: expected shape [T=3, Hq=4], got [4, 3]",
            ),
        )
    ),
]

LAYER = [
    stage_case("sparse_attention", TypeError, "q: expected a torch.Tensor, got NoneType", q=None),
    stage_case(
        "sparse_attention",
        TypeError,
        "index_q: expected a torch.Tensor, got list",
        index_q=[],
    ),
    stage_case(
        "sparse_attention",
        ValueError,
        "index_q: expected as many rows as q, [3], got [4]",
        index_q=zeros(4, 2, 128),
    ),
    stage_case(
        "sparse_attention",
        ValueError,
        "v: expected shape [T=3, Hkv=2, D=128], got [3, 4, 128]",
        v=zeros(TOKENS, 4, 128),
    ),
    stage_case(
        "sparse_attention",
        ValueError,
        "slot_mapping: expected slots below 384 (3 pages), got 384",
        slot_mapping=int32(0, 1, 384),
    ),
    stage_case(
        "sparse_attention",
        TypeError,
        "index_k: expected a torch.Tensor, got NoneType",
        index_k=None,
    ),
    stage_case(
        "sparse_attention",
        ValueError,
        "index_k: expected as many rows as k, [3], got [2]",
        index_k=zeros(2, 128),
    ),
    *(
        stage_case("sparse_attention", error, f"index_slot_mapping: expected {message}", **changes)
        for error, message, changes in (
            (TypeError, "a torch.Tensor, got list", {"index_slot_mapping": []}),
            (ValueError, "shape [T=3], got [2]", {"index_slot_mapping": int32(0, 1)}),
            (
                ValueError,
                "slots below 384 (3 pages), got 384",
                {"index_slot_mapping": int32(0, 1, 384)},
            ),
        )
    ),
    *(
        stage_case(
            "sparse_attention",
            TypeError,
            f"index_plan: expected msattn.Plan, got {type(value).__name__}",
            index_plan=value,
        )
        for value in (3, 0)
    ),
]


def in_capture(call: Callable[[World], object]) -> Callable[[World], object]:
    """The call, while its device is capturing a CUDA graph."""

    def captured(world: World) -> object:
        with patch("msattn.plan.is_capturing", return_value=True):
            return call(world)

    return captured


FIRST_RUN = (
    "plan: expected a run of the stage with it, and with the same bounds, before the capture, "
    "got its first one inside of a CUDA graph"
)

PLANS = [
    case("plan.tiles", in_capture(lambda w: w.plan.tiles(4)), RuntimeError, FIRST_RUN),
    case(
        "plan.workspace",
        in_capture(lambda w: w.plan.workspace("scores", (2, 3), torch.float32)),
        RuntimeError,
        FIRST_RUN,
    ),
    case(
        "make_plan",
        lambda w: make_plan(None, CONFIG, "bf16"),
        TypeError,
        "batch: expected msattn.Batch, got NoneType",
    ),
    case(
        "make_plan",
        lambda w: make_plan(step(), {}, "bf16"),
        TypeError,
        "config: expected msattn.MSAConfig, got dict",
    ),
    case(
        "make_plan",
        lambda w: make_plan(step(), CONFIG, "int4"),
        ValueError,
        "kv_format: expected bf16, fp16, fp8_e4m3, fp8_e5m2, nvfp4 or fp32, got 'int4'",
    ),
    case(
        "plan.update",
        lambda w: w.plan.update(w.plan),
        TypeError,
        "batch: expected msattn.Batch, got Plan",
    ),
    case(
        "plan.update",
        lambda w: w.plan.update(step(device="meta")),
        ValueError,
        "batch: expected device cpu, got meta",
    ),
    case(
        "plan.update",
        lambda w: w.plan.update(Batch.from_lists([1] * 3, [1] * 3, [[2]] * 3)),
        ValueError,
        "batch: expected at most 2 requests, as planned, got 3",
    ),
    case(
        "plan.update",
        lambda w: w.plan.update(Batch.from_lists([1], [257], [[2, 1, 0]])),
        ValueError,
        "batch: expected max_seq_len at most 256, as planned, got 257",
    ),
]


def wrap(tensor: object, kv_format: object = "bf16", **scales: Any) -> Callable[[World], object]:
    return lambda w: KVCache.from_tensor(tensor, CONFIG, kv_format, **scales)


PAIR = "tensor: expected a pair (K, V), got "
SCALE = "a finite number > 0 or a tensor"
SLOT_RUN = "tensor: expected each slot one run of 9216 bytes (strides [.., .., 72, 1]), got strides"
LISTED = "expected bf16, fp16, fp8_e4m3, fp8_e5m2, nvfp4 or fp32, got"

DEVICES = [
    ("nonsense", ValueError, "device: expected a torch.device or its name, got 'nonsense'"),
    ("", ValueError, "device: expected a torch.device or its name, got ''"),
    (1.5, TypeError, "device: expected a torch.device or its name, got float 1.5"),
    (True, TypeError, "device: expected a torch.device or its name, got bool True"),
]

CACHES = [
    *(
        case(
            f"{kind.__name__}.allocate",
            lambda w, kind=kind, arguments=arguments: kind.allocate(*arguments),
            error,
            message,
        )
        for kind in (KVCache, IndexCache)
        for arguments, error, message in (
            ((-1, CONFIG), ValueError, "num_pages: expected an int >= 0, got -1"),
            ((2.0, CONFIG), TypeError, "num_pages: expected an int, got float 2.0"),
            ((2, None), TypeError, "config: expected msattn.MSAConfig, got NoneType"),
        )
    ),
    *(
        case(
            f"{kind.__name__}.allocate",
            lambda w, kind=kind, device=device: kind.allocate(2, CONFIG, device=device),
            error,
            message,
        )
        for kind in (KVCache, IndexCache)
        for device, error, message in DEVICES
    ),
    *(
        case("KVCache", wrap(tensor, kv_format), error, message)
        for tensor, kv_format, error, message in (
            (None, "bf16", TypeError, "tensor: expected a torch.Tensor, got NoneType"),
            (
                zeros(3, 2, 128, 256),
                None,
                TypeError,
                "kv_format: expected a str, torch.dtype or...",
            ),
            (
                zeros(3, 2, 128, 256),
                torch.int8,
                NotImplementedError,
                f"kv_format: {LISTED} torch.int8",
            ),
            (
                zeros(3, 2, 128, 256),
                "fp8",
                TypeError,
                "tensor: expected dtype torch.float8_e4m3fn or torch.uint8, got torch.bfloat16",
            ),
            (
                zeros(3, 2, 128, 256, dtype=torch.uint8),
                "bf16",
                TypeError,
                "tensor: expected dtype torch.bfloat16, got torch.uint8",
            ),
            (
                zeros(3, 128, 2, 256),
                "bf16",
                ValueError,
                "tensor: expected shape [pages, Hkv=2, tokens=128, 2*D=256], got [3, 128, 2, 256]",
            ),
            (
                zeros(3, 2, 256, 128).mT,
                "bf16",
                ValueError,
                "tensor: expected a last stride of 1, got strides [65536, 32768, 1, 128]",
            ),
            ([], "bf16", ValueError, PAIR + "0 tensors"),
            ((zeros(3, 2, 128, 128),) * 3, "bf16", ValueError, PAIR + "3 tensors"),
            (
                (zeros(3, 4, 128, 72, dtype=torch.uint8),) * 2,
                "nvfp4",
                ValueError,
                "tensor: expected one tensor in format nvfp4, got 2 tensors",
            ),
            (
                (zeros(3, 2, 128, 256), zeros(3, 2, 128, 128)),
                "bf16",
                ValueError,
                "tensor[0]: expected shape [pages, Hkv=2, tokens=128, D=128], got [3, 2, 128, 256]",
            ),
            (
                (zeros(3, 2, 128, 128), zeros(2, 2, 128, 128)),
                "bf16",
                ValueError,
                "tensor[1]: expected shape [pages=3, Hkv=2, tokens=128, D=128], "
                "got [2, 2, 128, 128]",
            ),
            (
                (zeros(3, 2, 128, 128), zeros(3, 2, 128, 128, device="meta")),
                "bf16",
                ValueError,
                "tensor[1]: expected device cpu, got meta",
            ),
            (
                zeros(3, 4, 128, 128, dtype=torch.uint8),
                "nvfp4",
                ValueError,
                "tensor: expected shape [pages, 2*Hkv=4, tokens=128, bytes=72], "
                "got [3, 4, 128, 128]",
            ),
            (
                zeros(3, 4, 128, 72, dtype=F8),
                "nvfp4",
                TypeError,
                "tensor: expected dtype torch.uint8, got torch.float8_e4m3fn",
            ),
            (
                zeros(3, 4, 128, 80, dtype=torch.uint8)[..., :72],
                "nvfp4",
                ValueError,
                SLOT_RUN + " [40960, 10240, 80, 1]",
            ),
            (
                zeros(3, 4, 128, 72, dtype=torch.uint8).as_strided(
                    (3, 4, 128, 72), (36864, 9215, 72, 1)
                ),
                "nvfp4",
                ValueError,
                SLOT_RUN + " [36864, 9215, 72, 1]",
            ),
            (
                zeros(3, 4, 128, 72, dtype=torch.uint8).as_strided(
                    (2, 4, 128, 72), (36848, 9216, 72, 1)
                ),
                "nvfp4",
                ValueError,
                "tensor: expected pages of at least 36864 bytes that do not overlap, got strides "
                "[36848, 9216, 72, 1]",
            ),
        )
    ),
    case(
        "KVCache",
        lambda w: KVCache.from_tensor(w.cache.tensor, "m3", "bf16"),
        TypeError,
        "config: expected msattn.MSAConfig, got str",
    ),
    *(
        case("KVCache", wrap(zeros(3, 2, 128, 256), **{name: scale}), error, f"{name}: {message}")
        for name in ("k_scale", "v_scale")
        for scale, error, message in (
            (0, ValueError, f"expected {SCALE}, got 0"),
            (-1.0, ValueError, f"expected {SCALE}, got -1.0"),
            (float("nan"), ValueError, f"expected {SCALE}, got nan"),
            (float("inf"), ValueError, f"expected {SCALE}, got inf"),
            (True, TypeError, f"expected {SCALE}, got bool True"),
            ("1.0", TypeError, f"expected {SCALE}, got str '1.0'"),
            (
                torch.ones(1, dtype=torch.float64),
                TypeError,
                "expected dtype torch.float32, got torch.float64",
            ),
            (torch.ones(1, device="meta"), ValueError, "expected device cpu, got meta"),
            (torch.ones(2), ValueError, "expected shape [Hkv=2, slots=384], got [2]"),
            (torch.ones(2, 383), ValueError, "expected shape [Hkv=2, slots=384], got [2, 383]"),
            (torch.ones(384, 2), ValueError, "expected shape [Hkv=2, slots=384], got [384, 2]"),
        )
    ),
    case(
        "KVCache",
        wrap(zeros(3, 4, 128, 72, dtype=torch.uint8), "nvfp4", v_scale=torch.ones(2, 384)),
        NotImplementedError,
        "v_scale: expected one element in format nvfp4, got [2, 384]",
    ),
    *(
        case(
            "IndexCache",
            lambda w, tensor=tensor, dtype=dtype: IndexCache.from_tensor(tensor, CONFIG, dtype),
            error,
            message,
        )
        for tensor, dtype, error, message in (
            ([], None, TypeError, "tensor: expected a torch.Tensor, got list"),
            (
                zeros(3, 128, 128, dtype=torch.uint8),
                None,
                NotImplementedError,
                "dtype: expected bf16, fp16, fp8_e4m3 or fp32, got torch.uint8",
            ),
            (
                zeros(3, 128, 128),
                "nvfp4",
                NotImplementedError,
                "dtype: expected bf16, fp16, fp8_e4m3 or fp32, got nvfp4",
            ),
            (
                zeros(3, 128, 128),
                "fp16",
                TypeError,
                "tensor: expected dtype torch.float16, got torch.bfloat16",
            ),
            (
                zeros(3, 2, 128, 128),
                None,
                ValueError,
                "tensor: expected shape [pages, tokens=128, Di=128], got [3, 2, 128, 128]",
            ),
            (
                zeros(3, 64, 128),
                None,
                ValueError,
                "tensor: expected shape [pages, tokens=128, Di=128], got [3, 64, 128]",
            ),
            (
                zeros(3, 128, 128).mT,
                None,
                ValueError,
                "tensor: expected a last stride of 1, got strides [16384, 1, 128]",
            ),
        )
    ),
    *(
        case(
            "IndexCache",
            lambda w, keys=keys, compact=compact: IndexCache.from_tensor(
                keys, CONFIG, compact=compact
            ),
            error,
            f"compact: expected {message}",
        )
        for keys, compact, error, message in (
            (COMPACT_KEYS, 16896, TypeError, "a torch.Tensor, got int"),
            (
                zeros(3, 128, 128, dtype=F8),
                COMPACT,
                NotImplementedError,
                "index keys of bf16 or fp16, which it halves, got fp8_e4m3 keys",
            ),
            (
                COMPACT_KEYS,
                zeros(3, 16896, dtype=torch.int8),
                TypeError,
                "dtype torch.uint8, got torch.int8",
            ),
            (COMPACT_KEYS, COMPACT[1:], ValueError, "shape [pages=3, bytes=16896], got [2, 16896]"),
            (COMPACT_KEYS, COMPACT.to("meta"), ValueError, "device cpu, got meta"),
            (
                COMPACT_KEYS,
                zeros(3, 16898, dtype=torch.uint8)[:, :16896],
                ValueError,
                "strides [a multiple of 4, 1], got strides [16898, 1]",
            ),
            (
                COMPACT_KEYS,
                zeros(16896, 3, dtype=torch.uint8).T,
                ValueError,
                "strides [a multiple of 4, 1], got strides [1, 3]",
            ),
            (
                COMPACT_KEYS,
                zeros(3, 16900, dtype=torch.uint8)[:, 2:16898],
                ValueError,
                "a storage offset of a multiple of 4 bytes, got 2",
            ),
        )
    ),
    *(
        case(
            "IndexCache",
            lambda w, change=change: IndexCache.allocate(2, *change, compact=True),
            NotImplementedError,
            f"compact: expected {message}",
        )
        for change, message in (
            ((CONFIG, "fp32"), "index keys of bf16 or fp16, which it halves, got fp32 keys"),
            ((MSAConfig(4, 2, 2, index_head_dim=48),), "index_head_dim=32, 64 or 128, got 48"),
        )
    ),
    case(
        "IndexCache",
        lambda w: IndexCache.from_tensor(w.index.tensor, None),
        TypeError,
        "config: expected msattn.MSAConfig, got NoneType",
    ),
]

FORMATS = [
    case(
        "KVFormat.parse",
        lambda w: KVFormat.parse("int8"),
        ValueError,
        f"kv_format: {LISTED} 'int8'",
    ),
    case(
        "KVFormat.parse",
        lambda w: KVFormat.parse(None),
        TypeError,
        "kv_format: expected a str, torch.dtype or KVFormat, got NoneType",
    ),
    case(
        "KVFormat.parse",
        lambda w: KVFormat.parse(torch.float8_e4m3fnuz),
        NotImplementedError,
        f"kv_format: {LISTED} torch.float8_e4m3fnuz",
    ),
]

HEADS = {"num_attention_heads": 96, "num_key_value_heads": 4, "head_dim": 128}
INDEX = {"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128}


def from_hf(changes: dict[str, object], tp_size: Any = 1) -> Callable[[World], object]:
    return lambda w: MSAConfig.from_hf({**HEADS, **INDEX, **changes}, tp_size)


CONFIGS = [
    *(
        case("MSAConfig", lambda w, changes=changes: MSAConfig(**changes), error, message)
        for changes, error, message in (
            ({"topk": "16"}, TypeError, "topk: expected an int, got str '16'"),
            ({"topk": 0}, ValueError, "topk: expected an int >= 1, got 0"),
            ({"local_blocks": -1}, ValueError, "local_blocks: expected an int >= 0, got -1"),
            ({"block_size": 64}, NotImplementedError, "block_size: expected 128, got 64"),
            (
                {"num_q_heads": 6},
                ValueError,
                "num_q_heads: expected a multiple of num_kv_heads=4, got 6",
            ),
            (
                {"num_index_heads": 1},
                ValueError,
                "num_index_heads: expected num_kv_heads=4 "
                "(index head h selects for KV head h), got 1",
            ),
            ({"head_dim": 8}, NotImplementedError, "head_dim: expected a multiple of 16, got 8"),
            (
                {"topk": 2, "init_blocks": 2},
                ValueError,
                "init_blocks + local_blocks: expected at most topk=2, got 2 + 1",
            ),
        )
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({}),
        ValueError,
        "config: expected a MiniMax-M3 config with 'index_topk_blocks' or "
        "sparse_attention_config['sparse_topk_blocks'], got dict without either",
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({"num_attention_heads": None}),
        ValueError,
        "config: expected a MiniMax-M3 config with 'num_attention_heads', got dict without it",
    ),
    *(
        case("MSAConfig.from_hf", from_hf(changes), error, message)
        for changes, error, message in (
            (
                {"sparse_attention_config": {"sparse_topk_blocks": 16.5}},
                TypeError,
                "sparse_topk_blocks: expected an int, got float 16.5",
            ),
            (
                {"sparse_attention_config": {"sparse_topk_blocks": "abc"}},
                TypeError,
                "sparse_topk_blocks: expected an int, got str 'abc'",
            ),
            (
                {"index_topk_blocks": 0},
                ValueError,
                "index_topk_blocks: expected an int >= 1, got 0",
            ),
            (
                {"index_topk_blocks": 8, "index_local_blocks": -1},
                ValueError,
                "index_local_blocks: expected an int >= 0, got -1",
            ),
            (
                {"num_key_value_heads": 0},
                ValueError,
                "num_key_value_heads: expected an int >= 1, got 0",
            ),
            ({"head_dim": "128"}, TypeError, "head_dim: expected an int, got str '128'"),
        )
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({"sparse_attention_config": {"sparse_score_type": "mean"}}),
        NotImplementedError,
        "sparse_score_type: expected 'max', got 'mean'",
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({"sparse_attention_config": {"use_sparse_attention": False}}),
        ValueError,
        "use_sparse_attention: expected True, got False",
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({}, tp_size=0),
        ValueError,
        "tp_size: expected an int >= 1, got 0",
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({}, tp_size=5),
        ValueError,
        "tp_size: expected a divisor of the 96 query heads, got 5",
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({}, tp_size=3),
        ValueError,
        "tp_size: expected a divisor or a multiple of the 4 KV heads, got 3",
    ),
    case(
        "MSAConfig.from_hf",
        from_hf({"num_key_value_heads": 6}, tp_size=3),
        ValueError,
        "tp_size: expected a divisor or a multiple of the 4 index heads, got 3",
    ),
]


def backward(stage: str, name: str) -> Callable[[World], object]:
    """Through what the stage allocates for its result."""

    def call(world: World) -> None:
        given = {**world.arguments(stage), "out": None, "lse_out": None}
        if stage == "index_scores":
            del given["lse_out"]
        followed = given[name][0] if isinstance(given[name], list) else given[name]
        followed.requires_grad_()
        result = getattr(msattn, stage)(**given)
        (result[0] if isinstance(result, tuple) else result).float().sum().backward()

    return call


BACKWARD = [
    case(
        "backward",
        backward(stage, name),
        NotImplementedError,
        f"{stage} has no backward pass; call it under torch.no_grad()",
    )
    for stage, name in (("attend", "q"), ("index_scores", "index_q"), ("merge_states", "outs"))
]


DISPATCH = [
    case("why_not", lambda w, kwargs=kwargs: why_not(**kwargs), error, message)
    for kwargs, error, message in (
        (
            {"stage": "select", "impl": "auto"},
            ValueError,
            "stage: expected store_kv, store_index_k, refresh_compact_keys, index_scores, "
            "select_blocks, index_select, attend or merge_states, got 'select'",
        ),
        (
            {"stage": "attend", "impl": None},
            ValueError,
            "impl: expected auto, hopper, triton or reference, got None",
        ),
        (
            {"stage": "attend", "impl": "auto", "plan": CONFIG},
            TypeError,
            "plan: expected msattn.Plan, got MSAConfig",
        ),
        (
            {"stage": "attend", "impl": "auto", "config": "m3"},
            TypeError,
            "config: expected msattn.MSAConfig, got str",
        ),
        (
            {"stage": "attend", "impl": "auto", "kv_format": "int8"},
            ValueError,
            f"kv_format: {LISTED} 'int8'",
        ),
        (
            {"stage": "attend", "impl": "auto", "query_dtype": "bf16"},
            TypeError,
            "query_dtype: expected a torch.dtype, got 'bf16'",
        ),
        *(
            ({"stage": "attend", "impl": "auto", "device": device}, error, message)
            for device, error, message in DEVICES
        ),
    )
]

GOOD_BATCH = {
    "cu_seqlens_q": int32(0, 1, 5, 305),
    "seq_lens": int32(4096, 131, 500),
    "page_table": torch.zeros(3, 32, dtype=torch.int32),
    "max_query_len": 300,
    "max_seq_len": 4096,
}

NOT_STARTS = "cu_seqlens_q: expected 0 first, then a non-decreasing sequence, got "

BATCHES = [
    *(
        case("Batch", lambda w, changes=changes: Batch(**{**GOOD_BATCH, **changes}), error, message)
        for changes, error, message in (
            (
                {"seq_lens": [4096, 131, 500]},
                TypeError,
                "seq_lens: expected a torch.Tensor, got list",
            ),
            (
                {"seq_lens": torch.tensor([4096, 131, 500])},
                TypeError,
                "seq_lens: expected dtype torch.int32, got torch.int64",
            ),
            ({"seq_lens": int32()}, ValueError, "seq_lens: expected shape [R=3], got [0]"),
            (
                {"cu_seqlens_q": None},
                TypeError,
                "cu_seqlens_q: expected a torch.Tensor, got None...",
            ),
            ({"page_table": []}, TypeError, "page_table: expected a torch.Tensor, got list"),
            (
                {"seq_lens": int32(4096, -1, 5)},
                ValueError,
                "seq_lens: expected lengths >= 0, got [4096, -1, 5]",
            ),
            (
                {"seq_lens": int32(1).reshape(1, 1)},
                ValueError,
                "seq_lens: expected shape [R], got [1, 1]",
            ),
            (
                {"cu_seqlens_q": torch.tensor([0, 1, 5, 305])},
                TypeError,
                "cu_seqlens_q: expected dtype torch.int32, got torch.int64",
            ),
            (
                {"cu_seqlens_q": int32(0, 1, 5)},
                ValueError,
                "cu_seqlens_q: expected shape [R+1=4], got [3]",
            ),
            (
                {"cu_seqlens_q": int32(1, 1, 5, 305)},
                ValueError,
                NOT_STARTS + "[1, 1, 5, 305]",
            ),
            (
                {"cu_seqlens_q": int32(0, 5, 1, 305)},
                ValueError,
                NOT_STARTS + "[0, 5, 1, 305]",
            ),
            (
                {"page_table": torch.zeros(3, 32)},
                TypeError,
                "page_table: expected dtype torch.int32, got torch.float32",
            ),
            (
                {"page_table": torch.zeros(2, 32, dtype=torch.int32)},
                ValueError,
                "page_table: expected shape [R=3, B], got [2, 32]",
            ),
            (
                {"page_table": torch.zeros(3, 31, dtype=torch.int32)},
                ValueError,
                "page_table: expected at least 32 columns, got [3, 31]",
            ),
            (
                {"page_table": torch.zeros(3, 32, dtype=torch.int32, device="meta")},
                ValueError,
                "page_table: expected device cpu, got meta",
            ),
            ({"max_query_len": 299}, ValueError, "max_query_len: expected at least 300, got 299"),
            ({"max_query_len": -1}, ValueError, "max_query_len: expected an int >= 0, got -1"),
            ({"max_query_len": 3e2}, TypeError, "max_query_len: expected an int, got float 300.0"),
            ({"max_seq_len": 4095}, ValueError, "max_seq_len: expected at least 4096, got 4095"),
            (
                {"max_seq_len": torch.tensor(4096)},
                TypeError,
                "max_seq_len: expected an int, got Tensor tensor(4096)",
            ),
            (
                {"num_tokens": 304},
                ValueError,
                "num_tokens: expected cu_seqlens_q's last entry 305, got 304",
            ),
            ({"num_tokens": "305"}, TypeError, "num_tokens: expected an int, got str '305'"),
        )
    ),
    *(
        case("Batch", lambda w, given=given: Batch.from_lists(*given), error, message)
        for given, error, message in (
            (
                ([1, 1], [5], [[0], [0]]),
                ValueError,
                "seq_lens: expected 2 lengths, as query_lens has, got 1",
            ),
            (([-1], [5], [[0]]), ValueError, "query_lens: expected an int >= 0, got -1"),
            (([1.0], [5], [[0]]), TypeError, "query_lens: expected an int, got float 1.0"),
            (([1], [-5], [[0]]), ValueError, "seq_lens: expected an int >= 0, got -5"),
            (([1], [True], [[0]]), TypeError, "seq_lens: expected an int, got bool True"),
            ((1, [5], [[0]]), TypeError, "query_lens: expected a sequence of ints, got int"),
            (([1], None, [[0]]), TypeError, "seq_lens: expected a sequence of ints, got NoneType"),
            (([1], [5], 0), TypeError, "page_table: expected a sequence of rows, got int"),
            (([1], [5], [0]), TypeError, "page_table: expected a sequence of pages, got int"),
            (([1], [5], [[0.5]]), TypeError, "page_table: expected rows of ints, got float 0.5"),
            (([1], [5], [["0"]]), TypeError, "page_table: expected rows of ints, got str '0'"),
            (
                ([1], [5], torch.zeros(1, 1)),
                TypeError,
                "page_table: expected an int32 or int64 tensor, got torch.float32",
            ),
            (
                ([1], [5], torch.zeros(1, dtype=torch.int32)),
                ValueError,
                "page_table: expected shape [R=1, B], got [1]",
            ),
            (([1], [5], [[0], [0]]), ValueError, "page_table: expected shape [R=1, B], got [2, 1]"),
            (
                ([1], [129], [[0]]),
                ValueError,
                "page_table: expected at least 2 columns, got [1, 1]",
            ),
        )
    ),
    *(
        case("Batch", lambda w, device=device: step(device=device), error, message)
        for device, error, message in DEVICES
    ),
]


def operator(name: str, index: int, value: object) -> Callable[[World], object]:
    """An operator of torch, one argument of it replaced; imported here, as it imports Triton."""

    def call(world: World) -> object:
        from msattn import ops

        given = world.arguments("attend")
        arguments = [given["q"], *ops._cache_arguments(world.cache), given["block_ids"]]
        arguments += [*world.plan.tensors, 2, 130, None, None]
        arguments[index] = value
        return getattr(torch.ops.msattn, name)(*arguments)

    return call


WARMUPS = [
    case("warmup", lambda w, given=given: msattn.warmup(**given), error, message)
    for given, error, message in (
        (
            {"config": None, "kv_format": "bf16"},
            TypeError,
            "config: expected msattn.MSAConfig, got NoneType",
        ),
        (
            {"config": CONFIG, "kv_format": "bf16", "max_query_lens": 4},
            TypeError,
            "max_query_lens: expected a sequence of ints, got int",
        ),
        (
            {"config": CONFIG, "kv_format": "bf16", "max_query_lens": [1, 0]},
            ValueError,
            "max_query_lens: expected an int >= 1, got 0",
        ),
    )
]

OPERATORS = [
    case("ops", operator("attend", index, value), error, message)
    for index, value, error, message in (
        (0, zeros(3, 512), ValueError, "q: expected shape [T, Hq, D], got [3, 512]"),
        (1, [zeros(3, 2, 128, 256)] * 3, ValueError, PAIR + "3 tensors"),
        (2, "int4", ValueError, f"kv_format: {LISTED} 'int4'"),
        (5, zeros(3, 8, dtype=torch.int32), ValueError, "block_ids: expected shape [T, Hkv, K]..."),
        (6, int32(0, 2), ValueError, "cu_seqlens_q: expected shape [R+1=3], got [2]"),
    )
]


def variable(value: str) -> Callable[[World], object]:
    """A number is read from the environment."""

    def call(world: World) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MSATTN_DECODE_MIN_BATCH", value)
            return env.read_int("MSATTN_DECODE_MIN_BATCH", 1)

    return call


VARIABLES = [
    case(
        "env",
        variable(value),
        ValueError,
        f"MSATTN_DECODE_MIN_BATCH: expected an int >= 0, got {value!r}",
    )
    for value in ("-1", "many", "")
]

CASES = [
    *tensor_cases(),
    *object_cases(),
    *impl_cases(),
    *overlapping_cases(),
    *STAGES,
    *LAYER,
    *PLANS,
    *CACHES,
    *BATCHES,
    *FORMATS,
    *CONFIGS,
    *DISPATCH,
    *BACKWARD,
    *WARMUPS,
    *OPERATORS,
    *VARIABLES,
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small: waiting for a second core is all that a busy machine would do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=[f"{c.label}-{c.message}" for c in CASES])
def test_error(case: Case) -> None:
    world = World()
    before = world.state()
    with pytest.raises(case.error) as raised:
        case.call(world)
    assert type(raised.value) is case.error
    if case.message.endswith("..."):
        assert str(raised.value).startswith(case.message.removesuffix("..."))
    else:
        assert str(raised.value) == case.message
    assert unchanged(before, world.state()), "written although it failed"


@pytest.mark.parametrize(
    "stage", [*dict.fromkeys(stage for stage, *_ in TENSORS), "sparse_attention"]
)
def test_good_arguments_are_good(stage: str) -> None:
    """Every case above fails for its one change alone, and a stage that runs is seen to write."""
    world = World()
    before = world.state()
    world.call(stage)
    assert not unchanged(before, world.state())


def test_good_batch_is_good() -> None:
    assert Batch(**GOOD_BATCH).num_tokens == 305
    assert from_hf({"index_topk_blocks": 8})(World()) == MSAConfig(96, topk=8, local_blocks=0)


class Check(NamedTuple):
    """A statement that raises, or a call of a function that does, for a user's argument."""

    file: str
    line: int
    column: int


PACKAGE = Path(msattn.__file__).parent


def checks_in(path: Path) -> dict[Check, str]:
    """The checks of a source file, and their text."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        calls_check = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id.removeprefix("_").startswith("require_")
        )
        if isinstance(node, ast.Raise) or calls_check:
            where = Check(path.name, node.lineno, node.col_offset)
            found[where] = f"{path.name}:{node.lineno}: {ast.unparse(node)}"
    return found


def checks_reached(traceback: TracebackType | None) -> Iterator[Check]:
    """Where each frame of the package stood when the exception passed."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if Path(code.co_filename).parent == PACKAGE:
            line, _, column, _ = list(code.co_positions())[traceback.tb_lasti // 2]
            if line is not None and column is not None:
                yield Check(Path(code.co_filename).name, line, column)
        traceback = traceback.tb_next


def test_every_check_has_a_case() -> None:
    """The stages, their arguments and the dispatch: all that the package's top folder holds."""
    unreached: dict[Check, str] = {}
    for path in sorted(PACKAGE.glob("*.py")):
        unreached |= checks_in(path)
    assert len(unreached) > 100, "the search itself has come to nothing"
    world = World()  # one for all: an error changes nothing
    for case in CASES:
        with pytest.raises(case.error) as raised:
            case.call(world)
        for check in checks_reached(raised.tb):
            unreached.pop(check, None)
    assert not unreached, "\n".join(["checks without a case:", *unreached.values()])
