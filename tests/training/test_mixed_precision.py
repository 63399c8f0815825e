"""Training in bfloat16 and float16: loss curves, master weights, loss scaling, skipped steps, resuming."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import OptionError
from xrt_core.frontends import ops
from xrt_core.training import SGD, Adam, LossScale, TrainModule
from xrt_core.training.step import SCALE, STEP, STREAK

F = np.float32
ENGINES = ["host", "xla"]
LONG = ["host", pytest.param("xla", marks=pytest.mark.slow)]  # compiling takes seconds
# what a loss may be off, relative to the first loss, over the first 100 steps of a run without resonance: the rounding
# of the type (2**-8, 2**-11) times a margin of four
BOUND = {"bf16": 4 * 2.0**-8, "fp16": 4 * 2.0**-11}


def engine_named(name: str) -> str:
    """The engine; skips where its library is missing."""
    if name == "xla":
        pytest.importorskip("jax")
    return name


class Perceptron(xrt.Graph):
    """Two layers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w1 = (rng.standard_normal((12, 32)) * 0.3).astype(F)
        self.b1 = np.zeros(32, F)
        self.w2 = (rng.standard_normal((32, 4)) * 0.2).astype(F)
        self.b2 = np.zeros(4, F)

    def build(self, x: Any) -> Any:
        return ops.Relu(x @ self.w1 + self.b1) @ self.w2 + self.b2


class Block(xrt.Graph):
    """One transformer block over embedded tokens, and a classifier of its mean."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shapes = {"table": (20, 16), "wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16), "up": (16, 32),
                  "down": (32, 16), "head": (16, 4)}  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, (rng.standard_normal(shape) * shape[0] ** -0.5).astype(F))
        for name in ("gain1", "gain2"):
            setattr(self, name, np.ones(16, F))

    def build(self, ids: Any) -> Any:
        s: Any = self
        x = ops.Gather(s.table, ids)
        h = ops.LayerNormalization(x, s.gain1, outputs=1)
        scores = ops.Softmax(ops.MatMul(h @ s.wq, ops.Transpose(h @ s.wk, perm=[0, 2, 1])) * 0.25)
        x = x + ops.MatMul(scores, h @ s.wv) @ s.wo
        h = ops.LayerNormalization(x, s.gain2, outputs=1)
        x = x + ops.Gelu(h @ s.up) @ s.down
        return x.mean(1) @ s.head


def points(seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((32, 12)).astype(F)
    return {"x": x, "labels": (x[:, 0] > 0) * 2 + (x[:, 1] * x[:, 2] > 0).astype(np.int64)}


def tokens(seed: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 20, (16, 8))
    return {"ids": ids, "labels": (ids.sum(1) > 76) * 2 + (ids[:, 0] > 9).astype(np.int64)}


MODELS = {"perceptron": (Perceptron, points), "block": (Block, tokens)}


def made(model: str, engine: str, **options: Any) -> TrainModule:
    return TrainModule(
        MODELS[model][0](), loss="cross_entropy", optimizer=Adam(3e-3), engine=engine_named(engine), **options
    )


def curve(t: TrainModule, model: str, steps: int) -> np.ndarray:
    return np.array([float(t.step(**MODELS[model][1](k % 8))) for k in range(steps)])


def dtypes_of(t: TrainModule, op_type: str) -> set[str]:
    """The dtypes in which the step's nodes of one operator compute."""
    nodes = [n for n in t.training_graph().nodes if n.op_type == op_type]
    assert nodes
    return {str(v.dtype) for n in nodes for v in n.inputs if v is not None}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", LONG)
def test_a_hundred_steps(model: str, engine: str) -> None:
    """The loss falls as in float32, within the bound at every step; products compute in the narrow type, forward and
    backward, and the state is float32."""
    exact = curve(made(model, engine), model, 100)
    assert exact[-8:].mean() < 0.6 * exact[0]

    for precision, bound in BOUND.items():
        t = made(model, engine, precision=precision)
        losses = curve(t, model, 100)
        assert 0 < np.abs(losses - exact).max() / exact[0] < bound, precision
        assert dtypes_of(t, "MatMul") == {"bfloat16" if precision == "bf16" else "float16"}
        assert {str(a.dtype) for a in t.state_dict().values()} == {"float32", "int64"}
        assert SCALE in t.state_dict() if precision == "fp16" else SCALE not in t.state_dict()
        report = t.explain().precision
        assert report is not None
        assert f"nodes in {'bfloat16' if precision == 'bf16' else 'float16'}" in str(t.explain())


class Convolutions(xrt.Graph):
    """Two convolutions with a pooling between them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.c1 = (rng.standard_normal((8, 3, 3, 3)) * 0.2).astype(F)
        self.c2 = (rng.standard_normal((8, 8, 3, 3)) * 0.12).astype(F)
        self.head = (rng.standard_normal((8, 4)) * 0.35).astype(F)

    def build(self, x: Any) -> Any:
        h = ops.MaxPool(ops.Relu(ops.Conv(x, self.c1, pads=[1] * 4)), kernel_shape=[2, 2], strides=[2, 2], outputs=1)
        return ops.Relu(ops.Conv(h, self.c2, pads=[1] * 4)).mean((2, 3)) @ self.head


@pytest.mark.parametrize("engine", LONG)
def test_convolutions(engine: str) -> None:
    """Convolutions and both of their gradients compute in bfloat16, and the losses of 20 steps stay close."""
    curves = []
    for options in ({}, {"precision": "bf16"}):
        t = TrainModule(
            Convolutions(), loss="cross_entropy", optimizer=Adam(1e-2), engine=engine_named(engine), **options
        )
        x = np.random.default_rng(1).standard_normal((16, 3, 8, 8)).astype(F)
        labels = (x[:, 0].mean((1, 2)) > 0) * 2 + (x[:, 1].mean((1, 2)) > 0).astype(np.int64)
        curves.append(np.array([float(t.step(x=x, labels=labels)) for _ in range(20)]))
    exact, got = curves

    assert exact[-1] < 0.95 * exact[0]
    assert 0 < np.abs(got - exact).max() / exact[0] < BOUND["bf16"]
    assert dtypes_of(t, "Conv") == dtypes_of(t, "ConvFilterGrad") == {"bfloat16"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_gradient_through_casts(precision: str) -> None:
    """One SGD step moves each variable by the float32 gradient, to within the narrow type's rounding of its size."""
    steps = []
    for options in ({}, {"precision": precision, "loss_scale": 128.0}):
        t = TrainModule(Block(), loss="cross_entropy", optimizer=SGD(1.0), engine="host", **options)
        before = {n: getattr(Block(), n) for n in ("wq", "up", "head", "table", "gain1")}
        t.step(**tokens(0))
        after = t.state_dict()
        steps.append({n: before[n] - after[n] for n in before})
    for name, exact in steps[0].items():
        off = np.abs(steps[1][name] - exact).max() / np.abs(exact).max()
        assert 0 < off < (0.05 if precision == "bf16" else 0.006), name


@pytest.mark.parametrize("engine", LONG)
def test_an_overflow_is_skipped(engine: str) -> None:
    """A scale that float16 cannot carry: the step changes nothing but the scale, which halves until steps succeed."""
    t = made("perceptron", engine, precision="fp16", loss_scale=LossScale(2.0**24, interval=4))
    first = float(t.step(**points(0)))
    state = t.state_dict()
    fresh = Perceptron()

    assert np.isfinite(first)
    assert state[SCALE] == 2.0**23
    assert state[STEP] == state[STREAK] == 0
    for name in ("w1", "b1", "w2", "b2"):
        assert np.array_equal(state[name], getattr(fresh, name))
    assert not any(a.any() for n, a in state.items() if n.startswith("optimizer/"))

    skipped = 1
    while (state := t.state_dict())[STEP] == 0:
        t.step(**points(0))
        skipped += t.state_dict()[STEP] == 0
        assert t.state_dict()[SCALE] <= state[SCALE]
    assert t.state_dict()[SCALE] == 2.0 ** (24 - skipped)
    scale = float(t.state_dict()[SCALE])
    for _ in range(3):
        t.step(**points(0))
    assert float(t.state_dict()[SCALE]) in (2 * scale, scale)  # four in a row doubled it, and it may halve again
    assert not np.array_equal(t.state_dict()["w1"], fresh.w1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_goes_on_bit_for_bit(engine: str, precision: str, tmp_path: pathlib.Path) -> None:
    """Twelve steps, or five, a file, and seven: the same losses and the same state."""
    pytest.importorskip("safetensors")
    whole = made("block", engine, precision=precision)
    losses = curve(whole, "block", 12)
    part = made("block", engine, precision=precision)
    curve(part, "block", 5)
    part.save(tmp_path / "state.safetensors")
    resumed = made("block", engine, precision=precision)
    resumed.load(tmp_path / "state.safetensors")
    rest = [float(resumed.step(**tokens(k % 8))) for k in range(5, 12)]

    assert rest == list(losses[5:])
    for name, a in whole.state_dict().items():
        assert np.array_equal(a, resumed.state_dict()[name]), name


def test_loss_scale_of_float16() -> None:
    """It is dynamic unless said otherwise, and a fixed one keeps nothing in the state."""
    for given, dynamic in ((None, True), (1.0, False), (LossScale(8.0), True)):
        t = made("perceptron", "host", use_fp16=True, loss_scale=given)
        t.step(**points(0))
        assert (SCALE in t.state_dict()) is dynamic


def test_constraints_in_training() -> None:
    """A node that is kept in float32 is so in the backward pass as well."""
    t = made("perceptron", "host", precision={"op:MatMul": "float32"}, use_bf16=True)
    t.step(**points(0))
    assert dtypes_of(t, "MatMul") == {"float32"}
    with pytest.raises(OptionError, match="no node of .* is named 'nothing'"):
        made("perceptron", "host", precision={"name:nothing": "fp16"}).step(**points(0))
    with pytest.raises(OptionError, match="integers have no gradients"):
        made("perceptron", "host", use_int8=True, int8_calibration="/nowhere")


def test_the_exported_model_is_float32(tmp_path: pathlib.Path) -> None:
    """What was trained in bfloat16 is the model with its master weights."""
    t = made("perceptron", "host", precision="bf16")
    curve(t, "perceptron", 3)
    t.export(tmp_path / "trained.onnx")
    model = xrt.import_model(tmp_path / "trained.onnx")

    assert {str(v.dtype) for n in model.nodes for v in n.inputs if v is not None} == {"float32"}
