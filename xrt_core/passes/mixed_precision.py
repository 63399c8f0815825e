"""Mixed precision: lowers float32 computation to float16 or bfloat16 by Cast nodes, according to lists of operators."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
from msgspec import Struct

from xrt_core.errors import OptionError
from xrt_core.ir.garbage_collection import WeakIdentityMap
from xrt_core.ir.graph import Graph, Node, Value, every_node
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import find_schema, latest_opset, why_unknown
from xrt_core.ir.types import DTYPE_TO_ONNX, TensorType, dtype_from_name, dtype_name
from xrt_core.passes.mixed_precision_ops import (
    ALLOW,
    FOLLOW,
    KEEP,
    LOWERED_INPUTS,
    MOVE,
    TEXTS,
    signature_of,
    version_for,
)
from xrt_core.passes.pass_base import Pass
from xrt_core.passes.simplify import DEFAULT_FOLD_LIMIT

FLOAT32: Final = np.dtype(np.float32)
_FIRST_BF16_CAST: Final = 13


class Constraint(Struct, frozen=True):
    """A requirement that nodes matching `pattern` (with * and ?) compute in `dtype`. kind: "op" or "name"."""

    kind: str
    pattern: str
    dtype: str

    @classmethod
    def of(cls, key: str, dtype: str) -> Constraint:
        """From a row of the option `precision`, such as ("op:Softmax", "float32")."""
        kind, _, pattern = key.partition(":")
        return cls(kind, pattern, dtype)

    def matches(self, node: Node) -> bool:
        """Whether the constraint applies to this node."""
        return fnmatchcase(node.operator if self.kind == "op" else node.name, self.pattern)

    def __str__(self) -> str:
        return f"{self.kind}:{self.pattern}"


class KeptNode(Struct, frozen=True):
    """A node with float32 inputs that was not lowered, and the reason."""

    name: str
    operator: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """The result of lowering one graph. lowered: dtype -> number of nodes that compute in it. casts: inserted Casts."""

    lowered: Mapping[str, int] = field(default_factory=dict)
    casts: int = 0
    kept: tuple[KeptNode, ...] = ()

    def lines(self) -> Iterator[str]:
        """Human-readable: the counts, then the reasons."""
        counts = ", ".join(f"{n} nodes in {d}" for d, n in self.lowered.items()) or "no node lowered"
        yield f"precision: {counts}, {self.casts} casts; {len(self.kept)} nodes kept in float32"
        grouped: dict[tuple[str, str], int] = Counter((k.operator, k.reason) for k in self.kept)
        for (operator, reason), count in grouped.items():
            yield f"  kept in float32: {operator}{f' x{count}' if count > 1 else ''}: {reason}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        kept = [{"name": k.name, "operator": k.operator, "reason": k.reason} for k in self.kept]
        return {"lowered": dict(self.lowered), "casts": self.casts, "kept": kept}


class LowerPrecision(Pass):
    """Lowers nodes to a narrow float type, by the lists in `mixed_precision_ops` and the user's constraints.

    target: "float16", "bfloat16", or None to lower only nodes with constraints. constraints: if several match a node,
    one by name takes precedence over one by operator, and a later one over an earlier one. obey: a constraint that
    cannot be met raises an OptionError that names the node; otherwise it is a reason in the report. training: gradients
    will be built from the graph.

    1. An operator on the allow list computes in `target`; one on the keep list, or on no list, in float32.
    2. One on the follow list computes in the type of its non-constant float inputs, if all have the same.
    3. One that only moves elements computes in `target` also if all its readers do: the cast is inserted before it.
    4. A value is cast once per type; constants are cast at compile time. A narrow value is cast back where float32 is
       read. A Cast in the model reads the narrow value directly, since widening is exact.
    5. A node stays in float32 if a constant exceeds the range of float16, or a scalar constant would become zero; if no
       version of its operator supports the type; and if it reads an output of DequantizeLinear.
    6. A node whose version does not support the type gets the first later version that does, if only types were added.
    7. Unchanged: the types of graph inputs and outputs, other dtypes, control flow and what it reads.

    Raises OptionError for a constraint on an operator that does not exist.
    """

    name = "lower_precision"

    def __init__(
        self,
        target: str | None,
        constraints: Sequence[Constraint] = (),
        *,
        obey: bool = False,
        training: bool = False,
    ) -> None:
        self.target = None if target is None else dtype_from_name(target)
        self.constraints = tuple(sorted(constraints, key=lambda c: c.kind == "name"))  # stable: the last one counts
        self.obey = obey
        self.training = training
        self._constants: WeakIdentityMap[np.ndarray, dict[np.dtype, np.ndarray | str]] = WeakIdentityMap()
        for c in self.constraints:
            if c.kind == "op" and not set("*?[") & set(c.pattern):
                domain, _, op_type = c.pattern.rpartition(".")
                _check_operator(op_type, domain)

    def rewrite(self, graph: Graph) -> Graph:
        return self.apply(graph)[0]

    def apply(self, graph: Graph) -> tuple[Graph, PrecisionReport]:
        """Return the rewritten graph, or `graph` itself, and the report."""
        lowering = _GraphLowering(self, graph)
        for node in graph.nodes:
            lowering.node(node)
        for v in graph.outputs:
            lowering.widen(v)
        report = PrecisionReport(dict(lowering.lowered), lowering.casts, tuple(lowering.kept))
        return (graph.replace(nodes=lowering.made) if lowering.lowered else graph), report

    def check_names(self, graph: Graph) -> None:
        """Raise OptionError for a constraint by name that matches no node of `graph`, subgraphs included."""
        wanted = [c for c in self.constraints if c.kind == "name"]
        if not wanted:
            return
        nodes = list(every_node(graph))
        for c in wanted:
            if not any(c.matches(n) for n in nodes):
                near = difflib.get_close_matches(c.pattern, [n.name for n in nodes if n.name], 3)
                hint = f"; near it are {', '.join(map(repr, near))}" if near else ""
                raise OptionError(f"precision: no node of {graph.name or 'the graph'} is named {c.pattern!r}{hint}")

    def wanted(self, node: Node) -> Constraint | None:
        """The constraint that takes precedence for the node, or None."""
        return next((c for c in reversed(self.constraints) if c.matches(node)), None)

    def constant(self, data: np.ndarray, to: np.dtype) -> np.ndarray | str:
        """A float32 constant in a narrow dtype, or why it cannot be lowered. Casts of weights are cached."""
        if data.nbytes <= DEFAULT_FOLD_LIMIT:
            return _narrowed(data, to)
        known = self._constants.get(data)
        if known is None:
            self._constants.put(data, known := {})
        if to not in known:
            known[to] = _narrowed(data, to)
        return known[to]


class _GraphLowering:
    """The lowering of one graph. narrow: float32 value -> the narrow value that a lowered node computes instead."""

    def __init__(self, rules: LowerPrecision, graph: Graph) -> None:
        self.rules = rules
        self.graph = graph
        self.made: list[Node] = []
        self.narrow: dict[Value, Value] = {}
        self.wide: set[Value] = set()  # narrow values that have been cast back
        self.cast: dict[tuple[Value, np.dtype], Value] = {}
        self.dequantized = {
            v for n in graph.nodes if n.op_type == "DequantizeLinear" for v in n.outputs if v is not None
        }
        self.names = {v.name for n in graph.nodes for v in (*n.inputs, *n.outputs) if v is not None}
        self.names.update(v.name for v in (*graph.inputs, *graph.outputs))
        self.node_names = {n.name for n in graph.nodes}
        self.lowered: Counter[str] = Counter()
        self.casts = 0
        self.kept: list[KeptNode] = []
        self.moves: set[int] = set()
        self.moves = self.moves_before_products()

    def moves_before_products(self) -> set[int]:
        """Ids of the nodes that only move elements and have no float32 readers: casts are inserted before them.

        Results are the same and so is the number of casts, but half as many bytes are moved, and fused attention
        kernels expect the result of a Softmax to be cast before it is masked.
        """
        target, found = self.rules.target, set[int]()
        if target is None:
            return found
        wide, read = set(self.graph.outputs), set[Value]()
        for node in reversed(self.graph.nodes):
            plan: _Lowering | str = ""
            if node.op_type in ALLOW:
                plan = self.plan(node)
            elif node.op_type in MOVE and not node.domain and self.rules.wanted(node) is None:
                made = [v for v in node.outputs if v is not None]
                if not any(v in wide for v in made) and any(v in read for v in made):
                    plan = self.lowering(node, target)
                if any(v in self.dequantized for v in node.inputs if v is not None):
                    plan = ""
                if isinstance(plan, _Lowering):
                    found.add(id(node))
            if not isinstance(plan, _Lowering) or plan.to != target:
                wide.update(node.uses())
                continue
            for i, v in enumerate(node.inputs):
                if v is not None:
                    (read if i in plan.inputs else wide).add(v)
        return found

    def node(self, node: Node) -> None:
        """Append one node, lowered or unchanged."""
        plan = self.plan(node)
        if isinstance(plan, _Lowering):
            self.lower(node, plan)
            return
        if plan:
            self.kept.append(KeptNode(node.name, node.operator, plan))
        source = node.inputs[0] if node.inputs else None
        if node.op_type in ("Cast", "CastLike") and not node.domain and source in self.narrow:
            assert source is not None
            node = node.replace(inputs=(self.narrow[source], *node.inputs[1:]))
        for v in node.uses():
            self.widen(v)
        self.made.append(node)

    def plan(self, node: Node) -> _Lowering | str:
        """How to lower the node, or why it is not lowered; "" if it has nothing to lower."""
        constraint = self.rules.wanted(node)
        floats = [v for v in node.inputs if v is not None and v.dtype == FLOAT32]
        if constraint is not None and self.rules.obey and constraint.dtype == "float32":
            narrow = next((v for v in node.inputs if v is not None and v.dtype is not None
                           and dtype_name(v.dtype) in TEXTS), None)  # fmt: skip
            if narrow is not None and node.op_type != "Cast":
                raise self.refused(constraint, node, f"the model computes it in {narrow.dtype}, which is not raised")
        if not floats or node.subgraphs or _has_nothing_to_lower(node):
            return ""
        to = self.rules.target
        if constraint is not None:
            if constraint.dtype == "float32":
                return f"precision={{{str(constraint)!r}: 'float32'}}"
            to = dtype_from_name(constraint.dtype)
        elif to is None:
            return "no type was asked for it, and only marked nodes are lowered"
        elif any(v in self.dequantized for v in floats):
            return "it computes on quantised values"
        elif node.domain or node.op_type not in ALLOW | FOLLOW:
            return _unlisted(node)
        elif node.op_type == "BatchNormalization" and (self.rules.training or _is_training(node)):
            return "it takes the statistics of the batch"
        elif id(node) in self.moves:
            to = self.rules.target
        elif node.op_type in FOLLOW:
            arriving = {self.narrow[v].dtype if v in self.narrow else FLOAT32
                        for v in self.followed(node) if v.data is None}  # fmt: skip
            if arriving == {FLOAT32} or len(arriving) != 1:
                return "it follows its inputs, and not all of them arrive in a narrow type"
            (to,) = arriving
        assert to is not None
        found = self.lowering(node, to)
        if isinstance(found, str) and constraint is not None and self.rules.obey:
            raise self.refused(constraint, node, found)
        return found

    def refused(self, c: Constraint, node: Node, why: str) -> OptionError:
        return OptionError(
            f"force_precision_constraints: {str(c)!r} asks for {c.dtype}, but node {node.name!r} ({node.operator}) "
            f"cannot: {why}"
        )

    def followed(self, node: Node) -> list[Value]:
        """The float32 inputs that determine the type of a node on the follow list."""
        only = LOWERED_INPUTS.get(node.op_type)
        return [v for i, v in enumerate(node.inputs)
                if v is not None and v.dtype == FLOAT32 and (only is None or i in only)]  # fmt: skip

    def lowering(self, node: Node, to: np.dtype) -> _Lowering | str:
        """The version, inputs and outputs to lower, or why the node cannot be lowered."""
        version = version_for(node.op_type, node.domain, node.version, dtype_name(to))
        if version is None:
            return f"no version of {node.operator} that fits takes {dtype_name(to)}"
        signature = signature_of(node.op_type, node.domain, version)
        assert signature is not None
        only = LOWERED_INPUTS.get(node.op_type)
        variables = {
            signature.input(i).variable
            for i, v in enumerate(node.inputs)
            if v is not None and v.dtype == FLOAT32 and signature.input(i).takes(to) and (only is None or i in only)
        }
        inputs = [i for i, v in enumerate(node.inputs)
                  if v is not None and v.dtype == FLOAT32 and signature.input(i).variable in variables]  # fmt: skip
        outputs = [i for i, v in enumerate(node.outputs)
                   if v is not None and signature.output(i).variable in variables]  # fmt: skip
        if not inputs or not outputs:
            return f"{node.operator} takes float32 alone there"
        for i in inputs:
            v = node.inputs[i]
            assert v is not None
            if v.data is not None:
                found = self.rules.constant(v.data, to)
                if isinstance(found, str):
                    return f"constant {v.name!r} {found}"
        return _Lowering(to, version, frozenset(inputs), frozenset(outputs))

    def lower(self, node: Node, plan: _Lowering) -> None:
        """Append the node in a narrow type."""
        inputs: list[Value | None] = []
        for i, v in enumerate(node.inputs):
            if v is not None and i in plan.inputs:
                inputs.append(self.narrowed(v, plan.to))
                continue
            if v is not None:
                self.widen(v)
            inputs.append(v)
        outputs = []
        for i, v in enumerate(node.outputs):
            if v is not None and i in plan.outputs:
                made = Value(self.fresh(v.name, plan.to), TensorType(plan.to, v.shape))
                self.narrow[v] = made
                v = made
            outputs.append(v)
        attributes = node.attributes
        if node.op_type == "Attention" and not node.domain and "softmax_precision" not in attributes:
            attributes = {**attributes, "softmax_precision": DTYPE_TO_ONNX[FLOAT32]}
        self.made.append(
            Node(node.op_type, inputs, outputs, attributes, domain=node.domain, version=plan.version, name=node.name,
                 annotations=node.annotations)
        )  # fmt: skip
        self.lowered[dtype_name(plan.to)] += 1

    def narrowed(self, v: Value, to: np.dtype) -> Value:
        """A float32 value in a narrow dtype: computed so, or by one Cast for all its readers."""
        made = self.narrow.get(v)
        if made is not None and made.dtype == to:
            return made
        found = self.cast.get((v, to))
        if found is None:
            name = self.fresh(v.name, to)
            if v.data is not None:
                data = self.rules.constant(v.data, to)
                assert isinstance(data, np.ndarray)
                found = Value.constant(data, name)
            else:
                found = Value(name, TensorType(to, v.shape))
                self.add_cast(v if made is None else made, found)
            self.cast[v, to] = found
        return found

    def widen(self, v: Value) -> None:
        """Ensure that the float32 value exists: cast it back if it is computed in a narrow type."""
        made = self.narrow.get(v)
        if made is not None and v not in self.wide:
            self.wide.add(v)
            self.add_cast(made, v)

    def add_cast(self, source: Value, result: Value) -> None:
        assert result.dtype is not None
        assert source.dtype is not None
        opset = self.graph.opsets.get("", latest_opset())
        if "bfloat16" in (dtype_name(source.dtype), dtype_name(result.dtype)):
            opset = max(opset, _FIRST_BF16_CAST)
        schema = find_schema("Cast", "", opset)
        assert schema is not None
        name = free = f"{source.name or 'value'}/cast"
        count = 1
        while free in self.node_names:
            count += 1
            free = f"{name}_{count}"
        self.node_names.add(free)
        to = DTYPE_TO_ONNX[result.dtype]
        self.made.append(Node("Cast", [source], [result], {"to": to}, version=schema.since_version, name=free))
        self.casts += 1

    def fresh(self, name: str, to: np.dtype) -> str:
        """A free name for the narrow form of a value."""
        name = free = f"{name or 'value'}/{dtype_name(to)}"
        count = 1
        while free in self.names:
            count += 1
            free = f"{name}_{count}"
        self.names.add(free)
        return free


class _Lowering(Struct, frozen=True):
    """to: the dtype. version: of the operator. inputs, outputs: indices of those that become narrow."""

    to: np.dtype
    version: int
    inputs: frozenset[int]
    outputs: frozenset[int]


def _has_nothing_to_lower(node: Node) -> bool:
    """Whether an operator has nothing to lower: casts, quantisation, shape queries, tests for NaN and Inf."""
    traits = traits_of(node)
    return traits.cast or traits.quantizes or traits.shape_query or node.op_type in ("IsInf", "IsNaN")


def _unlisted(node: Node) -> str:
    if node.op_type in KEEP and node.domain in ("", "xrt", "ai.onnx.preview.training"):
        return f"{node.operator} is on the keep list"
    return f"{node.operator} is on no list"


def _is_training(node: Node) -> bool:
    return bool(node.attributes.get("training_mode", 0)) or sum(v is not None for v in node.outputs) > 1


def _narrowed(data: np.ndarray, to: np.dtype) -> np.ndarray | str:
    """The constant in the narrow dtype, or a clause that says why it cannot be lowered."""
    if to == np.float16:
        limit = float(np.finfo(np.float16).max)
        finite = np.abs(data[np.isfinite(data)])
        if finite.size and float(finite.max()) >= limit + 16:  # values that round to the largest number fit
            return f"holds {float(finite.max()):g}, beyond float16's largest number {limit:g}"
    made = data.astype(to)
    if data.size == 1 and data.reshape(-1)[0] != 0 and made.reshape(-1)[0] == 0:
        return f"is {float(data.reshape(-1)[0]):g}, which {dtype_name(to)} rounds to zero"
    made.flags.writeable = False
    return made


def _check_operator(op_type: str, domain: str) -> None:
    from xrt_core.ir.schema import domain_version

    newest = domain_version(domain) or None
    if newest is None or find_schema(op_type, domain, newest) is None:
        raise OptionError(f"precision={{'op:{domain + '.' if domain else ''}{op_type}': ...}}: "
                          f"{why_unknown(op_type, domain, newest or 1)}")  # fmt: skip
