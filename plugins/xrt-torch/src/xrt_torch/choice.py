"""Choice: what answers the calls of one graph of TorchDynamo: its module in torch eager, or XRT.

The first call is eager's, and the graph is captured further at the second one: what is called once costs no more than
TorchDynamo. The captured graph's first calls are compared with the module, whose operators were taken apart. While XRT
compiles, eager answers. Once XRT's results agree with the captured graph's in eager, XRT and the module take turns of a
few calls, each timed with its backward pass, and the quicker one answers from then on. They do so again when XRT has
found a quicker engine. What decides for good is not timed while XRT compiles anything. Of graphs whose sizes vary more
calls are timed, and compared for one size. Where eager answers for good, what XRT compiled is let go.

Until a side answers for good, calls are eager's where what torch saves goes to hooks: a checkpoint around the compiled
function makes its forward pass again, and raises where the other side answers that, which saves other tensors.

The first call of a turn does not count: the other side's threads still wait for work by spinning. (Call by call in
turns, convolutions that take eager 35 ms took it 110 to 150, on two processors.)
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
import torch.utils.checkpoint

from xrt_core.errors import describe
from xrt_core.events import Kind, process_events
from xrt_torch.background import is_busy
from xrt_torch.compiled import CompiledGraph
from xrt_torch.confirmation import Confirmation
from xrt_torch.devices import CPU, finish
from xrt_torch.transforms import are_saved_by_hooks

_CALLS: Final = 4  # of a turn
_CALLS_OF_SIZES: Final = 5  # the same, where sizes vary; and there are two turns of each side
_PATIENCE: Final = 32  # calls after which the timings must do, though backward passes are missing
_AWAITED: Final = 16  # calls with gradients after which there is no backward pass, it seems
_BUSY_SECONDS: Final = 60.0  # after which they are taken though XRT is busy

Call = Callable[..., Any]


class Choice:
    """Calls of one graph. answer: what takes the next call; it is replaced as things go on.

    module: the graph, in torch eager. capture: makes the same through AOTAutograd and XRT; None where that is not
    possible. graphs: where it adds what AOTAutograd made of the graph; the backward graph is added by the first
    backward pass. race: whether the quicker side is found out; else XRT answers where it can. at_once: whether the
    graph is captured now, and not at its second call. device: of its tensors. confirmation: compares what was captured
    with the module; None: nothing does.
    """

    def __init__(
        self,
        module: Call,
        capture: Callable[[], Call | None],
        graphs: list[CompiledGraph],
        *,
        race: bool,
        at_once: bool = True,
        device: torch.device = CPU,
        confirmation: Confirmation | None = None,
    ) -> None:
        self.answer: Call = self._once
        self._module, self._graphs, self._race, self._device = module, graphs, race, device
        self._confirmation, self._confirming = confirmation, threading.Lock()
        self._races = race
        self._capture: Callable[[], Call | None] | None = capture
        self._compiled: Call = module
        self._meanwhile: Call = module
        """The side that answers until there are timings."""
        self._lock = threading.Lock()
        self._capturing = threading.RLock()  # a hook of torch's may call the graph that is being captured
        self._turned = 0  # calls that were in turns
        self._waits_since: float | None = None
        self._is_at_once = at_once
        self._awaited = 0  # calls that waited for gradients
        self._unproven = 0  # calls that waited for a backward pass
        self._timings: dict[bool, list[_Timing]] = {True: [], False: []}  # of XRT, of eager
        if at_once:
            self._captured()

    def _once(self, *args: Any) -> Any:
        self.answer = self._twice
        return self._module(*args)

    def _twice(self, *args: Any) -> Any:
        """The second call: one thread captures the graph, others that call meanwhile are eager's."""
        if are_saved_by_hooks():
            return self._module(*args)
        if self._capturing.acquire(blocking=False):
            try:
                self._captured()
            finally:
                self._capturing.release()
            if self.answer != self._twice:
                return self.answer(*args)
        return self._module(*args)

    def _captured(self) -> None:
        capture, self._capture = self._capture, None
        if capture is None:
            return
        compiled = capture()
        if compiled is None:
            self.answer = self._module
            return
        confirmation = self._confirmation
        if confirmation is not None and all(g.module is confirmation.module for g in self._graphs):
            self._confirmation = None  # nothing was taken apart
        module, choice = self._module, weakref.ref(self)  # so that what is forgotten is free at once

        def safely(*args: Any) -> Any:
            try:
                return compiled(*args)
            except Exception as e:
                if type(e).__module__ == torch.utils.checkpoint.__name__:  # a checkpoint has all that it needs
                    raise
                results = module(*args)  # raises what is wrong with the arguments
                if (found := choice()) is not None:
                    found._fell(e)
                return results

        self._compiled, self.answer = safely, self._while_compiling

    def _fell(self, error: Exception) -> None:
        """What AOTAutograd made of the graph raised where the module itself does not."""
        self._left("run", "raised", describe(error))

    def _left(self, stage: str, kind: Kind, why: str) -> None:
        """From now on the module answers."""
        self.answer = self._module
        name = self._graphs[0].name if self._graphs else "torch"
        process_events.fallback(cluster=name, engine="xrt", stage=stage, kind=kind, error=why, level=logging.WARNING)
        for g in self._graphs:
            g.release()

    def _while_compiling(self, *args: Any) -> Any:
        graphs = self._graphs
        if any(g.is_compiling for g in graphs) or are_saved_by_hooks():
            return self._module(*args)
        if self._is_confirmation_due or self._confirming.locked():
            return (self._compiled if self._confirm(args) else self._module)(*args)
        if graphs and all(g.reason is not None for g in graphs):
            self.answer = self._module
        elif graphs and self._are_proven() and not self._await_gradients():
            if self._race:
                self.answer = self._in_turns
            elif not self._is_dynamic:
                self.answer = self._compiled
        return self._compiled(*args)

    def _are_proven(self) -> bool:
        """Whether XRT's results agreed with eager's. A backward pass that no caller makes, as the graph was captured to
        compare gradients, is not waited for forever."""
        missing = [g for g in self._graphs if not g.is_proven]
        if any(g.kind != "backward" for g in missing):
            return False
        self._unproven += bool(missing)
        return not missing or self._unproven > _AWAITED

    @property
    def _in_use(self) -> list[CompiledGraph]:
        """The graphs but for backward passes that no caller has made."""
        return [g for g in self._graphs if g.is_proven or g.kind != "backward"]

    @property
    def _is_confirmation_due(self) -> bool:
        """Whether this call is to be compared with the module. Gradients are not in a call of TorchDynamo that captured
        the graph at once: AOTAutograd's backward pass would hold all of it, for good."""
        confirmation = self._confirmation
        if confirmation is None or not confirmation.needs_gradients:
            return confirmation is not None and confirmation.needs_results
        may = not self._is_at_once or any(g.kind == "backward" for g in self._graphs)
        return may and torch.is_grad_enabled()

    def _confirm(self, args: Sequence[Any]) -> bool:
        """Compare a call with the module. Returns whether what was captured may answer it: if it differed the module
        answers from now on, as it does for other threads' calls meanwhile, and until gradients are compared too."""
        confirmation = self._confirmation
        if confirmation is None or not self._confirming.acquire(blocking=False):
            return False
        try:
            wrong = confirmation.compare(args, self._compiled)
            if wrong:
                self._left("examine", "wrong numbers", wrong)
            return not wrong and (self._is_at_once or not confirmation.needs_gradients)
        except Exception as e:  # results of a kind that torch does not compare
            self._left("examine", "raised", describe(e))
            return False
        finally:
            self._confirming.release()

    def _await_gradients(self) -> bool:
        """Whether gradients are still to be compared, which may need a backward pass of the caller's."""
        if self._confirmation is None or not self._confirmation.needs_gradients or not torch.is_grad_enabled():
            return False
        self._awaited += 1
        return self._awaited <= _AWAITED

    @property
    def _is_dynamic(self) -> bool:
        return any(g.is_dynamic for g in self._graphs)

    def _in_turns(self, *args: Any) -> Any:
        """A timed call of the side whose turn it is."""
        if (self._is_dynamic and any(g.is_compiling for g in self._graphs)) or are_saved_by_hooks():
            return self._module(*args)
        if self._awaits_quiet():
            return self._meanwhile(*args)
        with self._lock:
            call = self._turned
            self._turned += 1
            if self.answer == self._in_turns and self._is_decided(call >= _PATIENCE):
                return self.answer(*args)
        turn, place = divmod(call, _CALLS_OF_SIZES if self._is_dynamic else _CALLS)
        on_xrt = turn % 2 == 0
        side = self._compiled if on_xrt else self._module
        if not place:
            return side(*args)
        timing = _Timing(_elements(args) if self._is_dynamic else 1, self._device)
        before = self._comparisons
        results = timing.run(side, args)
        if self._comparisons == before:  # else both sides ran
            with self._lock:
                self._timings[on_xrt].append(timing)
        else:
            timing.close()
        return results

    @property
    def _comparisons(self) -> int:
        return sum(g.comparisons for g in self._graphs)

    def _awaits_quiet(self) -> bool:
        """Whether timings would decide for good, and XRT is busy with this graph or another, though not for long. Where
        sizes vary they do, unless constants that are tried make calls quicker."""
        if not is_busy() or not (self._is_dynamic or all(g.is_tuned for g in self._in_use)):
            return False
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since < _BUSY_SECONDS

    def _is_decided(self, at_once: bool) -> bool:
        """Whether there are enough timings; then the quicker side is the answer. at_once: those there are must do."""
        known = [[t for t in self._timings[side] if at_once or t.is_done(is_over=True)] for side in (True, False)]
        wanted = 2 * (_CALLS_OF_SIZES - 1) if self._is_dynamic else _CALLS - 1
        if any(len(k) < (1 if at_once else wanted) for k in known):
            return False
        xrt, eager = self._compared(*known)
        keeps = xrt <= eager
        if self._is_dynamic:  # other sizes may need a compilation
            self._race = False
        self.answer = (self._while_compiling if self._is_dynamic else self._compiled) if keeps else self._module
        self._meanwhile, self._waits_since = self.answer, None
        for t in itertools.chain(*self._timings.values()):
            t.close()
        self._timings = {True: [], False: []}
        for g in self._graphs:
            g.timed(xrt, eager, self._again)
        process_events.emit("torch.timed", graph=self._graphs[0].name, xrt=xrt, eager=eager, keeps=keeps)
        if not keeps and all(g.is_tuned for g in self._in_use):
            for g in self._graphs:
                g.release()
        return True

    def _compared(self, xrt: Sequence[_Timing], eager: Sequence[_Timing]) -> tuple[float, float]:
        """The seconds of a call by both: the least, or where sizes vary those of a call of middling size."""
        if not self._is_dynamic:
            return min(t.seconds for t in xrt), min(t.seconds for t in eager)
        return _for_one_size(xrt, eager)

    def _again(self) -> None:
        """Another engine is ready than the one that was timed."""
        with self._lock:
            self._turned, self._race, self.answer = 0, self._races, self._while_compiling


class _Timing:
    """The seconds of a call and of its backward pass. elements: of its arguments; device: whose work is waited for.

    The backward pass is over when the last function has run that hands a gradient to an argument, or to what made it:
    gradients of the arguments themselves may wait for other graphs.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self.elements, self._device = elements, device
        self.seconds = 0.0
        self._waits = self._runs = False
        self._begun = 0.0
        self._handles: list[Any] = []

    def is_done(self, is_over: bool = False) -> bool:
        """Whether both are known. is_over: whether calls have followed, so that a backward pass that began has ended,
        though some functions may not have been needed."""
        return not self._waits or (is_over and self._runs)

    def run(self, call: Call, args: Sequence[Any]) -> Any:
        before = {a.grad_fn for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None}
        start = self._now()
        results = call(*args)
        spent = self._now() - start
        self.seconds = spent
        made = [r for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        last = _last_functions([r.grad_fn for r in made], before)
        if last:
            self._waits = True
            missing = len(last)

            def ran(*_: Any) -> None:
                nonlocal missing
                missing -= 1
                if self._begun:
                    self._runs, self.seconds = True, spent + self._now() - self._begun
                    if not missing:
                        self._waits = False
                        self.close()

            self._handles = [torch.autograd.graph.register_multi_grad_hook(made, self._begin, mode="any")]
            self._handles += [f.register_hook(ran) for f in last]
        return results

    def _begin(self, _: Any) -> None:
        self._begun = self._now()

    def _now(self) -> float:
        finish(self._device)
        return time.perf_counter()

    def close(self) -> None:
        """Take the hooks away that wait for a backward pass."""
        for h in self._handles:
            h.remove()
        self._handles = []


def _last_functions(made: Sequence[Any], before: Collection[Any]) -> list[Any]:
    """The functions of a backward pass that hand gradients on to leaves, or to functions that were there before.
    made: those of the results."""
    found, seen, todo = [], set(before), [f for f in made if f not in before]
    while todo:
        f = todo.pop()
        if f in seen:
            continue
        seen.add(f)
        following = [g for g, _ in f.next_functions if g is not None]
        if any(g in before or not g.next_functions for g in following):
            found.append(f)
        todo += [g for g in following if g.next_functions]
    return found


def _elements(args: Sequence[Any]) -> int:
    """How many elements the tensors have that are no parameters; at least 1."""
    found = (a.numel() for a in args if isinstance(a, torch.Tensor) and not isinstance(a, torch.nn.Parameter))
    return max(1, sum(found))


def _for_one_size(xrt: Sequence[_Timing], eager: Sequence[_Timing]) -> tuple[float, float]:
    """The seconds of a call by both, for the geometric mean of the sizes of all.

    Time is taken to grow as a power of the size, which is the median of those that two calls of one side give (the
    estimator of Theil and Sen: https://doi.org/10.1080/01621459.1968.10480934).
    """
    points = [[(math.log(t.elements), math.log(max(t.seconds, 1e-9))) for t in side] for side in (xrt, eager)]
    pairs = (p for side in points for p in itertools.combinations(side, 2))
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in pairs if a != c]
    power = min(max(statistics.median(slopes), 0.0), 3.0) if slopes else 0.0
    middle = statistics.fmean(n for side in points for n, _ in side)
    a, b = (math.exp(statistics.median(t - power * (n - middle) for n, t in side)) for side in points)
    return a, b
