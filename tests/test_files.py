"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import pathlib
import threading

import pytest

from xrt_core.files import PRIVATE, replace_file


def test_the_old_file_stays_until_the_body_ends(tmp_path: pathlib.Path) -> None:
    """A reader sees the old contents while the new ones are written, and all of the new ones afterwards."""
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with replace_file(target, sync=True) as file:
        file.write(b"new contents")
        file.flush()
        assert target.read_bytes() == b"old"

    assert target.read_bytes() == b"new contents"
    assert os.listdir(tmp_path) == ["file"]


def test_a_body_that_raises_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """After an error, an interrupt included, the old file is there alone."""
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def interrupted() -> None:
        with replace_file(target) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("umask", "mode", "expected"), [(0o022, 0o666, 0o644), (0o077, 0o666, 0o600), (0, PRIVATE, 0o600)]
)
def test_the_mode_follows_the_umask(tmp_path: pathlib.Path, umask: int, mode: int, expected: int) -> None:
    """The file has the mode that `open` would give it, or the one asked for."""
    before = os.umask(umask)
    try:
        with replace_file(tmp_path / "file", mode=mode):
            pass
    finally:
        os.umask(before)

    assert (tmp_path / "file").stat().st_mode & 0o777 == expected


def test_the_umask_is_left_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.umask, which sets the umask of every thread, is not called."""

    def refused(_: int) -> int:
        raise AssertionError("os.umask was called")

    monkeypatch.setattr(os, "umask", refused)
    with replace_file(tmp_path / "file") as file:
        file.write(b"x")

    assert (tmp_path / "file").read_bytes() == b"x"


def test_an_error_names_the_target(tmp_path: pathlib.Path) -> None:
    """A folder that is missing is reported with the file that was asked for, not with the temporary one."""
    target = tmp_path / "missing" / "file"
    with pytest.raises(FileNotFoundError) as caught, replace_file(target):
        pass

    assert caught.value.filename == str(target)


def test_writers_at_once_leave_one_whole_file(tmp_path: pathlib.Path) -> None:
    """Of several threads that write the same file, one wins, and nothing is mixed."""
    target = tmp_path / "file"

    def write(letter: bytes) -> None:
        for _ in range(20):
            with replace_file(target) as file:
                file.write(letter * 10_000)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert target.read_bytes() in {letter * 10_000 for letter in (b"a", b"b", b"c")}
    assert os.listdir(tmp_path) == ["file"]
