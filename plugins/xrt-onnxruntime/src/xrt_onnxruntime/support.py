"""Which nodes the library takes and computes as ONNX says."""

from __future__ import annotations

from typing import Final

from xrt_core.engine.onnx_bridge import SUB_BYTE, NodeTrials, why_not_within, why_unfit
from xrt_core.engine.onnx_versions import as_older
from xrt_core.ir.graph import Node
from xrt_core.ir.types import STRING, dtype_name
from xrt_onnxruntime import NATIVE, _toolkit
from xrt_onnxruntime.deviations import deviation

_TRIALS: Final = NodeTrials(
    "onnxruntime", lambda model: _toolkit.refusal(model.SerializeToString()), newest_opset=_toolkit.newest_opset()
)


def why_not(node: Node) -> str | None:
    """Why the library cannot take `node`, or does not compute what ONNX says; None where it can and does."""
    return (
        why_unfit(node, "onnxruntime", bodies=True)
        or _not_right(node)
        or why_not_within(node, _not_right)
        or _TRIALS.why_not(node)
    )


def _not_right(node: Node) -> str | None:
    """Why the library is not asked about `node`, or about what it is made of where it is too new for the library."""
    reason = _outside(node) or deviation(node)
    if reason is not None or node.version <= _toolkit.newest_opset() or node.domain:
        return reason
    made = as_older(node, _toolkit.newest_opset())
    if made is None:
        known = f"onnxruntime {_toolkit.version()} knows opsets up to {_toolkit.newest_opset()}"
        return f"{known}; {node.op_type}-{node.version} is newer, and has no older form"
    return next((why for n in made if (why := deviation(n)) is not None), None)


def _outside(node: Node) -> str | None:
    """Why the library is not even asked, or None."""
    for what, values in (("input", node.inputs), ("output", node.outputs)):
        for v in values:
            if v is None or (dtype := v.dtype) is None:
                continue
            if dtype == STRING or (v.data is None and dtype.kind == "V" and dtype.name in SUB_BYTE):
                name = dtype_name(dtype)
                return f"{what} {v.name!r} of {node.operator} is {name}; onnxruntime gets numbers of a byte or more"
    if node.domain not in ("", "ai.onnx.ml") and node.operator not in NATIVE:
        return f"{node.operator} is of no domain that onnxruntime's CPU kernels are for"
    return None
