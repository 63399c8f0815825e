"""Fingerprints change with every edit that matters, and with nothing else."""

from __future__ import annotations

import gc
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given

from tests.ir.random_graphs import graphs, node, renamed
from tests.profiles import examples
from xrt_core.errors import GraphError
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir import file_backed, function
from xrt_core.ir.function import (
    Function,
    InputOutputAlias,
    Parameter,
    array_digest,
    graph_fingerprint,
    launch,
    place_fingerprint,
    remembering,
)
from xrt_core.ir.graph import Annotations, Graph, Node, SourceLocation, Value
from xrt_core.ir.types import TensorType

F32 = np.dtype(np.float32)
WEIGHT = np.arange(100, dtype=np.float32)


def build(
    *,
    op: str = "Sub",
    swap: bool = False,
    axis: int = 1,
    axis_name: str = "axis",
    version: int = 13,
    dtype: Any = F32,
    shape: Any = ("N", 100),
    second: Any = ("N", 100),
    weight: np.ndarray = WEIGHT,
    returned: int = 1,
    mask: bool = False,
    branch: float = 2.0,
    tensor: np.ndarray = WEIGHT,
    default: np.ndarray | None = None,
) -> Graph:
    """A graph with one of everything, each part of it an argument."""
    x, y = Value("x", TensorType(np.dtype(dtype), shape)), Value("y", TensorType(F32, second))
    flag = Value("flag", TensorType(np.dtype(np.bool_), ()))
    a, b, c, d = Value("a"), Value("b"), Value("c"), Value("d")
    inner = Value("inner")
    then = Graph(
        [], [inner], [node("Mul", [b, Value.constant(np.array(branch, np.float32))], [inner])], opsets={"": 18}
    )
    other = Graph([], [b], [], opsets={"": 18})
    nodes = [
        node(op, [y, x] if swap else [x, y], [a]),
        node("Softmax", [a], [b], version, **{axis_name: axis}),
        node("If", [flag], [c], then_branch=then, else_branch=other),
        node("Dropout", [c], [d, Value("mask") if mask else None]),
        node("Add", [d, Value.constant(weight, "w")], [Value("e")]),
        node("ConstantOfShape", [Value.constant(np.array([2]))], [Value("f")], value=tensor),
    ]
    return Graph(
        [x, y, flag], [d] * returned, nodes, opsets={"": 18}, defaults=None if default is None else {y: default}
    )


EDITS: Mapping[str, dict[str, Any]] = {
    "operator": {"op": "Add"},
    "operand order": {"swap": True},
    "attribute": {"axis": 0},
    "attribute name": {"axis_name": "other"},
    "operator version": {"version": 11},
    "dtype of an input": {"dtype": np.float16},
    "fixed dimension": {"shape": ("N", 101)},
    "rank": {"shape": ("N", 100, 1)},
    "symbol made unknown": {"shape": (None, 100)},
    "symbols no longer shared": {"second": ("M", 100)},
    "constant's value": {"weight": WEIGHT + 1},
    "constant's dtype": {"weight": WEIGHT.view(np.int32)},
    "constant's shape": {"weight": WEIGHT.reshape(1, 100)},
    "one element of a constant": {"weight": np.concatenate([WEIGHT[:99], [99.5]]).astype(np.float32)},
    "number of outputs": {"returned": 2},
    "an optional output": {"mask": True},
    "a constant in a branch": {"branch": 3.0},
    "a tensor attribute": {"tensor": WEIGHT[:1]},
    "a default": {"default": WEIGHT},
}


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_changes_it(edit: str) -> None:
    """Each single edit gives a fingerprint of its own."""
    assert graph_fingerprint(build(**EDITS[edit])) != graph_fingerprint(build())


def test_edits_differ_from_each_other() -> None:
    """No two edits lead to one fingerprint."""
    assert len({graph_fingerprint(build(**e)) for e in EDITS.values()}) == len(EDITS)


def test_names_annotations_and_documentation_do_not_enter() -> None:
    """Renaming, copying constants, annotating and documenting leave it as it is; so does another symbol's name."""
    graph = build()
    marked = [
        n.replace(annotations=Annotations(engine="xla", source=SourceLocation("f.py", 3), doc="d")) for n in graph.nodes
    ]
    documented = Graph(graph.inputs, graph.outputs, marked, opsets={"": 18, "ai.onnx.ml": 3}, doc="doc", name="other")

    assert graph_fingerprint(renamed(graph)) == graph_fingerprint(graph)
    assert graph_fingerprint(documented) == graph_fingerprint(graph)
    assert graph_fingerprint(build(shape=("B", 100), second=("B", 100))) == graph_fingerprint(graph)


@pytest.mark.parametrize(
    ("one", "two"),
    [(1, 1.0), (True, "1"), ("1", 1), ((), (0,)), ((1, 2), (1, 2, 0)), ("a", ("a",)), (1.0, -1.0), (0.0, -0.0),
     (float("nan"), 0.0), (float("inf"), float("-inf")), (("a,b",), ("a", "b")), (b"\xff", "\xff")],
)  # fmt: skip
def test_attribute_values_are_told_apart(one: Any, two: Any) -> None:
    """Values of another kind, sign, length or nesting are other attributes."""

    def of(value: Any) -> str:
        return graph_fingerprint(Graph([], [], [node("Relu", [], [], a=value)], opsets={"": 18}))

    assert of(one) != of(two)
    assert of(one) == of(one)


@examples(60)
@given(graphs())
def test_random_graphs_are_equal_to_their_renamed_copies(graph: Graph) -> None:
    """Whatever the graph, names do not matter."""
    assert graph_fingerprint(graph) == graph_fingerprint(renamed(graph))


def _edits(graph: Graph) -> list[Graph]:
    """Single edits of a random graph, one kind after another at each node."""
    made = []
    for i, n in enumerate(graph.nodes):

        def put(new: Node, i: int = i) -> Graph:
            return graph.replace(nodes=[*graph.nodes[:i], new, *graph.nodes[i + 1 :]])

        made.append(put(Node("Abs", n.inputs, n.outputs, n.attributes, version=n.version)))
        made.append(put(Node(n.op_type, n.inputs, n.outputs, n.attributes, version=n.version + 1)))
        made.append(put(n.replace(attributes={**n.attributes, "extra": 1})))
        made.append(put(n.replace(inputs=[*n.inputs, None])))
        if len(n.inputs) == 2 and n.inputs[0] is not n.inputs[1]:
            made.append(put(n.replace(inputs=n.inputs[::-1])))
    first = graph.inputs[0]
    other = first.with_type(TensorType(np.dtype(np.float16), (2, 3)))
    made.append(Graph([other, *graph.inputs[1:]], [], [], opsets={}))
    made.append(graph.replace(outputs=[*graph.outputs, graph.outputs[0]]))
    return made


@examples(60)
@given(graphs())
def test_random_single_edits_change_it(graph: Graph) -> None:
    """Operator, version, attribute, arity, operand order, input type, outputs: each edit shows."""
    assert graph_fingerprint(graph) not in {graph_fingerprint(g) for g in _edits(graph)}


def test_shared_and_repeated_constants_are_the_same() -> None:
    """One constant used twice and two equal constants compute the same thing."""
    x, y = Value("x", TensorType(F32, (2,))), Value("y")
    one = Value.constant(np.ones(2, np.float32))
    two = Value.constant(np.ones(2, np.float32))
    shared = Graph([x], [y], [node("Sum", [x, one, one], [y])], opsets={"": 18})
    repeated = Graph([x], [y], [node("Sum", [x, one, two], [y])], opsets={"": 18})

    assert graph_fingerprint(shared) == graph_fingerprint(repeated)


@pytest.mark.slow
def test_weights_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of an array is remembered while the array lives, and forgotten with it."""
    array = np.random.default_rng(0).standard_normal(1000)
    first = array_digest(array)
    content: Callable[[np.ndarray], Any] = function._content
    seen: list[np.ndarray] = []
    monkeypatch.setattr(function, "_content", lambda a: seen.append(a) or content(a))

    assert array_digest(array) == first
    assert not seen
    assert array_digest(array.copy()) == first
    assert function._digests.get(array) == first

    seen.clear()
    gc.collect()
    known = len(function._digests)
    del array
    gc.collect()
    assert len(function._digests) == known - 1


def test_layout_of_an_array_does_not_matter() -> None:
    """A transposed view and its contiguous copy hold the same elements."""
    a = np.arange(200.0).reshape(10, 20)

    assert array_digest(a.T) == array_digest(np.ascontiguousarray(a.T))
    assert array_digest(a.T) != array_digest(a)


def test_strings_are_told_apart_by_their_bounds() -> None:
    """Two arrays of strings with one concatenation differ."""
    one, two = np.array(["ab", "c"], object), np.array(["a", "bc"], object)

    assert array_digest(one) != array_digest(two)


def test_aliases_and_functions_enter() -> None:
    """A function's aliases are part of it, its name is not; a Launch depends on its function and its engine."""
    x = Value("x", TensorType(F32, (2,)))
    y = Value("y", TensorType(F32, (2,)))
    body = Graph([x], [y], [node("Relu", [x], [y])], opsets={"": 18})
    plain = Function.from_graph(body, name="a")
    aliased = Function.from_graph(body, name="a", aliases=[InputOutputAlias(0, 0)])

    assert plain.fingerprint == Function.from_graph(body, name="b").fingerprint == graph_fingerprint(body)
    assert aliased.fingerprint != plain.fingerprint

    def launched(f: Function, engine: str) -> str:
        return graph_fingerprint(Graph([x], [y], [launch(f, engine, [x], [y])], opsets={"": 18}))

    assert len({launched(plain, "xla"), launched(aliased, "xla"), launched(plain, "toy")}) == 3


def test_an_undefined_value_is_an_error() -> None:
    """A graph that reads what nothing makes has no fingerprint; the message names the value."""
    with pytest.raises(GraphError, match="'lost' is used before"):
        graph_fingerprint(Graph([], [Value("lost")], [], opsets={"": 18}))


def test_many_large_constants_are_hashed_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, with the digests of one thread, and with what is remembered of files."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((200, 200)).astype(np.float32) for _ in range(6)]

    def made() -> Graph:
        x = Value("x", TensorType(np.dtype(np.float32), (200, 200)))
        nodes, at = [], x
        for i, a in enumerate(arrays):
            out = Value(f"y{i}", x.type)
            nodes.append(Node("Add", [at, Value.constant(a.copy())], [out], version=14))
            at = out
        return Graph([x], [at], nodes, opsets={"": 17})

    class Memory:
        def __init__(self) -> None:
            self.put_by: list[str] = []

        def get(self, array: np.ndarray) -> str | None:
            return None

        def put(self, array: np.ndarray, digest: str) -> None:
            self.put_by.append(threading.current_thread().name)

    alone, together = Memory(), Memory()
    with remembering(alone):
        wanted = graph_fingerprint(made())
    monkeypatch.setattr(function, "_MANY", 1)
    monkeypatch.setattr(function.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    with remembering(together):
        assert graph_fingerprint(made()) == wanted
    assert len(alone.put_by) == len(together.put_by) == len(arrays)
    assert not any(n.startswith("xrt-digest") for n in alone.put_by)
    assert all(n.startswith("xrt-digest") for n in together.put_by)


def test_without_a_cache_weights_in_files_are_known_by_their_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is hashed of a file that is what it was; another file, or another place in it, is another function."""
    weights = np.random.default_rng(0).standard_normal((4, 128, 128)).astype(np.float32)

    def loaded(path: pathlib.Path, array: np.ndarray) -> Function:
        x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [128, 128]) for n in "xy")
        w = onnx.numpy_helper.from_array(array, "w")
        graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [w])
        path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
        return typed(path)

    def typed(path: pathlib.Path) -> Function:
        graph = import_model(path)
        dims = (128, 128)
        return Function("f", [Parameter("x", F32, dims)], [Parameter("y", F32, dims)], graph)

    first = loaded(tmp_path / "a.onnx", weights[0])
    assert place_fingerprint(first) == first.fingerprint  # written just now: a change would not be seen
    monkeypatch.setattr(file_backed, "_SETTLED", -1)
    other = loaded(tmp_path / "b.onnx", weights[1])
    with monkeypatch.context() as m:
        m.setattr(function, "array_digest", lambda _: pytest.fail("a constant was hashed"))
        known = place_fingerprint(typed(tmp_path / "a.onnx"))
        assert place_fingerprint(typed(tmp_path / "a.onnx")) == known
        assert place_fingerprint(other) != known
    assert known != first.fingerprint
    mapped = typed(tmp_path / "a.onnx")
    changed = loaded(tmp_path / "a.onnx", weights[2])
    assert place_fingerprint(changed) != known
    assert place_fingerprint(mapped) != known  # the file is no longer what was mapped: by content
