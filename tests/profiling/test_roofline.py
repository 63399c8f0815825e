"""The roofline: measured once for a machine, kept on disk, measured again where the file is not its own."""

from __future__ import annotations

import json
import pathlib

import pytest

from xrt_core.profiling import Roofline, roofline


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache's folder of its own; measuring takes a hundredth of the time."""
    monkeypatch.setenv("XRT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(roofline, "_SECONDS", 0.001)
    monkeypatch.setattr(roofline, "_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "_SIDE", 64)
    return tmp_path


def test_it_is_measured_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it comes from the file; `again` measures; the time of a step is the longer of the two."""
    first = Roofline.here()
    assert 1e8 < first.bandwidth < 1e13
    assert 1e7 < first.flops < 1e15
    monkeypatch.setattr(Roofline, "measure", classmethod(lambda cls: cls(1.0, 2.0, roofline._machine())))
    assert Roofline.here() == first
    assert Roofline.here(again=True) == Roofline.here()
    assert Roofline.here().seconds(moved=10, flops=10) == 10.0
    assert Roofline.here().seconds(moved=1, flops=10) == 5.0


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"bandwidth": 0.0, "flops": 1.0, "machine": "m"}', '{"machine": "other"}']
)
def test_a_file_that_does_not_fit(folder: pathlib.Path, content: str) -> None:
    """A damaged file, and that of another machine, are replaced."""
    (folder / "roofline.json").write_text(content.replace("m\"}", roofline._machine() + "\"}"))
    found = Roofline.here()
    assert found.bandwidth > 0
    assert json.loads((folder / "roofline.json").read_text())["bandwidth"] == found.bandwidth


def test_without_a_cache_nothing_is_written(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XRT_CACHE_MODE=off, and a folder that cannot be made, cost the measurement alone."""
    monkeypatch.setenv("XRT_CACHE_MODE", "off")
    assert Roofline.here().flops > 0
    assert not list(folder.iterdir())
    monkeypatch.delenv("XRT_CACHE_MODE")
    (folder / "file").write_text("")
    monkeypatch.setenv("XRT_CACHE_DIR", str(folder / "file" / "below"))
    assert Roofline.here().flops > 0
