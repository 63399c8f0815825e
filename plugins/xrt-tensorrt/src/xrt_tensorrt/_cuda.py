"""The CUDA runtime as the engine needs it, through cuda-bindings: devices, streams, memory, events and graphs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from xrt_core.errors import ExecutionError
from xrt_tensorrt import dlpack

_OUT_OF_MEMORY: Final = 2
_NOT_READY: Final = 600


def _load_driver() -> None:
    """Raises OSError where there is no NVIDIA driver, at once: cuda-bindings takes 0.1 s to say it."""
    if sys.platform == "linux":
        ctypes.CDLL("libcuda.so.1")


def _runtime() -> Any:
    from cuda.bindings import runtime  # type: ignore[import-untyped]

    return runtime


@functools.cache
def why_unusable() -> str:
    """Why no CUDA device can be used here, "" where one can."""
    try:
        _load_driver()
        rt = _runtime()
    except OSError as e:
        return f"no CUDA driver: {e}"
    except Exception as e:  # a missing or broken installation raises what it likes
        return f"cuda-bindings does not import: {type(e).__name__}: {e}"
    error, count = rt.cudaGetDeviceCount()
    if int(error) != 0:
        return f"no CUDA driver that fits: {_name(rt, error)}"
    return "" if count else "there is no CUDA device"


def count() -> int:
    """How many CUDA devices there are; 0 without a driver."""
    return 0 if why_unusable() else int(_call("cudaGetDeviceCount"))


@functools.cache
def capability(device: int = 0) -> tuple[int, int] | None:
    """Compute capability of a device, None where there is none."""
    if why_unusable():
        return None
    attributes = _runtime().cudaDeviceAttr
    major = _call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, device)
    minor = _call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, device)
    return int(major), int(minor)


@functools.cache
def model(device: int = 0) -> str:
    """Name of a device ("NVIDIA A30"), "" where there is none."""
    if why_unusable():
        return ""
    name = _call("cudaGetDeviceProperties", device).name
    return (name.decode() if isinstance(name, bytes) else str(name)).rstrip("\0")


class on:
    """Within the body `device` is the calling thread's current one; afterwards the caller's own is again.

    Events, contexts and engines belong to the device that is current when they are made or enqueued.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._before = device

    def __enter__(self) -> None:
        self._before = int(_call("cudaGetDevice"))
        if self._before != self._device:
            _call("cudaSetDevice", self._device)

    def __exit__(self, *_: object) -> None:
        if self._before != self._device:
            _call("cudaSetDevice", self._before)


def new_stream() -> int:
    """A stream that is ordered against the default stream, where arrays of other libraries are made."""
    return int(_call("cudaStreamCreate"))


def synchronize(stream: int) -> None:
    """Wait until everything on a stream is done. Raises ExecutionError with what failed there."""
    _call("cudaStreamSynchronize", stream)


def wait_for(stream: int, other: int) -> None:
    """Let what comes next on `stream` wait for what is on `other` now."""
    event = new_event()
    try:
        record(event, other)
        wait_event(stream, event)
    finally:  # CUDA keeps it until what waits for it has passed
        forget_event(event)


def new_event() -> Any:
    """An event without a clock."""
    return _call("cudaEventCreateWithFlags", 2)  # cudaEventDisableTiming


def record(event: Any, stream: int) -> None:
    """Let an event stand for what is on a stream now."""
    _call("cudaEventRecord", event, stream)


def wait_event(stream: int, event: Any) -> None:
    """Let what comes next on a stream wait for an event."""
    _call("cudaStreamWaitEvent", stream, event, 0)


def is_past(event: Any) -> bool:
    """Whether what an event stands for is done. Raises ExecutionError with what failed there."""
    error, *_ = _runtime().cudaEventQuery(event)
    if int(error) == _NOT_READY:
        return False
    _raise_for(error, "cudaEventQuery")
    return True


def synchronize_event(event: Any) -> None:
    """Wait until what an event stands for is done."""
    _call("cudaEventSynchronize", event)


def forget_event(event: Any) -> None:
    """Destroy an event."""
    _call("cudaEventDestroy", event)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes between any two places, in the order of a stream."""
    if nbytes:
        _call("cudaMemcpyAsync", target, source, nbytes, _runtime().cudaMemcpyKind.cudaMemcpyDefault, stream)


def allocate(nbytes: int, stream: int) -> int:
    """Device memory, in the order of a stream. Raises ExecutionError where there is not enough."""
    error, *found = _runtime().cudaMallocAsync(max(nbytes, 1), stream)
    if int(error) == _OUT_OF_MEMORY:
        code, *memory = _runtime().cudaMemGetInfo()
        free = "" if int(code) else ", {:,} of {:,} bytes are free".format(*memory)
        raise ExecutionError(f"tensorrt: cudaMallocAsync: out of device memory for {nbytes:,} bytes{free}")
    _raise_for(error, "cudaMallocAsync")
    return int(found[0])


def release(pointer: int, stream: int) -> None:
    """Give memory back, in the order of a stream."""
    _call("cudaFreeAsync", pointer, stream)


def capture(work: Callable[[int], None]) -> Any:
    """The executable graph of what `work` puts on the stream that it is given.

    That stream is apart from the default stream: while one that is ordered against it is being recorded, nothing in
    the process may use the default stream. Raises ExecutionError for what cannot be recorded.
    """
    stream = int(_call("cudaStreamCreateWithFlags", 1))  # cudaStreamNonBlocking
    try:
        _call("cudaStreamBeginCapture", stream, _runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            work(stream)
        except BaseException:
            with contextlib.suppress(ExecutionError):  # the recording is as broken as what was to be recorded
                _call("cudaGraphDestroy", _call("cudaStreamEndCapture", stream))
            raise
        graph = _call("cudaStreamEndCapture", stream)
        try:
            return _call("cudaGraphInstantiate", graph, 0)
        finally:
            _call("cudaGraphDestroy", graph)
    finally:
        _call("cudaStreamDestroy", stream)


def replay(graph: Any, stream: int) -> None:
    """Run a recorded graph on a stream."""
    _call("cudaGraphLaunch", graph, stream)


def forget(graph: Any) -> None:
    """Destroy an executable graph."""
    _call("cudaGraphExecDestroy", graph)


class DeviceArray:
    """An array in device memory of its own, for where CuPy is not installed.

    dtype, shape: as NumPy's. It lies on the device that is current, to which `stream` belongs. `numpy.asarray` copies
    it to the CPU; libraries that know DLPack or `__cuda_array_interface__` read it in place. The memory goes back with
    the last reference, in the order of `stream`.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], stream: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.stream = stream
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._device = int(_call("cudaGetDevice"))
        self.pointer = allocate(self.nbytes, stream)
        weakref.finalize(self, _released, self.pointer, stream, _keeper(stream)).atexit = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.nbytes // self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
            "stream": self.stream or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.KIND, self._device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """stream: of the consumer, 1 for the default one, -1 for one that waits by itself; NumPy, which cannot read
        memory of a GPU, gives none. Raises BufferError for what is asked in vain."""
        if stream is None:
            raise BufferError("this array is in a GPU's memory, and who asks for it names no stream")
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("this array is given as it is, where it is; numpy.asarray copies it to the CPU")

        def done() -> None:  # holds the array, too
            if stream not in (-1, self.stream) and not sys.is_finalizing():
                with contextlib.suppress(ExecutionError), on(self._device):
                    wait_for(self.stream, stream)  # what the consumer still reads is not given back before

        made = dlpack.capsule(self.pointer, self.dtype, self.shape, self._device, done)
        if stream not in (-1, self.stream):
            with on(self._device):
                wait_for(stream, self.stream)
        return made

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array in device memory cannot be read by NumPy without a copy")
        host = np.empty(self.shape, self.dtype)
        _copy_down(host, self.pointer, self.stream)
        return host if dtype is None else host.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)}>"


def _copy_down(host: np.ndarray, pointer: int, stream: int) -> None:
    copy(host.ctypes.data, pointer, host.nbytes, stream)
    synchronize(stream)


def loaded_cupy() -> Any:
    """CuPy, where it is loaded and finds a GPU; else None."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and cupy.is_available() else None


def _keeper(stream: int) -> Any:
    """What keeps a caller's stream alive until memory has gone back in its order: CuPy destroys its streams, torch
    never does."""
    cupy = loaded_cupy()
    current = None if cupy is None else cupy.cuda.get_current_stream()
    return current if current is not None and current.ptr == stream else None


def _released(pointer: int, stream: int, keeper: Any = None) -> None:
    try:
        release(pointer, stream)
    except ExecutionError:  # the context is gone, and its memory with it
        return


def _call(name: str, *args: Any) -> Any:
    """Call the runtime. Raises ExecutionError with CUDA's name for what went wrong."""
    rt = _runtime()
    error, *results = getattr(rt, name)(*args)
    if int(error) != 0:
        _raise_for(error, name)
    return results[0] if results else None


def _raise_for(error: Any, name: str) -> None:
    if int(error) != 0:
        what = "out of device memory" if int(error) == _OUT_OF_MEMORY else _name(_runtime(), error)
        raise ExecutionError(f"tensorrt: {name}: {what}")


def _name(rt: Any, error: Any) -> str:
    try:
        text = rt.cudaGetErrorString(error)[1]
        return f"{error.name}, {text.decode() if isinstance(text, bytes) else text}"
    except Exception:
        return str(error)
