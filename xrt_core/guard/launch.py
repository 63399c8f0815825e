"""GuardedLaunch: one cluster at run time under guard. What answers a call is one attribute, swapped atomically."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from xrt_core.engine.boundary import direct
from xrt_core.engine.contract import Executable, Function, Tolerance
from xrt_core.errors import ExecutionError, InputError, XRTError
from xrt_core.events import Kind
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.record import ClusterRecord, FailureRecord, FailureSink, State
from xrt_core.guard.timeouts import CallTimeout, TimedCaller
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.launch import FailurePolicy, Launch, WrongResults, engine_failure
from xrt_core.verify.checker import ResultChecker

HostRun = Callable[[Sequence[Any]], Sequence[Any]]
Arrays = Sequence[Any]


class GuardedLaunch(Launch):
    """A Launch that the host answers until its executable was verified.

    Until the record's state is LIVE the host answers. Then the executable is on probation for some calls: inputs that
    it may overwrite are copied first, so that a failure loses nothing. Every call is checked as any launch is
    (`LaunchCheck`); with a time limit, the check runs within it.

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
        policy = FailurePolicy(settings.failures)
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
            results = self._checked_run(executable, arrays)
        except BaseException as e:
            failure, kind = _failure_of(e, self.engine)
            results = None
        if results is None:
            return self._fall_back(executable, kept, failure, kind)
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
        record, check, execute, timed = self.record, self._check, direct(executable), self._timed

        def run(arrays: Arrays) -> Arrays:
            return check.results(execute.run(check.inputs(arrays)))

        limited: HostRun = run if timed is None else partial(timed, run)

        def call(arrays: Arrays) -> Arrays:
            record.calls += 1
            try:
                return limited(arrays)
            except BaseException as e:
                failure, kind = _failure_of(e, self.engine)
            return self._fall_back(executable, arrays, failure, kind)

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

    def _checked_run(self, executable: Executable, arrays: Arrays) -> Arrays:
        if self._timed is None:
            return self._check.results(executable.run(self._check.inputs(arrays)))
        return self._timed(lambda: self._check.results(executable.run(self._check.inputs(arrays))))  # type: ignore[no-any-return]

    def _fall_back(self, executable: Executable, arrays: Arrays, error: XRTError, kind: Kind) -> Arrays:
        """The host's results for a call in which the executable failed. It counts if there are any, or if it hung."""
        if kind == "hung":
            self._count(executable, error, kind)
            return self._from_host(arrays)
        try:
            results = self._from_host(arrays)
        except InputError:
            if not self.function.aliases:
                raise
        else:
            self._count(executable, error, kind)
            return results
        raise error

    def _count(self, executable: Executable, error: XRTError, kind: Kind) -> None:
        self.calls = self.record.calls
        gives_up = self.count_failure(error) or kind == "hung"
        self.record.failures = self.failures
        self._record_failure("run", kind, str(error))
        if gives_up and self.executable is executable:
            times = "it hung" if kind == "hung" else f"it failed {self.failures} times at run time"
            if self.retire(State.FAILED, f"{times}, the last time: {error}"):
                self.record.postpone(self._settings.retry)

    def _record_failure(self, stage: str, kind: Kind, message: str) -> None:
        self._failures.record_failure(self.record, self.function, FailureRecord(stage, kind, message))


def _failure_of(error: BaseException, engine: str) -> tuple[XRTError, Kind]:
    """The failure of a run and its kind; raises `error` itself where it comes from the program."""
    if isinstance(error, CallTimeout):
        return ExecutionError(str(error)), "hung"
    failure = engine_failure(error, engine)
    return failure, failure.kind if isinstance(failure, WrongResults) else "raised"
