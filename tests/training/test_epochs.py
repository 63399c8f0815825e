"""Training by epochs: data of many kinds, evaluation and prediction in inference mode, metrics, callbacks, Ctrl-C."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import xrt_core as xrt
from xrt_core.errors import InputError, OptionError
from xrt_core.frontends import ops
from xrt_core.training import SGD, Adam, TrainModule, schedules
from xrt_core.training.callbacks import BestCheckpoint, Callback, Checkpoint, CSVLog, EarlyStopping, Report
from xrt_core.training.metrics import metrics_of

F = np.float32
R = np.random.default_rng(0)
X = R.standard_normal((22, 4)).astype(F)
Y = (X.sum(1) > 0).astype(np.int64)


class Net(xrt.Graph):
    """A layer behind BatchNormalization and Dropout, whose inference differs from training."""

    def __init__(self) -> None:
        self.w = np.random.default_rng(1).standard_normal((4, 2)).astype(F)
        self.one, self.zero = np.ones(4, F), np.zeros(4, F)
        self.mean, self.variance = np.zeros(4, F), np.ones(4, F)

    def build(self, x: Any) -> Any:
        x = ops.BatchNormalization(x, self.one, self.zero, self.mean, self.variance, outputs=1)
        return ops.Dropout(x, 0.3, outputs=1) @ self.w


def made(**options: Any) -> TrainModule:
    """A training of it on the host."""
    return TrainModule(Net(), **{"loss": "cross_entropy", "optimizer": Adam(0.05), "engine": "host", **options})


def test_fit_learns_with_validation() -> None:
    """Each epoch has its numbers; the last, smaller batch counts by its examples."""
    t = made()
    history = t.fit({"x": X, "labels": Y}, 8, batch_size=8, validation={"x": X, "labels": Y}, metrics="accuracy")
    assert t.step_count == 8 * 3
    assert [h["epoch"] for h in history] == list(range(1, 9))
    assert history[-1]["val_loss"] < history[0]["val_loss"]
    assert history[-1]["val_accuracy"] > 0.8
    assert not history.interrupted


def test_evaluate_and_predict_are_inference() -> None:
    """They agree with the exported parameters in an XRTModule, and change nothing."""
    t = made()
    t.fit([(X, Y)], 2)
    before = t.state_dict()
    model = Net()
    model.load_parameters(t.parameters())
    scores = xrt.XRTModule(model, engine="host")(X)
    np.testing.assert_allclose(t.predict(x=X), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(t(X), t.predict(X))
    log = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    found = t.evaluate((X, Y), batch_size=8, metrics=["accuracy", lambda p, y: p[:, 1].mean()])
    np.testing.assert_allclose(found["loss"], -log[np.arange(22), Y].mean(), rtol=1e-5)
    np.testing.assert_allclose(found["accuracy"], (scores.argmax(1) == Y).mean())
    np.testing.assert_allclose(found["<lambda>"], scores[:, 1].mean(), rtol=1e-5)
    assert all(np.array_equal(a, t.state_dict()[n]) for n, a in before.items())
    t.step(X, Y)
    assert not np.array_equal(t(X), scores)


class Dropping(xrt.Graph):
    """Dropout that the model itself puts into training mode."""

    def __init__(self) -> None:
        self.w = np.random.default_rng(1).standard_normal((4, 2)).astype(F)

    def build(self, x: Any) -> Any:
        return ops.Dropout(x @ self.w, np.float32(0.5), np.array(True), outputs=1)


def test_dropout_of_a_model_in_training_mode(tmp_path: pathlib.Path) -> None:
    """Predictions and exports drop nothing; with dropout=False all is as the model says."""
    t = TrainModule(Dropping(), loss="cross_entropy", optimizer=SGD(0.1), engine="host")
    t.step(X, Y)
    scores = X @ t.parameters()["w"]
    np.testing.assert_allclose(t.predict(X), scores, rtol=1e-5, atol=1e-6)
    t.export(tmp_path / "m.onnx")
    np.testing.assert_allclose(xrt.XRTModule(tmp_path / "m.onnx", engine="host")(X), scores, rtol=1e-5, atol=1e-6)
    same = TrainModule(Dropping(), loss="cross_entropy", optimizer=SGD(0.1), engine="host", dropout=False)
    assert (same.predict(X) == 0).any()


def test_batch_normalization_of_a_model_in_training_mode(tmp_path: pathlib.Path) -> None:
    """Predictions and exports use the running statistics, which training follows; with batch_norm=False all is as the
    model says."""
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "b", "mean", "variance"], ["n", "m2", "v2"], training_mode=1),
        helper.make_node("MatMul", ["n", "w"], ["y"]),
    ]
    arrays = {"s": np.ones(4, F), "b": np.full(4, 0.5, F), "mean": np.zeros(4, F), "variance": np.full(4, 2, F)}
    arrays["w"] = np.random.default_rng(1).standard_normal((4, 2)).astype(F)
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", d]) for n, d in (("x", 4), ("y", 2))]
    initial = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "bn", info[:1], info[1:], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    t = TrainModule(model, loss="cross_entropy", optimizer=SGD(0.1), engine="host")
    for _ in range(3):
        t.step(3 * X + 1, Y)
    p = t.parameters()
    assert not np.array_equal(p["mean"], arrays["mean"])
    want = ((X - p["mean"]) / np.sqrt(p["variance"] + 1e-5) * p["s"] + p["b"]) @ p["w"]
    np.testing.assert_allclose(t.predict(X), want, rtol=1e-4, atol=1e-5)
    t.export(tmp_path / "m.onnx")
    np.testing.assert_allclose(xrt.XRTModule(tmp_path / "m.onnx", engine="host")(X), want, rtol=1e-4, atol=1e-5)
    same = TrainModule(model, loss="cross_entropy", optimizer=SGD(0.1), engine="host", batch_norm=False)
    by_batch = ((X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5) + 0.5) @ arrays["w"]
    np.testing.assert_allclose(same.predict(X), by_batch, rtol=1e-4, atol=1e-5)


class OwnLoss(Net):
    """The same with its loss in `build`."""

    def build(self, x: Any, labels: Any) -> Any:
        scores = super().build(x)
        ops.SoftmaxCrossEntropyLoss(scores, labels, outputs=1).backward()
        return scores


def test_a_loss_in_build() -> None:
    """It is the loss of an evaluation, and no output of a prediction."""
    t = TrainModule(OwnLoss(), optimizer=SGD(0.1), engine="host")
    other = made(optimizer=SGD(0.1))
    assert t.evaluate([(X, Y)], metrics="accuracy") == other.evaluate([(X, Y)], metrics="accuracy")
    np.testing.assert_array_equal(t.predict(X, Y), other.predict(X))
    with pytest.raises(InputError, match="missing input 'labels'"):  # nothing is known before the first step
        TrainModule(OwnLoss(), optimizer=SGD(0.1), engine="host").predict(X)
    for rows in (X, X[:5]):  # which the scores do not read
        np.testing.assert_array_equal(t.predict(rows), other.predict(rows))
        np.testing.assert_array_equal(t.predict(x=rows), other.predict(rows))
    with pytest.raises(InputError, match="missing input 'x'"):
        t.predict(labels=Y)
    with pytest.raises(InputError, match="missing input 'labels'"):
        t.evaluate([(X,)])


def test_kinds_of_data() -> None:
    """Lists of tuples and dicts, loaders, and functions that make generators give the same training."""

    class Loader:
        def __iter__(self) -> Any:
            return iter([[X[:8], Y[:8]], [X[8:], Y[8:]]])

    def generator() -> Any:
        yield {"x": X[:8], "labels": Y[:8]}
        yield {"x": X[8:], "labels": Y[8:]}

    losses = []
    for data in (list(generator()), Loader(), generator, [(X[:8], Y[:8]), (X[8:], Y[8:])]):
        losses.append([h["loss"] for h in made().fit(data, 2)])
    assert losses.count(losses[0]) == 4
    with pytest.raises(InputError, match="no batch in epoch 2; a generator is used up"):
        made().fit(generator(), 2)
    with pytest.raises(OptionError, match="give batch_size"):
        made().fit({"x": X, "labels": Y}, 1)
    with pytest.raises(InputError, match="different numbers of examples"):
        made().fit((X, Y[:3]), batch_size=2)


def test_metrics() -> None:
    """Each against its definition, over two batches."""
    scores, labels = R.standard_normal((30, 5)), R.integers(0, 5, 30)
    labels[3] = -100
    kept, own = scores[labels >= 0], labels[labels >= 0]
    best = np.argsort(-kept, axis=1)
    wanted = {"accuracy": (best[:, 0] == own).mean(), "top_2": (best[:, :2] == own[:, None]).any(1).mean()}
    each = []
    for c in range(5):
        right = ((best[:, 0] == c) & (own == c)).sum()
        each.append(2 * right / ((best[:, 0] == c).sum() + (own == c).sum()))
    wanted["f1"] = np.mean(each)
    for m in metrics_of(wanted):
        m.update(scores[:10], labels[:10])
        m.update(scores[10:], labels[10:])
        np.testing.assert_allclose(m.result(), wanted[m.name])
    p, t = R.standard_normal((2, 30, 1))
    for name, value in (("mae", np.abs(p - t).mean()), ("rmse", np.sqrt(((p - t) ** 2).mean()))):
        (m,) = metrics_of(name)
        m.update(p[:7], t[:7])
        m.update(p[7:], t[7:])
        np.testing.assert_allclose(m.result(), value)
    with pytest.raises(InputError, match=r"the prediction is of shape \[30, 1\], the target of \[30\]"):
        m.update(p, t[:, 0])
    with pytest.raises(OptionError, match="metric 'acc': it takes accuracy, f1"):
        made().fit([(X, Y)], metrics="acc")


def test_what_is_told_before_the_first_epoch() -> None:
    """A number that no epoch will have, and data that give no batches."""
    for callback in (EarlyStopping(), BestCheckpoint("x"), schedules.ReduceOnPlateau(0.1)):
        t = made()
        with pytest.raises(OptionError, match=r"monitor='val_loss': there is no validation="):
            t.fit([(X, Y)], callbacks=callback)
        assert t.step_count == 0
    with pytest.raises(OptionError, match=r"monitor='val_acc': the validation gives accuracy, loss"):
        made().fit([(X, Y)], validation=[(X, Y)], metrics="accuracy", callbacks=[EarlyStopping("val_acc")])
    for size in (None, 8):
        with pytest.raises(InputError, match="the data are int: it takes batches"):
            made().fit(5, batch_size=size)


def test_folders_are_made(tmp_path: pathlib.Path) -> None:
    """A callback that writes makes the folder: a training does not end at its first checkpoint."""
    callbacks = [
        Checkpoint(tmp_path / "a" / "run.safetensors"), BestCheckpoint(tmp_path / "b" / "c" / "best", "loss"),
        Checkpoint(tmp_path / "d" / "{step}", every=1, background=True), CSVLog(tmp_path / "e" / "log.csv"),
    ]  # fmt: skip
    made().fit([(X, Y)], callbacks=callbacks)
    for name in ("a/run.safetensors", "b/c/best", "d/1", "e/log.csv"):
        assert (tmp_path / name).is_file()


def test_early_stopping_restores(tmp_path: pathlib.Path) -> None:
    """The training ends when the number no longer falls, with the state of the best epoch; the file has it too."""
    t = made(optimizer=SGD(lambda step: 0.1 if step < 3 else 30.0))
    path = tmp_path / "best.safetensors"
    history = t.fit([(X, Y)], 20, validation=[(X, Y)], callbacks=[EarlyStopping(patience=2), BestCheckpoint(path)])
    losses = [h["val_loss"] for h in history]
    best = int(np.argmin(losses))
    assert len(losses) == best + 3 < 20
    assert t.evaluate([(X, Y)])["loss"] == losses[best]
    other = made(optimizer=SGD(0.1))
    other.load(path)
    assert other.evaluate([(X, Y)])["loss"] == losses[best]
    with pytest.raises(OptionError, match="monitor='los': an epoch has the numbers epoch, loss"):
        t.fit([(X, Y)], callbacks=EarlyStopping("los"))


def test_reports(tmp_path: pathlib.Path) -> None:
    """A table of the epochs, and the writers of other libraries, get the numbers."""
    seen: list[tuple[str, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, step))

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            seen.extend((n, step) for n in numbers)

    path = tmp_path / "log.csv"
    made().fit([(X, Y)], 2, callbacks=[CSVLog(path), Report(Writer())])
    assert path.read_text().splitlines()[0] == "epoch,loss"
    assert len(path.read_text().splitlines()) == 3
    assert seen == [("step/loss", 1), ("epoch/loss", 1), ("step/loss", 2), ("epoch/loss", 2)]
    seen.clear()
    made().fit([(X, Y)], 1, callbacks=Report(Run()))
    assert seen == [("step/loss", 1), ("epoch/loss", 1)]


@pytest.mark.parametrize("how", ["interrupt", "stop", "error"])
def test_the_end_before_the_end(how: str) -> None:
    """Ctrl-C ends the training with whole steps, as does a callback that returns True; on_end is always called."""
    ended: list[int] = []

    class Ends(Callback):
        def on_step(self, trainer: TrainModule, logs: Any) -> bool:
            if how != "stop" and trainer.step_count == 2:
                raise KeyboardInterrupt if how == "interrupt" else ValueError("mine")
            return trainer.step_count == 2

        def on_end(self, trainer: TrainModule) -> None:
            ended.append(trainer.step_count)

    t = made()
    if how == "error":
        with pytest.raises(ValueError, match="mine"):
            t.fit([(X, Y)], 5, callbacks=Ends())
    else:
        history = t.fit([(X, Y)], 5, callbacks=[Ends()])
        assert history.interrupted == (how == "interrupt")
        assert len(history) == (1 if how == "interrupt" else 2)
    assert ended == [2]
    t.step(X, Y)


def test_what_a_loss_shows() -> None:
    """A loss may give further numbers, which a step keeps and an epoch averages."""

    def loss(scores: Any, *, labels: Any) -> Any:
        found = ops.SoftmaxCrossEntropyLoss(scores, labels, outputs=1)
        right = (ops.ArgMax(scores, axis=1, keepdims=0) == labels).astype(np.float32)
        return found, {"right": right.mean(), "highest": ops.ReduceMax(scores, keepdims=0)}

    t, plain = made(loss=loss), made()
    assert t.step(X, Y) == plain.step(X, Y)
    assert set(t.metrics) == {"right", "highest"}
    assert 0.0 <= t.metrics["right"] <= 1.0
    assert t.parameters()["w"].tobytes() == plain.parameters()["w"].tobytes()
    assert set(t.fit([(X, Y)])[0]) == {"epoch", "loss", "right", "highest"}
