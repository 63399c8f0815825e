"""The child process: what crosses to it, what its end looks like from here, and that it never outlives anybody."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from tests.guard.guarded import gone, is_running
from xrt_core.errors import EngineError, ModelLoadError
from xrt_core.frontends.onnx_export import save
from xrt_core.frontends.onnx_import import import_function
from xrt_core.guard import ipc
from xrt_core.guard.worker import engine_of
from xrt_core.guard.worker_pool import LOG_BYTES, Job, Pool, Worker, WorkerFailure, WorkerSlot, own_memory
from xrt_core.ir.annotations import Annotations
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Value
from xrt_core.testing import functions
from xrt_core.testing.host_engine import HostEngine

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
EMPTY = {"folder": "/nonexistent", "timeout": 60.0}
"""A request that the child refuses: there is nothing in the folder."""


# --- what crosses ----------------------------------------------------------------------------------------------------


def test_a_function_crosses_with_its_constants(tmp_path: pathlib.Path) -> None:
    """Same fingerprint on the other side; constants that lie in no file are written once."""
    function, _ = functions.chain()
    ipc.write_function(function, tmp_path)
    back = ipc.read_function(tmp_path)
    assert back.fingerprint == function.fingerprint
    assert back.as_text() == function.as_text()


def test_types_and_annotations_cross(tmp_path: pathlib.Path) -> None:
    """Engines say yes or no by the types of inner values, and folding by annotations."""
    function = functions.update(8)
    mark = Annotations(phase="train", model_update=True, aliases=((0, 0),), sbp=("broadcast",))
    nodes = [n.replace(annotations=mark) for n in function.body.nodes]
    marked = Function(
        function.name, function.params, function.returns, function.body.replace(nodes=nodes), function.aliases
    )
    ipc.write_function(marked, tmp_path)
    back = ipc.read_function(tmp_path)
    assert back.fingerprint == marked.fingerprint
    assert back.aliases == marked.aliases
    for a, b in zip(back.body.nodes, marked.body.nodes, strict=True):
        assert a.annotations == b.annotations
        assert [v and v.type for v in a.outputs] == [v and v.type for v in b.outputs]
        assert [v and v.type for v in a.inputs] == [v and v.type for v in b.inputs]


def test_mapped_weights_stay_where_they_are(tmp_path: pathlib.Path) -> None:
    """A model's large weights are referred to by path and offset, not copied, whichever file they lie in."""
    weights = Value.constant(np.random.default_rng(0).standard_normal((512, 512), np.float32), "w")
    x, y = functions.value("x", 4, 512), functions.value("y", 4, 512)
    made = functions.function("big", [x], [functions.node("MatMul", [x, weights], [y])], [y])
    for external in (False, True):
        folder = tmp_path / f"model-{external}"
        folder.mkdir()
        save(made, folder / "m.onnx", external_data=external)
        function = import_function(folder / "m.onnx")
        job = tmp_path / f"job-{external}"
        job.mkdir()
        ipc.write_function(function, job)
        assert sum(f.stat().st_size for f in job.iterdir()) < 10_000
        assert ipc.read_function(job).fingerprint == function.fingerprint


def test_weights_of_a_file_that_has_changed_are_copied(tmp_path: pathlib.Path) -> None:
    """What is mapped is what the caller computes with, so that is what crosses, and not what the file has become."""
    weights = Value.constant(np.random.default_rng(0).standard_normal((64, 64), np.float32), "w")
    x, y = functions.value("x", 4, 64), functions.value("y", 4, 64)
    path = tmp_path / "m.onnx"
    save(functions.function("f", [x], [functions.node("MatMul", [x, weights], [y])], [y]), path)
    function = import_function(path)
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)
    job = tmp_path / "job"
    job.mkdir()
    ipc.write_function(function, job)
    assert ipc.read_function(job).fingerprint == function.fingerprint


def test_arrays_cross(tmp_path: pathlib.Path) -> None:
    """Every dtype, scalars, empty ones and views, bit for bit."""
    import ml_dtypes

    arrays = [
        np.float32(3).reshape(()), np.zeros((0, 3), np.int64), np.arange(12, dtype=np.float16).reshape(3, 4).T,
        np.array([True, False]), np.arange(5).astype(ml_dtypes.bfloat16), np.arange(4).astype(np.complex64),
    ]  # fmt: skip
    back = ipc.read_arrays(tmp_path, ipc.write_arrays(arrays, tmp_path))
    for a, b in zip(arrays, back, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


def test_what_was_cut_off_is_refused(tmp_path: pathlib.Path) -> None:
    """Data that is shorter than the model says is an error, not numbers."""
    weights = Value.constant(np.ones((64, 64), np.float32), "w")
    x, y = functions.value("x", 4, 64), functions.value("y", 4, 64)
    ipc.write_function(functions.function("f", [x], [functions.node("MatMul", [x, weights], [y])], [y]), tmp_path)
    data = tmp_path / "function.data"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match="truncated"):
        ipc.read_function(tmp_path)


def test_engines_by_class() -> None:
    """An engine of a module is found by name and class; one that cannot be imported is an error that says so."""
    described = {"name": HostEngine.name, "module": HostEngine.__module__, "class": "HostEngine"}
    from xrt_core.engine import engines

    try:
        assert type(engine_of(described)) is HostEngine
        assert engine_of(described) is engine_of(described)
    finally:
        engines.unregister(HostEngine.name)
    with pytest.raises(EngineError, match=r"test_worker.f.<locals>.E, which another process cannot import"):
        engine_of({"name": "e", "module": __name__, "class": "f.<locals>.E"})


# --- how a child ends ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _worker_started() -> None:
    """The first start reads modules from disk; tests after it have their limits to themselves."""
    Worker().kill()


@pytest.fixture
def worker(_worker_started: None) -> Worker:
    made = Worker()
    yield made
    made.kill()


def test_it_answers_and_is_used_again(worker: Worker) -> None:
    """An error of a job is an answer, and the process serves on."""
    for _ in range(2):
        answer = worker.run(EMPTY, 30, 0, lambda _: None)
        assert answer["kind"] == "unusable"
        assert "function.onnx" in answer["error"]
    assert worker.alive


@pytest.mark.parametrize(
    ("number", "kind", "match"),
    [
        (signal.SIGSEGV, "crashed", "SIGSEGV"),
        (signal.SIGABRT, "crashed", "SIGABRT"),
        (signal.SIGKILL, "memory", "when memory runs out"),
    ],
)
def test_a_signal_is_told_with_the_log(worker: Worker, number: signal.Signals, kind: str, match: str) -> None:
    """Kind, signal and, of a crash, the Python stack that faulthandler left in the log."""
    os.kill(worker.pid, signal.SIGSTOP)  # so that it is still there when the signal comes
    os.kill(worker.pid, number)
    threading.Timer(0.2, _continue, (worker.pid,)).start()
    with pytest.raises(WorkerFailure, match=match) as e:
        worker.run(EMPTY, 30, 0, lambda _: None)
    assert e.value.kind == kind
    assert e.value.exit_code == -number
    assert ("worker.py" in e.value.log) == (kind == "crashed")
    assert not worker.alive


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_one_that_hangs_is_killed(worker: Worker) -> None:
    """After its limit, whatever it does."""
    os.kill(worker.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match="time limit") as e:
        worker.run(EMPTY, 0.3, 0, lambda _: None)
    assert e.value.kind == "hung"
    assert time.monotonic() - start < 5
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
        process_pool().submit(Job(work, None))
        time.sleep(0.3)
        sys.exit(0)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["return", "busy", "kill"])
def test_no_child_outlives_its_parent(end: str, tmp_path: pathlib.Path) -> None:
    """Whether the parent returns, returns while a job hangs, or is killed; and it never waits."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), end, str(tmp_path / "none")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert pids
    start = time.monotonic()
    if end == "kill":
        assert is_running(pids[0])
        parent.kill()
    parent.wait(10)
    assert time.monotonic() - start < 5
    assert gone(pids)
    parent.stdout.close()


# --- the pool --------------------------------------------------------------------------------------------------------


def test_the_pool_starts_nothing_before_it_has_to() -> None:
    """No thread without a job, no process without one that asks for it, and few of both."""
    pool = Pool(2)
    assert pool._slots == []
    jobs = [Job(lambda slot: time.sleep(0.05), None) for _ in range(6)]
    for job in jobs:
        pool.submit(job)
    assert all(job.done.wait(10) for job in jobs)
    assert len(pool._slots) == 2
    assert pool.pids() == []


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is refused, and the pool works as soon as there are threads again."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = Pool(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(WorkerFailure, match="can't start new thread"):
            pool.submit(Job(lambda slot: None, None))
    job = Job(lambda slot: None, None)
    pool.submit(job)
    assert job.done.wait(10)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(3)])
def test_a_job_that_raises_costs_no_thread(error: BaseException) -> None:
    """It is logged, and the next job is done."""

    def bad(slot: WorkerSlot) -> None:
        raise error

    pool = Pool(1)
    jobs = [Job(bad, None), Job(lambda slot: None, None)]
    for job in jobs:
        pool.submit(job)
    assert all(job.done.wait(10) for job in jobs)


@pytest.mark.usefixtures("_worker_started")
def test_cancelling_is_for_one_owner() -> None:
    """The running job of that owner is over at once; nobody waits."""
    pool = Pool(1)
    found: list[str] = []

    def work(slot: WorkerSlot) -> None:
        try:
            worker = Worker()
            slot._worker = worker
            os.kill(worker.pid, signal.SIGSTOP)
            slot.run(EMPTY, 60, 0, lambda _: None)
        except WorkerFailure as e:
            found.append(e.kind)

    job = Job(work, "mine")
    pool.submit(job)
    while not pool.pids():
        time.sleep(0.01)
    time.sleep(0.2)
    pool.cancel("other")
    assert not job.done.wait(0.2)
    start = time.monotonic()
    pool.cancel("mine")
    assert time.monotonic() - start < 1
    assert job.done.wait(10)
    assert found == ["memory"]  # it was killed; the guard that closed knows better and says nothing
