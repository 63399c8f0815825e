"""Checks of a cluster's inputs in front of its engine: indices in range, positive scales, finite floats where needed.

Libraries do what they like with an index out of range: they clamp it, drop it, read foreign memory or end the process.
The host raises an error. So each call whose indices leave their range is for the host, and no failure of the engine.
The same goes for NaN and infinity, where an engine is known to be right for finite inputs only, and for scales that are
no positive numbers: what is divided by zero becomes any integer, and libraries fold a scale into products and bounds.

Bounds are those of the index inputs of the Function's nodes, carried back to its parameters (`index_origins`), to those
columns alone that become an index (the first one of regions, say). Where a path mixes columns of different bounds, the
narrowest holds: a call too many for the host is right, one too few is not. A node
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
from xrt_core.ir.graph import Graph, Node, Value, every_node, in_open_region, nodes_within
from xrt_core.ir.op_traits import index_input, indexed_axes, limits_of, measured_axis, scale_inputs, traits_of
from xrt_core.ir.symbols import Declared, shape_for, size_of
from xrt_core.ir.types import Dim
from xrt_core.runtime.arrays import to_numpy
from xrt_core.runtime.index_origins import FREE, Bounds, Origins, origins_of, range_of, sources_of

_FEW: Final = 1 << 16  # elements
_MOST_SIZES: Final = 4096  # of which the checks are kept


Within = Collection[tuple["Value | None", tuple[Dim, ...]]]
"""Indices, each with what limits it (`op_traits.limits_of`): what is known to hold of all its elements."""
SizeOf = Callable[[Value, int], "int | None"]
"""The size of a value along an axis; None where there is none to tell."""


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

    __slots__ = ("_declared", "_function", "_is_open", "_known", "_origins", "fixed")

    def __init__(self, function: Function, fixed: InputChecks) -> None:
        self.fixed = fixed
        self._function = function
        self._declared = Declared(tuple(p.name for p in function.params), tuple(p.dims for p in function.params), {})
        self._origins = origins_of(function.body)
        # there the engine checks what no input tells the limit of
        self._is_open = in_open_region(function.body)
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
            if found is None and (found := size_of(dim, sizes)) is None and not self._is_open:
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
    origins = origins_of(body)
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
    origins = origins_of(function.body) if origins is None else origins
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
                work.extend(sources_of(origins.get(v), v, wanted))
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
            work.extend(x for x, _ in sources_of(origins[v], v, Bounds((0,), (0,))))
    return False


def scale_checks(function: Function) -> tuple[tuple[int, ...], bool]:
    """The parameters whose elements are scales of quantisations, and whether a constant scale of the Function is not
    positive. Scales that the Function computes are its own, and verified with it."""
    origins = origins_of(function.body)
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
            work.extend(x for x, _ in sources_of(origin, v, Bounds((0,), (0,))))
    return tuple(sorted(found)), senseless


def unproven_indices(graph: Graph, within: Within = ()) -> frozenset[Node]:
    """The nodes of a graph whose index is computed from other data, and may leave its range for all that is known.

    What comes from the graph's inputs and constants alone is not among them: `index_checks` has it. within: indices
    that are known to lie within dimensions.
    """
    origins = origins_of(graph)
    return frozenset(n for n in graph.nodes if any(not _is_proven(m, origins, within) for m in (n, *nodes_within(n))))


def raises_for_indices(node: Node, operators: Collection[str]) -> bool:
    """Whether only these operators of ONNX, which raise for an index out of range, read one in a node and its
    bodies."""
    reads = (n for n in (node, *nodes_within(node)) if index_input(n) is not None)
    return all(not n.domain and n.op_type in operators for n in reads)


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
        sources = sources_of(origin, v, wanted)
        work += sources
        low, high = (0.0, 0.0) if sources else range_of(v, origins)
        if not sources and (low < max(wanted.low) or high > min(wanted.high)):
            return False
    return True


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
    ranges = [FREE if d is None else (-d, d - 1) for d in sizes]
    if all(r == FREE for r in ranges):
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
