"""Atomic replacement of files: a reader sees the old file or the complete new one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import BinaryIO, Final

PRIVATE: Final = 0o600
"""The mode of a file that its owner alone may read and write."""


@contextlib.contextmanager
def replace_file(target: str | os.PathLike[str], *, mode: int = 0o666, sync: bool = False) -> Iterator[BinaryIO]:
    """A file open for writing (and seeking) that becomes `target` when the body ends, in the place of an older one.

    It is a temporary file in the same folder, `.NAME.PID.RANDOM.tmp`, that is renamed; a body that raises leaves
    nothing behind. mode: its permission bits, less the process's umask. sync: flush to the storage device before the
    rename, so that a power failure does not leave an empty file. Raises OSError.
    """
    path = pathlib.Path(target)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        # the system applies the umask at creation; asking for it with os.umask would change it for all threads
        descriptor = os.open(temporary, flags, mode)
    except OSError as e:
        raise type(e)(e.errno, e.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
