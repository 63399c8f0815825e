"""`xrt partition`: show which engine runs which nodes, and why the other nodes run on the host."""

from __future__ import annotations

import pathlib
from json import dumps
from typing import Annotated, Any

import typer

from xrt_core.cli import arguments
from xrt_core.cli.display import command, say, working
from xrt_core.errors import InputError
from xrt_core.files import decode, reading, replace_file


@command
def partition(
    model: Annotated[
        pathlib.Path | None, typer.Argument(help="An ONNX file, or one that `xrt compile` wrote.", show_default=False)
    ] = None,
    engine: arguments.Engine = None,
    inputs: arguments.Inputs = None,
    json: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the report as JSON; '-' writes it to stdout instead.")
    ] = None,
    onnx: Annotated[
        pathlib.Path | None,
        typer.Option("--onnx", help="Write the partitioned model, each cluster a local function (see it in Netron)."),
    ] = None,
    html: Annotated[pathlib.Path | None, typer.Option("--html", help="Write diagrams and tables as HTML.")] = None,
    dot: Annotated[pathlib.Path | None, typer.Option("--dot", help="Write the diagram as a Graphviz file.")] = None,
    diff: Annotated[
        tuple[pathlib.Path, pathlib.Path] | None,
        typer.Option("--diff", help="Instead of a model: compare two reports of --json; exit code 1 if they differ."),
    ] = None,
    shape: arguments.Shape = None,
    option: arguments.Option = None,
    recompile: arguments.Recompile = False,
) -> None:
    """Show the clusters of a model, their engines, and the reason for every node that runs on the host."""
    if diff is not None:
        if model is not None:
            raise InputError("--diff compares two reports; it takes no model")
        _compare(*diff)
        return
    if model is None:
        raise InputError("give a model, or two reports with --diff")
    module = arguments.load_module(model, engine, option, recompile)
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
    if html is not None:
        with replace_file(html) as file:
            file.write(explanation.to_html().encode())
    if dot is not None:
        with replace_file(dot) as file:
            file.write(explanation.to_dot().encode())
    for path in (None if to_stdout else json, onnx, html, dot):
        if path is not None:
            say(f"wrote {path}", stderr=to_stdout)


def _compare(before: pathlib.Path, after: pathlib.Path) -> None:
    """Print the differences between two reports; exit code 1 if there are any."""
    from xrt_core.reports import difference

    found = difference(_read(before), _read(after))
    say(found.as_text())
    if found:
        raise typer.Exit(1)


def _read(path: pathlib.Path) -> dict[str, Any]:
    with reading(f"report {path}", InputError):
        content = path.read_bytes()
    return decode(content, dict[str, Any], f"report {path}", InputError)
