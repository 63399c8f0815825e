"""Export to ONNX: what comes back has the same fingerprint, other tools accept it, files are whole."""

from __future__ import annotations

import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import pytest
from hypothesis import given

from tests.frontends.onnx_models import N, info, model, subgraph, tensor
from tests.ir.random_graphs import MATRIX, graphs, node, renamed
from tests.profiles import examples
from xrt_core import XRTModule, ops, trace
from xrt_core.errors import ExportError, ModelLoadError
from xrt_core.frontends import onnx_export
from xrt_core.frontends.onnx_export import export_function, export_model, fitting_opsets, save
from xrt_core.frontends.onnx_import import import_function, import_model
from xrt_core.ir.function import Function, InputOutputAlias, Parameter, graph_fingerprint, launch
from xrt_core.ir.graph import Graph, Node, SparseTensor, Value
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import verify

F32 = np.dtype(np.float32)
X, Y = Value("x", MATRIX), Value("y", MATRIX)


def same(graph: Graph) -> Graph:
    """The graph after export and import, which must have the same fingerprint and keep the rules."""
    back = import_model(export_model(graph))
    verify(back, "imported")
    assert graph_fingerprint(back) == graph_fingerprint(graph)
    return back


@examples(80)
@given(graphs())
def test_random_graphs_survive(graph: Graph) -> None:
    """Export and import change nothing but names, through a proto, bytes and a second round."""
    fingerprint = graph_fingerprint(graph)
    proto = export_model(graph)

    assert graph_fingerprint(import_model(proto)) == fingerprint
    assert graph_fingerprint(import_model(proto.SerializeToString())) == fingerprint
    assert graph_fingerprint(same(import_model(proto))) == fingerprint


@examples(40)
@given(graphs(mixed=False))
def test_random_graphs_of_one_opset_are_valid_onnx(graph: Graph) -> None:
    """The checker of onnx accepts the export, with every name made anew too."""
    typed = Graph(
        graph.inputs, [v if v.type else v.with_type(MATRIX) for v in graph.outputs], graph.nodes, opsets=graph.opsets
    )
    onnx.checker.check_model(export_model(typed), full_check=True)
    onnx.checker.check_model(export_model(renamed(typed, "")), full_check=True)


def test_inputs_and_outputs_keep_their_names() -> None:
    """Whatever else is called so gives way; missing names are made up."""
    inner = Value("y", MATRIX)
    nodes = [node("Neg", [X], [inner]), node("Relu", [inner], [Y]), node("Abs", [Y], [Value("")])]
    graph = Graph([X], [Y], nodes, opsets={"": 18})
    proto = export_model(graph)
    names = [n.output[0] for n in proto.graph.node]

    assert [v.name for v in proto.graph.output] == ["y"]
    assert names[1] == "y"
    assert len(set(names)) == 3
    assert all(names)


def test_nodes_of_mixed_opsets_become_functions() -> None:
    """Softmax 13 and ReduceSum 11 have no opset in common: one is called as a function that imports its own."""
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    h = Value("h", MATRIX)
    nodes = [node("ReduceSum", [X], [h], 11, axes=(1,)), node("Softmax", [h], [Y], axis=0)]
    graph = Graph([X], [Y], nodes, opsets={"": 18})
    proto = export_model(graph)

    assert fitting_opsets(graph) == {"": None}
    assert [f.domain for f in proto.functions] == ["xrt.opset"]
    assert {o.domain: o.version for o in proto.functions[0].opset_import} == {"": 11}
    back = same(graph)
    assert [n.version for n in back.nodes] == [11, 13]
    assert back.nodes[0].annotations.metadata == {}
    assert [v.name for v in back.outputs] == ["y"]
    (y,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})
    e = np.exp(x.sum(1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(), rtol=1e-5)


def test_an_opset_that_fits_every_node_is_imported() -> None:
    """Where all nodes agree on an opset, that one is imported, and no function is needed."""
    graph = Graph([X], [Y], [node("Softmax", [X], [Y], 11, axis=0)], opsets={"": 18})
    proto = export_model(graph)

    assert fitting_opsets(graph) == {"": 12}
    assert {o.domain: o.version for o in proto.opset_import} == {"": 12}
    assert not proto.functions
    same(graph)


def test_a_node_of_another_opset_may_hold_a_subgraph() -> None:
    """What its subgraph takes from outside, constants too, is passed to the function."""
    flag, h = Value("flag", TensorType(np.dtype(np.bool_), ())), Value("h", MATRIX)
    inner, c = Value("inner", MATRIX), Value.constant(np.ones((2, 3), np.float32), "c")
    then = Graph([], [inner], [node("Add", [h, c], [inner], 7)], opsets={"": 11}, name="then")
    other = Graph([], [c], [], opsets={"": 11}, name="else")
    nodes = [node("Relu", [X], [h]), node("If", [flag], [Y], 11, then_branch=then, else_branch=other)]

    back = same(Graph([X, flag], [Y], nodes, opsets={"": 18}))
    assert back.nodes[1].captures == (back.nodes[0].outputs[0],)


def test_outputs_that_no_node_of_the_graph_makes() -> None:
    """Inputs, constants, repeated outputs, and branches that return outer values keep their meaning."""
    flag, out = Value("flag", TensorType(np.dtype(np.bool_), ())), Value("out", MATRIX)
    c = Value.constant(np.ones((2, 3), np.float32), "c")
    branch = node(
        "If", [flag], [out],
        then_branch=Graph([], [X], [], opsets={"": 18}), else_branch=Graph([], [c], [], opsets={"": 18}),
    )  # fmt: skip
    graph = Graph([X, flag], [out, X, c, out], [branch], opsets={"": 18})
    back = same(graph)

    assert back.outputs[0] is back.outputs[3]
    assert back.outputs[1] is back.inputs[0]
    assert [n.op_type for n in back.nodes] == ["If"]
    proto = export_model(graph)
    onnx.checker.check_model(proto)
    assert len({v.name for v in proto.graph.output}) == 4


def test_defaults_types_documentation_and_metadata_survive() -> None:
    """Initialisers that are inputs, symbolic dimensions, docs and metadata come back."""
    w = Value("w", TensorType(F32, ("N", None, 3)))
    graph = Graph(
        [X, w], [Y], [node("Add", [X, w], [Y])],
        opsets={"": 18}, name="g", defaults={w: np.ones((1, 2, 3), np.float32)}, doc="doc", metadata={"k": "v"},
    )  # fmt: skip
    back = same(graph)

    assert back.inputs[1].type == w.type
    assert back.defaults[back.inputs[1]].shape == (1, 2, 3)
    assert (back.name, back.doc, back.metadata["k"]) == ("g", "doc", "v")


def test_declared_types_of_outputs_are_kept_for_export() -> None:
    """The importer does not believe them, but what comes out declares what went in."""
    proto = model([N("Relu", ["x"], ["y"])], outputs=[info("y", ("A", 7, None))])
    again = export_model(import_model(proto))

    assert again.graph.output[0].type == proto.graph.output[0].type
    assert not any(p.key.startswith("xrt.") for p in again.metadata_props)


ATTRIBUTES: list[tuple[Node, str]] = [
    (node("Pad", [X], [Y], 2, pads=(0, 1, 0, 1), mode="reflect", value=0.5), "ints, string, float"),
    (node("Constant", [], [Y], value_strings=("a", "b")), "strings"),
    (Node("Constant", [], [Y], {"value": np.array([1.5], ml_dtypes.bfloat16)}, version=13), "tensor"),
    (Node("Cast", [X], [Y], {"to": 1}, version=13), "int"),
    (Node("Optional", [], [Y], {"type": MATRIX}, version=15), "type"),
    (node("Squeeze", [X], [Y], 11, axes=()), "empty list"),
]


@pytest.mark.parametrize("n", [n for n, _ in ATTRIBUTES if n.op_type != "Constant"], ids=lambda n: n.op_type)
def test_attributes_survive(n: Node) -> None:
    """Every kind of attribute comes back as it was."""
    back = same(Graph([X], [Y], [n], opsets={"": 18}))

    assert dict(back.nodes[0].attributes) == dict(n.attributes)


def test_a_sparse_attribute_is_written() -> None:
    """A Constant that still is a node keeps its sparse tensor."""
    sparse = SparseTensor(np.array([5.0], np.float32), np.array([3]), (2, 2))
    n = Node("Constant", [], [Y], {"sparse_value": sparse}, version=13)
    back = import_model(export_model(Graph([], [Y], [n], opsets={"": 18})))

    assert back.outputs[0].data is not None
    assert back.outputs[0].data.tolist() == [[0, 0], [0, 5]]


@pytest.mark.parametrize(
    "data",
    [
        np.array([[-8, 7, 3]], ml_dtypes.int4), np.array([15, 0, 3], ml_dtypes.uint4),
        np.array([1.5, -2], ml_dtypes.float8_e5m2), np.array(["a", "йж"], object), np.zeros((0, 2), np.int8),
        np.arange(12.0).reshape(3, 4).T, np.float64(3)[()] * np.ones(()),
    ],
    ids=lambda a: f"{a.dtype.name}{list(a.shape)}",
)  # fmt: skip
def test_constants_survive(data: np.ndarray) -> None:
    """Sub-byte types, strings, empty, scalar and transposed arrays."""
    v = Value.constant(data, "c")
    back = same(Graph([], [Y], [Node("Identity", [v], [Y], version=21)], opsets={"": 21}))

    assert back.constants[0].data.tolist() == data.tolist()  # type: ignore[union-attr]


def test_what_onnx_cannot_express_is_refused() -> None:
    """An array of a foreign dtype, an object as an attribute, an unknown operator: errors that name them."""
    c = Value.constant(np.zeros(2, "M8[s]"), "c")
    with pytest.raises(ExportError, match=r"dtype datetime64\[s\] has no ONNX element type"):
        export_model(Graph([], [Y], [node("Identity", [c], [Y])], opsets={"": 18}))
    with pytest.raises(ExportError, match="'Relu' .*'odd' holds a object"):
        export_model(Graph([X], [Y], [node("Relu", [X], [Y], odd=object())], opsets={"": 18}))
    with pytest.raises(ExportError, match="Relo has no schema at version 14"):
        export_model(Graph([X], [Y], [Node("Relo", [X], [Y], version=14)], opsets={"": 18}))


# --- functions and clusters ---


def _update() -> Function:
    """w - x * 0.5, written into w."""
    w, x, h, y = Value("w", MATRIX), Value("x", MATRIX), Value("h", MATRIX), Value("w.new", MATRIX)
    half = Value.constant(np.array(0.5, np.float32), "half")
    body = Graph([w, x], [y], [node("Mul", [x, half], [h]), node("Sub", [w, h], [y])], opsets={"": 18})
    return Function.from_graph(body, name="update", aliases=[InputOutputAlias(0, 0)])


def test_a_function_comes_back_with_its_aliases() -> None:
    """Its export is a standalone valid model; `import_function` gives the same fingerprint."""
    f = _update()
    proto = export_function(f)
    back = import_function(proto)

    onnx.checker.check_model(proto, full_check=True)
    assert back.fingerprint == f.fingerprint
    assert (back.name, back.params, back.returns, back.aliases) == (f.name, f.params, f.returns, f.aliases)
    x = np.full((2, 3), 4, np.float32)
    (y,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"w": x, "x": x})
    np.testing.assert_array_equal(y, x - 2)


def test_a_function_comes_back_with_the_elements_that_are_known() -> None:
    """Those of a shape that is given as a value; contents that do not fit are no function."""
    x, shape, y = (Value(n, TensorType(np.dtype(t), s)) for n, t, s in _EXPANDED)
    body = Graph([x, shape], [y], [Node("Expand", [x, shape], [y], version=13)], opsets={"": 21})
    plain = Function.from_graph(body, name="f")
    params = [plain.params[0], Parameter("shape", np.dtype(np.int64), (3,), ("n", "min(n, 5)", None))]
    proto = export_function(Function("f", params, plain.returns, body))
    back = import_function(proto)
    assert back.params == tuple(params)
    assert export_function(back) == proto
    assert back.fingerprint == plain.fingerprint

    for wrong in ('{"1": [2, 3]}', '{"2": [1]}', '{"-1": [1, 2, 3]}', '{"0": [1, 1, 1]}', '{"1": [1, 2, {}]}', "[]"):
        proto.metadata_props[0].value = wrong
        with pytest.raises(ModelLoadError, match="elements"):
            import_function(proto)


_EXPANDED = [("x", "f4", ("n", 1, 1)), ("shape", "i8", (3,)), ("y", "f4", ("n", "k", 4))]


@examples(30)
@given(graphs())
def test_random_functions_survive(graph: Graph) -> None:
    """Export and import of Functions is lossless."""
    f = Function.from_graph(graph, name="f")

    assert import_function(export_function(f)).fingerprint == f.fingerprint
    assert graph_fingerprint(import_model(export_function(f))) == f.fingerprint


def test_launches_become_calls_of_local_functions() -> None:
    """A partitioned model is valid ONNX, computes the same, and importing it undoes the clustering."""
    f = _update()
    a, b, out = Value("a", MATRIX), Value("b", MATRIX), Value("out", MATRIX)
    convert = Node(
        "EngineOutputConvert", [b], [out], {"source": "xla", "target": "host"}, domain="xrt", version=1, name="convert"
    )
    graph = Graph([X], [out, Y], [
        launch(f, "xla", [X, X], [a]), launch(f, "xla", [a, X], [b]), convert, node("Relu", [b], [Y])
    ], opsets={"": 18})  # fmt: skip
    verify(graph, "folded")
    proto = export_model(graph)

    onnx.checker.check_model(proto)
    assert [(n.domain, n.op_type) for n in proto.graph.node] == [
        ("xrt.cluster", "update"), ("xrt.cluster", "update"), ("xrt", "EngineOutputConvert"), ("", "Relu")
    ]  # fmt: skip
    assert [p.value for p in proto.graph.node[0].metadata_props] == ["xla"]
    x = np.full((2, 3), 4, np.float32)
    out_, y = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_array_equal(out_, np.zeros_like(x))
    np.testing.assert_array_equal(y, np.zeros_like(x))

    back = import_model(proto)
    verify(back, "imported")
    assert [n.op_type for n in back.nodes] == ["Mul", "Sub", "Mul", "Sub", "Identity", "Relu"]


def test_a_cluster_may_return_params_constants_and_one_value_twice() -> None:
    """Each return of the local function is made by a node of its own; the model stays valid."""
    p, r = Value("p", MATRIX), Value("r", MATRIX)
    c = Value.constant(np.ones((2, 3), np.float32), "c")
    f = Function.from_graph(Graph([p], [r, r, p, c], [node("Relu", [p], [r])], opsets={"": 18}), name="f")
    outs = [Value(f"o{i}", MATRIX) for i in range(4)]
    proto = export_model(Graph([X], outs, [launch(f, "xla", [X], outs)], opsets={"": 18}))

    onnx.checker.check_model(proto)
    x = np.full((2, 3), -4, np.float32)
    got = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})
    for y, expected in zip(got, [0 * x, 0 * x, x, np.ones_like(x)], strict=True):
        np.testing.assert_array_equal(y, expected)


def test_clusters_of_one_name_are_told_apart() -> None:
    """Two functions of a name become two local functions."""
    one, two = _update(), Function.from_graph(
        Graph([X, Value("z", MATRIX)], [Y], [node("Relu", [X], [Y])], opsets={"": 18}), name="update"
    )  # fmt: skip
    a, b = Value("a", MATRIX), Value("b", MATRIX)
    x = Value("in", MATRIX)
    proto = export_model(
        Graph([x], [b], [launch(one, "xla", [x, x], [a]), launch(two, "toy", [a, x], [b])], opsets={"": 18})
    )

    assert {f.name for f in proto.functions} == {"update", "update_2"}
    onnx.checker.check_model(proto)


# --- files ---


def _heavy() -> Graph:
    w = Value.constant(np.arange(6000, dtype=np.float32).reshape(1000, 2, 3), "w")
    i = Value.constant(np.arange(-8, 8).astype(ml_dtypes.int4).repeat(1000), "i")
    small = Value.constant(np.array(2, np.float32), "small")
    h, k = Value("h"), Value("k", i.type)
    nodes: list[Any] = [node("Mul", [X, w], [h]), node("Mul", [h, small], [Y]), Node("Identity", [i], [k], version=21)]
    return Graph([X], [Y, k], nodes, opsets={"": 21}, name="heavy").replace(nodes=[
        Node(n.op_type, n.inputs, n.outputs, version=n.version) for n in nodes
    ])  # fmt: skip


@pytest.mark.parametrize("external", [True, False, None])
def test_saved_files_come_back(external: bool | None, tmp_path: pathlib.Path) -> None:
    """With external data or without; large tensors are aligned in the data file, small ones stay in the model."""
    graph = _heavy()
    path = tmp_path / "m.onnx"
    save(graph, path, external_data=external)
    back = import_model(path)

    assert graph_fingerprint(back) == graph_fingerprint(graph)
    data = tmp_path / "m.onnx.data"
    assert data.exists() == bool(external)
    if external:
        assert path.stat().st_size < 3000
        assert all(v.data.flags.aligned for v in back.constants if v.data is not None)
        offsets = [
            int(e.value) for t in onnx.load(path, load_external_data=False).graph.initializer
            for e in t.external_data if e.key == "offset"
        ]  # fmt: skip
        assert offsets
        assert all(o % 64 == 0 for o in offsets)
        onnx.checker.check_model(str(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"][: 1 + bool(external)]


def test_large_models_go_to_external_data(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, external data is chosen without being asked for."""
    monkeypatch.setattr(onnx_export, "AUTOMATIC", 10_000)
    save(_heavy(), tmp_path / "m.onnx")

    assert (tmp_path / "m.onnx.data").exists()


def test_a_model_may_be_saved_over_the_file_it_is_mapped_from(tmp_path: pathlib.Path) -> None:
    """The file is replaced in one step; arrays over the old one keep their contents."""
    path = tmp_path / "m.onnx"
    save(_heavy(), path, external_data=True)
    graph = import_model(path)
    fingerprint = graph_fingerprint(graph)
    save(graph, path, external_data=True)
    save(graph, path)

    assert graph_fingerprint(import_model(path)) == fingerprint


def test_a_failed_save_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    """Where the export fails, what was there stays and no temporary file is left."""
    path = tmp_path / "m.onnx"
    path.write_text("before")
    c = Value.constant(np.zeros(2, "M8[s]"), "c")
    with pytest.raises(ExportError):
        save(Graph([], [Y], [node("Identity", [c], [Y])], opsets={"": 18}), path, external_data=True)
    with pytest.raises(ExportError, match="cannot be written"):
        save(_heavy(), tmp_path / "none" / "m.onnx")

    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_text() == "before"


def test_a_saved_function_comes_back(tmp_path: pathlib.Path) -> None:
    """`save` takes Functions too."""
    save(_update(), tmp_path / "f.onnx")

    assert import_function(tmp_path / "f.onnx").fingerprint == _update().fingerprint


def test_an_imported_model_with_branches_round_trips() -> None:
    """A branch that returns a constant made inside it stays valid ONNX."""
    body = subgraph([N("Constant", [], ["k"], value=tensor("", np.ones((2, 3), np.float32)))], ["k"])
    proto = model(
        [N("If", ["flag"], ["y"], then_branch=body, else_branch=body)], [info("flag", (), onnx.TensorProto.BOOL)]
    )
    onnx.checker.check_model(proto)
    again = export_model(same(import_model(proto)))

    onnx.checker.check_model(again)


def test_a_body_that_hands_its_state_on() -> None:
    """An output of a body that is an input of it has a node of its own: ONNX Runtime's Scan gives other values."""
    ort = pytest.importorskip("onnxruntime")
    start, rows = np.ones(3, np.float32), np.random.default_rng(0).random((4, 3)).astype(np.float32)

    def body(state: Any, row: Any) -> Any:
        return ops.Tanh(state * row), state

    graph = trace(lambda s, x: ops.Scan(s, x, body=body, num_scan_inputs=1), start, rows)
    wanted = XRTModule(graph, engine="host")(start, rows)
    model = export_model(graph)
    found = ort.InferenceSession(model.SerializeToString()).run(None, dict(zip("sx", (start, rows), strict=True)))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    (node,) = import_model(model).nodes
    assert [n.op_type for n in node.subgraphs[0].nodes] == ["Mul", "Tanh"]
