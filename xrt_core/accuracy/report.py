"""What was tried to stay within a budget of errors, and what came of it."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, to_builtins

from xrt_core.options.accuracy import Accuracy

Verdict = Literal["chosen", "within the budget", "slower", "too far off", "not live", "failed", "exceeded"]


class Trial(Struct, frozen=True):
    """One form of the model on one engine.

    form: "int8", "int8 (dynamic)", "bfloat16", "float16". nodes: how many are computed in it, of `total`. used: the
    largest share of its budget that an output used, None where it did not run. ratio: seconds of a call over those in
    the model's own precision, measured in turns. verdict: what came of it; "exceeded" is a form that was chosen and
    used more than the budget in a later call. reason: human-readable.
    """

    form: str
    engine: str
    nodes: int
    total: int
    verdict: Verdict
    used: float | None = None
    ratio: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        off = "" if self.used is None else f", uses {self.used:.0%} of the budget"
        took = "" if self.ratio is None else f", {self.ratio:.2f} of the time"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.form} on {self.engine}, {self.nodes} of {self.total} nodes{took}{off}: {self.verdict}{reason}"


class AccuracyReport(Struct, frozen=True):
    """What the option `accuracy` has come to.

    state: "waiting" for a first call, "searching", "done", or "failed" (`reason`). inputs: how many sets of inputs the
    errors were measured on, and whether they were given as `calibration`. seconds: of a call in the model's own
    precision. trials: in the order they were made. checked: how many later calls were compared with the model's own
    precision; worst: the largest share of the budget that one of them used.
    """

    budget: Accuracy
    state: Literal["waiting", "searching", "done", "failed"]
    inputs: int = 0
    given: bool = False
    seconds: float | None = None
    trials: tuple[Trial, ...] = ()
    checked: int = 0
    worst: float = 0.0
    reason: str = ""

    @property
    def chosen(self) -> Trial | None:
        """What answers; None for the model's own precision."""
        return next((t for t in self.trials if t.verdict == "chosen"), None)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        found: dict[str, Any] = to_builtins(self)
        return found

    def __str__(self) -> str:
        how = "given for calibration" if self.given else "of calls"
        lines = [f"accuracy {self.budget}: {self.state}" + (f": {self.reason}" if self.reason else "")]
        if self.inputs:
            took = "" if self.seconds is None else f"; {self.seconds * 1e3:.3g} ms in the model's own precision"
            lines.append(f"  errors measured on {self.inputs} sets of inputs {how}{took}")
        lines += [f"  {t}" for t in self.trials]
        if self.state == "done" and self.chosen is None:
            lines.append("  the model's own precision answers")
        if self.checked:
            lines.append(f"  {self.checked} later calls compared, which used up to {self.worst:.0%} of the budget")
        return "\n".join(lines)
