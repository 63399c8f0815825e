"""Which operators the toolkit takes: it has kernels of its own, and this is what XRT is told about them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from onnx import defs
from xrt_core.engine.contract import Phase, Support
from xrt_core.ir.graph import Node
from xrt_core.ir.types import dtype_name


class Gap(NamedTuple):
    """What the toolkit does not do. reason: a clause that follows the operator's name. dtypes: where; empty: always."""

    reason: str
    dtypes: tuple[str, ...] = ()


_SINGLE: Final = Gap("is computed in float32", ("float64",))
_INTEGERS: Final = ("int32", "int64", "uint32", "uint64")

# YOUR ENGINE: say no to everything that the toolkit cannot do, or does otherwise than ONNX says. A node that is refused
# runs on XRT's host; one that is taken by mistake costs a failed run of its whole cluster. The conformance kit finds
# what is claimed and wrong: `nox -s scorecard` runs all of it. These are the gaps of ONNX's reference implementation.
GAPS: Final[Mapping[str, Gap]] = MappingProxyType(
    {
        "Det": Gap("is not computed", ("float16",)),
        "Erf": _SINGLE,
        "GatherElements": Gap("takes no indices that are fewer than the data"),
        "Gelu": _SINGLE,
        "Gemm": Gap("rounds its factors to integers", _INTEGERS),
        "GroupNormalization": _SINGLE,
        "HardSigmoid": _SINGLE,
        "HardSwish": _SINGLE,
        "ImageDecoder": Gap("needs Pillow, which is not among the requirements"),
        "LeakyRelu": _SINGLE,
        "Mean": Gap("does not broadcast"),
        "OneHot": Gap("is not computed", ("bool",)),
        "ReduceLogSum": Gap("takes no integers", _INTEGERS),
        "ReduceLogSumExp": Gap("takes neither scalars nor integers"),
        "ReduceSumSquare": Gap("gives 64 bits", ("int32", "uint32")),
        "Scatter": Gap("is deprecated, and not there"),
        "Softsign": Gap("takes no scalars"),
    }
)


def supports(node: Node, phase: Phase) -> Support:
    """Whether the toolkit takes `node`, or why not."""
    if node.domain:
        return Support.no(f"{node.operator} is not an operator of ONNX's own domain")
    if node.subgraphs:
        return Support.no(f"{node.operator} has subgraphs; the toolkit gets flat graphs")
    if not defs.has(node.op_type, node.domain):
        return Support.no(f"ONNX has no operator {node.operator}")
    gap = GAPS.get(node.op_type)
    if gap is None:
        return Support.yes()
    if not gap.dtypes:
        return Support.no(f"{node.operator} of the toolkit {gap.reason}")
    for value in node.inputs:
        if value is not None and value.dtype is not None and dtype_name(value.dtype) in gap.dtypes:
            return Support.no(f"{node.operator} of the toolkit {gap.reason} for {dtype_name(value.dtype)}")
    return Support.yes()
