"""What users do around the steps: copies, parameters before the first step, seeds, names, engines that take nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import OptionError
from xrt_core.frontends import ops
from xrt_core.training import Adam, TrainModule

F = np.float32
X = np.random.default_rng(0).standard_normal((6, 4)).astype(F)
LABELS = np.arange(6) % 3


class Net(xrt.Graph):
    """A layer with Dropout, and a scale that is not trained."""

    def __init__(self) -> None:
        self.w = np.random.default_rng(1).standard_normal((4, 3)).astype(F)
        self.scale = xrt.Variable(0.5, trained=False)

    def build(self, x: Any) -> Any:
        return ops.Dropout(x @ self.w * self.scale, outputs=1)


def made(loss: Any = "cross_entropy", **options: Any) -> TrainModule:
    """A training of it on the host."""
    return TrainModule(Net(), **{"loss": loss, "optimizer": Adam(0.1), "engine": "host", **options})


def test_deepcopy() -> None:
    """A copy goes on as the original would, and neither changes the other."""
    t = made()
    fresh = copy.deepcopy(t)
    assert fresh.step(X, LABELS) == t.step(X, LABELS)
    other = copy.deepcopy(t)
    before = t.state_dict()
    losses = [other.step(X, LABELS) for _ in range(2)]
    assert all(np.array_equal(a, t.state_dict()[n]) for n, a in before.items())
    assert losses == [t.step(X, LABELS) for _ in range(2)]


def test_parameters() -> None:
    """Before the first step they are the model's arrays; the graph takes them back, those that are frozen too."""
    t = made()
    model = Net()
    np.testing.assert_array_equal(t.parameters()["w"], model.w)
    t.step(X, LABELS)
    model.load_parameters(t.parameters())
    np.testing.assert_array_equal(model.w, t.state_dict()["w"])
    assert not np.array_equal(model.w, Net().w)


def test_seeds() -> None:
    """None draws one, which a checkpoint's metadata holds; others are whole numbers of 32 bits."""
    assert made(seed=None)._seed != made(seed=None)._seed
    for seed in ("1", 2**31, True, 1.5):
        with pytest.raises(OptionError, match="seed=.* takes a whole number from -2"):
            made(seed=seed)


@pytest.mark.parametrize("name", ["crossentropy", "Cross-Entropy", "mes"])
def test_a_wrong_name_of_a_loss(name: str) -> None:
    """It is refused when the module is made, with the name that was meant."""
    with pytest.raises(OptionError, match="did you mean '(cross_entropy|mse)'"):
        made(name)
    with pytest.raises(OptionError, match="one of cross_entropy, mse, or an output: "):
        made("nothing_like_it").step(X)


def test_a_loss_that_raises() -> None:
    """Its error comes as it is, and the next step is the first."""

    def loss(scores: Any, *, labels: Any) -> Any:
        return {}["absent"]

    t = made(loss)
    with pytest.raises(KeyError, match="absent"):
        t.step(X, LABELS)
    assert t.step_count == 0


def test_dir_of_the_optimizers() -> None:
    """It lists what is there to use."""
    assert "AdamW" in dir(xrt.optim)
    assert "np" not in dir(xrt.optim)


def test_an_engine_that_takes_no_node(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once that an engine that was asked for has no part in the training, and why."""
    pytest.importorskip("xrt_openvino")
    t = made(engine="openvino")
    t.step(X, LABELS)
    t.step(X[:3], LABELS[:3])
    (record,) = caplog.records
    assert "the engine openvino takes no node of the training step (openvino: " in record.getMessage()
    assert "inference only" in record.getMessage()
