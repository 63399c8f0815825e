"""PassCheck: whether the passes kept what a model computes, by one call that is run without them.

The guard compares engines with the host, and both run what the passes made of the model: where a pass is wrong, both
have the same wrong numbers. So the results of a call are compared with those of the model as it was given, node by
node on the host: of the first one, and of the first one by a plan for sizes that vary. That is done after engines have
taken over, when no call waits for the host.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from xrt_core.compiler.pipeline import Pipeline
from xrt_core.compiler.services import Services
from xrt_core.compiler.stages import Captured
from xrt_core.compiler.tiering import FirstCall, TieredPipeline
from xrt_core.errors import UnsupportedError, XRTError
from xrt_core.events import EventLog
from xrt_core.ir.function import Function
from xrt_core.ir.garbage_collection import WeakIdentityMap
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.options import Options
from xrt_core.options.guard_settings import GuardSettings
from xrt_core.passes.pass_base import rebuild, typed
from xrt_core.passes.pass_manager import RegisteredPass, Stage
from xrt_core.runtime.arrays import to_numpy

_REWRITING: Final[tuple[Stage, ...]] = ("model", "signature")
"""Stages whose passes rewrite a graph; those of the last one tell where its nodes run."""
_TURN: Final = 0.5  # seconds between two looks whether the module is still there
_MOST: Final = 16  # calls that are compared: a function may be traced any number of times
_LONGEST: Final = 10.0
"""Seconds of the host up to which a call is compared: live executables are not, meanwhile."""


def keeps_results(options: Options) -> bool:
    """Whether results with these options are those of the model as it was given, and are verified."""
    settings = GuardSettings.of(options)
    is_other = options.narrow is not None or options.precision or options.use_int8 or options.accuracy is not None
    is_alone = options.mesh is None and options.phase == "inference"
    return settings is not None and settings.verify and is_alone and not is_other


class PassCheck:
    """Compares the first calls of a model's plans: of the graph of an imported model, and of each that is traced, up to
    `_MOST`.

    Where a pass of a package changes results, the model goes on without it; where one of the core's does, on the host
    as it was given. One that a user registered may mean to: there is an event.

    make: makes a pipeline without passes, by name. replan: called with the pipeline that is to take the place of this
    one.
    """

    def __init__(
        self,
        pipeline: TieredPipeline,
        make: Callable[[Sequence[str]], Pipeline],
        replan: Callable[[Pipeline], None],
        without: Sequence[str] = (),
    ) -> None:
        self._make, self._replan, self._without = make, replan, without
        self._pipeline = weakref.ref(pipeline)
        self._begun: WeakIdentityMap[Captured, set[bool]] = WeakIdentityMap()
        """Of which graphs there was a call of sizes that vary, and of others."""
        self._count = 0
        pipeline.on_first_call = self.begin

    def begin(self, call: FirstCall) -> None:
        """Compare a call once nothing is compiled any more, unless there was one, or it leaves out an input."""
        varies, begun = call.symbolic is not None, self._begun.get(call.captured) or set()
        if varies in begun or self._count == _MOST or any(x is None for x in call.answered.inputs):
            return
        with contextlib.suppress(RuntimeError):  # no more threads
            threading.Thread(target=self._wait_for_quiet, args=(call,), name="xrt-pass-check", daemon=True).start()
            self._begun.put(call.captured, begun | {varies})
            self._count += 1

    def _wait_for_quiet(self, call: FirstCall) -> None:
        from xrt_core.guard.sampling import comparisons

        while (pipeline := self._pipeline()) is not None and not pipeline.background.closed:
            if not pipeline.is_compiling and comparisons().submit(lambda: self._compare(call)):
                return
            del pipeline  # which may end before its compilation does
            time.sleep(_TURN)

    def _compare(self, call: FirstCall) -> None:
        pipeline = self._pipeline()
        if pipeline is None or pipeline.background.closed:  # such as by what was found of another call
            return
        run = _Run(pipeline.accelerated.services, call)
        events, name = pipeline.services.events, run.graph.name or "graph"
        try:
            run.check_comparable()
            is_all = run.passes == _rewriting(pipeline.services)  # else some came with the engines
            found = call.answered.results if call.answered.results and is_all else run.results(run.passes)
            expected = run.results(())
            wrong = run.difference(found, expected)
            events.emit("passes.compared", model=name, result=wrong or "equal")
            if not wrong:
                return
            p = run.at_fault(expected)
        except XRTError as e:  # such as a node that the host runs only as passes make it
            reason = f"{type(e).__name__}: {e}"[:600]
            events.emit("passes.not_compared", level=logging.INFO, model=name, reason=reason)
            return
        if p.origin == "user":
            events.emit("passes.differ", level=logging.WARNING, model=name, name_of_pass=p.name, reason=wrong)
            return
        events.fallback(cluster=name, engine=p.owner, stage=f"pass {p.name}", kind="wrong numbers", error=wrong)
        self._leave_out(p, pipeline)

    def _leave_out(self, p: RegisteredPass, pipeline: Pipeline) -> None:
        names = (*self._without, p.name)
        made = self._make(names) if p.origin == "plugin" else on_host(pipeline.services)
        if isinstance(made, TieredPipeline):
            PassCheck(made, self._make, self._replan, names)
        self._replan(made)


class _Run:
    """A call of a graph on the host, after some passes. graph: as it was given. passes: all that rewrite it."""

    def __init__(self, services: Services, call: FirstCall) -> None:
        assert call.captured.given is not None
        self.graph, self._services, self._call = call.captured.given, services, call
        self.passes = _rewriting(services)

    def check_comparable(self) -> None:
        """Raise UnsupportedError where the call is not compared."""
        call = self._call.answered
        if call.seconds > _LONGEST:
            raise UnsupportedError(f"the host takes {call.seconds:.0f} s")
        if not all(isinstance(x, np.ndarray) for x in (*call.inputs, *call.results)):
            raise UnsupportedError("arguments or results are no tensors")

    def results(self, passes: Sequence[RegisteredPass]) -> list[np.ndarray]:
        """The results after these passes."""
        pipeline, call = on_host(replace(self._services, events=EventLog(silent=True)), passes), self._call
        captured = pipeline.capture(self.graph)
        symbolic = call.symbolic if passes else None
        plan = pipeline.compile(captured, call.types, call.known, engines=False, symbolic=symbolic)
        start = time.perf_counter()
        found = [to_numpy(r) for r in plan.run(self._services.place.copies(call.answered.inputs))]
        if time.perf_counter() - start > _LONGEST:
            raise UnsupportedError(f"the host takes {time.perf_counter() - start:.0f} s")
        return found

    def difference(self, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str:
        """What is wrong with results, by the guard's criterion; "" for nothing."""
        from xrt_core.verify.checker import ResultChecker, same_bytes  # not before the first answer

        inputs = self._call.answered.inputs
        for i, (got, want) in enumerate(zip(found, expected, strict=True)):
            if got.dtype != want.dtype or got.shape != want.shape:
                types = (f"{dtype_name(x.dtype)}{list(x.shape)}" for x in (got, want))
                return f"result {i} is {' instead of '.join(types)}"
            if got.dtype == object and not np.array_equal(got, want):
                return f"result {i} has other texts"
        if all(got.dtype == object or same_bytes(got, want) for got, want in zip(found, expected, strict=True)):
            return ""
        if any(x.dtype == object for x in (*inputs, *expected)):
            raise UnsupportedError("floats that are computed beside texts")
        function = Function.from_graph(_of_types(self.graph, inputs, expected))
        checker = ResultChecker(function, inputs, results=expected)
        check = checker.check_results(found, {})
        return "" if check.is_right or check.is_doubtful or checker.is_chaotic else check.reason

    def at_fault(self, expected: Sequence[np.ndarray]) -> RegisteredPass:
        """The first pass after which results are others."""
        for k, p in enumerate(self.passes[:-1], 1):
            if self.difference(self.results(self.passes[:k]), expected):
                return p
        return self.passes[-1]


def on_host(services: Services, kept: Sequence[RegisteredPass] = ()) -> Pipeline:
    """A pipeline for the host alone, which may plan at any time, with these passes of those that rewrite graphs."""
    passes = {s: [p for p in ps if p in kept or s not in _REWRITING] for s, ps in services.passes.items()}
    options = replace(services.options, forbid_compilation=False)
    return Pipeline(
        replace(services, options=options, engines=(), guard=None, precision=None, passes=passes, host_only=True)
    )


def _rewriting(services: Services) -> list[RegisteredPass]:
    return [p for stage in _REWRITING for p in services.passes[stage]]


def _of_types(graph: Graph, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> Graph:
    """The graph with the types of these arguments and results, and what follows from them between."""
    new = {v: v.with_type(TensorType(x.dtype, x.shape)) for v, x in zip(graph.inputs, inputs, strict=True)}
    made = typed(rebuild(graph.replace(inputs=[new[v] for v in graph.inputs]), graph.nodes, new))
    known: dict[Value, Value] = {
        v: v.with_type(TensorType(r.dtype, r.shape))
        for v, r in zip(made.outputs, results, strict=True)
        if v not in made.inputs and v.data is None
    }
    nodes = [n.replace(outputs=[v and known.get(v, v) for v in n.outputs]) for n in made.nodes]
    return rebuild(made.replace(nodes=nodes), nodes, known)
