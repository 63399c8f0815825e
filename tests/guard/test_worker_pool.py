"""Worker processes: how their ends are diagnosed, that they never outlive their parent, and the pool that runs them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.guard.guarded import eventually, gone, is_running
from xrt_core.engine.boundary import inner_of
from xrt_core.errors import EngineError
from xrt_core.guard import worker_pool
from xrt_core.guard.worker import engine_of
from xrt_core.guard.worker_pool import (
    LOG_BYTES,
    Job,
    Worker,
    WorkerFailure,
    WorkerPool,
    WorkerSlot,
    own_memory,
)
from xrt_core.testing.host_engine import HostEngine

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
EMPTY = {"folder": "/nonexistent", "timeout": 60.0}
"""A request that the worker refuses: there is nothing in the folder."""


def test_engines_by_class() -> None:
    """An engine of a module is found by name and class; one that cannot be imported is an error that says so."""
    described = {"name": HostEngine.name, "module": HostEngine.__module__, "class": "HostEngine"}
    from xrt_core.engine import engines

    try:
        assert type(inner_of(engine_of(described))) is HostEngine
        assert engine_of(described) is engine_of(described)
    finally:
        engines.unregister(HostEngine.name)
    with pytest.raises(EngineError, match=r"test_worker_pool.f.<locals>.E, which another process cannot import"):
        engine_of({"name": "e", "module": __name__, "class": "f.<locals>.E"})


# --- how a worker ends -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Worker]]:
    """The worker that the tests of this module use one after another, as long as none has killed it."""
    workers: list[Worker] = []
    yield workers
    for made in workers:
        made.kill()


@pytest.fixture
def worker(shared: list[Worker]) -> Worker:
    if not shared or not shared[-1].alive:
        shared.append(Worker())
    return shared[-1]


def test_it_answers_and_is_used_again(worker: Worker) -> None:
    """An error of a job is an answer, and the process serves on."""
    for _ in range(2):
        answer = worker.run(EMPTY, 30, 0, lambda _: None)
        assert answer.kind == "unusable"
        assert "function.onnx" in (answer.error or "")
    assert worker.alive


@pytest.mark.parametrize(
    ("number", "kind", "match"),
    [
        (signal.SIGSEGV, "crashed", "SIGSEGV"),
        (signal.SIGABRT, "crashed", "SIGABRT"),
        (signal.SIGKILL, "crashed", "not by the system"),
    ],
)
def test_a_signal_is_diagnosed_with_the_log(worker: Worker, number: signal.Signals, kind: str, match: str) -> None:
    """Kind, signal and, of a crash, the Python stack that faulthandler left in the log."""
    worker.run(EMPTY, 60, 0, lambda _: None)  # it is up, with faulthandler on
    os.kill(worker.pid, number)
    with pytest.raises(WorkerFailure, match=match) as e:
        worker.run(EMPTY, 30, 0, lambda _: None)
    assert e.value.kind == kind
    assert e.value.exit_code == -number
    assert ("worker.py" in e.value.log) == (number != signal.SIGKILL)
    assert not worker.alive


def test_a_kill_for_want_of_memory(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts the processes that it ends so."""
    worker.run(EMPTY, 60, 0, lambda _: None)
    monkeypatch.setattr(worker_pool, "oom_kills", lambda: worker._oom_kills + 1)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerFailure, match="as memory ran out") as e:
        worker.run(EMPTY, 30, 0, lambda _: None)
    assert e.value.kind == "memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "kind", "match"),
    [
        ("'[' * 100_000", "crashed", "nested more than 64 levels"),
        ("'\"error\"'", "crashed", "Expected `object`, got `str`"),
        ("'{\"supports\": [1]}'", "crashed", r"\$.supports\[0\]"),
        ('\'{"outcome": {"verdict": "ready"}}\'', "crashed", r"missing required field `pieces`"),
        ('\'{"stage": "verifying"}\'', "hung", "time limit"),
    ],
    ids=["deep", "type", "path", "outcome", "endless"],
)
def test_what_is_no_answer_ends_the_worker(monkeypatch: pytest.MonkeyPatch, says: str, kind: str, match: str) -> None:
    """An answer of other JSON, or progress without end, is a failure like any other, and nothing else is raised."""
    program = f"import sys\nprint('{{}}', flush=True)\nwhile True: sys.stdout.write({says} + chr(10))"
    monkeypatch.setattr(worker_pool, "_PROGRAM", program)
    worker = Worker()
    with pytest.raises(WorkerFailure, match=match) as e:
        worker.run(EMPTY, 1.0, 0, lambda _: None)
    assert e.value.kind == kind
    assert gone([worker.pid])


def test_one_that_hangs_is_killed(worker: Worker) -> None:
    """After its limit, whatever it does."""
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerFailure, match="time limit") as e:
        worker.run(EMPTY, 0.1, 0, lambda _: None)
    assert e.value.kind == "hung"
    assert gone([worker.pid])


def test_one_that_holds_too_much_is_killed(worker: Worker) -> None:
    """Its own memory counts; the message says how much it was."""
    held = own_memory(worker.pid)
    assert held > 1 << 20
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerFailure, match=r"it held \d+ MiB, its limit is 1 MiB") as e:
        worker.run(EMPTY, 30, 1 << 20, lambda _: None)
    assert e.value.kind == "memory"
    assert gone([worker.pid])


def test_mapped_files_do_not_count_as_memory(tmp_path: pathlib.Path) -> None:
    """A model's weights that a process maps are not its own."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 << 20))
    before = own_memory(os.getpid())
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    assert own_memory(os.getpid()) - before < 32 << 20


def test_the_log_is_its_tail(worker: Worker) -> None:
    """The last of it, no more than `LOG_BYTES`."""
    with open(worker._log_path, "ab") as f:
        f.write(b"early\n" + b"x" * LOG_BYTES + b"\nlate\n")
    assert worker.log().endswith("late")
    assert "early" not in worker.log()
    assert worker.log(worker._log_path.stat().st_size) == ""


def test_its_files_go_with_it() -> None:
    """No folder is left."""
    made = Worker()
    folder = made._folder
    assert folder.is_dir()
    made.kill()
    assert not folder.exists()
    assert gone([made.pid])


PARENT = """
    import os, signal, sys, threading, time
    from xrt_core.guard.worker_pool import Job, process_pool
    def work(slot):
        try:
            slot.run({"folder": sys.argv[2], "timeout": 60.0}, 60.0, 0, lambda s: None)
        except Exception as e:
            print("failed", e, flush=True)
        print(*process_pool().pids(), flush=True)
    job = Job(work, None)
    process_pool().submit(job)
    job.done.wait()
    if sys.argv[1] == "return":
        sys.exit(0)
    if sys.argv[1] == "busy":
        os.kill(process_pool().pids()[0], signal.SIGSTOP)
        second = Job(work, None)
        process_pool().submit(second)
        while process_pool()._slots[0].job is not second:
            time.sleep(0.005)
        sys.exit(0)
    signal.pause()
"""


@pytest.mark.parametrize(
    "end", [pytest.param("return", marks=pytest.mark.slow), "busy", pytest.param("kill", marks=pytest.mark.slow)]
)
def test_no_worker_outlives_its_parent(end: str, tmp_path: pathlib.Path) -> None:
    """Whether the parent returns, returns while a job hangs, or is killed; and it never waits."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), end, str(tmp_path / "none")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert pids
    if end == "kill":
        assert is_running(pids[0])
        parent.kill()
    parent.wait(60)
    assert gone(pids)
    parent.stdout.close()


# --- the pool --------------------------------------------------------------------------------------------------------


def test_the_pool_starts_nothing_before_it_has_to() -> None:
    """No thread without a job, no process without one that asks for it, and few of both."""
    pool = WorkerPool(2)
    assert pool._slots == []
    together = threading.Barrier(2)  # no job ends before two run at a time
    jobs = [Job(lambda slot: (together.wait(60), None)[1], None) for _ in range(6)]
    for job in jobs:
        pool.submit(job)
    assert all(job.done.wait(60) for job in jobs)
    assert len(pool._slots) == 2
    assert pool.pids() == []


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is refused, and the pool works as soon as there are threads again."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = WorkerPool(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(WorkerFailure, match="can't start new thread"):
            pool.submit(Job(lambda slot: None, None))
    job = Job(lambda slot: None, None)
    pool.submit(job)
    assert job.done.wait(60)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(3)])
def test_a_job_that_raises_costs_no_thread(error: BaseException) -> None:
    """It is logged, and the next job is done."""

    def bad(slot: WorkerSlot) -> None:
        raise error

    pool = WorkerPool(1)
    jobs = [Job(bad, None), Job(lambda slot: None, None)]
    for job in jobs:
        pool.submit(job)
    assert all(job.done.wait(60) for job in jobs)


def test_cancelling_is_for_one_owner() -> None:
    """The running job of that owner fails as closed; others go on."""
    pool = WorkerPool(1)
    found: list[str] = []

    def work(slot: WorkerSlot) -> None:
        try:
            slot._worker = Worker()
            os.kill(slot._worker.pid, signal.SIGSTOP)
            slot.run(EMPTY, 60, 0, lambda _: None)
        except WorkerFailure as e:
            found.append(e.kind)

    job = Job(work, "mine")
    pool.submit(job)
    assert eventually(pool.pids)
    pool.cancel("other")
    assert pool.pids()
    assert not job.done.is_set()
    pool.cancel("mine")
    assert job.done.wait(60)
    assert found == ["closed"]


def test_a_job_that_is_cancelled_before_it_has_a_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have had a worker that nobody kills, and run to its end."""
    pool, said = WorkerPool(1), []

    def start() -> Worker:
        pool.cancel_job(mine)
        return Worker()

    def work(slot: WorkerSlot) -> None:
        with pytest.raises(WorkerFailure, match="the job was cancelled") as caught:
            slot.run(EMPTY, 60.0, 0, lambda message: None)
        said.append(caught.value.kind)

    monkeypatch.setattr(worker_pool, "Worker", start)
    mine = Job(work, "mine")
    pool.submit(mine)
    assert mine.done.wait(60)
    pool.close()
    assert said == ["closed"]


def test_cancelling_one_job_ends_its_request() -> None:
    """Its worker is killed, and the job is told; the next job has a worker of its own, and others are left alone."""
    pool = WorkerPool(1)
    said: list[str] = []

    def hang(slot: WorkerSlot) -> None:
        slot._worker = Worker()
        os.kill(slot._worker.pid, signal.SIGSTOP)
        begun.set()
        with pytest.raises(WorkerFailure, match="the job was cancelled") as caught:
            slot.run(EMPTY, 60.0, 0, lambda message: None)
        said.append(caught.value.kind)

    begun, mine = threading.Event(), Job(hang, "mine")
    pool.submit(mine)
    assert begun.wait(60)
    pool.cancel_job(Job(hang, "mine"))
    assert not mine.cancelled
    pool.cancel_job(mine)
    assert mine.done.wait(60)
    assert said == ["closed"]
    after = Job(lambda slot: said.append(str(slot.run(EMPTY, 60.0, 0, lambda message: None).error is not None)), "mine")
    pool.submit(after)
    assert after.done.wait(60)
    assert said == ["closed", "True"]
    pool.close()


@pytest.mark.slow
def test_one_worker_at_a_time_uses_the_device() -> None:
    """Requests that may use a GPU wait for each other, and the worker that used it before gives its memory back."""
    one, other = WorkerSlot(), WorkerSlot()
    at_once, most = 0, 0
    lock = threading.Lock()

    def progress(change: int) -> None:
        nonlocal at_once, most
        with lock:
            at_once += change
            most = max(most, at_once)

    def ask(slot: WorkerSlot, on_device: bool) -> None:
        plain = slot._run

        def run(*request: Any) -> Any:
            progress(1)
            try:
                return plain(*request)
            finally:
                progress(-1)

        slot._run = run  # type: ignore[method-assign]
        slot.run(EMPTY, 60, 0, lambda message: None, on_device=on_device)

    try:
        threads = [threading.Thread(target=ask, args=(slot, True)) for slot in (one, other)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert most == 1
        last = worker_pool._device.used_by
        assert last in (one, other)
        assert [s for s in (one, other) if s._worker is not None] == [last], "the other worker keeps a context"
        free = other if last is one else one
        ask(free, False)  # what needs no device takes no worker away
        assert last._worker is not None
        assert free._worker is not None
    finally:
        one.kill()
        other.kill()
