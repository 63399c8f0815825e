"""Gradients of If, Scan and Loop, run by the whole pipeline on the host, against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import xrt_core as xrt
from xrt_core.frontends import ops
from xrt_core.ir.verifier import verify
from xrt_core.training import gradients


def check(f: Callable[..., Any], *arrays: np.ndarray, wrt: tuple[str, ...], again: bool = False) -> Any:
    """Hold the gradients of the scalar that `f` gives against differences; returns the graph with gradients."""
    graph = xrt.trace(f, *arrays)
    names = [v.name for v in graph.inputs]
    made = gradients(graph, 0, list(wrt))
    verify(made, "control flow")
    module, loss = xrt.XRTModule(made, engine="host"), xrt.XRTModule(graph, engine="host")
    found = module(*arrays)[1:]
    for name, g in zip(wrt, found, strict=True):
        i = names.index(name)
        expected = np.zeros(arrays[i].shape)
        for at in np.ndindex(*arrays[i].shape):
            both = []
            for sign in (1, -1):
                moved = [np.array(a) for a in arrays]
                moved[i][at] += sign * 1e-6
                both.append(float(np.asarray(loss(*moved))))
            expected[at] = (both[0] - both[1]) / 2e-6
        np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-6)
    return made


R = np.random.default_rng(4)


@pytest.mark.parametrize("taken", [1.0, -1.0])
def test_if(taken: float) -> None:
    """The gradient takes the branch that was taken; what a branch does not read gets zeros from it."""

    def f(s: Any, x: Any, w: Any) -> Any:
        y = ops.If(s > 0.0, then_branch=lambda: ops.Tanh(x) * w, else_branch=lambda: x * x * 3.0)
        return (y * y).sum()

    check(f, np.array(taken), R.standard_normal(3), R.standard_normal(3), wrt=("x", "w"))


def test_nested_if() -> None:
    """A branch may hold branches."""

    def f(s: Any, x: Any) -> Any:
        def inner() -> Any:
            return ops.If(s > 2.0, then_branch=lambda: ops.Exp(x), else_branch=lambda: ops.Sin(x))

        return ops.If(s > 0.0, then_branch=inner, else_branch=lambda: x * 1.0).sum()

    for s in (3.0, 1.0, -1.0):
        check(f, np.array(s), R.standard_normal(3), wrt=("x",))


@pytest.mark.parametrize("direction", [0, 1])
def test_scan(direction: int) -> None:
    """States, slices, stacked results and captured weights all get theirs, in either direction."""

    def f(h: Any, xs: Any, w: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = ops.Tanh(h @ w + x)
            return h, h * x

        last, ys = ops.Scan(
            h, xs, body=body, num_scan_inputs=1, scan_input_directions=[direction], scan_output_directions=[direction]
        )
        return (last * last).sum() + (ys * np.arange(1.0, 7.0).reshape(3, 2)).sum()

    check(f, R.standard_normal(2), R.standard_normal((3, 2)), R.standard_normal((2, 2)), wrt=("h", "xs", "w"))


def test_scan_along_another_axis() -> None:
    """Slices and results along axis 1."""

    def f(h: Any, xs: Any) -> Any:
        last, ys = ops.Scan(
            h, xs, body=lambda h, x: (h * x, ops.Sin(h)), num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1]
        )
        return last.sum() + (ys * ys).sum()

    check(f, R.standard_normal(2), R.standard_normal((2, 4)), wrt=("h", "xs"))


def test_loop() -> None:
    """A loop of a known number of turns, with its counter, states, stacked results and a captured weight."""

    def f(h: Any, w: Any) -> Any:
        def body(i: Any, goes_on: Any, h: Any) -> Any:
            h = ops.Tanh(h * w) + i.astype(np.float64)
            return goes_on, h, h * h

        last, ys = ops.Loop(np.array(3, np.int64), np.array(True), h, body=body)
        return last.sum() + (ys * 0.5).sum()

    check(f, R.standard_normal(2), R.standard_normal(2), wrt=("h", "w"))


def test_loop_until() -> None:
    """A loop whose number of turns depends on data goes back as many turns as it took."""

    def f(h: Any) -> Any:
        def body(i: Any, goes_on: Any, h: Any) -> Any:
            h = h * 1.5
            return h.sum() < 20.0, h

        return (ops.Loop(np.array(50, np.int64), np.array(True), h, body=body) ** 2.0).sum()

    check(f, np.array([0.5, 0.7]), wrt=("h",))


def test_a_model_with_a_scan_is_trained() -> None:
    """A recurrent net written as a Scan learns."""

    class Net(xrt.Graph):
        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            self.w = (rng.standard_normal((3, 8)) * 0.5).astype(np.float32)
            self.r = (rng.standard_normal((8, 8)) * 0.3).astype(np.float32)
            self.o = (rng.standard_normal((8, 1)) * 0.3).astype(np.float32)

        def build(self, xs: Any) -> Any:
            def body(h: Any, x: Any) -> Any:
                h = ops.Tanh(x @ self.w + h @ self.r)
                return h, h

            start = np.zeros((16, 8), np.float32)
            return ops.Scan(start, xs, body=body, num_scan_inputs=1)[0] @ self.o

    rng = np.random.default_rng(1)
    xs = rng.standard_normal((5, 16, 3)).astype(np.float32)
    target = xs[:, :, :1].sum(0)
    from xrt_core.training import Adam, TrainModule

    t = TrainModule(Net(), loss="mse", optimizer=Adam(2e-2), engine="host")
    losses = [float(t.step(xs=xs, target=target)) for _ in range(40)]
    assert set(t.variables) == {"w", "r", "o"}
    assert losses[-1] < 0.2 * losses[0]


def recurrent_file(kind: str) -> onnx.ModelProto:
    """h = tanh(x w + h r) over the rows of xs, then h o: as a Scan or a Loop whose body declares no shapes, as a Loop
    that appends every h to a list, or written out for three rows."""
    rng = np.random.default_rng(0)
    shapes = {"w": (3, 8), "r": (8, 8), "o": (8, 1)}
    data = [numpy_helper.from_array((rng.standard_normal(s) * 0.4).astype(np.float32), n) for n, s in shapes.items()]
    node = helper.make_node

    def info(name: str, shape: Any = None, dtype: int = 1) -> Any:
        return helper.make_tensor_value_info(name, dtype, shape)

    def cell(x: str, h: str, new: str) -> list[Any]:
        return [
            node("MatMul", [x, "w"], [f"{new}a"]), node("MatMul", [h, "r"], [f"{new}b"]),
            node("Add", [f"{new}a", f"{new}b"], [f"{new}c"]), node("Tanh", [f"{new}c"], [new]),
        ]  # fmt: skip

    if kind == "Scan":
        body = helper.make_graph(cell("x", "h", "n"), "body", [info("h"), info("x")], [info("n")])
        nodes = [node("Scan", ["h0", "xs"], ["last"], body=body, num_scan_inputs=1)]
    elif kind in ("Loop", "List"):
        inner = [node("Gather", ["xs", "i"], ["x"]), *cell("x", "h", "n"), node("Identity", ["go"], ["on"])]
        counter, results = [info("i", [], 7), info("go", [], 9), info("h")], [info("on", None, 9), info("n")]
        data.append(numpy_helper.from_array(np.array(3, np.int64), "turns"))
        if kind == "List":
            inner.append(node("SequenceInsert", ["l", "n"], ["l2"]))
            counter.append(helper.make_tensor_sequence_value_info("l", 1, None))
            results.append(helper.make_tensor_sequence_value_info("l2", 1, None))
        body = helper.make_graph(inner, "body", counter, results)
        nodes = [node("Loop", ["turns", "", "h0"], ["last"], body=body)]
        if kind == "List":
            data.append(numpy_helper.from_array(np.array(2, np.int64), "second"))
            nodes = [
                node("SequenceEmpty", [], ["none"]),
                node("Loop", ["turns", "", "h0", "none"], ["", "all"], body=body),
                node("ConcatFromSequence", ["all"], ["stacked"], axis=1, new_axis=1),
                node("Gather", ["stacked", "second"], ["last"], axis=1),
            ]
    else:
        nodes, before = [], "h0"
        for t, after in enumerate(("h1", "h2", "last")):
            data.append(numpy_helper.from_array(np.array(t, np.int64), f"t{t}"))
            nodes += [node("Gather", ["xs", f"t{t}"], [f"x{t}"]), *cell(f"x{t}", before, after)]
            before = after
    graph = helper.make_graph(
        [*nodes, node("MatMul", ["last", "o"], ["y"])], "recurrent", [info("h0", ["n", 8]), info("xs", ["t", "n", 3])],
        [info("y", ["n", 1])], data,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *(("Scan", "host"), ("Loop", "host"), ("List", "host"), ("Loop", "xla"), ("List", "xla")),
        pytest.param("Scan", "xla", marks=pytest.mark.nightly),
    ],
)
def test_a_file_with_a_body_is_trained(kind: str, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that the body of a Scan or Loop captures learn as in the file without it; nothing is warned of."""
    if engine == "xla":
        pytest.importorskip("xrt_xla")
    from xrt_core.training import SGD, TrainModule

    rng = np.random.default_rng(1)
    xs = rng.standard_normal((3, 4, 3)).astype(np.float32)
    found = []
    for made, by in ((recurrent_file(kind), engine), (recurrent_file(""), "host")):
        t = TrainModule(made, loss="mse", optimizer=SGD(0.1), engine=by)
        for _ in range(3):
            t.step(h0=np.ones((4, 8), np.float32), xs=xs, target=xs[:, :, :1].sum(0))
        found.append(t.parameters())
    assert set(found[0]) == {"w", "r", "o"}
    for name, array in found[0].items():
        np.testing.assert_allclose(array, found[1][name], rtol=1e-4, atol=1e-6)
    assert not caplog.records


def test_initializers_that_are_inputs_are_trained() -> None:
    """Files of IR 3 list their weights among the inputs: a step does not ask for them, and they learn."""
    from xrt_core.training import SGD, TrainModule

    weight = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    x, w, y = (helper.make_tensor_value_info(n, 1, s) for n, s in (("x", ["n", 3]), ("w", [3, 2]), ("y", ["n", 2])))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "old", [x, w], [y], [weight])
    t = TrainModule(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3),
        loss="mse", optimizer=SGD(0.1), engine="host",
    )  # fmt: skip
    data = np.ones((4, 3), np.float32)
    losses = [float(t.step(x=data, target=np.zeros((4, 2), np.float32))) for _ in range(2)]
    assert t.variables == ("w",)
    assert losses[1] < losses[0]
    assert [v.name for v in t.graph().inputs] == ["x"]
