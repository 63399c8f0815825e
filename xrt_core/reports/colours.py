"""Colours of engines in diagrams: an engine has the same colour in every diagram."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final

from xrt_core.reports.diagram import HOST

_HOST_COLOUR: Final = "#eceff1"
_KNOWN: Final = {
    "xla": "#90caf9",
    "tensorrt": "#a5d6a7",
    "onnxruntime": "#ce93d8",
    "openvino": "#ffcc80",
    "toy": "#fff59d",
}
_OTHERS: Final = ("#80deea", "#ef9a9a", "#bcaaa4", "#c5e1a5", "#f48fb1", "#b39ddb")


def colours(engines: Iterable[str]) -> dict[str, str]:
    """Return a colour, as #rrggbb, for the host and for each engine."""
    found = {HOST: _HOST_COLOUR}
    for engine in engines:
        if engine not in found:
            found[engine] = _KNOWN.get(engine) or _OTHERS[zlib.crc32(engine.encode()) % len(_OTHERS)]
    return found
