"""Exports of trained models: read by ONNX Runtime, for batches of any size, without what only the loss needs."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import pytest

import xrt_core as xrt
from xrt_core.errors import ExportError
from xrt_core.frontends import ops
from xrt_core.training import SGD, TrainModule

ort = pytest.importorskip("onnxruntime")
F = np.float32


class Classifier(xrt.Graph):
    """Two layers; `loss` says who computes the loss: TrainModule, or `build`."""

    def __init__(self, loss: str = "") -> None:
        rng = np.random.default_rng(0)
        self.w, self.g = rng.standard_normal((5, 3)).astype(F), np.ones(3, F)
        self.loss = loss

    def scores(self, x: Any) -> Any:
        """Of three classes."""
        return ops.LayerNormalization(ops.Gelu(x @ self.w), self.g)

    def build(self, x: Any) -> Any:
        return self.scores(x)


class Backward(Classifier):
    """With a loss of its own."""

    def build(self, x: Any, labels: Any) -> Any:
        y = self.scores(x)
        ops.SoftmaxCrossEntropyLoss(y, labels, outputs=1).backward()
        return y


class Fixed(Classifier):
    """Made for the size that it sees."""

    def build(self, x: Any) -> Any:
        return self.scores(x) + np.arange(x.shape[0], dtype=F).reshape(-1, 1)


def trained(graph: Classifier) -> TrainModule:
    """After a step of four examples."""
    options = {} if isinstance(graph, Backward) else {"loss": "cross_entropy"}
    t = TrainModule(graph, optimizer=SGD(0.1), engine="host", **options)
    t.step(x=np.random.default_rng(1).standard_normal((4, 5)).astype(F), labels=np.array([0, 1, 2, 0]))
    return t


@pytest.mark.parametrize("made", [Classifier, Backward])
def test_any_batch(made: type[Classifier], tmp_path: pathlib.Path) -> None:
    """In the opset of its newest operator, with the scores' inputs alone, also after the graph got the variables."""
    t = trained(graph := made())
    graph.load_parameters(t.parameters())
    t.export(tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    assert [o.version for o in model.opset_import] == [20]  # of Gelu
    assert model.ir_version == 9
    assert [n.op_type for n in model.graph.node] == ["MatMul", "Gelu", "LayerNormalization"]
    session = ort.InferenceSession(tmp_path / "m.onnx")
    assert [(i.name, i.shape) for i in session.get_inputs()] == [("x", ["batch", 5])]
    assert [o.shape for o in session.get_outputs()] == [["batch", 3]]
    x = np.random.default_rng(2).standard_normal((7, 5)).astype(F)
    (got,) = session.run(None, {"x": x})
    scores = made.__mro__[1 if made is Backward else 0]()
    scores.load_parameters(t.parameters())
    np.testing.assert_allclose(got, xrt.XRTModule(scores, engine="host")(x), rtol=1e-5, atol=1e-6)


def test_a_graph_that_is_made_for_one_size(tmp_path: pathlib.Path) -> None:
    """Keeps it."""
    trained(Fixed()).export(tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx")
    assert session.get_inputs()[0].shape == [4, 5]


def test_an_opset(tmp_path: pathlib.Path) -> None:
    """A newer one is taken; one that lacks an operator is refused, and nothing is written."""
    t = trained(Classifier())
    t.export(tmp_path / "m.onnx", opset=22)
    assert [o.version for o in onnx.load(tmp_path / "m.onnx").opset_import] == [22]
    with pytest.raises(ExportError, match=r"opset=18: Gelu of version 20 is in opsets 20 to .* are in opset 20"):
        t.export(tmp_path / "n.onnx", opset=18)
    with pytest.raises(ExportError, match="opset='18': it takes the number"):
        t.export(tmp_path / "n.onnx", opset="18")  # type: ignore[arg-type]
    assert not (tmp_path / "n.onnx").exists()
