"""Which cases an engine takes: each is shown to its `supports` in every form it may be taken in."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from xrt_core.engine.contract import Function
from xrt_core.ir.types import dtype_name, float_like
from xrt_core.testing.functions import forms_of
from xrt_core.testing.generated import all_generated
from xrt_core.testing.node_cases import Case, all_cases
from xrt_core.testing.subject import Subject

PER_OPERATOR = 2
"""Number of backend tests of each operator that run by default."""

_LARGE = 1 << 14


@dataclass(frozen=True, eq=False)
class Claimed:
    """A case that an engine takes, as the Function it takes and the arguments. sample: whether it runs by default."""

    key: str
    case: Case
    function: Function
    arguments: list[np.ndarray]
    sample: bool

    def __repr__(self) -> str:
        return self.key


@dataclass
class Claims:
    """What an engine takes and refuses.

    onnx, generated: the cases it takes. refused: key of a backend test or generated case -> (operator, reason).
    offered, taken: dtype (of `dtype_of`) -> number of cases.
    """

    onnx: list[Claimed] = field(default_factory=list)
    generated: list[Claimed] = field(default_factory=list)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    offered: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)

    @property
    def operators(self) -> dict[str, str]:
        """Operator -> "" where a case of it is taken, else a reason why none is."""
        found = dict(reversed(self.refused.values()))
        found.update((c.case.node.operator, "") for c in (*self.onnx, *self.generated))
        return dict(sorted(found.items()))

    def keys(self) -> Iterator[str]:
        """Everything that a line of the lists may be about, except tests."""
        for c in (*self.onnx, *self.generated):
            yield c.key
        yield from self.refused
        yield from (f"operator/{o}" for o in self.operators)


def dtype_of(case: Case) -> str:
    """The dtype that a case is about: of its first floating input, else of its first input, else of its output."""
    arrays = [x for x in (*case.inputs, *case.outputs) if x is not None]
    floating = (x.dtype for x in case.inputs if x is not None and float_like(x.dtype))
    return dtype_name(next(floating, arrays[0].dtype))


@functools.cache
def claims_of(subject: Subject, full: bool) -> Claims:
    """What the engine takes of the backend tests, and of the generated cases (all of them if `full`).

    Whatever `supports` raises is raised.
    """
    claims = Claims()
    dtypes, simulated = subject.capabilities.dtypes, subject.capabilities.simulated

    def wanted(case: Case) -> bool:
        arrays = [x for x in (*case.inputs, *case.outputs) if x is not None]
        if simulated and any(x.size >= _LARGE for x in arrays):
            return False
        return dtypes is None or all(dtype_name(x.dtype) in dtypes for x in arrays)

    onnx = [c for c in all_cases() if c.is_numeric and wanted(c)]
    counts: Counter[str] = Counter()
    taken = [(key, c, form) for key, c in _keyed("onnx", onnx) if (form := _form(subject, key, c, claims)) is not None]
    totals = Counter(c.node.operator for _, c, _ in taken)
    for key, case, (function, arguments) in taken:
        operator = case.node.operator
        sample = counts[operator] in _spread(totals[operator], PER_OPERATOR)
        counts[operator] += 1
        claims.onnx.append(Claimed(key, case, function, arguments, sample))
    for g in all_generated():
        if full or g.sample:
            made = g.case()
            if made is not None and wanted(made):
                key = f"generated/{g.id}"
                form = _form(subject, key, made, claims)
                if form is not None:
                    claims.generated.append(Claimed(key, made, *form, g.sample))
    return claims


def _form(subject: Subject, key: str, case: Case, claims: Claims) -> tuple[Function, list[np.ndarray]] | None:
    """The first form of the case whose node the engine takes; None, and a refusal on record, where it takes none."""
    reason = ""
    claims.offered[dtype_of(case)] += 1
    for function, arguments in forms_of(case, subject.name):
        verdict = subject.supports(function.body.nodes[0])
        if verdict:
            claims.taken[dtype_of(case)] += 1
            return function, arguments
        reason = reason or verdict.reason
    claims.refused[key] = (case.node.operator, reason)
    return None


def _keyed(kind: str, cases: Iterable[Case]) -> Iterator[tuple[str, Case]]:
    seen: Counter[str] = Counter()
    for c in cases:
        seen[c.name] += 1
        yield f"{kind}/{c.name}" + (f"#{seen[c.name]}" if seen[c.name] > 1 else ""), c


def _spread(count: int, wanted: int) -> set[int]:
    """`wanted` indices spread over `count`."""
    return {i * count // wanted for i in range(min(wanted, count))}
