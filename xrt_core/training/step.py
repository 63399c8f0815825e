"""The graph of one training step (forward, backward, update) for one signature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from xrt_core.errors import GradientError, OptionError
from xrt_core.frontends import ops
from xrt_core.frontends.promotion import FLOAT32, INT64
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.frontends.tracing import Tracer, current_tracer, tracing
from xrt_core.ir.graph import Graph, Node, Value
from xrt_core.ir.types import TensorType
from xrt_core.passes.pass_base import run_passes
from xrt_core.passes.rematerialization import Recompute, forward_pass
from xrt_core.passes.simplify import CommonSubexpressions, DeadNodes, IdentityNodes
from xrt_core.training.autodiff import found_backward
from xrt_core.training.checks import IndexRange, index_ranges
from xrt_core.training.gradient_context import dialect, emit, filled, where
from xrt_core.training.losses import LossFunction, unknown_loss
from xrt_core.training.optimizer import Moment, Optimizer, finite
from xrt_core.training.recomputation import keep_mark
from xrt_core.training.transformation import Transformation, gradient_name
from xrt_core.training.variables import Variable

STEP, SCALE, STREAK = "training/step", "training/loss_scale", "training/finite_steps"
MICRO = "training/micro_step"
EXAMPLES = "training/examples"
SKIPPED = "training/skipped"
FINITE = "training/finite"
"""Whether the gradients of the last update were, for a transformation that is applied after the step."""
RATE = "training/learning_rate"


@dataclass(frozen=True, slots=True)
class LossScale:
    """Loss scaling: the loss is multiplied by a scale before the backward pass, so that small gradients of narrow
    floats do not underflow.

    A step whose gradients are not finite leaves the variables as they are; the state counts it ("training/skipped").

    initial: the scale. dynamic: after such a step multiply the scale by `backoff`; after `interval` consecutive finite
    steps, multiply it by `growth`. Raises OptionError for values out of range.
    """

    initial: float = 2.0**15
    dynamic: bool = True
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        """Raise OptionError for values with which the scale would not move as it should."""
        limits = {
            "initial": (0 < self.initial < math.inf, "a finite number above 0"),
            "growth": (1 < self.growth < math.inf, "a finite number above 1"),
            "backoff": (0 < self.backoff < 1, "a number between 0 and 1"),
            "interval": (isinstance(self.interval, int) and self.interval >= 1, "a whole number of at least 1"),
        }
        for name, (fits, expected) in limits.items():
            if not fits:
                raise OptionError(f"LossScale({name}={getattr(self, name)!r}): it takes {expected}")


def loss_scale_of(given: Any) -> LossScale | None:
    """Parse the option `loss_scale`: None, a number, "dynamic", or a LossScale. Raises OptionError otherwise."""
    if given is None or isinstance(given, LossScale):
        return given
    if isinstance(given, str) and given == "dynamic":
        return LossScale()
    if isinstance(given, Real) and not isinstance(given, bool) and 0 < float(given) < math.inf:
        return LossScale(float(given), dynamic=False)
    raise OptionError(f"loss_scale={given!r}: it takes None, a finite number above 0, 'dynamic' or a LossScale")


def initial_state(
    variables: Sequence[Variable], optimizer: Optimizer, scale: LossScale | None, accumulate: int = 1
) -> dict[str, np.ndarray]:
    """Return the state before the first step: everything that a step reads and writes, by name."""
    state = {v.name: v.value for v in variables}
    for v in variables:
        if v.trained:
            for slot in optimizer.slots:
                state[slot_name(slot, v.name)] = optimizer.initial(slot, v.value)
            if optimizer.ema is not None:
                state[ema_name(v.name)] = np.array(v.value)
    if isinstance(optimizer, Transformation):
        state |= optimizer.leaves({v.name: v.value for v in variables if v.trained})
    if accumulate > 1:
        state |= {sum_name(v.name): np.zeros(v.value.shape, v.value.dtype) for v in variables if v.trained}
        state |= {MICRO: np.zeros((), np.int64), EXAMPLES: np.zeros((), np.float32)}
    state[STEP] = np.zeros((), np.int64)
    if scale is not None:
        state[SKIPPED] = np.zeros((), np.int64)
        if isinstance(optimizer, Transformation):
            state[FINITE] = np.ones((), np.bool_)
    if scale is not None and scale.dynamic:
        state[SCALE] = np.array(scale.initial, np.float32)
        state[STREAK] = np.zeros((), np.int64)
    return state


def slot_name(slot: str, variable: str) -> str:
    """Return the name in the state of one slot of a variable."""
    return f"optimizer/{slot}/{variable}"


def ema_name(variable: str) -> str:
    """Return the name in the state of the running mean of a variable."""
    return f"optimizer/ema/{variable}"


def sum_name(variable: str) -> str:
    """Return the name in the state of the sum of a variable's gradients over the examples of the micro-batches so far
    (`EXAMPLES` in number): of each micro-batch's gradient times the number of its examples."""
    return f"optimizer/sum/{variable}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The configuration of a step graph, apart from the model.

    loss, accumulate, donate: see `TrainModule`. names: of the state, in order. recompute: the rematerialization pass.
    named: whether the user listed the trained variables; the loss must then depend on each of them.
    """

    variables: Sequence[Variable]
    optimizer: Optimizer
    loss: LossFunction | str | int | None
    scale: LossScale | None
    seed: int
    names: tuple[str, ...]
    dropout: bool = True
    batch_norm: bool = True
    accumulate: int = 1
    donate: bool = True
    recompute: Recompute | None = None
    named: bool = False


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graph of a step. reads, writes: names of the state entries of its last inputs, and of its outputs after the
    loss. metrics: names of the last outputs, which the loss function gave beside the loss.

    ranges: range checks of its integer inputs.
    """

    graph: Graph
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    ranges: tuple[IndexRange, ...]
    metrics: tuple[str, ...] = ()


def training_graph(
    forward: Graph,
    extra: Mapping[str, TensorType],
    state: Mapping[str, TensorType],
    recipe: Recipe,
    update: bool = True,
    examples: int = 1,
) -> StepGraph:
    """Build the graph of a step from a specialised forward graph whose last inputs are the variables, in order.

    Its inputs: those of the model, those that only the loss reads (`extra`), the learning rate, the state. Its outputs:
    the loss, and the new state, each entry from an Assign that may alias the old entry's storage.
    update: True updates the variables, False only adds the gradients to the sums over micro-batches. examples: how many
    the batch has; micro-batches count by that.
    Raises GradientError if the loss is not a scalar, or a gradient cannot be built.
    """
    tracer = Tracer(forward.name or "model", {})  # the newest opsets; the model's own nodes keep their versions
    tracer.reserve(v.name for n in forward.nodes for v in (*n.inputs, *n.outputs) if v is not None)
    tracer.reserve(n.name for n in forward.nodes)
    tracer.reserve([v.name for v in forward.inputs])
    count = len(forward.inputs) - len(recipe.variables)
    values = {v.name: v for v in forward.inputs[count:]}
    values |= {n: Value(n, t) for n, t in state.items() if n not in values}
    added = {n: Value(n, t) for n, t in extra.items()}
    rate = Value(RATE, TensorType(FLOAT32, recipe.optimizer.rates_at(0).shape))
    with tracing(tracer):
        scope = tracer.scope
        read = {n: Tensor(v, scope) for n, v in values.items()}
        turn = read[STEP] if recipe.accumulate == 1 else read[STEP] * recipe.accumulate + read[MICRO]
        running = _forward(tracer, forward, turn, recipe)
        loss, shown = _loss(tracer, forward, added, recipe.loss, forward.inputs[:count])
        gradients = _unscaled_gradients(loss, read, recipe)
        start, new = _new_state(read, gradients, Tensor(rate, scope), recipe, update, examples)
        for name, v in running.items():
            fresh = Tensor(v, scope)
            kept = recipe.scale is not None  # an overflow skips statistics too
            new[name] = where(finite([fresh]), fresh, read[name]) if kept else fresh
        writes, made = _written(read, new, recipe)
        nodes = scope.nodes[:start] + [_as_update(n, recipe.donate) for n in scope.nodes[start:]]
    reads = _read(values, nodes, recipe)
    inputs = [*forward.inputs[:count], *added.values(), rate, *(values[n] for n in reads)]
    graph = Graph(
        inputs, [loss._value, *made, *(t._value for t in shown.values())], nodes,
        opsets={**forward.opsets, **tracer.opsets}, name=forward.name,
    )  # fmt: skip
    graph = _finished(graph, recipe)
    return StepGraph(graph, tuple(reads), tuple(writes), index_ranges(graph), tuple(shown))


def in_inference(graph: Graph, recipe: Recipe) -> Graph:
    """The graph with Dropout and BatchNormalization as in inference, also where its nodes ask for training: those whose
    mode is the recipe's affair, of which BatchNormalization with running statistics that it follows."""
    running = {v.name for v in recipe.variables if not v.trained} if recipe.batch_norm else set()
    read = {v for n in graph.nodes for v in n.uses()} | set(graph.outputs)

    def form(n: Node) -> Node:
        if n.domain:
            return n
        if n.op_type == "Dropout" and n.version >= 12 and recipe.dropout:
            return n.replace(inputs=n.inputs[:2])
        if n.op_type == "BatchNormalization" and n.attributes.get("training_mode"):
            own = {v.name for v in n.inputs[3:5] if v is not None}
            if own <= running and not read.intersection(n.outputs[1:]):
                return n.replace(outputs=n.outputs[:1], attributes={**n.attributes, "training_mode": 0})
        return n

    return graph.replace(nodes=[form(n) for n in graph.nodes])


def evaluation_graph(forward: Graph, extra: Mapping[str, TensorType], recipe: Recipe, with_loss: bool) -> StepGraph:
    """Build the graph of the model in inference, from a specialised forward graph whose last inputs are the variables.

    Its inputs: those of the model, those that only the loss reads (`extra`), the variables; its outputs: with_loss the
    loss, then those of the model.
    """
    forward = in_inference(forward, recipe)
    tracer = Tracer(forward.name or "model", {})
    tracer.reserve(v.name for n in forward.nodes for v in (*n.inputs, *n.outputs) if v is not None)
    tracer.reserve(n.name for n in forward.nodes)
    tracer.reserve([v.name for v in forward.inputs])
    count = len(forward.inputs) - len(recipe.variables)
    added = {n: Value(n, t) for n, t in extra.items()}
    outputs = list(forward.outputs)
    with tracing(tracer):
        tracer.scope.nodes.extend(forward.nodes)
        if with_loss:
            outputs.insert(0, _loss(tracer, forward, added, recipe.loss, forward.inputs[:count])[0]._value)
        nodes = tracer.scope.nodes
    inputs = [*forward.inputs[:count], *added.values(), *forward.inputs[count:]]
    graph = Graph(inputs, outputs, nodes, opsets={**forward.opsets, **tracer.opsets}, name=forward.name)
    graph = run_passes(graph, (IdentityNodes(), CommonSubexpressions(), DeadNodes()))
    return StepGraph(graph, tuple(v.name for v in recipe.variables), (), index_ranges(graph))


def gradient_graph(
    forward: Graph, extra: Mapping[str, TensorType], state: Mapping[str, TensorType], recipe: Recipe
) -> StepGraph:
    """Build the graph of the gradients that a step would use, without loss scaling, clipping or an update: its outputs
    are the loss and the gradient of each trained variable, in order."""
    tracer = Tracer(forward.name or "model", {})
    tracer.reserve(v.name for n in forward.nodes for v in (*n.inputs, *n.outputs) if v is not None)
    tracer.reserve(n.name for n in forward.nodes)
    tracer.reserve([v.name for v in forward.inputs])
    count = len(forward.inputs) - len(recipe.variables)
    values = {v.name: v for v in forward.inputs[count:]}
    values |= {n: Value(n, t) for n, t in state.items() if n not in values}
    added = {n: Value(n, t) for n, t in extra.items()}
    with tracing(tracer):
        scope = tracer.scope
        read = {n: Tensor(v, scope) for n, v in values.items()}
        turn = read[STEP] if recipe.accumulate == 1 else read[STEP] * recipe.accumulate + read[MICRO]
        _forward(tracer, forward, turn, recipe)
        loss, _ = _loss(tracer, forward, added, recipe.loss, forward.inputs[:count])
        found = _gradients(loss, [read[v.name] for v in recipe.variables if v.trained], recipe.named)
        nodes = scope.nodes
    reads = _read(values, nodes, recipe)
    inputs = [*forward.inputs[:count], *added.values(), *(values[n] for n in reads)]
    outputs = [loss._value, *(g._value for g in found)]
    graph = Graph(inputs, outputs, nodes, opsets={**forward.opsets, **tracer.opsets}, name=forward.name)
    graph = _finished(graph, recipe)
    return StepGraph(graph, tuple(reads), (), index_ranges(graph))


def update_graph(state: Mapping[str, TensorType], recipe: Recipe) -> StepGraph:
    """Build the graph of an update by the micro-batches so far. Its inputs: the learning rate, the state; its outputs:
    the new state."""
    tracer = Tracer("update", {})
    values = {n: Value(n, t) for n, t in state.items()}
    rate = Value(RATE, TensorType(FLOAT32, recipe.optimizer.rates_at(0).shape))
    with tracing(tracer):
        scope = tracer.scope
        read = {n: Tensor(v, scope) for n, v in values.items()}
        _, new = _new_state(read, None, Tensor(rate, scope), recipe, True)
        writes, made = _written(read, new, recipe)
        nodes = [_as_update(n, recipe.donate) for n in scope.nodes]
    reads = _read(values, nodes, recipe)
    graph = Graph([rate, *(values[n] for n in reads)], made, nodes, opsets=dict(tracer.opsets), name="update")
    return StepGraph(_finished(graph, recipe), tuple(reads), tuple(writes), ())


def _written(read: Mapping[str, Tensor], new: Mapping[str, Tensor], recipe: Recipe) -> tuple[list[str], list[Value]]:
    """The names of the state that are written, and the outputs that hold them."""
    names = [n for n in recipe.names if n in new]
    return names, [_assign(read[n], new[n], n) for n in names]


def _read(values: Mapping[str, Value], nodes: Sequence[Node], recipe: Recipe) -> list[str]:
    """The names of the state that nodes use."""
    used = {v for n in nodes for v in n.uses()}
    return [n for n in recipe.names if values[n] in used]


def _unscaled_gradients(loss: Tensor, read: Mapping[str, Tensor], recipe: Recipe) -> list[Tensor]:
    """Return the gradients of the trained variables, computed from the scaled loss and unscaled if there is a scale."""
    scaled, scale = _scaled(loss, read, recipe.scale)
    gradients = _gradients(scaled, [read[v.name] for v in recipe.variables if v.trained], recipe.named)
    return gradients if scale is None else [g / scale.astype(g.dtype) for g in gradients]


def _new_state(
    read: Mapping[str, Tensor],
    gradients: list[Tensor] | None,
    rate: Tensor,
    recipe: Recipe,
    update: bool,
    examples: int = 1,
) -> tuple[int, dict[str, Tensor]]:
    """Return the index in the scope of the first node of the update, and name -> new value of the state without running
    statistics.

    Sums over micro-batches belong to the update: they are written in place. gradients: None where the sums hold all.
    """
    nodes = current_tracer("an update").scope.nodes
    trained = [v for v in recipe.variables if v.trained]
    many = recipe.accumulate > 1
    start = len(nodes)
    if many:
        sums, total = {v.name: read[sum_name(v.name)] for v in trained}, read[EXAMPLES]
        if gradients is not None:
            sums = {v.name: sums[v.name] + g * float(examples) for v, g in zip(trained, gradients, strict=True)}
            total = total + float(examples)
        if not update:
            return start, {sum_name(n): s for n, s in sums.items()} | {MICRO: read[MICRO] + 1, EXAMPLES: total}
        gradients = [s / total.astype(s.dtype) for s in sums.values()]
    assert gradients is not None
    sound = finite(gradients) if recipe.scale is not None else None
    gradients = recipe.optimizer.clipped([v.name for v in trained], gradients)
    if not many:
        start = len(nodes)
    if isinstance(recipe.optimizer, Transformation):
        new = {gradient_name(v.name): g for v, g in zip(trained, gradients, strict=True)}
    else:
        new = _updates(read, trained, gradients, rate, recipe.optimizer)
    new[STEP] = read[STEP] + 1
    if sound is not None:
        assert recipe.scale is not None
        new = {n: where(sound, t, read[n]) for n, t in new.items()}
        new[SKIPPED] = where(sound, read[SKIPPED], read[SKIPPED] + 1)
        if isinstance(recipe.optimizer, Transformation):
            new[FINITE] = sound
        new |= _next_scale(read, sound, recipe.scale) if recipe.scale.dynamic else {}
    if many:
        new |= {sum_name(v.name): filled(read[sum_name(v.name)]) for v in trained}
        new |= {MICRO: literal(0, INT64), EXAMPLES: literal(0.0, FLOAT32)}
    return start, new


def _finished(graph: Graph, recipe: Recipe) -> Graph:
    """Simplify the graph, set the phase of each node, and apply rematerialization."""
    graph = run_passes(graph, (IdentityNodes(), CommonSubexpressions(), DeadNodes()))
    forward = set(forward_pass(graph))  # the other nodes exist in training alone, which not every engine supports
    graph = graph.replace(nodes=[n if i in forward else _of_training(n) for i, n in enumerate(graph.nodes)])
    return graph if recipe.recompute is None else run_passes(graph, (recipe.recompute, DeadNodes()))


def _gradients(loss: Tensor, variables: Sequence[Tensor], named: bool) -> list[Tensor]:
    """Return the gradients of the variables, zeros for those on which the loss does not depend. Raises GradientError
    for such a variable if the user listed them, or if the loss depends on none."""
    found = found_backward(loss._value, [v._value for v in variables])
    stray = [v.name for v, g in zip(variables, found, strict=True) if g is None]
    if stray and (named or len(stray) == len(found)):
        some = ", ".join(map(repr, stray[:4])) + (", ..." if len(stray) > 4 else "")
        raise GradientError(
            f"the loss does not depend on {some} in a differentiable way"
            + ("; leave that out of trainable=[...]" if named else ", which is all there is to train")
        )
    return [filled(v) if g is None else g for v, g in zip(variables, found, strict=True)]


def _forward(tracer: Tracer, forward: Graph, step: Tensor, recipe: Recipe) -> dict[str, Value]:
    """Record the model in training mode; return the new running statistics by the variable's name."""
    scope = tracer.scope
    variables = {v.name for v in recipe.variables if not v.trained}
    running: dict[str, Value] = {}
    stream = 0
    for node in forward.nodes:
        start = len(scope.nodes)
        if node.op_type == "BatchNormalization" and not node.domain and recipe.batch_norm:
            _batch_norm(tracer, node, variables, running)
        elif node.op_type == "Dropout" and not node.domain and recipe.dropout:
            stream += 1
            _dropout(tracer, node, step, recipe.seed, stream)
            keep_mark(tracer, start, node)
        else:
            scope.nodes.append(node)
    return running


def _batch_norm(tracer: Tracer, node: Node, variables: set[str], running: dict[str, Value]) -> None:
    """Record BatchNormalization in training mode if its running statistics are variables."""
    scope = tracer.scope
    means = node.inputs[3:5]
    if any(v is None or v.name not in variables for v in means):  # computed or frozen statistics: keep the model's mode
        scope.nodes.append(node)
        return
    old = [v for v in node.outputs[1:3] if v is not None] if node.version >= 14 else []
    keep: dict[str, Any] = {k: a for k, a in node.attributes.items() if k in ("epsilon", "momentum")}
    given = [None if v is None else Tensor(v, scope) for v in node.inputs]
    y, mean, variance = emit("BatchNormalization", given, opset=15, outputs=3, **keep, training_mode=1)
    made = scope.nodes.pop()
    rename = {y._value: node.outputs[0]}
    for fresh, stale in zip((mean._value, variance._value), old, strict=False):
        rename[fresh] = stale
    outputs = [rename.get(v, v) for v in made.outputs if v is not None]
    scope.nodes.append(
        Node("BatchNormalization", node.inputs, outputs, made.attributes, version=made.version, name=node.name,
             annotations=node.annotations)
    )  # fmt: skip
    for variable, v in zip(means, outputs[1:], strict=True):
        assert variable is not None
        assert v is not None
        running[variable.name] = v


def _dropout(tracer: Tracer, node: Node, step: Tensor, seed: int, stream: int) -> None:
    """Record Dropout with counter-based random numbers: a function of the seed, the step and the node's index."""
    scope = tracer.scope
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    x = Tensor(source, scope)
    ratio: Any = node.attributes.get("ratio", 0.5)
    if node.version >= 12:
        second = node.inputs[1] if len(node.inputs) > 1 else None
        data = tracer.data_of(second)
        ratio = 0.5 if second is None else Tensor(second, scope) if data is None else float(np.reshape(data, ()))
    if result is None or (isinstance(ratio, float) and ratio == 0.0) or not x._value.is_static:
        scope.nodes.append(node)
        return
    if isinstance(ratio, Tensor):
        ratio = ratio.astype(np.float32)
    key = step + (seed << 32)
    drawn = dialect("CounterUniform", key, shape=tuple(x.shape), stream=stream)
    kept = drawn >= ratio
    scale = 1.0 / (1.0 - ratio)
    where(kept, x * (scale.astype(x.dtype) if isinstance(scale, Tensor) else scale), 0.0)
    last = scope.nodes.pop()
    scope.nodes.append(last.replace(outputs=[result]))
    mask = node.outputs[1] if len(node.outputs) > 1 else None
    if mask is not None:
        scope.nodes.append(Node("Identity", [kept._value], [mask], version=tracer.schema("Identity").since_version))


def _loss(
    tracer: Tracer,
    forward: Graph,
    extra: Mapping[str, Value],
    loss: LossFunction | str | int | None,
    own: Sequence[Value],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss in the scope, and the metrics that its function gave beside it. own: the model's inputs without
    variables."""
    scope = tracer.scope
    names = [v.name for v in forward.outputs]
    if isinstance(loss, LossFunction):
        labels, inputs = ({v.name: Tensor(v, scope) for v in values} for values in (extra.values(), own))
        found = loss([Tensor(v, scope) for v in forward.outputs], names, inputs, labels)
        shown: Any = {}
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
            found, shown = found
        if not isinstance(found, Tensor) or not all(isinstance(t, Tensor) for t in shown.values()):
            raise GradientError(
                f"the loss function returned a {type(found).__name__}; it returns a tensor, or a tensor and a dict of "
                "further ones by name"
            )
        return found, dict(shown)
    if isinstance(loss, str) and loss not in names:
        raise unknown_loss(loss, names)
    index = 0 if loss is None else names.index(loss) if isinstance(loss, str) else loss
    if not 0 <= index < len(names):
        raise GradientError(f"loss={index}: the model has {len(names)} outputs")
    return Tensor(forward.outputs[index], scope), {}


def _scaled(loss: Tensor, read: Mapping[str, Tensor], scale: LossScale | None) -> tuple[Tensor, Tensor | None]:
    if scale is None:
        return loss, None
    factor = read[SCALE] if scale.dynamic else literal(scale.initial, FLOAT32)
    return loss * factor.astype(loss.dtype), factor


def _updates(
    read: Mapping[str, Tensor],
    trained: Sequence[Variable],
    gradients: Sequence[Tensor],
    rate: Tensor,
    optimizer: Optimizer,
) -> dict[str, Tensor]:
    """Return name -> new value of the variables and their slots."""
    count = read[STEP] + 1
    new: dict[str, Tensor] = {}
    for v, g in zip(trained, gradients, strict=True):
        slots = {s: read[slot_name(s, v.name)] for s in optimizer.slots}
        index = optimizer.rate_index(v.name)
        at = Moment(rate if index is None else rate[index], count)
        results = optimizer.update(at, read[v.name], g, slots, optimizer.decay_of(v.name, v.value.shape))
        names = (v.name, *(slot_name(s, v.name) for s in optimizer.slots))
        new.update(zip(names, results, strict=True))
        if optimizer.ema is not None:
            mean = read[ema_name(v.name)]
            new[ema_name(v.name)] = mean * optimizer.ema + new[v.name] * (1.0 - optimizer.ema)
    return new


def _next_scale(read: Mapping[str, Tensor], sound: Tensor, scale: LossScale) -> dict[str, Tensor]:
    streak = where(sound, read[STREAK] + 1, literal(0, INT64))
    full = streak >= scale.interval
    grown = where(full, read[SCALE] * scale.growth, read[SCALE])
    lowered = ops.Max(read[SCALE] * scale.backoff, 1.0)
    return {SCALE: where(sound, grown, lowered), STREAK: where(full, literal(0, INT64), streak)}


def _assign(old: Tensor, new: Tensor, name: str) -> Value:
    made = dialect("Assign", old, new)._value
    object.__setattr__(made, "name", f"{name}.new")  # the graph around the value is not built yet
    return made


def _of_training(node: Node) -> Node:
    return node.replace(annotations=node.annotations.replace(phase="train"))


def _as_update(node: Node, donate: bool) -> Node:
    aliases = ((0, 0),) if donate and node.op_type == "Assign" and node.domain == "xrt" else ()
    return node.replace(annotations=node.annotations.replace(model_update=True, phase="train", aliases=aliases))
