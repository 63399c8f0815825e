"""Files, and what else comes from outside the process: atomic replacement, and decoding by declared types.

A file that is replaced is the old one or the complete new one to its readers. Files, archives and answers of other
processes may be damaged or crafted. Whoever reads one declares its type (a frozen dataclass, with bounds as
`msgspec.Meta`), decodes its JSON by `decode`, and uses it within `reading`; then nothing but the caller's XRTError,
which names origin and fault, comes out, whatever the content is.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import msgspec
import numpy as np

from xrt_core.errors import XRTError

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


T = TypeVar("T")

MOST_NESTED: Final = 64
"""Levels of lists and objects within each other; nothing that XRT writes has a quarter of them."""

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A count, an index, a dimension or a number of bytes."""

_TEXT: Final = re.compile(rb'(?s)"(?:[^"\\]|\\.)*+"?')
_ALL_BUT_BRACKETS: Final = bytes(c for c in range(256) if c not in b"[]{}")
_STEPS: Final = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def decode(content: bytes | memoryview, type: type[T], where: str, error: type[XRTError]) -> T:
    """The value of `type` that JSON in UTF-8 holds. where: the subject of messages ("model.xrt").

    Fields that the type does not declare are ignored. Raises `error`, with the path of the fault, for anything else
    than JSON of this type, and for more than `MOST_NESTED` levels.
    """
    content = bytes(content)
    with reading(where, error):
        steps = _STEPS[np.frombuffer(_TEXT.sub(b"", content).translate(None, _ALL_BUT_BRACKETS), np.uint8)]
        if steps.size and int(np.cumsum(steps, dtype=np.int64).max()) > MOST_NESTED:
            raise ValueError(f"it is nested more than {MOST_NESTED} levels deep")
        return msgspec.json.decode(content, type=type)


def convert(value: Any, type: type[T], where: str, error: type[XRTError]) -> T:
    """As `decode`, for what some other reader of JSON has made of it: dicts, lists, numbers and text."""
    with reading(where, error):
        return msgspec.convert(value, type)


def encode(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> bytes:
    """Plain data as JSON, for `decode`. default: makes plain data of anything else.

    Unicode text comes back as it is. Half of a surrogate pair, which is no text but may stand in a path or a name, is
    written as the six characters of its escape.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=default)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda m: rf"\\u{ord(m[0]):04x}", text).encode()


def storable(text: str) -> str:
    """The text as `decode` gives it after `encode`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda m: rf"\u{ord(m[0]):04x}", text)
    return text


@contextlib.contextmanager
def reading(where: str, error: type[XRTError]) -> Iterator[None]:
    """Whatever is raised while outside data is used comes out as `error`, with the fault; its own kind is left alone.

    A list of expected exceptions would have to be complete for every library that takes the data.
    """
    try:
        yield
    except error:
        raise
    except OSError as e:
        raise error(f"{where} cannot be read: {e.strerror or e}") from e
    except XRTError as e:
        raise error(f"{where}: {e}") from e
    except Exception as e:
        raise error(f"{where} is damaged: {_fault(e)}") from e


def _fault(e: Exception) -> str:
    kind = "" if isinstance(e, msgspec.MsgspecError) or type(e) is ValueError else f"{type(e).__name__}: "
    return f"{kind}{e}"[:500]


def decompress(content: bytes | memoryview, limit: int) -> bytes:
    """What zlib compressed, of at most `limit` bytes. Raises ValueError for more, and zlib.error."""
    machine = zlib.decompressobj()
    found = machine.decompress(content, limit + 1)
    if len(found) > limit:
        raise ValueError(f"it would unpack to more than {limit} bytes")
    if not machine.eof:
        raise ValueError("its compressed part is cut off")
    return found
