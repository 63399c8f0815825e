"""Losses over 100 steps: the host, XLA, hybrid plans, and the same models by hand in JAX and PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.training import peers
from tests.training.peers import Model

STEPS = 100
MODELS = {
    "mlp": peers.mlp,
    "cnn": peers.cnn,
    "lstm": functools.partial(peers.recurrent, "LSTM", steps=4, count=64),
    "transformer": functools.partial(peers.bert, layers=1, width=16, heads=2, tokens=8, count=4, vocabulary=32),
    "bert": functools.partial(peers.bert, layers=4, width=32, heads=4, tokens=16, count=4, vocabulary=64),
}
MARKS = {
    "cnn": [pytest.mark.slow], "lstm": [pytest.mark.nightly], "transformer": [pytest.mark.slow],
    "bert": [pytest.mark.nightly],
}  # fmt: skip
EVERY = [pytest.param(n, marks=MARKS.get(n, [])) for n in MODELS]


@functools.cache
def model(name: str) -> Model:
    """One of the models, made once."""
    return MODELS[name]()


@functools.cache
def on_host(name: str) -> np.ndarray:
    """The losses of XRT's host, the reference."""
    step, _ = peers.by_xrt(model(name), "host")
    return np.array(list(peers.losses(step, model(name), STEPS)))


def agrees(name: str, step: Callable[[Any], Any]) -> None:
    """Hold 100 losses against the host's, at every step."""
    found = np.array(list(peers.losses(step, model(name), STEPS)))
    np.testing.assert_allclose(found, on_host(name), rtol=1e-4)
    assert found[-10:].mean() < 0.98 * found[:10].mean()  # it learns, so that the comparison says something


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_xla(name: str) -> None:
    """The whole step through XLA."""
    pytest.importorskip("jax")
    agrees(name, peers.by_xrt(model(name), "xla")[0])


@pytest.mark.tiny_clusters  # both engines are to have a part
@pytest.mark.parametrize("name", EVERY)
def test_xla_and_onnxruntime(name: str) -> None:
    """The forward pass by ONNX Runtime, the backward pass and the updates by XLA."""
    pytest.importorskip("jax")
    pytest.importorskip("onnxruntime")
    step, module = peers.by_xrt(model(name), ["onnxruntime", "xla"])
    agrees(name, step)
    assert {x.engine for x in module._last.plan.launches} == {"onnxruntime", "xla"}


@pytest.mark.parametrize("name", EVERY)
def test_xla_and_the_host(name: str) -> None:
    """Some operators of the way forward, and so their gradients, are kept on the host."""
    pytest.importorskip("jax")
    import xrt_core as xrt

    whole = model(name)
    inner = type(whole.xrt(whole.parameters))

    class Marked(inner):  # type: ignore[misc, valid-type]
        def norm(self, x: Any, part: str) -> Any:
            with xrt.power_by_engine(None):
                return super().norm(x, part)

        def build(self, x: Any, labels: Any) -> Any:
            if hasattr(inner, "norm"):
                return super().build(x, labels)
            with xrt.power_by_engine(None):
                x = x * 1.0
            return super().build(x, labels)

    def marked(parameters: peers.Parameters) -> Any:
        graph = whole.xrt(parameters)
        graph.__class__ = Marked
        return graph

    step, module = peers.by_xrt(Model(**{**whole.__dict__, "xrt": marked}), "xla")
    agrees(name, step)
    assert any(s.label.split()[0] in ("Mul", "LayerNormalization", "BatchNormalization")
               for s in module._last.plan.steps)  # fmt: skip
    assert module._last.plan.launches


@pytest.mark.nightly  # holds the peer of the benchmarks, which seldom changes
@pytest.mark.parametrize("name", EVERY)
def test_jax(name: str) -> None:
    """Written by hand in JAX, jitted, with the state donated."""
    pytest.importorskip("jax")
    agrees(name, peers.by_jax(model(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_torch(name: str) -> None:
    """Written by hand in PyTorch."""
    pytest.importorskip("torch")
    agrees(name, peers.by_torch(model(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_recomputed_and_accumulated(name: str) -> None:
    """The same numbers with less memory, and with one micro-batch to an update."""
    pytest.importorskip("jax")
    agrees(name, peers.by_xrt(model(name), "xla", recompute=r"scores|Gelu|Softmax|MatMul")[0])
    agrees(name, peers.by_xrt(model(name), "xla", donate=False)[0])
