"""Types as ONNX schemas write them ('tensor(float)', 'seq(tensor(int64))') and the dtypes behind them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from xrt_core.ir.types import (
    ONNX_TO_DTYPE,
    OptionalType,
    SequenceType,
    TensorType,
    ValueType,
)


@lru_cache(maxsize=1)
def _element_dtypes() -> dict[str, np.dtype]:
    from onnx import TensorProto

    return {name.lower(): ONNX_TO_DTYPE[n] for name, n in TensorProto.DataType.items() if n in ONNX_TO_DTYPE}


def dschema_type(text: str) -> np.dtype | None:
    """The element dtype of 'tensor(float)', None for text that is no dense tensor."""
    if text.startswith("tensor(") and text.endswith(")"):
        return _element_dtypes().get(text[7:-1])
    return None


def schema_type(text: str) -> ValueType | None:
    """The type, without a shape, that a schema's text stands for; None where the IR has none."""
    for start, kind in (("seq(", SequenceType), ("optional(", OptionalType)):
        if text.startswith(start):
            return kind(schema_type(text[len(start) : -1]))
    dtype = dschema_type(text)
    return None if dtype is None else TensorType(dtype)


def schema_dtypes(texts: Iterable[str]) -> frozenset[np.dtype]:
    """The element dtypes of the dense tensors among the texts."""
    return frozenset(d for t in texts if (d := dschema_type(t)) is not None)
