"""The tutorial page: its code is that of the files it names, and its example prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorial-engine.md"
_BLOCK = re.compile(r"`(?P<path>plugins/xrt-toy/[^`]+)`\n\n```\w+\n(?P<code>.*?)```", re.DOTALL)

if not PAGE.exists():
    pytest.skip("the page lives in the core's repository", allow_module_level=True)

TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [(m["path"], m["code"]) for m in _BLOCK.finditer(TEXT)]


@pytest.mark.parametrize(("path", "code"), BLOCKS, ids=[Path(p).name for p, _ in BLOCKS])
def test_a_block_is_the_code_of_its_file(path: str, code: str) -> None:
    """Every block stands in the file that is named above it, word for word."""
    assert code in (ROOT / path).read_text(encoding="utf-8"), f"{path} has changed; bring the page up to date"


def test_no_block_escapes() -> None:
    """Blocks of code are pieces of files, but for the commands and the one example."""
    fences = re.findall(r"^```(\w+)$", TEXT, re.MULTILINE)
    assert fences.count("python") + fences.count("toml") == len(BLOCKS) + 1
    assert len(BLOCKS) >= 20


def test_the_example_prints_what_the_page_says() -> None:
    """The example runs as it stands."""
    example = re.search(r"```python\n(import numpy.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert example is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example[1], PAGE.name, "exec"), {"__name__": "example"})
    assert printed.getvalue() == example[2]
