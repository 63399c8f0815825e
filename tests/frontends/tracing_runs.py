"""Traces a function, runs the exported model with an independent runtime, and gives the nested result back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from xrt_core.frontends.graph import Graph, as_type, bind, trace_call
from xrt_core.frontends.onnx_export import export_model


def traced_run(graph: Graph | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the traced graph computes for these arguments, in the structure that `build` returned.

    The reference evaluator of the onnx package runs it.
    """
    return _run(graph, args, kwargs, lambda model, feeds: ReferenceEvaluator(model).run(None, feeds))


def onnxruntime_run(function: Callable[..., Any], *args: Any) -> Any:
    """The same through ONNX Runtime, at an opset that it knows: for what the reference evaluator gets wrong."""
    ort = pytest.importorskip("onnxruntime")

    class Pinned(Graph):
        opset = 21

        def build(self, *tensors: Any) -> Any:
            return function(*tensors)

    def run(model: Any, feeds: dict[str, np.ndarray]) -> Any:
        model.ir_version = min(model.ir_version, 10)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, feeds)

    return _run(Pinned(), args, {}, run)


def _run(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any], execute: Callable[..., Any]) -> Any:
    call = bind(graph, args, kwargs)
    traced = trace_call(graph, [as_type(a) for a in call.arrays], call.layout, call.names)
    feeds = {n: np.asarray(a) for n, a in zip(call.names, call.arrays, strict=True)}
    results = execute(export_model(traced.graph), feeds)
    for value, array in zip(traced.graph.outputs, results, strict=True):
        assert value.dtype in (None, np.asarray(array).dtype), f"{value}: traced as {value.dtype}, is {array.dtype}"
        known = [d for d in zip(value.shape or (), np.shape(array), strict=False) if isinstance(d[0], int)]
        assert all(a == b for a, b in known), f"{value} was traced in another shape than {np.shape(array)}"
    return traced.structure.rebuild(results)
