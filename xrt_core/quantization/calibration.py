"""Calibration: while it is on, calls of modules also record the ranges of what will be quantised."""

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
"""The recorder of the mode that is on. Calls look at it: this is their one cost while it is off."""


class Recorder:
    """Ranges of the models that run while a mode is on. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Ranges] = {}
        self._runs: dict[int, tuple[Graph, str, list[str], Run]] = {}

    def record(self, graph: Graph, arrays: Sequence[Any], make: Callable[[Graph], Run]) -> None:
        """Run the graph's observers on these arguments, through what `make` gives for a graph, and take the ranges.

        Raises QuantizationError for a graph without anything to quantise, and what running it raises.
        """
        with self._lock:
            known = self._runs.get(id(graph))
        if known is None:
            plain = prepared(graph)
            observed, names = observers(plain)
            known = graph, identity(plain), names, make(observed)  # with the graph, so that its id stays its own
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

    def save(self, folder: os.PathLike[str]) -> None:
        """Add what was found to what the folder holds. Raises QuantizationError."""
        for fingerprint, new in self._found.items():
            ranges = find_ranges(folder, fingerprint) or Ranges(new.model, fingerprint)
            ranges.add(new.tensors, new.batches)
            ranges.save(folder)


@contextmanager
def ptq_calibration_mode(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Within the body, every call of a module also records the ranges of its tensors; they are written at the end.

        with xrt.ptq_calibration_mode("ranges"):
            for x in batches:
                m(x)
        q = xrt.XRTModule("model.onnx", use_int8=True, int8_calibration="ranges")

    folder: made if need be; ranges that it holds already are widened. A body that raises writes nothing. The mode holds
    for all threads of the process. Raises QuantizationError where the folder cannot be written, or a mode is on.
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
    """The graph with all that depends on constants alone folded: a weight that is computed from others is a weight."""
    return ConstantFold(run_node, sys.maxsize)(graph)


def quantised_inputs(node: Node) -> list[Value]:
    """What a product multiplies, without its bias, as far as it is computed."""
    if node.op_type not in PRODUCTS or node.domain:
        return []
    return [v for v in node.inputs[:2] if v is not None and v.data is None]


def observers(graph: Graph) -> tuple[Graph, list[str]]:
    """A graph that gives the smallest and the largest element of each tensor that products read, and their names.

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
