"""Loops that count up to a limit, as TensorFlow's while loops are exported: they get the number of their turns.

Of a Loop that only its condition ends nothing is known: how often it turns, how many its scan outputs are, and whether
an index that it counts stays in range. So engines get its body, turn by turn, at best.

1. A Loop whose condition, at first and at the end of each turn, is that a counter is less than a limit, or that several
   are, where a counter is a state that grows by the same positive integer at every turn, or the number of the turn, and
   a limit the same at every turn, gets the number of turns as its limit, and conditions that always hold.
2. What reads a state in the body that grows by the same integer at every turn, from a known number on, reads the number
   of the turn instead.
3. Unchanged: loops whose first condition is another one, and those that compare anything else.

Comparisons of counters as floats, which exporters write, are those of the integers up to 2^24, and taken for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.types import DTYPE_TO_ONNX, TensorType
from xrt_core.passes.pass_base import Pass, typed

_VERSION: Final = 13  # of the nodes that are made, whose later versions only take more types
_INT64: Final = np.dtype(np.int64)
_UNLIMITED: Final = np.iinfo(np.int32).max
"""A limit that stands for none."""
_ZERO: Final = Value.constant(np.array(0, _INT64), "")
"""The number of the first turn."""
_BOOL: Final = 9
_HOLDING: Final = (1, 6, 7, 11, 13)  # float32, the integers of 32 and 64 bits, float64, and uint64
_COMPARISONS: Final[Mapping[str, tuple[bool, bool]]] = {
    "Less": (False, False), "LessOrEqual": (False, True), "Greater": (True, False), "GreaterOrEqual": (True, True),
}  # fmt: skip
"""Whether the counter is the second operand, and whether it may reach the limit."""


class Counter(Struct, frozen=True):
    """How a Loop counts. state: the number of the state; None for the number of the turn, before the turn. step: by how
    much it grows. limit: the outer value up to which it counts. includes: whether it may reach that."""

    state: int | None
    step: int
    limit: Value
    includes: bool

    def start(self, node: Node) -> Value | None:
        """What it is before the first turn."""
        return _ZERO if self.state is None else node.inputs[2 + self.state]


class CountedLoops(Pass):
    """Gives loops that count up to a limit the number of their turns, as the module's text has it."""

    name = "counted_loops"

    def rewrite(self, graph: Graph) -> Graph:
        if not any(n.op_type == "Loop" and not n.domain for n in graph.nodes):
            return graph
        untyped, graph = graph, typed(graph)
        made: list[Node] = []
        changed = False
        for node in graph.nodes:
            if node.op_type == "Loop" and not node.domain:
                counters = _counters(node)
                if counters is not None and _is_checked_first(node, counters, graph):
                    turns, node = _counted(node, counters, graph)
                    made += turns
                    changed = True
                numbered = _by_turns(node)
                changed |= numbered is not node
                node = numbered
            made.append(node)
        return graph.replace(nodes=made) if changed else untyped


def _counters(node: Node) -> list[Counter] | None:
    """How a Loop counts; None where it ends otherwise, or only by a limit that it has already."""
    body = node.attributes.get("body")
    assert isinstance(body, Graph)
    producers = {v: n for n in body.nodes for v in n.outputs if v is not None}
    tests = _comparisons(body.outputs[0], producers)
    found = [_counter(t, node, body, producers) for t in tests or ()]
    counters = [c for c in found if c is not None]
    return counters if counters and len(counters) == len(found) else None


def _counter(test: Node, node: Node, body: Graph, producers: Mapping[Value, Node]) -> Counter | None:
    """What a comparison at the end of each turn counts."""
    swapped, includes = _COMPARISONS[test.op_type]
    counter, bound = (_uncast(v, producers) for v in (reversed(test.inputs) if swapped else test.inputs))
    outer = None if bound is None else _outer(bound, node, body, producers)
    if counter is None or bound is None or outer is None or not _is_count(bound):
        return None
    if counter is body.inputs[0]:
        return Counter(None, 1, outer, includes)
    for i in range(len(node.inputs) - 2):
        before, step = body.inputs[2 + i], _step(i, body, producers)
        after = _uncast(body.outputs[1 + i], producers)
        if after is counter and step is not None and step > 0 and before.shape == ():
            return Counter(i, step, outer, includes)
    return None


def _step(state: int, body: Graph, producers: Mapping[Value, Node]) -> int | None:
    """By how much a state of integers grows at every turn; None where that is not known."""
    before, after = body.inputs[2 + state], _uncast(body.outputs[1 + state], producers)
    added = None if after is None else producers.get(after)
    if added is None or added.op_type != "Add" or added.domain or not _is_count(before):
        return None
    (by, *more) = [v for v in added.inputs if v is not before] or [None]
    if more or by is None or by.data is None or by.data.size != 1 or by.data.dtype.kind not in "iu":
        return None
    return int(by.data.reshape(-1)[0])


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
    """Whether a value is one integer, for all that is known, or a float that is."""
    if v.data is not None and v.data.dtype.kind == "f":
        return v.data.size == 1 and float(v.data.reshape(-1)[0]).is_integer()
    return v.dtype is not None and v.dtype.kind in "iu" and v.shape in ((), None)


def _comparisons(condition: Value, producers: Mapping[Value, Node]) -> list[Node] | None:
    """The comparisons that must all hold for a condition to; None where anything else is asked."""
    n = producers.get(condition)
    while n is not None and not n.domain and n.op_type in ("Cast", "Identity") and (v := n.inputs[0]) is not None:
        if n.op_type == "Cast" and (v.dtype != np.bool_ or n.attributes.get("to") != _BOOL):
            return None
        n = producers.get(v)
    if n is None or n.domain:
        return None
    if n.op_type != "And":
        return [n] if n.op_type in _COMPARISONS else None
    both = [None if v is None else _comparisons(v, producers) for v in n.inputs]
    found = [t for tests in both if tests is not None for t in tests]
    return None if None in both else list(dict.fromkeys(found))


def _is_checked_first(node: Node, counters: Sequence[Counter], graph: Graph) -> bool:
    """Whether what lets the first turn begin is the same comparisons, of the counters' starts, or true like them."""
    condition = node.inputs[1]
    producers = {v: n for n in graph.nodes for v in n.outputs if v is not None}
    checked = [c for c in counters if c.state is not None]
    known = None if condition is None else condition.data
    if condition is None or known is not None:
        return (known is None or bool(known.all())) and all(_begins(node, c) for c in checked)
    tests = _comparisons(condition, producers)
    if tests is None or not all(any(_is_of_start(t, node, c, producers) for c in checked) for t in tests):
        return False
    return all(_begins(node, c) or any(_is_of_start(t, node, c, producers) for t in tests) for c in checked)


def _begins(node: Node, counter: Counter) -> bool:
    """Whether a counter is known to let the first turn begin."""
    start, limit = counter.start(node), counter.limit
    if start is None or start.data is None or limit.data is None or start.data.size != 1 or limit.data.size != 1:
        return False
    return int(start.data.reshape(-1)[0]) < int(limit.data.reshape(-1)[0]) + counter.includes


def _is_of_start(test: Node, node: Node, counter: Counter, producers: Mapping[Value, Node]) -> bool:
    """Whether a comparison is the counter's, before the first turn."""
    start = counter.start(node)
    swapped, includes = _COMPARISONS[test.op_type]
    operands = reversed(test.inputs) if swapped else test.inputs
    if start is None or includes != counter.includes:
        return False
    return all(_is(v, wanted, producers) for v, wanted in zip(operands, (start, counter.limit), strict=True))


def _is(v: Value | None, wanted: Value, producers: Mapping[Value, Node]) -> bool:
    """Whether a value has the number of another one, in another type perhaps."""
    found, wanted = _uncast(v, producers, wanted), _uncast(wanted, producers) or wanted
    found = found if found is None or found is wanted else _uncast(found, producers)
    if found is wanted or found is None or found.data is None or wanted.data is None:
        return found is wanted
    return bool(np.array_equal(found.data.reshape(-1), wanted.data.reshape(-1)))


class _Nodes:
    """Nodes that compute a number of turns, under one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: list[Node] = []
        self._scalar = Value.constant(np.zeros(0, _INT64), f"{name}/turns/shape")

    def add(self, op: str, *inputs: Value, **attributes: int) -> Value:
        """The result of a node, an integer of 64 bits."""
        at = f"{self.name}/turns"
        result = Value(f"{at}/{len(self.made)}", TensorType(_INT64, ()))
        name = f"{at}/{op}{len(self.made)}"
        self.made.append(Node(op, inputs, [result], attributes, version=_VERSION, name=name))
        return result

    def number(self, n: int) -> Value:
        """A constant."""
        return Value.constant(np.array(n, _INT64), f"{self.name}/turns/{n}")

    def whole(self, v: Value) -> Value:
        """A value of one element in 64 bits."""
        return self.add("Reshape", self.add("Cast", v, to=7), self._scalar)

    def turns_of(self, c: Counter, node: Node) -> Value:
        """How many turns a counter lets a Loop make; below 0 for none."""
        start = c.start(node)
        assert start is not None
        turns, more = self.whole(c.limit), c.step - 1 + c.includes + (c.state is None)
        if start.data is None or start.data.any():
            turns = self.add("Sub", turns, self.whole(start))
        if more:
            turns = self.add("Add", turns, self.number(more))
        if c.state is None:  # it is compared once a turn is over, not before the first
            turns = self.add("Max", turns, self.number(1))
        return self.add("Div", turns, self.number(c.step)) if c.step > 1 else turns


def _counted(node: Node, counters: Sequence[Counter], graph: Graph) -> tuple[list[Node], Node]:
    """The nodes that compute the number of turns, and the Loop of so many."""
    body, nodes, limit = node.attributes["body"], _Nodes(_name(node)), node.inputs[0]
    assert isinstance(body, Graph)
    producers = {v: n for n in graph.nodes for v in n.outputs if v is not None}
    own = None if limit is None or (limit.data is not None and int(limit.data.max()) >= _UNLIMITED) else limit
    ends = [c.limit for c in counters if c.state is not None and _is_never_negative(c, node)]
    ends += [] if own is None else [own]

    def adds_nothing(c: Counter) -> bool:
        """Whether the Loop ends no earlier for a counter: one from 0 on by 1 up to the Loop's own limit, or the number
        of the turn up to a limit that another one has, which is not behind it."""
        if c.state is None:
            return any(_is(c.limit, v, producers) for v in ends)
        return own is not None and _is_from_zero(c, node) and _is(own, c.limit, producers)

    needed = [c for c in counters if not adds_nothing(c)]
    bounds = [nodes.turns_of(c, node) for c in needed] + ([] if own is None else [nodes.whole(own)])
    turns = bounds[0]
    for other in bounds[1:]:
        turns = nodes.add("Min", turns, other)
    if needed:
        turns = nodes.add("Max", turns, nodes.number(0))
    again = Value.constant(np.array(True), f"{nodes.name}/turns/again")
    inside = body.replace(outputs=[again, *body.outputs[1:]])
    return nodes.made, node.replace(
        inputs=[turns, again, *node.inputs[2:]], attributes={**node.attributes, "body": inside}
    )


def _is_from_zero(c: Counter, node: Node) -> bool:
    """Whether a counter is the number of the turns that are over."""
    start = c.start(node)
    counts = c.state is not None and c.step == 1 and not c.includes
    return counts and start is not None and start.data is not None and not start.data.any()


def _is_never_negative(c: Counter, node: Node) -> bool:
    """Whether a counter is known to start at 0 or above."""
    start = c.start(node)
    return start is not None and start.data is not None and bool((start.data >= 0).all())


def _name(node: Node) -> str:
    return node.name or next((v.name for v in node.outputs if v is not None), "Loop")


def _by_turns(node: Node) -> Node:
    """A Loop whose body reads the number of the turn in place of the states that grow with it."""
    body, name = node.attributes["body"], _name(node)
    assert isinstance(body, Graph)
    producers = {v: n for n in body.nodes for v in n.outputs if v is not None}
    made: list[Node] = []
    new: dict[Value, Value] = {}
    for i, start in enumerate(node.inputs[2:]):
        before, step = body.inputs[2 + i], _step(i, body, producers)
        if not step or start is None or start.data is None or start.data.size != 1 or before.shape != ():
            continue
        if all(before not in n.uses() for n in body.nodes if n is not producers.get(body.outputs[1 + i])):
            continue  # it is read by what makes it grow alone
        new[before] = _at_turn(body.inputs[0], before, step, int(start.data.reshape(-1)[0]), f"{name}/turn/{i}", made)
    if not new:
        return node
    nodes = [substitute(n, new) for n in body.nodes]
    inside = body.replace(nodes=[*made, *nodes], outputs=[new.get(v, v) for v in body.outputs])
    return node.replace(attributes={**node.attributes, "body": inside})


def _at_turn(turn: Value, state: Value, step: int, start: int, name: str, made: list[Node]) -> Value:
    """A state that is `start` at first and grows by `step`, from the number of the turn, by nodes that are added."""
    own = state.dtype or _INT64

    def add(op: str, *inputs: Value, **attributes: int) -> Value:
        result = Value(f"{name}/{op}", TensorType(own if op == "Cast" else _INT64, ()))
        made.append(Node(op, inputs, [result], attributes, version=_VERSION, name=f"{name}/{op}"))
        return result

    if step != 1:
        turn = add("Mul", turn, Value.constant(np.array(step, _INT64), f"{name}/step"))
    if start:
        turn = add("Add", turn, Value.constant(np.array(start, _INT64), f"{name}/start"))
    return turn if own == _INT64 else add("Cast", turn, to=DTYPE_TO_ONNX[own])
