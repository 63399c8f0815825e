"""The operators of an engine on devices whose arrays NumPy cannot read, against the conformance kit."""

from __future__ import annotations

import pytest

from tests.npu import NpuEngine
from xrt_core.testing.operator_tests import OperatorTests

pytestmark = pytest.mark.slow


class TestNpuOperators(OperatorTests):
    """Every operator; the engine computes with the host's kernels, so transfers are what this tests."""

    engine = NpuEngine
