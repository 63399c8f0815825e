"""GuardedLaunch: what answers a call in each state, and what a failure at run time costs."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import pathlib
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.guard.guarded import eventually
from xrt_core.cache.live_notes import LiveNotes
from xrt_core.engine.contract import Executable, InputOutputAlias, RunOptions
from xrt_core.engine.converters import converters
from xrt_core.errors import InputError, InternalError
from xrt_core.guard import launch as launch_module
from xrt_core.guard.background import Answered
from xrt_core.guard.launch import Expectation, GuardedLaunch
from xrt_core.guard.record import ClusterRecord, FailureRecord, State
from xrt_core.guard.sampling import SamplingSchedule, comparisons
from xrt_core.ir.function import Function
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.runtime.arrays import to_numpy
from xrt_core.testing import functions
from xrt_core.verify.checker import Check, Nearness, ResultChecker
from xrt_core.verify.verdict import Outcome

SETTINGS = GuardSettings(
    asynchronous=True, sandbox=False, verify=False, tune=False, timeout=5, memory=1 << 30, failures=3, retry=0.05,
    run_timeout=0, shadow=0, finite=True, real_inputs=False, probation=3,
)  # fmt: skip
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def _own_arrays_have_a_converter() -> Iterator[None]:
    """So that they are not read where the engine "e" returns them."""
    converters.register("e", "host", to_numpy, owner="tests")
    yield
    converters.unregister("e", "host")


class Guard:
    """Takes failures, and builds at once: `live` is the executable that goes live then."""

    def __init__(self, settings: GuardSettings = SETTINGS, live: Executable | None = None) -> None:
        self.settings = settings
        self.live = live
        self.built: list[bool] = []
        self.disproved_by: list[str] = []
        self.failures: list[tuple[str, str]] = []

    def disproved(self, launch: GuardedLaunch, reason: str, inputs: Sequence[np.ndarray]) -> None:
        self.disproved_by.append(reason)

    def build(self, launch: GuardedLaunch, arrays: Sequence[Any], before_answer: bool) -> None:
        if before_answer is self.settings.asynchronous:
            return
        self.built.append(before_answer)
        if self.live is not None:
            if launch.record.state is State.FAILED:
                launch.record.move(State.QUEUED)
            launch.record.move(State.READY)
            launch.go_live(self.live, "")

    def record_failure(self, record: ClusterRecord, function: Function, failure: FailureRecord) -> None:
        record.add(failure)
        self.failures.append((failure.stage, failure.kind))


class Does(Executable):
    """Runs a function."""

    def __init__(self, run: Callable[[Sequence[Any]], Any]) -> None:
        self._run = run
        self.runs = 0

    def run(self, inputs: Sequence[Any], run_options: RunOptions | None = None, block_until_done: bool = True) -> Any:
        self.runs += 1
        return self._run(inputs)


def right(inputs: Sequence[Any]) -> Any:
    """What the engine should do: a + b, marked as its own by the array type."""
    return [Own(inputs[0] + inputs[1])]


class Own:
    """An array of an engine's own type."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def launch_of(
    guard: Guard,
    *aliases: InputOutputAlias,
    host: Callable[[], Any] | None = None,
    kind: type[GuardedLaunch] = GuardedLaunch,
    engine: str = "e",
    function: Function | None = None,
) -> GuardedLaunch:
    """A launch of y = a + b, or of `function`. host: takes arrays of any family."""
    function = function or functions.binary("Add")
    if aliases:
        function = type(function)(function.name, function.params, function.returns, function.body, aliases)
    host = host or (lambda: lambda arrays: [np.add(*map(to_numpy, arrays))])
    record = ClusterRecord("c", "e", 1, "Add")
    return kind(function, engine, host, record, guard.settings, guard, guard.build)


def test_the_host_answers_first_and_the_work_begins_after_it() -> None:
    """In the asynchronous mode a call of a queued cluster is the host's, and only then is anything set going."""
    order: list[str] = []
    guard = Guard()
    guard.build = lambda launch, arrays, before: order.append("before" if before else "after")  # type: ignore

    def host(arrays: Sequence[Any]) -> Any:
        order.append("host")
        return [arrays[0] + arrays[1]]

    launch = launch_of(guard, host=lambda: host)
    np.testing.assert_array_equal(launch([X, X])[0], X + X)
    assert order == ["before", "host", "after"]
    assert (launch.record.calls, launch.record.host_calls) == (1, 1)


def test_synchronous_the_first_call_is_accelerated() -> None:
    """There the work is done before the first answer."""
    launch = launch_of(Guard(settings=_with(asynchronous=False), live=Does(right)))
    assert isinstance(launch([X, X])[0], Own)
    assert (launch.record.calls, launch.record.host_calls) == (1, 0)


def test_going_live_is_one_step_out_of_ready() -> None:
    """Another state is an error."""
    launch = launch_of(Guard())
    with pytest.raises(InternalError, match="QUEUED cannot become LIVE"):
        launch.go_live(Does(right), "")


def test_live_after_probation() -> None:
    """Probation ends after some good calls; results are the executable's own objects from the first one on."""
    launch = live(Does(right))
    for _ in range(SETTINGS.probation + 2):
        assert isinstance(launch([X, X])[0], Own)
    assert launch._call.__name__ == "call"
    assert len(launch.record.engine_seconds) == SETTINGS.probation
    assert launch.trouble == ""


@pytest.mark.parametrize("shadow", [0, None])
def test_a_live_call_enters_few_functions(shadow: int | None) -> None:
    """The launch, its checks, which are one, and the run: after other work each one takes a microsecond."""
    launch = live(Does(lambda i: [i[0] + i[1]]), settings=_with(shadow=shadow))
    for _ in range(SETTINGS.probation + 5):
        launch([X, X])
        comparisons().wait()
    entered: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        launch([X, X])
    finally:
        sys.setprofile(None)
    assert entered == ["__call__", "call", "checked", "run", "<lambda>"]


WRONG: dict[str, Callable[[Sequence[Any]], Any]] = {
    "wrong count": lambda i: [i[0], i[0]],
    "wrong shape": lambda i: [i[0][None]],
    "wrong dtype": lambda i: [i[0].astype(np.float64)],
}


def boom(inputs: Sequence[Any]) -> Any:
    """An engine's exception."""
    raise RuntimeError("boom")


@pytest.mark.parametrize("kind", [*WRONG, "raised", "none", "a number"])
def test_failures_on_probation(kind: str) -> None:
    """Each gives the host's result for its call, an event with the kind, and the last one the state FAILED."""
    odd = {"none": lambda i: None, "a number": lambda i: [3], "raised": boom}
    executable = Does(WRONG.get(kind) or odd[kind])
    launch = live(executable)
    for i in range(3):
        np.testing.assert_array_equal(launch([X, X])[0], X + X)
        assert (launch.record.state is State.FAILED) == (i == 2)
    expected = {"none": "wrong count", "a number": "wrong dtype"}.get(kind, kind)
    assert failures_of(launch) == [("run", expected)] * 3
    assert executable.runs == 3
    launch([X, X])
    assert executable.runs == 3
    assert launch.executable is None
    assert "failed 3 times at run time" in launch.trouble


@pytest.mark.parametrize("kind", ["wrong count", "wrong shape", "raised"])
def test_failures_of_a_live_cluster(kind: str) -> None:
    """What goes wrong later is caught as well."""
    bad = False
    executable = Does(lambda i: (WRONG.get(kind) or boom)(i) if bad else right(i))
    launch = live(executable)
    for _ in range(SETTINGS.probation + 1):
        launch([X, X])
    bad = True
    np.testing.assert_array_equal(launch([X, X])[0], X + X)
    assert failures_of(launch) == [("run", kind)]
    assert launch.record.state is State.LIVE
    bad = False
    assert isinstance(launch([X, X])[0], Own)


def test_it_is_tried_again_when_its_time_has_come() -> None:
    """Not before `retry_at`; then the work is set going by a call."""
    executable = Does(boom)
    launch = live(executable)
    for _ in range(3):
        launch([X, X])
    guard = launch._failures
    assert isinstance(guard, Guard)
    launch.record.retry_at = time.monotonic() + 3600
    launch([X, X])
    assert guard.built == []
    launch.record.retry_at = 0
    guard.live = Does(right)
    launch([X, X])
    assert guard.built == [False]
    assert isinstance(launch([X, X])[0], Own)
    assert launch.record.failures == 0


def test_donated_inputs_are_not_lost_on_probation() -> None:
    """An executable that overwrites its aliased input and then fails leaves the host the old value."""

    def destroys(inputs: Sequence[Any]) -> Any:
        inputs[0][...] = -1
        raise RuntimeError("half way")

    launch = live(Does(destroys), InputOutputAlias(0, 0))
    a = X.copy()
    np.testing.assert_array_equal(launch([a, X])[0], X + X)


def test_an_array_that_cannot_be_read_is_the_callers_fault() -> None:
    """It is no failure of the engine."""

    class Deleted:
        dtype, shape = np.dtype(np.float32), (2, 3)

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("deleted")

    launch = live(Does(lambda i: [np.asarray(i[0])]))
    with pytest.raises(InputError, match="deleted"):
        launch([Deleted(), X])
    assert launch.record.failures == 0


def test_a_run_that_hangs() -> None:
    """With a limit for runs the host answers after it, the state is FAILED at once, and no later call waits."""
    free = threading.Event()
    executable = Does(lambda i: (free.wait(30), right(i))[1])
    launch = live(executable, settings=_with(run_timeout=0.05))
    np.testing.assert_array_equal(launch([X, X])[0], X + X)
    free.set()
    assert failures_of(launch) == [("run", "hung")]
    assert launch.record.state is State.FAILED
    launch([X, X])
    assert executable.runs == 1


@pytest.mark.parametrize("probation", [1, 3])
def test_reading_results_is_a_part_of_the_run(probation: int, tmp_path: pathlib.Path) -> None:
    """Arrays of an unknown library are read within the note and the limit: one that hangs there is told as hung."""
    free, notes = threading.Event(), LiveNotes(tmp_path)
    noted: list[bool] = []

    class Slow(Own):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            note = launch.note
            noted.append(note is not None and any(note.flags))
            if len(noted) > 2:
                free.wait(30)
            return self.array

    guard = Guard(settings=_with(run_timeout=0.2, probation=probation))
    launch = launch_of(guard, engine="foreign")
    launch.note = notes.begin("0" * 64)
    launch.record.move(State.READY)
    launch.go_live(Does(lambda i: [Slow(i[0] + i[1])]), "")
    for _ in range(2):
        (found,) = launch([X, X])
        assert type(found) is np.ndarray
        assert found.flags.owndata
    np.testing.assert_array_equal(launch([X, X])[0], X + X)
    free.set()
    assert noted == [True, True, True]
    assert guard.failures == [("run", "hung")]
    notes.close()


def test_a_run_that_changes_the_rounding() -> None:
    """It has failed, the host answers, and the rounding is as before."""

    def downwards(inputs: Sequence[Any]) -> Any:
        ctypes.CDLL(None).fesetround(0x800000 if platform.machine() == "aarch64" else 0x400)
        return right(inputs)

    launch = live(Does(downwards))
    third = np.float32(1) / np.float32(3)
    assert type(launch([X, X])[0]) is np.ndarray
    assert failures_of(launch) == [("run", "raised")]
    assert np.float32(1) / np.float32(3) == third


def test_the_limit_that_nobody_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """First runs have one, and later those that are long enough for it to cost nothing; the host's time sets it."""
    monkeypatch.setattr(launch_module, "_SHORTEST_LIMIT", 0.1)
    free = threading.Event()

    def hangs(inputs: Sequence[Any]) -> Any:
        free.wait(30)
        return right(inputs)

    launch = live(Does(hangs), settings=_with(run_timeout=None))
    np.testing.assert_array_equal(launch([X, X])[0], X + X)
    assert failures_of(launch) == [("run", "hung")]

    quick = live(Does(right), settings=_with(run_timeout=None))
    assert quick._timed is not None
    for _ in range(SETTINGS.probation + 1):
        quick([X, X])
    assert quick._timed is None

    runs = itertools.count()
    slow = live(
        Does(lambda i: hangs(i) if next(runs) > SETTINGS.probation + 3 else (time.sleep(4e-3), right(i))[1]),
        settings=_with(run_timeout=None),
    )
    for _ in range(SETTINGS.probation + 5):
        np.testing.assert_array_equal(np.asarray(getattr(slow([X, X])[0], "array", X + X)), X + X)
    free.set()
    assert failures_of(slow) == [("run", "hung")]

    slow.record.host_seconds.append(2.0)
    slow._limit_time(Does(right), True)
    assert slow._timed is not None
    assert slow._timed.seconds == 200.0
    slow._limit_time(Does(right), False)
    assert slow._timed is None


def test_no_call_overtakes_the_first_comparison() -> None:
    """While one thread compares the first result with the host's, which is wrong, others get the host's."""
    at_host, go = threading.Event(), threading.Event()

    def compare(arrays: Sequence[Any]) -> Any:
        if threading.current_thread() is first:
            at_host.set()
            go.wait(30)
        return [arrays[0] + arrays[1]]

    guard = Guard(_with(shadow=None), live=Does(lambda i: [r.array * 2 for r in right(i)]))
    launch = launch_of(guard, host=lambda: compare)
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(launch([X, X])[0]))
    launch([X, X])  # builds
    first.start()
    try:
        assert at_host.wait(30)
        np.testing.assert_array_equal(launch([X, X])[0], X + X)
    finally:
        go.set()
        first.join(30)
    np.testing.assert_array_equal(found[0], X + X)
    assert launch.record.state is State.REJECTED


def test_a_quick_run_that_hangs_late(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nothing can end it; the host answers all other calls, it is told, and the next process isolates the cluster."""
    monkeypatch.setattr(launch_module, "_SHORTEST_LIMIT", 0.2)
    free, hangs = threading.Event(), False
    launch = live(Does(lambda i: (hangs and free.wait(30), right(i))[1]), settings=_with(run_timeout=None))
    notes = LiveNotes(tmp_path)
    launch.note = notes.begin("a1" * 32)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:  # busy for longer than a run may take
        launch([X, X])
    assert launch._timed is None
    assert failures_of(launch) == []
    hangs = True
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(launch([X, X])[0]))
    caller.start()
    try:
        assert eventually(lambda: launch.record.state is State.FAILED, 20)
        np.testing.assert_array_equal(launch([X, X])[0], X + X)
        assert failures_of(launch) == [("run", "hung")]
        assert notes.is_suspect("a1" * 32)
        assert not found
    finally:
        free.set()
        caller.join(20)
    np.testing.assert_array_equal(np.asarray(found[0]), X + X)


def test_a_limit_for_runs_changes_no_result() -> None:
    """Neither on probation nor live, and threads are used again."""
    launch = live(Does(right), settings=_with(run_timeout=30.0))
    before = threading.active_count()
    for _ in range(20):
        assert isinstance(launch([X, X])[0], Own)
    assert threading.active_count() <= before + 1


def test_shadow_runs() -> None:
    """Every third call is compared; a difference gives the host's result and turns the cluster down for good."""
    wrong = False
    launch = live(Does(lambda i: [r.array * 2 for r in right(i)] if wrong else right(i)), settings=_with(shadow=3))
    for _ in range(SETTINGS.probation + 6):
        launch([X, X])
    assert launch.record.shadow_runs == 3
    wrong = True
    results = [launch([X, X])[0] for _ in range(3)]
    assert launch.record.state is State.REJECTED
    assert launch.record.reason == "wrong: a shadow run disagreed: " + launch.record.faults[-1].message
    np.testing.assert_array_equal(results[-1], X + X)
    np.testing.assert_array_equal(launch([X, X])[0], X + X)


def test_a_run_that_writes_into_its_input_is_found() -> None:
    """Also where it does so late, and past the read-only view that it is given, as native code may."""
    harms = False

    def run(inputs: Sequence[Any]) -> Any:
        results = right(inputs)
        if harms:
            ctypes.memset(inputs[0].ctypes.data, 0, inputs[0].nbytes)
        return results

    launch = live(Does(run), settings=_with(shadow=None))
    x = X.copy()
    launch([x, X])
    comparisons().wait()
    harms = True
    (got,) = launch([x, X])
    np.testing.assert_array_equal(got, X + X)
    assert launch.record.state is State.REJECTED
    assert "it wrote into its input" in launch.record.reason
    x = X.copy()
    np.testing.assert_array_equal(launch([x, X])[0], X + X)
    np.testing.assert_array_equal(x, X)


def test_a_live_executable_is_watched() -> None:
    """Calls 1, 2, 4, 8, ... are compared: the first before its results go out, the others in the background."""
    wrong = False
    executable = Does(lambda i: [r.array * 2 for r in right(i)] if wrong else right(i))
    launch = live(executable, settings=_with(shadow=None))
    compared = []
    for _ in range(40):
        before = launch.record.shadow_runs
        launch([X, X])
        comparisons().wait()
        if launch.record.shadow_runs > before:
            compared.append(launch.record.calls)
    assert compared[:4] == [1, 2, 4, 8]
    wrong = True
    while launch.record.state is State.LIVE:
        launch([X, X])
        comparisons().wait()
        assert launch.record.calls < 100_000
    assert launch.record.state is State.REJECTED
    assert "in doubt" in launch.record.reason
    assert f"results of its calls {compared[-1] + 1} to" in launch.record.reason
    np.testing.assert_array_equal(launch([X, X])[0], X + X)


def test_wrong_in_this_process_from_the_first_call_on() -> None:
    """No caller gets the numbers of an executable that was right elsewhere and is wrong here."""
    launch = live(Does(lambda i: [i[0] * 7]), settings=_with(shadow=None))
    for _ in range(5):
        np.testing.assert_array_equal(launch([X, X])[0], X + X)
    assert launch.record.state is State.REJECTED
    assert isinstance(launch._failures, Guard)
    assert launch._failures.disproved_by


@pytest.mark.parametrize("is_right", [False, True])
def test_nobody_waits_for_a_long_judgement(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host takes long, and the first results are not plainly its own, callers get the host's until the
    background knows whether that is rounding."""
    monkeypatch.setattr(launch_module, "_LONG_TO_WAIT", 0.0)
    monkeypatch.setattr(ResultChecker, "nearness", lambda *args: Nearness.FAR)
    judge, go = ResultChecker.check_results, threading.Event()

    def check_results(*args: Any) -> Any:
        assert go.wait(30)
        return judge(*args)

    monkeypatch.setattr(ResultChecker, "check_results", check_results)
    executable = Does(lambda i: right(i) if is_right else [i[0] * 7])
    launch = live(executable, settings=_with(shadow=None))
    try:
        for _ in range(3):
            np.testing.assert_array_equal(launch([X, X])[0], X + X)
        assert launch.record.state is State.LIVE
        assert executable.runs == 1
        assert launch.judged is not None
        assert not launch.judged.is_set()
    finally:
        go.set()
    assert launch.judged.wait(30)
    assert launch.record.state is (State.LIVE if is_right else State.REJECTED)
    np.testing.assert_array_equal(to_numpy(launch([X, X])[0]), X + X)
    assert executable.runs == 1 + is_right


@pytest.mark.parametrize(("off", "is_answering"), [(6e-5, True), (1e-3, False)])
@pytest.mark.parametrize("is_right", [False, True])
def test_results_nearly_within_bounds_go_out_while_they_are_judged(
    off: float, is_answering: bool, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a few elements are off by a few bounds, the host does not answer until it is known that this is rounding.
    If it is not, the cluster is rejected, and the calls are named."""
    monkeypatch.setattr(launch_module, "_LONG_TO_WAIT", 0.0)
    go = threading.Event()

    def check_results(*args: Any) -> Check:
        assert go.wait(30)
        return Check("" if is_right else "off")

    def run(inputs: Sequence[Any]) -> Any:
        (x,) = right(inputs)
        x.array.reshape(-1)[0] *= 1 + off
        return [x]

    x = np.random.default_rng(0).uniform(1, 2, (64, 64)).astype(np.float32)
    executable = Does(run)
    launch = live(executable, settings=_with(shadow=None), function=functions.binary("Add", *x.shape))
    monkeypatch.setattr(ResultChecker, "check_results", check_results)
    try:
        for _ in range(3):
            (got,) = launch([x, x])
            assert np.array_equal(to_numpy(got), x + x) is not is_answering
        assert launch.record.state is State.LIVE
        assert executable.runs == (3 if is_answering else 1)
        assert launch.record.shadow_runs == 1
        assert launch.judged is not None
        assert not launch.judged.is_set()
    finally:
        go.set()
    assert launch.judged.wait(30)
    assert launch.record.state is (State.LIVE if is_right else State.REJECTED)
    if not is_right:
        assert f"results of its calls 1 to {launch.record.calls} are in doubt" in launch.record.reason
    launch([x, x])
    comparisons().wait()
    assert launch.record.shadow_runs == 1 + is_right


@pytest.mark.parametrize("fault", ["", "wrong", "raises", "nan"])
def test_the_executable_before_answers_while_the_next_one_is_judged(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was right so far, and is quicker than the host. fault: of the next one, or of that before, meanwhile."""
    guard, go, late = Guard(_with(shadow=None, probation=1)), threading.Event(), False

    def run_before(i: Sequence[Any]) -> Any:
        if late and fault == "raises":
            raise RuntimeError("no")
        return [np.full_like(i[0], np.nan)] if late and fault == "nan" else right(i)

    guard.live = before = Does(run_before)
    launch = launch_of(guard)
    for _ in range(3):
        launch([X, X])
    comparisons().wait()
    monkeypatch.setattr(launch_module, "_LONG_TO_WAIT", 0.0)
    monkeypatch.setattr(ResultChecker, "nearness", lambda *args: Nearness.FAR)
    judge = ResultChecker.check_results

    def check_results(*args: Any) -> Any:
        assert go.wait(30)
        return judge(*args)

    monkeypatch.setattr(ResultChecker, "check_results", check_results)
    late, runs, following = True, before.runs, Does(lambda i: [i[0] * 7] if fault == "wrong" else right(i))
    assert launch.record.move_from(State.LIVE, State.READY, "raced")
    launch.go_live(following, "raced")
    try:
        for _ in range(3):
            np.testing.assert_array_equal(to_numpy(launch([X, X])[0]), X + X)
        assert following.runs == 1
        assert before.runs - runs == (1 if fault == "raises" else 2)
    finally:
        go.set()
    comparisons().wait()
    assert launch.record.state is (State.REJECTED if fault == "wrong" else State.LIVE)
    np.testing.assert_array_equal(to_numpy(launch([X, X])[0]), X + X)
    assert launch._before is None
    assert [k for _, k in guard.failures] == {"wrong": ["wrong numbers"], "raises": ["raised"]}.get(fault, [])


def test_a_comparison_that_ends_late_leaves_the_next_executable_alone() -> None:
    """What is found about an executable that no longer answers is recorded, and the one that does goes on."""
    guard, go = Guard(_with(shadow=None, probation=1)), threading.Event()
    guard.live = Does(lambda i: right(i) if i[0].max() < 100 else [i[0] * 7])
    launch = launch_of(guard)
    for _ in range(2):
        np.testing.assert_array_equal(to_numpy(launch([X, X])[0]), X + X)
    comparisons().wait()
    while launch._schedule.due > launch.record.calls:
        launch([X, X])
    comparisons().submit(lambda: go.wait(30))
    try:
        launch([X + 100, X])  # wrong, and its comparison waits for its turn
        assert launch.record.move_from(State.LIVE, State.READY, "raced")
        launch.go_live(Does(right), "raced")
        assert launch._before is guard.live
    finally:
        go.set()
    comparisons().wait()
    assert launch._before is None, "it is wrong"
    assert launch.record.state is State.LIVE
    assert guard.failures == [("shadow", "wrong numbers")]
    assert "another executable answers by now" in launch.record.faults[-1].message
    assert not guard.disproved_by
    np.testing.assert_array_equal(to_numpy(launch([X + 100, X])[0]), 2 * X + 100)


@pytest.mark.parametrize("fault", ["", "wrong", "raises", "writes", "wrong later"])
def test_a_call_that_the_host_has_answered_is_the_first_comparison(fault: str) -> None:
    """No caller waits for the host a second time, unless the executable does not agree with it."""
    computed: list[int] = []

    def host(arrays: Sequence[Any]) -> Any:
        computed.append(executable.runs)
        return [np.add(*map(to_numpy, arrays))]

    def run(inputs: Sequence[Any]) -> Any:
        if fault == "raises":
            raise RuntimeError("no")
        results = [inputs[0] + inputs[1]]
        if fault == "writes":
            ctypes.memset(inputs[0].ctypes.data, 0, inputs[0].nbytes)
        is_wrong = fault == "wrong" or (fault == "wrong later" and executable.runs > 2)
        return [r * 2 for r in results] if is_wrong else results

    executable = Does(run)
    launch = launch_of(Guard(_with(shadow=None)), host=lambda: host)
    launch.answered = Answered([X.copy(), X.copy()], [X + X], seconds=0.1)
    launch.record.move(State.READY)
    launch.go_live(executable, "verified")
    assert launch.answered is None
    assert executable.runs == 1, "before a caller waits for it"
    np.testing.assert_array_equal(launch([X.copy(), X.copy()])[0], X + X)
    assert bool(computed) == (fault in ("wrong", "raises", "writes"))
    assert launch.record.calls == 1
    if not fault:
        assert executable.runs == 2
        assert launch.record.shadow_runs == 1
    launch([X.copy(), X.copy()])
    comparisons().wait()
    assert (launch.record.state is State.LIVE) == (fault in ("", "raises"))
    if fault == "wrong later":  # call 1 was not compared itself
        assert "results of its calls 1 to 2 are in doubt" in launch.record.reason


def test_nan_from_finite_numbers() -> None:
    """It is a difference like any other."""
    launch = live(Does(lambda i: [np.full_like(i[0], np.nan)]), settings=_with(shadow=None))
    np.testing.assert_array_equal(launch([X, X])[0], X + X)
    assert launch.record.state is State.REJECTED


@pytest.mark.parametrize("run_timeout", [0, 5.0])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_late_nan_goes_to_no_caller(value: float, run_timeout: float) -> None:
    """Not only a call that is sampled is compared: one is too whose result is not finite, before it goes out."""
    late = False
    launch = live(
        Does(lambda i: [np.full_like(i[0], value)] if late else [i[0] + i[1]]),
        settings=_with(shadow=None, run_timeout=run_timeout),
    )
    for _ in range(100):
        launch([X, X])
        comparisons().wait()
    runs, late = launch.record.shadow_runs, True
    np.testing.assert_array_equal(launch([X, X])[0], X + X)
    assert launch.record.shadow_runs == runs + 1
    assert launch.record.state is State.REJECTED
    assert "of its calls" in launch.record.reason


class Foreign:
    """An array of another library, which NumPy can read."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.dtype, self.shape = array, array.dtype, array.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array


@pytest.mark.parametrize("kind", [np.asarray, Foreign])
def test_late_nan_within_a_result(kind: Any) -> None:
    """Where no end shows it, or the library's array cannot be looked at in passing, one of 64 calls is looked at."""
    late = False

    def run(i: Any) -> list[Any]:
        found = np.add(*i)
        if late:
            found[0, 0] = np.nan
        return [kind(found)]

    launch = live(Does(run), settings=_with(shadow=None, run_timeout=0))
    for _ in range(600):
        launch([X, X])
        comparisons().wait()
    launch._schedule.due = math.inf  # no sampled comparison comes to its help
    late = True
    results = [np.asarray(launch([X, X])[0]) for _ in range(128)]
    wrong = [i for i, r in enumerate(results) if np.isnan(r).any()]
    assert len(wrong) < 64
    assert wrong == list(range(len(wrong)))
    assert launch.record.state is State.REJECTED


def test_infinities_that_are_right_are_compared_ever_less() -> None:
    """At first, then after as many calls as there were."""
    launch = live(Does(lambda i: [i[0] + i[1]]), settings=_with(shadow=None))
    for _ in range(40):
        launch([X, X])
        comparisons().wait()
    runs, odd = launch.record.shadow_runs, np.full_like(X, np.inf)
    with np.errstate(all="ignore"):
        for _ in range(30):
            np.testing.assert_array_equal(launch([odd, X])[0], odd)
            comparisons().wait()
    assert launch.record.state is State.LIVE
    assert 1 <= launch.record.shadow_runs - runs <= 3


def test_a_watch_goes_on_after_what_it_could_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that fails, one for which there is no room, and inputs that the host rejects end no watch."""

    def no_room(work: Any, is_short: bool = False) -> bool:
        return False

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("a bug of the comparison")

    def rejects() -> Any:
        def host(arrays: Sequence[Any]) -> Any:
            raise InputError("not these")

        return host

    launch = live(Does(right), settings=_with(shadow=None))
    with monkeypatch.context() as patch:
        patch.setattr(launch_module, "ResultChecker", fails)
        np.testing.assert_array_equal(np.asarray(launch([X, X])[0]), X + X)
    assert launch.record.shadow_runs == 1
    launch([X, X])
    assert launch.record.shadow_runs == 2
    with monkeypatch.context() as patch:
        patch.setattr(comparisons(), "submit", no_room)
        for _ in range(4):
            launch([X, X])
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_host_run", rejects())
        for _ in range(64):
            launch([X, X])
            comparisons().wait()
    before = launch.record.shadow_runs
    for _ in range(500):
        launch([X, X])
        comparisons().wait()
    assert launch.record.shadow_runs > before
    assert launch.record.state is State.LIVE


def test_the_host_uses_fewer_threads_beside_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a caller waits for the first comparison: the threads of the engine may still spin."""
    bodies: list[str] = []

    @contextlib.contextmanager
    def fewer() -> Iterator[None]:
        bodies.append("begin")
        yield
        bodies.append("end")

    monkeypatch.setattr(launch_module, "fewer_blas_threads", fewer)
    launch = live(Does(right), settings=_with(shadow=None))
    host = launch.on_host
    monkeypatch.setattr(GuardedLaunch, "on_host", lambda self, arrays: bodies.append("host") or host(arrays))
    launch([X, X])
    assert bodies == ["begin", "host", "end"]


def test_an_executable_that_becomes_slow() -> None:
    """Three timed calls in a row, of every 64th, that take three times as long as the host: it is dropped."""
    slow = False

    def run(inputs: Sequence[Any]) -> Any:
        if slow:
            time.sleep(0.002)
        return right(inputs)

    launch = live(Does(run), settings=_with(shadow=0))
    launch.record.host_seconds.append(1e-4)
    for _ in range(200):
        launch([X, X])
    assert launch.record.state is State.LIVE
    slow = True
    for _ in range(3 * 64):
        launch([X, X])
    assert launch.record.state is State.FAILED
    assert "it has become slow" in launch.record.reason


def test_a_watch_that_costs_little() -> None:
    """The gap between comparisons grows until they take a hundredth of the time of the calls."""
    schedule = SamplingSchedule(None)
    due = []
    for n in range(1, 20_000):
        if schedule.is_due(n - 1):
            due.append(n)
            schedule.postpone(n, cost=0.01, seconds=0.001)
    assert due[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert {b - a for a, b in itertools.pairwise(due[12:])} == {1000}


def test_a_watch_of_calls_that_differ_in_size() -> None:
    """While comparisons cost more than their share, they are made of light calls, if such come in time."""
    rng = np.random.default_rng(0)
    calls = [np.zeros(int(n)) for n in rng.integers(1, 1000, 3000)]
    schedule, compared = SamplingSchedule(None), []
    for n, x in enumerate(calls, 1):
        if schedule.is_due(n - 1, [x]):
            compared.append((n, x.size))
            schedule.postpone(n, cost=0.2, seconds=0.1)
    early = [size for n, size in compared[1:] if n <= 200]
    assert len(early) >= 3  # half as many as of calls that are alike
    assert max(early) < 350  # of 500 in the mean; also among the first few calls
    late = [size for n, size in compared if n > 400]
    assert len(late) >= 8
    assert max(late) > 500
    schedule, due = SamplingSchedule(None), []
    for n in range(1, 200):  # a light one that never comes
        if schedule.is_due(n - 1, [np.zeros(1000 if n > 1 else 10)]):
            due.append(n)
            schedule.postpone(n, cost=0.2, seconds=0.1)
    assert due == [1, 18, 108]
    schedule, due = SamplingSchedule(None), []
    for n in range(1, 100):  # all of one size: none is waited for
        if schedule.is_due(n - 1, [np.zeros(1000)]):
            due.append(n)
            schedule.postpone(n, cost=0.2, seconds=0.1)
    assert due == [1, 3, 9, 27, 81]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have no priorities of their own")
def test_comparisons_yield_to_calls() -> None:
    """The thread that compares has a lower priority than those that call; no other thread's changes."""
    found: list[int] = []
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert comparisons().submit(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    comparisons().wait()
    assert found == [min(before + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_many_threads_at_once() -> None:
    """While it fails and is retired, every call of every thread gets the right numbers."""
    flaky = iter(range(1 << 30))

    def run(inputs: Sequence[Any]) -> Any:
        if next(flaky) % 5 == 4:
            raise RuntimeError("flaky")
        return right(inputs)

    launch = live(Does(run))
    wrong: list[int] = []

    def call(k: int) -> None:
        for _ in range(50):
            if not np.array_equal(launch([X, X * k])[0], X + X * k):
                wrong.append(k)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert launch.record.state is State.FAILED
    assert [m.state for m in launch.record.history].count(State.FAILED) == 1


def live(
    executable: Executable,
    *aliases: InputOutputAlias,
    settings: GuardSettings = SETTINGS,
    function: Function | None = None,
) -> GuardedLaunch:
    """A launch that has just gone live."""
    launch = launch_of(Guard(settings), *aliases, function=function)
    launch.record.move(State.READY)
    launch.go_live(executable, "verified")
    return launch


def failures_of(launch: GuardedLaunch) -> list[tuple[str, str]]:
    """Stage and kind of the failures that the launch has recorded."""
    assert isinstance(launch._failures, Guard)
    return launch._failures.failures


def _with(**changes: Any) -> GuardSettings:
    from dataclasses import replace

    return replace(SETTINGS, **changes)


def test_retired_while_its_probation_ends() -> None:
    """Whoever is first: an executable that was retired is never called again."""
    launch = launch_of(Guard(_with(failures=1, probation=1)), kind=_Slow)
    launch.record.move(State.READY)
    live = Does(right)
    launch.go_live(live, "")
    _Slow.ending.clear()
    _Slow.go_on.clear()
    first = threading.Thread(target=launch, args=([X, X],))
    first.start()
    assert _Slow.ending.wait(10)
    retiring = threading.Thread(target=launch.retire, args=(State.FAILED, "another thread's call failed"))
    retiring.start()  # it waits for the lock that the end of the probation holds
    _Slow.go_on.set()
    for t in (first, retiring):
        t.join(60)
        assert not t.is_alive()
    assert launch.record.state is State.FAILED
    launch.record.postpone(60.0)
    runs = live.runs
    assert not isinstance(launch([X, X])[0], Own)
    assert live.runs == runs


class _Slow(GuardedLaunch):
    """Stops in the middle of ending its probation."""

    __slots__ = ()
    ending, go_on = threading.Event(), threading.Event()

    def _live(self, executable: Executable) -> Callable[[Sequence[Any]], Any]:
        self.ending.set()
        self.go_on.wait(60)
        return super()._live(executable)


class Quiet:
    """Neighbours that are busy until they are not."""

    def __init__(self) -> None:
        self.busy = True

    def seconds(self) -> float:
        return 2.0

    def are_busy(self) -> bool:
        return self.busy


def test_a_choice_is_revisited_when_its_time_drifts() -> None:
    """Slower or faster than in the race by a quarter, by the median of eight calls; then its live time is expected.
    There is a rest between two races, which lasts longer the longer they take."""
    now = 0.0
    expectation = Expectation(lambda: now)

    def added(seconds: float) -> list[str]:
        return [why for _ in range(8) if (why := expectation.add(seconds))]

    expectation.begin(0.010, provisional=False)
    assert not added(0.020)  # too early
    now = 11.0
    assert not added(0.012)
    assert not [why for s in (*[0.5] * 3, *[0.010] * 5) if (why := expectation.add(s))]  # a few slow calls
    assert added(0.014) == ["a call takes 0.014 s, expected were 0.01 s"]
    assert not added(0.014)  # the race is on
    expectation.raced(0.2, provisional=False)
    expectation.begin(0.0, provisional=False)
    now += 41.0
    assert not added(0.014)
    assert not added(0.015)
    assert added(0.009)

    expectation = Expectation(lambda: now)
    expectation.begin(20e-6, provisional=False)
    now += 11
    assert not added(60e-6)  # what is around a short run takes time as well


def test_a_provisional_choice_is_revisited_on_a_quiet_machine() -> None:
    """Not before others leave the machine alone; a race that is provisional again has a longer rest."""
    now, neighbours = 0.0, Quiet()
    expectation = Expectation(lambda: now, neighbours)  # type: ignore[arg-type]

    def added() -> list[str]:
        return [why for _ in range(8) if (why := expectation.add(0.010))]

    expectation.begin(0.010, provisional=True)
    now = 100.0
    assert not added()
    neighbours.busy = False
    assert added() == ["it was chosen while the machine was busy"]
    expectation.raced(0.1, provisional=True)
    expectation.begin(0.0, provisional=True)
    added()  # what is expected
    now += 19
    assert not added()
    now += 2
    assert added()
    expectation.raced(0.1, provisional=False)
    expectation.begin(0.0, provisional=False)
    now += 1000
    assert not added()
    assert not added()


def test_a_live_launch_tells_of_a_drift() -> None:
    """Its timed calls are what is compared with the race; nothing is told of a choice that was not timed."""
    for timed, told in (("e", 1), ("", 0)):
        launch = live(Does(right))
        launch.record.outcome = Outcome("ready", (), "", {"e": 1.0}, timed=timed)
        drifted: list[str] = []
        launch._failures.drifted = lambda launch, why, to=drifted: to.append(why)  # type: ignore
        launch.expectation = Expectation(itertools.count(0, 100).__next__)
        launch.expectation.begin(1.0, provisional=False)
        for _ in range(64 * 9):
            comparisons().wait()
            launch([X, X])
        assert len(drifted) == told


def test_calls_beside_a_comparison_tell_of_no_drift() -> None:
    """What the host's runs take from the machine is no reason to choose again."""
    launch, done = live(Does(right)), threading.Event()
    launch.record.outcome = Outcome("ready", (), "", {"e": 1.0}, timed="e")
    drifted: list[str] = []
    launch._failures.drifted = lambda launch, why: drifted.append(why)  # type: ignore
    launch.expectation = Expectation(itertools.count(0, 100).__next__)
    launch.expectation.begin(1.0, provisional=False)
    comparisons().wait()
    assert comparisons().submit(done.wait)
    try:
        for _ in range(64 * 9):
            launch([X, X])
        assert not drifted
    finally:
        done.set()
    comparisons().wait()
    for _ in range(64 * 9):
        launch([X, X])
        comparisons().wait()
    assert drifted
