"""A GPU for tests: streams are queues that run when somebody waits, CuPy and torch are stand-ins over the CPU's memory.

What is enqueued is not computed before its stream is waited for, so an array that is read too early, or by work on a
stream that was not ordered after the one that makes it, holds NaN.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from tests.fake_engines import FakeCompiler, FakeEngine, FakeExecutable
from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, EngineStatus, Executable, Function, RunOptions


class Gpu:
    """Queues of work by stream. current: CuPy's current stream; torch: that of torch. log: what ran, in order."""

    def __init__(self) -> None:
        self.queues: dict[int, list[Callable[[], None]]] = {}
        self.current = 0
        self.torch = 0
        self.waits: list[int] = []

    def put(self, stream: int, work: Callable[[], None]) -> None:
        """Enqueue work."""
        self.queues.setdefault(stream, []).append(work)

    def wait(self, stream: int) -> None:
        """Do all that is on a stream, as somebody who reads from it would. Raises what the work raises."""
        self.waits.append(stream)
        queue = self.queues.get(stream, [])
        while queue:
            queue.pop(0)()

    def order(self, stream: int, after: int) -> None:
        """Let what comes next on `stream` wait for what is on `after` now."""
        if stream != after:
            todo, self.queues[after] = self.queues.get(after, []), []
            done: list[bool] = []

            def work() -> None:
                if not done:
                    done.append(True)
                    for w in todo:
                        w()

            self.put(after, work)
            self.put(stream, work)


GPU = Gpu()


_KNOWN = frozenset(
    ("dtype", "shape", "ndim", "size", "nbytes", "itemsize", "flags", "strides", "view", "device", "get")
)
"""Attributes of an array that are there before its numbers are."""


class DeviceArray(np.ndarray):
    """CuPy's array: computing with NumPy arrays is an error, as with CuPy.

    What the library does with it comes after what is on its current stream, and after nothing else.
    """

    def __getattribute__(self, name: str) -> Any:
        if name not in _KNOWN and not name.startswith("__"):
            GPU.wait(GPU.current)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        GPU.wait(GPU.current)
        return super().__getitem__(key)

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Any:
        GPU.wait(GPU.current)
        return super().__array_function__(function, kinds, args, options)

    @property
    def device(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(id=0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None, **asked: Any) -> Any:
        assert stream is not None
        GPU.order(stream if stream != 1 else 0, GPU.current)
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(type(x) is np.ndarray and x.ndim for x in inputs):
            raise TypeError("Unsupported type numpy.ndarray")
        GPU.wait(GPU.current)
        plain = [memory(x) if isinstance(x, DeviceArray) else x for x in inputs]
        kwargs.pop("out", None)
        result = getattr(ufunc, method)(*plain, **kwargs)
        return np.asarray(result).view(DeviceArray)

    def get(self) -> np.ndarray:
        """The array on the CPU."""
        GPU.wait(GPU.current)
        return np.array(memory(self))


DeviceArray.__module__ = "cupy"


def memory(x: Any) -> np.ndarray:
    """What lies in memory now, waiting for nothing."""
    return x.view(np.ndarray) if isinstance(x, np.ndarray) else x.array  # type: ignore[no-any-return]


class Buffer:
    """An array of the engine's own, for where CuPy is not loaded: it knows the stream that makes it."""

    def __init__(self, array: np.ndarray, stream: int) -> None:
        self.array, self.stream, self.dtype, self.shape = array, stream, array.dtype, array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None, **asked: Any) -> Any:
        if stream is None:
            raise BufferError("NumPy cannot read a GPU's memory")
        GPU.order(stream if stream != 1 else 0, self.stream)
        return self.array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        GPU.wait(self.stream)
        return self.array


def on_gpu(x: Any, dtype: Any = None) -> Any:
    """A CuPy array with these numbers."""
    return np.array(x, dtype).view(DeviceArray)


def fake_cupy() -> types.ModuleType:
    """A module `cupy` whose functions are NumPy's, with streams."""

    @contextlib.contextmanager
    def external(stream: int, device: int = -1) -> Iterator[None]:
        before, GPU.current = GPU.current, stream
        try:
            yield
        finally:
            GPU.current = before

    def from_dlpack(x: Any) -> Any:
        return memory(x.__dlpack__(stream=GPU.current or 1)).view(DeviceArray)

    made = types.ModuleType("cupy")
    made.ndarray = DeviceArray  # type: ignore[attr-defined]
    made.asarray = lambda x, dtype=None: x if isinstance(x, DeviceArray) else on_gpu(x, dtype)  # type: ignore[attr-defined]
    made.asnumpy = lambda x: np.array(memory(x) if isinstance(x, DeviceArray) else x)  # type: ignore[attr-defined]
    made.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    made.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=lambda index=0: types.SimpleNamespace(
            id=index, synchronize=lambda: [GPU.wait(s) for s in list(GPU.queues)]
        ),
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        get_current_stream=lambda: types.SimpleNamespace(ptr=GPU.current),
        ExternalStream=external,
    )
    made.__getattr__ = lambda name: getattr(np, name)  # type: ignore[method-assign]
    return made


class Tensor:
    """torch's tensor, on a GPU or on the CPU."""

    def __init__(self, array: np.ndarray, index: int | None = 0, requires_grad: bool = False) -> None:
        self.array, self.index, self.requires_grad = array, index, requires_grad
        self.dtype, self.shape = f"torch.{array.dtype}", array.shape
        self.device = "cpu" if index is None else f"cuda:{index}"
        self.is_cuda = index is not None

    def get_device(self) -> int:
        return -1 if self.index is None else self.index

    def is_neg(self) -> bool:
        return False

    def detach(self) -> Tensor:
        return Tensor(self.array, self.index)

    def to(self, device: str) -> Tensor:
        index = None if device == "cpu" else int(device[5:])
        return self if device == self.device else Tensor(self.numpy().copy(), index)

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def resolve_conj(self) -> Tensor:
        return self

    resolve_neg = resolve_conj

    def numpy(self) -> np.ndarray:
        if self.is_cuda:
            GPU.wait(GPU.torch)
        return self.array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.index is None else (2, self.index)

    def __dlpack__(self, *, stream: int | None = None, **asked: Any) -> Any:
        if self.requires_grad:
            raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")
        if self.is_cuda:
            GPU.order(stream if stream != 1 else 0, GPU.torch)  # type: ignore[arg-type]
        return self.array


Tensor.__module__ = "torch"


def fake_torch() -> types.ModuleType:
    """A module `torch` with tensors and a current stream."""

    def from_dlpack(x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        found = memory(x.__dlpack__(stream=GPU.torch or 1))
        return Tensor(found, x.__dlpack_device__()[1])

    made = types.ModuleType("torch")
    made.Tensor = Tensor  # type: ignore[attr-defined]
    made.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    made.from_numpy = lambda x: Tensor(x, None)  # type: ignore[attr-defined]
    made.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=GPU.torch)
    )
    return made


class GpuExecutable(FakeExecutable):
    """Enqueues the host's computation on the caller's stream, or on 77."""

    engine: GpuEngine

    def run(
        self, inputs: Sequence[Any], run_options: RunOptions = DEFAULT_RUN_OPTIONS, block_until_done: bool = True
    ) -> Sequence[Any]:
        engine = self.engine
        engine.runs += 1
        engine.given.append(list(inputs))
        engine.asked.append((run_options.stream, block_until_done))
        stream = 77 if run_options.stream is None else run_options.stream
        if engine.on_run is not None:
            engine.on_run(inputs)
        for x in inputs:
            if isinstance(x, DeviceArray):
                GPU.order(stream, GPU.current)
            elif isinstance(x, Buffer | Tensor):
                x.__dlpack__(stream=stream)
        returns = self.function.returns  # type: ignore[attr-defined]
        blank = [np.full(p.shape, np.nan if p.dtype.kind == "f" else 0, p.dtype) for p in returns]
        of_cupy = sys.modules.get("cupy") is not None
        results = [x.view(DeviceArray) if of_cupy else Buffer(x, stream) for x in blank]

        def work() -> None:
            if engine.fails_late:
                engine.fails_late -= 1
                raise RuntimeError("an illegal memory access was encountered")
            for r, made in zip(results, self.call([memory(x) for x in inputs]), strict=True):
                memory(r)[...] = made

        GPU.put(stream, work)
        if run_options.stream is None and not block_until_done:
            GPU.order(0, stream)  # a stream of the engine's own goes in the order of the default stream
        if block_until_done:
            GPU.wait(stream)
        return results


class _GpuCompiler(FakeCompiler):
    def compile(self, function: Function, entry_params: Any, return_params: Any, aliases: Any) -> Executable:
        made = super().compile(function, entry_params, return_params, aliases)
        assert isinstance(made, FakeExecutable)
        mine = GpuExecutable(made.engine, made.call)
        mine.function = function  # type: ignore[attr-defined]
        return mine


class GpuEngine(FakeEngine):
    """A fake engine on "cuda:0". given: the inputs of each run. asked: for each, the stream and whether to wait.

    fails_late: of so many runs the work fails after it was enqueued.
    """

    name = "gpu"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    array_families = ("cupy", "torch")
    asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.status = EngineStatus(True, "1", ("cuda:0",))
        self.given: list[list[Any]] = []
        self.asked: list[tuple[int | None, bool]] = []
        self.fails_late = 0

    def compiler(self, device: str, options: Any) -> Any:
        return _GpuCompiler(self)


class BlockingEngine(GpuEngine):
    """One of before there were families and asynchronous runs: it takes NumPy arrays, and is waited for."""

    name = "blocking"
    array_families = ()
    asynchronous = False
