"""Rules: the ways in which one operator may be split over one axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.inference import einsum_axes
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.sharding import B, P, S, Sbp


class Way(NamedTuple):
    """What a node reads and gives on one axis of the mesh: an SBP for each input and each output. units: what lies
    together along each split axis (heads of an attention), which the mesh must divide; 0: single elements."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    units: int = 0


Rule = Callable[[Node], Iterator[Way]]


def ways(node: Node, zeros: Container[Value | None] = ()) -> tuple[list[Way], str]:
    """The ways in which a node may run, the replicated one last, and why there is no other, or "". zeros: values that
    are known to be zero everywhere."""
    replicated = Way((B,) * len(node.inputs), (B,) * len(node.outputs))
    if node.subgraphs or not all(v is None or v.is_static for v in (*node.inputs, *node.outputs)):
        return [replicated], f"{node.operator} has bodies, or shapes that are not known"
    traits = traits_of(node)
    rule = _RULES.get((node.domain, node.op_type))
    if rule is None and (traits.elementwise or (node.domain == "xrt" and node.op_type in ("Assign", "Barrier"))):
        rule = _elementwise
    if rule is None:
        if any(_rank(v) for v in node.outputs) and any(_rank(v) for v in node.inputs):
            return [replicated], f"no rule splits {node.operator}"
        return [replicated], ""
    partial = _scatter_sums(node) if node.op_type == "ScatterND" and node.inputs[0] in zeros else ()
    return [*rule(node), *partial, replicated], ""


def _int(attribute: Any) -> int:
    return int(attribute)


def _rank(v: Value | None) -> int:
    return len(v.shape) if v is not None and v.shape is not None else 0


def _shape(v: Value | None) -> tuple[int, ...]:
    return tuple(v.shape or ()) if v is not None else ()  # type: ignore[arg-type]


def _way(node: Node, inputs: Sequence[Sbp], *outputs: Sbp) -> Way:
    given = tuple(inputs) + (B,) * (len(node.inputs) - len(inputs))
    return Way(given, outputs + (B,) * (len(node.outputs) - len(outputs)))


def _elementwise(node: Node) -> Iterator[Way]:
    """Every axis of the result may be split; inputs that are broadcast along it are whole."""
    out = _shape(node.outputs[0])
    for axis, size in enumerate(out):
        inputs = []
        for v in node.inputs:
            own = axis - (len(out) - _rank(v))
            inputs.append(S(own) if own >= 0 and _shape(v)[own] == size else B)
        if size > 1:
            yield Way(tuple(inputs), (S(axis),) * len(node.outputs))


def _matmul(node: Node) -> Iterator[Way]:
    """Rows, columns, batch axes, or what is summed over, which gives partial sums."""
    a, b = _shape(node.inputs[0]), _shape(node.inputs[1])
    if len(a) < 2 or len(b) < 2:
        return
    rank = max(len(a), len(b))
    for axis in range(rank - 2):
        i, j = axis - (rank - len(a)), axis - (rank - len(b))
        sides = [S(k) if k >= 0 and shape[k] > 1 else B for k, shape in ((i, a), (j, b))]
        yield _way(node, sides, S(axis))
    yield _way(node, (S(len(a) - 2), B), S(rank - 2))
    yield _way(node, (B, S(len(b) - 1)), S(rank - 1))
    yield _way(node, (S(len(a) - 1), S(len(b) - 2)), P())


def _gemm(node: Node) -> Iterator[Way]:
    ta, tb = bool(node.attributes.get("transA", 0)), bool(node.attributes.get("transB", 0))
    m, k = (1, 0) if ta else (0, 1)
    kb, n = (1, 0) if tb else (0, 1)
    c = _shape(node.inputs[2]) if len(node.inputs) > 2 else ()
    rows = [S(0)] if len(c) == 2 and c[0] > 1 else [B]
    columns = [S(len(c) - 1)] if c and c[-1] > 1 else [B]
    bias = len(node.inputs) > 2
    yield _way(node, [S(m), B, *(rows if bias else ())], S(0))
    yield _way(node, [B, S(n), *(columns if bias else ())], S(1))
    if not bias:
        yield _way(node, [S(k), S(kb)], P())


def _reduction(node: Node) -> Iterator[Way]:
    """Axes that stay; of those that are reduced partial results."""
    rank = _rank(node.inputs[0])
    axes = _axes(node, rank)
    if axes is None:
        return
    kept = [i for i in range(rank) if i not in axes]
    keep = _int(node.attributes.get("keepdims", 1))
    for place, axis in enumerate(kept):
        yield _way(node, [S(axis)], S(axis if keep else place))
    reduce = {"ReduceSum": "sum", "ReduceMean": "sum", "ReduceMax": "max", "ReduceMin": "min"}.get(node.op_type)
    if reduce is not None:
        for axis in sorted(axes):
            yield _way(node, [S(axis)], P(reduce))


def _axes(node: Node, rank: int) -> set[int] | None:
    given = node.attributes.get("axes")
    if given is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        data = node.inputs[1].data
        if data is None:
            return None
        given = tuple(int(i) for i in data)
    if not given:
        return set(range(rank)) if not node.attributes.get("noop_with_empty_axes", 0) else set()
    return {int(i) % rank for i in given}  # type: ignore[union-attr]


def _row_wise(default: int) -> Rule:
    """Axes before the one that is normalised."""

    def rule(node: Node) -> Iterator[Way]:
        rank = _rank(node.inputs[0])
        axis = _int(node.attributes.get("axis", default)) % rank
        for i in range(axis):
            yield _way(node, [S(i)], *(S(i),) * len(node.outputs))

    return rule


def _transpose(node: Node) -> Iterator[Way]:
    rank = _rank(node.inputs[0])
    order = tuple(node.attributes.get("perm", tuple(reversed(range(rank)))))  # type: ignore[arg-type]
    for i, axis in enumerate(order):
        yield _way(node, [S(int(axis))], S(i))


def _reshape(node: Node) -> Iterator[Way]:
    """An axis that is kept, or the first of a group that is joined or taken apart."""
    a, b = _shape(node.inputs[0]), _shape(node.outputs[0])
    i = j = 0
    while i < len(a) and j < len(b):
        left, right, x, y = i, j, a[i], b[j]
        while x != y:
            if x < y and i + 1 < len(a):
                i += 1
                x *= a[i]
            elif y < x and j + 1 < len(b):
                j += 1
                y *= b[j]
            else:
                return
        if a[left] > 1 and b[right] > 1:
            yield _way(node, [S(left)], S(right))
        i, j = i + 1, j + 1


def _gather(node: Node) -> Iterator[Way]:
    """Indices are split, or an axis of the data. Of rows that lie elsewhere a device gives zeros: partial sums."""
    data, indices = _rank(node.inputs[0]), _rank(node.inputs[1])
    axis = _int(node.attributes.get("axis", 0)) % max(data, 1)
    for i in range(indices):
        yield _way(node, [B, S(i)], S(axis + i))
    for i in range(data):
        if i != axis:
            yield _way(node, [S(i), B], S(i if i < axis else i - 1 + indices))
    dtype = node.outputs[0].dtype if node.outputs[0] is not None else None
    if dtype is not None and dtype.kind not in "bOSUT":
        yield _way(node, [S(axis), B], P())


def _gather_nd(node: Node) -> Iterator[Way]:
    """Axes of the indices but the last, which is the address of a slice."""
    batch = _int(node.attributes.get("batch_dims", 0))
    for i in range(_rank(node.inputs[1]) - 1):
        yield _way(node, [S(i) if i < batch else B, S(i)], S(i))


def _scatter_nd(node: Node) -> Iterator[Way]:
    """Axes within the slices that are written, or the first of the data: a device writes those that lie on it."""
    data, indices = _rank(node.inputs[0]), _rank(node.inputs[1])
    depth = _shape(node.inputs[1])[-1]
    for i in range(depth, data):
        yield _way(node, [S(i), B, S(indices - 1 + i - depth)], S(i))
    yield _way(node, [S(0), B, B], S(0))


def _scatter_sums(node: Node) -> Iterator[Way]:
    """Updates of zeros that are added up: of those that are split, each device gives a partial sum."""
    if node.attributes.get("reduction", "none") == "add":
        for i in range(_rank(node.inputs[1]) - 1):
            yield _way(node, [B, S(i), S(i)], P())


def _elements(node: Node) -> Iterator[Way]:
    """Axes of the same size in all inputs, other than the one along which elements are looked up."""
    shapes = [_shape(v) for v in node.inputs]
    axis = _int(node.attributes.get("axis", 0)) % max(len(shapes[0]), 1)
    for i in range(len(shapes[0])):
        if i != axis and all(s[i] == shapes[0][i] for s in shapes):
            yield _way(node, [S(i)] * len(shapes), S(i))


def _conv(node: Node) -> Iterator[Way]:
    """The batch, the channels of the result, or those of the input, which gives partial sums."""
    bias = [B] if len(node.inputs) > 2 else []
    yield _way(node, [S(0), B, *bias], S(0))
    if _int(node.attributes.get("group", 1)) == 1:
        yield _way(node, [B, S(0), *([S(0)] if bias else [])], S(1))
        if not bias:
            yield _way(node, [S(1), S(1)], P())


def _batch(node: Node) -> Iterator[Way]:
    """The first axis of the first input."""
    yield _way(node, [S(0)], S(0))


def _batch_norm(node: Node) -> Iterator[Way]:
    """Every axis but that of channels, where the statistics are given."""
    if not node.attributes.get("training_mode", 0) and len(node.outputs) == 1:
        for i in range(_rank(node.inputs[0])):
            if i != 1:
                yield _way(node, [S(i)], S(i))


def _einsum(node: Node) -> Iterator[Way]:
    """What one letter stands for: an axis of the result, or one that is summed over, which gives partial sums."""
    found = einsum_axes(node, [len(_shape(v)) for v in node.inputs])
    if found is None:
        return
    terms, result = found
    for label in dict.fromkeys(x for t in terms for x in t):
        sizes = {_shape(v)[t.index(label)] for v, t in zip(node.inputs, terms, strict=True) if label in t}
        if len(sizes) > 1 or any(t.count(label) > 1 for t in terms):  # it is broadcast, or a diagonal
            continue
        inputs = [S(t.index(label)) if label in t else B for t in terms]
        if label in result:
            yield _way(node, inputs, S(result.index(label)))
        elif all(label in t for t in terms):
            yield _way(node, inputs, P())


def _recurrent(node: Node) -> Iterator[Way]:
    """The batch: of what comes in, the lengths, and the first states."""
    if not node.attributes.get("layout", 0):
        yield _way(
            node, [S(1), B, B, B, S(0), S(1), S(1)][: len(node.inputs)], *[S(2), S(1), S(1)][: len(node.outputs)]
        )


def _untouched(node: Node) -> Iterator[Way]:
    """Axes whose sizes in all inputs of data and in all results are equal, other than the one that is worked along."""
    rank = _rank(node.outputs[0])
    axis = _int(node.attributes.get("axis", 0)) % max(rank, 1)
    data = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    for i in range(rank):
        shapes = [_shape(v) for v in (*data, *node.outputs)]
        if i != axis and all(len(s) == rank and s[i] == shapes[0][i] for s in shapes):
            yield _way(node, [S(i)] * len(data), *(S(i),) * len(node.outputs))


def _along(default: int) -> Rule:
    """Axes other than the one that is worked along; the result may be without that."""

    def rule(node: Node) -> Iterator[Way]:
        rank, gone = _rank(node.inputs[0]), _rank(node.inputs[0]) - _rank(node.outputs[0])
        axis = _int(node.attributes.get("axis", default)) % max(rank, 1)
        for i in range(rank):
            if i != axis:
                yield _way(node, [S(i)], S(i - 1 if gone and i > axis else i))

    return rule


def _softmax(node: Node) -> Iterator[Way]:
    """Axes other than the one that is normalised; before opset 13 all from `axis` on are."""
    return (_along(-1) if node.version >= 13 else _row_wise(1))(node)


def _cumsum(node: Node) -> Iterator[Way]:
    data = node.inputs[1].data if node.inputs[1] is not None else None
    rank = _rank(node.inputs[0])
    for i in range(rank):
        if data is not None and i != int(data.reshape(-1)[0]) % rank:
            yield _way(node, [S(i)], S(i))


def _slice(node: Node) -> Iterator[Way]:
    """Axes of which nothing is left out, and which are not turned round."""
    a, b = _shape(node.inputs[0]), _shape(node.outputs[0])
    turned = _turned(node, len(a))
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x == y and i not in turned:
            yield _way(node, [S(i)], S(i))


def _turned(node: Node, rank: int) -> set[int]:
    """The axes along which a Slice steps backwards, or in steps that are computed."""
    if len(node.inputs) < 5 or node.inputs[4] is None:
        return set()
    steps, axes = node.inputs[4].data, None if node.inputs[3] is None else node.inputs[3].data
    if steps is None or (axes is None and node.inputs[3] is not None):
        return set(range(rank))
    where = range(len(steps)) if axes is None else [int(a) % rank for a in axes]
    return {a for a, s in zip(where, steps, strict=True) if s < 0}


def _pad(node: Node) -> Iterator[Way]:
    """Axes that are left as they are."""
    rank = _rank(node.inputs[0])
    given = node.attributes.get("pads")
    if given is None and len(node.inputs) > 1 and node.inputs[1] is not None and node.inputs[1].data is not None:
        given = tuple(int(n) for n in node.inputs[1].data)
    where = list(range(rank))
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        data = node.inputs[3].data
        given, where = (None, []) if data is None else (given, [int(a) % rank for a in data])
    if given is None:
        return
    pads = [_int(n) for n in given]  # type: ignore[union-attr]
    changed = {a for k, a in enumerate(where) if pads[k] or pads[k + len(where)]}
    for i in range(rank):
        if i not in changed:
            yield _way(node, [S(i)], S(i))


def _expand(node: Node) -> Iterator[Way]:
    """Axes that the input has in their full size."""
    a, b = _shape(node.inputs[0]), _shape(node.outputs[0])
    for i, x in enumerate(a):
        out = i + len(b) - len(a)
        if x == b[out] and x > 1:
            yield _way(node, [S(i)], S(out))


def _attention(node: Node) -> Iterator[Way]:
    """The batch, or the heads, of queries, keys and values. A mask is whole where it is broadcast."""
    rank, count = _rank(node.inputs[0]), len(node.inputs)
    heads = _int(node.attributes.get("kv_num_heads", 0)) if rank == 3 else _shape(node.inputs[1])[1]
    for axis in (0, 1):
        data = S(0) if axis == 0 else S(1 if rank == 4 else 2)
        inputs = [data, data, data, B, S(axis), S(axis), S(0) if axis == 0 else B][:count]
        if count > 3:
            own = axis - (4 - _rank(node.inputs[3]))
            if own >= 0 and _shape(node.inputs[3])[own] > 1:
                inputs[3] = S(own)
        outputs = (data, *(S(axis),) * (len(node.outputs) - 1))
        yield Way(tuple(inputs), outputs, heads if axis else 0)


def _loss(node: Node) -> Iterator[Way]:
    """The batch: a mean or a sum of it is partial, what is not reduced is split."""
    reduced = node.attributes.get("reduction", "mean") != "none"
    if len(node.inputs) == 2 and len(node.outputs) == 1:
        yield _way(node, [S(0), S(0)], P() if reduced else S(0))


def _update(node: Node) -> Iterator[Way]:
    """Every axis of a variable, with its gradient and its slots."""
    shape = _shape(node.outputs[0])
    if all(_shape(v) == shape for v in (*node.inputs[2:], *node.outputs)):
        for axis in range(len(shape)):
            yield _way(node, [B, B, *[S(axis)] * (len(node.inputs) - 2)], *[S(axis)] * len(node.outputs))


def _filter_grad(node: Node) -> Iterator[Way]:
    """The gradient of a filter is a sum over the batch."""
    yield _way(node, [S(0), S(0)], P())


def _all_batch(node: Node) -> Iterator[Way]:
    yield _way(node, [S(0)] * len(node.inputs), S(0))


_REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
_RULES: dict[tuple[str, str], Rule] = {
    **{("", op): _reduction for op in _REDUCTIONS},
    **{("", op): _reshape for op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze")},
    **{("", op): _untouched for op in ("Concat", "Split")},
    **{("", op): _along(0) for op in ("ArgMax", "ArgMin")},
    **{("", op): _softmax for op in ("Softmax", "LogSoftmax", "Hardmax")},
    ("", "LpNormalization"): _along(-1),
    ("", "CumSum"): _cumsum,
    ("", "Slice"): _slice,
    ("", "Pad"): _pad,
    ("", "Expand"): _expand,
    **{("", op): _row_wise(-1) for op in ("LayerNormalization", "RMSNormalization")},
    **{
        ("", op): _batch
        for op in (
            "MaxPool",
            "AveragePool",
            "GlobalAveragePool",
            "GlobalMaxPool",
            "InstanceNormalization",
            "GroupNormalization",
            "LRN",
            "ConvTranspose",
            "DepthToSpace",
            "SpaceToDepth",
        )
    },
    ("", "BatchNormalization"): _batch_norm,
    ("", "Einsum"): _einsum,
    **{("", op): _recurrent for op in ("LSTM", "GRU", "RNN")},
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Transpose"): _transpose,
    ("", "Gather"): _gather,
    ("", "GatherND"): _gather_nd,
    ("", "ScatterND"): _scatter_nd,
    **{("", op): _elements for op in ("GatherElements", "ScatterElements")},
    ("", "Conv"): _conv,
    ("", "Attention"): _attention,
    ("", "SoftmaxCrossEntropyLoss"): _loss,
    **{("ai.onnx.preview.training", op): _update for op in ("Adagrad", "Adam", "Momentum")},
    ("xrt", "ConvFilterGrad"): _filter_grad,
    ("xrt", "MaxPoolGrad"): _all_batch,
    ("xrt", "AveragePoolGrad"): _all_batch,
}
