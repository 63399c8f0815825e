"""Arrays in device memory: where an array lies, arrays for results, a stream for each thread, and scratch memory."""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import numpy as np

from xrt_core.engine.contract import Parameter
from xrt_core.errors import ExecutionError
from xrt_tensorrt import _cuda

_CPU: Final = (1, 3)  # kDLCPU, kDLCUDAHost
_LEGACY: Final = (0, 1)  # the default stream, for which streams of `own_stream` wait by themselves
_ALIGNMENT: Final = 256  # of what cudaMalloc gives; a slice of an array may begin anywhere

_local = threading.local()
_own: set[int] = set()
_idle: dict[int, list[int]] = {}
_scratch: dict[int, _cuda.DeviceArray] = {}
_lock = threading.Lock()


class _Streams:
    """The streams of a thread, by device; they go to other threads when it ends, for arrays still name them."""

    def __init__(self) -> None:
        self.by_device: dict[int, int] = {}

    def __del__(self) -> None:
        for device, stream in self.by_device.items():
            _idle.setdefault(device, []).append(stream)


def own_stream(device: int) -> int:
    """The calling thread's stream on a device, which goes with what is done on the default stream, in its order."""
    streams: _Streams | None = getattr(_local, "streams", None)
    if streams is None:
        streams = _local.streams = _Streams()
    found = streams.by_device.get(device)
    if found is None:
        _cuda.use(device)
        try:
            found = _idle[device].pop()
        except (KeyError, IndexError):
            found = _cuda.new_stream()
        _own.add(found)
        streams.by_device[device] = found
    return found


def address_of(x: Any, p: Parameter, stream: int) -> tuple[int, Any]:
    """Where an input of type `p` lies in device memory, contiguous, and what keeps it there.

    An array on the CPU is copied down, in the order of `stream`; one that another stream computes is waited for.
    Raises ExecutionError for what cannot be read.
    """
    if isinstance(x, _cuda.DeviceArray):
        _order(stream, x.stream)
        return x.pointer, x
    if isinstance(x, np.ndarray):
        return _copied(x, stream)
    found = getattr(x, "__cuda_array_interface__", None)
    if isinstance(found, dict):
        pointer = int(found["data"][0])
        if not _contiguous(found, p):
            return _copied(np.asarray(x.get() if hasattr(x, "get") else x), stream)
        if found.get("stream") is not None:
            _order(stream, int(found["stream"]))
        return (pointer, x) if pointer % _ALIGNMENT == 0 else _moved(pointer, p, stream)
    if hasattr(x, "__dlpack_device__"):
        kind = int(x.__dlpack_device__()[0])
        if kind in _CPU:
            return _copied(np.from_dlpack(x), stream)
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            return address_of(cupy.ascontiguousarray(cupy.from_dlpack(x)), p, stream)
    if hasattr(x, "__array__"):
        return _copied(np.asarray(x), stream)
    raise ExecutionError(f"tensorrt: input {p.name!r} is a {type(x).__name__}, which has no memory to read")


def pointer_of(array: Any) -> int:
    """Where an array of `new_array` lies."""
    return array.pointer if isinstance(array, _cuda.DeviceArray) else int(array.data.ptr)


def _order(stream: int, other: int) -> None:
    """Let `stream` wait for what is on `other` now, where it does not anyway."""
    if stream != other and not (other in _LEGACY and stream in _own):
        _cuda.wait_for(stream, other)


def _moved(pointer: int, p: Parameter, stream: int) -> tuple[int, Any]:
    made = _cuda.DeviceArray(p.dtype, p.shape, stream)
    _cuda.copy(made.pointer, pointer, made.nbytes, stream)
    return made.pointer, made


def new_array(p: Parameter, stream: int) -> Any:
    """An array for a result: CuPy's where that is loaded and has the dtype, else a `DeviceArray`."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and p.dtype.kind in "biuf":
        with cupy.cuda.ExternalStream(stream):
            return cupy.empty(p.shape, p.dtype)
    return _cuda.DeviceArray(p.dtype, p.shape, stream)


def scratch(stream: int, nbytes: int) -> int:
    """The address of scratch memory of at least so many bytes, for what runs on `stream`, one after another."""
    with _lock:
        found = _scratch.get(stream)
        if found is None or found.nbytes < nbytes:
            # the smaller one goes back in the order of the stream, so after what still uses it
            found = _scratch[stream] = _cuda.DeviceArray(np.dtype(np.uint8), (nbytes,), stream)
        return found.pointer


def _copied(x: np.ndarray, stream: int) -> tuple[int, Any]:
    host = np.ascontiguousarray(x)
    made = _cuda.DeviceArray(host.dtype, x.shape, stream)
    _cuda.copy(made.pointer, host.ctypes.data, made.nbytes, stream)
    return made.pointer, made


def _contiguous(interface: dict[str, Any], p: Parameter) -> bool:
    strides = interface.get("strides")
    if strides is None:
        return True
    step = p.dtype.itemsize
    for n, s in zip(reversed(interface["shape"]), reversed(strides), strict=True):
        if n > 1 and s != step:
            return False
        step *= n
    return True
