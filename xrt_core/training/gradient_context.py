"""What a gradient rule is told about its node: inputs, outputs, the gradients that arrive; and small conversions."""

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
        """The node's inputs; None stands for one that is left out."""
        return self._given

    def input(self, index: int) -> Any:
        """An input, or None where it is left out or not listed."""
        return self._given[index] if index < len(self._given) else None

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute of the node, or `default`."""
        return self.node.attributes.get(name, default)

    @property
    def version(self) -> int:
        """`since_version` of the node's schema."""
        return self.node.version

    def data(self, index: int) -> np.ndarray | None:
        """The value of an input where it is known, else None."""
        v = self.node.inputs[index] if index < len(self.node.inputs) else None
        return current_tracer("a gradient").data_of(v)

    def known(self, index: int, what: str) -> np.ndarray:
        """The value of an input that must be known. Raises GradientError."""
        found = self.data(index)
        if found is None:
            raise self.error(f"its input {index} ({what}) must be known; specialise the graph for a signature first")
        return found

    def error(self, why: str) -> GradientError:
        """A GradientError that names the node."""
        return GradientError(f"no gradient for {describe(self.node)}: {why}")

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """The static shape of a tensor. Raises GradientError where it is not known."""
        if not x._value.is_static:
            raise self.error(f"the shape of {x.name!r} is {x.type}; specialise the graph for a signature first")
        return tuple(int(d) for d in x.shape)  # type: ignore[arg-type]


class Backward(Forward):
    """A node on the way back from the loss.

    inputs, outputs: of the node, None where left out. grads: gradient of the loss by each output, of its type; None
    where the loss does not depend on it. captures: of a node with subgraphs, the values of the graph around it whose
    gradients are needed; the rule gives them after those of the inputs. wanted: indices for which `wants` is True.
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
        """Whether the gradient by input `index` is needed."""
        return index in self.wanted

    @property
    def grad(self) -> Tensor:
        """The gradient by the first output. Raises GradientError where only other outputs have one."""
        found = self.grads[0]
        if found is None or any(g is not None for g in self.grads[1:]):
            which = [i for i, g in enumerate(self.grads) if g is not None]
            raise self.error(f"its rule covers output 0 alone, the loss depends on outputs {which}")
        return found


def describe(node: Node) -> str:
    """A node for messages: its name, its operator and the user's line, where known."""
    source = node.annotations.source
    return f"node {node.name!r} ({node.operator}-{node.version})" + (f" from {source}" if source else "")


def dims(x: Tensor) -> Any:
    """The shape of a tensor, as a tuple of integers where it is static, else as a tensor of int64."""
    if x._value.is_static:
        return tuple(int(d) for d in x.shape)  # type: ignore[arg-type]
    return ops.Shape(x)


def shape_tensor(x: Tensor) -> Tensor:
    """The shape of a tensor as a tensor of int64: a constant where it is static."""
    known = dims(x)
    return known if isinstance(known, Tensor) else literal(list(known), INT64)


def known_as(x: Tensor, like: Tensor) -> Tensor:
    """`x`, of which only the trace knows too little, with the shape that `like` is known to have."""
    value, shape = x._value, like._value.shape
    if value.data is None and not value.is_static and shape is not None:
        object.__setattr__(value, "type", TensorType(value.dtype, shape))  # no graph holds the value yet
    return x


def reshaped(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the shape of `like`, which has as many elements."""
    if x._value.is_static and x.shape == like.shape:
        return x
    return known_as(x.reshape(dims(like)), like)


def expanded(x: Tensor, like: Tensor) -> Tensor:
    """`x` broadcast to the shape of `like`."""
    if x._value.is_static and x.shape == like.shape:
        return x
    return known_as(ops.Expand(x, shape_tensor(like)), like)


def filled(like: Tensor, value: float = 0.0, dtype: Any = None) -> Tensor:
    """A tensor of the shape of `like`, of one value."""
    dtype = like.dtype if dtype is None else dtype
    if like._value.is_static and math.prod(like.shape) == 1:  # type: ignore[arg-type]
        return literal(np.full(like.shape, value), dtype)
    one = literal(value, dtype)
    return known_as(ops.Expand(one, shape_tensor(like)), like)


def reduced(x: Tensor, like: Tensor, node: Node | None = None) -> Tensor:
    """`x` summed over the axes along which `like` was broadcast to it: the way back of broadcasting.

    Raises GradientError where symbolic dimensions leave open which axes these are.
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
    """The sum over axes; `x` itself where there are none."""
    if not axes:
        return x
    return with_axes("ReduceSum", x, [int(a) for a in axes], keepdims=int(keepdims))


def mean_over(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The mean over axes, which are kept; `x` itself where there are none."""
    return with_axes("ReduceMean", x, [int(a) for a in axes], keepdims=1) if axes else x


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """`ops.Where`, of two tensors or a tensor and a number."""
    made: Tensor = ops.Where(condition, x, y)
    return made


def wide(x: Tensor) -> Tensor:
    """The tensor in the dtype to compute in: float32 for narrower floats."""
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
    """Append a node of an operator as of opset `opset` at least, whatever the graph's opset is.

    For the dialect, and for the few operators whose older versions cannot say what a gradient needs.
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
    """Append a node of the `xrt` dialect, of one output."""
    made: Tensor = emit(op_type, inputs, domain="xrt", **attributes)
    return made


def check(node: Node, index: int, gradient: Tensor) -> None:
    """Hold the gradient that a rule gave for input `index` against that input's type. Raises GradientError."""
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
