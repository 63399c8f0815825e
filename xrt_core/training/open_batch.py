"""The batch dimension of a traced graph: two traces of different sizes that differ in nothing else leave it open."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import Dim, TensorType, ValueType

BATCH: Final = "batch"


def open_batch(graph: Graph, other: Graph, sizes: tuple[int, int], variables: Collection[str]) -> Graph | None:
    """Return `graph` with dimensions of its batch's size as the symbol "batch", given a trace for another size.

    sizes: of the batch in the two. Dimensions that differ in another way are left unknown. None where the two differ in
    more than dimensions: in nodes, attributes or constants, which are then made for one size. variables: names of
    constants whose values may have changed between the two.
    """
    new: dict[Value, Value] = {}
    pairs: dict[Value, Value] = {}

    def opened(one: Value, two: Value) -> Value:
        type_ = _opened(one.type, two.type, sizes)
        new[one] = one if type_ == one.type else Value(one.name, type_)
        pairs[one] = two
        return new[one]

    def agree(one: Value | None, two: Value | None) -> bool:
        if one is None or two is None:
            return one is two
        if one.data is not None or two.data is not None:
            new[one] = one
            return one is two or (
                one.data is not None
                and two.data is not None
                and (one.data.dtype, one.data.shape) == (two.data.dtype, two.data.shape)
                and (one.name == two.name in variables or one.data.tobytes() == two.data.tobytes())
            )
        return pairs.get(one) is two

    if len(graph.inputs) != len(other.inputs) or len(graph.nodes) != len(other.nodes):
        return None
    inputs = [opened(a, b) for a, b in zip(graph.inputs, other.inputs, strict=True)]
    nodes: list[Node] = []
    for a, b in zip(graph.nodes, other.nodes, strict=True):
        is_same = (a.operator, a.version, len(a.inputs), len(a.outputs)) == (
            b.operator, b.version, len(b.inputs), len(b.outputs)
        )  # fmt: skip
        if not is_same or a.subgraphs or not _same_attributes(a, b):
            return None
        if not all(agree(u, v) for u, v in zip(a.inputs, b.inputs, strict=True)):
            return None
        outputs = [None if u is None or v is None else opened(u, v) for u, v in zip(a.outputs, b.outputs, strict=True)]
        nodes.append(a.replace(inputs=[None if v is None else new[v] for v in a.inputs], outputs=outputs))
    if not all(agree(u, v) for u, v in zip(graph.outputs, other.outputs, strict=False)):
        return None
    return graph.replace(inputs=inputs, nodes=nodes, outputs=[new[v] for v in graph.outputs])


def _opened(one: ValueType | None, two: ValueType | None, sizes: tuple[int, int]) -> ValueType | None:
    if not isinstance(one, TensorType) or not isinstance(two, TensorType) or one.shape is None or two.shape is None:
        return one if one == two else None
    if len(one.shape) != len(two.shape):
        return TensorType(one.dtype)
    return TensorType(one.dtype, tuple(_dim(a, b, sizes) for a, b in zip(one.shape, two.shape, strict=True)))


def _dim(one: Dim, two: Dim, sizes: tuple[int, int]) -> Dim:
    if one == two:
        return one
    return BATCH if (one, two) == sizes else None


def _same_attributes(one: Node, two: Node) -> bool:
    if one.attributes.keys() != two.attributes.keys():
        return False
    for name, a in one.attributes.items():
        b = two.attributes[name]
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)):
                return False
        elif a != b:
            return False
    return True
