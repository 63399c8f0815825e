"""Callbacks: what `TrainModule.fit` calls after its steps and epochs.

A callback is a function of the trainer and the numbers of an epoch, or an object with some of the methods of
`Callback`. One that returns True ends the training.
"""

from __future__ import annotations

import csv
import io
import math
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from xrt_core.errors import OptionError
from xrt_core.files import replace_file
from xrt_core.training.checkpoint import STEP, numbered, remove, saved

Logs = Mapping[str, float]


class Trainer(Protocol):
    """What callbacks and epochs ask of a `TrainModule`; see there."""

    position: Any  # None, or a Position
    follow: Callable[[Any], None] | None

    @property
    def step_count(self) -> int: ...
    @property
    def metrics(self) -> dict[str, Any]: ...
    def step(self, /, *args: Any, **inputs: Any) -> Any: ...
    def apply(self) -> bool: ...
    def state_dict(self) -> dict[str, np.ndarray]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def save(self, path: str | os.PathLike[str], *, sharded: bool = False, background: bool = False) -> None: ...
    def wait_saved(self) -> None: ...
    def inferred(
        self, args: Sequence[Any], inputs: Mapping[str, Any], with_loss: bool, average: bool = False
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]: ...
    def trace(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> None: ...
    def loss_inputs(self, count: int, given: Mapping[str, Any]) -> tuple[str, ...]: ...


class Callback:
    """Base class of callbacks; none of its methods does anything.

    positions_data: whether its `load_state_dict` puts the data of `fit` where they stood when the state was saved. A
        `fit` that goes on inside an epoch then takes the first batch that the data give as the next one; else it skips
        those that were taken.
    """

    positions_data: ClassVar[bool] = False

    def on_step(self, trainer: Trainer, logs: Logs) -> bool | None:
        """Called after each step with its `loss`, and what the loss function gave beside it."""

    def on_epoch(self, trainer: Trainer, logs: Logs) -> bool | None:
        """Called after each epoch with its `epoch` (from 1), `loss`, and those of the validation (`val_loss`, ...)."""

    def on_save(self, trainer: Trainer) -> None:
        """Called after each step and each epoch, when all callbacks have had it: the place to save the trainer, since
        the file has their states too."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once at the end, also after Ctrl-C or an error."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a run that goes on has to know, as arrays or numbers by name; `TrainModule.save` writes it."""
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take back what `state_dict` returned. `fit` calls it before it asks for data."""

    @property
    def has_ended(self) -> bool:
        """Whether a run that goes on is at its end already."""
        return False


class Monitor(Callback):
    """Knows the best value of a number, `monitor`, so far. mode: "min" or "max"; default: "max" for accuracy, top_k and
    f1."""

    def __init__(self, monitor: str, mode: str | None, min_delta: float) -> None:
        if mode not in (None, "min", "max"):
            raise OptionError(f"mode={mode!r}: it takes 'min' or 'max'")
        higher = any(word in monitor for word in ("accuracy", "top_", "f1"))
        self.monitor, self._sign = monitor, -1.0 if (mode or ("max" if higher else "min")) == "max" else 1.0
        self._delta, self.best = float(min_delta), math.inf

    def check(self, validated: Collection[str]) -> None:
        """Raise OptionError where it waits for a number of a validation that is not among `validated`."""
        name = self.monitor.removeprefix("val_")
        if name != self.monitor and name not in validated:
            gives = f"the validation gives {', '.join(sorted(validated))}" if validated else "there is no validation="
            raise OptionError(f"monitor={self.monitor!r}: {gives}")

    def _improved(self, logs: Logs) -> bool:
        if self.monitor not in logs:
            raise OptionError(f"monitor={self.monitor!r}: an epoch has the numbers {', '.join(logs)}")
        value = self._sign * logs[self.monitor]
        if value < self.best - self._delta:
            self.best = value
            return True
        return False

    def state_dict(self) -> Mapping[str, Any]:
        """See `Callback`."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Callback`."""
        self.best = float(state["best"])


class EarlyStopping(Monitor):
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
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether its patience is at an end."""
        return self._waited >= self._patience

    def state_dict(self) -> Mapping[str, Any]:
        """See `Callback`. The state after the best epoch is a part of it."""
        kept = {f"state/{n}": a for n, a in (self._state or {}).items()}
        return {**super().state_dict(), "waited": self._waited, **kept}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Callback`."""
        super().load_state_dict(state)
        self._waited = int(state["waited"])
        kept = {n.removeprefix("state/"): a for n, a in state.items() if n.startswith("state/")}
        self._state = kept if kept and self._restore else None

    def on_end(self, trainer: Trainer) -> None:
        if self._state is not None and self._waited:
            trainer.load_state_dict(self._state)


class BestCheckpoint(Monitor):
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
        self._is_due = False

    def on_epoch(self, trainer: Trainer, logs: Logs) -> None:
        self._is_due = self._improved(logs)

    def on_save(self, trainer: Trainer) -> None:
        if self._is_due:
            self._is_due = False
            trainer.save(self._path)


class Checkpoint(Callback):
    """Saves the training state to `path` after each epoch and, with `every`, after so many steps, for
    `fit(resume=True)`.

    path: the file, whose name may hold "{step}" for the number of the step: `training.latest` finds the last one.
    keep: how many of these stay, the newest; older ones are removed once a newer is written. sharded, background: see
    `TrainModule.save`; at the end of the `fit` the last file is waited for.
    Raises OptionError for a number below 1, and for `keep` without "{step}".
    """

    def __init__(
        self, path: str | os.PathLike[str], every: int | None = None, *, keep: int | None = None,
        sharded: bool = False, background: bool = False,
    ) -> None:  # fmt: skip
        for name, given in (("every", every), ("keep", keep)):
            if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
                raise OptionError(f"{name}={given!r}: it takes a whole number of at least 1, or None")
        self._path, self._every, self._keep = pathlib.Path(path), every, keep
        if keep is not None and STEP not in self._path.name:
            raise OptionError(f"keep={keep}: the file's name must hold {STEP}, and {self._path.name!r} does not")
        self._sharded, self._background = sharded, background
        self._steps, self._is_due = 0, False

    def on_step(self, trainer: Trainer, logs: Logs) -> None:
        self._steps += 1
        self._is_due = self._every is not None and self._steps % self._every == 0

    def on_epoch(self, trainer: Trainer, logs: Logs) -> None:
        self._is_due = True

    def on_save(self, trainer: Trainer) -> None:
        if self._is_due:
            self._is_due = False
            path = numbered(self._path, trainer.step_count)
            trainer.save(path, sharded=self._sharded, background=self._background)
            self._remove_older(trainer.step_count, (self._keep or 0) - (not self._background))

    def on_end(self, trainer: Trainer) -> None:
        if self._background:
            trainer.wait_saved()
            self._remove_older(trainer.step_count, (self._keep or 0) - 1)

    def _remove_older(self, step: int, count: int) -> None:
        """Remove all but the newest `count` of the files before a step."""
        if self._keep is not None:
            older = [path for number, path in saved(self._path) if number < step]
            for path in older[: max(len(older) - count, 0)]:
                remove(path)

    def state_dict(self) -> Mapping[str, Any]:
        """See `Callback`."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Callback`."""
        self._steps = int(state["steps"])


class CSVLog(Callback):
    """Writes a line for each epoch; the columns are those of the first. A run that goes on (`fit(resume=True)`) keeps
    the lines up to its checkpoint and appends to them; any other starts the file anew."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)
        self._columns: list[str] = []
        self._rows = 0

    def on_epoch(self, trainer: Trainer, logs: Logs) -> None:
        first = not self._columns
        self._columns = self._columns or list(logs)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w" if first else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if first:
                writer.writeheader()
            writer.writerow(logs)
        self._rows += 1

    def state_dict(self) -> Mapping[str, Any]:
        """See `Callback`."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Callback`. Lines of epochs after the checkpoint, which are trained again, are removed."""
        rows = int(state["rows"])
        if not rows or not self._path.exists():
            return
        with self._path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))[: rows + 1]
        text = io.StringIO()
        csv.writer(text).writerows(lines)
        with replace_file(self._path) as out:
            out.write(text.getvalue().encode())
        self._columns, self._rows = lines[0] if lines else [], len(lines) - 1


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


__all__ = ["BestCheckpoint", "CSVLog", "Callback", "Checkpoint", "EarlyStopping", "Logs", "Report", "Trainer"]
