"""An engine on devices whose arrays NumPy cannot read against the conformance kit.

The kit moves its inputs to the device, and reads results, by the device kind's functions alone.
"""

from __future__ import annotations

from tests.npu import NpuEngine
from xrt_core.testing.contract_tests import ContractTests
from xrt_core.testing.execution_tests import ExecutionTests


class TestNpu(ContractTests, ExecutionTests):
    """The contract, transfers, runs, aliases, threads, memory and serialisation."""

    engine = NpuEngine
