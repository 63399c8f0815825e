"""Control flow on the host: If, Loop, Scan and SequenceMap. Each body has a plan cache and may run on engines.

Source: the ONNX operator specifications of these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import ExecutionError, XRTError
from xrt_core.ir.graph import Graph, Node, Value, closed
from xrt_core.ir.types import TensorType, ValueType
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.plan import HOST, Call, Plan
from xrt_core.runtime.plan_cache import PlanCache

MakePart = Callable[[Graph, Collection[int]], "PlanCache | Plan"]
"""(body with its captures as inputs, indices of inputs that change each iteration) -> its plans by signature, or one
plan for whatever comes."""


def control_step(node: Node, make_part: MakePart) -> Call:
    """Return the step function of a control-flow node; its arguments are the node's inputs, then its captures.

    Raises ExecutionError for an operator that is not control flow.
    """
    makers: dict[str, Callable[[Node, MakePart], Call]] = {
        "If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map,
    }  # fmt: skip
    make = makers.get(node.op_type)
    if make is None or node.domain:
        raise ExecutionError(f"node {node.name!r}: {node.operator} has a subgraph and is not a known control flow")
    return _wrap_errors(node, make(node, make_part))


def conditions(node: Node) -> frozenset[int]:
    """The inputs of a control-flow node that its step reads on the CPU: conditions, trip counts, sequence lengths."""
    found = {"If": (0,), "Loop": (0, 1), "Scan": (0,) if node.version < 9 else ()}
    return frozenset(found.get(node.op_type, ()))


def _wrap_errors(node: Node, call: Call) -> Call:
    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        try:
            return call(arguments)
        except XRTError:
            raise
        except Exception as e:
            raise ExecutionError(f"node {node.name!r}: {node.operator} failed: {e}") from e

    return run


class _Body:
    """A body, and the positions of its captured values among the step's arguments."""

    def __init__(self, node: Node, graph: Graph, make_part: MakePart, changing: bool) -> None:
        offset = len(node.inputs)
        places = {v: offset + i for i, v in enumerate(node.captures)}
        self.captures = [places[v] for v in graph.captures]
        self.plans = make_part(closed(graph), range(len(graph.inputs)) if changing else ())

    def run(self, own: Sequence[Any], arguments: Sequence[Any]) -> Sequence[Any]:
        return self.plans.run([*own, *[arguments[i] for i in self.captures]])

    def turns(self, arguments: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """The body for the turns of one loop: a function of its own inputs. Captured values are read once, and the plan
        is looked up where types differ from those of the turn before."""
        captured = [arguments[i] for i in self.captures]
        plans = self.plans
        if isinstance(plans, Plan):
            plain = plans.run
            return lambda own: plain([*own, *captured])
        before: list[Any] = []
        run: Call = plans.run
        read = True

        def turn(own: list[Any]) -> Sequence[Any]:
            nonlocal before, run, read
            try:
                types = [(x.dtype, x.shape) for x in own]
            except AttributeError:  # a sequence, or nothing
                return plans.run([*own, *captured])
            own += captured
            if types != before:
                plan = plans.plan_for(own)
                before, run = types, plan.run
                read = any(space != HOST for space in plan.spaces)
            return plans.read(run(own)) if read else run(own)

        return turn


def _if(node: Node, make_part: MakePart) -> Call:
    taken, other = (
        _Body(node, _graph(node, name), make_part, changing=False) for name in ("then_branch", "else_branch")
    )

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        return (taken if _truth(arguments[0]) else other).run((), arguments)

    return run


def _loop(node: Node, make_part: MakePart) -> Call:
    graph = _graph(node, "body")
    body = _Body(node, graph, make_part, changing=True)
    inputs = len(node.inputs)
    states = len(graph.inputs) - 2
    scanned = _elements(node.outputs[states:], graph.outputs[1 + states :], ())

    array, int64 = np.array, np.int64

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        limit = None if inputs < 1 or arguments[0] is None else int(to_numpy(arguments[0]).reshape(-1)[0])
        go = True if inputs < 2 or arguments[1] is None else _truth(arguments[1])
        state: Sequence[Any] = arguments[2 : 2 + states]
        turns: list[Sequence[Any]] = []
        turn = body.turns(arguments)
        i = 0
        while go and (limit is None or i < limit):
            results = turn([array(i, int64), _TRUE, *state])
            go = _truth(results[0])
            state = results[1 : 1 + states]
            if scanned:
                turns.append(results[1 + states :])
            i += 1
        return [*state, *_stack(turns, scanned, [0] * len(scanned))]

    return run


def _scan(node: Node, make_part: MakePart) -> Call:
    graph = _graph(node, "body")
    count = node.attributes["num_scan_inputs"]
    assert isinstance(count, int)
    body = _Body(node, graph, make_part, changing=True)
    states = len(graph.inputs) - count
    if node.version < 9:
        return _scan_8(node, body, states, count, [_tensor(v.type) for v in graph.outputs[states:]])
    axes = _ints(node, "scan_input_axes", count, 0)
    directions = _ints(node, "scan_input_directions", count, 0)
    results = graph.outputs[states:]
    out_axes = _ints(node, "scan_output_axes", len(results), 0)
    out_directions = _ints(node, "scan_output_directions", len(results), 0)
    scanned = _elements(node.outputs[states:], results, out_axes)

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        state: Sequence[Any] = arguments[:states]
        moved = [np.moveaxis(x, a, 0) for x, a in zip(arguments[states : states + count], axes, strict=True)]
        moved = [x[::-1] if d else x for x, d in zip(moved, directions, strict=True)]
        lengths = {len(x) for x in moved}
        if len(lengths) > 1:
            raise ExecutionError(f"node {node.name!r}: Scan over inputs of different lengths {sorted(lengths)}")
        turns = []
        turn = body.turns(arguments)
        for i in range(len(moved[0]) if moved else 0):
            results = turn([*state, *[x[i, ...] for x in moved]])
            state = results[:states]
            turns.append(results[states:])
        outputs = _stack(turns, scanned, out_axes)
        flipped = [np.flip(x, a) if d else x for x, a, d in zip(outputs, out_axes, out_directions, strict=True)]
        return [*state, *flipped]

    return run


def _scan_8(node: Node, body: _Body, states: int, count: int, scanned: Sequence[TensorType]) -> Call:
    """Scan of opset 8: a leading batch axis, and sequence lengths as first input; outputs are zero-padded after the
    end of their sequence."""
    directions = _ints(node, "directions", count, 0)

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        lengths = to_numpy(arguments[0])
        first, scans = arguments[1 : 1 + states], arguments[1 + states : 1 + states + count]
        batch, most = scans[0].shape[:2]
        final: list[Sequence[Any]] = []
        made: list[list[Sequence[Any]]] = []  # per batch entry and iteration, the scan outputs
        for b in range(batch):
            length = most if lengths is None else int(lengths[b])
            state: Sequence[Any] = [x[b, ...] for x in first]
            rows = [x[b, :length][::-1] if d else x[b, :length] for x, d in zip(scans, directions, strict=True)]
            turns: list[Sequence[Any]] = []
            for t in range(length):
                results = body.run([*state, *[r[t, ...] for r in rows]], arguments)
                state = results[:states]
                turns.append(results[states:])
            final.append(state)
            made.append(turns)
        ends = [np.stack(column) for column in zip(*final, strict=True)] if final else list(first)
        outputs = []
        for k, declared in enumerate(scanned):
            like = next((turns[0][k] for turns in made if turns), None)
            if like is None:
                dims = [d if isinstance(d, int) else 0 for d in declared.shape or ()]
                outputs.append(np.zeros((batch, most, *dims), declared.dtype or np.float32))
                continue
            zeros = np.zeros_like(like)  # in the namespace of the elements, as all that follows
            rows = [[r[k] for r in turns] + [zeros] * (most - len(turns)) for turns in made]
            outputs.append(np.stack([np.stack(row) for row in rows]))
        return [*ends, *outputs]

    return run


def _sequence_map(node: Node, make_part: MakePart) -> Call:
    graph = _graph(node, "body")
    body = _Body(node, graph, make_part, changing=False)
    inputs = len(node.inputs)

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        results: list[list[Any]] = [[] for _ in graph.outputs]
        for i, element in enumerate(arguments[0]):
            others = [x[i] if isinstance(x, list) else x for x in arguments[1:inputs]]
            for made, r in zip(results, body.run([element, *others], arguments), strict=True):
                made.append(r)
        return results

    return run


def _graph(node: Node, attribute: str) -> Graph:
    graph = node.attributes.get(attribute)
    if not isinstance(graph, Graph):
        raise ExecutionError(f"node {node.name!r}: {node.operator} lacks the subgraph {attribute!r}")
    return graph


_TRUE = np.array(True)
_TRUE.flags.writeable = False


def _truth(x: Any) -> bool:
    if type(x) is np.ndarray and x.size == 1:
        return bool(x.item())
    return bool(to_numpy(x).reshape(-1)[0])


def _ints(node: Node, attribute: str, count: int, default: int) -> tuple[int, ...]:
    found = node.attributes.get(attribute)
    return tuple(found) if isinstance(found, tuple) and found else (default,) * count


def _tensor(type_: ValueType | None) -> TensorType:
    return type_ if isinstance(type_, TensorType) else TensorType(None)


def _elements(outputs: Sequence[Value | None], results: Sequence[Value], axes: Sequence[int]) -> list[TensorType]:
    """Return the element type of each scan output, from the body's output or else from the node's."""
    found = []
    for i, result in enumerate(results):
        t, output = _tensor(result.type), outputs[i] if i < len(outputs) else None
        whole = _tensor(None if output is None else output.type)
        shape = t.shape
        if whole.shape and not t.is_static:
            axis = (axes[i] if axes else 0) % len(whole.shape)
            shape = whole.shape[:axis] + whole.shape[axis + 1 :]
        found.append(TensorType(t.dtype or whole.dtype, shape))
    return found


def _stack(turns: Sequence[Sequence[Any]], elements: Sequence[TensorType], axes: Sequence[int]) -> list[Any]:
    """Stack the values of all iterations; with zero iterations return empty arrays (unknown dimensions are 0)."""
    if turns:
        return [_stacked(column, axis) for column, axis in zip(zip(*turns, strict=True), axes, strict=True)]
    empty = []
    for t, axis in zip(elements, axes, strict=True):
        shape = [d if isinstance(d, int) else 0 for d in t.shape or ()]
        shape.insert(axis % (len(shape) + 1), 0)
        empty.append(np.zeros(shape, t.dtype or np.float32))
    return empty


def _stacked(column: Sequence[Any], axis: int) -> Any:
    """Stack arrays of one shape on a new axis; several times as fast as NumPy's own function for many small ones."""
    first = column[0]
    if (
        axis
        or type(first) is not np.ndarray
        or any(type(x) is not np.ndarray or x.shape != first.shape for x in column)
    ):
        return np.stack(column, axis)
    out = np.empty((len(column), *first.shape), first.dtype)
    for i, x in enumerate(column):
        out[i] = x
    return out
