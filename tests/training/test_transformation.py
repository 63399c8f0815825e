"""Gradient transformations of optax as optimizers: stand-ins of their form and, where it is installed, optax's own."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import TrainingError
from xrt_core.training import Momentum, TrainModule

jax = pytest.importorskip("jax")

F = np.float32
R = np.random.default_rng(0)
X, Y = R.standard_normal((6, 4)).astype(F), R.standard_normal((6, 2)).astype(F)


class Net(xrt.Graph):
    """A line."""

    def __init__(self) -> None:
        self.w = np.random.default_rng(1).standard_normal((4, 2)).astype(F)
        self.b = np.zeros(2, F)

    def build(self, x: Any) -> Any:
        return x @ self.w + self.b


class GradientTransformation(NamedTuple):
    """The form of optax's."""

    init: Any
    update: Any


def momentum(rate: float, decay: float) -> GradientTransformation:
    """Gradient descent with momentum, and a count, as optax would write it."""

    def init(params: Any) -> Any:
        return {"trace": jax.tree.map(jax.numpy.zeros_like, params), "count": jax.numpy.zeros((), "int32")}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        trace = jax.tree.map(lambda g, t: g + decay * t, grads, state["trace"])
        return jax.tree.map(lambda t: -rate * t, trace), {"trace": trace, "count": state["count"] + 1}

    return GradientTransformation(init, update)


def made(optimizer: Any, engine: str = "host", **options: Any) -> TrainModule:
    """A training of the line."""
    return TrainModule(Net(), loss="mse", optimizer=optimizer, engine=engine, prune=False, **options)


@pytest.mark.parametrize("engine", ["host", pytest.param("xla", marks=pytest.mark.nightly)])
def test_it_trains_as_the_same_optimizer(engine: str) -> None:
    """Also over micro-batches, from a copy, and from a state that was saved."""
    if engine == "xla":
        pytest.importorskip("xrt_xla")
    t, own = made(momentum(0.1, 0.9), engine, accumulate=2), made(Momentum(0.1, 0.9), accumulate=2)
    for _ in range(4):
        np.testing.assert_allclose(t.step(X, Y), own.step(X, Y), rtol=1e-5)
    state = t.state_dict()
    assert state["optimizer/optax/0"] == 2  # the count: leaves come in the order of their names
    other = made(momentum(0.1, 0.9), engine, accumulate=2)
    other.load_state_dict(state)
    copied = copy.deepcopy(t)
    for _ in range(2):
        losses = [m.step(X, Y) for m in (t, other, copied)]
        np.testing.assert_allclose(losses, own.step(X, Y), rtol=1e-5)
    for name, array in own.parameters().items():
        np.testing.assert_allclose(t.parameters()[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
@pytest.mark.parametrize("engine", ["host", pytest.param("xla", marks=pytest.mark.nightly)])
def test_a_step_that_is_not_finite_is_left_out(engine: str, scale: Any, accumulate: int) -> None:
    """It is counted, and the run is that without it: the variables, and the state of the transformation."""
    if engine == "xla":
        pytest.importorskip("xrt_xla")
    options = {"loss_scale": scale, "accumulate": accumulate}
    t, without = (made(momentum(0.1, 0.9), engine, **options) for _ in range(2))
    own = made(Momentum(0.1, 0.9), **options)
    wrong = X.copy()
    wrong[0, 0] = np.inf
    for k in range(6):
        if k == 3:
            before = t.state_dict()
            for _ in range(accumulate):
                t.step(wrong, Y)
                own.step(wrong, Y)
            after = t.state_dict()
            changed = {n for n, a in before.items() if not np.array_equal(a, after[n])} - {"training/examples"}
            assert changed - {"training/skipped", "training/finite"} <= (
                {"training/loss_scale", "training/finite_steps"} if scale == "dynamic" else set()
            )
            assert t.step_count == 3
        for _ in range(accumulate):
            for m in (t, without, own):
                m.step(X, Y)
    state, other = t.state_dict(), without.state_dict()
    assert state["training/skipped"] == own.state_dict()["training/skipped"] == 1
    assert state["optimizer/optax/0"] == 6
    for name in ("w", "b", "optimizer/optax/1", "optimizer/optax/2"):
        np.testing.assert_array_equal(state[name], other[name])
    for name, array in own.parameters().items():
        np.testing.assert_allclose(t.parameters()[name], array, rtol=1e-5, atol=1e-6)
    if scale == "dynamic":
        assert state["training/loss_scale"] == own.state_dict()["training/loss_scale"]


def test_float16_is_trained_in_float32() -> None:
    """Scaled by itself; the variables and the state of the transformation are float32, the model's type stays."""

    class Narrow(xrt.Graph):
        def __init__(self) -> None:
            self.w = np.ones((1, 1), np.float16)

        def build(self, x: Any) -> Any:
            return (x @ self.w).sum()

    t = TrainModule(Narrow(), optimizer=momentum(1e-5, 0.0), engine="host")
    for _ in range(1000):
        t.step(np.ones((1, 1), np.float16))
    state = t.state_dict()
    np.testing.assert_allclose(state["w"], 0.99, atol=5e-5)
    assert state["training/loss_scale"] > 1
    assert state["w"].dtype == state["optimizer/optax/1"].dtype == F
    assert t.parameters()["w"].dtype == np.float16


@pytest.mark.slow
def test_a_transformation_that_fails_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step overwrote is gone: it says so, as does each further call until a state is loaded."""
    pytest.importorskip("xrt_xla")
    t, reference = made(momentum(0.1, 0.9), "xla", accumulate=2, donate=True), made(Momentum(0.1, 0.9), accumulate=2)
    for _ in range(5):
        np.testing.assert_allclose(t.step(X, Y), reference.step(X, Y), rtol=1e-5)
    saved = t.state_dict()

    def fails(*arguments: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(t._optimizer, "_apply", fails)
    with pytest.raises(TrainingError, match="they are lost: none left"):
        t.step(X, Y)
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="they are lost"):
        t.step(X, Y)
    t.load_state_dict(saved)
    for _ in range(3):
        np.testing.assert_allclose(t.step(X, Y), reference.step(X, Y), rtol=1e-5)


def test_a_transformation_that_fails_costs_no_small_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not donated: the step has not happened."""
    pytest.importorskip("xrt_xla")
    t = made(momentum(0.1, 0.9), "xla")
    for _ in range(2):
        t.step(X, Y)
    saved = t.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(t._optimizer, "_apply", None)
        with pytest.raises(TypeError):
            t.step(X, Y)
    assert all(np.array_equal(a, saved[n]) for n, a in t.state_dict().items())
    t.step(X, Y)
    assert t.step_count == 3


def test_float64_is_trained_in_float64() -> None:
    """As by XRT's own optimizer, and its state is loaded again."""

    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = self.w.astype(np.float64), self.b.astype(np.float64)

    both = momentum(0.125, 0.5), Momentum(0.125, 0.5)
    t, own = (TrainModule(Wide(), loss="mse", optimizer=o, engine="host") for o in both)
    x, y = X.astype(np.float64), Y.astype(np.float64)
    for _ in range(3):
        np.testing.assert_allclose(t.step(x, y), own.step(x, y), rtol=1e-12)
    state = t.state_dict()
    assert state["w"].dtype == state["optimizer/optax/2"].dtype == np.float64
    t.load_state_dict(state)


@pytest.mark.slow
def test_optax() -> None:
    """A chain with a schedule, against the same by hand."""
    optax = pytest.importorskip("optax")
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.lion(optax.cosine_decay_schedule(1e-2, 10)))
    t = made(chain)
    params = {n: jax.numpy.asarray(a) for n, a in t.parameters().items()}
    state = chain.init(params)

    def loss(p: Any) -> Any:
        return ((X @ p["w"] + p["b"] - Y) ** 2).mean()

    for _ in range(4):
        t.step(X, Y)
        updates, state = chain.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    for name, array in params.items():
        np.testing.assert_allclose(t.parameters()[name], array, rtol=1e-5, atol=1e-6)
