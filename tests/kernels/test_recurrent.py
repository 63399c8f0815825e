"""RNN, GRU and LSTM against the ONNX backend tests and a step-by-step evaluation of their equations."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.node_cases import Case, run_jax, run_numpy
from tests.kernels.single_node import node_case
from xrt_core.errors import InputError, ShapeError

RUNS = [run_numpy, run_jax]
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))


def one_sequence(op: str, x: np.ndarray, weights: dict[str, np.ndarray], h: np.ndarray, c: np.ndarray, **how: Any):
    """The operator's equations, one time step after the other, for one sequence and one direction."""
    n, clip = h.size, how.get("clip", np.inf)
    f = how.get("f", np.tanh if op == "RNN" else sigmoid)
    g = how.get("g", np.tanh)
    w, r = (np.split(weights[k], GATES[op]) for k in "WR")
    wb, rb = (np.split(part, GATES[op]) for part in np.split(weights["B"], 2))
    hs = []

    def cut(v: np.ndarray) -> np.ndarray:
        return np.clip(v, -clip, clip)

    for xt in x:
        a = [w[k] @ xt + wb[k] for k in range(GATES[op])]
        if op == "RNN":
            h = f(cut(a[0] + r[0] @ h + rb[0]))
        elif op == "GRU":
            z, reset = (f(cut(a[k] + r[k] @ h + rb[k])) for k in (0, 1))
            inner = reset * (r[2] @ h + rb[2]) if how.get("linear") else r[2] @ (reset * h) + rb[2]
            h = (1 - z) * g(cut(a[2] + inner)) + z * h
        else:
            pi, po, pf = np.split(weights["P"], 3)
            s = [a[k] + r[k] @ h + rb[k] for k in range(4)]
            i = f(cut(s[0] + pi * c))
            forget = 1 - i if how.get("coupled") else f(cut(s[2] + pf * c))
            c = forget * c + i * g(cut(s[3]))
            h = f(cut(s[1] + po * c)) * np.tanh(c)
        assert h.shape == (n,)
        hs.append(h)
    return hs, h, c


def expected(op: str, inputs: dict[str, np.ndarray], lengths: np.ndarray, direction: str, **how: Any):
    """(Y, Y_h, Y_c) of a batch in layout 0, each sequence by itself over its own length."""
    x, (directions, batch, n) = inputs["X"], inputs["h"].shape
    y = np.zeros((x.shape[0], directions, batch, n))
    last_h, last_c = inputs["h"].copy(), inputs["c"].copy()
    for d in range(directions):
        backwards = direction == "reverse" or d == 1
        weights = {k: inputs[k][d] for k in "WRBP"}
        for b in range(batch):
            sequence = x[: lengths[b], b]
            hs, h, c = one_sequence(
                op, sequence[::-1] if backwards else sequence, weights, last_h[d, b], last_c[d, b], **how
            )
            for t, value in enumerate(hs[::-1] if backwards else hs):
                y[t, d, b] = value
            last_h[d, b], last_c[d, b] = h, c
    return y, last_h, last_c


def batch_of(op: str, rng: np.random.Generator, directions: int, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Random inputs: 5 steps, 3 sequences, 4 features, 6 hidden."""
    g, n = GATES[op], 6
    shapes = {"X": (5, 3, 4), "W": (directions, g * n, 4), "R": (directions, g * n, n), "B": (directions, 2 * g * n),
              "h": (directions, 3, n), "c": (directions, 3, n), "P": (directions, 3 * n)}  # fmt: skip
    return {k: (rng.standard_normal(s) * 0.5).astype(dtype) for k, s in shapes.items()}


def arguments(op: str, inputs: dict[str, np.ndarray], lengths: Any) -> list[Any]:
    """The inputs in the operator's order."""
    base = [inputs["X"], inputs["W"], inputs["R"], inputs["B"], lengths, inputs["h"]]
    return [*base, inputs["c"], inputs["P"]] if op == "LSTM" else base


VARIANTS = [
    ("RNN", {}, {}),
    ("RNN", {"activations": ("Affine",), "activation_alpha": (0.5,), "activation_beta": (0.1,)},
     {"f": lambda v: 0.5 * v + 0.1}),
    ("RNN", {"clip": 0.3}, {"clip": 0.3}),
    ("GRU", {}, {}),
    ("GRU", {"linear_before_reset": 1}, {"linear": True}),
    ("GRU", {"activations": ("HardSigmoid", "LeakyRelu"), "activation_alpha": (0.3, 0.2), "activation_beta": (0.4,)},
     {"f": lambda v: np.clip(0.3 * v + 0.4, 0, 1), "g": lambda v: np.where(v >= 0, v, 0.2 * v)}),
    ("LSTM", {}, {}),
    ("LSTM", {"input_forget": 1}, {"coupled": True}),
    ("LSTM", {"clip": 0.2}, {"clip": 0.2}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op", "attributes", "how"), VARIANTS, ids=lambda v: v if isinstance(v, str) else None)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layout", [0, 1])
def test_equations(
    op: str, attributes: dict, how: dict, direction: str, run: Any, layout: int, rng: np.random.Generator
) -> None:
    """Every direction and layout, with lengths, initial states and peepholes, follows the equations."""
    directions = 2 if direction == "bidirectional" else 1
    attributes = dict(attributes)
    if directions == 2:
        for name in ("activations", "activation_alpha", "activation_beta"):
            if name in attributes:
                attributes[name] = attributes[name] * 2
    inputs, lengths = batch_of(op, rng, directions), np.array([5, 2, 3], np.int32)
    want = expected(op, inputs, lengths, direction, **how)
    given = arguments(op, inputs, lengths)
    if layout:
        given = [a.swapaxes(0, 1) if i in (0, 5, 6) else a for i, a in enumerate(given)]
    outputs = 3 if op == "LSTM" else 2
    got = run(node_case(op, 14, given, outputs, direction=direction, layout=layout, hidden_size=6, **attributes))
    assert len(got) == outputs
    for k, (a, b) in enumerate(zip(got, want, strict=False)):
        if layout:
            b = b.transpose(2, 0, 1, 3) if k == 0 else b.swapaxes(0, 1)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["Relu", "Sigmoid", "ThresholdedRelu", "ScaledTanh", "Elu", "Softsign", "Softplus"])
def test_activations(name: str, rng: np.random.Generator) -> None:
    """The remaining activations, with alpha = 0.7 and beta = 1.3 where they take them."""
    formulas = {
        "Relu": lambda v: np.maximum(v, 0),
        "Sigmoid": sigmoid,
        "ThresholdedRelu": lambda v: np.where(v >= 0.7, v, 0),
        "ScaledTanh": lambda v: 0.7 * np.tanh(1.3 * v),
        "Elu": lambda v: np.where(v >= 0, v, 0.7 * (np.exp(v) - 1)),
        "Softsign": lambda v: v / (1 + np.abs(v)),
        "Softplus": lambda v: np.log(1 + np.exp(v)),
    }
    inputs = batch_of("RNN", rng, 1)
    want = expected("RNN", inputs, np.array([5, 5, 5]), "forward", f=formulas[name])
    case = node_case("RNN", 7, arguments("RNN", inputs, None), 2, activations=(name.lower(),),
                     activation_alpha=(0.7,), activation_beta=(1.3,), hidden_size=6)  # fmt: skip
    for a, b in zip(run_numpy(case), want, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("run", RUNS)
def test_narrow_floats(dtype: Any, op: str, run: Any, rng: np.random.Generator) -> None:
    """Narrow floats keep their state in float32 and round the results once."""
    inputs = batch_of(op, rng, 1, dtype)
    want = expected(op, {k: v.astype(np.float64) for k, v in inputs.items()}, np.array([5, 5, 5]), "forward")
    got = run(node_case(op, 22, arguments(op, inputs, None), 2, hidden_size=6))
    step = float(ml_dtypes.finfo(dtype).eps)
    for a, b in zip(got, want, strict=False):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=step, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_no_steps_and_no_y(run: Any, rng: np.random.Generator) -> None:
    """Zero time steps give an empty Y and the initial states; Y that nobody wants is not made."""
    inputs = batch_of("LSTM", rng, 2)
    given = arguments("LSTM", {**inputs, "X": inputs["X"][:0]}, None)
    y, h, c = run(node_case("LSTM", 14, given, 3, direction="bidirectional", hidden_size=6))
    assert y.shape == (0, 2, 3, 6)
    np.testing.assert_array_equal(h, inputs["h"])
    np.testing.assert_array_equal(c, inputs["c"])
    case = node_case("GRU", 14, arguments("GRU", batch_of("GRU", rng, 1), None), 2, hidden_size=6)
    outs = case.node.outputs
    alone = Case("", case.node.replace(outputs=[None, outs[1]]), case.inputs, [], 0, 0)
    y, h = run(alone)
    assert y is None
    np.testing.assert_allclose(h, run(case)[1])


def test_misuse_is_named(rng: np.random.Generator) -> None:
    """Unknown activations and directions that W does not have are ShapeErrors that say so."""
    given = arguments("RNN", batch_of("RNN", rng, 1), None)
    with pytest.raises(ShapeError, match="swish"):
        run_numpy(node_case("RNN", 14, given, 2, activations=("Swish",)))
    with pytest.raises(ShapeError, match="bidirectional"):
        run_numpy(node_case("RNN", 14, given, 2, direction="bidirectional"))


@pytest.mark.parametrize("wrong", [6, -1])
@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_lengths_that_no_sequence_has(op: str, wrong: int, rng: np.random.Generator) -> None:
    """A length of 0 to the number of steps is right; another is an InputError that says which."""
    lengths = np.array([5, 0, wrong], np.int32)
    with pytest.raises(InputError, match=f"length {wrong}: the input has 5 steps"):
        run_numpy(node_case(op, 14, arguments(op, batch_of(op, rng, 1), lengths), 2, hidden_size=6))
