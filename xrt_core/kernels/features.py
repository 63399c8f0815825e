"""Features: the operators of ai.onnx.ml that scale, fill, threshold, pick and join columns of numbers.

Source: https://onnx.ai/onnx/operators/index_ai_onnx_ml.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import InputError
from xrt_core.kernels.namespace import is_jax
from xrt_core.kernels.registry import OpContext, kernel


@kernel("Scaler", domain="ai.onnx.ml")
def scaler(ctx: OpContext, x: Any) -> Any:
    """(x - offset) * scale, by column, as float32."""
    xp = ctx.xp
    y = x if x.dtype == np.float64 else x.astype(np.float32)
    offset, scale = (ctx.attr(name) for name in ("offset", "scale"))
    y = y - xp.asarray(np.array(offset, y.dtype)) if offset else y
    y = y * xp.asarray(np.array(scale, y.dtype)) if scale else y
    return y.astype(np.float32)


@kernel("Normalizer", domain="ai.onnx.ml")
def normalizer(ctx: OpContext, x: Any) -> Any:
    """Rows divided by their norm (MAX, L1 or L2), as float32; rows of zeros stay."""
    xp = ctx.xp
    y = x if x.dtype == np.float64 else x.astype(np.float32)
    norm = ctx.attr("norm", "MAX")
    if norm == "L2":
        size = xp.sqrt(xp.sum(y * y, axis=-1, keepdims=True))
    else:
        size = (xp.max if norm == "MAX" else xp.sum)(xp.abs(y), axis=-1, keepdims=True)
    return (y / xp.where(size == 0, xp.ones_like(size), size)).astype(np.float32)


@kernel("Imputer", domain="ai.onnx.ml")
def imputer(ctx: OpContext, x: Any) -> Any:
    """x with the value that stands for a missing one replaced, by column or everywhere."""
    xp = ctx.xp
    floats = ctx.attr("imputed_value_floats")
    values = np.array(floats or ctx.attr("imputed_value_int64s"), x.dtype)
    missing = ctx.attr("replaced_value_float", 0.0) if floats else ctx.attr("replaced_value_int64", 0)
    is_missing = xp.isnan(x) if missing != missing else x == x.dtype.type(missing)
    return xp.where(is_missing, xp.asarray(values), x)


@kernel("Binarizer", domain="ai.onnx.ml")
def binarizer(ctx: OpContext, x: Any) -> Any:
    """1 where x is above the threshold, else 0."""
    return (x > ctx.attr("threshold", 0.0)).astype(x.dtype)


@kernel("FeatureVectorizer", domain="ai.onnx.ml")
def feature_vectorizer(ctx: OpContext, *inputs: Any) -> Any:
    """The inputs' columns side by side as float32, each input cut or filled with zeros to its `inputdimensions`."""
    xp = ctx.xp
    columns = [x.reshape(-1, 1) if x.ndim == 1 else x.reshape(x.shape[0], -1) for x in inputs]
    widths = ctx.attr("inputdimensions") or [c.shape[1] for c in columns]
    parts = []
    for x, width in zip(columns, widths, strict=True):
        parts.append(x[:, :width].astype(np.float32))
        if x.shape[1] < width:
            parts.append(xp.zeros((x.shape[0], width - x.shape[1]), np.float32))
    return xp.concatenate(parts, axis=1)


@kernel("ArrayFeatureExtractor", domain="ai.onnx.ml", strings=True)
def array_feature_extractor(ctx: OpContext, x: Any, index: Any) -> Any:
    """Elements of the last axis at `index`; a vector is one row. Raises InputError for an index out of range."""
    xp = ctx.xp
    flat = index.reshape(-1)
    if not is_jax(xp) and flat.size and not bool(((flat >= 0) & (flat < x.shape[-1])).all()):
        raise InputError(f"node {ctx.node.name!r}: Y has an index outside 0 to {x.shape[-1] - 1}, the columns of X")
    found = xp.take(x, flat, axis=-1)
    return found.reshape(1, -1) if x.ndim == 1 else found
