"""The one table of tolerances, by dtype, and the comparison that every test of the kit uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from xrt_core.ir.types import dtype_name


class Tolerance(NamedTuple):
    """How far a result may be off: `rtol` of the wanted element, plus `atol` of the largest wanted element."""

    rtol: float
    atol: float


TOLERANCES: Final[Mapping[str, Tolerance]] = MappingProxyType(
    {
        "float64": Tolerance(1e-9, 1e-11),
        "complex128": Tolerance(1e-9, 1e-11),
        "float32": Tolerance(1e-4, 1e-5),
        "complex64": Tolerance(1e-4, 1e-5),
        "float16": Tolerance(5e-3, 2e-3),
        "bfloat16": Tolerance(3e-2, 1e-2),
        "float8_e4m3fn": Tolerance(0.15, 0.05),
        "float8_e4m3fnuz": Tolerance(0.15, 0.05),
        "float8_e5m2": Tolerance(0.3, 0.1),
        "float8_e5m2fnuz": Tolerance(0.3, 0.1),
    }
)
"""By the name of the coarsest floating dtype in play. Every other dtype is exact."""

EXACT: Final = Tolerance(0.0, 0.0)


def is_floating(dtype: np.dtype) -> bool:
    """Whether elements are rounded: floating or complex, the narrow types of ml_dtypes included."""
    if dtype.kind in "fc":
        return True
    if dtype.kind != "V":
        return False
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:  # the narrow integers
        return False
    return True


def tolerance_for(result: np.dtype, others: Iterable[np.dtype] = ()) -> Tolerance:
    """The tolerance of a result of dtype `result` computed from inputs of dtypes `others`.

    Integers, booleans and the narrowest floats (which hold a handful of values) are exact.
    """
    found = TOLERANCES.get(dtype_name(result))
    if found is None:
        return EXACT
    rows = [found, *(t for d in others if (t := TOLERANCES.get(dtype_name(d))) is not None)]
    return Tolerance(max(t.rtol for t in rows), max(t.atol for t in rows))


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
    if tolerance == EXACT and not is_floating(dtype):
        different = np.asarray(got != want.astype(dtype))
        assert not different.any(), f"{what}: {_first(different, got, want)}"
        return
    wide = np.complex128 if dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        exact = want.astype(wide)
        if want.dtype != dtype:  # what overflows or is rounded to zero in the narrow type is right when it does so
            exact = np.where(np.isfinite(want.astype(dtype).astype(wide)), exact, want.astype(dtype).astype(wide))
        wrong = _wrong(got.astype(wide), exact, tolerance, _floor(dtype, inputs if sums else ()))
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.size} elements are off by more than rtol {tolerance.rtol:g} and atol "
        f"{tolerance.atol:g} of the largest: {_first(wrong, got, exact)}"
    )


def _wrong(got: np.ndarray, want: np.ndarray, tolerance: Tolerance, floor: float) -> np.ndarray:
    finite = np.isfinite(want)
    largest = float(np.abs(want[finite]).max(initial=0.0))
    allowed = tolerance.rtol * np.abs(np.where(finite, want, 0)) + tolerance.atol * largest + floor
    near = np.abs(got - want) <= allowed
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    return np.asarray(~np.where(finite, near & np.isfinite(got), same))


def _floor(dtype: np.dtype, inputs: Sequence[np.ndarray]) -> float:
    """The rounding of the largest of `inputs`, and the smallest normal number (engines may flush smaller ones)."""
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    largest = 0.0
    for x in inputs:
        if is_floating(x.dtype) and x.size:
            size = np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64))
            size = size[np.isfinite(size) & (size < 1e6)]  # a huge input must not excuse everything
            largest = max(largest, float(size.max(initial=0.0)))
    return float(info.eps) * largest + float(info.smallest_normal)


def _first(wrong: np.ndarray, got: np.ndarray, want: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"at {list(index)} it is {got[index]}, expected {want[index]}"
