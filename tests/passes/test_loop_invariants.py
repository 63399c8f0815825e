"""States of loops that never change, and what loops over the rows of an input are for any size."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import xrt_core as xrt
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.graph import Graph, Node
from xrt_core.passes.loop_invariants import LoopInvariants

LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
handed_on (float[2, 3] x, int64 turns) => (float[2, 3] last, float[3, 3] weight, float[k, 3, 3] rows)
<float[3, 3] w = {1, 0, 2, 0, 1, 0, 3, 0, 1}, bool on = {1}> {
  last, weight, other, rows = Loop(turns, on, x, w, x) <body = body (
    int64 turn, bool go, float[2, 3] h, float[3, 3] w_in, float[2, 3] y
  ) => (bool go_out, float[2, 3] h_out, float[3, 3] w_in, float[2, 3] y_out, float[3, 3] w_in) {
    go_out = Identity(go)
    p = MatMul(h, w_in)
    h_out = Add(p, y)
    y_out = Neg(y)
  }>
}
"""

SCAN = """
<ir_version: 8, opset_import: ["" : 17]>
scanned (float[2, 3] x, float[4, 2, 3] xs) => (float[2, 3] last, float[3, 3] weight, float[4, 2, 3] all)
<float[3, 3] w = {1, 0, 2, 0, 1, 0, 3, 0, 1}> {
  last, weight, all = Scan(x, w, xs) <num_scan_inputs: int = 1, body = body (
    float[2, 3] h, float[3, 3] w_in, float[2, 3] item
  ) => (float[2, 3] h_out, float[3, 3] w_in, float[2, 3] copy) {
    p = MatMul(h, w_in)
    h_out = Add(p, item)
    copy = Identity(h_out)
  }>
}
"""

NESTED = """
<ir_version: 8, opset_import: ["" : 17]>
nested (float[2, 3] x) => (float[2, 3] last)
<float[3, 3] w = {1, 0, 2, 0, 1, 0, 3, 0, 1}, bool on = {1}, int64 two = {2}> {
  last, weight = Loop(two, on, x, w) <body = outer (
    int64 turn, bool go, float[2, 3] h, float[3, 3] w_in
  ) => (bool go_out, float[2, 3] h_out, float[3, 3] w_in) {
    go_out = Identity(go)
    h_out, w_out = Loop(two, on, h, w_in) <body = inner (
      int64 turn2, bool go2, float[2, 3] h2, float[3, 3] w2
    ) => (bool go3, float[2, 3] h3, float[3, 3] w2) {
      go3 = Identity(go2)
      h3 = MatMul(h2, w2)
    }>
  }>
}
"""


WEIGHT = np.array([[1, 0, 2], [0, 1, 0], [3, 0, 1]], np.float32)


def expected(text: str, x: np.ndarray, turns: int = 4, xs: np.ndarray | None = None) -> list[np.ndarray]:
    """What the models give; ONNX Runtime 1.32 gives other numbers for the Scan, whose weight it takes for the state."""
    h, all_, added = x, [], x if text == LOOP else np.zeros_like(x)
    for turn in range(int(turns)):
        h = h @ WEIGHT + (added if xs is None else xs[turn])
        added = -added
        all_.append(h)
    if text == NESTED:
        return [h]
    return [h, WEIGHT, np.stack(all_ if text == SCAN else [WEIGHT] * len(all_))]


def loops(graph: Graph) -> list[Node]:
    """The loops of a graph and of their bodies."""
    found = [n for n in graph.nodes if n.op_type in ("Loop", "Scan")]
    return [*found, *(m for n in found for b in n.subgraphs for m in loops(b))]


@pytest.mark.parametrize(
    ("text", "states"),
    [(LOOP, [["x", "x"]]), (SCAN, [["x"]]), (NESTED, [["x"], ["h"]])],
    ids=["Loop", "Scan", "nested"],
)
def test_states_that_never_change_are_captured(text: str, states: list[list[str]]) -> None:
    """What a turn reads is the value outside; results, also those that collect it at every turn, are the same."""
    model = onnx.parser.parse_model(text)
    graph = import_model(model)
    found = LoopInvariants()(graph)
    assert LoopInvariants()(found) is found
    kept = []
    for n in loops(found):
        first = 2 if n.op_type == "Loop" else 0
        end = len(n.inputs) - n.attributes.get("num_scan_inputs", 0)  # type: ignore[operator]
        kept.append([v.name for v in n.inputs[first:end] if v is not None])
    assert kept == states
    inside = [m for n in loops(found) for b in n.subgraphs for m in b.nodes]
    assert "w" in {v.name for m in inside for v in m.inputs if v is not None}
    rng = np.random.default_rng(0)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    inputs = {k: rng.random(s, np.float32) if s else np.array(3) for k, s in shapes.items()}
    m = xrt.XRTModule(model, engine="host")
    for got, want in zip(m.run(inputs).values(), expected(text, **inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_graphs_without_such_states_stay() -> None:
    """The same object comes back."""
    text = LOOP.replace("w_in, float[2, 3] y_out, float[3, 3] w_in)", "w_out, float[2, 3] y_out, float[3, 3] w_out)")
    graph = import_model(onnx.parser.parse_model(text.replace("p = Mat", "w_out = Neg(w_in)\n    p = Mat")))
    assert LoopInvariants()(graph) is graph


ROWS = """
<ir_version: 8, opset_import: ["" : 17]>
rows (float[b, n, 4] x) => (float[n, b, 4] all)
<int64 zero = {0}, int64 one = {1}, int64[1] first = {0}, bool on = {1}, int32 start = {0}, int32 by = {1},
 int64[2] both = {0, 1}, int64[1] second = {1}, int32[1] none = {0}, int32[2] far = {1000000000, 1000000000},
 int32[2] steps = {1, 1000000000}, bool[2] never = {0, 0}, float[2] farther = {1000000000, 1000000000}> {
  shape = Shape(x)
  n = Gather(shape, one)
  at_end, all = Loop(n, on, start) <body = body (
    int64 turn, bool go, int32 i
  ) => (bool go_out, int32 j, float[b, 4] row) {
    go_out = Identity(go)
    j = Add(i, by)
    WAY
    row = Squeeze(part, second)
  }>
}
"""

ONE = """axis = Cast<to = 6>(second)
    i1 = Unsqueeze(i, first)
    j1 = Unsqueeze(j, first)
    part = Slice(x, i1, j1, axis)"""
STRIDED = """i1 = Unsqueeze(i, first)
    begin = Concat<axis = 0>(none, i1)
    j1 = Unsqueeze(j, first)
    behind = Concat<axis = 0>(none, j1)
    floats = Cast<to = 1>(behind)
    most = Max(floats, farther)
    end = Cast<to = 6>(most)
    is_far = Equal(end, far)
    masked = And(is_far, never)
    last = Where(masked, begin, end)
    axes = Cast<to = 6>(both)
    part = Slice(x, begin, last, axes, steps)"""


@pytest.mark.parametrize("way", [ONE, STRIDED], ids=["one", "strided"])
def test_a_row_at_every_turn_of_a_static_loop(way: str) -> None:
    """So does an engine of static shapes, which would not take a Slice whose limits it does not know."""
    pytest.importorskip("jax")
    text = ROWS.replace("WAY", way).replace("b, n, 4] x", "2, 3, 4] x").replace("n, b, 4] all", "3, 2, 4] all")
    m = xrt.XRTModule(onnx.parser.parse_model(text.replace("b, 4] row", "2, 4] row")), engine="xla", guard=False)
    x = np.random.default_rng(0).random((2, 3, 4), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(m(x), x.swapaxes(0, 1))
    assert "100% of nodes" in str(m.explain()).splitlines()[1]


@pytest.mark.parametrize("way", [ONE, STRIDED], ids=["one", "strided"])
@pytest.mark.parametrize("engine", ["onnxruntime", "host"])
def test_a_row_at_every_turn_has_a_shape(engine: str, way: str) -> None:
    """x[:, i] of a while loop, as a Slice of one element and as tf2onnx writes it: one of the shape of the others, so
    that the loop is the engine's, in one plan for all sizes."""
    pytest.importorskip(engine) if engine != "host" else None
    model = onnx.parser.parse_model(ROWS.replace("WAY", way))
    m = xrt.XRTModule(model, engine=engine, guard=False, cache="off", prune=False)
    for b, n in ((2, 3), (1, 7), (4, 1)):
        x = np.random.default_rng(n).random((b, n, 4), np.float32)
        np.testing.assert_array_equal(m(x), x.swapaxes(0, 1))
    text = str(m.explain())
    assert "one plan for all sizes" in text or engine == "host"
    if engine != "host":
        assert "100% of nodes" in text.splitlines()[1]


TURNED = """ends = Constant<value = int32[1] {-2147483648}>()
    last = Constant<value = int32[1] {-1}>()
    steps_back = Constant<value = int32[2] {-1, 1}>()
    axes = Cast<to = 6>(both)
    i1 = Unsqueeze(i, first)
    begin = Concat<axis = 0>(last, i1)
    j1 = Unsqueeze(j, first)
    behind = Concat<axis = 0>(ends, j1)
    part = Slice(x, begin, behind, axes, steps_back)"""


@pytest.mark.parametrize("engine", ["onnxruntime", "host"])
def test_a_row_whose_batch_is_turned_round(engine: str) -> None:
    """A Slice that takes one element of an axis may turn another round, which is as long afterwards."""
    if engine != "host":
        pytest.importorskip(engine)
    m = xrt.XRTModule(onnx.parser.parse_model(ROWS.replace("WAY", TURNED)), engine=engine, guard=False, cache="off")
    for b, n in ((2, 3), (3, 5)):
        x = np.random.default_rng(n).random((b, n, 4), np.float32)
        np.testing.assert_array_equal(m(x), x[::-1].swapaxes(0, 1))
