"""Lane scheduler: independent launches of a plan on different engines or devices run concurrently.

A lane is an engine on a device. Launches of one lane run sequentially, in the order of the plan; launches of different
lanes run concurrently, on threads of a process-wide pool. Host steps run on the calling thread, which also does all
bookkeeping: a pool thread only calls a launch. Calls for parts of a batch are shared with that pool as well (`shared`).
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from xrt_core.engine.forking import in_forked_process
from xrt_core.ir.graph import Graph, Node

Execute = Callable[[list[Any]], None]
"""Runs all steps over the registers of one run."""

T = TypeVar("T")

_MAX_THREADS: Final = max(4, 2 * (os.cpu_count() or 1))


class Step(NamedTuple):
    """One step: `call` reads the registers `inputs`, its results are stored in `outputs` (-1: unused), and the
    registers `dead` are cleared after it. lane: the engine and device of a launch, "" for a host step. node: that it
    computes, None for what is no node's. memory: the bytes of the run's own arrays while it runs, as far as known."""

    call: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    label: str
    lane: str = ""
    node: Node | None = None
    memory: int = 0


def independent_lanes(graph: Graph, lane: Callable[[Node], str]) -> frozenset[str]:
    """Return the lanes that can overlap: those with launches of which neither depends on the other's.

    lane: node -> its lane, "" for host nodes.
    Linear in nodes and edges, times launches / 64.
    """
    lanes = [lane(n) for n in graph.nodes]
    launches = [i for i, x in enumerate(lanes) if x]
    if len({lanes[i] for i in launches}) < 2:
        return frozenset()
    bit = {i: 1 << k for k, i in enumerate(launches)}
    of_lane: dict[str, int] = {}
    for i in launches:
        of_lane[lanes[i]] = of_lane.get(lanes[i], 0) | bit[i]
    before = _reached(graph.predecessors, bit, range(len(lanes)))
    behind = _reached(graph.successors, bit, range(len(lanes) - 1, -1, -1))
    everything = (1 << len(launches)) - 1
    return frozenset(lanes[i] for i in launches if everything & ~(of_lane[lanes[i]] | before[i] | behind[i]))


def _reached(neighbours: Sequence[Sequence[int]], bit: dict[int, int], order: Sequence[int]) -> list[int]:
    """Return per node a bit set of the launches reachable along `neighbours`; `order` is topological for these."""
    found = [0] * len(neighbours)
    for i in order:
        mask = 0
        for j in neighbours[i]:
            mask |= found[j] | bit.get(j, 0)
        found[i] = mask
    return found


class LaneScheduler:
    """Executes steps, launches of different lanes concurrently.

    Results and exceptions are those of sequential execution: when a step fails, later steps of the plan that have not
    started are cancelled, earlier ones still run, and the exception of the earliest failing step is raised. An
    interrupt cancels steps that have not started, waits for running ones, and is raised.

    alone: indices of steps that write into their inputs; each is a barrier for all steps before and after it.
    """

    def __init__(self, steps: Sequence[Step], kept: Sequence[int], alone: Sequence[int]) -> None:
        self.steps = tuple(steps)
        made = {r: i for i, s in enumerate(steps) for r in s.outputs if r >= 0}
        needs = [{made[r] for r in s.inputs if r in made} for s in steps]
        barrier, since = -1, 0
        barriers = frozenset(alone)
        for i in range(len(steps)):
            if i in barriers:
                needs[i].update(range(since, i))
                barrier, since = i, i
            elif barrier >= 0:
                needs[i].add(barrier)
        self.waiting = [len(n) for n in needs]
        self.after: list[list[int]] = [[] for _ in steps]
        for i, found in enumerate(needs):
            for n in found:
                self.after[n].append(i)
        self.uses: dict[int, int] = {}
        for s in steps:
            for r in {*s.inputs, *(o for o in s.outputs if o >= 0)}:
                self.uses[r] = self.uses.get(r, 0) + 1  # the producer counts, so that an unread result is freed at once
        for r in kept:
            self.uses[r] = self.uses.get(r, 0) + 1

    def __call__(self, registers: list[Any], steps: Sequence[Step] | None = None) -> None:
        """Run all steps over these registers. steps: replacements with the same structure (for `timed`)."""
        _Run(self, registers, self.steps if steps is None else steps).run()


class _Run:
    def __init__(self, program: LaneScheduler, registers: list[Any], steps: Sequence[Step]) -> None:
        self.program, self.registers, self.steps = program, registers, steps
        self.waiting, self.uses = program.waiting.copy(), program.uses.copy()
        self.host: list[int] = []  # heaps of ready steps
        self.lanes: dict[str, list[int]] = {}
        self.busy: set[str] = set()
        self.done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self.begun, self.ended = 0, list[int]()  # launches on other threads
        self.limit = len(steps)  # the first step that failed: later ones are not started
        self.error: BaseException | None = None
        for i, n in enumerate(self.waiting):
            if not n:
                self.ready(i)

    def run(self) -> None:
        try:
            while self.begin_launches() or self.host or self.busy:
                if self.host:
                    self.on_this_thread(heappop(self.host))
                    while not self.done.empty():
                        self.take()
                elif self.busy:
                    self.take()
        except BaseException:
            self.limit = -1
            self.wait_for_launches()
            raise
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and the registers with it

    def wait_for_launches(self) -> None:
        """Block until no launch is in flight: launches read the caller's arrays."""
        while len(self.ended) < self.begun:  # an interrupt may occur between taking a result and counting it
            with contextlib.suppress(Empty):
                self.done.get(timeout=0.05)

    def ready(self, i: int) -> None:
        lane = self.steps[i].lane
        heappush(self.lanes.setdefault(lane, []) if lane else self.host, i)

    def begin_launches(self) -> bool:
        """Start every ready launch whose lane is free. Returns whether a launch ran to completion on this thread."""
        while self.host and self.host[0] >= self.limit:
            heappop(self.host)
        free = []
        for lane, heap in self.lanes.items():
            while heap and heap[0] >= self.limit:
                heappop(heap)
            if heap and lane not in self.busy:
                free.append(heap)
        if len(free) == 1 and not self.busy and not self.host:  # nothing else to do: run it on this thread
            self.on_this_thread(heappop(free[0]))
            return True
        for heap in free:
            i = heappop(heap)
            arrays = [self.registers[r] for r in self.steps[i].inputs]
            pool.submit(contextvars.copy_context().run, self.launch, i, arrays)
            self.begun += 1
            self.busy.add(self.steps[i].lane)
        return False

    def launch(self, i: int, arrays: list[Any]) -> None:
        """On a pool thread: run one launch, unless it has been cancelled."""
        results, error = None, None
        if i < self.limit:
            try:
                results = self.steps[i].call(arrays)
            except BaseException as e:
                error = e
        arrays.clear()
        self.ended.append(i)
        self.done.put((i, results, error))
        del results, error

    def on_this_thread(self, i: int) -> None:
        s = self.steps[i]
        arrays = [self.registers[r] for r in s.inputs]
        # a step overwrites an array only if it sees no other reference; steps yet to read it must hold one
        others = arrays.copy() if any(self.uses[r] > 1 for r in s.inputs) else None
        try:
            results = s.call(arrays)
        except Exception as e:
            self.failed(i, e)
            return
        del others, arrays
        self.finish(i, results)

    def take(self) -> None:
        """Block until a launch ends, and store its results."""
        i, results, error = self.done.get()
        self.busy.discard(self.steps[i].lane)
        if error is not None:
            self.failed(i, error)
        elif results is not None:
            self.finish(i, results)

    def failed(self, i: int, error: BaseException) -> None:
        if i < self.limit:
            self.limit, self.error = i, error

    def finish(self, i: int, results: Sequence[Any]) -> None:
        s, registers, uses = self.steps[i], self.registers, self.uses
        for r, result in zip(s.outputs, results, strict=False):
            if r >= 0:
                registers[r] = result
        for r in {*s.inputs, *(o for o in s.outputs if o >= 0)}:
            uses[r] -= 1
            if not uses[r]:
                registers[r] = None
        for j in self.program.after[i]:
            self.waiting[j] -= 1
            if not self.waiting[j]:
                self.ready(j)


class _Pool:
    """A pool of daemon threads, created on demand and kept. Tasks must not wait for one another, but for those of
    `shared`, of which there is one at a time."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0  # waiting threads minus queued tasks

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run `function(*arguments)`, which must not raise, on a thread of the pool."""
        with self._lock:
            if self._idle <= 0 and self._threads < _MAX_THREADS:
                threading.Thread(target=self._work, name=f"xrt-{self._threads}", daemon=True).start()
                self._threads += 1
            self._idle -= 1
        self._tasks.put((function, *arguments))

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            function, *arguments = self._tasks.get()
            function(*arguments)
            del function, arguments  # they hold arrays


pool = _Pool()
_beside = threading.Lock()
"""Held while calls are shared with a thread of the pool: one at a time, as other callers have threads of their own."""


def shared(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of calls that do not depend on one another, by this thread and by one of the pool.

    When a call fails, others that have not started are left out, and the error of the first that failed is raised; an
    interrupt before any. No call is running any more when this returns or raises.
    """
    if len(calls) < 2 or not _beside.acquire(blocking=False):
        return [call() for call in calls]
    left, ended = deque(enumerate(calls)), threading.Event()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            try:
                i, call = left.popleft()
            except IndexError:
                return
            try:
                results[i] = call()
            except BaseException as e:
                errors[i] = e
                left.clear()

    def work_beside() -> None:
        try:
            work()
        finally:
            ended.set()

    try:
        pool.submit(contextvars.copy_context().run, work_beside)
        try:
            work()
        finally:
            left.clear()
            while not ended.is_set():
                try:
                    ended.wait()
                except BaseException as e:  # an interrupt, which waits for calls that read the caller's arrays
                    errors[-1] = e
    finally:
        _beside.release()
    if errors:
        error = errors.pop(min(errors, key=lambda i: (isinstance(errors[i], Exception), i)))
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and the arrays with it
    return [results[i] for i in range(len(calls))]


def _new_pool() -> None:
    global pool, _beside
    pool, _beside = _Pool(), threading.Lock()


in_forked_process(_new_pool)
