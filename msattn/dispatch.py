"""How a stage is served: its implementations, why one cannot serve, and the choice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, cast

import torch

from . import env
from .arch import absence, device_name
from .checks import fail, one_of, require_device, require_type
from .config import MSAConfig
from .kernels.hopper.support import indexer_why_not as hopper_indexer_why_not
from .kernels.hopper.support import why_not as hopper_why_not
from .kernels.triton.support import why_not as triton_why_not
from .kv_format import KVFormat
from .plan import Plan

STAGES = (
    "store_kv",
    "store_index_k",
    "refresh_compact_keys",
    "index_scores",
    "select_blocks",
    "index_select",
    "attend",
    "merge_states",
)
"""The stages of a layer, in the order of the algorithm."""

IMPLEMENTATION_NAMES = ("hopper", "triton", "reference")
"""In the order in which ``impl="auto"`` tries them."""


class Problem(NamedTuple):
    """What an implementation looks at when it says whether it can serve."""

    stage: str
    device: torch.device
    config: MSAConfig | None = None  # None where the stage does not depend on it
    kv_format: KVFormat | None = None  # format of the cache that the stage reads or writes
    query_dtype: torch.dtype | None = None
    num_blocks: int | None = None  # blocks of the longest request that the plan allows
    max_query_len: int | None = None  # a power of two, at least every request's query tokens
    capability: tuple[int, int] | None = None  # of a GPU that is asked about; None = the device's


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to serve a stage: ``module`` holds a function with the stage's name."""

    name: str
    module: str  # relative to this package, imported when it is chosen
    why_not: Callable[[Problem], list[str]] = field(repr=False)

    def load(self, stage: str) -> Callable[..., Any]:
        """The function, which writes into tensors that are there, for none of autograd's graphs."""
        function: Callable[..., Any] = getattr(import_module(self.module, __package__), stage)
        return torch.no_grad()(function) if self.name == "reference" else function


def _reference_why_not(problem: Problem) -> list[str]:
    if problem.device.type in ("cpu", "cuda"):
        return [] if problem.capability else absence(problem.device)
    return [f"runs on cpu and cuda, not on {problem.device.type} (scores are summed in fp64)"]


def _reference(module: str) -> Implementation:
    return Implementation("reference", f".reference.{module}", _reference_why_not)


def _triton(module: str) -> Implementation:
    return Implementation("triton", f".kernels.triton.{module}", triton_why_not)


_HOPPER_ATTEND = Implementation("hopper", ".kernels.hopper.attend", hopper_why_not)
_HOPPER_INDEXER = Implementation("hopper", ".kernels.hopper.indexer", hopper_indexer_why_not)

TABLE: dict[str, tuple[Implementation, ...]] = {
    "store_kv": (_triton("store"), _reference("store")),
    "store_index_k": (_triton("store"), _reference("store")),
    "refresh_compact_keys": (_triton("store"), _reference("store")),
    "index_scores": (_HOPPER_INDEXER, _triton("indexer"), _reference("indexer")),
    "select_blocks": (_triton("selection"), _reference("selection")),
    "index_select": (_HOPPER_INDEXER, _triton("indexer"), _reference("indexer")),
    "attend": (_HOPPER_ATTEND, _triton("attend"), _reference("attend")),
    "merge_states": (_triton("combine"), _reference("combine")),
}
"""The implementations of each stage; a new one is a new row here, and no caller changes."""


Launch = Callable[[], None]
"""A stage that was checked, has its outputs allocated and its implementation chosen."""


def prepare(impl: str, problem: Problem, *arguments: object) -> Launch:
    """The launch of the implementation that serves ``problem``, on the problem's device."""
    return on_device(problem.device, partial(choose(impl, problem), *arguments))


def on_device(device: torch.device, launch: Launch) -> Launch:
    """``launch``, where that is the current device when it begins."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        return partial(_launch_on, device, launch)
    return launch


def _launch_on(device: torch.device, launch: Launch) -> None:
    """Triton launches on the current device, whatever its tensors' is."""
    with torch.cuda.device(device):
        launch()


def nothing(impl: str, problem: Problem) -> Launch:
    """The launch of a stage without tokens: reasons stand in the way of a named ``impl`` alone."""
    if impl != "auto" or env.IMPL != "auto":
        choose(impl, problem)
    return _do_nothing


def _do_nothing() -> None:
    """What a stage without tokens does."""


Result = TypeVar("Result", bound="torch.Tensor | tuple[torch.Tensor, ...]")


def refuse_backward(stage: str, result: Result, *inputs: torch.Tensor) -> Result:
    """``result``; where autograd would follow an input, views whose backward pass raises."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return result
    results = result if isinstance(result, tuple) else (result,)
    apply: Callable[..., Any] = _NoBackward.apply
    views = apply(stage, len(results), *results, *inputs)
    return cast(Result, views if isinstance(result, tuple) else views[0])


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: str, count: int, *tensors: torch.Tensor) -> Any:
        ctx.stage = stage
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(
            f"{ctx.stage} has no backward pass; call it under torch.no_grad()"
        )


_CHOSEN: dict[tuple[str, Problem], tuple[tuple[Implementation, ...], Callable[..., Any]]] = {}
"""Choices made so far, with the rows that they were made from."""


def choose(impl: str, problem: Problem) -> Callable[..., Any]:
    """The function that serves ``problem``.

    ``"auto"`` takes the first implementation whose reasons against it are none. A named one that
    cannot serve raises NotImplementedError with its reasons; nothing else is tried in its place.
    """
    impl, rows = resolve(impl), TABLE[problem.stage]
    made_from, function = _CHOSEN.get((impl, problem), (None, None))
    if function is None or made_from is not rows:
        function = _choose(impl, problem)
        # Whether Triton runs on a CPU is for the environment to say, at any time.
        if problem.device.type != "cpu":
            _CHOSEN[impl, problem] = rows, function
    return function


def _choose(impl: str, problem: Problem) -> Callable[..., Any]:
    names = IMPLEMENTATION_NAMES if impl == "auto" else (impl,)
    reasons: dict[str, list[str]] = {}
    for name in names:
        reasons[name] = reasons_against(name, problem)
        implementation = _find(problem.stage, name)
        if implementation is not None and not reasons[name]:
            _log_choice(problem.stage, name, problem.device)
            return implementation.load(problem.stage)
    listed = "; ".join(f"{name}: {', '.join(against)}" for name, against in reasons.items())
    raise NotImplementedError(f"impl={impl!r} cannot serve {problem.stage}: {listed}")


def why_not(
    stage: str,
    *,
    impl: str,
    plan: Plan | None = None,
    device: torch.device | str | None = None,
    config: MSAConfig | None = None,
    kv_format: object = None,
    query_dtype: torch.dtype | None = None,
) -> list[str]:
    """Why ``impl`` cannot serve ``stage``: a list of reasons, empty when it can.

    Args:
        stage: ``"store_kv"``, ``"store_index_k"``, ``"refresh_compact_keys"``,
            ``"index_scores"``, ``"select_blocks"``, ``"index_select"``, ``"attend"`` or
            ``"merge_states"``.
        impl: ``"hopper"``, ``"triton"`` or ``"reference"``; ``"auto"`` asks whether any can serve.
        plan: gives the config, the KV format and the device, where they are not given themselves.
        device: default: the plan's, else the CPU.
        config, kv_format, query_dtype: what would be computed; a value that is left out is not held
            against an implementation.
    """
    if stage not in STAGES:
        raise fail("stage", one_of(STAGES), repr(stage))
    impl = resolve(impl)
    if plan is not None:
        require_type("plan", plan, Plan)
        config = config or plan.config
        kv_format = kv_format or plan.kv_format
        device = plan.device if device is None else device
    if config is not None:
        require_type("config", config, MSAConfig)
    if query_dtype is not None and not isinstance(query_dtype, torch.dtype):
        raise fail("query_dtype", "a torch.dtype", repr(query_dtype), TypeError)
    problem = Problem(
        stage,
        require_device("device", device) or torch.device("cpu"),
        config,
        None if kv_format is None else KVFormat.parse(kv_format),
        query_dtype,
        None if plan is None else plan.num_blocks,
        None if plan is None else plan.query_len_class,
    )
    if impl != "auto":
        return reasons_against(impl, problem)
    against = {name: reasons_against(name, problem) for name in IMPLEMENTATION_NAMES}
    if not all(against.values()):
        return []
    return [f"{name}: {reason}" for name, reasons in against.items() for reason in reasons]


def reasons_against(name: str, problem: Problem) -> list[str]:
    """The reasons of the implementation called ``name``, or that there is none of that name."""
    implementation = _find(problem.stage, name)
    if implementation is None:
        available = one_of([i.name for i in TABLE[problem.stage]])
        return [f"this version has no {name} implementation of {problem.stage} (has {available})"]
    return implementation.why_not(problem)


def _find(stage: str, name: str) -> Implementation | None:
    return next((i for i in TABLE[stage] if i.name == name), None)


def resolve(impl: str) -> str:
    """What ``impl`` stands for: ``"auto"`` for what the environment says, itself by default."""
    for name, value in (("impl", impl), ("MSATTN_IMPL", env.IMPL)):
        if value != "auto" and value not in IMPLEMENTATION_NAMES:
            raise fail(name, one_of(("auto", *IMPLEMENTATION_NAMES)), repr(value))
    return env.IMPL if impl == "auto" else impl


@cache
def _log_choice(stage: str, name: str, device: torch.device) -> None:
    if env.LOG:
        print(f"msattn: {stage} is served by {name} on {device_name(device)}", file=sys.stderr)
