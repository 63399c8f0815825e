"""Inspection: the text of what an engine makes of a cluster, at each stage of its compilation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from xrt_core.compiler.lowering import is_launch
from xrt_core.engine.contract import ask_support
from xrt_core.errors import InputError
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph
from xrt_core.options import AUTO

if TYPE_CHECKING:
    from xrt_core.cache.store import Compilation

FUNCTION: Final = "function"
"""The stage that every cluster has: XRT's own, before the engine's."""


class CompiledCluster:
    """A cluster of a partitioned graph, as its engine compiles it.

    name: of the cluster, as reports have it. engine: the engine, with its device where that is not its own. function:
    its nodes, as the engine is given them.
    """

    def __init__(self, function: Function, engine: str, compilation: Compilation) -> None:
        self.name = function.name
        self.engine = engine
        self.function = function
        self._compilation = compilation

    def stages(self) -> Mapping[str, str]:
        """Name -> what `as_text` shows of it, in the order of compilation. Raises CompileError for a broken engine."""
        return {FUNCTION: f"the nodes that are given to {self.engine}", **self._compilation.stages(self.engine)}

    def as_text(self, stage: str | None = None) -> str:
        """Return the text of a stage, by default the last one. The cluster is compiled for it, cached or not.

        Raises InputError for a stage that the engine does not show, naming those that it does, and CompileError where
        the compilation fails.
        """
        known = self.stages()
        stage = list(known)[-1] if stage is None else stage
        if stage == FUNCTION:
            return self.function.as_text()
        if stage not in known:
            close = difflib.get_close_matches(stage, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"{self.name} on {self.engine} has no stage {stage!r}; it has {', '.join(known)}{hint}")
        return self._compilation.as_text(self.function, self.engine, stage)

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
