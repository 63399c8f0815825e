"""Padding with proof: a graph for sizes that vary, as a graph for one fixed size of each, its bucket.

`pad_graph` walks a graph whose inputs have symbolic dimensions and builds its padded form: inputs and outputs have the
bucket's sizes, and the valid sizes are int64 scalar inputs. What lies behind the valid size of an axis is padding. For
each operator a rule (`rules`) shows that padding cannot reach what is valid, or makes it so by a mask: the
identity of a reduction, minus infinity before a softmax, zero on contracted axes. What no rule covers is refused.

positions.py: indices that count all positions, whose lookups are views. resizing.py: Resize. rows.py: rows that do not
mix, which are divided instead.

The invariant of the walk: for every value and all sizes up to the bucket's, the elements at valid places are those
that the original graph computes for these sizes; nothing holds of the others, but what `Padded` says.

The rules follow the operator specification of ONNX, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xrt_core.ir.graph import Graph
from xrt_core.ir.types import Dim
from xrt_core.passes.padding.form import PaddedGraph, PaddingRefused
from xrt_core.passes.padding.rules import apply_rule
from xrt_core.passes.padding.walk import Body, Padder

__all__ = ["PaddedGraph", "PaddingRefused", "pad_graph"]


def pad_graph(
    graph: Graph,
    shapes: Sequence[Sequence[Dim] | None],
    buckets: Mapping[str, int],
    *,
    zero_filled: bool = True,
    body_of: Body | None = None,
) -> PaddedGraph:
    """The padded form of a graph whose inputs have these shapes, for these sizes of the buckets.

    shapes: per input; a dimension is a size, a symbol's name or an expression of symbols. Dimensions of one symbol are
    equal at every call. buckets: symbol -> size, at least 1. zero_filled: the padding of the inputs is zero (as
    `PaddedGraph.pad` leaves it); else nothing is assumed of it. body_of: the graph that a node with typed inputs stands
    for, or None: what is walked in the place of an operator without a rule.

    Raises PaddingRefused where padding might reach a result, naming the node.
    """
    return Padder(graph, shapes, buckets, zero_filled, body_of=body_of).run(apply_rule)
