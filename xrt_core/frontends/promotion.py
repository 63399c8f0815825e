"""Which dtype a Python operator computes in: NumPy's promotion, with Python numbers and default dtypes weak."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.frontends.source_location import trace_error
from xrt_core.ir.types import dtype_name

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT64 = np.dtype(np.float64)
BOOL = np.dtype(np.bool_)


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating one, those of ml_dtypes included."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def is_integer(dtype: np.dtype) -> bool:
    """Whether a dtype is an integer (not bool), the sub-byte ones of ml_dtypes included."""
    return dtype.kind in "iu" or (dtype.kind == "V" and "int" in dtype.name)


def literal_dtype(value: Any, tensor: np.dtype) -> np.dtype:
    """The dtype that a Python number takes beside a tensor: the tensor's, unless its kind is too narrow.

    An int beside a bool becomes int64; a float beside a bool or an integer becomes float32.
    """
    if isinstance(value, bool):
        return tensor
    if isinstance(value, int):
        return INT64 if tensor == BOOL else tensor
    if isinstance(value, float):
        return tensor if is_float(tensor) or tensor.kind == "c" else FLOAT32
    raise trace_error(f"{value!r} ({type(value).__name__}) is neither a tensor nor a number")


def array_dtype(array: np.ndarray, tensor: np.dtype) -> np.dtype:
    """The dtype that a NumPy array takes beside a tensor.

    float64 and int64 are what NumPy makes when nobody asks, so they give way like Python numbers (integers only where
    their values fit); every other dtype keeps its say.
    """
    if array.dtype == FLOAT64:
        return literal_dtype(0.0, tensor)
    if array.dtype == INT64:
        if is_float(tensor):
            return tensor
        if tensor.kind in "iu":
            limits = np.iinfo(tensor)
            if array.size == 0 or (int(array.min()) >= limits.min and int(array.max()) <= limits.max):
                return tensor
    return array.dtype


def is_weak_float(operand: Any) -> bool:
    """Whether an operand is a Python float, or a float64 array or list, whose precision gives way to a tensor's."""
    if isinstance(operand, list | tuple):
        operand = np.asarray(operand)
    return isinstance(operand, float) or (isinstance(operand, np.ndarray) and operand.dtype == FLOAT64)


def promoted(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype in which two tensors meet: NumPy's, and beside the dtypes of ml_dtypes the floating or wider one.

    Raises TraceError where nothing covers both.
    """
    if a == b:
        return a
    try:
        found = np.promote_types(a, b)
    except TypeError:
        found = None
    if found is not None and found.kind != "O":
        return found
    if is_float(a) != is_float(b) and not {a.kind, b.kind} & {"O", "c"}:
        return a if is_float(a) else b
    if is_float(a) and is_float(b):
        return FLOAT32
    raise trace_error(f"no dtype covers {dtype_name(a)} and {dtype_name(b)}: convert one with .astype(...)")


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that sums of `dtype` are kept in: 64 bits for bools and integers, the dtype itself for floats."""
    if dtype.kind == "u":
        return np.dtype(np.uint64)
    return INT64 if dtype.kind in "ib" else dtype
