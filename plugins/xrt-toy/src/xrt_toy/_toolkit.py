"""The only importer of numba: it picks a GPU or the simulator, and hides what differs between the two."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from xrt_core.errors import CompileError, EngineUnavailableError

__all__ = ["BLOCKS", "SIMULATED", "THREADS", "TILE", "cuda", "device_function", "element_type", "library"]

Scalar = Any
"""A scalar type of NumPy: `np.float32`, ... (mypy does not let `type[np.generic]` be a key)"""

_VARIABLE: Final = "NUMBA_ENABLE_CUDASIM"


def _gpus() -> int:
    """How many GPUs the driver shows; asked before numba is imported, because numba chooses at import."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        with contextlib.suppress(OSError, AttributeError):
            driver, count = ctypes.CDLL(name), ctypes.c_int()
            return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    return 0


GPUS: Final = _gpus()
if not GPUS:
    os.environ.setdefault(_VARIABLE, "1")

import numba  # noqa: E402
import numba.cuda  # noqa: E402 - this import reads the variable

cuda: Any = numba.cuda
SIMULATED: Final = not hasattr(cuda.cudadrv.driver, "Device")
"""Whether numba's simulator stands in for a GPU: kernels run as Python, one thread of the host per CUDA thread."""

THREADS: Final = 2 if SIMULATED else 256
"""Threads in a block; a power of two. The simulator pays for every thread, and most of all for `syncthreads`."""
BLOCKS: Final = 2 if SIMULATED else 2048
"""Blocks in a grid at most: kernels walk over what is left with grid-stride loops."""
TILE: Final = 4 if SIMULATED else 16
"""Side of the square tiles that MatMul keeps in shared memory."""

if SIMULATED:
    _cause = f"{_VARIABLE} is set" if GPUS else "there is no CUDA GPU"
    logging.getLogger("xrt").warning("toy: %s, kernels run on numba's simulator: right, but very slow", _cause)
else:
    with contextlib.suppress(ImportError):
        import numba.cuda.fp16  # what compiling imports: an error, such as NumPy 2.5 makes it raise, is known now

    with contextlib.suppress(ImportError):
        from numba.cuda.core import config  # type: ignore[import-not-found]

        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # small clusters have small grids; that is no news to anybody


def why_unusable() -> str:
    """Why neither a GPU nor the simulator can be used, or ""."""
    if SIMULATED or GPUS:
        return ""
    if os.environ.get(_VARIABLE) == "1":
        return "there is no CUDA GPU, and numba.cuda was imported before it could be told to simulate one"
    return f"there is no CUDA GPU, and {_VARIABLE}={os.environ[_VARIABLE]} forbids numba's simulator"


def version() -> str:
    """Versions of numba and numba-cuda, and whether the simulator is at work."""
    from importlib.metadata import version as version_of

    return f"{numba.__version__}, numba-cuda {version_of('numba-cuda')}" + (", CUDA simulator" if SIMULATED else "")


def devices() -> tuple[str, ...]:
    """Usable devices by XRT's names; the simulator is "cuda:0"."""
    return tuple(f"cuda:{i}" for i in range(1 if SIMULATED else GPUS))


def device_index(name: str) -> int:
    """The number of the device "cuda" (the first) or "cuda:1". Raises EngineUnavailableError where it is not there."""
    full = name if ":" in name else f"{name}:0"
    if full not in devices():
        raise EngineUnavailableError(f"toy: no device {name!r} here; numba sees {', '.join(devices()) or 'none'}")
    return int(full.partition(":")[2])


def device_model(index: int) -> str:
    """Name and compute capability of a device."""
    if SIMULATED:
        return "simulator"
    found = cuda.gpus[index]
    name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
    return f"{name} sm_{found.compute_capability[0]}{found.compute_capability[1]}"


# --- functions that kernels are made of ---------------------------------------------------------------------------


def device_function(function: Callable[..., Any]) -> Any:
    """`function` in a form that kernels can call; numba copies its body into the kernel."""
    if SIMULATED or not isinstance(function, types.FunctionType):
        return function
    return cuda.jit(function, device=True, inline="always")


@functools.cache
def library(scalar: Scalar) -> types.SimpleNamespace:
    """Mathematical functions on one scalar type, `T`: of CUDA, or of NumPy for the simulator."""
    if SIMULATED:  # Python's math raises where CUDA gives an infinity or a NaN
        names = {n: getattr(np, n) for n in ("exp", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "rint")}
        return types.SimpleNamespace(T=scalar, erf=math.erf, pow=np.float_power, integer=_integer, **names)
    d = cuda.libdevice

    names = {n: getattr(math, n) for n in ("exp", "log", "sqrt", "sin", "cos", "tanh", "erf", "pow")}
    floor, ceil, rint = (d.floorf, d.ceilf, d.rintf) if scalar is np.float32 else (d.floor, d.ceil, d.rint)
    whole = {"floor": lambda x: floor(x), "ceil": lambda x: ceil(x), "rint": lambda x: rint(x)}
    return types.SimpleNamespace(T=scalar, integer=np.int64, **names, **whole)


def _integer(x: Any) -> Any:
    """x without its fraction; a NaN and what is out of range become some integer, as on a GPU."""
    return np.asarray(x).astype(np.int64)[()]


def element_type(scalar: Scalar) -> Any:
    """The scalar type as numba calls it, which arrays in shared memory are declared with."""
    return numba.from_dtype(np.dtype(scalar))


# --- launching ----------------------------------------------------------------------------------------------------

_one_launch: Any = threading.RLock() if SIMULATED else contextlib.nullcontext()  # the simulator runs one kernel at once


@functools.cache
def compiled(kernel: Callable[..., None]) -> Any:
    """The kernel as numba's dispatcher, which compiles once for each combination of argument types."""
    return cuda.jit(_quiet(kernel) if SIMULATED else kernel)


def _quiet(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel without NumPy's warnings, which a GPU does not give. It must keep its globals: numba swaps `cuda`."""
    silence = np.errstate

    def entry(*arguments: Any) -> None:
        with silence(all="ignore"):
            kernel(*arguments)

    return types.FunctionType(entry.__code__, kernel.__globals__, kernel.__name__, None, entry.__closure__)


def launch(
    kernel: Callable[..., None], grid: int, block: int | tuple[int, int], shared: int, stream: Any,
    arguments: Sequence[Any],
) -> None:  # fmt: skip
    """Enqueue a kernel with `shared` bytes of shared memory."""
    with _one_launch:
        compiled(kernel)[grid, block, stream, shared](*arguments)


def signature(arguments: Sequence[Any]) -> Any:
    """What numba sees of a launch's arguments: a dtype stands for a flat contiguous array of it."""
    found = [
        numba.types.Array(numba.from_dtype(a), 1, "C") if isinstance(a, np.dtype) else numba.typeof(a)
        for a in arguments
    ]
    return numba.types.void(*found)


def ptx(kernel: Callable[..., None], types_: Any, capability: tuple[int, int]) -> str:
    """The PTX of a kernel for a signature. Raises CompileError where CUDA's compiler is not found, or fails."""
    try:
        return str(cuda.compile_ptx(kernel, types_, cc=capability)[0])
    except Exception as e:
        raise CompileError(f"toy: {kernel.__qualname__} gives no PTX: {type(e).__name__}: {e}") from e


def capability(index: int) -> tuple[int, int]:
    """The compute capability of a device."""
    major, minor = cuda.gpus[index].compute_capability
    return int(major), int(minor)


# --- memory -------------------------------------------------------------------------------------------------------


def on_device(index: int) -> Any:
    """Context manager under which allocations and launches go to device `index`."""
    return cuda.gpus[index]


def stream_of(handle: int | None) -> Any:
    """The caller's stream, or a new one."""
    if handle is None or SIMULATED:
        return cuda.stream()
    return cuda.external_stream(handle or 1)  # 1 is the default stream too, and what the CUDA array interface calls it


PER_THREAD: Final = 2
"""The default stream of the calling thread, under one name in all threads."""


def mark(stream: Any) -> Any:
    """An event behind what is on a stream now; None where that is done already."""
    if SIMULATED:
        return None
    event = cuda.event(timing=False)
    event.record(stream)
    return event


def is_past(event: Any) -> bool:
    """Whether what is before an event is done."""
    return bool(event.query())


def wait_for(event: Any) -> None:
    """Wait until it is."""
    event.synchronize()


def order(stream: Any, after: Any) -> None:
    """Let what comes next on a stream wait for what is on another one now. after: 0 for none."""
    if SIMULATED or not after or int(after) == int(stream):
        return
    event = cuda.event(timing=False)
    event.record(after)
    event.wait(stream)


def empty(shape: int | tuple[int, ...], dtype: np.dtype, stream: Any) -> Any:
    """An array on the current device, of any content."""
    return cuda.device_array(shape, dtype, stream=stream)


def upload(array: np.ndarray, stream: Any) -> Any:
    """A copy of a host array on the current device."""
    return cuda.to_device(np.ascontiguousarray(array).reshape(-1), stream=stream)


def host_array(x: Any) -> np.ndarray:
    """An array that is not on numba's device as NumPy's; the simulator's device is not where CuPy's arrays are."""
    return np.asarray(x.get() if type(x).__module__.partition(".")[0] == "cupy" else x)


def copied(array: Any, stream: Any) -> Any:
    """A copy of an array, of the host or of the device, on the current device."""
    copy = empty(array.shape, array.dtype, stream)
    source = np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array
    copy.reshape(-1).copy_to_device(source.reshape(-1), stream=stream)
    return copy


def may_change(x: Any) -> bool:
    """Whether an array may be written to: JAX's are shared, and taken for constants."""
    return type(x).__module__.partition(".")[0] not in ("jax", "jaxlib")


def as_device_array(x: Any, stream: Any) -> Any:
    """`x` as a contiguous array of numba over the same memory, or None if it does not lie on a CUDA device.

    It takes numba's own arrays, those with `__cuda_array_interface__` (CuPy) and those with DLPack (torch, JAX). What
    comes next on `stream` finds them finished.
    """
    if isinstance(x, np.ndarray | np.generic):
        return None
    if cuda.cudadrv.devicearray.is_cuda_ndarray(x):
        found = x
    elif SIMULATED:
        return None
    else:
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None and "stream" in interface:
            found = cuda.from_cuda_array_interface(interface, owner=x, sync=False)
        elif hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] == 2:  # kDLCUDA
            found = _from_dlpack(x, stream)
        elif interface is not None:
            found = cuda.as_cuda_array(x)
        else:
            return None
    order(stream, getattr(found, "stream", 0))
    return found if found.is_c_contiguous() else cuda.to_device(np.ascontiguousarray(found.copy_to_host()))


def _from_dlpack(x: Any, stream: Any) -> Any:
    from cuda.core.utils import StridedMemoryView  # type: ignore[import-untyped]

    view = StridedMemoryView.from_dlpack(x, stream_ptr=int(stream))
    strides = None if view.strides is None else tuple(s * view.dtype.itemsize for s in view.strides)
    interface = {"shape": view.shape, "strides": strides, "typestr": view.dtype.str, "version": 3,
                 "data": (view.ptr, view.readonly)}  # fmt: skip
    return cuda.from_cuda_array_interface(interface, owner=view)
