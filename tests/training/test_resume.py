"""A `fit` that goes on from a checkpoint, between epochs or inside one, is the one that did not stop, bit for bit."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import xrt_core as xrt
from xrt_core.errors import CheckpointError, InputError, OptionError
from xrt_core.frontends import ops
from xrt_core.training import SGD, Adam, TrainModule, schedules
from xrt_core.training.callbacks import BestCheckpoint, Callback, Checkpoint, CSVLog, EarlyStopping
from xrt_core.training.planned_step import PlannedStep

pytest.importorskip("safetensors")

F = np.float32
R = np.random.default_rng(0)
X = R.standard_normal((22, 4)).astype(F)
Y = (X.sum(1) > 0).astype(np.int64)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]


class Net(xrt.Graph):
    """A layer behind Dropout, which draws from the steps' count."""

    def __init__(self) -> None:
        self.w = np.random.default_rng(1).standard_normal((4, 2)).astype(F)

    def build(self, x: Any) -> Any:
        return ops.Dropout(x, 0.3, outputs=1) @ self.w


def made(optimizer: Any = None, **options: Any) -> TrainModule:
    """A training of it on the host."""
    return TrainModule(Net(), loss="cross_entropy", optimizer=optimizer or Adam(0.05), engine="host", **options)


class Crash(Callback):
    """Ends the process's training after a number of steps, as a failure would."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_save(self, trainer: Any) -> None:
        self.left -= 1
        if not self.left:
            raise OSError("out of power")


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Equal bit for bit."""
    return one.keys() == other.keys() and all(a.tobytes() == other[n].tobytes() for n, a in one.items())


def by_epoch(epoch: int) -> Any:
    """Batches whose order follows from the epoch."""
    return iter(BATCHES[epoch % 3 :] + BATCHES[: epoch % 3])


class Loader:
    """Batches that can be read again."""

    def __iter__(self) -> Any:
        return iter(BATCHES)


DATA: dict[str, tuple[Any, int | None]] = {
    "arrays": ((X, Y), 8), "dict": ({"x": X, "labels": Y}, 8), "list": (BATCHES, None), "loader": (Loader(), None),
    "function": (lambda: iter(BATCHES), None), "of the epoch": (by_epoch, None),
}  # fmt: skip


PLACES = [
    pytest.param(
        kind, after, accumulate, marks=() if kind == "arrays" or after + accumulate == 4 else pytest.mark.nightly
    )
    for kind in DATA for after in range(1, 15) for accumulate in (1, 2)
    if kind != "arrays" or after in (1, 3, 4, 6, 12)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "after", "accumulate"), PLACES)
def test_it_goes_on(kind: str, after: int, accumulate: int, tmp_path: pathlib.Path) -> None:
    """After each call of callbacks (three steps and the end of an epoch, four times): state, numbers and log."""
    data, size = DATA[kind]

    def callbacks(folder: str) -> list[Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        return [EarlyStopping(patience=3, restore=False), CSVLog(tmp_path / folder / "log.csv"),
                Checkpoint(tmp_path / folder / "run", every=1)]  # fmt: skip

    options: Any = {"batch_size": size, "validation": [(X, Y)]}
    whole = made(accumulate=accumulate)
    history = whole.fit(data, 4, callbacks=callbacks("whole"), **options)
    first = made(accumulate=accumulate)
    with pytest.raises(OSError, match="out of power"):
        first.fit(data, 4, callbacks=[*callbacks("part"), Crash(after)], **options)
    second = made(accumulate=accumulate)
    second.load(tmp_path / "part" / "run")
    rest = second.fit(data, 4, callbacks=callbacks("part"), resume=True, **options)
    assert same(second.state_dict(), whole.state_dict())
    assert rest
    assert rest == history[-len(rest) :]
    assert (tmp_path / "part" / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text()


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_an_interrupt_within_a_step(
    early: bool, donate: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is saved after Ctrl-C is gone on with to the same bits, whether the step that it came in has
    happened (it waits for one that is donated to) or not."""

    class Steps(Callback):
        def __init__(self) -> None:
            self.count = 0

        def on_step(self, trainer: Any, logs: Any) -> None:
            self.count += 1

        def state_dict(self) -> Any:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = int(state["count"])

    data, size = DATA["arrays"]
    calm, t, steps = made(donate=donate), made(donate=donate), Steps()
    calm.fit(data, 3, batch_size=size, progress=False)
    run, calls = PlannedStep.run, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5 and early:
            signal.raise_signal(signal.SIGINT)
        results = run(*args)
        if calls == 5 and not early:
            signal.raise_signal(signal.SIGINT)
        return results

    monkeypatch.setattr(PlannedStep, "run", interrupted)
    assert t.fit(data, 3, batch_size=size, callbacks=[steps], progress=False).interrupted
    assert t.step_count == steps.count == (5 if donate else 4)
    monkeypatch.undo()
    assert t.position is not None
    t.save(tmp_path / "run")
    again, more = made(donate=donate), Steps()
    again.load(tmp_path / "run")
    assert not again.fit(data, 3, batch_size=size, callbacks=[more], resume=True, progress=False).interrupted
    assert more.count == again.step_count == calm.step_count
    t.fit(data, 3, batch_size=size, callbacks=[steps], resume=True, progress=False)  # in the same process
    assert more.count == steps.count
    for other in (again, t):
        assert same(calm.state_dict(), other.state_dict())


def test_a_log_loses_what_is_trained_again(tmp_path: pathlib.Path) -> None:
    """The lines after the checkpoint are written once; the file may be gone; without `resume` it starts anew."""
    path = tmp_path / "log.csv"
    one = made()
    one.fit(BATCHES, 2, callbacks=CSVLog(path))
    one.save(tmp_path / "run")
    wanted = path.read_text()
    path.write_text(wanted + "3.0,7.0\n4.0,8.0\n")
    other = made()
    other.load(tmp_path / "run")
    other.fit(BATCHES, 3, callbacks=CSVLog(path), resume=True)
    lines = path.read_text().splitlines()
    assert lines[:3] == wanted.splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "1.0", "2.0", "3.0"]
    path.unlink()
    other.load(tmp_path / "run")
    other.fit(BATCHES, 3, callbacks=CSVLog(path), resume=True)
    assert path.read_text().splitlines() == [lines[0], lines[3]]
    other.fit(BATCHES, 1, callbacks=CSVLog(path))
    assert len(path.read_text().splitlines()) == 2


def test_callbacks_keep_their_state(tmp_path: pathlib.Path) -> None:
    """The best value, the patience, and the state to be restored are those from before."""

    def rate(step: int) -> float:
        return 0.1 if step < 3 else 3.0

    def run(*parts: int) -> tuple[TrainModule, list[Any]]:
        for k, epochs in enumerate(parts):
            t = made(SGD(rate))
            callbacks = [EarlyStopping(patience=3), BestCheckpoint(tmp_path / "best"), Checkpoint(tmp_path / "run")]
            if k:
                t.load(tmp_path / "run")
            t.fit(BATCHES[:1], epochs, validation=[(X, Y)], callbacks=callbacks, resume=k > 0)
        return t, callbacks

    whole, (stop, best, _) = run(9)
    kept = (tmp_path / "best").read_bytes()
    steps = whole.step_count
    for k in range(1, 9):
        t, (other, second, _) = run(k, 9)
        assert same(t.state_dict(), whole.state_dict())
        assert (other.best, second.best, t.step_count) == (stop.best, best.best, steps)
        assert other.has_ended == stop.has_ended
        assert (tmp_path / "best").read_bytes() == kept


def test_a_plateau_is_part_of_the_state(tmp_path: pathlib.Path) -> None:
    """The rate that fell is the one that a loaded state goes on with, with `fit` or without."""

    def plateau() -> schedules.ReduceOnPlateau:
        return schedules.ReduceOnPlateau(1.0, "loss", factor=0.5, patience=1, min_delta=10.0)

    rate = plateau()
    t = made(SGD(rate))
    t.fit(BATCHES, 3, callbacks=[rate, Checkpoint(tmp_path / "run")])
    assert rate(0) == 0.25
    for load in (lambda o: o.load(tmp_path / "run"), lambda o: o.load_state_dict(t.state_dict())):
        fresh = plateau()
        other = made(SGD(fresh))
        load(other)
        assert fresh(0) == 0.25
        assert other.step(*BATCHES[0]) == t.step(*BATCHES[0])
        t.load(tmp_path / "run")
    constant = made(SGD(0.25))
    constant.load_state_dict(t.state_dict())  # a schedule may be exchanged
    assert constant.step(*BATCHES[0]) == t.step(*BATCHES[0])


def test_a_state_of_a_schedule_that_does_not_fit_changes_nothing() -> None:
    """Neither the schedules, of which one has taken its part, nor anything else."""

    def plateau() -> schedules.ReduceOnPlateau:
        return schedules.ReduceOnPlateau(1.0, "loss", factor=0.5, patience=1)

    rates = plateau(), plateau()
    t = made(SGD(rates[0], groups={"w": {"learning_rate": rates[1]}}))
    t.step(*BATCHES[0])
    before = t.state_dict()
    wrong = {n: np.zeros_like(a) for n, a in before.items() if n != "optimizer/schedule/1/rate"}
    with pytest.raises(CheckpointError, match="the state of the schedule ReduceOnPlateau does not fit it: .*rate"):
        t.load_state_dict(wrong)
    assert same(t.state_dict(), before)
    assert rates[0](0) == 1.0


def test_other_data_are_refused(tmp_path: pathlib.Path) -> None:
    """Inside an epoch the last batch that was taken is compared; fewer batches cannot be gone on with."""
    one = made()
    with pytest.raises(OSError, match="power"):
        one.fit(BATCHES, 2, callbacks=[Checkpoint(tmp_path / "run", every=2), Crash(3)])
    for data, why in (
        (BATCHES[:1] + BATCHES[2:], "batch 2 of epoch 1 is not the one"),
        ([(a.astype(np.float64), b) for a, b in BATCHES], "batch 2 of epoch 1 is not the one"),
        (BATCHES[:1], "after 2 batches of epoch 1, the data give 1"),
    ):
        other = made()
        other.load(tmp_path / "run")
        with pytest.raises(InputError, match=why):
            other.fit(data, 2, resume=True)
        assert other.step_count == 2


def test_an_update_of_what_a_file_holds_needs_the_graph(tmp_path: pathlib.Path) -> None:
    """Before a written graph is traced there is none: it says so; with it the micro-batches of the file count."""
    one = made(accumulate=2)
    one.step(*BATCHES[0])
    one.save(tmp_path / "run")
    other = made(accumulate=2)
    other.load(tmp_path / "run")
    with pytest.raises(InputError, match="micro-batches that wait are in a loaded state.*predict"):
        other.apply()
    other.predict(X)
    assert other.apply()
    assert one.apply()
    assert same(one.state_dict(), other.state_dict())
    assert not made(accumulate=2).apply()


def test_a_callback_positions_the_data(tmp_path: pathlib.Path) -> None:
    """Its data are taken as they come, without reading what was taken before."""
    read: list[int] = []

    class Stream(Callback):
        """Data that know where they stand."""

        positions_data = True

        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            while self.at < 3:
                read.append(self.at)
                self.at += 1
                yield BATCHES[self.at - 1]
            self.at = 0

        def state_dict(self) -> Mapping[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
            self.at = int(state["at"])

    whole = made()
    whole.fit(BATCHES, 2)
    stream = Stream()
    with pytest.raises(OSError, match="power"):
        made().fit(stream, 2, callbacks=[stream, Checkpoint(tmp_path / "run", every=2), Crash(2)])
    other, stream = made(), Stream()
    other.load(tmp_path / "run")
    read.clear()
    other.fit(stream, 2, callbacks=[stream], resume=True)
    assert read == [2, 0, 1, 2]
    assert same(other.state_dict(), whole.state_dict())


def test_what_cannot_go_on_is_refused(tmp_path: pathlib.Path) -> None:
    """A state of no `fit`, one that steps have changed since, a damaged one, a wrong option."""
    t = made()
    with pytest.raises(OptionError, match=r"resume=True: the state is not one that `fit` saved"):
        t.fit(BATCHES, 1, resume=True)
    t.fit(BATCHES, 1)
    t.save(tmp_path / "run")
    t.step(*BATCHES[0])
    t.save(tmp_path / "later")
    for name, refused in (("run", False), ("later", True)):
        other = made()
        other.load(tmp_path / name)
        if refused:
            with pytest.raises(OptionError, match="take no step in between"):
                other.fit(BATCHES, 2, resume=True)
        else:
            assert [h["epoch"] for h in other.fit(BATCHES, 2, resume=True)] == [2.0]
    from xrt_core.training import checkpoint

    arrays, metadata = checkpoint.load(tmp_path / "run")
    del arrays["fit/batch"]
    checkpoint.save(arrays, tmp_path / "bad", metadata)
    with pytest.raises(CheckpointError, match="no whole position of a fit: 'fit/batch'"):
        other.load(tmp_path / "bad")
    with pytest.raises(OptionError, match="every=0: it takes a whole number"):
        Checkpoint(tmp_path / "run", every=0)


def test_callbacks_that_differ_are_told_of(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that the checkpoint does not know starts anew, one that is left out is lost: the log says which."""
    t = made()
    t.fit(BATCHES, 1, callbacks=[EarlyStopping("loss")])
    t.save(tmp_path / "run")
    other = made()
    other.load(tmp_path / "run")
    with caplog.at_level("WARNING", "xrt"):
        other.fit(BATCHES, 2, callbacks=[CSVLog(tmp_path / "log.csv")], resume=True)
    assert "the callback CSVLog.0 is not in the checkpoint" in caplog.text
    assert "the callback EarlyStopping.0 is not in this fit" in caplog.text


def test_ctrl_c_inside_an_epoch(tmp_path: pathlib.Path) -> None:
    """What is saved after it goes on with the next batch."""

    class Interrupt(Callback):
        def on_step(self, trainer: Any, logs: Any) -> None:
            self.seen = getattr(self, "seen", 0) + 1

        def on_save(self, trainer: Any) -> None:
            if self.seen == 5:
                raise KeyboardInterrupt

    whole = made()
    whole.fit((X, Y), 3, batch_size=8)
    t = made()
    assert t.fit((X, Y), 3, batch_size=8, callbacks=Interrupt()).interrupted
    t.save(tmp_path / "run")
    other = made()
    other.load(tmp_path / "run")
    other.fit((X, Y), 3, batch_size=8, resume=True)
    assert same(other.state_dict(), whole.state_dict())
