"""Reader: walks the protobufs of one model and builds the IR, inlining model-local functions on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from xrt_core.errors import GraphError, ModelLoadError
from xrt_core.frontends.onnx_constants import constant_array, dense, free_names
from xrt_core.frontends.onnx_file import ExternalData
from xrt_core.frontends.onnx_wire import Weights
from xrt_core.ir.annotations import NO_ANNOTATIONS, Annotations
from xrt_core.ir.dag import sort_indices
from xrt_core.ir.graph import Attribute, Graph, Node, SparseTensor, Value
from xrt_core.ir.onnx_proto import (
    array_from_bytes,
    array_from_tensor,
    attribute_from_proto,
    dtype_from_onnx,
    type_from_proto,
)
from xrt_core.ir.schema import ATTRIBUTE_KINDS, MINIMUM_OPSET, Schema, find_schema, normal_domain, why_unknown
from xrt_core.ir.types import STRING, OptionalType, SequenceType, TensorType, ValueType

FUNCTION: Final = "xrt.function"
"""Key of a node's metadata that names the model-local function it was inlined from."""

DECLARED: Final = "xrt.declared_type/"
"""Prefix of the graph's metadata keys that keep the type a file declares for an output, which may be wrong."""

OPSET_DOMAIN: Final = "xrt.opset"
"""Domain of the functions that export writes around nodes of another opset; inlining them leaves no trace."""

MAX_INLINED: Final = 5_000_000  # nodes; functions that call functions can grow exponentially

_INT, _INTS = AttributeProto.INT, AttributeProto.INTS
_FLOAT, _STRING, _TENSOR = AttributeProto.FLOAT, AttributeProto.STRING, AttributeProto.TENSOR
_GRAPH, _GRAPHS, _SPARSE = AttributeProto.GRAPH, AttributeProto.GRAPHS, AttributeProto.SPARSE_TENSOR
_TENSORS, _UNDEFINED = AttributeProto.TENSORS, AttributeProto.UNDEFINED

FunctionKey = tuple[str, str, str]


class _Unresolved(Exception):
    """A node reads a name that nothing before it makes; it may come later in this graph or in one around it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class _Operator(NamedTuple):
    """What the node loop needs of a schema."""

    version: int
    min_inputs: int
    max_inputs: int
    min_outputs: int
    max_outputs: int
    schema: Schema


class _Scope:
    """Names visible in a graph: its own, then those of the graphs around it. The empty name is an absent input."""

    __slots__ = ("names", "parent")

    def __init__(self, names: dict[str, Value | None], parent: _Scope | None) -> None:
        self.names = names
        self.parent = parent

    def find(self, name: str) -> Value | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        raise KeyError(name)


class _Context:
    """Where nodes are read from: the model itself, or one call of a function."""

    __slots__ = ("annotations", "calls", "inlined", "operators", "opsets", "prefix", "references", "renames")

    def __init__(
        self,
        opsets: Mapping[str, int],
        operators: dict[tuple[str, str], _Operator],
        *,
        prefix: str = "",
        calls: tuple[FunctionKey, ...] = (),
        references: Mapping[str, tuple[int, Attribute]] | None = None,
        renames: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.opsets = opsets
        self.operators = operators
        self.prefix = prefix
        self.calls = calls
        self.references = references
        self.renames = renames
        self.inlined = bool(calls)
        trail = "/".join(f"{d}::{n}" for d, n, _ in calls if d != OPSET_DOMAIN)
        self.annotations = Annotations(metadata={FUNCTION: trail}) if trail else NO_ANNOTATIONS


class Reader:
    """Builds the Graph of one ModelProto. `weights` resolves markers, `external` resolves external data."""

    def __init__(
        self, model: ModelProto, opsets: Mapping[str, int], weights: Weights | None, external: ExternalData
    ) -> None:
        self._model = model
        self._weights = weights
        self._external = external
        self._context = _Context(opsets, {})
        self._functions: dict[FunctionKey, FunctionProto] = {}
        self._function_operators: dict[FunctionKey, tuple[dict[str, int], dict[tuple[str, str], _Operator]]] = {}
        self._taken: set[str] | None = None
        self._inlined = 0
        for f in model.functions:
            key = (normal_domain(f.domain), f.name, f.overload)
            if key in self._functions:
                raise ModelLoadError(f"function {f.name!r} of domain {f.domain!r} is defined twice")
            self._functions[key] = f

    def main(self) -> Graph:
        """The model's graph."""
        try:
            return self._graph(self._model.graph, self._context, None)
        except _Unresolved as e:
            raise ModelLoadError(str(e)) from None

    # --- graphs ---

    def _graph(self, g: GraphProto, context: _Context, parent: _Scope | None) -> Graph:
        base: dict[str, Value | None] = {"": None}
        initialisers = self._initialisers(g)
        inputs: list[Value] = []
        defaults: dict[Value, np.ndarray] = {}
        for i, p in enumerate(g.input):
            name = p.name
            if not name:
                raise ModelLoadError(f"input {i} of graph {g.name!r} has no name")
            if name in base:
                raise ModelLoadError(f"graph {g.name!r} has two inputs named {name!r}")
            value = Value(self._label(name, context), type_from_proto(p.type, f"input {name!r}"))
            base[name] = value
            inputs.append(value)
            if name in initialisers:
                defaults[value] = initialisers.pop(name)
        for name, array in initialisers.items():
            base[name] = Value(self._label(name, context), TensorType(array.dtype, array.shape), array)
        types = {p.name: t for p in g.value_info if (t := _hint(p)) is not None}
        types.update((p.name, t) for p in g.output if (t := _hint(p)) is not None)

        nodes: list[Node] = []
        scope = _Scope(dict(base), parent)
        where = f"graph {g.name!r}"
        try:
            self._nodes(g.node, scope, context, types, nodes)
        except _Unresolved:
            order = _in_order(g.node)
            if order is None:  # nothing out of order here: the name is dangling, or the graph around has it later
                raise
            nodes.clear()
            scope = _Scope(dict(base), parent)
            self._nodes([g.node[i] for i in order], scope, context, types, nodes)
        outputs: list[Value] = []
        for i, p in enumerate(g.output):
            try:
                found = scope.find(p.name)
            except KeyError:
                message = f"output {p.name!r} of {where} is made by no node and is no input or constant"
                raise _Unresolved(p.name, message) from None
            if found is None:
                raise ModelLoadError(f"output {i} {p.name!r} of {where} is absent")
            outputs.append(found)
        metadata = {p.key: p.value for p in g.metadata_props}
        if parent is None:
            for p in g.output:
                declared = type_from_proto(p.type, f"output {p.name!r}")
                if isinstance(declared, TensorType) and declared.shape is not None:
                    metadata[DECLARED + p.name] = str(declared)
        return Graph(
            inputs, outputs, nodes,
            opsets=context.opsets, name=g.name, defaults=defaults, doc=g.doc_string, metadata=metadata,
        )  # fmt: skip

    def _initialisers(self, g: GraphProto) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for t in g.initializer:
            if not t.name:
                raise ModelLoadError(f"an initialiser of graph {g.name!r} has no name")
            if t.name in found:
                raise ModelLoadError(f"initialiser {t.name!r} of graph {g.name!r} is defined twice")
            found[t.name] = self._array(t, f"initialiser {t.name!r}")
        for s in g.sparse_initializer:
            name = s.values.name
            if not name or name in found:
                raise ModelLoadError(f"sparse initialiser {name!r} of graph {g.name!r} has no name of its own")
            found[name] = self._dense(s, f"sparse initialiser {name!r}")
        return found

    # --- nodes ---

    def _nodes(
        self,
        protos: Iterable[NodeProto],
        scope: _Scope,
        context: _Context,
        types: Mapping[str, ValueType],
        out: list[Node],
    ) -> None:
        names = scope.names
        operators = context.operators
        functions = self._functions
        inherited = context.annotations
        labelled = context.inlined
        for p in protos:
            op_type, domain = p.op_type, p.domain
            if functions:
                key = (normal_domain(domain), op_type, p.overload)
                if key in functions:
                    self._call(p, key, scope, context, types, out)
                    continue
            operator = operators.get((domain, op_type))
            if operator is None:
                operator = operators[domain, op_type] = self._operator(p, context)
            try:
                inputs = [names[n] for n in p.input]
            except KeyError:
                inputs = _resolve(p, scope)
            count = len(inputs)
            if not operator.min_inputs <= count <= operator.max_inputs:
                raise ModelLoadError(_wrong_arity(p, "input", count, operator.min_inputs, operator.max_inputs))
            while count > operator.min_inputs and inputs[-1] is None:
                inputs.pop()
                count -= 1
            attributes = self._attributes(p, operator.schema, scope, context) if p.attribute else None
            if attributes is None and operator.schema.required_attributes:
                raise _missing_attribute(p, operator.schema.required_attributes[0])
            if op_type == "Constant" and operator.schema.domain == "":
                self._constant(p, attributes or {}, scope, context)
                continue
            outputs: list[Value | None] = []
            for n in p.output:
                if n in names:
                    if n:
                        raise ModelLoadError(f"{_node(p)}: output {n!r} is already made by another node, input or constant")
                    outputs.append(None)
                    continue
                value = Value(self._label(n, context) if labelled else n, types.get(n))
                names[n] = value
                outputs.append(value)
            count = len(outputs)
            if not operator.min_outputs <= count <= operator.max_outputs:
                raise ModelLoadError(_wrong_arity(p, "output", count, operator.min_outputs, operator.max_outputs))
            annotations = inherited
            doc, properties = p.doc_string, p.metadata_props
            if doc or properties:
                metadata = {**{e.key: e.value for e in properties}, **inherited.metadata}
                annotations = Annotations(doc=doc, metadata=metadata)
            out.append(
                Node(
                    op_type,
                    inputs,
                    outputs,
                    attributes,
                    domain=operator.schema.domain,
                    version=operator.version,
                    name=context.prefix + p.name if labelled else p.name,
                    annotations=annotations,
                )
            )

    def _operator(self, p: NodeProto, context: _Context) -> _Operator:
        domain = normal_domain(p.domain)
        opset = context.opsets.get(domain)
        if opset is None:
            imported = ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in context.opsets.items())
            raise ModelLoadError(
                f"{_node(p)}: domain {domain or 'ai.onnx'!r} is not imported (imported: {imported}) and no function of "
                f"the model defines the operator"
            )
        s = find_schema(p.op_type, domain, opset)
        if s is None:
            raise ModelLoadError(f"{_node(p)}: {why_unknown(p.op_type, domain, opset)}")
        if domain == "" and opset < MINIMUM_OPSET:
            newer = find_schema(p.op_type, domain, MINIMUM_OPSET)
            if newer is None or newer.since_version != s.since_version:
                raise ModelLoadError(
                    f"{_node(p)}: the model is of opset {opset}, where this operator is another one than at opset "
                    f"{MINIMUM_OPSET}, the oldest that XRT takes; convert the model with onnx.version_converter"
                )
        return _Operator(s.since_version, s.min_inputs, s.max_inputs, s.min_outputs, s.max_outputs, s)

    def _constant(self, p: NodeProto, attributes: Mapping[str, Attribute], scope: _Scope, context: _Context) -> None:
        name = p.output[0] if len(p.output) == 1 else ""
        if not name:
            raise ModelLoadError(f"{_node(p)}: a Constant has one named output, not {list(p.output)}")
        if name in scope.names:
            raise ModelLoadError(f"{_node(p)}: output {name!r} is already made by another node, input or constant")
        array = constant_array(attributes, _node(p))
        scope.names[name] = Value(self._label(name, context), TensorType(array.dtype, array.shape), array)

    # --- functions ---

    def _call(
        self,
        p: NodeProto,
        key: FunctionKey,
        scope: _Scope,
        context: _Context,
        types: Mapping[str, ValueType],
        out: list[Node],
    ) -> None:
        f = self._functions[key]
        if key in context.calls:
            path = " -> ".join(n for _, n, _ in (*context.calls, key))
            raise ModelLoadError(f"{_node(p)}: function {f.name!r} calls itself ({path}); recursion is not allowed")
        given = _resolve(p, scope)
        if len(given) > len(f.input) or len(p.output) > len(f.output):
            raise ModelLoadError(
                f"{_node(p)}: function {f.name!r} takes {len(f.input)} inputs and gives {len(f.output)} outputs, "
                f"but is called with {len(given)} and {len(p.output)}"
            )
        given += [None] * (len(f.input) - len(given))
        opsets, operators = self._of_function(key)
        references = {a.name: (a.type, self._attribute(a, a.type, scope, context, _node(p))) for a in f.attribute_proto}
        known = {*references, *f.attribute}
        for a in p.attribute:
            if a.name not in known:
                raise ModelLoadError(
                    f"{_node(p)}: function {f.name!r} has no attribute {a.name!r}; it has {sorted(known) or 'none'}"
                )
            found = self._referenced(a, scope, context, _node(p))
            if found is not None:
                references[a.name] = found
        finals = {
            inner: self._label(outer, context) for inner, outer in zip(f.output, p.output, strict=False) if outer
        }
        prefix = context.prefix if key[0] == OPSET_DOMAIN else f"{context.prefix}{p.name or f.name}/"
        inside = _Context(
            opsets, operators, prefix=prefix, calls=(*context.calls, key), references=references, renames=finals
        )
        body = _Scope({"": None}, None)
        for name, value in zip(f.input, given, strict=True):
            if name in body.names:
                raise ModelLoadError(f"function {f.name!r} has two inputs named {name!r}")
            body.names[name] = value
        before = len(out)
        hints = {i: t for i, o in zip(f.output, p.output, strict=False) if (t := types.get(o)) is not None}
        where = f"function {f.name!r}"
        try:
            try:
                self._nodes(f.node, body, inside, hints, out)
            except _Unresolved:
                order = _in_order(f.node)
                if order is None:
                    raise
                del out[before:]
                body = _Scope({"": None, **dict(zip(f.input, given, strict=True))}, None)
                self._nodes([f.node[i] for i in order], body, inside, hints, out)
        except _Unresolved as e:
            raise ModelLoadError(f"{where}: {e}") from None
        self._inlined += len(out) - before
        if self._inlined > MAX_INLINED:
            raise ModelLoadError(f"{_node(p)}: inlining the model's functions makes more than {MAX_INLINED} nodes")
        bound: set[Value] = set()
        for inner, outer in zip(f.output, p.output, strict=False):
            if not outer:
                continue
            if outer in scope.names:
                raise ModelLoadError(f"{_node(p)}: output {outer!r} is already made by another node, input or constant")
            if inner not in body.names:
                raise ModelLoadError(f"{where}: its output {inner!r} is made by none of its nodes")
            value = body.names[inner]
            final = finals[inner]
            if value is not None and (value.name != final or value in bound or value in given):
                value = self._renamed(value, final, opsets, inside, out)
            if value is not None:
                bound.add(value)
            scope.names[outer] = value

    def _renamed(
        self, value: Value, name: str, opsets: Mapping[str, int], context: _Context, out: list[Node]
    ) -> Value:
        """A value of that name equal to `value`, so that what a function passes through keeps the caller's name."""
        if value.data is not None:
            return Value(name, value.type, value.data)
        opset = opsets.get("", self._context.opsets.get("", 1))
        schema = find_schema("Identity", "", opset)
        made = Value(name, value.type)
        version = 1 if schema is None else schema.since_version
        out.append(Node("Identity", [value], [made], version=version, annotations=context.annotations))
        return made

    def _of_function(self, key: FunctionKey) -> tuple[dict[str, int], dict[tuple[str, str], _Operator]]:
        found = self._function_operators.get(key)
        if found is None:
            from xrt_core.frontends.onnx_import import check_opsets

            f = self._functions[key]
            opsets = check_opsets(f) if f.opset_import else dict(self._context.opsets)
            found = self._function_operators[key] = (opsets, {})
        return found

    def _label(self, name: str, context: _Context) -> str:
        """The name of a value read in `context`: unchanged in the model's graphs, prefixed and unique in a function."""
        if not context.inlined:
            return name
        renamed = context.renames.get(name)
        if renamed is not None:
            return renamed
        if self._taken is None:
            self._taken = set()
            _names_in(self._model.graph, self._taken)
        label = candidate = context.prefix + name
        n = 1
        while candidate in self._taken:
            n += 1
            candidate = f"{label}_{n}"
        self._taken.add(candidate)
        return candidate

    # --- attributes ---

    def _attributes(
        self, p: NodeProto, schema: Schema, scope: _Scope, context: _Context
    ) -> dict[str, Attribute] | None:
        found: dict[str, Attribute] = {}
        known = schema.attributes
        for a in p.attribute:
            name, kind = a.name, a.type
            if name in found:
                raise ModelLoadError(f"{_node(p)}: attribute {name!r} is given twice")
            spec = known.get(name)
            if spec is None:
                if not name.startswith("__"):
                    raise ModelLoadError(
                        f"{_node(p)}: {schema.operator} (opset version {schema.since_version}) has no attribute {name!r}; "
                        f"it has {sorted(known) or 'none'}"
                    )
            elif ATTRIBUTE_KINDS.get(kind) != spec.kind:
                raise ModelLoadError(
                    f"{_node(p)}: attribute {name!r} is of kind {ATTRIBUTE_KINDS.get(kind, kind)!r}, "
                    f"but {schema.operator} takes {spec.kind!r}"
                )
            if kind == _INT and context.references is None:
                found[name] = a.i
            else:
                resolved = self._referenced(a, scope, context, _node(p))
                if resolved is not None:
                    found[name] = resolved[1]
        for name in schema.required_attributes:
            if name not in found:
                raise _missing_attribute(p, name)
        return found

    def _referenced(
        self, a: AttributeProto, scope: _Scope, context: _Context, where: str
    ) -> tuple[int, Attribute] | None:
        """Kind and value of an attribute, taken from the caller where it is a reference; None where not given."""
        kind = a.type
        if a.ref_attr_name:
            if context.references is None:
                raise ModelLoadError(
                    f"{where}: attribute {a.name!r} refers to {a.ref_attr_name!r}, but stands outside a function"
                )
            found = context.references.get(a.ref_attr_name)
            if found is not None and kind not in (found[0], _UNDEFINED):
                raise ModelLoadError(
                    f"{where}: attribute {a.name!r} of kind {ATTRIBUTE_KINDS.get(kind, kind)!r} refers to "
                    f"{a.ref_attr_name!r}, which is given as {ATTRIBUTE_KINDS.get(found[0], found[0])!r}"
                )
            return found
        return kind, self._attribute(a, kind, scope, context, where)

    def _attribute(self, a: AttributeProto, kind: int, scope: _Scope, context: _Context, where: str) -> Attribute:
        if kind == _INT:
            return a.i
        if kind == _INTS:
            return tuple(a.ints)
        if kind == _FLOAT:
            return a.f
        if kind == _TENSOR:
            return self._array(a.t, f"{where}, attribute {a.name!r}")
        if kind == _TENSORS:
            return tuple(self._array(t, f"{where}, attribute {a.name!r}") for t in a.tensors)
        if kind == _SPARSE:
            s = a.sparse_tensor
            at = f"{where}, attribute {a.name!r}"
            return SparseTensor(self._array(s.values, at), self._array(s.indices, at), tuple(s.dims))
        return attribute_from_proto(a, lambda g: self._graph(g, context, scope), where)

    def _dense(self, s: Any, where: str) -> np.ndarray:
        return dense(SparseTensor(self._array(s.values, where), self._array(s.indices, where), tuple(s.dims)), where)

    def _array(self, t: TensorProto, where: str) -> np.ndarray:
        """The array of a tensor, wherever its bytes lie."""
        if t.data_location == TensorProto.EXTERNAL:
            raw: np.ndarray | None = self._external.find(t, where)
        else:
            raw = None if self._weights is None else self._weights.find(t)
        if raw is None:
            return array_from_tensor(t, where)
        dtype = dtype_from_onnx(t.data_type, where)
        if dtype is None or dtype == STRING:
            raise ModelLoadError(f"{where}: a tensor of {'strings' if dtype else 'no type'} cannot be stored as raw bytes")
        if any(d < 0 for d in t.dims):
            raise ModelLoadError(f"{where}: negative dimension in {list(t.dims)}")
        return array_from_bytes(raw, dtype, tuple(t.dims), where)


def _node(p: NodeProto) -> str:
    label = f"{p.domain}.{p.op_type}" if p.domain else p.op_type
    if p.name:
        return f"node {p.name!r} ({label})"
    return f"node {label} that makes {list(p.output)}"


def _wrong_arity(p: NodeProto, what: str, count: int, low: int, high: int) -> str:
    if low == high:
        expected = str(low)
    else:
        expected = f"{low} or more" if high >= 2**31 - 1 else f"{low} to {high}"
    return f"{_node(p)}: {count} {what}s, but the operator takes {expected}"


def _missing_attribute(p: NodeProto, name: str) -> ModelLoadError:
    return ModelLoadError(f"{_node(p)}: the required attribute {name!r} is missing")


def _resolve(p: NodeProto, scope: _Scope) -> list[Value | None]:
    found: list[Value | None] = []
    for n in p.input:
        try:
            found.append(scope.find(n))
        except KeyError:
            message = f"{_node(p)}: input {n!r} is made by no node and is no input or constant"
            raise _Unresolved(n, message) from None
    return found


def _hint(p: Any) -> ValueType | None:
    """The declared element type of a value that a node makes; shapes that files declare there may be wrong."""
    declared = type_from_proto(p.type, f"value {p.name!r}")
    return _without_shape(declared)


def _without_shape(t: ValueType | None) -> ValueType | None:
    if isinstance(t, TensorType):
        return None if t.dtype is None else _DTYPE_ONLY[t.dtype]
    if isinstance(t, SequenceType):
        return SequenceType(_without_shape(t.element))
    if isinstance(t, OptionalType):
        return OptionalType(_without_shape(t.element))
    return t


class _TypesByDtype(dict[np.dtype, TensorType]):
    def __missing__(self, dtype: np.dtype) -> TensorType:
        made = self[dtype] = TensorType(dtype)
        return made


_DTYPE_ONLY = _TypesByDtype()


def _in_order(protos: Sequence[NodeProto]) -> list[int] | None:
    """An order of the nodes in which producers come first, or None where they are in order already.

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


def _names_in(g: GraphProto, into: set[str]) -> None:
    into.update(p.name for p in g.input)
    into.update(t.name for t in g.initializer)
    into.update(s.values.name for s in g.sparse_initializer)
    for p in g.node:
        into.update(p.output)
        for a in p.attribute:
            if a.type == _GRAPH:
                _names_in(a.g, into)
            elif a.type == _GRAPHS:
                for inner in a.graphs:
                    _names_in(inner, into)
