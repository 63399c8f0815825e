"""A Function for any batch: one engine serves all where the batch is the first dimension of what enters and leaves.

XRT specialises a model for each signature, so the sizes of a batch reach the compiler one after another, each as a
static Function. Two of them that are the same up to the batch have the same generalised form, and so the same engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from xrt_core.engine.contract import Function
from xrt_core.ir.function import graph_fingerprint
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType

BATCH: Final = "batch"
"""The symbol that stands for the batch."""


@dataclass(frozen=True, slots=True)
class Batched:
    """A Function whose batch is open. batch: that of the Function it was made of. fingerprint: of the open form.
    function: computes the same for `batch`, and says of no other size what it is."""

    batch: int
    fingerprint: str
    function: Function


def generalise(function: Function) -> Batched | None:
    """The open form of `function`, None where a parameter or a result has no first dimension that could be the batch.

    Targets of Reshape that hold the batch are written as "the same as the input's" or "what is left", which says the
    same for this batch. Whether the rest goes with other batches is for who infers the shapes.
    """
    shapes = [p.shape for p in (*function.params, *function.returns)]
    if not function.params or not all(shapes) or len({s[0] for s in shapes}) != 1 or shapes[0][0] < 1:
        return None
    batch = shapes[0][0]
    nodes = [_opened(n, batch) for n in function.body.nodes]
    body = function.body.replace(nodes=nodes)
    opened = {v: Value(v.name, _open_type(v.type), v.data) for v in body.inputs}
    form = body.replace(
        inputs=[opened[v] for v in body.inputs],
        nodes=[_reading(n, opened) for n in nodes],
        outputs=[opened.get(v, v) for v in body.outputs],
    )
    same = Function(function.name, function.params, function.returns, body, function.aliases)
    return Batched(batch, graph_fingerprint(form), same)


def _open_type(t: object) -> TensorType:
    assert isinstance(t, TensorType)
    assert t.shape is not None
    return TensorType(t.dtype, (BATCH, *t.shape[1:]))


def _reading(node: Node, new: dict[Value, Value]) -> Node:
    if not any(v in new for v in node.inputs if v is not None):
        return node
    return node.replace(inputs=[None if v is None else new.get(v, v) for v in node.inputs])


def _opened(node: Node, batch: int) -> Node:
    """A Reshape whose target begins with the batch, with a target that does not name it; other nodes as they are."""
    if node.op_type != "Reshape" or node.domain or len(node.inputs) < 2:
        return node
    data, target = node.inputs[:2]
    if data is None or target is None or target.data is None or not data.shape or target.data.size == 0:
        return node
    dims = [int(d) for d in target.data.reshape(-1)]
    if dims[0] != batch or 0 in data.shape or 0 in dims:
        return node
    if data.shape[0] == batch:
        dims[0] = 0
    elif -1 not in dims:
        dims[0] = -1
    else:
        return node
    opened = Value.constant(np.array(dims, np.int64), target.name and f"{target.name}_open")
    attributes = {k: a for k, a in node.attributes.items() if k != "allowzero"}  # no 0 stood for itself
    return node.replace(inputs=[data, opened, *node.inputs[2:]], attributes=attributes)
