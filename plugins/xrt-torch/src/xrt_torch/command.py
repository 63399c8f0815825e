"""The command `xrt torch`: a script run as it is, and what XRT made of its graphs."""

from __future__ import annotations

import json
import pathlib
import runpy
import sys
import weakref
from typing import Annotated

import typer


def report(
    script: Annotated[pathlib.Path, typer.Argument(help="A program that uses torch.compile(..., backend='xrt').")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the program gets as its own arguments.")] = None,
    seconds: Annotated[float, typer.Option("--wait", help="Seconds to wait for compilation in the background.")] = 60.0,
    data: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the graphs as JSON to this file instead.")
    ] = None,
) -> None:
    """Run a script and show all graphs of torch.compile, forward and backward: what runs where, and why.

    Graphs of models that the script has forgotten, or reset, by its end are shown too.
    """
    from xrt_torch import compiled

    kept: dict[int, compiled.CompiledGraph] = {}
    noted: weakref.WeakSet[compiled.CompiledGraph] = compiled.known

    class Keeping(weakref.WeakSet[compiled.CompiledGraph]):
        def add(self, item: compiled.CompiledGraph) -> None:
            kept[item.number] = item
            super().add(item)

    before = sys.argv
    compiled.known = Keeping(noted)
    sys.argv = [str(script), *(arguments or ())]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
    finally:
        sys.argv, compiled.known = before, noted
    if not all(g.wait(seconds) for g in kept.values()):
        print("some graphs are still being compiled", file=sys.stderr)
    if data is not None:
        data.write_text(json.dumps([kept[n].to_json() for n in sorted(kept)], indent=2), encoding="utf-8")
        return
    print("\n".join(kept[n].explain() for n in sorted(kept)) or "no graph has been compiled with the backend xrt")


report.context_settings = {"ignore_unknown_options": True}  # type: ignore[attr-defined]
