"""Compositions of reads from sequences and optionals, where it is known what they hold: the elements themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor
from xrt_core.frontends.tracing import Tracer, current_tracer
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.training.gradient_context import Forward
from xrt_core.training.registry import composition
from xrt_core.training.rules.control import copied


def _elements(ctx: Forward, value: Value | None) -> list[Tensor]:
    """The tensors that a sequence holds. Raises GradientError if they are not known."""
    tracer = current_tracer("a sequence")
    node = next((n for n in tracer.scope.nodes if any(v is value for v in n.outputs)), None)
    if node is None or node.domain:
        raise ctx.error("what the sequence holds is not known: it comes from outside, or from a loop")
    given = [None if v is None else Tensor(v, tracer.scope) for v in node.inputs]
    if node.op_type == "SequenceConstruct":
        return [x for x in given if x is not None]
    if node.op_type in ("Identity", "Optional", "OptionalGetElement"):
        return _elements(ctx, node.inputs[0])
    if node.op_type == "SequenceEmpty":
        return []
    if node.op_type == "SequenceInsert":
        found = _elements(ctx, node.inputs[0])
        assert given[1] is not None
        found.insert(_position(ctx, tracer, node, 2, len(found)), given[1])
        return found
    if node.op_type == "SequenceErase":
        found = _elements(ctx, node.inputs[0])
        del found[_position(ctx, tracer, node, 1, -1)]
        return found
    if node.op_type == "SplitToSequence":
        assert given[0] is not None
        return _parts(ctx, tracer, node, given[0])
    if node.op_type == "SequenceMap":
        return _mapped(ctx, tracer, node, [v for v in node.inputs if v is not None], value)
    raise ctx.error(f"what the sequence of {node.operator} holds is not known")


def _mapped(ctx: Forward, tracer: Tracer, node: Node, inputs: list[Value], value: Value | None) -> list[Tensor]:
    """The body of a SequenceMap for each element."""
    body: Any = node.attributes["body"]
    out = body.outputs[next(i for i, v in enumerate(node.outputs) if v is value)]
    first = _elements(ctx, inputs[0])
    rows = [first]
    for v in inputs[1:]:
        rows.append([Tensor(v, tracer.scope)] * len(first) if isinstance(v.type, TensorType) else _elements(ctx, v))
    made = []
    for given in zip(*rows, strict=True):
        new = copied(tracer, body, dict(zip(body.inputs, (x._value for x in given), strict=True)))
        made.append(Tensor(new.get(out, out), tracer.scope))
    return made


def _position(ctx: Forward, tracer: Tracer, node: Node, index: int, default: int) -> int:
    if len(node.inputs) <= index or node.inputs[index] is None:
        return default
    data = tracer.data_of(node.inputs[index])
    if data is None:
        raise ctx.error(f"the position of {node.operator} depends on data")
    return int(data.reshape(()))


def _parts(ctx: Forward, tracer: Tracer, node: Node, x: Tensor) -> list[Tensor]:
    given: Any = node.attributes.get("axis", 0)
    axis = int(given) % x.ndim
    size, second = ctx.shape(x)[axis], node.inputs[1] if len(node.inputs) > 1 else None
    squeezed = second is None and not node.attributes.get("keepdims", 1)
    lengths = np.array(1) if second is None else tracer.data_of(second)
    if lengths is None:
        raise ctx.error(f"the lengths of {node.operator} depend on data")
    if not lengths.ndim:
        step = int(lengths)
        lengths = np.array([min(step, size - i) for i in range(0, size, step)])
    ends = np.cumsum(lengths)
    parts = [ops.Slice(x, [int(e - n)], [int(e)], [axis]) for e, n in zip(ends, lengths, strict=True)]
    return [p.squeeze(axis) if squeezed else p for p in parts]


@composition("SequenceAt")
def sequence_at(ctx: Forward) -> Any:
    """The element at a known position."""
    tracer = current_tracer("SequenceAt")
    found = _elements(ctx, ctx.node.inputs[0])
    return found[_position(ctx, tracer, ctx.node, 1, 0)]


@composition("ConcatFromSequence")
def concat_from_sequence(ctx: Forward) -> Any:
    """A Concat of the elements, along a new axis if asked for."""
    found, axis = _elements(ctx, ctx.node.inputs[0]), int(ctx.attr("axis"))
    if ctx.attr("new_axis", 0):
        at = axis % (found[0].ndim + 1)
        return ops.Concat(*(x.unsqueeze(at) for x in found), axis=at)
    return ops.Concat(*found, axis=axis)


@composition("OptionalGetElement")
def optional_get_element(ctx: Forward) -> Any:
    """What the optional was made of; a tensor is its own element. A sequence stays one, whose reads are composed."""
    value = ctx.node.inputs[0]
    if value is not None and isinstance(value.type, TensorType):
        return ctx.inputs[0]
    tracer = current_tracer("OptionalGetElement")
    node = next((n for n in tracer.scope.nodes if any(v is value for v in n.outputs)), None)
    if node is None or node.op_type != "Optional" or node.inputs[0] is None:
        raise ctx.error("what the optional holds is not known: it comes from outside, or from a branch")
    return Tensor(node.inputs[0], tracer.scope)
