"""ResultChecker: runs an executable and compares its results with the host's.

A result is right if it is within the bounds of `compare` of the host's result in the function's own precision, which
takes one run of the host. Only if it is out of bounds does the host run again, on inputs that are off by a few rounding
steps: what the function makes of rounding then widens the bounds, so that cancelling sums do not count as wrong. What
is still out of bounds is compared with the host in a wider precision (`reference.run_host`), in the same two steps, for
the host may be further off than the candidate. Last, the host rounds each operation otherwise
(`reference.run_rounded`): where inputs are whole numbers or rows are constant, it may be exact by luck in what cancels
for everybody else, as E[x^2] - E[x]^2 of a constant row, and products that cancel in front of a steep function may be
added up in any order; how far a sound implementation may be from the true value is seen only so.

Where the host computes on a device, candidates are given arrays that are there and the host's results come from there;
NumPy's host judges what is out of bounds of those, in a wider precision or in the function's own where that is the
widest, as the doubt is then about the device's host too.

Results of discontinuous operators on rounded numbers have bounds on the operator's inputs instead: a result is right if
inputs within the bounds give it (`_unexplained`), so that ties of ArgMax or TopK and values on the edge between two
integers may fall to either side, and no others. What depends on such results has no such bounds: if it is off, it is
doubtful, and the caller compiles and checks the parts between the discontinuous nodes, each on the host's values.

The first step allows the bound and the host's own error together, the last one the bound and `NOISE` times the host's
error, so that the short path is no more lenient than the long one.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.engine.contract import Executable, RunOptions, Tolerance
from xrt_core.errors import XRTError
from xrt_core.host.executor import run_node
from xrt_core.host.place import overlap
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import draws_random, is_discontinuous, is_exact, traits_of
from xrt_core.ir.types import TensorType, dtype_name, float_like
from xrt_core.runtime.arrays import to_numpy
from xrt_core.verify.compare import (
    ROUNDED,
    Difference,
    bounds_of,
    compare,
    float_dtypes,
    table,
    tolerance_for,
    widened_for_products,
)
from xrt_core.verify.reference import (
    PRODUCTS,
    ReferenceExecutor,
    Values,
    host_values,
    run_host,
    run_rounded,
    wide_dtype,
)

RUNS: Final = 2
"""Runs of a candidate on each set of inputs, so that results that differ between runs are found."""

_DRAWN: Final = 64
"""Random numbers, at least, of which the median is compared."""

_NO_DONATION: Final = RunOptions(donate=False)
_PERTURBATION: Final = 4.0  # rounding steps, of the inputs of the host's second run
_ROUNDED_BY: Final = 1.0  # rounding steps, of the result of each operation, in the runs that round otherwise
_OF_ROUNDED: Final = 0.375  # of how far these are off, as a rounding step is the least that moves a float
_FIRST_ROUNDED_RUNS: Final = 4
_ROUNDED_RUNS: Final = 8
"""Runs that round otherwise: the first, then one by one up to so many, as in some of them roundings cancel by luck."""
_FAR: Final = 0.1  # of an element: how far those move that show a chaotic function
_MANY: Final = 1e-3  # of the elements: so many may, as differences of nearly equal numbers do anywhere

_NEAR: Final = 4.0  # bounds, that elements of results may be off by which are nearly within
_FEW: Final = 1e-3  # of the elements: so many may be off by more than one bound

_QUANTISES: Final = frozenset(("DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear"))
"""Operators that round to integers what they have divided by a scale, so that they jump for exact inputs too."""

_SAMPLES: Final = 8
"""How often the inputs of a discontinuous node are moved: in all directions (`_SIGNS`: of its first input, and of the
others), and each element in a random one."""
_POOL_VERSION: Final = 12
_SIGNS: Final = ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0))

_UNIT: Final = frozenset(("Celu", "Elu", "GRU", "HardSigmoid", "LSTM", "RNN", "Selu", "Sigmoid"))
"""Operators whose results libraries round at the scale of 1, also where all are tiny: one library's logistic function
is 1/2 plus a polynomial, and an exponential less 1 has the rounding of 1. So has the tanh of a recurrent cell that is
computed as (1 - e) / (1 + e) with e = exp(-2x): on a state of 7.6e-5 one is off by a sixth of a rounding step of 1."""

_MOST_OPERANDS: Final = 16
"""Results of elementwise operators on more arrays than these are judged by their largest element."""

_OF_A_SUM: Final = 1 / 16
"""Rounding steps allowed for each term of a sum. Some libraries add sequentially, which was off by 1/27 of a step a
term on means of 6480 products of few distinct values; the host adds pairwise."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of checking one executable.

    reason: "" if all results are right. differences: for each return of the function the worst of the runs; empty if
    nothing could be compared. tolerance: the engine's reason for a tolerance of its own, if that was used. is_doubtful:
    only results that depend on a discontinuous node are out of bounds, by no more than that may explain: then the
    function is right if the parts between its discontinuous nodes are (`isolate.FaultIsolator.are_parts_right`).
    """

    reason: str
    differences: tuple[Difference, ...] = ()
    tolerance: str = ""
    is_doubtful: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the executable passes on these inputs."""
        return not self.reason


class Nearness(Enum):
    """Where results are at a first look: WITHIN the bounds of the host's; NEAR, as they are where rounding moves a few
    elements further, which is still to be judged; or FAR."""

    WITHIN = "within"
    NEAR = "near"
    FAR = "far"


class ResultChecker:
    """Checks executables of one Function on one set of inputs. The host's results are computed when first needed.

    host: the reference executor of the function, if the caller has one. results: the host's on these inputs, if the
    caller has them. on_grid: quantisations of params that the function itself reads do not round these inputs.
    host_runs: how often the host has run the function so far.
    """

    def __init__(
        self,
        function: Function,
        inputs: Sequence[np.ndarray],
        seed: int = 0,
        *,
        host: ReferenceExecutor | None = None,
        results: Sequence[np.ndarray] | None = None,
        on_grid: bool = False,
    ) -> None:
        self.function = function
        self.inputs = tuple(_read_only(x) for x in inputs)
        self.host_runs = 0
        self._seed = seed
        self._host = host or ReferenceExecutor(function)
        self._own = None if results is None else [np.asarray(r) for r in results]
        self._wide: list[np.ndarray] | None = None
        self._off: list[np.ndarray] | None = None
        self._off_on_cpu: list[np.ndarray] | None = None
        self._rounded_runs = 0
        self._otherwise: list[_Moved] | None = None
        self._moved: tuple[Values, Values] | None = None
        self._dtypes = float_dtypes(function.body)
        self._rounding = Rounding(function.body, on_grid=on_grid)
        self._drawn = {v for n in function.body.nodes if draws_random(n) for v in n.outputs}
        self._unit = _unit_scaled(function.body)
        self._terms = _terms(function.body)
        self._products = _products(function.body)
        self._operands = _elementwise_operands(function.body)

    def for_inputs(self, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray] | None = None) -> ResultChecker:
        """A checker for other inputs of the same function, and the host's results for them where they are known; the
        analysis of the function is shared."""
        other = copy.copy(self)
        other.inputs = tuple(_read_only(x) for x in inputs)
        other.host_runs = other._rounded_runs = 0
        other._own = None if results is None else [np.asarray(r) for r in results]
        other._wide = other._off = other._off_on_cpu = other._otherwise = other._moved = None
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
            is_widest = all(float_like(d) and d.itemsize >= width for d in self._dtypes)
            if is_widest and self._host.place.on_cpu:
                return self.expected()
            self.host_runs += 1
            if is_widest:
                self._wide = run_host(self.function, self.inputs)[0]
                return self._wide
            self._wide = run_host(self.function, self.inputs, wide=True)[0]
        return self._wide

    @property
    def host_seconds(self) -> float:
        """Seconds of the host's fastest run of the function, 0 if it has not run."""
        return self._host.seconds if math.isfinite(self._host.seconds) else 0.0

    @property
    def is_informative(self) -> bool:
        """Whether at least half of the host's floating results are finite; a set of NaN shows nothing."""
        floats = [x for x in self.expected() if float_like(x.dtype) and x.size]
        return not floats or sum(int(np.isfinite(x).sum()) for x in floats) * 2 >= sum(x.size for x in floats)

    @property
    def is_chaotic(self) -> bool:
        """Whether a few rounding steps of the inputs move many results of the host by a tenth of themselves, or those
        of its operations do, as far as it has run with other ones.

        As in the gradient of a recurrent network whose weights are large, which grows at every step, or in a Softmax of
        logits whose rounding steps are larger than 1. Any two libraries differ on such inputs. Raises XRTError where
        the host fails.
        """
        if self._moves_far(self.expected(), self._perturbed()):
            return True
        otherwise = self._otherwise
        return otherwise is not None and self._moves_far(self.widened(), [m.value() for m in otherwise])

    def _moves_far(self, results: Sequence[np.ndarray], moved: Sequence[np.ndarray]) -> bool:
        for v, want, other in zip(self.function.body.outputs, results, moved, strict=True):
            if not float_like(want.dtype) or v in self._rounding.random or v in self._rounding.flipped:
                continue
            with np.errstate(all="ignore"):
                far = np.abs(_wide(other) - _wide(want)) > _FAR * np.abs(_wide(want))
            if np.count_nonzero(far & np.isfinite(want)) > max(_MANY * want.size, 1):
                return True
        return False

    def check(self, executable: Executable, own: Mapping[str, Tolerance]) -> Check:
        """Run the executable `RUNS` times and compare its results with the host's.

        own: tolerances that the engine declares; those of the executable come before them. Raises XRTError only if the
        host fails.
        """
        own = {**own, **(executable.tolerance or {})}
        self.expected()
        runs: list[Sequence[Any]] = []
        copies: list[list[np.ndarray]] = []
        for k in range(RUNS):
            reason, results, raw = self._run(executable)
            if reason:
                return Check(reason)
            runs.append(raw)
            copies.append([r.copy() for r in results] if k + 1 < RUNS else results)  # the next run may overwrite them
        for p, first, second in zip(self.function.returns, runs[0], runs[1], strict=True):
            if overlap(first, second):
                return Check(f"result {p.name!r} of one run shares the memory of an earlier run's results")
        return self._compare(copies, own)

    def run(self, executable: Executable) -> tuple[str, list[np.ndarray]]:
        """Run the executable once, on copies of the inputs where the host computes: what is wrong apart from the
        numbers, "" for nothing, and the results."""
        reason, results, _ = self._run(executable)
        return reason, results

    def _run(self, executable: Executable) -> tuple[str, list[np.ndarray], Sequence[Any]]:
        """As `run`, and the results as the executable gave them; NumPy's arrays where those are on the CPU."""
        place = self._host.place
        given = place.copies(self.inputs)
        try:
            with place.within():
                raw = executable.run(given, _NO_DONATION)
                reason = _misfit(raw, self.function.returns)
                results = [] if reason else [np.asarray(to_numpy(r)) for r in raw]
        except Exception as e:  # whatever an engine raises is a finding
            return f"it raised {type(e).__name__}: {e}", [], ()
        if reason:
            return reason, [], ()
        where = [r if isinstance(x, np.ndarray) or place.on_cpu else x for x, r in zip(raw, results, strict=True)]
        return self._misused(given, results, where), results, where

    def check_results(self, results: Sequence[np.ndarray], own: Mapping[str, Tolerance]) -> Check:
        """Compare given results for the inputs with the host's. Raises XRTError if the host fails."""
        return self._compare([results], own)

    def nearness(self, results: Sequence[np.ndarray], own: Mapping[str, Tolerance]) -> Nearness:
        """Where results are that are compared with the host's as they are, which takes no further run of it."""
        nearness = Nearness.WITHIN
        for k, (p, v) in enumerate(zip(self.function.returns, self.function.body.outputs, strict=True)):
            if v in self._rounding.random:
                return Nearness.FAR
            tolerance, want = self._tolerance(v, p.dtype, self._dtypes, own), self.expected()[k]
            found = self._plain(results[k], k, tolerance, want)
            if found.is_right:
                continue
            wider = replace(tolerance, absolute=_NEAR * tolerance.absolute, relative=_NEAR * tolerance.relative)
            if found.outside > _FEW * found.size or not self._plain(results[k], k, wider, want).is_right:
                return Nearness.FAR
            nearness = Nearness.NEAR
        return nearness

    def _misused(self, given: Sequence[Any], results: Sequence[np.ndarray], where: Sequence[Any]) -> str:
        for p, mine, x in zip(self.function.params, self.inputs, given, strict=True):
            if not same_bytes(to_numpy(x), mine):
                return f"it wrote into its input {p.name!r}"
        for p, r, place in zip(self.function.returns, results, where, strict=True):
            if r.dtype != p.dtype or not p.fits(r.shape):
                return f"result {p.name!r} is {dtype_name(r.dtype)}{list(r.shape)}, expected {p.type}"
            if r.size and any(overlap(place, x) for x in given if x.size):
                return f"result {p.name!r} shares the memory of an input"
        return ""

    def _compare(self, runs: Sequence[Sequence[np.ndarray]], own: Mapping[str, Tolerance]) -> Check:
        worst: list[Difference] = []
        reasons: dict[str, None] = {}
        failed, doubtful = "", True
        for k, (p, v) in enumerate(zip(self.function.returns, self.function.body.outputs, strict=True)):
            size = runs[0][k].size
            if v in self._rounding.random:
                reason = next((why for r in runs if (why := _undrawn(r[k], self.expected()[k], v in self._drawn))), "")
                failed, doubtful = failed or (reason and f"result {p.name!r}: {reason}"), doubtful and not reason
                worst.append(Difference(0.0, 0.0, 0, size, size, reason))
                continue
            tolerance = self._tolerance(v, p.dtype, self._dtypes, own)
            if tolerance.reason:
                reasons[tolerance.reason] = None
            found = [self._difference(r[k], k, tolerance, own) for r in _distinct(runs, k)]
            bad = [d for d in found if not d.is_right]
            worst.append(bad[0] if bad else max(found, key=lambda d: d.absolute))
            if bad and not failed:
                failed = f"result {p.name!r}: {bad[0].reason}"
                if 0 < len(bad) < len(found):
                    failed += ", in some runs only"
            if bad:
                lenient = replace(table()[ROUNDED], share=table()[ROUNDED].share + 1 / max(size, 1))
                doubtful &= v in self._rounding.flipped and all(
                    compare(r[k], self.widened()[k], lenient).is_right for r in runs
                )
        return Check(failed, tuple(worst), "; ".join(reasons), bool(failed) and doubtful)

    def _tolerance(
        self,
        v: Value,
        dtype: np.dtype,
        others: Iterable[np.dtype],
        own: Mapping[str, Tolerance],
        terms: int | None = None,
    ) -> Tolerance:
        found = widened_for_products(tolerance_for(dtype, others, own), self._products.get(v, 0))
        return _widened_for_sum(found, dtype, self._terms.get(v, 0) if terms is None else terms)

    def _difference(self, got: np.ndarray, k: int, tolerance: Tolerance, own: Mapping[str, Tolerance]) -> Difference:
        v = self.function.body.outputs[k]
        jump = self._rounding.jumps.get(v)
        steps = (
            (self.expected, lambda: (self._perturbed(),), tolerance),
            (self.widened, lambda: (self._perturbed_on_cpu(),), tolerance),
            (self.widened, self._rounded, self._tolerance(v, got.dtype, self._dtypes, own, terms=0)),  # moves sums
        )
        for reference, moved, allowed in steps:
            found = self._plain(got, k, allowed, reference()[k])
            if found.is_right or got.shape != reference()[k].shape:
                break
            if jump is not None and v not in self._rounding.flipped:
                radii = self._radii(jump, own)
                return self._judged(jump, jump.outputs.index(v), got, reference()[k], tolerance, radii, found)
            for other in moved():
                found = self._plain(got, k, allowed, reference()[k], other[k])
                if found.is_right:
                    return found
        return found

    def _plain(
        self, got: np.ndarray, k: int, tolerance: Tolerance, want: np.ndarray, moved: np.ndarray | None = None
    ) -> Difference:
        """How result `k` compares with one reference. moved: as `host` of `compare`."""
        v = self.function.body.outputs[k]
        scale = 1.0 if v in self._unit else 0.0
        return compare(got, want, tolerance, host=moved, scale=scale, sizes=self._sizes(v, got.shape))

    def _sizes(self, v: Value, shape: tuple[int, ...]) -> np.ndarray | None:
        """For each element of a result of elementwise operators the largest finite operand at its place; None for
        other results."""
        operands = self._operands.get(v)
        if not operands:
            return None
        given = dict(zip(self.function.body.inputs, self.inputs, strict=True))
        sizes = np.zeros(shape)
        for u in operands:
            x = u.data if u.data is not None else given[u]
            size = np.abs(_wide(x))
            if not _broadcasts(size.shape, shape):  # it gives its type alone
                continue
            sizes = np.maximum(sizes, np.where(np.isfinite(size), size, 0.0))
        return sizes

    def _judged(
        self,
        node: Node,
        k: int,
        got: np.ndarray,
        want: np.ndarray,
        tolerance: Tolerance,
        radii: Sequence[np.ndarray | None],
        strict: Difference,
    ) -> Difference:
        """The difference of result `k` of a discontinuous node, whose inputs may be off by `radii`."""
        given = _given(node, self._before()[0])
        with np.errstate(all="ignore"):
            wrong, allowed = _unexplained(node, k, given, radii, got, want, bounds_of(want, tolerance), self._seed)
            if np.shape(wrong) != got.shape:  # of another result of the node: a scale, which is continuous
                return strict
            steps = np.asarray(np.abs(_wide(got) - _wide(want)))[wrong]
        if node.op_type in _QUANTISES and not float_like(got.dtype) and not (steps > 1).any():
            allowed = math.floor(table()[ROUNDED].share * got.size)
        outside = int(np.count_nonzero(wrong))
        reason = ""
        if outside > allowed:
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            reason = (
                f"{outside} of {got.size} elements are none that {node.op_type} gives for inputs within their bounds "
                f"({allowed} may be): at {list(at)} it is {got[at]}, not {want[at]}"
            )
        return replace(strict, outside=outside, allowed=allowed, reason=reason)

    def _radii(self, node: Node, own: Mapping[str, Tolerance]) -> list[np.ndarray | None]:
        """How far the elements of each floating input of a discontinuous node may be off."""
        values, moved = self._before()
        radii: list[np.ndarray | None] = []
        for v, x in zip(node.inputs, _given(node, values), strict=True):
            if v is None or x is None or not float_like(x.dtype):
                radii.append(None)
            elif v in self._rounding.rounded:
                tolerance = tolerance_for(x.dtype, self._dtypes, own)
                tolerance = widened_for_products(tolerance, self._products.get(v, 0))
                tolerance = _widened_for_sum(tolerance, x.dtype, self._terms.get(v, 0))
                radii.append(bounds_of(x, tolerance, moved[v]))
            else:  # exact, but for the scaling of a quantisation
                steps = _PERTURBATION if node.op_type in _QUANTISES else 0.0
                radii.append(steps * _eps(x.dtype) * np.abs(_wide(x)))
        return radii

    def _before(self) -> tuple[Values, Values]:
        """The inputs of the discontinuous nodes that give results, by the host: as they are, and where the function's
        inputs are perturbed."""
        if self._moved is None:
            nodes = [n for v in self.function.body.outputs if (n := self._rounding.jumps.get(v)) is not None]
            wanted = {v for n in nodes for v in n.inputs if v is not None and v.data is None}
            own = host_values(self.function.body, self.inputs, wanted)
            self.host_runs += 2
            try:
                moved = host_values(self.function.body, self._perturbed_inputs(), wanted)
            except XRTError:
                moved = own
            self._moved = own, moved
        return self._moved

    def _perturbed(self) -> list[np.ndarray]:
        """The host's results for perturbed inputs."""
        if self._off is None:
            self.host_runs += 1
            try:
                self._off = self._host.run(self._perturbed_inputs())
            except XRTError:  # an operator that accepts only the original values
                self._off = self.expected()
        return self._off

    def _perturbed_on_cpu(self) -> list[np.ndarray]:
        """The same by NumPy: a device's host that is wrong is as wrong for perturbed inputs."""
        if self._host.place.on_cpu:
            return self._perturbed()
        if self._off_on_cpu is None:
            self.host_runs += 1
            try:
                self._off_on_cpu = run_host(self.function, self._perturbed_inputs())[0]
            except XRTError:
                self._off_on_cpu = self.widened()
        return self._off_on_cpu

    def _rounded(self) -> Iterator[list[np.ndarray]]:
        """For each element of the results, how far runs that round otherwise move it, as a number that is so far from
        the true one: of the first runs, then with each further one. Raises XRTError where the host fails."""
        if self._otherwise is None:
            self._otherwise = [_Moved(x) for x in self.widened()]
            self._rng = np.random.default_rng(self._seed)
        while True:
            if self._rounded_runs >= _FIRST_ROUNDED_RUNS:
                yield [m.value() for m in self._otherwise]
            if self._rounded_runs == _ROUNDED_RUNS:
                return
            self._rounded_runs += 1
            self.host_runs += 1
            with contextlib.suppress(XRTError):  # an operator that accepts only the original values
                for m, x in zip(
                    self._otherwise, run_rounded(self.function, self.inputs, self._rng, _ROUNDED_BY), strict=True
                ):
                    m.add(x)

    def _perturbed_inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self._seed)
        return [_perturbed(x, rng) for x in self.inputs]


def _distinct(runs: Sequence[Sequence[np.ndarray]], k: int) -> list[Sequence[np.ndarray]]:
    """The runs whose result `k` differs from that of the runs before."""
    found: list[Sequence[np.ndarray]] = []
    for r in runs:
        if not any(same_bytes(r[k], x[k]) for x in found):
            found.append(r)
    return found


def _undrawn(got: np.ndarray, want: np.ndarray, is_drawn: bool) -> str:
    """Why numbers cannot come from the distribution of the host's, "" if they may. is_drawn: they come straight from
    the generator, one independent of the other."""
    mine, theirs = _wide(got), _wide(want)
    if np.isfinite(theirs).all() and not np.isfinite(mine).all():
        return "random numbers are not finite, the host's are"
    if is_drawn and got.size >= _DRAWN and np.isfinite(theirs).all():
        for a, b in ((mine, theirs), (theirs, mine)):
            if not a.min() <= np.median(b) <= a.max():
                return f"random numbers lie between {mine.min():.4g} and {mine.max():.4g}, the host's elsewhere"
    return ""


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype and shape have the same bits."""
    one, other = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def _misfit(raw: Any, returns: Sequence[Parameter]) -> str:
    try:
        count = len(raw)
    except TypeError:
        return f"it returned a {type(raw).__name__}, expected a sequence of {len(returns)} results"
    return "" if count == len(returns) else f"it returned {count} results, expected {len(returns)}"


class Rounding:
    """What rounding does to the values of a graph.

    random: values that depend on random numbers. rounded: that rounding may have changed. jumps: results of
    discontinuous nodes on rounded values -> the node. flipped: values that depend on such results. on_grid: as for
    `ResultChecker`.
    """

    def __init__(self, body: Graph, *, on_grid: bool = False) -> None:
        settled = set(body.inputs) if on_grid else set()
        self.random: set[Value] = set()
        self.rounded: set[Value] = set()
        self.jumps: dict[Value, Node] = {}
        self.flipped: set[Value] = set()
        for node in body.nodes:
            given = [v for v in node.inputs if v is not None]
            outputs = [v for v in node.outputs if v is not None]
            is_rounded = any(v in self.rounded for v in given)
            if draws_random(node) or any(v in self.random for v in given):
                self.random.update(outputs)
            if any(v in self.flipped or v in self.jumps for v in given):
                self.flipped.update(outputs)
            if node.op_type == "QuantizeLinear" and given[0] in settled and node.outputs[0] in body.consumers:
                continue
            classifies = traits_of(node).classifies
            if node.op_type in _QUANTISES or classifies or (is_rounded and is_discontinuous(node)):
                self.jumps.update((v, node) for v in outputs)
            if is_rounded or (not is_exact(node) and any(_is_float(v) for v in (*given, *outputs))):
                self.rounded.update(outputs)


def _given(node: Node, values: Values) -> list[np.ndarray | None]:
    return [None if v is None else v.data if v.data is not None else values[v] for v in node.inputs]


def _unexplained(
    node: Node,
    k: int,
    given: Sequence[np.ndarray | None],
    radii: Sequence[np.ndarray | None],
    got: np.ndarray,
    want: np.ndarray,
    bound: np.ndarray,
    seed: int,
) -> tuple[np.ndarray, int]:
    """Which elements of result `k` of a discontinuous node no inputs within `radii` of the given ones explain, and how
    many may be.

    Of indices, the elements that they point to must agree. Other elements must lie, up to `bound`, between the least
    and the greatest that the node gives for inputs moved to the ends of their intervals; where an input can move any
    result, as many others as move may be wrong, for not all combinations are tried.
    """
    x, radius = given[0], radii[0]
    if x is not None and radius is not None and (pick := _picker(node, k)) is not None:
        (ours, right), (theirs, _) = pick(_wide(x), got), pick(_wide(x), want)
        agree = (ours == theirs) | (np.abs(ours - theirs) <= pick(radius, got)[0] + pick(radius, want)[0])
        return (got != want) & ~(right & agree), 0
    if node.op_type == "Equal":
        apart = np.abs(_wide(given[0]) - _wide(given[1]))
        return (got != want) & (apart > sum(r for r in radii if r is not None)), 0
    rng = np.random.default_rng(seed)
    first = next((i for i, r in enumerate(radii) if r is not None), 0)
    low, high = _wide(want), _wide(want)
    for sample in range(_SAMPLES):
        moved = list(given)
        for i, (array, r) in enumerate(zip(given, radii, strict=True)):
            if array is not None and r is not None:
                together = _SIGNS[sample][0 if i == first else 1] if sample < len(_SIGNS) else None
                sign = together or rng.choice((-1.0, 1.0), array.shape)
                moved[i] = (_wide(array) + sign * r).astype(array.dtype)
        if node.op_type == "MaxPoolGrad":  # its last input is the result of the pooling
            pool = Node("MaxPool", [node.inputs[1]], [node.inputs[2]], node.attributes, version=_POOL_VERSION)
            moved[2] = np.asarray(run_node(pool, [moved[1]])[0])
        result = np.asarray(run_node(node, moved)[k])
        if result.shape == want.shape:
            low, high = np.fmin(low, _wide(result)), np.fmax(high, _wide(result))
    is_local = traits_of(node).elementwise or node.op_type in _QUANTISES
    if is_local and float_like(got.dtype) and radius is not None:  # results on the way to the ends, as of Mod
        bound = bound + radius
    if traits_of(node).classifies and k == 0:
        return (got != want) & ~_tied(node, given, got, want), int(np.count_nonzero(high != low))
    mine = _wide(got)
    same = (got == want) | (np.isnan(mine) & np.isnan(_wide(want)))
    inside = same | ((mine >= low - bound) & (mine <= high + bound))
    return ~inside, 0 if is_local else int(np.count_nonzero(high - low > 2 * bound))


def _tied(node: Node, given: Sequence[np.ndarray | None], got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where two labels of a classifier have scores that are equal but for rounding."""
    plain = {name: a for name, a in node.attributes.items() if name not in ("prob_a", "prob_b")}
    scores = _wide(run_node(node.replace(attributes=plain), given)[1])
    sizes = np.maximum(np.abs(scores).max(axis=1, initial=0.0), 1.0)
    labels: Any = node.attributes.get("classlabels_int64s") or node.attributes.get("classlabels_ints") or ()
    if node.op_type == "SVMClassifier" and node.attributes.get("vectors_per_class"):  # one score for each two classes
        return np.asarray(np.abs(scores).min(axis=1, initial=np.inf) <= _TIE * sizes)
    ours, theirs = (np.argmax(np.asarray(labels) == x[:, None], axis=1) for x in (got, want))
    rows = np.arange(len(got))
    return np.asarray(np.isin(got, labels) & (np.abs(scores[rows, ours] - scores[rows, theirs]) <= _TIE * sizes))


_TIE: Final = 1e-5
"""How far scores of two classes may be apart, in terms of the greatest, for rounding to decide between them: ensembles
add hundreds of numbers in float32, in an order of their own."""


def _picker(node: Node, k: int) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None:
    """For a result that has indices into the first input: (input, indices) -> the elements there, and whether each
    index is one. None for other results."""
    axis = node.attributes.get("axis", -1 if node.op_type == "TopK" else 0)
    keeps = node.op_type == "TopK" or bool(node.attributes.get("keepdims", 1))

    def along(x: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(axis, int)
        at = at if keeps else np.expand_dims(at, axis)
        valid = (at >= 0) & (at < x.shape[axis])
        ordered = np.sort(at, axis=axis)
        valid &= (np.diff(ordered, axis=axis) != 0).all(axis=axis, keepdims=True)  # of TopK, none twice
        found = np.take_along_axis(x, np.clip(at, 0, x.shape[axis] - 1), axis)
        return (found, valid) if keeps else (found.squeeze(axis), valid.squeeze(axis))

    def anywhere(x: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x.reshape(-1)[np.clip(at, 0, x.size - 1)], (at >= 0) & (at < x.size)

    if node.op_type in ("ArgMax", "ArgMin") or (node.op_type == "TopK" and k == 1):
        return along
    if node.op_type == "MaxPool" and k == 1 and not node.attributes.get("storage_order", 0):
        return anywhere
    return None


def _elementwise_operands(body: Graph) -> dict[Value, tuple[Value, ...]]:
    """For each result of an elementwise operator on exact operands: the floating ones, among inputs and constants.

    Exact are inputs, constants, and what operators that round nothing make of them. Behind a rounding, a result may be
    much smaller than the values that were rounded, so those are judged by their largest element.
    """
    exact: dict[Value, tuple[Value, ...]] = {v: (v,) for v in body.inputs}
    found: dict[Value, tuple[Value, ...]] = {}
    for node in body.nodes:
        given = [v for v in node.inputs if v is not None]
        if not traits_of(node).elementwise or any(v not in exact and v.data is None for v in given):
            continue
        operands = dict.fromkeys(u for v in given for u in exact.get(v, (v,)) if _is_real(u))
        if len(operands) > _MOST_OPERANDS:
            continue
        made = [v for v in node.outputs if v is not None]
        found.update((v, tuple(operands)) for v in made)
        if is_exact(node):
            exact.update((v, tuple(operands)) for v in made)
    return found


def _is_real(value: Value) -> bool:
    return value.dtype is not None and float_like(value.dtype)


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


def _products(body: Graph) -> dict[Value, int]:
    """For each value that depends on a sum of products, the number of terms of the longest one."""
    found: dict[Value, int] = {}
    for node in body.nodes:
        given = [v for v in node.inputs if v is not None]
        count = max((found.get(v, 0) for v in given), default=0)
        shapes = [v.type.shape or () if isinstance(v.type, TensorType) and v.is_static else () for v in given[:2]]
        if node.op_type in PRODUCTS and not node.domain and len(shapes) == 2 and all(shapes):
            left, right = shapes
            whole = _size(given[1])
            if node.op_type == "MatMul":
                mine = left[-1]
            elif node.op_type == "Gemm":
                mine = left[0 if node.attributes.get("transA") else -1]
            else:
                mine = whole // max(int(right[0 if node.op_type == "Conv" else 1] or 1), 1)
            count = max(count, int(mine or 1))
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


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _eps(dtype: np.dtype) -> float:
    finfo: Any = ml_dtypes.finfo
    return float(finfo(dtype).eps)


class _Moved:
    """How far runs that round otherwise move each element of a result: the root of the mean square.

    true: the result, as exact as it can be had. An element that is not finite in a run where the true one is, or the
    other way round, is what that run gives.
    """

    __slots__ = ("_last", "_runs", "_squares", "_strange", "_true")

    def __init__(self, true: np.ndarray) -> None:
        self._true = _wide(true) if float_like(true.dtype) else true
        self._last = true
        self._runs = 0
        self._squares = np.zeros(true.shape)
        self._strange = np.zeros(true.shape, bool)

    def add(self, result: np.ndarray) -> None:
        """Count one run."""
        self._runs += 1
        if not float_like(result.dtype):
            self._last = result
            return
        with np.errstate(all="ignore"):
            theirs = _wide(result)
            off = theirs - self._true
            known = np.isfinite(off)
            self._squares += np.where(known, off * off, 0.0)
            strange = ~known & ~_alike(theirs, self._true)
        self._strange |= strange
        self._last = np.where(strange, theirs, self._last)

    def value(self) -> np.ndarray:
        """The true result, moved by `_OF_ROUNDED` of that."""
        if not float_like(self._last.dtype):
            return self._last
        with np.errstate(all="ignore"):
            moved = self._true + _OF_ROUNDED * np.sqrt(self._squares / max(self._runs, 1))
        return np.where(self._strange, self._last, moved)


def _alike(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray((x == y) | (np.isnan(x) & np.isnan(y)))


def _read_only(x: np.ndarray) -> np.ndarray:
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view


def _perturbed(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`x` off by a few rounding steps; whole numbers stay, as they may be indices or masks."""
    if not float_like(x.dtype):
        return x
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        noise = _PERTURBATION * _eps(x.dtype) * rng.uniform(-1.0, 1.0, x.shape)
        return np.where(wide == np.rint(wide), wide, wide * (1.0 + noise)).astype(x.dtype)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
