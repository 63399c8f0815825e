"""`xrt compile`: compile a model ahead of time into one file, also for a kind of device that this machine lacks."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated

import typer

from xrt_core.cli import arguments, results
from xrt_core.cli.display import duration, giving, say, working
from xrt_core.errors import CompileError, OptionError


@giving(results.Compile)
def compile(
    model: arguments.Model,
    output: Annotated[pathlib.Path, typer.Option("--output", help="The file to write; XRTModule.load runs it.")],
    engine: arguments.Engine = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", help="Kind of device to compile for, present or not, such as sm_89."
        ),
    ] = None,
    inputs: arguments.Inputs = None,
    shape: arguments.Shape = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write the file even if an engine fails to compile a cluster.")
    ] = False,
    option: arguments.Option = None,
    recompile: arguments.Recompile = False,
) -> results.Compile:
    """Compile a model for the signature of its inputs; write the graph, weights and executables into one file."""
    start = time.perf_counter()
    given = list(option or ())
    if target is not None:
        if any(o.partition("=")[0] == "target" for o in given):
            raise OptionError("--target and --option target=... set the same option; give one of them")
        given.append(f"target={target}")
    module = arguments.load_module(model, engine, given, recompile)
    arrays = arguments.module_inputs(module, inputs, False, shape, 0)
    with working("compiling"):
        module.prepare(arrays)
    explanation = module.explain(arrays)
    failed = [f"{cluster}: {why}" for cluster, why in explanation.errors.items()]
    if failed and not partial:
        raise CompileError(f"{'; '.join(failed)} (--partial writes the file without these clusters)")
    with working(f"writing {output.name}"):
        module.save(output)
    say(explanation.summary())
    for line in failed:
        say(f"not compiled, the host runs it: {line}")
    where = f" for {target}" if target is not None else ""
    size, took = output.stat().st_size, time.perf_counter() - start
    say(f"wrote {output}{where}: {size / 1e6:.1f} MB in {duration(took)}")
    return results.Compile(
        file=str(output), bytes=size, seconds=took, target=target, summary=explanation.summary(), not_compiled=failed
    )
