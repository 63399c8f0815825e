"""The device kind "cuda": NVIDIA GPUs by NVML, arrays of libraries in their memory, and streams of these libraries.

Arrays are those of CuPy, torch, JAX, or of any library that has DLPack or the CUDA array interface. Only `namespace`
imports a library of arrays, and asking what is here creates no CUDA context: NVML needs none, so processes may still
fork. Where there is no NVML (WSL, Jetson), CuPy is asked once it is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.engine.converters import library_of
from xrt_core.errors import BrokenContextError, ExecutionError
from xrt_core.ir.graph import Support

_DLPACK_CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged
_NVML: Final = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


# --- devices --------------------------------------------------------------------------------------------------------


def status() -> Support:
    """Whether the NVIDIA driver shows this process a GPU, or why not."""
    try:
        found = len(_handles())
    except OSError as e:
        found = _count_of_cupy()
        if not found:
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
        return _count_of_cupy()


def _count_of_cupy() -> int:
    cupy = sys.modules.get("cupy")
    return int(cupy.cuda.runtime.getDeviceCount()) if cupy is not None and cupy.is_available() else 0


def driver() -> tuple[str, tuple[int, int]] | None:
    """Version of the NVIDIA driver, and the newest CUDA version that it runs; None without a driver."""
    text, number = ctypes.create_string_buffer(96), ctypes.c_int()
    try:
        library = _library()
        if library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
            return None
        if library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)):
            return None
    except OSError:
        return None
    return text.value.decode(), (number.value // 1000, number.value % 1000 // 10)


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
    """CuPy where it is installed and finds a GPU, else NumPy."""
    return np if why_no_cupy() else sys.modules["cupy"]


def why_no_cupy() -> str:
    """Why the host cannot compute on a GPU, and what to do; "" where it can."""
    try:
        cupy = importlib.import_module("cupy")
    except Exception as e:  # a broken installation raises what it likes
        missing = isinstance(e, ModuleNotFoundError)
        reason = "CuPy is not installed" if missing else f"CuPy does not import: {type(e).__name__}: {e}"
        return f"{reason}; pip install 'xrt-core[cuda13]' (with a driver for CUDA 12: [cuda12])"
    if cupy.is_available():
        return ""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as e:
        return f"CuPy finds no GPU: {e}; `xrt doctor` shows driver and versions"
    return f"CuPy finds {count} GPUs"


# --- errors ---------------------------------------------------------------------------------------------------------

_STICKY: Final = re.compile(
    r"illegal[ _]?(address|instruction|memory access)|misaligned[ _]?address|invalid[ _]?(address[ _]?space|pc)\b"
    r"|launch[ _]?(failure|failed|timeout)|hardware[ _]?stack[ _]?error|ecc[ _]?uncorrectable"
    r"|error_?assert\b|device-side assert",
    re.IGNORECASE,
)
"""Errors after which every call of CUDA in this process fails (CUDA Runtime API, cudaError_t: "must be terminated and
relaunched")."""


def broken_context(error: BaseException) -> str:
    """What broke the CUDA context of this process, as an exception of a CUDA library says it; "" for other errors."""
    text = str(error).strip().partition("\n")[0]
    if not re.search("cuda", f"{type(error).__module__} {type(error).__name__} {text}", re.IGNORECASE):
        return ""
    if not _STICKY.search(text):
        return ""
    return (
        f"the CUDA context of this process is broken ({text}): every later call on a GPU fails. Restart the process; "
        "CUDA_LAUNCH_BLOCKING=1 shows which kernel it is, and guard='isolated' runs engines in a process of their own"
    )


@contextlib.contextmanager
def naming_broken_context() -> Iterator[None]:
    """Within it what a broken context makes fail is a BrokenContextError."""
    try:
        yield
    except BrokenContextError:
        raise
    except (ExecutionError, RuntimeError) as e:
        if broken := broken_context(e):
            raise BrokenContextError(broken) from e
        raise


# --- streams --------------------------------------------------------------------------------------------------------


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
    if cupy is None or not cupy.is_available() or cupy.cuda.runtime.getDevice() != index:
        return None
    return int(cupy.cuda.get_current_stream().ptr)


def using(stream: int | None, index: int) -> AbstractContextManager[Any]:
    """Within it CuPy, where it is loaded, works on a GPU and there on `stream` (None: its current one): so does the
    host, and what reads CuPy's arrays. 1 is the default stream too, as the CUDA array interface has it."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not cupy.is_available():
        return contextlib.nullcontext()
    if stream == 1:
        stream = 0
    if cupy.cuda.runtime.getDevice() == index:
        if stream is None or stream == cupy.cuda.get_current_stream().ptr:
            return contextlib.nullcontext()
        scope: AbstractContextManager[Any] = stream_of(cupy, stream, index)
        return scope
    return _elsewhere(cupy, stream, index)


@contextlib.contextmanager
def _elsewhere(cupy: Any, stream: int | None, index: int) -> Iterator[None]:
    with cupy.cuda.Device(index):
        if stream is None or stream == cupy.cuda.get_current_stream().ptr:
            yield
        else:
            with stream_of(cupy, stream, index):
                yield


def stream_of(cupy: Any, stream: int, index: int) -> Any:
    """CuPy's object for a stream of a GPU; to be entered while that GPU is the current one."""
    if not hasattr(cupy.cuda.Stream, "from_external"):  # before CuPy 14
        return cupy.cuda.ExternalStream(stream, index)
    return cupy.cuda.Stream(null=True) if stream == 0 else cupy.cuda.Stream.from_external(_Handle(stream))


class _Handle:
    """A stream of another library by CUDA's stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def synchronize(index: int) -> None:
    """Wait for all work on a GPU, by CuPy or torch where one of them is loaded."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and cupy.is_available():
        cupy.cuda.Device(index).synchronize()
    elif torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize(index)
