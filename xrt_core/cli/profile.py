"""`xrt profile`: where the time of a model's calls goes, by cluster and node, beside what this machine can do."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable
from typing import Annotated

import typer
from msgspec import convert

from xrt_core.cli import arguments, results
from xrt_core.cli.display import counted, giving, say, show_table, working


@giving(results.Profile)
def profile(
    model: arguments.Model,
    engine: arguments.Engine = None,
    inputs: arguments.Inputs = None,
    random: arguments.Random = False,
    repeat: Annotated[int, typer.Option("--repeat", "-n", min=1, help="Calls to record.")] = 20,
    warm: Annotated[int, typer.Option("--warm", min=0, help="Calls before, which are not recorded.")] = 3,
    first: Annotated[
        bool, typer.Option("--first", help="Record from the first call on, with what is compiled meanwhile.")
    ] = False,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="A row for each node; within clusters its time is estimated.")
    ] = False,
    html: Annotated[
        pathlib.Path | None, typer.Option("--html", help="Write a page with the timeline, memory and tables.")
    ] = None,
    trace: Annotated[
        pathlib.Path | None, typer.Option("--trace", help="Write a trace (JSON) for ui.perfetto.dev.")
    ] = None,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure what this machine can do again (0.5 s).")
    ] = False,
    seed: arguments.Seed = 0,
    shape: arguments.Shape = None,
    option: arguments.Option = None,
    recompile: arguments.Recompile = False,
) -> Callable[[], results.Profile]:
    """Run a model and show, for each step, its time, the bytes moved, and its share of what this machine can do."""
    from xrt_core.profiling import Profile, Roofline

    module = arguments.load_module(model, engine, option, recompile)
    with module:
        arrays = arguments.module_inputs(module, inputs, random, shape, seed)
        found = Profile(f"{model.name}, {repeat} calls")
        with found if first else contextlib.nullcontext():
            with working("compiling"):
                module.prepare(arrays)
                module.wait()
            if first:
                for _ in counted("running", repeat):
                    module.run(arrays)
        if not first:
            for _ in range(warm):
                module.run(arrays)
            with found:
                for _ in counted("running", repeat):
                    module.run(arrays)
    with working("measuring this machine"):
        found.roofline = Roofline.here(again=remeasure)
    for path, text in ((html, found.to_html), (trace, lambda: json.dumps(found.to_chrome()))):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
    say(found.summary())
    if nodes:
        times = [f"{n.seconds * 1e6 / repeat:.1f}" for n in found.nodes]
        rows = [
            (n.name, n.operator, n.engine, t, "estimated" if n.estimated else "")
            for n, t in zip(found.nodes, times, strict=True)
        ]
        show_table(("node", "operator", "on", "us a call", ""), rows)
    else:
        show_table(*found.table())
    for path in filter(None, (html, trace)):
        say(f"wrote {path}")
    return lambda: convert(found.to_json(), results.Profile)
