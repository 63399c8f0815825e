"""Traits of operators: what holds of every node of an operator, in one table keyed by domain and operator.

Passes, runtime, verification, training and engines read their decisions from here, so that they agree on what an
operator is. The rows follow the ONNX operator specification and the `xrt` dialect; tests/ir/test_op_traits.py holds
them against the schemas and, numerically, against the host. An operator without a row has no trait.

What depends on a node's attributes or inputs is a function over nodes: `draws_random`, `is_deterministic`, `is_exact`,
`is_discontinuous`. What is not here: what one engine supports, and the policy of one pass, such as the lists of mixed
precision or the figures of the cost model, which stand beside the code that they steer.

A plugin adds rows for its own domain with `register_traits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from xrt_core.errors import GraphError, RegistrationError

if TYPE_CHECKING:
    from xrt_core.ir.graph import Node, Value
    from xrt_core.ir.types import Dim


class Traits(Struct, frozen=True, kw_only=True):
    """What holds of an operator; every trait is False unless a row says otherwise.

    Where results come from:

    moves_elements: each element of the results is an element of an input, or zero: nothing is computed.
    view: the results lie in the memory of the first input; array libraries return them without a copy.
    strided: of views, those whose elements may lie apart, in another order or more than once in that memory.
    fills: the elements follow from attributes, shapes and counts; there is no data to compute on.
    shape_query: the result follows from the type of the input alone, and its elements are not read.
    random: the results are drawn from a random generator (Dropout: in training mode; see `draws_random`).
    stateful: an update of variables: its results replace inputs, so it is never merged, folded or recomputed.
    control_flow: its attributes hold graphs that the runtime executes.
    boundary: marks where a value enters or leaves an engine; the numbers are those of the input.

    What is computed:

    elementwise: each element follows from the elements at the same place of the inputs, broadcast as in NumPy.
    reduction: axes of the first input are reduced, to one element or its index.
    contraction: elements of inputs are multiplied and summed over axes, as matrix products and convolutions do.
    sums: results are sums or means over axes, or functions of one: rounding errors grow with the number of terms.
    comparison: inputs are compared by their order or equality.
    boolean_result: every result is of dtype bool.
    commutative: exchanging the two inputs of a node with two gives the same result.
    zero_preserving: zeros give zeros, where any come in (inputs that are shapes, axes or indices aside).
    cast: the element type is changed, or its bits are read as another.
    quantizes: numbers are mapped to or from integers of a scale.
    shape_arithmetic: used to compute shapes from shapes; followed when they are traced or specialised.

    How results behave:

    exact: no floating-point result is rounded (see `is_exact`).
    discontinuous: a small change of a finite input may change a result by much (see `is_discontinuous`).
    classifies: the first result is the label of the greatest of scores that are computed, so it jumps for exact inputs.
    piecewise_constant: the derivative is zero wherever it exists.
    weighs: elements are weighted by, or taken at, numbers that are computed: the standard leaves open whether NaN or
        infinity of weight zero, or beside what is taken, shows in the result. The first state of a recurrent cell,
        which is zero, is such a weight: libraries leave its product out. So are the factors of a Det, by pivots.
    grows: small inputs may ask for a result of any size, which type inference may not know beforehand.
    """

    moves_elements: bool = False
    view: bool = False
    strided: bool = False
    fills: bool = False
    shape_query: bool = False
    random: bool = False
    stateful: bool = False
    control_flow: bool = False
    boundary: bool = False
    elementwise: bool = False
    reduction: bool = False
    contraction: bool = False
    sums: bool = False
    comparison: bool = False
    boolean_result: bool = False
    commutative: bool = False
    zero_preserving: bool = False
    cast: bool = False
    quantizes: bool = False
    shape_arithmetic: bool = False
    exact: bool = False
    discontinuous: bool = False
    classifies: bool = False
    piecewise_constant: bool = False
    weighs: bool = False
    grows: bool = False


NO_TRAITS: Final = Traits()
_NAMES: Final = Traits.__struct_fields__

Key = tuple[str, str]
"""Domain ('' for ONNX's own) and operator."""


def traits_of(node: Node) -> Traits:
    """The traits of a node's operator; `NO_TRAITS` for an operator without a row."""
    return _ROWS.get((node.domain, node.op_type), NO_TRAITS)


def find_traits(op_type: str, domain: str = "") -> Traits:
    """The traits of an operator; `NO_TRAITS` for one without a row."""
    return _ROWS.get((domain, op_type), NO_TRAITS)


def operators_with(trait: str, domain: str = "") -> frozenset[str]:
    """The operators of a domain that have a trait. Raises GraphError for a name that is no trait."""
    if trait not in _NAMES:
        raise GraphError(f"operators have no trait {trait!r}; known: {', '.join(_NAMES)}")
    return frozenset(op for (d, op), t in _ROWS.items() if d == domain and getattr(t, trait))


def known_traits() -> Mapping[Key, Traits]:
    """Every row by domain and operator; read-only."""
    return MappingProxyType(_ROWS)


def register_traits(domain: str, rows: Mapping[str, Traits], *, by: str) -> None:
    """Add rows for the operators of a domain. by: the package that adds them, for messages.

    Raises RegistrationError, and adds none of them, where an operator has a row already.
    """
    for op_type in rows:
        if (domain, op_type) in _ROWS:
            raise RegistrationError(
                f"traits of {domain or 'ai.onnx'}.{op_type} are registered twice: by "
                f"{_OWNERS.get((domain, op_type), __name__)} and by {by}"
            )
    for op_type, traits in rows.items():
        _ROWS[domain, op_type] = traits
        _OWNERS[domain, op_type] = by


def unregister_traits(domain: str, op_types: Iterable[str]) -> None:
    """Remove rows that `register_traits` added. Raises RegistrationError, and removes none, where one is not there."""
    keys = [(domain, op_type) for op_type in op_types]
    for key in keys:
        if key not in _OWNERS:
            raise RegistrationError(f"no plugin registered traits of {domain or 'ai.onnx'}.{key[1]}")
    for key in keys:
        del _ROWS[key], _OWNERS[key]


def index_input(node: Node) -> int | None:
    """The position of the input whose elements are positions in another array, or lengths of one; None for none.

    Inputs that must be known when a node is compiled (axes, sizes, depths) are not meant.
    """
    return _INDEX_INPUTS.get((node.domain, node.op_type))


def may_read_indices(node: Node) -> bool:
    """Whether a node has such an input, or bodies in which others may have one."""
    return index_input(node) is not None or bool(node.attributes and node.subgraphs)


def indexed_axes(node: Node) -> tuple[int, ...] | None:
    """The axes of the first input that a node's index is for: one, or one for each column of the index. None for
    operators whose index is no position along axes, and where sizes are unknown."""
    if node.domain or node.op_type not in _ALONG_AXIS | _BY_COLUMNS or len(node.inputs) < 2:
        return None
    x, index = node.inputs[:2]
    if x is None or index is None or not x.shape or index.shape is None:
        return None
    rank, axis, batch = len(x.shape), node.attributes.get("axis", 0), node.attributes.get("batch_dims", 0)
    if node.op_type in _ALONG_AXIS:
        return (axis % rank,) if isinstance(axis, int) and -rank <= axis < rank else None
    width = index.shape[-1] if index.shape else None
    if not isinstance(batch, int) or not isinstance(width, int) or not 0 < width <= rank - batch:
        return None
    return tuple(range(batch, batch + width))


def measured_axis(node: Node) -> int | None:
    """The axis of the first input whose length the index of GRU, LSTM, RNN and ReverseSequence is at most: sequences of
    so many steps. None for other operators, and where the rank is unknown."""
    x = node.inputs[0] if node.inputs else None
    if node.domain or x is None or not x.shape or node.op_type not in _MEASURING:
        return None
    axis = node.attributes.get("time_axis" if node.op_type == "ReverseSequence" else "layout", 0)
    return axis if isinstance(axis, int) and 0 <= axis < len(x.shape) else None


def limits_of(node: Node) -> tuple[Value, tuple[Dim, ...]] | None:
    """A node's index, and the dimensions in which its elements, or those of its columns, are positions; for lengths
    `AT_MOST` and the dimension that they do not exceed. None where no dimension limits it, and for other nodes."""
    at, x = index_input(node), node.inputs[0] if node.inputs else None
    index = node.inputs[at] if at is not None and at < len(node.inputs) else None
    if x is None or index is None or not x.shape:
        return None
    axes, time = indexed_axes(node), measured_axis(node)
    if axes is not None:
        return index, tuple(x.shape[a] for a in axes)
    return None if time is None else (index, (AT_MOST, x.shape[time]))


def has_checked_input(node: Node) -> bool:
    """Whether the node has an input whose values are looked at before it runs: an index, or a scale."""
    key = (node.domain, node.op_type)
    return key in _INDEX_INPUTS or key in _SCALE_INPUTS


def scale_inputs(node: Node) -> tuple[int, ...]:
    """The positions of the inputs that a quantisation divides by: it means something for positive numbers alone."""
    return _SCALE_INPUTS.get((node.domain, node.op_type), ())


# --- what depends on the node ----------------------------------------------------------------------------------------


def draws_random(node: Node) -> bool:
    """Whether results are drawn from a random generator, by the node or in its subgraphs; with a seed or without.

    A Dropout draws in training mode alone; one whose mode is not known counts.
    """
    if traits_of(node).random:
        return node.op_type != "Dropout" or _may_drop(node)
    return any(draws_random(n) for g in node.subgraphs for n in g.nodes)


def is_deterministic(node: Node) -> bool:
    """Whether the node gives the same results for the same inputs at every call: what draws has a seed."""
    if traits_of(node).random:
        return "seed" in node.attributes or not draws_random(node)
    return all(is_deterministic(n) for g in node.subgraphs for n in g.nodes)


def is_exact(node: Node) -> bool:
    """Whether no floating-point result is rounded: as the trait, but for a scatter that adds or multiplies."""
    return traits_of(node).exact and node.attributes.get("reduction", "none") not in ("add", "mul")


def is_discontinuous(node: Node) -> bool:
    """Whether a small change of an input may change a result by much.

    As the trait, and for a Cast to anything but floats and a MaxPool whose indices are wanted.
    """
    traits = traits_of(node)
    if traits.cast and not traits.discontinuous:
        return not _is_float(node.outputs[0])
    if node.op_type == "MaxPool" and not node.domain:
        return len(node.outputs) > 1 and node.outputs[1] is not None
    return traits.discontinuous


def _is_float(value: Value | None) -> bool:
    dtype = None if value is None else value.dtype  # narrow floats have the kind of raw bytes
    return dtype is not None and (dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float")))


def _may_drop(node: Node) -> bool:
    """Whether a Dropout may be in training mode. Before version 12 it never is (opset 7 took the mode away)."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and (mode.data is None or bool(mode.data.any()))


# --- the table -------------------------------------------------------------------------------------------------------
# Source: the ONNX operator specification, https://onnx.ai/onnx/operators/. A set is named for what its operators share.

_RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_STRIDED = frozenset({"Expand", "Slice", "Split", "Transpose"})
_MOVED_IN_PLACE = _RESHAPES | _STRIDED | {"Identity"}
_MOVES = _MOVED_IN_PLACE | {
    "CenterCropPad", "Compress", "Concat", "DepthToSpace", "Gather", "GatherElements", "GatherND", "MaxUnpool", "Pad",
    "ReverseSequence", "Scatter", "ScatterElements", "ScatterND", "SpaceToDepth", "TensorScatter", "Tile", "Trilu",
    "Where",
}  # fmt: skip
_SHAPE_QUERIES = frozenset({"Shape", "Size"})
_FILLS = frozenset({"Constant", "ConstantOfShape", "EyeLike", "OneHot", "Range"})
_WINDOWS = frozenset({"BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"})

_RANDOM = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
})  # fmt: skip

_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_LOGIC = frozenset({"And", "Not", "Or", "Xor"})
_CLASSES = frozenset({"IsInf", "IsNaN"})
_BITWISE = frozenset({"BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"})
_STEPS = frozenset({"Ceil", "Floor", "Round", "Sign"})
_CASTS = frozenset({"BitCast", "Cast", "CastLike"})
_QUANTIZES = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})
_INTEGER_PRODUCTS = frozenset({"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"})
_CURVES = frozenset({
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Clip", "Cos", "Cosh", "Elu", "Erf", "Exp",
    "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "PRelu", "Reciprocal", "Relu", "Selu",
    "Shrink", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
})  # fmt: skip
_ARITHMETIC = frozenset({"Add", "Div", "Max", "Mean", "Min", "Mod", "Mul", "Pow", "Sub", "Sum"})

_ARG = frozenset({"ArgMax", "ArgMin"})
_EXTREMES = frozenset({"GlobalMaxPool", "ReduceMax", "ReduceMin"})
_SUMS = frozenset({
    "GlobalAveragePool", "GlobalLpPool", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean",
    "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
_LOSSES = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})

_ONNX: Final[Mapping[str, frozenset[str]]] = MappingProxyType({
    "moves_elements": _MOVES,
    "view": _MOVED_IN_PLACE | {"BitCast"},
    "strided": _STRIDED,
    "fills": _FILLS,
    "shape_query": _SHAPE_QUERIES,
    "random": _RANDOM,
    "control_flow": frozenset({"If", "Loop", "Scan", "SequenceMap"}),
    "elementwise": _CURVES | _ARITHMETIC | _STEPS | _COMPARISONS | _LOGIC | _CLASSES | _BITWISE | _CASTS
    | {"Identity", "Where"},
    "reduction": _ARG | _EXTREMES | _SUMS | {"ReduceProd"},
    "contraction": _INTEGER_PRODUCTS | {
        "Attention", "CausalConvWithState", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm", "LSTM",
        "LinearAttention", "MatMul", "RNN",
    },
    "sums": _SUMS | _LOSSES,
    "comparison": _COMPARISONS,
    "boolean_result": _COMPARISONS | _LOGIC | _CLASSES | {"OptionalHasElement", "RegexFullMatch"},
    "commutative": frozenset({
        "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Max", "Mean", "Min", "Mul", "Or", "Sum",
        "Xor",
    }),
    "zero_preserving": (_MOVES | _STEPS | _EXTREMES | _SUMS | _CLASSES | _CASTS | {"Greater", "Less", "ReduceProd"})
    - {"ReduceLogSum", "ReduceLogSumExp"} | {
        "Abs", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Elu", "Erf", "Gelu", "HardSwish", "LeakyRelu", "Mish", "Neg",
        "PRelu", "Relu", "Selu", "Shrink", "Sin", "Sinh", "Softsign", "Sqrt", "Swish", "Tan", "Tanh",
        "ThresholdedRelu", "Add", "Max", "Mean", "Min", "Mul", "Sub", "Sum", "And", "BitShift", "BitwiseAnd",
        "BitwiseOr", "BitwiseXor", "Or", "Xor", "AveragePool", "Conv", "ConvTranspose", "CumSum", "Einsum", "Gemm",
        "LpPool", "MatMul", "MaxPool",
    },
    "cast": _CASTS,
    "quantizes": _QUANTIZES,
    "shape_arithmetic": _MOVED_IN_PLACE | _COMPARISONS | _LOGIC | _STEPS | {
        "Abs", "Add", "BitShift", "Cast", "CastLike", "Clip", "Concat", "ConstantOfShape", "Div", "Gather",
        "GatherElements", "GatherND", "Max", "Min", "Mod", "Mul", "Neg", "Pow", "Range", "ReduceMax", "ReduceMin",
        "ReduceProd", "ReduceSum", "Sqrt", "Sub", "Sum", "Tile", "Where",
    },
    # a Range of floats multiplies and adds
    "exact": _MOVES | _SHAPE_QUERIES | (_FILLS - {"Range"}) | _COMPARISONS | _LOGIC | _CLASSES | _BITWISE | _STEPS
    | _ARG | _EXTREMES
    | {"Abs", "BitCast", "Clip", "Hardmax", "Max", "MaxPool", "Min", "Neg", "NonZero", "Relu", "ThresholdedRelu",
       "TopK", "Unique"},
    "discontinuous": _COMPARISONS | _STEPS | _ARG | {
        "BitCast", "DynamicQuantizeLinear", "Hardmax", "Mod", "NonMaxSuppression", "NonZero", "OneHot", "QLinearConv",
        "QLinearMatMul", "QuantizeLinear", "Shrink", "ThresholdedRelu", "TopK", "Unique",
    },
    # DynamicQuantizeLinear is none: its scale varies with the input; nor are Unique, Range and BitCast
    "piecewise_constant": _SHAPE_QUERIES | (_FILLS - {"OneHot", "Range"}) | _WINDOWS | _COMPARISONS | _LOGIC | _CLASSES
    | _BITWISE | _STEPS | _ARG | _INTEGER_PRODUCTS | {
        "Hardmax", "ImageDecoder", "NonMaxSuppression", "NonZero", "OptionalHasElement", "QuantizeLinear",
        "RegexFullMatch", "SequenceLength", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
    },
    "weighs": frozenset({
        "Attention", "DeformConv", "Det", "GRU", "GridSample", "LSTM", "LinearAttention", "RNN", "Resize", "RoiAlign",
        "Upsample",
    }),
    "grows": _WINDOWS | {
        "AffineGrid", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Einsum", "Expand", "GridSample",
        "ImageDecoder", "MaxUnpool", "OneHot", "Pad", "Range", "Resize", "STFT", "Tile", "Upsample",
    },
})  # fmt: skip

_CLASSIFIERS = frozenset({"LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"})
_TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})
_CATEGORIES = frozenset({"CategoryMapper", "LabelEncoder", "OneHotEncoder"})
_ML: Final[Mapping[str, frozenset[str]]] = MappingProxyType({
    "elementwise": frozenset({"Binarizer"}),
    "discontinuous": frozenset({"Binarizer", "Imputer", "SVMRegressor"}) | _CATEGORIES | _CLASSIFIERS | _TREES,
    "piecewise_constant": frozenset({"Binarizer"}) | _CATEGORIES | _TREES,
    "classifies": _CLASSIFIERS,
    **dict.fromkeys(("moves_elements", "zero_preserving"), frozenset({"ArrayFeatureExtractor"})),
    "exact": frozenset({"ArrayFeatureExtractor", "Binarizer", "Imputer"}) | _CATEGORIES,
})  # fmt: skip

_BOUNDARIES = frozenset({"EngineInputConvert", "EngineOutputConvert"})
_PASSED_ON = _BOUNDARIES | {"Barrier", "Boxing", "StopGradient"}
_DIALECT: Final[Mapping[str, frozenset[str]]] = MappingProxyType({
    "moves_elements": _PASSED_ON | {"WriteSlice"},
    "view": frozenset({"StopGradient"}),
    "exact": _PASSED_ON | {"WriteSlice"},
    "zero_preserving": _PASSED_ON | {"WriteSlice"},
    "elementwise": _PASSED_ON - {"Barrier"},
    "boundary": _BOUNDARIES,
    "stateful": frozenset({"Assign"}),
    "discontinuous": frozenset({"MaxPoolGrad"}),
})  # fmt: skip

_OPTIMISERS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"stateful": frozenset({"Adagrad", "Adam", "Momentum"})}
)


_ALONG_AXIS: Final = frozenset({"Gather", "GatherElements", "Scatter", "ScatterElements"})
_BY_COLUMNS: Final = frozenset({"GatherND", "ScatterND"})
AT_MOST: Final = "<="
"""In the place of a dimension, beside one that lengths do not exceed."""
_MEASURING: Final = frozenset({"GRU", "LSTM", "RNN", "ReverseSequence"})
_INDEX_INPUTS: Final[Mapping[Key, int]] = MappingProxyType({
    **{("", op): 1 for op in (
        "Gather", "GatherElements", "GatherND", "MaxUnpool", "NegativeLogLikelihoodLoss", "ReverseSequence", "Scatter",
        "ScatterElements", "ScatterND", "SoftmaxCrossEntropyLoss",
    )},
    **{("", op): 2 for op in ("RoiAlign", "TensorScatter")},
    ("", "RotaryEmbedding"): 3,
    **{("", op): 4 for op in ("GRU", "LSTM", "RNN")},
    ("", "Attention"): 6,
    ("ai.onnx.ml", "ArrayFeatureExtractor"): 1,
})  # fmt: skip


_SCALE_INPUTS: Final[Mapping[Key, tuple[int, ...]]] = MappingProxyType(
    {("", "QuantizeLinear"): (1,), ("", "QLinearConv"): (1, 4, 6), ("", "QLinearMatMul"): (1, 4, 6)}
)


def _rows() -> Iterator[tuple[Key, Traits]]:
    """The rows of the sets above."""
    domains = {"": _ONNX, "ai.onnx.ml": _ML, "ai.onnx.preview.training": _OPTIMISERS, "xrt": _DIALECT}
    made: dict[tuple[str, ...], Traits] = {}  # operators with the same traits share one record
    for domain, table in domains.items():
        for op_type in sorted(frozenset().union(*table.values())):
            own = tuple(trait for trait, named in table.items() if op_type in named)
            if own not in made:
                made[own] = Traits(**dict.fromkeys(own, True))
            yield (domain, op_type), made[own]


_ROWS: Final[dict[Key, Traits]] = dict(_rows())
_OWNERS: Final[dict[Key, str]] = {}  # of the rows of plugins: who added them
