"""Types and shapes of a node's outputs, by the inference functions of the onnx package, remembered per operator.

Source: `onnx.shape_inference.infer_node_outputs`, and rules for operators where it leaves types open or gets them
wrong; each rule says which. Operators of the `xrt` dialect bring their own inference (`ir/schema.py`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.ir.attribute_limits import node_fault
from xrt_core.ir.graph import Graph, Node, Value, attribute_key
from xrt_core.ir.long_list import LongList
from xrt_core.ir.ml_inference import ml_types
from xrt_core.ir.ml_limits import DOMAIN
from xrt_core.ir.types import Dim, TensorType, ValueType, type_fault

_MAX_DATA = 1024  # elements of a known input that inference is shown: shapes, axes, scales; never weights
_MEMO_SIZE = 4096
_memo: OrderedDict[Any, tuple[ValueType | None, ...]] = OrderedDict()


def infer_types(node: Node) -> tuple[ValueType | None, ...]:
    """The types of `node`'s outputs from the types and known data of its inputs; None where nothing follows.

    Raises ShapeError, naming the node, where attributes and inputs do not fit the operator or each other, and for a
    result that exceeds the machine's memory.
    Nodes with subgraphs are not for this function: their types follow from their bodies.
    """
    key = _memo_key(node)
    if key is not None:
        found = _memo.get(key)
        if found is not None:
            return found
    inferred = _infer(node)
    try:
        result = corrected(node, inferred)
    except (ValueError, TypeError, IndexError, ArithmeticError, AssertionError) as e:
        raise _misfit(node, _first_line(e)) from e
    for t in result:
        fault = type_fault(t)
        if fault is not None:
            raise _misfit(node, fault)
    if key is not None:
        _memo[key] = result
        if len(_memo) > _MEMO_SIZE:
            _memo.popitem(last=False)
    return result


def forget() -> None:
    """Forget every remembered result (for measurements)."""
    _memo.clear()


def is_small_data(value: Value) -> bool:
    """Whether the value is known and small enough to be shown to inference."""
    data = value.data
    return data is not None and data.size <= _MAX_DATA and data.dtype.kind in "iufb"


def _memo_key(node: Node) -> Any:
    parts: list[Any] = [node.domain, node.op_type, node.version, tuple([v is None for v in node.outputs])]
    for v in node.inputs:
        if v is None:
            parts.append(None)
            continue
        parts.append(v.type)
        data = v.data
        if data is not None and data.size <= _MAX_DATA and data.dtype.kind in "iufb":
            parts.append(data.tobytes())
    attributes = attribute_key(node)
    if attributes is None:
        return None
    parts.append(attributes)
    return tuple(parts)


def _infer(node: Node) -> tuple[ValueType | None, ...]:
    from xrt_core.ir import schema

    own = schema.dialect_inference(node)
    if own is not None:
        return own(node)

    import onnx
    import onnx.shape_inference

    from xrt_core.ir.onnx_proto import (
        attribute_to_proto,
        tensor_from_array,
        type_from_proto,
        type_to_proto,
    )

    fault = node_fault(node)  # before onnx's own code, which some faults end or hang
    if fault is not None:
        raise _misfit(node, fault)
    known = ml_types(node) if node.domain == DOMAIN else None
    if known is not None:
        return known
    try:
        definition = onnx.defs.get_schema(node.op_type, node.version, node.domain)
    except onnx.defs.SchemaError:
        return (None,) * len(node.outputs)
    proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    types: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for i, v in enumerate(node.inputs):
        if v is None:
            proto.input.append("")
            continue
        name = f"i{i}"
        proto.input.append(name)
        types[name] = type_to_proto(v.type)
        if is_small_data(v):
            data[name] = tensor_from_array(v.data, name)  # type: ignore[arg-type]
    proto.output.extend("" if v is None else f"o{i}" for i, v in enumerate(node.outputs))
    for key, a in node.attributes.items():
        proto.attribute.append(attribute_to_proto(key, a))
    opset = onnx.helper.make_opsetid(node.domain, node.version)
    imports = [opset] if not node.domain else [opset, onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version())]
    try:
        found = onnx.shape_inference.infer_node_outputs(definition, proto, types, data, None, imports)
    except Exception as e:
        raise _misfit(node, _first_line(e)) from e
    return tuple(
        None if v is None or f"o{i}" not in found else type_from_proto(found[f"o{i}"], node.name)
        for i, v in enumerate(node.outputs)
    )


def _misfit(node: Node, why: str) -> ShapeError:
    given = ", ".join("_" if v is None else str(v.type or "?") for v in node.inputs)
    return ShapeError(f"node {node.name!r}: {node.operator}({given}) does not fit the operator: {why}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def merged(known: ValueType | None, inferred: ValueType | None) -> ValueType | None:
    """The more exact of two types of one value; where they contradict each other the inferred one holds."""
    if inferred is None:
        return known
    if not isinstance(known, TensorType) or not isinstance(inferred, TensorType):
        return inferred
    if inferred.shape is None and known.shape is not None:
        return TensorType(inferred.dtype or known.dtype, known.shape)
    if inferred.dtype is None and known.dtype is not None:
        return TensorType(known.dtype, inferred.shape)
    return inferred


Types = tuple[ValueType | None, ...]
Rule = Callable[[Node, Types], Types]
"""(node, what onnx inferred) -> types."""


def corrected(node: Node, inferred: Types) -> Types:
    """`inferred` with what a rule of this module knows better."""
    rule = _RULES.get((node.domain, node.op_type))
    return inferred if rule is None else rule(node, inferred)


def _like_first(node: Node, inferred: Types) -> Types:
    """onnx leaves these functions without inference; their result is like the first input."""
    first = node.inputs[0]
    return (first.type if first is not None else None, *inferred[1:])


def _comparison(node: Node, inferred: Types) -> Types:
    """onnx leaves opset 12's functions without shapes, which broadcast as those of opset 16 do."""
    if node.version >= _COMPARISONS:
        return inferred
    return _infer(Node(node.op_type, node.inputs, node.outputs, version=_COMPARISONS, name=node.name))


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
    if int(step) < 1:
        raise ValueError(f"frame_step = {int(step)}; it must be positive")
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
    """Before opset 22 onnx counts windows that begin in the padding at the end; the operator has none of them."""
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


def _einsum(node: Node, inferred: Types) -> Types:
    """onnx takes the sizes of an ellipsis, and of a letter, from where it is first, where it may be broadcast."""
    shapes = [None if v is None else v.shape for v in node.inputs]
    axes = einsum_axes(node, [None if s is None else len(s) for s in shapes])
    first = node.inputs[0]
    if axes is None or first is None:
        return inferred
    sizes: dict[str, Dim] = {}
    for names, shape in zip(axes[0], shapes, strict=True):
        for name, d in zip(names, shape or (), strict=True):
            sizes[name] = _broadcast_dim(sizes.get(name, 1), d)
    return (TensorType(first.dtype, tuple(sizes[name] for name in axes[1])),)


def _broadcast_dim(a: Dim, b: Dim) -> Dim:
    """A dimension of two that are broadcast; None where nothing says which."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    sizes = [d for d in (a, b) if isinstance(d, int)]
    return sizes[0] if sizes else None


def einsum_axes(node: Node, ranks: Sequence[int | None]) -> tuple[list[list[str]], list[str]] | None:
    """The names of the axes of an Einsum's inputs and of its result: letters, and those of an ellipsis from its end,
    which stand for the same axis in all terms. None where a rank is not known."""
    left, arrow, right = str(node.attributes.get("equation", "")).replace(" ", "").partition("->")
    if any(r is None for r in ranks):
        return None
    terms = left.split(",")
    counts = [r - len(t.replace("...", "")) for t, r in zip(terms, ranks, strict=True) if r is not None]
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    most = max((n for t, n in zip(terms, counts, strict=True) if "..." in t), default=0)

    def axes(term: str, count: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f".{i}" for i in range(count - 1, -1, -1) if dots), *after]

    return [axes(t, n) for t, n in zip(terms, counts, strict=True)], axes(right, most)


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
        counts.append(count)
    return tuple(counts)


def _ints(node: Node, attribute: str, count: int, default: int = 1) -> tuple[int, ...]:
    found = node.attributes.get(attribute)
    return tuple(found) if isinstance(found, tuple | LongList) and found else (default,) * count


def _data(node: Node, index: int) -> np.ndarray | None:
    v: Value | None = node.inputs[index] if index < len(node.inputs) else None
    return None if v is None else v.data


_COMPARISONS: Final = 16
_RULES: Mapping[tuple[str, str], Rule] = MappingProxyType(
    {
        **{("", op): _comparison for op in ("GreaterOrEqual", "LessOrEqual")},
        ("", "GroupNormalization"): _like_first,
        ("", "MeanVarianceNormalization"): _like_first,
        ("", "Range"): _range,
        ("", "STFT"): _stft,
        ("", "MaxUnpool"): _max_unpool,
        ("", "Conv"): _conv,
        ("", "Einsum"): _einsum,
        **{("", op): _pool for op in ("MaxPool", "AveragePool", "LpPool")},
    }
)


def trip_count(node: Node, body: Graph) -> int | None:
    """How many turns a Loop with this body makes, where that is known: its limit is, and its condition holds always."""
    limit, condition = (node.inputs[i] if i < len(node.inputs) else None for i in (0, 1))
    if limit is None or limit.data is None or limit.data.size != 1:
        return None
    count = max(int(limit.data.reshape(-1)[0]), 0)
    if not count or (condition is not None and condition.data is not None and not condition.data.all()):
        return 0
    return count if runs_to_limit(node, body) else None


def runs_to_limit(node: Node, body: Graph) -> bool:
    """Whether only the limit ends a Loop with this body: its condition holds always."""
    condition = node.inputs[1] if len(node.inputs) > 1 else None
    first = condition is None or (condition.data is not None and bool(condition.data.all()))
    again = body.outputs[0]
    return first and (again is body.inputs[1] or (again.data is not None and bool(again.data.all())))
