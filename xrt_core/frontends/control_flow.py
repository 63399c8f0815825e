"""Tracing of control flow: the bodies of If, Loop, Scan, SequenceMap and FlexAttention become subgraphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.frontends.numpy_interop import is_array
from xrt_core.frontends.promotion import BOOL, FLOAT32, FLOAT64, INT64
from xrt_core.frontends.pytree import Structure, flatten
from xrt_core.frontends.source_location import trace_error
from xrt_core.frontends.tensor import Tensor, constant, literal, value_of
from xrt_core.frontends.tracing import Tracer, joined
from xrt_core.ir.graph import Attribute, Graph, Value
from xrt_core.ir.types import ONNX_TO_DTYPE, SequenceType, TensorType, ValueType

Inputs = Sequence[Value | None]


class Bodies(NamedTuple):
    """The traced bodies of one control-flow node.

    attributes: the node's graph attributes. types: the types of its outputs. structure: the nesting in which its
    outputs are returned, if a body defines it.
    """

    attributes: dict[str, Attribute]
    types: list[ValueType | None]
    structure: Structure | None


def is_tensor_like(value: Any) -> bool:
    """Return whether a returned object can be an output: a tensor, or an array (which becomes a constant)."""
    return isinstance(value, Tensor) or is_array(value)


def as_output(value: Any) -> Tensor:
    """Convert a return value of a body (tensor, array or number) to a tensor. Raises TraceError for others."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool):
        return literal(value, BOOL)
    if isinstance(value, int | float):
        return literal(value, INT64 if isinstance(value, int) else FLOAT32)
    if is_array(value):
        return constant(value)
    raise trace_error(f"{value!r} ({type(value).__name__}) cannot be an output: tensors, arrays and numbers can")


def trace_body(
    tracer: Tracer, label: str, function: Callable[..., Any], types: Sequence[ValueType | None], names: Sequence[str]
) -> tuple[Graph, Structure]:
    """Trace `function` on inputs of these types; return its graph and the structure of its return value.

    Values of enclosing graphs that the function uses are captured by identity.
    """
    with tracer.nested(f"{label} of {tracer.label}") as scope, tracer.inside(label):
        inputs = [Value(tracer.fresh(tracer.prefix + n), t) for n, t in zip(names, types, strict=True)]
        result = function(*(Tensor(v, scope) for v in inputs))
        leaves, structure = flatten(result, lambda x: is_tensor_like(x) or isinstance(x, int | float))
        outputs: list[Value] = []
        own = {id(v) for n in scope.nodes for v in n.outputs} | {id(v) for v in inputs}
        for leaf in leaves:
            value = value_of(as_output(leaf))
            if (id(value) not in own and value.data is None) or value in outputs:
                # ONNX requires every body output to be produced inside the body, and listed once
                (value,) = tracer.emit(tracer.schema("Identity"), [value], {}, 1, [value.type])
            outputs.append(value)
    return Graph(inputs, outputs, scope.nodes, opsets=tracer.opsets, name=label), structure


def trace_bodies(
    tracer: Tracer,
    op: str,
    label: str,
    inputs: Sequence[Value | None],
    graphs: Mapping[str, Any],
    attributes: Mapping[str, Attribute],
) -> Bodies:
    """Trace the callables among the graph attributes of operator `op`, and infer the types of the node's outputs.

    Raises TraceError if a body does not fit its operator.
    """
    try:
        rule = _RULES[op]
    except KeyError:
        raise trace_error(f"{op}: this version of XRT cannot trace its bodies") from None
    return rule(tracer, label, inputs, graphs, attributes)


def _body(
    tracer: Tracer, label: str, body: Any, types: Sequence[ValueType | None], names: Sequence[str]
) -> tuple[Graph, Structure | None]:
    if isinstance(body, Graph):
        if len(body.inputs) != len(types):
            raise trace_error(f"{label}: the graph takes {len(body.inputs)} inputs, {len(types)} are given")
        return body, None
    if not callable(body):
        raise trace_error(f"{label}: a callable or an ir.Graph is needed, not {body!r}")
    return trace_body(tracer, label, body, types, names)


def _if(
    tracer: Tracer, label: str, inputs: Inputs, graphs: Mapping[str, Any], attrs: Mapping[str, Attribute]
) -> Bodies:
    then, structure = _body(tracer, f"{label}.then_branch", graphs["then_branch"], (), ())
    other, second = _body(tracer, f"{label}.else_branch", graphs["else_branch"], (), ())
    if len(then.outputs) != len(other.outputs) or (structure and second and structure != second):
        raise trace_error(
            f"If: the branches must return the same structure; then_branch gives {_described(structure, then)}, "
            f"else_branch {_described(second, other)}"
        )
    types = [
        _join("If: the branches", f"output {i}", a.type, b.type)
        for i, (a, b) in enumerate(zip(then.outputs, other.outputs, strict=True))
    ]
    return Bodies({"then_branch": then, "else_branch": other}, types, structure)


def _described(structure: Structure | None, graph: Graph) -> str:
    types = [v.type for v in graph.outputs]
    if structure is None or structure.kind == "leaf":
        return ", ".join(map(str, types))
    return str(structure.rebuild([str(t) for t in types]))


def _join(what: str, which: str, a: ValueType | None, b: ValueType | None) -> ValueType | None:
    try:
        return joined(a, b)
    except ShapeError:
        raise trace_error(f"{what} disagree on {which}: {a} and {b}; use .astype in one of them") from None


def _loop(
    tracer: Tracer, label: str, inputs: Inputs, graphs: Mapping[str, Any], attrs: Mapping[str, Attribute]
) -> Bodies:
    given = list(inputs) + [None] * (2 - len(inputs))
    count, condition, states = given[0], given[1], given[2:]
    names = ["iteration", "condition", *(f"state.{i}" for i in range(len(states)))]
    head: list[ValueType | None] = [TensorType(INT64, ()), TensorType(BOOL, ())]

    def attempt(types: Sequence[ValueType | None]) -> tuple[Graph, list[ValueType | None]]:
        graph, _ = _body(tracer, f"{label}.body", graphs["body"], [*head, *types], names)
        return graph, [v.type for v in graph.outputs[1 : 1 + len(states)]]

    graph, carried = _settled(tracer, "Loop", states, attempt, 1)
    trips = None
    known = tracer.data_of(count)
    forever = graph.outputs[0].data is not None and bool(graph.outputs[0].data)
    passed_on = graph.outputs[0] is graph.inputs[1]
    if known is not None and (forever or passed_on) and (condition is None or condition.data is not None):
        never = condition is not None and condition.data is not None and not bool(condition.data)
        trips = 0 if never else max(int(known.reshape(())), 0)
    scans = [_with_axis(v.type, 0, trips) for v in graph.outputs[1 + len(states) :]]
    return Bodies({"body": graph}, [*carried, *scans], None)


def _settled(
    tracer: Tracer,
    op: str,
    states: Sequence[Value | None],
    attempt: Callable[[Sequence[ValueType | None]], tuple[Graph, list[ValueType | None]]],
    head: int,
) -> tuple[Graph, list[ValueType | None]]:
    """Trace a loop body repeatedly until the types of its state are a fixed point; a dimension that changes from
    one iteration to the next becomes unknown."""
    types = [None if v is None else v.type for v in states]
    while True:
        names = tracer.snapshot_names()
        graph, carried = attempt(types)
        if len(carried) != len(states):
            raise trace_error(
                f"{op}: the body must return {head + len(states)} values at least ({'the condition, ' if head else ''}"
                f"{len(states)} of state, then what is collected), it returns {len(graph.outputs)}"
            )
        wider = [
            _join(f"{op}: start and body", f"state {i}", a, b)
            for i, (a, b) in enumerate(zip(types, carried, strict=True))
        ]
        if wider == types:
            return graph, types
        tracer.restore_names(names)
        types = wider


def _with_axis(t: ValueType | None, axis: int, size: int | str | None) -> ValueType | None:
    if not isinstance(t, TensorType) or t.shape is None:
        return TensorType(t.dtype) if isinstance(t, TensorType) else None
    at = axis % (len(t.shape) + 1)
    return TensorType(t.dtype, (*t.shape[:at], size, *t.shape[at:]))


def _scan(
    tracer: Tracer, label: str, inputs: Inputs, graphs: Mapping[str, Any], attrs: Mapping[str, Attribute]
) -> Bodies:
    if tracer.schema("Scan").since_version < 9:
        raise trace_error("Scan of opset 8 has another form: trace with opset 9 or newer")
    scanned: Any = attrs["num_scan_inputs"]
    if not 1 <= scanned <= len(inputs):
        raise trace_error(f"Scan: num_scan_inputs={scanned} does not fit {len(inputs)} inputs")
    states, sequences = inputs[: len(inputs) - scanned], inputs[len(inputs) - scanned :]
    axes: Any = attrs.get("scan_input_axes", (0,) * scanned)
    length: int | str | None = None
    elements: list[ValueType | None] = []
    for v, axis in zip(sequences, axes, strict=True):
        t = None if v is None else v.type
        if not isinstance(t, TensorType) or t.shape is None:
            elements.append(TensorType(t.dtype) if isinstance(t, TensorType) else None)
            continue
        if not -len(t.shape) <= axis < len(t.shape):
            raise trace_error(f"Scan: axis {axis} is not one of {t}")
        at = axis % len(t.shape)
        if isinstance(length, int) and isinstance(t.shape[at], int) and length != t.shape[at]:
            raise trace_error(f"Scan: the scanned inputs are {length} and {t.shape[at]} long")
        length = t.shape[at] if length is None else length
        elements.append(TensorType(t.dtype, t.shape[:at] + t.shape[at + 1 :]))
    names = [*(f"state.{i}" for i in range(len(states))), *(f"element.{i}" for i in range(scanned))]

    def attempt(types: Sequence[ValueType | None]) -> tuple[Graph, list[ValueType | None]]:
        graph, _ = _body(tracer, f"{label}.body", graphs["body"], [*types, *elements], names)
        return graph, [v.type for v in graph.outputs[: len(states)]]

    graph, carried = _settled(tracer, "Scan", states, attempt, 0)
    collected = graph.outputs[len(states) :]
    out_axes: Any = attrs.get("scan_output_axes", (0,) * len(collected))
    scans = [_with_axis(v.type, a, length) for v, a in zip(collected, out_axes, strict=True)]
    return Bodies({"body": graph}, [*carried, *scans], None)


def _sequence_map(
    tracer: Tracer, label: str, inputs: Inputs, graphs: Mapping[str, Any], attrs: Mapping[str, Attribute]
) -> Bodies:
    given = [None if v is None else v.type for v in inputs]
    types = [t.element if isinstance(t, SequenceType) else t for t in given]
    graph, _ = _body(tracer, f"{label}.body", graphs["body"], types, [f"element.{i}" for i in range(len(types))])
    return Bodies({"body": graph}, [SequenceType(v.type) for v in graph.outputs], None)


def _flex_attention(
    tracer: Tracer, label: str, inputs: Inputs, graphs: Mapping[str, Any], attrs: Mapping[str, Attribute]
) -> Bodies:
    q, k, v = inputs[:3]
    if q is None or k is None or v is None or q.dtype is None:
        raise trace_error("FlexAttention: query, key and value are needed")
    precision: Any = attrs.get("softmax_precision")
    if precision is None:
        dtype = FLOAT64 if q.dtype == FLOAT64 else np.dtype(np.float32)
    else:
        dtype = ONNX_TO_DTYPE[precision]
    qs, ks, vs = q.shape, k.shape, v.shape
    scores = None if qs is None or ks is None else (qs[0], qs[1], qs[2], ks[2])
    result = None if qs is None or vs is None else (*qs[:3], vs[3])
    made = {n: _body(tracer, f"{label}.{n}", g, [TensorType(dtype, scores)], ["scores"])[0] for n, g in graphs.items()}
    return Bodies(dict(made), [TensorType(q.dtype, result)], None)


_RULES: Mapping[str, Callable[..., Bodies]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
    "FlexAttention": _flex_attention,
}
