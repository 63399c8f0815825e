"""The temporary folder of this process's guard: jobs, logs, executables on their way. It goes with the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
from typing import Final

_PREFIX: Final = "xrt-guard-"
_NAME: Final = re.compile(rf"{_PREFIX}(\d+)-\w+")
_lock = threading.Lock()
_folder: pathlib.Path | None = None
_owner = 0


def new_folder(what: str) -> pathlib.Path:
    """A new empty folder that only this user can read. Raises OSError."""
    return pathlib.Path(tempfile.mkdtemp(prefix=f"{what}-", dir=process_folder()))


def process_folder() -> pathlib.Path:
    """The folder that holds all others; made at first use, when those of processes that were killed are taken away."""
    global _folder, _owner
    with _lock:
        if _folder is None or _owner != os.getpid() or not _folder.is_dir():  # a forked process has its own
            _sweep(pathlib.Path(tempfile.gettempdir()))
            _folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
            _owner = os.getpid()
            atexit.register(_remove, _folder, _owner)
        return _folder


def _remove(folder: pathlib.Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: pathlib.Path) -> None:
    """Take away what processes of this user left that are no more."""
    if not hasattr(os, "geteuid"):
        return
    with contextlib.suppress(OSError), os.scandir(parent) as found:
        for entry in found:
            named = _NAME.fullmatch(entry.name)
            with contextlib.suppress(OSError):
                if named and entry.stat(follow_symlinks=False).st_uid == os.geteuid() and not _is_alive(int(named[1])):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
