"""The context of a gradient rule: the node's inputs, outputs and output gradients; and helpers for writing rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.errors import GradientError
from xrt_core.frontends import ops
from xrt_core.frontends.promotion import INT64, is_float
from xrt_core.frontends.tensor import Tensor, literal, with_axes
from xrt_core.frontends.tracing import current_tracer
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.schema import find_schema
from xrt_core.ir.types import TensorType, dtype_name

Tensors = tuple[Tensor | None, ...]


class Forward:
    """A node of the forward graph, with its inputs as tensors of the graph under construction."""

    __slots__ = ("_given", "node")

    def __init__(self, node: Node, inputs: Tensors) -> None:
        self.node = node
        self._given = inputs

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The node's inputs; None for an omitted one."""
        return self._given

    def input(self, index: int) -> Any:
        """Return an input, or None if it is omitted or not listed."""
        return self._given[index] if index < len(self._given) else None

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the node, or `default`."""
        return self.node.attributes.get(name, default)

    @property
    def version(self) -> int:
        """`since_version` of the node's schema."""
        return self.node.version

    def data(self, index: int) -> np.ndarray | None:
        """Return the value of an input if it is known, else None."""
        v = self.node.inputs[index] if index < len(self.node.inputs) else None
        return current_tracer("a gradient").data_of(v)

    def known(self, index: int, what: str) -> np.ndarray:
        """Return the value of an input. Raises GradientError if it is not known."""
        found = self.data(index)
        if found is None:
            raise self.error(f"its input {index} ({what}) must be known; specialise the graph for a signature first")
        return found

    def error(self, why: str) -> GradientError:
        """Return a GradientError that names the node."""
        return GradientError(f"no gradient for {describe(self.node)}: {why}")

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the static shape of a tensor. Raises GradientError if it is not static."""
        if not x._value.is_static:
            raise self.error(f"the shape of {x.name!r} is {x.type}; specialise the graph for a signature first")
        return tuple(int(d) for d in x.shape)


class Backward(Forward):
    """A node in the backward pass.

    inputs, outputs: of the node, None if omitted. grads: gradient of the loss by each output, of its type; None if the
    loss does not depend on it. captures: of a node with subgraphs, the values of enclosing graphs whose gradients are
    needed; the rule returns them after those of the inputs. wanted: indices for which `wants` is True.
    """

    __slots__ = ("captures", "grads", "outputs", "wanted")

    def __init__(
        self,
        node: Node,
        inputs: Tensors,
        outputs: Tensors,
        grads: Tensors,
        wanted: frozenset[int],
        captures: tuple[Value, ...] = (),
    ) -> None:
        super().__init__(node, inputs)
        self.captures = captures
        self.outputs: tuple[Any, ...] = outputs
        self.grads = grads
        self.wanted = wanted

    def wants(self, index: int) -> bool:
        """Return whether the gradient by input `index` is needed."""
        return index in self.wanted

    @property
    def grad(self) -> Tensor:
        """The gradient by the first output. Raises GradientError if only other outputs have one."""
        found = self.grads[0]
        if found is None or any(g is not None for g in self.grads[1:]):
            which = [i for i, g in enumerate(self.grads) if g is not None]
            raise self.error(f"its rule covers output 0 alone, the loss depends on outputs {which}")
        return found


def describe(node: Node) -> str:
    """Describe a node for messages: its name, its operator and the user's line, if known."""
    source = node.annotations.source
    return f"node {node.name!r} ({node.operator}-{node.version})" + (f" from {source}" if source else "")


def dims(x: Tensor) -> Any:
    """Return the shape of a tensor: a tuple of integers if it is static, else an int64 tensor."""
    if x._value.is_static:
        return tuple(int(d) for d in x.shape)
    return ops.Shape(x)


def shape_tensor(x: Tensor) -> Tensor:
    """Return the shape of a tensor as an int64 tensor: a constant if it is static."""
    known = dims(x)
    return known if isinstance(known, Tensor) else literal(list(known), INT64)


def known_as(x: Tensor, like: Tensor) -> Tensor:
    """Return `x`, whose inferred type lacks dimensions, with the known shape of `like`, which it is known to equal."""
    value, shape = x._value, like._value.shape
    if value.data is None and not value.is_static and shape is not None:
        object.__setattr__(value, "type", TensorType(value.dtype, shape))  # no graph holds the value yet
    return x


def reshaped(x: Tensor, like: Tensor) -> Tensor:
    """Reshape `x` to the shape of `like`, which has as many elements."""
    if x._value.is_static and x.shape == like.shape:
        return x
    return known_as(x.reshape(dims(like)), like)


def expanded(x: Tensor, like: Tensor) -> Tensor:
    """Broadcast `x` to the shape of `like`."""
    if x._value.is_static and x.shape == like.shape:
        return x
    return known_as(ops.Expand(x, shape_tensor(like)), like)


def filled(like: Tensor, value: float = 0.0, dtype: Any = None) -> Tensor:
    """Return a tensor of the shape of `like`, filled with `value`."""
    dtype = like.dtype if dtype is None else dtype
    if like._value.is_static and math.prod(like.shape) == 1:
        return literal(np.full(like.shape, value), dtype)
    one = literal(value, dtype)
    return known_as(ops.Expand(one, shape_tensor(like)), like)


def reduced(x: Tensor, like: Tensor, node: Node | None = None) -> Tensor:
    """Sum `x` over the axes along which `like` was broadcast to it: the gradient of broadcasting.

    Raises GradientError if symbolic dimensions leave these axes undetermined.
    """
    lead = x.ndim - like.ndim
    over = list(range(lead))
    for i, d in enumerate(like.shape):
        have = x.shape[lead + i]
        if d == have and d is not None:
            continue
        if d == 1:
            over.append(lead + i)
        elif not isinstance(d, int):
            where = describe(node) if node is not None else repr(like)
            raise GradientError(
                f"no gradient for {where}: whether {like.type} was broadcast to {x.type} is not known; specialise the "
                "graph for a signature first"
            )
    if not over:
        return x
    kept = sum_over(x, over)
    return kept.squeeze(list(range(lead))) if lead else kept


def sum_over(x: Tensor, axes: Sequence[int], keepdims: bool = True) -> Tensor:
    """Return the sum over axes; `x` itself if there are none."""
    if not axes:
        return x
    return with_axes("ReduceSum", x, [int(a) for a in axes], keepdims=int(keepdims))


def mean_over(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the mean over axes (keepdims); `x` itself if there are none."""
    return with_axes("ReduceMean", x, [int(a) for a in axes], keepdims=1) if axes else x


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """`ops.Where`, of two tensors or a tensor and a number."""
    made: Tensor = ops.Where(condition, x, y)
    return made


def wide(x: Tensor) -> Tensor:
    """Convert a tensor to its computation dtype: float32 for narrower floats."""
    return x.astype(np.float32) if is_float(x.dtype) and x.dtype.itemsize < 4 else x


def emit(
    op_type: str,
    inputs: Sequence[Tensor | None],
    *,
    domain: str = "",
    opset: int = 1,
    outputs: int = 1,
    **attributes: Any,
) -> Any:
    """Append a node of an operator at opset `opset` or newer, independent of the graph's opset.

    For the dialect, and for the few operators whose older versions cannot express a gradient.
    """
    tracer = current_tracer(op_type)
    schema = tracer.schema(op_type, domain)
    if schema.since_version < opset:
        newer = find_schema(op_type, domain, opset)
        assert newer is not None
        schema = newer
    given = [None if x is None else x._value for x in inputs]
    made = [Tensor(v, tracer.scope) for v in tracer.emit(schema, given, attributes, outputs)]
    return made[0] if outputs == 1 else tuple(made)


def dialect(op_type: str, *inputs: Tensor, **attributes: Any) -> Tensor:
    """Append a node of the `xrt` dialect with one output."""
    made: Tensor = emit(op_type, inputs, domain="xrt", **attributes)
    return made


def check(node: Node, index: int, gradient: Tensor) -> None:
    """Raise GradientError unless the gradient that a rule returned for input `index` has that input's type."""
    value: Value | None = node.inputs[index]
    assert value is not None
    have, want = gradient.type, value.type
    if not isinstance(have, TensorType) or not isinstance(want, TensorType):
        return
    fits = have.dtype == want.dtype
    if have.shape is not None and want.shape is not None:
        fits = fits and len(have.shape) == len(want.shape) and all(
            a == b or not isinstance(a, int) or not isinstance(b, int)
            for a, b in zip(have.shape, want.shape, strict=True)
        )  # fmt: skip
    if not fits:
        name = dtype_name(want.dtype) if want.dtype is not None else "?"
        raise GradientError(
            f"the gradient rule of {node.operator} gave {have} for input {index} of {describe(node)}, which is {want}. "
            f"Rule author: reduce broadcast axes with `reduced`, and cast to {name}"
        )
