"""Roll-outs: which jobs and calls a new engine gets, what its results are compared with, and what is shown."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xrt_distributed
from typer.testing import CliRunner
from xrt_distributed.fleet import read_fleet
from xrt_distributed.jobs import JOB, falls_on, job_name
from xrt_distributed.reports import ARM, Reporter
from xrt_distributed.rollout import difference
from xrt_distributed.rollout_command import app

import xrt_core as xrt
from xrt_core import ops
from xrt_core.engine import engines
from xrt_core.plugins import plugins
from xrt_core.testing.faults import WrongNumbers
from xrt_core.testing.host_engine import HostEngine

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


class Candidate(HostEngine):
    """A new engine that computes as the host does."""

    name = "candidate"


class Wrong(WrongNumbers):
    """A new engine that computes something else."""

    name = "wrong"


class Proven(HostEngine):
    """The engine of before."""

    name = "proven"


@pytest.fixture(autouse=True)
def _engines() -> Iterator[None]:
    for engine in (Candidate, Wrong, Proven):
        engines.register(engine)
    added = "distributed" not in plugins.names("xrt.observers")
    if added:
        plugins.add(xrt_distributed, "distributed", "xrt-distributed")
    yield
    if added:
        plugins.remove(xrt_distributed)
    for engine in (Candidate, Wrong, Proven):
        engines.unregister(engine.name)


def module(new: str = "candidate", **rollout: Any) -> xrt.XRTModule:
    """A module with a new engine before a proven one."""
    return xrt.XRTModule(
        lambda x: ops.Tanh(x) + 1.0, engine=[new, "proven"], guard=False, prune=False, cache="off", rollout=rollout
    )


def found(m: xrt.XRTModule, name: str) -> list[dict[str, Any]]:
    """The fields of a module's events of a name."""
    return [dict(e.fields) for e in m.events.recent(f"rollout.{name}")]


def test_jobs_are_drawn_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """About the share of the jobs gets the new engine, the same ones each time; the others have the proven alone."""
    acting = set()
    for number in range(40):
        monkeypatch.setenv(JOB, f"job {number}")
        assert job_name() == f"job {number}"
        m = module(share=0.3)
        np.testing.assert_allclose(m(X), np.tanh(X) + 1.0, rtol=1e-6)
        (decided,) = found(m, "decided")
        assert m.engines == (("candidate", "proven") if decided["acts"] else ("proven",))
        assert len(found(m, "compared")) == decided["acts"]
        assert module(share=0.3).engines == m.engines
        acting |= {number} if decided["acts"] else set()
    assert 4 <= len(acting) <= 20
    assert 4500 < sum(falls_on(0.05, n) for n in range(100_000)) < 5500
    monkeypatch.setenv("XRT_ROLLOUT", '{"share": 0, "engine": "candidate"}')
    assert xrt.XRTModule(lambda x: ops.Tanh(x), engine=["candidate"], guard=False).engines == ()


@pytest.mark.nightly
def test_with_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine that no module names is left out of all engines; under guard each side has its own verification."""
    monkeypatch.setenv("XRT_ROLLOUT", '{"share": 0, "engine": "candidate"}')
    assert "candidate" not in xrt.XRTModule(lambda x: ops.Tanh(x), guard=False).engines
    monkeypatch.delenv("XRT_ROLLOUT")
    pytest.importorskip("jax")
    w = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    m = xrt.XRTModule(lambda x: ops.Tanh(x @ w), engine=["xla", "proven"], guard_tune=False, rollout=1.0)
    x = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    m(x)
    assert m.wait(120)
    for _ in range(8):
        m(x)
    compared = found(m, "compared")
    assert compared
    assert all(c["is_right"] for c in compared)
    assert "proven_seconds" in compared[-1]
    m.close()


def test_calls() -> None:
    """A share of the calls gets the new engine, all the same results; comparisons become rare."""
    m = module(share=0.25, of="calls")
    for _ in range(200):
        np.testing.assert_allclose(m(x=X), np.tanh(X) + 1.0, rtol=1e-6)
        np.testing.assert_allclose(m.run({"x": X})["output"], np.tanh(X) + 1.0, rtol=1e-6)
    answered = m._source._answered
    assert 60 < answered < 140
    compared = found(m, "compared")
    assert 3 <= len(compared) < answered / 2
    assert all(c["is_right"] and c["proven"] == "proven" for c in compared)
    assert "proven_seconds" in compared[-1]
    result = np.empty_like(X)
    assert m.run({"x": X}, {"output": result})["output"] is result


def test_a_difference_ends_it() -> None:
    """The call that shows it is answered by the proven engine, and so are all that follow."""
    m = module("wrong", share=1)
    for _ in range(3):
        np.testing.assert_allclose(m(X), np.tanh(X) + 1.0, rtol=1e-6)
    (compared,) = found(m, "compared")
    assert not compared["is_right"]
    assert compared["error"] > 0.01
    assert len(found(m, "given_up")) == 1
    lenient = module("wrong", share=1, tolerance=1e6)
    assert np.abs(lenient(X) - np.tanh(X) - 1.0).max() > 0.01


def test_random_results_are_no_difference() -> None:
    """Results that are drawn anew at each call are not compared."""
    m = xrt.XRTModule(
        lambda x: x + ops.RandomUniformLike(x), engine=["candidate", "proven"], guard=False, prune=False, rollout=1.0
    )
    m(X)
    assert not found(m, "compared")
    assert not found(m, "given_up")


def test_what_does_not_apply(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Another version than the one here is no rollout; bad options, and what rollouts are not for, are errors."""
    other = module(share=1, engine="candidate==99")
    assert other.engines == ("candidate", "proven")
    assert not found(other, "decided")
    with pytest.raises(xrt.OptionError, match=r"does not say which engine is new"):
        xrt.XRTModule(lambda x: ops.Tanh(x), rollout=0.05)
    with pytest.raises(xrt.OptionError, match=r"'absent', which is not among engine=\['candidate', 'proven'\]"):
        module(share=1, engine="absent")
    for bad in (1.5, True, {"engine": "x"}, {"share": 0.1, "of": "weeks"}, {"share": 0.1, "shar": 1}):
        with pytest.raises(xrt.OptionError, match=r"rollout"):
            xrt.XRTModule(lambda x: ops.Tanh(x), engine="candidate", rollout=bad)
    with pytest.raises(xrt.UnsupportedError, match=r"accuracy= chooses"):
        xrt.XRTModule(lambda x: ops.Tanh(x), engine="candidate", rollout=0.5, accuracy=0.1)
    absent = xrt.XRTModule(lambda x: ops.Tanh(x), rollout={"share": 1, "engine": "absent"}, guard=False)
    assert "absent" in str(found(absent, "unusable")[0]["reason"])
    m = xrt.XRTModule(lambda x: ops.Tanh(x), engine="proven", guard=False, prune=False, cache="off")
    m(X)
    m.save(tmp_path / "m.xrt")
    monkeypatch.setenv("XRT_ROLLOUT", '{"share": 1, "engine": "proven"}')
    loaded = xrt.XRTModule.load(tmp_path / "m.xrt")
    assert loaded.engines == ("proven",)
    assert found(loaded, "not_applied")


def test_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are drawn for training too; calls are not."""

    class Line(xrt.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.w = np.zeros((8, 1), np.float32)

        def build(self, x: xrt.TensorType) -> object:
            return x @ self.w

    def trainer(**rollout: Any) -> xrt.training.TrainModule:
        return xrt.training.TrainModule(
            Line(), loss="mse", optimizer=xrt.optim.Adam(1e-2), engine=["candidate", "proven"], guard=False,
            rollout=rollout,
        )  # fmt: skip

    acts = []
    for number in range(6):
        monkeypatch.setenv(JOB, str(number))
        t = trainer(share=0.5)
        decided = t.events.recent("rollout.decided")[0].fields["acts"]
        assert ("candidate" in t._pipeline.engine_names) == decided
        acts.append(decided)
    assert len(set(acts)) == 2
    with pytest.raises(xrt.OptionError, match=r"stay on one engine: of='jobs'"):
        trainer(share=0.5, of="calls")


def test_differences() -> None:
    """Errors are relative to an output's largest element; shapes, types, NaN and infinity must be the same."""
    ones = np.ones(4, np.float32)
    assert difference(ones, ones * 1.0001)[1] == ""
    assert "is off by" in difference((ones, ones), (ones, ones * 1.01))[1]
    assert difference(ones.astype(np.float16), (ones * 1.01).astype(np.float16))[1] == ""
    assert "1 outputs, and 2" in difference(ones, (ones, ones))[1]
    assert "float32[4], and float32[2]" in difference({"y": ones}, {"y": ones[:2]})[1]
    odd = np.array([np.nan, np.inf, 1.0, 0.0], np.float32)
    assert difference(odd, odd) == (0.0, "")
    assert difference(odd, ones)[1]
    assert difference(ones, odd)[1]
    assert difference(np.array([1, 2]), np.array([1, 3]))[1]
    assert difference(np.array(["a"]), np.array(["a"])) == (0.0, "")


def reported(folder: pathlib.Path, job: str, monkeypatch: pytest.MonkeyPatch, engine: str = "candidate") -> None:
    """A job with a rollout that writes its report."""
    monkeypatch.setenv(JOB, job)
    reporter = Reporter(str(folder))
    stop = xrt.subscribe(reporter.hear)
    m = module(engine, share=0.5)
    for _ in range(3):
        m(X)
    stop()
    reporter.write()
    assert not reporter.failure


def test_status(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs with the new engine and without it, comparisons and differences; exit code 1 where there are any."""
    for number in range(8):
        reported(tmp_path, str(number), monkeypatch)
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "candidate: 0.5 of the jobs" in done.output
    assert "0 differ" in done.output
    assert "with 95 % confidence fewer than" in done.output
    for number in range(8):
        reported(tmp_path, str(number), monkeypatch, "wrong")
    done = CliRunner().invoke(app, ["status", str(tmp_path), "--json"])
    assert done.exit_code == 1
    rows = {(r["engine"], r["acts"]): r for r in json.loads(done.output)["rollouts"]}
    assert rows["candidate", True]["jobs"] + rows["candidate", False]["jobs"] == 8
    assert rows["wrong", True]["different"] == rows["wrong", True]["given_up"] == rows["wrong", True]["jobs"] > 0
    assert rows["candidate", True]["comparisons"] >= rows["candidate", True]["jobs"]
    fleet = read_fleet(str(tmp_path))
    version = np.__version__  # of the engine's library, the host's
    assert fleet.rollouts["wrong", version, "new"] == [rows["wrong", True]["jobs"], rows["wrong", True]["different"]]
    labels = f'arm="new",engine="candidate",version="{version}"'
    assert f"xrt_fleet_rollout_differences{{{labels}}} 0.0" in fleet.as_prometheus()
    assert f"wrong {version} new" in fleet.as_text()
    empty = CliRunner().invoke(app, ["status", str(tmp_path / "absent")])
    assert empty.exit_code == 1
    assert "has no reports" in empty.output


def test_two_environments(tmp_path: pathlib.Path, environment: dict[str, str]) -> None:
    """`xrt rollout run` takes the Python that the job's name draws, the same each time, and tells the report."""
    for name in ("new", "proven"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" "${ARM}"\n')
        script.chmod(0o755)
    said = {}
    for job in [*map(str, range(4)), "0"]:
        done = subprocess.run(
            [sys.executable, "-c", "from xrt_distributed.rollout_command import app; app()", "run", "--engine", "xla",
             "--share", "0.5", "--new", str(tmp_path / "new"), "--proven", str(tmp_path / "proven"), "job.py", "-x"],
            env={**environment, JOB: job}, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        which, rest = done.stdout.split(" ", 1)
        assert said.setdefault(job, which) == which
        assert rest.startswith("job.py -x ")
        assert json.loads(rest.removeprefix("job.py -x "))["acts"] == (which == "new")
    assert set(said.values()) == {"new", "proven"}


def test_the_arm_is_reported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `xrt rollout run` says stands in the report, with the version that is installed."""
    monkeypatch.setenv(ARM, json.dumps({"engine": "numpy", "share": 0.1, "acts": True}))
    (row,) = Reporter(str(tmp_path)).report()["rollouts"]
    assert (row["engine"], row["version"], row["acts"]) == ("numpy", np.__version__, True)
    monkeypatch.setenv(ARM, "[]")
    assert not Reporter(str(tmp_path)).report()["rollouts"]
