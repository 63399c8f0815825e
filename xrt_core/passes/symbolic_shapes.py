"""Symbolic shapes: what follows for the shapes of a graph where dimensions of its inputs are symbols.

`SymbolicShapes` goes with the traversal of `shape_specialization`. It knows the elements of small integer tensors as
expressions over the symbols (`symbolic_elements`), and from these the dimensions that type inference, which knows
numbers alone, leaves open (`symbolic_dims`); of larger integer tensors their range, and from that which computed
indices stay within their dimension. In the body of a Loop the number of the turn is a symbol too, from 0 to its last,
which no dimension has. What it does not know stays unknown.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.errors import XRTError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import AT_MOST, limits_of
from xrt_core.ir.symbols import Bounds, Expr, Symbol, expression
from xrt_core.ir.types import Dim, Shape, TensorType, ValueType
from xrt_core.passes.size_ratios import FOLLOWED, MOST, Ratio
from xrt_core.passes.symbolic_dims import RULES_OF_ALL_OUTPUTS, SHAPE_RULES, Dims
from xrt_core.passes.symbolic_elements import (
    ELEMENT_RULES,
    MOST_ELEMENTS,
    RATIO_RULES,
    Elements,
    constants,
    dims_of,
    objects,
)
from xrt_core.passes.symbolic_ranges import MOST_COLUMNS, Interval, positions, result_columns, result_interval

_INTEGERS: Final = (np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_))


class SymbolicShapes:
    """Knowledge about one graph.

    symbols: with their ranges, by name. sizes: of the symbols in the first call. guards: expressions that must not be
    negative for what was found to hold. Where a shape depends on which of two sizes is larger, as that of a Slice does,
    it is taken as in the first call, and that is a guard. within: values, each with the dimensions within which its
    elements are indices: those of one axis, or of an axis for each column.
    """

    def __init__(self, symbols: Mapping[str, Symbol], sizes: Mapping[str, int] | None = None) -> None:
        self._symbols = symbols
        self._turns: dict[str, Expr] = {}  # symbols for the numbers of turns, and how many turns there are at most
        self.sizes: Mapping[str, int] = {} if sizes is None else sizes
        self._known: dict[Value, Elements] = {}
        self._ranges: dict[Value, Interval] = {}
        self._ratios: dict[Value, np.ndarray] = {}
        self._columns: dict[Value, tuple[Interval | None, ...]] = {}
        self._copied: dict[Value, Value] = {}  # results that have an input's elements, which later passes may replace
        self.within: set[tuple[Value, tuple[Dim, ...]]] = set()
        self.guards: dict[Expr, None] = {}

    @property
    def is_static(self) -> bool:
        """Whether no dimension is a symbol: in the body of a Loop of a static graph."""
        return not self._symbols

    def types(self, node: Node, types: Sequence[ValueType | None]) -> tuple[ValueType | None, ...]:
        """The types of a node's outputs, with dimensions as expressions where inference left them open."""
        types = [self._own(t) for t in types]  # a model may have names for what it knows nothing of
        if not self.is_static and not any(0 in (v.shape or ()) for v in node.inputs if v is not None):
            types = [_without_zeros(t) for t in types]
        if node.domain or not types:
            return tuple(types)
        rule, rule_of_all = SHAPE_RULES.get(node.op_type), RULES_OF_ALL_OUTPUTS.get(node.op_type)
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
        made = [self.dim(e) for e in shape]
        if isinstance(t, TensorType) and t.shape is not None and len(t.shape) == len(made):
            pairs = zip(t.shape, made, strict=True)
            made = [f if isinstance(f, int) else m if m is not None else f for f, m in pairs]
        return TensorType(dtype, tuple(made))

    def follow(self, node: Node, types: Sequence[ValueType | None]) -> np.ndarray | None:
        """Note what a node makes of known elements. Returns the array where all of them are numbers."""
        if node.op_type == "Split" and not node.domain:
            self._follow_parts(node, types)
        if len(node.outputs) == 2 and node.outputs[1] is not None and (places := positions(self, node)) is not None:
            self._ranges[node.outputs[1]] = places
        self._note_index(node)
        if len(node.outputs) != 1 or node.outputs[0] is None or node.domain:
            return None
        t = types[0]
        if isinstance(t, TensorType) and t.dtype in (np.int32, np.int64):
            if (interval := result_interval(self, node)) is not None:
                self._ranges[node.outputs[0]] = interval
            if (columns := result_columns(self, node, t)) is not None:
                self._columns[node.outputs[0]] = columns
            if node.op_type in ("Cast", "Identity") and (source := node.inputs[0]) is not None and source.type == t:
                self._copied[node.outputs[0]] = source
        if not isinstance(t, TensorType) or t.dtype is None:
            return None
        rule, known = ELEMENT_RULES.get(node.op_type), self._known
        if t.dtype in FOLLOWED:
            rule, known = RATIO_RULES.get(node.op_type), self._ratios
        elif t.dtype not in _INTEGERS:
            return None
        if rule is None or not t.is_static or math.prod(t.shape) > MOST_ELEMENTS:  # type: ignore[arg-type]
            return None
        try:
            found = rule(self, node)
            if found is None or found.shape != t.shape:
                return None
            constants = [None if e is None else e.constant for e in found.reshape(-1)]
            if found.size and all(c is not None for c in constants):
                return np.array(constants, t.dtype).reshape(found.shape)
        except (ArithmeticError, IndexError, TypeError, ValueError, XRTError):
            return None
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

    def simplified(self, node: Node, types: Sequence[ValueType | None], before: Iterable[Node] = ()) -> Node | Value:
        """A Reshape whose shape is a constant, if one is as good; the input, for an Expand that changes nothing, and
        for a Where that takes all of one; for a quotient of sizes the value that has it, and for the product of a shape
        the Size of what has it, if a node has made it `before` in this graph or body."""
        if node.op_type == "Div" and not node.domain:
            return self._with_quotient(node, types[0], before) or node
        if node.op_type == "Where" and not node.domain:
            return self._chosen(node, types[0]) or node
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

    def _chosen(self, node: Node, result: ValueType | None) -> Value | None:
        """The input that a Where takes all elements of, where that is known and it has the result's shape."""
        condition = self.elements(node.inputs[0])
        known = set() if condition is None else {None if e is None else e.constant for e in condition.reshape(-1)}
        if len(known) != 1 or None in known:
            return None
        taken = node.inputs[1] if known.pop() else node.inputs[2]
        return taken if taken is not None and taken.type == result else None

    def as_gather(self, node: Node, types: Sequence[ValueType | None]) -> list[Node]:
        """The nodes that take the one element of an axis, the number of which a Slice computes, as x[:, i] of a loop:
        engines of static shapes take no Slice whose limits they do not know. None of them for other Slices."""
        x, starts, out = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None, types[0]
        shape = out.shape if isinstance(out, TensorType) else None
        found = self.elements(starts)
        if x is None or x.shape is None or starts is None or starts.data is not None or shape is None or found is None:
            return []
        if found.ndim != 1:
            return []
        axes = constants(self, node, 3) or list(range(found.size))
        at = [k for k, e in enumerate(found) if e is not None and not e.symbols.isdisjoint(self._turns)]
        taken = [axes[k] % len(x.shape) for k in at]
        given = node.inputs[4] if len(node.inputs) > 4 else None
        steps = [1] if given is None else constants(self, node, 4)
        if steps is None or min(steps) < 1:  # other axes may be turned round
            return []
        rest = zip(shape, x.shape, strict=True)
        if len(at) != 1 or shape[taken[0]] != 1 or any(a != b for k, (a, b) in enumerate(rest) if k != taken[0]):
            return []
        name = node.name or "Slice"
        place = Value.constant(np.array(at, np.int64), f"{name}/at")
        index = Value(f"{name}/index", TensorType(starts.dtype, (1,)))
        annotations = node.annotations
        return [
            Node("Gather", [starts, place], [index], version=13, name=f"{name}/index", annotations=annotations),
            Node(
                "Gather", [x, index], node.outputs, {"axis": taken[0]}, version=13, name=name, annotations=annotations
            ),
        ]  # fmt: skip

    def _with_quotient(self, node: Node, result: ValueType | None, before: Iterable[Node]) -> Value | None:
        """The value that has the elements of a quotient of sizes: engines do not divide by what they do not know."""
        try:
            found = ELEMENT_RULES["Div"](self, node)
        except (ArithmeticError, ValueError):
            return None
        if found is None or None in found.reshape(-1):
            return None
        for v in (v for n in before for v in n.outputs if v is not None and v.type == result):
            known = self._known.get(v)
            if known is not None and known.shape == found.shape and known.tolist() == found.tolist():
                return v
        return None

    # --- what the rules use ---

    def dims(self, v: Value | None) -> list[Expr | None] | None:
        """The dimensions of a value as expressions; None where its rank is unknown."""
        return dims_of(v)

    def elements(self, v: Value | None) -> Elements | None:
        """The elements of a small integer tensor; None where nothing is known of it."""
        if v is None:
            return None
        if v.data is None:
            return self._known.get(v)
        if v.data.dtype.kind not in "iub" or v.data.size > MOST_ELEMENTS:
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
        if v.data.size > MOST_ELEMENTS:
            return None
        return objects([Ratio.of(x) for x in v.data.reshape(-1).tolist()]).reshape(v.data.shape)

    def rounded(self, r: Ratio, up: bool = False) -> Expr | None:
        """A quotient of sizes rounded as floats round it, where it is not negative, and its numerator not large; a
        whole number is what it is."""
        number = r.above.constant
        if r.below == 1 and number is not None and number >= 0:
            return r.above
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

    def columns(self, v: Value | None) -> tuple[Interval | None, ...] | None:
        """The intervals of the elements in each column of an integer tensor's last axis; None where there are many."""
        if v is None or v in self._columns:
            return None if v is None else self._columns[v]
        width = v.shape[-1] if v.shape else None
        return (self.interval(v),) * width if isinstance(width, int) and 0 < width <= MOST_COLUMNS else None

    def element_dims(self, v: Value) -> Shape | None:
        """The elements of a small tensor in order that are sizes, in integers or floats, as dimensions are written;
        None where nothing is known."""
        found = self._known.get(v, self._ratios.get(v))
        if found is None:
            return None
        whole = [e.above if isinstance(e, Ratio) and e.below == 1 else e for e in found.reshape(-1)]
        return tuple(self.dim(e) if isinstance(e, Expr) else None for e in whole)

    def dim(self, e: Expr | None) -> Dim:
        """An expression as a dimension; None where it is unknown, or depends on the number of a turn."""
        return None if e is None or not e.symbols.isdisjoint(self._turns) else e.dim

    def number(self, v: Value | None) -> Expr | None:
        """The element of an integer tensor of one; None where nothing is known of it."""
        found = self.elements(v)
        return None if found is None or found.size != 1 else found.item()

    def counts(self, v: Value, limit: Expr) -> None:
        """Note that a value is the number of a turn, of which there are no more than a limit."""
        self._ranges[v] = (Expr.of(0), limit - 1)
        name = f"turn.{len(self._turns)}"
        self._turns[name] = limit
        self._known[v] = np.array(Expr.of(name), object)

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
        return self._known, self._ranges, self._ratios, self._columns, self._copied, self.within, self.guards

    def _note_index(self, node: Node) -> None:
        """Note whether the computed index of a node stays within its limits, as in the first call."""
        found = limits_of(node)
        if found is None or found[0].data is not None:
            return
        index, limits = found
        lengths = limits[0] == AT_MOST
        dims = limits[1:] if lengths else limits
        single = self.number(index)  # of elements that are taken of others no range is as narrow
        whole, intervals = self.interval(index) if single is None else (single, single), self._columns.get(index)
        if intervals is None or len(intervals) != len(dims):
            intervals = (whole,) * len(dims)
        bounds = list[Expr]()
        for interval, d in zip(intervals, dims, strict=True):
            size = expression(d)
            if size is None or interval is None:
                return
            bounds += [interval[0], size - interval[1]] if lengths else [size + interval[0], size - interval[1] - 1]
        if all(map(self._may_hold, bounds)):  # all or none: a guard that proves nothing would only exclude calls
            for e in bounds:
                self.holds(e)
            same: Value | None = index
            while same is not None:
                self.within.add((same, limits))
                same = self._copied.get(same)

    def bounds(self, e: Expr) -> Bounds:
        """The least and the greatest value of an expression, None where no limit is known."""
        return e.bounds(self._symbols)

    def holds(self, e: Expr) -> bool:
        """Whether an expression is not negative: always, or in the first call, which makes it a guard."""
        if not self._may_hold(e):
            return False
        for end in self._at_first_and_last_turn(e) or ():
            if end is not e:
                self.holds(end)
            elif (low := self.bounds(e)[0]) is None or low < 0:
                self.guards[e] = None
        return True

    def _at_first_and_last_turn(self, e: Expr) -> list[Expr] | None:
        """An expression itself, where it does not depend on a turn; else those for its first and last turn, where all
        between lie between them, and None where that is not known."""
        turn = next((t for t in sorted(e.symbols) if t in self._turns), None) if self._turns else None
        if turn is None:
            return [e]
        for monomial, _ in e.terms:
            if monomial.count(turn) > 1 or any(not isinstance(a, str) and turn in a.symbols for a in monomial):
                return None
        return [e.substitute({turn: at}) for at in (Expr.of(0), self._turns[turn] - 1)]

    def _may_hold(self, e: Expr) -> bool:
        """What `holds` says, without a new guard."""
        ends = self._at_first_and_last_turn(e)
        if ends is None or len(ends) > 1:
            return ends is not None and all(map(self._may_hold, ends))
        low, high = self.bounds(e)
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
