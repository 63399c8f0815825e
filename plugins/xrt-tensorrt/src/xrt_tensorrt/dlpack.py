"""DLPack of arrays in device memory, in the structures of version 0.8.

https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

KIND: int = 2
"""kDLCUDA."""

_CODES: Final = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT: Final = 4
_NAME: Final = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))

_is_valid_object = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of_object = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

_shared: dict[int, tuple[Any, ...]] = {}
"""What consumers hold: address of the structure -> all that must live as long."""


def capsule(pointer: int, dtype: np.dtype, shape: tuple[int, ...], device: int, done: Callable[[], None]) -> Any:
    """A capsule of a contiguous array. done: called when its consumer lets go of it, or the capsule dies unread.

    Raises BufferError for a dtype that DLPack has not, or under which no library would read it.
    """
    code = _BFLOAT if dtype.name == "bfloat16" else _CODES.get(dtype.kind)
    if code is None or dtype.name.startswith("float8"):
        raise BufferError(f"DLPack has no {dtype.name}")
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    managed = _Managed(
        _Tensor(pointer, KIND, device, len(shape), code, 8 * dtype.itemsize, 1, sizes, None, 0), None, _release
    )
    address = ctypes.addressof(managed)
    _shared[address] = (managed, sizes, done)
    try:
        return _new(address, _NAME, _unread)
    except BaseException:
        del _shared[address]
        raise


class View(NamedTuple):
    """Memory that another library shows. strides: in elements, None for an array without gaps."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


def view_of(capsule: Any) -> View:
    """What an unread capsule shows; the memory stays as long as the capsule does. Raises BufferError for none such."""
    if not _is_valid_object(capsule, _NAME):
        raise BufferError("this is no capsule of DLPack that nobody has read")
    tensor = _Managed.from_address(_pointer_of_object(capsule, _NAME)).tensor
    rank = tensor.ndim
    strides = tuple(tensor.strides[:rank]) if tensor.strides else None
    return View((tensor.data or 0) + tensor.byte_offset, tuple(tensor.shape[:rank]) if rank else (), strides)


def _let_go(address: int) -> None:
    found = _shared.pop(address, None)
    if found is not None:
        found[-1]()


def _died(capsule: int) -> None:
    """The capsule dies. Who consumed it renamed it, and calls the deleter."""
    if _is_valid(capsule, _NAME):
        _let_go(_pointer(capsule, _NAME))


_release = _Deleter(_let_go)
_unread = _Destructor(_died)
