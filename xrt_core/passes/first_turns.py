"""Loops whose states have another rank before the first turn than after it: their first turn stands before them.

Exporters of PaddlePaddle start states as scalars that the first turn replaces by tensors. No type then holds at
every turn, and engines, which know the types of a Loop's states, leave it to the host. `specialise` asks here for what
is left of a Loop when its first turn was made.

1. A Loop that makes at least one turn, and has no scan outputs, is the nodes of its body for turn 0, and a Loop of one
   turn less whose body adds 1 to the number of the turn.
2. Unchanged: Loops whose states have one rank throughout, or none even after the first turn; Loops that may make no
   turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType

_VERSION = 14  # of Add


def makes_a_turn(loop: Node) -> bool:
    """Whether a Loop without scan outputs is known to make at least one turn."""
    limit, condition = loop.inputs[:2]
    (body,) = loop.subgraphs
    if len(body.outputs) != len(loop.inputs) - 1:
        return False
    starts = condition is None or (condition.data is not None and bool(condition.data.all()))
    return starts and (limit is None or (limit.data is not None and bool((limit.data > 0).all())))


def rest(loop: Node, results: Sequence[Value]) -> Node:
    """What is left of a Loop whose first turn gave these results: the condition and the states."""
    limit = loop.inputs[0]
    (body,) = loop.subgraphs
    if limit is not None:
        assert limit.data is not None
        limit = Value.constant(np.array(limit.data.item() - 1, np.int64), f"{limit.name}/rest")
    number = body.inputs[0]
    turn = Value(f"{number.name}/rest", TensorType(np.dtype(np.int64), ()))
    one = Value.constant(np.array(1, np.int64), f"{number.name}/one")
    next_turn = Node("Add", [turn, one], [number], version=_VERSION, name=number.name)
    inside = body.replace(inputs=[turn, *body.inputs[1:]], nodes=[next_turn, *body.nodes])
    return loop.replace(inputs=[limit, *results], attributes={**loop.attributes, "body": inside})
