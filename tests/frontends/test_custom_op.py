"""`xrt.custom_op`: operators that a program defines for itself, in models, graphs, engines and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import xrt_core as xrt
from xrt_core.errors import (
    ExecutionError,
    ModelLoadError,
    RegistrationError,
    ShapeError,
    TraceError,
    UnsupportedError,
)
from xrt_core.frontends.custom_op import CustomOp
from xrt_core.ir.schema import find_schema, schema_of_onnx
from xrt_core.training import TrainModule, gradients

X = np.array([-2.0, -0.5, 1.0, 3.0], np.float32)


@pytest.fixture
def defined() -> Iterator[list[CustomOp]]:
    """Operators that are taken out after the test."""
    made: list[CustomOp] = []
    yield made
    for op in made:
        op.remove()


@pytest.fixture
def swish(defined: list[CustomOp]) -> CustomOp:
    """The operator of the documentation."""

    @xrt.custom_op("com.acme::Swish")
    def swish(x: Any, *, beta: float = 1.0) -> Any:
        """x * sigmoid(beta x)."""
        return x * xrt.ops.Sigmoid(x * beta)

    defined.append(swish)
    return swish


def model(op_type: str = "Swish", inputs: int = 1, outputs: int = 1, version: int = 1, **attributes: Any) -> Any:
    """A model of one node of the domain com.acme on float32 vectors, and a Neg of each result."""
    given = [f"x{i}" for i in range(inputs)]
    made = [f"y{i}" for i in range(outputs)]
    nodes = [helper.make_node(op_type, given, made, name="it", domain="com.acme", **attributes)]
    nodes += [helper.make_node("Neg", [y], [f"{y}n"]) for y in made]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, ["n"]) for x in given],
        [helper.make_value_info(f"{y}n", onnx.TypeProto()) for y in made],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.acme", version)]
    return helper.make_model(graph, opset_imports=opsets)


def by_hand(x: np.ndarray, beta: float = 1.0) -> np.ndarray:
    wide = x.astype(np.float64)
    return -wide / (1 + np.exp(-beta * wide))


@pytest.mark.parametrize("engine", ["host", "xla", "onnxruntime"])
def test_a_model(swish: CustomOp, engine: str) -> None:
    """It is lowered, so the host and every engine run it; attributes of the node reach the function."""
    if engine != "host":
        pytest.importorskip(f"xrt_{engine}", reason="a plugin of the project")
    with xrt.XRTModule(model(beta=2.0), engine=engine, guard=False) as m:
        np.testing.assert_allclose(m(X), by_hand(X, 2.0), rtol=1e-5)
        assert "Swish" not in {n.op_type for n in m.partitioned({"x0": X}).nodes}
        assert m.explain().node_share == (engine != "host")
    np.testing.assert_allclose(xrt.XRTModule(model(), engine="host")(X), by_hand(X), rtol=1e-6)


def test_a_traced_graph(swish: CustomOp) -> None:
    """Called there it adds the node, with its type; its gradient goes through the lowering."""
    graph = xrt.trace(lambda x: swish(x, beta=2.0).sum(), "float32[4]")
    assert [n.operator for n in graph.nodes] == ["com.acme.Swish", "ReduceSum"]
    assert str(graph.nodes[0].outputs[0].type) == "float32[4]"
    _, slopes = xrt.XRTModule(gradients(graph, 0, ["x"]), engine="host")(X)
    s = 1 / (1 + np.exp(-2.0 * X.astype(np.float64)))
    np.testing.assert_allclose(slopes, s + 2 * X * s * (1 - s), rtol=1e-5)
    assert "sigmoid(beta x)" in (swish.__doc__ or "")
    with pytest.raises(TraceError, match="has no attribute 'alpha'; it has beta"):
        xrt.trace(lambda x: swish(x, alpha=2.0), "float32[4]")
    with pytest.raises(TraceError, match="takes 1 to 1 inputs, 2 are given"):
        xrt.trace(lambda x: swish(x, x), "float32[4]")


def test_every_form_of_parameter(defined: list[CustomOp]) -> None:
    """Inputs that may be left out, any number of them, several outputs, attributes of every kind."""

    @xrt.custom_op("com.acme::Parts", outputs=2)
    def parts(
        x: Any, y: Any = None, *, by: list[float], mode: str = "add", twice: bool = False, most: int | None = None
    ) -> Any:
        y = x if y is None else y
        total = x + y if mode == "add" else x - y
        total = total * np.float32(sum(by)) * np.float32(2 if twice else 1)
        return total, x if most is None else xrt.ops.Min(x, np.float32(most))

    @xrt.custom_op("com.acme::Longest")
    def longest(*xs: Any) -> Any:
        return xrt.ops.Max(*xs)

    defined += [parts, longest]
    first, second = xrt.XRTModule(model("Parts", 1, 2, by=[1.0, 2.0], most=1), engine="host")(X)
    np.testing.assert_array_equal(first, -(X + X) * 3)
    np.testing.assert_array_equal(second, -np.minimum(X, 1))
    only = xrt.XRTModule(model("Parts", 2, 1, by=[1.0], mode="sub", twice=1), engine="host")
    np.testing.assert_array_equal(only(X, X + 1), np.full(4, 2, np.float32))
    np.testing.assert_array_equal(xrt.XRTModule(model("Longest", 3), engine="host")(X, -X, X), -np.abs(X))
    with pytest.raises(ModelLoadError, match="'by' is missing|required attribute 'by'|attribute 'by'"):
        xrt.import_model(model("Parts"))


def test_a_kernel(defined: list[CustomOp]) -> None:
    """With `types` the function computes; engines leave it to the host, and what it gives is held against its types."""
    pytest.importorskip("xrt_xla", reason="a plugin of the project")

    @xrt.custom_op("com.acme::Ranks", types=lambda x, reverse: xrt.TensorType(np.dtype(np.int64), x.shape))
    def ranks(x: np.ndarray, *, reverse: bool = False) -> Any:
        order = np.argsort(np.argsort(-x if reverse else x))
        return order if x[0] < 5 else order.astype(np.int32)

    defined.append(ranks)
    with xrt.XRTModule(model("Ranks", reverse=1), engine="xla", guard=False, prune=False) as m:
        np.testing.assert_array_equal(m(X), [-3, -2, -1, 0])
        assert "com.acme.Ranks (it): xla: its kernel is a Python function" in str(m.explain())
        with pytest.raises(ExecutionError, match=r"result 0 of com.acme.Ranks is int32\[4\], its types say int64\[4\]"):
            m(X + 9)


def test_a_lowering_that_knows_a_value(defined: list[CustomOp]) -> None:
    """An input in `static` comes as an array, constant or not."""

    @xrt.custom_op("com.acme::Stacked", static=[1])
    def stacked(x: Any, count: Any) -> Any:
        return xrt.ops.Concat(*[x] * int(count[0]), axis=0)

    defined.append(stacked)
    found = xrt.XRTModule(model("Stacked", 2), engine="host")(X, np.array([2], np.float32))
    np.testing.assert_array_equal(found, -np.concatenate([X, X]))


def test_a_function_of_onnx(defined: list[CustomOp]) -> None:
    """A FunctionProto is a lowering; its attributes are the operator's."""
    nodes = [helper.make_node("LeakyRelu", ["x"], ["y"])]
    nodes[0].attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    imports = [helper.make_opsetid("", 20)]
    body = helper.make_function("anything", "Body", ["x"], ["y"], nodes, imports, ["slope"])
    defined.append(xrt.custom_op("com.acme::Bent")(body))
    np.testing.assert_array_equal(
        xrt.XRTModule(model("Bent", slope=0.5), engine="host")(X), -np.where(X > 0, X, X * 0.5)
    )


def test_a_new_definition(swish: CustomOp, defined: list[CustomOp]) -> None:
    """It takes the old one's place for modules that are made afterwards; another version stands beside it."""
    before = xrt.XRTModule(model(), engine="host")
    np.testing.assert_allclose(before(X), by_hand(X), rtol=1e-6)
    defined.append(xrt.custom_op("com.acme::Swish")(lambda x: xrt.ops.Cast(x, to=np.float64) * 2.0))
    np.testing.assert_array_equal(xrt.XRTModule(model(), engine="host")(X), X.astype(np.float64) * -2)
    defined.append(xrt.custom_op("com.acme::Swish", version=3)(lambda x: x * 3.0))
    assert [n.version for v in (1, 2, 3) for n in xrt.import_model(model(version=v)).nodes if n.domain] == [1, 1, 3]
    np.testing.assert_array_equal(xrt.XRTModule(model(version=3), engine="host")(X), X * -3)
    np.testing.assert_allclose(before(X), by_hand(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "function", "options", "message"),
    [
        ("Swish", lambda x: x, {}, "expected a name such as 'acme::MyOp'"),
        ("com.acme::Swish", lambda x: x, {"version": 0}, "version=0"),
        ("ai.onnx.ml::Swish", lambda x: x, {}, "the domain 'ai.onnx.ml' belongs to ONNX"),
        ("com.acme::Swish", lambda x, beta=1.0: x, {}, "input 'beta' has the default 1.0"),
        ("com.acme::Swish", lambda x, *, beta: x, {}, "of what kind is the attribute 'beta'"),
        ("com.acme::Swish", lambda x, **kw: x, {}, "names no attribute"),
        ("com.acme::Swish", 3, {}, "3 is no function, and no onnx.FunctionProto"),
        ("com.acme::Swish", lambda x: x, {"gradient": 3}, "the gradient of Swish is 3"),
    ],
)
def test_a_definition_that_is_wrong(name: str, function: Any, options: dict[str, Any], message: str) -> None:
    """It is refused, and nothing is defined."""
    with pytest.raises(RegistrationError, match=message):
        xrt.custom_op(name, **options)(function)
    assert find_schema("Swish", "com.acme", 1) is None


def test_inputs_that_do_not_fit(defined: list[CustomOp]) -> None:
    """What a lowering raises names the node; types that fail are an error where the operator is called."""

    @xrt.custom_op("com.acme::Last", types=lambda x: x.shape[3])
    def last(x: np.ndarray) -> np.ndarray:
        return x

    @xrt.custom_op("com.acme::Square")
    def square(x: Any) -> Any:
        return x @ x.reshape((7, 3))

    defined += [last, square]
    with pytest.raises(ShapeError, match=r"node 'it' \(com.acme.Square of float32\[4\]\): .*Reshape: float32\[4\]"):
        xrt.XRTModule(model("Square"), engine="host")(X)
    with pytest.raises(ShapeError, match="com.acme.Last.: its types: tuple index out of range"):
        xrt.trace(lambda x: last(x), "float32[4]")


# --- operators that nobody defines ---


def test_an_operator_that_nobody_defines() -> None:
    """The model loads and is written again; the error comes where the node would have to run, and says what to do."""
    unknown = model("Unheard", depth=3, mode="fast")
    np.testing.assert_array_equal(xrt.XRTModule(dead(unknown), engine="host")(X), np.maximum(X, 0))
    with pytest.raises(UnsupportedError, match=r"node 'it'.*domain 'com.acme'.*xrt.custom_op\('com.acme::Unheard'\)"):
        xrt.XRTModule(unknown, engine="host")(X)
    with pytest.raises(UnsupportedError, match=r"com.microsoft.*xrt.custom_op\('com.microsoft::Unheard'\)"):
        xrt.XRTModule(moved(unknown, "com.microsoft"), engine="host")(X)
    again = xrt.import_model(exported(xrt.import_model(unknown)))
    assert dict(again.nodes[0].attributes) == {"depth": 3, "mode": "fast"}


def test_at_once() -> None:
    """`strict=True` names every one of them when the module is made."""
    with pytest.raises(ModelLoadError, match=r"node 'it': operator Unheard is of the unknown domain 'com.acme'"):
        xrt.XRTModule(dead(model("Unheard")), engine="host", strict=True)
    with pytest.raises(ModelLoadError, match=r"node 'it': operator Unheard is of the unknown domain 'com.acme'"):
        TrainModule(dead(model("Unheard")), engine="host", strict=True)


def dead(m: Any) -> Any:
    """The model with a Relu of its input in the place of its outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(m)
    copy.graph.node.append(helper.make_node("Relu", ["x0"], ["r"]))
    del copy.graph.output[:]
    copy.graph.output.append(helper.make_value_info("r", onnx.TypeProto()))
    return copy


def moved(m: Any, domain: str) -> Any:
    """The model with its node in another domain, whose operator is unheard of there as well."""
    copy = onnx.ModelProto()
    copy.CopyFrom(m)
    copy.graph.node[0].domain = copy.opset_import[1].domain = domain
    return copy


def exported(graph: Any) -> Any:
    from xrt_core.frontends.onnx_export import export_model

    return export_model(graph)


def test_a_schema_of_onnx() -> None:
    """What an OpSchema says of counts and attributes is the Schema's."""
    made = schema_of_onnx(onnx.defs.get_schema("LeakyRelu", 16))
    assert (made.op_type, made.since_version, made.min_inputs, made.max_outputs) == ("LeakyRelu", 16, 1, 1)
    assert {k: a.kind for k, a in made.attributes.items()} == {"alpha": "float"}
