"""Value, Node and Graph: the one representation of a computation graph, frozen once built.

A pass takes a Graph and returns a Graph that shares what it left alone. Values carry no back-links, so a Node or a
Value may be in many graphs; a Graph computes the producer and the consumers of each value once, when asked.
Also here: metadata of nodes (`Annotations`), the answer to "is this node supported?" (`Support`), and the substitution
of values, by which passes rewire a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Union

import numpy as np
from msgspec import Struct

from xrt_core.errors import GraphError
from xrt_core.ir.long_list import LongList
from xrt_core.ir.types import Shape, SparseTensorType, TensorType, ValueType

if TYPE_CHECKING:
    from xrt_core.ir.function import Function

MARK: Final = "xrt.mark"
"""Key of an ONNX node's `metadata_props` that names the engine the node is marked for, or "host"."""
REGION: Final = "xrt.region"
"""Key beside MARK that tells regions of one engine apart; nodes of one label are one region."""

OPEN_REGION: Final = "data-dependent shapes"
"""The label of the region of nodes whose shapes depend on data, which are marked for the engine that takes them."""

DEVICE: Final = "xrt.device"
"""Key of an ONNX node's `metadata_props` that names the device the node is placed on."""

Phase = Literal["train", "inference"]
_NOTHING: Mapping[str, str] = MappingProxyType({})


class SourceLocation(Struct, frozen=True):
    """A line of the user's code that made a node."""

    filename: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, slots=True)
class Annotations:
    """Typed annotations of a node. None of them changes what the node computes.

    engine: name of the engine the node is marked for ("host" keeps it on the host; None: no mark).
    region: which marked region of that engine the node belongs to; nodes of one label are one region.
    device: device the node is placed on, such as "cpu" or "cuda:0".
    sbp, placement: SBP signature per output ("split(0)", "broadcast", "partial_sum") and the devices it spans.
    phase: training or inference, where a node belongs to only one.
    model_update: the node writes variables (an optimiser's update).
    aliases: pairs (output index, input index) that share storage.
    source: the line of the user's code.
    doc, metadata: ONNX `doc_string` and `metadata_props`.
    """

    engine: str | None = None
    region: str = ""
    device: str | None = None
    sbp: tuple[str, ...] | None = None
    placement: tuple[str, ...] | None = None
    phase: Phase | None = None
    model_update: bool = False
    aliases: tuple[tuple[int, int], ...] = ()
    source: SourceLocation | None = None
    doc: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    def replace(self, **changes: Any) -> Annotations:
        """A copy with some fields changed."""
        return replace(self, **changes)


NO_ANNOTATIONS = Annotations()


def engine_at(engine: str, device: str) -> str:
    """The name of an engine on a device other than its own: "engine@cpu:1"."""
    return f"{engine}@{device}"


def engine_and_device(name: str) -> tuple[str, str]:
    """The engine and the device of a name that `engine_at` made; the device is "" for an engine on its own device."""
    engine, _, device = name.partition("@")
    return engine, device


class Support(NamedTuple):
    """Whether something takes a node, and if not, why. Truthy when it does."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @staticmethod
    def yes() -> Support:
        """It is supported."""
        return _YES

    @staticmethod
    def no(reason: str) -> Support:
        """It is not supported, because of `reason` (a clause without a full stop)."""
        return Support(False, reason)


_YES: Final = Support(True)


_set = object.__setattr__
_NO_ATTRIBUTES: Final[Mapping[str, Any]] = MappingProxyType({})
_NO_DEFAULTS: Final[Mapping[Any, np.ndarray]] = MappingProxyType({})


class _Frozen:
    """Base of the IR's classes: attributes are set by the constructor and never again."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise GraphError(f"{type(self).__name__} is frozen: build a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise GraphError(f"{type(self).__name__} is frozen: {name!r} cannot be deleted")


class Value(_Frozen):
    """One edge of the graph: an input, a constant, or an output of a node. Identity, not name, tells values apart.

    name: unique within its graph where it is not empty; a label for messages and for export.
    type: what is known of its type, or None.
    data: the array, for a constant (never copied: it may be a memory map or the caller's buffer); None otherwise.
        Strings are object arrays.
    """

    __slots__ = ("data", "name", "type")
    name: str
    type: ValueType | None
    data: np.ndarray | None

    def __init__(self, name: str = "", type: ValueType | None = None, data: np.ndarray | None = None) -> None:
        _set(self, "name", name)
        _set(self, "type", type)
        _set(self, "data", data)

    @classmethod
    def constant(cls, data: np.ndarray, name: str = "") -> Value:
        """A constant holding `data` (not copied), with the type that the array has."""
        data = np.asanyarray(data)  # a NumPy scalar has dtype and shape, but is no array
        return cls(name, TensorType(data.dtype, data.shape), data)

    @property
    def dtype(self) -> np.dtype | None:
        """Element dtype of a tensor, None where unknown or not a tensor."""
        t = self.type
        return t.dtype if isinstance(t, TensorType) else None

    @property
    def shape(self) -> Shape | None:
        """Shape of a tensor, None where the rank is unknown or the value is not a tensor."""
        t = self.type
        return t.shape if isinstance(t, TensorType) else None

    @property
    def is_constant(self) -> bool:
        """Whether the value is known now."""
        return self.data is not None

    @property
    def is_static(self) -> bool:
        """Whether the value is a tensor whose dtype and every dimension are known."""
        t = self.type
        return isinstance(t, TensorType) and t.is_static

    def with_type(self, type: ValueType | None) -> Value:
        """A new value of the same name and data with another type."""
        return Value(self.name, type, self.data)

    def __repr__(self) -> str:
        return f"<Value {self.name or '(unnamed)'}: {self.type or '?'}{' = const' if self.is_constant else ''}>"


class SparseTensor:
    """A constant sparse tensor attribute (COO: values, indices, dense shape), as `SparseTensorProto` holds it."""

    __slots__ = ("dims", "indices", "values")

    def __init__(self, values: np.ndarray, indices: np.ndarray, dims: tuple[int, ...]) -> None:
        self.values, self.indices, self.dims = values, indices, dims

    @property
    def type(self) -> SparseTensorType:
        """The type of the tensor."""
        return SparseTensorType(self.values.dtype, self.dims)


Attribute = Union[
    int, float, str, bytes, np.ndarray, SparseTensor, ValueType, "Graph", "Function", tuple[Any, ...], LongList
]  # a tuple holds one kind: ints, floats, strings, bytes, arrays, types or graphs; a LongList stands for a long one


class Node(_Frozen):
    """One operator applied to values.

    domain, op_type: the operator; "" is the ONNX domain, "xrt" the dialect of the project.
    version: the `since_version` of the schema this node follows (a model of opset 11 has Softmax 11, not 13).
    inputs, outputs: tuples of Value; None stands for an optional one that is left out.
    attributes: name -> Attribute; subgraphs are Graphs whose nodes may use values of the enclosing graph.
    name: a label; annotations: see `Annotations`.
    """

    __slots__ = ("annotations", "attributes", "domain", "inputs", "name", "op_type", "outputs", "version")
    domain: str
    op_type: str
    version: int
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    attributes: Mapping[str, Attribute]
    name: str
    annotations: Annotations

    def __init__(
        self,
        op_type: str,
        inputs: Iterable[Value | None],
        outputs: Iterable[Value | None],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        domain: str = "",
        version: int,
        name: str = "",
        annotations: Annotations = NO_ANNOTATIONS,
    ) -> None:
        _set(self, "domain", domain)
        _set(self, "op_type", op_type)
        _set(self, "version", version)
        _set(self, "inputs", tuple(inputs))
        _set(self, "outputs", tuple(outputs))
        _set(self, "attributes", attributes or _NO_ATTRIBUTES)
        _set(self, "name", name)
        _set(self, "annotations", annotations)

    @property
    def subgraphs(self) -> tuple[Graph, ...]:
        """The graphs among the attributes, in attribute order."""
        if not self.attributes:
            return ()
        found: list[Graph] = []
        for a in self.attributes.values():
            if isinstance(a, Graph):
                found.append(a)
            elif type(a) is tuple and a and isinstance(a[0], Graph):
                found.extend(a)
        return tuple(found)

    @property
    def captures(self) -> tuple[Value, ...]:
        """Non-constant values of enclosing graphs that the subgraphs use: implicit inputs, in order of first use."""
        subgraphs = self.subgraphs
        if not subgraphs:
            return ()
        return tuple(dict.fromkeys(v for g in subgraphs for v in g.captures))

    def uses(self) -> Iterator[Value]:
        """Every value this node reads, implicit ones included; one read twice comes twice."""
        for v in self.inputs:
            if v is not None:
                yield v
        if self.attributes:
            yield from self.captures

    def replace(
        self,
        *,
        inputs: Iterable[Value | None] | None = None,
        outputs: Iterable[Value | None] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        annotations: Annotations | None = None,
        name: str | None = None,
    ) -> Node:
        """A copy with some parts changed."""
        return Node(
            self.op_type,
            self.inputs if inputs is None else inputs,
            self.outputs if outputs is None else outputs,
            self.attributes if attributes is None else attributes,
            domain=self.domain,
            version=self.version,
            name=self.name if name is None else name,
            annotations=self.annotations if annotations is None else annotations,
        )

    @property
    def operator(self) -> str:
        """The operator with its domain, as 'Relu' or 'ai.onnx.ml.Scaler'."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    def __repr__(self) -> str:
        ins = ", ".join("_" if v is None else v.name or "?" for v in self.inputs)
        outs = ", ".join("_" if v is None else v.name or "?" for v in self.outputs)
        return f"<Node {self.name or ''} {outs} = {self.operator}({ins})>"


class Graph(_Frozen):
    """A directed acyclic graph in single-assignment form; every value has one producer at most.

    nodes stand in a topological order (the verifier checks it; `dag.topological_sort` makes one). Constants are
    values with data: they have no producer and belong to no list. A subgraph may use values of the graphs around it.

    inputs: values the caller gives; one that has an entry in `defaults` may be left out.
    outputs: values returned; the same value may be returned twice, and inputs and constants may be returned.
    opsets: domain -> version that the graph was written against (each node's `version` is what counts).
    defaults: graph input -> array ("initialisers that are also inputs").

    Producer, consumer and capture tables are computed at first use, in time linear in nodes and edges, and kept.
    """

    __slots__ = ("_tables", "defaults", "doc", "inputs", "metadata", "name", "nodes", "opsets", "outputs")
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    opsets: Mapping[str, int]
    defaults: Mapping[Value, np.ndarray]
    doc: str
    metadata: Mapping[str, str]
    _tables: dict[str, Any]

    def __init__(
        self,
        inputs: Iterable[Value],
        outputs: Iterable[Value],
        nodes: Iterable[Node],
        *,
        opsets: Mapping[str, int],
        name: str = "",
        defaults: Mapping[Value, np.ndarray] | None = None,
        doc: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        _set(self, "name", name)
        _set(self, "inputs", tuple(inputs))
        _set(self, "outputs", tuple(outputs))
        _set(self, "nodes", tuple(nodes))
        _set(self, "opsets", opsets)
        _set(self, "defaults", defaults or _NO_DEFAULTS)
        _set(self, "doc", doc)
        _set(self, "metadata", metadata or _NO_ATTRIBUTES)
        _set(self, "_tables", {})

    def replace(
        self,
        *,
        inputs: Iterable[Value] | None = None,
        outputs: Iterable[Value] | None = None,
        nodes: Iterable[Node] | None = None,
        defaults: Mapping[Value, np.ndarray] | None = None,
        opsets: Mapping[str, int] | None = None,
    ) -> Graph:
        """A copy with some parts changed."""
        return Graph(
            self.inputs if inputs is None else inputs,
            self.outputs if outputs is None else outputs,
            self.nodes if nodes is None else nodes,
            opsets=self.opsets if opsets is None else opsets,
            name=self.name,
            defaults=self.defaults if defaults is None else defaults,
            doc=self.doc,
            metadata=self.metadata,
        )

    @property
    def producers(self) -> Mapping[Value, int]:
        """Value -> index of the node that makes it; inputs, constants and captured values are not in it."""
        table = self._tables.get("producers")
        if table is None:
            table = {v: i for i, n in enumerate(self.nodes) for v in n.outputs if v is not None}
            self._tables["producers"] = table
        return table

    @property
    def consumers(self) -> Mapping[Value, Sequence[int]]:
        """Value -> indices of the nodes that read it, ascending, each once; unused values are not in it."""
        table = self._tables.get("consumers")
        if table is None:
            table = {}
            for i, n in enumerate(self.nodes):
                for v in n.uses():
                    users = table.get(v)
                    if users is None:
                        table[v] = [i]
                    elif users[-1] != i:
                        users.append(i)
            self._tables["consumers"] = table
        return table

    @property
    def predecessors(self) -> Sequence[Sequence[int]]:
        """For each node the indices of the nodes it depends on, each once, in order of use."""
        table = self._tables.get("predecessors")
        if table is None:
            get = self.producers.get
            table = []
            for n in self.nodes:
                found = [p for v in n.uses() if (p := get(v)) is not None]
                table.append(list(dict.fromkeys(found)) if len(found) > 1 else found)
            self._tables["predecessors"] = table
        return table

    @property
    def successors(self) -> Sequence[Sequence[int]]:
        """For each node the indices of the nodes that depend on it, ascending, each once."""
        table = self._tables.get("successors")
        if table is None:
            table = [[] for _ in self.nodes]
            for i, preds in enumerate(self.predecessors):
                for p in preds:
                    table[p].append(i)
            self._tables["successors"] = table
        return table

    @property
    def captures(self) -> tuple[Value, ...]:
        """Non-constant values of enclosing graphs that this graph uses, in order of first use."""
        table = self._tables.get("captures")
        if table is None:
            own = self.producers
            inputs = set(self.inputs)
            used = dict.fromkeys(v for n in self.nodes for v in n.uses())
            used.update(dict.fromkeys(self.outputs))
            table = tuple(v for v in used if v.data is None and v not in own and v not in inputs)
            self._tables["captures"] = table
        return table

    @property
    def constants(self) -> tuple[Value, ...]:
        """Constants that nodes of this graph or its outputs use (not those inside subgraphs), in order of first use."""
        used = dict.fromkeys(v for n in self.nodes for v in n.inputs if v is not None and v.data is not None)
        used.update(dict.fromkeys(v for v in self.outputs if v.data is not None))
        return tuple(used)

    def producer(self, value: Value) -> Node | None:
        """The node that makes `value`, or None for inputs, constants and captured values."""
        i = self.producers.get(value)
        return None if i is None else self.nodes[i]

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {len(self.inputs)} in, {len(self.nodes)} nodes, {len(self.outputs)} out>"

    def __str__(self) -> str:
        from xrt_core.ir.text import graph_text

        return graph_text(self)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from xrt_core.ir.text import as_html

        return as_html(self)


def is_placed(graph: Graph) -> bool:
    """Whether any node, those of subgraphs aside, is annotated with a device."""
    return any(n.annotations is not NO_ANNOTATIONS and n.annotations.device is not None for n in graph.nodes)


def are_open(values: Iterable[Value | None]) -> bool:
    """Whether only a run determines a dimension of some of these values, of which the rank is known."""
    for v in values:
        t = None if v is None else v.type
        if isinstance(t, TensorType) and t.shape is not None and None in t.shape:
            return True
    return False


def in_open_region(graph: Graph) -> bool:
    """Whether the nodes of a cluster are those that an engine takes although their shapes depend on data."""
    return any(n.annotations.region == OPEN_REGION for n in graph.nodes)


def every_node(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph and of its subgraphs."""
    for node in graph.nodes:
        yield node
        yield from nodes_within(node)


def nodes_within(node: Node) -> Iterator[Node]:
    """The nodes of a node's subgraphs, and of theirs."""
    for body in node.subgraphs:
        yield from every_node(body)


Substitution = Mapping[Value, Value]


def substitute(node: Node, new: Substitution) -> Node:
    """`node` reading `new[v]` where it read `v`, also inside its subgraphs; `node` itself where nothing changes."""
    inputs = node.inputs
    changed = False
    for v in inputs:
        if v in new:
            inputs = tuple(v if v is None else new.get(v, v) for v in node.inputs)
            changed = True
            break
    attributes = node.attributes
    if attributes and node.subgraphs and any(v in new for v in node.captures):
        attributes = {k: _substitute_attribute(a, new) for k, a in attributes.items()}
        changed = True
    return node.replace(inputs=inputs, attributes=attributes) if changed else node


def substitute_graph(graph: Graph, new: Substitution) -> Graph:
    """A subgraph reading `new[v]` where it captured `v`; the graph itself where it captures nothing that changed."""
    if not any(v in new for v in graph.captures):
        return graph
    nodes = [substitute(n, new) for n in graph.nodes]
    return graph.replace(nodes=nodes, outputs=[new.get(v, v) for v in graph.outputs])


def _substitute_attribute(a: Attribute, new: Substitution) -> Attribute:
    if isinstance(a, Graph):
        return substitute_graph(a, new)
    if type(a) is tuple and a and isinstance(a[0], Graph):
        return tuple(substitute_graph(g, new) for g in a)
    return a


def bind_defaults(graph: Graph, given: Collection[int] = ()) -> Graph:
    """The graph with the defaults of its inputs made constants, except those of the inputs in `given` (by index).

    The bound inputs are gone; inputs in `given` are plain inputs, without a default.
    """
    if not graph.defaults:
        return graph
    bound = {
        v: Value.constant(graph.defaults[v], v.name)
        for i, v in enumerate(graph.inputs)
        if v in graph.defaults and i not in given
    }
    nodes = [substitute(n, bound) for n in graph.nodes]
    outputs = [bound.get(v, v) for v in graph.outputs]
    return graph.replace(inputs=[v for v in graph.inputs if v not in bound], outputs=outputs, nodes=nodes, defaults={})


def closed(graph: Graph) -> Graph:
    """A subgraph with the values it captures made inputs, after its own inputs, in order of first use."""
    captures = graph.captures
    if not captures:
        return graph
    names = {v.name for v in graph.inputs}
    renamed: dict[Value, Value] = {}
    for v in captures:  # a value of the graph around may have the name of one of the subgraph's own inputs
        if v.name and v.name in names:
            renamed[v] = Value("", v.type)
        names.add(v.name)
    graph = substitute_graph(graph, renamed) if renamed else graph
    return graph.replace(inputs=(*graph.inputs, *[renamed.get(v, v) for v in captures]))


def attribute_key(node: Node, limit: int = 4096) -> Any:
    """A hashable key of the node's attributes, or None where they hold graphs, or arrays or lists over `limit`
    elements."""
    import numpy as np

    if not node.attributes:
        return ()
    parts = []
    for name, a in sorted(node.attributes.items()):
        if isinstance(a, np.ndarray):
            if a.size > limit:
                return None
            a = (a.dtype, a.shape, tuple(a.reshape(-1)) if a.dtype == object else a.tobytes())
        elif (type(a) is tuple or type(a) is LongList) and len(a) > limit:
            return None
        elif isinstance(a, LongList):
            a = (a.kind, a.texts, a.array.tobytes())
        elif isinstance(a, float) or (type(a) is tuple and a and isinstance(a[0], float)):
            a = repr(a)  # 0.0 and -0.0 are equal, and not the same
        parts.append((name, type(a), a))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return None if node.subgraphs else key
