"""ONNX Runtime against the conformance kit."""

from __future__ import annotations

from xrt_core.testing import Capabilities, ConformanceSuite


class TestOnnxRuntime(ConformanceSuite):
    """It takes what the library has a CPU kernel for; where its results differ from ONNX's, `supports` refuses."""

    engine = "onnxruntime"
    capabilities = Capabilities(serialisation=True, in_place=False)
