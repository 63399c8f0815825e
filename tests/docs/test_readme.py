"""What the README and the docs name: scripts, commands and links. Their examples are in test_examples.py."""

from __future__ import annotations

import re

from tests.architecture.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_commands_exist() -> None:
    """The scripts that the page names are there and can be executed; the options it shows are options."""
    import os

    from typer.testing import CliRunner

    from xrt_core.cli.app import application

    for name in ("scripts/demo", "scripts/test", ".ci/run"):
        assert name in README
        assert os.access(ROOT / name, os.X_OK)
    for line in re.findall(r"^xrt (.*?)(?: *#.*)?$", README, re.MULTILINE):
        command, *arguments = line.split()
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(application(), [command, "--help"])
        assert shown.exit_code == 0, line
        for argument in arguments:
            assert not argument.startswith("-") or argument in shown.output, line


def test_links_lead_somewhere() -> None:
    """Every relative link of the README and the docs is a file."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
