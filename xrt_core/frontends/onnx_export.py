"""ONNX export: write a Graph or Function as a ModelProto or a file. Importing it gives the same fingerprint."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto

from xrt_core.errors import ExportError
from xrt_core.files import encode, replace_file
from xrt_core.frontends.onnx_file import DataFile, serialised
from xrt_core.frontends.onnx_import import ALIASES, ELEMENTS
from xrt_core.frontends.onnx_reader import DECLARED, SAME
from xrt_core.frontends.onnx_scope import OPSET_DOMAIN
from xrt_core.ir.function import Function
from xrt_core.ir.graph import MARK, REGION, Graph, Node, Value
from xrt_core.ir.onnx_proto import ListWriter, attribute_to_proto, tensor_from_array, type_to_proto
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import ATTRIBUTE_KINDS, DIALECT, DIALECT_VERSION, find_schema, find_schema_or_open, opset_range
from xrt_core.ir.types import TensorType, ValueType, type_from_text

CLUSTER_DOMAIN: Final = "xrt.cluster"
"""Domain of the model-local functions that represent Launch nodes."""

AUTOMATIC: Final = 1 << 30
"""Total bytes of constants above which `save` writes external data by default."""

_OLDEST_OPSET: Final = 13  # older ones are read by few tools, and gain nothing
_MINIMUM_IR_VERSION: Final = 8  # the first with model-local functions
_KIND_NUMBERS: Final = {kind: number for number, kind in ATTRIBUTE_KINDS.items()}

TensorWriter = Callable[[np.ndarray, str], TensorProto]


def export_model(graph: Graph, *, tensor: TensorWriter = tensor_from_array) -> ModelProto:
    """Return the ONNX model of a graph; `import_model` of it gives a graph with the same fingerprint.

    A node whose version differs from the one that the graph's opset implies becomes a model-local function that imports
    its own opset. A Launch becomes a call of a model-local function of the domain "xrt.cluster". Names are made unique;
    inputs and outputs keep theirs. `tensor` writes the constants. Raises ExportError for what ONNX cannot express.
    """
    return _Exporter(graph, tensor).model()


def export_function(
    function: Function, *, tensor: TensorWriter = tensor_from_array, long_list: ListWriter | None = None
) -> ModelProto:
    """Return a Function as a standalone ONNX model; `import_function` is its inverse, aliases and what is known of
    elements included.

    `long_list` may write long lists (`attribute_to_proto`).
    """
    model = _Exporter(function.body, tensor, long_list).model()
    model.graph.name = function.name
    for p, r in zip([*model.graph.input, *model.graph.output], [*function.params, *function.returns], strict=True):
        p.type.Clear()
        type_to_proto(r.type, p.type)
    known = {i: p.elements for i, p in enumerate(function.params) if p.elements is not None}
    aliases = " ".join(f"{a.output}:{a.input}" for a in function.aliases)
    for key, value in ((ALIASES, aliases), (ELEMENTS, encode(known).decode() if known else "")):
        for e in [e for e in model.metadata_props if e.key == key]:
            model.metadata_props.remove(e)
        if value:
            model.metadata_props.add(key=key, value=value)
    return model


def save(graph: Graph | Function, path: str | os.PathLike[str], *, external_data: bool | None = None) -> None:
    """Write the ONNX model of a graph or function to `path`, atomically.

    external_data: write constants to `<path>.data`; by default only if they exceed `AUTOMATIC` bytes.
    Raises ExportError if the model cannot be written.
    """
    target = pathlib.Path(path)
    if external_data is None:
        external_data = _constant_bytes(graph.body if isinstance(graph, Function) else graph) > AUTOMATIC

    def export(tensor: TensorWriter) -> ModelProto:
        if isinstance(graph, Function):
            return export_function(graph, tensor=tensor)
        return export_model(graph, tensor=tensor)

    try:
        if external_data:
            data = target.with_name(target.name + ".data")
            with replace_file(data) as file:
                model = export(DataFile(file, data.name))
        else:
            model = export(tensor_from_array)
        with replace_file(target) as file:
            file.write(serialised(model))
    except OSError as e:
        raise ExportError(f"model {os.fspath(path)!r} cannot be written: {e}") from e


def fitting_opsets(graph: Graph) -> dict[str, int | None]:
    """Return for each domain the opset, nearest to the graph's, at which every node has its version; None if there is
    none.

    If it is None, export wraps nodes into functions that import their own opset. `import_model` reads these
    correctly, other tools do not: some ignore the opset that a function imports, and the ONNX checker rejects it.
    """
    ranges: dict[str, tuple[int, int]] = {}
    for domain, op_type, version in {(n.domain, n.op_type, n.version) for n in _every_node(graph)}:
        if domain != DIALECT and find_schema(op_type, domain, version) is not None:
            low, high = opset_range(op_type, domain, version)
            known = ranges.get(domain, (low, high))
            ranges[domain] = max(low, known[0]), min(high, known[1])
    found: dict[str, int | None] = {}
    for domain, (low, high) in ranges.items():
        found[domain] = None if low > high else min(max(graph.opsets.get(domain, high), low), high)
    return found


def with_opset(graph: Graph, opset: int | None = None) -> Graph:
    """Return the graph at another opset of ONNX at which every node has its version: the lowest, or a given one.

    Raises ExportError for what is no number, and, naming a node, where the given opset has another version of it.
    """
    if opset is not None and (not isinstance(opset, int) or isinstance(opset, bool)):
        raise ExportError(f"opset={opset!r}: it takes the number of an opset of ONNX")
    nodes = {
        (n.op_type, n.version) for n in _every_node(graph) if not n.domain and find_schema(n.op_type, "", n.version)
    }
    ranges = {(op_type, version): opset_range(op_type, "", version) for op_type, version in nodes}
    low = max((low for low, _ in ranges.values()), default=1)
    if opset is None:
        return graph.replace(opsets={**graph.opsets, "": max(low, _OLDEST_OPSET)})
    for (op_type, version), (first, last) in sorted(ranges.items()):
        if not first <= opset <= last:
            raise ExportError(
                f"opset={opset}: {op_type} of version {version} is in opsets {first} to {last}; all of this model's "
                f"operators are in opset {low}"
            )
    return graph.replace(opsets={**graph.opsets, "": opset})


class _Exporter:
    """One export: the model's opsets, its functions, and the main graph."""

    def __init__(self, graph: Graph, tensor: TensorWriter, long_list: ListWriter | None = None) -> None:
        self._graph = graph
        self.tensor = tensor
        self.long_list = long_list
        self.opsets = {**graph.opsets, **{d: v for d, v in fitting_opsets(graph).items() if v is not None}}
        for n in _every_node(graph):
            if n.domain not in self.opsets and n.domain != DIALECT:
                self.opsets[n.domain] = n.version
        self.opsets.setdefault("", onnx.defs.onnx_opset_version())
        self.functions: dict[tuple[str, str], FunctionProto] = {}
        self.clusters: dict[Function, str] = {}

    def model(self) -> ModelProto:
        body = _Body(self, self.opsets)
        proto = body.graph(self._graph, main=True)
        names = {e.name for e in proto.initializer}
        for v in body.constants:
            if body.names[v] not in names:
                proto.initializer.append(self.tensor(v.data, body.names[v]))  # type: ignore[arg-type]
        model = ModelProto(producer_name="xrt-core", graph=proto, doc_string="")
        model.functions.extend(self.functions.values())
        imports = _imports(self.opsets, _domains(proto.node, self.functions.values()))
        model.opset_import.extend(imports)
        for key, value in self._graph.metadata.items():
            if not key.startswith(DECLARED):
                model.metadata_props.add(key=key, value=value)
        standard = [o for o in imports if not o.domain.startswith(DIALECT)]
        needed = onnx.helper.find_min_ir_version_for(standard, ignore_unknown=True)
        model.ir_version = max(_MINIMUM_IR_VERSION, needed)
        return model

    def add_function(self, domain: str, name: str, make: Callable[[FunctionProto], None]) -> str:
        """Add a model-local function under a unique name derived from `name`; `make` fills it. Returns the name."""
        free, n = name, 1
        while (domain, free) in self.functions:
            n += 1
            free = f"{name}_{n}"
        f = FunctionProto(domain=domain, name=free)
        self.functions[domain, free] = f
        make(f)
        # a function precedes its callers
        self.functions[domain, free] = self.functions.pop((domain, free))
        return free


class _Body:
    """One namespace: the model's graph with its subgraphs, or the body of one function."""

    def __init__(self, owner: _Exporter, opsets: Mapping[str, int], names: Mapping[Value, str] | None = None) -> None:
        self._owner = owner
        self._opsets = opsets
        self.names: dict[Value, str] = dict(names or {})
        self._taken = {"", *self.names.values()}
        self.constants: dict[Value, None] = {}

    def name(self, value: Value | None) -> str:
        if value is None:
            return ""
        found = self.names.get(value)
        if found is None:
            found = self._fresh(value.name or "value")
            self.names[value] = found
            if value.data is not None:
                self.constants[value] = None
        return found

    def _fresh(self, label: str) -> str:
        free, n = label, 1
        while free in self._taken:
            n += 1
            free = f"{label}_{n}"
        self._taken.add(free)
        return free

    def graph(self, graph: Graph, main: bool = False) -> GraphProto:
        g = GraphProto(name=graph.name or "graph")
        for i, v in enumerate(graph.inputs):
            if v not in self.names:
                self.names[v] = self._fresh(v.name or f"input_{i}")
        if main:  # outputs keep their names; other values with the same name are renamed
            for i, v in enumerate(graph.outputs):
                if v not in self.names and v.name:
                    self.name(v)
                elif v not in self.names:
                    self.names[v] = self._fresh(f"output_{i}")
                    if v.data is not None:
                        self.constants[v] = None
        for v in graph.inputs:
            p = g.input.add(name=self.names[v])
            if v.type is not None:
                type_to_proto(v.type, p.type)
            default = graph.defaults.get(v)
            if default is not None:
                g.initializer.append(self._owner.tensor(default, self.names[v]))
        g.node.extend(self.nodes(graph.nodes))
        listed = set(graph.outputs)
        for v in graph.producers:
            if v.type is not None and v not in listed:
                type_to_proto(v.type, g.value_info.add(name=self.names[v]).type)
        returned: set[Value] = set()
        for v in graph.outputs:
            name = self.name(v)
            if v in returned or not (main or v in graph.producers):
                name = self._copy(g, v)
            returned.add(v)
            p = g.output.add(name=name)
            t = _declared(v, graph.metadata) if main else v.type
            if t is not None:
                type_to_proto(t, p.type)
        if main:
            g.doc_string = graph.doc
        return g

    def _copy(self, g: GraphProto, value: Value) -> str:
        """Add an Identity for an output that no node produces; import removes it. Returns the new name.

        Other tools require one, and there is a runtime whose Scan overwrites a state that its body returns as it is.
        """
        copy = self._fresh(f"{self.names[value]}_copy")
        p = g.node.add(op_type="Identity", input=[self.names[value]], output=[copy])
        p.metadata_props.add(key=SAME)
        return copy

    def nodes(self, nodes: Iterable[Node]) -> list[NodeProto]:
        made = []
        for n in nodes:
            if n.domain == DIALECT and n.op_type == "Launch":
                made.append(self._launch(n))
            elif traits_of(n).boundary:
                made.append(self._convert(n))
            elif self._fits(n):
                made.append(self._node(n))
            else:
                made.append(self._of_other_opset(n))
        return made

    def _fits(self, n: Node) -> bool:
        """Return whether the imported opset implies the node's version."""
        if n.domain == DIALECT:
            return True
        schema = find_schema_or_open(n.op_type, n.domain, self._opsets.get(n.domain, 0))
        return schema is not None and schema.since_version == n.version

    def _node(self, n: Node) -> NodeProto:
        p = NodeProto(
            op_type=n.op_type, domain=n.domain, name=n.name,
            input=[self.name(v) for v in n.inputs], output=[self.name(v) for v in n.outputs],
        )  # fmt: skip
        if n.attributes:
            schema = find_schema(n.op_type, n.domain, n.version)
            for key, a in n.attributes.items():
                spec = None if schema is None else schema.attributes.get(key)
                kind = 0 if spec is None else _KIND_NUMBERS.get(spec.kind, 0)
                if type(a) is tuple and not a and not kind:
                    raise ExportError(f"node {n.name!r} ({n.operator}): what kind is the empty attribute {key!r}?")
                if spec is not None and spec.kind == "float" and isinstance(a, int):
                    a = float(a)
                try:
                    p.attribute.append(attribute_to_proto(key, a, self.graph, kind, self._owner.long_list))
                except ExportError as e:
                    raise ExportError(f"node {n.name!r} ({n.operator}): {e}") from e
        _annotate(p, n)
        return p

    def _call(self, n: Node, domain: str, name: str, inputs: Iterable[Value | None]) -> NodeProto:
        p = NodeProto(op_type=name, domain=domain, name=n.name)
        p.input.extend(self.name(v) for v in inputs)
        return p

    def _of_other_opset(self, n: Node) -> NodeProto:
        """Return a call of a function that consists of this node and imports the node's own opset."""
        if find_schema_or_open(n.op_type, n.domain, n.version) is None:
            raise ExportError(f"node {n.name!r}: {n.operator} has no schema at version {n.version}")
        outer = dict.fromkeys(v for v in n.inputs if v is not None)
        outer.update(dict.fromkeys(n.captures))
        for g in n.subgraphs:
            outer.update(dict.fromkeys(_constants_within(g)))
        results = [v for v in n.outputs if v is not None]
        formal = {v: f"x{i}" for i, v in enumerate(outer)}
        formal.update((v, f"y{i}") for i, v in enumerate(results))

        def make(f: FunctionProto) -> None:
            opsets = {**self._owner.opsets, n.domain: n.version}
            body = _Body(self._owner, opsets, formal)
            f.input.extend(formal[v] for v in outer)
            f.output.extend(formal[v] for v in results)
            f.node.append(body._node(n))
            f.opset_import.extend(_imports(opsets, _domains(f.node, ())))

        name = self._owner.add_function(OPSET_DOMAIN, f"{n.op_type}_{n.version}", make)
        p = self._call(n, OPSET_DOMAIN, name, outer)
        p.output.extend(self.name(v) for v in results)
        return p

    def _launch(self, n: Node) -> NodeProto:
        function = n.attributes.get("function")
        if not isinstance(function, Function):
            raise ExportError(f"node {n.name!r}: a Launch without a function cannot be exported")
        name = self._owner.clusters.get(function)
        if name is None:

            def make(f: FunctionProto) -> None:
                self._fill(f, function)
                f.metadata_props.add(key="xrt.engine", value=str(n.attributes.get("engine", "")))

            name = self._owner.add_function(CLUSTER_DOMAIN, function.name or "cluster", make)
            self._owner.clusters[function] = name
        p = self._call(n, CLUSTER_DOMAIN, name, n.inputs)
        p.output.extend(self.name(v) for v in n.outputs)
        p.metadata_props.add(key="xrt.engine", value=str(n.attributes.get("engine", "")))
        return p

    def _fill(self, f: FunctionProto, function: Function) -> None:
        """Write a cluster as a FunctionProto: constants as Constant nodes, one producing node per return."""
        graph = function.body
        body = _Body(self._owner, self._owner.opsets)
        for v, param in zip(graph.inputs, function.params, strict=True):
            body.names[v] = body._fresh(param.name or "input")
            f.input.append(body.names[v])
        nodes = body.nodes(graph.nodes)
        produced = graph.producers
        returned: set[Value] = set()
        for v, r in zip(graph.outputs, function.returns, strict=True):
            if v in produced and v not in returned:
                f.output.append(body.name(v))
                returned.add(v)
            else:
                copy = body._fresh(f"{r.name or v.name or 'output'}_copy")
                nodes.append(NodeProto(op_type="Identity", input=[body.name(v)], output=[copy]))
                f.output.append(copy)
        for v in body.constants:
            constant = f.node.add(op_type="Constant", output=[body.names[v]])
            a = constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
            a.t.CopyFrom(self._owner.tensor(v.data, body.names[v]))  # type: ignore[arg-type]
        f.node.extend(nodes)
        f.doc_string = f"{len(graph.nodes)} nodes; fingerprint {function.fingerprint}"
        f.opset_import.extend(_imports(self._owner.opsets, {"", *_domains(f.node, ())}))

    def _convert(self, n: Node) -> NodeProto:
        """Export a converter node, which changes no value, as a call of a function that consists of an Identity."""
        if (DIALECT, n.op_type) not in self._owner.functions:

            def make(f: FunctionProto) -> None:
                f.input.append("x")
                f.output.append("y")
                f.attribute.extend(["source", "target"])
                f.node.append(NodeProto(op_type="Identity", input=["x"], output=["y"]))
                f.opset_import.extend(_imports(self._owner.opsets, {""}))

            self._owner.add_function(DIALECT, n.op_type, make)
        return self._node(n)


def _declared(value: Value, metadata: Mapping[str, str]) -> ValueType | None:
    """Return the type to declare for an output: the inferred type, or the one that the imported file declared."""
    t = value.type
    if isinstance(t, TensorType) and t.shape is not None:
        return t
    text = metadata.get(DECLARED + value.name)
    return t if text is None else type_from_text(text)


def _annotate(p: NodeProto, n: Node) -> None:
    if n.annotations.doc:
        p.doc_string = n.annotations.doc
    metadata = dict(n.annotations.metadata)
    if n.annotations.engine is not None:
        metadata[MARK] = n.annotations.engine
        if n.annotations.region:
            metadata[REGION] = n.annotations.region
    for key, value in metadata.items():
        p.metadata_props.add(key=key, value=value)


def _every_node(graph: Graph) -> Iterable[Node]:
    todo = [graph]
    while todo:
        for n in todo.pop().nodes:
            yield n
            if n.attributes:
                todo.extend(n.subgraphs)
                function = n.attributes.get("function")
                if isinstance(function, Function):
                    todo.append(function.body)


def _constants_within(graph: Graph) -> dict[Value, None]:
    """Return the constants that a subgraph uses, nested subgraphs included."""
    found = dict.fromkeys(graph.constants)
    for n in graph.nodes:
        for g in n.subgraphs:
            found.update(_constants_within(g))
    return found


def _constant_bytes(graph: Graph) -> int:
    seen: dict[int, int] = {}
    for n in _every_node(graph):
        seen.update((id(v.data), v.data.nbytes) for v in n.inputs if v is not None and v.data is not None)
        seen.update((id(a), a.nbytes) for a in n.attributes.values() if isinstance(a, np.ndarray))
    seen.update((id(a), a.nbytes) for a in graph.defaults.values())
    return sum(seen.values())


def _domains(nodes: Iterable[NodeProto], functions: Iterable[FunctionProto]) -> set[str]:
    """Return the domains that nodes (their subgraphs included) and functions use."""
    found = {f.domain for f in functions}
    for p in nodes:
        found.add(p.domain)
        for a in p.attribute:
            for g in [a.g] if a.type == onnx.AttributeProto.GRAPH else a.graphs:
                found |= _domains(g.node, ())
    return found


def _imports(opsets: Mapping[str, int], domains: Iterable[str]) -> list[OperatorSetIdProto]:
    """Return the opset imports: all of `opsets`, and version 1 of XRT's own domains that are used."""
    own = {d: DIALECT_VERSION for d in sorted(domains) if d == DIALECT or d.startswith(DIALECT + ".")}
    return [OperatorSetIdProto(domain=d, version=v) for d, v in {**opsets, **own}.items()]
