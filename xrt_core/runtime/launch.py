"""Launch: runs one cluster with its executable, and falls back to the host if the executable fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, Function, RunOptions
from xrt_core.errors import EngineError, ExecutionError
from xrt_core.events import EventLog, Kind, process_events
from xrt_core.runtime.arrays import to_numpy

_SHOWN = 5

HostRun = Callable[[Sequence[Any]], Sequence[Any]]

launch_mode: Final[ContextVar[tuple[RunOptions, bool]]] = ContextVar(
    "xrt_launch_mode", default=(DEFAULT_RUN_OPTIONS, True)
)
"""Launch mode of this call, for launches on a GPU: (RunOptions, whether to block until each is done)."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """When a launch gives its executable up: after `limit` failed runs, in a row if `consecutive`, else in all."""

    limit: int = 3
    consecutive: bool = True


_THREE_IN_A_ROW: Final = FailurePolicy()


class Launch:
    """Runs one Function on its engine; if the engine fails, on the host.

    function, engine: the cluster and the engine's name. executable: None if compilation failed; `error` has the cause.
    host: creates the function that runs the same nodes on the host (called at the first failure).
    policy: after which failures the executable is dropped and the host runs the cluster. error: the last failure.
    enter: converts host arrays to arrays that the engine accepts; None if it accepts host arrays.
    events: the log that receives fallback events.
    """

    __slots__ = (
        "_events", "_host", "_host_run", "_lock", "_policy", "_proven", "engine", "enter", "error", "executable",
        "failures", "function",
    )  # fmt: skip

    def __init__(
        self,
        function: Function,
        engine: str,
        executable: Executable | None,
        host: Callable[[], HostRun],
        error: EngineError | None = None,
        events: EventLog = process_events,
        policy: FailurePolicy = _THREE_IN_A_ROW,
    ) -> None:
        self.function = function
        self.engine = engine
        self.executable = executable
        self.error: Exception | None = error
        self.failures = 0
        self.enter: HostRun | None = None
        self._proven = False  # the last run succeeded, and its results were checked
        self._events = events
        self._policy = policy
        self._host = host
        self._host_run: HostRun | None = None
        self._lock = threading.Lock()

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Run on the arrays of the Function's entry parameters; return the results."""
        executable = self.executable
        if executable is None:
            return self.on_host(arrays)
        try:
            results = executable.run(arrays)
            if not self._proven:
                self._prove(results)
            return results
        except Exception as e:  # any exception of an engine leads to the fallback
            arrays = [to_numpy(a) for a in arrays]  # raises InputError if the array itself is unusable
            self.failed(e)
            return self.on_host(arrays)

    @property
    def trouble(self) -> str:
        """The failures so far, human-readable; "" if there are none."""
        if self.error is None:
            return ""
        if self.executable is None:
            why = "failed while running" if self.failures else "failed to compile"
            return f"{why}, the host runs it: {self.error}"
        return f"failed while running, the host ran it instead: {self.error}"

    def _prove(self, results: Sequence[Any], waited: bool = True) -> None:
        """Check the results' count, dtypes and shapes against the Function's returns. Raises ExecutionError.

        waited: whether the run is known to have completed; if not, earlier failures stay counted.
        """
        fault = misfit(results, self.function)
        if fault:
            raise WrongResults(
                f"engine {self.engine!r}, {self.function.name} ({operators_of(self.function)}): {fault}; "
                "this is a bug of the engine's package",
                self.function.returns,
                results,
            )
        with self._lock:
            if waited or not self.failures:
                self._proven = True
                if self._policy.consecutive:
                    self.failures = 0

    def count_failure(self, error: Exception) -> bool:
        """Note a failed run of the executable. Returns whether the policy gives it up."""
        with self._lock:
            self.error = error
            self.failures += 1
            self._proven = False
            return self.failures >= self._policy.limit

    def failed(self, error: Exception) -> None:
        """Note a failed run, emit its event, and drop the executable if the policy says so."""
        given_up = self.count_failure(error)
        if given_up:
            self.executable = None
        self._events.fallback(
            cluster=self.function.name,
            engine=self.engine,
            stage="run",
            kind=error.kind if isinstance(error, WrongResults) else "raised",
            error=f"{error}{'; the cluster stays on the host' if given_up else ''}",
            failures=self.failures,
        )

    def on_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Run the cluster on the host; return the results."""
        if self._host_run is None:
            with self._lock:
                if self._host_run is None:
                    self._host_run = self._host()
        return self._host_run([to_numpy(a) for a in arrays])


class DeviceLaunch(Launch):
    """A Launch on a GPU.

    asynchronous: whether it may return before its results are computed; it does if `launch_mode` allows it. A failure
    then raises instead of falling back, and the caller reruns all launches in order, because the host must not read
    inputs that are still being computed. A launch that writes into its inputs always blocks.
    """

    __slots__ = ("_updates", "asynchronous")

    def __init__(self, asynchronous: bool, function: Function, *launch: Any) -> None:
        super().__init__(function, *launch)
        self.asynchronous = asynchronous
        self._updates = bool(function.aliases)

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        executable = self.executable
        if executable is None:
            return self.on_host(arrays)
        options, wait = launch_mode.get()
        try:
            if self.enter is not None:
                arrays = self.enter(arrays)
            if not self.asynchronous:
                results = executable.run(arrays)
            else:
                results = executable.run(arrays, options, wait or self._updates)
            if not self._proven:
                self._prove(results, wait or self._updates)
            return results
        except Exception as e:
            if not wait:
                raise
            arrays = [to_numpy(a) for a in arrays]
            self.failed(e)
            return self.on_host(arrays)


def operators_of(function: Function) -> str:
    """Return the operators of a function for a message: distinct, the first few."""
    names = list(dict.fromkeys(n.operator for n in function.body.nodes))
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def misfit(results: Any, function: Function) -> str:
    """Return the mismatch between an executable's results and the Function's returns, or ""."""
    returns = function.returns
    try:
        count = len(results)
    except TypeError:
        return f"the executable returned a {type(results).__name__}, expected a sequence of {len(returns)} results"
    if count != len(returns):
        return f"the executable returned {count} results, expected {len(returns)}"
    for i, (r, p) in enumerate(zip(results, returns, strict=True)):
        dtype, shape = getattr(r, "dtype", None), getattr(r, "shape", None)
        if dtype is None or shape is None:
            return f"result {i} ({p.name!r}) is a {type(r).__name__}, expected an array {p.type}"
        # arrays of other libraries may have no NumPy dtype; for these only the shape is checked
        if tuple(shape) != p.shape or (isinstance(dtype, np.dtype) and dtype != p.dtype):
            return f"result {i} ({p.name!r}) is {dtype}{list(shape)}, expected {p.type}"
    return ""


class WrongResults(ExecutionError):
    """The results of an executable do not match the Function's returns. kind: the kind of mismatch."""

    def __init__(self, fault: str, returns: Sequence[Any], results: Any) -> None:
        super().__init__(fault)
        self.kind: Kind = _kind_of(returns, results)


def _kind_of(returns: Sequence[Any], results: Any) -> Kind:
    try:
        if len(results) != len(returns):
            return "wrong count"
        if any(tuple(r.shape) != p.shape for r, p in zip(results, returns, strict=True)):
            return "wrong shape"
    except (TypeError, AttributeError):
        return "wrong count"
    return "wrong dtype"
