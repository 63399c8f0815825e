"""The score card: operators claimed, passed, failed and not claimed, as a table in the terminal and as JSON."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import pytest

from xrt_core.kernels import find_kernel
from xrt_core.testing.operator_claims import Claims

PROPERTY: Final = "xrt_conformance"
"""Name of the user property by which a test says which engine, operator, key and dtype it is about."""

_LONGEST: Final = 400  # characters of a reason

Outcome = Literal["passed", "failed", "xfailed", "skipped"]


@dataclass
class ScoreCard:
    """What one engine has shown.

    claims: operator -> "" where the engine takes a case of it, else its reason for refusing. offered, taken: dtype ->
    number of the kit's cases of it, and of those that the engine takes. The cases and tests that ran are counted by
    `add`: by operator, and by dtype. contract: test that is about no operator -> its outcome. reasons: failed or
    skipped test -> why.
    """

    engine: str
    version: str = ""
    device: str = ""
    claims: dict[str, str] = field(default_factory=dict)
    offered: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    cases: dict[str, Counter[str]] = field(default_factory=dict)
    dtypes: dict[str, Counter[str]] = field(default_factory=dict)
    tests: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    contract: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def claim(self, claims: Claims) -> None:
        """Take down what the engine takes and refuses."""
        self.claims.update(claims.operators)
        self.offered, self.taken = claims.offered, claims.taken

    def add(self, operator: str, key: str, outcome: Outcome, dtype: str = "") -> None:
        """Count the outcome of one test; operator, dtype: "" for a test of the contract."""
        if operator:
            self.cases.setdefault(operator, Counter())[outcome] += 1
            self.dtypes.setdefault(dtype, Counter())[outcome] += 1
        else:
            self.tests[outcome] += 1
        if outcome == "failed":
            self.failures.append(key)

    def state(self, operator: str) -> str:
        """ "failed" (a case), "passed" (all that ran), "xfailed" (a known failure), "not run" or "not claimed"."""
        counted = self.cases.get(operator, Counter())
        for outcome in ("failed", "xfailed", "passed"):
            if counted.get(outcome):
                return outcome
        return "not claimed" if self.claims.get(operator) else "not run"

    @property
    def operators(self) -> dict[str, str]:
        """Every operator there are cases of -> its state."""
        return {o: self.state(o) for o in sorted({*self.claims, *self.cases})}

    @property
    def score(self) -> float:
        """Share of the kit's operators that the engine takes, and of which every case that ran has passed."""
        states = list(self.operators.values())
        return states.count("passed") / len(states) if states else 0.0

    def families(self) -> dict[str, dict[str, int]]:
        """Family of operators (`family_of`) -> numbers of operators: of the kit, taken, passed."""
        found: dict[str, dict[str, int]] = {}
        for operator, state in self.operators.items():
            row = found.setdefault(family_of(operator), {"operators": 0, "taken": 0, "passed": 0})
            row["operators"] += 1
            row["taken"] += state != "not claimed"
            row["passed"] += state == "passed"
        return dict(sorted(found.items()))

    def by_dtype(self) -> dict[str, dict[str, int]]:
        """Dtype -> numbers of cases: of the kit, taken, run, passed."""
        return {
            d: {
                "cases": count,
                "taken": self.taken[d],
                "run": sum(n for o, n in self.dtypes.get(d, Counter()).items() if o != "skipped"),
                "passed": self.dtypes.get(d, Counter())["passed"],
            }
            for d, count in sorted(self.offered.items())
        }

    def summary(self) -> dict[str, int]:
        """Numbers of operators by state, and "claimed"."""
        states = Counter(self.operators.values())
        counts = {s: states[s] for s in ("passed", "failed", "xfailed", "not run", "not claimed")}
        return {"claimed": sum(states.values()) - states["not claimed"], **counts}

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "engine": self.engine,
            "version": self.version,
            "device": self.device,
            "score": self.score,
            "summary": self.summary(),
            "families": self.families(),
            "dtypes": self.by_dtype(),
            "tests": dict(self.tests),
            "operators": {
                o: {"state": s, **({"reason": self.claims[o]} if s == "not claimed" else dict(self.cases.get(o, {})))}
                for o, s in self.operators.items()
            },
            "failures": self.failures,
            "contract": self.contract,
            "reasons": self.reasons,
        }

    def lines(self) -> Iterator[str]:
        """The table."""
        cases = sum(self.cases.values(), Counter[str]())
        yield f"{self.engine} {self.version} on {self.device or 'no device'}"
        columns = ("claimed", "passed", "failed", "xfailed", "not run", "not claimed")
        yield f"{'':10}" + "".join(f"{c:>13}" for c in columns)
        summary = self.summary()
        yield f"{'operators':10}" + "".join(f"{summary[c]:>13}" for c in columns)
        for name, counts in (("cases", cases), ("contract", self.tests)):
            row: Mapping[str, Any] = {**counts, "not run": counts["skipped"], "not claimed": "", "claimed": ""}
            yield f"{name:10}" + "".join(f"{row.get(c, 0):>13}" for c in columns)
        for state in ("failed", "xfailed", "not claimed"):
            names = [o for o, s in self.operators.items() if s == state]
            if names:
                yield f"{state}: {', '.join(names)}"


def family_of(operator: str) -> str:
    """The family of an operator, by the module of its portable kernel; "other" for one without."""
    domain, _, op_type = operator.rpartition(".")
    kernel = find_kernel(domain, op_type)
    return "other" if kernel is None else kernel.function.__module__.rpartition(".")[2].replace("_", " ")


class Recorder:
    """The pytest plugin that fills score cards; registered when the first suite is collected."""

    def __init__(self, path: str | None) -> None:
        self.cards: dict[str, ScoreCard] = {}
        self._path = path

    def card(self, engine: str) -> ScoreCard:
        """The card of an engine."""
        return self.cards.setdefault(engine, ScoreCard(engine))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that ran, or did not come so far."""
        if report.when != "call" and (report.when != "setup" or report.passed):
            return
        for name, about in report.user_properties:
            if name == PROPERTY:
                engine, operator, key, dtype = cast("tuple[str, str, str, str]", about)
                expected = hasattr(report, "wasxfail")
                outcome: Outcome = "xfailed" if report.skipped and expected else report.outcome
                card, name = self.card(engine), report.nodeid.rpartition("::")[2]
                card.add(operator, key, outcome, dtype)
                if not operator:
                    card.contract[name] = outcome
                if outcome != "passed":
                    card.reasons[name if not operator else key] = _reason(report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the tables."""
        if not self.cards:
            return
        terminalreporter.section("XRT conformance")
        for card in self.cards.values():
            for line in card.lines():
                terminalreporter.line(line)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the JSON file."""
        if self._path and self.cards and not hasattr(session.config, "workerinput"):
            text = json.dumps({"engines": [c.as_dict() for c in self.cards.values()]}, indent=1)
            pathlib.Path(self._path).write_text(text + "\n", encoding="utf-8")


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped or failed, in a line."""
    expected = getattr(report, "wasxfail", "")
    if expected:
        return str(expected).removeprefix("reason: ")
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return " ".join(text.split())[:_LONGEST]


def recorder(config: pytest.Config) -> Recorder:
    """The recorder of this run, made and registered at the first call."""
    found: Recorder | None = config.pluginmanager.get_plugin("xrt-scorecard")
    if found is None:
        found = Recorder(config.getoption("--xrt-scorecard", default=None))
        config.pluginmanager.register(found, "xrt-scorecard")
    return found
