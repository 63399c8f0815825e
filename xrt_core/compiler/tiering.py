"""FirstPlan: the host's plan of a new signature, which answers while the plan with engines is made."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.compiler.stages import Captured, Planned
from xrt_core.errors import XRTError
from xrt_core.guard.policy import MAX_INPUT_BYTES, retry_time
from xrt_core.guard.timeouts import in_background, native_call
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import TensorType, ValueType
from xrt_core.passes.partitioning import names_an_engine
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.plan_cache import PlanCache

if TYPE_CHECKING:
    from xrt_core.compiler.pipeline import Pipeline
    from xrt_core.guard.background import BackgroundCompiler

_BUSY: Final = 1.0  # seconds until a call sets going what another thread was at


class BaselinePlan(Planned):
    """A plan without engines, and what puts the one with engines in its place.

    The first call that it has answered sets that going; a failure leaves it where it is, and is tried again later.
    name: of the graph, for people. calls: how many it has answered. final: the plan that took its place, itself where
    no engine can be used.
    """

    __slots__ = (
        "__weakref__", "_attempts", "_due", "_going", "_lock", "_rehearsed", "_rehearses", "_way", "calls", "final",
        "name",
    )  # fmt: skip

    def __init__(self, *planned: Any) -> None:
        super().__init__(*planned)
        self._lock = threading.RLock()
        self._going = threading.Lock()  # held while the planning that a call set going is under way
        self._due = 0.0  # `time.monotonic` seconds from which a call sets the planning going
        self._attempts = 0
        self._rehearses = self._rehearsed = False
        self._way: TierUpJob | None = None
        self.calls = 0
        self.final: Planned | None = None
        self.name = ""
        self.run = self._answer

    def lead_on(self, way: TierUpJob, name: str, rehearses: bool) -> None:
        """Say what comes after it. rehearses: whether the inputs of the first call are wanted for that."""
        self._way, self.name, self._rehearses = way, name, rehearses

    def run_timed(self, arrays: Sequence[Any]) -> Any:
        """See `Plan.run_timed`."""
        found = super().run_timed(arrays)
        self._answered(arrays)
        return found

    def finish(self) -> Planned:
        """The plan with engines, made here and now unless it is there. Raises what making it raises."""
        with self._lock:
            if self.final is None and self._way is not None:
                self._give_way(self._way, self._way.make())
            return self.final or self

    def prepare(self, inputs: Sequence[Any] | None) -> None:
        """Make the plan with engines, rehearse it on `inputs`, set its clusters going, and let it take the place."""
        with self._lock:
            way = self._way
            if way is None or (self.final is None and all(p is not self for p in way.runner.plans.values())):
                return  # it was forgotten meanwhile
            made = way.make() if self.final is None else self.final
            if made is not None and made is not self:
                self._rehearsed = way.set_going(made, inputs)
            if self.final is None:
                self._give_way(way, made)

    def postpone(self, first: float) -> None:
        """Have a later call try again, after `first` seconds at the first time (see `retry_time`)."""
        self._attempts += 1
        self._due = retry_time(first, self._attempts)
        self._going.release()

    def _give_way(self, way: TierUpJob, made: Planned | None) -> None:
        self._due = float("inf")
        if made is None:
            self.final, self.run = self, self._run
        else:
            way.count(made, self.calls - self._rehearsed)
            self.final = made  # before it stands anywhere: who still finds this plan sees that it is not the last word
        way.runner.replace(self, self.final)

    def _answer(self, arrays: Sequence[Any]) -> Sequence[Any]:
        results = self._run(arrays)
        self._answered(arrays)
        return results

    def _answered(self, arrays: Sequence[Any]) -> None:
        self.calls += 1
        way = self._way
        if time.monotonic() >= self._due and way is not None and self._going.acquire(blocking=False):
            if not self._lock.acquire(blocking=False):  # somebody makes the plan just now, or hangs in it
                self._due = time.monotonic() + _BUSY
                self._going.release()
                return
            self._lock.release()
            self._due = float("inf")
            way.planning.begin(self, _copies(arrays) if self._rehearses else None)


@dataclass(frozen=True, slots=True)
class TierUpJob:
    """From a signature to its plan with engines. captured, runner: whose plan it is. owned: see `make_plan`."""

    planning: BackgroundCompiler
    pipeline: Callable[[], Pipeline]
    captured: Captured
    types: Sequence[ValueType | None]
    known: Mapping[int, np.ndarray]
    owned: bool
    runner: PlanCache

    def make(self) -> Planned | None:
        """The plan with engines; None where none can be used."""
        with native_call() if in_background() else contextlib.nullcontext():
            pipeline = self.pipeline()
            return self.plan(pipeline) if pipeline.engines else None

    def plan(self, pipeline: Pipeline) -> Planned:
        """The plan of the signature by a pipeline that has engines."""
        with native_call() if in_background() else contextlib.nullcontext():
            return pipeline.make_plan(pipeline.adopt(self.captured), self.types, self.known, True, self.owned)

    def set_going(self, made: Planned, inputs: Sequence[Any] | None) -> bool:
        """Have the clusters of a plan examined. Whether it could be rehearsed on the inputs, which plans its parts."""
        guard, rehearsed = self.pipeline().guard, False
        assert guard is not None
        if inputs is not None:
            try:
                made.run(inputs)
                rehearsed = True
            except Exception as e:  # whoever calls with such inputs hears of it
                self.planning.events.emit("guard.no_rehearsal", reason=f"{type(e).__name__}: {e}")
        guard.begin_all(made.launches)
        return rehearsed

    def count(self, made: Planned, calls: int) -> None:
        """Count calls that the host has answered in place of the launches of a plan."""
        guard = self.pipeline().guard
        assert guard is not None
        guard.count(made.launches, calls)


class TieredCompiler:
    """Has new signatures answered by the host first. pipeline: gives the one with engines, which may import them."""

    def __init__(self, planning: BackgroundCompiler, pipeline: Callable[[], Pipeline]) -> None:
        self.planning = planning
        self.pipeline = pipeline

    def plan(
        self,
        captured: Captured,
        types: Sequence[ValueType | None],
        known: Mapping[int, np.ndarray],
        owned: bool,
        runner: PlanCache,
    ) -> Planned:
        """The host's plan of a signature; the one with engines where nobody waits, or a mark is to be obeyed."""
        way = TierUpJob(self.planning, self.pipeline, captured, types, known, owned, runner)
        if in_background() or names_an_engine(captured.graph):  # one that cannot be obeyed is an error for the caller
            return way.plan(self.pipeline())
        start = time.perf_counter()
        partitioned = captured.optimise(types, known, engines=False).partition()
        first = partitioned.plan(owned, BaselinePlan)
        assert isinstance(first, BaselinePlan)
        first.signature = types, known
        name = captured.graph.name or "graph"
        first.lead_on(way, name, self.planning.settings.real_inputs or _has_parts(partitioned.graph))
        self.planning.events.emit("host_first", seconds=time.perf_counter() - start, model=name)
        return first


def _has_parts(graph: Graph) -> bool:
    """Whether parts of a graph are planned when it runs: bodies of control flow, and what waits for shapes."""
    made = (v for n in graph.nodes for v in n.outputs if v is not None)
    late = (not (isinstance(v.type, TensorType) and v.type.is_static) for v in made)
    return any(n.subgraphs for n in graph.nodes) or any(late)


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
        return np.array(array) if held <= MAX_INPUT_BYTES else None

    with contextlib.suppress(MemoryError, XRTError):  # a call that has its results does not fail for this
        found = [copy(a) for a in arrays]
        return found if held <= MAX_INPUT_BYTES else None
    return None
