"""Launch: runs one cluster with its executable, and falls back to the host if the executable fails.

What goes into the executable and what comes out is checked at every call (`LaunchCheck`). Inputs that are not donated
go in as read-only views. Results are accepted if they have the count, array type, dtype, byte order and shape that the
Function's returns state. A NumPy result that is not exclusively the caller's is copied: a view of an input, of another
result or of memory that the engine keeps, a read-only or a non-contiguous array. A run that changes the rounding of
floats has failed, and it is changed back.
"""

from __future__ import annotations

import datetime
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct

from xrt_core.engine.boundary import clipped, direct, failure_of, round_to_nearest
from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions
from xrt_core.engine.converters import library_of
from xrt_core.engine.cuda import cuda_device
from xrt_core.engine.forking import each_in_forked_process, keep_for_ever
from xrt_core.errors import BrokenContextError, EngineError, ExecutionError, InputError, XRTError
from xrt_core.events import EventLog, Kind, process_events
from xrt_core.ir.function import Function, Parameter, operators_of
from xrt_core.ir.op_traits import has_checked_input
from xrt_core.ir.symbols import Declared, shape_for
from xrt_core.runtime.arrays import family_of, to_numpy

if TYPE_CHECKING:
    from xrt_core.runtime.input_checks import InputChecks, SymbolicInputChecks

HostRun = Callable[[Sequence[Any]], Sequence[Any]]

launch_mode: Final[ContextVar[tuple[RunOptions, bool]]] = ContextVar(
    "xrt_launch_mode", default=(DEFAULT_RUN_OPTIONS, True)
)
"""Launch mode of this call, for launches on a GPU: (RunOptions, whether to block until each is done)."""


class FailurePolicy(Struct, frozen=True):
    """When a launch gives its executable up: at `limit` failed runs within `window` calls."""

    limit: int = 3
    window: int = 1000


_DEFAULT_POLICY: Final = FailurePolicy()


class Launch:
    """Runs one Function on its engine; if the engine fails, on the host.

    function, engine: the cluster and the engine's name. executable: None if compilation failed; `error` has the cause.
    host: creates the function that runs the same nodes on the host, on arrays of any family (called at the first
    failure).
    policy: after which failures the executable is dropped and the host runs the cluster. error: the last failure.
    reads: see `LaunchCheck`.
    input_checks: of indices in range and scales that are positive (and, under guard, of finite numbers): what violates
    them is for the host.
    enter: converts host arrays to arrays that the engine accepts; None if it accepts host arrays.
    events: the log that receives fallback events. on_loss: called with the reason when the executable is dropped for
    good, or cannot be made. on_live: called when an executable that was built beside the host answers from now on.
    calls, failures: their numbers; updated without a lock, statistics
    that may lose increments. ahead: whether a run may return before its results are computed, see `Plan.run_ahead`; the
    first one never does.

    Every call checks the results (`LaunchCheck`). A failed run counts only if the host succeeds on the same inputs: a
    bad request takes no engine away.
    """

    __slots__ = (
        "__weakref__", "_check", "_check_at", "_checked", "_direct", "_events", "_fixed", "_host", "_host_run",
        "_lock", "_policy", "_recent", "ahead", "calls",
        "engine", "enter", "error", "executable", "failures", "function", "input_checks", "on_live", "on_loss",
    )  # fmt: skip

    def __init__(
        self,
        function: Function,
        engine: str,
        executable: Executable | None,
        host: Callable[[], HostRun],
        error: EngineError | None = None,
        events: EventLog = process_events,
        policy: FailurePolicy = _DEFAULT_POLICY,
        reads: bool = False,
    ) -> None:
        self.function = function
        self.engine = engine
        self.executable = executable
        self.error: XRTError | None = error
        self.calls = 0
        self.failures = 0
        self.on_loss: Callable[[str], None] | None = None
        self.on_live: Callable[[], None] | None = None
        self.enter: HostRun | None = None
        self._check = LaunchCheck(function, engine, reads=reads)
        self._check_at = self._check.at if function.is_symbolic else None
        self.input_checks: InputChecks | SymbolicInputChecks | None = _index_checks(function)
        self._direct: Executable | None = None  # the engine's own object, once it has run
        self._checked: HostRun | None = None  # its runs with all that is checked, where shapes are static
        self.ahead = False
        self._fixed = False  # whether its results have the types that were checked
        self._recent: deque[int] = deque(maxlen=policy.limit)  # numbers of the calls that failed last
        self._events = events
        self._policy = policy
        self._host = host
        self._host_run: HostRun | None = None
        self._lock = threading.Lock()
        _launches.add(self)

    def drop_inherited(self) -> None:
        """In a process that was just forked: let the host run the cluster, as the engine's threads are not here."""
        self._lock = threading.Lock()
        if self.executable is not None:
            keep_for_ever(self.executable)
            self.executable = self._direct = self._checked = None
            self.error = ExecutionError(FORKED)

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Run on the arrays of the Function's entry parameters; return the results."""
        executable = self.executable
        if executable is None:
            return self.on_host(arrays)
        self.calls += 1
        if self.input_checks is not None and self.input_checks.violates(arrays):
            return self.on_host(arrays)
        check, check_at = self._check, self._check_at
        try:
            checked, own = self._checked, self._direct  # another thread may let them go
            if checked is not None and not self.ahead:
                return checked(arrays)
            if check_at is not None:
                check = check_at(arrays)
            if own is not None:
                given = check.inputs(arrays)
                if self._fixed:
                    return check.fixed_results(own.run(given, DEFAULT_RUN_OPTIONS, not self.ahead))
                return check.results(own.run(given, DEFAULT_RUN_OPTIONS, not self.ahead))
            results = check.results(executable.run(check.inputs(arrays)))
            self._fixed = executable.fixed_results and check_at is None
            self._direct = own = direct(executable)
            self._checked = check.around(own, self._fixed) if check_at is None else None
            return results
        except BaseException as e:  # whatever an engine raises leads to the fallback
            failure = engine_failure(e, self.engine)
        return self.fall_back(arrays, failure)

    @property
    def trouble(self) -> str:
        """The failures so far, human-readable; "" if there are none."""
        if self.error is None:
            return ""
        if self.executable is None:
            why = "failed while running" if self.failures else "failed to compile"
            return f"{why}, the host runs it: {self.error}"
        return f"failed while running, the host ran it instead: {self.error}"

    def fall_back(self, arrays: Sequence[Any], error: XRTError) -> Sequence[Any]:
        """The host's results after a failed run, which counts if there are any.

        Raises `error` where the host cannot read inputs that were donated to the executable, and BrokenContextError,
        with its message, where it can read nothing on the device any more.
        """
        try:
            results = self.on_host(arrays)
        except BrokenContextError as e:
            raise BrokenContextError(f"{error}; {e}") from e
        except InputError:
            if not self.function.aliases:
                raise
        else:
            self.failed(error)
            return results
        raise error

    def count_failure(self, error: XRTError) -> bool:
        """Note a failed run of the executable. Returns whether the policy gives it up."""
        with self._lock:
            self.error = error
            self.failures += 1
            self._recent.append(self.calls)
            return len(self._recent) >= self._policy.limit and self.calls - self._recent[0] < self._policy.window

    def failed(self, error: XRTError) -> None:
        """Note a failed run, emit its event, and drop the executable if the policy says so."""
        given_up = self.count_failure(error)
        if given_up:
            self.executable = self._direct = self._checked = None
            self.lost(str(error))
        self._events.fallback(
            cluster=self.function.name,
            engine=self.engine,
            stage="run",
            kind=error.kind if isinstance(error, WrongResults) else "raised",
            error=f"{error}{'; the cluster stays on the host' if given_up else ''}",
            failures=self.failures,
        )

    def lost(self, reason: str) -> None:
        """Say that there is no executable any more, to whoever wants to know."""
        if self.on_loss is not None:
            self.on_loss(reason)

    def release(self, reason: str) -> None:
        """Let the executable go, whose plan was dropped: a call that is still made is the host's."""
        self.executable = self._direct = self._checked = None

    @property
    def is_pending(self) -> bool:
        """Whether an executable is being built, or waits for that."""
        return False

    def retry(self) -> None:
        """Build an executable again that failed, where another attempt is due."""

    def on_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Run the cluster on the host; return the results."""
        if self._host_run is None:
            with self._lock:
                if self._host_run is None:
                    self._host_run = self._host()
        return self._host_run(arrays)


FORKED: Final = "this process was forked, and the threads of the engine's library exist in its parent only"

_launches: weakref.WeakSet[Launch] = weakref.WeakSet()
each_in_forked_process(_launches, lambda launch: launch.drop_inherited())


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
        self.calls += 1
        options, wait = launch_mode.get()
        if self.input_checks is not None and self.input_checks.violates(arrays):
            return self.on_host(arrays)
        try:
            check = self._check if self._check_at is None else self._check_at(arrays)
            given = check.inputs(arrays if self.enter is None else self.enter(arrays))
            if not self.asynchronous:
                return check.results(executable.run(given))
            return check.results(executable.run(given, options, not self.ahead and (wait or self._updates)))
        except BaseException as e:
            failure = engine_failure(e, self.engine)
        if not wait:
            raise failure
        return self.fall_back(arrays, failure)


def _index_checks(function: Function) -> InputChecks | SymbolicInputChecks | None:
    if not any(has_checked_input(n) or (n.attributes and n.subgraphs) for n in function.body.nodes):
        return None
    from xrt_core.runtime.input_checks import input_checks

    return input_checks(function)


def engine_failure(error: BaseException, engine: str) -> XRTError:
    """The failure of a run (`failure_of`), with the kind of mismatch of its results."""
    failure = failure_of(error, f"engine {engine!r}", ExecutionError)
    return WrongResults(str(failure), error.kind) if isinstance(error, WrongResults) else failure


_ndarray: Final = np.ndarray
_references: Final = sys.getrefcount
_Capsule: Final[type] = type(datetime.datetime_CAPI)
_ONE, _TINY = 1.0, 1e-30
"""1 + tiny - tiny is 1 where rounding goes to the nearest, and only there."""


class WrongResults(ExecutionError):
    """The results of an executable do not match the Function's returns. kind: the kind of mismatch."""

    def __init__(self, message: str, kind: Kind) -> None:
        super().__init__(message)
        self.kind: Kind = kind


class LaunchCheck:
    """The check of one Function's inputs and results, well below a microsecond for a few NumPy arrays.

    engine: for messages. returns: what is expected; by default the Function's own, which a symbolic one has for known
    sizes only (`at`). reads: whether arrays of a library that is not known here are read at once, where they lie on the
    CPU: what their class does then counts as a part of the run.
    """

    __slots__ = (
        "_donated", "_engine", "_expected", "_foreign_type", "_function", "_known", "_reads", "_returns", "_updated",
    )  # fmt: skip

    def __init__(
        self, function: Function, engine: str, returns: Sequence[Parameter] | None = None, reads: bool = False
    ) -> None:
        self._function = function
        self._engine = engine
        self._reads = reads
        self._expected = function.returns if returns is None else tuple(returns)
        self._known: dict[Any, LaunchCheck] = {}  # of a symbolic function, by the shapes of its inputs
        self._donated = frozenset(a.input for a in function.aliases)
        self._foreign_type: Any = None  # of the last result that was another library's array
        self._updated = frozenset(a.output for a in function.aliases)  # share the storage of an input
        self._returns: tuple[tuple[Any, Any], ...] = tuple(
            (p.dtype, p.dims if not p.is_open else tuple(_ANY_SIZE if d is None else d for d in p.dims))
            for p in self._expected
        )

    def at(self, arrays: Sequence[Any]) -> LaunchCheck:
        """The check for inputs of these shapes, of a symbolic Function. Raises InputError for others than it takes."""
        key = tuple([a.shape for a in arrays])
        found = self._known.get(key)
        if found is None:
            params = self._function.params
            sizes = Declared(tuple(p.name for p in params), tuple(p.dims for p in params), {}).bind(key)
            returns = [Parameter(p.name, p.dtype, tuple(shape_for(p.dims, sizes))) for p in self._function.returns]
            found = LaunchCheck(self._function, self._engine, returns, self._reads)
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[key] = found
        return found

    @property
    def shapes_seen(self) -> list[tuple[Sequence[int], ...]]:
        """The shapes of the inputs of calls of a symbolic Function, those that differ, in the order of the first."""
        return list(self._known)

    def inputs(self, arrays: Sequence[Any]) -> list[Any]:
        """The inputs of a run: NumPy arrays that are not donated as read-only views."""
        views = []
        for a in arrays:
            if type(a) is _ndarray:
                a = a.view()
                a.setflags(False)  # type: ignore[call-arg] # by name it takes twice as long
            views.append(a)
        for i in self._donated:
            views[i] = arrays[i]
        return views

    def around(self, executable: Executable, fixed: bool = False) -> HostRun:
        """Runs of an executable between `inputs` and `results` (fixed: `fixed_results`), as one function: for many
        calls."""
        donated = tuple(self._donated)
        leave = self.fixed_results if fixed else self.results
        one = self._returns[0] if len(self._returns) == 1 and not fixed and not self._updated else None
        dtype, shape = one or (None, None)

        def checked(arrays: Sequence[Any]) -> Sequence[Any]:
            views = []  # `inputs`, written out: each function that a call enters counts
            for a in arrays:
                if type(a) is _ndarray:
                    a = a.view()
                    a.setflags(False)  # type: ignore[call-arg] # by name it takes twice as long
                views.append(a)
            for i in donated:
                views[i] = arrays[i]
            if one is None:
                return leave(executable.run(views))
            results = executable.run(views)
            is_temporary = _references(results) <= _OF_LOCAL
            if is_temporary and type(results) is list and len(results) == 1 and _ONE + _TINY - _TINY == _ONE:
                r = results[0]  # what is usual, as `results` looks at it
                if (
                    type(r) is _ndarray
                    and r.dtype is dtype
                    and r.shape == shape
                    and r.flags.carray
                    and _references(r) <= _OF_RESULT
                ):
                    base = r.base
                    if base is None or (type(base) in _OWNERS and _references(base) <= _OF_BASE):
                        return results
                    del base
                del r
            return self.results(results, is_temporary)

        return checked

    def results(self, results: Any, is_temporary: bool | None = None) -> Sequence[Any]:
        """The results of a run, with copies in the place of arrays that are not exclusively the caller's.

        is_temporary: whether nobody but the caller has `results`, who may change them; None where they are given as a
        temporary, whose references are counted here.

        Raises WrongResults for what does not match the Function's returns, what reading a result raises, and
        ExecutionError where the rounding of floats is not as it should be any more.
        """
        if _ONE + _TINY - _TINY != _ONE:
            round_to_nearest()
            raise ExecutionError(f"engine {self._engine!r} changed the rounding of floats in this process")
        returns = self._returns
        kind = type(results)
        if (kind is not list and kind is not tuple) or len(results) != len(returns):
            self._reject_count(results)
        if is_temporary is None:
            is_temporary = _references(results) <= _OF_RESULTS
        replaced: list[Any] | None = None
        i = 0
        for r in results:
            dtype, shape = returns[i]
            if type(r) is _ndarray:
                if (r.dtype is not dtype and r.dtype != dtype) or r.shape != shape:
                    self._misfit(i, r)
                base = r.base
                if (
                    is_temporary
                    and r.flags.carray
                    and _references(r) <= _OF_RESULT
                    and (base is None or (type(base) in _OWNERS and _references(base) <= _OF_BASE))
                ) or i in self._updated:
                    i += 1
                    continue
                found: Any = np.array(r, order="C")
            elif type(r) is self._foreign_type and r.shape == shape and r.dtype is dtype:
                i += 1
                continue
            else:
                found = self._foreign(i, r)
            if found is not r:
                replaced = list(results) if replaced is None else replaced
                replaced[i] = found
            i += 1
        return results if replaced is None else replaced

    def _reject_count(self, results: Any) -> None:
        if type(results) not in (list, tuple):
            self._reject("wrong count", f"the executable returned {clipped(results)}, expected a list or tuple")
        self._reject("wrong count", f"the executable returned {len(results)} results, expected {len(self._returns)}")

    def fixed_results(self, results: Any) -> Sequence[Any]:
        """As `results`, of an executable with `Executable.fixed_results` that has run: by number and class alone, where
        all are of the class that the last result of another library had."""
        if _ONE + _TINY - _TINY == _ONE and type(results) in (list, tuple) and len(results) == len(self._returns):
            kind = self._foreign_type
            if kind is not None and [*map(type, results)].count(kind) == len(results):
                return results  # type: ignore[no-any-return]
        return self.results(results)

    def _foreign(self, i: int, r: Any) -> Any:
        """A result that is no plain NumPy array: as it is where it is another library's, read where it is NumPy's."""
        dtype, shape = self._returns[i]
        own: Any = getattr(r, "dtype", None)
        size: Any = getattr(r, "shape", None)
        if own is None or size is None:
            expected = self._expected[i]
            self._reject(
                "wrong dtype", f"result {i} ({expected.name!r}) is {clipped(r)}, expected an array {expected.type}"
            )
        # arrays of other libraries may have no NumPy dtype; for these only the shape is checked
        if tuple(size) != shape or (isinstance(own, np.dtype) and own != dtype):
            self._misfit(i, r)
        if isinstance(r, np.ndarray | np.generic) and library_of(type(r)) == "numpy":
            return np.array(r, order="C", subok=False)
        if self._reads and family_of(type(r)) == "other" and cuda_device(r) is None:
            r = np.array(to_numpy(r))  # which may be the engine's memory
            if r.dtype != dtype or r.shape != shape:
                self._misfit(i, r)
            return r
        self._foreign_type = type(r)
        return r

    def _misfit(self, i: int, r: Any) -> None:
        expected = self._expected[i]
        kind: Kind = "wrong dtype" if expected.fits(tuple(r.shape)) else "wrong shape"
        dtype = r.dtype.str if isinstance(r.dtype, np.dtype) and not r.dtype.isnative else r.dtype
        self._reject(kind, f"result {i} ({expected.name!r}) is {dtype}{list(r.shape)}, expected {expected.type}")

    def _reject(self, kind: Kind, fault: str) -> None:
        raise WrongResults(
            f"engine {self._engine!r}, {self._function.name} ({operators_of(self._function)}): {fault}; this is a bug "
            "of the engine's package",
            kind,
        )


class _AnySize:
    """Stands for a dimension of a result that does not follow from the inputs' shapes: it equals every size."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "?"


_ANY_SIZE: Final[Any] = _AnySize()
_MOST_SHAPES: Final = 4096  # of which the checks are kept


class _Count:
    """The numbers of references to a temporary list, to an array in it, and to the base of that array; to a list that
    only a local variable has."""

    def local(self) -> int:
        results = _fresh()
        return _references(results)

    def results(self, results: Any) -> tuple[int, int, int]:
        of_results = _references(results)
        for r in results:
            base = r.base
            return of_results, _references(r), _references(base)
        raise AssertionError


def _fresh() -> list[np.ndarray]:
    return [np.zeros(2)[:1]]


_OWNERS: Final = (_ndarray, _Capsule)
"""Types of objects that may own the memory of a result. A capsule is how native libraries hand memory over."""

# how many references there are is the interpreter's affair, hence measured
_OF_RESULTS, _OF_RESULT, _OF_BASE = _Count().results(_fresh())
_OF_LOCAL = _Count().local()
