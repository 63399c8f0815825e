"""Lowering: translate each node of a partitioned graph to a step of a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from xrt_core.compiler.services import Services
from xrt_core.engine.contract import Executable
from xrt_core.engine.device_kinds import device_kind, is_host
from xrt_core.errors import CompileError, EngineError
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, engine_and_device, in_open_region
from xrt_core.kernels import find_kernel
from xrt_core.options import AUTO
from xrt_core.passes.data_dependent_shapes import is_late
from xrt_core.passes.partitioning import is_converter
from xrt_core.runtime.arrays import conversion, has_converter
from xrt_core.runtime.binding import taken_at
from xrt_core.runtime.control_flow import conditions, control_step
from xrt_core.runtime.launch import DeviceLaunch, Launch
from xrt_core.runtime.plan import HOST, Call, Lowered
from xrt_core.runtime.plan_cache import PlanCache
from xrt_core.runtime.transfers import Enter, to_launch

MakePart = Callable[[Graph, Collection[int], str, bool], PlanCache]
"""(a subgraph with its captures as inputs, indices of inputs that change each iteration, a label, whether the sizes of
its inputs depend on data) -> its plan cache."""


class Lowering:
    """Lowers nodes for one pipeline."""

    def __init__(self, services: Services) -> None:
        self._compilation = services.compilation
        self._executables = services.executables
        self._guard = services.guard
        self._events = services.events
        self._place = services.place

    def lower(
        self,
        node: Node,
        graph: Graph,
        make_part: MakePart,
        shared: Collection[Node] = (),
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Lowered:
        """Lower a node of `graph`. shared: the launches that share the cores (`sharing_cores`). sizes: of the graph's
        symbols in the first call."""
        label = f"{node.operator} {node.name}".strip()
        if is_launch(node):
            return self._launch(node, node in shared, sizes)._replace(lane=lane(node))
        if is_converter(node):
            return self._converter(node, graph, label)
        # a plugin's operator may have a kernel that runs its subgraphs by itself
        if node.subgraphs and (node.captures or find_kernel(node.domain, node.op_type) is None):
            return Lowered(_parts(node, label, make_part), HOST, label, cpu=conditions(node))
        return self._place.lower(node)

    def _launch(self, node: Node, shared: bool, sizes: Mapping[str, int]) -> Lowered:
        function, name = node.attributes["function"], node.attributes["engine"]
        assert isinstance(function, Function)
        assert isinstance(name, str)
        label = f"{function.name} on {name}"
        if self._guard is not None:
            guarded = self._guard.launch(function, name, lambda: self._place.runner(function.body), shared, sizes)
            guarded.enter = self._enter(name)
            return Lowered(guarded, name, label)
        executable: Executable | None = None
        error: EngineError | None = None
        try:
            executable = self._compilation.executable(function, name, shared=shared)
        except Exception as e:  # the host runs the cluster instead; an engine's failure never reaches the caller
            error = e if isinstance(e, EngineError) else CompileError(f"{type(e).__name__}: {e}")
            level = logging.DEBUG if self._executables.sealed else logging.WARNING  # a sealed load raises it
            self._events.fallback(
                cluster=function.name,
                engine=name,
                stage="compile",
                kind="memory" if isinstance(e, MemoryError) else "raised",
                error=str(error),
                level=level,
            )
        launch = function, name, executable, lambda: self._place.runner(function.body), error, self._events
        engine, device = self._compilation.on(name)
        has_streams = device_kind(device).streams is not None
        if not has_streams and self._place.on_cpu:
            return Lowered(Launch(*launch), name, label)
        # one that is placed elsewhere works on no stream of the caller's
        ahead = engine.asynchronous and has_streams and not engine_and_device(name)[1]
        made = DeviceLaunch(ahead, *launch)
        made.enter = self._enter(name)
        return Lowered(made, name, label)

    def _enter(self, name: str) -> Enter | None:
        """What takes the host's arrays to those of an engine; arrays on another GPU go by way of the CPU."""
        if name == AUTO:
            return None  # the engine that is chosen takes them so (`runtime.transfers.adapter`)
        return to_launch(self._place.xp, taken_at(self._compilation.engines, self._place.device, name))

    def _converter(self, node: Node, graph: Graph, label: str) -> Lowered:
        source, target = str(node.attributes["source"]), str(node.attributes["target"])
        call = conversion(node, graph, self._place.to_host)
        return Lowered(call, target, label, reads=source, shares=not has_converter(source, target))


def is_launch(node: Node) -> bool:
    """Return whether a node is a Launch, which runs a Function on an engine."""
    return node.op_type == "Launch" and node.domain == "xrt"


def lane(node: Node) -> str:
    """Return the lane of a launch: "engine device"; "" for any other node."""
    return f"{node.attributes['engine']!s} {node.annotations.device or ''}".strip() if is_launch(node) else ""


def sharing_cores(graph: Graph, part: bool = False) -> frozenset[Node]:
    """Return the launches that run on the host's cores beside others: of the graph, of the parts of it that are planned
    by themselves, or of the graph that it is a `part` of. One that is alone with what selects rows by data, which is
    little work, has the cores for itself."""
    found = [n for n in graph.nodes if is_launch(n) and is_host(n.annotations.device)]
    if part or any(n.subgraphs for n in graph.nodes if not is_launch(n)):
        return frozenset(found)
    if len(found) < 2:
        return frozenset()
    light = [n for n in found if in_open_region(n.attributes["function"].body)]  # type: ignore[union-attr]
    return frozenset(light if len(found) - len(light) == 1 else found)


def _parts(node: Node, label: str, make_part: MakePart) -> Call:
    if is_late(node):
        body = node.attributes["body"]
        assert isinstance(body, Graph)
        return make_part(body, (), label, True).run
    return control_step(node, lambda graph, changing: make_part(graph, changing, label, False))
