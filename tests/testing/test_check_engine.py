"""`xrt check-engine`: scores by family and dtype, planted faults, mutated models, pages and badges."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from xrt_core.cli.app import application
from xrt_core.engine import EngineStatus, engines
from xrt_core.module import XRTModule
from xrt_core.testing import HostEngine, faults, functions
from xrt_core.testing.card_page import badge, badges, card_page, failed
from xrt_core.testing.operator_claims import Claims, dtype_of
from xrt_core.testing.planted import planted
from xrt_core.testing.robustness_tests import IN_PROCESS
from xrt_core.testing.scorecard import ScoreCard, family_of

LEFT = 30.0
HOST = "xrt_core.testing.host_engine:HostEngine"


@pytest.fixture
def card() -> ScoreCard:
    """One operator passed, one failed, one refused, one contract test failed."""
    made = ScoreCard("acme", "1.0", "cpu")
    claims = Claims(offered=Counter(float32=4, int8=2), taken=Counter(float32=3))
    claims.refused["onnx/a"] = ("Exp", "no <exp>")
    made.claim(claims)
    made.add("Relu", "onnx/relu", "passed", "float32")
    made.add("Conv", "onnx/conv", "failed", "float32")
    made.add("", "test_it", "failed")
    made.contract["test_it[a]"] = "failed"
    made.reasons |= {"onnx/conv": "differs & more", "test_it[a]": "it \x1b[2J is wrong"}
    return made


def test_scores_by_family_and_dtype(card: ScoreCard) -> None:
    """Of each family and dtype: what the kit has, what is taken, and what passed; one figure for all operators."""
    assert card.score == pytest.approx(1 / 3)
    assert card.families() == {
        "activation": {"operators": 1, "taken": 1, "passed": 1},
        "convolution": {"operators": 1, "taken": 1, "passed": 0},
        "elementwise": {"operators": 1, "taken": 0, "passed": 0},
    }
    assert card.by_dtype() == {
        "float32": {"cases": 4, "taken": 3, "run": 2, "passed": 1},
        "int8": {"cases": 2, "taken": 0, "run": 0, "passed": 0},
    }
    assert family_of("ai.onnx.ml.Scaler") == "features"
    assert family_of("NoSuchOperator") == "other"


def test_what_a_case_is_about() -> None:
    """The first floating input, else the first input, else the output."""
    from xrt_core.testing.node_cases import Case

    def of(*inputs: Any, outputs: Any = ()) -> str:
        return dtype_of(Case("", None, list(inputs), list(outputs), 0.0, 0.0))  # type: ignore[arg-type]

    assert of(np.int64(1), np.float16(1)) == "float16"
    assert of(None, np.bool_(1)) == "bool"
    assert of(outputs=[np.int8(1)]) == "int8"


def test_the_page_and_the_badges(card: ScoreCard) -> None:
    """Failures and refusals with their reasons, well-formed and escaped; badges say the share, and that tests fail."""
    data = json.loads(json.dumps(card.as_dict()))
    page = card_page(data)
    root = ElementTree.fromstring(page.partition("\n")[2])
    rows = ["|".join("".join(c.itertext()) for c in r) for r in root.iter("tr")]
    assert "Exp|no <exp>" in rows
    assert "onnx/conv|differs & more" in rows
    assert r"test_it[a]|failed|it \x1b[2J is wrong" in rows
    assert "http" not in page
    assert failed(data) == ["test_it[a]", "onnx/conv"]
    made = badges(data)
    assert "XRT operators: 33%" in made["operators.svg"]
    assert "XRT conformance: 2 failed" in made["conformance.svg"]
    for svg in (*made.values(), badge("a<b", "&", "#000")):
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("fault", IN_PROCESS)
def test_planted_faults_are_faults(fault: str) -> None:
    """Without the guard's verification each fault is seen: results differ from the host's, or the engine is lost."""
    function, x = functions.chain()
    want = XRTModule(function.body, engine="host")(x)
    kind = planted(HostEngine, fault)
    assert kind.name == f"host_reference__{fault}"
    engines.register(kind)
    try:
        with XRTModule(function.body, engine=kind.name, guard=False, prune=False, cache=False) as m:
            same = np.array_equal(m(x), want)
            assert not same or m.explain().errors or m.explain().lost
    finally:
        engines.unregister(kind.name)


def test_planted_classes_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's worker gets them as attributes of the module; others are no attributes."""
    from xrt_core.testing import planted as module

    engines.register(HostEngine)
    try:
        found = module.host_reference__zero_numbers  # type: ignore[attr-defined]
        assert issubclass(found, HostEngine)
        assert found is planted(HostEngine, "zero_numbers")
    finally:
        engines.unregister(HostEngine.name)
    for name in ("host_reference__zero_numbers", "xla__no_fault", "zero_numbers"):
        with pytest.raises(AttributeError, match="it has ENGINE__FAULT"):
            getattr(module, name)


def check(*arguments: object) -> Any:
    """Run the command."""
    return CliRunner().invoke(application("check-engine"), ["check-engine", *map(str, arguments)])


def test_what_is_no_engine_is_refused(tmp_path: pathlib.Path) -> None:
    """A name that is neither an engine nor a package is answered with those that there are."""
    done = check("no-such-engine")
    assert done.exit_code == 2
    assert "'no-such-engine' is no installed engine and no package that brings one; there is:" in done.output
    assert "there is no such folder" in check(HOST, "--lists", tmp_path / "none").output


@pytest.mark.slow
def test_the_command(tmp_path: pathlib.Path) -> None:
    """The host as an engine passes with its lists, and every output is written."""
    lists = pathlib.Path(__file__).with_name("host")
    files = ("--report", tmp_path / "c.json", "--html", tmp_path / "c.html", "--badges", tmp_path / "b", "--fuzz", 0)
    done = check(HOST, "--lists", lists, *files)
    assert done.exit_code == 0, done.output
    assert "operators are taken, and pass" in done.output
    card = json.loads((tmp_path / "c.json").read_text())
    assert card["families"]["activation"]["passed"] == card["families"]["activation"]["operators"]
    assert card["dtypes"]["float32"]["passed"] > 300
    assert card["contract"]["test_a_planted_fault_costs_nothing_but_speed[wrong_numbers]"] == "passed"
    assert "NonZero" in (tmp_path / "c.html").read_text()
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["conformance.svg", "operators.svg"]


@pytest.mark.nightly
def test_a_faulty_engine_fails(tmp_path: pathlib.Path) -> None:
    """Exit code 1, with each failure and its reason; JSON goes to stdout alone."""
    done = check(f"{faults.__name__}:{faults.ZeroNumbers.__name__}", "--fuzz", 0, "--json")
    assert done.exit_code == 1
    card = json.loads(done.stdout)
    assert card["operators"]["Exp"]["state"] == "failed"
    assert card["score"] < 0.5
    assert any("differ" in r or "not" in r.lower() for k, r in card["reasons"].items() if k.startswith("onnx/"))


class Leaves(HostEngine):
    """It cannot be used, and leaves a process behind that has the output of its parent."""

    name = "leaves"

    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def probe(self) -> EngineStatus:
        if not self.left:
            self.left.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LEFT})"]))
        return EngineStatus(False, reason="it only leaves things behind", remedy="none")


@pytest.mark.slow
def test_what_an_engine_leaves_running_is_not_waited_for() -> None:
    """The command ends with its tests; the reason why the engine cannot be used is said."""
    start = time.monotonic()
    done = check(f"{__name__}:{Leaves.__name__}", "--fuzz", 0)
    assert time.monotonic() - start < LEFT
    assert done.exit_code == 2
    assert "it only leaves things behind" in done.output


class Hangs(HostEngine):
    """Its probe does not come back."""

    name = "hangs"

    def probe(self) -> EngineStatus:
        time.sleep(3600)
        raise AssertionError


@pytest.mark.slow
def test_an_engine_that_hangs_is_ended() -> None:
    """The tests are ended after the time that they have, with the way to give them more."""
    done = check(f"{__name__}:{Hangs.__name__}", "--fuzz", 0, "--timeout", 3)
    assert done.exit_code == 2
    assert "have not ended within 3 s; --timeout gives them longer" in done.output


@pytest.mark.slow
def test_an_engine_that_cannot_be_used_is_an_error() -> None:
    """Nothing is scored where the engine is not there."""
    done = check("xrt_core.testing.faults:NoSuchEngine", "--fuzz", 0)
    assert done.exit_code == 2
    assert "cannot be tested here" in done.output
