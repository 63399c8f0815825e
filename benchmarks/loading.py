"""Loading large models through XRT beside ONNX Runtime used directly: time to the first result, and memory.

    python benchmarks/loading.py [--rounds N] [--engines onnxruntime,host,...] [MODEL ...]

Every load is a process of its own, in turns: it imports the libraries, runs a model of one node, so that what is loaded
lazily is there, and then loads the model and calls it once. "Time" is what the last two steps take, "memory" by how
much they raise the process's peak of resident memory (files that are mapped count). Models are made here, with random
weights: a transformer of 2 and of 12 layers, with its weights in the model file or beside it, the larger with weights
of 4 bits in blocks, a convolutional network, and a random forest. XRT's cache is off: nothing is read that an earlier
process compiled. Modules come from bytecode, as those of an installed package do, whatever PYTHONDONTWRITEBYTECODE
says. Goal: 1.2 of ONNX Runtime's in both, through engine onnxruntime.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

THREADS: Final = 2
GOAL: Final = 1.2
DIRECT: Final = "ONNX Runtime"
Shape = tuple[int, ...]


class _Builder:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def weights(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02))

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"n{len(self.nodes)}"], **attributes))
        return self.nodes[-1].output[0]

    def model(self, entry: Shape, result: str) -> onnx.ModelProto:
        ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", entry), (result, None))]
        graph = helper.make_graph(self.nodes, "model", ports[:1], ports[1:], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def transformer(layers: int, hidden: int = 768, heads: int = 12) -> tuple[onnx.ModelProto, Shape]:
    """Layers as BERT-base has them, for 16 tokens."""
    b = _Builder()
    apart, together = (b.constant(np.array(s)) for s in ([0, 0, heads, hidden // heads], [0, 0, hidden]))
    scale = b.constant(np.float32((hidden // heads) ** -0.5))
    x = "x"
    for _ in range(layers):
        q, k, v = (b("Add", b("MatMul", x, b.weights(hidden, hidden)), b.weights(hidden)) for _ in range(3))
        q, v = (b("Transpose", b("Reshape", t, apart), perm=[0, 2, 1, 3]) for t in (q, v))
        k = b("Transpose", b("Reshape", k, apart), perm=[0, 2, 3, 1])
        p = b("Softmax", b("Mul", b("MatMul", q, k), scale), axis=-1)
        y = b("Reshape", b("Transpose", b("MatMul", p, v), perm=[0, 2, 1, 3]), together)
        y = b("Add", b("MatMul", y, b.weights(hidden, hidden)), b.weights(hidden))
        x = b("LayerNormalization", b("Add", x, y), b.weights(hidden), b.weights(hidden))
        y = b("Gelu", b("Add", b("MatMul", x, b.weights(hidden, 4 * hidden)), b.weights(4 * hidden)))
        y = b("Add", b("MatMul", y, b.weights(4 * hidden, hidden)), b.weights(hidden))
        x = b("LayerNormalization", b("Add", x, y), b.weights(hidden), b.weights(hidden))
    shape = (1, 16, hidden)
    return b.model(shape, x), shape


def network() -> tuple[onnx.ModelProto, Shape]:
    """Twelve convolutions of 3 x 3, the last ones of 512 channels."""
    b = _Builder()
    x, before = "x", 3
    for i, channels in enumerate([64, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512]):
        x = b("Relu", b("Conv", x, b.weights(channels, before, 3, 3), b.weights(channels), pads=[1] * 4))
        x = b("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]) if i % 3 == 2 else x
        before = channels
    shape = (1, 3, 32, 32)
    return b.model(shape, x), shape


def packed() -> tuple[onnx.ModelProto, Shape]:
    """The transformer of 12 layers, its products with MatMulNBits."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model, shape = transformer(16)
    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True)
    quantizer.process()
    return quantizer.model.model, shape


def forest() -> tuple[onnx.ModelProto, Shape]:
    """A random forest of 400 trees; its tables are attributes."""
    from skl2onnx import to_onnx
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier

    x, y = make_classification(12_000, 20, n_informative=10, n_classes=3, flip_y=0.3, random_state=0)
    x = x.astype(np.float32)
    fitted = RandomForestClassifier(400, random_state=0, n_jobs=THREADS).fit(x, y)
    return to_onnx(fitted, x[:1], options={"zipmap": False}), (100, 20)


MODELS: Final[dict[str, Callable[[], tuple[onnx.ModelProto, Shape]]]] = {
    "transformer, 2 layers": lambda: transformer(2),
    "transformer, 12 layers": lambda: transformer(12),
    "transformer, 12 layers, weights beside": lambda: transformer(12),
    "transformer, 16 layers of 4 bits": packed,
    "convolutions": network,
    "forest of 400 trees": forest,
}


def _peak() -> int:
    """The largest resident memory of this process so far; `getrusage` would count that of the one that started it."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def load(engine: str, path: str, shape: Shape) -> None:
    """In a process of its own: print seconds and bytes."""
    import onnxruntime as ort

    warnings.simplefilter("ignore")

    def first_result(source: Any, x: np.ndarray) -> None:
        if engine == DIRECT:
            options = ort.SessionOptions()
            options.intra_op_num_threads = THREADS
            session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
            kept.append((session, session.run(None, {session.get_inputs()[0].name: x})))
        else:
            from xrt_core import XRTModule

            model = onnx.load_from_string(source) if isinstance(source, bytes) else source
            module = XRTModule(model, engine=engine, threads=THREADS, cache="off", guard=False)
            kept.append((module, module(x)))

    kept: list[Any] = []
    small = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {y = Neg(x)}'
    )
    first_result(small.SerializeToString(), np.zeros(2, np.float32))
    before = _peak()
    start = time.perf_counter()
    first_result(path, np.zeros(shape, np.float32))
    seconds = time.perf_counter() - start
    print(seconds, _peak() - before)


def measure(name: str, engines: list[str], rounds: int, folder: pathlib.Path) -> str:
    """A line of the table."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    model, shape = MODELS[name]()
    beside = "beside" in name
    onnx.save(model, path, save_as_external_data=beside, **({"location": "weights"} if beside else {}))
    size = sum(f.stat().st_size for f in folder.iterdir())
    found: dict[str, list[tuple[float, float]]] = {e: [] for e in (DIRECT, *engines)}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder.parent / f"{folder.name}-bytecode")
    for turn in range(rounds + 1):
        for engine, results in found.items():
            command = [sys.executable, __file__, "--load", engine, str(path), ",".join(map(str, shape))]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            words = done.stdout.split()
            if turn:  # the first one brings the file into memory
                results.append((float(words[-2]), float(words[-1])))
    for f in folder.iterdir():
        f.unlink()
    seconds, bytes_ = ({e: statistics.median(r[i] for r in results) for e, results in found.items()} for i in (0, 1))
    cells = []
    for e in engines:
        for values in (seconds, bytes_):
            ratio = values[e] / values[DIRECT]
            cells.append(f"{ratio:.2f}{' (missed)' if e == 'onnxruntime' and ratio > GOAL else ''}")
    return f"| {name} | {size >> 20} | {seconds[DIRECT]:.2f} | {bytes_[DIRECT] / 2**20:.0f} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--load"]:
        engine, path, shape = sys.argv[2:]
        load(engine, path, tuple(map(int, shape.split(","))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", default="onnxruntime,host")
    args = parser.parse_args()
    engines = args.engines.split(",")
    heads = " | ".join(f"{e}: time | memory" for e in engines)
    print(f"| model | MB | {DIRECT}: s | MB | {heads} |\n|{'---|' * (4 + 2 * len(engines))}")
    with tempfile.TemporaryDirectory(prefix="xrt-loading-") as folder:
        for name in MODELS:
            if not args.models or any(part in name for part in args.models):
                print(measure(name, engines, args.rounds, pathlib.Path(folder, "models")), flush=True)


if __name__ == "__main__":
    main()
