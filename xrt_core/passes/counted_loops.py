"""Loops that count up to a limit, as TensorFlow's while loops are exported: they get the number of their turns.

Of a Loop that only its condition ends nothing is known: how often it turns, how many its scan outputs are, and whether
an index that it counts stays in range. So engines get its body, turn by turn, at best.

1. A Loop without a limit whose condition, at first and at the end of each turn, is that a counter is less than a limit,
   where the counter is a state that grows by the same positive integer at every turn, and the limit the same at every
   turn, gets the number of turns as its limit, and conditions that always hold.
2. What reads such a counter in the body reads the number of the turn instead, where it starts at a known number.
3. Unchanged: loops whose first condition is another one, that compare anything else, or that have a limit.

Comparisons of counters as floats, which exporters write, are those of the integers up to 2^24, and taken for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec import Struct

from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.types import DTYPE_TO_ONNX, TensorType
from xrt_core.passes.pass_base import Pass

_VERSION: Final = 13  # of the nodes that are made, whose later versions only take more types
_INT64: Final = np.dtype(np.int64)
_UNLIMITED: Final = np.iinfo(np.int32).max
"""A limit that stands for none."""
_BOOL: Final = 9
_HOLDING: Final = (1, 6, 7, 11, 13)  # float32, the integers of 32 and 64 bits, float64, and uint64
_COMPARISONS: Final[Mapping[str, tuple[bool, bool]]] = {
    "Less": (False, False), "LessOrEqual": (False, True), "Greater": (True, False), "GreaterOrEqual": (True, True),
}  # fmt: skip
"""Whether the counter is the second operand, and whether it may reach the limit."""


class Counter(Struct, frozen=True):
    """How a Loop counts. state: the number of the state. step: by how much it grows. limit: the outer value up to which
    it counts. includes: whether it may reach that."""

    state: int
    step: int
    limit: Value
    includes: bool


class CountedLoops(Pass):
    """Gives loops that count up to a limit the number of their turns, as the module's text has it."""

    name = "counted_loops"

    def rewrite(self, graph: Graph) -> Graph:
        made: list[Node] = []
        changed = False
        for node in graph.nodes:
            counter = _counter(node) if node.op_type == "Loop" and not node.domain else None
            if counter is not None and _is_checked_first(node, counter, graph):
                turns, node = _counted(node, counter)
                made += turns
                changed = True
            made.append(node)
        return graph.replace(nodes=made) if changed else graph


def _counter(node: Node) -> Counter | None:
    """How a Loop counts; None where it does not, or has a limit already that is no formality."""
    limit, body = node.inputs[0], node.attributes.get("body")
    assert isinstance(body, Graph)
    if limit is not None and (limit.data is None or int(limit.data.max()) < _UNLIMITED):
        return None
    states = len(node.inputs) - 2
    producers = {v: n for n in body.nodes for v in n.outputs if v is not None}
    test = _comparison(body.outputs[0], producers)
    if test is None:
        return None
    swapped, includes = _COMPARISONS[test.op_type]
    counter, bound = (_uncast(v, producers) for v in (reversed(test.inputs) if swapped else test.inputs))
    added = None if counter is None else producers.get(counter)
    if counter is None or bound is None or added is None or added.op_type != "Add" or added.domain:
        return None
    for i in range(states):
        before, after = body.inputs[2 + i], _uncast(body.outputs[1 + i], producers)
        (by, *more) = [v for v in added.inputs if v is not before] or [None]
        if after is not counter or more or by is None or by.data is None or by.data.size != 1:
            continue
        step, outer = int(by.data.reshape(-1)[0]), _outer(bound, node, body, producers)
        if step > 0 and outer is not None and _is_count(before) and before.shape == () and _is_count(bound):
            return Counter(i, step, outer, includes)
    return None


def _uncast(v: Value | None, producers: Mapping[Value, Node], wanted: Value | None = None) -> Value | None:
    """What a value is a Cast of, from integers to a type that holds them, or a copy; no further than `wanted`, which is
    one of integers."""
    while v is not None and v is not wanted and (n := producers.get(v)) is not None and not n.domain:
        source = n.inputs[0] if n.op_type in ("Cast", "Identity") else None
        if source is None:
            break
        from_integers = source is wanted or (source.dtype is not None and source.dtype.kind in "iu")
        if n.op_type == "Cast" and not (from_integers and n.attributes.get("to") in _HOLDING):
            break
        v = source
    return v


def _outer(v: Value, node: Node, body: Graph, producers: Mapping[Value, Node]) -> Value | None:
    """The value outside of a Loop that one in its body is, the same at every turn; None where there is none."""
    if v.data is not None:
        return v
    if v in body.inputs:
        i = body.inputs.index(v) - 2
        return node.inputs[2 + i] if i >= 0 and _uncast(body.outputs[1 + i], producers) is v else None
    return None if v in producers else v


def _is_count(v: Value) -> bool:
    """Whether a value is one integer, for all that is known."""
    return v.dtype is not None and v.dtype.kind in "iu" and v.shape in ((), None)


def _comparison(condition: Value, producers: Mapping[Value, Node]) -> Node | None:
    """The comparison whose result a condition is, or a copy of it."""
    n = producers.get(condition)
    while n is not None and not n.domain and n.op_type in ("Cast", "Identity") and (v := n.inputs[0]) is not None:
        if n.op_type == "Cast" and (v.dtype != np.bool_ or n.attributes.get("to") != _BOOL):
            return None
        n = producers.get(v)
    return n if n is not None and not n.domain and n.op_type in _COMPARISONS else None


def _is_checked_first(node: Node, counter: Counter, graph: Graph) -> bool:
    """Whether what lets the first turn begin is the same comparison, of the counter's start."""
    condition, start = node.inputs[1], node.inputs[2 + counter.state]
    producers = {v: n for n in graph.nodes for v in n.outputs if v is not None}
    test = None if condition is None else _comparison(condition, producers)
    if test is None or start is None:  # it begins whatever the counter is
        return False
    swapped, includes = _COMPARISONS[test.op_type]
    operands = reversed(test.inputs) if swapped else test.inputs
    pairs = zip(operands, (start, counter.limit), strict=True)
    return includes == counter.includes and all(_is(v, wanted, producers) for v, wanted in pairs)


def _is(v: Value | None, wanted: Value, producers: Mapping[Value, Node]) -> bool:
    """Whether a value has the number of another one, in another type perhaps."""
    found, wanted = _uncast(v, producers, wanted), _uncast(wanted, producers) or wanted
    found = found if found is None or found is wanted else _uncast(found, producers)
    if found is wanted or found is None or found.data is None or wanted.data is None:
        return found is wanted
    return bool(np.array_equal(found.data.reshape(-1), wanted.data.reshape(-1)))


def _counted(node: Node, counter: Counter) -> tuple[list[Node], Node]:
    """The nodes that compute the number of turns, and the Loop of so many."""
    body, name = node.attributes["body"], node.name or next((v.name for v in node.outputs if v is not None), "Loop")
    assert isinstance(body, Graph)
    start = node.inputs[2 + counter.state]
    assert start is not None
    made: list[Node] = []

    def add(op: str, *inputs: Value, **attributes: int) -> Value:
        result = Value(f"{name}/turns/{len(made)}", TensorType(_INT64, ()))
        made.append(Node(op, inputs, [result], attributes, version=_VERSION, name=f"{name}/turns/{op}{len(made)}"))
        return result

    def number(n: int) -> Value:
        return Value.constant(np.array(n, _INT64), f"{name}/turns/{n}")

    scalar = Value.constant(np.zeros(0, _INT64), f"{name}/turns/shape")
    ends = [add("Reshape", add("Cast", v, to=7), scalar) for v in (counter.limit, start)]
    turns = add("Sub", *ends)
    more = counter.step - 1 + counter.includes
    if more:
        turns = add("Add", turns, number(more))
    if counter.step > 1:
        turns = add("Div", turns, number(counter.step))
    turns = add("Max", turns, number(0))
    again = Value.constant(np.array(True), f"{name}/turns/again")
    inside = body.replace(outputs=[again, *body.outputs[1:]])
    if start.data is not None:
        inside = _by_turns(inside, counter, int(start.data.reshape(-1)[0]), name)
    attributes = {**node.attributes, "body": inside}
    return made, node.replace(inputs=[turns, again, *node.inputs[2:]], attributes=attributes)


def _by_turns(body: Graph, counter: Counter, start: int, name: str) -> Graph:
    """A body that reads the number of the turn in place of the counter."""
    before = body.inputs[2 + counter.state]
    own = before.dtype or _INT64
    made: list[Node] = []

    def add(op: str, *inputs: Value, **attributes: int) -> Value:
        result = Value(f"{name}/turn/{len(made)}", TensorType(own if op == "Cast" else _INT64, ()))
        made.append(Node(op, inputs, [result], attributes, version=_VERSION, name=f"{name}/turn/{op}{len(made)}"))
        return result

    at = body.inputs[0]
    if counter.step != 1:
        at = add("Mul", at, Value.constant(np.array(counter.step, _INT64), f"{name}/turn/step"))
    if start:
        at = add("Add", at, Value.constant(np.array(start, _INT64), f"{name}/turn/start"))
    if own != _INT64:
        at = add("Cast", at, to=DTYPE_TO_ONNX[own])
    nodes = [substitute(n, {before: at}) for n in body.nodes]
    return body.replace(nodes=[*made, *nodes], outputs=[at if v is before else v for v in body.outputs])
