"""Values that only decide which branch an If takes, and whether a Loop goes on: whether they are scalars is free.

Exporters write such values as scalars in one branch and as vectors of one element in the other. What reads them then
has no known rank, and keeps the Loop around it from engines, which know the types of a Loop's states. `specialise`
asks here which results of an If and of the body of a Loop may be scalars.

1. A condition is one element, and so is, in each broadcast on the way to it, every operand.
2. The condition that a body of a Loop gives is a scalar, where it is a vector of one element.
3. Results of an If that reach conditions alone, through element-wise operators and states of Loops, are scalars where
   both branches give one element, as a scalar or as a vector.
4. Unchanged: results that also reach anything else, or that a Loop hands out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import TensorType, ValueType

_VERSION = 13  # of Squeeze, whose later versions only take more types


def loop_data(loop: Node, unread: Collection[int]) -> set[Value]:
    """The values within the body of a Loop that are more than conditions, and values around it that are. unread: which
    of its results nothing reads."""
    (body,) = loop.subgraphs
    states = len(loop.inputs) - 2
    free = {0} | {i + 1 for i in range(states) if i >= len(loop.outputs) or i in unread}
    while True:  # terminates: each turn takes an output away, or is the last
        found = _data(body, free)
        kept = {i for i in free if i == 0 or body.inputs[i + 1] not in found}
        if kept == free:
            return found
        free = kept


def _data(graph: Graph, free: Collection[int]) -> set[Value]:
    """The values that are more than conditions in a graph whose outputs of these indices are conditions."""
    found = {v for i, v in enumerate(graph.outputs) if i not in free}
    for node in reversed(graph.nodes):
        if node.op_type == "If" and not node.domain:
            inner = {i for i, v in enumerate(node.outputs) if v is None or v not in found}
            for branch in node.subgraphs:
                found |= _data(branch, inner)
        elif node.op_type == "Loop" and not node.domain:
            found |= loop_data(node, ())
            found.update(v for v in (node.inputs[0], *node.inputs[2:]) if v is not None)
        elif not traits_of(node).elementwise or "broadcast" in node.attributes or not found.isdisjoint(_made(node)):
            found.update(node.uses())
    return found


def _made(node: Node) -> list[Value]:
    return [v for v in node.outputs if v is not None]


def with_scalars(branches: Sequence[Graph], outputs: Collection[int]) -> list[Graph]:
    """The branches of an If, whose `outputs` of these indices are conditions: scalars in all where they are one element
    in each, and not of one rank."""
    for i in outputs:
        shapes = {_one_element(b.outputs[i].type) for b in branches}
        if shapes == {(), (1,)}:
            branches = [with_scalar(b, i) for b in branches]
    return list(branches)


def _one_element(type_: ValueType | None) -> tuple[int, ...] | None:
    """The shape () or (1,) of a type, None of any other."""
    shape = type_.shape if isinstance(type_, TensorType) else None
    return () if shape == () else (1,) if shape == (1,) else None


def with_scalar(graph: Graph, i: int) -> Graph:
    """A branch or body with a scalar for its output of this index where that is a vector of one element."""
    squeezed = squeeze(graph.outputs[i])
    if squeezed is None:
        return graph
    (made,) = squeezed.outputs
    outputs = [made if k == i and made is not None else v for k, v in enumerate(graph.outputs)]
    return graph.replace(nodes=[*graph.nodes, squeezed], outputs=outputs)


def squeeze(value: Value) -> Node | None:
    """The node that makes a scalar of a vector of one element; None for other values."""
    if _one_element(value.type) != (1,):
        return None
    made = Value(f"{value.name}/scalar", TensorType(value.dtype, ()))
    axes = Value.constant(np.array([0], np.int64), f"{made.name}/axes")
    return Node("Squeeze", [value, axes], [made], version=_VERSION, name=made.name)
