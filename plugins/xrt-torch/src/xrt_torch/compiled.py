"""Compiled graphs: what torch calls for a graph of AOTAutograd: XRT's stages once they are ready, torch eager until
then, and for good where something fails."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import xrt_core as xrt
from xrt_core.errors import describe
from xrt_core.events import Kind, process_events
from xrt_core.ir.types import physical_memory
from xrt_core.options import AUTO, resolve
from xrt_torch.background import compiler, ending, tuner
from xrt_torch.calls import Ending
from xrt_torch.comparison import Comparison
from xrt_torch.constants import Constants, Own, are_few_bytes, own_tensors, worthwhile
from xrt_torch.devices import CPU, RandomState, after_this_thread
from xrt_torch.explanation import Explanation
from xrt_torch.kept import KeptGraph, TranslationFile
from xrt_torch.nan import have_nan, loses_nan, places_of_data
from xrt_torch.ordering import chooses_order
from xrt_torch.partition import draws_numbers, operators_of
from xrt_torch.stages import Builder, Signature, Stages, for_eager, placeholders
from xrt_torch.transforms import are_batched

known: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
"""The graphs that exist."""
_numbers = itertools.count()
_FIRST: Final = {"guard_verify": False, "guard_tune": False}
"""Options of what is compared with eager in place of the guard's reference: the first engine that takes the graph."""
_TUNED: Final = {"engine": AUTO, "guard_verify": False}
"""The same, of what is timed on every engine."""
_AGAIN: Final = frozenset((16, 64, 256, 1024, 4096))  # calls of graphs that are compared with eager again
_PROVEN_SHAPES: Final = 2
"""How many shapes that a plan serves without having been made for them are compared with eager."""
_MOST_SHAPES: Final = 4096
"""Shapes that are known to be served at a time."""
_TURNS: Final = 5  # calls with and without constants


def any_engine_will_do(options: Mapping[str, Any]) -> bool:
    """Whether nobody names an engine: neither these options, nor the configuration or the environment."""
    return resolve(options).engine in (None, (AUTO,))


class CompiledGraph:
    """A functional graph of ATen operators, called with its inputs and returning the list of its results.

    kind: "inference", "forward" or "backward". parameters: where those that it is called with have their memory, a set
    that forward and backward share. background: whether calls run eager while XRT compiles; otherwise the
    first call waits. freeze: whether inference takes parameters and buffers as constants; None: once it is tuned, if to
    look at them in each call takes little time. file: where the translation is kept, if
    XRT runs the graph as a whole. kept: what another process kept; the module is then TorchDynamo's own.
    device: that of its tensors; those on others are torch's.

    In the background, with no engine named, the first engine that takes the graph answers soon; once its results agreed
    with eager's, all engines are compiled and timed beside it, and the fastest takes its place.

    Whatever fails makes the graph eager, with a FallbackEvent and `reason`; Ctrl-C passes through.
    """

    def __init__(
        self,
        module: GraphModule,
        kind: str,
        options: Mapping[str, Any],
        background: bool,
        parameters: set[int],
        freeze: bool | None = None,
        file: TranslationFile | None = None,
        kept: KeptGraph | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.number = next(_numbers)
        self.name = f"torch_{kind}_{self.number}"
        self.kind = kind
        self.eager_nodes: dict[str, str] = {}
        self.reason: str | None = None
        self.parameters = parameters
        self.module, self._options, self._background = module, dict(options), background
        self._file, self._kept, self._device = file, kept, device
        self._is_ordered = False  # equal elements have torch's order
        self._in_eager = for_eager(module, module.graph) if kept is None else module
        self._eager = self._in_eager.forward  # called itself, a module would print what it raises
        self._stages: Stages | None = None
        self._without_constants: Stages | None = None  # what `_stages` took the place of
        self._work: dict[Signature, Future[None]] = {}
        self._calls = 0
        self.comparisons = 0
        """Calls whose results were compared with eager's."""
        self._freeze = freeze if kind == "inference" and (freeze or device == CPU) else False
        self._own: Own = {}
        # results are compared with eager's own numbers: the guard's reference would be slower
        named = [n for n in options if n == "guard" or n.startswith("guard_")]
        self._is_quick, self._any_engine = not named, any_engine_will_do(options)
        self._seconds: tuple[float, float] | None = None
        self._lock = threading.Lock()
        self._comparison = Comparison(module.graph)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                node.meta["val"] = getattr(module, str(node.target), None)
        self.is_dynamic = any(isinstance(n.meta.get("val"), torch.SymInt) for n in module.graph.nodes)
        self._builder = Builder(module, self.name, device, self.is_dynamic, self.eager_nodes)
        self._is_auto = is_auto = self._is_quick and self._any_engine and resolve(options).auto
        self._draws = any(draws_numbers(n.target) for n in module.graph.nodes)
        self._tangents = [i for i, n in enumerate(placeholders(module)) if n.name.startswith("tangents")]
        self._varying = [i for i, n in enumerate(placeholders(module)) if _varies(n.meta.get("val"))]
        self._tunes = ((is_auto and not self.is_dynamic) or self._freeze is None) and background
        is_first_chosen = is_auto and (self.is_dynamic or (kind == "inference" and not self._tunes))
        self._quick = _TUNED if is_first_chosen else _FIRST
        self._like: dict[Signature, list[Any]] = {}  # arguments like those of calls, to tune for
        self._tuning: Future[None] | None = None
        self._tuned: Stages | None = None  # compared with eager in the next call
        self._when_tuned: Callable[[], None] | None = None
        self._is_released = False
        self._told: tuple[str, dict[str, Any]] | None = None  # what there was before it was let go
        known.add(self)

    def __call__(self, *args: Any) -> list[Any]:
        """The results. Raises what torch eager raises for these arguments."""
        if self.reason is not None or self._is_released or (self._tangents and self._are_batched(args)):
            return list(self._eager(*args))
        stages, signature = self._stages, self._signature(args)
        if stages is not None and stages.least and _size(signature) < stages.least:
            stages = self._without_constants or stages
        if stages is not None and stages.constants is not None and not stages.constants.hold(args):
            stages = self._thaw(stages, args)
        if stages is not None and (tuned := self._tuned) is not None and self._may_take_over(tuned, signature, args):
            return self._take_tuned(signature, args)
        if stages is not None and stages.data and have_nan(args, stages.data):
            return list(self._eager(*args))
        if stages is None or signature not in stages.proven:
            return self._first(signature, args, stages)
        self._calls += 1
        if self._calls in _AGAIN and self._is_quick:
            return self._prove(signature, args, stages)
        try:
            return self._on_xrt(args, stages)
        except Exception as e:
            results = list(self._eager(*args))  # raises what is wrong with the arguments
            self._fall_back("run", e)
            return results

    @property
    def is_compiling(self) -> bool:
        """Whether XRT compiles for a call."""
        return any(not w.done() for w in tuple(self._work.values()))

    @property
    def is_proven(self) -> bool:
        """Whether XRT's results agreed with eager's."""
        return self._stages is not None and bool(self._stages.proven)

    @property
    def is_settled(self) -> bool:
        """Whether nothing changes any more: it fell back, or was timed against eager."""
        tunes = (self._tuning is not None and not self._tuning.done()) or self._tuned is not None
        return self.reason is not None or (self._seconds is not None and not tunes)

    def timed(self, xrt: float, eager: float, again: Callable[[], None]) -> None:
        """Note the seconds of a call with its backward pass: what `explain` shows. again: called when another engine
        is about to take the place of the one that was timed."""
        self._seconds, self._when_tuned = (xrt, eager), again

    @property
    def is_tuned(self) -> bool:
        """Whether no other engine will be tried, or the one that was has taken its place."""
        tuning = self._tuning
        tried = self.is_dynamic if tuning is None else tuning.done() and self._tuned is None
        return not self._tunes or tried or self.reason is not None

    def release(self) -> None:
        """From now on run in eager; in the background, give up what is being compiled and let go what has been.
        `explain` tells what there was."""
        self._is_released = True
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            compiler.submit(self._let_go)

    def _let_go(self) -> None:
        stages = self._stages
        try:
            told = self.explain(), self.to_json()
        except Exception as e:  # an engine's, about what it compiled
            self._stages = None
            told = f"{self.explain()}\n  its stages are not told: {describe(e)}", self.to_json()
        self._own = {}
        others, self._without_constants = self._without_constants, None
        self._told, self._stages, self._tuned = told, None, None
        for s in (stages, others):
            if s is not None:
                s.close()

    def _are_batched(self, args: Sequence[Any]) -> bool:
        return are_batched(args[i] for i in self._tangents)

    def _signature(self, args: Sequence[Any]) -> Signature:
        if not self.is_dynamic:
            return ()
        varying = (args[i] for i in self._varying)
        return tuple([tuple(a.shape) if isinstance(a, torch.Tensor) else (int(a),) for a in varying])

    def _first(self, signature: Signature, args: Sequence[Any], stages: Stages | None) -> list[Any]:
        """A call that no call of its shapes has proven: start compilation, or compare XRT's results with eager's.
        stages: those for this size, if there are any."""
        if self.is_dynamic and stages is not None and signature not in self._work:
            served = self._by_others(signature, args, stages)
            if served is not None:
                return served
        with self._lock:
            work = self._work.get(signature)
            is_new = work is None
            if work is None:
                self.parameters.update(*(_addresses(a) for a in args if isinstance(a, torch.nn.Parameter)))
                will_tune = self._freeze is None and self._tunes and self._tuning is None
                if (self._freeze or will_tune) and not self._own:
                    self._own = own_tensors(self._builder.inputs, args)
                work = self._work[signature] = Future()
        if is_new:
            before = RandomState(self._device) if self._draws and not self._background else None
            try:
                results = list(self._eager(*args))  # before compilation takes its share of the processor
            except BaseException:  # nothing is compiled for wrong arguments
                self._work.pop(signature, None)
                work.set_result(None)
                raise
            self._begin(work, args, stages)
            if self._background:
                return results
            if before is not None:
                before.restore()
        if not self._background:
            work.result()
        stages = stages or self._stages
        if not work.done() or self.reason is not None or self._is_released or stages is None:
            return list(self._eager(*args))
        return self._prove(signature, args, stages)

    def _by_others(self, signature: Signature, args: Sequence[Any], stages: Stages) -> list[Any] | None:
        """The results, where plans that were made for other shapes serve these as well; None where they do not."""
        state = RandomState(self._device)
        found: list[Any] | Exception | None
        try:
            found = self._on_xrt(args, stages, only_prepared=True)
        except Exception as e:
            found = e
        if isinstance(found, list) and stages.served >= _PROVEN_SHAPES:
            if len(stages.proven) >= _MOST_SHAPES:
                stages.proven = set()
            stages.proven.add(signature)
            return found
        state.restore()
        if found is None:
            return None
        stages.served += 1
        self.comparisons += 1
        return self._compared(signature, args, stages, found, list(self._eager(*args)), state)

    def _begin(self, work: Future[None], args: Sequence[Any], stages: Stages | None) -> None:
        def run(come_after: Callable[[], None], given: Sequence[Any]) -> None:
            try:
                come_after()
                self._prepare(given, stages)
            except Exception as e:  # the device's
                self._fall_back("compile", e)
            finally:
                work.set_result(None)

        try:
            come_after = after_this_thread(self._device)
            compiler.submit(run, come_after, [a.detach() if isinstance(a, torch.Tensor) else a for a in args])
        except Exception as e:  # the interpreter is ending, or a tensor is of a class of its own
            self._fall_back("compile", e)
            work.set_result(None)

    def _prepare(self, args: Sequence[Any], stages: Stages | None) -> None:
        """Translate, and compile for these shapes. Never raises."""
        if self._is_released:
            return
        try:
            with torch.no_grad():
                stages = stages or self._stages
                if stages is None:
                    stages = self._stages = self._build()
                    self._trace("graph", lambda: str(self.module.print_readable(print_output=False)))
                stages.compile(args, self._device)
                if self._freeze:
                    self._own = {}
                self._keep(stages)
                self._trace("explain", self.explain)
        except Ending:
            pass  # nobody calls any more
        except BaseException as e:
            self._fall_back("compile", e)

    def _build(self) -> Stages:
        if self._kept is not None:
            engine = self._kept.engine if self._is_quick and self._any_engine else ""
            return self._builder.of_kept(self._kept, self._first_options, engine)
        own = self._own if self._freeze else None
        return self._builder.build(self._first_options, own, self._is_ordered, keeps=self._file is not None)

    def _keep(self, stages: Stages) -> None:
        """Write the translation for other processes, once it is compiled, where it is all of the graph."""
        file, self._file = self._file, None
        content, stages.content = stages.content, None
        if file is None or content is None or self._comparison.unset:
            return
        chosen = self._is_quick and self._any_engine
        engines = {c.engine for c in stages[0].module.explain().report.clusters} if chosen else set()
        engine = engines.pop() if len(engines) == 1 else ""
        file.write(stages[0].stage, stages.inputs, stages.results.names, content, engine)

    @property
    def _first_options(self) -> dict[str, Any]:
        return {**self._options, **self._quick} if self._is_quick else self._options

    def _on_xrt(
        self, args: Sequence[Any], stages: Stages | None = None, only_prepared: bool = False
    ) -> list[Any] | None:
        """The results. only_prepared: None in their place where XRT would have to compile for these shapes."""
        stages = self._stages if stages is None else stages
        assert stages is not None
        return stages.run(args, only_prepared)

    def _prove(self, signature: Signature, args: Sequence[Any], stages: Stages) -> list[Any]:
        """Run both, and return eager's results; XRT answers from now on if its own are as good."""
        return self._compared(signature, args, stages, *self._both(args, stages))

    def _compared(
        self,
        signature: Signature,
        args: Sequence[Any],
        stages: Stages,
        found: list[Any] | Exception,
        expected: list[Any],
        before: RandomState,
    ) -> list[Any]:
        if isinstance(found, Exception):
            self._fall_back("run", found)
        elif not (wrong := self._comparison.verdict(args, found, expected, self._in_eager, before)):
            self._look_for_nan(args, stages, expected)
            stages.proven.add(signature)
            if not self.is_dynamic or stages.served:
                self._tune_later(signature, args)
        elif self._is_quick or self._may_be_ordered:
            self._begin_again(wrong)
        else:
            self._fall_back("examine", xrt.ExecutionError(wrong))
        return expected

    def _both(self, args: Sequence[Any], stages: Stages) -> tuple[list[Any] | Exception, list[Any], RandomState]:
        """The results of XRT, or the error in their place, those of eager, and where random numbers stood before."""
        self.comparisons += 1
        state = RandomState(self._device)
        found: list[Any] | Exception | None
        try:
            with torch.no_grad():
                found = self._on_xrt([a.detach() if isinstance(a, torch.Tensor) else a for a in args], stages)
        except Exception as e:
            found = e
        state.restore()
        assert found is not None
        return found, list(self._eager(*args)), state

    def _look_for_nan(self, args: Sequence[Any], stages: Stages, results: Sequence[Any]) -> None:
        """See whether stages pass NaN on, unless that is known, or results like these take much memory. Of backward
        passes, which take what forward passes gave, nothing is looked at, nor on GPUs, where a look would wait."""
        size = sum(r.nbytes for r in results if isinstance(r, torch.Tensor))
        is_looked_at = self.kind != "backward" and self._device == CPU and size <= physical_memory() // 32
        if stages.data is not None or not is_looked_at:
            return
        places = places_of_data(args)
        loses = bool(places) and loses_nan(lambda given: self._on_xrt(given, stages) or [], self._eager, args, places)
        if loses:
            process_events.emit("torch.loses_nan", graph=self.name)
        stages.data = places if loses else []

    def _tune_later(self, signature: Signature, args: Sequence[Any]) -> None:
        """Have all engines compiled and timed in the background, for arguments like these; where sizes vary constants
        alone are tried, once plans have served several sizes."""
        with self._lock:
            if not self._tunes or self._tuning is not None or self._stages is None:
                return
            if self._freeze is None and any(args[i] is not x for i, x in self._own.values()):
                self._freeze = False  # modules of one class share the graph
                self._tunes, self._own = self._tunes_engines, {}
                if not self._tunes:
                    return
            self._like[signature] = [_zeros_like(a) if isinstance(a, torch.Tensor) else a for a in args]
            if self.is_dynamic and len(self._like) < _PROVEN_SHAPES:
                return
            calls, self._like = [*self._like.values()], {}
            try:
                come_after = after_this_thread(self._device)
                self._tuning = tuner.submit(_tune, weakref.ref(self), self._stages, calls, come_after)
            except RuntimeError:  # the interpreter is ending
                self._tunes, self._own = False, {}

    def tune(self, stages: Stages, calls: Sequence[Sequence[Any]]) -> None:
        """Make the stages that take the place of these: with constants, if that is quicker, or on the quickest engine.
        calls: arguments of one, or of several where sizes vary. Never raises."""
        made = None
        for make in (self._with_constants, self._compiled_again):
            try:
                with torch.no_grad():
                    made = make(stages, calls)
            except Ending:
                return
            except BaseException as e:
                process_events.emit("torch.untuned", graph=self.name, reason=f"{type(e).__name__}: {e}"[:600])
            if made is not None or not self._tunes_engines:
                break
        self._own = {}
        if made is not None and self._stages is stages:
            self._tuned, self._seconds = made, None
            if self._when_tuned is not None:
                self._when_tuned()

    def _compiled_again(
        self, stages: Stages, calls: Sequence[Sequence[Any]], constants: Constants | None = None
    ) -> Stages:
        """The stages, on all engines if none is named, with these constants in place of those that they have."""
        options = {**self._options, **_TUNED} if self._is_auto else self._first_options
        made = self._builder.again(stages, options, constants)
        for args in calls:
            made.compile(args, self._device)
        return made

    def _with_constants(self, stages: Stages, calls: Sequence[Sequence[Any]]) -> Stages | None:
        """The stages with constants that are looked at in each call; None where that is not quicker, or not asked
        for. Where sizes vary they are for those that are large enough."""
        if self._freeze is not None or not stages.are_all_on_xrt or (self.is_dynamic and len(stages) > 1):
            return None
        wanted = sorted({n for r in stages for n in worthwhile(r.stage, r.graph) if n in self._own})
        if not are_few_bytes(self._own, wanted):
            return None
        constants = Constants(self._own, wanted, looks=True)
        calls = [self._with_own(args) for args in calls]
        args = calls[-1]  # of which there is no plan of its own
        if not constants.pay(min(self._timed(stages, args) for _ in range(3))):
            return None
        made = self._compiled_again(stages, calls, constants)
        # in turns, as others use the processor
        pairs = [(self._timed(stages, args), self._timed(made, args)) for _ in range(_TURNS)]
        before, after = (min(p[i] for p in pairs) for i in (0, 1))
        if (looking := constants.seconds()) < before - after:
            if self.is_dynamic:  # a call's time, and what is gained, grow with its size
                made.least = math.ceil(_size(self._signature(args)) * constants.share(before, after, looking))
            return made
        made.close()
        return None

    def _with_own(self, args: Sequence[Any]) -> list[Any]:
        """Arguments like these, each in memory of its own, with the parameters and buffers themselves."""
        made = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]
        for at, x in self._own.values():
            made[at] = x
        return made

    def _timed(self, stages: Stages, args: Sequence[Any]) -> float:
        """The seconds of a call by XRT alone."""
        start = time.perf_counter()
        self._on_xrt(args, stages)
        return time.perf_counter() - start

    def _may_take_over(self, tuned: Stages, signature: Signature, args: Sequence[Any]) -> bool:
        """Whether what is about to answer takes this call without a compilation."""
        try:
            return not self.is_dynamic or tuned.serve(args, _size(signature))
        except Exception as e:
            self._tuned = None
            process_events.emit("torch.untuned", graph=self.name, reason=describe(e))
            return False

    def _take_tuned(self, signature: Signature, args: Sequence[Any]) -> list[Any]:
        """A call by what is about to answer, compared with eager."""
        with self._lock:
            tuned, self._tuned = self._tuned, None
        if tuned is None:  # another thread was first
            return self(*args)
        if tuned.constants is not None and not tuned.constants.hold(args):  # written since
            self._thaw(tuned, args)
            return self(*args)
        found, expected, before = self._both(args, tuned)
        if isinstance(found, Exception):
            wrong = f"{type(found).__name__}: {found}"
        else:
            wrong = self._comparison.verdict(args, found, expected, self._in_eager, before)
        if wrong:
            process_events.emit("torch.untuned", level=logging.WARNING, graph=self.name, reason=wrong)
        else:
            self._look_for_nan(args, tuned, expected)
            if self._freeze is None and tuned.constants is not None:
                self._without_constants = self._stages
            tuned.proven.add(signature)
            self._stages = tuned
            self._work.clear()
        return expected

    def _thaw(self, stages: Stages, args: Sequence[Any]) -> Stages | None:
        """A parameter was written or replaced: from now on they are inputs. Returns the stages that answer."""
        with self._lock:
            if self._freeze is False:  # another thread saw it first
                return self._stages
            is_new, self._freeze, self._tunes = self._freeze is None, False, self._tunes and self._tunes_engines
            self._tuned = None
            if is_new:
                self._stages = self._without_constants or self._stages
                self._without_constants = self._tuning = None
            else:
                self._stages = None
            self._work.clear()
        process_events.emit("torch.thawed", graph=self.name)
        if is_new:
            self._tune_later(self._signature(args), args)
        return self._stages

    @property
    def _tunes_engines(self) -> bool:
        """Whether all engines are timed once the first one answers."""
        return self._is_auto and not self.is_dynamic

    @property
    def _may_be_ordered(self) -> bool:
        """Whether results may differ for the order of equal elements, which torch may choose."""
        return not self._is_ordered and self._kept is None and chooses_order(self.module.graph)

    def _begin_again(self, why: str) -> None:
        """Let the next call compile with torch's order of equal elements, or with the guard's verification, which finds
        the engine that is at fault."""
        orders = self._may_be_ordered
        with self._lock:
            if orders:
                self._is_ordered = True
            else:
                self._is_quick = False
            self._stages = self._tuned = self._without_constants = None
            self._work.clear()
        what = "torch.ordered" if orders else "torch.verified"
        process_events.emit(what, level=logging.WARNING, graph=self.name, reason=why)

    def _fall_back(self, stage: str, error: BaseException) -> None:
        self.reason = f"{stage}: {type(error).__name__}: {str(error).strip()[:600]}"
        self._stages = self._without_constants = self._file = None
        self._own = {}
        kind: Kind = "wrong numbers" if stage == "examine" else "memory" if isinstance(error, MemoryError) else "raised"
        process_events.fallback(
            cluster=self.name, engine="xrt", stage=stage, kind=kind, error=self.reason, level=logging.WARNING
        )

    def _trace(self, what: str, text: Callable[[], str]) -> None:
        """Add an artefact to torch's structured log (TORCH_TRACE, tlparse)."""
        from torch._logging._internal import trace_structured

        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"xrt_{self.name}_{what}", "encoding": "string"},
            payload_fn=text,
            expect_trace_id=False,
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Block until what is being compiled is ready; False after `timeout` seconds."""
        from concurrent.futures import wait as wait_for

        work = [*self._work.values(), *([] if self._tuning is None else [self._tuning])]
        return not wait_for(work, timeout).not_done

    def _explanation(self) -> Explanation:
        stages, seconds = self._stages, self._seconds or (None, None)
        constants = None if stages is None else stages.constants
        return Explanation(
            self.name, operators_of(self.module.graph), self.reason, dict(self.eager_nodes), stages, constants, *seconds
        )

    def to_json(self) -> dict[str, Any]:
        """What runs where, and why, as plain data: see `Explanation.to_json`."""
        return self._explanation().to_json() if self._told is None else self._told[1]

    def explain(self) -> str:
        """What runs where, and why, as text."""
        return self._explanation().as_text() if self._told is None else self._told[0]


def _tune(
    graph: weakref.ref[CompiledGraph], stages: Stages, calls: Sequence[Sequence[Any]], come_after: Callable[[], None]
) -> None:
    """After what calls wait for. A graph that is gone is not tuned."""
    while any(g.is_compiling for g in tuple(known)):
        if ending.wait(0.1):
            return
    if (found := graph()) is not None and not ending.is_set():
        come_after()
        found.tune(stages, calls)


def _size(signature: Signature) -> int:
    """The elements of what varies."""
    return sum(map(math.prod, signature))


def _varies(value: Any) -> bool:
    """Whether what is known of an input leaves a size open."""
    return not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape)


def _zeros_like(x: torch.Tensor) -> torch.Tensor:
    """Zeros of its type that take no memory."""
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)


def _addresses(x: torch.Tensor) -> set[int]:
    """Where a tensor's memory is; of one of a class that wraps others (quantised, sharded), where theirs is."""
    if not is_traceable_wrapper_subclass(x):
        return {x.untyped_storage().data_ptr()}
    return set().union(*(_addresses(getattr(x, name)) for name in x.__tensor_flatten__()[0]))


def graphs(model: torch.nn.Module | None = None) -> list[CompiledGraph]:
    """The graphs that exist, in the order of their compilation; of a model: those that have been run with its
    parameters."""
    found = sorted(known, key=lambda g: g.number)
    if model is None:
        return found
    own = set().union(*map(_addresses, model.parameters()))
    return [g for g in found if own.intersection(g.parameters)]


def explain(model: torch.nn.Module | None = None) -> str:
    """What XRT and what torch eager run of the compiled graphs, with reasons; see `graphs`."""
    return "\n".join(g.explain() for g in graphs(model)) or "no graph has been compiled"


def wait(timeout: float | None = None) -> bool:
    """Block until all compilation in the background is done; False after `timeout` seconds."""
    return all(g.wait(timeout) for g in graphs())
