"""The site: every page is in its navigation, every public name in its reference, and it builds without a warning."""

from __future__ import annotations

import ast
import html
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import xrt_core as xrt
from tests.architecture.source import ROOT
from xrt_core import engine, testing, training

DOCS = ROOT / "docs"
REFERENCE = "\n".join(p.read_text("utf-8") for p in (DOCS / "reference").glob("*.md"))


def config() -> dict[str, Any]:
    """mkdocs.yml."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    return found


def pages_of(nav: Any) -> Iterator[str]:
    """The pages that a navigation names."""
    for part in nav:
        for value in part.values():
            yield from pages_of(value) if isinstance(value, list) else [value]


def made_pages() -> dict[str, str]:
    """The pages that the hook makes of the repository's, by their paths."""
    tree = ast.parse((ROOT / "scripts" / "site" / "pages.py").read_text("utf-8"))
    (value,) = (
        n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PAGES"
    )
    found: dict[str, str] = ast.literal_eval(value)
    return found


def test_the_navigation_names_every_page() -> None:
    """Once, and no page that is not there."""
    named = list(pages_of(config()["nav"]))
    made = made_pages()
    there = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")} | set(made.values())
    assert sorted(named) == sorted(there)
    assert all((ROOT / path).is_file() for path in made)


def test_what_the_site_reads_is_named() -> None:
    """The sources of every plugin are on the path of the reference."""
    plugins = next(p["mkdocstrings"] for p in config()["plugins"] if isinstance(p, dict) and "mkdocstrings" in p)
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "plugins").glob("*/src")}
    assert set(plugins["handlers"]["python"]["paths"]) == {".", *sources}


@pytest.mark.parametrize("module", [xrt, engine, training, testing], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module: Any) -> None:
    """By itself, or in a module that the reference shows as a whole."""
    named = set(re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE))
    whole = {"xrt_core.errors", "xrt_core.events", "xrt_core.frontends.ops", "xrt_core.training", "xrt_core.optim"}
    for name in module.__all__:
        value = getattr(module, name)
        home = getattr(value, "__module__", "")
        full = {f"{module.__name__}.{name}", f"{home}.{name}", f"xrt_core.training.{name}"}
        if name != "__version__" and not isinstance(value, type(xrt)):
            assert full & named or home in whole, f"{module.__name__}.{name}"


def test_docstrings_become_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that describe parameters are items; other text stays, and what looks like a tag is no tag."""
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    import docstrings

    text = "Do it.\n\nshape: of x, as\n    <n>.\ndtype, device: of `<x>`\nnote: none\n\nReturn x."
    assert docstrings.as_lists(text, {"shape", "dtype", "device"}) == (
        "Do it.\n\n- `shape`: of x, as\n    &lt;n>.\n- `dtype`, `device`: of `<x>`\nnote: none\n\nReturn x."
    )


@pytest.mark.slow
def test_it_builds_and_needs_no_network(tmp_path: pathlib.Path) -> None:
    """Strictly: links and their anchors lead somewhere, all names of the reference are found, nothing is fetched."""
    for needed in ("material", "mkdocstrings"):
        pytest.importorskip(needed)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in pages_of(config()["nav"]):
        text = (tmp_path / page).with_suffix(".html").read_text("utf-8")
        taken = re.findall(r'<(?:script|img|iframe)\b[^>]*?\bsrc="([^"]+)"', text)
        taken += re.findall(r'<link\b[^>]*?\bhref="([^"]+)"', text)
        for link in taken:
            assert "://" not in link, f"{page}: {link}"
            file = (tmp_path / page).parent / html.unescape(link).partition("?")[0]
            assert file.exists(), f"{page}: {link}"
    assert "run_timed" in (tmp_path / "reference" / "core.html").read_text("utf-8")
    assert (tmp_path / "source" / "examples" / "lora.py.html").exists()
