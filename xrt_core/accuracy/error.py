"""How far results are from exact ones, in units of the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xrt_core.ir.types import float_like
from xrt_core.options.accuracy import Accuracy, Criterion


def used(accuracy: Accuracy, names: Sequence[str], got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """The largest share of its budget that an output uses: above 1.0 the results are too far off."""
    shares = (
        error_of(g, w, accuracy.criterion) / accuracy.of(n) for n, g, w in zip(names, got, want, strict=True)
    )
    return max(shares, default=0.0)


def error_of(got: np.ndarray, want: np.ndarray, criterion: Criterion) -> float:
    """The error of one output, relative to its size (`Accuracy`); infinity where dtype, shape, or what is not finite
    differ, or where an output that is zero is not.

    Of outputs that are no floats it is the share of elements that differ.
    """
    if got.dtype != want.dtype or got.shape != want.shape:
        return math.inf
    if not want.size:
        return 0.0
    if not float_like(want.dtype) and want.dtype.kind != "c":
        return float(np.mean(got != want))
    kind = np.complex128 if want.dtype.kind == "c" else np.float64
    g, w = got.astype(kind), want.astype(kind)
    finite = np.isfinite(w)
    if not np.array_equal(g[~finite], w[~finite], equal_nan=True) or not np.isfinite(g[finite]).all():
        return math.inf
    off, size = np.abs(g[finite] - w[finite]), np.abs(w[finite])
    if not off.size:
        return 0.0
    if criterion == "rms":
        most, scale = float(np.sqrt(np.mean(off**2))), float(np.sqrt(np.mean(size**2)))
    else:
        most, scale = float(off.max()), float(size.max())
    return most / scale if scale else (math.inf if most else 0.0)
