"""Sampling: how the next token of each sequence is chosen from its scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Final

import numpy as np

from xrt_core.errors import ExecutionError, OptionError


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature: what scores are divided by before the draw; 0 takes the best token. top_k: the draw is among so many
    best tokens, 0: all. top_p: among the fewest best ones whose probabilities reach this sum. repetition_penalty: what
    positive scores of tokens that are there already are divided by, and negative ones multiplied with (Keskar et al.,
    CTRL, 2019).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raise OptionError for what is no number, or out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise OptionError(f"{field.name}={value!r}: give a finite number")
        rules = (
            ("temperature", self.temperature >= 0, "a number of at least 0; 0 takes the best token"),
            ("top_k", self.top_k >= 0 and self.top_k % 1 == 0, "an integer of at least 0; 0: all tokens"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "a number above 0; 1 is for none"),
        )
        for name, is_right, wanted in rules:
            if not is_right:
                raise OptionError(f"{name}={getattr(self, name)!r}: give {wanted}")

    def choose(self, scores: np.ndarray, tokens: list[np.ndarray], random: np.random.Generator) -> np.ndarray:
        """The next token of each sequence, int64 [batch]. scores: floats [batch, vocabulary]. tokens: of each sequence
        so far, for the repetition penalty.

        Raises ExecutionError where there is NaN among the scores.
        """
        if self.temperature == 0 and self.repetition_penalty == 1.0:
            return _best(scores)
        if np.isnan(np.maximum.reduce(scores, axis=None)):
            raise ExecutionError(_NAN)
        scores = scores.astype(np.float32, copy=True)
        if self.repetition_penalty != 1.0:
            for row, seen in zip(scores, tokens, strict=True):
                known = np.unique(seen)
                s = row[known]
                row[known] = np.where(s > 0, s / self.repetition_penalty, s * self.repetition_penalty)
        if self.temperature == 0:
            return _best(scores)
        order = np.argsort(-scores, axis=-1, kind="stable")
        best = np.take_along_axis(scores, order, -1).astype(np.float64) / self.temperature
        if self.top_k:
            best[:, int(self.top_k) :] = -np.inf
        shares = np.exp(best - best[:, :1])
        shares /= shares.sum(-1, keepdims=True)
        sums = shares.cumsum(-1)
        shares[sums - shares >= self.top_p] = 0.0  # the best one stays: nothing is before it
        sums = shares.cumsum(-1)
        drawn = random.random((len(scores), 1)) * sums[:, -1:]
        place = np.minimum((sums <= drawn).sum(-1), (shares > 0).sum(-1) - 1)
        return np.asarray(np.take_along_axis(order, place[:, None], -1)[:, 0], np.int64)


_NAN: Final = "generate: there is NaN among the scores of the next token, and none can be chosen"


def _best(scores: np.ndarray) -> np.ndarray:
    chosen: np.ndarray = scores.argmax(-1)  # int64; NaN counts as the greatest
    for row, i in enumerate(chosen.tolist()):
        best = scores.item(row, i)
        if best != best:
            raise ExecutionError(_NAN)
    return chosen
