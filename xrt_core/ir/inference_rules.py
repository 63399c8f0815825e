"""Output types that the onnx package's inference leaves open or gets wrong, by operator; each rule says which."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType, ValueType

Types = tuple[ValueType | None, ...]
Rule = Callable[[Node, Types], Types]
"""(node, what onnx inferred) -> types."""


def corrected(node: Node, inferred: Types) -> Types:
    """`inferred` with what a rule of this module knows better."""
    rule = None if node.domain else _RULES.get(node.op_type)
    return inferred if rule is None else rule(node, inferred)


def _like_first(node: Node, inferred: Types) -> Types:
    """onnx leaves these functions without inference; their result is like the first input."""
    first = node.inputs[0]
    return (first.type if first is not None else None, *inferred[1:])


def _range(node: Node, inferred: Types) -> Types:
    """onnx counts only for some dtypes."""
    start, limit, delta = (_data(node, i) for i in range(3))
    if start is None or limit is None or delta is None or not np.any(delta):
        return inferred
    count = max(math.ceil((float(limit) - float(start)) / float(delta)), 0)
    return (TensorType(start.dtype, (count,)),)


def _stft(node: Node, inferred: Types) -> Types:
    """onnx takes the length of the spectrum from the frame, whatever `onesided` says."""
    signal, step = node.inputs[0], _data(node, 1)
    if signal is None or not signal.is_static or step is None:
        return inferred
    length = _data(node, 3)
    window = node.inputs[2] if len(node.inputs) > 2 else None
    if length is not None:
        frame = int(length)
    elif window is not None and window.shape is not None and isinstance(window.shape[0], int):
        frame = window.shape[0]
    else:
        return inferred
    shape = signal.shape
    assert shape is not None
    assert isinstance(shape[1], int)
    frames = (shape[1] - frame) // int(step) + 1
    bins = frame // 2 + 1 if node.attributes.get("onesided", 1) else frame
    return (TensorType(signal.dtype, (shape[0], frames, bins, 2)),)


def _max_unpool(node: Node, inferred: Types) -> Types:
    """onnx does not look at the value of `output_shape`."""
    shape, first = _data(node, 2), node.inputs[0]
    if shape is None or first is None:
        return inferred
    return (TensorType(first.dtype, tuple(int(d) for d in shape)),)


def _pool(node: Node, inferred: Types) -> Types:
    """Before opset 22 onnx counts windows that begin in the padding at the end; the operator drops them."""
    x, out = node.inputs[0], inferred[0]
    if not node.attributes.get("ceil_mode") or node.version >= 22 or x is None or not x.is_static:
        return inferred
    if not isinstance(out, TensorType) or not out.is_static or node.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return inferred
    assert x.shape is not None
    assert out.shape is not None
    spatial = len(x.shape) - 2
    strides = _ints(node, "strides", spatial)
    begins = _ints(node, "pads", 2 * spatial, 0)[:spatial]
    dims = list(out.shape)
    for i in range(spatial):
        size, count = x.shape[2 + i], dims[2 + i]
        assert isinstance(size, int)
        assert isinstance(count, int)
        if count > 1 and (count - 1) * strides[i] >= size + begins[i]:
            dims[2 + i] = count - 1
    corrected_type = TensorType(out.dtype, tuple(dims))
    return tuple(
        TensorType(t.dtype, corrected_type.shape) if isinstance(t, TensorType) else t for t in inferred
    )


def _ints(node: Node, attribute: str, count: int, default: int = 1) -> tuple[int, ...]:
    found = node.attributes.get(attribute)
    return tuple(found) if isinstance(found, tuple) and found else (default,) * count


def _data(node: Node, index: int) -> np.ndarray | None:
    v: Value | None = node.inputs[index] if index < len(node.inputs) else None
    return None if v is None else v.data


_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "GroupNormalization": _like_first,
        "MeanVarianceNormalization": _like_first,
        "Range": _range,
        "STFT": _stft,
        "MaxUnpool": _max_unpool,
        **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    }
)
