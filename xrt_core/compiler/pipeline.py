"""Pipeline: compiles a captured graph to the plan of one signature, stage by stage."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.compiler.kept_shapes import KeptShapes
from xrt_core.compiler.lowering import Lowering, is_launch, lane, sharing_cores
from xrt_core.compiler.passes import PassContext
from xrt_core.compiler.services import Chosen, Services, usable_processors
from xrt_core.compiler.stages import Captured, Optimised, Partitioned, Planned
from xrt_core.compiler.support import EngineSupport
from xrt_core.engine import engines as process_engines
from xrt_core.engine.boundary import preserved_state
from xrt_core.engine.device_kinds import CPU, is_host, number_of
from xrt_core.errors import CompileError, DeviceNotFoundError, OptionError, PassError
from xrt_core.explanation import Explanation
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, engine_and_device
from xrt_core.ir.symbols import Declared, SymbolicSignature
from xrt_core.ir.types import TensorType, ValueType, physical_memory
from xrt_core.kernels import depends_on_data, static_inputs
from xrt_core.options import AUTO
from xrt_core.passes.data_dependent_shapes import is_late
from xrt_core.passes.partitioning import PartitionReport, insert_converters, is_converter
from xrt_core.passes.partitioning.cost_model import flops, is_small_part
from xrt_core.passes.pass_base import typed
from xrt_core.passes.pass_manager import RegisteredPass, Stage
from xrt_core.passes.shape_specialization import MAX_ELEMENTS, shape_inputs
from xrt_core.passes.sized_graphs import (
    agreement,
    dimension_guards,
    function_at,
    graph_at,
    is_shape_arithmetic,
    reflection_guards,
)
from xrt_core.passes.symbolic_shapes import SymbolicShapes
from xrt_core.runtime.arrays import has_converter
from xrt_core.runtime.input_checks import has_symbolic_index, unbound_index
from xrt_core.runtime.plan import HOST, Lowered, Plan, make_plan
from xrt_core.runtime.plan_cache import MAX_VARIANTS, PlanCache
from xrt_core.runtime.scheduler import independent_lanes
from xrt_core.runtime.varying import VaryingShapes

if TYPE_CHECKING:
    from xrt_core.guard.background import Plannable
    from xrt_core.guard.record import GuardReport


STATIC_FIRST: Final = 2
"""Exact signatures of a graph with engine="auto", where engines of static shapes take part."""

_MOST: Final = 1024
"""Signatures of a graph that are kept, where the options do not say how many: memory decides."""
_BYTES_OF_A_NODE: Final = 100_000
"""What an executable takes beside its constants, for each node. Measured through a compiling engine on a CPU: 10 MB for
the 120 nodes of an encoder."""

_is_allowed: Final[ContextVar[bool]] = ContextVar("xrt_compilation_is_allowed", default=False)


@contextmanager
def compilation_allowed() -> Iterator[None]:
    """A context in which `forbid_compilation` forbids nothing: the caller compiles in advance."""
    token = _is_allowed.set(True)
    try:
        yield
    finally:
        _is_allowed.reset(token)


class NotSymbolic(Exception):
    """A graph is not worth a symbolic plan, with the reason."""


class Pipeline:
    """Compiles graphs with one set of services. Thread-safe."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.options = services.options
        self.engines = services.engines
        self._lowering = Lowering(services)
        self._support = EngineSupport(services)
        self._made = time.time()

    # --- the order of compilation -------------------------------------------------------------------------------

    def compile(
        self,
        captured: Captured,
        types: Sequence[ValueType | None],
        known: Mapping[int, np.ndarray],
        *,
        engines: bool = True,
        owned: bool = True,
        kind: type[Planned] = Planned,
        symbolic: SymbolicSignature | None = None,
    ) -> Planned:
        """Compile the plan of one signature: input types, and values of the inputs in `known` (by index).

        engines: False compiles for the host alone. owned: see `runtime.plan.make_plan`. kind: the class of the plan.
        symbolic: the symbols, where dimensions of the types are expressions over some.
        Emits one event, "specialised", which is an INFO line with a summary. Raises NotSymbolic where engines would
        take more of the graph if its shapes were static.
        """
        start = time.perf_counter()
        captured = self.adopt(captured)
        optimised = self.optimise(captured, types, known, engines=engines, symbolic=symbolic)
        partitioned = self.partition(optimised)
        if optimised.engines and optimised.symbolic is not None:
            self._require_as_many(optimised, partitioned)
        middle = time.perf_counter()
        planned = self.plan(partitioned, owned=owned, kind=kind, part=captured.part)
        planned.signature = types, known
        if symbolic is not None and optimised.symbolic is not None:
            planned.symbolic = symbolic
            reflected = [g for g in reflection_guards(optimised.graph) if g.evaluate(symbolic.sizes) >= 0]
            planned.guards = (*optimised.symbolic.guards, *dimension_guards(optimised.graph), *reflected)
            agreed = agreement(optimised.graph, symbolic.symbols, symbolic.sizes, planned.guards)
            planned.agrees = None if agreed is None else agreed.holds
        if kind is Planned:
            events = self.services.events
            # the summary reads every node, and is made only if somebody reads it
            summary = {"result": planned.explain().summary()} if events.is_observed(logging.INFO) else {}
            events.emit(
                "specialised",
                level=logging.INFO,
                seconds=time.perf_counter() - start,
                model=captured.graph.name or "graph",
                before_compilation_ms=round((middle - start) * 1e3, 1),
                **summary,
            )
        return planned

    def with_sharding(self, rows: tuple[tuple[str, str], ...]) -> Pipeline:
        """This pipeline with another option `sharding`."""
        services = self.services
        return type(self)(replace(services, options=replace(self.options, sharding=rows)))

    def mark_updates(self, graph: Graph) -> Graph:
        """Annotate the nodes that engines' kernels declare as model updates, without aliases. Called before gradients
        are built from the graph."""
        return self._support.mark_updates(graph, aliases=False)

    def capture(self, graph: Graph, automatic: bool | None = None) -> Captured:
        """Run the passes of the stage "model". automatic: for a subgraph, the setting of the whole graph."""
        part, precision = automatic is not None, self.services.precision
        if precision is not None and not part:
            precision.check_names(graph)
        self._verify(graph, "captured")
        context = PassContext(self.options, rules=self.services.rules, part=part)
        applied = self.services.passes["model"]
        graph = self._run_passes("model", graph, context, applied)
        return Captured(graph, context.results.automatic if automatic is None else automatic, applied, part)

    @property
    def compares_first_calls(self) -> bool:
        """Whether somebody compares the first calls of a graph's plans with the graph as it was given."""
        return False

    def adopt(self, captured: Captured) -> Captured:
        """Run the passes of the stage "model" that the pipeline that captured the graph did not have."""
        own = [p for p in self.services.passes["model"] if p not in captured.applied]
        if not own:
            return captured
        context = PassContext(self.options, rules=self.services.rules)
        graph = self._run_passes("model", captured.graph, context, own)
        return replace(captured, graph=graph, applied=[*captured.applied, *own])

    def optimise(
        self,
        captured: Captured,
        types: Sequence[ValueType | None],
        known: Mapping[int, np.ndarray],
        *,
        engines: bool = True,
        symbolic: SymbolicSignature | None = None,
    ) -> Optimised:
        """Specialise the graph for one signature: run the passes of the stage "signature"."""
        engines = engines and bool(self.engines)
        automatic = engines and captured.automatic
        shapes = None if symbolic is None else SymbolicShapes(symbolic.symbols, symbolic.sizes)
        context = PassContext(
            self.options,
            types=types,
            known=known,
            engines=engines,
            native=self._support.takes_natively if engines and self.engines[0][0].native_operators else None,
            lowering=self.services.precision,
            # inputs of a subgraph, such as a loop body, must not be donated
            mark_updates=partial(self._support.mark_updates, aliases=not captured.part) if engines else lambda g: g,
            taken_of_any_shape=partial(self._support.taken_of_any_shape, symbolic=shapes) if automatic else None,
            symbolic=shapes,
            part=captured.part,
            why_no_mesh=self._why_no_mesh() if self.options.mesh is not None else "",
        )
        graph = self._run_passes("signature", captured.graph, context, self.services.passes["signature"])
        found = context.results
        return Optimised(graph, known, engines, captured.automatic, found.precision, shapes, found.sharding)

    def partition(self, optimised: Optimised) -> Partitioned:
        """Partition into clusters, a Launch node each: run the passes of the stage "engines". Compiles nothing."""
        services, graph = self.services, optimised.graph
        symbolic = optimised.symbolic
        sizes = {} if symbolic is None else symbolic.sizes
        context = PassContext(
            self.options,
            engines=optimised.engines,
            candidates=partial(self._support.of, symbolic=symbolic) if optimised.engines else lambda graph: (),
            symbolic=symbolic,
            device=self.engines[0][1] if self.engines else CPU.name,
            automatic=optimised.automatic,
            obey=optimised.engines or not (self.engines or services.host_only),
            absent=services.why_absent,
            device_for=services.device_for if optimised.engines or self.options.engine == (HOST,) else None,
            host_device=CPU.name if services.place.on_cpu else None,
            give_up=self._give_up if self.options.placement and self.options.prefers_placement else None,
            host_on_device=not services.place.on_cpu,
            convert=lambda g: insert_converters(g, has_converter, (AUTO,) if services.auto else ()),
        )
        # an engine may load its library when it is first asked about a node
        with preserved_state("an engine that was asked about nodes") if optimised.engines else nullcontext():
            outlined = self._run_passes("engines", graph, context, services.passes["engines"])
        report = context.results.report
        assert report is not None
        # without the graph itself, whose tables of producers and consumers are no longer needed
        explain = partial(_explanation, graph.nodes, report, outlined, optimised.known, optimised, sizes)
        return Partitioned(outlined, explain, optimised.automatic, sizes)

    def _why_no_mesh(self) -> str:
        """Why no engine runs on the mesh, or "" if one does.

        Raises DeviceNotFoundError for a mesh larger than the devices of every engine that could, listing them, and
        OptionError beside `device=` with a number, which is one device.
        """
        mesh, here, one = self.options.mesh, [], self.options.device
        assert mesh is not None
        if one is not None and number_of(one):
            raise OptionError(
                f"device={one!r} ({self.options.source('device')}) is one device, and the mesh {mesh} "
                f"({self.options.source('mesh')}) lies on the first {mesh.device_count} of its kind: give one of them, "
                f"or device={one.partition(':')[0]!r}"
            )
        for engine, device in self.engines:
            if engine.meshes:
                kind = device.partition(":")[0]
                here = [d for d in process_engines.devices(engine) if d.partition(":")[0] == kind]
                if len(here) >= mesh.device_count:
                    return ""
        if here:
            raise DeviceNotFoundError(
                f"the mesh {mesh} ({self.options.source('mesh')}) has {mesh.device_count} devices, and there are "
                f"{len(here)} here: {', '.join(here)}"
            )
        return f"no engine that takes part runs on several devices at once ({self.engine_names})"

    def _give_up(self, node: str, device: str, reason: str) -> None:
        """Emit the event of a placement that cannot be had."""
        self.services.events.emit("placement.given_up", level=logging.WARNING, node=node, device=device, reason=reason)

    def _require_as_many(self, optimised: Optimised, partitioned: Partitioned) -> None:
        """Raise NotSymbolic if nodes are on the host for their shapes alone: an engine takes them with those of the
        first call. Nodes that compute on shapes do not count, nor small ones that are not worth a launch, nor those
        that read by indices which the host must check, nor those whose shapes only a call tells, with what follows
        them; nor all of them where the host takes next to no time for them. Or if no launch could check an index of
        its, as the shapes of its inputs do not tell its limit."""
        assert optimised.symbolic is not None
        found = (n.attributes["function"] for n in partitioned.graph.nodes if is_launch(n))
        node = unbound_index([f for f in found if isinstance(f, Function)], optimised.symbolic.sizes)
        if node is not None:
            raise NotSymbolic(f"{node.operator} {node.name!r}: no input of its launch tells the limit of its indices")
        passed = (is_launch, is_converter, is_shape_arithmetic, is_late, depends_on_data, has_symbolic_index)
        left = {n.outputs for n in partitioned.graph.nodes if not any(p(n) for p in passed)}
        if not left:
            return
        graph = optimised.graph
        symbolic = self._support.of(graph, symbolic=optimised.symbolic)
        refused = {
            i for i, n in enumerate(graph.nodes) if n.outputs in left and not any(c.supports(n).ok for c in symbolic)
        }
        if not refused:
            return
        sized = graph_at(graph, optimised.symbolic.sizes)
        exact = self._support.of(sized)
        lost = [i for i in sorted(refused) if any(c.supports(sized.nodes[i]).ok for c in exact)]
        if lost and not is_small_part(sized, lost):
            n = sized.nodes[lost[0]]
            raise NotSymbolic(f"{n.operator} {n.name!r} runs on an engine with static shapes only")

    def plan(
        self, partitioned: Partitioned, *, owned: bool = True, kind: type[Planned] = Planned, part: bool = False
    ) -> Planned:
        """Compile every Launch and lower the graph to a register program. owned, kind: as of `compile`. part: it is one
        of another graph."""
        services, graph = self.services, partitioned.graph
        parts: dict[str, PlanCache] = {}

        def make_part(part: Graph, changing: Collection[int], label: str, varies: bool) -> PlanCache:
            cache = self.plan_cache(self.capture(part, partitioned.automatic), changing, part=True, varies=varies)
            key = f"{label}: {part.name}" if part.name else label
            parts[key if key not in parts else f"{key} ({len(parts)})"] = cache
            return cache

        shared = sharing_cores(graph, part)
        if services.events.heard and (clusters := sum(map(is_launch, graph.nodes))):
            services.events.progress("plan", model=graph.name or "graph", clusters=clusters)

        def lower(node: Node) -> Lowered:
            return self._lowering.lower(node, graph, make_part, shared, partitioned.sizes)

        place = services.place
        made = partial(kind, partitioned, parts, services.compilation.engines, (place.xp, place.device))
        planned = make_plan(graph, lower, made, owned=owned, to_host=place.to_host, within=place.scope)
        if not place.on_cpu:
            place.synchronize()  # constants are read on the streams of callers, which nothing orders after this one
        if self.options.parallel and independent_lanes(graph, lane):
            planned.run_side_by_side()
        return planned

    # --- plans per signature ------------------------------------------------------------------------------------

    def plan_cache(
        self,
        captured: Captured,
        changing: Collection[int] = (),
        *,
        part: bool = False,
        varies: bool = False,
        declared: Declared | None = None,
    ) -> PlanCache:
        """Return a plan cache for a graph; a miss compiles the plan of the new signature with this pipeline.

        changing: inputs that change each iteration of a loop; their values are never part of the signature. part: the
        graph is a separately planned subgraph, whose signatures may depend on data: beyond a limit, new signatures are
        compiled for the host alone. varies: sizes of its inputs depend on data, and are symbols from the first call on
        where engines take them. declared: the shapes of its inputs, as the user declared them.
        """

        def check_allowed(types: Sequence[ValueType | None]) -> None:
            if self.options.forbid_compilation and not _is_allowed.get():
                given = ", ".join(
                    f"{v.name or '?'}: {t or '?'}" for v, t in zip(captured.graph.inputs, types, strict=True)
                )
                raise CompileError(
                    f"a call with {given} needs a compilation, which forbid_compilation "
                    f"({self.options.source('forbid_compilation')}) forbids; compile in advance: "
                    "xrt.warmup(module, shapes=[...]), or declare shapes= of inputs that vary"
                )

        def make_symbolic(
            types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], signature: SymbolicSignature
        ) -> Plan | None:
            check_allowed(types)
            try:
                plan = self._compile_for(cache, captured, types, known, True, part, signature)
                self.check_symbolic(cache, plan)
                return plan
            except Exception as e:  # an exact plan is always right, and raises what is the caller's to see
                reason = str(e) if isinstance(e, NotSymbolic) else f"{type(e).__name__}: {e}"
                self.exact_from_now_on(cache, None, reason)
                return None

        def make(types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], engines: bool) -> Plan:
            check_allowed(types)
            return self._compile_for(cache, captured, types, known, engines, part)

        is_open = not all(isinstance(v.type, TensorType) and v.type.is_static for v in captured.graph.inputs)
        kept = KeptShapes(captured.graph, self.options) if is_open and not part else None

        def tell_exact(reason: str) -> None:
            self.services.events.emit("shapes.exact", model=captured.graph.name or "graph", reason=reason)

        cache = PlanCache(
            captured.graph,
            make,
            by_value=[i for i in shape_inputs(captured.graph, static_inputs) if i not in changing],
            max_signatures=_MOST if self.options.source("cache_size") == "default" else self.options.cache_size,
            fits=self.fits_in_memory,
            engine_signatures=MAX_VARIANTS if part else None,
            max_by_value=MAX_ELEMENTS,
            to_host=self.services.place.to_host,
            varying=lambda: VaryingShapes(
                captured.graph,
                declared,
                lambda: 0 if varies and self._varies_at_once else self.symbolic_after,
                wanted_again=lambda: self.symbolic_again,
                on_end=tell_exact,
            ),
            at_once=declared is not None or (varies and self._varies_at_once),
            make_symbolic=make_symbolic,
            kept=kept,
        )
        return cache

    def fits_in_memory(self, plans: Iterable[Plan]) -> bool:
        """Whether the executables of these plans may be in memory together."""
        given = self.options.executable_bytes
        return self.bytes_of(plans) <= (physical_memory() // 4 if given is None else given)

    def bytes_of(self, plans: Iterable[Plan]) -> int:
        """An estimate of the memory that the executables of these plans take: code, and constants, which are held once
        where the engine shares them."""
        found, shared = 0, dict[int, int]()
        for plan in plans:
            for launch in (x for x in plan.launches if x.executable is not None):
                body = launch.function.body
                found += _BYTES_OF_A_NODE * len(body.nodes)
                name = getattr(getattr(launch, "record", None), "chosen", launch.engine)
                engine = next((e for e, _ in self.engines if e.name == engine_and_device(name)[0]), None)
                sizes = {id(v.data): v.data.nbytes for v in body.constants if v.data is not None}
                if engine is not None and engine.shares_weights:
                    shared |= sizes
                else:
                    found += sum(sizes.values())
        return found + sum(shared.values())

    def check_symbolic(self, cache: PlanCache, plan: Plan) -> None:
        """See to it that the exact plans of `cache` take over where an engine fails to compile a symbolic cluster, or
        gets it wrong. Raises NotSymbolic if one has failed already."""
        for launch in plan.launches:
            failed = launch.executable is None and launch.error is not None
            if failed and launch.function.is_symbolic:
                raise NotSymbolic(f"{launch.function.name} does not compile: {launch.error}")
        reference, of_plan = weakref.ref(cache), weakref.ref(plan)

        def give_up(reason: str) -> None:
            found, lost = reference(), of_plan()
            if found is not None:
                self.exact_from_now_on(found, lost, reason)

        for launch in plan.launches:
            if launch.function.is_symbolic:
                launch.on_loss = give_up

    def exact_from_now_on(self, cache: PlanCache, plan: Plan | None, reason: str) -> None:
        """Give up on symbolic plans of a graph, of which `plan` is one; with None, on new ones where there is none."""
        self.services.events.emit("shapes.exact", model=cache.graph.name or "graph", reason=reason)
        cache.abandon(plan, reason)

    @property
    def symbolic_after(self) -> int | None:
        """After how many exact signatures of a graph a symbolic one is worth a plan; None for never.

        The engine that is asked first decides, by what it takes. With "auto" any may, but an engine of static shapes
        may be the fastest for a graph that has but a few.
        """
        return self._symbolic_after(self.engines)

    @property
    def symbolic_again(self) -> int | None:
        """As `symbolic_after`, for a graph for which a symbolic plan was live in an earlier process."""
        return self.symbolic_after

    @property
    def _varies_at_once(self) -> bool:
        """Whether a graph that will get other sizes at its next calls has a symbolic plan from the first one on: where
        no engine of static shapes might be on a faster device."""
        return self.symbolic_after is not None and all(is_host(device) for _, device in self.engines)

    @property
    def _may_be_symbolic(self) -> bool:
        options = self.options
        return options.phase == "inference" and options.target is None and options.guard != "isolated"

    def _symbolic_after(self, engines: Chosen) -> int | None:
        if not self._may_be_symbolic:
            return None
        dynamic = [e.dynamic_dims != "none" for e, _ in engines]
        if self.services.auto and any(dynamic) and not all(dynamic):
            return STATIC_FIRST
        return 1 if dynamic and dynamic[0] else None

    def _compile_for(
        self,
        cache: PlanCache,
        captured: Captured,
        types: Sequence[ValueType | None],
        known: Mapping[int, np.ndarray],
        engines: bool,
        part: bool,
        symbolic: SymbolicSignature | None = None,
    ) -> Plan:
        """Compile the plan of a signature that is not in `cache`. Raises NotSymbolic."""
        made = self.compile(captured, types, known, engines=engines, owned=not part, symbolic=symbolic)
        cache.watch(made)
        return made

    # --- interface for modules ----------------------------------------------------------------------------------

    @property
    def has_processors_to_share(self) -> bool:
        """Whether a call may compute two parts of its batch at once: all engines use the processors of this process,
        of which it may use more than one."""
        on_host = all(is_host(device) for _, device in self.accelerated.engines)
        return on_host and self.options.threads != 1 and usable_processors() > 1

    @property
    def may_place_beside(self) -> bool:
        """Whether a shape that comes often may get an exact plan beside the symbolic one (`place_beside`)."""
        return False

    def place_beside(self, cache: PlanCache, captured: Captured, arrays: Sequence[np.ndarray]) -> None:
        """Make an exact plan for the signature of these arguments in the background. It answers in the place of the
        symbolic one if an engine of static shapes was the fastest."""

    @property
    def begin(self) -> Callable[[Plannable], object] | None:
        """What prepares a plan on the process's planning thread; None where calls compile what they need."""
        return None

    def begin_builds(self, made: Planned, arrays: Sequence[Any]) -> None:
        """Begin to build what is built beside the host. arrays: of a call, of which ranges of values are taken."""

    @property
    def accelerated(self) -> Pipeline:
        """The pipeline with engines: this one; a baseline pipeline creates it, and raises the errors of that."""
        return self

    @property
    def engine_names(self) -> str:
        """The selected engines, human-readable; does not import them."""
        return ", ".join(e.name for e, _ in self.engines) or HOST

    def wait(self, timeout: float | None = None) -> bool:
        """See `GuardedModule.wait`."""
        guard = self.services.guard
        return guard is None or guard.wait(timeout)

    def report(self) -> GuardReport:
        """See `GuardedModule.report`."""
        from xrt_core.guard.record import GuardReport

        guard = self.services.guard
        return GuardReport.of(() if guard is None else guard.known(), time.time() - self._made, ())

    def close(self) -> None:
        """See `GuardedModule.close`."""
        if self.services.guard is not None:
            self.services.guard.close()

    # --- passes -------------------------------------------------------------------------------------------------

    def _verify(self, graph: Graph, stage: str) -> None:
        if self.options.verify:
            from xrt_core.ir.verifier import verify

            verify(graph, stage)

    def _run_passes(self, stage: Stage, graph: Graph, context: PassContext, passes: Sequence[RegisteredPass]) -> Graph:
        trace = self.services.trace.begin(graph, stage) if self.services.trace is not None else None
        for p in passes:
            start = time.perf_counter()
            new = p.run(graph, context) if p.origin == "core" else self._run_foreign(p, graph, context)
            if trace is not None:
                trace(graph, new, p.name, p.owner, time.perf_counter() - start)
            if new is not graph:
                self._verify(new, p.name)
            graph = new
        return graph

    def _run_foreign(self, p: RegisteredPass, graph: Graph, context: PassContext) -> Graph:
        """Run a user or plugin pass and verify its graph. Raises PassError if the pass fails."""
        from xrt_core.ir.verifier import verify

        try:
            new = p.run(graph, context)
            if new is not graph:
                new = typed(new)
                verify(new, p.name)
            return new
        except Exception as e:
            message = f"pass {p.name!r} of {p.owner} failed on graph {graph.name!r}: {type(e).__name__}: {e}"
            if p.origin == "user":
                raise PassError(f"{message}; mend it, or take it out with xrt.unregister_pass({p.name!r})") from e
            self.services.events.emit(
                "pass.failed", level=logging.WARNING, name_of_pass=p.name, owner=p.owner, error=message
            )
            return graph


def _explanation(
    before: Sequence[Node],
    report: Callable[[], PartitionReport],
    outlined: Graph,
    known: Mapping[int, np.ndarray],
    optimised: Optimised,
    sizes: Mapping[str, int],
) -> Explanation:
    """Explain how the nodes `before` were partitioned into `outlined`. sizes: of symbols, for the estimates."""
    functions = [f for n in outlined.nodes if isinstance(f := n.attributes.get("function"), Function)]
    if sizes:
        made = {v for n in before for v in n.outputs if v is not None}
        read = dict.fromkeys(v for n in before for v in n.uses() if v.data is None and v not in made)
        before = graph_at(Graph(read, (), before, opsets=outlined.opsets), sizes).nodes
        functions = [function_at(f, sizes) for f in functions]
    return Explanation(
        outlined.name,
        _signature(outlined, known),
        report(),
        sum(map(flops, before)),
        {f.name: sum(map(flops, f.body.nodes)) for f in functions},
        precision=optimised.precision,
        sharding=optimised.sharding,
        partitioned=outlined,
    )


def _signature(graph: Graph, known: Mapping[int, np.ndarray]) -> dict[str, str]:
    return {
        v.name or f"input {i}": f"{v.type or '?'}{_shown(known[i]) if i in known else ''}"
        for i, v in enumerate(graph.inputs)
    }


def _shown(data: np.ndarray) -> str:
    return f" = {np.array2string(data, separator=', ', threshold=8)}" if data.size <= 64 else " (constant)"
