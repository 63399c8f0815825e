"""Candidates: with planted faults, the host node by node but for the nodes that are chosen to be wrong; and engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from xrt_core.engine import engines
from xrt_core.engine.contract import CompileOptions, Executable, Function
from xrt_core.errors import CompileError, XRTError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.testing.functions import node
from xrt_core.verify.isolate import Candidate

Spoil = Callable[[list[np.ndarray]], list[np.ndarray]]
F32 = np.dtype(np.float32)


class PlantedExecutable(Executable):
    """Runs the nodes one by one and spoils the results of some."""

    def __init__(self, function: Function, planted: Planted) -> None:
        self.function, self.planted = function, planted

    def run(self, inputs: Sequence[Any], run_options: Any = None, block_until_done: bool = True) -> Sequence[Any]:
        self.planted.runs += 1
        env: dict[Value, Any] = dict(zip(self.function.body.inputs, inputs, strict=True))
        whole = len(self.function.body.nodes)
        for n in self.function.body.nodes:
            given = [None if v is None else v.data if v.data is not None else env[v] for v in n.inputs]
            results = [np.asarray(r) for r in run_node(n, given)]
            if self.planted.wrong(n, whole):
                results = self.planted.spoil(results)
            env.update(zip([v for v in n.outputs if v is not None], results, strict=False))
        return [np.array(v.data if v.data is not None else env[v]) for v in self.function.body.outputs]


class Planted:
    """An engine for tests.

    wrong: (node, nodes in the compiled function) -> whether its kernel is the faulty one. breaks: the same for nodes
    that the compiler fails on. spoil: what the faulty kernel makes of the right results. heals_unfused: the unfused
    build is right. compiled: numbers of nodes of the functions that were compiled, in order.
    """

    def __init__(
        self,
        wrong: Callable[[Node, int], bool] = lambda n, k: False,
        *,
        breaks: Callable[[Node, int], bool] = lambda n, k: False,
        spoil: Spoil = lambda results: [r + np.asarray(1, r.dtype) for r in results],
        heals_unfused: bool = False,
        name: str = "planted",
    ) -> None:
        self._wrong, self.breaks, self.spoil, self.heals_unfused, self.name = wrong, breaks, spoil, heals_unfused, name
        self.compiled: list[int] = []
        self.runs = 0

    def wrong(self, n: Node, whole: int) -> bool:
        return self._wrong(n, whole)

    def compile(self, function: Function, fused: bool) -> Executable:
        whole = len(function.body.nodes)
        self.compiled.append(whole)
        if any(self.breaks(n, whole) for n in function.body.nodes):
            raise CompileError("the compiler ran into an assertion")
        made = PlantedExecutable(function, self)
        if not fused and self.heals_unfused:
            made.planted = Planted()
        return made

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, self.compile)


def value(name: str, shape: Sequence[int], dtype: Any = F32) -> Value:
    return Value(name, TensorType(np.dtype(dtype), tuple(shape)))


def deep(count: int = 200, shape: Sequence[int] = (4, 6)) -> Function:
    """`count` nodes in a ladder of two strands that meet again and again, of several operators and two shapes."""
    rng = np.random.default_rng(3)
    x, y = value("x", shape), value("y", shape)
    strands = [x, y]
    nodes: list[Node] = []
    unary = ("Tanh", "Sigmoid", "Softmax", "Abs", "Erf", "Transpose", "Softmax", "Transpose")
    while len(nodes) < count:
        k = len(nodes)
        side = k % 2
        here, there = strands[side], strands[1 - side]
        assert isinstance(here.type, TensorType)
        assert here.shape is not None
        if k % 7 == 6 and here.shape == there.shape:
            out = value(f"n{k}", here.shape)
            nodes.append(node("Add", [here, there], [out]))
        elif k % 7 == 3:
            w = Value.constant(rng.standard_normal((here.shape[-1], here.shape[-1]), np.float32) / 2, f"w{k}")
            out = value(f"n{k}", here.shape)
            nodes.append(node("MatMul", [here, w], [out]))
        else:
            op = unary[(k // 2) % len(unary)]
            out = value(f"n{k}", here.shape[::-1] if op == "Transpose" else here.shape)
            nodes.append(node(op, [here], [out]))
        strands[side] = out
    return Function.from_graph(Graph([x, y], strands, nodes, opsets={"": 21}, name="deep"))


def candidate(name: str) -> Candidate:
    """An installed engine, without cache and processes."""
    try:
        engine = engines.usable(name)
    except XRTError as e:
        pytest.skip(str(e))
    compilers = {fused: engine.compiler("cpu", CompileOptions(fused=fused)) for fused in (True, False)}

    def compile(f: Function, fused: bool) -> Executable:
        return compilers[fused].compile(f, f.params, f.returns, f.aliases)

    return Candidate(name, compile, engine.tolerance)
