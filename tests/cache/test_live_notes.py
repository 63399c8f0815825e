"""LiveNotes: a process that ends within a run makes a suspect of the executable, any other end does not."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from xrt_core.cache.live_notes import LiveNotes, forget_suspects

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="POSIX")

DIGEST = "a1" * 32
PROGRAM = """
import os, pathlib, signal, sys
from xrt_core.cache.live_notes import live_notes
note = live_notes(pathlib.Path(sys.argv[1])).begin(sys.argv[2])
if sys.argv[3] == "within":
    note.flags[note.slot()] = 1
if sys.argv[3] == "after":
    note.flags[note.slot()] = 1
    note.flags[note.slot()] = 0
if sys.argv[4] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "crashed":
    os.abort()
if sys.argv[4] == "raised":
    raise ValueError
"""


@pytest.mark.parametrize(
    ("moment", "end", "is_suspect"),
    [("within", "killed", True), ("within", "crashed", True), ("after", "killed", False), ("within", "raised", False)],
)
def test_ends_of_processes(moment: str, end: str, is_suspect: bool, tmp_path: pathlib.Path) -> None:
    """A suspect is one that was running when its process ended without cleaning up; nothing else is left."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), DIGEST, moment, end], capture_output=True)
    assert (done.returncode == -signal.SIGKILL) == (end == "killed"), done.stderr.decode()
    notes = LiveNotes(tmp_path)
    assert notes.is_suspect(DIGEST) is is_suspect
    assert not notes.is_suspect("b2" * 32)
    notes.close()
    assert [p.name for p in (tmp_path / "suspects").iterdir()] == ([f"{DIGEST}.suspect"] if is_suspect else [])
    assert notes_left(notes) == []


def test_the_notes_of_a_living_process_are_its_own(tmp_path: pathlib.Path) -> None:
    """What runs now is no suspect; what a suspect's own process did in order clears it."""
    running = LiveNotes(tmp_path)
    note = running.begin(DIGEST)
    assert note is not None
    note.flags[note.slot()] = 1
    later = LiveNotes(tmp_path)
    assert not later.is_suspect(DIGEST)
    (tmp_path / "suspects" / f"{DIGEST}.suspect").touch()
    later.isolated(DIGEST, is_sound=True)
    later.close()
    assert not LiveNotes(tmp_path).is_suspect(DIGEST)
    running.close()


def test_one_that_crashed_apart_stays_a_suspect(tmp_path: pathlib.Path) -> None:
    """Until somebody clears the cache."""
    notes = LiveNotes(tmp_path)
    assert not notes.is_suspect(DIGEST)
    (tmp_path / "suspects" / f"{DIGEST}.suspect").touch()
    notes.isolated(DIGEST, is_sound=False)
    notes.isolated(DIGEST, is_sound=True)  # loaded once more
    notes.close()
    assert LiveNotes(tmp_path).is_suspect(DIGEST)
    forget_suspects(tmp_path)
    assert not LiveNotes(tmp_path).is_suspect(DIGEST)


def test_a_full_disk_costs_the_notes_only(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of the file are there before they are mapped: writing to one cannot fail later."""

    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    notes = LiveNotes(tmp_path)
    assert notes.begin(DIGEST) is None
    assert notes_left(notes) == []


def test_rows_are_used_again(tmp_path: pathlib.Path) -> None:
    """A note ends with its object; threads have flags of their own, though two may share one."""
    notes = LiveNotes(tmp_path)
    for _ in range(1000):
        note = notes.begin(DIGEST)
        assert note is not None
    kept = [notes.begin(DIGEST) for _ in range(300)]
    assert None in kept
    assert kept[0] is not None
    slots, together = {kept[0].slot()}, threading.Barrier(8)

    def add() -> None:
        slots.add(note.slot())
        together.wait()  # a thread that has ended may give its number to the next

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(slots) > 1
    notes.close()


def test_damaged_notes_are_dropped(tmp_path: pathlib.Path) -> None:
    """Whatever a file holds, it is read without an error, and no name comes out that is no digest."""
    notes = LiveNotes(tmp_path)
    assert notes.begin(DIGEST) is not None
    assert notes._path is not None
    for k, content in enumerate((b"", b"x" * 77, b"../../evil".ljust(64, b"\0") + b"\1" * 64, os.urandom(5000))):
        path = notes._path.with_name(f"{notes._cache}-{k}.note")
        path.write_bytes(content)
        path.chmod(0o600)
    notes.close()
    assert not LiveNotes(tmp_path).is_suspect(DIGEST)
    assert notes_left(notes) == []
    assert not (tmp_path / "evil.suspect").exists()


def notes_left(notes: LiveNotes) -> list[str]:
    """Files of notes of processes that are gone."""
    folder = pathlib.Path(tempfile.gettempdir(), f"xrt-live-{os.geteuid()}")
    return [p.name for p in folder.glob(f"{notes._cache}-*") if f"-{os.getpid()}-" not in p.name]


def test_the_cache_may_be_overwritten(tmp_path: pathlib.Path) -> None:
    """Nothing in the cache's folder is mapped: whoever empties its files does not end the process."""
    notes = LiveNotes(tmp_path)
    note = notes.begin(DIGEST)
    assert note is not None
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    note.flags[note.slot()] = 1
    notes.close()


def test_a_note_ends_while_another_begins(tmp_path: pathlib.Path) -> None:
    """The collector may find an old note within any call, also within one of its own notes."""
    notes = LiveNotes(tmp_path)
    old = notes.begin(DIGEST)
    assert old is not None
    with notes._lock:
        del old
    assert len(notes._free) == 256
    notes.close()


def test_a_forked_process_leaves_the_notes_alone(tmp_path: pathlib.Path) -> None:
    """What it drops is still noted for its parent, which shares the memory."""
    code = """if True:
        import os, pathlib, signal, sys
        from xrt_core.cache.live_notes import live_notes
        note = live_notes(pathlib.Path(sys.argv[1])).begin(sys.argv[2])
        pid = os.fork()
        if not pid:
            del note
            sys.exit()
        os.waitpid(pid, 0)
        note.flags[note.slot()] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), DIGEST], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert LiveNotes(tmp_path).is_suspect(DIGEST)
