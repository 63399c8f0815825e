"""Asking engines in a child process whether they are usable, and which nodes they take.

One that crashes, hangs or takes all memory about it does so there.

Inquiry: asks the engines of one module about nodes, in a child where there is one, and leaves out who harms it.

What engines said in a child, kept on disk: who did no harm there is not asked there again, by any process.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import pathlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from xrt_core.cache.disk import DiskCache, Miss
from xrt_core.cache.key import CacheKey
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import Engine, Phase
from xrt_core.errors import EngineError, XRTError
from xrt_core.events import EventLog
from xrt_core.guard import background, timeouts
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.worker_pool import Job, WorkerSlot, process_pool
from xrt_core.ir.fingerprint import function_lines
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.support import Support
from xrt_core.runtime.engine_compiler import Compilation

if TYPE_CHECKING:
    from xrt_core.guard.worker_pool import WorkerFailure


_LIMIT: Final = 60.0  # seconds that an engine may take for its answers about one graph


class Answers:
    """What one engine says. supports: for each node that was asked about. fault: what it raised or returned instead of
    an answer, the first time, "" for nothing. failure: how it ended the child; there are no answers then."""

    def __init__(self, supports: Sequence[Support], fault: str = "", failure: WorkerFailure | None = None) -> None:
        self.supports = supports
        self.fault = fault
        self.failure = failure


class Child(Protocol):
    """Who does jobs in a child process: a `WorkerSlot` for its own thread, a `WorkerProxy` for another."""

    def run(
        self, request: Mapping[str, Any], timeout: float, memory: int, stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """See `WorkerSlot.run`."""


class Asker:
    """Asks through the child of one thread of the pool. wanted: whether anybody still wants to know."""

    def __init__(self, child: Child, settings: GuardSettings, wanted: Callable[[], bool] = lambda: True) -> None:
        self._child = child
        self._settings = settings
        self.wanted = wanted

    def probe(self, names: Collection[str]) -> dict[str, WorkerFailure | None]:
        """How each of these engines ends a process that imports and probes it, None for not at all; nothing of those
        of which a child cannot say."""
        from xrt_core.guard.worker_pool import WorkerFailure

        found: dict[str, WorkerFailure | None] = {}
        for name in names:
            with _folder() as folder, contextlib.suppress(_NoAnswer):
                try:
                    self._ask({"ask": "probe", "engine": _described(name)}, folder)
                    found[name] = None
                except WorkerFailure as e:
                    found[name] = e
        return found

    def supports(self, function: Function, engines: Sequence[tuple[Engine, str]], phase: Phase) -> dict[str, Answers]:
        """What each of the engines says about each node; nothing from those that a child cannot have.

        Raises OSError, and ExportError for nodes that cannot be sent.
        """
        from xrt_core.guard.ipc import write_function
        from xrt_core.guard.worker_pool import WorkerFailure

        found: dict[str, Answers] = {}
        with _folder() as folder:
            write_function(function, folder)
            for engine, device in engines:
                described = {"name": engine.name, "module": type(engine).__module__, "class": type(engine).__qualname__}
                request = {"ask": "supports", "engine": described, "device": device, "phase": phase}
                with contextlib.suppress(_NoAnswer):
                    try:
                        answer = self._ask(request, folder)
                        rows = [Support(ok, reason) for ok, reason in answer["supports"]]
                        if len(rows) == len(function.body.nodes):
                            found[engine.name] = Answers(rows, answer["fault"])
                    except WorkerFailure as e:
                        found[engine.name] = Answers((), "", e)
        return found

    def _ask(self, request: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
        """Raises WorkerFailure where the child was lost, _NoAnswer where there is no child, or it cannot answer."""
        from xrt_core.guard.worker_pool import WorkerFailure

        if not self.wanted():
            raise WorkerFailure("closed", "nobody waits for the answer")
        limit = min(self._settings.timeout, _LIMIT)
        asked = {**request, "folder": str(folder), "timeout": limit}
        try:
            answer = self._child.run(asked, limit, self._settings.memory, lambda stage: None)
        except WorkerFailure as e:
            if not self.wanted():  # it was ended because of that
                raise WorkerFailure("closed", "nobody waits for the answer") from e
            if e.kind == "unusable":
                raise _NoAnswer from e
            raise
        if "error" in answer:
            if answer["kind"] == "memory":
                raise WorkerFailure("memory", answer["error"])
            raise _NoAnswer(answer["error"])
        return answer


class _NoAnswer(Exception):
    """A child cannot say; the engine is asked in this process, as its failures are of a harmless kind."""


def about(nodes: Sequence[Node], graph: Graph) -> Function:
    """The nodes of a graph, all of them with static types, as a Function to ask about."""
    made = {v: None for n in nodes for v in n.outputs if v is not None}
    read = dict.fromkeys(v for n in nodes for v in n.uses() if v.data is None and v not in made)
    body = Graph(tuple(read), tuple(made), nodes, opsets=graph.opsets, name=graph.name)
    return Function.from_graph(body, name=graph.name or "graph")


def asked(engine: Engine, node: Node, device: str, phase: Phase) -> tuple[Support, str]:
    """What an engine says about a node here and now, and what it did instead of saying it, "" for nothing."""
    try:
        found = engine.supports(node, device, phase)
        if isinstance(found, Support):
            return found, ""
        fault = f"it returned {found!r} instead of a Support"
    except Exception as e:  # a broken engine refuses, it does not break the model
        fault = repr(e)
    return Support.no(f"{engine.name} failed to say whether it takes the node: {fault}"), fault


def answer(request: Mapping[str, Any], engine_of: Callable[[Mapping[str, str]], Engine]) -> dict[str, Any]:
    """The child's side: the answer to a request of an `Asker`. engine_of: the engine that a request describes."""
    described = request["engine"]
    if request["ask"] == "probe":
        with contextlib.suppress(EngineError):  # one that says so by itself is no danger
            engine = engine_of(described) if "module" in described else process_engines.get(described["name"])
            if engine.automatic:
                process_engines.status(engine.name)
        return {}
    from xrt_core.guard.ipc import read_function

    function, engine = read_function(pathlib.Path(request["folder"])), engine_of(described)
    found = [asked(engine, n, request["device"], request["phase"]) for n in function.body.nodes]
    return {"supports": [list(support) for support, _ in found], "fault": next((f for _, f in found if f), "")}


def tell(events: EventLog, engine: str, stage: str, failure: WorkerFailure, graph: str = "any graph") -> None:
    """Emit the event of an engine that ended the child in which it was asked. stage: "probe" or "supports"."""
    if failure.kind == "closed" or timeouts.begun():
        return
    more: dict[str, Any] = {} if failure.exit_code is None else {"exit_code": failure.exit_code}
    more |= {"log": failure.log} if failure.log else {}
    events.fallback(
        cluster=graph,
        engine=engine,
        stage=stage,
        kind=failure.kind,
        error=f"{failure}; the engine is left out",
        **more,
    )


def _described(name: str) -> dict[str, str]:
    owner = process_engines.registered(name)
    return {"name": name} if owner is None else {"name": name, "module": owner.__module__, "class": owner.__qualname__}


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    from xrt_core.guard.ipc import new_folder

    made = new_folder("job")
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class Inquiry:
    """Where a call is planned beside its caller, or waits for compilation anyway, engines are asked in a child first.

    An engine that ends the child is left out of the module from then on, with one event. Others are asked again in this
    process by whoever needs to know, as they have answered without harm. compilation: with the engines that are left.
    every: with all of them. left_out: engine -> why. disk: has the answers of earlier processes.
    """

    def __init__(
        self, settings: GuardSettings, compilation: Compilation, disk: DiskCache | None, events: EventLog
    ) -> None:
        self._disk = disk
        self.every = compilation
        self.compilation = compilation
        self.left_out: Mapping[str, str] = {}
        self._settings = settings
        self._events = events
        self._lock = threading.Lock()

    def ask(self, graph: Graph, nodes: Sequence[Node], phase: Phase) -> Mapping[str, Answers]:
        """The answers of those engines that could be asked in a child."""
        compilation, here, disk = self.compilation, background.asker(), usable(self._disk)
        if not (nodes and self._settings.sandbox) or (here is None and self._settings.asynchronous):
            return {}
        known: dict[str, Answers] = {}
        try:
            function = about(nodes, graph)
            keys = {name: answers_key(compilation.key(function, name)) for name in compilation.engines} if disk else {}
            if disk is not None:
                known = {n: a for n, k in keys.items() if (a := find_answers(k, function, disk)) is not None}
            engines = [e for name, e in compilation.engines.items() if name not in known]
            if not engines:
                found = {}
            elif here is not None:
                found = here.supports(function, engines, phase)
            else:
                found = self._by_job(function, engines, phase)
        except (OSError, XRTError) as e:
            self._events.emit("guard.not_asked_apart", graph=graph.name, reason=f"{type(e).__name__}: {e}")
            return known
        background.check()
        if disk is not None:
            for name, answers in found.items():
                keep_answers(keys[name], function, disk, answers)
        failed = {name: a.failure for name, a in found.items() if a.failure is not None}
        for name, failure in failed.items():
            tell(self._events, name, "supports", failure, graph.name or "graph")
        if failed:
            with self._lock:
                self.left_out = {**self.left_out, **{name: f"{f.kind}: {f}" for name, f in failed.items()}}
                self.compilation = self.every.without(self.left_out)
        return {**known, **{name: a for name, a in found.items() if a.failure is None}}

    def _by_job(
        self, function: Function, engines: Sequence[tuple[Engine, str]], phase: Phase
    ) -> dict[str, Answers]:
        found: dict[str, Answers] = {}
        errors: list[OSError | XRTError] = []

        def work(slot: WorkerSlot) -> None:
            try:
                found.update(Asker(slot, self._settings).supports(function, engines, phase))
            except (OSError, XRTError) as e:
                errors.append(e)

        job = Job(work, self)
        process_pool().submit(job)
        job.done.wait()
        if errors:
            raise errors[0]
        return found


_REVISION: Final = "1"
"""Raised with every change that makes older answers doubtful."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


def answers_key(executable: CacheKey) -> CacheKey:
    """The key of an engine's answers about the nodes of a function, from that of its executable of all of them."""
    return CacheKey((*executable.rows, ("answers", _REVISION)))


def find_answers(key: CacheKey, function: Function, disk: DiskCache) -> Answers | None:
    """The answers of a key, one for each node; None where there are none."""
    hit = disk.read(key, _text(function))
    if isinstance(hit, Miss):
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(hit.blob)
        supports = [Support(bool(ok), str(reason)) for ok, reason in found["supports"]]
        if len(supports) == len(function.body.nodes):
            return Answers(supports, str(found["fault"]))
    return None


def keep_answers(key: CacheKey, function: Function, disk: DiskCache, answers: Answers) -> None:
    """Keep answers that were given without harm."""
    if answers.failure is None:
        blob = json.dumps({"supports": [list(s) for s in answers.supports], "fault": answers.fault})
        info = _info(f"answers about {function.name}", len(function.body.nodes))
        disk.write(key, info, _text(function), blob.encode())


def probe_key(name: str, package: str, version: str) -> CacheKey:
    """The key of an engine's probe: its package, what that requires, as it is installed, and the interpreter."""
    rows = [("engine", name), ("package", f"{package} {version}"), ("probe", _REVISION)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in sorted(importlib.metadata.requires(package) or ()):
            found = _NAME.match(requirement)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                if found is not None:
                    rows.append((f"requires {found[0]}", importlib.metadata.version(found[0])))
    return CacheKey((*dict(rows).items(), ("python", f"{sys.executable} {sys.version}")))


def was_harmless(key: CacheKey, disk: DiskCache) -> bool:
    """Whether an engine has been probed in a child before, and the child lived on."""
    return not isinstance(disk.read(key, b""), Miss)


def keep_harmless(key: CacheKey, name: str, disk: DiskCache) -> None:
    """Note that an engine has been probed in a child that lived on."""
    disk.write(key, _info(f"probe of {name}", 0), b"", b"{}")


def usable(disk: DiskCache | None) -> DiskCache | None:
    """The cache, where it may be read now; entries that are to be made anew ("verify") are not read."""
    with contextlib.suppress(XRTError):
        if disk is not None and disk.mode != "verify":
            disk.prepare()
            return disk
    return None


def _info(what: str, nodes: int) -> dict[str, object]:
    return {"cluster": what, "nodes": nodes, "created": round(time.time(), 3), "compile_seconds": 0.0}


def _text(function: Function) -> bytes:
    return "\n".join(function_lines(function)).encode("utf-8", "surrogatepass")
