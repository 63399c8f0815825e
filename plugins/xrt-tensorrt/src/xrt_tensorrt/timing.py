"""TensorRT's timing cache, kept in XRT's cache folder: a tactic that was timed once is not timed again."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Final

from xrt_core.files import PRIVATE, replace_file
from xrt_tensorrt import _cuda
from xrt_tensorrt._toolkit import Toolkit

_MOST: Final = 256 << 20
_WAIT_SECONDS: Final = 10.0


@contextlib.contextmanager
def kept(toolkit: Toolkit, config: Any, wanted: bool) -> Iterator[None]:
    """Within the body, `config` builds with what earlier builds timed; afterwards the file knows what is new.

    Does nothing for TensorRT-RTX, which times nothing when it builds. What goes wrong with the file costs the time that
    it would have saved, and nothing else.
    """
    if toolkit.is_rtx or not wanted:
        yield
        return
    path = folder() / f"timing-{_label(toolkit)}.bin"
    cache = config.create_timing_cache(read(path))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    yield
    with contextlib.suppress(Exception):  # see above
        _merge(path, config)


def folder() -> pathlib.Path:
    """Where the file lies: beside XRT's executables."""
    given = os.environ.get("XRT_CACHE_DIR", "").strip()
    if given:
        return pathlib.Path(given).expanduser() / "tensorrt"
    import platformdirs

    return pathlib.Path(platformdirs.user_cache_dir("xrt", appauthor=False)) / "tensorrt"


def _label(toolkit: Toolkit) -> str:
    found = _cuda.capability()
    return re.sub(
        r"[^\w.]+", "-", f"{toolkit.flavour}-{toolkit.version}-sm_{found[0] if found else 0}{found[1] if found else 0}"
    )


def read(path: pathlib.Path) -> bytes:
    """A file of the folder; nothing where there is none, or where it is not ours."""
    try:
        status = path.stat()
        if status.st_size > _MOST or (hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0)):
            return b""
        return path.read_bytes()
    except OSError:
        return b""


def _merge(path: pathlib.Path, config: Any) -> None:
    """Write what this build knows together with what other processes wrote meanwhile."""
    from filelock import FileLock

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), mode=0o600).acquire(timeout=_WAIT_SECONDS):
        mine = config.get_timing_cache()
        theirs = read(path)
        if theirs:
            other = config.create_timing_cache(theirs)
            if other is not None:
                mine.combine(other, ignore_mismatch=False)
        write(path, bytes(mine.serialize()))


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file of the folder, at once for who reads it meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replace_file(path, mode=PRIVATE) as file:
        file.write(content)
