"""Arrays in device memory: where an array lies, arrays for results, a stream for each thread, and scratch memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from xrt_core.engine import cuda
from xrt_core.engine.contract import Parameter
from xrt_core.errors import ExecutionError
from xrt_tensorrt import _cuda, dlpack

_CPU: Final = (1, 3)  # kDLCPU, kDLCUDAHost
LEGACY: Final = (0, 1)
"""The default stream; it and streams of `own_stream` wait for each other by themselves."""
PER_THREAD: Final = 2
"""The default stream of the calling thread, under one name in all threads: nothing that outlives a run may name it."""
_MOST_SCRATCH: Final = 16  # streams whose scratch memory is kept
_ALIGNMENT: Final = 256  # of what cudaMalloc gives; a slice of an array may begin anywhere

_local = threading.local()
_own: set[int] = set()
_idle: dict[int, list[int]] = {}
_scratch: dict[tuple[int, int], _cuda.DeviceArray] = {}  # the latest used last
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
        if kind == dlpack.KIND:
            return _by_dlpack(x, p, stream, held)
    if hasattr(x, "__array__"):
        return _copied(np.asarray(x), stream, held)
    raise ExecutionError(f"tensorrt: input {p.name!r} is a {type(x).__name__}, which has no memory to read")


def _by_dlpack(x: Any, p: Parameter, stream: int, held: list[Any]) -> int:
    """As `address_of`, for arrays that the CUDA array interface cannot name: it has no bfloat16."""
    capsule = x.__dlpack__(stream=stream or 1)  # who makes it is waited for by this
    held.append(capsule)
    shown = dlpack.view_of(capsule)
    if shown.strides is not None and not _is_compact(shown.shape, shown.strides, 1):
        return _gathered(x, p, stream, held)
    return shown.pointer if shown.pointer % _ALIGNMENT == 0 else _moved(shown.pointer, p, stream, held)


def _interface(x: Any) -> dict[str, Any] | None:
    try:
        found = x.__cuda_array_interface__
    except Exception:  # arrays on the CPU have none; torch raises what it likes for dtypes that it cannot name
        return None
    return found if isinstance(found, dict) else None


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _order_after(x: Any, interface: dict[str, Any], stream: int, held: list[Any]) -> None:
    """Let `stream` wait for who computes `x`."""
    other = _stream_of(x, interface)
    if other is not None:
        _order(stream, other)
    elif "stream" not in interface:  # JAX leaves it out; asked for DLPack it lets the stream wait
        held.append(x.__dlpack__(stream=stream or 1))


def _stream_of(x: Any, interface: dict[str, Any]) -> int | None:
    """The stream on which the owner of `x` works; None where nothing is under way there, or only DLPack can tell."""
    if "stream" in interface:
        return None if interface["stream"] is None else int(interface["stream"])
    if _library(x) == "torch":  # it leaves the stream out, and its DLPack means this one
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
    return None if hasattr(x, "__dlpack__") else LEGACY[0]


class Storage(NamedTuple):
    """Device memory of a caller's array, to write to. owner: the stream on which its owner works, None for none."""

    pointer: int
    nbytes: int
    owner: int | None

    def wait(self, stream: int) -> None:
        """Let `stream` wait for what the owner does there now."""
        if self.owner is not None:
            _order(stream, self.owner)

    def release(self, stream: int) -> None:
        """Let what the owner does next come after what is on `stream` now."""
        if self.owner is not None:
            _order(self.owner, stream)

    def write(self, source: int, stream: int) -> None:
        """Copy there from another place, in the order of `stream` and of the owner's."""
        self.wait(stream)
        _cuda.copy(self.pointer, source, self.nbytes, stream)
        self.release(stream)


def bytes_of(p: Parameter) -> int:
    """Bytes of an array of a parameter, whose shape is known."""
    return int(np.prod(p.shape, dtype=np.int64)) * p.dtype.itemsize


def overlap(a: Storage, b: Storage) -> bool:
    """Whether two pieces of memory have bytes in common."""
    return a.pointer < b.pointer + b.nbytes and b.pointer < a.pointer + a.nbytes


def is_aligned(pointer: int) -> bool:
    """Whether TensorRT takes the address."""
    return bool(pointer) and pointer % _ALIGNMENT == 0


def fits(x: Any, p: Parameter) -> bool:
    """Whether an array is of a parameter's dtype and shape. Dtypes of other libraries ("torch.float32") go by name."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if shape is None or tuple(shape) != p.shape:
        return False
    return dtype == p.dtype if isinstance(dtype, np.dtype) else str(dtype).rpartition(".")[2] == p.dtype.name


def storage_of(x: Any, p: Parameter, device: int) -> Storage | None:
    """The memory of an array of type `p` where that may be written to and is a device's own.

    None for what is on the CPU or another device, for JAX, whose arrays do not change, and for what is read-only or has
    gaps.
    """
    nbytes = bytes_of(p)
    if isinstance(x, _cuda.DeviceArray):
        return Storage(x.pointer, nbytes, x.stream)
    if isinstance(x, np.ndarray) or _library(x) in ("jax", "jaxlib") or getattr(x, "requires_grad", False):
        return None
    if cuda.locate(x) not in (device, None):
        return None
    found = _interface(x)
    if found is None or found["data"][1] or not _contiguous(found, p):
        return None
    return Storage(int(found["data"][0]), nbytes, _stream_of(x, found))


def _gathered(x: Any, p: Parameter, stream: int, held: list[Any]) -> int:
    """Where a contiguous copy of a device array with gaps lies."""
    cupy = _cuda.loaded_cupy()
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
    if stream != other and not ((other in LEGACY and stream in _own) or (stream in LEGACY and other in _own)):
        _cuda.wait_for(stream, other)


def _moved(pointer: int, p: Parameter, stream: int, held: list[Any]) -> int:
    made = _cuda.DeviceArray(p.dtype, p.shape, stream)
    held.append(made)
    _cuda.copy(made.pointer, pointer, made.nbytes, stream)
    return made.pointer


def new_array(p: Parameter, stream: int, device: int) -> Any:
    """An array for a result: CuPy's where that is loaded and has the dtype, else a `DeviceArray`."""
    cupy = _cuda.loaded_cupy()
    if cupy is not None and p.dtype.kind in "biuf":
        with cuda.using(stream, device):
            return cupy.empty(p.shape, p.dtype)
    return _cuda.DeviceArray(p.dtype, p.shape, stream)


def scratch(device: int, stream: int, nbytes: int) -> _cuda.DeviceArray:
    """Scratch memory of at least so many bytes, for what runs on `stream` of a device, one after another.

    It goes back with the last reference, in the order of the stream: who puts work on the stream holds one until then.
    That of the streams used last is kept.
    """
    with _lock:
        found = _scratch.pop((device, stream), None)
        if found is None or found.nbytes < nbytes:
            found = _cuda.DeviceArray(np.dtype(np.uint8), (nbytes,), stream)
        _scratch[device, stream] = found
        if len(_scratch) > _MOST_SCRATCH:  # callers may make a stream for every call
            del _scratch[next(iter(_scratch))]
        return found


def _copied(x: np.ndarray, stream: int, held: list[Any]) -> int:
    host = np.ascontiguousarray(x)
    made = _cuda.DeviceArray(host.dtype, x.shape, stream)
    held += (host, made)
    _cuda.copy(made.pointer, host.ctypes.data, made.nbytes, stream)
    return made.pointer


def _contiguous(interface: dict[str, Any], p: Parameter) -> bool:
    strides = interface.get("strides")
    return strides is None or _is_compact(interface["shape"], strides, p.dtype.itemsize)


def _is_compact(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Whether elements lie one after another. step: the stride from one to the next."""
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and s != step:
            return False
        step *= n
    return True
