"""How a state is saved: beside the training, in pieces, the newest few, variables alone; and when it is refused."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.architecture.source import ROOT
from tests.training.test_state import engine_or_skip, same
from tests.training.test_whole_steps import Net, batch
from xrt_core.errors import CheckpointError, OptionError
from xrt_core.training import Adam, Momentum, TrainModule, checkpoint, latest, sharded_checkpoint
from xrt_core.training.callbacks import Checkpoint


def trainer(engine: str = "host", optimizer: Any = None, **options: Any) -> TrainModule:
    """A trainer of a small network."""
    return TrainModule(Net(), loss="mse", optimizer=optimizer or Adam(0.01), engine=engine, guard=False, **options)


def trained(steps: int = 2, **options: Any) -> TrainModule:
    """A trainer after some steps."""
    t = trainer(**options)
    x, y = batch(8)
    for _ in range(steps):
        t.step(x=x, target=y)
    return t


# --- when it is refused ---


def test_there_is_nothing_to_save_before_the_first_batch(tmp_path: pathlib.Path) -> None:
    """Of a written graph, whose variables its first batch tells; no file comes into being."""
    t = trainer()
    with pytest.raises(CheckpointError, match="Net has no state to save before its first batch"):
        t.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="no state"):
        t.save(tmp_path / "a", sharded=True)
    assert not list(tmp_path.iterdir())
    t.predict(x=batch(2)[0])
    t.save(tmp_path / "a")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"optimizer": Momentum(0.1)}, "missing 'optimizer/momentum/'; unknown 'optimizer/mean/"),
        ({"optimizer": Adam(0.1, ema=0.9)}, "missing 'optimizer/ema/'"),
        ({"accumulate": 2}, "missing 'optimizer/sum/'"),
        ({"loss_scale": "dynamic"}, "missing 'training/finite_steps', 'training/loss_scale'"),
    ],
)
def test_a_state_of_another_optimizer_is_refused_when_it_is_loaded(
    other: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    """Though nothing is known yet of the variables of a written graph."""
    trained().save(tmp_path / "a")
    t = trainer(**other)
    with pytest.raises(CheckpointError, match=message):
        t.load(tmp_path / "a")
    x, y = batch(8)
    t.step(x=x, target=y)  # nothing of it was kept
    again = trainer()
    again.load(tmp_path / "a")
    again.step(x=x, target=y)
    assert again.step_count == 3


# --- beside the training ---


def held(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> threading.Event:
    """Hold back writes until the event is set."""
    go, write = threading.Event(), checkpoint.write

    def waiting(*args: Any) -> None:
        assert go.wait(20)
        then()
        write(*args)

    monkeypatch.setattr(checkpoint, "write", waiting)
    return go


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("engine", "donate"), [("host", None), ("xla", True)])
def test_in_the_background(
    engine: str, donate: bool | None, sharded: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while the file is written; it holds the state as it was when `save` was called."""
    t = trained(3, engine=engine_or_skip(engine), donate=donate)
    x, y = batch(8)
    then = t.state_dict()
    go = held(monkeypatch)
    t.save(tmp_path / "a", sharded=sharded, background=True)
    t.step(x=x, target=y)
    assert not (tmp_path / "a").is_file()
    go.set()
    t.wait_saved()
    assert not same(t.state_dict(), then)
    t.load(tmp_path / "a")
    assert same(t.state_dict(), then)


def test_what_fails_in_the_background_is_raised_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next save, or by whoever waits; the one after that is as any other."""
    t = trained()

    def fail() -> None:
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        held(patch, fail).set()
        for wait in (t.wait_saved, lambda: t.save(tmp_path / "b"), lambda: t.load(tmp_path / "b")):
            t.save(tmp_path / "a", background=True)
            with pytest.raises(CheckpointError, match="disk is full"):
                wait()
            t.wait_saved()
    assert not (tmp_path / "b").exists()
    t.save(tmp_path / "b", background=True)
    t.load(tmp_path / "b")


# --- the newest few ---


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_the_newest_are_kept(background: bool, sharded: bool, tmp_path: pathlib.Path) -> None:
    """Older ones go once a newer is there; what is not of this run stays; `latest` finds the one to go on from."""
    x, y = batch(12)
    others = ["run-900.safetensors", "run-1x.safetensors", "ran-1.safetensors"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    path = tmp_path / "run-{step}.safetensors"
    t = trainer()
    last = Checkpoint(path, every=2, keep=2, background=background, sharded=sharded)
    t.fit((x, y), 2, batch_size=2, callbacks=[last], progress=False)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == sorted([*others, "run-10.safetensors", "run-12.safetensors"])
    (tmp_path / "run-900.safetensors").unlink()
    found = latest(path)
    assert found is not None
    assert found.name == "run-12.safetensors"
    again = trainer()
    again.load(found)
    assert again.fit((x, y), 3, batch_size=2, resume=True, progress=False)
    assert again.step_count == 18
    assert latest(tmp_path / "none" / "{step}") is None


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("keep", [1, 3, 4, 5, 9])
def test_as_many_as_asked_for_are_kept(background: bool, keep: int, tmp_path: pathlib.Path) -> None:
    """All of them while there are fewer."""
    x, y = batch(12)
    path = tmp_path / "{step}"
    trainer().fit((x, y), 2, batch_size=2, callbacks=[Checkpoint(path, every=4, keep=keep, background=background)])
    steps = sorted(int(p.name) for p in tmp_path.iterdir())
    assert steps == [4, 6, 8, 12][-keep:]


def test_numbers_that_do_not_count() -> None:
    """`keep` needs files of different names."""
    with pytest.raises(OptionError, match=r"must hold \{step\}"):
        Checkpoint("run.safetensors", keep=2)
    with pytest.raises(OptionError, match="keep=0"):
        Checkpoint("{step}", keep=0)


# --- in pieces ---


def test_a_folder_holds_the_old_state_or_the_new_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written when a save fails; files of earlier ones go."""
    t, folder = trained(), tmp_path / "run"
    t.save(folder, sharded=True)
    first = t.state_dict()
    x, y = batch(8)
    t.step(x=x, target=y)

    def broken(*args: Any, **options: Any) -> None:
        raise CheckpointError("the disk is full")

    for part in ("write", "replace_file"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint if part == "write" else sharded_checkpoint, part, broken)
            with pytest.raises(CheckpointError, match="disk is full"):
                t.save(folder, sharded=True)
        u = trainer()
        u.load(folder)
        assert same(u.state_dict(), first)
    t.save(folder, sharded=True)
    u.load(folder)
    assert same(u.state_dict(), t.state_dict())
    assert sorted(p.name for p in folder.iterdir()) == ["1-00000.safetensors", "checkpoint.json"]


def test_folders_that_are_not_whole(tmp_path: pathlib.Path) -> None:
    """A file that is missing, cut off or of another checkpoint, and an index that points elsewhere, are refused."""
    t, folder = trained(), tmp_path / "run"
    t.save(folder, sharded=True)
    (file,) = folder.glob("*.safetensors")
    index, content = folder / "checkpoint.json", file.read_bytes()
    text = index.read_text()

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            trainer().load(folder)

    file.write_bytes(content[:100])
    refused("cut off")
    trained().save(file)
    refused("pieces")
    file.unlink()
    refused("is missing")
    file.write_bytes(content)
    index.write_text(text.replace(file.name, f"../run/{file.name}"))
    refused("no file of this folder")
    index.write_text(text.replace('"w1"', '"w9"'))
    refused("does not fit the index")
    index.write_text(text[:50])
    refused("checkpoint.json")
    index.unlink()
    refused("checkpoint.json")
    index.write_text(text)
    trainer().load(folder)


@pytest.mark.nightly
def test_killed_while_saving(tmp_path: pathlib.Path) -> None:
    """At any moment: each file and folder holds a whole state, and a run that goes on leaves nothing behind in it."""
    program = f"""
import pathlib
from tests.training.test_saving import *
t, folder, (x, y) = trained(), pathlib.Path({str(tmp_path)!r}), batch(8)
while True:
    t.save(folder / "file")
    t.save(folder / "pieces", sharded=True)
    t.save(folder / "beside", background=True)
    print("saved", flush=True)
    t.step(x=x, target=y)
"""
    rng = np.random.default_rng(0)
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child:
            for _ in range(3):
                assert child.stdout.readline() == "saved\n"
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
        for name in ("file", "pieces", "beside"):
            t = trainer()
            t.load(tmp_path / name)
            t.step(x=batch(8)[0], target=batch(8)[1])
    t.save(tmp_path / "pieces", sharded=True)
    assert len(list((tmp_path / "pieces").iterdir())) == 2


# --- variables alone ---


def test_variables_alone(tmp_path: pathlib.Path) -> None:
    """The library of the format reads them; they are a start for another training, also with other optimisers."""
    library = pytest.importorskip("safetensors.numpy")
    t, path = trained(5), tmp_path / "w.safetensors"
    t.save_parameters(path)
    found = library.load_file(path)
    assert same(found, t.parameters())
    u = trained(1, optimizer=Momentum(0.1, ema=0.5))
    before = u.state_dict()
    with pytest.raises(CheckpointError, match="no array for the variable 'b1'"):
        u.load_parameters({n: a for n, a in found.items() if n != "b1"})
    with pytest.raises(CheckpointError, match="'w2' is of shape"):
        u.load_parameters({**found, "w2": np.zeros(3)})
    assert same(u.state_dict(), before)
    u.load_parameters(path)
    assert same(u.parameters(), found)
    assert same(u.parameters(average=True), found)
    assert (u.step_count, same(u.state_dict(), before)) == (1, False)
    with pytest.raises(CheckpointError, match="before its first batch"):
        trainer().load_parameters(path)
