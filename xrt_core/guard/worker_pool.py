"""The parent's side of the child processes: a few workers, started late, used again, killed at any trouble.

Desk: lets another thread have jobs done by the child process of a thread of the pool.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from xrt_core.engine.contract import WORKER_VARIABLE
from xrt_core.errors import XRTError
from xrt_core.events import Kind, logger
from xrt_core.guard import timeouts
from xrt_core.guard.ipc import new_folder
from xrt_core.guard.timeouts import TooLong, outside_library

LOG_BYTES: Final = 8192
"""So much of the end of a worker's log is kept with a failure."""
_POLL: Final = 0.05  # seconds between looks at a child's memory
_START_SECONDS: Final = 60.0  # a child that has not said that it is ready by then is given up
_CHILD: Final = {WORKER_VARIABLE: "1"}


class WorkerFailure(XRTError):
    """A child did not bring its job to an end. kind: how; log: the tail of what it printed; exit_code: of a child that
    ended by itself, negative for a signal."""

    def __init__(self, kind: Kind, message: str, log: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.log = log
        self.exit_code = exit_code


class Worker:
    """One child process. For one thread at a time, but `kill` may come from any."""

    def __init__(self) -> None:
        if not sys.executable:
            raise WorkerFailure("unusable", "this interpreter doesn't know its own path; set guard_sandbox=False")
        self._folder = new_folder("worker")
        self._log_path = self._folder / "log"
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        environment = {**os.environ, **_CHILD, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        try:
            with open(self._log_path, "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", "from xrt_core.guard.worker import main; main()"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
                    start_new_session=True,  # Ctrl-C is for the parent, and what an engine starts dies with its group
                )  # fmt: skip
        except OSError as e:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise WorkerFailure("unusable", f"no child process can be started: {e}") from e
        self.pid = self._process.pid
        try:
            _start(self._read, "xrt-worker-reader")
            self._wait(time.monotonic() + _START_SECONDS, 0, 0, lambda stage: None)
        except WorkerFailure:
            self.kill()
            raise

    def run(
        self, request: Mapping[str, Any], timeout: float, memory: int, stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """The child's answer to a request. `stage` hears how far it is.

        Raises WorkerFailure where it crashes, takes more than `timeout` seconds or holds more than `memory` bytes of
        its own; the worker is dead then.
        """
        begun = self._log_path.stat().st_size
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: waiting finds out how
        try:
            return self._wait(time.monotonic() + timeout, memory, begun, stage)
        except WorkerFailure:
            self.kill()
            raise

    def _wait(self, deadline: float, memory: int, begun: int, stage: Callable[[str], None]) -> dict[str, Any]:
        while True:
            try:
                answer = self._answers.get(timeout=_POLL)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise WorkerFailure("hung", "it did not end within its time limit", self.log(begun)) from None
                held = own_memory(self.pid)
                if memory and held > memory:
                    message = f"it held {held >> 20} MiB, its limit is {memory >> 20} MiB"
                    raise WorkerFailure("memory", message, self.log(begun)) from None
                continue
            if answer is None:
                raise self._ended(begun)
            if "stage" in answer:
                stage(answer["stage"])
            else:
                return answer

    def _ended(self, begun: int) -> WorkerFailure:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return WorkerFailure("crashed", "the child closed its pipe", self.log(begun))
        if code == -getattr(signal, "SIGKILL", 9):
            message = "the child was killed (SIGKILL), which is what the system does when memory runs out"
            return WorkerFailure("memory", message, self.log(begun), code)
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        return WorkerFailure("crashed", f"the child process ended ({how})", self.log(begun), code)

    def log(self, begun: int = 0) -> str:
        """The last of what the child printed since its log had `begun` bytes."""
        with contextlib.suppress(OSError), open(self._log_path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(begun, size - LOG_BYTES))
            return f.read(LOG_BYTES).decode("utf-8", "replace").strip()
        return ""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and what it started, at once, and take its files away."""
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError), self._process.stdout as answers:
            for line in answers:
                with contextlib.suppress(ValueError):
                    self._answers.put(json.loads(line))
        self._answers.put(None)


class Job:
    """Something for a thread of the pool to do: `work(slot)`. done: set at its end, also when it was cancelled."""

    def __init__(self, work: Callable[[WorkerSlot], None], owner: object) -> None:
        self.work = work
        self.owner = owner
        self.done = threading.Event()


class WorkerSlot:
    """A thread of the pool, and the worker that it has, if it has one. The system that kills a child with the thread
    that started it (see `worker`) does no harm here, for this thread lasts."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self._worker: Worker | None = None

    def run(
        self, request: Mapping[str, Any], timeout: float, memory: int, stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """Have the worker of this thread do a job; it is started where there is none. Raises WorkerFailure."""
        worker = self._worker
        if worker is None or not worker.alive:
            if worker is not None:
                worker.kill()
            if timeouts.begun():  # whose children have just been ended
                raise WorkerFailure("closed", "the interpreter is ending")
            worker = self._worker = Worker()
        try:
            answer = worker.run(request, timeout, memory, stage)
        except WorkerFailure:
            self._drop(worker)
            raise
        if memory and own_memory(worker.pid) > memory // 2:  # what this job left must not count against the next
            self._drop(worker)
            worker.kill()
        return answer

    def _drop(self, worker: Worker) -> None:
        if self._worker is worker:  # and not the next one, where a thread that was given up comes back late
            self._worker = None

    def kill(self) -> None:
        """End the worker, and so its job."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


class Pool:
    """Threads that work off jobs, each with a child process where the job asks for one. Nothing starts before the
    first job; nothing here keeps the interpreter from leaving."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._slots: list[WorkerSlot] = []
        self._open = 0  # jobs that are not at their end
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Have a job done, after those before it. Raises WorkerFailure where that takes a thread, and none can be
        started."""
        with self._lock:
            if len(self._slots) <= self._open and len(self._slots) < self.size:
                slot = WorkerSlot()
                _start(partial(self._serve, slot), "xrt-guard")
                self._slots.append(slot)
            self._open += 1
        self._jobs.put(job)

    def cancel(self, owner: object) -> None:
        """Give up the running jobs of an owner, without waiting for them. Queued ones have to see for themselves."""
        for slot in tuple(self._slots):
            job = slot.job
            if job is not None and job.owner is owner:
                slot.kill()

    def pids(self) -> list[int]:
        """The child processes that there are."""
        return [s._worker.pid for s in tuple(self._slots) if s._worker is not None and s._worker.alive]

    def close(self) -> None:
        """Kill every child, without waiting for a job. The pool can be used again."""
        for slot in tuple(self._slots):
            slot.kill()

    def _serve(self, slot: WorkerSlot) -> None:
        while True:
            job = self._jobs.get()
            slot.job = job
            try:
                job.work(slot)
            except BaseException:  # SystemExit too: the thread is there for the next job
                logger.exception("a job of the guard failed")
            finally:
                slot.job = None
                with self._lock:
                    self._open -= 1
                job.done.set()
                del job


def _start(work: Callable[[], None], name: str) -> None:
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as e:  # no more threads, or the interpreter is leaving
        raise WorkerFailure("unusable", f"no thread can be started: {e}") from e


def own_memory(pid: int) -> int:
    """Bytes that a process holds for itself: files mapped into it (weights) do not count. 0 where nobody can say."""
    try:
        with open(f"/proc/{pid}/statm") as f:
            _, resident, shared = f.read().split()[:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


_pool: Pool | None = None
_pool_lock = threading.Lock()


def process_pool() -> Pool:
    """The pool that all modules of this process share: a worker for every four processors, at least one."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Pool(max(1, (os.cpu_count() or 1) // 4))
            atexit.register(_leave)
        return _pool


def _leave() -> None:
    timeouts.begin()
    if _pool is not None:
        _pool.close()


def _forked() -> None:
    """In a forked process there are none of the parent's threads, and its children are not ours."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


_LOOK: Final = 1.0  # seconds between looks at whether anybody serves any more


class _Request(NamedTuple):
    arguments: tuple[Any, ...]
    reply: queue.SimpleQueue[tuple[dict[str, Any] | None, WorkerFailure | None]]


class _Done(NamedTuple):
    error: BaseException | None


class WorkerProxy:
    """The thread of the pool serves; the one that it watches asks. A child is started by the former alone, since the
    system ends a child with the thread that started it (see `worker`)."""

    def __init__(self, slot: WorkerSlot) -> None:
        self._slot = slot
        self._inbox: queue.SimpleQueue[_Request | _Done] = queue.SimpleQueue()
        self._closed = False

    def run(
        self, request: Mapping[str, Any], timeout: float, memory: int, stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """See `WorkerSlot.run`, for the served thread. Raises WorkerFailure, also where nobody serves any more."""
        reply: queue.SimpleQueue[tuple[dict[str, Any] | None, WorkerFailure | None]] = queue.SimpleQueue()
        self._inbox.put(_Request((request, timeout, memory, stage), reply))
        with outside_library():
            while True:
                try:
                    answer, failure = reply.get(timeout=_LOOK)
                    break
                except queue.Empty:
                    if self._closed:
                        raise WorkerFailure("closed", "it was given up") from None
        if failure is not None:
            raise failure
        assert answer is not None
        return answer

    def serve(self, seconds: float, call: Callable[[], None]) -> None:
        """Run `call` in a thread of its own and serve it until it ends; raises what it raises.

        Raises TooLong after `seconds` of which it did not wait for the child; the thread is left then.
        """

        def watched() -> None:
            try:
                call()
                self._inbox.put(_Done(None))
            except BaseException as e:
                self._inbox.put(_Done(e))

        threading.Thread(target=watched, name="xrt-planning", daemon=True).start()
        left = seconds
        try:
            while True:
                start = time.monotonic()
                try:
                    item = self._inbox.get(timeout=max(left, 0.0))
                except queue.Empty:
                    raise TooLong(f"it did not come back within {seconds:g} s") from None
                left -= time.monotonic() - start
                if isinstance(item, _Done):
                    if item.error is not None:
                        raise item.error
                    return
                try:
                    item.reply.put((self._slot.run(*item.arguments), None))
                except WorkerFailure as e:
                    item.reply.put((None, e))
        finally:
            self._closed = True
