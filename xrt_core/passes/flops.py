"""Estimated floating-point operations of a node, from its types; for reports, not for decisions about correctness."""

from __future__ import annotations

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.types import Shape


def flops(node: Node) -> int:
    """Two per multiply-add of products and convolutions, one per element of what else computes, 0 where unknown.

    Depends on nothing but the operator, the types and, of the attributes, `transA`.
    """
    op = node.op_type
    out = _elements(node.outputs[0] if node.outputs else None)
    if op in ("MatMul", "MatMulInteger", "QLinearMatMul", "Gemm"):
        a = node.inputs[0]
        shape = a.shape if a is not None else None
        if not shape or not isinstance(shape[-1], int):
            return 0
        inner = shape[0] if op == "Gemm" and node.attributes.get("transA") else shape[-1]
        return 2 * out * inner if isinstance(inner, int) else 0
    if op in ("Conv", "ConvInteger", "QLinearConv"):
        weight = node.inputs[3 if op == "QLinearConv" else 1]
        shape = weight.shape if weight is not None else None
        return 2 * out * _product(shape[1:]) if shape else 0
    if op == "ConvTranspose":
        weight = node.inputs[1]
        shape = weight.shape if weight is not None else None
        return 2 * _elements(node.inputs[0]) * _product(shape[1:]) if shape else 0
    if op in ("LSTM", "GRU", "RNN"):
        steps = node.inputs[0].shape if node.inputs[0] is not None else None
        weights = sum(_elements(v) for v in node.inputs[1:3])
        return 2 * weights * _product(steps[:2]) if steps else 0
    traits = traits_of(node)
    if traits.moves_elements or traits.fills or traits.shape_query or traits.cast:
        return 0
    return max(out, _elements(node.inputs[0] if node.inputs else None))


def graph_flops(graph: Graph) -> int:
    """The sum over the graph's nodes; what stands inside subgraphs is not counted."""
    return sum(flops(n) for n in graph.nodes)


def _elements(v: Value | None) -> int:
    return _product(v.shape) if v is not None and v.shape is not None else 0


def _product(shape: Shape) -> int:
    found = 1
    for d in shape:
        if not isinstance(d, int):
            return 0
        found *= d
    return found
