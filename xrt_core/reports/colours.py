"""Colours of engines in diagrams, by the name of the engine."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final

from xrt_core.reports.diagram import HOST

_HOST_COLOUR: Final = "#eceff1"
_PALETTE: Final = (
    "#90caf9", "#a5d6a7", "#ce93d8", "#ffcc80", "#fff59d", "#80deea", "#ef9a9a", "#bcaaa4", "#c5e1a5", "#f48fb1",
    "#b39ddb",
)  # fmt: skip


def colours(engines: Iterable[str]) -> dict[str, str]:
    """Return a colour, as #rrggbb, for the host and for each engine: by a hash of its name, or the next free one.

    Two engines of a diagram share a colour only if there are more engines than colours.
    """
    found = {HOST: _HOST_COLOUR}
    for engine in sorted({*engines} - {HOST}):
        first = zlib.crc32(engine.encode()) % len(_PALETTE)
        wanted = (_PALETTE[(first + i) % len(_PALETTE)] for i in range(len(_PALETTE)))
        found[engine] = next((c for c in wanted if c not in found.values()), _PALETTE[first])
    return found
