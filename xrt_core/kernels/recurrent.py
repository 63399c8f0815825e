"""Recurrent networks: RNN, GRU and LSTM, one scan over time for each direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from xrt_core.errors import ShapeError
from xrt_core.kernels.movement import check_lengths
from xrt_core.kernels.namespace import narrow, scan, widen
from xrt_core.kernels.registry import OpContext, kernel

Activation = Callable[[Any], Any]
State = tuple[Any, ...]
Step = Callable[[State, Any], State]
"""Makes the next state from the last and one time step of the projected input, [batch, gates * hidden]."""

_ALPHA = {"affine": 1.0, "leakyrelu": 0.01, "thresholdedrelu": 1.0, "scaledtanh": 1.0, "hardsigmoid": 0.2, "elu": 1.0}
_BETA = {"affine": 0.0, "scaledtanh": 1.0, "hardsigmoid": 0.5}


def _sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


# name in lower case -> f(xp, x, alpha, beta); the list and its formulas are those of the operators' documentation
_ACTIVATIONS: dict[str, Callable[[Any, Any, float, float], Any]] = {
    "relu": lambda xp, x, a, b: xp.maximum(x, 0),
    "tanh": lambda xp, x, a, b: xp.tanh(x),
    "sigmoid": lambda xp, x, a, b: _sigmoid(xp, x),
    "affine": lambda xp, x, a, b: a * x + b,
    "leakyrelu": lambda xp, x, a, b: xp.where(x >= 0, x, a * x),
    "thresholdedrelu": lambda xp, x, a, b: xp.where(x >= a, x, xp.zeros_like(x)),
    "scaledtanh": lambda xp, x, a, b: a * xp.tanh(b * x),
    "hardsigmoid": lambda xp, x, a, b: xp.clip(a * x + b, 0, 1),
    "elu": lambda xp, x, a, b: xp.where(x >= 0, x, a * xp.expm1(xp.minimum(x, 0))),
    "softsign": lambda xp, x, a, b: x / (1 + xp.abs(x)),
    "softplus": lambda xp, x, a, b: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))),
}


def _activation(xp: Any, name: str, alpha: float, beta: float, clip: float | None) -> Activation:
    function = _ACTIVATIONS[name]
    if clip is None or clip <= 0:
        return lambda x: function(xp, x, alpha, beta)
    return lambda x: function(xp, xp.clip(x, -clip, clip), alpha, beta)


def activations_of(ctx: OpContext, default: tuple[str, ...], directions: int) -> list[list[Activation]]:
    """The activation functions of each direction, clipping of their inputs included.

    `activation_alpha` and `activation_beta` are used up in order by those functions that take one. Raises ShapeError
    for an unknown name or a list of the wrong length.
    """
    names = [str(n).lower() for n in ctx.attr("activations") or default * directions]
    if len(names) == len(default) * 2 and directions == 1:
        names = names[: len(default)]  # RNN's default in the schema names both directions
    unknown = [n for n in names if n not in _ACTIVATIONS]
    if unknown or len(names) != len(default) * directions:
        raise ShapeError(
            f"{ctx.node.operator} {ctx.node.name!r}: activations = {names} must be {len(default)} for each of "
            f"{directions} directions, out of {', '.join(sorted(_ACTIVATIONS))}"
        )
    alphas: Iterator[float] = iter(ctx.attr("activation_alpha") or ())
    betas: Iterator[float] = iter(ctx.attr("activation_beta") or ())
    clip = ctx.attr("clip")
    n, made = len(default), []
    for i, name in enumerate(names):
        alpha = next(alphas, _ALPHA[name]) if name in _ALPHA else 0.0
        beta = next(betas, _BETA[name]) if name in _BETA else 0.0
        # LSTM's third function, h(Ct), is not clipped: the text can be read either way, other frameworks leave it
        bound = clip if i % n < 2 else None
        made.append(_activation(ctx.xp, name, float(alpha), float(beta), bound))
    return [made[d * n : (d + 1) * n] for d in range(directions)]


class Direction(Struct, frozen=True):
    """The weights that a step of one direction reads; projection [input, gates * hidden] and bias are applied before.

    recurrence: R of shape [gates * hidden, hidden]; recurrent_bias: Rb if a step needs it separately, else None;
    peephole: P of shape [3 * hidden] or None; f: the activations.
    """

    recurrence: Any
    recurrent_bias: Any
    peephole: Any
    f: list[Activation]


def _recur(
    ctx: OpContext,
    inputs: tuple[Any, ...],
    *,
    default: tuple[str, ...],
    initial: tuple[Any, ...],
    peephole: Any,
    merge_bias: Callable[[Any, Any, int], tuple[Any, Any]],
    make_step: Callable[[Direction], Step],
) -> tuple[Any, ...]:
    """Run all directions; returns Y and the last value of every state, in the node's layout and dtype. W and R may be
    lists of their matrices.

    A sequence that is shorter than the batch's longest keeps its state past its end and gives zeros there; the
    reverse direction starts at its own end.
    """
    xp = ctx.xp
    x, w, r, b, lengths = inputs
    dtype, batch_first = x.dtype, bool(ctx.attr("layout", 0))
    direction = ctx.attr("direction", "forward") or "forward"
    reversals = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction)
    if reversals is None or len(w) != len(reversals):
        raise ShapeError(
            f"{ctx.node.operator} {ctx.node.name!r}: direction = {direction!r} and W, of {len(w)} matrices, do not "
            "fit: it takes forward, reverse or bidirectional, and W has one matrix a direction"
        )
    functions = activations_of(ctx, default, len(reversals))
    x = widen(xp.swapaxes(x, 0, 1) if batch_first else x)
    steps, batch, hidden = x.shape[0], x.shape[1], r[0].shape[1]
    zero = xp.zeros((batch, hidden), dtype=x.dtype)
    starts = [None if s is None else widen(xp.swapaxes(s, 0, 1) if batch_first else s) for s in initial]
    alive = None
    if lengths is not None:
        check_lengths(xp, lengths, steps, f"{ctx.node.operator} {ctx.node.name!r}: sequence_lens")
        alive = (xp.arange(steps)[:, None] < xp.reshape(lengths, (1, batch)))[:, :, None]
    outs, lasts = [], []
    for d, reverse in enumerate(reversals):
        projected = xp.matmul(x, widen(w[d]).T)
        recurrent_bias = None
        if b is not None:
            half = b.shape[1] // 2
            bias, recurrent_bias = merge_bias(widen(b[d][:half]), widen(b[d][half:]), hidden)
            projected = projected + bias
        p = None if peephole is None else widen(peephole[d])
        step = make_step(Direction(widen(r[d]), recurrent_bias, p, functions[d]))
        state: State = tuple(zero if s is None else s[d] for s in starts)
        state, ys = _over_time(xp, step, state, projected, alive, reverse, steps, ctx.wants(0))
        lasts.append(state)
        if ctx.wants(0):
            outs.append(ys[0] if steps else xp.zeros((0, batch, hidden), dtype=x.dtype))
    y = None
    if ctx.wants(0):
        y = narrow(xp.stack(outs, axis=1), dtype)
        y = xp.transpose(y, (2, 0, 1, 3)) if batch_first else y
    axis = 1 if batch_first else 0
    finals = (narrow(xp.stack(states, axis=axis), dtype) for states in zip(*lasts, strict=True))
    results = (y, *(final if ctx.wants(i + 1) else None for i, final in enumerate(finals)))
    return results[: max(ctx.num_outputs, 1)]


def _over_time(
    xp: Any, step: Step, state: State, projected: Any, alive: Any, reverse: bool, steps: int, wanted: bool
) -> tuple[State, State]:
    """Scan `step` over the projected input; `alive` [time, batch, 1] freezes the state of ended sequences."""
    if steps == 0:
        return state, ()

    def body(carry: State, now: tuple[Any, ...]) -> tuple[State, tuple[Any, ...]]:
        new = step(carry, now[0])
        shown = new[0]
        if alive is not None:
            new = tuple(xp.where(now[1], a, b) for a, b in zip(new, carry, strict=True))
            shown = xp.where(now[1], shown, xp.zeros_like(shown))
        return new, ((shown,) if wanted else ())

    xs = (projected,) if alive is None else (projected, alive)
    return scan(xp, body, state, xs, steps, reverse=reverse)


def _add(w_bias: Any, r_bias: Any, hidden: int) -> tuple[Any, Any]:
    """Both biases are added in advance."""
    return w_bias + r_bias, None


@kernel("RNN")
def rnn(ctx: OpContext, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
    """RNN: Ht = f(Xt W' + Ht-1 R' + Wb + Rb)."""

    def make_step(d: Direction) -> Step:
        f, recurrence = d.f[0], d.recurrence.T
        return lambda state, now: (f(now + ctx.xp.matmul(state[0], recurrence)),)

    return _recur(ctx, (x, w, r, b, lengths), default=("Tanh",), initial=(h,), peephole=None,
                  merge_bias=_add, make_step=make_step)  # fmt: skip


@kernel("GRU")
def gru(ctx: OpContext, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
    """GRU, gates in the order z, r, h; `linear_before_reset` resets after the product with R, bias included."""
    xp = ctx.xp
    linear = bool(ctx.attr("linear_before_reset", 0))

    def merge_bias(w_bias: Any, r_bias: Any, hidden: int) -> tuple[Any, Any]:
        if not linear:
            return w_bias + r_bias, None
        # Rbh is reset together with the product, so it is not part of the bias added in advance
        gates = r_bias[: 2 * hidden]
        ahead = xp.concatenate([gates, xp.zeros_like(r_bias[2 * hidden :])])
        return w_bias + ahead, r_bias[2 * hidden :]

    def make_step(d: Direction) -> Step:
        f, g = d.f
        n = d.recurrence.shape[1]
        whole = d.recurrence.T
        gates, last = whole[:, : 2 * n], whole[:, 2 * n :]

        def step(state: State, now: Any) -> State:
            (before,) = state
            product = xp.matmul(before, whole if linear else gates)
            zr = f(now[:, : 2 * n] + product[:, : 2 * n])
            z, reset = zr[:, :n], zr[:, n:]
            if linear:
                inner = product[:, 2 * n :]
                inner = reset * (inner if d.recurrent_bias is None else inner + d.recurrent_bias)
            else:
                inner = xp.matmul(reset * before, last)
            new = g(now[:, 2 * n :] + inner)
            return ((1 - z) * new + z * before,)

        return step

    return _recur(ctx, (x, w, r, b, lengths), default=("Sigmoid", "Tanh"), initial=(h,), peephole=None,
                  merge_bias=merge_bias, make_step=make_step)  # fmt: skip


@kernel("LSTM")
def lstm(
    ctx: OpContext,
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    lengths: Any = None,
    h: Any = None,
    c: Any = None,
    p: Any = None,
) -> Any:
    """LSTM, gates in the order i, o, f, c, peepholes in the order i, o, f; `input_forget` makes f = 1 - i."""
    xp = ctx.xp
    coupled = bool(ctx.attr("input_forget", 0))

    def make_step(d: Direction) -> Step:
        f, g, out = d.f
        n, recurrence, peep = d.recurrence.shape[1], d.recurrence.T, d.peephole

        def step(state: State, now: Any) -> State:
            before, cell = state
            gates = now + xp.matmul(before, recurrence)
            i, o, forget, new = (gates[:, k * n : (k + 1) * n] for k in range(4))
            if peep is not None:
                i, forget = i + peep[:n] * cell, forget + peep[2 * n :] * cell
            i = f(i)
            forget = 1 - i if coupled else f(forget)
            cell = forget * cell + i * g(new)
            o = f(o if peep is None else o + peep[n : 2 * n] * cell)
            return o * out(cell), cell

        return step

    return _recur(ctx, (x, w, r, b, lengths), default=("Sigmoid", "Tanh", "Tanh"), initial=(h, c), peephole=p,
                  merge_bias=_add, make_step=make_step)  # fmt: skip
