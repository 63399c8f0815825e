"""The examples of the README, run as they stand, their output compared with the text below them."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from tests.architecture.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
_EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```", re.DOTALL)


def test_examples_print_what_the_page_says() -> None:
    """All examples run one after the other in one namespace, and each prints exactly the text that follows it."""
    pytest.importorskip("jax", reason="the examples use the XLA engine")
    namespace: dict[str, object] = {}
    examples = list(_EXAMPLE.finditer(README))
    assert len(examples) == README.count("```python")

    for example in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example["code"], "README.md", "exec"), namespace)
        assert printed.getvalue() == example["output"]


def test_commands_exist() -> None:
    """The scripts that the page names are there and can be executed; the options it shows are options."""
    import os

    from typer.testing import CliRunner

    from xrt_core.cli.app import app

    for name in ("scripts/demo", "scripts/test", ".ci/run"):
        assert name in README
        assert os.access(ROOT / name, os.X_OK)
    for line in re.findall(r"^xrt (.*?)(?: *#.*)?$", README, re.MULTILINE):
        command, *arguments = line.split()
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"])
        assert shown.exit_code == 0, line
        for argument in arguments:
            assert not argument.startswith("-") or argument in shown.output, line


def test_links_lead_somewhere() -> None:
    """Every relative link of the README and the docs is a file."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
