"""The verifier: holds a graph against the rules of the IR, which stand here as data, between the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from xrt_core.errors import GraphError
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, SparseTensor, Value
from xrt_core.ir.long_list import LongList
from xrt_core.ir.schema import DIALECT, Schema, find_schema_or_open, why_unknown
from xrt_core.ir.types import (
    DTYPE_TO_ONNX,
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    TensorType,
)

_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "int": (int, np.integer),
    "float": (float, int, np.floating, np.integer),
    "string": (str, bytes),
    "tensor": (np.ndarray,),
    "sparse_tensor": (SparseTensor,),
    "graph": (Graph,),
    "function": (Function,),
    "type": (TensorType, SparseTensorType, SequenceType, OptionalType, MapType),
}


@dataclass(slots=True)
class _State:
    """What has been seen on the way: values that may be read here, and schemas already looked up."""

    defined: set[Value]
    graph: Graph
    schemas: dict[tuple[str, str, int], Schema | None] = field(default_factory=dict)

    def schema(self, n: Node) -> Schema | None:
        key = (n.domain, n.op_type, n.version)
        if key not in self.schemas:
            self.schemas[key] = find_schema_or_open(n.op_type, n.domain, n.version)
        return self.schemas[key]


@dataclass(frozen=True, slots=True)
class NodeRule:
    """A rule that every node keeps: `check` gives None, or what is wrong with the node."""

    name: str
    says: str
    check: Callable[[Node, _State], str | None]


@dataclass(frozen=True, slots=True)
class GraphRule:
    """A rule that every graph keeps; `before` its nodes are walked, or after."""

    name: str
    says: str
    check: Callable[[Graph, _State], str | None]
    before: bool = True


def verify(graph: Graph, stage: str) -> None:
    """Check every rule on `graph`, its subgraphs and the functions of its Launch nodes, in linear time.

    Raises GraphError with the stage, the rule and the node for the first rule that is broken.
    """
    _walk(graph, _State(set(), graph), stage, "graph")


def _walk(graph: Graph, state: _State, stage: str, what: str) -> None:
    outer, state.graph = state.graph, graph
    where = f"{what} {graph.name!r}"
    for rule in GRAPH_RULES:
        if rule.before and (wrong := rule.check(graph, state)) is not None:
            raise _broken(stage, rule, where, wrong)
    defined = state.defined
    mine = [*graph.inputs]
    defined.update(mine)
    checks = [(r.check, r) for r in NODE_RULES]
    for n in graph.nodes:
        for check, node_rule in checks:
            wrong = check(n, state)
            if wrong is not None:
                raise _broken(stage, node_rule, f"node {n.name or n.operator!r} ({n!r}) of {where}", wrong)
        if n.attributes:
            for g in n.subgraphs:
                _walk(g, state, stage, f"subgraph of {n.operator} {n.name!r},")
            if n.domain == DIALECT and isinstance(f := n.attributes.get("function"), Function):
                _walk(f.body, _State(set(), f.body, state.schemas), stage, "function")
        for v in n.outputs:
            if v is not None:
                defined.add(v)
                mine.append(v)
    for rule in GRAPH_RULES:
        if not rule.before and (wrong := rule.check(graph, state)) is not None:
            raise _broken(stage, rule, where, wrong)
    defined.difference_update(mine)
    state.graph = outer


def _broken(stage: str, rule: NodeRule | GraphRule, where: str, wrong: str) -> GraphError:
    return GraphError(f"stage {stage!r}: {where} breaks the rule {rule.name!r} ({rule.says}): {wrong}")


# --- rules of a graph ---


def _inputs(graph: Graph, state: _State) -> str | None:
    seen: set[Value] = set()
    for v in graph.inputs:
        if v.data is not None:
            return f"input {v.name!r} holds data"
        if v in seen or v in state.defined:
            return f"input {v.name!r} is already defined"
        seen.add(v)
    return None


def _names(graph: Graph, _: _State) -> str | None:
    for what, values in (("input", graph.inputs), ("output", tuple(dict.fromkeys(graph.outputs)))):
        names = [v.name for v in values if v.name]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            return f"two {what}s are named {twice!r}"
    return None


def _defaults(graph: Graph, _: _State) -> str | None:
    if not graph.defaults:
        return None
    inputs = set(graph.inputs)
    for v, array in graph.defaults.items():
        if v not in inputs:
            return f"{v.name!r} has a default but is no input"
        if v.dtype is not None and v.dtype != array.dtype:
            return f"input {v.name!r} is {v.type}, its default {array.dtype}"
    return None


def _opsets(graph: Graph, _: _State) -> str | None:
    missing = {n.domain for n in graph.nodes} - {*graph.opsets, DIALECT}
    return f"no opset is imported for {sorted(missing)}" if missing else None


def _outputs(graph: Graph, state: _State) -> str | None:
    for v in graph.outputs:
        if v.data is None and v not in state.defined:
            return f"output {v.name!r} is made by no node and is no input or constant"
        if v.data is not None and (wrong := _constant(v)) is not None:
            return wrong
    return None


GRAPH_RULES: Final = (
    GraphRule("inputs", "inputs hold no data and are each listed once", _inputs),
    GraphRule("names", "no two inputs and no two outputs share a name", _names),
    GraphRule("defaults", "defaults belong to inputs and have their dtype", _defaults),
    GraphRule("opsets", "every domain in use is imported", _opsets),
    GraphRule("outputs", "every output is made, given or constant", _outputs, before=False),
)


# --- rules of a node ---


def _operator(n: Node, state: _State) -> str | None:
    schema = state.schema(n)
    if schema is None:
        return why_unknown(n.op_type, n.domain, n.version)
    if schema.since_version != n.version:
        return f"version {n.version} is not one at which the operator changed; its schema is of {schema.since_version}"
    return None


def _arity(n: Node, state: _State) -> str | None:
    schema = state.schema(n)
    if schema is None:
        return None
    if not schema.min_inputs <= len(n.inputs) <= schema.max_inputs:
        return f"{len(n.inputs)} inputs, the operator takes {schema.min_inputs} to {schema.max_inputs}"
    if not schema.min_outputs <= len(n.outputs) <= schema.max_outputs:
        return f"{len(n.outputs)} outputs, the operator gives {schema.min_outputs} to {schema.max_outputs}"
    return None


def _attributes(n: Node, state: _State) -> str | None:
    schema = state.schema(n)
    if schema is None:
        return None
    for name, value in n.attributes.items():
        spec = schema.attributes.get(name)
        if spec is None:
            if name.startswith("__") or schema.is_open:
                continue
            return f"the operator has no attribute {name!r}; it has {sorted(schema.attributes) or 'none'}"
        types = _PYTHON_TYPES.get(spec.kind)
        if types is not None:
            fits = isinstance(value, types)
        elif isinstance(value, LongList):
            fits = value.kind == spec.kind
        else:
            fits = isinstance(value, tuple) and all(isinstance(x, _PYTHON_TYPES[spec.kind[:-1]]) for x in value)
        if not fits:
            return f"attribute {name!r} is of kind {spec.kind}, not a {type(value).__name__}"
    for name in schema.required_attributes:
        if name not in n.attributes:
            return f"the required attribute {name!r} is missing"
    return None


def _operands(n: Node, state: _State) -> str | None:
    defined = state.defined
    for v in n.inputs:
        if v is None or v in defined:
            continue
        if v.data is not None:
            wrong = _constant(v)
            if wrong is None:
                continue
            return wrong
        if v in state.graph.producers:
            return f"input {v.name!r} is made by a later node; sort the graph"
        return f"input {v.name!r} is made by no node here or outside and is no input or constant"
    return None


def _results(n: Node, state: _State) -> str | None:
    defined = state.defined
    for i, v in enumerate(n.outputs):
        if v is None:
            continue
        if v in defined:
            return f"output {v.name!r} is already defined"
        if v.data is not None:
            return f"output {v.name!r} is a constant"
        if i and v in n.outputs[:i]:
            return f"output {v.name!r} is listed twice"
    return None


def _launch(n: Node, _: _State) -> str | None:
    if n.domain != DIALECT or n.op_type != "Launch":
        return None
    f = n.attributes["function"]
    assert isinstance(f, Function)
    if not n.attributes["engine"]:
        return "its engine is not named"
    for what, values, wanted in (("input", n.inputs, f.params), ("output", n.outputs, f.returns)):
        if len(values) != len(wanted):
            return f"{len(values)} {what}s for function {f.name!r}, which has {len(wanted)}"
        for i, (v, p) in enumerate(zip(values, wanted, strict=True)):
            if v is None:
                return f"{what} {i} is left out; {p} is not optional"
            if v.is_static and v.type != p.type:
                return f"{what} {i} {v.name!r} is {v.type}, but function {f.name!r} has {p}"
    return None


def _constant(v: Value) -> str | None:
    data, t = v.data, v.type
    if data is None:
        return None
    if data.dtype not in DTYPE_TO_ONNX:
        return f"constant {v.name!r} is of dtype {data.dtype}, which ONNX has not"
    if isinstance(t, TensorType) and (t.dtype != data.dtype or t.shape != data.shape):
        return f"constant {v.name!r} is typed {t}, but holds {TensorType(data.dtype, data.shape)}"
    return None


NODE_RULES: Final = (
    NodeRule("operator", "the operator exists, in the version the node says", _operator),
    NodeRule("arity", "as many inputs and outputs as the operator takes", _arity),
    NodeRule("attributes", "attributes that the operator has, of their kind, none missing", _attributes),
    NodeRule("operands", "each input is given, constant, or made before", _operands),
    NodeRule("results", "each value is made once", _results),
    NodeRule("launch", "inputs and outputs of a Launch are those of its function", _launch),
)


def rules() -> Iterable[tuple[str, str]]:
    """Every rule's name and sentence, in the order they are checked."""
    table: tuple[Any, ...] = (*GRAPH_RULES, *NODE_RULES)
    return [(r.name, r.says) for r in table]
