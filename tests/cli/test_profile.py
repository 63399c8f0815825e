"""`xrt profile`: the table, the nodes, JSON, the page and the trace."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner, Result

from tests.docs.test_examples import write_model
from xrt_core.cli.app import application
from xrt_core.profiling import Roofline, roofline


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A small model; this machine is not measured."""
    monkeypatch.setattr(Roofline, "measure", classmethod(lambda cls: cls(1e10, 1e11, roofline._machine())))
    write_model(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def profile(*arguments: object) -> Result:
    done = CliRunner().invoke(application("profile"), ["profile", *map(str, arguments), "-e", "host"])
    assert done.exit_code == 0, done.output
    return done


def test_the_table(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A row for each step, by own time; `--nodes` a row for each node; both files are written."""
    done = profile(model, "-n", 3, "--html", tmp_path / "p.html", "--trace", tmp_path / "p.json", "--remeasure")
    assert "3 calls" in done.stdout
    assert "this machine: 10 GB/s, 100 GFLOP/s" in done.stdout
    assert "Conv encoder/conv" in done.stdout
    assert "between steps" in done.stdout
    assert "wrote" in done.stdout
    assert "Conv encoder/conv" in (tmp_path / "p.html").read_text()
    named = [e["args"].get("nodes") for e in json.loads((tmp_path / "p.json").read_text())["traceEvents"]]
    assert named.count(["encoder/conv"]) == 3
    rows = [line.split() for line in profile(model, "-n", 2, "--nodes").stdout.splitlines()]
    assert {r[0] for r in rows if len(r) == 4} >= {"encoder/conv", "head/scores", "head/softmax"}


def test_json(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Nothing but JSON on stdout, whatever is written beside."""
    done = profile(model, "--json", "-n", 2, "--first", "--html", tmp_path / "p.html")
    found = json.loads(done.stdout)
    assert found["calls"] == 2
    assert {"plan", "label", "own", "peak"} <= set(found["rows"][0])
    assert (tmp_path / "p.html").exists()
