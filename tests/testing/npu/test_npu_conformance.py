"""An engine on devices whose arrays NumPy cannot read against the conformance kit.

The kit moves its inputs to the device, and reads results, by the device kind's functions alone.
"""

from __future__ import annotations

import pytest

from tests.npu import NpuEngine
from xrt_core.testing.contract_tests import ContractTests
from xrt_core.testing.execution_tests import ExecutionTests
from xrt_core.testing.operator_tests import OperatorTests


class TestNpu(ContractTests, ExecutionTests):
    """The contract, transfers, runs, aliases, threads, memory and serialisation."""

    engine = NpuEngine


@pytest.mark.slow
class TestNpuOperators(OperatorTests):
    """Every operator; the engine computes with the host's kernels, so transfers are what this tests."""

    engine = NpuEngine
