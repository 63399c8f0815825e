"""`xrt run`: run a model once or many times; print its outputs, where its nodes ran, and timings."""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import typer

from xrt_core.cli import arguments
from xrt_core.cli.display import command, counted, duration, say, show_table, working
from xrt_core.cli.inputs import write_outputs


@command
def run(
    model: arguments.Model,
    engine: arguments.Engine = None,
    inputs: arguments.Inputs = None,
    random: arguments.Random = False,
    output: Annotated[pathlib.Path | None, typer.Option("--output", help="A .npz file for the results.")] = None,
    repeat: Annotated[int, typer.Option("--repeat", "-n", min=1, help="How many times to run.")] = 1,
    seed: arguments.Seed = 0,
    shape: arguments.Shape = None,
    option: arguments.Option = None,
    recompile: arguments.Recompile = False,
    timeline: Annotated[
        pathlib.Path | None,
        typer.Option("--timeline", help="A JSON file for the step timings of one additional run, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Run a model and print its outputs, the share of nodes and FLOPs on engines, and timings."""
    start = time.perf_counter()
    module = arguments.load_module(model, engine, option, recompile)
    loaded = time.perf_counter()
    arrays = arguments.module_inputs(module, inputs, random, shape, seed)
    ready = time.perf_counter()
    with working("compiling"):
        module.prepare(arrays)
        module.wait()
    compiled = time.perf_counter()
    times = []
    for _ in counted("running", repeat):
        begin = time.perf_counter()
        results = module.run(arrays)
        times.append(time.perf_counter() - begin)
    if output is not None:
        write_outputs(output, results)
    if timeline is not None:
        timeline.write_text(json.dumps(module.run_timed(arrays)[1].to_json()), encoding="utf-8")

    origin = str(inputs) if inputs is not None else f"random, seed {seed}"
    say(f"inputs ({origin}):")
    _show(arrays)
    say("outputs:")
    _show(results)
    say(module.explain(arrays).summary())
    parts = [f"load {duration(loaded - start)}", f"compile {duration(compiled - ready)}", f"run {duration(times[0])}"]
    if repeat > 1:
        parts[-1] = f"{repeat} runs: median {duration(statistics.median(times))}, best {duration(min(times))}"
        parts.append(f"worst {duration(max(times))}")
    say(", ".join(parts))
    for path in filter(None, (output, timeline)):
        say(f"wrote {path}")


def _show(arrays: Mapping[str, Any]) -> None:
    rows = []
    for name, value in arrays.items():
        if isinstance(value, list | tuple):
            rows.append((name, f"sequence of {len(value)}", "", "", ""))
        elif value is None:
            rows.append((name, "absent", "", "", ""))
        else:
            array = np.asarray(value)
            type_ = "string" if array.dtype == object else array.dtype.name
            rows.append((name, f"{type_}[{', '.join(map(str, array.shape))}]", *_statistics(array)))
    show_table(("  name", "type", "min", "max", "mean"), [("  " + r[0], *r[1:]) for r in rows])


def _statistics(array: np.ndarray) -> tuple[str, str, str]:
    if not array.size or array.dtype == object or array.dtype.kind in "cSU":
        return ("", "", "")
    if array.dtype.kind in "iub":
        return (str(array.min()), str(array.max()), f"{array.mean():.4g}")
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        return (f"{wide.min():.4g}", f"{wide.max():.4g}", f"{wide.mean():.4g}")
