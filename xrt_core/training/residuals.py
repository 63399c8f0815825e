"""Residuals: the values of a differentiated loop body that the forward loop stores for the backward pass.

Then the backward pass computes only what depends on gradients. Sums of products over the iterations wait for one
product after the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.op_traits import traits_of

_DEPTH: Final = 4
"""How many nodes deep a value is computed again from stored ones, instead of being stored as well."""

_MOVES: Final = frozenset(("Slice", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast", "Expand"))


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient that is the sum over the iterations of A' B: `left` is A, `right` is B."""

    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Split:
    """early: the nodes that depend on no gradient. stored: what they make and the backward pass reads. late: the nodes
    of the backward pass, those among them that compute stored values again included."""

    early: tuple[Node, ...]
    stored: tuple[Value, ...]
    late: tuple[Node, ...]


def products(nodes: Sequence[Node], gradients: Iterable[Value], keep: Collection[Value]) -> dict[Value, Product]:
    """Those of `gradients` that are a product of a transposed matrix and a matrix, and are used nowhere else.

    keep: values that are results in other roles.
    """
    made = {v: n for n in nodes for v in n.outputs if v is not None}
    used: dict[Value, int] = {}
    for n in nodes:
        for v in n.uses():
            used[v] = used.get(v, 0) + 1
    found = {}
    for g in gradients:
        product = made.get(g)
        if product is None or product.op_type != "MatMul" or product.domain or g in keep or used.get(g):
            continue
        turned, right = product.inputs
        before = None if turned is None else made.get(turned)
        if before is None or before.op_type != "Transpose" or before.domain or right is None:
            continue
        left = before.inputs[0]
        if left is not None and _is_matrix(left) and _is_matrix(right) and _permutation(before) == (1, 0):
            found[g] = Product(left, right)
    return found


def split(
    nodes: Sequence[Node], gradients: Collection[Value], given: Collection[Value], results: Sequence[Value],
    needed: Collection[Value],
) -> Split:  # fmt: skip
    """Split the nodes of a body and of its gradients.

    gradients: the inputs of the body that are gradients. given: its other inputs, and the values around it that the
    forward body captures. results: what the backward pass gives. needed: values that must be stored if no gradient is
    in them.
    """
    late_values = set(gradients)
    own = {v for n in nodes for v in n.outputs if v is not None}
    early: list[Node] = []
    for n in nodes:
        if any(v in late_values or (v not in own and v not in given and v.data is None) for v in n.uses()):
            late_values.update(v for v in n.outputs if v is not None)
        else:
            early.append(n)
    made = {v: n for n in early for v in n.outputs if v is not None}
    live = _live(nodes, [v for v in results if v not in made], made)
    read = {v for n in live for v in n.uses() if v in made} | {v for v in needed if v in made}
    order = {v: i for i, v in enumerate(made)}
    stored = {v for v in read if v.is_static}
    ready = set(given)
    for v in sorted(stored, key=order.__getitem__, reverse=True):
        if v not in needed and _is_cheap(v, made, (stored - {v}) | ready, _DEPTH):
            stored.discard(v)
    kept = tuple(sorted(stored, key=order.__getitem__))
    late = _live(nodes, results, dict.fromkeys(kept))
    again = {v for n in late for v in n.outputs}  # of nodes that another result, which cannot be stored, needs
    kept = tuple(v for v in kept if v not in again)
    return Split(tuple(early), kept, tuple(late))


def _live(nodes: Sequence[Node], results: Iterable[Value], stop: Mapping[Value, object]) -> list[Node]:
    """The nodes that compute `results`, in order; those of values in `stop` are not followed."""
    live = {v for v in results if v not in stop}
    found = []
    for n in reversed(nodes):
        if any(v in live for v in n.outputs if v is not None):
            live.update(v for v in n.uses() if v not in stop)
            found.append(n)
    return found[::-1]


def _is_cheap(value: Value, made: Mapping[Value, Node], ready: Collection[Value], depth: int) -> bool:
    """Whether a few elementwise operations and moves compute the value from values that are there."""
    node = made.get(value)
    if node is None or not depth or node.subgraphs:
        return False
    if not (traits_of(node).elementwise or (node.op_type in _MOVES and not node.domain)):
        return False
    return all(v.data is not None or v in ready or _is_cheap(v, made, ready, depth - 1) for v in node.uses())


def _is_matrix(v: Value) -> bool:
    return v.is_static and v.shape is not None and len(v.shape) == 2


def _permutation(node: Node) -> tuple[int, ...]:
    given = node.attributes.get("perm")
    return tuple(given) if isinstance(given, tuple) else (1, 0)


__all__ = ["Product", "Split", "products", "split"]
