"""Where results go: arrays that the caller wants them in, and memory that a run asks for when it knows their shapes."""

# ruff: noqa: F811 - the fixtures are those of test_tensorrt_run

from __future__ import annotations

import gc
import inspect
import re
import threading
from typing import Any

import numpy as np
import pytest
import standin
from test_tensorrt_run import (
    F32,
    _aligned,
    _arrays,
    _Compiler,
    _executable,
    _Foreign,
    _Jax,
    _params,
    _ReadOnly,
    _updating,
    compiler,  # noqa: F401
    cuda,  # noqa: F401
)
from xrt_tensorrt import TensorRTEngine, _toolkit
from xrt_tensorrt.executable import TensorRTExecutable, read_blob
from xrt_tensorrt.opened import Opened

from xrt_core.engine.contract import Parameter, RunOptions
from xrt_core.errors import ExecutionError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.module import XRTModule

I64 = np.dtype(np.int64)


def _buffer(stream: int | None = None, offset: int = 0) -> _Foreign:
    return _Foreign(_aligned(np.full((2, 3), np.nan, F32), offset), stream)


def test_results_are_written_where_they_are_wanted(cuda: standin.Cuda) -> None:
    """TensorRT itself writes there, after what the buffer's owner does and before what it does next; another result
    gets memory of its own."""
    executable, engine = _executable(cuda)
    x, y = _arrays()
    out = _buffer(stream=7)
    total, product = executable.run([x, y], RunOptions(stream=5, results=(out, None)), block_until_done=False)
    assert total is out
    assert engine.contexts[0].addresses["y0"] == out.array.ctypes.data
    assert np.isnan(out.array).all()
    waits = [(a[0], events[a[1]]) for events in [_recorded(cuda)] for n, a in cuda.calls if n == "cudaStreamWaitEvent"]
    assert waits == [(5, 7), (7, 5)]
    cuda.drain(7)
    np.testing.assert_array_equal(out.array, x + y)
    np.testing.assert_array_equal(np.asarray(product), x * y)


def _recorded(cuda: standin.Cuda) -> dict[int, int]:
    """Event -> the stream that it was recorded on."""
    return {a[0]: a[1] for n, a in cuda.calls if n == "cudaEventRecord"}


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
@pytest.mark.parametrize("where", ["unaligned", "an input's memory", "both in one place"])
def test_a_buffer_that_tensorrt_cannot_write_to(cuda: standin.Cuda, graph: bool, where: str) -> None:
    """The result is copied there after the run, so that inputs are read before; of two in one place one is its own."""
    executable, _ = _executable(cuda, graph=graph)
    for seed in range(3):
        x, y = (_Foreign(_aligned(a)) for a in _arrays(seed))
        total, product = x.array + y.array, x.array * y.array
        out = x if where == "an input's memory" else _buffer(offset=4 if where == "unaligned" else 0)
        wanted = (out, out) if where == "both in one place" else (out, None)
        found = executable.run([x, y], RunOptions(stream=5, results=wanted))
        assert found[0] is out
        assert found[1] is not out
        np.testing.assert_array_equal(out.array, total)
        np.testing.assert_array_equal(np.asarray(found[1]), product)


@pytest.mark.parametrize("kind", ["read-only", "jax", "numpy", "gaps", "shape", "dtype", "a list"])
def test_a_buffer_that_does_not_fit_is_left_alone(cuda: standin.Cuda, kind: str) -> None:
    """The result is an array of its own, which is what the contract allows."""
    executable, _ = _executable(cuda)
    memory = _aligned(np.zeros((2, 3), F32))
    out: Any = {
        "read-only": lambda: _ReadOnly(memory), "jax": lambda: _Jax(memory), "numpy": lambda: memory,
        "gaps": lambda: _Foreign(memory, strides=(4, 8)), "shape": lambda: _Foreign(memory.reshape(3, 2)),
        "dtype": lambda: _Foreign(memory.view(np.int32)), "a list": lambda: [0.0],
    }[kind]()  # fmt: skip
    x, y = _arrays()
    (total, _) = executable.run([x, y], RunOptions(results=(out, None)))
    assert total is not out
    np.testing.assert_array_equal(np.asarray(total), x + y)
    assert not memory.any()


def test_an_updated_variable_has_its_own_buffers(cuda: standin.Cuda) -> None:
    """What is wanted of an aliased result does not come between the two arrays that swap roles."""
    executable, _ = _updating(cuda)
    x, y = _arrays()
    out = _buffer()
    (state, _) = executable.run([x, y], RunOptions(stream=5, results=(out, None)))
    assert state is not out
    assert np.isnan(out.array).all()
    np.testing.assert_array_equal(np.asarray(state), x + y)


def test_recorded_results_outlive_the_next_replay(cuda: standin.Cuda) -> None:
    """Each run's buffer has that run's numbers; the graph's memory is its own, whatever is given."""
    executable, _ = _executable(cuda, graph=True)
    buffers = [_buffer() for _ in range(4)]
    for seed, out in enumerate(buffers):
        executable.run(_arrays(seed), RunOptions(stream=5, results=(out, None)), block_until_done=False)
    cuda.drain(5)
    for seed, out in enumerate(buffers):
        x, y = _arrays(seed)
        np.testing.assert_array_equal(out.array, x + y)
    assert cuda.names("cudaStreamBeginCapture", "cudaGraphLaunch").count("cudaGraphLaunch") == 3
    del executable
    gc.collect()
    assert not cuda.graphs


# --- shapes that depend on data -------------------------------------------------------------------------------------


def _opened(cuda: standin.Cuda, graph: bool = False) -> tuple[TensorRTExecutable, standin.Engine]:
    """(indices of what is not 0, x + x)."""
    outs = [Parameter("at", I64, (2, None)), Parameter("y", F32, (2, 3))]
    return _executable(cuda, lambda x: [np.array(np.nonzero(x)), x + x], _params("x", (2, 3)), outs, graph=graph)


def _given(count: int) -> np.ndarray:
    return (np.arange(6) < count).astype(F32).reshape(2, 3)


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
def test_shapes_that_the_run_determines(cuda: standin.Cuda, graph: bool) -> None:
    """Each result has the shape of its run and memory of its own; what the run asks for is kept and grows; a run that
    asks for memory is not recorded."""
    executable, engine = _opened(cuda, graph)
    counts = (6, 2, 0, 4)
    found = [executable.run([_given(n)], RunOptions(stream=5), block_until_done=False) for n in counts]
    for n, (at, y) in zip(counts, found, strict=True):
        assert (tuple(at.shape), at.dtype) == ((2, n), I64)
        np.testing.assert_array_equal(np.asarray(at), np.nonzero(_given(n)))
        np.testing.assert_array_equal(np.asarray(y), 2 * _given(n))
    asked = [a[0] for n, a in cuda.calls if n == "cudaMallocAsync"]
    assert asked.count(96) == 2  # once to write to, once for the first result: six pairs of int64
    assert not cuda.names("cudaStreamBeginCapture")
    engine.asks = 4096  # an upper bound, as TensorRT asks for
    at, _ = executable.run([_given(1)], RunOptions(stream=6))
    np.testing.assert_array_equal(np.asarray(at), [[0], [0]])
    assert at.nbytes == 16


def test_runs_with_open_shapes_on_two_threads(cuda: standin.Cuda) -> None:
    """Each thread's context has an allocator, and memory, of its own."""
    executable, engine = _opened(cuda)
    wrong: list[Any] = []

    def work(n: int) -> None:
        for _ in range(5):
            at, _ = executable.run([_given(n)])
            if tuple(at.shape) != (2, n) or not np.array_equal(np.asarray(at), np.nonzero(_given(n))):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len({id(c.allocators["at"]()) for c in engine.contexts} - {id(None)}) <= len(engine.contexts) == 2


@pytest.mark.parametrize("trouble", ["memory", "silent", "rank"])
def test_a_run_that_does_not_tell_its_result(cuda: standin.Cuda, trouble: str) -> None:
    """Too little memory, no shape or one of another rank is an ExecutionError that says so; the next run is right."""
    executable, engine = _opened(cuda)
    executable.run([_given(1)], RunOptions(stream=5))
    right = engine.function
    if trouble == "memory":
        engine.asks = 1 << 20
        cuda.fail["cudaMallocAsync"] = standin.Error.out_of_memory
    elif trouble == "silent":
        engine.is_silent = True
    else:
        engine.function = lambda x: [np.zeros((3, 1), np.int64), x + x]
    said = {"memory": "out of device memory for", "silent": "told no shape for 'at'", "rank": r"the shape \[3, 1\] for"}
    held = None
    if trouble == "memory":  # the inputs' copies and the other result are there already
        held = cuda.fail.pop("cudaMallocAsync")
        allocate = cuda._cudaMallocAsync

        def limited(size: int, stream: int) -> int:
            if size >= 1 << 20:
                raise standin._Failed(held)
            return allocate(size, stream)

        cuda._cudaMallocAsync = limited  # type: ignore[method-assign]
    with pytest.raises(ExecutionError, match=said[trouble]):
        executable.run([_given(2)], RunOptions(stream=5))
    engine.function, engine.is_silent, engine.asks = right, False, 0
    at, _ = executable.run([_given(2)], RunOptions(stream=5))
    np.testing.assert_array_equal(np.asarray(at), np.nonzero(_given(2)))


def test_open_shapes_are_stored(cuda: standin.Cuda) -> None:
    """A loaded executable knows which dimensions only a run tells."""
    executable, _ = _opened(cuda)
    assert read_blob(executable.serialize()).returns == [Parameter("at", I64, (2, None)), Parameter("y", F32, (2, 3))]


@pytest.mark.tiny_clusters
def test_a_module_goes_on_from_an_open_shape(cuda: standin.Cuda, compiler: _Compiler) -> None:
    """Full TensorRT gets NonZero, at the end of a cluster; what follows is planned for the shape that comes."""
    x, h, at, y = Value("x", TensorType(F32, (2, 3))), *map(Value, ("h", "at", "y"))
    nodes = [
        Node("Neg", [x], [h], version=13),
        Node("NonZero", [h], [at], version=13),
        Node("Mul", [at, at], [y], version=14),
    ]
    m = XRTModule(Graph([x], [y], nodes, opsets={"": 21}), engine="trt_standin", prune=False)
    for n in (3, 0, 6):
        np.testing.assert_array_equal(m(_given(n)), np.square(np.nonzero(_given(n))))
    assert not m.explain().errors
    assert any(e.outputs["at"].dims == (2, None) for e in compiler.engines if "at" in e.outputs)


def test_tensorrt_rtx_is_offered_none(engine: TensorRTEngine) -> None:
    """It parses NonMaxSuppression and has no implementation of it, which only the build would tell."""
    x, y = Value("x", TensorType(F32, (4, 5))), Value("y", TensorType(I64, (2, None)))
    answer = engine.supports(Node("NonZero", [x], [y], version=13), "cuda:0", "inference")
    assert not answer
    assert "TensorRT-RTX 1.7" in answer.reason
    assert "depends on data" in answer.reason


# --- the stand-in and the library -----------------------------------------------------------------------------------


def test_the_allocator_is_one_of_the_librarys(engine: TensorRTEngine) -> None:
    """The real base class takes it, with the methods that its documentation names and their parameters."""
    trt = _toolkit.toolkit().trt
    opened = Opened(trt)
    assert isinstance(opened.allocator, trt.IOutputAllocator)
    documented = dict(re.findall(r"def (\w+)\(self((?:, \w+)+)\)", trt.IOutputAllocator.__doc__ or ""))
    assert set(documented) >= {"reallocate_output", "reallocate_output_async", "notify_shape"}
    for name, parameters in documented.items():
        ours = list(inspect.signature(getattr(opened.allocator, name)).parameters)
        assert ours == parameters.strip(", ").split(", "), name


def test_the_stand_in_has_the_librarys_signatures(engine: TensorRTEngine) -> None:
    """What the stand-in's contexts, engines and allocators can be called with, TensorRT-RTX's can: the same names of
    methods and of parameters, in the same order."""
    trt = _toolkit.toolkit().trt
    pairs = [
        (standin.Context, trt.IExecutionContext), (standin.Engine, trt.ICudaEngine), (standin.Runtime, trt.Runtime),
        (standin.RuntimeConfig, trt.IRuntimeConfig), (standin.RuntimeCache, trt.IRuntimeCache),
    ]  # fmt: skip
    own = {"shape_of", "compute", "results"}  # the stand-in's workings
    held = 0
    for ours, theirs in pairs:
        for name, method in inspect.getmembers(ours, inspect.isfunction):
            if name.startswith("_") or name in own:
                continue
            there = getattr(theirs, name, None)
            assert there is not None, f"{theirs.__name__} has no {name}"
            forms = re.findall(rf"{name}\(self: [\w.]+((?:, \w+: [^,)]+)*)\) ->", there.__doc__ or "")
            parameters = [p for p in inspect.signature(method).parameters if p != "self"]
            names = [re.findall(r"(\w+): ", form) for form in forms]
            assert not forms or any(n[: len(parameters)] == parameters for n in names), (name, parameters, names)
            held += bool(forms)
        for name, value in vars(ours).items():
            if isinstance(value, property):
                assert hasattr(theirs, name), name
    assert held > 15
