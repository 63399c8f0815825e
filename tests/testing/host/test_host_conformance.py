"""The host as an engine against the conformance kit, whose reference it is."""

from __future__ import annotations

import pytest

from xrt_core.testing import ConformanceSuite, HostEngine

pytestmark = pytest.mark.slow


class TestHost(ConformanceSuite):
    """Every operator that is static and numeric; unsupported.txt says which are not."""

    engine = HostEngine
    complete = True
