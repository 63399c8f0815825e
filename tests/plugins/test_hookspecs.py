"""The one file of hooks: complete, documented, and the same in the page for authors."""

from __future__ import annotations

import inspect
import pathlib
import re

import pytest

import xrt_core as xrt
from xrt_core.plugins import hookspecs
from xrt_core.plugins.discovery import GROUPS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "writing-an-engine.md"
HOOKS = [n for n in vars(hookspecs.Specification) if n.startswith("xrt_")]


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_everything(name: str) -> None:
    """A sentence on its meaning, each parameter, when it is called, its result, and what happens when it raises."""
    function = getattr(hookspecs.Specification, name)
    text = inspect.getdoc(function) or ""
    assert text.splitlines()[0][-1] in ".:", text
    assert re.search(r"^Called ", text, re.MULTILINE)
    assert "exception" in text
    assert re.search(r"result|row|attributes of a pass", text, re.IGNORECASE)
    for parameter in list(inspect.signature(function).parameters)[1:]:
        assert f":param {parameter}:" in text


def test_groups_and_hooks_are_in_the_pages() -> None:
    """The table of the file, and that of docs/writing-an-engine.md, name every group and every hook."""
    table, page = hookspecs.__doc__ or "", PAGE.read_text(encoding="utf-8")
    for name in (*GROUPS, *HOOKS):
        assert name in table, name
        assert f"`{name}`" in page, name


def test_hookimpl_is_at_the_top() -> None:
    """Packages write `@xrt.hookimpl`; the SDK's name is the same object."""
    from xrt_core.engine import hookimpl

    assert xrt.hookimpl is hookimpl is hookspecs.hookimpl
