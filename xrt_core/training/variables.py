"""Variables: which constants of a graph are trained, and the graph in which they are inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.errors import GradientError
from xrt_core.frontends.promotion import is_float
from xrt_core.ir.graph import Graph, Value
from xrt_core.ir.rewrite import substitute
from xrt_core.ir.types import TensorType

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


def statistics(graph: Graph) -> list[Value]:
    """The constants that hold running statistics: mean and variance of each BatchNormalization."""
    found: dict[Value, None] = {}
    for n in graph.nodes:
        if n.op_type == "BatchNormalization" and not n.domain:
            for v in n.inputs[3:5]:
                if v is not None and v.data is not None:
                    found[v] = None
    return list(found)


def trainable(graph: Graph, select: Select = None, running: Collection[Value] = ()) -> list[Value]:
    """The constants to train: floats of nodes' inputs, running statistics aside.

    select: names, or a function of name and array. Without it, all named ones of more than one element: single
    numbers (a scale, an epsilon, an exponent) belong to the formula, not to what is learnt.
    Raises GradientError for a name that no float constant has.
    """
    stats = set(running) | set(statistics(graph))
    floats = [v for v in graph.constants if v.name and v.dtype is not None and is_float(v.dtype) and v not in stats]
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
    return graph.replace(
        inputs=(*graph.inputs, *new.values()),
        nodes=[substitute(n, new) for n in graph.nodes],
        outputs=[new.get(v, v) for v in graph.outputs],
    )
