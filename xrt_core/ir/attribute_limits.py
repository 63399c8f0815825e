"""Limits of ONNX operators: the values that attributes may have, and how they must agree with the inputs.

The schemas of the `onnx` package have the kinds of attributes; their values are stated in the operators' texts alone,
and neither its checker nor its shape inference holds models to all of them. `attribute_fault` reads a node's attributes
only and is asked at import; `node_fault` also reads types and known values of the inputs, and is asked before shape
inference (which some of what is refused here would end or hang) and by the host.

Source: the operator specification, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

from xrt_core.ir.graph import Attribute, Node, Value
from xrt_core.ir.long_list import LongList
from xrt_core.ir.ml_limits import DOMAIN, ml_attribute_fault, ml_node_fault
from xrt_core.ir.types import ONNX_TO_DTYPE, TensorType


class Limit(Struct, frozen=True):
    """The values that an attribute may have. allowed: in words, for messages. allows: whether a value is of them."""

    allowed: str
    allows: Callable[[Any], bool]


def _words(*words: str) -> Limit:
    return Limit(f"one of {', '.join(filter(None, words))}", lambda v: v in words)


def _range(low: int, high: int | None = None) -> Limit:
    if high is None:
        return Limit(f"at least {low}", lambda v: bool(v >= low))
    return Limit(f"{low} to {high}" if high > low + 1 else f"{low} or {high}", lambda v: bool(low <= v <= high))


def _each(limit: Limit) -> Limit:
    return Limit(f"{limit.allowed} in each entry", lambda v: all(map(limit.allows, v)))


def _element_type(*others: int) -> Limit:
    return Limit("the number of an ONNX element type", lambda v: v in ONNX_TO_DTYPE or v in others)


_FLAG: Final = _range(0, 1)
_POSITIVE: Final = _range(1)
_NOT_NEGATIVE: Final = _range(0)
_PERMUTATION: Final = Limit(
    "every axis once, 0 to the number of axes less 1", lambda v: sorted(v) == list(range(len(v)))
)
_ACTIVATIONS: Final = frozenset((
    "relu", "tanh", "sigmoid", "affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu", "softsign",
    "softplus",
))  # fmt: skip

_EVERYWHERE: Final[Mapping[str, Limit]] = MappingProxyType({
    **dict.fromkeys((
        "align_corners", "allowzero", "antialias", "ceil_mode", "center_point_box", "count_include_pad",
        "detect_negative", "detect_positive", "exclude_outside", "exclusive", "fmod", "input_forget", "interleaved",
        "inverse", "is_case_sensitive", "is_causal", "keepdims", "largest", "layout", "linear_before_reset", "new_axis",
        "noop_with_empty_axes", "onesided", "periodic", "reverse", "saturate", "select_last_index", "sorted", "spatial",
        "storage_order", "training_mode", "transA", "transB", "upper",
    ), _FLAG),
    **dict.fromkeys(("directions", "scan_input_directions", "scan_output_directions"), _each(_FLAG)),
    **dict.fromkeys((
        "blocksize", "group", "hidden_size", "kv_num_heads", "max_gram_length", "min_gram_length", "num_groups",
        "num_outputs", "num_scan_inputs", "offset_group", "output_height", "output_width", "q_num_heads", "sample_size",
    ), _POSITIVE),
    **dict.fromkeys(("dilations", "kernel_shape", "pooled_shape", "strides"), _each(_POSITIVE)),
    **dict.fromkeys((
        "batch_dims", "block_size", "max_skip_count", "num_heads", "rotary_embedding_dim", "sampling_ratio",
    ), _NOT_NEGATIVE),
    **dict.fromkeys(("output_padding",), _each(_NOT_NEGATIVE)),
    **dict.fromkeys(("left_window_size", "right_window_size"), _range(-1)),
    **dict.fromkeys(("dtype", "output_datatype", "to"), _element_type()),
    **dict.fromkeys(("output_dtype", "precision", "stash_type"), _element_type(0)),
    "auto_pad": _words("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", ""),
    "activations": Limit(
        f"one of {', '.join(sorted(_ACTIVATIONS))} (in any case) in each entry",
        lambda v: all(str(word).lower() in _ACTIVATIONS for word in v),
    ),
})  # fmt: skip
"""Attributes that have one limit in all operators of the standard."""

_REDUCTION: Final = _words("none", "sum", "mean")
_PADS: Final = _each(_NOT_NEGATIVE)
_WINDOWED: Final = (
    "AveragePool", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "LpPool", "MaxPool", "MaxUnpool",
    "QLinearConv",
)  # fmt: skip

_OF_OPERATOR: Final[Mapping[tuple[str, str], Limit]] = MappingProxyType({
    **{(op, "pads"): _PADS for op in _WINDOWED},
    **{(op, "direction"): _words("forward", "reverse", "bidirectional") for op in ("GRU", "LSTM", "RNN")},
    **{(op, "mode"): _words("DCR", "CRD") for op in ("DepthToSpace", "SpaceToDepth")},
    **{(op, "reduction"): _REDUCTION for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")},
    **{(op, "reduction"): _words("none", "add", "mul", "min", "max") for op in ("ScatterElements", "ScatterND")},
    **{(op, "round_mode"): _words("up", "down", "nearest") for op in ("Cast", "CastLike")},
    ("Attention", "qk_matmul_output_mode"): _range(0, 3),
    ("Attention", "softmax_precision"): Limit("1, 10, 11 or 16", lambda v: v in (1, 10, 11, 16)),
    ("BitShift", "direction"): _words("LEFT", "RIGHT"),
    ("CausalConvWithState", "activation"): _words("silu", "swish", "none", ""),
    ("Gelu", "approximate"): _words("none", "tanh"),
    ("GridSample", "mode"): _words("linear", "nearest", "cubic", "bilinear", "bicubic"),
    ("GridSample", "padding_mode"): _words("zeros", "border", "reflection"),
    ("GlobalLpPool", "p"): _POSITIVE,
    ("ImageDecoder", "pixel_format"): _words("RGB", "BGR", "Grayscale"),
    ("LRN", "size"): _POSITIVE,
    ("LinearAttention", "update_rule"): _words("linear", "gated", "delta", "gated_delta"),
    ("LpNormalization", "p"): _range(1, 2),
    ("LpPool", "p"): _POSITIVE,
    ("Pad", "mode"): _words("constant", "reflect", "edge", "wrap"),
    ("Resize", "coordinate_transformation_mode"): _words(
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
        "tf_half_pixel_for_nn", "tf_crop_and_resize",
    ),
    ("Resize", "keep_aspect_ratio_policy"): _words("stretch", "not_larger", "not_smaller"),
    ("Resize", "mode"): _words("nearest", "linear", "cubic"),
    ("Resize", "nearest_mode"): _words("round_prefer_floor", "round_prefer_ceil", "floor", "ceil", ""),
    ("ReverseSequence", "batch_axis"): _FLAG,
    ("ReverseSequence", "time_axis"): _FLAG,
    ("RoiAlign", "coordinate_transformation_mode"): _words("half_pixel", "output_half_pixel"),
    ("RoiAlign", "mode"): _words("avg", "max"),
    ("Split", "split"): _each(_NOT_NEGATIVE),
    ("StringNormalizer", "case_change_action"): _words("LOWER", "UPPER", "NONE"),
    ("TensorScatter", "mode"): _words("linear", "circular"),
    ("TfIdfVectorizer", "mode"): _words("TF", "IDF", "TFIDF"),
    ("Transpose", "perm"): _PERMUTATION,
    ("Upsample", "mode"): _words("nearest", "linear", "bilinear"),
})  # fmt: skip
"""Attributes whose limit depends on the operator."""


def attribute_fault(domain: str, op_type: str, attributes: Mapping[str, Attribute]) -> str | None:
    """What is wrong with a value among the attributes of a node of the standard: attribute, value, and what is allowed.

    None where all are allowed. Their kinds must be those of the schema.
    """
    if domain == DOMAIN:
        return ml_attribute_fault(op_type, attributes)
    if domain:
        return None
    for name, value in attributes.items():
        limit = _OF_OPERATOR.get((op_type, name)) or _EVERYWHERE.get(name)
        if limit is not None and not _allows(limit, value):
            return f"{name} = {_shown(value)}; {op_type} allows {limit.allowed}"
    return None


def _allows(limit: Limit, value: Any) -> bool:
    try:
        return limit.allows(value)
    except TypeError:  # of another kind
        return False


def node_fault(node: Node) -> str | None:
    """What is wrong with a node: an attribute's value, or one that does not agree with what is known of the inputs.

    None where nothing is known to be wrong. Control flow is not looked at beyond its attributes.
    """
    if node.domain == DOMAIN:
        return ml_node_fault(node)
    if node.domain:
        return None
    fault = attribute_fault("", node.op_type, node.attributes)
    if fault is not None:
        return fault
    for check in _AGREEMENTS.get(node.op_type, ()):
        fault = check(node)
        if fault is not None:
            return fault
    return None


def fault_at(node: Node, shapes: Sequence[tuple[int | None, ...] | None]) -> str | None:
    """What `node_fault` says of a node whose inputs have these shapes, which its own types leave open."""
    inputs = [
        Value(v.name, TensorType(v.dtype, shape)) if v is not None and v.data is None and shape is not None else v
        for v, shape in zip(node.inputs, shapes, strict=True)
    ]
    return node_fault(node.replace(inputs=inputs))


def waits_for_sizes(node: Node) -> bool:
    """Whether sizes that are not known yet may not agree with the node."""
    if node.domain or node.op_type not in _SIZED:
        return False
    return any(v is not None and v.data is None and not v.is_static for v in node.inputs)


_SHOWN: Final = 80
"""Characters of a value in a message."""


def _shown(value: Any) -> str:
    text = repr(list(value[:_SHOWN]) if isinstance(value, tuple | LongList) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


# --- agreement with the inputs ---------------------------------------------------------------------------------------

Agreement = Callable[[Node], str | None]

_NEVER: Final = math.inf


def _value(node: Node, index: int) -> Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _shape(node: Node, index: int) -> Sequence[Any] | None:
    v = _value(node, index)
    return None if v is None else v.shape


def _rank(node: Node, index: int = 0) -> int | None:
    shape = _shape(node, index)
    return None if shape is None else len(shape)


def _known(node: Node, index: int) -> list[Any] | None:
    """The elements of an input whose value is known."""
    v = _value(node, index)
    if v is None or v.data is None or v.data.dtype == object:
        return None
    found: list[Any] = v.data.reshape(-1).tolist()
    return found


def _sizes(node: Node, name: str) -> tuple[int, ...] | None:
    """An attribute of integers, None where it is not given or empty."""
    found = node.attributes.get(name)
    return tuple(found) if isinstance(found, tuple | LongList) and found else None


def _axis(extra: int = 0, above: int = 0) -> Agreement:
    """The attribute `axis` counts in the axes of the first input, and `extra` more; `above`: and may be beyond."""

    def check(node: Node) -> str | None:
        axis, rank = node.attributes.get("axis"), _rank(node)
        if not isinstance(axis, int) or rank is None:
            return None
        count = max(rank + extra, 1)  # libraries take axis 0 of a scalar
        if -count <= axis < count + above:
            return None
        return f"axis = {axis}; an input of rank {rank} allows {-count} to {count + above - 1}"

    return check


def _old_softmax(node: Node) -> str | None:
    return _axis(above=1 if node.version < 13 else 0)(node)


def _axes(index: int = 1, since: float = _NEVER, extra: bool = False) -> Agreement:
    """The axes, an attribute before version `since` and input `index` from there on, are in range, none twice.

    extra: they count in the axes of the result, which has one more for each.
    """

    def check(node: Node) -> str | None:
        axes: Sequence[int] | None = _sizes(node, "axes") if node.version < since else _known(node, index)
        rank = _rank(node)
        if axes is None or rank is None:
            return None
        rank += len(axes) if extra else 0
        if rank == 0 and not extra:  # libraries take axis 0 and -1 of a scalar
            return None
        return _axes_fault(axes, rank)

    return check


def _axes_fault(axes: Sequence[Any], rank: int) -> str | None:
    if not all(isinstance(a, int) for a in axes):
        return f"axes = {_shown(tuple(axes))}; they must be integers"
    if not all(-rank <= a < rank for a in axes):
        return f"axes = {_shown(tuple(axes))}; rank {rank} allows {-rank} to {rank - 1}"
    if len({a % rank for a in axes}) != len(axes):
        return f"axes = {_shown(tuple(axes))}; each axis may be listed once"
    return None


def _transpose(node: Node) -> str | None:
    perm, rank = node.attributes.get("perm"), _rank(node)
    if not isinstance(perm, tuple | LongList) or rank is None or len(perm) == rank:
        return None
    return f"perm = {_shown(perm)}; an input of rank {rank} needs a permutation of its {rank} axes"


def _entries(node: Node, rank: int) -> str | None:
    """Attributes of windows have an entry, or two, for each spatial axis."""
    for name, each in (("kernel_shape", 1), ("strides", 1), ("dilations", 1), ("output_padding", 1), ("pads", 2)):
        values = _sizes(node, name)
        if values is not None and len(values) != each * rank:
            return f"{name} = {_shown(values)} has {len(values)} entries; {rank} spatial axes need {each * rank}"
    return None


def _pool(node: Node) -> str | None:
    rank = _rank(node)
    if rank is None:
        return None
    if rank < 3:
        return f"the input of rank {rank} has no spatial axes; it must be [N, C, ...]"
    return _entries(node, rank - 2)


def _window_fits(node: Node) -> str | None:
    shape, kernel = _shape(node, 0), _sizes(node, "kernel_shape")
    return None if shape is None or kernel is None else _windows(node, shape, kernel)


def _windows(node: Node, shape: Sequence[Any], kernel: Sequence[Any]) -> str | None:
    """Whether there is a window along each spatial axis."""
    if node.attributes.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
        return None
    rank = len(kernel)
    pads = (node.attributes.get("auto_pad") != "VALID" and _sizes(node, "pads")) or (0,) * (2 * rank)
    strides, dilations = (_sizes(node, name) or (1,) * rank for name in ("strides", "dilations"))
    for i, (size, k) in enumerate(zip(shape[2:], kernel, strict=True)):
        if not isinstance(size, int) or not isinstance(k, int):
            continue
        reach = (k - 1) * dilations[i] + 1
        missing = reach - (size + pads[i] + pads[rank + i])
        # by ceil_mode a last window may reach beyond the padding, if it begins before it
        partial = node.attributes.get("ceil_mode") and missing < strides[i] and size + pads[i] > 0
        if missing > 0 and not partial:
            padding = f" and {pads[i] + pads[rank + i]} of padding" if any(pads) else ""
            return f"the kernel covers {reach} elements of axis {i + 2}; the input {_dims(shape)} has {size}{padding}"
    return None


def _convolution(x_index: int, w_index: int, transposed: bool = False) -> Agreement:
    def check(node: Node) -> str | None:
        x, w = _shape(node, x_index), _shape(node, w_index)
        shape = x if x is not None else w
        if shape is None:
            return None
        if len(shape) < 3 or (x is not None and w is not None and len(x) != len(w)):
            return f"input and filter are {_dims(x)} and {_dims(w)}; both must be [N, C, ...] of one rank"
        fault = _entries(node, len(shape) - 2)
        kernel = _sizes(node, "kernel_shape")
        if fault is not None or w is None:
            return fault
        if kernel is not None and any(isinstance(d, int) and d != k for d, k in zip(w[2:], kernel, strict=True)):
            return f"kernel_shape = {_shown(kernel)}; the filter {_dims(w)} needs {_dims(w[2:])}"
        group = node.attributes.get("group", 1)
        assert isinstance(group, int)
        channels = None if x is None else x[1]
        if isinstance(channels, int) and channels % group:
            return f"group = {group}; it must divide the {channels} channels of the input"
        if not transposed and isinstance(w[0], int) and w[0] % group:
            return f"group = {group}; it must divide the {w[0]} output channels of the filter"
        wanted = w[0] if transposed else (w[1] * group if isinstance(w[1], int) else None)
        if isinstance(channels, int) and isinstance(wanted, int) and channels != wanted:
            return f"group = {group}; the filter {_dims(w)} then needs {wanted} channels, the input has {channels}"
        return None if transposed or x is None else _windows(node, x, w[2:])

    return check


def _product(a_index: int = 0, b_index: int = 1) -> Agreement:
    """Of matrices, each of which may be a vector."""

    def check(node: Node) -> str | None:
        a, b = _shape(node, a_index), _shape(node, b_index)
        if a is None or b is None:
            return None
        if not a or not b:
            return f"the inputs are {_dims(a)} and {_dims(b)}; both must have an axis at least"
        return _contraction(a, a[-1], b, b[-2] if len(b) > 1 else b[-1])

    return check


def _gemm(node: Node) -> str | None:
    a, b = _shape(node, 0), _shape(node, 1)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    transposed_a, transposed_b = (bool(node.attributes.get(k)) for k in ("transA", "transB"))
    return _contraction(a, a[not transposed_a], b, b[transposed_b])


def _contraction(a: Sequence[Any], columns: Any, b: Sequence[Any], rows: Any) -> str | None:
    if not isinstance(columns, int) or not isinstance(rows, int) or columns == rows:
        return None
    return f"the inputs are {_dims(a)} and {_dims(b)}; the first has {columns} columns, and the second {rows} rows"


def _dims(shape: Sequence[Any] | None) -> str:
    return "?" if shape is None else f"[{', '.join('?' if d is None else str(d) for d in shape)}]"


_GATES: Final = {"RNN": (1, 1), "GRU": (3, 2), "LSTM": (4, 3)}
"""Recurrent operators: gates, and activation functions, of a direction."""


def _recurrent(node: Node) -> str | None:
    gates, functions = _GATES[node.op_type]
    directions = 2 if node.attributes.get("direction", "forward") == "bidirectional" else 1
    hidden, x = node.attributes.get("hidden_size"), _shape(node, 0)
    named = node.attributes.get("activations")
    if isinstance(named, tuple | LongList) and named and len(named) not in (functions * directions, functions * 2):
        return f"activations = {_shown(named)}; {directions} direction(s) need {functions * directions}"
    if x is not None and len(x) != 3:
        return f"the input X is {_dims(x)}; it must be of rank 3"
    r = _shape(node, 2)
    if hidden is None and r is not None and len(r) == 3:
        hidden = r[2]
    width = None if x is None else x[2]
    rows = gates * hidden if isinstance(hidden, int) else None
    wanted: list[tuple[str, int, tuple[Any, ...]]] = [
        ("W", 1, (directions, rows, width)),
        ("R", 2, (directions, rows, hidden)),
        ("B", 3, (directions, 2 * rows if rows is not None else None)),
    ]
    if node.op_type == "LSTM":
        wanted.append(("P", 7, (directions, 3 * hidden if isinstance(hidden, int) else None)))
    for name, index, dims in wanted:
        shape = _shape(node, index)
        if shape is not None and not _fits(shape, dims):
            given = f"hidden_size = {hidden!r}, {directions} direction(s) and X {_dims(x)}"
            return f"{given} need {name} of {_dims(dims)}; it is {_dims(shape)}"
    batch_first = bool(node.attributes.get("layout", 0))
    batch = None if x is None else x[0 if batch_first else 1]
    state = (batch, directions, hidden) if batch_first else (directions, batch, hidden)
    initial = (("sequence_lens", 4, (batch,)), ("initial_h", 5, state), ("initial_c", 6, state))
    for name, index, dims in initial[: 3 if node.op_type == "LSTM" else 2]:
        shape = _shape(node, index)
        if shape is not None and not _fits(shape, dims):
            return f"{name} is {_dims(shape)}; hidden_size = {hidden!r} and X {_dims(x)} need {_dims(dims)}"
    return None


def _fits(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in zip(shape, wanted, strict=True))


def _split(node: Node) -> str | None:
    count = len(node.outputs)
    declared = node.attributes.get("num_outputs")
    if isinstance(declared, int) and declared != count:
        return f"num_outputs = {declared}; the node has {count} outputs"
    sizes = _sizes(node, "split") if node.version < 13 else _known(node, 1)
    if sizes is None:
        return None
    if len(sizes) != count or any(s < 0 for s in sizes):
        return f"split = {_shown(tuple(sizes))}; it needs {count} sizes, one for each output, none negative"
    axis, shape = node.attributes.get("axis", 0), _shape(node, 0)
    if not isinstance(axis, int) or not shape or not -len(shape) <= axis < len(shape):
        return None
    total = shape[axis]
    if isinstance(total, int) and sum(sizes) != total:
        return f"split = {_shown(tuple(sizes))}; the sizes must add up to {total}, the size of axis {axis}"
    return None


def _step(node: Node) -> str | None:
    return "delta = 0; Range needs a step that is not 0" if _known(node, 2) == [0] else None


def _slice(node: Node) -> str | None:
    given: list[Any]
    if node.version < 10:
        given = [*(node.attributes.get(n) for n in ("starts", "ends", "axes")), None]
    else:
        given = [_known(node, i) for i in range(1, 5)]
    axes, steps = given[2:]
    if steps is not None and 0 in steps:
        return f"steps = {_shown(tuple(steps))}; none may be 0"
    if len({len(v) for v in given if v is not None}) > 1:
        return "starts, ends, axes and steps differ in length; each needs one entry an axis"
    rank = _rank(node)
    return None if axes is None or not rank else _axes_fault(axes, rank)


def _not_negative(index: int, name: str, least: int = 0) -> Agreement:
    """The known values of an input are not below `least`."""

    def check(node: Node) -> str | None:
        values = _known(node, index)
        if values is not None and any(isinstance(v, complex) for v in values):
            return f"{name} = {_shown(tuple(values))}; they must be real"
        if values is None or all(v >= least for v in values):
            return None
        return f"{name} = {_shown(tuple(values))}; {node.op_type} allows {least} and more"

    return check


def _einsum(node: Node) -> str | None:
    """The grammar of `equation`: terms of letters with at most one ellipsis, as many as inputs, and their ranks."""
    given = node.attributes.get("equation", "")
    equation = (given.decode(errors="replace") if isinstance(given, bytes) else str(given)).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    for term in (*terms, right):
        letters = term.replace("...", "", 1)
        if letters and not (letters.isascii() and letters.isalpha()):
            return f"equation = {_shown(given)}; a term has letters and at most one ellipsis, not {term!r}"
    if len(terms) != len(node.inputs):
        return f"equation = {_shown(given)}; it has {len(terms)} terms for {len(node.inputs)} inputs"
    result = right.replace("...", "", 1)
    if arrow and (len(set(result)) != len(result) or not set(result) <= set(left)):
        return f"equation = {_shown(given)}; the result has each letter once, and only letters of the terms"
    if arrow and "..." in right and "..." not in left:
        return f"equation = {_shown(given)}; the result has an ellipsis that no term has"
    sizes: dict[str, int] = {}
    for i, term in enumerate(terms):
        shape, letters = _shape(node, i), term.replace("...", "", 1)
        if shape is None:
            continue
        if len(letters) > len(shape) or ("..." not in term and len(letters) != len(shape)):
            return f"equation = {_shown(given)}; the term {term!r} does not fit input {i} of rank {len(shape)}"
        before, _, after = term.partition("...")
        named = [*zip(before, shape, strict=False), *zip(after[::-1], shape[::-1], strict=False)]
        for letter, size in named:
            if isinstance(size, int) and size != 1 and sizes.setdefault(letter, size) != size:
                return f"equation = {_shown(given)}; {letter!r} is of size {sizes[letter]} and of size {size}"
    return None


def _groups(node: Node) -> str | None:
    groups, shape = node.attributes.get("num_groups"), _shape(node, 0)
    if not isinstance(groups, int) or shape is None:
        return None
    if len(shape) < 2:
        return f"the input is {_dims(shape)}; it must be [N, C, ...]"
    if isinstance(shape[1], int) and shape[1] % groups:
        return f"num_groups = {groups}; it must divide the {shape[1]} channels of the input"
    return None


def _blocks(node: Node) -> str | None:
    size, shape = node.attributes.get("blocksize"), _shape(node, 0)
    if not isinstance(size, int) or shape is None:
        return None
    if len(shape) != 4:
        return f"the input is {_dims(shape)}; it must be [N, C, H, W]"
    divided = ((1, size * size),) if node.op_type == "DepthToSpace" else ((2, size), (3, size))
    for axis, by in divided:
        if isinstance(shape[axis], int) and shape[axis] % by:
            return f"blocksize = {size}; {by} must divide axis {axis} of the input {_dims(shape)}"
    return None


def _pad(node: Node) -> str | None:
    rank = _rank(node)
    pads = _sizes(node, "pads") if node.version < 11 else _known(node, 1)
    if rank is None or pads is None:
        return None
    if _value(node, 3) is not None:
        listed = _shape(node, 3)
        count = listed[0] if listed and isinstance(listed[0], int) else None
    else:
        count = rank
    if count is not None and len(pads) != 2 * count:
        return f"pads = {_shown(tuple(pads))} has {len(pads)} entries; {count} axes need {2 * count}"
    return None


def _top_k(node: Node) -> str | None:
    k, shape, axis = _known(node, 1), _shape(node, 0), node.attributes.get("axis", -1)
    if not k or not shape or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return None
    size = shape[axis]
    if k[0] < 0 or (isinstance(size, int) and k[0] > size):
        return f"K = {k[0]}; axis {axis} of {_dims(shape)} allows 0 to {size}"
    return None


def _mean_variance(node: Node) -> str | None:
    axes: Any = node.attributes.get("axes", (0, 2, 3))
    rank = _rank(node)
    return None if rank is None else _axes_fault(axes, rank)


def _loss_weight(node: Node) -> str | None:
    scores, weight = _shape(node, 0), _shape(node, 2)
    if scores is None or weight is None or len(scores) < 2 or _fits(weight, scores[1:2]):
        return None
    return f"weight is {_dims(weight)}; scores {_dims(scores)} need one for each class, the second axis"


def _gather_nd(node: Node) -> str | None:
    batch, x, indices = node.attributes.get("batch_dims", 0), _shape(node, 0), _shape(node, 1)
    if not isinstance(batch, int) or x is None or indices is None:
        return None
    if not x or not indices:
        return f"data and indices are {_dims(x)} and {_dims(indices)}; neither may be a scalar"
    depth = indices[-1]
    if batch >= min(len(x), len(indices)) or (isinstance(depth, int) and not 1 <= depth <= len(x) - batch):
        return f"batch_dims = {batch}; it does not fit data {_dims(x)} with indices {_dims(indices)}"
    if not _fits(x[:batch], indices[:batch]):
        return f"batch_dims = {batch}; the first axes of data {_dims(x)} and indices {_dims(indices)} differ"
    return None


def _heads(node: Node) -> str | None:
    """Of three axes, the last is divided among the heads."""
    for index, name in ((0, "q_num_heads"), (1, "kv_num_heads"), (2, "kv_num_heads")):
        shape, heads = _shape(node, index), node.attributes.get(name)
        if shape is None or len(shape) != 3:
            continue
        if not isinstance(heads, int):
            return f"{name} is missing; inputs of three axes need it"
        if isinstance(shape[2], int) and shape[2] % heads:
            return f"{name} = {heads}; it must divide the {shape[2]} features of input {index}"
    q, kv = node.attributes.get("q_num_heads"), node.attributes.get("kv_num_heads")
    if isinstance(q, int) and isinstance(kv, int) and q % kv:
        return f"kv_num_heads = {kv}; it must divide q_num_heads = {q}"
    return None


def _vocabulary(node: Node) -> str | None:
    """Of TfIdfVectorizer: counts, indexes, weights and pool agree."""
    counts: Any = node.attributes.get("ngram_counts", ())
    pool: Any = node.attributes.get("pool_int64s") or node.attributes.get("pool_strings") or ()
    indexes: Any = node.attributes.get("ngram_indexes", ())
    if any(c < 0 for c in counts) or list(counts) != sorted(counts) or (counts and counts[-1] > len(pool)):
        return f"ngram_counts = {_shown(tuple(counts))}; the starts of 1-grams, 2-grams, ... in a pool of {len(pool)}"
    entries = 0
    for i, start in enumerate(counts):
        length = (counts[i + 1] if i + 1 < len(counts) else len(pool)) - start
        if length % (i + 1):
            return f"ngram_counts = {_shown(tuple(counts))}; {length} elements make no whole number of {i + 1}-grams"
        entries += length // (i + 1)
    if len(indexes) != entries or any(i < 0 for i in indexes):
        return f"ngram_indexes = {_shown(tuple(indexes))}; the pool has {entries} n-grams, each needs an index"
    weights: Any = node.attributes.get("weights") or ()
    if weights and len(weights) != entries:
        return f"weights = {_shown(tuple(weights))}; the pool has {entries} n-grams, each needs a weight"
    low, high = node.attributes.get("min_gram_length", 1), node.attributes.get("max_gram_length", 1)
    assert isinstance(low, int)
    assert isinstance(high, int)
    return f"min_gram_length = {low}; it must not be above max_gram_length = {high}" if low > high else None


def _scan_counts(node: Node) -> str | None:
    count = node.attributes.get("num_scan_inputs", 1)
    assert isinstance(count, int)
    inputs = len(node.inputs) - (1 if node.version < 9 else 0)
    if count > inputs:
        return f"num_scan_inputs = {count}; the node has {inputs} inputs"
    bodies = node.subgraphs
    if bodies and len(bodies[0].inputs) != inputs:
        return f"num_scan_inputs = {count}; the node has {inputs} inputs, its body takes {len(bodies[0].inputs)}"
    for name in ("scan_input_axes", "scan_input_directions"):
        values = _sizes(node, name)
        if values is not None and len(values) != count:
            return f"{name} = {_shown(values)}; num_scan_inputs = {count} needs as many entries"
    scans = len(node.outputs) - (inputs - count)
    for name in ("scan_output_axes", "scan_output_directions"):
        values = _sizes(node, name)
        if values is not None and len(values) != scans:
            return f"{name} = {_shown(values)}; the node has {scans} scan outputs, each needs an entry"
    return _outputs_of_bodies(node)


def _outputs_of_bodies(node: Node) -> str | None:
    """Each body gives what the node's outputs take."""
    extra = 1 if node.op_type == "Loop" else 0
    for name, body in ((k, a) for k, a in node.attributes.items() if any(a is g for g in node.subgraphs)):
        given = len(body.outputs) - extra  # type: ignore[union-attr]
        if given < len(node.outputs) or (node.op_type == "If" and given != len(node.outputs)):
            return f"{name} gives {max(given, 0)} results; the node has {len(node.outputs)} outputs"
    return None


def _loop(node: Node) -> str | None:
    bodies = node.subgraphs
    states = max(len(node.inputs) - 2, 0)
    if bodies and len(bodies[0].inputs) != states + 2:
        return f"body takes {len(bodies[0].inputs)} inputs; {states} loop-carried values need {states + 2}"
    return _outputs_of_bodies(node)


_REDUCTIONS: Final = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip

_AGREEMENTS: Final[Mapping[str, tuple[Agreement, ...]]] = MappingProxyType({
    **dict.fromkeys((
        "ArgMax", "ArgMin", "Compress", "Concat", "Gather", "GatherElements", "LayerNormalization", "LpNormalization",
        "RMSNormalization", "Scatter", "ScatterElements", "SplitToSequence", "TensorScatter", "Unique",
    ), (_axis(),)),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), (_old_softmax,)),
    **dict.fromkeys(_REDUCTIONS, (_axes(1, 18),)),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), (_pool, _window_fits)),
    **dict.fromkeys(("Conv", "ConvInteger", "DeformConv"), (_convolution(0, 1),)),
    **dict.fromkeys(("MatMul", "MatMulInteger"), (_product(),)),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), (_loss_weight,)),
    **dict.fromkeys(_GATES, (_recurrent,)),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), (_blocks,)),
    "Attention": (_heads,),
    "CenterCropPad": (_axes(),),
    "ConstantOfShape": (_not_negative(0, "input"),),
    "ConvTranspose": (_convolution(0, 1, transposed=True),),
    "Einsum": (_einsum,),
    "Expand": (_not_negative(1, "shape"),),
    "Flatten": (_axis(above=1),),
    "GatherND": (_gather_nd,),
    "Gemm": (_gemm,),
    "GroupNormalization": (_groups,),
    "If": (_outputs_of_bodies,),
    "Loop": (_loop,),
    "MaxUnpool": (_pool,),
    "MeanVarianceNormalization": (_mean_variance,),
    "OneHot": (_axis(extra=1), _not_negative(1, "depth")),
    "Pad": (_pad,),
    "QLinearConv": (_convolution(0, 3),),
    "QLinearMatMul": (_product(0, 3),),
    "Range": (_step,),
    "ReduceSum": (_axes(1, 13),),
    "Scan": (_scan_counts,),
    "Slice": (_slice,),
    "Split": (_axis(), _split),
    "Squeeze": (_axes(1, 13),),
    "TfIdfVectorizer": (_vocabulary,),
    "Tile": (_not_negative(1, "repeats"),),
    "TopK": (_axis(), _top_k),
    "Transpose": (_transpose,),
    "Unsqueeze": (_axes(1, 13, extra=True),),
})  # fmt: skip
"""Operator -> what must agree in its nodes, in this order."""

_SIZED: Final = frozenset((
    *_GATES, "Attention", "AveragePool", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "DepthToSpace", "Einsum",
    "GatherND", "Gemm", "GroupNormalization", "LpPool", "MatMul", "MatMulInteger", "MaxPool", "MaxUnpool",
    "NegativeLogLikelihoodLoss", "QLinearConv", "QLinearMatMul", "SoftmaxCrossEntropyLoss", "SpaceToDepth", "Split",
))  # fmt: skip
"""Operators of which sizes must agree, and not only ranks and values."""
