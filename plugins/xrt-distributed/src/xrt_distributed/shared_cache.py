"""The shared cache: entries of the disk cache in a store that fsspec reaches, signed with a key.

Entries hold code, so that what has no valid signature (HMAC-SHA256 of name, date and content) is never used. The core
checks the digests of what is. A store that is slow or away costs one time limit, and is then left alone for a while.
Who writes also keeps the store within its limits of age and size.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
import os
import pathlib
import queue
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from xrt_core.errors import CacheError, OptionError
from xrt_distributed.ending import at_end

T = TypeVar("T")

URL: Final = "XRT_DISTRIBUTED_CACHE"
KEY: Final = "XRT_DISTRIBUTED_CACHE_KEY"
KEY_FILE: Final = "XRT_DISTRIBUTED_CACHE_KEY_FILE"
MODE: Final = "XRT_DISTRIBUTED_CACHE_MODE"
SECONDS: Final = "XRT_DISTRIBUTED_CACHE_SECONDS"
DAYS: Final = "XRT_DISTRIBUTED_CACHE_DAYS"
SIZE: Final = "XRT_DISTRIBUTED_CACHE_SIZE"

_MAGIC: Final = b"XRTSHARED2"
_DATE: Final = struct.Struct(">d")  # seconds since the epoch
_HEAD: Final = len(_MAGIC) + _DATE.size + hashlib.sha256().digest_size
_TRIM_SECONDS: Final = 3600.0  # between two looks at what the store holds
_OBJECTS: Final = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"}
"""Protocols of stores of objects, which show what was written whole or not at all, and have no folders."""
_BACKOFF_SECONDS: Final = 60.0  # how long a store that failed is left alone
_WAITING: Final = 64  # entries that wait to be written; more are dropped
_LEAST_KEY: Final = 16


def from_environment(environ: Mapping[str, str] | None = None) -> list[SharedCache]:
    """The cache that the variables name, or none. Raises OptionError for what they cannot mean."""
    environ = os.environ if environ is None else environ
    url = environ.get(URL, "").strip()
    if not url:
        return []
    mode = environ.get(MODE, "readwrite")
    if mode not in ("readwrite", "read"):
        raise OptionError(f"{MODE}={mode!r}: it takes 'readwrite' or 'read'")
    seconds = _number(environ, SECONDS, "a number of seconds", 5.0)
    days = _number(environ, DAYS, "a number of days", None)
    size = _number(environ, SIZE, "a number of bytes", None)
    assert seconds is not None
    if file := environ.get(KEY_FILE):
        try:
            key = pathlib.Path(file).read_bytes().strip()
        except OSError as e:
            raise OptionError(f"{KEY_FILE}={file!r} cannot be read: {e.strerror or e}") from None
    else:
        key = environ.get(KEY, "").encode()
    if len(key) < _LEAST_KEY:
        raise OptionError(
            f"the shared cache {url!r} needs a key of at least {_LEAST_KEY} bytes, in {KEY_FILE} or {KEY}: entries "
            "are code, and only those that it signed are loaded (openssl rand -hex 32 makes one)"
        )
    return [SharedCache(url, key, write=mode == "readwrite", seconds=seconds, days=days, size=size)]


@functools.cache
def _opened(url: str, variables: tuple[tuple[str, str], ...]) -> SharedCache:
    (cache,) = from_environment({**dict(variables), URL: url})
    return cache


def open_url(url: str) -> SharedCache:
    """The cache at a URL, one for the process. Raises OptionError as `from_environment` does."""
    names = (KEY, KEY_FILE, MODE, SECONDS, DAYS, SIZE)
    return _opened(url, tuple((n, os.environ[n]) for n in names if n in os.environ))


def _number(environ: Mapping[str, str], name: str, form: str, default: float | None) -> float | None:
    if not environ.get(name, "").strip():
        return default
    try:
        found = float(environ[name])
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise OptionError(f"{name}={environ[name]!r}: it takes {form} above 0")
    return found


@dataclass(slots=True)
class _Answer:
    """What a call in another thread gave."""

    value: Any = None
    error: BaseException | None = None


class SharedCache:
    """Entries by name in a store. seconds: the time limit of a reading; entries are written by a thread of its own.

    days: entries that are older are not used, and go; size: bytes that all entries may take, the oldest going first.
    None: no limit. Raises OptionError for a URL that fsspec does not take, ImportErrors of its packages included.
    """

    def __init__(
        self, url: str, key: bytes, *, write: bool = True, seconds: float = 5.0, days: float | None = None,
        size: float | None = None,
    ) -> None:  # fmt: skip
        self._key, self._write, self._seconds = key, write, seconds
        self._age, self._size, self._trim_at = None if days is None else days * 86400, size, 0.0
        self._url = url
        self._waiting: queue.Queue[tuple[str, bytes]] = queue.Queue(_WAITING)
        self._writer: tuple[int, threading.Thread] | None = None
        self._retry_at = 0.0
        self.failures: list[str] = []
        try:
            import fsspec

            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as e:
            raise OptionError(f"the shared cache {url!r}: {e}") from None
        self._root = str(root).rstrip("/")

    def fetch(self, name: str) -> bytes | None:
        """The content of an entry, None where there is none or it is too old, or the store is in back-off.

        Raises CacheError for a bad signature and a slow store, and what the store raises.
        """
        if time.monotonic() < self._retry_at:
            return None
        try:
            raw = self._within(lambda: self._read(name))
        except Exception:
            self._retry_at = time.monotonic() + _BACKOFF_SECONDS
            raise
        if raw is None:
            return None
        date, content = raw[len(_MAGIC) : len(_MAGIC) + _DATE.size], raw[_HEAD:]
        signature = raw[len(_MAGIC) + _DATE.size : _HEAD]
        if not raw.startswith(_MAGIC) or not hmac.compare_digest(signature, self._signature(name, date, content)):
            raise CacheError(f"{self._url}: the entry {name} has no signature of this key, and is not used")
        if self._age is not None and time.time() - _DATE.unpack(date)[0] > self._age:
            return None
        return content

    def offer(self, name: str, content: bytes) -> None:
        """Have an entry written in the background; dropped where the store is in back-off or too many wait."""
        if not self._write or time.monotonic() < self._retry_at:
            return
        try:
            self._waiting.put_nowait((name, content))
        except queue.Full:
            return
        if self._writer is None or self._writer[0] != os.getpid():  # a forked process has no threads
            thread = threading.Thread(target=self._write_all, daemon=True, name="xrt-shared-cache")
            self._writer = os.getpid(), thread
            thread.start()
            at_end(functools.partial(self.flush, 2 * self._seconds))

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait until what was offered is written, not longer than this; whether it is."""
        deadline = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._waiting.unfinished_tasks

    def trim(self) -> int:
        """Remove what is beyond the limits of age and size, and how many entries that were. Raises what the store
        raises; a reader whose entry has gone has a miss."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._root, detail=True).items()
        rows = sorted(((_date_of(info), int(info.get("size") or 0), name) for name, info in found), reverse=True)
        kept, removed, now = 0, [], time.time()
        for date, size, name in rows:
            kept += size
            if (self._size is not None and kept > self._size) or (self._age is not None and now - date > self._age):
                kept -= size
                removed.append(name)
        for name in removed:
            try:
                self._fs.rm_file(name)
            except FileNotFoundError:  # another one was faster
                continue
        return len(removed)

    def _write_all(self) -> None:
        while True:
            name, content = self._waiting.get()
            try:
                if time.monotonic() >= self._retry_at:
                    date = _DATE.pack(time.time())
                    self._put(self._path(name), _MAGIC + date + self._signature(name, date, content) + content)
                    if (self._age or self._size) and time.monotonic() >= self._trim_at:
                        self._trim_at = time.monotonic() + _TRIM_SECONDS
                        self.trim()
            except Exception as e:
                self._retry_at = time.monotonic() + _BACKOFF_SECONDS
                self.failures = [*self.failures[-9:], f"{name}: {type(e).__name__}: {e}"]
            finally:
                self._waiting.task_done()

    def _put(self, path: str, raw: bytes) -> None:
        """Write a file as a whole: readers see all of it or nothing."""
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        if protocols & _OBJECTS:
            self._fs.pipe_file(path, raw)
            return
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        made = f"{path}.{uuid.uuid4().hex}.tmp"
        self._fs.pipe_file(made, raw)
        if "file" in protocols:
            os.replace(made, path)
        else:
            self._fs.mv(made, path)

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"

    def _signature(self, name: str, date: bytes, content: bytes) -> bytes:
        found = hmac.new(self._key, _MAGIC + date + name.encode() + b"\0", hashlib.sha256)
        found.update(content)
        return found.digest()

    def _within(self, call: Callable[[], T]) -> T:
        """What a call returns within the time limit; a call that takes longer is left to itself."""
        answer, done = _Answer(), threading.Event()

        def run() -> None:
            try:
                answer.value = call()
            except BaseException as e:
                answer.error = e
            done.set()

        threading.Thread(target=run, daemon=True, name="xrt-shared-cache-read").start()
        if not done.wait(self._seconds):
            limits = f"within {self._seconds:g} s; it is left alone for {_BACKOFF_SECONDS:g} s"
            raise CacheError(f"{self._url} did not answer {limits}")
        if answer.error is not None:
            raise answer.error
        found: T = answer.value
        return found

    def __repr__(self) -> str:
        return f"<SharedCache {self._url}>"


def _date_of(info: Mapping[str, Any]) -> float:
    """When an entry was written, by what its store tells; now where it does not."""
    for name in ("LastModified", "updated", "last_modified", "mtime", "created"):
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
