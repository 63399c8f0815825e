"""Groups, schedules, clipping by value, running means, and gradients without an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import OptionError
from xrt_core.frontends import ops
from xrt_core.training import SGD, Adam, AdamW, LossScale, TrainModule, schedules

F = np.float32
R = np.random.default_rng(0)
X, Y = R.standard_normal((8, 4)).astype(F), R.standard_normal((8, 2)).astype(F)


class Net(xrt.Graph):
    """Two layers; `head` and `body` are groups by name."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.body = {"w": rng.standard_normal((4, 3)).astype(F), "bias": np.ones(3, F)}
        self.head = {"w": rng.standard_normal((3, 2)).astype(F), "bias": np.ones(2, F)}

    def build(self, x: Any) -> Any:
        return ops.Tanh(x @ self.body["w"] + self.body["bias"]) @ self.head["w"] + self.head["bias"]


def made(optimizer: Any, **options: Any) -> TrainModule:
    """A training of it on the host."""
    return TrainModule(Net(), loss="mse", optimizer=optimizer, engine="host", **options)


def after(optimizer: Any, steps: int = 3, **options: Any) -> dict[str, np.ndarray]:
    """The parameters after some steps."""
    t = made(optimizer, **options)
    for _ in range(steps):
        t.step(X, Y)
    return t.parameters()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_groups(accumulate: int) -> None:
    """A group has its own rate and decay; the first pattern counts, and a rate of 0 leaves a variable as it is."""
    options = {"groups": {"head.bias": {"weight_decay": 0.0}, "head.*": {"learning_rate": lambda step: 0.0}}}
    found = after(AdamW(0.1, weight_decay=0.5, **options), 4, accumulate=accumulate)
    start = made(SGD(0.1)).parameters()
    np.testing.assert_array_equal(found["head.w"], start["head.w"])
    assert not np.array_equal(found["head.bias"], start["head.bias"])
    whole = after(AdamW(0.1, weight_decay=0.5, groups={"body.*": {"learning_rate": 0.0}}), 4, accumulate=accumulate)
    np.testing.assert_array_equal(whole["body.w"], start["body.w"])
    decayed, plain = (after(SGD(0.1, weight_decay=d, groups=g), 1)
                      for d, g in ((0.0, {"*.w": {"weight_decay": 0.5}}), (0.5, None)))  # fmt: skip
    for name, array in plain.items():
        np.testing.assert_allclose(decayed[name], array, rtol=1e-6)
    with pytest.raises(
        OptionError, match="groups: 'a' has the option 'lr'; it takes learning_rate, weight_decay, clip"
    ):
        SGD(0.1, groups={"a": {"lr": 1.0}})


def test_a_group_without_a_variable() -> None:
    """A pattern that matches none, or none that is left, is an error that lists the variables."""
    for groups, match in (
        ({"head.bais": {"weight_decay": 0.0}}, "'head.bais' matches no variable; there are body.w, .*did you mean"),
        ({"*": {"weight_decay": 0.1}, "*.w": {"weight_decay": 0.0}}, r"'\*.w' has no variable that an earlier group"),
    ):
        with pytest.raises(OptionError, match=match):
            made(SGD(0.1, groups=groups)).step(X, Y)


def test_clipping_by_group() -> None:
    """A group with a limit has a norm of its own; others share the optimizer's; None leaves a group unclipped."""
    groups = {"head.w": {"clip_norm": 0.01}, "head.bias": {"clip_norm": None}, "body.bias": {"clip_value": 1e-3}}
    t = made(SGD(1.0, clip_norm=0.02, groups=groups))
    before, g = t.parameters(), t.gradients(X, Y)
    t.step(X, Y)
    g["head.w"] = g["head.w"] * (0.01 / np.linalg.norm(g["head.w"]))
    g["body.bias"] = np.clip(g["body.bias"], -1e-3, 1e-3)
    norm = np.sqrt((g["body.w"] ** 2).sum() + (g["body.bias"] ** 2).sum())
    assert norm > 0.02
    g["body.w"], g["body.bias"] = g["body.w"] * (0.02 / norm), g["body.bias"] * (0.02 / norm)
    for name, array in t.parameters().items():
        np.testing.assert_allclose(before[name] - array, g[name], rtol=1e-3, atol=1e-6)
    with pytest.raises(OptionError, match="clip_norm of 'a'=0: it takes a number above 0, or None"):
        SGD(0.1, groups={"a": {"clip_norm": 0}})


def test_schedules_compile_nothing_again() -> None:
    """The rate of each step is the schedule's, over one plan."""
    t = made(SGD(schedules.cosine(0.5, 10, warmup=2), groups={"body.*": {"learning_rate": schedules.linear(0.1, 5)}}))
    for step in range(5):
        before, gradients = t.parameters(), t.gradients(X, Y)
        t.step(X, Y)
        for name, array in t.parameters().items():
            rate = (
                schedules.linear(0.1, 5)(step) if name.startswith("body") else schedules.cosine(0.5, 10, warmup=2)(step)
            )
            np.testing.assert_allclose(before[name] - rate * gradients[name], array, rtol=1e-5, atol=1e-6)
    assert len(t._steps) == 2  # the step, and the gradients


def test_values_of_schedules() -> None:
    """At their corners, and as PyTorch has one_cycle."""
    cosine = schedules.cosine(1.0, 100, warmup=9, end=0.1)
    np.testing.assert_allclose([cosine(s) for s in (0, 8, 9, 100, 500)], [0.1, 0.9, 1.0, 0.1, 0.1])
    linear = schedules.linear(1.0, 100, end=0.5)
    np.testing.assert_allclose([linear(s) for s in (0, 50, 100, 200)], [1.0, 0.75, 0.5, 0.5])
    np.testing.assert_allclose([schedules.constant(2.0, 3)(s) for s in range(5)], [0.5, 1.0, 1.5, 2.0, 2.0])
    np.testing.assert_allclose(schedules.exponential(1.0, 0.25, 10)(5), 0.5)
    np.testing.assert_allclose(schedules.exponential(1.0, 0.25, 10, stairs=True)(19), 0.25)
    cycle = schedules.one_cycle(1.0, 10)
    # torch.optim.lr_scheduler.OneCycleLR(max_lr=1.0, total_steps=10), each step's rate
    wanted = [0.04, 0.52, 1.0, 0.950484632, 0.811745654, 0.611262022, 0.388741978, 0.188258346, 0.049519368, 4e-06]
    np.testing.assert_allclose([cycle(s) for s in range(10)], wanted, rtol=1e-5)


def test_plateau() -> None:
    """The rate falls after epochs that are no better."""
    plateau = schedules.ReduceOnPlateau(1.0, "loss", factor=0.5, patience=2, least=0.2)
    t = made(SGD(lambda step: 0.0 * plateau(step)))
    t.fit([(X, Y)], 9, callbacks=plateau)
    assert plateau(0) == 0.2


def test_clip_by_value() -> None:
    """Each element of a gradient is cut, before the norm."""
    gradients = made(SGD(1.0)).gradients(X, Y)
    limit = float(np.median(np.abs(gradients["body.w"])))
    start, found = made(SGD(1.0)).parameters(), after(SGD(1.0, clip_value=limit), 1)
    for name, g in gradients.items():
        np.testing.assert_allclose(start[name] - found[name], np.clip(g, -limit, limit), rtol=1e-4, atol=1e-6)


def test_running_means() -> None:
    """They follow the variables, are part of the state, and wait when a step is left out."""
    t = made(SGD(0.1, ema=0.75))
    mean = t.parameters()["head.w"]
    for _ in range(3):
        t.step(X, Y)
        mean = 0.75 * mean + 0.25 * t.parameters()["head.w"]
    np.testing.assert_allclose(t.parameters(average=True)["head.w"], mean, rtol=1e-5)
    by_means = made(SGD(0.1))
    by_means.step(X, Y)
    by_means.load_state_dict(by_means.state_dict() | t.parameters(average=True))
    wanted, plain = by_means.evaluate([(X, Y)])["loss"], t.evaluate([(X, Y)])["loss"]
    assert abs(wanted - plain) > 1e-3
    np.testing.assert_allclose(t.evaluate([(X, Y)], average=True)["loss"], wanted, rtol=1e-5)
    with pytest.raises(OptionError, match="keeps no running means"):
        by_means.evaluate([(X, Y)], average=True)
    np.testing.assert_allclose(t.predict(X, average=True), by_means.predict(X), rtol=1e-6)
    np.testing.assert_allclose(t(X, average=True), by_means.predict(X), rtol=1e-6)
    assert not np.allclose(t.predict(X), by_means.predict(X), rtol=1e-3)
    with pytest.raises(OptionError, match="no running means"):
        by_means.predict(X, average=True)
    with pytest.raises(OptionError, match="average=<ndarray>: it takes True or False; an input of that name"):
        t.predict(X, average=X)
    other = made(SGD(0.1, ema=0.75))
    other.load_state_dict(t.state_dict())
    other.step(X, Y)
    t.step(X, Y)
    np.testing.assert_array_equal(*(m.parameters(average=True)["head.w"] for m in (t, other)))
    scaled = made(SGD(0.1, ema=0.75), loss_scale=LossScale(1e38, dynamic=False))
    scaled.step(X, Y * 100)
    np.testing.assert_array_equal(scaled.parameters(average=True)["head.w"], scaled.parameters()["head.w"])
    with pytest.raises(OptionError, match="keeps no running means; give it ema="):
        made(Adam(0.1)).parameters(average=True)


def test_gradients_are_those_of_a_step() -> None:
    """With SGD at a rate of 1 a step subtracts them; asking for them changes nothing."""
    t = made(SGD(1.0))
    before = t.parameters()
    gradients = t.gradients(x=X, target=Y)
    assert t.step_count == 0
    t.step(X, Y)
    for name, array in t.parameters().items():
        np.testing.assert_allclose(before[name] - array, gradients[name], rtol=1e-5, atol=1e-6)
