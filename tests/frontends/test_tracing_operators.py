"""xrt.ops: functions made from the schemas, their checks, control flow, and what a traced node records."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import onnx
import pytest

from tests.frontends.tracing_runs import onnxruntime_run, traced_run
from xrt_core import ops, power_by_engine, trace
from xrt_core.errors import ShapeError, TraceError
from xrt_core.ir.graph import Graph as IRGraph
from xrt_core.ir.graph import Value
from xrt_core.ir.types import SequenceType, TensorType

F = np.float32
X = np.arange(12, dtype=F).reshape(3, 4) - 5


def test_every_operator_of_the_standard_has_a_documented_function() -> None:
    """dir() lists all official domains' operators, and each function carries its schema's name, text and parameters."""
    spaces = {"": ops, "ai.onnx.ml": ops.ml, "ai.onnx.preview": ops.preview,
              "ai.onnx.preview.training": ops.training}  # fmt: skip
    count = 0
    for schema in onnx.defs.get_all_schemas():
        space = spaces[schema.domain]
        assert schema.name in dir(space)
        if schema.deprecated:
            continue
        function = getattr(space, schema.name)
        assert function.__name__ == schema.name
        assert function.__doc__ is not None
        assert f"Since version {schema.since_version}" in function.__doc__
        parameters = inspect.signature(function).parameters
        for a in schema.attributes:
            assert parameters[a].kind is inspect.Parameter.KEYWORD_ONLY
        assert [i.name for i in schema.inputs] == [p for p in parameters if p in {i.name for i in schema.inputs}]
        count += 1
    assert count > 200
    assert ops.Relu is ops.Relu


def test_signatures_show_inputs_and_defaults() -> None:
    """Conv's optional bias and its attributes, with the defaults of the standard."""
    p = inspect.signature(ops.Conv).parameters
    assert p["B"].default is None
    assert p["group"].default == 1
    assert p["auto_pad"].default == "NOTSET"
    assert inspect.signature(ops.Concat).parameters["inputs"].kind is inspect.Parameter.VAR_POSITIONAL


def test_an_unknown_operator_names_those_that_are_near() -> None:
    """A typo gives an AttributeError with the operators meant, in other domains too."""
    with pytest.raises(AttributeError, match="Softmax"):
        _ = ops.SoftMax
    with pytest.raises(AttributeError, match="LinearClassifier"):
        _ = ops.ml.LinearClasifier


def test_inputs_by_position_by_name_and_left_out() -> None:
    """Optional inputs in the middle may be None or left out; numbers and lists take the dtype they need."""
    got = traced_run(
        lambda x: (ops.Clip(x, None, 2), ops.Clip(x, max=2), ops.Clip(x, -1), ops.Reshape(x, [2, -1]),
                   ops.Pad(x, [0, 1, 0, 1], 9), ops.Concat([x, x], axis=0), ops.Concat(x, x, axis=1),
                   ops.Range(0, 5, 2), ops.Range(0, 1, 0.5), ops.Where(x > 0, x, 0.0), ops.Expand(1.5, [2])), X
    )  # fmt: skip
    expected = [np.minimum(X, 2), np.minimum(X, 2), np.maximum(X, -1), X.reshape(2, -1),
                np.pad(X, ((0, 0), (1, 1)), constant_values=9), np.concatenate([X, X]), np.concatenate([X, X], 1),
                np.arange(0, 5, 2), np.arange(0, 1, 0.5, F), np.where(X > 0, X, 0), np.full(2, 1.5, F)]  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_number_of_outputs() -> None:
    """Fixed ones as a tuple, optional ones at request, variadic ones from the attribute, the sizes or `outputs=`."""

    def f(x: Any) -> Any:
        values, indices = ops.TopK(x, [2])
        (a, b), (c, d, e) = ops.Split(x, axis=1, num_outputs=2), ops.Split(x, [1, 0, 2])
        g, h = ops.Split(x, outputs=2, num_outputs=2)
        y, mask = ops.Dropout(x, outputs=2)
        z = ops.Dropout(x)
        lstm = ops.LSTM(x[:, None], np.ones((1, 8, 4), F), np.ones((1, 8, 2), F), hidden_size=2)
        norm = ops.BatchNormalization(x, *[np.ones(4, F)] * 4, training_mode=1)
        assert len(lstm) == len(norm) == 3
        return values, indices, a, b, c, d, e, g, h, y, mask, z, *lstm

    got = traced_run(f, X)
    np.testing.assert_array_equal(got[0], -np.sort(-X, 1)[:, :2])
    np.testing.assert_array_equal(got[2], X[:, :2])
    assert [a.shape for a in got[4:9]] == [(1, 4), (0, 4), (2, 4), (2, 4), (1, 4)]
    assert got[10].dtype == np.bool_


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.Relu(x, x), "takes 1 inputs"),
        (lambda x: ops.Relu(), "'X' is missing"),
        (lambda x: ops.Gemm(x), "'B' is missing"),
        (lambda x: ops.LeakyRelu(x, alhpa=1.0), "did you mean 'alpha'"),
        (lambda x: ops.LeakyRelu(x, alpha="big"), "attribute 'alpha' must be a number, not 'big'"),
        (lambda x: ops.Transpose(x, perm=1), "'perm' must be a list of which each is an integer"),
        (lambda x: ops.Transpose(x, perm=[0, 1.5]), r"'perm'\[1\] must be an integer"),
        (lambda x: ops.Cast(x), "'to' is required"),
        (lambda x: ops.Cast(x, to="float31"), "'to' must be an integer"),
        (lambda x: ops.Clip(x, 0, min=0), "given twice"),
        (lambda x: ops.TopK(x, 1, outputs=3), "outputs=3"),
        (lambda x: ops.Split(x), "outputs=N"),
        (lambda x: ops.Relu({"a": 1}), "Relu"),
        (lambda x: ops.If(x[0, 0] > 0, then_branch=lambda: x, else_branch=lambda: (x, x)), "same structure"),
        (lambda x: ops.If(x[0, 0] > 0, then_branch=lambda: x, else_branch=lambda: x > 0), "disagree"),
        (lambda x: ops.If(x[0, 0] > 0, then_branch=x, else_branch=lambda: x), "a callable or an ir.Graph"),
        (lambda x: ops.Loop(3, None, x, body=lambda i, c, s: c), "must return 2 values"),
        (lambda x: ops.Loop(3, None, x, body=lambda i, c, s: (c, s > 0)), "state 0"),
        (lambda x: ops.Scan(x, num_scan_inputs=2, body=lambda e: e), "num_scan_inputs=2"),
        (lambda x: x + object(), "neither a tensor"),
        (lambda x: ops.Constant(), "one of its attributes"),
        (lambda x: ops.Upsample(x), "deprecated since opset 10"),
    ],
)
def test_a_wrong_call_says_what_and_where(call: Any, message: str) -> None:
    """Counts, names, attribute kinds and bodies are checked; the message starts with the user's file and line."""
    with pytest.raises(TraceError, match=message) as e:
        trace(call, X)
    assert str(e.value).split(":")[0] == __file__


@pytest.mark.parametrize(
    "call",
    [lambda x: ops.Add(x, np.ones((5, 5), F)), lambda x: ops.Add(x, np.ones(4)), lambda x: ops.Not(x),
     lambda x: x @ np.ones((3, 3), F), lambda x: x.reshape(7, 7), lambda x: ops.Conv(x, x)],
)  # fmt: skip
def test_types_and_shapes_that_do_not_fit_point_at_the_users_line(call: Any) -> None:
    """Inference's objections come as ShapeError with operator, types, file and line."""
    with pytest.raises(ShapeError) as e:
        trace(call, X)
    assert str(e.value).split(":")[0] == __file__
    assert "float32[3, 4]" in str(e.value)


def test_nodes_remember_their_source_line() -> None:
    """annotations.source is the line of this file that made the node, through helpers of the package."""
    graph = trace(lambda x: (x[0] + 1).mean(), X)
    here = inspect.currentframe()
    assert here is not None
    for node in graph.nodes:
        assert node.annotations.source is not None
        assert node.annotations.source.filename == __file__
        assert node.annotations.source.line == here.f_lineno - 6


def test_power_by_engine_marks_the_nodes_built_inside() -> None:
    """The innermost mark wins, None keeps nodes on the host, and a mark around another trace does not reach into it."""
    block = []

    def f(x: Any) -> Any:
        a = ops.Relu(x)
        with power_by_engine("tensorrt"):
            b = ops.Exp(a)
            with power_by_engine(None):
                c = ops.Log(b)
            d = ops.Neg(c)
        return ops.Abs(d)

    def around(x: Any) -> Any:
        with power_by_engine("xla"):
            block.append(trace(f, X))
            return ops.Neg(x)

    outer = trace(around, X)
    assert [n.annotations.engine for n in outer.nodes] == ["xla"]
    assert [n.annotations.engine for n in block[0].nodes] == [None, "tensorrt", "host", "tensorrt", None]


def test_power_by_engine_where_nothing_is_traced() -> None:
    """A mark that marks nothing is an error that says where it belongs, and one block may be used again."""
    with pytest.raises(TraceError, match=r"no.*is: put it around the operators inside"), power_by_engine("xla"):
        pass
    mine = power_by_engine("xla")

    @power_by_engine("toy")
    def first(x: Any) -> Any:
        return ops.Abs(x)

    def f(x: Any) -> Any:
        x = first(x)
        with mine:
            y = ops.Exp(x)
        y = ops.Log(y)
        with mine, mine:
            return ops.Neg(y)

    nodes = trace(f, X).nodes
    assert [(n.annotations.engine, n.annotations.region) for n in nodes] == [
        ("toy", "block 1"), ("xla", "block 2"), (None, ""), ("xla", "block 3"),
    ]  # fmt: skip


def test_if_captures_outer_values_and_keeps_the_structure() -> None:
    """Both branches see the tensors around them; what they return comes back; dimensions that differ are unknown."""

    def f(x: Any, flag: Any) -> Any:
        y = x * 2
        zero = np.zeros((3, 4), F)
        return ops.If(flag, then_branch=lambda: {"a": y + x, "b": x}, else_branch=lambda: {"a": y[:1], "b": zero})

    for flag, a, b in ((True, X * 3, X), (False, X[:1] * 2, np.zeros_like(X))):
        got = traced_run(f, X, np.array(flag))
        np.testing.assert_array_equal(got["a"], a)
        np.testing.assert_array_equal(got["b"], b)
    node = trace(f, X, np.array(True)).nodes[-1]
    assert [str(v.type) for v in node.outputs if v] == ["float32[?, 4]", "float32[3, 4]"]
    assert [v.name for v in node.captures] == ["Mul", "x"]


def test_nested_control_flow() -> None:
    """An If inside a Loop inside an If captures through every level."""

    def f(x: Any) -> Any:
        def step(i: Any, c: Any, s: Any) -> Any:
            return c, ops.If(i % 2 == 0, then_branch=lambda: s + x[0], else_branch=lambda: s * 2)

        return ops.If(x.sum() < 1000, then_branch=lambda: ops.Loop(3, True, x[1], body=step), else_branch=lambda: x[0])

    np.testing.assert_array_equal(traced_run(f, X), (X[1] + X[0]) * 2 + X[0])


def test_loop_carries_state_and_collects_scans() -> None:
    """State, collected outputs with the trip count as length, and a condition that ends the loop early."""

    def f(x: Any) -> Any:
        last, other, seen = ops.Loop(4, None, x, 0.5, body=lambda i, c, s, t: (c, s + t, t + 1.0, s.sum() + i))
        assert seen.shape == (4,)
        early = ops.Loop(None, True, 0, body=lambda i, c, n: (n < 5, n + 1))
        return last, other, seen, early

    s, t, seen = X, F(0.5), []
    for i in range(4):
        seen.append(s.sum() + i)
        s, t = s + t, t + F(1)
    last, other, collected, early = onnxruntime_run(f, X)
    np.testing.assert_array_equal(last, s)
    assert other == t
    np.testing.assert_array_equal(collected, np.array(seen, F))
    assert early == 6


def test_a_loop_whose_state_grows_is_traced_with_an_unknown_dimension() -> None:
    """A state that changes its shape gets an unknown dimension; names stay unique after the second attempt."""
    f = lambda x: ops.Loop(3, None, x, body=lambda i, c, s: (c, ops.Concat(s, x, axis=0)))  # noqa: E731
    graph = trace(f, X)
    assert str(graph.outputs[0].type) == "float32[?, 4]"
    np.testing.assert_array_equal(onnxruntime_run(f, X), np.concatenate([X] * 4))


def test_scan_runs_over_an_axis() -> None:
    """The running sum along axis 1, with the state and the collected outputs on axis 1."""

    def f(x: Any) -> Any:
        start = np.zeros(3, F)
        return ops.Scan(start, x, num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1],
                        body=lambda s, e: (s + e, s + e))  # fmt: skip

    state, sums = onnxruntime_run(f, X)
    np.testing.assert_array_equal(sums, np.cumsum(X, 1))
    np.testing.assert_array_equal(state, X.sum(1))


def test_sequences_are_traced_values_too() -> None:
    """SplitToSequence, SequenceMap and ConcatFromSequence; a sequence has a type but no shape."""

    def f(x: Any) -> Any:
        s = ops.SplitToSequence(x, axis=0)
        assert isinstance(s.type, SequenceType)
        with pytest.raises(TraceError, match="no known dtype"):
            _ = s.dtype
        return ops.ConcatFromSequence(ops.SequenceMap(s, body=lambda e: e * 2), axis=0)

    assert trace(f, X).outputs[0].dtype == F
    np.testing.assert_array_equal(onnxruntime_run(f, X), X * 2)


def test_a_tensor_does_not_leave_its_body_or_its_trace() -> None:
    """A value made inside a branch, or in another trace, is refused where it does not exist."""
    kept: list[Any] = []

    def leak(x: Any) -> Any:
        ops.If(x[0, 0] > 0, then_branch=lambda: kept.append(x * 2) or x, else_branch=lambda: x)
        return kept[0] + 1

    with pytest.raises(TraceError, match="made inside If.then_branch"):
        trace(leak, X)
    with pytest.raises(TraceError, match="another trace"):
        trace(lambda x: x + kept[0], X)
    with pytest.raises(TraceError, match="another trace"):
        trace(lambda x: trace(lambda y: x + y, X) and x, X)


def test_constants_of_every_kind() -> None:
    """Constant and ConstantOfShape from numbers, lists and arrays; the type of a Cast from a dtype or a name."""
    got = traced_run(
        lambda x: (ops.Constant(value=X), ops.Constant(value_ints=[1, 2]), ops.Constant(value_float=0.5),
                   ops.ConstantOfShape([2], value=7), ops.Cast(x, to=np.float64), ops.Cast(x, to="int8")), X
    )  # fmt: skip
    expected = (X, np.array([1, 2]), np.array(0.5, F), np.array([7, 7]), X.astype(np.float64), X.astype(np.int8))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_operators_of_other_domains() -> None:
    """ai.onnx.ml and the preview training operators, with their domain and its version in the graph."""

    def f(x: Any) -> Any:
        w, v = ops.training.Momentum(0.1, 0, x, x, x, alpha=0.9, beta=1.0, mode="standard", norm_coefficient=0.0)
        return ops.ml.Normalizer(x, norm="L2"), w, v

    graph = trace(f, X)
    assert [n.domain for n in graph.nodes] == ["ai.onnx.preview.training", "ai.onnx.ml"]
    assert graph.opsets["ai.onnx.preview.training"] == 1
    assert graph.outputs[0].type == TensorType(np.dtype(F), (3, 4))
    np.testing.assert_allclose(traced_run(f, X)[1], X - 0.1 * (0.9 * X + X), rtol=1e-5)


def test_group_normalization_has_a_shape_although_onnx_infers_none() -> None:
    """An operator without inference in the onnx package still has its dtype and shape."""
    x = np.arange(16, dtype=F).reshape(1, 4, 4)
    graph = trace(lambda x: ops.GroupNormalization(x, np.ones(4, F), np.zeros(4, F), num_groups=2), x)
    assert str(graph.outputs[0].type) == "float32[1, 4, 4]"


def test_a_thousand_nodes_are_traced() -> None:
    """Every operation of a long build is recorded once (benchmarks/sdk.py measures the time)."""

    def f(x: Any) -> Any:
        for _ in range(500):
            x = ops.Relu(x) + 1
        return x

    assert len(trace(f, X).nodes) == 1000


def test_operators_work_only_while_tracing() -> None:
    """Outside of a trace the message says what to use instead."""
    with pytest.raises(TraceError, match="XRTModule"):
        ops.Relu(X)


def test_a_branch_may_be_a_graph_already() -> None:
    """An ir.Graph is taken as a body as it is, beside a callable."""
    constant = Value.constant(X * 3, "k")
    branch = IRGraph([], [constant], [], opsets={"": 21})

    def f(x: Any) -> Any:
        return ops.If(x[0, 0] > 0, then_branch=lambda: x, else_branch=branch)

    assert trace(f, X).nodes[-1].attributes["else_branch"] is branch
    np.testing.assert_array_equal(traced_run(f, X), X * 3)


def test_score_modifiers_of_flex_attention_are_callables() -> None:
    """score_mod sees the scores (batch, heads, queries, keys) and changes them before the softmax."""
    q = np.linspace(-1, 1, 16, dtype=F).reshape(1, 2, 4, 2)
    seen: list[Any] = []

    def bend(scores: Any) -> Any:
        seen.append(scores.shape)
        return ops.Tanh(scores)

    got = traced_run(lambda q: ops.preview.FlexAttention(q, q, q, scale=1.0, score_mod=bend), q)
    scores = np.exp(np.tanh(q @ q.swapaxes(-1, -2)))
    np.testing.assert_allclose(got, scores / scores.sum(-1, keepdims=True) @ q, rtol=1e-5)
    assert seen == [(1, 2, 4, 4)]
