"""Tolerances of single operators, by dtype, and the assertion that every test of the kit uses.

The numbers are the section "operators" of `verify/tolerances.json`, the comparison is that of the guard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

from xrt_core.engine.contract import Tolerance
from xrt_core.ir.types import dtype_name, float_like
from xrt_core.verify.compare import EXACT, compare

__all__ = ["EXACT", "TOLERANCES", "Tolerance", "assert_close", "is_floating", "tolerance_for"]


def _operators() -> Mapping[str, Tolerance]:
    text = files("xrt_core.verify").joinpath("tolerances.json").read_text(encoding="utf-8")
    rows = json.loads(text)["operators"]
    return MappingProxyType({name: Tolerance(r["absolute"], r["relative"]) for name, r in rows.items()})


TOLERANCES: Final = _operators()
"""By the name of the coarsest floating dtype in play. Every other dtype is exact."""


def is_floating(dtype: np.dtype) -> bool:
    """Whether elements are rounded: floating or complex, the narrow types of ml_dtypes included."""
    return float_like(dtype) or dtype.kind == "c"


def tolerance_for(result: np.dtype, others: Iterable[np.dtype] = ()) -> Tolerance:
    """The tolerance of a result of dtype `result` computed from inputs of dtypes `others`.

    Integers, booleans and the narrowest floats (which hold a handful of values) are exact.
    """
    found = TOLERANCES.get(dtype_name(result))
    if found is None:
        return EXACT
    rows = [found, *(t for d in others if (t := TOLERANCES.get(dtype_name(d))) is not None)]
    return Tolerance(max(t.absolute for t in rows), max(t.relative for t in rows))


def assert_close(
    got: Any,
    want: np.ndarray,
    *,
    dtype: np.dtype | None = None,
    inputs: Sequence[np.ndarray] = (),
    sums: bool = True,
    what: str = "result",
) -> None:
    """Assert that `got` is `want`: dtype and shape exactly, numbers within the table, NaN and infinities in place.

    want: what a reference computed, perhaps in a wider dtype. dtype: that `got` must have (None: that of `want`).
    inputs: what the result was computed from; the coarsest of their dtypes counts. sums: whether elements of them are
    added up on the way, so that a small result may hold the rounding of large terms.
    """
    got = np.asarray(got)
    dtype = want.dtype if dtype is None else dtype
    assert got.dtype == dtype, f"{what}: dtype is {dtype_name(got.dtype)}, expected {dtype_name(dtype)}"
    assert got.shape == want.shape, f"{what}: shape is {list(got.shape)}, expected {list(want.shape)}"
    tolerance = tolerance_for(dtype, (x.dtype for x in inputs))
    if not is_floating(dtype):
        found = compare(got, want.astype(dtype), tolerance)
    else:
        want = _representable(want, dtype)
        largest = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
        rounding = _rounding(dtype, inputs if sums else ())
        scale = largest or rounding or 1.0  # a result of zeros has nothing else that the rounding is relative to
        absolute = tolerance.absolute * largest / scale + rounding / scale
        found = compare(got, want, Tolerance(absolute, tolerance.relative), scale=scale)
    assert found.is_right, f"{what}: {found.reason}"


def _representable(want: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The reference, where it is no number in `dtype` as what it is there: an infinity, or NaN where there is none."""
    with np.errstate(all="ignore"):
        wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
        exact, rounded = want.astype(wide), want.astype(dtype).astype(wide)
    return np.where(np.isfinite(rounded), exact, rounded)


def _rounding(dtype: np.dtype, inputs: Sequence[np.ndarray]) -> float:
    """The rounding of the largest of `inputs` in `dtype`."""
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    largest = 0.0
    for x in inputs:
        if is_floating(x.dtype) and x.size:
            size = np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64))
            size = size[np.isfinite(size) & (size < 1e6)]  # a huge input must not excuse everything
            largest = max(largest, float(size.max(initial=0.0)))
    return float(info.eps) * largest
