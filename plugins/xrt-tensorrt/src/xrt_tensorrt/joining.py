"""Op kernels on TensorRT's network API: run for one node, and joined with what the parser made of the others.

The parser's network holds a placeholder for each tensor that its layers want of a kernel (`splitting`). The kernels
write their layers, one after another, from the tensors that are there, and every layer that reads a placeholder is
given the kernel's tensor instead. Nothing reads the placeholders then, and TensorRT leaves them out of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core.engine.contract import Function
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CompileError, XRTError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import dtype_name
from xrt_tensorrt._toolkit import Network, Toolkit
from xrt_tensorrt.carrying import UINT8
from xrt_tensorrt.kernels.context import EIGHT_BITS, NetworkContext, arrays_of
from xrt_tensorrt.kernels.tensor import F32, Layers, Tensor
from xrt_tensorrt.splitting import Split


def join(network: Network, function: Function, apart: Split, *, open_batch: bool) -> tuple[str, ...]:
    """Write the kernels' layers of `function` into the network of `apart.outer`; returns the names of its outputs.

    Raises CompileError where a kernel makes something else than its node says, or the library takes no such layer.
    """
    return _Join(network, function, apart, open_batch).outputs()


class _Join:
    def __init__(self, network: Network, function: Function, apart: Split, open_batch: bool) -> None:
        self._network, self._function = network, function
        self._open, self._known = open_batch, apart.known
        self._names: set[str] = set()
        by_name = {t.name: t for t in (*network.inputs, *network.outputs)}
        names = network.model.outputs
        self._layers = Layers(network.toolkit, network.network, "xrt", network.kept)
        there = [*zip(function.body.inputs, network.model.inputs, strict=True), *zip(apart.held, names, strict=False)]
        self._tensors: dict[Value, Tensor] = {v: Tensor(self._layers, by_name[name]) for v, name in there}
        waiting = {v: by_name[name] for v, name in zip(apart.placeholders, names[len(apart.held) :], strict=True)}
        for t in network.outputs:
            network.network.unmark_output(t)
        readers = _readers(network, {t.name for t in waiting.values()})
        for node in apart.kernels:
            self._run(node)
            for v in node.outputs:
                if v in waiting:
                    made = self._as_the_parser_has_it(v)
                    for layer, i in readers[waiting[v].name]:
                        layer.set_input(i, made.raw)

    def _run(self, node: Node) -> None:
        name = node.name or node.op_type
        if name in self._names:
            name = f"{name}#{len(self._names)}"
        self._names.add(name)
        layers = Layers(self._network.toolkit, self._network.network, name, self._network.kept)
        given = [None if v is None else v.data if v.data is not None else self._tensors[v] for v in node.inputs]
        for v, t in zip(node.outputs, run_kernel(layers, node, given, open_batch=self._open), strict=True):
            if v is not None and t is not None:
                self._tensors[v] = t

    def _as_the_parser_has_it(self, v: Value) -> Tensor:
        """A kernel's tensor in the dtype that the parser's layers read."""
        assert v.dtype is not None
        return self._tensors[v].astype(F32 if v.dtype == UINT8 else v.dtype)

    def outputs(self) -> tuple[str, ...]:
        """Mark the function's results, each a tensor of its own; returns their names."""
        network = self._network
        taken = {t.name for t in network.inputs}
        names = []
        for v, p in zip(self._function.body.outputs, self._function.returns, strict=True):
            t = self._tensors.get(v)
            if t is None:
                t = self._constant(v, p.name)
            if t.dtype != p.dtype:
                t.raw.name = f"{t.raw.name}/{t.dtype}"
                t = t.astype(p.dtype)
            if t.raw.name in taken:
                t = self._layers.of(network.network.add_identity(t.raw))
            name = p.name
            while name in taken:
                name = f"{name}_returned"
            t.raw.name = name
            network.network.mark_output(t.raw)
            taken.add(name)
            names.append(name)
        return tuple(names)

    def _constant(self, v: Value, name: str) -> Tensor:
        data = self._known.get(v, v).data
        if data is None:
            raise CompileError(f"tensorrt: nothing makes output {name!r}")
        return self._layers.constant(data.astype(F32) if data.dtype in EIGHT_BITS else data)


def _readers(network: Network, wanted: set[str]) -> Mapping[str, Sequence[tuple[Any, int]]]:
    """For each of these tensors, by name, the layers that read it and as which input."""
    found: dict[str, list[tuple[Any, int]]] = {name: [] for name in wanted}
    for layer in network.layers:
        for i in range(layer.num_inputs):
            t = layer.get_input(i)
            if t is not None and t.name in found:
                found[t.name].append((layer, i))
    return found


def run_kernel(
    layers: Layers, node: Node, inputs: Sequence[Tensor | np.ndarray | None], *, open_batch: bool = False
) -> list[Tensor | None]:
    """What the node's kernel makes of `inputs`.

    Integers of 8 bits may be float32 there. open_batch: the shapes are of another batch than the node's. Raises
    CompileError where the kernel fails, or what it makes is not of the types that the node says.
    """
    entry = op_kernels.find("tensorrt", node.domain, node.op_type)
    if entry is None:
        raise CompileError(f"tensorrt: there is no kernel for {node.operator}")
    arrays = arrays_of(node)
    given: list[Tensor | np.ndarray | None] = []
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor):
            given.append(x.under(layers))
        elif x is None or i in arrays:
            given.append(x)
        else:
            given.append(layers.constant(x.astype(F32) if x.dtype in EIGHT_BITS else x))
    try:
        made = entry.function(NetworkContext(node, layers), *given)
    except XRTError:
        raise
    except Exception as e:  # a node that its kernel did not expect costs that node, and not the engine
        raise CompileError(f"tensorrt: the kernel for {node.operator} fails: {type(e).__name__}: {e}") from e
    found = list(made) if isinstance(made, tuple | list) else [made]
    found = [*found, *[None] * len(node.outputs)][: len(node.outputs)]
    for v, t in zip(node.outputs, found, strict=True):
        if v is None or v.dtype is None or v.shape is None:
            continue
        if t is None:
            raise CompileError(f"tensorrt: the kernel for {node.operator} makes no {v.name!r}")
        fits = len(t.shape) == len(v.shape) if open_batch else t.shape == v.shape
        if not fits or t.dtype not in ({v.dtype, F32} if v.dtype in EIGHT_BITS else {v.dtype}):
            raise CompileError(
                f"tensorrt: the kernel for {node.operator} makes {dtype_name(t.dtype)}{list(t.shape)} of {v.name!r}, "
                f"which is {v.type}"
            )
    return found


def trial(toolkit: Toolkit, node: Node) -> str:
    """Why the node's kernel cannot write it, "" where it can: into a network of the node alone."""
    _, network = toolkit.new_network()
    layers = Layers(toolkit, network, node.name or node.op_type, [])
    known: dict[Value, Tensor] = {}
    given: list[Tensor | np.ndarray | None] = []
    try:
        for i, v in enumerate(node.inputs):
            if v is None or v.data is not None:
                given.append(None if v is None else v.data)
                continue
            if v not in known:
                assert v.dtype is not None
                raw = network.add_input(f"x{i}", toolkit.data_type(v.dtype), tuple(v.shape or ()))
                known[v] = Tensor(layers, raw)
            given.append(known[v])
        run_kernel(layers, node, given)
    except XRTError as e:
        return str(e).removeprefix("tensorrt: ")
    return ""
