"""Where the elements of an index come from, and what their range is.

What makes a value (`origins_of`): a node, the counting of a Loop's turns, the wrapping of a negative index, or control
flow, which hands on other values. Through nodes that move elements or cast them, bounds are carried back
(`sources_of`), to those columns alone that become an index; of what is computed from integers the range is followed
(`range_of`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.op_traits import traits_of

FREE: Final = (int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max))
"""The bounds of a column that is no index."""
_HANDFUL: Final = 32  # elements, of which Python finds the least in a tenth of the time that NumPy takes
_MOST_COLUMNS: Final = 64  # that are held to bounds of their own
_CARRIED: Final = {"Where": (1, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2), "Scatter": (0, 2)}
"""Moving operators whose results have elements of other inputs than the first."""


class Bounds(Struct, frozen=True):
    """The range of an index, inclusive: of all elements, or of each column of the last axis. ignored: a value outside
    that is allowed."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    ignored: int | None = None

    def narrowed(self) -> Bounds:
        """One range, which lies in that of every column."""
        return Bounds((max(self.low),), (min(self.high),), self.ignored)

    def are_met(self, x: np.ndarray) -> bool:
        """Whether all elements lie in range; floats are cut to integers, as Cast does, and NaN is none."""
        if not x.size:
            return True
        if len(self.low) > 1 and FREE in (ranges := list(zip(self.low, self.high, strict=True))):
            kept = [i for i, r in enumerate(ranges) if r != FREE]
            low, high = (tuple(b[i] for i in kept) for b in (self.low, self.high))
            return Bounds(low, high).are_met(x[..., kept])
        if self.ignored is not None:
            x = x[x != self.ignored]
            return not x.size or replace(self, ignored=None).are_met(x)
        if x.dtype.kind not in "iub":
            x = np.trunc(x.astype(np.float64))
            if np.isnan(x).any():
                return False
        if len(self.low) == 1:
            if x.size <= _HANDFUL:
                few = x.ravel().tolist()
                return bool(min(few) >= self.low[0] and max(few) <= self.high[0])
            return bool(x.min() >= self.low[0] and x.max() <= self.high[0])
        return bool((x >= np.array(self.low)).all() and (x <= np.array(self.high)).all())


class Turn(Struct, frozen=True):
    """The origin of the number of a Loop's turn. limit: what it stays below, infinite where that is not known."""

    limit: float


class Wrapped(Struct, frozen=True):
    """The origin of an index that counts from the end where it is negative: `index`, or, below 0, `index + size`."""

    index: Value
    size: int


Origin = Node | Turn | Wrapped | tuple[Value, ...]
"""What makes a value: a node, the counting of turns, the wrapping of an index, or control flow, which hands on one of
several other values."""
Origins = dict[Value, Origin]


def origins_of(graph: Graph) -> Origins:
    """The origin of every value of a graph and its subgraphs that is no input of the graph and no constant."""
    found: Origins = {}
    for node in graph.nodes:
        found.update((v, node) for v in node.outputs if v is not None)
        for body in node.subgraphs:
            found.update(origins_of(body))
        _hand_on(node, found)
        if node.op_type in ("Add", "Where") and not node.domain and (wrapped := _wrapped(node, found)) is not None:
            found[wrapped[0]] = wrapped[1]
    return found


def _wrapped(node: Node, origins: Origins) -> tuple[Value, Wrapped] | None:
    """The result of a node and the index that it wraps, as Keras and JAX do for a lookup; None for other nodes.

    Where(x < 0, x + n, x), or, as exporters write it for integers, (x < 0) * (x + n) + not (x < 0) * x.
    """
    (result,) = node.outputs
    if result is None or result.dtype is None or result.dtype.kind not in "iu":
        return None

    def made_by(v: Value | None, op: str) -> tuple[Value | None, ...]:
        origin = None if v is None else origins.get(v)
        return origin.inputs if isinstance(origin, Node) and origin.op_type == op and not origin.domain else ()

    def uncast(v: Value | None) -> Value | None:
        return uncast(source[0]) if (source := made_by(v, "Cast")) else v

    if node.op_type == "Where":
        cases = [node.inputs]
    else:
        factors = [made_by(v, "Mul") for v in node.inputs]
        if not all(factors):
            return None
        cases = [
            (uncast(c), a, b)
            for first, second in (factors, factors[::-1])
            for c, a in (first, first[::-1])
            for no, b in (second, second[::-1])
            if (negated := made_by(uncast(no), "Not")) and negated[0] is uncast(c)
        ]
    for condition, below, x in cases:
        test, shifted = made_by(condition, "Less"), made_by(below, "Add")
        if x is None or not test or uncast(test[0]) is not uncast(x) or not _is_number(test[1], 0):
            continue
        sizes = [v for v in shifted if v is not x]
        size = sizes[0].data if len(sizes) == 1 and sizes[0] is not None else None
        if size is not None and size.size == 1 and int(size.reshape(-1)[0]) > 0:
            return result, Wrapped(x, int(size.reshape(-1)[0]))
    return None


def _is_number(v: Value | None, number: int) -> bool:
    return v is not None and v.data is not None and v.data.size == 1 and v.data.reshape(-1)[0] == number


def _hand_on(node: Node, found: Origins) -> None:
    """Note what control flow hands into its bodies and out of them, from turn to turn as well."""
    op, bodies = node.op_type, node.subgraphs
    if node.domain or op not in ("If", "Loop", "Scan") or (op == "Scan" and node.version < 9):
        return
    if op == "If":
        for i, v in enumerate(node.outputs):
            if v is not None:
                found[v] = tuple(g.outputs[i] for g in bodies)
        return
    (body,) = bodies
    scans: Any = node.attributes.get("num_scan_inputs", 0)
    first, head = (2, 1) if op == "Loop" else (0, 0)
    states = len(node.inputs) - first - scans
    if op == "Loop":
        limit = node.inputs[0]
        known = limit is not None and limit.data is not None and limit.data.size == 1
        found[body.inputs[0]] = Turn(float(limit.data.reshape(-1)[0]) if known else math.inf)  # type: ignore[union-attr]
        found[body.inputs[1]] = (body.outputs[0],)
    for i, v in enumerate(node.inputs[first:]):
        given = () if v is None else (v,)
        found[body.inputs[first + i]] = (*given, body.outputs[head + i]) if i < states else given
    for i, v in enumerate(node.outputs):
        if v is not None:
            start = node.inputs[first + i] if i < states else None
            found[v] = (body.outputs[head + i],) if start is None else (start, body.outputs[head + i])


def sources_of(origin: Origin | None, result: Value, wanted: Bounds) -> list[tuple[Value, Bounds]]:
    """The values whose elements come out as `result`, with their bounds; none where they are computed."""
    if isinstance(origin, Node):
        return _before(origin, result, wanted)
    if isinstance(origin, Wrapped):
        if len(wanted.low) > 1:
            wanted = wanted.narrowed()
        (low,), (high,) = wanted.low, wanted.high
        wraps = low <= 0 and high >= origin.size - 1
        return [(origin.index, replace(wanted, low=(low - origin.size if wraps else max(low, 0),)))]
    if not isinstance(origin, tuple):
        return []
    whole = all(v.shape is not None and result.shape is not None and v.shape[-1:] == result.shape[-1:] for v in origin)
    wanted = wanted if whole or len(wanted.low) == 1 else wanted.narrowed()
    return [(v, wanted) for v in origin]


_Range = tuple[float, float]
_MOST_STEPS: Final = 16  # of arithmetic on an index that are followed


def range_of(
    v: Value, origins: Origins, steps: int = _MOST_STEPS, found: dict[tuple[Value, int], _Range] | None = None
) -> _Range:
    """The range of the elements of integers, infinite where nothing is known. found: those that were computed."""
    found = {} if found is None else found
    if (v, steps) not in found:
        found[v, steps] = _range_of(v, origins, steps, found)
    return found[v, steps]


def _range_of(v: Value, origins: Origins, steps: int, found: dict[tuple[Value, int], _Range]) -> _Range:
    dtype = v.dtype
    if dtype is None or dtype.kind not in "iub":
        source = _whole_source(v, origins.get(v))
        low, high = -math.inf, math.inf
        if source is not None and steps:
            low, high = range_of(source, origins, steps - 1, found)
        most = 0 if dtype is None else _EXACT.get(dtype.name, 0)
        # other floats may be NaN, whose integer is anything
        return (low, high) if -most <= low and high <= most else (-math.inf, math.inf)
    if v.data is not None and v.data.size:
        return int(v.data.min()), int(v.data.max())
    limits: Any = np.iinfo(dtype) if dtype.kind != "b" else None
    whole = (0.0, 1.0) if limits is None else (float(limits.min), float(limits.max))
    origin = origins.get(v)
    if origin is None or not steps:
        return whole
    if isinstance(origin, Turn):
        return 0, min(max(origin.limit - 1, 0), whole[1])
    if isinstance(origin, Wrapped):
        low, high = range_of(origin.index, origins, steps - 1, found)
        if low < 0:
            low, high = min(low + origin.size, 0 if high >= 0 else math.inf), max(high, origin.size - 1)
        return (low, high) if whole[0] <= low and high <= whole[1] else whole
    sources = origin.inputs if isinstance(origin, Node) else origin
    given = [range_of(x, origins, steps - 1, found) for x in sources if x is not None]
    if isinstance(origin, Node) and (divisor := _remainder(origin, origins)) is not None:
        low, high = (0 if given[0][0] >= 0 else 1 - divisor), divisor - 1
    elif isinstance(origin, Node):
        low, high = _computed(origin, v, given)
    else:
        low, high = min((a for a, _ in given), default=whole[0]), max((b for _, b in given), default=whole[1])
    return (low, high) if whole[0] <= low and high <= whole[1] else whole  # beyond it wraps around


_EXACT: Final[Mapping[str, int]] = {"float16": 1 << 11, "bfloat16": 1 << 8, "float32": 1 << 24, "float64": 1 << 53}
"""Up to where floats hold every integer."""


def _whole_source(v: Value, origin: Origin | None) -> Value | None:
    """What a float is made of, where that is an integer."""
    source = origin.inputs[0] if isinstance(origin, Node) and traits_of(origin).cast and origin.inputs else None
    is_whole = source is not None and source.dtype is not None and source.dtype.kind in "iu"
    return source if is_whole and isinstance(origin, Node) and origin.op_type != "BitCast" else None


def _remainder(node: Node, origins: Origins) -> int | None:
    """The divisor of x - x / c * c, which is how exporters without Mod write a remainder; None for anything else."""
    x, product = node.inputs if len(node.inputs) == 2 and node.op_type == "Sub" and not node.domain else (None, None)
    times = None if product is None else origins.get(product)
    if not isinstance(times, Node) or times.op_type != "Mul" or times.domain:
        return None
    for quotient, c in (times.inputs, times.inputs[::-1]):
        divided = None if quotient is None else origins.get(quotient)
        if not isinstance(divided, Node) or divided.op_type != "Div" or divided.domain or divided.inputs[0] is not x:
            continue
        by = divided.inputs[1]
        if by is not None and c is not None and by.data is not None and c.data is not None:
            numbers = {*by.data.reshape(-1).tolist(), *c.data.reshape(-1).tolist()}
            if len(numbers) == 1 and (n := numbers.pop()) > 0:
                return int(n)
    return None


def _computed(node: Node, result: Value, given: Sequence[_Range]) -> _Range:
    """The range of a result of a node of integers."""
    op, unknown = node.op_type, (-math.inf, math.inf)
    if node.domain:
        return unknown
    if op in ("ArgMax", "ArgMin", "TopK"):
        x, axis = _dims(node, 0), node.attributes.get("axis", -1 if op == "TopK" else 0)
        is_index = op != "TopK" or result is node.outputs[1]
        return (0, x[axis] - 1) if is_index and isinstance(axis, int) and -len(x) <= axis < len(x) else unknown
    if op == "Mod" and len(given) == 2 and given[1][0] > 0 and not node.attributes.get("fmod", 0):
        return 0, given[1][1] - 1
    if op in ("Add", "Sub") and len(given) == 2:
        (a, b), (c, d) = given
        return (a + c, b + d) if op == "Add" else (a - d, b - c)
    if op == "Mul" and len(given) == 2:
        ends = [x * y for x in given[0] for y in given[1]]
        return min(ends), max(ends)
    if op == "CumSum":
        return _summed(node, given[0])
    if op in ("Max", "Min") and given:
        pick = max if op == "Max" else min
        return pick(low for low, _ in given), pick(high for _, high in given)
    if op == "Clip" and len(given) == 3:
        x_range, least, most = given
        return min(max(x_range[0], least[0]), most[0]), min(max(x_range[1], least[1]), most[1])
    if op == "Relu":
        return max(given[0][0], 0), max(given[0][1], 0)
    traits = traits_of(node)
    if traits.moves_elements or (traits.cast and op != "BitCast"):
        sources = [x for x, _ in _before(node, result, Bounds((0,), (0,)))]
        own = [r for x, r in zip([x for x in node.inputs if x is not None], given, strict=True) if x in sources]
        return (min(low for low, _ in own), max(high for _, high in own)) if own else unknown
    return unknown


def _summed(node: Node, each: _Range) -> _Range:
    """The range of a CumSum: of sums of all along its axis, and of fewer."""
    x, axis = _dims(node, 0), None if node.inputs[1] is None else node.inputs[1].data
    if not x or axis is None or axis.size != 1 or not -len(x) <= int(axis.reshape(-1)[0]) < len(x):
        return -math.inf, math.inf
    most = x[int(axis.reshape(-1)[0])]
    return min(0, most * each[0]), max(0, most * each[1])


def _before(node: Node, result: Value, wanted: Bounds) -> list[tuple[Value, Bounds]]:
    """The inputs whose elements come out as `result`, with their bounds; none where they are computed."""
    traits = traits_of(node)
    if traits.cast and node.op_type != "BitCast":
        source = node.inputs[0]
        limits: Any = np.iinfo(result.dtype) if result.dtype is not None and result.dtype.kind in "iu" else None
        if source is None:
            return []
        if limits is None:  # a float that is a whole number: where all are, the bounds hold for what it was made of
            most = _EXACT.get(result.dtype.name, 0) if result.dtype is not None else 0
            is_whole = _whole_source(result, node) is not None and max(map(abs, (*wanted.low, *wanted.high))) < most
            return [(source, wanted)] if is_whole else []
        low, high = (tuple(min(max(b, limits.min), limits.max) for b in ends) for ends in (wanted.low, wanted.high))
        return [(source, replace(wanted, low=low, high=high))]
    if node.op_type == "TopK" and result is node.outputs[0] and not node.domain:
        return [] if node.inputs[0] is None else [(node.inputs[0], wanted.narrowed())]
    if not traits.moves_elements:
        return []
    columns = None if wanted.ignored is not None else _columns(node, result)
    if columns is not None:
        return _of_columns(columns, wanted)
    positions = range(len(node.inputs)) if node.op_type == "Concat" else _CARRIED.get(node.op_type, (0,))
    sources = [v for i in positions if (v := node.inputs[i]) is not None]
    if len(wanted.low) > 1 and not all(_keeps_columns(node, v, result) for v in sources):
        wanted = wanted.narrowed()
    return [(v, wanted) for v in sources]


def _keeps_columns(node: Node, source: Value, result: Value) -> bool:
    if not source.shape or not result.shape or source.shape[-1] != result.shape[-1]:
        return False
    if node.op_type in ("Concat", "Gather", "Split"):
        axis = node.attributes.get("axis", 0)
        return isinstance(axis, int) and axis % len(source.shape) < len(source.shape) - 1
    return node.op_type in ("Identity", "Reshape", "Squeeze", "Unsqueeze")


def _columns(node: Node, result: Value) -> list[tuple[Value, int]] | None:
    """For each column of the last axis of a result the input, and the column of it, that it is; None for a node that
    does not take columns by number, and where sizes are unknown."""
    x, op = node.inputs[0], node.op_type
    if x is None or not x.shape or not result.shape or op not in ("Concat", "Gather", "Split"):
        return None
    axis, width = node.attributes.get("axis", 0), x.shape[-1]
    if not isinstance(axis, int) or axis % len(x.shape) != len(x.shape) - 1 or not isinstance(width, int):
        return None
    if not 0 < width <= _MOST_COLUMNS:
        return None
    if op == "Gather":
        index = node.inputs[1]
        if index is None or index.data is None or index.data.ndim != 1:
            return None
        return [(x, i % width) for i in index.data.tolist()]
    parts = node.inputs if op == "Concat" else node.outputs
    widths = [v.shape[-1] if v is not None and v.shape else None for v in parts]
    if any(not isinstance(w, int) or w > _MOST_COLUMNS for w in widths):
        return None
    if op == "Concat":
        return [(v, i) for v, w in zip(parts, widths, strict=True) if v is not None for i in range(w)]  # type: ignore[arg-type]
    at = next(k for k, v in enumerate(parts) if v is result)
    begin = sum(widths[:at])  # type: ignore[arg-type]
    return [(x, begin + i) for i in range(widths[at])]  # type: ignore[arg-type]


def _of_columns(columns: Sequence[tuple[Value, int]], wanted: Bounds) -> list[tuple[Value, Bounds]]:
    """The bounds of inputs some of whose columns are those of a result; those of others are free."""
    each = list(zip(wanted.low, wanted.high, strict=True))
    each = each * len(columns) if len(each) == 1 else each
    found: dict[Value, list[tuple[int, int]]] = {}
    for (v, column), (low, high) in zip(columns, each, strict=True):
        assert v.shape is not None
        of = found.setdefault(v, [FREE] * int(v.shape[-1]))  # type: ignore[arg-type]
        of[column] = (max(low, of[column][0]), min(high, of[column][1]))
    made = []
    for v, of in found.items():
        ranges = of if len(set(of)) > 1 else of[:1]
        if ranges != [FREE]:
            made.append((v, Bounds(tuple(low for low, _ in ranges), tuple(high for _, high in ranges))))
    return made


def _dims(node: Node, index: int) -> tuple[int, ...]:
    """The static shape of an input; () where it has none."""
    v = node.inputs[index] if index < len(node.inputs) else None
    if v is None or not v.is_static or v.shape is None:
        return ()
    return tuple(d for d in v.shape if isinstance(d, int))
