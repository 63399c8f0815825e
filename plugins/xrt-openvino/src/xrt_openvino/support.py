"""Which nodes the library takes and computes as ONNX says."""

from __future__ import annotations

from typing import Final

from xrt_core.engine.onnx_bridge import NodeTrials, why_not_within, why_unfit
from xrt_core.ir.graph import Node
from xrt_openvino import _toolkit
from xrt_openvino.deviations import NEWEST, deviation

_TRIALS: Final = NodeTrials("openvino", lambda model: _toolkit.refusal(model.SerializeToString()), newest_opset=NEWEST)


def why_not(node: Node) -> str | None:
    """Why the library cannot take `node`, or does not compute what ONNX says; None where it can and does."""
    return (
        why_unfit(node, "openvino", bodies=True, symbolic=True)
        or _outside(node)
        or deviation(node)
        or why_not_within(node, lambda n: why_unfit(n, "openvino", bodies=True) or _outside(n) or deviation(n))
        or _TRIALS.why_not(node)
    )


def _outside(node: Node) -> str | None:
    """Why the library is not even asked, or None."""
    for what, values in (("input", node.inputs), ("output", node.outputs)):
        for v in values:
            if v is not None and v.shape is not None and 0 in v.shape and (v.data is None or what == "output"):
                return f"{what} {v.name!r} of {node.operator} is {v.type}: an empty tensor is left to the host"
    if node.domain:
        return f"{node.operator} is not of the ONNX domain, which is the one openvino is asked about"
    return None
