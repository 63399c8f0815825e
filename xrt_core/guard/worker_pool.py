"""WorkerPool: threads that run jobs, each with a worker process that may crash, hang or run out of memory.

Workers are started when a job first needs one, used again, and killed at any failure. A worker belongs to one thread of
the pool for its whole life, as the system ends it together with the thread that started it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from xrt_core.engine.contract import WORKER_VARIABLE
from xrt_core.engine.forking import in_forked_process
from xrt_core.errors import XRTError
from xrt_core.events import Kind, logger
from xrt_core.files import decode
from xrt_core.guard import timeouts
from xrt_core.guard.ipc import Message, new_folder
from xrt_core.guard.timeouts import BackgroundTask

LOG_BYTES: Final = 8192
"""Bytes of the end of a worker's log that are kept with a failure."""
_LONGEST: Final = 1 << 28  # bytes of an answer
_MOST_WAITING: Final = 256  # answers that nobody has taken yet; a worker that writes more waits
_PROGRAM: Final = "from xrt_core.guard.worker import main; main()"
_POLL: Final = 0.05  # seconds between measurements of a worker's memory
_WATCH: Final = 0.25  # the same for one that runs executables for good
_START_SECONDS: Final = 60.0  # time limit for a worker's start
_SHORTEST: Final = 0.5  # seconds that a request has at least, however long it waited for the device
_CANCEL_POLL: Final = 0.5  # seconds between checks whether the answer to a queued request is still wanted

Request = Mapping[str, Any]
Progress = Callable[[Message], None]


def _ignore(message: Message) -> None:
    """For callers that need no progress."""


class WorkerAnswerError(XRTError):
    """What a worker wrote is no answer."""


class WorkerFailure(XRTError):
    """A worker did not finish its job. kind: how it failed. log: the tail of its output. exit_code: of a process that
    ended by itself, negative for a signal."""

    def __init__(self, kind: Kind, message: str, log: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.log = log
        self.exit_code = exit_code


_dying: Final[list[subprocess.Popen[bytes]]] = []
"""Killed processes that have not ended yet."""


class Worker:
    """One worker process. Used by one thread at a time; `kill` may be called from any.

    control: the end of a socket pair that is the worker's, for one that runs executables for good (`isolation.py`).
    """

    def __init__(self, control: socket.socket | None = None) -> None:
        if not sys.executable:
            raise WorkerFailure("unusable", "this interpreter doesn't know its own path; set guard_sandbox=False")
        self._folder = new_folder("worker")
        self._oom_kills = oom_kills()
        self._cause: tuple[Kind, str] | None = None  # why it was killed
        self._log_path = self._folder / "log"
        self._answers: queue.Queue[Message | WorkerFailure | None] = queue.Queue(_MOST_WAITING)
        self._path = _import_path()
        role = "builds" if control is None else "runs"
        environment = {**os.environ, WORKER_VARIABLE: role, "PYTHONPATH": self._path, "PYTHONUNBUFFERED": "1"}
        inherited = () if control is None else (control.fileno(),)
        try:
            with open(self._log_path, "ab") as log:  # what others append stays in its place
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *map(str, inherited)], pass_fds=inherited,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
                    start_new_session=True,  # Ctrl-C is for the parent; an engine's processes die with the group
                )  # fmt: skip
        except OSError as e:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise WorkerFailure("unusable", f"no worker process can be started: {e}") from e
        self.pid = self._process.pid
        try:
            _start(self._read, "xrt-worker-reader")
            self._wait(time.monotonic() + _START_SECONDS, 0, 0, _ignore)
            self._answered = self._log_path.stat().st_size  # bytes of the log at the last answer
        except WorkerFailure:
            self.kill()
            raise

    def run(self, request: Request, timeout: float, memory: int, progress: Progress) -> Message:
        """Send a request and return the answer. `progress` is called with every message before it.

        Raises WorkerFailure if the worker crashes, exceeds `timeout` seconds, or holds more than `memory` bytes of its
        own; it is killed then.
        """
        begun = self._answered  # what was written since the last answer belongs to a crash between two requests
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # its paths may be no Unicode text
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: `_wait` finds out how
        try:
            answer = self._wait(time.monotonic() + timeout, memory, begun, progress)
        except WorkerFailure:
            self.kill()
            raise
        self._answered = self._log_path.stat().st_size
        return answer

    def _wait(self, deadline: float, memory: int, begun: int, progress: Progress) -> Message:
        while True:
            if time.monotonic() > deadline:
                raise WorkerFailure("hung", "it did not finish within its time limit", self.log(begun))
            try:
                answer = self._answers.get(timeout=_POLL)
            except queue.Empty:
                held = own_memory(self.pid)
                if memory and held > memory:
                    raise WorkerFailure("memory", _excess(held, memory), self.log(begun)) from None
                continue
            if answer is None:
                raise self.ended(begun)
            if isinstance(answer, WorkerFailure):
                raise answer
            if answer.stage is not None:
                progress(answer)
            else:
                return answer

    def ended(self, begun: int | None = None) -> WorkerFailure:
        """How the process ended, which closed a pipe. begun: bytes of the log that belong to earlier requests."""
        begun = self._answered if begun is None else begun
        if self._cause is not None:
            return WorkerFailure(*self._cause, self.log(begun))
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return WorkerFailure("crashed", "the worker closed its pipe", self.log(begun))
        if code == -getattr(signal, "SIGKILL", 9):
            if oom_kills() > self._oom_kills:
                message = "the worker was killed (SIGKILL), as memory ran out: the system ended a process for that"
                return WorkerFailure("memory", message, self.log(begun), code)
            message = "the worker was killed (SIGKILL); not by the system for want of memory, as far as it says"
            return WorkerFailure("crashed", message, self.log(begun), code)
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        return WorkerFailure("crashed", f"the worker process ended ({how})", self.log(begun), code)

    def log(self, begun: int = 0) -> str:
        """The tail of what the worker printed since its log had `begun` bytes."""
        with contextlib.suppress(OSError), open(self._log_path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(begun, size - LOG_BYTES))
            return f.read(LOG_BYTES).decode("utf-8", "replace").strip()
        return ""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def imports_alike(self) -> bool:
        """Whether the process looks for packages where this one does now: what it calls unknown may be a package that
        was added since it began."""
        return self._path == _import_path()

    def watch(self, memory: int) -> None:
        """Wait until the process has ended. It is killed if it holds more than `memory` bytes of its own."""
        while self.alive:
            held = own_memory(self.pid)
            if memory and held > memory:
                self.kill("memory", _excess(held, memory))
            time.sleep(_WATCH)

    def kill(self, kind: Kind = "closed", why: str = "") -> None:
        """Kill the process and its process group at once, and delete its files. kind, why: for whoever still waits for
        an answer (`ended`)."""
        if why:
            self._cause = kind, why
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.kill()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:  # a busy machine: it is reaped when another worker is killed
            _dying.append(self._process)
        _dying[:] = [p for p in _dying if p.poll() is None]
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        found: WorkerFailure | None = None
        with contextlib.suppress(OSError, ValueError), self._process.stdout as answers:
            while found is None and (line := answers.readline(_LONGEST)):
                try:
                    self._answers.put(decode(line, Message, "the worker's answer", WorkerAnswerError))
                except WorkerAnswerError as e:
                    found = WorkerFailure("crashed", str(e), self.log())
        self._answers.put(found)


def _import_path() -> str:
    return os.pathsep.join(p or os.getcwd() for p in sys.path)


def _excess(held: int, memory: int) -> str:
    return f"it held {held >> 20} MiB, its limit is {memory >> 20} MiB"


def oom_kills() -> int:
    """How many processes the system has ended because memory ran out; 0 where it does not say (other than Linux)."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/vmstat", encoding="ascii") as f:
        return next((int(line.split()[1]) for line in f if line.startswith("oom_kill ")), 0)
    return 0


class Job:
    """Something for a thread of the pool to run: `work(slot)`. owner: who may cancel it. done: set at its end."""

    def __init__(self, work: Callable[[WorkerSlot], None], owner: object) -> None:
        self.work = work
        self.owner = owner
        self.cancelled = False
        self.done = threading.Event()


def _refuse_cancelled(job: Job | None) -> None:
    if job is not None and job.cancelled:
        raise WorkerFailure("closed", "the job was cancelled")


class WorkerSlot:
    """The worker process of one thread of the pool. busy: held while that has a request."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.busy = threading.Lock()
        self._worker: Worker | None = None

    def run(
        self, request: Request, timeout: float, memory: int, progress: Progress, *, on_device: bool = False
    ) -> Message:
        """See `Worker.run`; the worker is started if there is none. Raises WorkerFailure.

        on_device: the request may use a device with memory of its own. Of all workers only one does so at a time, and
        none keeps such memory while another one works there.
        """
        if not on_device:
            with self.busy:
                return self._run(request, timeout, memory, progress)
        until = time.monotonic() + timeout
        if not _device.acquire(timeout=timeout):
            raise WorkerFailure("hung", "other builds on the device took all of its time limit")
        try:
            if (other := _device.used_by) is not self and other is not None:
                if not other.busy.acquire(timeout=max(until - time.monotonic(), 0.0)):  # by what needs no device
                    raise WorkerFailure("hung", "another worker kept the device for all of its time limit")
                other.kill()
                other.busy.release()
            _device.used_by = self
            with self.busy:
                return self._run(request, max(until - time.monotonic(), _SHORTEST), memory, progress)
        finally:
            _device.release()

    def _run(self, request: Request, timeout: float, memory: int, progress: Progress) -> Message:
        job, worker = self.job, self._worker
        _refuse_cancelled(job)
        if worker is None or not (worker.alive and worker.imports_alike):
            if worker is not None:
                worker.kill()
            if timeouts.is_shutting_down():  # and the pool has been closed
                raise WorkerFailure("closed", "the interpreter is shutting down")
            worker = self._worker = Worker()
        _refuse_cancelled(job)  # once more, now that there is a worker, which a later cancellation kills
        try:
            answer = worker.run(request, timeout, memory, progress)
        except WorkerFailure as e:
            self._drop(worker)
            if job is not None and job.cancelled:
                raise WorkerFailure("closed", "the job was cancelled") from e
            raise
        if memory and own_memory(worker.pid) > memory // 2:  # what this job leaked must not count against the next
            self._drop(worker)
            worker.kill()
        return answer

    def _drop(self, worker: Worker) -> None:
        if self._worker is worker:  # and not a later one
            self._worker = None

    def kill(self) -> None:
        """Kill the worker, and so fail its job."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


class _Device:
    """The right to use devices with memory of their own. used_by: the slot whose worker last had it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.used_by: WorkerSlot | None = None

    def acquire(self, timeout: float) -> bool:
        """Wait for the right. Returns False after `timeout` seconds."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()


_device = _Device()


class WorkerPool:
    """Daemon threads that run jobs in order of submission, each with a worker process if its job asks for one.

    Nothing is started before the first job, and nothing here delays the interpreter's shutdown.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._slots: list[WorkerSlot] = []
        self._open = 0  # jobs that have not ended
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises WorkerFailure if that takes a new thread, and none can be started."""
        with self._lock:
            if len(self._slots) <= self._open and len(self._slots) < self.size:
                slot = WorkerSlot()
                _start(partial(self._serve, slot), "xrt-guard")
                self._slots.append(slot)
            self._open += 1
        self._jobs.put(job)

    def call(
        self, request: Request, timeout: float, memory: int, task: BackgroundTask, *, on_device: bool = False
    ) -> Message:
        """Queue a request for a worker and wait for its answer, as a job of `task.owner`. on_device: see `WorkerSlot`.

        Raises OSError, and WorkerFailure as `Worker.run`; of kind "closed" if the task is cancelled meanwhile.
        """
        answers: list[Message] = []
        failures: list[OSError | WorkerFailure] = []
        closed = WorkerFailure("closed", "the result is no longer wanted")

        def work(slot: WorkerSlot) -> None:
            try:
                if not task.is_wanted():
                    raise closed
                answers.append(slot.run(request, timeout, memory, _ignore, on_device=on_device))
            except (OSError, WorkerFailure) as e:
                failures.append(e)

        job = Job(work, task.owner)
        self.submit(job)
        with timeouts.suspended():
            while not job.done.wait(_CANCEL_POLL):
                if not task.is_wanted():
                    raise closed
        if not answers:
            raise failures[0] if failures and task.is_wanted() else closed
        return answers[0]

    def cancel(self, owner: object) -> None:
        """Kill the workers of an owner's running jobs, without waiting. Queued jobs check for themselves."""
        self._cancel(lambda job: job.owner is owner)

    def cancel_job(self, job: Job) -> None:
        """The same for one job."""
        self._cancel(lambda running: running is job)

    def _cancel(self, is_meant: Callable[[Job], bool]) -> None:
        for slot in tuple(self._slots):
            with self._lock:  # the slot's next job must not lose its worker
                job = slot.job
                if job is not None and is_meant(job):
                    job.cancelled = True
                    slot.kill()

    def pids(self) -> list[int]:
        """The worker processes that are alive."""
        return [s._worker.pid for s in tuple(self._slots) if s._worker is not None and s._worker.alive]

    def close(self) -> None:
        """Kill every worker, without waiting for jobs. The pool can be used again."""
        for slot in tuple(self._slots):
            slot.kill()

    def _serve(self, slot: WorkerSlot) -> None:
        while True:
            job = self._jobs.get()
            slot.job = job
            try:
                job.work(slot)
            except BaseException:  # SystemExit too: the thread serves the next job
                logger.exception("a job of the guard failed")
            finally:
                with self._lock:
                    slot.job = None
                    self._open -= 1
                job.done.set()
                del job


def _start(work: Callable[[], None], name: str) -> None:
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as e:  # no more threads, or the interpreter is shutting down
        raise WorkerFailure("unusable", f"no thread can be started: {e}") from e


def own_memory(pid: int) -> int:
    """Bytes of private memory of a process, without mapped files such as weights. 0 where there is no /proc."""
    try:
        with open(f"/proc/{pid}/statm") as f:
            _, resident, shared = f.read().split()[:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


_workers: WorkerPool | None = None
_planner: WorkerPool | None = None
_pools_lock = threading.Lock()


def process_pool() -> WorkerPool:
    """The pool that all modules of this process share: a worker for every four processors, at least one."""
    global _workers
    with _pools_lock:
        if _workers is None:
            _workers = WorkerPool(max(1, (os.cpu_count() or 1) // 4))
            atexit.register(_close_at_exit)
        return _workers


def planning_pool() -> WorkerPool:
    """The one thread on which the background compilations of all modules run in order. Its jobs need no worker of their
    own, but may wait for `process_pool`."""
    global _planner
    with _pools_lock:
        if _planner is None:
            _planner = WorkerPool(1)
        return _planner


def _close_at_exit() -> None:
    timeouts.begin_shutdown()
    if _workers is not None:
        _workers.close()


def _after_fork() -> None:
    """A forked process has none of its parent's threads, and the workers are not its children."""
    global _workers, _planner, _pools_lock, _device
    _workers, _planner, _pools_lock, _device = None, None, threading.Lock(), _Device()


in_forked_process(_after_fork)
