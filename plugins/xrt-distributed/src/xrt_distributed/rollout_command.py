"""`xrt rollout`: how the rollouts of new engines stand, by the reports of a fleet; and a program in one of two
environments, by the same draw."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

import typer

from xrt_core.errors import InputError
from xrt_distributed.jobs import JOB, falls_on, job_name
from xrt_distributed.reports import ARM, FORM, lines_of

_RULE_OF_THREE: Final = 3.0
"""Of n trials without an event its rate is below 3/n, with 95 % confidence (Hanley and Lippman-Hand, JAMA 1983)."""


@dataclass(slots=True)
class Arm:
    """The jobs in which one version of a new engine acted, or in which it did not.

    comparisons, different, worst, given_up: of its results with those of the proven engines, given_up: jobs in which a
    difference ended the rollout. fallbacks: of this engine to the host. ratios: a job's median time over that of the
    proven engines. speedups: a job's median over the host, whatever engine ran.
    """

    engine: str
    version: str
    acts: bool
    share: float = 0.0
    of: str = "jobs"
    jobs: int = 0
    unusable: int = 0
    comparisons: int = 0
    different: int = 0
    given_up: int = 0
    worst: float = 0.0
    fallbacks: int = 0
    ratios: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        """Count a job."""
        ratios, speedups = ([float(x) for x in found] for found in (row["ratios"], report["speedups"]))
        compared, different, unusable = int(row["compared"]), int(row["different"]), int(row["unusable"])
        fallbacks = sum(int(f["count"]) for f in report["fallbacks"] if f["engine"] == self.engine)
        self.share, self.of = float(row["share"]) or self.share, str(row["of"])
        self.jobs += 1
        self.unusable += bool(unusable)
        self.comparisons += compared
        self.different += different
        self.given_up += bool(different)
        self.worst = max(self.worst, float(row["worst"]))
        self.fallbacks += fallbacks
        self.ratios += [statistics.median(ratios)] if ratios else []
        self.speedups += [statistics.median(speedups)] if speedups else []

    def lines(self) -> list[str]:
        """For a terminal."""
        what = "new" if self.acts else "proven"
        found = [f"  {what:<7} {self.version or '-':<12} {self.jobs} jobs, {self.fallbacks} fallbacks of {self.engine}"]
        if self.unusable:
            found[0] += f", in {self.unusable} it could not be used"
        if self.speedups:
            found[0] += f"; {statistics.median(self.speedups):.2f} times the host's speed"
        if self.comparisons:
            text = f"{self.comparisons} comparisons, {self.different} differ; largest error {self.worst:.2g}"
            if self.different:
                text += f"; ended in {self.given_up} jobs"
            else:
                most = min(_RULE_OF_THREE / self.comparisons, 1.0)
                text += f"; with 95 % confidence fewer than {most:.2%} of such calls differ"
            found.append(f"          {text}")
        if self.ratios:
            of = f"median of {len(self.ratios)} jobs"
            found.append(f"          {statistics.median(self.ratios):.2f} of the proven engines' time ({of})")
        return found


def arms_of(lines: Iterable[str]) -> list[Arm]:
    """The rollouts that reports speak of, by engine, version and whether it acted."""
    arms: dict[tuple[str, str, bool], Arm] = {}
    for line in lines:
        try:
            report = json.loads(line)
            if report["form"] != FORM:
                continue
            for row in report.get("rollouts", ()):
                key = str(row["engine"]), str(row["version"]), bool(row["acts"])
                arms.setdefault(key, Arm(*key)).add(row, report)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # `xrt fleet show` counts what is no report
    return [arms[key] for key in sorted(arms, key=lambda k: (k[0], not k[2], k[1]))]


app = typer.Typer(help="New engines on a share of the jobs or calls (docs/distributed.md).", no_args_is_help=True)


@app.command()
def status(
    folder: Annotated[str, typer.Argument(help="what XRT_DISTRIBUTED_REPORTS named: a folder, s3://..., ...")],
    as_json: Annotated[bool, typer.Option("--json", help="print the rollouts as JSON")] = False,
) -> None:
    """How rollouts stand: jobs with the new engine and without it, differences, times, fallbacks. Exit code 1 where
    results differed."""
    try:
        arms = arms_of(lines_of(folder))
    except InputError as e:
        typer.echo(str(e), err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"rollouts": [asdict(a) for a in arms]}, indent=2))
    elif not arms:
        typer.echo("no job reports a rollout")
    else:
        last = ""
        for arm in arms:
            if arm.engine != last:
                share = max(a.share for a in arms if a.engine == arm.engine)
                typer.echo(f"{arm.engine}: {share:.4g} of the {arm.of}")
                last = arm.engine
            typer.echo("\n".join(arm.lines()))
    if any(a.different for a in arms):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    arguments: Annotated[list[str], typer.Argument(help="of Python: program.py arguments, or -m package arguments")],
    engine: Annotated[str, typer.Option("--engine", help="whose new version it is")],
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="of the jobs that get it")],
    new: Annotated[str, typer.Option("--new", help="Python of the environment with the new version")],
    proven: Annotated[str, typer.Option("--proven", help="Python of the environment with the proven one")],
) -> None:
    """Run a program in one of two environments, drawn by the job's name: a new version of an engine for a share of the
    jobs, where both versions cannot be in one environment."""
    job = job_name()
    acts = falls_on(share, job, engine)
    os.environ[JOB] = job
    os.environ[ARM] = json.dumps({"engine": engine, "share": share, "acts": acts})
    python = new if acts else proven
    try:
        os.execv(python, [python, *arguments])
    except OSError as e:
        typer.echo(f"xrt rollout run: {python} cannot be run: {e.strerror}", err=True)
        raise typer.Exit(2) from None
