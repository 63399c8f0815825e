"""The training loop: batches, `fit` with a progress bar, and a plot of the losses."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xrt_core.errors import InputError, OptionError
from xrt_core.progress import Progress

if TYPE_CHECKING:
    from xrt_core.training.module import TrainModule


def batches(
    data: Mapping[str, np.ndarray], size: int, *, seed: int = 0, start: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches endlessly: every epoch is shuffled, deterministically by `seed`; an incomplete batch is dropped.

    data: arrays by the names of a step's inputs, one row per sample. start: the number of batches to skip, to resume
    a run.

    Raises InputError for arrays of different lengths or fewer samples than a batch.
    """
    counts = {name: len(a) if np.ndim(a) else 0 for name, a in data.items()}
    count = next(iter(counts.values()), 0)
    if len(set(counts.values())) > 1:
        raise InputError(f"the arrays hold different numbers of samples: {_listed(counts)}")
    if not 1 <= size <= count:
        raise InputError(f"a batch of {size} needs as many samples, the data has {count} ({_listed(counts)})")

    def made() -> Iterator[dict[str, np.ndarray]]:
        per_epoch = count // size
        for epoch in itertools.count(start // per_epoch):
            order = np.random.default_rng((seed, epoch)).permutation(count)
            first = start % per_epoch if epoch == start // per_epoch else 0
            for k in range(first, per_epoch):
                chosen = order[k * size : (k + 1) * size]
                yield {name: a[chosen] for name, a in data.items()}

    return made()


def fit(
    trainer: TrainModule,
    data: Iterable[Mapping[str, Any]],
    steps: int,
    *,
    label: str = "training",
    progress: bool = True,
) -> list[float]:
    """Run up to `steps` steps on the batches of `data`; returns their losses.

    progress: show a progress bar with the loss if stderr is a terminal. An error of a step propagates; the module
    then has the state after the last successful step.
    """
    losses: list[float] = []
    with Progress(label, steps, shown=progress) as bar:
        for batch in itertools.islice(data, steps):
            losses.append(float(trainer.step(**batch)))
            bar.advance(f"loss {losses[-1]:.4f}")
    return losses


def save_curve(
    losses: Sequence[float] | Mapping[str, Sequence[float]], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Plot the losses and their running mean to an image file; its suffix selects the format (.png, .svg, ...).

    losses: of one run, or of several by name, of which the running means are drawn.
    Raises OptionError if matplotlib is not installed, InputError if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("a picture of the losses needs matplotlib: pip install 'xrt-core[training]'") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    several = isinstance(losses, Mapping)
    runs: Mapping[str, Sequence[float]] = losses if isinstance(losses, Mapping) else {"": losses}
    for name, run in runs.items():
        window = max(len(run) // 20, 1)
        if not several or window == 1:
            axes.plot(run, linewidth=0.8, alpha=0.5, label=name or "each step")
        if window > 1:
            mean = np.convolve(run, np.full(window, 1 / window), "valid")
            axes.plot(np.arange(window - 1, len(run)), mean, label=f"{name}, mean of {window}".removeprefix(", "))
        if several or window > 1:
            axes.legend()
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(pathlib.Path(path))
    except (OSError, ValueError) as e:  # no such folder, or a suffix of no image format
        raise InputError(f"the losses cannot be drawn to {os.fspath(path)!r}: {e}") from e


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "no arrays"
