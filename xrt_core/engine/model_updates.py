"""Model updates: what engines' kernels declare about nodes that write variables, as annotations of these nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from xrt_core.engine.op_kernels import OpKernel, OpKernelRegistry, op_kernels
from xrt_core.ir.graph import Graph, Node, Value


def mark_updates(
    graph: Graph, engines: Iterable[str], *, aliases: bool = True, registry: OpKernelRegistry = op_kernels
) -> Graph:
    """The graph with `model_update` on every node for whose operator a kernel of `engines` declares that it writes
    variables, the phase "train" where the kernel is a model update, and aliases for its mutable variables.

    The k-th mutable variable of a kernel is aliased with the k-th output of a node that has as many outputs. It must
    be an input of the graph, of one alias alone, that is not returned as it is: any other value has storage that
    somebody else may read. aliases: False for a graph whose inputs are not the caller's to hand over, such as the body
    of a loop. Nodes that are marked as updates already, as a training step's are, say all that there is to say.
    """
    names = tuple(engines)
    declared = {i: k for i, n in enumerate(graph.nodes) if (k := _declaration(n, names, registry)) is not None}
    if not declared:
        return graph
    states = set(graph.inputs).difference(graph.outputs) if aliases else set()
    pairs = {i: _pairs(graph.nodes[i], k, states) for i, k in declared.items()}
    written = Counter(graph.nodes[i].inputs[index] for i, found in pairs.items() for _, index in found)
    nodes = list(graph.nodes)
    for i, kernel in declared.items():
        node, own = nodes[i], nodes[i].annotations
        nodes[i] = node.replace(
            annotations=own.replace(
                model_update=True,
                phase="train" if kernel.model_update else own.phase,
                aliases=own.aliases or tuple(p for p in pairs[i] if written[node.inputs[p[1]]] == 1),
            )
        )
    return graph.replace(nodes=nodes)


def _declaration(node: Node, engines: Sequence[str], registry: OpKernelRegistry) -> OpKernel | None:
    """The first kernel that declares the node to write variables; None for a node that no kernel does so for."""
    if node.annotations.model_update:
        return None
    found = (registry.find(e, node.domain, node.op_type) for e in engines)
    return next((k for k in found if k is not None and (k.model_update or k.mutable_variables)), None)


def _pairs(node: Node, kernel: OpKernel, states: set[Value]) -> tuple[tuple[int, int], ...]:
    """(output, input) for each mutable variable of the node that may be written in place."""
    if len(kernel.mutable_variables) != len(node.outputs):
        return ()
    return tuple(
        (k, i)
        for k, i in enumerate(kernel.mutable_variables)
        if i < len(node.inputs) and node.outputs[k] is not None and node.inputs[i] in states
    )
