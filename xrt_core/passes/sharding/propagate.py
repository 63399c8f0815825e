"""Propagation: infers how each tensor of a graph lies on a mesh, and inserts conversions where readers need another.

One axis of the mesh after another, nodes in order: a node runs in the way whose conversions move the fewest bytes.
A partial result counts what combining it costs, and is combined before anything reads it.
Conversions ("boxing") are nodes `xrt.Boxing`, whose numbers are
those of their input: the host ignores them, an engine that shards makes collectives of them.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from xrt_core.errors import GraphError, OptionError
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import DIALECT, DIALECT_VERSION
from xrt_core.ir.sharding import B, Mesh, NdSbp, Sbp, parse_sbp, sbp_text
from xrt_core.passes.sharding.rules import Way, ways

UPDATES = "ai.onnx.preview.training"
"""The domain of optimizers' operators."""

_KINDS = {("P", "B"): "all-reduce", ("S", "B"): "all-gather", ("P", "S"): "reduce-scatter", ("S", "S"): "all-to-all"}
_FACTORS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 0.0, "slice": 0.0}


@dataclass(frozen=True, slots=True)
class Collective:
    """A conversion. kind: all-reduce, all-gather, reduce-scatter, all-to-all, or slice, which moves nothing.

    value: what is converted. bytes: moved by each device. reason: who needs it.
    """

    kind: str
    value: str
    source: str
    target: str
    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.value}: {self.source} -> {self.target}, {self.bytes} bytes, for {self.reason}"


@dataclass(frozen=True, slots=True)
class ShardingReport:
    """How the tensors of a graph lie on a mesh. tensors: name -> SBP. collectives: in the order of the graph.
    replicated: node -> why it is not split."""

    mesh: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    replicated: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        moving = [c for c in self.collectives if c.kind != "slice"]
        found = [f"mesh {self.mesh}: {len(moving)} collectives, {sum(c.bytes for c in moving)} bytes a device"]
        found += [f"  {c}" for c in moving]
        by_reason: dict[str, list[str]] = {}
        for node, why in self.replicated.items():
            by_reason.setdefault(why, []).append(node)
        return found + [f"  replicated: {', '.join(n[:4])} ({why})" for why, n in by_reason.items()]


def shard_graph(graph: Graph, mesh: Mesh, shardings: Mapping[str, str]) -> tuple[Graph, ShardingReport]:
    """The graph with conversions, and the report.

    shardings: pattern of names of inputs, constants or other values -> SBP; the first that matches counts. Marks by
    `xrt.shard` are nodes `Boxing` of the graph, and win.

    Raises OptionError for a pattern without a match, an axis that the mesh does not have or a partial annotation, and
    GraphError for a size that an annotation does not divide, naming both.
    """
    return Propagation(graph, mesh, shardings).run()


def by_batch(graph: Graph, mesh: Mesh, axis: str = "data") -> dict[str, str]:
    """Every input of the graph split along its first axis over the mesh's `axis`, where there is one."""
    names = [v.name for v in graph.inputs if v.name and v.shape] if axis in mesh.names else []
    return {exact_name(name): f"{axis}:S(0)" for name in names}


def marked(graph: Graph) -> dict[Value, str]:
    """What `xrt.shard` says of inputs and constants of a graph, also behind a Cast: of several marks the first."""
    roots = {v: v for v in (*graph.inputs, *graph.constants)}
    found: dict[Value, str] = {}
    for n in graph.nodes:
        root = roots.get(n.inputs[0]) if n.inputs and n.inputs[0] is not None else None
        made, text = n.outputs[0] if n.outputs else None, n.attributes.get("target")
        if root is not None and is_boxing(n) and isinstance(text, str):
            found.setdefault(root, text)
        elif root is not None and made is not None and n.op_type == "Cast" and not n.domain:
            roots[made] = root
    return found


def exact_name(name: str) -> str:
    """The pattern that matches a name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


class Propagation:
    """One run over a graph. sbp: value -> how it lies, and reads: (node, input) -> how it is read, axis by axis of the
    mesh; known after `run`. Otherwise as `shard_graph`."""

    def __init__(self, graph: Graph, mesh: Mesh, shardings: Mapping[str, str]) -> None:
        self.graph, self.mesh = graph, mesh
        self.rules = [(pattern, parse_sbp(text, mesh)) for pattern, text in shardings.items()]
        self.used: set[str] = set()
        self.lost: dict[str, tuple[str, str]] = {}  # pattern -> a value, the pattern that decided it
        self.marks: dict[Value, NdSbp] = {}
        self.sbp: dict[Value, list[Sbp]] = {}
        self.reads: dict[tuple[int, int], list[Sbp]] = {}
        self.replicated: dict[str, str] = {}
        self.updates = updates(graph)
        self.readers = Counter(v for n in graph.nodes if n.op_type != "Assign" for v in n.inputs)
        self.paid: set[tuple[Value, int, Sbp]] = set()
        self.zeros = zeros(graph)

    def run(self) -> tuple[Graph, ShardingReport]:
        graph = self.graph
        for v in (*graph.inputs, *graph.constants):
            self.mark(v)
        for v, said in marked(graph).items():
            if v not in self.marks:
                self.marks[v] = self.checked(v, parse_sbp(said, self.mesh), f"xrt.shard of {v.name!r}")
        for n in graph.nodes:
            text = n.attributes.get("target") if is_boxing(n) else None
            for made in n.outputs:
                if made is not None and isinstance(text, str):
                    self.marks[made] = self.checked(made, parse_sbp(text, self.mesh), f"xrt.shard of {n.name!r}")
                elif made is not None:
                    self.mark(made)
        for pattern, sbp in self.rules:
            if pattern in self.lost and pattern not in self.used:
                name, other = self.lost[pattern]
                said = sbp_text(dict(self.rules)[other], self.mesh)
                raise OptionError(
                    f"sharding {pattern!r}: {sbp_text(sbp, self.mesh)!r} decides nothing, as all that it matches "
                    f"({name!r}) lies by {other!r}: {said!r}, which comes before it; leave one out, or put it first"
                )
            if pattern not in self.used:
                known = ", ".join([v.name for v in (*graph.inputs, *graph.constants) if v.name][:8])
                raise OptionError(f"sharding {pattern!r} matches no value of the graph; there are {known}")
        for axis in range(len(self.mesh.names)):
            self.infer(axis)
        return self.rewritten()

    def mark(self, v: Value) -> None:
        first = ""
        for pattern, sbp in self.rules:
            if not v.name or not fnmatch.fnmatchcase(v.name, pattern):
                continue
            if first:
                self.lost.setdefault(pattern, (v.name, first))
                continue
            first = pattern
            self.used.add(pattern)
            self.marks[v] = self.checked(v, sbp, f"sharding {pattern!r}")

    def checked(self, v: Value, sbp: NdSbp, origin: str) -> NdSbp:
        if any(s.reduce for s in sbp):
            raise OptionError(f"{origin}: a partial result is what an operator gives, not what one asks for")
        parts: dict[int, int] = {}
        for s, (_, size) in zip(sbp, self.mesh.sizes, strict=True):
            if s.axis is not None:
                parts[s.axis] = parts.get(s.axis, 1) * size
        for axis, count in parts.items():
            shape = v.shape or ()
            if axis >= len(shape):
                raise GraphError(f"{origin} splits axis {axis} of {v.name!r}, which has shape {list(shape)}")
            dim = shape[axis]
            if not isinstance(dim, int) or dim % count:
                raise GraphError(
                    f"{origin} splits axis {axis} of {v.name!r}, of size {dim}, over {count} devices ({self.mesh}), "
                    f"which does not divide it; sizes that do: multiples of {count}"
                )
        return sbp

    # --- inference over one axis of the mesh ---

    def infer(self, axis: int) -> None:
        size = self.mesh.sizes[axis][1]
        for v in (*self.graph.inputs, *self.graph.constants):
            self.give(v, axis, self.marks[v][axis] if v in self.marks else B)
        for i, n in enumerate(self.graph.nodes):
            options, why = ways(n, self.zeros)
            best, least = options[-1], (math.inf, False)
            for way in options:
                if not self.fits(n, way, axis, size):
                    continue
                given = [(v, s) for v, s in zip(n.inputs, way.inputs, strict=True) if v is not None]
                cost = sum(self.cost(v, self.sbp[v][axis], s, size) for v, s in given if (v, axis, s) not in self.paid)
                if not any(self.sbp[v][axis].axis is not None for v, _ in given):
                    # what is split here alone is put together again later
                    cost += sum(self.cost(v, s, B, size) for v, s in given if self.sbp[v][axis].reduce and s != B)
                late = False
                for made, s in zip(n.outputs, way.outputs, strict=True):
                    if made is not None and (s.reduce or made in self.marks or made in self.updates):
                        cost += self.cost(made, s, self.wanted(made, axis), size)
                        late |= s != self.wanted(made, axis)
                # of equal ways the one that converts what others read as well
                rank = cost, late and any(self.readers[v] > 1 for v, _ in given if not self.sbp[v][axis].is_broadcast)
                if rank < least:
                    best, least = way, rank
            split = any(v is not None and not self.sbp[v][axis].is_broadcast for v in n.inputs)
            if best is options[-1] and why and split:
                self.replicated[n.name or n.op_type] = why
            for k, (read, s) in enumerate(zip(n.inputs, best.inputs, strict=True)):
                self.reads.setdefault((i, k), []).append(s)
                if read is not None:
                    self.paid.add((read, axis, s))
            for made, s in zip(n.outputs, best.outputs, strict=True):
                if made is not None:
                    self.give(made, axis, s)

    def wanted(self, v: Value, axis: int) -> Sbp:
        """How a value must lie in the end: as it is marked, or as the variable that it updates."""
        variable = self.updates.get(v)
        if v in self.marks:
            return self.marks[v][axis]
        return B if variable is None else self.sbp[variable][axis]

    def give(self, v: Value, axis: int, sbp: Sbp) -> None:
        known = self.sbp.setdefault(v, [])
        assert len(known) == axis
        known.append(sbp)

    def fits(self, n: Node, way: Way, axis: int, size: int) -> bool:
        for v, s in (*zip(n.inputs, way.inputs, strict=True), *zip(n.outputs, way.outputs, strict=True)):
            if v is None or s.axis is None:
                continue
            others = [self.mesh.sizes[a][1] for a, o in enumerate(self.sbp.get(v, ())[:axis]) if o.axis == s.axis]
            shape = v.shape or ()
            dim = shape[s.axis] if s.axis < len(shape) else 0
            parts = size * math.prod(others)
            if not isinstance(dim, int) or not dim or dim % parts or way.units % parts:
                return False
        if is_boxing(n):
            return True
        alias = n.annotations.aliases if n.annotations.aliases else ((0, 0),) if n.op_type == "Assign" else ()
        for out, given in alias:  # what is updated in place stays where it is
            v = n.inputs[given]
            if v is not None and way.outputs[out] != self.sbp[v][axis]:
                return False
        return True

    def cost(self, v: Value, have: Sbp, want: Sbp, size: int) -> float:
        """Bytes that each device moves to make one of the other; a little for each conversion."""
        kind = conversion(have, want)
        if kind is None:
            return 0.0
        if kind == "":
            return math.inf
        return 1e-3 + moved(kind, _bytes(v), size)

    def part(self, v: Value, source: NdSbp, target: NdSbp, axis: str) -> int:
        """Bytes of what a group of devices along `axis` holds of a value: other axes may split it among groups."""
        rows = zip(self.mesh.sizes, source, target, strict=True)
        return _bytes(v) // math.prod(n for (a, n), s, t in rows if a != axis and s == t and s.axis is not None)

    # --- the graph with conversions ---

    def rewritten(self) -> tuple[Graph, ShardingReport]:
        graph, mesh = self.graph, self.mesh
        nodes: list[Node] = []
        collectives: list[Collective] = []
        forms: dict[tuple[Value, NdSbp], Value] = {}
        taken = {v.name for n in graph.nodes for v in n.outputs if v is not None}
        taken.update(v.name for v in (*graph.inputs, *graph.constants))
        home = {v: tuple(s) for v, s in self.sbp.items()}

        def form(v: Value, want: NdSbp, reason: str, force: bool = False) -> Value:
            have = home[v]
            if have == want and not force:
                return forms.get((v, want), v)
            if (v, want) not in forms:
                name = f"{v.name}_{sbp_text(want, mesh)}".translate(str.maketrans(":(),", "____"))
                while name in taken:
                    name += "_"
                taken.add(name)
                made = Value(name, v.type)
                source = have if not force else (B,) * len(want)
                kinds = [conversion(h, w) for h, w in zip(source, want, strict=True)]
                amount = 0
                for kind, (axis, size) in zip(kinds, mesh.sizes, strict=True):
                    if kind:
                        b = int(moved(kind, self.part(v, source, want, axis), size))
                        amount += b
                        texts = sbp_text(source, mesh), sbp_text(want, mesh)
                        collectives.append(Collective(kind, v.name, *texts, b, f"{reason}, over {axis}"))
                attributes = {
                    "mesh": str(mesh), "source": sbp_text(have, mesh), "target": sbp_text(want, mesh),
                    "kind": "+".join(k for k in kinds if k), "bytes": amount,
                }  # fmt: skip
                nodes.append(boxing(v, made, attributes))
                forms[v, want] = made
            return forms[v, want]

        for v in (*graph.inputs, *graph.constants):
            if v in self.marks or any(not s.is_broadcast for s in home[v]):
                form(v, home[v], "its annotation", force=True)  # whole ones too: they say that the mesh computes
        for i, n in enumerate(graph.nodes):
            wanted = self.marks.get(n.outputs[0]) if n.outputs and n.outputs[0] is not None else None
            if is_boxing(n):
                source, made = n.inputs[0], n.outputs[0]
                assert source is not None
                assert made is not None
                home[made] = self.marks[made]
                texts = sbp_text(home[source], mesh), sbp_text(home[made], mesh)
                for h, w, (axis, size) in zip(home[source], home[made], mesh.sizes, strict=True):
                    if kind := conversion(h, w):
                        amount = int(moved(kind, self.part(source, home[source], home[made], axis), size))
                        collectives.append(Collective(kind, source.name, *texts, amount, f"xrt.shard, over {axis}"))
                nodes.append(n.replace(attributes={"mesh": str(mesh), "source": texts[0], "target": texts[1]}))
                continue
            label = n.name or n.op_type
            # what is updated in place is read as it is: its own conversion would cut the alias
            kept = {k for _, k in n.annotations.aliases}
            inputs = [
                v if v is None or k in kept else form(v, tuple(self.reads[i, k]), label) for k, v in enumerate(n.inputs)
            ]
            nodes.append(n.replace(inputs=inputs))
            if wanted is not None and n.outputs[0] is not None:
                form(n.outputs[0], wanted, "its annotation")
        outputs = [
            form(v, tuple(B if s.reduce else s for s in home[v]), "an output of the graph") for v in graph.outputs
        ]
        tensors = {v.name: sbp_text(s, mesh) for v, s in home.items() if v.name and any(not x.is_broadcast for x in s)}
        report = ShardingReport(str(mesh), tensors, tuple(collectives), self.replicated)
        opsets = graph.opsets if DIALECT in graph.opsets else {**graph.opsets, DIALECT: DIALECT_VERSION}
        return graph.replace(nodes=nodes, outputs=outputs, opsets=opsets), report


def conversion(have: Sbp, want: Sbp) -> str | None:
    """The kind of conversion; None where there is nothing to do, "" where there is no way."""
    if have == want:
        return None
    if want.reduce:
        return ""
    if have.is_broadcast:
        return "slice"
    return _KINDS[str(have)[0], str(want)[0]]


def moved(kind: str, size: int, devices: int) -> float:
    """Bytes that each device sends for a tensor of `size` bytes, by the ring algorithms."""
    share = (devices - 1) / devices
    return share * size / devices if kind == "all-to-all" else _FACTORS[kind] * share * size


def updates(graph: Graph) -> dict[Value | None, Value | None]:
    """The variable that a value updates, also by way of an optimizer or of elementwise nodes, as gradients do."""
    found = {n.inputs[1]: n.inputs[0] for n in graph.nodes if n.op_type == "Assign" and n.domain == DIALECT}
    given = {*graph.inputs, *graph.constants}
    for n in reversed(graph.nodes):
        made = n.outputs[0] if n.outputs else None
        if made in found and made is not None and (traits_of(n).elementwise or n.domain == UPDATES):
            for v in n.inputs:
                if v is not None and v not in given and v.shape == made.shape:
                    found.setdefault(v, found[made])
    return found


def zeros(graph: Graph) -> set[Value | None]:
    """Values of a graph that are zero everywhere: a constant of one element, and views of it, such as what it is
    expanded to: the gradient of a lookup begins so."""
    found: set[Value | None] = {v for v in graph.constants if v.data is not None and v.data.size == 1 and not v.data}
    for n in graph.nodes:
        if traits_of(n).view and n.inputs[0] in found:
            found.update(n.outputs)
    return found


def is_boxing(node: Node) -> bool:
    """Whether a node is a conversion, or a mark of `xrt.shard`."""
    return node.op_type == "Boxing" and node.domain == DIALECT


def boxing(source: Value, made: Value, attributes: Mapping[str, object]) -> Node:
    """A conversion node."""
    return Node("Boxing", [source], [made], attributes, domain=DIALECT, version=DIALECT_VERSION, name=made.name)  # type: ignore[arg-type]


def without_boxing(graph: Graph) -> Graph:
    """The graph without conversions and marks, where there is no mesh."""
    new: dict[Value, Value] = {}
    nodes = []
    for n in graph.nodes:
        if is_boxing(n) and n.inputs[0] is not None and n.outputs[0] is not None:
            new[n.outputs[0]] = new.get(n.inputs[0], n.inputs[0])
        else:
            nodes.append(substitute(n, new) if new else n)
    return graph.replace(nodes=nodes, outputs=[new.get(v, v) for v in graph.outputs]) if new else graph


def _bytes(v: Value) -> int:
    shape = v.shape or ()
    return math.prod(d for d in shape if isinstance(d, int)) * (v.dtype.itemsize if v.dtype is not None else 1)
