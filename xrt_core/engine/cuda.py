"""The device kind "cuda": NVIDIA GPUs by NVML, arrays of libraries in their memory, and streams of these libraries.

Arrays are those of CuPy, torch, JAX, or of any library that has DLPack or the CUDA array interface. Only `namespace`
imports a library of arrays, and nothing creates a CUDA context: NVML needs none, so processes may still fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.engine.converters import library_of
from xrt_core.ir.graph import Support

_DLPACK_CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged
_NVML: Final = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


# --- devices --------------------------------------------------------------------------------------------------------


def status() -> Support:
    """Whether the NVIDIA driver shows this process a GPU, or why not."""
    try:
        found = _handles()
    except OSError as e:
        return Support.no(f"no NVIDIA driver: {e}")
    if found:
        return Support.yes()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Support.no("the driver finds no GPU" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU")


def count() -> int:
    """GPUs that this process may use, 0 without a driver."""
    try:
        return len(_handles())
    except OSError:
        return 0


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def memory(index: int) -> tuple[int | None, int | None]:
    """Bytes of memory of a GPU, in all and free; None where the driver does not say."""
    try:
        handle, found = _handles()[index], _Memory()
        if _library().nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)):
            return None, None
    except (OSError, IndexError):
        return None, None
    return found.total, found.free


@functools.cache
def _library() -> ctypes.CDLL:
    """NVML, initialised. Raises OSError."""
    library = ctypes.CDLL(_NVML)
    code = library.nvmlInit_v2()
    if code:
        raise OSError(f"NVML does not start (code {code})")
    return library


def _handles() -> list[ctypes.c_void_p]:
    """The GPUs in the order of CUDA_VISIBLE_DEVICES, as CUDA reads it: what follows an entry that is none is ignored.

    Raises OSError without a driver.
    """
    library, number = _library(), ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return []
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(number.value)] if wanted is None else wanted.split(",")
    found: list[ctypes.c_void_p] = []
    for entry in (e.strip() for e in entries):
        handle = ctypes.c_void_p()
        if entry.isdigit():
            code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(entry)), ctypes.byref(handle))
        else:
            code = library.nvmlDeviceGetHandleByUUID(entry.encode(), ctypes.byref(handle))
        if code:
            break
        found.append(handle)
    return found


# --- arrays ---------------------------------------------------------------------------------------------------------


def cuda_device(x: Any) -> int | None:
    """The GPU in whose memory an array of any library lies; None for the CPU, or an array that does not say."""
    try:
        kind, index = x.__dlpack_device__()
    except Exception:  # no DLPack, or none for such an array: one that is spread over devices, say
        # the CUDA array interface does not name the device; where there is more than one it is taken to be the first
        return 0 if cuda_interface(x) is not None else None
    return int(index) if int(kind) in _DLPACK_CUDA else None


def cuda_interface(x: Any) -> dict[str, Any] | None:
    """What an array says of its memory by the CUDA array interface; None for an array that does not have it."""
    try:
        found = x.__cuda_array_interface__
    except Exception:  # torch raises various errors for arrays on the CPU, and for dtypes that it cannot name
        return None
    return found if isinstance(found, dict) else None


_QUICK: Final[Mapping[str, Callable[[Any], int | None]]] = MappingProxyType({
    "numpy": lambda x: None,
    "torch": lambda x: int(x.get_device()) if x.is_cuda else None,
    "cupy": lambda x: int(x.device.id),
})  # fmt: skip


def locate(x: Any) -> int | None:
    """`cuda_device`, by the library's own and quicker way where there is one."""
    return _QUICK.get(library_of(type(x)), cuda_device)(x)


def namespace() -> Any:
    """CuPy where it is installed, else NumPy."""
    try:
        return importlib.import_module("cupy")
    except ImportError:
        return np


# --- streams --------------------------------------------------------------------------------------------------------


def current_device() -> int:
    """CuPy's current device, the first where CuPy is not loaded."""
    cupy = sys.modules.get("cupy")
    return 0 if cupy is None else int(cupy.cuda.Device().id)


def current_stream(x: Any, index: int) -> int | None:
    """The stream on which the caller works, who gave the array `x` on a GPU (None: he gave none there).

    That of torch for its tensors; the one that an array of another library names by its CUDA array interface; else
    CuPy's, where it is loaded. JAX has no such thing. None where there is none.
    """
    library = library_of(type(x))
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)
    if library == "other":
        named = (cuda_interface(x) or {}).get("stream")
        if named is not None:
            return int(named)
    cupy = sys.modules.get("cupy")
    if cupy is None or cupy.cuda.runtime.getDevice() != index:
        return None
    return int(cupy.cuda.get_current_stream().ptr)


def using(stream: int | None, index: int) -> AbstractContextManager[Any]:
    """Within it CuPy, where it is loaded, works on `stream`: so does the host, and what reads CuPy's arrays."""
    cupy = sys.modules.get("cupy")
    if cupy is None or stream is None or stream == cupy.cuda.get_current_stream().ptr:
        return contextlib.nullcontext()
    scope: AbstractContextManager[Any] = cupy.cuda.ExternalStream(stream, index)
    return scope


def synchronize(index: int) -> None:
    """Wait for all work on a GPU, by CuPy or torch where one of them is loaded."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None:
        cupy.cuda.Device(index).synchronize()
    elif torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize(index)
