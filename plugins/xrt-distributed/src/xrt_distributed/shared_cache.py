"""The shared cache: entries of the disk cache in a store that fsspec reaches, signed with a key.

Entries hold code, so that what has no valid signature (HMAC-SHA256 of name and content) is never used. The core
checks the digests of what is. A store that is slow or away costs one time limit, and is then left alone for a while.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import os
import pathlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from xrt_core.errors import CacheError, OptionError

T = TypeVar("T")

URL: Final = "XRT_DISTRIBUTED_CACHE"
KEY: Final = "XRT_DISTRIBUTED_CACHE_KEY"
KEY_FILE: Final = "XRT_DISTRIBUTED_CACHE_KEY_FILE"
MODE: Final = "XRT_DISTRIBUTED_CACHE_MODE"
SECONDS: Final = "XRT_DISTRIBUTED_CACHE_SECONDS"

_MAGIC: Final = b"XRTSHARED1"
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
    try:
        seconds = float(environ.get(SECONDS, "5"))
    except ValueError:
        raise OptionError(f"{SECONDS}={environ[SECONDS]!r}: it takes a number of seconds") from None
    if file := environ.get(KEY_FILE):
        try:
            key = pathlib.Path(file).read_bytes().strip()
        except OSError as e:
            raise OptionError(f"{KEY_FILE}={file!r} cannot be read: {e.strerror or e}") from None
    else:
        key = environ.get(KEY, "").encode()
    if len(key) < _LEAST_KEY:
        raise OptionError(
            f"{URL}={url!r} needs a key of at least {_LEAST_KEY} bytes, in {KEY_FILE} or {KEY}: entries are code, and "
            "only those that it signed are loaded (openssl rand -hex 32 makes one)"
        )
    return [SharedCache(url, key, write=mode == "readwrite", seconds=seconds)]


@dataclass(slots=True)
class _Answer:
    """What a call in another thread gave."""

    value: Any = None
    error: BaseException | None = None


class SharedCache:
    """Entries by name in a store. seconds: the time limit of a reading; entries are written by a thread of its own.

    Raises OptionError for a URL that fsspec does not take, ImportErrors of its packages included.
    """

    def __init__(self, url: str, key: bytes, *, write: bool = True, seconds: float = 5.0) -> None:
        self._key, self._write, self._seconds = key, write, seconds
        self._url = url
        self._waiting: queue.Queue[tuple[str, bytes]] = queue.Queue(_WAITING)
        self._writer: tuple[int, threading.Thread] | None = None
        self._retry_at = 0.0
        self.failures: list[str] = []
        try:
            import fsspec

            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as e:
            raise OptionError(f"{URL}={url!r}: {e}") from None
        self._root = str(root).rstrip("/")

    def fetch(self, name: str) -> bytes | None:
        """The content of an entry, None where there is none or the store is in back-off.

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
        head = len(_MAGIC) + hashlib.sha256().digest_size
        signature, content = raw[len(_MAGIC) : head], raw[head:]
        if not raw.startswith(_MAGIC) or not hmac.compare_digest(signature, self._signature(name, content)):
            raise CacheError(f"{self._url}: the entry {name} has no signature of this key, and is not used")
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
            atexit.register(self.flush, 2 * self._seconds)

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait until what was offered is written, not longer than this; whether it is."""
        deadline = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._waiting.unfinished_tasks

    def _write_all(self) -> None:
        while True:
            name, content = self._waiting.get()
            try:
                if time.monotonic() >= self._retry_at:
                    self._put(self._path(name), _MAGIC + self._signature(name, content) + content)
            except Exception as e:
                self._retry_at = time.monotonic() + _BACKOFF_SECONDS
                self.failures = [*self.failures[-9:], f"{name}: {type(e).__name__}: {e}"]
            finally:
                self._waiting.task_done()

    def _put(self, path: str, raw: bytes) -> None:
        """Write a file as a whole: readers see all of it or nothing."""
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if "file" not in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)):
            self._fs.pipe_file(path, raw)  # stores of objects show what was written whole
            return
        made = f"{path}.{uuid.uuid4().hex}.tmp"
        self._fs.pipe_file(made, raw)
        os.replace(made, path)

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}"

    def _signature(self, name: str, content: bytes) -> bytes:
        found = hmac.new(self._key, _MAGIC + name.encode() + b"\0", hashlib.sha256)
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
