"""A step happens whole or not at all; a state that does not fit never trains; what is learnt; numbers that fit."""

from __future__ import annotations

import logging
import pathlib
import signal
import threading
import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import xrt_core as xrt
from tests.training.test_state import engine_or_skip
from xrt_core.errors import CheckpointError, GradientError, OptionError
from xrt_core.frontends import ops
from xrt_core.training import SGD, Adam, LossScale, TrainModule


class Net(xrt.Graph):
    """Two layers, from 5 numbers to one."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w1, self.b1 = (rng.standard_normal((5, 8)) * 0.5).astype(np.float32), np.zeros(8, np.float32)
        self.w2 = (rng.standard_normal((8, 1)) * 0.5).astype(np.float32)

    def build(self, x: Any) -> Any:
        return ops.Tanh(x @ self.w1 + self.b1) @ self.w2


def batch(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points, and a number for each."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 5)).astype(np.float32), rng.standard_normal((count, 1)).astype(np.float32)


class Interrupt(BaseException):
    """What the handler raises; as KeyboardInterrupt, no Exception."""


def interrupted(count: int, step: Any) -> int:
    """Call `step` while SIGALRM comes at random times, until it has been interrupted `count` times; completed steps."""
    rng, came, whole = np.random.default_rng(0), 0, 0

    def handler(number: int, frame: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        start = time.perf_counter()
        step()
        usual = time.perf_counter() - start
        while came < count:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(rng.uniform(0, 1.5 * usual), 1e-5))
                step()
                whole += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                came += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return whole


# one that comes within a callback of the interpreter (of its garbage collection, of a weak reference) is reported there
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("count", [30, pytest.param(10_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("engine", "donate"), [("xla", True), ("xla", False), ("host", True)])
def test_interrupts(engine: str, donate: bool, count: int) -> None:
    """After any number of interrupts the state is that of the same number of undisturbed steps."""
    x, y = batch(16)
    made = [
        TrainModule(Net(), loss="mse", optimizer=Adam(0.01), engine=engine_or_skip(engine), donate=donate)
        for _ in range(2)
    ]
    disturbed, calm = made
    for t in made:
        t.step(x=x, target=y)
    interrupted(count, lambda: disturbed.step(x=x, target=y))
    if engine == "xla":
        jax = pytest.importorskip("jax")
        assert not jax.config.jax_enable_x64, "a call that was interrupted left its setting behind"
    while calm.step_count < disturbed.step_count:
        calm.step(x=x, target=y)
    for (name, a), b in zip(calm.state_dict().items(), disturbed.state_dict().values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_handlers_are_called_after_the_step_and_elsewhere_never() -> None:
    """Each signal's handler runs once the step is whole, and is the program's again; another thread holds nothing."""
    from xrt_core.training.interrupts import held_back

    order: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: order.append("handler"))
    mine = signal.getsignal(signal.SIGUSR1)
    try:
        with held_back():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            order.append("step")
        assert order == ["step", "handler"]
        assert signal.getsignal(signal.SIGUSR1) is mine

        def elsewhere() -> None:
            with held_back():
                order.append("thread" if signal.getsignal(signal.SIGUSR1) is mine else "held")

        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join()
        assert order[-1] == "thread"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_every_handler_is_called() -> None:
    """Also behind one that raises."""
    from xrt_core.training.interrupts import held_back

    order: list[str] = []

    def first(number: int, frame: Any) -> None:
        order.append("first")
        raise Interrupt

    def both() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR1, first), signal.signal(signal.SIGUSR2, lambda *a: order.append("second"))
    try:
        with pytest.raises(Interrupt), held_back():
            both()
        assert sorted(order) == ["first", "second"]
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])


def test_a_handler_that_raises_as_it_is_given_back_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal may come between two of them being given back."""
    from xrt_core.training import interrupts

    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = [signal.signal(n, lambda *a: None) for n in numbers]
    mine = [signal.getsignal(n) for n in numbers]
    give_back, raised = signal.signal, 0

    def raising(number: int, handler: Any) -> None:
        nonlocal raised
        give_back(number, handler)
        if handler in mine and not raised:
            raised += 1
            raise Interrupt

    try:
        monkeypatch.setattr(interrupts, "_set_handler", raising)
        with pytest.raises(Interrupt), interrupts.held_back():
            pass
        assert [signal.getsignal(n) for n in numbers] == mine
    finally:
        for n, handler in zip(numbers, before, strict=True):
            signal.signal(n, handler)


# --- states that do not fit ---


def test_a_state_that_does_not_fit_never_trains(tmp_path: pathlib.Path) -> None:
    """Of another graph it is refused when it is loaded, or at each step until one is loaded that fits."""
    x, y = batch(8)
    t = TrainModule(Net(), loss="mse", optimizer=SGD(0.1), engine="host")
    t.step(x=x, target=y)
    good = t.state_dict()
    fresh = TrainModule(Net(), loss="mse", optimizer=SGD(0.1), engine="host")
    with pytest.raises(CheckpointError, match="no array 'stranger'"):
        fresh.load_state_dict({**good, "stranger": np.zeros(2, np.float32)})
    name = next(n for n in good if not n.startswith(("training/", "optimizer/")))
    with pytest.raises(CheckpointError, match="the state's"):
        fresh.load_state_dict({**good, name: np.zeros(99, np.float32)})
    with pytest.raises(CheckpointError, match="none of the arrays"):
        fresh.load_state_dict({n: a for n, a in good.items() if n.startswith("training/")})
    fresh.load_state_dict({n: a for n, a in good.items() if n != name})  # what is missing is known at a step
    for _ in range(2):
        with pytest.raises(CheckpointError, match="missing"):
            fresh.step(x=x, target=y)
    fresh.load_state_dict(good)
    fresh.step(x=x, target=y)
    t.step(x=x, target=y)
    np.testing.assert_array_equal(fresh.state_dict()[name], t.state_dict()[name])


# --- what is learnt ---


def regression(prologue: bool = True) -> Any:
    """(x - mean) / deviation @ w + b, b of one element, scores masked and scaled by a number."""
    arrays = {
        "mean": np.full(4, 0.5, np.float32), "deviation": np.full(4, 2.0, np.float32),
        "w": np.ones((4, 3), np.float32), "mask": np.array([0, 0, -1e9], np.float32), "scale": np.float32(0.5),
        "wt": np.ones((1, 3), np.float32), "b": np.zeros(1, np.float32), "shift": np.zeros(3, np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["c"]),
        helper.make_node("Div", ["c", "deviation"], ["n"]),
        helper.make_node("MatMul", ["n", "w"], ["s"]),
        helper.make_node("Add", ["s", "mask"], ["m"]),
        helper.make_node("Mul", ["s", "scale"], ["h"]),
        helper.make_node("Add", ["h", "shift"], ["k"]),
        helper.make_node("Transpose", ["wt"], ["wtt"]),
        helper.make_node("MatMul", ["k", "wtt"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["y"]),
        helper.make_node("Softmax", ["m"], ["q"]),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    outs = [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, None) for o in ("y", "q")]
    initial = [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]
    return helper.make_model(
        helper.make_graph(nodes, "g", [x], outs, initial), opset_imports=[helper.make_opsetid("", 18)]
    )


def test_roles_decide_what_is_learnt() -> None:
    """Weights, also transposed, shifts and a bias of one element; no mean or deviation, no mask, no scaling number."""
    t = TrainModule(regression(), loss=lambda y, q: (y * y).mean(), optimizer=SGD(0.1), engine="host")
    assert sorted(t.variables) == ["b", "shift", "w", "wt"]
    t.step(x=np.ones((2, 4), np.float32))
    assert t.parameters()["b"][0] != 0


def test_what_a_weight_is_computed_from_is_learnt() -> None:
    """Direction and length of a normalised weight, but not the number that keeps the length from 0, nor the scale of a
    quantised one; a table at constant places."""
    rng = np.random.default_rng(0)
    arrays = {
        "v": rng.standard_normal((4, 3)).astype(np.float32), "g": np.full((1, 3), 2, np.float32),
        "axes": np.array([0]), "epsilon": np.array([1e-6], np.float32), "q": np.ones((3, 3), np.int8),
        "scale": np.array([0.1, 0.2, 0.3], np.float32),
    }  # fmt: skip
    arrays |= {"table": rng.standard_normal((5, 4)).astype(np.float32), "places": np.array([0])}
    nodes = [
        helper.make_node("Gather", ["table", "places"], ["p"]),
        helper.make_node("Add", ["x0", "p"], ["x"]),
        helper.make_node("ReduceL2", ["v", "axes"], ["l"]),
        helper.make_node("Add", ["l", "epsilon"], ["m"]),
        helper.make_node("Div", ["v", "m"], ["d"]),
        helper.make_node("Mul", ["d", "g"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["u"], axis=1),
        helper.make_node("MatMul", ["h", "u"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    t = TrainModule(model, loss=lambda y: (y * y).mean(), optimizer=SGD(0.1), engine="host")
    assert sorted(t.variables) == ["g", "table", "v"]
    t.step(x0=np.ones((2, 4), np.float32))
    assert not np.array_equal(t.parameters()["g"], arrays["g"])


@pytest.mark.parametrize("reshaped", [True, False])
def test_the_inner_part_of_a_group_normalisation_is_not_learnt(reshaped: bool) -> None:
    """As PyTorch's exporters write it: an InstanceNormalization of ones and zeros between two changes of shape. One by
    itself is learnt."""
    groups, ones = (2 if reshaped else 4), np.ones(4, np.float32)
    arrays = {
        "w": np.eye(4, dtype=np.float32), "one": np.ones(groups, np.float32), "none": np.zeros(groups, np.float32),
        "apart": np.array([0, 2, 2]), "back": np.array([0, 4, 1]), "scale": ones, "shift": 0 * ones,
    }  # fmt: skip
    steps = [("MatMul", ["x", "w"]), ("Unsqueeze", ["axis"]), ("Reshape", ["apart"]),
             ("InstanceNormalization", ["one", "none"]), ("Reshape", ["back"]), ("Squeeze", ["axis"]),
             ("Mul", ["scale"]), ("Add", ["shift"])]  # fmt: skip
    arrays["axis"] = np.array([2])
    nodes: list[Any] = []
    for op, others in steps if reshaped else [s for s in steps if s[0] != "Reshape"]:
        given = others if op == "MatMul" else [nodes[-1].output[0], *others]
        nodes.append(helper.make_node(op, given, [f"v{len(nodes)}"]))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info(nodes[-1].output[0], onnx.TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    t = TrainModule(model, loss="mse", optimizer=SGD(0.1), engine="host")
    assert sorted(t.variables) == sorted([*([] if reshaped else ["none", "one"]), "scale", "shift", "w"])
    t.step(x=np.ones((2, 4), np.float32), target=np.ones((2, 4), np.float32))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("w", ["w"]), ("w*", ["w", "wt"]), (["shift", "b"], ["b", "shift"]), ("mean", ["mean"])],
)
def test_patterns_choose(given: Any, expected: list[str]) -> None:
    """A text is one name or pattern, not letters; it may name what is not learnt by default."""
    t = TrainModule(regression(), loss=0, optimizer=SGD(0.1), engine="host", trainable=given)
    assert sorted(t.variables) == expected
    with pytest.raises(GradientError, match="no float constant 'nothing\\*'"):
        TrainModule(regression(), loss=0, optimizer=SGD(0.1), engine="host", trainable="nothing*")


def new_layers(how: str) -> Any:
    """Two new layers, normalised by their batches, and a matrix that both multiply by. how: their scales, shifts,
    means and variances are "own" constants, an "identity" of the first one, or "shared" with it, as exporters write
    what is equal."""
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    arrays = {"g": ones, "z": zeros, "w": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)}
    names = [["g", "z", "mean0", "variance0"], ["g1", "z1", "mean1", "variance1"]]
    nodes, x = [], "x"
    for row in names:
        for n in row:
            source = "g" if n[0] in "gv" else "z"
            if how == "own":
                arrays[n] = arrays[source].copy()
            elif n != source and how == "identity":
                nodes.append(helper.make_node("Identity", [source], [n]))
        own = [("g" if n[0] in "gv" else "z") for n in row] if how == "shared" else row
        k = len(nodes)
        nodes.append(helper.make_node("BatchNormalization", [x, *own], [f"n{k}"], f"norm{k}"))
        nodes.append(helper.make_node("MatMul", [f"n{k}", "w"], [f"m{k}"], f"product{k}"))
        nodes.append(helper.make_node("Tanh", [f"m{k}"], [x := f"t{k}"]))
    out = helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, ["n", 4])
    entry = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    initial = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    return helper.make_model(
        helper.make_graph(nodes, "new", [entry], [out], initial), opset_imports=[helper.make_opsetid("", 18)]
    )


@pytest.mark.parametrize("how", ["identity", "shared"])
def test_what_is_equal_by_chance_is_not_learnt_as_one(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of constants of equal elements each layer has its own, as if the exporter had written them; matrices stay one."""
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((6, 4)).astype(np.float32) for _ in range(2))
    with caplog.at_level(logging.WARNING, "xrt"):
        t, own = (TrainModule(new_layers(h), loss="mse", optimizer=SGD(0.5), engine="host") for h in (how, "own"))
    assert len(t.variables) == len(own.variables) == 9
    assert [float(t.step(x, y)) for _ in range(4)] == [float(own.step(x, y)) for _ in range(4)]
    ends = [sorted(map(bytes, trainer.parameters().values())) for trainer in (t, own)]
    assert ends[0] == ends[1]
    said = [r.message for r in caplog.records if "each layer learns its own" in r.message]
    assert len(said) == (how == "shared")
    assert all("g (4 layers), z (4 layers)" in m for m in said)


# --- numbers ---


def test_mse_of_other_shapes_is_refused() -> None:
    """(N,) against (N, 1) would be broadcast; the error says how to reshape. Integers are cast."""
    x, y = batch(8)
    t = TrainModule(Net(), loss="mse", optimizer=SGD(0.1), engine="host")
    with pytest.raises(GradientError, match=r"target.reshape\("):
        t.step(x=x, target=y.reshape(-1))
    t.step(x=x, target=np.ones(y.shape, np.int64))
    assert t.training_graph().outputs[0].dtype == np.float32


class Overflows(xrt.Graph):
    """Its gradient is infinite where x is 0."""

    def __init__(self) -> None:
        self.w = xrt.Variable(np.ones(2, np.float32))

    def build(self, x: Any) -> Any:
        return ops.Sqrt(x * self.w).sum()


@pytest.mark.parametrize("scale", [4.0, 1, "dynamic", LossScale(8.0)])
def test_a_step_of_infinite_gradients_is_left_out(scale: Any) -> None:
    """Under any scale: the variables stay, and the state counts the step."""
    t = TrainModule(Overflows(), optimizer=SGD(0.1), engine="host", loss_scale=scale)
    t.step(x=np.ones(2, np.float32))
    before = t.state_dict()
    t.step(x=np.zeros(2, np.float32))
    after = t.state_dict()
    np.testing.assert_array_equal(after["w"], before["w"])
    assert (after["training/skipped"], after["training/step"]) == (1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrainModule(Overflows(), optimizer=SGD(0.1), engine="host", loss_scale=np.inf),
        lambda: TrainModule(Overflows(), optimizer=SGD(0.1), engine="host", loss_scale=np.nan),
        lambda: LossScale(backoff=2.0),
        lambda: LossScale(growth=1.0),
        lambda: LossScale(initial=-1.0),
        lambda: LossScale(interval=0),
        lambda: SGD(True),
        lambda: SGD(np.array([0.1, 0.2])),
    ],
)
def test_numbers_out_of_range(make: Any) -> None:
    """A scale that would not move as it should, a rate that is no number."""
    with pytest.raises(OptionError):
        make()


def test_rates_of_other_libraries() -> None:
    """Scalars of NumPy and JAX are rates, given or from a schedule."""
    x, y = batch(8)
    rates: list[Any] = [0.1, np.float32(0.1), np.array(0.1), lambda step: np.array(0.1, np.float32)]
    try:
        import jax

        rates += [jax.numpy.float32(0.1), lambda step: jax.numpy.asarray(0.1)]
    except ImportError:
        pass
    found = []
    for rate in rates:
        t = TrainModule(Net(), loss="mse", optimizer=SGD(rate), engine="host")
        t.step(x=x, target=y)
        found.append(t.parameters())
    for other in found[1:]:
        for name, a in found[0].items():
            np.testing.assert_allclose(other[name], a, rtol=1e-6)


def test_float64_does_not_widen_the_step(caplog: pytest.LogCaptureFixture) -> None:
    """It is cast to the variables' float32, with one warning."""
    x, y = batch(8)
    t = TrainModule(Net(), loss="mse", optimizer=SGD(0.1), engine="host")
    with caplog.at_level(logging.WARNING, "xrt"):
        for _ in range(2):
            t.step(x=x.astype(np.float64), target=y.astype(np.float64))
    assert t.training_graph().outputs[0].dtype == np.float32
    assert sum("is float64 and is cast" in r.message for r in caplog.records) == 1


def test_loaded_parameters_are_seen() -> None:
    """A module of the same graph runs with them from the next call on: the usual loop of training and validation."""
    x, y = batch(8)
    net = Net()
    t = TrainModule(net, loss="mse", optimizer=SGD(0.1), engine="host")
    m = xrt.XRTModule(net, engine="host")
    for _ in range(3):
        before = m(x)
        t.step(x=x, target=y)
        net.load_parameters(t.parameters())
        after = m(x)
        assert not np.array_equal(before, after)
        np.testing.assert_array_equal(after, xrt.XRTModule(net, engine="host")(x))
    other = Net()
    other.load_parameters(net.named_parameters())  # of another graph: nothing is traced again
    traced = m._source.caller
    m(x)
    assert m._source.caller is traced
