"""Lowerings: functions from the inputs of a node to its outputs, written with the operators of the standard.

    @lowering("QuickGelu")
    def quick_gelu(n, x):
        return x * ops.Sigmoid(x * n.attr("alpha"))

A lowering is given the `Call` and one tensor per input that the schema has, None for those left out. It returns a
tensor, or a tuple with one for each output of the schema, None for those that nobody wants. Types of the outputs are
those of what the lowering records, so no operator has an inference function of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

import xrt_core as xrt
from xrt_contrib.schemas import DOMAIN, Definition, definitions
from xrt_core import ops
from xrt_core.errors import ShapeError, TraceError, UnsupportedError, XRTError
from xrt_core.ir.graph import Graph, Node
from xrt_core.ir.schema import schema_type
from xrt_core.ir.symbols import expression
from xrt_core.ir.types import SequenceType, TensorType, ValueType

OPSET: Final = 21
"""The opset that lowerings are written in; engines' libraries of a few years know it."""

Function = Callable[..., Any]
LOWERINGS: Final[dict[tuple[str, str], Function]] = {}
"""(domain, operator) -> its lowering."""

STATIC: Final[dict[tuple[str, str], tuple[int, ...]]] = {}
"""(domain, operator) -> indices of the inputs whose values its lowering must know."""

_TYPES: Final[dict[tuple[str, str], Callable[..., Any]]] = {}


class Call:
    """A node while it is lowered."""

    __slots__ = ("definition", "node")

    def __init__(self, node: Node, definition: Definition) -> None:
        self.node = node
        self.definition = definition

    def attr(self, name: str, default: Any = None) -> Any:
        """The node's attribute, else the schema's default, else `default`."""
        if name not in self.definition.attributes:
            raise KeyError(f"{self.definition.name} has no attribute {name}")
        return self.node.attributes.get(name, self.definition.defaults.get(name, default))

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the attributes that the node sets."""
        return {k: v for k in names if (v := self.node.attributes.get(k)) is not None}

    def data(self, index: int) -> np.ndarray | None:
        """The value of an input that is known, else None."""
        v = self.node.inputs[index] if index < len(self.node.inputs) else None
        return None if v is None else v.data

    def known(self, index: int) -> np.ndarray:
        """The value of an input; where it is not known the node is left until it is."""
        found = self.data(index)
        if found is None:
            raise NotYet(f"the value of {self.definition.inputs[index].name} must be known")
        return found

    def wants(self, index: int) -> bool:
        """Whether output `index` is used."""
        return index < len(self.node.outputs) and self.node.outputs[index] is not None

    def refuse(self, why: str) -> UnsupportedError:
        """The error for what this package does not lower."""
        return UnsupportedError(f"node {self.node.name!r} ({self.node.operator}): {why}")

    def misfit(self, why: str) -> ShapeError:
        """The error for attributes and inputs that do not go together."""
        return ShapeError(f"node {self.node.name!r} ({self.node.operator}): {why}")

    def check(self, condition: bool, why: str) -> None:
        """Raise `misfit` unless the condition holds."""
        if not condition:
            raise self.misfit(why)


_COUNTS: Final = frozenset(("K", "N", "block_size", "kv_num_heads", "num_heads", "sparse_block_size"))
"""Attributes that count something, where an operator requires them."""


def check_counts(n: Call) -> None:
    """Raise `misfit` for a required count that is not positive."""
    for name, value in n.node.attributes.items():
        if name in _COUNTS and n.definition.attributes[name].required:
            n.check(isinstance(value, int) and value > 0, f"{name} = {value}; it must be at least 1")


class NotYet(XRTError):
    """A lowering needs a shape or a value that is known when the node runs."""


def difference(a: Any, b: Any) -> int:
    """By how much a size exceeds another one. Raises NotYet where that depends on the call."""
    x, y = (expression(size if isinstance(size, int) else size.dim) for size in (a, b))
    found = None if x is None or y is None else (x - y).constant
    if found is None:
        raise NotYet(f"how the sizes {a!r} and {b!r} differ must be known")
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal in every call. Raises NotYet where that depends on the call."""
    return difference(a, b) == 0


def count_up(size: Any, dtype: Any = np.int64) -> Any:
    """0, 1, 2, ... as many as a size says."""
    if isinstance(size, int):
        return np.arange(size, dtype=dtype)
    return ops.Range(np.array(0, np.int64), size, np.array(1, np.int64)).astype(dtype)


def lowering(
    *names: str,
    domain: str = DOMAIN,
    static: tuple[int, ...] = (),
    types: Callable[[Call], tuple[ValueType | None, ...]] | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function as the lowering of these operators.

    static: indices of inputs whose values must be known, and decide on shapes. types: of the outputs, where recording
    the lowering for them alone would take long.
    """

    def register(function: Function) -> Function:
        for name in names:
            assert (domain, name) not in LOWERINGS, name
            LOWERINGS[domain, name] = function
            STATIC[domain, name] = static
            if types is not None:
                _TYPES[domain, name] = types
        return function

    return register


class _Body(xrt.Graph):  # type: ignore[misc]
    """What a node is lowered to."""

    opset = OPSET

    def build(self, *given: Any) -> Any:
        node, definition, function = self.of
        tensors = iter(given)
        inputs = [None if v is None else next(tensors) for v in node.inputs]
        most = len(definition.inputs)
        variadic = bool(definition.inputs) and definition.inputs[-1].option == "*"
        if not variadic:
            inputs += [None] * (most - len(inputs))
        call = Call(node, definition)
        check_counts(call)
        result = function(call, *inputs)
        results = result if isinstance(result, tuple) else (result,)
        wanted = []
        for i, v in enumerate(node.outputs):
            if v is not None:
                if i >= len(results) or results[i] is None:
                    raise UnsupportedError(
                        f"node {node.name!r} ({node.operator}): its output {definition.outputs[i].name} is not lowered"
                    )
                wanted.append(results[i])
        return tuple(wanted)


def body_of(node: Node) -> Graph | None:
    """What a node is lowered to, None while a type or value that its lowering needs is not known."""
    try:
        return _traced(node)
    except NotYet:
        return None
    except TraceError:
        if all(v is None or not isinstance(v.type, TensorType) or v.type.is_static for v in node.inputs):
            raise
        return None  # it decides by the number of a size that differs between calls


def _is_known(t: ValueType | None) -> bool:
    """Whether a lowering can be recorded for an input of this type: its sizes are numbers or expressions of symbols."""
    if isinstance(t, TensorType):
        return t.dtype is not None and t.shape is not None and None not in t.shape
    return isinstance(t, SequenceType)


def _traced(node: Node) -> Graph:
    given = [v for v in node.inputs if v is not None]
    for v in given:
        if not _is_known(v.type):
            raise NotYet(f"the type of {v.name!r} is {v.type or 'not known'}")
    body = _Body()
    body.of = (node, definitions(node.domain)[node.op_type], LOWERINGS[node.domain, node.op_type])
    return xrt.trace(body, *(v.type for v in given))


def output_types(node: Node) -> tuple[ValueType | None, ...]:
    """Types of a node's outputs: those of its lowering's results, else the dtypes that the schema tells."""
    short = _TYPES.get((node.domain, node.op_type))
    if short is not None:
        found: tuple[ValueType | None, ...] = short(Call(node, definitions(node.domain)[node.op_type]))
        return found
    body = body_of(node)
    if body is None:
        return dtypes_alone(node)
    types = iter([v.type for v in body.outputs])
    return tuple(None if v is None else next(types) for v in node.outputs)


def dtypes_alone(node: Node) -> tuple[ValueType | None, ...]:
    """The types without shapes that follow from the schema's type variables."""
    definition = definitions(node.domain)[node.op_type]
    bound: dict[str, ValueType] = {}
    for formal, v in zip(definition.inputs, node.inputs, strict=False):
        if v is not None and isinstance(v.type, TensorType) and v.type.dtype is not None:
            bound.setdefault(formal.type, TensorType(v.type.dtype))
    found: list[ValueType | None] = []
    for i, out in enumerate(node.outputs):
        formal = definition.outputs[min(i, len(definition.outputs) - 1)]
        allowed = definition.types.get(formal.type, (formal.type,))
        only = schema_type(allowed[0]) if len(allowed) == 1 else None
        found.append(None if out is None else bound.get(formal.type, only))
    return tuple(found)
