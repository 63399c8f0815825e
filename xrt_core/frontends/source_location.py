"""Source locations of user code during tracing; error messages begin with them."""

from __future__ import annotations

import contextlib
import pathlib
import sys

from xrt_core.errors import TraceError
from xrt_core.ir.graph import SourceLocation

_PACKAGE = str(pathlib.Path(__file__).resolve().parents[1])
_ours: dict[str, bool] = {}  # file name -> whether it belongs to this package


def user_location() -> SourceLocation | None:
    """Return the source line of the innermost stack frame outside this package."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = _ours.get(code.co_filename)
        if ours is None:
            ours = _ours[code.co_filename] = _is_internal(code.co_filename)
        if not ours:
            return SourceLocation(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_internal(filename: str) -> bool:
    standard = filename == contextlib.__file__ or filename.startswith("<frozen")
    return standard or pathlib.Path(_PACKAGE) in pathlib.Path(filename).parents


def trace_error(message: str) -> TraceError:
    """Return a TraceError whose message begins with the user's source line."""
    return TraceError(located(message))


def located(message: str) -> str:
    """Prefix `message` with the user's source line, if there is one."""
    where = user_location()
    return message if where is None else f"{where}: {message}"
