"""Transfers: a converter node of the dialect wherever a value passes between the host and an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import DIALECT, DIALECT_VERSION

HOST = "host"


def is_converter(node: Node) -> bool:
    """Whether the node is an `EngineInputConvert` or an `EngineOutputConvert`."""
    return traits_of(node).boundary


def space_of(node: Node) -> str:
    """Where a node reads and makes its values: the engine of a Launch, the host for all others."""
    return str(node.attributes["engine"]) if node.domain == DIALECT and node.op_type == "Launch" else HOST


def insert_converters(graph: Graph, has_converter: Callable[[str, str], bool], mixed: Collection[str] = ()) -> Graph:
    """The graph with converters wherever a node reads a value that was made in another space.

    has_converter: whether somebody wrote a converter for a pair: from one engine to another, then it need not lead over
    the host, or from an engine to the host, then only that knows its arrays.
    mixed: names that stand for several engines, so that two of their launches share no space.

        host -> engine      EngineInputConvert(source="host", target=engine)
        engine -> host      EngineOutputConvert(source=engine, target="host")
        engine A -> B       EngineInputConvert(source=A, target=B) where `has_converter(A, B)`, else the two above

    A value goes to a space once, right before the first node there that reads it; launches of one engine hand over
    their arrays as they are. Converters that stand in the graph already compute nothing: they are taken out, and put
    back where they are still needed, so pairs that cancel go, and the pass changes nothing when it is run again.

    Graph outputs stay where they were made: only the caller knows which library's arrays it wants. But they come from
    the host where `has_converter(engine, "host")`, and the second time where one is returned twice: there results of
    one memory are told apart.
    """
    if not any(n.domain == DIALECT for n in graph.nodes):
        return graph
    return _Inserter(graph, has_converter, mixed).run()


class _Inserter:
    def __init__(self, graph: Graph, has_converter: Callable[[str, str], bool], mixed: Collection[str]) -> None:
        self.graph = graph
        self.has_converter = has_converter
        self.mixed = mixed
        self.home: dict[Value, str] = {}  # values made in an engine's space -> that engine
        self.plain: dict[Value, Value] = {}  # what a converter of the given graph made -> what it was made of
        self.forms: dict[tuple[Value, str], Value] = {}  # (value, space) -> the value there
        self.nodes: list[Node] = []
        self.names: set[str] = set()

    def run(self) -> Graph:
        graph = self.graph
        for n in graph.nodes:
            if is_converter(n):
                v, made = n.inputs[0], n.outputs[0]
                if v is not None and made is not None:
                    self.plain[made] = self.plain.get(v, v)
            else:
                self.nodes.append(self.in_its_space(n))
        outputs: list[Value] = []
        for v in graph.outputs:
            v = self.plain.get(v, v)
            leaves = v in self.home and (v in outputs or self.has_converter(self.home[v], HOST))
            outputs.append(self.form(v, HOST) if leaves else v)
        opsets = graph.opsets if DIALECT in graph.opsets else {**graph.opsets, DIALECT: DIALECT_VERSION}
        return graph.replace(nodes=self.nodes, outputs=outputs, opsets=opsets)

    def in_its_space(self, node: Node) -> Node:
        """The node reading each value in its own space; what that takes is put before it."""
        space = space_of(node)
        if space == HOST and not self.home and not self.plain:
            return node
        new: dict[Value, Value] = {}
        for v in node.uses():
            there = self.form(self.plain.get(v, v), space)
            if there is not v:
                new[v] = there
        if space != HOST:
            self.home.update((v, space) for v in node.outputs if v is not None)
        return substitute(node, new) if new else node

    def form(self, v: Value, space: str) -> Value:
        """`v` as it is read in `space`."""
        home = self.home.get(v, HOST)
        if home == space and space not in self.mixed:
            return v
        found = self.forms.get((v, space))
        if found is not None:
            return found
        if HOST in (home, space) or (home != space and self.has_converter(home, space)):
            made = self.convert(v, home, space)
        else:
            made = self.convert(self.form(v, HOST), HOST, space)
        self.forms[v, space] = made
        return made

    def convert(self, v: Value, source: str, target: str) -> Value:
        made = Value(self.name(f"{v.name}_on_{target}") if v.name else "", v.type)
        op_type = "EngineOutputConvert" if target == HOST else "EngineInputConvert"
        attributes: Mapping[str, str] = {"source": source, "target": target}
        self.nodes.append(
            Node(op_type, [v], [made], attributes, domain=DIALECT, version=DIALECT_VERSION, name=made.name)
        )
        return made

    def name(self, wanted: str) -> str:
        """`wanted`, with a number behind it where the graph has such a name already."""
        if not self.names:
            nodes = [n for n in self.graph.nodes if not is_converter(n)]
            self.names = {n.name for n in nodes}
            self.names.update(v.name for n in nodes for v in n.outputs if v is not None)
            self.names.update(v.name for v in (*self.graph.inputs, *self.graph.constants))
        name, i = wanted, 0
        while name in self.names:
            i += 1
            name = f"{wanted}_{i}"
        self.names.add(name)
        return name
