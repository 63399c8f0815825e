"""The plainest way to run a graph: node by node on the host, straight from the IR, with no stage of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value


def run_graph(graph: Graph, arrays: Sequence[Any], outer: dict[Value, Any] | None = None) -> list[Any]:
    """The graph's outputs. If and Loop are done here; every other node goes to its host kernel."""
    env = dict(outer or {})
    env.update(zip(graph.inputs, arrays, strict=True))

    def read(v: Value | None) -> Any:
        return None if v is None else v.data if v.data is not None else env[v]

    for n in graph.nodes:
        given = [read(v) for v in n.inputs]
        if n.op_type == "If":
            results = run_graph(n.attributes["then_branch" if given[0] else "else_branch"], [], env)  # type: ignore[arg-type]
        elif n.op_type == "Loop":
            results = _loop(n, given, env)
        else:
            results = list(run_node(n, given))
        env.update((v, r) for v, r in zip(n.outputs, results, strict=False) if v is not None)
    return [read(v) for v in graph.outputs]


def _loop(n: Node, given: Sequence[Any], env: dict[Value, Any]) -> list[Any]:
    body, state = n.attributes["body"], list(given[2:])
    assert isinstance(body, Graph)
    scans: list[list[Any]] = [[] for _ in body.outputs[1 + len(state) :]]
    go = True if given[1] is None else bool(given[1])
    turn = 0
    while go and (given[0] is None or turn < int(given[0])):
        made = run_graph(body, [np.array(turn), np.array(go), *state], env)
        go, turn = bool(made[0]), turn + 1
        for column, x in zip(scans, made[1 + len(state) :], strict=True):
            column.append(x)
        state = made[1 : 1 + len(state)]
    return [*state, *map(np.stack, scans)]


def assert_same(got: Sequence[Any], wanted: Sequence[Any], rtol: float = 0, atol: float = 0) -> None:
    """Equal lengths, dtypes, shapes and elements (NaNs where there are NaNs)."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
