"""Gradients of operators that only move elements: reshape, concatenate, split, slice, pad, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_core.errors import GradientError
from xrt_core.frontends import ops
from xrt_core.frontends.promotion import INT64
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.frontends.tracing import current_tracer
from xrt_core.training.gradient_context import Backward, Forward, filled, reduced, reshaped, sum_over
from xrt_core.training.registry import gradient


@gradient("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(ctx: Backward) -> Any:
    """dy in the input's shape."""
    return (reshaped(ctx.grad, ctx.inputs[0]), *[None] * (len(ctx.inputs) - 1))


@gradient("Transpose")
def transpose(ctx: Backward) -> Tensor:
    """dy transposed by the inverse permutation."""
    rank = ctx.inputs[0].ndim
    order = ctx.attr("perm") or tuple(range(rank - 1, -1, -1))
    return ctx.grad.transpose([int(i) for i in np.argsort(order)]) if rank else ctx.grad


@gradient("Expand")
def expand(ctx: Backward) -> Any:
    """dy summed over the broadcast axes."""
    return reduced(ctx.grad, ctx.inputs[0], ctx.node), None


def split(x: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
    """Return the parts of a tensor along an axis."""
    if len(sizes) == 1:
        return [x]
    made: Any
    if "split" in current_tracer("Split").schema("Split").attributes:
        made = ops.Split(x, axis=axis, split=list(sizes), outputs=len(sizes))
    else:
        made = ops.Split(x, literal(list(sizes), INT64), axis=axis, outputs=len(sizes))
    return list(made)


@gradient("Concat")
def concat(ctx: Backward) -> Any:
    """Each input gets its part of dy."""
    axis = int(ctx.attr("axis", 0)) % ctx.grad.ndim
    sizes = [x.shape[axis] for x in ctx.inputs]
    if not all(isinstance(s, int) for s in sizes):
        raise ctx.error(f"sizes along axis {axis} are {sizes}; specialise the graph for a signature first")
    return tuple(split(ctx.grad, sizes, axis))


@gradient("Split")
def split_(ctx: Backward) -> Any:
    """The output gradients concatenated, zeros for outputs on which the loss does not depend."""
    parts = [filled(y) if g is None else g for y, g in zip(_all_outputs(ctx), ctx.grads, strict=True)]
    axis = int(ctx.attr("axis", 0))
    joined = parts[0] if len(parts) == 1 else ops.Concat(*parts, axis=axis % parts[0].ndim)
    return (joined, *[None] * (len(ctx.inputs) - 1))


def _all_outputs(ctx: Backward) -> list[Any]:
    if any(y is None for y in ctx.outputs):
        raise ctx.error("one of its outputs is left out; name it")
    return list(ctx.outputs)


def moved(x: Tensor, axis: int, index: np.ndarray) -> Tensor:
    """Return `x` rearranged along `axis`: position j has element `index[j]`, or zero if that is -1."""
    size = x.shape[axis]
    if np.array_equal(index, np.arange(int(size))):
        return x
    inside = np.flatnonzero(index >= 0)
    first, count = (int(inside[0]), len(inside)) if len(inside) else (0, 0)
    if count == size and np.array_equal(index[first : first + count], np.arange(count)):
        around = [0] * (2 * x.ndim)  # one run: zeros before and after
        around[axis], around[x.ndim + axis] = first, len(index) - first - count
        return pad(x, around)
    if count < len(index):
        one = [1 if i == axis else d for i, d in enumerate(x.shape)]
        if not all(isinstance(d, int) for d in one):
            raise GradientError(f"no gradient: {x!r} is cut in steps and has unknown dimensions; specialise first")
        x = ops.Concat(x, literal_zeros(x, one), axis=axis)
        index = np.where(index < 0, size, index)
    made: Tensor = ops.Gather(x, literal_index(index), axis=axis)
    return made


def literal_zeros(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """Return zeros of a static shape in the dtype of `like`."""
    made: Tensor = ops.Expand(literal(0, like.dtype), [int(d) for d in shape])
    return made


def literal_index(index: np.ndarray) -> Tensor:
    """Return an integer array as a constant."""
    return literal(index.astype(np.int64), INT64)


def pad(x: Tensor, around: Sequence[int]) -> Tensor:
    """Pad `x` with zeros (all begins, then all ends); negative numbers crop."""
    if not any(around):
        return x
    made: Tensor
    if "pads" in current_tracer("Pad").schema("Pad").attributes:
        made = ops.Pad(x, pads=list(around))
    else:
        made = ops.Pad(x, list(around))
    return made


def _bounds(ctx: Forward) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return starts, ends, axes and steps of a Slice."""
    if ctx.version < 10:
        starts, ends = list(ctx.attr("starts")), list(ctx.attr("ends"))
        return starts, ends, list(ctx.attr("axes") or range(len(starts))), [1] * len(starts)
    starts, ends = (ctx.known(i, what).reshape(-1).tolist() for i, what in ((1, "starts"), (2, "ends")))
    axes = ctx.known(3, "axes").reshape(-1).tolist() if ctx.input(3) is not None else list(range(len(starts)))
    steps = ctx.known(4, "steps").reshape(-1).tolist() if ctx.input(4) is not None else [1] * len(starts)
    return starts, ends, axes, steps


@gradient("Slice")
def slice_(ctx: Backward) -> Any:
    """dy zero-padded to the input's shape, with zeros between elements for steps other than 1."""
    x, g = ctx.inputs[0], ctx.grad
    for start, end, axis, step in zip(*_bounds(ctx), strict=True):
        axis %= x.ndim
        size = x.shape[axis]
        if not isinstance(size, int):
            raise ctx.error(f"dimension {axis} of its input is {size}; specialise the graph for a signature first")
        taken = np.arange(size)[slice(start, end, step)]
        index = np.full(size, -1)
        index[taken] = np.arange(len(taken))
        g = moved(g, axis, index)
    return (g, *[None] * (len(ctx.inputs) - 1))


@gradient("Pad")
def pad_(ctx: Backward) -> Any:
    """dy cropped to the input; in modes reflect, edge and wrap, the sum of dy over all copies of an element."""
    x = ctx.inputs[0]
    mode = str(ctx.attr("mode", "constant"))
    given = list(ctx.attr("pads")) if ctx.version < 11 else ctx.known(1, "pads").reshape(-1).tolist()
    axes = list(range(x.ndim))
    if ctx.version >= 18 and ctx.input(3) is not None:
        axes = [int(a) % x.ndim for a in ctx.known(3, "axes").reshape(-1)]
    around = [0] * (2 * x.ndim)
    for k, a in enumerate(axes):
        around[a], around[x.ndim + a] = int(given[k]), int(given[len(axes) + k])
    by_x: Tensor | None = None
    if ctx.wants(0) or ctx.wants(2):
        by_x = pad(ctx.grad, [-p for p in around]) if mode == "constant" else _folded(ctx, x, around, mode)
    by_value = None
    if ctx.wants(2):
        if mode != "constant" or any(p < 0 for p in around):
            raise ctx.error("the gradient by its constant_value is there for mode constant without negative pads")
        assert by_x is not None
        by_value = reshaped(ctx.grad.sum() - by_x.sum(), ctx.inputs[2])
    return (by_x, None, by_value, None)[: len(ctx.inputs)]


def _folded(ctx: Backward, x: Tensor, around: list[int], mode: str) -> Tensor:
    g, rank = ctx.grad, x.ndim
    for axis in range(rank):
        before, after = around[axis], around[rank + axis]
        size = x.shape[axis]
        if not before and not after:
            continue
        if not isinstance(size, int):
            raise ctx.error(f"dimension {axis} of its input is {size}; specialise the graph for a signature first")
        kept = np.arange(max(-before, 0), size - max(-after, 0))
        source = np.pad(kept, (max(before, 0), max(after, 0)), mode=mode)  # type: ignore[call-overload]
        table = np.zeros((len(source), size))
        table[np.arange(len(source)), source] = 1  # each output copies one input: its gradient is a sum over outputs
        order = [i for i in range(rank) if i != axis]
        last = g.transpose([*order, axis]) @ literal(table, g.dtype)
        g = last.transpose([int(i) for i in np.argsort([*order, axis])])
    return g


@gradient("Tile")
def tile(ctx: Backward) -> Any:
    """dy summed over the copies."""
    x = ctx.inputs[0]
    repeats = ctx.known(1, "repeats").reshape(-1).tolist()
    shape = ctx.shape(x)
    pairs = [n for r, d in zip(repeats, shape, strict=True) for n in (int(r), d)]
    if 0 in pairs:
        return filled(x), None
    return sum_over(ctx.grad.reshape(pairs), list(range(0, 2 * x.ndim, 2)), keepdims=False), None


@gradient("DepthToSpace")
def depth_to_space(ctx: Backward) -> Tensor:
    """SpaceToDepth of dy."""
    block = int(ctx.attr("blocksize"))
    if str(ctx.attr("mode", "DCR")) == "DCR":
        made: Tensor = ops.SpaceToDepth(ctx.grad, blocksize=block)
        return made
    n, c, h, w = ctx.shape(ctx.inputs[0])
    back = ctx.grad.reshape(n, c // block**2, h, block, w, block)
    return back.transpose([0, 1, 3, 5, 2, 4]).reshape(n, c, h, w)


@gradient("SpaceToDepth")
def space_to_depth(ctx: Backward) -> Tensor:
    """DepthToSpace of dy."""
    made: Tensor = ops.DepthToSpace(ctx.grad, blocksize=int(ctx.attr("blocksize")))
    return made


@gradient("Trilu")
def trilu(ctx: Backward) -> Any:
    """The same triangle of dy."""
    given = [x for x in ctx.inputs[1:] if x is not None]
    return (ops.Trilu(ctx.grad, *given, upper=int(ctx.attr("upper", 1))), *[None] * (len(ctx.inputs) - 1))


@gradient("ReverseSequence")
def reverse_sequence(ctx: Backward) -> Any:
    """Reversed again."""
    axes = {k: int(ctx.attr(k, d)) for k, d in (("batch_axis", 1), ("time_axis", 0))}
    return ops.ReverseSequence(ctx.grad, ctx.inputs[1], **axes), None


@gradient("Boxing", domain="xrt")
def boxing(ctx: Backward) -> Any:
    """The gradient lies as it comes."""
    return ctx.grad


@gradient("Barrier", domain="xrt")
def barrier(ctx: Backward) -> Any:
    """Each output's gradient goes to its input; inputs without an output get none."""
    return (*ctx.grads, *[None] * (len(ctx.inputs) - len(ctx.grads)))
