"""Commands of the command line that plugins register (hook `xrt_commands`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import typer

from xrt_core.cli.display import command
from xrt_core.plugins import plugins


def wanted(arguments: Sequence[str], own: Collection[str]) -> bool:
    """Return whether plugins must be loaded for the arguments of `xrt`: a command that is not in `own`, or the help.

    A command of the core imports no plugin.
    """
    asked = next((a for a in arguments if not a.startswith("-")), None)
    return asked not in own


def add_commands(app: typer.Typer, own: Collection[str]) -> list[str]:
    """Add the commands of plugins to the application; return a line per command that could not be added.

    own: names of the core's commands.
    """
    owners = dict.fromkeys(own, "xrt-core")
    for plugin, owner, row in plugins.contributions("xrt_commands", "xrt.commands"):
        why = _why_not(row, owners, owner)
        if why:
            plugins.problem(f"command of {plugin}", owner, why)
            continue
        name, thing = row
        owners[name] = owner
        if isinstance(thing, typer.Typer):
            app.add_typer(thing, name=name, help=thing.info.help or f"Commands of {owner}.")
        else:
            app.command(name, context_settings=getattr(thing, "context_settings", None))(command(thing))
    return [
        f"{p.what} ({p.owner}): {p.reason}"
        for p in plugins.problems()
        if p.what.startswith("command of ") or p.what.endswith(" of xrt.commands")
    ]


def _why_not(row: Any, owners: dict[str, str], owner: str) -> str:
    """Return why a row of the hook is invalid, or ""."""
    if not (isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str)):
        return f"the hook xrt_commands gives {row!r}, which is no row (name, app)"
    name, thing = row
    if not name.replace("-", "_").isidentifier():
        return f"the command's name is {name!r}; it must be a word"
    if name in owners:
        return f"command {name!r} is registered twice: by {owners[name]} and by {owner}"
    if not isinstance(thing, typer.Typer) and not callable(thing):
        return f"command {name!r} is {thing!r}; it must be a typer.Typer or a function"
    return ""
