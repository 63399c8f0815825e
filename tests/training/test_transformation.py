"""Gradient transformations of optax as optimizers: stand-ins of their form and, where it is installed, optax's own."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import OptionError
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


def test_loss_scaling_is_refused() -> None:
    """A step that is left out has no place in a transformation."""
    with pytest.raises(OptionError, match="optimizer of optax trains without loss scaling"):
        made(momentum(0.1, 0.9), loss_scale="dynamic")


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
