"""The host executor: runs any node operator by operator, with a portable kernel or, without one, `onnx.reference`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xrt_core.errors import ExecutionError, ShapeError, UnsupportedError, XRTError
from xrt_core.host.reference import reference_kernel
from xrt_core.ir.attribute_limits import fault_at, node_fault, waits_for_sizes
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.operator_set import find_operator, lowered
from xrt_core.ir.schema import undefined_operator
from xrt_core.ir.types import STRING, TensorType
from xrt_core.kernels import OpContext, PortableKernel, find_kernel
from xrt_core.kernels.namespace import has_dtype, wide

HostKernel = Callable[[Sequence[Any]], tuple[Any, ...]]


def host_kernel(node: Node, xp: Any = np) -> HostKernel:
    """Return a function from a node's inputs (None for omitted ones) to its outputs, in the namespace `xp`.

    Under CuPy, NumPy inputs are copied to the device, and inputs whose values the kernel needs come to the CPU; nodes
    that CuPy cannot run (`_for_device`) run on the CPU with NumPy's kernel, their inputs and outputs copied.

    The function raises ExecutionError, naming the node and its inputs, for any exception of the kernel.
    For a node that its operator does not allow (`node_fault`), which engines are not given, it raises ShapeError; for
    an operator that nobody here defines, UnsupportedError.
    Control flow is executed by `runtime.control_flow`.
    """
    fault = node_fault(node)
    if fault is not None:
        return _refusal(f"node {node.name!r} ({node.operator}): {fault}")
    call = _kernel_of(node, xp)
    return _with_sizes(node, call) if waits_for_sizes(node) else call


def _with_sizes(node: Node, call: HostKernel) -> HostKernel:
    """`call`, for a node of which sizes must agree that only a call tells."""
    seen: tuple[Any, ...] | None = None

    def sized(arrays: Sequence[Any]) -> tuple[Any, ...]:
        nonlocal seen
        shapes = tuple([getattr(a, "shape", None) for a in arrays])
        if shapes != seen:
            if (fault := fault_at(node, shapes)) is not None:
                raise ShapeError(f"node {node.name!r} ({node.operator}): {fault}")
            seen = shapes
        return call(arrays)

    return sized


def _kernel_of(node: Node, xp: Any) -> HostKernel:
    """The function of a node that its operator allows."""
    portable = find_kernel(node.domain, node.op_type)
    own = None if portable is not None else find_operator(node.domain, node.op_type, node.version)
    if own is not None and own.lowering is not None:
        return _wrap_errors(node, _on_cpu(_by_lowering(node, own.lowering), xp))
    if portable is None and (why := undefined_operator(node)):
        return _refusal(f"node {node.name!r}: {why}", UnsupportedError)
    if portable is None or (_has_strings(node) and not portable.strings):
        return _wrap_errors(node, _on_cpu(reference_kernel(node), xp))
    if xp is np:
        return _wrap_errors(node, _kernel(portable, node, np))
    on_cpu = _on_cpu(_kernel(portable, node, np), xp)
    if not _for_device(node, portable, xp):
        return _wrap_errors(node, on_cpu)
    call, static = _kernel(portable, node, xp), portable.static

    def on_device(arrays: Sequence[Any]) -> tuple[Any, ...]:
        given = [_down(a, xp) if i in static else _up(a, xp) for i, a in enumerate(arrays)]
        if any(type(a) is np.ndarray and i not in static for i, a in enumerate(given)):
            return on_cpu(arrays)  # of a dtype that CuPy has not, which type inference did not find
        try:
            return call(given)
        except MemoryError as e:
            free, whole = xp.cuda.Device().mem_info
            raise ExecutionError(
                f"node {node.name!r}: {node.operator}({', '.join(map(_describe, given))}) does not fit the GPU's "
                f"memory: {e}; {free:,} of {whole:,} bytes are free"
            ) from e

    return _wrap_errors(node, on_device)


def cpu_inputs(node: Node, xp: Any) -> frozenset[int]:
    """Return the indices of the inputs that `host_kernel(node, xp)` reads on the CPU."""
    if xp is np:
        return frozenset()
    portable = find_kernel(node.domain, node.op_type)
    if portable is None or not _for_device(node, portable, xp):
        return frozenset(range(len(node.inputs)))
    return frozenset(portable.static)


def _kernel(portable: PortableKernel, node: Node, xp: Any) -> HostKernel:
    function, context = portable.function, OpContext(node, xp)

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        result = function(context, *arrays)
        return result if type(result) is tuple else (result,)

    return call


def _by_lowering(node: Node, lowering: Callable[[Node], Graph | None]) -> HostKernel:
    """Return a kernel that runs what a plugin's operator is lowered to for the arrays that arrive.

    Compilation replaces most such nodes. These were left: an engine takes them as they are, or a shape or value that
    the lowering needs is known at run time alone.
    """
    small = 1024  # elements up to which a value may decide what the node is lowered to
    programs: dict[Any, Graph] = {}

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        given = [None if a is None else np.asarray(a) for a in arrays]
        key = tuple(
            None if a is None else (a.dtype, a.shape, a.tobytes() if a.size <= small and a.dtype.kind in "iub" else b"")
            for a in given
        )
        body = programs.get(key)
        if body is None:
            if len(programs) >= 16:
                programs.clear()
            body = programs[key] = _lowered_for(node, lowering, given, small)
        try:
            results = run_graph(body, [a for a in given if a is not None])
        except ExecutionError as e:
            raise ExecutionError(f"node {node.name!r} ({node.operator}): {e}") from e
        found = iter(results)
        return tuple(None if v is None else next(found) for v in node.outputs)

    return call


def _lowered_for(
    node: Node, lowering: Callable[[Node], Graph | None], arrays: Sequence[np.ndarray | None], small: int
) -> Graph:
    inputs = [
        None
        if v is None or a is None
        else Value(v.name, TensorType(a.dtype, a.shape), a if a.size <= small and a.dtype.kind in "iub" else v.data)
        for v, a in zip(node.inputs, arrays, strict=False)
    ]
    body = lowered(node.replace(inputs=inputs), lowering)
    if body is None:
        raise ExecutionError(f"node {node.name!r}: {node.operator} has no lowering for these inputs")
    return body


def run_graph(graph: Graph, arrays: Sequence[Any]) -> list[Any]:
    """Run the nodes of a graph without control flow one by one on NumPy arrays; what is not needed any more goes."""
    values: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
    last: dict[Value, int] = {}
    for i, n in enumerate(graph.nodes):
        last.update((v, i) for v in n.inputs if v is not None)
    keep = set(graph.outputs)
    for i, n in enumerate(graph.nodes):
        given = [None if v is None else values.get(v) if v.data is None else v.data for v in n.inputs]
        for v, made in zip(n.outputs, run_node(n, given), strict=False):
            if v is not None:
                values[v] = made
        for v in n.inputs:
            if v is not None and last[v] == i and v not in keep:
                values.pop(v, None)
    return [v.data if v.data is not None else values[v] for v in graph.outputs]


def _for_device(node: Node, portable: PortableKernel, xp: Any) -> bool:
    """Whether a kernel can run under CuPy: not one of sequences, of shapes that depend on data, of foreign dtypes."""
    if _has_strings(node) or portable.why_dynamic(node) is not None:
        return False
    types = [v.type for v in (*node.inputs, *node.outputs) if v is not None]
    return all(has_dtype(xp, t.dtype) for t in types if isinstance(t, TensorType) and t.dtype is not None)


MINIMUM_REUSED = 1 << 15
"""Bytes from which writing a result over an input is faster; below, NumPy's allocation cache is as fast."""


def reusable_inputs(node: Node, xp: Any = np) -> tuple[int, ...]:
    """Return the indices of inputs that `reusing_kernel` may write the result over, judging by kernel and types."""
    portable = find_kernel(node.domain, node.op_type)
    if portable is None or not portable.ufunc or xp is not np or len(node.outputs) != 1 or node.outputs[0] is None:
        return ()
    t = node.outputs[0].type
    if not isinstance(t, TensorType) or not t.is_static or t.dtype is None or t.shape is None:
        return ()
    if math.prod(d for d in t.shape if isinstance(d, int)) * t.dtype.itemsize < MINIMUM_REUSED:
        return ()
    ufunc = getattr(np, portable.ufunc)
    if len(node.inputs) != ufunc.nin or any(v is None or v.dtype != t.dtype for v in node.inputs):
        return ()
    if wide(t.dtype) != t.dtype or ufunc.resolve_dtypes((t.dtype,) * ufunc.nin + (None,))[-1] != t.dtype:
        return ()
    return tuple(i for i, v in enumerate(node.inputs) if v is not None and v.data is None and v.type == t)


def reusing_kernel(node: Node, candidates: Sequence[int]) -> HostKernel:
    """Return the host kernel of a node that writes its result over one of the inputs in `candidates` if it is unshared.

    candidates: indices returned by `reusable_inputs` of inputs that nothing reads after this node. Sharing is checked
    at run time: an array that owns its memory, and whose only references are those of the plan, has no views and no
    other readers. Results are bitwise equal and have the same memory layout.
    """
    portable, out = find_kernel(node.domain, node.op_type), node.outputs[0]
    assert portable is not None
    assert out is not None
    plain, ufunc = host_kernel(node), getattr(np, portable.ufunc)
    dtype, shape = out.dtype, out.shape

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        for i in candidates:
            if sys.getrefcount(arrays[i]) == _SOLE:
                x = arrays[i]
                flags = x.flags
                if flags.owndata and flags.carray and x.dtype == dtype and x.shape == shape:
                    return (ufunc(*arrays, out=x),)
        return plain(arrays)

    return _wrap_errors(node, call)


def _sole_references() -> int:
    """Return `sys.getrefcount` of an array that is referenced by a register and a step's arguments alone."""
    found = []

    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        found.append(sys.getrefcount(arrays[0]))
        return ()

    registers = [np.empty(1)]
    call([registers[i] for i in (0,)])
    return found[0]


_SOLE = _sole_references()


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
        return tuple(_up(r, xp) for r in kernel([_down(a, xp) for a in arrays]))

    return call


def _up(x: Any, xp: Any) -> Any:
    """Copy NumPy arrays to the device, also within a sequence; those of dtypes that it has not stay NumPy's."""
    if isinstance(x, list):
        return [_up(e, xp) for e in x]
    return xp.asarray(x) if type(x) is np.ndarray and has_dtype(xp, x.dtype) else x


def _down(x: Any, xp: Any) -> Any:
    """Copy device arrays to NumPy arrays, also within a sequence."""
    if isinstance(x, list):
        return [_down(e, xp) for e in x]
    return xp.asnumpy(x) if isinstance(x, xp.ndarray) else x


def _wrap_errors(node: Node, kernel: HostKernel) -> HostKernel:
    def call(arrays: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return kernel(arrays)
        except XRTError:
            raise
        except Exception as e:
            given = ", ".join(_describe(a) for a in arrays)
            raise ExecutionError(f"node {node.name!r}: {node.operator}({given}) failed on the host: {e}") from e

    return call


def _refusal(message: str, error: type[XRTError] = ShapeError) -> HostKernel:
    def refuse(arrays: Sequence[Any]) -> tuple[Any, ...]:
        raise error(message)

    return refuse


def _describe(a: Any) -> str:
    if a is None:
        return "_"
    if hasattr(a, "dtype"):
        return f"{a.dtype}{list(a.shape)}"
    return type(a).__name__
