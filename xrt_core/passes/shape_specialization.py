"""Shape specialisation: a graph for one signature, with static types where they follow from the signature.

`specialise` folds known values and infers types in one topological traversal. `shape_inputs` finds the inputs whose
values determine shapes, and therefore belong to the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from xrt_core.errors import ShapeError
from xrt_core.ir.graph import Annotations, Graph, Node, Value, substitute
from xrt_core.ir.inference import infer_types, merged, runs_to_limit, trip_count
from xrt_core.ir.op_traits import traits_of
from xrt_core.ir.schema import since_version
from xrt_core.ir.symbols import Expr
from xrt_core.ir.types import STRING, Dim, OptionalType, SequenceType, TensorType, ValueType
from xrt_core.passes.conditions import loop_data, squeeze, with_scalar, with_scalars
from xrt_core.passes.first_turns import makes_a_turn, rest
from xrt_core.passes.loop_lists import as_list, concatenated, stacked
from xrt_core.passes.simplify import (
    DEFAULT_FOLD_LIMIT,
    DeadNodes,
    HostRun,
    constant_like,
    evaluate,
    is_known,
)
from xrt_core.passes.symbolic_shapes import SymbolicShapes

_BOOL = TensorType(np.dtype(np.bool_), ())
_INT64 = TensorType(np.dtype(np.int64), ())


Expand = Callable[[Node], Graph | None]
"""Node with typed inputs -> a graph that replaces it, or None. The graph has an input for each given input of the node,
and an output for each wanted output."""


def _keep(node: Node) -> None:
    return None


def specialise(
    graph: Graph,
    types: Sequence[ValueType | None],
    known: Mapping[int, np.ndarray],
    run: HostRun,
    *,
    fold_limit: int = DEFAULT_FOLD_LIMIT,
    expand: Expand = _keep,
    symbolic: SymbolicShapes | None = None,
    body_of: Expand = _keep,
) -> Graph:
    """`graph` for inputs of these types, of which those in `known` (by index) have known values.

    symbolic: the symbols, where dimensions of the types are expressions over some; what follows is in the types of the
    result as expressions.

    The result has the same number of inputs and outputs. Known values (constants, shapes, arithmetic on them) are
    constants in it; an If with a known condition is replaced by its branch; Identity nodes are removed; every other
    value has the inferred type. `expand` returns the body that replaces an operator without a kernel. `body_of` returns
    that of an operator which is kept: it tells symbolic types that the inference of a plugin leaves open. Nodes that
    violate their operator's specification keep unknown types: the host raises the error when it runs them.
    """
    specialiser = _Specialiser(run, fold_limit, expand, symbolic, body_of)
    inputs = []
    for i, (value, type_) in enumerate(zip(graph.inputs, types, strict=True)):
        new = Value(value.name, type_)
        inputs.append(new)
        specialiser.new[value] = constant_like(value, known[i]) if i in known else new
    specialiser.graph(graph)
    outputs = [specialiser.new.get(v, v) for v in graph.outputs]
    return Graph(
        inputs, outputs, specialiser.made, opsets=graph.opsets, name=graph.name, doc=graph.doc, metadata=graph.metadata
    )


class _Specialiser:
    """The state of one traversal: the new value of each old one, and the new nodes so far."""

    def __init__(
        self,
        run: HostRun,
        fold_limit: int,
        expand: Expand,
        symbolic: SymbolicShapes | None = None,
        body_of: Expand = _keep,
    ) -> None:
        self.run = run
        self.body_of = body_of
        self.symbolic = symbolic
        self.expand = expand
        self.fold_limit = fold_limit
        self.prefix = ""  # of names in an inlined graph, which may be inlined more than once
        self.inherited: Annotations | None = None  # of the node whose body is being inlined
        self.new: dict[Value, Value] = {}
        self.made: list[Node] = []
        self.empty: set[Value] = set()  # lists without elements
        self.stacks: dict[Value, Value] = {}  # the scan output whose parts a list holds
        self.source: Graph | None = None  # the graph whose nodes are made
        self.data: Collection[Value] | None = None  # in the body of a Loop, what is more than a condition

    def graph(self, graph: Graph) -> None:
        """Make the nodes of a graph."""
        outer, self.source = self.source, graph
        self.nodes(graph.nodes)
        self.source = outer

    def nodes(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        new = self.new
        if self.is_replaced(node):
            return
        node = substitute(node, new)
        if self.inherited is not None:
            node = node.replace(name=f"{self.prefix}{node.name}", annotations=self.inherited)
        if self.shape_of(node):
            return
        if node.op_type == "Slice" and (vectors := _with_vectors(node)):
            self.nodes(vectors)
            return
        body = self.expand(node)
        if body is not None:
            given = [v for v in node.inputs if v is not None]
            self.new.update(zip(body.inputs, given, strict=True))
            outer, self.inherited = self.inherited, node.annotations.replace(sbp=None, aliases=(), doc="")
            self.inline(node, body, [v for v in node.outputs if v is not None])
            self.inherited = outer
            return
        before = node
        node, types = self.typed(node)
        if node.op_type == "Loop" and not node.domain and self.first_turn(before, node):
            return
        stacks: Mapping[Value, Value] = {}
        if node.op_type == "Loop" and not node.domain:
            made = stacked(node, types, self.turns(node), self.empty)
            if made is not None:
                node, types, stacks = made.node, made.types, made.stacks
        if self.symbolic is not None:
            types = self.symbolic.types(node, types)
            if node.op_type == "Slice" and (taken := self.symbolic.as_gather(node, types)):
                self.nodes(taken)
                return
            if node.domain and not all(is_settled(t, symbolic=True) for t in types):
                types = self.types_by_body(node, types)
            simpler = self.symbolic.simplified(node, types, self.made)
            if isinstance(simpler, Value):
                new.update((v, simpler) for v in node.outputs if v is not None)
                return
            node = simpler
        if is_known(node):
            arrays = evaluate(node, types, self.run, self.fold_limit)
            if arrays is not None:
                for v, data in zip(node.outputs, arrays, strict=False):
                    if v is not None and data is not None:
                        new[v] = constant_like(v, data)
                self.as_lists(stacks)
                return
        self.keep(node, types)
        self.as_lists(stacks)

    def is_replaced(self, node: Node) -> bool:
        """Replace an If by the branch that is taken, an Identity by its input, the product of few integers by that of
        each with the next, and what joins the list of a Loop's results by what does so with these. Returns whether it
        was replaced."""
        new, op, source = self.new, node.op_type, node.inputs[0] if node.inputs else None
        if node.domain or source is None:
            return False
        source, result = new.get(source, source), node.outputs[0]
        if op == "If":
            if source.data is None or source.data.size != 1:
                return False
            branch = node.attributes["then_branch" if source.data.reshape(-1)[0] else "else_branch"]
            assert isinstance(branch, Graph)
            self.inline(node, branch, node.outputs)
            return True
        if op == "Identity":
            if result is not None:
                new[result] = source
            return result is not None
        if op == "ReduceProd":
            factors = _as_size(node, source, self.made) or _as_product(node, source)
            self.nodes(factors or ())
            return factors is not None
        stack = self.stacks.get(source) if op == "ConcatFromSequence" else None
        joined = None if stack is None else concatenated(node, stack)
        self.nodes(joined or ())
        return joined is not None

    def keep(self, node: Node, types: Sequence[ValueType | None]) -> None:
        """Keep a node, whose outputs have these types."""
        new, changed = self.new, False
        outputs = []
        for v, inferred in zip(node.outputs, types, strict=True):
            if v is not None:
                is_static = self.symbolic is None or self.symbolic.is_static
                type_ = merged(v.type if is_static else None, inferred)
                if type_ != v.type or self.prefix:
                    result = Value(self.prefix + v.name if v.name else "", type_)
                    new[v] = result
                    v = result
                    changed = True
            outputs.append(v)
        typed = node.replace(outputs=outputs) if changed else node
        elements = None if self.symbolic is None else self.symbolic.follow(typed, types)
        if elements is not None and node.outputs[0] is not None:  # every element is a number after all
            new[node.outputs[0]] = constant_like(node.outputs[0], elements)
            return
        self.made.append(typed)
        if node.op_type == "SequenceEmpty" and not node.domain:
            self.empty.update(v for v in outputs if v is not None)

    def as_lists(self, stacks: Mapping[Value, Value]) -> None:
        """Make lists of scan outputs again, for those who read them as such."""
        for of, stack in stacks.items():
            self.node(as_list(stack, of))
            self.stacks[self.new.get(of, of)] = self.new.get(stack, stack)

    def types_by_body(self, node: Node, types: Sequence[ValueType | None]) -> Sequence[ValueType | None]:
        """The types of the outputs of a node that is kept: those of what it stands for, where that is known."""
        body = self.body_of(node)
        if body is None:
            return types
        inner = _Specialiser(self.run, self.fold_limit, self.body_of, self.symbolic, self.body_of)
        inner.new.update(zip(body.inputs, (v for v in node.inputs if v is not None), strict=True))
        inner.graph(body)
        found = iter([inner.new.get(v, v).type for v in body.outputs])
        return [t if v is None else next(found) for v, t in zip(node.outputs, types, strict=True)]

    def inline(self, node: Node, body: Graph, results: Sequence[Value | None]) -> None:
        """Replace `node` by `body`, and the values `results` by its outputs."""
        outer = self.prefix
        self.prefix = f"{outer}{node.name or node.op_type}/"
        self.graph(body)
        self.prefix = outer
        for result, value in zip(results, body.outputs, strict=True):
            if result is not None:
                self.new[result] = self.new.get(value, value)

    def shape_of(self, node: Node) -> bool:
        """Fold `node` if it is a query of a known shape. Returns whether it was folded."""
        if not traits_of(node).shape_query:
            return False
        source, result = node.inputs[0], node.outputs[0]
        if source is None or result is None or not source.is_static:
            return False
        assert source.shape is not None
        shape = np.array(source.shape, np.int64)
        if node.op_type == "Size":
            data = np.array(shape.prod(), np.int64)
        else:
            start, end = node.attributes.get("start", 0), node.attributes.get("end", len(shape))
            data = shape[start:end]
        self.new[result] = constant_like(result, data)
        return True

    def typed(self, node: Node) -> tuple[Node, Sequence[ValueType | None]]:
        """The node, its bodies specialised where it is control flow, and the inferred types of its outputs."""
        try:
            if not node.subgraphs:
                return node, infer_types(node)
            if node.op_type == "If":
                return self.typed_if(node)
            if node.op_type == "Loop":
                return self.typed_loop(node)
            if node.op_type == "Scan" and node.version >= 9:
                return self.typed_scan(node)
        except (ShapeError, ValueError, IndexError, ArithmeticError):  # a body, or axes, that violate the specification
            pass
        return node, (None,) * len(node.outputs)

    def typed_body(
        self,
        body: Graph,
        types: Sequence[ValueType | None],
        turns: Expr | None = None,
        data: Collection[Value] | None = None,
    ) -> Graph:
        """A body for inputs of these types, capturing what it captured; captured values have their types already.
        turns: how many a Loop makes at most, whose number is the first input. data: see `_Specialiser.data`."""
        symbolic = self.symbolic
        if symbolic is None and turns is not None:  # the number of the turn is the only symbol
            symbolic = SymbolicShapes({})
        inner = _Specialiser(self.run, self.fold_limit, self.expand, symbolic, self.body_of)
        inner.data = data
        inputs = [Value(v.name, t) for v, t in zip(body.inputs, types, strict=True)]
        inner.new.update(zip(body.inputs, inputs, strict=True))
        if symbolic is not None and turns is not None:
            symbolic.counts(inputs[0], turns)
        inner.graph(body)
        outputs = [inner.new.get(v, v) for v in body.outputs]
        return DeadNodes().rewrite(body.replace(inputs=inputs, nodes=inner.made, outputs=outputs))

    def typed_if(self, node: Node) -> tuple[Node, Sequence[ValueType | None]]:
        data = self.data
        bodies = {k: self.typed_body(g, (), data=data) for k, g in node.attributes.items() if isinstance(g, Graph)}
        if data is not None:
            free = [i for i, v in enumerate(node.outputs) if v not in data]
            bodies = dict(zip(bodies, with_scalars([*bodies.values()], free), strict=True))
        results = zip(*([v.type for v in g.outputs] for g in bodies.values()), strict=True)
        return node.replace(attributes=bodies), [a if a == b else _common(a, b) for a, b in results]

    def settled(
        self,
        loop: Node,
        states: list[ValueType | None],
        around: Sequence[ValueType | None],
        first: int,
        turns: Expr | None = None,
    ) -> tuple[Graph, list[ValueType | None]]:
        """The body of a Loop or Scan whose states, which stand behind `first` other inputs and outputs, have types that
        hold at every turn.

        around: the types of the inputs that are no states; the first `first` of them stand before the states. turns: as
        of `typed_body`.
        """
        (body,) = loop.subgraphs
        before = None if self.symbolic is None else self.symbolic.known()
        data = loop_data(loop, self.unread(loop)) if loop.op_type == "Loop" else None
        while True:  # terminates: each turn generalises a dimension or a type, or is the last
            made = self.typed_body(body, [*around[:first], *states, *around[first:]], turns, data)
            results = made.outputs[min(first, 1) :]
            after = [a if a == v.type else _common(a, v.type) for a, v in zip(states, results, strict=False)]
            if after == states:
                return made, states
            states = after
            if self.symbolic is not None and before is not None:  # what was found held for the other types
                self.symbolic.reset(before)

    def typed_loop(self, node: Node) -> tuple[Node, Sequence[ValueType | None]]:
        given: list[ValueType | None] = [None if v is None else v.type for v in node.inputs[2:]]
        limit = _number(node.inputs[0]) if self.symbolic is None else self.symbolic.number(node.inputs[0])
        body, states = self.settled(node, given, [_INT64, _BOOL], 2, limit)
        body = with_scalar(body, 0)
        node = node.replace(attributes={**node.attributes, "body": body})
        length = self.turns(node)
        scans = [_stacked(v.type, length) for v in body.outputs[1 + len(states) :]]
        return node, [*states, *scans][: len(node.outputs)]  # a body may give more

    def unread(self, node: Node) -> list[int]:
        """Which results of a node nothing reads in its graph."""
        assert self.source is not None
        read = {v for n in self.source.nodes for v in n.uses()}.union(self.source.outputs)
        return [i for i, v in enumerate(node.outputs) if v not in read]

    def first_turn(self, loop: Node, typed: Node) -> bool:
        """Make the first turn of a Loop, and keep the rest of it, where that gives its states ranks that hold at every
        turn. typed: the Loop as it stands. Returns whether that was done."""
        states = [None if v is None else v.type for v in loop.inputs[2:]]
        held = [v.type for v in typed.subgraphs[0].inputs[2:]]
        lost = [i for i, (a, b) in enumerate(zip(states, held, strict=False)) if _has_rank(a) and not _has_rank(b)]
        if not lost or not makes_a_turn(loop):
            return False
        before = None if self.symbolic is None else self.symbolic.known()
        data = loop_data(loop, self.unread(loop))
        try:
            once = self.typed_body(loop.subgraphs[0], [_INT64, _BOOL, *states], data=data).outputs
            _, after = self.settled(loop, [v.type for v in once[1:]], [_INT64, _BOOL], 2)
        except (ShapeError, ValueError, IndexError, ArithmeticError):  # as in `typed`
            return False
        finally:
            if self.symbolic is not None and before is not None:
                self.symbolic.reset(before)
        if not all(_has_rank(after[i]) for i in lost):
            return False
        self.node(rest(loop, self.first_results(loop, data)))
        return True

    def first_results(self, loop: Node, data: Collection[Value]) -> list[Value]:
        """Make the nodes of a Loop's first turn, and return what its body gives: its condition and states."""
        (body,) = loop.subgraphs
        given = [constant_like(body.inputs[0], np.array(0, np.int64)), constant_like(body.inputs[1], np.array(True))]
        turn = _Specialiser(self.run, self.fold_limit, self.expand, self.symbolic, self.body_of)
        turn.prefix, turn.inherited = f"{self.prefix}{loop.name or loop.op_type}/turn0/", self.inherited
        turn.data = data
        turn.made, turn.empty, turn.stacks = self.made, self.empty, self.stacks
        states = [v for v in loop.inputs[2:] if v is not None]
        turn.new.update(zip(body.inputs, [*given, *states], strict=True))
        turn.graph(body)
        again, *after = (turn.new.get(v, v) for v in body.outputs)
        squeezed = squeeze(again)
        if squeezed is not None:
            turn.node(squeezed)
            (again,) = (turn.new.get(v, v) for v in squeezed.outputs if v is not None)
        return [again, *after]

    def turns(self, loop: Node) -> Dim:
        """How many turns a Loop makes; None where that is not known."""
        (body,) = loop.subgraphs
        limit = None if self.symbolic is None else self.symbolic.number(loop.inputs[0])
        if self.symbolic is None or limit is None or limit.constant is not None or not runs_to_limit(loop, body):
            return trip_count(loop, body)
        return self.symbolic.dim(limit) if self.symbolic.holds(limit) else None

    def typed_scan(self, node: Node) -> tuple[Node, Sequence[ValueType | None]]:
        scans = node.attributes["num_scan_inputs"]
        assert isinstance(scans, int)
        count = len(node.inputs) - scans
        axes = node.attributes.get("scan_input_axes") or (0,) * scans
        given: list[ValueType | None] = [None if v is None else v.type for v in node.inputs[:count]]
        slices: list[ValueType | None] = []
        length: Dim = None
        for v, axis in zip(node.inputs[count:], axes, strict=True):  # type: ignore[arg-type]
            if v is None or v.shape is None:
                slices.append(None if v is None else TensorType(v.dtype))
                continue
            axis = axis % len(v.shape)
            length = v.shape[axis]
            slices.append(TensorType(v.dtype, v.shape[:axis] + v.shape[axis + 1 :]))
        body, states = self.settled(node, given, slices, 0)
        results = body.outputs[count:]
        out_axes = node.attributes.get("scan_output_axes") or (0,) * len(results)
        stacked = [_stacked(v.type, length, a) for v, a in zip(results, out_axes, strict=True)]  # type: ignore[arg-type]
        found = [*states, *stacked][: len(node.outputs)]
        return node.replace(attributes={**node.attributes, "body": body}), found


def _has_rank(type_: ValueType | None) -> bool:
    return isinstance(type_, TensorType) and type_.shape is not None


def _number(v: Value | None) -> Expr | None:
    """The number that a constant of one element is."""
    return Expr.of(int(v.data.reshape(-1)[0])) if v is not None and v.data is not None and v.data.size == 1 else None


_FEW = 4  # factors


def _with_vectors(node: Node) -> list[Node]:
    """The nodes that give a Slice vectors of one element where it has numbers for limits, as tf2onnx writes the number
    of a Loop's turn; none for another Slice."""
    made: list[Node] = []
    inputs = list(node.inputs)
    axes = Value.constant(np.array([0], np.int64), f"{node.name or 'Slice'}/axes")
    for i, v in enumerate(node.inputs[1:], 1):
        if v is not None and isinstance(v.type, TensorType) and v.type.shape == ():
            name = f"{node.name or 'Slice'}/limit{i}"
            inputs[i] = Value(name, TensorType(v.type.dtype, (1,)))
            made.append(Node("Unsqueeze", [v, axes], [inputs[i]], version=13, name=name, annotations=node.annotations))
    return [*made, node.replace(inputs=inputs)] if made and not node.domain and node.version >= 10 else []


def _as_size(node: Node, shape: Value, before: Iterable[Node]) -> list[Node] | None:
    """The Size of the value whose whole `shape` a ReduceProd multiplies, of which engines compute all
    bits; None for other products."""
    if len(node.inputs) > 1 or "axes" in node.attributes or node.attributes.get("keepdims", 1):
        return None
    for n in before:
        x = n.inputs[0] if n.op_type == "Shape" and not n.domain and shape in n.outputs else None
        if x is not None and not n.attributes:
            version = since_version("Size", "", n.version)
            return [Node("Size", [x], node.outputs, version=version, name=node.name, annotations=node.annotations)]
    return None


def _as_product(node: Node, x: Value) -> list[Node] | None:
    """The nodes that multiply the few integers of a vector, as exporters multiply sizes, one with the next: libraries
    compute a ReduceProd of integers in floats, or not at all. None for other products."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    given = node.attributes.get("axes") if axes is None else None if axes.data is None else tuple(axes.data.tolist())
    whole = given in ((0,), (-1,)) or (axes is None and not given and not node.attributes.get("noop_with_empty_axes"))
    (result,) = node.outputs
    if result is None or not whole or x.dtype not in (np.int32, np.int64) or x.shape is None or len(x.shape) != 1:
        return None
    count = x.shape[0]
    if not isinstance(count, int) or not 0 < count <= _FEW:
        return None
    keeps = bool(node.attributes.get("keepdims", 1))
    made: list[Node] = []

    def add(op: str, *inputs: Value, last: bool = False, version: int = 13) -> Value:
        name = f"{node.name or result.name}/{op}{len(made)}"
        v = result if last else Value(name, TensorType(x.dtype, (1,) if keeps else ()))
        made.append(Node(op, inputs, [v], version=version, name=name, annotations=node.annotations))
        return v

    def factor(i: int, last: bool = False) -> Value:
        at = Value.constant(np.array([i] if keeps else i, np.int64), f"{node.name or result.name}/at{i}")
        return add("Gather", x, at, last=last)

    product = factor(0, last=count == 1)
    for i in range(1, count):
        product = add("Mul", product, factor(i), last=i == count - 1, version=14)
    return made


def _common(a: ValueType | None, b: ValueType | None) -> ValueType | None:
    """The most specific type that includes both types."""
    if isinstance(a, SequenceType | OptionalType) and type(a) is type(b):
        return type(a)(_common(a.element, b.element))
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return a if a == b else None
    dtype = a.dtype if a.dtype == b.dtype else None
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return TensorType(dtype)
    return TensorType(dtype, tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True)))


def _stacked(type_: ValueType | None, length: Dim, axis: int = 0) -> ValueType | None:
    """The type of `length` tensors of one type stacked on a new axis."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return TensorType(type_.dtype) if isinstance(type_, TensorType) else None
    axis %= len(type_.shape) + 1
    return TensorType(type_.dtype, (*type_.shape[:axis], length, *type_.shape[axis:]))


MAX_ELEMENTS = 64
"""Inputs with more elements are never part of a signature by value."""


def shape_inputs(graph: Graph, static_inputs: Callable[[Node], Iterable[int]]) -> tuple[int, ...]:
    """Indices of the graph's inputs that determine, through shape arithmetic alone, an operand that must be known.

    Operands that must be known: those that `static_inputs` returns for a node (shapes, axes, repeats, ...), also in
    subgraphs, and the condition of an If. A floating-point input that is compared on the path is data and does not
    count.
    """
    wanted: list[Value] = []
    conditions: list[Value] = []

    def look(nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op_type == "If" and not node.domain and node.inputs[0] is not None:
                conditions.append(node.inputs[0])
            for i in static_inputs(node):
                v = node.inputs[i]
                if v is not None and v.data is None:
                    wanted.append(v)
            for body in node.subgraphs:
                look(body.nodes)

    look(graph.nodes)
    shapes = _sources(graph, wanted, through_comparisons=False)
    compared = [v for n in graph.nodes if traits_of(n).comparison and n.outputs[0] in shapes for v in n.uses()]
    tests = _sources(graph, conditions + compared, through_comparisons=True)
    return tuple(
        i
        for i, v in enumerate(graph.inputs)
        if v in shapes or (v in tests and v.dtype is not None and v.dtype.kind in "biu")
    )


def _sources(graph: Graph, values: Iterable[Value], *, through_comparisons: bool) -> set[Value]:
    """The values from which `values` are computed by shape arithmetic alone."""
    producers = graph.producers
    seen: set[Value] = set()
    work = list(values)
    while work:
        v = work.pop()
        if v in seen or v.data is not None:
            continue
        seen.add(v)
        i = producers.get(v)
        if i is None:
            continue
        traits = traits_of(graph.nodes[i])
        if traits.shape_arithmetic and (through_comparisons or not traits.comparison):
            work.extend(u for u in graph.nodes[i].inputs if u is not None)
    return seen


def is_settled(type_: ValueType | None, symbolic: bool = False) -> bool:
    """Whether run time would add nothing to the type: static tensors, strings, and types other than tensors. symbolic:
    tensors of symbolic shapes too."""
    if type_ is None:
        return False
    if symbolic and isinstance(type_, TensorType) and type_.shape is not None and None not in type_.shape:
        return True
    return not isinstance(type_, TensorType) or type_.is_static or type_.dtype == STRING
