"""A device kind that a plugin brings (`tests/npu.py`): the core, the guard and the cache work on it as on any other."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from tests.guard.guarded import QUICK, registered
from tests.npu import NPU, Counts, NpuArray, NpuEngine, NpuExecutable, counted, from_host, memory_of, to_host
from xrt_core.cache import store
from xrt_core.engine import CompileOptions, device_kinds
from xrt_core.engine.device_kinds import DeviceKind, Streams, kinds
from xrt_core.errors import DeviceNotFoundError, EngineUnavailableError, ExecutionError

F32 = np.float32
ENGINE = NpuEngine.name


class Chain(xrt.Graph):
    """Two heavy nodes with one on the host between them, if `apart`."""

    def __init__(self, apart: bool = False) -> None:
        self.apart = apart

    def build(self, x: Any) -> Any:
        ops = xrt.ops
        y = ops.Mul(ops.Exp(x), x)
        if self.apart:
            y = ops.Unique(ops.Flatten(y, axis=0), sorted=1)[0]
        return ops.Add(ops.Tanh(y), y)


def expected(x: np.ndarray, apart: bool = False) -> np.ndarray:
    return np.asarray(xrt.XRTModule(Chain(apart), engine="host")(x))


@pytest.fixture(autouse=True)
def _engine() -> Iterator[None]:
    with registered(NpuEngine):
        yield


@pytest.fixture
def counts() -> Iterator[Counts]:
    with counted() as found:
        yield found


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).uniform(0.5, 1.5, (8, 16)).astype(F32)


def test_numpy_cannot_read_an_array_of_the_device(x: np.ndarray) -> None:
    """Only the functions of the kind can; else nothing here would show anything."""
    array = from_host(x, 0)
    for reads in (np.asarray, np.from_dlpack, memoryview, list):
        with pytest.raises((TypeError, AttributeError, RuntimeError)):
            reads(array)
    assert np.array_equal(to_host(array), x)


def test_results_are_numpy_arrays(x: np.ndarray, counts: Counts) -> None:
    """One way up, one way down, and nothing on the host."""
    m = xrt.XRTModule(Chain(), engine=ENGINE, device="npu:0")
    got = m(x)
    assert type(got) is np.ndarray
    np.testing.assert_allclose(got, expected(x), rtol=1e-6)
    assert (counts.up, counts.down) == (1, 1)
    assert m.explain().summary().endswith(f"clusters: 1 on {ENGINE}; 100% of nodes and 100% of FLOPs on engines")


@pytest.mark.parametrize("number", [0, 1])
def test_arrays_lie_on_the_device_that_was_named(x: np.ndarray, counts: Counts, number: int) -> None:
    """An executable is given arrays of its own device alone."""
    m = xrt.XRTModule(Chain(), engine=ENGINE, device=f"npu:{number}")
    m(x)
    assert [a.device for a in counts.ran[0]] == [number]


def test_a_value_is_moved_at_the_borders_of_clusters(x: np.ndarray, counts: Counts) -> None:
    """Down before the host's node and up behind it."""
    m = xrt.XRTModule(Chain(apart=True), engine=ENGINE, device="npu:0", prune=False)
    np.testing.assert_allclose(m(x), expected(x, apart=True), rtol=1e-6)
    assert m.explain().summary().count(ENGINE) == 1
    assert len(counts.ran) == 2
    assert (counts.up, counts.down) == (2, 2)


def test_two_clusters_in_a_row_hand_over_the_array(x: np.ndarray, counts: Counts) -> None:
    """What the first one made is what the second one is given: the same object, which was not moved."""
    m = xrt.XRTModule(Chain(), engine=ENGINE, device="npu:0", maximum_nodes=2)
    np.testing.assert_allclose(m(x), expected(x), rtol=1e-6)
    assert len(counts.ran) == 2
    assert (counts.up, counts.down) == (1, 1)
    assert all(isinstance(a, NpuArray) for a in counts.ran[1])


@pytest.mark.parametrize("number", [0, 1])
def test_a_caller_may_bring_arrays_of_the_device(x: np.ndarray, counts: Counts, number: int) -> None:
    """They go in as they are where they lie on the right device, and are moved from another one."""
    m = xrt.XRTModule(Chain(), engine=ENGINE, device="npu:0")
    given = from_host(x, number)
    m(given)
    counts.up = counts.down = 0
    got = m(given)
    assert type(got) is np.ndarray
    np.testing.assert_allclose(got, expected(x), rtol=1e-6)
    assert (counts.ran[-1][0] is given, counts.up) == ((True, 0) if number == 0 else (False, 1))


def test_the_host_stands_in(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an executable that fails, on arrays of the device as on NumPy's."""
    m = xrt.XRTModule(Chain(), engine=ENGINE, device="npu:0", maximum_nodes=2)
    m(x)

    def fails(*_: Any, **__: Any) -> Any:
        raise ExecutionError("out of memory")

    monkeypatch.setattr(NpuExecutable, "run", fails)
    np.testing.assert_allclose(m(x), expected(x), rtol=1e-6)
    np.testing.assert_allclose(m(from_host(x, 0)), expected(x), rtol=1e-6)


def test_training_keeps_its_state_on_the_device(counts: Counts) -> None:
    """After the first step variables are neither brought down nor up again."""

    class Line(xrt.Graph):
        def __init__(self) -> None:
            self.w = xrt.Variable(np.zeros((2, 1), F32))

        def build(self, x: Any) -> Any:
            return x @ self.w

    points = np.random.default_rng(0).standard_normal((64, 2)).astype(F32)
    target = points @ np.array([[2.0], [-1.0]], F32)
    t = xrt.training.TrainModule(
        Line(), loss="mse", optimizer=xrt.optim.SGD(0.3), engine=ENGINE, device="npu:0"
    )
    for _ in range(50):
        t.step(x=points, target=target)
    np.testing.assert_allclose(t.parameters()["w"].ravel(), [2.0, -1.0], atol=1e-3)
    (w,) = (a for a, name in zip(t._state.arrays, t._state.names, strict=False) if name == "w")
    assert isinstance(w, NpuArray)
    counts.ran.clear()
    t.step(x=points, target=target)
    assert any(a is w for given in counts.ran for a in given)


def test_guard_checks_and_goes_live(x: np.ndarray, own_cache: pathlib.Path, counts: Counts) -> None:
    """The worker verifies and times the executable on NumPy arrays; then it answers."""
    with xrt.XRTModule(
        Chain(), engine=ENGINE, device="npu:0", **{"guard": True, "guard_async": False, **QUICK}, guard_tune=False
    ) as m:
        np.testing.assert_allclose(m(x), expected(x), rtol=1e-6)
        report = m.report()
        assert report.clusters[0]["state"] == "live", report.as_text()
        assert "right on" in report.clusters[0]["reason"]
        counts.ran.clear()
        np.testing.assert_allclose(m(x), expected(x), rtol=1e-6)
        assert len(counts.ran) == 1


def test_guard_finds_a_wrong_executable(x: np.ndarray, own_cache: pathlib.Path) -> None:
    """What an NPU computes is compared with the host, not believed."""
    with (
        registered(WrongNpu),
        xrt.XRTModule(
            Chain(), engine="wrong_npu", device="npu:0", **{"guard": True, "guard_async": False, **QUICK}
        ) as m,
    ):
        np.testing.assert_allclose(m(x), expected(x), rtol=1e-6)
        assert m.report().clusters[0]["state"] != "live"


class WrongNpu(NpuEngine):
    """Adds a tenth to every element."""

    name = "wrong_npu"

    def compiler(self, device: str, options: CompileOptions) -> Any:
        made = super().compiler(device, options)
        placed = made._placed  # type: ignore[attr-defined]

        class Wrong(type(placed(None))):  # type: ignore[misc]
            def run(self, *args: Any, **more: Any) -> Any:
                return [NpuArray(memory_of(r) + F32(0.1), r.device) for r in super().run(*args, **more)]

            def serialize(self) -> bytes:
                return super().serialize()

        made._placed = lambda inner: Wrong(inner, self.name, int(device.partition(":")[2] or 0))  # type: ignore[attr-defined]
        return made


def test_the_cache_serves_the_second_module(x: np.ndarray, own_cache: pathlib.Path) -> None:
    """It loads the executable from the disk; that of another device is another entry."""
    heard: list[str] = []
    undo = xrt.subscribe(lambda e: heard.append(e.name) if e.name.startswith(("cache.", "compile")) else None)
    try:
        for device, wanted in (("npu:0", "cache.stored"), ("npu:0", "cache.hit"), ("npu:1", "cache.stored")):
            store._memory.clear()
            heard.clear()
            m = xrt.XRTModule(Chain(), engine=ENGINE, device=device)
            np.testing.assert_allclose(m(x), expected(x), rtol=1e-6)
            assert wanted in heard, (device, heard)
    finally:
        undo()


def test_the_cache_verifies_what_it_holds(x: np.ndarray, own_cache: pathlib.Path) -> None:
    """In the mode "verify" results of the stored and the new executable are compared, wherever they lie."""
    heard: list[str] = []
    undo = xrt.subscribe(lambda e: heard.append(e.name) if e.name.startswith("cache.") else None)
    try:
        for _ in range(2):
            store._memory.clear()
            xrt.XRTModule(Chain(), engine=ENGINE, device="npu:0", cache="verify")(x)
    finally:
        undo()
    assert "cache.verified" in heard, heard


def test_unknown_devices_list_those_that_there_are(x: np.ndarray) -> None:
    """An unknown kind, a number beyond those that are here, and a device of another kind than the engine's."""
    with pytest.raises(DeviceNotFoundError, match=r"no device kind 'npx'; did you mean 'npu'\? known: cpu, cuda, "):
        xrt.XRTModule(Chain(), engine=ENGINE, device="npx:0")
    with pytest.raises(DeviceNotFoundError, match="there is no device 'npu:2' here; there are npu:0, npu:1"):
        xrt.XRTModule(Chain(), engine=ENGINE, device="npu:2")
    with pytest.raises(EngineUnavailableError, match="cannot use device 'cpu' here; it can use npu:0, npu:1"):
        xrt.XRTModule(Chain(), engine=ENGINE, device="cpu")
    with pytest.raises(DeviceNotFoundError, match="no device kind 'gpu'"):
        xrt.XRTModule(Chain(), device="gpu")


def test_the_listing_has_the_kind() -> None:
    """With its owner, devices and memory."""
    (line,) = (line for line in device_kinds() if line.name == "npu")
    assert (line.owner, line.devices, line.reason) == ("xrt-npu", ("npu:0", "npu:1"), "")
    assert line.memory == ((1 << 30, 1 << 30), (1 << 30, 1 << 29))


def test_streams_of_a_kind_reach_its_executables(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous engine is given the caller's stream and is not waited for; after a failure the device is."""
    waits: list[int] = []
    streamed = DeviceKind(
        "npu", NPU.status, NPU.count, arrays=NPU.arrays, streams=Streams(lambda a, device: 40 + device, waits.append)
    )
    kinds.unregister("npu")
    kinds.register(streamed, "xrt-npu")
    monkeypatch.setattr(NpuEngine, "asynchronous", True)
    try:
        with counted() as counts:
            m = xrt.XRTModule(Chain(), engine=ENGINE, device="npu:1")
            m(x)
            got = m(x)
            assert type(got) is np.ndarray
            np.testing.assert_allclose(got, expected(x), rtol=1e-6)
            assert counts.asked[-1] == (41, False)
            runs = iter((ExecutionError("it failed late"),))
            run = NpuExecutable.run

            def once(self: Any, *args: Any, **more: Any) -> Any:
                for error in runs:
                    raise error
                return run(self, *args, **more)

            monkeypatch.setattr(NpuExecutable, "run", once)
            assert waits == []
            np.testing.assert_allclose(m(x), expected(x), rtol=1e-6)
            assert waits == [1]
            assert counts.asked[-1] == (41, True)
    finally:
        kinds.unregister("npu")
        kinds.register(NPU, "xrt-npu")
