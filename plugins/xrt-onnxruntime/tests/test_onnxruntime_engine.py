"""What the engine says about itself and about nodes, and what its executables do beyond the conformance kit."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import textwrap
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
import pytest
from xrt_onnxruntime import OnnxRuntimeEngine
from xrt_onnxruntime.integer_products import with_integer_products

import xrt_core as xrt
from xrt_core.engine.contract import CompileOptions, Executable, Function
from xrt_core.errors import CompileError, EngineUnavailableError, ExecutionError, OptionError, UnsupportedError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import STRING, SequenceType, TensorType, ValueType
from xrt_core.testing.processes import run_python
from xrt_core.verify.reference import run_host

F32, F64, I32 = (np.dtype(t) for t in (np.float32, np.float64, np.int32))


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _value(name: str, dtype: Any, *shape: int) -> Value:
    return Value(name, TensorType(np.dtype(dtype), shape))


def _node(op_type: str, *types: ValueType | None, version: int = 13) -> Node:
    inputs = [Value(f"x{i}", t) for i, t in enumerate(types)]
    return Node(op_type, inputs, [Value("y", types[0])], version=version, name="n")


def _compile(
    engine: OnnxRuntimeEngine, inputs: list[Value], nodes: list[Node], outputs: list[Value], **options: Any
) -> Executable:
    function = Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="test"))
    return engine.compiler("cpu", CompileOptions(**options)).compile(function, function.params, function.returns, ())


def test_importing_the_engine_does_not_import_the_library() -> None:
    """Listing engines must not pay for ONNX Runtime."""
    code = "import sys, xrt_onnxruntime; xrt_onnxruntime.OnnxRuntimeEngine(); print('onnxruntime' in sys.modules)"
    assert _run(code) == "False"


def test_a_missing_library_is_said_with_the_cure() -> None:
    """Without ONNX Runtime the engine is unavailable, says why, and does not raise."""
    said = _run("""
        import sys
        sys.modules["onnxruntime"] = None
        from xrt_onnxruntime import OnnxRuntimeEngine
        status = OnnxRuntimeEngine().probe()
        print(status.available, status.reason, "|", status.remedy)
    """)
    assert said.startswith("False ONNX Runtime is not installed | pip install")


class _Session:
    """A session that says where it runs, and counts what is called. inner: what a later library may not have."""

    def __init__(self, provider: str, *, inner: bool) -> None:
        self.called: list[str] = []
        self._provider = provider
        if inner:
            self._sess = SimpleNamespace(run=lambda *call: self.called.append("inner"))

    def get_providers(self) -> list[str]:
        return [self._provider]

    def run(self, *call: Any) -> None:
        self.called.append("run")


@pytest.mark.parametrize(
    ("provider", "inner", "called"),
    [("CPUExecutionProvider", True, "inner"), ("CPUExecutionProvider", False, "run"), ("CUDA", True, "run")],
)
def test_runs_are_those_of_the_library(provider: str, inner: bool, called: str) -> None:
    """On the CPU without what its method looks at before, where the library is made as it is known; else by that."""
    from xrt_onnxruntime import _toolkit

    session = _Session(provider, inner=inner)
    _toolkit.runner_of(session)(["y"], {}, None)
    assert session.called == [called]


def test_this_library_has_the_function_within_its_method(engine: OnnxRuntimeEngine) -> None:
    """Which gives the same; without it calls would take a microsecond more."""
    x, y = _value("x", F32, 2), _value("y", F32, 2)
    executable: Any = _compile(engine, [x], [Node("Neg", [x], [y], version=13)], [y])
    assert executable._run == executable._session._sess.run
    given = np.array([1, -2], np.float32)
    np.testing.assert_array_equal(executable.run([given])[0], executable._session.run(None, {"x": given})[0])


def test_inference_only(engine: OnnxRuntimeEngine) -> None:
    """In training it takes the model's own nodes alone, and ranks last."""
    own = _node("Relu", TensorType(F32, (2,)), version=14)
    assert engine.supports(own, "cpu", "train").ok
    verdict = engine.supports(own.replace(annotations=own.annotations.replace(phase="train")), "cpu", "train")
    assert not verdict.ok
    assert "no gradients or updates" in verdict.reason
    assert engine.priority == {"train": 0, "inference": 30}


def test_an_absent_device_is_refused(engine: OnnxRuntimeEngine) -> None:
    """Only the CPU is driven."""
    with pytest.raises(EngineUnavailableError, match="no device 'cuda'"):
        engine.compiler("cuda", CompileOptions())


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"opset": 1}, "unknown option 'opset'; it takes inter_op_threads"),
        ({"optimization": "most"}, "'optimization' is 'most'; it takes disable"),
        ({"parallel": 1}, "'parallel' is 1; it takes True or False"),
        ({"inter_op_threads": 0}, "'inter_op_threads' is 0; it takes a positive"),
        ({"session": "x"}, "'session' is 'x'; it takes a mapping"),
    ],
)
def test_wrong_options_are_errors(engine: OnnxRuntimeEngine, extra: dict[str, Any], reason: str) -> None:
    """An option that is unknown or has a wrong value is named."""
    with pytest.raises(OptionError, match=reason):
        engine.compiler("cpu", CompileOptions(extra=extra))


def test_threads_do_not_spin_where_cores_are_shared(engine: OnnxRuntimeEngine) -> None:
    """Once a run is done, by default, as where the program uses the cores next; what the user says of it wins."""
    inside, until_done = "session.intra_op.allow_spinning", "session.force_spinning_stop"

    def said(shared: bool, extra: dict[str, Any], release: bool = False, entry: str = inside) -> str:
        given = CompileOptions(shared=shared, release_cores=release, extra=extra)
        options = engine.compiler("cpu", given).session_options()
        try:
            return str(options.get_session_config_entry(entry))
        except RuntimeError:  # nothing was said
            return ""

    assert [said(shared, {}, entry=until_done) for shared in (False, True)] == ["", "1"]
    assert said(True, {"session": {inside: "0"}}) == "0"
    assert [said(shared, {}, True, until_done) for shared in (False, True)] == ["1", "1"]
    assert said(False, {"session": {until_done: "0"}}, True, until_done) == "0"
    x = _value("x", F32, 4)
    made = _compile(engine, [x], [Node("Neg", [x], [y := _value("y", F32, 4)], version=13)], [y], shared=True)
    np.testing.assert_array_equal(made.run([np.ones(4, F32)])[0], -np.ones(4, F32))


def _divided(divisor: np.ndarray | None, dtype: Any = I32) -> Node:
    t = TensorType(np.dtype(dtype), (2,))
    return Node("Div", [Value("x", t), Value("d", t, divisor)], [Value("y", t)], version=14)


def _scatter(reduction: str, rows: int = 2, dtype: Any = F32) -> Node:
    x, updates, y = (_value(n, np.dtype(dtype), *s) for n, s in (("x", (rows, 2)), ("u", (2,)), ("y", (rows, 2))))
    indices = _value("i", np.int64, 2, 2)
    return Node("ScatterND", [x, indices, updates], [y], {"reduction": reduction}, version=18, name="n")


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (_scatter("min"), "passes over NaN"),
        (_scatter("add", 0), "no elements"),
        (_scatter("add", dtype=np.float16), "has no ScatterND of float16 by add"),
        (_scatter("mul", dtype=ml_dtypes.bfloat16), "has no ScatterND of bfloat16 by mul"),
        (_scatter("max", dtype=np.bool_), "has no ScatterND of bool by max"),
        (_node("Relu", TensorType(F32, None), version=14), "dtype and rank must be known"),
        (_node("Identity", TensorType(STRING, (2,)), version=14), "is string"),
        (_node("Identity", SequenceType(TensorType(F32, (2,))), version=14), "is a sequence"),
        (_node("Identity", TensorType(np.dtype(ml_dtypes.int4), (2,)), version=21), "is int4"),
        (_node("Conv", TensorType(F64, (1, 1, 4)), TensorType(F64, (1, 1, 3)), version=11), "Could not find an impl"),
        (_divided(None, np.uint8), "needs a known divisor"),
        (_divided(np.array([1, -1], np.int32)), "divisor of 0 or -1"),
        (_node("RandomUniformLike", TensorType(F32, (2,)), version=1), "draws random numbers"),
    ],
    ids=lambda x: x.op_type if isinstance(x, Node) else None,
)
def test_supports_refuses_with_the_reason(engine: OnnxRuntimeEngine, node: Node, reason: str) -> None:
    """What the library cannot do is refused with a sentence that names it, at the second question as well."""
    for _ in range(2):
        verdict = engine.supports(node, "cpu", "inference")
        assert not verdict
        assert reason in verdict.reason


def test_an_operator_newer_than_the_library_is_taken(engine: OnnxRuntimeEngine) -> None:
    """No number alone refuses it: it is tried in the newest form that the library knows."""
    assert engine.supports(_node("Relu", TensorType(F32, (2,)), version=1000), "cpu", "inference")


def test_scatters_by_other_reductions_are_taken(engine: OnnxRuntimeEngine) -> None:
    """Only least and greatest lose NaN."""
    assert engine.supports(_scatter("add"), "cpu", "inference")


def test_division_by_other_known_integers_is_taken(engine: OnnxRuntimeEngine) -> None:
    """A divisor that is known and harmless is no reason to refuse."""
    assert engine.supports(_divided(np.array([2, -3], np.int32)), "cpu", "inference")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("op", "attributes"), [("Div", {}), ("Mod", {}), ("Mod", {"fmod": 1})])
def test_division_by_any_integers(engine: OnnxRuntimeEngine, dtype: Any, op: str, attributes: dict[str, int]) -> None:
    """0 and -1, by which the library fails or ends the process, give what they give on the host."""
    least = np.iinfo(dtype).min
    x = np.array([7, least, least, 5, -7, -7, least, 0], dtype)
    by = np.array([0, 0, -1, 2, 2, -1, least, least], dtype)
    a, b, y = (_value(n, dtype, 8) for n in ("x", "by", "y"))
    node = Node(op, [a, b], [y], attributes, version=14 if op == "Div" else 13)
    assert engine.supports(node, "cpu", "inference")
    made = _compile(engine, [a, b], [node], [y])
    np.testing.assert_array_equal(made.run([x, by])[0], run_node(node, [x, by])[0])


def test_shapes_that_depend_on_data_are_taken(engine: OnnxRuntimeEngine) -> None:
    """On the CPU, with results of a size that memory need not be laid out for."""
    open_ = _node("Relu", TensorType(F32, (None, 3)), version=14)
    assert engine.supports(open_, "cpu", "inference")
    assert "every dimension must be known" in engine.supports(open_, "cuda:0", "inference").reason
    narrow = _node("Identity", TensorType(np.dtype(ml_dtypes.bfloat16), (None,)), version=14)
    assert "memory of a known size" in engine.supports(narrow, "cpu", "inference").reason


@pytest.mark.parametrize(("rows", "axis", "taken"), [(0, 0, False), (None, 0, False), (None, 1, True), (2, 0, True)])
def test_means_of_nothing_are_the_hosts(engine: OnnxRuntimeEngine, rows: int | None, axis: int, taken: bool) -> None:
    """0 / 0 is NaN, and the library gives 0."""
    x, axes = Value("x", TensorType(F32, (rows, 3))), Value.constant(np.array([axis], np.int64), "axes")
    y = Value("y", TensorType(F32, (3,) if axis == 0 else (rows,)))
    node = Node("ReduceMean", [x, axes], [y], {"keepdims": 0}, version=18)
    assert engine.supports(node, "cpu", "inference").ok is taken


INDEXED: Final = {
    "Gather": ((3, 4), (2,)), "GatherElements": ((3, 4), (2, 4)), "GatherND": ((3, 4), (2, 1)),
    "ScatterElements": ((3, 4), (2, 4), (2, 4)),
    "ScatterND": ((3, 4), (2, 1), (2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", [3, -4, 1 << 40, -(1 << 40)])
def test_the_library_checks_these_indices(engine: OnnxRuntimeEngine, wrong: int) -> None:
    """Each operator of `checks_indices` raises for an index that no row has, the first or the last of several."""
    assert set(INDEXED) == set(engine.checks_indices)
    for op, shapes in INDEXED.items():
        dtypes = (F32, np.dtype(np.int64), F32)
        inputs = [_value(n, d, *s) for n, d, s in zip("xiu", dtypes, shapes, strict=False)]
        y = _value("y", F32, *((2, 4) if op.startswith("Gather") else (3, 4)))
        made = _compile(engine, inputs, [Node(op, inputs, [y], version=since_version(op, "", 13))], [y])
        for place in (0, -1):
            indices = np.zeros(shapes[1], np.int64)
            indices.reshape(-1)[place] = wrong
            with pytest.raises(ExecutionError):
                made.run([np.ones(shapes[0], F32), indices, *(np.ones(s, F32) for s in shapes[2:])])


def test_a_repeated_question_needs_no_trial(engine: OnnxRuntimeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is asked once; the same kind of node again is answered from memory."""
    from xrt_onnxruntime import _toolkit

    first, second = (_node("Add", TensorType(F32, (4, 5)), TensorType(F32, (4, 5))) for _ in range(2))
    assert engine.supports(first, "cpu", "inference")
    monkeypatch.setattr(_toolkit, "refusal", lambda *args: pytest.fail("the library was asked again"))
    assert engine.supports(second, "cpu", "inference")


def test_large_constants_are_read_where_they_are(engine: OnnxRuntimeEngine) -> None:
    """A weight is handed over as memory, read-only memory will do, and it lives as long as it is used."""
    weight = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    weight.flags.writeable = False
    x, y = _value("x", F32, 2, 64), _value("y", F32, 2, 64)
    executable = _compile(engine, [x], [Node("MatMul", [x, Value.constant(weight, "w")], [y], version=13)], [y])
    given = np.ones((2, 64), np.float32)
    want = given @ weight
    del weight
    assert np.array_equal(executable.run([given])[0], want)


def test_results_stay_as_they_are(engine: OnnxRuntimeEngine) -> None:
    """Results of earlier runs are not overwritten by later ones, nor when the executable is gone."""
    x, y = _value("x", F32, 1000), _value("y", F32, 1000)
    executable = _compile(engine, [x], [Node("Neg", [x], [y], version=13)], [y])
    runs = [executable.run([np.full(1000, i, np.float32)])[0] for i in range(5)]
    del executable
    assert [float(r[-1]) for r in runs] == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert all(r.flags.writeable for r in runs)


def test_dtypes_that_numpy_lacks(engine: OnnxRuntimeEngine) -> None:
    """bfloat16 goes in and out without a detour through another type."""
    bf16 = np.dtype(ml_dtypes.bfloat16)
    x, y = _value("x", bf16, 2, 3), _value("y", bf16, 3, 2)
    executable = _compile(engine, [x], [Node("Transpose", [x], [y], version=13)], [y])
    given = np.arange(6).reshape(2, 3).astype(bf16)
    (got,) = executable.run([given])
    assert got.dtype == bf16
    assert np.array_equal(got, given.T)


def test_wrong_inputs_are_named_and_the_executable_survives(engine: OnnxRuntimeEngine) -> None:
    """Count, dtype and shape are checked where the library complains."""
    x, y = _value("x", F32, 2), _value("y", F32, 2)
    executable = _compile(engine, [x], [Node("Neg", [x], [y], version=13)], [y])
    with pytest.raises(ExecutionError, match="takes 1 inputs, 2 were given"):
        executable.run([np.zeros(2, np.float32)] * 2)
    with pytest.raises(ExecutionError, match=r"'x' must be float32\[2\], float32\[3\] was given"):
        executable.run([np.zeros(3, np.float32)])
    with pytest.raises(ExecutionError, match="float64"):
        executable.run([np.zeros(2)])
    assert executable.run([np.ones(2, np.float32)])[0].tolist() == [-1, -1]


def test_serialised_with_large_constants(engine: OnnxRuntimeEngine) -> None:
    """The optimised model and its constants go through bytes; cut or foreign bytes are refused."""
    weight = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    x, y = _value("x", F32, 2, 64), _value("y", F32, 2, 64)
    executable = _compile(engine, [x], [Node("MatMul", [x, Value.constant(weight, "w")], [y], version=13)], [y])
    blob = executable.serialize()
    compiler = engine.compiler("cpu", CompileOptions())
    given = np.ones((2, 64), np.float32)
    again = compiler.load(blob)
    assert np.array_equal(again.run([given])[0], executable.run([given])[0])
    assert again.serialize() == blob
    for damaged in (blob[:-1], b"nothing", blob[:40]):
        with pytest.raises(CompileError):
            compiler.load(damaged)
    with pytest.raises(UnsupportedError, match="as quickly"):
        executable.serialize_code()


def test_nodes_of_one_name_are_told_apart(engine: OnnxRuntimeEngine) -> None:
    """The library refuses two nodes of one name; a graph may have them."""
    x, y, z = (_value(n, F32, 2) for n in "xyz")
    nodes = [Node("Neg", [x], [y], version=13, name="same"), Node("Abs", [y], [z], version=13, name="same")]
    assert _compile(engine, [x], nodes, [z]).run([np.array([1, -2], np.float32)])[0].tolist() == [1, 2]


def test_nodes_of_two_opsets_do_not_compile(engine: OnnxRuntimeEngine) -> None:
    """Where no one opset fits all nodes the library would misread some, so it is an error that says so."""
    x, y, z = (_value(n, F32, 2, 3) for n in "xyz")
    nodes = [Node("Softmax", [x], [y], {"axis": 0}, version=11), Node("Softmax", [y], [z], version=13)]
    with pytest.raises(CompileError, match="no one opset"):
        _compile(engine, [x], nodes, [z])


@pytest.mark.parametrize(
    ("op", "shapes", "attributes", "reason"),
    [
        ("Attention", [(1, 2, 4)] * 3, {"q_num_heads": 2**32, "kv_num_heads": 2**32}, "q_num_heads .* 32 bits"),
        ("MaxPool", [(1, 1, 0)], {"kernel_shape": (2,), "pads": (1, 1)}, "empty tensor"),
        ("Conv", [(1, 1, 0), (1, 1, 3)], {"pads": (2, 2)}, "empty tensor"),
        ("Conv", [(1, 1, 6), (1, 1, 3)], {"auto_pad": "SAME_UPPER", "dilations": (2,)}, "dilations and auto_pad SAME"),
        ("MeanVarianceNormalization", [(1, 2, 3, 3)], {}, "constant channel"),
    ],
)
def test_what_ends_or_deceives_the_library_is_refused(op: str, shapes: Any, attributes: Any, reason: str) -> None:
    """Nodes that were seen to end the process, to fail at each run or to give invented numbers have a reason."""
    inputs = [_value(f"x{i}", F32, *s) for i, s in enumerate(shapes)]
    version = since_version(op, "", 23)
    node = Node(op, inputs, [_value("y", F32, *shapes[0])], attributes, version=version, name="n")
    assert re.search(reason, OnnxRuntimeEngine().supports(node, "cpu", "inference").reason)


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize(("opset", "shape", "axes"), [(12, (4, 37), [1]), (13, (3, 5, 7), [0, 2]), (20, (2, 40), None)])
def test_extremes_of_floats_keep_nan(op: str, opset: int, shape: tuple[int, ...], axes: Any) -> None:
    """Wherever NaN stands among what is reduced, for all sizes in one cluster; the library passes over most."""
    make = onnx.helper.make_node
    by_input = [onnx.numpy_helper.from_array(np.array(axes), "axes")] if opset >= 18 and axes else []
    more = {"axes": axes} if axes and not by_input else {}
    nodes = [make(op, ["x", *(["axes"] if by_input else [])], ["m"], keepdims=0, **more), make("Exp", ["m"], ["y"])]
    ports = [onnx.helper.make_tensor_value_info("x", 1, [f"d{i}" for i in range(len(shape))])]
    result = onnx.helper.make_tensor_value_info("y", 1, None)
    graph = onnx.helper.make_graph(nodes, "extremes", ports, [result], by_input)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    m = xrt.XRTModule(model, engine="onnxruntime", guard=False, cache="off", prune=False)
    for k in range(30):
        rng = np.random.default_rng(k)
        x = rng.standard_normal([n + k % 3 for n in shape]).astype(F32)
        x.reshape(-1)[rng.integers(0, x.size, 2)] = np.inf, np.nan
        along = None if axes is None else tuple(axes)
        want = np.exp(np.max(x, axis=along) if op == "ReduceMax" else np.min(x, axis=along))
        np.testing.assert_allclose(np.asarray(m(x)), want, rtol=1e-6)
    assert "100% of nodes" in str(m.explain())


def test_a_model_of_an_old_opset_is_one_cluster() -> None:
    """ReduceMax keeps NaN by nodes of newer opsets, among nodes whose form has changed since opset 9."""
    make, rng = onnx.helper.make_node, np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "scale": (4,), "bias": (4,), "W": (1, 24, 4), "R": (1, 24, 8)}
    constants = [onnx.numpy_helper.from_array(rng.standard_normal(s).astype(F32) / 3, k) for k, s in shapes.items()]
    constants += [onnx.numpy_helper.from_array(np.arange(1, 5, dtype=F32), k) for k in ("mean", "var")]
    nodes = [
        make("Conv", ["x", "w"], ["conv"], pads=[1, 1, 1, 1]),
        make("BatchNormalization", ["conv", "scale", "bias", "mean", "var"], ["normal"]),
        make("Clip", ["normal"], ["clip"], min=0.0, max=6.0),
        make("MaxPool", ["clip"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        make("Slice", ["pool"], ["slice"], axes=[3], starts=[1], ends=[2]),
        make("Squeeze", ["slice"], ["row"], axes=[3]),
        make("Transpose", ["row"], ["steps"], perm=[2, 0, 1]),
        make("GRU", ["steps", "W", "R"], ["", "last"], hidden_size=8),
        make("Upsample", ["last", "scales"], ["up"], mode="nearest"),
        make("ReduceMax", ["up"], ["y"], axes=[0, 2], keepdims=0),
    ]
    constants.append(onnx.numpy_helper.from_array(np.array([1, 1, 2], F32), "scales"))
    ports = [onnx.helper.make_tensor_value_info("x", 1, [2, 3, 8, 8])]
    graph = onnx.helper.make_graph(nodes, "old", ports, [onnx.helper.make_tensor_value_info("y", 1, None)], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 9)], ir_version=4)
    x = rng.standard_normal((2, 3, 8, 8)).astype(F32)
    library = pytest.importorskip("onnxruntime")
    session = library.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": x})
    m = xrt.XRTModule(model, engine="onnxruntime", guard=False, cache="off")
    np.testing.assert_allclose(np.asarray(m(x)), want, rtol=1e-5, atol=1e-6)
    assert "100% of nodes" in str(m.explain())
    x[0, 0] = np.nan
    assert np.isnan(np.asarray(m(x))[0])


@pytest.mark.parametrize(
    ("op", "attributes", "numbers", "expected"),
    [
        ("ReduceSum", {}, np.array([[2**53 + 1, 2]]), 2**53 + 3),
        ("ReduceProd", {}, np.array([[2**53 + 1, 2]]), 2**54 + 2),
        ("ReduceL1", {}, np.array([[2**53 + 1, -2]]), 2**53 + 3),
        ("Einsum", {"equation": "ij->"}, np.array([[2**53 + 1, 2]]), 2**53 + 3),
    ],
)
def test_sums_of_integers_are_exact(op: str, attributes: Any, numbers: np.ndarray, expected: int) -> None:
    """The library computes them in double."""
    from xrt_core import XRTModule
    from xrt_core.ir.graph import Graph

    x, y = _value("x", numbers.dtype, 1, 2), Value("y")
    node = Node(op, [x], [y], attributes, version=since_version(op, "", 23), name="n")
    m = XRTModule(Graph([x], [y], [node], opsets={"": 23}), engine="onnxruntime", guard=False, prune=False)
    assert np.ravel(m(numbers)).tolist() == [expected]


@pytest.mark.parametrize("quantised", [True, False])
def test_products_of_8_bits_are_exact(engine: OnnxRuntimeEngine, quantised: bool) -> None:
    """The library's kernels for processors with AVX2 and without VNNI saturate where numbers are large."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(200, 256, (8, 64)).astype(np.uint8), rng.integers(100, 128, (64, 32)).astype(np.int8)
    exact = a.astype(np.int64) @ b.astype(np.int64)
    x, w = _value("x", np.uint8, 8, 64), Value.constant(b, "w")
    if not quantised:
        y = _value("y", np.int32, 8, 32)
        made = _compile(engine, [x], [Node("MatMulInteger", [x, w], [y], version=10)], [y])
        np.testing.assert_array_equal(made.run([a])[0], exact)
        return
    one, floats, weights, y = Value.constant(np.float32(1), "s"), Value("f"), Value("v"), _value("y", F32, 8, 32)
    nodes = [
        Node("DequantizeLinear", [x, one], [floats], version=13),
        Node("DequantizeLinear", [w, one], [weights], version=13),
        Node("MatMul", [floats, weights], [y], version=13),
    ]
    np.testing.assert_array_equal(_compile(engine, [x], nodes, [y]).run([a])[0], exact)


@pytest.mark.parametrize("saturates", [True, False])
def test_precise_kernels_where_others_saturate(
    engine: OnnxRuntimeEngine, saturates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a little slower, and with VNNI not needed; what the user says wins."""
    monkeypatch.setattr("xrt_onnxruntime.compiler.adds_int8_in_16_bits", lambda: saturates)
    entry = "session.x64quantprecision"

    def said(session: dict[str, str]) -> str:
        options = engine.compiler("cpu", CompileOptions(extra={"session": session})).session_options()
        try:
            return str(options.get_session_config_entry(entry))
        except RuntimeError:  # nothing was said
            return ""

    assert said({}) == ("1" if saturates else "")
    assert said({entry: "0"}) == "0"


@pytest.mark.parametrize("precise", ["0", "1"])
@pytest.mark.parametrize("op", ["QLinearConv", "QLinearMatMul"])
def test_requantised_products_of_int8(
    engine: OnnxRuntimeEngine, op: str, precise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels that do not saturate the library has none for int8, and makes no session; in a chain it gets no
    int8 in between. The results are those of the host."""
    monkeypatch.setattr("xrt_onnxruntime.compiler.adds_int8_in_16_bits", lambda: True)
    rng = np.random.default_rng(0)

    def constant(name: str, data: Any) -> Value:
        return Value.constant(np.asarray(data), name)

    conv = op == "QLinearConv"
    shape = (1, 8, 6, 6) if conv else (4, 8)
    x, q, r = _value("x", F32, *shape), _value("q", np.int8, *shape), _value("r", np.int8, *shape)
    t, y = _value("t", np.int8, *shape), _value("y", F32, *shape)
    zero = constant("z", np.int8(-3))
    scales = [constant(f"s{k}", np.float32(s)) for k, s in enumerate((0.02, 0.01, 0.9, 5.0))]
    weights = constant("w", rng.integers(-127, 128, (8, 8, 3, 3) if conv else (8, 8)).astype(np.int8))
    by, none = (scales[1], constant("wz", np.int8(0)))
    pads = {"pads": (1, 1, 1, 1)} if conv else {}
    nodes = [
        Node("QuantizeLinear", [x, scales[0], zero], [q], version=13),
        Node(op, [q, scales[0], zero, weights, by, none, scales[2], zero], [r], pads, version=10),
        Node(op, [r, scales[2], zero, weights, by, none, scales[3], zero], [t], pads, version=10),
        Node("DequantizeLinear", [t, scales[3], zero], [y], version=13),
    ]
    a = rng.uniform(-3, 3, shape).astype(np.float32)
    function = Function.from_graph(Graph([x], [r, y], nodes, opsets={"": 21}, name="test"))
    want = run_host(function, [a])[0]
    made = engine.compiler("cpu", CompileOptions(extra={"session": {"session.x64quantprecision": precise}}))
    found = made.compile(function, function.params, function.returns, ()).run([a])
    for got, expected in zip(found, want, strict=True):
        assert np.asarray(got).dtype == expected.dtype
        if precise == "1":  # others may saturate
            np.testing.assert_array_equal(got, expected)
    text = made.as_text(function, function.params, function.returns, (), "onnx")
    assert text.count("BitwiseXor") == 1, "of the result that is returned"


@pytest.mark.parametrize("is_dequantised", [False, True])
def test_constants_that_products_share(
    engine: OnnxRuntimeEngine, is_dequantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels that do not saturate the library makes uint8 of a shared zero point twice, and no session."""
    monkeypatch.setattr("xrt_onnxruntime.compiler.adds_int8_in_16_bits", lambda: True)
    rng = np.random.default_rng(0)
    x, y = _value("x", F32, 4, 8), _value("y", F32, 4, 8)
    q = [_value(f"q{k}", np.uint8, 4, 8) for k in range(4)]
    step, zero = Value.constant(np.float32(0.05), "s"), Value.constant(np.uint8(120), "z")
    weights = Value.constant(rng.integers(-127, 128, (8, 8)).astype(np.int8), "w")
    none = Value.constant(np.int8(0), "wz")
    nodes = [Node("QuantizeLinear", [x, step, zero], [q[0]], version=13)]
    if is_dequantised:
        w = _value("wf", F32, 8, 8)
        nodes.append(Node("DequantizeLinear", [weights, step, none], [w], version=13))
    for a, b in pairwise(q):
        if is_dequantised:
            f, g = _value(f"{b.name}_f", F32, 4, 8), _value(f"{b.name}_g", F32, 4, 8)
            nodes.append(Node("DequantizeLinear", [a, step, zero], [f], version=13))
            nodes.append(Node("MatMul", [f, w], [g], version=13))
            nodes.append(Node("QuantizeLinear", [g, step, zero], [b], version=13))
        else:
            nodes.append(Node("QLinearMatMul", [a, step, zero, weights, step, none, step, zero], [b], version=10))
    nodes.append(Node("DequantizeLinear", [q[-1], step, zero], [y], version=13))
    function = Function.from_graph(Graph([x], [y], nodes, opsets={"": 21}, name="test"))
    a = rng.uniform(-1, 1, (4, 8)).astype(np.float32)
    found = engine.compiler("cpu", CompileOptions()).compile(function, function.params, function.returns, ()).run([a])
    np.testing.assert_array_equal(found[0], run_host(function, [a])[0][0])


def _quantised_products(dtype: Any, zero: int, *, columns: bool = True, quantised: bool = False) -> list[Any]:
    """Two products with x, which is quantised once, and one of what is computed, each with the result in float32 but
    for the last with `quantised`. Returns inputs, nodes, outputs."""
    rng = np.random.default_rng(0)

    def constant(name: str, data: Any) -> Value:
        return Value.constant(np.asarray(data), name)

    x = _value("x", F32, 2, 8, 64)
    scale, point = constant("s", np.float32(0.05)), constant("z", np.array(zero, dtype))
    q, f, nodes, outputs = _value("q", dtype, 2, 8, 64), _value("f", F32, 2, 8, 64), [], []
    nodes.append(Node("QuantizeLinear", [x, scale, point], [q], version=13))
    nodes.append(Node("DequantizeLinear", [q, scale, point], [f], version=13))
    for k in range(2):
        w = constant(f"w{k}", rng.integers(-127, 128, (64, 32)).astype(np.int8))
        scales = constant(f"ws{k}", rng.uniform(0.01, 0.02, 32 if columns else ()).astype(np.float32))
        v, y = _value(f"v{k}", F32, 64, 32), _value(f"y{k}", F32, 2, 8, 32)
        nodes.append(Node("DequantizeLinear", [w, scales], [v], {"axis": 1}, version=13))
        nodes.append(Node("MatMul", [f, v], [y], version=13, name=f"product{k}"))
        outputs.append(y)
    t = _value("t", F32, 2, 64, 8)
    g, r = _value("g", F32, 2, 8, 8), _value("r", dtype, 2, 8, 8)
    nodes.append(Node("Transpose", [f], [t], {"perm": (0, 2, 1)}, version=13))
    tq, tf = _value("tq", np.int8, 2, 64, 8), _value("tf", F32, 2, 64, 8)
    nodes.append(Node("QuantizeLinear", [t, scale, constant("tz", np.int8(0))], [tq], version=13))
    nodes.append(Node("DequantizeLinear", [tq, scale], [tf], version=13))
    nodes.append(Node("MatMul", [f, tf], [g], version=13, name="scores"))
    if quantised:
        nodes.append(Node("QuantizeLinear", [g, constant("rs", np.float32(2)), point], [r], version=13))
    return [[x], nodes, [*outputs, r if quantised else g]]


@pytest.mark.parametrize(("dtype", "zero"), [(np.uint8, 128), (np.uint8, 100), (np.int8, 0), (np.int8, -7)])
@pytest.mark.parametrize("columns", [True, False])
def test_dequantised_matrices_are_multiplied_as_integers(
    engine: OnnxRuntimeEngine, dtype: Any, zero: int, columns: bool
) -> None:
    """Sums are exact, and x is quantised once, to uint8."""
    inputs, nodes, outputs = _quantised_products(dtype, zero, columns=columns)
    function = Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="test"))
    made = with_integer_products(function)
    assert Counter(n.op_type for n in made.body.nodes) == {
        "MatMulInteger": 3, "Cast": 3, "Mul": 3, "QuantizeLinear": 3 if dtype == np.int8 else 2, "Transpose": 1,
        "DequantizeLinear": 1,
    }  # fmt: skip
    x = np.random.default_rng(1).uniform(-8, 8, (2, 8, 64)).astype(np.float32)  # some of it is cut off
    expected = run_host(function, [x], wide=True)[0]
    for f in (function, made):
        for got, want in zip(run_host(f, [x])[0], expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    for got, want in zip(_compile(engine, inputs, nodes, outputs).run([x]), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_products_that_are_quantised_are_left_to_the_library() -> None:
    """It has kernels for those."""
    inputs, nodes, outputs = _quantised_products(np.uint8, 128, quantised=True)
    function = Function.from_graph(Graph(inputs, outputs, nodes, opsets={"": 21}, name="test"))
    made = with_integer_products(function).body.nodes
    assert [n.name for n in made if n.op_type == "MatMul"] == ["scores"]
    assert sum(n.op_type == "MatMulInteger" for n in made) == 2


@pytest.mark.parametrize("is_dequantised", [True, False])
@pytest.mark.parametrize("zero", [None, -128, 5, 127])
@pytest.mark.parametrize("constant", [True, False])
def test_products_of_int8_are_made_of_uint8(
    engine: OnnxRuntimeEngine, is_dequantised: bool, zero: int | None, constant: bool
) -> None:
    """For which the library has kernels that are many times as fast; all values of an int8 are there."""
    rng = np.random.default_rng(0)
    numbers, weights = (rng.integers(-128, 128, s).astype(np.int8) for s in ((8, 64), (64, 32)))
    numbers[0], weights[:, 0] = 127, -128
    x = _value("x", np.int8, 8, 64)
    w = Value.constant(weights, "w") if constant else _value("w", np.int8, 64, 32)
    zeros = [] if zero is None else [Value.constant(np.int8(zero), "z")]
    exact = (numbers.astype(np.int64) - (zero or 0)) @ weights.astype(np.int64)
    if is_dequantised:
        one, f, v, y = Value.constant(np.float32(1), "s"), _value("f", F32, 8, 64), Value("v"), _value("y", F32, 8, 32)
        nodes = [
            Node("DequantizeLinear", [x, one, *zeros], [f], version=13),
            Node("DequantizeLinear", [w, one], [v], version=13),
            Node("MatMul", [f, v], [y], version=13),
        ]
    else:
        y = _value("y", np.int32, 8, 32)
        nodes = [Node("MatMulInteger", [x, w, *zeros], [y], version=10)]
    inputs = [x] if constant else [x, w]
    function = Function.from_graph(Graph(inputs, [y], nodes, opsets={"": 21}, name="test"))
    made = with_integer_products(function).body.nodes
    assert Counter(n.op_type for n in made)["BitwiseXor"] == (1 if constant else 2)
    (product,) = (n for n in made if n.op_type == "MatMulInteger")
    assert [v is not None and v.dtype == np.uint8 for v in product.inputs[:2]] == [True, not constant]
    given = [numbers] if constant else [numbers, weights]
    np.testing.assert_array_equal(_compile(engine, inputs, nodes, [y]).run(given)[0], exact)


def test_a_zero_point_that_is_computed_stays_signed() -> None:
    """As does a product that has nothing of int8."""
    x, z, y = _value("x", np.int8, 4, 64), _value("z", np.int8), _value("y", np.int32, 4, 4)
    w = Value.constant(np.ones((64, 4), np.int8), "w")
    for inputs, read in (([x, z], [x, w, z]), ([u := _value("u", np.uint8, 4, 64)], [u, w])):
        node = Node("MatMulInteger", read, [y], version=10)
        function = Function.from_graph(Graph(inputs, [y], [node], opsets={"": 21}, name="test"))
        assert with_integer_products(function) is function


def test_powers_of_integers_are_exact() -> None:
    """The library computes them in double, and cannot give what wraps round."""
    from xrt_core import XRTModule
    from xrt_core.ir.graph import Graph

    x, y = _value("x", np.dtype(np.int64), 2), Value("y")
    exponents = Value.constant(np.array([4, 5]), "exponents")
    node = Node("Pow", [x, exponents], [y], version=15, name="n")
    m = XRTModule(Graph([x], [y], [node], opsets={"": 20}), engine="onnxruntime", guard=False, prune=False)
    assert m(np.array([2**14 + 1, 2**13 + 1])).tolist() == [(2**14 + 1) ** 4, (2**13 + 1) ** 5 - 2**65]


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"), [("Gelu", 1, {"approximate": "tanh"}), ("Attention", 3, {"scale": 0.3})]
)
def test_results_have_the_digits_of_float64(op: str, inputs: int, attributes: Any) -> None:
    """The library computes some of them in float32."""
    from xrt_core import XRTModule
    from xrt_core.ir.graph import Graph

    given, y = [_value(f"x{i}", np.dtype(np.float64), 1, 2, 3, 4) for i in range(inputs)], Value("y")
    node = Node(op, given, [y], attributes, version=since_version(op, "", 23), name="n")
    graph = Graph(given, [y], [node], opsets={"": 23})
    arrays = [np.linspace(-3, 3 + i, 24).reshape(1, 2, 3, 4) for i in range(inputs)]
    m = XRTModule(graph, engine="onnxruntime", guard=False, prune=False)
    np.testing.assert_allclose(m(*arrays), XRTModule(graph, engine="host")(*arrays), rtol=1e-12, atol=1e-14)


def test_casts_to_scales_are_refused() -> None:
    """The library gives the least number for negative ones."""
    x, y = _value("x", F32, 2), _value("y", np.dtype(ml_dtypes.float8_e8m0fnu), 2)
    node = Node("Cast", [x], [y], {"to": 24}, version=24)
    assert "float8e8m0" in OnnxRuntimeEngine().supports(node, "cpu", "inference").reason


def test_attributes_that_are_read_in_64_bits_stay_with_the_library() -> None:
    """A Slice to the end, as exporters write it, is taken."""
    x, y = _value("x", F32, 4), _value("y", F32, 3)
    node = Node("Slice", [x], [y], {"starts": (1,), "ends": (2**63 - 1,), "axes": (0,)}, version=1, name="n")
    assert "32 bits" not in OnnxRuntimeEngine().supports(node, "cpu", "inference").reason


def test_no_telemetry(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The library writes nothing into the user's folders; the variable that stops it does not stay."""
    for variable in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    monkeypatch.delenv("CI", raising=False)  # would stop it too
    run_python("""
        import os
        from xrt_core.engine import engines
        assert engines.status("onnxruntime").available
        assert "ORT_DISABLE_TELEMETRY" not in os.environ
    """)
    assert not [p for p in tmp_path.rglob("*") if "xrt" not in str(p.relative_to(tmp_path))]


def test_a_large_ensemble_is_tried_by_its_first_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is asked about one tree of it, and runs them all."""
    from onnx import ModelProto, TensorProto, helper
    from xrt_onnxruntime import support

    from xrt_core import XRTModule

    sizes = []
    refusal = support._TRIALS._refusal

    def counted(model: ModelProto) -> str | None:
        sizes.append(next(len(a.strings) for a in model.graph.node[0].attribute if a.name == "nodes_modes"))
        return refusal(model)

    monkeypatch.setattr(support._TRIALS, "_refusal", counted)
    monkeypatch.setattr(support._TRIALS, "_verdicts", {})
    monkeypatch.setattr(support, "_MANY", 4)
    tables = {
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * 2, "nodes_values": [0.5, 0.0, 0.0] * 2,
        "nodes_truenodeids": [1, 0, 0] * 2, "nodes_falsenodeids": [2, 0, 0] * 2, "nodes_featureids": [0] * 6,
        "nodes_nodeids": [0, 1, 2] * 2, "n_targets": 1, "target_ids": [0] * 4, "target_nodeids": [1, 2] * 2,
        "target_treeids": [0, 0, 1, 1], "target_weights": [1.0, 2.0, 10.0, 20.0], "nodes_treeids": [0, 0, 0, 1, 1, 1],
    }  # fmt: skip
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **tables)
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 1]) for n in "xy"]
    graph = helper.make_graph([node], "two trees", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    m = XRTModule(helper.make_model(graph, opset_imports=opsets, ir_version=8), engine="onnxruntime", prune=False)
    np.testing.assert_array_equal(m(np.array([[0], [1]], np.float32)), [[11], [22]])
    assert sizes == [3]


def test_no_node_is_refused_for_the_number_of_its_version() -> None:
    """Of the newest opset, whose quantisation the library may have no kernels for: it gets the version before."""
    from onnx import TensorProto, helper, numpy_helper

    from xrt_core import XRTModule

    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Cast", ["d"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT),
    ]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy"]
    constants = [numpy_helper.from_array(np.float32(0.5), "s"), numpy_helper.from_array(np.uint8(7), "z")]
    graph = helper.make_graph(nodes, "newest", ports[:1], ports[1:], constants)
    m = XRTModule(helper.make_model(graph), engine="onnxruntime", prune=False, cache="off", guard=False)
    np.testing.assert_array_equal(m(np.array([0.3, 1, -2], np.float32)), [0.5, 1, -2])
    assert [n.op_type for n in m.partitioned().nodes if n.op_type not in ("Cast", "Launch")] == ["EngineInputConvert"]


def test_a_node_is_asked_about_in_the_version_that_is_compiled() -> None:
    """Celu of bfloat16 is of the newest opset alone: the library has kernels for it, but none for the older form."""
    from ml_dtypes import bfloat16
    from onnx import TensorProto, helper

    from xrt_core import XRTModule

    x, y = (helper.make_tensor_value_info(n, TensorProto.BFLOAT16, [3]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Celu", ["x"], ["y"])], "celu", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=13)
    m = XRTModule(model, engine="onnxruntime", cache="off", guard=False)
    np.testing.assert_allclose(m(np.array([-1, 0, 2], bfloat16)).astype(np.float32), [-0.632, 0, 2], rtol=0.01)
    assert [n.op_type for n in m.partitioned().nodes] == ["Celu"]  # the host's: no cluster that does not compile


@pytest.mark.parametrize("reduction", ["add", "mul"])
@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((8, 1024), (2048, 1)),
        ((5, 4, 700), (8, 64, 2)),
        ((3, 2, 2), (3000, 3)),
        ((4, 3, 1, 5), (2, 2, 1)),
        ((7,), (5, 1)),
    ],
    ids=str,
)
def test_updates_of_one_element_are_all_reduced(
    engine: OnnxRuntimeEngine, shape: tuple[int, ...], indices: tuple[int, ...], reduction: str
) -> None:
    """The library's own ScatterND loses some where indices come again: threads write to one element at once."""
    rng, columns = np.random.default_rng(0), indices[-1]
    rows = rng.integers([-n for n in shape[:columns]], shape[:columns], indices)
    updates = rng.uniform(0.98, 1.02, (*indices[:-1], *shape[columns:])).astype(np.float32)
    data = rng.uniform(0.5, 1.0, shape).astype(np.float32)
    expected, ufunc = data.astype(np.float64), np.add if reduction == "add" else np.multiply
    ufunc.at(expected, tuple(np.moveaxis(rows, -1, 0)), updates)
    x, y = _value("x", F32, *shape), _value("y", F32, *shape)
    i, u = _value("i", np.int64, *indices), _value("u", F32, *updates.shape)
    node = Node("ScatterND", [x, i, u], [y], {"reduction": reduction}, version=18)
    assert engine.supports(node, "cpu", "inference")
    function = Function.from_graph(Graph([x, i, u], [y], [node], opsets={"": 18}, name="scatter"))
    made = engine.compiler("cpu", CompileOptions(threads=2)).compile(function, function.params, function.returns, ())
    for _ in range(20):
        (result,) = made.run([data, rows, updates])
        np.testing.assert_allclose(result, expected, rtol=1e-3)


@pytest.mark.parametrize("nested", [False, True])
def test_a_row_that_is_masked_by_the_least_number(engine: OnnxRuntimeEngine, nested: bool) -> None:
    """Softmax of equal scores, whatever they are, is the mean; only a row of -infinity gives 0."""
    shape, least = (1, 1, 3, 4), np.finfo(np.float32).min
    q, k, v, y = (_value(n, F32, *shape) for n in "qkvy")
    mask, use = _value("mask", F32, 3, 3), _value("use", np.bool_)
    inner = _value("z", F32, *shape) if nested else y
    node = Node("Attention", [q, k, v, mask], [inner], version=23)
    nodes, inputs = [node], [q, k, v, mask]
    if nested:
        branches = [
            Graph([], [inner], [node], opsets={"": 23}, name="then"),
            Graph([], [w := _value("w", F32, *shape)], [Node("Neg", [q], [w], version=13)], opsets={"": 23}, name="no"),
        ]
        bodies = {"then_branch": branches[0], "else_branch": branches[1]}
        nodes, inputs = [Node("If", [use], [y], bodies, version=23)], [use, *inputs]
    arrays = [np.random.default_rng(i).standard_normal(shape, dtype=np.float32) for i in range(3)]
    rows = np.zeros((3, 3), np.float32)
    rows[0], rows[1], rows[2, :2] = least, -np.inf, least
    function = Function.from_graph(Graph(inputs, [y], nodes, opsets={"": 23}, name="masked"))
    made = engine.compiler("cpu", CompileOptions()).compile(function, function.params, function.returns, ())
    given = [*([np.array(True)] if nested else []), *arrays, rows]
    (result,) = made.run(given)
    found = np.asarray(result)[0, 0]
    np.testing.assert_allclose(found[0], arrays[2][0, 0].mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(found[1], 0)
    np.testing.assert_allclose(found[2], arrays[2][0, 0, 2], rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_infinities_without_a_bound(engine: OnnxRuntimeEngine, dtype: Any) -> None:
    """The library's own Clip gives the largest number for them."""
    x, y, z = (_value(n, np.dtype(dtype), 3) for n in "xyz")
    bound = Value("bound", data=np.array(0.5, dtype))
    nodes = [Node("Clip", [x, bound], [y], version=13), Node("Clip", [x, None, bound], [z], version=13)]
    function = Function.from_graph(Graph([x], [y, z], nodes, opsets={"": 21}, name="clipped"))
    made = engine.compiler("cpu", CompileOptions()).compile(function, function.params, function.returns, ())
    low, high = made.run([np.array([np.inf, -np.inf, np.nan], dtype)])
    np.testing.assert_array_equal(low, [np.inf, 0.5, np.nan])
    np.testing.assert_array_equal(high, [0.5, -np.inf, np.nan])
