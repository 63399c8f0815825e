"""Stand-ins on the fake GPUs of fake_cuda.py: torch's tensors and an engine; fake_cupy.py has the one for CuPy."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tests.fake_cuda import GPU, Capsule, dlpack_order
from tests.fake_cupy import fake_cupy
from tests.fake_cupy import ndarray as DeviceArray
from tests.fake_engines import FakeCompiler, FakeEngine, FakeExecutable
from xrt_core.engine.contract import DEFAULT_RUN_OPTIONS, EngineStatus, Executable, Function, RunOptions

__all__ = [
    "GPU",
    "BlockingEngine",
    "Buffer",
    "DeviceArray",
    "GpuEngine",
    "Tensor",
    "fake_cupy",
    "fake_torch",
    "memory",
    "on_gpu",
]


def memory(x: Any) -> np.ndarray:
    """What lies in memory now, waiting for nothing."""
    if isinstance(x, np.ndarray):
        return x
    return x._memory if hasattr(x, "_memory") else x.array  # type: ignore[no-any-return]


class Buffer:
    """An array of the engine's own, for where CuPy is not loaded: it knows the stream that makes it."""

    def __init__(self, array: np.ndarray, stream: int, device: int = 0) -> None:
        self.array, self.stream, self.dtype, self.shape = array, stream, array.dtype, array.shape
        self.index = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if stream is None:
            raise BufferError("NumPy cannot read a GPU's memory")
        dlpack_order(stream, self.stream)
        return Capsule(self.array, self, self.index)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        GPU.wait(self.stream)
        return self.array


def on_gpu(x: Any, dtype: Any = None, device: int = 0) -> Any:
    """A CuPy array with these numbers, which are there."""
    made = np.array(x, dtype)
    return DeviceArray._over(made, made, device)


class Tensor:
    """torch's tensor, on a GPU or on the CPU."""

    def __init__(self, array: np.ndarray, index: int | None = 0, requires_grad: bool = False) -> None:
        self.array, self.index, self.requires_grad = array, index, requires_grad
        self.dtype, self.shape = f"torch.{array.dtype}", array.shape
        self.device = "cpu" if index is None else f"cuda:{index}"
        self.is_cuda = index is not None
        self.layout, self.itemsize = "torch.strided", array.itemsize
        self.owner: object = None  # of memory of another library

    def numel(self) -> int:
        return self.array.size

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.itemsize for n in self.array.strides)

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def get_device(self) -> int:
        return -1 if self.index is None else self.index

    def is_neg(self) -> bool:
        return False

    def detach(self) -> Tensor:
        return Tensor(self.array, self.index)

    def to(self, device: str) -> Tensor:
        index = None if device == "cpu" else int(device[5:])
        if device == self.device:
            return self
        if self.is_cuda:
            GPU.wait(GPU.torch)
            GPU.down += self.array.nbytes
        return Tensor(self.array.copy(), index)

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def copy_(self, source: Tensor) -> Tensor:
        if self.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        GPU.put(GPU.torch, lambda: self.array.__setitem__(..., source.array))
        return self

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def resolve_conj(self) -> Tensor:
        return self

    resolve_neg = resolve_conj

    def numpy(self) -> np.ndarray:
        if self.is_cuda:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")
        return self.array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.index is None else (2, self.index)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if self.requires_grad:
            raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")
        if self.is_cuda:
            dlpack_order(stream, GPU.torch)
        return Capsule(self.array, self, self.index or 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.is_cuda:
            raise AttributeError("Can't get __cuda_array_interface__ on non-CUDA tensor type")
        if self.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")
        return {"shape": self.shape, "typestr": self.array.dtype.str, "version": 2, "strides": None,
                "data": (self.array.__array_interface__["data"][0], False)}  # fmt: skip


Tensor.__module__ = "torch"


def fake_torch() -> types.ModuleType:
    """A module `torch` with tensors and a current stream."""

    def from_dlpack(x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        capsule = x.__dlpack__(stream=GPU.torch or 1, max_version=(1, 0))
        made = Tensor(capsule.memory, capsule.device)
        made.owner = capsule.owner
        return made

    made = types.ModuleType("torch")
    made.Tensor = Tensor  # type: ignore[attr-defined]
    made.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    made.from_numpy = lambda x: Tensor(x, None)  # type: ignore[attr-defined]
    made.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=GPU.torch),
        is_available=lambda: GPU.count > 0,
        synchronize=lambda device=None: GPU.wait_for_all(),
    )
    return made


def _sent(x: Any, stream: int) -> Any:
    """An input as work on `stream` reads it, ordered after what makes it; the work keeps it."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "__dlpack__"):
        return x.__dlpack__(stream=stream or 1)
    GPU.order(stream, 0 if x.__cuda_array_interface__["stream"] == 1 else x.__cuda_array_interface__["stream"])
    return Capsule(memory(x), x, 0)


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
        sent = [_sent(x, stream) for x in inputs]
        returns = self.function.returns  # type: ignore[attr-defined]
        blank = [np.full(p.shape, np.nan if p.dtype.kind == "f" else 0, p.dtype) for p in returns]
        of_cupy = sys.modules.get("cupy") is not None
        results = [DeviceArray._over(x, x, GPU.device) if of_cupy else Buffer(x, stream) for x in blank]
        engine.wanted.append(run_options.results)
        for i, x in enumerate(run_options.results if engine.writes_there else ()):
            results[i] = x if isinstance(x, DeviceArray) else results[i]

        if engine.breaks:  # the work is waited for, or fails where the results are read
            block_until_done = True

        def work() -> None:
            if engine.breaks:
                GPU.break_context()
            if engine.fails_late:
                engine.fails_late -= 1
                raise RuntimeError("an illegal memory access was encountered")
            given = [x.memory if isinstance(x, Capsule) else x for x in sent]
            for r, made in zip(results, self.call(given), strict=True):
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

    wanted: for each, the arrays that results are wanted in; writes_there: whether they are used.
    fails_late: of so many runs the work fails after it was enqueued. breaks: runs break the CUDA context.
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
        self.wanted: list[Sequence[Any]] = []
        self.writes_there = True
        self.fails_late = 0
        self.breaks = False

    def compiler(self, device: str, options: Any) -> Any:
        return _GpuCompiler(self)


class BlockingEngine(GpuEngine):
    """One of before there were families and asynchronous runs: it takes NumPy arrays, and is waited for."""

    name = "blocking"
    array_families = ()
    asynchronous = False
