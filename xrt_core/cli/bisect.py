"""`xrt bisect`: find the nodes of a model that an engine miscompiles or fails to compile."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xrt_core.cli import arguments, results
from xrt_core.cli.display import FailedCheck, giving, say, show_table, working
from xrt_core.events import process_events

if TYPE_CHECKING:
    from xrt_core.verify.isolate import NodeFault


@giving(results.Bisect)
def bisect(
    model: arguments.Model,
    engine: arguments.OneEngine,
    inputs: arguments.Inputs = None,
    seed: arguments.Seed = 0,
    shape: arguments.Shape = None,
    compiles: Annotated[int, typer.Option("--compiles", min=1, help="Compilations to spend on each cluster.")] = 200,
    bundle: Annotated[
        pathlib.Path | None, typer.Option("--bundle", help="A folder for one repro bundle per faulty node.")
    ] = None,
    option: arguments.Option = None,
) -> results.Bisect | FailedCheck:
    """Compile every cluster of a model on one engine, compare it with the host, and list the faulty nodes.

    Inputs are synthesized within the value ranges that each cluster requires; those of --inputs are used as well
    for the clusters whose inputs the host can compute from them. The exit code is 1 if a node is faulty.
    """
    from xrt_core.engine import engines
    from xrt_core.engine.contract import Function
    from xrt_core.verify.isolate import Candidate, bisect_function, inputs_of_clusters
    from xrt_core.verify.repro import Stage, make_bundle, save_bundle
    from xrt_core.verify.subgraph import subfunction

    module = arguments.load_module(model, [engine], option)
    arrays = arguments.module_inputs(module, inputs, False, shape, seed)
    with working("partitioning"):
        graph = module.partitioned(arrays)
    owner = engines.usable(engine)
    device = engines.device(owner)
    options = module.compile_options(engine)

    def compile(function: Function, fused: bool) -> Any:
        process_events.progress("compile", cluster=function.name, engine=engine, nodes=len(function.body.nodes))
        compiler = owner.compiler(device, module.compile_options(engine, fused))
        return compiler.compile(function, function.params, function.returns, function.aliases)

    candidate = Candidate(engine, compile, owner.tolerance_with(options))
    real = inputs_of_clusters(graph, arrays) if inputs is not None else {}
    functions = [f for n in graph.nodes if isinstance(f := n.attributes.get("function"), Function)]
    if not functions:
        say(f"{engine} supports no node of {model.name}: `xrt partition {model}` shows the reasons")
    examined = []
    for function in functions:
        with working(f"examining {function.name}"):
            found = bisect_function(function, candidate, real.get(function.name), seed, compiles)
        say(f"{function.name}: {found.summary}")
        rows = [(f"  {x.index}", x.operator, x.name, x.absolute, x.relative, x.reason) for x in found.faults]
        if rows and not found.is_right:
            show_table(("  node", "operator", "name", "absolute", "relative", "fault"), rows)
        faults = []
        for x in found.faults:
            path = None
            if bundle is None:
                faults.append(_fault(x, path))
                continue
            part = subfunction(function, [x.index])
            stage: Stage = "compile" if "does not compile" in x.reason else "wrong"
            path = save_bundle(make_bundle(part, owner, device, options, stage, x.reason, x.inputs), bundle)
            say(f"  wrote {path}")
            faults.append(_fault(x, path))
        examined.append(
            results.BisectedCluster(
                cluster=function.name, right=found.is_right, summary=found.summary, faults=faults
            )
        )
    result = results.Bisect(engine=engine, clusters=examined)
    return result if all(c.right for c in examined) else FailedCheck(result)


def _fault(x: NodeFault, path: pathlib.Path | None) -> results.FaultyNode:
    return results.FaultyNode(
        index=x.index, operator=x.operator, name=x.name, absolute=x.absolute, relative=x.relative, reason=x.reason,
        bundle=None if path is None else str(path),
    )  # fmt: skip
