"""Tiered compilation: a new signature runs on the host until its plan with engines is compiled in the background."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from msgspec import Struct

from xrt_core.cache.disk import DiskCache, open_cache
from xrt_core.cache.model_file import ModelFile
from xrt_core.compiler.pipeline import STATIC_FIRST, NotSymbolic, Pipeline
from xrt_core.compiler.services import Chosen, Services, build_services
from xrt_core.compiler.stages import Captured, Planned
from xrt_core.errors import EngineUnavailableError
from xrt_core.events import EventLog
from xrt_core.guard.background import Answered, BackgroundCompiler, Plannable, copies
from xrt_core.guard.timeouts import in_background, native_call
from xrt_core.host.blas_threads import fewer_on_busy_machine
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Value, engine_and_device
from xrt_core.ir.symbols import SymbolicSignature
from xrt_core.ir.types import ValueType
from xrt_core.options import AUTO, Options
from xrt_core.options.guard_settings import GuardSettings, retry_time
from xrt_core.passes.partitioning import is_converter, names_a_device, names_an_engine
from xrt_core.passes.shape_specialization import is_settled
from xrt_core.runtime.arrays import Range, ranges_of
from xrt_core.runtime.plan import HOST, Plan
from xrt_core.runtime.plan_cache import PlanCache

if TYPE_CHECKING:
    from xrt_core.guard.manager import GuardManager
    from xrt_core.guard.record import GuardReport
    from xrt_core.runtime.launch import Launch
    from xrt_core.verify.verdict import Piece

_BUSY: Final = 1.0  # seconds until a call retries a tier-up whose lock another thread holds


class Choose(Protocol):
    """Selects engines. without: names of those that are excluded. found_usable: see `EngineManager.ready`."""

    def __call__(self, without: Collection[str] = (), found_usable: Collection[str] = ()) -> Chosen: ...


def pipeline_for(
    options: Options,
    choose: Choose,
    events: EventLog,
    saved: ModelFile | None = None,
    without: Collection[str] = (),
) -> Pipeline:
    """Return the pipeline of a module: tiered with an asynchronous guard, else one that compiles before the first
    result.

    choose: selects the engines. It is called here if it may raise, else after the first call.
    saved: the model file the module was loaded from; its executables need no tier-up. without: names of passes that are
    left out, as far as there is a tier-up.

    Raises OptionError, and the errors of `choose`.
    """
    settings = GuardSettings.of(options, saved is not None and not saved.has_verdicts)
    waits = settings is None or not settings.asynchronous or saved is not None or options.target is not None
    disk = open_cache(options.cache, options.cache_dir, options.cache_bytes)
    if settings is not None and settings.isolated:
        _check_in_worker(options, settings, disk, events)
    if settings is None or waits or options.engine == (HOST,):
        crashing: Collection[str] = ()
        if settings is not None and saved is None and _any_engine_will_do(options):
            from xrt_core.guard.capability import probed

            crashing = probed(settings, disk, events).failed
        return Pipeline(build_services(options, choose(crashing), events, saved))
    chosen = None if _any_engine_will_do(options) else choose(())
    if chosen is not None and not chosen:
        return Pipeline(build_services(options, (), events))
    background = BackgroundCompiler(settings, ", ".join(options.engine or (AUTO,)), disk, events)
    host = build_services(options, (), events, host_only=True, without=without)

    def make() -> TieredPipeline:
        engines = choose(*background.probed()) if chosen is None else chosen
        services = build_services(options, engines, events, registry=host.registry, without=without)
        return TieredPipeline(services, background)

    pipeline = BaselinePipeline(host, background, make, chosen or ())
    if options.engine_options or any(rule.engine != HOST for rule in host.rules):
        _ = pipeline.accelerated  # raises if an engine cannot be used
    return pipeline


def _check_in_worker(options: Options, settings: GuardSettings, disk: DiskCache | None, events: EventLog) -> None:
    """Raises EngineUnavailableError where a named engine ends or hangs the worker in which it is imported and probed:
    one that is to be isolated must not do so here."""
    named = [n for n in options.engine or () if n not in (HOST, AUTO)]
    if not named:
        return
    from xrt_core.guard.capability import probed

    failed = probed(settings, disk, events, named).failed
    for name in probed(settings, disk, events, failed).failed if failed else ():  # not a worker that others killed
        raise EngineUnavailableError(
            f"engine {name!r} ({options.source('engine')}) ended or hung the process in which it was imported and "
            "probed; leave it out, and tell its authors"
        )


def _any_engine_will_do(options: Options) -> bool:
    """True if engine selection cannot fail and may therefore be deferred."""
    switched = any(on for _, on in options.switches)
    return options.engine in (None, (AUTO,)) and options.device is None and not (switched or options.engine_options)


class FirstCall(Struct, frozen=True):
    """The first call of a plan, without results where it was only prepared for, and what the plan was made for, as of
    `Pipeline.compile`."""

    answered: Answered
    captured: Captured
    types: Sequence[ValueType | None]
    known: Mapping[int, np.ndarray]
    symbolic: SymbolicSignature | None


class TieredPipeline(Pipeline):
    """A pipeline whose new signatures run a baseline plan until the plan with engines is ready."""

    def __init__(self, services: Services, background: BackgroundCompiler) -> None:
        super().__init__(services)
        self.background = background
        self.on_first_call: Callable[[FirstCall], None] | None = None
        """Told of the first call of each plan of a graph whose calls are compared, which the host answers, or which was
        prepared before any."""

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
        if not engines:
            return super()._compile_for(cache, captured, types, known, engines, part)
        job = TierUpJob(self, captured, types, known, not part, cache, symbolic)
        # with marks, placements or a mesh it is compiled synchronously: what cannot be applied raises in the call
        said = self.options.mesh is not None or names_an_engine(captured.graph) or names_a_device(captured.graph)
        if in_background() or said:
            return job.compile(self.accelerated)
        start = time.perf_counter()
        plan = self.compile(captured, types, known, engines=False, owned=not part, kind=BaselinePlan, symbolic=symbolic)
        assert isinstance(plan, BaselinePlan)
        rehearse = self.background.settings.real_inputs or _has_parts(plan.partitioned.graph, symbolic is not None)
        plan.attach(job, rehearse)
        self.services.events.emit("host_first", seconds=time.perf_counter() - start, model=plan.name)
        return plan

    @property
    def compares_first_calls(self) -> bool:
        """See `Pipeline.compares_first_calls`."""
        return self.on_first_call is not None

    @property
    def has_chosen(self) -> bool:
        """Whether the engines are chosen, so that a background compilation need not import those that might be."""
        return True

    @property
    def begin(self) -> Callable[[Plannable], object] | None:
        """See `Pipeline.begin`."""
        return None if self.options.forbid_compilation else partial(self.background.begin, inputs=None)

    def begin_builds(self, made: Planned, arrays: Sequence[Any]) -> None:
        """See `Pipeline.begin_builds`."""
        guard = self.accelerated.services.guard
        if guard is not None:
            ranges = ranges_of(arrays) if self.background.settings.verify else ()
            guard.begin_all(made.launches, _ranges_of_clusters(made.partitioned.graph, ranges))

    @property
    def may_place_beside(self) -> bool:
        """See `Pipeline.may_place_beside`: where engines of static shapes compete with others."""
        return self.symbolic_after == STATIC_FIRST and not self.options.forbid_compilation

    def place_beside(self, cache: PlanCache, captured: Captured, arrays: Sequence[np.ndarray]) -> None:
        """See `Pipeline.place_beside`."""

        def begin(types: Sequence[ValueType | None], known: Mapping[int, np.ndarray], key: Hashable) -> ExactBeside:
            made = ExactBeside(self, captured, types, known, cache, key)
            self.background.begin(made, None)
            return made

        cache.begin_beside(arrays, begin)

    @property
    def _guard(self) -> GuardManager | None:
        """The guard of the engines; None if it is off or not created yet."""
        return self.services.guard

    @property
    def is_compiling(self) -> bool:
        """Whether plans or executables are being made; unlike `wait`, it hurries nothing."""
        return self.background.is_pending or (self._guard is not None and self._guard.is_building)

    def wait(self, timeout: float | None = None) -> bool:
        """See `GuardedModule.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(deadline - time.monotonic(), 0.0)

        while True:
            if not self.background.wait(left()) or not (self._guard is None or self._guard.wait(left())):
                return False
            if not self.background.is_pending:  # what was built may want more, such as the check of a bucket
                return True

    def report(self) -> GuardReport:
        """See `GuardedModule.report`."""
        from xrt_core.guard.record import GuardReport

        known = () if self._guard is None else self._guard.known()
        return GuardReport.of(known, time.time() - self._made, self.background.rows())

    def close(self) -> None:
        """See `GuardedModule.close`."""
        self.background.close()
        if self._guard is not None:
            self._guard.close()


class BaselinePipeline(TieredPipeline):
    """The host-only pipeline of a module; it creates the pipeline with engines once, on first use. chosen: the engines
    of that, as far as they are chosen already."""

    def __init__(
        self, services: Services, background: BackgroundCompiler, make: Callable[[], TieredPipeline], chosen: Chosen
    ) -> None:
        super().__init__(services, background)
        self._make = make
        self._chosen = chosen
        self._behind: TieredPipeline | None = None
        self._lock = threading.Lock()

    @property
    def accelerated(self) -> Pipeline:
        """The pipeline with engines, created on first access. Raises the errors of that; the next access retries."""
        with self._lock:
            if self._behind is None:
                self._behind = self._make()
                if self.background.closed and self._behind.services.guard is not None:  # closed concurrently
                    self._behind.services.guard.close()
            return self._behind

    @property
    def has_chosen(self) -> bool:
        """Whether the engines are chosen, so that a background compilation need not import those that might be."""
        return bool(self._chosen) or self._behind is not None

    @property
    def engine_names(self) -> str:
        """The selected engines, human-readable; does not import them."""
        if self._behind is None:
            return f"{', '.join(self.options.engine or (AUTO,))} (not probed yet)"
        return self._behind.engine_names

    @property
    def _guard(self) -> GuardManager | None:
        return None if self._behind is None else self._behind.services.guard

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
        # subgraphs of a baseline plan stay on the host: the plan with engines has its own
        return super()._compile_for(cache, captured, types, known, engines and not part, part, symbolic)

    @property
    def symbolic_after(self) -> int | None:
        """See `Pipeline.symbolic_after`; None while the engines are not chosen, for which no call waits."""
        return self._symbolic_after(self._chosen) if self._behind is None else self._behind.symbolic_after

    @property
    def symbolic_again(self) -> int | None:
        """See `Pipeline.symbolic_again`; it does not wait for the choice of engines either."""
        return self.symbolic_after if self.has_chosen or not self._may_be_symbolic else STATIC_FIRST


class BaselinePlan(Planned):
    """A host-only plan, and the tier-up job that replaces it by the plan with engines.

    The end of its first call starts that job; if the job fails, this plan stays in use and a later call retries.
    calls: the number of calls it has run. final: the plan that replaced it; itself if no engine can be used.
    """

    __slots__ = (
        "_answered_call", "_attempts", "_due", "_job", "_lock", "_ranges", "_rehearse", "_rehearsed", "_started",
        "calls", "final", "is_dropped",
    )  # fmt: skip

    def __init__(self, *planned: Any) -> None:
        super().__init__(*planned)
        self._lock = threading.RLock()
        self._started = threading.Lock()  # held while a job started by a call is running
        self._due = 0.0  # `time.monotonic` seconds from which a call starts the job
        self._attempts = 0
        self._rehearse = self._rehearsed = False
        self._job: TierUpJob | None = None
        self._ranges: tuple[Range | None, ...] = ()
        self._answered_call: Answered | None = None
        self.calls = 0
        self.final: Planned | None = None
        self.is_dropped = False
        self.answer_by(self._answer)

    @property
    def is_unbuilt(self) -> bool:
        """Whether an executable is not there (yet), of the plan that replaces it."""
        return self.final is None or (self.final is not self and self.final.is_unbuilt)

    @property
    def is_unplanned(self) -> bool:
        """See `Plan.is_unplanned`."""
        return self.final is None

    def release(self, reason: str) -> None:
        """See `Plan.release`; its job ends where it finds that the plan is not there any more."""
        super().release(reason)
        self.is_dropped = True
        if self.final is not None and self.final is not self:
            self.final.release(reason)

    def attach(self, job: TierUpJob, rehearse: bool) -> None:
        """Attach the tier-up job. rehearse: keep a copy of the first call's inputs for a warm-up run."""
        self._job, self._rehearse = job, rehearse

    def run_timed(self, arrays: Sequence[Any]) -> Any:
        """See `Plan.run_timed`."""
        found = super().run_timed(arrays)
        self._answered(arrays)
        return found

    def finish(self, arrays: Sequence[Any] = ()) -> Planned:
        """Return the plan with engines; compile it in this thread if necessary. Raises the errors of compilation.

        arrays: of a call that it is prepared for.
        """
        with self._lock:
            if self.final is None and self._job is not None:
                kept = self._copies_of_first(arrays)
                self._swap(self._job, self._job.make())
                if kept:
                    self._job.tell(self._job.pipeline.background.keep(Answered(kept, [], 0.0)))
            return self.final or self

    def prepare(self, inputs: Sequence[Any] | None) -> None:
        """Compile the plan with engines, run it once on `inputs` as a warm-up, start the builds of its clusters, and
        replace this plan by it."""
        with self._lock:
            job = self._job
            if job is None or (self.final is None and not job.cache.holds(self)):
                return  # this plan was evicted concurrently
            made = job.make() if self.final is None else self.final
            if made is not None and made is not self and (self.final is not None or job.cache.holds(self)):
                self._rehearsed = job.begin_builds(made, inputs, self._ranges)
            if self.final is None:
                self._swap(job, made)

    def postpone(self, first: float) -> None:
        """Schedule a retry by a later call: after `first` seconds, longer after each failure (`retry_time`)."""
        self._answered_call = None
        self._attempts += 1
        self._due = retry_time(first, self._attempts)
        self._started.release()

    def _swap(self, job: TierUpJob, made: Planned | None) -> None:
        self._due = float("inf")
        if made is None:
            self.final, self._answered_call = self, None
            self.answer_by(self._run)
            if job.symbolic is not None:  # other calls get exact plans
                job.pipeline.exact_from_now_on(job.cache, self, "engines take more of the graph by exact shapes")
        else:
            job.count(made, self.calls - self._rehearsed)
            self.final = made  # before the swap: a thread that still holds this plan must find its successor
            self._hand_over()
        job.cache.replace(self, self.final)

    def _answer(self, arrays: Sequence[Any]) -> Sequence[Any]:
        job = self._job
        if job is not None and job.symbolic is not None and job.pipeline.has_chosen:  # else it imports the engines
            self.begin(arrays)
        kept = self._copies_of_first(arrays)
        start = time.perf_counter()
        with fewer_on_busy_machine():
            results = self._run(arrays)
        seconds = time.perf_counter() - start
        call: Answered | None = None
        if kept is not None and job is not None:
            background = job.pipeline.background
            got = copies(results, background.room - sum(x.nbytes for x in kept))
            if got is not None:
                call = self._answered_call = background.keep(Answered(kept, got, seconds))
                self._hand_over()
        self._answered(arrays)
        if call is not None and job is not None:
            job.tell(call)
        return results

    def _copies_of_first(self, arrays: Sequence[Any]) -> list[np.ndarray] | None:
        """Copies of the inputs of the first call, where its results may serve for the first comparison."""
        if self.calls or self._job is None or self.final is self:
            return None
        kept = copies(arrays, self._job.pipeline.background.room)
        return None if kept is None or not all(isinstance(x, np.ndarray) for x in kept) else kept

    def _hand_over(self) -> None:
        """Give the call that was kept to the launch that is the whole graph, once both are there."""
        known, made = self._answered_call, self.final
        if known is None or made is None or made is self:
            return
        self._answered_call = None
        _hand_over(known, made)

    def _answered(self, arrays: Sequence[Any]) -> None:
        self.calls += 1
        self.begin(arrays)

    def begin(self, arrays: Sequence[Any]) -> None:
        """Start the tier-up job in the background, unless it is running, done, or not due again yet. arrays: of a call,
        which need not have been run."""
        job = self._job
        if time.monotonic() >= self._due and job is not None and self._started.acquire(blocking=False):
            if not self._lock.acquire(blocking=False):  # another thread is compiling the plan, or hangs in it
                self._due = time.monotonic() + _BUSY
                self._started.release()
                return
            self._lock.release()
            self._due = float("inf")
            if job.pipeline.background.settings.verify:
                self._ranges = ranges_of(arrays)
            job.pipeline.background.begin(self, copies(arrays) if self._rehearse else None)


class ExactBeside:
    """Makes the exact plan of a signature that a symbolic plan serves. is_dropped: never, as the calls go on."""

    is_dropped = False

    def __init__(
        self,
        pipeline: TieredPipeline,
        captured: Captured,
        types: Sequence[ValueType | None],
        known: Mapping[int, np.ndarray],
        cache: PlanCache,
        key: Hashable,
    ) -> None:
        self.name = captured.graph.name or "graph"
        self._pipeline, self._captured, self._types, self._known = pipeline, captured, types, known
        self._cache, self._key = weakref.ref(cache), key

    def prepare(self, inputs: Sequence[Any] | None) -> None:
        """Make the plan, and start the builds of its clusters."""
        pipeline, cache = self._pipeline.accelerated, self._cache()
        guard = pipeline.services.guard
        if cache is None or guard is None:
            return
        with native_call():
            made = pipeline.compile(self._captured, self._types, self._known)
        static = {e.name for e, _ in pipeline.engines if e.dynamic_dims == "none"}
        events = self._pipeline.services.events

        def is_better() -> bool:
            engines = [p.engine for x in made.launches for p in _pieces(x)]
            found = bool(static.intersection(engine_and_device(e)[0] for e in engines))
            events.emit("shapes.beside", model=self.name, engines=", ".join(dict.fromkeys(engines)), is_used=found)
            return found

        cache.put_beside(self._key, made, is_better)
        guard.begin_all(made.launches, {})

    def postpone(self, first: float) -> None:
        """It is not tried again: the symbolic plan serves."""


def _pieces(launch: Launch) -> Sequence[Piece]:
    """What runs the cluster of a launch, as it was verified."""
    outcome = getattr(getattr(launch, "record", None), "outcome", None)
    return () if outcome is None else outcome.pieces


class TierUpJob(Struct, frozen=True):
    """Compiles the plan with engines of one signature. cache: holds the baseline plan. owned: see `make_plan`.
    symbolic: see `Pipeline.compile`."""

    pipeline: TieredPipeline
    captured: Captured
    types: Sequence[ValueType | None]
    known: Mapping[int, np.ndarray]
    owned: bool
    cache: PlanCache
    symbolic: SymbolicSignature | None = None

    def make(self) -> Planned | None:
        """Create the pipeline if necessary and compile the plan with engines; None if no engine can be used, or none
        should with these symbols."""
        with native_call() if in_background() else contextlib.nullcontext():
            pipeline = self.pipeline.accelerated
            try:
                return self.compile(pipeline) if pipeline.engines else None
            except NotSymbolic as e:
                self.pipeline.services.events.emit("shapes.exact", reason=str(e))
                return None

    def compile(self, pipeline: Pipeline) -> Planned:
        """Compile the plan of the signature with a pipeline that has engines."""
        with native_call() if in_background() else contextlib.nullcontext():
            made = pipeline.compile(self.captured, self.types, self.known, owned=self.owned, symbolic=self.symbolic)
            self.cache.watch(made)
            if self.symbolic is not None:
                pipeline.check_symbolic(self.cache, made)
            return made

    def tell(self, answered: Answered) -> None:
        """Tell of the first call of the host's plan, if somebody asked for that."""
        if self.pipeline.on_first_call is not None and self.captured.given is not None:
            self.pipeline.on_first_call(FirstCall(answered, self.captured, self.types, self.known, self.symbolic))

    def begin_builds(self, made: Planned, inputs: Sequence[Any] | None, ranges: Sequence[Range | None]) -> bool:
        """Start the builds of a plan's clusters. ranges: of the inputs of a call. Returns whether the warm-up run on
        `inputs`, which plans the subgraphs, succeeded."""
        rehearsed = False
        if inputs is not None:
            try:
                made.run(inputs)
                rehearsed = True
            except Exception as e:  # a call with the same inputs raises it to its caller
                self.pipeline.services.events.emit("guard.no_rehearsal", reason=f"{type(e).__name__}: {e}")
        self._guard.begin_all(made.launches, _ranges_of_clusters(made.partitioned.graph, ranges))
        return rehearsed

    def count(self, made: Planned, calls: int) -> None:
        """Add calls that ran on the host to the counters of the plan's launches."""
        self._guard.count(made.launches, calls)

    @property
    def _guard(self) -> GuardManager:
        guard = self.pipeline.accelerated.services.guard
        assert guard is not None
        return guard


def _ranges_of_clusters(graph: Graph, ranges: Sequence[Range | None]) -> dict[Function, tuple[Range | None, ...]]:
    """For each cluster that reads inputs of the graph their ranges; None for what the graph computes."""
    known: dict[Value | None, Range | None] = dict(zip(graph.inputs, ranges, strict=False))
    found = {}
    for n in graph.nodes:
        function = n.attributes.get("function")
        if isinstance(function, Function):
            found[function] = tuple(known.get(v) for v in n.inputs)
        elif is_converter(n):
            known[n.outputs[0]] = known.get(n.inputs[0])
    return {f: r for f, r in found.items() if any(r)}


def _hand_over(known: Answered, made: Planned) -> None:
    """Give a call of the whole graph to the launch that computes all of it, if one does, on the CPU."""
    from xrt_core.guard.launch import GuardedLaunch

    nodes = [n for n in made.partitioned.graph.nodes if not is_converter(n)]
    if len(nodes) != 1 or len(made.launches) != 1 or not isinstance(launch := made.launches[0], GuardedLaunch):
        return
    converted = {n.outputs[0]: n.inputs[0] for n in made.partitioned.graph.nodes if is_converter(n)}

    def places(read: Sequence[Value | None], given: Sequence[Value]) -> list[int]:
        where = {converted.get(v, v): i for i, v in enumerate(given)}
        return [where[x] for v in read if (x := v and converted.get(v, v)) in where]

    inputs = places(nodes[0].inputs, made.partitioned.graph.inputs)
    results = places(nodes[0].outputs, made.partitioned.graph.outputs)
    is_whole = len(inputs) == len(nodes[0].inputs) and len(results) == len(nodes[0].outputs)
    is_wanted = launch.is_pending or launch.executable is not None
    if is_whole and is_wanted and launch.synchronize is None and not launch.function.aliases:
        given, got = [known.inputs[i] for i in inputs], [known.results[i] for i in results]
        launch.answered = Answered(given, got, known.seconds)


def _has_parts(graph: Graph, symbolic: bool) -> bool:
    """Return whether a graph has subgraphs planned at run time: control-flow bodies, regions with dynamic shapes.
    symbolic: dimensions that are expressions are known."""
    made = (v for n in graph.nodes for v in n.outputs if v is not None)
    return any(n.subgraphs for n in graph.nodes) or not all(is_settled(v.type, symbolic) for v in made)
