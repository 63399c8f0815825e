"""`xrt partition`: shows which engine takes which nodes, and why the others stay on the host."""

from __future__ import annotations

import pathlib
from json import dumps
from typing import Annotated

import typer

from xrt_core.cli import arguments
from xrt_core.cli.display import command, say, working


@command
def partition(
    model: arguments.Model,
    engine: arguments.Engine = None,
    inputs: arguments.Inputs = None,
    json: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the report as JSON; '-' writes it to stdout instead.")
    ] = None,
    onnx: Annotated[
        pathlib.Path | None,
        typer.Option("--onnx", help="Write the partitioned model, each cluster a local function (see it in Netron)."),
    ] = None,
    shape: arguments.Shape = None,
    option: arguments.Option = None,
) -> None:
    """Show the clusters of a model, their engines, and the reason for every node that stays on the host."""
    module = arguments.load_module(model, engine, option)
    arrays = arguments.module_inputs(module, inputs, False, shape, 0)
    with working("partitioning"):
        explanation = module.explain(arrays)
    to_stdout = json is not None and str(json) == "-"
    if onnx is not None:
        from xrt_core.frontends import onnx_export

        with working(f"writing {onnx.name}"):
            onnx_export.save(module.partitioned(arrays), onnx)
    as_json = dumps(explanation.to_json(), indent=2)
    if json is not None and not to_stdout:
        json.write_text(as_json + "\n", encoding="utf-8")
    say(as_json if to_stdout else explanation.as_text())
    for path in (None if to_stdout else json, onnx):
        if path is not None:
            say(f"wrote {path}", stderr=to_stdout)
