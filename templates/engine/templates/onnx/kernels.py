"""Which operators the toolkit takes: it has kernels of its own, and this is what XRT is told about them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from onnx import defs
from xrt_core.engine.contract import Phase, Support
from xrt_core.ir.graph import Node

# YOUR ENGINE: say no to everything that the toolkit cannot do, or does otherwise than ONNX says. A node that is refused
# runs on XRT's host; one that is taken by mistake costs a failed compilation of its whole cluster. The conformance kit
# (`tests/conformance`) finds what is claimed and wrong.
REFUSED: Final[Mapping[str, str]] = MappingProxyType({})
"""Operator -> why the toolkit does not take it."""


def supports(node: Node, phase: Phase) -> Support:
    """Whether the toolkit takes `node`, or why not."""
    if node.domain:
        return Support.no(f"{node.operator} is not an operator of ONNX's own domain")
    if node.subgraphs:
        return Support.no(f"{node.operator} has subgraphs; the toolkit gets flat graphs")
    if not defs.has(node.op_type, node.domain):
        return Support.no(f"ONNX has no operator {node.operator}")
    reason = REFUSED.get(node.op_type)
    return Support.yes() if reason is None else Support.no(reason)
