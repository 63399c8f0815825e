"""Partitions to draw and compare."""

from __future__ import annotations

import numpy as np

from tests.fake_engines import SecondEngine, fake_engine
from xrt_core.explanation import Explanation
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.module import XRTModule
from xrt_core.testing.functions import value


def _named(name: str, operator: str, inputs: list[Value], outputs: list[Value]) -> Node:
    return Node(operator, inputs, outputs, version=13, name=name)


def graph() -> Graph:
    """x -> Relu -> Neg -> Exp -> Add -> Abs -> y, and Relu -> Sign -> z; with a constant, and a name to quote."""
    x, y, z = value("x", 2, 3), Value("y"), Value("z")
    a, b, c, d = (Value(n) for n in "abcd")
    one = Value.constant(np.ones((2, 3), np.float32), "one")
    nodes = [
        _named('relu "<first>"', "Relu", [x], [a]),
        _named("neg", "Neg", [a], [b]),
        _named("exp", "Exp", [b], [c]),
        _named("add", "Add", [c, one], [d]),
        _named("abs", "Abs", [d], [y]),
        _named("sign", "Sign", [a], [z]),
    ]
    return Graph([x], [y, z], nodes, opsets={"": 21}, name="picture")


def explained(host: frozenset[str], second: frozenset[str] = frozenset()) -> Explanation:
    """The graph partitioned for two engines: "second" takes the operators named, "fake" the others not on the host."""
    with fake_engine() as one, fake_engine(SecondEngine) as two:
        one.takes = lambda n: n.op_type not in host | second
        two.takes = lambda n: n.op_type in second
        m = XRTModule(graph(), engine=["fake", "second"], prune=False, cache=False)
        return m.explain({"x": np.zeros((2, 3), np.float32)})


def many(nodes: int = 2020, clusters: int = 303) -> Explanation:
    """A deep graph of about `nodes` nodes and `clusters` clusters on two engines, with host nodes between them; a few
    nodes are simplified away, and a few clusters merged.

    Four branches that meet from time to time: each is by turns a few nodes of a cluster and one or two on the host.
    """
    branches = [value("x", 4, 8)]
    made: list[Node] = []
    x = branches[0]

    def add(operator: str, *inputs: Value) -> Value:
        out = Value(f"v{len(made)}")
        made.append(_named(f"block{len(made) // 40}/{operator}{len(made)}", operator, [*inputs], [out]))
        return out

    inner = ("Relu", "Neg", "Abs", "Tanh")
    branches = [add("Exp", x) for _ in range(4)]
    done, k = 0, 0
    while len(made) < nodes - 3:
        if done < clusters and made[-1].op_type not in inner:
            room = max(2, (nodes - len(made)) // (clusters - done) - 2)
            engine = inner if k % 3 else ("Sigmoid", "Erf")
            for i in range(min(room, nodes - 3 - len(made))):
                branches[k % 4] = add(engine[i % len(engine)], branches[k % 4])
            done += 1
        branches[k % 4] = add("Sign" if k % 2 else "Exp", branches[k % 4])
        if k % 7 == 0 and len(made) < nodes - 3:
            branches[k % 4] = add("Sum", branches[k % 4], branches[(k + 1) % 4])
        k += 1
    total = branches[0]
    for other in branches[1:]:
        total = add("Sum", total, other)
    graph = Graph([x], [total], made, opsets={"": 21}, name="many")
    with fake_engine() as one, fake_engine(SecondEngine) as two:
        one.takes = lambda n: n.op_type in inner
        two.takes = lambda n: n.op_type in ("Sigmoid", "Erf")
        return XRTModule(graph, engine=["fake", "second"], prune=False, cache=False).explain()
