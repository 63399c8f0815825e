"""Measures how far engines and the host are off, and writes the table that the guard judges by.

    python scripts/measure_tolerances.py [--engine xla --engine onnxruntime] [--output xrt_core/verify/tolerances.json]

For families of operators and clusters of several sizes, in every floating dtype, each engine and the host itself are
held against the host in a wider precision. Of each result two errors are taken: of elements that are at least a tenth
of the largest, the error relative to the element; of all smaller ones, the error relative to the largest. The bounds
of a dtype are the largest of these errors over all clusters, times `MARGINS`: what is not sampled here may round worse,
and a kernel that is really wrong is off by far more. Of those who computed a cluster the median counts, so that one
that is imprecise does not widen the bounds for all. dtypes that no engine computes in (8 bits and less) get one step
of their own: a value that lies between two numbers may be rounded to either.

Each row of an engine says as well how far it is from the host in the cluster's own dtype ("host_relative",
"host_absolute"), since that is what the guard looks at first. No bound is derived from it: the tests hold that the
bounds above cover it, so that a right engine rarely needs the second look.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ml_dtypes
import numpy as np

from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Function
from xrt_core.errors import XRTError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType, dtype_name
from xrt_core.runtime.arrays import to_numpy
from xrt_core.verify.inputs import synthesize_inputs
from xrt_core.verify.reference import run_host

MARGINS = {"float64": 1000.0, "float32": 8.0, "float16": 2.0, "bfloat16": 2.0, "rounded": 1.0}
"""Bounds are so many times the errors that were measured. In 16 bits errors are those of storing values, which all
engines share. For float64 there is no wider reference, and what matters is that float32 was not used in its place.
"rounded" are floats behind a rounding to integers, which rounding errors before it may turn to the other side; for
them the largest error counts, not the median, and whoever goes by it looks at each node by itself as well."""

FLIP_SHARE = 0.01
"""Of the results of quantisations: as many may be off by one step. ONNX Runtime's fused products were for 1 in 2000
elements, since it adds the bias as integers."""

QUANTILE = "p99.9"
"""Of the errors of one cluster; the host's own noise speaks for the last in a thousand (see verify/compare.py)."""

OPSET = 21
SEEDS = 3
DTYPES = tuple(np.dtype(d) for d in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
STEPS = tuple(
    np.dtype(getattr(ml_dtypes, n))
    for n in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn")
)
OUTPUT = pathlib.Path(__file__).resolve().parents[1] / "xrt_core" / "verify" / "tolerances.json"


class Builder:
    """A graph under construction, in one dtype."""

    def __init__(self, dtype: np.dtype, seed: int) -> None:
        self.dtype = dtype
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self._rng = np.random.default_rng(seed)

    def input(self, *shape: int) -> Value:
        self.inputs.append(Value(f"x{len(self.inputs)}", TensorType(self.dtype, shape)))
        return self.inputs[-1]

    def weight(self, *shape: int, scale: float = 1.0) -> Value:
        return Value.constant((self._rng.standard_normal(shape) * scale).astype(self.dtype))

    def add(self, op_type: str, inputs: Sequence[Value | None], shape: Sequence[int], **attributes: Any) -> Value:
        out = Value(f"v{len(self.nodes)}", TensorType(self.dtype, tuple(shape)))
        self.nodes.append(
            Node(op_type, inputs, [out], attributes, version=since_version(op_type, "", OPSET), name=out.name)
        )
        return out

    def function(self, name: str, *outputs: Value) -> Function:
        return Function.from_graph(Graph(self.inputs, outputs, self.nodes, opsets={"": OPSET}, name=name))


def _elementwise(b: Builder, size: int) -> Value:
    x = b.input(16, 64)
    for k in range(size):
        op = ("Tanh", "Sigmoid", "Erf", "Sin", "Softplus", "Atan")[k % 6]
        x = b.add(op, [x], (16, 64))
        x = b.add("Mul", [x, b.weight(64)], (16, 64))
        x = b.add("Add", [x, b.weight(64)], (16, 64))
    return x


def _exponential(b: Builder, size: int) -> Value:
    x = b.input(16, 64)
    for _ in range(size):
        x = b.add("Exp", [b.add("Tanh", [x], (16, 64))], (16, 64))
        x = b.add("Log", [b.add("Add", [x, b.add("Abs", [x], (16, 64))], (16, 64))], (16, 64))
    return x


def _softmax(b: Builder, size: int) -> Value:
    x = b.input(8, 256)
    for _ in range(size):
        x = b.add("Softmax", [b.add("Mul", [x, b.weight(256, scale=3.0)], (8, 256))], (8, 256), axis=-1)
        x = b.add("Mul", [x, b.weight(1, scale=256.0)], (8, 256))
    return x


def _reductions(b: Builder, size: int) -> Value:
    x = b.input(16, 16 * size)
    mean = b.add("ReduceMean", [x, _ints(-1)], (16, 1))
    centred = b.add("Sub", [x, mean], (16, 16 * size))
    squares = b.add("Mul", [centred, centred], (16, 16 * size))
    deviation = b.add("Sqrt", [b.add("ReduceMean", [squares, _ints(-1)], (16, 1))], (16, 1))
    return b.add("Div", [centred, deviation], (16, 16 * size))


def _dense(b: Builder, size: int) -> Value:
    width = 128
    x = b.input(8, width)
    for _ in range(size):
        x = b.add("MatMul", [x, b.weight(width, width, scale=width**-0.5)], (8, width))
        x = b.add("Relu", [b.add("Add", [x, b.weight(width, scale=0.1)], (8, width))], (8, width))
    return x


def _long_product(b: Builder, size: int) -> Value:
    length = 64 * size
    return b.add("MatMul", [b.input(8, length), b.weight(length, 16, scale=length**-0.5)], (8, 16))


def _convolution(b: Builder, size: int) -> Value:
    x = b.input(1, 8, 12, 12)
    for _ in range(size):
        x = b.add("Conv", [x, b.weight(8, 8, 3, 3, scale=72**-0.5), b.weight(8, scale=0.1)], (1, 8, 12, 12),
                  pads=(1, 1, 1, 1), kernel_shape=(3, 3))  # fmt: skip
        x = b.add("Relu", [x], (1, 8, 12, 12))
    return x


def _layer_norm(b: Builder, size: int) -> Value:
    x = b.input(8, 64)
    for _ in range(size):
        y = b.add("MatMul", [x, b.weight(64, 64, scale=0.125)], (8, 64))
        x = b.add("Add", [x, b.add("Tanh", [y], (8, 64))], (8, 64))
        x = b.add("LayerNormalization", [x, b.weight(64), b.weight(64)], (8, 64), axis=-1)
    return x


def _attention(b: Builder, size: int) -> Value:
    x = b.input(16, 32)
    for _ in range(size):
        q, k, v = (b.add("MatMul", [x, b.weight(32, 32, scale=32**-0.5)], (16, 32)) for _ in range(3))
        scores = b.add("MatMul", [q, b.add("Transpose", [k], (32, 16), perm=(1, 0))], (16, 16))
        scores = b.add("Mul", [scores, Value.constant(np.array(32**-0.5, b.dtype))], (16, 16))
        mixed = b.add("MatMul", [b.add("Softmax", [scores], (16, 16), axis=-1), v], (16, 32))
        x = b.add("LayerNormalization", [b.add("Add", [x, mixed], (16, 32)), b.weight(32)], (16, 32), axis=-1)
    return x


def _quantised(b: Builder, size: int) -> Value:
    """Dense layers between 8-bit integers: a rounding that falls the other way is a whole step, and spreads."""
    width = 64
    x = b.input(8, width)
    scale, zero = Value.constant(np.array(0.03, b.dtype)), Value.constant(np.array(0, np.int8))
    for _ in range(size):
        q = Value(f"q{len(b.nodes)}", TensorType(np.dtype(np.int8), (8, width)))
        version = since_version("QuantizeLinear", "", OPSET)
        b.nodes.append(Node("QuantizeLinear", [x, scale, zero], [q], version=version, name=q.name))
        x = b.add("DequantizeLinear", [q, scale, zero], (8, width))
        x = b.add("MatMul", [x, b.weight(width, width, scale=width**-0.5)], (8, width))
        x = b.add("Tanh", [b.add("Add", [x, b.weight(width, scale=0.1)], (8, width))], (8, width))
    return x


def _ints(*numbers: int) -> Value:
    return Value.constant(np.array(numbers, np.int64))


FAMILIES: dict[str, tuple[Callable[[Builder, int], Value], tuple[int, ...]]] = {
    "elementwise": (_elementwise, (1, 4, 16, 64)),
    "exponential": (_exponential, (1, 4, 16)),
    "softmax": (_softmax, (1, 4, 8)),
    "reductions": (_reductions, (1, 8, 64, 256)),
    "dense": (_dense, (1, 4, 16, 32)),
    "long product": (_long_product, (1, 8, 64)),
    "convolution": (_convolution, (1, 4, 12)),
    "layer normalization": (_layer_norm, (1, 4, 16)),
    "attention": (_attention, (1, 4, 8)),
    "quantised": (_quantised, (1, 4, 12)),
}
"""Name -> (what builds a cluster of a size, the sizes)."""


def measured(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per family, size, dtype and engine: the errors that it showed."""
    for family, (build, sizes) in FAMILIES.items():
        for size in sizes:
            for dtype in DTYPES if family != "quantised" else (np.dtype(np.float32),):
                errors: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
                apart: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
                for seed in range(SEEDS):
                    builder = Builder(dtype, seed)
                    function = builder.function(family, build(builder, size))
                    inputs = synthesize_inputs(function, "normal", seed)
                    want = run_host(function, inputs, wide=True)[0][0].astype(np.float64)
                    own = want
                    for engine in ("host", *names):
                        got = _results(engine, function, inputs)
                        if got is None:
                            continue
                        result = got.astype(np.float64)
                        errors.setdefault(engine, []).append(_errors(result, want))
                        if engine == "host":
                            own = result
                        else:
                            apart.setdefault(engine, []).append(_errors(result, own))
                for engine, found in errors.items():
                    row = {
                        "family": family,
                        "size": size,
                        "dtype": dtype_name(dtype) if family != "quantised" else "rounded",
                        "engine": engine,
                    }
                    row |= _row("", found)
                    yield row | (_row("host_", apart[engine]) if engine in apart else {})


def _row(prefix: str, found: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    kinds = zip(("relative", "absolute"), zip(*found, strict=True), strict=True)
    return {prefix + kind: _quantiles(np.concatenate(parts)) for kind, parts in kinds}


def _results(engine: str, function: Function, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    if engine == "host":
        return run_host(function, inputs)[0][0]
    owner = engines.get(engine)
    if not all(owner.supports(n, "cpu", "inference").ok for n in function.body.nodes):
        return None
    try:
        compiler = owner.compiler("cpu", CompileOptions())
        made = compiler.compile(function, function.params, function.returns, function.aliases)
        return np.asarray(to_numpy(made.run(list(inputs))[0]))
    except XRTError:
        return None


def _errors(got: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors relative to the element for the large elements, and relative to the largest for the small ones."""
    largest = float(np.abs(want).max())
    large = np.abs(want) >= 0.1 * largest
    error = np.abs(got - want)
    return error[large] / np.abs(want[large]), error[~large] / largest


def _quantiles(errors: np.ndarray) -> dict[str, float]:
    if not errors.size:
        return {}
    marks = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {name: float(f"{np.quantile(errors, q):.3g}") for name, q in marks.items()}


def bounds(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The table: per dtype the errors that most have at most, times its margin."""
    found: dict[str, dict[str, float]] = {}
    for name, margin in MARGINS.items():
        own = [r for r in rows if r["dtype"] == name]
        row = {"share": FLIP_SHARE if name == "rounded" else 0.0}
        for kind in ("absolute", "relative"):
            clusters: dict[tuple[str, int], list[float]] = {}
            for r in own:
                if r[kind]:
                    clusters.setdefault((r["family"], r["size"]), []).append(r[kind][QUANTILE])
            typical = max if name == "rounded" else statistics.median
            worst = max(typical(errors) for errors in clusters.values())
            row[kind] = float(f"{margin * worst:.2g}")
        found[name] = row
    for dtype in STEPS:
        step = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
        smallest = float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]
        largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        found[dtype_name(dtype)] = {"absolute": float(f"{smallest / largest:.2g}"), "relative": step, "share": 0.0}
    return found


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version(), "numpy": np.__version__}
    for name in names:
        found[name] = engines.status(name).version
    with contextlib.suppress(PackageNotFoundError):
        found["xrt-core"] = version("xrt-core")
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", help="an engine to measure; default: xla and onnxruntime")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    arguments = parser.parse_args()
    names = arguments.engine or ["xla", "onnxruntime"]
    rows = list(measured(names))
    table = {
        "measured": {
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "versions": _versions(names),
            "margins": MARGINS,
            "quantile": QUANTILE,
            "seeds": SEEDS,
        },
        "bounds": bounds(rows),
    }
    # those of single operators, which the conformance kit reads, are set by hand
    table["operators"] = json.loads(OUTPUT.read_text(encoding="utf-8"))["operators"]
    head = json.dumps(table, indent=1)[:-2]
    body = ",\n  ".join(json.dumps(r) for r in rows)  # one row a line
    arguments.output.write_text(f'{head},\n "rows": [\n  {body}\n ]\n}}\n', encoding="utf-8")
    for name, row in table["bounds"].items():  # type: ignore[union-attr]
        print(f"{name:18} absolute {row['absolute']:.2g}  relative {row['relative']:.2g}")


if __name__ == "__main__":
    main()
