"""`python -m xrt_core.engines`: every engine on a line, ready or why not, as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xrt_core.engine.manager import EngineListing

NOTHING_INSTALLED: Final = (
    "no engine is installed, so everything runs on the host; engines are pip packages: pip install xrt-<name>"
)


def as_text(listing: Sequence[EngineListing]) -> str:
    """The listing as aligned lines: name, state, package, devices, and the reason with its cure where there is one."""
    if not listing:
        return NOTHING_INSTALLED + "\n"
    rows = [
        (e.name, e.status, f"{e.package} {e.version}".strip(), ", ".join(e.devices) or "-", explanation(e))
        for e in listing
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def explanation(line: EngineListing) -> str:
    """What the last column says: the library's version, or the reason and what to do about it."""
    library = f"library {line.library_version}" if line.library_version else ""
    return "; ".join(filter(None, (library, line.reason, line.remedy)))


if __name__ == "__main__":
    from xrt_core.engine import engines

    print(as_text(engines.listing()), end="")
