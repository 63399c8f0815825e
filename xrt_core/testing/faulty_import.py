"""An engine's module whose import fails, as one does whose library is broken."""

from __future__ import annotations

MESSAGE = "libfaulty.so.1: cannot open shared object file: No such file or directory"

raise ImportError(MESSAGE)
