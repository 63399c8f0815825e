"""Models whose variables are of 16 bits: trained in float32, computed and exported in their own type."""

from __future__ import annotations

import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import xrt_core as xrt
from xrt_core.errors import CheckpointError
from xrt_core.training import SGD, Adam, AdamW, TrainModule

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


class Line(xrt.Graph):
    """Eight numbers to one, in a narrow type."""

    def __init__(self, dtype: np.dtype) -> None:
        self.w = (np.arange(8).reshape(8, 1) / 8).astype(dtype)
        self.b = np.zeros(1, dtype)

    def build(self, x: Any) -> Any:
        return x @ self.w + self.b


def model(dtype: np.dtype) -> onnx.ModelProto:
    """The same as a file."""
    line, elem = Line(dtype), helper.np_dtype_to_tensor_dtype(dtype)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, elem, ["n", k]) for n, k in (("x", 8), ("y", 1)))
    weights = [numpy_helper.from_array(a, n) for n, a in (("w", line.w), ("b", line.b))]
    return helper.make_model(
        helper.make_graph(nodes, "line", [x], [y], weights), opset_imports=[helper.make_opsetid("", 21)]
    )


def batch(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Numbers and what a known line makes of them."""
    x = np.random.default_rng(0).standard_normal((32, 8))
    return {"x": x.astype(dtype), "target": (x.sum(1, keepdims=True) / 4).astype(dtype)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", [Adam, AdamW], ids=["Adam", "AdamW"])
@pytest.mark.parametrize("made", [Line, model], ids=["written", "file"])
def test_training_learns(made: Any, optimizer: Any, dtype: np.dtype, tmp_path: pathlib.Path) -> None:
    """Through steps that are smaller than the spacing of the type; the export has the model's types."""
    t = TrainModule(made(dtype), loss="mse", optimizer=optimizer(2e-2), engine="host")
    losses = [float(t.step(**batch(dtype))) for _ in range(60)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] / 4
    state = t.state_dict()
    assert {a.dtype for n, a in state.items() if n in ("w", "b") or n.startswith("optimizer/")} == {
        np.dtype(np.float32)
    }
    assert {a.dtype for a in t.parameters().values()} == {dtype}
    t.export(tmp_path / "trained.onnx")
    graph = onnx.load(tmp_path / "trained.onnx").graph
    assert {i.data_type for i in graph.initializer} == {helper.np_dtype_to_tensor_dtype(dtype)}


def test_updates_below_the_spacing_are_kept() -> None:
    """A float16 1.0 moves in steps of 0.001; a thousand steps of 1e-5 make 0.01 all the same."""

    class One(xrt.Graph):
        def __init__(self) -> None:
            self.w = np.ones((1, 1), np.float16)

        def build(self, x: Any) -> Any:
            return (x @ self.w).sum()

    t = TrainModule(One(), optimizer=SGD(1e-5), engine="host")
    for _ in range(1000):
        t.step(np.ones((1, 1), np.float16))
    np.testing.assert_allclose(t.state_dict()["w"], 0.99, atol=5e-5)
    np.testing.assert_allclose(t.parameters()["w"].astype(np.float32), 0.99, atol=5e-4)


def test_states_are_of_float32(tmp_path: pathlib.Path) -> None:
    """One is saved and goes on; one in the model's own type does not fit."""
    dtype = DTYPES[0]
    one, other = (TrainModule(Line(dtype), loss="mse", optimizer=Adam(1e-3), engine="host") for _ in range(2))
    for _ in range(3):
        one.step(**batch(dtype))
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert one.step(**batch(dtype)) == other.step(**batch(dtype))
    narrow = {n: a.astype(dtype) if n == "w" else a for n, a in one.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"'w' is float16\[8, 1\], not float32\[8, 1\]"):
        other.load_state_dict(narrow)


def test_float16_is_scaled() -> None:
    """As with precision="fp16": gradients of float16 underflow; those of bfloat16 do not."""
    assert "training/loss_scale" in _state(DTYPES[0])
    assert "training/loss_scale" not in _state(DTYPES[1])


def _state(dtype: np.dtype) -> dict[str, np.ndarray]:
    return TrainModule(model(dtype), loss="mse", optimizer=SGD(0.1), engine="host").state_dict()
