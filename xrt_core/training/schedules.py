"""Schedules: learning rates as functions of the step (from 0), for any optimizer and its groups.

    Adam(schedules.cosine(1e-3, steps=10_000, warmup=500))

Any function of a step number is a schedule, such as those of optax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xrt_core.errors import OptionError
from xrt_core.training.callbacks import Logs, Monitor, Trainer

Schedule = Callable[[int], float]


def constant(peak: float, warmup: int = 0) -> Schedule:
    """`peak`, after a linear rise over `warmup` steps."""
    return _warmed(peak, warmup, lambda step: peak)


def linear(peak: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """A linear rise to `peak` over `warmup` steps, then a linear fall to `end` at step `steps`."""
    return _warmed(peak, warmup, lambda step: peak + (end - peak) * _share(step, warmup, steps))


def cosine(peak: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """A linear rise to `peak` over `warmup` steps, then half a cosine down to `end` at step `steps`."""
    return _warmed(
        peak, warmup, lambda step: end + (peak - end) * (1 + math.cos(math.pi * _share(step, warmup, steps))) / 2
    )


def exponential(start: float, factor: float, every: int = 1, *, stairs: bool = False) -> Schedule:
    """`start` times `factor` to the power of step / `every`; with `stairs` in whole powers."""
    _count("every", every)
    return lambda step: start * factor ** (step // every if stairs else step / every)


def one_cycle(
    peak: float, steps: int, rise: float = 0.3, start: float | None = None, end: float | None = None
) -> Schedule:
    """Half a cosine from `start` (peak / 25) up to `peak` over the share `rise` of the steps, and one down to `end`
    (start / 10,000). Source: Smith and Topin, arXiv 1708.07120, as in PyTorch's OneCycleLR."""
    low = peak / 25 if start is None else start
    last = low / 1e4 if end is None else end
    top = rise * steps - 1

    def rate(step: int) -> float:
        if step <= top:
            return peak + (low - peak) * (1 + math.cos(math.pi * step / top)) / 2
        return last + (peak - last) * (1 + math.cos(math.pi * min((step - top) / (steps - 1 - top), 1.0))) / 2

    _count("steps", steps)
    return rate


class ReduceOnPlateau(Monitor):
    """A schedule and a callback of `TrainModule.fit` at once: the rate is multiplied by `factor` after each `patience`
    epochs without a better value of `monitor`. As the rate of an optimizer it is part of the training state."""

    def __init__(
        self, start: float, monitor: str = "val_loss", *, factor: float = 0.1, patience: int = 3, least: float = 0.0,
        mode: str | None = None, min_delta: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(monitor, mode, min_delta)
        self._rate, self._factor, self._patience, self._least, self._waited = start, factor, patience, least, 0

    def __call__(self, step: int) -> float:
        """The rate of now."""
        return self._rate

    def state_dict(self) -> Mapping[str, Any]:
        """See `Callback`."""
        return {**super().state_dict(), "rate": self._rate, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Callback`."""
        super().load_state_dict(state)
        self._rate, self._waited = float(state["rate"]), int(state["waited"])

    def on_epoch(self, trainer: Trainer, logs: Logs) -> None:
        self._waited = 0 if self._improved(logs) else self._waited + 1
        if self._waited >= self._patience:
            self._rate, self._waited = max(self._rate * self._factor, self._least), 0


def _share(step: int, warmup: int, steps: int) -> float:
    return min((step - warmup) / max(steps - warmup, 1), 1.0)


def _warmed(peak: float, warmup: int, after: Schedule) -> Schedule:
    if not isinstance(warmup, int) or warmup < 0:
        raise OptionError(f"warmup={warmup!r}: it takes a number of steps")
    return lambda step: peak * (step + 1) / (warmup + 1) if step < warmup else after(step)


def _count(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}: it takes a whole number of at least 1")


__all__ = ["ReduceOnPlateau", "Schedule", "constant", "cosine", "exponential", "linear", "one_cycle"]
