"""Identity nodes: every case of the pass's docstring, and what it must leave alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.random_graphs import BOOL, F32, I64, graph_of, ints, node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.simplify import IdentityNodes


def single(
    op: str, shape: tuple[Any, ...] = (2, 3), *more: Value | None, out: Any = None, dtype: Any = F32, **a: Any
) -> Graph:
    """x -> op -> Relu; the output of `op` has the type of x, or shape `out`."""
    x = Value("x", TensorType(dtype, shape))
    y = Value("y", TensorType(dtype, shape if out is None else out))
    z = Value("z", y.type)
    return graph_of([x], [z], [node(op, [x, *more], [y], **a), node("Relu", [y], [z])])


def is_removed(graph: Graph) -> bool:
    result = IdentityNodes()(graph)
    assert IdentityNodes()(result) is result
    if len(result.nodes) < len(graph.nodes):
        assert result.nodes[0].inputs[0] is graph.inputs[0]
        return True
    assert result is graph
    return False


def test_identity_goes_whatever_its_type() -> None:
    """Case 1, also where nothing is known."""
    x, y, z = Value("x"), Value("y"), Value("z")
    g = graph_of([x], [z], [node("Identity", [x], [y]), node("Relu", [y], [z])])
    assert is_removed(g)


def test_chains_and_graph_outputs_are_rewired() -> None:
    """Three identities in a row that end in an output leave the input as the output."""
    v = [Value(f"v{i}") for i in range(4)]
    g = graph_of([v[0]], [v[3], v[1]], [node("Identity", [a], [b]) for a, b in pairwise(v)])
    result = IdentityNodes()(g)
    assert (result.nodes, result.outputs) == ((), (v[0], v[0]))


def test_a_cast_to_the_same_dtype_goes() -> None:
    """Case 2, the shape need not be known."""
    assert is_removed(single("Cast", ("n", 3), to=1))
    x, like = Value("x", TensorType(F32, ("n",))), Value("like", TensorType(F32, (1,)))
    y, z = Value("y", TensorType(F32, ("n",))), Value("z")
    g = graph_of([x, like], [z], [node("CastLike", [x, like], [y]), node("Relu", [y], [z])])
    assert is_removed(g)


def test_a_cast_to_another_dtype_or_of_unknown_type_stays() -> None:
    """Also one of strings, whose dtype says little."""
    x, y = Value("x", TensorType(F32, (2,))), Value("y", TensorType(I64, (2,)))
    assert not is_removed(graph_of([x], [y], [node("Cast", [x], [y], to=7)]))
    x, y = Value("x"), Value("y", TensorType(F32, (2,)))
    assert not is_removed(graph_of([x], [y], [node("Cast", [x], [y], to=1)]))
    assert not is_removed(single("Cast", (2,), dtype=np.dtype(object), to=8))


SAME = [
    ("Reshape", [ints(2, 3)]), ("Flatten", []), ("Squeeze", []), ("Unsqueeze", [ints(0)]), ("Expand", [ints(1, 3)]),
    ("Tile", [ints(1, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "more"), SAME, ids=[op for op, _ in SAME])
def test_movement_to_the_same_shape_goes(op: str, more: list[Value]) -> None:
    """Case 3; to another shape, or of a shape that is not known, it stays."""
    assert is_removed(single(op, (2, 3), *more))
    assert not is_removed(single(op, (2, 3), *more, out=(6,)))
    assert not is_removed(single(op, ("n", 3), *more))


@pytest.mark.parametrize(
    ("shape", "perm", "gone"),
    [
        ((2, 3), (0, 1), True),
        ((3, 3), (1, 0), False),
        ((1, 3, 1), (2, 1, 0), True),
        ((2, 1, 2), (2, 1, 0), False),
        ((), (), True),
        ((4,), None, True),
        ((3, 3), None, False),
    ],
)
def test_a_transpose_that_moves_no_elements_goes(shape: tuple[int, ...], perm: Any, gone: bool) -> None:
    """Case 4: axes of length one may move; without `perm` axes are reversed."""
    assert is_removed(single("Transpose", shape, **({} if perm is None else {"perm": perm}))) == gone


def test_a_transpose_of_equal_size_and_other_shape_stays() -> None:
    """(1, 3) to (3, 1) moves no element, but is another shape."""
    assert not is_removed(single("Transpose", (1, 3), out=(3, 1), perm=(1, 0)))


def test_a_whole_slice_goes() -> None:
    """Case 5, with and without steps."""
    assert is_removed(single("Slice", (4,), ints(0), ints(99), ints(0)))
    assert is_removed(single("Slice", (4,), ints(0), ints(99), ints(0), ints(1)))


def test_a_reversing_slice_stays() -> None:
    """The same shape, other elements; and steps that are not known."""
    assert not is_removed(single("Slice", (4,), ints(-1), ints(-99), ints(0), ints(-1)))
    assert not is_removed(single("Slice", (4,), ints(0), ints(99), ints(0), Value("steps", TensorType(I64, (1,)))))


def test_a_pad_of_nothing_goes() -> None:
    """Case 5; one that shifts (a negative pad on one side) has the same shape and stays, as do unknown pads."""
    assert is_removed(single("Pad", (4,), ints(0, 0)))
    assert not is_removed(single("Pad", (4,), ints(1, -1)))
    assert not is_removed(single("Pad", (4,), Value("pads", TensorType(I64, (2,)))))


@pytest.mark.parametrize("op", ["Concat", "Sum", "Max", "Min", "Mean"])
def test_a_combination_of_one_goes(op: str) -> None:
    """Case 6; of two it stays."""
    extra = {"axis": 0} if op == "Concat" else {}
    assert is_removed(single(op, **extra))
    assert not is_removed(single(op, (2, 3), Value("other", TensorType(F32, (2, 3))), **extra))


def dropout(mode: Value | None, mask_read: bool) -> Graph:
    x, y, mask = (
        Value("x", TensorType(F32, (2,))),
        Value("y", TensorType(F32, (2,))),
        Value("m", TensorType(BOOL, (2,))),
    )
    nodes: list[Node] = [node("Dropout", [x, None, mode], [y, mask])]
    z = Value("z")
    nodes.append(node("Relu", [y], [z]))
    return graph_of([x], [z, mask] if mask_read else [z], nodes)


def test_dropout_in_inference_goes() -> None:
    """Case 7: the mask is not read, the mode is off or left out."""
    assert is_removed(dropout(None, False))
    assert is_removed(dropout(Value.constant(np.array(False)), False))


def test_other_dropouts_stay() -> None:
    """In training, in a mode that is not known, and with a mask that someone reads."""
    assert not is_removed(dropout(Value.constant(np.array(True)), False))
    assert not is_removed(dropout(Value("mode", TensorType(BOOL, ())), False))
    assert not is_removed(dropout(None, True))


def test_operators_of_other_domains_stay() -> None:
    """An Identity of somebody else's domain may be anything."""
    x, y = Value("x", TensorType(F32, (2,))), Value("y", TensorType(F32, (2,)))
    g = graph_of([x], [y], [Node("Identity", [x], [y], domain="com.example", version=1)])
    assert IdentityNodes()(g) is g
