"""What is measured: each stage, and the whole layer, through msattn's public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..api import sparse_attention
from ..attend import attend
from ..combine import merge_states
from ..indexer import index_scores, index_select
from ..kv_format import KVFormat
from ..selection import select_blocks
from ..store import store_index_k, store_kv
from ..testing import cost
from ..testing.cost import Cost
from ..testing.selections import PATTERNS
from ..testing.timing import Call
from .check import (
    Check,
    check_attention,
    check_index,
    check_layer,
    check_merge,
    check_scores,
    check_selection,
    check_store,
)
from .inputs import Inputs


@dataclass(frozen=True)
class Prepared:
    """A call for each input set, and how set 0's result is judged once the first has run."""

    calls: list[Call]
    check: Callable[[], Check]


class Provider(Protocol):
    """Who computes: msattn, or a peer."""

    name: str
    dense: bool  # attends over all keys: another computation, listed but not competed with

    def prepare(self, op: str, inputs: Inputs) -> Prepared:
        """Raises NotImplementedError, with the reason, for what it cannot do."""


@dataclass(frozen=True)
class Op:
    """A measured operation."""

    name: str
    cost: Callable[[Inputs], Cost]
    prepare: Callable[[Inputs, str], Prepared]
    formats: Callable[[KVFormat], bool] | None = None  # None: no cache is touched
    patterns: tuple[str, ...] = ()  # selections that matter to it; none: it does not see any


class Msattn:
    """This library, with one ``impl``."""

    dense = False

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.name = "msattn" if impl == "auto" else f"msattn:{impl}"

    def prepare(self, op: str, inputs: Inputs) -> Prepared:
        return OPS[op].prepare(inputs, self.impl)


def _prepare_store(x: Inputs, impl: str) -> Prepared:
    (k, v), index_k = x.kv, x.index_k

    def call(r: int) -> None:
        store_kv(k[r], v[r], x.cache, x.slots[r], impl=impl)
        store_index_k(index_k[r], x.index, x.slots[r], impl=impl)

    return Prepared(each(x, call), lambda: check_store(x))


def _prepare_scores(x: Inputs, impl: str) -> Prepared:
    def call(r: int) -> None:
        index_scores(x.index_q[r], x.index, x.plans[r], out=x.scores_out, impl=impl)

    return Prepared(each(x, call), lambda: check_scores(x, x.scores_out))


def _prepare_select(x: Inputs, impl: str) -> Prepared:
    def call(r: int) -> None:
        select_blocks(x.scores[r], x.plans[r], out=x.ids_out, impl=impl)

    return Prepared(each(x, call), lambda: check_selection(x, x.ids_out))


def _prepare_index(x: Inputs, impl: str) -> Prepared:
    def call(r: int) -> None:
        index_select(x.index_q[r], x.index, x.plans[r], out=x.ids_out, impl=impl)

    return Prepared(each(x, call), lambda: check_index(x, x.ids_out))


def _prepare_attend(x: Inputs, impl: str) -> Prepared:
    def call(r: int) -> None:
        attend(x.q[r], x.cache, x.block_ids[r], x.plans[r], out=x.out[r], impl=impl)

    return Prepared(each(x, call), lambda: check_attention(x, x.out[0]))


def _prepare_merge(x: Inputs, impl: str) -> Prepared:
    def call(r: int) -> None:
        merge_states(*x.parts[r], out=x.out[r], lse_out=x.lse_out[r], impl=impl)

    return Prepared(each(x, call), lambda: check_merge(x, x.out[0]))


def _prepare_layer(x: Inputs, impl: str) -> Prepared:
    (k, v), index_k = x.kv, x.index_k

    def call(r: int) -> None:
        sparse_attention(
            x.q[r],
            k[r],
            v[r],
            x.index_q[r],
            index_k[r],
            x.cache,
            x.index,
            x.plans[r],
            x.slots[r],
            out=x.out[r],
            impl=impl,
        )

    return Prepared(each(x, call), lambda: check_layer(x, x.out[0]))


def each(x: Inputs, call: Callable[[int], None]) -> list[Call]:
    """``call`` of every input set."""
    return [partial(call, r) for r in range(x.sets)]


def _layer_cost(x: Inputs) -> Cost:
    """Of a layer whose selection overlaps as the pattern says."""
    return (
        cost.store_cost(x.case, x.format, x.index_format)
        + cost.index_cost(x.case, x.index_format)
        + _attend_cost(x)
    )


def _attend_cost(x: Inputs) -> Cost:
    return cost.attend_cost(x.case, x.format, x.block_ids[0])


def _in_index(fmt: KVFormat) -> bool:
    return fmt.in_index


def _any_format(fmt: KVFormat) -> bool:
    return True


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "store",
            lambda x: cost.store_cost(x.case, x.format, x.index_format),
            _prepare_store,
            _any_format,
        ),
        Op(
            "scores", lambda x: cost.scores_cost(x.case, x.index_format), _prepare_scores, _in_index
        ),
        Op("select", lambda x: cost.select_cost(x.case), _prepare_select),
        Op("index", lambda x: cost.index_cost(x.case, x.index_format), _prepare_index, _in_index),
        Op("attend", _attend_cost, _prepare_attend, _any_format, tuple(PATTERNS)),
        Op("merge", lambda x: cost.merge_cost(x.case, 2), _prepare_merge),
        # The layer selects for itself: its index can be made to agree with these two only.
        Op("layer", _layer_cost, _prepare_layer, _any_format, ("realistic", "uniform")),
    )
}
"""Every op by name, in the order of the algorithm."""
