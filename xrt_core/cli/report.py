"""`xrt report`: run a model under guard and print the verdict and the timings of each cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer
from msgspec import convert

from xrt_core.cli import arguments, results
from xrt_core.cli.display import counted, giving, say, working


class Form(StrEnum):
    """Output format of the report."""

    text = "text"
    prometheus = "prometheus"


@giving(results.Report)
def report(
    model: arguments.Model,
    engine: arguments.Engine = None,
    inputs: arguments.Inputs = None,
    random: arguments.Random = False,
    repeat: Annotated[int, typer.Option("--repeat", "-n", min=1, help="Calls after all clusters are decided.")] = 20,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Longest time to wait for the guard, in seconds.")] = 600,
    form: Annotated[Form, typer.Option("--format", help="Output format.")] = Form.text,
    seed: arguments.Seed = 0,
    shape: arguments.Shape = None,
    option: arguments.Option = None,
    recompile: arguments.Recompile = False,
) -> Callable[[], results.Report]:
    """Run a model with the guard on, wait for its verdicts, run it again, and print the guard's report."""
    module = arguments.load_module(model, engine, ["guard=true", *(option or ())], recompile)
    with module:
        arrays = arguments.module_inputs(module, inputs, random, shape, seed)
        start = time.monotonic()
        module.run(arrays)
        with working("compiling and verifying"):
            done = module.wait(max(wait - (time.monotonic() - start), 0))
        for _ in counted("running", repeat):
            module.run(arrays)
        found = module.report()
    say(found.as_text() if form is Form.text else found.to_prometheus().rstrip())
    if not done:
        say(f"the guard did not finish within {wait:g} s", stderr=True)
    return lambda: convert(found.to_json(), results.Report)
