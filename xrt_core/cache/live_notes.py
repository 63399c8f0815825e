"""LiveNotes: which executables a process is running at this moment, in a temporary file that outlives it.

A process that ends inside an engine's run, as it crashed or was killed there, leaves its file behind. The next process
finds it, and the executables in question are *suspects* from then on: the guard runs them in a child process, until a
process that did so ends in order. A process that ends anywhere else leaves nothing.

The file is mapped, so that a note costs two writes to memory, and locked as long as its process lives, which another
one can see whatever has become of process numbers. It is not in the cache's folder, where a program that empties or
overwrites files would end this process (SIGBUS); the suspects are, as files that are not mapped.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import mmap
import os
import pathlib
import secrets
import tempfile
import threading
import weakref
from typing import Final

from xrt_core.cache.disk import open_trusted, prepare_folder
from xrt_core.engine.forking import in_forked_process
from xrt_core.errors import CacheError
from xrt_core.files import PRIVATE

_FOLDER: Final = "suspects"
_SUFFIX: Final = ".note"
_SUSPECT: Final = ".suspect"
_ROWS: Final = 256
_DIGEST: Final = 64  # bytes
_THREADS: Final = 64  # bytes, one for each group of threads
_ROW: Final = _DIGEST + _THREADS
_SIZE: Final = _ROWS * _ROW
_MOST_SUSPECTS: Final = 1024


class Note:
    """The note about one executable. Whoever runs it sets `flags[slot()]` to any number for the time of the run."""

    THREADS: Final = _THREADS
    """How many flags there are, a power of two."""

    def __init__(self, flags: memoryview, notes: LiveNotes, row: int, digest: str) -> None:
        self.flags = flags
        self._notes, self._digest = notes, digest
        weakref.finalize(self, notes.free, row).atexit = False

    def suspect(self) -> None:
        """Make the executable a suspect now: the next process that loads it isolates it."""
        self._notes.suspect(self._digest)

    @staticmethod
    def slot() -> int:
        """The flag of this thread. Threads may share one: a note then ends early, which loses a suspicion at most."""
        return threading.get_ident() >> 12 & _THREADS - 1


class LiveNotes:
    """The notes of this process beside one cache. Made by `live_notes`; thread-safe."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder / _FOLDER
        self._cache = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
        self._lock = threading.RLock()  # the collector may end a note within any of the methods
        self._free = list(range(_ROWS))
        self._owner = os.getpid()
        self._path: pathlib.Path | None = None
        self._rows: memoryview | None = None
        self._is_usable = True
        self._isolated: dict[str, bool] = {}  # digest -> whether it has run without incident

    def begin(self, digest: str) -> Note | None:
        """A note about an executable that goes live; None where none can be made. digest: of its key."""
        with self._lock:
            rows = self._open()
            if rows is None or not self._free:
                return None
            row = self._free.pop()
            at = row * _ROW
            rows[at : at + _ROW] = digest.encode()[:_DIGEST].ljust(_ROW, b"\0")
            return Note(rows[at + _DIGEST : at + _ROW], self, row, digest)

    def free(self, row: int) -> None:
        """End a note. In a forked process nothing: the memory is shared with the parent, whose note it is."""
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._rows is not None:
                self._rows[row * _ROW : (row + 1) * _ROW] = bytes(_ROW)
            self._free.append(row)

    def is_suspect(self, digest: str) -> bool:
        """Whether a process ended within a run of this executable, and none has ended in order since."""
        with self._lock:
            self._open()
            return (self._folder / f"{digest}{_SUSPECT}").exists()

    def suspect(self, digest: str) -> None:
        """See `Note.suspect`."""
        with self._lock, contextlib.suppress(OSError):
            (self._folder / f"{digest}{_SUSPECT}").touch(PRIVATE)

    def isolated(self, digest: str, is_sound: bool) -> None:
        """A suspect runs in a child process. is_sound: False once that process has ended within a run too."""
        with self._lock:
            self._isolated[digest] = is_sound and self._isolated.get(digest, True)

    def close(self) -> None:
        """End in order: the file is removed, and so is the suspicion of those that ran apart without incident."""
        with self._lock, contextlib.suppress(OSError):
            if self._owner == os.getpid():
                for digest in (d for d, is_sound in self._isolated.items() if is_sound):
                    (self._folder / f"{digest}{_SUSPECT}").unlink(missing_ok=True)
                if self._path is not None:
                    self._path.unlink(missing_ok=True)

    def _open(self) -> memoryview | None:
        """The rows of this process's file, which is made, and those of dead processes read, at the first call."""
        if self._rows is None and self._is_usable:
            self._is_usable = False
            with contextlib.suppress(OSError, CacheError, ImportError, ValueError, AttributeError):
                notes = pathlib.Path(tempfile.gettempdir(), f"xrt-live-{os.geteuid()}")
                if prepare_folder(self._folder, write=True) and prepare_folder(notes, write=True):
                    _read_left_notes(notes, self._cache, self._folder)
                    self._path, self._rows = _new_file(notes, self._cache)
                    atexit.register(self.close)
        return self._rows


def forget_suspects(folder: pathlib.Path) -> None:
    """Drop all suspicions beside the cache in a folder."""
    for path in (folder / _FOLDER).glob(f"*{_SUSPECT}"):
        path.unlink(missing_ok=True)


def _new_file(folder: pathlib.Path, cache: str) -> tuple[pathlib.Path, memoryview]:
    import fcntl  # POSIX; elsewhere there are no notes

    path = folder / f"{cache}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    temporary = path.with_suffix(".tmp")  # it becomes visible when it is locked
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE)  # a page that a full disk has no room for would end the process
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rows = memoryview(mmap.mmap(descriptor, _SIZE))
        os.rename(temporary, path)
    except BaseException:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        raise
    return path, rows  # the descriptor stays open: it holds the lock


def _read_left_notes(notes: pathlib.Path, cache: str, folder: pathlib.Path) -> None:
    """Make suspects, in `folder`, of what dead processes with this cache were running when they ended."""
    import fcntl

    for path in notes.glob(f"{cache}-*{_SUFFIX}"):
        with contextlib.suppress(OSError, CacheError), open_trusted(path) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            content = file.read(_SIZE)
            for at in range(0, len(content), _ROW):
                digest = content[at : at + _DIGEST].rstrip(b"\0").decode("ascii", "replace")
                if any(content[at + _DIGEST : at + _ROW]) and digest.isalnum():
                    (folder / f"{digest}{_SUSPECT}").touch(PRIVATE)
            path.unlink()
    for path in list(folder.glob(f"*{_SUSPECT}"))[_MOST_SUSPECTS:]:
        path.unlink(missing_ok=True)


_notes: dict[pathlib.Path, LiveNotes] = {}
_lock = threading.Lock()


def live_notes(folder: pathlib.Path) -> LiveNotes:
    """The notes of this process beside the cache in a folder."""
    with _lock:
        return _notes.setdefault(folder, LiveNotes(folder))


def _after_fork() -> None:
    """A forked process makes notes of its own; its parent's end is none of its business."""
    global _lock
    _lock = threading.Lock()
    _notes.clear()


in_forked_process(_after_fork)
