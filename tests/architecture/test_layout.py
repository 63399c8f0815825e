"""The README's map and every module's first sentence, held against the tree."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests.architecture.source import CORE, ROOT, parse, sources

NOT_MODULES = {"__init__.py", "__pycache__", "py.typed"}


def test_the_map_is_the_tree() -> None:
    """The README has a line for every part of xrt_core and for nothing else."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("<!-- map of xrt_core", 1)[1].split("\n\n", 1)[0]
    mapped = re.findall(r"^\| `([^`]+)` \| \S", section, re.MULTILINE)
    there = {f"{p.name}/" if p.is_dir() else p.name for p in CORE.iterdir() if p.name not in NOT_MODULES}

    assert len(mapped) == len(set(mapped))
    assert set(mapped) == there


@pytest.mark.slow
@pytest.mark.parametrize("path", sources(CORE), ids=lambda p: str(p.relative_to(CORE)))
def test_every_module_opens_with_a_sentence(path: object) -> None:
    """A module that holds anything says in its first line what lives there."""
    tree = parse(path)  # type: ignore[arg-type]
    if not tree.body:
        return
    text = ast.get_docstring(tree)
    assert text, f"{path} has no docstring"
    first = text.splitlines()[0].rstrip()
    assert first[-1:] in ".:;", f"{path}: the first line is not a sentence: {first}"


def test_typed() -> None:
    """The package says that it carries types."""
    assert (CORE / "py.typed").exists()


def test_the_menu_of_checks() -> None:
    """Every nox session has a docstring, which is what `nox -l` shows, and the pages name only sessions that exist."""
    tree = parse(ROOT / "noxfile.py")
    sessions = {
        node.name: ast.get_docstring(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(d) for d in node.decorator_list)
    }
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {n for page in pages for n in re.findall(r"nox -s (\w+)", page.read_text(encoding="utf-8"))}

    assert all(sessions.values()), sessions
    assert named <= set(sessions)


def test_the_page_of_options_names_every_variable() -> None:
    """The core's table in docs/options.md names its environment variables, and no others."""
    from xrt_core.options import TABLE

    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert set(re.findall(r"`((?:FLAGS|XRT)_\w+)`", page)) == {o.env for o in TABLE.values() if o.env}


def test_the_picture_is_made_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/architecture.svg is what scripts/architecture_picture.py draws from today's imports."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("architecture_picture")  # in this process, which has parsed the files already
    assert script.TARGET.read_text(encoding="utf-8") == script.picture(), f"{script.TARGET} is out of date"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["readme_picture", "readme_plot"])
def test_the_pictures_of_the_readme_are_what_their_scripts_draw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/clusters.svg shows how XRT partitions a model today, docs/speed.svg what benchmarks/inference.json holds."""
    if name == "readme_picture":
        pytest.importorskip("jax")
        pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr("sys.argv", [name, "--check"])
    with pytest.raises(SystemExit) as done:
        importlib.import_module(name).main()
    assert done.value.code == 0
