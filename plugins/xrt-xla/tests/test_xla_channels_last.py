"""What stands between and behind convolutions is computed with channels last, and once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

RNG = np.random.default_rng(3)
F32 = np.dtype(np.float32)


def _constant(*shape: int, positive: bool = False) -> Value:
    data = RNG.standard_normal(shape, np.float32)
    return Value.constant(np.abs(data) + 0.5 if positive else data)


class _Net:
    """Nodes one after another; each gives a new value."""

    def __init__(self, *shape: int, dtype: Any = F32) -> None:
        self.dtype = np.dtype(dtype)
        self.x = Value("x", TensorType(self.dtype, shape))
        self.nodes: list[Node] = []

    def __call__(self, op: str, *inputs: Value, version: int = 0, **attributes: Any) -> Value:
        y = Value(f"v{len(self.nodes)}")
        version = version or onnx.defs.get_schema(op, 21).since_version
        self.nodes.append(Node(op, list(inputs), [y], attributes, version=version))
        return y

    def conv(self, x: Value, w: Value, **attributes: Any) -> Value:
        if self.dtype != F32:
            w = Value.constant(w.data.astype(self.dtype))  # type: ignore[union-attr]
        return self("Conv", x, w, **attributes)

    def agrees(self, outputs: Sequence[Value], tolerance: float = 1e-4) -> str:
        """Hold the engine's results against the host's; the program's text."""
        graph = Graph([self.x], list(outputs), self.nodes, opsets={"": 21})
        array = RNG.standard_normal(self.x.shape, np.float32).astype(self.dtype)  # type: ignore[arg-type]
        host, m = XRTModule(graph, engine="host"), XRTModule(graph, engine="xla", guard=False)
        want, got = host.run({"x": array}), m.run({"x": array})
        assert m.explain().node_share == 1.0
        for name, y in want.items():
            scale = max(float(np.abs(y.astype(np.float64)).max()), 1.0)
            np.testing.assert_allclose(
                got[name].astype(np.float64), y.astype(np.float64), rtol=tolerance, atol=tolerance * scale
            )
            assert got[name].dtype == y.dtype
        return str(m.clusters({"x": array})[0].as_text("hlo-optimized"))


POOLS = [
    ("MaxPool", {"kernel_shape": (3, 2), "strides": (2, 1), "pads": (1, 0, 1, 1)}),
    ("MaxPool", {"kernel_shape": (2, 2), "strides": (2, 2), "ceil_mode": 1}),
    ("MaxPool", {"kernel_shape": (2, 2), "dilations": (2, 3)}),
    ("AveragePool", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)}),
    ("AveragePool", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "count_include_pad": 1}),
    ("AveragePool", {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1}),
    ("GlobalAveragePool", {}),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("op", "attributes"), POOLS)
def test_pools_behind_a_convolution(op: str, attributes: dict[str, Any], dtype: Any) -> None:
    net = _Net(2, 3, 9, 12, dtype=dtype)
    y = net.conv(net.x, _constant(16, 3, 3, 3), pads=(1, 1, 1, 1))
    net.agrees([net(op, net("Relu", y), **attributes)], 1e-4 if dtype is np.float32 else 3e-3)


def test_operands_of_fewer_axes_are_spread_as_before() -> None:
    """Of one number, by row, by channel, and as another tensor that is not of a convolution."""
    net = _Net(2, 8, 5, 5)
    y = net.conv(net.x, _constant(8, 8, 3, 3), pads=(1, 1, 1, 1))
    for other in (_constant(), _constant(5), _constant(8, 1, 1), _constant(1, 8, 1, 1), _constant(2, 1, 5, 5), net.x):
        y = net("Add", other, net("Mul", y, other))
    slope, low, high = _constant(8, 1, 1), Value.constant(np.float32(-2)), Value.constant(np.float32(3))
    y = net("Clip", net("PRelu", y, slope), low, high)
    less = net("Less", y, _constant(5, 5))
    net.agrees([net("Where", less, y, net.x), less])


def test_an_operand_of_more_axes() -> None:
    net = _Net(1, 8, 5, 5)
    y = net.conv(net.x, _constant(8, 8, 1, 1))
    net.agrees([net("Add", y, _constant(3, 1, 8, 5, 5))])


@pytest.mark.parametrize("axis", [0, 1, -3, 2, 3])
def test_tensors_of_convolutions_are_joined(axis: int) -> None:
    net = _Net(2, 4, 6, 6)
    one, other = (net.conv(net.x, _constant(4, 4, 1, 1)) for _ in range(2))
    net.agrees([net("Sigmoid", net("Concat", one, net("Relu", other), net.x, axis=axis))])


@pytest.mark.parametrize(("version", "attributes"), [(15, {}), (15, {"epsilon": 0.1}), (7, {"spatial": 1})])
def test_batch_normalization_by_given_statistics(version: int, attributes: dict[str, Any]) -> None:
    net = _Net(2, 3, 6, 6)
    y = net("Relu", net.conv(net.x, _constant(8, 3, 3, 3)))
    given = [_constant(8), _constant(8), _constant(8), _constant(8, positive=True)]
    net.agrees([net("BatchNormalization", y, *given, version=version, **attributes)])


def test_one_and_three_dimensions() -> None:
    for size in ((20,), (5, 6, 7)):
        net = _Net(2, 4, *size)
        y = net("Relu", net.conv(net.x, _constant(8, 4, *(3,) * len(size))))
        y = net("Concat", y, net("Neg", y), axis=1)
        net.agrees([net("MaxPool", y, kernel_shape=(2,) * len(size)), net("GlobalAveragePool", y)])


def test_what_several_operators_read_of_a_depthwise_convolution_is_computed_once() -> None:
    """A gate by the mean of each channel, and sums of all layers so far."""
    net = _Net(1, 16, 12, 12)
    y = net("HardSwish", net.conv(net.x, _constant(16, 1, 3, 3), group=16, pads=(1, 1, 1, 1)))
    gate = net("HardSigmoid", net.conv(net("GlobalAveragePool", y), _constant(16, 16, 1, 1)))
    y = net("Mul", y, gate)
    for _ in range(3):
        again = net.conv(y, _constant(16, 1, 3, 3), group=16, pads=(1, 1, 1, 1))
        y = net("Add", y, again)
    text = net.agrees([net.conv(y, _constant(8, 16, 1, 1))])
    taps = sum(" slice(" in line for line in text.splitlines())
    assert taps <= 4 * 9  # of four convolutions; without, the gate's and the sums' were computed again: 56


def test_elementwise_operators_between_convolutions_have_channels_last() -> None:
    net = _Net(1, 3, 24, 24)
    y = net("HardSwish", net.conv(net.x, _constant(16, 3, 3, 3)))
    gate = net("Sigmoid", net.conv(net("GlobalAveragePool", y), _constant(16, 16, 1, 1)))
    text = net.agrees([net.conv(net("Mul", y, gate), _constant(8, 16, 1, 1))])
    assert "f32[1,16,22,22]{3,2,1,0}" not in text
