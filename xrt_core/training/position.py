"""Where a `fit` stands: epoch, batch, sums of the epoch, and the state of its callbacks, as entries of a checkpoint."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from xrt_core.errors import CheckpointError
from xrt_core.runtime.arrays import to_numpy
from xrt_core.training.callbacks import Callback

PREFIX: Final = "fit/"
_SUM, _CALLBACK = "fit/sum/", "fit/callback/"


@dataclass(slots=True)
class Position:
    """Where a `fit` stands.

    epoch: how many epochs are over. batch: how many batches of the next one were taken. sums, examples: of the numbers
    of these batches, each times its examples, and of the examples. last: the arrays of the last of them. digest: of
    `last`, where it was read from a file. callbacks: of the `fit`. states: of callbacks, where read from a file.
    """

    epoch: int = 0
    batch: int = 0
    examples: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    last: Sequence[Any] = ()
    digest: int = 0
    callbacks: Sequence[Any] = ()
    states: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)

    def taken(self, batch: Sequence[Any], numbers: Mapping[str, float], examples: int) -> None:
        """Count a batch and its numbers."""
        self.batch, self.examples = self.batch + 1, self.examples + examples
        self.last, self.digest = batch, 0
        for name, value in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * examples

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch, self.batch, self.examples, self.sums = self.epoch + 1, 0, 0.0, {}
        self.last, self.digest = (), 0

    @property
    def mark(self) -> int:
        """The digest of the last batch that was taken, read from a file or taken here."""
        return self.digest or digest(self.last)

    def means(self) -> dict[str, float]:
        """The means of the numbers of this epoch over its examples; nothing before its first batch."""
        return {n: s / self.examples for n, s in self.sums.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """The entries of a checkpoint."""
        found = {
            "fit/epoch": np.array(self.epoch), "fit/batch": np.array(self.batch),
            "fit/examples": np.array(self.examples), "fit/digest": np.array(self.mark),
        }  # fmt: skip
        found |= {f"{_SUM}{n}": np.array(s) for n, s in self.sums.items()}
        return found | {f"{_CALLBACK}{c}/{n}": np.array(a) for c, own in self.saved().items() for n, a in own.items()}

    def saved(self) -> dict[str, Mapping[str, Any]]:
        """The states of the callbacks that have one, by `named`."""
        states = {n: c.state_dict() for n, c in named(self.callbacks).items()} if self.callbacks else self.states
        return {n: own for n, own in states.items() if own}


def of_arrays(arrays: Mapping[str, np.ndarray]) -> Position:
    """The position that `Position.arrays` gave the entries of. Raises CheckpointError for others."""
    try:
        counts = [int(arrays[f"fit/{n}"]) for n in ("epoch", "batch", "digest")]
        examples = float(arrays["fit/examples"])
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"the state holds no whole position of a fit: {e}") from None
    states: dict[str, dict[str, np.ndarray]] = {}
    for name, a in arrays.items():
        if name.startswith(_CALLBACK):
            owner, _, entry = name.removeprefix(_CALLBACK).partition("/")
            states.setdefault(owner, {})[entry] = a
    sums = {n.removeprefix(_SUM): float(a) for n, a in arrays.items() if n.startswith(_SUM)}
    return Position(counts[0], counts[1], examples, sums, digest=counts[2], states=states)


def named(callbacks: Iterable[Any]) -> dict[str, Callback]:
    """Callbacks that may have a state, by class and number: "EarlyStopping.0"."""
    seen: Counter[str] = Counter()
    found = {}
    for c in callbacks:
        if isinstance(c, Callback):
            kind = type(c).__name__
            found[f"{kind}.{seen[kind]}"] = c
            seen[kind] += 1
    return found


def digest(batch: Sequence[Any]) -> int:
    """A checksum of the arrays of a batch, 0 for none."""
    found = 0
    for a in batch:
        own = np.ascontiguousarray(to_numpy(a))
        found = zlib.crc32(own.reshape(-1).view(np.uint8).data, zlib.crc32(f"{own.dtype}{own.shape}".encode(), found))
    return found
