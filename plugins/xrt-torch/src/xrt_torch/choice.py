"""Choice: what answers the calls of one graph of TorchDynamo: its module in torch eager, or XRT.

The first call is eager's, and the graph is captured further at the second one: what is called once costs no more than
TorchDynamo. While XRT compiles, eager answers. Once XRT's results agree with eager's, the two take turns for a few
calls, each timed with its backward pass, and the quicker one answers from then on. They do so again when XRT has found
a quicker engine.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from xrt_core.events import process_events
from xrt_torch.compiled import CompiledGraph

_TURNS: Final = 4  # timed calls of each side, of which the first does not count
_PATIENCE: Final = 32  # calls after which the timings must do, though backward passes are missing

Call = Callable[..., Any]


class Choice:
    """Calls of one graph. answer: what takes the next call; it is replaced as things go on.

    module: the graph, in torch eager. capture: makes the same through AOTAutograd and XRT; None where that is not
    possible. graphs: where it adds what AOTAutograd made of the graph; the backward graph is added by the first
    backward pass. race: whether the quicker side is found out; else XRT answers where it can. at_once: whether the
    graph is captured now, and not at its second call.
    """

    def __init__(
        self,
        module: Call,
        capture: Callable[[], Call | None],
        graphs: list[CompiledGraph],
        *,
        race: bool,
        at_once: bool = True,
    ) -> None:
        self.answer: Call = self._once
        self._module, self._graphs, self._race = module, graphs, race
        self._capture: Callable[[], Call | None] | None = capture
        self._compiled: Call = module
        self._lock = threading.Lock()
        self._capturing = threading.RLock()  # a hook of torch's may call the graph that is being captured
        self._turn = 0
        self._timings: dict[bool, list[_Timing]] = {True: [], False: []}  # of XRT, of eager
        if at_once:
            self._captured()

    def _once(self, *args: Any) -> Any:
        self.answer = self._twice
        return self._module(*args)

    def _twice(self, *args: Any) -> Any:
        """The second call: one thread captures the graph, others that call meanwhile are eager's."""
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
        else:
            self._compiled, self.answer = compiled, self._while_compiling

    def _while_compiling(self, *args: Any) -> Any:
        graphs = self._graphs
        if any(g.is_compiling for g in graphs):
            return self._module(*args)
        if graphs and all(g.reason is not None for g in graphs):
            self.answer = self._module
        elif graphs and all(g.is_proven for g in graphs) and not any(g.is_dynamic for g in graphs):
            self.answer = self._in_turns if self._race else self._compiled
        return self._compiled(*args)

    def _in_turns(self, *args: Any) -> Any:
        """A timed call of the side whose turn it is."""
        with self._lock:
            turn = self._turn
            self._turn += 1
            if self.answer == self._in_turns and self._is_decided(turn >= _PATIENCE):
                return self.answer(*args)
        on_xrt = turn % 2 == 0
        timing = _Timing()
        results = timing.run(self._compiled if on_xrt else self._module, args)
        with self._lock:
            self._timings[on_xrt].append(timing)
        return results

    def _is_decided(self, at_once: bool) -> bool:
        """Whether there are enough timings; then the quicker side is the answer. at_once: those there are must do."""
        known = [[t.seconds for t in self._timings[side] if t.done or at_once][1:] for side in (True, False)]
        if any(len(k) < (1 if at_once else _TURNS - 1) for k in known):
            return False
        xrt, eager = map(min, known)
        keeps = xrt <= eager
        self.answer = self._compiled if keeps else self._module
        for t in itertools.chain(*self._timings.values()):
            t.close()
        self._timings = {True: [], False: []}
        for g in self._graphs:
            g.timed(xrt, eager, self._again)
        process_events.emit("torch.timed", graph=self._graphs[0].name, xrt=xrt, eager=eager, keeps=keeps)
        return True

    def _again(self) -> None:
        """Another engine is ready than the one that was timed."""
        with self._lock:
            self._turn, self.answer = 0, self._while_compiling


class _Timing:
    """The seconds of a call and of its backward pass. done: whether both are known."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.done = False
        self._begun = 0.0
        self._handles: list[Any] = []

    def run(self, call: Call, args: Sequence[Any]) -> Any:
        start = time.perf_counter()
        results = call(*args)
        self.seconds = time.perf_counter() - start
        made = [r for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        read = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        if not made or not read:
            self.done = True
            return results
        hook = torch.autograd.graph.register_multi_grad_hook
        self._handles = [hook(made, self._begin, mode="any"), hook(read, self._end, mode="all")]
        return results

    def _begin(self, _: Any) -> None:
        self._begun = time.perf_counter()

    def _end(self, _: Any) -> None:
        if self._begun and not self.done:
            self.seconds += time.perf_counter() - self._begun
            self.done = True
        self.close()

    def close(self) -> None:
        """Take the hooks away that wait for a backward pass."""
        for h in self._handles:
            h.remove()
        self._handles = []
