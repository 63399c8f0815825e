"""`xrt.profile`: what ran, where, how long, with which nodes; by any thread, under guard; nothing before and after."""

from __future__ import annotations

import json
import pathlib
import threading
import time
from typing import Any

import numpy as np
import onnx
import pytest

import xrt_core as xrt
from tests.fake_engines import fake_engine
from xrt_core.profiling import Profile, Roofline, Row
from xrt_core.runtime import recording

X = np.ones((64, 64), np.float32)
ROOFLINE = Roofline(1e10, 1e11, "here")


class Steps(xrt.Graph):
    """A product, which goes to an engine, between two nodes that stay on the host."""

    def build(self, x: Any) -> Any:
        return xrt.ops.Exp(xrt.ops.MatMul(xrt.ops.Tanh(x), np.eye(64, dtype=np.float32)))


def profiled(name: str = "") -> Profile:
    """A profile that measures no machine."""
    p = xrt.profile(name)
    p.roofline = ROOFLINE
    return p


def row(p: Profile, part: str) -> Row:
    (found,) = [r for r in p.rows if part in r.label]
    return found


def test_what_ran() -> None:
    """A row for each cluster, host node and conversion, with runs, times, bytes, FLOPs and a share of the peak; the own
    times add up to that of the calls."""
    with fake_engine() as engine:
        engine.takes = lambda n: n.op_type == "MatMul"
        m = xrt.XRTModule(Steps(), engine="fake", guard=False, prune=False)
        m(X)
        with profiled() as p:
            for _ in range(4):
                m(X)
    assert p.calls == 4
    assert {r.kind for r in p.rows} == {"host", "cluster", "conversion", "between"}
    cluster = row(p, "fake_0 on fake")
    assert (cluster.engine, cluster.runs, cluster.flops) == ("fake", 4, 4 * 2 * 64**3)
    assert cluster.moved == 4 * 3 * X.nbytes  # in, out, and the constant in the cluster
    assert cluster.peak == pytest.approx(ROOFLINE.seconds(cluster.moved, cluster.flops) / cluster.own)
    assert row(p, "Tanh").engine == "host"
    assert row(p, "Tanh").runs == 4
    assert row(p, "Tanh").best <= row(p, "Tanh").seconds / 4
    assert sum(r.own for r in p.rows) == pytest.approx(p.call_seconds)
    assert p.call_seconds <= p.seconds
    assert [(n.operator, n.estimated) for n in p.nodes if n.engine == "fake"] == [("MatMul", True)]
    assert not any(n.estimated for n in p.nodes if n.engine == "host")
    assert "4 calls" in p.summary()
    assert all(r.label in p.as_text() for r in p.rows)


def test_nothing_is_left_behind() -> None:
    """Before and after a profile, and where it raises, a plan runs the steps that it was made with."""
    m = xrt.XRTModule(Steps(), engine="host")
    m(X)
    plan = m._source.caller.last
    plain, run = plan._running, plan.run
    assert plain is plan.steps
    with profiled():
        assert plan._running is not plain
    with pytest.raises(RuntimeError, match="mine"), profiled():
        raise RuntimeError("mine")
    assert plan._running is plain
    assert plan.run == run
    m(X)
    assert not recording.recorders


def test_one_launch_is_recorded_without_binding_anew() -> None:
    """A module whose graph is one launch was bound before the profile began."""
    with fake_engine():
        m = xrt.XRTModule(lambda x: xrt.ops.Neg(x), engine="fake", guard=False, prune=False)
        m(X)
        with profiled() as p:
            m(X)
            np.testing.assert_array_equal(m(X), -X)
        m(X)
    assert row(p, "fake_0").runs == 2


def test_profiles_within_profiles_and_of_new_modules() -> None:
    """Each has what ran while it was open, also of a module that was made meanwhile."""
    m = xrt.XRTModule(Steps(), engine="host")
    m(X)
    with profiled() as outer:
        m(X)
        with profiled() as inner:
            m(X)
            new = xrt.XRTModule(Steps(), engine="host")
            new(X)
        m(X)
    assert (outer.calls, inner.calls) == (4, 2)
    with pytest.raises(xrt.InputError, match="make another one"), inner:
        pass
    with profiled() as p, pytest.raises(xrt.InputError, match="after its `with` block"):
        _ = p.rows


def test_calls_from_many_threads() -> None:
    """Every call counts once, whichever thread makes it, while profiles begin and end."""
    m = xrt.XRTModule(Steps(), engine="host")
    m(X)
    failures: list[BaseException] = []
    done = threading.Event()

    def work(calls: int) -> None:
        try:
            for _ in range(calls):
                assert m(X).shape == X.shape
        except BaseException as e:
            failures.append(e)

    def churn() -> None:
        while not done.is_set():
            with profiled():
                time.sleep(0.0005)

    other = threading.Thread(target=churn)
    other.start()
    with profiled() as p:
        threads = [threading.Thread(target=work, args=(100,), name=f"caller-{i}") for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    done.set()
    other.join()
    assert not failures
    assert p.calls == 400
    assert row(p, "Tanh").runs == 400
    assert {s.thread for s in p.timeline.spans if s.where != "event"} == {f"caller-{i}" for i in range(4)}


def test_under_guard() -> None:
    """The host's answers, the engine's, and what the guard does for itself are told apart; compilation is in the
    timeline."""
    pytest.importorskip("xrt_openvino._toolkit")  # not openvino itself: imported alone it sends telemetry
    options = {"guard": True, "guard_tune": False, "guard_sandbox": False, "guard_shadow": 1, "prune": False}
    module = xrt.XRTModule(lambda x: xrt.ops.MatMul(x, np.eye(64, dtype=np.float32)), engine="openvino", **options)
    with module as m, profiled() as p:
        m(X)
        assert m.wait(60)
        for _ in range(5):
            m(X)
    assert p.calls == 6
    assert row(p, "openvino_0 on openvino").runs == 5
    assert row(p, "openvino_0 on openvino").engine == "openvino"
    assert {r.engine for r in p.rows if r.label.startswith("MatMul")} == {"host"}
    labels = {s.label.split()[0] for s in p.timeline.spans if s.where == "event"}
    assert {"host_first", "specialised"} <= labels


def test_control_flow_and_sizes_that_only_a_run_tells() -> None:
    """A node that runs a body has the body's time in `seconds`, not in `own`; what types do not tell is measured."""
    x, y = (onnx.helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [64, 64]), ("y", None)))
    zero = onnx.numpy_helper.from_array(np.array(0, np.float32), "zero")
    branch = onnx.helper.make_graph([onnx.helper.make_node("Exp", ["x"], ["e"], "inner")], "then",
                                    [], [onnx.helper.make_tensor_value_info("e", 1, [64, 64])])  # fmt: skip
    other = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["e"], "other")], "else",
                                   [], [onnx.helper.make_tensor_value_info("e", 1, [64, 64])])  # fmt: skip
    nodes = [
        onnx.helper.make_node("ReduceSum", ["x"], ["s"], "sum", keepdims=0),
        onnx.helper.make_node("Greater", ["s", "zero"], ["c"], "positive"),
        onnx.helper.make_node("If", ["c"], ["z"], "choice", then_branch=branch, else_branch=other),
        onnx.helper.make_node("NonZero", ["z"], ["n"], "where"),
        onnx.helper.make_node("Cast", ["n"], ["y"], "floats", to=1),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [zero])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    m = xrt.XRTModule(model, engine="host")
    m(X)
    with profiled() as p:
        m(X)
    choice = row(p, "If")
    assert choice.kind == "control"
    assert choice.seconds >= choice.own + row(p, "Exp").seconds
    assert row(p, "NonZero").moved == X.nbytes + 2 * 64 * 64 * 8
    assert sum(r.own for r in p.rows) == pytest.approx(p.call_seconds)


def test_a_trace_and_memory(tmp_path: pathlib.Path) -> None:
    """Events carry the names of their nodes, rows are threads, memory is a counter; and files are told by suffix."""
    with fake_engine() as engine:
        engine.takes = lambda n: n.op_type == "MatMul"
        m = xrt.XRTModule(Steps(), engine="fake", guard=False, prune=False)
        with profiled("a <name>") as p:
            m(X)
            time.sleep(0.12)
    names = {n.op_type: n.name for n in m.graph.nodes}
    p.save(tmp_path / "p.json")
    trace = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    nodes = {e["name"]: e["args"].get("nodes") for e in trace if e["ph"] == "X"}
    assert nodes["fake_0 on fake"] == [names["MatMul"]]
    assert [names["Tanh"]] in nodes.values()
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} == {threading.current_thread().name}
    assert {e["name"] for e in trace if e["ph"] == "C"} == {"resident memory", "arrays of a run"}
    assert len(p.memory) >= 3
    assert all(size > 1e6 for _, size in p.memory)
    assert max(size for _, size in p.arrays) == m.explain().peak_bytes - X.nbytes
    assert json.loads(json.dumps(p.to_json()))["calls"] == 1
    with pytest.raises(xrt.InputError, match=r"\.html \(a page\) or \.json"):
        p.save(tmp_path / "p.txt")


def test_lanes_and_training() -> None:
    """Launches on threads of the pool are recorded, and so are training steps."""
    pytest.importorskip("jax")

    class Line(xrt.Graph):
        def __init__(self) -> None:
            self.w = xrt.Variable(np.zeros((64, 1), np.float32))

        def build(self, x: Any) -> Any:
            return x @ self.w

    t = xrt.training.TrainModule(Line(), loss="mse", optimizer=xrt.optim.SGD(0.1), engine="host")
    t.step(x=X, target=np.zeros((64, 1), np.float32))
    with profiled() as p:
        t.step(x=X, target=np.zeros((64, 1), np.float32))
    assert p.calls == 1
    assert any("MatMul" in r.label for r in p.rows)
