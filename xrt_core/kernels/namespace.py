"""Adapters for differences between array namespaces: in-place writes, loops, sliding windows, erf, bit casts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.types import float_like


def is_jax(xp: Any) -> bool:
    """Return whether `xp` is `jax.numpy`, by its name, without importing JAX."""
    return str(xp.__name__).partition(".")[0] == "jax"


def is_cupy(xp: Any) -> bool:
    """Return whether `xp` is `cupy`."""
    return str(xp.__name__).partition(".")[0] == "cupy"


def has_dtype(xp: Any, dtype: np.dtype) -> bool:
    """Whether arrays of `dtype` can be made: CuPy has NumPy's numbers, since 14 bfloat16, and no narrower ones."""
    return True if not is_cupy(xp) else dtype.char in _CUPY_DTYPES or (dtype.kind == "V" and _cupy_makes(dtype))


_CUPY_DTYPES = frozenset("?bhilqBHILQefdFD")


@functools.cache
def _cupy_makes(dtype: np.dtype) -> bool:
    import importlib

    try:
        importlib.import_module("cupy").empty(0, dtype)
    except (TypeError, ValueError):
        return False
    return True


def has_float64(xp: Any) -> bool:
    """Whether arrays of float64 can be made: always, except where JAX runs without x64."""
    if not is_jax(xp):
        return True
    import jax

    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)


def set_at(xp: Any, x: Any, index: Any, values: Any) -> Any:
    """A copy of `x` with `x[index] = values`. With repeated indices NumPy keeps the last write, JAX's is undefined."""
    if is_jax(xp):
        return x.at[index].set(values)
    out = xp.array(x, copy=True)
    out[index] = values
    return out


def add_at(xp: Any, x: Any, index: Any, values: Any) -> Any:
    """A copy of `x` with `values` added at `index`; repeated indices add up."""
    if is_jax(xp):
        return x.at[index].add(values)
    out = xp.array(x, copy=True)
    xp.add.at(out, index, values)
    return out


def scan(
    xp: Any,
    step: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]],
    carry: tuple[Any, ...],
    xs: tuple[Any, ...],
    length: int,
    *,
    reverse: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """`jax.lax.scan` for every namespace: `carry, y = step(carry, x)` along axis 0 of each array in `xs`.

    Returns the last carry and the tuple of stacked ys (in the order of xs, also when run in reverse). With length 0
    the ys are an empty tuple under NumPy: callers handle an empty axis before.
    """
    if is_jax(xp):
        import jax

        last, stacked = jax.lax.scan(step, carry, xs, length=length, reverse=reverse)
        return last, stacked
    ys: list[tuple[Any, ...]] = []
    for i in range(length - 1, -1, -1) if reverse else range(length):
        carry, y = step(carry, tuple(x[i] for x in xs))
        ys.append(y)
    if reverse:
        ys.reverse()
    return carry, tuple(xp.stack(column) for column in zip(*ys, strict=True))


def sliding(
    xp: Any, x: Any, window: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...] | None = None
) -> Any:
    """Windows over the last `len(window)` axes: shape (..., *positions, *window), a view under NumPy and CuPy."""
    n = len(window)
    dilations = dilations or (1,) * n
    spatial = x.shape[x.ndim - n :]
    span = tuple((w - 1) * d + 1 for w, d in zip(window, dilations, strict=True))
    counts = tuple(max(0, (s - k) // t + 1) for s, k, t in zip(spatial, span, strides, strict=True))
    if is_jax(xp):
        first = x.ndim - n
        for i in range(n):
            axis = first + i  # becomes the axis of positions; the axis of the window goes last
            index = np.arange(counts[i])[:, None] * strides[i] + np.arange(window[i])[None, :] * dilations[i]
            x = xp.moveaxis(xp.take(x, index, axis=axis), axis + 1, -1)
        return x
    if 0 in counts:
        return xp.zeros((*x.shape[: x.ndim - n], *counts, *window), x.dtype)
    out = xp.lib.stride_tricks.sliding_window_view(x, span, axis=tuple(range(x.ndim - n, x.ndim)))
    lead = (slice(None),) * (x.ndim - n)
    starts = tuple(slice(None, None, t) for t in strides)
    return out[lead + starts + tuple(slice(None, None, d) for d in dilations)]


def bit_cast(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """The bits of `x` read as `dtype`, of the same width and at least a byte wide."""
    if x.dtype == dtype:
        return x
    if is_jax(xp):
        import jax

        return jax.lax.bitcast_convert_type(x, dtype)
    return xp.ascontiguousarray(x).view(dtype).reshape(x.shape)


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype to compute in: float32 for the narrower floats, `dtype` itself for everything else."""
    return np.dtype(np.float32) if float_like(dtype) and dtype.itemsize < 4 else dtype


def widen(x: Any) -> Any:
    """`x` in the dtype to compute in (see `wide`), without a copy where it already is."""
    to = wide(x.dtype)
    return x if x.dtype == to else x.astype(to)


def narrow(x: Any, dtype: np.dtype) -> Any:
    """`x` in `dtype`, without a copy where it already is."""
    return x if x.dtype == dtype else x.astype(dtype)


# erf(x) = x p(x^2) / q(x^2) for |x| < 3.925 in float32, highest power first; least-squares fit, relative error 4e-7.
_ERF32_NUM = (2.0460367977648275e-06, 0.0002848425065167248, 0.0037725032307207584, 0.05276916176080704,
              0.19059264659881592, 1.1283791065216064)  # fmt: skip
_ERF32_DEN = (3.804781590588391e-05, 0.0011638463474810123, 0.014983106404542923, 0.11418227106332779,
              0.5022410750389099, 1.0)  # fmt: skip

# W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969), tables 1 and 2
# (erf on |x| <= 0.46875, erfc on 0.46875 <= x), highest power first.
_ERF_NUM = (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2,
            3.20937758913846947e3)  # fmt: skip
_ERF_DEN = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_ERFC_NUM = (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1,
             2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
             1.23033935479799725e3)  # fmt: skip
_ERFC_DEN = (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
             3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3)  # fmt: skip


def _polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """Horner's scheme, highest power first, without temporaries."""
    out = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        out *= x
        out += x.dtype.type(c)
    return out


def _erf64(x: np.ndarray) -> np.ndarray:
    size = np.minimum(np.abs(x), 6.0)  # erf(6) is 1 to the last bit
    square = size * size
    small = x * _polynomial(square, _ERF_NUM) / _polynomial(square, _ERF_DEN)
    tail = np.exp(-square) * _polynomial(size, _ERFC_NUM) / _polynomial(size, _ERFC_DEN)
    return np.asarray(np.where(size <= 0.46875, small, np.copysign(1.0 - tail, x)))


def _erf32(x: np.ndarray) -> np.ndarray:
    size = np.clip(x, np.float32(-3.925), np.float32(3.925))
    square = size * size
    out = _polynomial(square, _ERF32_NUM)
    out *= size
    out /= _polynomial(square, _ERF32_DEN)
    return np.asarray(np.clip(out, np.float32(-1), np.float32(1)))


def erf(xp: Any, x: Any) -> Any:
    """The error function of a float32 or float64 array (error about 4e-7 and 1e-16), in its dtype."""
    if is_jax(xp):
        import jax

        return jax.scipy.special.erf(x)
    if is_cupy(xp):
        import importlib

        return importlib.import_module("cupyx.scipy.special").erf(x)
    if x.size <= 8:  # thirty array operations would cost more
        return np.array([math.erf(v) for v in x.reshape(-1).tolist()], x.dtype).reshape(x.shape)
    return _by_blocks(_erf64 if x.dtype == np.float64 else _erf32, x)


_BLOCK: Final = 1 << 15
"""Elements of which some arrays at a time stay in a processor's nearer caches."""


def _by_blocks(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """`function`, elementwise and of many array operations, of a few elements at a time: memory would take longer than
    computing does."""
    if x.size <= _BLOCK:
        return function(x)
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty_like(flat)
    for i in range(0, flat.size, _BLOCK):
        out[i : i + _BLOCK] = function(flat[i : i + _BLOCK])
    return out.reshape(x.shape)


def reduce_at(xp: Any, x: Any, index: Any, values: Any, how: str) -> Any:
    """A copy of `x` with `values` combined in at `index`, repeated indices one after another.

    how: "add", "mul", "min" or "max".
    """
    if is_jax(xp):
        target = x.at[index]
        return {"add": target.add, "mul": target.multiply, "min": target.min, "max": target.max}[how](values)
    out = xp.array(x, copy=True)
    if is_cupy(xp):
        return _reduce_on_cupy(xp, out, index, values, how)
    {"add": xp.add, "mul": xp.multiply, "min": xp.minimum, "max": xp.maximum}[how].at(out, index, values)
    return out


def _reduce_on_cupy(xp: Any, out: Any, index: Any, values: Any, how: str) -> Any:
    """By CuPy's `ufunc.at`, which takes floats and integers of 32 and 64 bits, and no `mul`; else on the CPU."""
    if how == "mul" or out.dtype.kind not in "iuf":
        on_cpu = tuple(xp.asnumpy(i) for i in index) if isinstance(index, tuple) else xp.asnumpy(index)
        return xp.asarray(reduce_at(np, xp.asnumpy(out), on_cpu, xp.asnumpy(values), how))
    dtype = out.dtype
    narrow_integer = dtype.kind in "iu" and dtype.itemsize < 4
    to = np.dtype(np.int32) if narrow_integer else dtype  # exact, and wraps round as the narrow type does
    wide_out = narrow(out, to)
    {"add": xp.add, "min": xp.minimum, "max": xp.maximum}[how].at(wide_out, index, narrow(values, to))
    return narrow(wide_out, dtype)


def pad_with(xp: Any, x: Any, widths: Sequence[tuple[int, int]], value: Any) -> Any:
    """`x` with (before, after) elements of the scalar `value` around each axis."""
    if not any(b or a for b, a in widths):
        return x
    if is_jax(xp):
        return xp.pad(x, widths, constant_values=xp.asarray(value, x.dtype))
    out = xp.empty(tuple(d + b + a for d, (b, a) in zip(x.shape, widths, strict=True)), x.dtype)
    out[...] = value
    out[tuple(slice(b, b + d) for d, (b, _) in zip(x.shape, widths, strict=True))] = x
    return out


def map_rows(xp: Any, function: Callable[..., Any], *arrays: Any) -> Any:
    """`function` of each row of the arrays (axis 0, at least one row), stacked; 16 rows at a time under JAX."""
    if is_jax(xp):
        import jax

        return jax.lax.map(lambda row: function(*row), arrays, batch_size=16)
    return xp.stack([function(*row) for row in zip(*arrays, strict=True)])


def result(xp: Any, y: Any, dtype: np.dtype) -> Any:
    """`y` as an array (NumPy's functions return scalars for 0-d arrays) of `dtype`, copied only where needed."""
    return narrow(xp.asarray(y), dtype)


def divide_integers(xp: Any, a: Any, b: Any) -> Any:
    """Integer quotient of two arrays of one dtype, truncated toward zero; 0 where the divisor is 0, as NumPy has it."""
    if is_jax(xp):
        import jax

        return xp.where(b == 0, xp.zeros_like(a), jax.lax.div(*xp.broadcast_arrays(a, b)))
    if a.dtype.kind == "u":
        return a // b
    if is_cupy(xp):  # whose fmod of integers goes through float64
        quotient = a // b
        rest = a - quotient * b  # has the sign of b
        return quotient + ((rest != 0) & (b != 0) & ((rest < 0) != (a < 0))).astype(a.dtype)
    return (a - xp.fmod(a, b)) // b


def remainder_of_integers(xp: Any, a: Any, b: Any) -> Any:
    """The remainder of `divide_integers`, which has the sign of `a`; 0 for a divisor of 0."""
    if not is_cupy(xp):
        return xp.fmod(a, b)
    return xp.where(b == 0, xp.zeros_like(a), a - divide_integers(xp, a, b) * b)


def accumulate(xp: Any, out: Any, index: Any, values: Any) -> Any:
    """`out` with `values` added at an index without repeats; `out` may be modified in place, so nothing else may
    read it."""
    if is_jax(xp):
        return out.at[index].add(values)
    out[index] += values
    return out
