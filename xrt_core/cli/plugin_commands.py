"""Commands of the command line that plugins register (hook `xrt_commands`)."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

import typer

from xrt_core.plugins import plugins


def add_commands(app: typer.Typer, own: Collection[str], asked: str | None = None) -> list[str]:
    """Add the commands of plugins to the application; return a line per command that could not be added.

    own: names of the core's commands. asked: the only command to import where a plugin names its module, "" for none,
    None for all.
    """
    owners = dict.fromkeys(own, "xrt-core")
    for plugin, owner, row in plugins.contributions("xrt_commands", "xrt.commands"):
        why = _why_not(row, owners, owner)
        if why:
            plugins.problem(f"command of {plugin}", owner, why)
            continue
        name, thing, line = (*row, None)[:3]
        if isinstance(thing, str):
            if asked is not None and name != asked:
                owners[name] = owner
                app.command(name, short_help=line)(_not_imported)
                continue
            try:
                thing = _imported(thing)
            except Exception as e:
                plugins.problem(f"command of {plugin}", owner, f"command {name!r}, {thing}: {type(e).__name__}: {e}")
                continue
        owners[name] = owner
        if isinstance(thing, typer.Typer):
            app.add_typer(thing, name=name, help=thing.info.help or f"Commands of {owner}.", short_help=line)
        else:
            from xrt_core.cli.display import command  # imports rich

            settings = getattr(thing, "context_settings", None)
            app.command(name, short_help=line, context_settings=settings)(command(thing))
    return [
        f"{p.what} ({p.owner}): {p.reason}"
        for p in plugins.problems()
        if p.what.startswith("command of ") or p.what.endswith(" of xrt.commands")
    ]


def _not_imported() -> None:
    raise AssertionError("the application was made for another command")


def _imported(name: str) -> Any:
    """Return what `module:attribute` names: a typer application or a function. Raises whatever its import raises."""
    module, _, attribute = name.partition(":")
    thing = getattr(importlib.import_module(module), attribute)
    if not isinstance(thing, typer.Typer) and not callable(thing):
        raise TypeError(f"it is {thing!r}; it must be a typer.Typer or a function")
    return thing


def _why_not(row: Any, owners: dict[str, str], owner: str) -> str:
    """Return why a row of the hook is invalid, or ""."""
    if not (isinstance(row, tuple) and row and isinstance(row[0], str) and len(row) in (2, 3)):
        return f"the hook xrt_commands gives {row!r}, which is no row (name, app) or (name, 'module:attribute', help)"
    name, thing = row[:2]
    if not name.replace("-", "_").isidentifier():
        return f"the command's name is {name!r}; it must be a word"
    if name in owners:
        return f"command {name!r} is registered twice: by {owners[name]} and by {owner}"
    if isinstance(thing, str):
        if ":" not in thing or len(row) == 2 or not isinstance(row[2], str):
            return f"command {name!r} is {row[1:]!r}; it must be a text 'module:attribute' and a line of help"
    elif len(row) == 3 or not (isinstance(thing, typer.Typer) or callable(thing)):
        return f"command {name!r} is {row[1:]!r}; it must be a typer.Typer or a function"
    return ""
