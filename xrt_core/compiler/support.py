"""Candidates: what the engines of a pipeline say about the nodes of a graph, asked here, or under guard in a child."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrt_core.compiler.passes import why_on_host
from xrt_core.engine.contract import Engine
from xrt_core.events import EventLog
from xrt_core.guard.timeouts import check_cancelled
from xrt_core.ir.annotations import Phase
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.support import Support
from xrt_core.options import AUTO
from xrt_core.passes.partitioning import Candidate
from xrt_core.runtime.engine_compiler import ask_support

if TYPE_CHECKING:
    from xrt_core.guard.capability import Answers
    from xrt_core.guard.manager import GuardManager


class EngineSupport:
    """Makes the candidates for each graph. auto: one takes what any of them takes. guard: asks them in a child."""

    def __init__(
        self,
        engines: Sequence[tuple[Engine, str]],
        phase: Phase,
        auto: bool,
        guard: GuardManager | None,
        events: EventLog,
    ) -> None:
        self._engines = engines
        self._phase = phase
        self._auto = auto
        self._guard = guard
        self._events = events

    def of(self, graph: Graph) -> list[Candidate]:
        """Those that may have nodes of this graph, in the order to try them."""
        nodes = [n for n in graph.nodes if why_on_host(n) is None]
        capabilities = None if self._guard is None else self._guard.capabilities
        answers = {} if capabilities is None else capabilities.query(graph, nodes, self._phase)
        excluded = {} if capabilities is None else capabilities.excluded
        found = []
        for engine, device in self._engines:
            if engine.name in excluded:
                found.append(_refusing(engine.name, excluded[engine.name]))
            elif engine.name in answers:
                found.append(self._answered(engine.name, nodes, answers[engine.name]))
            else:
                found.append(self._asked(engine, device))
        if not self._auto or not found:
            return found
        pinned = {n.annotations.engine for n in graph.nodes}
        return [_any_of(found), *(c for c in found if c.name in pinned)]

    def _asked(self, engine: Engine, device: str) -> Candidate:
        level = logging.WARNING

        def supports(node: Node) -> Support:
            nonlocal level
            refused = why_on_host(node)
            if refused is not None:
                return refused
            check_cancelled()
            found, fault = ask_support(engine, node, device, self._phase)
            if fault:
                self._events.emit("supports.failed", level=level, engine=engine.name, node=node.name, error=fault)
                level = logging.DEBUG  # one warning for all nodes of a graph
            return found

        return Candidate(engine.name, supports)

    def _answered(self, name: str, nodes: Sequence[Node], answers: Answers) -> Candidate:
        """One whose answers came from a child."""
        said = {id(n): support for n, support in zip(nodes, answers.supports, strict=True)}
        if answers.fault:
            self._events.emit("supports.failed", level=logging.WARNING, engine=name, error=answers.fault)

        def supports(node: Node) -> Support:
            refused = why_on_host(node)
            return said[id(node)] if refused is None else refused

        return Candidate(name, supports)


def _refusing(name: str, reason: str) -> Candidate:
    return Candidate(name, lambda node: Support.no(f"{name} was excluded: {reason}"))


def _any_of(candidates: Sequence[Candidate]) -> Candidate:
    """One that takes what any of them takes: which of them runs a cluster is found out by trying."""

    def supports(node: Node) -> Support:
        said = []
        for c in candidates:
            found = c.supports(node)
            if found.ok:
                return found
            said.append(f"{c.name}: {found.reason or 'no reason given'}")
        return Support.no("; ".join(dict.fromkeys(said)))

    return Candidate(AUTO, supports)
