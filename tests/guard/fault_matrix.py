"""What each injected fault costs: the table that the tests run through and that docs/guard-internals.md shows."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """How a fault ends. state: of the cluster, "none" where there is none. event: stage and kind of the
    `FallbackEvent`, None for none."""

    state: str
    event: tuple[str, str] | None


def _in_worker(stage: str) -> dict[str, Cell]:
    seen = "examine" if stage == "run" else "compile"
    return {
        f"{stage}_raises": Cell("failed", (seen, "raised")),
        f"{stage}_refused": Cell("failed", (seen, "memory")),
        f"{stage}_hangs": Cell("failed", (seen, "hung")),
        f"{stage}_crashes": Cell("failed", (seen, "crashed")),
        f"{stage}_exits": Cell("failed", (seen, "crashed")),
        f"{stage}_memory": Cell("failed", (seen, "memory")),
    }


def _asked(stage: str) -> dict[str, Cell]:
    return {
        f"{stage}_raises": Cell("none", None),
        f"{stage}_refused": Cell("none", None),
        f"{stage}_hangs": Cell("none", (stage, "hung")),
        f"{stage}_crashes": Cell("none", (stage, "crashed")),
        f"{stage}_exits": Cell("none", (stage, "crashed")),
        f"{stage}_memory": Cell("none", (stage, "memory")),
    }


WRONG = ("count", "shape", "dtype", "numbers")
MATRIX: dict[str, Cell] = {
    **_asked("probe"),
    **_asked("supports"),
    **_in_worker("compiler"),
    **_in_worker("compile"),
    **_in_worker("load"),
    # a stored executable that its engine does not take is a miss like any other: what was compiled runs
    "load_raises": Cell("live", None),
    "load_refused": Cell("live", None),
    **_in_worker("run"),
    **{f"run_wrong_{w}": Cell("rejected", ("examine", f"wrong {w}")) for w in WRONG},
    "late_run_raises": Cell("failed", ("run", "raised")),
    "late_run_refused": Cell("failed", ("run", "raised")),
    "late_run_hangs": Cell("failed", ("run", "hung")),
    **{f"late_run_wrong_{w}": Cell("failed", ("run", f"wrong {w}")) for w in WRONG[:3]},
    "late_run_wrong_numbers": Cell("rejected", ("shadow", "wrong numbers")),
    # a process that ends takes the caller with it, unless executables are isolated
    **{f"late_run_{k}": Cell("-", None) for k in ("crashes", "exits", "memory")},
}
"""Fault (`xrt_core.testing.stage_faults`) -> how it ends, asynchronous and synchronous."""
ISOLATED: dict[str, Cell] = {
    "late_run_raises": Cell("failed", ("run", "raised")),
    "late_run_refused": Cell("failed", ("run", "raised")),
    "late_run_hangs": Cell("failed", ("run", "hung")),
    "late_run_crashes": Cell("failed", ("run", "crashed")),
    "late_run_exits": Cell("failed", ("run", "crashed")),
    "late_run_memory": Cell("failed", ("run", "memory")),
    **{f"late_run_wrong_{w}": Cell("failed", ("run", f"wrong {w}")) for w in WRONG[:3]},
    "late_run_wrong_numbers": Cell("rejected", ("shadow", "wrong numbers")),
}
"""The same for those that are hit in the process of isolated executables only."""

_STAGES = {
    "probe": '`Engine.probe`, with `engine="auto"` or none named',
    "supports": "`Engine.supports`",
    "compiler": "`Engine.compiler`",
    "compile": "`GraphCompiler.compile`",
    "load": "`GraphCompiler.load`",
    "run": "`Executable.run`, from the first run on",
    "late_run": "`Executable.run`, in the caller's process only",
}
_ISOLATED = '`Executable.run`, with `guard="isolated"`, once it is live'
_KINDS = {
    "raises": "raises",
    "refused": "raises MemoryError",
    "hangs": "hangs",
    "crashes": "aborts the process",
    "exits": "leaves the process",
    "memory": "takes memory without end",
    **{f"wrong_{w}": f"gives a wrong {w}" for w in ("count", "shape", "dtype")},
    "wrong_numbers": "gives wrong numbers",
}


def as_markdown() -> str:
    """The table of docs/guard-internals.md; `python -m tests.guard.fault_matrix` prints it."""
    lines = ["| the engine's | what it does | the cluster's state | event: stage, kind |", "|---|---|---|---|"]
    rows = [(MATRIX, stage, where) for stage, where in _STAGES.items()] + [(ISOLATED, "late_run", _ISOLATED)]
    for table, stage, where in rows:
        for kind, what in _KINDS.items():
            cell = table.get(f"{stage}_{kind}")
            if cell is not None and cell.state == "-":
                lines.append(f"| {where} | {what} | the process ends; the next one isolates the cluster | |")
            elif cell is not None:
                event = "none" if cell.event is None else f"{cell.event[0]}, {cell.event[1]}"
                lines.append(f"| {where} | {what} | {cell.state} | {event} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
