"""What a library of ONNX models says to single nodes: asked once per kind, in detail where it refuses the kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from xrt_core.engine.onnx_bridge import NodeTrials, why_unfit
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import STRING, SequenceType, TensorType, ValueType

F32 = np.dtype(np.float32)


class Library:
    """Refuses what `taken` says no to, and counts how often it is asked."""

    def __init__(self, taken: Any = lambda model: True) -> None:
        self.taken = taken
        self.models: list[ModelProto] = []

    def __call__(self, model: ModelProto) -> str | None:
        self.models.append(model)
        return None if self.taken(model) else "not this"


def node(op_type: str, *inputs: Value | None, version: int = 13, **attributes: Any) -> Node:
    """A node of one output of the first input's type."""
    first = inputs[0]
    assert first is not None
    return Node(op_type, inputs, [Value("y", first.type)], attributes, version=version, name="n")


def value(*shape: int, dtype: np.dtype = F32) -> Value:
    """A tensor of known type."""
    return Value("x", TensorType(dtype, shape))


def ints(*numbers: int) -> Value:
    """A constant."""
    return Value.constant(np.array(numbers, np.int64), "c")


def sizes(model: ModelProto) -> list[list[int | None]]:
    """Dimensions of the inputs, None where they are not said."""
    return [
        [d.dim_value if d.HasField("dim_value") else None for d in p.type.tensor_type.shape.dim]
        for p in model.graph.input
    ]


def test_a_kind_is_tried_once_without_sizes() -> None:
    """Sizes and the values of constants make no new kind where the library takes the kind."""
    library = Library()
    trials = NodeTrials("it", library)
    for n in (node("Reshape", value(2, 3), ints(3, 2)), node("Reshape", value(4, 5), ints(5, 4))):
        assert trials.why_not(n) is None
    (model,) = library.models
    assert sizes(model) == [[None, None]]
    assert [t.name for t in model.graph.initializer] == ["c1"]
    assert model.opset_import[0].version == 13


@pytest.mark.parametrize(
    "other",
    [
        node("Softmax", value(2, 3), axis=0),
        node("Softmax", value(2, 3), version=11, axis=1),
        node("Softmax", value(2, 3, 4), axis=1),
        node("Softmax", value(2, 3, dtype=np.dtype(np.float64)), axis=1),
        node("LogSoftmax", value(2, 3), axis=1),
    ],
    ids=["attribute", "version", "rank", "dtype", "operator"],
)
def test_what_makes_another_kind(other: Node) -> None:
    """Operator, version, attributes, dtypes and ranks."""
    library = Library()
    trials = NodeTrials("it", library)
    for n in (node("Softmax", value(2, 3), axis=1), other, other):
        trials.why_not(n)
    assert len(library.models) == 2


def test_a_known_input_makes_another_kind() -> None:
    """A library may take an operator only where an input is a constant."""
    library = Library(lambda model: len(model.graph.initializer) == 1)
    trials = NodeTrials("it", library)
    assert trials.why_not(node("Reshape", value(2, 3), ints(3, 2))) is None
    assert "not this" in str(trials.why_not(node("Reshape", value(2, 3), value(2, dtype=np.dtype(np.int64)))))


def test_a_refused_kind_is_tried_with_its_sizes() -> None:
    """The verdict on sizes and values is each node's own, and remembered as well."""
    library = Library(lambda model: sizes(model)[0][0] == 2)
    trials = NodeTrials("it", library)
    for _ in range(2):
        assert trials.why_not(node("Relu", value(2))) is None
        assert trials.why_not(node("Relu", value(3))) == "it does not take Relu-13 so: not this"
    assert [sizes(m) for m in library.models] == [[[None]], [[2]], [[3]]]


def test_values_of_constants_tell_exact_trials_apart() -> None:
    """Two nodes that differ in a known value only get a trial each, once their kind is refused; strings included."""
    library = Library(lambda model: False)
    trials = NodeTrials("it", library)
    for numbers in ((3, 2), (2, 3), (3, 2)):
        trials.why_not(node("Reshape", value(2, 3), ints(*numbers)))
    assert len(library.models) == 3
    for word in ("a", "b", "a"):
        constant = Value.constant(np.array([word], STRING), "c")
        trials.why_not(node("Equal", value(1, dtype=STRING), constant, version=19))
    assert len(library.models) == 6


def test_a_large_constant_is_an_input_of_the_trial() -> None:
    """A trial costs no copy of a weight."""
    library = Library()
    weight = Value.constant(np.zeros((64, 64), F32))
    assert NodeTrials("it", library).why_not(node("Add", value(64, 64), weight)) is None
    assert len(library.models[0].graph.input) == 2


def test_optional_inputs_stay_away() -> None:
    """An input that is not given is not given in the trial."""
    library = Library()
    NodeTrials("it", library).why_not(node("Clip", value(2), None, value()))
    assert list(library.models[0].graph.node[0].input) == ["x0", "", "x2"]


def test_the_models_are_of_an_opset_that_the_library_knows() -> None:
    """The newest one that the node's version allows."""
    library = Library()
    NodeTrials("it", library, newest_opset=20).why_not(node("Relu", value(2), version=14))
    assert library.models[0].opset_import[0].version == 20


def test_what_does_not_export_is_refused() -> None:
    """The reason is the exporter's."""
    library = Library()
    why = NodeTrials("it", library).why_not(node("Relu", value(2), version=14, mystery=()))
    assert "does not export" in str(why)
    assert not library.models


def test_a_full_memory_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of verdicts is bounded."""
    monkeypatch.setattr("xrt_core.engine.onnx_bridge._REMEMBERED", 2)
    library = Library()
    trials = NodeTrials("it", library)
    for rank in (1, 2, 3, 1):
        assert trials.why_not(node("Relu", value(*[2] * rank))) is None
    assert len(library.models) == 4


@pytest.mark.parametrize(
    ("type", "reason"),
    [
        (TensorType(F32, ("batch", 3)), "every dimension must be known"),
        (TensorType(F32, None), "dtype and rank must be known"),
        (TensorType(None, (2,)), "dtype and rank must be known"),
        (SequenceType(TensorType(F32, (2,))), "is a sequence; it gets tensors only"),
        (None, "has type unknown; it gets dense tensors only"),
        (TensorType(F32, (2,)), None),
    ],
)
def test_why_a_node_is_unfit(type: ValueType | None, reason: str | None) -> None:
    """Types that a library of static models has no place for, on either side of the node."""
    fine = value(2)
    for given, made in ((Value("v", type), fine), (fine, Value("v", type))):
        n = Node("Identity", [given], [made], version=13)
        found = why_unfit(n, "it")
        assert (found is None) if reason is None else (found is not None and reason in found and "'v'" in found)


def test_subgraphs_are_unfit() -> None:
    """Bodies of control flow are run by the host, with their parts on engines."""
    flag, y = value(dtype=np.dtype(np.bool_)), value(2)
    branch = Graph([], [ints(1)], [], opsets={"": 21})
    n = Node("If", [flag], [y], {"then_branch": branch, "else_branch": branch}, version=16)
    assert "subgraphs" in str(why_unfit(n, "it"))
