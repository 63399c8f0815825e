"""The command `xrt`: the table of its commands, of which only the one that was asked for is imported."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from xrt_core import __version__

COMMANDS: Final = {
    "run": "Run a model: outputs, share on engines, timings.",
    "train": "Train a model on arrays from a file.",
    "partition": "Show the clusters and why other nodes are on the host.",
    "profile": "Show where the time of calls goes.",
    "export": "Write a stage of a model as ONNX, for Netron.",
    "inspect": "Show what an engine makes of a cluster: HLO, layers, ...",
    "compile": "Compile a model ahead of time into one file.",
    "engines": "List the engines: version, devices, state, remedy.",
    "doctor": "Show versions, settings, and problems with remedies.",
    "passes": "List the passes in execution order.",
    "report": "Run a model under guard: verdicts and timings.",
    "bisect": "Find the nodes that an engine computes wrongly.",
    "replay": "Run a bundle of a wrong result again.",
    "new-engine": "Write the package of a new engine from a template.",
    "check-engine": "Test an engine: score by operator family and dtype.",
    "cache": "Show, export or delete executables on the disk.",
}
"""The core's commands, each a function or an application in the module of its name: its line in `xrt --help`."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xrt-core {__version__}")
        raise typer.Exit


def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log events to stderr; give it twice for debug output.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    if quiet:
        from xrt_core.cli.display import quietly

        context.with_resource(quietly(True))
    if verbose:
        logging.basicConfig(format="%(relativeCreated)6.0f ms  %(name)s: %(message)s")
        logging.getLogger("xrt").setLevel(logging.DEBUG if verbose > 1 else logging.INFO)


def application(asked: str | None = None) -> typer.Typer:
    """Return the application `xrt`, without the commands of plugins.

    asked: the only command to import, "" for none; the others have their names and lines of help. None imports all.
    """
    app = typer.Typer(
        name="xrt",
        help="Run ML graphs faster by handing their subgraphs to compute engines.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing it takes longer than all the rest of `xrt --help`
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for name, line in COMMANDS.items():
        if asked is not None and name != asked:
            app.command(name, short_help=line)(_not_imported)
            continue
        module = name.replace("-", "_")
        found = getattr(importlib.import_module(f"xrt_core.cli.{module}"), module)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, short_help=line)
        else:
            app.command(name, short_help=line)(found)
    return app


def _not_imported() -> None:
    raise AssertionError("the application was made for another command")


def asked_for(arguments: Sequence[str]) -> str:
    """Return the command in the arguments of `xrt`, "" for none."""
    return next((a for a in arguments if not a.startswith("-")), "")


def main() -> None:
    """Entry point of the command `xrt`."""
    asked = None if "_XRT_COMPLETE" in os.environ else asked_for(sys.argv[1:])  # the shell completes any command
    app = application(asked)
    if asked not in COMMANDS:  # a command of the core imports no plugin
        from xrt_core.cli.plugin_commands import add_commands

        for line in add_commands(app, COMMANDS, asked):
            typer.echo(f"left out: {line}", err=True)
    app()


if __name__ == "__main__":
    main()
