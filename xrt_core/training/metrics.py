"""Metrics: numbers that say how good predictions are, gathered over the batches of an evaluation."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from xrt_core.errors import InputError, OptionError

Function = Callable[[np.ndarray, np.ndarray], Any]


class Metric(ABC):
    """Gathers batches by `update(prediction, target)`; `result()` is the number for all of them."""

    name: str

    @abstractmethod
    def update(self, prediction: np.ndarray, target: np.ndarray) -> None:
        """Add a batch. Raises InputError for arrays that do not fit each other."""

    @abstractmethod
    def result(self) -> float:
        """Return the number for all batches so far; NaN for none."""


class _Mean(Metric):
    """The mean of a function of prediction and target, by examples."""

    def __init__(self, name: str, function: Function, finish: Callable[[float], float] = float) -> None:
        self.name, self._function, self._finish = name, function, finish
        self._sum = self._count = 0.0

    def update(self, prediction: np.ndarray, target: np.ndarray) -> None:
        found = np.asarray(self._function(prediction, target), np.float64)
        weight = found.size if found.ndim else max(len(prediction), 1) if prediction.ndim else 1
        self._sum += float(found.sum()) * (1 if found.ndim else weight)
        self._count += weight

    def result(self) -> float:
        return self._finish(self._sum / self._count) if self._count else float("nan")


class _F1(Metric):
    """The mean over the classes of 2 right / (predicted + actual); classes that never occur are left out."""

    name = "f1"

    def __init__(self) -> None:
        self._counts = np.zeros((3, 0))

    def update(self, prediction: np.ndarray, target: np.ndarray) -> None:
        chosen, actual = _classes(prediction, target)
        size = int(max(chosen.max(initial=-1), actual.max(initial=-1))) + 1
        if size > self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, size - self._counts.shape[1])))
        for row, labels in zip(self._counts, (chosen[chosen == actual], chosen, actual), strict=True):
            row += np.bincount(labels, minlength=len(row))

    def result(self) -> float:
        right, chosen, actual = self._counts
        there = chosen + actual > 0
        return float((2 * right[there] / (chosen + actual)[there]).mean()) if there.any() else float("nan")


def _classes(prediction: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chosen and the actual class of each example that counts; scores are (N, C, ...), or (N, ...) for two."""
    if (
        target.dtype.kind == "f"
        and target.shape == prediction.shape
        and prediction.ndim > 1
        and prediction.shape[1] > 1
    ):
        target = target.argmax(1)  # probabilities
    if prediction.ndim == target.ndim + 1:
        chosen = prediction.argmax(1)
    elif prediction.shape == target.shape:
        chosen = (prediction > 0).astype(np.int64)
    else:
        raise InputError(
            f"a metric of classes takes scores (N, C, ...) and labels (N, ...), or both of one shape; given are "
            f"{list(prediction.shape)} and {list(target.shape)}"
        )
    if chosen.shape != target.shape:
        raise InputError(f"the scores {list(prediction.shape)} do not fit labels of shape {list(target.shape)}")
    counts = target >= 0  # -100 is ignored
    return chosen[counts], target[counts].astype(np.int64)


def _accuracy(prediction: np.ndarray, target: np.ndarray) -> np.ndarray:
    chosen, actual = _classes(prediction, target)
    return np.atleast_1d(chosen == actual)


def _top(k: int) -> Function:
    def right(prediction: np.ndarray, target: np.ndarray) -> np.ndarray:
        if prediction.ndim != target.ndim + 1:
            raise InputError(f"top_{k} takes scores (N, C, ...) and labels (N, ...), not {list(target.shape)}")
        best = np.argsort(-prediction, axis=1, kind="stable")[:, :k]
        return np.atleast_1d((best == np.expand_dims(target, 1)).any(1)[target >= 0])

    return right


def _off(prediction: np.ndarray, target: np.ndarray) -> np.ndarray:
    if prediction.shape != target.shape:
        raise InputError(f"the prediction is of shape {list(prediction.shape)}, the target of {list(target.shape)}")
    return np.atleast_1d(prediction.astype(np.float64) - target)


_NAMED: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: _Mean("accuracy", _accuracy),
    "f1": _F1,
    "mae": lambda: _Mean("mae", lambda p, t: np.abs(_off(p, t))),
    "mse": lambda: _Mean("mse", lambda p, t: _off(p, t) ** 2),
    "rmse": lambda: _Mean("rmse", lambda p, t: _off(p, t) ** 2, lambda mean: float(np.sqrt(mean))),
}


def metrics_of(given: str | Function | Iterable[str | Function]) -> list[Metric]:
    """Return a fresh metric for each name ("accuracy", "top_5", "f1" (macro), "mae", "mse", "rmse") or function.

    A function takes prediction and target as arrays and returns a number for the batch, or one for each example.
    Raises OptionError for an unknown name.
    """
    made: list[Metric] = []
    for one in [given] if isinstance(given, str) or callable(given) else given:
        top = re.fullmatch(r"top_(\d+)", one) if isinstance(one, str) else None
        if callable(one):
            made.append(_Mean(getattr(one, "__name__", type(one).__name__), one))
        elif top is not None:
            made.append(_Mean(str(one), _top(int(top.group(1)))))
        elif one in _NAMED:
            made.append(_NAMED[one]())
        else:
            raise OptionError(f"metric {one!r}: it takes {', '.join(_NAMED)}, top_5 (any number), or a function")
    return made


__all__ = ["Metric", "metrics_of"]
