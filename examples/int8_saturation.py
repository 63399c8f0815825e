"""Products of 8-bit integers that saturate in 16 bits, and what XRT's callers get.

    python examples/int8_saturation.py [--engine onnxruntime] [--engine openvino]

Processors with AVX2 but without VNNI multiply 8-bit integers by an instruction (VPMADDUBSW) that adds two products in
16 bits: what exceeds 32767 is cut off. ONNX Runtime has exact kernels as well, which XRT asks for there; what
saturates all the same, the guard finds. The program multiplies large numbers by each library itself and through XRT,
and prints how far the results are from exact sums. With VNNI nothing saturates, and the program says so.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import xrt_core as xrt


def model(width: int = 256) -> tuple[onnx.ModelProto, np.ndarray]:
    """`y = x @ w` in 8-bit integers: uint8 [n, width] times int8 [width, width], sums in int32. And `w`."""
    w = np.random.default_rng(0).integers(100, 128, (width, width)).astype(np.int8)
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", width])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, ["n", width])
    graph = helper.make_graph([node], "int8", [x], [y], [numpy_helper.from_array(w, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), w


def directly(library: str, path: str, x: np.ndarray) -> np.ndarray:
    """What the library gives."""
    if library == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {"x": x})[0])
    import openvino

    return np.asarray(openvino.compile_model(path, "CPU")({"x": x})[0])


def through_xrt(engine: str, path: str, x: np.ndarray) -> tuple[np.ndarray, str]:
    """What XRT gives once the engine was verified, and who answers."""
    with xrt.XRTModule(path, engine=engine, prune=False) as m:
        m(x)
        m.wait()
        y = m(x)
        cluster: Any = next(iter(m.report().clusters), None)
        return y, "the host" if cluster is None or cluster["state"] != "live" else cluster["chosen"]


def main() -> None:
    """Print a line for each library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=("onnxruntime", "openvino"))
    engines = parser.parse_args().engine or ("onnxruntime", "openvino")
    proto, w = model()
    x = np.random.default_rng(1).integers(200, 256, (8, w.shape[0])).astype(np.uint8)
    exact = x.astype(np.int64) @ w
    saturates = False
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "int8.onnx")
        onnx.save(proto, path)
        for engine in engines:
            off = np.abs(directly(engine, path, x) - exact).max() / exact.max()
            y, who = through_xrt(engine, path, x)
            own = np.abs(y - exact).max() / exact.max()
            saturates |= off > 0
            print(f"{engine} itself: off by {off:.1%}; through XRT: off by {own:.1%}, answered by {who}")
    if not saturates:
        print("nothing saturates here: this processor has VNNI, or the library does not use 16-bit sums on it")


if __name__ == "__main__":
    main()
