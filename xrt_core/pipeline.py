"""The way of a graph, told once: captured -> optimised -> partitioned -> planned.

Read `STEPS` (in `steps.py`) downward: every step by name, with the reason why it stands where it does. Each stage is a
type that prints itself and has the method that leads to the next; a later stage never reaches into an earlier one.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from xrt_core.cache.disk import open_cache
from xrt_core.cache.executables import ExecutableStore
from xrt_core.cache.model_file import ModelFile
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import CompileOptions, Engine, Executable
from xrt_core.errors import CompileError, EngineError, OptionError, PassError
from xrt_core.events import EventLog
from xrt_core.explanation import Explanation
from xrt_core.guard.settings import GuardSettings
from xrt_core.host.executor import host_kernel, namespace_for, reusable_inputs, reusing_kernel
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.types import ValueType
from xrt_core.ir.verdict import Support
from xrt_core.kernels import static_inputs
from xrt_core.options import AUTO, Options
from xrt_core.passes.clustering import Candidate, insert_converters, is_converter
from xrt_core.passes.flops import graph_flops
from xrt_core.passes.infra import typed
from xrt_core.passes.precision import PrecisionReport
from xrt_core.passes.registry import STAGES, RegisteredPass, Stage
from xrt_core.passes.shape_inputs import MAX_ELEMENTS, shape_inputs
from xrt_core.passes.split import is_late
from xrt_core.passes.trace import Trace
from xrt_core.runtime.arrays import to_host
from xrt_core.runtime.compilation import Compilation
from xrt_core.runtime.control import control_step
from xrt_core.runtime.converters import conversion, has_converter
from xrt_core.runtime.launch import Launch
from xrt_core.runtime.memory import is_view
from xrt_core.runtime.parallel import independent_lanes
from xrt_core.runtime.plan import HOST, Call, Lowered, Plan, make_plan
from xrt_core.runtime.runner import MAX_VARIANTS, Runner
from xrt_core.steps import Run, load_plugin_passes, lowering, passes, rules_of, why_on_host

if TYPE_CHECKING:
    from xrt_core.guard.guard import Guard

@dataclass(frozen=True)
class Captured:
    """A graph as a frontend gave it, with what depends on constants alone folded.

    automatic: whether nodes without a mark are offered to engines.
    """

    graph: Graph
    pipeline: Pipeline = field(repr=False)
    automatic: bool = True

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
    """A graph for one signature: typed, folded, simplified. engines: whether engines take part.

    precision: what was lowered to a narrow float, where something was asked for.
    """

    graph: Graph
    known: Mapping[int, np.ndarray]
    engines: bool
    pipeline: Pipeline = field(repr=False)
    precision: PrecisionReport | None = None
    automatic: bool = True

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
    automatic: bool = True

    def plan(self, owned: bool = True) -> Planned:
        """Compile every Launch and make the register program. owned: see `make_plan` of runtime.plan."""
        return self.pipeline.plan(self, owned)

    def as_text(self) -> str:
        """The graph, then the explanation."""
        return f"{self.graph}\n\n{self.explanation}"

    __str__ = as_text


class Planned(Plan):
    """A plan that knows what was decided when it was made, and which parts are planned by themselves.

    signature: the types of the inputs, and the values of those that determine shapes.
    """

    __slots__ = ("_explanation", "parts", "signature")

    def __init__(self, explanation: Explanation, parts: Mapping[str, Runner], *plan: Any) -> None:
        super().__init__(*plan)
        self._explanation = explanation
        self.parts = parts
        self.signature: tuple[Sequence[ValueType | None], Mapping[int, np.ndarray]] = ((), {})

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
            memory=str(self.memory),
            peak_bytes=self.memory.peak,
            side_by_side=self.side_by_side,
            nested={k: v for k, v in nested.items() if v},
        )


class Pipeline:
    """The steps, for one set of options and engines. Safe to use from many threads.

    engines: those that take part, in the order to try them, each with the device it compiles for. saved: the file that
    the model was loaded from, whose executables are used.
    """

    def __init__(
        self,
        options: Options,
        engines: Sequence[tuple[Engine, str]],
        events: EventLog,
        saved: ModelFile | None = None,
    ) -> None:
        self.options = options
        self.engines = tuple(engines)
        self.events = events
        self.compile_options = CompileOptions(
            phase=options.phase,
            workspace_bytes=options.max_workspace_bytes,
            max_batch_size=options.max_batch_size,
            threads=_threads(options, engines),
            extra=json.loads(options.engine_options) if options.engine_options else {},
        )
        self.xp: Any = namespace_for(options.device or (self.engines[0][1] if self.engines else "cpu"))
        disk = open_cache(options.cache, options.cache_dir, options.cache_bytes) if self.engines else None
        self.executables = ExecutableStore(disk, events, saved)
        self.compilation = Compilation(self.engines, self.compile_options, self.executables, events)
        self.compilation.check_options()
        settings = GuardSettings.of(options) if self.engines else None
        self.guard: Guard | None = None
        if settings is not None:
            from xrt_core.guard.guard import Guard
            from xrt_core.guard.outcome import Outcome

            trusted = {} if saved is None else {k: Outcome.from_json(v) for k, v in saved.verdicts.items()}
            self.guard = Guard(
                settings, self.compilation, disk, events, auto=options.engine == (AUTO,), trusted=trusted
            )
        self._lowering = lowering(options)
        self.rules = rules_of(options)
        for rule in self.rules:
            if rule.engine not in (HOST, *(e.name for e, _ in engines)) and options.engine != (HOST,):
                raise OptionError(f"{rule} ({options.source('marks')}): {self._why_absent(rule.engine)}")
        load_plugin_passes(events)
        self.passes = {stage: passes.order(stage) for stage in STAGES}  # as registered now
        self.trace = Trace(options.trace, events) if options.trace else None

    # --- the stages ----------------------------------------------------------------------------------------------

    def capture(self, graph: Graph, automatic: bool | None = None) -> Captured:
        """Begin the way of a graph. automatic: what the graph around says, for a part of one."""
        self._verify(graph, "captured")
        run = Run(self.options, rules=self.rules, part=automatic is not None)
        graph = self._run_passes("model", graph, run)
        return Captured(graph, self, run.automatic if automatic is None else automatic)

    def optimise(
        self, captured: Captured, types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], engines: bool
    ) -> Optimised:
        """See `Captured.optimise`."""
        engines = engines and bool(self.engines)
        run = Run(self.options, types=types, known=known, engines=engines, lowering=self._lowering)
        graph = self._run_passes("signature", captured.graph, run)
        return Optimised(graph, known, engines, self, run.precision, captured.automatic)

    def partition(self, optimised: Optimised) -> Partitioned:
        """See `Optimised.partition`."""
        graph, options = optimised.graph, self.options
        candidates = [self._candidate(e, d) for e, d in self.engines] if optimised.engines else []
        auto = options.engine == (AUTO,)
        if candidates and auto:
            pinned = {n.annotations.engine for n in graph.nodes}
            candidates = [_any_of(candidates), *(c for c in candidates if c.name in pinned)]
        run = Run(
            options,
            engines=optimised.engines,
            candidates=candidates,
            device=self.engines[0][1] if self.engines else "cpu",
            automatic=optimised.automatic,
            obey=bool(candidates) or not (self.engines or options.engine == (HOST,)),
            absent=self._why_absent,
            host_on_device=self.xp is not np,
            convert=lambda g: insert_converters(g, has_converter, (AUTO,) if auto else ()),
        )
        folded = self._run_passes("engines", graph, run)
        functions = [f for n in folded.nodes if isinstance(f := n.attributes.get("function"), Function)]
        assert run.report is not None
        explanation = Explanation(
            graph.name,
            _signature(graph, optimised.known),
            run.report,
            graph_flops(graph),
            {f.name: graph_flops(f.body) for f in functions},
            precision=optimised.precision,
            partitioned=folded,
        )
        return Partitioned(folded, explanation, self, optimised.automatic)

    def plan(self, partitioned: Partitioned, owned: bool) -> Planned:
        """See `Partitioned.plan`."""
        graph = partitioned.graph
        parts: dict[str, Runner] = {}

        def lower(node: Node) -> Lowered:
            label = f"{node.operator} {node.name}".strip()
            if _is_launch(node):
                return self._lower_launch(node)._replace(lane=_lane(node))
            if is_converter(node):
                return self._lower_converter(node, graph, label)
            if node.subgraphs:
                return Lowered(self._lower_parts(node, label, parts, partitioned.automatic), HOST, label)
            return self._lower_host(node, label)

        kind = partial(Planned, partitioned.explanation, parts)
        planned = make_plan(graph, lower, kind, owned=owned, to_host=to_host(self.xp))
        always = self.options.parallel is True
        if self.options.parallel and independent_lanes(graph, _lane, lambda n: always or _has_work(n)):
            planned.run_side_by_side(always)
        return planned

    # --- runners -------------------------------------------------------------------------------------------------

    def runner(
        self, graph: Graph, changing: Collection[int] = (), *, part: bool = False, automatic: bool = True
    ) -> Runner:
        """A Runner for a graph: plans per signature, made by this pipeline.

        changing: inputs that change at every turn of a loop and are never taken by value. part: it is a part of a
        graph, where signatures may follow the data: after some of them, new ones stay on the host. automatic: whether
        nodes of the part that have no mark are offered to engines.
        """
        if self._lowering is not None and not part:
            self._lowering.check_names(graph)
        captured = self.capture(graph, automatic if part else None)
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
        planned.signature = types, known
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

    def _run_passes(self, stage: Stage, graph: Graph, run: Run) -> Graph:
        told = self.trace.begin(graph, stage) if self.trace is not None else None
        for p in self.passes[stage]:
            start = time.perf_counter()
            new = p.run(graph, run) if p.origin == "core" else self._run_foreign(p, graph, run)
            if told is not None:
                told(graph, new, p.name, p.owner, time.perf_counter() - start)
            if new is not graph:
                self._verify(new, p.name)
            graph = new
        return graph

    def _run_foreign(self, p: RegisteredPass, graph: Graph, run: Run) -> Graph:
        """The graph after a pass of a user or a plugin, verified in any case, as nobody here knows the pass."""
        from xrt_core.ir.verifier import verify

        try:
            new = p.run(graph, run)
            if new is not graph:
                new = typed(new)
                verify(new, p.name)
            return new
        except Exception as e:
            message = f"pass {p.name!r} of {p.owner} failed on graph {graph.name!r}: {type(e).__name__}: {e}"
            if p.origin == "user":
                raise PassError(f"{message}; mend it, or take it out with xrt.unregister_pass({p.name!r})") from e
            self.events.emit("pass.failed", level=logging.WARNING, name_of_pass=p.name, owner=p.owner, error=message)
            return graph

    def _why_absent(self, name: str) -> str:
        """Why an engine that a mark names does not take part, and what to do."""
        try:
            process_engines.usable(name)
        except EngineError as e:
            return f"{e}; or take the mark off, or run with marks=False"
        listed = [e.name for e, _ in self.engines]
        return f"engine {name!r} is installed, but not among {listed}: add it with engine={[*listed, name]}"

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
        label = f"{function.name} on {name}"
        if self.guard is not None:
            return Lowered(self.guard.launch(function, name, lambda: self._host_run(function)), name, label)
        executable: Executable | None = None
        error: EngineError | None = None
        try:
            executable = self.compilation.executable(function, name)
        except Exception as e:  # the host runs the cluster instead; an engine's failure never reaches the caller
            error = e if isinstance(e, EngineError) else CompileError(f"{type(e).__name__}: {e}")
            level = logging.DEBUG if self.executables.sealed else logging.WARNING  # a load that refuses says it itself
            self.events.emit("compile.failed", level=level, engine=name, cluster=function.name, error=str(error))
        return Lowered(Launch(function, name, executable, lambda: self._host_run(function), error), name, label)

    def _lower_host(self, node: Node, label: str) -> Lowered:
        return Lowered(
            host_kernel(node, self.xp),
            HOST,
            label,
            shares=is_view(node),
            reusable=reusable_inputs(node, self.xp),
            reusing=partial(reusing_kernel, node),
        )

    def _lower_converter(self, node: Node, graph: Graph, label: str) -> Lowered:
        source, target = str(node.attributes["source"]), str(node.attributes["target"])
        call = conversion(node, graph, to_host(self.xp))
        return Lowered(call, target, label, reads=source, shares=not has_converter(source, target))

    def _host_run(self, function: Function) -> Call:
        return make_plan(function.body, lambda n: Lowered(host_kernel(n), HOST, n.operator)).run

    def _lower_parts(self, node: Node, label: str, parts: dict[str, Runner], automatic: bool) -> Call:
        def make_runner(graph: Graph, changing: Collection[int]) -> Runner:
            runner = self.runner(graph, changing, part=True, automatic=automatic)
            key = f"{label}: {graph.name}" if graph.name else label
            parts[key if key not in parts else f"{key} ({len(parts)})"] = runner
            return runner

        if is_late(node):
            body = node.attributes["body"]
            assert isinstance(body, Graph)
            return make_runner(body, ()).run
        return control_step(node, make_runner)


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


_WORK = 2_000_000  # FLOPs of a cluster, a fifth of a millisecond, say, that may be worth a thread of its own


def _lane(node: Node) -> str:
    """The engine and device of a launch, "" for any other node."""
    return f"{node.attributes['engine']!s} {node.annotations.device or ''}".strip() if _is_launch(node) else ""


def _has_work(launch: Node) -> bool:
    function = launch.attributes["function"]
    return isinstance(function, Function) and graph_flops(function.body) >= _WORK


def _threads(options: Options, engines: Sequence[tuple[Engine, str]]) -> int | None:
    """Threads of each executable on a CPU: as told, or a share of the cores where engines always run side by side."""
    sharing = sum(device == "cpu" for _, device in engines)
    if options.threads is not None or options.parallel is not True or sharing < 2:
        return options.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // sharing)


def _is_launch(node: Node) -> bool:
    return node.op_type == "Launch" and node.domain == "xrt"


def _signature(graph: Graph, known: Mapping[int, np.ndarray]) -> dict[str, str]:
    return {
        v.name or f"input {i}": f"{v.type or '?'}{_shown(known[i]) if i in known else ''}"
        for i, v in enumerate(graph.inputs)
    }


def _shown(data: np.ndarray) -> str:
    return f" = {np.array2string(data, separator=', ', threshold=8)}" if data.size <= 64 else " (constant)"

