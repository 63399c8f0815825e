"""The conformance kit on this engine; where there is no GPU, what needs one is skipped."""

from __future__ import annotations

from xrt_core.testing import Capabilities, ConformanceSuite


class TestTensorRT(ConformanceSuite):
    """Written against TensorRT's documentation: no list of exceptions has been made on a GPU yet."""

    engine = "tensorrt"
    capabilities = Capabilities(
        serialisation=True,
        in_place=False,  # two arrays swap roles
        toolkit=("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings", "cuda"),
    )
