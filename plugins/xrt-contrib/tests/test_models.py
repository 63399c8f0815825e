"""Models that ONNX Runtime's own tools wrote: optimised, quantised, in float16, with packed weights."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import xrt_core as xrt

ort = pytest.importorskip("onnxruntime", reason="its tools write the models")
R = np.random.default_rng(23)


def f(*shape: int, scale: float = 0.3) -> np.ndarray:
    """Small normal numbers."""
    return (R.standard_normal(shape) * scale).astype(np.float32)


class Builder:
    """Nodes and constants of a model."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, array: Any) -> str:
        """The name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> str:
        """The name of an operator's result."""
        name = f"n{len(self.nodes)}"
        names = [i if isinstance(i, str) else self.constant(i) for i in inputs]
        self.nodes.append(helper.make_node(op, names, [name], name=name, **attributes))
        return name

    def model(self, entry: tuple[int, ...], result: str) -> onnx.ModelProto:
        """The model with input x."""
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, entry)
        y = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "model", [x], [y], self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(made)


def transformer() -> onnx.ModelProto:
    """Two layers as BERT has them."""
    b, heads, hidden, length = Builder(), 4, 32, 6
    x = "x"
    for _ in range(2):
        q, k, v = (b("Add", b("MatMul", x, f(hidden, hidden)), f(hidden)) for _ in range(3))
        shape = np.array([0, 0, heads, hidden // heads])
        q, v = (b("Transpose", b("Reshape", t, shape), perm=[0, 2, 1, 3]) for t in (q, v))
        k = b("Transpose", b("Reshape", k, shape), perm=[0, 2, 3, 1])
        p = b("Softmax", b("Div", b("MatMul", q, k), np.float32(8**0.5)), axis=-1)
        y = b("Reshape", b("Transpose", b("MatMul", p, v), perm=[0, 2, 1, 3]), np.array([0, 0, hidden]))
        y = b("Add", b("MatMul", y, f(hidden, hidden)), f(hidden))
        x = b("LayerNormalization", b("Add", x, y), 1 + f(hidden), f(hidden))
        h = b("Add", b("MatMul", x, f(hidden, 2 * hidden)), f(2 * hidden))
        h = b("Mul", b("Mul", h, b("Add", b("Erf", b("Div", h, np.float32(2**0.5))), np.float32(1))), np.float32(0.5))
        y = b("Add", b("MatMul", h, f(2 * hidden, hidden)), f(hidden))
        x = b("LayerNormalization", b("Add", x, y), 1 + f(hidden), f(hidden))
    return b.model((2, length, hidden), x)


def network() -> onnx.ModelProto:
    """Convolutions: plain, in groups, of each channel, with a sum; pooling, upsampling."""
    b = Builder()
    x = b("Relu", b("Conv", "x", f(16, 3, 3, 3), f(16), pads=[1] * 4))
    y = b("LeakyRelu", b("Conv", x, f(16, 1, 3, 3), f(16), pads=[1] * 4, group=16), alpha=0.2)
    x = b("Relu", b("Add", x, b("Conv", y, f(16, 16, 1, 1), f(16))))
    x = b("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    y = b("Conv", x, f(32, 16, 3, 3), f(32), pads=[1] * 4)
    y = b("Sigmoid", b("Conv", y, f(32, 16, 3, 3), f(32), pads=[1] * 4, group=2))
    y = b("Resize", y, "", np.array([1, 1, 2, 2], np.float32), mode="nearest", nearest_mode="floor",
          coordinate_transformation_mode="asymmetric")  # fmt: skip
    y = b("AveragePool", b("Concat", y, b("Mul", y, y), axis=1), kernel_shape=[2, 2], strides=[2, 2])
    x = b("Flatten", b("GlobalAveragePool", y))
    return b.model((2, 3, 16, 16), b("Softmax", b("Gemm", x, f(64, 10), f(10)), axis=-1))


def recurrent() -> onnx.ModelProto:
    """A bidirectional LSTM and a product."""
    b = Builder()
    w, r, bias = f(2, 32, 8), f(2, 32, 8), f(2, 64)
    y = b("LSTM", "x", w, r, bias, hidden_size=8, direction="bidirectional")
    y = b("Reshape", b("Transpose", y, perm=[0, 2, 1, 3]), np.array([0, 0, -1]))
    return b.model((5, 2, 8), b("MatMul", y, f(16, 4)))


MODELS = {"transformer": transformer, "network": network, "recurrent": recurrent}
Writer = Callable[[pathlib.Path, pathlib.Path], None]


def _session(path: pathlib.Path, level: Any = None, to: pathlib.Path | None = None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level or ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if to is not None:
        options.optimized_model_filepath = str(to)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _dump(level: str) -> Writer:
    def write(source: pathlib.Path, target: pathlib.Path) -> None:
        _session(source, getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}"), target)

    return write


class _Samples:
    """Inputs to measure ranges on."""

    def __init__(self, path: pathlib.Path) -> None:
        shape = _session(path).get_inputs()[0].shape
        self._samples: Iterator[Any] = iter([{"x": f(*shape, scale=1.0)} for _ in range(4)])

    def get_next(self) -> Any:
        """The next one, None at the end."""
        return next(self._samples, None)


def _static(form: str, **options: Any) -> Writer:
    def write(source: pathlib.Path, target: pathlib.Path) -> None:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

        kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, **options}
        # weights of 7 bits: ONNX Runtime's products of 8 bits saturate on processors with AVX2 alone
        quantize_static(
            str(source), str(target), _Samples(source), quant_format=QuantFormat[form], reduce_range=True, **kinds
        )

    return write


def _dynamic(source: pathlib.Path, target: pathlib.Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(source), str(target), weight_type=QuantType.QInt8, reduce_range=True)


def _packed(source: pathlib.Path, target: pathlib.Path) -> None:
    pytest.importorskip("onnx_ir", reason="the tool stands on it")
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=16, is_symmetric=False)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


WRITERS: dict[str, Writer] = {
    "extended": _dump("EXTENDED"),
    "all": _dump("ALL"),
    "dynamic": _dynamic,
    "qdq": _static("QDQ"),
    "qoperator": _static("QOperator"),
    "packed": _packed,
}
NO_PRODUCTS = ("network", "packed")
DEFAULT = {("transformer", "extended"), ("network", "all"), ("transformer", "packed"), ("network", "qoperator")}


def _domains(path: pathlib.Path) -> set[str]:
    return {n.domain for n in onnx.load(path).graph.node}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=() if (n, k) in DEFAULT else pytest.mark.nightly)
        for n in MODELS
        for k in WRITERS
        if (n, k) != NO_PRODUCTS
    ],
)
def test_a_model_that_a_tool_wrote(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    """It gives on the host, XLA and ONNX Runtime what ONNX Runtime gives, or is nearer to the model it was made of."""
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    onnx.save(MODELS[name](), source)
    WRITERS[kind](source, target)
    session = _session(target)
    if kind not in ("qdq", "dynamic") and name != "recurrent":
        assert any(d.startswith("com.microsoft") for d in _domains(target))
    x = f(*session.get_inputs()[0].shape, scale=1.0)
    (wanted,), (plain,) = session.run(None, {"x": x}), _session(source).run(None, {"x": x})
    optimised = _session(target, ort.GraphOptimizationLevel.ORT_ENABLE_ALL).run(None, {"x": x})[0]
    size = np.abs(plain).max()
    ours = ["host"] if (name, kind) in DEFAULT else ["host", "xla", "onnxruntime"]
    for engine in ours:
        if engine != "host":
            pytest.importorskip(f"xrt_{engine}", reason="a plugin of the project")
        found = np.asarray(xrt.XRTModule(target, engine=engine, cache="off")(x))
        if engine == "onnxruntime":  # its optimiser puts Q/DQ nodes into integer operators, which round otherwise
            wanted = optimised
        off, lost, theirs = (np.abs(a - b).max() / size for a, b in ((found, wanted), (found, plain), (wanted, plain)))
        assert off < (1e-4 if kind in ("extended", "all", "packed") else 2e-2) or lost <= 1.05 * theirs, engine
