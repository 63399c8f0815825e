"""The cache's folder: where it is, and whether what lies there can be trusted."""

from __future__ import annotations

import os
import pathlib
import stat
from typing import BinaryIO

from xrt_core.errors import CacheError

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
