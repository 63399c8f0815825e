"""Models before and after the fusions of onnxscript for ONNX Runtime: XRT gives the same for both."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt

ir = pytest.importorskip("onnx_ir", reason="onnxscript stands on it")
pytest.importorskip("onnxscript.rewriter.ort_fusions", reason="it writes the models")

MODELS = {
    "smollm_1": ("_smollm_1", "smollm_test_1"),
    "smollm_2": ("_smollm_2", "smollm_test_2"),
    "whisper encoder": ("_whisper_encoder", "whisper_encoder_test"),
    "whisper decoder": ("_whisper_decoder", "whisper_decoder_test"),
    "bart encoder": ("_bart_encoder", "bart_encoder_test"),
    "rotary": ("_rotary_embedding_models", "test_case_1"),
    "rotary of one row": ("_rotary_embedding_models", "test_case_2"),
    "rotary of a part": ("_rotary_embedding_models", "partial_rotary_test_case"),
}
"""Name -> module of onnxscript's own models, and its function. Those of Phi come without inputs, and are large."""
BY_DAY = ("rotary of a part",)
ENGINES = [e for e in ("host", "xla", "onnxruntime") if e == "host" or importlib.util.find_spec(f"xrt_{e}")]


def _case(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    module, function = MODELS[name]
    found: Callable[[], Any] = getattr(importlib.import_module(f"onnxscript.rewriter.models.{module}"), function)
    case = found()
    return case.get_onnx_model(), case.get_ort_inputs()


def _domains(proto: Any) -> set[str]:
    return {n.op_type for n in proto.graph.node if n.domain == "com.microsoft"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DAY else pytest.mark.nightly) for n in MODELS])
def test_before_and_after(name: str) -> None:
    """The fused model has operators of com.microsoft, and the results of the one that has none."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, inputs = _case(name)
    before = ir.serde.serialize_model(model)
    fused, counts = optimize_for_ort(ir.serde.deserialize_model(before))
    after = ir.serde.serialize_model(fused)
    assert not _domains(before)
    assert _domains(after), counts
    wanted = xrt.XRTModule(before, engine="host", cache="off").run(inputs)
    for engine in ENGINES:
        found = xrt.XRTModule(after, engine=engine, cache="off").run(inputs)
        for k, a in wanted.items():
            size = max(1.0, float(np.abs(a).max()))
            np.testing.assert_allclose(found[k] / size, a / size, rtol=1e-4, atol=1e-4, err_msg=f"{k} on {engine}")
