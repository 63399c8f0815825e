"""Compositions of the recurrent operators RNN, GRU, LSTM and LinearAttention: Scans, whose gradients are Scans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xrt_core.frontends import ops
from xrt_core.frontends.tensor import Tensor, literal
from xrt_core.training.gradient_context import Forward, where, wide
from xrt_core.training.registry import composition
from xrt_core.training.rules.movement import literal_zeros

States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States], States]
"""(projected input of one step, states) -> new states; the first state is the output."""
Activation = Callable[[Any], Any]

# name -> its function of x, alpha and beta; defaults of alpha and beta, None where it takes none
_ACTIVATIONS: dict[str, tuple[Callable[[Any, float, float], Any], float | None, float | None]] = {
    "affine": (lambda x, a, b: x * a + b, 1.0, 0.0),
    "elu": (lambda x, a, b: ops.Elu(x, alpha=a), 1.0, None),
    "hardsigmoid": (lambda x, a, b: ops.HardSigmoid(x, alpha=a, beta=b), 0.2, 0.5),
    "leakyrelu": (lambda x, a, b: ops.LeakyRelu(x, alpha=a), 0.01, None),
    "relu": (lambda x, a, b: ops.Relu(x), None, None),
    "scaledtanh": (lambda x, a, b: ops.Tanh(x * b) * a, 1.0, 1.0),
    "sigmoid": (lambda x, a, b: ops.Sigmoid(x), None, None),
    "softplus": (lambda x, a, b: ops.Softplus(x), None, None),
    "softsign": (lambda x, a, b: ops.Softsign(x), None, None),
    "tanh": (lambda x, a, b: ops.Tanh(x), None, None),
    "thresholdedrelu": (lambda x, a, b: where(x >= a, x, 0.0), 1.0, None),
}


def _activations(ctx: Forward, defaults: tuple[str, ...], direction: int, directions: int) -> list[Activation]:
    """The activations of one direction, clipping of their inputs included, as the kernels have them: `activation_alpha`
    and `activation_beta` are used up in order by the functions that take one."""
    names = [str(n).lower() for n in ctx.attr("activations") or defaults * directions]
    alphas: Iterator[float] = iter(ctx.attr("activation_alpha") or ())
    betas: Iterator[float] = iter(ctx.attr("activation_beta") or ())
    bound = float(ctx.attr("clip") or 0.0)
    made: list[Activation] = []
    for k, name in enumerate(names):
        if name not in _ACTIVATIONS:
            raise ctx.error(f"the gradient covers the activations {', '.join(_ACTIVATIONS)}, not {name}")
        function, alpha, beta = _ACTIVATIONS[name]
        a = 0.0 if alpha is None else float(next(alphas, alpha))
        b = 0.0 if beta is None else float(next(betas, beta))
        limit = bound if k % len(defaults) < 2 else 0.0  # LSTM's third function, of the cell, is not clipped
        made.append(_clipped(function, a, b, limit))
    return made[direction * len(defaults) :][: len(defaults)]


def _clipped(function: Callable[[Any, float, float], Any], alpha: float, beta: float, limit: float) -> Activation:
    return lambda x: function(ops.Clip(x, -limit, limit) if limit > 0 else x, alpha, beta)


def _scanned(
    ctx: Forward, gates: int, states: int, cell_of: Callable[[int, int, Tensor, Any], Cell], kept: int = 0
) -> Any:
    """Return Y and the last states of a recurrent operator: the input is projected for all steps at once, a Scan makes
    the states.

    cell_of: (direction, number of directions, R transposed, recurrent bias of the last `kept` gates) -> its cell; the
    recurrent bias of other gates is added to the projection.
    """
    x, w, r, bias, lengths = ctx.inputs[0], ctx.inputs[1], ctx.inputs[2], ctx.input(3), ctx.input(4)
    if ctx.attr("layout", 0):
        x = x.transpose([1, 0, 2])
    steps, batch, _ = ctx.shape(x)
    hidden = ctx.shape(r)[2]
    kind = str(ctx.attr("direction", "forward") or "forward")
    count = 2 if kind == "bidirectional" else 1
    if steps == 0:
        raise ctx.error("the sequence is empty")
    alive = None
    if lengths is not None:
        alive = (literal(np.arange(steps).reshape(-1, 1), lengths.dtype) < lengths).unsqueeze(2)
    ys: list[Tensor] = []
    lasts: list[list[Tensor]] = [[] for _ in range(states)]
    for d in range(count):
        own, own_bias = _projected(x, w[d], None if bias is None else bias[d], gates * hidden, kept * hidden)
        cell = cell_of(d, count, r[d].T, own_bias)

        def body(*given: Tensor, cell: Cell = cell) -> Any:
            before, now = given[:states], given[states:]
            new = cell(now[0], before)
            shown = new[0]
            if len(now) > 1:
                new = tuple(where(now[1], a, b) for a, b in zip(new, before, strict=True))
                shown = where(now[1], shown, 0.0)
            return (*new, shown)

        rows = [own] if alive is None else [own, alive]
        back = int(kind == "reverse" or d == 1)
        start = [_initial(ctx, 5 + k, d, x, (batch, hidden)) for k in range(states)]
        *ends, y = ops.Scan(
            *start, *rows, body=body, num_scan_inputs=len(rows), scan_input_directions=[back] * len(rows),
            scan_output_directions=[back],
        )  # fmt: skip
        ys.append(y.unsqueeze(1))
        for k in range(states):
            lasts[k].append(ends[k].unsqueeze(0))
    y = ys[0] if count == 1 else ops.Concat(*ys, axis=1)
    finals = [e[0] if count == 1 else ops.Concat(*e, axis=0) for e in lasts]
    if ctx.attr("layout", 0):
        y, finals = y.transpose([2, 0, 1, 3]), [e.transpose([1, 0, 2]) for e in finals]
    return [y, *finals]


def _projected(x: Tensor, w: Tensor, bias: Tensor | None, width: int, kept: int) -> tuple[Tensor, Tensor | None]:
    """x W' with the biases of input and recurrence; the last `kept` of the `width` biases of recurrence beside it."""
    made: Tensor = x @ w.T
    if bias is None:
        return made, None
    merged, recurrent, split = bias[:width], bias[width:], width - kept
    if not kept:
        return made + (merged + recurrent), None
    return made + ops.Concat(merged[:split] + recurrent[:split], merged[split:], axis=0), recurrent[split:]


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

    def cell_of(d: int, count: int, r: Tensor, bias: Any) -> Cell:
        (f,) = _activations(ctx, ("Tanh",), d, count)
        return lambda x, states: (f(x + states[0] @ r),)

    return _wanted(ctx, _scanned(ctx, 1, 1, cell_of))


@composition("GRU")
def gru(ctx: Forward) -> Any:
    """The gates z and r, and the candidate, with the reset before or after the product."""
    hidden = ctx.shape(ctx.inputs[2])[2]
    after = bool(ctx.attr("linear_before_reset", 0))

    def cell_of(d: int, count: int, r: Tensor, bias: Any) -> Cell:
        f, g = _activations(ctx, ("Sigmoid", "Tanh"), d, count)
        gates, candidate = r[:, : 2 * hidden], r[:, 2 * hidden :]

        def cell(x: Tensor, states: States) -> States:
            h = states[0]
            product = h @ (r if after else gates)
            both = f(x[:, : 2 * hidden] + (product[:, : 2 * hidden] if after else product))
            z, reset = both[:, :hidden], both[:, hidden:]
            if after:
                own = product[:, 2 * hidden :]
                own = reset * (own if bias is None else own + bias)
            else:
                own = (reset * h) @ candidate
            new = g(x[:, 2 * hidden :] + own)
            return ((1.0 - z) * new + z * h,)

        return cell

    return _wanted(ctx, _scanned(ctx, 3, 1, cell_of, kept=int(after)))


@composition("LSTM")
def lstm(ctx: Forward) -> Any:
    """The gates i, o and f, the candidate and the cell, with peepholes; `input_forget` makes f = 1 - i."""
    hidden = ctx.shape(ctx.inputs[2])[2]
    coupled, peepholes = bool(ctx.attr("input_forget", 0)), ctx.input(7)

    def cell_of(d: int, count: int, r: Tensor, bias: Any) -> Cell:
        f, g, h_of = _activations(ctx, ("Sigmoid", "Tanh", "Tanh"), d, count)
        peep = None if peepholes is None else [peepholes[d, k * hidden : (k + 1) * hidden] for k in range(3)]

        def cell(x: Tensor, states: States) -> States:
            h, c = states
            total = x + h @ r
            i, o, forget, new = (total[:, k * hidden : (k + 1) * hidden] for k in range(4))
            if peep is not None:
                i, forget = i + peep[0] * c, forget + peep[2] * c
            i = f(i)
            forget = 1.0 - i if coupled else f(forget)
            c = forget * c + i * g(new)
            o = f(o if peep is None else o + peep[1] * c)
            return o * h_of(c), c

        return cell

    return _wanted(ctx, _scanned(ctx, 4, 2, cell_of))


@composition("LinearAttention")
def linear_attention(ctx: Forward) -> Any:
    """S = exp(g) S + k (b (v - k exp(g) S)), y = scale q S, as far as `update_rule` has g and b; see the operator."""
    q, k, v = ctx.inputs[:3]
    past, decay, beta = (ctx.input(i) for i in (3, 4, 5))
    heads, kv = int(ctx.attr("q_num_heads")), int(ctx.attr("kv_num_heads"))
    batch, steps, width = ctx.shape(q)
    size, value_size = width // heads, ctx.shape(v)[2] // kv
    if steps == 0:
        raise ctx.error("the sequence is empty")
    rule = str(ctx.attr("update_rule", "gated_delta"))
    scale = float(ctx.attr("scale") or size**-0.5)

    def rows(x: Tensor, *shape: int) -> Tensor:
        made: Tensor = wide(x).reshape(batch, steps, *shape).transpose([1, 0, *range(2, 2 + len(shape))])
        return made

    scanned = {"q": rows(q, kv, heads // kv, size), "k": rows(k, kv, size, 1), "v": rows(v, kv, 1, value_size)}
    if "gated" in rule:
        scanned["decay"] = rows(decay, kv, -1, 1)
    if "delta" in rule:
        scanned["beta"] = rows(beta, -1, 1, 1)

    def body(state: Tensor, *given: Tensor) -> Any:
        now = dict(zip(scanned, given, strict=True))
        if "decay" in now:
            state = state * ops.Exp(now["decay"])
        new = now["v"]
        if "beta" in now:
            new = now["beta"] * (new - now["k"].transpose([0, 1, 3, 2]) @ state)
        state = state + now["k"] @ new
        return state, now["q"] @ state * scale

    start = literal_zeros(wide(v), (batch, kv, size, value_size)) if past is None else wide(past)
    last, ys = ops.Scan(start, *scanned.values(), body=body, num_scan_inputs=len(scanned))
    y = ys.transpose([1, 0, 2, 3, 4]).reshape(batch, steps, heads * value_size)
    return [y.astype(q.dtype), last.astype((v if past is None else past).dtype)]
