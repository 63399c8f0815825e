"""GuardReport: the clusters of a guarded module as plain data, text and Prometheus counters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrt_core.errors import printable
from xrt_core.guard.record import ClusterRecord, State


@dataclass(frozen=True, slots=True)
class GuardReport:
    """State of a guarded module.

    clusters: as `ClusterRecord.to_json` gives them. planning: pending and failed background compilations, as
    `CompilationRecord.to_json` gives them. calls: of all clusters. host_calls: those that the host answered.
    saved_seconds: estimated from times of the host and of the executables. seconds: since the module was made.
    """

    clusters: tuple[Mapping[str, Any], ...]
    calls: int
    host_calls: int
    saved_seconds: float
    seconds: float
    planning: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(
        cls, records: Sequence[ClusterRecord], seconds: float, planning: Sequence[Mapping[str, Any]] = ()
    ) -> GuardReport:
        """The report on these records, as they are now."""
        return cls(
            tuple({**r.to_json(), "saved_seconds": _saved(r)} for r in records),
            sum(r.calls for r in records),
            sum(r.host_calls for r in records),
            sum(_saved(r) for r in records),
            seconds,
            tuple(planning),
        )

    @property
    def accelerated_share(self) -> float:
        """Share of the clusters' calls that an engine answered, 0.0 where there were none."""
        return 1.0 - self.host_calls / self.calls if self.calls else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "clusters": [dict(c) for c in self.clusters],
            "calls": self.calls,
            "host_calls": self.host_calls,
            "accelerated_share": self.accelerated_share,
            "saved_seconds": self.saved_seconds,
            "seconds": self.seconds,
            "planning": [dict(p) for p in self.planning],
        }

    def as_text(self) -> str:
        """Human-readable: totals, then each cluster with its state, timings, history and failures."""
        lines = [_planning(p) for p in self.planning]
        if not self.clusters:
            return "\n".join(lines) or "no cluster is under guard (guard=True turns it on; clusters come with calls)"
        lines.append(
            f"{len(self.clusters)} clusters, {self.calls} calls, {self.accelerated_share:.1%} accelerated, "
            f"about {self.saved_seconds:.3g} s saved"
        )
        for c in self.clusters:
            lines.append(f"{c['name']}: {c['state']}, runs on {c['chosen']}: {c['reason'] or 'no reason to give'}")
            lines.append(f"  {c['nodes']} nodes: {c['operators']}")
            shadow = f"; {c['shadow_runs']} compared with the host" if c["shadow_runs"] else ""
            lines.append(f"  calls: {c['calls']}, of them {c['host_calls']} on the host{shadow}")
            outcome = c["outcome"]
            if outcome is not None:
                times = ", ".join(f"{k} {_duration(v)}" for k, v in outcome["timings"].items())
                if times:
                    lines.append(f"  timings: {times}")
                lines += [f"  rejected: {e}" for e in outcome["errors"]]
            begun = c["history"][0]["time"]
            way = ", ".join(f"{m['state']} +{m['time'] - begun:.2f} s" for m in c["history"])
            lines.append(f"  history: since {time.strftime('%H:%M:%S', time.localtime(begun))}: {way}")
            for f in c["faults"]:
                code = "" if f["exit_code"] is None else f" (exit code {f['exit_code']})"
                lines.append(f"  failed at {f['stage']}, {f['kind']}{code}: {f['message']}")
                lines += [f"    | {line}" for line in f["log"].splitlines()]
        return printable("\n".join(lines))

    def to_prometheus(self) -> str:
        """Counters and gauges in Prometheus' text format.

        Source: https://prometheus.io/docs/instrumenting/exposition_formats/
        """
        text = []
        for name, kind, help, rows in self._metrics():
            text += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            text += [f"{name}{_labels(labels)} {value:g}" for labels, value in rows]
        return "\n".join(text) + "\n"

    def _metrics(self) -> list[tuple[str, str, str, list[tuple[dict[str, str], float]]]]:
        def labels(c: Mapping[str, Any], **more: str) -> dict[str, str]:
            return {"cluster": c["name"], "number": str(c["number"]), "engine": c["engine"], **more}

        def each(field: str) -> list[tuple[dict[str, str], float]]:
            return [(labels(c), float(c[field])) for c in self.clusters]

        states = [(labels(c, state=s.value), float(c["state"] == s.value)) for c in self.clusters for s in State]
        kinds = [
            (labels(c, stage=f["stage"], kind=f["kind"]), float(f["count"]))
            for c in self.clusters
            for f in c["fault_counts"]
        ]
        return [
            ("xrt_cluster_calls_total", "counter", "Calls of a cluster.", each("calls")),
            ("xrt_cluster_host_calls_total", "counter", "Calls that the host answered.", each("host_calls")),
            ("xrt_cluster_shadow_runs_total", "counter", "Calls compared with the host.", each("shadow_runs")),
            ("xrt_cluster_failures_total", "counter", "Failures by stage and kind.", kinds),
            ("xrt_cluster_saved_seconds_total", "counter", "Estimated time saved.", each("saved_seconds")),
            ("xrt_cluster_state", "gauge", "1 for the state that a cluster is in.", states),
        ]

    def __str__(self) -> str:
        return self.as_text()


def _planning(p: Mapping[str, Any]) -> str:
    since = f"since {time.strftime('%H:%M:%S', time.localtime(p['since']))}"
    if p["state"] == "failed":
        return f"{p['graph']}: the host runs it, as planning it with engines failed ({p['reason']})"
    return f"{p['graph']}: the host answers, {p['state']} for engines {since}"


def _saved(r: ClusterRecord) -> float:
    host, engine = tuple(r.host_seconds), tuple(r.engine_seconds)
    if not host and r.outcome is not None and "host" in r.outcome.timings:  # known from a cached verdict
        host = (r.outcome.timings["host"],)
    if not host or not engine:
        return 0.0
    return max(statistics.median(host) - statistics.median(engine), 0.0) * (r.calls - r.host_calls)


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{k}="{escaped(v)}"' for k, v in labels.items()) + "}"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
