"""If, Loop and Scan with their bodies on engines, on the host, and by onnx's reference evaluator: the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, parser
from onnx.reference import ReferenceEvaluator

from tests.profiles import examples
from xrt_core.engine import engines
from xrt_core.errors import XRTError
from xrt_core.frontends.onnx_export import export_function
from xrt_core.frontends.onnx_import import import_function
from xrt_core.ir.function import Function
from xrt_core.ir.graph import every_node
from xrt_core.module import XRTModule

pytestmark = pytest.mark.tiny_clusters  # the models are small, and are to be on the engine

HEAD = '<ir_version: 8, opset_import: ["": 18]>\n'
GO = "go = Constant<value = bool {1}>()"
ENGINES = ("host", "onnxruntime", "xla", "openvino")


def model(text: str) -> ModelProto:
    found = parser.parse_model(HEAD + text)
    onnx.checker.check_model(found, full_check=True)
    return found


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def check(
    m: ModelProto, *arrays: Any, engine: str, whole: bool | None = None, want: list[np.ndarray] | None = None
) -> XRTModule:
    """Run and compare with the reference evaluator, or with `want` where that fails. whole: whether all nodes are to be
    on the engine (None: either is right)."""
    if engine != "host" and not engines.status(engine).available:
        pytest.skip(f"{engine} is not here")
    names = [i.name for i in m.graph.input]
    if want is None:
        with np.errstate(all="ignore"):  # its logistic function computes both branches, one of which may overflow
            want = ReferenceEvaluator(m).run(None, dict(zip(names, arrays, strict=True)))
    module = XRTModule(m, engine=engine, guard=False, cache=False)
    for _ in range(2):
        got = module(*arrays)
        for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    found = module.explain()
    if whole is not None and engine != "host":
        assert (found.engine_node_count == found.node_count) == whole, str(found)
    return module


COUNTED = model(f"""g (float[4] x, int64 n) => (float[4] y) {{ {GO}
  y = Loop(n, go, x) <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t) {{
    d = Identity(c)  u = Mul(s, x)  t = Tanh(u) }}>
}}""")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("turns", [0, 1, 7])
def test_a_loop_whose_limit_is_an_input(engine: str, turns: int) -> None:
    """No turn, one, several; the body reads a value from outside; one plan for all limits, whole on engines."""
    check(COUNTED, floats(4), np.array(turns), engine=engine, whole=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loop_that_ends_by_its_data(engine: str) -> None:
    """Doubled until the sum is large: the number of turns is that of the data."""
    m = model(f"""g (float[3] x) => (float[3] y) {{ {GO}  most = Constant<value = int64 {{50}}>()
      y = Loop(most, go, x) <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t) {{
        t = Add(s, s)  r = ReduceSum<keepdims = 0>(t)  k = Constant<value = float {{100.0}}>()  d = Less(r, k) }}>
    }}""")
    for x in (np.array([1, 2, 3], np.float32), np.array([60, 70, 80], np.float32)):
        check(m, x, engine=engine, whole=None if engine == "openvino" else True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("turns", [0, 5])
def test_what_a_loop_of_known_length_collects(engine: str, turns: int) -> None:
    """The limit is a constant: results are static, also those of no turn."""
    m = model(f"""g (float[2] x) => (float[2] y, float[{turns}, 2] z) {{ {GO}
      n = Constant<value = int64 {{{turns}}}>()
      y, z = Loop(n, go, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] o) {{
        d = Identity(c)  t = Add(s, x)  o = Neg(t) }}>
    }}""")
    x = floats(2)
    want = None if turns else [x, np.zeros((0, 2), np.float32)]  # the evaluator has no empty collections
    check(m, x, engine=engine, whole=True if turns else None, want=want)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_collection_whose_length_depends_on_data_stays_on_the_host(engine: str) -> None:
    """Right for several lengths, and explain() says why; the body still runs on the engine."""
    m = model(f"""g (float[2] x, int64 n) => (float[2] y, float[k, 2] z) {{ {GO}
      y, z = Loop(n, go, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] o) {{
        d = Identity(c)  t = Add(s, x)  o = Neg(t) }}>
    }}""")
    for turns in (3, 1):
        module = check(m, floats(2), np.array(turns), engine=engine, whole=False)
    if engine != "host":
        assert "it depends on data; the host runs the control, and its bodies are planned by themselves" in str(
            module.explain()
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_an_if_in_a_scan_in_a_loop(engine: str) -> None:
    """Bodies in bodies, each of which reads values of all around it."""
    m = model(f"""g (float[3] x, float[4,3] rows, int64 n) => (float[3] y, float[4,3] last) {{ {GO}
      start = Mul(rows, rows)
      y, last = Loop(n, go, x, start) <body = b (int64 i, bool c, float[3] s, float[4,3] w)
          => (bool d, float[3] t, float[4,3] all) {{
        d = Identity(c)
        t, all = Scan(s, rows) <num_scan_inputs = 1,
          body = k (float[3] a, float[3] e) => (float[3] f, float[3] o) {{
            m = ReduceSum<keepdims = 0>(a)  zero = Constant<value = float {{0.0}}>()  p = Less(m, zero)
            f = If(p) <then_branch = q () => (float[3] f1) {{ f1 = Add(a, e) }},
                       else_branch = r () => (float[3] f2) {{ h = Mul(e, x)  f2 = Sub(a, h) }}>
            o = Tanh(f) }}> }}>
    }}""")
    for turns in (0, 3):
        check(m, floats(3), floats(4, 3, seed=1), np.array(turns), engine=engine)


@pytest.mark.parametrize("engine", ["onnxruntime", "xla", "openvino"])
def test_a_scan_backwards(engine: str) -> None:
    """Input from the end, output towards the front, along other axes: as on the host, which has its own tests."""
    m = model("""g (float[3] x, float[3,4] rows) => (float[3] y, float[3,4] all) {
      y, all = Scan(x, rows) <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
          scan_input_axes = [1], scan_output_axes = [1],
          body = k (float[3] a, float[3] e) => (float[3] f, float[3] o) { f = Sub(a, e)  o = Tanh(f) }>
    }""")
    arrays = floats(3), floats(3, 4, seed=1)
    want = list(XRTModule(m, engine="host")(*arrays))
    check(m, *arrays, engine=engine, want=want, whole=None if engine == "openvino" else True)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_if_of_each_kind(engine: str) -> None:
    """A condition that data gives, branches that return constants and values from outside; both of its values."""
    m = model("""g (float[2] x, bool p) => (float[2] y, float[2] z) {
      t = Sin(x)
      y, z = If(p) <then_branch = a () => (float[2] u, float[2] v) { u = Exp(t)  v = Identity(x) },
                    else_branch = b () => (float[2] w, float[2] k) {
                      w = Neg(t)  k = Constant<value = float[2] {1.0, 2.0}>() }>
    }""")
    for p in (True, False):
        check(m, floats(2), np.array(p), engine=engine)


@pytest.mark.parametrize("engine", ["host", "onnxruntime", "xla"])
def test_indices_that_stay_in_range_go_along(engine: str) -> None:
    """A greedy decoder: its first token comes from outside and is checked there, the others are those of ArgMax."""
    m = model(f"""g (int64[1] token, float[5,3] table, float[3,5] head) => (int64[1] last, int64[6,1] tokens) {{ {GO}
      n = Constant<value = int64 {{6}}>()
      last, tokens = Loop(n, go, token) <body = b (int64 i, bool c, int64[1] k) => (bool d, int64[1] l, int64[1] o) {{
        d = Identity(c)  e = Gather<axis = 0>(table, k)  s = MatMul(e, head)
        l = ArgMax<axis = 1, keepdims = 0>(s)  o = Identity(l) }}>
    }}""")
    arrays = floats(5, 3), floats(3, 5, seed=1)
    module = check(m, np.array([2]), *arrays, engine=engine, whole=True)
    with pytest.raises(Exception, match="out of bounds"):
        module(np.array([5]), *arrays)


def test_an_index_that_may_leave_its_range_keeps_a_loop_on_the_host() -> None:
    """The number of the turn is an index, and the limit is not known: XLA would clamp it."""
    m = model(f"""g (float[4] x, int64 n) => (float y) {{ {GO}  zero = Constant<value = float {{0.0}}>()
      y = Loop(n, go, zero) <body = b (int64 i, bool c, float s) => (bool d, float t) {{
        d = Identity(c)  e = Gather<axis = 0>(x, i)  t = Add(s, e) }}>
    }}""")
    module = check(m, floats(4), np.array(4), engine="xla", whole=False)
    assert "an index in its body is computed, and may be out of range" in str(module.explain())
    with pytest.raises(Exception, match="out of bounds"):
        module(floats(4), np.array(5))


def test_an_engine_that_looks_at_indices_gets_such_a_loop() -> None:
    """ONNX Runtime raises for an index out of range, and the host then says what is wrong; the next call is again the
    engine's."""
    m = model(f"""g (float[4] x, int64 n) => (float y) {{ {GO}  zero = Constant<value = float {{0.0}}>()
      y = Loop(n, go, zero) <body = b (int64 i, bool c, float s) => (bool d, float t) {{
        d = Identity(c)  e = Gather<axis = 0>(x, i)  t = Add(s, e) }}>
    }}""")
    module = check(m, floats(4), np.array(4), engine="onnxruntime", whole=True)
    for _ in range(5):
        with pytest.raises(XRTError, match="out of bounds"):
            module(floats(4), np.array(5))
    np.testing.assert_allclose(module(floats(4), np.array(3)), floats(4)[:3].sum(), rtol=1e-6)
    found = module.explain()
    assert found.engine_node_count == found.node_count, str(found)


@pytest.mark.parametrize("engine", ["auto", "xla", "onnxruntime"])
@pytest.mark.parametrize("size", [5, "N"])
def test_a_loop_with_a_computed_index_is_for_engines_that_look_at_it(engine: str, size: object) -> None:
    """Of the same cluster XLA, which would clamp the index, gets only the nodes around."""
    m = model(f"""g (float[{size}] x, int64 n) => (float y) {{ {GO}  zero = Constant<value = float {{0.0}}>()
      a = Exp(x)  b = Sin(a)
      z = Loop(n, go, zero) <body = b (int64 i, bool c, float s) => (bool d, float t) {{
        d = Identity(c)  e = Gather<axis = 0>(b, i)  t = Add(s, e) }}>
      y = Exp(z)
    }}""")
    if not engines.status("xla").available or not engines.status("onnxruntime").available:
        pytest.skip("an engine is not here")
    with XRTModule(m, engine=engine, guard=True, guard_sandbox=False, cache=False) as module:
        for n in (5, 5, 5) if size == 5 else (5, 4, 6):
            x = floats(n)
            (want,) = ReferenceEvaluator(m).run(None, {"x": x, "n": np.array(n)})
            np.testing.assert_allclose(module(x, np.array(n)), want, rtol=1e-5)
            assert module.wait(60)
        for _ in range(5):
            with pytest.raises(XRTError, match="out of bounds"):
                module(x, np.array(len(x) + 1))
        np.testing.assert_allclose(module(x, np.array(n)), want, rtol=1e-5)


def test_random_numbers_in_a_body_are_the_hosts() -> None:
    """They are drawn anew at each turn, which a traced program would not do."""
    m = model(f"""g (float[4] x) => (float[3,4] y) {{ {GO}  n = Constant<value = int64 {{3}}>()
      last, y = Loop(n, go, x) <body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t, float[4] o) {{
        d = Identity(c)  t = Identity(s)  o = RandomUniformLike(s) }}>
    }}""")
    if not engines.status("xla").available:
        pytest.skip("xla is not here")
    module = XRTModule(m, engine="xla", guard=False, cache=False)
    drawn = module(floats(4))
    assert len(np.unique(drawn)) == 12
    assert "drawn at random in its bodies" in str(module.explain())


def test_a_body_marked_for_the_host_stays_there() -> None:
    """One marked node is enough for the control to stay; the reason names it."""
    if not engines.status("xla").available:
        pytest.skip("xla is not here")
    module = XRTModule(COUNTED, engine="xla", guard=False, cache=False, marks={"op:Tanh": "host"}, automatic=True)
    plain = XRTModule(COUNTED, engine="host")
    np.testing.assert_allclose(module(floats(4), np.array(2)), plain(floats(4), np.array(2)), rtol=1e-6)
    assert "is marked for host; the host runs the control" in str(module.explain())


def test_a_function_with_bodies_keeps_its_fingerprint() -> None:
    """Exported and imported again, nested bodies and what they capture included; another body is another function."""
    m = model("""g (float[3] x, float[4,3] rows) => (float[3] y) {
      n = Constant<value = int64 {2}>()  go = Constant<value = bool {1}>()
      y = Loop(n, go, x) <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t) {
        d = Identity(c)
        t, all = Scan(s, rows) <num_scan_inputs = 1, body = k (float[3] a, float[3] e) => (float[3] f, float[3] o) {
            h = Mul(e, x)  f = Sub(a, h)  o = Tanh(f) }> }>
    }""")
    functions = []
    for text in (m, onnx.ModelProto.FromString(m.SerializeToString().replace(b"Tanh", b"Sinh"))):
        graph = XRTModule(text, engine="host").partitioned({"x": floats(3), "rows": floats(4, 3)})
        functions.append(Function.from_graph(graph, name="f"))
    first, other = functions
    again = import_function(export_function(first))
    assert again.fingerprint == first.fingerprint != other.fingerprint
    assert len(list(every_node(again.body))) == len(list(every_node(first.body))) == 5
    assert "Scan" in first.as_text()


_BINARY = ("Add", "Sub", "Mul", "Max")
_UNARY = ("Tanh", "Neg", "Sigmoid", "Abs")


@st.composite
def loops(draw: st.DrawFn, depth: int = 2) -> tuple[str, int]:
    """The text of a model of random Loops, Scans and Ifs over vectors of 3, and its limit."""
    count = [0]

    def name() -> str:
        count[0] += 1
        return f"v{count[0]}"

    def nodes(known: list[str], level: int) -> tuple[list[str], str]:
        lines: list[str] = []
        known = list(known)
        for _ in range(draw(st.integers(1, 3))):
            out, a, b = name(), draw(st.sampled_from(known)), draw(st.sampled_from(known))
            kind = draw(st.sampled_from(("unary", "binary", "if", "loop", "scan")[: 5 if level else 2]))
            if kind == "unary":
                lines.append(f"{out} = {draw(st.sampled_from(_UNARY))}({a})")
            elif kind == "binary":
                lines.append(f"{out} = {draw(st.sampled_from(_BINARY))}({a}, {b})")
            elif kind == "if":
                r, p = name(), name()
                (x, u), (y, v) = nodes(known, level - 1), nodes(known, level - 1)
                lines.append(f"{r} = ReduceSum<keepdims = 0>({a})  {p} = Less({r}, zero)")
                lines.append(
                    f"{out} = If({p}) <then_branch = {name()} () => (float[3] {u}) {{ {' '.join(x)} }}, "
                    f"else_branch = {name()} () => (float[3] {v}) {{ {' '.join(y)} }}>"
                )
            elif kind == "loop":
                s, i, c, d, r = (name() for _ in range(5))
                x, u = nodes([*known, s], level - 1)
                goes_on = f"{d} = Identity({c})"
                if draw(st.booleans()):
                    goes_on = f"{r} = ReduceSum<keepdims = 0>({u})  {d} = Less({r}, one)"
                limit = draw(st.sampled_from(("n", "three")))
                lines.append(
                    f"{out} = Loop({limit}, go, {a}) <body = {name()} (int64 {i}, bool {c}, float[3] {s}) => "
                    f"(bool {d}, float[3] {u}) {{ {' '.join(x)} {goes_on} }}>"
                )
            else:
                s, e, o, all_ = (name() for _ in range(4))
                x, u = nodes([*known, s, e], level - 1)
                lines.append(
                    f"{out}, {all_} = Scan({a}, rows) <num_scan_inputs = 1, body = {name()} (float[3] {s}, "
                    f"float[3] {e}) => (float[3] {u}, float[3] {o}) {{ {' '.join(x)} {o} = Neg({u}) }}>"
                )
            known.append(out)
        return lines, known[-1]

    lines, last = nodes(["x"], depth)
    text = f"""g (float[3] x, float[4,3] rows, int64 n) => (float[3] {last}) {{ {GO}
      zero = Constant<value = float {{0.0}}>()  one = Constant<value = float {{1.0}}>()
      three = Constant<value = int64 {{3}}>()
      {" ".join(lines)} }}"""
    return text, draw(st.integers(0, 4))


@examples(12)
@given(loops())
def test_random_control_flow_on_the_host(made: tuple[str, int]) -> None:
    """Loops, Scans and Ifs in one another give what the reference evaluator gives."""
    check(model(made[0]), floats(3), floats(4, 3, seed=1), np.array(made[1]), engine="host")


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["onnxruntime", "xla", "openvino"])
@examples(60)
@given(made=loops())
def test_random_control_flow_on_engines(engine: str, made: tuple[str, int]) -> None:
    """The same with each engine, which takes what it can."""
    check(model(made[0]), floats(3), floats(4, 3, seed=1), np.array(made[1]), engine=engine)
