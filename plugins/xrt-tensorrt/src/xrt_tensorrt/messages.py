"""What TensorRT says: messages in the logger "xrt.tensorrt", and the last error lines for the call they belong to."""

from __future__ import annotations

import collections
import logging
import re
import threading
from typing import Any, Final

log = logging.getLogger("xrt.tensorrt")

_LINES: Final = 4


class Messages:
    """The library's error lines, for the call that they belong to."""

    def __init__(self) -> None:
        self._here = threading.local()

    def collect(self) -> Collected:
        """A context whose value is the list of the last error lines that this thread's calls make."""
        return Collected(self._here)

    def add(self, line: str) -> None:
        """An error line; kept if this thread is collecting."""
        found = getattr(self._here, "lines", None)
        if found is not None:
            found.append(line)


class Collected:
    def __init__(self, here: threading.local) -> None:
        self._here = here
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)

    def __enter__(self) -> collections.deque[str]:
        self._outer = getattr(self._here, "lines", None)
        self._here.lines = self._lines
        return self._lines

    def __exit__(self, *_: object) -> None:
        self._here.lines = self._outer


def make_logger(trt: Any) -> Any:
    """An ILogger that writes to the logger "xrt.tensorrt"; the library's info is our debug."""
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.DEBUG,
        severity.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages = Messages()

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity)
            if level is None:  # verbose: hundreds of lines for each layer
                return
            if level == logging.ERROR:
                self.messages.add(one_line(message))
                level = logging.DEBUG  # who asked gets it in an exception
            if log.isEnabledFor(level):
                log.log(level, "%s", message)

    return Logger()


def in_words(text: str) -> str:
    """An assertion of the parser's source without its code, where it has a message beside it."""
    line = one_line(text)
    if "Plugin not found" in line:  # what it looks for where it knows no operator of the name
        return "it does not know the operator"
    found = re.fullmatch(r'.* && "(.+)"', line)
    return found[1] if found else "it gives no reason" if line == "false" else line


def one_line(text: str) -> str:
    return " ".join(text.split()).removeprefix("Assertion failed: ")
