"""The rules of padding, one per operator: which axes of the results carry padding, and what is masked before the node.

A rule gets the walk (`Padder`), the node and what is known of its inputs, adds nodes to the padded graph, and returns
what is known of each output. It must keep the invariant of `padding`: valid places hold what the original graph
computes. Where it cannot show that, it refuses with the reason. An operator without a rule is refused where padding
reaches it; elementwise operators share one rule, by their trait.

The semantics are those of the ONNX operator specification, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import draws_random, traits_of
from xrt_core.ir.schema import since_version
from xrt_core.ir.symbols import Expr, product
from xrt_core.ir.types import DTYPE_TO_ONNX, STRING
from xrt_core.passes.padding.form import Axis, Padded, axis_of, is_padded
from xrt_core.passes.padding.walk import Given, Padder, Rule

Result = Given

_INDEX_INTEGERS: Final = (6, 7)  # of TensorProto.DataType: int32, int64


def apply_rule(p: Padder, node: Node, given: Given) -> Result:
    """Add a node to the padded graph by the rule of its operator. Raises PaddingRefused."""
    reached = [s for s in given if s is not None and s.padded]
    if any(s.dtype == STRING for s in reached):
        raise p.refused("strings are not padded")
    rule = RULES.get(node.op_type) if not node.domain else None
    if rule is None and traits_of(node).elementwise:
        rule = _elementwise
    if reached or (rule is not None and any(s is not None and _depends(s) for s in given)):
        if rule is None:
            raise p.refused("padding reaches it, and there is no rule for this operator")
        return rule(p, node, given)
    return p.add(node.replace(inputs=[None if s is None else p.data(s) for s in given]))


def _depends(s: Padded) -> bool:
    return s.known is not None and any(not isinstance(x, bool) and x.constant is None for x in s.known.reshape(-1))


def _first(p: Padder, given: Given) -> Padded:
    if not given or given[0] is None:
        raise p.refused("its first input is left out")
    return given[0]


def _number(node: Node, name: str, default: int) -> int:
    found = node.attributes.get(name, default)
    assert isinstance(found, int)
    return found


def _text(node: Node, name: str, default: str) -> str:
    found = node.attributes.get(name, default)
    return found.decode() if isinstance(found, bytes) else str(found)


def _list(node: Node, name: str) -> list[int] | None:
    found = node.attributes.get(name)
    return None if found is None else [int(x) for x in found]  # type: ignore[union-attr]


def _at(given: Given, i: int) -> Padded | None:
    return given[i] if i < len(given) else None


def _require_unpadded(p: Padder, s: Padded | None, axes: Sequence[int] | None, what: str) -> None:
    if s is not None and any(is_padded(s.axes[i]) for i in (range(s.rank) if axes is None else axes)):
        raise p.refused(f"{what} carries padding")


def _prefix(axis: Axis) -> bool:
    """Whether the valid places of an axis are the first ones."""
    return all(f.constant is not None for f in axis[1:])


def _require_prefix(p: Padder, axis: Axis) -> Expr:
    if not _prefix(axis):
        raise p.refused("padding lies between the valid elements of a merged axis")
    return product(axis)


# --- elementwise ------------------------------------------------------------------------------------------------------


def _broadcast(p: Padder, all_axes: Sequence[Sequence[Axis]]) -> tuple[Axis, ...]:
    rank = max(map(len, all_axes))
    made = []
    for k in range(rank):
        wide = {a[k - rank + len(a)] for a in all_axes if k - rank + len(a) >= 0} - {()}
        if len(wide) > 1:
            sizes = ", ".join(sorted("*".join(map(str, a)) for a in wide))
            raise p.refused(f"axes of the sizes {sizes} are combined")
        made.append(wide.pop() if wide else ())
    return tuple(made)


def _elementwise(p: Padder, node: Node, given: Given) -> Result:
    op = node.op_type
    inputs = list(given)
    if op in ("Div", "Mod", "Pow") and not node.domain:
        divisor = inputs[1]
        if divisor is not None and divisor.dtype.kind in "iu" and divisor.padded:
            # some libraries end the process where an integer is divided by zero, and NumPy refuses negative powers
            inputs[1] = p.masked(divisor, divisor.padded, 1)
    sources = [s for s in inputs if s is not None]
    axes = _broadcast(p, [s.axes for s in sources])
    padded = frozenset(i for i, a in enumerate(axes) if is_padded(a))
    zeros: frozenset[int] = frozenset()
    clean = False
    if traits_of(node).zero_preserving:
        weighed = [s for s in (sources[1:] if op == "Where" else sources) if not _is_zero(s)]
        zeros = frozenset(k for k in padded if all(k - len(axes) + s.rank in s.zeros for s in weighed))
        clean = all(s.clean and len(s.padded) == len(padded) for s in weighed)
    top = sources[0].top if len(sources) == 1 and _keeps_numbers(node) else ()
    return p.copy(node, inputs, [axes] * len(node.outputs), zeros=zeros, clean=clean, top=top)


def _is_zero(s: Padded) -> bool:
    data = None if s.value is None else s.value.data
    return data is not None and data.size == 1 and not data.any()


def _keeps_numbers(node: Node) -> bool:
    return node.op_type == "Identity" or (node.op_type == "Cast" and node.attributes.get("to") in _INDEX_INTEGERS)


def _like_first(p: Padder, node: Node, given: Given) -> Result:
    """The shape of the first input; the others are parameters."""
    x = _first(p, given)
    return p.copy(node, given, [x.axes] * len(node.outputs))


def _cast_like(p: Padder, node: Node, given: Given) -> Result:
    return p.copy(node, given, [_first(p, given).axes])


def _dropout(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    if draws_random(node):
        raise p.refused("random numbers are drawn for a shape, and others for another one")
    return p.copy(node, given, [x.axes] * len(node.outputs), zeros=x.zeros, clean=x.clean)


def _clip(p: Padder, node: Node, given: Given) -> Result:
    for s in given[1:]:
        _require_unpadded(p, s, None, "a bound")
    return p.copy(node, given, [_first(p, given).axes])


# --- softmax and reductions -------------------------------------------------------------------------------------------


def _softmax(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    if node.version >= 13:
        axes = [_number(node, "axis", -1) % x.rank]
    else:
        axes = list(range(_number(node, "axis", 1) % x.rank, x.rank))
    over = [i for i in axes if is_padded(x.axes[i])]
    if node.op_type == "Hardmax" and any(not _prefix(x.axes[i]) for i in over):
        raise p.refused("of equal elements the first is marked, and padding lies between the valid ones")
    if node.op_type == "Hardmax" and len(over) > 0 and len(axes) > 1:
        raise p.refused("of equal elements the first is marked, and padding lies between the valid ones")
    masked = p.masked(x, over, p.lowest(x.dtype) if over else 0)
    # exp(-inf) is an exact zero, in every row that has a valid element
    zeros = frozenset(over) if node.op_type == "Softmax" and len(over) == 1 else frozenset[int]()
    return p.copy(node, [masked], [x.axes], zeros=zeros)


def _reduced_axes(p: Padder, node: Node, given: Given, rank: int) -> list[int]:
    axes = _list(node, "axes")
    if axes is None:
        axes = p.numbers(_at(given, 1))
    if not axes:
        if _number(node, "noop_with_empty_axes", 0):
            return []
        return list(range(rank))
    return sorted({a % rank for a in axes})


def _without(axes: Sequence[Axis], reduced: Sequence[int], keep: int) -> tuple[Axis, ...]:
    return tuple(() if i in reduced else a for i, a in enumerate(axes) if keep or i not in reduced)


def _reduction(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    reduced = _reduced_axes(p, node, given, x.rank)
    over = [i for i in reduced if is_padded(x.axes[i])]
    axes = _without(x.axes, reduced, _number(node, "keepdims", 1))
    if not reduced:  # the operator still squares, or takes a logarithm
        return p.copy(node, given, [x.axes])
    op = node.op_type
    if not over:
        return p.copy(node, given, [axes])
    if op == "ReduceMean":
        return [_mean(p, x, reduced, axes, _number(node, "keepdims", 1))]
    fill: Any = 0
    if op == "ReduceMax":
        fill = p.lowest(x.dtype)
    elif op == "ReduceMin":
        fill = p.highest(x.dtype)
    elif op == "ReduceProd":
        fill = 1
    elif op == "ReduceLogSumExp":
        if not _is_float(x.dtype):
            raise p.refused(f"{x.dtype} has no infinity to mask with")
        fill = -math.inf
    return p.copy(node, [p.masked(x, over, fill), *given[1:]], [axes])


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _mean(p: Padder, x: Padded, reduced: Sequence[int], axes: tuple[Axis, ...], keep: int) -> Padded:
    """The sum of the valid elements, divided by their number; of narrow floats in float32, as their mean is."""
    if not _is_float(x.dtype):
        raise p.refused(f"a mean of {x.dtype} over padding")
    masked = p.masked(x, [i for i in reduced if is_padded(x.axes[i])], 0)
    data, wide = p.data(masked), x.dtype
    if x.dtype.itemsize < 4:
        wide = np.dtype(np.float32)
        data = p.emit("Cast", [data], to=1)
    if since_version("ReduceSum", "", p.opset) >= 13:
        total = p.emit("ReduceSum", [data, p.vector(*reduced)], keepdims=keep)
    else:
        total = p.emit("ReduceSum", [data], axes=tuple(reduced), keepdims=keep)
    count = p.emit("Cast", [p.scalar(product(product(x.axes[i]) for i in reduced))], to=_code(wide))
    made = p.emit("Div", [total, count])
    if wide != x.dtype:
        made = p.emit("Cast", [made], to=_code(x.dtype))
    return p.padded(made, axes)


def _code(dtype: np.dtype) -> int:
    return DTYPE_TO_ONNX[dtype]


def _arg_extreme(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    axis = _number(node, "axis", 0) % x.rank
    axes = _without(x.axes, [axis], _number(node, "keepdims", 1))
    if is_padded(x.axes[axis]):
        _require_prefix(p, x.axes[axis])
        if _number(node, "select_last_index", 0):
            raise p.refused("of equal elements the last is taken, which padding might be")
        x = p.masked(x, [axis], p.lowest(x.dtype) if node.op_type == "ArgMax" else p.highest(x.dtype))
    return p.copy(node, [x], [axes])


def _cumsum(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    axis = p.numbers(given[1])
    assert axis is not None
    # forwards, padding comes behind what is valid; but who multiplies by a triangle would spread NaN
    return p.copy(node, [p.masked(x, [axis[0] % x.rank], 0), *given[1:]], [x.axes])


def _global_pool(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    space = list(range(2, x.rank))
    over = [i for i in space if is_padded(x.axes[i])]
    axes = _without(x.axes, space, 1)
    if over and node.op_type == "GlobalAveragePool":
        return [_mean(p, x, space, axes, 1)]
    return p.copy(node, [p.masked(x, over, p.lowest(x.dtype) if node.op_type == "GlobalMaxPool" else 0)], [axes])


# --- products ---------------------------------------------------------------------------------------------------------


def _contracted(p: Padder, a: Padded, i: int, b: Padded, j: int) -> tuple[Padded, Padded]:
    """Both operands of a product, zero behind the valid size of their contracted axes (NaN times zero is NaN)."""
    if a.axes[i] != b.axes[j]:
        raise p.refused("the contracted axes are of different sizes")
    return p.masked(a, [i], 0), p.masked(b, [j], 0)


def _matmul(p: Padder, node: Node, given: Given) -> Result:
    a, b = given[0], given[1]
    assert a is not None
    assert b is not None
    i, j = a.rank - 1, max(b.rank - 2, 0)
    if node.op_type != "MatMul":
        _require_unpadded(p, a, [i], "the contracted axis of quantised operands")
        _require_unpadded(p, b, [j], "the contracted axis of quantised operands")
        for k, s in enumerate(given):
            if s is not a and s is not b and k:
                _require_unpadded(p, s, None, "a scale or zero point")
    a, b = _contracted(p, a, i, b, j)
    batch = _broadcast(p, [a.axes[:-2], b.axes[:-2]]) if max(a.rank, b.rank) > 2 else ()
    axes = [*batch, *([a.axes[-2]] if a.rank > 1 else []), *([b.axes[-1]] if b.rank > 1 else [])]
    return p.copy(node, [a, b, *given[2:]], [axes])


def _qlinear_matmul(p: Padder, node: Node, given: Given) -> Result:
    a, b = given[0], given[3]
    assert a is not None
    assert b is not None
    _require_unpadded(p, a, [a.rank - 1], "the contracted axis of quantised operands")
    _require_unpadded(p, b, [max(b.rank - 2, 0)], "the contracted axis of quantised operands")
    for k in (1, 2, 4, 5, 6, 7):
        _require_unpadded(p, _at(given, k), None, "a scale or zero point")
    if a.rank < 2 or b.rank < 2:
        raise p.refused("a quantised product of vectors")
    axes = [*_broadcast(p, [a.axes[:-2], b.axes[:-2]]), a.axes[-2], b.axes[-1]] if max(a.rank, b.rank) > 2 else [
        a.axes[-2], b.axes[-1]
    ]  # fmt: skip
    return p.copy(node, given, [axes])


def _gemm(p: Padder, node: Node, given: Given) -> Result:
    a, b = given[0], given[1]
    assert a is not None
    assert b is not None
    i, j = (0, 1) if _number(node, "transA", 0) else (1, 0), (1, 0) if _number(node, "transB", 0) else (0, 1)
    a, b = _contracted(p, a, i[0], b, j[0])
    axes = (a.axes[i[1]], b.axes[j[1]])
    c = _at(given, 2)
    if c is not None and _broadcast(p, [axes, c.axes]) != axes:
        raise p.refused("the addend is of another size")
    return p.copy(node, [a, b, *given[2:]], [axes])


def _einsum(p: Padder, node: Node, given: Given) -> Result:
    equation = _text(node, "equation", "").replace(" ", "")
    if "." in equation:
        raise p.refused("an equation with an ellipsis")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    sizes: dict[str, Axis] = {}
    for term, s in zip(terms, given, strict=True):
        assert s is not None
        if len(term) != s.rank:
            raise p.refused("an equation that does not fit its inputs")
        for label, axis in zip(term, s.axes, strict=True):
            if sizes.setdefault(label, axis) != axis:
                raise p.refused(f"the axes {label!r} are of different sizes")
            if term.count(label) > 1 and is_padded(axis):
                raise p.refused("a diagonal of a padded axis")
    inputs = [
        p.masked(s, [k for k, label in enumerate(term) if label not in right], 0)
        for term, s in zip(terms, given, strict=True)
        if s is not None
    ]
    return p.copy(node, inputs, [[sizes[c] for c in right]])


# --- windows ----------------------------------------------------------------------------------------------------------


def _window(p: Padder, node: Node, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Pads before and behind, strides and dilations. Refuses pads that depend on the size."""
    n = len(kernel)
    strides = _list(node, "strides") or [1] * n
    dilations = _list(node, "dilations") or [1] * n
    auto = _text(node, "auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        pads = (_list(node, "pads") or [0] * (2 * n)) if auto == "NOTSET" else [0] * (2 * n)
        return pads[:n], pads[n:], strides, dilations
    if any(s != 1 for s in strides):
        raise p.refused(f"its pads depend on the size (auto_pad={auto})")
    total = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    before = [t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in total]
    return before, [t - b for t, b in zip(total, before, strict=True)], strides, dilations


def _slid(
    p: Padder, x: Padded, kernel: Sequence[int], window: tuple[list[int], list[int], list[int], list[int]]
) -> list[Axis]:
    """The spatial axes behind a sliding window. That of a padded axis begins at the same places as without padding."""
    before, behind, strides, dilations = window
    made = []
    for i, k in enumerate(kernel):
        size = _require_prefix(p, x.axes[i + 2])
        free = size + before[i] + behind[i] - (k - 1) * dilations[i] - 1
        p.need(free, 0)
        made.append(axis_of([free // strides[i] + 1]))
    return made


def _conv(p: Padder, node: Node, given: Given) -> Result:
    x, w = given[0], given[1]
    assert x is not None
    assert w is not None
    for s in given[1:]:
        _require_unpadded(p, s, None, "a weight")
    _require_unpadded(p, x, [1], "the axis of channels")
    kernel = [p.size(a) for a in w.axes[2:]]
    window = _window(p, node, kernel)
    out = [x.axes[0], w.axes[0], *_slid(p, x, kernel, window)]
    space = [i for i in range(2, x.rank) if kernel[i - 2] > 1 or window[0][i - 2] or window[1][i - 2]]
    x = p.masked(x, [i for i in space if is_padded(x.axes[i])], 0)  # as the zeros behind the edge
    return p.copy(node, [x, *given[1:]], [out])


def _conv_transpose(p: Padder, node: Node, given: Given) -> Result:
    x, w = given[0], given[1]
    assert x is not None
    assert w is not None
    for s in given[1:]:
        _require_unpadded(p, s, None, "a weight")
    _require_unpadded(p, x, [1], "the axis of channels")
    if node.attributes.get("output_shape") is not None or _text(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise p.refused("its pads depend on the size")
    kernel = [p.size(a) for a in w.axes[2:]]
    before, behind, strides, dilations = _window(p, node, kernel)
    extra = _list(node, "output_padding") or [0] * len(kernel)
    groups = _number(node, "group", 1)
    out = [x.axes[0], axis_of([product(w.axes[1]) * groups])]
    for i, k in enumerate(kernel):
        size = _require_prefix(p, x.axes[i + 2])
        length = (size - 1) * strides[i] + extra[i] + (k - 1) * dilations[i] + 1 - before[i] - behind[i]
        out.append(axis_of([length]))
    x = p.masked(x, range(2, x.rank), 0)
    return p.copy(node, [x, *given[1:]], [out])


def _pool(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    kernel = _list(node, "kernel_shape") or []
    over = [i for i in range(2, x.rank) if is_padded(x.axes[i])]
    if over and _number(node, "ceil_mode", 0):
        raise p.refused("its last window depends on the size (ceil_mode)")
    second = node.outputs[1] if len(node.outputs) > 1 else None
    if second is not None and any(is_padded(a) for a in x.axes[1:]):
        raise p.refused("its indices count through padded axes")
    if not over:
        return _typed_like(p, node, given, x, 2)
    window = _window(p, node, kernel)
    out = [*x.axes[:2], *_slid(p, x, kernel, window)]
    fill: Any = 0
    if node.op_type == "MaxPool":
        fill = p.lowest(x.dtype)
    elif node.op_type == "AveragePool" and not _number(node, "count_include_pad", 0):
        if any(window[1][i - 2] for i in over):
            raise p.refused("a window at the edge is divided by the number of elements within")
        return p.copy(node, [x], [out])  # no window of a valid place reaches padding
    return p.copy(node, [p.masked(x, over, fill)], [out])


def _typed_like(p: Padder, node: Node, given: Given, x: Padded, kept: int) -> Result:
    """The node over axes of which only the first `kept` may carry padding; the others are those that are inferred."""
    made = p.add(node.replace(inputs=[None if s is None else p.data(s) for s in given]))
    return [None if s is None else p.padded(p.data(s), [*x.axes[:kept], *s.axes[kept:]]) for s in made]


# --- normalisations ---------------------------------------------------------------------------------------------------


def _layer_norm(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    axis = _number(node, "axis", -1) % x.rank
    _require_unpadded(p, x, range(axis, x.rank), "a normalised axis")
    for s in given[1:]:
        _require_unpadded(p, s, None, "a scale")
    reduced = tuple(() if i >= axis else a for i, a in enumerate(x.axes))
    return p.copy(node, given, [x.axes, reduced, reduced])


def _channel_norm(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    if node.op_type == "BatchNormalization":
        if _number(node, "training_mode", 0) or sum(v is not None for v in node.outputs) > 1:
            raise p.refused("a mean over padding")
        _require_unpadded(p, x, [1], "the axis of channels")
    elif node.op_type == "LRN":
        _require_unpadded(p, x, [1], "the axis of channels")
    else:
        _require_unpadded(p, x, range(1, x.rank), "a normalised axis")
    for s in given[1:]:
        _require_unpadded(p, s, None, "a scale")
    return p.copy(node, given, [x.axes] + [None] * (len(node.outputs) - 1))


def _mean_variance(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    _require_unpadded(p, x, [a % x.rank for a in _list(node, "axes") or [0, 2, 3]], "a normalised axis")
    return p.copy(node, given, [x.axes])


def _lp_norm(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    return p.copy(node, [p.masked(x, [_number(node, "axis", -1) % x.rank], 0)], [x.axes])


# --- quantisation -----------------------------------------------------------------------------------------------------


def _quantise(p: Padder, node: Node, given: Given) -> Result:
    x, scale = _first(p, given), given[1]
    assert scale is not None
    for s in given[1:]:
        _require_unpadded(p, s, None, "a scale or zero point")
    if scale.rank > 1 or _number(node, "block_size", 0):
        raise p.refused("scales in blocks")
    if scale.rank == 1 and p.size(scale.axes[0]) > 1:
        _require_unpadded(p, x, [_number(node, "axis", 1) % x.rank], "the axis of scales")
    return p.copy(node, given, [x.axes])


def _dynamic_quantise(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)  # its range always has zero in it
    return p.copy(node, [p.masked(x, x.padded, 0)], [x.axes, (), ()])


# --- movement ---------------------------------------------------------------------------------------------------------


def _single(s: Padded) -> tuple[Expr, ...]:
    """The bound of all elements, where it is one for all."""
    return s.top if len(s.top) == 1 else ()


def _transpose(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    perm = _list(node, "perm") or list(reversed(range(x.rank)))
    zeros = frozenset(i for i, k in enumerate(perm) if k in x.zeros)
    return p.copy(node, given, [[x.axes[k] for k in perm]], zeros=zeros, clean=x.clean, top=_single(x))


def _squeeze(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    axes = _list(node, "axes")
    if axes is None:
        axes = p.numbers(_at(given, 1))
    if axes is None:
        if x.padded:
            raise p.refused("which axes it takes away depends on the size")
        axes = [i for i, a in enumerate(x.axes) if a == ()]
    gone = {a % x.rank for a in axes}
    if any(x.axes[i] != () for i in gone):
        raise p.refused("an axis of size 1 for some sizes alone")
    return _reshaped(p, x, [a for i, a in enumerate(x.axes) if i not in gone])


def _unsqueeze(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    axes = _list(node, "axes")
    if axes is None:
        axes = p.numbers(given[1])
    assert axes is not None
    rank = x.rank + len(axes)
    new = {a % rank for a in axes}
    old = iter(x.axes)
    return _reshaped(p, x, [() if i in new else next(old) for i in range(rank)])


def _flatten(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    axis = _number(node, "axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    return _reshaped(p, x, [axis_of(_digits(x.axes[:axis])), axis_of(_digits(x.axes[axis:]))])


def _digits(axes: Sequence[Axis]) -> list[Expr]:
    return [f for a in axes for f in a]


def _reshaped(p: Padder, x: Padded, axes: Sequence[Axis]) -> Result:
    """The value with its digits grouped to these axes."""
    made = p.shaped(p.data(x), p.sizes(axes))
    zeros = frozenset[int]()
    if [a for a in axes if is_padded(a)] == [a for a in x.axes if is_padded(a)]:  # padded axes are as they were
        old = [i for i, a in enumerate(x.axes) if is_padded(a)]
        new = [i for i, a in enumerate(axes) if is_padded(a)]
        zeros = frozenset(n for o, n in zip(old, new, strict=True) if o in x.zeros)
    return [p.padded(made, axes, zeros=zeros, clean=x.clean, top=_single(x))]


def _reshape(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    if node.version < 5:
        target = [Expr.of(n) for n in _list(node, "shape") or []]
    else:
        target = p.ints(given[1]) or []
    wanted: list[Expr | None] = []
    for i, t in enumerate(target):
        if t == 0 and not _number(node, "allowzero", 0):
            if i >= x.rank:
                raise p.refused("a size is taken over from an axis that is not there")
            wanted.append(product(x.axes[i]))
        else:
            wanted.append(None if t == -1 else t)
    digits = _digits(x.axes)
    if None not in wanted:
        front, rest = _grouped(p, digits, [t for t in wanted if t is not None])
        if rest:
            raise p.refused("the new shape has another number of elements")
        return _reshaped(p, x, front)
    at = wanted.index(None)
    front, rest = _grouped(p, digits, [t for t in wanted[:at] if t is not None])
    back, rest = _grouped(p, rest, [t for t in reversed(wanted[at + 1 :]) if t is not None], from_end=True)
    return _reshaped(p, x, [*front, axis_of(rest), *reversed(back)])


def _grouped(
    p: Padder, digits: list[Expr], wanted: Sequence[Expr], from_end: bool = False
) -> tuple[list[Axis], list[Expr]]:
    """Groups of digits whose products are the wanted sizes, and the digits that are left. Numbers may be split."""
    left = list(reversed(digits)) if not from_end else list(digits)  # the next one is the last
    groups: list[Axis] = []
    for size in wanted:
        group: list[Expr] = []
        done = Expr.of(1)
        while done != size:
            if not left:
                raise p.refused(f"the size {size} is not made of whole axes")
            digit = left.pop()
            if _ratio(size, done * digit) is not None or size.divided(done * digit) is not None:
                group.append(digit)
                done = done * digit
                continue
            part, whole = _ratio(size, done), digit.constant
            if part is None or whole is None or whole % part:
                raise p.refused(f"the size {size} is not made of whole axes")
            group.append(Expr.of(part))
            left.append(Expr.of(whole // part))
            done = size
        groups.append(axis_of(reversed(group) if from_end else group))
    return groups, (left if from_end else list(reversed(left)))


def _ratio(size: Expr, done: Expr) -> int | None:
    """The number that times `done` gives `size`, or None."""
    if not done.terms or not size.terms:
        return None
    k, rest = divmod(size.terms[0][1], done.terms[0][1])
    return k if not rest and done * k == size else None


def _expand(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    target = [axis_of([t]) for t in p.ints(given[1]) or []]
    rank = max(x.rank, len(target))
    old = [()] * (rank - x.rank) + list(x.axes)
    new = [()] * (rank - len(target)) + target
    axes = []
    for a, t in zip(old, new, strict=True):
        if a == () or t == ():
            axes.append(a or t)
        elif a == t or product(a) == product(t):
            axes.append(a)
        else:
            raise p.refused(f"an axis of the size {product(a)} is expanded to {product(t)}")
    for a in axes:
        p.checked_axis(a)
    made = p.emit("Expand", [p.data(x), p.vector(*p.sizes(axes))])
    zeros = frozenset(i for i, a in enumerate(old) if i - rank + x.rank in x.zeros and is_padded(a))
    clean = x.clean and all(is_padded(a) == is_padded(b) for a, b in zip(axes, old, strict=True))
    top = x.top if len(x.top) == 1 or (len(x.top) > 1 and old[-1] == axes[-1]) else ()
    return [p.padded(made, axes, zeros=zeros, clean=clean, top=top)]


def _tile(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    repeats = p.ints(given[1]) or []
    if len(repeats) != x.rank:
        raise p.refused("repeats that do not fit the rank")
    axes = [axis_of([r, *a]) for r, a in zip(repeats, x.axes, strict=True)]
    for a in axes:
        p.checked_axis(a)
    made = p.emit("Tile", [p.data(x), p.vector(*(r.evaluate(p.buckets) for r in repeats))])
    return [p.padded(made, axes, top=_single(x))]


def _constant_of_shape(p: Padder, node: Node, given: Given) -> Result:
    axes = [p.checked_axis(axis_of([t])) for t in p.ints(given[0]) or []]
    value = node.attributes.get("value")
    item = value.reshape(-1)[0] if isinstance(value, np.ndarray) else np.float32(0)
    made = p.add(node.replace(inputs=[p.vector(*p.sizes(axes))]))[0]
    assert made is not None
    padded = frozenset(i for i, a in enumerate(axes) if is_padded(a))
    zero = bool(item == 0)
    top = (Expr.of(int(item) + 1),) if made.dtype.kind in "iu" and item >= 0 else ()
    return [p.padded(p.data(made), axes, zeros=padded if zero else frozenset(), clean=zero, top=top)]


def _range(p: Padder, node: Node, given: Given) -> Result:
    start, limit, delta = (p.ints(s) for s in given)
    assert start is not None
    assert limit is not None
    assert delta is not None
    if delta[0] != 1:
        raise p.refused("a step other than 1")
    dtype = _first(p, given).dtype
    axis = p.checked_axis(axis_of([limit[0] - start[0]]))
    _require_prefix(p, axis)
    count = p.size(axis)
    first = start[0].constant
    if first is not None:
        made = p.constant(np.arange(first, first + count).astype(dtype))
    else:
        made = p.emit("Add", [p.constant(np.arange(count, dtype=np.int64)), p.scalar(start[0])])
        if dtype != np.int64:
            made = p.emit("Cast", [made], to=_code(dtype))
    # in the padding, places of smaller sizes count to less than those of the bucket
    top = (limit[0],) if p.at_least(start[0], 0) else ()
    return [p.padded(made, [axis], top=top)]


def _concat(p: Padder, node: Node, given: Given) -> Result:
    parts = [s for s in given if s is not None]
    rank = parts[0].rank
    axis = _number(node, "axis", 1) % rank
    axes: list[Axis] = list(parts[0].axes)
    for s in parts[1:]:
        if any(a != b for i, (a, b) in enumerate(zip(axes, s.axes, strict=True)) if i != axis):
            raise p.refused("its inputs are of different sizes on other axes")
    sizes = [_require_prefix(p, s.axes[axis]) if is_padded(s.axes[axis]) else product(s.axes[axis]) for s in parts]
    total = sizes[0]
    for e in sizes[1:]:
        total = total + e
    along = any(is_padded(s.axes[axis]) for s in parts)
    axes[axis] = axis_of([total])
    tops = [s.top for s in parts]
    top: tuple[Expr, ...] = ()
    if all(len(t) == 1 for t in tops) and axis == rank - 1 and all(s.axes[axis] == () for s in parts):
        top = tuple(t[0] for t in tops)
    elif tops[0] and len(tops[0]) == 1 and all(t == tops[0] for t in tops):
        top = tops[0]
    if not along:
        zeros = frozenset(i for i in parts[0].zeros if all(i in s.zeros for s in parts))
        return p.copy(node, given, [axes], zeros=zeros, clean=all(s.clean for s in parts), top=top)
    if not any(is_padded(s.axes[axis]) for s in parts[:-1]):
        return p.copy(node, given, [axes], top=top)  # padding stays at the end
    joined = p.emit("Concat", [p.data(s) for s in parts], axis=axis)
    count = sum(p.size(s.axes[axis]) for s in parts)
    places: Value = p.constant(np.arange(count, dtype=np.int64))
    first = places
    begin = Expr.of(0)
    for s, e in zip(parts[:-1], sizes[:-1], strict=True):
        begin = begin + e
        if is_padded(s.axes[axis]):  # what comes behind a part stands behind its padding
            before = p.emit("Less", [first, p.scalar(begin)])
            gap = p.scalar(Expr.of(p.size(s.axes[axis])) - e)
            places = p.emit("Add", [places, p.emit("Where", [before, p.constant(np.array(0, np.int64)), gap])])
    made = p.emit("Gather", [joined, _clamped(p, places, count)], axis=axis)
    return [p.padded(made, axes)]


def _clamped(p: Padder, index: Value, count: int) -> Value:
    """An index that is in range in the padding as well, visibly so to who asks for its bounds."""
    if p.opset < 12:
        raise p.refused("an index that depends on the size needs opset 12")
    index = p.emit("Max", [index, p.constant(np.array(0, np.int64))])
    return p.emit("Min", [index, p.constant(np.array(count - 1, np.int64))])


def _split(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    axis = _number(node, "axis", 0) % x.rank
    _require_unpadded(p, x, [axis], "the axis that is split")
    made = p.add(node.replace(inputs=[None if s is None else p.data(s) for s in given]))
    return [
        None
        if s is None
        else p.padded(
            p.data(s),
            [s.axes[i] if i == axis else a for i, a in enumerate(x.axes)],
            zeros=x.zeros,
            clean=x.clean,
            top=_single(x),
        )
        for s in made
    ]


def _slice(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    if node.version < 10:
        starts = [Expr.of(n) for n in _list(node, "starts") or []]
        ends = [Expr.of(n) for n in _list(node, "ends") or []]
        axes, steps = _list(node, "axes"), None
    else:
        starts, ends = p.ints(given[1]) or [], p.ints(given[2]) or []
        axes, steps = p.numbers(_at(given, 3)), p.numbers(_at(given, 4))
    where = [a % x.rank for a in axes] if axes is not None else list(range(len(starts)))
    steps = steps or [1] * len(starts)
    s = x
    for axis, start, end, step in zip(where, starts, ends, steps, strict=True):
        s = _sliced(p, s, axis, start, end, step)
    return [s]


_FAR: Final = 2**31 - 1  # bounds of at least so much mean "to the end"


def _sliced(p: Padder, x: Padded, axis: int, start: Expr, end: Expr, step: int) -> Padded:
    """One axis sliced: place i of the result is place start + step*i."""
    if step == 0:
        raise p.refused("a step of 0")
    size = _require_prefix(p, x.axes[axis]) if is_padded(x.axes[axis]) else product(x.axes[axis])
    back = step < 0
    start = _bound(p, start, size, size - 1 if back else size, Expr.of(0), start_of=True)
    end = _bound(p, end, size, size - 1 if back else size, Expr.of(-1 if back else 0), start_of=False)
    span = start - end if back else end - start
    by = abs(step)
    length = axis_of([(span + (by - 1)) // by])
    if length == x.axes[axis] and not back and start == 0 and by == 1:
        return x
    axes = [*x.axes[:axis], p.checked_axis(length), *x.axes[axis + 1 :]]
    count, first = p.size(length), start.constant
    top = _single(x)
    zeros = x.zeros - {axis}
    if first is not None and not back and first + step * (count - 1) < p.size(x.axes[axis]):
        end_ = first + step * (count - 1) + 1
        if p.opset >= 10:
            made = p.emit(
                "Slice", [p.data(x), p.vector(first), p.vector(end_), p.vector(axis), p.vector(step)]
            )  # fmt: skip
        elif step == 1:
            made = p.emit("Slice", [p.data(x)], starts=(first,), ends=(end_,), axes=(axis,))
        else:
            raise p.refused("a step other than 1 before opset 10")
        return p.padded(made, axes, zeros=zeros, top=top)
    places = p.constant(np.arange(count, dtype=np.int64) * step)
    index = p.emit("Add", [places, p.scalar(start)])
    made = p.emit("Gather", [p.data(x), _clamped(p, index, p.size(x.axes[axis]))], axis=axis)
    return p.padded(made, axes, zeros=zeros, top=top)


def _bound(p: Padder, bound: Expr, size: Expr, most: Expr, least: Expr, *, start_of: bool) -> Expr:
    """A start or an end of Slice as a place: counted from the end where negative, cut to the axis."""
    value = bound.constant
    if value is not None and value >= _FAR:
        return most
    if value is not None and value <= -_FAR:
        return least
    length = size.constant
    if value is not None and length is not None:
        value = value + length if value < 0 else value
        return Expr.of(min(max(value, least.constant or 0), most.constant or 0))
    high = p.bounds(bound)[1]
    if p.at_least(bound, 0):
        pass
    elif high is not None and high < 0:
        bound = bound + size
    else:
        raise p.refused(f"a bound {bound} that is negative for some sizes alone")
    if most == size or start_of:
        p.need(most - bound, 0)  # serve only sizes that it lies in
    p.need(bound - least, 0)
    return bound


def _gather(p: Padder, node: Node, given: Given) -> Result:
    x, index = given[0], given[1]
    assert x is not None
    assert index is not None
    axis = _number(node, "axis", 0) % x.rank
    axes = [*x.axes[:axis], *index.axes, *x.axes[axis + 1 :]]
    size = product(x.axes[axis])
    if is_padded(x.axes[axis]):
        _require_prefix(p, x.axes[axis])
        if index.known is not None:
            index = _known_index(p, index, size, p.size(x.axes[axis]))
        elif len(index.top) != 1 or not p.at_least(size - index.top[0], 0):
            raise p.refused("its indices may point behind the valid size")
    index = _in_range(p, index, [p.size(x.axes[axis])] * max(1, len(index.top)))
    return p.copy(node, [x, index], [axes], top=_single(x))


def _known_index(p: Padder, index: Padded, size: Expr, count: int) -> Padded:
    """Indices that follow from sizes, as places: the last element is that of the valid size."""
    places = []
    for e in p.ints(index) or []:
        high = p.bounds(e)[1]
        if not p.at_least(e, 0):
            if high is None or high >= 0:
                raise p.refused(f"an index {e} that is negative for some sizes alone")
            e = e + size
        p.need(size - e, 1)
        p.need(e, 0)
        places.append(e)
    assert index.known is not None
    made = np.empty(len(places), object)
    made[:] = places
    placed = Padded(None, index.dtype, index.axes, made.reshape(index.known.shape))
    value = p.data(placed)
    if value.data is None:
        value = _clamped(p, value, count) if placed.dtype == np.int64 else value
    return Padded(value, placed.dtype, placed.axes, top=(Expr.of(count),))


def _in_range(p: Padder, index: Padded, counts: Sequence[int]) -> Padded:
    """Indices that are in range in the padding too, where engines and the host look at them."""
    if not index.padded or index.clean:
        return index
    if index.top and all(t.evaluate(p.buckets) <= n for t, n in zip(index.top, counts, strict=True)):
        return index
    return p.masked(index, index.padded, 0)


def _gather_elements(p: Padder, node: Node, given: Given) -> Result:
    x, index = given[0], given[1]
    assert x is not None
    assert index is not None
    axis = _number(node, "axis", 0) % x.rank
    _require_unpadded(p, x, [axis], "the axis that is indexed")
    for i, (a, b) in enumerate(zip(x.axes, index.axes, strict=True)):
        if i != axis and a != b and (is_padded(a) or is_padded(b)):
            raise p.refused("its inputs are of different sizes on other axes")
    index = _in_range(p, index, [p.size(x.axes[axis])] * max(1, len(index.top)))
    return p.copy(node, [x, index], [index.axes], top=_single(x))


def _gather_nd(p: Padder, node: Node, given: Given) -> Result:
    x, index = given[0], given[1]
    assert x is not None
    assert index is not None
    batch = _number(node, "batch_dims", 0)
    _require_unpadded(p, index, [index.rank - 1], "the axis of coordinates")
    columns = p.size(index.axes[-1])
    if x.axes[:batch] != index.axes[:batch]:
        raise p.refused("its batch axes are of different sizes")
    indexed = x.axes[batch : batch + columns]
    tops = index.top * columns if len(index.top) == 1 else index.top
    for k, a in enumerate(indexed):
        if is_padded(a):
            _require_prefix(p, a)
            if not tops or not p.at_least(product(a) - tops[k], 0):
                raise p.refused("its indices may point behind the valid size")
    if index.top and len(index.top) != columns:
        index = Padded(index.value, index.dtype, index.axes, index.known, index.zeros, index.clean, tops)
    index = _in_range(p, index, [p.size(a) for a in indexed])
    return p.copy(node, [x, index], [[*index.axes[:-1], *x.axes[batch + columns :]]], top=_single(x))


def _one_hot(p: Padder, node: Node, given: Given) -> Result:
    index = _first(p, given)
    depth = p.numbers(given[1])
    _require_unpadded(p, given[2], None, "the pair of values")
    assert depth is not None
    axis = _number(node, "axis", -1) % (index.rank + 1)
    axes = [*index.axes[:axis], axis_of(depth), *index.axes[axis:]]
    if not index.clean:
        index = p.masked(index, index.padded, 0)
    return p.copy(node, [index, *given[1:]], [axes])


def _trilu(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    if not all(_prefix(a) for a in x.axes[-2:]):
        raise p.refused("padding lies between the valid elements of a merged axis")
    if _at(given, 1) is not None:
        p.numbers(given[1])
    return p.copy(node, given, [x.axes], zeros=x.zeros, clean=x.clean)


def _eye_like(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    if not all(_prefix(a) for a in x.axes):
        raise p.refused("padding lies between the valid elements of a merged axis")
    return p.copy(node, given, [x.axes])


def _pad(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    mode = _text(node, "mode", "constant")
    amounts = _list(node, "pads")
    if amounts is None:
        amounts = p.numbers(given[1])
    assert amounts is not None
    where = p.numbers(_at(given, 3))
    where = list(range(x.rank)) if where is None else [a % x.rank for a in where]
    before, behind = [0] * x.rank, [0] * x.rank
    for i, k in enumerate(where):
        before[k], behind[k] = amounts[i], amounts[len(where) + i]
    axes: list[Axis] = []
    for i, a in enumerate(x.axes):
        if not is_padded(a):
            axes.append(axis_of([product(a) + before[i] + behind[i]]))
            continue
        if before[i] < 0 or behind[i] < 0 or (mode != "constant" and (before[i] or behind[i])):
            raise p.refused("a padded axis is cut, or continued by its own elements")
        changed = before[i] or behind[i]
        axes.append(axis_of([_require_prefix(p, a) + before[i] + behind[i]]) if changed else a)
    over = [i for i in x.padded if behind[i]]
    if over:
        value: Any = node.attributes.get("value", 0.0)
        source = _at(given, 2)
        if source is not None:
            data = p.data(source).data
            if data is None:
                raise p.refused("it is filled with a value that is computed")
            value = data.reshape(-1)[0]
        x = p.masked(x, over, value)
    return p.copy(node, [x, *given[1:]], [axes])


def _depth_to_space(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    _require_unpadded(p, x, [1], "the axis of channels")
    block = _number(node, "blocksize", 1)
    channels = axis_of([product(x.axes[1]) // (block * block)])
    return p.copy(node, given, [[x.axes[0], channels, *(axis_of([*a, block]) for a in x.axes[2:])]])


def _space_to_depth(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    _require_unpadded(p, x, [1, 2, 3], "an axis in blocks")
    return _typed_like(p, node, given, x, 1)


def _resize(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    over = x.padded
    scales_at, sizes_at = (1, None) if node.version < 11 else (2, 3)
    scales, sizes = _at(given, scales_at), None if sizes_at is None else _at(given, sizes_at)
    if node.attributes.get("axes") is not None or _text(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        raise p.refused("it names axes, or keeps the ratio of them")
    if _text(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise p.refused("a part of an axis is resized")
    if _text(node, "mode", "nearest") != "nearest":
        x = p.masked(x, over, 0)  # neighbours of weight zero must be finite
    axes = list(x.axes)
    inputs = [x, *given[1:]]
    if sizes is not None and sizes.known is not None and sizes.known.size:
        target = p.ints(sizes) or []
        for i, t in enumerate(target):
            if i in over and t != product(x.axes[i]):
                raise p.refused("a padded axis is resized by a ratio that depends on the size")
            axes[i] = x.axes[i] if i in over else axis_of([t])
        inputs[3] = Padded(p.vector(*p.sizes(axes)), sizes.dtype, sizes.axes)
        return p.copy(node, inputs, [axes])
    data = None if scales is None else p.data(scales).data
    if data is None:
        raise p.refused("its scales are computed")
    nearest = (
        _text(node, "mode", "nearest") == "nearest"
        and (node.version < 11 or _text(node, "coordinate_transformation_mode", "half_pixel") == "asymmetric")
        and (node.version < 11 or _text(node, "nearest_mode", "round_prefer_floor") == "floor")
    )
    for i, f in enumerate(float(v) for v in data.reshape(-1)):
        if i not in over:
            axes[i] = axis_of([math.floor(p.size(x.axes[i]) * f)])
        elif f != 1:
            if not nearest or f != int(f):
                raise p.refused("a padded axis is interpolated")
            axes[i] = axis_of([*x.axes[i], int(f)])
    return p.copy(node, inputs, [axes])


# --- recurrence -------------------------------------------------------------------------------------------------------


def _recurrent(p: Padder, node: Node, given: Given) -> Result:
    x = _first(p, given)
    for s in (*given[1:4], _at(given, 7)):
        _require_unpadded(p, s, None, "a weight")
    _require_unpadded(p, x, [2], "the axis of features")
    if _number(node, "layout", 0):
        raise p.refused("the batch stands first (layout=1)")
    steps, batch = x.axes[0], x.axes[1]
    inputs = [*given, *[None] * (5 - len(given))]
    lengths = inputs[4]
    if lengths is None and is_padded(steps):
        _require_prefix(p, steps)
        count = p.emit("Cast", [p.scalar(product(steps))], to=6)
        inputs[4] = p.padded(p.emit("Expand", [count, p.vector(p.size(batch))]), [batch])
    elif lengths is not None:
        if is_padded(steps):
            raise p.refused("it has lengths of its own beside padded steps")
        inputs[4] = p.masked(lengths, lengths.padded, 1)
    for s in inputs[5:7]:
        if s is not None and s.axes[1] != batch:
            raise p.refused("its initial state has another batch")
        _require_unpadded(p, s, [0, 2], "the axis of features")
    inputs[0] = p.masked(x, [0], 0)  # steps behind the end weigh nothing, but must be finite
    hidden = axis_of([_number(node, "hidden_size", 1)])
    ways = axis_of([2 if _text(node, "direction", "forward") == "bidirectional" else 1])
    state = [ways, batch, hidden]
    return p.copy(node, inputs, [[steps, ways, batch, hidden], state, state])


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(
        (
            "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
            "ReduceProd", "ReduceSum", "ReduceSumSquare",
        ),
        _reduction,
    ),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg_extreme),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _global_pool),
    **dict.fromkeys(("MatMul", "MatMulInteger"), _matmul),
    **dict.fromkeys(("AveragePool", "MaxPool"), _pool),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_norm),
    **dict.fromkeys(("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN"), _channel_norm),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _quantise),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    "CastLike": _cast_like,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "CumSum": _cumsum,
    "DepthToSpace": _depth_to_space,
    "Dropout": _dropout,
    "DynamicQuantizeLinear": _dynamic_quantise,
    "Einsum": _einsum,
    "Expand": _expand,
    "EyeLike": _eye_like,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "OneHot": _one_hot,
    "Pad": _pad,
    "QLinearMatMul": _qlinear_matmul,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}  # fmt: skip
