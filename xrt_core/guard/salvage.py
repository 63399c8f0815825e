"""What is done when an examination ends its process: who did it, engine or node, is found and left out.

Where other engines have the cluster the one that did it is left out. Otherwise parts of the cluster are compiled, each
in a child that may end as well, until the nodes that did it are known, and the rest is examined without them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from xrt_core.guard.worker import TRYING
from xrt_core.guard.worker_pool import WorkerFailure
from xrt_core.ir.graph import Graph
from xrt_core.verify.isolate import FaultBisector, OutOfBudget
from xrt_core.verify.subgraph import Nodes
from xrt_core.verify.verdict import Faults, Outcome

LIMIT: Final = 3.0
"""All children of one cluster together may take so many times the time limit of one."""

LEAST_NODES: Final = 8
"""In a cluster of fewer nodes nobody looks for the one at fault: every look may cost a child, and little is saved."""

_KINDS: Final = ("crashed", "hung", "memory")


class Failed(NamedTuple):
    """How a candidate ended a child. stage: "compile" or "examine"."""

    stage: str
    failure: WorkerFailure


class Ask(Protocol):
    """Has a child do a request."""

    def __call__(self, extra: Mapping[str, Any], timeout: float, stage: Callable[[str], None]) -> dict[str, Any]:
        """The answer to the request with `extra` in it. Raises WorkerFailure where the child brings none."""


def most_probes(nodes: int) -> int:
    """So many parts of a cluster are tried: what two nodes at fault take."""
    return 2 * math.ceil(math.log2(max(nodes, 2))) + 8


def examined_in_child(
    body: Graph,
    names: Sequence[str],
    ask: Ask,
    timeout: float,
    compiled: Callable[[], None],
    *,
    salvage: bool = True,
    is_wanted: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Outcome, dict[str, Failed]]:
    """The outcome for a cluster that a child examines on the engines `names`, and the failures that this outcome
    survived, by engine.

    ask: what a child is asked by. timeout: seconds for one child; all together have `LIMIT` times as long. compiled: is
    called when something has been compiled. salvage: whether anything is tried after a failure. is_wanted: False once
    nobody waits for the outcome.

    Raises WorkerFailure: the first one, where nothing could be saved.
    """
    until = clock() + LIMIT * timeout
    failures: dict[str, Failed] = {}

    def examined(candidates: Sequence[str], faults: Mapping[str, Faults]) -> Outcome | None:
        """The outcome; None after a failure, which is noted."""
        engine, stage = candidates[0], "compile"

        def hear(said: str) -> None:
            nonlocal engine, stage
            if said.startswith(TRYING):
                engine, stage = said.removeprefix(TRYING), "compile"
            else:
                stage = "examine"
                compiled()

        extra = {"candidates": list(candidates), "faults": {name: f.to_json() for name, f in faults.items()}}
        try:
            return Outcome.from_json(answered(ask, extra, min(timeout, until - clock()), hear)["outcome"])
        except WorkerFailure as e:
            if not salvage or e.kind not in _KINDS or not is_wanted():
                raise
            failures.setdefault(engine if engine in candidates else candidates[0], Failed(stage, e))
            return None

    while (left := [n for n in names if n not in failures]) and clock() < until:
        outcome = examined(left, {})
        if outcome is not None:
            if not failures or outcome.verdict in ("ready", "slower"):
                return _with(outcome, failures), failures
            break
    for engine, (_, failure) in list(failures.items()):
        if len(body.nodes) < LEAST_NODES or clock() >= until:
            continue
        faults = _Probes(body, engine, ask, failure, timeout, until, clock, is_wanted).faults()
        if faults is None or clock() >= until:
            continue
        outcome = examined([engine], {engine: faults} if faults.offenders or faults.cuts else {})
        if outcome is not None and outcome.verdict in ("ready", "slower"):
            return _with(outcome, failures), failures
    raise next(iter(failures.values())).failure


def answered(ask: Ask, extra: Mapping[str, Any], timeout: float, hear: Callable[[str], None]) -> dict[str, Any]:
    """The answer of a child. Raises WorkerFailure, also where the child says that it failed."""
    answer = ask(extra, timeout, hear)
    if "error" in answer:
        raise WorkerFailure(answer["kind"], answer["error"])
    return answer


class _Probes:
    """Parts of a cluster, each compiled and run once in a child, to see which of them end it."""

    def __init__(
        self,
        body: Graph,
        engine: str,
        ask: Ask,
        failure: WorkerFailure,
        timeout: float,
        until: float,
        clock: Callable[[], float],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._body, self._engine, self._ask, self._failure = body, engine, ask, failure
        self._until, self._clock, self._is_wanted = until, clock, is_wanted
        self._left = most_probes(len(body.nodes))
        self._seconds = timeout / (math.log2(len(body.nodes)) + 4)  # a part that hangs costs no more than that
        self._all: Nodes = tuple(range(len(body.nodes)))
        self._known: dict[Nodes, str] = {self._all: f"{failure.kind}: {failure}"}

    def faults(self) -> Faults | None:
        """What to do without; no offenders and no cuts where the failure does not come again; None where nothing
        would be left. What could not be looked at counts as at fault."""
        search = FaultBisector(self._body, self._reason)
        try:
            search.run()
            if not search.offenders and not self._probed(self._all):
                return Faults(self._known[self._all])
        except OutOfBudget:
            for nodes in search.pieces()[0]:
                if self._known.get(nodes) != "":
                    search.offenders.update((i, "nobody could look at it") for i in nodes)
        if len(search.offenders) == len(self._all):
            return None
        return Faults(self._known[self._all], dict(sorted(search.offenders.items())), tuple(sorted(search.cuts)))

    def _reason(self, nodes: Nodes) -> str:
        if nodes not in self._known:
            self._known[nodes] = self._probed(nodes)
        return self._known[nodes]

    def _probed(self, nodes: Nodes) -> str:
        """How a child ends that compiles and runs these nodes; "" where it does not. Raises OutOfBudget."""
        seconds = min(self._seconds, self._until - self._clock())
        if self._left <= 0 or seconds <= 0 or not self._is_wanted():
            raise OutOfBudget
        self._left -= 1
        extra = {"probe": {"engine": self._engine, "nodes": list(nodes)}}
        try:
            answered(self._ask, extra, seconds, lambda stage: None)
        except WorkerFailure as e:
            if e.kind in _KINDS:  # what it says itself, the examination finds
                return f"{e.kind}: {e}"
        return ""


def _with(outcome: Outcome, failures: Mapping[str, Failed]) -> Outcome:
    said = tuple(f"{engine}: {e.kind}: {e}" for engine, (_, e) in failures.items())
    return dataclasses.replace(outcome, errors=said + outcome.errors)
