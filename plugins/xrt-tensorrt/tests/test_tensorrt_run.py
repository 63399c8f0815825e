"""The run side against stand-ins that keep their memory on the CPU: addresses, streams, contexts, graphs, errors."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import standin
from xrt_tensorrt import TensorRTEngine, _cuda, _toolkit, dlpack, kernels_cache, memory
from xrt_tensorrt.engine import BuiltEngine, Manifest
from xrt_tensorrt.executable import TensorRTExecutable, read_blob
from xrt_tensorrt.settings import Settings

from tests.fake_cupy import installed
from xrt_core.engine import engines
from xrt_core.engine.contract import (
    EngineStatus,
    Function,
    GraphCompiler,
    InputOutputAlias,
    Parameter,
    RunOptions,
    Support,
)
from xrt_core.errors import CompileError, ExecutionError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule
from xrt_core.runtime.arrays import to_numpy
from xrt_core.testing.host_engine import HostExecutable
from xrt_core.training.module import TrainModule
from xrt_core.training.optimizer import SGD

F32 = np.dtype(np.float32)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[standin.Cuda]:
    """A CUDA runtime of the CPU's memory, in the place of the real one."""
    fake = standin.Cuda()
    monkeypatch.setattr(_cuda, "_runtime", lambda: fake)
    monkeypatch.setattr(_cuda, "_load_driver", lambda: None)
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(memory, "_local", threading.local())
    monkeypatch.setattr(memory, "_idle", {})
    monkeypatch.setattr(memory, "_scratch", {})
    _forget()
    yield fake
    monkeypatch.setattr(memory, "_scratch", {})
    gc.collect()
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    _cuda.why_unusable.cache_clear()
    _cuda.capability.cache_clear()
    _cuda.model.cache_clear()


def _params(prefix: str, *shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(f"{prefix}{i}", F32, s) for i, s in enumerate(shapes)]


def _executable(
    cuda: standin.Cuda,
    function: Callable[..., Sequence[np.ndarray]] = lambda x, y: [x + y, x * y],
    ins: Sequence[Parameter] = (),
    outs: Sequence[Parameter] = (),
    *,
    flavour: str = _toolkit.FULL,
    graph: bool = False,
    largest: int | None = None,
    scratch: int = 64,
) -> tuple[TensorRTExecutable, standin.Engine]:
    ins = ins or _params("x", (2, 3), (2, 3))
    outs = outs or _params("y", (2, 3), (2, 3))
    engine = standin.Engine(cuda, function, ins, outs, largest, scratch)
    blob = f"engine {len(standin.MODULE.engines)}".encode()
    standin.MODULE.engines[blob] = engine
    names = tuple(p.name for p in ins), tuple(p.name for p in outs)
    profiles = () if largest is None else ((1, largest, largest),)
    manifest = Manifest(flavour, "10.9.0.34", ("sm_89",), False, "none", False, profiles, *names)
    built = BuiltEngine(_toolkit.Toolkit(standin.MODULE, flavour), 0, manifest, blob)
    return TensorRTExecutable(built, ins, outs, graph), engine


def _arrays(seed: int = 0, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(F32) for s in shapes or ((2, 3), (2, 3))]


def test_numpy_in_device_arrays_out(cuda: standin.Cuda) -> None:
    """NumPy inputs are copied down, results are arrays in device memory, and the run was waited for."""
    executable, engine = _executable(cuda)
    x, y = _arrays()
    total, product = executable.run([x, y])

    assert isinstance(total, _cuda.DeviceArray)
    np.testing.assert_array_equal(np.asarray(total), x + y)
    np.testing.assert_array_equal(np.asarray(product), x * y)
    (stream,) = engine.contexts[0].streams
    assert ("cudaStreamSynchronize", (stream,)) in cuda.calls


def test_without_waiting(cuda: standin.Cuda) -> None:
    """With block_until_done=False nothing is waited for."""
    executable, _ = _executable(cuda)
    executable.run(_arrays(), block_until_done=False)

    assert "cudaStreamSynchronize" not in cuda.names()


def test_the_callers_stream(cuda: standin.Cuda) -> None:
    """Copies, memory and the run itself go to the stream that the caller names, and no other is made."""
    executable, engine = _executable(cuda)
    executable.run(_arrays(), RunOptions(stream=555))

    assert engine.contexts[0].streams == [555]
    assert "cudaStreamCreate" not in cuda.names()
    assert {a[-1] for n, a in cuda.calls if n in ("cudaMallocAsync", "cudaMemcpyAsync")} == {555}


def test_strided_inputs_are_made_contiguous(cuda: standin.Cuda) -> None:
    """A transposed NumPy array gives the results of its values, not of its memory."""
    executable, _ = _executable(cuda)
    x, y = (a.T for a in _arrays(0, (3, 2), (3, 2)))

    np.testing.assert_array_equal(np.asarray(executable.run([x, y])[0]), x + y)


class _Foreign:
    """An array of another library: memory of the CPU that says it is on the device."""

    def __init__(self, array: np.ndarray, stream: int | None = None, strides: tuple[int, ...] | None = None) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        self._stream, self._strides = stream, strides

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.array.ctypes.data, False), "version": 3,
            "strides": self._strides, "stream": self._stream,
        }  # fmt: skip

    def get(self) -> np.ndarray:
        return self.array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def _aligned(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that begins so many bytes after a multiple of 256."""
    memory = np.empty(array.nbytes + 512, np.uint8)
    at = -memory.ctypes.data % 256 + offset
    found = memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def test_device_arrays_are_read_in_place(cuda: standin.Cuda) -> None:
    """An array with `__cuda_array_interface__` is bound by its own address, and nothing is copied."""
    executable, engine = _executable(cuda)
    x, y = (_Foreign(_aligned(a)) for a in _arrays())
    results = executable.run([x, y])

    assert engine.contexts[0].addresses["x0"] == x.array.ctypes.data
    assert "cudaMemcpyAsync" not in cuda.names()
    np.testing.assert_array_equal(np.asarray(results[0]), x.array + y.array)


def test_a_slice_that_begins_anywhere_is_copied(cuda: standin.Cuda) -> None:
    """TensorRT gets addresses that are aligned as device memory is."""
    executable, engine = _executable(cuda)
    x, y = (_Foreign(_aligned(a, offset=4)) for a in _arrays())
    results = executable.run([x, y])

    assert engine.contexts[0].addresses["x0"] != x.array.ctypes.data
    np.testing.assert_array_equal(np.asarray(results[0]), x.array + y.array)


class _Torch(_Foreign):
    """An array as torch shows it: without a stream, at address 0 where it is empty, and not at all with gradients."""

    device = "cuda:0"

    def __init__(self, array: np.ndarray, requires_grad: bool = False, strides: tuple[int, ...] | None = None) -> None:
        super().__init__(array, strides=strides)
        self.requires_grad = requires_grad
        self.waiting: list[int] = []

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")
        found = {**super().__cuda_array_interface__, "version": 2}
        del found["stream"]
        return found if self.array.size else {**found, "data": (0, False)}

    def __dlpack__(self, stream: int | None = -1) -> object:
        self.waiting.append(stream)
        return object()

    def detach(self) -> _Torch:
        return _Torch(self.array)

    def contiguous(self) -> _Torch:
        return _Torch(_aligned(self.array))


def test_an_array_that_names_no_stream_is_waited_for(cuda: standin.Cuda) -> None:
    """JAX leaves the stream out of its interface; asked for DLPack, it lets the engine's stream wait."""
    executable, engine = _executable(cuda)
    x, y = (_Torch(_aligned(a)) for a in _arrays())
    executable.run([x, y])
    executable.run([x, y], RunOptions(stream=5))

    assert x.waiting == y.waiting == [engine.contexts[0].streams[0], 5]
    assert engine.contexts[0].addresses["x0"] == x.array.ctypes.data


@pytest.mark.parametrize(("current", "waited"), [(0, []), (5, []), (6, [5])])
def test_tensors_of_torch_are_on_its_current_stream(
    cuda: standin.Cuda, monkeypatch: pytest.MonkeyPatch, current: int, waited: list[int]
) -> None:
    """It is asked for that, which costs less than DLPack; nothing waits for the stream that it runs on, or for the
    default one where the engine's own is ordered against that."""
    stand_in = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=current))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=stand_in))
    monkeypatch.setattr(_Torch, "__module__", "torch")
    executable, _ = _executable(cuda)
    x, y = (_Torch(_aligned(a)) for a in _arrays())
    executable.run([x, y], RunOptions(stream=current and 5))

    assert not x.waiting
    assert [a[0] for n, a in cuda.calls if n == "cudaStreamWaitEvent"] == 2 * waited


@pytest.mark.parametrize("stream", [0, 1])
def test_the_default_stream_is_left_to_a_stream_of_its_own(cuda: standin.Cuda, stream: int) -> None:
    """TensorRT would wait for the default stream at every run; the thread's own is ordered against it."""
    executable, engine = _executable(cuda)
    executable.run(_arrays(), RunOptions(stream=stream), block_until_done=False)

    assert engine.contexts[0].streams[0] in memory._own
    assert "cudaStreamSynchronize" not in cuda.names()


def test_a_threads_default_stream_lends_its_order(cuda: standin.Cuda) -> None:
    """Its handle means another stream in each thread, so no memory may be kept by it: the engine's comes between."""
    executable, engine = _executable(cuda)
    executable.run(_arrays(), RunOptions(stream=2), block_until_done=False)

    (own,) = engine.contexts[0].streams
    assert own in memory._own
    ordered = [(n, a[:2]) for n, a in cuda.calls if n in ("cudaEventRecord", "cudaStreamWaitEvent")]
    assert [a[1] if n == "cudaEventRecord" else a[0] for n, a in ordered] == [2, own, own, own, 2]
    assert all(s != 2 for _, s in memory._scratch)


def _updating(cuda: standin.Cuda, graph: bool = False) -> tuple[TensorRTExecutable, standin.Engine]:
    """(x + y, x * y), the first of which takes the memory of x."""
    executable, engine = _executable(cuda, graph=graph)
    aliases = [InputOutputAlias(0, 0)]
    return TensorRTExecutable(executable.built, executable._params, executable._returns, graph, aliases), engine


def test_an_aliased_input_of_a_recorded_run_is_updated_in_place(cuda: standin.Cuda) -> None:
    """It comes back as the result, with the new numbers, on the stream of the run; others are left as they were."""
    executable, _ = _updating(cuda, True)
    x, y = (_Foreign(_aligned(a)) for a in _arrays())
    for _ in range(3):
        old, before = x.array.copy(), len(cuda.calls)
        total, product = executable.run([x, y], RunOptions(stream=5))
        assert total is x
        np.testing.assert_array_equal(x.array, old + y.array)
        np.testing.assert_array_equal(np.asarray(product), old * y.array)
        into = [a for n, a in cuda.calls[before:] if n == "cudaMemcpyAsync" and a[0] == x.array.ctypes.data]
        assert [a[-1] for a in into] == [5]
    np.testing.assert_array_equal(y.array, _arrays()[1])


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "ahead"])
def test_a_variable_has_two_buffers_that_swap_roles(cuda: standin.Cuda, wait: bool) -> None:
    """No copy goes back, after two runs no memory is allocated for it any more, and the numbers are those of all."""
    executable, _ = _updating(cuda)
    x, y = _arrays()
    given = _Foreign(_aligned(y), stream=5)
    (state, _) = executable.run([x, given], RunOptions(stream=5), wait)
    places = [state.pointer]
    for _ in range(5):
        before = len(cuda.calls)
        (state, _) = executable.run([state, given], RunOptions(stream=5), wait)
        places.append(state.pointer)
        made = [n for n, _ in cuda.calls[before:]]
        assert "cudaMemcpyAsync" not in made
        assert made.count("cudaMallocAsync") == (1 if len(places) > 2 else 2)  # for the other result
    assert len(set(places)) == 2
    assert places[::2] == places[:1] * 3
    np.testing.assert_allclose(np.asarray(state), x + 6 * y, rtol=1e-5)


def test_a_content_that_somebody_keeps_is_left_alone(cuda: standin.Cuda) -> None:
    """The next run but one gets memory of its own; so does a run on another stream."""
    executable, _ = _updating(cuda)
    x, y = _arrays()
    states = [executable.run([x, y], RunOptions(stream=5))[0]]
    for stream in (5, 5, 5, 6, 6):
        states.append(executable.run([states[-1], y], RunOptions(stream=stream), block_until_done=False)[0])
    assert len({s.pointer for s in states}) == len(states)
    for k, s in enumerate(states):
        np.testing.assert_allclose(np.asarray(s), x + (k + 1) * y, rtol=1e-5)


def test_work_waits_in_its_stream(cuda: standin.Cuda) -> None:
    """What reads a result before its stream is waited for reads what was there before."""
    executable, _ = _executable(cuda)
    x, y = _arrays()
    (total, _) = executable.run([x, y], RunOptions(stream=5), block_until_done=False)
    there = standin._at(total.pointer, (2, 3), F32)
    assert not np.array_equal(there, x + y)
    np.testing.assert_array_equal(np.asarray(total), x + y)
    pointer, memory_of = total.pointer, standin._at(total.pointer, (2, 3), F32)
    del total
    gc.collect()
    assert pointer not in cuda.live
    np.testing.assert_array_equal(memory_of, x + y)
    cuda.finish()
    assert np.isnan(memory_of).all()


class _ReadOnly(_Foreign):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**super().__cuda_array_interface__, "data": (self.array.ctypes.data, True)}


class _Jax(_Foreign):
    pass


_Jax.__module__ = "jaxlib._jax"


@pytest.mark.parametrize("kind", [_ReadOnly, _Jax, np.asarray, "kept"], ids=["read-only", "jax", "numpy", "kept"])
def test_what_may_not_be_written_to_is_left_alone(cuda: standin.Cuda, kind: Any) -> None:
    """Then the result is an array of its own; so it is where the caller keeps his inputs."""
    executable, _ = _updating(cuda)
    given = [_aligned(a) for a in _arrays()]
    x, y = ((_Foreign if kind == "kept" else kind)(a) for a in given)
    old = given[0].copy()
    (total, _) = executable.run([x, y], RunOptions(donate=kind != "kept"))

    assert isinstance(total, _cuda.DeviceArray)
    np.testing.assert_array_equal(np.asarray(total), old + given[1])
    np.testing.assert_array_equal(given[0], old)


def test_a_failed_run_leaves_an_aliased_input_as_it_was(cuda: standin.Cuda) -> None:
    """Nothing was written there, and the executable is usable afterwards."""
    executable, engine = _updating(cuda)
    x, y = (_Foreign(_aligned(a)) for a in _arrays())
    engine.broken = "Error Code 1: Cuda Runtime (invalid resource handle)"
    with pytest.raises(ExecutionError, match="the run failed"):
        executable.run([x, y])
    np.testing.assert_array_equal(x.array, _arrays()[0])
    engine.broken = ""
    np.testing.assert_array_equal(np.asarray(executable.run([x, y])[0]), x.array + y.array)


def test_aliases_are_stored(cuda: standin.Cuda) -> None:
    """A loaded executable updates in place as the compiled one does."""
    executable, _ = _updating(cuda)
    assert read_blob(executable.serialize()).aliases == [InputOutputAlias(0, 0)]


class _OnlyDLPack:
    """An array on the device that shows itself by DLPack alone, as bfloat16 tensors of torch and JAX do."""

    def __init__(self, array: _cuda.DeviceArray) -> None:
        self.of, self.dtype, self.shape = array, array.dtype, array.shape
        self.asked: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.of.__dlpack_device__()

    def __dlpack__(self, *, stream: int) -> Any:
        self.asked.append(stream)
        return self.of.__dlpack__(stream=stream)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)], ids=str)
def test_bfloat16_is_read_in_place_by_dlpack(cuda: standin.Cuda, shape: tuple[int, ...]) -> None:
    """The run's stream is what the array is asked for, and the memory is held until the run is done."""
    bf16 = np.dtype(ml_dtypes.bfloat16)
    ins, outs = [Parameter("x", bf16, shape)], [Parameter("y", bf16, shape)]
    executable, engine = _executable(cuda, lambda x: [x + x], ins, outs)
    array, want = _cuda.DeviceArray(bf16, shape, 5), np.full(shape, 3, bf16)
    _cuda.copy(array.pointer, want.ctypes.data, want.nbytes, 5)
    x, pointer, alive = _OnlyDLPack(array), array.pointer, weakref.ref(array)
    del array
    (y,) = executable.run([x], RunOptions(stream=5), block_until_done=False)

    assert x.asked == [5]
    assert engine.contexts[0].addresses["x"] == pointer
    np.testing.assert_array_equal(np.asarray(y), want + want)
    cuda.fail["cudaEventQuery"] = standin.Error.not_ready
    del x
    gc.collect()
    assert alive() is not None
    del cuda.fail["cudaEventQuery"]
    cuda.finish()
    executable.run([np.zeros(shape, bf16)], RunOptions(stream=5))
    gc.collect()
    assert alive() is None


def test_what_is_no_capsule() -> None:
    """Another object, or a capsule that was read already, is refused."""
    torch = pytest.importorskip("torch")
    capsule = torch.ones(2, 3).T.__dlpack__()
    assert dlpack.view_of(capsule)[1:] == ((3, 2), (1, 3))
    torch.from_dlpack(capsule)
    for bad in (capsule, object()):
        with pytest.raises(BufferError, match="no capsule"):
            dlpack.view_of(bad)


def test_arrays_with_gradients_and_gaps(cuda: standin.Cuda) -> None:
    """torch shows no tensor that requires a gradient, and gathers one with gaps on the device."""
    executable, _ = _executable(cuda)
    x, y = _arrays()
    found = executable.run([_Torch(_aligned(x), requires_grad=True), _Torch(y, strides=(4, 8))])

    np.testing.assert_array_equal(np.asarray(found[0]), x + y)
    assert "cudaMemcpyAsync" not in cuda.names()[: cuda.names().index("cudaStreamSynchronize")]


def test_arrays_without_elements(cuda: standin.Cuda) -> None:
    """What is empty may lie nowhere; TensorRT is given an address all the same."""
    executable, engine = _executable(
        cuda, lambda x: [x], _params("x", (0, 3)), _params("y", (0, 3)), scratch=0
    )  # fmt: skip
    (found,) = executable.run([_Torch(np.empty((0, 3), F32))])

    assert np.asarray(found).shape == (0, 3)
    assert engine.contexts[0].addresses["x0"] in cuda.live


def test_the_callers_device_stays_current(cuda: standin.Cuda) -> None:
    """A run is on the engine's device whatever the thread's current one is, which is the same afterwards."""
    cuda._devices = 2
    executable, engine = _executable(cuda)
    for current in (0, 1, 0):
        cuda.device = current
        executable.run(_arrays())
        assert cuda.device == current
    assert set(engine.contexts[0].devices) == {0}


def test_an_error_of_the_device_stays(cuda: standin.Cuda) -> None:
    """After an illegal address every later run says so; nothing is computed in a broken context."""
    executable, _ = _executable(cuda)
    executable.run(_arrays())
    cuda.fail["cudaStreamSynchronize"] = standin.Error.illegal_address
    with pytest.raises(ExecutionError, match="illegal_address"):
        executable.run(_arrays())
    cuda.fail.clear()
    with pytest.raises(ExecutionError, match="illegal_address"):
        executable.run(_arrays())
    cuda.broken = None  # what the stand-in holds is given back


def test_one_context_runs_one_thing_at_a_time(cuda: standin.Cuda) -> None:
    """A run on another stream waits for the one before, which nobody waited for, unless that is done."""
    executable, _ = _executable(cuda)
    executable.run(_arrays(), RunOptions(stream=5), block_until_done=False)
    (event,) = (a[0] for n, a in cuda.calls if n == "cudaEventRecord")
    cuda.fail["cudaEventQuery"] = standin.Error.not_ready
    executable.run(_arrays(), RunOptions(stream=5), block_until_done=False)
    assert "cudaStreamWaitEvent" not in cuda.names()
    executable.run(_arrays(), RunOptions(stream=6), block_until_done=False)
    (waited,) = (a for n, a in cuda.calls if n == "cudaStreamWaitEvent")
    assert (waited[0], waited[1] != event) == (6, True)
    del cuda.fail["cudaEventQuery"]
    cuda.finish()
    executable.run(_arrays(), RunOptions(stream=7), block_until_done=False)
    assert cuda.names().count("cudaStreamWaitEvent") == 1


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
def test_inputs_live_until_the_run_is_done(cuda: standin.Cuda, graph: bool) -> None:
    """What the device still reads is held after the call, and given back by the next one."""
    executable, _ = _executable(cuda, graph=graph)
    x, y = (_Foreign(_aligned(a)) for a in _arrays())
    alive = weakref.ref(x)
    executable.run([x, y], block_until_done=False)
    cuda.fail["cudaEventQuery"] = standin.Error.not_ready
    del x
    executable.run(_arrays(), block_until_done=False)
    assert alive() is not None
    del cuda.fail["cudaEventQuery"]
    cuda.finish()
    executable.run(_arrays(), block_until_done=False)
    assert alive() is None


def test_a_context_outlives_what_it_runs(cuda: standin.Cuda) -> None:
    """An executable that is dropped while it runs is waited for, and its events go."""
    executable, _ = _executable(cuda)
    executable.run(_arrays(), block_until_done=False)
    assert "cudaEventSynchronize" not in cuda.names()
    del executable
    gc.collect()
    assert cuda.names("cudaEventSynchronize", "cudaEventDestroy") == ["cudaEventSynchronize", "cudaEventDestroy"]


def test_a_context_goes_after_an_error_of_the_device(cuda: standin.Cuda) -> None:
    """Nothing can be waited for then; the context and its events go all the same."""
    executable, _ = _executable(cuda)
    executable.run(_arrays(), block_until_done=False)
    cuda.fail["cudaEventSynchronize"] = standin.Error.illegal_address
    del executable
    gc.collect()
    assert cuda.names("cudaEventSynchronize", "cudaEventDestroy") == ["cudaEventSynchronize", "cudaEventDestroy"]


def test_scratch_memory_that_grows_is_not_taken_from_a_run(cuda: standin.Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between setting its memory and enqueueing, another run on the stream may ask for more: the old one stays."""
    first, engine = _executable(cuda)
    second, _ = _executable(cuda, scratch=4096)
    enqueue = _toolkit.Toolkit.enqueue

    def interrupted(self: _toolkit.Toolkit, context: standin.Context, stream: int) -> None:
        if context.engine is engine and memory._scratch[0, 9].nbytes == 64:
            second.run(_arrays(), RunOptions(stream=9))
        enqueue(self, context, stream)  # the stand-in checks that its memory is there

    monkeypatch.setattr(_toolkit.Toolkit, "enqueue", interrupted)
    first.run(_arrays(), RunOptions(stream=9))
    assert memory._scratch[0, 9].nbytes == 4096
    first.run(_arrays(), RunOptions(stream=9))
    gc.collect()
    assert engine.contexts[0].memory == (memory._scratch[0, 9].pointer, 64)
    assert not [a for a, m in cuda.live.items() if len(m) == 64 + standin.ALIGNMENT]


def test_scratch_memory_of_many_streams_is_bounded(cuda: standin.Cuda) -> None:
    """Who makes a stream for every call does not fill the device."""
    executable, _ = _executable(cuda)
    for stream in range(200, 240):
        executable.run(_arrays(), RunOptions(stream=stream))
    gc.collect()
    assert list(memory._scratch) == [(0, s) for s in range(224, 240)]
    assert len([m for m in cuda.live.values() if len(m) == 64 + standin.ALIGNMENT]) == 16


def test_a_stream_of_cupy_lives_as_long_as_memory_in_its_order(
    cuda: standin.Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy destroys a stream with its last reference; memory that goes back in its order needs it until then."""

    class Stream:
        ptr = 5

    stream = Stream()
    alive = weakref.ref(stream)
    stand_in = SimpleNamespace(get_current_stream=lambda: alive())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=stand_in, is_available=lambda: True))
    array, other = _cuda.DeviceArray(F32, (2,), 5), _cuda.DeviceArray(F32, (2,), 6)
    del stream
    gc.collect()
    assert alive() is not None
    assert other.stream == 6
    del array
    gc.collect()
    assert alive() is None


def test_results_are_cupys_where_that_is_loaded(cuda: standin.Cuda) -> None:
    """In the memory of the run's stream, without what CuPy 14 has deprecated."""
    with installed(devices=2) as cupy:
        found = memory.new_array(Parameter("y", F32, (2, 3)), 5, 1)
        assert isinstance(found, cupy.ndarray)
        assert (found.device.id, found._block.stream, cupy.cuda.runtime.getDevice()) == (1, 5, 0)


def test_an_engine_belongs_to_the_model_of_its_gpu(cuda: standin.Cuda) -> None:
    """Full TensorRT's engines are specific to it, unless they are built to be compatible; so is the key."""
    toolkit = _toolkit.Toolkit(standin.MODULE, _toolkit.FULL)
    built = Manifest(_toolkit.FULL, toolkit.version, ("sm_80",), False, "none", False, None, (), (), "NVIDIA A100")
    built.check(toolkit, "sm_80", "NVIDIA A100", Settings())
    with pytest.raises(CompileError, match="built on NVIDIA A100; here is NVIDIA A30"):
        built.check(toolkit, "sm_80", "NVIDIA A30", Settings())
    replace(built, hardware_compatibility="same_compute_capability").check(toolkit, "sm_80", "NVIDIA A30", Settings())
    replace(built, flavour=_toolkit.RTX, model="").check(
        _toolkit.Toolkit(standin.MODULE, _toolkit.RTX), "sm_80", "NVIDIA A30", Settings()
    )
    assert _cuda.model() == "NVIDIA Stand-in"


def test_an_engine_that_needs_memory_for_other_shapes_gets_some(cuda: standin.Cuda) -> None:
    """A context without any is refused even where these shapes need none."""
    executable, engine = _executable(cuda, scratch=0)
    engine.device_memory_size_v2 = 1 << 20
    executable.run(_arrays())

    assert engine.contexts[0].device_memory == memory._scratch[0, engine.contexts[0].streams[0]].pointer


def test_scratch_memory_is_of_the_shapes_that_were_set(cuda: standin.Cuda) -> None:
    """Not of the largest batch that the engine takes, where these need less."""
    executable, engine = _executable(cuda, scratch=512)
    engine.device_memory_size_v2 = 1 << 20
    executable.run(_arrays())

    assert engine.contexts[0].memory == (memory._scratch[0, engine.contexts[0].streams[0]].pointer, 512)
    assert memory._scratch[0, engine.contexts[0].streams[0]].nbytes == 512


def test_an_input_that_nothing_reads(cuda: standin.Cuda) -> None:
    """The engine may not have it; then it is not bound."""
    executable, engine = _executable(cuda, lambda x: [x * 2], outs=_params("y", (2, 3)))
    engine.tensors.remove("x1")
    x, y = _arrays()

    np.testing.assert_array_equal(np.asarray(executable.run([x, y])[0]), x * 2)


def test_shapes_in_the_cpus_memory_are_refused(cuda: standin.Cuda) -> None:
    """A tensor that TensorRT reads on the CPU would be read at an address of the device."""
    executable, engine = _executable(cuda)
    engine.locations["x1"] = standin.Location.HOST
    with pytest.raises(ExecutionError, match="'x1' is a shape, which the engine wants in the CPU's memory"):
        executable.run(_arrays())


class _OnTheDefaultStream:
    """Asks as a consumer on the GPU does; NumPy names no stream."""

    def __init__(self, array: _cuda.DeviceArray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> Any:
        return self._array.__dlpack__(stream=1, **asked)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int8, np.uint8, np.bool_])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)], ids=str)
def test_dlpack(cuda: standin.Cuda, monkeypatch: pytest.MonkeyPatch, dtype: Any, shape: tuple[int, ...]) -> None:
    """Other libraries read results in place, on the streams' order; the memory lives as long as they hold it."""
    monkeypatch.setattr(dlpack, "KIND", 1)  # the stand-in's memory is the CPU's, so NumPy can read it
    array = _cuda.DeviceArray(np.dtype(dtype), shape, 9)
    want = (np.arange(int(np.prod(shape))) % 2).astype(dtype).reshape(shape)
    _cuda.copy(array.pointer, want.ctypes.data, want.nbytes, 9)
    pointer = array.pointer
    cuda.calls.clear()
    got = np.from_dlpack(_OnTheDefaultStream(array))
    del array
    gc.collect()
    assert got.dtype == want.dtype
    cuda.drain(1)  # the consumer's stream waits for what fills the array
    np.testing.assert_array_equal(got, want)
    assert ("cudaStreamWaitEvent", (1, 7, 0)) in cuda.calls
    assert pointer in cuda.live
    cuda.calls.clear()
    del got
    gc.collect()
    assert pointer not in cuda.live
    assert cuda.names("cudaStreamWaitEvent", "cudaFreeAsync") == ["cudaStreamWaitEvent", "cudaFreeAsync"]


def test_the_core_reads_results(cuda: standin.Cuda) -> None:
    """NumPy's DLPack refuses memory of a GPU; what the core gives to callers is copied up."""
    executable, _ = _executable(cuda)
    x, y = _arrays()
    results = executable.run([x, y])
    with pytest.raises(BufferError, match="names no stream"):
        np.from_dlpack(results[0])
    np.testing.assert_array_equal(to_numpy(results[0]), x + y)
    assert not dlpack._shared


def test_dlpack_that_nobody_reads(cuda: standin.Cuda) -> None:
    """A capsule that is dropped leaves nothing behind; what cannot be given is refused before anything is done."""
    array = _cuda.DeviceArray(F32, (2,), 9)
    pointer = array.pointer
    capsule = array.__dlpack__(stream=-1)
    assert "cudaStreamWaitEvent" not in cuda.names()
    with pytest.raises(BufferError, match="given as it is"):
        array.__dlpack__(stream=1, copy=True)
    eight = _cuda.DeviceArray(np.dtype(ml_dtypes.float8_e4m3fn), (2,), 9)
    with pytest.raises(BufferError, match="no float8_e4m3fn"):
        eight.__dlpack__(stream=1)
    del array, eight
    assert pointer in cuda.live
    del capsule
    gc.collect()
    assert not cuda.live
    assert not dlpack._shared


def test_torch_reads_bfloat16_in_place(cuda: standin.Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype that CuPy and NumPy lack keeps its name."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(dlpack, "KIND", 1)
    array = _cuda.DeviceArray(np.dtype(ml_dtypes.bfloat16), (2, 2), 9)
    want = np.array([[1, -2], [0.5, 3]], ml_dtypes.bfloat16)
    _cuda.copy(array.pointer, want.ctypes.data, want.nbytes, 9)
    got = torch.from_dlpack(array.__dlpack__(stream=1))
    cuda.drain(1)  # torch reads the memory of the stand-in on no stream
    assert got.dtype == torch.bfloat16
    assert got.tolist() == want.astype(float).tolist()
    assert got.data_ptr() == array.pointer
    del array, got
    gc.collect()
    assert not cuda.live


def test_shapes_that_cannot_be_inferred(cuda: standin.Cuda) -> None:
    """The bindings raise there, instead of answering; it is an error of the run."""
    executable, engine = _executable(cuda)
    engine.uninferable = "sizes do not go together"
    with pytest.raises(ExecutionError, match="cannot be inferred: sizes do not go together"):
        executable.run(_arrays())


def test_streams_go_to_other_threads(cuda: standin.Cuda) -> None:
    """A thread that ends leaves its stream to the next one; two at the same time have two."""
    executable, engine = _executable(cuda)
    for _ in range(3):
        thread = threading.Thread(target=lambda: executable.run(_arrays()))
        thread.start()
        thread.join()
        gc.collect()
    assert len({s for c in engine.contexts for s in c.streams}) == 1
    executable.run(_arrays())
    assert cuda.names("cudaStreamCreate") == ["cudaStreamCreate"]


def test_results_are_inputs_without_a_copy(cuda: standin.Cuda) -> None:
    """What one run returned goes into the next by its address."""
    executable, engine = _executable(cuda)
    first, second = executable.run(_arrays())
    before = cuda.names("cudaMemcpyAsync")
    executable.run([first, second])

    assert engine.contexts[0].addresses["x0"] == first.pointer
    assert cuda.names("cudaMemcpyAsync") == before


def test_another_stream_is_waited_for(cuda: standin.Cuda) -> None:
    """An array that another stream computes is waited for by an event, not by the CPU."""
    executable, engine = _executable(cuda)
    executable.run([_Foreign(_aligned(a), stream=42) for a in _arrays()], block_until_done=False)

    stream = engine.contexts[0].streams[0]
    assert ("cudaEventRecord", (7, 42)) in cuda.calls
    assert ("cudaStreamWaitEvent", (stream, 7, 0)) in cuda.calls
    assert cuda.names().index("cudaStreamWaitEvent") < len(cuda.calls)
    assert "cudaStreamSynchronize" not in cuda.names()


def test_device_arrays_with_gaps_are_copied(cuda: standin.Cuda) -> None:
    """A strided device array is not bound by its address."""
    executable, engine = _executable(cuda)
    x, y = _arrays()
    strided = _Foreign(x, strides=(4, 8))
    executable.run([strided, y])

    assert engine.contexts[0].addresses["x0"] != x.ctypes.data


def test_a_context_for_each_thread_and_shared_scratch_memory(cuda: standin.Cuda) -> None:
    """Two threads have two contexts; runs on one stream share scratch memory, also between executables."""
    first, engine = _executable(cuda)
    second, other = _executable(cuda, scratch=32)
    run = lambda: [e.run(_arrays(), RunOptions(stream=9)) for e in (first, first, second)]  # noqa: E731
    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert len(engine.contexts) == 2
    assert {c.memory[0] for c in (*engine.contexts, *other.contexts) if c.memory} == {memory._scratch[0, 9].pointer}
    assert len([1 for n, a in cuda.calls if n == "cudaMallocAsync" and a == (64, 9)]) == 1


def test_memory_goes_back(cuda: standin.Cuda) -> None:
    """Inputs that were copied down and results that nobody holds leave nothing allocated but the scratch memory."""
    executable, _ = _executable(cuda)
    for i in range(3):
        executable.run(_arrays(i))
    gc.collect()

    assert list(cuda.live) == [memory._scratch[next(iter(memory._scratch))].pointer]


def test_a_run_is_recorded_once_and_replayed(cuda: standin.Cuda) -> None:
    """With cuda_graph the second run replays what the first recorded, on its own data, into results of its own."""
    executable, engine = _executable(cuda, graph=True)
    found = [executable.run(_arrays(i)) for i in range(3)]

    assert cuda.names("cudaStreamBeginCapture", "cudaGraphInstantiate", "cudaGraphLaunch") == [
        "cudaStreamBeginCapture", "cudaGraphInstantiate", "cudaGraphLaunch", "cudaGraphLaunch",
    ]  # fmt: skip
    assert len(engine.contexts[0].streams) == 2  # once as it is, once recorded
    for i, (total, _) in enumerate(found):
        x, y = _arrays(i)
        np.testing.assert_array_equal(np.asarray(total), x + y)


def test_recording_is_apart_from_the_default_stream(cuda: standin.Cuda) -> None:
    """The default stream cannot be recorded, nor one that is ordered against it while others use that."""
    executable, engine = _executable(cuda, graph=True)
    executable.run(_arrays(), RunOptions(stream=0))

    (begun,) = (a[0] for n, a in cuda.calls if n == "cudaStreamBeginCapture")
    assert ("cudaStreamCreateWithFlags", (1,)) in cuda.calls
    assert ("cudaStreamDestroy", (begun,)) in cuda.calls
    first, second = engine.contexts[0].streams
    assert (first in memory._own, second) == (True, begun)


def test_a_recorded_run_has_scratch_memory_of_its_own(cuda: standin.Cuda) -> None:
    """What other runs on the stream do to theirs, growing it say, leaves the recorded addresses good."""
    executable, engine = _executable(cuda, graph=True)
    executable.run(_arrays(), RunOptions(stream=9))
    recorded = engine.contexts[0].memory
    for scratch in (128, 4096):
        _executable(cuda, scratch=scratch)[0].run(_arrays(), RunOptions(stream=9))
    gc.collect()

    assert recorded is not None
    assert recorded[0] in cuda.live
    assert recorded[0] != memory._scratch[0, 9].pointer


@pytest.mark.parametrize("call", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_what_cannot_be_recorded_runs_as_it_is(cuda: standin.Cuda, call: str) -> None:
    """The first run has its results, and so have the next ones."""
    executable, _ = _executable(cuda, graph=True)
    cuda.fail[call] = standin.Error.capture_unsupported
    for i in range(3):
        x, y = _arrays(i)
        np.testing.assert_array_equal(np.asarray(executable.run([x, y])[0]), x + y)
        cuda.captures.clear()

    assert cuda.names("cudaStreamBeginCapture", "cudaGraphLaunch") == ["cudaStreamBeginCapture"]


def test_the_bindings_take_what_they_are_given() -> None:
    """cuda-bindings itself, where no driver is: every call gets as far as the missing driver."""
    if not _cuda.why_unusable():
        pytest.skip("there is a GPU: the tests of gpu show more")
    event = _cuda._runtime().cudaEvent_t(7)
    graph = _cuda._runtime().cudaGraphExec_t(7)
    calls: list[Callable[[], Any]] = [
        lambda: _cuda.on(0).__enter__(), _cuda.new_stream, lambda: _cuda.synchronize(5), lambda: _cuda.wait_for(5, 6),
        _cuda.new_event, lambda: _cuda.record(event, 5), lambda: _cuda.wait_event(5, event),
        lambda: _cuda.is_past(event), lambda: _cuda.synchronize_event(event), lambda: _cuda.forget_event(event),
        lambda: _cuda.copy(16, 32, 4, 5), lambda: _cuda.allocate(16, 5), lambda: _cuda.release(16, 5),
        lambda: _cuda.capture(lambda s: None), lambda: _cuda.replay(graph, 5), lambda: _cuda.forget(graph),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ExecutionError, match=r"^tensorrt: cuda\w+: cudaError"):
            call()


def test_tensorrt_rtx_records_by_itself(cuda: standin.Cuda) -> None:
    """TensorRT-RTX is asked to capture whole graphs; the executable records nothing."""
    executable, engine = _executable(cuda, flavour=_toolkit.RTX, graph=True)
    executable.run(_arrays())

    assert engine.runtime_config.cuda_graph_strategy is standin.GraphStrategy.WHOLE_GRAPH_CAPTURE
    assert "cudaStreamBeginCapture" not in cuda.names()


def _rerun(executable: TensorRTExecutable) -> TensorRTExecutable:
    """The same engine as another process would load it."""
    built = executable.built
    again = BuiltEngine(built.toolkit, 0, built.manifest, built.blob)
    return TensorRTExecutable(again, executable._params, executable._returns)


def test_compiled_kernels_are_kept(cuda: standin.Cuda, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What TensorRT-RTX compiles at an engine's first run is there for the next process, and for its other threads."""
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path))
    executable, engine = _executable(cuda, flavour=_toolkit.RTX)
    executable.run(_arrays())
    (file,) = (tmp_path / "tensorrt").iterdir()
    assert file.read_bytes() == b"kernels 1"
    assert engine.runtime_config.strategy is standin.Allocation.USER_MANAGED

    again = _rerun(executable)
    again.run(_arrays())
    thread = threading.Thread(target=lambda: again.run(_arrays()))
    thread.start()
    thread.join()
    assert (engine.compiled, len(engine.contexts)) == (1, 3)


def test_a_damaged_cache_of_kernels_costs_nothing_else(
    cuda: standin.Cuda, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that TensorRT-RTX refuses are replaced, and a folder that cannot be written is left alone."""
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path))
    executable, engine = _executable(cuda, flavour=_toolkit.RTX)
    executable.run(_arrays())
    (file,) = (tmp_path / "tensorrt").iterdir()
    file.write_bytes(b"of another GPU")
    _rerun(executable).run(_arrays())
    assert (engine.compiled, file.read_bytes()) == (2, b"kernels 2")

    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path / "file"))
    x, y = _arrays()
    np.testing.assert_array_equal(np.asarray(_rerun(executable).run([x, y])[0]), x + y)


def test_the_oldest_kernels_go_first(
    cuda: standin.Cuda, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files together stay below a limit."""
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels_cache, "_MOST_BYTES", 20)
    for i in range(3):
        _executable(cuda, flavour=_toolkit.RTX)[0].run(_arrays())
        for file in (tmp_path / "tensorrt").iterdir():
            os.utime(file, (file.stat().st_mtime - 100,) * 2)
        assert len(list((tmp_path / "tensorrt").iterdir())) == min(i + 1, 2)


def test_a_failed_run_says_why_and_leaves_the_executable_usable(cuda: standin.Cuda) -> None:
    """TensorRT's own words reach the caller; the next run works, on a context of its own."""
    executable, engine = _executable(cuda)
    executable.run(_arrays())
    engine.broken = "Error Code 1: Cuda Runtime (invalid resource handle)"
    with pytest.raises(ExecutionError, match="the run failed: Error Code 1: Cuda Runtime"):
        executable.run(_arrays())
    engine.broken = ""
    x, y = _arrays(5)

    np.testing.assert_array_equal(np.asarray(executable.run([x, y])[0]), x + y)
    assert len(engine.contexts) == 2


def test_out_of_memory(cuda: standin.Cuda) -> None:
    """Too little device memory is an ExecutionError that says what was asked for and what is free."""
    executable, _ = _executable(cuda)
    cuda.fail["cudaMallocAsync"] = standin.Error.out_of_memory
    with pytest.raises(ExecutionError, match="out of device memory for 24 bytes, 4,096 of 1,073,741,824 bytes are"):
        executable.run(_arrays())


def test_an_error_of_cuda_is_named(cuda: standin.Cuda) -> None:
    """Another failure of CUDA is named in CUDA's words."""
    executable, _ = _executable(cuda)
    cuda.fail["cudaStreamSynchronize"] = standin.Error.illegal_address
    with pytest.raises(ExecutionError, match="illegal_address, words for illegal_address"):
        executable.run(_arrays())


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([np.zeros((2, 3), F32)], "takes 2 inputs, 1 were given"),
        ([np.zeros((2, 3), F32), np.zeros((3, 2), F32)], r"'x1' must be float32\[2, 3\], float32\[3, 2\] was given"),
        ([np.zeros((2, 3), F32), np.zeros((2, 3))], "float64"),
        ([np.zeros((2, 3), F32), [1, 2]], "list was given"),
    ],
)
def test_inputs_that_do_not_fit(cuda: standin.Cuda, inputs: list[Any], reason: str) -> None:
    """Wrong inputs are refused before anything reaches the device."""
    executable, engine = _executable(cuda)
    with pytest.raises(ExecutionError, match=reason):
        executable.run(inputs)
    assert not engine.contexts


def test_bytes_that_do_not_load(cuda: standin.Cuda) -> None:
    """Foreign bytes fail with the library's message."""
    executable, _ = _executable(cuda)
    executable.built.blob = b"nonsense"
    with pytest.raises(ExecutionError, match="does not load: magicTag does not match"):
        executable.run(_arrays())


def test_a_larger_engine_takes_the_place_of_a_smaller_one(cuda: standin.Cuda) -> None:
    """After `replace`, executables of other batches go on with contexts of the new engine; one that does not load
    changes nothing."""
    small, engine = _executable(cuda, lambda x: [x * 2], _params("x", (2, 3)), _params("y", (2, 3)), largest=4)
    large, bigger = _executable(cuda, lambda x: [x * 2], _params("x", (9, 3)), _params("y", (9, 3)), largest=16)
    broken, _ = _executable(cuda, lambda x: [x], _params("x", (9, 3)), _params("y", (9, 3)), largest=32)
    broken.built.blob = b"nonsense"
    (x,) = _arrays(0, (2, 3))
    small.run([x])
    with pytest.raises(CompileError, match="does not load"):
        small.built.replace(broken.built)
    small.run([x])
    assert (small.built.largest, len(engine.contexts), len(bigger.contexts)) == (4, 1, 0)

    small.built.replace(large.built)
    np.testing.assert_array_equal(np.asarray(small.run([x])[0]), x * 2)
    assert (small.built.largest, len(bigger.contexts)) == (16, 1)


def test_a_batch_outside_the_profile(cuda: standin.Cuda) -> None:
    """A shape that the profile does not hold is an error, and no run."""
    executable, _ = _executable(cuda, lambda x: [x], _params("x", (9, 3)), _params("y", (9, 3)), largest=4)
    with pytest.raises(ExecutionError, match="outside the engine's profile"):
        executable.run(_arrays(0, (9, 3)))


@pytest.mark.parametrize(("batch", "number"), [(1, 0), (2, 1), (32, 1), (33, 2)])
def test_a_batch_runs_by_the_profile_that_holds_it(cuda: standin.Cuda, batch: int, number: int) -> None:
    """A context switches to it before its shapes are set, and no run comes before it has."""
    shapes = _params("x", (batch, 3)), _params("y", (batch, 3))
    executable, engine = _executable(cuda, lambda x: [x * 2], *shapes, largest=64)
    engine.profiles = [(1, 1), (2, 32), (33, 64)]
    _set_profiles(executable, ((1, 1, 1), (2, 8, 32), (33, 64, 64)))
    (x,) = _arrays(0, (batch, 3))
    np.testing.assert_array_equal(np.asarray(executable.run([x])[0]), x * 2)
    (context,) = engine.contexts
    assert (context.chosen, context.active) == (number, number)
    np.testing.assert_array_equal(np.asarray(executable.run([x])[0]), x * 2)
    assert len(engine.contexts) == 1


def test_a_batch_between_profiles(cuda: standin.Cuda) -> None:
    """And a profile that the library does not take: errors that say so."""
    shapes = _params("x", (3, 3)), _params("y", (3, 3))
    executable, engine = _executable(cuda, lambda x: [x * 2], *shapes, largest=64)
    engine.profiles = [(1, 1)]
    _set_profiles(executable, ((1, 1, 1), (8, 16, 64)))
    with pytest.raises(ExecutionError, match=r"batch 3 is outside the engine's profiles \(1 to 1, 8 to 64\)"):
        executable.run(_arrays(0, (3, 3)))
    _set_profiles(executable, ((1, 1, 1), (2, 16, 64)))
    with pytest.raises(ExecutionError, match="optimisation profile 1 is not taken"):
        executable.run(_arrays(0, (3, 3)))


def _set_profiles(executable: TensorRTExecutable, profiles: tuple[tuple[int, int, int], ...]) -> None:
    executable.built.manifest = replace(executable.built.manifest, profiles=profiles)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver a run is refused with what the engine was built for."""
    fake = standin.Cuda()
    executable, _ = _executable(fake)
    monkeypatch.setattr(_cuda, "why_unusable", lambda: "no CUDA driver that fits")
    with pytest.raises(ExecutionError, match="built for sm_89 and cannot run here: no CUDA driver"):
        executable.run(_arrays())


class _Compiler(GraphCompiler):
    """Puts the stand-in, computing by the host's kernels, in the place of a built engine."""

    def __init__(self, cuda: standin.Cuda) -> None:
        self.cuda = cuda
        self.engines: list[standin.Engine] = []

    def compile(self, function: Function, entry_params: Any, return_params: Any, aliases: Any) -> TensorRTExecutable:
        run = HostExecutable(function, entry_params, return_params, ()).run
        made, engine = _executable(self.cuda, lambda *x: run([a.copy() for a in x]), entry_params, return_params)
        self.engines.append(engine)
        return TensorRTExecutable(made.built, entry_params, return_params, aliases=aliases)


@pytest.fixture
def compiler(cuda: standin.Cuda) -> Iterator[_Compiler]:
    """What modules on the engine "trt_standin" are compiled by."""
    made = _Compiler(cuda)

    class StandIn(TensorRTEngine):
        name = "trt_standin"

        def probe(self) -> EngineStatus:
            return EngineStatus(True, "1", ("cuda:0",))

        def supports(self, node: Node, device: str, phase: Any) -> Support:
            return Support.no("it is left to the host") if node.op_type == "Abs" else Support.yes()

        def compiler(self, device: str, options: Any) -> Any:
            return made

        def fingerprint(self, device: str) -> str:
            return f"stand-in {id(made)}"

    engines.register(StandIn)
    try:
        yield made
    finally:
        engines.unregister("trt_standin")


def _graph(*operators: str) -> Graph:
    """Add, then these."""
    x, y, *made = (Value(n, TensorType(F32, (2, 3))) for n in "xyabcd"[: 3 + len(operators)])
    nodes = [Node("Add", [x, y], [made[0]], version=14)]
    nodes += [Node(o, [a], [b], version=13) for o, a, b in zip(operators, made, made[1:], strict=False)]
    return Graph([x, y], [made[-1]], nodes, opsets={"": 21})


def test_a_module_reads_device_arrays_in_place(cuda: standin.Cuda, compiler: _Compiler) -> None:
    """An array that names a stream is bound where it lies, and the run goes to that stream."""
    m = XRTModule(_graph("Neg"), engine="trt_standin")
    for seed in range(3):
        x, y = (_Foreign(_aligned(a), stream=5) for a in _arrays(seed))
        np.testing.assert_array_equal(m(x, y), -(x.array + y.array))
        (engine,) = compiler.engines
        assert engine.contexts[0].addresses["x"] == x.array.ctypes.data
        assert engine.contexts[0].streams[-1] == 5
    assert not m.explain().errors


def test_a_module_waits_once(cuda: standin.Cuda, compiler: _Compiler) -> None:
    """NumPy callers wait where a step of the host, or they themselves, read something; launches wait for nothing."""
    for operators, waits in ((("Neg", "Exp"), 1), (("Abs", "Neg"), 2)):
        m = XRTModule(_graph(*operators), engine="trt_standin", prune=False)
        m(*_arrays())
        cuda.calls.clear()
        x, y = _arrays(1)
        want = np.exp(-(x + y)) if "Exp" in operators else -np.abs(x + y)
        np.testing.assert_allclose(m(x, y), want, rtol=1e-6)
        assert cuda.names("cudaStreamSynchronize") == ["cudaStreamSynchronize"] * waits
        assert not m.explain().errors


def test_a_module_survives_a_late_failure(cuda: standin.Cuda, compiler: _Compiler) -> None:
    """What CUDA says when the results are read leads to a run that waits, and from there to the host."""
    m = XRTModule(_graph("Neg"), engine="trt_standin")
    m(*_arrays())
    cuda.fail["cudaStreamSynchronize"] = standin.Error.illegal_address
    x, y = _arrays(1)
    np.testing.assert_array_equal(m(x, y), -(x + y))
    assert "illegal_address" in next(iter(m.explain().errors.values()))


@pytest.mark.tiny_clusters
def test_a_training_step_builds_nothing(cuda: standin.Cuda, compiler: _Compiler) -> None:
    """Weights are inputs of a step, so what an update changes is no other function; and they stay on the device."""
    x, y, h, loss = (Value(n, TensorType(F32, (2, 3))) for n in "xyhl")
    w = Value.constant(np.full((2, 3), 0.5, np.float32), "w")
    loss = Value("loss", TensorType(F32, ()))
    nodes = [
        Node("Mul", [x, w], [h], version=14),
        Node("Sub", [h, y], [(d := Value("d", TensorType(F32, (2, 3))))], version=14),
        Node("Mul", [d, d], [(q := Value("q", TensorType(F32, (2, 3))))], version=14),
        Node("ReduceMean", [q], [loss], {"keepdims": 0}, version=18),
    ]
    graph = Graph([x, y], [loss], nodes, opsets={"": 21})
    m = TrainModule(graph, optimizer=SGD(0.5), engine="trt_standin", prune=False)
    given = _arrays()
    losses = [float(m.step(*given)) for _ in range(2)]
    built = len(compiler.engines)
    losses += [float(m.step(*given)) for _ in range(4)]
    assert len(compiler.engines) == built
    cuda.calls.clear()
    losses.append(float(m.step(*given)))
    assert losses == sorted(losses, reverse=True)
    uploads = [a[2] for n, a in cuda.calls if n == "cudaMemcpyAsync" and a[0] in cuda.live]
    assert sum(uploads) <= 2 * given[0].nbytes + 64, "the weights went up again"
