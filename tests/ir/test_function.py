"""Functions: their signature, aliases, and the readable text of functions and graphs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.random_graphs import node
from xrt_core.errors import GraphError
from xrt_core.ir.function import Function, InputOutputAlias, Parameter, launch
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.types import TensorType

F32 = np.dtype(np.float32)


def relu(shape: tuple[int | str, ...] = (2, 3)) -> Graph:
    """y = Relu(x)."""
    x, y = Value("x", TensorType(F32, shape)), Value("y", TensorType(F32, shape))
    return Graph([x], [y], [node("Relu", [x], [y])], opsets={"": 18}, name="relu")


def test_the_signature_is_that_of_the_body() -> None:
    """Params and returns come from the body's inputs and outputs."""
    f = Function.from_graph(relu())

    assert f.name == "relu"
    assert f.params == (Parameter("x", F32, (2, 3)),)
    assert f.returns == (Parameter("y", F32, (2, 3)),)
    assert f.params[0].type == TensorType(F32, (2, 3))


def test_a_function_is_frozen() -> None:
    """Like everything in the IR."""
    with pytest.raises(GraphError, match="Function is frozen"):
        Function.from_graph(relu()).name = "other"  # type: ignore[misc]


def test_a_body_of_unknown_shape_is_refused() -> None:
    """Engines compile known shapes only; the message names the value and the cure."""
    with pytest.raises(GraphError, match=r"input 0 'x' has type float32\[\?, 3\].*specialise"):
        Function.from_graph(relu((None, 3)))


def test_a_symbolic_function_says_so() -> None:
    """Dimensions may be symbols; who asks for the sizes of such a parameter is told whom they are for."""
    f = Function.from_graph(relu(("N", 3)))
    assert f.is_symbolic
    assert not Function.from_graph(relu((2, 3))).is_symbolic
    assert f.params[0].dims == ("N", 3)
    with pytest.raises(GraphError, match="dynamic_dims"):
        _ = f.params[0].shape


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ([InputOutputAlias(1, 0)], "not there"),
        ([InputOutputAlias(0, 1)], "only tensors of one dtype and shape"),
        ([InputOutputAlias(0, 0), InputOutputAlias(0, 0)], "more than one alias"),
    ],
)
def test_bad_aliases_are_refused(aliases: list[InputOutputAlias], message: str) -> None:
    """An alias ties one return to one param of the same type."""
    x, z = Value("x", TensorType(F32, (2,))), Value("z", TensorType(F32, (3,)))
    y = Value("y", TensorType(F32, (2,)))
    body = Graph([x, z], [y], [node("Relu", [x], [y])], opsets={"": 18})
    with pytest.raises(GraphError, match=message):
        Function.from_graph(body, name="f", aliases=aliases)


def test_params_must_match_the_body() -> None:
    """As many params as inputs, as many returns as outputs."""
    with pytest.raises(GraphError, match="0 params and 0 returns for a body with 1 inputs and 1 outputs"):
        Function("f", [], [], relu())


def test_text_of_a_function() -> None:
    """The readable form shows inputs, outputs, aliases, constants and nodes."""
    x, y = Value("x", TensorType(F32, (2, 3))), Value("y", TensorType(F32, (2, 3)))
    h, w, b = (
        Value("h"),
        Value.constant(np.zeros((3, 3), np.float32), "w"),
        Value.constant(np.array([1, 2, 3.5]), "a b"),
    )
    nodes = [node("MatMul", [x, w], [h]), node("Clip", [h, None, b], [y])]
    f = Function.from_graph(Graph([x], [y], nodes, opsets={"": 18}), name="f", aliases=[InputOutputAlias(0, 0)])

    assert str(f) == "\n".join([
        "function f {",
        "  input {",
        "    %x: float32[2, 3]",
        "  }",
        "  output {",
        "    %y: float32[2, 3]",
        "  }",
        "  alias {",
        "    %y = %x",
        "  }",
        "  constant {",
        "    %w: float32[3, 3] = ...",
        '    %"a b": float64[3] = [1, 2, 3.5]',
        "  }",
        "  node {",
        "    %h = MatMul(%x, %w)",
        '    %y: float32[2, 3] = Clip(%h, _, %"a b")',
        "  }",
        "}",
    ])  # fmt: skip


def test_text_shows_subgraphs_attributes_and_unnamed_values() -> None:
    """Nested graphs are indented, unnamed values numbered, equal names told apart, attributes written out."""
    flag, x = Value("flag", TensorType(np.dtype(np.bool_), ())), Value("x", TensorType(F32, (2,)))
    inner, out, again = Value(), Value(), Value("x")
    then = Graph([], [inner], [node("Softmax", [x], [inner], axis=-1)], opsets={"": 18})
    other = Graph([], [x], [], opsets={"": 18})
    nodes = [
        node("If", [flag], [out], then_branch=then, else_branch=other),
        node("LeakyRelu", [out], [again], alpha=0.25),
    ]
    text = str(Graph([flag, x], [again], nodes, opsets={"": 18}, name="g"))

    assert text.startswith("graph g {")
    assert "then_branch = graph {" in text
    assert "Softmax(%x) {axis=-1}" in text
    assert "%x.2 = LeakyRelu(%" in text
    assert "{alpha=0.25}" in text


def test_text_of_a_launch_holds_its_function() -> None:
    """A partitioned graph prints its clusters."""
    f = Function.from_graph(relu())
    x, y = Value("in", TensorType(F32, (2, 3))), Value("out", TensorType(F32, (2, 3)))
    text = str(Graph([x], [y], [launch(f, "xla", [x], [y])], opsets={"": 18}))

    assert "%out: float32[2, 3] = xrt.Launch(%in) {engine='xla'} {" in text
    assert "function relu {" in text
