"""Reverse-mode automatic differentiation: extends a graph by the gradients of its loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrt_core.errors import GradientError, nearest
from xrt_core.frontends import ops
from xrt_core.frontends.promotion import is_float
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.frontends.tracing import Tracer, current_tracer, tracing
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.operator_set import find_operator
from xrt_core.ir.types import TensorType
from xrt_core.passes.simplify import DeadNodes
from xrt_core.training.gradient_context import Backward, Forward, check, describe, dialect, filled, known_as
from xrt_core.training.recomputation import keep_mark
from xrt_core.training.registry import find_composition, find_rule, is_constant

Which = Value | str | int


def gradients(graph: Graph, loss: Which, wrt: Sequence[Which], *, unused: str = "error") -> Graph:
    """Return `graph` with the gradients of `loss` with respect to each value of `wrt` as additional outputs, in order.

    loss: a scalar (or one-element) float: an output by index, or any value of the graph, as object or by name.
    wrt: floats of the graph: inputs, constants (weights) or results of nodes.
    unused: the gradient of a value of `wrt` on which the loss does not depend: "error" raises, "zeros" gives zeros.

    A gradient has the dtype and shape of its value and its name with the suffix ".gradient". Only nodes on a path from
    `wrt` to `loss` are differentiated. Values on these paths must have known dtypes and ranks; a rule that needs more
    raises. Linear in the number of nodes.

    Raises GradientError: the loss is not a float scalar, a value of `wrt` is not a float, there is no path from it to
    the loss, or an operator on a path has no rule (the message shows the path to the loss).
    """
    tracer = Tracer(graph.name or "graph", graph.opsets)
    tracer.reserve(_names(graph))
    table = _by_name(graph)
    target = _resolve(graph, table, loss, "the loss")
    sources = [_resolve(graph, table, w, "wrt") for w in wrt]
    tracer.scope.nodes.extend(graph.nodes)
    with tracing(tracer):
        found = backward(target, sources, unused=unused)
        outputs = [_output(tracer, graph, v, g) for v, g in zip(sources, found, strict=True)]
    made = graph.replace(
        nodes=tracer.scope.nodes,
        outputs=(*graph.outputs, *outputs),
        opsets={**graph.opsets, **{d: v for d, v in tracer.opsets.items() if d not in graph.opsets}},
    )
    return DeadNodes()(made)


def backward(loss: Value, wrt: Sequence[Value], *, unused: str = "error") -> list[Tensor]:
    """Record the gradients of `loss` with respect to each of `wrt` into the active trace. See `gradients`."""
    if unused not in ("error", "zeros"):
        raise GradientError(f"unused={unused!r}: it takes 'error' or 'zeros'")
    tracer = current_tracer("gradients")
    result: list[Tensor] = []
    for v, gradient in zip(wrt, found_backward(loss, wrt), strict=True):
        if gradient is None:
            if unused == "error":
                raise GradientError(
                    f"no gradient by {v.name!r}: the loss {loss.name!r} does not depend on it in a differentiable way; "
                    "leave it out, or ask for zeros with unused='zeros'"
                )
            gradient = filled(Tensor(v, tracer.scope))
        result.append(gradient)
    return result


def found_backward(loss: Value, wrt: Sequence[Value]) -> list[Tensor | None]:
    """As `backward`; None for values on which the loss does not depend differentiably."""
    t = loss.type
    if not isinstance(t, TensorType) or t.dtype is None or not is_float(t.dtype):
        raise GradientError(f"the loss {loss.name!r} is {t or 'of unknown type'}; it must be a float")
    if t.shape is None or any(d != 1 for d in t.shape):
        raise GradientError(
            f"the loss {loss.name!r} is {t}; it must be a scalar: reduce it with ReduceMean or ReduceSum"
        )
    for v in wrt:
        if not isinstance(v.type, TensorType) or v.type.dtype is None or not is_float(v.type.dtype):
            raise GradientError(f"no gradient by {v.name!r}: it is {v.type or 'of unknown type'}, not a float")
    seed = literal(np.ones([1] * len(t.shape)), t.dtype)
    found = reverse({loss: seed}, set(wrt))
    return [found.get(v) for v in wrt]


def stop_gradient(x: Tensor) -> Tensor:
    """Return the tensor unchanged; no gradient is propagated through it."""
    return dialect("StopGradient", x)


@dataclass(frozen=True, slots=True)
class _Active:
    """A node on the backward path. wanted: indices of the inputs to which gradients propagate. captures: the captured
    values to which they do."""

    node: Node
    wanted: frozenset[int]
    captures: tuple[Value, ...] = ()


def reverse(cotangents: Mapping[Value, Tensor], wrt: Collection[Value]) -> dict[Value, Tensor]:
    """Propagate cotangents (value of the current scope -> its gradient) backward; return the gradients of `wrt` that
    exist.

    Nodes with a composition are replaced in the scope by its nodes; nodes that the rules append come after all others.
    """
    tracer = current_tracer("gradients")
    scope = tracer.scope
    useful = _ancestors(scope.nodes, cotangents)
    scope.nodes[:] = _composed(tracer, scope.nodes, wrt, useful)
    active = _active(scope.nodes, wrt)
    consumers: dict[Value, list[Node]] | None = None
    parts: dict[Value, list[Tensor]] = {v: [g] for v, g in cotangents.items()}
    done: dict[Value, Tensor] = {}

    def total(v: Value | None) -> Tensor | None:
        if v is None:
            return None
        found = done.get(v)
        if found is None and v in parts:
            terms = parts.pop(v)
            found = terms[0] if len(terms) == 1 else ops.Sum(*terms) if len(terms) > 2 else terms[0] + terms[1]
            found = known_as(found, Tensor(v, scope))
            done[v] = found
        return found

    for a in reversed(active):
        node, wanted = a.node, a.wanted
        grads = tuple(total(v) for v in node.outputs)
        if all(g is None for g in grads):
            continue
        rule = find_rule(node.domain, node.op_type)
        if rule is None:
            if consumers is None:
                consumers = _consumers(scope.nodes)
            raise GradientError(
                f"no gradient rule for {describe(node)}, on the path to the loss: "
                f"{_path(node, consumers, cotangents)}. Register one with @xrt.training.gradient({node.op_type!r}"
                f"{f', domain={node.domain!r}' if node.domain else ''}), or stop there with xrt.training.stop_gradient"
            )
        ctx = Backward(
            node,
            tuple(None if v is None else Tensor(v, scope) for v in node.inputs),
            tuple(None if v is None else Tensor(v, scope) for v in node.outputs),
            grads,
            wanted,
            a.captures,
        )
        results = _ruled(tracer, node, lambda rule=rule, ctx=ctx: rule(ctx))  # type: ignore[misc]
        if isinstance(results, Tensor) or results is None:
            results = (results,)
        for v, g in zip(a.captures, results[len(node.inputs) :], strict=False):
            if g is not None:
                parts.setdefault(v, []).append(g)
        for i, g in enumerate(results[: len(node.inputs)]):
            if g is not None and i in wanted:
                check(node, i, g)
                source = node.inputs[i]
                assert source is not None
                parts.setdefault(source, []).append(g)
    return {v: g for v in dict.fromkeys(wrt) if (g := total(v)) is not None}


def differentiable(v: Value | None) -> bool:
    """Return whether a value has a float dtype, or an unknown one."""
    return v is not None and (v.dtype is None or is_float(v.dtype))


def _active(nodes: Iterable[Node], wrt: Collection[Value]) -> list[_Active]:
    """Return the nodes that depend differentiably on `wrt`, in order."""
    depends = set(wrt)
    found = []
    for n in nodes:
        wanted = frozenset(i for i, v in enumerate(n.inputs) if v in depends)
        captures = tuple(v for v in n.captures if v in depends) if n.attributes else ()
        if not wanted and not captures:
            continue
        if is_constant(n.domain, n.op_type):
            continue
        outputs = [v for v in n.outputs if v is not None and differentiable(v)]
        if outputs:
            found.append(_Active(n, wanted, captures))
            depends.update(outputs)
    return found


def _ancestors(nodes: Sequence[Node], targets: Iterable[Value]) -> set[Node]:
    """Return the nodes on which a target depends."""
    live, found = set(targets), set()
    for n in reversed(nodes):
        if any(v in live for v in n.outputs if v is not None):
            live.update(n.uses())
            found.add(n)
    return found


def _composed(tracer: Tracer, nodes: Sequence[Node], wrt: Collection[Value], useful: set[Node]) -> list[Node]:
    """Return the nodes, each active node that has a composition replaced by its composing nodes."""
    done, kept = list(nodes), set[Node]()
    while True:
        active = {a.node for a in _active(done, wrt)} & useful
        todo = {n for n in active if n not in kept and _is_composed(n)}
        if not todo:
            return done
        targets = [v for n in useful for v in n.outputs if v is not None]
        replaced: list[Node] = []
        for node in done:
            parts = _replacement(tracer, node) if node in todo else None
            if parts is None and node in todo:
                kept.add(node)
            replaced += [node] if parts is None else parts
        done = replaced
        useful = _ancestors(done, targets)


def _is_composed(node: Node) -> bool:
    if find_composition(node.domain, node.op_type) is not None:
        return True
    return find_rule(node.domain, node.op_type) is None and _has_body(node)


def _has_body(node: Node) -> bool:
    from xrt_core.ir.schema import find_schema

    own = find_operator(node.domain, node.op_type, node.version)
    if own is not None:
        return own.lowering is not None and not own.is_constant and not node.subgraphs
    found = find_schema(node.op_type, node.domain, node.version)
    onnx = None if found is None else found.onnx
    return onnx is not None and not node.subgraphs and (onnx.has_function or onnx.has_context_dependent_function)


def _replacement(tracer: Tracer, node: Node) -> list[Node] | None:
    """Return the nodes that compose `node` and produce its output values; None if it has no composition."""
    scope = tracer.scope
    start = len(scope.nodes)
    compose = find_composition(node.domain, node.op_type)
    if compose is None:
        results = _ruled(tracer, node, lambda: _body(node))
    else:
        given = tuple(None if v is None else Tensor(v, scope) for v in node.inputs)
        results = _ruled(tracer, node, lambda: compose(Forward(node, given)))
    keep_mark(tracer, start, node)
    made = scope.nodes[start:]
    del scope.nodes[start:]
    if results is None:
        return None
    if isinstance(results, Tensor):
        results = (results,)
    own = {v for n in made for v in n.outputs}
    rename: dict[Value, Value] = {}
    extra: list[Node] = []
    for v, r in zip(node.outputs, results, strict=False):
        if v is None or r is None:
            continue
        known = r._value.is_static and not v.is_static  # rules read the type that the composition found
        if r._value in own and r._value not in rename and not known:
            rename[r._value] = v
        else:
            extra.append(Node("Identity", (r._value,), (v,), version=tracer.schema("Identity").since_version))
    if rename:
        from xrt_core.ir.graph import substitute

        renamed = []
        for n in made:
            n = substitute(n, rename)
            if any(v in rename for v in n.outputs if v is not None):
                n = n.replace(outputs=[None if v is None else rename.get(v, v) for v in n.outputs])
            renamed.append(n)
        made = renamed
    return [*made, *extra]


def _body(node: Node) -> Sequence[Tensor | None] | None:
    """Record the standard's function body of an operator; return its outputs, or None if it has none."""
    from xrt_core.frontends.onnx_functions import function_body

    body = function_body(node)
    if body is None:
        return None
    tracer = current_tracer("gradients")
    given = [v for v in node.inputs if v is not None]
    new: dict[Value, Value] = dict(zip(body.inputs, given, strict=True))
    for n in body.nodes:
        from xrt_core.ir.schema import schema_for

        if n.subgraphs:
            return None
        made = tracer.emit(
            schema_for(n.op_type, n.domain, n.version),
            [None if v is None else new.get(v, v) for v in n.inputs],
            n.attributes,
            len(n.outputs),
        )
        new.update({old: v for old, v in zip(n.outputs, made, strict=True) if old is not None})
    outputs = iter(body.outputs)
    return [None if v is None else Tensor(new.get(o := next(outputs), o), tracer.scope) for v in node.outputs]


def _ruled(tracer: Tracer, node: Node, call: Callable[[], Any]) -> Any:
    """Run a rule. The nodes it appends get the forward node's name as prefix, its source line and its engine mark."""
    nodes = tracer.scope.nodes
    start = len(nodes)
    with tracer.inside(f"gradient.{node.name or node.op_type}"):
        try:
            result = call()
        except GradientError:
            raise
        except Exception as e:
            raise GradientError(f"the gradient of {describe(node)} cannot be built: {e}") from e
    a = node.annotations
    for i in range(start, len(nodes)):
        n = nodes[i]
        nodes[i] = n.replace(
            annotations=n.annotations.replace(source=a.source, engine=a.engine, region=a.region, device=a.device)
        )
    return result


def _consumers(nodes: Sequence[Node]) -> dict[Value, list[Node]]:
    found: dict[Value, list[Node]] = {}
    for n in nodes:
        for v in n.uses():
            found.setdefault(v, []).append(n)
    return found


def _path(node: Node, consumers: Mapping[Value, list[Node]], targets: Collection[Value]) -> str:
    """Return the operators on a shortest path from `node` to a target."""
    came: dict[Node, Node | None] = {node: None}
    todo = [node]
    for n in todo:
        if any(v in targets for v in n.outputs):
            names = []
            at: Node | None = n
            while at is not None:
                names.append(at.name or at.operator)
                at = came[at]
            names.reverse()
            shown = names if len(names) <= 8 else [*names[:4], "...", *names[-3:]]
            return " -> ".join(shown)
        for v in n.outputs:
            for c in consumers.get(v, ()) if v is not None else ():
                if c not in came:
                    came[c] = n
                    todo.append(c)
    return node.name or node.operator


def _names(graph: Graph) -> Iterable[str]:
    yield from (v.name for v in (*graph.inputs, *graph.outputs))
    for n in graph.nodes:
        yield n.name
        yield from (v.name for v in (*n.inputs, *n.outputs) if v is not None)
        for g in n.subgraphs:
            yield from _names(g)


def _by_name(graph: Graph) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for n in reversed(graph.nodes):
        found.update({v.name: v for v in (*n.inputs, *n.outputs) if v is not None and v.name})
    found.update({v.name: v for v in (*graph.outputs, *graph.inputs) if v.name})
    return found


def _resolve(graph: Graph, table: Mapping[str, Value], which: Which, what: str) -> Value:
    if isinstance(which, Value):
        return which
    if isinstance(which, str):
        if which not in table:
            raise GradientError(f"{what}: graph {graph.name!r} has no value {which!r}{nearest(which, table)}")
        return table[which]
    if not -len(graph.outputs) <= which < len(graph.outputs):
        raise GradientError(f"{what}: graph {graph.name!r} has {len(graph.outputs)} outputs, there is no {which}")
    return graph.outputs[which]


def _output(tracer: Tracer, graph: Graph, source: Value, gradient: Tensor) -> Value:
    """Return a new value for a gradient, named after the value that it is the gradient of the loss by."""
    name = tracer.fresh(f"{source.name or 'value'}.gradient")
    made: Tensor = ops.Identity(gradient)
    object.__setattr__(made._value, "name", name)  # the graph around the value is not built yet
    return made._value
