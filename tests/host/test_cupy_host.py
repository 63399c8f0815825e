"""The host on CUDA, with a stand-in for CuPy that refuses what CuPy refuses (CuPy needs a GPU)."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fake_cuda import GPU
from tests.fake_cupy import installed, ndarray
from tests.fake_engines import FakeEngine, fake_engine
from xrt_core.engine.contract import EngineStatus
from xrt_core.errors import DeviceNotFoundError, EngineUnavailableError, ExecutionError
from xrt_core.host.place import _checked
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

F32 = np.dtype(np.float32)


@pytest.fixture
def cupy() -> Iterator[types.ModuleType]:
    """The stand-in for CuPy, on two devices."""
    with installed(devices=2) as module:
        yield module


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

    assert isinstance(y, ndarray)
    assert not np.shares_memory(y._memory, x._memory)
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


def test_without_cupy_the_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host alone on a GPU without CuPy is an error with the remedy, not a computation on the CPU."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    graph, _ = _graph()

    with pytest.raises(EngineUnavailableError, match=r"CuPy is not installed; pip install 'xrt-core\[cuda13\]'"):
        XRTModule(graph, engine="host", device="cuda")


def test_cupy_without_a_driver(own_cache: object) -> None:
    """CuPy imports without a GPU: the host says what is missing, and what is compiled for elsewhere runs on the CPU."""
    graph, w = _graph()
    with installed(devices=0):
        with pytest.raises(EngineUnavailableError, match="CUDA driver version is insufficient"):
            XRTModule(graph, engine="host", device="cuda")
        with fake_engine(_Elsewhere):
            y, _ = XRTModule(graph, engine="fake", target="moon")(np.ones((1, 2), np.float32))

    np.testing.assert_array_equal(y, np.maximum(np.ones((1, 2)) @ w, 0).reshape(-1))


class _Elsewhere(FakeEngine):
    """One that compiles for GPUs that are not here, and takes no node."""

    devices = ("cuda",)

    def __init__(self) -> None:
        super().__init__()
        self.status = EngineStatus(True, "1", ("cuda:0",))
        self.takes = lambda node: False

    def targeting(self, target: str) -> Any:
        return self


@pytest.mark.parametrize("device", ["cuda:7", "tpu"])
def test_devices_that_are_not_there(cupy: Any, device: str) -> None:
    """The host names the device it cannot compute on, when the module is made."""
    with pytest.raises((DeviceNotFoundError, EngineUnavailableError), match=device):
        XRTModule(_graph()[0], engine="host", device=device)


def test_the_host_computes_on_the_device_of_that_number(cupy: Any) -> None:
    """Constants, inputs and results are on device 1, whichever is current; a caller's arrays elsewhere are brought."""
    graph, w = _graph()
    module = XRTModule(graph, engine="host", device="cuda:1")
    x = np.array([[1.0, -1.0]], np.float32)
    with cupy.cuda.Device(1):
        there = cupy.asarray(x)

    for given in (x, there, cupy.asarray(x)):
        y, _ = module(given)
        assert cupy.cuda.runtime.getDevice() == 0
        assert type(y) is np.ndarray or y.device.id == 1
        np.testing.assert_array_equal(y.get() if hasattr(y, "get") else y, np.maximum(x @ w, 0).reshape(-1))
    results, _ = module.run_timed({"x": x})
    np.testing.assert_array_equal(results["y"], np.maximum(x @ w, 0).reshape(-1))


def test_inputs_go_up_once_and_constants_stay_where_they_are_read(cupy: Any) -> None:
    """An input with three readers is one upload; a shape that is an input of Reshape is never downloaded."""
    x, a, b, c, y = Value("x", TensorType(F32, (2, 3))), Value("a"), Value("b"), Value("c"), Value("y")
    shape = Value.constant(np.array([3, 2]), "shape")
    nodes = [
        Node("Neg", [x], [a], version=13),
        Node("Mul", [x, a], [b], version=14),
        Node("Add", [x, b], [c], version=14),
        Node("Reshape", [c, shape], [y], version=21),
    ]
    module = XRTModule(Graph([x], [y], nodes, opsets={"": 21}), engine="host", device="cuda")
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    module(given)
    GPU.up = GPU.down = GPU.downloads = 0

    found = module(given)

    np.testing.assert_array_equal(found, (given - given * given).reshape(3, 2))
    assert (GPU.up, GPU.down, GPU.downloads) == (given.nbytes, given.nbytes, 1)


def test_integers_divide_exactly(cupy: Any) -> None:
    """CuPy's fmod of integers goes through doubles; quotients and remainders of large ones are exact all the same."""
    a = np.array([2**62 + 9, -(2**53 + 1), -(2**62 + 9), 7, -7, 5], np.int64)
    b = np.array([10, 2, 10, -2, -2, 2**62], np.int64)
    p, q, d, m = (Value(n, TensorType(a.dtype, (6,))) for n in "pqdm")
    nodes = [Node("Div", [p, q], [d], version=14), Node("Mod", [p, q], [m], {"fmod": 1}, version=13)]

    found = XRTModule(Graph([p, q], [d, m], nodes, opsets={"": 21}), engine="host", device="cuda")(a, b)

    np.testing.assert_array_equal(found[0], [461168601842738791, -(2**52), -461168601842738791, -3, 3, 0])
    np.testing.assert_array_equal(found[1], np.fmod(a, b))


def test_int4_weights(cupy: Any) -> None:
    """A constant of a dtype that CuPy has not is read on the CPU, and what comes of it goes up."""
    import ml_dtypes

    w = Value.constant(np.arange(-4, 4).astype(ml_dtypes.int4), "w")
    x, s, h, y = Value("x", TensorType(F32, (8,))), Value("s", TensorType(F32, ())), Value("h"), Value("y")
    nodes = [Node("DequantizeLinear", [w, s], [h], version=21), Node("Mul", [h, x], [y], version=14)]
    module = XRTModule(Graph([x, s], [y], nodes, opsets={"": 21}), engine="host", device="cuda")

    found = module(np.full(8, 2, np.float32), np.array(0.5, np.float32))

    np.testing.assert_array_equal(found, np.arange(-4, 4))


def test_memory_that_is_not_there(cupy: Any) -> None:
    """Too little memory is an error that says what was asked for."""
    module = XRTModule(_graph()[0], engine="host", device="cuda")
    GPU.memory = GPU.used + 100
    with pytest.raises(
        ExecutionError, match=r"cuda:0 has no room for float32\[300, 2\] of 2,400 bytes: .* bytes are free"
    ):
        module(np.ones((300, 2), np.float32))


def test_results_that_are_too_large(cupy: Any) -> None:
    """What a kernel asks for in vain is said, with the node, and the module works again when there is room."""
    graph, w = _graph()
    module = XRTModule(graph, engine="host", device="cuda")
    x = np.ones((300, 2), np.float32)
    module(x)
    GPU.memory = GPU.used + x.nbytes + 100
    with pytest.raises(
        ExecutionError, match=r"MatMul.* does not fit the GPU's memory: .*allocating 3,600 bytes.* free"
    ):
        module(x)
    GPU.memory = 1 << 40
    np.testing.assert_array_equal(module(x)[0], np.maximum(x @ w, 0).reshape(-1))


def test_results_are_copied_where_they_may_be_lent(cupy: Any) -> None:
    """Views of inputs, constants and other results are the caller's own; what a kernel made is not copied once more."""
    x, h = Value("x", TensorType(F32, (2, 3))), Value("h")
    same, view, made, turned = Value("same"), Value("view"), Value("made"), Value("turned")
    c = Value.constant(np.ones((2, 3), np.float32), "c")
    shape = Value.constant(np.array([6]), "shape")
    nodes = [
        Node("Identity", [x], [same], version=13),
        Node("Reshape", [c, shape], [view], version=21),
        Node("Neg", [x], [made], version=13),
        Node("Transpose", [made], [turned], version=13),
        Node("Abs", [x], [h], version=13),
    ]
    graph = Graph([x], [same, view, made, turned, h], nodes, opsets={"": 21})
    module = XRTModule(graph, engine="host", device="cuda")
    given = cupy.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    module(given)
    before = ndarray.copy
    copied: list[Any] = []
    ndarray.copy = lambda self, order="C": (copied.append(self), before(self, order))[1]  # type: ignore[method-assign]
    try:
        first = module(given)
    finally:
        ndarray.copy = before  # type: ignore[method-assign]
    assert len({id(r.data.mem) for r in (given, *first)}) == 6
    assert len(copied) == 3, "of the input, of the constant, and of the second result in one block"
    for r in first:
        r.fill(9)
    again = module(given)
    np.testing.assert_array_equal(again[0].get(), given.get())
    np.testing.assert_array_equal(again[1].get(), np.ones(6))
    np.testing.assert_array_equal(again[3].get(), -given.get().T)


@pytest.mark.parametrize("operator", ["Gather", "ScatterElements"])
def test_indices_out_of_range_are_found_where_that_is_asked_for(cupy: Any, operator: str) -> None:
    """CuPy reads or writes another row; with the option it is an error, as it is with NumPy."""
    x, y = Value("x", TensorType(F32, (3,))), Value("y")
    i = Value("i", TensorType(np.dtype(np.int64), (2,)))
    inputs = [x, i] if operator == "Gather" else [x, i, Value.constant(np.ones(2, np.float32), "u")]
    graph = Graph(
        [x, i], [y], [Node(operator, inputs, [y], version=13 if operator == "Gather" else 18)], opsets={"": 21}
    )
    plain = XRTModule(graph, engine="host", device="cuda")
    checked = XRTModule(graph, engine="host", device="cuda", check_indices=True)
    given, bad = np.arange(3, dtype=np.float32), np.array([0, 3])
    plain(given, bad)
    with pytest.raises(ExecutionError, match=rf"{operator}: input 1 has an index that is out of range: .*-3.* to .*2"):
        checked(given, bad)
    for good in (np.array([0, 2]), np.array([-3, -1])):
        np.testing.assert_array_equal(checked(given, good), XRTModule(graph, engine="host")(given, good))


def test_indices_are_held_to_the_sizes_of_each_call() -> None:
    """Where the limit is a symbolic dimension, the step of a plan for all sizes reads it off its arrays."""
    x, i = Value("x", TensorType(F32, ("n",))), Value("i", TensorType(np.dtype(np.int64), (2,)))
    taken = Node("Gather", [x, i], [Value("y", TensorType(F32, (2,)))], version=13)
    step = _checked(taken, lambda arrays: (arrays[0][arrays[1]],))
    for n in (3, 5):
        rows, last = np.arange(n, dtype=np.float32), np.array([0, n - 1])
        np.testing.assert_array_equal(step([rows, last])[0], rows[last])
        with pytest.raises(ExecutionError, match="out of range"):
            step([rows, last + 1])
