"""Extension of griffe: XRT's docstrings, which describe a parameter by a line `name: ...`, become lists in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ANGLE = re.compile(r"(`[^`]*`)|<(?=[A-Za-z/!])")
_LINE = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")


def as_lists(text: str, names: set[str]) -> str:
    """The text with an item of a list for each line that describes parameters or attributes of these names."""
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and {n.strip(" *") for n in found[1].split(",")} <= names:
            if not within and lines and lines[-1]:
                lines.append("")
            within = True
            described = ", ".join(f"`{n.strip()}`" for n in found[1].split(","))
            lines.append(f"- {described}: {found[2]}")
        else:
            within = within and bool(line)
            lines.append(line)
    return _ANGLE.sub(lambda m: m[1] or "&lt;", "\n".join(lines))  # what looks like a tag of HTML is text


class Parameters(griffe.Extension):
    """Rewrites the docstrings of functions and classes."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Parameters of a function."""
        if func.docstring is not None:
            func.docstring.value = as_lists(func.docstring.value, {p.name.strip("*") for p in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Parameters and attributes of a class."""
        if cls.docstring is None:
            return
        names = {n for n in cls.members if not n.startswith("_")}
        made = cls.members.get("__init__")
        if isinstance(made, griffe.Function):
            names |= {p.name.strip("*") for p in made.parameters}
        cls.docstring.value = as_lists(cls.docstring.value, names)
