"""The worker process: serves capability queries and builds of its parent, one request at a time.

Started as `python -c "from xrt_core.guard.worker import main; main()"`. Requests are JSON lines on stdin, answers JSON
lines on what was stdout; whatever a native library prints goes to stderr, which is the worker's log. The process ends
with its parent, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import mmap
import os
import pathlib
import queue
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, Final

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.store import Compilation, ExecutableStore
from xrt_core.engine import engines as process_engines
from xrt_core.engine.boundary import inner_of
from xrt_core.engine.contract import CompileOptions, Engine
from xrt_core.errors import EngineError, EngineNotFoundError, XRTError
from xrt_core.events import EventLog
from xrt_core.files import convert, encode
from xrt_core.guard.capability import answer
from xrt_core.guard.composite import CompositeBuilder, evaluate_candidates
from xrt_core.guard.ipc import read_arrays, read_function
from xrt_core.guard.isolation import serve
from xrt_core.guard.stress import SerialExecutable, harm_of, watched
from xrt_core.host.blas_threads import use_fewer_blas_threads
from xrt_core.host.place import HostPlace
from xrt_core.ir.function import Function
from xrt_core.verify.evaluate import EvaluationSettings, difference
from xrt_core.verify.verdict import HOST, Outcome, Piece

Send = Callable[[Mapping[str, Any]], None]

NICE: Final = 3
"""`nice` increment of the worker, so that inference in the parent is not slowed down."""
_GRACE: Final = 10.0  # seconds after its limit at which a request that the parent did not end is aborted


def main() -> None:
    """Serve requests until the parent closes stdin or ends."""
    requests, answers = _take_pipes()
    faulthandler.enable()
    control = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else None
    if control is None:
        _lower_priority()
        use_fewer_blas_threads()
    _die_with_parent()
    state: dict[str, pathlib.Path] = {}
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, jobs, state), daemon=True).start()

    def send(answer: Mapping[str, Any]) -> None:
        answers.write(encode(answer) + b"\n")
        answers.flush()

    send({"ready": os.getpid()})
    while True:
        request = json.loads(jobs.get())
        state["folder"] = pathlib.Path(request["folder"])
        # a thread of C code: it ends the process even where an engine hangs with the interpreter's lock
        faulthandler.dump_traceback_later(request["timeout"] + _GRACE, exit=True)
        send(_answer(request, send) if control is None else _isolated(request, control))
        faulthandler.cancel_dump_traceback_later()


def run_job(request: Mapping[str, Any], send: Send) -> Outcome:
    """Compile and verify the function of a request. Raises whatever goes wrong before the verification begins."""
    folder = pathlib.Path(request["folder"])
    function, compilation = _received(request)
    inputs = None if request["inputs"] is None else read_arrays(folder, request["inputs"])
    return evaluate_candidates(
        function,
        compilation,
        request["candidates"],
        EvaluationSettings(**request["settings"]),
        inputs,
        lambda engine: send({"stage": "compiling", "engine": engine}),
        lambda: send({"stage": "verifying"}),
        owns_process=True,
        ranges=request["ranges"],
        place=HostPlace.beside(request["host"]),
        sizes=request["sizes"],
        raced=request["raced"],
        right=request["right"],
        current=request["current"],
    )


def isolated(request: Mapping[str, Any], control: socket.socket) -> None:
    """Load the executable of verified pieces, and serve it over the channel that comes with the request."""
    _, (descriptor, end), _, _ = socket.recv_fds(control, 1, 2)
    try:
        channel = socket.socket(fileno=end)
        segment = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    function, compilation = _received(request)
    pieces = convert(request["pieces"], tuple[Piece, ...], "the pieces", EngineError)
    made = CompositeBuilder(compilation).pieces(function, pieces)
    own = [p.engine for p in pieces if p.engine != HOST]
    if request["serialised"]:
        made = SerialExecutable(made, own)
    threading.Thread(target=serve, args=(made, function, own[0], channel, segment), daemon=True).start()


def _received(request: Mapping[str, Any]) -> tuple[Function, Compilation]:
    """The function of a request, and what it is compiled with. Raises XRTError."""
    function = read_function(pathlib.Path(request["folder"]))
    if function.fingerprint != request["fingerprint"]:
        raise XRTError("the model's file has changed since it was loaded: what was received is another function")
    events = EventLog()
    c = request["cache"]
    disk = DiskCache(pathlib.Path(c["folder"]), c["limit"], c["mode"], c["shared"])
    store = ExecutableStore(disk, events, differs=difference)
    engines = [(engine_of(e), e["device"]) for e in request["engines"]]
    return function, Compilation(engines, CompileOptions(**request["options"]), store, events)


def engine_of(described: Mapping[str, str]) -> Engine:
    """The engine that `describe_engine` described. Raises EngineError if it cannot be imported here."""
    name, module, qualname = described["name"], described["module"], described["class"]
    with contextlib.suppress(EngineNotFoundError):
        found = process_engines.get(name)
        own = type(inner_of(found))
        if (own.__module__, own.__qualname__) == (module, qualname):
            return found
        process_engines.unregister(name)
    try:
        target: Any = importlib.import_module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as e:
        raise EngineError(
            f"engine {name!r} is {module}.{qualname}, which another process cannot import ({e}); define it in a "
            "module, or set guard_sandbox=False"
        ) from e
    process_engines.register(target)
    return process_engines.get(name)


def _answer(request: Mapping[str, Any], send: Send) -> dict[str, Any]:
    try:
        if "query" in request:
            name = request["engine"]["name"]
            with watched(name, when := f"at the query {request['query']!r}"):
                found = answer(request, engine_of)
            if request["query"] == "probe" and when in (harm := harm_of(name)):
                return {"error": harm, "kind": "side effect"}  # importing it would do so to the caller's process
            return found
        return {"outcome": run_job(request, send).to_json()}
    except Exception as e:
        return _error(e)


def _isolated(request: Mapping[str, Any], control: socket.socket) -> dict[str, Any]:
    try:
        isolated(request, control)
    except Exception as e:
        return _error(e)
    return {}


def _error(e: Exception) -> dict[str, Any]:
    if isinstance(e, MemoryError):
        return {"error": f"MemoryError: {e}", "kind": "memory"}
    kind = "unusable" if isinstance(e, XRTError) else "raised"
    return {"error": f"{type(e).__name__}: {e}", "kind": kind}


def _take_pipes() -> tuple[IO[str], IO[bytes]]:
    """Move the pipes to the parent to new descriptors; then stdin is empty and stdout is the log for every library."""
    requests, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: IO[str], jobs: queue.SimpleQueue[str], state: dict[str, pathlib.Path]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in requests:
            jobs.put(line)
    if "folder" in state:  # a parent that was killed cannot clean up
        shutil.rmtree(state["folder"], ignore_errors=True)
    os._exit(0)


def _lower_priority() -> None:
    """Yield the processor to other processes, and be the first that the system kills when memory runs out."""
    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["0"]
    for thread in map(int, threads):  # on Linux each has a value of its own, those of a BLAS too
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def _die_with_parent() -> None:
    """On Linux, be killed when the thread of the parent that started this process ends."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        import ctypes
        import signal

        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
