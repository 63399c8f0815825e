"""Gradients of If, Scan and Loop: a node of the same operator whose bodies recompute and differentiate the old ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.promotion import BOOL, INT64
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.frontends.tracing import Tracer, current_tracer
from xrt_core.ir.graph import Graph, Node, Value, substitute
from xrt_core.ir.types import Dim, TensorType, ValueType
from xrt_core.passes.simplify import DeadNodes
from xrt_core.training.autodiff import differentiable, reverse
from xrt_core.training.gradient_context import Backward, Forward, filled, known_as
from xrt_core.training.registry import composition, gradient
from xrt_core.training.residuals import Product, products, split

_SAVED = "xrt.training.saved"
"""Metadata of a Scan or Loop whose last outputs are the states at the start of each iteration."""


def copied(tracer: Tracer, body: Graph, given: Mapping[Value, Value]) -> dict[Value, Value]:
    """Record a copy of the nodes of a body with new values; returns old value -> new value."""
    new = dict(given)
    for n in body.nodes:
        n = substitute(n, new)
        made = [None if v is None else Value(tracer.fresh(v.name) if v.name else "", v.type) for v in n.outputs]
        new.update({old: v for old, v in zip(n.outputs, made, strict=True) if old is not None and v is not None})
        tracer.scope.nodes.append(n.replace(outputs=made))
    return new


def _backwards(
    tracer: Tracer, body: Graph, given: Mapping[Value, Value], cotangents: Sequence[tuple[Value, Tensor | None]],
    wrt: Sequence[Value],
) -> tuple[dict[Value, Value], list[Tensor]]:  # fmt: skip
    """Record the forward body again, then the gradients by `wrt` (zeros for those that have none); returns old value
    -> new value, and the gradients."""
    new = copied(tracer, body, given)
    arriving: dict[Value, Tensor] = {}
    for out, g in cotangents:
        v = new.get(out, out)
        if g is not None and v.data is None and differentiable(v):
            arriving[v] = arriving[v] + g if v in arriving else g
    targets = [new.get(v, v) for v in wrt]
    found = reverse(arriving, targets)
    results = []
    for v in targets:
        g = found.get(v)
        results.append(filled(Tensor(v, tracer.scope)) if g is None else g)
    return new, results


def _graph(tracer: Tracer, name: str, inputs: Sequence[Value], outputs: Sequence[Tensor | Value]) -> Graph:
    """Return the recorded nodes as a body; every output is produced by a node of it."""
    ends = []
    for x in outputs:
        own = x._value if isinstance(x, Tensor) else x
        made: Tensor = ops.Identity(Tensor(own, tracer.scope))
        ends.append(made._value)
    return Graph(inputs, ends, tracer.scope.nodes, opsets=dict(tracer.opsets), name=name)


def _floats(values: Sequence[Value | None]) -> list[Value]:
    return [v for v in values if v is not None and v.data is None and differentiable(v)]


@gradient("If")
def if_(ctx: Backward) -> Any:
    """An If with the same condition, whose branches compute the gradients of the original ones."""
    tracer = current_tracer("If")
    bodies: dict[str, Graph] = {}
    for name in ("then_branch", "else_branch"):
        body = ctx.node.attributes[name]
        assert isinstance(body, Graph)
        with tracer.nested(f"{name} of {ctx.node.name}"):
            _, found = _backwards(tracer, body, {}, list(zip(body.outputs, ctx.grads, strict=True)), ctx.captures)
            bodies[name] = _graph(tracer, name, (), found)
    types = [v.type for v in ctx.captures]
    made = tracer.emit(tracer.schema("If"), [ctx.inputs[0]._value], bodies, len(types), types)
    return (None, *(Tensor(v, tracer.scope) for v in made))


def _with_saved(ctx: Forward, body: Graph, states: Sequence[Value], attributes: dict[str, Any]) -> Any:
    """Return a copy of the node with the states at the start of each iteration as additional outputs."""
    node, tracer = ctx.node, current_tracer("a loop")
    if _SAVED in node.annotations.metadata:
        return None
    identity = tracer.schema("Identity").since_version
    extra = [Value(tracer.fresh("state"), v.type) for v in states]
    more = [Node("Identity", (v,), (e,), version=identity) for v, e in zip(states, extra, strict=True)]
    whole = body.replace(nodes=(*body.nodes, *more), outputs=(*body.outputs, *extra))
    outputs = [Value(tracer.fresh(v.name) if v else tracer.fresh("left_out"), v.type if v else None)
               for v in node.outputs]  # fmt: skip
    saved = [Value(tracer.fresh("states"), _stacked(v.type, _turns(node))) for v in states]
    metadata = {**node.annotations.metadata, _SAVED: str(len(states))}
    tracer.scope.nodes.append(
        Node(
            node.op_type, node.inputs, [*outputs, *saved], {**node.attributes, **attributes, "body": whole},
            version=node.version, name=node.name, annotations=node.annotations.replace(metadata=metadata),
        )
    )  # fmt: skip
    return [Tensor(v, tracer.scope) if old is not None else None for old, v in zip(node.outputs, outputs, strict=True)]


def _turns(node: Node) -> Dim:
    """The number of iterations of a Scan, if it is known."""
    if node.op_type != "Scan":
        return None
    axes: Any = node.attributes.get("scan_input_axes")
    count: Any = node.attributes["num_scan_inputs"]
    first = node.inputs[len(node.inputs) - count]
    return None if first is None or first.shape is None else first.shape[axes[0] if axes else 0]


def _stacked(t: ValueType | None, length: Dim = None) -> ValueType | None:
    if not isinstance(t, TensorType) or t.shape is None:
        return TensorType(t.dtype) if isinstance(t, TensorType) else None
    return TensorType(t.dtype, (length, *t.shape))


def _body_of(ctx: Forward) -> Graph:
    body = ctx.node.attributes["body"]
    assert isinstance(body, Graph)
    return body


@composition("Scan")
def scan_with_states(ctx: Forward) -> Any:
    """The Scan with its states as additional outputs."""
    if ctx.version < 9:
        raise ctx.error("the gradient covers Scan of opset 9 and newer")
    body, count = _body_of(ctx), int(ctx.attr("num_scan_inputs"))
    states = body.inputs[: len(ctx.node.inputs) - count]
    outs = len(body.outputs) - len(states)
    attributes = {
        k: (*(ctx.attr(k) or (0,) * outs), *[0] * len(states)) for k in ("scan_output_axes", "scan_output_directions")
    }
    return _with_saved(ctx, body, states, attributes)


@dataclass(frozen=True, slots=True)
class _ScanParts:
    """A Scan of the forward pass, by the places of its inputs and outputs.

    states, scanned, outs: how many states, scanned inputs and scanned outputs it has, without the saved states. moving,
    sliced: indices of the inputs of its body whose gradients are carried and scanned. arriving: indices of the scanned
    outputs that the loss depends on. in_axes and so on: its attributes.
    """

    states: int
    scanned: int
    outs: int
    moving: list[int]
    sliced: list[int]
    arriving: list[int]
    in_axes: tuple[int, ...]
    in_ways: tuple[int, ...]
    out_axes: tuple[int, ...]
    out_ways: tuple[int, ...]


def _scan_parts(ctx: Backward, body: Graph) -> _ScanParts:
    m = int(ctx.attr("num_scan_inputs"))
    n = len(ctx.node.inputs) - m
    k = len(body.outputs) - 2 * n
    in_axes, in_ways = (tuple(ctx.attr(a) or (0,) * m) for a in ("scan_input_axes", "scan_input_directions"))
    outs = [tuple(ctx.attr(a) or (0,) * (k + n)) for a in ("scan_output_axes", "scan_output_directions")]
    moving = [i for i in range(n) if differentiable(body.inputs[i])]
    sliced = [i for i in range(n, n + m) if i in ctx.wanted and differentiable(body.inputs[i])]
    arriving = [j for j in range(n, n + k) if ctx.grads[j] is not None]
    return _ScanParts(n, m, k, moving, sliced, arriving, in_axes, in_ways, outs[0], outs[1])


@dataclass(frozen=True, slots=True)
class _BackwardBody:
    """The body of the Scan of the backward pass, and what the forward Scan has to store for it.

    graph: carries the gradients by states and the sums of `summed`; scans `read`, `stored` and the gradients that
    arrive; gives the gradients by scanned inputs, and `more`. own: the inputs of the forward body in it. stored: values
    of the forward body. early: the nodes that make them. new: old value of the forward body -> its copy. by_capture:
    captured value -> its gradient in one iteration. later: those that are one product after the Scan. summed: the
    others. more: factors of these products that have to be stacked.
    """

    graph: Graph
    own: list[Value]
    read: list[Value]
    stored: Sequence[Value]
    early: Sequence[Node]
    new: Mapping[Value, Value]
    by_capture: Mapping[Value, Value]
    later: Mapping[Value, Product]
    summed: Mapping[Value, Value]
    more: list[Value]


def _backward_body(ctx: Backward, body: Graph, s: _ScanParts, stores: bool) -> _BackwardBody:
    """Record the body of the backward pass. stores: whether the forward Scan can be given further outputs."""
    tracer, n = current_tracer("Scan"), s.states
    with tracer.nested(f"gradient of {ctx.node.name}"):
        carried = [Value(tracer.fresh("d_state"), body.inputs[i].type) for i in s.moving]
        own = [Value(tracer.fresh(v.name or "in"), v.type) for v in body.inputs]
        slices = [Value(tracer.fresh("d_out"), body.outputs[j].type) for j in s.arriving]
        inner = tracer.scope
        cotangents: list[tuple[Value, Tensor | None]] = [
            *((body.outputs[i], Tensor(c, inner)) for i, c in zip(s.moving, carried, strict=True)),
            *((body.outputs[j], Tensor(d, inner)) for j, d in zip(s.arriving, slices, strict=True)),
        ]
        wrt = [*(body.inputs[i] for i in s.moving), *ctx.captures, *(body.inputs[i] for i in s.sliced)]
        new, tensors = _backwards(tracer, body, dict(zip(body.inputs, own, strict=True)), cotangents, wrt)
        found = [t._value for t in tensors]
        end = len(found) - len(s.sliced)
        by_state, by_slice = found[: len(s.moving)], found[end:]
        by_capture = dict(zip(ctx.captures, found[len(s.moving) : end], strict=True))
        later = products(inner.nodes, by_capture.values(), {*by_state, *by_slice}) if stores else {}
        summed = {v: g for v, g in by_capture.items() if g not in later}
        factors = dict.fromkeys(f for p in later.values() for f in (p.left, p.right))
        results = [*by_state, *summed.values(), *by_slice]
        parts = split(inner.nodes, {*carried, *slices}, {*own, *body.captures}, [*results, *factors], factors)
        stored = parts.stored if stores else ()
        in_place = {v for i, v in enumerate(own) if i < n or not (s.in_axes[i - n] or s.in_ways[i - n])}
        more = [f for f in factors if f not in stored and f not in in_place]
        if stores:
            inner.nodes[:] = parts.late
        totals = [Value(tracer.fresh("d_captured"), v.type) for v in summed]
        added = [Tensor(t, inner) + Tensor(g, inner) for t, g in zip(totals, summed.values(), strict=True)]
        ends = [*(Tensor(g, inner) for g in by_state), *added, *(Tensor(g, inner) for g in (*by_slice, *more))]
        read = [v for v in own if any(v in x.uses() for x in inner.nodes) or any(v is e._value for e in ends)]
        graph = _graph(tracer, "body", [*carried, *totals, *read, *stored, *slices], ends)
    return _BackwardBody(graph, own, read, stored, parts.early, new, by_capture, later, summed, more)


def _backward_scan(
    ctx: Backward, s: _ScanParts, b: _BackwardBody, first: Sequence[Tensor], residuals: Sequence[Tensor]
) -> list[Tensor]:
    """Record the Scan of the backward pass; its outputs. first: what it carries at the start. residuals: what the
    forward Scan stored."""
    tracer, n = current_tracer("Scan"), s.states
    scope, graph = tracer.scope, b.graph
    place = {v: i for i, v in enumerate(b.own)}
    rows: list[tuple[Tensor, int, int]] = []  # what is scanned, its axis and direction
    for v in b.read:
        i = place[v]
        saved = i < n
        rows.append(
            (ctx.outputs[n + s.outs + i], 0, 1) if saved else (ctx.inputs[i], s.in_axes[i - n], 1 - s.in_ways[i - n])
        )
    rows += [(x, 0, 1) for x in residuals]
    for j in s.arriving:
        arrived = ctx.grads[j]
        assert arrived is not None
        rows.append((arrived, s.out_axes[j - n], 1 - s.out_ways[j - n]))
    if not rows:  # a Scan needs something that says how often
        rows.append((ctx.inputs[n], s.in_axes[0], 1 - s.in_ways[0]))
        graph = graph.replace(inputs=(*graph.inputs, Value("turn", b.own[n].type)))
    attributes: dict[str, Any] = {
        "body": graph,
        "num_scan_inputs": len(rows),
        "scan_input_axes": tuple(int(a) for _, a, _ in rows),
        "scan_input_directions": tuple(int(w) for _, _, w in rows),
    }
    if s.sliced or b.more:
        attributes["scan_output_axes"] = (*(int(s.in_axes[i - n]) for i in s.sliced), *[0] * len(b.more))
        attributes["scan_output_directions"] = (*(1 - int(s.in_ways[i - n]) for i in s.sliced), *[1] * len(b.more))
    types = [
        *(x.type for x in first),
        *(ctx.inputs[i].type for i in s.sliced),
        *(_stacked(v.type, _turns(ctx.node)) for v in b.more),
    ]
    scanned = [x._value for x in (*first, *(x for x, _, _ in rows))]
    return [Tensor(v, scope) for v in tracer.emit(tracer.schema("Scan"), scanned, attributes, len(types), types)]


@gradient("Scan")
def scan(ctx: Backward) -> Any:
    """A Scan from the last iteration to the first. The forward Scan stores what it reads; gradients of captures are
    summed over the iterations, or are one product after them."""
    tracer, body = current_tracer("Scan"), _body_of(ctx)
    scope, s = tracer.scope, _scan_parts(ctx, body)
    at = next((i for i, x in enumerate(scope.nodes) if x is ctx.node), None)
    b = _backward_body(ctx, body, s, stores=at is not None)
    residuals: list[Tensor] = []
    if at is not None and b.stored:
        whole, outputs = _with_residuals(tracer, ctx, b.early, b.own, b.new, b.stored)
        scope.nodes[at] = whole
        residuals = [Tensor(v, scope) for v in outputs]
    first = [*(_arriving(ctx, i, ctx.inputs[i]) for i in s.moving), *(filled(Tensor(v, scope)) for v in b.summed)]
    back = _backward_scan(ctx, s, b, first, residuals)
    behind = back[len(first) :]
    by_input = dict(zip(s.moving, back, strict=False)) | dict(zip(s.sliced, behind, strict=False))
    captured = dict(zip(b.summed, back[len(s.moving) :], strict=False))
    stacks = dict(zip(b.more, behind[len(s.sliced) :], strict=True)) | dict(zip(b.stored, residuals, strict=True))
    place = {v: i for i, v in enumerate(b.own)}
    for v, g in b.by_capture.items():
        if g in b.later:
            both = b.later[g].left, b.later[g].right
            left, right = (_all_turns(ctx, f, stacks, place, s.states, s.outs) for f in both)
            captured[v] = known_as(left.T @ right, Tensor(v, scope))
    return (*(by_input.get(i) for i in range(s.states + s.scanned)), *(captured[v] for v in ctx.captures))


def _with_residuals(
    tracer: Tracer, ctx: Backward, nodes: Sequence[Node], own: Sequence[Value], new: Mapping[Value, Value],
    stored: Sequence[Value],
) -> tuple[Node, list[Value]]:  # fmt: skip
    """Return the forward Scan with the values that the backward pass reads as additional outputs, before the states."""
    node, body = ctx.node, _body_of(ctx)
    n = len(node.inputs) - int(ctx.attr("num_scan_inputs"))
    end = len(body.outputs) - n
    with tracer.nested(f"{node.name} with residuals"):
        inputs = [Value(tracer.fresh(v.name or "in"), v.type) for v in own]
        fresh = copied(tracer, body.replace(inputs=own, nodes=nodes, outputs=()), dict(zip(own, inputs, strict=True)))
        ends = [new.get(v, v) for v in body.outputs]
        ends = [fresh.get(v, v) for v in (*ends[:end], *stored, *ends[end:])]
        whole = DeadNodes()(_graph(tracer, body.name, inputs, ends))
    outputs = [Value(tracer.fresh("residual"), _stacked(v.type, _turns(node))) for v in stored]
    attributes = {**node.attributes, "body": whole}
    for name in ("scan_output_axes", "scan_output_directions"):
        given: Any = ctx.attr(name) or (0,) * (len(body.outputs) - n)
        attributes[name] = (*given[: end - n], *[0] * len(stored), *given[end - n :])
    return node.replace(outputs=(*node.outputs[:end], *outputs, *node.outputs[end:]), attributes=attributes), outputs


def _all_turns(
    ctx: Backward, value: Value, stacks: Mapping[Value, Tensor], place: Mapping[Value, int], n: int, k: int
) -> Tensor:
    """The rows of a matrix of the body over all iterations, in the order of the iterations."""
    found = stacks.get(value)
    if found is None:
        i = place[value]
        found = ctx.outputs[n + k + i] if i < n else ctx.inputs[i]
    assert value.shape is not None
    return cast(Tensor, found.reshape(-1, value.shape[1]))


def _arriving(ctx: Backward, output: int, like: Tensor) -> Tensor:
    """Return the gradient by an output, zeros if the loss does not depend on it."""
    found = ctx.grads[output]
    return filled(like) if found is None else found


@composition("Loop")
def loop_with_states(ctx: Forward) -> Any:
    """The Loop with its states, and the index of each iteration, as additional outputs."""
    body = _body_of(ctx)
    return _with_saved(ctx, body, [body.inputs[0], *body.inputs[2:]], {})


@gradient("Loop")
def loop(ctx: Backward) -> Any:
    """A Loop over the iterations that ran, from the last to the first."""
    tracer, body = current_tracer("Loop"), _body_of(ctx)
    n = len(body.inputs) - 2
    k = len(body.outputs) - 1 - n - (n + 1)
    scope = tracer.scope
    saved = ctx.outputs[n + k :]
    moving = [i for i in range(n) if differentiable(body.inputs[2 + i])]
    arriving = [j for j in range(n, n + k) if ctx.grads[j] is not None]
    first = [_arriving(ctx, i, ctx.inputs[2 + i]) for i in moving]
    sums = [filled(Tensor(v, scope)) for v in ctx.captures]
    turns: Tensor = ops.Size(saved[0])
    with tracer.nested(f"gradient of {ctx.node.name}"):
        number = Value(tracer.fresh("turn"), TensorType(INT64, ()))
        condition = Value(tracer.fresh("goes_on"), TensorType(BOOL, ()))
        carried = [Value(tracer.fresh("d_state"), body.inputs[2 + i].type) for i in moving]
        totals = [Value(tracer.fresh("d_captured"), v.type) for v in ctx.captures]
        inner = tracer.scope
        at = turns - 1 - Tensor(number, inner)
        states = [_turn(x, at, v) for x, v in zip(saved, (body.inputs[0], *body.inputs[2:]), strict=True)]
        given = {body.inputs[0]: states[0], **dict(zip(body.inputs[2:], states[1:], strict=True))}
        given[body.inputs[1]] = literal(np.array(True), BOOL)._value
        cotangents: list[tuple[Value, Tensor | None]] = [
            (body.outputs[1 + i], Tensor(c, inner)) for i, c in zip(moving, carried, strict=True)
        ]
        for j in arriving:
            out, grad = body.outputs[1 + j], ctx.grads[j]
            assert grad is not None
            cotangents.append((out, Tensor(_turn(grad, at, out), inner)))
        wrt = [*(body.inputs[2 + i] for i in moving), *ctx.captures]
        _, found = _backwards(tracer, body, given, cotangents, wrt)
        added = [Tensor(t, inner) + g for t, g in zip(totals, found[len(moving) :], strict=True)]
        graph = _graph(tracer, "body", [number, condition, *carried, *totals],
                       [condition, *found[: len(moving)], *added])  # fmt: skip
    start = [turns, literal(np.array(True), BOOL), *first, *sums]
    types = [x.type for x in (*first, *sums)]
    made = tracer.emit(tracer.schema("Loop"), [x._value for x in start], {"body": graph}, len(types), types)
    back = [Tensor(v, scope) for v in made]
    by_state = dict(zip(moving, back, strict=False))
    return (None, None, *(by_state.get(i) for i in range(n)), *back[len(moving) :])[: len(ctx.node.inputs) + len(sums)]


def _turn(x: Tensor, at: Tensor, like: Value) -> Value:
    """Return the element of `x` for one iteration, with the type that the body declares."""
    made: Tensor = ops.Gather(x, at, axis=0)
    value = made._value
    if not value.is_static and like.type is not None:
        object.__setattr__(value, "type", like.type)  # no graph holds the value yet
    return value
