"""What a network computes, by NumPy: the layers that op kernels write, after their descriptions in TensorRT's API.

Without a GPU no engine runs, so this is how the numbers of a network that was built are seen. It is no part of the
engine, and says nothing of how TensorRT fuses, rounds or orders sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from xrt_tensorrt._toolkit import Network

Arrays = list[np.ndarray]


def evaluate(network: Network, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The network's outputs by name, for its inputs by name. Raises NotImplementedError for a layer unknown here."""
    known: dict[str, np.ndarray] = dict(inputs)
    waiting = [_typed(network, layer) for layer in network.layers]
    while waiting:
        left = []
        for kind, layer in waiting:
            given = [layer.get_input(i) for i in range(layer.num_inputs)]
            if any(t is not None and t.name not in known for t in given):
                left.append((kind, layer))
                continue
            if kind not in _LAYERS:
                raise NotImplementedError(f"layer {layer.name!r} of type {kind}")
            with np.errstate(all="ignore"):
                made = _LAYERS[kind](network, layer, [None if t is None else known[t.name] for t in given])
            for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
                t = layer.get_output(i)
                assert np.asarray(y).shape == tuple(t.shape), (layer.name, np.shape(y), tuple(t.shape))
                assert y.dtype == network.toolkit.dtype(t.dtype), (layer.name, y.dtype, t.dtype)
                known[t.name] = y
        assert len(left) < len(waiting), f"layers wait for each other: {[x.name for _, x in left[:3]]}"
        waiting = left
    return {t.name: known[t.name] for t in network.outputs}


def _typed(network: Network, layer: Any) -> tuple[str, Any]:
    """The layer's type, and the layer as the class of that type."""
    trt, kind = network.toolkit.trt, _name(layer.type)
    name = "I" + "".join(w.capitalize() for w in kind.split("_")) + "Layer"
    name = {"IElementwiseLayer": "IElementWiseLayer", "ITopkLayer": "ITopKLayer", "ISoftmaxLayer": "ISoftMaxLayer"}.get(
        name, name
    )
    layer.__class__ = getattr(trt, name)
    return kind, layer


def _name(kind: Any) -> str:
    return str(kind).rpartition(".")[2]


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    found = np.trunc(a.astype(np.float64) / b)
    return found.astype(a.dtype)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "SUB": np.subtract, "DIV": _divide,
    "POW": np.power, "FLOOR_DIV": np.floor_divide, "AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor,
    "EQUAL": np.equal, "GREATER": np.greater, "LESS": np.less,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {
    "EXP": np.exp, "LOG": np.log, "SQRT": np.sqrt, "RECIP": np.reciprocal, "ABS": np.abs, "NEG": np.negative,
    "SINH": np.sinh, "CEIL": np.ceil, "FLOOR": np.floor, "NOT": np.logical_not, "ROUND": np.rint,
}  # fmt: skip
_REDUCE: dict[str, Callable[..., Any]] = {
    "SUM": np.sum, "PROD": np.prod, "MAX": np.max, "MIN": np.min, "AVG": np.mean,
}  # fmt: skip


def _elementwise(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    assert x[0].dtype == x[1].dtype, (layer.name, x[0].dtype, x[1].dtype)
    assert x[0].ndim == x[1].ndim, layer.name
    return np.asarray(_ELEMENTWISE[_name(layer.op)](*x))


def _reduce(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    axes = tuple(i for i in range(x[0].ndim) if layer.axes >> i & 1)
    return np.asarray(_REDUCE[_name(layer.op)](x[0], axis=axes, keepdims=layer.keep_dims)).astype(x[0].dtype)


def _cast(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    return x[0].astype(network.toolkit.dtype(layer.get_output(0).dtype))


def _shuffle(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    y = x[0]
    if y.ndim:
        y = y.transpose(list(layer.first_transpose)[: y.ndim])
    return y.reshape(tuple(layer.get_output(0).shape))  # no kernel transposes a second time


def _slice(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    data = x[0]
    start, stride = (tuple(v)[: data.ndim] for v in (layer.start, layer.stride))
    size = tuple(x[2]) if len(x) > 2 and x[2] is not None else tuple(layer.shape)[: data.ndim]
    fills = _name(layer.mode) == "FILL"
    fill = x[4] if len(x) > 4 and x[4] is not None else 0
    y = data
    for axis in range(data.ndim):
        at = start[axis] + np.arange(size[axis]) * stride[axis]
        inside = (at >= 0) & (at < data.shape[axis])
        assert fills or inside.all(), layer.name
        y = np.take(y, np.where(inside, at, 0), axis=axis)
        if not inside.all():
            shape = [1] * data.ndim
            shape[axis] = -1
            y = np.where(inside.reshape(shape), y, np.asarray(fill, data.dtype))
    return y


def _constant(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    dtype = network.toolkit.dtype(layer.get_output(0).dtype)
    if dtype != ml_dtypes.bfloat16:
        return np.array(layer.weights).reshape(tuple(layer.shape))
    # the bindings give no memory of this type; the kernels' constants are the last ones, in order
    names = [x.name for x in network.layers if _name(x.type) == "CONSTANT"]
    return np.asarray(network.kept[names.index(layer.name) - len(names)])


def _convolution(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    image, kernel = x[0], x[1]
    axes = image.ndim - 2
    begin, end, strides, dilations = (
        tuple(v) for v in (layer.pre_padding, layer.post_padding, layer.stride_nd, layer.dilation_nd)
    )
    image = np.pad(image, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    out = tuple(layer.get_output(0).shape)
    groups = layer.num_groups
    total = np.zeros(out, np.float64)
    wide = image.reshape(image.shape[0], groups, -1, *image.shape[2:])
    parts = kernel.reshape(groups, -1, *kernel.shape[1:])
    for tap in itertools.product(*map(range, kernel.shape[2:])):
        at = [
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, dilations, out[2:], strides, strict=True)
        ]
        seen = wide[(slice(None), slice(None), slice(None), *at)].astype(np.float64)
        taken = parts[(..., *tap)].astype(np.float64)
        letters = "xyz"[:axes]
        total += np.einsum(f"ngc{letters},gmc->ngm{letters}", seen, taken).reshape(out)
    return total.astype(image.dtype)


def _matmul(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    assert {_name(layer.op0), _name(layer.op1)} == {"NONE"}
    return np.matmul(x[0].astype(np.float64), x[1].astype(np.float64)).astype(x[0].dtype)


def _gather(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    mode = _name(layer.mode)
    assert np.all((x[1] >= 0) & (x[1] < x[0].shape[layer.axis])), layer.name  # TensorRT reads wherever they point
    if mode == "ELEMENT":
        return np.take_along_axis(x[0], x[1].astype(np.int64), axis=layer.axis)
    assert mode == "DEFAULT"
    assert layer.num_elementwise_dims == 0
    return np.take(x[0], x[1], axis=layer.axis)


def _scatter(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    data, indices, updates = x[0].copy(), x[1].astype(np.int64), x[2]
    if _name(layer.mode) == "ELEMENT":
        np.put_along_axis(data, indices, updates, axis=layer.axis)
        return data
    data[tuple(np.moveaxis(indices, -1, 0))] = updates
    return data


def _cumulative(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    data, axis = x[0], int(x[1])
    if layer.reverse:
        data = np.flip(data, axis)
    y = np.cumsum(data, axis=axis, dtype=data.dtype)
    if layer.exclusive:
        y = y - data
    return np.flip(y, axis) if layer.reverse else y


def _topk(network: Network, layer: Any, x: Arrays) -> tuple[np.ndarray, np.ndarray]:
    (axis,) = (i for i in range(x[0].ndim) if layer.axes >> i & 1)
    data = x[0].astype(np.float64)
    order = np.argsort(data if _name(layer.op) == "MIN" else -data, axis=axis, kind="stable")
    indices = np.take(order, range(layer.k), axis=axis)
    kind = network.toolkit.dtype(layer.get_output(1).dtype)
    return np.take_along_axis(x[0], indices, axis=axis), indices.astype(kind)


def _activation(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    assert _name(layer.type) == "RELU"  # an activation's own type
    return np.maximum(x[0], 0)


def _quantise(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    assert np.all(x[1] == 1)  # what kernels scale by
    kind = network.toolkit.dtype(layer.get_output(0).dtype)
    assert kind is not None
    largest = float(ml_dtypes.finfo(kind).max)
    return np.clip(x[0], -largest, largest).astype(kind)


def _dequantise(network: Network, layer: Any, x: Arrays) -> np.ndarray:
    assert np.all(x[1] == 1)
    return x[0].astype(np.float32)


_LAYERS: dict[str, Callable[[Network, Any, Any], Any]] = {
    "ELEMENTWISE": _elementwise,
    "UNARY": lambda network, layer, x: np.asarray(_UNARY[_name(layer.op)](x[0])),
    "REDUCE": _reduce,
    "QUANTIZE": _quantise,
    "DEQUANTIZE": _dequantise,
    "CAST": _cast,
    "IDENTITY": lambda network, layer, x: x[0],
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "CONSTANT": _constant,
    "CONVOLUTION": _convolution,
    "MATRIX_MULTIPLY": _matmul,
    "CONCATENATION": lambda network, layer, x: np.concatenate(x, axis=layer.axis),
    "SELECT": lambda network, layer, x: np.where(*x),
    "GATHER": _gather,
    "SCATTER": _scatter,
    "CUMULATIVE": _cumulative,
    "TOPK": _topk,
    "ACTIVATION": _activation,
    "SHAPE": lambda network, layer, x: np.array(x[0].shape, np.int64),
}
