"""Training on Toy: forward, backward and update of a small network, all by Toy's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core.training import TrainModule


class Mlp(xrt.Graph):
    """Two layers, a squared error, and SGD."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w = rng.standard_normal((4, 6), dtype=np.float32)
        self.v = rng.standard_normal((6, 2), dtype=np.float32)
        self.add_optimizer(xrt.optim.SGD(0.05))

    def build(self, x: Any, target: Any) -> Any:
        """The prediction; the loss is its mean squared error."""
        y = xrt.ops.Relu(x @ self.w) @ self.v
        error = y - target
        (error * error).mean().backward()
        return y


def test_a_network_trains_wholly_on_toy() -> None:
    """Every node of the step is Toy's, and the losses are the host's."""
    data = {
        "x": np.random.default_rng(1).standard_normal((3, 4), dtype=np.float32),
        "target": np.zeros((3, 2), np.float32),
    }
    losses = {}
    for engine in ("toy", "host"):
        module = TrainModule(Mlp(), engine=engine)
        losses[engine] = [float(module.step(**data)) for _ in range(3)]
        if engine == "toy":
            assert module.explain().node_share == 1.0

    np.testing.assert_allclose(losses["toy"], losses["host"], rtol=1e-4)
    assert losses["toy"][-1] < 0.7 * losses["toy"][0]
