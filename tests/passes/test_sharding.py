"""Sharding rules: what they say of an operator is tried on two devices, with NumPy for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from xrt_core.errors import GraphError, OptionError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.schema import find_schema, latest_opset
from xrt_core.ir.sharding import B, Mesh, P, S, Sbp, parse_sbp, sbp_text, sharding_text
from xrt_core.ir.types import TensorType
from xrt_core.passes.sharding import automatic, shard_graph, without_boxing
from xrt_core.passes.sharding.rules import ways

RNG = np.random.default_rng(0)


def made(op_type: str, *arrays: np.ndarray, outputs: int = 1, **attributes: Any) -> Node:
    """A node over constants, with the types of its results."""
    schema = find_schema(op_type, "", latest_opset(""))
    assert schema is not None
    inputs = [Value.constant(a, f"in_{i}") for i, a in enumerate(arrays)]
    results = [Value(f"out_{i}") for i in range(outputs)]
    node = Node(op_type, inputs, results, attributes, version=schema.since_version, name=op_type)
    types = infer_types(node)
    return node.replace(outputs=[Value(v.name, t) for v, t in zip(results, types, strict=True)])


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


CASES = [
    (made("Add", floats(4, 6), floats(6)), 1.0),
    (made("Relu", floats(4, 6)), 1.0),
    (made("Where", floats(4, 1) > 0, floats(4, 6), floats(4, 6)), 1.0),
    (made("MatMul", floats(4, 6), floats(6, 8)), 1.0),
    (made("MatMul", floats(2, 4, 6), floats(6, 8)), 1.0),
    (made("MatMul", floats(2, 4, 6), floats(2, 6, 8)), 1.0),
    (made("Gemm", floats(4, 6), floats(6, 8), floats(8)), 1.0),
    (made("Gemm", floats(6, 4), floats(8, 6), transA=1, transB=1), 1.0),
    (made("Conv", floats(2, 4, 6, 6), floats(8, 4, 3, 3), floats(8), kernel_shape=(3, 3)), 1.0),
    (made("Conv", floats(2, 4, 6, 6), floats(8, 4, 3, 3), kernel_shape=(3, 3)), 1.0),
    (made("ReduceSum", floats(4, 6), np.array([1]), keepdims=0), 1.0),
    (made("ReduceMean", floats(4, 6, 2), np.array([0, 2])), 0.5),  # each device has the mean of its half
    (made("ReduceMax", floats(4, 6), np.array([0])), 1.0),
    (made("Softmax", floats(4, 6, 8), axis=-1), 1.0),
    (made("LayerNormalization", floats(4, 2, 6), floats(6), floats(6), axis=-1), 1.0),
    (made("Transpose", floats(2, 4, 6), perm=(2, 0, 1)), 1.0),
    (made("Gather", floats(6, 4), np.arange(4).reshape(2, 2), axis=0), 1.0),
    (made("Gather", floats(6, 4, 2), np.arange(4), axis=1), 1.0),
    (made("GatherND", floats(2, 6, 4), np.arange(4).reshape(2, 2, 1), batch_dims=1), 1.0),
    (made("GatherElements", floats(4, 8), np.arange(8).reshape(4, 2), axis=1), 1.0),
    (made("ScatterElements", floats(4, 6), np.arange(4).reshape(4, 1), floats(4, 1), axis=1, reduction="add"), 1.0),
    (made("Attention", floats(2, 4, 3, 8), floats(2, 2, 3, 8), floats(2, 2, 3, 8)), 1.0),
    (made("Attention", *[floats(2, 4, 3, 8)] * 3, floats(2, 1, 3, 3)), 1.0),
    (made("Attention", *[floats(2, 4, 3, 8)] * 3, floats(4, 3, 3)), 1.0),
    (made("Attention", *[floats(2, 3, 32)] * 3, q_num_heads=4, kv_num_heads=4), 1.0),
    (made("Concat", floats(4, 2), floats(4, 6), axis=1), 1.0),
    (made("MaxPool", floats(2, 4, 6, 6), kernel_shape=(2, 2)), 1.0),
    (made("SoftmaxCrossEntropyLoss", floats(4, 6), np.arange(4), reduction="mean"), 0.5),
    (made("SoftmaxCrossEntropyLoss", floats(4, 6), np.arange(4), reduction="none"), 1.0),
    (made("Softmax", floats(4, 6, 8), axis=1), 1.0),
    (made("Hardmax", floats(4, 6, 8), axis=0), 1.0),
    (made("LpNormalization", floats(4, 6), axis=1), 1.0),
    (made("ArgMax", floats(4, 6, 8), axis=1, keepdims=0), 1.0),
    (made("ArgMin", floats(4, 6, 8), axis=0, keepdims=1), 1.0),
    (made("CumSum", floats(4, 6), np.array(0)), 1.0),
    (made("Slice", floats(4, 6, 8), *map(np.array, ([-1, 1, 0], [-9, 5, 8], [0, 1, 2], [-1, 1, 1]))), 1.0),
    (made("Pad", floats(4, 6, 8), np.array([1, 0, -1, 0]), np.float32(0), np.array([0, 2])), 1.0),
    (made("Split", floats(4, 6), np.array([2, 4]), axis=1, outputs=2), 1.0),
    (made("Einsum", floats(2, 4, 6), floats(2, 6, 8), equation="bij,bjk->bik"), 1.0),
    (made("Einsum", floats(4, 6), floats(6), equation="ij,j->ij"), 1.0),
    (made("Einsum", floats(2, 4, 6), floats(6, 8), equation="...ij, jk"), 1.0),
    (made("Einsum", floats(4, 6), floats(1, 6), equation="ij,ij->j"), 1.0),
    (made("BatchNormalization", floats(2, 4, 6), *[np.abs(floats(4)) for _ in range(4)]), 1.0),
    (made("InstanceNormalization", floats(2, 4, 6), floats(4), floats(4)), 1.0),
    (made("GroupNormalization", floats(2, 4, 6), floats(4), floats(4), num_groups=2), 1.0),
    (made("LRN", floats(2, 4, 6, 6), size=3), 1.0),
    (made("ConvTranspose", floats(2, 4, 6), floats(4, 2, 3)), 1.0),
    (made("DepthToSpace", floats(2, 8, 3, 3), blocksize=2), 1.0),
    (made("SpaceToDepth", floats(2, 2, 4, 4), blocksize=2), 1.0),
    (made("LSTM", floats(3, 4, 5), floats(1, 24, 5), floats(1, 24, 6), floats(1, 48), np.array([1, 2, 3, 2], np.int32),
          floats(1, 4, 6), floats(1, 4, 6), hidden_size=6, outputs=3), 1.0),
    (made("GRU", floats(3, 4, 5), floats(1, 18, 5), floats(1, 18, 6), hidden_size=6, outputs=2), 1.0),
]


def parts(array: np.ndarray, sbp: Sbp) -> list[np.ndarray]:
    """What each of two devices holds."""
    return [array, array] if sbp.axis is None else np.split(array, 2, axis=sbp.axis)


def whole(results: Sequence[np.ndarray], sbp: Sbp) -> np.ndarray:
    """The tensor that two devices hold so."""
    if sbp.axis is not None:
        return np.concatenate(results, axis=sbp.axis)
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    return combine[sbp.reduce](*results) if sbp.reduce else results[0]


@pytest.mark.parametrize(("node", "scale"), CASES, ids=lambda c: c.op_type if isinstance(c, Node) else "")
def test_rules_hold_on_two_devices(node: Node, scale: float) -> None:
    """In each way that a rule gives, devices with their parts compute what one computes with the whole."""
    arrays = [v.data for v in node.inputs if v is not None and v.data is not None]
    wanted = list(map(np.asarray, run_node(node, arrays)))
    found, why = ways(node)
    assert not why
    tried = 0
    for way in found[:-1]:
        sizes = [a.shape[s.axis] for a, s in zip(arrays, way.inputs, strict=True) if s.axis is not None]
        if any(n % 2 for n in sizes) or (node.op_type == "Gather" and way.outputs[0].reduce):
            continue
        own = {n: v // 2 if way.units and n.endswith("num_heads") else v for n, v in node.attributes.items()}
        held = zip(*(parts(a, s) for a, s in zip(arrays, way.inputs, strict=True)), strict=True)
        results = [run_node(made(node.op_type, *a, outputs=len(wanted), **own), list(a)) for a in held]
        for k, (want, sbp) in enumerate(zip(wanted, way.outputs, strict=True)):
            factor = scale if sbp.reduce == "sum" else 1.0
            got = whole([np.asarray(r[k]) for r in results], sbp)
            np.testing.assert_allclose(got * factor, want, rtol=1e-4, atol=1e-5, err_msg=f"{k}: {way}")
        tried += 1
    assert tried


def test_rows_of_a_table_on_two_devices() -> None:
    """A device gives zeros for rows that lie elsewhere, so that the sum is the row; strings have no sum."""
    table, rows = floats(6, 4), np.array([[0, 5], [3, 2]])
    (way,) = (w for w in ways(made("Gather", table, rows))[0] if w.outputs[0].reduce)
    assert (way.inputs, str(way.outputs[0])) == ((S(0), B), "P(sum)")
    held = [np.where((rows // 3 == d)[..., None], table[rows], 0) for d in range(2)]
    np.testing.assert_array_equal(whole(held, way.outputs[0]), table[rows])
    texts = made("Gather", np.array(["a", "b"], dtype=object), np.array([1, 0]))
    assert not [w for w in ways(texts)[0] if w.outputs[0].reduce]


def test_scattered_updates_on_two_devices() -> None:
    """A device has a part of each slice, or the rows that lie on it, or a partial sum of its updates of zeros."""
    rows, updates = np.array([[0], [5], [3], [0]]), floats(4, 4)
    node = made("ScatterND", np.zeros((6, 4), np.float32), rows, updates, reduction="add")
    want = np.zeros((6, 4), np.float32)
    np.add.at(want, rows[:, 0], updates)
    slices, by_row, sums = ways(node, zeros={node.inputs[0]})[0][:-1]
    assert (slices.inputs, slices.outputs) == ((S(1), B, S(1)), (S(1),))
    assert (by_row.inputs, by_row.outputs) == ((S(0), B, B), (S(0),))
    assert (sums.inputs, sums.outputs) == ((B, S(0), S(0)), (P("sum"),))
    added = [np.zeros((6, 4), np.float32) for _ in range(2)]
    for held, i, u in zip(added, np.split(rows, 2), np.split(updates, 2), strict=True):
        np.add.at(held, i[:, 0], u)
    np.testing.assert_allclose(whole(added, sums.outputs[0]), want, rtol=1e-6)
    assert len(ways(node)[0]) == 3  # not where the data may be other than zero: they would count twice
    once = made("ScatterND", np.zeros((6, 4), np.float32), rows, updates)
    assert len(ways(once, zeros={once.inputs[0]})[0]) == 3


def test_a_gradient_lies_as_its_variable_in_the_end() -> None:
    """A product whose result updates a variable that is whole is reduced at once, not kept in parts up to the update;
    of a gradient that two nodes read, one conversion is made."""
    f32 = np.dtype(np.float32)
    x, g = Value("x", TensorType(f32, (64, 8))), Value("g", TensorType(f32, (64, 512)))
    w, m = (Value(n, TensorType(f32, (8, 512))) for n in "wm")
    grad, moment, square, new = (Value(n, w.type) for n in ("grad", "moment", "square", "w.new"))
    rows = Value("rows", TensorType(f32, (8, 64)))
    nodes = [
        Node("Transpose", [x], [rows], {"perm": (1, 0)}, version=13, name="rows"),
        Node("MatMul", [rows, g], [grad], version=13, name="product"),
        Node("Add", [m, grad], [moment], version=14, name="moment"),
        Node("Mul", [grad, grad], [square], version=14, name="square"),
        Node("Sub", [w, square], [new], version=14, name="step"),
    ]
    made_w, made_m = (Value(n, w.type) for n in ("w.assigned", "m.assigned"))
    assign = {"domain": "xrt", "version": 1}
    nodes += [
        Node("Assign", [w, new], [made_w], **assign, name="keep w"),  # type: ignore[arg-type]
        Node("Assign", [m, moment], [made_m], **assign, name="keep m"),  # type: ignore[arg-type]
    ]
    graph = Graph([x, g, w, m], [made_w, made_m], nodes, opsets={"": latest_opset(""), "xrt": 1})
    _, report = shard_graph(graph, Mesh({"data": 4}), {"x": "data:S(0)", "g": "data:S(0)"})
    assert [str(c).partition(",")[0] for c in report.collectives if c.kind != "slice"] == [
        "all-reduce of grad: data:P(sum) -> B"
    ]


def test_heads_are_not_taken_apart() -> None:
    """Heads that lie together along an axis are split where the mesh divides their number."""
    node = made("Attention", *[floats(2, 3, 48)] * 3, q_num_heads=6, kv_num_heads=6)
    inputs = [Value(v.name, v.type) for v in node.inputs if v is not None]
    (out,) = (v for v in node.outputs if v is not None)
    graph = Graph(inputs, [out], [node.replace(inputs=inputs)], opsets={"": latest_opset("")})
    for size, splits in ((2, True), (4, False)):
        _, report = shard_graph(graph, Mesh({"m": size}), {v.name: "m:S(2)" for v in graph.inputs})
        assert (report.tensors.get("out_0") == "m:S(2)") is splits


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        ((4, 6), (24,), [(0, 0)]),
        ((24,), (4, 6), [(0, 0)]),
        ((2, 4, 6), (2, 24), [(0, 0), (1, 1)]),
        ((8, 16), (8, 4, 4), [(0, 0), (1, 1)]),
        ((4, 6), (6, 4), [(0, 0)]),
    ],
)
def test_reshapes_keep_the_split(before: tuple[int, ...], after: tuple[int, ...], pairs: list[tuple[int, int]]) -> None:
    """A split stays where the parts of the input are, reshaped, the parts of the result."""
    node = made("Reshape", floats(*before), np.array(after))
    found = [(w.inputs[0].axis, w.outputs[0].axis) for w in ways(node)[0][:-1]]
    assert found == pairs
    x = np.arange(np.prod(before)).reshape(before)
    for i, j in pairs:
        for a, b in zip(np.split(x, 2, i), np.split(x.reshape(after), 2, j), strict=True):
            np.testing.assert_array_equal(np.ravel(a), np.ravel(b))


def graph_of(op_type: str = "Relu") -> Graph:
    x = Value("x", made("Relu", floats(8, 4)).outputs[0].type)  # type: ignore[union-attr]
    y = Value("y", x.type)
    return Graph([x], [y], [Node(op_type, [x], [y], version=14, name="only")], opsets={"": 20})


def test_nothing_is_converted_where_nothing_is_asked() -> None:
    """Without annotations the graph has no conversion; with one it has it, and taking it out gives the same nodes."""
    graph, mesh = graph_of(), Mesh({"data": 4})
    same, report = shard_graph(graph, mesh, {})
    assert [n.op_type for n in same.nodes] == ["Relu"]
    assert not report.collectives
    split, report = shard_graph(graph, mesh, {"x": "data:S(0)"})
    assert [n.op_type for n in split.nodes] == ["Boxing", "Relu"]
    assert report.tensors == {"x": "data:S(0)", "y": "data:S(0)"}
    assert [n.op_type for n in without_boxing(split).nodes] == ["Relu"]


def test_an_operator_without_a_rule_is_whole_on_each_device() -> None:
    """Its input is gathered, and the report has the reason."""
    _, report = shard_graph(graph_of("Trilu"), Mesh({"data": 4}), {"x": "data:S(0)"})
    assert [c.kind for c in report.collectives] == ["slice", "all-gather"]
    assert report.collectives[1].bytes == 8 * 4 * 4 * 3 // 4
    assert report.replicated == {"only": "no rule splits Trilu"}


def test_texts() -> None:
    """An SBP is read and written as text; what is none, or asks for partial results, is an error that says why."""
    mesh = Mesh({"data": 4, "model": 2})
    assert parse_sbp("model:S(1), data:S(0)", mesh) == (S(0), S(1))
    assert parse_sbp("data:P(max)", mesh) == (P("max"), B)
    assert sbp_text((B, B), mesh) == "B"
    assert str(Mesh.parse("data=4,model=2")) == str(mesh)
    for text, match in (
        ("data:T(0)", "is none of"),
        ("rows:S(0)", "no axis 'rows'"),
        ("data:B,data:S(0)", "two things"),
    ):
        with pytest.raises(OptionError, match=match):
            parse_sbp(text, mesh)
    with pytest.raises(OptionError, match="not what one asks for"):
        shard_graph(graph_of(), mesh, {"x": "data:P"})
    with pytest.raises(GraphError, match=r"splits axis 1 of 'x', of size 4, over 8 devices"):
        shard_graph(graph_of(), mesh, {"x": "data:S(1),model:S(1)"})
    for axis in (-1, 1.5, "0", True):
        with pytest.raises(OptionError, match="counts from the front"):
            S(axis)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"Mesh\('data=4'\): it takes axes with their sizes"):
        Mesh("data=4")  # type: ignore[arg-type]
    assert sharding_text({"data": S(0), "model": B}) == "data:S(0),model:B"
    assert sharding_text({}) == "B"
    with pytest.raises(OptionError, match=r"give text such as 'data:S\(0\)', or a mapping"):
        sharding_text((S(0), B))  # type: ignore[arg-type]


def test_patterns_that_contradict_each_other() -> None:
    """The first that matches decides; one that never does is an error that names both."""
    mesh = Mesh({"data": 4})
    _, report = shard_graph(graph_of(), mesh, {"x": "data:S(0)", "*": "B"})  # the second decides of y
    assert report.tensors["x"] == "data:S(0)"
    with pytest.raises(OptionError, match=r"'x\*': 'data:S\(1\)' decides nothing, .*'x'\) lies by 'x': 'data:S\(0\)'"):
        shard_graph(graph_of(), mesh, {"x": "data:S(0)", "x*": "data:S(1)"})


def two_layers(rows: int, wide: int) -> Graph:
    """Two products with a Relu between; the weights have no numbers that matter."""
    x, h, r, y = (Value(n, TensorType(np.dtype(np.float32), (rows, wide))) for n in "xhry")
    zero = np.broadcast_to(np.float32(0), (wide, wide))
    up, down = (Value.constant(zero, n) for n in ("layer0.up", "layer0.down"))
    nodes = [
        Node("MatMul", [x, up], [h], version=13, name="first"),
        Node("Relu", [h], [r], version=14, name="relu"),
        Node("MatMul", [r, down], [y], version=13, name="second"),
    ]
    return Graph([x], [y], nodes, opsets={"": latest_opset("")})


@pytest.mark.parametrize(
    ("rows", "wide", "mesh", "expected"),
    [
        (8, 2048, {"model": 4}, {"layer0.up": "model:S(1)", "layer0.down": "model:S(1)"}),  # weights are the most
        (65536, 64, {"model": 4}, {"x": "model:S(0)"}),  # the batch is
        (3, 16, {"model": 4}, {"x": "B"}),  # four devices do not divide it, and nothing is worth splitting
        (4096, 2048, {"data": 2, "model": 2}, {"x": "data:S(0),model:S(0)"}),
    ],
)
def test_automatic(rows: int, wide: int, mesh: dict[str, int], expected: dict[str, str]) -> None:
    """Large weights are split, with one collective between, large batches by their rows."""
    graph = two_layers(rows, wide)
    found = automatic(graph, Mesh(mesh))
    assert found == expected
    _, report = shard_graph(graph, Mesh(mesh), found)
    assert len([c for c in report.collectives if c.kind != "slice"]) == ("layer0.up" in expected)
