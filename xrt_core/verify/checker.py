"""ResultChecker: runs an executable and compares its results with the host's.

A result is right if it is within the bounds of `compare` of the host's result in the function's own precision, which
takes one run of the host. Only if it is out of bounds does the host run again, on inputs that are off by a few rounding
steps: what the function makes of rounding then widens the bounds, so that cancelling sums, ties of ArgMax or TopK, and
values on the edge between two integers do not count as wrong. What is still out of bounds is compared with the host in
a wider precision (`reference.run_host`), in the same two steps, for the host may be further off than the candidate.

The first step allows the bound and the host's own error together, the last one the bound and `NOISE` times the host's
error, so that the short path is no more lenient than the long one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.engine.contract import Executable, RunOptions, Tolerance
from xrt_core.errors import XRTError
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.op_traits import draws_random, is_discontinuous, is_exact, traits_of
from xrt_core.ir.types import dtype_name
from xrt_core.kernels.namespace import float_like
from xrt_core.runtime.arrays import to_numpy
from xrt_core.verify.compare import ROUNDED, Difference, compare, float_dtypes, table, tolerance_for
from xrt_core.verify.reference import ReferenceExecutor, run_host, wide_dtype

RUNS: Final = 2
"""Runs of a candidate on each set of inputs, so that results that differ between runs are found."""

FLIP_SHARE: Final = 1e-3
"""Share of the elements behind a rounding to integers that may be rounded the other way."""

_NO_DONATION: Final = RunOptions(donate=False)
_PERTURBATION: Final = 4.0  # rounding steps, of the inputs of the host's second run

_UNIT: Final = frozenset(("Sigmoid", "HardSigmoid"))
"""Operators whose results libraries round at the scale of their range, 1, also where all are tiny: one library's
logistic function is 1/2 plus a polynomial."""

_OF_A_SUM: Final = 1 / 16
"""Rounding steps allowed for each term of a sum. Some libraries add sequentially, which was off by 1/27 of a step a
term on means of 6480 products of few distinct values; the host adds pairwise."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of checking one executable.

    reason: "" if all results are right. differences: for each return of the function the worst of the runs; empty if
    nothing could be compared. tolerance: the engine's reason for a tolerance of its own, if that was used. is_doubtful:
    only floats behind a rounding to integers are out of bounds, by no more than such a rounding explains: then the
    function is right if each of its nodes is right by itself.
    """

    reason: str
    differences: tuple[Difference, ...] = ()
    tolerance: str = ""
    is_doubtful: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the executable passes on these inputs."""
        return not self.reason


class ResultChecker:
    """Checks executables of one Function on one set of inputs. The host's results are computed when first needed.

    host: the reference executor of the function, if the caller has one. results: the host's on these inputs, if the
    caller has them. host_runs: how often the host has run the function so far.
    """

    def __init__(
        self,
        function: Function,
        inputs: Sequence[np.ndarray],
        seed: int = 0,
        *,
        host: ReferenceExecutor | None = None,
        results: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.function = function
        self.inputs = tuple(_read_only(x) for x in inputs)
        self.host_runs = 0
        self._seed = seed
        self._host = host or ReferenceExecutor(function)
        self._own = None if results is None else [np.asarray(r) for r in results]
        self._wide: list[np.ndarray] | None = None
        self._off: list[np.ndarray] | None = None
        self._dtypes = float_dtypes(function.body)
        self._random, self._flipped = _traits(function.body)
        self._unit = _unit_scaled(function.body)
        self._terms = _terms(function.body)

    def for_inputs(self, inputs: Sequence[np.ndarray]) -> ResultChecker:
        """A checker for other inputs of the same function; the analysis of the function is shared."""
        other = copy.copy(self)
        other.inputs = tuple(_read_only(x) for x in inputs)
        other.host_runs = 0
        other._own = other._wide = other._off = None
        return other

    def expected(self) -> list[np.ndarray]:
        """The results of the host in the function's own precision. Raises XRTError where the host fails."""
        if self._own is None:
            self.host_runs += 1
            self._own = self._host.run(self.inputs)
        return self._own

    def widened(self) -> list[np.ndarray]:
        """The results of the host in a wider precision, where there is one. Raises XRTError where the host fails."""
        if self._wide is None:
            width = wide_dtype(self.function.body).itemsize
            if all(float_like(d) and d.itemsize >= width for d in self._dtypes):
                return self.expected()
            self.host_runs += 1
            self._wide = run_host(self.function, self.inputs, wide=True)[0]
        return self._wide

    @property
    def is_informative(self) -> bool:
        """Whether at least half of the host's floating results are finite; a set of NaN shows nothing."""
        floats = [x for x in self.expected() if float_like(x.dtype) and x.size]
        return not floats or sum(int(np.isfinite(x).sum()) for x in floats) * 2 >= sum(x.size for x in floats)

    def check(self, executable: Executable, own: Mapping[str, Tolerance]) -> Check:
        """Run the executable `RUNS` times and compare its results with the host's.

        own: tolerances that the engine declares. Raises XRTError only if the host fails.
        """
        self.expected()
        runs: list[list[np.ndarray]] = []
        copies: list[list[np.ndarray]] = []
        for k in range(RUNS):
            given = [x.copy() for x in self.inputs]
            try:
                raw = executable.run(given, _NO_DONATION)
                reason = _misfit(raw, self.function.returns)
                results = [] if reason else [np.asarray(to_numpy(r)) for r in raw]
            except Exception as e:  # whatever an engine raises is a finding
                return Check(f"it raised {type(e).__name__}: {e}")
            reason = reason or self._misused(given, results)
            if reason:
                return Check(reason)
            runs.append(results)
            copies.append([r.copy() for r in results] if k + 1 < RUNS else results)  # the next run may overwrite them
        for p, first, second in zip(self.function.returns, runs[0], runs[1], strict=True):
            if first.size and np.may_share_memory(first, second):
                return Check(f"result {p.name!r} of one run shares the memory of an earlier run's results")
        return self._compare(copies, own)

    def check_results(self, results: Sequence[np.ndarray], own: Mapping[str, Tolerance]) -> Check:
        """Compare given results for the inputs with the host's. Raises XRTError if the host fails."""
        return self._compare([results], own)

    def _misused(self, given: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> str:
        for p, mine, x in zip(self.function.params, self.inputs, given, strict=True):
            if not _same_bytes(x, mine):
                return f"it wrote into its input {p.name!r}"
        for p, r in zip(self.function.returns, results, strict=True):
            if r.dtype != p.dtype or r.shape != p.shape:
                return f"result {p.name!r} is {dtype_name(r.dtype)}{list(r.shape)}, expected {p.type}"
            if r.size and any(np.may_share_memory(r, x) for x in given if x.size):
                return f"result {p.name!r} shares the memory of an input"
        return ""

    def _compare(self, runs: Sequence[Sequence[np.ndarray]], own: Mapping[str, Tolerance]) -> Check:
        worst: list[Difference] = []
        reasons: dict[str, None] = {}
        failed, doubtful = "", True
        for k, (p, v) in enumerate(zip(self.function.returns, self.function.body.outputs, strict=True)):
            size = runs[0][k].size
            if v in self._random:
                worst.append(Difference(0.0, 0.0, 0, size, size))
                continue
            tolerance = _widened_for_sum(tolerance_for(p.dtype, self._dtypes, own), p.dtype, self._terms.get(v, 0))
            if tolerance.reason:
                reasons[tolerance.reason] = None
            spare = math.floor(FLIP_SHARE * size + 0.9) if v in self._flipped else 0
            found = [self._difference(r[k], k, tolerance, spare) for r in _distinct(runs, k)]
            bad = [d for d in found if not d.is_right]
            worst.append(bad[0] if bad else max(found, key=lambda d: d.absolute))
            if bad and not failed:
                failed = f"result {p.name!r}: {bad[0].reason}"
                if 0 < len(bad) < len(found):
                    failed += ", in some runs only"
            if bad:
                lenient = table()[ROUNDED]
                doubtful &= v in self._flipped and all(compare(r[k], self.widened()[k], lenient).is_right for r in runs)
        return Check(failed, tuple(worst), "; ".join(reasons), bool(failed) and doubtful)

    def _difference(self, got: np.ndarray, k: int, tolerance: Tolerance, spare: int) -> Difference:
        scale = 1.0 if self.function.body.outputs[k] in self._unit else 0.0
        for reference in (self.expected, self.widened):
            found = compare(got, reference()[k], tolerance, spare=spare, scale=scale)
            if not found.is_right:
                found = compare(got, reference()[k], tolerance, host=self._perturbed()[k], spare=spare, scale=scale)
            if found.is_right:
                break
        return found

    def _perturbed(self) -> list[np.ndarray]:
        """The host's results for perturbed inputs."""
        if self._off is None:
            self.host_runs += 1
            rng = np.random.default_rng(self._seed)
            try:
                self._off = self._host.run([_perturbed(x, rng) for x in self.inputs])
            except XRTError:  # an operator that accepts only the original values
                self._off = self.expected()
        return self._off


def _distinct(runs: Sequence[Sequence[np.ndarray]], k: int) -> list[Sequence[np.ndarray]]:
    """The runs whose result `k` differs from that of the runs before."""
    found: list[Sequence[np.ndarray]] = []
    for r in runs:
        if not any(_same_bytes(r[k], x[k]) for x in found):
            found.append(r)
    return found


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype and shape have the same bits."""
    one, other = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def _misfit(raw: Any, returns: Sequence[Parameter]) -> str:
    try:
        count = len(raw)
    except TypeError:
        return f"it returned a {type(raw).__name__}, expected a sequence of {len(returns)} results"
    return "" if count == len(returns) else f"it returned {count} results, expected {len(returns)}"


def _traits(body: Graph) -> tuple[set[Value], set[Value]]:
    """The values that depend on random numbers, and those that depend on a discontinuous function of rounded values."""
    random: set[Value] = set()
    rounded: set[Value] = set()
    flipped: set[Value] = set()
    for node in body.nodes:
        given = [v for v in node.inputs if v is not None]
        outputs = [v for v in node.outputs if v is not None]
        is_rounded = any(v in rounded for v in given)
        if draws_random(node) or any(v in random for v in given):
            random.update(outputs)
        if any(v in flipped for v in given) or (is_rounded and is_discontinuous(node)):
            flipped.update(outputs)
        if is_rounded or (not is_exact(node) and any(_is_float(v) for v in (*given, *outputs))):
            rounded.update(outputs)
        if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):  # its division rounds first
            flipped.update(outputs)
    return random, flipped


def _unit_scaled(body: Graph) -> set[Value]:
    """The values that `_UNIT` operators produce, also after operators that only move elements."""
    found: set[Value] = set()
    for node in body.nodes:
        if node.op_type in _UNIT or (is_exact(node) and any(v in found for v in node.inputs if v is not None)):
            found.update(v for v in node.outputs if v is not None)
    return found


def _terms(body: Graph) -> dict[Value, int]:
    """For each value that depends on a sum, the number of terms of the longest one."""
    found: dict[Value, int] = {}
    for node in body.nodes:
        given = [v for v in node.inputs if v is not None]
        count = max((found.get(v, 0) for v in given), default=0)
        if traits_of(node).sums and given:
            summed = given[1] if node.op_type.endswith("Loss") else given[0]
            results = max(1, min(_size(v) for v in node.outputs if v is not None))
            count = max(count, _size(summed) // results)
        if count:
            found.update((v, count) for v in node.outputs if v is not None)
    return found


def _size(value: Value) -> int:
    """Elements of a value of static shape, 1 of any other."""
    shape = getattr(value.type, "shape", None)
    return math.prod(shape) if shape is not None and value.is_static else 1


def _widened_for_sum(tolerance: Tolerance, dtype: np.dtype, terms: int) -> Tolerance:
    """The tolerance, widened for a sum of `terms` terms. Narrow floats are summed in float32."""
    if not terms or not float_like(dtype):
        return tolerance
    step = float(np.finfo(np.float64 if dtype == np.float64 else np.float32).eps)
    return replace(tolerance, relative=tolerance.relative + _OF_A_SUM * step * terms)


def _is_float(value: Value) -> bool:
    return value.dtype is not None and (float_like(value.dtype) or value.dtype.kind == "c")


def _read_only(x: np.ndarray) -> np.ndarray:
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view


def _perturbed(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`x` off by a few rounding steps; whole numbers stay, as they may be indices or masks."""
    if not float_like(x.dtype):
        return x
    finfo: Any = ml_dtypes.finfo
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        noise = _PERTURBATION * float(finfo(x.dtype).eps) * rng.uniform(-1.0, 1.0, x.shape)
        return np.where(wide == np.rint(wide), wide, wide * (1.0 + noise)).astype(x.dtype)
