"""Arrays on a GPU into engines and back, streams, and launches that run ahead: with stand-ins whose work is late."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.fake_cupy import installed
from tests.fake_engines import FakeEngine, chosen, fake_engine
from tests.fake_gpu import (
    GPU,
    BlockingEngine,
    Buffer,
    DeviceArray,
    GpuEngine,
    Tensor,
    fake_torch,
    memory,
    on_gpu,
)
from tests.host_run import assert_same, run_graph
from tests.profiles import examples
from tests.random_graphs import F32, RandomGraph, graph_of, graphs, node
from xrt_core.engine import engines
from xrt_core.engine.contract import EngineStatus, InputOutputAlias
from xrt_core.errors import BrokenContextError, ExecutionError
from xrt_core.guard.builder import ClusterBuilder
from xrt_core.guard.record import State
from xrt_core.ir.graph import Annotations, Graph, Value
from xrt_core.ir.types import SequenceType, TensorType
from xrt_core.module import XRTModule
from xrt_core.training.module import TrainModule
from xrt_core.training.optimizer import SGD
from xrt_core.verify.verdict import Outcome, Piece

pytestmark = pytest.mark.tiny_clusters  # values cross between devices

X = np.array([[1, -2], [3, 4]], np.float32)
Y = np.array([[5, 6], [7, -8]], np.float32)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle GPU, and neither CuPy nor torch."""
    GPU.reset()
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def families() -> tuple[str, ...]:
    """The libraries whose arrays the engine takes; tests parametrise it."""
    return GpuEngine.array_families


@pytest.fixture
def engine(families: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuEngine]:
    monkeypatch.setattr(GpuEngine, "array_families", families)  # before it is loaded: attributes are read once
    with fake_engine(GpuEngine) as made:
        assert isinstance(made, GpuEngine)
        yield made


@pytest.fixture
def cupy(_gpu: None) -> Iterator[None]:
    with installed(devices=2):
        yield


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())


def f32(name: str) -> Value:
    return Value(name, TensorType(F32, (2, 2)))


def add() -> Graph:
    """a + b."""
    a, b, y = f32("a"), f32("b"), Value("y")
    return graph_of([a, b], [y], [node("Add", [a, b], [y])])


def sandwich() -> Graph:
    """-|a @ b|, of which an engine that leaves Abs takes two parts."""
    a, b, h, p, y = f32("a"), f32("b"), Value("h"), Value("p"), Value("y")
    return graph_of([a, b], [y], [node("MatMul", [a, b], [h]), node("Abs", [h], [p]), node("Neg", [p], [y])])


def late(stream: int, value: np.ndarray) -> Any:
    """A CuPy array that work on a stream will fill."""
    made = on_gpu(np.full(value.shape, np.nan, value.dtype))
    GPU.put(stream, lambda: memory(made).__setitem__(..., value))
    return made


def test_numpy_callers_wait_once(engine: GpuEngine) -> None:
    """Launches run ahead of one another, and the results that are returned are finished."""
    a, b, h, y = f32("a"), f32("b"), Value("h"), Value("y")
    m = XRTModule(
        graph_of([a, b], [y], [node("Add", [a, b], [h]), node("Neg", [h], [y])]), engine="gpu", maximum_nodes=1
    )
    for _ in range(2):
        GPU.waits.clear()
        np.testing.assert_array_equal(m(X, Y), -(X + Y))
        assert len(GPU.waits) == 1
    assert len(engine.compiled) == 2
    assert engine.asked == [(None, False)] * 4
    assert isinstance(engine.given[1][0], Buffer)  # handed on as it was


def test_cupy_in_and_out(engine: GpuEngine, cupy: None) -> None:
    """CuPy arrays reach the engine as they are, on CuPy's current stream; nothing waits, not even for the results."""
    m = XRTModule(add(), engine="gpu")
    m(on_gpu(X), on_gpu(Y))
    GPU.current = 5
    x, y = late(5, X), late(5, Y)
    GPU.waits.clear()
    z = m(x, y)

    assert engine.given[-1][0] is x
    assert engine.given[-1][1] is y
    assert engine.asked[-1] == (5, False)
    assert not GPU.waits
    assert np.isnan(memory(z)).all()
    assert isinstance(z, DeviceArray)
    np.testing.assert_array_equal(z.get(), X + Y)


@pytest.mark.parametrize("options", [{"parallel": True}, {"guard": True, "guard_run_timeout": 5.0}], ids=str)
def test_launches_on_other_threads_wait_for_the_callers_stream(
    engine: GpuEngine, cupy: None, torch: None, options: dict[str, Any]
) -> None:
    """They have current streams of their own there; what the caller's stream, and the host, make is ready before."""
    import cupy as cp

    a, b, h, p, q, r, s, y = (f32(n) for n in "abhpqrsy")
    nodes = [node("Abs", [a], [h]), node("Neg", [h], [p]), node("Tanh", [h], [q]), node("Add", [p, q], [r])]
    nodes += [node("Abs", [r], [s]), node("Neg", [s], [y])]
    if options.get("guard"):
        options = {**options, "guard_async": False, "guard_sandbox": False, "guard_shadow": 0, "guard_tune": False}
    with fake_engine(_SecondGpu) as second:
        engine.takes = lambda n: n.op_type in ("Neg",)
        second.takes = lambda n: n.op_type in ("Tanh",)
        m = XRTModule(graph_of([a, b], [y], nodes), engine=["gpu", "gpu2"], device="cuda", **options)
        for library in ("cupy", "torch"):
            stream = cp.cuda.Stream(non_blocking=True)
            for k in range(4):
                if library == "cupy":
                    with stream:
                        x = late(stream.ptr, X + k)
                        found = m(x, x)
                        got = (found + 0).get()
                else:
                    GPU.torch = stream.ptr
                    x = Tensor(memory(late(stream.ptr, X + k)))
                    got = m(x, x).cpu().numpy()
                    GPU.torch = 0
                np.testing.assert_allclose(got, -np.abs(-np.abs(X + k) + np.tanh(np.abs(X + k))), rtol=1e-6)
        assert not m.explain().errors
        assert second.runs


class _SecondGpu(GpuEngine):
    """A second lane."""

    name = "gpu2"


def test_torch_in_and_out(engine: GpuEngine, torch: None) -> None:
    """Tensors on the GPU go in as they are, on torch's current stream, and tensors there come out."""
    m = XRTModule(add(), engine="gpu")
    m(Tensor(X.copy()), Tensor(Y.copy()))
    GPU.torch = 9
    x, y = Tensor(memory(late(9, X))), Tensor(memory(late(9, Y)), requires_grad=True)
    z = m(x, y)

    assert engine.given[-1][0] is x
    assert memory(engine.given[-1][1]) is y.array
    assert engine.asked[-1] == (9, False)
    assert isinstance(z, Tensor)
    assert z.device == "cuda:0"
    assert np.isnan(z.array).all()
    np.testing.assert_array_equal(z.cpu().numpy(), X + Y)


def test_the_host_works_on_the_callers_stream(engine: GpuEngine, cupy: None, torch: None) -> None:
    """Between two launches on torch's stream the host computes with CuPy, on that stream too, and copies nothing."""
    engine.takes = lambda n: n.op_type != "Abs"
    m = XRTModule(sandwich(), engine="gpu")
    m(Tensor(X.copy()), Tensor(Y.copy()))
    GPU.torch = 9
    z = m(Tensor(memory(late(9, X))), Tensor(memory(late(9, Y))))

    assert [type(g[0]) for g in engine.given[-2:]] == [Tensor, DeviceArray]
    assert engine.asked[-2:] == [(9, False)] * 2
    assert isinstance(z, Tensor)
    np.testing.assert_allclose(z.cpu().numpy(), -np.abs(X @ Y))


@pytest.mark.parametrize("family", ["cupy", "torch"])
def test_inputs_of_the_host_are_read_in_place(engine: GpuEngine, cupy: None, torch: None, family: str) -> None:
    """Where the host reads an input as well, it reads the caller's memory on the GPU."""
    engine.takes = lambda n: n.op_type == "Neg"
    m = XRTModule(sandwich(), engine="gpu")
    sent = [on_gpu(X), on_gpu(Y)] if family == "cupy" else [Tensor(X.copy()), Tensor(Y.copy())]
    for _ in range(2):
        z = m(*sent)
        assert type(z) is type(sent[0])
        np.testing.assert_allclose(z.get() if family == "cupy" else z.cpu().numpy(), -np.abs(X @ Y))
    assert all(wait is False for _, wait in engine.asked[1:])


def test_tensors_of_the_cpu(engine: GpuEngine, torch: None) -> None:
    """They go in as NumPy arrays, and what comes out is on the CPU, and finished."""
    m = XRTModule(add(), engine="gpu")
    for _ in range(2):
        z = m(Tensor(X, None), Tensor(Y, None))
        assert type(engine.given[-1][0]) is np.ndarray
        assert z.device == "cpu"
        np.testing.assert_array_equal(z.array, X + Y)


def test_one_call_for_both_places(engine: GpuEngine, torch: None) -> None:
    """A tensor's type does not say where it is: each call looks."""
    m = XRTModule(add(), engine="gpu")
    for index in (0, None, 1, 0):
        z = m(Tensor(X.copy(), index), Tensor(Y.copy(), index))
        assert z.device == ("cpu" if index is None else f"cuda:{index}")
        assert isinstance(engine.given[-1][0], Tensor if index == 0 else np.ndarray)
        np.testing.assert_array_equal(z.cpu().numpy(), X + Y)


def test_an_array_on_the_cpu_is_waited_for(engine: GpuEngine, cupy: None) -> None:
    """Its owner may write to it once he has the results."""
    m = XRTModule(add(), engine="gpu")
    for _ in range(2):
        z = m(on_gpu(X), Y)
        assert engine.asked[-1] == (0, True)
        np.testing.assert_array_equal(memory(z), X + Y)


class Shown:
    """An array of a library that XRT does not know: it shows its memory, and the stream that fills it."""

    def __init__(self, array: np.ndarray, stream: int) -> None:
        self.array, self.stream = array, stream
        self.dtype, self.shape = array.dtype, array.shape

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "<f4", "data": (1, False), "version": 3, "stream": self.stream}

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        GPU.wait(self.stream)
        return self.array


@pytest.mark.parametrize("families", [("other",)], ids=str)
def test_the_stream_that_an_array_names(engine: GpuEngine, cupy: None) -> None:
    """An engine that takes whatever shows its memory gets it, and runs on the stream that fills it."""
    m = XRTModule(add(), engine="gpu")
    m(Shown(X, 3), Shown(Y, 3))
    x, y = Shown(memory(late(3, X)), 3), Shown(memory(late(3, Y)), 3)
    z = m(x, y)

    assert engine.given[-1][0] is x
    assert engine.asked[-1][0] == 3
    assert type(z) is np.ndarray
    np.testing.assert_array_equal(z, X + Y)


def test_what_fails_late_runs_again(engine: GpuEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Where the results are read the failure shows, and the call has them from a second run that waits."""
    m = XRTModule(add(), engine="gpu")
    m(X, Y)
    engine.fails_late = 1
    np.testing.assert_array_equal(m(X, Y), X + Y)
    assert engine.asked[-2:] == [(None, False), (None, True)]
    assert "once more" in caplog.text
    assert "an illegal memory access" in caplog.text
    assert not m.explain().errors


def test_a_launch_that_goes_on_failing_goes_to_the_host(engine: GpuEngine) -> None:
    """The second run tells which launch it is; after three of its failures the executable is given up."""
    m = XRTModule(add(), engine="gpu")
    m(X, Y)
    engine.fails_late = 99
    for _ in range(4):
        np.testing.assert_array_equal(m(X, Y), X + Y)
    assert "an illegal memory access" in next(iter(m.explain().errors.values()))
    assert engine.runs == 1 + 3 * 2


def test_after_three_late_failures_launches_are_waited_for(engine: GpuEngine) -> None:
    """So that a call is not run twice for ever."""
    m = XRTModule(add(), engine="gpu")
    for _ in range(4):
        engine.fails_late = 1
        np.testing.assert_array_equal(m(X, Y), X + Y)
    assert [wait for _, wait in engine.asked] == [False, True] * 3 + [True]


def test_unread_results_fail_where_the_caller_reads_them(engine: GpuEngine, cupy: None) -> None:
    """Nobody has waited for them: the library's own error is what the caller sees."""
    m = XRTModule(add(), engine="gpu")
    engine.fails_late = 1
    z = m(on_gpu(X), on_gpu(Y))
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        z.get()


@pytest.mark.parametrize("options", [{}, {"guard": True, "guard_async": False, "guard_sandbox": False}], ids=str)
def test_a_broken_context_is_named(engine: GpuEngine, cupy: None, options: dict[str, Any]) -> None:
    """Not the caller's arrays are at fault: after an illegal address nothing on a GPU works until the process ends."""
    m = XRTModule(add(), engine="gpu", **options, **({"guard_tune": False} if options else {}))
    x, y = on_gpu(X), on_gpu(Y)
    for _ in range(3):
        m(x, y)

    engine.breaks = True
    with pytest.raises(BrokenContextError, match="engine 'gpu'.*illegal memory access.*Restart the process"):
        m(x, y).get()
    for sent in ((x, y), (X, Y)):
        with pytest.raises(BrokenContextError, match="illegal memory access"):
            m(*sent)
    with pytest.raises(BrokenContextError, match="illegal memory access"):
        XRTModule(add(), engine="host", device="cuda")(X, Y)


def test_a_failure_at_once_is_seen_to_at_once(engine: GpuEngine, cupy: None) -> None:
    """A launch that cannot even be enqueued: the host stands in, and the caller's family stays."""
    m = XRTModule(add(), engine="gpu")

    def fail(inputs: Any) -> None:
        raise RuntimeError("out of memory")

    engine.on_run = fail
    z = m(on_gpu(X), on_gpu(Y))
    assert isinstance(z, DeviceArray)
    np.testing.assert_array_equal(z.get(), X + Y)
    assert "out of memory" in next(iter(m.explain().errors.values()))


def test_an_engine_that_says_nothing_gets_numpy_arrays_and_is_waited_for(cupy: None) -> None:
    """From the host on the GPU, and from callers with arrays there."""
    with fake_engine(BlockingEngine) as engine:
        assert isinstance(engine, BlockingEngine)
        engine.takes = lambda n: n.op_type != "Abs"
        m = XRTModule(sandwich(), engine="blocking")
        for _ in range(2):
            np.testing.assert_allclose(m(on_gpu(X), on_gpu(Y)).get(), -np.abs(X @ Y))
    assert {type(x) for sent in engine.given for x in sent} == {np.ndarray}
    assert set(engine.asked) == {(None, True)}


def test_an_engine_on_the_cpu_beside_a_host_on_the_gpu(engine: GpuEngine, cupy: None) -> None:
    """Gets NumPy arrays of what the host made there."""
    with fake_engine() as other:
        seen: list[type] = []
        other.on_run = lambda inputs: seen.extend(map(type, inputs))
        engine.takes, other.takes = lambda n: n.op_type == "MatMul", lambda n: n.op_type == "Neg"
        z = XRTModule(sandwich(), engine=["gpu", "fake"])(on_gpu(X), on_gpu(Y))
        np.testing.assert_allclose(z.get(), -np.abs(X @ Y))
    assert seen == [np.ndarray]
    assert isinstance(other, FakeEngine)


def test_what_writes_into_its_inputs_is_waited_for(engine: GpuEngine, cupy: None) -> None:
    """A failure must be known before an input is gone."""
    a, b, y = f32("a"), f32("b"), Value("y")
    updated = node("Add", [a, b], [y]).replace(annotations=Annotations(aliases=((0, 0),)))
    m = XRTModule(graph_of([a, b], [y], [updated]), engine="gpu")
    m(on_gpu(X), on_gpu(Y))
    assert engine.compiled[0].aliases == (InputOutputAlias(0, 0),)
    assert engine.asked == [(0, True)]


@pytest.mark.parametrize("families", [("cupy", "torch"), ()], ids=str)
def test_auto_keeps_arrays_on_the_device(
    engine: GpuEngine, cupy: None, monkeypatch: pytest.MonkeyPatch, families: tuple[str, ...]
) -> None:
    """The engine that was chosen gets what it takes as it is; nothing comes down for one that takes CuPy's arrays."""

    def ready(self: Any, work: Any) -> Outcome:
        return Outcome("ready", (Piece("gpu", tuple(range(len(work.launch.function.body.nodes)))),), "chosen")

    monkeypatch.setattr(ClusterBuilder, "_in_process", ready)
    others = ",".join(n for n in engines.names() if n != "gpu")
    monkeypatch.setenv("XRT_DISABLE_PLUGINS", others)
    engine.takes = lambda n: n.op_type != "Abs"
    m = XRTModule(
        sandwich(), engine="auto", device="cuda", guard=True, guard_async=False, guard_sandbox=False, guard_shadow=0
    )
    for _ in range(12):
        m(on_gpu(X), on_gpu(Y))
    GPU.up = GPU.down = 0
    engine.given.clear()

    z = m(on_gpu(X), on_gpu(Y))

    assert isinstance(z, DeviceArray)
    moved = GPU.up + GPU.down
    np.testing.assert_allclose(z.get(), -np.abs(X @ Y))
    assert {type(x) for sent in engine.given for x in sent} == {DeviceArray if families else np.ndarray}
    assert bool(moved) != bool(families)
    assert not m.explain().errors


def test_what_an_engine_loses_stays_on_the_device(engine: GpuEngine, cupy: None) -> None:
    """The host that stands in for a cluster computes with CuPy, as for any other node."""
    engine.takes = lambda n: n.op_type == "MatMul"
    m = XRTModule(sandwich(), engine="gpu", prune=False)
    m(on_gpu(X), on_gpu(Y))
    engine.on_run = lambda inputs: [np.zeros(1, np.float32)]  # of a wrong shape
    for _ in range(3):
        m(on_gpu(X), on_gpu(Y))
    GPU.up = GPU.down = 0

    z = m(on_gpu(X), on_gpu(Y))

    assert (GPU.up, GPU.down) == (0, 0)
    np.testing.assert_allclose(z.get(), -np.abs(X @ Y))


def test_a_verification_is_of_arrays_on_the_device(engine: GpuEngine, cupy: None) -> None:
    """The engine is given there what it is given in calls, and is timed against CuPy."""
    m = XRTModule(add(), engine="gpu", guard=True, guard_async=False, guard_sandbox=False, guard_shadow=0, cache="off")
    np.testing.assert_array_equal(m(on_gpu(X), on_gpu(Y)).get(), X + Y)
    in_checks = [s for s in engine.given if len(s) == 2]
    assert len(in_checks) > 10
    stress_for_leaks = sum(type(s[0]) is np.ndarray for s in in_checks)
    assert sum(type(s[0]) is DeviceArray for s in in_checks) > 10, stress_for_leaks


def test_times_of_calls_are_of_the_calls_alone(engine: GpuEngine, cupy: None) -> None:
    """Work of the caller's that is under way when a call begins does not make the engine look slow."""
    m = XRTModule(
        add(), engine="gpu", guard=True, guard_async=False, guard_sandbox=False, guard_shadow=0, guard_tune=False,
        guard_run_timeout=0,
    )  # fmt: skip
    for _ in range(12):
        m(on_gpu(X), on_gpu(Y))
    guard = m._pipeline.services.guard
    assert guard is not None
    (record,) = guard.known()
    before = record.calls
    for _ in range(3 * 64):
        x = late(GPU.current, X)
        if record.calls % 64 == 63:  # the next call is timed
            GPU.put(GPU.current, lambda: time.sleep(0.05))
        m(x, on_gpu(Y))
    assert record.calls == before + 3 * 64
    assert record.state is State.LIVE, record.reason
    assert max(list(record.engine_seconds)[-3:]) < 0.05


def test_guarded_launches_are_waited_for(engine: GpuEngine, cupy: None) -> None:
    """The host must be able to stand in."""
    m = XRTModule(add(), engine="gpu", guard=True, guard_async=False, guard_sandbox=False)
    for _ in range(3):
        np.testing.assert_array_equal(m(on_gpu(X), on_gpu(Y)).get(), X + Y)
    assert {wait for _, wait in engine.asked} == {True}


def test_a_timeline_waits_for_each_launch(engine: GpuEngine) -> None:
    """Otherwise it would show how long enqueueing takes."""
    m = XRTModule(add(), engine="gpu")
    m.run_timed({"a": X, "b": Y})
    assert engine.asked[-1] == (None, True)


def test_jax_arrays_of_the_cpu(engine: GpuEngine) -> None:
    """They come out where they went in, whatever the engine computes on."""
    jax = pytest.importorskip("jax")
    m = XRTModule(add(), engine="gpu")
    x = jax.numpy.asarray(X)
    for _ in range(2):
        z = m(x, jax.numpy.asarray(Y))
        assert isinstance(z, jax.Array)
        assert z.devices() == x.devices()
        np.testing.assert_array_equal(z, X + Y)
    assert {type(sent[0]) for sent in engine.given} == {np.ndarray}


def test_two_gpus_go_by_way_of_the_cpu(engine: GpuEngine, cupy: None) -> None:
    """Where engines are on different devices, arrays on one of them are no arrays of the other."""
    other = type("Other", (GpuEngine,), {"name": "gpu1"})
    with fake_engine(other) as second:
        second.status = EngineStatus(True, "1", ("cuda:1",))
        engine.takes, second.takes = lambda n: n.op_type == "MatMul", lambda n: n.op_type == "Neg"
        m = XRTModule(sandwich(), engine=["gpu", "gpu1"])
        for sent in ([X, Y], [on_gpu(X), on_gpu(Y)]):
            z = m(*sent)
            assert type(z) is type(sent[0])
            np.testing.assert_allclose(z if type(z) is np.ndarray else z.get(), -np.abs(X @ Y))
        assert isinstance(second, GpuEngine)
        assert type(engine.given[-1][0]) is np.ndarray


@pytest.mark.parametrize("families", [("torch",), ("cupy",), ()], ids=str)
def test_arrays_of_another_library_than_the_engine_takes(
    engine: GpuEngine, cupy: None, torch: None, families: tuple[str, ...]
) -> None:
    """They become arrays that it takes, in the same memory; NumPy's where it takes none on the GPU."""
    m = XRTModule(add(), engine="gpu")
    for sent in ([on_gpu(X), on_gpu(Y)], [Tensor(X.copy()), Tensor(Y.copy())]):
        for _ in range(2):
            z = m(*sent)
            assert type(z) is type(sent[0])
            np.testing.assert_array_equal(z.get() if isinstance(z, DeviceArray) else z.cpu().numpy(), X + Y)
        seen = engine.given[-1][0]
        assert type(seen) is {("torch",): Tensor, ("cupy",): DeviceArray, (): np.ndarray}[families]
        assert np.shares_memory(memory(seen), memory(sent[0])) == bool(families)


def test_training_keeps_its_state_on_the_gpu(engine: GpuEngine, cupy: None) -> None:
    """Variables come back as the engine's arrays and go in as they are, by what the engine says that it takes."""
    x, y = Value("x", TensorType(F32, (2, 2))), Value("y")
    h, d, e = Value("h"), Value("d"), Value("e")
    w = Value.constant(np.eye(2, dtype=np.float32), "w")
    nodes = [node("MatMul", [x, w], [h]), node("Sub", [h, x], [d]), node("Mul", [d, d], [e])]
    g = graph_of([x], [y], [*nodes, node("ReduceMean", [e], [y], keepdims=0)])
    losses = {}
    for name in ("gpu", "host"):
        t = TrainModule(g, engine=name, optimizer=SGD(0.1), trainable=["w"])
        t.load_state_dict({**t.state_dict(), "w": np.array([[2, 1], [0, 1]], np.float32)})
        losses[name] = [float(t.step(x=X)) for _ in range(4)]
    np.testing.assert_allclose(losses["gpu"], losses["host"], rtol=1e-5)
    assert losses["gpu"][-1] < losses["gpu"][0]
    assert any(isinstance(a, DeviceArray) for a in engine.given[-1])
    assert {wait for _, wait in engine.asked} == {True}


def test_lists_of_device_arrays(engine: GpuEngine, cupy: None) -> None:
    """Arrays within a list decide the family as others do; the list goes by way of the CPU."""
    s, y, z = Value("s", SequenceType(TensorType(F32))), Value("y"), Value("z")
    nodes = [node("ConcatFromSequence", [s], [y], axis=0), node("Neg", [y], [z])]
    m = XRTModule(graph_of([s], [z], nodes), engine="gpu")
    for _ in range(2):
        found = m([on_gpu(X), on_gpu(Y)])
        assert isinstance(found, DeviceArray)
        np.testing.assert_array_equal(found.get(), -np.concatenate([X, Y]))


def test_an_error_of_the_host_is_raised_once_it_is_sure(engine: GpuEngine, caplog: pytest.LogCaptureFixture) -> None:
    """A bad index fails in both runs; nobody is told of a launch that failed late, and launches go on running ahead."""
    a, i, h, y = f32("a"), Value("i", TensorType(np.dtype(np.int64), (1,))), Value("h"), Value("y")
    engine.takes = lambda n: n.op_type == "Neg"
    m = XRTModule(graph_of([a, i], [y], [node("Neg", [a], [h]), node("Gather", [h, i], [y])]), engine="gpu")
    for _ in range(4):
        with pytest.raises(ExecutionError, match="Gather"):
            m(X, np.array([7]))
    np.testing.assert_array_equal(m(X, np.array([1])), -X[1:])
    assert engine.asked[-1] == (None, False)
    assert "once more" not in caplog.text


def _late(library: str, stream: int, value: np.ndarray) -> Any:
    """An array on the GPU that work on a stream will fill."""
    if library == "numpy":
        return value
    made = np.zeros_like(value) if value.dtype.kind != "f" else np.full_like(value, np.nan)
    GPU.put(stream, lambda: made.__setitem__(..., value))
    return on_gpu_as(library, made)


def on_gpu_as(library: str, array: np.ndarray) -> Any:
    return DeviceArray._over(array, array, 0) if library == "cupy" else Tensor(array)


def _read(x: Any) -> np.ndarray:
    if isinstance(x, Tensor):
        return x.cpu().numpy()
    return x.get() if isinstance(x, DeviceArray) else np.asarray(x)


@pytest.mark.slow
@examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    graphs(maximum=10), st.integers(0, 9), st.integers(1, 10), st.sampled_from(["numpy", "cupy", "torch"]),
    st.sampled_from([0, 5]), st.booleans(),
)  # fmt: skip
def test_nothing_is_read_too_early(
    g: RandomGraph, seed: int, share: int, library: str, stream: int, with_cupy: bool
) -> None:
    """Random graphs and partitions, inputs that are made late on the caller's stream: the host's results, nothing
    failed, and only arrays on the CPU were waited for."""
    wanted = run_graph(g.graph, g.arrays)
    GPU.reset()
    with_cupy = with_cupy or library == "cupy"
    with (
        pytest.MonkeyPatch.context() as patch,
        installed() if with_cupy else contextlib.nullcontext(),
        fake_engine(GpuEngine) as engine,
    ):
        patch.setitem(sys.modules, "torch", fake_torch())
        if not with_cupy:
            patch.setitem(sys.modules, "cupy", None)
        engine.takes = chosen(seed, share)
        m = XRTModule(g.graph, engine="gpu")
        GPU.current, GPU.torch = (stream, 0) if library == "cupy" else (0, stream)
        for _ in range(2):
            found = m(*(_late(library, stream, a) for a in g.arrays))
            got = [_read(x) for x in (found if isinstance(found, tuple) else (found,))]
            assert_same(got, wanted, 1e-5, 1e-6)
        assert not m.explain().errors
