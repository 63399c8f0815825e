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
_DEFAULT_STREAMS: Final = (None, 0, 1)  # the legacy default stream, which streams of `own_stream` wait for by themselves

_streams = threading.local()
_scratch: dict[int, _cuda.DeviceArray] = {}
_lock = threading.Lock()


def own_stream(device: int) -> int:
    """The calling thread's stream on a device, which goes with what is done on the default stream, in its order."""
    found: dict[int, int] | None = getattr(_streams, "by_device", None)
    if found is None:
        found = _streams.by_device = {}
    if device not in found:
        _cuda.use(device)
        found[device] = _cuda.new_stream()
    return found[device]


def address_of(x: Any, p: Parameter | None, stream: int) -> tuple[int, Any]:
    """Where an array lies in device memory, contiguous, and what keeps it there.

    An array on the CPU is copied down, in the order of `stream`; one that another stream computes is waited for.
    Raises ExecutionError for what cannot be read. p: its type, for messages and for copies.
    """
    if isinstance(x, _cuda.DeviceArray):
        if x.stream != stream:
            _cuda.wait_for(stream, x.stream)
        return x.pointer, x
    if isinstance(x, np.ndarray):
        return _copied(x, stream)
    found = getattr(x, "__cuda_array_interface__", None)
    if isinstance(found, dict):
        if not _contiguous(found, p):
            return _copied(np.asarray(x.get() if hasattr(x, "get") else x), stream)
        other = found.get("stream")
        if other != stream and not (other in _DEFAULT_STREAMS and stream not in _DEFAULT_STREAMS and other is None):
            _cuda.wait_for(stream, other or 0)
        return int(found["data"][0]), x
    if hasattr(x, "__dlpack_device__"):
        kind = int(x.__dlpack_device__()[0])
        if kind in _CPU:
            return _copied(np.from_dlpack(x), stream)
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            return address_of(cupy.ascontiguousarray(cupy.from_dlpack(x)), p, stream)
    if hasattr(x, "__array__"):
        return _copied(np.asarray(x), stream)
    name = p.name if p is not None else "?"
    raise ExecutionError(f"tensorrt: input {name!r} is a {type(x).__name__}, which has no memory to read")


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


def _contiguous(interface: dict[str, Any], p: Parameter | None) -> bool:
    strides = interface.get("strides")
    if strides is None:
        return True
    step = p.dtype.itemsize if p is not None else np.dtype(interface["typestr"]).itemsize
    for n, s in zip(reversed(interface["shape"]), reversed(strides), strict=True):
        if n > 1 and s != step:
            return False
        step *= n
    return True
