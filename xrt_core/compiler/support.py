"""Support queries: which nodes of a graph the engines support, asked in this process, or under guard in a worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from xrt_core.compiler.services import Services
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import Engine, ask_support
from xrt_core.engine.device_kinds import CPU, is_host
from xrt_core.engine.op_kernels import mark_updates
from xrt_core.errors import EngineError, XRTError
from xrt_core.ir.graph import OPEN_REGION, Graph, Node, Support, Value, engine_at, is_placed, nodes_within
from xrt_core.ir.inference import infer_types, trip_count
from xrt_core.ir.op_traits import draws_random, may_read_indices, traits_of
from xrt_core.ir.types import STRING, TensorType
from xrt_core.options import AUTO
from xrt_core.passes.data_dependent_shapes import closed, is_late
from xrt_core.passes.partitioning import Candidate, devices_of
from xrt_core.passes.sized_graphs import node_at
from xrt_core.runtime.input_checks import (
    Within,
    has_symbolic_index,
    is_unlimited,
    is_within,
    raises_for_indices,
    unproven_indices,
)

if TYPE_CHECKING:
    from xrt_core.guard.capability import Answers
    from xrt_core.passes.symbolic_shapes import SymbolicShapes


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
        self._lowered = services.precision is not None
        self._isolated = services.options.guard == "isolated"

    def of(self, graph: Graph, symbolic: SymbolicShapes | None = None) -> list[Candidate]:
        """Return the candidates for this graph, by descending priority. symbolic: what is known of its symbolic
        dimensions, if it has any, so that engines of static shapes take no node of it."""
        refusal = partial(
            _refusal,
            unproven=self._unproven(graph, () if symbolic is None else symbolic.within),
            lowered=self._lowered,
            tried=self._guard is not None,
            checked=self._phase == "inference",
            symbolic=symbolic,
        )
        any_open = any(engine.open_shapes == "results" for engine, _ in self._engines)
        region = next((n.annotations.engine or "" for n in graph.nodes if n.annotations.region == OPEN_REGION), "")
        raising = {op for engine, device in self._engines for op in _raising(engine, device)}
        by_any = partial(refusal, open_results=any_open, region=region, raising=raising)
        nodes = [n for n in graph.nodes if by_any(n) is None]
        capabilities = None if self._guard is None else self._guard.capabilities
        answers = {} if capabilities is None else capabilities.query(graph, nodes, self._phase)
        excluded = {} if capabilities is None else capabilities.excluded
        found = []
        devices = devices_of(graph) if is_placed(graph) else ()
        elsewhere = [(e, d) for d in devices for e, own in self._engines if d != own and drives(e, d)]
        for engine, device in self._engines:
            mine = _of_engine(refusal, engine, device)
            if symbolic and engine.dynamic_dims == "none":
                found.append(_refusing(engine.name, "it takes static shapes only", "is left out"))
            elif engine.name in excluded:
                found.append(_refusing(engine.name, excluded[engine.name]))
            elif engine.name in answers:
                found.append(self._answered(engine.name, nodes, answers[engine.name], mine))
            else:
                found.append(self._asked(engine, device, mine))
        placed = [
            self._asked(e, d, _of_engine(refusal, e, d), engine_at(e.name, d))
            for e, d in elsewhere
            if e.name not in excluded and not (symbolic and e.dynamic_dims == "none")
        ]
        if not self._auto or not found:
            return [*found, *placed]
        pinned = {n.annotations.engine for n in graph.nodes}
        return [_any_of(found), *(c for c in found if c.name in pinned), *placed]

    def taken_of_any_shape(
        self, graph: Graph, nodes: Sequence[Node], symbolic: SymbolicShapes | None = None
    ) -> tuple[str, frozenset[Node]]:
        """The first engine that takes nodes whose shapes depend on data (`Engine.open_shapes`), and those of `nodes`
        that it takes; "" where there is no such engine. What is marked or placed stays where it is."""
        known = (e for e, device in self._engines if e.open_shapes == "any" and is_host(device))
        engine = next(known, None) if self._phase == "inference" and not (self._lowered or self._isolated) else None
        if engine is None:
            return "", frozenset()
        unproven = self._unproven(graph, () if symbolic is None else symbolic.within)
        raising = engine.checks_indices
        offered = [n for n in nodes if not (n in unproven or has_symbolic_index(n)) or raises_for_indices(n, raising)]
        offered = [n for n in offered if (a := n.annotations).engine is None and a.device is None]
        offered = [n for n in offered if not n.attributes or _marked_elsewhere(n, engine.name) is None]
        refusal = partial(_refusal_in_region, tried=self._guard is not None, symbolic=symbolic is not None)
        offered = closed(graph, [n for n in offered if refusal(n) is None])
        capabilities = None if self._guard is None else self._guard.capabilities
        if capabilities is not None:
            answers = capabilities.query(graph, offered, self._phase)
            if engine.name in capabilities.excluded:
                return "", frozenset()
            if engine.name in answers:
                said = zip(offered, answers[engine.name].supports, strict=True)
                return engine.name, frozenset(n for n, support in said if support.ok)
        return engine.name, frozenset(n for n in offered if ask_support(engine, n, CPU.name, self._phase)[0].ok)

    def takes_natively(self, node: Node, sizes: Mapping[str, int]) -> bool:
        """Whether the first engine runs a plugin's node as it is, rather than what it is lowered to. sizes: of the
        symbols in its inputs' shapes, for which the engine is asked."""
        if self._phase != "inference" or self._auto or not self._engines:
            return False
        engine, device = self._engines[0]
        if node.operator not in engine.native_operators:
            return False
        node = node_at(node, sizes) if sizes else node
        try:
            types = infer_types(node)
        except XRTError:
            return False
        outputs = [None if v is None else Value(v.name, t) for v, t in zip(node.outputs, types, strict=True)]
        typed = node.replace(outputs=outputs)
        if why_on_host(typed) is not None:
            return False
        capabilities = None if self._guard is None else self._guard.capabilities
        if capabilities is not None:
            inputs = [v for v in typed.inputs if v is not None and v.data is None]
            alone = Graph(inputs, [v for v in outputs if v is not None], [typed], opsets={node.domain: node.version})
            answers = capabilities.query(alone, alone.nodes, self._phase)
            if engine.name in capabilities.excluded:
                return False
            if engine.name in answers:
                return answers[engine.name].supports[0].ok
        return ask_support(engine, typed, device, self._phase)[0].ok

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

    def _unproven(self, graph: Graph, within: Within) -> frozenset[Node]:
        """The nodes of a graph that no launch can check: their indices come into being within a cluster."""
        if self._phase != "inference" or not any(map(may_read_indices, graph.nodes)):
            return frozenset()
        return unproven_indices(graph, within)

    def _asked(self, engine: Engine, device: str, refusal: Refusal, name: str = "") -> Candidate:
        from xrt_core.guard.timeouts import check_cancelled

        level = logging.WARNING

        def supports(node: Node) -> Support:
            nonlocal level
            refused = refusal(node)
            if refused is None and node.attributes:
                refused = _marked_elsewhere(node, engine.name)
            if refused is not None:
                return refused
            if self._guard is not None:
                check_cancelled()
            found, fault = ask_support(engine, node, device, self._phase)
            if fault:
                self._events.emit("supports.failed", level=level, engine=engine.name, node=node.name, error=fault)
                level = logging.DEBUG  # one warning for all nodes of a graph
            return found

        return Candidate(name or engine.name, supports)

    def _answered(self, name: str, nodes: Sequence[Node], answers: Answers, refusal: Refusal) -> Candidate:
        """Return the candidate of an engine that was queried in a worker process."""
        said = {id(n): support for n, support in zip(nodes, answers.supports, strict=True)}
        if answers.fault:
            self._events.emit("supports.failed", level=logging.WARNING, engine=name, error=answers.fault)

        def supports(node: Node) -> Support:
            refused = refusal(node)
            if refused is None and node.attributes:
                refused = _marked_elsewhere(node, name)
            return said[id(node)] if refused is None else refused

        return Candidate(name, supports)


def drives(engine: Engine, device: str) -> bool:
    """Whether an engine can use a device here."""
    try:
        process_engines.device(engine, device)
    except EngineError:
        return False
    return True


def _refusal(
    node: Node,
    unproven: frozenset[Node],
    lowered: bool,
    tried: bool,
    checked: bool,
    symbolic: SymbolicShapes | None = None,
    open_results: bool = False,
    region: str = "",
    raising: Collection[str] = (),
) -> Support | None:
    """Why a node is not offered to an engine. open_results: it takes nodes whose results' shapes depend on data.
    region: the engine for which the nodes of such shapes may be marked. raising: the operators of which it raises for
    an index out of range; control flow whose bodies compute indices for those alone is its."""
    if region and node.annotations.region == OPEN_REGION and node.annotations.engine == region:
        return _refusal_in_region(node, tried, symbolic is not None)
    if node.attributes and node.subgraphs:
        if lowered:
            return Support.no("its bodies are lowered in precision and planned by themselves")
        if tried and (refused := _endless(node)) is not None:
            return refused
    if node in unproven:
        if node.subgraphs and raising and raises_for_indices(node, raising):
            return why_on_host(node, symbolic is not None, "results" if open_results else "none")
        if node.subgraphs:
            return Support.no("an index in its body is computed, and may be out of range: the host checks it")
        return Support.no("its index is computed, and may be out of range for all that is known: the host checks it")
    if symbolic is not None:
        for n in (node, *nodes_within(node)) if node.attributes else (node,):
            # in bodies sizes may be others than the inputs of a launch tell, which checks its indices in inference
            is_open = is_unlimited(n) if checked and n is node else has_symbolic_index(n)
            if is_open and not is_within(n, symbolic.within):
                return Support.no(f"the limit of its indices differs between calls: the host checks them{_so(node)}")
    return why_on_host(node, symbolic is not None, "results" if open_results else "none")


def _refusal_in_region(node: Node, tried: bool, symbolic: bool) -> Support | None:
    refused = _endless(node) if tried and node.attributes else None
    return refused or why_on_host(node, symbolic, "any")


def _of_engine(refusal: Callable[..., Support | None], engine: Engine, device: str) -> Refusal:
    """The refusal of nodes by an engine, given what it takes of shapes that depend on data, and of indices."""
    results = engine.open_shapes == "results"
    return partial(refusal, open_results=results, region=engine.name, raising=_raising(engine, device))


def _raising(engine: Engine, device: str) -> tuple[str, ...]:
    """See `Engine.checks_indices`."""
    return engine.checks_indices if engine.checks_indices and is_host(device) else ()


def _endless(node: Node) -> Support | None:
    if any(_may_not_end(n) for n in (node, *nodes_within(node))):
        return Support.no("a Loop that only data ends may not end on made-up inputs, with which the guard tries it")
    return None


def why_on_host(node: Node, symbolic: bool = False, open_shapes: str = "none") -> Support | None:
    """Return why `node` is not offered to engines, or None if it is. symbolic: dimensions may be expressions.

    open_shapes: what an engine takes of shapes that depend on data (`Engine.open_shapes`), as far as ranks are known.
    Control flow is offered with its bodies, whose values have types: what is in them is for the engine to look at.
    """
    captured: Sequence[Value] = ()
    if node.attributes and node.subgraphs:
        if is_late(node):
            return Support.no("it waits for shapes that depend on data, and is planned when they arrive")
        if not traits_of(node).control_flow or node.op_type not in ENGINE_CONTROL_FLOW or _is_old_scan(node):
            return Support.no(f"the host runs {node.operator}-{node.version}; its bodies are planned by themselves")
        if draws_random(node):
            return Support.no("what is drawn at random in its bodies is the host's, turn by turn")
        captured = node.captures
    open_: set[Value | None] = set(node.outputs) if open_shapes == "results" and not captured else set()
    for v in (*node.inputs, *node.outputs, *captured):
        if v is None:
            continue
        t = v.type
        if not isinstance(t, TensorType):
            return Support.no(f"the type of {v.name!r} is {t or 'unknown'}, which is not a tensor{_so(node)}")
        if t.dtype == STRING:
            return Support.no(f"{v.name!r} holds strings{_so(node)}")
        is_known = t.dtype is not None and t.shape is not None
        if is_known and None in (t.shape or ()):
            is_known = open_shapes == "any" or v in open_
        elif is_known and not symbolic:
            is_known = t.is_static
        if not is_known:
            return Support.no(f"the shape of {v.name!r} is {t}: it depends on data{_so(node)}")
    return None


ENGINE_CONTROL_FLOW: Final = frozenset(("If", "Loop", "Scan"))
"""Operators with bodies that engines are asked about."""


_MOST_TURNS: Final = 10_000  # of a loop that is tried on made-up inputs, where data may end it earlier


def _may_not_end(node: Node) -> bool:
    """Whether a Loop has no limit, or one so high that only what it computes ends it. A limit that is an input is made
    up as well, and small."""
    if node.op_type != "Loop" or node.domain:
        return False
    limit = node.inputs[0]
    if limit is None:
        return True
    return (
        limit.data is not None and trip_count(node, node.subgraphs[0]) is None and int(limit.data.max()) > _MOST_TURNS
    )


def _so(node: Node) -> str:
    return "; the host runs the control, and its bodies are planned by themselves" if node.subgraphs else ""


def _is_old_scan(node: Node) -> bool:
    return node.op_type == "Scan" and node.version < 9  # it has a batch axis of its own


def _marked_elsewhere(node: Node, engine: str) -> Support | None:
    """Return why an engine does not get control flow of which a node is marked for another, or for the host."""
    for n in nodes_within(node):
        other = n.annotations.engine
        if other is not None and other != engine:
            return Support.no(f"in its body {n.name or n.operator!r} is marked for {other}; the host runs the control")
        if n.annotations.device is not None:
            where = n.annotations.device
            return Support.no(f"in its body {n.name or n.operator!r} is placed on {where}; the host runs the control")
    return None


def _refusing(name: str, reason: str, how: str = "was excluded") -> Candidate:
    return Candidate(name, lambda node: Support.no(f"{name} {how}: {reason}"))


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
