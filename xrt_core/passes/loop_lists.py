"""Lists that a Loop appends to, as exporters of PyTorch write them: stacked results of the loop (scan outputs) instead.

Engines take tensors alone, so that a list keeps a Loop, and what reads the list, on the host. `specialise` asks here
where the types of a Loop's body are known: whether all elements of a list have one shape, and how many there are.

1. A list that is empty before the Loop, and to which each turn appends one tensor of the same known shape, becomes a
   scan output, which SplitToSequence makes a list again for who reads it as one.
2. ConcatFromSequence of such a list becomes a Transpose of the scan output, with a Squeeze or a Reshape.
3. Unchanged: lists that are read within the body, that do not start empty, or whose elements differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec import Struct

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import Dim, SequenceType, TensorType, ValueType

_VERSION = 13  # of the nodes that are made, whose later versions only take more types


class StackedLoop(Struct, frozen=True):
    """A Loop whose lists are scan outputs. types: of its outputs. stacks: the list that an output of the Loop before
    was -> the scan output that holds its elements."""

    node: Node
    types: tuple[ValueType | None, ...]
    stacks: Mapping[Value, Value]


def stacked(node: Node, types: Sequence[ValueType | None], length: Dim, empty: Collection[Value]) -> StackedLoop | None:
    """A Loop without the lists that each turn appends to; None where it has none. types: of its outputs. length: the
    number of its turns. empty: values that are lists without elements."""
    body = node.attributes["body"]
    assert isinstance(body, Graph)
    if length is None or length == 0:
        return None
    missing = [None] * (len(body.outputs) - 1 - len(node.outputs))  # a Loop may leave out its last outputs
    outer, types = [*node.outputs, *missing], [*types, *missing]
    appended = {
        i: element
        for i, v in enumerate(node.inputs[2:])
        if v in empty and (element := _appended(body, i)) is not None and isinstance(types[i], SequenceType)
    }
    if not appended:
        return None
    states = len(node.inputs) - 2
    kept = [i for i in range(states) if i not in appended]
    inputs = (*body.inputs[:2], *(body.inputs[2 + i] for i in kept))
    again, *results = body.outputs
    scans = results[states:]
    gone = {results[i] for i in appended}
    made = body.replace(
        inputs=inputs,
        nodes=[n for n in body.nodes if n.outputs[0] not in gone],
        outputs=[again, *(results[i] for i in kept), *scans, *appended.values()],
    )
    stacks: dict[Value, Value] = {}
    outputs = [*(outer[i] for i in kept), *outer[states:]]
    found = [*(types[i] for i in kept), *types[states:]]
    for i, element in appended.items():
        t = element.type
        assert isinstance(t, TensorType)
        assert t.shape is not None
        before = outer[i]
        name = node.name if before is None else before.name
        stack = Value(f"{name}/stacked", TensorType(t.dtype, (length, *t.shape)))
        outputs.append(stack)
        found.append(stack.type)
        if before is not None:
            stacks[before] = stack
    given = (*node.inputs[:2], *(node.inputs[2 + i] for i in kept))
    return StackedLoop(
        node.replace(inputs=given, outputs=outputs, attributes={**node.attributes, "body": made}), tuple(found), stacks
    )


def _appended(body: Graph, i: int) -> Value | None:
    """What each turn appends to the i-th state, which it does not read otherwise; None where that is not so."""
    state, result = body.inputs[2 + i], body.outputs[1 + i]
    makers = {v: n for n in body.nodes for v in n.outputs if v is not None}
    maker = makers.get(result)
    if maker is None or maker.domain or maker.op_type != "SequenceInsert" or any(maker.inputs[2:]):
        return None
    into, element = maker.inputs[:2]
    if element not in makers:  # a body gives what it makes
        return None
    uses = [v for n in body.nodes for v in n.uses()] + list(body.outputs)
    if into is not state or uses.count(state) != 1 or uses.count(result) != 1 or element is None:
        return None
    t = element.type
    known = isinstance(t, TensorType) and t.dtype is not None and t.shape is not None and None not in t.shape
    return element if known else None


def as_list(stack: Value, of: Value) -> Node:
    """The node that makes a list, the value `of`, of the parts of a scan output."""
    return Node("SplitToSequence", [stack], [of], {"axis": 0, "keepdims": 0}, version=11, name=of.name)


def concatenated(node: Node, stack: Value) -> list[Node] | None:
    """The nodes that make of a scan output what a ConcatFromSequence makes of the list of its parts; None where that
    needs sizes that are no numbers."""
    assert stack.shape is not None
    (out,), rank, axis = node.outputs, len(stack.shape) - 1, node.attributes["axis"]
    assert isinstance(axis, int)
    is_new = bool(node.attributes.get("new_axis", 0))
    if not -(rank + is_new) <= axis < rank + is_new:
        return None  # the host says what is wrong
    axis %= rank + is_new
    name, x = node.name, stack
    made: list[Node] = []

    def emit(op: str, inputs: list[Value], attributes: Mapping[str, tuple[int, ...]], is_last: bool) -> Value:
        result = Value(f"{name}/{op}") if not is_last or out is None else out
        made.append(
            Node(op, inputs, [result], attributes, version=_VERSION, name=f"{name}/{op}", annotations=node.annotations)
        )
        return result

    perm = (*range(1, axis + 1), 0, *range(axis + 1, rank + 1))
    moves = perm != tuple(range(rank + 1))
    if is_new:
        emit("Transpose" if moves else "Identity", [x], {"perm": perm} if moves else {}, True)
        return made
    sizes = stack.shape[1:]
    if sizes[axis] == 1:
        axes = Value.constant(np.array([axis + 1], np.int64), f"{name}/axes")
        x = emit("Squeeze", [x, axes], {}, axis == 0)
        if axis:
            emit("Transpose", [x], {"perm": (*range(1, axis + 1), 0, *range(axis + 1, rank))}, True)
        return made
    behind = sizes[axis + 1 :]
    if not all(isinstance(d, int) for d in behind):
        return None
    if moves:
        x = emit("Transpose", [x], {"perm": perm}, False)
    target = Value.constant(np.array([*[0] * axis, -1, *behind], np.int64), f"{name}/shape")
    emit("Reshape", [x, target], {}, True)
    return made
