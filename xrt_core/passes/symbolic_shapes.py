"""Symbolic shapes: what follows for the shapes of a graph where dimensions of its inputs are symbols.

`SymbolicShapes` goes with the traversal of `shape_specialization`. It knows the elements of small integer tensors as
expressions over the symbols, and from these the dimensions that type inference, which knows numbers alone, leaves open;
of larger integer tensors their range, and from that which computed indices stay within their dimension. What it does
not know stays unknown.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
from msgspec import Struct

from xrt_core.errors import XRTError
from xrt_core.ir.attribute_limits import fault_at, waits_for_sizes
from xrt_core.ir.function import Function, Parameter
from xrt_core.ir.graph import Attribute, Graph, Node, Value, substitute
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.symbols import Expr, Symbol, expression, least, product, shape_for
from xrt_core.ir.types import DTYPE_TO_ONNX, Dim, Shape, TensorType, ValueType
from xrt_core.passes.size_ratios import FOLLOWED, MOST, Ratio

_MOST: Final = 64
"""Elements of a tensor that are followed."""
_END: Final = (1 << 31) - 1
"""An end of a Slice from which it means the end of the axis."""

Dims = list["Expr | None"]

_WIDE_INTEGERS: Final = (DTYPE_TO_ONNX[np.dtype(np.int32)], DTYPE_TO_ONNX[np.dtype(np.int64)])

Elements = np.ndarray
"""An array of objects: an Expr for each element, None where nothing is known."""
Interval = tuple[Expr, Expr]
"""The least and the greatest element."""


class SymbolicShapes:
    """Knowledge about one graph.

    symbols: with their ranges, by name. sizes: of the symbols in the first call. guards: expressions that must not be
    negative for what was found to hold. Where a shape depends on which of two sizes is larger, as that of a Slice does,
    it is taken as in the first call, and that is a guard. within: values, each with a dimension within which all its
    elements are indices.
    """

    def __init__(self, symbols: Mapping[str, Symbol], sizes: Mapping[str, int] | None = None) -> None:
        self._symbols = symbols
        self.sizes: Mapping[str, int] = {} if sizes is None else sizes
        self._known: dict[Value, Elements] = {}
        self._ranges: dict[Value, Interval] = {}
        self._ratios: dict[Value, np.ndarray] = {}
        self.within: set[tuple[Value, Dim]] = set()
        self.guards: dict[Expr, None] = {}

    def types(self, node: Node, types: Sequence[ValueType | None]) -> tuple[ValueType | None, ...]:
        """The types of a node's outputs, with dimensions as expressions where inference left them open."""
        types = [self._own(t) for t in types]  # a model may have names for what it knows nothing of
        if not any(0 in (v.shape or ()) for v in node.inputs if v is not None):
            types = [_without_zeros(t) for t in types]
        if node.domain or not types:
            return tuple(types)
        rule, rule_of_all = _SHAPE_RULES.get(node.op_type), _RULES_OF_ALL_OUTPUTS.get(node.op_type)
        if (rule is None and rule_of_all is None) or all(t is None or _is_known(t) for t in types):
            return tuple(types)
        try:
            shapes = rule_of_all(self, node) if rule_of_all is not None else [rule(self, node)]  # type: ignore[misc]
        except (ArithmeticError, IndexError, KeyError, TypeError, ValueError, XRTError):
            return tuple(types)
        missing = len(types) - len(shapes)
        return tuple(
            t if shape is None else self._merged(t, shape, node)
            for t, shape in zip(types, [*shapes, *[None] * missing], strict=False)
        )

    def _merged(self, t: ValueType | None, shape: Dims, node: Node) -> ValueType | None:
        """A type with the dimensions that a rule found, where inference left them open."""
        dtype = t.dtype if isinstance(t, TensorType) else None
        if dtype is None:
            dtype = self._dtype(node)
        made = [e.dim if isinstance(e, Expr) else None for e in shape]
        if isinstance(t, TensorType) and t.shape is not None and len(t.shape) == len(made):
            pairs = zip(t.shape, made, strict=True)
            made = [f if isinstance(f, int) else m if m is not None else f for f, m in pairs]
        return TensorType(dtype, tuple(made))

    def follow(self, node: Node, types: Sequence[ValueType | None]) -> np.ndarray | None:
        """Note what a node makes of known elements. Returns the array where all of them are numbers."""
        if node.op_type == "Split" and not node.domain:
            self._follow_parts(node, types)
        if len(node.outputs) != 1 or node.outputs[0] is None or node.domain:
            return None
        t = types[0]
        self._note_index(node)
        if isinstance(t, TensorType) and t.dtype == np.int64 and (interval := _interval(self, node)) is not None:
            self._ranges[node.outputs[0]] = interval
        if not isinstance(t, TensorType) or t.dtype is None:
            return None
        rule, known = _ELEMENT_RULES.get(node.op_type), self._known
        if t.dtype in FOLLOWED:
            rule, known = _RATIO_RULES.get(node.op_type), self._ratios
        elif t.dtype.kind not in "iub":
            return None
        if rule is None or not t.is_static or math.prod(t.shape) > _MOST:  # type: ignore[arg-type]
            return None
        try:
            found = rule(self, node)
        except (ArithmeticError, IndexError, TypeError, ValueError, XRTError):
            return None
        if found is None or found.shape != t.shape:
            return None
        constants = [None if e is None else e.constant for e in found.reshape(-1)]
        if found.size and all(c is not None for c in constants):
            return np.array(constants, t.dtype).reshape(found.shape)
        known[node.outputs[0]] = found
        return None

    def _follow_parts(self, node: Node, types: Sequence[ValueType | None]) -> None:
        """As `follow`, of a vector that is split."""
        whole, begin = self.elements(node.inputs[0]), 0
        if whole is None or whole.ndim != 1:
            return
        for v, t in zip(node.outputs, types, strict=True):
            if not isinstance(t, TensorType) or t.shape is None or not isinstance(t.shape[0], int):
                return
            if v is not None:
                self._known[v] = whole[begin : begin + t.shape[0]]
            begin += t.shape[0]

    def simplified(self, node: Node, types: Sequence[ValueType | None]) -> Node | Value:
        """A Reshape whose shape is a constant, if one is as good; the input, for an Expand that changes nothing."""
        if node.domain or node.op_type not in ("Reshape", "Expand") or len(node.inputs) != 2:
            return node
        x, target = node.inputs
        out = types[0]
        if x is None or target is None or not isinstance(out, TensorType) or not _is_known(out) or x.shape is None:
            return node
        assert out.shape is not None
        if node.op_type == "Expand":
            return x if x.type == out else node
        if target.data is not None or any(d == 0 for d in (*out.shape, *x.shape)):
            return node
        sizes: list[int] = []
        for i, d in enumerate(out.shape):
            same = i < len(x.shape) and x.shape[i] == d
            sizes.append(d if isinstance(d, int) else 0 if same else -1)
        if sizes.count(-1) > 1:
            return node
        shape = Value.constant(np.array(sizes, np.int64), f"{node.name or node.op_type}/shape")
        attributes = {k: a for k, a in node.attributes.items() if k != "allowzero"}
        return node.replace(inputs=[x, shape], attributes=attributes)

    # --- what the rules use ---

    def elements(self, v: Value | None) -> Elements | None:
        """The elements of a small integer tensor; None where nothing is known of it."""
        if v is None:
            return None
        if v.data is None:
            return self._known.get(v)
        if v.data.dtype.kind not in "iub" or v.data.size > _MOST:
            return None
        made = np.empty(v.data.size, object)
        made[:] = [Expr.of(int(x)) for x in v.data.reshape(-1)]
        return made.reshape(v.data.shape)

    def ratios(self, v: Value | None) -> np.ndarray | None:
        """The elements of a small tensor of floats as `Ratio`, None where nothing is known of one."""
        if v is None or v.dtype not in FOLLOWED:
            return None
        if v.data is None:
            return self._ratios.get(v)
        if v.data.size > _MOST:
            return None
        return _objects([Ratio.of(x) for x in v.data.reshape(-1).tolist()]).reshape(v.data.shape)

    def rounded(self, r: Ratio, up: bool = False) -> Expr | None:
        """A quotient of sizes rounded as floats round it, where it is not negative, and its numerator not large."""
        if not self.holds(r.above) or not self.holds(MOST - r.above):
            return None
        return r.ceil() if up else r.floor()

    def interval(self, v: Value | None) -> Interval | None:
        """The least and the greatest element that an integer tensor may have; None where nothing is known of it."""
        if v is None or v in self._ranges:
            return None if v is None else self._ranges[v]
        if v.data is not None and v.data.size and v.data.dtype.kind in "iu":
            return Expr.of(int(v.data.min())), Expr.of(int(v.data.max()))
        single = self.number(v)
        return None if single is None else (single, single)

    def element_dims(self, v: Value) -> Shape | None:
        """The elements of a small tensor in order that are sizes, in integers or floats, as dimensions are written;
        None where nothing is known."""
        found = self._known.get(v, self._ratios.get(v))
        if found is None:
            return None
        whole = [e.above if isinstance(e, Ratio) and e.below == 1 else e for e in found.reshape(-1)]
        return tuple(e.dim if isinstance(e, Expr) else None for e in whole)

    def number(self, v: Value | None) -> Expr | None:
        """The element of an integer tensor of one; None where nothing is known of it."""
        found = self.elements(v)
        return None if found is None or found.size != 1 else found.item()

    def counts(self, v: Value, limit: Expr) -> None:
        """Note that a value is the number of a turn, of which there are no more than a limit."""
        self._ranges[v] = (Expr.of(0), limit - 1)

    def known(self) -> tuple[Any, ...]:
        """All that is known by now, for `reset`."""
        return tuple(map(copy.copy, self._state))

    def reset(self, known: tuple[Any, ...]) -> None:
        """Forget what was found since `known` told all."""
        for own, earlier in zip(self._state, known, strict=True):
            own.clear()
            own.update(earlier)

    @property
    def _state(self) -> tuple[Any, ...]:
        return self._known, self._ranges, self._ratios, self.within, self.guards

    def _note_index(self, node: Node) -> None:
        """Note whether the computed index of a node stays within its dimension, as in the first call."""
        if node.op_type not in ("Gather", "GatherElements") or node.inputs[0] is None or node.inputs[1] is None:
            return
        index, shape, axis = node.inputs[1], node.inputs[0].shape, node.attributes.get("axis", 0)
        interval = None if index.data is not None else self.interval(index)
        if interval is None or not shape or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            return
        low, high = interval
        size = expression(shape[axis])
        if size is not None and self._may_hold(size + low) and self._may_hold(size - high - 1):
            # both or neither: a guard that proves nothing would only exclude calls
            self.holds(size + low)
            self.holds(size - high - 1)
            self.within.add((index, shape[axis]))

    def least(self, e: Expr) -> int | None:
        """A number that the expression is never below."""
        return e.bounds(self._symbols)[0]

    def is_least(self, e: Expr, other: Expr) -> bool:
        """Whether the expression is never greater than another."""
        low = self.least(other - e)
        return low is not None and low >= 0

    def holds(self, e: Expr) -> bool:
        """Whether an expression is not negative: always, or in the first call, which makes it a guard."""
        if not self._may_hold(e):
            return False
        low = self.least(e)
        if low is None or low < 0:
            self.guards[e] = None
        return True

    def _may_hold(self, e: Expr) -> bool:
        """What `holds` says, without a new guard."""
        low, high = e.bounds(self._symbols)
        if (low is not None and low >= 0) or e in self.guards:
            return True
        return bool((high is None or high >= 0) and self.sizes and e.evaluate(self.sizes) >= 0)

    def _own(self, t: ValueType | None) -> ValueType | None:
        """A type without the dimensions that are no expressions over the symbols."""
        if not isinstance(t, TensorType) or t.shape is None or all(type(d) is int for d in t.shape):
            return t
        return TensorType(t.dtype, tuple(d if isinstance(d, int) or self._is_own(d) else None for d in t.shape))

    def _is_own(self, d: Dim) -> bool:
        e = expression(d)
        return e is not None and e.symbols <= self._symbols.keys()

    def _dtype(self, node: Node) -> np.dtype | None:
        if node.op_type == "ConstantOfShape":
            value = node.attributes.get("value")
            return value.dtype if isinstance(value, np.ndarray) else np.dtype(np.float32)
        first = node.inputs[0] if node.inputs else None
        return None if first is None else first.dtype


def _is_known(t: ValueType | None) -> bool:
    return isinstance(t, TensorType) and t.dtype is not None and t.shape is not None and None not in t.shape


def _without_zeros(t: ValueType | None) -> ValueType | None:
    """A type without sizes of 0, which inference makes of dimensions that it does not know (Attention)."""
    if not isinstance(t, TensorType) or t.shape is None or 0 not in t.shape:
        return t
    return TensorType(t.dtype, tuple(None if d == 0 else d for d in t.shape))


def dims_of(v: Value | None) -> list[Expr | None] | None:
    """The dimensions of a value as expressions; None where its rank is unknown."""
    return None if v is None or v.shape is None else [expression(d) for d in v.shape]


# --- elements ---------------------------------------------------------------------------------------------------------


def _objects(items: Sequence[Expr | Ratio | None]) -> Elements:
    made = np.empty(len(items), object)
    made[:] = list(items)
    return made


def _shape(s: SymbolicShapes, node: Node) -> Elements | None:
    dims = dims_of(node.inputs[0])
    a: Any = node.attributes
    return None if dims is None else _objects(dims[a.get("start", 0) : a.get("end")])


def _size(s: SymbolicShapes, node: Node) -> Elements | None:
    dims = dims_of(node.inputs[0])
    if dims is None:
        return None
    made = np.empty((), object)
    made[()] = _product(dims)
    return made


def _product(dims: Sequence[Expr | None]) -> Expr | None:
    return None if any(d is None for d in dims) else product(d for d in dims if d is not None)


def _same(s: SymbolicShapes, node: Node) -> Elements | None:
    return s.elements(node.inputs[0])


def _reshaped(s: SymbolicShapes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    out = node.outputs[0]
    if found is None or out is None:
        return None
    op, axes = node.op_type, _constants(s, node, 1, "axes")
    if op == "Reshape":
        target = _constants(s, node, 1)
        return None if target is None or 0 in target else found.reshape(target)
    if op == "Squeeze":
        return found.reshape([d for d in found.shape if d != 1]) if axes is None else np.squeeze(found, tuple(axes))
    return None if axes is None else np.expand_dims(found, tuple(axes))


def _constants(s: SymbolicShapes, node: Node, index: int, attribute: str = "") -> list[int] | None:
    """The numbers of an operand, or of the attribute that older versions have for it."""
    given: Any = node.attributes.get(attribute) if attribute else None
    if given is not None:
        return list(given)
    found = s.elements(node.inputs[index]) if index < len(node.inputs) else None
    if found is None:
        return None
    numbers = [None if e is None else e.constant for e in found.reshape(-1)]
    return None if any(n is None for n in numbers) else [n for n in numbers if n is not None]


def _gather(s: SymbolicShapes, node: Node) -> Elements | None:
    found, index = s.elements(node.inputs[0]), node.inputs[1]
    if found is None or index is None or index.data is None:
        return None
    return np.asarray(np.take(found, index.data, axis=node.attributes.get("axis", 0)), object)  # type: ignore[arg-type]


def _concat(s: SymbolicShapes, node: Node) -> Elements | None:
    parts = []
    for v in node.inputs:
        found = s.elements(v)
        if found is None:
            if v is None or not v.is_static or math.prod(v.shape) > _MOST:  # type: ignore[arg-type]
                return None
            found = np.full(v.shape, None, object)  # type: ignore[arg-type]
        parts.append(found)
    return np.concatenate(parts, axis=node.attributes["axis"])  # type: ignore[arg-type]


def _slice_elements(s: SymbolicShapes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    starts, ends = _constants(s, node, 1, "starts"), _constants(s, node, 2, "ends")
    if found is None or starts is None or ends is None:
        return None
    axes = _constants(s, node, 3, "axes") or list(range(len(starts)))
    steps = _constants(s, node, 4) or [1] * len(starts)
    index: list[slice] = [slice(None)] * found.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, end, step)  # Python's rules are ONNX's, backwards as well
    return found[tuple(index)]


def _elementwise(op: Callable[[SymbolicShapes, Any, Any], Any]) -> Callable[..., Elements | None]:
    def rule(s: SymbolicShapes, node: Node) -> Elements | None:
        a, b = (s.elements(v) for v in node.inputs)
        if a is None or b is None:
            return None
        x, y = np.broadcast_arrays(a, b)
        made = [None if p is None or q is None else op(s, p, q) for p, q in zip(x.flat, y.flat, strict=True)]
        return _objects(made).reshape(x.shape)

    return rule


def _divided(s: SymbolicShapes, a: Expr, b: Expr) -> Expr | None:
    """ONNX rounds towards zero, which is down where nothing is negative."""
    divisor, least = b.constant, s.least(a)
    exact = a.divided(b)
    if exact is not None:
        return exact
    return a // divisor if divisor is not None and divisor > 0 and least is not None and least >= 0 else None


def _equal(s: SymbolicShapes, a: Expr, b: Expr) -> Expr | None:
    low, high = (a - b).bounds(s._symbols)
    if low == high == 0 or a == b:
        return Expr.of(1)
    apart = (low is not None and low > 0) or (high is not None and high < 0)
    return Expr.of(0) if apart else None


def _extreme(largest: bool) -> Callable[[SymbolicShapes, Expr, Expr], Expr]:
    def op(s: SymbolicShapes, a: Expr, b: Expr) -> Expr:
        if s.is_least(a, b):
            return b if largest else a
        if s.is_least(b, a):
            return a if largest else b
        return a + b - least(a, b) if largest else least(a, b)

    return op


def _where(s: SymbolicShapes, node: Node) -> Elements | None:
    found = [s.elements(v) for v in node.inputs]
    if any(f is None for f in found):
        return None
    c, x, y = np.broadcast_arrays(*found)  # type: ignore[arg-type]
    made = [
        None if k is None or k.constant is None else p if k.constant else q
        for k, p, q in zip(c.flat, x.flat, y.flat, strict=True)
    ]
    return _objects(made).reshape(c.shape)


def _filled(s: SymbolicShapes, node: Node) -> Elements | None:
    shape = _constants(s, node, 0)
    value = node.attributes.get("value")
    if shape is None or not isinstance(value, np.ndarray) or math.prod(shape) > _MOST:
        return None
    made = np.empty(shape, object)
    made[...] = Expr.of(int(value.reshape(-1)[0]))
    return made


def _transposed(s: SymbolicShapes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    return None if found is None else np.transpose(found, node.attributes.get("perm"))  # type: ignore[arg-type]


def _reduced(largest: bool) -> Callable[[SymbolicShapes, Node], Elements | None]:
    def rule(s: SymbolicShapes, node: Node) -> Elements | None:
        found, out = s.elements(node.inputs[0]), node.outputs[0]
        shape = None if out is None or not out.is_static else cast("tuple[int, ...]", out.shape)
        if found is None or shape is None or math.prod(shape) != 1:
            return None
        items = list(found.reshape(-1))
        if not items or any(e is None for e in items):
            return None
        return _objects([functools.reduce(partial(_extreme(largest), s), items)]).reshape(shape)

    return rule


def _only(s: SymbolicShapes, node: Node) -> Elements | None:
    """A reduction of one element, as exporters write the largest of a batch of one: that element."""
    found, out = s.elements(node.inputs[0]), node.outputs[0]
    if found is None or found.size != 1 or out is None or not out.is_static:
        return None
    return found.reshape(out.shape)  # type: ignore[arg-type]


def _prod(s: SymbolicShapes, node: Node) -> Elements | None:
    found, out = s.elements(node.inputs[0]), node.outputs[0]
    if found is None or found.ndim > 1 or out is None:
        return None
    made = np.empty(1 if node.attributes.get("keepdims", 1) and found.ndim else (), object)
    made[...] = _product(list(found.reshape(-1)))
    return made


def _cast(s: SymbolicShapes, node: Node) -> Elements | None:
    """Of floats too, which are cut towards zero."""
    found = s.ratios(node.inputs[0])
    if found is None:
        return _same(s, node)
    if node.attributes["to"] not in _WIDE_INTEGERS:
        return None
    return _objects([None if r is None else s.rounded(r) for r in found.flat]).reshape(found.shape)


_ELEMENT_RULES: Final[Mapping[str, Callable[[SymbolicShapes, Node], Elements | None]]] = MappingProxyType(
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

    def __init__(self, s: SymbolicShapes) -> None:
        self._s = s

    def elements(self, v: Value | None) -> Elements | None:
        return self._s.ratios(v) if v is not None and v.dtype in FOLLOWED else self._s.elements(v)


def _of_floats(rule: Callable[[Any, Node], Elements | None]) -> Callable[[SymbolicShapes, Node], Elements | None]:
    return lambda s, node: rule(_Floats(s), node)


def _to_ratios(s: SymbolicShapes, node: Node) -> Elements | None:
    found = s.elements(node.inputs[0])
    if found is None:
        return s.ratios(node.inputs[0])
    return _objects([None if e is None else Ratio(e) for e in found.flat]).reshape(found.shape)


def _rounding(up: bool) -> Callable[[SymbolicShapes, Node], Elements | None]:
    def rule(s: SymbolicShapes, node: Node) -> Elements | None:
        found = s.ratios(node.inputs[0])
        if found is None:
            return None
        whole = [None if r is None else s.rounded(r, up) for r in found.flat]
        return _objects([None if e is None else Ratio(e) for e in whole]).reshape(found.shape)

    return rule


_RATIO_RULES: Final[Mapping[str, Callable[[SymbolicShapes, Node], Elements | None]]] = MappingProxyType(
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


def _interval(s: SymbolicShapes, node: Node) -> Interval | None:
    """The range of a result of 64-bit integers, which does not wrap around: it is made of sizes of tensors."""
    op = node.op_type
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
    is_view = traits_of(node).view and op != "BitCast"  # so all elements are the first input's
    return s.interval(node.inputs[0]) if is_view or op == "Cast" else None


# --- dimensions -------------------------------------------------------------------------------------------------------


def _reshape_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    target, dims = s.elements(node.inputs[1]), dims_of(node.inputs[0])
    if target is None or dims is None:
        return None
    keeps_zero = node.attributes.get("allowzero", 0)
    made: Dims = []
    open_: list[int] = []
    for i, e in enumerate(target):
        size = None if e is None else e.constant
        if e is None or size == -1:
            open_.append(i)
            made.append(None)
        elif size == 0 and not keeps_zero:
            made.append(dims[i])
        else:
            made.append(e)
    if len(open_) == 1 and all(d is not None for i, d in enumerate(made) if i not in open_):
        total, rest = _product(dims), _product([d for i, d in enumerate(made) if i not in open_])
        if total is not None and rest is not None:
            whole = total.divided(rest)
            if whole is None:
                numbers = [n for d in made if d is not None and (n := d.constant) is not None]
                symbolic = _product([d for d in made if d is not None and d.constant is None])
                total = None if symbolic is None else total.divided(symbolic)
                size = math.prod(numbers)
                whole = total // size if total is not None and size > 0 else None
            made[open_[0]] = whole
    return made


def _joined(s: SymbolicShapes, a: Expr | None, b: Expr | None) -> Expr | None:
    """A dimension of two that are broadcast."""
    if a is None or b is None:
        known = a if b is None else b
        size = None if known is None else known.constant
        return known if size is not None and size > 1 else None
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    for e in (a, b):
        if e.constant is not None:
            return e
    return a if s.holds(a - b) and s.holds(b - a) else None


def _broadcast(s: SymbolicShapes, shapes: Sequence[Dims]) -> Dims:
    rank = max(map(len, shapes))
    made: Dims = [Expr.of(1)] * rank
    for shape in shapes:
        for i, d in enumerate(shape, rank - len(shape)):
            made[i] = _joined(s, made[i], d)
    return made


def _expand_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    target, dims = s.elements(node.inputs[1]), dims_of(node.inputs[0])
    return None if target is None or dims is None else _broadcast(s, [dims, list(target)])


def _elementwise_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    shapes = [dims_of(v) for v in node.inputs if v is not None]
    return None if any(d is None for d in shapes) else _broadcast(s, [d for d in shapes if d is not None])


def _filled_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    target = s.elements(node.inputs[0])
    return None if target is None else list(target)


def _slice_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    dims = dims_of(node.inputs[0])
    if dims is None:
        return None
    if node.version < 10:
        a: Any = node.attributes
        starts, ends = _objects([Expr.of(x) for x in a["starts"]]), _objects([Expr.of(x) for x in a["ends"]])
    else:
        found = [s.elements(v) for v in node.inputs[1:3]]
        if found[0] is None or found[1] is None:
            return None
        starts, ends = found[0], found[1]
    axes = _constants(s, node, 3, "axes")
    axes = list(range(len(starts))) if axes is None else axes
    steps = _constants(s, node, 4) or [1] * len(starts)
    if len(node.inputs) > 4 and node.inputs[4] is not None and _constants(s, node, 4) is None:
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        dims[axis] = _sliced(s, dims[axis], start, end, step)
    return dims


def _sliced(s: SymbolicShapes, d: Expr | None, start: Expr | None, end: Expr | None, step: int) -> Expr | None:
    if d is None or start is None or end is None or step < 1:
        return None
    first, last = start.constant, end.constant
    if first is not None and first < 0:
        start = d + first
    if last is not None and last >= _END:
        end = d
    elif last is not None and last < 0:
        end = d + last
    # where both may be the end of the range, the one that is a symbol is more likely to be so again
    likelier = end.constant is not None and not s.is_least(end, d)
    if s.is_least(d, end) or ((likelier or not s.holds(d - end)) and s.holds(end - d)):
        end = d
    if not (s.holds(start) and s.holds(d - end) and s.holds(end - start)):
        return None
    length = end - start
    return length if step == 1 else (length + step - 1) // step


def _concat_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    shapes = [dims_of(v) for v in node.inputs]
    known = [d for d in shapes if d is not None]
    if len(known) < len(shapes):
        return None
    axis: Any = node.attributes["axis"]
    made = list(known[0])
    for other in known[1:]:
        made = [m if m is not None else o for m, o in zip(made, other, strict=True)]
    along = [d[axis] for d in known]
    made[axis] = None if any(d is None for d in along) else sum((d for d in along if d is not None), Expr.of(0))
    return made


def _tile_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    repeats, dims = s.elements(node.inputs[1]), dims_of(node.inputs[0])
    if repeats is None or dims is None:
        return None
    return [None if d is None or r is None else d * r for d, r in zip(dims, repeats, strict=True)]


def _range_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    start, limit, delta = (s.elements(v) for v in node.inputs)
    if start is None or limit is None or delta is None:
        return None
    first, last, step = start.item(), limit.item(), delta.item()
    if first is None or last is None or step is None or step.constant != 1 or not s.holds(last - first):
        return None
    return [last - first]


def _flatten_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    dims, axis = dims_of(node.inputs[0]), node.attributes.get("axis", 1)
    assert isinstance(axis, int)
    if dims is None:
        return None
    axis = axis + len(dims) if axis < 0 else axis
    return [_product(dims[:axis]), _product(dims[axis:])]


def _pad_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    dims, given = dims_of(node.inputs[0]), node.attributes.get("pads")
    pads = s.elements(node.inputs[1]) if given is None else _objects([Expr.of(n) for n in given])  # type: ignore[union-attr]
    if dims is None or pads is None or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    ends = zip(dims, pads[: len(dims)], pads[len(dims) :], strict=True)
    return [None if d is None or begin is None or end is None else d + begin + end for d, begin, end in ends]


def _resize_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    dims, a = dims_of(node.inputs[0]), dict[str, Any](node.attributes)
    if dims is None or a.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    axes = [int(i) % len(dims) for i in a.get("axes") or range(len(dims))]
    made = list(dims)
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        sizes = s.elements(node.inputs[3])
        if sizes is None:
            return None
        for axis, size in zip(axes, sizes, strict=True):
            made[axis] = size
        return made
    if node.op_type == "Upsample" and node.version < 9:
        scales = list(a["scales"])
    else:  # the region of interest stands before the scales since Resize-11
        at = 2 if node.op_type == "Resize" and node.version > 10 else 1
        given = node.inputs[at] if len(node.inputs) > at else None
        if given is None or given.data is None:
            return None
        scales = given.data.tolist()
    if a.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    for axis, scale in zip(axes, scales, strict=True):
        d = dims[axis]
        inverse = 1 / scale
        if d is None:
            made[axis] = None
        elif scale == int(scale):
            made[axis] = d * int(scale)
        else:  # halves, quarters, ... are exact in floats
            made[axis] = d // int(inverse) if inverse == int(inverse) and int(inverse).bit_count() == 1 else None
    return made


def _window_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    """Convolutions and pooling: how many windows there are along each axis."""
    x = dims_of(node.inputs[0])
    if x is None:
        return None
    a: Any = node.attributes
    rank = len(x) - 2
    if (weights := _WEIGHTS.get(node.op_type)) is not None:
        w = dims_of(node.inputs[weights])
        if w is None or len(w) != len(x):
            return None
        channels, kernel = w[0], [None if k is None else k.constant for k in w[2:]]
    else:
        channels, kernel = x[1], list(a["kernel_shape"])
    strides, dilations = a.get("strides") or (1,) * rank, a.get("dilations") or (1,) * rank
    pads = a.get("pads") or (0,) * (2 * rank)
    auto = a.get("auto_pad") or "NOTSET"
    made: Dims = [x[0], channels]
    for i, (d, k) in enumerate(zip(x[2:], kernel, strict=True)):
        begin, end = (pads[i], pads[rank + i]) if auto == "NOTSET" else (0, 0)
        if d is None or k is None:
            made.append(None)
        elif auto in ("SAME_UPPER", "SAME_LOWER"):
            made.append((d + strides[i] - 1) // strides[i])
        else:
            reach, more = (k - 1) * dilations[i] + 1, 0
            if a.get("ceil_mode", 0):  # a last window that begins behind the input is left out
                if end + strides[i] > reach:
                    made.append(None)
                    continue
                more = strides[i] - 1
            made.append((d + begin + end - reach + more) // strides[i] + 1)
    return made


_WEIGHTS: Final[Mapping[str, int]] = MappingProxyType({"Conv": 1, "ConvInteger": 1, "DeformConv": 1, "QLinearConv": 3})
"""Where convolutions have their kernel."""


def _transposed_conv_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    x, w, a = dims_of(node.inputs[0]), dims_of(node.inputs[1]), dict[str, Any](node.attributes)
    if x is None or w is None or len(w) != len(x) or w[1] is None:
        return None
    rank = len(x) - 2
    made: Dims = [x[0], w[1] * a.get("group", 1)]
    if given := a.get("output_shape"):
        return [*made, *map(Expr.of, list(given)[-rank:])]
    strides, dilations = a.get("strides") or (1,) * rank, a.get("dilations") or (1,) * rank
    pads, more = a.get("pads") or (0,) * (2 * rank), a.get("output_padding") or (0,) * rank
    auto = a.get("auto_pad") or "NOTSET"
    for i, (d, k) in enumerate(zip(x[2:], w[2:], strict=True)):
        size = None if k is None else k.constant
        if d is None or size is None:
            made.append(None)
        elif auto in ("SAME_UPPER", "SAME_LOWER"):
            made.append(d * strides[i])
        else:
            cut = pads[i] + pads[rank + i] if auto == "NOTSET" else 0
            made.append((d - 1) * strides[i] + more[i] + (size - 1) * dilations[i] + 1 - cut)
    return made


def _blocks_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    """DepthToSpace and SpaceToDepth; the latter takes whole blocks only."""
    x, size = dims_of(node.inputs[0]), node.attributes["blocksize"]
    assert isinstance(size, int)
    if x is None or any(d is None for d in x):
        return None
    n, c, h, w = (d for d in x if d is not None)
    if node.op_type == "DepthToSpace":
        return [n, c // (size * size), h * size, w * size]
    return [n, c * (size * size), h // size, w // size]


def _gather_nd_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    data, index = dims_of(node.inputs[0]), dims_of(node.inputs[1])
    if data is None or not index or index[-1] is None:
        return None
    depth, batch = index[-1].constant, node.attributes.get("batch_dims", 0)
    assert isinstance(batch, int)
    return None if depth is None else [*index[:-1], *data[batch + depth :]]


def _global_pool_dims(s: SymbolicShapes, node: Node) -> Dims | None:
    x = dims_of(node.inputs[0])
    return None if x is None else [*x[:2], *[Expr.of(1)] * (len(x) - 2)]


_BROADCASTING: Final = (
    "Add", "Sub", "Mul", "Div", "Pow", "Where", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And",
    "Or", "Xor", "Max", "Min", "Mod", "PRelu", "Sum", "Mean",
)  # fmt: skip

_SHAPE_RULES: Final[Mapping[str, Callable[[SymbolicShapes, Node], Dims | None]]] = MappingProxyType(
    {
        "AveragePool": _window_dims,
        "Concat": _concat_dims,
        "ConstantOfShape": _filled_dims,
        "Conv": _window_dims,
        "ConvInteger": _window_dims,
        "ConvTranspose": _transposed_conv_dims,
        "DeformConv": _window_dims,
        "DepthToSpace": _blocks_dims,
        "Expand": _expand_dims,
        "Flatten": _flatten_dims,
        "GatherND": _gather_nd_dims,
        "GlobalAveragePool": _global_pool_dims,
        "GlobalMaxPool": _global_pool_dims,
        "LpPool": _window_dims,
        "Pad": _pad_dims,
        "QLinearConv": _window_dims,
        "Range": _range_dims,
        "Reshape": _reshape_dims,
        "Resize": _resize_dims,
        "Slice": _slice_dims,
        "SpaceToDepth": _blocks_dims,
        "Tile": _tile_dims,
        "Upsample": _resize_dims,
        **dict.fromkeys(_BROADCASTING, _elementwise_dims),
    }
)


# --- dimensions of several outputs ------------------------------------------------------------------------------------


def _pooled(s: SymbolicShapes, node: Node) -> list[Dims | None]:
    return [_window_dims(s, node)] * len(node.outputs)


def _top_k(s: SymbolicShapes, node: Node) -> list[Dims | None]:
    dims, axis = dims_of(node.inputs[0]), node.attributes.get("axis", -1)
    assert isinstance(axis, int)
    if dims is None:
        return []
    k = node.attributes.get("k") if node.version < 10 else None
    found = s.elements(node.inputs[1]) if not isinstance(k, int) else _objects([Expr.of(k)])
    dims[axis] = None if found is None or found.size != 1 else found.item()
    return [dims, dims]


def _split(s: SymbolicShapes, node: Node) -> list[Dims | None]:
    dims, axis, count = dims_of(node.inputs[0]), node.attributes.get("axis", 0), len(node.outputs)
    assert isinstance(axis, int)
    if dims is None or (whole := dims[axis]) is None:
        return []
    given = node.attributes.get("split")
    sizes: Sequence[Expr | None]
    if given is not None:
        sizes = [Expr.of(n) for n in given]  # type: ignore[union-attr]
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        found = s.elements(node.inputs[1])
        sizes = [None] * count if found is None else list(found)
    else:  # the last part may be smaller
        each = whole.divided(Expr.of(count))
        each = (whole + (count - 1)) // count if each is None else each
        sizes = [*[each] * (count - 1), whole - each * (count - 1)]
    axis %= len(dims)
    return [[*dims[:axis], n, *dims[axis + 1 :]] for n in sizes]


def _attention(s: SymbolicShapes, node: Node) -> list[Dims | None]:
    """Attention of opset 23 on, by https://onnx.ai/onnx/operators/onnx__Attention.html: 4 dimensions (batch, heads,
    tokens, size), or 3 with the heads within the last."""
    a = dict[str, Any](node.attributes)
    inputs = [dims_of(v) for v in node.inputs]
    q, k, v = inputs[:3]
    if q is None or k is None or v is None or len({len(q), len(k), len(v)}) != 1:
        return []
    if is_flat := len(q) == 3:
        heads = [a["q_num_heads"], a["kv_num_heads"], a["kv_num_heads"]]
        q, k, v = ([d[0], Expr.of(h), d[1], _exactly(d[2], h)] for d, h in zip((q, k, v), heads, strict=True))
    past = inputs[4] if len(inputs) > 4 and node.inputs[4] is not None else None
    if len(inputs) > 4 and node.inputs[4] is not None and past is None:
        return []
    new, before = k[2], Expr.of(0) if past is None else past[2]
    total = None if new is None or before is None else new + before
    out: Dims = [q[0], q[1], q[2], v[3]]
    if is_flat:
        out = [q[0], q[2], None if q[1] is None or v[3] is None else q[1] * v[3]]
    return [out, [k[0], k[1], total, k[3]], [v[0], v[1], total, v[3]], [q[0], q[1], q[2], total]]


def _exactly(d: Expr | None, n: int) -> Expr | None:
    """A dimension that is a multiple of `n`, by `n`."""
    whole = None if d is None else d.divided(Expr.of(n))
    return whole if whole is not None or d is None else d // n


_RULES_OF_ALL_OUTPUTS: Final[Mapping[str, Callable[[SymbolicShapes, Node], list[Dims | None]]]] = MappingProxyType(
    {"Attention": _attention, "MaxPool": _pooled, "Split": _split, "TopK": _top_k}
)


def dimension_guards(graph: Graph) -> list[Expr]:
    """What must not be negative for every symbolic dimension of a graph to be 1 at least: libraries differ in what they
    make of empty tensors, and engines are asked about other ones."""
    texts = {
        d
        for v in {*graph.inputs, *(v for n in graph.nodes for v in n.outputs)}
        if v is not None and v.shape is not None
        for d in v.shape
        if isinstance(d, str)
    }
    return [e - 1 for d in sorted(texts) if (e := expression(d)) is not None]


class Agreement(Struct, frozen=True):
    """The nodes of a symbolic graph whose sizes may not agree in a call: nothing is promised for such sizes, and
    libraries may follow them into foreign memory."""

    nodes: tuple[Node, ...]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the nodes allow these sizes of the symbols."""
        return not any(_fault_for(n, sizes) for n in self.nodes)


def agreement(graph: Graph, symbols: Mapping[str, Symbol], sizes: Mapping[str, int]) -> Agreement | None:
    """What must hold of sizes beside guards: the nodes that do not allow some other size of a symbol. sizes: of the
    first call, which are allowed. None where there are none."""
    others = []
    for name, size in sizes.items():
        of = symbols[name]
        tried = {max(of.min, of.multiple), size + of.multiple, 2 * size + of.multiple}
        others += [{**sizes, name: s} for s in sorted(tried) if of.min <= s and (of.max is None or s <= of.max)]
    nodes = [n for n in graph.nodes if waits_for_sizes(n) and any(_fault_for(n, at) for at in others)]
    return Agreement(tuple(nodes)) if nodes else None


def _fault_for(node: Node, sizes: Mapping[str, int]) -> str | None:
    return fault_at(node, [None if v is None or v.shape is None else shape_for(v.shape, sizes) for v in node.inputs])


def graph_at(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The graph with the same nodes, its types for these sizes of the symbols, in subgraphs as well."""
    return _at(graph, sizes, {})


def _at(graph: Graph, sizes: Mapping[str, int], new: dict[Value, Value]) -> Graph:
    def at(v: Value) -> Value:
        t = v.type
        if v not in new:
            symbolic = isinstance(t, TensorType) and t.shape is not None and any(isinstance(d, str) for d in t.shape)
            new[v] = Value(v.name, TensorType(t.dtype, shape_for(t.shape, sizes))) if symbolic else v  # type: ignore[union-attr, arg-type]
        return new[v]

    def node_for(n: Node) -> Node:
        made = substitute(n, new)
        if n.subgraphs:
            made = made.replace(attributes={k: _at_attribute(a, sizes, new) for k, a in n.attributes.items()})
        return made.replace(outputs=[None if v is None else at(v) for v in n.outputs])

    inputs = [at(v) for v in graph.inputs]
    nodes = [node_for(n) for n in graph.nodes]
    return graph.replace(inputs=inputs, outputs=[new.get(v, v) for v in graph.outputs], nodes=nodes)


def _at_attribute(a: Attribute, sizes: Mapping[str, int], new: dict[Value, Value]) -> Attribute:
    if isinstance(a, Graph):
        return _at(a, sizes, new)
    if type(a) is tuple and a and isinstance(a[0], Graph):
        return tuple(_at(g, sizes, new) for g in a)
    return a


def node_at(node: Node, sizes: Mapping[str, int]) -> Node:
    """The node for inputs of these sizes of the symbols."""
    given = dict.fromkeys(v for v in node.uses() if v.data is None)
    return graph_at(Graph(given, (), [node], opsets={node.domain: node.version}), sizes).nodes[0]


def function_at(function: Function, sizes: Mapping[str, int]) -> Function:
    """The static function that a symbolic one is for these sizes of its symbols, with the same nodes."""
    if not function.is_symbolic:
        return function
    body = graph_at(function.body, sizes)
    params, returns = ([_parameter_at(p, sizes) for p in ports] for ports in (function.params, function.returns))
    return Function(function.name, params, returns, body, function.aliases)


def _parameter_at(p: Parameter, sizes: Mapping[str, int]) -> Parameter:
    elements = None if p.elements is None else shape_for(p.elements, sizes)
    return Parameter(p.name, p.dtype, shape_for(p.dims, sizes), elements)


def is_shape_arithmetic(node: Node) -> bool:
    """Whether a node computes on shapes: integers of no more elements than a shape has, or such floats made of such."""
    if traits_of(node).shape_query:
        return True
    results = [v for v in node.outputs if v is not None]
    return all(_is_small(v, "iub") for v in results) or (
        not node.subgraphs and all(_is_small(v, "iubf") for v in (*results, *(v for v in node.inputs if v is not None)))
    )


def _is_small(v: Value, kinds: str) -> bool:
    t = v.type
    known = isinstance(t, TensorType) and t.dtype is not None and t.dtype.kind in kinds and t.is_static
    return known and math.prod(t.shape) <= _MOST  # type: ignore[union-attr, arg-type]
