"""The reference of the command line, made from the commands: `python -m xrt_core.cli.reference > docs/cli.md`.

With the name of a command it prints the JSON Schema of what that prints with `--json`.
"""

from __future__ import annotations

import enum
import inspect
import json
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from typer.models import ArgumentInfo, OptionInfo

from xrt_core.cli import results
from xrt_core.cli.app import application
from xrt_core.cli.display import ExitCode

_HEAD: Final = """# Command line

<!-- made by `python -m xrt_core.cli.reference > docs/cli.md`; do not edit -->

`xrt COMMAND --help` shows the same. What is printed for people may change; `--json` is for programs: every command
prints one JSON object of the type below on stdout, and no text, whatever it writes beside. Numbers that JSON has not
(NaN, infinity) are null. A command that fails prints an [Error](#error) there, and its message on stderr; arguments
that the command line does not take are told on stderr alone. Progress goes to stderr, where that is a terminal;
`--quiet` turns it off, for one command or for all (`xrt --quiet COMMAND`). `python -m xrt_core.cli.reference COMMAND`
prints a JSON Schema.

`xrt --install-completion` sets up completion of commands, options and engines in bash, zsh, fish and PowerShell;
`xrt --show-completion` prints what it would install. `XRT_DEBUG=1` prints the traceback of an error.

## Exit codes

| code | name | meaning |
|---|---|---|
"""
_CODES: Final = {
    ExitCode.DONE: "it did what it was asked to",
    ExitCode.FAILED_CHECK: "it ran, and what it checks does not hold: `doctor` found problems, `partition --diff` "
    "differences, `bisect` faulty nodes, `replay` the failure again, `cache verify` damage, `cache import` entries "
    "that it rejected",
    ExitCode.USAGE: "it could not: wrong arguments, a file or a model that does not fit, an engine that cannot be used",
    ExitCode.BUG: "an error within XRT; please report it",
    ExitCode.INTERRUPTED: "Ctrl-C, by convention of shells",
}


def commands() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Every command of the core: its words ("cache ls"), its function, the type of its result."""
    app = application()
    groups = [("", app.registered_commands)]
    for g in app.registered_groups:
        assert g.typer_instance is not None
        groups.append((f"{g.name} ", g.typer_instance.registered_commands))
    for prefix, found in groups:
        for i in found:
            assert i.callback is not None
            yield prefix + (i.name or i.callback.__name__), i.callback, getattr(i.callback, "result", None)


def schema(type_: Any) -> dict[str, Any]:
    """The JSON Schema of a result; of a command with several kinds of them, any of these."""
    found, components = msgspec.json.schema_components(kinds_of(type_))
    return {"anyOf": list(found), "$defs": components}


def page() -> str:
    """The reference, as Markdown."""
    lines = [_HEAD + "\n".join(f"| {c.value} | {c.name.lower()} | {_CODES[c]} |" for c in ExitCode), "\n## Commands\n"]
    shown: list[Any] = [results.Error]
    for words, function, type_ in commands():
        lines += [f"### xrt {words}\n", " ".join((function.__doc__ or "").split()) + "\n"]
        lines += ["| argument | |", "|---|---|"]
        lines += [f"| {given} | {text} |" for given, text in _arguments(function)]
        kinds = kinds_of(type_)
        lines.append(f"\n`--json`: {' or '.join(map(_link, kinds))}\n")
        shown += kinds
    lines.append("## Types\n")
    todo, done = list(shown), list[Any]()
    while todo:
        kind = todo.pop(0)
        if kind in done:
            continue
        done.append(kind)
        lines += [f"### {kind.__name__}\n", " ".join((kind.__doc__ or "").split()) + "\n", "| field | type | |"]
        lines.append("|---|---|---|")
        for f in msgspec.structs.fields(kind):
            text, about, inside = _type(f.type)
            lines.append(f"| `{f.encode_name}` | {text} | {about} |")
            todo += inside
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _arguments(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """For each argument and option how it is given, and what it is."""
    for p in inspect.signature(function, eval_str=True).parameters.values():
        type_, *more = typing.get_args(p.annotation) if typing.get_origin(p.annotation) is typing.Annotated else (None,)
        info = next((m for m in more if isinstance(m, ArgumentInfo | OptionInfo)), None)
        if info is None:
            continue
        required = p.default is inspect.Parameter.empty
        text = " ".join((info.help or "").replace("|", "\\|").split())
        if isinstance(p.default, int | float | str) and not isinstance(p.default, bool):
            text += f" Default: {p.default}."
        if isinstance(info, ArgumentInfo):
            yield f"`{p.name.upper()}`" + ("" if required else ", optional"), text
            continue
        given = [o for o in (info.default, *(info.param_decls or ())) if isinstance(o, str)]
        value = _value(type_)
        yield ", ".join(f"`{o}{value}`" for o in given) + (", required" if required else ""), text


def _value(type_: Any) -> str:
    """What an option takes, such as " PATH"; "" for a flag."""
    if isinstance(type_, types.UnionType):
        type_ = next(a for a in typing.get_args(type_) if a is not type(None))
    if typing.get_origin(type_) in (list, tuple):
        inside = [a for a in typing.get_args(type_) if a is not Ellipsis]
        return "".join(map(_value, inside))
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return " " + "/".join(str(m.value) for m in type_)
    return {bool: "", pathlib.Path: " PATH", int: " N", float: " NUMBER"}.get(type_, " TEXT")


def kinds_of(type_: Any) -> list[Any]:
    """The types of a command's result."""
    return list(typing.get_args(type_)) if isinstance(type_, types.UnionType) else [type_]


def _link(kind: Any) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _type(t: Any) -> tuple[str, str, list[Any]]:
    """A type as text, what is said of it, and the structs in it."""
    if typing.get_origin(t) is typing.Annotated:
        inner, *more = typing.get_args(t)
        text, about, inside = _type(inner)
        return text, next((m.description for m in more if isinstance(m, msgspec.Meta) and m.description), about), inside
    if isinstance(t, types.UnionType) or typing.get_origin(t) is typing.Union:
        parts = [_type(a) for a in typing.get_args(t)]
        return " or ".join(p[0] for p in parts), "", [k for p in parts for k in p[2]]
    origin, given = typing.get_origin(t), typing.get_args(t)
    if origin in (list, tuple):
        parts = [_type(a) for a in given]
        name = "list of" if origin is list else "pair of"
        return f"{name} {', '.join(p[0] for p in parts)}", "", [k for p in parts for k in p[2]]
    if origin is dict:
        text, _, inside = _type(given[1])
        return f"object of {text}", "", inside
    if isinstance(t, type) and issubclass(t, msgspec.Struct):
        return _link(t), "", [t]
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "anything"}
    return names.get(t, str(t)), "", []


def main() -> None:
    """Print the page, or the schema of the command in the arguments."""
    if len(sys.argv) < 2:
        sys.stdout.write(page())
        return
    known = {words: type_ for words, _, type_ in commands()}
    wanted = " ".join(sys.argv[1:])
    if wanted not in known:
        from xrt_core.errors import nearest

        sys.exit(f"there is no command {wanted!r}{nearest(wanted, known)}")
    print(json.dumps(schema(known[wanted]), indent=2))


if __name__ == "__main__":
    main()
