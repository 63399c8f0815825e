"""Python's operators on tensors, where ONNX has none that means the same: division, remainders, shifts, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xrt_core.frontends import application as make
from xrt_core.frontends.locations import trace_error
from xrt_core.frontends.promotion import BOOL, FLOAT32, INT64, is_float

if TYPE_CHECKING:
    from xrt_core.frontends.tensor import Tensor

Axes = int | Sequence[int] | None


def axis_of(axis: int, rank: int) -> int:
    if not isinstance(axis, int | np.integer) or not -rank <= axis < rank:
        raise trace_error(f"axis {axis!r} is not one of the {rank} axes")
    return int(axis) % rank


def axes_of(axis: Axes, rank: int) -> list[int]:
    if axis is None:
        return list(range(rank))
    given = [axis] if isinstance(axis, int | np.integer) else list(axis)
    found = sorted({axis_of(a, rank) for a in given})
    if len(found) != len(given):
        raise trace_error(f"axes {given} name one axis twice")
    return found


def floating(x: Tensor) -> Tensor:
    return x if is_float(x.dtype) else x.astype(FLOAT32)


def reduce(op_type: str, x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
    if axis is None:
        return make.apply(op_type, x, keepdims=int(keepdims))
    axes = axes_of(axis, x.ndim)
    return make.with_axes(op_type, x, axes, keepdims=int(keepdims)) if axes else x


def where_extreme(op_type: str, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    if axis is not None:
        return make.apply(op_type, x, axis=axis_of(axis, x.ndim), keepdims=int(keepdims))
    found: Tensor = make.apply(op_type, x.reshape(-1), axis=0, keepdims=0)
    return found.reshape([1] * x.ndim) if keepdims else found


def arithmetic(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype == BOOL:
        if op_type in ("Add", "Mul", "Max", "Min"):  # as NumPy adds and multiplies truth
            return make.apply("Or" if op_type in ("Add", "Max") else "And", x, y)
        if op_type == "Sub":
            raise trace_error("bools cannot be subtracted: use ^, or .astype(...) first")
        x, y = x.astype(INT64), y.astype(INT64)
    return make.apply(op_type, x, y)


def divide(a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    return make.apply("Div", floating(x), floating(y))


def modulo(a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype == BOOL:
        x, y = x.astype(INT64), y.astype(INT64)
    if not is_float(x.dtype):
        return make.apply("Mod", x, y)
    rest, wrong = _remainder(x, y)
    return make.apply("Where", wrong, rest + y, rest)


def _remainder(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """C's remainder, and where its sign is not the divisor's, which Python wants."""
    rest = make.apply("Mod", x, y, fmod=1)
    return rest, (rest != 0) & ((rest < 0) != (y < 0))


def floor_divide(a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype == BOOL:
        x, y = x.astype(INT64), y.astype(INT64)
    if x.dtype.kind == "u":
        return make.apply("Div", x, y)
    if is_float(x.dtype):
        # x - remainder is a multiple of y, so rounding the quotient is exact where floor(x / y) can be off by one
        rest, wrong = _remainder(x, y)
        quotient = make.apply("Div", x - rest, y)
        whole = make.apply("Round", make.apply("Where", wrong, quotient - 1, quotient))
        return make.apply("Where", y == 0, make.apply("Div", x, y), whole)
    quotient = make.apply("Div", x, y)  # towards zero
    rest = x - quotient * y
    above: Tensor = (rest != 0) & ((rest < 0) != (y < 0))
    return quotient - above.astype(x.dtype)


def compare(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    return make.apply(op_type, x, y)


def bitwise(op_type: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if is_float(x.dtype):
        raise trace_error(f"& | ^ take bools and integers, not {x!r} and {y!r}")
    return make.apply(op_type if x.dtype == BOOL else f"Bitwise{op_type}", x, y)


def shift(direction: str, a: Any, b: Any) -> Tensor:
    x, y = make.both(a, b)
    if x.dtype.kind == "u":
        return make.apply("BitShift", x, y, direction=direction)
    if x.dtype.kind != "i":
        raise trace_error(f"<< and >> take integers, not {x!r}")
    dtype = x.dtype  # ONNX shifts unsigned integers only
    unsigned = np.dtype(f"u{dtype.name}")
    if direction == "LEFT":
        return make.apply("BitShift", x.astype(unsigned), y.astype(unsigned), direction=direction).astype(dtype)
    sign = make.apply("Where", x < 0, make.literal(-1, dtype), make.literal(0, dtype))  # all ones where x is negative
    shifted = make.apply("BitShift", (x ^ sign).astype(unsigned), y.astype(unsigned), direction=direction)
    return shifted.astype(dtype) ^ sign
