"""What stays on the device: batches that lie there, counters, and losses that are read when they are used."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.frontends import ops
from xrt_core.training import SGD, TrainModule, schedules
from xrt_core.training.lazy_loss import LazyLoss

jax = pytest.importorskip("jax")
pytest.importorskip("xrt_xla")
pytestmark = pytest.mark.tiny_clusters

F = np.float32
R = np.random.default_rng(0)
X, Y = R.standard_normal((6, 4)).astype(F), np.arange(6) % 3


class Net(xrt.Graph):
    """A layer."""

    def __init__(self) -> None:
        self.w = np.random.default_rng(1).standard_normal((4, 3)).astype(F)

    def build(self, x: Any) -> Any:
        return ops.Tanh(x @ self.w) * 2.0


def made(**options: Any) -> TrainModule:
    """A training of it, whole on XLA."""
    return TrainModule(
        Net(), **{"loss": "cross_entropy", "optimizer": SGD(0.5), "engine": "xla", "prune": False, **options}
    )


def test_steps_read_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a batch on the device and a lazy loss, no array of JAX is read between the first step and the loss."""
    t, plain = (
        made(optimizer=SGD(schedules.linear(0.5, 10)), lazy_loss=True),
        made(optimizer=SGD(schedules.linear(0.5, 10))),
    )
    x, y = jax.numpy.asarray(X), jax.numpy.asarray(Y.astype(np.int32))
    losses = [t.step(x, y) for _ in range(2)]
    read: list[str] = []
    from xrt_core.runtime import arrays
    from xrt_core.training import lazy_loss, model_adapter, module, planned_step, state

    def counting(a: Any) -> Any:
        if type(a) is not np.ndarray:
            read.append(type(a).__name__)
        return arrays.to_numpy(a)

    for place in (module, model_adapter, lazy_loss, planned_step, state):
        monkeypatch.setattr(place, "to_numpy", counting)
    losses += [t.step(x, y) for _ in range(3)]
    assert not read
    assert isinstance(losses[-1], LazyLoss)
    found = [float(a) for a in losses]
    assert len(read) == 5  # each loss once
    np.testing.assert_array_equal(found, [plain.step(X, Y.astype(np.int32)) for _ in range(5)])
    assert t.step_count == plain.step_count == 5


def test_counters_are_followed() -> None:
    """Over micro-batches, applied ones, left-out steps and loaded states they are those of the state."""
    for options in ({"accumulate": 3}, {"loss_scale": "dynamic"}, {}):
        t = made(**options, engine="host", optimizer=SGD(lambda step: 0.1 / (1 + step)))
        for k in range(5):
            t.step(X, Y)
            if k == 3:
                t.apply()
            state = t.state_dict()
            assert t.step_count == state["training/step"]
            if "accumulate" in options:
                assert t._state.count("training/micro_step") == state["training/micro_step"]
        t.load_state_dict({n: np.zeros_like(a) if n == "training/step" else a for n, a in state.items()})
        assert t.step_count == 0


def test_a_lazy_loss_is_a_number() -> None:
    """It computes, compares, prints and converts as the scalar that it stands for."""
    loss = LazyLoss(jax.numpy.float32(1.5))
    assert (loss.dtype, loss.shape) == (np.float32, ())
    assert loss + 1 == 2.5
    assert 3.0 / loss == 2.0
    assert loss < 2
    assert f"{loss:.2f}" == "1.50"
    assert np.isfinite(loss)
    np.testing.assert_array_equal(np.asarray([loss, loss], F), [1.5, 1.5])
    assert loss.item() == float(loss) == 1.5


def test_arrays_of_jax_that_do_not_fit() -> None:
    """A deleted array is refused, and labels out of range where they are to be read."""
    t = made(engine="host")
    gone = jax.numpy.asarray(X)
    gone.delete()
    with pytest.raises(xrt.InputError, match="cannot be read"):
        t.step(gone, Y)
    with pytest.raises(xrt.InputError, match="'labels': 5 at"):
        made(engine="host", check_indices=True).step(X, jax.numpy.asarray(Y.astype(np.int32) + 5))
    assert t.step(jax.numpy.asarray(X), Y) == made(engine="host").step(X, Y)


def test_steps_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lazy loss and without the guard no step waits after the second; arrays that the caller writes into as soon
    as it returns were read before."""
    t, plain = made(lazy_loss=True, guard=False), made(guard=False, donate=True)
    given = np.random.default_rng(0).standard_normal((4096, 4)).astype(F)
    labels = np.arange(4096) % 3
    wanted = [float(plain.step(given, labels)) for _ in range(6)]
    losses = [t.step(given, labels) for _ in range(2)]
    kind = type(t._last.plan.launches[0].executable.inner)  # type: ignore[union-attr]
    run, waited = kind.run, []

    def noted(self: Any, inputs: Any, options: Any = None, block_until_done: bool = True) -> Any:
        waited.append(block_until_done)
        return run(self, inputs, options, block_until_done)

    monkeypatch.setattr(kind, "run", noted)
    for _ in range(4):
        x, y = given.copy(), labels.copy()
        losses.append(t.step(x, y))
        x[:], y[:] = 0, 0
    assert waited == [False] * 4
    assert [float(a) for a in losses] == wanted
    plain.step(given, labels)
    assert waited[-1]


def test_a_small_step_is_waited_for_by_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch that takes nothing runs while Python goes on, unless its time is recorded; what fails on the device
    then is the host's, to the same numbers."""
    t, plain = made(guard=False), made(engine="host")
    found = [t.step(X, Y) for _ in range(2)]
    kind = type(t._last.plan.launches[0].executable.inner)  # type: ignore[union-attr]
    run, waited, fails = kind.run, [], False

    def noted(self: Any, inputs: Any, options: Any = None, block_until_done: bool = True) -> Any:
        waited.append(block_until_done)
        results = run(self, inputs, options, block_until_done)
        if fails:
            for a in results:
                a.delete()  # reads as what failed on the device does
        return results

    monkeypatch.setattr(kind, "run", noted)
    found.append(t.step(X, Y))
    with xrt.profile():
        found.append(t.step(X, Y))
    fails = True
    found.append(t.step(X, Y))
    fails = False
    found += [t.step(X, Y) for _ in range(2)]
    assert waited == [False, True, False, False, False]
    np.testing.assert_allclose(found, [plain.step(X, Y) for _ in range(len(found))], rtol=1e-5)
    assert all(isinstance(a, float | np.floating) for a in found)
    assert t.step_count == len(found)
    assert len(t.events.recent("fallback")) == 1


@pytest.mark.parametrize("rows", [4, 1 << 19])
def test_the_state_before_a_step_is_kept_where_it_is_small(rows: int) -> None:
    """Until the next step runs, which frees it meanwhile; one of more than 4 MiB goes at once."""

    class Table(xrt.Graph):
        def __init__(self) -> None:
            self.w = np.ones((rows, 2), F)

        def build(self, at: Any) -> Any:
            return (xrt.ops.Gather(self.w, at, axis=0) ** 2.0).mean()

    t = TrainModule(Table(), optimizer=SGD(0.1, ema=0.9), engine="xla", guard=False, donate=False)
    for _ in range(3):
        t.step(np.arange(4))
    old = weakref.ref(t._state.arrays[0])
    t.step(np.arange(4))
    assert (old() is not None) == (rows == 4)
    t.step(np.arange(4))
    assert old() is None


def test_a_step_that_fails_behind_the_caller_loses_the_state() -> None:
    """Reading its loss says so, and so does all else until a state is loaded; an old loss does not lose a new state."""
    t = made(lazy_loss=True, guard=False)
    for _ in range(3):
        loss = t.step(X, Y)
    saved = t.state_dict()
    losses = [t.step(X, Y) for _ in range(2)]
    for a in losses:
        a._array.delete()  # reads as what failed on the device does
    with pytest.raises(xrt.errors.TrainingError, match="ran ahead failed on the device, and the state is lost"):
        float(losses[0])
    for call in (lambda: t.step(X, Y), t.state_dict):
        with pytest.raises(xrt.errors.TrainingError, match="the state is lost"):
            call()
    t.load_state_dict(saved)
    with pytest.raises(xrt.errors.TrainingError):
        float(losses[1])
    assert float(t.step(X, Y)) < float(loss)
    for a in t._state.arrays:
        a.delete()
    with pytest.raises(xrt.errors.TrainingError, match="the state is lost"):
        t.state_dict()
