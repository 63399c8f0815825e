"""The way of a graph, told once: captured -> optimised -> partitioned -> planned.

Read `STEPS` downward: every step by name, with the reason why it stands where it does. Each stage is a type that
prints itself and has the method that leads to the next; a later stage never reaches into an earlier one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from xrt_core.cache.disk import open_cache
from xrt_core.cache.executables import ExecutableStore
from xrt_core.engine.contract import CompileOptions, Engine, Executable, GraphCompiler
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CompileError, EngineError, RegistrationError
from xrt_core.events import EventLog
from xrt_core.explanation import Explanation
from xrt_core.host.executor import CONTROL_FLOW, host_kernel, namespace_for, run_node
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.types import STRING, TensorType, ValueType
from xrt_core.ir.verdict import Support
from xrt_core.kernels import find_kernel, static_inputs
from xrt_core.options import Options
from xrt_core.passes.clustering import Candidate, cluster, fold, mark, report
from xrt_core.passes.flops import graph_flops
from xrt_core.passes.infra import Pass, run_passes
from xrt_core.passes.shape_inputs import MAX_ELEMENTS, shape_inputs
from xrt_core.passes.simplify import CommonSubexpressions, ConstantFold, DeadNodes, IdentityNodes
from xrt_core.passes.specialise import specialise
from xrt_core.passes.split import SplitLate, is_late
from xrt_core.runtime.arrays import to_host
from xrt_core.runtime.control import control_step
from xrt_core.runtime.launch import Launch, operators_of
from xrt_core.runtime.plan import HOST, Call, Lowered, Plan, make_plan
from xrt_core.runtime.runner import MAX_VARIANTS, Runner

STEPS: Final = (
    ("fold constants", "once per model: what depends on constants alone must not be redone per signature"),
    ("specialise", "per signature: with shapes known, shape arithmetic folds, dead branches go, the rest gets types"),
    ("remove identities", "after types are known: most identities (Cast, Reshape) are only then seen to be ones"),
    ("merge common subexpressions", "after identities, which would hide equal nodes behind different inputs"),
    ("remove dead nodes", "after all that leaves nodes unread"),
    ("split late part", "the last of them: what waits for data-dependent shapes leaves the graph that is marked"),
    ("mark", "each engine in turn says yes or why not; needs final nodes and types"),
    ("cluster", "grows convex clusters from the marks"),
    ("fold clusters", "clusters become Launch nodes; nothing may look inside them afterwards"),
    ("compile", "each Launch's Function by its engine, through the cache of executables"),
    ("plan", "registers and steps; the graph is not looked at again"),
)
"""Every step of the pipeline, in order: (name, why it stands there)."""


@dataclass(frozen=True)
class Captured:
    """A graph as a frontend gave it, with what depends on constants alone folded."""

    graph: Graph
    pipeline: Pipeline = field(repr=False)

    def optimise(
        self, types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], engines: bool = True
    ) -> Optimised:
        """Specialise for one signature: input types, and values of the inputs in `known` (by index)."""
        return self.pipeline.optimise(self, types, known, engines)

    def as_text(self) -> str:
        """The graph."""
        return str(self.graph)

    __str__ = as_text


@dataclass(frozen=True)
class Optimised:
    """A graph for one signature: typed, folded, simplified. engines: whether engines take part."""

    graph: Graph
    known: Mapping[int, np.ndarray]
    engines: bool
    pipeline: Pipeline = field(repr=False)

    def partition(self) -> Partitioned:
        """Fold what the engines take into Launch nodes."""
        return self.pipeline.partition(self)

    def as_text(self) -> str:
        """The graph."""
        return str(self.graph)

    __str__ = as_text


@dataclass(frozen=True)
class Partitioned:
    """A graph whose clusters are Launch nodes, and the explanation of every decision."""

    graph: Graph
    explanation: Explanation
    pipeline: Pipeline = field(repr=False)

    def plan(self, owned: bool = True) -> Planned:
        """Compile every Launch and make the register program. owned: see `make_plan` of runtime.plan."""
        return self.pipeline.plan(self, owned)

    def as_text(self) -> str:
        """The graph, then the explanation."""
        return f"{self.graph}\n\n{self.explanation}"

    __str__ = as_text


class Planned(Plan):
    """A plan that knows what was decided when it was made, and which parts are planned by themselves."""

    __slots__ = ("_explanation", "parts")

    def __init__(self, explanation: Explanation, parts: Mapping[str, Runner], *plan: Any) -> None:
        super().__init__(*plan)
        self._explanation = explanation
        self.parts = parts

    def explain(self) -> Explanation:
        """What was decided, with what failed since and the parts as far as they have run."""
        nested = {
            label: tuple(p.explain() for p in runner.plans.values() if isinstance(p, Planned))
            for label, runner in self.parts.items()
        }
        return replace(
            self._explanation,
            errors={x.function.name: x.trouble for x in self.launches if x.trouble},
            lost=tuple(x.function.name for x in self.launches if x.executable is None),
            nested={k: v for k, v in nested.items() if v},
        )


class Pipeline:
    """The steps, for one set of options and engines. Safe to use from many threads.

    engines: those that take part, in the order to try them, each with the device it compiles for.
    """

    def __init__(self, options: Options, engines: Sequence[tuple[Engine, str]], events: EventLog) -> None:
        self.options = options
        self.engines = tuple(engines)
        self.events = events
        self.compile_options = CompileOptions(
            phase=options.phase,
            workspace_bytes=options.max_workspace_bytes,
            max_batch_size=options.max_batch_size,
            threads=options.threads,
        )
        self.xp: Any = namespace_for(options.device or (self.engines[0][1] if self.engines else "cpu"))
        self._compilers: dict[str, GraphCompiler] = {}
        disk = open_cache(options.cache, options.cache_dir, options.cache_bytes) if self.engines else None
        self._executables = ExecutableStore(disk, events)
        self._simplify: tuple[Pass, ...] = (IdentityNodes(), CommonSubexpressions(), DeadNodes())

    # --- the stages ----------------------------------------------------------------------------------------------

    def capture(self, graph: Graph) -> Captured:
        """Begin the way of a graph."""
        self._verify(graph, "captured")
        graph = run_passes(graph, (ConstantFold(run_node, self.options.constant_fold_limit), DeadNodes()))
        self._verify(graph, "fold constants")
        return Captured(graph, self)

    def optimise(
        self, captured: Captured, types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], engines: bool
    ) -> Optimised:
        """See `Captured.optimise`."""
        engines = engines and bool(self.engines)
        graph = specialise(
            captured.graph, types, known, run_node, fold_limit=self.options.constant_fold_limit, expand=expand
        )
        self._verify(graph, "specialise")
        graph = run_passes(graph, self._simplify)
        self._verify(graph, "simplify")
        if engines:  # without engines nothing has to wait: the host takes shapes as they come
            graph = SplitLate(needed_inputs)(graph)
            self._verify(graph, "split late part")
        return Optimised(graph, known, engines, self)

    def partition(self, optimised: Optimised) -> Partitioned:
        """See `Optimised.partition`."""
        graph, options = optimised.graph, self.options
        candidates = [self._candidate(e, d) for e, d in self.engines] if optimised.engines else []
        device = self.engines[0][1] if self.engines else "cpu"
        marks = mark(graph, candidates, options.phase, device)
        clustering = cluster(
            graph,
            marks,
            minimum_nodes=options.minimum_nodes,
            maximum_nodes=options.maximum_nodes,
            strict=options.strict,
        )
        folded = fold(graph, clustering)
        self._verify(folded, "fold clusters")
        functions = [f for n in folded.nodes if isinstance(f := n.attributes.get("function"), Function)]
        explanation = Explanation(
            graph.name,
            _signature(graph, optimised.known),
            report(graph, clustering, folded),
            graph_flops(graph),
            sum(graph_flops(f.body) for f in functions),
        )
        return Partitioned(folded, explanation, self)

    def plan(self, partitioned: Partitioned, owned: bool) -> Planned:
        """See `Partitioned.plan`."""
        parts: dict[str, Runner] = {}

        def lower(node: Node) -> Lowered:
            if _is_launch(node):
                return self._lower_launch(node)
            if node.subgraphs:
                label = f"{node.operator} {node.name}".strip()
                return Lowered(self._lower_parts(node, label, parts), HOST, label)
            return Lowered(host_kernel(node, self.xp), HOST, f"{node.operator} {node.name}".strip())

        kind = partial(Planned, partitioned.explanation, parts)
        return make_plan(partitioned.graph, lower, kind, owned=owned, to_host=to_host(self.xp))

    # --- runners -------------------------------------------------------------------------------------------------

    def runner(self, graph: Graph, changing: Collection[int] = (), *, part: bool = False) -> Runner:
        """A Runner for a graph: plans per signature, made by this pipeline.

        changing: inputs that change at every turn of a loop and are never taken by value. part: it is a part of a
        graph, where signatures may follow the data: after some of them, new ones stay on the host.
        """
        captured = self.capture(graph)
        by_value = [i for i in shape_inputs(captured.graph, static_inputs) if i not in changing]

        def make(types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], engines: bool) -> Plan:
            return self.make_plan(captured, types, known, engines, owned=not part)

        return Runner(
            captured,
            make,
            by_value=by_value,
            max_signatures=self.options.cache_size,
            engine_signatures=MAX_VARIANTS if part else None,
            max_by_value=MAX_ELEMENTS,
            to_host=to_host(self.xp),
        )

    def make_plan(
        self,
        captured: Captured,
        types: Sequence[ValueType | None],
        known: Mapping[int, np.ndarray],
        engines: bool = True,
        owned: bool = True,
    ) -> Planned:
        """All the way from a captured graph to the plan of one signature, with one INFO line about it."""
        start = time.perf_counter()
        partitioned = captured.optimise(types, known, engines).partition()
        middle = time.perf_counter()
        planned = partitioned.plan(owned)
        name = captured.graph.name or "graph"
        self.events.emit(
            "specialised",
            level=logging.INFO,
            seconds=time.perf_counter() - start,
            model=name,
            before_compilation_ms=round((middle - start) * 1e3, 1),
            result=planned.explain().summary(),
        )
        return planned

    # --- parts of steps -------------------------------------------------------------------------------------------

    def _verify(self, graph: Graph, stage: str) -> None:
        if self.options.verify:
            from xrt_core.ir.verifier import verify

            verify(graph, stage)

    def _candidate(self, engine: Engine, device: str) -> Candidate:
        phase = self.options.phase
        level = logging.WARNING

        def supports(node: Node) -> Support:
            nonlocal level
            refused = why_on_host(node)
            if refused is not None:
                return refused
            try:
                found = engine.supports(node, device, phase)
                if isinstance(found, Support):
                    return found
                fault = f"it returned {found!r} instead of a Support"
            except Exception as e:  # a broken engine refuses, it does not break the model
                fault = repr(e)
            self.events.emit("supports.failed", level=level, engine=engine.name, node=node.name, error=fault)
            level = logging.DEBUG  # one warning for all nodes of a graph
            return Support.no(f"{engine.name} failed to say whether it takes the node: {fault}")

        return Candidate(engine.name, supports)

    def _lower_launch(self, node: Node) -> Lowered:
        function, name = node.attributes["function"], node.attributes["engine"]
        assert isinstance(function, Function)
        assert isinstance(name, str)
        engine, device = next((e, d) for e, d in self.engines if e.name == name)
        executable: Executable | None = None
        error: EngineError | None = None
        try:
            executable = self._compile(function, engine, device)
        except Exception as e:  # the host runs the cluster instead; an engine's failure never reaches the caller
            error = e if isinstance(e, EngineError) else CompileError(f"{type(e).__name__}: {e}")
            self.events.emit(
                "compile.failed", level=logging.WARNING, engine=name, cluster=function.name, error=str(error)
            )
        launch = Launch(function, name, executable, lambda: self._host_run(function), error)
        return Lowered(launch, name, f"{function.name} on {name}")

    def _compile(self, function: Function, engine: Engine, device: str) -> Executable:
        def compiler() -> GraphCompiler:
            made = self._compilers.get(engine.name)
            if made is None:
                made = self._compilers[engine.name] = self._new_compiler(engine, device)
            return made

        def compile(compiler: GraphCompiler) -> Executable:
            nodes = len(function.body.nodes)
            with self.events.span("compile", engine=engine.name, cluster=function.name, nodes=nodes):
                made = compiler.compile(function, function.params, function.returns, function.aliases)
            if not isinstance(made, Executable):
                raise CompileError(
                    f"the compiler of engine {engine.name!r} ({engine.package}) returned a {type(made).__name__} for "
                    f"{function.name} ({operators_of(function)}), expected an Executable; this is a bug of that package"
                )
            return made

        return self._executables.obtain(function, engine, device, self.compile_options, compiler, compile)

    def _new_compiler(self, engine: Engine, device: str) -> GraphCompiler:
        compiler = engine.compiler(device, self.compile_options)
        if not isinstance(compiler, GraphCompiler):
            raise CompileError(
                f"engine {engine.name!r} ({engine.package}) gave a {type(compiler).__name__} as its compiler for "
                f"{device}, expected a GraphCompiler; this is a bug of that package"
            )
        try:
            op_kernels.validate(engine.name)
        except RegistrationError as e:  # a kernel of no operator is never asked for: its package's bug, nobody's loss
            self.events.emit("kernels.invalid", level=logging.WARNING, engine=engine.name, error=str(e))
        return compiler

    def _host_run(self, function: Function) -> Call:
        return make_plan(function.body, lambda n: Lowered(host_kernel(n), HOST, n.operator)).run

    def _lower_parts(self, node: Node, label: str, parts: dict[str, Runner]) -> Call:
        def make_runner(graph: Graph, changing: Collection[int]) -> Runner:
            runner = self.runner(graph, changing, part=True)
            key = f"{label}: {graph.name}" if graph.name else label
            parts[key if key not in parts else f"{key} ({len(parts)})"] = runner
            return runner

        if is_late(node):
            body = node.attributes["body"]
            assert isinstance(body, Graph)
            return make_runner(body, ()).run
        return control_step(node, make_runner)


def expand(node: Node) -> Graph | None:
    """The standard's body of an operator that has no kernel anywhere; None for all others."""
    if node.domain == "xrt" or node.op_type in CONTROL_FLOW or find_kernel(node.domain, node.op_type) is not None:
        return None
    from xrt_core.frontends.onnx_functions import function_body

    return function_body(node)


def needed_inputs(node: Node) -> Iterator[int]:
    """Indices of the inputs that must be known before an engine can take `node`; none where none can anyway."""
    kernel = find_kernel(node.domain, node.op_type)
    return iter(()) if kernel is None or kernel.why_dynamic(node) is not None else static_inputs(node)


def why_on_host(node: Node) -> Support | None:
    """Why no engine is asked about `node`, or None where they are."""
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


def _is_launch(node: Node) -> bool:
    return node.op_type == "Launch" and node.domain == "xrt"


def _signature(graph: Graph, known: Mapping[int, np.ndarray]) -> dict[str, str]:
    return {
        v.name or f"input {i}": f"{v.type or '?'}{_shown(known[i]) if i in known else ''}"
        for i, v in enumerate(graph.inputs)
    }


def _shown(data: np.ndarray) -> str:
    return f" = {np.array2string(data, separator=', ', threshold=8)}" if data.size <= 64 else " (constant)"

