"""Functions whose nodes are of several opsets, or newer than a library knows: brought into one that it knows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import checker
from onnx.defs import onnx_opset_version
from onnx.reference import ReferenceEvaluator

from tests.engine.test_onnx_model import function_of, value
from tests.host_run import run_graph
from tests.random_graphs import BOOL, I64, graph_of, ints
from xrt_core.engine.onnx_bridge import aligned, onnx_model, same_but_types
from xrt_core.errors import CompileError
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.onnx_proto import dtype_to_onnx
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType
from xrt_core.verify.reference import run_host

F32 = np.dtype(np.float32)


def lowered(dtype: Any = np.float16) -> Function:
    """What lowering makes of a model of opset 17: Conv-22 between nodes of 13 and 14."""
    x, y = (value(n, 1, 1, 4, 4) for n in "xy")
    low, conv, relu = (value(n, 1, 1, 4, 4, dtype=dtype) for n in ("low", "conv", "relu"))
    w = Value.constant(np.full((1, 1, 1, 1), -2, dtype), "w")
    nodes = [
        Node("Cast", [x], [low], {"to": dtype_to_onnx(np.dtype(dtype))}, version=13),
        Node("Conv", [low, w], [conv], version=22),
        Node("Relu", [conv], [relu], version=14),
        Node("Cast", [relu], [y], {"to": dtype_to_onnx(F32)}, version=13),
    ]
    return function_of([x], nodes, [y], opset=17)


def test_the_nodes_come_into_the_newest_ones_opset() -> None:
    """Every node gets the version of that opset, and only versions change."""
    before = lowered()
    after = aligned(before)
    assert [(n.op_type, n.version) for n in after.body.nodes] == [
        ("Cast", 21), ("Conv", 22), ("Relu", 14), ("Cast", 21),
    ]  # fmt: skip
    assert after.body.opsets[""] == 22
    assert [(n.inputs, n.outputs, n.attributes) for n in after.body.nodes] == [
        (n.inputs, n.outputs, n.attributes) for n in before.body.nodes
    ]


def test_the_exported_model_computes_the_same() -> None:
    """The hand-off gives one model without functions of its own, which the checker takes."""
    model = onnx_model(lowered(), engine="it").model
    checker.check_model(model, full_check=True)
    assert not model.functions
    assert [o.version for o in model.opset_import if not o.domain] == [22]
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 1, 4, 4)
    (got,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(got, np.maximum(-2 * x, 0), rtol=1e-3)


def test_bfloat16_of_an_older_opset() -> None:
    """The dtype that brought the newer version in stays the tensors' dtype."""
    model = onnx_model(lowered(ml_dtypes.bfloat16), engine="it").model
    checker.check_model(model, full_check=True)


def test_weights_are_named_once() -> None:
    """The second export, in one opset, is the one whose constants lie beside the model."""
    exported = onnx_model(lowered(), engine="it", external_bytes=1)
    assert list(exported.weights) == [t.name for t in exported.model.graph.initializer] == ["w"]


def test_an_opset_that_the_library_does_not_know() -> None:
    """A library of an older opset gets a model of that, where it has the dtypes; else the plain answer."""
    function = lowered()
    assert aligned(function, newest_opset=21) is function
    model = onnx_model(function, engine="it", newest_opset=21).model
    checker.check_model(model, full_check=True)
    assert all(o.version <= 21 for o in model.opset_import if not o.domain)
    with pytest.raises(CompileError, match=r"^it: function 'f': node .*Conv-22 has no form in opset 21"):
        onnx_model(lowered(ml_dtypes.bfloat16), engine="it", newest_opset=21)


def node(op_type: str, inputs: list[Any], outputs: list[Any], **attributes: Any) -> Node:
    """A node of the newest version."""
    return Node(op_type, inputs, outputs, attributes, version=since_version(op_type, "", onnx_opset_version()))


def newer(op_type: str, *inputs: Value, outputs: int = 1, **attributes: Any) -> Function:
    """One node of the newest version, with inferred types."""
    n = node(op_type, list(inputs), [Value(f"y{i}") for i in range(outputs)], **attributes)
    typed = [Value(f"y{i}", t) for i, t in enumerate(infer_types(n))]
    entry = [v for v in inputs if v.data is None]
    graph = Graph(entry, typed, [n.replace(outputs=typed)], opsets={"": n.version}, name="f")
    return Function.from_graph(graph)


@pytest.mark.parametrize(
    ("function", "newest", "operators"),
    [
        (lambda: newer("Reshape", value("x", 2, 6), ints(3, 4)), 19, {"Reshape"}),
        (lambda: newer("Transpose", value("x", 2, 3), perm=(1, 0)), 13, {"Transpose"}),
        (lambda: newer("ReduceMean", value("x", 2, 3), ints(1), keepdims=0), 13, {"ReduceMean"}),
        (lambda: newer("Softmax", value("x", 2, 3), axis=-1), 11, {"Softmax"}),
        (lambda: newer("Swish", value("x", 2, 3)), 20, {"Sigmoid", "Mul"}),
        (lambda: newer("RMSNormalization", value("x", 2, 3), value("s", 3)), 21, {"Sqrt", "Mul"}),
        (lambda: newer("Gelu", value("x", 2, 3)), 17, {"Erf"}),
        (lambda: newer("SwiGLU", value("x", 2, 4), value("g", 2, 4)), 22, {"Mul"}),
    ],
    ids=["Reshape", "Transpose", "axes", "one axis", "Swish", "RMSNormalization", "Gelu", "SwiGLU"],
)
def test_newer_nodes_in_an_older_opset(function: Any, newest: int, operators: set[str]) -> None:
    """By another version number, as attributes, or as what the operator is made of: right, and valid in that opset."""
    f = function()
    exported = onnx_model(f, engine="it", newest_opset=newest)
    checker.check_model(exported.model, full_check=True)
    assert [o.version for o in exported.model.opset_import if not o.domain] == [newest]
    assert operators <= {n.op_type for n in exported.model.graph.node}
    arrays = [np.random.default_rng(i).standard_normal(p.shape).astype(p.dtype) for i, p in enumerate(f.params)]
    want = run_host(f, arrays)[0]
    got = ReferenceEvaluator(exported.model).run(None, dict(zip(exported.inputs, arrays, strict=True)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bodies_come_down_too_and_the_file_format_is_no_newer_than_needed() -> None:
    """A Loop of the newest version around a Swish; version 8 of the format has all of it."""
    turn, go, s, t = Value("i", TensorType(I64, ())), Value("c", TensorType(BOOL, ())), value("s", 3), value("t", 3)
    body = graph_of([turn, go, s], [go, t], [node("Swish", [s], [t])])
    x, y, limit = value("x", 3), value("y", 3), Value.constant(np.array(2))
    f = Function.from_graph(
        graph_of([x], [y], [node("Loop", [limit, Value.constant(np.array(True)), x], [y], body=body)])
    )
    exported = onnx_model(f, engine="it", newest_opset=18)
    checker.check_model(exported.model, full_check=True)
    assert exported.model.ir_version == 8
    given = np.array([1, -2, 3], np.float32)
    got = ReferenceEvaluator(exported.model).run(None, {exported.inputs[0]: given})[0]
    np.testing.assert_allclose(got, run_host(f, [given])[0][0], rtol=1e-5)


def test_what_is_new_in_meaning_does_not_come_down() -> None:
    """Remainders of floats, and operators that nothing older makes up, are refused with the node and the opset."""
    for f in (newer("Mod", value("x", 3), value("y", 3)), newer("CumProd", value("x", 3), Value.constant(np.array(0)))):
        with pytest.raises(CompileError, match="has no form in opset 25"):
            onnx_model(f, engine="it", newest_opset=25)


@pytest.mark.parametrize(
    ("op_type", "version", "attributes"),
    [("Softmax", 11, {"axis": 1}), ("GroupNormalization", 18, {"num_groups": 1})],
    ids=["it is over two axes", "scale means something else"],
)
def test_versions_that_differ_in_more_stay(op_type: str, version: int, attributes: dict[str, Any]) -> None:
    """A node that would mean something else is left alone, and so the whole function."""
    x, r, c, y = value("x", 1, 1, 4, 4), value("r", 1, 1, 4, 4), value("c", 1, 1, 4, 4), value("y", 1, 1, 4, 4)
    extra = [Value.constant(np.ones(1, np.float32), n) for n in "ab"] if op_type == "GroupNormalization" else []
    nodes = [
        Node(op_type, [x, *extra], [r], attributes, version=version),
        Node("Conv", [r, Value.constant(np.ones((1, 1, 1, 1), np.float32), "w")], [c], version=22),
        Node("Relu", [c], [y], version=14),
    ]
    function = function_of([x], nodes, [y], opset=17)
    assert aligned(function) is function


@pytest.mark.parametrize(
    ("op_type", "version", "opset", "shape", "attributes"),
    [
        ("Softmax", 11, 11, (3, 4), {}),
        ("Softmax", 11, 11, (2, 5, 1, 1), {}),
        ("LogSoftmax", 11, 11, (2, 1, 5), {"axis": -2}),
        ("Hardmax", 1, 9, (1, 1), {}),
        ("ReduceMean", 13, 17, (2, 3), {"axes": (1,), "keepdims": 0}),
        ("ReduceSum", 11, 12, (2, 3), {}),
        ("Squeeze", 11, 12, (2, 1), {"axes": (1,)}),
        ("Unsqueeze", 11, 12, (2, 1), {"axes": (0, 3)}),
        ("Split", 11, 12, (2, 6), {"axis": 1, "split": (4, 2)}),
        ("Split", 13, 17, (2, 6), {"axis": 1}),
        ("AveragePool", 11, 17, (1, 1, 4, 4), {"kernel_shape": (2, 2)}),
        ("ArgMax", 11, 11, (3, 4), {}),
        ("Shape", 13, 14, (3, 4), {}),
    ],
)
def test_nodes_whose_form_changed(
    op_type: str, version: int, opset: int, shape: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    """Beside a node of a newer opset: one model, whose results are those of the versions before."""
    x, c = value("x", *shape), value("c", *shape)
    outs = [Value(f"o{i}") for i in range(2 if op_type == "Split" else 1)]
    draft = Node(op_type, [c], outs, attributes, version=version, name="n")
    typed = draft.replace(outputs=[o.with_type(t) for o, t in zip(outs, infer_types(draft), strict=True)])
    nodes = [Node("Cast", [x], [c], {"to": dtype_to_onnx(F32)}, version=21), typed]
    function = function_of([x], nodes, list(typed.outputs), opset=opset)
    after = aligned(function)
    assert after is not function
    assert onnx_model(function, engine="it").model.functions == []
    arrays = [np.random.default_rng(0).standard_normal(shape).astype(F32)]
    wanted = run_graph(function.body, arrays)
    for got, want in zip(run_graph(after.body, arrays), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    model = onnx_model(function, engine="it").model
    checker.check_model(model, full_check=True)
    for got, want in zip(ReferenceEvaluator(model).run(None, {"x": arrays[0]}), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def weights(*shape: int) -> Value:
    """Weights of a recurrent operator or a normalisation."""
    return Value.constant((np.random.default_rng(sum(shape)).standard_normal(shape) / 2).astype(F32))


def floats(*numbers: float) -> Value:
    """A constant vector."""
    return Value.constant(np.array(numbers, F32))


def normalised() -> list[Value | None]:
    """Scale, offset, mean and variance of three channels."""
    return [weights(3), weights(3), weights(3), floats(1, 2, 3)]


OLD: list[tuple[str, int, tuple[int, ...], list[Value | None], dict[str, Any]]] = [
    ("AveragePool", 7, (1, 2, 5, 5), [], {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "count_include_pad": 1}),
    ("BatchNormalization", 7, (2, 3, 4), normalised(), {"epsilon": 1e-3}),
    ("BatchNormalization", 9, (2, 3, 4), normalised(), {}),
    ("BatchNormalization", 14, (2, 3, 4), normalised(), {}),
    ("Clip", 6, (3, 4), [], {"min": -0.5, "max": 0.25}),
    ("Clip", 6, (3, 4), [], {"max": 0.25}),
    ("Dropout", 7, (3, 4), [], {"ratio": 0.9}),
    ("Gemm", 7, (3, 4), [weights(4, 2), weights(2)], {"alpha": 0.5}),
    ("GRU", 7, (4, 1, 3), [weights(1, 6, 3), weights(1, 6, 2), weights(1, 12)], {"hidden_size": 2}),
    ("LSTM", 7, (4, 1, 3), [weights(1, 8, 3), weights(1, 8, 2), None, None, weights(1, 1, 2)], {"hidden_size": 2}),
    ("MaxPool", 8, (1, 1, 5, 5), [], {"kernel_shape": (2, 2), "strides": (2, 2)}),
    ("Pad", 2, (2, 3), [], {"pads": (0, 1, 1, 0), "value": 2.5}),
    ("Resize", 10, (1, 1, 3, 3), [floats(1, 1, 1.7, 2)], {"mode": "nearest"}),
    ("Resize", 10, (1, 1, 3, 3), [floats(1, 1, 1.7, 2)], {"mode": "linear"}),
    ("RoiAlign", 10, (1, 1, 6, 6), [Value.constant(np.array([[0.5, 1, 4, 5]], F32)), ints(0)], {"output_width": 2}),
    ("Scatter", 9, (3, 2), [Value.constant(np.array([[0, 2]])), Value.constant(np.array([[7, 8]], F32))], {}),
    ("Slice", 1, (4, 5), [], {"starts": (1, -3), "ends": (3, 9)}),
    ("Slice", 1, (4, 5), [], {"starts": (1,), "ends": (-1,), "axes": (1,)}),
    ("TopK", 1, (3, 5), [], {"k": 2, "axis": 1}),
    ("Upsample", 7, (1, 1, 3, 3), [], {"mode": "nearest", "scales": (1.0, 1.0, 2.0, 3.0)}),
    ("Upsample", 9, (1, 1, 3, 3), [floats(1, 1, 2, 2)], {"mode": "linear"}),
]


@pytest.mark.parametrize(
    ("op_type", "version", "shape", "more", "attributes"),
    OLD,
    ids=[f"{op}-{version}-{i}" for i, (op, version, *_) in enumerate(OLD)],
)
def test_nodes_of_old_models(
    op_type: str, version: int, shape: tuple[int, ...], more: list[Value | None], attributes: dict[str, Any]
) -> None:
    """Beside IsNaN-20, of which a branch of an If has one too: attributes that became inputs, other names of operators,
    inputs and attributes, and what a later version does unless it is told otherwise."""
    x, go = value("x", *shape), Value("go", TensorType(BOOL, ()))

    def old() -> Node:
        outs = [Value(f"o{i}") for i in range(2 if op_type == "TopK" else 1)]
        draft = Node(op_type, [x, *more], outs, attributes, version=version, name="n")
        return draft.replace(outputs=[o.with_type(t) for o, t in zip(outs, infer_types(draft), strict=True)])

    alone, yes, no = old(), old(), old()
    branches = {k: graph_of([], list(n.outputs), [n]) for k, n in (("then_branch", yes), ("else_branch", no))}
    chosen = [Value(f"r{i}", r.type) for i, r in enumerate(alone.outputs) if r is not None]
    nan = Value("nan", TensorType(BOOL, shape))
    nodes = [alone, Node("If", [go], chosen, branches, version=11), Node("IsNaN", [x], [nan], version=20)]
    function = function_of([x, go], nodes, [*alone.outputs, *chosen, nan], opset=11)
    after = aligned(function)
    assert after.body.opsets[""] == 20
    arrays = [np.random.default_rng(0).standard_normal(shape).astype(F32), np.array(True)]
    wanted = run_graph(function.body, arrays)
    for got, want in zip(run_graph(after.body, arrays), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    model = onnx_model(function, engine="it").model
    checker.check_model(model, full_check=True)
    assert not model.functions
    results = ReferenceEvaluator(model).run(None, dict(zip(("x", "go"), arrays, strict=True)))
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_opset_stays_as_it_is() -> None:
    """A function without a newer node is not touched."""
    x, y = value("x", 2), value("y", 2)
    function = function_of([x], [Node("Relu", [x], [y], version=14)], [y], opset=17)
    assert aligned(function) is function


@pytest.mark.parametrize(
    ("op_type", "old", "new", "same"),
    [
        ("Conv", 11, 22, True),
        ("Cast", 13, 21, True),
        ("Softmax", 11, 13, False),  # the default axis, and what it means
        ("ReduceSum", 11, 13, False),
        ("Gelu", 13, 20, False),  # not there yet
        *([("Attention", 24, 25, True)] if onnx_opset_version() >= 25 else []),  # windows, by default none
    ],
)
def test_same_but_types(op_type: str, old: int, new: int, same: bool) -> None:
    """Versions with the same inputs, outputs and attributes are told from others."""
    assert same_but_types(op_type, old, new) is same
