"""Capability queries: which engines can be used, and which nodes they support, asked in a worker process first.

Native libraries do crash when they are imported, probed or asked about a node. An engine that ends, hangs or overfills
the worker is excluded, with one `FallbackEvent`; others are then asked again in this process by whoever needs to know.
Answers that were given without incident are kept in the disk cache, so that no process starts a worker for them again.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.store import Compilation
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import Engine, Phase, ask_support
from xrt_core.engine.device_kinds import device_kind, is_host
from xrt_core.errors import EngineError, XRTError
from xrt_core.events import EventLog
from xrt_core.guard.ipc import Message, describe_engine, new_folder, read_function, write_function
from xrt_core.guard.timeouts import BackgroundTask, check_cancelled, current_task, is_shutting_down
from xrt_core.guard.verdict_cache import answers_key, probe_key, read_json, write_json
from xrt_core.guard.worker_pool import WorkerFailure, process_pool
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Support
from xrt_core.options.guard_settings import GuardSettings

_LIMIT: Final = 60.0  # seconds that one engine may take for one query


@dataclass(frozen=True, slots=True)
class Answers:
    """What one engine says about a graph. supports: for each node. fault: the first thing that it raised, or returned
    instead of a Support; "" for nothing."""

    supports: tuple[Support, ...]
    fault: str = ""

    def fits(self, function: Function) -> bool:
        """Whether there is an answer for each node."""
        return len(self.supports) == len(function.body.nodes)


class Capabilities:
    """Queries the engines of one module in a worker, where a caller does not wait for the answer or the guard is
    synchronous.

    all_engines: the compilation with every engine. compilation: without the excluded ones. excluded: engine -> why.
    disk: the disk cache, None where it is off.
    """

    def __init__(
        self, settings: GuardSettings, compilation: Compilation, disk: DiskCache | None, events: EventLog
    ) -> None:
        self.all_engines = compilation
        self.compilation = compilation
        self.excluded: Mapping[str, str] = {}
        self._settings = settings
        self._disk = disk
        self._events = events
        self._lock = threading.Lock()

    def query(self, graph: Graph, nodes: Sequence[Node], phase: Phase) -> Mapping[str, Answers]:
        """What engines say about nodes of a graph, by engine; nothing of those that a worker cannot answer for. Engines
        that fail the worker are excluded. Raises Cancelled."""
        compilation, disk = self.compilation, _readable(self._disk)
        task = _asking_task(self._settings, self)
        if task is None or not (nodes and self._settings.sandbox):
            return {}
        found: dict[str, Answers] = {}
        failed: dict[str, WorkerFailure] = {}
        try:
            function = function_of(nodes, graph)
            self.exclude_unidentified(function)
            compilation = self.compilation
            with _Requests(self._settings, task) as requests:
                for engine, device in compilation.engines.values():
                    key = None if disk is None else answers_key(compilation.key(function, engine.name))
                    answers = None if key is None else read_json(key, function, disk, Answers)
                    if answers is None or not answers.fits(function):
                        try:
                            answers = requests.supports(engine, device, phase, function)
                        except WorkerFailure as e:
                            failed[engine.name] = e
                        if answers is not None and key is not None:
                            data = {"supports": [list(s) for s in answers.supports], "fault": answers.fault}
                            write_json(key, f"answers about {function.name}", function, disk, data)
                    if answers is not None:
                        found[engine.name] = answers
        except (OSError, XRTError) as e:
            self._events.emit("guard.no_capability_query", graph=graph.name, reason=f"{type(e).__name__}: {e}")
        check_cancelled()
        for name, failure in failed.items():
            _report(self._events, name, "supports", failure, graph.name or "graph")
        self._exclude({name: f"{f.kind}: {f}" for name, f in failed.items()})
        return found

    def exclude_unidentified(self, function: Function) -> None:
        """Exclude the engines that fail to say what their executables depend on (`Engine.fingerprint`)."""
        compilation = self.compilation
        for name in compilation.engines:
            try:
                compilation.key(function, name)
            except EngineError as e:
                self._events.fallback(
                    cluster=function.name, engine=name, stage="compile", kind="unusable", error=str(e)
                )
                self._exclude({name: str(e)})

    def _exclude(self, reasons: Mapping[str, str]) -> None:
        if reasons:
            with self._lock:
                self.excluded = {**self.excluded, **reasons}
                self.compilation = self.all_engines.without(self.excluded)


class Probed(NamedTuple):
    """What workers found of engines. failed: those that fail a worker in which they are imported and probed. usable:
    those that can be used, as a worker with the same packages found, now or earlier."""

    failed: list[str]
    usable: set[str]


def probed(
    settings: GuardSettings, disk: DiskCache | None, events: EventLog, names: Collection[str] = ()
) -> Probed:
    """What workers find of these engines, by default of all that are known. Without a sandbox none is asked, nor by a
    thread that should not wait (`Capabilities`). Raises Cancelled."""
    task = _asking_task(settings, probed)
    found, readable = Probed([], set()), _readable(disk)
    if task is None or not settings.sandbox:
        return found
    # an engine that this process registered has no version, and may be another one in the next process
    versions = {line.name: line for line in process_engines.listing(probe=False) if line.version}
    with _Requests(settings, task) as requests:
        for name in (n for n in process_engines.names() if not names or n in names):
            line = None if readable is None else versions.get(name)
            key = None if line is None else probe_key(name, line.package, line.version)
            known = None if key is None else read_json(key, None, readable, dict[str, bool])
            if known is None:
                try:
                    answer = requests.probe(name)
                except WorkerFailure as e:
                    check_cancelled()
                    _report(events, name, "probe", e)
                    found.failed.append(name)
                    continue
                known = {} if answer is None else {"usable": answer.usable}
                if known and key is not None:
                    write_json(key, f"probe of {name}", None, readable, known)
            if known.get("usable", False):
                found.usable.add(name)
    check_cancelled()
    return found


def _asking_task(settings: GuardSettings, owner: object) -> BackgroundTask | None:
    """The task that asks a worker: this thread's own; for a caller that waits for the guard anyway a new one; None for
    other callers."""
    if settings.asynchronous and not settings.isolated:
        return current_task()
    return current_task() or BackgroundTask(owner, lambda: True)


def function_of(nodes: Sequence[Node], graph: Graph) -> Function:
    """Nodes of a graph, all of static types, as a Function to query about."""
    made = {v: None for n in nodes for v in n.outputs if v is not None}
    read = dict.fromkeys(v for n in nodes for v in n.uses() if v.data is None and v not in made)
    body = Graph(tuple(read), tuple(made), nodes, opsets=graph.opsets, name=graph.name)
    return Function.from_graph(body, name=graph.name or "graph")


# --- requests to a worker ---------------------------------------------------------------------------------------------


def answer(request: Mapping[str, Any], engine_of: Callable[[Mapping[str, str]], Engine]) -> dict[str, Any]:
    """The worker's answer to a query. engine_of: imports the engine that a request describes."""
    described = request["engine"]
    if request["query"] == "probe":
        if "module" not in described and described["name"] not in process_engines.names():
            process_engines.refresh()  # it was installed after this process began
        with contextlib.suppress(EngineError):  # an engine that refuses by an error is safe
            engine = engine_of(described) if "module" in described else process_engines.get(described["name"])
            if engine.automatic:
                status = process_engines.status(engine.name)
                for device in status.devices or engine.devices:  # what the caller's process asks next
                    engine.fingerprint(device)
                return {"usable": status.available}
        return {}
    function, engine = read_function(pathlib.Path(request["folder"])), engine_of(described)
    found = [ask_support(engine, n, request["device"], request["phase"]) for n in function.body.nodes]
    return {"supports": [list(support) for support, _ in found], "fault": next((f for _, f in found if f), "")}


class _Requests:
    """Sends queries to a worker, with what they need in a temporary folder. The methods raise OSError, and
    WorkerFailure where the engine failed the worker."""

    def __init__(self, settings: GuardSettings, task: BackgroundTask) -> None:
        self._settings = settings
        self._task = task
        self._folder: pathlib.Path | None = None
        self._sent: Function | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def folder(self) -> pathlib.Path:
        """The temporary folder, made when first needed."""
        if self._folder is None:
            self._folder = new_folder("job")
        return self._folder

    def probe(self, name: str) -> Message | None:
        """Import and probe an engine. Returns None if there is no worker that can do it."""
        engine = process_engines.registered(name)
        described = {"name": name} if engine is None else describe_engine(engine)
        devices = ("cuda",) if engine is None else engine.devices
        on_device = any(not is_host(d) and device_kind(d).status().ok for d in devices)
        return self._send({"query": "probe", "engine": described}, on_device)

    def supports(self, engine: Engine, device: str, phase: Phase, function: Function) -> Answers | None:
        """What an engine says about each node; None if there is no worker that can ask it. Raises ExportError too."""
        if self._sent is not function:
            write_function(function, self.folder)
            self._sent = function
        request = {"query": "supports", "engine": describe_engine(engine), "device": device, "phase": phase}
        found = self._send(request, not is_host(device))
        if found is None or found.supports is None:
            return None
        answers = Answers(found.supports, found.fault)
        return answers if answers.fits(function) else None

    def _send(self, request: Mapping[str, Any], on_device: bool) -> Message | None:
        limit = min(self._settings.timeout, _LIMIT)
        request = {**request, "folder": str(self.folder), "timeout": limit}
        try:
            found = process_pool().call(request, limit, self._settings.memory, self._task, on_device=on_device)
        except WorkerFailure as e:
            if e.kind == "unusable":
                return None
            raise
        if found.error is not None and found.kind in ("memory", "side effect"):
            raise WorkerFailure(found.kind, found.error)
        return None if found.error is not None else found


def _report(events: EventLog, engine: str, stage: str, failure: WorkerFailure, graph: str = "any graph") -> None:
    if failure.kind == "closed" or is_shutting_down():
        return
    more: dict[str, Any] = {} if failure.exit_code is None else {"exit_code": failure.exit_code}
    more |= {"log": failure.log} if failure.log else {}
    error = f"{failure}; the engine is excluded"
    events.fallback(cluster=graph, engine=engine, stage=stage, kind=failure.kind, error=error, **more)


def _readable(disk: DiskCache | None) -> DiskCache | None:
    """The disk cache if its entries may be used; in mode "verify" they are made anew."""
    with contextlib.suppress(XRTError):
        if disk is not None and disk.mode != "verify":
            disk.prepare()
            return disk
    return None
