"""Recurrent operators in a training step: Scans whose size does not depend on the length, and whose backward pass
computes only what depends on gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.frontends import ops
from xrt_core.ir.graph import Graph
from xrt_core.training import SGD, TrainModule, gradients

F = np.float32
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


class Net(xrt.Graph):
    """Both directions over sequences of different lengths, and a line on the last states."""

    def __init__(self, kind: str, hidden: int = 4) -> None:
        rng = np.random.default_rng(0)
        self.kind, self.hidden, g = kind, hidden, GATES[kind] * hidden
        shapes = {"w": (2, g, 3), "r": (2, g, hidden), "b": (2, 2 * g), "o": (hidden, 2)}
        for name, shape in shapes.items():
            setattr(self, name, (rng.standard_normal(shape) * 0.4).astype(F))

    def build(self, x: Any, lengths: Any) -> Any:
        _, last, *_ = getattr(ops, self.kind)(
            x, self.w, self.r, self.b, lengths, hidden_size=self.hidden, direction="bidirectional", outputs=2
        )
        return (last[0] + last[1]) @ self.o


def batch(steps: int) -> dict[str, np.ndarray]:
    """Sequences of which each has its own length."""
    x = np.random.default_rng(1).standard_normal((steps, 3, 3)).astype(F)
    return {"x": x, "lengths": np.array([steps, 1, steps // 2], np.int32), "labels": np.array([0, 1, 1])}


def trained(kind: str, steps: int, engine: str = "host") -> TrainModule:
    """A training after two steps."""
    t = TrainModule(Net(kind), loss="cross_entropy", optimizer=SGD(0.5), engine=engine)
    for _ in range(2):
        t.step(**batch(steps))
    return t


@pytest.mark.parametrize("kind", GATES)
def test_the_length_is_not_in_the_graph(kind: str) -> None:
    """A step has as many nodes for 40 steps of time as for 4: a Scan a direction forward, and one back."""
    short, long = (trained(kind, steps).training_graph() for steps in (4, 40))
    assert len(short.nodes) == len(long.nodes)
    assert [n.op_type for n in long.nodes].count("Scan") == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("RNN", "GRU"))])
def test_xla(kind: str) -> None:
    """XLA runs the Scans, in either direction, with the host's numbers."""
    pytest.importorskip("xrt_xla")
    on_xla, on_host = trained(kind, 6, "xla"), trained(kind, 6)
    assert not [h for h in on_xla.explain().report.host_nodes if h.operator == "Scan"]
    for name, array in on_host.parameters().items():
        np.testing.assert_allclose(on_xla.parameters()[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", GATES)
def test_onnxruntime(kind: str) -> None:
    """Gradients are the host's: states that a Scan's body hands on as they are arrive as they were."""
    pytest.importorskip("xrt_onnxruntime")
    host, engine = trained(kind, 4), trained(kind, 4, "onnxruntime")
    for name, g in host.gradients(**batch(4)).items():
        np.testing.assert_allclose(engine.gradients(**batch(4))[name], g, rtol=1e-4, atol=1e-5 * np.abs(g).max())


def back(graph: Graph) -> tuple[list[str], int]:
    """The operators in the body of the backward pass, and how many states it has."""
    (node,) = (n for n in graph.nodes if n.op_type == "Scan" and n.name.startswith("gradient"))
    (body,) = node.subgraphs
    return [n.op_type for n in body.nodes], len(node.inputs) - int(node.attributes["num_scan_inputs"])  # type: ignore[call-overload]


def test_the_way_back_reads_what_was_stored() -> None:
    """Products and curves of the forward body are stored, and the gradient of the captured weight is one product."""

    def f(xs: Any, h: Any, w: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = ops.Tanh(h @ w + x)
            return h, h

        return ops.Scan(h, xs, body=body, num_scan_inputs=1)[1].sum()

    graph = xrt.trace(f, *(np.ones(s) for s in ((5, 2, 3), (2, 3), (3, 3))))
    operators, states = back(gradients(graph, 0, ["xs", "h", "w"]))
    assert "Tanh" not in operators
    assert operators.count("MatMul") == 1
    assert states == 1  # the gradient by h alone: that by w is carried by none


def test_sums_that_are_no_products_are_carried() -> None:
    """A weight that scales, or that two products read, is summed turn by turn."""

    def f(xs: Any, h: Any, w: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = ops.Sin(h @ w) @ w + x * w[0, 0]
            return h, h

        return ops.Scan(h, xs, body=body, num_scan_inputs=1)[1].sum()

    arrays = [np.random.default_rng(k).standard_normal(s) * 0.5 for k, s in enumerate(((3, 2, 3), (2, 3), (3, 3)))]
    graph = xrt.trace(f, *arrays)
    made = gradients(graph, 0, ["w"])
    assert back(made)[1] == 2
    found = xrt.XRTModule(made, engine="host")(*arrays)[1]
    loss = xrt.XRTModule(graph, engine="host")
    for at in np.ndindex(3, 3):
        both = []
        for sign in (1, -1):
            moved = arrays[2].copy()
            moved[at] += sign * 1e-6
            both.append(float(loss(arrays[0], arrays[1], moved)))
        np.testing.assert_allclose(found[at], (both[0] - both[1]) / 2e-6, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_a_scan_within_a_scan() -> None:
    """Residuals of inner loops are stored over the outer one, beside integer states that have no gradient."""

    def f(x: Any, w: Any) -> Any:
        def layer(h: Any, i: Any, w: Any) -> Any:
            def cell(c: Any, row: Any) -> Any:
                c = ops.Tanh(c @ w + row)
                return c, c

            c, _ = ops.Scan(h, x, body=cell, num_scan_inputs=1)
            return c, i + 1, (c * c).sum()

        start = np.zeros((2, 3)), np.array(0, np.int64)
        h, _, totals = ops.Scan(*start, w, body=layer, num_scan_inputs=1)
        return h.sum() + totals.sum()

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((4, 2, 3)), rng.standard_normal((2, 3, 3)) * 0.4]
    graph = xrt.trace(f, *arrays)
    found = xrt.XRTModule(gradients(graph, 0, ["x", "w"]), engine="host")(*arrays)[1:]
    loss = xrt.XRTModule(graph, engine="host")
    for k, g in enumerate(found):
        for at in np.ndindex(*g.shape):
            both = []
            for sign in (1, -1):
                moved = [a.copy() for a in arrays]
                moved[k][at] += sign * 1e-6
                both.append(float(loss(*moved)))
            np.testing.assert_allclose(g[at], (both[0] - both[1]) / 2e-6, rtol=1e-5, atol=1e-6)
