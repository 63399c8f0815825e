"""TrainModule: steps against hand-written ones, engines, state, checkpoints, and what is refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import xrt_core as xrt
from xrt_core.errors import CheckpointError, GradientError, InputError, OptionError
from xrt_core.frontends import ops
from xrt_core.ir.verifier import verify
from xrt_core.training import LAMB, SGD, Adagrad, Adam, AdamW, LossScale, Momentum, Optimizer, TrainModule

F = np.float32


def xla() -> str:
    """The engine "xla" where JAX is there; skips otherwise."""
    pytest.importorskip("jax")
    return "xla"


class Classifier(xrt.Graph):
    """Two layers, with a Dropout between them where asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        rng = np.random.default_rng(0)
        self.w1 = (rng.standard_normal((6, 16)) * 0.3).astype(F)
        self.b1 = np.zeros(16, F)
        self.w2 = (rng.standard_normal((16, 3)) * 0.3).astype(F)
        self.b2 = np.zeros(3, F)
        self.dropout = dropout

    def build(self, x: Any) -> Any:
        h = ops.Relu(x @ self.w1 + self.b1)
        if self.dropout:
            h = ops.Dropout(h, self.dropout, outputs=1)
        return h @ self.w2 + self.b2


def batch(count: int = 32, seed: int = 1) -> dict[str, np.ndarray]:
    """Points and the class that two of their coordinates decide."""
    x = np.random.default_rng(seed).standard_normal((count, 6)).astype(F)
    return {"x": x, "labels": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)}


def losses(t: TrainModule, steps: int = 20, **data: np.ndarray) -> list[float]:
    """The losses of some steps on one batch."""
    return [float(t.step(**(data or batch()))) for _ in range(steps)]


class Square(xrt.Graph):
    """A loss whose gradient is known: half the squared distance of w, and of v, from the input."""

    def __init__(self) -> None:
        self.w = np.array([[1.0, -2.0], [3.0, 0.5]], F)
        self.v = np.array([0.3, -0.7], F)

    def build(self, x: Any) -> Any:
        return ((self.w - x) ** 2.0).sum() * 0.5 + ((self.v - x[0]) ** 2.0).sum() * 0.5


Reference = Callable[[int, np.ndarray, np.ndarray, dict[str, np.ndarray]], np.ndarray]


def _adam(k: int, x: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    return s["m"] / (1 - 0.9**k), s["v"] / (1 - 0.999**k)


def _adamw(k: int, x: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> np.ndarray:
    m, v = _adam(k, x, g, s)
    return x - 0.1 * (m / (np.sqrt(v) + 1e-8) + (0.02 * x if x.ndim > 1 else 0))


def _lamb(k: int, x: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> np.ndarray:
    m, v = _adam(k, x, g, s)
    r = m / (np.sqrt(v) + 1e-6) + (0.01 * x if x.ndim > 1 else 0)
    return x - 0.1 * np.linalg.norm(x) / np.linalg.norm(r) * r


def _momentum(k: int, x: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> np.ndarray:
    s["m"] = 0.8 * s.get("m", 0) + g
    return x - 0.1 * s["m"]


def _nesterov(k: int, x: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> np.ndarray:
    s["m"] = 0.8 * s.get("m", 0) + g
    return x - 0.1 * (g + 0.8 * s["m"])


def _adagrad(k: int, x: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> np.ndarray:
    s["h"] = s.get("h", 0) + g * g
    return x - 0.1 / (1 + 0.1 * (k - 1)) * g / (np.sqrt(s["h"]) + 1e-6)


def _onnx_adam(k: int, x: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> np.ndarray:
    g = g + (0.01 * x if x.ndim > 1 else 0)
    m, v = _adam(k, x, g, s)
    return x - 0.1 * m / (np.sqrt(v) + 1e-8 / np.sqrt(1 - 0.999**k))


OPTIMISERS: dict[str, tuple[Optimizer, Reference]] = {
    "sgd": (SGD(0.1), lambda k, x, g, s: x - 0.1 * g),
    "sgd-decay": (SGD(0.1, weight_decay=0.05), lambda k, x, g, s: x - 0.1 * (g + (0.05 * x if x.ndim > 1 else 0))),
    "sgd-schedule": (SGD(lambda step: 0.1 / (1 + step)), lambda k, x, g, s: x - 0.1 / k * g),
    "momentum": (Momentum(0.1, 0.8), _momentum),
    "nesterov": (Momentum(0.1, 0.8, nesterov=True), _nesterov),
    "adagrad": (Adagrad(0.1, decay_factor=0.1), _adagrad),
    "adam": (Adam(0.1, weight_decay=0.01), _onnx_adam),
    "adamw": (AdamW(0.1, weight_decay=0.02), _adamw),
    "lamb": (LAMB(0.1), _lamb),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name: str) -> None:
    """Five steps of each optimiser, against its formula in NumPy at float64."""
    optimizer, reference = OPTIMISERS[name]
    t = TrainModule(Square(), optimizer=optimizer, engine="host")
    expected = {"w": Square().w.astype(np.float64), "v": Square().v.astype(np.float64)}
    states: dict[str, dict[str, np.ndarray]] = {"w": {}, "v": {}}
    for k in range(1, 6):
        x = np.random.default_rng(k).standard_normal((2, 2)).astype(F)
        want = 0.5 * ((expected["w"] - x) ** 2).sum() + 0.5 * ((expected["v"] - x[0]) ** 2).sum()
        assert float(t.step(x)) == pytest.approx(want, rel=1e-5)
        for n, target in (("w", x), ("v", x[0])):
            expected[n] = reference(k, expected[n], expected[n] - target, states[n])
    state = t.state_dict()
    for n in ("w", "v"):
        np.testing.assert_allclose(state[n], expected[n], rtol=2e-5, atol=2e-6)
    assert state["training/step"] == 5


def test_clipping() -> None:
    """Gradients are scaled by one factor, so that the norm over all of them is the limit."""
    t = TrainModule(Square(), optimizer=SGD(1.0, clip_norm=0.5), engine="host")
    t.step(np.zeros((2, 2), F))
    moved = [Square().w - t.state_dict()["w"], Square().v - t.state_dict()["v"]]

    assert np.sqrt(sum((m**2).sum() for m in moved)) == pytest.approx(0.5, rel=1e-4)
    np.testing.assert_allclose(moved[0] / moved[0][0, 0], Square().w, rtol=1e-5)


@pytest.mark.parametrize("engine", ["host", "xla"])
def test_training_learns(engine: str) -> None:
    """The loss falls to a fraction, on every engine to the same numbers."""
    if engine == "xla":
        xla()
    t = TrainModule(Classifier(), loss="cross_entropy", optimizer=Adam(1e-2), engine=engine)
    found = losses(t, 60)

    assert found[-1] < 0.25 * found[0]
    reference = losses(TrainModule(Classifier(), loss="cross_entropy", optimizer=Adam(1e-2), engine="host"), 60)
    np.testing.assert_allclose(found, reference, rtol=1e-4)


def test_variables_stay_on_the_device() -> None:
    """Between steps variables are JAX arrays; a step consumes the old ones, and copies given out stay as they are."""
    jax = pytest.importorskip("jax")
    t = TrainModule(Classifier(), loss="cross_entropy", optimizer=Momentum(0.1), engine="xla", donate=True)
    losses(t, 2)
    kept, before = t.state_dict(), t._state.arrays[0]
    copies = {n: a.copy() for n, a in kept.items()}
    losses(t, 1)

    assert isinstance(t._state.arrays[0], jax.Array)
    assert before.is_deleted()
    assert all(np.array_equal(kept[n], copies[n]) for n in kept)
    assert not np.array_equal(t.state_dict()["w1"], kept["w1"])


@pytest.mark.parametrize(
    ("options", "aliases"),
    [
        ({}, [0]),
        ({"merge_updates": False}, [0, 0]),
        ({"donate": True}, [0, 4 * 3 + 1]),
        ({"donate": True, "merge_updates": True}, [4 * 3 + 1]),
        ({"donate": True, "accumulate": 2}, [0, 4 * 4 + 3]),
    ],
    ids=["small", "two", "in place", "in place, one", "accumulated"],
)
def test_updates_are_in_the_launch_of_the_gradients(options: dict[str, Any], aliases: list[int]) -> None:
    """A step of a small state is one Launch. Where the state is updated in place, which has an alias for each entry of
    it, updates are another unless asked for; so they are with accumulation, whose two graphs share the gradients'."""
    engine = xla()
    t = TrainModule(Classifier(), loss="cross_entropy", optimizer=Adam(1e-2), engine=engine, **options)
    losses(t, options.get("accumulate", 1))
    plan = t._last.plan  # type: ignore[union-attr]

    assert [len(x.function.aliases) for x in plan.launches] == aliases
    verify(t.training_graph(), "step")
    assert "100% of nodes" in str(t.explain())


def test_the_callers_arrays_are_left_alone() -> None:
    """The arrays of a written graph hold what they held."""
    model = Classifier()
    before = model.w1.copy()
    losses(TrainModule(model, loss="cross_entropy", optimizer=SGD(0.5), engine="host"), 3)
    np.testing.assert_array_equal(model.w1, before)


def onnx_model(path: pathlib.Path, opset: int = 17, norm: bool = True) -> pathlib.Path:
    """A convolutional classifier as a file, its weights as initialisers."""
    rng = np.random.default_rng(3)
    h = onnx.helper
    weights = {
        "conv.w": rng.standard_normal((4, 1, 3, 3)) * 0.4, "bn.scale": np.ones(4), "bn.bias": np.zeros(4),
        "bn.mean": np.zeros(4), "bn.var": np.ones(4), "fc.w": rng.standard_normal((3, 4)) * 0.4, "fc.b": np.zeros(3),
    }  # fmt: skip
    nodes = [
        h.make_node("Conv", ["x", "conv.w"], ["c"], pads=[1, 1, 1, 1], name="conv"),
        h.make_node("BatchNormalization", ["c", "bn.scale", "bn.bias", "bn.mean", "bn.var"], ["n"], name="bn"),
        h.make_node("Relu", ["n"], ["r"]),
        h.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        h.make_node("GlobalAveragePool", ["p"], ["g"]),
        h.make_node("Flatten", ["g"], ["f"]),
        h.make_node("Gemm", ["f", "fc.w", "fc.b"], ["scores"], transB=1, name="fc"),
    ]
    if not norm:
        nodes = [n for n in nodes if n.op_type != "BatchNormalization"]
        nodes[1].input[0] = "c"
        weights = {k: v for k, v in weights.items() if not k.startswith("bn")}
    info = h.make_tensor_value_info
    graph = h.make_graph(
        nodes, "cnn", [info("x", 1, ["N", 1, 6, 6])], [info("scores", 1, ["N", 3])],
        [onnx.numpy_helper.from_array(w.astype(F), n) for n, w in weights.items()],
    )  # fmt: skip
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", opset)]), path)
    return path


def images(count: int = 16) -> dict[str, np.ndarray]:
    """Images whose class is the number of bright halves."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, count)
    x = rng.standard_normal((count, 1, 6, 6)).astype(F) * 0.3
    x[labels > 0, :, :3] += 1
    x[labels > 1, :, 3:] += 1
    return {"x": x, "labels": labels.astype(np.int64)}


@pytest.mark.parametrize("opset", [11, 17])
def test_an_onnx_model_is_trained_and_exported(opset: int, tmp_path: pathlib.Path) -> None:
    """Fine-tuning: the loss falls, running statistics move, the export is what was trained and ONNX takes it."""
    path = onnx_model(tmp_path / "m.onnx", opset)
    t = TrainModule(path, loss="cross_entropy", optimizer=Adam(2e-2), engine="host")
    assert set(t.variables) == {"conv.w", "bn.scale", "bn.bias", "fc.w", "fc.b", "bn.mean", "bn.var"}
    found = losses(t, 40, **images())
    state = t.state_dict()

    assert found[-1] < 0.5 * found[0]
    assert abs(state["bn.mean"]).max() > 0.01
    t.export(tmp_path / "trained.onnx")
    onnx.checker.check_model(str(tmp_path / "trained.onnx"), full_check=True)
    trained = xrt.XRTModule(tmp_path / "trained.onnx", engine="host")
    by_graph = xrt.XRTModule(t.graph(), engine="host")
    x = images()["x"]
    np.testing.assert_array_equal(trained(x), by_graph(x))
    assert not np.allclose(trained(x), xrt.XRTModule(path, engine="host")(x))


def test_frozen_statistics(tmp_path: pathlib.Path) -> None:
    """With batch_norm=False running statistics are constants."""
    t = TrainModule(onnx_model(tmp_path / "m.onnx"), loss="cross_entropy", optimizer=SGD(0.1), engine="host",
                    batch_norm=False)  # fmt: skip
    losses(t, 2, **images())
    assert "bn.mean" not in t.variables
    assert not any(n.attributes.get("training_mode") for n in t.training_graph().nodes)


def test_trainable(tmp_path: pathlib.Path) -> None:
    """What is trained is chosen by name or by a function; the rest stays as it is."""
    path = onnx_model(tmp_path / "m.onnx", norm=False)
    for select in (["fc.w", "fc.b"], lambda name, array: name.startswith("fc")):
        t = TrainModule(path, loss="cross_entropy", optimizer=SGD(0.1), engine="host", trainable=select)
        losses(t, 2, **images())
        assert set(t.variables) == {"fc.w", "fc.b"}
        assert "xrt.ConvFilterGrad" not in {n.operator for n in t.training_graph().nodes}
    with pytest.raises(GradientError, match="no float constant 'nothing' to train; it has conv.w"):
        TrainModule(path, optimizer=SGD(0.1), engine="host", trainable=["nothing"])


def test_signatures_share_the_state() -> None:
    """A batch of another size goes on where the last one ended."""
    t = TrainModule(Classifier(), loss="cross_entropy", optimizer=Adam(1e-2), engine="host")
    for k in range(3):
        t.step(**batch(16 + k))
    assert t.state_dict()["training/step"] == 3


@pytest.mark.parametrize("engine", ["host", "xla"])
def test_resuming_is_bit_for_bit(engine: str, tmp_path: pathlib.Path) -> None:
    """With Dropout, a run that is saved and loaded into a new module goes on exactly as the one that was not."""
    if engine == "xla":
        xla()

    def module() -> TrainModule:
        return TrainModule(Classifier(0.3), loss="cross_entropy", optimizer=Adam(1e-2), engine=engine, seed=11)

    first = module()
    losses(first, 5)
    first.save(tmp_path / "c.safetensors")
    second = module()
    second.load(tmp_path / "c.safetensors")

    assert losses(first, 5) == losses(second, 5)
    a, b = first.state_dict(), second.state_dict()
    assert all(a[n].tobytes() == b[n].tobytes() for n in a)


def test_dropout_follows_the_seed() -> None:
    """Equal seeds give equal losses, another seed others; it drops another part at each step; it can be left out."""

    def run(seed: int, **options: Any) -> list[float]:
        t = TrainModule(Classifier(0.5), loss="cross_entropy", optimizer=SGD(0.0), engine="host", seed=seed, **options)
        return losses(t, 4)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len(set(run(1))) == 4
    assert len(set(run(1, dropout=False))) == 1


def test_static_loss_scaling_changes_nothing() -> None:
    """What the loss is multiplied by, gradients are divided by."""
    plain = TrainModule(Classifier(), loss="cross_entropy", optimizer=SGD(0.1), engine="host")
    scaled = TrainModule(Classifier(), loss="cross_entropy", optimizer=SGD(0.1), engine="host", loss_scale=1024.0)
    np.testing.assert_allclose(losses(plain, 5), losses(scaled, 5), rtol=1e-5)


def test_dynamic_loss_scaling_skips_what_overflowed() -> None:
    """A step with gradients that are not finite changes no variable, halves the scale, and does not count."""
    t = TrainModule(Square(), optimizer=Momentum(0.1), engine="host", loss_scale=LossScale(64.0, interval=2))
    x = np.zeros((2, 2), F)
    t.step(x)
    before = t.state_dict()
    t.step(np.full((2, 2), np.inf, F))
    after = t.state_dict()
    assert after["training/loss_scale"] == 32
    assert after["training/finite_steps"] == 0
    assert all(np.array_equal(before[n], after[n]) for n in before if not n.startswith("training/"))
    assert after["training/step"] == before["training/step"] == 1
    t.step(x)
    t.step(x)
    grown = t.state_dict()

    assert grown["training/loss_scale"] == 64
    assert grown["training/step"] == 3
    assert not np.array_equal(grown["w"], after["w"])


def test_loss_of_ones_own() -> None:
    """A function of the model's outputs and of further inputs, or an output of the model."""

    def weighed(scores: Any, labels: Any, weight: Any) -> Any:
        each = ops.SoftmaxCrossEntropyLoss(scores, labels, reduction="none", outputs=1)
        return (each * weight).mean()

    t = TrainModule(Classifier(), loss=weighed, optimizer=SGD(0.1), engine="host")
    data = batch()
    plain = float(TrainModule(Classifier(), loss="cross_entropy", optimizer=SGD(0.1), engine="host").step(**data))
    assert float(t.step(**data, weight=np.full(32, 2, F))) == pytest.approx(2 * plain, rel=1e-5)
    assert float(t.step(data["x"], data["labels"], np.zeros(32, F))) == 0


def test_inputs_are_checked() -> None:
    """A step with the wrong arrays says what it takes, and changes nothing."""
    t = TrainModule(Classifier(), loss="cross_entropy", optimizer=SGD(0.1), engine="host")
    data = batch()
    t.step(**data)
    before = t.state_dict()
    for args, named, message in (
        ((), {"x": data["x"]}, "missing input 'labels'; a step takes x, labels"),
        ((), {**data, "z": data["x"]}, "unknown input 'z'"),
        ((data["x"],), data, "given twice"),
        ((1, 2, 3), {}, "3 arrays given, a step takes 2"),
        ((), {**data, "x": [[1.0]]}, "'x' is a list, not an array"),
    ):
        with pytest.raises(InputError, match=message):
            t.step(*args, **named)
    with pytest.raises(xrt.errors.XRTError):
        t.step(x=np.zeros((4, 5), F), labels=np.zeros(4, np.int64))
    after = t.state_dict()
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_bad_options() -> None:
    """What an optimiser, a loss or a scale does not take is an error that says what it takes."""
    for call, message in (
        (lambda: Adam(beta1=1.0), "beta1=1.0"),
        (lambda: SGD(-1.0), "learning_rate=-1.0"),
        (lambda: SGD(0.1, clip_norm=0), "clip_norm=0"),
        (lambda: TrainModule(Classifier(), optimizer=SGD(0.1), engine="host", loss=3.5), "loss=3.5"),
        (lambda: TrainModule(Classifier(), optimizer=SGD(0.1), engine="host", loss_scale=-1), "loss_scale=-1"),
        (lambda: TrainModule(Classifier(), optimizer=SGD(0.1), engine="host", nonsense=1), "nonsense"),
    ):
        with pytest.raises(OptionError, match=message):
            call()


def test_a_loss_that_is_none() -> None:
    """A model whose output is no scalar needs a loss; one without variables cannot be trained."""
    t = TrainModule(Classifier(), optimizer=SGD(0.1), engine="host")
    with pytest.raises(GradientError, match="must be a scalar"):
        t.step(batch()["x"])
    graph = xrt.trace(lambda x: x.sum(), "float32[3]")
    with pytest.raises(GradientError, match="no float constants to train"):
        TrainModule(graph, optimizer=SGD(0.1), engine="host")


def test_states_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    """A state of another model, shape or seed is refused, and nothing is changed."""
    t = TrainModule(Classifier(), loss="cross_entropy", optimizer=Momentum(0.1), engine="host", seed=1)
    losses(t, 1)
    state = t.state_dict()
    for change, message in (
        ({k: v for k, v in state.items() if k != "w1"}, "missing 'w1'"),
        ({**state, "more": state["w1"]}, "unknown 'more'"),
        ({**state, "w1": state["w1"].T}, r"'w1' is float32\[16, 6\], not float32\[6, 16\]"),
        ({**state, "w1": state["w1"].astype(np.float64)}, "'w1' is float64"),
    ):
        with pytest.raises(CheckpointError, match=message):
            t.load_state_dict(change)
    t.save(tmp_path / "c")
    other = TrainModule(Classifier(), loss="cross_entropy", optimizer=Momentum(0.1), engine="host", seed=2)
    with pytest.raises(CheckpointError, match="seed=1, this module has seed=2"):
        other.load(tmp_path / "c")
    from xrt_core.training import checkpoint

    checkpoint.save(state, tmp_path / "d", {})
    with pytest.raises(CheckpointError, match="no training state"):
        t.load(tmp_path / "d")
    assert all(np.array_equal(state[n], a) for n, a in t.state_dict().items())


def test_mixed_plans() -> None:
    """Where the engine does not take some nodes, host and engine train together to the same losses."""
    engine = xla()

    class Mixed(Classifier):
        def build(self, x: Any) -> Any:
            with xrt.power_by_engine(None):
                h = ops.Relu(x @ self.w1 + self.b1)
            return h @ self.w2 + self.b2

    mixed = TrainModule(Mixed(), loss="cross_entropy", optimizer=AdamW(1e-2), engine=engine)
    host = TrainModule(Mixed(), loss="cross_entropy", optimizer=AdamW(1e-2), engine="host")
    np.testing.assert_allclose(losses(mixed, 20), losses(host, 20), rtol=1e-4)
    assert len(mixed._last.plan.launches) > 0  # type: ignore[union-attr]
    assert "host" in str(mixed.explain())


def test_a_graph_says_its_own_loss_and_optimizer() -> None:
    """`backward` in `build` and `add_optimizer` are all that a training needs; a plain run is not changed by them."""

    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.add_optimizer(xrt.optim.Adam(1e-2))

        def build(self, x: Any, labels: Any) -> Any:
            scores = super().build(x)
            ops.SoftmaxCrossEntropyLoss(scores, labels, outputs=1).backward()
            return scores

    t = TrainModule(Own(), engine="host")
    expected = losses(TrainModule(Classifier(), loss="cross_entropy", optimizer=Adam(1e-2), engine="host"), 5)
    assert losses(t, 5) == expected
    data = batch()
    assert xrt.XRTModule(Own(), engine="host")(**data).shape == (32, 3)
    assert xrt.XRTModule(t.graph(), engine="host")(**data).shape == (32, 3)
    with pytest.raises(xrt.errors.TraceError, match="Own has an optimizer already: Adam"):
        Own().add_optimizer(SGD(0.1))
    with pytest.raises(OptionError, match="optimizer=None: it takes one of xrt.optim"):
        TrainModule(Classifier(), engine="host")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: x.backward(), "a loss is a float scalar"),
        (lambda x: (x.sum().backward(), x.mean().backward()), "called twice"),
        (lambda x: ops.If(x.sum() > 0.0, then_branch=lambda: [x.sum(), x.sum().backward()][0],
                          else_branch=lambda: x.sum()), "call it in build itself"),
    ],
)  # fmt: skip
def test_backward_is_called_once_on_a_scalar(build: Any, message: str) -> None:
    """Anything else points at the user's line."""
    with pytest.raises(xrt.errors.TraceError, match=message):
        xrt.trace(build, "float32[3]")


def test_a_loss_that_is_not_finite_is_traced_back() -> None:
    """The opt-in check names the node that made the first NaN or infinity, and leaves the state alone."""

    class Log(xrt.Graph):
        def __init__(self) -> None:
            self.w = np.array([1.0, 2.0], F)

        def build(self, x: Any) -> Any:
            return (ops.Log(x * self.w) * 0.1).sum()

    t = TrainModule(Log(), optimizer=SGD(0.1), engine="host", check_finite=True)
    t.step(np.ones(2, F))
    before = t.state_dict()
    with pytest.raises(xrt.errors.ExecutionError, match=r"not finite: it comes from node 'Log' .*in \[-2.0?, "):
        t.step(np.array([1.0, -1.0], F) / before["w"] * 2)
    with pytest.raises(xrt.errors.ExecutionError, match="'x' holds one already"):
        t.step(np.array([1.0, np.nan], F))
    after = t.state_dict()
    assert all(np.array_equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("merged", [True, False])
def test_a_failed_launch_loses_nothing(merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine fails before it takes the variables, the host takes the step; after it, the error says so."""
    engine = xla()
    options = {"optimizer": Momentum(0.1), "engine": engine, "merge_updates": merged, "donate": True}
    t = TrainModule(Classifier(), loss="cross_entropy", **options)  # type: ignore[arg-type]
    reference = TrainModule(Classifier(), loss="cross_entropy", optimizer=Momentum(0.1), engine="host")
    assert losses(t, 2) == pytest.approx(losses(reference, 2), rel=1e-4)
    update = t._last.plan.launches[-1]  # type: ignore[union-attr]
    kind = type(update.executable.inner)
    run = kind.run

    def fail(self: Any, inputs: Any, *args: Any) -> Any:
        if len(inputs) == len(update.function.params):
            raise xrt.errors.ExecutionError("the device is full")
        return run(self, inputs, *args)

    monkeypatch.setattr(kind, "run", fail)
    assert losses(t, 1) == pytest.approx(losses(reference, 1), rel=1e-4)
    monkeypatch.undo()
    assert losses(t, 2) == pytest.approx(losses(reference, 2), rel=1e-4)

    def fail_late(self: Any, inputs: Any, *args: Any) -> Any:
        run(self, inputs, *args)
        if len(inputs) == len(update.function.params):
            raise xrt.errors.ExecutionError("the device is full")
        return run(self, inputs, *args)

    saved = t.state_dict()
    monkeypatch.setattr(kind, "run", fail_late)
    with pytest.raises(xrt.errors.TrainingError, match="they are lost: the device is full. Load a state"):
        losses(t, 1)
    monkeypatch.undo()
    t.load_state_dict(saved)
    assert losses(t, 2) == pytest.approx(losses(reference, 2), rel=1e-4)


def test_what_decides_shapes_is_not_trained() -> None:
    """The scales of a Resize are floats of several elements, and no variables all the same."""
    scales, w = np.array([1, 1, 2, 2], F), np.ones((1, 1, 2, 2), F)

    class Up(xrt.Graph):
        def __init__(self) -> None:
            self.w, self.scales = w, scales

        def build(self, x: Any) -> Any:
            return (ops.Resize(x * self.w, None, self.scales) ** 2.0).mean()

    t = TrainModule(Up(), optimizer=SGD(0.1), engine="host")
    losses(t, 2, x=np.ones((1, 1, 2, 2), F))
    assert t.variables == ("w",)
