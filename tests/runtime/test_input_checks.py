"""Checks of a cluster's inputs: indices out of range and non-finite floats are found before the engine runs."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from xrt_core.errors import XRTError
from xrt_core.host.executor import run_node
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.op_traits import _INDEX_INPUTS
from xrt_core.ir.schema import latest_opset, since_version
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.runtime.index_origins import Bounds
from xrt_core.runtime.input_checks import (
    InputChecks,
    SymbolicInputChecks,
    has_symbolic_index,
    index_bounds,
    index_checks,
    input_checks,
    is_finite,
    unbound_index,
    unproven_indices,
)

F, INT = np.dtype(np.float32), np.dtype(np.int64)


def _value(name: str, dtype: np.dtype, *shape: int) -> Value:
    return Value(name, TensorType(np.dtype(dtype), shape))


def _known(name: str, data: Any) -> Value:
    data = np.asarray(data)
    return Value(name, TensorType(data.dtype, data.shape), data)


def _apply(op: str, *inputs: Value | None, outputs: int = 1, domain: str = "", **attributes: Any) -> Node:
    version = since_version(op, domain, latest_opset(domain))
    node = Node(op, inputs, [Value(f"{op}{i}") for i in range(outputs)], attributes, domain=domain, version=version)
    types = infer_types(node)
    return node.replace(outputs=[Value(f"{op}{i}", t) for i, t in enumerate(types)])


def _function(inputs: list[Value], *nodes: Node) -> Function:
    outputs = [v for v in nodes[-1].outputs if v is not None]
    return Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": latest_opset()}, name="f"))


def _out(node: Node) -> Value:
    value = node.outputs[0]
    assert value is not None
    return value


X = _value("x", F, 4, 5)

OPERATORS: dict[str, tuple[list[Any], dict[str, Any], list[int], list[int]]] = {
    "Gather": ([X, _value("i", INT, 2)], {"axis": 1}, [-5, 4], [-6, 5]),
    "GatherElements": ([X, _value("i", INT, 2, 5)], {}, [-4, 3], [-5, 4]),
    "ScatterElements": ([X, _value("i", INT, 2, 5), _value("u", F, 2, 5)], {}, [-4, 3], [-5, 4]),
    "GatherND": ([X, _value("i", INT, 3, 1)], {}, [-4, 3], [-5, 4]),
    "ScatterND": ([X, _value("i", INT, 3, 1), _value("u", F, 3, 5)], {}, [-4, 3], [-5, 4]),
    "NegativeLogLikelihoodLoss": ([X, _value("i", INT, 4)], {"ignore_index": -100}, [0, 4, -100], [-1, 5]),
    "SoftmaxCrossEntropyLoss": ([X, _value("i", INT, 4)], {}, [0, 4], [-1, 5]),
    "ReverseSequence": ([X, _value("i", INT, 5)], {}, [1, 4], [-1, 5]),
    "RoiAlign": ([_value("x", F, 2, 1, 4, 4), _value("r", F, 1, 4), _value("i", INT, 1)], {}, [0, 1], [-1, 2]),
    "TensorScatter": (
        [_value("x", F, 2, 4, 3), _value("u", F, 2, 2, 3), _value("i", INT, 2)], {"axis": 1}, [0, 2], [-1, 3],
    ),
    "RNN": (
        [_value("x", F, 3, 2, 1), _value("w", F, 1, 2, 1), _value("r", F, 1, 2, 2), None,
         _value("i", np.dtype(np.int32), 2)], {"hidden_size": 2}, [1, 3], [-1, 4],
    ),
    "MaxUnpool": ([_value("x", F, 1, 1, 2), _value("i", INT, 1, 1, 2)], {"kernel_shape": (2,), "strides": (2,)},
                  [0, 3], [-1, 4]),
}  # fmt: skip


@pytest.mark.parametrize("op", OPERATORS)
def test_indices_at_the_ends_pass_and_beyond_are_violations(op: str) -> None:
    """The bounds of an operator's index input are exactly those of the standard."""
    inputs, attributes, good, bad = OPERATORS[op]
    function = _function([v for v in inputs if v is not None], _apply(op, *inputs, **attributes))
    checks = input_checks(function)
    assert checks is not None
    (check,) = checks.indices
    parameter = function.params[check.parameter]
    arrays = [np.zeros(p.shape, p.dtype) for p in function.params]
    for values, expected in ((good, False), (bad, True)):
        for value in values:
            arrays[check.parameter] = np.full(parameter.shape, value, parameter.dtype)
            assert checks.violates(arrays) is expected, value


@pytest.mark.parametrize(("images", "is_symbolic"), [(2, False), ("b", True)])
def test_regions_of_maps_of_any_size(images: Any, is_symbolic: bool) -> None:
    """RoiAlign's index is held to the number of images, whatever the sizes of these are."""
    x = Value("x", TensorType(F, (images, 1, "h", "w")))
    node = _apply("RoiAlign", x, _value("r", F, 1, 4), _value("i", INT, 1))
    assert has_symbolic_index(node) is is_symbolic
    found = index_bounds(node)
    assert found is None if is_symbolic else found is not None and (found.low, found.high) == ((0,), (1,))


def _symbolic(v: Value | None, names: dict[int, str]) -> Value | None:
    """A value with a symbol in the place of each size that has a name."""
    if v is None:
        return None
    shape = tuple(names.get(d, d) if isinstance(d, int) else d for d in v.shape or ())
    return Value(v.name, TensorType(v.dtype, shape))


@pytest.mark.parametrize("op", OPERATORS)
def test_limits_that_are_symbols_are_those_of_the_sizes_of_each_call(op: str) -> None:
    """A cluster for all sizes holds indices to what the same node of static shapes does, at several sizes."""
    inputs, attributes, good, bad = OPERATORS[op]
    width = {"GatherND": 1, "ScatterND": 1}.get(op)  # the columns of an index are no size
    names = {d: f"s{d}" for v in inputs if v is not None for d in v.shape if d != width}
    given = [_symbolic(v, names) if v is None or v.name in ("x", "i", "u") else v for v in inputs]
    result = Value("y", TensorType(F, None))
    node = Node(op, given, [result], attributes, version=since_version(op, "", latest_opset()))
    assert has_symbolic_index(node)
    checks = SymbolicInputChecks(Function.from_graph(Graph(
        [v for v in given if v is not None], [Value("y", TensorType(F, ("s1",)))],
        [node.replace(outputs=[Value("y", TensorType(F, ("s1",)))])], opsets={"": latest_opset()}, name="f")),
        InputChecks())  # fmt: skip
    at = [v.name for v in inputs if v is not None].index("i")
    for values, expected in ((good, False), (bad, True)):
        for value in values:
            arrays = [np.zeros(v.shape, v.dtype) for v in inputs if v is not None]
            arrays[at] = np.full(arrays[at].shape, value, arrays[at].dtype)
            assert checks.violates(arrays) is expected, value


def test_limits_that_no_input_tells() -> None:
    """A dimension of an input itself limits an index, also where its symbols have no sizes; of what is made in the
    cluster it does where the inputs tell its symbols, and no launch can check what they do not tell."""
    x, i = Value("x", TensorType(F, ("b*n", 3))), Value("i", TensorType(INT, (2,)))
    y, w = Value("y", TensorType(F, (2, 3))), Value("w", TensorType(F, ("2*b*n", 3)))
    direct = Node("Gather", [x, i], [y], {"axis": 0}, version=13)
    (f, g) = (Function.from_graph(Graph([x, i], [y], nodes, opsets={"": 21}, name="f")) for nodes in (
        [direct],
        [Node("Concat", [x, x], [w], {"axis": 0}, version=13),
         Node("Gather", [w, i], [y], {"axis": 0}, version=13)],
    ))  # fmt: skip
    checks = input_checks(f)
    assert isinstance(checks, SymbolicInputChecks)
    assert not checks.violates([np.zeros((6, 3), F), np.array([5, -6])])
    assert checks.violates([np.zeros((5, 3), F), np.array([5, 0])])
    assert unbound_index([f], {"b": 2, "n": 3}) is None
    unbound = unbound_index([f, g], {"b": 2, "n": 3})
    assert unbound is not None
    assert unbound.inputs[0] is w
    found = input_checks(g)
    assert found is not None
    assert found.violates([np.zeros((6, 3), F), np.array([0, 0])])  # the host's, which knows


def test_a_constant_that_is_in_range_for_all_sizes_costs_nothing() -> None:
    """The first and the last row are there whatever the size is; the third is looked for in each call."""
    x = Value("x", TensorType(F, ("n", 3)))
    made = {}
    for row in (0, -1, 2):
        y = Value("y", TensorType(F, (3,)))
        read = Node("Gather", [x, _known("i", np.array(row))], [y], {"axis": 0}, version=13)
        made[row] = input_checks(Function.from_graph(Graph([x], [y], [read], opsets={"": 21}, name="f")))
    assert made[0] is None
    assert made[-1] is None
    assert made[2] is not None
    assert [made[2].violates([np.zeros((n, 3), F)]) for n in (1, 2, 3)] == [True, True, False]


def test_a_computed_index_is_not_proven_by_a_symbol() -> None:
    """Of a dimension of which no more is known than that it is 1 at least, only 0 and -1 are positions."""
    x, ids = Value("x", TensorType(F, ("n", 3))), Value("ids", TensorType(INT, (2,)))
    nodes = {}
    for least, most in ((-1, 0), (0, 1)):
        limits = [_known(f"l{n}", np.array(n, np.int64)) for n in (least, most)]
        doubled, at = Value("d", TensorType(INT, (2,))), Value("at", TensorType(INT, (2,)))
        read = Node("Gather", [x, at], [Value("y", TensorType(F, (2, 3)))], {"axis": 0}, version=13)
        nodes[most] = Graph([x, ids], read.outputs, [
            Node("Add", [ids, ids], [doubled], version=14), Node("Clip", [doubled, *limits], [at], version=13), read,
        ], opsets={"": 21})  # type: ignore[arg-type] # fmt: skip
    assert not unproven_indices(nodes[0])
    assert {n.op_type for n in unproven_indices(nodes[1])} == {"Gather"}


def test_attributes_that_do_not_fit_the_input_leave_the_bounds_open() -> None:
    """What is wrong with the node is the error to tell."""
    x, i = _value("x", F, 1, 1, 2, 2), _value("i", INT, 1, 1, 2, 2)
    made = Node("MaxUnpool", [x, i], [Value("y")], {"kernel_shape": (2, 2), "strides": (2,)}, version=22)
    assert index_bounds(made) is None
    cache, new, at = _value("x", F, 2, 4, 3), _value("u", F, 2, 2, 3), _value("i", INT, 2)
    made = Node("TensorScatter", [cache, new, at], [Value("y")], {"axis": 4}, version=24)
    assert index_bounds(made) is None


def test_what_the_checks_find_the_host_refuses() -> None:
    """For operators that read or write at an index, the host raises an error where the check objects."""
    for op in ("Gather", "GatherElements", "ScatterElements", "GatherND", "ScatterND"):
        inputs, attributes, _, bad = OPERATORS[op]
        arrays = [np.zeros(v.shape, v.dtype) if v.name != "i" else np.full(v.shape, bad[1], v.dtype) for v in inputs]
        with pytest.raises(XRTError):
            run_node(_apply(op, *inputs, **attributes), arrays)


def test_every_operator_with_an_index_has_bounds() -> None:
    """No operator of the table of index inputs is without a rule for its bounds."""
    others = {"Scatter", "GRU", "LSTM", "Attention", "RotaryEmbedding", "ArrayFeatureExtractor"}
    assert {op for _, op in _INDEX_INPUTS} == {*OPERATORS, *others}


def test_bounds_are_carried_back_to_the_parameters() -> None:
    """Through Cast, Unsqueeze, Reshape, Squeeze, Identity and Concat, and no further than what is computed."""
    a, b = _value("a", np.dtype(np.int32), 2), _value("b", F, 1, 1)
    nodes = [_apply("Cast", a, to=7)]
    nodes.append(_apply("Unsqueeze", _out(nodes[-1]), _known("axes", np.array([0]))))
    nodes.append(_apply("Reshape", _out(nodes[-1]), _known("shape", np.array([2]))))
    nodes.append(_apply("Cast", b, to=7))
    nodes.append(_apply("Squeeze", _out(nodes[-1]), _known("axes", np.array([0]))))
    nodes.append(_apply("Concat", _out(nodes[2]), _out(nodes[4]), axis=0))
    nodes.append(_apply("Gather", X, _out(nodes[5])))
    function = _function([X, a, b], *nodes)
    checks = input_checks(function)
    assert checks is not None
    assert {c.parameter for c in checks.indices} == {1, 2}
    x, good = np.zeros((4, 5), np.float32), np.array([[3.9]], np.float32)
    assert not checks.violates([x, np.array([0, 3], np.int32), good])
    assert checks.violates([x, np.array([0, 4], np.int32), good])
    for value in (4.0, np.nan, np.inf, -5.0):
        assert checks.violates([x, np.array([0, 3], np.int32), np.array([[value]], np.float32)])

    added = _apply("Add", a, a)
    cast = _apply("Cast", _out(added), to=7)
    assert input_checks(_function([X, a], added, cast, _apply("Gather", X, _out(cast)))) is None


def _remainder(x: Value, divisor: Value, times: Value | None = None) -> list[Node]:
    """x - x / divisor * times, as exporters write a remainder."""
    quotient = _apply("Div", x, divisor)
    product = _apply("Mul", _out(quotient), times or divisor)
    return [quotient, product, _apply("Sub", x, _out(product))]


WRAPPED = ["where", "products", "products in another order"]


def _wrapped(x: Value, size: int, way: str) -> list[Node]:
    """x + size where x is negative, and x elsewhere, as JAX and Keras write it for a lookup."""
    number = np.array(size, x.dtype)
    below = _apply("Less", x, _known("zero", np.array(0, x.dtype)))
    shifted = _apply("Add", x, _known("size", number))
    if way == "where":
        return [below, shifted, _apply("Where", _out(below), _out(shifted), x)]
    is_below, above = _apply("Cast", _out(below), to=7), _apply("Not", _out(below))
    is_above = _apply("Cast", _out(above), to=7)
    first, second = [_out(is_below), _out(shifted)], [x, _out(is_above)]
    if way != "products":
        first, second = second[::-1], first[::-1]
    a, b = _apply("Mul", *first), _apply("Mul", *second)
    return [below, shifted, is_below, above, is_above, a, b, _apply("Add", _out(a), _out(b))]


@pytest.mark.parametrize("way", WRAPPED)
def test_indices_that_count_from_the_end(way: str) -> None:
    """They are checked where they come in: from the least that is wrapped into the table to its last element."""
    i, table = _value("i", INT, 4), _value("t", F, 7, 2)
    nodes = _wrapped(i, 7, way)
    last = _apply("Gather", table, _out(nodes[-1]))
    assert not unproven_indices(Graph([i, table], [_out(last)], [*nodes, last], opsets={"": latest_opset()}, name="g"))
    checks = input_checks(_function([i, table], *nodes, last))
    assert isinstance(checks, InputChecks)
    for n, is_right in ((-15, False), (-14, True), (-1, True), (0, True), (6, True), (7, False)):
        assert checks.violates([np.array([0, n, 1, 2]), np.zeros((7, 2), F)]) != is_right
    fewer = _apply("Gather", _value("u", F, 5, 2), _out(nodes[-1]))  # of a shorter table only what is not wrapped
    checks = input_checks(_function([i, fewer.inputs[0]], *nodes, fewer))  # type: ignore[list-item]
    assert isinstance(checks, InputChecks)
    for n, is_right in ((-1, False), (0, True), (4, True), (5, False)):
        assert checks.violates([np.array([0, n, 1, 2]), np.zeros((5, 2), F)]) != is_right


@pytest.mark.parametrize("way", WRAPPED)
def test_computed_indices_that_count_from_the_end(way: str) -> None:
    """What is wrapped stays in range where what it is made of was."""
    y = _value("y", F, 3, 7)
    best = _apply("ArgMax", y, axis=1, keepdims=0)
    shift = _apply("Sub", _out(best), _known("four", np.int64(4)))  # -4 to 2
    for size, length, is_right in ((7, 7, True), (4, 4, True), (4, 3, False), (9, 8, False)):
        nodes = _wrapped(_out(shift), size, way)
        last = _apply("Gather", _value("t", F, length, 2), _out(nodes[-1]))
        graph = Graph([y, last.inputs[0]], [_out(last)], [best, shift, *nodes, last], opsets={"": latest_opset()})
        assert (not unproven_indices(graph)) == is_right


def test_computed_indices_are_proved_or_kept_from_engines() -> None:
    """By the range of an ArgMax, of a remainder, of Clip, Min and Max, of sums and products, and of counting.

    Through floats only where they are made of integers that they hold.
    """
    i, table, y = _value("i", INT, 4), _value("t", F, 7, 2), _value("y", F, 3, 7)
    six, zero, five = _known("six", np.int64(6)), _known("zero", np.int64(0)), _known("five", np.int64(5))

    def is_proved(*nodes: Node, limit: int = 7) -> bool:
        last = _apply("Gather", table if limit == 7 else _value("t", F, limit, 2), _out(nodes[-1]))
        graph = Graph([i, y], [_out(last)], [*nodes, last], opsets={"": latest_opset()}, name="g")
        assert unproven_indices(graph) in (frozenset(), frozenset([last]))
        return not unproven_indices(graph)

    assert is_proved(_apply("ArgMax", y, axis=1, keepdims=0))
    assert not is_proved(_apply("ArgMax", _value("z", F, 3, 8), axis=1))
    assert is_proved(_apply("Mod", i, six))
    assert not is_proved(_apply("Mod", i, _known("eight", np.int64(8))))
    clip, low = _apply("Clip", i, zero, five), _apply("Max", i, zero)
    assert is_proved(clip, _apply("Add", _out(clip), _known("one", np.int64([1]))))
    assert not is_proved(clip, _apply("Add", _out(clip), six))
    assert is_proved(low, _apply("Min", _out(low), five))
    assert not is_proved(low)
    assert not is_proved(_apply("Mul", i, six))
    equal = _apply("Equal", i, zero)
    truth = _apply("Cast", _out(equal), to=7)
    count = _apply("CumSum", _out(truth), _known("axis", np.int64(0)))  # of four
    assert is_proved(equal, truth, count, _apply("Mul", _out(count), _out(truth)))
    assert is_proved(equal, truth, count, _apply("Add", _out(count), _known("one", np.int64(1))))
    assert not is_proved(equal, truth, count, _apply("Add", _out(count), _known("three", np.int64(3))))
    assert not is_proved(equal, truth, count, _apply("Mul", _out(count), _known("two", np.int64(2))))
    assert not is_proved(_apply("CumSum", i, _known("axis", np.int64(0))))
    assert is_proved(*_remainder(i, six))
    assert not is_proved(*_remainder(i, _known("eight", np.int64(8))))
    assert not is_proved(*_remainder(i, six, _known("seven", np.int64(7))))
    best = _apply("ArgMax", y, axis=1, keepdims=0)
    for kind, holds in ((1, True), (10, False), (16, False)):  # 5000 is more than float16 and bfloat16 count to
        wide = _apply("Mod", i, _known("n", np.int64(5000)))
        inside = _apply("Cast", _out(wide), to=kind)
        assert is_proved(wide, inside, _apply("Cast", _out(inside), to=7), limit=5000) == holds
        inside = _apply("Cast", _out(best), to=kind)
        assert is_proved(best, inside, _apply("Cast", _out(inside), to=6))
        inside = _apply("Cast", i, to=kind)
        assert is_proved(inside, _apply("Cast", _out(inside), to=7))  # which is checked at each call
    floats = _apply("Clip", _value("x", F, 4), _known("a", np.float32(0)), _known("b", np.float32(5)))
    assert not is_proved(floats, _apply("Cast", _out(floats), to=7))  # NaN
    assert is_proved(_apply("Unsqueeze", i, _known("axes", np.array([0]))))  # which is checked at each call


def test_a_computed_index_out_of_range_is_the_hosts_error() -> None:
    """A Gather at an index that the graph computes is not the engine's; one of an ArgMax is."""
    i, six = _value("i", INT, 4), _known("six", np.int64(6))
    product = _apply("Mul", i, six)
    at = _apply("Gather", X, _out(product))
    m = XRTModule(
        Graph([X, i], [_out(at)], [product, at], opsets={"": latest_opset()}, name="g"), engine="xla", prune=False
    )
    x = np.ones((4, 5), np.float32)
    for _ in range(2):
        with pytest.raises(XRTError, match="out of bounds"):
            m(x, np.full(4, 7))
    assert m(x, np.zeros(4, np.int64)).shape == (4, 5)
    (node,) = m.explain({"x": x, "i": np.zeros(4, np.int64)}).report.host_nodes
    assert "its index is computed" in node.reason


def test_columns_of_different_bounds() -> None:
    """Each column of GatherND has its own range; behind a Transpose the narrowest holds for all."""
    i = _value("i", INT, 2, 2)
    direct = _function([X, i], _apply("GatherND", X, i))
    ((check,), never) = index_checks(direct)
    assert check.bounds == Bounds((-4, -5), (3, 4))
    assert not never
    assert check.bounds.are_met(np.array([[3, 4], [-4, -5]]))
    assert not check.bounds.are_met(np.array([[4, 3], [0, 0]]))
    turned = _apply("Transpose", i)
    ((check,), _) = index_checks(_function([X, i], turned, _apply("GatherND", X, _out(turned))))
    assert check.bounds == Bounds((-4,), (3,))


BY_COLUMN: dict[str, Callable[[Value], list[Node]]] = {
    "Gather": lambda r: [
        _apply("Gather", r, _known("first", np.array([-5])), axis=-1),
        _apply("Gather", r, _known("rest", np.arange(1, 5)), axis=1),
    ],
    "Split": lambda r: [_apply("Split", r, _known("sizes", np.array([1, 4])), axis=1, outputs=2)],
    "Concat": lambda r: [
        (whole := _apply("Concat", r, r, axis=1)),
        _apply("Split", _out(whole), _known("sizes", np.array([1, 4, 5])), axis=1, outputs=3),
    ],
}


@pytest.mark.parametrize("way", BY_COLUMN)
def test_columns_that_are_no_index(way: str) -> None:
    """Of regions as [image, x1, y1, x2, y2] the first column alone is held to the number of images."""
    x, rois, rows = _value("x", F, 2, 1, 4, 4), _value("rois", F, 6, 5), _value("rows", INT, 3)
    taken = _apply("Gather", rois, rows, axis=0)
    apart = BY_COLUMN[way](_out(taken))
    first, boxes = [v for n in apart for v in n.outputs if v is not None and n.op_type != "Concat"][:2]
    image = _apply("Squeeze", first, _known("axis", np.array([1])))
    index = _apply("Cast", _out(image), to=7)
    function = _function([x, rois, rows], taken, *apart, image, index, _apply("RoiAlign", x, boxes, _out(index)))
    checks = input_checks(function)
    assert checks is not None
    images, given = np.zeros((2, 1, 4, 4), F), np.full((6, 5), 300, F)
    given[:, 0] = 1
    given[0, 2] = np.nan
    assert not checks.violates([images, given, np.arange(3)])
    assert checks.violates([images, given, np.full(3, 6)])
    for bad in (2, -1, np.nan):
        given[5, 0] = bad
        assert checks.violates([images, given, np.arange(3)])


def test_columns_alike_are_checked_at_once() -> None:
    """Tokens that are joined or taken apart have one range, not one for each of them; of many the narrowest holds."""
    table, ids = _value("table", F, 9, 2), _value("ids", INT, 2, 500)
    few = _value("few", INT, 2, 50)
    joined = _apply("Concat", few, few, axis=1)
    ((check,), _) = index_checks(_function([table, few], joined, _apply("Gather", table, _out(joined))))
    assert check.bounds == Bounds((-9,), (8,))
    apart = _apply("Split", ids, _known("sizes", np.array([100, 400])), axis=1, outputs=2)
    ((check,), _) = index_checks(_function([table, ids], apart, _apply("Gather", table, _out(apart))))
    assert check.bounds == Bounds((-9,), (8,))


def test_a_constant_index_out_of_range_is_for_the_host() -> None:
    """A cluster that holds such an index goes to the host at every call; one in range needs no check."""
    out = input_checks(_function([X], _apply("Gather", X, _known("i", np.array([9])))))
    assert out is not None
    assert out.violates([np.zeros((4, 5), np.float32)])
    assert input_checks(_function([X], _apply("Gather", X, _known("i", np.array([3]))))) is None


def test_floats_that_must_be_finite() -> None:
    """With `finite`, NaN and infinity in any floating parameter are violations, and large numbers are none."""
    function = _function([X], _apply("Relu", X))
    assert input_checks(function) is None
    checks = input_checks(function, finite=True)
    assert checks is not None
    x = np.full((4, 5), 3e38, np.float32)
    assert not checks.violates([x])
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 2] = bad
        assert checks.violates([x])
    assert is_finite(np.ones(3, ml_dtypes.bfloat16))
    assert not is_finite(np.array([1, np.inf], np.float16))
    assert is_finite(np.zeros(0, np.float32))
    for size in (3, 1 << 17):  # counted in two ways
        x = np.zeros(size, np.float32)
        assert is_finite(x[::2])
        x[-1] = np.nan
        assert not is_finite(x)


@pytest.mark.slow
def test_a_check_takes_microseconds() -> None:
    """A check of 512 indices takes less than a tenth of a millisecond."""
    i = _value("i", INT, 512)
    checks = input_checks(_function([X, i], _apply("Gather", X, i)))
    assert checks is not None
    arrays = [np.zeros((4, 5), np.float32), np.zeros(512, np.int64)]
    assert min(timeit.repeat(lambda: checks.violates(arrays), number=100, repeat=5)) / 100 < 1e-4


def _quantized(scale: Value, *nodes: Node, inputs: list[Value]) -> Function:
    zero = _known("z", np.array(3, np.uint8))
    return _function(inputs, *nodes, _apply("QuantizeLinear", X, scale, zero))


def test_scales_that_are_not_positive_are_for_the_host() -> None:
    """Of a quantisation at each call, also behind a Cast or a Reshape, and of a constant at every one."""
    s = _value("s", F, 1)
    cast = _apply("Cast", _value("s", np.dtype(np.float16), 1), to=1)
    half = cast.inputs[0]
    assert half is not None
    flat = _apply("Reshape", s, _known("shape", np.array([], np.int64)))
    for function in (
        _quantized(s, inputs=[X, s]), _quantized(_out(cast), cast, inputs=[X, half]),
        _quantized(_out(flat), flat, inputs=[X, s]),
    ):  # fmt: skip
        checks = input_checks(function)
        assert checks is not None
        x, dtype = np.zeros((4, 5), np.float32), function.params[1].dtype
        assert not checks.violates([x, np.array([0.5], dtype)])
        for bad in (0.0, -0.5, np.nan, np.inf):
            assert checks.violates([x, np.array([bad], dtype)])
    assert input_checks(_quantized(_known("s", np.array(0.5, F)), inputs=[X])) is None
    for bad in (0.0, -0.5):
        never = input_checks(_quantized(_known("s", np.array(bad, F)), inputs=[X]))
        assert never is not None
        assert never.violates([np.zeros((4, 5), np.float32)])


def test_scales_of_products_of_integers() -> None:
    """All three of QLinearMatMul; those of a DequantizeLinear may be zero."""
    i8 = np.dtype(np.int8)
    a, b, zero = _value("a", i8, 2, 3), _value("b", i8, 3, 2), _known("z", np.array(0, i8))
    scales = [_value(f"s{i}", F) for i in range(3)]
    product = _apply("QLinearMatMul", a, scales[0], zero, b, scales[1], zero, scales[2], zero)
    checks = input_checks(_function([a, b, *scales], product))
    assert checks is not None
    assert checks.positive == (2, 3, 4)
    assert input_checks(_function([a, scales[0]], _apply("DequantizeLinear", a, scales[0], zero))) is None


def test_a_module_with_scales_of_zero_gives_what_the_host_does() -> None:
    """The engine is not asked, and loses nothing by it."""
    pytest.importorskip("onnxruntime")
    s = _value("s", F)
    zero = _known("z", np.array(3, np.uint8))
    graph = Graph([X, s], [_out(q := _apply("QuantizeLinear", X, s, zero))], [q], opsets={"": latest_opset()}, name="g")
    m, host = (XRTModule(graph, engine=e, guard=False, prune=False) for e in ("onnxruntime", "host"))
    x = np.linspace(-300, 300, 20, dtype=np.float32).reshape(4, 5)
    for scale in (0.5, 0.0, -1.0, np.nan, 2.0):
        given = [x, np.array(scale, np.float32)]
        np.testing.assert_array_equal(m(*given), host(*given))
    assert not m.explain().errors
