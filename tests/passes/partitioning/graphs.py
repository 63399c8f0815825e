"""Small graphs for the clustering tests: written by hand, or drawn at random, and an interpreter that runs any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from xrt_core.ir.function import Function
from xrt_core.ir.graph import Annotations, Graph, Node, Support, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning import Candidate, Clustering

TYPE = TensorType(np.dtype(np.float32), (2,))


def graph(text: str, outputs: str = "", **annotations: Annotations) -> Graph:
    """A graph from lines such as 'a = Op(x, y)'; names that no line makes are inputs. `annotations` go by node name.

    Without `outputs` every value that nobody reads is an output.
    """
    values: dict[str, Value] = {}
    made: set[str] = set()
    read: set[str] = set()
    nodes = []
    for line in filter(None, (part.strip() for part in text.replace(";", "\n").splitlines())):
        left, right = line.split("=")
        op, arguments = right.strip().rstrip(")").split("(")
        names = [a.strip() for a in arguments.split(",") if a.strip()]
        outs = [a.strip() for a in left.split(",")]
        for name in names + outs:
            values.setdefault(name, Value(name, TYPE))
        made.update(outs)
        read.update(names)
        own = annotations.get(outs[0], Annotations())
        ins = [values[a] for a in names]
        nodes.append(Node(op, ins, [values[a] for a in outs], version=1, name=outs[0], annotations=own))
    inputs = [v for name, v in values.items() if name not in made]
    returned = outputs.split() or [name for name in values if name in made and name not in read]
    return Graph(inputs, [values[name] for name in returned], nodes, opsets={"": 13})


def engine(name: str, *operators: str) -> Candidate:
    """An engine that takes exactly these operators."""
    taken = frozenset(operators)
    return Candidate(name, lambda n: Support.yes() if n.op_type in taken else Support.no(f"no kernel for {n.op_type}"))


def names(g: Graph, clustering: Clustering) -> list[str]:
    """The clusters as texts such as 'toy: a b'."""
    return [f"{c.engine}: {' '.join(g.nodes[i].name for i in c.nodes)}" for c in clustering.clusters]


def execute(g: Graph, feeds: Sequence[int]) -> list[int]:
    """Run a graph on integers: a node's output is a hash of its operator, name, inputs and what its subgraphs see."""
    env = dict(zip(g.inputs, feeds, strict=True))
    _run(g, env)
    return [_read(v, env) for v in g.outputs]


def _read(value: Value, env: Mapping[Value, int]) -> int:
    return int(value.data.sum()) if value.data is not None else env[value]


def _run(g: Graph, env: dict[Value, int]) -> None:
    for n in g.nodes:
        ins = [None if v is None else _read(v, env) for v in n.inputs]
        function = n.attributes.get("function")
        if isinstance(function, Function):
            inner = dict(zip(function.body.inputs, ins, strict=True))  # a function sees its params and nothing else
            _run(function.body, inner)
            results = [_read(v, inner) for v in function.body.outputs]
        else:
            seen = []
            for sub in n.subgraphs:
                inner = dict(env)
                _run(sub, inner)
                seen.extend(_read(v, inner) for v in sub.outputs)
            results = [hash((n.op_type, n.name, tuple(ins), tuple(seen), k)) for k in range(len(n.outputs))]
        for v, r in zip(n.outputs, results, strict=True):
            if v is not None:
                env[v] = r


@dataclass(frozen=True)
class Recipe:
    """What a random graph is built from; building twice gives two equal graphs of different objects."""

    nodes: tuple[tuple[str, tuple[int, ...], int, Annotations, int | None], ...]
    outputs: tuple[int, ...]
    inputs: int = 2
    prefix: str = field(default="v")

    def build(self, prefix: str = "v") -> Graph:
        """The graph. Sources index the values so far: inputs, one constant, outputs of nodes."""
        values = [Value(f"{prefix}in{i}", TYPE) for i in range(self.inputs)]
        inputs = tuple(values)
        values.append(Value.constant(np.ones(2, np.float32), f"{prefix}const"))
        nodes = []
        for k, (op, sources, outs, noted, captured) in enumerate(self.nodes):
            made = [Value(f"{prefix}{k}_{o}", TYPE) for o in range(outs)]
            attributes = {}
            if captured is not None:
                result = Value("inner", TYPE)
                body = Node("Body", [values[captured % len(values)]], [result], version=1, name="body")
                attributes["branch"] = Graph((), [result], [body], opsets={"": 13})
            ins = [values[s % len(values)] for s in sources]
            nodes.append(Node(op, ins, made, attributes, version=1, name=f"n{k}", annotations=noted))
            values.extend(made)
        made_values = values[self.inputs + 1 :]
        outputs = [made_values[o % len(made_values)] for o in self.outputs]
        return Graph(inputs, outputs, nodes, opsets={"": 13})


@st.composite
def recipes(draw: Callable[..., object], max_nodes: int = 14, annotated: bool = False, ops: str = "ABCH") -> Recipe:
    """Random graphs of 1 to `max_nodes` nodes; H stands for an operator that no engine takes."""
    count = draw(st.integers(1, max_nodes))
    annotations = st.just(Annotations())
    if annotated:
        annotations = st.builds(
            Annotations,
            engine=st.sampled_from([None, None, None, None, "host"]),
            device=st.sampled_from([None, None, "cpu", "cuda:0"]),
            sbp=st.sampled_from([None, None, ("split(0)",), ("broadcast",)]),
            model_update=st.sampled_from([False, False, False, True]),
        )
    nodes = []
    for k in range(count):
        total = 3 + 2 * k
        sources = draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=3))
        captured = draw(st.none() | st.integers(0, total - 1)) if draw(st.integers(0, 5)) == 0 else None
        op = draw(st.sampled_from(ops))
        nodes.append((op, tuple(sources), draw(st.sampled_from([1, 1, 2])), draw(annotations), captured))
    outputs = draw(st.lists(st.integers(0, 2 * count), min_size=1, max_size=3))
    return Recipe(tuple(nodes), tuple(outputs))
