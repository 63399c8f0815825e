"""Real models that ship inside pip packages, and onnx's light topologies, against ONNX Runtime."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest

from tests.conformance import dev_models
from xrt_core.module import XRTModule

ort = pytest.importorskip("onnxruntime", reason="the reference for whole models")

_CONTROL_FLOW = ("silero_vad",)
_QUANTISED = ("minilm_int8", "smart_turn")
_TIES = ("light_squeezenet",)  # a Softmax over a thousand logits that differ by rounding alone
_LIKE_OTHERS = ("light_bvlc_alexnet", "light_inception_v1", "light_vgg19", "light_zfnet512")  # of the same operators


def _cases() -> list[Any]:
    """Model, inputs, engine; by night those that show nothing that another does not."""
    return [
        pytest.param(n, v, e, marks=[pytest.mark.nightly] if n in _LIKE_OTHERS or (e == "xla" and v) else [])
        for n in dev_models.names()
        for v in ((0,) if n.startswith("light_") else (0, 1))
        for e in ("xla", "host")
    ]


def _model(name: str, variant: int) -> tuple[str, dict[str, np.ndarray], Any]:
    try:
        path = str(dev_models.path(name))
    except PackageNotFoundError as e:
        pytest.skip(f"package {e} is not installed (see models.txt)")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = dev_models.inputs_for(name, variant)
    names = [i.name for i in session.get_inputs()]
    inputs = dict(zip(names, given.values(), strict=False)) if name.startswith("light_") else given
    return path, inputs, session


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant", "engine"), _cases())
def test_agrees_with_onnxruntime(name: str, variant: int, engine: str) -> None:
    """Every development model gives ONNX Runtime's results on XLA and on the host; XLA takes nearly all nodes."""
    if engine == "xla":
        pytest.importorskip("xrt_xla", reason="the XLA engine is not installed")
    path, inputs, session = _model(name, variant)
    module = XRTModule(path, engine=engine)

    results = module.run(inputs)

    tolerance = dev_models.MODELS[name][3] if name in dev_models.MODELS else 1e-3
    for (label, got), want in zip(results.items(), session.run(None, inputs), strict=True):
        assert got.dtype == want.dtype, label
        assert got.shape == want.shape, label
        if name not in _TIES:
            wide = want.astype(np.float64)
            scale = max(float(np.ptp(wide)), float(np.abs(wide).max()), 1e-12)
            assert float(np.abs(got.astype(np.float64) - wide).max()) <= tolerance * scale, label
    if engine == "xla" and name not in _CONTROL_FLOW + _QUANTISED:
        assert module.explain().node_share >= 0.95
