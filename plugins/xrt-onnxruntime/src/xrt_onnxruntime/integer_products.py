"""Products of matrices of 8-bit integers, in the forms that the library has quick and exact kernels for.

Where DequantizeLinear gives both matrices, and the result is not quantised as well, as in models that are quantised for
TensorRT, the library dequantises the weights in each call and multiplies floats: BERT with 72 such products took 490 ms
on two cores with AVX2, as products of integers 140, and in float32 194.

The kernels for a first matrix of int8 are slow: 256 x 512 x 512 takes 3.6 ms on such a machine, with uint8 0.6. And
where kernels are asked for that do not saturate, the library makes uint8 of constant weights, and then has none for
QLinearConv and QLinearMatMul of int8.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType

_INT8, _UINT8, _INT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
_FLOAT: Final = np.dtype(np.float32)
_DEPTH: Final = 1 << 15
"""Of products of 255 and 255, of which the sum stays within int32."""
_OFFSET: Final = 128
"""Between an int8 and the uint8 of the same place in its range."""
_REQUANTISED: Final = ("QLinearConv", "QLinearMatMul")
"""Inputs: x, its scale and zero point, the weights and theirs, and the scale and zero point of the result."""


class _Factor(NamedTuple):
    """(integers - zero) * scale. scale: one, or one for each column."""

    integers: Value
    scale: np.ndarray
    zero: int


def with_integer_products(function: Function) -> Function:
    """`function` with MatMulInteger in the place of MatMul of two dequantised matrices, where no QuantizeLinear reads
    the result, and with uint8 in the place of int8 in what MatMulInteger, QLinearMatMul and QLinearConv multiply but
    for constants, and in the results of the latter, whose weights have to be constants around 0; itself where there is
    none of them. The sums are exact in int32, and scaled once.

    A second matrix of int8 saturates on processors without VNNI, unless it is constant.
    """
    graph = function.body
    made = _Rewriting(graph)
    nodes = [new for node in graph.nodes for new in made.rewritten(node)]
    if not made.found:
        return function
    body = _without_unread(graph.replace(nodes=nodes), made.read_before)
    return Function(function.name, function.params, function.returns, body, function.aliases)


class _Rewriting:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.found = False
        self._unsigned: dict[Value, Value] = {}
        self.read_before: set[Node] = set()
        """Nodes that perhaps nothing reads any more."""

    def rewritten(self, node: Node) -> list[Node]:
        """What takes the place of a node: itself, for most."""
        if node.domain or node.outputs[0] is None:
            return [node]
        if node.op_type == "MatMulInteger":
            return self._of_unsigned(node)
        if node.op_type in _REQUANTISED:
            return self._to_unsigned(node)
        if node.op_type == "DequantizeLinear":
            return [self._of_result(node)]
        if node.op_type != "MatMul" or node.outputs[0].dtype != _FLOAT:
            return [node]
        a, b = (self._factor(v) for v in node.inputs)
        if a is None or b is None or a.scale.ndim or not _is_small(a.integers, b.integers):
            return [node]
        if any(self._graph.nodes[i].op_type == "QuantizeLinear" for i in self._readers(node.outputs[0])):
            return [node]
        self.read_before |= {n for v in node.inputs if v is not None and (n := self._graph.producer(v)) is not None}
        product, *rest = _product(node, a, b)
        self.found = True
        return [*self._of_unsigned(product), *rest]

    def _of_unsigned(self, node: Node) -> list[Node]:
        """A MatMulInteger, and what makes uint8 of its matrices of int8; of constants, and of those whose zero point
        is computed, nothing is made."""
        nodes: list[Node] = []
        inputs = [*node.inputs, None, None][:4]
        for k in (0, 1):
            x, zero = inputs[k], inputs[k + 2]
            if x is None or x.dtype != _INT8 or x.data is not None or (zero is not None and zero.data is None):
                continue
            inputs[k] = self._as_unsigned(x, nodes)
            before = np.zeros((), np.int8) if zero is None else zero.data
            inputs[k + 2] = _shifted(f"{x.name}_zero_point", before)
        if not nodes and inputs[:2] == list(node.inputs[:2]):
            return [node]
        self.found = True
        return [*nodes, node.replace(inputs=inputs)]

    def _to_unsigned(self, node: Node) -> list[Node]:
        """A QLinearConv or QLinearMatMul of int8 and constant weights around 0 as one of uint8, and what makes int8 of
        its result. Of other weights the library makes no uint8 where it is asked not to saturate."""
        x, _, zero, weights, _, centre = (inputs := list(node.inputs))[:6]
        before, result = inputs[7], node.outputs[0]
        if x is None or zero is None or before is None or result is None or weights is None or weights.data is None:
            return [node]
        if centre is None or centre.data is None or centre.data.any():
            return [node]
        if {x.dtype, result.dtype} != {_INT8} or x.data is not None or zero.data is None or before.data is None:
            return [node]
        nodes: list[Node] = []
        inputs[0] = self._as_unsigned(x, nodes)
        inputs[2] = _shifted(f"{result.name}_x_zero_point", zero.data)
        inputs[7] = _shifted(f"{result.name}_y_zero_point", before.data)
        self._unsigned[result] = made = Value(f"{result.name}_unsigned", TensorType(_UINT8, result.shape))
        signed = Value(f"{result.name}_signed", result.type)
        sign = Value(f"{result.name}_sign", data=np.array(-_OFFSET, np.int8))
        back = [
            Node("Cast", [made], [signed], {"to": 3}, version=13),
            Node("BitwiseXor", [signed, sign], [result], version=18),
        ]
        self.read_before.update(back)
        self.found = True
        return [*nodes, node.replace(inputs=inputs, outputs=[made]), *back]

    def _of_result(self, node: Node) -> Node:
        """A DequantizeLinear of what `_to_unsigned` gave: of the uint8."""
        x, scale, *rest = node.inputs
        made = None if x is None else self._unsigned.get(x)
        zero = rest[0] if rest else None
        result = node.outputs[0]
        if made is None or scale is None or scale.shape is None or (zero is not None and zero.data is None):
            return node
        if zero is None and not all(isinstance(n, int) for n in scale.shape):
            return node
        self.found = True
        before = np.zeros(scale.shape, np.int8) if zero is None else zero.data  # type: ignore[arg-type]
        assert result is not None
        return node.replace(inputs=[made, scale, _shifted(f"{result.name}_x_zero_point", before)])

    def _readers(self, value: Value) -> Any:
        return self._graph.consumers.get(value, ())

    def _factor(self, value: Value | None) -> _Factor | None:
        """What a DequantizeLinear of 8-bit integers to float32 gives; None for other values."""
        node = None if value is None else self._graph.producer(value)
        if node is None or node.op_type != "DequantizeLinear" or node.domain or node.attributes.get("block_size", 0):
            return None
        x, scale, *rest = node.inputs
        zero = rest[0] if rest else None
        if x is None or x.dtype not in (_INT8, _UINT8) or x.shape is None or len(x.shape) < 2:
            return None
        if scale is None or scale.data is None or scale.data.dtype != _FLOAT:
            return None
        if zero is not None and zero.data is None:
            return None
        zeros = np.zeros((), np.int64) if zero is None or zero.data is None else zero.data.astype(np.int64)
        if zeros.size != 1 and zeros.any():
            return None
        by_column = node.attributes.get("axis", 1) in (-1, len(x.shape) - 1)
        if scale.data.size != 1 and not (scale.data.ndim == 1 and by_column):
            return None
        factors = scale.data.reshape(()) if scale.data.size == 1 else scale.data
        return _Factor(x, factors, int(zeros.reshape(-1)[0]) if zeros.size else 0)

    def _as_unsigned(self, value: Value, nodes: list[Node]) -> Value:
        """The int8 as uint8, 128 higher; what makes it is added to `nodes`, once for all products."""
        made = self._unsigned.get(value)
        if made is not None:
            return made
        self._unsigned[value] = made = Value(f"{value.name}_unsigned", TensorType(_UINT8, value.shape))
        producer = self._graph.producer(value)
        if producer is not None and (zero := _zero_of_quantised(producer)) is not None:
            inputs = [*producer.inputs[:2], _shifted(f"{made.name}_zero", zero)]
            nodes.append(producer.replace(inputs=inputs, outputs=[made]))
            self.read_before.add(producer)
            return made
        flipped = Value(f"{value.name}_flipped", value.type)
        sign = Value(f"{value.name}_sign", data=np.array(-_OFFSET, np.int8))
        nodes.append(Node("BitwiseXor", [value, sign], [flipped], version=18))
        nodes.append(Node("Cast", [flipped], [made], {"to": 2}, version=13))
        return made


def _zero_of_quantised(node: Node) -> np.ndarray | None:
    """The zero point of a QuantizeLinear that may quantise to uint8 as well; None for other nodes."""
    if node.op_type != "QuantizeLinear" or node.domain or len(node.inputs) < 3:
        return None
    zero = node.inputs[2]
    return None if zero is None or set(node.attributes) - {"axis", "saturate"} else zero.data


def _shifted(name: str, zero: np.ndarray | None) -> Value:
    """A zero point of int8 as one of uint8."""
    assert zero is not None
    return Value(name, data=(zero.astype(np.int64) + _OFFSET).astype(np.uint8))


def _is_small(a: Value, b: Value) -> bool:
    """Whether sums stay within int32."""
    assert a.shape is not None
    assert b.shape is not None
    depths = [n for n in (a.shape[-1], b.shape[-2]) if isinstance(n, int)]
    return bool(depths) and max(depths) <= _DEPTH


def _product(node: Node, a: _Factor, b: _Factor) -> list[Node]:
    result = node.outputs[0]
    assert result is not None
    shape = result.shape if isinstance(result.type, TensorType) else None
    total = Value(f"{result.name}_total", TensorType(_INT32, shape))
    floats = Value(f"{result.name}_floats", TensorType(_FLOAT, shape))
    zeros = [Value(f"{result.name}_zero_{k}", data=np.array(f.zero, f.integers.dtype)) for k, f in enumerate((a, b))]
    factors = Value(f"{result.name}_scale", data=np.asarray(a.scale * b.scale, _FLOAT))
    return [
        Node("MatMulInteger", [a.integers, b.integers, *zeros], [total], version=10, name=node.name),
        Node("Cast", [total], [floats], {"to": 1}, version=13),
        Node("Mul", [floats, factors], [result], version=14),
    ]


def _without_unread(graph: Graph, suspects: set[Node]) -> Graph:
    """The graph without those of these nodes that nothing reads any more."""
    while True:
        kept = [n for n in graph.nodes if n not in suspects or _is_read(graph, n)]
        if len(kept) == len(graph.nodes):
            return graph
        graph = graph.replace(nodes=kept)


def _is_read(graph: Graph, node: Node) -> bool:
    return any(v is not None and (v in graph.outputs or v in graph.consumers) for v in node.outputs)
