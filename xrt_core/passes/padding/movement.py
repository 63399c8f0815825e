"""Rules of padding for operators that move elements: where places of a padded axis go, and how indices count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xrt_core.ir.graph import Node, Value
from xrt_core.ir.symbols import Expr, product
from xrt_core.passes.padding.form import Axis, Padded, Steps, axis_of, is_padded
from xrt_core.passes.padding.operands import (
    at,
    first_of,
    is_prefix,
    number,
    numbers,
    one_bound,
    require_prefix,
    require_unpadded,
    text,
    type_code,
    typed_like,
)
from xrt_core.passes.padding.positions import columns_of, covered
from xrt_core.passes.padding.walk import Given, Padder


def transpose(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    perm = numbers(node, "perm") or list(reversed(range(x.rank)))
    zeros = frozenset(i for i, k in enumerate(perm) if k in x.zeros)
    return p.copy(node, given, [[x.axes[k] for k in perm]], zeros=zeros, clean=x.clean, top=one_bound(x))


def squeeze(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    axes = numbers(node, "axes")
    if axes is None:
        axes = p.numbers(at(given, 1))
    if axes is None:
        if x.padded:
            raise p.refused("which axes it takes away depends on the size")
        axes = [i for i, a in enumerate(x.axes) if a == ()]
    gone = {a % x.rank for a in axes}
    if any(x.axes[i] != () for i in gone):
        raise p.refused("an axis of size 1 for some sizes alone")
    return _reshaped(p, x, [a for i, a in enumerate(x.axes) if i not in gone])


def unsqueeze(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    axes = numbers(node, "axes")
    if axes is None:
        axes = p.numbers(given[1])
    assert axes is not None
    rank = x.rank + len(axes)
    new = {a % rank for a in axes}
    old = iter(x.axes)
    return _reshaped(p, x, [() if i in new else next(old) for i in range(rank)])


def flatten(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    axis = number(node, "axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    return _reshaped(p, x, [axis_of(_digits(x.axes[:axis])), axis_of(_digits(x.axes[axis:]))])


def _digits(axes: Sequence[Axis]) -> list[Expr]:
    return [f for a in axes for f in a]


def _reshaped(p: Padder, x: Padded, axes: Sequence[Axis]) -> Given:
    """The value with its digits grouped to these axes."""
    made = p.shaped(p.data(x), p.sizes(axes))
    zeros = frozenset[int]()
    if [a for a in axes if is_padded(a)] == [a for a in x.axes if is_padded(a)]:  # padded axes are as they were
        old = [i for i, a in enumerate(x.axes) if is_padded(a)]
        new = [i for i, a in enumerate(axes) if is_padded(a)]
        zeros = frozenset(n for o, n in zip(old, new, strict=True) if o in x.zeros)
    return [p.padded(made, axes, zeros=zeros, clean=x.clean, top=one_bound(x))]


def reshape(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    if node.version < 5:
        target = [Expr.of(n) for n in numbers(node, "shape") or []]
    else:
        target = p.ints(given[1]) or []
    wanted: list[Expr | None] = []
    for i, t in enumerate(target):
        if t == 0 and not number(node, "allowzero", 0):
            if i >= x.rank:
                raise p.refused("a size is taken over from an axis that is not there")
            wanted.append(product(x.axes[i]))
        else:
            wanted.append(None if t == -1 else t)
    digits = list(axis_of(_digits(x.axes)))  # numbers beside each other as one
    if None not in wanted:
        front, rest = _grouped(p, digits, [t for t in wanted if t is not None])
        if rest:
            raise p.refused("the new shape has another number of elements")
        return _reshaped(p, x, front)
    at = wanted.index(None)
    front, rest = _grouped(p, digits, [t for t in wanted[:at] if t is not None])
    back, rest = _grouped(p, rest, [t for t in reversed(wanted[at + 1 :]) if t is not None], from_end=True)
    return _reshaped(p, x, [*front, axis_of(rest), *reversed(back)])


def _grouped(
    p: Padder, digits: list[Expr], wanted: Sequence[Expr], from_end: bool = False
) -> tuple[list[Axis], list[Expr]]:
    """Groups of digits whose products are the wanted sizes, and the digits that are left. Numbers may be split."""
    left = list(reversed(digits)) if not from_end else list(digits)  # the next one is the last
    groups: list[Axis] = []
    for size in wanted:
        group: list[Expr] = []
        done = Expr.of(1)
        for count in range(1, len(left) + 1):  # where the size is a sum, it cannot be divided by each factor
            if product(left[-count:]) == size:
                group, done = left[: -count - 1 : -1], size
                del left[-count:]
                break
        while done != size:
            if not left:
                raise p.refused(f"the size {size} is not made of whole axes")
            digit = left.pop()
            if _ratio(size, done * digit) is not None or size.divided(done * digit) is not None:
                group.append(digit)
                done = done * digit
                continue
            part, whole = _ratio(size, done), digit.constant
            if part is None or whole is None or whole % part:
                raise p.refused(f"the size {size} is not made of whole axes")
            group.append(Expr.of(part))
            left.append(Expr.of(whole // part))
            done = size
        groups.append(axis_of(reversed(group) if from_end else group))
    return groups, (left if from_end else list(reversed(left)))


def _ratio(size: Expr, done: Expr) -> int | None:
    """The number that times `done` gives `size`, or None."""
    if not done.terms or not size.terms:
        return None
    k, rest = divmod(size.terms[0][1], done.terms[0][1])
    return k if not rest and done * k == size else None


def expand(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    target = [axis_of([t]) for t in p.ints(given[1]) or []]
    return [_expanded(p, x, target)]


def _expanded(p: Padder, x: Padded, target: Sequence[Axis]) -> Padded:
    rank = max(x.rank, len(target))
    old = [()] * (rank - x.rank) + list(x.axes)
    new = [()] * (rank - len(target)) + list(target)
    axes = []
    for a, t in zip(old, new, strict=True):
        if a == () or t == ():
            axes.append(a or t)
        elif a == t or product(a) == product(t):
            axes.append(a)
        else:
            raise p.refused(f"an axis of the size {product(a)} is expanded to {product(t)}")
    for a in axes:
        p.checked_axis(a)
    made = p.emit("Expand", [p.data(x), p.vector(*p.sizes(axes))])
    zeros = frozenset(i for i, a in enumerate(old) if i - rank + x.rank in x.zeros and is_padded(a))
    clean = x.clean and all(is_padded(a) == is_padded(b) for a, b in zip(axes, old, strict=True))
    top = x.top if len(x.top) == 1 or (len(x.top) > 1 and old[-1] == axes[-1]) else ()
    return p.padded(made, axes, zeros=zeros, clean=clean, top=top, unexpanded=x)


def tile(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    repeats = p.ints(given[1]) or []
    if len(repeats) != x.rank:
        raise p.refused("repeats that do not fit the rank")
    axes = [axis_of([r, *a]) for r, a in zip(repeats, x.axes, strict=True)]
    for a in axes:
        p.checked_axis(a)
    made = p.emit("Tile", [p.data(x), p.vector(*(r.evaluate(p.buckets) for r in repeats))])
    return [p.padded(made, axes, top=one_bound(x))]


def constant_of_shape(p: Padder, node: Node, given: Given) -> Given:
    axes = [p.checked_axis(axis_of([t])) for t in p.ints(given[0]) or []]
    value = node.attributes.get("value")
    item = value.reshape(-1)[0] if isinstance(value, np.ndarray) else np.float32(0)
    made = p.add(node.replace(inputs=[p.vector(*p.sizes(axes))]))[0]
    assert made is not None
    padded = frozenset(i for i, a in enumerate(axes) if is_padded(a))
    zero = bool(item == 0)
    top = (Expr.of(int(item) + 1),) if made.dtype.kind in "iu" and item >= 0 else ()
    return [p.padded(p.data(made), axes, zeros=padded if zero else frozenset(), clean=zero, top=top)]


def range_(p: Padder, node: Node, given: Given) -> Given:
    start, limit, delta = (p.ints(s) for s in given)
    assert start is not None
    assert limit is not None
    assert delta is not None
    if delta[0] != 1:
        raise p.refused("a step other than 1")
    dtype = first_of(p, given).dtype
    axis = p.checked_axis(axis_of([limit[0] - start[0]]))
    require_prefix(p, axis)
    count = p.size(axis)
    first = start[0].constant
    if first is not None:
        made = p.constant(np.arange(first, first + count).astype(dtype))
    else:
        made = p.emit("Add", [p.constant(np.arange(count, dtype=np.int64)), p.scalar(start[0])])
        if dtype != np.int64:
            made = p.emit("Cast", [made], to=type_code(dtype))
    # in the padding, places of smaller sizes count to less than those of the bucket
    top = (limit[0],) if p.at_least(start[0], 0) else ()
    return [p.padded(made, [axis], top=top)]


def concat(p: Padder, node: Node, given: Given) -> Given:
    parts = [s for s in given if s is not None]
    rank = parts[0].rank
    axis = number(node, "axis", 1) % rank
    axes: list[Axis] = list(parts[0].axes)
    for s in parts[1:]:
        if any(a != b for i, (a, b) in enumerate(zip(axes, s.axes, strict=True)) if i != axis):
            raise p.refused("its inputs are of different sizes on other axes")
    sizes = [require_prefix(p, s.axes[axis]) if is_padded(s.axes[axis]) else product(s.axes[axis]) for s in parts]
    total = sizes[0]
    for e in sizes[1:]:
        total = total + e
    along = any(is_padded(s.axes[axis]) for s in parts)
    axes[axis] = axis_of([total])
    tops = [s.top for s in parts]
    top: tuple[Expr, ...] = ()
    if all(len(t) == 1 for t in tops) and axis == rank - 1 and all(s.axes[axis] == () for s in parts):
        top = tuple(t[0] for t in tops)
    elif tops[0] and len(tops[0]) == 1 and all(t == tops[0] for t in tops):
        top = tops[0]
    if not along:
        zeros = frozenset(i for i in parts[0].zeros if all(i in s.zeros for s in parts))
        return p.copy(node, given, [axes], zeros=zeros, clean=all(s.clean for s in parts), top=top)
    if not any(is_padded(s.axes[axis]) for s in parts[:-1]):
        return p.copy(node, given, [axes], top=top)  # padding stays at the end
    if len(parts) == 2 and not is_padded(parts[1].axes[axis]):
        return [_appended(p, parts[0], parts[1], axis, axes)]
    joined = p.emit("Concat", [p.data(s) for s in parts], axis=axis)
    count = sum(p.size(s.axes[axis]) for s in parts)
    places: Value = p.constant(np.arange(count, dtype=np.int64))
    first = places
    begin = Expr.of(0)
    for s, e in zip(parts[:-1], sizes[:-1], strict=True):
        begin = begin + e
        if is_padded(s.axes[axis]):  # what comes behind a part stands behind its padding
            before = p.emit("Less", [first, p.scalar(begin)])
            gap = p.scalar(Expr.of(p.size(s.axes[axis])) - e)
            places = p.emit("Add", [places, p.emit("Where", [before, p.constant(np.array(0, np.int64)), gap])])
    made = p.emit("Gather", [joined, clamped(p, places, count)], axis=axis)
    return [p.padded(made, axes)]


def _appended(p: Padder, x: Padded, y: Padded, axis: int, axes: Sequence[Axis]) -> Padded:
    """What has no padding along an axis behind what has: written where the valid places of the first one end."""
    room = p.constant(np.zeros(p.sizes(y.axes), y.dtype))
    wide = p.emit("Concat", [p.data(x), room], axis=axis)
    made = p.written(wide, p.data(y), p.scalar(require_prefix(p, x.axes[axis])), axis)
    zeros = frozenset(i for i in x.zeros if i == axis or i in y.zeros)
    return p.padded(made, axes, zeros=zeros, clean=x.clean and y.clean)


def clamped(p: Padder, index: Value, count: int) -> Value:
    """An index that is in range in the padding as well, visibly so to who asks for its bounds."""
    if p.opset < 12:
        raise p.refused("an index that depends on the size needs opset 12")
    index = p.emit("Max", [index, p.constant(np.array(0, np.int64))])
    return p.emit("Min", [index, p.constant(np.array(count - 1, np.int64))])


def split(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    axis = number(node, "axis", 0) % x.rank
    require_unpadded(p, x, [axis], "the axis that is split")
    made = p.add(node.replace(inputs=[None if s is None else p.data(s) for s in given]))
    parts: list[Padded | None] = []
    contents, begin = x.known if x.rank == 1 else None, 0
    for s in made:
        if s is None:  # of what size is not known
            parts.append(None)
            contents = None
            continue
        axes = [s.axes[i] if i == axis else a for i, a in enumerate(x.axes)]
        end = begin + p.size(axes[axis])
        known = None if contents is None else contents[begin:end]
        parts.append(p.padded(p.data(s), axes, known=known, zeros=x.zeros, clean=x.clean, top=one_bound(x)))
        begin = end
    return parts


def slice_(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    if node.version < 10:
        starts = [Expr.of(n) for n in numbers(node, "starts") or []]
        ends = [Expr.of(n) for n in numbers(node, "ends") or []]
        axes, steps = numbers(node, "axes"), None
    else:
        starts, ends = p.ints(given[1]) or [], p.ints(given[2]) or []
        axes, steps = p.numbers(at(given, 3)), p.numbers(at(given, 4))
    where = [a % x.rank for a in axes] if axes is not None else list(range(len(starts)))
    steps = steps or [1] * len(starts)
    s = x
    for axis, start, end, step in zip(where, starts, ends, steps, strict=True):
        s = _sliced(p, s, axis, start, end, step)
    return [s]


_FAR: Final = 2**31 - 1  # bounds of at least so much mean "to the end"


def _sliced(p: Padder, x: Padded, axis: int, start: Expr, end: Expr, step: int) -> Padded:
    """One axis sliced: place i of the result is place start + step*i."""
    if step == 0:
        raise p.refused("a step of 0")
    size = require_prefix(p, x.axes[axis]) if is_padded(x.axes[axis]) else product(x.axes[axis])
    back = step < 0
    start = _bound(p, start, size, size - 1 if back else size, Expr.of(0), start_of=True)
    end = _bound(p, end, size, size - 1 if back else size, Expr.of(-1 if back else 0), start_of=False)
    span = start - end if back else end - start
    by = abs(step)
    length = axis_of([(span + (by - 1)) // by])
    if length == x.axes[axis] and not back and start == 0 and by == 1:
        return x
    axes = [*x.axes[:axis], p.checked_axis(length), *x.axes[axis + 1 :]]
    count, first = p.size(length), start.constant
    top = one_bound(x)
    zeros = x.zeros - {axis}
    if first is not None and not back and first + step * (count - 1) < p.size(x.axes[axis]):
        end_ = first + step * (count - 1) + 1
        if p.opset >= 10:
            made = p.emit(
                "Slice", [p.data(x), p.vector(first), p.vector(end_), p.vector(axis), p.vector(step)]
            )  # fmt: skip
        elif step == 1:
            made = p.emit("Slice", [p.data(x)], starts=(first,), ends=(end_,), axes=(axis,))
        else:
            raise p.refused("a step other than 1 before opset 10")
        return p.padded(made, axes, zeros=zeros, top=top)
    places = p.constant(np.arange(count, dtype=np.int64) * step)
    index = p.emit("Add", [places, p.scalar(start)])
    made = p.emit("Gather", [p.data(x), clamped(p, index, p.size(x.axes[axis]))], axis=axis)
    return p.padded(made, axes, zeros=zeros, top=top)


def _bound(p: Padder, bound: Expr, size: Expr, most: Expr, least: Expr, *, start_of: bool) -> Expr:
    """A start or an end of Slice as a place: counted from the end where negative, cut to the axis."""
    value = bound.constant
    if value is not None and value >= _FAR:
        return most
    if value is not None and value <= -_FAR:
        return least
    length = size.constant
    if value is not None and length is not None:
        value = value + length if value < 0 else value
        return Expr.of(min(max(value, least.constant or 0), most.constant or 0))
    high = p.bounds(bound)[1]
    if p.at_least(bound, 0):
        pass
    elif high is not None and high < 0:
        bound = bound + size
    else:
        raise p.refused(f"a bound {bound} that is negative for some sizes alone")
    if most == size or start_of:
        p.need(most - bound, 0)  # serve only sizes that it lies in
    p.need(bound - least, 0)
    return bound


def gather(p: Padder, node: Node, given: Given) -> Given:
    x, index = given[0], given[1]
    assert x is not None
    assert index is not None
    axis = number(node, "axis", 0) % x.rank
    seen = _view(p, x, axis, 1, index.axes, columns_of(index))
    if seen is not None:
        return [seen]
    axes = [*x.axes[:axis], *index.axes, *x.axes[axis + 1 :]]
    size = product(x.axes[axis])
    if is_padded(x.axes[axis]):
        require_prefix(p, x.axes[axis])
        if index.known is not None:
            index = _known_index(p, index, size, p.size(x.axes[axis]))
        elif len(index.top) != 1 or not p.at_least(size - index.top[0], 0):
            raise p.refused("its indices may point behind the valid size")
    index = _in_range(p, index, [p.size(x.axes[axis])] * max(1, len(index.top)))
    return p.copy(node, [x, index], [axes], top=one_bound(x))


def _view(
    p: Padder, x: Padded, first: int, count: int, index: Sequence[Axis], columns: Sequence[Steps]
) -> Padded | None:
    """What an index of these axes looks up along `count` axes of the data, from `first` on, where its columns count all
    their positions in order: the data in another shape, repeated along the other axes of the index. None elsewhere."""
    if len(columns) != count:
        return None
    looked_up = x.axes[first : first + count]
    where: list[int] = []
    for steps, axis in zip(columns, looked_up, strict=True):
        found = covered(steps[: len(index)], index, axis)
        if found is None or (found and where and found[0] <= where[-1]):
            return None
        where += found
    before, behind = x.axes[:first], x.axes[first + count :]
    seen = [a if k in where else () for k, a in enumerate(index)]
    made = _reshaped(p, x, [*before, *seen, *behind])[0]
    assert made is not None
    return made if seen == list(index) else _expanded(p, made, [*before, *index, *behind])


def _known_index(p: Padder, index: Padded, size: Expr, count: int) -> Padded:
    """Indices that follow from sizes, as places: the last element is that of the valid size."""
    places = []
    for e in p.ints(index) or []:
        high = p.bounds(e)[1]
        if not p.at_least(e, 0):
            if high is None or high >= 0:
                raise p.refused(f"an index {e} that is negative for some sizes alone")
            e = e + size
        p.need(size - e, 1)
        p.need(e, 0)
        places.append(e)
    assert index.known is not None
    made = np.empty(len(places), object)
    made[:] = places
    placed = Padded(None, index.dtype, index.axes, made.reshape(index.known.shape))
    value = p.data(placed)
    if value.data is None:
        value = clamped(p, value, count) if placed.dtype == np.int64 else value
    return Padded(value, placed.dtype, placed.axes, top=(Expr.of(count),))


def _in_range(p: Padder, index: Padded, counts: Sequence[int]) -> Padded:
    """Indices that are in range in the padding too, where engines and the host look at them."""
    if not index.padded or index.clean:
        return index
    if index.top and all(t.evaluate(p.buckets) <= n for t, n in zip(index.top, counts, strict=True)):
        return index
    return p.masked(index, index.padded, 0)


def gather_elements(p: Padder, node: Node, given: Given) -> Given:
    x, index = given[0], given[1]
    assert x is not None
    assert index is not None
    axis = number(node, "axis", 0) % x.rank
    require_unpadded(p, x, [axis], "the axis that is indexed")
    for i, (a, b) in enumerate(zip(x.axes, index.axes, strict=True)):
        if i != axis and a != b and (is_padded(a) or is_padded(b)):
            raise p.refused("its inputs are of different sizes on other axes")
    index = _in_range(p, index, [p.size(x.axes[axis])] * max(1, len(index.top)))
    return p.copy(node, [x, index], [index.axes], top=one_bound(x))


def gather_nd(p: Padder, node: Node, given: Given) -> Given:
    x, index = given[0], given[1]
    assert x is not None
    assert index is not None
    batch = number(node, "batch_dims", 0)
    require_unpadded(p, index, [index.rank - 1], "the axis of coordinates")
    columns = p.size(index.axes[-1])
    if x.axes[:batch] != index.axes[:batch]:
        raise p.refused("its batch axes are of different sizes")
    seen = None if batch else _view(p, x, 0, columns, index.axes[:-1], columns_of(index))
    if seen is not None:
        return [seen]
    indexed = x.axes[batch : batch + columns]
    tops = index.top * columns if len(index.top) == 1 else index.top
    for k, a in enumerate(indexed):
        if is_padded(a):
            require_prefix(p, a)
            if not tops or not p.at_least(product(a) - tops[k], 0):
                raise p.refused("its indices may point behind the valid size")
    if index.top and len(index.top) != columns:
        index = Padded(index.value, index.dtype, index.axes, index.known, index.zeros, index.clean, tops)
    index = _in_range(p, index, [p.size(a) for a in indexed])
    return p.copy(node, [x, index], [[*index.axes[:-1], *x.axes[batch + columns :]]], top=one_bound(x))


def one_hot(p: Padder, node: Node, given: Given) -> Given:
    index = first_of(p, given)
    depth = p.numbers(given[1])
    require_unpadded(p, given[2], None, "the pair of values")
    assert depth is not None
    axis = number(node, "axis", -1) % (index.rank + 1)
    axes = [*index.axes[:axis], axis_of(depth), *index.axes[axis:]]
    if not index.clean:
        index = p.masked(index, index.padded, 0)
    return p.copy(node, [index, *given[1:]], [axes])


def trilu(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    if not all(is_prefix(a) for a in x.axes[-2:]):
        raise p.refused("padding lies between the valid elements of a merged axis")
    if at(given, 1) is not None:
        p.numbers(given[1])
    return p.copy(node, given, [x.axes], zeros=x.zeros, clean=x.clean)


def eye_like(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    if not all(is_prefix(a) for a in x.axes):
        raise p.refused("padding lies between the valid elements of a merged axis")
    return p.copy(node, given, [x.axes])


def pad(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    mode = text(node, "mode", "constant")
    amounts = [Expr.of(n) for n in numbers(node, "pads") or []] or p.ints(given[1]) or []
    where = p.numbers(at(given, 3))
    where = list(range(x.rank)) if where is None else [a % x.rank for a in where]
    before, behind = [Expr.of(0)] * x.rank, [Expr.of(0)] * x.rank
    for i, k in enumerate(where):
        before[k], behind[k] = amounts[i], amounts[len(where) + i]
    axes: list[Axis] = []
    for i, a in enumerate(x.axes):
        if before[i] == behind[i] == 0:
            axes.append(a)
            continue
        if before[i].constant is None:
            raise p.refused("how far its elements move depends on the size")
        if is_padded(a) or behind[i].constant is None:
            if mode != "constant":
                raise p.refused("a padded axis is continued by its own elements")
            p.need(before[i], 0)
            p.need(behind[i], 0)
        axes.append(p.checked_axis(axis_of([require_prefix(p, a) + before[i] + behind[i]])))
    over = [i for i in x.padded if behind[i] != 0]
    if over:
        value: Any = node.attributes.get("value", 0.0)
        source = at(given, 2)
        if source is not None:
            data = p.data(source).data
            if data is None:
                raise p.refused("it is filled with a value that is computed")
            value = data.reshape(-1)[0]
        x = p.masked(x, over, value)
    inputs = [x, *given[1:]]
    if any(n.constant is None for n in amounts):  # of the bucket's sizes
        numbers_there = p.vector(*(n.evaluate(p.buckets) for n in amounts))
        inputs[1] = Padded(numbers_there, np.dtype(np.int64), (axis_of([len(amounts)]),))
    return p.copy(node, inputs, [axes])


def depth_to_space(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    require_unpadded(p, x, [1], "the axis of channels")
    block = number(node, "blocksize", 1)
    channels = axis_of([product(x.axes[1]) // (block * block)])
    return p.copy(node, given, [[x.axes[0], channels, *(axis_of([*a, block]) for a in x.axes[2:])]])


def space_to_depth(p: Padder, node: Node, given: Given) -> Given:
    x = first_of(p, given)
    require_unpadded(p, x, [1, 2, 3], "an axis in blocks")
    return typed_like(p, node, given, x, 1)
