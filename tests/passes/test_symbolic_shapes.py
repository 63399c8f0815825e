"""Shapes that follow from symbols: for the examples that `onnx` has of each operator they are those of the results."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.node import collect_testcases

import xrt_core as xrt
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.graph import Graph
from xrt_core.ir.symbols import Declared, SymbolicSignature, expression
from xrt_core.ir.types import TensorType
from xrt_core.passes.size_ratios import MOST

UNKNOWN = {
    "Attention": 2,  # sizes that are no multiple of the number of heads
    "AveragePool": 1,  # a last window may begin behind the input
    "Compress": 5,
    "GatherND": 2,  # the last dimension of the index is a symbol
    "ImageDecoder": 9,
    "MaxPool": 1,
    "MaxUnpool": 1,
    "NonMaxSuppression": 10,
    "NonZero": 1,
    "Resize": 14,  # scales such as 0.6, whose product is rounded in float32
    "Scan": 1,
    "Shape": 1,
    "StringNormalizer": 6,
    "StringSplit": 5,
    "Unique": 6,
}
"""Examples of which a dimension is not known, at most: it depends on data, or there is no rule."""
CONSTANT = {
    "Resize": range(1, 9),
    "Upsample": range(1, 9),
    "Range": range(9),
    "Tile": range(1, 9),
    "Conv": range(1, 9),
    "ConvTranspose": range(1, 9),
    "ConvInteger": range(1, 9),
    "QLinearConv": range(1, 9),
    "DeformConv": range(1, 2),
    "LSTM": range(1, 4),
    "GRU": range(1, 4),
    "RNN": range(1, 4),
    "NonMaxSuppression": range(2, 9),
}
"""Inputs that models have as constants, beside those of few integers."""

Example = tuple[str, str, Graph, list[np.ndarray], list[Any]]


@lru_cache(maxsize=1)
def examples() -> tuple[Example, ...]:
    """(name, operator, the graph of one node, its inputs without constants, its results) of each example."""
    return tuple(_examples())


def _examples() -> Iterator[Example]:
    for case in collect_testcases(None):
        nodes, (inputs, results) = case.model.graph.node, case.data_sets[0]
        usable = len(nodes) == 1 and not nodes[0].domain and all(isinstance(a, np.ndarray) for a in inputs)
        if not usable or "_expanded" in case.name:
            continue
        model, op, given = onnx.ModelProto(), nodes[0].op_type, []
        model.CopyFrom(case.model)
        for k, (port, a) in enumerate(zip(list(model.graph.input), inputs, strict=True)):
            steers = k > 0 and a.dtype in (np.int64, np.int32) and a.ndim <= 1
            if steers or op == "ConstantOfShape" or k in CONSTANT.get(op, ()):
                model.graph.initializer.append(onnx.numpy_helper.from_array(a, port.name))
                model.graph.input.remove(port)
                continue
            given.append(a)
            port.type.tensor_type.shape.Clear()
            for n in a.shape:
                d = port.type.tensor_type.shape.dim.add()
                if n > 1:
                    d.dim_param = f"s{n}"
                else:
                    d.dim_value = n
        for port in model.graph.output:
            port.type.tensor_type.ClearField("shape")
        if any(n > 1 for a in given for n in a.shape):
            yield case.name, op, import_model(model), given, list(results)


def shapes_of(graph: Graph, given: list[np.ndarray]) -> tuple[list[Any], dict[str, int]]:
    """The symbolic shapes of the results, where each size of the inputs is a symbol; and the sizes."""
    sizes = {f"s{n}": n for a in given for n in a.shape if n > 1}
    dims = tuple(tuple(f"s{n}" if n > 1 else n for n in a.shape) for a in given)
    declared = Declared(tuple(v.name for v in graph.inputs), dims, {})
    m = xrt.XRTModule(graph, engine="host", guard=False)
    captured = m._source.plain.captured  # type: ignore[union-attr]
    types = [TensorType(a.dtype, d) for a, d in zip(given, dims, strict=True)]
    found = m._pipeline.optimise(captured, types, {}, engines=False, symbolic=SymbolicSignature(declared, sizes))
    return [v.shape for v in found.graph.outputs], sizes


def shape_of(op: str, *inputs: Any, outputs: int = 1, opset: int = 24, **attributes: Any) -> list[str]:
    """The shapes of a node's results. inputs: dimensions of float32 values, or arrays of constants."""
    node = onnx.helper.make_node(op, [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(outputs)])
    node.attribute.extend(onnx.helper.make_attribute(k, a) for k, a in attributes.items())
    return shapes_through([node], *inputs, outputs=outputs, opset=opset)


def shapes_through(nodes: list[onnx.NodeProto], *inputs: Any, outputs: int = 1, opset: int = 24) -> list[str]:
    """The shapes of the results y0, y1, ... of nodes, as `shape_of`; the inputs are x0, x1, ..."""
    made = [onnx.numpy_helper.from_array(a, f"x{i}") for i, a in enumerate(inputs) if isinstance(a, np.ndarray)]
    ports = [
        onnx.helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT, d)
        for i, d in enumerate(inputs)
        if not isinstance(d, np.ndarray)
    ]
    results = [onnx.helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.UNDEFINED, None) for i in range(outputs)]
    for r in results:
        r.type.Clear()
    graph = onnx.helper.make_graph(nodes, "nodes", ports, results, made)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    imported = import_model(model)
    m = xrt.XRTModule(imported, engine="host", guard=False)
    dims = tuple(tuple(d) for d in inputs if not isinstance(d, np.ndarray))
    declared = Declared(tuple(v.name for v in imported.inputs), dims, {})
    signature = SymbolicSignature(declared, {str(d): 12 for s in dims for d in s if isinstance(d, str)})
    types = [TensorType(np.dtype(np.float32), d) for d in dims]
    captured = m._source.plain.captured  # type: ignore[union-attr]
    found = m._pipeline.optimise(captured, types, {}, engines=False, symbolic=signature)
    return [", ".join(map(str, v.shape or ("?",))) for v in found.graph.outputs]


F: np.ndarray = np.ones((3, 2, 3, 3), np.float32)


HALF = {"strides": [2], "ceil_mode": 1}
CASES: list[tuple[str, Any, dict[str, Any], list[str]]] = [
    ("ConvTranspose", [("b", 3, "h", "w"), F], {"strides": [2, 2]}, ["b, 2, 2*h + 1, 2*w + 1"]),
    ("TopK", [("b", "n"), np.array([3])], {"outputs": 2}, ["b, 3", "b, 3"]),
    ("Split", [("b", "n")], {"outputs": 2, "axis": 1, "num_outputs": 2}, ["b, (n + 1)//2", "b, -((n + 1)//2) + n"]),
    ("Split", [(6, "n"), np.array([2, 4])], {"outputs": 2, "axis": 0}, ["2, n", "4, n"]),
    ("Col2Im", [("b", 18, 5), np.array([3, 7]), np.array([1, 3])], {}, ["b, 6, 3, 7"]),
    ("DFT", [("b", "n", 1)], {"onesided": 1}, ["b, n//2 + 1, 2"]),
    ("DFT", [("b", "n", 2)], {"onesided": 1, "inverse": 1}, ["b, 2*n - 2, 1"]),
    ("DFT", [("b", "n", 1), np.array(8)], {}, ["b, 8, 2"]),
    ("DepthToSpace", [("b", 8, "h", "w")], {"blocksize": 2}, ["b, 2, 2*h, 2*w"]),
    ("SpaceToDepth", [("b", 2, "h", "w")], {"blocksize": 2}, ["b, 8, h//2, w//2"]),
    ("MaxPool", [("b", 2, "h")], {"outputs": 2, "kernel_shape": [3], **HALF}, ["b, 2, h//2"] * 2),
    ("MaxPool", [("b", 2, "h")], {"kernel_shape": [1], **HALF}, ["b, 2, None"]),
    ("GatherND", [("b", "n", 4), np.array([[0], [0]])], {}, ["2, n, 4"]),
    ("Resize", [("b", "h"), np.ones(0, F.dtype), np.array([2], F.dtype)], {"axes": [1]}, ["b, 2*h"]),
    ("Reshape", [("b", "n", 4), np.array([2, 0, 1, -1])], {}, ["2, n, 1, 2*b"]),
    ("Slice", [("b", "n"), *map(np.array, ([1000], [1000], [1]))], {}, ["b, 0"]),
    ("Slice", [("b", "n"), *map(np.array, ([5], [-1 << 62], [1], [-1]))], {}, ["b, 6"]),
    ("Slice", [("b", "n"), *map(np.array, ([-2], [3], [1], [-2]))], {}, ["b, n//2 - 2"]),
    ("Slice", [("b", "n"), *map(np.array, ([1 << 62], [-4], [1], [-1]))], {}, ["b, 3"]),
    ("Slice", [("b", "n"), *map(np.array, ([1], [4], [1], [-1]))], {}, ["b, None"]),
    ("STFT", [("b", "n"), np.array(4), np.ones(6, F.dtype)], {}, ["b, (n - 6)//4 + 1, 4, 2"]),
    ("OneHot", [("b", "n"), np.array(9), np.array([0, 1], F.dtype)], {"axis": 1}, ["b, 9, n"]),
    ("Attention", [("b", "q", 32), *[("b", "k", 16)] * 2], {"q_num_heads": 4, "kv_num_heads": 2}, ["b, q, 32"]),
    ("MatMul", [("a", "q", "k"), ("b", "k", "n")], {}, ["a, q, n"]),
    ("MatMul", [("a", "q", "k"), ("k",)], {}, ["a, q"]),
    ("Einsum", [("b", 1, "n", "h"), (1, "b", "m", "h")], {"equation": "...nh,...mh->...nm"}, ["b, b, n, m"]),
    ("Einsum", [("a", "n"), ("b", "n")], {"equation": "ij, ij"}, ["?"]),
    ("Einsum", [("a", "n"), ("b", "m")], {"equation": "ij,kj->ik"}, ["a, b"]),
    ("Einsum", [("a", "n"), ("b", "n")], {"equation": "ij,ij->i"}, ["a"]),
    ("Attention", [("b", 4, "q", 8), ("b", 2, "k", 8), ("b", 2, "k", 6)], {}, ["b, 4, q, 6"]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "more", "expected"), CASES)
def test_shapes_that_inference_leaves_open(op: str, inputs: Any, more: dict[str, Any], expected: list[str]) -> None:
    """What `onnx` knows nothing of, or gives as 0, follows from the rules."""
    assert shape_of(op, *inputs, **more) == expected


def test_sizes_that_are_split() -> None:
    """Those that come out of a Split of a shape, as ONNX Runtime's optimiser writes several Gathers, are followed."""
    make = onnx.helper.make_node
    nodes = [
        make("Shape", ["x0"], ["shape"]),
        make("Split", ["shape"], ["a", "b", "c"], axis=0, num_outputs=3),
        make("Mul", ["b", "c"], ["bc"]),
        make("Concat", ["a", "bc"], ["target"], axis=0),
        make("Reshape", ["x0", "target"], ["y0"]),
    ]
    assert shapes_through(nodes, ("b", 6, "n")) == ["b, 6*n"]


@pytest.mark.parametrize(
    ("start", "delta", "expected"),
    [(0, 1, "n"), (0.5, 1, "n"), (3, 1, "n - 3"), (0, 2, "(n + 1)//2"), (0, 0.1, "None")],
)
def test_sizes_that_are_counted_in_floats(start: float, delta: float, expected: str) -> None:
    """As detectors number the pixels of their grids."""
    make = onnx.helper.make_node
    nodes = [
        make("Shape", ["x0"], ["shape"], start=1, end=2),
        make("Cast", ["shape"], ["size"], to=onnx.TensorProto.FLOAT),
        make("Squeeze", ["size", "x3"], ["limit"]),
        make("Range", ["x1", "limit", "x2"], ["y0"]),
    ]
    constants = np.array(start, np.float32), np.array(delta, np.float32), np.array([0])
    assert shapes_through(nodes, ("b", "n"), *constants) == [expected]


@pytest.mark.parametrize(("delta", "expected"), [(-1, "2*n"), (-3, "(2*n + 2)//3"), (1, "None"), (-0.5, "None")])
def test_sizes_that_are_counted_down_in_floats(delta: float, expected: str) -> None:
    """From a size to its negative, as XLNet numbers relative positions. A sum of sizes is exact for whole numbers."""
    make = onnx.helper.make_node
    nodes = [
        make("Shape", ["x0"], ["shape"], start=1, end=2),
        make("Neg", ["shape"], ["negative"]),
        *(make("Cast", [v], [f"{v}_float"], to=onnx.TensorProto.FLOAT) for v in ("shape", "negative")),
        *(make("Squeeze", [f"{v}_float", "x2"], [f"{v}_number"]) for v in ("shape", "negative")),
        make("Range", ["shape_number", "negative_number", "x1"], ["y0"]),
    ]
    assert shapes_through(nodes, ("b", "n"), np.array(delta, np.float32), np.array([0])) == [expected]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("ReduceMin", "b, min(n, 5)"), ("ReduceMax", "b, -min(n, 5) + n + 5"), ("Min", "b, min(n, 5)")],
)
def test_the_smaller_of_two_sizes(op: str, expected: str) -> None:
    """As many as there are, but no more than five: it stays an expression, whichever is smaller."""
    make = onnx.helper.make_node
    five = onnx.numpy_helper.from_array(np.array([5]))
    joined = [make("Concat", ["n", "five"], ["both"], axis=0), make(op, ["both"], ["k"], keepdims=1)]
    nodes = [
        make("Shape", ["x0"], ["n"], start=1),
        make("Constant", [], ["five"], value=five),
        *(joined if op.startswith("Reduce") else [make(op, ["n", "five"], ["k"])]),
        make("Shape", ["x0"], ["b"], end=1),
        make("Concat", ["b", "k"], ["target"], axis=0),
        make("ConstantOfShape", ["target"], ["y0"]),
    ]
    assert shapes_through(nodes, ("b", "n")) == [expected]


def test_quotients_of_what_may_be_negative() -> None:
    """The length behind convolutions as a program computes it: it is theirs, as long as they leave anything."""
    make = onnx.helper.make_node
    constants = {"one": 1, "two": 2, "four": 4}
    nodes = [
        *(make("Constant", [], [n], value=onnx.numpy_helper.from_array(np.array([i]))) for n, i in constants.items()),
        make("Shape", ["x0"], ["n"], start=2),
        *(make(op, [a, b], [c]) for op, a, b, c in (
            ("Sub", "n", "four", "a"), ("Div", "a", "two", "d"), ("Add", "d", "one", "m"),
            ("Sub", "m", "two", "e"), ("Div", "e", "two", "f"), ("Add", "f", "one", "k"),
        )),
        make("ConstantOfShape", ["k"], ["y0"]),
        make("MaxPool", ["x0"], ["p"], kernel_shape=[4], strides=[2]),
        make("MaxPool", ["p"], ["y1"], kernel_shape=[2], strides=[2]),
    ]  # fmt: skip
    length, pooled = shapes_through(nodes, (1, 6, "n"), outputs=2)
    assert pooled == f"1, 6, {length}"


def test_an_axis_that_is_split_between_others() -> None:
    """What is left of a Reshape's size is found where the others are sums: x0 [b, 6, h, w] behind a stride of two."""
    make = onnx.helper.make_node
    nodes = [
        make("MaxPool", ["x0"], ["x"], kernel_shape=[1, 1], strides=[2, 2]),
        make("Shape", ["x"], ["hw"], start=2),
        make("Constant", [], ["open"], value_ints=[1, -1, 2]),
        make("Concat", ["open", "hw"], ["target"], axis=0),
        make("Reshape", ["x", "target"], ["y0"]),
    ]
    assert shapes_through(nodes, (1, 6, "h", "w")) == ["1, 3, 2, (h - 1)//2 + 1, (w - 1)//2 + 1"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("Cast", "n", 9), ("Cast", 7)], "1"),  # a size is not 0
        ([("Cast", "n", 2), ("Cast", 7)], "None"),  # in 8 bits it may be another number
        ([("Greater", "n", 0), ("Where", 7, "b")], "7"),
        ([("LessOrEqual", "n", 3), ("Where", 7, "b")], "None"),
        ([("Less", "n", 1), ("Not",), ("And", True), ("Where", "n", "b")], "n"),
        ([("GreaterOrEqual", "n", "n"), ("Or", False), ("Where", 7, "b")], "7"),
        ([("Neg", "n"), ("Add", 9), ("Mul", "b")], "-b*n + 9*b"),
        ([("Mul", "n", 4), ("Mod", 4), ("Add", "b")], "b"),
        ([("Mod", "n", 4), ("Add", 1)], "n - 4*(n//4) + 1"),
        ([("Tile", "n", [3]), ("ReduceSum",)], "3*n"),
        ([("Expand", "n", [3]), ("Slice", [0], [-1]), ("ReduceProd",)], "n*n"),
        ([("Range", 4, 7, 1), ("Add", "n"), ("ReduceMax",)], "n + 6"),
        ([("Sub", "n", 7), ("Div", -2)], "None"),  # rounded up or down, as the size is
        ([("Sub", 0, 7), ("Div", 2), ("Add", "n")], "n - 3"),
    ],
)
def test_integers_that_follow_from_sizes(steps: list[tuple[Any, ...]], expected: str) -> None:
    """The size of a tensor by steps of arithmetic on the sizes of x0 [b, n], each on the result of the one before."""
    make = onnx.helper.make_node
    nodes = [make("Shape", ["x0"], ["n"], start=1), make("Shape", ["x0"], ["b"], end=1)]
    at = ""
    for k, (op, *operands) in enumerate(steps):
        given, attributes = [at] if at else [], {}
        if op == "Cast":
            attributes["to"] = operands.pop()
        for i, x in enumerate(operands):
            name = x if isinstance(x, str) else f"c{k}_{i}"
            if not isinstance(x, str):
                value = np.array(x) if op == "Range" or isinstance(x, list) else np.array([x])
                nodes.append(make("Constant", [], [name], value=onnx.numpy_helper.from_array(value)))
            given.append(name)
        nodes.append(make(op, given, [f"s{k}"], **attributes))
        at = f"s{k}"
    nodes.append(make("ConstantOfShape", [at], ["y0"]))
    assert shapes_through(nodes, ("b", "n")) == [expected]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [(("zero", "n", "four"), "(n + 3)//4"), (("n", "zero", "back"), "(n + 1)//2"), (("zero", "n", "n"), "None")],
)
def test_numbers_at_a_distance(ends: tuple[str, ...], expected: str) -> None:
    """As many as begin before the end, upwards and downwards; at a distance that is a size they are not known."""
    make = onnx.helper.make_node
    constants = {"zero": 0, "four": 4, "back": -2, "one": 1}
    nodes = [
        *(make("Constant", [], [k], value=onnx.numpy_helper.from_array(np.array(v))) for k, v in constants.items()),
        make("Shape", ["x0"], ["shape"]),
        make("Gather", ["shape", "one"], ["n"], axis=0),
        make("Range", list(ends), ["numbers"]),
        make("Cast", ["numbers"], ["y0"], to=1),
    ]
    assert shapes_through(nodes, ("b", "n")) == [expected]


def _multiples(steps: list[tuple[str, float | None]], opset: int = 17) -> list[str]:
    """The shape of zeros whose number is the second size of x0 [b, n] after these steps of arithmetic in float32."""
    make, data, at = onnx.helper.make_node, [], "f"
    nodes = [make("Shape", ["x0"], ["shape"], start=1), make("Cast", ["shape"], ["f"], to=1)]
    for k, (op, operand) in enumerate(steps):
        if operand is not None:
            value = onnx.numpy_helper.from_array(np.float32(operand))
            nodes.append(make("Constant", [], [f"c{k}"], value=value))
            data = [f"c{k}"]
        nodes.append(make(op, [at, *(data if operand is not None else [])], [f"s{k}"]))
        at = f"s{k}"
    nodes += [
        make("Cast", [at], ["size"], to=7),
        make("ConstantOfShape", ["size"], ["y0"], value=onnx.numpy_helper.from_array(np.zeros(1, np.float32))),
    ]
    return shapes_through(nodes, ("b", "n"), opset=opset)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("Div", 32.0), ("Ceil", None), ("Mul", 32.0)], "32*((n + 31)//32)"),
        ([("Div", 14.0), ("Floor", None)], "n//14"),
        ([("Mul", 0.5), ("Floor", None)], "n//2"),
        ([("Mul", 2.0)], "2*n"),
        ([("Add", 1.0), ("Mul", 0.75)], "(3*n + 3)//4"),
        ([("Sub", 1.0), ("Div", 3.0), ("Mul", 3.0)], "None"),  # calculated with what is rounded
        ([("Mul", 1 / 14)], "None"),
        ([("Add", 1e6)], "None"),
        ([("Sqrt", None)], "None"),
    ],
)
def test_sizes_in_floating_point(steps: list[tuple[str, float | None]], expected: str) -> None:
    """Arithmetic on sizes in floats is followed where floats give what integers would."""
    assert _multiples(steps) == [expected]


def test_a_truth_value_is_no_rounded_ratio() -> None:
    """Half of a size as a bool says that it is not 0, and is not followed."""
    make = onnx.helper.make_node
    half = onnx.numpy_helper.from_array(np.float32(1 / 64))
    nodes = [
        make("Shape", ["x0"], ["shape"], start=1),
        make("Cast", ["shape"], ["f"], to=1),
        make("Constant", [], ["half"], value=half),
        make("Mul", ["f", "half"], ["part"]),
        make("Cast", ["part"], ["truth"], to=9),
        make("Cast", ["truth"], ["size"], to=7),
        make("ConstantOfShape", ["size"], ["y0"]),
    ]
    assert shapes_through(nodes, ("b", "n")) == ["None"]


def test_a_ratio_is_rounded_as_floats_are() -> None:
    """One division in float32, for all numerators that are followed and divisors of sizes."""
    numbers = np.unique(np.geomspace(1, MOST, 30_000).astype(np.int64))
    for divisor in (2, 3, 7, 14, 16, 31, 49, 640):
        quotient = numbers.astype(np.float32) / np.float32(divisor)
        np.testing.assert_array_equal(np.floor(quotient).astype(np.int64), numbers // divisor)
        np.testing.assert_array_equal(np.ceil(quotient).astype(np.int64), -(-numbers // divisor))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_shapes_of_all_operators() -> None:
    """No dimension is wrong, and none is unknown but those that are listed, with a reason or without a rule."""
    unknown = collections.Counter[str]()
    known = 0
    for name, op, graph, given, results in examples():
        shapes, sizes = shapes_of(graph, given)
        for shape, result in zip(shapes, results, strict=True):
            if not isinstance(result, np.ndarray):
                continue
            if shape is None or None in shape:
                unknown[op] += 1
                break
            at = tuple(d if isinstance(d, int) else expression(d).evaluate(sizes) for d in shape)  # type: ignore[union-attr]
            assert at == result.shape, (name, shape)
            known += 1
    assert known > 900
    more = {op: n for op, n in unknown.items() if n > UNKNOWN.get(op, 0)}
    assert not more
