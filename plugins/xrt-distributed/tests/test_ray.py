"""Batch work on Ray: every row once, whatever dies, and one compilation for all actors."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("jax")
pytest.importorskip("pyarrow")

import ray
import ray.data
from xrt_distributed import ray as batches

import xrt_core as xrt
from xrt_core import ops
from xrt_core.errors import InputError, OptionError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # jax's, where Ray starts its programs
]

W = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
ROWS = 96


class Scores(xrt.Graph):
    """A product, and a Tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.w = W

    def build(self, x: xrt.TensorType) -> object:
        return {"scores": ops.Tanh(x @ self.w)}


class Noted:
    """Makes the model, and notes in a folder which process did what: `PID.txt` has the names of its events."""

    def __init__(self, folder: pathlib.Path, pause: float = 0.0) -> None:
        self.folder, self.pause = folder, pause

    def __call__(self) -> Scores:
        path = self.folder / f"{os.getpid()}.txt"
        path.touch()

        def note(event: Any) -> None:
            with path.open("a") as file:
                file.write(event.name + "\n")
            if event.name == "specialised":
                time.sleep(self.pause)

        xrt.subscribe(note)
        return Scores()


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[None]:
    """Ray on this machine: two workers, and what reads."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(pathlib.Path(__file__).parent)])
    ray.init(num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def rows(blocks: int = 12) -> Any:
    """Rows with a number and an array."""
    x = np.random.default_rng(1).standard_normal((ROWS, 4)).astype(np.float32)
    items = [{"id": i, "x": x[i]} for i in range(ROWS)]
    return ray.data.from_items(items, override_num_blocks=blocks), x


def events(folder: pathlib.Path) -> list[list[str]]:
    return [path.read_text().split() for path in folder.glob("*.txt")]


def options(folder: pathlib.Path) -> dict[str, Any]:
    (folder / "notes").mkdir()
    return {"engine": "xla", "guard": False, "prune": False, "cache_dir": str(folder / "cache"), "batch_size": 8,
            "columns": {"x": "x"}}  # fmt: skip


def test_one_compiles_and_the_rest_load(cluster: None, tmp_path: pathlib.Path) -> None:
    """Two actors share a cache: one compiles, the other one loads. The rows have the model's output beside them."""
    given = options(tmp_path)
    dataset, x = rows()
    found = batches.map(dataset, Noted(tmp_path / "notes", 0.3), workers=2, **given).take_all()
    assert sorted(r["id"] for r in found) == list(range(ROWS))
    for r in found:
        np.testing.assert_allclose(r["scores"], np.tanh(x[r["id"]] @ W), rtol=1e-5, atol=1e-6)
    noted = events(tmp_path / "notes")
    assert len(noted) == 2
    assert sorted(("cache.stored" in e, "cache.hit" in e) for e in noted) == [(False, True), (True, False)]


class Held:
    """Rows of which the second half waits for a third worker: the job is not done before the one that is killed has
    been replaced."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.until = folder, time.time() + 120

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        while row["id"] >= ROWS // 2 and len(events(self.folder)) < 3 and time.time() < self.until:
            time.sleep(0.05)
        return row


def test_a_worker_that_is_killed(cluster: None, tmp_path: pathlib.Path) -> None:
    """What it had not delivered is done by others, what it had is not done again: every row is there, once."""
    given = options(tmp_path)
    dataset, x = rows()
    found, dead = [], 0
    notes = tmp_path / "notes"
    for row in batches.map(dataset.map(Held(notes).__call__), Noted(notes), workers=2, **given).iter_rows():
        found.append(row)
        if not dead:
            dead = int(next(notes.glob("*.txt")).stem)
            os.kill(dead, signal.SIGKILL)
    assert not pathlib.Path(f"/proc/{dead}").exists()
    assert len(events(notes)) == 3, "no worker took the place of the one that was killed"
    assert sorted(r["id"] for r in found) == list(range(ROWS))
    for r in found:
        np.testing.assert_allclose(r["scores"], np.tanh(x[r["id"]] @ W), rtol=1e-5, atol=1e-6)


def test_wrong_arguments(cluster: None, tmp_path: pathlib.Path) -> None:
    """They are errors before Ray waits for ever, or that name the column."""
    dataset, _ = rows()
    with pytest.raises(InputError, match=r"3 workers of 1 CPUs, and 1 that reads, need 4 CPUs, .* of Ray has 3"):
        batches.map(dataset, Scores, workers=3)
    with pytest.raises(InputError, match=r"1 workers of 1 GPUs need 1, and the cluster of Ray has 0"):
        batches.map(dataset, Scores, gpus=1)
    with pytest.raises(OptionError, match=r"workers=0"):
        batches.map(dataset, Scores, workers=0)
    with pytest.raises(OptionError, match=r"batch_size=0"):
        batches.map(dataset, Scores, batch_size=0)
    with pytest.raises(InputError, match=r"no file .*absent.onnx"):
        batches.map(dataset, tmp_path / "absent.onnx")


def test_a_worker_checks_columns() -> None:
    """Columns and outputs are renamed; those that are missing, ragged or taken are errors."""
    x = np.ones((2, 4), np.float32)
    settings: dict[str, dict[str, str]] = {"columns": {"x": "features"}, "outputs": {"scores": "y"}}
    worker = batches.Worker(Scores, settings, {"engine": "host"})
    np.testing.assert_allclose(worker({"features": x})["y"], np.tanh(x @ W), rtol=1e-6)
    with pytest.raises(InputError, match=r"no column 'features' for the model's input 'x'; it has x"):
        worker({"x": x})
    with pytest.raises(InputError, match=r"the model's output 'scores' is a column of the dataset too"):
        worker({"features": x, "y": x})
    ragged = np.empty(2, object)
    ragged[:] = [np.ones(3), np.ones(4)]
    with pytest.raises(InputError, match=r"column 'features' has arrays of different shapes: \[3\], \[4\]"):
        worker({"features": ragged})
    named: dict[str, dict[str, str]] = {"columns": {"x": "x"}, "outputs": {}}
    whole = batches.Worker(lambda: lambda x: ops.ReduceSum(x, keepdims=0), named, {"engine": "host"})
    with pytest.raises(InputError, match=r"has shape \[\] for a batch of 2 rows"):
        whole({"x": x})
