"""Executables as the guard wants them: of a Function on one engine, or of the pieces that an examination left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions
from xrt_core.engine.device_kinds import is_host
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.support import Support
from xrt_core.passes.partitioning import Candidate, cluster, costs_for, mark, outline
from xrt_core.passes.partitioning.cluster import Cluster, Clustering
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.engine_compiler import Compilation
from xrt_core.runtime.plan import Call, Lowered, Plan, make_plan
from xrt_core.verify.reference import lower_host
from xrt_core.verify.subgraph import convex_partition
from xrt_core.verify.verdict import HOST, Piece

Compile = Callable[[Function, str, bool, bool], Executable]
"""(function, engine, fused, shared) -> executable, of a function that the engine takes whole; shared: see
`CompileOptions`."""


class CompositeExecutable(Executable):
    """A Function of which several engines and the host run pieces. Results are NumPy arrays of the caller's own."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run all pieces. Raises what an engine raises, and ExecutionError of the host."""
        return list(self._plan.run([to_numpy(x) for x in inputs]))

    def as_text(self) -> str:
        """The steps."""
        return self._plan.as_text()


class Build:
    """Makes executables with the engines of a `Compilation`.

    compile: in place of `compilation.executable`, for who wants to look at what it makes.
    """

    def __init__(self, compilation: Compilation, compile: Compile | None = None) -> None:
        self.compilation = compilation
        self._compile: Compile = compilation.executable if compile is None else compile

    def candidates(self, function: Function, first: str | None) -> tuple[str, ...]:
        """Engines that can have a function: `first`, then those of the others that take every node of it; without a
        first all that take any node. One that is marked for an engine is that engine's, or the host's."""
        marked = {n.annotations.engine for n in function.body.nodes} & self.compilation.engines.keys()
        if marked:
            return tuple(e for e in self.compilation.engines if e in marked)
        if first is None:
            return tuple(e for e in self.compilation.engines if any(self.takes(e, function)))
        return (first, *(e for e in self.compilation.engines if e != first and all(self.takes(e, function))))

    def takes(self, engine: str, function: Function) -> list[bool]:
        """For each node whether the engine takes it."""
        return [self._support(engine, n).ok for n in function.body.nodes]

    def executable(
        self, function: Function, engine: str, fused: bool = True, *, alone: bool = False, shared: bool = False
    ) -> Executable:
        """A function on an engine; nodes that it doesn't take go to the other engines, in their order, and the host.

        alone: to the host at once. shared: other executables run on the same cores in each call. Raises CompileError,
        or whatever an engine raises.
        """
        if all(self.takes(engine, function)):
            return self._compile(function, engine, fused, shared)
        body = _unpinned(function.body)
        return self._folded(body, self._clustering(body, engine, alone), lambda k: fused)

    def alone(self, function: Function, engine: str) -> tuple[Piece, ...] | None:
        """The pieces of a function that an engine and the host run without the other engines; None where none of them
        takes a part in `executable`, or nothing is left of the engine's own."""
        if all(self.takes(engine, function)):
            return None
        body = _unpinned(function.body)
        mine = self._clustering(body, engine, True).clusters
        if not mine or mine == self._clustering(body, engine, False).clusters:
            return None
        covered = {i for c in mine for i in c.nodes}
        left = convex_partition(body, [i for i in range(len(body.nodes)) if i not in covered])[1]
        pieces = [*(Piece(engine, c.nodes) for c in mine), *(Piece(HOST, nodes) for nodes in left)]
        return tuple(sorted(pieces, key=lambda p: p.nodes))

    def _clustering(self, body: Graph, engine: str, alone: bool) -> Clustering:
        names = [engine] if alone else [engine, *(e for e in self.compilation.engines if e != engine)]
        askers = [Candidate(e, lambda n, e=e: self._support(e, n)) for e in names]  # type: ignore[misc]
        marks = mark(body, askers, device=self.compilation.engines[engine][1])
        # alone it is the partition that a module with this engine has, which asks the cost model
        return cluster(body, marks, costs=(lambda device: costs_for(is_host(device))) if alone else None)

    def pieces(self, function: Function, pieces: Sequence[Piece]) -> Executable:
        """A function as an examination left it. Raises as `executable`, and InternalError for pieces that don't fit."""
        if len(pieces) == 1 and pieces[0].engine != HOST:
            return self.executable(function, pieces[0].engine, pieces[0].fused)
        clusters = tuple(
            Cluster(p.engine, p.nodes, self.compilation.engines[p.engine][1])
            for p in sorted(pieces, key=lambda p: p.nodes)
            if p.engine != HOST
        )
        reasons = {i: "left to the host by the guard" for p in pieces if p.engine == HOST for i in p.nodes}
        fused = [p.fused for p in sorted(pieces, key=lambda p: p.nodes) if p.engine != HOST]
        return self._folded(
            function.body, Clustering(clusters, reasons, len(function.body.nodes)), lambda k: fused[k]
        )

    def _folded(self, body: Graph, clustering: Clustering, fused: Callable[[int], bool]) -> Executable:
        first = {c.nodes[0]: k for k, c in enumerate(clustering.clusters)}
        number = {body.nodes[i]: k for i, k in first.items()}

        on_host = sum(is_host(c.device) for c in clustering.clusters)

        def lower(node: Node) -> Lowered:
            function, engine = node.attributes.get("function"), node.attributes.get("engine")
            if not isinstance(function, Function):
                return lower_host(node)
            assert isinstance(engine, str)
            k = number[function.body.nodes[0]]
            made = self.executable(function, engine, fused(k), shared=on_host > 1)
            return Lowered(_to_host(made), HOST, f"{function.name} on {engine}")

        return CompositeExecutable(make_plan(outline(body, clustering), lower))

    def _support(self, engine: str, node: Node) -> Support:
        owner, device = self.compilation.engines[engine]
        try:
            return owner.supports(node, device, self.compilation.options.phase)
        except Exception as e:  # a broken engine refuses
            return Support.no(f"{engine} failed to say: {type(e).__name__}: {e}")


def _to_host(executable: Executable) -> Call:
    """A piece as a step of the host: its results are arrays that every engine and the host can read."""
    run = executable.run
    return lambda arrays: [to_numpy(r) for r in run(arrays)]


def _unpinned(body: Graph) -> Graph:
    """The graph without pins: they have been obeyed when the cluster was made."""
    if all(n.annotations.engine is None for n in body.nodes):
        return body
    from dataclasses import replace

    return body.replace(nodes=[n.replace(annotations=replace(n.annotations, engine=None)) for n in body.nodes])
