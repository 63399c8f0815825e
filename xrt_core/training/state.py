"""The state of a training: named arrays that a step replaces as a whole, and the counters among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import CheckpointError, TrainingError, XRTError
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.runtime.arrays import to_numpy
from xrt_core.training.optimizer import SCHEDULE, Optimizer
from xrt_core.training.step import EXAMPLES, MICRO, SKIPPED, STEP, LossScale, initial_state
from xrt_core.training.transformation import Transformation
from xrt_core.training.variables import Variable


class State:
    """Everything that steps read and write, by name; it changes as a whole or not at all.

    names, types: of the entries, in order; none until the variables are known (`begin`). arrays: the entries, where the
    last step left them. counts: the counters among them, as far as they are known without reading them. lost: why there
    is no state any more; None as long as there is. loads: how many states were loaded. before: the arrays before the
    last step, where they are small enough to be kept until the next one runs: freeing them then costs no time.

    optimizer, scale, accumulate: what the entries follow from beside the variables, see `TrainModule`. runs_late:
    whether what failed on a device may be found out as an entry is read.
    """

    def __init__(self, optimizer: Optimizer, scale: LossScale | None, accumulate: int, runs_late: bool) -> None:
        self.names: tuple[str, ...] = ()
        self.types: Mapping[str, TensorType] = {}
        self.arrays: Sequence[Any] = ()
        self.before: Sequence[Any] = ()
        self.counts: dict[str, int] = {}
        self.lost: str | None = None
        self.loads = 0
        self._optimizer, self._scale, self._accumulate = optimizer, scale, accumulate
        self._runs_late = runs_late
        self._waiting: Mapping[str, np.ndarray] = {}  # was loaded before `begin`

    def begin(self, variables: Sequence[Variable]) -> None:
        """Start with the values of the variables, or with what was loaded before they were known.

        Raises CheckpointError where that does not fit them: it stays loaded, and there are no entries still.
        """
        entries = initial_state(variables, self._optimizer, self._scale, self._accumulate)
        types = {n: TensorType(a.dtype, a.shape) for n, a in entries.items()}
        self.arrays = _fitting(self._waiting, types, self._accumulate) if self._waiting else list(entries.values())
        self.names, self.types, self._waiting = tuple(entries), types, {}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace all by what `copies` returned. Raises CheckpointError, with nothing changed, for what does not fit;
        before `begin` it is known of the entries beside variables alone."""
        if self.names:
            found = _fitting(arrays, self.types, self._accumulate)
            self._optimizer.load_schedule_state(arrays)
            self.counts = {}
            self.arrays, self.before, self.lost = found, (), None
        else:
            self._check_others(arrays)
            self._optimizer.load_schedule_state(arrays)
            self._waiting = arrays
        self.loads += 1

    def _check_others(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Hold the entries beside variables against the optimizer and the options."""
        if isinstance(self._optimizer, Transformation):  # the number of its leaves follows from the variables
            return
        one = Variable(np.zeros(1, np.float32), True, "*")
        want = {n.removesuffix("*") for n in initial_state([one], self._optimizer, self._scale, self._accumulate)}
        want -= {"", SKIPPED, EXAMPLES}  # which states of earlier versions do not have
        slots = [p for p in want if p.endswith("/")]
        others = [n for n in arrays if n.startswith(("optimizer/", "training/"))]
        have = {next((p for p in slots if n.startswith(p)), n) for n in others}
        have = {n for n in have if not n.startswith(SCHEDULE)} - {SKIPPED, EXAMPLES}
        if have != want:
            raise CheckpointError(
                f"the state does not fit this optimiser and its options: missing {_some(sorted(want - have))}; unknown "
                f"{_some(sorted(have - want))}"
            )

    def entries(self) -> dict[str, Any]:
        """The entries by name, where they lie, and what the optimizer's schedules know. Raises TrainingError where they
        are lost."""
        self.refuse_lost()
        return dict(zip(self.names, self.arrays, strict=True)) | self._optimizer.schedule_state()

    def copies(self) -> dict[str, np.ndarray]:
        """Copies of `entries`; before `begin` what was loaded. Raises TrainingError where they are lost."""
        self.refuse_lost()
        if not self.names:
            return dict(self._waiting)
        try:
            return {n: np.array(to_numpy(a)) for n, a in self.entries().items()}
        except XRTError as e:
            if self._runs_late:
                self.failed_late(self.loads, e)
            raise

    def count(self, name: str) -> int:
        """A counter; 0 where there is none. Reading it waits for the device, unless it follows from the steps since it
        was read."""
        if not self.names:
            return int(self._waiting.get(name, 0))
        if name not in self.types:
            return 0
        if name not in self.counts:
            self.counts[name] = int(to_numpy(self.arrays[self.names.index(name)]))
        return self.counts[name]

    def replace(self, arrays: Sequence[Any], updates: bool, keeps: bool) -> None:
        """Put the entries after a step in the place of those before. updates: it is no micro-batch before the last.
        keeps: see `before`."""
        if keeps:
            self.before = self.arrays
        counts = self._counts_after(updates)
        self.counts = {}  # read from the arrays if something interrupts here
        self.arrays, self.counts = arrays, counts

    def _counts_after(self, updates: bool) -> dict[str, int]:
        """The counters after a step, as far as they are known."""
        if not updates:
            return {n: c + 1 if n == MICRO else c for n, c in self.counts.items()}
        if self._scale is not None:
            return {}  # whether the step was left out is on the device
        return {n: c + 1 if n == STEP else 0 for n, c in self.counts.items()}

    def refuse_lost(self) -> None:
        """Raise TrainingError where the state is lost."""
        if self.lost is not None:
            raise TrainingError(self.lost)

    def note_failure(self, error: BaseException) -> None:
        """Note that the state is lost where a step failed after engines had taken its arrays. Raises TrainingError then
        for an Exception."""
        if any(getattr(a, "is_deleted", bool)() for a in self.arrays):
            self.lost = (
                "the step failed after its variables had been donated to the engine, and they are lost: "
                f"{_first(error)}. Load a state (load_state_dict, load); with donate=False no failure loses it"
            )
            if isinstance(error, Exception):
                raise TrainingError(self.lost) from error

    def failed_late(self, loads: int, error: Exception) -> None:
        """Note that a step that ran ahead has failed, and with it the state since. loads: how many states had been
        loaded then. Raises TrainingError."""
        message = (
            f"a step that ran ahead failed on the device, and the state is lost: {_first(error)}. Load a state "
            "(load_state_dict, load); with lazy_loss=False a step is done when it returns"
        )
        if loads == self.loads:
            self.lost = message
        raise TrainingError(message) from error


def _fitting(arrays: Mapping[str, np.ndarray], types: Mapping[str, TensorType], accumulate: int) -> list[np.ndarray]:
    """The entries of a state in the order of `types`. Raises CheckpointError for those of other names or types."""
    arrays = {n: a for n, a in arrays.items() if not n.startswith(SCHEDULE)}  # the optimizer's, if it follows one
    if SKIPPED in types:  # states of earlier versions do not count them
        arrays = {SKIPPED: np.zeros((), np.int64), **arrays}
    if EXAMPLES in types and MICRO in arrays:  # nor the examples: each micro-batch weighs alike in their sums
        arrays = {EXAMPLES: arrays[MICRO].astype(np.float32), **arrays}
    missing, surplus = [n for n in types if n not in arrays], [n for n in arrays if n not in types]
    if missing or surplus:
        raise CheckpointError(
            f"the state does not fit this model and optimiser: missing {_some(missing)}; unknown {_some(surplus)}"
        )
    for n, want in types.items():
        have = arrays[n]
        if have.dtype != want.dtype or have.shape != want.shape:
            raise CheckpointError(f"the state's {n!r} is {dtype_name(have.dtype)}{list(have.shape)}, not {want}")
    if MICRO in types and not 0 <= arrays[MICRO] < accumulate:
        raise CheckpointError(
            f"the state is at micro-batch {arrays[MICRO]} of an update, this module has accumulate={accumulate}"
        )
    return [arrays[n] for n in types]


def _first(error: BaseException) -> BaseException:
    """Return the root cause of a chain of errors; the error of the failed fallback to the host is not informative."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _some(names: Sequence[str]) -> str:
    return (", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")) or "nothing"
