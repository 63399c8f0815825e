"""Where the library takes a node and then fails on it or computes something else than ONNX says, as far as is known:
`deviation` for nodes that it does not get, `avoided` for those that it gets in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from xrt_core.engine.onnx_bridge import has_whole_sizes
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value, every_node
from xrt_core.ir.op_traits import draws_random
from xrt_core.ir.types import TensorType

_MASK: Final = 3
"""Which input of Attention its mask is."""
_LEAST: Final = np.array(np.finfo(np.float32).min, np.float32)


def deviation(node: Node) -> str | None:
    """What would go wrong with `node`, or None."""
    if draws_random(node):
        return f"{node.op_type} draws random numbers, and those are the host's"
    rule = _RULES.get(node.op_type) if not node.domain else _ML_RULES.get(node.op_type)
    return None if rule is None else rule(node)


def avoided(function: Function) -> Function:
    """`function` with nodes written so that the library computes them as ONNX says, bodies included; itself where none
    has to be.

    The library takes a row of scores of Attention that are all the least float32, the number that exporters mask with,
    for a row of -infinity, and gives 0 for the mean of the values. Half of that number masks as well.

    Threads of its ScatterND reduce into one element at once where indices come again, so that updates are lost
    (https://github.com/microsoft/onnxruntime/issues/18048). Its ScatterElements reduces in order.

    Its ReduceMax and ReduceMin of floats pass over NaN at most places; whether there is one is reduced besides.

    A division of integers by 0 fails or ends the process, as that of the least integer by -1 does; it gets other
    divisors in their places, and the results that the host gives: 0, and the dividend with the other sign.
    """
    if not any(_is_masked(n) or _races(n) or _loses_nan(n) or _divides(n) for n in every_node(function.body)):
        return function
    body = _rewritten(function.body)
    return Function(function.name, function.params, function.returns, body, function.aliases)


_REDUCED: Final = (np.dtype(np.float32), np.dtype(np.float64))


def _is_masked(node: Node) -> bool:
    mask = _input(node, _MASK)
    return node.op_type == "Attention" and not node.domain and mask is not None and mask.dtype == np.float32


def _races(node: Node) -> bool:
    return node.op_type == "ScatterND" and not node.domain and node.attributes.get("reduction", "none") != "none"


def _loses_nan(node: Node) -> bool:
    x = _input(node, 0)
    return not node.domain and _RULES.get(node.op_type) is _extreme and x is not None and x.dtype in _REDUCED


def _divides(node: Node) -> bool:
    divisor = _input(node, 1)
    known = divisor is None or divisor.data is not None
    return node.op_type in ("Div", "Mod") and not node.domain and not known and _dtype(divisor) in _DIVIDED


_DIVIDED: Final = (np.dtype(np.int32), np.dtype(np.int64))


def _dtype(value: Value | None) -> np.dtype | None:
    return None if value is None else value.dtype


def _rewritten(graph: Graph) -> Graph:
    nodes: list[Node] = []
    halved: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.attributes and node.subgraphs:
            bodies = {k: _rewritten(a) if isinstance(a, Graph) else a for k, a in node.attributes.items()}
            node = node.replace(attributes=bodies)
        if _is_masked(node):
            nodes += _unmixed(node, halved)
        elif _races(node):
            nodes += _in_order(node)
        elif _loses_nan(node):
            nodes += _with_nan(node)
        elif _divides(node):
            nodes += _with_any_divisor(node)
        else:
            nodes.append(node)
    return graph.replace(nodes=nodes)


def _unmixed(node: Node, halved: dict[Value, Value]) -> list[Node]:
    """Attention whose mask has half of the least number in the place of that. halved: what masks have become."""
    nodes: list[Node] = []
    mask = node.inputs[_MASK]
    assert mask is not None
    if mask not in halved:
        halved[mask] = Value(f"{mask.name}_halved", TensorType(np.dtype(np.float32), mask.shape))
        is_least = Value(f"{mask.name}_is_least", TensorType(np.dtype(np.bool_), mask.shape))
        nodes += [
            Node("Equal", [mask, Value("least", data=_LEAST)], [is_least], version=19),
            Node("Where", [is_least, Value("half", data=_LEAST / 2), mask], [halved[mask]], version=16),
        ]
    return [*nodes, node.replace(inputs=[*node.inputs[:_MASK], halved[mask], *node.inputs[_MASK + 1 :]])]


def _with_nan(node: Node) -> list[Node]:
    """ReduceMax or ReduceMin, and NaN where there is one among what is reduced."""
    x, result = node.inputs[0], node.outputs[0]
    assert x is not None
    assert result is not None
    shape = result.shape if isinstance(result.type, TensorType) else None
    version = {12: 11, 20: 18}.get(node.version, node.version)  # of ReduceL1, which gives 0 for no elements

    def value(what: str, dtype: Any, dims: Any) -> Value:
        return Value(f"{result.name}_{what}", TensorType(np.dtype(dtype), dims))

    extreme, count = value("extreme", x.dtype, shape), value("count", np.float32, shape)
    there = value("any", "?", shape)
    is_nan, one = value("is_nan", "?", x.shape), value("one", np.float32, x.shape)
    return [
        node.replace(outputs=[extreme]),
        Node("IsNaN", [x], [is_nan], version=13),
        Node("Cast", [is_nan], [one], {"to": 1}, version=13),
        Node("ReduceL1", [one, *node.inputs[1:]], [count], dict(node.attributes), version=version),
        Node("Cast", [count], [there], {"to": 9}, version=13),
        Node("Where", [there, Value("nan", data=np.array(np.nan, x.dtype)), extreme], [result], version=16),
    ]


def _with_any_divisor(node: Node) -> list[Node]:
    """Div or Mod of integers by numbers of which some may be 0 or -1. By 1 a remainder is 0, as by these."""
    x, divisor = node.inputs
    (result,) = node.outputs
    assert x is not None
    assert divisor is not None
    assert divisor.dtype is not None
    assert result is not None
    nodes: list[Node] = []

    def number(n: int) -> Value:
        return Value(f"number_{n}", data=np.array(n, divisor.dtype))

    def made(op: str, inputs: list[Value], version: int, what: str, dtype: Any, of: Value) -> Value:
        value = Value(f"{result.name}_{what}", TensorType(np.dtype(dtype), of.shape))
        nodes.append(Node(op, inputs, [value], version=version))
        return value

    is_zero = made("Equal", [divisor, number(0)], 13, "is_zero", "?", divisor)
    is_minus = made("Equal", [divisor, number(-1)], 13, "is_minus", "?", divisor)
    either = made("Or", [is_zero, is_minus], 7, "either", "?", divisor)
    other = made("Where", [either, number(1), divisor], 16, "divisor", divisor.dtype, divisor)
    if node.op_type == "Mod":
        return [*nodes, node.replace(inputs=[x, other])]
    quotient = Value(f"{result.name}_quotient", result.type)
    nodes.append(node.replace(inputs=[x, other], outputs=[quotient]))
    negated = made("Sub", [number(0), x], 14, "negated", divisor.dtype, x)
    signed = made("Where", [is_minus, negated, quotient], 16, "signed", divisor.dtype, result)
    return [*nodes, Node("Where", [is_zero, number(0), signed], [result], version=16)]


def _in_order(node: Node) -> list[Node]:
    """ScatterND as ScatterElements along the first axis of data whose axes that indices have columns for are one."""
    data, indices, updates = node.inputs
    result = node.outputs[0]
    assert data is not None
    assert data.shape is not None
    assert indices is not None
    assert indices.shape is not None
    assert updates is not None
    assert result is not None
    columns = indices.shape[-1]
    assert isinstance(columns, int)
    nodes: list[Node] = []

    def made(op: str, inputs: list[Value], version: int, dtype: Any = np.int64, **attributes: Any) -> Value:
        value = Value(f"{result.name}_{len(nodes)}", TensorType(np.dtype(dtype)))
        nodes.append(Node(op, inputs, [value], attributes, version=version))
        return value

    def sizes(*numbers: int) -> Value:
        return Value("sizes", data=np.array(numbers, np.int64))

    rest = made("Shape", [data], 15, start=columns)
    rows, dtype = data, data.dtype
    if columns > 1:
        folded = np.array(data.shape[:columns], np.int64)
        strides = np.append(np.cumprod(folded[:0:-1])[::-1], 1)
        is_negative = made("Less", [indices, Value("zero", data=np.array(0, np.int64))], 13, np.bool_)
        from_end = made("Add", [indices, Value("folded", data=folded)], 14)
        counted = made("Where", [is_negative, from_end, indices], 16)
        steps = made("Mul", [counted, Value("strides", data=strides.astype(np.int64))], 14)
        last = Value("last", data=np.array([-1], np.int64))
        indices = made("ReduceSum", [steps, last], 13, keepdims=1)
        rows = made("Reshape", [data, made("Concat", [sizes(int(np.prod(folded))), rest], 13, axis=0)], 14, dtype)
    updates = made("Reshape", [updates, made("Concat", [sizes(-1), rest], 13, axis=0)], 14, dtype)
    indices = made("Reshape", [indices, sizes(-1, *[1] * (len(data.shape) - columns))], 14)
    indices = made("Expand", [indices, made("Shape", [updates], 15)], 13)
    how = {"axis": 0, "reduction": node.attributes["reduction"]}
    if columns == 1:
        return [*nodes, Node("ScatterElements", [rows, indices, updates], [result], how, version=18, name=node.name)]
    rows = made("ScatterElements", [rows, indices, updates], 18, dtype, **how)
    shape = made("Shape", [data], 15)
    return [*nodes, Node("Reshape", [rows, shape], [result], version=14, name=node.name)]


def _input(node: Node, index: int) -> Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _may_be_empty(value: Value) -> bool:
    return value.shape is not None and (0 in value.shape or None in value.shape)


def _division(node: Node) -> str | None:
    """A zero divisor is an error at run time, and the smallest integer by -1 ends the process (SIGFPE)."""
    divisor = _input(node, 1)
    if divisor is None or divisor.dtype is None or divisor.dtype.kind not in "iu":
        return None
    if divisor.data is None:
        if divisor.dtype in _DIVIDED:
            return None  # `avoided` sees to it
        return f"{node.op_type} of {divisor.dtype} needs a known divisor: onnxruntime fails on 0 and ends on -1"
    if np.isin(divisor.data, (0, -1) if divisor.dtype.kind == "i" else (0,)).any():
        return f"{node.op_type} of integers has a divisor of 0 or -1, which onnxruntime may not survive"
    return None


def _fourier(node: Node) -> str | None:
    return f"onnxruntime's {node.op_type} is less exact than ONNX's backend tests ask for"


def _attention(node: Node) -> str | None:
    query = _input(node, 0)
    if query is not None and query.dtype == np.float16:
        return "onnxruntime's Attention of float16 is less exact than ONNX's backend tests ask for"
    if query is not None and query.dtype == np.float64:
        return "onnxruntime's Attention of float64 has the digits of float32"
    if len(node.outputs) > 3 and node.outputs[3] is not None and node.attributes.get("is_causal", 0):
        return "onnxruntime gives another qk_matmul_output of causal Attention"
    if _input(node, 6) is not None:
        return "onnxruntime fails on padded keys and values of Attention (nonpad_kv_seqlen)"
    return None


def _max_unpool(node: Node) -> str | None:
    given = _input(node, 2) is not None
    return "onnxruntime puts MaxUnpool's values elsewhere where there is an output_shape" if given else None


def _resize(node: Node) -> str | None:
    mode = node.attributes.get("coordinate_transformation_mode")
    if mode == "align_corners" and _input(node, 3) is None and not has_whole_sizes(node):
        return "onnxruntime's Resize by scales gives other values with align_corners where a size is rounded"
    return None


def _conv_integer(node: Node) -> str | None:
    zero = _input(node, 3)
    if zero is not None and zero.shape is not None and zero.shape not in ((), (1,)):
        return "onnxruntime has no ConvInteger with a zero point for each channel"
    return None


def _scatter(node: Node) -> str | None:
    x, reduction = _input(node, 0), node.attributes.get("reduction", "none")
    if x is not None and x.dtype is not None and reduction != "none":
        kind = x.dtype.name  # the library says so at the first run
        if kind in ("float16", "bfloat16") or (kind == "bool" and reduction in ("min", "max")):
            return f"onnxruntime has no {node.op_type} of {kind} by {reduction}"
    if _races(node):
        indices = _input(node, 1)
        columns = indices.shape[-1] if indices is not None and indices.shape else None
        if x is None or x.shape is None or not isinstance(columns, int) or 0 in (columns, *x.shape):
            return "onnxruntime's ScatterND loses updates that it reduces; its data have no known rank, or no elements"
        if columns > 1 and not all(isinstance(n, int) for n in x.shape[:columns]):
            return "onnxruntime's ScatterND loses updates that it reduces along axes of unknown sizes"
    is_float = x is not None and x.dtype is not None and x.dtype.kind in "fV"
    if not is_float or reduction not in ("min", "max"):
        return None
    return f"onnxruntime's {node.op_type} of floats by min or max passes over NaN where an index comes again"


def _extreme(node: Node) -> str | None:
    x = _input(node, 0)
    if x is not None and x.dtype is not None and x.dtype.kind in "fV" and x.dtype not in _REDUCED:
        return f"onnxruntime's {node.op_type} of narrow floats passes over NaN at some places"
    if x is not None and x.dtype == np.bool_ and _may_be_empty(x):
        return f"onnxruntime has no {node.op_type} of an empty set of bool"
    return None


def _mean(node: Node) -> str | None:
    """Of nothing the mean is 0 / 0."""
    x, given = _input(node, 0), _input(node, 1)
    axes: Any = node.attributes.get("axes") if given is None else None if given.data is None else given.data.tolist()
    if x is not None and x.shape is not None and _may_be_empty(x):
        reduced = x.shape if axes is None else [x.shape[a] for a in axes if -len(x.shape) <= a < len(x.shape)]
        if 0 in reduced or None in reduced:
            return "onnxruntime's mean of no elements is 0, and there are none, or how many there are depends on data"
    return _sum(node)


def _sum(node: Node) -> str | None:
    """Beyond 2**53 digits are lost, and a sum that wraps round in ONNX ends at the largest number."""
    x = _input(node, 0)
    long = x is not None and x.dtype == np.int64
    return f"onnxruntime computes {node.op_type} of int64 in double, which has not all of its numbers" if long else None


def _product(node: Node) -> str | None:
    x = _input(node, 0)
    whole = x is not None and x.dtype is not None and x.dtype.kind in "iu"
    which = f"{node.op_type} of integers in double, which has not all of their numbers"
    return f"onnxruntime computes {which}" if whole else None


def _sign(node: Node) -> str | None:
    x = _input(node, 0)
    narrow = x is not None and x.dtype is not None and x.dtype.itemsize == 2 and x.dtype.kind in "fV"
    return "onnxruntime's Sign of a 16-bit NaN is 0" if narrow else None


def _matrix_product(node: Node) -> str | None:
    x = _input(node, 0)
    if x is not None and x.dtype is not None and x.dtype.kind == "u" and _may_be_empty(x):
        return "onnxruntime fails on MatMul of unsigned integers with nothing to sum"
    return None


def _group_normalisation(node: Node) -> str | None:
    x = _input(node, 0)
    wide = x is not None and x.dtype == np.float64
    return "onnxruntime computes GroupNormalization of float64 in float32" if wide else None


def _gelu(node: Node) -> str | None:
    x = _input(node, 0)
    approximate = node.attributes.get("approximate", "none") == "tanh"
    wide = approximate and x is not None and x.dtype == np.float64
    return "onnxruntime computes Gelu of float64 by tanh in float32" if wide else None


def _windows(node: Node) -> str | None:
    for v in (*node.inputs[:2], *node.outputs[:1]):
        if v is not None and _may_be_empty(v):
            return f"onnxruntime fails on {node.op_type} of an empty tensor, or invents numbers"
    dilations = node.attributes.get("dilations")
    is_dilated = isinstance(dilations, tuple) and any(d != 1 for d in dilations)
    if is_dilated and str(node.attributes.get("auto_pad", "")).startswith("SAME"):
        return f"onnxruntime fails at every run of {node.op_type} with dilations and auto_pad SAME"
    return None


def _cast(node: Node) -> str | None:
    y = node.outputs[0]
    if y is not None and y.dtype is not None and y.dtype.name == "float8_e8m0fnu":
        return "onnxruntime casts negative numbers to the least float8e8m0"
    x = _input(node, 0)
    if y is not None and y.dtype == np.uint32 and x is not None and x.dtype is not None and x.dtype.kind in "fV":
        return "what onnxruntime makes of floats that uint32 does not hold depends on their place in the array"
    return None


def _mean_variance(node: Node) -> str | None:
    return "onnxruntime's MeanVarianceNormalization of a constant channel is NaN"


def _normalizer(node: Node) -> str | None:
    signed = node.attributes.get("norm", "MAX") == "MAX"
    return "onnxruntime's Normalizer MAX divides by the largest number, not the largest magnitude" if signed else None


def _one_score(node: Node) -> str | None:
    """Classifiers of one label, or of two whose scores are not the plain case that converters write."""
    a: Any = node.attributes
    labels = a.get("classlabels_strings") or a.get("classlabels_int64s") or a.get("classlabels_ints") or ()
    if node.op_type == "SVMClassifier":
        is_raw = len(labels) == 2 and a.get("vectors_per_class") and not a.get("prob_a")
        plain = not is_raw or a.get("post_transform", "NONE") == "NONE"
    elif len(labels) > 2:
        plain = a.get("post_transform", "NONE") != "PROBIT"
    else:
        transform = a.get("post_transform", "NONE")
        given = a.get("class_weights_as_tensor")
        weights = given if given is not None and np.size(given) else a.get("class_weights", ())
        base = max(np.size(a.get(n, ())) for n in ("base_values", "base_values_as_tensor"))
        plain = (
            len(labels) == 2
            and set(a.get("class_ids", ())) == {0}
            and base <= 1
            and (transform == "NONE" or (transform == "LOGISTIC" and bool((np.asarray(weights) < 0).any())))
        )
    return None if plain else f"onnxruntime scores such a {node.op_type} of few labels in a way of its own"


_ML_RULES: Final[Mapping[str, Callable[[Node], str | None]]] = MappingProxyType(
    {"Normalizer": _normalizer, "SVMClassifier": _one_score, "TreeEnsembleClassifier": _one_score}
)

_RULES: Final[Mapping[str, Callable[[Node], str | None]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("AveragePool", "Conv", "ConvTranspose", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "MaxPool"),
            _windows,
        ),
        **dict.fromkeys(("Cast", "CastLike"), _cast),
        "Div": _division,
        "Mod": _division,
        "DFT": _fourier,
        "STFT": _fourier,
        "Attention": _attention,
        "MaxUnpool": _max_unpool,
        "Resize": _resize,
        "ConvInteger": _conv_integer,
        "Gelu": _gelu,
        "GroupNormalization": _group_normalisation,
        "MatMul": _matrix_product,
        "MeanVarianceNormalization": _mean_variance,
        "ReduceMean": _mean,
        "ReduceSum": _sum,
        **dict.fromkeys(("Einsum", "Pow", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceSumSquare"), _product),
        "Sign": _sign,
        "ReduceMax": _extreme,
        "ReduceMin": _extreme,
        "ScatterElements": _scatter,
        "ScatterND": _scatter,
    }
)
