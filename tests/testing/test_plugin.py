"""The kit as its users run it: options, the two lists, the score card, and what it costs those who do not use it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import xrt_core.testing.suite  # noqa: F401 - what runs in this process must not be imported anew each time
from xrt_core.testing.node_cases import all_cases
from xrt_core.testing.scorecard import ScoreCard

pytest_plugins = ["pytester"]

INSTALLED = [e.name for e in entry_points(group="pytest11") if e.value == "xrt_core.testing.plugin"]
KIT = ("-p", "no:cacheprovider", *(() if INSTALLED else ("-p", "xrt_core.testing.plugin")))
FEW = "Relu or supports or refusals"
SUITE = """
from xrt_core.testing import ConformanceSuite

class TestIt(ConformanceSuite):
    engine = "xrt_core.testing.faults:{fault}"
"""


@pytest.fixture(scope="module")
def _cases_at_hand() -> None:
    """The backend tests are made once, which takes seconds: the runs below are in this process."""
    all_cases()


takes_cases = pytest.mark.usefixtures("_cases_at_hand")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest with the kit, whether or not the package's entry point is installed."""
    return pytester.runpytest_inprocess(*KIT, *arguments)


@pytest.mark.slow
@takes_cases
def test_an_engine_by_name(pytester: pytest.Pytester) -> None:
    """`--xrt-engine` with `--pyargs xrt_core.testing` runs the kit; the card is in the terminal and in the file."""
    spec = "xrt_core.testing.host_engine:HostEngine"
    result = run(
        pytester,
        "--xrt-engine",
        spec,
        "--xrt-device",
        "cpu",
        "--pyargs",
        "xrt_core.testing",
        "-k",
        FEW,
        "--xrt-scorecard",
        "card.json",
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*XRT conformance*", "host_reference * on cpu", "*claimed*passed*failed*"])
    (card,) = json.loads((pytester.path / "card.json").read_text())["engines"]
    assert card["engine"] == "host_reference"
    assert card["operators"]["Relu"]["state"] == "passed"
    assert card["operators"]["Relu"]["passed"] >= 3
    assert card["operators"]["Conv"] == {"state": "not run"}
    assert card["operators"]["NonZero"]["state"] == "not claimed"
    assert "depends on the data" in card["operators"]["NonZero"]["reason"]
    assert card["summary"]["failed"] == 0
    assert card["summary"]["claimed"] > 150


def test_without_an_engine_everything_is_skipped(pytester: pytest.Pytester) -> None:
    """Nobody's tests break because the kit is installed, and the reason says what to give."""
    result = run(pytester, "--pyargs", "xrt_core.testing", "-rs")
    assert result.ret == 0
    assert "passed" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*give --xrt-engine NAME*"])


@pytest.mark.slow
@takes_cases
def test_two_lines_find_a_fault(pytester: pytest.Pytester) -> None:
    """A subclass of two lines is a suite; a wrong engine fails it, and its card names the operator."""
    pytester.makepyfile(SUITE.format(fault="WrongNumbers"))
    result = run(pytester, "-k", FEW, "--xrt-scorecard", "card.json")
    assert result.ret == 1
    (card,) = json.loads((pytester.path / "card.json").read_text())["engines"]
    assert card["operators"]["Relu"]["state"] == "failed"
    assert "onnx/test_relu" in card["failures"]
    result.stdout.fnmatch_lines(["failed: *Relu*"])


@pytest.mark.slow
@takes_cases
def test_expected_failures_are_strict(pytester: pytest.Pytester) -> None:
    """What xfails.txt lists must fail: then the run is good; where it passes, the run is bad and says so."""
    pytester.makepyfile(SUITE.format(fault="WrongNumbers"))
    pytester.makefile(".txt", xfails="onnx/test_relu: doubled\ntest_supports_is_quick: a lie\n")
    result = run(pytester, "-k", "test_relu or quick", "-rxf")
    result.assert_outcomes(xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*a lie*"])


@pytest.mark.nightly
@takes_cases
def test_unsupported_must_be_refused(pytester: pytest.Pytester) -> None:
    """An operator that is listed and taken, and a line about nothing, fail."""
    pytester.makepyfile(SUITE.format(fault="Unsteady"))
    pytester.makefile(".txt", unsupported="operator/NonZero: fine\noperator/Abs: not so\nonnx/test_gone: it went\n")
    result = run(pytester, "-k", "refusals")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*onnx/test_abs (Abs) is listed as unsupported (not so), and the engine takes it*",
         "*unsupported.txt:3: nothing is called 'onnx/test_gone'*"]
    )  # fmt: skip
    result.stdout.no_fnmatch_line("*unsupported.txt:1*")


@pytest.mark.slow
@takes_cases
def test_a_complete_suite_lists_every_refusal(pytester: pytest.Pytester) -> None:
    """`complete` makes a refusal without a line a failure, with the engine's own reason."""
    pytester.makepyfile(SUITE.format(fault="Unsteady") + "    complete = True\n")
    result = run(pytester, "-k", "refusals")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_nonzero_example (NonZero) is refused*the output's shape depends on the data*"])


@pytest.mark.slow
@takes_cases
def test_an_unavailable_engine_skips_and_a_broken_one_fails(pytester: pytest.Pytester) -> None:
    """Absent hardware is no failure; an engine that cannot say whether it takes a node is one."""
    pytester.makepyfile(
        """
        from xrt_core.engine import EngineStatus
        from xrt_core.testing import ConformanceSuite, HostEngine

        class Absent(HostEngine):
            name = "absent"

            def probe(self):
                return EngineStatus(False, reason="no such card", remedy="buy one")

        class TestAbsent(ConformanceSuite):
            engine = Absent

        class TestBroken(ConformanceSuite):
            engine = "xrt_core.testing.faults:RaisesInSupports"
        """
    )
    result = run(pytester, "-k", "compiles or onnx", "-rs")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*KeyError*"])
    result.stdout.fnmatch_lines(["*'absent' cannot be used here: no such card; buy one"])
    result.stdout.no_fnmatch_line("FAILED *TestAbsent*")


@pytest.mark.slow
@takes_cases
def test_the_sample_and_the_rest(pytester: pytest.Pytester) -> None:
    """By default a sample runs; --xrt-full and -m see the rest, which is marked slow."""
    pytester.makepyfile(SUITE.format(fault="Unsteady"))
    counts = []
    for arguments in ((), ("--xrt-full",), ("-m", "not slow"), ("-m", "slow")):
        result = run(pytester, "--collect-only", "-q", "-k", "case", *arguments)
        counts.append(sum("::TestIt::" in line for line in result.outlines))
    sample, full, fast, slow = counts
    assert 500 < sample < 1200
    assert fast == sample
    assert full == sample + slow > 4 * sample


def test_it_costs_nothing_unused() -> None:
    """Loading the plugin imports neither NumPy nor onnx nor any other part of the core."""
    code = (
        "import sys, pytest; before = set(sys.modules); import xrt_core.testing.plugin;"
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('xrt_core')))"
        ";print(*sorted(m for m in sys.modules if m.startswith('xrt_core')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign, own = done.stdout.split("\n")[:2]
    assert foreign == ""
    assert own.split() == ["xrt_core", "xrt_core.testing", "xrt_core.testing.plugin"]


def test_states_of_operators() -> None:
    """A failed case outweighs all others; what was claimed and not run is neither passed nor failed."""
    card = ScoreCard("it", claims={"A": "", "B": "", "C": "no kernel", "D": ""})
    for operator, outcome in (("A", "passed"), ("A", "failed"), ("B", "passed"), ("B", "skipped"), ("", "passed")):
        card.add(operator, f"onnx/{operator}", outcome)  # type: ignore[arg-type]
    assert card.operators == {"A": "failed", "B": "passed", "C": "not claimed", "D": "not run"}
    assert card.summary() == {
        "claimed": 3, "passed": 1, "failed": 1, "xfailed": 0, "not run": 1, "not claimed": 1
    }  # fmt: skip
    assert card.failures == ["onnx/A"]
    assert card.tests == {"passed": 1}
