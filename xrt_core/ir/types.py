"""Types of values: element types as NumPy dtypes, shapes with integers, symbols or unknowns, and containers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

import ml_dtypes
import numpy as np
from msgspec import Struct

from xrt_core.errors import GraphError, nearest

DType = np.dtype
Dim = int | str | None
"""A dimension: its size, a symbol's name, or None where nothing is known."""
Shape = tuple[Dim, ...]

# ONNX TensorProto.DataType -> NumPy dtype. Strings are object arrays; sub-byte types take one byte an element.
# Source: onnx.proto3, `TensorProto.DataType`.
_ONNX_DTYPES: dict[int, np.dtype] = {
    1: np.dtype(np.float32), 2: np.dtype(np.uint8), 3: np.dtype(np.int8), 4: np.dtype(np.uint16),
    5: np.dtype(np.int16), 6: np.dtype(np.int32), 7: np.dtype(np.int64), 8: np.dtype(object),
    9: np.dtype(np.bool_), 10: np.dtype(np.float16), 11: np.dtype(np.float64), 12: np.dtype(np.uint32),
    13: np.dtype(np.uint64), 14: np.dtype(np.complex64), 15: np.dtype(np.complex128),
    16: np.dtype(ml_dtypes.bfloat16), 17: np.dtype(ml_dtypes.float8_e4m3fn),
    18: np.dtype(ml_dtypes.float8_e4m3fnuz), 19: np.dtype(ml_dtypes.float8_e5m2),
    20: np.dtype(ml_dtypes.float8_e5m2fnuz), 21: np.dtype(ml_dtypes.uint4), 22: np.dtype(ml_dtypes.int4),
    23: np.dtype(ml_dtypes.float4_e2m1fn), 24: np.dtype(ml_dtypes.float8_e8m0fnu),
    25: np.dtype(ml_dtypes.uint2), 26: np.dtype(ml_dtypes.int2),
}  # fmt: skip
ONNX_TO_DTYPE: Final = MappingProxyType(_ONNX_DTYPES)
DTYPE_TO_ONNX: Final = MappingProxyType({d: n for n, d in _ONNX_DTYPES.items()})
STRING: Final = np.dtype(object)


def float_like(dtype: np.dtype) -> bool:
    """Whether `dtype` is a float, ml_dtypes' (which NumPy calls kind "V") included."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def dtype_name(dtype: np.dtype) -> str:
    """The name used in texts, fingerprints and messages: 'float32', 'bfloat16', 'string', ..."""
    return "string" if dtype == STRING else dtype.name


_NAME_TO_DTYPE: Final = MappingProxyType({dtype_name(d): d for d in DTYPE_TO_ONNX})


def dtype_from_name(name: str) -> np.dtype:
    """The dtype that `dtype_name` calls `name`. Raises GraphError for a name that no ONNX element type has."""
    try:
        return _NAME_TO_DTYPE[name]
    except KeyError:
        known = ", ".join(sorted(_NAME_TO_DTYPE))
        raise GraphError(f"unknown dtype {name!r}; known: {known}{nearest(name, _NAME_TO_DTYPE)}") from None


class TensorType(Struct, frozen=True):
    """A dense tensor: element dtype (None: unknown) and shape (None: unknown rank)."""

    dtype: np.dtype | None
    shape: Shape | None = None

    @property
    def is_static(self) -> bool:
        """Whether dtype and every dimension are known."""
        return self.dtype is not None and self.shape is not None and all(type(d) is int for d in self.shape)

    def __str__(self) -> str:
        name = "?" if self.dtype is None else dtype_name(self.dtype)
        if self.shape is None:
            return f"{name}[...]"
        return f"{name}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


class SparseTensorType(Struct, frozen=True):
    """A sparse tensor of ONNX; XRT carries it through and leaves it to the host."""

    dtype: np.dtype | None
    shape: Shape | None = None

    def __str__(self) -> str:
        return f"sparse({TensorType(self.dtype, self.shape)})"


class SequenceType(Struct, frozen=True):
    """A sequence of values of one type."""

    element: ValueType | None

    def __str__(self) -> str:
        return f"sequence({self.element or '?'})"


class OptionalType(Struct, frozen=True):
    """A value that may be absent."""

    element: ValueType | None

    def __str__(self) -> str:
        return f"optional({self.element or '?'})"


class MapType(Struct, frozen=True):
    """A map of ai.onnx.ml, from integers or strings to values."""

    key: np.dtype
    value: ValueType | None

    def __str__(self) -> str:
        return f"map({dtype_name(self.key)} -> {self.value or '?'})"


ValueType = TensorType | SparseTensorType | SequenceType | OptionalType | MapType


def type_from_text(text: str) -> TensorType | None:
    """The tensor type that `str` of a TensorType wrote; None for any other text."""
    name, bracket, rest = text.partition("[")
    if not bracket or not rest.endswith("]") or (name != "?" and name not in _NAME_TO_DTYPE):
        return None
    dtype = None if name == "?" else _NAME_TO_DTYPE[name]
    inside = rest[:-1]
    if inside == "...":
        return TensorType(dtype)
    dims = _dims_from_text(inside) if inside else []
    return TensorType(dtype, tuple(None if d == "?" else int(d) if d.isdecimal() else d for d in dims))


def _dims_from_text(text: str) -> list[str]:
    """The dimensions between commas; those within brackets are of expressions such as "min(n, 150)"."""
    made: list[str] = []
    for part in text.split(", "):
        if made and made[-1].count("(") > made[-1].count(")"):
            made[-1] += f", {part}"
        else:
            made.append(part)
    return made


# --- the size of a tensor --------------------------------------------------------------------------------------------


@cache
def physical_memory() -> int:
    """Bytes of memory of this machine; 8 GiB where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def size_fault(shape: Sequence[int], dtype: np.dtype) -> str | None:
    """Why a tensor of this shape is not accepted, with its size; None where it is: this machine's memory holds it.

    Libraries answer larger ones by an abort, a MemoryError far from the node, or the killer of processes.
    """
    size = math.prod(shape) * dtype.itemsize
    if size <= physical_memory():
        return None
    return (
        f"{dtype_name(dtype)}{list(shape)} takes {size:,} bytes; the memory of this machine has {physical_memory():,}, "
        "which no one tensor may exceed"
    )


def type_fault(type_: ValueType | None) -> str | None:
    """`size_fault` of a static tensor type; None for every other type."""
    if not isinstance(type_, TensorType) or type_.dtype is None or type_.shape is None or not type_.is_static:
        return None
    return size_fault([d for d in type_.shape if isinstance(d, int)], type_.dtype)
