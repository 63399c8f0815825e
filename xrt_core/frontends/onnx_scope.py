"""Name resolution in ONNX models: scopes, the context in which nodes are read, and topological sorting by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from onnx import AttributeProto, GraphProto, NodeProto

from xrt_core.errors import GraphError, ModelLoadError
from xrt_core.ir.dag import sort_indices
from xrt_core.ir.graph import NO_ANNOTATIONS, Annotations, Attribute, Value
from xrt_core.ir.schema import Schema, domain_versions, normal_domain

FUNCTION: Final = "xrt.function"
"""Key of a node's metadata that names the model-local function it was inlined from."""

OPSET_DOMAIN: Final = "xrt.opset"
"""Domain of the functions that export wraps around nodes of another opset; import inlines them without a trace."""

FunctionKey = tuple[str, str, str]


class Unresolved(Exception):
    """A node reads a name that is not defined yet; it may be defined later, in this graph or an enclosing one."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Operator(NamedTuple):
    """The fields of a schema that reading a node needs."""

    version: int
    min_inputs: int
    max_inputs: int
    min_outputs: int
    max_outputs: int
    required: str
    schema: Schema


class Scope:
    """Names visible in a graph: its own, then those of enclosing graphs. The empty name is an absent input."""

    __slots__ = ("names", "parent")

    def __init__(self, names: dict[str, Value | None], parent: Scope | None) -> None:
        self.names = names
        self.parent = parent

    def find(self, name: str) -> Value | None:
        """Return the value of a name, from this graph or an enclosing one. Raises KeyError."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        raise KeyError(name)


class Context:
    """The origin of the nodes being read: the model itself, or one call of a function."""

    __slots__ = ("annotations", "calls", "inlined", "marks", "operators", "opsets", "prefix", "references", "renames")

    def __init__(
        self,
        opsets: Mapping[str, int],
        operators: dict[tuple[str, str], Operator],
        *,
        prefix: str = "",
        calls: tuple[FunctionKey, ...] = (),
        references: Mapping[str, tuple[int, Attribute]] | None = None,
        renames: Mapping[str, str] = MappingProxyType({}),
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.opsets = opsets
        self.operators = operators
        self.prefix = prefix
        self.calls = calls
        self.references = references
        self.renames = renames
        self.inlined = bool(calls)
        trail = "/".join(f"{d}::{n}" for d, n, _ in calls if d != OPSET_DOMAIN)
        own = {**marks, FUNCTION: trail} if trail else marks
        self.annotations = Annotations(metadata=own) if own else NO_ANNOTATIONS
        self.marks = marks


def text(found: str | bytes) -> str:
    """Decode documentation: protobuf returns bytes for a string that is not UTF-8; it is accepted all the same."""
    return found if isinstance(found, str) else found.decode("utf-8", "backslashreplace")


def node_label(p: NodeProto) -> str:
    """Return the description of a node for messages."""
    label = f"{p.domain}.{p.op_type}" if p.domain else p.op_type
    if p.name:
        return f"node {p.name!r} ({label})"
    return f"node {label} that makes {list(p.output)}"


def wrong_arity(p: NodeProto, what: str, count: int, low: int, high: int) -> str:
    """Return the message for a node with too few or too many inputs or outputs."""
    if low == high:
        expected = str(low)
    else:
        expected = f"{low} or more" if high >= 2**31 - 1 else f"{low} to {high}"
    return f"{node_label(p)}: {count} {what}s, but the operator takes {expected}"


def made_twice(p: NodeProto, name: str) -> ModelLoadError:
    """Return the error for an output whose name is already defined in its graph."""
    return ModelLoadError(f"{node_label(p)}: output {name!r} is already made by another node, input or constant")


def missing_attribute(p: NodeProto, name: str) -> ModelLoadError:
    """Return the error for a node without an attribute that its operator requires."""
    return ModelLoadError(f"{node_label(p)}: the required attribute {name!r} is missing")


def resolve(p: NodeProto, scope: Scope) -> list[Value | None]:
    """Return the values a node reads. Raises Unresolved for a name that is not defined yet."""
    found: list[Value | None] = []
    for n in p.input:
        try:
            found.append(scope.find(n))
        except KeyError:
            message = f"{node_label(p)}: input {n!r} is made by no node and is no input or constant"
            raise Unresolved(n, message) from None
    return found


def in_order(protos: Sequence[NodeProto]) -> list[int] | None:
    """Return a topological order of the nodes, or None if they are sorted already.

    Raises ModelLoadError for a cycle.
    """
    producer: dict[str, int] = {}
    for i, p in enumerate(protos):
        producer.update((n, i) for n in p.output if n)
    used = []
    for p in protos:
        free = dict.fromkeys(n for n in p.input if n)
        for a in p.attribute:
            free_names(a, free)
        used.append([producer[n] for n in free if n in producer])
    try:
        order = sort_indices(used, lambda i: protos[i].name or f"{protos[i].op_type} -> {list(protos[i].output)}")
    except GraphError as e:
        raise ModelLoadError(str(e)) from None
    return None if order == list(range(len(order))) else order


def names_in(g: GraphProto, into: set[str]) -> None:
    """Add every name that a graph and its subgraphs define."""
    into.update(p.name for p in g.input)
    into.update(t.name for t in g.initializer)
    into.update(s.values.name for s in g.sparse_initializer)
    for p in g.node:
        into.update(p.output)
        for a in p.attribute:
            if a.type == AttributeProto.GRAPH:
                names_in(a.g, into)
            elif a.type == AttributeProto.GRAPHS:
                for inner in a.graphs:
                    names_in(inner, into)


def free_names(a: AttributeProto, into: dict[str, None]) -> None:
    """Add the free names of the subgraphs of an attribute."""
    if a.type == AttributeProto.GRAPH:
        graph_free_names(a.g, into)
    elif a.type == AttributeProto.GRAPHS:
        for g in a.graphs:
            graph_free_names(g, into)


def graph_free_names(g: GraphProto, into: dict[str, None]) -> None:
    """Add the free names of a graph: those it uses but does not define."""
    own = {p.name for p in g.input}
    own.update(t.name for t in g.initializer)
    own.update(s.values.name for s in g.sparse_initializer)
    used: dict[str, None] = {}
    for p in g.node:
        own.update(p.output)
        used.update(dict.fromkeys(p.input))
        for a in p.attribute:
            free_names(a, used)
    used.update(dict.fromkeys(p.name for p in g.output))
    into.update((n, None) for n in used if n and n not in own)


def check_opsets(proto: Any) -> dict[str, int]:
    """Return the opsets that a ModelProto or FunctionProto imports, by domain.

    Raises ModelLoadError if one is newer than the installed `onnx` package supports.
    """
    opsets: dict[str, int] = {}
    known = domain_versions()
    for o in proto.opset_import:
        domain = normal_domain(o.domain)
        if opsets.setdefault(domain, o.version) != o.version:
            both = f"{opsets[domain]} and {o.version}"
            raise ModelLoadError(f"domain {domain or 'ai.onnx'!r} is imported with two opsets: {both}")
    if not opsets:
        raise ModelLoadError("no opset is imported; this is not an ONNX model, or one older than opset 7")
    for domain, version in opsets.items():
        label = domain or "ai.onnx"
        if domain in known and version > known[domain]:
            raise ModelLoadError(
                f"opset {version} of {label} is newer than {known[domain]}, the newest that the installed onnx package "
                f"knows; upgrade onnx"
            )
        if version < 1:
            raise ModelLoadError(f"opset {version} of {label} is imported; opsets begin at 1")
    return opsets
