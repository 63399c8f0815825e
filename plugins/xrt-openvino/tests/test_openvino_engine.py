"""What the engine says about itself and about nodes, and what its executables do beyond the conformance kit."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import onnx
import pytest
from xrt_openvino import OpenVinoEngine

from xrt_core import XRTModule
from xrt_core.engine.contract import CompileOptions, Executable, Function
from xrt_core.errors import CompileError, EngineUnavailableError, ExecutionError, OptionError, UnsupportedError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import SequenceType, TensorType, ValueType

BOOL, F16, F32, F64, I32, I64, U8 = (
    np.dtype(t) for t in (np.bool_, np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8)
)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _value(name: str, dtype: Any, *shape: int) -> Value:
    return Value(name, TensorType(np.dtype(dtype), shape))


def _node(op_type: str, *types: ValueType | None, version: int = 13, out: ValueType | None = None) -> Node:
    inputs = [Value(f"x{i}", t) for i, t in enumerate(types)]
    return Node(op_type, inputs, [Value("y", out or types[0])], version=version, name="n")


def _compile(
    engine: OpenVinoEngine, inputs: list[Value], nodes: list[Node], outputs: list[Value], **options: Any
) -> Executable:
    function = Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="test"))
    return engine.compiler("cpu", CompileOptions(**options)).compile(function, function.params, function.returns, ())


def test_importing_the_engine_does_not_import_the_library() -> None:
    """Listing engines must not pay for OpenVINO."""
    code = "import sys, xrt_openvino; xrt_openvino.OpenVinoEngine(); print('openvino' in sys.modules)"
    assert _run(code) == "False"


def test_a_missing_library_is_said_with_the_cure() -> None:
    """Without OpenVINO the engine is unavailable, says why, and does not raise."""
    said = _run("""
        import sys
        sys.modules["openvino"] = None
        from xrt_openvino import OpenVinoEngine
        status = OpenVinoEngine().probe()
        print(status.available, status.reason, "|", status.remedy)
    """)
    assert said.startswith("False OpenVINO is not installed | pip install")


def test_a_library_whose_loops_are_wrong_is_not_used() -> None:
    """A Loop of no turns gives zeros before 2026.4, where it should give what it begins with."""
    said = _run("""
        import openvino
        openvino.__version__ = "2026.3.1-21000-abc-releases/2026/3"
        from xrt_openvino import OpenVinoEngine
        status = OpenVinoEngine().probe()
        print(status.available, status.version, status.reason, "|", status.remedy)
    """)
    assert said.startswith("False 2026.3.1 OpenVINO 2026.3.1 is too old: 2026.4 is the first whose loops are right | ")


def test_inference_only(engine: OpenVinoEngine) -> None:
    """The training phase is refused, and ranks last."""
    verdict = engine.supports(_node("Relu", TensorType(F32, (2,)), version=14), "cpu", "train")
    assert not verdict
    assert "inference only" in verdict.reason
    assert engine.priority == {"train": 0, "inference": 20}


def test_an_absent_device_is_refused(engine: OpenVinoEngine) -> None:
    """Only the CPU is driven."""
    with pytest.raises(EngineUnavailableError, match="no device 'cuda'"):
        engine.compiler("cuda", CompileOptions())


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"session": {}}, "unknown option 'session'; it takes config, streams"),
        ({"streams": 0}, "'streams' is 0; it takes a positive integer"),
        ({"config": "x"}, "'config' is 'x'; it takes a mapping"),
    ],
)
def test_wrong_options_are_errors(engine: OpenVinoEngine, extra: dict[str, Any], reason: str) -> None:
    """An option that is unknown or has a wrong value is named."""
    with pytest.raises(OptionError, match=reason):
        engine.compiler("cpu", CompileOptions(extra=extra))


@pytest.mark.parametrize("has_it", [False, True])
def test_float16_is_not_bfloat16(engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    """The library computes in bfloat16 where a processor has no arithmetic of float16: that is refused."""
    engine.prepare()
    monkeypatch.setattr("xrt_openvino._toolkit.computes_in_float16", lambda: has_it)
    asked = CompileOptions(extra=OpenVinoEngine.reduced_precisions["float16"])
    with contextlib.nullcontext() if has_it else pytest.raises(EngineUnavailableError, match="ask for 'bf16'"):
        engine.compiler("cpu", asked)
    engine.compiler("cpu", CompileOptions(extra=OpenVinoEngine.reduced_precisions["bfloat16"]))


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (_node("Relu", TensorType(F32, (None, 3)), version=14), "every dimension must be known"),
        (_node("Relu", TensorType(F32, (0, 3)), version=14), "empty tensor"),
        (_node("Identity", SequenceType(TensorType(F32, (2,))), version=14), "is a sequence"),
        (_node("Add", TensorType(F64, (2,)), TensorType(F64, (2,))), "computes in float32; 'x0' of Add is float64"),
        (_node("Add", TensorType(F16, (2,)), TensorType(F16, (2,))), "float16"),
        (_node("Add", TensorType(I32, (2,)), TensorType(I32, (2,))), "not exact on int32"),
        (_node("Add", TensorType(U8, (2,)), TensorType(U8, (2,))), "not exact on uint8"),
        (_node("Identity", TensorType(I64, (2,)), version=14), "not exact on int64"),
        (_node("Equal", TensorType(I32, (2,)), TensorType(I32, (2,)), out=TensorType(BOOL, (2,))), "not exact"),
        (_node("SpaceToDepth", TensorType(F32, (1, 1, 2, 2)), version=28), "unknown attribute 'blocksize'"),
    ],
    ids=lambda x: x.op_type if isinstance(x, Node) else None,
)
def test_supports_refuses_with_the_reason(engine: OpenVinoEngine, node: Node, reason: str) -> None:
    """What the library cannot do, or does otherwise, is refused with a sentence that names it."""
    verdict = engine.supports(node, "cpu", "inference")
    assert not verdict
    assert reason in verdict.reason


def test_the_library_is_quoted(engine: OpenVinoEngine) -> None:
    """An operator that its reader does not know is refused in its own words, at the second question as well."""
    node = _node("DeformConv", TensorType(F32, (1, 1, 3, 3)), version=19)
    for _ in range(2):
        verdict = engine.supports(node, "cpu", "inference")
        assert not verdict
        assert verdict.reason.startswith("openvino does not take DeformConv-19 so: ")


def test_a_repeated_question_needs_no_trial(engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is asked once; the same kind of node again is answered from memory."""
    from xrt_openvino import _toolkit

    first, second = (_node("Add", TensorType(F32, (4, 5)), TensorType(F32, (4, 5))) for _ in range(2))
    assert engine.supports(first, "cpu", "inference")
    monkeypatch.setattr(_toolkit, "refusal", lambda *args: pytest.fail("the library was asked again"))
    assert engine.supports(second, "cpu", "inference")


def test_large_constants_are_handed_over_as_memory(engine: OpenVinoEngine) -> None:
    """A weight does not go through the model's bytes, read-only memory will do, and it lives as long as it is used."""
    weight = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    weight.flags.writeable = False
    x, y = _value("x", F32, 2, 64), _value("y", F32, 2, 64)
    nodes = [Node("MatMul", [x, Value.constant(weight, "w")], [y], version=13)]
    executable = _compile(engine, [x], nodes, [y])
    given = np.ones((2, 64), np.float32)
    want = given @ weight
    del weight, nodes
    assert np.allclose(executable.run([given])[0], want, atol=1e-5)


def test_weights_that_are_made_of_a_shape_are_constants(engine: OpenVinoEngine) -> None:
    """ConstantOfShape is too large to be folded at times; the library must see the constant that it is."""
    x, w, y = _value("x", F32, 2, 64), _value("w", F32, 64, 300), _value("y", F32, 2, 300)
    shape = Value.constant(np.array([64, 300]), "shape")
    made = Node("ConstantOfShape", [shape], [w], {"value": np.array([0.5], np.float32)}, version=9)
    assert engine.supports(made, "cpu", "inference")
    executable = _compile(engine, [x], [made, Node("MatMul", [x, w], [y], version=13)], [y])
    assert "FullyConnected" in executable.as_text()
    assert np.allclose(executable.run([np.ones((2, 64), np.float32)])[0], 32.0)


@pytest.mark.parametrize("count", [4, 100_000])
def test_any_memory_is_read(engine: OpenVinoEngine, count: int) -> None:
    """Read-only and strided inputs, small and large, give the same and stay as they are."""
    x, y = _value("x", F32, count), _value("y", F32, count)
    executable = _compile(engine, [x], [Node("Neg", [x], [y], version=13)], [y])
    whole = np.arange(2 * count, dtype=np.float32)
    frozen = whole[:count].copy()
    frozen.flags.writeable = False
    for given in (whole[:count], whole[::2], whole[count - 1 :: -1], frozen):
        before = given.copy()
        assert np.array_equal(executable.run([given])[0], -before)
        assert np.array_equal(given, before)


@pytest.mark.parametrize("code", ["l", "q", "L", "Q"])
def test_every_integer_of_64_bits_is_read(engine: OpenVinoEngine, code: str) -> None:
    """NumPy has two types for each, equal to each other; the library knows one of them."""
    dtype = np.dtype(code)
    x, y = _value("x", dtype, 3), _value("y", dtype, 3)
    executable = _compile(engine, [x], [Node("Add", [x, x], [y], version=14)], [y])
    assert executable.run([np.array([1, 2, 3], dtype)])[0].tolist() == [2, 4, 6]


def test_an_input_that_is_handed_through(engine: OpenVinoEngine) -> None:
    """A Dropout outside of training vanishes with its input's name: the input is still read."""
    x, y = _value("x", F32, 3), _value("y", F32, 3)
    executable = _compile(engine, [x], [Node("Dropout", [x], [y], version=13)], [y])
    given = np.array([1, 2, 3], np.float32)
    (got,) = executable.run([given])
    assert got.tolist() == [1, 2, 3]
    assert not np.shares_memory(got, given)


def test_many_threads_get_their_own_results(engine: OpenVinoEngine) -> None:
    """Calls at the same time use requests of their own."""
    x, y = _value("x", F32, 50_000), _value("y", F32, 50_000)
    executable = _compile(engine, [x], [Node("Neg", [x], [y], version=13)], [y], threads=1)
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(20):
            (got,) = executable.run([np.full(50_000, number, np.float32)])
            if not (got == -number).all():
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_wrong_inputs_are_named_and_the_executable_survives(engine: OpenVinoEngine) -> None:
    """Count, dtype and shape are checked, since the library would read past the end."""
    x, y = _value("x", F32, 2), _value("y", F32, 2)
    executable = _compile(engine, [x], [Node("Neg", [x], [y], version=13)], [y])
    with pytest.raises(ExecutionError, match="takes 1 inputs, 2 were given"):
        executable.run([np.zeros(2, np.float32)] * 2)
    with pytest.raises(ExecutionError, match=r"'x' must be float32\[2\], float32\[3\] was given"):
        executable.run([np.zeros(3, np.float32)])
    with pytest.raises(ExecutionError, match=r"float64\[2\] was given"):
        executable.run([np.zeros(2)])
    assert executable.run([np.ones(2, np.float32)])[0].tolist() == [-1, -1]


def test_serialised_with_large_constants(engine: OpenVinoEngine) -> None:
    """The compiled model goes through bytes; cut or foreign bytes are refused."""
    weight = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    x, y = _value("x", F32, 2, 64), _value("y", F32, 2, 64)
    executable = _compile(engine, [x], [Node("MatMul", [x, Value.constant(weight, "w")], [y], version=13)], [y])
    blob = executable.serialize()
    compiler = engine.compiler("cpu", CompileOptions())
    given = np.ones((2, 64), np.float32)
    assert np.array_equal(compiler.load(blob).run([given])[0], executable.run([given])[0])
    for damaged in (blob[:-1], b"nothing", blob[:40]):
        with pytest.raises(CompileError):
            compiler.load(damaged)


def test_what_the_library_exports_wrongly_is_not_serialised(engine: OpenVinoEngine) -> None:
    """A rotary embedding that comes back from bytes rotates otherwise."""
    x, y, cos, sin = (_value(n, F32, *s) for n, s in
                      (("x", (1, 2, 3, 8)), ("y", (1, 2, 3, 8)), ("cos", (1, 3, 4)), ("sin", (1, 3, 4))))  # fmt: skip
    executable = _compile(engine, [x, cos, sin], [Node("RotaryEmbedding", [x, cos, sin], [y], version=23)], [y])
    with pytest.raises(UnsupportedError, match="RoPE"):
        executable.serialize()


def test_float32_stays_float32(engine: OpenVinoEngine) -> None:
    """No product is computed in bfloat16 or int8, even where the processor has those."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 256), dtype=np.float32)
    x, y = _value("x", F32, 4, 256), _value("y", F32, 4, 256)
    executable = _compile(engine, [x], [Node("MatMul", [x, Value.constant(weight, "w")], [y], version=13)], [y])
    given = rng.standard_normal((4, 256), dtype=np.float32)
    want = given.astype(np.float64) @ weight
    assert np.abs(executable.run([given])[0] - want).max() < 1e-4


def test_attributes_beyond_32_bits_are_refused() -> None:
    """The library would cut them, so such a node has the attribute as the reason."""
    x = Value("x", TensorType(F32, (1, 4, 8, 8)))
    y = Value("y", TensorType(F32, (1, 4, 1, 1)))
    node = Node("MaxPool", [x], [y], {"kernel_shape": (8, 8), "strides": (2**32, 1)}, version=12, name="n")
    assert "strides of MaxPool" in OpenVinoEngine().supports(node, "cpu", "inference").reason


@pytest.mark.parametrize(
    ("op", "attributes", "reason"),
    [
        ("AveragePool", {"kernel_shape": (3,), "pads": (1, 1), "ceil_mode": 1, "count_include_pad": 1}, "other counts"),
        ("AveragePool", {"kernel_shape": (3,), "pads": (1, 1), "ceil_mode": 1}, ""),
        ("AveragePool", {"kernel_shape": (3,), "pads": (1, 1), "count_include_pad": 1}, ""),
        ("LRN", {"size": 4}, "even size"),
        ("LRN", {"size": 3}, ""),
        ("LpNormalization", {"axis": 1}, "adds to the norm"),
    ],
)
def test_what_was_found_wrong_is_refused(op: str, attributes: dict[str, Any], reason: str) -> None:
    """Attributes with which the library computes other numbers; without them it takes the operator."""
    x, y = _value("x", F32, 1, 2, 7), _value("y", F32, 1, 2, 7)
    node = Node(op, [x], [y], attributes, version={"AveragePool": 19, "LRN": 13}.get(op, 1), name="n")
    said = OpenVinoEngine().supports(node, "cpu", "inference")
    assert said.ok is not bool(reason)
    assert reason in said.reason


@pytest.mark.parametrize("opset", range(20, onnx.defs.onnx_opset_version() + 1))
def test_no_node_is_refused_for_the_number_of_its_version(opset: int) -> None:
    """Newer versions that mean the same are handed over as older ones."""
    last = ("Attention", ["e"] * 3) if opset > 22 else ("Abs", ["e"])
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["a"]),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("Softmax", ["b"], ["c"]),
        onnx.helper.make_node("Reshape", ["c", "s"], ["d"]),
        onnx.helper.make_node("Transpose", ["d"], ["e"], perm=[0, 2, 1, 3]),
        onnx.helper.make_node(*last, ["y"]),
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 4, 8])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    rng = np.random.default_rng(0)
    constants = {"w": rng.standard_normal((8, 8)).astype(np.float32), "s": np.array([2, 4, 2, 4])}
    stored = [onnx.numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], stored)
    opsets = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(graph, opset_imports=opsets)  # of the newest IR version
    given = rng.standard_normal((2, 4, 8)).astype(np.float32)
    m = XRTModule(model, engine="openvino", prune=False, cache="off", guard=False)
    np.testing.assert_allclose(m(given), XRTModule(model, engine="host", guard=False)(given), atol=1e-5)
    assert {n.op_type for n in m.partitioned().nodes} <= {"Launch", "EngineInputConvert"}


def test_infinities_without_a_bound(engine: OpenVinoEngine) -> None:
    """The library's own Clip gives the largest number for them."""
    x, y, z = (_value(n, np.float32, 2) for n in "xyz")
    bound = Value("bound", data=np.array(0.5, np.float32))
    nodes = [Node("Clip", [x, bound], [y], version=13), Node("Clip", [x, None, bound], [z], version=13)]
    function = Function.from_graph(Graph([x], [y, z], nodes, opsets={"": 21}, name="clipped"))
    made = engine.compiler("cpu", CompileOptions()).compile(function, function.params, function.returns, ())
    low, high = made.run([np.array([np.inf, -np.inf], np.float32)])
    np.testing.assert_array_equal(low, [np.inf, 0.5])
    np.testing.assert_array_equal(high, [0.5, -np.inf])


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_a_bound_is_what_a_clip_has(engine: OpenVinoEngine, op: str) -> None:
    """The larger of numbers and a constant one is taken, as variances are held to 0; of two inputs it is not, nor
    of NaN, of which the library makes a number. Under guard calls with NaN are the host's."""
    x, y, z = (_value(n, np.float32, 2, 3) for n in "xyz")

    def taken(*inputs: Value) -> bool:
        return bool(engine.supports(Node(op, inputs, [z], version=13, name="n"), "cpu", "inference"))

    bound = Value.constant(np.array(0.5, np.float32), "bound")
    assert taken(x, bound)
    assert taken(bound, x)
    assert not taken(x, y)
    assert not taken(x, y, bound)
    assert not taken(x, Value.constant(np.array(np.nan, np.float32), "nan"))
    assert not taken(x, Value.constant(np.array([1, 2, 3], np.float32), "row"))
    graph = Graph([x], [z], [Node(op, [x, bound], [z], version=13, name="n")], opsets={"": 21}, name="bounded")
    how = {"prune": False, "minimum_nodes": 1, "guard": True, "guard_async": False, "guard_tune": False}
    m = XRTModule(graph, engine="openvino", **how)
    data = np.array([[0, 1, -2], [np.inf, 3, -np.inf]], np.float32)
    numpy = np.maximum if op == "Max" else np.minimum
    for _ in range(3):
        np.testing.assert_array_equal(m(data), numpy(data, np.float32(0.5)))
        missing = np.where(data == 3, np.float32(np.nan), data)
        np.testing.assert_array_equal(m(missing), numpy(missing, np.float32(0.5)))
    assert m.explain({"x": data}).engine_node_count == 1
