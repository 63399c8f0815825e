"""The nodes of a Function that an engine gets wrong, with the errors of each, for people who want to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.errors import XRTError
from xrt_core.guard.correction import Budget, Candidate, Corrector
from xrt_core.guard.pieces import subfunction
from xrt_core.guard.reference import Host, run_host
from xrt_core.guard.stimuli import SEQUENCE, stimulus
from xrt_core.guard.verification import Referee
from xrt_core.host.executor import run_node
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Value


@dataclass(frozen=True)
class Fault:
    """One node at fault. index: in the function. absolute, relative: its largest errors, as text; "" where it did not
    run. inputs: of the node, on which it is wrong."""

    index: int
    operator: str
    name: str
    absolute: str
    relative: str
    reason: str
    inputs: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Bisection:
    """What was found out about a function on an engine. compiles: compilations that it took."""

    summary: str
    is_right: bool
    faults: tuple[Fault, ...] = ()
    compiles: int = 1


def bisect_function(
    function: Function,
    candidate: Candidate,
    inputs: Sequence[np.ndarray] | None = None,
    seed: int = 0,
    compiles: int = 200,
) -> Bisection:
    """Compile and check a function; where that fails, find the nodes at fault (see `correction`).

    inputs: to check on, before the made-up ones. Raises XRTError where the host cannot run the function.
    """
    total = len(function.body.nodes)
    cases: list[Sequence[np.ndarray]] = [] if inputs is None else [inputs]
    cases += [stimulus(function, kind, seed) for kind in SEQUENCE[:2]]
    budget, host = Budget(compiles), Host(function)
    corrector = Corrector(function, candidate, cases, budget, seed)
    reason, runs = "", False
    try:
        executable = budget.build(candidate, function, True)
        runs = True
    except Exception as e:  # whatever an engine raises
        reason = f"it does not compile: {type(e).__name__}: {e}"
    else:
        for case in cases:
            check = Referee(function, case, seed, host=host).judge(executable, candidate.tolerance)
            if not check.is_right:
                if check.is_doubtful and corrector.are_right_apart():
                    why = f"right ({total} nodes, each by itself; as a whole off by what rounding to integers explains)"
                    return Bisection(why, True, compiles=budget.made)
                reason = check.reason
                break
    if not reason:
        return Bisection(f"right ({total} nodes)", True)
    corrector.known_wrong(reason)
    found = corrector.correct(apart=runs)
    faults = tuple(_fault(function, candidate, i, why, cases, seed) for i, why in found.offenders.items())
    kept, took = found.kept, f"{budget.made} compilations"
    if faults:
        summary = f"{len(faults)} of {total} nodes at fault, found with {took}; {candidate.engine} can keep {kept}"
    elif kept == total and len(found.pieces) == 1:
        summary = f"wrong with fusions, right without: {reason}"
    elif kept == total:
        summary = f"wrong as a whole, right in {len(found.pieces)} pieces: {reason}"
    else:
        summary = f"wrong, and no node was found ({took}): {reason}"
    if not found.complete:
        summary += "; not all was looked at, allow more compilations"
    return Bisection(summary, False, faults, budget.made)


def inputs_of_clusters(graph: Graph, arrays: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
    """For the clusters of a partitioned graph their inputs, by name, computed by the host from the inputs of the graph.

    Clusters behind control flow, or behind a node that the host does not run on these inputs, are left out.
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
) -> Fault:
    node = function.body.nodes[index]
    part = subfunction(function, [index])
    absolute = relative = ""
    given: tuple[np.ndarray, ...] = ()
    for case in cases:
        values = run_host(function, case, keep=True)[1]
        given = tuple(values[v] for v in part.body.inputs)
        try:
            check = Referee(part, given, seed).judge(candidate.build(part, True), candidate.tolerance)
        except XRTError:
            break
        except Exception:  # it does not compile: there are no errors to show
            break
        if check.differences:
            absolute = f"{max(d.absolute for d in check.differences):.3g}"
            relative = f"{max(d.relative for d in check.differences):.3g}"
        if not check.is_right:
            break
    return Fault(index, node.operator, node.name, absolute, relative, reason, given)
