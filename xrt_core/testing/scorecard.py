"""The score card: operators claimed, passed, failed and not claimed, as a table in the terminal and as JSON."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import pytest

PROPERTY: Final = "xrt_conformance"
"""Name of the user property by which a test says which engine, operator and key it is about."""

Outcome = Literal["passed", "failed", "xfailed", "skipped"]


@dataclass
class ScoreCard:
    """What one engine has shown.

    claims: operator -> "" where the engine takes a case of it, else its reason for refusing. The cases and tests that
    ran are counted by `add`.
    """

    engine: str
    version: str = ""
    device: str = ""
    claims: dict[str, str] = field(default_factory=dict)
    cases: dict[str, Counter[str]] = field(default_factory=dict)
    tests: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, operator: str, key: str, outcome: Outcome) -> None:
        """Count the outcome of one test; operator: "" for a test of the contract."""
        if operator:
            self.cases.setdefault(operator, Counter())[outcome] += 1
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
            "summary": self.summary(),
            "tests": dict(self.tests),
            "operators": {
                o: {"state": s, **({"reason": self.claims[o]} if s == "not claimed" else dict(self.cases.get(o, {})))}
                for o, s in self.operators.items()
            },
            "failures": self.failures,
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
                engine, operator, key = cast("tuple[str, str, str]", about)
                expected = hasattr(report, "wasxfail")
                outcome: Outcome = "xfailed" if report.skipped and expected else report.outcome
                self.card(engine).add(operator, key, outcome)

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


def recorder(config: pytest.Config) -> Recorder:
    """The recorder of this run, made and registered at the first call."""
    found: Recorder | None = config.pluginmanager.get_plugin("xrt-scorecard")
    if found is None:
        found = Recorder(config.getoption("--xrt-scorecard", default=None))
        config.pluginmanager.register(found, "xrt-scorecard")
    return found
