"""What happens to the state: accumulation over micro-batches, variables that say so, and engines that fail."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import CheckpointError, ExecutionError, GradientError, InputError, OptionError, TrainingError
from xrt_core.frontends import ops
from xrt_core.training import SGD, Adam, AdamW, LossScale, Momentum, TrainModule

F = np.float32


class Net(xrt.Graph):
    """Two layers and their loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        rng = np.random.default_rng(0)
        self.w1, self.b1 = (rng.standard_normal((5, 8)) * 0.5).astype(F), np.zeros(8, F)
        self.w2 = (rng.standard_normal((8, 3)) * 0.5).astype(F)
        self.dropout = dropout

    def build(self, x: Any, labels: Any) -> Any:
        h = ops.Tanh(x @ self.w1 + self.b1)
        if self.dropout:
            h = ops.Dropout(h, self.dropout, outputs=1)
        return ops.SoftmaxCrossEntropyLoss(h @ self.w2, labels, outputs=1)


def batch(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points and labels."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 5)).astype(F), rng.integers(0, 3, count)


def engine_or_skip(name: str) -> str:
    """An engine's name; skips where JAX is not there."""
    if name == "xla":
        pytest.importorskip("jax")
    return name


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether two states are the same, bit for bit."""
    return set(a) == set(b) and all(a[n].tobytes() == b[n].tobytes() for n in a)


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["host", "xla"])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 64.0}, {"loss_scale": "dynamic"}], ids=str)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_micro_batches_make_one_batch(engine: str, options: dict[str, Any], clip: float | None) -> None:
    """Four micro-batches of 8 are one batch of 32: variables, slots and the count of updates, clipping included."""
    engine_or_skip(engine)

    def optimizer() -> Any:
        return Momentum(0.1, clip_norm=clip)

    parts = TrainModule(Net(), optimizer=optimizer(), engine=engine, accumulate=4, **options)
    whole = TrainModule(Net(), optimizer=optimizer(), engine=engine, **options)
    for k in range(3):
        x, labels = batch(32, k)
        mean = np.mean([parts.step(x[i : i + 8], labels[i : i + 8]) for i in range(0, 32, 8)])
        assert mean == pytest.approx(whole.step(x, labels), rel=1e-5)
    have, want = parts.state_dict(), whole.state_dict()
    for name, array in want.items():
        np.testing.assert_allclose(have[name], array, rtol=2e-5, atol=1e-6, err_msg=name)
    assert have["training/step"] == 3
    assert have["training/micro_step"] == 0
    assert not have["optimizer/sum/w1"].any()


@pytest.mark.parametrize("engine", ["host", pytest.param("xla", marks=pytest.mark.slow)])
def test_micro_batches_of_unequal_size_count_by_their_examples(engine: str) -> None:
    """And fewer than `accumulate` are applied when asked: the update of the whole batch."""
    engine_or_skip(engine)
    parts = TrainModule(Net(), optimizer=Adam(0.01), engine=engine, accumulate=4)
    whole = TrainModule(Net(), optimizer=Adam(0.01), engine=engine)
    assert not parts.apply()
    for k in range(2):
        x, labels = batch(12, k)
        for part in (slice(0, 8), slice(8, 11), slice(11, 12)):
            parts.step(x[part], labels[part])
        assert parts.apply()
        assert not parts.apply()
        whole.step(x, labels)
    have = parts.state_dict()
    for name, array in whole.state_dict().items():
        np.testing.assert_allclose(have[name], array, rtol=2e-5, atol=1e-6, err_msg=name)
    assert have["training/examples"] == have["training/micro_step"] == 0


def test_an_empty_batch_is_no_step() -> None:
    """It has no mean."""
    t = TrainModule(Net(), optimizer=SGD(0.1), engine="host")
    x, labels = batch(4)
    with pytest.raises(InputError, match=r"the batch is empty: input 'x' has shape \[0, "):
        t.step(x[:0], labels[:0])
    assert t.step_count == 0


@pytest.mark.slow
def test_nothing_is_updated_before_the_last_micro_batch() -> None:
    """Until then only sums grow; the sums are what the gradients are, and stay on the device, in place."""
    jax = pytest.importorskip("jax")
    t = TrainModule(Net(), optimizer=Adam(1e-2), engine="xla", accumulate=3, donate=True)
    x, labels = batch(4)
    first = t.step(x, labels)
    once = t.state_dict()
    again = t.step(x, labels)
    twice = t.state_dict()

    assert first == again
    assert np.array_equal(once["w1"], Net().w1)
    np.testing.assert_allclose(twice["optimizer/sum/w1"], 2 * once["optimizer/sum/w1"], rtol=1e-6)
    assert not twice["optimizer/mean/w1"].any()
    t.step(x, labels)
    assert not np.array_equal(t.state_dict()["w1"], once["w1"])
    t.step(x, labels)
    index = t._state.names.index("optimizer/sum/w1")
    before = t._state.arrays[index]
    t.step(x, labels)
    assert isinstance(before, jax.Array)
    assert before.is_deleted()


def test_an_overflow_in_one_micro_batch_leaves_the_update_out() -> None:
    """The scale falls, the sums begin anew, and no variable moves."""
    t = TrainModule(Net(), optimizer=SGD(0.1), engine="host", accumulate=2, loss_scale=LossScale(64.0))
    x, labels = batch(4)
    t.step(np.full_like(x, np.inf), labels)
    t.step(x, labels)
    state = t.state_dict()
    assert np.array_equal(state["w1"], Net().w1)
    assert state["training/loss_scale"] == 32
    assert state["training/step"] == state["training/micro_step"] == 0
    assert not state["optimizer/sum/w1"].any()
    t.step(x, labels)
    t.step(x, labels)
    assert t.state_dict()["training/step"] == 1


def test_dropout_differs_between_micro_batches_and_is_resumed(tmp_path: pathlib.Path) -> None:
    """Each micro-batch draws its own numbers; a run saved between two of them goes on bit for bit."""

    def module() -> TrainModule:
        return TrainModule(Net(0.5), optimizer=AdamW(1e-2), engine="host", accumulate=4, seed=3)

    x, labels = batch(16)
    t = module()
    assert len({float(t.step(x, labels)) for _ in range(3)}) == 3
    t.save(tmp_path / "c")
    u = module()
    u.load(tmp_path / "c")
    assert [t.step(x, labels) for _ in range(6)] == [u.step(x, labels) for _ in range(6)]
    assert same(t.state_dict(), u.state_dict())


def test_accumulation_and_states_that_do_not_fit() -> None:
    """A state from the middle of a longer accumulation is refused, a wrong count as well."""
    t = TrainModule(Net(), optimizer=SGD(0.1), engine="host", accumulate=4)
    for _ in range(3):
        t.step(*batch(4))
    other = TrainModule(Net(), optimizer=SGD(0.1), engine="host", accumulate=2)
    other.step(*batch(4))
    before = other.state_dict()
    with pytest.raises(CheckpointError, match="at micro-batch 3 of an update, this module has accumulate=2"):
        other.load_state_dict(t.state_dict())
    plain = TrainModule(Net(), optimizer=SGD(0.1), engine="host")
    plain.step(*batch(4))
    with pytest.raises(CheckpointError, match="unknown 'optimizer/sum/"):
        plain.load_state_dict(t.state_dict())
    assert same(other.state_dict(), before)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(OptionError, match=r"accumulate=.*: it takes a whole number of at least 1"):
            TrainModule(Net(), optimizer=SGD(0.1), engine="host", accumulate=bad)


# --- variables --------------------------------------------------------------------------------------------------------


def test_variables() -> None:
    """A Variable computes like a tensor, may be a single number, and is left alone where it is not to be trained."""

    class Own(xrt.Graph):
        def __init__(self) -> None:
            self.w = xrt.Variable(np.array([[1.0, 2.0], [3.0, 4.0]], F))
            self.gain = xrt.Variable(0.5)
            self.fixed = xrt.Variable([1.0, 1.0], trained=False)

        def build(self, x: Any) -> Any:
            y = x @ self.w * self.gain + self.fixed + np.ones(2, F) * self.fixed
            return (y**2.0).sum() + (self.w**2.0).sum() * 0.1 + self.w[0, 0] + (1.0 - self.w.T).mean()

    t = TrainModule(Own(), optimizer=SGD(0.01), engine="host")
    x = np.array([[1.0, -1.0]], F)
    w, gain = np.array([[1.0, 2.0], [3.0, 4.0]]), 0.5
    y = x @ w * gain + 2
    assert t.step(x) == pytest.approx((y**2).sum() + 0.1 * (w**2).sum() + 1 + (1 - w).mean(), rel=1e-6)
    assert t.variables == ("w", "gain")
    dw = x.T @ (2 * y * gain) + 0.2 * w - 0.25
    dw[0, 0] += 1
    np.testing.assert_allclose(t.state_dict()["w"], w - 0.01 * dw, rtol=1e-5)
    np.testing.assert_allclose(t.state_dict()["gain"], gain - 0.01 * (2 * y * (x @ w)).sum(), rtol=1e-5)
    assert Own().w.shape == (2, 2)
    np.testing.assert_array_equal(np.asarray(Own().w), w)


def test_tied_weights_are_one_variable() -> None:
    """An array that an operator and an expression read is one variable, whose gradient is the sum of both."""

    class Tied(xrt.Graph):
        def __init__(self) -> None:
            self.e = np.arange(4, dtype=F).reshape(2, 2)

        def build(self, rows: Any) -> Any:
            return (ops.Gather(self.e, rows) @ self.e).sum()

    t = TrainModule(Tied(), optimizer=SGD(1.0), engine="host")
    t.step(np.array([1]))
    e = np.array([[0.0, 1.0], [2.0, 3.0]])
    gradient = np.array([[2.0, 2.0], [3.0, 3.0]]) + np.array([[0.0, 0.0], e.sum(axis=1)])
    assert t.variables == ("e",)
    np.testing.assert_allclose(t.state_dict()["e"], e - gradient)


def test_arrays_read_through_numpy_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A slice of a plain array is another array, which nobody trains: that is said. A Variable's slice is traced."""

    class Sliced(xrt.Graph):
        def __init__(self, wrap: Any) -> None:
            self.w = wrap(np.ones((4, 2), F))
            self.b = np.zeros(2, F)

        def build(self, x: Any) -> Any:
            return ((x @ self.w[:2] + self.b) ** 2.0).sum()

    t = TrainModule(Sliced(lambda a: a), optimizer=SGD(0.1), engine="host")
    t.step(np.ones((1, 2), F))
    assert t.variables == ("b",)
    assert "Sliced.w is not trained: `build` reads it through NumPy" in caplog.text
    caplog.clear()
    t = TrainModule(Sliced(xrt.Variable), optimizer=SGD(0.1), engine="host")
    t.step(np.ones((1, 2), F))
    assert set(t.variables) == {"w", "b"}
    assert not caplog.text


def test_variables_are_floats() -> None:
    """Integers are no variables to train: where they are made, and where they are named."""
    with pytest.raises(GradientError, match=r"is int64: only floats are trained; give it trained=False"):
        xrt.Variable(np.arange(3))
    assert xrt.Variable(np.arange(3), trained=False).dtype == np.int64
    with pytest.raises(AttributeError, match="no attribute 'sum'"):
        xrt.Variable(np.ones(2, F)).sum()

    class Looked(xrt.Graph):
        def __init__(self) -> None:
            self.table, self.rows = np.ones((4, 2), F), np.array([1, 2])

        def build(self, x: Any) -> Any:
            return (ops.Gather(self.table, self.rows) * x).sum()

    graph = xrt.trace(Looked(), "float32[2]")
    with pytest.raises(GradientError, match="'rows' is int64: only floats are trained"):
        TrainModule(graph, optimizer=SGD(0.1), engine="host", trainable=["rows"])


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(t: TrainModule, monkeypatch: pytest.MonkeyPatch, when: Callable[[Any], bool], late: bool) -> None:
    """Make the launches of the last step for which `when` holds fail, before or after they have taken their inputs."""
    kind = type(t._last.plan.launches[0].executable.inner)  # type: ignore[union-attr]
    run = kind.run
    owners = {id(x.executable.inner): x for x in t._last.plan.launches}  # type: ignore[union-attr]

    def broken(self: Any, inputs: Any, *args: Any) -> Any:
        if when(owners.get(id(self))):
            if late:
                run(self, inputs, *args)
            raise ExecutionError("the device is full")
        return run(self, inputs, *args)

    monkeypatch.setattr(kind, "run", broken)


def updates(launch: Any) -> bool:
    """Whether a launch writes variables."""
    return launch is not None and bool(launch.function.aliases)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failure_before_the_variables_are_taken_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """The host takes the step, to the same numbers."""
    pytest.importorskip("jax")
    t = TrainModule(Net(), optimizer=Momentum(0.1), engine="xla", accumulate=accumulate, donate=True)
    reference = TrainModule(Net(), optimizer=Momentum(0.1), engine="host", accumulate=accumulate)
    found = [float(t.step(*batch(8))) for _ in range(4)]
    failing(t, monkeypatch, updates, late=False)
    found += [float(t.step(*batch(8))) for _ in range(2)]
    monkeypatch.undo()
    found += [float(t.step(*batch(8))) for _ in range(2)]
    np.testing.assert_allclose(found, [reference.step(*batch(8)) for _ in range(8)], rtol=1e-5)


@pytest.mark.slow
def test_the_first_run_of_a_program_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of another signature that fails in its first step, however late, leaves the state to the host."""
    pytest.importorskip("jax")
    t = TrainModule(Net(), optimizer=Momentum(0.1), engine="xla", donate=True)
    reference = TrainModule(Net(), optimizer=Momentum(0.1), engine="host")
    for _ in range(3):
        t.step(*batch(8))
        reference.step(*batch(8))
    failing(t, monkeypatch, lambda launch: True, late=True)
    assert t.step(*batch(6)) == pytest.approx(reference.step(*batch(6)), rel=1e-5)
    monkeypatch.undo()
    assert t.step(*batch(8)) == pytest.approx(reference.step(*batch(8)), rel=1e-5)


def test_a_state_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nothing goes on from what is left of it: steps, copies and files are refused until a state is loaded."""
    pytest.importorskip("jax")
    t = TrainModule(Net(), optimizer=Momentum(0.1), engine="xla", donate=True)
    for _ in range(3):
        t.step(*batch(8))
    t.save(tmp_path / "c")
    saved = t.state_dict()
    failing(t, monkeypatch, updates, late=True)
    with pytest.raises(TrainingError, match="they are lost: the device is full. Load a state .*donate=False"):
        t.step(*batch(8))
    monkeypatch.undo()
    for call in (lambda: t.step(*batch(8)), t.state_dict, t.graph, lambda: t.save(tmp_path / "d")):
        with pytest.raises(TrainingError, match="they are lost"):
            call()
    assert not (tmp_path / "d").exists()
    with pytest.raises(CheckpointError, match="missing"):
        t.load_state_dict({})
    with pytest.raises(TrainingError, match="they are lost"):
        t.state_dict()
    t.load(tmp_path / "c")
    assert same(t.state_dict(), saved)
    reference = TrainModule(Net(), optimizer=Momentum(0.1), engine="host")
    reference.step(*batch(8))
    reference.load_state_dict(saved)
    assert t.step(*batch(8)) == pytest.approx(reference.step(*batch(8)), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"donate": False}], ids=["small", "switched off"])
def test_without_donation_nothing_is_ever_gone(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """A step leaves the old state in place until the new one is there. So it is for a small state unless asked for, and
    the step is one launch."""
    jax = pytest.importorskip("jax")
    t = TrainModule(Net(), optimizer=Momentum(0.1), engine="xla", **options)
    reference = TrainModule(Net(), optimizer=Momentum(0.1), engine="host")
    for _ in range(3):
        t.step(*batch(8))
        reference.step(*batch(8))
    old = t._state.arrays[0]
    assert isinstance(old, jax.Array)
    assert [len(x.function.aliases) for x in t._last.plan.launches] == [0]  # type: ignore[union-attr]
    failing(t, monkeypatch, lambda launch: True, late=True)
    assert t.step(*batch(8)) == pytest.approx(reference.step(*batch(8)), rel=1e-5)
    monkeypatch.undo()
    assert not old.is_deleted()
    assert t.step(*batch(8)) == pytest.approx(reference.step(*batch(8)), rel=1e-5)


@pytest.mark.slow
def test_a_large_state_is_updated_in_place() -> None:
    """Unless that is switched off: in a launch of its own, so that a failure in the gradients costs nothing."""
    jax = pytest.importorskip("jax")

    class Table(xrt.Graph):
        def __init__(self) -> None:
            self.w = np.ones((1 << 19, 1), np.float32)

        def build(self, rows: Any) -> Any:
            return (ops.Gather(self.w, rows, axis=0) ** 2.0).mean()

    t = TrainModule(Table(), optimizer=Adam(0.1), engine="xla")  # three arrays of 2 MiB
    for _ in range(2):
        t.step(np.arange(4))
    old = t._state.arrays[0]
    t.step(np.arange(4))
    assert isinstance(old, jax.Array)
    assert old.is_deleted()
    assert [bool(x.function.aliases) for x in t._last.plan.launches] == [False, True]  # type: ignore[union-attr]


@pytest.mark.slow
def test_updates_merged_into_the_step() -> None:
    """With merge_updates all is one launch, in place as well, to the same numbers, also with recomputation."""
    jax = pytest.importorskip("jax")
    reference = TrainModule(Net(), optimizer=Momentum(0.1), engine="host")
    wanted = [float(reference.step(*batch(8))) for _ in range(4)]
    for options in ({}, {"accumulate": 1, "recompute": "Tanh|MatMul"}):
        t = TrainModule(Net(), optimizer=Momentum(0.1), engine="xla", merge_updates=True, donate=True, **options)  # type: ignore[arg-type]
        found = [float(t.step(*batch(8))) for _ in range(3)]
        old = t._state.arrays[0]
        found.append(float(t.step(*batch(8))))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert len(t._last.plan.launches) == 1  # type: ignore[union-attr]
        assert isinstance(old, jax.Array)
        assert old.is_deleted()
