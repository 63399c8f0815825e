"""Identity nodes: nodes that give their first input back, once types are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import draws_random
from xrt_core.passes.pass_base import Pass, rebuild


class IdentityNodes(Pass):
    """Removes nodes whose output is their first input, unchanged. Shapes and dtypes must be known, except for 1.

    1. Identity.
    2. Cast, CastLike to the dtype that the input has.
    3. Reshape, Flatten, Squeeze, Unsqueeze, Expand, Tile to the shape that the input has (for these, equal shapes
       mean equal elements; Tile with all repeats one).
    4. Transpose that moves no axis longer than one past another.
    5. Slice to the same shape with all steps positive, Pad with no padding.
    6. Concat, Sum, Max, Min, Mean of one input.
    7. Dropout in inference mode whose mask nobody reads.
    8. Left alone: everything else, nodes whose second output is read, and updates of variables.
    """

    name = "identity_nodes"

    def rewrite(self, graph: Graph) -> Graph:
        new: dict[Value, Value] = {}
        kept = []
        for node in graph.nodes:
            test = None if node.domain or node.annotations.model_update else _CASES.get(node.op_type)
            source = node.inputs[0] if node.inputs else None
            result = node.outputs[0] if node.outputs else None
            if test is not None and source is not None and result is not None and test(node, source, result, graph):
                new[result] = source
            else:
                kept.append(node)
        return rebuild(graph, kept, new) if new else graph


_Test = Callable[[Node, Value, Value, Graph], bool]


def _always(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return True


def _same_type(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return source.is_static and source.type == result.type


def _same_dtype(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return source.dtype is not None and source.dtype == result.dtype and source.dtype != np.dtype(object)


def _single(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    return len(node.inputs) == 1 and _same_type(node, source, result, graph)


def _still_transpose(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if not _same_type(node, source, result, graph) or source.shape is None:
        return False
    shape = source.shape
    order = node.attributes.get("perm") or tuple(reversed(range(len(shape))))
    moved = [p for p in order if shape[p] != 1]  # type: ignore[union-attr, index]
    return moved == sorted(moved)


def _whole_slice(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if not _same_type(node, source, result, graph):
        return False
    if len(node.inputs) < 5:
        return True
    steps = node.inputs[4]
    return steps is None or (steps.data is not None and bool((steps.data > 0).all()))


def _no_padding(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if not _same_type(node, source, result, graph):
        return False
    pads = node.attributes.get("pads")
    if pads is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        pads = node.inputs[1].data
    return pads is not None and not np.any(np.asarray(pads))


def _idle_dropout(node: Node, source: Value, result: Value, graph: Graph) -> bool:
    if len(node.outputs) > 1 and node.outputs[1] is not None:
        mask = node.outputs[1]
        if mask in graph.consumers or mask in graph.outputs:
            return False
    return not draws_random(node)


_CASES: Mapping[str, _Test] = MappingProxyType(
    {
        "Identity": _always,
        "Cast": _same_dtype,
        "CastLike": _same_dtype,
        **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile"), _same_type),
        "Transpose": _still_transpose,
        "Slice": _whole_slice,
        "Pad": _no_padding,
        **dict.fromkeys(("Concat", "Sum", "Max", "Min", "Mean"), _single),
        "Dropout": _idle_dropout,
    }
)
