"""Types of results where the onnx package has them wrong."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.random_graphs import F32
from xrt_core.errors import ShapeError
from xrt_core.ir import inference
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.types import TensorType


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...nh,...mh->...nm", [(3, 1, 4, 8), (1, 3, 5, 8)]),
        ("a...b,...->b...", [(2, 1, 3, 4), (5, 3)]),
        ("...ij,...jk", [(2, 1, 4), (1, 4, 3)]),
        ("ij,ij->ji", [(1, 4), (3, 1)]),
        ("ij,ij", [(1, 4), (3, 1)]),
        ("ii->i", [(3, 3)]),
    ],
)
def test_einsum_broadcasts(equation: str, shapes: list[tuple[int, ...]]) -> None:
    """Sizes of letters and of an ellipsis are those that numpy's einsum gives."""
    inputs = [Value("", TensorType(F32, s)) for s in shapes]
    node = Node("Einsum", inputs, [Value()], {"equation": equation}, version=12)
    (found,) = infer_types(node)
    assert found == TensorType(F32, np.einsum(equation, *map(np.ones, shapes)).shape)


@pytest.mark.parametrize("op_type", ["GreaterOrEqual", "LessOrEqual"])
def test_comparisons_of_opset_12_broadcast(op_type: str) -> None:
    """A model's whole inference sees their shape, through their function; that of a node does not."""
    inputs = [Value("", TensorType(F32, s)) for s in ((2, 1, 3), (4, 1))]
    assert infer_types(Node(op_type, inputs, [Value()], version=12)) == (TensorType(np.dtype(bool), (2, 4, 3)),)
    inputs[1] = Value("", TensorType(F32, (5,)))
    with pytest.raises(ShapeError):
        infer_types(Node(op_type, inputs, [Value()], version=12))


def test_no_operator_is_without_inference() -> None:
    """Of those that onnx leaves without, in a version that models may have, this module has a rule."""
    left = {
        s.name
        for s in onnx.defs.get_all_schemas_with_history()
        if not s.domain and s.since_version >= 7 and not s.has_type_and_shape_inference_function
    }
    assert left - {op for _, op in inference._RULES} == {"Compress"}  # whose result depends on data
