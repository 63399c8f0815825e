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
