"""Whole models: partitioned for a GPU that is not there, their clusters built, and run with the host standing in."""

from __future__ import annotations

import pathlib
import threading
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
import standin
from xrt_tensorrt import TensorRTEngine, _cuda, _toolkit, memory
from xrt_tensorrt.compiler import TensorRTCompiler

import xrt_core as xrt
from benchmarks import exported
from tests.conformance import dev_models
from xrt_core.engine.contract import CompileOptions, Function
from xrt_core.errors import CacheError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType

F32 = np.dtype(np.float32)


def _functions(module: xrt.XRTModule, inputs: dict[str, Any]) -> list[Function]:
    graph = module.partitioned(inputs)
    return [f for n in graph.nodes if isinstance(f := n.attributes.get("function"), Function)]


def _check_clusters(functions: list[Function], target: str) -> None:
    """Every cluster's network has the types and static shapes that XRT inferred, inside as well, and is built."""
    compiler = TensorRTEngine().targeting(target).compiler("cuda:0", CompileOptions())
    for function in functions:
        network = compiler.network(function)  # raises where inputs or outputs differ
        known = {v.name: v for n in function.body.nodes for v in n.outputs if v is not None}
        for layer in network.layers:
            for i in range(layer.num_outputs):
                t = layer.get_output(i)
                v = known.get(t.name)
                if v is not None and isinstance(v.type, TensorType):
                    assert tuple(t.shape) == v.type.shape, t.name
        made = compiler.compile(function, function.params, function.returns, function.aliases)
        assert target in repr(getattr(made, "built").manifest.targets)  # noqa: B009


def _small() -> Graph:
    """NonZero, whose shape follows the data, between a convolution and what is computed of its result."""
    x, w = Value("x", TensorType(F32, (1, 3, 8, 8))), np.random.default_rng(0).standard_normal((4, 3, 3, 3))
    c, r, z, total, y = (Value(n) for n in ("c", "r", "z", "total", "y"))
    nodes = [
        Node("Conv", [x, Value.constant(w.astype(np.float32), "w")], [c], version=11, name="conv"),
        Node("Relu", [c], [r], version=14, name="act"),
        Node("NonZero", [r], [z], version=13, name="where"),
        Node("ReduceMax", [z], [total], {"keepdims": 0}, version=18, name="last"),
        Node("Exp", [r], [y], version=13, name="exp"),
    ]
    return Graph([x], [total, y], nodes, opsets={"": 21}, name="hybrid")


@pytest.fixture
def target(engine: TensorRTEngine) -> str:
    """A target, where there is a library that builds for it."""
    return "sm_89"


def test_a_hybrid_plan(target: str) -> None:
    """What TensorRT cannot take runs on the host, and the host stands in for the clusters that were built."""
    x = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    module = xrt.XRTModule(_small(), engine="tensorrt", target=target, cache="off", prune=False)
    results = module(x)
    explanation = module.explain()

    assert 0.5 < explanation.node_share < 1
    assert "NonZero (where): tensorrt: the result's shape depends on data" in str(explanation)
    assert not [e for e in explanation.errors.values() if "failed to compile" in e]
    for got, want in zip(results, xrt.XRTModule(_small(), engine="host")(x), strict=True):
        np.testing.assert_array_equal(got, want)


def _convolutions() -> Graph:
    """Two convolutions with a Relu between them, large enough to be lowered and quantised."""
    rng = np.random.default_rng(0)
    x = Value("x", TensorType(F32, (1, 8, 16, 16)))
    w1, w2 = (Value.constant(rng.standard_normal((8, 8, 3, 3)).astype(np.float32) / 8, n) for n in ("w1", "w2"))
    c, r, y = Value("c"), Value("r"), Value("y")
    nodes = [
        Node("Conv", [x, w1], [c], version=11, name="first"),
        Node("Relu", [c], [r], version=14, name="act"),
        Node("Conv", [r, w2], [y], version=11, name="second"),
    ]
    return Graph([x], [y], nodes, opsets={"": 18}, name="convolutions")


def _network(module: xrt.XRTModule, inputs: dict[str, Any]) -> _toolkit.Network:
    """The network of the module's one cluster, which is built as well."""
    (function,) = _functions(module, inputs)
    compiler = TensorRTEngine().targeting("sm_89").compiler("cuda:0", CompileOptions())
    compiler.compile(function, function.params, function.returns, ())
    return compiler.network(function)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lowered_precision(target: str, dtype: str) -> None:
    """Convolutions of a graph that the core lowered are computed in the narrow type, inputs and outputs keep theirs."""
    option = {"float16": "use_fp16", "bfloat16": "use_bf16"}[dtype]
    inputs = {"x": np.ones((1, 8, 16, 16), np.float32)}
    module = xrt.XRTModule(_convolutions(), engine="tensorrt", target=target, prune=False, **{option: True})
    network = _network(module, inputs)
    kinds = {str(network.toolkit.dtype(x.get_output(0).dtype)) for x in network.layers if x.name in ("first", "second")}

    assert kinds == {dtype}
    assert {network.toolkit.dtype(t.dtype) for t in (*network.inputs, *network.outputs)} == {F32}


def test_int8(target: str, tmp_path: pathlib.Path) -> None:
    """Recorded ranges become Q/DQ nodes, and these TensorRT's own layers around convolutions."""
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 8, 16, 16)).astype(np.float32)}
    with xrt.ptq_calibration_mode(tmp_path):
        xrt.XRTModule(_convolutions(), engine="host").run(inputs)
    module = xrt.XRTModule(
        _convolutions(), engine="tensorrt", target=target, prune=False, use_int8=True, int8_calibration=str(tmp_path)
    )
    kinds = [str(layer.type).rpartition(".")[2] for layer in _network(module, inputs).layers]

    assert kinds.count("CONVOLUTION") == 2
    assert kinds.count("QUANTIZE") >= 2
    assert kinds.count("DEQUANTIZE") >= 4  # of both inputs and both weights


def test_max_batch_size_reaches_the_engine(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the module go to the compiler, those of the engine alone too."""
    seen: list[CompileOptions] = []
    init = TensorRTCompiler.__init__

    def noting(self: TensorRTCompiler, toolkit: Any, device: int, options: CompileOptions, target: str = "") -> None:
        seen.append(options)
        init(self, toolkit, device, options, target)

    monkeypatch.setattr(TensorRTCompiler, "__init__", noting)
    xrt.XRTModule(
        _small(), engine="tensorrt", target=target, max_batch_size=4, max_workspace_bytes=1 << 20,
        engine_options={"tensorrt": {"opt_batch": 2}},
    )  # fmt: skip
    assert [(o.max_batch_size, o.workspace_bytes, dict(o.extra)) for o in seen] == [(4, 1 << 20, {"opt_batch": 2})]


def test_a_file_for_another_machine(target: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved for sm_89 loads where there is such a GPU, without compiling; where there is another it is refused.

    The GPU is a stand-in; the library, the files and their keys are real.
    """
    x, y = Value("x", TensorType(F32, (2, 3))), Value("y")
    nodes = [Node("Abs", [x], [s := Value("s")], version=13), Node("Neg", [s], [y], version=13)]
    module = xrt.XRTModule(Graph([x], [y], nodes, opsets={"": 21}), engine="tensorrt", target=target, prune=False)
    data = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    module.prepare({"x": data})
    path = tmp_path / "model.xrt"
    module.save(path)

    fake = standin.Cuda((8, 9))
    engine_class = standin.Engine
    monkeypatch.setattr(_cuda, "_runtime", lambda: fake)
    monkeypatch.setattr(_cuda, "_load_driver", lambda: None)
    monkeypatch.setattr(memory, "_scratch", {})
    monkeypatch.setattr(memory, "_local", threading.local())
    monkeypatch.setattr(TensorRTCompiler, "compile", lambda *a: pytest.fail("something was compiled"))

    def deserialize(self: _toolkit.Toolkit, blob: bytes) -> Any:
        (function,) = _functions(module, {"x": data})
        return engine_class(fake, lambda x: [-np.abs(x)], function.params, function.returns)

    monkeypatch.setattr(_toolkit.Toolkit, "deserialize", deserialize)
    monkeypatch.setattr(_toolkit.Toolkit, "new_context", lambda self, engine, **_: engine.create_execution_context(0))
    _forget()
    try:
        loaded = xrt.XRTModule.load(path)
        np.testing.assert_array_equal(loaded(data), -np.abs(data))
        assert not loaded.explain().errors
        assert "cudaMemcpyAsync" in fake.names()
        fake._capability.update(major=8, minor=6)
        _forget()
        with pytest.raises(CacheError, match="made for engine tensorrt .*sm_89.*here is .*sm_86"):
            xrt.XRTModule.load(path)
    finally:
        monkeypatch.undo()
        _forget()


class _Images(xrt.Graph):
    """A small network of images with one of each layer that has weights, and its optimiser."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        parameter = lambda *shape: xrt.Variable(rng.standard_normal(shape).astype(np.float32) / 10)  # noqa: E731
        self.w1, self.w2, self.w3 = parameter(8, 3, 3, 3), parameter(8, 4, 3, 3), parameter(8, 10)
        self.scale, self.bias, self.b3 = parameter(8), parameter(8), parameter(10)
        self.mean = xrt.Variable(np.zeros(8, np.float32), trained=False)
        self.var = xrt.Variable(np.ones(8, np.float32), trained=False)
        self.add_optimizer(xrt.optim.Adam(1e-3))

    def build(self, x: Any, labels: Any) -> Any:
        ops = xrt.ops
        h = ops.Conv(x, self.w1, strides=[2, 2], pads=[1, 1, 1, 1])
        h = ops.Relu(ops.BatchNormalization(h, self.scale, self.bias, self.mean, self.var))
        h = ops.MaxPool(h, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], outputs=1)
        h = ops.AveragePool(ops.Conv(h, self.w2, group=2, pads=[1, 1, 1, 1]), kernel_shape=[2, 2])
        scores = ops.Gemm(ops.Flatten(ops.GlobalAveragePool(h)), self.w3, self.b3)
        ops.SoftmaxCrossEntropyLoss(scores, labels, outputs=1).backward()
        return scores


def test_a_training_step(target: str) -> None:
    """Forward, backward and updates of a network of images are taken whole and built; the host stands in."""
    rng = np.random.default_rng(1)
    batch = rng.standard_normal((4, 3, 16, 16)).astype(np.float32), rng.integers(0, 10, 4)
    taken = xrt.training.TrainModule(_Images(), engine="tensorrt", target=target, prune=False, cache="off")
    losses = [float(taken.step(*batch)) for _ in range(2)]
    explanation = taken.explain()

    assert explanation.node_share == 1
    assert all("cannot run here" in e for e in explanation.errors.values()), explanation.errors
    host = xrt.training.TrainModule(_Images(), engine="host")
    np.testing.assert_allclose(losses, [float(host.step(*batch)) for _ in range(2)], rtol=1e-6)


def _forget() -> None:
    """Ask again what devices there are."""
    from xrt_tensorrt import _probe

    from xrt_core.engine import engines

    for cached in (_cuda.why_unusable, _cuda.capability, _probe):
        cached.cache_clear()
    engines.refresh()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target_"),
    [
        # the networks are the same for both targets; DenseNet has the layers of the others, 121 times
        pytest.param(n, t, marks=() if t in ts and n != "light_densenet121" else pytest.mark.nightly)
        for n, ts in {**dict.fromkeys(dev_models.names(), ("sm_89",)), "ppocr_cls": ("sm_80", "sm_89")}.items()
        for t in ("sm_80", "sm_89")
    ],
)
def test_development_models(name: str, target_: str, engine: TensorRTEngine) -> None:
    """TensorRT takes nearly all of every development model, in networks of the shapes that XRT inferred, all built."""
    try:
        path = dev_models.path(name)
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed (see models.txt)")
    module = xrt.XRTModule(path, engine="tensorrt", target=target_, cache="off")
    given = dev_models.inputs_for(name)
    names = [n for n in module.input_types if n not in module.optional_inputs]
    inputs = dict(zip(names, given.values(), strict=True)) if name.startswith("light_") else given
    share = module.explain(inputs).node_share

    assert share >= 0.95, module.explain(inputs)
    _check_clusters(_functions(module, inputs), target_)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppocr_cls", "basic_pitch"])
def test_batches_of_a_real_model_share_an_engine(name: str, target: str) -> None:
    """Signatures that differ in the batch alone are the same function but for it, and get one engine."""
    try:
        module = xrt.XRTModule(dev_models.path(name), engine="tensorrt", target=target, cache="off")
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed (see models.txt)")
    compiler = TensorRTEngine().targeting(target).compiler("cuda:0", CompileOptions(max_batch_size=8))
    built = set()
    for variant in (0, 1):
        (f,) = _functions(module, dev_models.inputs_for(name, variant))
        built.add(getattr(compiler.compile(f, f.params, f.returns, ()), "built"))  # noqa: B009
    (engine,) = built
    assert engine.manifest.profiles == ((1, 1, 8),)


@pytest.mark.slow
@pytest.mark.parametrize("target_", ["sm_80", "sm_89"])
@pytest.mark.parametrize("name", exported.NAMES)
def test_exported_models(name: str, target_: str, engine: TensorRTEngine) -> None:
    """BERT, GPT-2, ViT, ResNet-50 and MobileNetV2 are one cluster each, built for two GPUs."""
    path = exported.folder() / f"{name}.onnx"
    if not path.exists():
        pytest.skip("no exported models: python benchmarks/exported.py FOLDER, XRT_BENCH_MODELS=FOLDER")
    module = xrt.XRTModule(path, engine="tensorrt", target=target_, cache="off")
    inputs = exported.inputs_for(name)
    functions = _functions(module, inputs)

    assert module.explain(inputs).node_share == 1
    assert len(functions) == 1
    _check_clusters(functions, target_)
