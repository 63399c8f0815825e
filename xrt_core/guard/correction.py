"""Gradual correction: from a build that is wrong or does not compile to the largest part of it that is right.

fused -> the engine's unfused build -> the nodes at fault go to the host, and the rest stays in as few convex pieces as
possible -> the host. Faults are looked for in two ways:

- *Apart*: one compilation of all nodes side by side, each with inputs of its own from a run of the host. Every node
  that is wrong by itself shows, however many there are, and none hides behind another.
- *Bisection*: where that shows nothing (the compiler fails, or nodes are only wrong together), the first half of the
  nodes, on the host's values for what enters it, then the half that must hold the fault, and so on: about log2(n)
  compilations to one node. Where both halves are right by themselves, cutting there is the cure, and nobody is evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from xrt_core.engine.contract import Executable, Tolerance
from xrt_core.errors import CompileError
from xrt_core.guard.outcome import HOST, Faults, Piece
from xrt_core.guard.pieces import Nodes, convex_pieces, side_by_side, subfunction
from xrt_core.guard.reference import Values, run_host
from xrt_core.guard.verification import Referee
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph

NO_TOLERANCES: Final[Mapping[str, Tolerance]] = MappingProxyType({})


@dataclass(frozen=True)
class Candidate:
    """An engine that a Function is tried on.

    compile: (function, fused) -> executable; raises whatever the engine raises. tolerance: what the engine declares
    about its own precision (`Engine.tolerance`). pieces: of the function that is examined, where this is no candidate
    of its own but another way to share the function out: it is not corrected.
    """

    engine: str
    compile: Callable[[Function, bool], Executable]
    tolerance: Mapping[str, Tolerance] = field(default_factory=lambda: NO_TOLERANCES)
    pieces: tuple[Piece, ...] | None = None

    def build(self, function: Function, fused: bool) -> Executable:
        """The executable. Raises CompileError where it is none, and whatever the engine raises."""
        made = self.compile(function, fused)
        if not isinstance(made, Executable):
            raise CompileError(f"engine {self.engine!r} returned a {type(made).__name__}, expected an Executable")
        return made


class OutOfBudget(Exception):
    """No more compilations may be made."""


@dataclass
class Budget:
    """What an examination may cost: compilations, and a moment of `clock` (seconds) after which no other begins."""

    compiles: int
    until: float = float("inf")
    clock: Callable[[], float] = time.monotonic
    seconds: float = field(default=0.0, init=False)
    made: int = field(default=0, init=False)

    def build(self, candidate: Candidate, function: Function, fused: bool) -> Executable:
        """Compile, and count it. Raises OutOfBudget, and whatever the engine raises."""
        if self.made >= self.compiles or self.clock() > self.until:
            raise OutOfBudget
        self.made += 1
        start = self.clock()
        try:
            return candidate.build(function, fused)
        finally:
            self.seconds += self.clock() - start


@dataclass(frozen=True, slots=True)
class Correction:
    """What correction left.

    pieces: cover all nodes. executables: for each piece of an engine, in the order of `pieces` (None for the host's).
    offenders: node -> what it does wrong. complete: False where the budget ended first, and nodes that nobody looked
    at went to the host.
    """

    pieces: tuple[Piece, ...]
    executables: tuple[Executable | None, ...]
    offenders: Mapping[int, str]
    complete: bool = True

    @property
    def kept(self) -> int:
        """How many nodes the engine keeps."""
        return sum(len(p.nodes) for p in self.pieces if p.engine != HOST)


class Search:
    """Looks for nodes at fault by bisection, until every convex piece without them is good.

    reason: of nodes, what is wrong with them; "" for nothing. is_good: whether they can stay as they are; where it is
    left out, they can where nothing is wrong with them. offenders, cuts: what is known, and after `run` what was found.
    """

    def __init__(
        self, body: Graph, reason: Callable[[Nodes], str], is_good: Callable[[Nodes], bool] | None = None
    ) -> None:
        self.offenders: dict[int, str] = {}
        self.cuts: set[int] = set()
        self._body = body
        self._reason = reason
        self._is_good = is_good or (lambda nodes: not reason(nodes))

    def run(self) -> None:
        """Search. Raises what the callables raise; what was found until then stays."""
        while (bad := self._first_bad()) is not None:
            self._bisect(bad)

    def pieces(self) -> tuple[list[Nodes], list[Nodes]]:
        """The nodes that stay and the offenders, as convex pieces."""
        return convex_pieces(self._body, self.offenders, self.cuts)

    def _first_bad(self) -> Nodes | None:
        return next((nodes for nodes in self.pieces()[0] if not self._is_good(nodes)), None)

    def _bisect(self, nodes: Nodes) -> None:
        """Evict one node of a bad piece, or cut it where both sides are right."""
        cut: int | None = None
        while len(nodes) > 1:
            left, right = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
            if self._reason(left):
                nodes, cut = left, None
            else:
                nodes, cut = right, right[0] if cut is None else cut
        reason = self._reason(nodes)
        if reason or cut is None:
            self.offenders[nodes[0]] = reason
        else:
            self.cuts.add(cut)


class Corrector:
    """Finds the parts of a Function that an engine gets right. Every compilation is taken from `budget`.

    cases: inputs of the function, at least one of them such that the engine was wrong.
    """

    def __init__(
        self,
        function: Function,
        candidate: Candidate,
        cases: Sequence[Sequence[np.ndarray]],
        budget: Budget,
        seed: int = 0,
    ) -> None:
        self.function = function
        self.candidate = candidate
        self.budget = budget
        self._cases = cases
        self._seed = seed
        self._values: list[Values] = []
        self._known: dict[tuple[Nodes, bool], tuple[str, Executable | None]] = {}
        self._all: Nodes = tuple(range(len(function.body.nodes)))
        self._nodes_are_right = False  # each by itself, but for the offenders
        self._search = Search(function.body, self.reason, lambda nodes: self._right(nodes) is not None)

    def known_wrong(self, reason: str) -> None:
        """Say that the fused build of the whole is wrong, so that it is not tried again."""
        self._known[self._all, True] = reason, None

    def known_faults(self, faults: Faults) -> None:
        """Say what was found before: the whole is not tried at all."""
        for fused in (True, False):
            self._known[self._all, fused] = faults.reason, None
        self._search.offenders.update(faults.offenders)
        self._search.cuts.update(faults.cuts)

    def correct(self, *, apart: bool) -> Correction:
        """The pieces that are right. apart: look for nodes that are wrong by themselves first (there is no use in it
        where the function does not even compile)."""
        complete = True
        try:
            if self._right(self._all) is None:
                if apart:
                    self._search.offenders.update(self.find_apart() or {})
                self._search.run()
        except OutOfBudget:
            complete = False
        return self._result(complete)

    def find_apart(self) -> dict[int, str] | None:
        """The nodes that are wrong by themselves, found by one compilation, each with what is wrong; None where they
        do not compile or run side by side. Raises OutOfBudget."""
        nodes = [i for i in self._all if not self.function.body.nodes[i].subgraphs]
        if len(nodes) < 2:
            return None
        function, meant, places = side_by_side(self.function, nodes)
        try:
            executable = self.budget.build(self.candidate, function, True)
        except OutOfBudget:
            raise
        except Exception:  # then bisection finds the node that breaks the compiler
            return None
        found: dict[int, str] = {}
        for values in self._cases_values():
            own = [values[v] for i in nodes for v in self.function.body.nodes[i].outputs if v is not None]
            referee = Referee(function, [values[v] for v in meant], self._seed, results=own)
            differences = referee.judge(executable, self.candidate.tolerance).differences
            if not differences:  # it raised, or gave something else than the results
                return None
            for i, returns in zip(nodes, places, strict=True):
                reason = next((differences[k].reason for k in returns if differences[k].reason), "")
                if reason:
                    found.setdefault(i, reason)
        self._nodes_are_right = len(nodes) == len(self._all)
        return found

    def are_right_apart(self) -> bool:
        """Whether every node is right by itself; False where that cannot be found out."""
        try:
            return self.find_apart() == {}
        except OutOfBudget:
            return False

    def reason(self, nodes: Sequence[int], fused: bool = True) -> str:
        """What is wrong with a part of the function, on the host's values for what enters it; "" for nothing.

        Raises OutOfBudget.
        """
        key = (tuple(nodes), fused)
        if key not in self._known:
            self._known[key] = self._tried(key[0], fused)
        return self._known[key][0]

    def _tried(self, nodes: Nodes, fused: bool) -> tuple[str, Executable | None]:
        part = subfunction(self.function, nodes)
        try:
            executable = self.budget.build(self.candidate, part, fused)
        except OutOfBudget:
            raise
        except Exception as e:  # whatever an engine raises
            return f"it does not compile: {type(e).__name__}: {e}", None
        for values in self._cases_values():
            given, own = ([values[v] for v in ends] for ends in (part.body.inputs, part.body.outputs))
            check = Referee(part, given, self._seed, results=own).judge(executable, self.candidate.tolerance)
            if not check.is_right and not (check.is_doubtful and self._nodes_are_right):
                return check.reason, None
        return "", executable

    def _right(self, nodes: Nodes) -> bool | None:
        """Which build of these nodes is right: True for the fused one, False for the unfused one, None for neither."""
        return next((fused for fused in (True, False) if not self.reason(nodes, fused)), None)

    def _cases_values(self) -> Sequence[Values]:
        """For each case every value on the way, by the host in the function's own precision."""
        while len(self._values) < len(self._cases):
            self._values.append(run_host(self.function, self._cases[len(self._values)], keep=True)[1])
        return self._values

    def _result(self, complete: bool) -> Correction:
        stay, leave = self._search.pieces()
        pieces: list[tuple[Piece, Executable | None]] = [(Piece(HOST, nodes), None) for nodes in leave]
        for nodes in stay:
            right = next((f for f in (True, False) if self._known.get((nodes, f), ("unknown",))[0] == ""), None)
            if right is None:
                pieces.append((Piece(HOST, nodes), None))
            else:
                pieces.append((Piece(self.candidate.engine, nodes, right), self._known[nodes, right][1]))
        pieces.sort(key=lambda p: p[0].nodes)
        offenders = dict(sorted(self._search.offenders.items()))
        return Correction(tuple(p for p, _ in pieces), tuple(x for _, x in pieces), offenders, complete)
