"""Comparison, logical and bitwise operators, and Where."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.kernels.namespace import result, widen
from xrt_core.kernels.registry import OpContext, kernel

_BOOL = np.dtype(np.bool_)
_COMPARISONS = {
    "Equal": "equal", "Greater": "greater", "GreaterOrEqual": "greater_equal", "Less": "less",
    "LessOrEqual": "less_equal", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
}  # fmt: skip
_BITWISE = {"BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor"}


def _register_comparison(op_type: str, function: str) -> None:
    @kernel(op_type)
    def compare(ctx: OpContext, a: Any, b: Any) -> Any:
        return result(ctx.xp, getattr(ctx.xp, function)(widen(a), widen(b)), _BOOL)

    compare.__doc__ = f"{op_type}: `{function}` with broadcasting, as bool (Equal compares strings too)."


def _register_bitwise(op_type: str, function: str) -> None:
    @kernel(op_type)
    def bitwise(ctx: OpContext, a: Any, b: Any) -> Any:
        return result(ctx.xp, getattr(ctx.xp, function)(a, b), a.dtype)

    bitwise.__doc__ = f"{op_type}: `{function}` of integers, with broadcasting."


for _op_type, _function in _COMPARISONS.items():
    _register_comparison(_op_type, _function)
for _op_type, _function in _BITWISE.items():
    _register_bitwise(_op_type, _function)


@kernel("Not")
def not_(ctx: OpContext, x: Any) -> Any:
    """Logical negation of bools."""
    return result(ctx.xp, ctx.xp.logical_not(x), _BOOL)


@kernel("BitwiseNot")
def bitwise_not(ctx: OpContext, x: Any) -> Any:
    """Every bit of integers flipped."""
    return result(ctx.xp, ctx.xp.invert(x), x.dtype)


@kernel("BitShift")
def bit_shift(ctx: OpContext, x: Any, amount: Any) -> Any:
    """x shifted by `amount` bits to the side that `direction` names ("LEFT" or "RIGHT")."""
    shift = ctx.xp.left_shift if ctx.attr("direction") == "LEFT" else ctx.xp.right_shift
    return result(ctx.xp, shift(x, amount), x.dtype)


@kernel("Where")
def where(ctx: OpContext, condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y, with broadcasting; any element type."""
    return result(ctx.xp, ctx.xp.where(condition, x, y), x.dtype)


@kernel("IsNaN")
def is_nan(ctx: OpContext, x: Any) -> Any:
    """Whether each element is NaN."""
    return result(ctx.xp, ctx.xp.isnan(widen(x)), _BOOL)


@kernel("IsInf")
def is_inf(ctx: OpContext, x: Any) -> Any:
    """Whether each element is infinite, of the signs that detect_positive and detect_negative select."""
    xp, wide = ctx.xp, widen(x)
    positive, negative = ctx.attr("detect_positive", 1), ctx.attr("detect_negative", 1)
    if positive and negative:
        found = xp.isinf(wide)
    elif positive or negative:
        found = wide == (np.inf if positive else -np.inf)
    else:
        found = xp.zeros(x.shape, _BOOL)
    return result(xp, found, _BOOL)
