"""Launch: one cluster at run time, its executable and the host behind it."""

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

launch_mode: Final[ContextVar[tuple[RunOptions, bool]]] = ContextVar("xrt_how", default=(DEFAULT_RUN_OPTIONS, True))
"""How launches on a GPU run in this call: the options, and whether each is waited for."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """When a launch gives its executable up: after `limit` failed runs, in a row if `consecutive`, else in all."""

    limit: int = 3
    consecutive: bool = True


_THREE_IN_A_ROW: Final = FailurePolicy()


class Launch:
    """Runs one Function on its engine; where the engine fails, on the host, so that the caller gets a result.

    function, engine: what runs where. executable: None when compilation failed, `error` then says why.
    host: makes the function that runs the same nodes on the host (called at the first failure).
    policy: after which failures the executable is given up and the host keeps the cluster. error: the last failure.
    enter: what makes arrays that the engine takes of the host's; None where it takes them as they are.
    events: who is told of failures.
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
        self._proven = False  # the last run succeeded, and its results were looked at
        self._events = events
        self._policy = policy
        self._host = host
        self._host_run: HostRun | None = None
        self._lock = threading.Lock()

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Results for the arrays of the Function's entry parameters."""
        executable = self.executable
        if executable is None:
            return self.on_host(arrays)
        try:
            results = executable.run(arrays)
            if not self._proven:
                self._prove(results)
            return results
        except Exception as e:  # whatever an engine raises must not reach a caller who has a host to fall back on
            arrays = [to_numpy(a) for a in arrays]  # an InputError, where it is the caller's array that is unusable
            self.failed(e)
            return self.on_host(arrays)

    @property
    def trouble(self) -> str:
        """What went wrong so far, for people; "" for nothing."""
        if self.error is None:
            return ""
        if self.executable is None:
            why = "failed while running" if self.failures else "failed to compile"
            return f"{why}, the host runs it: {self.error}"
        return f"failed while running, the host stood in: {self.error}"

    def _prove(self, results: Sequence[Any], waited: bool = True) -> None:
        """Hold the first results against what was promised. Raises ExecutionError where they differ.

        waited: whether the run is known to have succeeded. One that is not leaves failures before it as they are.
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
            error=f"{error}{'; the host keeps the cluster' if given_up else ''}",
            failures=self.failures,
        )

    def on_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The same results, from the host."""
        if self._host_run is None:
            with self._lock:
                if self._host_run is None:
                    self._host_run = self._host()
        return self._host_run([to_numpy(a) for a in arrays])


class DeviceLaunch(Launch):
    """A Launch on a GPU.

    asynchronous: whether it may run ahead, that is, return results that are still under computation. It does so where
    `launch_mode` says so. A failure is raised then, to the caller, who reruns all launches in order:
    only in the order of the streams could the host read inputs that are not finished. One that writes into its inputs
    is always waited for.
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
    """The operators of a function for a message, each once, the first few of them."""
    names = list(dict.fromkeys(n.operator for n in function.body.nodes))
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def misfit(results: Any, function: Function) -> str:
    """What is wrong with an executable's results, and what was expected, or ""."""
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
        # dtypes of other libraries are not NumPy's; their arrays are known by shape alone
        if tuple(shape) != p.shape or (isinstance(dtype, np.dtype) and dtype != p.dtype):
            return f"result {i} ({p.name!r}) is {dtype}{list(shape)}, expected {p.type}"
    return ""


class WrongResults(ExecutionError):
    """An executable returned something else than was promised. kind: what about it is wrong."""

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
