"""`xrt fleet show`: what the reports of many jobs say, as text, as a page, and as metrics of Prometheus."""

from __future__ import annotations

import datetime
import html
import json
import os
import pathlib
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from xrt_core.errors import InputError
from xrt_distributed.reports import FOLDER, FORM, SHARE, lines_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BOUNDS: Final = (0.5, 0.9, 1.1, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Upper ends of the histogram of speed-ups; a last row is above all of them."""


_STYLE: Final = (
    "body{font:14px sans-serif;margin:2em}.n{text-align:right}td{padding:2px 8px}div{background:#47a;height:12px}"
)


@dataclass(slots=True, eq=False)  # by identity, as prometheus-client holds collectors
class Fleet:
    """Sums over reports. speedups: the median over its clusters, of each job that has some. rollouts: engine, version,
    and "new" or "proven" -> jobs, and results that differed. unreadable: lines that are no reports."""

    weeks: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    chosen: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    cache: Counter[str] = field(default_factory=Counter)
    speedups: list[float] = field(default_factory=list)
    rollouts: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    unreadable: int = 0

    def add(self, report: Mapping[str, Any]) -> None:
        """Count a report. Raises KeyError, TypeError or ValueError for what is none, and counts nothing then."""
        if report["form"] != FORM:
            raise ValueError(f"a report of form {report['form']!r}")
        year, week, _ = datetime.datetime.fromtimestamp(float(report["began"]), datetime.UTC).isocalendar()
        fallbacks = [
            ((str(f["engine"]), str(f["stage"]), str(f["kind"])), int(f["count"])) for f in report["fallbacks"]
        ]
        counts = [{str(k): int(n) for k, n in report[name].items()} for name in ("chosen", "cache")]
        versions = [f"{name} {number}" for name, number in report["versions"].items()]
        models = [str(name) for name in report["models"]]
        speedups = [float(s) for s in report["speedups"]]
        rollouts = [
            ((str(r["engine"]), str(r["version"]), "new" if r["acts"] else "proven"), int(r["different"]))
            for r in report.get("rollouts", ())
        ]
        self.weeks[f"{year}-W{week:02}"] += 1
        self.models.update(models)
        self.chosen.update(counts[0])
        self.cache.update(counts[1])
        self.versions.update(versions)
        for key, n in fallbacks:
            self.fallbacks[key] += n
        for arm, different in rollouts:
            row = self.rollouts.setdefault(arm, [0, 0])
            row[0] += 1
            row[1] += different
        if speedups:
            self.speedups.append(statistics.median(speedups))

    @property
    def jobs(self) -> int:
        """How many reports were counted."""
        return sum(self.weeks.values())

    def histogram(self) -> list[tuple[str, int]]:
        """Jobs by the median speed-up of their clusters over the host."""
        rows, below = [], 0.0
        for bound in (*BOUNDS, float("inf")):
            label = f"over {below:g}" if bound == float("inf") else f"{below:g} to {bound:g}"
            rows.append((label, sum(below <= s < bound for s in self.speedups)))
            below = bound
        return rows

    def tables(self) -> list[tuple[str, list[tuple[str, int]]]]:
        """Title and rows of each table."""
        fallbacks = [(f"{e}: {kind} at {stage}", n) for (e, stage, kind), n in self.fallbacks.most_common()]
        return [
            ("jobs a week", sorted(self.weeks.items())),
            ("models (jobs)", self.models.most_common(20)),
            ("clusters by what runs them", self.chosen.most_common()),
            ("speed-up over the host (jobs)", self.histogram() if self.speedups else []),
            ("fallbacks", fallbacks),
            ("rollouts (jobs)", [(" ".join(arm), jobs) for arm, (jobs, _) in sorted(self.rollouts.items())]),
            ("rollouts: results that differed", [(" ".join(a), n) for a, (_, n) in sorted(self.rollouts.items()) if n]),
            ("cache", self.cache.most_common()),
            ("versions (jobs)", sorted(self.versions.items())),
        ]

    def as_text(self) -> str:
        """For a terminal."""
        lines = [f"{self.jobs} jobs" + (f"; {self.unreadable} unreadable reports" if self.unreadable else "")]
        for title, rows in self.tables():
            if rows:
                wide, most = max(len(name) for name, _ in rows), max(n for _, n in rows) or 1
                lines += ["", title]
                lines += [f"  {name:<{wide}}  {n:>6}  {'#' * round(30 * n / most)}".rstrip() for name, n in rows]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As plain data: the number of jobs and of unreadable reports, and each table as rows of name and count."""
        tables = {title: [{"name": name, "count": n} for name, n in rows] for title, rows in self.tables()}
        return {"jobs": self.jobs, "unreadable": self.unreadable, "tables": tables}

    def as_html(self) -> str:
        """A page without scripts or anything from elsewhere."""
        parts = [f"<h1>XRT: {self.jobs} jobs</h1>"]
        for title, rows in self.tables():
            if rows:
                most = max(n for _, n in rows) or 1
                cells = "".join(
                    f"<tr><td>{html.escape(name)}</td><td class=n>{n}</td>"
                    f"<td><div style='width:{round(300 * n / most)}px'></div></td></tr>"
                    for name, n in rows
                )
                parts.append(f"<h2>{html.escape(title)}</h2><table>{cells}</table>")
        return f"<!doctype html><meta charset=utf-8><title>XRT fleet</title><style>{_STYLE}</style>{''.join(parts)}\n"

    def as_prometheus(self) -> str:
        """In the text format of Prometheus."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> list[Metric]:
        """The metrics, as a collector of prometheus-client gives them."""
        from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

        jobs = GaugeMetricFamily("xrt_fleet_jobs", "Jobs by the week in which they began.", labels=["week"])
        for week, n in sorted(self.weeks.items()):
            jobs.add_metric([week], n)
        fallbacks = GaugeMetricFamily(
            "xrt_fleet_fallbacks", "Fallbacks to the host.", labels=["engine", "stage", "kind"]
        )
        for labels, n in sorted(self.fallbacks.items()):
            fallbacks.add_metric(labels, n)
        clusters = GaugeMetricFamily("xrt_fleet_clusters", "Clusters by what runs them.", labels=["runs_on"])
        for name, n in sorted(self.chosen.items()):
            clusters.add_metric([name], n)
        speedups = HistogramMetricFamily("xrt_fleet_speedup", "Time on the host over that of what was chosen.")
        buckets = [(f"{b:g}", sum(s <= b for s in self.speedups)) for b in BOUNDS]
        speedups.add_metric([], [*buckets, ("+Inf", len(self.speedups))], sum(self.speedups))
        labels_of_arms = ["engine", "version", "arm"]
        arms = GaugeMetricFamily("xrt_fleet_rollout_jobs", "Jobs of a rollout.", labels=labels_of_arms)
        different = GaugeMetricFamily("xrt_fleet_rollout_differences", "Results that differed.", labels=labels_of_arms)
        for arm, (count, n) in sorted(self.rollouts.items()):
            arms.add_metric(arm, count)
            different.add_metric(arm, n)
        return [jobs, fallbacks, clusters, speedups, arms, different]


def read_fleet(folder: str) -> Fleet:
    """The sums over all reports of a folder, or a store that fsspec reaches. Raises InputError where there is none."""
    found = Fleet()
    for line in lines_of(folder):
        try:
            found.add(json.loads(line))
        except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError):
            found.unreadable += 1
    return found


app = typer.Typer(help="What the jobs of a fleet report (docs/distributed.md).", no_args_is_help=True)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def collect(
    folder: Annotated[str, typer.Argument(help="where reports are written: a folder, s3://..., ...")],
    command: Annotated[list[str], typer.Argument(help="a program and its arguments")],
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="of the processes that report")] = 1.0,
) -> None:
    """Run a program whose processes report what XRT did in them, as lines of JSON without users' data."""
    os.environ[FOLDER], os.environ[SHARE] = folder if "://" in folder else os.path.abspath(folder), f"{share:g}"
    try:
        os.execvp(command[0], command)
    except OSError as e:
        typer.echo(f"xrt fleet collect: {command[0]} cannot be run: {e.strerror}", err=True)
        raise typer.Exit(2) from None


@app.command()
def show(
    folder: Annotated[str, typer.Argument(help="what XRT_DISTRIBUTED_REPORTS named: a folder, s3://..., ...")],
    page: Annotated[pathlib.Path | None, typer.Option("--html", help="write a page")] = None,
    metrics: Annotated[pathlib.Path | None, typer.Option("--prometheus", help="write metrics")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the sums as JSON")] = False,
) -> None:
    """Sum up the reports of jobs: jobs a week, models, speed-ups, fallbacks by engine and cause, versions."""
    try:
        fleet = read_fleet(folder)
    except InputError as e:
        typer.echo(str(e), err=True)
        raise typer.Exit(1) from None
    for path, text in ((page, fleet.as_html), (metrics, fleet.as_prometheus)):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
    typer.echo(json.dumps(fleet.to_json(), indent=2) if as_json else fleet.as_text())
