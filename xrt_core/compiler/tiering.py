"""Tiered compilation: the host answers a new signature at once, and its plan with engines is made in the background."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.cache.disk import open_cache
from xrt_core.cache.model_file import ModelFile
from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.services import Chosen, Services, build_services
from xrt_core.compiler.stages import Captured, Planned
from xrt_core.errors import XRTError
from xrt_core.events import EventLog
from xrt_core.guard.background import MOST_INPUT_BYTES, BackgroundCompiler, in_background, later
from xrt_core.guard.policy import GuardSettings
from xrt_core.guard.timeouts import native_call
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import TensorType, ValueType
from xrt_core.options import AUTO, Options
from xrt_core.passes.partitioning import names_an_engine
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.plan import HOST, Plan
from xrt_core.runtime.plan_cache import PlanCache

if TYPE_CHECKING:
    from xrt_core.guard.manager import GuardManager
    from xrt_core.guard.report import GuardReport

_BUSY: Final = 1.0  # seconds until a call retries a tier-up that another thread is at


def pipeline_for(
    options: Options, choose: Callable[[Collection[str]], Chosen], events: EventLog, saved: ModelFile | None = None
) -> Pipeline:
    """The pipeline of a module: tiered under an asynchronous guard, else one that compiles before it answers.

    choose: gives the engines, less those named. It is called now where it may raise, and otherwise when the first
    answer has been given. saved: the file that the model was loaded from; then everything is ready at once.

    Raises what `choose` raises, and OptionError.
    """
    settings = GuardSettings.of(options)
    waits = settings is None or not settings.asynchronous or saved is not None or options.target is not None
    if settings is None or waits or options.engine == (HOST,):
        return Pipeline(build_services(options, choose(()), events, saved))
    chosen = None if _any_engine_will_do(options) else choose(())
    if chosen is not None and not chosen:
        return Pipeline(build_services(options, (), events))
    disk = open_cache(options.cache, options.cache_dir, options.cache_bytes)
    background = BackgroundCompiler(settings, ", ".join(options.engine or (AUTO,)), disk, events)
    host = build_services(options, (), events, host_only=True)

    def make() -> TieredPipeline:
        engines = choose(background.harmful()) if chosen is None else chosen
        return TieredPipeline(build_services(options, engines, events, registry=host.registry), background)

    pipeline = BaselinePipeline(host, background, make)
    if options.engine_options or any(rule.engine != HOST for rule in host.rules):
        _ = pipeline.accelerated  # it says what is wrong with them
    return pipeline


def _any_engine_will_do(options: Options) -> bool:
    """True if engine selection cannot fail and may therefore be deferred."""
    switched = options.use_xla_jit or options.use_tensorrt
    return options.engine in (None, (AUTO,)) and options.device is None and not (switched or options.engine_options)


class TieredPipeline(Pipeline):
    """A pipeline whose new signatures are answered by the host's plan until the one with engines is ready."""

    def __init__(self, services: Services, background: BackgroundCompiler) -> None:
        super().__init__(services)
        self.background = background

    def _compile_for(
        self,
        cache: PlanCache,
        captured: Captured,
        types: Sequence[ValueType | None],
        known: Mapping[int, np.ndarray],
        engines: bool,
        part: bool,
    ) -> Plan:
        if not engines:
            return super()._compile_for(cache, captured, types, known, engines, part)
        job = TierUpJob(self, captured, types, known, not part, cache)
        # with a mark the caller waits: one that cannot be obeyed is an error for the caller
        if in_background() or names_an_engine(captured.graph):
            return job.compile(self.accelerated)
        start = time.perf_counter()
        plan = self.compile(captured, types, known, engines=False, owned=not part, kind=BaselinePlan)
        assert isinstance(plan, BaselinePlan)
        name = captured.graph.name or "graph"
        rehearse = self.background.settings.real_inputs or _has_parts(plan.explain().partitioned)
        plan.attach(job, name, rehearse)
        self.services.events.emit("host_first", seconds=time.perf_counter() - start, model=name)
        return plan

    @property
    def _guard(self) -> GuardManager | None:
        """The guard of the engines, as far as there is one by now."""
        return self.services.guard

    def wait(self, timeout: float | None = None) -> bool:
        """See `GuardedModule.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.background.wait(timeout):
            return False
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return self._guard is None or self._guard.wait(left)

    def report(self) -> GuardReport:
        """See `GuardedModule.report`."""
        from xrt_core.guard.report import GuardReport

        known = () if self._guard is None else self._guard.known()
        return GuardReport.of(known, time.time() - self._made, self.background.rows())

    def close(self) -> None:
        """See `GuardedModule.close`."""
        self.background.close()
        if self._guard is not None:
            self._guard.close()


class BaselinePipeline(TieredPipeline):
    """The host's pipeline of a module, with the one that has engines behind it, made once, when first needed."""

    def __init__(
        self, services: Services, background: BackgroundCompiler, make: Callable[[], TieredPipeline]
    ) -> None:
        super().__init__(services, background)
        self._make = make
        self._behind: TieredPipeline | None = None
        self._lock = threading.Lock()

    @property
    def accelerated(self) -> Pipeline:
        """The pipeline with engines. Raises what making it raises; the next one who asks has it tried again."""
        with self._lock:
            if self._behind is None:
                self._behind = self._make()
                if self.background.closed and self._behind.services.guard is not None:  # closed meanwhile
                    self._behind.services.guard.close()
            return self._behind

    @property
    def engine_names(self) -> str:
        """The engines that take part, human-readable; nothing is imported to say so."""
        if self._behind is None:
            return f"{', '.join(self.options.engine or (AUTO,))} (not asked yet)"
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
    ) -> Plan:
        # parts of the host's plan stay on the host: the plan with engines has its own
        return super()._compile_for(cache, captured, types, known, engines and not part, part)


class BaselinePlan(Planned):
    """A plan without engines, and the job that puts the one with engines in its place.

    The first call that it has answered starts that job; a failure leaves this plan where it is, and is tried again
    later. name: of the graph, human-readable. calls: how many it has answered. final: the plan that took its place,
    itself where no engine can be used.
    """

    __slots__ = (
        "__weakref__", "_attempts", "_due", "_job", "_lock", "_rehearse", "_rehearsed", "_started", "calls", "final",
        "name",
    )  # fmt: skip

    def __init__(self, *planned: Any) -> None:
        super().__init__(*planned)
        self._lock = threading.RLock()
        self._started = threading.Lock()  # held while the job that a call started is under way
        self._due = 0.0  # `time.monotonic` seconds from which a call starts the job
        self._attempts = 0
        self._rehearse = self._rehearsed = False
        self._job: TierUpJob | None = None
        self.calls = 0
        self.final: Planned | None = None
        self.name = ""
        self.run = self._answer

    def attach(self, job: TierUpJob, name: str, rehearse: bool) -> None:
        """Attach the tier-up job. rehearse: keep a copy of the first call's inputs for a warm-up run."""
        self._job, self.name, self._rehearse = job, name, rehearse

    def run_timed(self, arrays: Sequence[Any]) -> Any:
        """See `Plan.run_timed`."""
        found = super().run_timed(arrays)
        self._answered(arrays)
        return found

    def finish(self) -> Planned:
        """The plan with engines, made here and now unless it is there. Raises what making it raises."""
        with self._lock:
            if self.final is None and self._job is not None:
                self._swap(self._job, self._job.make())
            return self.final or self

    def prepare(self, inputs: Sequence[Any] | None) -> None:
        """Make the plan with engines, rehearse it on `inputs`, begin its clusters' builds, and swap it in."""
        with self._lock:
            job = self._job
            if job is None or (self.final is None and not job.cache.holds(self)):
                return  # it was evicted meanwhile
            made = job.make() if self.final is None else self.final
            if made is not None and made is not self:
                self._rehearsed = job.begin_builds(made, inputs)
            if self.final is None:
                self._swap(job, made)

    def postpone(self, first: float) -> None:
        """Have a later call try again, after `first` seconds at the first time (see `background.later`)."""
        self._attempts += 1
        self._due = later(first, self._attempts)
        self._started.release()

    def _swap(self, job: TierUpJob, made: Planned | None) -> None:
        self._due = float("inf")
        if made is None:
            self.final, self.run = self, self._run
        else:
            job.count(made, self.calls - self._rehearsed)
            self.final = made  # before the swap: who still finds this plan sees that it is not the last word
        job.cache.replace(self, self.final)

    def _answer(self, arrays: Sequence[Any]) -> Sequence[Any]:
        results = self._run(arrays)
        self._answered(arrays)
        return results

    def _answered(self, arrays: Sequence[Any]) -> None:
        self.calls += 1
        job = self._job
        if time.monotonic() >= self._due and job is not None and self._started.acquire(blocking=False):
            if not self._lock.acquire(blocking=False):  # another thread makes the plan just now, or hangs in it
                self._due = time.monotonic() + _BUSY
                self._started.release()
                return
            self._lock.release()
            self._due = float("inf")
            job.pipeline.background.begin(self, _copies(arrays) if self._rehearse else None)


@dataclass(frozen=True, slots=True)
class TierUpJob:
    """From a signature to its plan with engines. cache: that holds the baseline plan. owned: see `make_plan`."""

    pipeline: TieredPipeline
    captured: Captured
    types: Sequence[ValueType | None]
    known: Mapping[int, np.ndarray]
    owned: bool
    cache: PlanCache

    def make(self) -> Planned | None:
        """The plan with engines; None where none can be used."""
        with native_call() if in_background() else contextlib.nullcontext():
            pipeline = self.pipeline.accelerated
            return self.compile(pipeline) if pipeline.engines else None

    def compile(self, pipeline: Pipeline) -> Planned:
        """The plan of the signature by a pipeline that has engines."""
        with native_call() if in_background() else contextlib.nullcontext():
            return pipeline.compile(self.captured, self.types, self.known, owned=self.owned)

    def begin_builds(self, made: Planned, inputs: Sequence[Any] | None) -> bool:
        """Begin the builds of a plan's clusters. Whether it could be rehearsed on the inputs, which plans its parts."""
        rehearsed = False
        if inputs is not None:
            try:
                made.run(inputs)
                rehearsed = True
            except Exception as e:  # a call with such inputs raises it to its caller
                self.pipeline.services.events.emit("guard.no_rehearsal", reason=f"{type(e).__name__}: {e}")
        self._guard.begin_all(made.launches)
        return rehearsed

    def count(self, made: Planned, calls: int) -> None:
        """Count calls that the host has answered in place of the launches of a plan."""
        self._guard.count(made.launches, calls)

    @property
    def _guard(self) -> GuardManager:
        guard = self.pipeline.accelerated.services.guard
        assert guard is not None
        return guard


def _has_parts(graph: Graph | None) -> bool:
    """Whether parts of a graph are planned when it runs: bodies of control flow, and what waits for shapes."""
    nodes = () if graph is None else graph.nodes
    made = (v for n in nodes for v in n.outputs if v is not None)
    late = (not (isinstance(v.type, TensorType) and v.type.is_static) for v in made)
    return any(n.subgraphs for n in nodes) or any(late)


def _copies(arrays: Sequence[Any]) -> list[Any] | None:
    """Copies of a call's arguments; None where they are too many bytes, or more than there is memory for."""
    held = 0

    def copy(x: Any) -> Any:
        nonlocal held
        if x is None:
            return None
        if isinstance(x, list):
            return [copy(e) for e in x]
        array = to_numpy(x)
        held += array.nbytes
        return np.array(array) if held <= MOST_INPUT_BYTES else None

    with contextlib.suppress(MemoryError, XRTError):  # a call that has its results does not fail for this
        found = [copy(a) for a in arrays]
        return found if held <= MOST_INPUT_BYTES else None
    return None
