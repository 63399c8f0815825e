"""The kit finds every fault that it ships, with the tests that are meant to find it."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.engine.packages import add_package
from tests.testing.kit_runs import failing
from xrt_core.engine.manager import EngineManager
from xrt_core.errors import PluginError, RegistrationError
from xrt_core.plugins.discovery import Discovery
from xrt_core.testing import HostEngine, faults
from xrt_core.testing.execution_tests import ExecutionTests
from xrt_core.testing.operator_claims import claims_of
from xrt_core.testing.operator_tests import OperatorTests
from xrt_core.testing.reference import reference
from xrt_core.testing.subject import Subject, spec_of

FOUND_BY = {
    faults.RaisesAtCompile: {"test_compiles", "test_a_failed_compilation_is_an_error_of_the_engine"},
    faults.RaisesAtRun: {"test_results_are_as_declared", "test_bad_input_is_an_execution_error"},
    faults.RaisesInSupports: {"test_refuses_with_a_reason"},
    faults.WrongNumbers: {"test_a_whole_graph_through_xrt", "test_updates_in_a_row"},
    faults.ZeroNumbers: {"test_a_whole_graph_through_xrt", "test_results_feed_the_next_run"},
    faults.Unsteady: {"test_repeated_runs_are_bitwise_equal"},
    faults.NoExecutable: {"test_compiles"},
    faults.WrongCount: {"test_results_are_as_declared"},
    faults.WrongShape: {"test_results_are_as_declared"},
    faults.WrongDtype: {"test_results_are_as_declared"},
    faults.WritesInputs: {"test_inputs_are_never_modified", "test_any_layout_of_an_input"},
    faults.ReusesResults: {"test_results_never_share_storage_with_later_ones"},
    faults.ReturnsInputs: {"test_nothing_is_aliased_unasked"},
}


def test_the_host_fails_nothing() -> None:
    """Without a fault, every test that is run here passes."""
    assert failing(HostEngine) == {}


@pytest.mark.parametrize("fault", FOUND_BY, ids=lambda f: f.name)
def test_every_fault_is_found(fault: type[faults.Faulty]) -> None:
    """The tests that are about the fault fail."""
    assert failing(fault).keys() >= FOUND_BY[fault]


def test_a_narrow_fault_leaves_the_rest_alone() -> None:
    """Memory that is used again is found by tests of results, not by those of compiling, bad input or threads."""
    failed = failing(faults.ReusesResults).keys()

    assert failed <= {n for n in dir(ExecutionTests) if n.startswith("test_")}
    assert "test_bad_input_is_an_execution_error" not in failed


@pytest.mark.slow
def test_a_leak_is_found() -> None:
    """A thousand kept results are seen, and how much they are is said."""
    assert "have grown the process by" in failing(faults.Leaks, "test_memory_stays_level")["test_memory_stays_level"]
    assert failing(HostEngine, "test_memory_stays_level") == {}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [faults.WrongNumbers, faults.ZeroNumbers], ids=lambda f: f.name)
def test_wrong_numbers_fail_the_cases(fault: type[faults.Faulty]) -> None:
    """Doubled results and zeros fail every generated case whose results they change."""
    subject = Subject(spec_of(fault))
    claims = claims_of(subject, False)
    found = 0
    for claimed in claims.generated:
        wanted = [r.astype(p.dtype) for r, p in zip(
            reference(claimed.case.node, claimed.case.inputs), claimed.function.returns, strict=True
        )]  # fmt: skip
        spoilt = subject.engine.on_run(lambda results=wanted: results, [])  # type: ignore[attr-defined]
        # zeros, infinities, NaN and empty tensors may be what they were; a tiny number is hidden by rounding
        if not any(_differ(a, b) for a, b in zip(wanted, spoilt, strict=True)):
            continue
        found += 1
        with pytest.raises(AssertionError, match="output"):
            OperatorTests().test_generated_case(subject, claimed)
    assert found > 350


def _differ(want: np.ndarray, spoilt: np.ndarray) -> bool:
    a, b = want.astype(np.float64), spoilt.astype(np.float64)
    with np.errstate(all="ignore"):
        near = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) < 1e-6)
    return not near.all()


def test_a_wrong_api_version_is_refused() -> None:
    """The engine does not come as far as its tests."""
    with pytest.raises(RegistrationError, match="written for engine API 99"):
        Subject(spec_of(faults.WrongApiVersion))


def test_a_failing_import_is_a_broken_plugin(tmp_path: pathlib.Path) -> None:
    """The module of FAULTY_IMPORT raises its cause, which whoever asks for the engine by name is told."""
    add_package(tmp_path, "xrt-faulty", "", engine="faulty", target=faults.FAULTY_IMPORT)
    manager = EngineManager(Discovery("0.1.0", [str(tmp_path)]))
    with pytest.raises(PluginError, match="libfaulty.so.1") as error:
        manager.get("faulty")
    assert isinstance(error.value.__cause__, ImportError)
