"""The interface of ONNX's backends; tests/conformance runs ONNX's own tests through it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import xrt_core.onnx_backend as backend
from xrt_core.errors import XRTError
from xrt_core.frontends.onnx_export import export_model
from xrt_core.module import XRTModule
from xrt_core.testing import functions


def test_a_model_is_run_by_position_and_by_name() -> None:
    """Results are tuples, and those of the module; an input that stands alone need not be in a sequence."""
    function, x = functions.chain()
    prepared = backend.prepare(export_model(function.body), engine="host")
    want = XRTModule(function.body, engine="host")(x)
    for inputs in ([x], {"x": x}, x):
        (y,) = prepared.run(inputs)
        np.testing.assert_array_equal(y, want)


def test_a_node_is_run_at_the_version_that_is_given() -> None:
    """ReduceSum had its axes as an attribute up to version 11, and has them as an input."""
    x, axes = np.ones((2, 3), np.float32), np.array([1], np.int64)
    old = onnx.helper.make_node("ReduceSum", ["x"], ["y"], axes=[1], keepdims=0)
    new = onnx.helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    for (y,) in (
        backend.run_node(old, [x], opset_version=11, engine="host"),
        backend.run_node(new, [x, axes], engine="host"),
    ):
        np.testing.assert_array_equal(y, [3, 3])


def test_devices_and_models_that_are_taken() -> None:
    """The host's device always is; a model that no module takes is not compatible, and preparing it is XRT's error."""
    assert backend.supports_device("CPU")
    assert backend.supports_device("CPU:0")
    assert not backend.supports_device("ABACUS")
    model = export_model(functions.chain()[0].body)
    assert backend.is_compatible(model, engine="host")
    model.graph.node[0].input[0] = "nobody"
    assert not backend.is_compatible(model, engine="host")
    with pytest.raises(XRTError, match="nobody"):
        backend.prepare(model, engine="host")
