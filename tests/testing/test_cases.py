"""The cases of the kit: what the sample covers, that they are the same at every run, and what they are held against."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from xrt_core.ir.graph import Node
from xrt_core.ir.types import STRING, TensorType, dtype_name
from xrt_core.kernels import portable_kernels
from xrt_core.testing.functions import forms_of
from xrt_core.testing.generated import all_generated, make_node
from xrt_core.testing.node_cases import all_cases, cases_for
from xrt_core.testing.operator_table import BROADCASTS, DTYPES, ROWS, SHAPES
from xrt_core.testing.reference import reference


def test_the_sample_covers_every_dtype_shape_and_row() -> None:
    """Each dtype, each shape and each row of the tables runs by default with some operator."""
    cases = [(g, g.case()) for g in all_generated() if g.sample]
    made = [g for g, c in cases if c is not None]
    assert {g.dtype for g in made} >= set(DTYPES)
    labels = {g.id.split("-", 2)[2] for g in made}
    assert labels >= {*SHAPES, *BROADCASTS, "special", *(r.label for r in ROWS)}
    assert len(made) > 0.95 * len(cases), "the sample is dealt among cases that operators do not take"


def test_every_operator_of_the_tables_has_a_kernel() -> None:
    """No name in the tables is misspelt."""
    kernels = portable_kernels()
    assert {g.op_type for g in all_generated() if ("", g.op_type) not in kernels} == set()


def test_ids_are_unique_and_arrays_are_the_same_each_time() -> None:
    """A case can be found again by its name, with the same numbers."""
    ids = [g.id for g in all_generated()]
    assert len(set(ids)) == len(ids)
    for g in all_generated()[::97]:
        first, second = g.case(), g.case()
        if first is not None and second is not None:
            for a, b in zip(first.inputs, second.inputs, strict=True):
                assert a is b or a.tobytes() == b.tobytes()


def test_schemas_decide_what_a_case_may_be() -> None:
    """dtypes that an operator does not take, or takes only together, are left out."""
    f32, f64, i32 = (np.zeros(2, d) for d in (np.float32, np.float64, np.int32))
    assert make_node("Sin", [i32], {}) is None
    assert make_node("Add", [f32, f64], {}) is None
    assert make_node("NoSuchOperator", [f32], {}) is None
    node = make_node("Add", [f32, np.zeros((3, 1), np.float32)], {})
    assert node is not None
    assert node.outputs[0] is not None
    assert node.outputs[0].type == TensorType(np.dtype(np.float32), (3, 2))


def test_the_reference_is_wider_than_the_case() -> None:
    """Narrow floats are computed in float64; what is about the dtype itself is not."""
    x = np.array([1.0, 2.0], np.float16)
    node = make_node("Exp", [x], {})
    assert node is not None
    (wide,) = reference(node, [x])
    np.testing.assert_array_equal(wide, np.exp([1.0, 2.0]))
    b = x.astype(ml_dtypes.bfloat16)
    cast = make_node("Cast", [b], {"to": 1})
    assert cast is not None
    assert reference(cast, [b])[0].dtype == np.float32


@pytest.mark.slow
def test_backend_tests_are_cases() -> None:
    """Each has its node with a version, inputs and outputs; those of strings are told apart."""
    cases = all_cases()
    assert len({c.node.operator for c in cases}) > 150
    assert all(isinstance(c.node, Node) and c.node.version >= 1 for c in cases)
    (relu,) = cases_for("Relu")
    np.testing.assert_array_equal(relu.outputs[0], np.maximum(relu.inputs[0], 0))
    assert relu.is_numeric
    texts = [c for c in cases if any(x is not None and x.dtype == STRING for x in c.inputs)]
    assert texts
    assert not any(c.is_numeric for c in texts)


@pytest.mark.slow
def test_forms_of_a_case() -> None:
    """First only what kernels must know is constant, then all but the first input, then nothing."""
    case = next(c for c in cases_for("Reshape") if len(c.inputs) == 2)
    (as_known, arrays), *rest = forms_of(case, "nobody")
    assert [v.is_constant for v in as_known.body.nodes[0].inputs if v] == [False, True]
    assert len(arrays) == 1
    assert [len(a) for _, a in rest] == [2]
    add = cases_for("Add")[0]
    assert [len(a) for _, a in forms_of(add, "nobody")] == [2, 1]
    assert dtype_name(as_known.params[0].dtype) == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("op_type", ["LayerNormalization", "Dropout", "MaxPool"])
def test_outputs_that_are_left_out(op_type: str) -> None:
    """The reference gives one array for each output that the node lists, in order."""
    case = max(cases_for(op_type), key=lambda c: len(c.outputs))
    listed = [v for v in case.node.outputs if v is not None]
    assert len(reference(case.node, case.inputs)) == len(listed)
