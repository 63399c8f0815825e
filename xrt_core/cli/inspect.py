"""`xrt inspect`: the text of what an engine makes of a cluster, at each stage of its compilation."""

from __future__ import annotations

import difflib
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from xrt_core.cli import arguments, results
from xrt_core.cli.display import giving, say, working
from xrt_core.compiler.inspection import FUNCTION
from xrt_core.errors import InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xrt_core.compiler.inspection import CompiledCluster


@giving(results.Inspect)
def inspect(
    model: Annotated[pathlib.Path, typer.Argument(help="An ONNX file, or one that `xrt compile` wrote.")],
    engine: arguments.Engine = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The number or the name of a cluster; without it they are listed.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="A stage that the list names; by default the last one.")
    ] = None,
    diff: Annotated[
        list[str] | None,
        typer.Option("--diff", help="NAME=VALUE: show what this option changes, as a diff. May be repeated."),
    ] = None,
    inputs: arguments.Inputs = None,
    shape: arguments.Shape = None,
    option: arguments.Option = None,
) -> results.Inspect:
    """Show what an engine makes of a cluster: its nodes, HLO, LLVM IR, layers, ...

    It is compiled for this, cached or not, which is said. Which stages there are depends on the engine.
    """
    found, text, again = _shown(model, engine, cluster, stage, inputs, shape, option)
    listed = [
        results.InspectedCluster(
            number=i, name=c.name, engine=c.engine, nodes=len(c.function.body.nodes), origin=c.origin,
            stages=dict(c.stages()),
        )
        for i, c in enumerate(found)
    ]  # fmt: skip
    if text is None:
        if diff:
            raise InputError("--diff compares the texts of one cluster; name it with --cluster")
        if not found:
            say("no cluster: every node runs on the host (xrt partition says why)")
        for c in listed:
            kept = f"; {c.origin}" if c.origin else ""
            say(f"{c.number}  {c.name}: {c.nodes} nodes on {c.engine}{kept}")
            for name, what in c.stages.items():
                say(f"     --stage {name:<16} {what}")
        return results.Inspect(clusters=listed)
    shown = results.Inspect(clusters=listed, cluster=cluster, stage=stage, text=text, compiled_again=again)
    if not diff:
        say(text)
        return shown
    _, other, _ = _shown(model, engine, cluster, stage, inputs, shape, [*(option or ()), *diff])
    lines = difflib.unified_diff(
        text.splitlines(), (other or "").splitlines(), "as given", ", ".join(diff), lineterm="", n=3
    )
    changed = list(lines)
    say("\n".join(changed) if changed else f"{', '.join(diff)} changes nothing here")
    return structs.replace(shown, diff=changed)


def _shown(
    model: pathlib.Path,
    engine: Sequence[str] | None,
    cluster: str | None,
    stage: str | None,
    inputs: pathlib.Path | None,
    shape: Sequence[str] | None,
    option: Sequence[str] | None,
) -> tuple[Sequence[CompiledCluster], str | None, bool]:
    """The clusters, the text of the one that is asked for, and whether it was compiled again for that."""
    module: Any = arguments.load_module(model, engine, [*(option or ()), "guard=False"])
    arrays = arguments.module_inputs(module, inputs, False, shape, 0)
    with working("partitioning"):
        found = module.clusters(arrays)
    if cluster is None:
        return found, None, False
    named = {c.name: c for c in found} | {str(i): c for i, c in enumerate(found)}
    if cluster not in named:
        there = ", ".join(f"{i} ({c.name})" for i, c in enumerate(found)) or "none"
        hint = nearest(cluster, [c.name for c in found])
        raise InputError(f"--cluster {cluster}: there is no such cluster for these inputs; there is: {there}{hint}")
    chosen = named[cluster]
    with working("compiling"):
        text = chosen.as_text(stage)
    again = stage != FUNCTION and chosen.origin != ""
    if again:
        say(f"compiled again for this text: the executable of {chosen.name} is {chosen.origin}", stderr=True)
    return found, text, again
