"""Dimensions of results as expressions, where type inference, which knows numbers alone, leaves them open.

The rules of `SymbolicShapes`: one for each operator, of the dimensions and the known elements of its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from xrt_core.ir.graph import Node
from xrt_core.ir.inference import einsum_axes
from xrt_core.ir.symbols import Expr
from xrt_core.passes.size_ratios import MOST, Ratio
from xrt_core.passes.symbolic_elements import (
    BEYOND,
    KnownElements,
    constants,
    dims_of,
    divided_evenly,
    is_least,
    objects,
    product_of,
)

_END: Final = (1 << 31) - 1
"""An end of a Slice from which it means the end of the axis."""

Dims = list["Expr | None"]


def _reshape_dims(s: KnownElements, node: Node) -> Dims | None:
    target, dims = s.elements(node.inputs[1]), dims_of(node.inputs[0])
    if target is None or dims is None:
        return None
    keeps_zero = node.attributes.get("allowzero", 0)
    made: Dims = []
    open_: list[int] = []
    for i, e in enumerate(target):
        size = None if e is None else e.constant
        if e is None or size == -1:
            open_.append(i)
            made.append(None)
        elif size == 0 and not keeps_zero:
            made.append(dims[i])
        else:
            made.append(e)
    if len(open_) == 1 and all(d is not None for i, d in enumerate(made) if i not in open_):
        total, rest = product_of(dims), product_of([d for i, d in enumerate(made) if i not in open_])
        if total is not None and rest is not None:
            whole = divided_evenly(s, total, rest)
            if whole is None:
                numbers = [n for d in made if d is not None and (n := d.constant) is not None]
                symbolic = product_of([d for d in made if d is not None and d.constant is None])
                total = None if symbolic is None else divided_evenly(s, total, symbolic)
                size = math.prod(numbers)
                whole = total // size if total is not None and size > 0 else None
            made[open_[0]] = whole
    return made


def _joined(s: KnownElements, a: Expr | None, b: Expr | None) -> Expr | None:
    """A dimension of two that are broadcast."""
    if a is None or b is None:
        known = a if b is None else b
        size = None if known is None else known.constant
        return known if size is not None and size > 1 else None
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    for e in (a, b):
        if e.constant is not None:
            return e
    return a if s.holds(a - b) and s.holds(b - a) else None


def _broadcast(s: KnownElements, shapes: Sequence[Dims]) -> Dims:
    rank = max(map(len, shapes))
    made: Dims = [Expr.of(1)] * rank
    for shape in shapes:
        for i, d in enumerate(shape, rank - len(shape)):
            made[i] = _joined(s, made[i], d)
    return made


def _expand_dims(s: KnownElements, node: Node) -> Dims | None:
    target, dims = s.elements(node.inputs[1]), dims_of(node.inputs[0])
    return None if target is None or dims is None else _broadcast(s, [dims, list(target)])


def _elementwise_dims(s: KnownElements, node: Node) -> Dims | None:
    shapes = [dims_of(v) for v in node.inputs if v is not None]
    return None if any(d is None for d in shapes) else _broadcast(s, [d for d in shapes if d is not None])


def _matmul_dims(s: KnownElements, node: Node) -> Dims | None:
    """Those of matrices; the axes before them are broadcast."""
    a, b = dims_of(node.inputs[0]), dims_of(node.inputs[1])
    if not a or not b:
        return None
    made = _broadcast(s, [a[:-2], b[:-2]])
    return [*made, *a[-2:-1], *(b[-1:] if len(b) > 1 else [])]


def _einsum_dims(s: KnownElements, node: Node) -> Dims | None:
    shapes = [dims_of(v) for v in node.inputs]
    axes = einsum_axes(node, [None if d is None else len(d) for d in shapes])
    if axes is None:
        return None
    sizes = dict[str, Expr | None]()
    for names, dims in zip(axes[0], shapes, strict=True):
        for name, d in zip(names, dims or (), strict=True):
            sizes[name] = _joined(s, sizes.get(name, Expr.of(1)), d)
    return [sizes[name] for name in axes[1]]


def _filled_dims(s: KnownElements, node: Node) -> Dims | None:
    target = s.elements(node.inputs[0])
    return None if target is None else list(target)


def _slice_dims(s: KnownElements, node: Node) -> Dims | None:
    dims = dims_of(node.inputs[0])
    if dims is None:
        return None
    if node.version < 10:
        a: Any = node.attributes
        starts, ends = objects([Expr.of(x) for x in a["starts"]]), objects([Expr.of(x) for x in a["ends"]])
    else:
        found = [s.elements(v) for v in node.inputs[1:3]]
        if found[0] is None or found[1] is None:
            return None
        starts, ends = found[0], found[1]
    axes = constants(s, node, 3, "axes")
    axes = list(range(len(starts))) if axes is None else axes
    steps = constants(s, node, 4) or [1] * len(starts)
    if len(node.inputs) > 4 and node.inputs[4] is not None and constants(s, node, 4) is None:
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        dims[axis] = _sliced(s, dims[axis], start, end, step)
    return dims


def _sliced(s: KnownElements, d: Expr | None, start: Expr | None, end: Expr | None, step: int) -> Expr | None:
    if d is None or start is None or end is None or not step:
        return None
    first, last = start.constant, end.constant
    if first is not None and first < 0:
        start = d + first
    if step < 0:
        return _sliced_backwards(s, d, start, end, step)
    if first is not None and last is not None and 0 <= last <= first:  # nothing, wherever the range ends
        return Expr.of(0)
    if last is not None and last >= _END:
        end = d
    elif last is not None and last < 0:
        end = d + last
    # where both may be the end of the range, the one that is a symbol is more likely to be so again
    likelier = end.constant is not None and not is_least(s, end, d)
    if is_least(s, d, end) or ((likelier or not s.holds(d - end)) and s.holds(end - d)):
        end = d
    if not (s.holds(start) and s.holds(d - end) and s.holds(end - start)):
        return None
    length = end - start
    if step >= BEYOND and s.holds(length - 1) and s.holds(step - length):
        return Expr.of(1)
    return length if step == 1 else (length + step - 1) // step


def _sliced_backwards(s: KnownElements, d: Expr, start: Expr, end: Expr, step: int) -> Expr | None:
    """From the element `start`, or the last one, down to the one behind `end`, or the first."""
    last = end.constant
    if last is not None and last < 0:
        end = Expr.of(-1) if last <= -_END else d + last
    if is_least(s, d - 1, start) or not s.holds(d - 1 - start):
        if not s.holds(start - d + 1):
            return None
        start = d - 1
    return (start - end - step - 1) // -step if s.holds(end + 1) and s.holds(start - end) else None


def _concat_dims(s: KnownElements, node: Node) -> Dims | None:
    shapes = [dims_of(v) for v in node.inputs]
    known = [d for d in shapes if d is not None]
    if len(known) < len(shapes):
        return None
    axis: Any = node.attributes["axis"]
    made = list(known[0])
    for other in known[1:]:
        made = [m if m is not None else o for m, o in zip(made, other, strict=True)]
    along = [d[axis] for d in known]
    made[axis] = None if any(d is None for d in along) else sum((d for d in along if d is not None), Expr.of(0))
    return made


def _tile_dims(s: KnownElements, node: Node) -> Dims | None:
    repeats, dims = s.elements(node.inputs[1]), dims_of(node.inputs[0])
    if repeats is None or dims is None:
        return None
    return [None if d is None or r is None else d * r for d, r in zip(dims, repeats, strict=True)]


def _range_dims(s: KnownElements, node: Node) -> Dims | None:
    start, limit, delta = (s.elements(v) for v in node.inputs)
    if start is None or limit is None or delta is None:
        return _float_range_dims(s, node)
    first, last, step = start.item(), limit.item(), delta.item()
    if first is None or last is None or step is None or not step.constant:
        return None
    span, size = (last - first, step.constant) if step.constant > 0 else (first - last, -step.constant)
    return [(span + (size - 1)) // size] if s.holds(span) else None


def _float_range_dims(s: KnownElements, node: Node) -> Dims | None:
    """Of sizes as floats, as detectors count the pixels of their grids."""
    given = [s.ratios(v) for v in node.inputs]
    if any(x is None or x.size != 1 or x.item() is None for x in given):
        return None
    start, limit, delta = (x.item() for x in given if x is not None)
    by = delta.above.constant
    if by is not None and by < 0:
        start, limit, delta, by = limit, start, delta * Ratio.of(-1), -by
    if start.below == limit.below == delta.below == 1 and by:
        span = limit.above - start.above
        exact = all(s.holds(MOST - e) for x in (start, limit) for e in (x.above, -x.above))
        return [(span + (by - 1)) // by] if exact and s.holds(span) and s.holds(MOST - span) else None
    count = s.rounded((limit - start) / delta, up=True)
    return None if count is None else [count]


def _flatten_dims(s: KnownElements, node: Node) -> Dims | None:
    dims, axis = dims_of(node.inputs[0]), node.attributes.get("axis", 1)
    assert isinstance(axis, int)
    if dims is None:
        return None
    axis = axis + len(dims) if axis < 0 else axis
    return [product_of(dims[:axis]), product_of(dims[axis:])]


def _pad_dims(s: KnownElements, node: Node) -> Dims | None:
    dims, given = dims_of(node.inputs[0]), node.attributes.get("pads")
    pads = s.elements(node.inputs[1]) if given is None else objects([Expr.of(n) for n in given])  # type: ignore[union-attr]
    if dims is None or pads is None or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    ends = zip(dims, pads[: len(dims)], pads[len(dims) :], strict=True)
    return [None if d is None or begin is None or end is None else d + begin + end for d, begin, end in ends]


def _resize_dims(s: KnownElements, node: Node) -> Dims | None:
    dims, a = dims_of(node.inputs[0]), dict[str, Any](node.attributes)
    if dims is None or a.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    axes = [int(i) % len(dims) for i in a.get("axes") or range(len(dims))]
    made = list(dims)
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        sizes = s.elements(node.inputs[3])
        if sizes is None:
            return None
        for axis, size in zip(axes, sizes, strict=True):
            made[axis] = size
        return made
    if node.op_type == "Upsample" and node.version < 9:
        scales = list(a["scales"])
    else:  # the region of interest stands before the scales since Resize-11
        at = 2 if node.op_type == "Resize" and node.version > 10 else 1
        given = node.inputs[at] if len(node.inputs) > at else None
        if given is None or given.data is None:
            return None
        scales = given.data.tolist()
    if a.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    for axis, scale in zip(axes, scales, strict=True):
        d = dims[axis]
        inverse = 1 / scale
        if d is None:
            made[axis] = None
        elif scale == int(scale):
            made[axis] = d * int(scale)
        else:  # halves, quarters, ... are exact in floats
            made[axis] = d // int(inverse) if inverse == int(inverse) and int(inverse).bit_count() == 1 else None
    return made


def _window_dims(s: KnownElements, node: Node) -> Dims | None:
    """Convolutions and pooling: how many windows there are along each axis."""
    x = dims_of(node.inputs[0])
    if x is None:
        return None
    a: Any = node.attributes
    rank = len(x) - 2
    if (weights := _WEIGHTS.get(node.op_type)) is not None:
        w = dims_of(node.inputs[weights])
        if w is None or len(w) != len(x):
            return None
        channels, kernel = w[0], [None if k is None else k.constant for k in w[2:]]
    else:
        channels, kernel = x[1], list(a["kernel_shape"])
    strides, dilations = a.get("strides") or (1,) * rank, a.get("dilations") or (1,) * rank
    pads = a.get("pads") or (0,) * (2 * rank)
    auto = a.get("auto_pad") or "NOTSET"
    made: Dims = [x[0], channels]
    for i, (d, k) in enumerate(zip(x[2:], kernel, strict=True)):
        begin, end = (pads[i], pads[rank + i]) if auto == "NOTSET" else (0, 0)
        if d is None or k is None:
            made.append(None)
        elif auto in ("SAME_UPPER", "SAME_LOWER"):
            made.append((d + strides[i] - 1) // strides[i])
        else:
            reach, more = (k - 1) * dilations[i] + 1, 0
            if a.get("ceil_mode", 0):  # a last window that begins behind the input is left out
                if end + strides[i] > reach:
                    made.append(None)
                    continue
                more = strides[i] - 1
            made.append((d + begin + end - reach + more) // strides[i] + 1)
    return made


_WEIGHTS: Final[Mapping[str, int]] = MappingProxyType({"Conv": 1, "ConvInteger": 1, "DeformConv": 1, "QLinearConv": 3})
"""Where convolutions have their kernel."""


def _transposed_conv_dims(s: KnownElements, node: Node) -> Dims | None:
    x, w, a = dims_of(node.inputs[0]), dims_of(node.inputs[1]), dict[str, Any](node.attributes)
    if x is None or w is None or len(w) != len(x) or w[1] is None:
        return None
    rank = len(x) - 2
    made: Dims = [x[0], w[1] * a.get("group", 1)]
    if given := a.get("output_shape"):
        return [*made, *map(Expr.of, list(given)[-rank:])]
    strides, dilations = a.get("strides") or (1,) * rank, a.get("dilations") or (1,) * rank
    pads, more = a.get("pads") or (0,) * (2 * rank), a.get("output_padding") or (0,) * rank
    auto = a.get("auto_pad") or "NOTSET"
    for i, (d, k) in enumerate(zip(x[2:], w[2:], strict=True)):
        size = None if k is None else k.constant
        if d is None or size is None:
            made.append(None)
        elif auto in ("SAME_UPPER", "SAME_LOWER"):
            made.append(d * strides[i])
        else:
            cut = pads[i] + pads[rank + i] if auto == "NOTSET" else 0
            made.append((d - 1) * strides[i] + more[i] + (size - 1) * dilations[i] + 1 - cut)
    return made


def _blocks_dims(s: KnownElements, node: Node) -> Dims | None:
    """DepthToSpace and SpaceToDepth; the latter takes whole blocks only."""
    x, size = dims_of(node.inputs[0]), node.attributes["blocksize"]
    assert isinstance(size, int)
    if x is None or any(d is None for d in x):
        return None
    n, c, h, w = (d for d in x if d is not None)
    if node.op_type == "DepthToSpace":
        return [n, c // (size * size), h * size, w * size]
    return [n, c * (size * size), h // size, w // size]


def _gather_nd_dims(s: KnownElements, node: Node) -> Dims | None:
    data, index = dims_of(node.inputs[0]), dims_of(node.inputs[1])
    if data is None or not index or index[-1] is None:
        return None
    depth, batch = index[-1].constant, node.attributes.get("batch_dims", 0)
    assert isinstance(batch, int)
    return None if depth is None else [*index[:-1], *data[batch + depth :]]


def _global_pool_dims(s: KnownElements, node: Node) -> Dims | None:
    x = dims_of(node.inputs[0])
    return None if x is None else [*x[:2], *[Expr.of(1)] * (len(x) - 2)]


def _one_hot_dims(s: KnownElements, node: Node) -> Dims | None:
    index, depth, axis = dims_of(node.inputs[0]), s.elements(node.inputs[1]), node.attributes.get("axis", -1)
    if index is None or not isinstance(axis, int):
        return None
    at = axis % (len(index) + 1)
    return [*index[:at], None if depth is None or depth.size != 1 else depth.item(), *index[at:]]


def _stft_dims(s: KnownElements, node: Node) -> Dims | None:
    signal, step, length = dims_of(node.inputs[0]), constants(s, node, 1), constants(s, node, 3)
    window = dims_of(node.inputs[2]) if len(node.inputs) > 2 else None
    size = Expr.of(length[0]) if length else window[0] if window else None
    if signal is None or signal[1] is None or not step or size is None or not s.holds(signal[1] - size):
        return None
    bins = size // 2 + 1 if node.attributes.get("onesided", 1) else size
    return [signal[0], (signal[1] - size) // step[0] + 1, bins, Expr.of(2)]


def _col2im_dims(s: KnownElements, node: Node) -> Dims | None:
    x, image, block = dims_of(node.inputs[0]), s.elements(node.inputs[1]), constants(s, node, 2)
    if x is None or image is None or not block:
        return None
    return [x[0], _exactly(x[1], math.prod(block)), *image.ravel()]


def _dft_dims(s: KnownElements, node: Node) -> Dims | None:
    """The length is the signal's, or what it is cut or padded to; half of it, and one, of a real signal, and the other
    way round."""
    x = dims_of(node.inputs[0])
    axis: Any = node.attributes.get("axis", 1)
    if node.version >= 20:
        given = constants(s, node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else (-2,)
        axis = given[0] if given else None
    if x is None or axis is None:
        return None
    at = axis % len(x)
    is_half, is_inverse = (bool(node.attributes.get(name, 0)) for name in ("onesided", "inverse"))
    length = (x[at] - 1) * 2 if is_half and is_inverse and x[at] is not None else x[at]
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        asked = s.elements(node.inputs[1])
        length = None if asked is None else asked.item()
    if is_half and not is_inverse and length is not None:
        length = length // 2 + 1
    return [*x[:at], length, *x[at + 1 : -1], Expr.of(1 if is_half and is_inverse else 2)]


BROADCASTING: Final = (
    "Add", "Sub", "Mul", "Div", "Pow", "Where", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And",
    "Or", "Xor", "Max", "Min", "Mod", "PRelu", "Sum", "Mean",
)  # fmt: skip
"""Elementwise operators whose result has the shape that those of all inputs broadcast to."""

SHAPE_RULES: Final[Mapping[str, Callable[[KnownElements, Node], Dims | None]]] = MappingProxyType(
    {
        "AveragePool": _window_dims,
        "Col2Im": _col2im_dims,
        "Concat": _concat_dims,
        "ConstantOfShape": _filled_dims,
        "Conv": _window_dims,
        "ConvInteger": _window_dims,
        "ConvTranspose": _transposed_conv_dims,
        "DeformConv": _window_dims,
        "DFT": _dft_dims,
        "DepthToSpace": _blocks_dims,
        "Einsum": _einsum_dims,
        "Expand": _expand_dims,
        "Flatten": _flatten_dims,
        "GatherND": _gather_nd_dims,
        "GlobalAveragePool": _global_pool_dims,
        "GlobalMaxPool": _global_pool_dims,
        "LpPool": _window_dims,
        "MatMul": _matmul_dims,
        "MatMulInteger": _matmul_dims,
        "OneHot": _one_hot_dims,
        "Pad": _pad_dims,
        "QLinearConv": _window_dims,
        "Range": _range_dims,
        "Reshape": _reshape_dims,
        "Resize": _resize_dims,
        "STFT": _stft_dims,
        "Slice": _slice_dims,
        "SpaceToDepth": _blocks_dims,
        "Tile": _tile_dims,
        "Upsample": _resize_dims,
        **dict.fromkeys(BROADCASTING, _elementwise_dims),
    }
)


# --- dimensions of several outputs ------------------------------------------------------------------------------------


def _pooled(s: KnownElements, node: Node) -> list[Dims | None]:
    return [_window_dims(s, node)] * len(node.outputs)


def _top_k(s: KnownElements, node: Node) -> list[Dims | None]:
    dims, axis = dims_of(node.inputs[0]), node.attributes.get("axis", -1)
    assert isinstance(axis, int)
    if dims is None:
        return []
    k = node.attributes.get("k") if node.version < 10 else None
    found = s.elements(node.inputs[1]) if not isinstance(k, int) else objects([Expr.of(k)])
    dims[axis] = None if found is None or found.size != 1 else found.item()
    return [dims, dims]


def _split(s: KnownElements, node: Node) -> list[Dims | None]:
    dims, axis, count = dims_of(node.inputs[0]), node.attributes.get("axis", 0), len(node.outputs)
    assert isinstance(axis, int)
    if dims is None or (whole := dims[axis]) is None:
        return []
    given = node.attributes.get("split")
    sizes: Sequence[Expr | None]
    if given is not None:
        sizes = [Expr.of(n) for n in given]  # type: ignore[union-attr]
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        found = s.elements(node.inputs[1])
        sizes = [None] * count if found is None else list(found)
    else:  # the last part may be smaller
        each = whole.divided(Expr.of(count))
        each = (whole + (count - 1)) // count if each is None else each
        sizes = [*[each] * (count - 1), whole - each * (count - 1)]
    axis %= len(dims)
    return [[*dims[:axis], n, *dims[axis + 1 :]] for n in sizes]


def _attention(s: KnownElements, node: Node) -> list[Dims | None]:
    """Attention of opset 23 on, by https://onnx.ai/onnx/operators/onnx__Attention.html: 4 dimensions (batch, heads,
    tokens, size), or 3 with the heads within the last."""
    a = dict[str, Any](node.attributes)
    inputs = [dims_of(v) for v in node.inputs]
    q, k, v = inputs[:3]
    if q is None or k is None or v is None or len({len(q), len(k), len(v)}) != 1:
        return []
    if is_flat := len(q) == 3:
        heads = [a["q_num_heads"], a["kv_num_heads"], a["kv_num_heads"]]
        q, k, v = ([d[0], Expr.of(h), d[1], _exactly(d[2], h)] for d, h in zip((q, k, v), heads, strict=True))
    past = inputs[4] if len(inputs) > 4 and node.inputs[4] is not None else None
    if len(inputs) > 4 and node.inputs[4] is not None and past is None:
        return []
    new, before = k[2], Expr.of(0) if past is None else past[2]
    total = None if new is None or before is None else new + before
    out: Dims = [q[0], q[1], q[2], v[3]]
    if is_flat:
        out = [q[0], q[2], None if q[1] is None or v[3] is None else q[1] * v[3]]
    return [out, [k[0], k[1], total, k[3]], [v[0], v[1], total, v[3]], [q[0], q[1], q[2], total]]


def _linear_attention(s: KnownElements, node: Node) -> list[Dims | None]:
    """LinearAttention, by https://onnx.ai/onnx/operators/onnx__LinearAttention.html: the heads are within the last
    dimension of the three inputs, the state has those of keys and values."""
    q, k, v = (dims_of(x) for x in node.inputs[:3])
    heads, q_heads = node.attributes["kv_num_heads"], node.attributes["q_num_heads"]
    if q is None or k is None or v is None or not isinstance(heads, int) or not isinstance(q_heads, int):
        return []
    size = _exactly(v[2], heads)
    out = None if size is None else size * q_heads
    return [[q[0], q[1], out], [q[0], Expr.of(heads), _exactly(k[2], heads), size]]


def _causal_conv(s: KnownElements, node: Node) -> list[Dims | None]:
    """CausalConvWithState: the state is what the window of the next element covers of the input."""
    x, weight = dims_of(node.inputs[0]), dims_of(node.inputs[1])
    if x is None or weight is None:
        return []
    return [x, [x[0], x[1], None if weight[2] is None else weight[2] - 1]]


def _exactly(d: Expr | None, n: int) -> Expr | None:
    """A dimension that is a multiple of `n`, by `n`."""
    whole = None if d is None else d.divided(Expr.of(n))
    return whole if whole is not None or d is None else d // n


RULES_OF_ALL_OUTPUTS: Final[Mapping[str, Callable[[KnownElements, Node], list[Dims | None]]]] = MappingProxyType(
    {
        "Attention": _attention,
        "CausalConvWithState": _causal_conv,
        "LinearAttention": _linear_attention,
        "MaxPool": _pooled,
        "Split": _split,
        "TopK": _top_k,
    }
)
