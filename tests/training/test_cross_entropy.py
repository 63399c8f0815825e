"""The named loss cross_entropy: its options against the formula, and labels that do not fit it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import GradientError, InputError, OptionError
from xrt_core.training import SGD, TrainModule

F = np.float32
RNG = np.random.default_rng(0)
LABELS = np.array([0, 2, -100, 1, 2, -100])
WEIGHTS = (0.5, 2.0, 1.25)


class Scores(xrt.Graph):
    """Scores that are variables, so that their gradient is seen."""

    def __init__(self, shape: tuple[int, ...] = (6, 3)) -> None:
        self.scores = np.random.default_rng(1).standard_normal(shape).astype(F)

    def build(self, x: Any) -> Any:
        return self.scores + x * 0.0


def formula(scores: np.ndarray, labels: np.ndarray, smoothing: float, weights: Any, ignored: int | None) -> float:
    """Sample by sample, for scores (N, C, ...)."""
    w = np.ones(scores.shape[1]) if weights is None else np.array(weights)
    scores = np.moveaxis(scores, 1, -1).reshape(-1, scores.shape[1]).astype(np.float64)
    total = count = 0.0
    for row, label in zip(scores, labels.reshape(-1), strict=True):
        if label != ignored:
            log = row - np.log(np.exp(row).sum())
            total -= (1 - smoothing) * w[label] * log[label] + smoothing / len(row) * (w * log).sum()
            count += w[label]
    return total / count if count else 0.0


@pytest.mark.parametrize(("smoothing", "weights"), [(0.0, None), (0.2, None), (0.2, WEIGHTS)])
@pytest.mark.parametrize("labels", [LABELS, np.abs(LABELS) % 3, np.full(6, -100), LABELS.reshape(2, 3)],
                         ids=["some ignored", "all count", "none counts", "over places"])  # fmt: skip
def test_options(labels: np.ndarray, smoothing: float, weights: Any) -> None:
    """The loss is the formula's, and a step goes down its slope."""
    model = Scores((6, 3) if labels.ndim == 1 else (2, 3, 3))
    before = model.scores.copy()
    options = {"label_smoothing": smoothing, "class_weights": weights}
    t = TrainModule(model, loss="cross_entropy", loss_options=options, optimizer=SGD(1.0), engine="host")
    found = t.step(x=np.zeros((1,) * before.ndim, F), labels=labels)
    np.testing.assert_allclose(found, formula(before, labels, smoothing, weights, -100), rtol=1e-5, atol=1e-7)
    gradient = before - t.parameters()["scores"]
    at = (1, 2, *[0] * (before.ndim - 2))
    both = []
    for sign in (1, -1):
        moved = before.astype(np.float64)
        moved[at] += sign * 1e-4
        both.append(formula(moved, labels, smoothing, weights, -100))
    np.testing.assert_allclose(gradient[at], (both[0] - both[1]) / 2e-4, rtol=1e-3, atol=1e-5)


def test_probabilities() -> None:
    """Floats of the shape of the scores are probabilities; one-hot ones give what class numbers give."""
    numbers = np.abs(LABELS) % 3
    for options in ({}, {"label_smoothing": 0.1}):
        losses = [
            TrainModule(
                Scores(), loss="cross_entropy", loss_options=options, optimizer=SGD(1.0), engine="host"
            ).step(x=np.zeros((1, 1), F), labels=labels)
            for labels in (numbers, numbers.astype(np.int8), np.eye(3)[numbers])
        ]  # fmt: skip
        np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (LABELS[:, None], r"shape \[6, 1\]; the scores \[6, 3\] take .* shape \[6\]: labels.reshape\(\(6,\)\)"),
        (LABELS.astype(F), r"are float32\[6\]; class numbers are integers of shape \[6\] \(labels.astype\('int64'\)"),
        (LABELS[:4], r"are of shape \[4\]; the scores \[6, 3\] take class numbers of shape \[6\]"),
        (np.eye(3, dtype=int)[np.zeros(6, int)], r"or probabilities as floats: labels.astype\('float32'\)"),
    ],
)
def test_labels_that_do_not_fit(labels: np.ndarray, match: str) -> None:
    """The message says what the scores take, and how to get it."""
    t = TrainModule(Scores(), loss="cross_entropy", optimizer=SGD(1.0), engine="host")
    with pytest.raises(InputError, match=match):
        t.step(x=np.zeros((1, 1), F), labels=labels)


def test_options_that_do_not_fit() -> None:
    """Options are named, and are those of the loss."""

    def made(loss: Any, **options: Any) -> TrainModule:
        return TrainModule(Scores(), loss=loss, loss_options=options, optimizer=SGD(1.0), engine="host")

    with pytest.raises(OptionError, match="has no option 'smoothing'; it takes ignore_index, label_smoothing"):
        made("cross_entropy", smoothing=0.1)
    with pytest.raises(OptionError, match="loss_options: they are those of cross_entropy, mse"):
        made(lambda y: y.mean(), label_smoothing=0.1)
    for options, match in (({"label_smoothing": 1.0}, "below 1"), ({"class_weights": [1.0]}, "it takes 3 numbers")):
        with pytest.raises(OptionError, match=match):
            made("cross_entropy", **options).step(x=np.zeros((1, 1), F), labels=LABELS)


class OwnLoss(Scores):
    """The operator itself as loss, without a check of shapes before it."""

    def build(self, x: Any, labels: Any) -> Any:
        scores = super().build(x)
        xrt.ops.SoftmaxCrossEntropyLoss(scores, labels, outputs=1).backward()
        return scores


def test_labels_of_the_operator() -> None:
    """Labels of another rank are named, not the gradient rule that they break."""
    t = TrainModule(OwnLoss(), optimizer=SGD(1.0), engine="host")
    with pytest.raises(GradientError, match=r"labels are of shape \[6, 1\].*class numbers are of shape \[6\]: reshape"):
        t.step(x=np.zeros((1, 1), F), labels=np.zeros((6, 1), np.int64))


def test_frozen_arrays_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """What `trainable` leaves out on purpose is not told as an array that `build` does not read."""

    class Two(Scores):
        def __init__(self) -> None:
            super().__init__()
            self.shift = np.ones(3, F)

        def build(self, x: Any) -> Any:
            return super().build(x) + self.shift

    t = TrainModule(Two(), loss="cross_entropy", optimizer=SGD(1.0), engine="host", trainable="sh*")
    t.step(x=np.zeros((1, 1), F), labels=LABELS)
    assert t.variables == ("shift",)
    assert not caplog.records
