"""Which launches share the cores with others."""

from __future__ import annotations

from tests.random_graphs import BOOL, F32, graph_of, node
from xrt_core.compiler.lowering import sharing_cores
from xrt_core.ir.function import Function, launch
from xrt_core.ir.graph import OPEN_REGION, Annotations, Graph, Node, Value
from xrt_core.ir.types import TensorType


def _launch(x: Value, selects: bool = False) -> tuple[Node, Value]:
    """A launch that reads `x`; selects: its nodes are of data-dependent shapes."""
    a, b, y = (Value(n, TensorType(F32, (2,))) for n in "aby")
    inner = node("Neg", [a], [b])
    if selects:
        inner = inner.replace(annotations=Annotations(engine="e", region=OPEN_REGION))
    function = Function.from_graph(graph_of([a], [b], [inner]), name="f")
    return launch(function, "e", [x], [y], annotations=Annotations(device="cpu")), y


def _graph(*selects: bool, body: bool = False) -> tuple[Graph, list[Node]]:
    x = v = Value("x", TensorType(F32, (2,)))
    nodes = []
    for s in selects:
        made, v = _launch(v, s)
        nodes.append(made)
    found = list(nodes)
    if body:
        flag, y = Value("flag", TensorType(BOOL, ())), Value("y", TensorType(F32, (2,)))
        branches = [graph_of([], [o := Value("o", y.type)], [node(op, [v], [o])]) for op in ("Neg", "Abs")]
        nodes.append(node("If", [flag], [y], then_branch=branches[0], else_branch=branches[1]))
        return graph_of([x, flag], [y], nodes), found
    return graph_of([x], [v], nodes), found


def test_which_launches_share_the_cores() -> None:
    """Each of several; none that is alone, or alone with what selects rows; all where parts are planned apart."""
    alone, _ = _graph(False)
    assert sharing_cores(alone) == frozenset()
    assert sharing_cores(_graph(True)[0]) == frozenset()
    several, both = _graph(False, False)
    assert sharing_cores(several) == set(both)
    selecting, (heavy, light) = _graph(False, True)
    assert sharing_cores(selecting) == {light}
    assert sharing_cores(selecting, part=True) == {heavy, light}
    three, nodes = _graph(False, False, True)
    assert sharing_cores(three) == set(nodes)
    with_body, (only,) = _graph(False, body=True)
    assert sharing_cores(with_body) == {only}
