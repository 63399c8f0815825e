"""The stress test: results that are held, two threads, leaks, and the state of the process."""

from __future__ import annotations

import contextlib
import gc
import locale
import logging
import mmap
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from tests.guard import engines as tested
from tests.guard.guarded import captured_events, chain, fallbacks, fresh, module, registered
from tests.verify.planted import Planted, deep
from xrt_core.engine.boundary import ASPECTS, beside_the_program, changed, preserved_state, restore, snapshot
from xrt_core.engine.contract import Executable, Function
from xrt_core.guard import stress as stress_module
from xrt_core.guard.stress import HELD, ROUNDS, SIDE_EFFECT, SerialExecutable, StressTest
from xrt_core.guard.timeouts import running
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.guard.worker import _answer
from xrt_core.module import XRTModule
from xrt_core.verify.checker import ResultChecker
from xrt_core.verify.evaluate import EvaluationSettings, StressResult, evaluate
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.isolate import Candidate

CHECK = EvaluationSettings(tune=False, edges=False)
FUNCTION = deep(4)


class Acts(Executable):
    """Is right, and does something at each run; what that returns takes the place of the results."""

    def __init__(self, act: Callable[[int, list[np.ndarray]], Any]) -> None:
        self._run = Planted().candidate.compile(FUNCTION, True).run
        self._act = act
        self.runs = 0

    def run(self, inputs: Sequence[Any], run_options: Any = None, block_until_done: bool = True) -> Sequence[Any]:
        self.runs += 1
        results = list(self._run(inputs))
        found = self._act(self.runs, results)
        return found if isinstance(found, list) else results


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """The state of the process as it was, and no engine blamed."""
    before = snapshot()
    yield
    restore(ASPECTS.values(), before)
    stress_module._harmful.clear()
    stress_module._notes.clear()


FIRST = 5
"""The first run of the stress test, behind two of each checker: on a busy machine its time ends before a tenth."""


def stressed(act: Callable[[int, list[np.ndarray]], Any], owns_process: bool = True) -> StressResult:
    """The stress test of an engine that does this at every run."""
    executable = Acts(act)
    checkers = [ResultChecker(FUNCTION, synthesize_inputs(FUNCTION, kind)) for kind in ("normal", "ties")]
    for c in checkers:
        assert c.check(executable, {}).is_right
    candidate = Candidate("acts", lambda f, fused: executable)
    return StressTest(owns_process)(candidate, executable, checkers, 1e-4)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time enough on a busy machine."""
    monkeypatch.setattr(stress_module, "SECONDS", 2.0)


def test_a_quiet_engine_passes() -> None:
    """Nothing is found, noted or serialised, and the runs are bounded."""
    assert stressed(lambda run, results: None) == StressResult()


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("size", [8, 16])
def test_a_ring_of_buffers_is_found(size: int) -> None:
    """Results of earlier runs must keep their memory, also in a process with others in it."""
    ring: list[list[np.ndarray]] = []

    def reuse(run: int, results: list[np.ndarray]) -> Any:
        ring[:] = ring or [[np.empty_like(r) for r in results] for _ in range(size)]
        for kept, r in zip(ring[run % size], results, strict=True):
            kept[...] = r
        return ring[run % size]

    assert size < HELD
    assert "earlier run" in (found := stressed(reuse, owns_process=False).reason) or "changed during" in found


def test_results_that_change_later_are_found() -> None:
    """Also where each run has its own memory."""
    held: list[np.ndarray] = []

    def change(run: int, results: list[np.ndarray]) -> Any:
        held.append(results[0])
        if len(held) > 9:
            held[-9][...] += 1

    assert "changed during" in stressed(change).reason


def test_wrong_after_a_dozen_runs() -> None:
    """Single runs were right."""
    found = stressed(lambda run, results: [r + 1 for r in results] if run > 12 else None)
    assert "in a row" in found.reason
    assert "out of bounds" in found.reason


def unthreaded() -> Callable[[int, list[np.ndarray]], Any]:
    """Right on one thread only."""
    shared: dict[str, list[np.ndarray]] = {}

    def act(run: int, results: list[np.ndarray]) -> Any:
        shared["now"] = results
        time.sleep(2e-4)
        return [r.copy() for r in shared["now"]]

    return act


def test_wrong_on_two_threads_is_serialised(patience: None) -> None:
    """The engine keeps the cluster, its reason says that runs take turns, and they do."""
    assert stressed(unthreaded()) == StressResult(serialised=True)
    outcome = evaluate(
        FUNCTION, [Candidate("acts", lambda f, fused: Acts(unthreaded()))], CHECK, stress=StressTest(False)
    )
    assert (outcome.verdict, outcome.serialised) == ("ready", True)
    assert "take turns" in outcome.reason

    made = SerialExecutable(Acts(unthreaded()), ["acts"])
    inputs = [synthesize_inputs(FUNCTION, "normal", seed) for seed in range(4)]
    want = [made.run(x)[0] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for got, right in zip(pool.map(lambda x: made.run(x)[0], inputs), want, strict=True):
                np.testing.assert_array_equal(got, right)


def one_at_a_time(seconds: float) -> Callable[[int, list[np.ndarray]], Any]:
    """Raises if another thread is inside."""
    busy = threading.Lock()

    def act(run: int, results: list[np.ndarray]) -> Any:
        if not busy.acquire(blocking=False):
            raise RuntimeError("only one at a time")
        time.sleep(seconds)
        busy.release()

    return act


def test_an_engine_that_raises_on_two_threads_is_serialised(patience: None) -> None:
    """Whatever goes wrong there."""
    assert stressed(one_at_a_time(2e-4)) == StressResult(serialised=True)


def test_what_threads_break_for_good_is_rejected(patience: None) -> None:
    """If it is wrong on one thread after it was run on two, turns do not help."""
    state = {"busy": False, "broken": False}

    def act(run: int, results: list[np.ndarray]) -> Any:
        state["broken"] |= state["busy"]
        state["busy"] = True
        time.sleep(2e-4)
        state["busy"] = False
        return [r + 1 for r in results] if state["broken"] else None

    assert "out of bounds" in stressed(act).reason


# --- what the process holds -------------------------------------------------------------------------------------------


def test_a_leak_of_memory_is_found(patience: None) -> None:
    """As many bytes as it keeps of each run; one that keeps nothing after its first runs is fine."""
    kept: list[mmap.mmap] = []

    def leak(run: int, results: list[np.ndarray]) -> None:
        # new pages: an allocator of a process with many tests behind it has free ones
        pages = mmap.mmap(-1, 200 << 10, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(b"x" * (200 << 10))
        kept.append(pages)

    def warm(run: int, results: list[np.ndarray]) -> None:
        if run < 10:
            leak(run, results)

    found = stressed(leak).reason
    assert found.startswith(f"{SIDE_EFFECT}each run leaks ")
    assert found.endswith("KiB of memory")
    assert stressed(warm) == StressResult()


def test_a_cycle_is_no_leak() -> None:
    """What the garbage collector frees does not count."""
    gc.disable()

    def act(run: int, results: list[np.ndarray]) -> None:
        cycle: list[Any] = [np.ones(100 << 10, np.uint8)]
        cycle.append(cycle)
        if not run % 20:
            gc.collect()

    assert stressed(act).reason == ""


def test_a_leak_of_open_files_is_found(patience: None) -> None:
    """Where the platform tells how many there are."""
    opened: list[int] = []
    try:
        found = stressed(lambda run, results: opened.append(os.open(os.devnull, os.O_RDONLY)))
    finally:
        for fd in opened:
            os.close(fd)
    assert found.reason == f"{SIDE_EFFECT}each run leaks 1 open files"


def test_a_leak_of_threads_is_found(patience: None) -> None:
    """Daemon threads too; a pool that is started once is none."""
    stop = threading.Event()

    def start(run: int, results: list[np.ndarray]) -> None:
        threading.Thread(target=stop.wait, daemon=True).start()

    try:
        assert stressed(start).reason.endswith(" 1 threads")
        with ThreadPoolExecutor(3) as pool:
            assert stressed(lambda run, results: pool.submit(int).result() and None) == StressResult()
    finally:
        stop.set()


def test_a_thread_that_the_program_would_wait_for() -> None:
    """One that is no daemon and does not end rejects, one that ends does not."""
    stop = threading.Event()
    started: list[threading.Thread] = []

    def start(target: Callable[[], object]) -> Callable[[int, list[np.ndarray]], None]:
        def act(run: int, results: list[np.ndarray]) -> None:
            if run == FIRST:
                started.append(threading.Thread(target=target, name="keeps on"))
                started[-1].start()

        return act

    assert stressed(start(lambda: time.sleep(0.02))).reason == ""
    try:
        found = stressed(start(stop.wait))
    finally:
        stop.set()
        for t in started:
            t.join()
    assert found.reason == f"{SIDE_EFFECT}it started threads that keep the program from ending when it ran: 'keeps on'"


def test_a_child_process_is_noted() -> None:
    """One that stays is no reason to reject."""
    children: list[subprocess.Popen[bytes]] = []

    def act(run: int, results: list[np.ndarray]) -> None:
        if run == FIRST:
            children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

    try:
        found = stressed(act)
    finally:
        for c in children:
            c.communicate(b"\n")
    assert (found.reason, found.notes) == ("", ("it started 1 processes that stay",))


# --- the state of the process -----------------------------------------------------------------------------------------


def _other_locale() -> None:
    for name in ("C", "C.UTF-8", "en_US.UTF-8", "POSIX"):
        before = locale.setlocale(locale.LC_ALL)
        with contextlib.suppress(locale.Error):
            if locale.setlocale(locale.LC_ALL, name) != before:
                return
    pytest.skip("there is one locale")


def _flush_to_zero() -> None:
    control = ASPECTS["the floating-point environment"]
    value = control.read()
    if value is None:
        pytest.skip("no floating-point environment is understood here")
    control.restore((value[0], value[1] ^ 0x8000) if value[1] else (bytes([value[0][0]]) + b"\0\0\1", 0))  # type: ignore[misc]


def _fewer_processors() -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one processor")
    os.sched_setaffinity(0, mine[:1])


REJECTED: dict[str, Callable[[], object]] = {
    "NumPy's error state": lambda: np.seterr(all="ignore"),
    "the floating-point environment": _flush_to_zero,
    "the working directory": lambda: os.chdir("/"),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "interval timers": lambda: signal.setitimer(signal.ITIMER_REAL, 3600.0),
    "the CPU affinity": _fewer_processors,
    "random's state": lambda: random.seed(0),
    "NumPy's random state": lambda: np.random.seed(0),
    "the umask": lambda: os.umask(0o007),
    "the locale": _other_locale,
    "the standard streams": lambda: setattr(sys, "stdout", sys.__stdout__ if sys.stdout is sys.stderr else sys.stderr),
    "the garbage collector": lambda: gc.set_threshold(1234),
    "the switch interval": lambda: sys.setswitchinterval(0.5),
}
NOTED: dict[str, Callable[[], object]] = {
    "the environment": lambda: os.environ.update(XRT_TEST_STRESS="1"),
    "warnings filters": lambda: warnings.simplefilter("always"),
    "the root logger": lambda: logging.getLogger().addHandler(logging.NullHandler()),
    "the recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "the interpreter's hooks": lambda: setattr(sys, "excepthook", lambda *a: None),
    "sys.path": lambda: sys.path.append("/nowhere"),
}


@pytest.fixture
def _unrestored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the aspects that are only noted change is put back."""
    monkeypatch.delenv("XRT_TEST_STRESS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    limit, root = sys.getrecursionlimit(), logging.getLogger()
    handlers = list(root.handlers)
    with warnings.catch_warnings():
        yield
    sys.setrecursionlimit(limit)
    root.handlers[:] = handlers
    os.environ.pop("XRT_TEST_STRESS", None)


@pytest.mark.usefixtures("_unrestored")
@pytest.mark.parametrize("name", [*REJECTED, *NOTED])
def test_what_a_run_changes(name: str) -> None:
    """It is named, the harmful rejects, and what can be restored is."""
    before = snapshot()
    change = {**REJECTED, **NOTED}[name]
    found = stressed(lambda run, results: change() if run == FIRST else None)
    (note,) = found.notes
    assert note.startswith(f"it changed {name}")
    assert note.endswith("when it ran")
    assert found.reason == (SIDE_EFFECT + note if name in REJECTED else "")
    assert ("XRT_TEST_STRESS" in note) == (name == "the environment")
    if name in REJECTED:
        assert not changed(before, snapshot())


def test_every_aspect_is_tried_here() -> None:
    """But for those that cannot be changed back, and what a test may not touch."""
    assert {*REJECTED, *NOTED} | {"the priority", "resource limits", "NumPy's print options"} == set(ASPECTS)


@pytest.mark.parametrize(("act", "is_rejected"), [(lambda: os.umask(0o007), True), (lambda: os.chdir("/"), False)])
def test_what_a_compilation_changes(act: Callable[[], object], is_rejected: bool) -> None:
    """What the boundary does not restore in the caller's process rejects, for good: a library is loaded once."""
    done: list[object] = []

    def compile(f: Function, fused: bool) -> Executable:
        if not done:
            done.append(act())
        return Acts(lambda run, results: None)

    for _ in range(2):
        stress = StressTest(True)

        def build(f: Function, fused: bool, stress: StressTest = stress) -> Executable:
            with stress.compiling("acts"):
                return compile(f, fused)

        outcome = evaluate(FUNCTION, [Candidate("acts", build)], CHECK, stress=stress)
        assert outcome.verdict == ("wrong" if is_rejected else "ready")
        assert ("umask" in outcome.reason) == is_rejected


def test_a_shared_process_is_not_watched() -> None:
    """What other threads of the program change is not the engine's."""
    change = iter(range(10**6))
    found = stressed(lambda run, results: random.seed(next(change)), owns_process=False)
    assert found == StressResult()


def test_a_slow_engine_is_run_a_few_times() -> None:
    """The test takes no longer than 3/4 of a run of the host, or 50 ms."""
    executable = Acts(lambda run, results: None)
    checker = ResultChecker(FUNCTION, synthesize_inputs(FUNCTION))
    checker.expected()
    slow = StressTest(True)(Candidate("acts", lambda f, fused: executable), executable, [checker], 3.0)
    assert (slow, executable.runs) == (StressResult(), 0)
    StressTest(True)(Candidate("acts", lambda f, fused: executable), executable, [checker], 0.04)
    assert 0 < executable.runs < HELD + 2 * ROUNDS


def test_pieces_are_tested_as_well(patience: None) -> None:
    """What stays after faulty nodes went to the host is serialised if need be."""
    function, act = deep(12), one_at_a_time(2e-3)

    def compile(f: Function, fused: bool) -> Executable:
        made = Planted(lambda n, k: n.op_type == "Erf").candidate.compile(f, fused)
        run = made.run

        def acting(*a: Any) -> Any:
            results = list(run(*a))
            act(0, results)
            return results

        made.run = acting  # type: ignore[method-assign]
        return made

    outcome = evaluate(function, [Candidate("planted", compile)], CHECK, stress=StressTest(False))
    assert (outcome.verdict, outcome.serialised) == ("ready", True)
    assert {p.engine for p in outcome.pieces} == {"planted", "host"}


# --- through the guard ------------------------------------------------------------------------------------------------


@pytest.fixture
def _engines(own_cache: Any) -> Iterator[None]:
    fresh()
    with registered(*tested.ALL):
        yield


def _calls(m: XRTModule, inputs: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> int:
    """How many of some calls on four threads are wrong."""
    with ThreadPoolExecutor(4) as pool:
        jobs = [(pool.submit(m, x), y) for _ in range(4) for x, y in zip(inputs, want, strict=True)]
        return sum(not np.allclose(job.result(), y, rtol=1e-4) for job, y in jobs)


@pytest.mark.usefixtures("_engines")
def test_a_serialised_engine_is_right_on_four_threads() -> None:
    """From the first verdict on, and by one from the cache; the report says so."""
    graph, x, _ = chain()
    inputs = [x * np.float32(k) for k in (0.5, 1, 2, 3)]
    with XRTModule(graph, engine="host") as host:
        want = [host(i) for i in inputs]
    for _ in range(2):
        with module(graph, "unthreaded", guard_tune=False, guard_shadow=0) as m:
            m(x)
            assert m.wait(60)
            assert m.report().clusters[0]["outcome"]["serialised"], m.report()
            assert "take turns" in m.report().as_text()
            assert _calls(m, inputs, want) == 0
        forget_all()


@pytest.mark.usefixtures("_engines")
@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("ring_of_16", "wrong numbers", "earlier run"),
        ("leaks", "side effect", "each run leaks"),
        ("changes_umask", "side effect", "the umask"),
    ],
)
def test_what_the_worker_finds(name: str, kind: str, says: str) -> None:
    """The cluster stays with the host, and the event and the report say why."""
    graph, x, y = chain()
    with captured_events() as events, module(graph, name, guard_tune=False) as m:
        np.testing.assert_array_equal(m(x), y)
        assert m.wait(60)
        (cluster,) = m.report().clusters
        assert cluster["state"] == "rejected"
        assert says in m.report().as_text()
        assert fallbacks(events) == [("examine", kind)]


def test_what_a_probe_changes() -> None:
    """It is the answer, so that the caller's process does not import the engine; and it holds for later clusters."""
    with registered(tested.ChangesUmaskWhenProbed):
        tested._once.clear()
        found = _answer({"query": "probe", "engine": {"name": "changes_umask_when_probed"}}, lambda answer: None)
    assert found["kind"] == "side effect"
    assert "the umask at the query 'probe'" in found["error"]
    assert stress_module._harmful["changes_umask_when_probed"] == found["error"]


def test_what_is_changed_beside_the_program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may be the program's own change while a background task runs, and stays; where a caller
    waits it is restored."""
    (tmp_path / "other").mkdir()
    for is_beside in (False, True, False):
        monkeypatch.chdir(tmp_path)
        with beside_the_program() if is_beside else contextlib.nullcontext(), preserved_state("test"):
            os.chdir("other")
        assert pathlib.Path.cwd() == (tmp_path / "other" if is_beside else tmp_path)
    told: list[bool] = []

    def prepare() -> None:
        with running(cast("Any", object())), preserved_state("test"):
            os.chdir(tmp_path / "other")  # by whom is not known
            told.append(True)

    thread = threading.Thread(target=prepare)
    thread.start()
    thread.join(30)
    assert told
    assert pathlib.Path.cwd() == tmp_path / "other"
