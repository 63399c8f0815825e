"""StressTest: what single runs do not show of an executable that was found right.

It runs many times with all results held (a ring of reused buffers), on two threads at once, and, in a process of its
own, under watch: what grows with every run is a leak, and what changes of the process's state is reported. What would
harm the program around it rejects it; one that is wrong on two threads only is serialised (`SerialExecutable`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import thread as executors
from typing import Any, Final

import numpy as np

from xrt_core.engine.boundary import Aspect, State, changed, restore, snapshot
from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions, Tolerance
from xrt_core.engine.interpreter_turns import shorter_turns
from xrt_core.events import Event, subscribe
from xrt_core.guard.worker_pool import own_memory
from xrt_core.verify.checker import Check, ResultChecker, same_bytes
from xrt_core.verify.evaluate import Candidate, StressResult

HELD: Final = 18
"""Runs whose results are all held: more than a ring of 16 buffers has."""
ROUNDS: Final = 8
"""Times that two threads begin a run together."""
BATCHES: Final = 4
"""Batches of runs, in each of which a leak grows."""
SECONDS: Final = 0.05
"""Time that the runs may take, or `_HOST_RUNS` runs of the host if that is longer."""
BYTES: Final = 1 << 28
"""Of results, that are held at a time."""

_HOST_RUNS: Final = 0.75
_BATCH: Final = 4  # runs of a batch at least, and
_BATCH_SECONDS: Final = 2e-3  # seconds for more of them
_MOST_RUNS: Final = 256
_PARTS: Final = (0.45, 0.25)  # of the time, for the runs with held results and those on two threads
_LEAST: Final[Mapping[str, int]] = {"memory": 64 << 10, "open files": 1, "threads": 1, "child processes": 1}
"""What a batch adds at least to what leaks: memory comes in pages, and in arenas of an allocator."""
_CONFIRMATIONS: Final = 2
_GRACE: Final = 0.2  # seconds in which a thread that was started may end
_SWITCH: Final = 1e-5  # seconds after which a thread yields to the other
SIDE_EFFECT: Final = "side effect: "
"""The beginning of a reason that is about the process around the executable."""

_NO_DONATION: Final = RunOptions(donate=False)


class StressTest:
    """The stress test of the candidates of one function, called as `verify.evaluate.Stress`.

    owns_process: nothing else runs in this process, so that what changes in it comes from the candidate.
    """

    def __init__(self, owns_process: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._owns_process = owns_process
        self._clock = clock
        self._children = _children()
        self._before: tuple[State, set[threading.Thread]] | None = None

    @contextlib.contextmanager
    def compiling(self, candidate: str) -> Iterator[None]:
        """Watch what a compilation changes in the process, for the candidate's test."""
        with watched(_engine(candidate), "when it compiled") if self._owns_process else contextlib.nullcontext():
            yield
        self._before = (snapshot(), set(threading.enumerate())) if self._owns_process else None

    def __call__(
        self, candidate: Candidate, executable: Executable, checkers: Sequence[ResultChecker], seconds: float
    ) -> StressResult:
        """See `verify.evaluate.Stress`."""
        name = _engine(candidate.engine)
        test = _Runs(executable, checkers, candidate.tolerance, seconds, self._clock)
        if not self._owns_process:
            reason = test.held()
            return StressResult(reason) if reason else StressResult(serialised=not test.is_right_on_threads())
        serialised = False
        with watched(name, "when it ran", ("always", "run"), self._before):  # the runs before this test as well
            reason = test.held()
            if not reason:
                serialised = not test.is_right_on_threads()
                reason = test.held() if serialised else ""
            if not reason:
                reason = test.leaks()
        if new := _children() - self._children:
            _note(name, f"it started {len(new)} processes that stay")
        reason = reason or _harmful.get(name, "")
        return StressResult(reason, serialised, tuple(_notes.get(name, ())))


@contextlib.contextmanager
def watched(
    engine: str,
    when: str,
    harmful: Collection[str] = ("always",),
    begin: tuple[State, Collection[threading.Thread]] | None = None,
) -> Iterator[None]:
    """Note what changes in the process, and restore it. when: for messages. harmful: values of `Aspect.rejects` that
    reject the engine. begin: the state and the threads of before, if not those of now."""
    before, threads = (snapshot(), threading.enumerate()) if begin is None else begin

    def listen(event: Event) -> None:
        if event.name == "state.restored":
            _note(engine, f"it changed {event.fields['changed']} {when}, which was restored")

    undo = subscribe(listen)
    try:
        yield
    finally:
        undo()
        after = snapshot()
        found = changed(before, after)
        for a in found:
            text = f"it changed {a.name}{_which(a, before, after)} {when}"
            if a.rejects in harmful:
                _harmful.setdefault(engine, SIDE_EFFECT + text)
            _note(engine, text)
        restore(found, before)
        _find_lasting_threads(engine, threads, when)


def _find_lasting_threads(engine: str, before: Collection[threading.Thread], when: str) -> None:
    """Find threads that the program would wait for before it ends."""
    until = time.monotonic() + _GRACE
    while lasting := [t for t in threading.enumerate() if t not in before and _is_waited_for(t)]:
        if time.monotonic() > until:
            names = ", ".join(repr(t.name[:50]) for t in lasting[:3])
            reason = f"{SIDE_EFFECT}it started threads that keep the program from ending {when}: {names}"
            _harmful.setdefault(engine, reason)
            return
        time.sleep(_GRACE / 20)


def harm_of(engine: str) -> str:
    """What rejects an engine, of all that it has changed in this process so far; "" for nothing."""
    return _harmful.get(engine, "")


def _note(engine: str, note: str) -> None:
    _notes.setdefault(engine, {})[note] = None


class _Runs:
    """The runs of one executable. seconds: of its fastest run so far, until `held` knows the mean."""

    def __init__(
        self,
        executable: Executable,
        checkers: Sequence[ResultChecker],
        tolerance: Mapping[str, Tolerance],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._executable = executable
        self._cases = [_Case(c, tolerance) for c in checkers]
        self._clock = clock
        self._budget = max(SECONDS, _HOST_RUNS * checkers[0].host_seconds)
        self._end = clock() + self._budget
        self._seconds = seconds
        self._bytes = max(1, sum(r.nbytes for r in checkers[0].expected()))

    def held(self) -> str:
        """What is wrong with results of `HELD` runs, or of as many as the time allows, that are all held."""
        runs: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        until, spent = self._clock() + _PARTS[0] * self._budget, 0.0
        for k in range(min(HELD, BYTES // (2 * self._bytes))):
            if self._clock() + (self._seconds if math.isfinite(self._seconds) else 0.0) > until:
                break
            case = self._cases[k % len(self._cases)]
            start = self._clock()
            reason, results = case.checker.run(self._executable)
            spent += self._clock() - start
            self._seconds = spent / (k + 1)
            reason = reason or case.judge(results)
            if reason:
                return f"run {k + 1} in a row: {reason}"
            runs.append((results, [r.copy() for r in results]))
        returns = self._cases[0].checker.function.returns
        for k, (results, copies) in enumerate(runs):
            for p, r, copy in zip(returns, results, copies, strict=True):
                if not same_bytes(r, copy):
                    return f"result {p.name!r} of run {k + 1} changed during {len(runs) - k - 1} later runs"
        if _share_memory([r for results, _ in runs for r in results]):
            return f"among {len(runs)} runs, results share the memory of an earlier run's results"
        return ""

    def is_right_on_threads(self) -> bool:
        """Whether runs that two threads begin together are right. They have different inputs, where there are two sets.

        At least once, unless a run takes longer than the whole test may. Where threads share the cores, a round takes
        as long as two runs.
        """
        affordable = _PARTS[1] * self._budget / max(2 * self._seconds, 1e-9)
        if affordable < 1 and self._seconds < self._budget:
            affordable = 1
        rounds = int(min(ROUNDS, affordable, BYTES / (2 * self._bytes)))
        found: list[list[tuple[_Case, str, list[np.ndarray]]]] = [[], []]
        until = self._clock() + _PARTS[1] * self._budget
        is_time = True

        def begin() -> None:
            nonlocal is_time
            is_time = not found[0] or self._clock() < until

        barrier = threading.Barrier(2, begin)

        def serve(number: int) -> None:
            try:
                for k in range(rounds):
                    case = self._cases[(k + number) % len(self._cases)]
                    barrier.wait()
                    if not is_time:
                        return
                    reason, results = case.checker.run(self._executable)
                    found[number].append((case, reason, [r.copy() for r in results]))
            except BaseException:  # of the other thread, or of reading a result
                barrier.abort()

        with shorter_turns(_SWITCH):
            threads = [threading.Thread(target=serve, args=(n,), name="xrt-stress", daemon=True) for n in (0, 1)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        runs = list(itertools.chain(*found))
        return not barrier.broken and not any(reason or case.judge(results) for case, reason, results in runs)

    def leaks(self) -> str:
        """What every batch of runs adds to this process, "" for nothing."""
        affordable = max(self._end - self._clock(), 0.0) / BATCHES / max(self._seconds, 1e-9)
        runs = int(min(affordable, max(_BATCH, _BATCH_SECONDS / max(self._seconds, 1e-9)), _MOST_RUNS))
        found = self._grown(runs) if runs else {}
        for _ in range(_CONFIRMATIONS):
            if not found:
                return ""
            gc.collect()  # what only waits for the collector is no leak
            again = self._grown(2 * runs)
            found = {name: n for name, n in again.items() if name in found}
        if not found:
            return ""
        shown = {"memory": f"{found.get('memory', 0.0) / 1024:.3g} KiB of memory"}
        parts = [shown.get(name, f"{n:.3g} {name}") for name, n in found.items()]
        return f"{SIDE_EFFECT}each run leaks {', '.join(parts)}"

    def _grown(self, runs: int) -> dict[str, float]:
        """What each of some batches added, per run at least."""
        given = [[x.copy() for x in c.checker.inputs] for c in self._cases]
        marks = [_usage()]
        for _ in range(BATCHES):
            for k in range(runs):
                with contextlib.suppress(Exception):
                    self._executable.run(given[k % len(given)], _NO_DONATION)
            marks.append(_usage())
        least = {name: min(b[name] - a[name] for a, b in itertools.pairwise(marks)) for name in marks[0]}
        return {name: n / runs for name, n in least.items() if n >= _LEAST[name]}


class _Case:
    """A set of inputs and what the executable gave for it and was right."""

    def __init__(self, checker: ResultChecker, tolerance: Mapping[str, Tolerance]) -> None:
        self.checker = checker
        self._tolerance = tolerance
        self._right: list[list[np.ndarray]] = []

    def judge(self, results: Sequence[np.ndarray]) -> str:
        """What is wrong with results for these inputs."""
        if any(all(map(same_bytes, results, known)) for known in self._right):
            return ""
        check: Check = self.checker.check_results(results, self._tolerance)
        if not (check.is_right or check.is_doubtful):
            return check.reason
        if len(self._right) < ROUNDS:
            self._right.append([r.copy() for r in results])
        return ""


class SerialExecutable(Executable):
    """An executable whose runs wait for each other, and for those of all others of the same engines."""

    def __init__(self, inner: Executable, engines: Collection[str]) -> None:
        self._inner = inner
        self.tolerance = inner.tolerance
        with _locks_lock:
            self._locks = [_locks.setdefault(e, threading.Lock()) for e in sorted(set(engines))]

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """See `Executable.run`."""
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            return self._inner.run(inputs, run_options, True)

    def serialize(self) -> bytes:
        """See `Executable.serialize`."""
        return self._inner.serialize()

    def as_text(self) -> str:
        """See `Executable.as_text`."""
        return self._inner.as_text()


_harmful: Final[dict[str, str]] = {}
"""Engine -> what it does to a process. What it does when it is loaded happens once, and holds for all that follows."""
_notes: Final[dict[str, dict[str, None]]] = {}
"""Engine -> what else it changes."""
_locks: Final[dict[str, threading.Lock]] = {}
_locks_lock: Final = threading.Lock()


def _engine(candidate: str) -> str:
    """The engine of a candidate, which may be the engine alone."""
    return candidate.removesuffix(" alone")


def _share_memory(arrays: Sequence[np.ndarray]) -> bool:
    """Whether two of the arrays overlap."""
    ends = sorted(np.lib.array_utils.byte_bounds(x) for x in arrays if x.size)
    return any(b[0] < a[1] for a, b in itertools.pairwise(ends))


def _usage() -> dict[str, int]:
    """What this process holds; without what the platform does not tell."""
    found = {"memory": own_memory(os.getpid())}
    with contextlib.suppress(OSError):
        found["open files"] = len(os.listdir("/proc/self/fd"))
        found["threads"] = len(os.listdir("/proc/self/task"))
        found["child processes"] = len(_children())
    return found


def _children() -> set[int]:
    """The processes that this one has started and that exist."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as f:
                found.update(map(int, f.read().split()))
    return found


def _is_waited_for(thread: threading.Thread) -> bool:
    """Whether the interpreter waits for a thread before it ends; executors end theirs."""
    return thread.is_alive() and not thread.daemon and thread not in executors._threads_queues


def _which(aspect: Aspect, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The keys that differ, of an aspect that is a mapping of names."""
    old, new = before[aspect.name], after[aspect.name]
    if not isinstance(old, dict):
        return ""
    keys = [str(k)[:50] for k in {**old, **new} if old.get(k) != new.get(k)]
    return f" ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})"
