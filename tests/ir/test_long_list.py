"""LongList: a long list of an attribute in an array, which is like the tuple of its elements."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value, attribute_key
from xrt_core.ir.long_list import LONG, MOST_TEXTS, LongList
from xrt_core.ir.onnx_proto import attribute_from_proto, attribute_to_proto
from xrt_core.ir.text import function_text
from xrt_core.ir.types import TensorType

LISTS: dict[str, tuple[Any, ...]] = {
    "tiny": (*range(-128, 128),) * 5,
    "small": tuple(range(-5, LONG)),
    "wide": (*range(LONG), 1 << 40, -(1 << 62)),
    "floats": tuple(float(np.float32(i / 7)) for i in range(LONG)),
    "infinite": (*(float(i) for i in range(LONG)), float("inf"), float("-inf")),
    "texts": ("LEAF", "BRANCH_LEQ", "", "Ä") * LONG,
    "bytes": ("LEAF", b"\xff\xfe") * LONG,
}


def listed(values: tuple[Any, ...]) -> LongList:
    found = LongList.of(values)
    assert found is not None
    return found


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
def test_it_is_like_the_tuple(values: tuple[Any, ...]) -> None:
    """Length, elements, slices, equality and hash; pickling keeps them."""
    found = listed(values)
    assert len(found) == len(values)
    assert tuple(found) == values
    assert found == values
    assert hash(found) == hash(values)
    assert found[3] == values[3]
    assert type(found[3]) is type(values[3])
    assert found[-2:] == values[-2:]
    assert values[1] in found
    assert found == listed(values)
    assert found != values[1:]
    assert found != listed(values[1:])
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found
    assert copied.kind == found.kind


def test_arrays_are_compact_and_read_only() -> None:
    """Integers take as few bytes as they fit into, texts one; nobody can change them."""
    assert listed(LISTS["tiny"]).array.dtype == np.int8
    assert listed(LISTS["small"]).array.dtype == np.int16
    assert listed(LISTS["wide"]).array.dtype == np.int64
    assert listed(LISTS["floats"]).array.dtype == np.float32
    assert listed(LISTS["texts"]).array.dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        listed(LISTS["small"]).array[0] = 1


def test_numpy_reads_it_as_what_onnx_has() -> None:
    """Integers of 64 bits, floats of 32, or what is asked for; texts as texts."""
    assert np.asarray(listed(LISTS["small"])).dtype == np.int64
    assert np.asarray(listed(LISTS["floats"])).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(listed(LISTS["wide"]), np.int64), LISTS["wide"])
    np.testing.assert_array_equal(np.array(listed(LISTS["texts"]), object), np.array(LISTS["texts"], object))


@pytest.mark.parametrize(
    "values", [(1, 2.0), (1 << 70,), (1e300, 0.0), (True,), (), tuple(map(str, range(MOST_TEXTS + 1)))], ids=str
)
def test_what_is_no_long_list(values: tuple[Any, ...]) -> None:
    """Mixed kinds, integers of more than 64 bits, nothing, and too many texts."""
    assert LongList.of(values) is None


def test_texts_are_numbered_in_the_order_in_which_they_come() -> None:
    """So that equal lists have equal arrays, whoever made them; texts that do not come are left out."""
    found = LongList("strings", np.array([2, 2, 0]), ("a", "b", "c"))
    assert found.texts == ("c", "a")
    assert tuple(found) == ("c", "c", "a")
    assert found == listed(("c", "c", "a"))


def ensemble(**attributes: Any) -> Node:
    x, y = Value("x", TensorType(np.dtype(np.float32), (2, 1))), Value("y", TensorType(np.dtype(np.float32), (2, 1)))
    return Node("Something", [x], [y], attributes, domain="com.acme", version=1, name="node")


def function_of(node: Node) -> Function:
    return Function.from_graph(Graph(node.inputs, node.outputs, [node], opsets={"com.acme": 1}, name="f"))  # type: ignore[arg-type]


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
def test_the_fingerprint_is_of_the_content(values: tuple[Any, ...]) -> None:
    """A tuple and a LongList of the same elements have one fingerprint, other elements another."""
    one, other = function_of(ensemble(a=values)), function_of(ensemble(a=listed(values)))
    assert one.fingerprint == other.fingerprint
    assert function_of(ensemble(a=listed((*values[1:], values[0])))).fingerprint != one.fingerprint


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
def test_protobufs_hold_it(values: tuple[Any, ...]) -> None:
    """What is written is read back as a LongList again."""

    def nothing(_: Any) -> Any:
        raise AssertionError

    proto = attribute_to_proto("a", listed(values))
    assert proto == attribute_to_proto("a", values)
    back = attribute_from_proto(proto, nothing, "here")
    assert isinstance(back, LongList)
    assert back == values


def test_texts_and_keys_show_few_elements() -> None:
    """The printed form has the first ones; a key of more elements than its limit there is none."""
    node = ensemble(a=listed(LISTS["small"]))
    assert "a=[-5, -4, " in function_text(function_of(node))
    assert "..." in function_text(function_of(node))
    assert attribute_key(node, limit=LONG) is None
    assert attribute_key(node, limit=2 * LONG) == attribute_key(ensemble(a=listed(LISTS["small"])), limit=2 * LONG)
    assert attribute_key(node, limit=2 * LONG) != attribute_key(ensemble(a=listed(LISTS["wide"])), limit=2 * LONG)
