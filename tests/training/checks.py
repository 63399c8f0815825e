"""Holds gradients that are built in the IR against finite differences and against JAX's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import xrt_core as xrt
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.verifier import verify
from xrt_core.kernels import OpContext, find_kernel
from xrt_core.passes.shape_specialization import specialise
from xrt_core.training import gradients


@dataclass(frozen=True)
class Case:
    """A function of traced tensors and where to differentiate it.

    inputs: arrays; floats are given in float64. wrt: indices of the inputs to differentiate by (None: all floats).
    again: whether second derivatives are checked as well. opset: of the ONNX domain. jax: whether JAX differentiates
    the portable kernels in the same way (it does not, where equal values share a gradient in another way).
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    wrt: tuple[int, ...] | None = None
    again: bool = True
    opset: int | None = None
    jax: bool = True
    dtypes: tuple[str, ...] = ("float64", "float32")
    tolerance: float = 1e-6
    marks: tuple[Any, ...] = field(default=())


def run(graph: Graph, arrays: Sequence[Any], xp: Any = np) -> list[Any]:
    """The outputs of a graph, node by node, by the portable kernels over an array namespace.

    Every result is held against the type that inference gave it.
    """
    values: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
    return _run(graph, values, xp)


def _run(graph: Graph, values: dict[Value, Any], xp: Any) -> list[Any]:
    def read(v: Value | None) -> Any:
        return None if v is None else values[v] if v in values else v.data if xp is np else xp.asarray(v.data)

    for n in graph.nodes:
        if n.op_type == "Scan":
            values.update(zip(n.outputs, _scan(n, [read(v) for v in n.inputs], values, xp), strict=True))
            continue
        found = find_kernel(n.domain, n.op_type)
        if found is None:
            raise AssertionError(f"no portable kernel for {n.operator}")
        given = [v.data if v is not None and i in found.static and v.data is not None else read(v)
                 for i, v in enumerate(n.inputs)]  # fmt: skip
        results = found.function(OpContext(n, xp), *given)
        for v, r in zip(n.outputs, results if isinstance(results, tuple) else (results,), strict=False):
            if v is not None:
                assert not v.is_static or (r.dtype, r.shape) == (v.dtype, v.shape), (n, r.dtype, r.shape, v.type)
                values[v] = r
    return [read(v) for v in graph.outputs]


def _scan(node: Node, given: list[Any], around: dict[Value, Any], xp: Any) -> list[Any]:
    """A Scan along first axes, turn by turn."""
    body, count = node.subgraphs[0], int(node.attributes["num_scan_inputs"])  # type: ignore[call-overload]
    n = len(given) - count
    outs = len(body.outputs) - n
    back: Any = node.attributes.get("scan_input_directions") or (0,) * count
    out_back: Any = node.attributes.get("scan_output_directions") or (0,) * outs
    states, length, rows = given[:n], given[n].shape[0], []
    for t in range(length):
        now = [x[length - 1 - t if b else t] for x, b in zip(given[n:], back, strict=True)]
        results = _run(body, {**around, **dict(zip(body.inputs, [*states, *now], strict=True))}, xp)
        states = results[:n]
        rows.append(results[n:])
    stacked = [xp.stack([r[k] for r in (rows[::-1] if b else rows)]) for k, b in enumerate(out_back)]
    return [*states, *stacked]


def weights(shape: tuple[int, ...], salt: int) -> np.ndarray:
    """Fixed numbers by which results are weighed, so that every element of a gradient is seen."""
    return np.random.default_rng(salt).uniform(0.5, 1.5, shape)


class _Pinned(xrt.Graph):
    def __init__(self, function: Callable[..., Any], opset: int | None) -> None:
        self._function = [function]
        self.__class__ = type("Pinned", (_Pinned,), {"opset": opset})

    def build(self, *args: Any) -> Any:
        return self._function[0](*args)


def scalar_graph(case: Case, arrays: Sequence[np.ndarray]) -> Graph:
    """The case as a graph of one output: the weighed sum of all its float results."""

    def loss(*args: Any) -> Any:
        results = case.function(*args)
        results = results if isinstance(results, list | tuple) else [results]
        total = None
        for k, y in enumerate(results):
            if y.dtype.kind != "f" and y.dtype.name != "bfloat16":
                continue
            part = (y * weights(tuple(y.shape), k).astype(y.dtype)).sum()
            total = part if total is None else total + part
        return total

    return xrt.trace(_Pinned(loss, case.opset), *arrays)


def cast(case: Case, dtype: str) -> list[np.ndarray]:
    """The inputs, floats in a dtype."""
    wanted = np.dtype(dtype)
    return [a.astype(wanted) if a.dtype == np.float64 else a for a in case.inputs]


def sources(case: Case) -> list[int]:
    """Indices of the inputs to differentiate by."""
    if case.wrt is not None:
        return list(case.wrt)
    return [i for i, a in enumerate(case.inputs) if a.dtype == np.float64]


def with_gradients(case: Case, arrays: Sequence[np.ndarray]) -> tuple[Graph, Graph]:
    """The graph of the case and the same with gradients, verified."""
    graph = scalar_graph(case, arrays)
    made = gradients(graph, 0, [graph.inputs[i] for i in sources(case)], unused="zeros")
    verify(made, case.name)
    return graph, made


def differences(graph: Graph, arrays: list[np.ndarray], index: int, output: int = 0, step: float = 1e-6) -> np.ndarray:
    """The derivative of a scalar output by one input, by central differences."""
    x = arrays[index]
    found = np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        both = []
        for sign in (1, -1):
            moved = np.array(x)
            moved[at] += sign * step
            both.append(float(run(graph, [*arrays[:index], moved, *arrays[index + 1 :]])[output]))
        found[at] = (both[0] - both[1]) / (2 * step)
    return found


def folded(graph: Graph) -> Graph:
    """The graph with its shape arithmetic worked out, as engines of static shapes get it."""
    return specialise(graph, [v.type for v in graph.inputs], {}, run_node)


def nodes_of(graph: Graph) -> list[str]:
    """The operators of a graph, in order."""
    return [n.operator for n in graph.nodes]


def same_types(graph: Graph, values: Sequence[Value], gradients_: Sequence[Any]) -> None:
    """Every gradient has the dtype and shape of its value."""
    for v, g in zip(values, gradients_, strict=True):
        assert (g.dtype, g.shape) == (v.dtype, v.shape), v
