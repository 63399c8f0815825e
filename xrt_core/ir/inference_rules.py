"""Output types that the onnx package's inference leaves open or gets wrong, by operator; each rule says which."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import Dim, TensorType, ValueType

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
    """onnx rounds towards zero where no window fits, and before opset 22 counts those that begin in the padding at the
    end; the operator has none of either."""
    x, out = node.inputs[0], inferred[0]
    if x is None or not x.is_static or not isinstance(out, TensorType):
        return inferred
    assert x.shape is not None
    counts = _windows(node, x.shape[2:], _ints(node, "kernel_shape", len(x.shape) - 2))
    if counts is None:
        return inferred
    shape = (*x.shape[:2], *counts)
    return tuple(TensorType(t.dtype, shape) if isinstance(t, TensorType) else t for t in inferred)


def _conv(node: Node, inferred: Types) -> Types:
    """As `_pool`."""
    x, w, out = node.inputs[0], node.inputs[1], inferred[0]
    if x is None or w is None or not x.is_static or not w.is_static or not isinstance(out, TensorType):
        return inferred
    assert x.shape is not None
    assert w.shape is not None
    counts = _windows(node, x.shape[2:], w.shape[2:])
    return inferred if counts is None else (TensorType(out.dtype, (x.shape[0], w.shape[0], *counts)),)


def _windows(node: Node, sizes: Sequence[Dim], kernel: Sequence[Dim]) -> tuple[int, ...] | None:
    """How many windows there are along each spatial axis; None for attributes that do not fit."""
    rank = len(sizes)
    strides, dilations = _ints(node, "strides", rank), _ints(node, "dilations", rank)
    pads = _ints(node, "pads", 2 * rank, 0)
    if not len(kernel) == len(strides) == len(dilations) == rank or len(pads) != 2 * rank or not all(strides):
        return None
    padding = node.attributes.get("auto_pad") or "NOTSET"
    counts = []
    for i, (size, k) in enumerate(zip(sizes, kernel, strict=True)):
        assert isinstance(size, int)
        assert isinstance(k, int)
        begin, end = (pads[i], pads[rank + i]) if padding == "NOTSET" else (0, 0)
        room = size + begin + end - (k - 1) * dilations[i] - 1
        if padding in ("SAME_UPPER", "SAME_LOWER"):
            count = -(-size // strides[i])
        elif node.attributes.get("ceil_mode"):
            count = -(-room // strides[i]) + 1
            count -= (count - 1) * strides[i] >= size + begin
        else:
            count = room // strides[i] + 1
        counts.append(max(count, 0))
    return tuple(counts)


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
        "Conv": _conv,
        **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    }
)
