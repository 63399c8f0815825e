"""Reports of jobs, and what `xrt fleet show` makes of them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner
from xrt_distributed.fleet import Fleet, app, read_fleet
from xrt_distributed.reports import FORM, Reporter, reporter_from_environment

from xrt_core.errors import InputError
from xrt_core.events import EventLog


def reported(folder: pathlib.Path, chosen: str = "xla") -> Reporter:
    """A job with a model, a cluster that runs on an engine, and a fallback."""
    made = Reporter(str(folder))
    timings = {"compile": 9.0, "host": 0.3, "xla": 0.1 if chosen == "xla" else 0.9, "xla unfused": 0.4}
    log = EventLog()
    for event in (
        log.emit("specialised", model="bert", result="secret"),
        log.emit("engine.loaded", engine="xla", package="xrt-xla 0.1.0"),
        log.emit("guard.live", cluster="c", chosen=chosen, reason="r", timings=timings),
        log.fallback(cluster="c", engine="xla", stage="run", kind="raised", error="secret <b>"),
        log.emit("cache.hit"),
        log.emit("pass.left_out", name_of_pass="secret"),
    ):
        made.hear(event)
    made.write()
    assert not made.failure
    return made


def test_a_report_and_the_fleet(tmp_path: pathlib.Path) -> None:
    """Reports have counts and speed-ups and nothing that an error or a user said; the fleet is their sum."""
    first = reported(tmp_path)
    reported(tmp_path, chosen="host")
    first.write()  # in the place of the earlier one
    text = "".join(p.read_text() for p in tmp_path.glob("*.jsonl"))
    assert len(text.splitlines()) == 2
    assert "secret" not in text
    (tmp_path / "torn.jsonl").write_text('{"form": "xrt-report-1", "beg\n[]\n{"form": "other"}\n')
    fleet = read_fleet(str(tmp_path))
    assert (fleet.jobs, fleet.unreadable) == (2, 3)
    assert sorted(fleet.speedups) == [1.0, 3.0]
    assert fleet.fallbacks == {("xla", "run", "raised"): 2}
    assert dict(fleet.histogram())["3 to 5"] == 1
    out, metrics = tmp_path / "fleet.html", tmp_path / "metrics"
    done = CliRunner().invoke(app, ["show", str(tmp_path), "--html", str(out), "--prometheus", str(metrics)])
    assert done.exit_code == 0, done.output
    assert "2 jobs; 3 unreadable reports" in done.output
    assert "xla: raised at run" in done.output
    assert "<h1>XRT: 2 jobs</h1>" in out.read_text()
    rows = metrics.read_text().splitlines()
    assert 'xrt_fleet_fallbacks{engine="xla",kind="raised",stage="run"} 2.0' in rows
    assert 'xrt_fleet_speedup_bucket{le="1.1"} 1.0' in rows
    assert "xrt_fleet_speedup_count 2.0" in rows
    data = json.loads(CliRunner().invoke(app, ["show", str(tmp_path), "--json"]).output)
    assert (data["jobs"], data["unreadable"]) == (2, 3)
    assert data["tables"]["fallbacks"] == [{"name": "xla: raised at run", "count": 2}]


def test_names_are_escaped() -> None:
    """A model's name is text in the page and in the metrics."""
    fleet = Fleet()
    report = {"form": FORM, "began": 0, "versions": {}, "models": {"<script>": 1}, "chosen": {'a"b': 1}, "cache": {},
              "fallbacks": [], "speedups": []}  # fmt: skip
    fleet.add(report)
    assert "<script>" not in fleet.as_html()
    assert 'xrt_fleet_clusters{runs_on="a\\"b"} 1.0' in fleet.as_prometheus()


def test_sampling_and_failure(tmp_path: pathlib.Path) -> None:
    """A share of no jobs reports nothing; a store that fails is noted, and raises nothing; no reports are an error."""
    none = Reporter(str(tmp_path / "none"), share=0.0)
    none.hear(EventLog().emit("specialised", model="m"))
    assert not none.report()["models"]
    assert sum(Reporter("x", share=0.3).is_chosen for _ in range(400)) in range(60, 190)
    (tmp_path / "file").write_text("")
    failing = Reporter(str(tmp_path / "file" / "inside"))
    failing.write()
    assert failing.failure
    assert reporter_from_environment({}) is None
    with pytest.raises(InputError, match="has no reports"):
        read_fleet(str(tmp_path / "none"))


@pytest.mark.nightly
def test_a_process_reports(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    """A process that was asked to reports at its end what its modules did."""
    program = (
        "import numpy as np, xrt_core as xrt\nfrom xrt_core import ops\n"
        "m = xrt.XRTModule(lambda x: ops.Tanh(x), engine='xla', guard=False, prune=False)\nm(np.ones(4, np.float32))\n"
    )
    environment |= {"XRT_DISTRIBUTED_REPORTS": str(tmp_path / "reports")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    (file,) = (tmp_path / "reports").glob("*.jsonl")
    report = json.loads(file.read_text())
    assert sum(report["models"].values()) == 1
    assert "xla" in report["engines"]
    assert report["versions"]["python"]


def test_collect(tmp_path: pathlib.Path, environment: dict[str, str]) -> None:
    """`xrt fleet collect` runs a program with the variables of reports, options of the program's own included."""
    script = tmp_path / "program"
    script.write_text('#!/bin/sh\necho "$@" "$XRT_DISTRIBUTED_REPORTS" "$XRT_DISTRIBUTED_REPORTS_SHARE"\n')
    script.chmod(0o755)
    command = [sys.executable, "-c", "from xrt_distributed.fleet import app; app()", "collect", "--share", "0.25"]
    for folder, want in (("reports", str(tmp_path / "reports")), ("s3://bucket/r", "s3://bucket/r")):
        done = subprocess.run(
            [*command, folder, str(script), "--epochs", "3"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert done.stdout == f"--epochs 3 {want} 0.25\n"
    done = subprocess.run(
        [*command, "reports", str(tmp_path / "absent")], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "absent cannot be run: No such file" in done.stderr
