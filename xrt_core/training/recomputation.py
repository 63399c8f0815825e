"""Marks for recomputation: which parts of the way forward are computed again on the way back."""

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
    """Compute the nodes built inside again on the way back, instead of keeping their results for it.

        for layer in self.layers:
            with xrt.training.recompute():
                x = layer(x)

    Each block is a region: between steps forward and back only what comes into it and what leaves it is kept. Blocks
    inside a block belong to it. Takes effect in a `TrainModule`. Raises TraceError outside of tracing.
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
    """Give the mark of `node` to the nodes recorded since `start`, which stand for it."""
    label = marked(node)
    if label is not None:
        nodes = tracer.scope.nodes
        for i in range(start, len(nodes)):
            nodes[i] = _with_label(nodes[i], label)


def labels(pattern: str | None) -> Callable[[Node], str | None]:
    """What tells the region of a node: its mark, or else the text that a regular expression finds in its name.

    Raises OptionError for what is no regular expression.
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
