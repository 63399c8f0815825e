"""Rules of padding for Resize: axes that carry padding are repeated, or interpolated by their valid sizes."""

from __future__ import annotations

import math

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.symbols import Expr, product
from xrt_core.passes.padding.form import Padded, axis_of
from xrt_core.passes.padding.movement import clamped
from xrt_core.passes.padding.operands import at, first_of, narrowed, number, require_prefix, text, type_code, widened
from xrt_core.passes.padding.walk import Given, Padder


def resize(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    scales_at, sizes_at = (1, None) if node.version < 11 else (2, 3)
    scales, sizes = at(given, scales_at), None if sizes_at is None else at(given, sizes_at)
    if node.attributes.get("axes") is not None or text(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        raise p.refused("it names axes, or keeps the ratio of them")
    if _coordinates(node) == "tf_crop_and_resize":
        raise p.refused("a part of an axis is resized")
    if sizes is not None and sizes.known is not None and sizes.known.size:
        made = _to_sizes(p, node, x, given, p.ints(sizes) or [])
        return [narrowed(p, made, x.dtype)]
    data = None if scales is None else p.data(scales).data
    if data is None:
        raise p.refused("its scales are computed")
    made = _by_scales(p, node, x, given, [float(v) for v in data.reshape(-1)], scales_at)
    return [narrowed(p, made, x.dtype)]


def _to_sizes(p: Padder, node: Node, x: Padded, given: Given, target: list[Expr]) -> Padded:
    over = x.padded
    for i in over:
        if target[i] != product(x.axes[i]):
            x = _interpolated(p, node, x, i, target[i])
    axes = [x.axes[i] if i in over else axis_of([t]) for i, t in enumerate(target)]
    if axes == list(x.axes):
        return x
    sizes = Padded(p.vector(*p.sizes(axes)), np.dtype(np.int64), (axis_of([len(axes)]),))
    return _beside(p, node, x, [x, at(given, 1), at(given, 2), sizes], axes)


def _by_scales(p: Padder, node: Node, x: Padded, given: Given, scales: list[float], scales_at: int) -> Padded:
    over, left = x.padded, list(scales)
    repeated = (
        text(node, "mode", "nearest") == "nearest"
        and _coordinates(node) == "asymmetric"
        and (node.version < 11 or text(node, "nearest_mode", "round_prefer_floor") == "floor")
    )
    for i in over:
        if scales[i] != 1 and not repeated:
            if scales[i] != int(scales[i]):
                raise p.refused("a padded axis is resized by a ratio that is no integer")
            x, left[i] = _interpolated(p, node, x, i, product(x.axes[i]) * int(scales[i])), 1.0
    axes = list(x.axes)
    for i, f in enumerate(left):
        if i not in over:
            axes[i] = axis_of([math.floor(p.size(x.axes[i]) * f)])
        elif f != int(f):
            raise p.refused("a padded axis is resized by a ratio that is no integer")
        elif f != 1:
            axes[i] = axis_of([*x.axes[i], int(f)])
    if axes == list(x.axes):
        return x
    inputs: list[Padded | None] = [x, *given[1:]]
    if left != scales:
        values = p.constant(np.array(left, np.float32))
        inputs[scales_at] = Padded(values, np.dtype(np.float32), (axis_of([len(left)]),))
    return _beside(p, node, x, inputs, axes)


def _beside(p: Padder, node: Node, x: Padded, inputs: list[Padded | None], axes: list[tuple[Expr, ...]]) -> Padded:
    """The node, which interpolates along no padded axis."""
    if text(node, "mode", "nearest") != "nearest":
        inputs[0] = p.masked(x, x.padded, 0)  # neighbours of weight zero must be finite
    made = p.copy(node, inputs, [axes])[0]
    assert made is not None
    return made


def _coordinates(node: Node) -> str:
    return "asymmetric" if node.version < 11 else text(node, "coordinate_transformation_mode", "half_pixel")


def _interpolated(p: Padder, node: Node, x: Padded, axis: int, target: Expr) -> Padded:
    """An axis that carries padding in another size, by linear interpolation between its valid places: each place of the
    result lies between two of them, at a coordinate that is a quotient of integers. Narrow floats become float32."""
    size, mode = require_prefix(p, x.axes[axis]), _coordinates(node)
    if text(node, "mode", "nearest") != "linear" or number(node, "antialias", 0):
        raise p.refused("a padded axis is resized otherwise than by repeating, or linearly between its places")
    out = p.checked_axis(axis_of([target]))
    count = require_prefix(p, out)
    i = p.constant(np.arange(p.size(out), dtype=np.int64))
    if mode == "asymmetric":
        above, below = p.emit("Mul", [i, p.scalar(size)]), count
    elif mode == "align_corners":
        above, below = p.emit("Mul", [i, p.scalar(size - 1)]), count - 1
    elif mode in ("half_pixel", "pytorch_half_pixel"):
        middle = p.constant(2 * np.arange(p.size(out), dtype=np.int64) + 1)
        above, below = p.emit("Sub", [p.emit("Mul", [middle, p.scalar(size)]), p.scalar(count)]), count * 2
    else:
        raise p.refused(f"a padded axis is interpolated with coordinates by {mode}")
    if mode in ("align_corners", "pytorch_half_pixel"):
        p.need(count, 2)  # one place has a rule of its own
    if p.opset < 12:
        raise p.refused("a coordinate that depends on the size needs opset 12")
    unit, last = p.scalar(below), p.scalar(size - 1)
    none, one = p.constant(np.array(0, np.int64)), p.constant(np.array(1, np.int64))
    above = p.emit("Min", [p.emit("Max", [above, none]), p.emit("Mul", [last, unit])])
    first = p.emit("Div", [above, unit])
    second = p.emit("Min", [p.emit("Add", [first, one]), last])
    wide = widened(p, x)
    code = type_code(wide.dtype)
    part = p.emit("Sub", [above, p.emit("Mul", [first, unit])])
    share = p.emit("Div", [p.emit("Cast", [part], to=code), p.emit("Cast", [unit], to=code)])
    share = p.shaped(share, [p.size(out) if k == axis else 1 for k in range(x.rank)])
    near, far = (_taken(p, wide, places, axis) for places in (first, second))
    made = p.emit("Add", [near, p.emit("Mul", [p.emit("Sub", [far, near]), share])])
    axes = [*x.axes[:axis], out, *x.axes[axis + 1 :]]
    return p.padded(made, axes)


def _taken(p: Padder, x: Padded, places: Value, axis: int) -> Value:
    return p.emit("Gather", [p.data(x), clamped(p, places, p.size(x.axes[axis]))], axis=axis)
