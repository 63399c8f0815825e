"""docs/tutorial-c-library.md, followed to the letter: the engine over the BLAS that it makes passes the kit."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import pytest

from tests.template.baking import ROOT, environment, install, run

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "tutorial-c-library.md"
_BLOCK = re.compile(r"^`(src/[\w./]+)`\n\n<!-- skip: .*? -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^xrt (new-engine .*)$", re.MULTILINE)


def follow(folder: pathlib.Path) -> pathlib.Path:
    """Write the project as the page says: files whole, functions and lines in the place of those of their name."""
    page = PAGE.read_text(encoding="utf-8")
    (command,) = _COMMAND.findall(page)
    arguments = [a.strip('"') for a in re.findall(r'"[^"]*"|\S+', command)]
    cli = "import sys; sys.path.insert(0, sys.argv.pop(1)); from xrt_core.cli.app import main; main()"
    done = run([sys.executable, "-c", cli, str(ROOT), *arguments], folder)
    assert done.returncode == 0, done.stdout
    project = folder / "xrt-blas"
    blocks = _BLOCK.findall(page)
    assert len(blocks) == 4
    for name, text in blocks:
        path = project / name
        if text.startswith('"""'):
            path.write_text(text, encoding="utf-8")
            continue
        before = path.read_text(encoding="utf-8")
        first = re.escape(re.split(r"\(| = ", text)[0])
        end = r"(?=\n\n\n)" if text.startswith("def ") else r"(?=\n)"
        after, count = re.subn(rf"^{first}\b.*?{end}", lambda _, t=text: t.rstrip("\n"), before, flags=re.M | re.S)
        assert count == 1, f"{name} has {count} of {first}"
        path.write_text(after, encoding="utf-8")
    return project


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The project, and the interpreter of an environment that has it. Skips where there is no such library."""
    folder = tmp_path_factory.mktemp("blas")
    project = follow(folder)
    python = environment(folder / "venv")
    install(python, project)
    found = run([python, "-c", "from xrt_blas import cblas; print(cblas.PATH)"], project)
    if "no BLAS with the C interface" in found.stdout:
        pytest.skip("no BLAS with the C interface is on this machine")
    assert "blas" in found.stdout
    return project, python


def test_the_page_makes_an_engine(made: tuple[pathlib.Path, pathlib.Path]) -> None:
    """Clean for ruff; its own tests, and the kit's cases of what the library computes, are green."""
    project, python = made
    done = run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], project)
    assert done.returncode == 0, done.stdout
    done = run([python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "engine or Gemm or MatMul"], project)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "passed" in done.stdout


@pytest.mark.nightly
def test_it_passes_the_kit(made: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """The contract, planted faults and mutated models too; of linear algebra Gemm and MatMul are taken, and pass."""
    project, python = made
    cli = "from xrt_core.cli.app import main; main()"
    arguments = ("check-engine", "xrt-blas", "--fuzz", "5", "--report", tmp_path / "card.json")
    done = run([python, "-c", cli, *arguments], project)
    assert done.returncode == 0, done.stdout[-6000:]
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["families"]["linear"]["taken"] == card["families"]["linear"]["passed"] == 2
    assert card["operators"]["Gemm"]["passed"] >= 2
    assert card["operators"]["MatMul"]["passed"] >= 2
    assert card["contract"]["test_mutated_models"] == "passed"
