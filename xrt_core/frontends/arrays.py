"""Arrays of any library among what a graph is traced with, and how they become NumPy arrays."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from xrt_core.frontends.locations import trace_error
from xrt_core.ir.types import DTYPE_TO_ONNX


def is_array(obj: object) -> bool:
    """Whether an object is an array of some library (NumPy's scalars count, Python's numbers do not)."""
    if isinstance(obj, np.ndarray | np.generic):
        return True
    kind = type(obj)
    return hasattr(kind, "__dlpack__") or hasattr(kind, "__array__")


def as_array(obj: Any) -> np.ndarray:
    """The NumPy array over an array-like object, without a copy where its memory is the host's.

    Raises TraceError for an object that gives no array, and for a dtype that ONNX has no element type for.
    """
    array: np.ndarray = obj
    if not isinstance(obj, np.ndarray):
        if hasattr(obj, "detach"):  # torch: a parameter that requires a gradient refuses to leave otherwise
            obj = _torch_view(obj.detach().cpu())
        try:
            array = np.asarray(obj)
        except Exception:
            try:
                array = np.from_dlpack(obj)
            except Exception as e:
                raise trace_error(f"{type(obj).__name__} object cannot become a NumPy array: {e}") from None
    if array.dtype.kind in "UST":
        array = array.astype(object)
    if array.dtype not in DTYPE_TO_ONNX:
        raise trace_error(f"ONNX has no element type for {array.dtype} (an array of shape {array.shape})")
    return array


def _torch_view(tensor: Any) -> Any:
    """The tensor itself, or for a dtype that torch cannot hand to NumPy the array over its bytes."""
    name = str(tensor.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        return tensor
    code = {1: "uint8", 2: "int16"}[tensor.element_size()]
    raw = tensor.contiguous().view(getattr(sys.modules["torch"], code)).numpy()
    return raw.view(getattr(ml_dtypes, name))
