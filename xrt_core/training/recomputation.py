"""Marks for rematerialization: regions of the forward pass that are recomputed in the backward pass."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from xrt_core.errors import OptionError
from xrt_core.frontends.tracing import Tracer, current_tracer
from xrt_core.ir.graph import Node
from xrt_core.passes.rematerialization import MARK, marked


@contextlib.contextmanager
def recompute() -> Iterator[None]:
    """Recompute the nodes built inside in the backward pass, instead of storing their results.

        for layer in self.layers:
            with xrt.training.recompute():
                x = layer(x)

    Each block is a region: between the forward and the backward pass only its inputs and outputs are stored. Nested
    blocks belong to the outer one. Takes effect in a `TrainModule`. Raises TraceError if no graph is being traced.
    """
    tracer = current_tracer("recompute")
    scope, start = tracer.scope, len(tracer.scope.nodes)
    yield
    label = tracer.fresh("recompute")
    for i in range(start, len(scope.nodes)):
        scope.nodes[i] = _with_label(scope.nodes[i], label)


def _with_label(node: Node, label: str) -> Node:
    a = node.annotations
    return node.replace(annotations=a.replace(metadata={**a.metadata, MARK: label}))


def keep_mark(tracer: Tracer, start: int, node: Node) -> None:
    """Copy the mark of `node` to the nodes recorded since `start`, which replace it."""
    label = marked(node)
    if label is not None:
        nodes = tracer.scope.nodes
        for i in range(start, len(nodes)):
            nodes[i] = _with_label(nodes[i], label)


def labels(pattern: str | None) -> Callable[[Node], str | None]:
    """Return a function from a node to its region: its mark, or else the match of a regular expression in its name.

    Raises OptionError for an invalid regular expression.
    """
    if pattern is None:
        return marked
    try:
        expression = re.compile(pattern)
    except (re.error, TypeError) as e:
        raise OptionError(f"recompute={pattern!r}: it takes a regular expression on the names of nodes ({e})") from None

    def label(node: Node) -> str | None:
        own = marked(node)
        if own is None and (found := expression.search(node.name)) is not None:
            own = found.group()
        return own

    return label
