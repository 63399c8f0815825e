"""Schemas: the standard's, looked up by opset, and the dialect's own."""

from __future__ import annotations

import numpy as np
import pytest

from xrt_core.errors import GraphError, RegistrationError
from xrt_core.ir import schema
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType


def test_the_version_follows_the_opset() -> None:
    """Softmax changed in opsets 11 and 13; in between the older holds."""
    assert [schema.since_version("Softmax", "", o) for o in (7, 11, 12, 13, 20)] == [1, 11, 11, 13, 13]


def test_a_schema_tells_arity_and_attributes() -> None:
    """What the importer and the verifier ask for stands in the schema."""
    s = schema.schema_for("Clip", "ai.onnx", 13)

    assert (s.min_inputs, s.max_inputs, s.min_outputs, s.max_outputs) == (1, 3, 1, 1)
    assert schema.schema_for("Cast", "", 13).required_attributes == ("to",)
    assert schema.schema_for("Softmax", "", 13).attributes["axis"].kind == "int"
    assert s.onnx.name == "Clip"


def test_lookups_are_cached() -> None:
    """Every opset of one version shares one schema object."""
    assert schema.find_schema("Relu", "", 14) is schema.find_schema("Relu", "", 18)


@pytest.mark.parametrize(
    ("op", "domain", "opset", "message"),
    [
        ("Relo", "", 18, "no operator Relo .*did you mean Relu"),
        ("Gelu", "", 12, "Gelu came with opset 20, but opset 12"),
        ("Relu", "com.example", 1, "unknown domain 'com.example'"),
        ("Nothing", "xrt", 1, "dialect 'xrt' has no operator Nothing; it has .*Launch"),
    ],
)
def test_an_unknown_operator_says_what_is_near(op: str, domain: str, opset: int, message: str) -> None:
    """The error says whether domain, operator or opset is wrong."""
    with pytest.raises(GraphError, match=message):
        schema.schema_for(op, domain, opset)
    assert schema.find_schema(op, domain, opset) is None


def test_latest_opset_knows_its_domains() -> None:
    """The newest opset of a domain; an unknown domain is an error."""
    assert schema.latest_opset() >= 23
    assert schema.latest_opset("xrt") == 1
    with pytest.raises(GraphError, match=r"unknown operator domain 'nowhere'"):
        schema.latest_opset("nowhere")


def test_the_dialect_refuses_strangers_and_doubles() -> None:
    """Only `xrt` operators, each once."""
    with pytest.raises(RegistrationError, match="only operators of domain 'xrt'"):
        schema.register_schema(schema.Schema("other", "Op", 1, 0, 1, 0, 1))
    with pytest.raises(RegistrationError, match=r"xrt\.Launch is registered twice"):
        schema.register_schema(schema.Schema("xrt", "Launch", 1, 0, 1, 0, 1))


def test_dialect_operators_infer_their_types() -> None:
    """A conversion between engines keeps its input's type; standard operators bring nothing of their own."""
    x = Value("x", TensorType(np.dtype(np.float32), (2,)))
    n = Node("EngineInputConvert", [x], [Value()], {"source": "host", "target": "xla"}, domain="xrt", version=1)
    infer = schema.dialect_inference(n)

    assert infer is not None
    assert infer(n) == (x.type,)
    assert schema.dialect_inference(Node("Relu", [x], [Value()], version=14)) is None


def test_a_version_holds_for_a_range_of_opsets() -> None:
    """From the opset it came with to the one before the next change, or the newest."""
    assert schema.opset_range("Softmax", "", 11) == (11, 12)
    assert schema.opset_range("Softmax", "ai.onnx", 13) == (13, schema.latest_opset())
    assert schema.opset_range("Launch", "xrt", 1) == (1, 1)
    with pytest.raises(GraphError, match="Softmax has no version 12"):
        schema.opset_range("Softmax", "", 12)
