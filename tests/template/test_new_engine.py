"""`xrt new-engine`: the template of the package, by a command that needs no clone."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys
import zipfile

import pytest
from typer.testing import CliRunner

from tests.template.baking import ROOT, TEMPLATE, Variant, bake, files
from xrt_core.cli.app import application


def new_engine(*arguments: object) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed."""
    done = CliRunner().invoke(application("new-engine"), ["new-engine", *map(str, arguments)])
    return done.exit_code, done.output


def test_it_writes_what_cookiecutter_writes(tmp_path: pathlib.Path) -> None:
    """The command's options are the template's questions; the files are the same."""
    options = ("--style", "kernels", "--licence", "MIT", "--author", "Ada Lovelace", "--devices", "cpu")
    code, said = new_engine("acme", *options, "--no-ask", "--output", tmp_path / "new")

    assert code == 0, said
    assert f"wrote {tmp_path / 'new' / 'xrt-acme'}" in said
    baked = bake(tmp_path / "baked", Variant("kernels", "MIT"))
    made = tmp_path / "new" / "xrt-acme"
    assert files(made) == files(baked)
    assert all((made / n).read_bytes() == (baked / n).read_bytes() for n in files(made))


def test_every_question_has_an_option() -> None:
    """What cookiecutter would ask can be given."""
    questions = {q for q in json.loads((TEMPLATE / "cookiecutter.json").read_text()) if not q.startswith("_")}
    shown = CliRunner().invoke(application("new-engine"), ["new-engine", "--help"], env={"COLUMNS": "200"}).output
    options = {"array_library": "style"} | {q: q.replace("_", "-") for q in questions - {"array_library", "engine"}}
    assert all(f"--{o}" in shown for o in options.values()), shown


def test_bad_answers_write_nothing(tmp_path: pathlib.Path) -> None:
    """A choice that there is not, and a name that is taken."""
    code, said = new_engine("acme", "--style", "fast", "--no-ask", "--output", tmp_path)
    assert code == 2
    assert "--style 'fast' is none of namespace, kernels, onnx" in said
    code, said = new_engine("xla", "--no-ask", "--output", tmp_path)
    assert code == 2
    assert "nothing was written: these answers make no engine" in said
    assert not list(tmp_path.iterdir())


def test_without_cookiecutter_it_says_what_to_install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that brings it is named."""
    monkeypatch.setitem(sys.modules, "cookiecutter.exceptions", None)
    code, said = new_engine("acme", "--no-ask", "--output", tmp_path)
    assert code == 2
    assert 'pip install "xrt-core[authors]"' in said
    assert not list(tmp_path.iterdir())


def test_without_the_template_it_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that lacks it is named."""
    module = importlib.import_module("xrt_core.cli.new_engine")
    monkeypatch.setattr(module, "_PLACES", (tmp_path / "none",))
    code, said = new_engine("acme", "--no-ask", "--output", tmp_path)
    assert code == 2
    assert "has no template of engines" in said


@pytest.mark.slow
def test_the_wheel_has_the_template_and_the_viewer(tmp_path: pathlib.Path) -> None:
    """Every file of the template, and Cytoscape.js with its licence."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"xrt_core/templates/engine/{n}" for n in files(TEMPLATE)} <= names
    assert {f"xrt_core/reports/viewer/{n}" for n in ("cytoscape.min.js", "cytoscape.LICENSE", "viewer.js")} <= names
