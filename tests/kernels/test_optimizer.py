"""Model updates against the ONNX backend tests and the specification's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.node_cases import Case, run_jax, run_numpy
from tests.kernels.single_node import node_case
from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Node

RUNS = [run_numpy, run_jax]
DOMAIN = "ai.onnx.preview.training"


def update_case(op: str, inputs: list[np.ndarray], outputs: int, **attributes: Any) -> Case:
    """A case in the training domain."""
    case = node_case(op, 1, inputs, outputs, **attributes)
    node = Node(op, case.node.inputs, case.node.outputs, attributes, domain=DOMAIN, version=1)
    return Case(op, node, inputs, [], 0, 0)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam(count: int, dtype: Any, run: Any, rng: np.random.Generator) -> None:
    """Two variables of different shapes; the bias correction starts with the first counted update."""
    shapes = [(3,), (2, 2)]
    x, g, v, h = ([np.abs(rng.standard_normal(s)).astype(dtype) for s in shapes] for _ in range(4))
    attributes = {"alpha": 0.9, "beta": 0.99, "norm_coefficient": 0.1, "norm_coefficient_post": 0.01, "epsilon": 1e-4}
    inputs = [np.array(0.1, dtype), np.array(count, np.int64), *x, *g, *v, *h]
    got = run(update_case("Adam", inputs, 6, **attributes))
    rate = 0.1 * (np.sqrt(1 - 0.99**count) / (1 - 0.9**count) if count else 1)
    for i in range(2):
        gradient = 0.1 * x[i] + g[i]
        new_v, new_h = 0.9 * v[i] + 0.1 * gradient, 0.99 * h[i] + 0.01 * gradient**2
        new_x = 0.99 * (x[i] - rate * new_v / (np.sqrt(new_h) + 1e-4))
        for found, want in zip(got[i::2], (new_x, new_v, new_h), strict=True):
            assert found.dtype == dtype
            np.testing.assert_allclose(found, want, rtol=2e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("mode", ["standard", "nesterov"])
def test_momentum(mode: str, count: int, run: Any, rng: np.random.Generator) -> None:
    """beta counts from the second update on."""
    x, g, v = (rng.standard_normal((2, 3)).astype(np.float32) for _ in range(3))
    attributes = {"alpha": 0.8, "beta": 0.5, "norm_coefficient": 0.1, "mode": mode}
    got = run(update_case("Momentum", [np.array(0.1, np.float32), np.array(count), x, g, v], 2, **attributes))
    gradient = 0.1 * x + g
    new_v = 0.8 * v + (0.5 if count else 1) * gradient
    new_x = x - 0.1 * (gradient + 0.8 * new_v if mode == "nesterov" else new_v)
    np.testing.assert_allclose(got[0], new_x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], new_v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_adagrad(run: Any, rng: np.random.Generator) -> None:
    """The rate decays with the update count."""
    x, g = (rng.standard_normal((4,)).astype(np.float32) for _ in range(2))
    h = np.ones(4, np.float32)
    inputs = [np.array(0.1, np.float32), np.array(5), x, g, h]
    got = run(update_case("Adagrad", inputs, 2, decay_factor=0.5, epsilon=1e-3))
    np.testing.assert_allclose(got[1], h + g * g, rtol=1e-6)
    np.testing.assert_allclose(got[0], x - 0.1 / 3.5 * g / (np.sqrt(h + g * g) + 1e-3), rtol=1e-5, atol=1e-6)


def test_inputs_that_do_not_divide() -> None:
    """A list of tensors that is not variables, gradients and states is refused."""
    inputs = [np.array(0.1, np.float32), np.array(0), *[np.ones(2, np.float32)] * 5]
    with pytest.raises(ShapeError, match="5 tensors, not a multiple of 3"):
        run_numpy(update_case("Adagrad", inputs, 2))
