"""Asking engines in a child process whether they are usable, and which nodes they take.

One that crashes, hangs or takes all memory about it does so there.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import Engine, Phase
from xrt_core.errors import EngineError
from xrt_core.events import EventLog
from xrt_core.guard import leaving
from xrt_core.guard.settings import GuardSettings
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.support import Support

if TYPE_CHECKING:
    from xrt_core.guard.pool import WorkerFailure

_LIMIT: Final = 60.0  # seconds that an engine may take for its answers about one graph


class Answers:
    """What one engine says. supports: for each node that was asked about. fault: what it raised or returned instead of
    an answer, the first time, "" for nothing. failure: how it ended the child; there are no answers then."""

    def __init__(self, supports: Sequence[Support], fault: str = "", failure: WorkerFailure | None = None) -> None:
        self.supports = supports
        self.fault = fault
        self.failure = failure


class Child(Protocol):
    """Who does jobs in a child process: a `Slot` for its own thread, a `Desk` for another."""

    def run(
        self, request: Mapping[str, Any], timeout: float, memory: int, stage: Callable[[str], None]
    ) -> dict[str, Any]:
        """See `Slot.run`."""


class Asker:
    """Asks through the child of one thread of the pool. wanted: whether anybody still wants to know."""

    def __init__(self, child: Child, settings: GuardSettings, wanted: Callable[[], bool] = lambda: True) -> None:
        self._child = child
        self._settings = settings
        self.wanted = wanted

    def probe(self, names: Collection[str]) -> dict[str, WorkerFailure | None]:
        """How each of these engines ends a process that imports and probes it, None for not at all; nothing of those
        of which a child cannot say."""
        from xrt_core.guard.pool import WorkerFailure

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
        from xrt_core.guard.pool import WorkerFailure
        from xrt_core.guard.transport import write_function

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
        from xrt_core.guard.pool import WorkerFailure

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
    from xrt_core.guard.transport import read_function

    function, engine = read_function(pathlib.Path(request["folder"])), engine_of(described)
    found = [asked(engine, n, request["device"], request["phase"]) for n in function.body.nodes]
    return {"supports": [list(support) for support, _ in found], "fault": next((f for _, f in found if f), "")}


def tell(events: EventLog, engine: str, stage: str, failure: WorkerFailure, graph: str = "any graph") -> None:
    """Emit the event of an engine that ended the child in which it was asked. stage: "probe" or "supports"."""
    if failure.kind == "closed" or leaving.begun():
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
    from xrt_core.guard.scratch import new_folder

    made = new_folder("job")
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
