"""Lists that loops append to: scan outputs instead, with the same results, and untouched where that may not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.host_run import assert_same, run_graph
from tests.profiles import examples
from tests.shapes.models import Builder
from xrt_core.frontends.onnx_import import import_model
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph
from xrt_core.ir.types import TensorType
from xrt_core.ir.verifier import verify
from xrt_core.passes.shape_specialization import specialise
from xrt_core.passes.simplify import DeadNodes

make = helper.make_node
LIST = helper.make_tensor_sequence_value_info
X = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)


def loop(step: Sequence[Any], *after: Any, start: str = "SequenceEmpty", before: Sequence[str] = ()) -> Graph:
    """x [3, 2, 4] through a Loop over its first axis whose body has `xi`, a slice of x [2, 4], and makes of the list
    `l` the list `l2`; then the nodes `after`, whose last is the result. start: the operator that makes the first
    list."""
    value = helper.make_tensor_value_info
    nodes = [make("Gather", ["x", "i"], ["xi"]), *step, make("Identity", ["go"], ["on"])]
    ports = [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), LIST("l", TensorProto.FLOAT, None)]
    ends = [value("on", TensorProto.BOOL, []), LIST("l2", TensorProto.FLOAT, None)]
    b = Builder()
    n = b.op("Squeeze", b.op("Shape", "x", end=1))
    body = helper.make_graph(nodes, "body", ports, ends)
    b.nodes += [
        make(start, before, ["l0"]),
        make("Loop", [n, b.constant(True, np.bool_), "l0"], ["lists"], body=body),
        *after,
    ]
    return import_model(b.model([("x", TensorProto.FLOAT, [3, 2, 4])], [after[-1].output[0]]))


def specialised(graph: Graph) -> Graph:
    made = specialise(graph, [TensorType(X.dtype, X.shape)], {}, run_node)
    verify(made, "specialise")
    assert_same(run_graph(made, [X]), run_graph(graph, [X]))
    return DeadNodes().rewrite(made)


def append(element: str) -> Any:
    return make("SequenceInsert", ["l", element], ["l2"])


@given(st.booleans(), st.integers(-3, 2), st.sampled_from([None, 0, 1, 2]))
@examples(40)
def test_concatenated_lists_are_scan_outputs(new_axis: bool, axis: int, single: int | None) -> None:
    """Along every axis, new or old, of elements that have an axis of one there or not."""
    rank = 2 + new_axis + (single is not None)
    axis = min(axis, rank - 1) if axis >= 0 else max(axis, -rank)
    step = [make("Neg", ["xi"], ["e"])]
    if single is not None:
        axes = helper.make_tensor("axes", TensorProto.INT64, [1], [single])
        step += [make("Constant", [], ["at"], value=axes), make("Unsqueeze", ["e", "at"], ["e1"])]
    join = make("ConcatFromSequence", ["lists"], ["y"], axis=axis, new_axis=int(new_axis))
    made = specialised(loop([*step, append("e" if single is None else "e1")], join))
    assert {n.op_type for n in made.nodes} <= {"Loop", "Transpose", "Squeeze", "Reshape"}
    assert made.outputs[0].is_static


def test_other_readers_get_the_list() -> None:
    """One who asks for the second element, or how many there are."""
    last = helper.make_tensor("last", TensorProto.INT64, [], [1])
    after = [make("Constant", [], ["k"], value=last), make("SequenceAt", ["lists", "k"], ["y"])]
    made = specialised(loop([append("xi")], *after))
    assert [n.op_type for n in made.nodes] == ["Loop", "SplitToSequence", "SequenceAt"]


_FIRST = helper.make_tensor("first", TensorProto.INT64, [], [0])


@pytest.mark.parametrize(
    ("step", "more"),
    [
        pytest.param([append("xi")], {"start": "SequenceConstruct", "before": ["x"]}, id="it does not start empty"),
        pytest.param([append("x")], {}, id="of what the body does not make"),
        pytest.param(
            [make("Constant", [], ["p"], value=_FIRST), make("SequenceInsert", ["l", "xi", "p"], ["l2"])], {},
            id="at the front",
        ),
        pytest.param(
            [
                make("SequenceLength", ["l"], ["k"]),
                make("Cast", ["k"], ["f"], to=TensorProto.FLOAT),
                make("Add", ["xi", "f"], ["e"]),
                append("e"),
            ],
            {},
            id="it is read",
        ),
        pytest.param(
            [
                make("Constant", [], ["none"], value=helper.make_tensor("none", TensorProto.INT64, [1], [0])),
                make("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.INT64, [1], [1])),
                make("Reshape", ["i", "one"], ["end"]),
                make("Slice", ["xi", "none", "end"], ["e"]),
                append("e"),
            ],
            {},
            id="elements of other shapes",
        ),
    ],
)  # fmt: skip
def test_lists_that_stay(step: Sequence[Any], more: dict[str, Any]) -> None:
    """What depends on more than that each turn appends a tensor of the same shape."""
    after = make("SequenceLength", ["lists"], ["y"])
    made = specialised(loop(step, after, **more))
    assert [n.op_type for n in made.nodes][-2:] == ["Loop", "SequenceLength"]


@pytest.mark.parametrize("wanted", [4, 3, 2, 1])
def test_a_list_beside_other_states(wanted: int) -> None:
    """States keep their order, and so do scan outputs; lists that stay are states. wanted: how many of the Loop's
    outputs are not left out at its end."""
    value, floats = helper.make_tensor_value_info, TensorProto.FLOAT
    nodes = [
        make("Gather", ["x", "i"], ["xi"]),
        make("Add", ["s", "xi"], ["s2"]),
        make("SequenceInsert", ["l", "s2"], ["l2"]),
        make("SequenceInsert", ["k", "xi", "i"], ["k2"]),
        make("SequenceInsert", ["m", "xi"], ["m2"]),
        make("Neg", ["xi"], ["scan"]),
        make("Identity", ["go"], ["on"]),
    ]
    ports = [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), LIST("l", floats, None)]
    ports += [value("s", floats, [2, 4]), LIST("k", floats, None), LIST("m", floats, None)]
    ends = [value("on", TensorProto.BOOL, []), LIST("l2", floats, None), value("s2", floats, [2, 4])]
    ends += [LIST("k2", floats, None), LIST("m2", floats, None), value("scan", floats, [2, 4])]
    b = Builder()
    n, zeros = b.op("Squeeze", b.op("Shape", "x", end=1)), b.constant(np.zeros((2, 4)), np.float32)
    body = helper.make_graph(nodes, "body", ports, ends)
    b.nodes += [
        make("SequenceEmpty", [], ["e"]),
        make("Loop", [n, "", "e", zeros, "e", "e"], ["L", "S", "K", "M"][:wanted], body=body),
        make("ConcatFromSequence", ["L"], ["l_"], axis=1, new_axis=1),
        *([make("ConcatFromSequence", ["K"], ["k_"], axis=0)] if wanted > 2 else []),
        *([make("ConcatFromSequence", ["M"], ["m_"], axis=-1)] if wanted > 3 else []),
    ]
    made = specialised(import_model(b.model([("x", floats, [3, 2, 4])], ["l_", "S", "k_", "m_"][:wanted])))
    (found,) = (n for n in made.nodes if n.op_type == "Loop")
    assert (len(found.inputs), len(found.subgraphs[0].outputs)) == ((4, 6) if wanted > 3 else (5, 6))
    kept = [n.op_type for n in made.nodes if "Sequence" in n.op_type]
    assert kept == ["SequenceEmpty", *(["ConcatFromSequence"] if wanted > 2 else [])]
