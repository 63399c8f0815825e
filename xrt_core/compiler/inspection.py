"""Inspection: the text of what an engine makes of a cluster, at each stage of its compilation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from xrt_core.compiler.lowering import is_launch
from xrt_core.engine.contract import ask_support
from xrt_core.errors import InputError, nearest
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph
from xrt_core.options import AUTO
from xrt_core.verify.subgraph import subfunction

if TYPE_CHECKING:
    from xrt_core.cache.store import Compilation
    from xrt_core.compiler.stages import Planned
    from xrt_core.runtime.launch import Launch

FUNCTION: Final = "function"
"""The stage that every cluster has: XRT's own, before the engine's."""


class CompiledCluster:
    """A cluster of a partitioned graph, as its engine compiles it.

    name: of the cluster, as reports have it. engine: the engine, with its device where that is not its own. function:
    its nodes, as the engine is given them. fused: False for the engine's build without fusions, which the guard chose.
    """

    def __init__(self, function: Function, engine: str, compilation: Compilation, fused: bool = True) -> None:
        self.name = function.name
        self.engine = engine
        self.function = function
        self.fused = fused
        self._compilation = compilation

    @property
    def origin(self) -> str:
        """Where its executable came from: "compiled in this process", "loaded from the cache on disk", "loaded from the
        model's file"; "in the cache on disk, not loaded"; "" where there is none."""
        return self._compilation.origin(self.function, self.engine, self.fused)

    def stages(self) -> Mapping[str, str]:
        """Name -> what `as_text` shows of it, in the order of compilation. Raises CompileError for a broken engine."""
        return {FUNCTION: f"the nodes that are given to {self.engine}", **self._compilation.stages(self.engine)}

    def as_text(self, stage: str | None = None) -> str:
        """Return the text of a stage, by default the last one.

        The cluster is compiled for it, with the module's options, whether or not there is an executable (`origin`): one
        that was loaded keeps no text. The event "inspect.compiled" tells of it.

        Raises InputError for a stage that the engine does not show, naming those that it does, and CompileError where
        the compilation fails.
        """
        known = self.stages()
        stage = list(known)[-1] if stage is None else stage
        if stage == FUNCTION:
            return self.function.as_text()
        if stage not in known:
            raise InputError(
                f"{self.name} on {self.engine} has no stage {stage!r}; it has {', '.join(known)}{nearest(stage, known)}"
            )
        with self._compilation.events.span(
            "inspect.compiled", level=logging.INFO, cluster=self.name, engine=self.engine, stage=stage,
            executable=self.origin,
        ):  # fmt: skip
            return self._compilation.as_text(self.function, self.engine, stage, self.fused)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.function.body.nodes)} nodes on {self.engine}>"


def compiled_clusters(partitioned: Graph, compilation: Compilation) -> Sequence[CompiledCluster]:
    """The clusters of a partitioned graph, in order; one that any engine may run is of the first that takes it."""
    found = []
    for node in partitioned.nodes:
        function = node.attributes.get("function") if is_launch(node) else None
        if isinstance(function, Function):
            engine = str(node.attributes["engine"])
            engine = _first(function, compilation) if engine == AUTO else engine
            found.append(CompiledCluster(function, engine, compilation))
    return tuple(found)


def _first(function: Function, compilation: Compilation) -> str:
    """The first engine that takes every node, else the first: with "auto" any engine may run a cluster."""
    phase = compilation.options.phase
    for name, (engine, device) in compilation.engines.items():
        if all(ask_support(engine, n, device, phase)[0].ok for n in function.body.nodes):
            return name
    return next(iter(compilation.engines))


def executables_of(plan: Planned, compilation: Compilation) -> Sequence[CompiledCluster]:
    """What engines run for a plan, in its order, then for the subgraphs that have been planned so far.

    A cluster that the host runs has none; one that the guard took apart has one for each piece on an engine.
    """
    found = [made for launch in plan.launches for made in _of_launch(launch, compilation)]
    for cache in plan.parts.values():
        for part in cache.plans():
            found += executables_of(part, compilation)  # type: ignore[arg-type] # a cache of the pipeline's plans
    return tuple(found)


def _of_launch(launch: Launch, compilation: Compilation) -> Iterator[CompiledCluster]:
    if launch.executable is None:
        return
    outcome = getattr(getattr(launch, "record", None), "outcome", None)
    if outcome is None:
        yield CompiledCluster(launch.function, launch.engine, compilation)
        return
    for piece in outcome.pieces:
        if piece.engine in compilation.engines or piece.engine.partition(":")[0] in compilation.engines:
            yield CompiledCluster(subfunction(launch.function, piece.nodes), piece.engine, compilation, piece.fused)
