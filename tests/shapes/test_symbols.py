"""Symbolic dimensions: expressions, ranges, and the binding of a declared signature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from xrt_core.errors import InputError, ShapeError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.symbols import Declared, Expr, Symbol, expression, least, shape_for
from xrt_core.ir.types import TensorType
from xrt_core.passes.symbolic_shapes import SymbolicShapes
from xrt_core.runtime.input_checks import is_within

_B, _N = Expr.of("b"), Expr.of("n")

_expressions = st.recursive(
    st.integers(0, 9).map(Expr.of) | st.sampled_from([_B, _N]),
    lambda inner: (
        st.tuples(inner, inner).map(lambda p: p[0] + p[1])
        | st.tuples(inner, inner).map(lambda p: p[0] - p[1])
        | st.tuples(inner, inner).map(lambda p: p[0] * p[1])
        | st.tuples(inner, st.integers(1, 7)).map(lambda p: p[0] // p[1])
        | st.lists(inner, min_size=1, max_size=3).map(lambda p: least(*p))
    ),
    max_leaves=6,
)


@examples(100)
@given(_expressions, st.integers(1, 50), st.integers(1, 50))
def test_text_and_expression_are_one(e: Expr, b: int, n: int) -> None:
    """The text of an expression reads as the same expression, and means in Python what the expression evaluates to."""
    assert expression(str(e)) == e
    assert eval(str(e), {}, {"b": b, "n": n}) == e.evaluate({"b": b, "n": n})


@examples(100)
@given(_expressions, _expressions, st.integers(1, 50), st.integers(1, 50), st.integers(1, 7))
def test_arithmetic_is_that_of_integers(x: Expr, y: Expr, b: int, n: int, k: int) -> None:
    """Sums, products and quotients of expressions evaluate to those of their values; bounds hold."""
    at = {"b": b, "n": n}
    p, q = x.evaluate(at), y.evaluate(at)
    assert ((x + y).evaluate(at), (x - y).evaluate(at), (x * y).evaluate(at)) == (p + q, p - q, p * q)
    assert (x // k).evaluate(at) == p // k
    low, high = x.bounds({"b": Symbol("b", 1, 50), "n": Symbol("n", 1, 50)})
    assert low is None or low <= p
    assert high is None or p <= high
    assert least(x, y).evaluate(at) == min(p, q)
    assert x.substitute({"b": y, "n": x}).evaluate(at) == x.evaluate({"b": q, "n": p}) if min(p, q) >= 0 else True
    whole = (x * y).divided(y)
    assert whole == x if y.terms else whole is None
    whole = x.divided(y)
    assert whole is None or whole * y == x


def test_equal_expressions_are_equal_dimensions() -> None:
    """Sums and products have one normal form, and with it one text."""
    assert str(_N * 2 + 4 - _N - _N // 1) == "4"
    assert ((4 * _N + 3) // 4).dim == "n"
    assert (_N // 2 // 3).dim == "n//6"
    assert (_B * _N * 12).divided(_B * 4) == 3 * _N
    assert (_N * _N - 1).divided(_N + 1) == _N - 1
    assert (_N * _N + 1).divided(_N + 1) is None
    assert str(2 * least(150, _N, least(_N, 100), _B + 1)) == "2*min(b + 1, n, 100)"
    assert least(_N, least(_N)) == _N
    assert expression("past + 1") == Expr.of("past") + 1
    assert expression("batch size") is None
    assert shape_for(("b", "2*n", 3, None), {"b": 2, "n": 5}) == (2, 10, 3, None)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 8), (3, 8)), ["'mask'", "axis 0", "'b'", "3", "2", "'ids'"]),
        (((2, 9), (2, 9)), ["'ids'", "axis 1", "'n'", "9", "multiple of 8"]),
        (((2, 1024), (2, 1024)), ["'ids'", "axis 1", "'n'", "1024", "maximum 512"]),
        (((2, 8, 1), (2, 8)), ["'ids'", "[2, 8, 1]", "2 dimensions"]),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error(shapes: tuple[tuple[int, ...], ...], words: list[str]) -> None:
    """The error names input, axis, symbol and both sizes."""
    declared = Declared(("ids", "mask"), (("b", "n"), ("b", "n")), {"n": Symbol("n", 1, 512, 8)})
    assert declared.bind(((2, 8), (2, 8))) == {"b": 2, "n": 8}
    assert declared.admits(shapes) is None
    with pytest.raises(InputError) as e:
        declared.bind(shapes)
    for word in words:
        assert word in str(e.value)


def test_an_expression_in_a_signature_is_checked() -> None:
    """A dimension that is an expression of symbols must have its value; the error names what it follows from."""
    declared = Declared(("mask", "past", "ids"), (("b", "p + n"), ("b", "p"), ("b", "n")), {})
    assert declared.bind(((1, 5), (1, 3), (1, 2))) == {"b": 1, "p": 3, "n": 2}
    with pytest.raises(InputError, match=r"'mask', axis 1: p \+ n = 5 by n = 2 .*'ids'.*, but 6 was given"):
        declared.bind(((1, 6), (1, 3), (1, 2)))


def test_symbols_without_a_size_are_refused() -> None:
    """A name that is no identifier, and a range without any size, are errors."""
    for kwargs in ({"name": "2n"}, {"name": "n", "min": 5, "max": 7, "multiple": 8}, {"name": "n", "min": -1}):
        with pytest.raises(ShapeError, match="symbol"):
            Symbol(**kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "guards"), [(4, []), (9, ["-k + n", "k + n - 9"])])
def test_an_index_that_is_not_proven_leaves_no_guard(rows: int, guards: list[str]) -> None:
    """0 to 8 less k is within n = 9 rows by two guards; within 4 it is not, and the lower end's guard is not kept."""
    int64 = np.dtype(np.int64)
    x, y = (Value(n, TensorType(np.dtype(np.float32), shape)) for n, shape in (("x", ("n", 3)), ("y", ("k",))))
    k, span, index = (Value(n, TensorType(int64, (size,))) for n, size in (("size", 1), ("span", 9), ("index", 9)))
    found = Value("found", TensorType(np.dtype(np.float32), (9, 3)))
    ends = [Value.constant(np.array(i, np.int64), f"c{i}") for i in (0, 9, 1)]
    symbolic = SymbolicShapes({n: Symbol(n) for n in "nk"}, {"n": rows, "k": 3})
    for node in (
        Node("Shape", [y], [k], version=21), Node("Range", ends, [span], version=11),
        Node("Sub", [span, k], [index], version=14), Node("Gather", [x, index], [found], {"axis": 0}, version=13),
    ):  # fmt: skip
        symbolic.follow(node, [v.type for v in node.outputs if v is not None])
    assert sorted(map(str, symbolic.guards)) == guards
    assert bool(symbolic.within) is bool(guards)


@pytest.mark.parametrize(
    ("column", "op", "proven"), [(2, "GatherND", True), (3, "GatherND", False), (2, "ScatterND", True)]
)
def test_an_index_of_rows_and_columns(column: int, op: str, proven: bool) -> None:
    """Each column of the index has its own axis: rows up to n - 1 of n, and a column that is there or not."""
    int64, float32 = np.dtype(np.int64), np.dtype(np.float32)
    x, updates = Value("x", TensorType(float32, ("n", 3))), Value("updates", TensorType(float32, ("n",)))
    n, span, rows, moved, index = (
        Value(name, TensorType(int64, shape))
        for name, shape in (
            ("size", ()), ("span", ("n",)), ("rows", ("n", 1)), ("moved", ("n", 1)), ("index", ("n", 2)),
        )
    )  # fmt: skip
    found = Value("found", updates.type if op == "GatherND" else x.type)
    zero, one = (Value.constant(np.array(i, np.int64), f"c{i}") for i in (0, 1))
    columns = Value.constant(np.array([[column]], np.int64), "columns")
    same = Value("same", TensorType(int64, ("n", 1)))
    symbolic = SymbolicShapes({"n": Symbol("n")}, {"n": 4})
    symbolic._known[n] = np.array(Expr.of("n"), object)
    last = [x, index] if op == "GatherND" else [x, index, updates]
    for node in (
        Node("Range", [zero, n, one], [span], version=11),
        Node("Unsqueeze", [span, Value.constant(np.array([1], np.int64), "axes")], [rows], version=13),
        Node("Identity", [rows], [moved], version=19),
        Node("Expand", [columns, Value("target", TensorType(int64, (2,)))], [same], version=13),
        Node("Concat", [moved, same], [index], {"axis": -1}, version=13),
        Node(op, last, [found], version=13),
    ):
        symbolic.follow(node, [v.type for v in node.outputs if v is not None])
    assert (index in {v for v, _ in symbolic.within}) is proven
    assert is_within(Node(op, last, [found], version=13), symbolic.within) is proven


_indices = st.recursive(
    st.sampled_from(["places", "size", "data"]) | st.integers(-9, 9),
    lambda inner: (
        st.tuples(st.sampled_from(["Add", "Sub", "Mul", "Max", "Min"]), inner, inner)
        | st.tuples(st.sampled_from(["Neg", "Abs"]), inner)
        | st.tuples(st.sampled_from(["Clip", "Where"]), inner, inner, inner)
        | st.tuples(st.just("Mod"), inner, st.integers(1, 5))
    ),
    max_leaves=6,
)


@examples(2000)
@given(_indices, st.integers(1, 9))
def test_ranges_hold_all_elements(tree: Any, first: int) -> None:
    """Of integers that are computed from the places of an axis of n, from n and from data, for each n that the guards
    allow."""
    vector, nodes = TensorType(np.dtype(np.int64), ("n",)), list[Node]()
    x, size, span = (Value(n, TensorType(np.dtype(np.int64), s)) for n, s in (("x", ("n",)), ("size", (1,)), ("s", ())))
    shape = TensorType(np.dtype(np.int64), ())
    axes, zero, one = (Value.constant(np.array(i, np.int64), f"c{i!r}") for i in ([0], 0, 1))
    places = Value("places", vector)
    nodes += [
        Node("Shape", [x], [size], version=21), Node("Squeeze", [size, axes], [span], version=13),
        Node("Range", [zero, span, one], [places], version=11),
    ]  # fmt: skip

    def built(t: Any) -> Value:
        if not isinstance(t, tuple):
            known = {"places": places, "size": span, "data": Value("data", vector)}
            return known[t] if isinstance(t, str) else Value.constant(np.array(t, np.int64), f"k{t}")
        operands = [built(o) for o in t[1:]]
        if t[0] == "Where":
            condition = Value("condition", TensorType(np.dtype(np.bool_), ("n",)))
            operands[0] = condition
        whole = any(v.shape == ("n",) for v in operands)
        made = Value(f"v{len(nodes)}", vector if whole else shape)
        nodes.append(Node(t[0], operands, [made], version=18))
        return made

    def computed(t: Any, n: int) -> Any:
        if not isinstance(t, tuple):
            known = {"places": np.arange(n), "size": np.array(n), "data": np.arange(n) * 37 % 23 - 11}
            return known[t] if isinstance(t, str) else np.array(t)
        a = [computed(o, n) for o in t[1:]]
        return {
            "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum,
            "Neg": np.negative, "Abs": np.abs, "Mod": np.mod,
            "Clip": lambda v, low, high: np.minimum(np.maximum(v, low), high),
            "Where": lambda _, p, q: np.where(np.arange(n) % 2 == 0, p, q),
        }[t[0]](*a)  # fmt: skip

    symbolic = SymbolicShapes({"n": Symbol("n")}, {"n": first})
    result = built(tree)
    for node in nodes:
        symbolic.follow(node, [v.type for v in node.outputs if v is not None])
    interval = symbolic.interval(result)
    for n in range(1, 10):
        if interval is None or any(g.evaluate({"n": n}) < 0 for g in symbolic.guards):
            continue
        low, high = (e.evaluate({"n": n}) for e in interval)
        found = computed(tree, n)
        assert low <= found.min()
        assert found.max() <= high
