"""`xrt engines`: list every engine with version, devices and state; if not ready, the reason and the remedy."""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec
import numpy as np

from xrt_core import __version__
from xrt_core.cli import results
from xrt_core.cli.display import giving, say, show_table, working
from xrt_core.engine.converters import HOST
from xrt_core.engine.device_kinds import CPU
from xrt_core.engine.manager import EngineListing
from xrt_core.engines import NOTHING_INSTALLED, explanation

_COLOURS: Final = {"ready": "green", "unavailable": "yellow", "broken": "red", "disabled": "yellow"}


@giving(results.Engines)
def engines() -> results.Engines:
    """List every engine: version, devices, state; if not ready, the reason and the remedy."""
    lines = listing()
    show(lines)
    if len(lines) == 1:
        say(NOTHING_INSTALLED)
    return results.Engines(engines=as_results(lines))


def as_results(lines: list[EngineListing]) -> list[results.EngineLine]:
    """The listing as results."""
    return [msgspec.convert(dataclasses.asdict(e) | {"devices": list(e.devices)}, results.EngineLine) for e in lines]


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
