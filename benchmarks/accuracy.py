"""What the option `accuracy` gains: the module with a budget of errors beside the module without, in one process.

    python benchmarks/accuracy.py [NAME ...] [--budgets 1e-2 5e-2] [--criterion max|rms]

Exported models (exported.py), development models (tests/conformance/dev_models.py). For each budget: what was chosen,
how many nodes are in it, the median of the ratios of interleaved calls, and the error of its outputs against the host's
(by the criterion; the budget is what it may be at most).
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import exported
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from tests.conformance import dev_models
from xrt_core.accuracy.error import error_of
from xrt_core.module import XRTModule

ROUNDS, REST = 25, 0.03
NAMES = ("resnet50", "mobilenetv2", "bert", "vit", "gpt2", "ppocr_rec", "ppocr_det")


def model_of(name: str) -> tuple[str, Mapping[str, np.ndarray]]:
    """The file of a model, and inputs."""
    if name in exported.NAMES:
        return str(exported.path(name)), exported.inputs_for(name)
    return str(dev_models.path(name)), dev_models.inputs_for(name)


def ratio(exact: XRTModule, reduced: XRTModule, inputs: Mapping[str, Any]) -> float:
    """The median of what a call of `reduced` takes over what one of `exact` takes next to it."""
    found = []
    for k in range(ROUNDS):
        times = {}
        for m in (exact, reduced) if k % 2 else (reduced, exact):
            time.sleep(REST)
            m.run(inputs)
            start = time.perf_counter()
            m.run(inputs)
            times[m] = time.perf_counter() - start
        found.append(times[reduced] / times[exact])
    return statistics.median(found)


def main() -> None:
    """Print a row for each model and budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--budgets", nargs="+", type=float, default=[1e-2, 5e-2])
    parser.add_argument("--criterion", choices=("max", "rms"), default="max")
    given = parser.parse_args()
    print("| model | budget | answers | products in it | time / without | error | search (s) |")
    print("|" + "---|" * 7)
    for name in given.names:
        path, inputs = model_of(name)
        expected = XRTModule(path, engine="host").run(inputs)
        exact = XRTModule(path)
        exact.run(inputs)
        exact.wait(600)
        for budget in given.budgets:
            start = time.perf_counter()
            m = XRTModule(path, accuracy={"error": budget, "criterion": given.criterion})
            m.run(inputs)
            m.wait(900)
            took = time.perf_counter() - start
            assert m.accuracy is not None
            chosen = m.accuracy.chosen
            got = m.run(inputs)
            off = max(error_of(np.asarray(got[k]), np.asarray(expected[k]), given.criterion) for k in expected)
            what = "its own precision | -"
            if chosen is not None:
                what = f"{chosen.form} on {chosen.engine} | {chosen.nodes} of {chosen.total}"
            gained = ratio(exact, m, inputs)
            print(f"| {name} | {budget:g} | {what} | {gained:.2f} | {off:.1e} | {took:.0f} |", flush=True)
            m.close()


if __name__ == "__main__":
    main()
