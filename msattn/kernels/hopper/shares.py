"""Equal shares of a step's blocks, whatever its lengths are, and the merge of what they cut.

A unit is a tile (some query tokens of one request) and a KV head; its entries are the blocks that
its tokens chose. The entries of all units are one list, counted on the device, of which each
program takes an equal share: no choice is made of lengths, and none is kept by a graph. Units that
shares cut are merged by the last of their programs to arrive; where whole units are shares about as
equal, none is cut.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attend_union import D

MIN_SHARE = 2
"""Entries of a program, where there are so few."""
FULL_SHARE, FULL_PROGRAMS = gl.constexpr(4), gl.constexpr(128)
"""Entries of a program that are worth its start and its merge, where so many programs have them."""
CUT_COST = 8
"""What a cut costs a program, the other unit's start and the merge, in entries."""
EVERYTHING = gl.constexpr(1 << 30)
"""A share that no unit reaches the end of."""
COUNTS = gl.constexpr(512)
"""Units whose sizes a program adds up at once."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def unit_size(
    unit, counts_ptr, tile_request_ptr, num_heads, num_slots, inside, DIRECT: gl.constexpr
):
    """Entries of a unit, at least one that is used; it may name no block, but writes the output."""
    if DIRECT:
        return gl.maximum(num_slots, 1)
    else:
        count = gl.load(counts_ptr + unit, mask=inside, other=0)
        request = gl.load(tile_request_ptr + unit // num_heads, mask=inside, other=-1)
        return gl.where(request >= 0, gl.maximum(count, 1), 0)


@gluon.jit
def find_share(
    counts_ptr,
    tile_request_ptr,
    num_entries,
    num_units,
    num_heads,
    num_slots,
    min_share,
    cut_cost,
    WARPS: gl.constexpr,
    DIRECT: gl.constexpr,
):  # fmt: skip
    """Where units are cut, and what this program has of them: share, at, end, unit, before.

    ``share`` entries lie between two cuts. The program's are those from ``at`` up to ``end``;
    ``unit`` is its first unit, and ``before`` entries lie before that.
    """
    layout: gl.constexpr = gl.BlockedLayout([COUNTS // (32 * WARPS)], [32], [WARPS], [0])
    i = gl.arange(0, COUNTS, layout=layout)
    num_used = 0
    largest = 0
    if not DIRECT:
        num_entries = 0
        for start in range(0, num_units, COUNTS):
            unit = start + i
            size = unit_size(
                unit, counts_ptr, tile_request_ptr, num_heads, num_slots, unit < num_units, DIRECT
            )
            num_entries += gl.sum(size, 0)
            num_used += gl.sum((size > 0).to(gl.int32), 0)
            largest = gl.maximum(largest, gl.max(size, 0))
    program, programs = gl.program_id(0), gl.num_programs(0)
    least = gl.minimum(gl.maximum(num_entries // FULL_PROGRAMS, min_share), FULL_SHARE)
    share = gl.maximum((num_entries + programs - 1) // programs, least)
    at = program * share
    end = gl.minimum(at + share, num_entries)
    if DIRECT:
        size = unit_size(0, counts_ptr, tile_request_ptr, num_heads, num_slots, True, DIRECT)
        unit = at // size
        before = unit * size
    else:
        each = (num_used + programs - 1) // programs
        most = (each - 1) * (num_entries.to(gl.float32) / gl.maximum(num_used, 1)) + largest
        is_whole = most <= share + cut_cost
        unit = 0
        before = 0
        to_end = 0
        seen = 0
        for start in range(0, num_units, COUNTS):
            units = start + i
            size = unit_size(
                units, counts_ptr, tile_request_ptr, num_heads, num_slots, units < num_units, DIRECT
            )
            is_before = seen + gl.associative_scan(size, 0, _add) <= at
            is_before = gl.where(is_whole, units < program * each, is_before)
            unit += gl.sum(is_before.to(gl.int32), 0)
            before += gl.sum(gl.where(is_before, size, 0), 0)
            to_end += gl.sum(gl.where(units < (program + 1) * each, size, 0), 0)
            seen += gl.sum(size, 0)
        share = gl.where(is_whole, EVERYTHING, share)
        at = gl.where(is_whole, before, at)
        end = gl.where(is_whole, to_end, end)
    return share, at, end, unit, before


@gluon.jit
def join_parts(
    parts,
    unit,
    before,
    size,
    share,
    numbers,  # where a number of acc lies in a part
    row,  # where its state does
    acc,
    running_max,
    total,
    zero,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    AXIS: gl.constexpr,  # of acc, which the state has not
):
    """Whether the output of a unit is this program's to write; its sums, maxima and totals then."""
    partial_out_ptr, partial_state_ptr, arrivals_ptr = parts
    program = gl.program_id(0)
    first_program, last_program = before // share, (before + size - 1) // share
    is_last = first_program == last_program
    if first_program < last_program:
        part = _part(program, before, share, CONSUMER, CONSUMERS)
        gl.store(partial_out_ptr + part * (D * ROWS) + numbers, acc)
        gl.store(partial_state_ptr + part * (2 * ROWS) + row, running_max)
        gl.store(partial_state_ptr + part * (2 * ROWS) + ROWS + row, total)
        # All of the consumer's stores come before its arrival.
        gl.thread_barrier()
        arrivals = arrivals_ptr + unit * CONSUMERS + CONSUMER
        arrived = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        is_last = arrived == last_program - first_program
        if is_last:
            gl.store(arrivals, 0)
            acc, running_max, total = _merge(
                partial_out_ptr, partial_state_ptr, numbers, row, zero, before, share,
                first_program, last_program, CONSUMER, CONSUMERS, ROWS, AXIS,
            )  # fmt: skip
    return is_last, acc, running_max, total


@gluon.jit
def _part(program, before, share, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Where a program leaves its part of a unit: one place for its first unit, one for its last."""
    is_second = before > program * share
    return ((program * 2 + is_second.to(gl.int32)) * CONSUMERS + CONSUMER).to(gl.int64)


@gluon.jit
def _merge(
    partial_out_ptr,
    partial_state_ptr,
    numbers,
    row,
    acc,
    before,
    share,
    first_program,
    last_program,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ROWS: gl.constexpr,
    AXIS: gl.constexpr,
):
    """Output, maximum and sum of a unit from those of its parts, whose order is always the same."""
    AHEAD: gl.constexpr = max(64 // ROWS, 1)
    layout: gl.constexpr = row.type.layout
    running_max = gl.full([ROWS], -1e30, gl.float32, layout=layout)
    total = gl.zeros([ROWS], gl.float32, layout=layout)
    for first in range(first_program, last_program + 1, AHEAD):
        for i in gl.static_range(AHEAD):
            # Loaded whether there or not: the assembler moves no load with a mask up.
            program = gl.minimum(first + i, last_program)
            part = _part(program, before, share, CONSUMER, CONSUMERS)
            state = partial_state_ptr + part * (2 * ROWS)
            part_max = gl.load(state + row, cache_modifier=".cg")
            part_sum = gl.load(state + ROWS + row, cache_modifier=".cg")
            part_out = gl.load(partial_out_ptr + part * (D * ROWS) + numbers, cache_modifier=".cg")
            new_max = gl.maximum(running_max, part_max)
            rescale = gl.exp2(running_max - new_max)
            weight = gl.where(first + i <= last_program, gl.exp2(part_max - new_max), 0.0)
            running_max = new_max
            total = total * rescale + part_sum * weight
            acc = acc * gl.expand_dims(rescale, AXIS) + part_out * gl.expand_dims(weight, AXIS)
    return acc, running_max, total
