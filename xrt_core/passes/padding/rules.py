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

from xrt_core.ir.graph import Node
from xrt_core.ir.inference import einsum_axes
from xrt_core.ir.op_traits import draws_random, traits_of
from xrt_core.ir.schema import since_version
from xrt_core.ir.symbols import product
from xrt_core.ir.types import STRING, float_like
from xrt_core.passes.padding import movement, resizing
from xrt_core.passes.padding.form import Axis, Padded, axis_of, is_padded
from xrt_core.passes.padding.operands import (
    at,
    broadcast,
    first_of,
    is_prefix,
    narrowed,
    number,
    numbers,
    require_prefix,
    require_unpadded,
    text,
    type_code,
    typed_like,
    widened,
)
from xrt_core.passes.padding.positions import counted
from xrt_core.passes.padding.walk import Given, Padder, Rule

_INDEX_INTEGERS: Final = (6, 7)  # of TensorProto.DataType: int32, int64


def apply_rule(p: Padder, node: Node, given: Given) -> Given:
    """Add a node to the padded graph by the rule of its operator. Raises PaddingRefused."""
    reached = [s for s in given if s is not None and s.padded]
    if any(s.dtype == STRING for s in reached):
        raise p.refused("strings are not padded")
    rule = RULES.get(node.op_type) if not node.domain else None
    if rule is None and traits_of(node).elementwise:
        rule = _elementwise
    varies = any(f.constant is None for s in given if s is not None for a in s.axes for f in a)
    if varies or (rule is not None and any(s is not None and _depends(s) for s in given)):
        if rule is None:
            found = p.by_body(node, given, apply_rule)
            if found is not None:
                return found
            raise p.refused(
                f"{'padding reaches' if reached else 'rows reach'} it, and there is no rule for this operator"
            )
        return counted(node, given, rule(p, node, given))
    return counted(node, given, p.add(node.replace(inputs=[None if s is None else p.data(s) for s in given])))


def _depends(s: Padded) -> bool:
    return s.known is not None and any(x.constant is None for x in s.known.reshape(-1))


# --- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(p: Padder, node: Node, given: Given) -> Given:
    op = node.op_type
    inputs = list(given)
    if op in ("Div", "Mod", "Pow") and not node.domain:
        divisor = inputs[1]
        if divisor is not None and divisor.dtype.kind in "iu" and divisor.padded:
            # some libraries end the process where an integer is divided by zero, and NumPy refuses negative powers
            inputs[1] = p.masked(divisor, divisor.padded, 1)
    inputs = [s and _by_factors(s, inputs) for s in inputs]
    sources = [s for s in inputs if s is not None]
    axes = broadcast(p, [s.axes for s in sources])
    padded = frozenset(i for i, a in enumerate(axes) if is_padded(a))
    zeros: frozenset[int] = frozenset()
    clean = False
    if traits_of(node).zero_preserving:
        weighed = [s for s in (sources[1:] if op == "Where" else sources) if not _is_zero(s)]
        zeros = frozenset(k for k in padded if all(k - len(axes) + s.rank in s.zeros for s in weighed))
        clean = all(s.clean and len(s.padded) == len(padded) for s in weighed)
    top = sources[0].top if len(sources) == 1 and _keeps_numbers(node) else ()
    return p.copy(node, inputs, [axes] * len(node.outputs), zeros=zeros, clean=clean, top=top)


def _by_factors(s: Padded, inputs: Given) -> Padded:
    """An input that was expanded to sizes of which others have factors is as before that: it is broadcast to these."""
    x = s.unexpanded
    if x is None:
        return s
    others = [(o.axes, o.rank) for o in inputs if o is not None and o.unexpanded is None]
    differs = False
    for i, a in enumerate(s.axes):
        from_end = s.rank - i
        if a == () or (from_end <= x.rank and x.axes[-from_end] == a):
            continue
        beside = [axes[-from_end] for axes, rank in others if from_end <= rank]
        if all(product(b) != product(a) for b in beside):
            return s
        differs |= a not in beside
    return x if differs else s


def _is_zero(s: Padded) -> bool:
    data = None if s.value is None else s.value.data
    return data is not None and data.size == 1 and not data.any()


def _keeps_numbers(node: Node) -> bool:
    return node.op_type == "Identity" or (node.op_type == "Cast" and node.attributes.get("to") in _INDEX_INTEGERS)


def _cast_like(p: Padder, node: Node, given: Given) -> Given:
    return p.copy(node, given, [first_of(p, given).axes])


def _dropout(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    if draws_random(node):
        raise p.refused("random numbers are drawn for a shape, and others for another one")
    return p.copy(node, given, [x.axes] * len(node.outputs), zeros=x.zeros, clean=x.clean)


def _clip(p: Padder, node: Node, given: Given) -> Given:
    for s in given[1:]:
        require_unpadded(p, s, None, "a bound")
    return p.copy(node, given, [first_of(p, given).axes])


# --- softmax and reductions -------------------------------------------------------------------------------------------


def _softmax(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    if node.version >= 13:
        axes = [number(node, "axis", -1) % x.rank]
    else:
        axes = list(range(number(node, "axis", 1) % x.rank, x.rank))
    over = [i for i in axes if is_padded(x.axes[i])]
    if node.op_type == "Hardmax" and any(not is_prefix(x.axes[i]) for i in over):
        raise p.refused("of equal elements the first is marked, and padding lies between the valid ones")
    if node.op_type == "Hardmax" and len(over) > 0 and len(axes) > 1:
        raise p.refused("of equal elements the first is marked, and padding lies between the valid ones")
    masked = p.masked(x, over, p.lowest(x.dtype) if over else 0)
    # exp(-inf) is an exact zero, in every row that has a valid element
    zeros = frozenset(over) if node.op_type == "Softmax" and len(over) == 1 else frozenset[int]()
    return p.copy(node, [masked], [x.axes], zeros=zeros)


def _reduced_axes(p: Padder, node: Node, given: Given, rank: int) -> list[int]:
    axes = numbers(node, "axes")
    if axes is None:
        axes = p.numbers(at(given, 1))
    if not axes:
        if number(node, "noop_with_empty_axes", 0):
            return []
        return list(range(rank))
    return sorted({a % rank for a in axes})


def _without(axes: Sequence[Axis], reduced: Sequence[int], keep: int) -> tuple[Axis, ...]:
    return tuple(() if i in reduced else a for i, a in enumerate(axes) if keep or i not in reduced)


def _reduction(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    reduced = _reduced_axes(p, node, given, x.rank)
    over = [i for i in reduced if is_padded(x.axes[i])]
    axes = _without(x.axes, reduced, number(node, "keepdims", 1))
    if not reduced:  # the operator still squares, or takes a logarithm
        return p.copy(node, given, [x.axes])
    op = node.op_type
    if not over:
        return p.copy(node, given, [axes])
    if op == "ReduceMean":
        return [_mean(p, x, reduced, axes, number(node, "keepdims", 1))]
    fill: Any = 0
    if op == "ReduceMax":
        fill = p.lowest(x.dtype)
    elif op == "ReduceMin":
        fill = p.highest(x.dtype)
    elif op == "ReduceProd":
        fill = 1
    elif op == "ReduceLogSumExp":
        if not float_like(x.dtype):
            raise p.refused(f"{x.dtype} has no infinity to mask with")
        fill = -math.inf
    return p.copy(node, [p.masked(x, over, fill), *given[1:]], [axes])


def _mean(p: Padder, x: Padded, reduced: Sequence[int], axes: tuple[Axis, ...], keep: int) -> Padded:
    """The sum of the valid elements, divided by their number; of narrow floats in float32, as their mean is."""
    if not float_like(x.dtype):
        raise p.refused(f"a mean of {x.dtype} over padding")
    masked = widened(p, p.masked(x, [i for i in reduced if is_padded(x.axes[i])], 0))
    data, wide = p.data(masked), masked.dtype
    if since_version("ReduceSum", "", p.opset) >= 13:
        total = p.emit("ReduceSum", [data, p.vector(*reduced)], keepdims=keep)
    else:
        total = p.emit("ReduceSum", [data], axes=tuple(reduced), keepdims=keep)
    count = p.emit("Cast", [p.scalar(product(product(x.axes[i]) for i in reduced))], to=type_code(wide))
    return narrowed(p, p.padded(p.emit("Div", [total, count]), axes), x.dtype)


def _arg_extreme(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    axis = number(node, "axis", 0) % x.rank
    axes = _without(x.axes, [axis], number(node, "keepdims", 1))
    if is_padded(x.axes[axis]):
        require_prefix(p, x.axes[axis])
        if number(node, "select_last_index", 0):
            raise p.refused("of equal elements the last is taken, which padding might be")
        x = p.masked(x, [axis], p.lowest(x.dtype) if node.op_type == "ArgMax" else p.highest(x.dtype))
    return p.copy(node, [x], [axes])


def _cumsum(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    axis = p.numbers(given[1])
    assert axis is not None
    # forwards, padding comes behind what is valid; but who multiplies by a triangle would spread NaN
    return p.copy(node, [p.masked(x, [axis[0] % x.rank], 0), *given[1:]], [x.axes])


def _global_pool(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
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


def _matmul(p: Padder, node: Node, given: Given) -> Given:
    a, b = given[0], given[1]
    assert a is not None
    assert b is not None
    i, j = a.rank - 1, max(b.rank - 2, 0)
    if node.op_type != "MatMul":
        require_unpadded(p, a, [i], "the contracted axis of quantised operands")
        require_unpadded(p, b, [j], "the contracted axis of quantised operands")
        for k, s in enumerate(given):
            if s is not a and s is not b and k:
                require_unpadded(p, s, None, "a scale or zero point")
    a, b = _contracted(p, a, i, b, j)
    batch = broadcast(p, [a.axes[:-2], b.axes[:-2]]) if max(a.rank, b.rank) > 2 else ()
    axes = [*batch, *([a.axes[-2]] if a.rank > 1 else []), *([b.axes[-1]] if b.rank > 1 else [])]
    return p.copy(node, [a, b, *given[2:]], [axes])


def _qlinear_matmul(p: Padder, node: Node, given: Given) -> Given:
    a, b = given[0], given[3]
    assert a is not None
    assert b is not None
    require_unpadded(p, a, [a.rank - 1], "the contracted axis of quantised operands")
    require_unpadded(p, b, [max(b.rank - 2, 0)], "the contracted axis of quantised operands")
    for k in (1, 2, 4, 5, 6, 7):
        require_unpadded(p, at(given, k), None, "a scale or zero point")
    if a.rank < 2 or b.rank < 2:
        raise p.refused("a quantised product of vectors")
    axes = [*broadcast(p, [a.axes[:-2], b.axes[:-2]]), a.axes[-2], b.axes[-1]] if max(a.rank, b.rank) > 2 else [
        a.axes[-2], b.axes[-1]
    ]  # fmt: skip
    return p.copy(node, given, [axes])


def _gemm(p: Padder, node: Node, given: Given) -> Given:
    a, b = given[0], given[1]
    assert a is not None
    assert b is not None
    i, j = (0, 1) if number(node, "transA", 0) else (1, 0), (1, 0) if number(node, "transB", 0) else (0, 1)
    a, b = _contracted(p, a, i[0], b, j[0])
    axes = (a.axes[i[1]], b.axes[j[1]])
    c = at(given, 2)
    if c is not None and broadcast(p, [axes, c.axes]) != axes:
        raise p.refused("the addend is of another size")
    return p.copy(node, [a, b, *given[2:]], [axes])


def _einsum(p: Padder, node: Node, given: Given) -> Given:
    found = einsum_axes(node, [None if s is None else s.rank for s in given])
    if found is None:
        raise p.refused("an equation that does not fit its inputs")
    terms, result = found
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
        p.masked(s, [k for k, label in enumerate(term) if label not in result], 0)
        for term, s in zip(terms, given, strict=True)
        if s is not None
    ]
    return p.copy(node, inputs, [[sizes[label] for label in result]])


# --- windows ----------------------------------------------------------------------------------------------------------


def _window(p: Padder, node: Node, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Pads before and behind, strides and dilations. Refuses pads that depend on the size."""
    n = len(kernel)
    strides = numbers(node, "strides") or [1] * n
    dilations = numbers(node, "dilations") or [1] * n
    auto = text(node, "auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        pads = (numbers(node, "pads") or [0] * (2 * n)) if auto == "NOTSET" else [0] * (2 * n)
        return pads[:n], pads[n:], strides, dilations
    if any(s != 1 for s in strides):
        raise p.refused(f"its pads depend on the size (auto_pad={auto})")
    total = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    before = [t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in total]
    return before, [t - b for t, b in zip(total, before, strict=True)], strides, dilations


def _slid(
    p: Padder,
    x: Padded,
    kernel: Sequence[int],
    window: tuple[list[int], list[int], list[int], list[int]],
    ceil: bool = False,
) -> list[Axis]:
    """The spatial axes behind a sliding window. That of a padded axis begins at the same places as without padding.
    ceil: a last window may reach beyond the edge, but begins before it."""
    before, behind, strides, dilations = window
    made = []
    for i, k in enumerate(kernel):
        size, reach = require_prefix(p, x.axes[i + 2]), (k - 1) * dilations[i] + 1
        free = size + before[i] + behind[i] - reach
        p.need(free, 0)
        count = (free + (strides[i] - 1 if ceil else 0)) // strides[i] + 1
        if ceil and behind[i] + strides[i] > reach:
            windows, whole = count.constant, size.constant
            if windows is None or whole is None:
                raise p.refused("whether its last window begins before the edge depends on the size (ceil_mode)")
            count = count - int((windows - 1) * strides[i] >= whole + before[i])
        made.append(axis_of([count]))
    return made


def _conv(p: Padder, node: Node, given: Given) -> Given:
    x, w = given[0], given[3 if node.op_type == "QLinearConv" else 1]
    assert x is not None
    assert w is not None
    for s in given[1:]:
        require_unpadded(p, s, None, "a weight")
    require_unpadded(p, x, [1], "the axis of channels")
    kernel = [p.size(a) for a in w.axes[2:]]
    window = _window(p, node, kernel)
    out = [x.axes[0], w.axes[0], *_slid(p, x, kernel, window)]
    space = [i for i in range(2, x.rank) if kernel[i - 2] > 1 or window[0][i - 2] or window[1][i - 2]]
    zero = None if node.op_type == "Conv" else at(given, 2)  # of quantised operands: what stands behind the edge there
    x = p.masked(x, [i for i in space if is_padded(x.axes[i])], 0 if zero is None else p.shaped(p.data(zero), ()))
    return p.copy(node, [x, *given[1:]], [out])


def _conv_transpose(p: Padder, node: Node, given: Given) -> Given:
    x, w = given[0], given[1]
    assert x is not None
    assert w is not None
    for s in given[1:]:
        require_unpadded(p, s, None, "a weight")
    require_unpadded(p, x, [1], "the axis of channels")
    if node.attributes.get("output_shape") is not None or text(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise p.refused("its pads depend on the size")
    kernel = [p.size(a) for a in w.axes[2:]]
    before, behind, strides, dilations = _window(p, node, kernel)
    extra = numbers(node, "output_padding") or [0] * len(kernel)
    groups = number(node, "group", 1)
    out = [x.axes[0], axis_of([product(w.axes[1]) * groups])]
    for i, k in enumerate(kernel):
        size = require_prefix(p, x.axes[i + 2])
        length = (size - 1) * strides[i] + extra[i] + (k - 1) * dilations[i] + 1 - before[i] - behind[i]
        out.append(axis_of([length]))
    x = p.masked(x, range(2, x.rank), 0)
    return p.copy(node, [x, *given[1:]], [out])


def _pool(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    kernel = numbers(node, "kernel_shape") or []
    over = [i for i in range(2, x.rank) if is_padded(x.axes[i])]
    ceil = bool(number(node, "ceil_mode", 0))
    second = node.outputs[1] if len(node.outputs) > 1 else None
    if second is not None and any(is_padded(a) for a in x.axes[1:]):
        raise p.refused("its indices count through padded axes")
    if not over:
        return typed_like(p, node, given, x, 2)
    window = _window(p, node, kernel)
    out = [*x.axes[:2], *_slid(p, x, kernel, window, ceil)]
    fill: Any = 0
    if node.op_type == "MaxPool":
        fill = p.lowest(x.dtype)
    elif node.op_type == "AveragePool" and not number(node, "count_include_pad", 0):
        if ceil or any(window[1][i - 2] for i in over):
            return [_average_at_edges(p, node, x, out)]
        return p.copy(node, [x], [out])  # no window of a valid place reaches padding
    elif ceil:
        raise p.refused("its last window is divided by what depends on the size (ceil_mode)")
    return p.copy(node, [p.masked(x, over, fill)], [out])


def _average_at_edges(p: Padder, node: Node, x: Padded, out: Sequence[Axis]) -> Padded:
    """AveragePool whose windows at the edge are divided by the number of elements within: that of zeros behind what is
    valid, by the share that is; of narrow floats in float32."""
    over = [i for i in range(2, x.rank) if is_padded(x.axes[i])]
    whole, own = widened(p, x), [(), (), *x.axes[2:]]
    ones = p.padded(p.constant(np.ones(p.sizes(own), whole.dtype)), own)
    attributes = {**node.attributes, "count_include_pad": 1}
    sums, shares = (p.emit("AveragePool", [p.data(p.masked(s, over, 0))], **attributes) for s in (whole, ones))
    return narrowed(p, p.padded(p.emit("Div", [sums, shares]), out), x.dtype)


# --- normalisations ---------------------------------------------------------------------------------------------------


def _layer_norm(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    axis = number(node, "axis", -1) % x.rank
    require_unpadded(p, x, range(axis, x.rank), "a normalised axis")
    for s in given[1:]:
        require_unpadded(p, s, None, "a scale")
    reduced = tuple(() if i >= axis else a for i, a in enumerate(x.axes))
    return p.copy(node, given, [x.axes, reduced, reduced])


def _channel_norm(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    if number(node, "training_mode", 0) or sum(v is not None for v in node.outputs) > 1:  # of BatchNormalization
        raise p.refused("a mean over padding")
    require_unpadded(p, x, [1], "the axis of channels")
    for s in given[1:]:
        require_unpadded(p, s, None, "a scale")
    if node.op_type == "InstanceNormalization" and any(is_padded(a) for a in x.axes[2:]):
        return [_instance_norm(p, node, x, given[1:])]
    if node.op_type == "GroupNormalization":
        require_unpadded(p, x, range(2, x.rank), "a normalised axis")
    return p.copy(node, given, [x.axes] + [None] * (len(node.outputs) - 1))


def _instance_norm(p: Padder, node: Node, x: Padded, given: Given) -> Padded:
    """InstanceNormalization by the mean and the variance of what is valid; of narrow floats in float32."""
    space = range(2, x.rank)
    axes = _without(x.axes, space, 1)
    along = [p.size(x.axes[1]), *[1] * (x.rank - 2)]
    scale, bias = (p.shaped(p.data(widened(p, s)), along) for s in given if s is not None)
    whole = widened(p, x)
    apart = p.padded(p.emit("Sub", [p.data(whole), p.data(_mean(p, whole, space, axes, 1))]), x.axes)
    square = p.padded(p.emit("Mul", [p.data(apart)] * 2), x.axes)
    variance = p.data(_mean(p, square, space, axes, 1))
    epsilon = p.constant(np.array(node.attributes.get("epsilon", 1e-5), whole.dtype))
    spread = p.emit("Sqrt", [p.emit("Add", [variance, epsilon])])
    made = p.emit("Add", [p.emit("Mul", [p.emit("Div", [p.data(apart), spread]), scale]), bias])
    return narrowed(p, p.padded(made, x.axes), x.dtype)


def _mean_variance(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    require_unpadded(p, x, [a % x.rank for a in numbers(node, "axes") or [0, 2, 3]], "a normalised axis")
    return p.copy(node, given, [x.axes])


def _lp_norm(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    return p.copy(node, [p.masked(x, [number(node, "axis", -1) % x.rank], 0)], [x.axes])


# --- quantisation -----------------------------------------------------------------------------------------------------


def _quantise(p: Padder, node: Node, given: Given) -> Given:
    x, scale = first_of(p, given), given[1]
    assert scale is not None
    for s in given[1:]:
        require_unpadded(p, s, None, "a scale or zero point")
    if scale.rank > 1 or number(node, "block_size", 0):
        raise p.refused("scales in blocks")
    if scale.rank == 1 and p.size(scale.axes[0]) > 1:
        require_unpadded(p, x, [number(node, "axis", 1) % x.rank], "the axis of scales")
    return p.copy(node, given, [x.axes])


def _dynamic_quantise(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)  # its range always has zero in it
    return p.copy(node, [p.masked(x, x.padded, 0)], [x.axes, (), ()])


# --- recurrence -------------------------------------------------------------------------------------------------------


def _recurrent(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    for s in (*given[1:4], at(given, 7)):
        require_unpadded(p, s, None, "a weight")
    require_unpadded(p, x, [2], "the axis of features")
    if number(node, "layout", 0):
        raise p.refused("the batch stands first (layout=1)")
    steps, batch = x.axes[0], x.axes[1]
    inputs = [*given, *[None] * (5 - len(given))]
    lengths = inputs[4]
    if lengths is None and is_padded(steps):
        require_prefix(p, steps)
        count = p.emit("Cast", [p.scalar(product(steps))], to=6)
        inputs[4] = p.padded(p.emit("Expand", [count, p.vector(p.size(batch))]), [batch])
    elif lengths is not None:
        if is_padded(steps):
            raise p.refused("it has lengths of its own beside padded steps")
        inputs[4] = p.masked(lengths, lengths.padded, 1)
    for s in inputs[5:7]:
        if s is not None and s.axes[1] != batch:
            raise p.refused("its initial state has another batch")
        require_unpadded(p, s, [0, 2], "the axis of features")
    inputs[0] = p.masked(x, [0], 0)  # steps behind the end weigh nothing, but must be finite
    hidden = axis_of([number(node, "hidden_size", 1)])
    ways = axis_of([2 if text(node, "direction", "forward") == "bidirectional" else 1])
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
    "Concat": movement.concat,
    "ConstantOfShape": movement.constant_of_shape,
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv"), _conv),
    "ConvTranspose": _conv_transpose,
    "CumSum": _cumsum,
    "DepthToSpace": movement.depth_to_space,
    "Dropout": _dropout,
    "DynamicQuantizeLinear": _dynamic_quantise,
    "Einsum": _einsum,
    "Expand": movement.expand,
    "EyeLike": movement.eye_like,
    "Flatten": movement.flatten,
    "Gather": movement.gather,
    "GatherElements": movement.gather_elements,
    "GatherND": movement.gather_nd,
    "Gemm": _gemm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "OneHot": movement.one_hot,
    "Pad": movement.pad,
    "QLinearMatMul": _qlinear_matmul,
    "Range": movement.range_,
    "Reshape": movement.reshape,
    "Resize": resizing.resize,
    "Slice": movement.slice_,
    "SpaceToDepth": movement.space_to_depth,
    "Split": movement.split,
    "Squeeze": movement.squeeze,
    "Tile": movement.tile,
    "Transpose": movement.transpose,
    "Trilu": movement.trilu,
    "Unsqueeze": movement.unsqueeze,
}  # fmt: skip
