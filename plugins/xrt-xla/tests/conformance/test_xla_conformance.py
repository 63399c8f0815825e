"""XLA against the conformance kit."""

from __future__ import annotations

from xrt_core.testing import Capabilities, ConformanceSuite


class TestXla(ConformanceSuite):
    """It takes every operator that is static and numeric; unsupported.txt says which are not."""

    engine = "xla"
    complete = True
    capabilities = Capabilities(serialisation=True, in_place=True)
