"""Value-range inference: walks a graph backward and carries the preconditions of its operators to its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType, float_like

INF: Final = math.inf


@dataclass(frozen=True, slots=True)
class ValueConstraint:
    """Constraint on the elements of a value: from `low` to `high`, inclusive.

    nonzero: none is 0. distinct: no element twice along `axis` (None: in the whole array, where rows of the last axis
    count as one if there are `sizes`). truth: a mask, every row of which needs both values. whole: integers, in
    whatever dtype. sizes: for rows of indices, the number of choices of each column.
    """

    low: float = -INF
    high: float = INF
    nonzero: bool = False
    distinct: bool = False
    axis: int | None = None
    truth: bool = False
    whole: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether it constrains nothing."""
        return self == ValueConstraint()

    def __and__(self, other: ValueConstraint) -> ValueConstraint:
        """Both constraints; if their ranges are disjoint, the range of the first."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        if low > high:
            low, high = self.low, self.high
        return ValueConstraint(
            low, high, self.nonzero or other.nonzero, self.distinct or other.distinct,
            self.axis if self.distinct else other.axis, self.truth or other.truth, self.whole or other.whole,
            self.sizes or other.sizes,
        )  # fmt: skip

    def shifted(self, by: float, scale: float = 1.0) -> ValueConstraint:
        """The constraint on x such that scale * x + by meets this one."""
        ends = sorted(((self.low - by) / scale, (self.high - by) / scale))
        return replace(self, low=ends[0], high=ends[1], nonzero=False, distinct=False, sizes=())


FREE: Final = ValueConstraint()

Constraints = Sequence[ValueConstraint]
Rule = Callable[[Node, Constraints], Sequence[ValueConstraint | None]]
"""(node, constraints of its outputs) -> constraints of its inputs; None, or none at the end, for no constraint."""


def infer_constraints(graph: Graph) -> dict[Value, ValueConstraint]:
    """The constraint of every input of the graph, as far as there are rules. Linear in nodes and edges."""
    found: dict[Value, ValueConstraint] = {}
    for node in reversed(graph.nodes):
        outputs = [FREE if v is None else found.get(v, FREE) for v in node.outputs]
        rule = None if node.domain not in ("", "ai.onnx.preview.training") else RULES.get(node.op_type)
        if rule is None:
            continue
        for v, wanted in zip(node.inputs, rule(node, outputs), strict=False):
            if v is not None and v.data is None and wanted is not None and not wanted.is_free:
                known = found.get(v)
                found[v] = wanted if known is None else known & wanted
    return {v: found.get(v, FREE) for v in graph.inputs}


# --- attributes and shapes of a node ----------------------------------------------------------------------------------


def _shape(node: Node, index: int) -> tuple[int, ...]:
    v = node.inputs[index] if index < len(node.inputs) else None
    return tuple(d if isinstance(d, int) else 1 for d in (v.shape or ())) if v is not None else ()


def _size(node: Node, axis: int, index: int = 0) -> int:
    shape = _shape(node, index)
    return shape[axis] if -len(shape) <= axis < len(shape) else 1


def _axis(node: Node, default: int = 0) -> int:
    found = node.attributes.get("axis", default)
    return found if isinstance(found, int) else default


def _known(node: Node, index: int) -> np.ndarray | None:
    v = node.inputs[index] if index < len(node.inputs) else None
    if v is None or v.data is None or not v.data.size or v.data.dtype == object:
        return None
    return v.data.astype(np.float64)


def _is_float(v: Value | None) -> bool:
    return v is not None and v.dtype is not None and float_like(v.dtype)


def _below(count: int) -> ValueConstraint:
    return ValueConstraint(0, max(count - 1, 0), whole=True)


def _value_only(wanted: ValueConstraint) -> ValueConstraint:
    """The constraint without what depends on the position of elements."""
    return replace(wanted, distinct=False, sizes=(), axis=None)


# --- rules -----------------------------------------------------------------------------------------------------------


def _same(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    """Elements are moved, not changed."""
    wanted = outputs[0]
    for other in outputs[1:]:
        wanted = wanted & other
    return [_value_only(wanted)]


def _same_of_all(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    return [_value_only(outputs[0])] * len(node.inputs)


def _keeps_order(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    """Identity and changes of shape that keep the last axis, so that rows of indices stay rows."""
    wanted = outputs[0]
    if wanted.distinct or wanted.sizes:
        before, after = _shape(node, 0), node.outputs[0].shape if node.outputs[0] is not None else ()
        if not before or not after or before[-1] != after[-1]:
            wanted = _value_only(wanted)
    return [wanted]


def _cast(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    wanted = outputs[0]
    source, target = node.inputs[0], node.outputs[0]
    if target is not None and target.dtype is not None and target.dtype.kind == "b":
        return [ValueConstraint(0, 1, truth=True, whole=True)]
    return [replace(wanted, whole=wanted.whole or (_is_float(source) and not _is_float(target) and not wanted.is_free))]


def _where(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    return [ValueConstraint(0, 1, truth=True), _value_only(outputs[0]), _value_only(outputs[0])]


def _add(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    wanted = outputs[0]
    for i in (0, 1):
        known = _known(node, i)
        if known is not None:
            by_low, by_high = float(known.min()), float(known.max())
            made = replace(wanted.shifted(0.0), low=wanted.low - by_low, high=wanted.high - by_high)
            made = made if made.low <= made.high else FREE
            return [made, None] if i == 1 else [None, made]  # type: ignore[list-item]
    half = replace(wanted, low=wanted.low / 2, high=wanted.high / 2, nonzero=False, distinct=False, sizes=())
    return [half, half]


def _sub(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    wanted = outputs[0]
    right, left = _known(node, 1), _known(node, 0)
    if right is not None:
        made = replace(wanted.shifted(0.0), low=wanted.low + float(right.max()), high=wanted.high + float(right.min()))
        return [made if made.low <= made.high else FREE, None]
    if left is not None:
        made = replace(wanted.shifted(0.0), low=float(left.max()) - wanted.high, high=float(left.min()) - wanted.low)
        return [None, made if made.low <= made.high else FREE]
    return []


def _mul(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    wanted = outputs[0]
    if wanted.is_free or node.inputs[0] is node.inputs[1]:  # a square is never negative
        return []
    for i in (0, 1):
        known = _known(node, i)
        if known is not None:
            if (known == 0).any() or (known.min() < 0 < known.max()):
                return []
            low, high = float(known.min()), float(known.max())
            ends = [_quotients(wanted.low, wanted.high, s) for s in {low, high}]
            made = replace(wanted.shifted(0.0), low=max(e[0] for e in ends), high=min(e[1] for e in ends))
            made = replace(made if made.low <= made.high else FREE, nonzero=wanted.nonzero)
            return [made, None] if i == 1 else [None, made]
    if wanted.low >= 0 or wanted.high < INF:
        high = math.sqrt(wanted.high) if 0 <= wanted.high < INF else INF
        low = math.sqrt(max(wanted.low, 0.0)) if wanted.low > -INF else -high
        each = ValueConstraint(low, high, wanted.nonzero, whole=wanted.whole)
        return [each, each]
    return [ValueConstraint(nonzero=wanted.nonzero)] * 2


def _quotients(low: float, high: float, by: float) -> tuple[float, float]:
    a, b = low / by, high / by
    return (a, b) if a <= b else (b, a)


def _div(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    wanted = outputs[0]
    divisor = ValueConstraint(nonzero=True)
    if wanted.low >= 0:  # a positive quotient wants two positive numbers
        divisor = ValueConstraint(low=0.5, nonzero=True)
        known = _known(node, 1)
        if known is not None and (known > 0).all():
            return [ValueConstraint(low=wanted.low * float(known.max()), nonzero=wanted.nonzero)]
        return [ValueConstraint(low=max(wanted.low, 0.0), nonzero=wanted.nonzero), divisor]
    known = _known(node, 1)
    if known is not None and known.min() > 0 and not wanted.is_free:
        factors = (float(known.min()), float(known.max()))
        made = ValueConstraint(
            min(wanted.low * f for f in factors), max(wanted.high * f for f in factors), whole=wanted.whole
        )
        return [made if made.low <= made.high else FREE]
    if node.outputs[0] is not None and not _is_float(node.outputs[0]):
        return [_value_only(wanted) if wanted.high < INF else None, ValueConstraint(low=1, nonzero=True)]
    return [None, divisor]


def _mod(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [None, ValueConstraint(low=1, nonzero=True)]


def _pow(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    wanted, power = outputs[0], _known(node, 1)
    if power is None:
        return [ValueConstraint(0.25, 2.0), ValueConstraint(-2.0, 2.0)]
    if (power != np.rint(power)).any():
        return [ValueConstraint(0.1, max(wanted.high, 0.2) if wanted.high < INF else 10.0)]
    if (power < 0).any():
        return [ValueConstraint(nonzero=True)]
    if (power == 1).all():
        return [wanted]
    odd = (power % 2 == 1).any()
    if wanted.low >= 0 and odd:
        return [ValueConstraint(low=wanted.low)]
    return [ValueConstraint(nonzero=wanted.nonzero)]


def _neg(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    wanted = outputs[0]
    return [replace(wanted, low=-wanted.high, high=-wanted.low)]


def _abs(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    wanted = outputs[0]
    return [ValueConstraint(-wanted.high, wanted.high, nonzero=wanted.nonzero or wanted.low > 0, whole=wanted.whole)]


def _clip(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    found: list[ValueConstraint | None] = [None]
    if len(node.inputs) > 1 and node.inputs[1] is not None and node.inputs[1].data is None:
        found = [None, ValueConstraint(-2.0, -1.0)]
    if len(node.inputs) > 2 and node.inputs[2] is not None and node.inputs[2].data is None:
        found = [None, found[1] if len(found) > 1 else None, ValueConstraint(1.0, 2.0)]
    low = _known(node, 1)
    floor = node.attributes.get("min", float(low.min()) if low is not None else -INF)
    if isinstance(floor, float) and outputs[0].low > floor:
        found[0] = ValueConstraint(low=outputs[0].low)
    return found


def _log(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    wanted = outputs[0]
    low = math.exp(min(wanted.low, 9.0)) if wanted.low > -INF else (1.2 if wanted.nonzero else 0.1)
    return [ValueConstraint(low, max(low, math.exp(wanted.high)) if wanted.high < 9.0 else INF)]


def _sqrt(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    wanted = outputs[0]
    low = wanted.low**2 if wanted.low > 0 else (0.05 if wanted.nonzero else 0.0)
    return [ValueConstraint(low, max(low, wanted.high**2) if 0 < wanted.high < INF else INF)]


def _domain(low: float, high: float) -> Rule:
    return lambda node, outputs: [ValueConstraint(low, high)]


def _softly_bounded(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    """Exponentials: bounded, so that they neither overflow nor underflow in a narrow float."""
    wanted = outputs[0]
    low = math.log(wanted.low) if 0 < wanted.low < INF else -8.0
    return [ValueConstraint(low, math.log(wanted.high) if 0 < wanted.high < 2980 else 8.0)]


def _reciprocal(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    return [ValueConstraint(0.25, INF) if outputs[0].low >= 0 else ValueConstraint(nonzero=True)]


def _sign_of_all(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    """Sums, means and extrema of numbers of one sign have that sign."""
    wanted = outputs[0]
    each = ValueConstraint(
        max(wanted.low, 0.0) if wanted.low >= 0 else -INF, min(wanted.high, 0.0) if wanted.high <= 0 else INF
    )
    return [each] * len(node.inputs)


def _product(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    return _sign_of_all(node, outputs)[:2]


def _log_of_sum(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    return [ValueConstraint(low=0.1)]


def _gather(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    return [_value_only(outputs[0]), _below(_size(node, _axis(node)))]


def _gather_nd(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    batch = node.attributes.get("batch_dims", 0)
    sizes = _shape(node, 0)[batch if isinstance(batch, int) else 0 :][: _size(node, -1, 1)]
    return [_value_only(outputs[0]), ValueConstraint(0, max(min(sizes, default=1) - 1, 0), whole=True, sizes=sizes)]


def _scatter_elements(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    axis = _axis(node)
    index = ValueConstraint(0, max(_size(node, axis) - 1, 0), distinct=True, axis=axis, whole=True)
    return [_value_only(outputs[0]), index, _value_only(outputs[0])]


def _scatter_nd(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    sizes = _shape(node, 0)[: _size(node, -1, 1)]
    index = ValueConstraint(0, max(min(sizes, default=1) - 1, 0), distinct=True, whole=True, sizes=sizes)
    return [_value_only(outputs[0]), index, _value_only(outputs[0])]


def _tensor_scatter(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    axis = node.attributes.get("axis", -2)
    room = _size(node, axis, 0) - _size(node, axis, 1) if isinstance(axis, int) else 0
    return [_value_only(outputs[0]), _value_only(outputs[0]), _below(room + 1)]


def _one_hot(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    depth = _known(node, 1)
    return [_below(int(depth.reshape(-1)[0]) if depth is not None else 1)]


def _recurrent(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    steps = _shape(node, 0)[1 if node.attributes.get("layout", 0) else 0 :][:1]
    return [None] * 4 + [ValueConstraint(1, max(steps[0] if steps else 1, 1), whole=True)]


def _reverse_sequence(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    axis = node.attributes.get("time_axis", 0)
    return [
        _value_only(outputs[0]),
        ValueConstraint(1, max(_size(node, axis if isinstance(axis, int) else 0), 1), whole=True),
    ]


def _loss(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [None, _below(_size(node, 1)), ValueConstraint(low=0.1)]


def _batch_norm(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [None, None, None, None, ValueConstraint(0.25, 4.0)]


def _quantize(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    """Numbers over the whole range of the integers and an eighth beyond it, so that it is reached from both sides."""
    target, scale, zero = node.outputs[0], _known(node, 1), _known(node, 2)
    if target is None or target.dtype is None or target.dtype.kind not in "iu" or scale is None:
        return [None, ValueConstraint(0.01, 0.1)]
    ends, zeros = np.iinfo(target.dtype), (0.0,) if zero is None else (zero.min(), zero.max())
    beyond = (float(ends.max) - float(ends.min)) / 8
    step = float(np.abs(scale).max())
    low, high = (ends.min - max(zeros) - beyond) * step, (ends.max - min(zeros) + beyond) * step
    return [ValueConstraint(float(low), float(high))]


def _dequantize(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [None, ValueConstraint(0.01, 0.1)]


def _qlinear(*scales: int) -> Rule:
    def rule(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
        return [ValueConstraint(0.01, 0.1) if i in scales else None for i in range(max(scales) + 1)]

    return rule


def _mask_input(index: int) -> Rule:
    def rule(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
        v = node.inputs[index] if index < len(node.inputs) else None
        if v is None or _is_float(v):
            return []
        return [None] * index + [ValueConstraint(0, 1, truth=True)]

    return rule


def _roi_align(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [None, None, _below(_size(node, 0))]


def _grid(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [None, ValueConstraint(-1.0, 1.0)]


def _bit_shift(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [None, ValueConstraint(0, 7)]


def _unpool(node: Node, outputs: Constraints) -> Sequence[ValueConstraint]:
    """Indices refer to the array that was pooled, whatever `output_shape` says."""
    shape, kernel = _shape(node, 0), tuple(node.attributes.get("kernel_shape", ()))  # type: ignore[arg-type]
    strides = tuple(node.attributes.get("strides", ())) or (1,) * len(kernel)  # type: ignore[arg-type]
    pads = tuple(node.attributes.get("pads", ())) or (0,) * (2 * len(kernel))  # type: ignore[arg-type]
    size = math.prod(shape[:2])
    for i, (d, k, t) in enumerate(zip(shape[2:], kernel, strides, strict=False)):
        size *= (d - 1) * t + k - pads[i] - pads[i + len(kernel)]
    return [_value_only(outputs[0]), ValueConstraint(0, max(size - 1, 0), distinct=True, whole=True)]


def _optimizer(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    """Learning rate, step count, then variables, gradients and slots; slots of squares are not negative."""
    tensors = len(node.inputs) - 2
    groups = {"Adam": 4, "Adagrad": 3, "Momentum": 3}[node.op_type]
    each = tensors // groups
    squares = {"Adam": range(3 * each, 4 * each), "Adagrad": range(2 * each, 3 * each), "Momentum": range(0)}
    found: list[ValueConstraint | None] = [ValueConstraint(0.001, 0.1), ValueConstraint(0, 100, whole=True)]
    return found + [ValueConstraint(low=0.0) if i in squares[node.op_type] else None for i in range(tensors)]


def _dropout(node: Node, outputs: Constraints) -> Sequence[ValueConstraint | None]:
    return [_value_only(outputs[0]), ValueConstraint(0.0, 0.5)]


def _table(rule: Rule, operators: str) -> Iterable[tuple[str, Rule]]:
    return ((name, rule) for name in operators.split())


RULES: Final[dict[str, Rule]] = dict((
    *_table(_same, "Transpose Slice Split Tile Expand Pad DepthToSpace SpaceToDepth Trilu Compress "
                   "CenterCropPad ReverseSequence Resize Upsample MaxPool GlobalMaxPool ReduceMax ReduceMin"),
    *_table(_keeps_order, "Identity Reshape Squeeze Unsqueeze Flatten"),
    *_table(_same_of_all, "Concat Max Min"), *_table(_cast, "Cast CastLike"), *_table(_where, "Where"),
    *_table(_add, "Add"), *_table(_sub, "Sub"), *_table(_mul, "Mul"), *_table(_div, "Div"), *_table(_mod, "Mod"),
    *_table(_pow, "Pow"), *_table(_neg, "Neg"), *_table(_abs, "Abs"), *_table(_clip, "Clip"),
    *_table(_log, "Log"), *_table(_sqrt, "Sqrt"), *_table(_domain(-0.9, 0.9), "Acos Asin Atanh"),
    *_table(_domain(1.1, 8.0), "Acosh"), *_table(_domain(-1.0, 1.0), "Tan"), *_table(_domain(-4.0, 4.0), "Sinh Cosh"),
    *_table(_domain(0.0, 1.0), "Bernoulli"), *_table(_softly_bounded, "Exp"), *_table(_reciprocal, "Reciprocal"),
    *_table(_sign_of_all, "ReduceSum ReduceMean ReduceProd AveragePool GlobalAveragePool Sum Mean CumSum Relu"),
    *_table(_product, "MatMul Gemm Conv ConvTranspose Einsum"),
    *_table(_log_of_sum, "ReduceLogSum"), *_table(_domain(-8.0, 8.0), "ReduceLogSumExp"),
    *_table(_gather, "Gather GatherElements"), *_table(_gather_nd, "GatherND"),
    *_table(_scatter_elements, "ScatterElements Scatter"), *_table(_scatter_nd, "ScatterND"),
    *_table(_tensor_scatter, "TensorScatter"), *_table(_one_hot, "OneHot"), *_table(_recurrent, "LSTM GRU RNN"),
    *_table(_reverse_sequence, "ReverseSequence"),
    *_table(_loss, "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss"), *_table(_batch_norm, "BatchNormalization"),
    *_table(_quantize, "QuantizeLinear"), *_table(_dequantize, "DequantizeLinear"),
    *_table(_qlinear(1, 4, 6), "QLinearMatMul"), *_table(_qlinear(1, 4, 6), "QLinearConv"),
    *_table(_mask_input(3), "Attention"), *_table(_roi_align, "RoiAlign"), *_table(_grid, "GridSample"),
    *_table(_bit_shift, "BitShift"), *_table(_unpool, "MaxUnpool"), *_table(_dropout, "Dropout"),
    *_table(_optimizer, "Adam Adagrad Momentum"), *_table(_domain(0.1, INF), "LpNormalization"),
))  # fmt: skip
"""Operator -> its rule; the inputs of others are not constrained."""


def is_synthesizable(value: Value) -> bool:
    """Whether a value is a tensor of static shape and numeric dtype."""
    t = value.type
    return isinstance(t, TensorType) and t.is_static and t.dtype != object
