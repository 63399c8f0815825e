"""No file of the core imports, directly or by others, one that imports it: the contract in pyproject.toml."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def lint(config: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict on the contracts of a file."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-cache", "--config", str(config)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_files_import_in_no_circle() -> None:
    """Late imports and those for types alone count; the one circle inside ir is named in the contract."""
    found = lint(ROOT / "pyproject.toml")
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_circle_inside_ir_is_found(tmp_path: pathlib.Path) -> None:
    """Without the exception the contract is broken."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = text[text.index("ignore_imports = [") : text.index("[tool.mypy]")]
    config = tmp_path / "pyproject.toml"
    config.write_text(text.replace(ignored, ""), encoding="utf-8")
    found = lint(config)
    assert found.returncode == 1
    assert ".graph -> .function" in found.stdout
