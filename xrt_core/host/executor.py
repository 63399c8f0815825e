"""The host: any node, in any graph, always; portable kernels first, `onnx.reference` for the long tail."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import ExecutionError, XRTError
from xrt_core.host.reference import reference_kernel
from xrt_core.ir.graph import Node
from xrt_core.ir.types import STRING, TensorType
from xrt_core.kernels import OpContext, find_kernel

HostKernel = Callable[[Sequence[Any]], tuple[Any, ...]]

CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""Operators whose bodies the runtime runs itself."""


def namespace_for(device: str) -> Any:
    """The array namespace of the host on a device: NumPy on "cpu", CuPy on "cuda".

    Raises ExecutionError where CuPy is not installed.
    """
    if device.partition(":")[0] != "cuda":
        return np
    try:
        return importlib.import_module("cupy")
    except ImportError as e:
        raise ExecutionError("the host on CUDA needs CuPy: pip install cupy-cuda13x (or cupy-cuda12x)") from e


def host_kernel(node: Node, xp: Any = np) -> HostKernel:
    """A function from a node's inputs (None for those left out) to its outputs, in the namespace `xp`.

    The function raises ExecutionError, naming the node and its inputs, for whatever goes wrong inside.
    Control flow is not run here (see `runtime.control`).
    """
    portable = find_kernel(node.domain, node.op_type)
    if portable is None or _has_strings(node):
        return _guarded(node, _on_cpu(reference_kernel(node), xp))
    function = portable.function
    context = OpContext(node, xp)
    static = portable.static if xp is not np else ()

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        if static:
            arrays = [xp.asnumpy(a) if i in static and a is not None else a for i, a in enumerate(arrays)]
        result = function(context, *arrays)
        return result if type(result) is tuple else (result,)

    return _guarded(node, call)


def run_node(node: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run one node on NumPy arrays."""
    with np.errstate(all="ignore"):
        return host_kernel(node)(inputs)


def _has_strings(node: Node) -> bool:
    for v in (*node.inputs, *node.outputs):
        if v is not None and isinstance(v.type, TensorType) and v.type.dtype == STRING:
            return True
    return False


def _on_cpu(kernel: HostKernel, xp: Any) -> HostKernel:
    if xp is np:
        return kernel

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        results = kernel([xp.asnumpy(a) if isinstance(a, xp.ndarray) else a for a in arrays])
        return tuple(xp.asarray(r) if isinstance(r, np.ndarray) and r.dtype != STRING else r for r in results)

    return call


def _guarded(node: Node, kernel: HostKernel) -> HostKernel:
    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return kernel(arrays)
        except XRTError:
            raise
        except Exception as e:
            given = ", ".join(_describe(a) for a in arrays)
            raise ExecutionError(f"node {node.name!r}: {node.operator}({given}) failed on the host: {e}") from e

    return call


def _describe(a: Any) -> str:
    if a is None:
        return "_"
    if hasattr(a, "dtype"):
        return f"{a.dtype}{list(a.shape)}"
    return type(a).__name__
