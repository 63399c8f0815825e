"""A Function as an ONNX model whose large constants stay beside it, for engines whose library reads those."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, checker
from onnx.reference import ReferenceEvaluator

from tests.ir.random_graphs import graphs
from xrt_core.engine.onnx_bridge import EXTERNAL_BYTES, OnnxModel, is_large, onnx_model, without_missing_bounds
from xrt_core.errors import CompileError, GraphError
from xrt_core.frontends.onnx_import import import_function
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import STRING, TensorType

F32 = np.dtype(np.float32)
LARGE = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)


def value(name: str, *shape: int, dtype: Any = F32) -> Value:
    """A tensor of known type."""
    return Value(name, TensorType(np.dtype(dtype), shape))


def function_of(inputs: list[Value], nodes: list[Node], outputs: list[Value], opset: int = 21) -> Function:
    """A Function of the standard domain."""
    return Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": opset}, name="f"))


def product(weight: np.ndarray, opset: int = 21) -> Function:
    """x of two rows by a constant."""
    x, y = value("x", 2, weight.shape[0]), value("y", 2, weight.shape[1])
    return function_of([x], [Node("MatMul", [x, Value.constant(weight, "w")], [y], version=13)], [y], opset)


def filled(exported: OnnxModel) -> Any:
    """The model with the large constants in it, as any ONNX tool would read it."""
    model = type(exported.model).FromString(exported.model.SerializeToString())
    for t in model.graph.initializer:
        if t.data_location == TensorProto.EXTERNAL:
            t.ClearField("data_location")
            t.ClearField("external_data")
            t.raw_data = exported.weights[t.name].tobytes()
    return model


@pytest.mark.slow
@given(body=graphs(mixed=False), limit=st.sampled_from([1, 8, 13, 1 << 20]))
def test_the_model_with_its_constants_is_the_function(body: Graph, limit: int) -> None:
    """Whatever stays outside: filled in again, the model is the same function, and the checker takes it."""
    try:
        function = Function.from_graph(body, name="f")
    except GraphError:  # a mask of Dropout has no type
        return
    exported = onnx_model(function, engine="it", external_bytes=limit)
    whole = filled(exported)
    checker.check_model(whole, full_check=True)
    assert import_function(whole).fingerprint == function.fingerprint
    assert exported.inputs == tuple(p.name for p in whole.graph.input)
    assert exported.outputs == tuple(p.name for p in whole.graph.output)
    assert all(w.nbytes >= limit for w in exported.weights.values())


def test_a_large_constant_is_the_callers_memory() -> None:
    """It is not copied, its bytes are not in the model, and read-only memory will do."""
    weight = LARGE.copy()
    weight.flags.writeable = False
    exported = onnx_model(product(weight), engine="it")
    assert exported.weights["w"] is weight
    assert len(exported.model.SerializeToString()) < 1000
    (t,) = exported.model.graph.initializer
    assert {e.key: e.value for e in t.external_data} == {"location": "xrt", "length": str(weight.nbytes)}
    assert list(t.dims) == [64, 64]


def test_the_engine_says_where_a_constant_lies() -> None:
    """The entries of `external_data` are the engine's own."""
    exported = onnx_model(product(LARGE), engine="it", location=lambda a: {"location": "memory", "offset": str(a.size)})
    (t,) = exported.model.graph.initializer
    assert {e.key: e.value for e in t.external_data} == {"location": "memory", "offset": "4096"}


@pytest.mark.parametrize("how", ["transposed", "unaligned"])
def test_memory_that_cannot_be_handed_over_is_copied(how: str) -> None:
    """A weight is C-contiguous and aligned in any case."""
    if how == "transposed":
        weight = LARGE.T
    else:
        weight = np.frombuffer(b"\0" + LARGE.tobytes(), np.uint8)[1:].view(np.float32).reshape(LARGE.shape)
        assert not weight.flags.aligned
    got = onnx_model(product(weight), engine="it").weights["w"]
    assert got.flags.c_contiguous
    assert got.flags.aligned
    assert np.array_equal(got, weight)


def test_two_constants_of_one_name_and_one_that_is_used_twice() -> None:
    """Names are made unique; a constant of two readers is one weight."""
    x, y, z = (value(n, 64, 64) for n in "xyz")
    first, second = Value.constant(LARGE, "w"), Value.constant(LARGE + 1, "w")
    nodes = [
        Node("Add", [x, first], [y], version=14),
        Node("Sum", [y, first, second], [z], version=13),
    ]
    exported = onnx_model(function_of([x], nodes, [z]), engine="it")
    assert len(exported.weights) == 2
    assert {id(w) for w in exported.weights.values()} == {id(first.data), id(second.data)}
    assert {t.name for t in exported.model.graph.initializer} == set(exported.weights)


def test_a_constant_that_is_returned_is_in_the_model() -> None:
    """Libraries take an output from the model itself."""
    x, y, c = value("x", 64, 64), value("y", 64, 64), Value.constant(LARGE, "c")
    exported = onnx_model(function_of([x], [Node("Add", [x, c], [y], version=14)], [y, c]), engine="it")
    assert exported.weights == {}
    (t,) = exported.model.graph.initializer
    assert t.raw_data == LARGE.tobytes()


def test_strings_and_parts_of_bytes_stay_in_the_model() -> None:
    """What an array holds otherwise than ONNX is not handed over as memory, however large."""
    for data in (np.full(10_000, "text", STRING), np.zeros(10_000, ml_dtypes.int4)):
        assert data.nbytes >= EXTERNAL_BYTES
        assert not is_large(data)
    assert is_large(np.zeros(EXTERNAL_BYTES, np.uint8))
    assert not is_large(np.zeros(EXTERNAL_BYTES - 1, np.uint8))
    assert not is_large(None)


def test_nodes_have_unique_names_and_inner_values_no_types() -> None:
    """Two nodes of one name are told apart; the library infers the types itself."""
    x, y, z = (value(n, 2) for n in "xyz")
    nodes = [Node("Neg", [x], [y], version=13, name="same"), Node("Abs", [y], [z], version=13, name="same")]
    graph = onnx_model(function_of([x], nodes, [z]), engine="it").model.graph
    assert len({n.name for n in graph.node}) == 2
    assert not graph.value_info


def test_the_opset_is_one_that_the_library_knows() -> None:
    """The model's opset comes down to the newest that the library knows, where the nodes' versions allow it."""
    assert onnx_model(product(LARGE, 23), engine="it", newest_opset=20).model.opset_import[0].version == 20
    assert onnx_model(product(LARGE, 18), engine="it", newest_opset=20).model.opset_import[0].version == 18
    assert onnx_model(product(LARGE, 18), engine="it", newest_opset=12).model.opset_import[0].version == 12


def test_nodes_of_two_opsets_are_an_error() -> None:
    """Where no one opset fits all nodes, the library would misread some: the engine and the nodes are named."""
    x, y, z = (value(n, 2, 3) for n in "xyz")
    nodes = [Node("Softmax", [x], [y], {"axis": 0}, version=11), Node("Softmax", [y], [z], version=13)]
    with pytest.raises(CompileError, match=r"^it: function 'f' mixes .*Softmax-11, .*Softmax-13"):
        onnx_model(function_of([x], nodes, [z]), engine="it")


def test_what_onnx_cannot_express_is_an_error() -> None:
    """An operator that no schema knows is named, with the engine that asked."""
    x, y = value("x", 2), value("y", 2)
    with pytest.raises(CompileError, match="^it: function 'f' does not export: .*Own has no schema"):
        onnx_model(function_of([x], [Node("Own", [x], [y], version=1)], [y]), engine="it")


@pytest.mark.parametrize("opset", [11, 12, 13, 21])
@pytest.mark.parametrize(
    ("bounds", "operator"), [((), "Identity"), (("low",), "Max"), ((None, "high"), "Min"), (("low", "high"), "Clip")]
)
def test_bounds_that_are_missing(opset: int, bounds: tuple[str | None, ...], operator: str) -> None:
    """Libraries take the largest number for them, and give it for an infinity. Of integers that is one bound more."""
    version = {11: 11, 12: 12}.get(opset, 13)

    def clipped(kind: Any) -> OnnxModel:
        x, y = value("x", 3, dtype=kind), value("y", 3, dtype=kind)
        of_each = {"low": Value("low", data=np.array(1, kind)), "high": Value("high", data=np.array(2, kind))}
        node = Node("Clip", [x, *(b and of_each[b] for b in bounds)], [y], version=version)
        function = without_missing_bounds(function_of([x], [node], [y], opset))
        return onnx_model(function, engine="a library", newest_opset=opset)

    made = clipped(np.float32).model
    checker.check_model(made)
    assert [n.op_type for n in made.graph.node] == [operator]
    (found,) = ReferenceEvaluator(made).run(None, {"x": np.array([np.inf, -np.inf, 1.5], np.float32)})
    low, high = (1 if "low" in bounds else -np.inf), (2 if "high" in bounds else np.inf)
    np.testing.assert_array_equal(found, [high, low, 1.5])
    if opset > 11:
        assert [n.op_type for n in clipped(np.int64).model.graph.node] == ["Clip"]


def test_bounds_that_are_missing_in_a_branch() -> None:
    x, y, z, low = value("x", 3), value("y", 3), value("z", 3), Value("low", data=np.array(0, np.float32))
    bodies = {
        "then_branch": Graph([], [y], [Node("Clip", [x, low], [y], version=13)], opsets={"": 21}, name="yes"),
        "else_branch": Graph([], [z], [Node("Neg", [x], [z], version=13)], opsets={"": 21}, name="no"),
    }
    use, result = value("use", dtype=np.bool_), value("r", 3)
    function = function_of([use, x], [Node("If", [use], [result], bodies, version=21)], [result])
    made = onnx_model(without_missing_bounds(function), engine="a library").model
    given = {"use": np.array(True), "x": np.array([np.inf, -1, 2], np.float32)}
    np.testing.assert_array_equal(ReferenceEvaluator(made).run(None, given)[0], [np.inf, 0, 2])
    branch = next(a.g for a in made.graph.node[0].attribute if a.name == "then_branch")
    assert [n.op_type for n in branch.node] == ["Max"]
