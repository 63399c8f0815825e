"""Loops whose states get another rank in the first turn, and conditions that are vectors of one element."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import xrt_core as xrt
from xrt_core.engine import engines

onnxruntime = pytest.importorskip("onnxruntime")

TURN = """(int64 i, bool c, float s, float[2, 3] a, int64 k) => (bool more, float t, float[2, 3] b, int64 l) {
  f = Cast<to = 1>(i)  t = Add(a, f)  b = Mul(t, a)  one = Constant<value_int = 1>()  l = Add(k, one)  more = Less(l, n)
}"""
"""The state s is a scalar before the first turn, and a matrix after it."""


def loop(limit: int, starts: int) -> onnx.ModelProto:
    """A Loop of at most so many turns; starts: whether it makes one at all."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 3] x, int64 n) => (float[N, M] y, float[A, B] z, int64 count)
    <float s0 = {{7.0}}, int64 c0 = {{0}}, int64 limit = {{{limit}}}, bool go = {{{starts}}}> {{
      y, z, count = Loop(limit, go, s0, x, c0) <body = b {TURN}>
    }}""")


def expected(model: onnx.ModelProto, *arrays: np.ndarray) -> list[np.ndarray]:
    """What ONNX Runtime gives by itself; the reference of the onnx package stacks results of turns in another way."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([v.name for v in model.graph.input], arrays, strict=True)))


def check(model: onnx.ModelProto, *arrays: np.ndarray, engine: str = "host", whole: bool = False) -> None:
    """A module gives what is expected; whole: by the engine alone."""
    if engine != "host" and not engines.status(engine).available:
        pytest.skip(f"{engine} is not here")
    with xrt.XRTModule(model, engine=engine, guard=False, cache=False) as module:
        results = module(*arrays)
        results = results if isinstance(results, list | tuple) else [results]
        for got, want in zip(results, expected(model, *arrays), strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-5)
        if whole:
            found = module.explain()
            assert found.engine_node_count == found.node_count, str(found)


X = np.random.default_rng(0).random((2, 3), np.float32)


@pytest.mark.parametrize("engine", ["host", "onnxruntime", "openvino", "xla"])
@pytest.mark.parametrize("limit", [0, 1, 2, 10])
@pytest.mark.parametrize("starts", [0, 1])
def test_as_by_itself(limit: int, starts: int, engine: str) -> None:
    for n in (0, 1, 3):
        check(loop(limit, starts), X, np.array(n), engine=engine)


def test_an_engine_gets_the_whole_loop() -> None:
    """Its state s has no rank that holds at every turn, but one that holds after the first."""
    check(loop(10, 1), X, np.array(4), engine="onnxruntime", whole=True)


GROWS = TURN.replace("b = Mul(t, a)", "b = Identity(a)").replace("t = Add(a, f)", "t = Unsqueeze(s, zero)")
GIVES = TURN.replace("int64 l)", "int64 l, float u)").replace("f = Cast<to = 1>(i)", "f = Cast<to = 1>(i)  u = Neg(a)")


@pytest.mark.parametrize(
    ("body", "outputs"),
    [(GROWS, "y, z, c"), (GIVES, "y, z, c, all")],
    ids=["another rank at each turn", "results of each turn"],
)
def test_loops_that_stay(body: str, outputs: str) -> None:
    """They are the host's, and as right as before."""
    results = "float y, float z, int64 c" + (", float all" if "all" in outputs else "")
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 3] x, int64 n) => ({results})
    <float s0 = {{7.0}}, int64 c0 = {{0}}, int64 limit = {{9}}, bool go = {{1}}, int64[1] zero = {{0}}> {{
      {outputs} = Loop(limit, go, s0, x, c0) <body = b {body}>
    }}""")
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    check(model, X, np.array(3), engine="onnxruntime")


def conditions(use: str = "", result: str = "s") -> onnx.ModelProto:
    """A Loop that ends when a state is true, which an If makes a vector of one element at some turn, as PaddlePaddle's
    exporter writes it. use: another reader of the state. result: what the graph gives."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[4] x, int64 n) => (float y)
    <float[4] s0 = {{0.0, 0.0, 0.0, 0.0}}, bool no = {{0}}, bool go = {{1}}, int64 limit = {{9}}> {{
      done, s = Loop(limit, go, no, s0) <body = b (int64 i, bool c, bool d, float[4] s) =>
          (bool[1] more, bool e, float[4] t) {{
        one = Constant<value_ints = [1]>()  j = Add(i, one)  far = Less(n, j)
        e = If(far) <then_branch = p () => (bool[1] yes) {{ yes = Constant<value = bool[1] {{1}}>() }},
                     else_branch = q () => (bool same) {{ k = Cast<to = 7>(d)  same = Cast<to = 9>(k) }}>
        f = Not(e)  more = And(f, c)  {use or "r = Identity(x)"}  t = Add(s, r) }}>
      y = Identity({result})
    }}""")


@pytest.mark.parametrize("engine", ["host", "onnxruntime"])
def test_conditions_are_scalars(engine: str) -> None:
    model = conditions()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for n in (0, 3, 20):
        check(model, np.arange(4, dtype=np.float32), np.array(n), engine=engine, whole=engine != "host")


@pytest.mark.parametrize("use", ["w = Cast<to = 1>(e)  r = Mul(x, w)", "w = Shape(d)  v = Cast<to = 1>(w)  "
                                 "u = ReduceSum(v)  r = Add(x, u)"])  # fmt: skip
def test_states_that_are_data_stay(use: str) -> None:
    """What reads the state otherwise may tell its rank."""
    model = conditions(use)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for n in (0, 3, 20):
        check(model, np.arange(4, dtype=np.float32), np.array(n), engine="onnxruntime")


def test_a_state_that_the_loop_hands_out_keeps_its_rank() -> None:
    model = conditions(result="done")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.BOOL
    for n in (0, 3, 20):
        check(model, np.arange(4, dtype=np.float32), np.array(n), engine="onnxruntime")
