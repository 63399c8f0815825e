"""SizeNodes: nodes that compute numbers which are expressions over the sizes of a graph's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.schema import since_version
from xrt_core.ir.symbols import Expr, Minimum, Quotient
from xrt_core.ir.types import DTYPE_TO_ONNX, Dim, TensorType
from xrt_core.passes.symbolic_elements import Elements

_INT64: Final = np.dtype(np.int64)
_OPSET: Final = 13
"""From which on Min takes int64, and Squeeze and others have their sizes as inputs."""


class SizeNodes:
    """The nodes so far, in their order. inputs: of the graph; dimensions that are a symbol's name give that symbol.
    opset: of the standard operators."""

    def __init__(self, inputs: Sequence[Value], opset: int) -> None:
        self.nodes: list[Node] = []
        self._opset = opset
        self._places: dict[str, tuple[Value, int]] = {}
        self._made: dict[Any, Value] = {}
        for v in inputs:
            for axis, d in enumerate(v.shape or ()):
                if isinstance(d, str):
                    self._places.setdefault(d, (v, axis))

    def value(self, like: Value, elements: Elements | None) -> Value | None:
        """A value of the type of `like` with these elements. None where one of them is not known, or has a symbol that
        is no dimension of an input."""
        t = like.type
        if elements is None or not elements.size or self._opset < _OPSET or not isinstance(t, TensorType):
            return None
        items = elements.reshape(-1).tolist()
        if t.dtype is None or t.shape != elements.shape or not all(isinstance(e, Expr) for e in items):
            return None
        if not all(self._places.keys() >= e.symbols for e in items):
            return None
        parts = [self._expression(e) for e in items]
        made = parts[0] if len(parts) == 1 else self._node("Concat", parts, (len(parts),), axis=0)
        if t.dtype != _INT64:
            made = self._node("Cast", [made], (len(parts),), t.dtype, to=DTYPE_TO_ONNX[t.dtype])
        if len(t.shape) != 1:
            made = self._node("Reshape", [made, Value.constant(np.array(t.shape, np.int64))], t.shape, t.dtype)
        return made

    def _expression(self, e: Expr) -> Value:
        """The value of an expression, of one element."""
        if e not in self._made:
            total: Value | None = None
            for factors, c in e.terms:
                term = None if factors and c == 1 else _constant(c)
                for f in factors:
                    term = self._atom(f) if term is None else self._node("Mul", [term, self._atom(f)])
                assert term is not None
                total = term if total is None else self._node("Add", [total, term])
            self._made[e] = _constant(0) if total is None else total
        return self._made[e]

    def _atom(self, atom: str | Quotient | Minimum) -> Value:
        if atom not in self._made:
            self._made[atom] = self._new_atom(atom)
        return self._made[atom]

    def _new_atom(self, atom: str | Quotient | Minimum) -> Value:
        if isinstance(atom, str):
            x, axis = self._places[atom]
            shape = self._made.get(x) or self._node("Shape", [x], (len(x.shape or ()),))
            self._made[x] = shape
            return self._node("Gather", [shape, _constant(axis)], axis=0)
        if isinstance(atom, Minimum):
            return self._node("Min", [self._expression(e) for e in atom.items])
        dividend, divisor = self._expression(atom.dividend), _constant(atom.divisor)
        least, _ = atom.dividend.bounds({})
        if least is None or least < 0:  # Div rounds towards 0
            dividend = self._node("Sub", [dividend, self._node("Mod", [dividend, divisor])])
        return self._node("Div", [dividend, divisor])

    def _node(
        self,
        op_type: str,
        inputs: Sequence[Value],
        shape: tuple[Dim, ...] = (1,),
        dtype: np.dtype = _INT64,
        **attributes: Any,
    ) -> Value:
        made = Value(f"size_{len(self.nodes)}", TensorType(dtype, shape))
        version = since_version(op_type, "", self._opset)
        self.nodes.append(Node(op_type, inputs, [made], attributes, version=version, name=made.name))
        return made


def _constant(number: int) -> Value:
    return Value.constant(np.array([number], np.int64))
