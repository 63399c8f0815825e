"""Whether two executables of one Function give the same results on the same inputs."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xrt_core.engine.boundary import read
from xrt_core.engine.contract import Executable, Function, Parameter, RunOptions

_EXACT: Final = "biu"
_SHARE: Final = 64.0  # of the dtype's rounding step, relative to the largest result: reductions may be ordered anew
_RUN: Final = RunOptions(donate=False)


def difference(function: Function, one: Executable, other: Executable, seed: int = 0) -> str:
    """What differs between the results of two executables, "" for nothing.

    Both get the same random inputs: numbers near one for floats; zeros and ones for integers, which are indices as
    often as not. Integers and booleans must be equal, floats within 64 rounding steps of the largest result; NaN and
    infinities must stand in the same places.
    """
    rng = np.random.default_rng(seed)
    inputs = [_random(p, rng) for p in function.params]
    mine, theirs = (list(x.run([i.copy() for i in inputs], _RUN)) for x in (one, other))
    if len(mine) != len(theirs):
        return f"{len(mine)} results against {len(theirs)}"
    for p, a, b in zip(function.returns, map(read, mine), map(read, theirs), strict=True):
        if reason := _unlike(a, b):
            return f"result {p.name!r}: {reason}"
    return ""


def _random(p: Parameter, rng: np.random.Generator) -> np.ndarray:
    if p.dtype.kind in _EXACT or "int" in p.dtype.name:
        return rng.integers(0, 2, p.shape).astype(p.dtype)
    values: Any = rng.uniform(0.5, 1.5, p.shape)
    return np.asarray(values).astype(p.dtype)


def _unlike(a: np.ndarray, b: np.ndarray) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
    if a.tobytes() == b.tobytes():
        return ""
    if a.dtype.kind in _EXACT or "int" in a.dtype.name:
        return f"{np.count_nonzero(a != b)} of {a.size} elements differ"
    step = _step(a.dtype)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    odd = ~np.isfinite(x) | ~np.isfinite(y)
    if not np.array_equal(x[odd], y[odd], equal_nan=True):
        return "NaN or infinity stands in other places"
    gap = float(np.abs(x[~odd] - y[~odd]).max(initial=0.0))
    allowed = _SHARE * step * max(float(np.abs(y[~odd]).max(initial=0.0)), float(np.finfo(np.float32).tiny))
    return "" if gap <= allowed else f"a gap of {gap:.3g}, at most {allowed:.3g} is rounding"


def _step(dtype: np.dtype) -> float:
    """The rounding step at 1.0, also of ml_dtypes' types, which NumPy's finfo does not know."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps)
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo
    return float(finfo(dtype).eps)
