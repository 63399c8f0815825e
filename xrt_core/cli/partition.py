"""`xrt partition`: show which engine runs which nodes, and why the other nodes run on the host."""

from __future__ import annotations

import pathlib
from json import dumps
from typing import Annotated, Any

import typer
from msgspec import convert

from xrt_core.cli import arguments, results
from xrt_core.cli.display import FailedCheck, giving, say, working
from xrt_core.errors import InputError
from xrt_core.files import decode, reading, replace_file


@giving(results.Partition | results.PartitionDifference)
def partition(
    model: Annotated[
        pathlib.Path | None, typer.Argument(help="An ONNX file, or one that `xrt compile` wrote.", show_default=False)
    ] = None,
    engine: arguments.Engine = None,
    inputs: arguments.Inputs = None,
    report: Annotated[pathlib.Path | None, typer.Option("--report", help="Write the report as JSON.")] = None,
    onnx: Annotated[
        pathlib.Path | None,
        typer.Option("--onnx", help="Write the partitioned model, each cluster a local function (see it in Netron)."),
    ] = None,
    html: Annotated[pathlib.Path | None, typer.Option("--html", help="Write diagrams and tables as HTML.")] = None,
    dot: Annotated[pathlib.Path | None, typer.Option("--dot", help="Write the diagram as a Graphviz file.")] = None,
    diff: Annotated[
        tuple[pathlib.Path, pathlib.Path] | None,
        typer.Option("--diff", help="Instead of a model: compare two reports of --report; exit code 1 if they differ."),
    ] = None,
    shape: arguments.Shape = None,
    option: arguments.Option = None,
    recompile: arguments.Recompile = False,
) -> Any:
    """Show the clusters of a model, their engines, and the reason for every node that runs on the host."""
    if diff is not None:
        if model is not None:
            raise InputError("--diff compares two reports; it takes no model")
        return _compare(*diff)
    if model is None:
        raise InputError("give a model, or two reports with --diff")
    module = arguments.load_module(model, engine, option, recompile)
    arrays = arguments.module_inputs(module, inputs, False, shape, 0)
    with working("partitioning"):
        explanation = module.explain(arrays)
    if onnx is not None:
        from xrt_core.frontends import onnx_export

        with working(f"writing {onnx.name}"):
            onnx_export.save(module.partitioned(arrays), onnx)
    if report is not None:
        report.write_text(dumps(explanation.to_json(), indent=2) + "\n", encoding="utf-8")
    say(explanation.as_text())
    if html is not None:
        with replace_file(html) as file:
            file.write(explanation.to_html().encode())
    if dot is not None:
        with replace_file(dot) as file:
            file.write(explanation.to_dot().encode())
    for path in (report, onnx, html, dot):
        if path is not None:
            say(f"wrote {path}")
    return lambda: convert(explanation.to_json(), results.Partition)


def _compare(before: pathlib.Path, after: pathlib.Path) -> results.PartitionDifference | FailedCheck:
    """Print the differences between two reports; the check fails if there are any."""
    from xrt_core.reports import difference

    found = difference(_read(before), _read(after))
    say(found.as_text())
    result = results.PartitionDifference(
        moved=list(found.moved), reasons=list(found.reasons), clusters=list(found.clusters), nodes=list(found.nodes),
        figures=list(found.figures),
    )  # fmt: skip
    return FailedCheck(result) if found else result


def _read(path: pathlib.Path) -> dict[str, Any]:
    with reading(f"report {path}", InputError):
        content = path.read_bytes()
    return decode(content, dict[str, Any], f"report {path}", InputError)
