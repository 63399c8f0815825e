"""Models of opsets 17 and 18 with use_fp16 and use_bf16, on the CPU engines that read ONNX, against the host."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

import xrt_core as xrt
from tests.engine.test_opsets import lowered
from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions

pytestmark = pytest.mark.tiny_clusters  # the engines are to take what they can

BOUNDS = {"use_fp16": 2e-3, "use_bf16": 2e-2}
"""How far a probability may be off: some units in the last place of the dtype, after two products."""


def model(opset: int) -> ModelProto:
    """Conv, Relu, MaxPool, ReduceMean, MatMul, Softmax, as exporters write them in this opset."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((8, 3, 3, 3)) / 5,
        "b": rng.standard_normal(8),
        "f": rng.standard_normal((8, 5)),
    }
    constants = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    mean = helper.make_node("ReduceMean", ["p"], ["m"], axes=[2, 3], keepdims=0)
    if opset >= 18:
        mean = helper.make_node("ReduceMean", ["p", "axes"], ["m"], keepdims=0)
        constants.append(numpy_helper.from_array(np.array([2, 3], np.int64), "axes"))
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        mean,
        helper.make_node("MatMul", ["m", "f"], ["q"]),
        helper.make_node("Softmax", ["q"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 3, 8, 8]), ("y", [2, 5])))
    made = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], constants), opset_imports=[helper.make_opsetid("", opset)]
    )
    made.ir_version = 9
    checker.check_model(made)
    return made


def _usable(engine: str) -> None:
    if engine not in engines.names() or not engines.status(engine).available:
        pytest.skip(f"{engine} is not here")


@pytest.mark.parametrize("option", BOUNDS)
@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_lowered_models_agree_with_the_host(engine: str, opset: int, option: str) -> None:
    """Whatever the engine takes of the lowered graph, nothing fails, and the result is float32's but for rounding."""
    _usable(engine)
    m, x = model(opset), np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    want = np.asarray(xrt.XRTModule(m, engine="host")(x))
    module = xrt.XRTModule(m, engine=engine, **{option: True})
    np.testing.assert_allclose(np.asarray(module(x)), want, atol=BOUNDS[option], rtol=0)
    found = module.explain({"x": x})
    assert not found.errors
    assert "kept in float32: Softmax" in str(found)
    if (engine, option) == ("onnxruntime", "use_fp16"):
        assert "100% of nodes" in str(found)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_nodes_of_several_opsets_compile(engine: str) -> None:
    """Conv-22 between nodes of opset 17 is one model for the library, and computes as it should."""
    _usable(engine)
    function = lowered(np.float32)
    made = engines.get(engine).compiler("cpu", CompileOptions())
    run = made.compile(function, function.params, function.returns, ()).run
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 1, 4, 4)
    np.testing.assert_allclose(np.asarray(run([x])[0]), np.maximum(-2 * x, 0), rtol=1e-6)
