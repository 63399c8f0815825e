"""`xrt passes`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from xrt_core.cli.app import application
from xrt_core.compiler import passes
from xrt_core.passes.pass_manager import STAGES


def test_the_listing() -> None:
    """In order, with stage, owner and reason."""
    done = CliRunner().invoke(application(), ["passes"])
    assert done.exit_code == 0
    names = [p.name for s in STAGES for p in passes.passes.order(s)]
    rows = [line.split() for line in done.stdout.splitlines()[1:] if line.strip()]
    assert [r[1] for r in rows if r[0].isdecimal()] == names
    assert "before any rewrite" in done.stdout


def test_the_listing_as_json() -> None:
    """Everything that decides the order."""
    done = CliRunner().invoke(application(), ["passes", "--json"])
    told = json.loads(done.stdout)
    first = told["passes"][0]
    assert (first["name"], first["stage"], first["owner"], first["origin"]) == (
        "apply_marks",
        "model",
        "xrt-core",
        "core",
    )
    assert told["left_out"] == dict(passes.load_plugin_passes(passes.EventLog()))
