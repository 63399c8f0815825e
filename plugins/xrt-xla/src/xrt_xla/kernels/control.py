"""Control flow: If, Loop and Scan as `lax.cond`, `lax.scan` and `lax.while_loop`, whatever the number of turns."""

from __future__ import annotations

from typing import Any

from xrt_core.ir.graph import Graph, Node, Support
from xrt_core.ir.inference import trip_count
from xrt_core.ir.types import TensorType
from xrt_xla.kernels.context import XlaContext, xla_kernel


def _body(node: Node, name: str = "body") -> Graph:
    graph = node.attributes[name]
    assert isinstance(graph, Graph)
    return graph


def _same_branches(node: Node) -> Support:
    taken, other = _body(node, "then_branch"), _body(node, "else_branch")
    for a, b in zip(taken.outputs, other.outputs, strict=True):
        if a.type != b.type or not a.is_static:
            return Support.no(f"the branches of If give {a.type or '?'} and {b.type or '?'}; XLA has one static type")
    return Support.yes()


def _same_states(node: Node) -> Support:
    """Whether each state leaves the body as it came in, and what is collected has a static type."""
    body, scans = _body(node), node.attributes.get("num_scan_inputs", 0)
    assert isinstance(scans, int)
    first, head = (2, 1) if node.op_type == "Loop" else (0, 0)
    states = len(node.inputs) - first - scans
    for i, v in enumerate(body.outputs[head:]):
        before = body.inputs[first + i].type if i < states else v.type
        if not v.is_static or v.type != before:
            return Support.no(
                f"{v.name!r} in the body of {node.op_type} is {v.type or '?'}, and {before or '?'} before"
            )
    if head and (not isinstance(body.outputs[0].type, TensorType) or not body.outputs[0].is_static):
        return Support.no("the condition that the body of Loop gives has no static type")
    if head and len(body.outputs) > 1 + states and trip_count(node, body) is None:
        return Support.no("the number of turns, which is the length of what Loop collects, depends on data")
    return Support.yes()


@xla_kernel("If", check=_same_branches)
def if_(ctx: XlaContext, condition: Any) -> Any:
    """One branch at run time."""
    taken, other = ctx.bodies["then_branch"], ctx.bodies["else_branch"]
    return tuple(ctx.lax.cond(ctx.xp.reshape(condition, ()), lambda: taken(), lambda: other()))


@xla_kernel("Loop", check=_same_states)
def loop(ctx: XlaContext, limit: Any = None, go: Any = None, *states: Any) -> Any:
    """A scan where the number of turns is known; else a while loop, which collects nothing."""
    xp, lax, run = ctx.xp, ctx.lax, ctx.bodies["body"]
    count, n = trip_count(ctx.node, _body(ctx.node)), len(states)
    if count is not None:
        true = xp.asarray(True)

        def turn(carry: Any, i: Any) -> Any:
            results = run(i, true, *carry)
            return tuple(results[1 : 1 + n]), tuple(results[1 + n :])

        last, collected = lax.scan(turn, tuple(states), xp.arange(count, dtype="int64"))
        return (*last, *collected)
    most = None if limit is None else xp.reshape(limit, ())

    def goes_on(carry: Any) -> Any:
        return carry[1] if most is None else carry[1] & (carry[0] < most)

    def again(carry: Any) -> Any:
        results = run(carry[0], carry[1], *carry[2])
        return carry[0] + 1, xp.reshape(results[0], ()), tuple(results[1:])

    start = xp.asarray(True) if go is None else xp.reshape(go, ())
    return tuple(lax.while_loop(goes_on, again, (xp.asarray(0, dtype="int64"), start, tuple(states)))[2])


@xla_kernel("Scan", check=_same_states)
def scan(ctx: XlaContext, *inputs: Any) -> Any:
    """`lax.scan`, which scans the first axes all in one direction, between moves of axes."""
    xp, run = ctx.xp, ctx.bodies["body"]
    count = ctx.attr("num_scan_inputs")
    n = len(inputs) - count
    outs = len(_body(ctx.node).outputs) - n
    moved = [xp.moveaxis(x, a, 0) for x, a in zip(inputs[n:], ctx.attr("scan_input_axes") or (0,) * count, strict=True)]
    back = ctx.attr("scan_input_directions") or (0,) * count
    out_axes = ctx.attr("scan_output_axes") or (0,) * outs
    out_back = ctx.attr("scan_output_directions") or (0,) * outs
    whole = all(back) and all(out_back)  # everything from back to front, as gradients are: nothing need be turned round
    if whole:
        back, out_back = (0,) * count, (0,) * outs
    rows = tuple(x[::-1] if d else x for x, d in zip(moved, back, strict=True))

    def turn(carry: Any, row: Any) -> Any:
        results = run(*carry, *row)
        return tuple(results[:n]), tuple(results[n:])

    last, collected = ctx.lax.scan(turn, tuple(inputs[:n]), rows, reverse=whole)
    flipped = [y[::-1] if d else y for y, d in zip(collected, out_back, strict=True)]
    return (*last, *(xp.moveaxis(y, 0, a) for y, a in zip(flipped, out_axes, strict=True)))
