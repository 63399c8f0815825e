"""A Function on its way to XLA: what is known beforehand, and the constants that it takes as arguments. Without JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from xrt_core.engine.contract import Function, InputOutputAlias
from xrt_core.engine.op_kernels import OpKernel, op_kernels
from xrt_core.errors import CompileError
from xrt_core.ir.function import array_digest
from xrt_core.ir.graph import Graph, Node, Value, every_node
from xrt_core.ir.op_traits import draws_random, traits_of
from xrt_core.ir.types import TensorType
from xrt_core.kernels import OpContext, find_kernel
from xrt_xla.dequantized import Dequantized, dequantized, integer_product
from xrt_xla.kernels.context import DEVICES, Layout, layout_of
from xrt_xla.kernels.quantized import dequantized_product

FOLD_BYTES: Final = 16384
"""Constants up to this size go into the program, where XLA simplifies with them; larger ones are laid out once and
stay arguments on the device: compilation does not see them, and they are held once."""

_GROWTH: Final = 4
"""Nodes of constants are computed when the executable is built if that grows their bytes at most so much (int8 weights
become float32 ones)."""

_PRODUCTS: Final = frozenset(("Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"))
"""Their operands lie in memory: XLA would fill one that is of one number (ConstantOfShape) in each call, with as much
memory for the time of the call. Other operators are fused with the number."""

_FILLED: Final = 1 << 30
"""Bytes of such operands that a program keeps; those beyond it are filled in each call."""


_DEQUANTIZED_PRODUCT: Final = OpKernel("xla", "", "MatMul", dequantized_product, DEVICES)


def program_order(outputs: int, aliases: Sequence[InputOutputAlias]) -> list[int]:
    """The order in which a program returns its outputs: aliased ones first, by the input they share storage with.

    JAX gives a donated buffer to the first output of its type, so this order makes it the right one.
    """
    first = [a.output for a in sorted(aliases, key=lambda a: a.input)]
    return first + [i for i in range(outputs) if i not in first]


class Step(NamedTuple):
    """A node to trace.

    sources: where its inputs come from: a Value, a weight's index, an array, None. known: for each input its value
    where it is a constant. laid_out: indices of inputs that come in the form that the kernel asked for. bodies: by
    attribute, the subgraphs of control flow with their steps.
    """

    node: Node
    entry: OpKernel
    sources: list[Any]
    known: tuple[np.ndarray | None, ...]
    laid_out: frozenset[int]
    bodies: Mapping[str, Body] = MappingProxyType({})


class Body(NamedTuple):
    """A subgraph and its steps."""

    graph: Graph
    steps: list[Step]


class Program:
    """The steps of a Function, and the constants that its program takes as arguments after its entries.

    keys: of the weights; equal ones have equal contents.
    Nodes of constants only (a weight's DequantizeLinear, say) are computed here, once, unless that grows them much.
    multiplies_bytes: whether products of 8-bit integers are faster than of float32; asked where there are some.
    """

    def __init__(
        self, function: Function, kind: str, fold: int, multiplies_bytes: Callable[[], bool] = lambda: False
    ) -> None:
        self.weights: list[np.ndarray] = []
        self.keys: list[str] = []
        self._kind = kind
        self._fold = fold
        self._slots: dict[tuple[int, str], int] = {}  # (constant, layout) -> index in weights
        self._derived: dict[Value, np.ndarray] = {}
        self._multiplies_bytes = multiplies_bytes
        self._dequantized: dict[Value, Dequantized] = {}
        self._body = function.body
        self._filled = 0  # bytes
        self.steps = self._steps(function.body)

    def known(self, value: Value | None) -> np.ndarray | None:
        """The value of a constant, or of what was computed from constants here."""
        if value is None:
            return None
        return value.data if value.data is not None else self._derived.get(value)

    def _steps(self, graph: Graph) -> list[Step]:
        return [step for node in graph.nodes if (step := self._step(node)) is not None]

    def _step(self, node: Node) -> Step | None:
        """None for a node that was computed here."""
        entry = op_kernels.find("xla", node.domain, node.op_type)
        if entry is None:
            raise CompileError(f"xla: no kernel for {describe(node)}")
        known = tuple(self.known(v) for v in node.inputs)
        if (integers := self._integers(node, known)) is not None:
            return integers
        bodies = {name: Body(a, self._steps(a)) for name, a in node.attributes.items() if isinstance(a, Graph)}
        if not bodies and (self._fill(node, known) or self._derive(node, known)):
            return None
        sources: list[Any] = []
        laid_out = set()
        for i, (v, data) in enumerate(zip(node.inputs, known, strict=True)):
            if data is None:
                sources.append(v)
                continue
            if i in entry.static:
                sources.append(data)
                continue
            layout = layout_of(node, i, self._kind)
            if layout is not None:
                laid_out.add(i)
            if data.nbytes <= self._fold and not is_boxing(node):
                sources.append(data if layout is None else layout.make(np, data))
            else:
                sources.append(self._weight(data, layout))
        return Step(node, entry, sources, known, frozenset(laid_out), bodies)

    def _integers(self, node: Node, known: tuple[np.ndarray | None, ...]) -> Step | None:
        """The step of a product that is one of 8-bit integers (`xrt_xla.dequantized`), None for other nodes."""
        if (read := dequantized(node, known)) is not None and node.outputs[0] is not None:
            self._dequantized[node.outputs[0]] = read
        if node.op_type != "MatMul" or None in node.inputs or self._dequantized.keys().isdisjoint(node.inputs):
            return None
        a, b = (self._dequantized.get(v) for v in node.inputs if v is not None)
        found = integer_product(node, a, b, None if b is None else self.known(b.x))
        if found is None or self.known(found.a) is not None or not self._multiplies_bytes():
            return None
        sources = [found.a, self._weight(found.b, found.layout), found.offset, found.scale]
        return Step(node, _DEQUANTIZED_PRODUCT, sources, (None,) * len(sources), frozenset())

    def _weight(self, data: np.ndarray, layout: Layout | None) -> int:
        key = (id(data), "" if layout is None else layout.name)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self.weights)
            self.weights.append(data if layout is None else layout.make(np, data))
            self.keys.append(f"{_content_key(data)} {key[1]}")
        return slot

    def _fill(self, node: Node, known: Sequence[np.ndarray | None]) -> bool:
        """Take what a ConstantOfShape gives as a constant, if a product reads it: as a view of one element, which
        becomes memory on the device alone."""
        if node.op_type != "ConstantOfShape" or node.domain or known[0] is None:
            return False
        value, portable = node.outputs[0], find_kernel(node.domain, node.op_type)
        if value is None or value not in self._operands or portable is None:
            return False
        one = np.asarray(portable.function(OpContext(node, np), np.ones_like(known[0])))
        filled = np.broadcast_to(one, known[0].tolist())
        if self._filled + filled.nbytes > _FILLED:
            return False
        self._filled += filled.nbytes
        self._derived[value] = filled
        return True

    @functools.cached_property
    def _operands(self) -> set[Value]:
        """What products read, and what those are views of."""
        found: set[Value] = set()
        for node in reversed(list(every_node(self._body))):
            is_view = traits_of(node).view and not found.isdisjoint(node.outputs)
            if is_view or (node.op_type in _PRODUCTS and not node.domain):
                found.update(v for v in node.inputs if v is not None)
        return found

    def _derive(self, node: Node, known: Sequence[np.ndarray | None]) -> bool:
        """Compute a node of constants with NumPy, if it is one and its results are not much larger."""
        if is_boxing(node):  # how a weight lies on a mesh
            return False
        given = [x for x, v in zip(known, node.inputs, strict=True) if v is not None]
        portable = find_kernel(node.domain, node.op_type)
        if not given or portable is None or draws_random(node) or any(x is None for x in given):
            return False
        size = 0
        for v in node.outputs:
            if v is not None and isinstance(v.type, TensorType) and v.type.dtype is not None:
                size += _elements(v.type) * v.type.dtype.itemsize
        if size > max(_GROWTH * sum(x.nbytes for x in given if x is not None), self._fold):
            return False
        try:
            with np.errstate(all="ignore"):
                results = portable.function(OpContext(node, np), *known)
        except Exception:  # not computable here: the traced form decides, and names the node
            return False
        for v, r in zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=False):
            if v is not None and r is not None:
                self._derived[v] = np.asarray(r)
        return True


def _content_key(data: np.ndarray) -> str:
    """The same for arrays of equal contents; of one element seen as many it is found without reading them all."""
    if data.size > 1 and not any(data.strides):
        return f"{data.shape} of {array_digest(data[(slice(1),) * data.ndim].copy())}"
    return array_digest(data)


def is_boxing(node: Node) -> bool:
    """Whether a node says how its input lies on a mesh."""
    return node.op_type == "Boxing" and node.domain == "xrt"


def layouts(function: Function, steps: Sequence[Step]) -> tuple[str, dict[Any, str]]:
    """The mesh of a Function, "" for none, and how its entries (Values) and weights (indices) are to lie there: as the
    one that reads them says, where that is a Boxing, else whole."""
    mesh, found, others = "", {}, set()
    for step in steps:
        overwritten = {i for _, i in step.node.annotations.aliases}  # it need not be read for that
        for i, source in enumerate(step.sources):
            if i in overwritten:
                continue
            if is_boxing(step.node):
                mesh = str(step.node.attributes["mesh"])
                found.setdefault(source, str(step.node.attributes["target"]))
            elif isinstance(source, int | Value):
                others.add(source)
    others.update(function.body.outputs)
    return mesh, {k: v for k, v in found.items() if k not in others}


def describe(node: Node) -> str:
    """A node, for messages."""
    source = node.annotations.source
    return f"node {node.name!r} ({node.operator}-{node.version})" + (f" from {source}" if source else "")


def _elements(t: TensorType) -> int:
    return math.prod(d for d in t.shape or () if isinstance(d, int))
