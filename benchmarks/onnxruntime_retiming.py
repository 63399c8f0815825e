"""What it costs in processor time to time the library again from time to time, in sessions whose calls engines answer.

    python benchmarks/onnxruntime_retiming.py [small] [large] [--engine openvino] [--rounds 10]

Blocks of calls with (A) and without (B) follow in the order A B B A in one process, so that drift cancels. Told are
medians of the processor time per call, with the quartiles of their ratio, for a small and a larger model, and the
library's share of the calls times its own processor time.
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

CALLS = 1030  # of a block: a period, with the calls that the library answers
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


def alone(session: Any, feeds: dict[str, np.ndarray]) -> float:
    """Processor seconds per call of the library."""
    start = time.process_time()
    for _ in range(CALLS // 8):
        session._acceleration._answer(session, None, feeds)
    return (time.process_time() - start) / (CALLS // 8)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(WIDTHS))
    parser.add_argument("--engine", default="openvino")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    acceleration._FASTER = acceleration._NO_SLOWER = 1e9  # engines stay, whoever is faster here
    xrt_ort.configure(after=0.0)
    for name in arguments.models:
        session, feeds, signature = live(WIDTHS[name], arguments.engine)
        rows: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(arguments.rounds):
            found: dict[bool, float] = {True: 0.0, False: 0.0}
            for timed in (True, False, False, True):
                found[timed] += 0.5e6 * block(session, feeds, signature, timed=timed)
            for timed in found:
                rows[timed].append(found[timed])
        ratios = [a / b for a, b in zip(rows[True], rows[False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        with_it, without = statistics.median(rows[True]), statistics.median(rows[False])
        library = 1e6 * alone(session, feeds)
        share = acceleration._CHECK / acceleration._MOST_AGAIN * library
        print(
            f"{name}: {without:.1f} us of processor time per call without, {with_it:.1f} with; ratio {middle:.3f} "
            f"({low:.3f} to {high:.3f}); the library takes {library:.1f}, its share of the calls {share:.2f} per call"
        )


if __name__ == "__main__":
    main()
