"""The host on CUDA, with a stand-in for CuPy that refuses implicit conversion as CuPy does (CuPy needs a GPU)."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from tests.fake_gpu import DeviceArray, fake_cupy
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

F32 = np.dtype(np.float32)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module `cupy` whose functions are NumPy's."""
    module = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def _graph() -> tuple[Graph, np.ndarray]:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = Value("x", TensorType(F32, ("n", 2)))
    h, r, y, s = Value("h"), Value("r"), Value("y"), Value("s")
    nodes = [
        Node("MatMul", [x, Value.constant(w, "w")], [h], version=13),
        Node("Relu", [h], [r], version=14),
        Node("Reshape", [r, Value.constant(np.array([-1]), "shape")], [y], version=21),
        Node("NonZero", [y], [s], version=13),
    ]
    return Graph([x], [y, s], nodes, opsets={"": 21}), w


def test_steps_run_on_the_device(cupy: Any) -> None:
    """Constants and NumPy inputs go up, kernels compute there, NumPy callers get NumPy arrays."""
    graph, w = _graph()
    x = np.array([[1.0, -1.0]], np.float32)
    module = XRTModule(graph, engine="host", device="cuda")

    y, s = module(x)

    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, np.maximum(x @ w, 0).reshape(-1))
    np.testing.assert_array_equal(s, np.array(np.nonzero(y)))


def test_device_arrays_stay_on_the_device(cupy: Any) -> None:
    """A caller with CuPy arrays gets CuPy arrays, which share no memory with its own."""
    graph, w = _graph()
    x = cupy.asarray(np.array([[1.0, -1.0]], np.float32))

    for _ in range(2):
        y, _s = XRTModule(graph, engine="host", device="cuda")(x)

    assert isinstance(y, DeviceArray)
    assert not np.shares_memory(np.asarray(y), np.asarray(x))
    np.testing.assert_array_equal(y.get(), np.maximum(x.get() @ w, 0).reshape(-1))


def test_loops_run_on_the_device(cupy: Any) -> None:
    """Control flow reads its conditions on the CPU and carries its state on the device."""
    i, c, a = Value("i", TensorType(np.dtype(np.int64), ())), Value("c", TensorType(np.dtype(bool), ())), Value("a")
    again, b, scan = Value("again"), Value("b"), Value("scan")
    body = Graph(
        [i, c, a],
        [again, b, scan],
        [
            Node("Identity", [c], [again], version=1),
            Node("Add", [a, a], [b], version=14),
            Node("Identity", [b], [scan], version=1),
        ],
        opsets={"": 21},
    )
    x, last, scans = Value("x", TensorType(F32, (2,))), Value("last"), Value("scans")
    limit, go = Value.constant(np.array(3)), Value.constant(np.array(True))
    loop = Node("Loop", [limit, go, x], [last, scans], {"body": body}, version=21)
    module = XRTModule(Graph([x], [last, scans], [loop], opsets={"": 21}), engine="host", device="cuda")

    final, all_turns = module(np.array([1.0, 2.0], np.float32))

    np.testing.assert_array_equal(final, [8.0, 16.0])
    np.testing.assert_array_equal(all_turns, [[2, 4], [4, 8], [8, 16]])


def test_without_cupy_the_host_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device="cuda"` without CuPy leaves host steps to NumPy."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    graph, w = _graph()

    y, _ = XRTModule(graph, engine="host", device="cuda")(np.ones((1, 2), np.float32))

    np.testing.assert_array_equal(y, np.maximum(np.ones((1, 2)) @ w, 0).reshape(-1))
