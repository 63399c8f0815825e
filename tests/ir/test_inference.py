"""Types of results where the onnx package has them wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.random_graphs import F32
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
