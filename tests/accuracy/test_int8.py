"""Forms in int8: of all products, and of as many as the budget allows."""

from __future__ import annotations

import math
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.fake_engines import FakeCompiler, FakeEngine, FakeExecutable, fake_engine
from tests.random_graphs import F32, graph_of, node
from xrt_core.accuracy.search import PrecisionSearch
from xrt_core.compiler.models import CompiledGraph
from xrt_core.engine.contract import Executable
from xrt_core.guard import launch as guarded_launch
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.quantization import calibration
from xrt_core.quantization.qdq import QuantisedProducts
from xrt_core.quantization.ranges import Ranges
from xrt_core.verify.checker import Check, Nearness, ResultChecker

pytest.importorskip("onnxruntime")
DEPTH = 8
X = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
COARSE = 3  # the layer whose weights have one large element a column, so that int8 has few steps for the others


def model() -> Graph:
    """A chain of products, each followed by Tanh."""
    rng = np.random.default_rng(1)
    x = v = Value("x", TensorType(F32, (4, 32)))
    nodes = []
    for i in range(DEPTH):
        w = (rng.standard_normal((32, 32)) / 8).astype(np.float32)
        if i == COARSE:
            w[0] += 40
        product, out = Value(f"p{i}"), Value(f"y{i}")
        nodes += [node("MatMul", [v, Value.constant(w, f"w{i}")], [product]), node("Tanh", [product], [out])]
        v = out
    return graph_of([x], [v], nodes)


def run(graph: Graph, x: np.ndarray = X) -> np.ndarray:
    return np.asarray(xrt.XRTModule(graph, engine="host")(x))


def ranges_of(graph: Graph) -> Ranges:
    recorder = calibration.Recorder()
    pipeline = xrt.XRTModule(graph, engine="host")._pipeline
    recorder.record(graph, [X], lambda g: CompiledGraph(g, pipeline))
    return recorder.ranges(graph)


@pytest.mark.parametrize("static", [True, False])
def test_products_are_taken_or_left(static: bool) -> None:
    """None is the graph itself; each is a little off; the rest stays as it was, node for node."""
    graph = model()
    exact = run(graph)
    made = QuantisedProducts(calibration.prepared(graph), ranges_of(graph) if static else None)
    assert [n.name for n in made.products] == [f"p{i}" for i in range(DEPTH)]
    assert made.with_products(()).nodes == made.graph.nodes
    off = {}
    for taken in ((made.products[0],), made.products[:4], made.products):
        found = made.with_products(taken)
        assert {n for n in made.graph.nodes if n not in taken} <= set(found.nodes)
        assert sum(n.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for n in found.nodes) == len(taken)
        off[len(taken)] = float(np.abs(run(found) - exact).max())
    assert 0 < off[1] < 0.05
    assert off[1] < off[DEPTH] < 1


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_narrow_weights_leave_room_in_16_bits(static: bool, narrow: bool) -> None:
    """Two products of uint8 with weights of 7 bits fit, so that instructions that add two in 16 bits are exact."""
    graph = model()
    made = QuantisedProducts(calibration.prepared(graph), ranges_of(graph) if static else None, narrow=narrow)
    read = [v for n in made.with_products(made.products).nodes for v in n.inputs if v is not None]
    weights = [v.data for v in read if v.data is not None and v.data.dtype == np.int8 and v.data.size > 32]
    largest = [int(np.abs(w.astype(int)).max()) for w in weights]
    assert len(largest) == DEPTH
    assert max(largest) == (64 if narrow else 127)
    assert not narrow or 2 * 255 * max(largest) < 2**15


@pytest.mark.parametrize("saturates", [True, False])
def test_weights_are_narrow_where_sums_may_saturate(saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors that add two products of 8-bit integers in 16 bits."""
    monkeypatch.setattr("xrt_core.accuracy.search.adds_int8_in_16_bits", lambda: saturates)
    asked = []

    def made(*args: Any, narrow: bool) -> Any:
        asked.append(narrow)
        return QuantisedProducts(*args, narrow=narrow)

    monkeypatch.setattr("xrt_core.accuracy.search.QuantisedProducts", made)
    given = {"guard_verify": True, "guard_async": True, "cache": "off", "prune": False}
    with fake_engine(FastInInt8), xrt.XRTModule(model(), engine="fast8", accuracy=0.5, **given) as m:
        m(X)
        assert m.wait(60)
    assert asked
    assert set(asked) == {saturates}


class FastInInt8(FakeEngine):
    """Takes a millisecond for each product of floats."""

    name = "fast8"

    def compiler(self, device: str, options: Any) -> FakeCompiler:
        return _Compiler(self)


class _Compiler(FakeCompiler):
    def compile(self, function: Any, entry_params: Any, return_params: Any, aliases: Any) -> Executable:
        made = super().compile(function, entry_params, return_params, aliases)
        assert isinstance(made, FakeExecutable)
        seconds, call = 1e-3 * sum(map(_is_slow, function.body.nodes)), made.call

        def slow(inputs: Sequence[Any]) -> Sequence[Any]:
            time.sleep(seconds)
            return call(inputs)

        made.call = slow
        return made


def _is_slow(n: Node) -> bool:
    w = n.inputs[1] if n.op_type == "MatMul" else None
    return w is not None and w.data is not None


def test_products_in_int8_are_made_again_by_another_process(tmp_path: pathlib.Path) -> None:
    """Of the same ranges, so that results are the same to the last bit, without a search."""
    graph, results = model(), []
    given = {"guard_verify": True, "guard_async": True, "cache_dir": str(tmp_path), "prune": False}
    with fake_engine(FastInInt8), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded_launch, "_SLOW", math.inf)  # the host is faster than this engine
        for _ in range(2):
            with xrt.XRTModule(graph, engine="fast8", accuracy=0.9, calibration=[{"x": X}], **given) as m:
                m(X)
                assert m.wait(120)
                assert m.accuracy is not None
                assert m.accuracy.chosen is not None, m.accuracy
                results.append((m.accuracy.chosen.form, m.accuracy.chosen.nodes, m(X).tobytes()))
            patch.setattr(PrecisionSearch, "find", lambda _: pytest.fail("it was searched again"))
    assert results[0] == results[1]


class _OffInInt8(_Compiler):
    def compile(self, function: Any, entry_params: Any, return_params: Any, aliases: Any) -> Executable:
        made = super().compile(function, entry_params, return_params, aliases)
        assert isinstance(made, FakeExecutable)
        call, by = made.call, 0.0 if any(map(_is_slow, function.body.nodes)) else 0.5
        made.call = lambda inputs: [r + np.float32(by) for r in call(inputs)]
        return made


class OffInInt8(FastInInt8):
    """Is off by a half in int8."""

    def compiler(self, device: str, options: Any) -> FakeCompiler:
        return _OffInInt8(self)


def test_a_form_is_measured_by_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the host, which answers until the background has judged the first results, where that takes long."""

    def judge(*_: Any) -> Check:
        if threading.current_thread().name == "xrt-shadow":
            time.sleep(0.2)
        return Check("")

    monkeypatch.setattr(guarded_launch, "_LONG_TO_WAIT", 0.0)
    monkeypatch.setattr(guarded_launch, "_SLOW", math.inf)
    monkeypatch.setattr(ResultChecker, "nearness", lambda *args: Nearness.FAR)
    monkeypatch.setattr(ResultChecker, "_compare", judge)
    given = {"guard_verify": True, "guard_async": True, "cache": "off", "prune": False, "guard_sandbox": False}
    with fake_engine(OffInInt8), xrt.XRTModule(model(), engine="fast8", accuracy=0.9, **given) as m:
        m(X)
        assert m.wait(120)
        assert m.accuracy is not None
        used = [t.used for t in m.accuracy.trials if t.form == "int8" and t.nodes == DEPTH]
        assert used
        assert used[0] is not None, m.accuracy
        assert used[0] > 0.5, m.accuracy


def chosen(budget: float) -> tuple[int, float]:
    """How many products are in int8 within a budget, and the error of a call."""
    graph = model()
    with fake_engine(FastInInt8):
        given = {"guard_verify": True, "guard_async": True, "cache": "off", "prune": False}
        with xrt.XRTModule(graph, engine="fast8", accuracy=budget, **given) as m:
            exact = m(X)
            assert m.wait(120)
            assert m.accuracy is not None
            assert m.accuracy.state == "done", m.accuracy
            found = m.accuracy.chosen
            return 0 if found is None else found.nodes, float(np.abs(m(X) - exact).max() / np.abs(exact).max())


@pytest.mark.slow
def test_as_many_products_as_the_budget_allows() -> None:
    """A wide budget takes all; a narrower one some, and keeps within it; a tiny one none."""
    everything, off = chosen(0.9)
    assert everything == DEPTH
    some, less = chosen(off / 2)
    assert 0 < some < DEPTH
    assert 0 < less <= off / 2
    assert chosen(1e-7) == (0, 0.0)
