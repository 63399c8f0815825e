"""Callbacks: what `TrainModule.fit` calls after its steps and epochs.

A callback is a function of the trainer and the numbers of an epoch, or an object with some of the methods of
`Callback`. One that returns True ends the training.
"""

from __future__ import annotations

import csv
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from xrt_core.errors import OptionError

Logs = Mapping[str, float]


class Trainer(Protocol):
    """What callbacks and epochs ask of a `TrainModule`; see there."""

    @property
    def step_count(self) -> int: ...
    @property
    def metrics(self) -> dict[str, Any]: ...
    def step(self, /, *args: Any, **inputs: Any) -> Any: ...
    def apply(self) -> bool: ...
    def state_dict(self) -> dict[str, np.ndarray]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...
    def inferred(
        self, args: Sequence[Any], inputs: Mapping[str, Any], with_loss: bool, average: bool = False
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]: ...
    def loss_inputs(self, count: int, given: Mapping[str, Any]) -> tuple[str, ...]: ...


class Callback:
    """Base class of callbacks; none of its methods does anything."""

    def on_step(self, trainer: Trainer, logs: Logs) -> bool | None:
        """Called after each step with its `loss`, and what the loss function gave beside it."""

    def on_epoch(self, trainer: Trainer, logs: Logs) -> bool | None:
        """Called after each epoch with its `epoch` (from 1), `loss`, and those of the validation (`val_loss`, ...)."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once at the end, also after Ctrl-C or an error."""


class _Best(Callback):
    """Knows the best value of a number so far. mode: "min" or "max"; default: "max" for accuracy, top_k and f1."""

    def __init__(self, monitor: str, mode: str | None, min_delta: float) -> None:
        if mode not in (None, "min", "max"):
            raise OptionError(f"mode={mode!r}: it takes 'min' or 'max'")
        higher = any(word in monitor for word in ("accuracy", "top_", "f1"))
        self.monitor, self._sign = monitor, -1.0 if (mode or ("max" if higher else "min")) == "max" else 1.0
        self._delta, self.best = float(min_delta), math.inf

    def _improved(self, logs: Logs) -> bool:
        if self.monitor not in logs:
            raise OptionError(f"monitor={self.monitor!r}: an epoch has the numbers {', '.join(logs)}")
        value = self._sign * logs[self.monitor]
        if value < self.best - self._delta:
            self.best = value
            return True
        return False


class EarlyStopping(_Best):
    """Ends the training after `patience` epochs without a value of `monitor` that is better by more than `min_delta`.

    restore: at the end, go back to the state after the best epoch.
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 3, *, mode: str | None = None, min_delta: float = 0.0,
        restore: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(monitor, mode, min_delta)
        self._patience, self._restore, self._waited = patience, restore, 0
        self._state: dict[str, np.ndarray] | None = None

    def on_epoch(self, trainer: Trainer, logs: Logs) -> bool:
        if self._improved(logs):
            self._waited = 0
            self._state = trainer.state_dict() if self._restore else None
        else:
            self._waited += 1
        return self._waited >= self._patience

    def on_end(self, trainer: Trainer) -> None:
        if self._state is not None and self._waited:
            trainer.load_state_dict(self._state)


class BestCheckpoint(_Best):
    """Saves the training state to `path` after each epoch that is the best so far."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        monitor: str = "val_loss",
        *,
        mode: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self._path = pathlib.Path(path)

    def on_epoch(self, trainer: Trainer, logs: Logs) -> None:
        if self._improved(logs):
            trainer.save(self._path)


class CSVLog(Callback):
    """Writes a line for each epoch; the columns are those of the first."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)
        self._columns: list[str] = []

    def on_epoch(self, trainer: Trainer, logs: Logs) -> None:
        first = not self._columns
        self._columns = self._columns or list(logs)
        with self._path.open("w" if first else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if first:
                writer.writeheader()
            writer.writerow(logs)


class Report(Callback):
    """Hands the numbers of steps and epochs to a library's own writer: a SummaryWriter of TensorBoard (`add_scalar`),
    or a run of Weights & Biases or the like (`log`). Raises OptionError for an object with neither."""

    def __init__(self, writer: Any) -> None:
        if not hasattr(writer, "add_scalar") and not hasattr(writer, "log"):
            raise OptionError(f"Report({writer!r}): it takes a writer with add_scalar (TensorBoard) or log (W&B)")
        self._writer = writer

    def on_step(self, trainer: Trainer, logs: Logs) -> None:
        self._write({f"step/{n}": v for n, v in logs.items()}, trainer.step_count)

    def on_epoch(self, trainer: Trainer, logs: Logs) -> None:
        self._write({f"epoch/{n}": v for n, v in logs.items() if n != "epoch"}, trainer.step_count)

    def _write(self, numbers: Logs, step: int) -> None:
        if hasattr(self._writer, "add_scalar"):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        else:
            self._writer.log(dict(numbers), step=step)


__all__ = ["BestCheckpoint", "CSVLog", "Callback", "EarlyStopping", "Logs", "Report", "Trainer"]
