"""What a training refuses: each with an error that says what and why, and with no state changed."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import CheckpointError, ExecutionError, GradientError, InputError, OptionError, XRTError
from xrt_core.frontends import ops
from xrt_core.ir.graph import Graph, Value
from xrt_core.testing.functions import node, value
from xrt_core.training import LAMB, SGD, Adagrad, Adam, AdamW, Momentum, TrainModule, gradients

F = np.float32


class Line(xrt.Graph):
    """A line through points; a weight that nothing reads in a differentiable way."""

    def __init__(self) -> None:
        self.w, self.b = np.ones((3, 2), F), np.zeros(2, F)
        self.index = np.ones((4, 2), F)

    def build(self, x: Any, y: Any) -> Any:
        places = ops.ArgMax(self.index, axis=0).astype(np.float32)
        return ((x @ self.w + self.b + ops.Sum(places.reshape((1, 2))) * 0.0 - y) ** 2.0).mean()


def batch() -> dict[str, np.ndarray]:
    """Points and where they go."""
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((4, 3)).astype(F), "y": rng.standard_normal((4, 2)).astype(F)}


def test_rows_of_another_library_are_checked_at_their_first_step() -> None:
    """Which runs on copies, and later, by the host: never by another row of the table."""
    jnp = pytest.importorskip("jax.numpy")

    class Table(xrt.Graph):
        def __init__(self) -> None:
            self.w = np.ones((10, 3), F)

        def build(self, rows: Any) -> Any:
            return ops.Gather(self.w, rows, axis=0).sum()

    t = TrainModule(Table(), optimizer=SGD(0.1), engine="xla", guard=False)
    t.step(np.array([1, 2]))
    for rows in (jnp.array([11, 3]), jnp.array([1, 3]), jnp.array([11, 3])):
        if int(rows[0]) < 10:
            t.step(rows)
            continue
        before = t.state_dict()
        with pytest.raises((InputError, ExecutionError), match="11"):
            t.step(rows)
        assert all(np.array_equal(a, before[n]) for n, a in t.state_dict().items())


def module(**options: Any) -> TrainModule:
    """A training after two steps."""
    t = TrainModule(Line(), optimizer=Momentum(0.1), engine="host", **options)
    t.step(**batch())
    t.step(**batch())
    return t


def unchanged(t: TrainModule, call: Callable[[], Any], error: type[XRTError], match: str) -> None:
    """The call raises, and the next step is the one that it would have been."""
    before = t.state_dict()
    with pytest.raises(error, match=match):
        call()
    after = t.state_dict()
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    other = module()
    other.load_state_dict(before)
    assert t.step(**batch()) == other.step(**batch())


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda x: x * np.ones(3, F), r"the loss .* is float32\[3\]; it must be a scalar"),
        (lambda x: ops.ArgMax(x, axis=0, keepdims=0), "int64.*; it must be a float"),
    ],
)
def test_a_loss_that_is_no_float_scalar(build: Any, match: str) -> None:
    """It is said of which type it is."""
    graph = xrt.trace(build, "float32[3]")
    with pytest.raises(GradientError, match=match):
        gradients(graph, 0, graph.inputs)


def test_no_way_from_the_loss() -> None:
    """To a variable that was named, to one that `gradients` is asked for, or to any at all."""
    t = TrainModule(Line(), optimizer=SGD(0.1), engine="host", trainable=["w", "index"])
    with pytest.raises(GradientError, match="does not depend on 'index' .*; leave that out of trainable"):
        t.step(**batch())
    t = TrainModule(Line(), optimizer=SGD(0.1), engine="host", trainable=lambda name, array: name == "index")
    with pytest.raises(GradientError, match="does not depend on 'index' .*, which is all there is to train"):
        t.step(**batch())
    plain = module()
    assert np.array_equal(plain.state_dict()["index"], Line().index)
    graph = xrt.trace(lambda a, b: (a * a).sum(), "float32[3]", "float32[2]")
    with pytest.raises(GradientError, match="no gradient by 'b': the loss .* does not depend on it"):
        gradients(graph, 0, graph.inputs)
    integers = xrt.trace(lambda a, i: (a * i.astype(np.float32)).sum(), "float32[3]", "int64[3]")
    with pytest.raises(GradientError, match=r"no gradient by 'i': it is int64\[3\], not a float"):
        gradients(integers, 0, integers.inputs)


@pytest.mark.parametrize("kind", [SGD, Momentum, Adagrad, Adam, AdamW, LAMB])
def test_unknown_options_of_optimisers(kind: Any) -> None:
    """They are named, beside what there is."""
    said = f"{kind.__name__} has no option 'lr'; it takes .*weight_decay.*PyTorch's lr is learning_rate here"
    with pytest.raises(OptionError, match=said):
        kind(0.1, lr=0.1)


def test_a_schedule_that_goes_wrong() -> None:
    """It stops the step before it begins."""
    t = TrainModule(Line(), optimizer=SGD(lambda k: 0.1 if k < 2 else float("nan")), engine="host")
    t.step(**batch())
    t.step(**batch())
    before = t.state_dict()
    with pytest.raises(OptionError, match="learning_rate of step 2=nan"):
        t.step(**batch())
    after = t.state_dict()
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)


def test_inputs_that_do_not_fit() -> None:
    """Names, counts, dtypes and shapes."""
    t = module()
    data = batch()
    unchanged(t, lambda: t.step(data["x"]), InputError, "missing input 'y'")
    unchanged(t, lambda: t.step(x=data["x"], y=None), InputError, "'y' is a NoneType, not an array")
    unchanged(t, lambda: t.step(x=np.zeros((4, 5), F), y=data["y"]), XRTError, "MatMul")


def test_a_loss_that_is_not_finite() -> None:
    """The opt-in check names the node; without it, NaN is a result like any other."""
    t = module(check_finite=True)
    bad = {**batch(), "x": np.full((4, 3), 1e30, F)}
    unchanged(t, lambda: t.step(**bad), ExecutionError, r"not finite: it comes from node .*Pow")
    assert not np.isfinite(module().step(**bad))


def test_states_and_files_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    """Of another shape or model, cut off anywhere, not there, or no such file."""
    t = module()
    state = t.state_dict()
    wrong = {**state, "w": np.zeros((2, 3), F)}
    unchanged(t, lambda: t.load_state_dict(wrong), CheckpointError, r"'w' is float32\[2, 3\], not float32\[3, 2\]")
    other = TrainModule(Line(), optimizer=Adam(0.1), engine="host")
    other.step(**batch())
    other.save(tmp_path / "other")
    unchanged(t, lambda: t.load(tmp_path / "other"), CheckpointError, "does not fit this model and optimiser: missing")
    t.save(tmp_path / "whole")
    raw = (tmp_path / "whole").read_bytes()
    for count in (0, 4, 40, len(raw) // 2, len(raw) - 1):
        (tmp_path / "cut").write_bytes(raw[:count])
        unchanged(t, lambda: t.load(tmp_path / "cut"), CheckpointError, "cut")
    unchanged(t, lambda: t.load(tmp_path / "none"), CheckpointError, "cannot be read")
    (tmp_path / "text").write_text("no checkpoint at all")
    unchanged(t, lambda: t.load(tmp_path / "text"), CheckpointError, "no safetensors file, or it is cut off")


def test_a_model_says_what_does_not_fit() -> None:
    """The width of an input, a loss that is no output, and labels without a loss that takes them."""
    x, w, y = value("x", None, 8), Value.constant(np.ones((8, 3), np.float32), "w"), Value("y")
    model = Graph([x], [y], [node("MatMul", [x, w], [y])], opsets={"": 21}, name="model")

    def made(loss: str | None) -> TrainModule:
        return TrainModule(model, loss=loss, optimizer=SGD(0.1), engine="host")

    labels = np.zeros(4, np.int64)
    t = made("cross_entropy")
    before = t.state_dict()
    with pytest.raises(InputError, match=r"input 'x': shape \[4, 5\] given, float32\[\?, 8\] expected"):
        t.step(x=np.ones((4, 5), np.float32), labels=labels)
    assert all(np.array_equal(a, before[n]) for n, a in t.state_dict().items())
    with pytest.raises(OptionError, match="loss='cross_entropie': did you mean 'cross_entropy'"):
        made("cross_entropie")
    with pytest.raises(InputError, match="loss='cross_entropy' takes labels"):
        made(None).step(x=np.ones((4, 8), np.float32), labels=labels)


class Tokens(xrt.Graph):
    """An embedding and a classifier of the tokens around; labels below 0 do not count."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.table, self.w = (rng.standard_normal(s).astype(F) for s in ((6, 4), (4, 3)))

    def build(self, tokens: Any, labels: Any) -> Any:
        scores = ops.Gather(self.table, tokens.astype(np.int64)) @ self.w
        labels = labels.reshape(-1)
        return ops.SoftmaxCrossEntropyLoss(scores.reshape((-1, 3)), labels, ignore_index=-5, outputs=1)


@pytest.mark.parametrize("engine", ["host", pytest.param("xla", marks=pytest.mark.slow)])
def test_numbers_out_of_range(engine: str) -> None:
    """A label that is no class and a row that is not there are refused before the step, which then goes as before."""
    if engine == "xla":
        pytest.importorskip("xrt_xla")
    t, other = (TrainModule(Tokens(), optimizer=Momentum(0.1), engine=engine) for _ in range(2))
    tokens, labels = np.array([[0, 5, -6], [1, 2, 3]], np.int32), np.array([[0, 1, 2], [2, -5, -5]])
    first = t.step(tokens, labels), other.step(tokens, labels)
    assert first[0] == first[1]
    for which, array, number, match in (
        ("labels", labels, 3, r"'labels': 3 at \[1, 0\], and 1 such in all; .*SoftmaxCrossEntropyLoss.* 0 to 2 and the "
         "ignored -5"),
        ("labels", labels, -1, "a number from 0 to 2"),
        ("tokens", tokens, 6, r"'tokens': 6 at \[1, 0\].*Gather.* from -6 to 5"),
        ("tokens", tokens, -7, "a number from -6 to 5"),
    ):  # fmt: skip
        wrong = array.copy()
        wrong[1, 0] = number
        with pytest.raises(InputError, match=match):
            t.step(**{"tokens": tokens, "labels": labels, which: wrong})
    with pytest.raises(InputError, match="'labels': 9"):  # at the first step of a signature as well
        t.step(tokens[:1], labels[:1] + 9)
    assert t.step(tokens, labels) == other.step(tokens, labels)


class Shifted(xrt.Graph):
    """An embedding whose rows are computed from the tokens."""

    def __init__(self, rows: Any) -> None:
        self.table = np.random.default_rng(1).standard_normal((6, 3)).astype(F)
        self.rows = [rows]

    def build(self, tokens: Any) -> Any:
        return ops.Gather(self.table, self.rows[0](tokens)).sum()


@pytest.mark.parametrize("engine", ["host", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rows", "good", "bad", "match"),
    [
        (
            lambda t: t + 1,
            [0, 4, -7],
            5,
            r"'tokens': 5 at \[1\].*Gather.* reads tokens \+ 1 = 6, as? ?a number from -6 to 5",
        ),
        (lambda t: 5 - t.reshape((3, 1)), [0, 5, 11], -1, r"reads -tokens \+ 5 = 6"),
        (lambda t: (t * 2 - 1).astype(np.int32), [0, 3, -2], 4, r"reads 2 tokens - 1 = 7"),
        (lambda t: -t, [0, 6, -5], 7, r"reads -tokens = -7"),
    ],
)
def test_computed_rows(rows: Any, good: list[int], bad: int, match: str, engine: str) -> None:
    """Arithmetic with constants is followed; engines would take another row."""
    if engine == "xla":
        pytest.importorskip("xrt_xla")
    t = TrainModule(Shifted(rows), optimizer=Momentum(0.1), engine=engine)
    t.step(np.array(good))
    with pytest.raises(InputError, match=match):
        t.step(np.array([good[0], bad, good[1]]))
    assert t.step_count == 1


def test_rows_that_are_computed_in_other_ways() -> None:
    """They are computed on the host before each step where that is asked for."""
    rows = lambda t: ops.Max(t, t * t)  # noqa: E731
    t = TrainModule(Shifted(rows), optimizer=Momentum(0.1), engine="host", check_indices=True)
    t.step(np.array([0, 1, -2]))
    with pytest.raises(InputError, match=r"9 at \[1\], and 1 such in all; .*Gather.* from -6 to 5"):
        t.step(np.array([0, 3, 1]))
    assert t.step_count == 1


def test_objects_whose_shapes_are_lists_are_taken_as_arrays() -> None:
    """An object of any library that NumPy can read: its shape is not asked for more than it gives."""

    class Listed:
        shape, dtype = [4, 3], np.dtype(F)

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return batch()["x"]

    t, same = TrainModule(Line(), optimizer=SGD(0.1)), TrainModule(Line(), optimizer=SGD(0.1))
    for _ in range(2):
        assert t.step(x=Listed(), y=batch()["y"]) == same.step(**batch())
