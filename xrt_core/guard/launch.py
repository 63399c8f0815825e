"""GuardedLaunch: one cluster at run time under guard. Who answers a call is one attribute, swapped as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from xrt_core.engine.contract import Executable, Function
from xrt_core.events import Kind
from xrt_core.guard.background import in_background
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.record import ClusterRecord, State
from xrt_core.guard.timeouts import TooLong, Watched
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.launch import Launch, WrongResults, misfit

HostRun = Callable[[Sequence[Any]], Sequence[Any]]
Arrays = Sequence[Any]


class Keeper(Protocol):
    """What a launch needs of its guard."""

    settings: GuardSettings

    def knows(self, launch: GuardedLaunch) -> bool:
        """Whether it was examined before, and loading it is worth a moment before the first answer."""

    def begin(self, launch: GuardedLaunch, arrays: Arrays | None, at_once: bool = False) -> None:
        """Have the cluster compiled and examined: beside the caller, or before this returns."""

    def fell_back(
        self, launch: GuardedLaunch, stage: str, kind: Kind, message: str, log: str = "", exit_code: int | None = None
    ) -> None:
        """Note that the host stands in."""

    def compare(self, launch: GuardedLaunch, inputs: Arrays, results: Arrays, expected: Arrays) -> str:
        """What is wrong with an executable's results on `inputs`, beside the host's; "" for nothing."""


class GuardedLaunch(Launch):
    """A Launch whose executable has to earn its place.

    Until it is LIVE the host answers. Then it is on probation for some calls: every result is held against what was
    promised, and inputs that it may overwrite are copied first, so that a failure loses nothing. After that a call
    costs a try block, a look at the shapes and a counter more than the executable itself.
    """

    __slots__ = ("__weakref__", "_call", "_donated", "_keeper", "_passed", "_watched", "record", "shares_cores")

    def __init__(
        self, function: Function, engine: str, host: Callable[[], HostRun], keeper: Keeper, record: ClusterRecord
    ) -> None:
        super().__init__(function, engine, None, host)
        self.record = record
        self.shares_cores = False
        self._keeper = keeper
        self._donated = tuple(a.input for a in function.aliases)
        self._passed = 0
        seconds = keeper.settings.run_timeout
        self._watched: Watched[Any] | None = Watched(seconds) if seconds > 0 else None
        self._call: HostRun = self._waiting

    def __call__(self, arrays: Arrays) -> Arrays:
        return self._call(arrays if self.enter is None else self.enter(arrays))

    @property
    def trouble(self) -> str:
        """What keeps the cluster on the host, or happened to it, for people; "" for nothing."""
        record = self.record
        if record.state in (State.FAILED, State.REJECTED):
            return f"{record.state.value}, the host runs it: {record.reason}"
        if record.faults:
            last = record.faults[-1]
            return f"failed at {last.stage} before: {last.message}"
        return ""

    # --- changes ---------------------------------------------------------------------------------------------------

    def go_live(self, executable: Executable, reason: str) -> None:
        """Let an executable answer from now on. Raises InternalError unless the state is READY."""
        self._passed = 0
        self.record.failures = 0
        self.executable = executable
        self.record.move(State.LIVE, reason)
        self._call = self._shadowed(self._on_probation)

    def retire(self, state: State, reason: str) -> bool:
        """Let the host answer from now on. Whether it was live: of several threads the first one retires it."""
        with self._lock:  # of `_end_probation`, which must not come in between
            if not self.record.move_from(State.LIVE, state, reason):
                return False
            self._call = self._waiting
            self.executable = None
            return True

    # --- who answers ---------------------------------------------------------------------------------------------

    def _waiting(self, arrays: Arrays) -> Arrays:
        record, keeper = self.record, self._keeper
        due = record.state is State.QUEUED or (record.state is State.FAILED and time.monotonic() >= record.retry_at)
        knows = record.calls == 0 and not in_background() and keeper.knows  # a rehearsal waits for nothing
        if due and (not keeper.settings.asynchronous or (knows and knows(self))):
            keeper.begin(self, arrays, at_once=True)
            if record.state is State.LIVE:
                return self._call(arrays)
        record.calls += 1
        results = self._from_host(arrays)
        if due and keeper.settings.asynchronous:  # afterwards: the first result comes as soon as the host has it
            keeper.begin(self, arrays)
        return results

    def _from_host(self, arrays: Arrays) -> Arrays:
        self.record.host_calls += 1
        start = time.perf_counter()
        results = self.on_host(arrays)
        self.record.host_seconds.append(time.perf_counter() - start)
        return results

    def _on_probation(self, arrays: Arrays) -> Arrays:
        record = self.record
        executable = self.executable
        if executable is None:  # another thread has just retired it
            return self._waiting(arrays)
        record.calls += 1
        kept = list(arrays)
        for i in self._donated:
            kept[i] = np.array(to_numpy(arrays[i]))
        start = time.perf_counter()
        try:
            results = self._execute(executable, arrays)
            self._check(results)
        except Exception as e:
            return self._fall_back(executable, kept, e)
        record.engine_seconds.append(time.perf_counter() - start)
        self._passed += 1
        if self._passed >= self._keeper.settings.probation:
            self._end_probation(executable)
        return results

    def _end_probation(self, executable: Executable) -> None:
        with self._lock:
            if self.record.state is State.LIVE and self.executable is executable:
                self._call = self._shadowed(self._live(executable))

    def _live(self, executable: Executable) -> HostRun:
        record, returns = self.record, self.function.returns
        shapes, count = tuple(p.shape for p in returns), len(returns)
        watched, execute = self._watched, executable.run
        run: HostRun = execute if watched is None else lambda arrays: watched(execute, arrays)

        def call(arrays: Arrays) -> Arrays:
            record.calls += 1
            try:
                results = run(arrays)
                if len(results) != count:
                    self._check(results)
                for r, shape in zip(results, shapes):  # noqa: B905 - their number has just been looked at
                    if r.shape != shape:
                        self._check(results)
                return results
            except Exception as e:
                return self._fall_back(executable, arrays, e)

        return call

    def _shadowed(self, call: HostRun) -> HostRun:
        """`call`, but where the settings say so the host runs every so many times too, on copies, and must agree."""
        record, every = self.record, self._keeper.settings.shadow
        if every <= 0:
            return call

        def shadowed(arrays: Arrays) -> Arrays:
            if record.calls % every != every - 1:
                return call(arrays)
            kept = [np.array(to_numpy(a)) for a in arrays]
            results = call(arrays)
            record.shadow_runs += 1
            expected = self.on_host(kept)
            fault = self._keeper.compare(self, kept, results, expected)
            if not fault:
                return results
            self._keeper.fell_back(self, "shadow", "wrong numbers", fault)
            self.retire(State.REJECTED, f"wrong: a shadow run disagreed: {fault}")
            return expected

        return shadowed

    # --- failures ------------------------------------------------------------------------------------------------

    def _execute(self, executable: Executable, arrays: Arrays) -> Arrays:
        if self._watched is None:
            return executable.run(arrays)
        return self._watched(executable.run, arrays)  # type: ignore[no-any-return]

    def _check(self, results: Any) -> None:
        fault = misfit(results, self.function)
        if fault:
            raise WrongResults(fault, self.function.returns, results)

    def _fall_back(self, executable: Executable, arrays: Arrays, error: Exception) -> Arrays:
        """The host's results for a call in which an executable failed."""
        arrays = [to_numpy(a) for a in arrays]  # an InputError, where it is the caller's array that is unusable
        kind: Kind = "hung" if isinstance(error, TooLong) else "raised"
        if isinstance(error, WrongResults):
            kind = error.kind
        message = str(error) if kind != "raised" else f"{type(error).__name__}: {error}"
        self.error = error
        with self._lock:
            self.record.failures += 1
            failures = self.record.failures
        self._keeper.fell_back(self, "run", kind, message)
        if self.executable is executable and (kind == "hung" or failures >= self._keeper.settings.failures):
            times = "it hung" if kind == "hung" else f"it failed {failures} times at run time"
            if self.retire(State.FAILED, f"{times}, the last time: {message}"):
                self.record.postpone(self._keeper.settings.retry)
        return self._from_host(arrays)
