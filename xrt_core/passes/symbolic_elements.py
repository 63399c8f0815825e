"""Elements of small tensors that hold sizes, as expressions: what each operator makes of those of its inputs.

The rules of `SymbolicShapes` and of padding: of integers and booleans (0 and 1), and of sizes in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.symbols import Bounds, Expr, expression, least, product
from xrt_core.ir.types import DTYPE_TO_ONNX
from xrt_core.passes.size_ratios import Ratio

MOST_ELEMENTS: Final = 64
"""Elements of a tensor that are followed."""

BEYOND: Final = 10**9
"""What stands for the end of an axis, or a step over all of it: no size is larger, which is a guard."""

_BOOL: Final = DTYPE_TO_ONNX[np.dtype(np.bool_)]
_WIDE_INTEGERS: Final = (DTYPE_TO_ONNX[np.dtype(np.int32)], DTYPE_TO_ONNX[np.dtype(np.int64)])

Elements = np.ndarray
"""An array of objects: an Expr for each element, None where nothing is known."""


class KnownElements(Protocol):
    """What the rules may ask about the graph so far."""

    def dims(self, v: Value | None) -> list[Expr | None] | None:
        """The dimensions of a value; None where its rank is unknown."""

    def elements(self, v: Value | None) -> Elements | None:
        """The elements of a small tensor of integers or booleans; None where nothing is known of it."""

    def ratios(self, v: Value | None) -> np.ndarray | None:
        """The elements of a small tensor of floats as `Ratio`, None where nothing is known of one."""

    def rounded(self, r: Ratio, up: bool = False) -> Expr | None:
        """A quotient of sizes rounded as floats round it."""

    def bounds(self, e: Expr) -> Bounds:
        """The least and the greatest value of an expression, None where no limit is known."""

    def holds(self, e: Expr) -> bool:
        """Whether an expression is not negative: always, or by a guard where the caller makes guards."""


def dims_of(v: Value | None) -> list[Expr | None] | None:
    """The dimensions of a value as expressions; None where its rank is unknown."""
    return None if v is None or v.shape is None else [expression(d) for d in v.shape]


def is_least(s: KnownElements, e: Expr, other: Expr) -> bool:
    """Whether an expression is never greater than another."""
    low = s.bounds(other - e)[0]
    return low is not None and low >= 0


# --- integers and booleans --------------------------------------------------------------------------------------------

_ElementRule = Callable[[KnownElements, Node], "Elements | None"]


def objects(items: Sequence[Expr | Ratio | None]) -> Elements:
    made = np.empty(len(items), object)
    made[:] = list(items)
    return made


def _alone(item: Expr | None) -> Elements:
    made = np.empty((), object)
    made[()] = item
    return made


def _shape(s: KnownElements, node: Node) -> Elements | None:
    dims = s.dims(node.inputs[0])
    a: Any = node.attributes
    return None if dims is None else objects(dims[a.get("start", 0) : a.get("end")])


def _size(s: KnownElements, node: Node) -> Elements | None:
    dims = s.dims(node.inputs[0])
    return None if dims is None else _alone(product_of(dims))


def product_of(dims: Sequence[Expr | None]) -> Expr | None:
    return None if any(d is None for d in dims) else product(d for d in dims if d is not None)


def _same(s: KnownElements, node: Node) -> Elements | None:
    return s.elements(node.inputs[0])


def constants(s: KnownElements, node: Node, index: int, attribute: str = "") -> list[int] | None:
    """The numbers of an operand, or of the attribute that older versions have for it."""
    given: Any = node.attributes.get(attribute) if attribute else None
    if given is not None:
        return list(given)
    found = s.elements(node.inputs[index]) if index < len(node.inputs) else None
    if found is None:
        return None
    numbers = [None if e is None else e.constant for e in found.reshape(-1)]
    return None if any(n is None for n in numbers) else [n for n in numbers if n is not None]


def _is_given(node: Node, index: int) -> bool:
    return index < len(node.inputs) and node.inputs[index] is not None


def _reshaped(s: KnownElements, node: Node) -> Elements | None:
    found, target = s.elements(node.inputs[0]), constants(s, node, 1, "shape")
    if found is None or target is None:
        return None
    if not node.attributes.get("allowzero"):
        target = [found.shape[i] if n == 0 else n for i, n in enumerate(target)]
    return found.reshape(target)


def _squeezed(s: KnownElements, node: Node) -> Elements | None:
    found, axes = s.elements(node.inputs[0]), constants(s, node, 1, "axes")
    if found is None or (axes is None and _is_given(node, 1)):
        return None
    return np.squeeze(found, None if axes is None else tuple(axes))


def _unsqueezed(s: KnownElements, node: Node) -> Elements | None:
    found, axes = s.elements(node.inputs[0]), constants(s, node, 1, "axes")
    return None if found is None or axes is None else np.expand_dims(found, tuple(axes))


def _gather(s: KnownElements, node: Node) -> Elements | None:
    found, index = s.elements(node.inputs[0]), s.elements(node.inputs[1])
    numbers = constants(s, node, 1)
    if found is None or index is None or numbers is None:
        return None
    where = np.array(numbers, np.int64).reshape(index.shape)
    return np.asarray(np.take(found, where, axis=node.attributes.get("axis", 0)), object)  # type: ignore[arg-type]


def _concat(s: KnownElements, node: Node) -> Elements | None:
    parts = []
    for v in node.inputs:
        found = s.elements(v)
        if found is None:
            dims = s.dims(v)
            sizes = [] if dims is None else [d.constant for d in dims if d is not None]
            if dims is None or len(sizes) < len(dims) or None in sizes or math.prod(sizes) > MOST_ELEMENTS:  # type: ignore[arg-type]
                return None
            found = np.full(sizes, None, object)  # type: ignore[arg-type]
        parts.append(found)
    return np.concatenate(parts, axis=node.attributes["axis"])  # type: ignore[arg-type]


def _sliced(s: KnownElements, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    starts, ends = constants(s, node, 1, "starts"), constants(s, node, 2, "ends")
    axes, steps = constants(s, node, 3, "axes"), constants(s, node, 4)
    if found is None or starts is None or ends is None:
        return None
    if (axes is None and _is_given(node, 3)) or (steps is None and _is_given(node, 4)):
        return None
    index: list[slice] = [slice(None)] * found.ndim
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, end, step)  # Python's rules are ONNX's, backwards as well
    return found[tuple(index)]


def _transposed(s: KnownElements, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    return None if found is None else np.transpose(found, node.attributes.get("perm"))  # type: ignore[arg-type]


def _expanded(s: KnownElements, node: Node) -> Elements | None:
    found, shape = s.elements(node.inputs[0]), constants(s, node, 1)
    if found is None or shape is None:
        return None
    whole = np.broadcast_shapes(found.shape, tuple(shape))
    return np.broadcast_to(found, whole).copy() if math.prod(whole) <= MOST_ELEMENTS else None


def _tiled(s: KnownElements, node: Node) -> Elements | None:
    found, repeats = s.elements(node.inputs[0]), constants(s, node, 1)
    if found is None or repeats is None or found.size * math.prod(repeats) > MOST_ELEMENTS:
        return None
    return np.tile(found, repeats)


def _range(s: KnownElements, node: Node) -> Elements | None:
    """Of numbers, or of so many numbers from the first one on."""
    first, count, step = (s.elements(v) for v in node.inputs)
    if first is None or count is None or step is None:
        return None
    a, z, by = first.item(), count.item(), step.item()
    if a is None or z is None or by is None or by.constant is None or (z - a).constant is None:
        return None
    places = range(0, (z - a).constant, by.constant)
    return objects([a + n for n in places]) if len(places) <= MOST_ELEMENTS else None


def _filled(s: KnownElements, node: Node) -> Elements | None:
    shape = constants(s, node, 0)
    value = node.attributes.get("value")
    if shape is None or not isinstance(value, np.ndarray) or math.prod(shape) > MOST_ELEMENTS:
        return None
    if value.dtype.kind not in "iub":
        return None
    made = np.empty(shape, object)
    made[...] = Expr.of(int(value.reshape(-1)[0]))
    return made


def _elementwise(op: Callable[..., Any]) -> _ElementRule:
    """Of `op(s, item, ...)`, which gives an item, or None where it does not follow."""

    def rule(s: KnownElements, node: Node) -> Elements | None:
        found = [s.elements(v) for v in node.inputs]
        if any(f is None for f in found):
            return None
        arrays = np.broadcast_arrays(*found)  # type: ignore[arg-type]
        made = [None if None in items else op(s, *items) for items in zip(*(a.flat for a in arrays), strict=True)]
        return objects(made).reshape(arrays[0].shape)

    return rule


def _folded(op: Callable[..., Any]) -> _ElementRule:
    """As `_elementwise`, of an operator of two that takes any number."""
    return _elementwise(lambda s, *items: _total(op, s, items))


def _total(op: Callable[..., Any], s: KnownElements, items: Sequence[Any]) -> Any:
    total = items[0]
    for item in items[1:]:
        total = None if total is None else op(s, total, item)
    return total


def _add(s: KnownElements, a: Any, b: Any) -> Any:
    return a + b


def _subtract(s: KnownElements, a: Any, b: Any) -> Any:
    return a - b


def _multiply(s: KnownElements, a: Any, b: Any) -> Any:
    return a * b


def _divide(s: KnownElements, a: Expr, b: Expr) -> Expr | None:
    """ONNX rounds towards zero, which is down where nothing is negative: always, or in the first call, with a guard."""
    x, divisor, exact = a.constant, b.constant, divided_evenly(s, a, b)
    if exact is not None:
        return exact
    if not divisor:
        return None
    if x is not None:
        return Expr.of(abs(x) // abs(divisor) * (1 if (x < 0) == (divisor < 0) else -1))
    return a // divisor if divisor > 0 and s.holds(a) else None


def divided_evenly(s: KnownElements, a: Expr, b: Expr) -> Expr | None:
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


def _modulo(s: KnownElements, node: Node) -> Elements | None:
    """The remainder of a division that rounds down, by a number."""

    def remainder(_: KnownElements, a: Expr, b: Expr) -> Expr | None:
        divisor = b.constant
        return a - (a // divisor) * divisor if divisor is not None and divisor > 0 else None

    return None if node.attributes.get("fmod") else _elementwise(remainder)(s, node)


def extreme(largest: bool) -> Callable[[KnownElements, Expr, Expr], Expr]:
    """The rule of the larger, or the smaller, of two expressions."""

    def op(s: KnownElements, a: Expr, b: Expr) -> Expr:
        if is_least(s, a, b):
            return b if largest else a
        if is_least(s, b, a):
            return a if largest else b
        for x, y in ((a, b), (b, a)):
            if (y.constant or 0) >= BEYOND and s.holds(y - x):
                return y if largest else x
        return a + b - least(a, b) if largest else least(a, b)

    return op


def _equal(s: KnownElements, a: Expr, b: Expr) -> Expr | None:
    low, high = s.bounds(a - b)
    if low == high == 0 or a == b:
        return Expr.of(1)
    apart = (low is not None and low > 0) or (high is not None and high < 0)
    return Expr.of(0) if apart else None


def _at_least(s: KnownElements, a: Expr, b: Expr) -> Expr | None:
    low, high = s.bounds(a - b)
    if a == b or (low is not None and low >= 0):
        return Expr.of(1)
    return Expr.of(0) if high is not None and high < 0 else None


def _not(s: KnownElements, a: Expr | None) -> Expr | None:
    return None if a is None or a.constant is None else Expr.of(not a.constant)


def _logical(decided: bool) -> _ElementRule:
    """Of And and Or. decided: what one operand makes the result, whatever the other is."""

    def rule(s: KnownElements, node: Node) -> Elements | None:
        found, result = [s.elements(v) for v in node.inputs], node.outputs[0]
        given = [np.full((), None, object) if f is None else f for f in found]
        if all(f is not None for f in found):
            shape = np.broadcast_shapes(*(f.shape for f in given))
        elif result is None or not result.is_static or result.shape is None:
            return None
        else:
            shape = result.shape
        if math.prod(shape) > MOST_ELEMENTS:
            return None
        made = []
        for items in zip(*(np.broadcast_to(f, shape).flat for f in given), strict=True):
            known = [bool(e.constant) for e in items if e is not None and e.constant is not None]
            settled = decided in known or len(known) == 2
            made.append(Expr.of(decided if decided in known else not decided) if settled else None)
        return objects(made).reshape(shape)

    return rule


def _where(s: KnownElements, node: Node) -> Elements | None:
    found = [s.elements(v) for v in node.inputs]
    if any(f is None for f in found):
        return None
    c, x, y = np.broadcast_arrays(*found)  # type: ignore[arg-type]
    made = [
        None if k is None or k.constant is None else p if k.constant else q
        for k, p, q in zip(c.flat, x.flat, y.flat, strict=True)
    ]
    return objects(made).reshape(c.shape)


def _reduced(op: Callable[..., Any], of_nothing: Expr | None = None) -> _ElementRule:
    """Of all elements, which reductions of sizes are."""

    def rule(s: KnownElements, node: Node) -> Elements | None:
        found, axes = s.elements(node.inputs[0]), constants(s, node, 1, "axes")
        if found is None or (axes is None and _is_given(node, 1)):
            return None
        if not axes and node.attributes.get("noop_with_empty_axes"):
            return found
        over = {a % found.ndim for a in axes} if axes else set(range(found.ndim))
        if any(n != 1 for i, n in enumerate(found.shape) if i not in over):
            return None
        items = list(found.reshape(-1))
        total = None if None in items else _total(op, s, items) if items else of_nothing
        kept = node.attributes.get("keepdims", 1)
        return _alone(total).reshape([1] * (found.ndim if kept else found.ndim - len(over)))

    return rule


def _cast(s: KnownElements, node: Node) -> Elements | None:
    """Of floats too, which are cut towards zero."""
    to, ratios, found = node.attributes["to"], s.ratios(node.inputs[0]), s.elements(node.inputs[0])
    if to == _BOOL and found is not None:
        made = [None if e is None else _not(s, _equal(s, e, Expr.of(0))) for e in found.flat]
        return objects(made).reshape(found.shape)
    if to not in _WIDE_INTEGERS:
        return None
    if ratios is None:
        return found
    return objects([None if r is None else s.rounded(r) for r in ratios.flat]).reshape(ratios.shape)


ELEMENT_RULES: Final[Mapping[str, _ElementRule]] = MappingProxyType(
    {
        "Shape": _shape,
        "Size": _size,
        "Cast": _cast,
        "Identity": _same,
        "Reshape": _reshaped,
        "Squeeze": _squeezed,
        "Unsqueeze": _unsqueezed,
        "Gather": _gather,
        "Concat": _concat,
        "Slice": _sliced,
        "Transpose": _transposed,
        "Expand": _expanded,
        "Tile": _tiled,
        "Range": _range,
        "ConstantOfShape": _filled,
        "Add": _elementwise(_add),
        "Sub": _elementwise(_subtract),
        "Mul": _elementwise(_multiply),
        "Div": _elementwise(_divide),
        "Mod": _modulo,
        "Neg": _elementwise(lambda s, a: -a),
        "Max": _folded(extreme(True)),
        "Min": _folded(extreme(False)),
        "Equal": _elementwise(_equal),
        "GreaterOrEqual": _elementwise(_at_least),
        "LessOrEqual": _elementwise(lambda s, a, b: _at_least(s, b, a)),
        "Greater": _elementwise(lambda s, a, b: _not(s, _at_least(s, b, a))),
        "Less": _elementwise(lambda s, a, b: _not(s, _at_least(s, a, b))),
        "Not": _elementwise(_not),
        "And": _logical(False),
        "Or": _logical(True),
        "Where": _where,
        "ReduceMax": _reduced(extreme(True)),
        "ReduceMin": _reduced(extreme(False)),
        "ReduceProd": _reduced(_multiply, Expr.of(1)),
        "ReduceSum": _reduced(_add, Expr.of(0)),
    }
)


# --- sizes in floating point ------------------------------------------------------------------------------------------


class _Floats:
    """Element rules see ratios through it, where an operand has floats."""

    def __init__(self, s: KnownElements) -> None:
        self._s = s

    def dims(self, v: Value | None) -> list[Expr | None] | None:
        return self._s.dims(v)

    def elements(self, v: Value | None) -> Elements | None:
        found = self._s.ratios(v)
        return self._s.elements(v) if found is None else found


def _of_floats(rule: Callable[[Any, Node], Elements | None]) -> _ElementRule:
    return lambda s, node: rule(_Floats(s), node)


def _to_ratios(s: KnownElements, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    if found is None:
        return s.ratios(node.inputs[0])
    return objects([None if e is None else Ratio(e) for e in found.flat]).reshape(found.shape)


def _rounding(up: bool) -> _ElementRule:
    def rule(s: KnownElements, node: Node) -> Elements | None:
        found = s.ratios(node.inputs[0])
        if found is None:
            return None
        whole = [None if r is None else s.rounded(r, up) for r in found.flat]
        return objects([None if e is None else Ratio(e) for e in whole]).reshape(found.shape)

    return rule


def _whole_extreme(largest: bool) -> _ElementRule:
    """Of whole numbers, which floats compare as integers are: rounding keeps their order, and constants are exact."""
    combine = extreme(largest)

    def rule(s: KnownElements, node: Node) -> Elements | None:
        found = [_whole(s, v) for v in node.inputs]
        if any(f is None for f in found):
            return None
        arrays = np.broadcast_arrays(*found)  # type: ignore[arg-type]
        rows = zip(*(a.flat for a in arrays), strict=True)
        made = [None if None in items else _total(combine, s, items) for items in rows]
        return objects([None if e is None else Ratio(e) for e in made]).reshape(arrays[0].shape)

    return rule


def _whole(s: KnownElements, v: Value | None) -> Elements | None:
    """The elements of a tensor of floats that are whole numbers."""
    data = None if v is None else v.data
    if data is not None and data.size <= MOST_ELEMENTS and np.isfinite(data).all():
        numbers = data.reshape(-1).tolist()
        return objects([Expr.of(int(x)) if x == int(x) else None for x in numbers]).reshape(data.shape)
    found = s.ratios(v)
    if found is None:
        return None
    return objects([r.above if r is not None and r.below == 1 else None for r in found.flat]).reshape(found.shape)


def _no_larger(*_: Any) -> None:
    """Quotients are not compared, so that extremes are followed of one element alone: of a batch of one."""


RATIO_RULES: Final[Mapping[str, _ElementRule]] = MappingProxyType(
    {
        "Cast": _to_ratios,
        "Ceil": _rounding(True),
        "Floor": _rounding(False),
        "Identity": _of_floats(_same),
        "Reshape": _of_floats(_reshaped),
        "Squeeze": _of_floats(_squeezed),
        "Unsqueeze": _of_floats(_unsqueezed),
        "Gather": _of_floats(_gather),
        "Concat": _of_floats(_concat),
        "Slice": _of_floats(_sliced),
        "Transpose": _of_floats(_transposed),
        "Max": _whole_extreme(True),
        "Min": _whole_extreme(False),
        "ReduceMax": _of_floats(_reduced(_no_larger)),
        "ReduceMin": _of_floats(_reduced(_no_larger)),
        "Add": _of_floats(_elementwise(_add)),
        "Sub": _of_floats(_elementwise(_subtract)),
        "Mul": _of_floats(_elementwise(_multiply)),
        "Div": _of_floats(_elementwise(lambda s, a, b: a / b)),
    }
)
