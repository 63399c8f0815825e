"""Real builds without a GPU: the network that is built has the layers, types and shapes of the function."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xrt_tensorrt import TensorRTEngine, _cuda, _toolkit
from xrt_tensorrt.compiler import TensorRTCompiler, form_of
from xrt_tensorrt.executable import TensorRTExecutable

from xrt_core.engine.contract import CompileOptions, Function
from xrt_core.engine.serialization import pack, unpack
from xrt_core.errors import CompileError, UnsupportedError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType

F32, F16, I64 = (np.dtype(t) for t in (np.float32, np.float16, np.int64))
BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def _value(name: str, dtype: Any, *shape: int) -> Value:
    return Value(name, TensorType(np.dtype(dtype), shape))


def _function(inputs: list[Value], nodes: list[Node], outputs: list[Value]) -> Function:
    return Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="f"))


def _compiler(engine: TensorRTEngine, **options: Any) -> TensorRTCompiler:
    return engine.compiler("cuda:0", CompileOptions(**options))


def _compile(compiler: TensorRTCompiler, function: Function) -> TensorRTExecutable:
    made = compiler.compile(function, function.params, function.returns, function.aliases)
    assert isinstance(made, TensorRTExecutable)
    return made


def _mlp(batch: int = 2, wide: int = 64) -> Function:
    """Relu(x @ w) reshaped to [batch, 2, wide / 2]: weights large enough to stay outside the model."""
    x, h, r, y = (
        _value("x", F32, batch, 32),
        *(_value(n, F32, batch, wide) for n in "hr"),
        _value("y", F32, batch, 2, wide // 2),
    )
    w = Value.constant(np.random.default_rng(0).standard_normal((32, wide)).astype(np.float32), "w")
    target = Value.constant(np.array([batch, 2, wide // 2]), "target")
    nodes = [
        Node("MatMul", [x, w], [h], version=13, name="product"),
        Node("Relu", [h], [r], version=14, name="act"),
        Node("Reshape", [r, target], [y], version=21, name="split"),
    ]
    return _function([x], nodes, [y])


def test_the_network_is_the_functions(engine: TensorRTEngine) -> None:
    """Layers in order, strongly typed, with the parameters' names, dtypes and shapes."""
    function = _mlp()
    network = _compiler(engine).network(function)
    trt = _toolkit.toolkit().trt

    assert [(t.name, tuple(t.shape), t.dtype) for t in network.inputs] == [("x", (2, 32), trt.float32)]
    assert [(t.name, tuple(t.shape), t.dtype) for t in network.outputs] == [("y", (2, 2, 32), trt.float32)]
    assert {"product", "act", "split"} <= {layer.name for layer in network.layers}
    assert network.network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def test_weights_are_handed_over_in_place(engine: TensorRTEngine) -> None:
    """The model's bytes do not hold the weight, and the engine's do."""
    function = _mlp(wide=512)
    compiler = _compiler(engine)
    assert compiler.network(function).model.model.ByteSize() < 2000
    assert len(_compile(compiler, function).built.blob) > 32 * 512 * 4


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I64, np.dtype(np.int32)], ids=str)
def test_dtypes_are_kept(engine: TensorRTEngine, dtype: np.dtype) -> None:
    """A network of one dtype has it in every tensor, and is built."""
    x, s, y = (_value(n, dtype, 2, 3) for n in "xsy")
    two = Value.constant(np.array(2).astype(dtype), "two")
    function = _function([x], [Node("Mul", [x, two], [s], version=14), Node("Add", [s, x], [y], version=14)], [y])
    network = _compiler(engine).network(function)

    kinds = {network.toolkit.dtype(layer.get_output(0).dtype) for layer in network.layers}
    assert kinds == {dtype}
    assert _compile(_compiler(engine), function).built.blob


def test_booleans_and_scalars(engine: TensorRTEngine) -> None:
    """Comparisons give booleans, scalars have no dimensions, and selecting by them keeps the type."""
    a, b, y = _value("a", F32), _value("b", F32), _value("y", F32)
    c = _value("c", np.bool_)
    nodes = [Node("Less", [a, b], [c], version=13), Node("Where", [c, a, b], [y], version=16)]
    network = _compiler(engine).network(_function([a, b], nodes, [c, y]))

    found = {t.name: (network.toolkit.dtype(t.dtype), tuple(t.shape)) for t in network.outputs}
    assert found == {"c": (np.dtype(bool), ()), "y": (F32, ())}


@pytest.mark.parametrize("dtype", [np.dtype(np.int8), F8], ids=str)
def test_quantised_networks_are_explicit(engine: TensorRTEngine, dtype: np.dtype) -> None:
    """QuantizeLinear and DequantizeLinear become TensorRT's own layers, with the narrow type between them."""
    x, q, d, y = _value("x", F32, 4, 32), _value("q", dtype, 4, 32), _value("d", F32, 4, 32), _value("y", F32, 4, 8)
    scale = Value.constant(np.array(0.1, np.float32), "scale")
    zero = Value.constant(np.zeros((), dtype), "zero")
    w = Value.constant(np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32), "w")
    nodes = [
        Node("QuantizeLinear", [x, scale, zero], [q], version=21, name="quantise"),
        Node("DequantizeLinear", [q, scale, zero], [d], version=21, name="dequantise"),
        Node("MatMul", [d, w], [y], version=13),
    ]
    function = _function([x], nodes, [y])
    assert all(engine.supports(n, "cuda", "inference") for n in function.body.nodes)
    network = _compiler(engine).network(function)
    kinds = [str(layer.type).rpartition(".")[2] for layer in network.layers]

    assert kinds.count("QUANTIZE") == kinds.count("DEQUANTIZE") == 1
    quantise = next(layer for layer in network.layers if str(layer.type).endswith(".QUANTIZE"))
    assert network.toolkit.dtype(quantise.get_output(0).dtype) == dtype
    assert _compile(_compiler(engine), function).built.blob


def test_int4_weights(engine: TensorRTEngine) -> None:
    """A constant of 4 bits is dequantised by TensorRT."""
    w = Value.constant(np.arange(-8, 8).reshape(4, 4).astype(ml_dtypes.int4), "w")
    scale, x = Value.constant(np.ones((), np.float32), "scale"), _value("x", F32, 2, 4)
    d, y = _value("d", F32, 4, 4), _value("y", F32, 2, 4)
    nodes = [Node("DequantizeLinear", [w, scale], [d], version=21), Node("MatMul", [x, d], [y], version=13)]
    function = _function([x], nodes, [y])
    network = _compiler(engine).network(function)

    assert "DEQUANTIZE" in [str(layer.type).rpartition(".")[2] for layer in network.layers]


def test_nodes_of_several_opsets(engine: TensorRTEngine) -> None:
    """A newer version of an operator that only takes more types goes with the others; another stays an error."""
    x, a, r, y = (_value(n, BF16, 1, 2, 8, 8) for n in ("x", "a", "r", "y"))
    pool = Node("GlobalAveragePool", [r], [_value("y", BF16, 1, 2, 1, 1)], version=22)
    nodes = [Node("Abs", [x], [a], version=13), Node("HardSwish", [a], [r], version=14), pool]
    function = Function.from_graph(Graph([x], [pool.outputs[0]], nodes, opsets={"": 18}, name="f"))
    assert _compile(_compiler(engine), function).built.blob

    scale = Value.constant(np.ones(2, ml_dtypes.bfloat16), "s")
    group = Node("GroupNormalization", [a, scale, scale], [y], {"num_groups": 2}, version=18)
    mixed = [nodes[0], group, Node("HardSwish", [y], [r], version=22)]
    function = Function.from_graph(Graph([x], [r], mixed, opsets={"": 18}, name="f"))
    with pytest.raises(CompileError, match="mixes nodes that no one opset has: Abs-13, GroupNormalization-18"):
        _compile(_compiler(engine), function)


def test_a_result_that_is_an_input(engine: TensorRTEngine) -> None:
    """An input that comes back, twice, is a network like any other."""
    x, y = _value("x", F32, 2), _value("y", F32, 2)
    function = _function([x], [Node("Neg", [x], [y], version=13)], [y, x, y])
    assert len(_compiler(engine).network(function).outputs) == 3
    assert _compile(_compiler(engine), function).built.blob


def test_an_input_that_nobody_reads(engine: TensorRTEngine) -> None:
    """It stays an input."""
    x, unused, y = _value("x", F32, 2), _value("u", F32, 3), _value("y", F32, 2)
    network = _compiler(engine).network(_function([x, unused], [Node("Neg", [x], [y], version=13)], [y]))
    assert [t.name for t in network.inputs] == ["x", "u"]


def test_attention_is_built_from_its_body(engine: TensorRTEngine) -> None:
    """TensorRT-RTX parses masked attention as one layer and does not build it; its body it builds."""
    q, k, v, y = (_value(n, F32, 1, 2, 8, 16) for n in "qkvy")
    function = _function([q, k, v], [Node("Attention", [q, k, v], [y], {"is_causal": 1}, version=23)], [y])
    network = _compiler(engine).network(function)

    assert {"MATRIX_MULTIPLY", "SOFTMAX"} <= {str(layer.type).rpartition(".")[2] for layer in network.layers}
    assert _compile(_compiler(engine), function).built.blob


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_targets(engine: TensorRTEngine, target: str) -> None:
    """An engine is built for each GPU that the library knows, and says which."""
    made = _compile(_compiler(engine.targeting(target)), _mlp())
    assert made.built.manifest.targets == (target,)
    assert made.built.manifest.inputs == ("x",)


def test_options_reach_the_builder(engine: TensorRTEngine) -> None:
    """The configuration reads back as the settings say."""
    from xrt_tensorrt.settings import Settings

    toolkit = _toolkit.toolkit()
    trt, flags = toolkit.trt, toolkit.trt.BuilderFlag
    builder = toolkit._builder()
    settings = Settings(
        ("sm_86",), workspace=1 << 22, optimization_level=1, tf32=False, strict_nans=True, version_compatible=True,
        strip_weights=True,
    )  # fmt: skip
    config = toolkit.configure(builder, settings)

    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 22
    assert config.builder_optimization_level == 1
    assert not config.get_flag(flags.TF32)
    assert all(config.get_flag(f) for f in (flags.STRICT_NANS, flags.VERSION_COMPATIBLE, flags.STRIP_PLAN))
    assert config.get_compute_capability(0) == trt.ComputeCapability.SM86
    plain = toolkit.configure(builder, Settings(("sm_86",)))
    assert toolkit.configure(builder, Settings(("sm_86",), tf32=True)).get_flag(flags.TF32)
    off = (flags.TF32, flags.STRICT_NANS, flags.VERSION_COMPATIBLE, flags.STRIP_PLAN)
    assert not any(plain.get_flag(f) for f in off)


def test_stripping_weights_needs_a_gpu(engine: TensorRTEngine) -> None:
    """Without one TensorRT-RTX builds no such engine, and the message says where it is built."""
    if not _cuda.why_unusable():
        pytest.skip("there is a GPU")
    with pytest.raises(CompileError, match="engines without weights are built on a machine with a GPU.*Myelin"):
        _compile(_compiler(engine, extra={"strip_weights": True}), _mlp())


def test_stripped_engines_load_with_their_function(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stripped engine does not serialise alone, and gets every weight of the function when it is loaded."""
    flag = _toolkit.toolkit().trt.BuilderFlag.STRIP_PLAN
    monkeypatch.setattr(_toolkit.Network, "build", lambda self, config: b"stripped" * config.get_flag(flag))
    function = _mlp()
    compiler = _compiler(engine, extra={"strip_weights": True})
    stripped = _compile(compiler, function)

    assert stripped.built.blob == b"stripped"
    with pytest.raises(UnsupportedError, match="without its weights"):
        stripped.serialize()
    blob = stripped.serialize_code()
    with pytest.raises(CompileError, match="no function gives them back"):
        compiler.load(blob)
    loaded = compiler.load_code(blob, function)
    assert isinstance(loaded, TensorRTExecutable)
    assert loaded.built._refit is not None
    assert {w.nbytes for w in loaded.built._refit.weights.values()} == {32 * 64 * 4, 3 * 8}


def test_other_weights_build_nothing(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option `refit` a function that differs in weights alone gets the engine that is there, with its own
    weights; one that differs otherwise is built."""
    flags, built = _toolkit.toolkit().trt.BuilderFlag, []

    def build(self: Any, config: Any) -> bytes:
        built.append((config.get_flag(flags.REFIT), config.get_flag(flags.STRIP_PLAN)))
        return f"engine {len(built)}".encode()

    monkeypatch.setattr(_toolkit.Network, "build", build)
    compiler = _compiler(engine, extra={"refit": True})
    functions = [_with_weights(k) for k in (1.0, 2.0)]
    one, other = (_compile(compiler, f) for f in functions)
    assert built == [(True, True)]
    assert one.built.blob == other.built.blob
    given = [next(w for w in x.built._refit.weights.values() if w.size == 64 * 64) for x in (one, other)]
    assert [float(w.flat[0]) for w in given] == [1.0, 2.0]
    assert form_of(functions[0]) == form_of(functions[1]) != form_of(_with_weights(1.0, bias=3.0))
    assert _compile(compiler, _with_weights(1.0, bias=3.0)).built.blob == b"engine 2"
    plain = _compiler(engine, extra={"strip_weights": True})
    assert len({bytes(_compile(plain, f).built.blob) for f in functions}) == 2


def _with_weights(value: float, bias: float = 0.0) -> Function:
    """x @ w + b, of which w is large."""
    x, h, y = (Value(n, TensorType(F32, (4, 64))) for n in "xhy")
    w = Value.constant(np.full((64, 64), value, np.float32), "w")
    b = Value.constant(np.full((1,), bias, np.float32), "b")
    nodes = [Node("MatMul", [x, w], [h], version=13), Node("Add", [h, b], [y], version=14)]
    return Function.from_graph(Graph([x], [y], nodes, opsets={"": 21}, name="weights"), name="weights")


def test_serialised_and_loaded(engine: TensorRTEngine) -> None:
    """The same engine and manifest come back."""
    compiler = _compiler(engine)
    made = _compile(compiler, _mlp())
    loaded = compiler.load(made.serialize())

    assert isinstance(loaded, TensorRTExecutable)
    assert loaded.built.manifest == made.built.manifest
    assert loaded.built.blob == made.built.blob
    assert loaded.serialize() == made.serialize()


def edited(blob: bytes, before: str, after: str) -> bytes:
    """The serialised executable with another text in its header, under a digest that fits."""
    header, parts = unpack(blob[:8], blob, "tensorrt", dict[str, Any])
    text = json.dumps(header)
    assert before in text
    return pack(blob[:8], json.loads(text.replace(before, after, 1)), parts)


def test_foreign_and_damaged_bytes(engine: TensorRTEngine) -> None:
    """Every kind of wrong bytes is refused with what is wrong."""
    compiler = _compiler(engine)
    blob = _compile(compiler, _mlp()).serialize()
    for bad, reason in (
        (b"", "tensorrt: the blob is empty"),
        (b"XRTXLA2\n" + blob[8:], "not a serialised executable"),
        (blob[:-1], "is damaged or cut off"),
        (blob[:20] + b"\xff\xff" + blob[22:], "is damaged or cut off"),
        (edited(blob, '"manifest"', '"other"'), "is damaged: Object missing required field `manifest`"),
        (edited(blob, '"sm_89"', '"sm_80"'), "built for sm_80; it is wanted for sm_89"),
        (edited(blob, '"TensorRT-RTX"', '"TensorRT-ABC"'), "built by TensorRT-ABC"),
    ):
        with pytest.raises(CompileError, match=reason):
            compiler.load(bad)


def test_another_version(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the library refuses an engine, unless that was built to be version-compatible and is older."""
    blob = _compile(_compiler(engine), _mlp()).serialize()
    lasting = _compile(_compiler(engine, extra={"version_compatible": True}), _mlp()).serialize()
    compiler = _compiler(engine)
    monkeypatch.setattr(compiler._toolkit, "version", "1.9.0.1")
    with pytest.raises(CompileError, match="here is 1.9.0.1 .version_compatible=True"):
        compiler.load(blob)
    assert compiler.load(lasting)
    monkeypatch.setattr(compiler._toolkit, "version", "1.2.0.1")
    with pytest.raises(CompileError, match="here is 1.2.0.1"):
        compiler.load(lasting)


def test_a_refused_function_names_the_node(engine: TensorRTEngine) -> None:
    """The parser's message and the node are in the error."""
    x, y = _value("x", F32, 5, 5), _value("y", F32)
    function = _function([x], [Node("Det", [x], [y], version=11, name="determinant")], [y])
    with pytest.raises(CompileError, match=r"refused by the parser: .*'determinant', Det"):
        _compile(_compiler(engine), function)


def test_a_failed_build_names_the_workspace(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What TensorRT says is in the error, with the limit that it was given."""

    def failing(self: _toolkit.Network, config: Any) -> memoryview:
        assert config.get_memory_pool_limit(_toolkit.toolkit().trt.MemoryPoolType.WORKSPACE) == 1024
        raise CompileError("no implementation for node product within the workspace")

    monkeypatch.setattr(_toolkit.Network, "build", failing)
    said = r"'f' is not built \(with max_workspace_bytes=1024\): no implementation for node product"
    with pytest.raises(CompileError, match=said):
        _compile(_compiler(engine, workspace_bytes=1024), _mlp())


# --- any batch ------------------------------------------------------------------------------------------------------


def test_one_engine_for_every_batch(engine: TensorRTEngine) -> None:
    """With max_batch_size the batch is left open: other batches of the same function share the engine."""
    compiler = _compiler(engine, max_batch_size=16, extra={"opt_batch": 8})
    two, five = _compile(compiler, _mlp(2)), _compile(compiler, _mlp(5))

    assert two.built is five.built
    assert two.built.manifest.profiles == ((1, 8, 16),)


def test_the_open_network(engine: TensorRTEngine) -> None:
    """Its first dimensions are open, also behind a Reshape whose target held the batch."""
    from xrt_tensorrt.batching import generalise

    batched = generalise(_mlp(2))
    assert batched is not None
    network = _compiler(engine).network(batched.function, -1)
    assert [tuple(t.shape) for t in (*network.inputs, *network.outputs)] == [(-1, 32), (-1, 2, 32)]


def test_a_larger_batch_rebuilds(engine: TensorRTEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Executables of the small batches move to the larger engine; the cost is logged once."""
    compiler = _compiler(engine, max_batch_size=4)
    small = _compile(compiler, _mlp(2))
    first = small.built.blob
    with caplog.at_level(logging.WARNING, "xrt.tensorrt"):
        large = _compile(compiler, _mlp(9))
        _compile(compiler, _mlp(9))

    assert large.built is small.built
    assert small.built.manifest.profiles == ((1, 9, 9),)
    assert small.built.blob != first
    assert len([r for r in caplog.records if "was built anew for up to 9" in r.message]) == 1


def test_regimes_of_batches_are_tuned_apart(
    engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One engine has a profile for each; a batch between two has an engine of its own, one above them all lets the last
    grow."""
    built: list[int] = []
    build = _toolkit.Network.build

    def counted(self: _toolkit.Network, config: Any) -> bytes:
        built.append(config.num_optimization_profiles)
        return build(self, config)

    monkeypatch.setattr(_toolkit.Network, "build", counted)
    compiler = _compiler(engine, extra={"profiles": [[1, 1, 1], [8, 16, 32]]})
    one, many = _compile(compiler, _mlp(1)), _compile(compiler, _mlp(20))
    assert one.built is many.built
    assert one.built.manifest.profiles == ((1, 1, 1), (8, 16, 32))
    assert [one.built.manifest.profile_for(n) for n in (1, 2, 8, 32, 33)] == [0, None, 1, 1, None]
    between = _compile(compiler, _mlp(3))
    assert between.built.manifest.profiles == ()
    with caplog.at_level(logging.WARNING, "xrt.tensorrt"):
        large = _compile(compiler, _mlp(40))
    assert large.built is one.built
    assert one.built.manifest.profiles == ((1, 1, 1), (8, 16, 40))
    assert built == [2, 0, 2]
    assert len([r for r in caplog.records if "was built anew for up to 40" in r.message]) == 1
    again = _compiler(engine, extra={"profiles": [[1, 1, 1], [8, 16, 32]]})
    loaded = again.load_code(large.serialize_code(), _mlp(40))
    assert isinstance(loaded, TensorRTExecutable)
    assert _compile(again, _mlp(1)).built is loaded.built


def test_the_old_engine_stays_where_no_larger_one_is_built(
    engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild that fails leaves the engine of the smaller batches alone; the large batch gets one of its own."""
    compiler = _compiler(engine, max_batch_size=4)
    small = _compile(compiler, _mlp(2))
    before = small.built.blob
    build = _toolkit.Network.build

    def fails_with_profiles(self: _toolkit.Network, config: Any) -> bytes:
        if config.num_optimization_profiles:
            raise CompileError("insufficient memory")
        return build(self, config)

    monkeypatch.setattr(_toolkit.Network, "build", fails_with_profiles)
    large = _compile(compiler, _mlp(9))

    assert small.built.blob == before
    assert small.built.largest == 4
    assert large.built.manifest.profiles == ()


def _with_constant(batch: int, rows: int) -> Function:
    x, y = _value("x", F32, batch, 4), _value("y", F32, batch, 4)
    c = Value.constant(np.arange(rows * 4, dtype=np.float32).reshape(rows, 4), "c")
    return _function([x], [Node("Add", [x, c], [y], version=14)], [y])


def test_a_constant_that_holds_the_batch_keeps_it_closed(engine: TensorRTEngine) -> None:
    """A function that does not go with other batches is built for its own alone."""
    compiler = _compiler(engine, max_batch_size=8)
    assert _compile(compiler, _with_constant(3, 3)).built.manifest.profiles == ()
    assert _compile(compiler, _with_constant(3, 1)).built.manifest.profiles == ((1, 3, 8),)


def test_another_value_is_another_engine(engine: TensorRTEngine) -> None:
    """A batch that was folded into a number makes another function, which does not share the engine."""
    compiler = _compiler(engine, max_batch_size=8)

    def mean(batch: int) -> Function:
        x, y = _value("x", F32, batch, 4), _value("y", F32, batch, 4)
        return _function([x], [Node("Div", [x, Value.constant(np.float32(batch), "n")], [y], version=14)], [y])

    assert _compile(compiler, mean(2)).built is not _compile(compiler, mean(3)).built


def test_results_without_the_batch_keep_it_closed(engine: TensorRTEngine) -> None:
    """A sum over the batch has no first dimension to leave open."""
    x, y = _value("x", F32, 2, 4), _value("y", F32, 1, 4)
    axes = Value.constant(np.array([0]), "axes")
    function = _function([x], [Node("ReduceSum", [x, axes], [y], version=13)], [y])
    assert _compile(_compiler(engine, max_batch_size=8), function).built.manifest.profiles == ()


def test_loaded_engines_serve_other_batches(engine: TensorRTEngine) -> None:
    """An engine from the disk is found by a function of another batch."""
    blob = _compile(_compiler(engine, max_batch_size=8), _mlp(2)).serialize_code()
    compiler = _compiler(engine, max_batch_size=8)
    loaded = compiler.load_code(blob, _mlp(2))
    assert isinstance(loaded, TensorRTExecutable)
    assert _compile(compiler, _mlp(7)).built is loaded.built


def test_timing_cache_is_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full TensorRT: what one build timed is given to the next, joined with what another process wrote meanwhile."""
    from types import SimpleNamespace

    from xrt_tensorrt import timing

    class Cache:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
            self.content += b"+" + other.content
            return True

        def serialize(self) -> bytes:
            return self.content

    class Config:
        cache: Any = None

        def create_timing_cache(self, content: bytes) -> Cache:
            return Cache(content)

        def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
            self.cache = cache
            return True

        def get_timing_cache(self) -> Cache:
            return self.cache

    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path))
    full: Any = SimpleNamespace(is_rtx=False, flavour="TensorRT", version="10.9.0")
    first = Config()
    with timing.kept(full, first, True):
        assert first.cache.content == b""
        first.cache.content = b"mine"
    (file,) = (tmp_path / "tensorrt").glob("timing-TensorRT-10.9.0-*.bin")
    assert file.read_bytes() == b"mine"
    assert file.stat().st_mode & 0o77 == 0
    second = Config()
    with timing.kept(full, second, True):
        assert second.cache.content == b"mine"
        second.cache.content = b"new"
    assert file.read_bytes() == b"new+mine"
    with timing.kept(full, untouched := Config(), False):
        pass
    assert untouched.cache is None
