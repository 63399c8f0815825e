"""The narrowest type within a budget of accuracy: int8, bfloat16, or what the model has.

    python examples/quantise.py --accuracy 0.01 --error 0.05

A network learns to read handwritten digits (scikit-learn's). Then each type is tried, the narrowest first: how many of
the digits that neither training nor calibration saw are read right, and how far are scores from those in float32? The
first type that stays within both budgets is taken. Nothing is assumed about a type: what counts is measured.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
from digits import MLP, digits

import xrt_core as xrt
from xrt_core.training.loop import batches, fit

TYPES = {"int8": {"use_int8": True}, "bf16": {"use_bf16": True}, "fp32": {}}


def trained(engine: str | None, steps: int = 400) -> tuple[xrt.Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A network that reads digits, and the data that it learned from, and what was held back."""
    train, held = digits()
    graph = MLP(np.random.default_rng(0))
    trainer = xrt.training.TrainModule(
        graph, loss="cross_entropy", optimizer=xrt.optim.Adam(2e-3), engine=engine, seed=0
    )
    fit(trainer, batches(train, 64, seed=0), steps)
    graph.load_parameters(trainer.parameters())
    return graph, train, held


Row = tuple[str, float, float]
"""A type, the share of digits read right, and the largest error of a score relative to the largest score."""


def measured(engine: str | None = None, steps: int = 400) -> list[Row]:
    """What each type gives, the narrowest first."""
    network, train, held = trained(engine, steps)
    images = held["image"]
    graph = xrt.trace(network, images)  # for inference: no Dropout
    full = np.asarray(xrt.XRTModule(graph, engine=engine)(images))
    rows = []
    with tempfile.TemporaryDirectory() as ranges:
        with xrt.ptq_calibration_mode(ranges):
            xrt.XRTModule(graph, engine=engine)(train["image"][: len(images)])
        for name, options in TYPES.items():
            own = {"int8_calibration": ranges} if name == "int8" else {}
            scores = np.asarray(xrt.XRTModule(graph, engine=engine, **options, **own)(images))
            right = float((scores.argmax(1) == held["labels"]).mean())
            rows.append((name, right, float(np.abs(scores - full).max() / np.abs(full).max())))
    return rows


def narrowest(rows: list[Row], accuracy: float, error: float) -> str:
    """The first type that loses at most `accuracy` against the last one, and is off by at most `error`."""
    return next(name for name, right, off in rows if rows[-1][1] - right <= accuracy and off <= error)


def main() -> None:
    """Print what each type gives, and which is taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", type=float, default=0.01, help="share of the digits that may be lost")
    parser.add_argument("--error", type=float, default=0.05, help="how far a score may be off")
    parser.add_argument("--engine", help="default: the fastest")
    given = parser.parse_args()
    rows = measured(given.engine)
    found = narrowest(rows, max(given.accuracy, 0), max(given.error, 0))
    for name, share, error in rows:
        print(f"{name}: {share:.1%} read right, scores off by up to {error:.1%}{' <- taken' if name == found else ''}")


if __name__ == "__main__":
    main()
