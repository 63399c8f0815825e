"""The child process: takes jobs from its parent, one at a time, compiles and examines, and answers.

Started as `python -c "from xrt_core.guard.worker import main; main()"`. Requests come as JSON lines on stdin, answers
go out as JSON lines on what was stdout; everything that an engine's library prints goes to stderr, the worker's log.
The process ends with its parent, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pathlib
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final

import numpy as np

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.store import ExecutableStore
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import CompileOptions, Engine, Executable, RunOptions
from xrt_core.errors import EngineError, EngineNotFoundError, XRTError
from xrt_core.events import EventLog
from xrt_core.guard.capability import answer
from xrt_core.guard.composite import Build
from xrt_core.guard.ipc import read_arrays, read_function
from xrt_core.ir.function import Function
from xrt_core.runtime.engine_compiler import Compilation
from xrt_core.verify.evaluate import NO_FAULTS, Candidate, ExamineSettings, examine
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.reference import run_host
from xrt_core.verify.subgraph import subfunction
from xrt_core.verify.verdict import Faults, Outcome, Piece

Say = Callable[[Mapping[str, Any]], None]

TRYING: Final = "trying "
"""A stage that the child tells: this and the engine's name, before each of its compilations."""

NICE: Final = 3
"""How much the child gives way to who waits for results: its parent's calls come first."""
_GRACE: Final = 10.0  # seconds after the limit at which a child that its parent did not kill ends by itself


def main() -> None:
    """Serve until the parent closes stdin, or is gone."""
    requests, answers = _take_pipes()
    faulthandler.enable()
    _give_way()
    _die_with_parent()
    state: dict[str, pathlib.Path] = {}
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, jobs, state), daemon=True).start()

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"ready": os.getpid()})
    while True:
        request = json.loads(jobs.get())
        state["folder"] = pathlib.Path(request["folder"])
        # a thread of C code: it ends the process even where an engine hangs with the interpreter's lock
        faulthandler.dump_traceback_later(request["timeout"] + _GRACE, exit=True)
        say(_answer(request, say))
        faulthandler.cancel_dump_traceback_later()


def run_job(request: Mapping[str, Any], say: Say) -> Outcome:
    """Compile and examine what a request describes. Raises whatever goes wrong before the examination begins."""
    folder = pathlib.Path(request["folder"])
    function = read_function(folder)
    if function.fingerprint != request["fingerprint"]:
        raise XRTError("the model's file has changed since it was loaded: what arrived is another function")
    inputs = None if request["inputs"] is None else read_arrays(folder, request["inputs"])
    events = EventLog()
    c = request["cache"]
    store = ExecutableStore(DiskCache(pathlib.Path(c["folder"]), c["limit"], c["mode"]), events)
    engines = [(engine_of(e), e["device"]) for e in request["engines"]]
    compilation = Compilation(engines, CompileOptions(**request["options"]), store, events)
    settings = ExamineSettings(**request["settings"])
    if "probe" in request:
        return probed(function, compilation, request["probe"]["engine"], request["probe"]["nodes"], settings, inputs)
    return examined(
        function,
        compilation,
        request["candidates"],
        settings,
        inputs,
        lambda: say({"stage": "verifying"}),
        lambda engine: say({"stage": TRYING + engine}),
        {engine: Faults.from_json(f) for engine, f in request["faults"].items()},
    )


def probed(
    function: Function,
    compilation: Compilation,
    engine: str,
    nodes: Sequence[int],
    settings: ExamineSettings,
    inputs: Sequence[np.ndarray] | None,
) -> Outcome:
    """Compile some nodes of a function and run them once, on the host's values for what enters them, to see whether
    this process lives on. Raises whatever the engine raises."""
    part = subfunction(function, nodes)
    values = run_host(
        function, synthesize_inputs(function, seed=settings.seed) if inputs is None else inputs, keep=True
    )[1]
    made = _build(compilation).executable(part, engine)
    made.run([values[v].copy() for v in part.body.inputs], RunOptions(donate=False))
    return Outcome("ready", (Piece(engine, tuple(nodes)),), "it lives on")


def examined(
    function: Function,
    compilation: Compilation,
    candidates: Sequence[str],
    settings: ExamineSettings,
    inputs: Sequence[np.ndarray] | None,
    compiled: Callable[[], None],
    trying: Callable[[str], None] = lambda engine: None,
    faults: Mapping[str, Faults] = NO_FAULTS,
) -> Outcome:
    """Examine a function on the engines `candidates`, here and now; `compiled` is called after each compilation,
    `trying` with the engine's name before it. faults: see `examine`."""
    build = _build(compilation, compiled)

    def candidate(engine: str, pieces: tuple[Piece, ...] | None = None) -> Candidate:
        alone = pieces is not None

        def compile(f: Function, fused: bool) -> Executable:
            trying(engine)
            return build.executable(f, engine, fused, alone=alone)

        name = f"{engine} alone" if alone else engine
        return Candidate(name, compile, compilation.engines[engine][0].tolerance, pieces)

    ways = []
    for engine in candidates:
        ways.append(candidate(engine))
        if settings.tune and engine not in faults and (pieces := build.alone(function, engine)) is not None:
            ways.append(candidate(engine, pieces))
    return examine(function, ways, settings, inputs, faults=faults)


def _build(compilation: Compilation, compiled: Callable[[], None] = lambda: None) -> Build:
    """Executables as they will run: what the disk gives back, where an engine serialises. `compiled` is called after
    each compilation."""

    def compile(f: Function, engine: str, fused: bool, shared: bool) -> Executable:
        made = compilation.executable(f, engine, fused, shared)
        made = compilation.stored(f, engine, fused, shared) or made
        compiled()
        return made

    return Build(compilation, compile)


def engine_of(described: Mapping[str, str]) -> Engine:
    """The engine that the parent has, by name and class. Raises EngineError where it cannot be had here."""
    name, module, qualname = described["name"], described["module"], described["class"]
    with contextlib.suppress(EngineNotFoundError):
        found = process_engines.get(name)
        if (type(found).__module__, type(found).__qualname__) == (module, qualname):
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


def _answer(request: Mapping[str, Any], say: Say) -> dict[str, Any]:
    try:
        if "ask" in request:
            return answer(request, engine_of)
        return {"outcome": run_job(request, say).to_json()}
    except MemoryError as e:
        return {"error": f"MemoryError: {e}", "kind": "memory"}
    except Exception as e:
        kind = "unusable" if isinstance(e, XRTError) else "raised"
        return {"error": f"{type(e).__name__}: {e}", "kind": kind}


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """The two pipes to the parent, on descriptors that no library knows; stdin is empty and stdout is the log then."""
    requests, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
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


def _give_way() -> None:
    """Let others have the processor first, and be what the system ends first when memory runs out."""
    with contextlib.suppress(AttributeError, OSError):
        os.nice(NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def _die_with_parent() -> None:
    """Where the system can do it (Linux), be killed when the parent's thread that started this process is gone."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        import ctypes
        import signal

        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
