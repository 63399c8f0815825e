"""`python -m xrt_ort` and `xrt ort`: run a program whose `import onnxruntime` gives XRT's sessions."""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from xrt_core import options
from xrt_core.errors import OptionError


def run_program(arguments: Sequence[str], prog: str) -> None:
    """Run `[options] program.py arguments` or `[options] -m package arguments` as Python does.

    Raises SystemExit for bad arguments, and whatever the program raises.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] (program.py | -m package) [arguments ...]",
        description="Run a program written for onnxruntime with its sessions on XRT.",
    )
    parser.add_argument("--report", action="store_true", help="say at the end what was sped up, on stderr")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write that report as JSON at the end")
    parser.add_argument("--engine", "-e", action="append", help="an engine; repeat it; default: the fastest of all")
    parser.add_argument("--option", "-o", action="append", default=[], help="NAME=VALUE, any option of docs/options.md")
    parser.add_argument("--after", type=float, help="seconds of calls after which a session is worth compiling for")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a package")
    parser.add_argument("program", help="a file or, with -m, a package")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    own, rest = _split(list(arguments))
    args = parser.parse_args(own)
    args.arguments = rest
    from xrt_ort import scope
    from xrt_ort.settings import configure

    given: dict[str, Any] = {"engine": args.engine} if args.engine else {}
    try:
        for text in args.option:
            name, equals, value = text.partition("=")
            if not equals:
                raise OptionError(f"--option {text!r}: it takes NAME=VALUE, such as minimum_nodes=4")
            given[name] = options.from_text(name, value, f"--option {text}")
        configure(after=args.after, **given)
    except OptionError as e:
        parser.error(str(e))
    scope.install()
    if args.report:
        atexit.register(_print_report)
    if args.json is not None:
        atexit.register(_write_report, args.json.absolute())
    if args.module:
        sys.argv = [args.program, *args.arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args.program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [args.program, *args.arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(args.program)))
        runpy.run_path(args.program, run_name="__main__")


_VALUED = ("--json", "--engine", "-e", "--option", "-o", "--after")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return what is for XRT, the program included, and what is for the program."""
    i = 0
    while i < len(arguments):
        if arguments[i] in _VALUED or arguments[i] == "-m":
            if arguments[i] == "-m":
                return arguments[: i + 2], arguments[i + 2 :]
            i += 2
        elif arguments[i].startswith("-"):
            i += 1
        else:
            return arguments[: i + 1], arguments[i + 1 :]
    return arguments, []


def _print_report() -> None:
    from xrt_ort.report import report

    for row in report():
        print(f"xrt: {row}", file=sys.stderr)


def _write_report(path: pathlib.Path) -> None:
    from xrt_ort.report import report

    path.write_text(json.dumps([dataclasses.asdict(row) for row in report()], indent=2), encoding="utf-8")


def ort(
    arguments: Annotated[list[str], typer.Argument(help="[options] (program.py | -m package) [arguments ...]")],
) -> None:
    """Run a program written for onnxruntime with its sessions on XRT (docs/onnxruntime.md)."""
    run_program(arguments, "xrt ort")


ort.context_settings = {  # type: ignore[attr-defined]
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
