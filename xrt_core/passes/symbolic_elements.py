"""Elements of small tensors that hold sizes, as expressions: what each operator makes of those of its inputs.

The rules of `SymbolicShapes`: of integers, of sizes in floating point, and of the range of larger integer tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.symbols import Bounds, Expr, expression, least, product
from xrt_core.ir.types import DTYPE_TO_ONNX, TensorType
from xrt_core.passes.size_ratios import FOLLOWED, Ratio

MOST_ELEMENTS: Final = 64
"""Elements of a tensor that are followed."""

_WIDE_INTEGERS: Final = (DTYPE_TO_ONNX[np.dtype(np.int32)], DTYPE_TO_ONNX[np.dtype(np.int64)])

_LARGEST: Final = int(np.iinfo(np.int32).max)
MOST_COLUMNS: Final = 8
"""Columns of an index that are followed by themselves."""

Elements = np.ndarray
"""An array of objects: an Expr for each element, None where nothing is known."""
Interval = tuple[Expr, Expr]
"""The least and the greatest element."""


class KnownSizes(Protocol):
    """What the rules may ask about the graph so far: `SymbolicShapes`."""

    def elements(self, v: Value | None) -> Elements | None:
        """The elements of a small integer tensor; None where nothing is known of it."""

    def ratios(self, v: Value | None) -> np.ndarray | None:
        """The elements of a small tensor of floats as `Ratio`, None where nothing is known of one."""

    def rounded(self, r: Ratio, up: bool = False) -> Expr | None:
        """A quotient of sizes rounded as floats round it."""

    def interval(self, v: Value | None) -> Interval | None:
        """The least and the greatest element that an integer tensor may have; None where nothing is known of it."""

    def columns(self, v: Value | None) -> tuple[Interval | None, ...] | None:
        """The intervals of the elements in each column of an integer tensor's last axis; None where there are many."""

    def bounds(self, e: Expr) -> Bounds:
        """The least and the greatest value of an expression, None where no limit is known."""

    def least(self, e: Expr) -> int | None:
        """A number that the expression is never below."""

    def is_least(self, e: Expr, other: Expr) -> bool:
        """Whether the expression is never greater than another."""

    def holds(self, e: Expr) -> bool:
        """Whether an expression is not negative: always, or in the first call, which makes it a guard."""


def dims_of(v: Value | None) -> list[Expr | None] | None:
    """The dimensions of a value as expressions; None where its rank is unknown."""
    return None if v is None or v.shape is None else [expression(d) for d in v.shape]


# --- elements ---------------------------------------------------------------------------------------------------------


def objects(items: Sequence[Expr | Ratio | None]) -> Elements:
    made = np.empty(len(items), object)
    made[:] = list(items)
    return made


def _shape(s: KnownSizes, node: Node) -> Elements | None:
    dims = dims_of(node.inputs[0])
    a: Any = node.attributes
    return None if dims is None else objects(dims[a.get("start", 0) : a.get("end")])


def _size(s: KnownSizes, node: Node) -> Elements | None:
    dims = dims_of(node.inputs[0])
    if dims is None:
        return None
    made = np.empty((), object)
    made[()] = product_of(dims)
    return made


def product_of(dims: Sequence[Expr | None]) -> Expr | None:
    return None if any(d is None for d in dims) else product(d for d in dims if d is not None)


def _same(s: KnownSizes, node: Node) -> Elements | None:
    return s.elements(node.inputs[0])


def _reshaped(s: KnownSizes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    out = node.outputs[0]
    if found is None or out is None:
        return None
    op, axes = node.op_type, constants(s, node, 1, "axes")
    if op == "Reshape":
        target = constants(s, node, 1)
        return None if target is None or 0 in target else found.reshape(target)
    if op == "Squeeze":
        return found.reshape([d for d in found.shape if d != 1]) if axes is None else np.squeeze(found, tuple(axes))
    return None if axes is None else np.expand_dims(found, tuple(axes))


def constants(s: KnownSizes, node: Node, index: int, attribute: str = "") -> list[int] | None:
    """The numbers of an operand, or of the attribute that older versions have for it."""
    given: Any = node.attributes.get(attribute) if attribute else None
    if given is not None:
        return list(given)
    found = s.elements(node.inputs[index]) if index < len(node.inputs) else None
    if found is None:
        return None
    numbers = [None if e is None else e.constant for e in found.reshape(-1)]
    return None if any(n is None for n in numbers) else [n for n in numbers if n is not None]


def _gather(s: KnownSizes, node: Node) -> Elements | None:
    found, index = s.elements(node.inputs[0]), node.inputs[1]
    if found is None or index is None or index.data is None:
        return None
    return np.asarray(np.take(found, index.data, axis=node.attributes.get("axis", 0)), object)  # type: ignore[arg-type]


def _concat(s: KnownSizes, node: Node) -> Elements | None:
    parts = []
    for v in node.inputs:
        found = s.elements(v)
        if found is None:
            if v is None or not v.is_static or math.prod(v.shape) > MOST_ELEMENTS:  # type: ignore[arg-type]
                return None
            found = np.full(v.shape, None, object)  # type: ignore[arg-type]
        parts.append(found)
    return np.concatenate(parts, axis=node.attributes["axis"])  # type: ignore[arg-type]


def _slice_elements(s: KnownSizes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    starts, ends = constants(s, node, 1, "starts"), constants(s, node, 2, "ends")
    if found is None or starts is None or ends is None:
        return None
    axes = constants(s, node, 3, "axes") or list(range(len(starts)))
    steps = constants(s, node, 4) or [1] * len(starts)
    index: list[slice] = [slice(None)] * found.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, end, step)  # Python's rules are ONNX's, backwards as well
    return found[tuple(index)]


def _elementwise(op: Callable[[KnownSizes, Any, Any], Any]) -> Callable[..., Elements | None]:
    def rule(s: KnownSizes, node: Node) -> Elements | None:
        a, b = (s.elements(v) for v in node.inputs)
        if a is None or b is None:
            return None
        x, y = np.broadcast_arrays(a, b)
        made = [None if p is None or q is None else op(s, p, q) for p, q in zip(x.flat, y.flat, strict=True)]
        return objects(made).reshape(x.shape)

    return rule


def _divided(s: KnownSizes, a: Expr, b: Expr) -> Expr | None:
    """ONNX rounds towards zero, which is down where nothing is negative: always, or in the first call, with a guard."""
    divisor, exact = b.constant, divided_evenly(s, a, b)
    if exact is not None:
        return exact
    return a // divisor if divisor is not None and divisor > 0 and s.holds(a) else None


def divided_evenly(s: KnownSizes, a: Expr, b: Expr) -> Expr | None:
    """The expression that times another gives this one; None where there is none.

    A symbol of the divisor may have the size of one of the dividend in the first call, which makes that a guard:
    exporters have names of their own for sizes that the program takes to be equal.
    """
    exact = a.divided(b)
    if exact is not None or b.constant is not None:
        return exact
    for x in sorted(b.symbols - a.symbols):
        for y in sorted(a.symbols - b.symbols):
            found = a.substitute({y: Expr.of(x)}).divided(b)
            apart = Expr.of(x) - Expr.of(y)
            if found is not None and s.holds(apart) and s.holds(-apart):
                return found
    return None


def _equal(s: KnownSizes, a: Expr, b: Expr) -> Expr | None:
    low, high = s.bounds(a - b)
    if low == high == 0 or a == b:
        return Expr.of(1)
    apart = (low is not None and low > 0) or (high is not None and high < 0)
    return Expr.of(0) if apart else None


def _extreme(largest: bool) -> Callable[[KnownSizes, Expr, Expr], Expr]:
    def op(s: KnownSizes, a: Expr, b: Expr) -> Expr:
        if s.is_least(a, b):
            return b if largest else a
        if s.is_least(b, a):
            return a if largest else b
        return a + b - least(a, b) if largest else least(a, b)

    return op


def _where(s: KnownSizes, node: Node) -> Elements | None:
    found = [s.elements(v) for v in node.inputs]
    if any(f is None for f in found):
        return None
    c, x, y = np.broadcast_arrays(*found)  # type: ignore[arg-type]
    made = [
        None if k is None or k.constant is None else p if k.constant else q
        for k, p, q in zip(c.flat, x.flat, y.flat, strict=True)
    ]
    return objects(made).reshape(c.shape)


def _filled(s: KnownSizes, node: Node) -> Elements | None:
    shape = constants(s, node, 0)
    value = node.attributes.get("value")
    if shape is None or not isinstance(value, np.ndarray) or math.prod(shape) > MOST_ELEMENTS:
        return None
    made = np.empty(shape, object)
    made[...] = Expr.of(int(value.reshape(-1)[0]))
    return made


def _transposed(s: KnownSizes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    return None if found is None else np.transpose(found, node.attributes.get("perm"))  # type: ignore[arg-type]


def _reduced(largest: bool) -> Callable[[KnownSizes, Node], Elements | None]:
    def rule(s: KnownSizes, node: Node) -> Elements | None:
        found, out = s.elements(node.inputs[0]), node.outputs[0]
        shape = None if out is None or not out.is_static else cast("tuple[int, ...]", out.shape)
        if found is None or shape is None or math.prod(shape) != 1:
            return None
        items = list(found.reshape(-1))
        if not items or any(e is None for e in items):
            return None
        return objects([functools.reduce(partial(_extreme(largest), s), items)]).reshape(shape)

    return rule


def _only(s: KnownSizes, node: Node) -> Elements | None:
    """A reduction of one element, as exporters write the largest of a batch of one: that element."""
    found, out = s.elements(node.inputs[0]), node.outputs[0]
    if found is None or found.size != 1 or out is None or not out.is_static:
        return None
    return found.reshape(out.shape)  # type: ignore[arg-type]


def _prod(s: KnownSizes, node: Node) -> Elements | None:
    found, out = s.elements(node.inputs[0]), node.outputs[0]
    if found is None or found.ndim > 1 or out is None:
        return None
    made = np.empty(1 if node.attributes.get("keepdims", 1) and found.ndim else (), object)
    made[...] = product_of(list(found.reshape(-1)))
    return made


def _cast(s: KnownSizes, node: Node) -> Elements | None:
    """Of floats too, which are cut towards zero."""
    found = s.ratios(node.inputs[0])
    if found is None:
        return _same(s, node)
    if node.attributes["to"] not in _WIDE_INTEGERS:
        return None
    return objects([None if r is None else s.rounded(r) for r in found.flat]).reshape(found.shape)


ELEMENT_RULES: Final[Mapping[str, Callable[[KnownSizes, Node], Elements | None]]] = MappingProxyType(
    {
        "Shape": _shape,
        "Size": _size,
        "Cast": _cast,
        "Identity": _same,
        "Reshape": _reshaped,
        "Squeeze": _reshaped,
        "Unsqueeze": _reshaped,
        "Gather": _gather,
        "Concat": _concat,
        "Slice": _slice_elements,
        "Add": _elementwise(lambda s, a, b: a + b),
        "Sub": _elementwise(lambda s, a, b: a - b),
        "Mul": _elementwise(lambda s, a, b: a * b),
        "Div": _elementwise(_divided),
        "Equal": _elementwise(_equal),
        "Max": _elementwise(_extreme(True)),
        "Min": _elementwise(_extreme(False)),
        "Where": _where,
        "ConstantOfShape": _filled,
        "ReduceMax": _reduced(True),
        "ReduceMin": _reduced(False),
        "ReduceProd": _prod,
        "Transpose": _transposed,
    }
)


# --- sizes in floating point ------------------------------------------------------------------------------------------


class _Floats:
    """Element rules see ratios through it, where an operand has floats."""

    def __init__(self, s: KnownSizes) -> None:
        self._s = s

    def elements(self, v: Value | None) -> Elements | None:
        return self._s.ratios(v) if v is not None and v.dtype in FOLLOWED else self._s.elements(v)


def _of_floats(rule: Callable[[Any, Node], Elements | None]) -> Callable[[KnownSizes, Node], Elements | None]:
    return lambda s, node: rule(_Floats(s), node)


def _to_ratios(s: KnownSizes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    if found is None:
        return s.ratios(node.inputs[0])
    return objects([None if e is None else Ratio(e) for e in found.flat]).reshape(found.shape)


def _rounding(up: bool) -> Callable[[KnownSizes, Node], Elements | None]:
    def rule(s: KnownSizes, node: Node) -> Elements | None:
        found = s.ratios(node.inputs[0])
        if found is None:
            return None
        whole = [None if r is None else s.rounded(r, up) for r in found.flat]
        return objects([None if e is None else Ratio(e) for e in whole]).reshape(found.shape)

    return rule


RATIO_RULES: Final[Mapping[str, Callable[[KnownSizes, Node], Elements | None]]] = MappingProxyType(
    {
        "Cast": _to_ratios,
        "Ceil": _rounding(True),
        "Floor": _rounding(False),
        "Identity": _of_floats(_same),
        "Reshape": _of_floats(_reshaped),
        "Squeeze": _of_floats(_reshaped),
        "Unsqueeze": _of_floats(_reshaped),
        "Gather": _of_floats(_gather),
        "Concat": _of_floats(_concat),
        "ReduceMax": _of_floats(_only),
        "ReduceMin": _of_floats(_only),
        "Slice": _of_floats(_slice_elements),
        "Transpose": _of_floats(_transposed),
        "Add": _of_floats(_elementwise(lambda s, a, b: a + b)),
        "Sub": _of_floats(_elementwise(lambda s, a, b: a - b)),
        "Mul": _of_floats(_elementwise(lambda s, a, b: a * b)),
        "Div": _of_floats(_elementwise(lambda s, a, b: a / b)),
    }
)


# --- ranges -----------------------------------------------------------------------------------------------------------


def result_interval(s: KnownSizes, node: Node) -> Interval | None:
    """The range of a result of integers. Those of 64 bits do not wrap around: they are made of sizes of tensors; of 32
    bits, that the range fits is a guard, if it is not known."""
    found, result = _interval(s, node), node.outputs[0]
    if found is None or result is None or result.dtype != np.int32:
        return found
    return found if s.holds(found[0] + _LARGEST) and s.holds(_LARGEST - found[1]) else None


def _interval(s: KnownSizes, node: Node) -> Interval | None:
    op = node.op_type
    x = node.inputs[0] if node.inputs else None
    if op == "Cast" and x is not None and x.dtype is not None and x.dtype.kind == "b":
        return Expr.of(0), Expr.of(1)
    if op in ("ArgMax", "ArgMin", "CumSum"):
        return _along_axis(s, node)
    if op == "Range":
        first, last, step = (s.interval(v) for v in node.inputs)
        if first is None or last is None or step is None or step[0].constant != 1 or step[1].constant != 1:
            return None
        return first[0], last[1] - 1
    if op in ("Add", "Sub", "Mul"):
        a, b = (s.interval(v) for v in node.inputs)
        if a is None or b is None:
            return None
        if op != "Mul":
            return (a[0] + b[0], a[1] + b[1]) if op == "Add" else (a[0] - b[1], a[1] - b[0])
        least = s.least(a[0]), s.least(b[0])
        return (a[0] * b[0], a[1] * b[1]) if None not in least and min(least) >= 0 else None  # type: ignore[type-var, operator]
    return s.interval(node.inputs[0]) if _is_of_first(node) else None


def _along_axis(s: KnownSizes, node: Node) -> Interval | None:
    """The range of positions along an axis, or of sums of what is not negative."""
    sums, dims = node.op_type == "CumSum", dims_of(node.inputs[0])
    given = constants(s, node, 1) if sums else [node.attributes.get("axis", 0)]
    at = given[0] if given else None
    size = dims[at] if dims is not None and isinstance(at, int) and -len(dims) <= at < len(dims) else None
    if size is None or not sums:
        return None if size is None else (Expr.of(0), size - 1)
    each = s.interval(node.inputs[0])
    least = None if each is None else s.least(each[0])
    return (Expr.of(0), each[1] * size) if each is not None and least is not None and least >= 0 else None


def _is_of_first(node: Node) -> bool:
    """Whether all elements of a result are the first input's."""
    return node.op_type == "Cast" or (traits_of(node).view and node.op_type != "BitCast")


def result_columns(s: KnownSizes, node: Node, result: TensorType) -> tuple[Interval | None, ...] | None:
    """The ranges of the columns of a result of integers, where they are those of columns of inputs."""
    width, rank = result.shape[-1] if result.shape else None, len(result.shape or ())
    if not isinstance(width, int) or not 0 < width <= MOST_COLUMNS:
        return None
    if node.op_type == "Concat" and node.attributes.get("axis") in (-1, rank - 1):
        parts = [s.columns(v) for v in node.inputs]
        whole = [] if any(p is None for p in parts) else [i for p in parts if p is not None for i in p]
        return tuple(whole) if len(whole) == width else None
    x = node.inputs[0] if node.inputs else None
    if x is None or not x.shape or x.shape[-1] != width or not _is_of_first(node) or node.op_type == "Transpose":
        return None
    return s.columns(x) if x.dtype == result.dtype or result.dtype == np.int64 else None  # fewer bits wrap around
