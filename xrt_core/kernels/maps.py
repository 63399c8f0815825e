"""Maps: the operators of ai.onnx.ml on maps (Python dicts), which exist on the host only.

Source: https://onnx.ai/onnx/operators/index_ai_onnx_ml.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.errors import InputError
from xrt_core.ir.types import STRING, MapType, TensorType
from xrt_core.kernels.registry import OpContext, kernel

_HOST = "maps exist on the host only"


@kernel("ZipMap", domain="ai.onnx.ml", dynamic=_HOST, strings=True)
def zip_map(ctx: OpContext, x: Any) -> Any:
    """A map from labels to the row's numbers, for each row."""
    labels = list(ctx.attr("classlabels_strings") or ctx.attr("classlabels_int64s"))
    rows = np.asarray(x).reshape(-1, len(labels)).tolist()
    return ([dict(zip(labels, row, strict=True)) for row in rows],)


@kernel("DictVectorizer", domain="ai.onnx.ml", dynamic=_HOST, strings=True)
def dict_vectorizer(ctx: OpContext, x: Any) -> Any:
    """[1, words]: the value of each word of the vocabulary, 0 or "" for one that the map has not."""
    words = ctx.attr("string_vocabulary") or ctx.attr("int64_vocabulary")
    dtype = _value_dtype(ctx, x)
    absent: Any = "" if dtype == STRING else 0
    out = np.empty((1, len(words)), dtype)
    out[0, :] = [_element(x.get(w, absent)) for w in words]
    return out


@kernel("CastMap", domain="ai.onnx.ml", dynamic=_HOST, strings=True)
def cast_map(ctx: OpContext, x: Any) -> Any:
    """[1, n]: the values in the order of their keys, or for SPARSE each at its key among `max_map`, cast.

    Raises InputError for a key outside of `max_map`.
    """
    to = ctx.attr("cast_to", "TO_FLOAT")
    dtype = np.dtype(np.float32) if to == "TO_FLOAT" else np.dtype(np.int64) if to == "TO_INT64" else STRING
    absent: Any = "0.f" if dtype == STRING else 0
    values = {int(k): _cast(_element(v), dtype) for k, v in sorted(x.items())}
    if ctx.attr("map_form", "DENSE") == "DENSE":
        out = np.empty((1, len(values)), dtype)
        out[0, :] = list(values.values())
        return out
    size = int(ctx.attr("max_map", 1))
    out = np.full((1, size), absent, dtype)
    for key, value in values.items():
        if not 0 <= key < size:
            raise InputError(f"node {ctx.node.name!r}: X has the key {key}; max_map = {size} allows 0 to {size - 1}")
        out[0, key] = value
    return out


def _value_dtype(ctx: OpContext, x: Any) -> np.dtype:
    given = ctx.node.inputs[0]
    t = given.type if given is not None else None
    if isinstance(t, MapType) and isinstance(t.value, TensorType) and t.value.dtype is not None:
        return t.value.dtype
    first = _element(next(iter(x.values()), 0.0))
    return STRING if isinstance(first, str) else np.dtype(np.int64 if isinstance(first, int) else np.float32)


def _element(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _cast(value: Any, dtype: np.dtype) -> Any:
    if dtype == STRING:
        return value if isinstance(value, str) else f"{value:f}"
    return float(value) if dtype.kind == "f" else int(float(value))
