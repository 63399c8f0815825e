"""Common subexpressions: the same operator on the same values is computed once."""

from __future__ import annotations

from typing import Any

from xrt_core.ir.graph import Graph, Node, Value, attribute_key
from xrt_core.ir.op_traits import is_deterministic, traits_of
from xrt_core.ir.types import STRING
from xrt_core.passes.pass_base import Pass, rebuild

_CONSTANT_BYTES = 1024


class CommonSubexpressions(Pass):
    """Merges nodes that compute the same.

    1. Two nodes of one operator, version, mark, attributes, inputs and list of wanted outputs become one.
    2. Constants of at most 1 KiB count as the same input where dtype, shape and contents are equal.
    3. The two inputs of a commutative operator may stand in either order.
    4. Left alone: nodes with subgraphs, nodes that draw random numbers without a seed, nodes that update variables.
    """

    name = "common_subexpressions"

    def rewrite(self, graph: Graph) -> Graph:
        seen: dict[Any, Node] = {}
        constants: dict[Value, Any] = {}
        new: dict[Value, Value] = {}
        kept = []
        for node in graph.nodes:
            key = self._key(node, new, constants)
            first = seen.get(key) if key is not None else None
            if first is not None:
                pairs = zip(node.outputs, first.outputs, strict=True)
                new.update((v, w) for v, w in pairs if v is not None and w is not None)
                continue
            if key is not None:
                seen[key] = node
            kept.append(node)
        return rebuild(graph, kept, new) if new else graph

    @staticmethod
    def _key(node: Node, new: dict[Value, Value], constants: dict[Value, Any]) -> Any:
        attributes = attribute_key(node)
        traits = traits_of(node)
        if attributes is None or node.annotations.model_update or traits.stateful or not is_deterministic(node):
            return None
        inputs: list[Any] = []
        for v in node.inputs:
            if v is None:
                inputs.append(None)
            elif v.data is None:
                inputs.append(new.get(v, v))
            else:
                if v not in constants:
                    constants[v] = _constant_key(v)
                inputs.append(constants[v])
        if traits.commutative and len(inputs) == 2:
            inputs.sort(key=hash)
        wanted = tuple(v is not None for v in node.outputs)
        own = node.annotations
        mark = (own.engine, own.region, own.device, own.sbp)  # merging must take no node out of a marked region
        return node.domain, node.op_type, node.version, attributes, tuple(inputs), wanted, mark


def _constant_key(value: Value) -> Any:
    data = value.data
    assert data is not None
    if data.dtype == STRING or data.nbytes > _CONSTANT_BYTES:
        return ("array", id(data))  # the graph keeps the array alive while the key is used
    return data.dtype, data.shape, data.tobytes()
