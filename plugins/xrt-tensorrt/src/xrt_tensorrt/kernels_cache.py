"""TensorRT-RTX's runtime cache, kept in XRT's cache folder: what it compiled for one engine is not compiled again.

TensorRT-RTX compiles an engine's kernels for the GPU at hand when a context is made and first run. Its cache refuses
bytes of another GPU, driver or version by itself.
https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/inference-library/work-with-runtime-cache.html
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import threading
from typing import Any, Final

from xrt_core.ir.function import digest
from xrt_tensorrt import timing

log = logging.getLogger("xrt.tensorrt")

_MOST_BYTES: Final = 512 << 20
"""Of all files together; the oldest go first."""


class KernelsCache:
    """The runtime cache of one engine, for all its contexts; it must outlive them. Safe to use from many threads.

    What goes wrong with it costs the time that it would have saved, and nothing else.
    """

    def __init__(self, engine_bytes: bytes | memoryview) -> None:
        self.path = timing.folder() / f"kernels-{digest(engine_bytes)}.bin"
        self._cache: Any = None
        self._kept = b""
        self._lock = threading.Lock()

    def give(self, config: Any) -> None:
        """Let contexts of a runtime configuration use the cache, with what earlier processes left."""
        try:
            with self._lock:
                if self._cache is None:
                    cache = config.create_runtime_cache()
                    found = timing.read(self.path)
                    if found and cache.deserialize(found):
                        self._kept = found
                    self._cache = cache
                config.set_runtime_cache(self._cache)
        except Exception as e:  # see above
            log.debug("the runtime cache cannot be used: %s", e)

    def keep(self) -> None:
        """Write what the cache knows, if that is not in the file yet."""
        try:
            with self._lock:
                if self._cache is None:
                    return
                known = bytes(memoryview(self._cache.serialize()))
                if known != self._kept:
                    timing.write(self.path, known)
                    self._kept = known
                    _prune(self.path.parent)
        except Exception as e:  # see above
            log.debug("the runtime cache cannot be kept: %s", e)


def _prune(folder: pathlib.Path) -> None:
    """Delete the oldest files while all together are too large."""
    found = []
    for path in folder.glob("kernels-*.bin"):
        with contextlib.suppress(OSError):  # another process deletes as well
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= _MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        total -= size
