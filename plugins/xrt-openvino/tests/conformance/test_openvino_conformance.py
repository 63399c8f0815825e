"""OpenVINO against the conformance kit."""

from __future__ import annotations

from xrt_core.testing import Capabilities, ConformanceSuite


class TestOpenVino(ConformanceSuite):
    """It takes float32, and integers where they are moved or index; `supports` refuses the rest."""

    engine = "openvino"
    capabilities = Capabilities(serialisation=True, in_place=False)
