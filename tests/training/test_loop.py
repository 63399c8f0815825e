"""The training loop: batches, losses, pictures, and the command `xrt train`."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import xrt_core as xrt
from xrt_core.cli.app import application
from xrt_core.errors import InputError
from xrt_core.frontends.onnx_export import save
from xrt_core.ir.types import TensorType
from xrt_core.training import SGD, TrainModule
from xrt_core.training.loop import batches, fit, save_curve

DATA = {"x": np.arange(20, dtype=np.float32).reshape(10, 2), "labels": np.arange(10)}


def take(count: int, **options: Any) -> list[list[int]]:
    return [b["labels"].tolist() for b in itertools.islice(batches(DATA, 3, **options), count)]


def test_an_epoch_has_every_sample_at_most_once_in_an_order_of_its_own() -> None:
    first, second = take(6)[:3], take(6)[3:]
    for epoch in (first, second):
        seen = list(itertools.chain(*epoch))
        assert len(set(seen)) == len(seen) == 9
    assert first != second
    assert take(6) == take(6)
    assert take(6) != take(6, seed=1)


def test_rows_stay_together() -> None:
    for b in itertools.islice(batches(DATA, 4), 5):
        np.testing.assert_array_equal(b["x"][:, 0], b["labels"] * 2)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 11])
def test_a_resumed_run_sees_the_same_batches(start: int) -> None:
    assert take(4, start=start) == take(start + 4)[start:]


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (DATA, 11, "a batch of 11 needs as many samples, the data has 10"),
        (DATA, 0, "a batch of 0"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, 2, "different numbers of samples: x 3, y 4"),
        ({}, 2, "no arrays"),
        ({"x": np.zeros(())}, 1, "the data has 0"),
    ],
)
def test_bad_data(data: dict[str, np.ndarray], size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        batches(data, size)


class Line(xrt.Graph):
    """y = a x + b."""

    def __init__(self) -> None:
        self.a, self.b = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)

    def build(self, x: Any) -> Any:
        return x @ self.a + self.b


def points() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((64, 2)).astype(np.float32)
    return {"x": x, "target": x @ np.array([[2, 1], [-1, 3]], np.float32) + np.float32(0.5)}


def test_fit_takes_steps_until_they_or_the_data_end() -> None:
    t = TrainModule(Line(), loss="mse", optimizer=SGD(0.4), engine="host")
    losses = fit(t, batches(points(), 16), 30, progress=False)
    assert len(losses) == t.step_count == 30
    assert losses[-1] < 1e-3 < losses[0]
    assert len(fit(t, itertools.islice(batches(points(), 16), 2), 30, progress=False)) == 2


@pytest.mark.slow
def test_losses_as_a_picture(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    save_curve([1 / (i + 1) for i in range(100)], tmp_path / "c.png", "title")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    save_curve({"one": [1.0] * 50, "other": [2.0] * 30}, tmp_path / "d.svg")
    picture = (tmp_path / "d.svg").read_text()
    assert "one, mean of 2" in picture
    assert "other" in picture
    for bad in (tmp_path / "no" / "c.png", tmp_path / "c.nonsense"):
        with pytest.raises(InputError, match="cannot be drawn"):
            save_curve([1.0], bad)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    graph = xrt.trace(Line(), TensorType(np.dtype(np.float32), (16, 2)))
    save(graph, tmp_path / "line.onnx")
    np.savez(tmp_path / "data.npz", **points())
    return tmp_path / "line.onnx", tmp_path / "data.npz"


def train(*arguments: Any) -> Any:
    return CliRunner().invoke(application(), ["train", *map(str, arguments)])


def test_the_command_trains_and_writes(files: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    model, data = files
    common = [model, "--data", data, "--loss", "mse", "--optimizer", "sgd", "--lr", 0.4, "-b", 16, "-e", "host"]
    written = ["--curve", tmp_path / "c.png", "--output", tmp_path / "out.onnx"]
    done = train(*common, "--steps", 30, *written)
    assert done.exit_code == 0, done.output
    assert "steps 1 to 30: loss" in done.output
    x = points()["x"][:16]
    np.testing.assert_allclose(
        xrt.XRTModule(tmp_path / "out.onnx", engine="host")(x), points()["target"][:16], atol=0.05
    )


def test_a_resumed_command_goes_on_bit_for_bit(
    files: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("safetensors")
    model, data = files
    common = [model, "--data", data, "--loss", "mse", "-b", 16, "-e", "host"]
    state, whole = tmp_path / "s.safetensors", tmp_path / "w.safetensors"
    assert train(*common, "--steps", 5, "--checkpoint", whole).exit_code == 0
    assert train(*common, "--steps", 2, "--checkpoint", state).exit_code == 0
    done = train(*common, "--steps", 3, "--checkpoint", state, "--resume")
    assert done.exit_code == 0, done.output
    assert "steps 3 to 5" in done.output
    assert state.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "nonsense"], "it takes one of SGD"),
        (["--resume"], "--resume continues from --checkpoint"),
        (["--loss", "cross_entropy"], "unknown input 'target'; a step takes x, labels"),
        (["-b", "1000"], "a batch of 1000 needs as many samples"),
        (["--lr", "-1"], "learning_rate"),
    ],
)
def test_bad_arguments(files: tuple[pathlib.Path, pathlib.Path], arguments: list[str], message: str) -> None:
    model, data = files
    done = train(model, "--data", data, "-e", "host", *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_an_interrupted_command_leaves_its_checkpoint(
    files: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after two steps, then three more: the state is that of five steps."""
    pytest.importorskip("safetensors")
    model, data = files
    common = [model, "--data", data, "--loss", "mse", "-b", 16, "-e", "host"]
    state, whole = tmp_path / "s.safetensors", tmp_path / "w.safetensors"
    assert train(*common, "--steps", 5, "--checkpoint", whole).exit_code == 0

    def interrupted(trainer: Any, source: Any, steps: int, **options: Any) -> list[float]:
        fit(trainer, source, 2, progress=False)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("xrt_core.training.loop.fit", interrupted)
        done = train(*common, "--steps", 5, "--checkpoint", state)
    assert done.exit_code == 130
    assert "interrupted after step 2" in done.output
    assert train(*common, "--steps", 3, "--checkpoint", state, "--resume").exit_code == 0
    assert state.read_bytes() == whole.read_bytes()
