"""CompositeBuilder: builds the executable of a Function that one engine, or several engines and the host, compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.cache.store import Compilation
from xrt_core.engine.boundary import preserved_state
from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, Executable, RunOptions, Tolerance, ask_support
from xrt_core.engine.device_kinds import is_host
from xrt_core.errors import CompileError, XRTError
from xrt_core.guard.stress import StressTest
from xrt_core.host.place import HostPlace
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Support, engine_and_device
from xrt_core.ir.symbols import size_of
from xrt_core.options import AUTO
from xrt_core.passes.partitioning import Candidate, cluster, costs_for, mark, outline
from xrt_core.passes.partitioning.cluster import Cluster, Clustering
from xrt_core.passes.partitioning.cost_model import flops
from xrt_core.passes.sized_graphs import function_at, reflection_guards
from xrt_core.runtime.arrays import Range
from xrt_core.runtime.binding import taken_at
from xrt_core.runtime.input_checks import raises_for_indices, unproven_indices
from xrt_core.runtime.plan import Call, Lowered, Plan, make_plan
from xrt_core.runtime.transfers import adapter
from xrt_core.verify.checker import ResultChecker
from xrt_core.verify.evaluate import EvaluationSettings, evaluate
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.isolate import Candidate as EngineCandidate
from xrt_core.verify.reference import ON_CPU
from xrt_core.verify.subgraph import convex_partition
from xrt_core.verify.verdict import HOST, Outcome, Piece

Compile = Callable[[Function, str, bool, bool], Executable]
"""(function, engine, fused, shared) -> executable, of a function that the engine supports as a whole. shared: see
`CompileOptions`."""

_ENOUGH: Final = 2e9
"""FLOPs of a run on which a symbolic function is examined: some 50 ms of a host, which runs several of them while the
program waits for its engine."""


class CompositeExecutable(Executable):
    """Runs pieces of a Function on several engines and the host. Results are arrays of the host that the caller owns.

    place: where the host computes.
    """

    def __init__(self, plan: Plan, place: HostPlace = ON_CPU) -> None:
        self._plan, self._place = plan, place

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        """Run all pieces. Raises what an engine raises, and ExecutionError of the host."""
        with self._place.within():
            results = list(self._plan.run([self._place.to_host(x) for x in inputs]))
        if block_until_done:
            self._place.synchronize()
        return results

    def as_text(self) -> str:
        """The steps."""
        return self._plan.as_text()


class CompositeBuilder:
    """Builds executables with the engines of a `Compilation`.

    compile: replaces `compilation.executable`, so that each single compilation can be observed. place: where the host
    computes.
    """

    def __init__(self, compilation: Compilation, compile: Compile | None = None, place: HostPlace = ON_CPU) -> None:
        self.compilation = compilation
        self.place = place
        self._compile: Compile = compilation.executable if compile is None else compile
        self._unproven: dict[Graph, frozenset[Node]] = {}

    def candidates(self, function: Function, first: str | None) -> tuple[str, ...]:
        """Engines to try a function on: `first`, then the others that support every node. Without a first, all that
        support any node. Nodes that are marked for an engine leave only that one."""
        if first is not None and engine_and_device(first)[1]:
            return (first,)  # placed on a device: no other engine may run it elsewhere
        marked = {n.annotations.engine for n in function.body.nodes} & self.compilation.engines.keys()
        if marked:
            return tuple(e for e in self.compilation.engines if e in marked)
        if first is None:
            return tuple(e for e in self.compilation.engines if any(self.supports(e, function)))
        return (first, *(e for e in self.compilation.engines if e != first and all(self.supports(e, function))))

    def supports(self, engine: str, function: Function) -> list[bool]:
        """For each node whether the engine supports it. It may load its library when it is first asked."""
        if not self._takes(engine, function):
            return [False] * len(function.body.nodes)
        indexed = self._indexed(function.body)
        with preserved_state(f"engine {engine!r}"):
            return [self._support(engine, n, indexed).ok for n in function.body.nodes]

    def executable(
        self, function: Function, engine: str, fused: bool = True, *, alone: bool = False, shared: bool = False
    ) -> Executable:
        """A function on an engine; nodes that it does not support go to the other engines, in their order, and the
        host.

        alone: they go to the host at once. shared: other executables use the same cores in each call. Raises
        CompileError, or whatever an engine raises.
        """
        if all(self.supports(engine, function)):
            return self._compile(function, engine, fused, shared)
        body = _unpinned(function.body)
        return self._outlined(body, self._clustering(function, body, engine, alone), lambda k: fused)

    def alone(self, function: Function, engine: str) -> tuple[Piece, ...] | None:
        """The pieces of a function on one engine and the host only; None if the engine would run no node, or if
        `executable` uses no other engine either."""
        if all(self.supports(engine, function)):
            return None
        body = _unpinned(function.body)
        mine = self._clustering(function, body, engine, True).clusters
        if not mine or mine == self._clustering(function, body, engine, False).clusters:
            return None
        covered = {i for c in mine for i in c.nodes}
        left = convex_partition(body, [i for i in range(len(body.nodes)) if i not in covered])[1]
        pieces = [*(Piece(engine, c.nodes) for c in mine), *(Piece(HOST, nodes) for nodes in left)]
        return tuple(sorted(pieces, key=lambda p: p.nodes))

    def _takes(self, engine: str, function: Function) -> bool:
        """Whether an engine may get nodes of a function. One of static shapes gets none where shapes vary: what it
        would take is the few nodes between whose own do not."""
        return not function.is_symbolic or self.compilation.on(engine)[0].dynamic_dims != "none"

    def _clustering(self, function: Function, body: Graph, engine: str, alone: bool) -> Clustering:
        """The clusters of the function's body, without marks for engines."""
        others = () if alone else (e for e in self.compilation.engines if e != engine and self._takes(e, function))
        names = [engine, *others]
        indexed = self._indexed(body)
        candidates = [Candidate(e, partial(self._support, e, indexed=indexed)) for e in names]
        with preserved_state(", ".join(names)):
            marks = mark(body, candidates, device=self.compilation.on(engine)[1])
        # alone it is the partition of a module with this engine, which uses the cost model
        return cluster(body, marks, costs=(lambda device: costs_for(is_host(device))) if alone else None)

    def pieces(self, function: Function, pieces: Sequence[Piece]) -> Executable:
        """The executable of verified pieces. Raises as `executable`, and InternalError for pieces that don't fit."""
        if len(pieces) == 1 and pieces[0].engine != HOST:
            return self.executable(function, pieces[0].engine, pieces[0].fused)
        clusters = tuple(
            Cluster(p.engine, p.nodes, self.compilation.on(p.engine)[1])
            for p in sorted(pieces, key=lambda p: p.nodes)
            if p.engine != HOST
        )
        reasons = {i: "assigned to the host by the guard" for p in pieces if p.engine == HOST for i in p.nodes}
        fused = [p.fused for p in sorted(pieces, key=lambda p: p.nodes) if p.engine != HOST]
        return self._outlined(
            function.body, Clustering(clusters, reasons, len(function.body.nodes)), lambda k: fused[k]
        )

    def _outlined(self, body: Graph, clustering: Clustering, fused: Callable[[int], bool]) -> Executable:
        first = {c.nodes[0]: k for k, c in enumerate(clustering.clusters)}
        number = {body.nodes[i]: k for i, k in first.items()}

        on_host = sum(is_host(c.device) for c in clustering.clusters)

        def lower(node: Node) -> Lowered:
            function, engine = node.attributes.get("function"), node.attributes.get("engine")
            if not isinstance(function, Function):
                return self.place.lower(node)
            assert isinstance(engine, str)
            k = number[function.body.nodes[0]]
            made = self.executable(function, engine, fused(k), shared=on_host > 1)
            return Lowered(_step(self.at_host(made, engine)), HOST, f"{function.name} on {engine}")

        place, outlined = self.place, outline(body, clustering)
        made: Plan = make_plan(outlined, lower, to_host=place.to_host, within=place.scope)
        place.synchronize()
        return CompositeExecutable(made, place)

    def at_host(self, made: Executable, engine: str) -> Executable:
        """The executable of an engine for arrays of the host, with such results."""
        if isinstance(made, CompositeExecutable):
            return made
        takes = partial(taken_at, self.compilation.engines, self.place.device)
        return adapter(self.place.xp, takes, (AUTO,))(made, engine, AUTO)

    def _support(self, engine: str, node: Node, indexed: Collection[Node]) -> Support:
        """Whether an engine takes a node. indexed: those that are for engines that raise for an index out of range."""
        owner, device = self.compilation.on(engine)
        if node in indexed and not raises_for_indices(node, owner.checks_indices):
            return Support.no("its index is computed, and may be out of range for all that is known")
        return ask_support(owner, node, device, self.compilation.options.phase)[0]

    def _indexed(self, body: Graph) -> frozenset[Node]:
        """The control flow of a function's body that computes indices which no launch can check."""
        if self.compilation.options.phase != "inference":
            return frozenset()
        if body not in self._unproven:
            loops = [n for n in body.nodes if n.attributes and n.subgraphs]
            self._unproven[body] = unproven_indices(body).intersection(loops) if loops else frozenset()
        return self._unproven[body]


def _step(executable: Executable) -> Call:
    run = executable.run
    return lambda arrays: run(arrays)


def _unpinned(body: Graph) -> Graph:
    """The graph without marks for engines, which were obeyed when the cluster was formed."""
    if all(n.annotations.engine is None for n in body.nodes):
        return body
    from dataclasses import replace

    return body.replace(nodes=[n.replace(annotations=replace(n.annotations, engine=None)) for n in body.nodes])


def evaluate_candidates(
    function: Function,
    compilation: Compilation,
    engines: Sequence[str],
    settings: EvaluationSettings,
    inputs: Sequence[np.ndarray] | None,
    on_compile: Callable[[str], None],
    on_compiled: Callable[[], None],
    owns_process: bool = False,
    ranges: Sequence[Range | None] = (),
    place: HostPlace = ON_CPU,
    sizes: Mapping[str, int] = MappingProxyType({}),
    raced: Sequence[Mapping[str, int]] = (),
    right: Collection[str] = (),
    current: str = "",
) -> Outcome:
    """`evaluate` a function in this process on each of `engines`, and, where times are compared, on each with the host
    alone. on_compile, on_compiled: called with the engine's name before, and after each compilation. owns_process: as
    for `StressTest`. ranges, place: as for `evaluate`. sizes: of the symbols of a symbolic function, which is evaluated
    as the static one for these, or for less of the same (`lighter_sizes`), and then checked for others
    (`other_sizes`). raced: the sizes for which candidates are compared with one another, where not for these. right,
    current: as for `evaluate`."""
    if function.is_symbolic and inputs is None:
        sizes = lighter_sizes(function, sizes)
    static = function_at(function, sizes)
    made_for: dict[str, Executable] = {}

    def compile(f: Function, engine: str, fused: bool, shared: bool) -> Executable:
        made = compilation.executable(f, engine, fused, shared)
        made = compilation.stored(f, engine, fused, shared) or made  # what will run is what the disk gives back
        on_compiled()
        return made

    builder = CompositeBuilder(compilation, compile, place)
    stress = StressTest(owns_process)

    def candidate(engine: str, pieces: tuple[Piece, ...] | None = None) -> EngineCandidate:
        alone = pieces is not None
        name = f"{engine} alone" if alone else engine

        def build(f: Function, fused: bool) -> Executable:
            if function.is_symbolic:
                if f is not static:
                    raise CompileError("parts of a cluster with symbolic shapes are not tried by themselves")
                f = function
            on_compile(engine)
            with stress.compiling(name):
                made = builder.executable(f, engine, fused, alone=alone)
            made_for[name] = made
            return made if place.on_cpu else builder.at_host(made, engine)

        return EngineCandidate(name, build, compilation.tolerance(engine), pieces)

    candidates = []
    for engine in engines:
        candidates.append(candidate(engine))
        if settings.tune and (pieces := builder.alone(function, engine)) is not None:
            candidates.append(candidate(engine, pieces))
    timed = [synthesize_inputs(function_at(function, s), "gentle") for s in raced]
    found = evaluate(
        static, candidates, settings, inputs, stress=stress, ranges=ranges, place=place, timed=timed, right=right,
        current=current,
    )  # fmt: skip
    is_known = current and found.timed == current
    if function.is_symbolic and found.verdict == "ready" and settings.verify and not is_known:
        engine = found.pieces[0].engine
        name = engine if len(found.pieces) == 1 else f"{engine} alone"
        tolerance = compilation.tolerance(engine) if engine_and_device(engine)[0] in compilation.engines else {}
        why = _wrong_for_other_sizes(function, sizes, made_for.get(name), tolerance)
        if why:
            whole = Piece(HOST, tuple(range(len(function.body.nodes))))
            return replace(found, verdict="wrong", pieces=(whole,), reason=why, errors=(f"{engine}: {why}",))
    return found


def _wrong_for_other_sizes(
    function: Function, sizes: Mapping[str, int], made: Executable | None, tolerance: Mapping[str, Tolerance]
) -> str:
    """What is wrong with the results of a symbolic function's executable for other sizes; "" for nothing."""
    if made is None:
        return ""
    for other in other_sizes(function, sizes):
        checker = checker_at(function, other)
        if checker is None or not checker.is_informative:
            continue
        check = checker.check(made, tolerance)
        if not (check.is_right or check.is_doubtful):
            shown = ", ".join(f"{k} = {v}" for k, v in other.items())
            return f"for {shown}: {check.reason}"
    return ""


def lighter_sizes(function: Function, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes of the symbols like these, of which a run takes about `_ENOUGH` FLOPs, if that is less; these, if the
    function does not take others of their kind. The power of two, up to 32, that divides a size divides the other as
    well: strides may need it."""
    steps = {name: min(n & -n, 32) for name, n in sizes.items()}
    found = dict(sizes)
    while sum(map(flops, function_at(function, found).body.nodes)) > _ENOUGH:
        name = max(found, key=lambda s: found[s] // steps[s])
        less = {**found, name: max(1, found[name] // 2 // steps[name]) * steps[name]}
        if found[name] <= steps[name] or not _has_elements(function, less):
            break
        found = less
    return found if found != dict(sizes) and checker_at(function, found) is not None else sizes


def other_sizes(function: Function, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes of the symbols of a function other than these, and not larger: all of them different and small, and 1;
    where a tensor of the function would be empty with either, as a convolution's result of less than its filter, or an
    edge be reflected that is wider than it, those that are less by one."""
    small = {name: min(2 + i, size) for i, (name, size) in enumerate(sorted(sizes.items()))}
    least = dict.fromkeys(sizes, 1)
    nearly = {name: max(size - 1, 1) for name, size in sizes.items()}
    found: list[dict[str, int]] = []
    for other in (small, least, nearly):
        if other is nearly and found:
            break
        if other != sizes and other not in found and _has_elements(function, other):
            found.append(other)
    return found


def _has_elements(function: Function, sizes: Mapping[str, int]) -> bool:
    """Whether all tensors of a symbolic function have elements for these sizes, and enough for edges to be reflected,
    as far as is known."""
    ports = [size_of(d, sizes) for p in (*function.params, *function.returns) for d in p.dims]
    values = (v for n in function.body.nodes for v in n.outputs if v is not None)
    made = (size_of(d, sizes) for v in values for d in v.shape or ())
    if any(g.evaluate(sizes) < 0 for g in reflection_guards(function.body) if g.symbols <= sizes.keys()):
        return False
    return all(d is not None and d > 0 for d in ports) and all(d is None or d > 0 for d in made)


def checker_at(function: Function, sizes: Mapping[str, int]) -> ResultChecker | None:
    """The checker of results for these sizes of a function's symbols; None where it does not take them: the host
    rejects them, or the shapes of its results are not those that the function declares."""
    static = function_at(function, sizes)
    checker = ResultChecker(static, synthesize_inputs(static, "gentle"))
    try:
        given = [x.shape for x in checker.expected()]
    except XRTError:
        return None
    fits = len(given) == len(static.returns) and all(r.fits(s) for r, s in zip(static.returns, given, strict=True))
    return checker if fits else None
