"""What rules of padding read: a node's attributes and inputs, and whether axes carry padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xrt_core.ir.graph import Node
from xrt_core.ir.symbols import Expr, product
from xrt_core.ir.types import DTYPE_TO_ONNX
from xrt_core.passes.padding.form import Axis, Padded, is_padded
from xrt_core.passes.padding.walk import Given, Padder


def first_of(p: Padder, given: Given) -> Padded:
    """The first input."""
    if not given or given[0] is None:
        raise p.refused("its first input is left out")
    return given[0]


def number(node: Node, name: str, default: int) -> int:
    """An integer attribute."""
    found = node.attributes.get(name, default)
    assert isinstance(found, int)
    return found


def text(node: Node, name: str, default: str) -> str:
    """An attribute that is a text."""
    found = node.attributes.get(name, default)
    return found.decode() if isinstance(found, bytes) else str(found)


def numbers(node: Node, name: str) -> list[int] | None:
    """An attribute that is a list of integers; None where it is not given."""
    found = node.attributes.get(name)
    return None if found is None else [int(x) for x in found]  # type: ignore[union-attr]


def at(given: Given, i: int) -> Padded | None:
    """An input; None where it is left out."""
    return given[i] if i < len(given) else None


def require_unpadded(p: Padder, s: Padded | None, axes: Sequence[int] | None, what: str) -> None:
    """Refuse where one of the axes (None: any) carries padding."""
    if s is not None and any(is_padded(s.axes[i]) for i in (range(s.rank) if axes is None else axes)):
        raise p.refused(f"{what} carries padding")


def is_prefix(axis: Axis) -> bool:
    """Whether the valid places of an axis are the first ones."""
    return all(f.constant is not None for f in axis[1:])


def require_prefix(p: Padder, axis: Axis) -> Expr:
    """The size of an axis. Refuses one whose valid places are not the first ones."""
    if not is_prefix(axis):
        raise p.refused("padding lies between the valid elements of a merged axis")
    return product(axis)


def broadcast(p: Padder, all_axes: Sequence[Sequence[Axis]]) -> tuple[Axis, ...]:
    """The axes of a broadcast result. Refuses sizes that differ, of which one might be 1 for some calls."""
    rank = max(map(len, all_axes))
    made = []
    for k in range(rank):
        wide = {a[k - rank + len(a)] for a in all_axes if k - rank + len(a) >= 0} - {()}
        if len(wide) > 1:
            sizes = ", ".join(sorted("*".join(map(str, a)) for a in wide))
            raise p.refused(f"axes of the sizes {sizes} are combined")
        made.append(wide.pop() if wide else ())
    return tuple(made)


def typed_like(p: Padder, node: Node, given: Given, x: Padded, kept: int) -> Given:
    """The node over axes of which only the first `kept` may carry padding; the others are those that are inferred."""
    made = p.add(node.replace(inputs=[None if s is None else p.data(s) for s in given]))
    return [None if s is None else p.padded(p.data(s), [*x.axes[:kept], *s.axes[kept:]]) for s in made]


def type_code(dtype: np.dtype) -> int:
    """The number of a dtype in ONNX."""
    return DTYPE_TO_ONNX[dtype]


def one_bound(s: Padded) -> tuple[Expr, ...]:
    """The bound of all elements, where it is one for all."""
    return s.top if len(s.top) == 1 else ()


def widened(p: Padder, x: Padded) -> Padded:
    """Narrow floats as float32."""
    return x if x.dtype.itemsize >= 4 else p.padded(p.emit("Cast", [p.data(x)], to=1), x.axes)


def narrowed(p: Padder, x: Padded, dtype: np.dtype) -> Padded:
    """What was computed of widened floats, as these were."""
    return x if x.dtype == dtype else p.padded(p.emit("Cast", [p.data(x)], to=type_code(dtype)), x.axes)
