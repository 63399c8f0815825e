"""Crossing: the cache on disk as the guard uses it, through which executables come from the child."""

from __future__ import annotations

import contextlib
import shutil
import threading
import weakref

from xrt_core.cache.disk import DiskCache
from xrt_core.cache.model_file import StoredExecutable
from xrt_core.cache.store import ExecutableStore
from xrt_core.errors import XRTError
from xrt_core.events import EventLog
from xrt_core.guard.scratch import new_folder


class Crossing:
    """disk: the cache on disk, None where it is off."""

    def __init__(self, disk: DiskCache | None, events: EventLog) -> None:
        self._disk = disk
        self._events = events
        self._lock = threading.Lock()
        self._store: ExecutableStore | None = None
        self._between: DiskCache | None = None

    def usable(self) -> DiskCache | None:
        """The cache on disk, where its folder may be used."""
        with contextlib.suppress(XRTError):
            if self._disk is not None:
                self._disk.prepare()
                return self._disk
        return None

    def between(self) -> DiskCache:
        """The cache through which executables come from the child: the one on disk, or where that cannot be written, a
        folder of its own, which goes with it."""
        with self._lock:
            if self._between is None:
                disk = self.usable()
                if disk is not None and disk.mode != "read" and disk.prepare():
                    self._between = disk
                else:
                    folder = new_folder("cache")
                    self._between = DiskCache(folder, 1 << 40)
                    weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            return self._between

    @property
    def is_the_cache(self) -> bool:
        """Whether what the child makes lies where any process looks for it."""
        return self.between() is self._disk and self._disk.mode == "readwrite"

    def store(self) -> ExecutableStore:
        """The executables of `between`."""
        disk = self.between()
        with self._lock:
            if self._store is None:
                reading = DiskCache(disk.folder, disk.limit) if disk.mode == "verify" else disk
                self._store = ExecutableStore(reading, self._events)
            return self._store

    def stored(self) -> list[StoredExecutable]:
        """The executables in use that came through `store`, serialised."""
        with self._lock:
            store = self._store
        return [] if store is None else store.stored()
