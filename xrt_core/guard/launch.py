"""GuardedLaunch: one cluster at run time under guard. What answers a call is one attribute, swapped atomically."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from xrt_core.cache.live_notes import Note
from xrt_core.engine.contract import Executable, Function, Tolerance
from xrt_core.engine.converters import converters
from xrt_core.engine.forking import keep_for_ever
from xrt_core.errors import BrokenContextError, ExecutionError, InputError, XRTError
from xrt_core.events import Kind
from xrt_core.guard.background import Answered, BackgroundCompiler, copies, warming_up
from xrt_core.guard.isolation import IsolatedExecutable
from xrt_core.guard.record import ClusterRecord, FailureRecord, FailureSink, State
from xrt_core.guard.sampling import SamplingSchedule, bytes_of, comparisons
from xrt_core.guard.timeouts import CallTimeout, TimedCaller, native_call, watchdog
from xrt_core.guard.worker_pool import WorkerFailure
from xrt_core.host.blas_threads import fewer_blas_threads, fewer_on_busy_machine
from xrt_core.ir.symbols import Declared
from xrt_core.options.guard_settings import MAX_INPUT_BYTES, GuardSettings
from xrt_core.passes.sized_graphs import function_at
from xrt_core.runtime.arrays import Range, to_numpy
from xrt_core.runtime.input_checks import input_checks, is_finite
from xrt_core.runtime.launch import FORKED, FailurePolicy, Launch, WrongResults, engine_failure
from xrt_core.runtime.transfers import direct
from xrt_core.verify.autotune import Neighbours
from xrt_core.verify.checker import Nearness, ResultChecker, same_bytes

HostRun = Callable[[Sequence[Any]], Sequence[Any]]
Arrays = Sequence[Any]

log = logging.getLogger("xrt")

_TIMED_EVERY: Final = 64  # calls; a power of two
_TIMED_FIRST: Final = 4  # calls of a host on a device, which are all timed
_SLOW: Final = 3.0
_SLOW_CALLS: Final = 3
"""An executable is slow if this many timed calls in a row took this many times as long as the host takes."""
_DRIFT: Final = 1.25
_SAMPLES: Final = 8
"""The race is re-opened if the median of so many timed calls is this many times what was expected, or less than its
inverse."""
_SLACK: Final = 50e-6  # seconds that a call may take more or less besides: what is around a run was not timed in a race
_REST: Final = 10.0
_RACES: Final = 200.0  # so that races take 0.5 % of the time at most
_LONGEST_REST: Final = 3600.0
"""Seconds until the race may be re-opened again: the first, or this many times what the last race took; twice as long
after each that was provisional again, up to the longest."""
_LIMIT: Final = 100.0
_SHORTEST_LIMIT: Final = 10.0  # seconds
"""Where `guard_run_timeout` is not given: how many times what the host takes a run may take, but for the shortest."""
_MOST_LOOKED_AT: Final = 4
"""Results of each call whose last elements are looked at."""
_RESTS: Final = 16  # times as many calls pass until another result that is not finite is compared
_MOST_RACED: Final = 6
"""Sizes of calls on which the candidates for a symbolic function are compared."""
_MORE_SIZES: Final = 3
"""They are compared again when this many times as many sizes have come as they were compared on."""
_LONG_TO_WAIT: Final = 0.1
"""Seconds: where the host takes longer for a call, nobody waits until it is known whether a difference is rounding."""
_INCOMPARABLE: Final = "the results of %s could not be compared with the host's"
_WORTH_LIMITING: Final = 2e-3  # seconds; the limit of a run that takes so long costs below 1 %
_AS_IT_IS: Final = contextlib.nullcontext()
_FATAL: Final[Mapping[str, str]] = MappingProxyType(
    {"hung": "it hung", "crashed": "its process ended", "memory": "its process ended", "closed": "its process is gone"}
)
"""Kinds of failures at run time that end an executable at once."""


class _Comparison(NamedTuple):
    """A call whose results are compared with the host's, with copies of its arrays. seconds: that it took. cost:
    seconds that the comparison has taken so far. schedule, tolerance: of the executable that computed it."""

    number: int
    inputs: list[np.ndarray]
    results: list[np.ndarray]
    seconds: float
    cost: float
    schedule: SamplingSchedule
    tolerance: Mapping[str, Tolerance]


class GuardedLaunch(Launch):
    """A Launch that the host answers until its executable was verified.

    Until the record's state is LIVE the host answers. Then the executable is on probation for some calls: inputs that
    it may overwrite are copied first, so that a failure loses nothing. Every call is checked as any launch is
    (`LaunchCheck`). With a time limit, the check runs within it, and so does the reading of results where their library
    is not known here.

    A live executable is watched. The host runs some calls as well, on copies, and the results must agree: the first one
    before its results go out, the others in the background (`SamplingSchedule`), and at once one whose results end with
    NaN or an infinity. If `answered` is there, the executable computes that call before it goes live, and where it
    agrees, that was the first comparison. Every 64th call is timed, and its results are looked at as a whole. An
    executable whose results differ is rejected for good, one that has become slow is dropped until the next retry, and
    if its time is not what it was when it was chosen, the choice is revisited (`Expectation`).

    build: starts the build of this cluster; its last argument says whether the call that needs it still waits for an
    answer. tolerance: that the engine declares, for shadow runs. note: says which runs this process is in. ranges: of
    the inputs of a first call, as far as they are known. answered: a call that the host answered, for the whole graph
    or in a warm-up run, until it has been compared. unwanted: its plan was dropped, and no executable is built any
    more. cancel: ends the build that runs. judged: set once the background has judged the first comparison, where its
    caller did not wait for that; None where none was left to it. synchronize: waits for the device, where the launch
    has one: what is timed begins and ends with that, so that neither work before it counts nor is work left out.
    """

    __slots__ = (
        "_before", "_build", "_call", "_checker", "_donated", "_failures", "_looks_at", "_passed", "_schedule",
        "_settings", "_timed", "answered", "cancel", "expectation", "judged", "note", "ranges", "record",
        "shares_cores", "synchronize", "tolerance", "unwanted",
    )  # fmt: skip

    def __init__(
        self,
        function: Function,
        engine: str,
        host: Callable[[], HostRun],
        record: ClusterRecord,
        settings: GuardSettings,
        failures: FailureSink,
        build: Callable[[GuardedLaunch, Arrays | None, bool], None],
    ) -> None:
        policy = FailurePolicy(settings.failures)
        super().__init__(function, engine, None, host, policy=policy, reads=not converters.takes_from(engine))
        self.record = record
        self.shares_cores = False
        self.expectation = Expectation()
        self.note: Note | None = None
        self.unwanted = False
        self.cancel: Callable[[], None] | None = None
        self.ranges: tuple[Range | None, ...] = ()
        self.answered: Answered | None = None
        self.judged: threading.Event | None = None
        self.synchronize: Callable[[], None] | None = None
        self.tolerance: Mapping[str, Tolerance] = {}
        self._settings = settings
        self._failures = failures
        self._build = build
        self._donated = tuple(a.input for a in function.aliases)
        self._passed = 0
        self._schedule = SamplingSchedule(settings.shadow)
        self._looks_at = 0  # from which call on a result that is not finite is compared
        self._timed: TimedCaller[Any] | None = None
        self._checker: ResultChecker | None = None
        self._before: Executable | None = None  # was right so far, and answers beside the next one's first comparison
        self._call: HostRun = self._waiting

    def __call__(self, arrays: Arrays) -> Arrays:
        return self._call(arrays if self.enter is None else self.enter(arrays))

    @property
    def trouble(self) -> str:
        """Why the host runs the cluster, or the last failure, as a message; "" for nothing."""
        record = self.record
        if record.state in (State.FAILED, State.REJECTED):
            return f"{record.state.value}, the host runs it: {record.reason}"
        if record.outcome is not None and record.outcome.serialised:
            return "its runs take turns, as they are wrong on two threads at once"
        if self.untried:
            return f"{record.chosen} was ready first; {', '.join(self.untried)} will be compared later"
        if record.outcome is not None and record.outcome.provisional:
            return f"the choice of {record.chosen} is provisional, as other processes kept the machine busy"
        if record.faults:
            last = record.faults[-1]
            return f"failed at {last.stage} before: {last.message}"
        return ""

    @property
    def untried(self) -> tuple[str, ...]:
        """The engines that were not compared with the one that answers, and will be."""
        outcome = self.record.outcome
        is_live = self.record.state is State.LIVE and not self.unwanted
        return outcome.untried if outcome is not None and is_live else ()

    # --- changes of state ------------------------------------------------------------------------------------------

    def go_live(self, executable: Executable, reason: str, *, any_thread: bool = True) -> None:
        """Let an executable answer from now on. any_thread: whether its runs may move to other threads without being
        asked to, which a time limit needs. Raises InternalError unless the state is READY."""
        if self.unwanted:
            return
        self._passed = 0
        self._limit_time(executable, any_thread)
        self._looks_at = 0
        self.failures = self.record.failures = 0
        self._before = self.executable if self._schedule.is_confirmed and not self._donated else None
        self.executable = executable
        if self.record.outcome is not None and self.record.outcome.finite_only and self._settings.finite:
            self.input_checks = input_checks(self.function, finite=True)
        with self._lock:  # so that what is found about the one before does not retire this one
            self._schedule = SamplingSchedule(self._settings.shadow, self.record.calls)
            self.record.move(State.LIVE, reason, settles=False)
        if self._schedule.is_on:
            self._compare_answered(self.record.calls + 1, self._schedule)
        if self._schedule.is_confirmed:
            self._before = None
        with self._lock:
            if self.executable is executable:  # that comparison may have ended it
                self._call = self._shadowed(self._on_probation)
        if self.on_live is not None:
            self.on_live()
        self.record.settled.set()  # after what follows from it has begun, which is waited for as well

    def release(self, reason: str) -> None:
        """See `Launch.release`. A build that has not begun never does, one that runs in a worker process ends, the
        result of another one is dropped, and nobody waits for any."""
        with self._lock:
            self.unwanted = True
            if self.record.state is not State.LIVE:
                self.record.restate(f"cancelled: {reason}")
            self._call = self._from_host
            self.executable = self._direct = self._checked = self.note = self.answered = self._before = None
            cancel, self.cancel = self.cancel, None
        self.record.settled.set()
        if cancel is not None:
            cancel()

    def _limit_time(self, executable: Executable, any_thread: bool) -> None:
        given, seconds = self._settings.run_timeout, self._longest_run()
        self._timed = None
        if isinstance(executable, IsolatedExecutable):
            executable.seconds = seconds or math.inf
        elif seconds and (any_thread or given is not None):
            self._timed = TimedCaller(seconds)

    def _longest_run(self) -> float:
        """The seconds that a run may take; 0.0 for any number."""
        given = self._settings.run_timeout
        return max(_SHORTEST_LIMIT, _LIMIT * self._host_seconds()) if given is None else given

    def _hangs(self, executable: Executable) -> None:
        """A run has not come back. Its caller cannot be helped; the host answers all others."""
        note, seconds = self.note, self._longest_run()
        if self.executable is executable:
            if note is not None:
                note.suspect()
            message = (
                f"a run has not come back within {seconds:g} s; as it cannot be ended, its caller waits for it. A run "
                "that hangs is ended with guard_run_timeout, and with guard='isolated'"
            )
            self._count(executable, ExecutionError(message), "hung")

    def _host_seconds(self) -> float:
        """What the host takes for a call, as far as is known; 0.0 for nothing."""
        record = self.record
        known = [record.outcome.timings.get("host", 0.0)] if record.outcome is not None else []
        return max([*known, *sorted(record.host_seconds)[-1:]], default=0.0)

    def retire(
        self, state: State, reason: str, is_lost: bool = True, watched_by: SamplingSchedule | None = None
    ) -> bool:
        """Let the host answer from now on. is_lost: there is no other executable. watched_by: whose executable alone is
        retired; None: whichever answers. Returns whether it was live: of several threads only one retires it."""
        with self._lock:  # not between the steps of `_end_probation`
            if watched_by not in (None, self._schedule) or not self.record.move_from(State.LIVE, state, reason):
                return False
            self._call = self._waiting
            self.executable = self.note = self.answered = self._before = None
        if is_lost:
            self.lost(reason)
        return True

    def drop_inherited(self) -> None:
        """See `Launch.drop_inherited`: the cluster is built again, for a process of its own."""
        self._lock = threading.Lock()
        for executable in (self.executable, self._before):
            if executable is not None:
                keep_for_ever(executable)
        self.executable = self.note = self._before = None
        self._call = self._waiting
        self.record.begin_again(FORKED)

    # --- calls, by state -------------------------------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """See `Launch.is_pending`."""
        return self.executable is None and not self.record.settled.is_set()

    def retry(self) -> None:
        """See `Launch.retry`."""
        if self._is_due:
            self._build(self, None, False)

    @property
    def _is_due(self) -> bool:
        record = self.record
        is_retried = record.state in (State.FAILED, State.REJECTED) and time.monotonic() >= record.retry_at
        return record.state is State.QUEUED or is_retried

    def _waiting(self, arrays: Arrays) -> Arrays:
        record = self.record
        due = self._is_due
        if due:
            self._build(self, arrays, True)
            if record.state is State.LIVE:
                return self._call(arrays)
        record.calls += 1
        compiler = warming_up() if due else None
        results = self._from_host(arrays) if compiler is None else self._kept_from_host(arrays, compiler)
        if due:
            self._build(self, arrays, False)
        return results

    def _kept_from_host(self, arrays: Arrays, compiler: BackgroundCompiler) -> Arrays:
        """The host's results for a call of a warm-up run, which is kept as the first comparison."""
        is_compared = self._schedule.is_on and not self._schedule.is_periodic
        if not is_compared or self._donated or self.synchronize is not None:
            return self._from_host(arrays)
        given = copies(arrays, compiler.room)
        start = time.perf_counter()
        results = self._from_host(arrays)
        seconds = time.perf_counter() - start
        if given is not None:
            got = copies(results, compiler.room - bytes_of(given))
            if got is not None:
                self.answered = compiler.keep(Answered(given, got, seconds))
        return results

    def _from_host(self, arrays: Arrays) -> Arrays:
        record = self.record
        record.host_calls += 1
        if self.synchronize is not None and record.host_calls > _TIMED_FIRST and record.host_calls & _TIMED_EVERY - 1:
            return self.on_host(arrays)  # a host on a device runs ahead of it
        is_long = bool(record.host_seconds) and record.host_seconds[-1] > _WORTH_LIMITING
        start = self._begin()
        with fewer_on_busy_machine() if is_long else _AS_IT_IS:
            results = self.on_host(arrays)
        record.host_seconds.append(self._seconds_since(start))
        return results

    def _begin(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return time.perf_counter()

    def _seconds_since(self, start: float) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return time.perf_counter() - start

    def _on_probation(self, arrays: Arrays) -> Arrays:
        record = self.record
        executable = self.executable
        if executable is None:  # another thread retired it
            return self._waiting(arrays)
        record.calls += 1
        if self.input_checks is not None and self.input_checks.violates(arrays):
            return self._from_host(arrays)
        kept = list(arrays)
        for i in self._donated:
            kept[i] = np.array(to_numpy(arrays[i]))
        seconds = 0.0
        try:
            start = self._begin()
            results = self._checked_run(executable, arrays)
            seconds = self._seconds_since(start)
        except BaseException as e:
            failure, kind = _failure_of(e, self.engine)
            results = None
        if results is None:
            return self._fall_back(executable, kept, failure, kind)
        record.engine_seconds.append(seconds)
        self._passed += 1
        if self._passed >= self._settings.probation:
            self._end_probation(executable)
        return results

    def _end_probation(self, executable: Executable) -> None:
        with self._lock:
            if self.record.state is State.LIVE and self.executable is executable:
                if self._settings.run_timeout is None and min(self.record.engine_seconds) < _WORTH_LIMITING:
                    self._timed = None
                self._call = self._live(executable)

    def _live(self, executable: Executable) -> HostRun:
        record, check, execute, timed = self.record, self._check, direct(executable), self._timed
        checks = self.input_checks

        run = check.around(execute, executable.fixed_results)

        def run_symbolic(arrays: Arrays) -> Arrays:
            now = check.at(arrays)
            return now.results(execute.run(now.inputs(arrays)))

        # where a call is long, each is worth more than what timing it costs
        seconds = min(record.engine_seconds, default=0.0)
        untimed = _TIMED_EVERY - 1 if seconds < _WORTH_LIMITING else _TIMED_EVERY // 8 - 1
        marks = memoryview(bytearray(Note.THREADS)) if self.note is None else self.note.flags
        if timed is None and (seconds := self._longest_run()):
            watchdog.watch(executable, marks, seconds, self._hangs)
        noted = _noted(run_symbolic if self.function.is_symbolic else run, marks, record)
        limited: HostRun = noted if timed is None else partial(timed, noted)

        schedule = self._schedule
        floats = self._floats() if schedule.is_on else ()

        def any_call(arrays: Arrays) -> Arrays:
            record.calls += 1
            if checks is not None and checks.violates(arrays):
                return self._from_host(arrays)
            try:
                if (number := record.calls) & untimed:
                    results = limited(arrays)
                    finite = _end_finite(results, floats)
                else:
                    start = self._begin()
                    results = limited(arrays)
                    self._note_seconds(self._seconds_since(start))
                    looks = _end_finite if number & _TIMED_EVERY - 1 or self.synchronize is not None else _are_finite
                    finite = looks(results, floats)
            except BaseException as e:
                failure, kind = _failure_of(e, self.engine)
            else:
                return results if finite else self._compared_at_once(arrays, results, schedule)
            return self._fall_back(executable, arrays, failure, kind)

        general = self._shadowed(any_call)
        if timed is not None or self.function.is_symbolic or schedule.is_periodic:
            return general
        violates = None if checks is None else checks.violates
        last = Note.THREADS - 1

        def call(arrays: Arrays) -> Arrays:
            """What `general` does for a call that is neither compared nor timed, in one function: each inner one would
            take a microsecond of a call that follows other work."""
            number = record.calls + 1
            if number > schedule.due or not schedule.is_confirmed or not number & untimed:
                return general(arrays)
            record.calls = number
            if violates is not None and violates(arrays):
                return self._from_host(arrays)
            i = get_ident() >> 12 & last
            try:
                marks[i] = number & 127 | 128
                results = run(arrays)
            except BaseException as e:
                failure, kind = _failure_of(e, self.engine)
            else:
                for k in floats:  # `_end_finite`
                    r = results[k]
                    if type(r) is np.ndarray and r.size and (x := r.item(-1)) - x != 0.0:
                        return self._compared_at_once(arrays, results, schedule)
                return results
            finally:
                marks[i] = 0
            return self._fall_back(executable, arrays, failure, kind)

        return call

    def _floats(self) -> tuple[int, ...]:
        """The results whose last elements are looked at after each call; none where inputs are gone by then."""
        found = [i for i, p in enumerate(self.function.returns) if p.dtype.kind == "f" and 0 not in p.dims]
        return () if self._donated else tuple(found[:_MOST_LOOKED_AT])

    def _compared_at_once(self, arrays: Arrays, results: Arrays, schedule: SamplingSchedule) -> Arrays:
        """What a call gives whose result is not finite where one was looked at: the host's, if that differs.

        Where the host's is not finite either, the next such result is compared after `_RESTS` times as many calls.
        """
        number = self.record.calls
        if number < self._looks_at:
            return results
        self._looks_at = _RESTS * number
        try:
            kept = [np.array(to_numpy(a)) for a in arrays]
        except XRTError:  # arrays that only the engine reads
            return results
        copies = [np.array(to_numpy(r)) for r in results]
        seconds = min(self.record.engine_seconds, default=0.0)
        with fewer_blas_threads():
            expected = self._compare(_Comparison(number, kept, copies, seconds, 0.0, schedule, self.tolerance))
        return results if expected is None else expected

    def _note_seconds(self, seconds: float) -> None:
        """Note the time of a live call; drop the executable if it has become slower than the host, and have the race
        re-opened if calls do not take what is expected."""
        record = self.record
        record.engine_seconds.append(seconds)
        if self.function.is_symbolic:  # times of calls of other sizes say nothing
            if (why := self._not_compared()) and self.expectation.is_due():
                self._failures.drifted(self, why)
            return
        if comparisons().is_busy:  # times beside the host's runs are no reason to choose again
            return
        if self.record.outcome is not None and self.record.outcome.timed and (why := self.expectation.add(seconds)):
            self._failures.drifted(self, why)
        host = self._host_seconds()
        last = list(record.engine_seconds)[-_SLOW_CALLS:]
        if host and len(last) == _SLOW_CALLS and min(last) > _SLOW * host:
            message = f"its last {_SLOW_CALLS} timed calls took {min(last):.3g} s and more, the host takes {host:.3g} s"
            self._record_failure("run", "slower", message)
            if self.retire(State.FAILED, f"it has become slow: {message}"):
                record.postpone(self._settings.retry)

    def _not_compared(self) -> str:
        """What the candidates for a symbolic function were not compared on; "" for nothing."""
        if self.untried:
            return f"{', '.join(self.untried)} had not been tried"
        raced = max(len(self.record.raced), 1) if self.record.races else 0  # before any call: on sizes of its own
        seen = len(self._check.shapes_seen)
        more = 0 < raced < _MOST_RACED and seen >= _MORE_SIZES * raced
        return f"calls of {seen} sizes have come, and it was chosen for {raced}" if more else ""

    def sizes_seen(self) -> list[dict[str, int]]:
        """Sizes of the symbols of a symbolic function in some of its calls on an engine, which are spread over all that
        differ."""
        shapes = self._check.shapes_seen
        count = min(len(shapes), _MOST_RACED)
        return [self.sizes_of(shapes[i * len(shapes) // count]) for i in range(count)]

    # --- shadow runs -----------------------------------------------------------------------------------------------

    def _shadowed(self, call: HostRun) -> HostRun:
        """`call`, with shadow runs as scheduled."""
        record, schedule = self.record, self._schedule
        if not schedule.is_on:
            return call
        varies = self.function.is_symbolic

        def shadowed(arrays: Arrays) -> Arrays:
            try:
                if schedule.is_due(record.calls, arrays if varies else ()):
                    return self._shadow_run(call, arrays, schedule)
            except BaseException:  # an interrupt may come anywhere
                schedule.release()
                raise
            if schedule.is_first_under_way:
                return self._beside_first(arrays)
            self._before = None
            return call(arrays)

        return shadowed

    def _beside_first(self, arrays: Arrays) -> Arrays:
        """A call while the first comparison of an executable is under way: by the one before, or by the host."""
        self.record.calls += 1
        before = self._before
        if before is not None and not (self.input_checks is not None and self.input_checks.violates(arrays)):
            try:
                results = self._checked_run(before, arrays)
            except BaseException as e:
                failure, kind = _failure_of(e, self.engine)
                self._before = None
                self._record_failure("run", kind, str(failure))
            else:
                looks = _end_finite if self.synchronize is not None else _are_finite
                if looks(results, self._floats()):
                    return results
        return self._from_host(arrays)

    def _shadow_run(self, call: HostRun, arrays: Arrays, schedule: SamplingSchedule) -> Arrays:
        """A call whose results are compared with the host's: before they are returned, or in the background."""
        number = self.record.calls + 1
        if self._compare_answered(number, schedule):
            return call(arrays)
        try:
            if bytes_of(arrays) > MAX_INPUT_BYTES:
                schedule.postpone(number, 0.0, 0.0)
                return call(arrays)
            copied = time.perf_counter()
            kept = [np.array(to_numpy(a)) for a in arrays]
        except XRTError:  # unusable inputs, which the call rejects
            schedule.postpone(number, 0.0, 0.0)
            return call(arrays)
        start = time.perf_counter()
        copying = start - copied
        try:
            results = call(arrays)
        except BaseException:  # of the host, or of the program
            schedule.postpone(number, 0.0, 0.0)
            raise
        seconds = time.perf_counter() - start
        if self.record.state is not State.LIVE or self._schedule is not schedule:
            return self.on_host(kept)  # the executable was retired meanwhile, and these results may still be its own
        compared = _Comparison(number, kept, [], seconds, copying, schedule, self.tolerance)
        if changed := self._changed(kept, arrays):
            schedule.postpone(number, seconds, seconds)
            self._disprove(f"it wrote into its input {changed!r}", compared, number)
            return self.on_host(kept)
        try:
            copied = time.perf_counter()
            copies = [np.array(to_numpy(r)) for r in results]
            compared = compared._replace(results=copies, cost=copying + time.perf_counter() - copied)
        except BaseException as e:  # reading an engine's array may run code of the engine
            failure, kind = _failure_of(e, self.engine)
        else:
            if schedule.is_synchronous:
                with fewer_blas_threads():  # the engine's threads may still spin
                    expected = self._compare(compared, is_waited_for=True)
                return results if expected is None else expected
            if not comparisons().submit(partial(self._compare, compared)):
                schedule.postpone(number, 0.0, 0.0)
            schedule.taker = 0
            return results
        schedule.postpone(number, seconds, seconds)
        assert self.executable is not None
        return self._fall_back(self.executable, kept, failure, kind)

    def _compare_answered(self, number: int, schedule: SamplingSchedule) -> bool:
        """Whether the executable gives what the host has answered, so that call `number` needs no comparison.

        Where it does not, that call is compared: the whole graph may have been computed in another way.
        """
        answered, self.answered = self.answered, self.answered if self.untried else None  # for who wins the race
        executable = self.executable
        if answered is None or executable is None or schedule.is_confirmed or schedule.is_periodic:
            return False
        given = [x.copy() for x in answered.inputs]
        start = time.perf_counter()
        try:
            with native_call():
                results = [np.array(to_numpy(r)) for r in self._checked_run(executable, given)]
        except BaseException as e:
            failure, kind = _failure_of(e, self.engine)
            if kind in _FATAL:
                self._count(executable, failure, kind)
            return False
        seconds = time.perf_counter() - start
        if self._changed(answered.inputs, given):
            return False
        try:
            checker = self._checker_for(answered.inputs, answered.results)
            call = _Comparison(number - 1, answered.inputs, results, seconds, 0.0, schedule, self.tolerance)
            if self._is_long_to_judge(answered.seconds, schedule):
                nearness = checker.nearness(results, self.tolerance)
                if nearness is Nearness.NEAR and self._leave_judgement(call, checker, nearness):
                    self.record.shadow_runs += 1
                    return True
            check = checker.check_results(results, self.tolerance)
        except Exception:  # the call is compared, which says what is wrong
            return False
        if not check.is_right:
            return False
        self.record.shadow_runs += 1
        schedule.postpone(number, answered.seconds + time.perf_counter() - start, seconds)
        schedule.confirm(number - 1)
        return True

    def _compare(self, call: _Comparison, *, is_waited_for: bool = False) -> Arrays | None:
        """Compare the results of a call with the host's.

        Returns the host's if they differ, which rejects the cluster. Where a caller waits, and what differs is long to
        judge, the background judges: until then the executable answers if it is nearly within bounds; else the caller
        gets the host's, and the executable before answers, or the host.
        """
        self.record.shadow_runs += 1
        start, schedule = time.perf_counter(), call.schedule
        try:
            expected = [to_numpy(r) for r in self.on_host(call.inputs)]
            checker = self._checker_for(call.inputs, expected)
            host = time.perf_counter() - start
            is_long = is_waited_for and self._is_long_to_judge(host, schedule)
            call = call._replace(cost=call.cost + host)
            nearness = checker.nearness(call.results, call.tolerance) if is_long else Nearness.WITHIN
            if nearness is not Nearness.WITHIN and self._leave_judgement(call, checker, nearness):
                schedule.taker = 0
                return None if nearness is Nearness.NEAR else expected
        except Exception as e:
            if not isinstance(e, XRTError):  # as the host raises for inputs that it rejects
                log.exception(_INCOMPARABLE, self.function.name)
            schedule.postpone(call.number, call.cost + time.perf_counter() - start, call.seconds)
            return None
        return None if self._judge(call, checker) else expected

    def _is_long_to_judge(self, seconds: float, schedule: SamplingSchedule) -> bool:
        """seconds: that the host takes for these inputs; to judge what differs takes it some ten times as long."""
        return self._settings.asynchronous and not schedule.is_periodic and seconds > _LONG_TO_WAIT

    def _leave_judgement(self, call: _Comparison, checker: ResultChecker, nearness: Nearness) -> bool:
        """Have the background judge, which `judged` tells. Meanwhile the executable answers where its results are
        nearly within bounds. Returns False where the background takes no more."""
        judged = threading.Event()

        def work() -> None:
            try:
                self._judge(call, checker)
            finally:
                judged.set()

        before, self.judged = self.judged, judged  # before the work, which may end at once
        call.schedule.is_trusted = nearness is Nearness.NEAR
        if comparisons().submit(work):
            return True
        self.judged, call.schedule.is_trusted = before, False
        return False

    def _judge(self, call: _Comparison, checker: ResultChecker) -> bool:
        """Whether the results of a call are right, or cannot be judged; if not, the cluster is rejected."""
        start, schedule = time.perf_counter(), call.schedule
        try:
            check = checker.check_results(call.results, call.tolerance)
        except XRTError:
            return True
        except Exception:  # a fault of the comparison must not reach the caller
            log.exception(_INCOMPARABLE, self.function.name)
            return True
        finally:
            schedule.postpone(call.number, call.cost + time.perf_counter() - start, call.seconds)
        if check.is_right or check.is_doubtful:
            schedule.confirm(call.number)
            if schedule is self._schedule:
                self._before = None
            return True
        self._disprove(check.reason, call, self.record.calls)
        return False

    def _disprove(self, reason: str, call: _Comparison, last: int) -> None:
        """Reject the cluster for what a comparison has found, and say which calls are in doubt. If another executable
        answers by now, it goes on: the failure is recorded."""
        doubt = f"results of its calls {call.schedule.last_right + 1} to {last} are in doubt"
        why = f"wrong: a shadow run disagreed: {reason}; {doubt}"
        if self.retire(State.REJECTED, why, is_lost=False, watched_by=call.schedule):
            self._failures.disproved(self, reason, call.inputs)
        elif self._schedule is call.schedule:  # another thread has found it
            return
        else:
            self._before = None
            doubt += "; another executable answers by now"
        self._record_failure("shadow", "wrong numbers", f"{reason}; {doubt}")

    def _changed(self, before: list[np.ndarray], arrays: Arrays) -> str:
        """The name of an input on the CPU that is not what it was and was not donated; "" for none. A view that is
        read-only keeps accidents out, and no native code."""
        for i, (p, x, a) in enumerate(zip(self.function.params, before, arrays, strict=True)):
            is_known = i not in self._donated and isinstance(a, np.ndarray) and a.dtype == x.dtype
            if is_known and not x.dtype.hasobject and not same_bytes(a, x):
                return p.name
        return ""

    def _checker_for(self, inputs: list[np.ndarray], expected: list[np.ndarray]) -> ResultChecker:
        """The checker of results for these inputs. The analysis of a static function is made once: for short calls it
        takes longer than all the rest of a comparison."""
        if self.function.is_symbolic:
            return ResultChecker(self._function_for(inputs), inputs, results=expected)
        if self._checker is None:
            self._checker = ResultChecker(self.function, (), results=())
        return self._checker.for_inputs(inputs, expected)

    def _function_for(self, arrays: Arrays) -> Function:
        """The static function for inputs of these shapes."""
        if not self.function.is_symbolic:
            return self.function
        return function_at(self.function, self.sizes_of([a.shape for a in arrays]))

    def sizes_of(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Sizes of the symbols for inputs of these shapes."""
        params = self.function.params
        declared = Declared(tuple(p.name for p in params), tuple(p.dims for p in params), {})
        return {**self.record.sizes, **declared.bind(shapes)}

    # --- failures ------------------------------------------------------------------------------------------------

    def _checked_run(self, executable: Executable, arrays: Arrays) -> Arrays:
        def run(arrays: Arrays) -> Arrays:
            check = self._check.at(arrays) if self.function.is_symbolic else self._check
            return check.results(executable.run(check.inputs(arrays)))

        noted = run if self.note is None else _noted(run, self.note.flags, self.record)
        return noted(arrays) if self._timed is None else self._timed(noted, arrays)

    def _fall_back(self, executable: Executable, arrays: Arrays, error: XRTError, kind: Kind) -> Arrays:
        """The host's results for a call in which the executable failed. It counts if there are any, or if it hung."""
        if kind == "hung":
            self._count(executable, error, kind)
            return self._from_host(arrays)
        try:
            results = self._from_host(arrays)
        except BrokenContextError as e:
            raise BrokenContextError(f"{error}; {e}") from e
        except InputError:
            if not self.function.aliases:
                raise
        else:
            self._count(executable, error, kind)
            return results
        raise error

    def _count(self, executable: Executable, error: XRTError, kind: Kind) -> None:
        self.calls = self.record.calls
        gives_up = self.count_failure(error) or kind in _FATAL
        self.record.failures = self.failures
        self._record_failure("run", kind, str(error))
        if gives_up and self.executable is executable:
            times = _FATAL.get(kind) or f"it failed {self.failures} times at run time"
            if self.retire(State.FAILED, f"{times}, the last time: {error}"):
                self.record.postpone(self._settings.retry)

    def _record_failure(self, stage: str, kind: Kind, message: str) -> None:
        self._failures.record_failure(self.record, self.function, FailureRecord(stage, kind, message))


class Expectation:
    """What the calls of a live executable are expected to take, and when its choice is revisited.

    Expected is what it took in the race, then, if the race was re-opened and the choice stayed, what it takes live. A
    provisional choice is revisited once other processes leave the machine alone. clock: in seconds.
    """

    __slots__ = ("_clock", "_expected", "_neighbours", "_next", "_provisional", "_rest", "_samples")

    def __init__(self, clock: Callable[[], float] = time.monotonic, neighbours: Neighbours | None = None) -> None:
        self._clock = clock
        self._expected = 0.0
        self._provisional = False
        self._samples: list[float] = []
        self._neighbours = neighbours
        self._rest = _REST
        self._next = -math.inf

    def begin(self, seconds: float, provisional: bool) -> None:
        """A choice was made. seconds: what a run took in the race; 0.0: what the next calls take is expected."""
        self._expected, self._provisional = seconds, provisional
        self._samples = []
        if self._next == -math.inf:
            self._next = self._clock() + self._rest

    def raced(self, seconds: float, provisional: bool) -> None:
        """A race was re-opened, and took so long. provisional: its choice is."""
        shortest = max(_REST, _RACES * seconds)
        self._rest = min(max(2 * self._rest, shortest), _LONGEST_REST) if provisional else shortest
        self._next = self._clock() + self._rest

    def is_due(self) -> bool:
        """Whether it is time for the race that a choice had none of; asked again after `raced` only, if it is."""
        if self._clock() < self._next:
            return False
        self._next = math.inf
        return True

    def add(self, seconds: float) -> str:
        """Note the time of a call. Returns why the race should be re-opened, "" if it should not."""
        samples = self._samples  # other threads may begin new ones
        samples.append(seconds)
        if len(samples) < _SAMPLES:
            return ""
        self._samples = []
        live = statistics.median(samples)
        now = self._clock()
        if not self._expected:
            self._expected = live
            return ""
        if now < self._next:
            return ""
        if not self._expected / _DRIFT - _SLACK <= live <= self._expected * _DRIFT + _SLACK:
            self._next = math.inf  # until `raced`
            return f"a call takes {live:.3g} s, expected were {self._expected:.3g} s"
        if self._provisional:
            self._neighbours = self._neighbours or Neighbours()
            looked = self._neighbours.seconds() >= 1.0
            if looked and not self._neighbours.are_busy():
                self._next = math.inf
                return "it was chosen while the machine was busy"
        return ""


def _end_finite(results: Arrays, floats: Sequence[int]) -> bool:
    """Whether the last elements of these results are finite, as far as they are NumPy's: NaN mostly spreads as far as
    there, and a tenth of a microsecond is what a call can spare."""
    for k in floats:
        r = results[k]
        if type(r) is np.ndarray and r.size and (x := r.item(-1)) - x != 0.0:
            return False
    return True


def _are_finite(results: Arrays, floats: Sequence[int]) -> bool:
    """As `_end_finite`, of all elements, and of arrays of other libraries too, whose memory is here: for one call in 64
    that is 0.15 % of the time of elementwise ones, and less of others."""
    return all(is_finite(to_numpy(results[k])) for k in floats)


def _noted(run: HostRun, marks: memoryview, record: ClusterRecord) -> HostRun:
    """`run`, marked while it lasts: for the next process, and for the watchdog, to which each run has a mark of its
    own."""
    last = Note.THREADS - 1  # `Note.slot`, without a call

    def noted(arrays: Arrays) -> Arrays:
        i = get_ident() >> 12 & last
        marks[i] = record.calls & 127 | 128
        try:
            return run(arrays)
        finally:
            marks[i] = 0

    return noted


def _failure_of(error: BaseException, engine: str) -> tuple[XRTError, Kind]:
    """The failure of a run and its kind; raises `error` itself where it comes from the program."""
    if isinstance(error, CallTimeout):
        return ExecutionError(str(error)), "hung"
    if isinstance(error, WorkerFailure):
        return ExecutionError(str(error)), error.kind
    failure = engine_failure(error, engine)
    return failure, failure.kind if isinstance(failure, WrongResults) else "raised"
