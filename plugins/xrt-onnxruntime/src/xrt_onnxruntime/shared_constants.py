"""Constants of int8 that several nodes read, one for each reader.

Where kernels are asked for that do not saturate (`session.x64quantprecision`), the library makes uint8 of constant
weights and of their zero points, under names that follow from theirs. It does so once for each product, so that where
two products read the same constant it makes the name twice, and no session.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value

_INT8: Final = np.dtype(np.int8)


def unshared(function: Function) -> Function:
    """`function` with a constant of int8 for each input that reads one, and a DequantizeLinear of such for each reader,
    as the library makes one product of it and what reads it; itself where nothing is shared. Bodies of control flow
    stay as they are."""
    graph = function.body
    readers = Counter(v for n in graph.nodes for v in n.inputs if v is not None)
    constants = {v for v in readers if v.data is not None and v.dtype == _INT8}
    if not constants:
        return function
    weights = {r: n for n in graph.nodes if (r := _weights_of(n)) is not None and readers[r] > 1}
    if not weights and all(readers[v] == 1 for v in constants):
        return function
    made: list[Node] = []
    seen: Counter[Value] = Counter()

    def own(v: Value | None) -> Value | None:
        """What a reader gets in the place of a value."""
        if v is None or (v not in constants and v not in weights):
            return v
        seen[v] += 1
        if seen[v] == 1:
            return v
        name = f"{v.name}_of_reader_{seen[v]}"
        if (source := weights.get(v)) is None:
            return Value(name, data=v.data)
        copy = Value(name, v.type)
        made.append(source.replace(inputs=[own(x) for x in source.inputs], outputs=[copy], name=name))
        return copy

    for node in graph.nodes:
        inputs = [own(v) for v in node.inputs]
        made.append(node if inputs == list(node.inputs) else node.replace(inputs=inputs))
    body: Graph = graph.replace(nodes=made)
    return Function(function.name, function.params, function.returns, body, function.aliases)


def _weights_of(node: Node) -> Value | None:
    """The result of a DequantizeLinear of a constant of int8; None for other nodes."""
    x = node.inputs[0] if node.op_type == "DequantizeLinear" and not node.domain else None
    return node.outputs[0] if x is not None and x.data is not None and x.dtype == _INT8 else None
