"""Reader: converts the protobufs of one model to IR and inlines model-local functions.

AttributeReader: converts attributes and tensors: resolves attribute references, reads tensor data without copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from xrt_core.errors import ModelLoadError
from xrt_core.frontends.onnx_file import ExternalData
from xrt_core.frontends.onnx_scope import (
    OPSET_DOMAIN,
    Context,
    FunctionKey,
    Operator,
    Scope,
    Unresolved,
    check_opsets,
    in_order,
    made_twice,
    missing_attribute,
    names_in,
    node_label,
    resolve,
    text,
    wrong_arity,
)
from xrt_core.frontends.onnx_wire import Weights
from xrt_core.ir.attribute_limits import attribute_fault, node_fault
from xrt_core.ir.graph import MARK, REGION, Annotations, Attribute, Graph, Node, SparseTensor, Value
from xrt_core.ir.long_list import LONG, LongList
from xrt_core.ir.onnx_proto import (
    array_from_bytes,
    array_from_tensor,
    attribute_from_proto,
    dtype_from_onnx,
    type_from_proto,
)
from xrt_core.ir.schema import (
    ATTRIBUTE_KINDS,
    MINIMUM_OPSET,
    Schema,
    find_schema,
    find_schema_or_open,
    normal_domain,
    why_unknown,
)
from xrt_core.ir.types import STRING, OptionalType, SequenceType, TensorType, ValueType

DECLARED: Final = "xrt.declared_type/"
"""Prefix of the graph's metadata keys that store the type a file declares for an output, which may be wrong."""

SAME: Final = "xrt.same"
"""Key of the metadata of an Identity that export added; import drops the node and uses its input instead."""

MAX_INLINED: Final = 500_000
"""Nodes that inlining the model's functions may make, constants included, beside `_PER_NODE` for each in the file;
calls of calls grow exponentially."""

_PER_NODE: Final = 50
_CALL: Final = 10  # nodes that are read in the time that a call takes

MAX_INLINED_NAMES: Final = 1 << 28
"""Characters that inlining may put before the names of these nodes and their results."""


class Reader:
    """Builds the Graph of one ModelProto. `weights` resolves markers, `external` resolves external data."""

    def __init__(
        self, model: ModelProto, opsets: Mapping[str, int], weights: Weights | None, external: ExternalData
    ) -> None:
        self._model = model
        self._read = AttributeReader(weights, external, self._graph)
        self._context = Context(opsets, {})
        self._functions: dict[FunctionKey, FunctionProto] = {}
        self._function_operators: dict[FunctionKey, tuple[dict[str, int], dict[tuple[str, str], Operator]]] = {}
        self._taken: set[str] | None = None
        self._used: dict[str, int] = {}
        self._bodies: dict[FunctionKey, Sequence[NodeProto]] = {}
        for f in model.functions:
            key = (normal_domain(f.domain), f.name, f.overload)
            if key in self._functions:
                raise ModelLoadError(f"function {f.name!r} of domain {f.domain!r} is defined twice")
            self._functions[key] = f

    def main(self) -> Graph:
        """The model's graph."""
        if self._functions:
            check_inlining(self._model, self._functions)
        try:
            return self._graph(self._model.graph, self._context, None)
        except Unresolved as e:
            raise ModelLoadError(str(e)) from None

    # --- graphs ---

    def _graph(self, g: GraphProto, context: Context, parent: Scope | None) -> Graph:
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
        scope = Scope(dict(base), parent)
        where = f"graph {g.name!r}"
        first = None if parent is None else in_order(g.node)  # tried twice, nested graphs would take 2**levels times
        try:
            self._nodes(g.node if first is None else [g.node[i] for i in first], scope, context, types, nodes)
        except Unresolved:
            order = in_order(g.node) if parent is None else None
            if order is None:  # already sorted: the name is undefined, or an enclosing graph defines it later
                raise
            nodes.clear()
            scope = Scope(dict(base), parent)
            self._nodes([g.node[i] for i in order], scope, context, types, nodes)
        outputs: list[Value] = []
        for i, p in enumerate(g.output):
            try:
                found = scope.find(p.name)
            except KeyError:
                message = f"output {p.name!r} of {where} is made by no node and is no input or constant"
                raise Unresolved(p.name, message) from None
            if found is None:
                raise ModelLoadError(f"output {i} {p.name!r} of {where} is absent")
            outputs.append(found)
        "".join(scope.names)  # raises TypeError for a name that is not str
        "".join([n.name for n in nodes])
        metadata = {text(p.key): text(p.value) for p in g.metadata_props}
        if parent is None:
            for p in g.output:
                declared = type_from_proto(p.type, f"output {p.name!r}")
                if isinstance(declared, TensorType) and declared.shape is not None:
                    metadata[DECLARED + p.name] = str(declared)
        return Graph(
            inputs, outputs, nodes,
            opsets=context.opsets, name=text(g.name), defaults=defaults, doc=text(g.doc_string), metadata=metadata,
        )  # fmt: skip

    def _initialisers(self, g: GraphProto) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for t in g.initializer:
            if not t.name:
                raise ModelLoadError(f"an initialiser of graph {g.name!r} has no name")
            if t.name in found:
                raise ModelLoadError(f"initialiser {t.name!r} of graph {g.name!r} is defined twice")
            found[t.name] = self._read.array(t, f"initialiser {t.name!r}")
        for s in g.sparse_initializer:
            name = s.values.name
            if not name or name in found:
                raise ModelLoadError(f"sparse initialiser {name!r} of graph {g.name!r} has no name of its own")
            found[name] = self._read.dense(s, f"sparse initialiser {name!r}")
        return found

    # --- nodes ---

    def _nodes(
        self,
        protos: Iterable[NodeProto],
        scope: Scope,
        context: Context,
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
                inputs = resolve(p, scope)
            count = len(inputs)
            if not operator.min_inputs <= count <= operator.max_inputs:
                raise ModelLoadError(wrong_arity(p, "input", count, operator.min_inputs, operator.max_inputs))
            while count > operator.min_inputs and inputs[-1] is None:
                inputs.pop()
                count -= 1
            attributes = self._read.all_of(p, operator.schema, scope, context) if p.attribute else None
            if attributes is None and operator.required:
                raise missing_attribute(p, operator.required)
            if op_type == "Constant" and operator.schema.domain == "":
                self._constant(p, attributes or {}, scope, context)
                continue
            outputs: list[Value | None] = []
            for n in p.output:
                if n in names:
                    if n:
                        raise made_twice(p, n)
                    outputs.append(None)
                    continue
                value = Value(self._label(n, context) if labelled else n, types.get(n))
                names[n] = value
                outputs.append(value)
            count = len(outputs)
            if not operator.min_outputs <= count <= operator.max_outputs:
                raise ModelLoadError(wrong_arity(p, "output", count, operator.min_outputs, operator.max_outputs))
            annotations = inherited
            doc, properties = p.doc_string, p.metadata_props
            if doc or properties:
                own = {text(e.key): text(e.value) for e in properties}
                metadata = {**own, **inherited.metadata, **(_marks(p) or context.marks)}
                if SAME in metadata and op_type == "Identity" and operator.schema.domain == "":
                    names[p.output[0]] = inputs[0]
                    continue
                annotations = Annotations(doc=text(doc), metadata=metadata)
            node = Node(
                op_type,
                inputs,
                outputs,
                attributes,
                domain=operator.schema.domain,
                version=operator.version,
                name=context.prefix + p.name if labelled else p.name,
                annotations=annotations,
            )
            if attributes:
                self._check_attributes(p, node)
            out.append(node)

    def _check_attributes(self, p: NodeProto, node: Node) -> None:
        """Raise ModelLoadError for values that the operator does not allow, and bodies that do not fit the node."""
        fault = node_fault(node) if node.subgraphs else attribute_fault(node.domain, node.op_type, node.attributes)
        if fault is not None:
            raise ModelLoadError(f"{node_label(p)}: {fault}")

    def _operator(self, p: NodeProto, context: Context) -> Operator:
        domain = normal_domain(p.domain)
        opset = context.opsets.get(domain)
        if opset is None:
            imported = ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in context.opsets.items())
            raise ModelLoadError(
                f"{node_label(p)}: domain {domain or 'ai.onnx'!r} is not imported (imported: {imported}) and no "
                f"function of the model defines the operator"
            )
        s = find_schema_or_open(p.op_type, domain, opset)
        if s is None:
            raise ModelLoadError(f"{node_label(p)}: {why_unknown(p.op_type, domain, opset)}")
        if domain == "" and opset < MINIMUM_OPSET:
            newer = find_schema(p.op_type, domain, MINIMUM_OPSET)
            if newer is None or newer.since_version != s.since_version:
                raise ModelLoadError(
                    f"{node_label(p)}: the model is of opset {opset}, where this operator is another one than at opset "
                    f"{MINIMUM_OPSET}, the oldest that XRT takes; convert the model with onnx.version_converter"
                )
        required = next(iter(s.required_attributes), "")
        return Operator(s.since_version, s.min_inputs, s.max_inputs, s.min_outputs, s.max_outputs, required, s)

    def _constant(self, p: NodeProto, attributes: Mapping[str, Attribute], scope: Scope, context: Context) -> None:
        name = p.output[0] if len(p.output) == 1 else ""
        if not name:
            raise ModelLoadError(f"{node_label(p)}: a Constant has one named output, not {list(p.output)}")
        if name in scope.names:
            raise made_twice(p, name)
        array = constant_array(attributes, node_label(p))
        scope.names[name] = Value(self._label(name, context), TensorType(array.dtype, array.shape), array)

    # --- functions ---

    def _call(
        self,
        p: NodeProto,
        key: FunctionKey,
        scope: Scope,
        context: Context,
        types: Mapping[str, ValueType],
        out: list[Node],
    ) -> None:
        f = self._functions[key]
        at = node_label(p)
        if key in context.calls:
            path = " -> ".join(n for _, n, _ in (*context.calls, key))
            raise ModelLoadError(f"{at}: function {f.name!r} calls itself ({path}); recursion is not allowed")
        given = resolve(p, scope)
        if len(given) > len(f.input) or len(p.output) > len(f.output):
            raise ModelLoadError(
                f"{at}: function {f.name!r} takes {len(f.input)} inputs and gives {len(f.output)} outputs, "
                f"but is called with {len(given)} and {len(p.output)}"
            )
        given += [None] * (len(f.input) - len(given))
        opsets, operators = self._of_function(key)
        where = f"function {f.name!r}"
        references = {
            a.name: (int(a.type), self._read.value(a, a.type, scope, context, where)) for a in f.attribute_proto
        }
        known = {*references, *f.attribute}
        for a in p.attribute:
            if a.name not in known:
                raise ModelLoadError(
                    f"{at}: function {f.name!r} has no attribute {a.name!r}; it has {sorted(known) or 'none'}"
                )
            found = self._read.kind_and_value(a, scope, context, at)
            if found is not None:
                references[a.name] = found
        finals = [self._label(outer, context) if outer else "" for outer in p.output]
        renames: dict[str, str] = {}
        for inner, final in zip(f.output, finals, strict=False):
            if final:
                renames.setdefault(inner, final)
        prefix = context.prefix if key[0] == OPSET_DOMAIN else f"{context.prefix}{p.name or f.name}/"
        inside = Context(
            opsets, operators, prefix=prefix, calls=(*context.calls, key), references=references, renames=renames,
            marks=_marks(p) or context.marks,
        )  # fmt: skip
        body = Scope({"": None}, None)
        for name, value in zip(f.input, given, strict=True):
            if name in body.names:
                raise ModelLoadError(f"function {f.name!r} has two inputs named {name!r}")
            body.names[name] = value
        hints = {i: t for i, o in zip(f.output, p.output, strict=False) if (t := types.get(o)) is not None}
        try:
            self._nodes(self._sorted(key), body, inside, hints, out)
        except Unresolved as e:
            raise ModelLoadError(f"{where}: {e}") from None
        bound: set[Value] = set()
        for inner, outer, final in zip(f.output, p.output, finals, strict=False):
            if not outer:
                continue
            if outer in scope.names:
                raise made_twice(p, outer)
            if inner not in body.names:
                raise ModelLoadError(f"{where}: its output {inner!r} is made by none of its nodes")
            value = body.names[inner]
            if value is not None and (value.name != final or value in bound or value in given):
                value = self._renamed(value, final, opsets, inside, out)
            if value is not None:
                bound.add(value)
            scope.names[outer] = value

    def _renamed(self, value: Value, name: str, opsets: Mapping[str, int], context: Context, out: list[Node]) -> Value:
        """Return a value called `name` that equals `value`, so that a pass-through output keeps the caller's name."""
        if value.data is not None:
            return Value(name, value.type, value.data)
        opset = opsets.get("", self._context.opsets.get("", 1))
        schema = find_schema("Identity", "", opset)
        made = Value(name, value.type)
        version = 1 if schema is None else schema.since_version
        out.append(Node("Identity", [value], [made], version=version, annotations=context.annotations))
        return made

    def _sorted(self, key: FunctionKey) -> Sequence[NodeProto]:
        """Return the nodes of a function in topological order."""
        found = self._bodies.get(key)
        if found is None:
            protos = list(self._functions[key].node)
            order = in_order(protos)
            found = self._bodies[key] = protos if order is None else [protos[i] for i in order]
        return found

    def _of_function(self, key: FunctionKey) -> tuple[dict[str, int], dict[tuple[str, str], Operator]]:
        found = self._function_operators.get(key)
        if found is None:
            f = self._functions[key]
            opsets = check_opsets(f) if f.opset_import else dict(self._context.opsets)
            found = self._function_operators[key] = (opsets, {})
        return found

    def function_opsets(self) -> dict[str, int]:
        """Return the opsets that the functions called so far import."""
        return {d: v for opsets, _ in self._function_operators.values() for d, v in opsets.items()}

    def _label(self, name: str, context: Context) -> str:
        """Return the name of a value read in `context`: unchanged in the model's graphs, prefixed in a function."""
        if not context.inlined:
            return name
        renamed = context.renames.get(name)
        if renamed is not None:
            return renamed
        if self._taken is None:
            self._taken = set()
            names_in(self._model.graph, self._taken)
        label = candidate = context.prefix + name
        n = self._used.get(label, 1)
        while candidate in self._taken:
            n += 1
            candidate = f"{label}_{n}"
        self._used[label] = n
        self._taken.add(candidate)
        return candidate


def check_inlining(model: ModelProto, functions: Mapping[FunctionKey, FunctionProto]) -> None:
    """Raise ModelLoadError if inlining would make too many nodes, or names too long: counted without making any, each
    function once. Calls in a circle count as nothing; reading them is an error of its own."""
    known: dict[FunctionKey, tuple[int, int]] = {}  # nodes of a call, and the characters before their names
    under_way: set[FunctionKey] = set()

    def of_nodes(protos: Iterable[NodeProto]) -> tuple[int, int]:
        nodes = characters = 0
        for p in protos:
            nodes += 1 + (p.ByteSize() >> 8)  # small tensors are copied
            key = (normal_domain(p.domain), p.op_type, p.overload)
            if key in functions:
                inner, before = of_call(key)
                nodes += inner + _CALL
                characters += before + inner * (len(p.name or p.op_type) + 1)
            for a in p.attribute:
                for g in (a.g, *a.graphs) if a.type in _GRAPHS else ():
                    inner, before = of_nodes(g.node)
                    nodes, characters = nodes + inner, characters + before
        return nodes, characters

    def of_call(key: FunctionKey) -> tuple[int, int]:
        if key in under_way:
            return 0, 0
        found = known.get(key)
        if found is None:
            under_way.add(key)
            found = known[key] = of_nodes(functions[key].node)
            under_way.remove(key)
        return found

    nodes, characters = of_nodes(model.graph.node)
    in_file = len(model.graph.node) + sum(len(f.node) for f in functions.values())
    if nodes > MAX_INLINED + _PER_NODE * in_file:
        raise ModelLoadError(f"inlining the model's functions makes more than {MAX_INLINED} nodes")
    if characters > MAX_INLINED_NAMES:
        raise ModelLoadError(f"inlining the model's functions makes names of more than {MAX_INLINED_NAMES} characters")


def _marks(p: NodeProto) -> dict[str, str]:
    """Return the metadata that marks a node or a call for an engine; the innermost marked call takes precedence."""
    found = {text(e.key): text(e.value) for e in p.metadata_props if e.key in (MARK, REGION)}
    if found and not found.get(MARK):
        raise ModelLoadError(
            f"node {p.name!r} ({p.op_type}): its metadata has {REGION if REGION in found else MARK!r} and names no "
            f"engine; {MARK!r} takes an engine's name, or 'host'"
        )
    return found


def _hint(p: Any) -> ValueType | None:
    """Return the declared element type of an intermediate value, without the declared shape, which may be wrong."""
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


_GRAPHS: Final = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_INT: Final = AttributeProto.INT
_INTS: Final = AttributeProto.INTS
_LISTS: Final = (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS)

GraphReader = Callable[[GraphProto, Context, Scope], Graph]


def constant_array(attributes: Mapping[str, Attribute], where: str) -> np.ndarray:
    """Return the array of a Constant node. Raises ModelLoadError unless exactly one value attribute is set."""
    forms = [n for n in attributes if n.startswith(("value", "sparse_value"))]
    if len(forms) != 1:
        raise ModelLoadError(f"{where}: a Constant needs exactly one of its value attributes, not {forms or 'none'}")
    name, value = forms[0], attributes[forms[0]]
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, SparseTensor):
        return dense(value, where)
    if name in ("value_int", "value_ints"):
        return np.array(value, np.int64)
    if name in ("value_float", "value_floats"):
        return np.array(value, np.float32)
    made = np.empty((len(value),) if isinstance(value, tuple | LongList) else (), STRING)
    made[...] = value[:] if isinstance(value, LongList) else value
    return made


def dense(sparse: SparseTensor, where: str) -> np.ndarray:
    """Return the dense array of a COO tensor: indices are linear [count] or by coordinate [count, rank].

    Raises ModelLoadError if values, indices and dims are inconsistent.
    """
    values, indices, dims = sparse.values, sparse.indices, tuple(int(d) for d in sparse.dims)
    count = values.size
    try:
        if any(d < 0 for d in dims):
            raise ValueError(f"negative dimension in {list(dims)}")
        if indices.dtype != np.int64 or indices.shape not in ((count,), (count, len(dims))):
            raise ValueError(f"indices {indices.dtype}{list(indices.shape)} for {count} values of rank {len(dims)}")
        if indices.ndim == 1:
            if count and not 0 <= int(indices.min()) <= int(indices.max()) < int(np.prod(dims, dtype=object)):
                raise ValueError("an index lies outside the tensor")
            place: Any = np.unravel_index(indices, dims)
        else:
            if count and (indices.min() < 0 or np.any(indices >= np.array(dims))):
                raise ValueError("an index lies outside the tensor")
            place = tuple(indices.T)
        out = np.full(dims, "", STRING) if values.dtype == STRING else np.zeros(dims, values.dtype)
        out[place] = values.reshape(-1)
    except (ValueError, MemoryError) as e:
        raise ModelLoadError(f"{where}: sparse tensor of dims {list(dims)} is damaged: {e}") from e
    return out


class AttributeReader:
    """Converts the attributes of the nodes of one model.

    weights: resolves the markers of `onnx_wire`. external: resolves external data. graph: reads a subgraph.
    """

    def __init__(self, weights: Weights | None, external: ExternalData, graph: GraphReader) -> None:
        self._weights = weights
        self._external = external
        self._graph = graph

    def all_of(self, p: NodeProto, schema: Schema, scope: Scope, context: Context) -> dict[str, Attribute] | None:
        found: dict[str, Attribute] = {}
        known = schema.attributes
        for a in p.attribute:
            name, kind = a.name, a.type
            if name in found:
                raise ModelLoadError(f"{node_label(p)}: attribute {name!r} is given twice")
            spec = known.get(name)
            if spec is None:
                if not name.startswith("__") and not schema.is_open:
                    raise ModelLoadError(
                        f"{node_label(p)}: {schema.operator} (of opset {schema.since_version}) has no attribute "
                        f"{name!r}; it has {sorted(known) or 'none'}"
                    )
            elif ATTRIBUTE_KINDS.get(kind) != spec.kind:
                raise ModelLoadError(
                    f"{node_label(p)}: attribute {name!r} is of kind {ATTRIBUTE_KINDS.get(kind, kind)!r}, "
                    f"but {schema.operator} takes {spec.kind!r}"
                )
            if kind == _INT and context.references is None:
                found[name] = a.i
            else:
                resolved = self.kind_and_value(a, scope, context, node_label(p))
                if resolved is not None:
                    found[name] = resolved[1]
        for name in schema.required_attributes:
            if name not in found:
                raise missing_attribute(p, name)
        return found

    def kind_and_value(
        self, a: AttributeProto, scope: Scope, context: Context, where: str
    ) -> tuple[int, Attribute] | None:
        """Return kind and value of an attribute; a reference takes those of the call; None if it is not given."""
        kind = a.type
        if a.ref_attr_name:
            if context.references is None:
                raise ModelLoadError(
                    f"{where}: attribute {a.name!r} refers to {a.ref_attr_name!r}, but is outside a function"
                )
            found = context.references.get(a.ref_attr_name)
            if found is not None and kind not in (found[0], AttributeProto.UNDEFINED):
                raise ModelLoadError(
                    f"{where}: attribute {a.name!r} of kind {ATTRIBUTE_KINDS.get(kind, kind)!r} refers to "
                    f"{a.ref_attr_name!r}, which is given as {ATTRIBUTE_KINDS.get(found[0], found[0])!r}"
                )
            return found
        return kind, self.value(a, kind, scope, context, where)

    def value(self, a: AttributeProto, kind: int, scope: Scope, context: Context, where: str) -> Attribute:
        if kind == _INT:
            return a.i
        if kind in _LISTS and self._weights is not None and (found := self._weights.find_list(a)) is not None:
            return found
        if kind == _INTS and len(a.ints) < LONG:
            return tuple(a.ints)
        if kind == AttributeProto.FLOAT:
            return a.f
        if kind == AttributeProto.TENSOR:
            return self.array(a.t, f"{where}, attribute {a.name!r}")
        if kind == AttributeProto.TENSORS:
            return tuple(self.array(t, f"{where}, attribute {a.name!r}") for t in a.tensors)
        if kind == AttributeProto.SPARSE_TENSOR:
            s = a.sparse_tensor
            at = f"{where}, attribute {a.name!r}"
            return SparseTensor(self.array(s.values, at), self.array(s.indices, at), tuple(s.dims))
        return attribute_from_proto(a, lambda g: self._graph(g, context, scope), where)

    def dense(self, s: Any, where: str) -> np.ndarray:
        return dense(SparseTensor(self.array(s.values, where), self.array(s.indices, where), tuple(s.dims)), where)

    def array(self, t: TensorProto, where: str) -> np.ndarray:
        """Return the array of a tensor, whose bytes are in the protobuf, the mapped file or external data."""
        if t.data_location == TensorProto.EXTERNAL:
            raw: np.ndarray | None = self._external.find(t, where)
        else:
            raw = None if self._weights is None else self._weights.find(t)
        if raw is None:
            return array_from_tensor(t, where)
        dtype = dtype_from_onnx(t.data_type, where)
        if dtype is None or dtype == STRING:
            kind = "no type" if dtype is None else "strings"
            raise ModelLoadError(f"{where}: a tensor of {kind} cannot be stored as raw bytes")
        if any(d < 0 for d in t.dims):
            raise ModelLoadError(f"{where}: negative dimension in {list(t.dims)}")
        return array_from_bytes(raw, dtype, tuple(t.dims), where)
