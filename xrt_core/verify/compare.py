"""Comparison of results with a reference, by tolerances for each dtype that come from measured errors.

`tolerances.json` in this folder has them, with the measurements and versions; `scripts/measure_tolerances.py` writes
it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.engine.contract import Tolerance
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import dtype_name, float_like

EXACT: Final = Tolerance(0.0, 0.0)
"""Integers and booleans."""

ROUNDED: Final = "rounded"
"""The row for results behind a rounding to integers (quantised networks), which may go either way. Its share is that of
the results of a quantisation that may be off by one step."""

NOISE: Final = 8.0
"""An element may be off by this many times the error of the host in the same dtype."""

MOST_LENIENT: Final = 100.0
"""How many times as lenient as the table an engine's own tolerance may be; 1e30 would switch its check off. Of integers
and in the share of elements it may be as lenient as the row `ROUNDED`."""

_BLOCK: Final = 1 << 14  # elements
_LEAST: Final = float(np.finfo(np.float64).smallest_subnormal)  # divisor in place of zero


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a result from the reference.

    absolute: the largest error, relative to the largest element of the reference. relative: the largest error relative
    to its element, of elements of at least a tenth of the largest. outside: elements out of bounds, of `size`. allowed:
    how many may be. reason: "" if the result is right, else what is wrong.
    """

    absolute: float
    relative: float
    outside: int
    size: int
    allowed: int
    reason: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the result is right."""
        return not self.reason


@functools.cache
def table() -> Mapping[str, Tolerance]:
    """The measured tolerances by name of the dtype."""
    text = files("xrt_core.verify").joinpath("tolerances.json").read_text(encoding="utf-8")
    rows = json.loads(text)["bounds"]
    return MappingProxyType({name: Tolerance(r["absolute"], r["relative"], r["share"]) for name, r in rows.items()})


def tolerance_for(dtype: np.dtype, others: Iterable[np.dtype], own: Mapping[str, Tolerance]) -> Tolerance:
    """The tolerance of a result of `dtype` that was computed through values of dtypes `others`: the coarsest float
    counts.

    own: tolerances that the engine declares, which replace the rows of their dtypes within limits (`MOST_LENIENT`).
    """
    if not float_like(dtype) and dtype.kind != "c":
        return _bounded(own.get(dtype_name(dtype), EXACT), table()[ROUNDED])
    names = {dtype_name(d) for d in (dtype, *others)}
    names |= {row.computed_in for n in names if (row := own.get(n)) is not None and row.computed_in}
    rows = [row for n in sorted(names) if (row := _declared(own.get(n), table().get(_component(n)))) is not None]
    if not rows:
        raise ValueError(f"no tolerance for {dtype_name(dtype)}; known: {', '.join(table())}")
    reasons = "; ".join(dict.fromkeys(r.reason for r in rows if r.reason))
    absolute, relative, share = (max(getattr(r, name) for r in rows) for name in ("absolute", "relative", "share"))
    return Tolerance(absolute, relative, share, reasons, max((r.accumulates for r in rows), key=_STEPS.__getitem__))


def _declared(own: Tolerance | None, row: Tolerance | None) -> Tolerance | None:
    """The tolerance that counts for a dtype: the engine's own within limits, or the row of the table."""
    if own is None or row is None:
        return own or row
    return _bounded(own, replace(row, absolute=MOST_LENIENT * row.absolute, relative=MOST_LENIENT * row.relative))


def _bounded(own: Tolerance, most: Tolerance) -> Tolerance:
    """A declared tolerance, at most as lenient as `most`, and in its share as the row `ROUNDED`."""
    absolute, relative = min(own.absolute, most.absolute), min(own.relative, most.relative)
    return replace(own, absolute=absolute, relative=relative, share=min(own.share, table()[ROUNDED].share))


_STEPS: Final = {"": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Rounding step of what sums are kept in, where that is declared (`Tolerance.accumulates`)."""


def widened_for_products(tolerance: Tolerance, terms: int) -> Tolerance:
    """The tolerance of a sum of so many products that is kept in what it declares: each addition is off by half a step
    at most, to either side, so the sum by about the root of their number. Up to `MOST_LENIENT` times the tolerance.
    """
    off = 0.5 * _STEPS[tolerance.accumulates] * math.sqrt(terms)
    if not off:
        return tolerance
    return replace(
        tolerance,
        absolute=min(tolerance.absolute + off, MOST_LENIENT * tolerance.absolute),
        relative=min(tolerance.relative + off, MOST_LENIENT * tolerance.relative),
    )


def float_dtypes(body: Graph) -> set[np.dtype]:
    """The floating dtypes of all values of a graph."""
    values = (v for n in body.nodes for v in (*n.inputs, *n.outputs) if v is not None)
    return {d for v in values if (d := v.dtype) is not None and (float_like(d) or d.kind == "c")}


def compare(
    got: np.ndarray,
    want: np.ndarray,
    tolerance: Tolerance,
    *,
    host: np.ndarray | None = None,
    scale: float = 0.0,
    sizes: np.ndarray | None = None,
) -> Difference:
    """Compare a result with the reference.

    got: in the requested dtype. want: the reference, perhaps in a wider dtype. host: the host's result in the requested
    dtype for perturbed inputs: where it differs from `want`, the function amplifies rounding, and floats may differ as
    well (`NOISE`). scale: a lower bound of the largest element that `absolute` refers to. sizes: for each element, what
    `absolute` refers to where that is less than the largest one (results of elementwise operators).

    Elements that overflow or underflow in got's dtype must do so, and NaN and infinities must be where the reference
    has them, unless the host in that dtype differs there.
    """
    if got.shape != want.shape:
        reason = f"shape is {list(got.shape)}, not {list(want.shape)}"
        return Difference(np.inf, np.inf, want.size, want.size, 0, reason)
    if not want.size:
        return Difference(0.0, 0.0, 0, 0, 0)
    if not float_like(got.dtype) and got.dtype.kind != "c":
        return _compare_exact(got, want, tolerance)
    if (
        host is None
        and sizes is None
        and got.dtype == want.dtype
        and (found := _clearly_inside(got, want, tolerance, scale))
    ):
        return found
    wide = np.dtype(np.complex128 if got.dtype.kind == "c" else np.float64)
    with np.errstate(all="ignore"):
        exact = _representable(want, got.dtype, wide)
        result = got.astype(wide)
        finite = np.isfinite(exact)
        largest = float(np.abs(exact[finite]).max(initial=scale))
        whole: Any = largest
        if sizes is not None:
            whole = np.minimum(np.maximum(np.where(finite, np.abs(exact), 0.0), sizes), largest)
        bound = tolerance.relative * np.abs(exact) + tolerance.absolute * np.maximum(whole, scale)
        bound = bound + _smallest(got.dtype)
        error = np.abs(result - exact)
        inside = np.where(finite, error <= bound, _same(result, exact))
        if host is not None:
            theirs = host.astype(wide)
            spread = np.abs(theirs - exact)
            known = finite & np.isfinite(theirs)
            noise = float(np.quantile(spread[known], 0.95)) if known.any() else 0.0
            bound = bound + NOISE * noise
            inside |= known & (error <= bound + NOISE * np.where(known, spread, 0.0))
            inside |= ~finite & ~_same(theirs, exact)  # the host disagrees with itself here
            inside |= finite & ~np.isfinite(theirs)
        big = finite & np.isfinite(result) & (np.abs(exact) >= 0.1 * largest) & (exact != 0)
        relative = float((error[big] / np.abs(exact[big])).max(initial=0.0))
        absolute = float(error[finite].max(initial=0.0)) / (largest or 1.0)
    outside = int(np.count_nonzero(~inside))
    # infinities and NaN in place of numbers are no rounding errors
    broken = int(np.count_nonzero(~inside & (np.isfinite(result) != finite)))
    allowed = int(tolerance.share * want.size)
    reason = ""
    if broken or outside > allowed:
        index = tuple(int(i) for i in np.argwhere(~inside & (np.isfinite(result) != finite) if broken else ~inside)[0])
        reason = (
            f"{outside} of {want.size} elements out of bounds ({allowed} may be; {tolerance.relative:.2g} of each "
            f"and {tolerance.absolute:.2g} of the largest): at {list(index)} it is {got[index]}, "
            f"not {exact[index]:.8g}"
        )
    return Difference(absolute, relative, outside, want.size, allowed, reason)


def bounds_of(x: np.ndarray, tolerance: Tolerance, host: np.ndarray | None = None) -> np.ndarray:
    """How far each element may be from that of `x`; one that is not finite, not at all. host: as for `compare`."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        size = np.abs(wide)
        bound = tolerance.relative * size + tolerance.absolute * size[np.isfinite(size)].max(initial=0.0)
        if host is not None:
            spread = np.abs(host.astype(np.float64) - wide)
            known = np.isfinite(spread)
            bound += NOISE * (np.where(known, spread, 0.0) + (np.quantile(spread[known], 0.95) if known.any() else 0.0))
    return np.where(np.isfinite(bound), bound, 0.0)


def _clearly_inside(got: np.ndarray, want: np.ndarray, tolerance: Tolerance, scale: float) -> Difference | None:
    """The result of `compare` if all elements are finite and within bounds, else None. Works by blocks that fit the
    processor's cache, which is much faster for large results."""
    if got.dtype.kind != "f":
        return None
    ours, theirs = np.ravel(got), np.ravel(want)
    parts = [slice(k, k + _BLOCK) for k in range(0, ours.size, _BLOCK)]
    largest = max(scale, *(float(np.abs(theirs[p]).max()) for p in parts))  # NaN is found below
    if not np.isfinite(largest):
        return None
    absolute = relative = 0.0
    bound = tolerance.absolute * largest + _smallest(got.dtype)
    with np.errstate(all="ignore"):
        for p in parts:
            exact = theirs[p].astype(np.float64)
            error = np.abs(ours[p].astype(np.float64) - exact)
            np.abs(exact, out=exact)
            if not bool((error <= tolerance.relative * exact + bound).all()):
                return None
            absolute = max(absolute, float(error.max()))
            if largest and relative * 0.1 * largest < error.max():  # else no element of the block can be the worst
                error *= exact >= 0.1 * largest
                relative = max(relative, float((error / np.maximum(exact, _LEAST)).max()))
    return Difference(absolute / (largest or 1.0), relative, 0, got.size, int(tolerance.share * got.size))


def _compare_exact(got: np.ndarray, want: np.ndarray, tolerance: Tolerance) -> Difference:
    different = np.asarray(got != want)
    if tolerance.absolute or tolerance.relative:
        a, b = got.astype(np.float64), want.astype(np.float64)
        different &= np.abs(a - b) > tolerance.absolute * np.abs(b).max(initial=0.0) + tolerance.relative * np.abs(b)
    allowed = int(tolerance.share * want.size)
    outside = int(np.count_nonzero(different))
    largest = float(np.abs(want.astype(np.float64)).max(initial=0.0)) or 1.0
    off = float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0.0)) / largest
    reason = ""
    if outside > allowed:
        index = tuple(int(i) for i in np.argwhere(different)[0])
        reason = (
            f"{outside} of {want.size} elements differ ({allowed} may): at {list(index)} it is {got[index]}, "
            f"not {want[index]}"
        )
    return Difference(off, off, outside, want.size, allowed, reason)


def _component(name: str) -> str:
    """The row of a dtype; that of its parts for a complex one."""
    return {"complex64": "float32", "complex128": "float64"}.get(name, name)


def _representable(want: np.ndarray, dtype: np.dtype, wide: np.dtype) -> np.ndarray:
    """The reference in `wide`, with infinities where it does not fit `dtype`, which may have none: then its limits."""
    exact = want.astype(wide)
    if want.dtype == dtype:
        return exact
    rounded = want.astype(dtype).astype(wide)
    return np.where(np.isinf(exact) | (np.isfinite(exact) & ~np.isfinite(rounded)), rounded, exact)


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _smallest(dtype: np.dtype) -> float:
    """The smallest normal number; engines may flush subnormals to zero."""
    finfo: Any = ml_dtypes.finfo
    return float(finfo(dtype).smallest_normal)
