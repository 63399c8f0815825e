"""Models of control flow through XRT beside ONNX Runtime used directly, interleaved in one process.

    python benchmarks/control_flow.py [--seconds S] [--only NAME,...] [--engines host,xla,...]

Each model is made here (random weights, batch 1): a loop of 1000 small turns, a loop that ends by its data, an RNN
written as Scan, a greedy decoder of 32 tokens, loops in loops, and Ifs of which one branch is taken. The figure is the
median time of a call divided by that of ONNX Runtime, with the same number of threads; results are compared first.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, parser
from rounds import interleaved

from xrt_core import XRTModule

THREADS = 2
REST = 0.02
Feeds = dict[str, np.ndarray]


def _model(text: str, **weights: np.ndarray) -> ModelProto:
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]>\n' + text)
    for name, data in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(data, name))
    return model


def _floats(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * scale).astype(np.float32)


def many_turns() -> tuple[ModelProto, Feeds]:
    """1000 turns of three nodes over 64 elements; the number of turns is an input."""
    text = """g (float[64] x, int64 n) => (float[64] y) {
      go = Constant<value = bool {1}>()
      y = Loop(n, go, x) <body = b (int64 i, bool c, float[64] s) => (bool d, float[64] t) {
        d = Identity(c)  a = Mul(s, x)  u = Tanh(a)  t = Add(u, x) }>
    }"""
    return _model(text), {"x": _floats(64), "n": np.array(1000)}


def until() -> tuple[ModelProto, Feeds]:
    """A power iteration that ends when the vector changes little."""
    text = """g (float[96] x) => (float[96] y) {
      zero = Constant<value = float {1000.0}>()  most = Constant<value = int64 {500}>()
      y, e = Loop(most, , x, zero) <body = b (int64 i, bool c, float[96] s, float r) => (bool d, float[96] t, float q) {
        small = Constant<value = float {0.00001}>()
        p = MatMul(w, s)  l = ReduceL2<keepdims = 1>(p)  t = Div(p, l)
        m = Sub(t, s)  q = ReduceL2<keepdims = 0>(m)  d = Greater(q, small) }>
    }"""
    w = _floats(96, 96)
    return _model(text, w=(w @ w.T + np.eye(96, dtype=np.float32)).astype(np.float32)), {"x": np.abs(_floats(96))}


def rnn_as_scan() -> tuple[ModelProto, Feeds]:
    """An Elman network of 128 units over 100 steps."""
    text = """g (float[1,128] h, float[100,1,64] xs) => (float[1,128] last, float[100,1,128] ys) {
      last, ys = Scan(h, xs) <num_scan_inputs = 1,
        body = b (float[1,128] s, float[1,64] e) => (float[1,128] t, float[1,128] o) {
          p = MatMul(e, w)  r = MatMul(s, u)  a = Add(p, r)  q = Add(a, bias)  t = Tanh(q)  o = Identity(t) }>
    }"""
    model = _model(text, w=_floats(64, 128, scale=0.1), u=_floats(128, 128, scale=0.1), bias=_floats(128))
    return model, {"h": _floats(1, 128), "xs": _floats(100, 1, 64)}


def greedy_decoder() -> tuple[ModelProto, Feeds]:
    """32 tokens of a recurrent language model: embedding, gated unit, vocabulary of 2000, ArgMax."""
    text = """g (int64[1] token, float[1,256] h) => (int64[1] last, float[1,256] state, int64[32,1] tokens) {
      n = Constant<value = int64 {32}>()  go = Constant<value = bool {1}>()
      last, state, tokens = Loop(n, go, token, h) <body = b (int64 i, bool c, int64[1] k, float[1,256] s)
          => (bool d, int64[1] l, float[1,256] t, int64[1] out) {
        d = Identity(c)  e = Gather<axis = 0>(table, k)
        a = MatMul(e, wz)  f = MatMul(s, uz)  m = Add(a, f)  z = Sigmoid(m)
        v = MatMul(e, wh)  q = MatMul(s, uh)  w = Add(v, q)  r = Tanh(w)
        one = Constant<value = float {1.0}>()  y = Sub(one, z)  j = Mul(y, s)  o = Mul(z, r)  t = Add(j, o)
        logits = MatMul(t, head)  l = ArgMax<axis = 1, keepdims = 0>(logits)  out = Identity(l) }>
    }"""
    weights = {name: _floats(256, 256, scale=0.08) for name in ("wz", "uz", "wh", "uh")}
    model = _model(text, table=_floats(2000, 256), head=_floats(256, 2000, scale=0.1), **weights)
    return model, {"token": np.array([7]), "h": _floats(1, 256)}


def nested() -> tuple[ModelProto, Feeds]:
    """20 turns of a loop around a Scan over 16 rows."""
    text = """g (float[32] x, float[16,32] rows, int64 n) => (float[32] y) {
      go = Constant<value = bool {1}>()
      y = Loop(n, go, x) <body = b (int64 i, bool c, float[32] s) => (bool d, float[32] t) {
        d = Identity(c)
        t, all = Scan(s, rows) <num_scan_inputs = 1,
          body = k (float[32] a, float[32] e) => (float[32] f, float[32] o) {
            p = Mul(a, e)  f = Tanh(p)  o = Identity(f) }> }>
    }"""
    return _model(text), {"x": _floats(32), "rows": _floats(16, 32), "n": np.array(20)}


def many_ifs() -> tuple[ModelProto, Feeds]:
    """12 Ifs in a row, whose conditions depend on data, with a matrix product in each branch."""
    lines, last = [], "x"
    for i in range(12):
        lines.append(f"""s{i} = ReduceSum<keepdims = 0>({last})  c{i} = Greater(s{i}, zero)
          y{i} = If(c{i}) <
            then_branch = a{i} () => (float[1,128] u{i}) {{ p{i} = MatMul({last}, w)  u{i} = Tanh(p{i}) }},
            else_branch = b{i} () => (float[1,128] v{i}) {{ q{i} = MatMul({last}, w2)  v{i} = Sigmoid(q{i}) }}>""")
        last = f"y{i}"
    zero = "zero = Constant<value = float {0.0}>()"
    text = f"g (float[1,128] x) => (float[1,128] y11) {{ {zero} {' '.join(lines)} }}"
    return _model(text, w=_floats(128, 128, scale=0.1), w2=_floats(128, 128, scale=0.1)), {"x": _floats(1, 128)}


def two_rates() -> tuple[ModelProto, Feeds]:
    """One If around all (a speech detector for two sample rates): convolutions and a recurrent cell in each branch."""

    def branch(name: str, stride: int, width: int) -> str:
        pad = width // 2
        return f"""{name} () => (float[1,1] out_{name}, float[1,1,64] h_{name}) {{
            f_{name} = Conv<strides = [{stride}], pads = [{pad}, {pad}]>(audio, k{name})  r_{name} = Relu(f_{name})
            g_{name} = Conv<strides = [2], pads = [1, 1]>(r_{name}, mix)  j_{name} = Relu(g_{name})
            m_{name} = ReduceMean<keepdims = 1>(j_{name}, axis)  t_{name} = Transpose<perm = [2, 0, 1]>(m_{name})
            y_{name}, h_{name}, c_{name} = LSTM<hidden_size = 64>(t_{name}, wi, wr, , , h, h)
            q_{name} = Reshape(h_{name}, flat)  o_{name} = MatMul(q_{name}, head)  out_{name} = Sigmoid(o_{name}) }}"""

    text = f"""g (float[1,1,512] audio, float[1,1,64] h, int64 rate) => (float[1,1] p, float[1,1,64] state) {{
      wide = Constant<value = int64 {{16000}}>()  is_wide = Equal(rate, wide)
      p, state = If(is_wide) <then_branch = {branch("a", 4, 16)}, else_branch = {branch("b", 2, 8)}>
    }}"""
    weights = {
        "ka": _floats(64, 1, 16, scale=0.2), "kb": _floats(64, 1, 8, scale=0.2), "mix": _floats(64, 64, 3, scale=0.1),
        "wi": _floats(1, 256, 64, scale=0.1), "wr": _floats(1, 256, 64, scale=0.1), "head": _floats(64, 1),
        "flat": np.array([1, 64]), "axis": np.array([2]),
    }  # fmt: skip
    return _model(text, **weights), {"audio": _floats(1, 1, 512), "h": _floats(1, 1, 64), "rate": np.array(16000)}


MODELS: dict[str, Callable[[], tuple[ModelProto, Feeds]]] = {
    "loop, 1000 small turns": many_turns,
    "loop until a condition": until,
    "RNN as Scan": rnn_as_scan,
    "greedy decoder": greedy_decoder,
    "Scan in Loop": nested,
    "12 Ifs": many_ifs,
    "If around two networks": two_rates,
}


def measure(name: str, engines: list[str], seconds: float) -> str:
    """A line of the table."""
    import onnxruntime as ort

    model, feeds = MODELS[name]()
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = session.run(None, feeds)
    arrays = list(feeds.values())
    calls: list[Callable[[], Any]] = [lambda: session.run(None, feeds)]
    whole = []
    for engine in engines:
        module = XRTModule(model, engine=engine, threads=THREADS, cache=False, guard=False)
        got = module(*arrays)
        for a, b in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=f"{name} on {engine}")
        calls.append(lambda module=module: module(*arrays))
        whole.append("" if module.explain().engine_node_count == module.explain().node_count else "*")
    times = [t.median for t in interleaved(calls, rounds=7, seconds=seconds, batch=20e-3, warm=0.25, rest=REST)]
    ratios = [f"{t / times[0]:.2f}{mark}" for t, mark in zip(times[1:], whole, strict=True)]
    return f"| {name} | {times[0] * 1e3:.3f} | {' | '.join(ratios)} |"


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=2.0)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--engines", default="onnxruntime,openvino,xla,host")
    given = arguments.parse_args()
    warnings.simplefilter("ignore")
    engines = given.engines.split(",")
    print(f"| model | ONNX Runtime, ms | {' | '.join(engines)} |\n|---|---|{'---|' * len(engines)}")
    for name in MODELS:
        if not given.only or any(part in name for part in given.only.split(",")):
            print(measure(name, engines, given.seconds), flush=True)
    print("\nTimes divided by those of ONNX Runtime; * where some nodes stay on the host.")


if __name__ == "__main__":
    main()
