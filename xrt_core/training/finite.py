"""Where a NaN or an infinity came from: the nodes of a step run one by one until one makes the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.errors import ExecutionError
from xrt_core.frontends.promotion import is_float
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Value
from xrt_core.training.backward import describe


def not_finite(graph: Graph, arrays: Sequence[Any]) -> ExecutionError:
    """The error for a step whose loss is not finite: it names the first input, or node, that is not."""
    values: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
    bad = next((v.name for v in graph.inputs if not _is_finite(values[v])), None)
    if bad is not None:
        return _error(f"{bad!r} holds one already")
    for node in graph.nodes:
        given = [None if v is None else v.data if v.data is not None else values[v] for v in node.inputs]
        if node.subgraphs:  # bodies are not looked into
            return _error(f"all before {describe(node)} is finite: it came up in there, or later")
        for v, r in zip(node.outputs, run_node(node, given), strict=False):
            if v is None:
                continue
            values[v] = r
            if not _is_finite(r):
                shown = ", ".join("_" if u is None else f"{u.name or 'constant'} {_range(a)}"
                                  for u, a in zip(node.inputs, given, strict=True))  # fmt: skip
                return _error(f"it comes from {describe(node)}, whose inputs are {shown}")
    return _error("on the host all of it is finite, so the engine's own rounding made it")


def _error(why: str) -> ExecutionError:
    return ExecutionError(f"the loss is not finite: {why}. The state is as it was before the step")


def _is_finite(x: Any) -> bool:
    if not isinstance(x, np.ndarray) or not is_float(x.dtype):
        return True
    return bool(np.isfinite(x.astype(np.float32) if x.dtype.itemsize < 4 else x).all())


def _range(x: Any) -> str:
    if not isinstance(x, np.ndarray) or not x.size or x.dtype == object:
        return ""
    return f"in [{x.min()}, {x.max()}]"
