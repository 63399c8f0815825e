"""Support queries: which nodes of a graph the engines support, asked in this process, or under guard in a worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from xrt_core.compiler.services import Services
from xrt_core.engine.contract import Engine, ask_support
from xrt_core.engine.op_kernels import mark_updates
from xrt_core.ir.graph import Graph, Node, Support
from xrt_core.ir.op_traits import index_input
from xrt_core.ir.types import STRING, TensorType
from xrt_core.options import AUTO
from xrt_core.passes.partitioning import Candidate
from xrt_core.passes.shape_specialization import is_late

if TYPE_CHECKING:
    from xrt_core.guard.capability import Answers


Refusal = Callable[[Node], Support | None]
"""Why a node of a graph is not offered to engines, or None if it is."""


class EngineSupport:
    """Creates the partitioning candidates of a graph: one per engine; with "auto", one for all engines together."""

    def __init__(self, services: Services) -> None:
        self._engines = services.engines
        self._phase = services.options.phase
        self._auto = services.auto
        self._guard = services.guard
        self._events = services.events

    def of(self, graph: Graph) -> list[Candidate]:
        """Return the candidates for this graph, by descending priority."""
        refusal = partial(_refusal, unproven=self._unproven(graph))
        nodes = [n for n in graph.nodes if refusal(n) is None]
        capabilities = None if self._guard is None else self._guard.capabilities
        answers = {} if capabilities is None else capabilities.query(graph, nodes, self._phase)
        excluded = {} if capabilities is None else capabilities.excluded
        found = []
        for engine, device in self._engines:
            if engine.name in excluded:
                found.append(_refusing(engine.name, excluded[engine.name]))
            elif engine.name in answers:
                found.append(self._answered(engine.name, nodes, answers[engine.name], refusal))
            else:
                found.append(self._asked(engine, device, refusal))
        if not self._auto or not found:
            return found
        pinned = {n.annotations.engine for n in graph.nodes}
        return [_any_of(found), *(c for c in found if c.name in pinned)]

    def mark_updates(self, graph: Graph, aliases: bool = True) -> Graph:
        """Apply `engine.model_updates.mark_updates` with the kernels of the selected engines.

        An engine registers its kernels when its library is loaded, which this forces. With queries in a worker process
        the library is not loaded here, and only kernels registered in this process count.
        """
        if self._guard is None or self._guard.capabilities is None:
            for engine, _ in self._engines:
                with contextlib.suppress(Exception):  # `supports` will say what is wrong
                    engine.prepare()
        return mark_updates(graph, [e.name for e, _ in self._engines], aliases=aliases)

    def _unproven(self, graph: Graph) -> frozenset[Node]:
        """The nodes of a graph that no launch can check: their indices come into being within a cluster."""
        if self._phase != "inference" or all(index_input(n) is None for n in graph.nodes):
            return frozenset()
        from xrt_core.runtime.input_checks import unproven_indices

        return unproven_indices(graph)

    def _asked(self, engine: Engine, device: str, refusal: Refusal) -> Candidate:
        from xrt_core.guard.timeouts import check_cancelled

        level = logging.WARNING

        def supports(node: Node) -> Support:
            nonlocal level
            refused = refusal(node)
            if refused is not None:
                return refused
            if self._guard is not None:
                check_cancelled()
            found, fault = ask_support(engine, node, device, self._phase)
            if fault:
                self._events.emit("supports.failed", level=level, engine=engine.name, node=node.name, error=fault)
                level = logging.DEBUG  # one warning for all nodes of a graph
            return found

        return Candidate(engine.name, supports)

    def _answered(self, name: str, nodes: Sequence[Node], answers: Answers, refusal: Refusal) -> Candidate:
        """Return the candidate of an engine that was queried in a worker process."""
        said = {id(n): support for n, support in zip(nodes, answers.supports, strict=True)}
        if answers.fault:
            self._events.emit("supports.failed", level=logging.WARNING, engine=name, error=answers.fault)

        def supports(node: Node) -> Support:
            refused = refusal(node)
            return said[id(node)] if refused is None else refused

        return Candidate(name, supports)


def _refusal(node: Node, unproven: frozenset[Node]) -> Support | None:
    if node in unproven:
        return Support.no("its index is computed, and may be out of range for all that is known: the host checks it")
    return why_on_host(node)


def why_on_host(node: Node) -> Support | None:
    """Return why `node` is not offered to engines, or None if it is."""
    if node.subgraphs:
        if is_late(node):
            return Support.no("it waits for shapes that depend on data, and is planned when they arrive")
        return Support.no("the host runs control flow; its bodies are planned by themselves")
    for v in (*node.inputs, *node.outputs):
        if v is None:
            continue
        t = v.type
        if not isinstance(t, TensorType):
            return Support.no(f"the type of {v.name!r} is {t or 'unknown'}, which is not a tensor")
        if t.dtype == STRING:
            return Support.no(f"{v.name!r} holds strings")
        if not t.is_static:
            return Support.no(f"the shape of {v.name!r} is {t}: it depends on data")
    return None


def _refusing(name: str, reason: str) -> Candidate:
    return Candidate(name, lambda node: Support.no(f"{name} was excluded: {reason}"))


def _any_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return a candidate that supports what any of them supports; measurement selects the engine of each cluster."""

    def supports(node: Node) -> Support:
        said = []
        for c in candidates:
            found = c.supports(node)
            if found.ok:
                return found
            said.append(f"{c.name}: {found.reason or 'no reason given'}")
        return Support.no("; ".join(dict.fromkeys(said)))

    return Candidate(AUTO, supports)
