"""Partition: a functional FX graph as a sequence of stages, each run by XRT or, where it cannot be, by torch eager.

A node's stage is the first one of its kind after those of its operands, so that stages are as few as the data flow
allows. Views of inputs are free in torch, and so are sizes that follow from those of inputs: they are repeated in every
stage that reads them, and never transferred. A stage of XRT reads a size off a tensor that has it, where it gets one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

import xrt_core as xrt
from xrt_core.ir.symbols import expression
from xrt_torch.devices import tensors_of, why_elsewhere

aten = torch.ops.aten
VIEWS = {aten.permute, aten.t, aten.transpose, aten.view, aten.unsqueeze, aten.expand, aten.squeeze, aten.alias}
_DIVISIONS = {aten.div, aten.floor_divide, aten.fmod, aten.remainder}
_FACTORIES = {aten.empty, aten.full, aten.arange, aten.scalar_tensor, aten.zeros, aten.ones}


_BORDER = {aten.view_as_complex.default, aten.view_as_real.default, aten.resolve_conj.default}
AT_BORDER = "torch takes complex numbers apart for XRT, and puts them together"
"""Why nodes run in torch whose complex numbers are computed by XRT."""
CHECKS = "torch looks whether a factorisation failed, and raises its error"
"""Why nodes run in torch that compute nothing."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a graph. graph: placeholders for `inputs`, results for `outputs`, both names in the whole graph. takes,
    gives: what is known of their values."""

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    on_xrt: bool
    takes: tuple[Any, ...]
    gives: tuple[Any, ...]

    @classmethod
    def of(cls, graph: Graph, inputs: tuple[str, ...], outputs: tuple[str, ...], on_xrt: bool) -> Stage:
        """The stage of a graph whose nodes say what they are."""
        results: Any = graph.output_node().args[0]
        takes = tuple(n.meta.get("val") for n in graph.nodes if n.op == "placeholder")
        return cls(graph, inputs, outputs, on_xrt, takes, tuple(r.meta.get("val") for r in results))

    @property
    def size(self) -> int:
        """Number of operators."""
        return operators_of(self.graph)

    def shapes(self) -> dict[str, tuple[Any, ...]]:
        """Name of a placeholder -> its dimensions as `XRTModule` takes them, of those with sizes that vary: symbols
        with the least size that torch knows, expressions of such symbols, None for others."""
        known = {n.name: v for n in self.graph.nodes if n.op == "placeholder" and _varies(v := n.meta.get("val"))}
        symbols = {str(d): _symbol(d) for v in known.values() for d in v.shape if _is_symbol(d)}
        return {name: tuple(_dimension(d, symbols) for d in v.shape) for name, v in known.items()}


def _varies(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not all(isinstance(d, int) for d in value.shape)


def _is_symbol(d: int | torch.SymInt) -> bool:
    return isinstance(d, torch.SymInt) and bool(d.node.expr.is_Symbol)


def _symbol(d: torch.SymInt) -> xrt.Symbol:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return xrt.Symbol(str(d), min=max((n for n in (1, 2) if statically_known_true(d >= n)), default=0))


def _dimension(d: int | torch.SymInt, symbols: Mapping[str, xrt.Symbol]) -> Any:
    """A size as `XRTModule` takes it. symbols: by name, those that are the size of something."""
    if isinstance(d, int) or str(d) in symbols:
        return d if isinstance(d, int) else symbols[str(d)]
    made = expression(str(d))
    return str(d) if made is not None and made.symbols <= symbols.keys() else None


def operators_of(graph: Graph) -> int:
    """Number of operators."""
    return sum(n.op in ("call_function", "call_method") for n in graph.nodes)


def copy_of(graph: Graph) -> Graph:
    """A graph of its own, with what is known of the nodes."""
    made = Graph()
    made.output(made.graph_copy(graph, {}))
    for old, new in zip(graph.nodes, made.nodes, strict=True):
        new.meta = dict(old.meta)
    return made


def draws_numbers(target: Any) -> bool:
    """Whether what a node calls draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def reason_for_eager(
    node: Node,
    translatable: Callable[[Any], bool],
    mistrust: Callable[[Node], str | None],
    device: torch.device,
) -> str | None:
    """Why torch has to run a node; None where XRT can. device: that of the graph."""
    if node.op == "get_attr":
        return None if type(node.meta.get("val")) is torch.Tensor else "it reads an attribute that is no tensor"
    if node.op != "call_function":
        return "it is no operator"
    target = node.target
    if any(isinstance(n.meta.get("val"), torch.SymFloat) for n in (node, *node.all_input_nodes)):
        return "it is of numbers of Python that vary"
    if node.meta.get("at_border"):
        return AT_BORDER if node.target in _BORDER else "complex numbers"
    if only_checks(node):
        return CHECKS
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "it is an operator of higher order"
    if isinstance(target, torch._ops.OpOverload):
        if draws_numbers(target):
            return "it draws random numbers, which are torch's"
        if target._schema.is_mutable:
            return "it writes its operand"
        if not translatable(target):
            return "torchlib has no translation of it"
        if (why := mistrust(node)) is not None:
            return why
        if target.overloadpacket in _DIVISIONS and _is_of_integers(node) and _may_be_zero(node.args[1]):
            return "torch raises where an integer is divided by 0"
    for value in _tensors(node):
        if value.dtype.is_complex:
            return "complex numbers"
        if value.layout is not torch.strided:
            return f"a tensor of layout {value.layout}"
        if value.is_quantized:
            return "a quantised tensor"
        if value.device.type == "meta":
            return "a tensor without memory"
    return why_elsewhere(node, device)


def _is_of_integers(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _may_be_zero(divisor: Any) -> bool:
    """Whether an element of a divisor may be 0, as far as the graph tells."""
    if not isinstance(divisor, Node):
        return bool(abs(divisor) < 1)  # which is 0 as an integer
    packet = getattr(divisor.target, "overloadpacket", None)
    if divisor.op == "get_attr":
        value = divisor.meta.get("val")
        return type(value) is not torch.Tensor or bool((value == 0).any())
    if packet in (aten.full, aten.full_like):
        return _may_be_zero(divisor.args[1])
    if packet in (aten.scalar_tensor, aten.expand, aten.unsqueeze):  # a narrower type may make 0 of others
        return _may_be_zero(divisor.args[0])
    if packet is aten.clamp:
        least = divisor.args[1] if len(divisor.args) > 1 else None
        return not isinstance(least, int | float) or least < 1
    if packet is aten.where:
        condition, instead, x = divisor.args
        is_of_zeros = getattr(condition, "target", None) is aten.eq.Scalar and condition.args == (x, 0)
        return not is_of_zeros or _may_be_zero(instead)
    return True


def only_checks(node: Node) -> bool:
    """Whether a node looks if a factorisation failed, after all that had effects before it. It returns a token."""
    return node.target is torch.ops.higher_order.with_effects and node.args[1] is aten._linalg_check_errors.default


def _tensors(node: Node) -> list[torch.Tensor]:
    return [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]


def stages_of(graph: Graph, eager: Collection[str]) -> list[Stage]:
    """Cut a graph in stages. eager: names of the nodes that torch runs."""
    sizes = _sizes(graph, eager)
    views = _views_of_inputs(graph) | sizes
    shared = _shared_results(graph) + [r for r in graph.output_node().all_input_nodes if r in sizes]
    last = {n for r in shared for n in _way_to(r)} | sizes.intersection(shared)
    only_last: set[Node] = set()
    for n in reversed(graph.nodes):
        if n in last and all(u in only_last or u.op == "output" for u in n.users):
            only_last.add(n)
    place = _places(graph, eager, views | only_last)
    wanted = {n.name for n in graph.output_node().all_input_nodes if n not in shared}
    stages = []
    for number in sorted(set(place.values())):
        nodes = [n for n in graph.nodes if place.get(n) == number]
        wanted |= {n.name for n in nodes if any(place.get(u, number) != number for u in n.users)}
        wanted |= {n.name for n in nodes if n not in last and not last.isdisjoint(n.users)}
        stages.append(_cut(nodes, views, wanted, number % 2 == 1))
    if shared:
        stages.append(_extract([], shared, last | sizes, on_xrt=False))
    return stages


def _sizes(graph: Graph, eager: Collection[str]) -> set[Node]:
    """The nodes that compute sizes from those of inputs, as numbers of Python."""
    found: set[Node] = set()
    for n in graph.nodes:
        is_number = n.op == "call_function" and isinstance(n.meta.get("val"), torch.SymInt) and n.name not in eager
        is_size = is_number and (n.target is aten.sym_size.int or not isinstance(n.target, torch._ops.OpOverload))
        if is_size and all(a in found or a.op == "placeholder" for a in n.all_input_nodes):
            found.add(n)
    return found


def _shared_results(graph: Graph) -> list[Node]:
    """The results that are views of an input, or of what another result is, or is a view of."""
    owners = {r: _owner(r) for r in graph.output_node().all_input_nodes}
    count = Counter(owners.values())
    return [r for r, o in owners.items() if o is not r and (o.op == "placeholder" or count[o] > 1)]


def _owner(n: Node) -> Node:
    """Of a view the node whose memory it shows; else the node itself."""
    way = _way_to(n)
    return way[-1].all_input_nodes[0] if way else n


def _way_to(n: Node) -> list[Node]:
    """A view, what it is a view of, and so on, as far as they are views."""
    found = []
    while _is_view(n):
        found.append(n)
        n = n.all_input_nodes[0]
    return found


def _is_view(n: Node) -> bool:
    """Whether a node shows its first operand's memory, as a tensor, or as the several that `split` gives."""
    if (source := _getitem_source(n)) is not None:
        return _is_view(source)
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
        return False
    made = n.target._schema.returns
    return len(made) == 1 and made[0].alias_info is not None and not made[0].alias_info.is_write


def _views_of_inputs(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    for n in graph.nodes:
        packet = getattr(n.target, "overloadpacket", None)
        if n.op == "call_function" and packet in VIEWS and len(n.all_input_nodes) == 1:
            source = n.all_input_nodes[0]
            if source.op == "placeholder" or source in found:
                found.add(n)
    return found


def _places(graph: Graph, eager: Collection[str], views: set[Node]) -> dict[Node, int]:
    place: dict[Node, int] = {}
    drawn = 0  # where the last random numbers are
    for n in graph.nodes:
        if n.op in ("placeholder", "output") or n in views:
            continue
        odd = 0 if n.name in eager else 1
        packet = getattr(n.target, "overloadpacket", None)
        if packet in _FACTORIES and n.users and all(u.name in eager for u in n.users):
            odd = 0
        first = max((place.get(a, 0) for a in n.all_input_nodes), default=0)
        draws = draws_numbers(n.target)
        if draws:
            first = max(first, drawn)
        taken = _getitem_source(n)
        place[n] = place[taken] if taken is not None else first + (first + odd) % 2
        if draws:
            drawn = place[n]
    return place


def _getitem_source(n: Node) -> Node | None:
    """The node of several results that a node takes one of: both stay together."""
    named = getattr(n.target, "__name__", "") == "getitem" and isinstance(n.args[0], Node)
    return n.args[0] if named and n.args[0].op == "call_function" else None  # type: ignore[return-value, union-attr]


def _cut(nodes: list[Node], views: set[Node], wanted: set[str], on_xrt: bool) -> Stage:
    results = [n for n in nodes if n.name in wanted]
    results = [n for n in results if not isinstance(n.meta.get("val"), tuple | list)]
    has_tensors = any(not isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool) for n in nodes)
    return _extract(nodes, results, views, on_xrt=on_xrt and has_tensors)


def _extract(nodes: list[Node], results: list[Node], views: set[Node], *, on_xrt: bool) -> Stage:
    made, env, inputs = Graph(), dict[Node, Node](), []
    here = set(nodes)
    needed: dict[Node, None] = {}

    def need(n: Node) -> None:
        for a in n.all_input_nodes:
            if a in views and a not in needed:
                need(a)
                needed[a] = None

    for n in [*nodes, *(r for r in results if r in views)]:
        need(n)
    for r in results:
        if r in views:
            needed[r] = None
    body = [*needed, *nodes]
    inside = {*needed, *here}
    for n in body:
        for a in n.all_input_nodes:
            if a not in inside and a not in env:
                env[a] = made.placeholder(a.name)
                env[a].meta = dict(a.meta)
                inputs.append(a.name)
    for n in body:
        env[n] = made.node_copy(n, lambda a: env[a])
        env[n].meta = dict(n.meta)
    made.output(tuple(env[r] for r in results))
    if on_xrt:
        _read_sizes(made, inputs)
    return Stage.of(made, tuple(inputs), tuple(r.name for r in results), on_xrt)


def _read_sizes(graph: Graph, inputs: list[str]) -> None:
    """Replace the sizes that a graph takes by those of tensors that it takes, so that what it computes follows from the
    shapes of its inputs. inputs: what it takes, by its placeholders' names or others."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    places: dict[Any, tuple[Node, int]] = {}
    for n in placeholders:
        if isinstance(value := n.meta.get("val"), torch.Tensor):
            for axis, d in enumerate(value.shape):
                if isinstance(d, torch.SymInt):
                    places.setdefault(d.node.expr, (n, axis))
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for i, n in reversed([*enumerate(placeholders)]):
        value = n.meta.get("val")
        place = places.get(value.node.expr) if isinstance(value, torch.SymInt) else None
        if place is not None:
            with graph.inserting_before(first):
                size = graph.call_function(aten.sym_size.int, place)
            size.meta = dict(n.meta)
            n.replace_all_uses_with(size)
            graph.erase_node(n)
            del inputs[i]
