"""GuardedLaunch: one cluster at run time under guard. What answers a call is one attribute, swapped atomically."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.engine.contract import Executable, Function, Tolerance
from xrt_core.events import Kind
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.record import ClusterRecord, FailureRecord, FailureSink, State
from xrt_core.guard.timeouts import CallTimeout, TimedCaller
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.launch import FailurePolicy, Launch, WrongResults, misfit
from xrt_core.verify.checker import ResultChecker

HostRun = Callable[[Sequence[Any]], Sequence[Any]]
Arrays = Sequence[Any]


class GuardedLaunch(Launch):
    """A Launch that the host answers until its executable was verified.

    Until the record's state is LIVE the host answers. Then the executable is on probation for some calls: every result
    is checked for count, shapes and dtypes, and inputs that it may overwrite are copied first, so that a failure loses
    nothing. After that a call costs a try block, a look at the shapes and a counter more than the executable itself.

    build: starts the build of this cluster; its last argument says whether the call that needs it still waits for an
    answer. tolerance: that the engine declares, for shadow runs.
    """

    __slots__ = (
        "__weakref__", "_build", "_call", "_donated", "_failures", "_passed", "_settings", "_timed", "record",
        "shares_cores", "tolerance",
    )  # fmt: skip

    def __init__(
        self,
        function: Function,
        engine: str,
        host: Callable[[], HostRun],
        record: ClusterRecord,
        settings: GuardSettings,
        failures: FailureSink,
        build: Callable[[GuardedLaunch, Arrays, bool], None],
    ) -> None:
        policy = FailurePolicy(settings.failures, consecutive=False)
        super().__init__(function, engine, None, host, policy=policy)
        self.record = record
        self.shares_cores = False
        self.tolerance: Mapping[str, Tolerance] = {}
        self._settings = settings
        self._failures = failures
        self._build = build
        self._donated = tuple(a.input for a in function.aliases)
        self._passed = 0
        seconds = settings.run_timeout
        self._timed: TimedCaller[Any] | None = TimedCaller(seconds) if seconds > 0 else None
        self._call: HostRun = self._waiting

    def __call__(self, arrays: Arrays) -> Arrays:
        return self._call(arrays if self.enter is None else self.enter(arrays))

    @property
    def trouble(self) -> str:
        """Why the host runs the cluster, or the last failure, as a message; "" for nothing."""
        record = self.record
        if record.state in (State.FAILED, State.REJECTED):
            return f"{record.state.value}, the host runs it: {record.reason}"
        if record.faults:
            last = record.faults[-1]
            return f"failed at {last.stage} before: {last.message}"
        return ""

    # --- changes of state ------------------------------------------------------------------------------------------

    def go_live(self, executable: Executable, reason: str) -> None:
        """Let an executable answer from now on. Raises InternalError unless the state is READY."""
        self._passed = 0
        self.failures = self.record.failures = 0
        self.executable = executable
        self.record.move(State.LIVE, reason)
        self._call = self._shadowed(self._on_probation)

    def retire(self, state: State, reason: str) -> bool:
        """Let the host answer from now on. Returns whether it was live: of several threads only one retires it."""
        with self._lock:  # not between the steps of `_end_probation`
            if not self.record.move_from(State.LIVE, state, reason):
                return False
            self._call = self._waiting
            self.executable = None
            return True

    # --- calls, by state -------------------------------------------------------------------------------------------

    def _waiting(self, arrays: Arrays) -> Arrays:
        record = self.record
        due = record.state is State.QUEUED or (record.state is State.FAILED and time.monotonic() >= record.retry_at)
        if due:
            self._build(self, arrays, True)
            if record.state is State.LIVE:
                return self._call(arrays)
        record.calls += 1
        results = self._from_host(arrays)
        if due:
            self._build(self, arrays, False)
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
        if executable is None:  # another thread retired it
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
        if self._passed >= self._settings.probation:
            self._end_probation(executable)
        return results

    def _end_probation(self, executable: Executable) -> None:
        with self._lock:
            if self.record.state is State.LIVE and self.executable is executable:
                self._call = self._shadowed(self._live(executable))

    def _live(self, executable: Executable) -> HostRun:
        record, returns = self.record, self.function.returns
        shapes, count = tuple(p.shape for p in returns), len(returns)
        timed, execute = self._timed, executable.run
        run: HostRun = execute if timed is None else lambda arrays: timed(execute, arrays)

        def call(arrays: Arrays) -> Arrays:
            record.calls += 1
            try:
                results = run(arrays)
                if len(results) != count:
                    self._check(results)
                for r, shape in zip(results, shapes):  # noqa: B905 - their number is checked above
                    if r.shape != shape:
                        self._check(results)
                return results
            except Exception as e:
                return self._fall_back(executable, arrays, e)

        return call

    def _shadowed(self, call: HostRun) -> HostRun:
        """`call`; with `guard_shadow=N`, every N-th time the host runs too, on copies, and the results must agree."""
        record, every = self.record, self._settings.shadow
        if every <= 0:
            return call

        def shadowed(arrays: Arrays) -> Arrays:
            if record.calls % every != every - 1:
                return call(arrays)
            kept = [np.array(to_numpy(a)) for a in arrays]
            results = call(arrays)
            record.shadow_runs += 1
            expected = self.on_host(kept)
            checker = ResultChecker(self.function, kept, results=[to_numpy(r) for r in expected])
            check = checker.check_results([to_numpy(r) for r in results], self.tolerance)
            if check.is_right or check.is_doubtful:
                return results
            self._record_failure("shadow", "wrong numbers", check.reason)
            self.retire(State.REJECTED, f"wrong: a shadow run disagreed: {check.reason}")
            return expected

        return shadowed

    # --- failures ------------------------------------------------------------------------------------------------

    def _execute(self, executable: Executable, arrays: Arrays) -> Arrays:
        if self._timed is None:
            return executable.run(arrays)
        return self._timed(executable.run, arrays)  # type: ignore[no-any-return]

    def _check(self, results: Any) -> None:
        fault = misfit(results, self.function)
        if fault:
            raise WrongResults(fault, self.function.returns, results)

    def _fall_back(self, executable: Executable, arrays: Arrays, error: Exception) -> Arrays:
        """The host's results for a call in which the executable failed."""
        arrays = [to_numpy(a) for a in arrays]  # raises InputError if an array of the caller cannot be read
        kind: Kind = "hung" if isinstance(error, CallTimeout) else "raised"
        if isinstance(error, WrongResults):
            kind = error.kind
        message = str(error) if kind != "raised" else f"{type(error).__name__}: {error}"
        gives_up = self.count_failure(error) or kind == "hung"
        self.record.failures = self.failures
        self._record_failure("run", kind, message)
        if gives_up and self.executable is executable:
            times = "it hung" if kind == "hung" else f"it failed {self.failures} times at run time"
            if self.retire(State.FAILED, f"{times}, the last time: {message}"):
                self.record.postpone(self._settings.retry)
        return self._from_host(arrays)

    def _record_failure(self, stage: str, kind: Kind, message: str) -> None:
        self._failures.record_failure(self.record, self.function, FailureRecord(stage, kind, message))
