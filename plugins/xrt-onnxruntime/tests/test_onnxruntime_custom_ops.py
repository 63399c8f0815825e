"""Operators of ONNX Runtime's custom-operator libraries: onnxruntime-extensions, on the host and beside an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from xrt_onnxruntime import register_custom_ops

import xrt_core as xrt
from xrt_core.errors import ExecutionError, RegistrationError, UnsupportedError

extensions = pytest.importorskip("onnxruntime_extensions", reason="the library that is tried")
DOMAIN = "ai.onnx.contrib"
X = np.array([-1.0, 2.0, 3.0], np.float32)


@pytest.fixture
def library() -> Iterator[None]:
    """The library, known for the time of a test."""
    made = register_custom_ops(extensions.get_library_path(), DOMAIN)
    yield
    made.remove()


def model(nodes: list[Any], dtype: int = TensorProto.FLOAT) -> Any:
    """From x, of three elements, to y."""
    x = helper.make_tensor_value_info("x", dtype, [3])
    graph = helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)])


PARTS = [
    helper.make_node("Mul", ["x", "x"], ["s"]),
    helper.make_node("NegPos", ["x"], ["low", "high"], domain=DOMAIN, name="parts"),
    helper.make_node("Exp", ["high"], ["e"]),
    helper.make_node("Add", ["e", "s"], ["y"]),
]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("engine", ["host", "onnxruntime"])
def test_between_nodes_of_an_engine(engine: str) -> None:
    """The library computes its node, the engine what lies around it."""
    with xrt.XRTModule(model(PARTS), engine=engine, prune=False, guard=False) as m:
        np.testing.assert_allclose(m(X), np.exp(np.maximum(X, 0)) + X * X, rtol=1e-6)


@pytest.mark.usefixtures("library")
def test_strings() -> None:
    """They go in and come out."""
    m = xrt.XRTModule(
        model([helper.make_node("StringUpper", ["x"], ["y"], domain=DOMAIN)], TensorProto.STRING), engine="host"
    )
    assert m(np.array(["ab", "c", ""], object)).tolist() == ["AB", "C", ""]


@pytest.mark.usefixtures("library")
def test_an_operator_that_the_library_has_not() -> None:
    """The node's error says what the library says."""
    m = xrt.XRTModule(model([helper.make_node("Unheard", ["x"], ["y"], domain=DOMAIN, name="it")]), engine="host")
    with pytest.raises(ExecutionError, match="node 'it': ai.onnx.contrib.Unheard"):
        m(X)


def test_without_the_library() -> None:
    """The model loads; running it says that nobody defines the operator. A file that is no library is refused."""
    with pytest.raises(UnsupportedError, match="NegPos is of the unknown domain 'ai.onnx.contrib'"):
        xrt.XRTModule(model(PARTS), engine="host")(X)
    with pytest.raises(RegistrationError, match="custom operators of '/nowhere.so'"):
        register_custom_ops("/nowhere.so", DOMAIN)
