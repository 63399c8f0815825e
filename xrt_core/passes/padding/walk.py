"""The walk that builds the padded form of a graph: states of values, added nodes, sizes, masks and refusals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from xrt_core.errors import ShapeError, XRTError
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.inference import infer_types
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import DIALECT, DIALECT_VERSION, since_version
from xrt_core.ir.symbols import Expr, Minimum, Quotient, Symbol, expression, product
from xrt_core.ir.types import DTYPE_TO_ONNX, ONNX_TO_DTYPE, STRING, Dim, TensorType, float_like
from xrt_core.passes.padding.contents import Contents
from xrt_core.passes.padding.form import (
    ROWS,
    Axis,
    Padded,
    PaddedGraph,
    PaddingRefused,
    axis_of,
    bucket_size,
    is_padded,
)
from xrt_core.passes.size_ratios import FOLLOWED
from xrt_core.passes.symbolic_elements import MOST_ELEMENTS

_I64: Final = np.dtype(np.int64)
_BOOL: Final = np.dtype(np.bool_)
_FOLLOWED: Final = (np.dtype(np.int32), _I64, _BOOL)
_COMPARISONS: Final = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


Given = Sequence[Padded | None]
Body = Callable[[Node], "Graph | None"]
"""Node with typed inputs -> the graph that it stands for, or None. The graph has an input for each given input of the
node, and an output for each wanted output."""
Rule = Callable[["Padder", Node, Given], Given]
"""(walk, node, what is known of its inputs) -> what is known of its outputs."""


class Padder:
    """The state of one walk; rules of operators call its methods to add nodes to the padded graph.

    rows: what `ROWS` stands for in the shapes, where they have it. body_of: what an operator without a rule stands for.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Sequence[Sequence[Dim] | None],
        buckets: Mapping[str, int],
        zero_filled: bool,
        rows: int | None = None,
        body_of: Body | None = None,
    ) -> None:
        if ROWS in buckets:
            raise PaddingRefused(f"the symbol {ROWS!r} has a meaning of its own here; name that size otherwise")
        self.graph = graph
        self.rows = {} if rows is None else {ROWS: rows}
        self.buckets = {**buckets, **self.rows}
        self.opset = max(graph.opsets.get("", 0), 9)
        self.limits = {s: Symbol(s, 1, n) for s, n in buckets.items()} | {s: Symbol(s) for s in self.rows}
        self.nodes: list[Node] = []
        self.states: dict[Value, Padded] = {}
        self.masks: Counter[str] = Counter()
        self._needs: dict[Expr, int] = {}
        self._lengths = {s: Value(f"valid_{s}", TensorType(_I64, ())) for s in buckets}
        self._scalars: dict[Expr, Value] = {}
        self._vectors: dict[Axis, Value] = {}
        self._shaped: dict[tuple[Value, tuple[int, ...]], Value] = {}
        self._names = 0
        self._body_of = body_of
        self._contents = Contents(self.state, self.bounds)
        self._prefix = ""  # of names within the body of a node
        self.at: Node | None = None  # the node whose rule is at work
        if graph.opsets.get("", 0) < 9:
            raise PaddingRefused(f"the graph is of opset {graph.opsets.get('', 0)}; masks need opset 9")
        self.inputs = [self._input(v, s, zero_filled) for v, s in zip(graph.inputs, shapes, strict=True)]

    def _input(self, v: Value, shape: Sequence[Dim] | None, zero_filled: bool) -> Padded:
        if v.dtype is None or shape is None:
            raise PaddingRefused(f"input {v.name!r} has no known dtype and rank")
        exprs = [expression(d) for d in shape]
        if any(e is None for e in exprs):
            raise PaddingRefused(f"input {v.name!r} has dimensions {list(shape)}, some of which have no symbol")
        axes = tuple(self.checked_axis(axis_of([e])) for e in exprs if e is not None)
        if v.dtype == STRING and any(map(is_padded, axes)):
            raise PaddingRefused(f"input {v.name!r} has strings, which have no padding")
        new = Value(v.name, TensorType(v.dtype, self.sizes(axes)))
        padded = frozenset(i for i, a in enumerate(axes) if is_padded(a))
        return Padded(new, v.dtype, axes, zeros=padded if zero_filled else frozenset(), clean=zero_filled)

    def run(self, apply_rule: Rule) -> PaddedGraph:
        """Walk the graph. apply_rule: adds a node, and says what is known of its outputs."""
        self.states.update(zip(self.graph.inputs, self.inputs, strict=True))
        self._walk(self.graph.nodes, apply_rule)
        self.at = None
        results = [self.state(v) for v in self.graph.outputs]
        outputs = [self.data(r) for r in results]
        if self.rows:
            self._check_rows()
        made = self.graph.replace(
            inputs=[*(s.value for s in self.inputs if s.value is not None), *self._lengths.values()],
            outputs=outputs,
            nodes=self.nodes,
            defaults={},
        )
        return PaddedGraph(
            made,
            tuple(self._lengths),
            {s: n for s, n in self.buckets.items() if s not in self.rows},
            tuple(self._with_rows(s.axes) for s in self.inputs),
            tuple(self._with_rows(r.axes) for r in results),
            tuple((e, n) for e, n in self._needs.items() if (self.bounds(e)[0] or 0) < n),
            dict(self.masks),
        )

    def _with_rows(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """The axes with the number of rows in its place."""
        new = {s: Expr.of(n) for s, n in self.rows.items()}
        return tuple(axis_of([f.substitute(new) for f in a]) for a in axes) if new else tuple(axes)

    def _check_rows(self) -> None:
        """Refuse where a size depends on the number of rows otherwise than by being it, or being multiplied with it."""
        for v, s in self.states.items():
            if any(ROWS in f.symbols and f != Expr.of(ROWS) for a in s.axes for f in a):
                sizes = ", ".join("*".join(map(str, a)) or "1" for a in s.axes)
                raise PaddingRefused(f"{v.name!r} has the sizes {sizes}, which are no multiples of the number of rows")
        for e, n in self._needs.items():
            if ROWS in e.symbols and (self.bounds(e)[0] or 0) < n:
                raise PaddingRefused(f"only some numbers of rows have results: {e} must be at least {n}")

    def _walk(self, nodes: Sequence[Node], apply_rule: Rule) -> None:
        for node in nodes:
            self.at = node
            branch = self._taken_branch(node)
            if branch is not None:
                self._walk(branch.nodes, apply_rule)
                for v, result in zip(node.outputs, branch.outputs, strict=True):
                    if v is not None:
                        self.states[v] = self.state(result)
                continue
            given = [None if v is None else self.state(v) for v in node.inputs]
            for v, s in zip(node.outputs, self._results(node, given, apply_rule), strict=False):
                if v is not None:
                    if s is None:
                        raise self.refused("an output that is read has no rule")
                    self.states[v] = s

    def _taken_branch(self, node: Node) -> Graph | None:
        if node.op_type != "If" or node.domain or node.inputs[0] is None:
            return None
        known = self.state(node.inputs[0]).known
        if known is None:
            return None
        branch = node.attributes["then_branch" if known.item().constant else "else_branch"]
        return branch if isinstance(branch, Graph) else None

    def _results(self, node: Node, given: Sequence[Padded | None], apply_rule: Rule) -> Sequence[Padded | None]:
        if node.subgraphs:
            return self._control_flow(node)
        known = self._contents.of_result(node)
        if known is not None:
            dtype = _BOOL if node.op_type in _COMPARISONS else self._dtype(node, given)
            if dtype in _FOLLOWED and all(self._fits(x, dtype) for x in known.reshape(-1)):
                axes = tuple(axis_of([n]) for n in known.shape)
                top = () if dtype == _BOOL else _bound_of(known, self.bounds)
                return [Padded(None, dtype, axes, known, top=top)]
        if traits_of(node).stateful:
            raise self.refused("it updates variables")
        return self._with_ratios(node, given, apply_rule(self, node, given))

    def _with_ratios(self, node: Node, given: Given, found: Given) -> Given:
        """What is known of the outputs, with the contents of a small tensor of floats that follow from sizes."""
        made = found[0] if len(found) == 1 else None
        follows = any(s is not None and (s.known is not None or s.ratios is not None) for s in given)
        if made is None or made.dtype not in FOLLOWED or not follows:
            return found
        ratios = self._contents.ratios_of_result(node)
        return found if ratios is None or ratios.shape != self.sizes(made.axes) else [replace(made, ratios=ratios)]

    @staticmethod
    def _fits(x: Expr, dtype: np.dtype) -> bool:
        value = x.constant
        return value is None or dtype == _BOOL or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max

    def _dtype(self, node: Node, given: Sequence[Padded | None]) -> np.dtype:
        if node.op_type in ("Cast", "CastLike", "ConstantOfShape", "Shape", "Size"):
            return _known_dtype(node, given)
        # Where's first input is its condition
        found = [s.dtype for s in given if s is not None]
        return found[1 if node.op_type == "Where" else 0]

    def by_body(self, node: Node, given: Given, apply_rule: Rule) -> Given | None:
        """What is known of the outputs of a node by the graph that it stands for, which is walked in its place; None
        where it stands for none. Raises PaddingRefused, naming the node."""
        if self._body_of is None:
            return None
        inputs = [
            v if v is None or s is None or v.data is not None else Value(v.name, TensorType(s.dtype, _dims(s.axes)))
            for v, s in zip(node.inputs, given, strict=True)
        ]
        try:
            body = self._body_of(node.replace(inputs=inputs))
        except XRTError as e:  # of a lowering that needs the numbers
            raise self.refused(f"what it stands for cannot be told where sizes vary: {e}") from e
        if body is None:
            return None
        self.states.update(zip(body.inputs, (s for s in given if s is not None), strict=True))
        outer, self._prefix = self._prefix, f"{self._prefix}{node.name or node.op_type}/"
        try:
            self._walk(body.nodes, apply_rule)
        except PaddingRefused as e:
            self.at = node
            raise self.refused(f"of what it stands for, {e}") from e
        finally:
            self.at, self._prefix = node, outer
        results = iter(body.outputs)
        return [None if v is None else self.state(next(results)) for v in node.outputs]

    def _control_flow(self, node: Node) -> list[Padded | None]:
        new: dict[Value, Value] = {}
        for v in node.uses():
            s = self.state(v)
            if any(f.constant is None for a in s.axes for f in a):
                raise self.refused("its body reads a padded value")
            new[v] = self.data(s)
        return self.add(substitute(node, new), [v.type if v is not None else None for v in node.outputs])

    # --- values -------------------------------------------------------------------------------------------------------

    def state(self, v: Value) -> Padded:
        """What is known of a value of the original graph."""
        found = self.states.get(v)
        if found is not None:
            return found
        if v.data is None or v.dtype is None:
            raise self.refused(f"its input {v.name!r} comes from outside the graph")
        data = v.data
        known = None
        if data.size <= MOST_ELEMENTS and data.dtype in _FOLLOWED:
            known = np.empty(data.shape, object)
            known.reshape(-1)[:] = [Expr.of(x) for x in data.reshape(-1).tolist()]
        top: tuple[Expr, ...] = ()
        if data.dtype.kind in "iu" and data.size and int(data.min()) >= 0:
            top = (Expr.of(int(data.max()) + 1),)
        self.states[v] = made = Padded(v, v.dtype, tuple(axis_of([n]) for n in data.shape), known, clean=True, top=top)
        return made

    def data(self, s: Padded) -> Value:
        """The value in the padded graph; contents that follow from the valid sizes are computed now."""
        if s.value is not None:
            return s.value
        assert s.known is not None
        flat = s.known.reshape(-1).tolist()
        if all(x.constant is not None for x in flat):
            made = self.constant(np.array([x.constant for x in flat], s.dtype).reshape(s.known.shape))
        else:
            parts = [self.shaped(self.scalar(x), (1,)) for x in flat]
            made = parts[0] if len(parts) == 1 else self.emit("Concat", parts, axis=0)
            made = self.shaped(made, s.known.shape)
            if s.dtype != _I64:
                made = self.emit("Cast", [made], to=_onnx_dtype(s.dtype))
        for v, t in self.states.items():
            if t is s:
                self.states[v] = replace(s, value=made)
        return made

    def ints(self, s: Padded | None) -> list[Expr] | None:
        """The contents of a vector of integers as expressions; None for an input that is left out.

        Refuses one whose contents are computed from data.
        """
        if s is None:
            return None
        if s.known is None or s.dtype == _BOOL:
            raise self.refused("a shape, an axis or a bound is computed from data")
        return list(s.known.reshape(-1))

    def numbers(self, s: Padded | None) -> list[int] | None:
        """As `ints`, of contents that do not depend on sizes."""
        found = self.ints(s)
        if found is None:
            return None
        plain = [x.constant for x in found]
        if any(x is None for x in plain):
            raise self.refused("an axis or a bound depends on a size that is padded")
        return [x for x in plain if x is not None]

    @staticmethod
    def constant(data: np.ndarray) -> Value:
        """A constant of the padded graph."""
        return Value.constant(data)

    def vector(self, *values: int) -> Value:
        """An int64 constant."""
        return Value.constant(np.array(values, np.int64))

    # --- nodes --------------------------------------------------------------------------------------------------------

    def emit(self, op_type: str, inputs: Sequence[Value | None], **attributes: Any) -> Value:
        """Add a node of one output, of the graph's opset."""
        version = since_version(op_type, "", self.opset)
        node = Node(op_type, inputs, [Value()], attributes, version=version, name=self._name(op_type))
        return self._typed(node, infer_types(node))[0]  # type: ignore[return-value]

    def written(self, x: Value, update: Value, start: Value, axis: int) -> Value:
        """`x` with `update` in the place of its entries from `start` on."""
        node = Node(
            "WriteSlice", [x, update, start], [Value()], {"axis": axis}, domain=DIALECT, version=DIALECT_VERSION,
            name=self._name("WriteSlice"),
        )  # fmt: skip
        return self._typed(node, infer_types(node))[0]  # type: ignore[return-value]

    def add(self, node: Node, types: Sequence[Any] | None = None) -> list[Padded | None]:
        """Add a node of values of the padded graph, none of whose results carry padding."""
        made = self._typed(node, self._inferred(node) if types is None else types)
        return [None if v is None else Padded(v, _dtype(v), tuple(axis_of([n]) for n in _shape(v))) for v in made]

    def copy(
        self,
        node: Node,
        inputs: Sequence[Padded | None],
        axes: Sequence[Sequence[Axis] | None],
        **known: Any,
    ) -> list[Padded | None]:
        """Add the node over these inputs; axes: those of its outputs, which must agree with type inference.

        known: fields of `Padded` for every output (zeros, clean, top).
        """
        node = node.replace(inputs=[None if s is None else self.data(s) for s in inputs])
        made = self._typed(node, self._inferred(node))
        return [None if v is None else self.padded(v, a, **known) for v, a in zip(made, axes, strict=False)]

    def padded(self, value: Value, axes: Sequence[Axis] | None, **known: Any) -> Padded:
        """The state of a value of the padded graph with these axes. Refuses where its shape is another one."""
        if axes is None:
            raise self.refused("the shape of a result has no rule")
        checked = tuple(self.checked_axis(a) for a in axes)
        if self.sizes(checked) != _shape(value):
            raise self.refused(f"its result has the shape {_shape(value)}, where {self.sizes(checked)} was expected")
        return Padded(value, _dtype(value), checked, **known)

    def _inferred(self, node: Node) -> Sequence[Any]:
        try:
            return infer_types(node)
        except ShapeError as e:
            raise self.refused(f"types do not fit: {e}") from e

    def _typed(self, node: Node, types: Sequence[Any]) -> list[Value | None]:
        outputs: list[Value | None] = []
        for v, t in zip(node.outputs, types, strict=False):
            if v is None:
                outputs.append(None)
                continue
            if not isinstance(t, TensorType) or not t.is_static:
                raise self.refused("the shape of a result depends on data")
            outputs.append(Value(self._prefix + v.name if v.name else self._name("padding"), t))
        name = self._prefix + node.name if self._prefix and node.name else node.name
        self.nodes.append(node.replace(outputs=outputs, name=name))
        return outputs

    def _name(self, stem: str) -> str:
        self._names += 1
        return f"padding_{stem}_{self._names}"

    def shaped(self, value: Value, shape: Sequence[int]) -> Value:
        """A value in another shape."""
        shape = tuple(shape)
        if _shape(value) == shape:
            return value
        key = value, shape
        if key not in self._shaped:
            self._shaped[key] = self.emit("Reshape", [value, self.vector(*shape)])
        return self._shaped[key]

    def scalar(self, expr: Expr) -> Value:
        """An int64 scalar: an expression of the valid sizes."""
        found = self._scalars.get(expr)
        if found is None:
            total: Value | None = None
            for monomial, c in expr.terms:
                term: Value | None = self.constant(np.array(c, np.int64)) if c != 1 or not monomial else None
                for atom in monomial:
                    if atom == ROWS:
                        raise self.refused("it reads how many rows there are")
                    factor = self._lengths[atom] if isinstance(atom, str) else self._atom(atom)
                    term = factor if term is None else self.emit("Mul", [term, factor])
                assert term is not None
                total = term if total is None else self.emit("Add", [total, term])
            found = total if total is not None else self.constant(np.array(0, np.int64))
            self._scalars[expr] = found
        return found

    def _atom(self, atom: Quotient | Minimum) -> Value:
        if isinstance(atom, Minimum):
            return self.emit("Min", [self.scalar(e) for e in atom.items])
        self.need(atom.dividend, 0)  # ONNX's Div cuts towards zero, // rounds down
        return self.emit("Div", [self.scalar(atom.dividend), self.constant(np.array(atom.divisor, np.int64))])

    # --- sizes --------------------------------------------------------------------------------------------------------

    def size(self, axis: Axis) -> int:
        """The size of an axis in the bucket."""
        return bucket_size(axis, self.buckets)

    def sizes(self, axes: Sequence[Axis]) -> tuple[int, ...]:
        """The shape in the bucket."""
        return tuple(self.size(a) for a in axes)

    def bounds(self, expr: Expr) -> tuple[int | None, int | None]:
        """The least and the greatest value of an expression for sizes up to the bucket's."""
        return expr.bounds(self.limits)

    def at_least(self, expr: Expr, least: int) -> bool:
        """Whether an expression is at least so much for all sizes up to the bucket's."""
        low = self.bounds(expr)[0]
        return low is not None and low >= least

    def need(self, expr: Expr, least: int) -> None:
        """Serve only sizes for which an expression is at least so much. Refuses where the bucket's size is none."""
        if expr.evaluate(self.buckets) < least:
            raise self.refused(f"{expr} would be less than {least} in the bucket")
        if not self.at_least(expr, least):
            self._needs[expr] = max(least, self._needs.get(expr, least))

    def checked_axis(self, axis: Axis) -> Axis:
        """The axis. Refuses one without elements, and one that may be longer for a smaller size."""
        for f in axis:
            if f.constant is None:
                if not _grows(f):
                    raise self.refused(f"the size {f} does not grow with what is in it")
                if not f.symbols <= self.buckets.keys():
                    raise self.refused(f"the size {f} has a symbol without a bucket")
                self.need(f, 1)
            elif f.constant is not None and f.constant < 1:
                raise self.refused("a tensor without elements")
        return axis

    # --- masks --------------------------------------------------------------------------------------------------------

    def valid(self, axis: Axis) -> Value:
        """A bool vector of an axis: whether each place is valid."""
        found = self._vectors.get(axis)
        if found is None:
            digits = [f.evaluate(self.buckets) for f in axis]
            for i, f in enumerate(axis):
                if not is_padded((f,)):
                    continue
                places = self.constant(np.arange(digits[i], dtype=np.int64))
                inside = self.emit("Less", [places, self.scalar(f)])
                inside = self.shaped(inside, [n if j == i else 1 for j, n in enumerate(digits)])
                found = inside if found is None else self.emit("And", [found, inside])
            assert found is not None
            if len(digits) > 1:
                found = self.emit("Expand", [found, self.vector(*digits)])
            found = self._vectors[axis] = self.shaped(found, [math.prod(digits)])
        return found

    def masked(self, s: Padded, axes: Iterable[int], fill: Any) -> Padded:
        """The value with `fill`, a number or a scalar of the graph, behind the valid sizes of these axes; those without
        padding are passed over."""
        where = [i for i in axes if is_padded(s.axes[i])]
        zero = not isinstance(fill, np.generic | float | Value) and fill == 0
        if not where or (zero and (s.clean or (len(where) == 1 and where[0] in s.zeros))):
            return s
        inside: Value | None = None
        shape = self.sizes(s.axes)
        for i in where:
            part = self.shaped(self.valid(s.axes[i]), [n if j == i else 1 for j, n in enumerate(shape)])
            inside = part if inside is None else self.emit("And", [inside, part])
        if s.dtype.kind not in "fiub" and not float_like(s.dtype):
            raise self.refused(f"there is no mask of {s.dtype}")
        if isinstance(fill, Value):
            filler = fill
        else:
            with np.errstate(all="ignore"):
                filler = self.constant(np.array(fill).astype(s.dtype))
        made = self.emit("Where", [inside, self.data(s), filler])
        if self.at is not None:
            self.masks[self.at.op_type] += 1
        all_of_it = set(where) == set(s.padded)
        return replace(
            s,
            value=made,
            zeros=(s.zeros | set(where)) if zero else frozenset(),
            clean=zero and all_of_it,
            top=s.top if zero else (),
            unexpanded=None,
        )

    def lowest(self, dtype: np.dtype) -> Any:
        """What is never greater than an element of this dtype: the identity of a maximum."""
        return self._extreme(dtype, -1)

    def highest(self, dtype: np.dtype) -> Any:
        """The identity of a minimum."""
        return self._extreme(dtype, 1)

    def _extreme(self, dtype: np.dtype, sign: int) -> Any:
        if dtype.kind in "iu":
            return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min
        if dtype.kind == "b":
            return sign > 0
        if dtype.kind == "f" or dtype.name == "bfloat16":
            return sign * math.inf
        raise self.refused(f"{dtype} has no infinity to mask with")

    def refused(self, reason: str) -> PaddingRefused:
        """The refusal, which names the node whose rule is at work."""
        node = self.at
        if node is None:
            return PaddingRefused(reason)
        label = node.name or next((v.name for v in node.outputs if v is not None and v.name), "")
        return PaddingRefused(f"{node.operator} {label!r}: {reason}")


def _bound_of(known: np.ndarray, bounds: Callable[[Expr], tuple[int | None, int | None]]) -> tuple[Expr, ...]:
    """`Padded.top` of contents that follow from sizes: of one element, or of numbers."""
    found = known.reshape(-1).tolist()
    if not found or any((bounds(x)[0] or 0) < 0 or bounds(x)[0] is None for x in found):
        return ()
    if len(found) == 1:
        return (found[0] + 1,)
    numbers = [x.constant for x in found]
    return () if None in numbers else (Expr.of(max(n for n in numbers if n is not None) + 1),)


def _grows(expr: Expr) -> bool:
    """Whether the value never falls where a size in it grows: no coefficient of a symbol is negative."""
    parts = (e for m, _ in expr.terms for a in m for e in _within(a))
    return all(not m or c > 0 for m, c in expr.terms) and all(map(_grows, parts))


def _within(atom: str | Quotient | Minimum) -> tuple[Expr, ...]:
    if isinstance(atom, str):
        return ()
    return atom.items if isinstance(atom, Minimum) else (atom.dividend,)


def _dims(axes: Sequence[Axis]) -> tuple[Dim, ...]:
    """A shape with the valid sizes of these axes."""
    return tuple(product(a).dim for a in axes)


def _shape(value: Value) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(d for d in value.shape if isinstance(d, int))


def _dtype(value: Value) -> np.dtype:
    assert value.dtype is not None
    return value.dtype


def _onnx_dtype(dtype: np.dtype) -> int:
    return DTYPE_TO_ONNX[dtype]


def _known_dtype(node: Node, given: Sequence[Padded | None]) -> np.dtype:
    if node.op_type == "Cast":
        return ONNX_TO_DTYPE[int(node.attributes["to"])]  # type: ignore[arg-type]
    if node.op_type == "CastLike":
        assert given[1] is not None
        return given[1].dtype
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return value.dtype if isinstance(value, np.ndarray) else _I64
    return _I64
