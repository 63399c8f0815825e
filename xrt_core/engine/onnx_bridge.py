"""A Function as an ONNX model, for engines whose library reads those: its large constants stay beside it, untouched.

Which nodes a library of ONNX models takes: it is given a model of the one node, once per kind of node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from xrt_core.engine.onnx_versions import aligned, lowered_to, same_but_types, schema_of
from xrt_core.errors import CompileError, ExportError, XRTError
from xrt_core.ir.file_backed import let_go
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, SparseTensor, Value, are_open, every_node, nodes_within
from xrt_core.ir.long_list import LongList
from xrt_core.ir.onnx_proto import dtype_to_onnx, tensor_from_array
from xrt_core.ir.types import STRING, SequenceType, TensorType, float_like

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto

    from xrt_core.frontends.onnx_wire import LongLists
    from xrt_core.ir.onnx_proto import ListWriter

__all__ = [
    "EXTERNAL_BYTES",
    "SUB_BYTE",
    "NodeTrials",
    "OnnxModel",
    "aligned",
    "as_onnx_text",
    "frozen",
    "has_whole_sizes",
    "in_place",
    "is_large",
    "is_open",
    "is_symbolic",
    "onnx_model",
    "same_but_types",
    "schema_of",
    "to_onnx",
    "why_not_within",
    "why_unfit",
]


EXTERNAL_BYTES: Final = 4096
"""Constants from this size on stay out of the model by default."""

_SHOWN: Final = 8  # elements of a constant that a text shows

SUB_BYTE: Final = frozenset(("int4", "uint4", "int2", "uint2", "float4_e2m1fn"))
"""Names of the dtypes that ONNX packs into bytes, while an array has a byte for each element."""


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A Function as an ONNX model.

    model: its nodes have unique names, its constants below the limit are in it, the types of inner values are not.
    inputs, outputs: names, in the order of the Function's params and returns.
    weights: the large constants by name, C-contiguous and aligned (`onnx_model(unaligned=)`), as they are where their
        memory allows it. Each is an initializer of `model` that says it lies elsewhere (data_location EXTERNAL): the
        library is to be given the memory, and where it reads it in place, the arrays must outlive it.
    """

    model: ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, np.ndarray]
    _lists: LongLists | None = None

    def to_bytes(self) -> bytes:
        """The model as the file holds it, long lists of attributes included (`onnx_model(lists_beside=)`)."""
        raw = self.model.SerializeToString()
        return raw if self._lists is None else self._lists.fill(raw)


def beside_the_model(array: np.ndarray) -> Mapping[str, str]:
    """The `external_data` of a constant whose memory the library is given by the constant's name."""
    return {"location": "xrt", "length": str(array.nbytes)}


def in_place(array: np.ndarray) -> np.ndarray:
    """The array where a library may read it: C-contiguous, and of the alignment that its dtype has."""
    found = np.require(array, requirements=("C", "A"))
    if found is not array:
        let_go(array)  # a memory map may start anywhere; the copy stands for it
    return found


def is_large(data: np.ndarray | None, external_bytes: int = EXTERNAL_BYTES) -> bool:
    """Whether a constant of this data stays out of the model: it has `external_bytes` bytes or more, laid out as ONNX
    has them, which leaves out strings and elements of less than a byte."""
    if data is None or data.nbytes < external_bytes:
        return False
    return data.dtype != STRING and data.dtype.name not in SUB_BYTE


def to_onnx(
    function: Function,
    *,
    tensor: Callable[[np.ndarray, str], TensorProto] = tensor_from_array,
    long_list: ListWriter | None = None,
) -> ModelProto:
    """The function as a standalone ONNX model; importing it gives the same fingerprint.

    tensor: writes a constant of a name, by default with its data. long_list: may write long lists of attributes.
    Raises ExportError for what ONNX cannot express.
    """
    from xrt_core.frontends.onnx_export import export_function

    return export_function(function, tensor=tensor, long_list=long_list)


def as_onnx_text(model: ModelProto | bytes) -> str:
    """A model in ONNX's textual syntax, without the elements of large constants (https://onnx.ai/onnx/repo-docs/Syntax.html)."""
    import onnx

    shown = onnx.ModelProto()
    if isinstance(model, bytes):
        shown.ParseFromString(model)
    else:
        shown.CopyFrom(model)
    for tensor in shown.graph.initializer:
        if np.prod(tensor.dims, dtype=np.int64) > _SHOWN:
            kept = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            kept.data_location = onnx.TensorProto.EXTERNAL
            tensor.CopyFrom(kept)
    return str(onnx.printer.to_text(shown))


def onnx_model(
    function: Function,
    *,
    engine: str,
    newest_opset: int | None = None,
    location: Callable[[np.ndarray], Mapping[str, str]] = beside_the_model,
    external_bytes: int = EXTERNAL_BYTES,
    unaligned: bool = False,
    lists_beside: bool = False,
) -> OnnxModel:
    """The ONNX model of `function`.

    engine: its name, for messages.
    newest_opset: of the standard domain, the newest that the library knows; the model is of that or an older one.
        Newer nodes are written in older versions, or as what they are made of (`onnx_versions.lowered_to`); nodes of
        several opsets come into one where each means the same in it (`onnx_versions.aligned`).
    location: the entries of `external_data` that tell the library where a large constant lies.
    external_bytes: the size from which constants stay out of the model.
    unaligned: leave constants where they are even if their dtype wants another alignment, as in a memory map of a file.
    lists_beside: keep long lists of attributes, as of tree ensembles, out of `model`; `to_bytes` has them.

    Raises CompileError for a function that ONNX cannot express, or whose nodes belong to opsets that no one model has.
    """
    from xrt_core.frontends.onnx_wire import LongLists

    if newest_opset is not None:
        try:
            function = lowered_to(function, newest_opset)
        except CompileError as e:
            raise CompileError(f"{engine}: function {function.name!r}: {e}") from e
    body = function.body
    if newest_opset is not None:
        opsets = {**body.opsets, "": min(body.opsets.get("", newest_opset), newest_opset)}
        function = Function(function.name, function.params, function.returns, body.replace(opsets=opsets))
    weights: dict[str, np.ndarray] = {}
    lists = LongLists() if lists_beside else None
    returned = {id(v.data) for v in body.outputs if v.data is not None}

    def write(array: np.ndarray, name: str) -> TensorProto:
        if id(array) in returned or not is_large(array, external_bytes):
            return tensor_from_array(array, name)
        array = np.ascontiguousarray(array).reshape(array.shape) if unaligned else in_place(array)
        weights[name] = array
        return _elsewhere(array, name, location(array))

    try:
        model = to_onnx(function, tensor=write, long_list=lists)
        if model.functions and (same := aligned(function, newest_opset)) is not function:
            weights.clear()
            model = to_onnx(same, tensor=write, long_list=lists)
    except ExportError as e:
        raise CompileError(f"{engine}: function {function.name!r} does not export: {e}") from e
    if model.functions:  # how the exporter writes nodes of another opset; libraries read them at the model's opset
        mixed = ", ".join(sorted({f"{n.operator}-{n.version}" for n in every_node(body)}))
        raise CompileError(f"{engine}: function {function.name!r} mixes nodes that no one opset has: {mixed}")
    graph = model.graph
    model.ir_version = min(model.ir_version, _oldest_ir_version(body))
    _tidy(graph, set())
    inputs, outputs = (tuple(p.name for p in ports) for ports in (graph.input, graph.output))
    return OnnxModel(model, inputs, outputs, MappingProxyType(weights), lists)


def without_missing_bounds(function: Function) -> Function:
    """The function with each Clip of floats that has one bound as Max or Min, and with none as Identity, in bodies too;
    itself where there is none. Libraries take the largest number of the type for a bound that is missing, and give that
    for an infinity."""
    body = _with_bounds(function.body)
    if body is function.body:
        return function
    return Function(function.name, function.params, function.returns, body, function.aliases)


def _with_bounds(graph: Graph) -> Graph:
    nodes = [_with_bound(n) for n in graph.nodes]
    return graph if all(a is b for a, b in zip(nodes, graph.nodes, strict=True)) else graph.replace(nodes=nodes)


def _with_bound(node: Node) -> Node:
    if node.subgraphs:
        bodies = {k: _with_bounds(a) if isinstance(a, Graph) else a for k, a in node.attributes.items()}
        return node if all(bodies[k] is a for k, a in node.attributes.items()) else node.replace(attributes=bodies)
    x = node.inputs[0] if node.inputs else None
    if node.operator != "Clip" or node.version < 11 or x is None or x.dtype is None or not float_like(x.dtype):
        return node
    low, high = (*node.inputs[1:], None, None)[:2]
    if low is not None and high is not None:
        return node
    bounds = [b for b in (low, high) if b is not None]
    operator = "Identity" if not bounds else "Max" if low is not None else "Min"
    version = {11: 8, 12: 12}.get(node.version, 13) if bounds else 1 if node.version < 13 else 13
    return Node(operator, [x, *bounds], node.outputs, version=version, name=node.name)


_IR_VERSIONS: Final = {
    "int4": 10, "uint4": 10, "float4_e2m1fn": 11, "float8_e8m0fnu": 12, "int2": 13, "uint2": 13,
}  # fmt: skip
_IR_VERSION: Final = 8
"""The version of the file format that has all but the dtypes above: libraries refuse a newer one by its number."""


def _oldest_ir_version(body: Graph) -> int:
    """The oldest version of the file format that has the dtypes of a graph."""
    values = {v for n in every_node(body) for v in (*n.inputs, *n.outputs) if v is not None}
    dtypes = {v.dtype.name for v in values.union(body.inputs, body.outputs) if v.dtype is not None}
    return max((_IR_VERSIONS.get(name, _IR_VERSION) for name in dtypes), default=_IR_VERSION)


def _tidy(graph: GraphProto, taken: set[str]) -> None:
    """Give nodes names of their own, and take out the types of inner values, which the library infers itself. Outputs
    that control flow leaves out get names: there are libraries that look for all of them."""
    del graph.value_info[:]
    for i, n in enumerate(graph.node):
        if n.name in taken:
            n.name = f"{n.name}#{i}" if f"{n.name}#{i}" not in taken else f"{n.name}#{len(taken)}"
        taken.add(n.name)
        for a in n.attribute:
            if a.HasField("g"):
                _tidy(a.g, taken)
                n.output[:] = [name or f"{n.name}/unread_{k}" for k, name in enumerate(n.output)]


def _elsewhere(array: np.ndarray, name: str, location: Mapping[str, str]) -> TensorProto:
    from onnx import TensorProto

    t = TensorProto(name=name, data_type=dtype_to_onnx(array.dtype), dims=array.shape)
    t.data_location = TensorProto.EXTERNAL
    for key, value in location.items():
        t.external_data.add(key=key, value=value)
    return t


_REMEMBERED: Final = 10_000


_LONG: Final = frozenset(("end", "ends", "ignore_index", "start", "starts", "value_int", "value_ints"))
"""Attributes of which large values are common, and read in 64 bits."""
_LEAST: Final = -(1 << 31)
_MOST: Final = (1 << 31) - 1


def _each(attribute: Any) -> tuple[Any, ...]:
    if isinstance(attribute, LongList):  # its least and its greatest say what all are like
        return (int(attribute.array.min()), int(attribute.array.max())) if attribute.kind == "ints" else ()
    return attribute if isinstance(attribute, tuple) else (attribute,)


def is_symbolic(node: Node) -> bool:
    """Whether a dimension of an input or output differs between calls (`Engine.dynamic_dims`)."""
    return any(isinstance(d, str) for v in (*node.inputs, *node.outputs) if v is not None for d in v.shape or ())


def is_open(node: Node) -> bool:
    """Whether only a run determines a dimension of an input or output (`Engine.open_shapes`)."""
    return are_open((*node.inputs, *node.outputs))


def has_whole_sizes(node: Node) -> bool:
    """Whether the known scales of a Resize (from version 11 on) make whole sizes: libraries differ in what they take
    for the last pixel where a size is rounded."""
    x, scales = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or x.shape is None or scales is None or scales.data is None:
        return False
    axes: Any = node.attributes.get("axes") or range(len(x.shape))
    if scales.data.size != len(axes):
        return False
    for axis, scale in zip(axes, map(float, scales.data.reshape(-1)), strict=True):
        size = x.shape[axis]
        if not scale.is_integer() and not (isinstance(size, int) and (size * scale).is_integer()):
            return False
    return True


def why_unfit(
    node: Node,
    engine: str,
    *,
    bodies: bool = False,
    symbolic: bool = False,
    open_shapes: Literal["none", "results", "any"] = "none",
) -> str | None:
    """Why a library of ONNX models cannot take `node`, whatever it computes; None where it might.

    Every input and output must be a tensor of known dtype and shape, whose dimensions may be symbolic only with
    `symbolic`, and unknown only as `open_shapes` says (`Engine.open_shapes`); the node must have no subgraphs unless
    the library is given those (`bodies`), and its integer attributes must fit into 32 bits, to which libraries cut them
    unseen.
    Within subgraphs values may have any type.
    """
    for what, values in (("input", node.inputs), ("output", node.outputs)):
        for v in values:
            if v is None:
                continue
            t = v.type
            known = type(t) is TensorType and t.dtype is not None and t.shape is not None
            if known and None in t.shape:  # type: ignore[union-attr, operator]
                known = open_shapes == "any" or (open_shapes == "results" and what == "output")
            elif known and not symbolic:
                known = t.is_static  # type: ignore[union-attr]
            if not known:
                return _unfit(v, f"{what} {v.name!r} of {node.operator}", engine)
    reason = _too_wide(node, engine)
    if reason is None and node.attributes and node.subgraphs:
        if not bodies:
            return f"{node.operator} has subgraphs, which XRT runs step by step with their parts on engines"
        return next((why for n in nodes_within(node) if (why := _too_wide(n, engine)) is not None), None)
    return reason


def _too_wide(node: Node, engine: str) -> str | None:
    for name, a in node.attributes.items():
        integers = _each(a)
        if name in _LONG or not integers or not isinstance(integers[0], int):
            continue
        wide = next((i for i in (min(integers), max(integers)) if not _LEAST <= i <= _MOST), None)
        if wide is not None:
            return f"{name} of {node.operator} has {wide}, which does not fit into the 32 bits that {engine} reads"
    return None


def why_not_within(node: Node, why_not: Callable[[Node], str | None]) -> str | None:
    """The first reason of `why_not` against a node in the subgraphs of `node`, or None."""
    for n in nodes_within(node) if node.attributes else ():
        reason = why_not(n)
        if reason is not None:
            return f"in the body of {node.operator}: {reason}"
    return None


class NodeTrials:
    """What a library says to models of single nodes, remembered.

    engine: its name, for messages. refusal: what the library says when it refuses a model, in one line, or None.
    newest_opset: as in `onnx_model`. May be asked from many threads.
    """

    def __init__(
        self, engine: str, refusal: Callable[[ModelProto], str | None], *, newest_opset: int | None = None
    ) -> None:
        self._engine = engine
        self._refusal = refusal
        self._newest_opset = newest_opset
        self._verdicts: dict[Hashable, str | None] = {}

    def why_not(self, node: Node) -> str | None:
        """Why the library does not take `node`, which `why_unfit` lets pass; None where it takes it.

        The first trial of a kind (operator, version, attributes, dtypes and ranks, which inputs are known) tells the
        library no sizes. What it refuses so is tried again with the sizes and known values of this very node: some
        operators are only taken with them.
        """
        if node.attributes and node.subgraphs:  # told apart by all that is in them
            alone = _alone(node, self._newest_opset)
            return self._verdict(alone.fingerprint, node, sizes=True)
        kind = (
            node.domain,
            node.op_type,
            node.version,
            tuple((name, frozen(a)) for name, a in node.attributes.items()),
            len(node.inputs),
            *(_kind(v) for v in (*node.inputs, *node.outputs)),
        )
        if self._verdict(kind, node, sizes=False) is None:
            return None
        return self._verdict((kind, *(_exact(v) for v in (*node.inputs, *node.outputs))), node, sizes=True)

    def _verdict(self, key: Hashable, node: Node, *, sizes: bool) -> str | None:
        try:
            return self._verdicts[key]
        except KeyError:
            verdict = self._trial(node, sizes)
        if len(self._verdicts) >= _REMEMBERED:
            self._verdicts.clear()
        self._verdicts[key] = verdict
        return verdict

    def _trial(self, node: Node, sizes: bool) -> str | None:
        try:
            function = _alone(node, self._newest_opset)
            model = onnx_model(function, engine=self._engine, newest_opset=self._newest_opset).model
        except XRTError as e:
            return f"{node.operator}-{node.version} does not export: {e}"
        if not sizes:
            for p in (*model.graph.input, *model.graph.output):
                for d in p.type.tensor_type.shape.dim:
                    d.Clear()
        refused = self._refusal(model)
        return None if refused is None else f"{self._engine} does not take {node.operator}-{node.version} so: {refused}"


def _alone(node: Node, opset: int | None) -> Function:
    """A function of the one node. Its small constants stay constants; every other input is a parameter."""
    entries: list[Value] = []
    captured: dict[Value, Value] = {}

    def entry(v: Value, name: str) -> Value:
        small = _is_small(v)
        type_ = v.type
        if isinstance(type_, TensorType) and None in (type_.shape or ()):
            dims = (f"d{name}_{i}" if d is None else d for i, d in enumerate(type_.shape or ()))
            type_ = TensorType(type_.dtype, tuple(dims))
        found = Value(f"c{name}" if small else f"x{name}", type_, v.data if small else None)
        if not small:
            entries.append(found)
        return found

    def outer(v: Value) -> Value:
        """What stands for a value that a subgraph captures."""
        if v not in captured:
            captured[v] = entry(v, f"_{len(captured)}")
        return captured[v]

    inputs = [None if v is None else entry(v, str(i)) for i, v in enumerate(node.inputs)]
    attributes = node.attributes
    if attributes and node.subgraphs:
        attributes = {k: _with_outer(a, outer) for k, a in attributes.items()}
    outputs = [None if v is None else Value(f"y{i}", v.type) for i, v in enumerate(node.outputs)]
    returned = [v for v in outputs if v is not None]
    opsets = {"": node.version if opset is None else opset}
    alone = node.replace(inputs=inputs, outputs=outputs, attributes=attributes)
    return Function.from_graph(Graph(entries, returned, [alone], opsets=opsets, name="trial"))


def _with_outer(attribute: Any, outer: Callable[[Value], Value]) -> Any:
    """A subgraph that reads `outer(v)` for a captured value or large constant `v`; another attribute as it is."""
    if not isinstance(attribute, Graph):
        return attribute
    captured = set(attribute.captures)

    def read(v: Value | None) -> Value | None:
        if v is None:
            return None
        return outer(v) if v in captured or (v.data is not None and not _is_small(v)) else v

    def kept(v: Value) -> Value:  # within a nested body: what is captured from this one stays
        found = read(v)
        assert found is not None
        return outer(v) if v.data is not None else found

    nodes = []
    for n in attribute.nodes:
        own = n.attributes
        if own and n.subgraphs:
            own = {k: _with_outer(a, kept) for k, a in own.items()}
        nodes.append(n.replace(inputs=[read(v) for v in n.inputs], attributes=own))
    return attribute.replace(nodes=nodes, outputs=[outer(v) if v in captured else v for v in attribute.outputs])


def _is_small(v: Value) -> bool:
    return v.data is not None and not is_large(v.data)


def _kind(v: Value | None) -> Hashable:
    return None if v is None else (v.dtype, len(v.shape or ()), _is_small(v))


def _exact(v: Value | None) -> Hashable:
    if v is None:
        return None
    return v.shape, frozen(v.data) if _is_small(v) else None


def frozen(attribute: Any) -> Hashable:
    """What tells an attribute, or a constant, from others, hashable."""
    if isinstance(attribute, np.ndarray):
        content = tuple(attribute.ravel().tolist()) if attribute.dtype == STRING else attribute.tobytes()
        return attribute.dtype, attribute.shape, content
    if isinstance(attribute, LongList):
        return attribute.kind, attribute.texts, attribute.array.tobytes()
    if isinstance(attribute, SparseTensor):
        return frozen(attribute.values), frozen(attribute.indices), attribute.dims
    if isinstance(attribute, tuple):
        kinds = set(map(type, attribute))
        if kinds in ({int}, {float}, {str}):
            return kinds.pop(), attribute
        return tuple(map(frozen, attribute))
    found: Hashable = attribute
    return type(attribute), found


def _unfit(value: Value, where: str, engine: str) -> str:
    t: Any = value.type
    if isinstance(t, SequenceType):
        return f"{where} is a sequence; {engine} gets tensors only"
    if not isinstance(t, TensorType):
        return f"{where} has type {t or 'unknown'}; {engine} gets dense tensors only"
    if t.dtype is None or t.shape is None:
        return f"{where} is {t}: dtype and rank must be known"
    return f"{where} is {t}: every dimension must be known"
