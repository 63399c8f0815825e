"""ConformanceSuite: everything that the kit asks of an engine, in one class to derive from."""

from __future__ import annotations

from xrt_core.testing.contract_tests import ContractTests
from xrt_core.testing.execution_tests import ExecutionTests
from xrt_core.testing.operator_tests import OperatorTests


class ConformanceSuite(ContractTests, ExecutionTests, OperatorTests):
    """Derive from it and name the engine; pytest collects the rest. See `SuiteBase` for the answers to give."""
