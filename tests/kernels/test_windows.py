"""The geometry of sliding windows against the shape inference of onnx."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.node_cases import run_numpy
from tests.kernels.single_node import node_case
from xrt_core.errors import ShapeError
from xrt_core.host.executor import host_kernel
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.types import TensorType
from xrt_core.kernels.windows import Windows, pad_with

OPERATORS = [("MaxPool", 22), ("AveragePool", 22), ("LpPool", 22), ("Conv", 11), ("ConvTranspose", 11)]


def inferred_shape(op: str, version: int, inputs: list[np.ndarray], attributes: dict[str, Any]) -> tuple[int, ...]:
    """The output shape that onnx infers."""
    node = onnx.helper.make_node(op, ["x", "w"][: len(inputs)], ["y"], **attributes)
    infos = [onnx.helper.make_tensor_value_info(n, 1, a.shape) for n, a in zip("xw", inputs, strict=False)]
    graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_empty_tensor_value_info("y")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    dims = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output[0].type.tensor_type.shape.dim
    return tuple(d.dim_value for d in dims)


@pytest.mark.parametrize(("op", "version"), OPERATORS)
def test_shapes_are_the_inferred_ones(op: str, version: int) -> None:
    """For random kernels, strides, dilations and paddings the kernels give the shapes that onnx infers."""
    draw = random.Random(7)
    for _ in range(60):
        kernel = [draw.randint(1, 3) for _ in range(2)]
        dilations = [draw.randint(1, 2) for _ in range(2)]
        attributes: dict[str, Any] = {
            "kernel_shape": kernel,
            "strides": [draw.randint(1, 4) for _ in range(2)],
            "dilations": dilations,
        }
        auto_pad = draw.choice(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
        if auto_pad != "NOTSET":
            attributes["auto_pad"] = auto_pad
        else:
            reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
            attributes["pads"] = [draw.randint(0, reach[i % 2] // 2) for i in range(4)]
            if "Pool" in op:
                attributes["ceil_mode"] = draw.randint(0, 1)
        inputs = [np.zeros((1, 2, draw.randint(5, 9), draw.randint(5, 9)), np.float32)]
        if "Conv" in op:
            inputs.append(np.zeros((2, 2, *kernel), np.float32))
        (y,) = run_numpy(node_case(op, version, inputs, **attributes))
        assert y.shape == inferred_shape(op, version, inputs, attributes), (inputs[0].shape, attributes)


def test_positions_and_taps_meet() -> None:
    """Coordinates count from the unpadded input; taps slice the padded one at the same places."""
    windows = Windows((6,), (2,), (3,), (2,), (1,), (1,), (2,))
    np.testing.assert_array_equal(windows.positions(0), [[-1, 1], [2, 4]])
    padded = np.arange(-1, 7)
    taps = [padded[where] for (where,) in windows.taps()]
    np.testing.assert_array_equal(np.stack(taps, axis=1), windows.positions(0))
    assert windows.is_padded
    assert windows.overhang == (1,)


def test_padding_copies_only_where_it_must() -> None:
    """Padding by nothing gives the array itself; the original is never written to."""
    x = np.ones((1, 2, 3), np.float32)
    assert pad_with(np, x, (0,), (0,), 0) is x
    y = pad_with(np, x, (1,), (2,), -np.inf)
    np.testing.assert_array_equal(y[0, 0], [-np.inf, 1, 1, 1, -np.inf, -np.inf])


_AXIS = st.tuples(
    st.integers(0, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2)
)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool", "Conv"])
@given(st.lists(_AXIS, min_size=1, max_size=2))
def test_as_many_windows_as_fit(operator: str, axes: list[tuple[int, ...]]) -> None:
    """Type inference and the kernel count those that fit. Where none does, both say so: onnx's inference finds one."""
    size, kernel, strides, dilations, begin, end = zip(*axes, strict=True)
    fits = tuple(sum(o * s + (k - 1) * d < b + n + e for o in range(20)) for n, k, s, d, b, e in axes)
    x, y = Value("x", TensorType(np.dtype(np.float32), (2, 3, *size))), Value("y")
    arrays = [np.ones((2, 3, *size), np.float32)]
    inputs = [x]
    if operator == "Conv":
        arrays.append(np.ones((4, 3, *kernel), np.float32))
        inputs.append(Value("w", TensorType(np.dtype(np.float32), arrays[1].shape)))
    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": begin + end}
    node = Node(operator, inputs, [y], attributes, version=22)
    want = (2, 4 if operator == "Conv" else 3, *fits)
    if 0 in fits:
        with pytest.raises(ShapeError, match=rf"the kernel covers \d+ elements of axis {2 + fits.index(0)}"):
            infer_types(node)
        with pytest.raises(ShapeError, match="the kernel covers"):
            host_kernel(node)(arrays)
        return
    (t,) = infer_types(node)
    assert isinstance(t, TensorType)
    assert t.shape == want
    assert host_kernel(node)(arrays)[0].shape == want
