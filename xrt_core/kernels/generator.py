"""Kernels that generate tensors from attributes, shapes and scalars: Constant, ConstantOfShape, Range, EyeLike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xrt_core.errors import GraphError, ShapeError
from xrt_core.ir.graph import SparseTensor
from xrt_core.ir.types import ONNX_TO_DTYPE, float_like
from xrt_core.kernels.movement import check_size, ints
from xrt_core.kernels.registry import OpContext, kernel


def _dense(sparse: SparseTensor) -> np.ndarray:
    """The dense array; indices are linear (rank 1) or one coordinate tuple a row (rank 2)."""
    out = np.zeros(sparse.dims, sparse.values.dtype)
    if sparse.indices.ndim == 1:
        out.reshape(-1)[sparse.indices] = sparse.values
    else:
        out[tuple(sparse.indices.T)] = sparse.values
    return out


def _strings(values: Any) -> np.ndarray:
    out = np.empty(len(values), object)
    out[:] = values
    return out


def constant_value(attributes: Any) -> np.ndarray:
    """The array that a Constant's attributes describe. Raises GraphError where they describe none."""
    if "value" in attributes:
        return np.asarray(attributes["value"])
    if "sparse_value" in attributes:
        return _dense(attributes["sparse_value"])
    if "value_float" in attributes:
        return np.array(attributes["value_float"], np.float32)
    if "value_floats" in attributes:
        return np.array(attributes["value_floats"], np.float32)
    if "value_int" in attributes:
        return np.array(attributes["value_int"], np.int64)
    if "value_ints" in attributes:
        return np.array(attributes["value_ints"], np.int64)
    if "value_string" in attributes:
        return _strings([attributes["value_string"]]).reshape(())
    if "value_strings" in attributes:
        return _strings(attributes["value_strings"])
    raise GraphError("Constant: no value attribute; set one of value, value_int(s), value_float(s), value_string(s)")


@kernel("Constant")
def constant(ctx: OpContext) -> Any:
    """Constant: the tensor of whichever value attribute is set; strings stay a NumPy object array."""
    value = constant_value(ctx.node.attributes)
    return value if value.dtype == object else ctx.xp.asarray(value)


@kernel("ConstantOfShape", static=(0,))
def constant_of_shape(ctx: OpContext, shape: Any) -> Any:
    """ConstantOfShape: filled with the one element of `value`, float32 0 without it."""
    value = np.asarray(ctx.attr("value", np.zeros(1, np.float32))).reshape(-1)
    wanted = ints(shape)
    if any(d < 0 for d in wanted):
        raise ShapeError(f"ConstantOfShape: the shape {list(wanted)} has a negative dimension")
    check_size(wanted, value.dtype, "ConstantOfShape")
    return ctx.xp.full(wanted, value[0], value.dtype)


@kernel("Range", static=(0, 1, 2))
def range_(ctx: OpContext, start: Any, limit: Any, delta: Any) -> Any:
    """Range: start + i * delta; integers exactly, floats in float64 and rounded once.

    Raises ShapeError for a step of 0, a limit that no number of steps reaches, and more elements than fit the memory.
    """
    dtype = start.dtype
    if not np.any(delta):
        raise ShapeError("Range: the step delta is 0; give a positive or negative one")
    if float_like(dtype):
        first, last, step = (float(np.asarray(v).reshape(())) for v in (start, limit, delta))
        if not math.isfinite((last - first) / step):
            raise ShapeError(f"Range: from {first:g} to {last:g} by {step:g} is no finite number of steps")
        count = max(math.ceil((last - first) / step), 0)
        check_size((count,), dtype, "Range")
        values = (first + np.arange(count) * step).astype(dtype)
    else:
        low, high, by = (int(np.asarray(v).reshape(())) for v in (start, limit, delta))
        count = max(-((low - high) // by), 0)
        check_size((count,), dtype, "Range")
        values = (low + np.arange(count, dtype=np.int64) * by).astype(dtype)
    return ctx.xp.asarray(values)


@kernel("EyeLike")
def eye_like(ctx: OpContext, x: Any) -> Any:
    """EyeLike: ones on diagonal `k` of a matrix of the input's shape."""
    code = ctx.attr("dtype")
    rows, columns = np.arange(x.shape[0])[:, None], np.arange(x.shape[1])[None, :]
    return ctx.xp.asarray((columns - rows == ctx.attr("k", 0)).astype(x.dtype if code is None else ONNX_TO_DTYPE[code]))
