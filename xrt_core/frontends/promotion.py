"""Type promotion of Python operators: NumPy's rules, with Python numbers and NumPy's default dtypes weakly typed."""

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
    """Return whether a dtype is a float, those of ml_dtypes included."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def is_integer(dtype: np.dtype) -> bool:
    """Return whether a dtype is an integer (not bool), the sub-byte ones of ml_dtypes included."""
    return dtype.kind in "iu" or (dtype.kind == "V" and "int" in dtype.name)


def literal_dtype(value: Any, tensor: np.dtype) -> np.dtype:
    """Return the dtype of a Python number in an operation with a tensor: the tensor's, unless its kind is too narrow.

    An int with a bool tensor becomes int64; a float with a bool or integer tensor becomes float32.
    """
    if isinstance(value, bool):
        return tensor
    if isinstance(value, int):
        return INT64 if tensor == BOOL else tensor
    if isinstance(value, float):
        return tensor if is_float(tensor) or tensor.kind == "c" else FLOAT32
    raise trace_error(f"{value!r} ({type(value).__name__}) is neither a tensor nor a number")


def array_dtype(array: np.ndarray, tensor: np.dtype) -> np.dtype:
    """Return the dtype of a NumPy array in an operation with a tensor.

    float64 and int64 are NumPy's defaults and therefore weakly typed, like Python numbers (integers only if their
    values fit the tensor's dtype); every other dtype takes part in promotion.
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
    """Return whether an operand is weakly typed: a Python float, or a float64 array or list."""
    if isinstance(operand, list | tuple):
        operand = np.asarray(operand)
    return isinstance(operand, float) or (isinstance(operand, np.ndarray) and operand.dtype == FLOAT64)


def promoted(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the promoted dtype of two tensors: NumPy's; with a dtype of ml_dtypes, the float or the wider one.

    Raises TraceError if no dtype represents both.
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
    """Return the accumulator dtype of sums of `dtype`: 64 bits for bools and integers, the dtype itself for floats."""
    if dtype.kind == "u":
        return np.dtype(np.uint64)
    return INT64 if dtype.kind in "ib" else dtype
