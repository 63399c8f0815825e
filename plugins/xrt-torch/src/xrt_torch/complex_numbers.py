"""Complex numbers: a graph that computes with them, as one that computes with their real and imaginary parts.

ONNX has no complex tensors. Each one becomes two tensors of real numbers; Fourier transforms become the operator
`xrt.dft`, which is ONNX's DFT. Where an input is complex torch takes it apart, and where a result is, torch puts it
together: those nodes have `meta["at_border"]`. So does an operator without a rule here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map, tree_map_only

from xrt_torch.calls import hint
from xrt_torch.decompositions import table

aten = torch.ops.aten
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


@torch.library.custom_op("xrt::dft", mutates_args=())
def dft(x: Tensor, dim: int, inverse: bool) -> Tensor:
    """The discrete Fourier transform along a dimension, that of ONNX's DFT; the inverse one divides by the length.

    x: floats [..., 2], real and imaginary parts. Returns the same shape.
    """
    made = torch.view_as_complex(x.contiguous())
    made = torch.fft.ifft(made, dim=dim) if inverse else torch.fft.fft(made, dim=dim)
    return torch.view_as_real(made).contiguous()


@dft.register_fake
def _(x: Tensor, dim: int, inverse: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A complex tensor: its parts, real tensors of one shape and dtype."""

    re: Tensor
    im: Tensor


def has_complex(graph: Graph) -> bool:
    """Whether a node of the graph has a complex result."""
    return any(_is_complex(n.meta.get("val")) for n in graph.nodes)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Without torch's reports of guards that are refused."""
    loggers = [logging.getLogger(f"torch.{n}") for n in ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")]
    before = [log.level for log in loggers]
    for log in loggers:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(loggers, before, strict=True):
            log.setLevel(level)


def _is_complex(value: Any) -> bool:
    return any(isinstance(v, Tensor) and v.dtype.is_complex for v in tree_leaves(value))


def in_real_numbers(graph: Graph) -> Graph:
    """The same graph in real numbers; inputs and results are those of the graph, of the same names and order.

    Nodes that compute with real numbers alone are copied. Where sizes vary and what is computed in real numbers would
    hold for some of them alone, it is the graph that was given.
    """
    modes = {v.fake_mode for n in graph.nodes for v in tree_leaves(n.meta.get("val")) if isinstance(v, FakeTensor)}
    if len(modes) != 1:
        return graph
    mode = modes.pop()
    if mode.shape_env is None or not any(isinstance(n.meta.get("val"), torch.SymInt) for n in graph.nodes):
        return _Lowering(graph, mode).run()
    without_guards = getattr(mode.shape_env, "error_on_new_guards", None)
    if without_guards is None:  # before torch 2.13
        return graph
    with compile_lock, _unlogged():  # while another graph is captured its guards are made
        try:
            with without_guards():
                return _Lowering(graph, mode).run()
        except (LookupError, RuntimeError):  # the guard's error is one
            return graph


class _Recorder(TorchDispatchMode):
    """Adds what is computed with the tensors of nodes to a graph, taken apart as `decompositions.table` says."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.at_border = False
        self._nodes: dict[int, tuple[Node, Any]] = {}  # with the tensor, so that no other gets its id
        self._sizes: dict[Any, Node] = {}  # of symbolic sizes, by their expressions

    def note(self, value: Any, node: Node) -> None:
        if isinstance(value, torch.SymInt):
            self._sizes.setdefault(value.node.expr, node)
        else:
            self._nodes[id(value)] = node, value

    def _size(self, value: torch.SymInt) -> Node:
        found = self._sizes.get(value.node.expr)
        if found is None:
            places = ((n, t, axis) for n, t in self._nodes.values() for axis in range(t.dim()))
            place = next(((n, a) for n, t, a in places if _expression(t.shape[a]) == value.node.expr), None)
            if place is None:
                raise LookupError("a size that no tensor of the graph has")
            found = self._sizes[value.node.expr] = self.graph.call_function(aten.sym_size.int, place)
            found.meta["val"] = value
        return found

    def node_of(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if not isinstance(value, Tensor):
            return value
        known = self._nodes.get(id(value))
        if known is None:
            raise LookupError("a tensor that no node of the graph computes")
        return known[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.at_border and (decomposition := table().get(func)) is not None:
            with self:
                made = decomposition(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if not self.at_border and func.namespace == "aten":
            with self:
                made = func.decompose(*args, **kwargs)  # of operators that are compositions for torch itself
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        if any(isinstance(m, Tensor) for m in tree_leaves(made)):  # not of sizes and devices
            self.record(func, args, kwargs, made)
        return made

    def record(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Add a node whose results these are."""
        node = self.graph.call_function(func, *tree_map(self.node_of, (args, kwargs)))
        node.meta["val"] = made
        if self.at_border:
            node.meta["at_border"] = True
        if isinstance(made, tuple | list):
            for i, m in enumerate(made):
                part = self.graph.call_function(operator.getitem, (node, i))
                part.meta = {"val": m, **({"at_border": True} if self.at_border else {})}
                self.note(m, part)
        else:
            self.note(made, node)


class _Lowering:
    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self._graph, self._mode = graph, mode
        self._made = Graph()
        self._recorder = _Recorder(self._made)
        self._nodes: dict[Node, Node] = {}  # of those that were copied
        self._values: dict[Node, Any] = {}  # of the others
        self._given: dict[Node, Any] = {}  # what rules see of nodes that were copied
        self._apart: dict[Node, _Pair] = {}

    def run(self) -> Graph:
        for node in self._graph.nodes:
            if node.op == "output":
                self._made.output(tuple(self._result(r) for r in node.args[0]))
            elif self._is_real(node):
                copied = self._made.node_copy(node, self._node)
                copied.meta = dict(node.meta)
                self._nodes[node] = copied
                if isinstance(value := node.meta.get("val"), torch.SymInt | Tensor):
                    self._recorder.note(value, copied)
            else:
                self._values[node] = self._computed(node)
        return self._made

    def _is_real(self, node: Node) -> bool:
        if node.op != "call_function":
            return True
        return not _is_complex([n.meta.get("val") for n in (node, *node.all_input_nodes)])

    def _node(self, node: Node) -> Node:
        made: Node = self._nodes[node] if node in self._nodes else self._recorder.node_of(self._values[node])
        return made

    @contextlib.contextmanager
    def _computing(self, at_border: bool = False) -> Any:
        before = self._recorder.at_border
        self._recorder.at_border = at_border
        try:
            with torch.no_grad(), self._mode, self._recorder:
                yield
        finally:
            self._recorder.at_border = before

    def _value(self, node: Node) -> Any:
        """The tensor of a node, or a pair."""
        if node in self._values:
            value = self._values[node]
        else:
            if node not in self._given:
                self._given[node] = tree_map_only(Tensor, self._with_own_memory, node.meta["val"])
            value = self._given[node]
            for v in tree_leaves(value):
                if isinstance(v, Tensor):
                    self._recorder.note(v, self._nodes[node])
        if not isinstance(value, Tensor) or not value.dtype.is_complex:
            return value
        if node not in self._apart:
            resolved = self._made.call_function(aten.resolve_conj.default, (self._recorder.node_of(value),))
            with self._mode:  # not recorded as it runs: for a conjugate it would be another operator
                value = aten.resolve_conj.default(value)
            resolved.meta = {"val": value, "at_border": True}
            self._recorder.note(value, resolved)
            with self._computing(at_border=True):
                real = aten.view_as_real.default(value)
            with self._computing():
                self._apart[node] = _Pair(*(aten.select.int(real, real.dim() - 1, i) for i in range(2)))
        return self._apart[node]

    def _with_own_memory(self, x: Tensor) -> Tensor:
        """x, of another's memory no part, where sizes vary: whether a part is within the whole would be a guard. A
        complex constant as a fake tensor, which is taken apart as one."""
        if x.dtype.is_complex:
            return x if isinstance(x, FakeTensor) else self._mode.from_tensor(x)
        if all(isinstance(n, int) for n in (*x.shape, *x.stride())):
            return x
        with self._mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def _computed(self, node: Node) -> Any:
        args = tree_map_only(Node, self._value, node.args)
        kwargs = tree_map_only(Node, self._value, node.kwargs)
        rule = _RULES.get(getattr(node.target, "overloadpacket", None))
        if rule is not None:
            with self._computing():
                made = rule(node, *args, **kwargs)
            if made is not NotImplemented:
                return made
        args, kwargs = tree_map_only(Node, self._whole, (node.args, node.kwargs))
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        made = node.meta["val"]  # torch's functions of fake tensors might ask for sizes that vary
        with self._computing(at_border=True):
            self._recorder.record(node.target, args, kwargs, made)
        return made

    def _whole(self, node: Node) -> Any:
        """The tensor of a node, complex where it is."""
        value = self._value(node)
        if not isinstance(value, _Pair):
            return value
        known = self._values.get(node, node.meta["val"])
        return self._together(value, node.meta["val"]) if isinstance(known, _Pair) else known

    def _together(self, pair: _Pair, made: Tensor) -> Tensor:
        """A complex tensor, which this one is."""
        with self._computing():
            parts = _in_order_of(made, _side_by_side(pair))
        with self._computing(at_border=True):
            self._recorder.record(aten.view_as_complex.default, (parts,), {}, made)
        return made

    def _result(self, node: Any) -> Any:
        if not isinstance(node, Node):
            return node
        value = self._values.get(node)
        if not isinstance(value, _Pair):
            return self._node(node)
        return self._recorder.node_of(self._together(value, node.meta["val"]))


def _expression(n: int | torch.SymInt) -> Any:
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _in_order_of(like: Tensor, x: Tensor) -> Tensor:
    """x [..., 2] with its dimensions in memory in the order of those of another tensor [...]."""
    order = [*sorted(range(like.dim()), key=lambda d: -hint(like.stride(d))), like.dim()]
    if order == list(range(x.dim())):
        return x
    back = [order.index(d) for d in range(x.dim())]
    return aten.permute.default(
        aten.clone.default(aten.permute.default(x, order), memory_format=torch.contiguous_format), back
    )


def _parts(x: Any) -> tuple[Any, Any]:
    """The parts of a pair, a real tensor or a number; None for an imaginary part of zero."""
    if isinstance(x, _Pair):
        return x.re, x.im
    if isinstance(x, complex):
        return x.real, x.imag
    return x, None


def _paired(x: Any) -> Any:
    """A tensor of floats as a pair; anything else as it is."""
    if isinstance(x, Tensor) and x.dtype.is_floating_point:
        return _Pair(x, torch.zeros_like(x))
    return x


def _each(node: Node, *args: Any, **kwargs: Any) -> Any:
    """Of operators that do the same with both parts."""
    if isinstance(node.meta["val"], tuple | list):
        return NotImplemented
    args, kwargs = tree_map_only(torch.dtype, lambda d: _REAL.get(d, d), (args, kwargs))
    args, kwargs = tree_map(_paired, (args, kwargs))

    def side(name: str) -> Any:
        own = tree_map_only(_Pair, lambda p: getattr(p, name), (args, kwargs))
        return node.target(*own[0], **own[1])  # type: ignore[operator]

    return _Pair(side("re"), side("im"))


def _padded(node: Node, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    return _each(node, x, pad, 0) if not value else NotImplemented


def _filled(node: Node, *args: Any, **kwargs: Any) -> Any:
    """Of operators that make a tensor of one number, their last operand without a name."""
    value = args[-1]
    if tree_any(lambda x: isinstance(x, _Pair), value) or isinstance(value, Tensor):
        return NotImplemented
    like = node.meta["val"]
    if not like.dtype.is_complex:
        return torch.full(like.shape, value, dtype=like.dtype)
    kind = _REAL[like.dtype]
    number = complex(value)
    return _Pair(*(torch.full(like.shape, part, dtype=kind) for part in (number.real, number.imag)))


def _zeros(node: Node, *_: Any, **__: Any) -> Any:
    return _filled(node, 0.0)


def _ones(node: Node, *_: Any, **__: Any) -> Any:
    return _filled(node, 1.0)


def _converted(node: Node, x: Any, *rest: Any, **kwargs: Any) -> Any:
    to = node.meta["val"].dtype
    re, im = _parts(x)
    if not to.is_complex:
        return aten._to_copy.default(re, dtype=to)
    re = aten._to_copy.default(re, dtype=_REAL[to])
    return _Pair(re, torch.zeros_like(re) if im is None else aten._to_copy.default(im, dtype=_REAL[to]))


def _sum_of(node: Node, a: Any, b: Any, sign: int, alpha: Any) -> Any:
    if isinstance(alpha, complex):
        return NotImplemented
    (ar, ai), (br, bi) = _parts(a), _parts(b)
    if alpha * sign != 1:
        br, bi = br * (alpha * sign), None if bi is None else bi * (alpha * sign)
    re = _tensor_plus(ar, br)
    im = bi if ai is None else ai if bi is None else _tensor_plus(ai, bi)
    return _shaped(node, re, im)


def _tensor_plus(a: Any, b: Any) -> Any:
    return b + a if isinstance(b, Tensor) else a + b


def _shaped(node: Node, re: Any, im: Any) -> _Pair:
    """A pair of the result's shape and dtype."""
    like = node.meta["val"]
    kind = _REAL[like.dtype]
    made = []
    for part in (re, im):
        x = torch.full([], part or 0.0, dtype=kind) if not isinstance(part, Tensor) else part
        x = x if x.dtype is kind else aten._to_copy.default(x, dtype=kind)
        same = [_expression(n) for n in x.shape] == [_expression(n) for n in like.shape]
        made.append(x if same else aten.expand.default(x, list(like.shape)))
    return _Pair(*made)


def _times(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    return b * a if isinstance(b, Tensor) else a * b


def _minus(a: Any, b: Any) -> Any:
    return a if b is None else -b if a is None else a - b


def _plus(a: Any, b: Any) -> Any:
    return a if b is None else b if a is None else _tensor_plus(a, b)


def _product(node: Node, a: Any, b: Any) -> Any:
    (ar, ai), (br, bi) = _parts(a), _parts(b)
    return _shaped(node, _minus(_times(ar, br), _times(ai, bi)), _plus(_times(ar, bi), _times(ai, br)))


def _quotient(node: Node, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """Both operands are divided by the divisor's larger part first, so that squares do not overflow."""
    if rounding_mode is not None:
        return NotImplemented
    (ar, ai), (br, bi) = _parts(a), _parts(b)
    if bi is None:
        return _shaped(node, ar / br, None if ai is None else ai / br)
    if not isinstance(br, Tensor):
        return _product(node, a, 1 / complex(br, bi))
    scale = torch.maximum(br.abs(), bi.abs())
    br, bi = br / scale, bi / scale
    square = br * br + bi * bi
    re = _plus(_times(ar, br), _times(ai, bi)) / square / scale
    im = _minus(_times(ai, br), _times(ar, bi)) / square / scale
    return _shaped(node, re, im)


def _matrices(node: Node, a: Any, b: Any) -> Any:
    (ar, ai), (br, bi) = _parts(a), _parts(b)

    def product(x: Any, y: Any) -> Any:
        return None if x is None or y is None else node.target(x, y)  # type: ignore[operator]

    return _shaped(node, _minus(product(ar, br), product(ai, bi)), _plus(product(ar, bi), product(ai, br)))


def _magnitude(node: Node, x: _Pair) -> Tensor:
    made: Tensor = aten.hypot.default(x.re, x.im)
    return made


def _sign(node: Node, x: _Pair) -> _Pair:
    size = aten.hypot.default(x.re, x.im)
    none = size == 0
    size = torch.where(none, torch.ones_like(size), size)
    return _Pair(x.re / size, x.im / size)


def _exponential(node: Node, x: _Pair) -> _Pair:
    size = torch.exp(x.re)
    return _Pair(size * torch.cos(x.im), size * torch.sin(x.im))


def _selected(node: Node, condition: Any, a: Any, b: Any) -> Any:
    (ar, ai), (br, bi) = _parts(a), _parts(b)
    zero = torch.zeros([], dtype=_REAL[node.meta["val"].dtype])
    return _shaped(
        node,
        torch.where(condition, ar, br),
        torch.where(condition, zero if ai is None else ai, zero if bi is None else bi),
    )


def _equal(node: Node, a: Any, b: Any) -> Any:
    (ar, ai), (br, bi) = _parts(a), _parts(b)
    ai, bi = (0 if x is None else x for x in (ai, bi))
    return (ar == br) & (ai == bi) if isinstance(ai, Tensor) else (br == ar) & (bi == ai)


def _conjugate(node: Node, x: Any) -> _Pair:
    re, im = _parts(x)
    return _shaped(node, re, -im)


def _side_by_side(x: _Pair) -> Tensor:
    return torch.cat([x.re.unsqueeze(-1), x.im.unsqueeze(-1)], -1)


def _transformed(x: Tensor, dim: int, inverse: bool) -> Tensor:
    """Neither direction divides by the length. x: [..., 2]."""
    made: Tensor = torch.ops.xrt.dft.default(x, dim, inverse)
    return made * x.shape[dim] if inverse else made


def _normalised(x: Tensor, count: int, normalization: int) -> Tensor:
    if normalization == 0:
        return x
    return x / (math.sqrt(count) if normalization == 1 else count)


def _split(x: Tensor) -> _Pair:
    return _Pair(*(aten.select.int(x, x.dim() - 1, i) for i in range(2)))


def _are_known(lengths: Iterable[int | torch.SymInt]) -> bool:
    """Whether no length of a transform varies, which graphs are written for."""
    return all(isinstance(n, int) for n in lengths)


def _complex_transform(node: Node, x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    if not dim:
        return x
    dims = [d % x.re.dim() for d in dim]
    if not _are_known(x.re.shape[d] for d in dims):
        return NotImplemented
    made = _side_by_side(x)
    for d in dims:
        made = _transformed(made, d, not forward)
    return _split(_normalised(made, math.prod(x.re.shape[d] for d in dims), normalization))


def _transform_of_real(node: Node, x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    dims = [d % x.dim() for d in dim]
    if not _are_known(x.shape[d] for d in dims):
        return NotImplemented
    made = torch.cat([x.unsqueeze(-1), torch.zeros_like(x).unsqueeze(-1)], -1)
    for i, d in enumerate(reversed(dims)):
        made = _transformed(made, d, False)
        if onesided and i == 0:
            made = made.narrow(d, 0, x.shape[d] // 2 + 1)
    return _split(_normalised(made, math.prod(x.shape[d] for d in dims), normalization))


def _transform_to_real(node: Node, x: _Pair, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    """The half that is missing is the conjugate of the other, from its end."""
    dims = [d % x.re.dim() for d in dim]
    if not _are_known([last_dim_size, *(x.re.shape[d] for d in dims)]):
        return NotImplemented
    made = _side_by_side(x)
    for d in dims[:-1]:
        made = _transformed(made, d, True)
    last, n = dims[-1], last_dim_size
    half = _split(made.narrow(last, 0, n // 2 + 1))
    re, im = half.re, half.im
    if n > 2:
        tail = (n - 1) // 2
        re = torch.cat([re, re.narrow(last, 1, tail).flip(last)], last)
        im = torch.cat([im, -im.narrow(last, 1, tail).flip(last)], last)
    made = _transformed(_side_by_side(_Pair(re, im)), last, True)
    count = math.prod(x.re.shape[d] for d in dims[:-1]) * n
    return _normalised(_split(made).re, count, normalization)


_RULES: dict[Any, Callable[..., Any]] = {
    getattr(aten, name): _each
    for name in (
        "alias", "cat", "clone", "copy", "detach", "diagonal", "expand", "flip", "gather", "index", "index_add",
        "index_put", "index_select", "lift_fresh_copy", "mean", "neg", "permute", "repeat", "reshape", "roll",
        "scatter_add", "select", "select_scatter", "slice", "slice_scatter", "squeeze", "stack", "sum", "t",
        "transpose", "tril", "triu", "unsqueeze", "view", "_unsafe_view",
    )
}  # fmt: skip
_RULES |= {
    aten._conj: _conjugate,
    aten._conj_physical: _conjugate,
    aten._fft_c2c: _complex_transform,
    aten._fft_c2r: _transform_to_real,
    aten._fft_r2c: _transform_of_real,
    aten._to_copy: _converted,
    aten.abs: _magnitude,
    aten.add: lambda node, a, b, *, alpha=1: _sum_of(node, a, b, 1, alpha),
    aten.angle: lambda node, x: torch.atan2(x.im, x.re),
    aten.bmm: _matrices,
    aten.complex: lambda node, a, b: _Pair(*torch.broadcast_tensors(a, b)),
    aten.constant_pad_nd: _padded,
    aten.div: _quotient,
    aten.eq: _equal,
    aten.exp: _exponential,
    aten.full: _filled,
    aten.full_like: lambda node, x, value, **_: _filled(node, value),
    aten.imag: lambda node, x: x.im,
    aten.mm: _matrices,
    aten.mul: _product,
    aten.new_zeros: _zeros,
    aten.ones_like: _ones,
    aten.polar: lambda node, size, angle: _Pair(size * torch.cos(angle), size * torch.sin(angle)),
    aten.real: lambda node, x: x.re,
    aten.reciprocal: lambda node, x: _quotient(node, 1.0, x),
    aten.resolve_conj: lambda node, x: x,
    aten.rsub: lambda node, a, b, alpha=1: _sum_of(node, b, a, -1, alpha),
    aten.scalar_tensor: lambda node, value, **_: _filled(node, value),
    aten.sgn: _sign,
    aten.sub: lambda node, a, b, *, alpha=1: _sum_of(node, a, b, -1, alpha),
    aten.view_as_complex: lambda node, x: _split(x),
    aten.view_as_real: lambda node, x: _side_by_side(x),
    aten.where: _selected,
    aten.zeros_like: _zeros,
}
"""Operator -> its result in real numbers: a pair, or a tensor where it is real. Called with the node that it replaces,
and its operands, of which the complex ones are pairs; NotImplemented leaves it to torch."""
