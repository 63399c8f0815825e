"""`xrt report`: a model under guard, from the command line."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from tests.guard import engines as tested
from tests.guard.guarded import registered
from xrt_core.cli.app import application
from xrt_core.frontends.onnx_export import save
from xrt_core.guard.verdict_cache import forget_all
from xrt_core.testing import functions


@pytest.fixture
def model(tmp_path: pathlib.Path, own_cache: pathlib.Path) -> Iterator[pathlib.Path]:
    forget_all()
    save(functions.chain()[0], tmp_path / "m.onnx")
    with registered(tested.Plain):
        yield tmp_path / "m.onnx"


def report(model: pathlib.Path, *more: str) -> str:
    """What the command prints."""
    arguments = ["report", str(model), "-e", "plain", "-o", "guard_tune=false", "-n", "5", *more]
    done = CliRunner().invoke(application(), arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_text(model: pathlib.Path) -> None:
    """State, engine, reason and history, and how much the engine answered."""
    text = report(model)
    assert "1 clusters, 6 calls, 83.3% accelerated" in text
    assert "plain_0: live, runs on plain: plain: right on 2 sets of inputs" in text
    assert re.search(r"queued \+0.00 s, compiling .*, verifying .*, ready .*, live", text)


def test_json_and_prometheus(model: pathlib.Path) -> None:
    """The same as data, and as counters with a HELP and a TYPE line each."""
    found = json.loads(report(model, "--json"))
    assert found["clusters"][0]["state"] == "live"
    text = report(model, "--format", "prometheus")
    assert 'xrt_cluster_calls_total{cluster="plain_0",engine="plain",number="0"} 6.0' in text
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+\{(\w+="[^"]*",?)+\} [-+.\de]+', line), line
    samples = [line.partition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(set(samples)) == len(samples)


def test_a_host_alone_has_nothing_to_guard(model: pathlib.Path) -> None:
    """It says so."""
    done = CliRunner().invoke(application(), ["report", str(model), "-e", "host"])
    assert done.exit_code == 0, done.output
    assert "no cluster is under guard" in done.stdout
