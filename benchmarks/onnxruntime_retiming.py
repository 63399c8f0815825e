"""What it costs in processor time to time the library again from time to time, in sessions whose calls engines answer.

    python benchmarks/onnxruntime_retiming.py [--engine openvino] [--rounds 15]

Blocks of calls with and without that alternate in one process; the median of the processor time of each is told, with
its quartiles, for models whose calls take some tens and some hundreds of microseconds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import numpy as np
import xrt_ort
from onnx import TensorProto, helper, numpy_helper
from xrt_ort import acceleration

CALLS = 3072  # of a block: three periods
WIDTHS = {"small": 16, "large": 512}


def perceptron(width: int) -> bytes:
    """Four layers of this width."""
    nodes, weights, last = [], [], "x"
    for i in range(4):
        weight = np.random.default_rng(i).standard_normal((width, width), np.float32) / math.sqrt(width)
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes += [
            helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"]),
            helper.make_node("Relu", [f"m{i}"], [f"r{i}"]),
        ]
        last = f"r{i}"
    shape = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [8, width]) for n in ("x", last)]
    graph = helper.make_graph(nodes, "perceptron", shape[:1], shape[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def live(width: int, engine: str) -> tuple[Any, dict[str, np.ndarray], Any]:
    """A session that engines answer, its feeds, and the live signature."""
    options = xrt_ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = xrt_ort.InferenceSession(perceptron(width), options, [("XRTExecutionProvider", {"engine": engine})])
    feeds = {"x": np.ones((8, width), np.float32)}
    session.run(None, feeds)
    xrt_ort.wait()
    (signature,) = session._acceleration.live.values()
    return session, feeds, signature


def block(session: Any, feeds: dict[str, np.ndarray], signature: Any, timed: bool) -> float:
    """Processor seconds per call."""
    signature._times, signature._period = None, acceleration._MOST_AGAIN
    signature._left = acceleration._MOST_AGAIN if timed else math.inf
    start = time.process_time()
    for _ in range(CALLS):
        session.run(None, feeds)
    return (time.process_time() - start) / CALLS


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="openvino")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    acceleration._FASTER = acceleration._NO_SLOWER = 1e9  # engines stay, whoever is faster here
    xrt_ort.configure(after=0.0)
    for name, width in WIDTHS.items():
        session, feeds, signature = live(width, arguments.engine)
        rows: dict[bool, list[float]] = {True: [], False: []}
        for i in range(2 * arguments.rounds):
            rows[i % 2 == 0].append(1e6 * block(session, feeds, signature, timed=i % 2 == 0))
        ratios = [a / b for a, b in zip(rows[True], rows[False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        with_it, without = statistics.median(rows[True]), statistics.median(rows[False])
        print(
            f"{name}: {without:.1f} us of processor time per call without, {with_it:.1f} with; "
            f"ratio {middle:.3f} ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
