"""unsupported.txt and xfails.txt: what a line says, and that none is without a reason or about nothing."""

from __future__ import annotations

import pathlib

import pytest

from xrt_core.errors import OptionError
from xrt_core.testing.lists import Lists


def write(folder: pathlib.Path, unsupported: str = "", xfails: str = "") -> Lists:
    (folder / "unsupported.txt").write_text(unsupported)
    (folder / "xfails.txt").write_text(xfails)
    return Lists.read(folder)


def test_lines(tmp_path: pathlib.Path) -> None:
    """A line is a key and a reason; the two lists are kept apart; comments and blank lines count for nothing."""
    lists = write(
        tmp_path, "# why\n\noperator/NonZero: its shape depends on data: always\n", "generated/Mod-*: rounds twice\n"
    )
    assert lists.why_unsupported("onnx/test_nonzero", "operator/NonZero") == "its shape depends on data: always"
    assert lists.why_unsupported("generated/Mod-float16-row") is None
    assert lists.why_xfail("generated/Mod-float16-row") == "rounds twice"
    assert lists.why_xfail("operator/NonZero") is None
    assert Lists.read(tmp_path / "nowhere") == Lists()


@pytest.mark.parametrize("line", ["operator/NonZero", "operator/NonZero:", ": because", "operator/NonZero:   "])
def test_a_line_without_a_reason_is_refused(tmp_path: pathlib.Path, line: str) -> None:
    """The message says which line it is."""
    with pytest.raises(OptionError, match=r"xfails\.txt:2: .* every exception needs its reason"):
        write(tmp_path, xfails=f"# first\n{line}\n")


def test_stale_lines(tmp_path: pathlib.Path) -> None:
    """A line that is about nothing is named; brackets stand for themselves."""
    lists = write(tmp_path, "operator/Gone: it went\n", "test_x[1]: one\ntest_[ab]: two\n")

    assert lists.stale(["operator/Here", "test_x[1]", "test_a"]) == [
        "unsupported.txt:1: nothing is called 'operator/Gone'",
        "xfails.txt:2: nothing is called 'test_[ab]'",
    ]


def test_a_line_for_some_processors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts where the processor has the feature, or lacks it; on others it is still about something."""
    monkeypatch.setattr("xrt_core.testing.lists.processor_features", lambda: frozenset({"avx2"}))
    lists = write(tmp_path, xfails="one if avx512f: rounds\ntwo if not avx512f: saturates\nthree if avx2: is off\n")
    assert [lists.why_xfail(key) for key in ("one", "two", "three")] == [None, "saturates", "is off"]
    assert lists.stale(["one", "two", "three"]) == []
