"""Estimators of scikit-learn through XRT, on each engine and on the host alone, beside ONNX Runtime used directly.

    python benchmarks/classical.py [--threads N] [--seconds S] [--rows N] [MODEL ...]

Each estimator is fitted on 2000 rows of 20 features and three classes, converted by skl2onnx, and called with rows that
it has not seen; "directly" is `InferenceSession.run` of the same model. Goals: 1.05 of it through the onnxruntime
engine, 2 on XLA, 5 on the host alone. All take turns. The ratio is that of the medians of the wall clock; where the
machine is busy, that of the least processor time of a call with one thread (`--threads 1`) tells more.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from rounds import interleaved

from xrt_core.frontends.estimators import onnx_of
from xrt_core.module import XRTModule

GOALS: Final[Mapping[str, float]] = MappingProxyType({"onnxruntime": 1.05, "xla": 2.0, "host": 5.0})
FITTED: Final = 2000
REST: Final = 0.02
"""Seconds between calls: the threads of ONNX Runtime spin for a while, and would take the processor away."""


def estimators() -> dict[str, Callable[[], Any]]:
    """The estimators by name, not yet fitted."""
    from sklearn import ensemble, linear_model, pipeline, preprocessing, svm

    return {
        "RandomForest(100)": lambda: ensemble.RandomForestClassifier(100, random_state=0),
        "GradientBoosting(100)": lambda: ensemble.GradientBoostingClassifier(random_state=0),
        "HistGradientBoosting(100)": lambda: ensemble.HistGradientBoostingClassifier(random_state=0),
        "SVC with probabilities": lambda: svm.SVC(probability=True, random_state=0),
        "StandardScaler, LogisticRegression": lambda: pipeline.make_pipeline(
            preprocessing.StandardScaler(), linear_model.LogisticRegression()
        ),
    }


def row(name: str, threads: int, seconds: float, count: int) -> str:
    """The measurements of one estimator, as a row of the table."""
    import onnxruntime as ort
    from sklearn.datasets import make_classification

    x, y = make_classification(FITTED + count, 20, n_informative=10, n_classes=3, random_state=0)
    x = x.astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = onnx_of(estimators()[name]().fit(x[:FITTED], y[:FITTED]), x)
    rows = np.ascontiguousarray(x[FITTED:])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: rows}
    calls: list[Callable[[], Any]] = [lambda: session.run(None, given)]
    for engine in GOALS:
        module = XRTModule(model, engine=engine, threads=threads, cache="off", guard=False)
        calls.append(lambda module=module: [np.asarray(r) for r in module(rows)])
    times = interleaved(calls, rounds=9, seconds=seconds, batch=10e-3, warm=0.25, rest=REST)
    wall, cpu = [t.median for t in times], [min(t.cpu) for t in times]
    cells = [
        f"{wall[i] / wall[0]:.2f} | {cpu[i] / cpu[0]:.2f} {'' if cpu[i] <= goal * cpu[0] else '(missed)'}"
        for i, goal in enumerate(GOALS.values(), 1)
    ]
    return f"| {name} | {wall[0] * 1e3:.2f} | {' | '.join(c.strip() for c in cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args()
    print(f"{args.rows} rows, {args.threads} threads; wall clock and least processor time, over ONNX Runtime directly")
    heads = " | ".join(f"{engine} (goal {goal}) | CPU" for engine, goal in GOALS.items())
    print(f"| estimator | direct (ms) | {heads} |")
    print(f"|{'---|' * (2 + 2 * len(GOALS))}")
    for name in args.models or estimators():
        print(row(name, args.threads, args.seconds, args.rows), flush=True)


if __name__ == "__main__":
    main()
