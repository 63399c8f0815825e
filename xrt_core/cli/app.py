"""The command `xrt`: registers the subcommands and the options common to all of them."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Final

import typer

from xrt_core import __version__
from xrt_core.cli.bisect import bisect
from xrt_core.cli.cache import cache
from xrt_core.cli.compile import compile
from xrt_core.cli.display import say
from xrt_core.cli.doctor import doctor
from xrt_core.cli.engines import engines
from xrt_core.cli.inspect import inspect
from xrt_core.cli.partition import partition
from xrt_core.cli.passes import passes
from xrt_core.cli.plugin_commands import add_commands, wanted
from xrt_core.cli.replay import replay
from xrt_core.cli.report import report
from xrt_core.cli.run import run
from xrt_core.cli.train import train

app = typer.Typer(
    name="xrt",
    help="Run ML graphs faster by handing their subgraphs to compute engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"xrt-core {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log events to stderr; give it twice for debug output.")
    ] = 0,
) -> None:
    if verbose:
        logging.basicConfig(format="%(relativeCreated)6.0f ms  %(name)s: %(message)s")
        logging.getLogger("xrt").setLevel(logging.DEBUG if verbose > 1 else logging.INFO)


for _command in (run, train, partition, inspect, compile, engines, doctor, passes, report, bisect, replay):
    app.command()(_command)
app.add_typer(cache, name="cache")


_OWN: Final = frozenset(c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands) | {"cache"}


def main() -> None:
    """Entry point of the command `xrt`."""
    if wanted(sys.argv[1:], _OWN):
        for line in add_commands(app, _OWN):
            say(f"left out: {line}", stderr=True)
    app()


if __name__ == "__main__":
    main()
