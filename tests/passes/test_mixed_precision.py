"""Lowering of float32: what is lowered, where casts stand, constants, constraints, and what is refused."""

from __future__ import annotations

import gc
from importlib.metadata import PackageNotFoundError
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import xrt_core as xrt
from tests.conformance import dev_models
from tests.host_run import run_graph
from tests.profiles import examples
from tests.random_graphs import F32, I64, RandomGraph, graph_of, graphs, ints, node
from xrt_core.compiler.passes import lowering
from xrt_core.errors import OptionError
from xrt_core.frontends import ops
from xrt_core.frontends.onnx_export import export_model
from xrt_core.host.executor import run_node
from xrt_core.ir.function import graph_fingerprint
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import find_schema
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import verify
from xrt_core.options import Options, resolve
from xrt_core.passes.mixed_precision import Constraint, LowerPrecision, PrecisionReport
from xrt_core.passes.mixed_precision_ops import ALLOW, FOLLOW, KEEP, LOWERED_INPUTS, MOVE, version_for
from xrt_core.passes.shape_specialization import specialise

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)


def typed(graph: Graph) -> Graph:
    """The graph as the pipeline gives it to the pass."""
    return specialise(graph, [v.type for v in graph.inputs], {}, run_node)


def lower(graph: Graph, rules: LowerPrecision | None = None) -> tuple[Graph, PrecisionReport]:
    """The lowered graph, which holds the IR's rules, and to which the pass has nothing to add."""
    rules = rules or LowerPrecision("bfloat16")
    result, report = rules.apply(typed(graph))
    verify(result, "lower precision")
    again, _ = rules.apply(result)
    assert again is result
    assert [v.type for v in result.outputs] == [v.type for v in typed(graph).outputs]
    return result, report


def x_of(*shape: Any, name: str = "x") -> Value:
    return Value(name, TensorType(F32, shape))


def weight(*shape: int, scale: float = 1.0, name: str = "w") -> Value:
    data = np.random.default_rng(0).standard_normal(shape) * scale
    return Value.constant(data.astype(np.float32), name)


def dtypes(graph: Graph) -> list[tuple[str, str]]:
    """Operator and dtype of its first output, node by node."""
    return [(n.op_type, str(n.outputs[0].dtype)) for n in graph.nodes if n.outputs[0] is not None]


def reasons(report: PrecisionReport) -> dict[str, str]:
    return {k.operator: k.reason for k in report.kept}


def mlp() -> Graph:
    """x -> MatMul -> Add -> Relu -> MatMul -> Softmax."""
    x, a, b, c, d, y = x_of(4, 8), *(Value(n) for n in "abcdy")
    return graph_of([x], [y], [
        node("MatMul", [x, weight(8, 8, name="w1")], [a]), node("Add", [a, weight(8, name="b1")], [b]),
        node("Relu", [b], [c]), node("MatMul", [c, weight(8, 3, name="w2")], [d]), node("Softmax", [d], [y]),
    ])  # fmt: skip


def test_a_chain_is_cast_twice() -> None:
    """Cases 1, 2, 4: down before the first product, up before the Softmax, and weights at once."""
    result, report = lower(mlp())

    assert dtypes(result) == [
        ("Cast", "bfloat16"), ("MatMul", "bfloat16"), ("Add", "bfloat16"), ("Relu", "bfloat16"),
        ("MatMul", "bfloat16"), ("Cast", "float32"), ("Softmax", "float32"),
    ]  # fmt: skip
    assert {str(v.dtype) for v in result.constants} == {"bfloat16"}
    assert dict(report.lowered) == {"bfloat16": 4}
    assert report.casts == 2
    assert reasons(report) == {"Softmax": "Softmax is on the keep list"}


def test_what_is_about_types_is_not_reported() -> None:
    """Operators that read or make other types have nothing to lower; so has one that reads bits."""
    x, bits, q = Value("x", TensorType(F32, (4,))), Value("bits"), [Value("q"), Value("s"), Value("z")]
    nodes = [Node("BitCast", [x], [bits], {"to": 6}, version=26), node("DynamicQuantizeLinear", [x], q)]

    _, report = lower(graph_of([x], [bits, *q], nodes))

    assert reasons(report) == {}


@pytest.mark.parametrize(("target", "bound"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_results_stay_close(target: str, bound: float) -> None:
    """A narrow float's rounding is all that changes: two to the minus eight, and minus eleven."""
    x = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    result, _ = lower(mlp(), LowerPrecision(target))
    (y,), (want,) = run_graph(result, [x]), run_graph(mlp(), [x])

    assert y.dtype == np.float32
    assert 0 < np.abs(y - want).max() < bound


def test_a_value_is_cast_once() -> None:
    """Case 4: three products read x, and two nodes read a product in float32."""
    x, (a, b, c, d, e) = x_of(4, 4), (Value(n) for n in "abcde")
    graph = graph_of([x], [b, c, d, e], [
        node("MatMul", [x, weight(4, 4)], [a]), node("MatMul", [x, a], [b]), node("MatMul", [a, x], [c]),
        node("Exp", [a], [d]), node("Softmax", [a], [e]),
    ])  # fmt: skip
    result, report = lower(graph)

    casts = [n for n in result.nodes if n.op_type == "Cast"]
    assert report.casts == len(casts) == 4  # x down; a, b and c up
    assert len({n.inputs[0] for n in casts}) == 4


def test_the_wider_type_wins() -> None:
    """Case 2: a product that is added to a float32 input is cast up; a mean of an input is not worth a cast."""
    x, (a, b) = x_of(4, 4), (Value(n) for n in "ab")
    result, report = lower(graph_of([x], [b], [node("MatMul", [x, weight(4, 4)], [a]), node("Add", [a, x], [b])]))

    assert dtypes(result)[-1] == ("Add", "float32")
    assert "not all of them arrive" in reasons(report)["Add"]


def test_casts_go_before_what_only_moves() -> None:
    """Case 3: a Transpose and a Where between a Softmax and a product; not a Transpose that float32 reads as well."""
    x, (a, b, c, d, y) = x_of(4, 4), (Value(n) for n in "abcdy")
    flag, zero = Value("flag", TensorType(np.dtype(bool), (4, 4))), Value.constant(np.float32(0), "zero")
    nodes = [
        node("Softmax", [x], [a]), node("Transpose", [a], [b], perm=(1, 0)), node("Where", [flag, zero, b], [c]),
        node("Transpose", [x], [d], perm=(1, 0)), node("MatMul", [c, d], [y]),
    ]  # fmt: skip
    result, report = lower(graph_of([x, flag], [y], nodes))
    assert [(o, d) for o, d in dtypes(result) if o != "Cast"] == [
        ("Softmax", "float32"), ("Transpose", "bfloat16"), ("Where", "bfloat16"), ("Transpose", "bfloat16"),
        ("MatMul", "bfloat16"),
    ]  # fmt: skip
    assert report.casts == 3  # x, the Softmax, the result

    shared, report = lower(graph_of([x, flag], [y, d], nodes))
    assert [d for o, d in dtypes(shared) if o == "Transpose"] == ["bfloat16", "float32"]
    arrays = [np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), np.eye(4, dtype=bool)]
    assert np.array_equal(run_graph(result, arrays)[0], run_graph(shared, arrays)[0])


def test_a_cast_of_the_model_reads_the_narrow_value() -> None:
    """Case 4: to integers straight from bfloat16, and a Cast to bfloat16 becomes an identity."""
    x, (a, b, c) = x_of(4, 4), (Value(n) for n in "abc")
    graph = graph_of([x], [b, c], [
        node("MatMul", [x, weight(4, 4)], [a]), node("Cast", [a], [b], to=6), node("Cast", [a], [c], to=16),
    ])  # fmt: skip
    result, _ = lower(graph)

    assert [n.inputs[0].dtype for n in result.nodes if n.op_type == "Cast"][1:] == [BF16, BF16]  # type: ignore[union-attr]
    assert len(result.nodes) == 4


def test_constants_beyond_float16_keep_float32() -> None:
    """Case 5: a mask of the largest float32 number, an epsilon that would be zero; neither troubles bfloat16."""
    x, (a, b, c) = x_of(4, 4), (Value(n) for n in "abc")
    big = Value.constant(np.array([0, np.finfo(np.float32).min, 0, 0], np.float32), "mask")
    tiny = Value.constant(np.float32(1e-12), "epsilon")
    nodes = [node("MatMul", [x, weight(4, 4)], [a]), node("Add", [a, big], [b]), node("Add", [a, tiny], [c])]
    graph = graph_of([x], [b, c], nodes)
    result, report = lower(graph, LowerPrecision("float16"))

    assert [d for o, d in dtypes(result) if o == "Add"] == ["float32", "float32"]
    assert [k.reason for k in report.kept] == [
        "constant 'mask' holds 3.40282e+38, beyond float16's largest number 65504",
        "constant 'epsilon' is 1e-12, which float16 rounds to zero",
    ]
    assert dict(lower(graph)[1].lowered) == {"bfloat16": 3}


@pytest.mark.parametrize(
    ("number", "fits"), [(65504.0, True), (65519.0, True), (65520.0, False), (np.inf, True), (-70000.0, False)]
)
def test_the_edge_of_float16(number: float, fits: bool) -> None:
    """What rounds to the largest number fits; infinities are what they are."""
    found = LowerPrecision("float16").constant(np.array([number, 1], np.float32), F16)

    assert isinstance(found, np.ndarray) is fits
    if fits:
        assert np.isfinite(found[0]) == np.isfinite(number)  # type: ignore[index]


def test_quantised_values_are_left() -> None:
    """Case 5: an engine fuses DequantizeLinear with the product that reads it; a cast between them would stop that."""
    x, (q, d, y) = x_of(4, 4), (Value(n) for n in "qdy")
    scale, zero = Value.constant(np.float32(0.1), "s"), Value.constant(np.int8(0), "z")
    graph = graph_of([x], [y], [
        node("QuantizeLinear", [x, scale, zero], [q]), node("DequantizeLinear", [q, scale, zero], [d]),
        node("MatMul", [d, weight(4, 4)], [y]),
    ])  # fmt: skip
    result, report = lower(graph)

    assert len(result.nodes) == 3
    assert reasons(report)["MatMul"] == "it computes on quantised values"


def test_old_versions_grow_types() -> None:
    """Case 6: a Conv of opset 18 knows no bfloat16, that of opset 22 does; float16 needs no other version."""
    x, (a, y) = x_of(1, 2, 5, 5), (Value(n) for n in "ay")
    nodes = [node("Conv", [x, weight(3, 2, 3, 3)], [a]), node("MaxPool", [a], [y], kernel_shape=(2, 2))]
    graph = graph_of([x], [y], nodes)

    assert [n.version for n in lower(graph)[0].nodes if n.op_type in ("Conv", "MaxPool")] == [22, 22]
    wanted = [n.version for n in lower(graph, LowerPrecision("float16"))[0].nodes if n.op_type in ("Conv", "MaxPool")]
    assert wanted == [11, 12]


def test_versions_that_differ_by_types_alone() -> None:
    """Case 6, reviewed against the standard's changelog: all bumps from version 7 on that are not to 13 or 22.

    None stands for an operator whose attribute became an input, or that no version takes.
    """
    found = {}
    for op in sorted(ALLOW | FOLLOW):
        versions = sorted(s.since_version for s in onnx.defs.get_all_schemas_with_history()
                          if s.name == op and not s.domain)  # fmt: skip
        assert versions, op
        for v in versions:
            new = version_for(op, "", v, "bfloat16")
            if v >= 7 and new not in (v, 13, 22):
                found[op, v] = new
    later = {("Celu", 12): 28, ("Compress", 9): 28, ("Compress", 11): 28, ("Einsum", 12): 28,
             ("ReverseSequence", 10): 28}  # fmt: skip
    assert {k: v for k, v in found.items() if k not in later or v is not None} == {
        ("BatchNormalization", 7): None, ("BatchNormalization", 9): 14, ("Dropout", 7): None, ("Dropout", 10): None,
        ("PRelu", 7): 16, ("PRelu", 9): 16, ("Shrink", 9): None, ("Split", 11): None, ("Squeeze", 11): None,
        ("Unsqueeze", 11): None, ("Where", 9): 16, **{k: v for k, v in later.items() if k in found},
    }  # fmt: skip


def test_the_lists_name_operators_once() -> None:
    """Every name is an operator, and stands on one list."""
    known = {s.name for s in onnx.defs.get_all_schemas_with_history()}
    assert not (ALLOW & FOLLOW) | (ALLOW & KEEP) | (FOLLOW & KEEP)
    assert (ALLOW | FOLLOW | KEEP) - known <= {"Assign", "CausalConvWithState", "LinearAttention", "SwiGLU"}
    assert find_schema("Assign", "xrt", 1) is not None
    assert set(LOWERED_INPUTS) <= ALLOW | FOLLOW
    assert MOVE < FOLLOW


def test_statistics_stay_wide() -> None:
    """BatchNormalization takes its mean and variance in another type; in training it stays in float32."""
    x, (a, y) = x_of(1, 2, 5, 5), (Value(n) for n in "ay")
    stats = [weight(2, name=n, scale=0.1) for n in ("scale", "bias", "mean")]
    variance = Value.constant(np.ones(2, np.float32), "variance")
    graph = graph_of([x], [y], [
        node("Conv", [x, weight(2, 2, 3, 3)], [a]), node("BatchNormalization", [a, *stats, variance], [y]),
    ])  # fmt: skip
    result, _ = lower(graph)
    norm = next(n for n in result.nodes if n.op_type == "BatchNormalization")
    _, report = lower(graph, LowerPrecision("bfloat16", training=True))

    assert [str(v.dtype) for v in norm.inputs if v is not None] == ["bfloat16", *["float32"] * 4]
    assert reasons(report)["BatchNormalization"] == "it takes the statistics of the batch"


def test_attention_computes_its_softmax_in_float32() -> None:
    """The node says so, and its mask of large negative numbers is not touched."""
    q, k, v = (Value(n, TensorType(F32, (1, 2, 4, 8))) for n in "qkv")
    mask = Value.constant(np.full((4, 4), np.finfo(np.float32).min, np.float32), "mask")
    y = Value("y")
    attention = Node("Attention", [q, k, v, mask], [y], version=23, name="y")
    graph = Graph([q, k, v], [y], [attention], opsets={"": 23})
    result, _ = lower(graph, LowerPrecision("float16"))
    made = next(n for n in result.nodes if n.op_type == "Attention")

    assert made.attributes["softmax_precision"] == 1
    assert [str(i.dtype) for i in made.inputs if i is not None] == ["float16"] * 3 + ["float32"]


def constraints(obey: bool = False, target: str | None = "bfloat16", **rows: str) -> LowerPrecision:
    """Constraints by operator, and by name where the key begins with name_."""
    made = [Constraint("name", k[5:], d) if k.startswith("name_") else Constraint("op", k, d) for k, d in rows.items()]
    return LowerPrecision(target, made, obey=obey)


def test_constraints() -> None:
    """By operator; by name, which comes first; and alone, without a type for the rest."""
    by_op, report = lower(mlp(), constraints(MatMul="float32"))
    assert {d for _, d in dtypes(by_op)} == {"float32"}
    assert reasons(report)["MatMul"] == "precision={'op:MatMul': 'float32'}"

    by_name, report = lower(mlp(), constraints(name_d="bfloat16", MatMul="float32"))
    assert [o for o, d in dtypes(by_name) if d == "bfloat16"] == ["Cast", "MatMul"]
    assert dict(report.lowered) == {"bfloat16": 1}

    alone, report = lower(mlp(), constraints(target=None, Softmax="float16"))
    assert [(o, d) for o, d in dtypes(alone) if o != "Cast"][-1] == ("Softmax", "float16")
    assert reasons(report)["MatMul"] == "no type was asked for it, and only marked nodes are lowered"


def test_two_narrow_types_in_one_graph() -> None:
    """What follows takes a narrow type only where it is one and the same."""
    x, (a, b, c) = x_of(4, 4), (Value(n) for n in "abc")
    nodes = [node("MatMul", [x, weight(4, 4)], [a]), node("MatMul", [x, weight(4, 4)], [b]), node("Add", [a, b], [c])]
    result, report = lower(graph_of([x], [c], nodes), constraints(name_b="float16"))

    assert dict(report.lowered) == {"bfloat16": 1, "float16": 1}
    assert dtypes(result)[-1] == ("Add", "float32")


def test_force() -> None:
    """A constraint that cannot be met is followed where possible, or an error that names the node and the cause."""
    x, y = x_of(4, 4), Value("y")
    big = Value.constant(np.full((4, 4), 1e6, np.float32), "big")
    graph = graph_of([x], [y], [node("MatMul", [x, big], [y])])

    assert "beyond float16" in reasons(lower(graph, constraints(MatMul="float16"))[1])["MatMul"]
    refused = r"'op:MatMul' asks for float16, but node 'y' \(MatMul\) cannot: constant 'big'"
    with pytest.raises(OptionError, match=refused):
        constraints(obey=True, MatMul="float16").apply(typed(graph))
    half = Value("h", TensorType(F16, (4, 4)))
    narrow = graph_of([half], [y], [node("MatMul", [half, half], [y])])
    assert constraints(MatMul="float32").apply(typed(narrow))[0] is not None
    with pytest.raises(OptionError, match="the model computes it in float16, which is not raised"):
        constraints(obey=True, MatMul="float32").apply(typed(narrow))


def test_unknown_operators_and_names() -> None:
    """A constraint on nothing is an error with what is near."""
    with pytest.raises(OptionError, match=r"'op:Softmx': .*did you mean Softmax"):
        constraints(Softmx="float32")
    x, y = x_of(4), Value("encoder_l")
    graph, rules = graph_of([x], [y], [node("Relu", [x], [y])]), constraints(name_encoder_1="float32")
    with pytest.raises(OptionError, match=r"no node of g is named 'encoder_1'; near it are 'encoder_l'"):
        rules.check_names(graph)


def test_nothing_to_lower() -> None:
    """Case 7: the graph itself comes back."""
    x, y = Value("x", TensorType(I64, (4,))), Value("y")
    graph = typed(graph_of([x], [y], [node("Add", [x, ints(1)], [y])]))

    assert LowerPrecision("bfloat16")(graph) is graph


@pytest.mark.slow
@examples(60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_graphs(data: st.DataObject) -> None:
    """Any graph stays sound and typed, its results of the same types and shapes; and in float32 nothing is made up:
    with every node kept, results are bit for bit the same."""
    case: RandomGraph = data.draw(graphs())
    given = specialise(case.graph, [TensorType(a.dtype, a.shape) for a in case.arrays], {}, run_node)
    result, report = LowerPrecision("bfloat16", [Constraint("op", "Add", "bfloat16")]).apply(given)
    verify(result, "lower precision")
    wants = run_graph(given, case.arrays)
    with np.errstate(all="ignore"):
        results = run_graph(result, case.arrays)

    for y, want in zip(results, wants, strict=True):
        assert (y.dtype, y.shape) == (want.dtype, want.shape)
    if not report.lowered:
        assert result is given
    kept, _ = LowerPrecision("bfloat16", [Constraint("op", "*", "float32")]).apply(given)
    assert kept is given


class Net(xrt.Graph):
    """Two products around a Loop-free body."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w = (rng.standard_normal((16, 16)) / 4).astype(np.float32)

    def build(self, x: Any) -> Any:
        return ops.Softmax(ops.Relu(x @ self.w) @ self.w)


@pytest.mark.tiny_clusters
@pytest.mark.parametrize("engine", ["host", "xla", "onnxruntime"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_engine_takes_the_graph(engine: str, precision: str) -> None:
    """The same module through any engine: float32 in and out, close to float32, and it says what was lowered."""
    if engine != "host":
        pytest.importorskip({"xla": "jax"}.get(engine, engine))
    x = np.random.default_rng(2).standard_normal((8, 16)).astype(np.float32)
    want = xrt.XRTModule(Net(), engine="host")(x)
    m = xrt.XRTModule(Net(), engine=engine, precision=precision, verify=True)
    y = m(x)

    assert y.dtype == np.float32
    assert 0 < np.abs(y - want).max() < (2e-2 if precision == "bf16" else 2e-3)
    text = str(m.explain({"x": x}))
    assert f"3 nodes in {'bfloat16' if precision == 'bf16' else 'float16'}, 2 casts; 1 nodes kept in float32" in text
    assert "kept in float32: Softmax: Softmax is on the keep list" in text
    assert m.explain({"x": x}).to_json()["precision"]["kept"][0]["operator"] == "Softmax"
    assert xrt.XRTModule(Net(), engine="host").explain({"x": x}).precision is None


def test_executables_are_told_apart() -> None:
    """What the cache's key is made of differs by the type, and not by options that change nothing."""
    x = {"x": np.zeros((8, 16), np.float32)}
    rows: list[dict[str, Any]] = [
        {}, {"precision": "bf16"}, {"precision": "fp16"}, {"use_bf16": True, "precision": {"op:Softmax": "bf16"}}
    ]  # fmt: skip
    prints = [graph_fingerprint(xrt.XRTModule(Net(), engine="host", **row).partitioned(x)) for row in rows]
    same = xrt.XRTModule(Net(), engine="host", use_bf16=True, force_precision_constraints=True).partitioned(x)

    assert len(set(prints)) == 4
    assert graph_fingerprint(same) == prints[1]


def test_bodies_of_control_flow() -> None:
    """A body is lowered by itself, and its inputs and outputs keep their types."""
    x, y, w = x_of(4, 4), Value("y"), weight(4, 4)
    flag = Value("flag", TensorType(np.dtype(bool), ()))
    a, b = Value("a", TensorType(F32, (4, 4))), Value("b", TensorType(F32, (4, 4)))
    then = Graph([], [a], [node("MatMul", [x, w], [a])], opsets={"": 18}, name="then")
    other = Graph([], [b], [node("Exp", [x], [b])], opsets={"": 18}, name="else")
    graph = graph_of([flag, x], [y], [node("If", [flag], [y], then_branch=then, else_branch=other)])
    m = xrt.XRTModule(graph, engine="host", use_bf16=True, verify=True)
    data = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    result = m(np.array(True), data)

    exact = data @ w.data  # type: ignore[operator]
    assert result.dtype == np.float32
    assert 0 < np.abs(result - exact).max() < 0.05
    assert np.array_equal(m(np.array(False), data), xrt.XRTModule(graph, engine="host")(np.array(False), data))


def test_weights_are_cast_once_for_all_signatures() -> None:
    """Each signature's graph holds the same narrow array of a large weight."""
    x, y = Value("x", TensorType(F32, ("n", 256))), Value("y")
    m = xrt.XRTModule(graph_of([x], [y], [node("MatMul", [x, weight(256, 256)], [y])]), engine="host", use_fp16=True)
    found = [m.partitioned({"x": np.zeros((n, 256), np.float32)}).constants[0].data for n in (1, 2)]

    assert found[0] is found[1]
    assert found[0] is not None
    assert found[0].dtype == F16


@pytest.mark.slow
def test_casts_of_weights_go_with_them() -> None:
    """What is remembered of an array does not outlive it."""
    rules = LowerPrecision("float16")
    data = np.ones((200, 200), np.float32)
    first = rules.constant(data, F16)
    assert rules.constant(data, F16) is first
    assert len(rules._constants) == 1
    del data
    gc.collect()
    assert not rules._constants


def test_an_onnx_file_of_the_lowered_graph() -> None:
    """The lowered graph is a model like any other: the checker of the standard takes it."""
    result, _ = lower(mlp(), LowerPrecision("float16"))
    onnx.checker.check_model(export_model(result), full_check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_fp16": True, "use_bf16": True}, r"use_fp16=True \(keyword use_fp16=\) and use_bf16=True .* contradict"),
        ({"use_fp16": True, "precision": "bf16"}, "contradict"),
        ({"precision": "bf61"}, r"cannot be 'bf61' .*did you mean 'bf16'"),
        ({"precision": {"op:Softmax": "float23"}}, "'op:Softmax' cannot be computed in 'float23' .*'float32'"),
        ({"precision": {"nam:head": "fp32"}}, r"names no nodes: .*did you mean 'name:head'"),
        ({"precision": {"Softmax": "fp32"}}, "'Softmax' names no nodes: say 'op:OPERATOR' or 'name:PATTERN'"),
        ({"precision": 16}, "cannot be 16"),
        ({"use_fp61": True}, "unknown option 'use_fp61' .*did you mean 'use_fp16'"),
        ({"use_int8": True}, "needs int8_calibration="),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    """An OptionError names the option, its source and what is near."""
    with pytest.raises(OptionError, match=message):
        resolve(options, {})


def test_options_make_the_pass() -> None:
    """Each option does its part; strict_types leaves only what is marked; the environment says the same."""
    assert lowering(Options()) is None
    assert lowering(resolve({"strict_types": True}, {})) is None
    marked = {"use_fp16": True, "strict_types": True, "precision": {"op:MatMul": "fp16"}}
    strict = lowering(resolve(marked, {}))
    assert strict is not None
    _, report = lower(mlp(), strict)
    assert dict(report.lowered) == {"float16": 2}
    env = {"FLAGS_use_bf16": "1", "XRT_PRECISION": "op:Softmax=bf16, name:head/*=fp32",
           "FLAGS_force_precision_constraints": "1"}  # fmt: skip
    read = lowering(resolve({}, env))
    assert read is not None
    assert read.target == BF16
    assert read.obey
    assert [str(c) for c in read.constraints] == ["op:Softmax", "name:head/*"]
    assert resolve({}, {"XRT_PRECISION": "bf16"}).narrow == "bfloat16"
    assert resolve({"precision": "fp32"}, {}).narrow is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("ppocr_cls", marks=pytest.mark.nightly), "minilm_int8"])
def test_trained_models(name: str) -> None:
    """Trained models through XLA, relative to the largest output: the types' rounding, gathered over their layers."""
    pytest.importorskip("jax")
    model, inputs = development_model(name)
    want = xrt.XRTModule(model, engine="xla").run(inputs)
    for precision, bound in (("bf16", 0.02), ("fp16", 0.002)):
        got = xrt.XRTModule(model, engine="xla", precision=precision).run(inputs)
        off = max(float(np.abs(got[k] - w).max() / np.abs(w).max()) for k, w in want.items())
        assert 0 < off < bound, precision


def development_model(name: str) -> tuple[str, dict[str, np.ndarray]]:
    """Path and inputs of a development model; skips where its package is missing."""
    try:
        return str(dev_models.path(name)), dev_models.inputs_for(name)
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed (see tests/conformance/models.txt)")
