"""Variables: which constants of a graph are trained, and the graph in which they are inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.errors import GradientError
from xrt_core.frontends.promotion import is_float
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.kernels import static_inputs

Select = Collection[str] | Callable[[str, np.ndarray], bool] | None


@dataclass(frozen=True, slots=True)
class Variable:
    """A named array that steps change.

    name: as in the model. value: what it holds before the first step. trained: it is updated by its gradient; otherwise
    by the model itself (the running statistics of a BatchNormalization).
    """

    name: str
    value: np.ndarray
    trained: bool = True

    @property
    def type(self) -> TensorType:
        """The type, which no step changes."""
        return TensorType(self.value.dtype, self.value.shape)


def _constants(graph: Graph) -> Iterator[Value]:
    """The constants of a graph and of its subgraphs, in order of first use; one may come more than once."""
    for n in graph.nodes:
        yield from (v for v in n.inputs if v is not None and v.data is not None)
        for g in n.subgraphs:
            yield from _constants(g)
    yield from (v for v in graph.outputs if v.data is not None)


def replaced(graph: Graph, new: Mapping[Value, Value]) -> Graph:
    """The graph, its subgraphs included, reading `new[v]` where it read the constant (or the input) `v`."""
    return graph.replace(nodes=[_node(n, new) for n in graph.nodes], outputs=[new.get(v, v) for v in graph.outputs])


def _node(node: Node, new: Mapping[Value, Value]) -> Node:
    inputs = [v if v is None else new.get(v, v) for v in node.inputs]
    if not node.subgraphs:
        return node.replace(inputs=inputs) if any(v in new for v in node.inputs) else node
    attributes = {
        k: replaced(a, new)
        if isinstance(a, Graph)
        else tuple(replaced(g, new) for g in a)
        if isinstance(a, tuple) and a and isinstance(a[0], Graph)
        else a
        for k, a in node.attributes.items()
    }
    return node.replace(inputs=inputs, attributes=attributes)


def statistics(graph: Graph) -> list[Value]:
    """The constants that hold running statistics: mean and variance of each BatchNormalization."""
    found: dict[Value, None] = {}
    for n in graph.nodes:
        if n.op_type == "BatchNormalization" and not n.domain:
            for v in n.inputs[3:5]:
                if v is not None and v.data is not None:
                    found[v] = None
    return list(found)


def _shaping(graph: Graph) -> Iterator[Value]:
    """The constants that decide shapes: scales of a Resize, say."""
    for n in graph.nodes:
        yield from (v for i in static_inputs(n) if (v := n.inputs[i]) is not None)
        for g in n.subgraphs:
            yield from _shaping(g)


def trainable(graph: Graph, select: Select = None, running: Collection[Value] = ()) -> list[Value]:
    """The constants to train: floats of nodes' inputs, running statistics aside.

    select: names, or a function of name and array. Without it, all named ones of more than one element: single
    numbers (a scale, an epsilon, an exponent) belong to the formula, not to what is learnt, and so does what decides
    shapes.
    Raises GradientError for a name that no float constant has.
    """
    stats = {*running, *statistics(graph), *_shaping(graph)}
    known = dict.fromkeys(_constants(graph))
    floats = [v for v in known if v.name and v.dtype is not None and is_float(v.dtype) and v not in stats]
    if callable(select):
        return [v for v in floats if v.data is not None and select(v.name, v.data)]
    if select is not None:
        names = set(select)
        missing = names - {v.name for v in floats}
        if missing:
            some = ", ".join(v.name for v in floats[:8])
            raise GradientError(f"the model has no float constant {sorted(missing)[0]!r} to train; it has {some}, ...")
        return [v for v in floats if v.name in names]
    return [v for v in floats if v.data is not None and v.data.size > 1]


def promoted(graph: Graph, constants: Iterable[Value]) -> Graph:
    """The graph with these constants as further inputs, after its own, of the same names."""
    new = {v: Value(v.name, v.type) for v in constants}
    if not new:
        return graph
    used: dict[str, Any] = {v.name: v for v in graph.inputs}
    for v in new:
        if v.name in used:
            raise GradientError(f"two values of the model are named {v.name!r}; variables need names of their own")
        used[v.name] = v
    return replaced(graph, new).replace(inputs=(*graph.inputs, *new.values()))
