"""Small models of TensorFlow and Keras, exported by tf2onnx, over random sizes, beside one session of ONNX Runtime.

    python benchmarks/exported_tensorflow.py export FOLDER   # needs tensorflow-cpu, tf_keras and tf2onnx
    python benchmarks/exported_tensorflow.py FOLDER [--engine NAME] [--calls 8]    # needs none of them

Each model has a batch and a length that vary. The calls are made four times and compared; then, after a wait for
executables, each side makes them five times by itself: printed is the median over the calls of each one's fastest.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

LENGTHS = (20, 300)
"""The least and the greatest length."""


def models() -> Mapping[str, tuple[Callable[..., Any], Any]]:
    """Name -> a function of tensors and the type of its input."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    import tf_keras

    layers = tf_keras.layers
    tf.random.set_seed(0)
    rng = np.random.default_rng(0)
    weight = tf.constant(rng.standard_normal((4, 4)).astype(np.float32) * 0.3)
    floats, ids = tf.TensorSpec([None, None, 4], tf.float32, "x"), tf.TensorSpec([None, None], tf.int32, "x")

    def while_loop(x: Any) -> Any:
        n, first = tf.shape(x)[1], tf.zeros([tf.shape(x)[0], 4])

        def body(i: Any, h: Any, rows: Any) -> Any:
            h = tf.tanh(x[:, i] + h @ weight)
            return i + 1, h, rows.write(i, h)

        _, _, rows = tf.while_loop(lambda i, *_: i < n, body, (0, first, tf.TensorArray(tf.float32, size=n)))
        return tf.transpose(rows.stack(), [1, 0, 2])

    def scan(x: Any) -> Any:
        first = tf.zeros([tf.shape(x)[0], 4])
        return tf.scan(lambda h, row: tf.tanh(row + h @ weight), tf.transpose(x, [1, 0, 2]), initializer=first)

    embed, place = layers.Embedding(200, 32), layers.Embedding(512, 32)
    blocks = [
        (
            layers.LayerNormalization(), layers.MultiHeadAttention(4, 8), layers.LayerNormalization(),
            layers.Dense(128, lambda v: tf.nn.gelu(v, approximate=True)), layers.Dense(32),
        )
        for _ in range(2)
    ]  # fmt: skip

    def transformer(x: Any) -> Any:
        n = tf.shape(x)[1]
        mask = (x != 0)[:, None, :] & tf.ones([1, n, 1], tf.bool)
        h = embed(x) + place(tf.range(n))
        for norm, attend, again, widen, narrow in blocks:
            h = h + attend(norm(h), norm(h), attention_mask=mask)
            h = h + narrow(widen(again(h)))
        return tf.einsum("btd,vd->btv", h, embed.embeddings)

    masked = tf_keras.Sequential(
        [
            layers.Embedding(100, 16, mask_zero=True), layers.LSTM(32, return_sequences=True),
            layers.GlobalAveragePooling1D(), layers.Dense(3),
        ]
    )  # fmt: skip
    gru = tf_keras.Sequential([layers.GRU(32, return_sequences=True), layers.GRU(8)])
    return {
        "while_loop": (while_loop, floats), "scan": (scan, floats), "transformer": (transformer, ids),
        "masked_lstm": (masked, ids), "gru": (gru, floats),
    }  # fmt: skip


def export(folder: pathlib.Path) -> None:
    """Write the models that are not there yet."""
    import tensorflow as tf
    import tf2onnx

    folder.mkdir(parents=True, exist_ok=True)
    for name, (function, spec) in models().items():
        path = folder / f"{name}.onnx"
        if not path.exists():
            function(tf.ones([1, 4, *spec.shape.as_list()[2:]], spec.dtype))  # makes the variables
            traced = tf.function(function, input_signature=[spec])
            tf2onnx.convert.from_function(traced, input_signature=[spec], opset=17, output_path=str(path))


def calls_of(session: Any, count: int) -> list[dict[str, np.ndarray]]:
    """Inputs of `count` calls; weights that the exporter made inputs get what fits them."""
    made = []
    for k in range(count):
        rng = np.random.default_rng(k)
        sizes = [int(rng.integers(1, 4)), int(rng.integers(*LENGTHS))]
        given = {}
        for port in session.get_inputs():
            shape = [d if isinstance(d, int) else sizes[axis] for axis, d in enumerate(port.shape)]
            is_float = port.type == "tensor(float)"
            values = rng.random(shape) if is_float else rng.integers(0, 100, shape)
            given[port.name] = values.astype(np.float32 if is_float else np.int32)
        made.append(given)
    return made


def alone(call: Callable[[dict[str, np.ndarray]], Any], given: Sequence[dict[str, np.ndarray]]) -> float:
    """Milliseconds of a call, the median over all of each one's fastest of five."""
    time.sleep(0.2)
    fastest = [float("inf")] * len(given)
    for _ in range(5):
        for k, arrays in enumerate(given):
            start = time.perf_counter()
            call(arrays)
            fastest[k] = min(fastest[k], time.perf_counter() - start)
    return statistics.median(fastest) * 1e3


def measure(path: pathlib.Path, options: Mapping[str, Any], count: int) -> str:
    """A row of the table."""
    import onnxruntime

    import xrt_core as xrt

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = calls_of(session, count)
    module, worst = xrt.XRTModule(str(path), **options), 0.0
    for _ in range(4):
        for arrays in given:
            for want, got in zip(session.run(None, arrays), module.run(arrays).values(), strict=True):
                worst = max(worst, float(np.abs(np.asarray(got) - want).max() / np.abs(want).max()))
        module.wait(60)
    library, mine = alone(lambda arrays: session.run(None, arrays), given), alone(module.run, given)
    clusters = str(module.explain()).splitlines()[1].split(";")[0].strip()
    return f"| {path.stem} | {library:.2f} | {mine:.2f} | {mine / library:.2f} | {worst:.0e} | {clusters} |"


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="a folder, or export and a folder")
    parser.add_argument("--engine")
    parser.add_argument("--calls", type=int, default=8)
    args = parser.parse_args()
    folder = pathlib.Path(args.what[-1])
    if args.what[0] == "export" and len(args.what) == 2:
        export(folder)
        return
    warnings.simplefilter("ignore")
    print("| model | ONNX Runtime, ms | XRT, ms | XRT / library | worst difference | |\n|---|---|---|---|---|---|")
    for path in sorted(folder.glob("*.onnx")):
        print(measure(path, {} if args.engine is None else {"engine": args.engine}, args.calls), flush=True)


if __name__ == "__main__":
    main()
