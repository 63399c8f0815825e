"""Which nodes the library takes and computes as ONNX says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xrt_core.engine.onnx_bridge import SUB_BYTE, NodeTrials, is_open, is_symbolic, why_not_within, why_unfit
from xrt_core.engine.onnx_versions import as_older
from xrt_core.ir.graph import Node
from xrt_core.ir.long_list import LongList
from xrt_core.ir.types import STRING, dtype_name
from xrt_onnxruntime import NATIVE, _toolkit
from xrt_onnxruntime.deviations import deviation

if TYPE_CHECKING:
    from onnx import ModelProto



def _refusal(model: ModelProto) -> str | None:
    return _toolkit.refusal(model.SerializeToString())


_TRIALS: Final = NodeTrials("onnxruntime", _refusal, newest_opset=_toolkit.newest_opset())
_OLDER: Final = NodeTrials("onnxruntime", _refusal, newest_opset=_toolkit.settled_opset())

_MANY: Final = 10_000
"""Rows from which on an ensemble's tables are abridged for a trial."""


def why_not(node: Node, on_cpu: bool = True) -> str | None:
    """Why the library cannot take `node`, or does not compute what ONNX says; None where it can and does.

    on_cpu: whether it is asked for the CPU, for which alone sessions of symbolic shapes are made.
    """
    return (
        why_unfit(node, "onnxruntime", bodies=True, symbolic=on_cpu, open_shapes="any" if on_cpu else "none")
        or _why_not_symbolic(node)
        or _not_right(node)
        or why_not_within(node, _not_right)
        or _refused(_abridged(node))
    )


def _refused(node: Node) -> str | None:
    """Why the library refuses the node in the version that it is compiled in: the one that there are kernels for, if it
    has such a form."""
    settled = _toolkit.settled_opset()
    is_newer = not node.domain and node.version > settled
    return (_OLDER if is_newer and as_older(node, settled) is not None else _TRIALS).why_not(node)


def _abridged(node: Node) -> Node:
    """A large ensemble with its first tree alone: what the library takes does not depend on how many there are."""
    trees = node.attributes.get("nodes_treeids")
    if not isinstance(trees, tuple | LongList) or len(trees) < _MANY:
        return node
    attributes = dict(node.attributes)
    for rows, ids in ((k, v) for k, v in node.attributes.items() if k.endswith("_treeids")):
        rows_of_all = ids.array if isinstance(ids, LongList) else np.array(ids)
        kept = np.flatnonzero(rows_of_all == trees[0])
        table = rows.partition("_")[0] + "_"
        for name, values in node.attributes.items():
            is_list = isinstance(values, tuple | LongList | np.ndarray)
            if name.startswith(table) and is_list and len(values) == len(rows_of_all):  # type: ignore[arg-type]
                attributes[name] = _selected(values, kept)
    return node.replace(attributes=attributes)


def _selected(values: Any, kept: np.ndarray) -> Any:
    if isinstance(values, LongList):
        return values.select(kept)
    return values[kept] if isinstance(values, np.ndarray) else tuple(values[i] for i in kept.tolist())


def _why_not_symbolic(node: Node) -> str | None:
    if not (is_symbolic(node) or is_open(node)):
        return None
    for v in (*node.inputs, *node.outputs):
        if v is not None and v.dtype is not None and not _toolkit.is_native(v.dtype):
            return f"results of {dtype_name(v.dtype)} are written to memory of a known size, and {v.name!r} is {v.type}"
    return None


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
