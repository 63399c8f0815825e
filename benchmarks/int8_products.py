"""Products of 8-bit integers: ONNX Runtime and OpenVINO used directly, and ONNX Runtime through XRT.

    python benchmarks/int8_products.py [--threads N]

"integers" is MatMulInteger with constant weights of int8; "dequantised" is x quantised by one scale, weights with one
for each column, and MatMul of both dequantised, with the result in float32, as in models that are quantised for
TensorRT; "requantised" is x quantised by one scale, and QLinearMatMul to the same type. Milliseconds of a call, medians
of turns with a rest before each, and how far the results are from exact ones, over the largest. OpenVINO has no
MatMulInteger of int8 and int8, and no QLinearMatMul.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper
from rounds import interleaved

import xrt_core as xrt
from xrt_core.compiler.services import usable_processors

SIZES = ((1, 768, 3072), (16, 768, 768), (256, 512, 512))
SCALE = np.float32(2**-6)  # by powers of two, so that floats hold all sums exactly
REST = 0.03


def integers(first: str, x: np.ndarray, w: np.ndarray) -> tuple[onnx.ModelProto, np.ndarray]:
    """MatMulInteger, and what it gives."""
    element = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}[first]
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    return _model([node], element, TensorProto.INT32, x, w, {"w": w}), x.astype(np.int64) @ w.astype(np.int64)


def dequantised(first: str, x: np.ndarray, w: np.ndarray) -> tuple[onnx.ModelProto, np.ndarray]:
    """MatMul of two dequantised matrices, and what it gives."""
    scales = np.full(w.shape[1], SCALE)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["f"]),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["v"], axis=1),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    constants = {"w": w, "ws": scales, "s": SCALE, "z": np.zeros((), first)}
    model = _model(nodes, TensorProto.FLOAT, TensorProto.FLOAT, x, w, constants)
    return model, (x.astype(np.float64) * SCALE) @ (w.astype(np.float64) * SCALE)


def requantised(first: str, x: np.ndarray, w: np.ndarray) -> tuple[onnx.ModelProto, np.ndarray]:
    """QLinearMatMul of x, quantised, and what it gives."""
    element = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}[first]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearMatMul", ["q", "s", "z", "w", "s", "wz", "ys", "z"], ["y"]),
    ]
    coarse, limits = np.float32(2**5), np.iinfo(first)
    constants = {"w": w, "s": SCALE, "z": np.zeros((), first), "wz": np.zeros((), np.int8), "ys": coarse}
    exact = (x.astype(np.float64) * SCALE) @ (w.astype(np.float64) * SCALE)
    wanted = np.clip(np.rint(exact / coarse), limits.min, limits.max)
    return _model(nodes, TensorProto.FLOAT, element, x, w, constants), wanted


def _model(nodes: Any, given: int, gives: int, x: np.ndarray, w: np.ndarray, constants: Any) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", given, x.shape)]
    outputs = [helper.make_tensor_value_info("y", gives, (x.shape[0], w.shape[1]))]
    held = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "int8", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def contenders(path: str, x: np.ndarray, threads: int, *, with_openvino: bool) -> dict[str, Callable[[], Any]]:
    """What computes the model of this file for x."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: dict[str, Callable[[], Any]] = {"onnxruntime": lambda: session.run(None, {"x": x})[0]}
    if with_openvino:
        config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(path, "CPU", config)
        found["openvino"] = lambda: compiled({"x": x})[0]
    module = xrt.XRTModule(path, engine="onnxruntime", guard=False, threads=threads)
    found["xrt"] = lambda: module(x)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_processors())
    threads = parser.parse_args().threads
    names = ("onnxruntime", "openvino", "xrt")
    print(f"{threads} threads; onnxruntime {onnxruntime.__version__}, openvino {openvino.__version__}\n")
    print("| product | x | size |", " | ".join(f"{n} (ms) | off" for n in names), "|")
    print("|---|---|---|" + "---|---|" * len(names))
    for make in (integers, dequantised, requantised):
        for first in ("int8", "uint8"):
            for size in SIZES:
                cells = measured(make, first, size, threads)
                print(f"| {make.__name__} | {first} | {' x '.join(map(str, size))} |", end=" ")
                print(" | ".join(cells.get(n, "- | -") for n in names), "|", flush=True)


def measured(make: Any, first: str, size: tuple[int, int, int], threads: int) -> dict[str, str]:
    """Milliseconds and error of each contender, as two cells of the table."""
    rng, (rows, depth, columns) = np.random.default_rng(0), size
    x = rng.integers(np.iinfo(first).min, np.iinfo(first).max + 1, (rows, depth)).astype(first)
    w = rng.integers(-128, 128, (depth, columns)).astype(np.int8)
    model, exact = make(first, x, w)
    given = x if make is integers else x.astype(np.float32) * SCALE
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder, "model.onnx"))
        onnx.save(model, path)
        calls = contenders(path, given, threads, with_openvino=make is dequantised)
        off = [np.abs(np.asarray(c(), np.float64) - exact).max() / np.abs(exact).max() for c in calls.values()]
        times = interleaved([*calls.values()], rounds=15, batch=5e-3, rest=REST)
    return {n: f"{t.median * 1e3:.3f} | {o:.1e}" for n, t, o in zip(calls, times, off, strict=True)}


if __name__ == "__main__":
    main()
