"""Input synthesis: arrays for the params of a Function that meet the value constraints of its graph."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import ml_dtypes
import numpy as np

from xrt_core.errors import InputError
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Value
from xrt_core.ir.types import float_like
from xrt_core.runtime.arrays import Range
from xrt_core.verify.value_ranges import FREE, ValueConstraint, infer_constraints, is_synthesizable

Kind = Literal[
    "normal", "ties", "large", "gentle", "damped", "small", "constant", "zero", "negative", "nonfinite", "nan",
    "infinite", "lone", "other lone",
]
"""normal: normally distributed floats. ties: few distinct values, zero among them, and the ends of 8-bit integers.
large: normal, eight times as large. gentle: floats from 0.5 to 1.5, for which even unknown graphs rarely give NaN or
infinity. damped: normal, but a matrix is divided by the root of its longer side, as networks' weights are when they are
made: products of such matrices neither grow nor vanish. small: normal, a thousandth as large. constant: each channel
(axis 1; of a matrix or vector, each row) is one number that no sum of it divides exactly, for normalisations of what
does not vary. zero, negative: no float is anything else where the operators allow it, for what divides by a norm, a
range or a maximum: the NaN that comes of that arises inside, where no check of the inputs sees it. nonfinite: normal,
with a few NaN and infinities, wherever floats are no integers. nan, infinite: half of the elements are, at random
places. lone, other lone: one element of every other param is infinite, beginning with the first, or the second."""

NONFINITE: Final[tuple[Kind, ...]] = ("nonfinite", "nan", "infinite", "lone", "other lone")
"""The kinds that are no numbers. A few show what becomes of them and of others in one reduction, many whether they are
treated alike at every place: the rest of a vectorised loop, or the first element of a maximum, may be another case.
A lone one shows what becomes of it beside numbers, where in a small array others would make NaN of it on any engine: an
infinite sum, or an infinite factor of what is centred."""

KINDS: Final[tuple[Kind, ...]] = tuple(k for k in get_args(Kind) if k not in NONFINITE)
"""The kinds of numbers."""

SEQUENCE: Final[tuple[Kind, ...]] = ("normal", "ties", "gentle")
"""The order in which they are used for verification."""

DEGENERATE: Final[tuple[Kind, ...]] = ("zero", "negative")
"""The kinds of which a function may make NaN alone, which must be NaN on every engine."""

EDGES: Final[tuple[Kind, ...]] = ("small", "constant", *DEGENERATE)
"""Checked after those, where the host is quick: what libraries were seen to get wrong on them only."""

_LEVELS: Final = (-1.5, -0.7, 0.0, 0.0, 0.3, 0.7, 1.5)
_BROKEN: Final = (math.nan, math.inf, -math.inf)
_FINITE: Final = {"lone": 1, "other lone": 0}
"""Which of two params has finite numbers only."""
_USUAL: Final = 4.0  # few normally distributed numbers are larger
_RARE: Final = 8  # of so many elements at most one is not finite
_WITH_INFINITY: Final = frozenset(("float16", "float32", "float64", "bfloat16"))
_WIDE: Final = 4.0  # length of an interval that is open on one side


def are_beyond(ranges: Sequence[Range | None]) -> bool:
    """Whether numbers in these ranges are larger than those that the kinds of numbers have."""
    return any(r is not None and max(-r[0], r[1]) > _USUAL for r in ranges)


def synthesize_inputs(
    function: Function,
    kind: Kind = "normal",
    seed: int = 0,
    constraints: Mapping[Value, ValueConstraint] | None = None,
    ranges: Sequence[Range | None] = (),
) -> list[np.ndarray]:
    """An array for each param of `function`, of its dtype and shape; deterministic for the same arguments.

    constraints: of its inputs, if the caller has them from `infer_constraints`. ranges: of params, whose floats, where
    they are free, are spread over them, both ends included, in place of `kind`. Known elements of a param are what they
    are. Raises InputError for a param that is no numeric tensor of static shape.
    """
    constraints = infer_constraints(function.body) if constraints is None else constraints
    made = []
    for i, (p, v) in enumerate(zip(function.params, function.body.inputs, strict=True)):
        if not is_synthesizable(v):
            raise InputError(f"param {p.name!r} of {function.name!r} is {p.type}: no values can be synthesized for it")
        rng = np.random.default_rng([seed, i, zlib.crc32(kind.encode())])
        constraint = constraints.get(v, FREE)
        given = ranges[i] if i < len(ranges) else None
        if given is not None and constraint.is_free and float_like(p.dtype):
            made.append(_spread(p, given, rng))
        else:
            made.append(make_array(p, constraint, "normal" if i % 2 == _FINITE.get(kind) else kind, rng))
        for k, n in enumerate(p.elements or ()):
            if isinstance(n, int):
                made[-1].reshape(-1)[k] = n
    return made


def make_array(p: Parameter, constraint: ValueConstraint, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """One array that meets a constraint."""
    if p.dtype.kind == "b":
        return _truths(p.shape, rng)
    if constraint.sizes:
        return _rows(p, constraint, rng)
    if constraint.distinct:
        return _distinct(p, constraint, rng)
    if float_like(p.dtype) and not constraint.whole:
        return _floats(p.shape, constraint, kind, rng, p.dtype)
    if p.dtype.kind == "c":
        parts: Any = rng.standard_normal(p.shape) + 1j * rng.standard_normal(p.shape)
        return np.asarray(parts).astype(p.dtype)
    if constraint.truth:
        return _truths(p.shape, rng).astype(p.dtype)
    low, high = _integer_range(p.dtype, constraint, kind)
    numbers = rng.integers(low, high + 1, p.shape)
    if kind == "ties" and constraint.is_free and p.dtype.itemsize == 1:  # the ends of 8-bit integers, and the middle
        numbers = rng.choice((low, low, (low + high + 1) // 2, high, high), p.shape)
    if constraint.nonzero and low <= 0 <= high:
        numbers = np.where(numbers == 0, 1 if high >= 1 else -1, numbers)
    if (low, high) == (0, 1) and constraint.is_free:  # possibly a mask
        return _truths(p.shape, rng).astype(p.dtype)
    return np.asarray(numbers).astype(p.dtype)


def _floats(
    shape: Sequence[int], constraint: ValueConstraint, kind: Kind, rng: np.random.Generator, dtype: np.dtype
) -> np.ndarray:
    low, high = constraint.low, constraint.high
    info: Any = ml_dtypes.finfo
    values: Any
    if low > -math.inf or high < math.inf:
        a = low if low > -math.inf else high - _WIDE
        b = high if high < math.inf else low + _WIDE
        if kind == "gentle" and a <= 0.5 and b > 0.5:
            a, b = 0.5, min(b, 1.5)
        elif a == -b and b > 2.0:  # wide bounds: the usual range
            a, b = (-2.0, 2.0) if kind != "large" else (a, b)
        values = a + (b - a) * rng.random(shape)
        if kind == "ties":  # few distinct values
            values = a + (b - a) * np.rint((values - a) / ((b - a) or 1.0) * 4.0) / 4.0
        values = np.clip(values, a, b)
        for share in (8.0 * float(info(dtype).eps), 1.0):  # what rounding to the dtype moves out goes to the middle
            edge = np.asarray(values).astype(dtype).astype(np.float64)
            values = np.where((edge < a) | (edge > b), values + share * ((a + b) / 2.0 - values), values)
    elif kind == "zero":
        values = np.zeros(shape)
    elif kind == "gentle":
        values = 0.5 + rng.random(shape)
    elif kind == "ties":
        values = rng.choice(np.array(_LEVELS), shape)
    else:
        values = rng.standard_normal(shape) * {"large": 8.0, "small": 1e-3}.get(kind, 1.0)
        if kind == "damped" and len(shape) > 1:
            values = values / math.sqrt(max(*shape[-2:], 1))
        if kind == "negative":
            values = -np.abs(values)
    values = np.asarray(values)
    if kind == "constant" and len(shape) > 1:
        values = np.broadcast_to(_one_a_channel(values), shape)
    if constraint.nonzero:
        away = np.where(values < 0, -0.25, 0.25)
        if constraint.high < 0.25:
            away = np.full_like(values, constraint.high if constraint.high < 0 else constraint.low or 0.25)
        values = np.where(np.abs(values) < 0.25, away, values)
        values = np.clip(values, low, high)
    if float(info(dtype).min) > 0:  # float8_e8m0fnu has neither signs nor a zero
        values = np.maximum(np.abs(values), 2.0**-8)
    largest = float(info(dtype).max)
    made: np.ndarray = np.asarray(np.clip(values, -largest, largest)).astype(dtype)
    if kind in NONFINITE and not _is_integral(constraint) and dtype.name in _WITH_INFINITY:
        flat = made.reshape(-1)
        rare = min(len(_BROKEN), max(flat.size // _RARE, 1))
        count = {"nonfinite": rare, "nan": (flat.size + 1) // 2, "infinite": (flat.size + 1) // 2}.get(kind, 1)
        places = rng.permutation(flat.size)[:count]
        if kind in _FINITE and shape and shape[-1] > 1:  # what is summed in turn may lose it anywhere but at the end
            places = places - (places % shape[-1] == shape[-1] - 1)
        broken = {"nan": _BROKEN[:1], "nonfinite": _BROKEN}.get(kind, _BROKEN[1:])
        flat[places] = np.resize(np.array(broken), len(places)).astype(dtype)
    return made


def _spread(p: Parameter, ends: Range, rng: np.random.Generator) -> np.ndarray:
    """Numbers from one end of a range to the other, spread evenly."""
    values = ends[0] + (ends[1] - ends[0]) * np.asarray(rng.random(p.shape)).reshape(-1)
    values[rng.permutation(values.size)[:2]] = ends[: min(values.size, 2)]
    return values.reshape(p.shape).astype(p.dtype)


def _is_integral(c: ValueConstraint) -> bool:
    """Whether elements are numbers of something, or a mask."""
    return c.whole or c.distinct or c.truth or bool(c.sizes)


def _one_a_channel(values: np.ndarray) -> np.ndarray:
    """The first number of each channel, or of each row where there are no channels."""
    if values.ndim > 2:
        return np.asarray(values[(slice(0, 1), slice(None), *(slice(0, 1),) * (values.ndim - 2))])
    return np.asarray(values[..., :1])


def _integer_range(dtype: np.dtype, constraint: ValueConstraint, kind: Kind) -> tuple[int, int]:
    if float_like(dtype):
        least, most = -(1 << 20), 1 << 20
    else:
        info: Any = np.iinfo if dtype.kind in "iu" else ml_dtypes.iinfo
        least, most = int(info(dtype).min), int(info(dtype).max)
    if constraint.low == -math.inf and constraint.high == math.inf:
        if dtype.itemsize == 1:  # quantised values use the whole range of their dtype
            return least, most
        return (max(least, 1), 3) if constraint.nonzero else (0, 7 if kind == "large" else 1)
    low = math.ceil(constraint.low) if constraint.low > -math.inf else math.floor(constraint.high) - 7
    high = math.floor(constraint.high) if constraint.high < math.inf else low + 7
    low, high = min(max(low, least), most), min(max(high, least), most)
    return low, max(low, high)


def _truths(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Random booleans, both True and False in every row of the last axis that has two elements."""
    made = np.asarray(rng.random(tuple(shape)) < 0.7)
    if made.ndim and made.shape[-1] > 1:
        places = np.argsort(rng.random(made.shape), axis=-1)
        np.put_along_axis(made, places[..., :1], True, axis=-1)
        np.put_along_axis(made, places[..., 1:2], False, axis=-1)
    elif made.size == 1:
        made[...] = True
    return made


def _rows(p: Parameter, constraint: ValueConstraint, rng: np.random.Generator) -> np.ndarray:
    """Rows of indices, each column below its size; distinct rows if required and possible."""
    columns = p.shape[-1] if p.shape else 1
    sizes = [max(s, 1) for s in (*constraint.sizes[:columns], *[1] * (columns - len(constraint.sizes)))]
    total, count = math.prod(sizes), math.prod(p.shape[:-1])
    if constraint.distinct and count <= total <= 1 << 24:
        flat = rng.permutation(total)[:count]
    else:
        flat = rng.integers(0, total, count)
    parts = np.unravel_index(flat, sizes) if count else [np.zeros(0, np.int64)] * columns
    return np.stack(parts, axis=-1).reshape(p.shape).astype(p.dtype)


def _distinct(p: Parameter, constraint: ValueConstraint, rng: np.random.Generator) -> np.ndarray:
    """Integers that are distinct along the axis, if the range allows it."""
    low, high = _integer_range(p.dtype, constraint, "normal")
    choices = high - low + 1
    axis = constraint.axis
    if axis is None or not p.shape:
        shape: tuple[int, ...] = (1, math.prod(p.shape))
    else:
        moved = [d for i, d in enumerate(p.shape) if i != axis % len(p.shape)]
        shape = (math.prod(moved), p.shape[axis % len(p.shape)])
    if shape[1] > choices:
        return np.asarray(rng.integers(low, high + 1, p.shape)).astype(p.dtype)
    if choices <= 1 << 16:
        order = np.argsort(rng.random((shape[0], choices)), axis=1)[:, : shape[1]] + low
    else:
        start = rng.integers(0, choices, (shape[0], 1))
        order = (start + np.arange(shape[1])) % choices + low
    if axis is None or not p.shape:
        return order.reshape(p.shape).astype(p.dtype)
    rest = [d for i, d in enumerate(p.shape) if i != axis % len(p.shape)]
    return np.moveaxis(order.reshape(*rest, shape[1]), -1, axis % len(p.shape)).astype(p.dtype)
