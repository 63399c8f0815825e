"""Contents of integer tensors as expressions over symbolic sizes: what a graph computes from its shapes.

`known_result` evaluates one node on such contents, or says None where they do not follow: comparisons are decided by
the ranges of the symbols or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.ir.symbols import Expr, product
from xrt_core.passes.size_ratios import MOST, Ratio

Known = np.ndarray
"""An object array of `Expr`, or of bool."""
Bounds = Callable[[Expr], tuple[int | None, int | None]]
"""The least and the greatest value of an expression; None where there is no limit."""

_INTEGERS: Final = (6, 7)  # of TensorProto.DataType: int32, int64
_MOST: Final = 1024


class _Unknown(Exception):
    """The contents do not follow."""


def known_result(
    node: Node, inputs: Sequence[Known | None], shape: Sequence[Expr] | None, bounds: Bounds
) -> Known | None:
    """The contents of the first output of a node; None where they do not follow from its inputs.

    inputs: contents, None for an input of which none are known (or that is left out). shape: of the first input.
    """
    if node.domain:
        return None
    try:
        if node.op_type in ("Shape", "Size"):
            return None if shape is None else _query(node, shape)
        evaluate = _TABLE.get(node.op_type)
        if evaluate is None or not node.inputs or len(node.outputs) > 1:
            return None
        if any(v is not None and k is None for v, k in zip(node.inputs, inputs, strict=True)):
            return None
        found = evaluate(node, [k for k in inputs if k is not None], inputs, bounds)
        return None if found is None or found.size > _MOST else _objects(found)
    except (_Unknown, ArithmeticError, ValueError, IndexError, TypeError, AttributeError):
        return None


def ratio_result(node: Node, inputs: Sequence[Known | None], bounds: Bounds) -> Known | None:
    """The contents of the output of a node of floats as `Ratio`; None where they do not follow from its inputs.

    inputs: contents, of floats as `Ratio`; None for an input of which none are known (or that is left out).
    """
    evaluate = _RATIOS.get(node.op_type)
    if node.domain or evaluate is None or any(k is None for k in inputs):
        return None
    try:
        found = evaluate(node, [k for k in inputs if k is not None], inputs, bounds)
        return None if found is None else _objects(found)
    except (_Unknown, ArithmeticError, ValueError, IndexError, TypeError, AttributeError):
        return None


def _rounded(bounds: Bounds, up: bool = False) -> Callable[[Ratio], Expr]:
    """A quotient of sizes rounded as floats round it."""

    def whole(r: Ratio) -> Expr:
        low, high = bounds(r.above)
        if low is None or low < 0 or high is None or high > MOST:
            raise _Unknown
        return r.ceil() if up else r.floor()

    return whole


def _query(node: Node, shape: Sequence[Expr]) -> Known:
    if node.op_type == "Size":
        return _objects(np.array(product(shape), object))
    attributes: Any = node.attributes
    return _objects(list(shape)[attributes.get("start", 0) : attributes.get("end", len(shape))])


def _objects(found: Any) -> Known:
    if isinstance(found, np.ndarray) and found.dtype == object:
        return found
    if isinstance(found, list):
        made = np.empty(len(found), object)
        made[:] = found
        return made
    made = np.empty(np.shape(found), object)
    made[...] = found
    return made


def _numbers(k: Known) -> list[int]:
    found = []
    for x in k.reshape(-1):
        value = x.constant
        if value is None:
            raise _Unknown
        found.append(value)
    return found


def _each(function: Callable[..., Any], *arrays: Known) -> Known:
    return _objects(np.frompyfunc(function, len(arrays), 1)(*arrays))


def _divided(bounds: Bounds) -> Callable[[Expr, Expr], Expr]:
    def divide(a: Expr, b: Expr) -> Expr:
        divisor = b.constant
        if divisor is None:
            found = a.divided(b)
            if found is None:
                raise _Unknown
            return found
        low = bounds(a)[0]
        if divisor <= 0 or low is None or low < 0:  # ONNX cuts towards zero
            value = a.constant
            if value is None or divisor == 0:
                raise _Unknown
            return Expr.of(abs(value) // abs(divisor) * (1 if (value < 0) == (divisor < 0) else -1))
        return a // divisor

    return divide


def _remainder(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
    """Of a division that rounds down, by a number."""
    if node.attributes.get("fmod"):
        raise _Unknown

    def remainder(a: Expr, b: Expr) -> Expr:
        if not b.constant or b.constant < 0:
            raise _Unknown
        return a - (a // b.constant) * b

    return _each(remainder, *ks)


def _compared(bounds: Bounds, op: str) -> Callable[[Any, Any], bool]:
    def compare(a: Any, b: Any) -> bool:
        if isinstance(a, bool) or isinstance(b, bool):
            if op != "Equal":
                raise _Unknown
            return bool(a == b)
        low, high = bounds(a - b)
        value = (a - b).constant
        if value is not None:
            low = high = value
        return _decide(op, low, high)

    return compare


def _decide(op: str, low: int | None, high: int | None) -> bool:
    """Whether a difference within these bounds is <, <=, >, >= or equal to zero."""
    if op == "Equal":
        if low == high == 0:
            return True
        if (low is not None and low > 0) or (high is not None and high < 0):
            return False
        raise _Unknown
    strictly = {"Less": "<", "LessOrEqual": "<=", "Greater": ">", "GreaterOrEqual": ">="}[op]
    if strictly in (">", ">="):
        edge = 1 if strictly == ">" else 0
        if low is not None and low >= edge:
            return True
        if high is not None and high < edge:
            return False
    else:
        edge = -1 if strictly == "<" else 0
        if high is not None and high <= edge:
            return True
        if low is not None and low > edge:
            return False
    raise _Unknown


def _extreme(bounds: Bounds, least: bool) -> Callable[[Expr, Expr], Expr]:
    def pick(a: Expr, b: Expr) -> Expr:
        below = _compared(bounds, "LessOrEqual")(a, b)
        return a if below == least else b

    return pick


def _truth(x: Any) -> bool:
    if not isinstance(x, bool):
        raise _Unknown
    return x


def _cast(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
    if node.attributes.get("to") not in _INTEGERS:
        raise _Unknown
    if isinstance(ks[0].reshape(-1)[0], Ratio):  # cut towards zero
        return _each(_rounded(bounds), ks[0])
    return _each(lambda x: Expr.of(int(x)) if isinstance(x, bool) else x, ks[0])


def _axes(node: Node, inputs: Sequence[Known | None], rank: int) -> list[int] | None:
    given = node.attributes.get("axes")
    if given is not None:
        return [int(a) % rank for a in given]  # type: ignore[union-attr]
    if len(inputs) > 1 and inputs[1] is not None:
        return [a % rank for a in _numbers(inputs[1])]
    return None


def _squeeze(node: Node, ks: list[Known], inputs: Sequence[Known | None], bounds: Bounds) -> Known:
    axes = _axes(node, inputs, ks[0].ndim)
    return np.squeeze(ks[0], None if axes is None else tuple(axes))


def _unsqueeze(node: Node, ks: list[Known], inputs: Sequence[Known | None], bounds: Bounds) -> Known:
    given = node.attributes.get("axes")
    axes: list[int] = list(given) if given is not None else _numbers(ks[1])  # type: ignore[arg-type]
    return np.expand_dims(ks[0], tuple(axes))


def _slice(node: Node, ks: list[Known], inputs: Sequence[Known | None], bounds: Bounds) -> Known:
    data = ks[0]
    if node.version < 10:
        attributes: Any = node.attributes
        starts, ends, axes, steps = attributes["starts"], attributes["ends"], attributes.get("axes"), None
    else:
        rest = [None if k is None else _numbers(k) for k in inputs[1:]] + [None] * 4
        starts, ends, axes, steps = rest[:4]
    index = [slice(None)] * data.ndim
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step = steps[i] if steps else 1
        axis = axes[i] if axes else i
        stop = None if step < 0 and end < -data.shape[axis] else end
        index[axis] = slice(start, stop, step)
    return data[tuple(index)]


def _reshape(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
    if node.version < 5:
        raise _Unknown
    target = _numbers(ks[1])
    if not node.attributes.get("allowzero"):
        target = [ks[0].shape[i] if n == 0 else n for i, n in enumerate(target)]
    return ks[0].reshape(target)


def _constant_of_shape(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
    value = node.attributes.get("value")
    item: Any = 0 if not isinstance(value, np.ndarray) else value.reshape(-1)[0].item()
    if isinstance(item, float):
        raise _Unknown
    shape = _numbers(ks[0])
    made = np.empty(shape, object)
    made.reshape(-1)[:] = [item if isinstance(item, bool) else Expr.of(item)] * made.size
    return made


def _reduced(function: Callable[[Any, Any], Any]) -> Callable[..., Known]:
    def evaluate(node: Node, ks: list[Known], inputs: Sequence[Known | None], bounds: Bounds) -> Known:
        axes = _axes(node, inputs, max(ks[0].ndim, 1))
        if ks[0].ndim != 1 or (axes is None and node.attributes.get("noop_with_empty_axes")) or axes == []:
            raise _Unknown
        total = ks[0][0]
        for x in ks[0][1:]:
            total = function(total, x)
        return _objects([total]) if node.attributes.get("keepdims", 1) else _objects(total)

    return evaluate


def _folded(function: Callable[[Bounds], Callable[[Any, Any], Any]]) -> Callable[..., Known]:
    def evaluate(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
        made = ks[0]
        for k in ks[1:]:
            made = _each(function(bounds), made, k)
        return made

    return evaluate


def _range(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
    start, limit, delta = (_numbers(k)[0] for k in ks)
    return _objects([Expr.of(i) for i in range(start, limit, delta)])


def _gather(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
    indices = np.array(_numbers(ks[1]), np.int64).reshape(ks[1].shape)
    return _objects(np.take(ks[0], indices, axis=int(node.attributes.get("axis", 0))))  # type: ignore[arg-type]


_TABLE: Final[dict[str, Callable[..., Known]]] = {
    "Identity": lambda node, ks, inputs, bounds: ks[0],
    "Cast": _cast,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Gather": _gather,
    "Reshape": _reshape,
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Concat": lambda node, ks, inputs, bounds: np.concatenate(ks, int(node.attributes["axis"])),
    "Transpose": lambda node, ks, inputs, bounds: np.transpose(ks[0], node.attributes.get("perm")),
    "Expand": lambda node, ks, inputs, bounds: np.broadcast_to(
        ks[0], np.broadcast_shapes(ks[0].shape, tuple(_numbers(ks[1])))
    ).copy(),
    "Tile": lambda node, ks, inputs, bounds: np.tile(ks[0], _numbers(ks[1])),
    "Add": lambda node, ks, inputs, bounds: _each(lambda a, b: a + b, *ks),
    "Sub": lambda node, ks, inputs, bounds: _each(lambda a, b: a - b, *ks),
    "Mod": _remainder,
    "Mul": lambda node, ks, inputs, bounds: _each(lambda a, b: a * b, *ks),
    "Neg": lambda node, ks, inputs, bounds: _each(lambda a: -a, *ks),
    "Div": lambda node, ks, inputs, bounds: _each(_divided(bounds), *ks),
    "Max": _folded(lambda bounds: _extreme(bounds, False)),
    "Min": _folded(lambda bounds: _extreme(bounds, True)),
    "ReduceProd": _reduced(lambda a, b: a * b),
    "ReduceSum": _reduced(lambda a, b: a + b),
    "Where": lambda node, ks, inputs, bounds: _each(lambda c, a, b: a if _truth(c) else b, *ks),
    "Not": lambda node, ks, inputs, bounds: _each(lambda a: not _truth(a), *ks),
    "And": lambda node, ks, inputs, bounds: _each(lambda a, b: _truth(a) and _truth(b), *ks),
    "Or": lambda node, ks, inputs, bounds: _each(lambda a, b: _truth(a) or _truth(b), *ks),
    **{
        op: lambda node, ks, inputs, bounds: _each(_compared(bounds, node.op_type), *ks)
        for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
}


def _as_ratios(node: Node, ks: list[Known], inputs: Any, bounds: Bounds) -> Known:
    return _each(lambda x: x if isinstance(x, Ratio) else Ratio(Expr.of(x)), ks[0])


_RATIOS: Final[dict[str, Callable[..., Known]]] = {
    **{op: _TABLE[op] for op in ("Identity", "Squeeze", "Unsqueeze", "Slice", "Gather", "Reshape", "Concat")},
    **{op: _TABLE[op] for op in ("Add", "Sub", "Mul", "Transpose")},
    "Cast": _as_ratios,
    "Div": lambda node, ks, inputs, bounds: _each(lambda a, b: a / b, *ks),
    "Ceil": lambda node, ks, inputs, bounds: _each(lambda r: Ratio(_rounded(bounds, up=True)(r)), ks[0]),
    "Floor": lambda node, ks, inputs, bounds: _each(lambda r: Ratio(_rounded(bounds)(r)), ks[0]),
}
