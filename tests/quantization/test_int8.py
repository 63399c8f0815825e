"""Quantisation to int8: ranges recorded and stored, Q/DQ nodes made from them, results through every engine."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.conformance import dev_models
from tests.random_graphs import F32, OPSET, graph_of, node
from xrt_core.errors import QuantizationError
from xrt_core.frontends import ops
from xrt_core.frontends.onnx_export import save
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.options import resolve
from xrt_core.quantization import calibration
from xrt_core.quantization.calibration import observers
from xrt_core.quantization.qdq import quantise
from xrt_core.quantization.ranges import Ranges, find_ranges, identity

RNG = np.random.default_rng(0)


def weight(name: str, *shape: int) -> Value:
    scale = np.prod(shape[1:]) ** -0.5
    return Value.constant((RNG.standard_normal(shape) * scale).astype(np.float32), name)


SHAPES = {"c1": (8, 3, 3, 3), "b1": (8,), "c2": (16, 8, 3, 3), "b2": (16,), "c3": (16, 16, 1, 1), "fc": (16, 10),
          "fb": (10,)}  # fmt: skip
W = {n: weight(n, *s) for n, s in SHAPES.items()}


def network(name: str = "cnn", weights: dict[str, Value] = W, opset: int = OPSET) -> Graph:
    """A small residual network: three convolutions, an addition, a mean, a classifier."""
    x = Value("x", TensorType(F32, ("n", 3, 16, 16)))
    a, b, c, d, e, s, p, f, y = (Value(n) for n in ("a", "b", "c", "d", "e", "s", "p", "f", "y"))
    w = weights
    nodes = [
        node("Conv", [x, w["c1"], w["b1"]], [a], pads=(1, 1, 1, 1), strides=(2, 2)), node("Relu", [a], [b]),
        node("Conv", [b, w["c2"], w["b2"]], [c], pads=(1, 1, 1, 1)), node("Relu", [c], [d]),
        node("Conv", [d, w["c3"]], [e]), node("Add", [d, e], [s]), node("GlobalAveragePool", [s], [p]),
        node("Flatten", [p], [f]), node("Gemm", [f, w["fc"], w["fb"]], [y]),
    ]  # fmt: skip
    return Graph([x], [y], nodes, opsets={"": opset}, name=name)


def images(seed: int, count: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 16, 16)).astype(np.float32)


def calibrate(model: Any, folder: pathlib.Path, batches: Sequence[np.ndarray], engine: str = "host") -> None:
    m = xrt.XRTModule(model, engine=engine)
    with xrt.ptq_calibration_mode(folder):
        for x in batches:
            m(x)


def stored(folder: pathlib.Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def snr(want: np.ndarray, got: np.ndarray) -> float:
    """Signal to noise in decibels."""
    return float(10 * np.log10(np.square(want).sum() / np.square(want - got).sum()))


@pytest.fixture
def ranges(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the ranges of the network over four batches."""
    pytest.importorskip("onnxruntime")
    calibrate(network(), tmp_path, [images(k) for k in range(4)])
    return tmp_path


def test_ranges_are_those_of_the_tensors(tmp_path: pathlib.Path) -> None:
    """What products read, by minimum and maximum over the batches; a module's results are as without the mode."""
    m = xrt.XRTModule(network(), engine="host")
    plain = m(images(0))
    with xrt.ptq_calibration_mode(tmp_path / "new" / "folder"):
        assert np.array_equal(m(images(0)), plain)
        m.run({"x": images(1)})
    found = stored(tmp_path / "new" / "folder")

    assert set(found["tensors"]) == {"x", "b", "d", "f"}
    both = np.concatenate([images(0), images(1)])
    assert found["tensors"]["x"] == [float(both.min()), float(both.max())]
    assert found["tensors"]["b"][0] == 0
    assert (found["batches"], found["model"]) == (2, "cnn")
    assert calibration.active is None


@pytest.mark.slow
def test_batches_accumulate(tmp_path: pathlib.Path) -> None:
    """In one mode or several, whatever the engine and the size of the batch."""
    pytest.importorskip("jax")
    calibrate(network(), tmp_path / "one", [images(0), images(1, 2), images(2)])
    calibrate(network(), tmp_path / "two", [images(0)])
    calibrate(network(), tmp_path / "two", [images(1, 2), images(2)], "xla")
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")

    assert one["batches"] == two["batches"] == 3
    for name, r in one["tensors"].items():
        assert two["tensors"][name] == pytest.approx(r, rel=1e-5)


def test_int8_is_close_to_float32(ranges: pathlib.Path) -> None:
    """Over 25 dB and the same class for 15 of 16 images that calibration has not seen; float32 in and out."""
    m = xrt.XRTModule(network(), engine="host", use_int8=True, int8_calibration=str(ranges), verify=True)
    x = images(99, 16)
    want, got = xrt.XRTModule(network(), engine="host")(x), m(x)

    assert got.dtype == np.float32
    assert 25 < snr(want, got) < 60
    assert (want.argmax(1) == got.argmax(1)).sum() >= 15


def _has_vnni() -> bool:
    """Whether the CPU sums int8 products in 32 bits. Without VNNI, OpenVINO sums pairs of them in 16 bits, which
    saturate."""
    cpu = pathlib.Path("/proc/cpuinfo")
    return not cpu.exists() or "vnni" in cpu.read_text()


def _off_the_host(ranges: pathlib.Path, engine: str, **options: Any) -> float:
    """How far the int8 network is off the host's, relative to the largest result."""
    if importlib.util.find_spec({"xla": "jax"}.get(engine, engine)) is None:  # importing openvino starts a process
        pytest.skip(f"{engine}'s library is not installed")
    x, int8 = images(7, 8), {"use_int8": True, "int8_calibration": str(ranges)}
    host = xrt.XRTModule(network(), engine="host", **int8)(x)
    m = xrt.XRTModule(network(), engine=engine, **int8, **options)
    got = m(x)
    assert m.explain({"x": x}).engine_node_count > 0
    return float(np.abs(got - host).max() / np.abs(host).max())


@pytest.mark.parametrize(
    "engine",
    [
        "xla",
        "onnxruntime",
        pytest.param("openvino", marks=pytest.mark.skipif(not _has_vnni(), reason="int8 sums saturate on this CPU")),
    ],
)
def test_engines_agree(ranges: pathlib.Path, engine: str) -> None:
    """The same integers everywhere: an engine is off the host by a step of one tensor now and then, where a value lies
    on the edge between two integers; openvino's own int8 kernels round more."""
    assert _off_the_host(ranges, engine) < 0.02


@pytest.mark.slow
def test_the_guard_keeps_saturated_sums_out(ranges: pathlib.Path) -> None:
    """OpenVINO under the guard gives what the host gives, also where its int8 sums saturate."""
    # not timed: on a busy machine the host may be the faster one, and nothing would be left to look at
    at_once = {"guard": True, "guard_tune": False, "guard_async": False, "guard_sandbox": False, "cache": False}
    assert _off_the_host(ranges, "openvino", **at_once) < 0.02


def test_the_quantised_graph(ranges: pathlib.Path) -> None:
    """Symmetric int8; weights per channel and as integers, also where they are small; biases in float32."""
    m = xrt.XRTModule(network(), engine="host", use_int8=True, int8_calibration=str(ranges))
    graph = m.partitioned({"x": images(0)})
    producers = {v: n for n in graph.nodes for v in n.outputs}
    products = [n for n in graph.nodes if n.op_type in ("Conv", "Gemm")]

    assert len(products) == 4
    for n in products:
        for v in n.inputs[:2]:
            made = producers[v]
            assert made.op_type == "DequantizeLinear"
            assert (made.inputs[2] is None) or not made.inputs[2].data.any()  # type: ignore[union-attr]
        weights = producers[n.inputs[1]]
        assert weights.inputs[0] is not None
        assert weights.inputs[0].data is not None
        assert weights.inputs[0].data.dtype == np.int8
        assert weights.inputs[1].data.size == weights.inputs[0].data.shape[1 if n.op_type == "Gemm" else 0]  # type: ignore[union-attr]
        assert all(v is None or v.data is not None for v in n.inputs[2:])


def test_marked_nodes_stay(ranges: pathlib.Path) -> None:
    """What `precision` speaks of is not quantised."""
    options: dict[str, Any] = {"use_int8": True, "int8_calibration": str(ranges)}
    m = xrt.XRTModule(network(), engine="host", precision={"op:Gemm": "fp32", "name:c": "bf16"}, **options)
    graph = m.partitioned({"x": images(0)})
    made = {n.name: graph.producer(n.inputs[0]) for n in graph.nodes if n.op_type in ("Conv", "Gemm") and n.inputs[0]}

    assert {name: p.op_type if p else "" for name, p in made.items()} == {
        "a": "DequantizeLinear", "c": "Cast", "e": "DequantizeLinear", "y": "Flatten",
    }  # fmt: skip


def test_int8_with_bfloat16(ranges: pathlib.Path) -> None:
    """What is quantised stays so, and is not cast."""
    m = xrt.XRTModule(network(), engine="host", use_int8=True, int8_calibration=str(ranges), use_bf16=True)
    text = str(m.explain({"x": images(0)}))

    assert "kept in float32: Conv x3: it computes on quantised values" in text


class Written(xrt.Graph):
    """A graph in Python."""

    def build(self, x: Any) -> Any:
        return ops.MatMul(ops.Relu(ops.MatMul(x, RNG_W1)), RNG_W2)


RNG_W1, RNG_W2 = (np.random.default_rng(k).standard_normal((16, 16)).astype(np.float32) / 4 for k in (1, 2))


def test_a_traced_graph(tmp_path: pathlib.Path) -> None:
    """It is calibrated and quantised like a file, whatever its batch."""
    pytest.importorskip("onnxruntime")
    x = RNG.standard_normal((8, 16)).astype(np.float32)
    calibrate(Written(), tmp_path, [x])
    m = xrt.XRTModule(Written(), engine="host", use_int8=True, int8_calibration=str(tmp_path))

    assert snr(xrt.XRTModule(Written(), engine="host")(x), m(x)) > 25
    assert m(x[:3]).shape == (3, 16)


def test_names_that_the_library_makes(tmp_path: pathlib.Path) -> None:
    """A model may have a tensor "x_scale" of its own, also as an input."""
    pytest.importorskip("onnxruntime")
    x, a, y = Value("x", TensorType(F32, (4, 16))), Value("x_zero_point"), Value("x_quantized")
    scale = Value("x_scale", TensorType(F32, (1, 16)))
    w = weight("x_zero_point_scale", 16, 16)
    graph = graph_of([x, scale], [y], [node("MatMul", [x, w], [a]), node("Mul", [a, scale], [y])])
    given = {"x": RNG.standard_normal((4, 16)).astype(np.float32), "x_scale": np.full((1, 16), 2, np.float32)}
    m = xrt.XRTModule(graph, engine="host")
    with xrt.ptq_calibration_mode(tmp_path):
        want = m.run(given)["x_quantized"]
    q = xrt.XRTModule(graph, engine="host", use_int8=True, int8_calibration=str(tmp_path), verify=True)

    assert list(q.input_types) == ["x", "x_scale"]
    assert snr(want, q.run(given)["x_quantized"]) > 25


def test_many_tensors_and_a_shared_bias(tmp_path: pathlib.Path) -> None:
    """A bias that several products share is doubled by the library, under a name that nothing else has; weights that
    are computed from constants are weights."""
    pytest.importorskip("onnxruntime")
    x = Value("x", TensorType(F32, (2, 8, 4, 4)))
    bias, integers = weight("1", 8), Value.constant(RNG.integers(-99, 99, (8, 8, 1, 1)).astype(np.int8), "integers")
    half, scale = Value("half"), Value.constant(np.full((8, 1, 1, 1), 0.003, np.float32), "scales")
    w = Value("weight")
    nodes, v = [node("Cast", [integers], [half], to=1), node("Mul", [half, scale], [w])], x
    for i in range(30):
        a, b = Value(f"a{i}"), Value(f"b{i}")
        nodes += [node("Conv", [v, w, bias], [a]), node("Tanh", [a], [b])]
        v = b
    graph = graph_of([x], [v], nodes, "deep")
    given = RNG.standard_normal((2, 8, 4, 4)).astype(np.float32)
    calibrate(graph, tmp_path, [given])
    q = xrt.XRTModule(graph, engine="host", use_int8=True, int8_calibration=str(tmp_path), constant_fold_limit=0)
    made = q.partitioned({"x": given})
    weights = {n.inputs[1] for n in made.nodes if n.op_type == "Conv"}

    assert snr(xrt.XRTModule(graph, engine="host")(given), q(given)) > 20
    assert {p.op_type for p in map(made.producer, weights) if p} == {"DequantizeLinear"}


def test_a_saved_module(ranges: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The file holds the quantised graph: its ranges are not needed any more."""
    pytest.importorskip("jax")
    m = xrt.XRTModule(network(), engine="xla", use_int8=True, int8_calibration=str(ranges), cache="off")
    y = m(images(0))
    m.save(tmp_path / "model.xrt")
    for file in ranges.glob("*.json"):
        file.unlink()

    assert np.array_equal(xrt.XRTModule.load(tmp_path / "model.xrt")(images(0)), y)


def test_an_old_opset_is_converted(tmp_path: pathlib.Path) -> None:
    """Weights per channel need opset 13; a model of opset 11 is brought there."""
    pytest.importorskip("onnxruntime")
    graph = network(opset=11)
    old = [n for n in graph.nodes if n.op_type != "Relu"]
    assert {n.version for n in old} <= {1, 11, 13, 14}
    made = Graph(graph.inputs, graph.outputs, [_older(n) for n in graph.nodes], opsets={"": 11}, name="old")
    calibrate(made, tmp_path, [images(0)])
    m = xrt.XRTModule(made, engine="host", use_int8=True, int8_calibration=str(tmp_path))

    assert snr(xrt.XRTModule(made, engine="host")(images(3)), m(images(3))) > 25


def _older(n: Any) -> Any:
    from xrt_core.ir.graph import Node
    from xrt_core.ir.schema import since_version

    return Node(n.op_type, n.inputs, n.outputs, n.attributes, version=since_version(n.op_type, "", 11), name=n.name)


# --- what is refused ------------------------------------------------------------------------------------------------


def int8(graph: Graph, folder: pathlib.Path) -> None:
    xrt.XRTModule(graph, engine="host", use_int8=True, int8_calibration=str(folder))


def test_no_ranges(tmp_path: pathlib.Path) -> None:
    """No folder, an empty one, ranges of a model with other weights."""
    with pytest.raises(QuantizationError, match=r"there is no folder of ranges .*missing; record them with: with xrt"):
        int8(network(), tmp_path / "missing")
    with pytest.raises(QuantizationError, match="holds no ranges; record them"):
        int8(network(), tmp_path)
    calibrate(network("first"), tmp_path, [images(0)])
    other = {**W, "c1": weight("c1", 8, 3, 3, 3)}
    with pytest.raises(QuantizationError, match=r"holds no ranges of second \(\w{8}\), only of first \(\w{8}\)"):
        int8(network("second", other), tmp_path)


def test_a_damaged_file(ranges: pathlib.Path) -> None:
    """It is named, with what to do."""
    (file,) = ranges.glob("*.json")
    text = file.read_text()
    other, number = text.replace("xrt-ranges-1", "xrt-ranges-9"), text.replace('"x": [', '"x": 3, "y": [')
    for damaged in (text[:50], "[]", other, number):
        file.write_text(damaged)
        with pytest.raises(QuantizationError, match=r"is damaged: .*record the ranges again"):
            int8(network(), ranges)


def test_missing_and_endless_ranges(tmp_path: pathlib.Path) -> None:
    """A tensor without a range, and one that held an infinity: the tensor is named."""
    pytest.importorskip("onnxruntime")
    graph = network()
    known = Ranges("cnn", identity(graph), 1, {"x": (-1.0, 1.0), "b": (0.0, 2.0)})
    with pytest.raises(QuantizationError, match="no range was recorded for 'd', 'f' of cnn"):
        quantise(graph, known)
    endless = images(0)
    endless[0, 0, 0, 0] = np.inf
    calibrate(graph, tmp_path, [images(1), endless, images(2)])
    with pytest.raises(QuantizationError, match="'x' of cnn held values that are not finite"):
        int8(graph, tmp_path)


def test_folders_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    """It is said when the mode begins, before anything has run."""
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(QuantizationError, match="ranges cannot be written to"), xrt.ptq_calibration_mode(bad):
            raise AssertionError("the body ran")


def test_a_body_that_raises_writes_nothing(tmp_path: pathlib.Path) -> None:
    """And leaves the mode."""
    m = xrt.XRTModule(network(), engine="host")
    with pytest.raises(xrt.errors.InputError), xrt.ptq_calibration_mode(tmp_path):
        m(m(images(0)))
    assert not list(tmp_path.iterdir())
    assert calibration.active is None


def test_a_relative_folder_begins_where_the_process_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, when it is named: a change of the working directory afterwards does not move it."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    with xrt.ptq_calibration_mode("rel/ranges"):
        xrt.XRTModule(network(), engine="host")(images(0))
        os.chdir("/")
    assert len(list((tmp_path / "rel" / "ranges").glob("*.json"))) == 1
    os.chdir(tmp_path)
    m = xrt.XRTModule(network(), engine="host", use_int8=True, int8_calibration="rel/ranges")
    assert m.options.int8_calibration == str(tmp_path / "rel" / "ranges")
    assert m(images(1, 2)).shape == (2, 10)
    monkeypatch.setenv("FLAGS_int8_calibration", "./rel/../rel/ranges")
    assert resolve({}).int8_calibration == str(tmp_path / "rel" / "ranges")


def test_modes_do_not_nest(tmp_path: pathlib.Path) -> None:
    """The inner one is refused, the outer one goes on."""
    inner = xrt.ptq_calibration_mode(tmp_path)
    with xrt.ptq_calibration_mode(tmp_path):
        with pytest.raises(QuantizationError, match="they do not nest"):
            inner.__enter__()
        assert calibration.active is not None
    assert calibration.active is None


def test_nothing_to_quantise(tmp_path: pathlib.Path) -> None:
    """A graph without products, and a module that is quantised already."""
    x, y = Value("x", TensorType(F32, (2,))), Value("y")
    with xrt.ptq_calibration_mode(tmp_path), pytest.raises(QuantizationError, match="nothing to quantise: no Conv, "):
        xrt.XRTModule(graph_of([x], [y], [node("Relu", [x], [y])]), engine="host")(np.zeros(2, np.float32))
    pytest.importorskip("onnxruntime")
    calibrate(network(), tmp_path, [images(0)])
    m = xrt.XRTModule(network(), engine="host", use_int8=True, int8_calibration=str(tmp_path))
    with xrt.ptq_calibration_mode(tmp_path), pytest.raises(QuantizationError, match="quantised already"):
        m(images(0))


def test_without_the_library(ranges: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    with pytest.raises(QuantizationError, match=r"pip install 'xrt-core\[quantization\]'"):
        int8(network(), ranges)


def test_identity() -> None:
    """A model is the same whatever its batch and the names of its values, and another with other weights."""
    graph = network()
    fixed = graph.replace(inputs=graph.inputs)
    other = network("other", {**W, "fc": weight("fc", 16, 10)})

    assert identity(graph) == identity(fixed) == identity(network("renamed"))
    assert identity(graph) != identity(other)
    assert find_ranges("/nowhere/at/all", "0") is None


def test_observers_watch_each_tensor_once() -> None:
    """One pair of reductions a tensor, however many products read it."""
    x, a, b = Value("x", TensorType(F32, (4, 4))), Value("a"), Value("b")
    w = weight("w", 4, 4)
    graph = graph_of([x], [a, b], [node("MatMul", [x, w], [a]), node("MatMul", [x, a], [b])])
    observed, names = observers(graph)

    assert names == ["x", "a"]
    assert [n.op_type for n in observed.nodes[2:]] == ["ReduceMin", "ReduceMax"] * 2


def test_a_file_keeps_its_names(ranges: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Ranges of a graph are those of the file it was written to."""
    path = tmp_path / "cnn.onnx"
    save(network(), path)
    m = xrt.XRTModule(path, engine="host", use_int8=True, int8_calibration=str(ranges))

    assert list(m.input_types) == ["x"]
    assert m.output_names == ("y",)


@pytest.mark.nightly
def test_a_trained_model(tmp_path: pathlib.Path) -> None:
    """A trained MobileNetV3 on int8: the same through the host, XLA and ONNX Runtime, and near float32."""
    pytest.importorskip("jax")
    pytest.importorskip("onnxruntime")
    try:
        model, given = str(dev_models.path("ppocr_cls")), dev_models.inputs_for("ppocr_cls")
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed (see tests/conformance/models.txt)")
    (x,) = given.values()
    rng = np.random.default_rng(0)
    calibrate(model, tmp_path, [(x + 0.05 * rng.standard_normal(x.shape)).astype(np.float32) for _ in range(3)], "xla")
    want = xrt.XRTModule(model, engine="xla")(x)
    options: dict[str, Any] = {"use_int8": True, "int8_calibration": str(tmp_path)}
    host, *others = (xrt.XRTModule(model, engine=e, **options)(x) for e in ("host", "xla", "onnxruntime"))

    assert np.array_equal(host.argmax(-1), want.argmax(-1))
    assert 0 < np.abs(host - want).max() < 0.1  # of probabilities
    for other in others:
        assert np.abs(other - host).max() < 0.02
