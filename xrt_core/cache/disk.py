"""The cache on disk: entries in one folder, safe for many processes, bounded; a failure is a miss, never an error.

An entry is one file, a container whose header holds the key, and whose blobs have names. One file, because a rename
then replaces an entry as a whole: a reader sees the old entry or the new one, never a manifest of one with a blob of
the other. The cache's folder: where it is, and whether what lies there can be trusted.

Digests of weights that lie in files are remembered there, across processes (`FileDigests`): a file that did not change
is hashed once. What it saves, measured 2026-11-22 (AMD EPYC with AVX2, 2 busy cores, file in the page cache): the key
of a model with 400 MB of weights takes 2 ms instead of 185 ms by BLAKE3 (730 ms by BLAKE2b), of 4 to 5 s for a second
start with a compiling engine. A file that is not in the page cache need not be read for its key either, and the guard
looks up its verdicts of a large model before the first result (`ExecutableStore.unhashed_bytes`), when there is no time
to hash it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final, Literal, TypedDict, cast

import numpy as np
from msgspec import Struct

from xrt_core.cache.key import CacheKey
from xrt_core.engine.serialization import Blob, Container, Kind, Writer, open_file
from xrt_core.errors import CacheError, OptionError
from xrt_core.files import PRIVATE, Size, decode, decompress, encode, reading, replace_file, storable
from xrt_core.ir.file_backed import FileState, place_of
from xrt_core.ir.function import digest
from xrt_core.ir.types import dtype_name
from xrt_core.plugins import plugins

KIND: Final = Kind(b"XRTCACHE", 2, "a cache entry", CacheError)
EXECUTABLE: Final = "executable"
FUNCTION: Final = "function"
"""The blobs of an entry: what the engine serialised, and the canonical text of the function, compressed."""
NOT_STORED: Final = "not stored"
"""The field of `info` that says why an entry holds no executable, so that no process tries again to store it."""


Info = TypedDict(
    "Info",
    {"cluster": str, "nodes": Size, "created": float, "compile_seconds": float, "verdict": str, "not stored": str},
    total=False,
)
"""Facts about an entry, for people."""


class _Header(Struct, frozen=True):
    key: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    info: Info


class Manifest(Struct, frozen=True):
    """The manifest of an entry. size: of the file in bytes."""

    key: CacheKey
    info: Info
    blobs: Mapping[str, Blob]
    size: int
    container: Container


def write_entry(file: BinaryIO, key: CacheKey, info: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
    """Write an entry into an empty file."""
    writer = Writer(file, KIND)
    for blob in blobs.values():
        writer.add(blob)
    writer.finish({"key": [list(row) for row in key.rows], "info": dict(info), "names": list(blobs)})


def read_manifest(file: BinaryIO) -> Manifest:
    """The manifest of an entry in an open file. Raises CacheError with what is wrong with the file."""
    found = open_file(KIND, "the file", file)
    header = found.header(_Header)
    if len(set(header.names)) != len(found.blobs) or len(header.names) != len(found.blobs):
        raise CacheError(f"it has {len(found.blobs)} blobs and {len(set(header.names))} names for them")
    blobs = dict(zip(header.names, found.blobs, strict=True))
    return Manifest(CacheKey(header.key), header.info, blobs, found.size, found)


def read_blob(manifest: Manifest, name: str) -> bytes:
    """A blob whose digest has been checked; the manifest's file must be open. Raises CacheError with what is wrong."""
    if name not in manifest.blobs:
        raise CacheError(f"the entry holds no {name!r}")
    return bytes(manifest.container.blob(list(manifest.blobs).index(name)))


def check_entry(file: BinaryIO) -> str:
    """What is wrong with an entry, "" for nothing. All digests are checked, nothing is loaded."""
    try:
        manifest = read_manifest(file)
        for name in manifest.blobs:
            read_blob(manifest, name)
    except (CacheError, OSError) as e:
        return str(e)
    wanted = {FUNCTION} if NOT_STORED in manifest.info else {FUNCTION, EXECUTABLE}
    return "" if set(manifest.blobs) == wanted else f"it holds {', '.join(manifest.blobs) or 'nothing'}"


Mode = Literal["readwrite", "read", "verify"]

SUFFIX: Final = ".xrt"
NOTHING: Final = "not stored"
"""The reason of a miss where there simply is no entry."""
LAYOUT: Final = "v2"  # a later layout lies beside this one, and versions of XRT that know only one don't meet
_STALE_SECONDS: Final = 600.0  # a temporary file this old was left by a process that was killed
_SCAN_SECONDS: Final = 1.0
_LOCK_SHARDS: Final = 2  # hex digits of a key that choose its lock file
_MOST_TEXT: Final = 1 << 28  # bytes of a function's text that is shown
_NEAR: Final = 256  # entries that are looked at to say which one is nearest to a miss


class Miss(Struct, frozen=True):
    """Why there is nothing to use. stored: there is a file, which cannot be used. final: and it says that storing the
    executable is not worth while, so that trying is not either."""

    reason: str
    stored: bool = False
    final: bool = False


class Hit(Struct, frozen=True):
    """A stored executable, every byte of which its manifest covers."""

    manifest: Manifest
    blob: bytes


class EntryFile(Struct, frozen=True):
    """An entry's file. used: when it was last read or written, seconds since the epoch."""

    path: pathlib.Path
    size: int
    used: float

    @property
    def digest(self) -> str:
        """The digest of the key, by the file's name."""
        return self.path.name.removesuffix(SUFFIX)


class DiskCache:
    """Entries of one folder.

    folder: made where it is missing, for this user alone. limit: bytes that all entries together may take; the ones
    used longest ago go, whichever process used them. mode: "read" and "verify" see `ExecutableStore`; nothing is
    written in "read". shared: the URL of a store behind it, which a plugin opens (`shared_store`), "" for none.

    Safe for many processes and threads without a lock: an entry is one file, which appears and is replaced as a whole.
    Locks only save work: two processes don't compile the same thing at once. Whatever the file system does, the worst
    outcome is a `Miss` or an entry that is not stored.
    """

    def __init__(self, folder: pathlib.Path, limit: int, mode: Mode = "readwrite", shared: str = "") -> None:
        self.shared = shared
        self.folder = pathlib.Path(folder)
        self.limit = limit
        self.mode: Mode = mode
        self.entries = self.folder / LAYOUT
        self._lock = threading.Lock()
        self._scanned = -1e9
        self._known_bytes = 0
        self._written = 0

    def prepare(self) -> bool:
        """Whether entries can be written now. Raises CacheError where the folder may not be used at all."""
        if not prepare_folder(self.folder, self.mode != "read"):
            return False
        return prepare_folder(self.entries, write=True)

    def path_of(self, key: CacheKey) -> pathlib.Path:
        """Where the entry of a key lies, if it is stored."""
        return self.entries / f"{key.digest}{SUFFIX}"

    # --- one entry -----------------------------------------------------------------------------------------------

    def read(self, key: CacheKey, function_text: bytes) -> Hit | Miss:
        """The entry of a key, if all of it is sound and it was made from exactly this function."""
        path = self.path_of(key)
        try:
            with open_trusted(path) as file:
                manifest = read_manifest(file)
                if manifest.key != key:
                    return Miss(f"it holds another key ({'; '.join(key.differences(manifest.key))})", stored=True)
                with reading("its function's text", CacheError):
                    text = decompress(read_blob(manifest, FUNCTION), len(function_text))
                if text != function_text:
                    return Miss("it was made from another function with the same digest", stored=True)
                refusal = manifest.info.get(NOT_STORED)
                blob = b"" if refusal else read_blob(manifest, EXECUTABLE)
        except FileNotFoundError:
            return Miss(NOTHING)
        except (CacheError, OSError, MemoryError) as e:
            return Miss(str(e) or type(e).__name__, stored=True)
        self.touch(path)
        return Miss(str(refusal), final=True) if refusal else Hit(manifest, blob)

    def touch(self, path: pathlib.Path) -> None:
        """Note that an entry was used now, for every process."""
        if self.mode != "read":
            now = time.time_ns()
            with contextlib.suppress(OSError):
                os.utime(path, ns=(now, now))

    def write(self, key: CacheKey, info: Mapping[str, Any], function_text: bytes, blob: bytes | None) -> str:
        """Store an executable, in the place of an older one. Returns "", or why it is not stored.

        blob: None where `info` says under NOT_STORED why there will be none.
        """
        try:
            if not self.prepare():
                return "the folder cannot be written to" if self.mode != "read" else "the cache is only read"
            blobs = {FUNCTION: zlib.compress(function_text, 1)}
            if blob is not None:
                blobs[EXECUTABLE] = blob
            size = sum(map(len, blobs.values()))
            if size > self.limit:
                return f"the entry has {size} bytes, the whole cache may have {self.limit}"
            with replace_file(self.path_of(key), mode=PRIVATE) as file:
                write_entry(file, key, info, blobs)
                size = file.seek(0, os.SEEK_END)
        except (OSError, CacheError, MemoryError) as e:
            return str(e) or type(e).__name__
        with contextlib.suppress(OSError):
            self._bound(size)
        return ""

    def receive(self, key: CacheKey, content: bytes) -> str:
        """Store the entry of a key as a shared cache gave it, checked when it is read. Returns "", or why it is not."""
        try:
            if not self.prepare():
                return "the folder cannot be written to"
            if len(content) > self.limit:
                return f"the entry has {len(content)} bytes, the whole cache may have {self.limit}"
            with replace_file(self.path_of(key), mode=PRIVATE) as file:
                file.write(content)
        except (OSError, CacheError, MemoryError) as e:
            return str(e) or type(e).__name__
        with contextlib.suppress(OSError):
            self._bound(len(content))
        return ""

    def remove(self, path: pathlib.Path) -> bool:
        """Delete an entry's file. Returns whether it was there."""
        try:
            path.unlink()
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def making(self, key: CacheKey, timeout: float, waits: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Hold the right to compile for `key`; yields whether somebody else held it before. waits: called if so, before
        it is waited for.

        Without a lock (the folder cannot be written, the wait took longer than `timeout` seconds) the body runs all
        the same: then two processes may do the same work, which costs time and nothing else.
        """
        with contextlib.ExitStack() as stack:
            waited = False
            with contextlib.suppress(OSError, CacheError, NotImplementedError, RuntimeError):
                if self.prepare():
                    waited = self._acquire(stack, key, timeout, waits)
            yield waited

    def _acquire(
        self, stack: contextlib.ExitStack, key: CacheKey, timeout: float, waits: Callable[[], None]
    ) -> bool:
        from filelock import FileLock, Timeout

        locks = self.entries / "locks"
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(locks / f"{key.digest[:_LOCK_SHARDS]}.lock", mode=0o600)
        try:
            stack.enter_context(lock.acquire(timeout=0))
            return False
        except Timeout:
            waits()
            with contextlib.suppress(Timeout):
                stack.enter_context(lock.acquire(timeout=timeout, poll_interval=0.02))
            return True

    # --- all entries ---------------------------------------------------------------------------------------------

    def files(self) -> list[EntryFile]:
        """Every entry's file, the one used longest ago first. Raises CacheError for a folder that is not trusted."""
        prepare_folder(self.folder, write=False)
        return sorted(_scan(self.entries), key=lambda e: e.used)

    def manifest(self, path: pathlib.Path) -> Manifest:
        """The manifest of an entry's file. Raises CacheError with what is wrong with it."""
        try:
            with open_trusted(path) as file:
                return read_manifest(file)
        except OSError as e:
            raise CacheError(f"{path.name}: {e.strerror or e}") from None

    def check(self, path: pathlib.Path) -> str:
        """What is wrong with an entry's file, "" for nothing. All digests are checked, nothing is loaded."""
        try:
            with open_trusted(path) as file:
                if reason := check_entry(file):
                    return reason
                named = read_manifest(file).key.digest == path.name.removesuffix(SUFFIX)
        except (CacheError, OSError) as e:
            return str(e)
        return "" if named else "its name is not the digest of its key"

    def function_text(self, path: pathlib.Path) -> str:
        """The canonical text of the function that an entry was made from. Raises CacheError."""
        with reading(path.name, CacheError), open_trusted(path) as file:
            return decompress(read_blob(read_manifest(file), FUNCTION), _MOST_TEXT).decode("utf-8", "replace")

    def nearest(self, key: CacheKey) -> tuple[EntryFile, list[str]] | None:
        """The stored entry whose key differs from `key` in the fewest rows, and these rows; None without entries."""
        best: tuple[EntryFile, list[str]] | None = None
        with contextlib.suppress(CacheError, OSError):
            for entry in reversed(self.files()[-_NEAR:]):
                try:
                    rows = key.differences(self.manifest(entry.path).key)
                except CacheError:
                    continue
                if rows and (best is None or len(rows) < len(best[1])):
                    best = entry, rows
        return best

    def evict(self, limit: int | None = None) -> tuple[int, int]:
        """Delete the entries used longest ago until the others fit into `limit` (the cache's own if None) bytes, and
        what killed processes left behind. Returns how many entries went, and the bytes of those that stay."""
        allowed = self.limit if limit is None else limit
        if not self.entries.is_dir():
            return 0, 0
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):  # two that evict at once only do the same work twice
                from filelock import FileLock

                stack.enter_context(FileLock(self.entries / ".lock", mode=0o600).acquire(timeout=5))
            _sweep(self.entries)
            files = sorted(_scan(self.entries), key=lambda e: e.used)
            total = sum(e.size for e in files)
            gone = 0
            for entry in files:
                if total <= allowed:
                    break
                self.remove(entry.path)
                total -= entry.size
                gone += 1
        return gone, total

    def _bound(self, written: int) -> None:
        """Keep the folder within the limit after an entry of N bytes; checked about once a second at most,
        or when what this process knows of says that the limit is near."""
        with self._lock:
            self._written += written
            now = time.monotonic()
            full = self._known_bytes + self._written > self.limit or self._written > self.limit // 64
            if not full and now - self._scanned < _SCAN_SECONDS:
                return
            self._scanned, self._written = now, 0
            self._known_bytes = self.evict()[1]


@functools.lru_cache(maxsize=64)
def open_cache(mode: str, folder: str | None, limit: int) -> DiskCache | None:
    """The process's cache of these settings, None for "off". folder: None for the user's own (see `default_folder`).

    mode: a `Mode`, "off", or the URL of a shared store behind the disk. Raises OptionError where no plugin opens that.
    """
    if mode == "off":
        return None
    place = default_folder() if folder is None else pathlib.Path(folder).expanduser()
    if "://" not in mode:
        return DiskCache(place, limit, cast("Mode", mode))
    shared_store(mode)
    return DiskCache(place, limit, shared=mode)


def shared_store(url: str) -> Any:
    """The store of a URL, as the first plugin opens it that knows such URLs (hook `xrt_open_cache`).

    Raises OptionError where none does, and XRTErrors of who knows it.
    """
    for _, _, ask in plugins.each("xrt_open_cache", "xrt.caches", url=url):
        found = ask()
        if found is not None:
            return found
    raise OptionError(f"cache={url!r}: no installed plugin opens such a store; pip install xrt-distributed")


def _scan(folder: pathlib.Path) -> Iterator[EntryFile]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for f in found:
            if f.name.endswith(SUFFIX) and not f.name.startswith("."):
                with contextlib.suppress(OSError):  # it went in the meantime
                    status = f.stat(follow_symlinks=False)
                    yield EntryFile(pathlib.Path(f.path), status.st_size, status.st_mtime_ns / 1e9)


def _sweep(folder: pathlib.Path) -> None:
    """Delete temporary files whose writer is gone."""
    old = time.time() - _STALE_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for f in found:
            if f.name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    if f.stat(follow_symlinks=False).st_mtime < old:
                        os.unlink(f.path)


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_folder() -> pathlib.Path:
    """The user's cache folder for XRT, as the platform has it."""
    import platformdirs

    return pathlib.Path(platformdirs.user_cache_dir("xrt", appauthor=False))


def distrust(status: os.stat_result) -> str:
    """Why a file or folder could hold what another user put there; "" where it can not.

    Executables may be pickles, which run code when they are loaded. The owner must be this user or root, and nobody
    else may write. Where the system has no such owners (Windows), the folder's access list is the user's business.
    """
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (number {status.st_uid})"
    if status.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w makes it safe"
    return ""


def open_trusted(path: pathlib.Path) -> BinaryIO:
    """An existing file, open for reading, that only this user or root can have written.

    The open file is what is looked at, so a swap of the path in between changes nothing.
    Raises FileNotFoundError, OSError, or CacheError with the reason why it is not trusted.
    """
    # O_NONBLOCK: opening a pipe that someone laid there would wait for a writer
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    status = os.fstat(file.fileno())
    reason = distrust(status) if stat.S_ISREG(status.st_mode) else "it is no regular file"
    if reason:
        file.close()
        raise CacheError(f"{path.name} is not trusted: {reason}")
    return file


def prepare_folder(path: pathlib.Path, write: bool) -> bool:
    """Make the folder where it is missing and may be written. Returns whether it can be written.

    Raises CacheError for a folder that is not trusted or cannot be used at all.
    """
    try:
        if write:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as e:
        if path.exists():
            raise CacheError(f"the cache folder {path} cannot be used: {e}") from None
        if write:  # it cannot be made here; another process may make it yet
            return False
        raise CacheError(f"the cache folder {path} cannot be used: {e}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the cache folder {path} is not a folder")
    if reason := distrust(status):
        raise CacheError(f"the cache folder {path} is not used: {reason}")
    return write and os.access(path, os.W_OK | os.X_OK)


_LEAST: Final = 4096  # bytes; hashing less takes no longer than looking it up
_MOST_FILES: Final = 512
_MOST_REMEMBERED: Final = 1 << 26  # bytes of a file of digests


class _Remembered(Struct, frozen=True):
    seal: str
    path: str
    stamp: tuple[int, ...]
    digests: dict[str, str]


class FileDigests:
    """A `DigestMemory` over the cache's folder: one small JSON file for each file of weights.

    Keyed by the file's path, device, inode, size and times of change, and within it by offset, dtype and shape.
    Arrays outside mapped files are ignored. Call `flush` to keep what was put.
    """

    def __init__(self, folder: pathlib.Path, write: bool = True) -> None:
        self._folder = folder / LAYOUT / "digests"
        self._write = write
        self._tables: dict[FileState, dict[str, str]] = {}
        self._changed: set[FileState] = set()
        self._lock = threading.Lock()

    def get(self, array: np.ndarray) -> str | None:
        """The digest of an array in a mapped file that has not changed since it was hashed, or None."""
        if array.nbytes < _LEAST or (place := place_of(array)) is None:
            return None
        return self._table(place[0]).get(_label(array, place[1]))

    def put(self, array: np.ndarray, digest: str) -> None:
        """Remember the digest of an array, if it lies in a mapped file."""
        if array.nbytes < _LEAST or (place := place_of(array)) is None:
            return
        table = self._table(place[0])
        with self._lock:
            table[_label(array, place[1])] = digest
            self._changed.add(place[0])

    def flush(self) -> None:
        """Write down what is new, for files that are still what was hashed. Does nothing where that is impossible."""
        with self._lock:
            changed = [(state, dict(self._tables[state])) for state in self._changed]
            self._changed.clear()
        for state, table in changed:
            if self._write and state.is_current() and state.is_settled:
                known = {**self._read(state), **table}
                body = {"path": storable(state.path), "stamp": list(state.stamp), "digests": known}
                with contextlib.suppress(OSError):
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with replace_file(self._file(state), mode=PRIVATE) as file:
                        file.write(encode({"seal": _seal(body), **body}, indent=0))
                    self._bound()

    def _table(self, state: FileState) -> dict[str, str]:
        table = self._tables.get(state)
        if table is None:
            # a file that changed since it was mapped: what is mapped may be the new contents under the old stamp
            found = self._read(state) if state.is_current() else {}
            with self._lock:
                table = self._tables.setdefault(state, found)
        return table

    def _read(self, state: FileState) -> dict[str, str]:
        try:
            with reading("remembered digests", CacheError), open_trusted(self._file(state)) as file:
                found = decode(file.read(_MOST_REMEMBERED), _Remembered, "remembered digests", CacheError)
        except CacheError:
            return {}
        body = {"path": found.path, "stamp": list(found.stamp), "digests": found.digests}
        is_of_it = found.path == storable(state.path) and found.stamp == state.stamp
        return found.digests if is_of_it and found.seal == _seal(body) else {}

    def _file(self, state: FileState) -> pathlib.Path:
        name = digest(state.path.encode("utf-8", "surrogateescape"))
        return self._folder / f"{name}.json"

    def _bound(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
        for path in files[:-_MOST_FILES]:
            path.unlink(missing_ok=True)


def _label(array: np.ndarray, offset: int) -> str:
    return f"{offset} {dtype_name(array.dtype)} {list(array.shape)}"


def _seal(body: dict[str, Any]) -> str:
    return digest(encode({**body, "digests": dict(sorted(body["digests"].items()))}))
