"""A function in two: what the parser reads, and what op kernels write.

The parser reads one model. What kernels make is left out of it, and where a node of the model reads such a value there
stands a placeholder of its type: zeros, expanded to its shape (`joining` puts the kernel's tensor there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xrt_core.engine.contract import Function
from xrt_core.errors import CompileError, XRTError
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.inference import infer_types
from xrt_core.ir.onnx_proto import dtype_to_onnx
from xrt_core.ir.schema import since_version
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext, find_kernel
from xrt_tensorrt.carrying import UINT8, carried, carrier, has_uint8
from xrt_tensorrt.kernels.context import EIGHT_BITS, FLOATS

_FLOAT = 1  # ONNX's number of float32


@dataclass(frozen=True)
class Split:
    """A function, apart.

    outer: what the parser gets. Its outputs are `held` and then `placeholders`, in order.
    ways: how each of its nodes is taken.
    kernels: the nodes that kernels write, in order.
    held: values of the function that the parser makes, and that are returned or that kernels read.
    placeholders: values that kernels make and that the parser's nodes read.
    known: values that were computed ahead, as constants.
    """

    outer: Function
    ways: tuple[str, ...]
    kernels: tuple[Node, ...]
    held: tuple[Value, ...]
    placeholders: tuple[Value, ...]
    known: Mapping[Value, Value]


def split(function: Function, ways: Sequence[str], *, open_batch: bool = False) -> Split:
    """`function` in two. ways: how each node is taken (`Verdict.way`). open_batch: first dimensions are another batch.

    Kernels' nodes whose inputs are all constants are computed here. Raises CompileError where the batch is open, and
    how the shape of a placeholder follows from it is not known.
    """
    return _Splitter(function, open_batch).split(ways)


def is_computed_ahead(node: Node) -> bool:
    """Whether a node that is a kernel's needs no layers: its inputs are constants, and the host computes its output.

    So constants of every type that ONNX quantises to may be dequantised.
    """
    made = node.outputs[0]
    if made is None or any(node.outputs[1:]) or made.dtype not in FLOATS | EIGHT_BITS:
        return False
    known = all(v is None or v.data is not None for v in node.inputs)
    return known and find_kernel(node.domain, node.op_type) is not None


class _Splitter:
    def __init__(self, function: Function, open_batch: bool) -> None:
        self._function = function
        self._params = function.body.inputs
        self._opset = function.body.opsets.get("", 1)
        self._nodes: list[Node] = []
        self._ways: list[str] = []
        self._seen: dict[Value, Value] = {}  # what the parser's nodes read for a value
        self._by_kernel: set[Value] = set()
        self._folded: dict[Value, Value] = {}
        self._placeholders: list[Value] = []
        self._open = _OpenShapes(function) if open_batch else None
        self._batch: Value | None = None

    def split(self, ways: Sequence[str]) -> Split:
        function, body = self._function, self._function.body
        kernels: list[Node] = []
        for node, way in zip(body.nodes, ways, strict=True):
            node = self._with_folded(node)
            if way != "kernel":
                self._give_to_parser(node, way)
            elif not self._fold(node):
                kernels.append(node)
                self._by_kernel.update(v for v in node.outputs if v is not None)
        wanted = {v for n in kernels for v in n.inputs if v is not None} | set(body.outputs)
        wanted -= self._by_kernel
        held = [v for n in body.nodes for v in n.outputs if v in wanted and v in self._seen]
        outputs = [self._seen[v] for v in (*held, *self._placeholders)]
        outer = Graph(body.inputs, outputs, self._nodes, opsets={k: v for k, v in body.opsets.items() if k != "xrt"})
        made = Function.from_graph(outer, name=function.name)
        return Split(made, tuple(self._ways), tuple(kernels), tuple(held), tuple(self._placeholders), self._folded)

    def _with_folded(self, node: Node) -> Node:
        if not any(v in self._folded for v in node.inputs if v is not None):
            return node
        return node.replace(inputs=[v if v is None else self._folded.get(v, v) for v in node.inputs])

    def _fold(self, node: Node) -> bool:
        """Whether the node's inputs are constants; its one output then is a constant too."""
        if not is_computed_ahead(node):
            return False
        portable, made = find_kernel(node.domain, node.op_type), node.outputs[0]
        assert portable is not None
        assert made is not None
        data = np.asarray(portable.function(OpContext(node, np), *(None if v is None else v.data for v in node.inputs)))
        self._folded[made] = Value.constant(data, made.name)
        return True

    def _give_to_parser(self, node: Node, way: str) -> None:
        narrow = has_uint8(node)
        form = carried(node) if narrow else node
        inputs = []
        for v, plain in zip(node.inputs, form.inputs, strict=True):
            inputs.append(plain if v is None or v.data is not None else self._read(v))
        for v, plain in zip(node.outputs, form.outputs, strict=True):
            if v is not None and plain is not None:
                self._seen[v] = plain
        self._nodes.append(form.replace(inputs=inputs))
        self._ways.append(way)

    def _read(self, v: Value) -> Value:
        """What a node of the parser's reads for a value that is no constant."""
        found = self._seen.get(v)
        if found is None:
            if v in self._by_kernel:
                found = self._placeholder(v)
                self._placeholders.append(v)
            elif v in self._params and v.dtype == UINT8:
                found = Value(f"{v.name or self._params.index(v)}/carried", carrier(v).type)
                self._add("Cast", [v], found, to=_FLOAT)
            else:
                found = v
            self._seen[v] = found
        return found

    def _add(self, op_type: str, inputs: list[Value], output: Value, **attributes: int) -> Value:
        version = since_version(op_type, "", self._opset)
        self._nodes.append(Node(op_type, inputs, [output], attributes, version=version, name=output.name))
        self._ways.append("parser")
        return output

    # --- placeholders ------------------------------------------------------------------------------------------------

    def _placeholder(self, v: Value) -> Value:
        """Nodes that make zeros of a value's type."""
        t = (carrier(v) if v.dtype == UINT8 else v).type
        assert isinstance(t, TensorType)
        assert t.shape is not None
        assert t.dtype is not None
        name = f"{v.name or len(self._placeholders)}/placeholder"
        dims = tuple(int(d) for d in t.shape if isinstance(d, int))
        zero = Value.constant(np.zeros((1,) * max(len(dims), 1), np.float32), f"{name}/zero")
        wide = dims or (1,)
        shape = Value.constant(np.array(wide, np.int64), f"{name}/shape")
        if self._open is not None and dims:
            shape = self._open_shape(v, shape, name)
        last = self._add("Expand", [zero, shape], Value(f"{name}/zeros", TensorType(np.dtype(np.float32), wide)))
        if not dims:
            none = Value.constant(np.zeros(0, np.int64), f"{name}/none")
            last = self._add("Reshape", [last, none], Value(f"{name}/scalar", TensorType(last.dtype, ())))
        if t.dtype != np.float32:
            last = self._add("Cast", [last], Value(name, t), to=dtype_to_onnx(t.dtype))
        return last

    def _open_shape(self, v: Value, static: Value, name: str) -> Value:
        """A value's shape for the batch that comes, where it depends on it."""
        assert self._open is not None
        factors, rest = self._open.of(v)
        if not factors.any():
            return static
        int64 = np.dtype(np.int64)
        if self._batch is None:
            first = next((p for p in self._function.body.inputs if p.dtype != UINT8), self._function.body.inputs[0])
            assert first.shape is not None
            whole = self._add("Shape", [first], Value("batch/shape", TensorType(int64, (len(first.shape),))))
            zero = Value.constant(np.zeros(1, np.int64), "batch/first")
            self._batch = self._add("Gather", [whole, zero], Value("batch/size", TensorType(int64, (1,))))
        t = TensorType(int64, (len(factors),))
        times = Value.constant(factors, f"{name}/factors")
        made = self._add("Mul", [self._batch, times], Value(f"{name}/scaled", t))
        return self._add("Add", [made, Value.constant(rest, f"{name}/rest")], Value(f"{name}/open", t))


class _OpenShapes:
    """How the shapes of a function's values follow from its batch: each dimension is `factor * batch + rest`."""

    def __init__(self, function: Function) -> None:
        self._batch = function.params[0].shape[0]
        self._other = self._batch + 1
        types: dict[Value, Value] = {}
        for v in function.body.inputs:
            assert v.shape is not None
            types[v] = v.with_type(TensorType(v.dtype, (self._other, *v.shape[1:])))
        for n in function.body.nodes:
            inputs = [v if v is None else types.get(v, v) for v in n.inputs]
            try:
                found = infer_types(n.replace(inputs=inputs, outputs=[v and Value(v.name) for v in n.outputs]))
            except XRTError as e:
                raise CompileError(f"tensorrt: with a batch of {self._other}: {e}") from e
            types.update((v, Value(v.name, t)) for v, t in zip(n.outputs, found, strict=False) if v is not None)
        self._types = types

    def of(self, v: Value) -> tuple[np.ndarray, np.ndarray]:
        """factor and rest for each dimension. Raises CompileError where they do not follow."""
        known = self._types.get(v)
        here, there = v.shape, None if known is None else known.shape
        if here is None or there is None or not all(isinstance(d, int) for d in (*here, *there)):
            raise CompileError(f"tensorrt: how the shape of {v.name!r} follows from the batch is not known")
        factors = np.array([t - h for h, t in zip(here, there, strict=True)], np.int64)  # type: ignore[operator]
        return factors, np.array(here, np.int64) - factors * self._batch
