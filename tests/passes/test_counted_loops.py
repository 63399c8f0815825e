"""Loops that count up to a limit: the number of their turns, and what they are not taken for."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import xrt_core as xrt
from xrt_core.frontends.onnx_import import import_model
from xrt_core.ir.graph import Graph, Node
from xrt_core.passes.counted_loops import CountedLoops


def model(
    *,
    first: str = "Less",
    again: str = "Less",
    start: int = 0,
    step: int = 1,
    tested: str = "at",
    limit: str = "",
    casts: bool = True,
    count: str = "sized",
    both: str = "",
) -> onnx.ModelProto:
    """Sums of the rows of x, and each row doubled, in a while loop over their number as tf2onnx writes it.

    both: how the number of the turn, too, is compared with the limit at the end of it, as in tf.scan and tf.map_fn.
    """
    test = f"{{0}} = {again}(a, b)" if again in ("Less", "LessOrEqual") else f"{{0}} = {again}(b, a)"
    if both:
        lines = ["c = Cast<to = 1>(turn)", f"t = {both}(c, b)", test.format("s"), "more = And(t, s)"]
        test = "\n            ".join(lines)
    before = f"go = {first}(p, q)" if first in ("Less", "LessOrEqual") else f"go = {first}(q, p)"
    kind = "Cast<to = 1>" if casts else "Identity"
    text = f"""
        <ir_version: 8, opset_import: ["" : 17]>
        counted (float[n, 3] x, int32 given) => (int32 end, float[3] sum, float[k, 3] rows)
        <int32 first = {{{start}}}, int64 zero = {{0}}, int64 three = {{3}}, float[3] none = {{0, 0, 0}}> {{
          shape = Shape(x)
          size = Gather<axis = 0>(shape, zero)
          sized = Cast<to = 6>(size)
          p = {kind}(first)
          q = {kind}({count})
          {before}
          end, sum, bound, rows = Loop({limit}, go, first, none, {count}) <body = body (
            int64 turn, bool on, int32 i, float[3] so_far, int32 n
          ) => (bool more, int32 at, float[3] added, int32 n2, float[3] row) <int32 by = {{{step}}}> {{
            at = Add(i, by)
            here = Gather<axis = 0>(x, i)
            added = Add(so_far, here)
            row = Add(here, here)
            a = {kind}({tested})
            b = {kind}(n)
            {test.format("more")}
            n2 = Identity(n)
          }}>
        }}
    """
    return onnx.parser.parse_model(text)


def loop(graph: Graph) -> Node:
    """The Loop of a graph."""
    return next(n for n in graph.nodes if n.op_type == "Loop")


def results(m: onnx.ModelProto, inputs: dict[str, np.ndarray], **options: object) -> list[np.ndarray]:
    """What a module of the model gives."""
    module = xrt.XRTModule(m, cache="off", guard=False, prune=False, **options)  # type: ignore[arg-type]
    return [np.asarray(r) for r in module.run(inputs).values()]


WRITTEN = [
    {},
    {"casts": False},
    {"first": "Greater", "again": "Greater"},
    {"first": "LessOrEqual", "again": "LessOrEqual", "count": "given"},
    {"start": 1},
    {"step": 2},
    {"step": 3, "start": 2, "casts": False},
    {"limit": "size"},
    {"limit": "three"},
    {"limit": "size", "start": 1},
    {"both": "LessOrEqual"},
    {"both": "Less"},
    {"both": "Less", "limit": "size"},
]


@pytest.mark.parametrize("how", WRITTEN, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 5, 6])
def test_the_number_of_turns_is_that_of_the_comparisons(how: dict[str, object], n: int) -> None:
    """Whatever the start, the step and the form of the comparison, as the same loop in Python."""
    m = model(**how)  # type: ignore[arg-type]
    x = np.arange(3 * max(n, 7 if "count" in how else n), dtype=np.float32).reshape(-1, 3)
    inputs = {"x": x, "given": np.array(n - 1, np.int32)}
    graph = import_model(m)
    found = CountedLoops()(graph)
    assert CountedLoops()(found) is found
    assert loop(found).inputs[0] is not None
    assert loop(found).subgraphs[0].outputs[0].data is not None
    i: int = how.get("start", 0)  # type: ignore[assignment]
    total, rows = np.zeros(3, np.float32), []
    n = min(n, 3) if how.get("limit") == "three" else n
    while i < n:
        total, i = total + x[i], i + how.get("step", 1)  # type: ignore[operator]
        rows.append(2 * x[i - how.get("step", 1)])  # type: ignore[operator]
    end, got, mine = results(m, inputs, engine="host")
    assert end == i
    np.testing.assert_array_equal(got, total)
    np.testing.assert_array_equal(mine, np.reshape(rows, (-1, 3)))


TWO = """
<ir_version: 8, opset_import: ["" : 17]>
two (int64 most, int64 limit, int64 last) => (int64 end, int64[k] turns) <int64 first = {START}, bool on = {1}> {
  c0 = Less(first, limit)
  FIRST
  end, turns = Loop(LIMIT, go, first) <body = body (
    int64 turn, bool again, int64 i
  ) => (bool more, int64 j, int64 which) <int64 by = {2}> {
    j = Add(i, by)
    which = Identity(turn)
    c = Less(j, limit)
    t = COMPARED(turn, last)
    more = And(c, t)
  }>
}
"""


@pytest.mark.parametrize("start", [-5, 0, 1])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("compared", ["Less", "LessOrEqual"])
@pytest.mark.parametrize("checked", [True, False])
def test_a_counter_and_the_number_of_the_turn(start: int, own: bool, compared: str, checked: bool) -> None:
    """A counter from any number on by 2, and the number of the turn, each with a limit of its own, and the Loop's: it
    ends with the first, also where limits are 0 or below. checked: whether the number of the turn is compared before
    the first one too, of which the number of turns does not tell."""
    first = "zero = Sub(last, last)\n  t0 = Less(zero, last)\n  go = And(c0, t0)" if checked else "go = Identity(c0)"
    text = TWO.replace("START", str(start)).replace("FIRST", first).replace("COMPARED", compared)
    m = onnx.parser.parse_model(text.replace("LIMIT", "most" if own else ""))
    module = xrt.XRTModule(m, engine="host")
    is_counted = loop(CountedLoops()(import_model(m))).subgraphs[0].outputs[0].data is not None
    assert is_counted != checked
    for most in (0, 2, 9):
        for limit in (-1, 0, 4):
            for last in (-1, 0, 2, 4, 9):
                i, turn = start, 0
                go = i < limit and (not checked or last > 0)
                while go and (not own or turn < most):
                    i += 2
                    go = i < limit and (turn < last if compared == "Less" else turn <= last)
                    turn += 1
                inputs = {"most": np.array(most), "limit": np.array(limit), "last": np.array(last)}
                end, turns = module.run(inputs).values()
                assert end == i
                assert list(turns) == list(range(turn))


@pytest.mark.parametrize(
    "how",
    [
        {"first": "LessOrEqual"},  # the first turn begins where no other would
        {"tested": "i"},  # the test is of the counter before the turn
        {"step": -1},
        {"step": 0},
        {"both": "Greater"},  # the number of the turn is to be above the limit
    ],
    ids=str,
)
def test_other_loops_stay(how: dict[str, object]) -> None:
    """What is not known to count to the limit keeps its conditions; a state that is counted is read as the turn."""
    graph = import_model(model(**how))  # type: ignore[arg-type]
    found = CountedLoops()(graph)
    before, after = loop(graph), loop(found)
    assert [v and v.name for v in after.inputs] == [v and v.name for v in before.inputs]
    assert after.subgraphs[0].outputs[0].name == before.subgraphs[0].outputs[0].name
    assert (found is graph) == (how.get("step") == 0)


def test_several_loops_without_names() -> None:
    """What is made for each has names of its own."""
    m = model()
    first = next(n for n in m.graph.node if n.op_type == "Loop")
    second = m.graph.node.add()
    second.CopyFrom(first)
    second.output[:] = ["end2", "sum2", "bound2", "rows2"]
    m.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("sum2", 1, [3]))
    found = CountedLoops()(import_model(m))
    names = [v.name for n in found.nodes for v in n.outputs if v is not None]
    assert len(set(names)) == len(names)
    x = np.random.default_rng(0).random((5, 3), np.float32)
    _, total, _, again = results(m, {"x": x, "given": np.array(0, np.int32)}, engine="host")
    np.testing.assert_array_equal(total, again)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_run_them_for_any_size(engine: str) -> None:
    """The loop is the engine's, with the index that it counts, in one plan for all sizes."""
    pytest.importorskip(engine)
    m = xrt.XRTModule(model(), engine=engine, guard=False, cache="off", prune=False)
    host = xrt.XRTModule(model(), engine="host")
    for n in (4, 6, 1, 9):
        inputs = {"x": np.random.default_rng(n).random((n, 3), np.float32), "given": np.array(0, np.int32)}
        for mine, want in zip(m.run(inputs).values(), host.run(inputs).values(), strict=True):
            np.testing.assert_allclose(mine, want, rtol=1e-5)
    text = str(m.explain())
    assert "one plan for all sizes" in text
    if engine == "onnxruntime":
        assert "Loop" in text.split("on the host")[0].split("clusters:")[1]


@pytest.mark.parametrize("engine", ["host", "onnxruntime"])
def test_the_number_of_the_turn_as_a_limit(engine: str) -> None:
    """A Slice whose limits are numbers, not vectors, as tf2onnx writes them: x[i:i + 1] of every turn."""
    if engine != "host":
        pytest.importorskip(engine)
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 15]>
        g (float[4, 3] x) => (float[n, m, 3] y)
        <int64 one = {1}, int64 zero = {0}, bool yes = {1}, int64 count = {4}>
        {
            y = Loop (count, yes) <body = b (int64 i, bool go) => (bool on, float[k, 3] row) {
                on = Identity (go)
                next = Add (i, one)
                row = Slice (x, i, next, zero)
            }>
        }"""
    )
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    m = xrt.XRTModule(model, engine=engine, guard=False)
    (y,) = m.run({"x": x}).values()
    np.testing.assert_array_equal(y, x[:, None])
    assert "fallback" not in {e.name for e in m.events}
