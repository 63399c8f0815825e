"""Long lists of attributes are read from the file by whole arrays, and written from there, as protobuf would."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frontends.onnx_models import ATTR, N, info, model
from tests.profiles import examples
from xrt_core.engine.onnx_bridge import onnx_model
from xrt_core.errors import ModelLoadError
from xrt_core.frontends import onnx_wire
from xrt_core.frontends.onnx_import import import_model
from xrt_core.frontends.onnx_lists import packed, read_list
from xrt_core.frontends.onnx_wire import Weights
from xrt_core.ir.function import Function, Parameter, graph_fingerprint
from xrt_core.ir.long_list import LONG, LongList
from xrt_core.ir.verifier import verify

WORDS = ["BRANCH_LEQ", "LEAF", "", "Änderung"]
RNG = np.random.default_rng(0)
LISTS: dict[str, list[Any]] = {
    "one byte": RNG.integers(0, 128, 9000).tolist(),
    "two bytes": RNG.integers(128, 1 << 14, 60_000).tolist(),
    "one or two": RNG.integers(0, 300, 90_000).tolist(),
    "counts": [i % 5000 for i in range(70_000)],
    "all lengths": [int(1 << k) - d for k in range(63) for d in (0, 1)] * 50,
    "negative": RNG.integers(-(1 << 40), 1 << 40, 9000).tolist(),
    "floats": RNG.standard_normal(9000).astype(np.float32).tolist(),
    "words": [WORDS[i] for i in RNG.integers(0, 4, 9000)],
    "words with the tag": [["J", "JJ", "LEAF"][i] for i in RNG.integers(0, 3, 9000)],
    "many words": [f"w{i}" for i in range(3000)],
    "long words": ["x" * 200, "y"] * 1000,
    "short": [1] * (LONG - 1),
}


def proto(**attributes: Any) -> onnx.ModelProto:
    """A model of one node of an operator that takes any attributes."""
    return model([N("Any", ["x"], ["y"], domain="com.acme", **attributes)], domains=("com.acme",))


def attribute(m: Any, name: str = "a") -> Any:
    (node,) = import_model(m).nodes
    return node.attributes[name]


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
def test_the_file_and_the_protobuf_give_the_same(values: list[Any]) -> None:
    """Elements and fingerprint, whichever way the list was read."""
    p = proto(a=values, b=[1, 2], c="text")
    raw = p.SerializeToString()
    found = attribute(raw)
    assert tuple(found) == tuple(values)
    assert found == attribute(p)
    assert attribute(raw, "b") == (1, 2)
    assert attribute(raw, "c") == "text"
    assert graph_fingerprint(import_model(raw)) == graph_fingerprint(import_model(p))
    verify(import_model(raw), "captured")


@pytest.mark.parametrize(
    "name", ["one byte", "two bytes", "one or two", "counts", "all lengths", "negative", "floats", "words"]
)
def test_protobuf_gets_no_long_list(name: str) -> None:
    """What is left for it is small."""
    raw = proto(a=LISTS[name]).SerializeToString()
    weights = Weights(memoryview(raw))
    assert len(weights.strip()) < 300
    assert weights.count == 1
    found = attribute(raw)
    assert isinstance(found, LongList)


def test_the_lists_of_a_large_node_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """By threads, with what is left to protobuf between them; each place in the file once."""
    many = {f"a{i}": v for i, v in enumerate(LISTS.values())}
    p = proto(**many, z="text")
    raw = p.SerializeToString()
    seen = []

    def reading(number: int, view: memoryview) -> Any:
        seen.append(view.nbytes)
        return read_list(number, view)

    monkeypatch.setattr(onnx_wire, "read_list", reading)
    monkeypatch.setattr(onnx_wire, "_MANY", 1 << 10)
    (node,) = import_model(raw).nodes
    assert len(seen) == len(set(seen)) == len(LISTS)
    for name, values in many.items():
        assert tuple(node.attributes[name]) == tuple(values)


@examples(60)
@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 9)
)
def test_integers_of_any_length(few: list[int], tail: int) -> None:
    """Against protobuf, at every place where a part that is read at a time may end."""
    values = few * (LONG // len(few) + 1) + few[:tail]
    found = attribute(proto(a=values).SerializeToString())
    assert isinstance(found, LongList)
    assert tuple(found) == tuple(values)


def test_lists_in_pieces_and_of_another_kind_are_left_to_protobuf() -> None:
    """Fields of a message may come in any order, and a later piece belongs to the same list."""
    a = ATTR("a", [5] * 2000)
    pieces = a.SerializeToString() + onnx.AttributeProto(ints=[7]).SerializeToString()

    def of(content: bytes) -> Any:
        p = proto(b=1)
        raw = p.graph.node[0].SerializeToString() + b"\x2a" + _varint(len(content)) + content
        p.graph.node[0].ParseFromString(raw)
        whole = p.SerializeToString(deterministic=True)
        return attribute(whole)

    assert tuple(of(pieces)) == (*[5] * 2000, 7)
    # the bytes as they are, not in protobuf's own order
    node = N("Any", ["x"], ["y"], domain="com.acme").SerializeToString() + b"\x2a" + _varint(len(pieces)) + pieces
    graph = b"\x0a" + _varint(len(node)) + node + model([], ["x"], ["y"]).graph.SerializeToString()
    rest = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("com.acme", 1)]).SerializeToString()
    raw = rest + b"\x3a" + _varint(len(graph)) + graph
    assert tuple(attribute(raw)) == (*[5] * 2000, 7)
    packed = b"\x0a\x01a\x42" + _varint(4000) + b"\x85\x01" * 2000 + b"\xa0\x01\x07"
    node = N("Any", ["x"], ["y"], domain="com.acme").SerializeToString() + b"\x2a" + _varint(len(packed)) + packed
    graph = b"\x0a" + _varint(len(node)) + node + model([], ["x"], ["y"]).graph.SerializeToString()
    assert tuple(attribute(rest + b"\x3a" + _varint(len(graph)) + graph)) == (133,) * 2000


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_an_integer_of_eleven_bytes_is_no_integer() -> None:
    """The run ends before it, and protobuf refuses the rest."""
    found = read_list(8, memoryview(b"\x40\x05" * LONG + b"\x40" + b"\x80" * 10 + b"\x01"))
    assert found is not None
    values, size = found
    assert len(values) == LONG
    assert size == 2 * LONG


@examples(60)
@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300), min_size=1, max_size=40), st.booleans()
)
def test_packed_lists(few: list[int], whole: bool) -> None:
    """A field that holds the whole list, each integer in as many bytes as it needs or all in as many as the longest."""
    values = [v if whole else abs(v) >> 1 for v in few] * (LONG // len(few) + 1)
    minimal = b"".join(_varint(v & ((1 << 64) - 1)) for v in values)
    longest = b"".join(packed(LongList("ints", np.array(values))) or ())
    for content in (b"\x42" + _varint(len(minimal)) + minimal, longest):
        assert content is not None
        found = read_list(8, memoryview(bytes(content) + b"\xa0\x01\x07"))
        assert found is not None
        assert tuple(found[0]) == tuple(values)
        assert found[1] == len(content)
        assert tuple(onnx.AttributeProto.FromString(bytes(content)).ints) == tuple(values)
        assert read_list(8, memoryview(bytes(content)[:-1])) is None


@examples(100)
@given(st.data())
def test_damaged_lists_load_or_are_refused(data: st.DataObject) -> None:
    """Cut or overwritten anywhere, they are a model or a ModelLoadError; and what loads is what protobuf reads."""
    whole = proto(a=LISTS["one or two"][:2000], b=LISTS["words"][:1500], c=LISTS["floats"][:1200])
    raw = bytearray(whole.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ModelLoadError):
        graph = import_model(bytes(raw))
        verify(graph, "captured")
        parsed = onnx.ModelProto.FromString(bytes(raw))
        assert graph_fingerprint(graph) == graph_fingerprint(import_model(parsed))


@pytest.mark.parametrize("where", ["main", "body"])
def test_written_models_hold_what_was_read(where: str) -> None:
    """The bytes for a library: packed, texts as they lie in the file; in bodies too."""
    names = ("one byte", "two bytes", "one or two", "all lengths", "negative", "floats", "words", "many words", "short")
    node = N("Any", ["x"], ["h"], domain="com.acme", **{f"a{i}": LISTS[n] for i, n in enumerate(names)})
    if where == "body":
        body = onnx.helper.make_graph([node], "body", [], [info("h")])
        node = N("If", ["c"], ["h"], then_branch=body, else_branch=body)
    inputs = [info("x"), info("c", (), onnx.TensorProto.BOOL)] if where == "body" else ["x"]
    p = model([node, N("Relu", ["h"], ["y"])], inputs, domains=("com.acme",))
    graph = import_model(p.SerializeToString())
    params = [Parameter(v.name, v.dtype, v.shape) for v in graph.inputs]  # type: ignore[arg-type]
    function = Function("f", params, [Parameter("y", np.dtype(np.float32), (2, 3))], graph)
    beside = onnx_model(function, engine="test", lists_beside=True)
    whole = onnx_model(function, engine="test")
    assert len(beside.model.SerializeToString()) < len(whole.model.SerializeToString()) / 2
    assert onnx.load_from_string(beside.to_bytes()) == whole.model
    weights = Weights(memoryview(beside.to_bytes()))
    assert len(weights.strip()) < len(whole.model.SerializeToString()) / 2  # what is packed is read by arrays as well
    assert graph_fingerprint(import_model(beside.to_bytes())) == graph_fingerprint(import_model(whole.model))
    assert whole.to_bytes() == whole.model.SerializeToString()
