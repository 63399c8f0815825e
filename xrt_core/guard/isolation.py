"""Isolation: executables that run in a child process for good, with the arrays of a call in shared memory.

An engine that aborts, exits, hangs or is killed there ends its child process, and the host answers the call. A module
has one such process for all its clusters. Each executable has a channel to it: a segment of shared memory with a place
for each input and result, as shapes are static, and a socket over which lines are exchanged: each request has a number,
which ends its reply. What a caller that was interrupted left behind, on either side, is of another number.
Whoever waits looks for it before it sleeps, as waking up takes some 60 us: the process for 50 us and what the caller's
copies take, the caller for 50 us and what the last run took, but at most 0.5 ms. Where that was in vain, it is tried
now and then only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions
from xrt_core.errors import EngineError, ExecutionError
from xrt_core.files import encode
from xrt_core.guard.worker_pool import Worker, WorkerFailure
from xrt_core.ir.function import Function, Parameter
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.launch import LaunchCheck, WrongResults, engine_failure
from xrt_core.runtime.transfers import direct

IS_SUPPORTED: Final = hasattr(socket, "send_fds") and hasattr(os, "sched_yield")
"""Whether this system can pass file descriptors between processes: POSIX."""

_SPIN: Final = 50e-6  # seconds
_LONGEST_SPIN: Final = 5e-4
_IN_VAIN: Final = 2
_TRIAL: Final = 16
"""Who has looked in vain so many times in a row sleeps at once, but for every so many times."""
_COPIED: Final = 2e10  # bytes in a second, roughly
_ALIGNMENT: Final = 64  # bytes
_RUN: Final = b"r"
_WAIT: Final = b"w"
"""A request that nothing is done for: its reply says that all is done that came before."""
_END: Final = b"\n"
"""The end of each request, a letter and a number, and of each reply: an error as JSON, if any, and the number."""
_LONGEST: Final = 1 << 16  # bytes of a reply
_START_SECONDS: Final = 90.0  # until the process has started
_LONGEST_WAIT: Final = (1 << 31) - 1  # milliseconds that `poll` takes
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)


class IsolatedProcess:
    """The process in which the executables of one module run: started when first needed, and again after its end.

    Raises WorkerFailure where the system cannot do it.
    """

    def __init__(self) -> None:
        if not IS_SUPPORTED:
            raise WorkerFailure("unusable", "this system cannot isolate engines (POSIX is needed): use another `guard`")
        self._lock = threading.Lock()
        self._live: list[tuple[Worker, socket.socket]] = []  # at most one; shared with the finalizer
        weakref.finalize(self, _kill_all, self._live, os.getpid())

    def load(self, function: Function, request: Mapping[str, Any], seconds: float, memory: int) -> IsolatedExecutable:
        """Let the process load an executable. request: see `worker.isolated`. seconds, memory: see `Worker.run`.

        Raises WorkerFailure, EngineError for a function with text, and OSError.
        """
        places = _Places(function)
        own, its = socket.socketpair()
        try:
            descriptor = _shared_memory(places.size)
            try:
                segment = mmap.mmap(descriptor, places.size)
                with self._lock:
                    worker, control = self._started(memory)
                    socket.send_fds(control, [_RUN], [descriptor, its.fileno()])
                    answer = worker.run(request, seconds, memory, lambda message: None)
            finally:
                os.close(descriptor)
            if answer.error is not None:
                raise WorkerFailure(answer.kind, answer.error)
        except BaseException:
            own.close()
            raise
        finally:
            its.close()
        return IsolatedExecutable(self, worker, own, segment, places, function)

    def pids(self) -> list[int]:
        """The process, if it runs."""
        return [worker.pid for worker, _ in self._live if worker.alive]

    def _started(self, memory: int) -> tuple[Worker, socket.socket]:
        if self._live and not self._live[0][0].alive:
            _kill_all(self._live, os.getpid())
        if not self._live:
            self._live.append(_start(memory))
        return self._live[0]


def _start(memory: int) -> tuple[Worker, socket.socket]:
    """A worker that was started by a thread that lives as long: the system ends it together with that thread."""
    own, its = socket.socketpair()
    made: list[Worker | WorkerFailure] = []
    is_made = threading.Event()

    def keep() -> None:
        try:
            with its:
                worker = Worker(its)
        except BaseException as e:
            made.append(e if isinstance(e, WorkerFailure) else WorkerFailure("unusable", f"it does not start: {e}"))
            is_made.set()
        else:
            made.append(worker)
            is_made.set()
            worker.watch(memory)

    threading.Thread(target=keep, name="xrt-isolated", daemon=True).start()
    is_made.wait(_START_SECONDS)
    found = made[0] if made else WorkerFailure("hung", "the process of the engine did not start")
    if isinstance(found, WorkerFailure):
        own.close()
        raise found
    return found, own


def _kill_all(live: list[tuple[Worker, socket.socket]], owner: int) -> None:
    """Kill the processes, unless this one was forked: they are its parent's. owner: the process that started them."""
    while live:
        worker, control = live.pop()
        if os.getpid() == owner:
            worker.kill()
        control.close()


class IsolatedExecutable(Executable):
    """An executable that another process runs. Takes NumPy arrays, and returns ones that the caller owns. Thread-safe:
    one call at a time.

    seconds: that a run may take before the process is killed.
    """

    def __init__(
        self,
        process: IsolatedProcess,
        worker: Worker,
        channel: socket.socket,
        segment: mmap.mmap,
        places: _Places,
        function: Function,
    ) -> None:
        self.seconds = 600.0
        self._process = process  # which lives as long as its executables
        self._worker = worker
        self._channel = channel
        self._receiver = _Receiver(channel)
        self._inputs = places.inputs(segment)
        self._results = places.results(segment)
        self._function = function
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_waited_for = False
        self._number = 0
        self._spin = _SPIN
        weakref.finalize(self, channel.close)  # the process drops its part then

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run in the process. Raises WorkerFailure if it ended or hangs, ExecutionError for what the engine raises."""
        if os.getpid() != self._owner:
            raise WorkerFailure("closed", "the engine's process belongs to the process that this one was forked from")
        with self._lock:
            if self._is_waited_for:  # the caller of that run was interrupted
                self._answer(_WAIT)
            _copy(inputs, self._inputs)
            self._is_waited_for = True
            start = time.perf_counter()
            error = self._answer(_RUN)
            self._spin = min(time.perf_counter() - start + _SPIN, _LONGEST_SPIN)
            if error:
                raise _failure(error)
            return [place.copy() for place in self._results]

    def as_text(self) -> str:
        """What runs where."""
        return f"{self._function.name} in process {self._worker.pid}"

    def _answer(self, request: bytes) -> bytes:
        """The error in the reply to a request; b"" for none."""
        self._number += 1
        number = b"%d\n" % self._number
        mark, reply = b" " + number, b""
        try:
            self._channel.send(request + number, _NO_SIGNAL)
            while not reply.endswith(mark):
                part = self._receiver.receive(self.seconds, self._spin)
                if part is None:
                    self._worker.kill("hung", f"the engine's process did not answer within {self.seconds:g} s")
                    raise self._worker.ended()
                if not part:
                    raise self._worker.ended()
                reply += part
        except OSError as e:
            raise self._worker.ended() from e
        self._is_waited_for = False
        return reply[: -len(mark)].rpartition(_END)[2]


def serve(executable: Executable, function: Function, engine: str, channel: socket.socket, segment: mmap.mmap) -> None:
    """Run an executable whenever the parent says so, until it closes the channel. For a thread of the worker."""
    places = _Places(function)
    inputs, results = places.inputs(segment), places.results(segment)
    check = LaunchCheck(function, engine)
    run: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    with contextlib.suppress(OSError):
        for request in _requests(channel, min(_SPIN + places.size / _COPIED, _LONGEST_SPIN)):
            reply = b""
            try:
                if request[:1] == _RUN:
                    if run is None:
                        _copy(check.results(executable.run(check.inputs(inputs))), results)
                        run = check.around(direct(executable), executable.fixed_results)
                    else:
                        _copy(run(inputs), results)
            except BaseException as e:
                reply = _described(e, engine)
            channel.send(reply + b" " + request[1:] + _END, _NO_SIGNAL)


def _copy(arrays: Sequence[Any], places: Sequence[np.ndarray]) -> None:
    for x, place in zip(arrays, places, strict=True):
        np.copyto(place, to_numpy(x), casting="no")


def _requests(channel: socket.socket, spin: float) -> Iterator[bytes]:
    """The requests that come over a channel, until its other end is closed. spin: seconds to look for each."""
    left, receiver = b"", _Receiver(channel)
    while part := receiver.receive(None, spin):
        *whole, left = (left + part).split(_END)
        yield from whole


def _described(error: BaseException, engine: str) -> bytes:
    try:
        failure = engine_failure(error, engine)
        return encode({"error": str(failure), "kind": getattr(failure, "kind", "")})
    except BaseException:  # KeyboardInterrupt, as no terminal reaches this process
        return encode({"error": f"engine {engine!r} was interrupted", "kind": ""})


def _failure(reply: bytes) -> ExecutionError:
    found = json.loads(reply)
    error, kind = str(found["error"]), found["kind"]
    return WrongResults(error, kind) if kind in ("wrong count", "wrong shape", "wrong dtype") else ExecutionError(error)


class _Receiver:
    """One end of a channel, from which is read: at once while looking is of use. It is none where messages are far
    between, and where the other side waits for this processor, which a yield does not always give it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._in_vain = 0

    def receive(self, seconds: float | None, spin: float) -> bytes | None:
        """What comes; b"" if the other end is closed, None if nothing comes in time."""
        if self._in_vain < _IN_VAIN or self._in_vain % _TRIAL == 0:
            end = time.perf_counter() + spin
            while time.perf_counter() < end:
                try:
                    found = self._channel.recv(_LONGEST, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    os.sched_yield()
                else:
                    self._in_vain = 0
                    return found
        self._in_vain += 1
        if not self._poll.poll(None if seconds is None else min(seconds * 1e3, _LONGEST_WAIT)):
            return None
        return self._channel.recv(_LONGEST)


class _Places:
    """Where the inputs and results of a function lie in its segment. size: of the segment in bytes.

    Raises EngineError for what has no size that is known before the run.
    """

    def __init__(self, function: Function) -> None:
        self.size = 0
        self._inputs = [self._place(p) for p in function.params]
        self._results = [self._place(p) for p in function.returns]
        self.size = max(self.size, 1)  # no system maps nothing

    def _place(self, p: Parameter) -> tuple[Parameter, int]:
        if p.dtype.hasobject:
            raise EngineError(f"{p.name!r} is text, which does not go through shared memory: use another `guard`")
        if p.is_open:
            raise EngineError(f"the size of {p.name!r} depends on data, so no shared memory fits: use another `guard`")
        at = self.size
        self.size += -(-int(np.prod(p.shape, dtype=np.int64)) * p.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return p, at

    def inputs(self, segment: mmap.mmap) -> list[np.ndarray]:
        """The inputs in the segment."""
        return [np.ndarray(p.shape, p.dtype, segment, at) for p, at in self._inputs]

    def results(self, segment: mmap.mmap) -> list[np.ndarray]:
        """The results in the segment."""
        return [np.ndarray(p.shape, p.dtype, segment, at) for p, at in self._results]


def _shared_memory(size: int) -> int:
    """A descriptor of new memory that no name in the file system refers to, so that nothing is left behind."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("xrt")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.truncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
