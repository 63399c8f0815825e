"""Progress on a terminal, silence in a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from xrt_core.cli.display import counted, duration, working


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_progress(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sees the label and the count while it lasts; a pipe sees nothing; both get every number."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with working("compiling"):
        pass
    numbers = list(counted("running", 3))

    assert numbers == [0, 1, 2]
    if stream.isatty():
        assert "compiling" in stream.getvalue()
        assert "3/3" in stream.getvalue()
    else:
        assert stream.getvalue() == ""


def test_duration() -> None:
    """Times come with the unit that fits."""
    assert [duration(t) for t in (12.345, 0.0123, 0.0000042)] == ["12.3 s", "12.3 ms", "4.2 us"]
