"""Fault isolation: from a build that is wrong, or that fails to compile, to the largest part of it that is right.

The fused build, then the engine's unfused build, then the faulty nodes go to the host and the others stay in as few
convex pieces as possible, then the host. Faulty nodes are found in two ways:

- *In isolation*: one compilation of the disjoint union of all nodes, each with inputs of its own from a run of the
host. It shows every node that is wrong by itself, however many there are.
- *By bisection*, if that shows nothing (the compiler fails, or nodes are only wrong together): the first half of the
nodes, on the host's values for its inputs, then the half that must have the fault, and so on: about log2(n)
compilations to one node (delta debugging). If both halves are right by themselves the function is cut there, and no
node is evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import Executable, Tolerance
from xrt_core.errors import CompileError, XRTError
from xrt_core.host.executor import run_node
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.verify.checker import ResultChecker, Rounding
from xrt_core.verify.inputs import SEQUENCE, synthesize_inputs
from xrt_core.verify.reference import ReferenceExecutor, Values, run_host
from xrt_core.verify.subgraph import Nodes, convex_partition, cut_after, disjoint_union, subfunction
from xrt_core.verify.verdict import HOST, Piece

NO_TOLERANCES: Final[Mapping[str, Tolerance]] = MappingProxyType({})


@dataclass(frozen=True)
class Candidate:
    """An engine to try a Function on.

    compile: (function, fused) -> executable; raises whatever the engine raises. tolerance: that the engine declares
    (`Engine.tolerance`). pieces: of the evaluated function, for a candidate that is another way to divide it; its
    faults are not isolated.
    """

    engine: str
    compile: Callable[[Function, bool], Executable]
    tolerance: Mapping[str, Tolerance] = field(default_factory=lambda: NO_TOLERANCES)
    pieces: tuple[Piece, ...] | None = None

    def build(self, function: Function, fused: bool) -> Executable:
        """The executable. Raises CompileError if it is none, and whatever the engine raises."""
        made = self.compile(function, fused)
        if not isinstance(made, Executable):
            raise CompileError(f"engine {self.engine!r} returned a {type(made).__name__}, expected an Executable")
        return made


class OutOfBudget(Exception):
    """The budget of compilations or time is used up."""


@dataclass
class Budget:
    """Budget of an evaluation: compilations, and the `clock` time after which none begins. made, seconds: used so
    far."""

    compiles: int
    until: float = float("inf")
    clock: Callable[[], float] = time.monotonic
    seconds: float = field(default=0.0, init=False)
    made: int = field(default=0, init=False)

    def build(self, candidate: Candidate, function: Function, fused: bool) -> Executable:
        """Compile within the budget. Raises OutOfBudget, and whatever the engine raises."""
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
    """Result of fault isolation.

    pieces: cover all nodes. executables: for each piece of an engine, in the order of `pieces`; None for the host's.
    offenders: faulty node -> what is wrong with it. complete: False if the budget was used up first, and unchecked
    nodes went to the host.
    """

    pieces: tuple[Piece, ...]
    executables: tuple[Executable | None, ...]
    offenders: Mapping[int, str]
    complete: bool = True

    @property
    def kept(self) -> int:
        """The number of nodes that the engine keeps."""
        return sum(len(p.nodes) for p in self.pieces if p.engine != HOST)


class FaultBisector:
    """Finds faulty nodes by bisection, until every convex piece of the others is good.

    reason: of nodes, what is wrong with them, "" for nothing. is_good: whether nodes can stay as they are; by default,
    if nothing is wrong with them. offenders, cuts: the faulty nodes, and the indices at which pieces are cut.
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
        """Run the bisection. Raises what the callables raise; earlier findings are kept."""
        while (bad := self._first_bad()) is not None:
            self._bisect(bad)

    def pieces(self) -> tuple[list[Nodes], list[Nodes]]:
        """The good and the faulty nodes, as convex pieces."""
        return convex_partition(self._body, self.offenders, self.cuts)

    def _first_bad(self) -> Nodes | None:
        return next((nodes for nodes in self.pieces()[0] if not self._is_good(nodes)), None)

    def _bisect(self, nodes: Nodes) -> None:
        """Evict one node of a bad piece, or cut the piece if both sides are right by themselves."""
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


class FaultIsolator:
    """Finds the parts of a Function that an engine computes correctly, within a budget of compilations.

    cases: inputs of the function, at least one of which the engine was wrong on.
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
        self._search = FaultBisector(function.body, self.reason, lambda nodes: self._right(nodes) is not None)

    def reject_whole(self, reason: str) -> None:
        """Note that the fused build of the whole is wrong, so that it is not tried again."""
        self._known[self._all, True] = reason, None

    def isolate(self, *, compiles: bool) -> Correction:
        """The pieces that are right. compiles: whether the function compiles at all; only then faulty nodes are first
        looked for in isolation."""
        complete = True
        try:
            if self._right(self._all) is None:
                if compiles:
                    self._search.offenders.update(self.find_faulty_nodes() or {})
                self._search.run()
        except OutOfBudget:
            complete = False
        return self._result(complete)

    def find_faulty_nodes(self) -> dict[int, str] | None:
        """Faulty node -> what is wrong with it, by one compilation of all nodes in isolation; None if that does not
        compile or run. Raises OutOfBudget."""
        nodes = [(i,) for i in self._all if not self.function.body.nodes[i].subgraphs]
        reasons = self._reasons(nodes)
        return None if reasons is None else {i: why for (i,), why in zip(nodes, reasons, strict=True) if why}

    def are_parts_right(self) -> bool:
        """Whether every part between discontinuous nodes is right on the host's values for its inputs, by one
        compilation of all parts; False if that cannot be found out.

        What an engine fuses lies within a part, unlike in a node by itself: a product of dequantised numbers with the
        quantisations before and behind it, for instance. A quantisation before it gets numbers that it does not round.
        Parts with attribute graphs are left out.
        """
        body = self.function.body
        jumps = set(Rounding(body).jumps.values())
        parts = []
        for nodes in cut_after(body, {i for i in self._all if body.nodes[i] in jumps}):
            before = {p for i in nodes for p in body.predecessors[i] if body.nodes[p].op_type == "QuantizeLinear"}
            parts.append(tuple(sorted(before.union(nodes))))
        try:
            reasons = self._reasons([p for p in parts if not any(body.nodes[i].subgraphs for i in p)])
        except OutOfBudget:
            return False
        return reasons is not None and not any(reasons)

    def _reasons(self, parts: Sequence[Nodes]) -> list[str] | None:
        """For each part what is wrong with it by itself, "" for nothing; None if that cannot be found out."""
        if len(parts) < 2:
            return None
        function, _, places = disjoint_union(self.function, parts)
        try:
            executable = self.budget.build(self.candidate, function, True)
        except OutOfBudget:
            raise
        except Exception:  # bisection finds the node on which the compiler fails
            return None
        found = [""] * len(parts)
        for values in self._cases_values():
            given = [x for nodes in parts for x in _inputs_of(subfunction(self.function, nodes).body, values)]
            checker = ResultChecker(function, given, self._seed, on_grid=True)
            differences = checker.check(executable, self.candidate.tolerance).differences
            if not differences:  # it raised, or returned no results
                return None
            for k, returns in enumerate(places):
                found[k] = found[k] or next((differences[i].reason for i in returns if differences[i].reason), "")
        return found

    def reason(self, nodes: Sequence[int], fused: bool = True) -> str:
        """What is wrong with a part of the function, on the host's values for its inputs; "" for nothing.

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
            check = ResultChecker(part, given, self._seed, results=own).check(executable, self.candidate.tolerance)
            if not check.is_right and not (
                check.is_doubtful and FaultIsolator(part, self.candidate, [given], self.budget).are_parts_right()
            ):
                return check.reason, None
        return "", executable

    def _right(self, nodes: Nodes) -> bool | None:
        """Which build of these nodes is right: True for the fused one, False for the unfused one, None for neither."""
        return next((fused for fused in (True, False) if not self.reason(nodes, fused)), None)

    def _cases_values(self) -> Sequence[Values]:
        """For each case every intermediate value, by the host in the function's own precision."""
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


def _inputs_of(part: Graph, values: Values) -> list[np.ndarray]:
    """The inputs of a part; those of quantisations that it reads as well are what their results stand for."""
    found = {v: values[v] for v in part.inputs}
    for n in part.nodes:
        x, q = n.inputs[0] if n.inputs else None, n.outputs[0]
        if n.op_type == "QuantizeLinear" and x in found and q in part.consumers:
            attributes = {k: a for k, a in n.attributes.items() if k in ("axis", "block_size")}
            back = Node("DequantizeLinear", [q, *n.inputs[1:]], [x], attributes, version=n.version)
            given = [None if v is None else v.data if v.data is not None else values[v] for v in back.inputs]
            found[x] = np.asarray(run_node(back, given)[0])
    return list(found.values())


@dataclass(frozen=True)
class NodeFault:
    """A faulty node. index: in the function. absolute, relative: its largest errors, as text; "" if it did not run.
    inputs: of the node, on which it is wrong."""

    index: int
    operator: str
    name: str
    absolute: str
    relative: str
    reason: str
    inputs: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Bisection:
    """Faulty nodes of a function on an engine. compiles: compilations that finding them took."""

    summary: str
    is_right: bool
    faults: tuple[NodeFault, ...] = ()
    compiles: int = 1


def bisect_function(
    function: Function,
    candidate: Candidate,
    inputs: Sequence[np.ndarray] | None = None,
    seed: int = 0,
    compiles: int = 200,
) -> Bisection:
    """Compile and check a function, and find its faulty nodes if it is wrong.

    inputs: to check on before the synthesized ones. Raises XRTError if the host cannot run the function.
    """
    total = len(function.body.nodes)
    cases: list[Sequence[np.ndarray]] = [] if inputs is None else [inputs]
    cases += [synthesize_inputs(function, kind, seed) for kind in SEQUENCE[:2]]
    budget, host = Budget(compiles), ReferenceExecutor(function)
    isolator = FaultIsolator(function, candidate, cases, budget, seed)
    reason, runs = "", False
    try:
        executable = budget.build(candidate, function, True)
        runs = True
    except Exception as e:  # whatever an engine raises
        reason = f"it does not compile: {type(e).__name__}: {e}"
    else:
        for case in cases:
            check = ResultChecker(function, case, seed, host=host).check(executable, candidate.tolerance)
            if not check.is_right:
                if check.is_doubtful and isolator.are_parts_right():
                    why = f"right ({total} nodes, each part between roundings to integers by itself)"
                    return Bisection(why, True, compiles=budget.made)
                reason = check.reason
                break
    if not reason:
        return Bisection(f"right ({total} nodes)", True)
    isolator.reject_whole(reason)
    found = isolator.isolate(compiles=runs)
    faults = tuple(_fault(function, candidate, i, why, cases, seed) for i, why in found.offenders.items())
    kept, took = found.kept, f"{budget.made} compilations"
    if faults:
        summary = f"{len(faults)} of {total} nodes are faulty, found with {took}; {candidate.engine} can keep {kept}"
    elif kept == total and len(found.pieces) == 1:
        summary = f"wrong with fusions, right without: {reason}"
    elif kept == total:
        summary = f"wrong as a whole, right in {len(found.pieces)} pieces: {reason}"
    else:
        summary = f"wrong, and no faulty node was found ({took}): {reason}"
    if not found.complete:
        summary += "; some nodes were not checked, allow more compilations"
    return Bisection(summary, False, faults, budget.made)


def inputs_of_clusters(graph: Graph, arrays: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
    """The inputs of the clusters of a partitioned graph, by name, computed by the host from the inputs of the graph.

    Clusters that depend on control flow, or on a node that the host cannot run on these inputs, are left out.
    """
    env: dict[Value, Any] = {v: np.asarray(arrays[v.name]) for v in graph.inputs if v.name in arrays}
    env |= {v: x for v, x in graph.defaults.items() if v not in env}
    found: dict[str, list[np.ndarray]] = {}
    for n in graph.nodes:
        given = [None if v is None else v.data if v.data is not None else env.get(v) for v in n.inputs]
        if n.subgraphs or any(g is None and v is not None for g, v in zip(given, n.inputs, strict=True)):
            continue
        function = n.attributes.get("function")
        try:
            if isinstance(function, Function):
                found[function.name] = [np.asarray(g) for g in given]
                results: Sequence[Any] = run_host(function, found[function.name])[0]
            else:
                results = run_node(n, given)
        except XRTError:
            continue
        env.update((v, r) for v, r in zip(n.outputs, results, strict=False) if v is not None)
    return found


def _fault(
    function: Function, candidate: Candidate, index: int, reason: str, cases: Sequence[Sequence[np.ndarray]], seed: int
) -> NodeFault:
    node = function.body.nodes[index]
    part = subfunction(function, [index])
    absolute = relative = ""
    given: tuple[np.ndarray, ...] = ()
    for case in cases:
        values = run_host(function, case, keep=True)[1]
        given = tuple(values[v] for v in part.body.inputs)
        try:
            check = ResultChecker(part, given, seed).check(candidate.build(part, True), candidate.tolerance)
        except XRTError:
            break
        except Exception:  # it does not compile: there are no errors to measure
            break
        if check.differences:
            absolute = f"{max(d.absolute for d in check.differences):.3g}"
            relative = f"{max(d.relative for d in check.differences):.3g}"
        if not check.is_right:
            break
    return NodeFault(index, node.operator, node.name, absolute, relative, reason, given)
