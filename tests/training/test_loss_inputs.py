"""How the parameters of a loss find the outputs of a model and the arrays of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import xrt_core as xrt
from xrt_core.errors import InputError, OptionError
from xrt_core.training import SGD, TrainModule


class Heads(xrt.Graph):
    """Two outputs: a line, and its negative."""

    def __init__(self) -> None:
        self.w = np.ones((2, 1), np.float32)

    def build(self, x: Any) -> Any:
        y = x @ self.w
        return y, -y


def two_heads() -> onnx.ModelProto:
    """The same as a model with outputs `y` and `z`."""
    w = numpy_helper.from_array(np.ones((2, 1), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Neg", ["y"], ["z"])]
    x, y, z = (helper.make_tensor_value_info(n, 1, ["n", k]) for n, k in (("x", 2), ("y", 1), ("z", 1)))
    return helper.make_model(
        helper.make_graph(nodes, "heads", [x], [y, z], [w]), opset_imports=[helper.make_opsetid("", 21)]
    )


X = np.array([[1, 2], [3, 4]], np.float32)
T = np.array([[1], [2]], np.float32)
TO_Y, TO_Z = ((s * X.sum(1, keepdims=True) - T) for s in (1, -1))


@pytest.mark.parametrize(
    ("loss", "given", "want"),
    [
        ("mse", {"target": T}, np.mean(TO_Y**2)),
        (lambda z, target: ((z - target) ** 2).mean(), {"target": T}, np.mean(TO_Z**2)),
        (lambda a, b, target: ((b - target) ** 2).mean(), {"target": T}, np.mean(TO_Z**2)),
        (lambda a, target: ((a - target) ** 2).mean(), {"target": T}, np.mean(TO_Y**2)),
        (lambda *ys, target: ((ys[1] - target) ** 2).mean(), {"target": T}, np.mean(TO_Z**2)),
        (lambda a, *, target: ((a - target) ** 2).mean(), {"target": T}, np.mean(TO_Y**2)),
        (lambda a, x: ((a - x) ** 2).mean(), {}, np.mean((X.sum(1, keepdims=True) - X) ** 2)),
        (lambda a, b: (a * b).mean(), {}, -np.mean(X.sum(1) ** 2)),
    ],
    ids=["named", "by name", "in order", "given", "all outputs", "keyword", "a model's input", "two outputs"],
)  # fmt: skip
@pytest.mark.parametrize("model", [two_heads, Heads], ids=["file", "written"])
def test_parameters_of_a_loss(model: Any, loss: Any, given: dict[str, np.ndarray], want: float) -> None:
    """Outputs by name or in order, the step's arrays by name, whatever the number of outputs."""
    if model is Heads and getattr(loss, "__name__", "") == "<lambda>" and loss.__code__.co_varnames[0] == "z":
        pytest.skip("outputs of a written graph have no names")
    t = TrainModule(model(), loss=loss, optimizer=SGD(0.01), engine="host")
    np.testing.assert_allclose(t.step(x=X, **given), want, rtol=1e-6)
    if given:  # by position: the model's inputs first
        t = TrainModule(model(), loss=loss, optimizer=SGD(0.01), engine="host")
        np.testing.assert_allclose(t.step(X, T), want, rtol=1e-6)


def test_an_output_that_is_chosen() -> None:
    """`output` says which one a loss takes first."""
    for output in ("z", 1, -1):
        t = TrainModule(two_heads(), loss="mse", output=output, optimizer=SGD(0.01), engine="host")
        np.testing.assert_allclose(t.step(x=X, target=T), np.mean(TO_Z**2), rtol=1e-6)
    with pytest.raises(OptionError, match="output 'q': the model has the outputs y, z"):
        TrainModule(two_heads(), loss="mse", output="q", optimizer=SGD(0.01), engine="host")
    with pytest.raises(OptionError, match="output='z' says what a loss function takes"):
        TrainModule(two_heads(), output="z", optimizer=SGD(0.01), engine="host")


@pytest.mark.parametrize("model", [two_heads, Heads], ids=["file", "written"])
def test_a_target_that_is_not_given(model: Any) -> None:
    """An input of the loss is never taken from the outputs instead."""
    for loss in ("mse", lambda y, *, target: ((y - target) ** 2).mean(), lambda y, a, target: (y + a + target).sum()):
        t = TrainModule(model(), loss=loss, optimizer=SGD(0.01), engine="host")
        with pytest.raises(InputError, match="missing input 'target'|missing input 'a', 'target'"):
            t.step(x=X)
        assert t.step_count == 0
