"""Development models on several engines at once: in every order, and with their operators dealt out among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest

from tests.conformance import dev_models
from tests.conformance.host_results import model_on_host
from xrt_core.ir.graph import Graph
from xrt_core.module import XRTModule

for _engine in ("onnxruntime", "openvino", "xla"):
    pytest.importorskip(f"xrt_{_engine}", reason=f"the engine {_engine} is not installed")
for _library in ("jax", "onnxruntime", "openvino"):
    pytest.importorskip(_library, reason="an engine's library is not installed")

_ORDERS: Final = (
    ["xla", "onnxruntime"],
    ["onnxruntime", "xla"],
    ["openvino", "xla"],
    ["xla", "onnxruntime", "openvino"],
)
_LINEAR: Final = frozenset(("Conv", "ConvTranspose", "Gemm", "LSTM", "MatMul"))
_POINTWISE: Final = frozenset(("Add", "Mul", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh"))
_THIRD: Final = frozenset(("Concat", "GlobalAveragePool", "ReduceMean", "Reshape", "Softmax"))
# nearly every operator is a cluster of its own here, and XLA takes 50 ms to compile each
_DEALT: Final = (
    pytest.param("silero_vad_sequence", {"onnxruntime": _LINEAR, "xla": _POINTWISE}, id="silero-two"),
    pytest.param("silero_vad_sequence", {"xla": _LINEAR, "onnxruntime": _POINTWISE}, id="silero-two-swapped"),
    pytest.param(
        "ppocr_cls",
        {"openvino": _LINEAR, "onnxruntime": _POINTWISE, "xla": _THIRD},
        id="ppocr_cls-three",
        marks=pytest.mark.slow,
    ),
)
_INEXACT: Final = ("basic_pitch", "minilm_int8")  # have nodes that OpenVINO computes otherwise than ONNX says
_TIES: Final = ("light_squeezenet",)  # a Softmax over a thousand logits that differ by rounding alone


def _check(name: str, graph: Graph, engines: Sequence[str]) -> XRTModule:
    _, inputs, wanted = model_on_host(name)
    module = XRTModule(graph, engine=list(engines))
    results = module.run(inputs)
    tolerance = dev_models.MODELS[name][3] if name in dev_models.MODELS else 1e-3
    for label, want in wanted.items():
        got = results[label]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), label
        if name not in _TIES:
            wide = want.astype(np.float64)
            scale = max(float(np.ptp(wide)), float(np.abs(wide).max()), 1e-12)
            assert float(np.abs(got.astype(np.float64) - wide).max()) <= tolerance * scale, label
    return module


def _ordered() -> list[Any]:
    """Every model with every order by night; by day all orders of two models, and one order of each other."""
    return [
        pytest.param(name, engines, id=f"{name}-{'-'.join(engines)}", marks=_by_day(name, k == i % len(_ORDERS)))
        for i, name in enumerate(dev_models.names())
        for k, engines in enumerate(_ORDERS)
    ]


def _by_day(name: str, chosen: bool) -> Any:
    if name == "silero_vad_sequence":
        return ()
    return pytest.mark.slow if chosen or name == "ppocr_cls" else pytest.mark.nightly


@pytest.mark.parametrize(("name", "engines"), _ordered())
def test_in_every_order(name: str, engines: list[str]) -> None:
    """Whoever comes first takes what it can, the next what is left; the results are the host's."""
    module = _check(name, model_on_host(name)[0], engines)
    explanation = module.explain()
    used = {c.engine for c in explanation.report.clusters}
    assert used == ({engines[0], "xla"} if engines[0] == "openvino" and name in _INEXACT else {engines[0]})
    assert explanation.node_share >= 0.99
    assert not explanation.errors


@pytest.mark.parametrize(("name", "dealt"), _DEALT)
def test_with_the_operators_dealt_out(name: str, dealt: Mapping[str, frozenset[str]]) -> None:
    """Operators are marked for one engine each, so that values cross between engines all over the model."""
    graph = model_on_host(name)[0]
    engine_of = {op_type: engine for engine, types in dealt.items() for op_type in types}
    nodes = [
        n.replace(annotations=n.annotations.replace(engine=engine_of[n.op_type]))
        if not n.domain and n.op_type in engine_of and _is_float(n.outputs[0])
        else n
        for n in graph.nodes
    ]
    module = _check(name, graph.replace(nodes=nodes), list(dealt))
    explanation = module.explain()
    assert {c.engine for c in explanation.report.clusters} == set(dealt)
    assert not explanation.errors


def _is_float(value: Any) -> bool:
    return value is not None and value.dtype in (None, np.float32)
