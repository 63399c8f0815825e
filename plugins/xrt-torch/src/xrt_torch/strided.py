"""Strides: where the elements of results lie in memory, and views that are given by it.

A view is valid, and `as_strided` right, of a tensor that lies in memory as the program expects, so that results of
decompositions have to lie there as torch's do. XRT reads `as_strided` as gathers of rows; torchlib would gather single
elements, with an index for each, and only of tensors that lie in memory in their own order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


def laid_out(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition of an operator, with results that lie in memory as the operator's do."""
    if not isinstance(operator, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape in operator.tags:
        return function

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        found = list(results) if isinstance(results, tuple | list) else [results]
        if not any(isinstance(r, Tensor) and r.dim() > 1 for r in found):
            return results
        if not any(isinstance(a, Tensor) for a in tree_leaves((args, kwargs))):
            return results  # in order
        with contextlib.suppress(Exception):
            wanted = _expected(operator, args, kwargs)
            if len(wanted) == len(found):
                found = [_with_strides(r, w) for r, w in zip(found, wanted, strict=True)]
                return found if isinstance(results, list) else tuple(found) if isinstance(results, tuple) else found[0]
        return results

    return made


def _expected(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """What the operator itself returns, of fake tensors, while nothing traces it or takes it apart."""
    with _disable_current_modes():
        made = operator(*args, **kwargs)
    return list(made) if isinstance(made, tuple | list) else [made]


def _with_strides(x: Any, like: Any) -> Any:
    """x with its axes in memory in the order of another tensor of its shape."""
    if not isinstance(x, Tensor) or not isinstance(like, Tensor) or x.dim() != like.dim():
        return x
    order = _in_memory(like)
    if order == _in_memory(x):
        return x
    back = [order.index(i) for i in range(x.dim())]
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _in_memory(x: Tensor) -> list[int]:
    """The axes in the order in which they lie in memory, those of a single element in their place."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    def comes_first(i: int, j: int) -> int:
        a, b = x.stride(i), x.stride(j)
        return int(statically_known_true(a < b)) - int(statically_known_true(a > b))

    moving = [i for i in range(x.dim()) if not statically_known_true(x.shape[i] == 1)]
    order = iter(sorted(moving, key=functools.cmp_to_key(comes_first)))
    return [next(order) if i in moving else i for i in range(x.dim())]


class _Axis(NamedTuple):
    """An axis of memory. begin: where the view begins on it; steps: axis of the view that runs along it -> its step."""

    size: int
    begin: int
    steps: dict[int, int]

    def places(self, size: Sequence[int]) -> list[int]:
        """Where the elements of a view of this size are, the view's axes in order."""
        each = (range(0, size[i] * step, step) for i, step in self.steps.items())
        return [self.begin + sum(offsets) for offsets in itertools.product(*each)]


def is_known(node: Node) -> bool:
    """Whether it is known which elements of its operand a view has: those of a tensor of fixed sizes without gaps, and
    of one that the graph computes where the first is said by its place in memory, which no guard of torch looks at."""
    return _arguments(node) is not None and (len(node.args) < 4 or node.args[3] is None or not _is_of_input(node))


def _is_of_input(node: Node) -> bool:
    """Whether a node is a view of an input of its graph."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(r.alias_info for r in schema.returns):
            return False
        operand: Any = node.args[0]
        node = operand
    return True


def take_apart(graph: Graph) -> None:
    """Put gathers in the place of `as_strided`, where it is known what it reads."""
    for node in list(graph.nodes):
        if node.target is aten.as_strided.default and (found := _arguments(node)) is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_gathers(graph, node, *found))
            graph.erase_node(node)


def _arguments(node: Node) -> tuple[list[int], list[int], list[int], int] | None:
    """The operand's axes as they lie in memory, the view's sizes and strides, and the place of its first element in the
    operand; None where they are not known, or the view has elements that are not the operand's."""
    arguments: Any = (*node.args, None)
    operand, size, stride, offset = arguments[:4]
    x: Any = operand.meta.get("val")
    numbers = [*size, *stride, offset or 0]
    if not isinstance(x, Tensor) or not all(isinstance(n, int) for n in (*numbers, *x.shape, *x.stride())):
        return None
    begin = 0 if offset is None else offset - x.storage_offset()
    order = sorted(range(x.dim()), key=lambda i: (x.shape[i] != 1, -x.stride(i)))
    expected = 1
    for i in reversed(order):
        if x.shape[i] != 1 and x.stride(i) != expected:
            return None
        expected *= x.shape[i]
    last = begin + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    is_within = math.prod(size) > 0 and begin >= 0 and last < x.numel()
    return (order, list(size), list(stride), begin) if is_within else None


def _axes(elements: int, size: Sequence[int], stride: Sequence[int], begin: int) -> list[_Axis] | None:
    """Memory of so many elements as axes, such that each axis of the view runs along one of them; None where one would
    run along several, as that of a diagonal does."""
    moving = [i for i, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s]
    limits = sorted({1, *(stride[i] for i in moving)})
    made: list[_Axis] = []
    while limits:
        low = limits.pop(0)
        steps = {i: stride[i] // low for i in moving if stride[i] == low}
        while True:
            high = limits[0] if limits else elements
            if high % low:
                return None
            first = begin % high // low if limits else begin // low
            if first + sum((size[i] - 1) * s for i, s in steps.items()) < high // low:
                break
            if not limits:
                return None
            limits.pop(0)  # windows that overlap: what moves them runs along the same axis
            steps |= {i: high // low for i in moving if stride[i] == high}
        made.insert(0, _Axis(high // low, first, dict(sorted(steps.items()))))
    return made


def _gathers(graph: Graph, node: Node, order: list[int], size: list[int], stride: list[int], begin: int) -> Node:
    x: Any = node.args[0]
    like: Any = x.meta["val"]

    def added(operator: Any, shape: Sequence[int], *args: Any) -> Node:
        made = graph.call_function(operator, args)
        made.meta["val"] = like.new_empty(shape)
        return made

    def constant(name: str, places: Any) -> Node:
        made = graph.get_attr(f"{name}_{node.name}")
        made.meta["val"] = places
        return made

    def permuted(x: Node, axes: Sequence[int]) -> Node:
        shape = x.meta["val"].shape
        is_same = list(axes) == sorted(axes)
        return x if is_same else added(aten.permute.default, [shape[i] for i in axes], x, axes)

    x = permuted(x, order)
    axes = _axes(like.numel(), size, stride, begin)
    if axes is None:
        grid = torch.full([], begin)
        for n, s in zip(size, stride, strict=True):
            grid = grid.unsqueeze(-1) + torch.arange(n) * s
        x = added(aten.view.default, [like.numel()], x, [-1])
        x = added(aten.index_select.default, [grid.numel()], x, 0, constant("places", grid.reshape(-1)))
        return added(aten.view.default, size, x, size)
    shape = [a.size for a in axes]
    x = added(aten.view.default, shape, x, shape)
    for d, axis in enumerate(axes):
        places = axis.places(size)
        shape = [*shape[:d], len(places), *shape[d + 1 :]]
        if places == list(range(places[0], places[0] + len(places))):
            if len(places) < axis.size:
                x = added(aten.slice.Tensor, shape, x, d, places[0], places[-1] + 1)
        else:
            x = added(aten.index_select.default, shape, x, d, constant(f"places_{d}", torch.tensor(places)))
    along = [i for a in axes for i in a.steps]
    along += [i for i in range(len(size)) if i not in along]  # along which nothing moves
    moving = {i for a in axes for i in a.steps}
    shape = [size[i] if i in moving else 1 for i in along]
    x = added(aten.view.default, shape, x, shape)
    x = permuted(x, [along.index(i) for i in range(len(size))])
    return x if list(x.meta["val"].shape) == size else added(aten.expand.default, size, x, size)
