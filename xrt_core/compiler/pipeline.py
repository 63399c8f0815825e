"""Pipeline: walks the way of a graph, for one set of options and engines."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from xrt_core.cache.disk import open_cache
from xrt_core.cache.model_file import ModelFile
from xrt_core.cache.store import ExecutableStore
from xrt_core.compiler.lowering import Lowering, has_work, lane, shares_cores
from xrt_core.compiler.passes import PassContext, load_plugin_passes, lowering, passes, rules_of
from xrt_core.compiler.stages import Captured, Optimised, Partitioned, Planned
from xrt_core.compiler.support import EngineSupport
from xrt_core.compiler.tiering import TieredCompiler
from xrt_core.engine import engines as process_engines
from xrt_core.engine.contract import CompileOptions, Engine
from xrt_core.errors import EngineError, OptionError, PassError
from xrt_core.events import EventLog
from xrt_core.explanation import Explanation
from xrt_core.guard.background import BackgroundCompiler
from xrt_core.guard.policy import GuardSettings
from xrt_core.host.executor import namespace_for
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.types import ValueType
from xrt_core.kernels import static_inputs
from xrt_core.options import AUTO, Options
from xrt_core.passes.flops import graph_flops
from xrt_core.passes.partitioning import insert_converters
from xrt_core.passes.pass_base import typed
from xrt_core.passes.pass_manager import STAGES, RegisteredPass, Stage
from xrt_core.passes.shape_specialization import MAX_ELEMENTS, shape_inputs
from xrt_core.passes.trace import Trace
from xrt_core.plugins import plugins
from xrt_core.runtime.arrays import to_host
from xrt_core.runtime.converters import has_converter
from xrt_core.runtime.engine_compiler import Compilation
from xrt_core.runtime.plan import HOST, Lowered, Plan, make_plan
from xrt_core.runtime.plan_cache import MAX_VARIANTS, PlanCache
from xrt_core.runtime.scheduler import independent_lanes

if TYPE_CHECKING:
    from xrt_core.compiler.making import LazyPipeline
    from xrt_core.guard.manager import GuardManager
    from xrt_core.guard.report import GuardReport
    from xrt_core.passes.pass_manager import PassRegistry

Chosen = Sequence[tuple[Engine, str]]
"""Engines that take part, in the order to try them, each with the device it compiles for."""


class Pipeline:
    """The steps, for one set of options and engines. Safe to use from many threads.

    saved: the file that the model was loaded from, whose executables are used. planning: plans new signatures with
    engines beside their callers, who have the host's answers meanwhile. registry: of passes, as they were when the
    module was made. behind: the pipeline with engines, where this one only gives the first answers (see `making`).
    """

    def __init__(
        self,
        options: Options,
        engines: Chosen,
        events: EventLog,
        saved: ModelFile | None = None,
        *,
        planning: BackgroundCompiler | None = None,
        registry: PassRegistry | None = None,
        behind: LazyPipeline | None = None,
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
        self.guard: GuardManager | None = None
        if settings is not None:
            from xrt_core.guard.manager import GuardManager
            from xrt_core.verify.verdict import Outcome

            trusted = {} if saved is None else {k: Outcome.from_json(v) for k, v in saved.verdicts.items()}
            self.guard = GuardManager(
                settings, self.compilation, disk, events, auto=options.engine == (AUTO,), trusted=trusted
            )
        self.planning = planning
        self._host_first = None if planning is None else TieredCompiler(planning, lambda: self.accelerated)
        self._behind = behind
        self._made = time.time()
        self._lowering = lowering(options)
        self._nodes = Lowering(self.compilation, self.executables, self.guard, events, self.xp)
        self._candidates = EngineSupport(self.engines, options.phase, options.engine == (AUTO,), self.guard, events)
        self.rules = rules_of(options)
        for rule in self.rules:
            if rule.engine not in (HOST, *(e.name for e, _ in engines)) and not self._is_host:
                raise OptionError(f"{rule} ({options.source('marks')}): {self._why_absent(rule.engine)}")
        plugins.load("xrt.observers")
        load_plugin_passes(events)
        self.registry = passes.snapshot() if registry is None else registry.with_plugins_of(passes)
        self.passes = {stage: self.registry.order(stage) for stage in STAGES}  # as registered now
        self.trace = Trace(options.trace, events) if options.trace else None

    @property
    def _is_host(self) -> bool:
        """Whether it is the host's by itself, or stands for one with engines."""
        return self.options.engine == (HOST,) or self._behind is not None

    # --- the one with engines -----------------------------------------------------------------------------------

    @property
    def accelerated(self) -> Pipeline:
        """The pipeline with engines: this one, or the one behind it, made now if it is not there.

        Raises what choosing engines and making a pipeline raise.
        """
        return self if self._behind is None else self._behind.get()

    @property
    def chosen(self) -> str:
        """The engines that take part, for people; nothing is imported to say so."""
        found = self if self._behind is None else self._behind.made
        if found is None:
            return f"{', '.join(self.options.engine or (AUTO,))} (not asked yet)"
        return ", ".join(e.name for e, _ in found.engines) or HOST

    def adopt(self, captured: Captured) -> Captured:
        """A captured graph of the pipeline in front, after those passes of the model that only this pipeline has."""
        if captured.pipeline is self:
            return captured
        own = [p for p in self.passes["model"] if p not in captured.pipeline.passes["model"]]
        run = PassContext(self.options, rules=self.rules)
        return replace(captured, graph=self._run_passes("model", captured.graph, run, own), pipeline=self)

    # --- the guard ------------------------------------------------------------------------------------------------

    @property
    def _guard_so_far(self) -> GuardManager | None:
        found = self if self._behind is None else self._behind.made
        return None if found is None else found.guard

    def wait(self, timeout: float | None = None) -> bool:
        """See `GuardedModule.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.planning is not None and not self.planning.wait(timeout):
            return False
        guard = self._guard_so_far
        return guard is None or guard.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def report(self) -> GuardReport:
        """See `GuardedModule.report`."""
        from xrt_core.guard.report import GuardReport

        guard = self._guard_so_far
        rows = () if self.planning is None else self.planning.rows()
        return GuardReport.of(() if guard is None else guard.known(), time.time() - self._made, rows)

    def close(self) -> None:
        """See `GuardedModule.close`."""
        if self.planning is not None:
            self.planning.close()
        guard = self._guard_so_far
        if guard is not None:
            guard.close()

    # --- the stages ----------------------------------------------------------------------------------------------

    def capture(self, graph: Graph, automatic: bool | None = None) -> Captured:
        """Begin the way of a graph. automatic: what the graph around says, for a part of one."""
        self._verify(graph, "captured")
        run = PassContext(self.options, rules=self.rules, part=automatic is not None)
        graph = self._run_passes("model", graph, run)
        return Captured(graph, self, run.automatic if automatic is None else automatic)

    def optimise(
        self, captured: Captured, types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], engines: bool
    ) -> Optimised:
        """See `Captured.optimise`."""
        engines = engines and bool(self.engines)
        run = PassContext(self.options, types=types, known=known, engines=engines, lowering=self._lowering)
        graph = self._run_passes("signature", captured.graph, run)
        return Optimised(graph, known, engines, self, run.precision, captured.automatic)

    def partition(self, optimised: Optimised) -> Partitioned:
        """See `Optimised.partition`."""
        graph, options = optimised.graph, self.options
        take_part = optimised.engines and bool(self.engines)
        auto = options.engine == (AUTO,)
        run = PassContext(
            options,
            engines=optimised.engines,
            candidates=self._candidates.of if take_part else lambda graph: (),
            device=self.engines[0][1] if self.engines else "cpu",
            automatic=optimised.automatic,
            obey=take_part or not (self.engines or self._is_host),
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

    def plan(self, partitioned: Partitioned, owned: bool, kind: type[Planned]) -> Planned:
        """See `Partitioned.plan`."""
        graph = partitioned.graph
        parts: dict[str, PlanCache] = {}

        def make_part(part: Graph, changing: Collection[int], label: str) -> PlanCache:
            runner = self.runner(part, changing, part=True, automatic=partitioned.automatic)
            key = f"{label}: {part.name}" if part.name else label
            parts[key if key not in parts else f"{key} ({len(parts)})"] = runner
            return runner

        shared = shares_cores(graph)

        def lower(node: Node) -> Lowered:
            return self._nodes.lower(node, graph, make_part, shared)

        made = partial(kind, partitioned.explanation, parts, self.compilation.engines, self.xp)
        planned = make_plan(graph, lower, made, owned=owned, to_host=to_host(self.xp))
        always = self.options.parallel is True
        if self.options.parallel and independent_lanes(graph, lane, lambda n: always or has_work(n)):
            planned.run_side_by_side(always)
        return planned

    # --- runners -------------------------------------------------------------------------------------------------

    def runner(
        self, graph: Graph, changing: Collection[int] = (), *, part: bool = False, automatic: bool = True
    ) -> PlanCache:
        """A Runner for a graph: plans per signature, made by this pipeline.

        changing: inputs that change at every turn of a loop and are never taken by value. part: it is a part of a
        graph, where signatures may follow the data: after some of them, new ones stay on the host. automatic: whether
        nodes of the part that have no mark are offered to engines.
        """
        if self._lowering is not None and not part:
            self._lowering.check_names(graph)
        captured = self.capture(graph, automatic if part else None)
        first = None if part and self._behind is not None else self._host_first  # parts of the host's plan stay its own
        by_value = [i for i in shape_inputs(captured.graph, static_inputs) if i not in changing]

        def make(types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], engines: bool) -> Plan:
            if first is not None and engines:
                return first.plan(captured, types, known, not part, runner)
            return self.make_plan(captured, types, known, engines, owned=not part)

        runner = PlanCache(
            captured,
            make,
            by_value=by_value,
            max_signatures=self.options.cache_size,
            engine_signatures=MAX_VARIANTS if part else None,
            max_by_value=MAX_ELEMENTS,
            to_host=to_host(self.xp),
        )
        return runner

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

    def _run_passes(
        self, stage: Stage, graph: Graph, run: PassContext, only: Sequence[RegisteredPass] | None = None
    ) -> Graph:
        told = self.trace.begin(graph, stage) if self.trace is not None and only != [] else None
        for p in self.passes[stage] if only is None else only:
            start = time.perf_counter()
            new = p.run(graph, run) if p.origin == "core" else self._run_foreign(p, graph, run)
            if told is not None:
                told(graph, new, p.name, p.owner, time.perf_counter() - start)
            if new is not graph:
                self._verify(new, p.name)
            graph = new
        return graph

    def _run_foreign(self, p: RegisteredPass, graph: Graph, run: PassContext) -> Graph:
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


def _threads(options: Options, engines: Sequence[tuple[Engine, str]]) -> int | None:
    """Threads of each executable on a CPU: as told, or a share of the cores where engines always run side by side."""
    sharing = sum(device == "cpu" for _, device in engines)
    if options.threads is not None or options.parallel is not True or sharing < 2:
        return options.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // sharing)


def _signature(graph: Graph, known: Mapping[int, np.ndarray]) -> dict[str, str]:
    return {
        v.name or f"input {i}": f"{v.type or '?'}{_shown(known[i]) if i in known else ''}"
        for i, v in enumerate(graph.inputs)
    }


def _shown(data: np.ndarray) -> str:
    return f" = {np.array2string(data, separator=', ', threshold=8)}" if data.size <= 64 else " (constant)"

