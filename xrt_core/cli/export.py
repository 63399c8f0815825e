"""`xrt export`: write a stage of a model's compilation as ONNX, for Netron and other tools."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated

import typer

from xrt_core.cli import arguments, results
from xrt_core.cli.display import giving, say, working
from xrt_core.errors import InputError


class Stage(enum.StrEnum):
    """The stages of `docs/architecture.md` that are graphs."""

    captured = "captured"
    optimised = "optimised"
    partitioned = "partitioned"


@giving(results.Export)
def export(
    model: arguments.Model,
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="The ONNX file to write.")],
    stage: Annotated[
        Stage,
        typer.Option(
            "--stage",
            help="captured: as read. optimised: specialised for the inputs, after the passes. partitioned: with each "
            "cluster a local function that names its engine.",
        ),
    ] = Stage.partitioned,
    engine: arguments.Engine = None,
    inputs: arguments.Inputs = None,
    shape: arguments.Shape = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE, any option of docs/options.md; may be repeated.")
    ] = None,
    recompile: arguments.Recompile = False,
) -> results.Export:
    """Write a stage of a model's compilation as ONNX: open it in Netron, or compare two stages.

    Exit code 0 also for a file with operators that only XRT has; it is said then.
    """
    module = arguments.load_module(model, engine, option, recompile)
    if stage is Stage.captured:
        if module.graph is None:
            raise InputError(f"{model} has no graph before its first call")
        graph = module.graph
    else:
        arrays = arguments.module_inputs(module, inputs, False, shape, 0)
        with working(f"making the stage {stage}"):
            graph = module.partitioned(arrays) if stage is Stage.partitioned else module.optimised(arrays)
    with working(f"writing {output.name}"):
        from xrt_core.frontends import onnx_export

        onnx_export.save(graph, output)
    found = results.Export(str(output), str(stage), len(graph.nodes), _validity(output))
    say(f"wrote {output}: {found.nodes} nodes, {found.validity}")
    return found


def _validity(path: pathlib.Path) -> str:
    """What ONNX's checker says of a file, and which of its operators no other tool knows."""
    import onnx

    try:
        onnx.checker.check_model(path)
    except onnx.checker.ValidationError as e:
        return f"not valid for ONNX's checker: {str(e).splitlines()[0]}"
    made = onnx.load(path, load_external_data=False)
    own = {(f.domain, f.name) for f in made.functions}
    bodies = (made.graph.node, *(f.node for f in made.functions))
    called = {(n.domain, n.op_type) for nodes in bodies for n in nodes if n.domain}
    foreign = {".".join(c) for c in called - own}
    return f"valid ONNX with operators of other domains: {', '.join(sorted(foreign))}" if foreign else "valid ONNX"
