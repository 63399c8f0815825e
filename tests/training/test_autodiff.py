"""Building gradients: what is computed, what is refused, and how rules get in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.training.checks import nodes_of, run
from xrt_core.errors import GradientError, RegistrationError
from xrt_core.frontends import ops
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import verify
from xrt_core.training import composition, gradient, gradients, no_gradient, stop_gradient
from xrt_core.training import registry as rules


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that a test registers are gone after it; in it Det has none."""
    rules.rules()  # the package's own stay
    for table in ("_RULES", "_COMPOSITIONS", "_CONSTANT"):
        monkeypatch.setattr(rules, table, dict(getattr(rules, table)))
    del rules._RULES["", "Det"]


def test_only_what_is_needed_is_computed() -> None:
    """By one input of a product nothing is computed for the other, and nothing off the way to the loss."""

    def f(x: Any, w: Any) -> Any:
        return (x @ w).sum(), ops.Exp(ops.Sin(x))

    graph = xrt.trace(f, "float32[2, 3]", "float32[3, 4]")
    made = gradients(graph, 0, ["w"])
    added = nodes_of(made)[len(graph.nodes) :]

    assert added.count("MatMul") == 1
    assert not {"Cos", "Exp", "Sin"} & set(added)
    assert made.outputs[: len(graph.outputs)] == graph.outputs
    assert made.outputs[-1].name == "w.gradient"
    assert made.outputs[-1].type == graph.inputs[1].type


def test_wrt_may_be_anything_that_is_a_float() -> None:
    """Inputs by name, constants and intermediate results are differentiated by."""
    w = np.array([[1.0, 2.0]], np.float32)

    class Model(xrt.Graph):
        def __init__(self) -> None:
            self.w = w

        def build(self, x: Any) -> Any:
            return (ops.Relu(x) * self.w).sum()

    graph = xrt.trace(Model(), "float32[3, 2]")
    relu = graph.nodes[0].outputs[0]
    constant = next(v for v in graph.constants if v.name == "w")
    assert relu is not None
    made = gradients(graph, 0, ["x", constant, relu])
    x = np.array([[1, -1], [2, 3], [-4, 5]], np.float32)
    by_x, by_w, by_relu = run(made, [x])[1:]

    np.testing.assert_array_equal(by_w, np.maximum(x, 0).sum(0, keepdims=True))
    np.testing.assert_array_equal(by_relu, np.broadcast_to(w, (3, 2)))
    np.testing.assert_array_equal(by_x, by_relu * (x > 0))


def test_the_names_of_lines_and_marks_follow_the_forward_node() -> None:
    """A gradient's node carries the line, and the engine mark, of the node whose gradient it is."""

    def f(x: Any) -> Any:
        with xrt.power_by_engine("xla"):
            y = ops.Tanh(x)
        return y.sum()

    made = gradients(xrt.trace(f, "float32[3]"), 0, ["x"])
    mine = [n for n in made.nodes if n.name.startswith("gradient.Tanh")]

    assert mine
    assert {n.annotations.engine for n in mine} == {"xla"}
    assert {n.annotations.source for n in mine} == {made.nodes[0].annotations.source}


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 21])
def test_nodes_follow_the_opset(opset: int) -> None:
    """Where the graph's opset has what the rules need, their nodes are of its versions."""

    class Model(xrt.Graph):
        def build(self, x: Any, w: Any) -> Any:
            return ops.ReduceSum(ops.Softmax(ops.Relu(ops.MatMul(x, w)), axis=1), keepdims=0)

    Model.opset = opset
    graph = xrt.trace(Model(), "float32[2, 3]", "float32[3, 4]")
    made = gradients(graph, 0, ["x", "w"])
    verify(made, "opset")
    newest = xrt.trace(lambda x: x + 1.0, "float32[2]").opsets[""]

    from xrt_core.ir.schema import since_version

    assert opset <= newest
    assert all(n.version == since_version(n.op_type, "", opset) for n in made.nodes)


def test_symbolic_dimensions() -> None:
    """Where rules get along without sizes, a graph of symbolic dimensions has gradients too."""

    def f(x: Any, w: Any, b: Any) -> Any:
        return ((ops.Tanh(x @ w + b)) ** 2.0).mean()

    graph = xrt.trace(f, "float64[N, 3]", "float64[3, 2]", "float64[2]")
    assert graph.inputs[0].shape == ("N", 3)
    made = gradients(graph, 0, ["x", "w", "b"])
    verify(made, "symbolic")
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(s) for s in ((4, 3), (3, 2), (2,))]
    fixed = gradients(xrt.trace(f, *given), 0, ["x", "w", "b"])

    for a, b in zip(run(made, given), run(fixed, given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_an_unknown_broadcast_is_refused() -> None:
    """Whether a symbolic dimension was broadcast is not guessed."""
    graph = xrt.trace(lambda x, y: (x * y).sum(), "float32[N]", "float32[M]")

    with pytest.raises(GradientError, match="was broadcast to .* not known; specialise"):
        gradients(graph, 0, ["x"])


def test_stop_gradient() -> None:
    """The value goes through, its gradient does not."""
    graph = xrt.trace(lambda x: (x * stop_gradient(x)).sum(), "float32[3]")
    x = np.array([1, 2, 3], np.float32)
    value, by_x = run(gradients(graph, 0, ["x"]), [x])

    assert value == 14
    np.testing.assert_array_equal(by_x, x)


def test_no_way_to_the_loss() -> None:
    """A value that the loss does not depend on is an error, or zeros where asked for."""

    def f(x: Any, y: Any, z: Any) -> Any:
        return x.sum() + ops.Floor(y).sum()

    graph = xrt.trace(f, "float32[2]", "float32[3]", "float32[4]")
    for name in ("y", "z"):
        with pytest.raises(GradientError, match=f"no gradient by '{name}': the loss .* does not depend on it"):
            gradients(graph, 0, [name])
    made = gradients(graph, 0, ["y", "z"], unused="zeros")

    assert [a.tolist() for a in run(made, [np.zeros(n, np.float32) for n in (2, 3, 4)])[1:]] == [[0.0] * 3, [0.0] * 4]


def test_an_operator_without_a_rule(registry: None) -> None:
    """The error names the node, its line, and the way from there to the loss."""
    graph = xrt.trace(lambda x: ops.Exp(ops.Det(ops.Sin(x))), "float32[2, 2]")

    with pytest.raises(GradientError, match=r"node 'Det' \(Det-22\) from .*test_autodiff.py.*: Det -> Exp"):
        gradients(graph, 0, ["x"])


@pytest.mark.parametrize(
    ("f", "dtype", "message"),
    [
        (lambda x: x * 2, "float32[3]", "must be a scalar: reduce it"),
        (lambda x: x.sum(), "int64[3]", "must be a float"),
    ],
)
def test_a_bad_loss(f: Any, dtype: str, message: str) -> None:
    """A loss is a float of one element."""
    with pytest.raises(GradientError, match=message):
        gradients(xrt.trace(f, dtype), 0, ["x"])


def test_bad_names() -> None:
    """A name, a number or an option that is none says so."""
    graph = xrt.trace(lambda x, i: ops.Gather(x, i).sum(), "float32[3]", "int64[2]")
    for call, message in (
        (lambda: gradients(graph, 0, ["nothing"]), "has no value 'nothing'"),
        (lambda: gradients(graph, 3, ["x"]), "there is no 3"),
        (lambda: gradients(graph, "nowhere", ["x"]), "the loss: .* no value 'nowhere'"),
        (lambda: gradients(graph, 0, ["i"]), "no gradient by 'i': it is int64"),
        (lambda: gradients(graph, 0, ["x"], unused="skip"), "takes 'error' or 'zeros'"),
    ):
        with pytest.raises(GradientError, match=message):
            call()


def test_a_rule_of_ones_own(registry: None) -> None:
    """A rule that a plugin registers is used; a second one for the operator is refused, naming both."""

    @gradient("Det")
    def det(ctx: Any) -> Any:
        return ctx.grad.reshape(1, 1) * ctx.inputs[0]

    graph = xrt.trace(lambda x: ops.Det(x), "float32[2, 2]")
    x = np.array([[1, 2], [3, 4]], np.float32)
    np.testing.assert_array_equal(run(gradients(graph, 0, ["x"]), [x])[1], x)

    with pytest.raises(RegistrationError, match=r"gradient of ai.onnx.Det is registered twice: by .*det and by"):
        gradient("Det")(det)
    with pytest.raises(RegistrationError, match="twice"):
        no_gradient("Det", by="me")
    with pytest.raises(RegistrationError, match=r"composition of ai.onnx.LRN is registered twice"):
        composition("LRN")(det)


def test_a_rule_that_breaks_its_promise(registry: None) -> None:
    """A gradient of another dtype or shape is an error that tells the rule's author."""

    @gradient("Det")
    def det(ctx: Any) -> Any:
        return ctx.grad

    graph = xrt.trace(lambda x: ops.Det(x), "float32[2, 2]")
    with pytest.raises(GradientError, match=r"rule of Det gave float32\[\] for input 0 .* Rule author"):
        gradients(graph, 0, ["x"])


def test_a_composed_node_is_computed_once() -> None:
    """Where an operator is composed of others, these take its place and make its very outputs."""
    graph = xrt.trace(lambda x: ops.LpNormalization(x, axis=0).sum(), "float64[3, 2]")
    made = gradients(graph, 0, ["x"])

    assert "LpNormalization" in nodes_of(graph)
    assert "LpNormalization" not in nodes_of(made)
    x = np.random.default_rng(1).standard_normal((3, 2))
    np.testing.assert_allclose(run(made, [x])[0], run(graph, [x])[0], rtol=1e-12)


def test_old_group_normalization() -> None:
    """Version 18, which takes scale and bias by group, and which nothing traces any more."""
    x, s, b = (Value(n, TensorType(np.dtype(np.float64), t)) for n, t in (("x", (2, 4, 3)), ("s", (2,)), ("b", (2,))))
    y = Value("y", x.type)
    total = Value("total", TensorType(np.dtype(np.float64), ()))
    from xrt_core.ir.graph import Node

    weights = Value.constant(np.random.default_rng(3).uniform(0.5, 1.5, (2, 4, 3)), "r")
    weighed = Value("weighed", x.type)
    nodes = [
        Node("GroupNormalization", (x, s, b), (y,), {"num_groups": 2}, version=18),
        Node("Mul", (y, weights), (weighed,), version=14),
        Node("ReduceSum", (weighed,), (total,), {"keepdims": 0}, version=13),
    ]
    graph = Graph((x, s, b), (total,), nodes, opsets={"": 18})
    rng = np.random.default_rng(5)
    given = [rng.standard_normal(t) for t in ((2, 4, 3), (2,), (2,))]
    found = run(gradients(graph, 0, [x, s, b]), given)[1:]

    from tests.training.checks import differences

    for i, g in enumerate(found):
        np.testing.assert_allclose(g, differences(graph, given, i), rtol=1e-4, atol=1e-5)


def test_bfloat16() -> None:
    """Gradients of narrow floats are of their dtype, and near those of float32."""

    def f(x: Any, w: Any) -> Any:
        h = ops.Gelu(x @ w)
        normal = ops.LayerNormalization(h, np.ones(4, np.float32).astype(h.dtype), outputs=1)
        return ops.ReduceMean(normal * h, keepdims=0)

    rng = np.random.default_rng(2)
    given = [rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (3, 4))]
    import ml_dtypes

    narrow = [a.astype(ml_dtypes.bfloat16) for a in given]
    exact = run(gradients(xrt.trace(f, *given), 0, ["x", "w"]), given)[1:]
    found = run(gradients(xrt.trace(f, *narrow), 0, ["x", "w"]), narrow)[1:]

    for a, b in zip(found, exact, strict=True):
        assert a.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(a.astype(np.float32), b, atol=0.03)


def test_the_cost_is_linear() -> None:
    """Hundreds of layers make as many times more nodes, and no more."""

    def deep(count: int) -> int:
        def f(x: Any) -> Any:
            for _ in range(count):
                x = ops.Tanh(x) * x
            return x.sum()

        return len(gradients(xrt.trace(f, "float32[4]"), 0, ["x"]).nodes)

    one, two = deep(50), deep(100)
    assert two - one == pytest.approx(one, rel=0.1)
