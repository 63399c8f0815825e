"""Which file a memory-mapped array lies in, so that what was once computed from its contents can be remembered."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import weakref

import numpy as np
from msgspec import Struct

from xrt_core.ir.garbage_collection import WeakIdentityMap


class FileState(Struct, frozen=True):
    """A file as it was when it was mapped. stamp: device, inode, size, times of its last change in nanoseconds."""

    path: str
    stamp: tuple[int, ...]

    def is_current(self) -> bool:
        """Whether the file is still what it was."""
        try:
            return stamp_of(os.stat(self.path)) == self.stamp
        except OSError:
            return False

    @property
    def is_settled(self) -> bool:
        """Whether it changed last so long ago that another change has another time."""
        return time.time_ns() - max(self.stamp[3:]) > _SETTLED


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """What of a file's status changes whenever its contents do, or may do."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


_SETTLED = 2e9  # ns; a file changed later than this before now may change again within one tick of its clock
_LARGE = 1 << 16
"""Bytes from which on an array's pages are worth a call to let go of them."""

_mapped: WeakIdentityMap[object, tuple[int, FileState]] = WeakIdentityMap()
"""Mapped files: where each starts in memory, and what it is."""


def note_mapping(mapped: mmap.mmap, path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Remember that `mapped` is the whole of the file `path`, whose status was `status` when it was opened."""
    start = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    _mapped.put(mapped, (start, FileState(os.path.realpath(path), stamp_of(status))))


def _base_of(array: np.ndarray) -> object:
    """The object whose memory an array views."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def place_of(array: np.ndarray) -> tuple[FileState, int] | None:
    """The file whose bytes a contiguous array is, and the offset of the first; None for any other array."""
    known = _mapped.get(_base_of(array))
    if known is None or not array.flags.c_contiguous:
        return None
    return known[1], array.__array_interface__["data"][0] - known[0]


def let_go(array: np.ndarray) -> None:
    """Let the pages of an array that lies in a mapped file leave this process's memory: they are read again from the
    file, which the system mostly still holds, by whoever wants them. Nothing for any other array."""
    if array.nbytes < _LARGE or sys.platform != "linux" or (place := place_of(array)) is None:
        return
    mapped = _base_of(array)
    assert isinstance(mapped, mmap.mmap)
    start = place[1] // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, place[1] + array.nbytes - start)


_copies: WeakIdentityMap[np.ndarray, weakref.ref[np.ndarray]] = WeakIdentityMap()
"""Aligned copies of arrays, as long as they live."""
_copying = threading.Lock()


def aligned(array: np.ndarray) -> np.ndarray:
    """The array if it is aligned; else a read-only copy, which all who ask while it lives share.

    Unaligned weights of a mapped file would be copied whenever they are used, and once for each plan that holds them.
    """
    if array.flags.aligned:
        return array
    with _copying:
        made = _copies.get(array)
        found = None if made is None else made()
        if found is None:
            found = array.copy()
            found.flags.writeable = False
            _copies.put(array, weakref.ref(found))
            let_go(array)  # nobody reads the file's pages again
    return found
