"""Checkpoints: what is written comes back, and what is damaged is refused."""

from __future__ import annotations

import json
import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest

from xrt_core.errors import CheckpointError
from xrt_core.training import checkpoint


def arrays() -> dict[str, np.ndarray]:
    """One array of each kind, empty and scalar ones among them."""
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((3, 2)).astype(np.float32),
        "d": rng.standard_normal(4),
        "h": np.array([1.5, -2], ml_dtypes.bfloat16),
        "flags": np.array([True, False, True]),
        "step": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float16),
    }


def test_round_trip(tmp_path: pathlib.Path) -> None:
    """Arrays come back bit for bit, texts as they are; nothing else is left in the folder."""
    path = tmp_path / "a.safetensors"
    checkpoint.save(arrays(), path, {"seed": "3"})
    found, metadata = checkpoint.load(path)

    assert metadata == {"seed": "3"}
    assert set(found) == set(arrays())
    for name, a in arrays().items():
        assert (found[name].dtype, found[name].shape) == (a.dtype, a.shape)
        assert found[name].tobytes() == a.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_library_reads_it(tmp_path: pathlib.Path) -> None:
    """The file is what the safetensors package takes, and the other way round."""
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "a.safetensors"
    plain = {k: a for k, a in arrays().items() if k != "h"}
    checkpoint.save(plain, path, {})
    for name, a in library.load_file(path).items():
        np.testing.assert_array_equal(a, plain[name])

    library.save_file(plain, path)
    for name, a in checkpoint.load(path)[0].items():
        np.testing.assert_array_equal(a, plain[name])


def test_a_cut_file_is_refused(tmp_path: pathlib.Path) -> None:
    """However much is missing, the error says that the file is cut off or no such file."""
    path = tmp_path / "a.safetensors"
    checkpoint.save(arrays(), path, {})
    whole = path.read_bytes()
    for count in (0, 5, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:count])
        with pytest.raises(CheckpointError, match="a.safetensors.*(cut off|cannot be read)"):
            checkpoint.load(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32"},
        "nothing",
    ],
)
def test_a_foreign_header_is_refused(entry: object, tmp_path: pathlib.Path) -> None:
    """A header that does not fit its data is an error, not an array."""
    text = json.dumps({"a": entry}).encode()
    path = tmp_path / "b.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(CheckpointError, match="b.safetensors"):
        checkpoint.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays whole until all of the new file is written."""
    path = tmp_path / "a.safetensors"
    checkpoint.save(arrays(), path, {})
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoint.save({"w": np.zeros(3)}, path, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_missing_and_unknown(tmp_path: pathlib.Path) -> None:
    """A file that is not there, and a dtype that the format has not, are errors."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="complex64"):
        checkpoint.save({"c": np.zeros(1, np.complex64)}, tmp_path / "c", {})
