"""Checks of a cluster's inputs in front of its engine: indices in range, positive scales, finite floats where needed.

Libraries do what they like with an index out of range: they clamp it, drop it, read foreign memory or end the process.
The host raises an error. So each call whose indices leave their range is for the host, and no failure of the engine.
The same goes for NaN and infinity, where an engine is known to be right for finite inputs only, and for scales that are
no positive numbers: what is divided by zero becomes any integer, and libraries fold a scale into products and bounds.

Bounds are those of the index inputs of the Function's nodes, carried back to its parameters through nodes that move
elements or cast them, to those columns alone that become an index (the first one of regions, say). Where a path mixes
columns of different bounds, the narrowest holds: a call too many for the host is right, one too few is not. A node
whose index is computed from other data is not offered to engines in inference, unless the range of what computes it
lies within the bounds (`unproven_indices`). Where the size that limits an index differs between calls, the bounds are
those of the sizes of each call (`SymbolicInputChecks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrt_core.errors import InputError
from xrt_core.ir.attribute_limits import node_fault
from xrt_core.ir.function import Function
from xrt_core.ir.graph import Graph, Node, Value, every_node, nodes_within
from xrt_core.ir.op_traits import index_input, indexed_axes, limits_of, measured_axis, scale_inputs, traits_of
from xrt_core.ir.symbols import Declared, shape_for, size_of
from xrt_core.ir.types import Dim
from xrt_core.runtime.arrays import to_numpy

_FEW: Final = 1 << 16  # elements
_HANDFUL: Final = 32  # elements, of which Python finds the least in a tenth of the time that NumPy takes
_FREE: Final = (int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max))
"""The bounds of a column that is no index."""
_MOST_SIZES: Final = 4096  # of which the checks are kept
_MOST_COLUMNS: Final = 64  # that are held to bounds of their own
_CARRIED: Final = {"Where": (1, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2), "Scatter": (0, 2)}
"""Moving operators whose results have elements of other inputs than the first."""


Within = Collection[tuple["Value | None", tuple[Dim, ...]]]
"""Indices, each with what limits it (`op_traits.limits_of`): what is known to hold of all its elements."""
SizeOf = Callable[[Value, int], "int | None"]
"""The size of a value along an axis; None where there is none to tell."""


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
        if len(self.low) > 1 and _FREE in (ranges := list(zip(self.low, self.high, strict=True))):
            kept = [i for i, r in enumerate(ranges) if r != _FREE]
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


class IndexCheck(Struct, frozen=True):
    """The elements of parameter number `parameter` are indices within `bounds`."""

    parameter: int
    bounds: Bounds


class InputChecks(Struct, frozen=True):
    """What is checked at each call of a cluster.

    indices: of parameters. never: a constant index of the cluster is out of range, or a constant scale not positive, so
    that every call is for the host. finite: parameters that must be finite. positive: those that must be finite and
    above zero. checked: parameters whose indices the caller has checked where they are a
    NumPy array.
    """

    indices: tuple[IndexCheck, ...] = ()
    never: bool = False
    finite: tuple[int, ...] = ()
    positive: tuple[int, ...] = ()
    checked: frozenset[int] = frozenset()

    def violates(self, arrays: Sequence[Any]) -> bool:
        """Whether the arrays of a call must not go to the engine. Takes microseconds for a few thousand indices."""
        if self.never:
            return True
        for check in self.indices:
            a = arrays[check.parameter]
            if check.parameter in self.checked and type(a) is np.ndarray:
                continue
            if not check.bounds.are_met(to_numpy(a)):
                return True
        for i in self.positive:
            if not is_positive(to_numpy(arrays[i])):
                return True
        for i in self.finite:
            a = arrays[i]
            if not is_finite(a if type(a) is np.ndarray else to_numpy(a)):
                return True
        return False


class SymbolicInputChecks:
    """What is checked at each call of a cluster whose indices have limits that differ between calls: `InputChecks` for
    the sizes of each, which are kept. fixed: what is checked whatever the sizes are."""

    __slots__ = ("_declared", "_function", "_known", "_origins", "fixed")

    def __init__(self, function: Function, fixed: InputChecks) -> None:
        self.fixed = fixed
        self._function = function
        self._declared = Declared(tuple(p.name for p in function.params), tuple(p.dims for p in function.params), {})
        self._origins = _origins(function.body)
        self._known: dict[tuple[Any, ...], InputChecks] = {}

    def violates(self, arrays: Sequence[Any]) -> bool:
        """As that of `InputChecks`. Takes half a microsecond more; for new sizes all nodes are looked at."""
        key = tuple([a.shape for a in arrays])
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_SIZES:
                self._known.clear()
            found = self._known[key] = self._at(key)
        return found.violates(arrays)

    def unbound(self, shapes: Sequence[Sequence[int]]) -> Node | None:
        """A node whose index has a limit that the shapes of the cluster's inputs, which are like these, do not tell;
        None for none."""
        try:
            self._indices(shapes)
        except _UnboundError as e:
            return e.node
        except InputError:  # of shapes that are not known themselves
            return None
        return None

    def _at(self, shapes: Sequence[Sequence[int]]) -> InputChecks:
        try:
            indices, never = self._indices(shapes)
        except (_UnboundError, InputError):  # sizes that the cluster does not take: the host says what is wrong
            indices, never = (), True
        return replace(self.fixed, indices=indices, never=never or self.fixed.never)

    def _indices(self, shapes: Sequence[Sequence[int]]) -> tuple[tuple[IndexCheck, ...], bool]:
        sizes = self._declared.bind(shapes)
        params = zip(self._function.params, shapes, strict=True)
        given = {d: n for p, shape in params for d, n in zip(p.dims, shape, strict=True)}

        def size(v: Value, axis: int) -> int | None:
            dim = None if v.shape is None else v.shape[axis]
            if not isinstance(dim, str):
                return dim
            found = given.get(dim)
            if found is None and (found := size_of(dim, sizes)) is None:
                raise _UnboundError
            return found

        return index_checks(self._function, size, self._origins)


class _UnboundError(Exception):
    """The size of a symbolic dimension is not known. node: whose index it limits."""

    node: Node | None = None


def input_checks(function: Function, *, finite: bool = False) -> InputChecks | SymbolicInputChecks | None:
    """The checks of a Function's inputs; None where there is nothing to check.

    finite: whether floating parameters must be finite (the verdict says that the engine is right for those only).
    """
    varies = function.is_symbolic and _has_varying_limit(function.body)
    indices, never = ((), False) if varies else index_checks(function)
    scales, senseless = scale_checks(function)
    floats = tuple(i for i, p in enumerate(function.params) if finite and _is_float(p.dtype) and i not in scales)
    if not (varies or indices or scales or floats or never or senseless):
        return None
    found = InputChecks(indices, never or senseless, floats, scales)
    return SymbolicInputChecks(function, found) if varies else found


def _has_varying_limit(body: Graph) -> bool:
    origins = _origins(body)
    reads = [n for n in every_node(body) if has_symbolic_index(n)]
    return any(_is_given(n.inputs[index_input(n)], origins) for n in reads)  # type: ignore[index, arg-type]


def unbound_index(functions: Iterable[Function], sizes: Mapping[str, int]) -> Node | None:
    """A node of these Functions whose index no launch can check: the shapes of the Function's inputs do not tell its
    limit, for these sizes of symbols as for others. None for none."""
    for f in functions:
        checks = input_checks(f)
        if isinstance(checks, SymbolicInputChecks):
            shapes = [[n for n in shape_for(p.dims, sizes) if n is not None] for p in f.params]
            if (found := checks.unbound(shapes)) is not None:
                return found
    return None


def index_checks(
    function: Function, size: SizeOf | None = None, origins: Origins | None = None
) -> tuple[tuple[IndexCheck, ...], bool]:
    """The range of each parameter that is an index, and whether a constant index of the Function is out of range.

    size: as for `index_bounds`. origins: those of the Function's body, if the caller has them.
    """
    origins = _origins(function.body) if origins is None else origins
    params = {v: i for i, v in enumerate(function.body.inputs)}
    found: dict[IndexCheck, None] = {}
    never = False
    for node in every_node(function.body):
        position = index_input(node)
        value = node.inputs[position] if position is not None and position < len(node.inputs) else None
        if value is None or (size is not None and not _is_given(value, origins)):
            continue
        try:
            bounds = index_bounds(node, size)
        except _UnboundError as e:
            e.node = node
            raise
        if bounds is None:
            continue
        work = [(value, bounds)]
        seen: set[tuple[Value, Bounds]] = set()
        while work:
            v, wanted = work.pop()
            if (v, wanted) in seen:
                continue
            seen.add((v, wanted))
            if v.data is not None:
                never |= not wanted.are_met(v.data)
            elif v in params:
                found[IndexCheck(params[v], wanted)] = None
            else:
                work.extend(_sources(origins.get(v), v, wanted))
    return tuple(found), never


def _is_given(value: Value, origins: Origins) -> bool:
    """Whether elements of a value are those of an input, or of a constant."""
    work, seen = [value], set[Value]()
    while work:
        v = work.pop()
        if v not in origins:
            return True
        if v not in seen:
            seen.add(v)
            work.extend(x for x, _ in _sources(origins[v], v, Bounds((0,), (0,))))
    return False


def scale_checks(function: Function) -> tuple[tuple[int, ...], bool]:
    """The parameters whose elements are scales of quantisations, and whether a constant scale of the Function is not
    positive. Scales that the Function computes are its own, and verified with it."""
    origins = _origins(function.body)
    params = {v: i for i, v in enumerate(function.body.inputs)}
    work = [v for n in every_node(function.body) for i in scale_inputs(n) if (v := n.inputs[i]) is not None]
    found: set[int] = set()
    seen: set[Value] = set()
    senseless = False
    while work:
        v = work.pop()
        if v in seen:
            continue
        seen.add(v)
        origin = origins.get(v)
        if v.data is not None:
            senseless |= not is_positive(v.data)
        elif v in params:
            found.add(params[v])
        elif isinstance(origin, Node) and traits_of(origin).cast and origin.op_type != "BitCast":
            work.extend(x for x in origin.inputs[:1] if x is not None and x.dtype is not None and _is_float(x.dtype))
        elif origin is not None:
            work.extend(x for x, _ in _sources(origin, v, Bounds((0,), (0,))))
    return tuple(sorted(found)), senseless


def unproven_indices(graph: Graph, within: Within = ()) -> frozenset[Node]:
    """The nodes of a graph whose index is computed from other data, and may leave its range for all that is known.

    What comes from the graph's inputs and constants alone is not among them: `index_checks` has it. within: indices
    that are known to lie within dimensions.
    """
    origins = _origins(graph)
    return frozenset(n for n in graph.nodes if any(not _is_proven(m, origins, within) for m in (n, *nodes_within(n))))


def _is_proven(node: Node, origins: Origins, within: Within) -> bool:
    position = index_input(node)
    value = node.inputs[position] if position is not None and position < len(node.inputs) else None
    bounds = None if value is None else index_bounds(node, _least_size)
    if value is None or bounds is None or is_within(node, within):
        return True
    work, seen = [(value, bounds)], set()
    while work:
        v, wanted = work.pop()
        origin = None if v.data is not None or (v, wanted) in seen else origins.get(v)
        seen.add((v, wanted))
        if origin is None:
            continue
        sources = _sources(origin, v, wanted)
        work += sources
        low, high = (0.0, 0.0) if sources else _range(v, origins)
        if not sources and (low < max(wanted.low) or high > min(wanted.high)):
            return False
    return True


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


def _origins(graph: Graph) -> Origins:
    """The origin of every value of a graph and its subgraphs that is no input of the graph and no constant."""
    found: Origins = {}
    for node in graph.nodes:
        found.update((v, node) for v in node.outputs if v is not None)
        for body in node.subgraphs:
            found.update(_origins(body))
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


def _sources(origin: Origin | None, result: Value, wanted: Bounds) -> list[tuple[Value, Bounds]]:
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


def _range(
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
        low, high = (-math.inf, math.inf) if source is None or not steps else _range(source, origins, steps - 1, found)
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
        low, high = _range(origin.index, origins, steps - 1, found)
        if low < 0:
            low, high = min(low + origin.size, 0 if high >= 0 else math.inf), max(high, origin.size - 1)
        return (low, high) if whole[0] <= low and high <= whole[1] else whole
    sources = origin.inputs if isinstance(origin, Node) else origin
    given = [_range(x, origins, steps - 1, found) for x in sources if x is not None]
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
        of = found.setdefault(v, [_FREE] * int(v.shape[-1]))  # type: ignore[arg-type]
        of[column] = (max(low, of[column][0]), min(high, of[column][1]))
    made = []
    for v, of in found.items():
        ranges = of if len(set(of)) > 1 else of[:1]
        if ranges != [_FREE]:
            made.append((v, Bounds(tuple(low for low, _ in ranges), tuple(high for _, high in ranges))))
    return made


def index_bounds(node: Node, size: SizeOf | None = None) -> Bounds | None:
    """The range of the node's index input; None where sizes are unknown, there is no limit, or the node is at fault.

    size: tells sizes; by default those of static dimensions.
    """
    if node_fault(node) is not None:
        return None
    size = size or _static_size
    axes = indexed_axes(node)
    if axes is not None:
        return _along(node, axes, size)
    op, x = node.op_type, node.inputs[0]
    if x is None or not x.shape:
        return None
    if op == "RoiAlign":
        images = size(x, 0)
        return None if images is None else Bounds((0,), (images - 1,))
    if op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        classes, ignored = size(x, 1) if len(x.shape) > 1 else None, node.attributes.get("ignore_index")
        if classes is None:
            return None
        return Bounds((0,), (classes - 1,), ignored if isinstance(ignored, int) else None)
    high = _highest(node, x, size)
    return None if high is None else Bounds((0,), (high,))


def _static_size(v: Value, axis: int) -> int | None:
    d = None if v.shape is None else v.shape[axis]
    return d if isinstance(d, int) else None


def _least_size(v: Value, axis: int) -> int | None:
    """All that is known of a symbolic dimension is that it is 1 at least."""
    d = None if v.shape is None else v.shape[axis]
    return 1 if isinstance(d, str) else d


def _highest(node: Node, x: Value, size: SizeOf) -> int | None:
    """The largest allowed index, or length, of an operator whose least is 0."""
    op, rank = node.op_type, len(x.shape or ())
    other = node.inputs[1] if len(node.inputs) > 1 else None
    others = len(other.shape or ()) if other is not None else 0
    if (time := measured_axis(node)) is not None:
        return size(x, time)
    if op == "ArrayFeatureExtractor":
        return _less(size(x, -1), 1)
    if op == "RotaryEmbedding":
        return _less(size(other, 0), 1) if other is not None and others else None
    if op == "Attention":
        return size(other, -2) if other is not None and others > 2 else None
    if op == "TensorScatter":
        axis = node.attributes.get("axis", -2)
        assert isinstance(axis, int)
        if node.attributes.get("mode", "linear") == "circular":
            return int(np.iinfo(np.int64).max)
        if other is None or others != rank:
            return None
        if size is _least_size and isinstance(other.shape[axis], str):  # type: ignore[index]
            return -1  # the cache may be as long as what is written: nothing is known to fit
        return _less(size(x, axis), size(other, axis))
    if op == "MaxUnpool":
        if size is _least_size and not x.is_static:
            return -1
        dims = [size(x, a) for a in range(rank)]
        return None if None in dims else _unpooled(node, dims) - 1  # type: ignore[arg-type]
    return None


def _less(size: int | None, by: int | None) -> int | None:
    return None if size is None or by is None else size - by


def _along(node: Node, axes: Sequence[int], size: SizeOf) -> Bounds | None:
    """The range of indices along axes, one or each column's."""
    x = node.inputs[0]
    assert x is not None
    sizes = [size(x, a) for a in axes]
    ranges = [_FREE if d is None else (-d, d - 1) for d in sizes]
    if all(r == _FREE for r in ranges):
        return None
    return Bounds(tuple(low for low, _ in ranges), tuple(high for _, high in ranges))


def is_within(node: Node, within: Within) -> bool:
    """Whether the node's index is among those that are known to lie within their dimensions."""
    key = limits_of(node) if within else None
    return key is not None and key in within


def has_symbolic_index(node: Node) -> bool:
    """Whether the limit of the node's indices differs between calls, and they are not constants that are in range for
    all sizes from 1 on."""
    at, x = index_input(node), node.inputs[0] if node.inputs else None
    index = node.inputs[at] if at is not None and at < len(node.inputs) else None
    if x is None or index is None:  # lengths may be left out
        return False
    is_symbolic = False

    def size(v: Value, axis: int) -> int | None:
        nonlocal is_symbolic
        is_symbolic |= isinstance(v.shape[axis], str) if v.shape else False
        return _least_size(v, axis)

    bounds = index_bounds(node, size)
    if bounds is not None and index.data is not None and bounds.are_met(index.data):
        return False
    return is_symbolic or (bounds is None and any(isinstance(d, str) for d in x.shape or ()))


def is_unlimited(node: Node) -> bool:
    """Whether the limit of the node's indices differs between calls, and there is no telling it from sizes."""
    return has_symbolic_index(node) and index_bounds(node, _least_size) is None


def _unpooled(node: Node, x: Sequence[int]) -> int:
    """Elements of the array whose pooling MaxUnpool undoes."""
    rank = len(x) - 2
    kernel: Any = node.attributes["kernel_shape"]
    strides: Any = node.attributes.get("strides") or (1,) * rank
    pads: Any = node.attributes.get("pads") or (0,) * (2 * rank)
    spatial: list[int] = [(x[2 + i] - 1) * strides[i] - pads[i] - pads[rank + i] + kernel[i] for i in range(rank)]
    return math.prod(x[:2]) * math.prod(spatial)


def _dims(node: Node, index: int) -> tuple[int, ...]:
    """The static shape of an input; () where it has none."""
    v = node.inputs[index] if index < len(node.inputs) else None
    if v is None or not v.is_static or v.shape is None:
        return ()
    return tuple(d for d in v.shape if isinstance(d, int))


def is_finite(x: np.ndarray) -> bool:
    """Whether no element is NaN or infinite."""
    finite = np.isfinite(x)
    if x.size <= _FEW:  # a third of the time: NumPy's reductions take two microseconds for a single element
        return 0 not in finite.tobytes()
    return bool(np.logical_and.reduce(finite, axis=None))


def is_positive(x: np.ndarray) -> bool:
    """Whether every element is finite and above zero."""
    if x.size == 1:
        return 0.0 < float(x.reshape(-1)[0]) < math.inf
    with np.errstate(invalid="ignore"):
        return bool(((x > 0) & np.isfinite(x)).all())


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))  # narrow floats have the kind of raw bytes
