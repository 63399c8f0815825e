"""Import of ONNX models: values, constants, types, order, subgraphs, sources."""

from __future__ import annotations

import sys
import types
from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.frontends.onnx_models import ATTR, N, info, model, subgraph, tensor
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.function import graph_fingerprint
from xrt_core.ir.types import SequenceType, TensorType
from xrt_core.ir.verifier import verify

F32 = np.dtype(np.float32)


def test_a_small_model() -> None:
    """Inputs, nodes, versions, constants and outputs arrive under their names."""
    w = np.ones((3, 3), np.float32)
    graph = import_model(
        model(
            [N("MatMul", ["x", "w"], ["h"], name="mm"), N("Softmax", ["h"], ["y"], axis=1)],
            initializer=[tensor("w", w)],
        )
    )

    verify(graph, "captured")
    assert [v.name for v in graph.inputs] == ["x"]
    assert [v.name for v in graph.outputs] == ["y"]
    assert [(n.op_type, n.version, n.name) for n in graph.nodes] == [("MatMul", 13, "mm"), ("Softmax", 13, "")]
    assert graph.nodes[1].attributes == {"axis": 1}
    assert graph.opsets == {"": 18}
    assert [v.name for v in graph.constants] == ["w"]
    np.testing.assert_array_equal(graph.constants[0].data, w)


def test_versions_follow_the_opset() -> None:
    """The same node of an older model is of an older version."""
    assert import_model(model([N("Softmax", ["x"], ["y"])], opset=11)).nodes[0].version == 11


def test_dimensions_symbolic_negative_and_missing() -> None:
    """A symbol stays one; -1 and nothing are unknown; a missing shape is an unknown rank."""
    inputs = [info("x", ("N", -1, None, 3)), info("z", None)]
    graph = import_model(model([N("Add", ["x", "z"], ["y"])], inputs))

    assert graph.inputs[0].type == TensorType(F32, ("N", None, None, 3))
    assert graph.inputs[1].type == TensorType(F32, None)


def test_declared_shapes_of_results_are_not_believed() -> None:
    """Files declare wrong shapes for results: only the element type is kept."""
    graph = import_model(
        model(
            [N("Relu", ["x"], ["h"]), N("Relu", ["h"], ["y"])],
            outputs=[info("y", (9, 9))],
            value_info=[info("h", (7,))],
        )
    )

    assert graph.nodes[0].outputs[0].type == TensorType(F32)  # type: ignore[union-attr]
    assert graph.outputs[0].type == TensorType(F32)


def test_a_declared_sequence_keeps_its_element_type() -> None:
    """Container types of results keep what holds of their elements."""
    out = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, (2, 3))
    graph = import_model(model([N("SequenceConstruct", ["x"], ["y"])], outputs=[out]))

    assert graph.outputs[0].type == SequenceType(TensorType(F32))


def test_any_name_goes() -> None:
    """Names with ':', '/', spaces and other scripts are names."""
    names = ["in:0", "a/b/c", "with space", "имя"]
    nodes = [N("Relu", [a], [b], name=b) for a, b in pairwise(names)]
    graph = import_model(model(nodes, ["in:0"], ["имя"]))

    assert [v.name for v in graph.inputs + graph.outputs] == ["in:0", "имя"]


def test_initialisers_that_are_inputs_are_defaults() -> None:
    """The caller may replace them, so they are inputs with a default, not constants."""
    w = np.full((2, 3), 2, np.float32)
    graph = import_model(model([N("Add", ["x", "w"], ["y"])], ["x", "w"], initializer=[tensor("w", w)]))

    assert [v.name for v in graph.inputs] == ["x", "w"]
    assert graph.inputs[1].data is None
    np.testing.assert_array_equal(graph.defaults[graph.inputs[1]], w)


def test_inputs_and_constants_may_be_outputs() -> None:
    """What goes straight through is the same value at both ends."""
    graph = import_model(model([], ["x"], ["x", "w", "x"], initializer=[tensor("w", np.zeros((2, 3), np.float32))]))

    assert graph.outputs[0] is graph.inputs[0] is graph.outputs[2]
    assert graph.outputs[1].is_constant


def test_left_out_inputs_and_outputs() -> None:
    """An empty name is None; trailing left-out inputs are dropped, left-out outputs kept (Split counts them)."""
    nodes = [N("Clip", ["x", "", ""], ["a"]), N("Clip", ["a", "", "m"], ["b"]), N("Dropout", ["b"], ["y", ""])]
    graph = import_model(model(nodes, initializer=[tensor("m", np.float32(1))]))

    assert len(graph.nodes[0].inputs) == 1
    assert [v is None for v in graph.nodes[1].inputs] == [False, True, False]
    assert graph.nodes[2].outputs[1] is None
    assert len(graph.nodes[2].outputs) == 2


def _sparse(values: list[float], indices: np.ndarray, dims: list[int], name: str = "s") -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(tensor(name, np.array(values, np.float32)), tensor("i", indices), dims)


FORMS = {
    "value": (ATTR("value", tensor("", np.arange(3))), np.arange(3)),
    "value_int": (ATTR("value_int", 7), np.array(7)),
    "value_ints": (ATTR("value_ints", [1, 2]), np.array([1, 2])),
    "value_float": (ATTR("value_float", 0.5), np.array(0.5, np.float32)),
    "value_floats": (ATTR("value_floats", [0.5, 2.0]), np.array([0.5, 2], np.float32)),
    "value_string": (ATTR("value_string", "ab"), np.array("ab", object)),
    "value_strings": (ATTR("value_strings", ["a", "b"]), np.array(["a", "b"], object)),
    "sparse_value": (
        ATTR("sparse_value", _sparse([5, 6], np.array([1, 3]), [2, 2])), np.array([[0, 5], [0, 6]], np.float32)
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_constant(form: str) -> None:
    """Constant nodes become constant values, whatever attribute holds the data."""
    attribute, expected = FORMS[form]
    n = N("Constant", [], ["c"])
    n.attribute.append(attribute)
    graph = import_model(model([n, N("Identity", ["c"], ["y"])], [], [info("y", None)]))

    assert [m.op_type for m in graph.nodes] == ["Identity"]
    value = graph.nodes[0].inputs[0]
    assert value is not None
    assert value.data is not None
    assert value.name == "c"
    assert value.data.dtype == expected.dtype
    assert value.data.shape == expected.shape
    assert value.data.tolist() == expected.tolist()


@pytest.mark.parametrize("indices", [np.array([1, 3]), np.array([[0, 1], [1, 1]])])
def test_sparse_initialisers_become_dense(indices: np.ndarray) -> None:
    """Indices may be linear or by coordinate."""
    proto = model([N("Add", ["s", "s"], ["y"])], [], [info("y", None)])
    proto.graph.sparse_initializer.append(_sparse([5, 6], indices, [2, 2]))
    constant = import_model(proto).constants[0]

    assert constant.data is not None
    assert constant.data.tolist() == [[0, 5], [0, 6]]


@pytest.mark.parametrize(
    "array",
    [
        np.array([[-8, 7], [1, 0]], ml_dtypes.int4),
        np.array([15, 0, 3], ml_dtypes.uint4),
        np.array([1.5, -2, 0.1], ml_dtypes.bfloat16),
        np.array([0.5, 4], ml_dtypes.float8_e4m3fn),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array(["x", "йж", ""], object),
        np.zeros((0, 3), np.float32),
    ],
    ids=lambda a: a.dtype.name,
)
def test_element_types(array: np.ndarray) -> None:
    """Initialisers of all kinds of element types come as the arrays they were."""
    proto = model([N("Identity", ["w"], ["y"])], [], [info("y", None)], opset=21, initializer=[tensor("w", array)])
    for source in (proto, proto.SerializeToString()):
        found = import_model(source).constants[0].data
        assert found is not None
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tolist() == array.tolist()


def test_nodes_out_of_order_are_sorted() -> None:
    """ONNX asks for order, files do not always keep it; a subgraph's use of an outer value counts."""
    body = subgraph([N("Relu", ["b"], ["r"])], ["r"])
    nodes = [
        N("If", ["flag"], ["y"], then_branch=body, else_branch=body),
        N("Neg", ["a"], ["b"]),
        N("Relu", ["x"], ["a"]),
    ]
    graph = import_model(model(nodes, ["x", info("flag", (), TensorProto.BOOL)]))

    verify(graph, "captured")
    assert [n.op_type for n in graph.nodes] == ["Relu", "Neg", "If"]


def test_subgraphs_use_the_outer_values_themselves() -> None:
    """An outer name resolves to the very value, however deep, constants too."""
    deep = subgraph([N("Add", ["h", "w"], ["d"])], ["d"])
    inner = N("If", ["flag"], ["i"], then_branch=deep, else_branch=deep)
    body = subgraph([inner], ["i"])
    nodes = [N("Relu", ["x"], ["h"]), N("If", ["flag"], ["y"], then_branch=body, else_branch=body)]
    flag = info("flag", (), TensorProto.BOOL)
    graph = import_model(model(nodes, ["x", flag], initializer=[tensor("w", np.float32(3))]))
    then = graph.nodes[1].attributes["then_branch"].nodes[0].attributes["else_branch"]  # type: ignore[union-attr]

    verify(graph, "captured")
    assert then.nodes[0].inputs[0] is graph.nodes[0].outputs[0]  # type: ignore[union-attr]
    assert then.nodes[0].inputs[1].data is not None  # type: ignore[union-attr]
    assert graph.nodes[1].captures == (graph.inputs[1], graph.nodes[0].outputs[0])


def test_documentation_and_metadata_are_kept() -> None:
    """Doc strings and metadata of model, graph and nodes travel in the annotations."""
    n = N("Relu", ["x"], ["y"], doc_string="why")
    n.metadata_props.add(key="k", value="v")
    proto = model([n])
    proto.metadata_props.add(key="author", value="me")
    graph = import_model(proto)

    assert graph.nodes[0].annotations.doc == "why"
    assert graph.nodes[0].annotations.metadata == {"k": "v"}
    assert graph.metadata["author"] == "me"


def test_an_older_opset_is_taken_where_nothing_changed() -> None:
    """Relu of opset 6 is that of opset 7; Add of opset 6 is not."""
    assert import_model(model([N("Relu", ["x"], ["y"])], opset=6)).nodes[0].version == 6


def test_deprecated_operators_are_read() -> None:
    """Scatter was deprecated in opset 11 and still occurs."""
    inputs = ["x", info("i", (1, 3), TensorProto.INT64), info("u", (1, 3))]

    assert import_model(model([N("Scatter", ["x", "i", "u"], ["y"])], inputs, opset=11)).nodes[0].op_type == "Scatter"


def test_sources_agree(tmp_path: object) -> None:
    """A path, bytes and the ModelProto give the same graph."""
    proto = model([N("Add", ["x", "w"], ["y"])], initializer=[tensor("w", np.ones((1000, 2, 3), np.float32))])
    path = tmp_path / "m.onnx"  # type: ignore[operator]
    path.write_bytes(proto.SerializeToString())
    sources = [proto, path, str(path), path.read_bytes(), bytearray(path.read_bytes()), memoryview(path.read_bytes())]

    assert len({graph_fingerprint(import_model(s)) for s in sources}) == 1


def test_an_onnx_ir_model_is_recognised_without_importing_onnx_ir(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds an `onnx_ir.Model` has imported that package; its serialiser is used."""
    proto = model([N("Relu", ["x"], ["y"])])

    class Model:
        graph = types.SimpleNamespace(initializers={})

    Model.__module__ = "onnx_ir._core"
    package = types.ModuleType("onnx_ir")
    package.serde = types.SimpleNamespace(serialize_model=lambda m: proto)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnx_ir", package)

    assert [n.op_type for n in import_model(Model()).nodes] == ["Relu"]


def test_long_chains_are_imported() -> None:
    """Depth costs no recursion: a chain of 20 000 nodes is imported in order (benchmarks/ir.py measures the time)."""
    names = ["x", *(f"v{i}" for i in range(20_000))]
    nodes = [N("Relu", [a], [b]) for a, b in pairwise(names)]
    proto = model(nodes, outputs=[names[-1]])
    graph = import_model(proto)

    assert len(graph.nodes) == 20_000
