"""Compositions of the recurrent operators RNN, GRU and LSTM, unrolled over the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor
from xrt_core.training.gradient_context import Forward, where
from xrt_core.training.registry import composition
from xrt_core.training.rules.movement import literal_zeros, split

States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States], States]
"""(projected input of one step, states) -> new states; the first state is the output."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Any]] = {
    "sigmoid": lambda x: ops.Sigmoid(x),
    "tanh": lambda x: ops.Tanh(x),
    "relu": lambda x: ops.Relu(x),
    "softsign": lambda x: ops.Softsign(x),
    "softplus": lambda x: ops.Softplus(x),
}


def _activations(ctx: Forward, defaults: Sequence[str], direction: int) -> list[Callable[[Tensor], Any]]:
    given: Sequence[str] = ctx.attr("activations") or [*defaults, *defaults]
    names = list(given)[direction * len(defaults) :][: len(defaults)]
    if ctx.attr("activation_alpha") or ctx.attr("activation_beta"):
        raise ctx.error("the gradient covers activations without alpha and beta")
    found = [_ACTIVATIONS.get(str(n).lower()) for n in names]
    if any(f is None for f in found) or ctx.attr("clip"):
        raise ctx.error(f"the gradient covers no clip, and the activations {', '.join(_ACTIVATIONS)}, not {names}")
    return [f for f in found if f is not None]


def _unrolled(ctx: Forward, gates: int, states: int, cell_of: Callable[[int, Tensor, Any], Cell]) -> Any:
    """Return Y and the last states of a recurrent operator. cell_of: (direction, R, bias of R or None) -> its cell."""
    x, w, r, bias, lengths = ctx.inputs[0], ctx.inputs[1], ctx.inputs[2], ctx.input(3), ctx.input(4)
    if ctx.attr("layout", 0):
        x = x.transpose([1, 0, 2])
    steps, batch, _ = ctx.shape(x)
    hidden = ctx.shape(r)[2]
    kind = str(ctx.attr("direction", "forward") or "forward")
    if steps == 0:
        raise ctx.error("the sequence is empty")
    ys: list[Tensor] = []
    lasts: list[list[Tensor]] = [[] for _ in range(states)]
    for d in range(2 if kind == "bidirectional" else 1):
        backwards = kind == "reverse" or d == 1
        own = x @ w[d].T
        recurrent_bias = None
        if bias is not None:
            own = own + bias[d, : gates * hidden]
            recurrent_bias = bias[d, gates * hidden :]
        cell = cell_of(d, r[d], recurrent_bias)
        parts = [p.squeeze(0) for p in split(own, [1] * steps, 0)]
        state = tuple(_initial(ctx, 5 + k, d, x, (batch, hidden)) for k in range(states))
        outputs: list[Tensor] = [state[0]] * steps
        for t in range(steps - 1, -1, -1) if backwards else range(steps):
            new = cell(parts[t], state)
            shown = new[0]
            if lengths is not None:
                alive = (lengths > t).unsqueeze(1)
                new = tuple(where(alive, a, b) for a, b in zip(new, state, strict=True))
                shown = where(alive, shown, 0.0)
            outputs[t], state = shown, new
        ys.append(ops.Concat(*[y.unsqueeze([0, 1]) for y in outputs], axis=0))
        for k in range(states):
            lasts[k].append(state[k].unsqueeze(0))
    y = ys[0] if len(ys) == 1 else ops.Concat(*ys, axis=1)
    ends = [e[0] if len(e) == 1 else ops.Concat(*e, axis=0) for e in lasts]
    if ctx.attr("layout", 0):
        y, ends = y.transpose([2, 0, 1, 3]), [e.transpose([1, 0, 2]) for e in ends]
    return [y, *ends]


def _initial(ctx: Forward, index: int, direction: int, x: Tensor, shape: tuple[int, int]) -> Tensor:
    given = ctx.input(index)
    if given is None:
        return literal_zeros(x, shape)
    made: Tensor = given[:, direction] if ctx.attr("layout", 0) else given[direction]
    return made


def _wanted(ctx: Forward, results: list[Any]) -> list[Any]:
    return [r if v is not None else None for v, r in zip(ctx.node.outputs, results, strict=False)]


@composition("RNN")
def rnn(ctx: Forward) -> Any:
    """H = f(X W' + H R' + b)."""

    def cell_of(d: int, r: Tensor, bias: Any) -> Cell:
        (f,) = _activations(ctx, ("Tanh",), d)

        def cell(x: Tensor, states: States) -> States:
            total = x + states[0] @ r.T
            return (f(total if bias is None else total + bias),)

        return cell

    return _wanted(ctx, _unrolled(ctx, 1, 1, cell_of))


@composition("GRU")
def gru(ctx: Forward) -> Any:
    """The gates z and r, and the candidate, with the reset before or after the product."""
    hidden = ctx.shape(ctx.inputs[2])[2]
    after = bool(ctx.attr("linear_before_reset", 0))

    def cell_of(d: int, r: Tensor, bias: Any) -> Cell:
        f, g = _activations(ctx, ("Sigmoid", "Tanh"), d)
        gates, candidate = r[: 2 * hidden], r[2 * hidden :]
        gate_bias = None if bias is None else bias[: 2 * hidden]
        candidate_bias = None if bias is None else bias[2 * hidden :]

        def cell(x: Tensor, states: States) -> States:
            h = states[0]
            total = x[:, : 2 * hidden] + h @ gates.T
            both = f(total if gate_bias is None else total + gate_bias)
            z, reset = both[:, :hidden], both[:, hidden:]
            own = h @ candidate.T if after else (reset * h) @ candidate.T
            own = own if candidate_bias is None else own + candidate_bias
            new = g(x[:, 2 * hidden :] + (reset * own if after else own))
            return ((1.0 - z) * new + z * h,)

        return cell

    return _wanted(ctx, _unrolled(ctx, 3, 1, cell_of))


@composition("LSTM")
def lstm(ctx: Forward) -> Any:
    """The gates i, o and f, the candidate and the cell."""
    hidden = ctx.shape(ctx.inputs[2])[2]
    if ctx.input(7) is not None or ctx.attr("input_forget", 0):
        raise ctx.error("the gradient covers LSTMs without peepholes and with a forget gate of their own")

    def cell_of(d: int, r: Tensor, bias: Any) -> Cell:
        f, g, h_of = _activations(ctx, ("Sigmoid", "Tanh", "Tanh"), d)

        def cell(x: Tensor, states: States) -> States:
            h, c = states
            total = x + h @ r.T
            total = total if bias is None else total + bias
            i, o, forget = (f(total[:, k * hidden : (k + 1) * hidden]) for k in range(3))
            c = forget * c + i * g(total[:, 3 * hidden :])
            return o * h_of(c), c

        return cell

    return _wanted(ctx, _unrolled(ctx, 4, 2, cell_of))
