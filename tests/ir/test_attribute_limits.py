"""Limits of attributes: what ONNX does not allow is refused with node, attribute, value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest

from tests.frontends.onnx_models import N, info, model, subgraph
from xrt_core.errors import ModelLoadError, ShapeError, XRTError
from xrt_core.frontends.onnx_import import import_model
from xrt_core.host.executor import run_node
from xrt_core.ir import attribute_limits
from xrt_core.ir.attribute_limits import attribute_fault, node_fault
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.schema import ATTRIBUTE_KINDS, latest_opset, since_version
from xrt_core.ir.types import TensorType, physical_memory

F = np.float32


def _f(*shape: int) -> np.ndarray:
    return np.zeros(shape, F)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _node(op: str, inputs: list[Any], outputs: int = 1, opset: int = 0, **attributes: Any) -> Node:
    """A node of typed inputs; those of int64 of rank 1 or less have known values."""
    values = [
        None if x is None else Value(f"x{i}", TensorType(x.dtype, x.shape), x if x.dtype == np.int64 else None)
        for i, x in enumerate(inputs)
    ]
    version = since_version(op, "", opset or latest_opset())
    return Node(op, values, [Value(f"y{i}") for i in range(outputs)], attributes, version=version, name="bad")


def test_axes_that_are_no_integers() -> None:
    """Known values of another type are refused as all others, whatever they compare with."""
    axes = Value("a", TensorType(np.dtype(np.complex64), (1,)), np.ones(1, np.complex64))
    made = Node("ReduceSum", [Value("x", TensorType(np.dtype(F), (2,))), axes], [Value("y")], version=13)
    assert "must be integers" in str(node_fault(made))
    tiled = Node("Tile", [made.inputs[0], axes], [Value("y")], version=13)
    assert "must be real" in str(node_fault(tiled))


RNN = [_f(2, 1, 3), _f(1, 4, 3), _f(1, 4, 4)]

INVALID: dict[str, tuple[str, list[Any], int, int, dict[str, Any], str]] = {
    "RNN, hidden_size": ("RNN", RNN, 2, 0, {"hidden_size": 5}, r"hidden_size = 5.*W of \[1, 5, 3\].*\[1, 4, 3\]"),
    "RNN, direction": ("RNN", RNN, 2, 0, {"direction": "bidirectional"}, r"2 direction\(s\).*W of \[2,"),
    "RNN, activation": ("RNN", RNN, 2, 0, {"activations": ("Tan",)}, r"activations = \['Tan'\].*allows one of"),
    "LSTM, peepholes": (
        "LSTM", [_f(2, 1, 3), _f(1, 8, 3), _f(1, 8, 2), None, None, None, None, _f(1, 5)], 3, 0, {}, r"P of \[1, 6\]",
    ),
    "GRU, sequence_lens": (
        "GRU", [_f(2, 1, 3), _f(1, 6, 3), _f(1, 6, 2), None, np.zeros(4, np.int32)], 2, 0, {}, "sequence_lens",
    ),
    "Conv, strides": ("Conv", [_f(1, 1, 4, 4), _f(1, 1, 2, 2)], 1, 0, {"strides": (-1, 1)}, r"strides = \[-1, 1\]"),
    "Conv, dilations": ("Conv", [_f(1, 1, 4, 4), _f(1, 1, 2, 2)], 1, 0, {"dilations": (0, 1)}, "allows at least 1"),
    "Conv, kernel_shape": (
        "Conv", [_f(1, 1, 4, 4), _f(1, 1, 2, 2)], 1, 0, {"kernel_shape": (3, 3)}, r"kernel_shape = \[3, 3\].*\[2, 2\]",
    ),
    "Conv, group": ("Conv", [_f(1, 3, 4, 4), _f(2, 2, 1, 1)], 1, 0, {"group": 2}, "group = 2; it must divide the 3"),
    "Conv, pads": ("Conv", [_f(1, 1, 4), _f(1, 1, 2)], 1, 0, {"pads": (1,)}, "1 spatial axes need 2"),
    "ConvTranspose, pads": ("ConvTranspose", [_f(1, 1, 4), _f(1, 1, 2)], 1, 0, {"pads": (-1, 0)}, "allows at least 0"),
    "MaxPool, kernel_shape": ("MaxPool", [_f(1, 1, 4, 4)], 1, 0, {"kernel_shape": (2,)}, "2 spatial axes need 2"),
    "MaxPool, auto_pad": (
        "MaxPool", [_f(1, 1, 4)], 1, 0, {"kernel_shape": (2,), "auto_pad": "SAME"}, "auto_pad = 'SAME'.*SAME_UPPER",
    ),
    "Conv, no window": (
        "Conv", [_f(1, 1, 2, 9), _f(1, 1, 3, 3)], 1, 0, {"pads": (0, 1, 0, 1)},
        r"covers 3 elements of axis 2; the input \[1, 1, 2, 9\] has 2 and 0 of padding",
    ),
    "Conv, no dilated window": ("Conv", [_f(1, 1, 2), _f(1, 1, 2)], 1, 0, {"dilations": (2,)}, "covers 3 .*axis 2"),
    "MaxPool, no window": (
        "MaxPool", [_f(1, 1, 1)], 1, 0, {"kernel_shape": (3,), "ceil_mode": 1, "strides": (2,)}, "covers 3 elements",
    ),
    "AveragePool, no window": ("AveragePool", [_f(1, 1, 0)], 1, 0, {"kernel_shape": (1,)}, "covers 1 elements"),
    "MatMul": ("MatMul", [_f(2, 3), _f(4, 2)], 1, 0, {}, r"\[2, 3\] and \[4, 2\]; the first has 3 columns.* 4 rows"),
    "MatMul by a vector": ("MatMul", [_f(5, 2, 3), _f(2)], 1, 0, {}, "3 columns, and the second 2 rows"),
    "MatMul of a scalar": ("MatMul", [_f(), _f(2)], 1, 0, {}, "an axis at least"),
    "Gemm": ("Gemm", [_f(3, 2), _f(4, 2)], 1, 0, {"transA": 1, "transB": 1}, "3 columns, and the second 2 rows"),
    "MatMulInteger": ("MatMulInteger", [_f(2, 3).astype(np.uint8), _f(2, 2).astype(np.uint8)], 1, 0, {}, "2 rows"),
    "Split, negative": ("Split", [_f(4), _ints(5, -1)], 2, 0, {}, r"split = \[5, -1\].*none negative"),
    "Split, sum": ("Split", [_f(4), _ints(3, 2)], 2, 0, {}, "add up to 4"),
    "Split, num_outputs": ("Split", [_f(4)], 2, 0, {"num_outputs": 1}, "num_outputs = 1; the node has 2 outputs"),
    "Split, attribute": ("Split", [_f(4)], 2, 11, {"split": (5, -1)}, "split = .*at least 0"),
    "Range, step": ("Range", [_ints(0).reshape(()), _ints(3).reshape(()), _ints(0).reshape(())], 1, 0, {}, "delta = 0"),
    "Slice, step": ("Slice", [_f(4), _ints(0), _ints(2), _ints(0), _ints(0)], 1, 0, {}, r"steps = \[0\]"),
    "Slice, axes": ("Slice", [_f(4), _ints(0, 0), _ints(2, 2), _ints(0, -1)], 1, 0, {}, "listed once"),
    "Gather, axis": ("Gather", [_f(4), _ints(0)], 1, 0, {"axis": 1}, "axis = 1; .*rank 1 allows -1 to 0"),
    "LayerNormalization of a scalar": (
        "LayerNormalization", [_f(), _f()], 1, 0, {"axis": 2**63 - 1}, "axis = 9223372036854775807",
    ),
    "Flatten, axis": ("Flatten", [_f(4, 2)], 1, 0, {"axis": 3}, "axis = 3; .*-2 to 2"),
    "OneHot, axis": ("OneHot", [_ints(0), _ints(3), _f(2)], 1, 0, {"axis": 2}, "axis = 2"),
    "ReduceSum, axes": ("ReduceSum", [_f(4, 2), _ints(0, -2)], 1, 0, {}, "each axis may be listed once"),
    "ReduceMax, axes": ("ReduceMax", [_f(4, 2)], 1, 11, {"axes": (2,)}, "rank 2 allows -2 to 1"),
    "ArgMax, keepdims": ("ArgMax", [_f(4, 2)], 1, 0, {"keepdims": 3}, "keepdims = 3; ArgMax allows 0 or 1"),
    "Transpose, perm": ("Transpose", [_f(4, 2)], 1, 0, {"perm": (0, 0)}, r"perm = \[0, 0\].*every axis once"),
    "Transpose, rank": ("Transpose", [_f(4, 2)], 1, 0, {"perm": (0, 2, 1)}, "perm = .*2 axes"),
    "Pad, mode": ("Pad", [_f(4), _ints(1, 1)], 1, 0, {"mode": "zero"}, "mode = 'zero'; Pad allows one of constant"),
    "Pad, pads": ("Pad", [_f(4), _ints(1)], 1, 0, {}, r"pads = \[1\]"),
    "ScatterND, reduction": (
        "ScatterND", [_f(4), _ints(1).reshape(1, 1), _f(1)], 1, 0, {"reduction": "plus"}, "reduction = 'plus'",
    ),
    "GridSample, mode": ("GridSample", [_f(1, 1, 2, 2), _f(1, 2, 2, 2)], 1, 0, {"mode": "area"}, "mode = 'area'"),
    "DepthToSpace, blocksize": ("DepthToSpace", [_f(1, 3, 2, 2)], 1, 0, {"blocksize": 2}, "4 must divide axis 1"),
    "GroupNormalization": (
        "GroupNormalization", [_f(1, 3, 2), _f(3), _f(3)], 1, 0, {"num_groups": 2}, "num_groups = 2; .*3 channels",
    ),
    "MeanVarianceNormalization": ("MeanVarianceNormalization", [_f(1, 3)], 1, 0, {}, r"axes = \[0, 2, 3\]"),
    "TopK, K": ("TopK", [_f(3), _ints(4)], 2, 0, {}, "K = 4; axis -1"),
    "Tile, repeats": ("Tile", [_f(3), _ints(-1)], 1, 0, {}, r"repeats = \[-1\]"),
    "Einsum, two ellipses": ("Einsum", [_f(2, 2)], 1, 0, {"equation": "...i...->"}, "at most one ellipsis"),
    "Einsum, terms": ("Einsum", [_f(2, 2)], 1, 0, {"equation": "ij,jk->ik"}, "2 terms for 1 inputs"),
    "Einsum, rank": ("Einsum", [_f(2, 2)], 1, 0, {"equation": "ijk->i"}, "rank 2"),
    "Einsum, result": ("Einsum", [_f(2, 2)], 1, 0, {"equation": "ij->k"}, "only letters of the terms"),
    "Attention, heads": ("Attention", [_f(1, 2, 6)] * 3, 1, 0, {"q_num_heads": 4, "kv_num_heads": 2}, "divide the 6"),
    "GatherND, batch_dims": ("GatherND", [_f(2, 3), _ints(0, 0).reshape(2, 1)], 1, 0, {"batch_dims": 2}, "batch_dims"),
    "SoftmaxCrossEntropyLoss, weight": (
        "SoftmaxCrossEntropyLoss", [_f(3, 5), _ints(1, 1, 0), _f(2)], 1, 0, {}, r"weight is .*2.* one for each class",
    ),
    "NegativeLogLikelihoodLoss, weight": (
        "NegativeLogLikelihoodLoss", [_f(3, 5), _ints(1, 1, 0), _f(5, 1)], 1, 0, {}, "one for each class",
    ),
    "Cast, to": ("Cast", [_f(2)], 1, 0, {"to": 99}, "to = 99; Cast allows the number of an ONNX element type"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_node_is_refused_by_inference_and_host(case: str) -> None:
    """Type inference and the host give one ShapeError with node, attribute, value and what is allowed."""
    op, inputs, outputs, opset, attributes, message = INVALID[case]
    node = _node(op, inputs, outputs, opset, **attributes)

    with pytest.raises(ShapeError, match=message) as of_inference:
        infer_types(node)
    with pytest.raises(ShapeError, match=message) as of_host:
        run_node(node, inputs)

    assert "'bad'" in str(of_inference.value)
    assert "'bad'" in str(of_host.value)


@pytest.mark.parametrize("case", [c for c, (*_, a, _) in INVALID.items() if attribute_fault("", c.split(",")[0], a)])
def test_values_of_attributes_are_checked_at_import(case: str) -> None:
    """A model whose attribute has a value that is never allowed does not load."""
    op, inputs, outputs, opset, attributes, message = INVALID[case]
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    node = N(op, names, [f"y{i}" for i in range(outputs)], name="bad", **attributes)
    types = [
        info(f"x{i}", x.shape, onnx.helper.np_dtype_to_tensor_dtype(x.dtype)) for i, x in enumerate(inputs)
        if x is not None
    ]  # fmt: skip
    with pytest.raises(ModelLoadError, match=rf"'bad'.*{message}"):
        import_model(model([node], types, ["y0"], opset=opset or latest_opset()))


def test_limits_are_of_attributes_that_schemas_have() -> None:
    """Each row of the table names an attribute of an operator of the standard, and allows the schema's default."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if not s.domain]
    known = {(s.name, name) for s in schemas for name in s.attributes}
    assert set(attribute_limits._OF_OPERATOR) <= known
    assert set(attribute_limits._EVERYWHERE) <= {name for _, name in known}
    assert set(attribute_limits._AGREEMENTS) <= {s.name for s in schemas}
    for s in schemas:
        for name, a in s.attributes.items():
            kind = ATTRIBUTE_KINDS[int(a.type.value)]  # type: ignore[attr-defined]
            if a.default_value.type and s.since_version >= 7 and kind in ("int", "string"):
                default = onnx.helper.get_attribute_value(a.default_value)
                text = default.decode() if isinstance(default, bytes) else default
                assert attribute_fault("", s.name, {name: text}) is None, (s.name, name, text)


@pytest.mark.parametrize("branch", [0, 2])
def test_a_branch_gives_as_many_results_as_the_node_takes(branch: int) -> None:
    """An If whose branch gives fewer or more results than the node has outputs does not load."""
    results = [f"r{i}" for i in range(branch)]
    one = subgraph([N("Identity", ["x"], ["r"])], ["r"])
    other = subgraph([N("Identity", ["x"], [r]) for r in results], results)
    flag = info("flag", (), onnx.TensorProto.BOOL)
    node = N("If", ["flag"], ["y"], name="if", then_branch=one, else_branch=other)
    with pytest.raises(ModelLoadError, match=f"'if'.*else_branch gives {branch} results; the node has 1 outputs"):
        import_model(model([node], ["x", flag]))


@pytest.mark.parametrize("count", [2**31, 3, 0])
def test_num_scan_inputs_is_at_most_the_inputs(count: int) -> None:
    """A Scan over more inputs than it has, or over none, does not load, and no memory is taken for them."""
    body = subgraph([N("Identity", ["e"], ["r"])], ["r"], ["e"])
    with pytest.raises(ModelLoadError, match=f"num_scan_inputs = {count}"):
        import_model(model([N("Scan", ["x"], ["y"], name="scan", num_scan_inputs=count, body=body)]))


BIG = [
    ("ConstantOfShape", [_ints(2**40, 2**40)], {}),
    ("Expand", [_f(1), _ints(2**40, 2**20)], {}),
    ("Tile", [_f(2), _ints(2**50)], {}),
    ("Pad", [_f(2), _ints(2**50, 0)], {}),
    ("OneHot", [_ints(0), _ints(2**50).reshape(()), _f(2)], {}),
    ("Range", [_ints(0).reshape(()), _ints(2**50).reshape(()), _ints(1).reshape(())], {}),
]


@pytest.mark.parametrize(("op", "inputs", "attributes"), BIG, ids=[b[0] for b in BIG])
def test_a_result_beyond_the_memory_is_refused_by_its_size(op: str, inputs: list[Any], attributes: Any) -> None:
    """Inference and the host name the size of a result that no machine memory holds, before anything is allocated."""
    node = _node(op, inputs, **attributes)
    with pytest.raises(ShapeError, match=rf"bytes; the memory of this machine has {physical_memory():,}"):
        infer_types(node)
    with pytest.raises(ShapeError, match=r"takes [\d,]+ bytes"):
        run_node(node, inputs)


def test_values_known_at_run_time_only_are_checked_by_the_host() -> None:
    """Sizes, steps and repeats that come with a call are refused as those of the model are."""
    unknown = [
        ("Split", [_f(4), _ints(5, -1)], 2, "do not fit"),
        ("Range", [F(0), F(3), F(0)], 1, "delta is 0"),
        ("Range", [F(0), F(math.inf), F(1)], 1, "no finite number of steps"),
        ("Tile", [_f(4), _ints(-1)], 1, "none negative"),
        ("ConstantOfShape", [_ints(-1)], 1, "negative"),
        ("Pad", [_f(3), _ints(0, -4)], 1, "crop more"),
    ]
    for op, inputs, outputs, message in unknown:
        values = [Value(f"x{i}", TensorType(x.dtype, x.shape)) for i, x in enumerate(inputs)]
        node = Node(op, values, [Value(f"y{i}") for i in range(outputs)], version=since_version(op, "", latest_opset()))
        assert node_fault(node) is None
        with pytest.raises(XRTError, match=message):
            run_node(node, inputs)


def test_valid_nodes_have_no_fault() -> None:
    """What the standard allows at the edge of the limits passes."""
    for node in (
        _node("Flatten", [_f(2, 3)], axis=2),
        _node("OneHot", [_ints(0), _ints(3), _f(2)], axis=-2),
        _node("Softmax", [_f(2)], opset=11, axis=1),
        _node("RNN", RNN, 2, activations=("tanh",)),
        _node("Conv", [_f(1, 4, 4), _f(2, 2, 1)], group=2, auto_pad=""),
        _node("Conv", [_f(1, 1, 1), _f(1, 1, 3)], pads=(1, 1)),
        _node("Conv", [_f(1, 1, 0), _f(1, 1, 3)], auto_pad="SAME_UPPER"),
        _node("MaxPool", [_f(1, 1, 1)], 1, kernel_shape=(2,), strides=(2,), ceil_mode=1),
        _node("MatMul", [_f(3), _f(3, 2)]),
        _node("Gemm", [_f(3, 2), _f(4, 3)], transA=1, transB=1),
        _node("Einsum", [_f(2, 3), _f(3, 2)], equation="...i, i... -> ..."),
        _node("Einsum", [_f(2, 2)], equation="ii"),
        _node("Split", [_f(5)], 2, num_outputs=2),
        _node("Transpose", [_f(2, 3)]),
    ):
        assert node_fault(node) is None, node
