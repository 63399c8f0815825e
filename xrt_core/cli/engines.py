"""`xrt engines`: list every engine with version, devices and state; if not ready, the reason and the remedy."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Final

import numpy as np
import typer

from xrt_core import __version__
from xrt_core.cli.display import command, say, show_table, working
from xrt_core.engine.converters import HOST
from xrt_core.engine.device_kinds import CPU
from xrt_core.engine.manager import EngineListing
from xrt_core.engines import NOTHING_INSTALLED, explanation

_COLOURS: Final = {"ready": "green", "unavailable": "yellow", "broken": "red", "disabled": "yellow"}


@command
def engines(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List every engine: version, devices, state; if not ready, the reason and the remedy."""
    lines = listing()
    if as_json:
        say(json.dumps([dataclasses.asdict(e) for e in lines], indent=2))
        return
    show(lines)
    if len(lines) == 1:
        say(NOTHING_INSTALLED)


def listing() -> list[EngineListing]:
    """Return a row for the host, which is always available, and one for every installed engine."""
    from xrt_core.engine import engines as manager

    host = EngineListing(HOST, "xrt-core", __version__, "ready", (CPU.name,), f"numpy {np.__version__}")
    with working("probing engines"):
        return [host, *manager.listing()]


def show(lines: list[EngineListing]) -> None:
    """Print the listing as a table."""
    rows = [(e.name, e.status, ", ".join(e.devices), f"{e.package} {e.version}".strip(), explanation(e)) for e in lines]
    show_table(("engine", "status", "devices", "package", "remarks"), rows, colours=_COLOURS)
