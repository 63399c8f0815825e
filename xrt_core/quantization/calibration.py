"""Calibration mode: calls of modules also record the ranges of the tensors to be quantised."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from xrt_core.errors import QuantizationError
from xrt_core.host.executor import run_node
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.schema import latest_opset, since_version
from xrt_core.passes.simplify import ConstantFold
from xrt_core.quantization.ranges import Range, Ranges, find_ranges, identity, prepare_folder

PRODUCTS: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""The operators whose inputs are quantised."""

Run = Callable[[Sequence[Any]], Sequence[Any]]
active: Recorder | None = None
"""The recorder of the active calibration mode, or None. Every call reads it: the only cost while the mode is off."""


class Recorder:
    """Records the ranges of the models that run while calibration is active. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Ranges] = {}
        self._runs: dict[int, tuple[Graph, str, list[str], Run]] = {}

    def record(self, graph: Graph, arrays: Sequence[Any], make: Callable[[Graph], Run]) -> None:
        """Run the graph's observers on these arguments and add the ranges. make: graph -> function that runs it.

        Raises QuantizationError for a graph with nothing to quantise, and the errors of running it.
        """
        with self._lock:
            known = self._runs.get(id(graph))
        if known is None:
            plain = prepared(graph)
            observed, names = observers(plain)
            known = graph, identity(plain), names, make(observed)  # keeps the graph alive, so that its id is not reused
            with self._lock:
                self._runs[id(graph)] = known
        _, fingerprint, names, run = known
        results = [np.asarray(r) for r in run(arrays)]
        found: dict[str, Range] = {}
        for name, low, high in zip(names, results[::2], results[1::2], strict=True):
            if low.dtype == np.float32 and not low > high:  # an empty tensor has no range
                found[name] = float(low), float(high)
        with self._lock:
            ranges = self._found.setdefault(fingerprint, Ranges(graph.name, fingerprint))
            ranges.add(found)

    def ranges(self, graph: Graph) -> Ranges:
        """The ranges of a graph that was recorded. Raises KeyError for another one."""
        return self._found[self._runs[id(graph)][1]]

    def save(self, folder: os.PathLike[str]) -> None:
        """Merge the recorded ranges into those in the folder. Raises QuantizationError."""
        for fingerprint, new in self._found.items():
            ranges = find_ranges(folder, fingerprint) or Ranges(new.model, fingerprint)
            ranges.add(new.tensors, new.batches)
            ranges.save(folder)


@contextmanager
def ptq_calibration_mode(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager: every call of a module inside also records ranges; they are written at the end.

        with xrt.ptq_calibration_mode("ranges"):
            for x in batches:
                m(x)
        q = xrt.XRTModule("model.onnx", use_int8=True, int8_calibration="ranges")

    folder: created if missing; ranges in it are widened. If the body raises, nothing is written. The mode applies to
    all threads of the process. Raises QuantizationError if the folder cannot be written, or a mode is active.
    """
    global active
    path = prepare_folder(folder)
    if active is not None:
        raise QuantizationError("a calibration mode is on already; they do not nest")
    recorder = active = Recorder()
    try:
        yield
    finally:
        active = None
    recorder.save(path)


def prepared(graph: Graph) -> Graph:
    """Return the graph after constant folding, so that a weight computed from other constants is a constant."""
    return ConstantFold(run_node, sys.maxsize)(graph)


def quantised_inputs(node: Node) -> list[Value]:
    """Return the operands of a product (without its bias) that are not constants."""
    if node.op_type not in PRODUCTS or node.domain:
        return []
    return [v for v in node.inputs[:2] if v is not None and v.data is None]


def observers(graph: Graph) -> tuple[Graph, list[str]]:
    """Return a graph that outputs the minimum and maximum of each tensor that a product reads, and their names.

    Raises QuantizationError for a graph without products, and for unnamed tensors.
    """
    watched = list(dict.fromkeys(v for n in graph.nodes for v in quantised_inputs(n)))
    if not watched:
        raise QuantizationError(
            f"{graph.name or 'the graph'} has nothing to quantise: no {', '.join(sorted(PRODUCTS))} of computed values"
        )
    opset = graph.opsets.get("", latest_opset())
    nodes, outputs = list(graph.nodes), []
    for i, v in enumerate(watched):
        if not v.name:
            raise QuantizationError(f"{graph.name or 'the graph'} has unnamed tensors: ranges are kept by name")
        for op in ("ReduceMin", "ReduceMax"):
            out = Value(f"range/{op}/{i}")
            nodes.append(Node(op, [v], [out], {"keepdims": 0}, version=since_version(op, "", opset), name=out.name))
            outputs.append(out)
    return graph.replace(nodes=nodes, outputs=outputs), [v.name for v in watched]
