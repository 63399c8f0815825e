"""The ONNX backend node tests, run through XRT one by one, with what became of each."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner, _normalize_tensor

from xrt_core.ir.types import STRING, TensorType
from xrt_core.onnx_backend import XRTBackend


@dataclass(frozen=True)
class Outcome:
    """One test: whether it passed (else `error`), whether all its values are numeric tensors of static shape, and
    which operators the host ran."""

    name: str
    operator: str
    passed: bool
    error: str
    static: bool
    host: tuple[str, ...]
    reasons: tuple[str, ...]


@cache
def node_tests() -> dict[str, Any]:
    """Every node test of the installed onnx by name."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return {t.name: t for t in load_model_tests(kind="node")}


def run_test(test: Any, engine: list[str] | str) -> Outcome:
    """Run one test as ONNX's own runner does, and see where its nodes ran."""
    operator = _operator(test)
    host: dict[str, None] = {}
    reasons: dict[str, None] = {}
    try:
        prepared = XRTBackend.prepare(test.model, engine=engine)
        for inputs, expected in test.data_sets:
            results = prepared.run([_normalize_tensor(x) for x in inputs])
            with np.errstate(all="ignore"):
                Runner.assert_similar_outputs(
                    [_normalize_tensor(x) for x in expected], list(results), rtol=test.rtol, atol=test.atol
                )
            _collect(prepared.module.explain(), host, reasons)
    except Exception as e:  # the report wants every failure, whatever it is
        return Outcome(test.name, operator, False, f"{type(e).__name__}: {e}", _is_static(test), (), ())
    return Outcome(test.name, operator, True, "", _is_static(test), tuple(host), tuple(reasons))


def _collect(explanation: Any, host: dict[str, None], reasons: dict[str, None]) -> None:
    for n in explanation.report.host_nodes:
        host[n.operator] = None
        reasons[n.reason] = None
    for message in explanation.errors.values():
        host["(failed to compile)"] = None
        reasons[message] = None
    for parts in explanation.nested.values():
        for part in parts:
            _collect(part, host, reasons)


def _operator(test: Any) -> str:
    nodes = test.model.graph.node
    if "_expanded" in test.name or len(nodes) != 1:
        return f"({'function body' if '_expanded' in test.name else 'several'})"
    return f"{nodes[0].domain}.{nodes[0].op_type}" if nodes[0].domain else nodes[0].op_type


def _is_static(test: Any) -> bool:
    """Whether the test has only numeric tensors, of shapes that do not depend on data, and no control flow."""
    from xrt_core.frontends.onnx_import import import_model
    from xrt_core.kernels import find_kernel

    graph = import_model(test.model)
    values = [*graph.inputs, *graph.outputs, *(v for n in graph.nodes for v in (*n.inputs, *n.outputs) if v)]
    for v in values:
        if v.type is not None and (not isinstance(v.type, TensorType) or v.type.dtype == STRING):
            return False
    for n in graph.nodes:
        found = find_kernel(n.domain, n.op_type)
        if n.subgraphs or (found is not None and found.why_dynamic(n) is not None):
            return False
        if n.op_type in ("ImageDecoder", "StringSplit", "SequenceEmpty", "Optional", "OptionalHasElement"):
            return False
    return True
