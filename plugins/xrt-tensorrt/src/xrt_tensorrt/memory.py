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
_scratch: dict[tuple[int, int], _cuda.DeviceArray] = {}
_lock = threading.Lock()


class _Streams:
    """The streams of a thread, by device; they go to other threads when it ends, for arrays still name them."""

    def __init__(self) -> None:
        self.by_device: dict[int, int] = {}

    def __del__(self) -> None:
        for device, stream in self.by_device.items():
            _idle.setdefault(device, []).append(stream)


def own_stream(device: int) -> int:
    """The calling thread's stream on a device, which goes with what is done on the default stream, in its order.

    The device must be the current one.
    """
    streams: _Streams | None = getattr(_local, "streams", None)
    if streams is None:
        streams = _local.streams = _Streams()
    found = streams.by_device.get(device)
    if found is None:
        try:
            found = _idle[device].pop()
        except (KeyError, IndexError):
            found = _cuda.new_stream()
        _own.add(found)
        streams.by_device[device] = found
    return found


def address_of(x: Any, p: Parameter, stream: int, held: list[Any]) -> int:
    """Where an input of type `p` lies in device memory, contiguous; may be 0 for one without elements.

    An array on the CPU is copied there, in the order of `stream`; one that another stream computes is waited for. What
    must live until the run is done is added to `held`. Raises ExecutionError for what cannot be read.
    """
    held.append(x)
    if isinstance(x, _cuda.DeviceArray):
        _order(stream, x.stream)
        return x.pointer
    if isinstance(x, np.ndarray):
        return _copied(x, stream, held)
    if getattr(x, "requires_grad", False):  # torch shows the memory of others only
        x = x.detach()
    found = _interface(x)
    if found is not None:
        if not _contiguous(found, p):
            return _gathered(x, p, stream, held)
        _order_after(x, found, stream, held)
        pointer = int(found["data"][0])
        return pointer if pointer % _ALIGNMENT == 0 else _moved(pointer, p, stream, held)
    if hasattr(x, "__dlpack_device__"):
        kind = int(x.__dlpack_device__()[0])
        if kind in _CPU:
            # NumPy has bfloat16 by name alone: its DLPack refuses it, its array protocol does not
            readable = isinstance(getattr(x, "dtype", None), np.dtype) and hasattr(x, "__array__")
            return _copied(np.asarray(x) if readable else np.from_dlpack(x), stream, held)
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            return address_of(cupy.ascontiguousarray(cupy.from_dlpack(x)), p, stream, held)
    if hasattr(x, "__array__"):
        return _copied(np.asarray(x), stream, held)
    raise ExecutionError(f"tensorrt: input {p.name!r} is a {type(x).__name__}, which has no memory to read")


def _interface(x: Any) -> dict[str, Any] | None:
    try:
        found = x.__cuda_array_interface__
    except Exception:  # arrays on the CPU have none; torch raises what it likes for dtypes that it cannot name
        return None
    return found if isinstance(found, dict) else None


def _order_after(x: Any, interface: dict[str, Any], stream: int, held: list[Any]) -> None:
    """Let `stream` wait for who computes `x`."""
    if "stream" in interface:
        if interface["stream"] is not None:  # None: nobody does
            _order(stream, int(interface["stream"]))
    elif hasattr(x, "__dlpack__"):  # torch and JAX leave it out; asked for DLPack they let the stream wait
        held.append(x.__dlpack__(stream=stream or 1))
    else:
        _order(stream, 1)


def _gathered(x: Any, p: Parameter, stream: int, held: list[Any]) -> int:
    """Where a contiguous copy of a device array with gaps lies."""
    cupy = sys.modules.get("cupy")
    if hasattr(x, "contiguous"):
        return address_of(x.contiguous(), p, stream, held)
    if cupy is not None:
        return address_of(cupy.ascontiguousarray(cupy.asarray(x)), p, stream, held)
    download = getattr(x, "get", None) or getattr(x, "copy_to_host", None)
    return _copied(np.asarray(x if download is None else download()), stream, held)


def pointer_of(array: Any) -> int:
    """Where an array of `new_array` lies."""
    return array.pointer if isinstance(array, _cuda.DeviceArray) else int(array.data.ptr)


def _order(stream: int, other: int) -> None:
    """Let `stream` wait for what is on `other` now, where it does not anyway."""
    if stream != other and not (other in _LEGACY and stream in _own):
        _cuda.wait_for(stream, other)


def _moved(pointer: int, p: Parameter, stream: int, held: list[Any]) -> int:
    made = _cuda.DeviceArray(p.dtype, p.shape, stream)
    held.append(made)
    _cuda.copy(made.pointer, pointer, made.nbytes, stream)
    return made.pointer


def new_array(p: Parameter, stream: int) -> Any:
    """An array for a result: CuPy's where that is loaded and has the dtype, else a `DeviceArray`."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and p.dtype.kind in "biuf":
        with cupy.cuda.ExternalStream(stream):
            return cupy.empty(p.shape, p.dtype)
    return _cuda.DeviceArray(p.dtype, p.shape, stream)


def scratch(device: int, stream: int, nbytes: int) -> _cuda.DeviceArray:
    """Scratch memory of at least so many bytes, for what runs on `stream` of a device, one after another.

    It goes back with the last reference, in the order of the stream: who puts work on the stream holds one until then.
    """
    with _lock:
        found = _scratch.get((device, stream))
        if found is None or found.nbytes < nbytes:
            found = _cuda.DeviceArray(np.dtype(np.uint8), (nbytes,), stream)
            _scratch[device, stream] = found
        return found


def _copied(x: np.ndarray, stream: int, held: list[Any]) -> int:
    host = np.ascontiguousarray(x)
    made = _cuda.DeviceArray(host.dtype, x.shape, stream)
    held += (host, made)
    _cuda.copy(made.pointer, host.ctypes.data, made.nbytes, stream)
    return made.pointer


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
