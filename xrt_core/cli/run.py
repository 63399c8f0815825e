"""`xrt run`: run a model once or many times; print its outputs, where its nodes ran, and timings."""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from xrt_core.cli import arguments, results
from xrt_core.cli.display import counted, duration, giving, say, show_table, working
from xrt_core.cli.inputs import write_outputs


@giving(results.Run)
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
) -> results.Run:
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
        made = module.run(arrays)
        times.append(time.perf_counter() - begin)
    if output is not None:
        write_outputs(output, made)
    if timeline is not None:
        timeline.write_text(json.dumps(module.run_timed(arrays)[1].to_json()), encoding="utf-8")

    origin = str(inputs) if inputs is not None else f"random, seed {seed}"
    say(f"inputs ({origin}):")
    given = _values(arrays)
    _show(given)
    say("outputs:")
    gives = _values(made)
    _show(gives)
    summary = module.explain(arrays).summary()
    say(summary)
    parts = [f"load {duration(loaded - start)}", f"compile {duration(compiled - ready)}", f"run {duration(times[0])}"]
    if repeat > 1:
        parts[-1] = f"{repeat} runs: median {duration(statistics.median(times))}, best {duration(min(times))}"
        parts.append(f"worst {duration(max(times))}")
    say(", ".join(parts))
    wrote = [str(path) for path in (output, timeline) if path is not None]
    for path in wrote:
        say(f"wrote {path}")
    return results.Run(
        inputs=given, outputs=gives, summary=summary, load_seconds=loaded - start, compile_seconds=compiled - ready,
        run_seconds=times, wrote=wrote,
    )  # fmt: skip


def _show(values: Sequence[results.Value]) -> None:
    rows = [("  " + v.name, v.type, *map(_number, (v.min, v.max, v.mean))) for v in values]
    show_table(("  name", "type", "min", "max", "mean"), rows)


def _number(x: float | None) -> str:
    return "" if x is None else str(x) if isinstance(x, int) else f"{x:.4g}"


def _values(arrays: Mapping[str, Any]) -> list[results.Value]:
    found = []
    for name, value in arrays.items():
        if isinstance(value, list | tuple):
            found.append(results.Value(name=name, type=f"sequence of {len(value)}"))
        elif value is None:
            found.append(results.Value(name=name, type="absent"))
        else:
            array = np.asarray(value)
            kind = "string" if array.dtype == object else array.dtype.name
            type_ = f"{kind}[{', '.join(map(str, array.shape))}]"
            found.append(results.Value(name=name, type=type_, **_statistics(array)))
    return found


def _statistics(array: np.ndarray) -> dict[str, float]:
    """Smallest, largest and mean element; nothing for what has no order."""
    if not array.size or array.dtype == object or array.dtype.kind in "cSU":
        return {}
    if array.dtype.kind in "iub":
        return {"min": int(array.min()), "max": int(array.max()), "mean": float(array.mean())}
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        return {"min": float(wide.min()), "max": float(wide.max()), "mean": float(wide.mean())}
