"""The multiprocessor of :mod:`gluon_on_torch`: partitions and copies take turns, in a random order.

Each partition of ``warp_specialize`` is a thread, but only one runs at a time: it gives its turn
back wherever it waits or multiplies, and at some arrivals and copies. Who is next, a partition
or the arrival of a copy, is drawn from a seed, so that a run can be repeated. Partitions and copies
have speeds of their own, so that some fall far behind, as on a GPU. Where nobody can go on, the
kernel is in a deadlock, which is seen at once, or, where some look at memory again and again, after
many looks.

Programs run one after the other, or, in a cooperative launch, all at the same time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import torch

SPEEDS = (0.02, 0.3, 1.0, 3.0)
"""Chances of a turn, relative to one another."""
PATIENCE = 3000
"""Looks at memory, for each partition, after which nothing will change there any more."""


class Fault(Exception):
    """What a kernel must not do."""


class Barrier:
    """An mbarrier: a phase ends when its arrivals and the bytes it expects are all there."""

    def __init__(self, name: str = "a barrier") -> None:
        self.name = name
        self.count = 0  # arrivals of a phase; 0 before init
        self.missing = 0
        self.missing_bytes = 0
        self.phase = 0  # the parity of the phase at work

    def __str__(self) -> str:
        return f"{self.name} ({self.missing} arrivals and {self.missing_bytes} bytes missing)"

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int) -> None:
        if not self.count:
            raise Fault(f"{self.name} is used before it is initialised")
        if count > self.missing:
            raise Fault(f"{self.name}: an arrival too many in a phase of {self.count}")
        self.missing -= count
        self._end_phase()

    def expect(self, size: int) -> None:
        self.missing_bytes += size
        self.arrive(1)

    def deliver(self, size: int) -> None:
        self.missing_bytes -= size
        self._end_phase()

    def is_past(self, phase: int) -> bool:
        """What a waiting partition looks at: no more than a parity."""
        return self.phase != phase

    def _end_phase(self) -> None:
        if not self.missing and not self.missing_bytes:
            self.phase ^= 1
            self.missing = self.count


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fills with NaN; of fp8 numbers, this is what bytes of all bits are."""
    return x.fill_(torch.nan if x.dtype.is_floating_point else 0xFF)


def _signal() -> threading.Lock:
    """One thread acquires it when another one has released it; a semaphore takes twice as long."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Copy:
    """A box on its way to shared memory, which holds NaN until it arrives."""

    read: Callable[[], torch.Tensor]
    target: torch.Tensor
    barrier: Barrier
    speed: float

    def arrive(self) -> None:
        self.target.copy_(self.read())
        self.barrier.deliver(self.target.nbytes)


class Partition(threading.Thread):
    """A function of ``warp_specialize``; runs when it is given a turn."""

    def __init__(
        self,
        index: int,
        program: tuple[int, ...],
        function: Callable[..., None],
        arguments: Sequence[Any],
        give_back: threading.Lock,
        speed: float,
    ) -> None:
        super().__init__(name=f"partition {index} ({function})", daemon=True)
        self.program, self.function, self.arguments = program, function, arguments
        self.speed = speed
        self.waits_for: tuple[Barrier, int] | None = None
        self.looks = False  # at memory, for what another partition will store there
        self.seen: tuple[Hashable, Callable[[], int], int] | None = None  # the last look
        self.products = 0  # that it has started
        self.error: BaseException | None = None
        self.is_done = False
        self._turn, self._give_back = _signal(), give_back
        self._is_abandoned = False

    def run(self) -> None:
        try:
            self._take_turn()
            self.function(*self.arguments)
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._give_back.release()

    def is_ready(self) -> bool:
        if self.waits_for is None:
            return True
        barrier, phase = self.waits_for
        return barrier.is_past(phase)

    def would_see_the_same(self) -> bool:
        """It looked, did nothing else, and looks at the same again: nothing has changed there."""
        return self.looks and self.seen is not None and self.seen[1]() == self.seen[2]

    def pause(self) -> None:
        """Of the partition itself: gives its turn back, returns with the next one."""
        self._give_back.release()
        self._take_turn()

    def resume(self) -> None:
        """Of the machine: a turn for the partition, to its end."""
        self._turn.release()
        self._give_back.acquire()

    def abandon(self) -> None:
        """Ends a partition that would never be given a turn again."""
        self._is_abandoned = True
        while not self.is_done:
            self.resume()
        self.join()

    def _take_turn(self) -> None:
        self._turn.acquire()
        if self._is_abandoned:
            raise _Abandoned


class _Abandoned(BaseException):
    """Ends the thread of a partition after a fault elsewhere."""


class Machine:
    """Runs programs, and what it has seen of them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.kernel = ""
        self.program: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.copied: Counter[str] = Counter()
        """Boxes that each kernel has copied."""
        self._is_cooperative = False
        self._started: list[Partition] = []
        self._copies: list[Copy] = []
        self._looks = 0  # since anything else was done
        self._running: Partition | None = None
        self._give_back = _signal()

    def run_programs(
        self,
        kernel: str,
        grid: tuple[int, ...],
        program: Callable[[], None],
        *,
        is_cooperative: bool,
    ) -> None:
        """The program, once for each place in the grid, in any order."""
        self.kernel, self.grid, self._is_cooperative = kernel, grid, is_cooperative
        places = list(product(*(range(size) for size in grid)))
        self.random.shuffle(places)
        for self.program in places:
            program()
        self._finish()

    def run_partitions(
        self, functions: Sequence[tuple[Callable[..., None], Sequence[Any]]]
    ) -> None:
        """All functions to their ends, in turns; of a cooperative launch, when all are there."""
        self._started += [
            Partition(
                i, self.program, function, arguments, self._give_back, self.random.choice(SPEEDS)
            )
            for i, (function, arguments) in enumerate(functions)
        ]
        if not self._is_cooperative:
            self._finish()

    def _finish(self) -> None:
        partitions, self._started = self._started, []
        self._copies.clear()
        for partition in partitions:
            partition.start()
        try:
            while alive := [x for x in partitions if not x.is_done]:
                self._give_turn(alive)
            if self._copies:
                raise Fault(f"{self.kernel} ends with {len(self._copies)} copies in flight")
        finally:
            self._running = None
            for partition in partitions:
                partition.abandon()

    def look(self, place: Hashable, read: Callable[[], int]) -> None:
        """The running partition looks at memory for what another one will store there."""
        partition = self._partition()
        if partition.seen is not None and partition.seen[0] != place:
            partition.seen = None
        partition.looks = True
        partition.pause()
        partition.looks = False
        partition.seen = place, read, read()

    def pause(self) -> None:
        """The running partition lets others take turns."""
        partition = self._partition()
        partition.seen = None
        partition.pause()

    def may_pause(self) -> None:
        """As :meth:`pause`, now and then: a change of threads takes longer than most steps."""
        if self.random.random() < 0.25:
            self.pause()

    def wait(self, barrier: Barrier, phase: int) -> None:
        """The running partition has no turn before the phase of that parity has ended."""
        partition = self._partition()
        partition.waits_for, partition.seen = (barrier, phase), None
        partition.pause()
        partition.waits_for = None

    def count_product(self) -> int:
        """The running partition starts a product; returns its number."""
        partition = self._partition()
        partition.products += 1
        return partition.products

    def num_products(self) -> int:
        """That the running partition has started."""
        return self._partition().products

    def start_copy(
        self, read: Callable[[], torch.Tensor], target: torch.Tensor, barrier: Barrier
    ) -> None:
        """The target is not to be read from now on; what it gets is read when the copy arrives."""
        poison(target)
        self.copied[self.kernel] += 1
        self._copies.append(Copy(read, target, barrier, self.random.choice(SPEEDS)))
        self.may_pause()

    def _partition(self) -> Partition:
        if self._running is None:
            raise NotImplementedError("barriers, copies and products outside warp_specialize")
        return self._running

    def _give_turn(self, partitions: list[Partition]) -> None:
        able = [*self._copies, *(x for x in partitions if x.is_ready())]
        if not able or self._looks > PATIENCE * len(partitions):
            raise Fault(self._describe_deadlock(partitions))
        # A look that sees what it saw takes as long as a step: only where nobody else can go on.
        able = [x for x in able if isinstance(x, Copy) or not x.would_see_the_same()] or able
        [chosen] = self.random.choices(able, [x.speed for x in able])
        self._looks += 1
        if isinstance(chosen, Copy):
            self._looks = 0
            self._copies.remove(chosen)
            chosen.arrive()
            return
        self._running, self.program = chosen, chosen.program
        chosen.resume()
        if not chosen.looks:
            self._looks = 0
        if chosen.error is not None:
            raise chosen.error

    def _describe_deadlock(self, partitions: list[Partition]) -> str:
        waits = []
        for partition in partitions:
            if partition.waits_for is None:
                waits.append(f"{partition.name} looks at memory")
            else:
                barrier, phase = partition.waits_for
                waits.append(f"{partition.name} waits for the end of phase {phase} of {barrier}")
        return f"deadlock in program {self.program} of {self.kernel}: {'; '.join(waits)}"
